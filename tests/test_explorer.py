"""The page of flexdilated/explorer, in a real browser: every number that it draws is the library's."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexdilated import DilatedPattern, analysis
from flexdilated.draw.pattern import multiplicity
from flexdilated.draw.tiles import head_tiles
from flexdilated.masks.functions import checked

sync_api = pytest.importorskip("playwright.sync_api", reason="nox -s explorer installs it")

PAGE = Path(__file__).parents[1] / "flexdilated" / "explorer" / "index.html"
BROWSER = os.environ.get("FLEXDILATED_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")
RULES = ("window", "global_tokens", "heads", "offsets", "zero_padding", "detach_weights")
State = dict[str, Any]
Counts = NDArray[np.int64]

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs chromium on the PATH, or FLEXDILATED_BROWSER"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The page as a reader opens it, from the disk; nothing may be said on its console."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    found.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    found.on("pageerror", lambda error: said.append(str(error)))
    found.goto(PAGE.as_uri())
    yield found
    context.close()
    assert said == []


def asked(page: Any, expression: str, argument: Any = None) -> Any:
    """What a function of the page gives; as text, since playwright takes long over large arrays. Pairs are BigInts."""
    plain = "(key, value) => typeof value === 'bigint' ? Number(value) : ArrayBuffer.isView(value) ? Array.from(value) : value"
    return json.loads(page.evaluate(f"argument => JSON.stringify(({expression})(argument), {plain})", argument))


def pattern_of(state: State) -> DilatedPattern:
    return DilatedPattern(state["segment_lengths"], state["dilation_rates"], **{rule: state[rule] for rule in RULES})


def random_state(rng: random.Random) -> State:
    window = rng.choice((None, None, 1, 2, 5, 19))
    first = rng.choice((0, 0, 1, 3, 17, 70))
    has_near = window is not None or first > 0
    branches = rng.randint(0 if has_near else 1, 4)
    group = rng.choice((1, 1, 2, 3))
    kv_heads = rng.randint(max(1, branches), 6)
    num_tokens = rng.choice((1, 2, 13, 31, 37, 53, 61))
    lengths = [rng.randint(1, 41) for _ in range(branches)]
    if lengths and rng.random() < 0.5:  # nested, as published patterns are
        lengths = [max(1, lengths[0]) * 2**i for i in range(branches)]
    return {
        "segment_lengths": lengths,
        "dilation_rates": [rng.choice([r for r in (1, 1, 2, 3, 4, 6, 7, length) if r <= length]) for length in lengths],
        "window": window,
        "global_tokens": first,
        "heads": rng.choice(("all", "grouped")),
        "offsets": rng.choice(("blocked", "interleaved")),
        "zero_padding": not has_near and rng.random() < 0.3,
        "detach_weights": not has_near and rng.random() < 0.3,
        "is_causal": rng.random() < 0.5,
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "seq_len": num_tokens,
        "block_size": rng.choice((1, 2, 3, 7, 16)),
        "head_dim": 11,
        "layers": rng.randint(1, 3),
        "head": rng.randrange(kv_heads * group),
        "query": rng.randrange(num_tokens),
    }


STATES = [random_state(random.Random(seed)) for seed in range(200)]
STATES += [  # one segment of the whole sequence, alone or beside narrower branches
    STATES[0]
    | {"segment_lengths": [59, *lengths], "dilation_rates": [rate, *([1] * len(lengths))], "heads": "all", "offsets": "interleaved"}
    | {"num_heads": 6, "num_kv_heads": 3, "seq_len": 59, "head": 0, "query": 11, "is_causal": is_causal, "zero_padding": False}
    for is_causal in (True, False)
    for lengths, rate in (((), 1), ((), 3), ((7, 19), 2))
]


@pytest.fixture(scope="module")
def answers(browser: Any) -> list[State]:
    """What the page says of each state: everything, and pictures of few cells."""
    page = browser.new_page()
    page.goto(PAGE.as_uri())
    expression = """states => states.map(state => {
        const found = explorer.compute(state);
        const { seq_len, is_causal } = state, classes = explorer.headClasses(state);
        const drawn = most => classes.map(({ heads, branches }) =>
            ({ heads, ...explorer.picture(branches, seq_len, is_causal, most) }));
        Object.assign(found, { pictures: drawn(), coarse: drawn(7) });
        const heads = Array.from({ length: state.num_kv_heads }, (_, head) => head);
        found.offsets = explorer.allBranchesOf(state).map(({ index }) => heads.map(head => explorer.offset(state, index, head)));
        found.reached = explorer.reachPicture(found.reach, state.seq_len).counts;
        delete found.reach.bits, delete found.reachOf.bits;
        return found;
    })"""
    found: list[State] = asked(page, expression, STATES)
    page.close()
    return found


def masks(state: State) -> Counts:
    return multiplicity(pattern_of(state), state["seq_len"], state["num_kv_heads"], is_causal=state["is_causal"])


def binned(counts: Counts, cell: int) -> Counts:
    starts = np.arange(0, len(counts), cell)
    return np.add.reduceat(np.add.reduceat(counts, starts, axis=0), starts, axis=1)


def test_offsets_pairs_masks_and_the_keys_of_a_query_are_the_librarys(answers: list[State]) -> None:
    for state, found in zip(STATES, answers):
        pattern, kv_heads, num_tokens = pattern_of(state), state["num_kv_heads"], state["seq_len"]
        offsets = [
            [pattern.offset(i, h, kv_heads) if h in pattern.head_range(i, kv_heads) else None for h in range(kv_heads)]
            for i in range(len(pattern.branches))
        ]
        assert found["offsets"] == offsets, state
        assert found["boundary"] == pattern.first_uncrossed_boundary(num_tokens, kv_heads), state
        assert found["pairs"]["total"] == pattern.count_pairs(num_tokens, kv_heads, is_causal=state["is_causal"]), state
        assert found["pairs"]["total"] == sum(found["pairs"]["branches"])
        expected = masks(state)
        assert sorted(head for each in found["pictures"] for head in each["heads"]) == list(range(kv_heads))
        for each, coarse in zip(found["pictures"], found["coarse"]):
            assert each["tokensPerCell"] == 1
            for head in each["heads"]:
                assert each["counts"] == expected[head].ravel().tolist(), state
                assert coarse["counts"] == binned(expected[head], coarse["tokensPerCell"]).ravel().tolist(), state
        query = state["query"]
        row = expected[state["head"] * kv_heads // state["num_heads"], query]
        keys = np.flatnonzero(row)
        distances = (len(keys), row.sum(), max(abs(keys - query), default=0))
        assert tuple(found["query"][name] for name in ("keys", "joins", "farthest")) == distances, state


def test_tiles_are_those_of_the_block_mask(answers: list[State]) -> None:
    for state, found in zip(STATES[:60], answers):
        kv_heads = state["num_kv_heads"]
        expected = head_tiles(pattern_of(state), state["seq_len"], kv_heads, state["block_size"], 1, is_causal=state["is_causal"])
        by_head = {head: each for each in expected for head in each.heads}
        for each in found["tiles"]["heads"]:
            for head in each["heads"]:
                tally = by_head[head].tally
                assert found["tiles"]["tiles"] == tally.tiles
                assert all(each[name] == getattr(tally, name) for name in ("partial", "full", "packed", "pairs")), state
                if head != state["head"] * kv_heads // state["num_heads"]:
                    continue
                cells = by_head[head].cells
                assert (np.reshape(each["visitedIn"], cells.shape) > 0).tolist() == (cells > 1).tolist()
                assert (np.reshape(each["fullIn"], cells.shape) > 0).tolist() == (cells == 5).tolist()


def grown(counts: list[int]) -> list[int]:
    """Up to the last count that is larger than the one before."""
    return [count for i, count in enumerate(counts) if i == 0 or count > counts[i - 1]]


def test_reach_over_layers_is_the_librarys(answers: list[State]) -> None:
    for state, found in zip(STATES, answers):
        num_tokens, causal = state["seq_len"], state["is_causal"]
        arguments = pattern_of(state), num_tokens, state["num_kv_heads"]
        seen = [
            analysis.reachable(*arguments, layers=layer, is_causal=causal) for layer in range(len(found["reach"]["counts"]) + 1)
        ]
        counts, every = found["reach"]["counts"], num_tokens * (num_tokens + 1) // 2 if causal else num_tokens**2
        assert (counts, found["reach"]["every"]) == (grown([int(each.sum()) for each in seen]), every), state
        layers_to_all = len(counts) - 1 if counts[-1] == every else None
        assert layers_to_all == analysis.layers_to_cover(*arguments, is_causal=causal), state
        shown = seen[min(state["layers"], len(seen) - 1)]
        assert found["reached"] == shown.astype(int).ravel().tolist(), state
        assert found["reachOf"]["counts"] == grown([int(each[state["query"]].sum()) for each in seen]), state
        assert found["uncovered"] == analysis.count_uncovered(*arguments), state
        missing = analysis.missing_residues(pattern_of(state), state["num_kv_heads"])
        branches = zip(missing, state["segment_lengths"], state["dilation_rates"])
        assert found["lost"] == [sum(p % w % r in gone for p in range(num_tokens)) for gone, w, r in branches], state


def test_reach_of_one_query_over_a_long_sequence_is_the_librarys(page: Any) -> None:
    state = published(segment_lengths=[64, 1021, 20_011], dilation_rates=[1, 5, 9], num_heads=4, num_kv_heads=4, seq_len=50_021)
    for causal in (False, True):
        found = asked(page, "state => explorer.compute(state, ['reachOf'])", state | {"is_causal": causal})
        arguments = pattern_of(state), 50_021, 4, state["query"]
        layers = range(len(found["reachOf"]["counts"]) + 1)
        seen = [analysis.keys_seen(*arguments, layers=layer, is_causal=causal) for layer in layers]
        assert found["reachOf"]["counts"] == grown([len(each) for each in seen])
        assert np.flatnonzero(found["reachOf"]["bits"]).tolist() == seen[state["layers"]].tolist()


def published(**changes: Any) -> State:
    numbers = {"is_causal": False, "head_dim": 64, "block_size": 128, "layers": 2, "head": 0, "query": 5003}
    rules = {
        "window": None,
        "global_tokens": 0,
        "heads": "all",
        "offsets": "blocked",
        "zero_padding": False,
        "detach_weights": False,
    }
    return {**rules, **numbers, **changes}


def large(lengths: list[int], rates: list[int], seq_len: int, kv_heads: int, num_heads: int, **changes: Any) -> State:
    sizes = {"num_heads": num_heads, "num_kv_heads": kv_heads, "seq_len": seq_len}
    return published(segment_lengths=lengths, dilation_rates=rates, **sizes, **changes)


LARGE = [
    large([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12], 100_003, 12, 24, is_causal=True),
    large([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16], 70_121, 16, 16, zero_padding=True),
    # rates whose least common multiple is far beyond the sequence
    large([9973, 19997, 39989, 59999], [9973, 89, 97, 101], 59_999, 5, 5, offsets="interleaved"),
    large([70_121], [8], 70_121, 8, 8, window=1021, is_causal=True),
    large([70_121], [8], 70_121, 8, 8, window=1021, global_tokens=5, is_causal=True),
]


@pytest.mark.parametrize("state", LARGE, ids=("longnet", "gigapath", "coprime", "window", "first"))
def test_long_sequences_are_counted_exactly(page: Any, state: State) -> None:
    expression = """state => ({
        ...explorer.compute(state, ['boundary', 'pairs', 'query', 'tiles', 'uncovered']),
        pictures: explorer.headClasses(state).map(({ heads, branches }) =>
            ({ heads, ...explorer.picture(branches, state.seq_len, state.is_causal) })),
    })"""
    found = asked(page, expression, state)
    pattern, num_tokens, kv_heads = pattern_of(state), state["seq_len"], state["num_kv_heads"]
    assert found["pairs"]["total"] == pattern.count_pairs(num_tokens, kv_heads, is_causal=state["is_causal"])
    assert found["boundary"] == pattern.first_uncrossed_boundary(num_tokens, kv_heads)
    assert sum(sum(each["counts"]) * len(each["heads"]) for each in found["pictures"]) == found["pairs"]["total"]
    by_head = {
        head: each.tally
        for each in head_tiles(pattern, num_tokens, kv_heads, 128, 2, is_causal=state["is_causal"])
        for head in each.heads
    }
    for each in found["tiles"]["heads"]:
        tally = by_head[each["heads"][0]]
        assert [each["partial"], each["full"], each["packed"]] == [tally.partial, tally.full, tally.packed]
    position = np.arange(num_tokens)
    keys = {p for p in position[max(0, state["query"] + 1 - (state["window"] or 0)) :] if p <= state["query"]}  # causal
    keys |= set(range(state["global_tokens"]))
    for i, (length, rate) in enumerate(pattern.split("tests")[0]):
        offset = pattern.offset(i, 0, kv_heads)
        kept = position % length % rate == offset
        if kept[state["query"]]:
            seen = kept & (position // length == state["query"] // length)
            keys |= set(position[seen & (position <= state["query"])] if state["is_causal"] else position[seen])
    assert found["query"]["keys"] == len(keys)


def test_first_uncrossed_boundaries_of_two_branches_are_the_librarys(page: Any) -> None:
    states = [
        large([near, far], [1, rate], 400, 4, 4, is_causal=True, global_tokens=first)
        for near in (8, 13, 16)
        for far in range(17, 80, 3)
        for rate, first in ((2, 0), (3, 0), (4, 0), (4, 70))
    ]
    found = asked(page, "states => states.map(state => explorer.compute(state, ['boundary']).boundary)", states)
    assert found == [pattern_of(state).first_uncrossed_boundary(400, 4) for state in states]
    assert len({*found}) > 20


def test_keys_of_coprime_rates_over_millions_of_tokens_are_not_counted(page: Any) -> None:
    opened(page, "#w=8000000,8000000&r=2999,3001&N=8000000&H=1&view=query")
    scores = 1 + 7_999_999 // 2999 + 1 + 7_999_999 // 3001
    assert page.locator(".conclusion").inner_text().startswith(f"Query 0 of head 0 sees at most {scores:,} keys; the farthest is ")


def test_presets_are_the_librarys(page: Any) -> None:
    presets = asked(page, "() => explorer.PRESETS")
    assert pattern_of(presets["longnet"]["state"]) == DilatedPattern.longnet()
    assert pattern_of(presets["causal"]["state"]) == DilatedPattern.causal(8192, 8)
    assert pattern_of(presets["gigapath"]["state"]) == DilatedPattern.gigapath()
    torchscale = presets["torchscale"]["state"]
    lengths, rates = torchscale["segment_lengths"], torchscale["dilation_rates"]
    assert pattern_of(torchscale) == DilatedPattern.torchscale(lengths, rates)


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_lengths": ["abc", 4], "dilation_rates": [1, 1]},
        {"dilation_rates": [1, "1.5"]},
        {"segment_lengths": [4, 8], "dilation_rates": [1]},
        {"dilation_rates": [1, 9]},
        {"segment_lengths": [], "dilation_rates": []},
        {"window": 0},
        {"window": "near"},
        {"global_tokens": -1},
        {"global_tokens": "few"},
        {"global_tokens": 2, "zero_padding": True},
        {"window": 2, "detach_weights": True},
        {"heads": "some"},
        {"offsets": 'it"s'},
        {"seq_len": 0},
        {"num_kv_heads": 3},
        {"heads": "grouped", "num_heads": 1, "num_kv_heads": 1},
    ],
)
def test_a_refused_state_says_what_the_library_says(page: Any, changes: State) -> None:
    state = published(segment_lengths=[4, 8], dilation_rates=[1, 2], num_heads=4, num_kv_heads=4, seq_len=8) | changes
    with pytest.raises((TypeError, ValueError)) as error:
        checked(pattern_of(state), state["num_heads"], state["seq_len"], state["is_causal"], state["num_kv_heads"])
    assert asked(page, "state => explorer.compute(state)", state) == {"message": str(error.value)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment_lengths": [4, 2**40 + 1]}, "segment_lengths[1] must be at most 1099511627776 on this page, got 1099511627777"),
        ({"seq_len": 2**30 + 1}, "seq_len must be at most 1073741824 on this page, got 1073741825"),
        ({"num_heads": 132}, "num_heads must be at most 128 on this page, got 132"),
        ({"layers": 0}, "layers must be an integer of at least 1, got 0"),
        ({"segment_lengths": [1] * 13, "dilation_rates": [1] * 13}, "pattern must have at most 12 branches on this page, got 13"),
    ],
)
def test_what_this_page_cannot_draw_is_refused(page: Any, changes: State, message: str) -> None:
    state = published(segment_lengths=[4, 8], dilation_rates=[1, 2], num_heads=4, num_kv_heads=4, seq_len=8)
    assert asked(page, "state => explorer.compute(state, [])", state)["message"] is None
    assert asked(page, "state => explorer.compute(state)", state | changes) == {"message": message}


VIEWS = ("pairs", "query", "tiles", "cost", "layers")


def opened(page: Any, address: str) -> None:
    """The page at an address, drawn."""
    page.goto("about:blank")
    page.goto(PAGE.as_uri() + address)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_the_address_gives_every_state_back(page: Any) -> None:
    for state in STATES[:50]:
        again = asked(page, "state => explorer.fromAddress(explorer.toAddress(state))", state | {"view": "layers"})
        assert again == state | {"view": "layers"}


def test_sliders_fields_and_buttons_change_the_pattern(page: Any) -> None:
    page.get_by_role("button", name="Add a branch").click()
    page.get_by_label("Segment length of branch 4", exact=True).fill("96")
    page.get_by_label("Dilation rate of branch 1, slider").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Remove branch 2").click()
    page.get_by_label("Query heads", exact=True).fill("6")
    page.get_by_label("Causal").check()
    page.get_by_label("Offsets").select_option("interleaved")
    page.locator("#python", has_text="interleaved").wait_for()
    names: dict[str, Any] = {}
    exec(page.locator("#python").inner_text(), names)
    assert names["pattern"] == DilatedPattern((16, 64, 96), (2, 4, 8), offsets="interleaved")
    page.wait_for_function("location.hash.includes('offsets=interleaved')")
    state = asked(page, "() => explorer.fromAddress(location.hash)")
    assert (state["num_heads"], state["num_kv_heads"], state["is_causal"]) == (6, 6, True)


def test_a_wrong_field_shows_the_message_and_keeps_the_picture(page: Any) -> None:
    page.get_by_label("Dilation rate of branch 2", exact=True).fill("33")
    message = page.get_by_role("alert")
    message.wait_for()
    assert message.inner_text() == "dilation_rates[1] must be in [1, segment_lengths[1]=32], got 33"
    assert page.locator("#view canvas").first.is_visible()
    page.get_by_label("Dilation rate of branch 2", exact=True).fill("32")
    message.wait_for(state="hidden")
    opened(page, "#w=abc&r=1")
    assert page.get_by_role("alert").inner_text() == "segment_lengths[0] must be an integer, got 'abc'"


BAD_ADDRESSES = [
    ("w=1.5&r=1", "segment_lengths[0] must be an integer, got '1.5'"),
    ("w=<img src=x onerror=alert(1)>&r=1", "segment_lengths[0] must be an integer, got '<img src=x onerror=alert(1)>'"),
    (f"w={','.join(['4'] * 500)}&r={','.join(['1'] * 500)}", "pattern must have at most 12 branches on this page, got 500"),
    ("w=16&r=1&heads=__proto__", "heads must be one of ('all', 'grouped'), got '__proto__'"),
    ("w=16&r=1&head=-5", "head must be an integer of at least 0, got -5"),
    ("w=16&r=1&layers=65&view=layers", "layers must be at most 64 on this page, got 65"),
]


def test_an_address_without_a_legal_pattern_says_why_and_stays(page: Any) -> None:
    for address, message in BAD_ADDRESSES:
        opened(page, f"#{address}")
        assert page.get_by_role("alert").inner_text() == message
        again = asked(page, "() => explorer.fromAddress(explorer.toAddress(explorer.app.state))")
        assert again == asked(page, "() => explorer.app.state"), address


@pytest.mark.parametrize(
    ("heads", "kv_heads", "names"), [(8, 2, ("heads 0-3 (kv 0)", "heads 4-7 (kv 1)")), (2, 2, ("head 0", "head 1"))]
)
def test_heads_are_query_heads_and_say_which_key_value_heads_they_share(
    page: Any, heads: int, kv_heads: int, names: tuple[str, str]
) -> None:
    opened(page, f"#w=16&r=2&N=32&H={heads}&KV={kv_heads}")
    buttons = page.locator(".multiples button")
    assert buttons.all_inner_texts() == [f"{name}: offset {offset}" for offset, name in enumerate(names)]
    buttons.nth(1).click()
    page.wait_for_function(f"explorer.app.state.head === {heads // kv_heads}")
    page.locator(".about", has_text=f"for head {heads // kv_heads}.").wait_for()
    chosen = page.locator("[data-state=head] option:checked").inner_text()
    assert chosen == ("4 (kv 1)" if heads > kv_heads else "1")


def test_tokens_that_no_head_keeps_are_counted_in_each_branch_beside_a_window(page: Any) -> None:
    opened(page, "#w=16,64&r=1,8&window=5&N=64&H=2")
    summary = page.locator("#summary").inner_text().splitlines()
    assert "0" in summary
    assert "48 of 64 in (64, 8)" in summary
    opened(page, "#w=16,64&r=1,2&window=5&N=64&H=2")
    assert "in (" not in page.locator("#summary").inner_text()


@pytest.mark.parametrize("width", [400, 800])
def test_on_narrow_screens_the_controls_stay_above_the_picture(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    opened(page, "#w=16,32,64&r=1,2,4")
    picture = page.locator("#view canvas").first
    picture.focus()
    page.evaluate("scrollBy(0, 300)")
    controls, drawn = page.locator("#controls").bounding_box(), picture.bounding_box()
    assert controls["y"] == 0
    assert controls["height"] < 0.41 * 844
    assert drawn["y"] < 844
    page.get_by_label("Dilation rate of branch 3, slider").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#python", has_text="(1, 2, 5)").wait_for()
    assert page.locator("#controls").bounding_box()["y"] == 0


def test_keys_and_pointer_name_the_pair(page: Any) -> None:
    canvas = page.locator("#view canvas").first
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowDown")
    assert page.locator(".readout").inner_text() == "query 10, key 1: joined by 1 branch, (16, 1)"
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + box["height"] - 8)
    assert page.locator(".readout").inner_text() == "query 63, key 63: joined by 1 branch, (16, 1)"
    page.keyboard.press("Enter")
    page.locator("h2", has_text="One query").wait_for()
    assert page.get_by_label("Query", exact=True).input_value() == "63"
    assert page.evaluate("document.activeElement.id") == "tab-query"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [302, 1280])
def test_every_view_is_accessible_and_fits(browser: Any, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    for view in VIEWS:
        opened(page, f"#w=16,32,64&r=1,2,4&view={view}")
        found = axe.run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") == width
    context.close()
