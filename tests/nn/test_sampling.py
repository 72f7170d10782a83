"""How tokens are drawn from logits."""

import math
import re

import pytest
import torch

from flexdilated.nn.sampling import Sampler
from tests.tolerances import SINGLE

LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.0], [1.0, -2.0, 1.5, 0.5]])


def test_top_k_keeps_the_k_likeliest_of_the_scaled_logits() -> None:
    expected = torch.softmax(torch.tensor([[-math.inf, 6.0, 4.0, -math.inf], [2.0, -math.inf, 3.0, -math.inf]]), -1)
    torch.testing.assert_close(Sampler(temperature=0.5, top_k=2).probabilities(LOGITS), expected, **SINGLE)
    torch.testing.assert_close(Sampler(top_k=9).probabilities(LOGITS), torch.softmax(LOGITS, -1), **SINGLE)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    weights = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    for top_p, kept in ((0.01, [1]), (0.49, [1]), (0.51, [1, 3]), (0.74, [1, 3]), (0.76, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        expected = torch.zeros(1, 4)
        expected[0, kept] = weights[0, kept] / weights[0, kept].sum()
        torch.testing.assert_close(Sampler(top_p=top_p).probabilities(weights.log()), expected, **SINGLE)
    # 0.5 of the 0.75 that top_k leaves is 0.67.
    kept = Sampler(top_k=2, top_p=0.6).probabilities(weights.log())
    torch.testing.assert_close(kept, torch.tensor([[0.0, 1.0, 0.0, 0.0]]), **SINGLE)


def test_draw_follows_the_probabilities() -> None:
    sampler, logits = Sampler(temperature=1.3, top_k=3), LOGITS[:1].expand(4000, -1)
    tokens = sampler.draw(logits, generator=torch.Generator().manual_seed(3))
    found = torch.bincount(tokens, minlength=4) / 4000
    torch.testing.assert_close(found, sampler.probabilities(LOGITS)[0], atol=0.03, rtol=0.0)
    assert torch.equal(sampler.draw(logits, generator=torch.Generator().manual_seed(3)), tokens)


def test_temperature_zero_takes_the_likeliest_and_tiny_ones_do_not_overflow() -> None:
    for temperature in (0, 1e-30, 1e-46, 5e-324):
        assert Sampler(temperature=temperature).draw(LOGITS).tolist() == [1, 2]
    assert Sampler(temperature=1e-30).draw(LOGITS.bfloat16()).dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature must be finite and at least 0, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.1}, "top_p must be in (0, 1], got 1.1"),
        ({"temperature": 0, "top_k": 2}, "top_k must be None with temperature=0, which takes the likeliest token, got 2"),
    ],
)
def test_sampler_rejects_wrong_numbers(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Sampler(**options)
