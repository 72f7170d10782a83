"""Heads that are a part of a model's: tensor parallelism, and wrappers that share heads out."""

import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, reference
from tests.distributed.processes import exactly
from tests.tolerances import EXACT, SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402
from flexdilated.hub.transformers.heads import find_head_shard  # noqa: E402

HEADS, TOKENS = 12, 23
RATES = DilatedPattern((5, 13), (1, 3))
INTERLEAVED = DilatedPattern((4, 11), (1, 2), offsets="interleaved")
GROUPED = DilatedPattern.grouped((5, 11), (1, 2))


def layer(num_heads: int | None = HEADS, kv_heads: int | None = None, pattern: DilatedPattern = RATES, **attributes: Any) -> Any:
    """What the attention function reads of a layer of the library."""
    config = SimpleNamespace(dilated_pattern=pattern.to_dict())
    if num_heads is not None:
        config.num_attention_heads = num_heads
    if kv_heads is not None:
        config.num_key_value_heads = kv_heads
    module = nn.Module()
    module.config, module.is_causal = config, True
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return hub.dilated_attention_forward(module, q, k, v, mask, **options)[0]


@pytest.mark.parametrize(
    ("pattern", "kv_heads", "held", "replicated"),
    [
        (RATES, 12, 4, False),
        (INTERLEAVED, 6, 4, False),
        (GROUPED, 3, 4, False),
        (RATES, 1, 4, True),
        (INTERLEAVED, 3, 8, True),
        (GROUPED, 3, 2, True),
        (RATES, 6, 1, True),
    ],
)
def test_a_part_of_the_heads_gives_its_outputs(pattern: DilatedPattern, kv_heads: int, held: int, replicated: bool) -> None:
    module = layer(HEADS, kv_heads, pattern)
    q = torch.randn(2, HEADS, TOKENS, 5, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, TOKENS, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, :6] = False
    padding = hub.dilated_attention_positions(2, TOKENS, TOKENS, attention_mask=mask)
    last = 3
    cached = hub.dilated_attention_positions(2, last, TOKENS, q_offset=TOKENS - last, attention_mask=mask)
    packed = {name: torch.tensor([0, 7, TOKENS]) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    for rows, queries, positions, options in (
        (slice(None), slice(None), None, {}),
        (slice(None), slice(None), padding, {}),
        (slice(None), slice(TOKENS - last, None), cached, {}),
        (slice(0, 1), slice(None), None, packed),
    ):
        whole = attend(module, q[rows, :, queries], k[rows], v[rows], positions, **options)
        weights = torch.randn_like(whole)
        expected = torch.autograd.grad((whole * weights).sum(), (q, k, v))
        parts, found = [], [torch.zeros_like(x) for x in (q, k, v)]
        for first in range(0, HEADS, held):
            here = slice(first, min(first + held, HEADS))
            size = here.stop - first
            group = HEADS // kv_heads
            kv = slice(None) if replicated else slice(first // group, first // group + size // group)
            part = attend(module, q[rows, here, queries], k[rows, kv], v[rows, kv], positions, first_head=first, **options)
            parts.append(part)
            gradients = torch.autograd.grad((part * weights[:, :, here]).sum(), (q, k, v))
            found = [x + y for x, y in zip(found, gradients)]
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, **EXACT)
        for gradient, right in zip(found, expected):
            torch.testing.assert_close(gradient, right, **EXACT)


@pytest.mark.parametrize("pattern", [INTERLEAVED, GROUPED])
def test_a_part_of_the_heads_has_its_own_sinks(pattern: DilatedPattern) -> None:
    module, sinks = layer(HEADS, 4, pattern), 2 * torch.randn(HEADS, dtype=torch.float64)
    q, k, v = (torch.randn(2, heads, TOKENS, 5, dtype=torch.float64) for heads in (HEADS, 4, 4))
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    expected, _ = reference.dilated_attention(*rows, pattern, is_causal=True, sinks=sinks)
    for first, given in ((0, sinks), (3, sinks), (3, sinks[3:6])):  # whole, or cut as the heads are
        here, key = slice(first, first + 3), slice(first // 3, first // 3 + 1)
        out = attend(module, q[:, here], k[:, key], v[:, key], s_aux=given, first_head=first)
        torch.testing.assert_close(out, expected[:, :, here], **EXACT)
    with pytest.raises(ValueError, match=r"s_aux must have shape \(H,\)=\(12,\), the query heads of the call, got \(5,\)"):
        attend(module, q, k, v, s_aux=sinks[:5])


def test_a_part_of_the_heads_without_its_place_is_refused() -> None:
    q, k, v = (torch.randn(1, heads, TOKENS, 5) for heads in (6, 3, 3))
    with pytest.raises(NotImplementedError, match=r"query must hold all 12 heads of the model, got 6, .* pass first_head"):
        attend(layer(HEADS, 6), q, k, v)
    for first in (-1, 7):
        with pytest.raises(ValueError, match=f"first_head must leave room for 6 of the model's 12 query heads, got {first}"):
            attend(layer(HEADS, 6), q, k, v, first_head=first)
    with pytest.raises(NotImplementedError, match=r"key must hold 4 or all of the model's 8 key/value heads .*6 of 12 heads,"):
        find_head_shard(layer(HEADS, 8), 6, 3, 0)
    # As many keys as queries: repeated for them, or those of all ranks.
    with pytest.raises(NotImplementedError, match="k_proj"):
        find_head_shard(layer(HEADS, 6), 6, 6, 0)


def test_all_heads_and_modules_that_differ_from_their_config_need_no_place() -> None:
    assert find_head_shard(layer(HEADS, 6), HEADS, 6) is None
    assert find_head_shard(layer(HEADS, 6), HEADS, 6, 0) is None
    assert find_head_shard(layer(HEADS, n_heads=6), 6, 6) is None  # a stage of its own
    assert find_head_shard(layer(None), 6, 6) is None  # one process, and nothing says otherwise
    assert find_head_shard(layer(None, n_head=6), 6, 6) is None


@exactly(2)
def test_tensor_parallel_models_equal_one_process(rank: int, world: DeviceMesh, tmp_path: Path) -> None:
    from transformers.distributed import DistributedConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    # Keys and values that every rank holds, for parts of the queries: the library leaves their inputs' gradients in parts.
    attention = {"q_proj": "colwise", "o_proj": "rowwise"}
    replicated = {f"model.layers.*.self_attn.{name}": style for name, style in attention.items()}
    replicated |= {f"model.layers.*.self_attn.{name}": "replicate" for name in ("k_proj", "v_proj")}
    for name, pattern, kv_heads, plan in (
        ("Llama", RATES, 4, "auto"),
        ("Qwen3", GROUPED, 2, "auto"),
        ("Llama", INTERLEAVED, 2, replicated),
        ("Llama", RATES, 1, replicated),
    ):
        torch.manual_seed(7)
        sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = getattr(transformers, f"{name}Config")(**sizes, num_key_value_heads=kv_heads, head_dim=8)
        one = transformers.AutoModelForCausalLM.from_config(hub.set_pattern(config, pattern)).eval()
        path = tmp_path / f"{name}_{kv_heads}_{len(plan)}"
        one.save_pretrained(path)  # the first rank writes
        torch.distributed.barrier()
        sharding = {"tp_plan": plan, "tp_size": 2}
        is_told = "tp_plan" in inspect.signature(DistributedConfig).parameters
        if not is_told and plan != "auto":
            continue  # older versions have no such style
        sharding = {"distributed_config": DistributedConfig(**sharding)} if is_told else sharding
        shared = transformers.AutoModelForCausalLM.from_pretrained(path, **sharding)
        tokens = torch.randint(31, (2, 17))
        if not is_told:  # their parameters do not say which part they are
            with pytest.raises(NotImplementedError, match=r"no parameter of .* says which"):
                shared(tokens)
            continue
        mask = torch.ones_like(tokens)
        mask[1, :4] = 0
        compare(one, shared, {"input_ids": tokens, "labels": tokens, "attention_mask": mask}, of_gradients=plan == "auto")
        generated = [model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False) for model in (one, shared)]
        torch.testing.assert_close(*generated, rtol=0, atol=0)
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, CACHE: hub.DilatedCache()}
        torch.testing.assert_close(shared.generate(tokens, **options), generated[0], rtol=0, atol=0)
    refuses_what_has_no_place(one)


def compare(one: Any, shared: Any, inputs: dict[str, Tensor], *, of_gradients: bool) -> None:
    real = inputs["attention_mask"].bool()
    outputs = [model(**inputs) for model in (one, shared)]
    torch.testing.assert_close(outputs[1].logits[real], outputs[0].logits[real], **SINGLE)
    if not of_gradients:
        return
    for output in outputs:
        output.loss.backward()
    expected = {name: parameter.grad for name, parameter in one.named_parameters()}
    for name, parameter in shared.named_parameters():
        gradient = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(gradient, expected[name], **SINGLE, msg=lambda text, name=name: f"{name}: {text}")


def refuses_what_has_no_place(model: Any) -> None:
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, TOKENS, 8) for heads in (2, 1, 1))
    with pytest.raises(NotImplementedError, match="query must hold all 4 heads of the model, got 2"):
        attend(module, q, k, v)
    with pytest.raises(NotImplementedError, match="config must say num_attention_heads over several processes, got Module without"):
        attend(layer(None), q, k, v)
