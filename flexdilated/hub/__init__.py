"""Models published elsewhere: their wiring, names and weights around this library's attention."""
