"""Earlier packages' ring classes over real ranks: whole tensors in and out, outputs and gradients those of one process."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.distributed.sharding import even_shard_lengths
from tests.compat.cases import BATCH, EMBED, HEAD_DIM, HEADS, HILBERT, TOKENS, build, inputs, only
from tests.distributed.processes import Ranks, exactly
from tests.tolerances import EXACT, SINGLE

WORLD_SIZE = 3
pytestmark = exactly(WORLD_SIZE)
BARE, LAYER, HYBRID = "RingDilatedAttention", "RingMultiheadDilatedAttention", "RingMultiheadDilatedAttentionHybrid"
NAMES = (BARE, HILBERT, LAYER, HYBRID)


def pair(name: str, **options: object) -> tuple[nn.Module, nn.Module]:
    """The same module for this rank alone, and for the ring of all ranks."""
    modules = []
    for ring_size in (1, WORLD_SIZE):
        torch.manual_seed(2307)
        modules.append(build(name, **{"ring_size": ring_size, **options}))
    return modules[0], modules[1]


def draw(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same query, key and value on every rank."""
    torch.manual_seed(2210)
    return [x.detach().to(dtype).requires_grad_() for x in inputs(name)]


def differentiate(module: nn.Module, x: list[Tensor], **options: object) -> list[Tensor]:
    """The output and the gradients of the inputs and parameters, for a random dout that all ranks share."""
    out = only(module(*x, **options))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2026), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, (*x, *module.parameters()), dout.to(out.dtype))]


def assert_close(actual: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance, check_dtype=False)


def attempt(function: Callable[..., object]) -> str:
    """The error of a call, in words."""
    try:
        function()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- results ----------------------------------------------------------------------------------------------------------------------


def equal(rank: int, mesh: DeviceMesh, name: str, is_causal: bool) -> None:
    alone, ring = pair(name)
    assert ring.attention.ring_size == WORLD_SIZE
    x = draw(name)
    expected = differentiate(alone, x, is_causal=is_causal)
    for _ in range(2):  # the first call compares the inputs of the ranks
        assert_close(differentiate(ring, x, is_causal=is_causal), expected, **EXACT)


# Along a curve no attention is causal.
@pytest.mark.parametrize(
    ("name", "is_causal"), [(name, causal) for name in NAMES for causal in (False, True)[: 1 + (name != HILBERT)]]
)
def test_ring_equals_one_process(ranks: Ranks, name: str, is_causal: bool) -> None:
    ranks.run(equal, name, is_causal)


def single(rank: int, mesh: DeviceMesh) -> None:
    alone, ring = pair(BARE)
    expected = differentiate(alone, draw(BARE))
    actual = differentiate(ring, draw(BARE, torch.float32))
    assert all(x.dtype == torch.float32 for x in actual)
    assert_close(actual, expected, **SINGLE)


def test_ring_in_single_precision(ranks: Ranks) -> None:
    ranks.run(single)


def few(rank: int, mesh: DeviceMesh) -> None:
    alone, ring = pair(BARE)
    for tokens in (1, 2, 3, 29):  # fewer than ranks: some have none
        x = [y[:, :tokens] if tokens <= TOKENS else torch.cat([y, y[:, : tokens - TOKENS]], 1) for y in draw(BARE)]
        assert_close(differentiate(ring, x), differentiate(alone, x), **EXACT)


def test_any_number_of_tokens(ranks: Ranks) -> None:
    ranks.run(few)


def masked(rank: int, mesh: DeviceMesh) -> None:
    alone, ring = pair(HYBRID)
    x = draw(HYBRID)
    mask = torch.arange(TOKENS) >= torch.tensor([[5], [TOKENS]])
    expected = differentiate(alone, x, key_padding_mask=mask)
    assert not torch.allclose(expected[0], alone(*x)[0])
    assert_close(differentiate(ring, x, key_padding_mask=mask), expected, **EXACT)


def test_ring_with_padding_mask(ranks: Ranks) -> None:
    ranks.run(masked)


def by_default(rank: int, mesh: DeviceMesh) -> None:
    x = draw(BARE)
    module = build(BARE)
    assert module.attention.ring_size == WORLD_SIZE
    assert "ring_size=3" in repr(module)
    assert_close(differentiate(module, x), differentiate(pair(BARE)[0], x), **EXACT)


def test_ring_is_all_ranks_by_default(ranks: Ranks) -> None:
    ranks.run(by_default)


def dropped(rank: int, mesh: DeviceMesh) -> Tensor:
    plain, dropping = pair(BARE)[0], build(BARE, dropout=0.4)
    x = draw(BARE)
    assert_close([dropping.eval()(*x)], [plain(*x)], **EXACT)
    dropping.train()
    torch.manual_seed(5)
    out = dropping(*x)
    assert not torch.allclose(out, plain(*x))
    return out.detach()


def test_dropout_drops_in_training_only_and_the_same_for_all_who_read_it(ranks: Ranks) -> None:
    first, *others = ranks.run(dropped)
    for other in others:
        assert torch.equal(other, first)


def share(rank: int, mesh: DeviceMesh) -> None:
    alone, ring = pair(BARE)
    x = draw(BARE)
    expected = differentiate(alone, x)
    ring(*x)
    lengths = even_shard_lengths(TOKENS, WORLD_SIZE)
    own = torch.zeros(TOKENS, dtype=torch.bool)
    own.split(lengths)[rank].fill_(True)
    poisoned = [y.detach().masked_fill(~own[:, None, None], torch.nan).requires_grad_() for y in x]
    assert_close(differentiate(ring, poisoned), expected, **EXACT)


def test_a_rank_reads_its_own_tokens_only(ranks: Ranks) -> None:
    ranks.run(share)


def copied(rank: int, mesh: DeviceMesh) -> None:
    for name in (BARE, LAYER):
        alone, ring = pair(name)
        x = draw(name)
        expected = differentiate(alone, x)
        for is_called in (False, True):
            if is_called:
                ring(*x)
            for twin in (copy.deepcopy(ring), pickle.loads(pickle.dumps(ring))):
                assert twin.attention.mesh is None  # a run of other groups may load it
                assert not twin.attention.compared
                assert_close(differentiate(twin, x), expected, **EXACT)


def test_ring_modules_are_pickled_and_copied(ranks: Ranks) -> None:
    ranks.run(copied)


def compiled(rank: int, mesh: DeviceMesh) -> None:
    alone, ring = pair(BARE)
    x = draw(BARE)
    expected = differentiate(alone, x)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="a module over a ring must be called once before it is compiled with fullgraph=True"):
        torch.compile(ring, fullgraph=True)(*x)
    ring(*x)
    assert_close(differentiate(torch.compile(ring, backend="aot_eager", fullgraph=True), x), expected, **EXACT)
    torch._dynamo.reset()
    assert_close(differentiate(torch.compile(pair(BARE)[1], backend="aot_eager"), x), expected, **EXACT)


@pytest.mark.slow
def test_compiled_ring_equals_one_process(ranks: Ranks) -> None:
    ranks.run(compiled)


# -- numbers of ranks ---------------------------------------------------------------------------------------------------


def sizes(rank: int, mesh: DeviceMesh) -> None:
    for name in NAMES:
        for ring_size in (0, 2, 4):
            text = attempt(lambda: build(name, ring_size=ring_size))  # noqa: B023  # called at once
            assert text.startswith(f"ValueError: ring_size must be None, 1 or the number of ranks=3, got {ring_size}; ")
    moved = copy.deepcopy(build(BARE))
    moved.attention.ring_size = 5  # saved by a run of five
    text = attempt(lambda: moved(*draw(BARE)))
    assert text == "ValueError: ring_size must be the number of ranks=3, got 5"


def test_another_number_of_ranks_is_refused(ranks: Ranks) -> None:
    ranks.run(sizes)


# -- ranks that differ ------------------------------------------------------------------------------------------------------------


def different(rank: int, mesh: DeviceMesh) -> None:
    x = draw(BARE)
    for place, name in enumerate(("query", "key", "value")):
        mine = [y.detach().clone() for y in x]
        if rank == 2:
            mine[place] = torch.randn(BATCH, TOKENS, HEADS, HEAD_DIM, dtype=torch.float64)
        expected = (
            f"ValueError: {name} must be the same on all ranks of the ring, got other values on rank 2 than on rank 0; "
            "for data parallelism give ring_size=1"
        )
        assert attempt(lambda: build(BARE)(*mine)) == expected  # noqa: B023  # called at once
    assert attempt(lambda: build(BARE, ring_size=1)(*mine)) == "no error"
    rounded = [y * (1 + 1e-9 * rank) for y in x]
    assert attempt(lambda: build(BARE)(*rounded)) == "no error"


def test_ranks_with_other_inputs_are_refused(ranks: Ranks) -> None:
    ranks.run(different)


def malformed(rank: int, mesh: DeviceMesh) -> None:
    q, k, v = draw(BARE)
    for wrong in ((q.flatten(2), k, v), (q, k[:, 1:], v)):
        text = attempt(lambda: build(BARE)(*wrong))  # noqa: B023  # called at once
        assert text.startswith("ValueError: "), text
    x = [y[:, : TOKENS - rank % 2] for y in draw(BARE)]
    text = attempt(lambda: build(BARE, softmax_scale=0.9)(*x))
    assert text.startswith("ValueError: ranks must agree on "), text


def test_malformed_arguments_are_refused(ranks: Ranks) -> None:
    ranks.run(malformed)


def unequal_layers(rank: int, mesh: DeviceMesh) -> None:
    torch.manual_seed(rank)
    ring = build(LAYER)
    x = torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    text = attempt(lambda: ring(x))
    assert text.startswith("ValueError: query must be the same on all ranks of the ring, got other values on rank 1"), text


def test_layers_of_other_weights_are_refused(ranks: Ranks) -> None:
    ranks.run(unequal_layers)
