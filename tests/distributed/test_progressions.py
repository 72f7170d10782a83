"""What arithmetic progressions have in common, against sets."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given

from flexdilated.distributed.progressions import LONGEST, Progressions, _inverse, common, num_different

Line = tuple[int, int, int]  # first, end, stride


def made(lines: list[Line]) -> Progressions:
    some, found = Progressions.within(*np.array(lines, np.int64).reshape(-1, 3).T)
    assert some.tolist() == [first < end for first, end, _ in lines]
    return found


def listed(found: Progressions) -> list[range]:
    return [range(first, last + 1, stride) for first, last, stride in zip(*(x.tolist() for x in found))]


def lines_of(most: int = 40, stride: int = 12) -> st.SearchStrategy[Line]:
    begin = st.integers(-5, most)
    return st.tuples(begin, st.integers(0, most), st.integers(1, stride)).map(lambda x: (x[0], x[0] + x[1], x[2]))


@given(st.lists(lines_of()))
def test_progressions_hold_what_lies_before_their_end(lines: list[Line]) -> None:
    found = made(lines)
    expected = [list(range(*line)) for line in lines if len(range(*line))]
    assert [list(each) for each in listed(found)] == expected
    assert found.tokens.tolist() == [len(each) for each in expected]
    assert all((stride == 1) for (first, last, stride) in zip(*found) if first == last)
    chosen = np.arange(len(expected))[::2]
    assert [list(each) for each in listed(found.where(chosen))] == expected[::2]


@given(st.lists(st.tuples(lines_of(), lines_of()).filter(lambda x: all(a < b for a, b, _ in x))))
@example([((0, 40, 6), (3, 40, 9)), ((0, 40, 6), (2, 40, 9))])
def test_two_progressions_have_in_common_what_both_hold(pairs: list[tuple[Line, Line]]) -> None:
    which, found = common(made([a for a, _ in pairs]), made([b for _, b in pairs]))
    expected = [sorted(set(range(*a)) & set(range(*b))) for a, b in pairs]
    assert {int(i): list(each) for i, each in zip(which, listed(found), strict=True)} == {i: x for i, x in enumerate(expected) if x}


def test_products_fit_64_bits_up_to_the_longest() -> None:
    """Of strides just below it, from a token far out; by Python's integers."""
    far = 1 << 61
    lines = [
        (far, far + LONGEST, LONGEST - 1),
        (far - LONGEST + 2, far + 2, LONGEST - 2),
        (far - 1, far - 1 + LONGEST, LONGEST - 3),
    ]
    pairs = [(lines[0], lines[1]), (lines[0], lines[2]), (lines[1], lines[2])]
    which, found = common(*(made(list(each)) for each in zip(*pairs)))
    expected = [[token for token in range(*a) if token in range(*b)] for a, b in pairs]
    assert {int(i): list(each) for i, each in zip(which, listed(found))} == {i: x for i, x in enumerate(expected) if x}
    assert expected[0] == [far]


@given(st.lists(st.tuples(st.integers(1, LONGEST), st.integers(0, LONGEST)).filter(lambda x: np.gcd(*x) == 1)))
def test_a_number_times_its_inverse_leaves_one(pairs: list[tuple[int, int]]) -> None:
    modulus, number = np.array(pairs, np.int64).reshape(-1, 2).T
    found = _inverse(number, modulus).tolist()
    assert found == [pow(b, -1, a) if a > 1 else 0 for a, b in pairs]


@given(st.lists(st.lists(lines_of(stride=6).filter(lambda x: x[0] < x[1]), min_size=1, max_size=5)))
def test_tokens_of_several_progressions_count_once(groups: list[list[Line]]) -> None:
    found = num_different(made([line for group in groups for line in group]), np.array([len(x) for x in groups], np.int64))
    assert found.tolist() == [len({token for line in group for token in range(*line)}) for group in groups]


def test_of_no_groups_nothing_is_counted() -> None:
    assert len(num_different(made([]), np.zeros(0, np.int64))) == 0
