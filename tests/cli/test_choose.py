"""`flexdilated choose`: the lines, the picture, and what is refused."""

import json
from pathlib import Path

import pytest

from flexdilated import DilatedPattern
from tests.commands import invoke, refused


def test_prints_lines_of_python_with_sentences_and_addresses() -> None:
    mine = ("--segment-lengths", "64,256", "--dilation-rates", "1,4", "--offsets", "interleaved")
    code, out, err = invoke("choose", "--tokens", 512, "--heads", 16, "--kv-heads", 8, "--causal", *mine)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].startswith("few key/value heads (8): little is gained at 512 tokens. ")
    assert [lines[0], *lines[2:6]] == [
        "512 tokens, 16 heads, 8 key/value heads, causal; budget 10 % of dense attention",
        "",
        "1  DilatedPattern((16, 512), (1, 4))",
        "   9.6 % of dense attention. Each token reads its segment of 16 tokens. In each head, 1 in 4 of all 512 tokens also read "
        "each other; groups of 2 key/value heads keep the same tokens. No token reads later tokens.",
        "   flexdilated explorer 'w=16,512&r=1,4&N=512&H=16&KV=8&causal=1&query=511&heads=all&offsets=blocked'",
    ]
    assert lines[-3] == "6  DilatedPattern((64, 256), (1, 4), offsets='interleaved')"
    assert lines[-2].startswith("   15.8 % of dense attention, over the budget. Each token reads its segment of 64 tokens. ")
    assert " Not connected: not all information from tokens 0 to 255 reaches " in lines[-2]


def test_budget_is_a_share_of_dense_attention(tmp_path: Path) -> None:
    picture = tmp_path / "choice.png"
    code, out, _ = invoke("choose", "--tokens", 127, "--heads", 3, "--budget", "50%", "--preset", "gigapath", "-o", picture)
    assert code == 0
    assert out.startswith("127 tokens, 3 heads, not causal; budget 50 % of dense attention\n")
    assert "(1, 2, 4, 8, 16), zero_padding=True, detach_weights=True)" in out
    assert out.endswith(f"&zero_padding=1&detach_weights=1'\nwrote '{picture}'\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "0"), "budget must be in (0, 1], got 0.0"),
        (("--budget", "10"), "budget must be in (0, 1], got 10.0; 0.1 or 10% is a tenth of the pairs"),
        (("--budget", "x"), "Invalid value for '--budget': "),
    ],
)
def test_refuses_in_one_line(arguments: tuple[object, ...], message: str) -> None:
    assert refused("choose", "--tokens", 9, *arguments).startswith(message)


FALCON = {"num_attention_heads": 8, "num_kv_heads": 8, "max_position_embeddings": 300, "multi_query": True}
LLAMA = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "more", "title"),
    [
        (LLAMA, [], "512 tokens, 16 heads, 8 key/value heads,"),
        ({"text_config": LLAMA, "num_attention_heads": 3}, [], "512 tokens, 16 heads, 8 key/value heads,"),
        ({**LLAMA, "num_key_value_heads": None}, [], "512 tokens, 16 heads,"),
        ({"n_head": 4, "n_positions": 256}, [], "256 tokens, 4 heads,"),
        (LLAMA, ["--tokens", 300, "--kv-heads", 4], "300 tokens, 16 heads, 4 key/value heads,"),
        ({"num_key_value_heads": 8}, ["--tokens", 300, "--heads", 24], "300 tokens, 24 heads, 8 key/value heads,"),
        (FALCON, [], "300 tokens, 8 heads, 1 key/value head,"),
        ({**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}, [], "300 tokens, 8 heads, 2 key/value heads,"),
        ({**FALCON, "num_kv_heads": 8, "multi_query": False}, [], "300 tokens, 8 heads,"),
        ({"n_head": 4, "n_positions": 256, "multi_query": True}, [], "256 tokens, 4 heads, 1 key/value head,"),
    ],
)
def test_sizes_come_from_a_config_where_no_option_says(
    tmp_path: Path, config: dict[str, object], more: list[object], title: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        code, out, err = invoke("choose", "--from-config", path, *more)
        assert (code, err) == (0, "")
        assert out.startswith(f"{title} not causal; ")


@pytest.mark.parametrize(
    ("architectures", "more", "kind"),
    [
        (["LlamaForCausalLM"], [], "causal"),
        (["LlamaForCausalLM"], ["--no-causal"], "not causal"),
        (["BertModel"], [], "not causal"),
        (None, ["--causal"], "causal"),
    ],
)
def test_a_config_says_whether_its_model_is_causal_where_no_option_does(
    tmp_path: Path, architectures: list[str] | None, more: list[str], kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": architectures}))
    assert f", 8 key/value heads, {kind}; " in invoke("choose", "--from-config", tmp_path, *more)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--from-config must be a config.json of the transformers library, got '{file}': Expecting property name"),
        ("[]", "--from-config must be a config.json of the transformers library, got '{file}': 'list' object is not a mapping"),
        (
            '{"text_config": 5}',
            "--from-config must be a config.json of the transformers library, got '{file}': 'int' object is not",
        ),
        ("{}", "--from-config must hold max_position_embeddings or n_positions, got none in '{file}'; use --tokens"),
        ('{"n_positions": 9}', "--from-config must hold num_attention_heads or n_head, got none in '{file}'; use --heads"),
        (
            '{"n_positions": 0.5}',
            "--from-config must hold an integer of at least 1 as n_positions, got 0.5 in '{file}'; use --tokens",
        ),
        ('{"n_positions": 9, "n_head": 3, "num_key_value_heads": 2}', "--kv-heads must divide --heads=3, got 2"),
    ],
)
def test_a_config_that_lacks_a_size_is_refused_by_the_name_of_its_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert refused("choose", "--from-config", file).startswith(message.replace("{file}", str(file)))


def test_tokens_or_a_config_must_be_given(tmp_path: Path) -> None:
    assert refused("choose") == "--tokens or --from-config must be given, got neither\n"
    assert refused("choose", "--from-config", tmp_path).startswith(f"{tmp_path / 'config.json'} must be a file that can be read")


def test_json_holds_what_is_printed() -> None:
    line = "choose --tokens 512 --heads 16 --kv-heads 8 --segment-lengths 64,256 --dilation-rates 1,4"
    found, printed = json.loads(invoke(*line.split(), "--json")[1]), invoke(*line.split())[1]
    assert [found[name] for name in ("tokens", "heads", "kv_heads", "causal", "budget")] == [512, 16, 8, False, 0.1]
    assert [each["is_given"] for each in found["patterns"]] == [False] * (len(found["patterns"]) - 1) + [True]
    for number, each in enumerate(found["patterns"], 1):
        over = "" if each["is_within_budget"] else ", over the budget"
        share = f"{100 * each['share']:.3g} % of dense attention{over}. {each['why']}"
        assert f"\n{number}  {each['python']}\n   {share}\n   flexdilated explorer '{each['explorer']}'\n" in printed
        pattern = DilatedPattern.from_dict(each["pattern"])
        assert each["pairs"] == pattern.count_pairs(512, 8)


@pytest.mark.parametrize(
    ("heads", "tokens", "says"),
    [
        (
            4,
            4096,
            "takes 43 % of the pairs; a local segment of 256 tokens and a far branch over all tokens are within the budget from",
        ),
        (4, 6500, "the preset for causal models, takes "),
        (4, 7000, None),
        (2, 2**20, "need at least 25 % of the pairs at any length, more than the budget."),
        (1, 512, "takes 100 % of the pairs; "),
    ],
)
def test_few_heads_are_said_with_the_length_from_which_they_pay(heads: int, tokens: int, says: str | None) -> None:
    line = invoke("choose", "--tokens", tokens, "--heads", heads, "--causal")[1].splitlines()[1]
    assert line.startswith(f"few key/value heads ({heads}): little is gained at {tokens:,} tokens. ") == (says is not None)
    assert (says or "") in line
    branches = ((256, 1), (tokens, heads))
    pairs = sum(DilatedPattern((length,), (rate,)).count_pairs(tokens, heads, is_causal=True) for length, rate in branches)
    assert (pairs > 0.1 * heads * tokens * (tokens + 1) / 2) == (says is not None)
