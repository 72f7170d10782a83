"""The Python of docs/transformers.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

DOCS = Path(__file__).parents[3] / "docs" / "transformers.md"
SIZES = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 4}
LONG, SHORT = "(2048, 4096, 8192)", "(8, 16, 32)"  # the second shows at the length of a test


@torch.no_grad()
def test_the_example_loads_a_dense_model_dilated(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    dense.save_pretrained(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    tokens = torch.randint(31, (2, 43))
    models = []
    for code in (block, block.replace(LONG, SHORT)):
        names: dict[str, Any] = {"folder": tmp_path}
        exec(compile(code, str(DOCS), "exec"), names)
        model = names["model"]
        assert model.config._attn_implementation == "flexdilated"
        assert all(torch.equal(p, dense.state_dict()[name]) for name, p in model.state_dict().items())
        models.append(model.eval())
    whole, short = models
    assert DilatedPattern.from_dict(whole.config.dilated_pattern) == DilatedPattern((2048, 4096, 8192), (1, 2, 4))
    assert (short(tokens).logits - dense(tokens).logits).abs().max() > 1e-4  # it was our attention that ran
    assert (short(tokens).logits - whole(tokens).logits).abs().max() > 1e-4
