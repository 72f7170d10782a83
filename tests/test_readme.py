"""The README's Python runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

from flexdilated import attention_map

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's own use of it
def test_example_runs_and_is_right() -> None:
    torch._dynamo.reset()
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(compile(block, str(README), "exec"), names)
    q, k, v, out = (names[name].detach() for name in ("q", "k", "v", "out"))
    queries = torch.arange(0, q.shape[1], 499)
    weights = attention_map(q, k, names["pattern"], queries=queries, is_causal=True)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.einsum("bhqn,bnhd->bqhd", weights, v), out[:, queries], atol=1e-5, rtol=1e-5)
    assert all(bool(names[name].grad.isfinite().all()) for name in ("q", "k", "v"))  # type: ignore[union-attr]
    assert names["y"].shape == names["x"].shape


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_links_of_the_package_stand_alone() -> None:
    """What an index shows is no folder: every link is absolute there."""
    page = importlib.metadata.metadata("flexdilated").get_payload()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", README.read_text()))
    assert [link for link in links if not link.startswith("https://")] == []
