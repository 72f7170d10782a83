"""What makes a release: workflows and their sessions, one version, links, that nothing loads code, and the release check."""

import ast
import re
import sys
from pathlib import Path

import pytest

import flexdilated
from tests.release import check
from tests.release.dist import relative_links

ROOT = Path(flexdilated.__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"

DONE = {
    "flexdilated/_version.py": '__version__ = "0.1.0"\n',
    "CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-12-01)\n\n- All.\n\n## 0.0.1 (2025-01-01)\n",
    "CITATION.cff": "version: 0.1.0\ndate-released: 2026-12-01\n",
    "tests/release/artefacts/0.1.0/run/x.json": "",
}

pytestmark = pytest.mark.skipif(not WORKFLOWS.exists(), reason="needs the repository")


def workflows() -> list[Path]:
    return sorted(WORKFLOWS.glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text()


def sessions() -> set[str]:
    found = set()
    for node in ast.parse(read("noxfile.py")).body:
        for decorator in getattr(node, "decorator_list", []):
            if ast.unparse(decorator).startswith("nox.session"):
                named = {k.arg: ast.literal_eval(k.value) for k in getattr(decorator, "keywords", []) if k.arg == "name"}
                found.add(named.get("name", getattr(node, "name", "")))
    return found


def test_sessions_of_a_gpu_take_the_python_that_runs_nox() -> None:
    """An environment of their own would have neither its torch nor anything else."""
    text = read("noxfile.py")
    for name in ("gpu", "bench_gpu"):
        assert f'@nox.session(venv_backend="none")\ndef {name}(' in text
    assert text.count("session.run(sys.executable") == text.count('venv_backend="none"')


def constant(name: str) -> tuple[str, ...]:
    """A tuple of noxfile.py, of words and of other tuples."""
    values = {ast.unparse(n.targets[0]): n.value for n in ast.parse(read("noxfile.py")).body if isinstance(n, ast.Assign)}
    found: list[str] = []
    for each in getattr(values[name], "elts", []):
        found += constant(ast.unparse(each.value)) if isinstance(each, ast.Starred) else [ast.literal_eval(each)]
    return tuple(found)


def matrix(text: str, key: str) -> set[str]:
    """The values under a key of a workflow's matrix, in brackets or one a line."""
    found = re.findall(rf"^ +{key}: \[(.+)\]$", text, flags=re.MULTILINE)
    lists = [part.split(",") for part in found] + [
        re.findall(r"- (\S+)", m) for m in re.findall(rf"^ +{key}:\n((?: +- \S+\n)+)", text, re.MULTILINE)
    ]
    return {value.strip(' "') for values in lists for value in values}


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.name)
def test_workflows_call_sessions_that_exist_and_nothing_else(path: Path) -> None:
    text = path.read_text()
    run = re.findall(r"^ +(?:- )?run: (.*)$", text, flags=re.MULTILINE)
    assert run
    for command in run:
        assert re.fullmatch(
            r'python -m pip install nox==[\d.]+|(python -m )?nox -s ("\$\{SESSION\}"|"tests_python-\$\{PYTHON\}"|\w+)', command
        )
    named = {match for command in run for match in re.findall(r"nox -s (\w+)$", command)} | matrix(text, "session")
    assert named
    assert named <= sessions()


def test_every_session_of_tests_runs_in_some_workflow() -> None:
    text = "".join(path.read_text() for path in workflows())
    called = {name for path in workflows() for name in matrix(path.read_text(), "session")} | set(
        re.findall(r'nox -s "?(\w+)', text)
    )
    assert {name for name in sessions() if name.startswith("tests")} <= called


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.name)
def test_workflows_pin_actions_by_hash_and_hold_no_rights(path: Path) -> None:
    text = path.read_text()
    uses = re.findall(r"^ +- uses: (.*)$", text, flags=re.MULTILINE)
    assert uses
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each) for each in uses)
    assert text.count("persist-credentials: false") == sum(each.startswith("actions/checkout@") for each in uses)
    assert re.findall(r"^ *permissions:\n((?: +.*\n)+)", text, flags=re.MULTILINE) == ["  contents: read\n"]


def test_the_gpu_runs_what_a_maintainer_has_labelled_and_no_later_commit() -> None:
    text = (WORKFLOWS / "gpu.yml").read_text()
    assert re.findall(r"types: \[(.*)\]", text) == ["labeled"]
    assert "if: github.event.label.name == 'gpu'" in text


def test_every_python_is_tried_and_those_that_ran_are_declared() -> None:
    pythons = constant("PYTHONS")
    assert matrix((WORKFLOWS / "ci.yml").read_text(), "python") == set(pythons)
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    assert declared == list(pythons)
    assert f'requires-python = ">={pythons[0]}"' in read("pyproject.toml")
    assert "{}.{}".format(*sys.version_info) in pythons


def test_hooks_and_sessions_use_the_same_versions() -> None:
    hooks, nox = (
        dict(re.findall(r'"(ruff|codespell|mypy)==([\d.]+)"', read(name))) for name in (".pre-commit-config.yaml", "noxfile.py")
    )
    assert hooks["ruff"] == nox["ruff"]
    assert set(nox) == {"ruff", "mypy"}


def test_the_version_is_one() -> None:
    assert re.findall(r"^version: (.+)$", read("CITATION.cff"), flags=re.MULTILINE) == [flexdilated.__version__]
    assert re.findall(r"^## (\S+)", read("CHANGELOG.md"), flags=re.MULTILINE)[0] in (flexdilated.__version__, "Unreleased")
    assert '"version"' in re.findall(r"^dynamic = (.*)$", read("pyproject.toml"), flags=re.MULTILINE)[0]


def test_the_page_of_an_index_has_absolute_links_alone() -> None:
    pattern, replacement = re.findall(r"pattern = '(.+?)', replacement = \"(.+?)\"", read("pyproject.toml"))[0]
    assert relative_links(read("README.md"))
    assert relative_links(re.sub(pattern, replacement, read("README.md"))) == []
    home = replacement.removeprefix("](")
    urls = re.search(r"\[project\.urls\]\n((?:\w+ = .*\n)+)", read("pyproject.toml"))
    assert urls is not None
    assert all(f' = "{home}' in line for line in urls[1].splitlines())
    assert f'url: "{home}"' in read("CITATION.cff")


def test_relative_links_are_found_beside_code_that_looks_like_them() -> None:
    text = "[a](docs/a.md) ![b](b.png) [c](https://c.example) [d](#d)\n\n```python\nx[0](y)\n```\n\n    x[0](z)\n"
    assert relative_links(text) == ["docs/a.md", "b.png"]


def test_issue_forms_ask_what_the_doctor_says() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    assert all("`flexdilated doctor --json`" in path.read_text() for path in forms)


def test_the_package_loads_no_code_from_files() -> None:
    """What .github/SECURITY.md says: pickle's readers are never called, torch's only with weights_only, numpy's without pickles."""
    allowed = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
    refused = re.compile(
        r"(pickle\.loads?|Unpickler|marshal\.loads?|torch\.(export|jit)\.load|joblib\.load|shelve\.open|eval|exec)$"
    )
    seen = set()
    for path in (ROOT / "flexdilated").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert not refused.fullmatch(name), f"{path}: {name}"
                if name in allowed:
                    seen.add(name)
                    assert allowed[name] in [ast.unparse(keyword) for keyword in node.keywords], f"{path}: {ast.unparse(node)}"
    assert seen == set(allowed)


def test_a_release_checks_sessions_that_exist_with_arguments_of_some_of_them() -> None:
    release = set(constant("RELEASE"))
    assert {"lint", "types_pythons", "hooks", "hosting", "api", "build", "tests", "minimums", "docs"} < release <= sessions()
    assert check.ARGUMENTS.keys() <= release


def test_every_version_of_a_session_has_a_row_and_a_skipped_one_has_not_passed() -> None:
    found = [
        {"name": "tests_python", "signatures": ["tests_python-3.10"], "result": "success", "duration": 71.4},
        {"name": "tests_python", "signatures": ["tests_python-3.14"], "result": "skipped", "reason": "Python 3.14 not found."},
        {"name": "docs", "signatures": [], "result": "failed", "duration": None},
        {"name": "types", "signatures": ["types"], "result": "aborted"},
    ]
    assert check.table([*check.rows("x", found), *check.rows("hooks", [])]).splitlines() == [
        "session            result   seconds",
        "tests_python-3.10  pass          71",
        "tests_python-3.14  not run        0  Python 3.14 not found.",
        "docs               FAIL           0",
        "types              FAIL           0",
        "hooks              FAIL           0  nox gave no report",
    ]


def test_what_is_left_to_a_person_is_named_until_it_is_done() -> None:
    assert check.left_to_a_person(DONE, ()) == ["then: git tag -s v0.1.0"]
    assert check.left_to_a_person(DONE, ("v0.1.0",)) == ["v0.1.0 is a tag already: raise the version"]
    undone = {
        "flexdilated/_version.py": '__version__ = "0.2.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 0.1.0 (unreleased)\n",
        "CITATION.cff": 'version: 0.1.0\nurl: "https://flexdilated.example/"\n',
        ".github/CODEOWNERS": "* @flexdilated/maintainers\n",
    }
    assert check.left_to_a_person(undone, ()) == [
        "before the first upload: flexdilated.example (the project's address, and those of mail to it) in CITATION.cff",
        "before the first upload: @flexdilated/maintainers (the team that is asked to review) in .github/CODEOWNERS",
        "before the tag: the version must be 0.2.0, got 0.1.0 in CHANGELOG.md and 0.1.0 in CITATION.cff",
        'before the tag: CHANGELOG.md must date 0.2.0, got "unreleased"',
        "before the tag: CITATION.cff must say `date-released:`, the changelog's date",
        "before the tag: python -m tests.release.save_artefacts tests/release/artefacts/0.2.0",
        "then: git tag -s v0.2.0",
    ]


def test_every_address_in_metadata_is_a_placeholder_that_the_check_names() -> None:
    files = [ROOT / "pyproject.toml", ROOT / "CITATION.cff", *(path for path in (ROOT / ".github").rglob("*") if path.is_file())]
    for path in files:
        for name in re.findall(r"[\w.-]+\.example\b|(?<![\w/])@[\w-]+/[\w-]+", path.read_text()):
            assert name in check.PLACEHOLDERS, f"{path}: {name}"
