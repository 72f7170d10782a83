"""The cache of bounded memory: what it holds, takes back and refuses; test_decoding.py compares its values."""

import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from tests.hub.transformers import models
from tests.hub.transformers.models import decode
from tests.tolerances import EXACT

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers import DilatedCache  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402


@pytest.fixture(autouse=True)
def _without_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("v_head_dim", [5, 11])
def test_values_of_another_width_are_decoded(v_head_dim: int) -> None:
    module = models.build("Llama", models.RAGGED).model.layers[0].self_attn
    q, k = (torch.randn(models.BATCH, heads, models.TOKENS, 8, dtype=torch.float64) for heads in (6, 2))
    v = torch.randn(models.BATCH, 2, models.TOKENS, v_head_dim, dtype=torch.float64)
    expected, _ = hub.dilated_attention_forward(module, q, k, v, None)
    cache, parts = DilatedCache(), []
    for first, last in ((0, 9), (9, 10), (10, models.TOKENS)):
        keys, values = cache.update(k[:, :, first:last], v[:, :, first:last], 0)
        mask = hub.dilated_attention_positions(models.BATCH, last - first, last - first, q_offset=first, kv_offset=first)
        parts.append(hub.dilated_attention_forward(module, q[:, :, first:last], keys, values, mask)[0])
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, **EXACT)


def test_rejected_tokens_leave_no_trace() -> None:
    model, tokens = models.build("Llama", models.GROUPED).double(), models.draw_tokens()
    expected, cache = model(tokens, use_cache=False).logits, DilatedCache()
    cache.activate_past_recording()
    done, drafts = 0, [13, 5, 4, 7, 3, 6]
    for length, rejected in zip(drafts, [0, 4, 2, 3, 3, 5]):
        wrong = torch.cat([tokens[:, done : done + length - rejected], models.draw_tokens(num_tokens=rejected)], dim=1)
        logits = model(wrong, **{CACHE: cache}, use_cache=True).logits
        kept = length - rejected
        torch.testing.assert_close(logits[:, :kept], expected[:, done : done + kept], **EXACT)
        cache.crop(-rejected)
        done += kept
        assert cache.get_seq_length() == done
    torch.testing.assert_close(model(tokens[:, done:], **{CACHE: cache}, use_cache=True).logits, expected[:, done:], **EXACT)


def test_sequences_are_selected_and_repeated() -> None:
    model, tokens = models.build("Llama", models.RAGGED).double(), models.draw_tokens()
    expected, cache = model(tokens, use_cache=False).logits, DilatedCache()
    decode(model, tokens[:, :14], cache, [14])
    cache.batch_select_indices(torch.tensor([2, 0]))
    given = {CACHE: cache, "use_cache": True}
    torch.testing.assert_close(model(tokens[[2, 0], 14:17], **given).logits, expected[[2, 0], 14:17], **EXACT)
    cache.batch_repeat_interleave(2)
    rows = [2, 2, 0, 0]
    torch.testing.assert_close(model(tokens[rows, 17:20], **given).logits, expected[rows, 17:20], **EXACT)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(decode(model, tokens[rows], cache, [14, 9]), expected[rows], **EXACT)


def bytes_recorded(cache: Any) -> int:
    past = [call for layer in cache.layers for call in layer.kv._past]
    overwritten = [row for call in past for old in call.stores for row in old.rows]
    return sum(x.nbytes for x in (*(x for call in past for x in (call.new.k, call.new.v)), *overwritten))


def test_memory_does_not_grow_with_the_context() -> None:
    model = models.build("Llama", models.RAGGED, max_position_embeddings=1024)
    cache, sizes = DilatedCache(), []
    for _ in range(4):
        decode(model, models.draw_tokens(1, 130), cache, [130])
        sizes.append(cache.nbytes - bytes_recorded(cache))  # older versions of the library have every call recorded
    assert cache.get_seq_length() == 520
    assert len(set(sizes)) == 1
    rows = sum(math.ceil(w / r) for w, r in models.RAGGED.branches)
    assert sizes[0] == 2 * 2 * 2 * rows * 8 * 4  # layers, keys and values, key/value heads, rows, elements, bytes


def test_memory_does_not_grow_after_assisted_generation() -> None:
    model = models.build("Llama", models.RAGGED, max_position_embeddings=8192)
    cache, sizes, most = DilatedCache(), [], hub.cache.MOST_RECORDED
    options = {"do_sample": False, "eos_token_id": 1000, "max_new_tokens": 9, "prompt_lookup_num_tokens": 3}
    model.generate(models.draw_tokens(1), **{CACHE: cache}, **options)
    for _ in range(4):
        decode(model, models.draw_tokens(1, most), cache, [64] * (most // 64))
        past = [call for layer in cache.layers for call in layer.kv._past]
        assert sum(call.new.k.shape[1] for call in past) <= 2 * (most + 64)  # in two layers
        sizes.append(cache.nbytes)
    assert len(set(sizes[1:])) == 1
    assert bytes_recorded(cache) > 2 * 2 * most * 2 * 8 * 4  # keys and values of both layers, and what they overwrote
    assert cache.nbytes - bytes_recorded(cache) < 10_000
    cache.crop(-100)  # over several calls
    assert cache.get_seq_length() > 0


def test_calls_after_the_first_compile_once() -> None:
    model, tokens = models.build("Llama", models.RAGGED, num_hidden_layers=1).double(), models.draw_tokens()
    expected, cache = model(tokens, use_cache=False).logits, DilatedCache()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the first call with a DilatedCache must not be compiled"):
        compiled(tokens[:, :9], **{CACHE: DilatedCache()}, use_cache=True)
    decode(model, tokens[:, :9], cache, [9])
    counter.clear()
    for at in range(9, models.TOKENS):
        logits = compiled(tokens[:, at : at + 1], **{CACHE: cache}, use_cache=True).logits
        torch.testing.assert_close(logits, expected[:, at : at + 1], **EXACT)
    assert counter.frame_count <= 2  # a number of tokens seen, then any number


def test_what_a_cache_cannot_hold_is_refused() -> None:
    model, tokens = models.build("Llama", models.RAGGED), models.draw_tokens()
    for length in (2.5, 0):
        with pytest.raises(ValueError, match=f"max_length must be an integer of at least 1, got {length}"):
            DilatedCache(length)
    cache = DilatedCache()
    for mask in (
        models.mask_of([models.TOKENS, 17, 11], "right"),
        models.mask_of([models.TOKENS] * 3, "left").index_fill(1, torch.tensor([5]), 0),
    ):
        with pytest.raises(ValueError, match="attention_mask must have its padding before the tokens of a sequence"):
            model(tokens, attention_mask=mask, **{CACHE: DilatedCache()}, use_cache=True)
    decode(model, tokens[:, :13], cache, [13])
    for layer in cache.layers:
        layer.record_past = False
    model(tokens[:, 13:14], **{CACHE: cache}, use_cache=True)
    with pytest.raises(ValueError, match="length must end in the segment that is stored"):
        cache.crop(-6)
    model.config.dilated_pattern = models.INTERLEAVED
    with pytest.raises(ValueError, match=r"config\.dilated_pattern must stay .* while a DilatedCache is in use"):
        model(tokens[:, 14:], **{CACHE: cache}, use_cache=True)
    model.config.dilated_pattern = models.RAGGED
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="q must not require a gradient"):
        model(tokens, **{CACHE: DilatedCache()}, use_cache=True)


def test_attention_that_does_not_ask_the_cache_is_refused() -> None:
    """Its first outputs are right, since all keys are in the call; later ones would miss those before."""
    model, tokens, cache = models.build("Llama", models.RAGGED), models.draw_tokens(), DilatedCache()
    models.make_dense(model)
    model(tokens[:, :14], **{CACHE: cache}, use_cache=True)
    with pytest.raises(NotImplementedError, match="attn_implementation must be 'flexdilated' with a DilatedCache"):
        model(tokens[:, 14:], **{CACHE: cache}, use_cache=True)


@pytest.mark.parametrize("first", ["conv", "full_attention"])
def test_layers_with_states_of_their_own_are_refused(first: str) -> None:
    kinds = [first, "full_attention" if first == "conv" else "conv"]
    sizes = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = transformers.Lfm2Config(**sizes, num_hidden_layers=2, layer_types=kinds, **models.dilated(models.RAGGED))
    model = transformers.Lfm2ForCausalLM(config).eval()
    with pytest.raises(NotImplementedError, match=f"{CACHE} must be the library's own cache in a model whose layers keep"):
        model(models.draw_tokens(), **{CACHE: DilatedCache()}, use_cache=True)


def test_keys_that_two_layers_share_are_refused() -> None:
    module, q, kv = models.build("Llama", models.RAGGED).model.layers[0].self_attn, torch.randn(1, 6, 3, 8), torch.randn(1, 2, 3, 8)
    keys, values = DilatedCache().update(kv, kv, 0)
    hub.dilated_attention_forward(module, q, keys, values, None)
    with pytest.raises(NotImplementedError, match="keys must be those of one layer with a DilatedCache"):
        hub.dilated_attention_forward(module, q, keys, values, None)
