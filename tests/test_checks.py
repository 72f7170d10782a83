"""Verdicts on candidates, under the plan that `flexdilated tune` ships."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.tuning import checks
from flexdilated.tuning.checks import Case, Job, Runnable, definition_jobs, examined
from flexdilated.tuning.run import TuningPlan

PLAN = TuningPlan((), ())
RIGHT = {"forward": "right", "backward": "right"}
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def run(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, **options: Any) -> tuple[Tensor, Tensor]:
    return dilated_attention(q, k, v, pattern, backend="sdpa", return_lse=True, **options)


def without_window(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, **options: Any) -> tuple[Tensor, Tensor]:
    return run(q, k, v, DilatedPattern(pattern.segment_lengths, pattern.dilation_rates), **options)


def without_far_branch(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, **options: Any) -> tuple[Tensor, Tensor]:
    return run(q, k, v, DilatedPattern(pattern.segment_lengths[:1], (1,), window=pattern.window), **options)


def with_scaled_output(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = run(*arguments, **options)
    return out * 1.01, lse


def with_constant_values(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return run(q, k, v.detach() + 0.5 * (v - v.detach()), *arguments, **options)


def make(attend: Any, name: str, case: Case, device: str) -> Runnable:
    options = case.options(torch.device(device))
    return Runnable(lambda q, k, v: attend(q, k, v, case.pattern, **options), nullcontext, torch.float32)


def jobs_of(attend: Any, num_tokens: int) -> list[Job]:
    return definition_jobs(partial(make, attend), "sdpa", PLAN.checked, num_tokens, PLAN.group, (16,), half=True)


TOKENS = [*product(range(8), [601]), *(pytest.param(i, PLAN.checked_tokens, marks=pytest.mark.slow) for i in (4, 5))]


@pytest.mark.parametrize(("number", "tokens"), TOKENS)
def test_a_right_candidate_is_right_in_every_check_of_the_shipped_plan(number: int, tokens: int) -> None:
    jobs = jobs_of(run, tokens)
    assert (len(jobs), examined([jobs[number]], "cpu", 0)) == (8, [RIGHT])


@pytest.mark.parametrize("attend", [without_window, without_far_branch, with_scaled_output, with_constant_values])
def test_a_wrong_candidate_is_wrong_in_the_direction_where_it_is(attend: Any) -> None:
    (found,) = examined([jobs_of(attend, 601)[5]], "cpu", 0)
    assert (found["forward"] == "right") == (attend is with_constant_values)
    assert found["backward"].startswith("wrong: d")


class Comet(NamedTuple):
    tail: int


class PatternWithComet(DilatedPattern):
    @property
    def branches(self) -> Any:
        return (*super().branches, Comet(3))


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pattern_that_the_definition_does_not_know_is_an_error_of_the_tool(processes: int) -> None:
    case = Case("comet", PatternWithComet((5,), (1,)))
    job = Job(partial(checks.against_definition, partial(make, run)), "sdpa", case)
    with pytest.raises(NotImplementedError, match=r"^the definition must get branches .* kind Comet"):
        examined([job], "cpu", processes)


def test_plain_pytorch_asks_the_definition_which_pairs_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kind of branch needs no change of the yardstick."""
    pattern, x = DilatedPattern((8,), (2,), window=3), torch.randn(3, 1, 13, 2, 4, dtype=torch.float64)
    expected = checks.dense_attention(*x, DilatedPattern((13,), (1,)))
    joined = torch.ones(2, 13, 13, dtype=torch.bool)
    monkeypatch.setattr(reference, "joined_rows", lambda *arguments, **options: (list(range(13)), joined))
    torch.testing.assert_close(checks.dense_attention(*x, pattern), expected)
