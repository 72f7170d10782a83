"""torchtitan with dilated attention in its debug model: `nox -s tests_torchtitan` installs the pair of versions."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexdilated import DilatedPattern, dilated_attention
from tests.distributed.processes import run_ranks
from tests.tolerances import SINGLE

pytest.importorskip("torchtitan", reason="needs torchtitan: nox -s tests_torchtitan")

from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.config import ConfigManager, ParallelismConfig
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.attention import VarlenAttention

from flexdilated.hub.torchtitan import DilatedInnerAttention, dilated_varlen, document_starts
from tests.hub import titan
from tests.hub.titan import FLEX, PATTERN, TOKENS, VARLEN

PACKED = ([512], [101, 199, 212])  # two rows; a border of documents on neither side of the ranks'
FAR = DilatedPattern((300,), (4,), window=41, offsets="interleaved")


class OneByOne(nn.Module):
    def __init__(self, pattern: DilatedPattern, documents: tuple[list[int], ...]) -> None:
        super().__init__()
        self.pattern, self.documents = pattern, documents

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, scale: float | None, enable_gqa: bool) -> Tensor:
        rows = []
        for row, lengths in enumerate(self.documents):
            parts = zip(*(x[row : row + 1].split(lengths, dim=1) for x in (q, k, v)))
            rows.append(torch.cat([dilated_attention(*part, self.pattern, is_causal=True, scale=scale) for part in parts], dim=1))
        return torch.cat(rows)


def expected(pattern: DilatedPattern = PATTERN, documents: tuple[list[int], ...] = PACKED) -> titan.Result:
    model = titan.model_of(None)
    for layer in model.layers.values():
        layer.attention.inner_attention = OneByOne(pattern, documents)
    return titan.run_alone(model, *titan.batch(*documents))


def assert_same(actual: titan.Result, wanted: titan.Result) -> None:
    torch.testing.assert_close(actual.logits, wanted.logits, **SINGLE)
    assert actual.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():  # sums over all tokens: relative to the largest
        torch.testing.assert_close(actual.gradients[name] / gradient.abs().max(), gradient / gradient.abs().max(), **SINGLE)


@pytest.mark.parametrize("override", [FLEX, VARLEN])
@pytest.mark.parametrize("documents", [PACKED, ([512],)], ids=["packed", "one"])
@pytest.mark.parametrize("pattern", [PATTERN, FAR], ids=["segments", "window"])
def test_one_process_equals_this_librarys_own_layer(
    override: str, documents: tuple[list[int], ...], pattern: DilatedPattern
) -> None:
    model = titan.model_of(override, pattern=pattern.to_dict())
    assert_same(titan.run_alone(model, *titan.batch(*documents)), expected(pattern, documents))


def test_a_runs_command_line_names_the_override() -> None:
    pattern = {"segment_lengths": [8192], "dilation_rates": [4], "window": 256}
    options = f"flexdilated.hub.torchtitan.dilated_flex={json.dumps({'pattern': pattern})}"
    line = ["--module", "llama3", "--config", "llama3_debugmodel", "--parallelism.context_parallel_load_balancer", "None"]
    run = ConfigManager().parse_args([*line, "--override.imports", options])
    assert run.parallelism.context_parallel_load_balancer is None
    assert len(apply_overrides(run.override, run.model_spec.model)) == 6
    assert all(
        layer.attention.inner_attention.pattern == DilatedPattern.from_dict(pattern) for layer in run.model_spec.model.layers
    )


def test_dense_pattern_equals_the_model_before() -> None:
    tokens, positions, _ = titan.batch(*PACKED)
    titan.titan_utils.set_spmd_backend("partial_dtensor")
    logits = []
    for model in (titan.model_of(None), titan.model_of(FLEX, pattern=DilatedPattern((TOKENS,), (1,)))):
        with titan.cpu_only(), torch.no_grad():
            logits.append(model(tokens, positions, model.get_attention_masks(positions)))
    torch.testing.assert_close(logits[1], logits[0], **SINGLE)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by the compiler
def test_compiled_layers_take_the_borders_of_varlen_attention() -> None:
    model, inputs = titan.model_of(VARLEN), titan.batch(*PACKED)
    for layer in model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_same(titan.run_alone(model, *inputs), expected())


def compare_with_one_process(rank: int) -> None:
    """Tensor and context parallelism under both of torchtitan's backends that shard by config."""
    torch.set_num_threads(1)
    inputs, wanted = titan.batch(*PACKED), expected()
    grouped = DilatedPattern.grouped((53, 300), (1, 2))
    wanted_grouped = expected(grouped)
    for backend in ("spmd_types", "full_dtensor"):
        tensor = ParallelismConfig(spmd_backend=backend, tensor_parallel_degree=2)
        assert_same(titan.run_sharded(tensor, FLEX, inputs), wanted)
        context = context_parallel(backend)
        assert_same(titan.run_sharded(context, FLEX, inputs), wanted)
    assert_same(titan.run_sharded(tensor, FLEX, inputs, pattern=grouped), wanted_grouped)
    assert_same(titan.run_sharded(tensor, VARLEN, inputs), wanted)
    partial = ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=2)
    assert_same(titan.run_sharded(partial, FLEX, inputs), wanted)
    assert_same(titan.run_sharded(context_parallel("spmd_types"), FLEX, inputs, exchange="heads", pattern=grouped), wanted_grouped)
    for parallelism in (tensor, context_parallel("spmd_types")):
        assert_same(titan.run_sharded(parallelism, FLEX, inputs, pattern=FAR), expected(FAR))
    refuse(rank)


def context_parallel(backend: str, balancer: str | None = None) -> ParallelismConfig:
    return ParallelismConfig(spmd_backend=backend, context_parallel_degree=2, context_parallel_load_balancer=balancer)


def refuse(rank: int) -> None:
    inputs = titan.batch([TOKENS])
    with pytest.raises(ValueError, match=r"^attention_masks must be the causal mask of .* over contiguous shards, .*balancer"):
        titan.run_sharded(context_parallel("spmd_types", "headtail"), FLEX, inputs)
    with pytest.raises(NotImplementedError, match=r"Context Parallel .* not supported for DilatedInnerAttention$"):
        titan.run_sharded(context_parallel("partial_dtensor"), FLEX, inputs)
    with pytest.raises(NotImplementedError, match="Varlen attention is not supported with CP"):
        titan.run_sharded(context_parallel("spmd_types"), VARLEN, inputs)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    run_ranks(compare_with_one_process, 2, tmp_path)


def compare_both(rank: int) -> None:
    """Heads on one axis, tokens on the other; `heads="grouped"` tells ranks of either apart."""
    torch.set_num_threads(1)
    inputs = titan.batch(*PACKED)
    grouped = DilatedPattern.grouped((53, 300), (1, 2))
    both = dataclasses.replace(context_parallel("spmd_types"), tensor_parallel_degree=2)
    assert_same(titan.run_sharded(both, FLEX, inputs), expected())
    assert_same(titan.run_sharded(both, FLEX, inputs, pattern=grouped, exchange="heads"), expected(grouped))


def test_four_processes_of_tensor_and_context_parallelism_equal_one(tmp_path: Path) -> None:
    run_ranks(compare_both, 4, tmp_path)


def block_mask(mask_mod: Any, heads: int | None = None) -> Any:
    return create_block_mask(mask_mod, 1, heads, 256, 256, device="cpu")


def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((q < 101) == (k < 101))


def test_documents_are_read_from_the_masks_function() -> None:
    starts = document_starts(block_mask(packed), 2, 256, None)
    assert starts.nonzero().tolist() == [[0, 0], [0, 101], [1, 0], [1, 101]]


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: packed(b, h, q, k) & (q - k < 150),  # a window
        lambda b, h, q, k: (q < 101) == (k < 101),  # later tokens too
        lambda b, h, q, k: packed(b, h, q, k) & (q > k),  # not itself
        lambda b, h, q, k: packed(b, h, 255 - q, 255 - k),  # other rows than those of the tokens
    ],
    ids=["window", "bidirectional", "not itself", "reversed"],
)
def test_masks_that_say_more_than_documents_are_refused(mask_mod: Any) -> None:
    with pytest.raises(ValueError, match=r"^attention_masks must be the causal mask of packed documents over contiguous shards,"):
        document_starts(block_mask(mask_mod), 1, 256, None)


def test_inner_attention_refuses_what_it_cannot_carry() -> None:
    layer = DilatedInnerAttention(DilatedInnerAttention.Config(pattern=PATTERN))
    q, k = torch.randn(1, 256, 4, 8), torch.randn(1, 256, 2, 8)
    for name in ("score_mod", "out_transform"):
        with pytest.raises(NotImplementedError, match=rf"^{name} must be None under dilated attention, got a function; leave such"):
            layer(q, q, q, **{name: max})
    with pytest.raises(ValueError, match=r"^enable_gqa must be True where k has other heads than q=4, got 2$"):
        layer(q, k, k)
    assert layer(q, k, k, enable_gqa=True).shape == q.shape
    with pytest.raises(NotImplementedError, match=r"^attention_masks must be a BlockMask or VarlenMetadata, got dict$"):
        layer(q, q, q, attention_masks={})
    with pytest.raises(ValueError, match=r"^attention_masks must be one mask for all heads, got 4$"):
        layer(q, q, q, attention_masks=block_mask(lambda b, h, q, k: (q >= k) & (h >= 0), heads=4))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)  # as torchtitan compiles; the compiler wraps the error
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"attention_masks must be VarlenMetadata in a compiled model, got a"):
        compiled(q, q, q, attention_masks=block_mask(packed))


def test_overrides_refuse_what_is_no_pattern() -> None:
    with pytest.raises(ValueError, match=r"^window_size must be \(-1, 0\) for a dilated pattern to say what is seen, got \(7,"):
        dilated_varlen(VarlenAttention.Config(window_size=(7, 0)), pattern=PATTERN)
    with pytest.raises(TypeError, match=r"^pattern must be a mapping, got 'causal'$"):
        titan.model_of(FLEX, pattern="causal")
    with pytest.raises(ValueError, match=r"^exchange must be one of 'auto', 'gather', 'ring', 'heads', got 'all'$"):
        titan.model_of(FLEX, exchange="all")
    with pytest.raises(ValueError, match=r"^backend must be one of .*, got 'fast'$"):
        titan.model_of(FLEX, backend="fast")
