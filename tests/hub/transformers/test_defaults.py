"""The patterns that `set_pattern` is advised to take, in a small Llama: gradients and generated tokens are the definition's."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from flexdilated import DilatedPattern
from tests.cases import randomised
from tests.doors.cases import multiplicities
from tests.hub.transformers.models import BATCH, DECODER, build, longnet, make_dense, run
from tests.tolerances import EXACT

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers.patterns import pattern_of  # noqa: E402

TOKENS, PROMPT, KV_HEADS = 67, 19, DECODER["num_key_value_heads"]
PATTERNS: dict[str, tuple[DilatedPattern | Literal["auto"], dict[str, Any]]] = {
    "causal": (DilatedPattern.causal(TOKENS, KV_HEADS), {}),
    "auto": ("auto", {"tokens": TOKENS, "budget": 0.5}),
    "longnet": (DilatedPattern.longnet(), {}),
}


@pytest.mark.filterwarnings("ignore:pattern with segments:UserWarning")  # LongNet's, of two heads
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_and_generated_tokens_are_those_of_the_definition(name: str) -> None:
    pattern, options = PATTERNS[name]
    model = randomised(build("Llama", None).double())
    dilated = pattern_of(hub.set_pattern(model, pattern, **options))
    prompt = torch.randint(2, 31, (BATCH, PROMPT))
    tokens = model.generate(prompt, max_new_tokens=TOKENS - PROMPT, do_sample=False)
    assert tokens.shape == (BATCH, TOKENS)
    logits, grads = run(model, input_ids=tokens)
    assert torch.equal(logits[:, PROMPT - 1 : -1].argmax(-1), tokens[:, PROMPT:])
    make_dense(model)
    group = DECODER["num_attention_heads"] // KV_HEADS
    counts = multiplicities(dilated, TOKENS, KV_HEADS, is_causal=True).repeat_interleave(group, 0)
    mask = counts.double().log().expand(BATCH, -1, -1, -1)
    torch.testing.assert_close((logits, grads), run(model, input_ids=tokens, attention_mask=mask), **EXACT)


def test_generated_tokens_of_longnet_are_those_of_the_whole_forward() -> None:
    model = randomised(longnet().double())
    tokens = model.generate(torch.randint(2, 31, (BATCH, PROMPT)), max_new_tokens=TOKENS - PROMPT, do_sample=False)
    assert torch.equal(model(tokens).logits[:, PROMPT - 1 : -1].argmax(-1), tokens[:, PROMPT:])
