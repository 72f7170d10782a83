"""Models published elsewhere: their wiring, names and weights around this library's attention."""

__all__: list[str] = []  # its modules are imported by name: `import *` must not hide `transformers`
