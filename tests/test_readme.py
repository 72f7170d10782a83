"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's own use of it
def test_examples_run_and_agree() -> None:
    torch._dynamo.reset()
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    q, k, v, pattern = (names[name] for name in ("q", "k", "v", "pattern"))
    expected = names["dilated_attention"](q, k, v, pattern)  # type: ignore[operator]
    torch.testing.assert_close(names["y"].transpose(1, 2), expected, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]
