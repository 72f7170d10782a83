"""The README's Python runs as it stands, and its links lead somewhere."""

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

from flexdilated import DilatedPattern, attention_map, dilated_attention

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


@pytest.mark.slow
def test_example_runs_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(compile(block, str(README), "exec"), names)
    q, k, v, out = (names[name].detach() for name in ("q", "k", "v", "out"))
    queries = torch.arange(0, q.shape[1], 499)
    weights = attention_map(q, k, names["pattern"], queries=queries, is_causal=True)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.einsum("bhqn,bnhd->bqhd", weights, v), out[:, queries], atol=1e-5, rtol=1e-5)
    assert all(bool(names[name].grad.isfinite().all()) for name in ("q", "k", "v"))  # type: ignore[union-attr]
    assert names["y"].shape == names["x"].shape
    (printed,) = re.findall(r"```text\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start.md"])
def test_first_example_is_connected(page: str) -> None:
    """With equal scores, the gradient of `out` with respect to `v` is the matrix of weights; at a 16th of the example's length."""
    text = (ROOT / page).read_text()
    ((length, heads),) = re.findall(r"DilatedPattern\.causal\((\d+_\d+), num_kv_heads=(\d+)\)", text)
    assert f"torch.randn(1, {length}, {heads}, " in text
    num_tokens, num_kv_heads = int(length) // 16, int(heads)
    assert DilatedPattern.causal(int(length), num_kv_heads).crosses_boundaries(int(length), num_kv_heads)
    pattern = DilatedPattern.causal(num_tokens, num_kv_heads)
    v = torch.eye(num_tokens, dtype=torch.float64)[:, None].expand(-1, num_kv_heads, -1)[None]
    layer = dilated_attention(0 * v, 0 * v, v, pattern, is_causal=True)[0].mean(dim=1)
    reached = torch.linalg.matrix_power(layer, 4) > 0
    assert torch.equal(reached, torch.ones_like(reached).tril())


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
