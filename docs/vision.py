"""torchvision, whose wheel may be built for another torch than the one here (for CUDA, beside a torch for CPUs).

timm and transformers import it where it is installed, and its import describes operators that such a wheel does not bring. No page
uses them: import this module first.
"""

from __future__ import annotations

from typing import Any

import torch

_REGISTER = torch.library.register_fake


def _register_what_there_is(name: Any, *arguments: Any, **options: Any) -> Any:
    if isinstance(name, str) and name.startswith("torchvision::"):
        return lambda function: function
    return _REGISTER(name, *arguments, **options)


torch.library.register_fake = _register_what_there_is  # type: ignore[assignment]
try:
    import torchvision  # noqa: F401
finally:
    torch.library.register_fake = _REGISTER
