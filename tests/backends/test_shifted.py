"""torchscale's shifted positions, by inserted zero tokens, against the definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.attention import attend
from flexdilated.core.call import Call
from tests.cases import Case, run_backend, run_reference
from tests.tolerances import EXACT

TORCHSCALE = DilatedPattern.torchscale((7, 16, 31), (3, 5, 2))
CASES = {  # beside torchscale's own rules, of which tests/doors has every option
    "exact gradient": Case(replace(TORCHSCALE, detach_weights=False), num_tokens=37, kv_heads=5, batch=2),
    "interleaved": Case(replace(TORCHSCALE, offsets="interleaved"), num_tokens=41, kv_heads=7),
    "grouped": Case(replace(TORCHSCALE, heads="grouped"), num_tokens=41, kv_heads=5, group=2),
    "grouped, causal": Case(replace(TORCHSCALE, heads="grouped", detach_weights=False), num_tokens=41, kv_heads=3, is_causal=True),
}


@pytest.mark.parametrize("name", CASES)
def test_shifted_positions_equal_the_definition(name: str) -> None:
    torch.testing.assert_close(run_backend(CASES[name], "sdpa", torch.float64), run_reference(CASES[name]), **EXACT)


@pytest.mark.parametrize("held", [range(3), range(1, 4), range(3, 5), range(4, 5)], ids=str)
@pytest.mark.parametrize("rule", ["all", "grouped"])
def test_a_part_of_the_heads_is_that_part_of_the_model(rule: Any, held: range) -> None:
    case = Case(replace(TORCHSCALE, heads=rule), num_tokens=41, kv_heads=5, group=2)
    queries, keys = slice(2 * held.start, 2 * held.stop), slice(held.start, held.stop)
    q, k, v = (x[:, :, part] for x, part in zip(case.tensors(), (queries, keys, keys)))
    call = Call(case.pattern, scale=case.head_dim**-0.5, num_kv_heads=5, first_head=held.start, return_lse=True)
    out, lse = attend(q, k, v, call)
    expected_out, expected_lse, *_ = run_reference(case)
    torch.testing.assert_close(out, expected_out[:, :, queries], **EXACT)
    torch.testing.assert_close(lse, expected_lse[:, queries], **EXACT)


def test_shifted_documents_are_rejected_in_compiled_code() -> None:
    x, borders = torch.randn(1, 43, 3, 4), torch.tensor([0, 5, 43])
    run = torch.compile(lambda: dilated_attention(x, x, x, TORCHSCALE, cu_seqlens=borders), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"cu_seqlens must come without zero_padding=True and a rate that does not divide its segm"):
        run()
