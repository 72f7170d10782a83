"""The options of all commands: one spelling, type and default for one thing; and how every command refuses and ends."""

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType, NoneType
from typing import NamedTuple, get_args

import pytest
import torch
from typer.models import OptionInfo

from flexdilated import DilatedPattern
from flexdilated.analysis import strategies
from flexdilated.cli import app, diagnosis, doctor, generate, plan, show, slides, train, training, tune
from flexdilated.cli.options import device_named
from flexdilated.cli.slides import encode
from flexdilated.training import checkpoint, corpus, distributed, trainer
from tests.commands import invoke, refused

COMMANDS = {
    group + (command.name or command.callback.__name__.replace("_", "-")): command.callback
    for group, commands in (("", app), ("slides ", slides.app))
    for command in commands.registered_commands
    if command.callback
}

# Defaults that differ with what a command is for: a model to train, a picture that fits a page, a layer of a large model, a config.
OWN_DEFAULTS = {
    "--causal",
    "--context-parallel",
    "--heads",
    "--tokens",
    "--segment-lengths",
    "--dilation-rates",
    "--batch-size",
    "--output",
    "--dtype",
    "--head-dim",
}

# Other words for what an option means; no command may spell it so.
SYNONYMS = {
    "--heads": {"--num-heads", "--n-heads", "--num-query-heads"},
    "--kv-heads": {"--num-kv-heads"},
    "--context-parallel": {"--ranks", "--world-size"},
    "--tokens": {"--sequence-length", "--seq-len", "--num-tokens", "--length"},
    "--batch-size": {"--batch", "--sequences"},
    "--preset": {"--pattern"},
    "--causal": {"--is-causal"},
    "--output": {"--out", "--path"},
    "--layers": {"--num-layers", "--depth"},
}
# Options that say which of the model's layers are written, not how many there are; and choices of other dtypes.
OWN_MEANINGS = {("slides encode-all", "--layers"), ("plan", "--dtype"), ("train", "--dtype"), ("tune", "--dtype")}


class Option(NamedTuple):
    spellings: tuple[str, ...]
    type: object
    default: object


def options(command: str) -> list[Option]:
    """From the signature, since versions of typer keep them in different places."""
    callback = COMMANDS[command]
    found = []
    for name, parameter in inspect.signature(callback, eval_str=True).parameters.items():
        kind, info = get_args(parameter.annotation)
        if isinstance(info, OptionInfo):
            kinds = [each for each in get_args(kind) if each is not NoneType] or [kind]
            declared = [info.default if isinstance(info.default, str) else "", *(info.param_decls or ())]  # in Annotated: the first
            spellings = [each for declaration in declared if declaration for each in declaration.split("/")]
            found.append(Option(tuple(spellings or [f"--{name.replace('_', '-')}"]), kinds[0], parameter.default))
    return found


def spellings(*commands: str) -> set[str]:
    return {name for command in commands for option in options(command) for name in option.spellings}


def test_one_thing_has_one_spelling_type_and_default() -> None:
    seen: dict[str, Option] = {}
    for command in COMMANDS:
        for option in options(command):
            name = option.spellings[0]
            if (command, name) in OWN_MEANINGS:
                continue
            meaning = option._replace(default=None) if name in OWN_DEFAULTS else option
            assert seen.setdefault(name, meaning) == meaning, (command, name)
    synonyms = set().union(*SYNONYMS.values())
    assert not synonyms & spellings(*COMMANDS)
    assert {"--heads", "--device", "--tokens", "--preset", "--causal", "--json"} <= set(seen)


MODULES: dict[str, list[ModuleType]] = {
    "show": [show],
    "plan": [plan, strategies],
    "slides encode": [encode],
    "doctor": [doctor, diagnosis],
    "tune": [tune],
    "train": [train, training, checkpoint, corpus, distributed, trainer],
    "generate": [generate],
}
OTHERS = {
    "--nproc-per-node",
    "--max-restarts",
    "--crossover",
    "--all",
    "--model",
    "--prompt",
}  # of torchrun, benchmarks, `generate`


def mentioned(source: str) -> set[str]:
    strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {option for text in strings for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text)}


@pytest.mark.parametrize("command", MODULES)
def test_messages_name_options_that_the_command_has(command: str) -> None:
    own = spellings(command)
    for module in MODULES[command]:
        assert mentioned(inspect.getsource(module)) <= own | OTHERS


def test_auto_is_the_first_kind_of_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, mps, best, without_mps in ((True, True, "cuda", "cuda"), (False, True, "mps", "cpu"), (False, False, "cpu", "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=cuda: available)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda available=mps: available)
        assert device_named("auto", auto=["cuda", "mps"]) == torch.device(best)
        assert device_named("auto", auto=["cuda"]) == torch.device(without_mps)


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_option_is_refused_with_one_line(command: str) -> None:
    err = refused(*command.split(), "--abacus", "7")
    assert re.fullmatch(rf"No such option:? .?--abacus\b[^\n]*; see .* {command} --help\n", err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sow"], r"No such command 'sow'"),
        (["--abacus"], r"No such option"),
        (["slides", "encode"], r"Missing argument 'TILES'"),
        (["plan", "--tokens", "many", "--context-parallel", "2"], r"Invalid value for '--tokens'"),
        (["show", "--preset", "bert"], r"Invalid value for '--preset': 'bert' is not one of 'causal', 'longnet', 'gigapath'"),
        (["show", "--preset", "causal"], r"--preset causal must come with --tokens, got none"),
        (
            ["choose", "--tokens", "9", "--budget", "ten"],
            r"Invalid value for '--budget': must be a share such as 10% or 0\.1, got 'ten'",
        ),
        (["choose", "--tokens", "9", "-o", "nowhere/a.png"], r"--output must be in a folder that exists, got 'nowhere/a\.png'"),
        (["train", "extra"], r"Got unexpected extra argument"),
        (["doctor", "--json", "--json=1"], r"Option '--json' does not take a value"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert re.match(message, refused(*arguments))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_cuts_nothing_off_in_a_terminal_of_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    code, out, _ = invoke(*command.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) == 80
    assert "\u2026" not in out


def test_interrupted_command_ends_with_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(strategies, "strategies", interrupt)
    assert invoke("plan", "--tokens", 9, "--context-parallel", 2)[0] == 130


def test_arguments_have_the_names_of_options_but_not_inside_what_python_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = DilatedPattern((64, 512), (1, 4))

    def refuse(*_: object) -> None:
        raise ValueError(f"num_heads must fit segment_lengths=(64, 512), got call 7 with {pattern}, not num_heads")

    monkeypatch.setattr(strategies, "strategies", refuse)
    expected = f"error: --heads must fit --segment-lengths=(64, 512), got call 7 with {pattern}, not --heads\n"
    assert invoke("plan", "--tokens", 9, "--context-parallel", 2) == (2, "", expected)


def _pages(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.md")) if "_build" not in path.parts]


def test_commands_of_the_docs_use_options_as_they_are_spelled_now() -> None:
    root = Path(__file__).parents[2]
    text = "\n".join(path.read_text() for path in (root / "README.md", *_pages(root / "docs")))
    lines = re.findall(r"^    .*?flexdilated ((?:slides )?[a-z-]+)(.*)$", text, flags=re.MULTILINE)
    assert {command for command, _ in lines} >= {"train", "show", "doctor", "plan", "generate"}
    for command, rest in lines:
        used = set(re.findall(r"(?<!\S)--[a-z-]+", rest.split("#")[0]))
        assert used <= spellings(command), (command, used - spellings(command))
