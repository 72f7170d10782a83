"""Hardware that need not be there."""

from flexdilated.core.hardware import Hardware, cuda_level


def simulate(name: str) -> Hardware:
    """The hardware that a name stands for: `"cpu"`, `"mps"`, or a CUDA level such as `"sm_75"`."""
    if not name.startswith("sm_"):
        return Hardware(name)
    return cuda_level(divmod(int(name.removeprefix("sm_")), 10))
