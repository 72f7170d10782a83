"""What `import flexdilated` loads, and the names that it gives."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexdilated
from flexdilated import DilatedPattern, dilated_attention

SLOW_TO_IMPORT = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "matplotlib", "triton")
NO_PICTURES = "error: matplotlib must be installed for pictures, got none; pip install 'flexdilated[plot]'"
MODELS = ("encoder", "torchscale", "transformers")
OTHERS = ("flexdilated.compat", "flexdilated.slides", *(f"flexdilated.hub.{name}" for name in MODELS))


def run(program: str) -> str:
    """What a program prints in a process of its own."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_imports_load_nothing_that_is_slow_or_of_others_and_a_star_hides_no_name_of_torch() -> None:
    """The compiler, what draws and what shards parameters; models of others, and names of earlier packages. In one process."""
    found = run(
        f"import sys, flexdilated; print([name for name in {(*SLOW_TO_IMPORT, *OTHERS)} if name in sys.modules])\n"
        f"import flexdilated.cli; print([name for name in {SLOW_TO_IMPORT} if name in sys.modules])\n"
        "from torch import nn, distributed\n"
        "from flexdilated import *; from flexdilated.nn import *; from flexdilated.distributed import *\n"
        "print(nn.__name__, distributed.__name__, DilatedPattern.__name__, Rotary.__name__, shard_sequence.__name__)"
    )
    assert found.splitlines() == ["[]", "[]", "torch.nn torch.distributed DilatedPattern Rotary shard_sequence"]


@pytest.mark.slow
def test_import_of_the_package_loads_nothing_and_a_call_loads_what_it_runs() -> None:
    """In one process. Modules, not seconds: more of them is a decision."""
    found = run(
        "import sys, flexdilated\n"
        "def loaded(): return {name for name in sys.modules if name.startswith('flexdilated.')}\n"
        "print(sorted(loaded()), 'torch' in sys.modules)\n"
        "flexdilated.DilatedPattern((4,), (1,)); print(len(loaded()), 'torch' in sys.modules)\n"
        "flexdilated.dilated_attention; print(len(loaded()), sorted({name.split('.')[1] for name in loaded()}))"
    )
    package, pattern, call = found.splitlines()
    assert package == "['flexdilated._version'] False"
    assert pattern in [f"{count} False" for count in range(8, 13)]
    number, layers = call.split(maxsplit=1)
    assert int(number) <= 64
    assert layers == "['_version', 'attention', 'backends', 'core', 'masks', 'reference']"


@pytest.mark.slow
def test_help_and_errors_of_usage_need_no_torch() -> None:
    found = run(
        "import sys\n"
        "from flexdilated.cli import app, slides\n"
        "from typer.testing import CliRunner\n"
        "def named(group): return [c.name or c.callback.__name__.replace('_', '-') for c in group.registered_commands]\n"
        "commands = [[], *([name] for name in named(app)), ['slides'], *(['slides', name] for name in named(slides.app))]\n"
        "codes = [CliRunner().invoke(app, [*words, '--help']).exit_code for words in commands]\n"
        "wrong = (['shwo'], ['show', '--widnow', '3'], ['plan', '--tokens', 'many'], ['slides', 'encode'])\n"
        "print(set(codes), {CliRunner().invoke(app, words).exit_code for words in wrong}, 'torch' in sys.modules)"
    )
    assert found == "{0} {2} False"


def test_names_are_imported_for_type_checkers_as_for_programs() -> None:
    imports = [node for node in ast.walk(ast.parse(Path(flexdilated.__file__).read_text())) if isinstance(node, ast.ImportFrom)]
    imports = [node for node in imports if node.module not in ("typing", "flexdilated._version")]
    typed = {each.asname: getattr(importlib.import_module(node.module or ""), each.name) for node in imports for each in node.names}
    typed["draw_pattern"] = typed.pop("_draw")
    assert {*typed} == {*flexdilated.__all__}
    for name in flexdilated.__all__:
        assert getattr(flexdilated, name) is typed[name]
        assert name in dir(flexdilated)


def test_modules_are_found_by_name_and_others_are_not() -> None:
    assert flexdilated.nn is importlib.import_module("flexdilated.nn")
    with pytest.raises(AttributeError, match="module 'flexdilated' has no attribute 'attend'"):
        flexdilated.attend  # noqa: B018


@pytest.mark.parametrize("package", ["flexdilated.nn", "flexdilated.distributed"])
def test_all_lists_every_name_that_a_package_imports_for_its_users(package: str) -> None:
    module = importlib.import_module(package)
    public = {name for name, value in vars(module).items() if not name.startswith("_") and not isinstance(value, type(sys))}
    assert set(module.__all__) == public


@pytest.mark.slow
def test_package_imports_without_extras_and_commands_say_which_they_lack(tmp_path: Path) -> None:
    """In one process: a command without typer ends before it imports torch."""
    found = run(
        "import sys, runpy, contextlib, io, importlib, pkgutil\n"
        "sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib')))\n"
        "def ends(*arguments):\n"
        "    sys.argv[1:], said = arguments, io.StringIO()\n"
        "    with contextlib.redirect_stderr(said):\n"
        "        try: runpy.run_module('flexdilated', run_name='__main__')\n"
        "        except SystemExit as end: print(end.code, said.getvalue(), end='')\n"
        "ends('--version')\n"
        "import flexdilated\n"
        "others = ('flexdilated.cli', 'flexdilated.hub', 'flexdilated.draw.terminal', 'flexdilated.__main__')\n"
        "for m in pkgutil.walk_packages(flexdilated.__path__, 'flexdilated.', onerror=lambda name: None):\n"
        "    m.name.startswith(others) or importlib.import_module(m.name)\n"
        "del sys.modules['typer'], sys.modules['rich']\n"
        f"ends('train', '--output', {str(tmp_path)!r})\n"
        "from flexdilated import *; import torch; from flexdilated.draw.losses import draw_losses\n"
        "from flexdilated.slides.picture import draw_slide_map\n"
        "for draw in (lambda: draw_pattern(DilatedPattern((4,), (1,)), 8, 2), lambda: draw_attention_map(torch.rand(2, 8)),\n"
        "             lambda: draw_losses({}, bytes_per_step=1),\n"
        "             lambda: draw_slide_map(torch.ones(1), torch.zeros(1, 2), tile_size=1.0)):\n"
        "    try: draw()\n"
        "    except ImportError as error: print('error:', error)\n"
    )
    typer = "error: typer must be installed for commands, got none; pip install 'flexdilated[cli]'"
    assert found.splitlines() == [f"2 {typer}", f"2 {NO_PICTURES}", *[NO_PICTURES] * 4]


def test_heads_before_tokens_are_named_where_shapes_show_them() -> None:
    pattern, heads, num_tokens = DilatedPattern((7,), (1,)), 6, 13
    x = torch.randn(2, num_tokens, heads, 5)
    q, k = torch.randn(2, heads, num_tokens, 5), torch.randn(2, 3, num_tokens, 5)
    with pytest.raises(ValueError, match=r"k must match q in B, N and D, .*; the layout is \(B, N, H, D\): transpose dims 1 and 2"):
        dilated_attention(q, k, k, pattern)
    mask = torch.zeros(2, num_tokens, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(B, N\)=\(2, 6\), .*; the layout is \(B, N, H, D\)"):
        dilated_attention(q, q, q, pattern, key_padding_mask=mask)
    with pytest.raises(ValueError, match=r"k must match q in B, N and D, q=\(2, 13, 6, 5\), got \(2, 11, 6, 5\)$"):
        dilated_attention(x, x[:, :11], x, pattern)


def test_names_for_type_checkers_hide_no_submodule() -> None:
    package = Path(flexdilated.__file__).parent
    imports = [node for node in ast.walk(ast.parse((package / "__init__.py").read_text())) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    assert "DilatedPattern" in names
    assert not [name for name in names if (package / name).is_dir() or (package / f"{name}.py").exists()]
