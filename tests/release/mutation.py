"""Mutants: one small change of the integer core at a time, which the tests of that file must notice. `nox -s mutation` runs them.

First the file's tests run without a mutant, and coverage tells which of them run which lines and in what time. Then a mutant meets
the tests that run its statement, the fastest first, until one fails. It is killed, too, by a test that takes ten times the time of
the processor that it takes without it: no clock on the wall. What survives meets all other tests of the file, and stands in
`survivors.json` with the reason why it computes the same; a survivor that does not is a hole in the tests. One process imports
torch, and forks for every mutant. Needs `os.fork`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.release.mutants import ROOT, Loader, Mutant, mutants, unchanged

SURVIVORS = Path(__file__).with_name("survivors.json")
KEPT = Path(__file__).with_name("mutation.json")  # what the page on compatibility shows
SEED = 20261122
SLOWER, SECONDS = 10, 5  # a test may take so many times its processor time, and so many seconds more
MEMORY = 16 << 30  # of addresses: what a mutant allocates without end ends there
# Exit statuses; by any other a mutant is killed. No tests are found where their parameters have other names under the mutant.
ENDS = {0: "alive", int(pytest.ExitCode.NO_TESTS_COLLECTED): "alive", -signal.SIGPROF: "stopped"}

# What is mutated, and the tests that must notice.
TESTS = {
    "flexdilated/core/pattern.py": ("tests/test_pattern.py",),
    "flexdilated/core/pieces.py": ("tests/core/test_pieces.py",),
    "flexdilated/core/lse.py": ("tests/core/test_lse.py",),
    "flexdilated/distributed/plan.py": ("tests/distributed/test_plan.py",),
    "flexdilated/distributed/segments.py": ("tests/distributed/test_plan.py",),
    "flexdilated/distributed/work.py": ("tests/distributed/test_plan.py", "tests/distributed/test_shares.py"),
    "flexdilated/distributed/shares.py": ("tests/distributed/test_shares.py", "tests/distributed/test_plan.py"),
    "flexdilated/distributed/spans.py": ("tests/distributed/test_spans.py", "tests/distributed/test_plan.py"),
    "flexdilated/distributed/progressions.py": ("tests/distributed/test_progressions.py",),
    "flexdilated/distributed/lines.py": ("tests/distributed/test_counts.py", "tests/distributed/test_plan.py"),
    "flexdilated/distributed/listing.py": ("tests/distributed/test_plan.py",),
    "flexdilated/distributed/counts.py": ("tests/distributed/test_counts.py", "tests/distributed/test_plan.py"),
    "flexdilated/masks/blocks.py": ("tests/masks/test_blocks.py", "tests/masks/test_masks.py"),
    "flexdilated/masks/functions.py": ("tests/masks/test_masks.py",),
    "flexdilated/masks/block_mask.py": (
        "tests/masks/test_block_mask.py",
        "tests/masks/test_blocks.py",
        "tests/masks/test_masks.py",
    ),
}
LEFT_OUT = "not compiled_flex"  # kernels that a compiler builds: minutes for every mutant


@dataclass(frozen=True)
class Clean:
    """The tests of a file without a mutant."""

    begin: float  # processor seconds before the first test: imports, parameters
    seconds: dict[str, float]  # of every test
    tests: dict[int, set[str]]  # that run a line; "" for what runs before them

    def of(self, mutant: Mutant) -> list[str]:
        """The tests that run the statement of a mutant, the fastest first; all of them where that runs before every test."""
        first, last = mutant.span
        found = set().union(*(self.tests.get(line, set()) for line in range(first, last + 1)))
        named = sorted(found - {""}, key=self.seconds.__getitem__)
        return named if "" not in found else named + sorted(self.seconds.keys() - found, key=self.seconds.__getitem__)


class _Plugin:
    """Of pytest: chooses and orders tests, forgets what the package's caches hold before each, and stops it after its time."""

    def __init__(self, clean: Clean | None, only: Sequence[str], without: Collection[str], coverage: Any = None) -> None:
        self.clean, self.only, self.without, self.coverage = clean, only, without, coverage
        self.begin, self.seconds = 0.0, {}  # type: float, dict[str, float]
        self.caches: list[Any] = []

    def pytest_configure(self) -> None:
        """Examples are drawn as ever; a failure is enough, and need not be made small."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings.get_profile("flexdilated"), phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.clean is not None:
            order = {test: i for i, test in enumerate(self.only or sorted(self.clean.seconds, key=self.clean.seconds.__getitem__))}
            chosen = [item for item in items if (item.nodeid in order or not self.only) and item.nodeid not in self.without]
            items[:] = sorted(chosen, key=lambda item: order.get(item.nodeid, -1))
        modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "flexdilated"]
        holders = [each for module in modules for each in (module, *(x for x in vars(module).values() if isinstance(x, type)))]
        kinds = type(functools.lru_cache(maxsize=1)(len)), sys.modules["flexdilated.core.bounded_cache"].Recent
        self.caches = list({id(x): x for each in holders for x in vars(each).values() if isinstance(x, kinds)}.values())
        self.begin = time.process_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        for cache in self.caches:
            cache.cache_clear()
        begin = time.process_time()
        if self.clean is not None:
            signal.setitimer(signal.ITIMER_PROF, SLOWER * self.clean.seconds.get(item.nodeid, 1.0) + SECONDS)
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)
        result = yield
        self.seconds[item.nodeid] = time.process_time() - begin
        return result


def _pytest(tests: Sequence[str], plugin: _Plugin) -> int:
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-k", LEFT_OUT, *tests], plugins=[plugin]))


def _fork(work: Any) -> int:
    """The process in which `work()` gives the exit status, in silence, with what is imported here."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            status = work()
        finally:
            os._exit(status)
    return child


def record(files: Sequence[str], tests: Sequence[str]) -> dict[str, Clean]:
    """What tests do without a mutant, for each of the files that they test; nothing if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "clean.json"

        def work() -> int:
            import coverage

            paths = [str(ROOT / file) for file in files]
            measured = coverage.Coverage(data_file=None, config_file=False, include=paths)
            plugin = _Plugin(None, (), (), measured)
            measured.start()
            status = _pytest(tests, plugin)
            measured.stop()
            lines = [measured.get_data().contexts_by_lineno(path) for path in paths]
            written.write_text(json.dumps([plugin.begin, plugin.seconds, lines]))
            return status

        _, status = os.waitpid(_fork(work), 0)
        if status:
            return {}
        begin, seconds, lines = json.loads(written.read_text())
    by_line = ({int(line): set(found) for line, found in each.items()} for each in lines)
    return {file: Clean(begin, seconds, each) for file, each in zip(files, by_line)}


def outcomes(
    clean: Clean, asked: Iterable[tuple[Mutant, Sequence[str], Collection[str]]], jobs: int
) -> Iterator[tuple[Mutant, str, float]]:
    """`killed`, `stopped` or `alive`, and the processor seconds of it, of mutants under some of the tests, or all without some."""

    def work(mutant: Mutant, only: Sequence[str], without: Collection[str]) -> int:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.setitimer(signal.ITIMER_PROF, SLOWER * clean.begin + SECONDS)
        sys.meta_path.insert(0, Loader(mutant))
        files = sorted({test.partition("::")[0] for test in only}) if only else TESTS[mutant.file]
        return _pytest(files, _Plugin(clean, only, without))

    waiting, running = iter(asked), {}  # type: Iterator[tuple[Mutant, Sequence[str], Collection[str]]], dict[int, Mutant]
    while True:
        while len(running) < jobs and (each := next(waiting, None)) is not None:
            running[_fork(functools.partial(work, *each))] = each[0]
        if not running:
            return
        child, status, usage = os.wait3(0)
        yield running.pop(child), ENDS.get(os.waitstatus_to_exitcode(status), "killed"), usage.ru_utime + usage.ru_stime


def survivors(found: Sequence[Mutant], clean: Clean, known: Collection[Any], jobs: int, counts: Counter[str]) -> list[Mutant]:
    """Those that no test of their file kills, of a file's mutants; `counts` gets how the others ended, and the time of all."""
    first = {mutant: clean.of(mutant) for mutant in found}
    counts["without a test"] = sum(not tests for tests in first.values())
    alive = []
    for mutant, outcome, seconds in outcomes(clean, ((mutant, tests, ()) for mutant, tests in first.items()), jobs):
        counts["seconds"] += seconds
        if outcome == "alive":
            alive.append(mutant)
        else:
            counts[outcome] += 1
    others = [mutant for mutant in alive if mutant.key not in known and 0 < len(first[mutant]) < len(clean.seconds)]
    again = [(mutant, (), first[mutant]) for mutant in others]
    for mutant, outcome, seconds in outcomes(clean, again, jobs):
        counts["seconds"] += seconds
        if outcome != "alive":
            counts[outcome] += 1
            alive.remove(mutant)
    return sorted(alive, key=lambda mutant: mutant.place)


def _import_what_tests_share() -> None:
    """All but flexdilated, which every child imports anew."""
    import einops  # noqa: F401
    import hypothesis  # noqa: F401
    import torch.nn.attention.flex_attention

    with contextlib.suppress(ImportError):
        import torch.distributed.tensor  # noqa: F401


def keep(file: str, counts: dict[str, int]) -> None:
    """Write what a run of one file's mutants gave, beside what is kept of the others."""
    from benchmarks.environment import describe

    about = {key: value for key, value in describe().items() if key in ("torch", "commit", "date")}
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[file] = counts | about
    KEPT.write_text(json.dumps({name: kept[name] for name in TESTS if name in kept}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="file", help=f"to mutate: {', '.join(TESTS)}")
    parser.add_argument("--sample", type=int, default=20, help="at most this many mutants of a file, drawn by the seed; 0: all")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--keep", action="store_true", help=f"write the counts to {KEPT.name}, for the documentation")
    parser.add_argument("--list", action="store_true", help="only count and name them")
    options = parser.parse_args()
    if unknown := set(options.files) - TESTS.keys():
        parser.error(f"file must be one of {', '.join(TESTS)}, got {', '.join(sorted(unknown))}")
    known = {(each["file"], each["line"], each["change"]) for each in json.loads(SURVIVORS.read_text())}
    # pytest's plugins would warn that hypothesis is imported already. In CI hypothesis draws the same examples every time.
    os.environ.update(OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", CI="true")
    os.chdir(ROOT)
    if not options.list:
        _import_what_tests_share()
    total: Counter[str] = Counter()
    cleans: dict[str, Clean] = {}
    for file in options.files:
        found = chosen = mutants(file)
        if 0 < options.sample < len(found):
            chosen = sorted(random.Random(options.seed).sample(found, options.sample), key=lambda each: each.place)
        if options.list:
            print(f"{file}: {len(found)}", *(f"  {each.name}" for each in chosen), sep="\n")
            continue
        if file not in cleans:
            cleans |= record([each for each in options.files if TESTS[each] == TESTS[file]], TESTS[file])
            ends = outcomes(cleans[file], [(unchanged(file), (), ())], 1) if file in cleans else [(None, "killed", 0.0)]
            if any(outcome != "alive" for _, outcome, _ in ends):
                print(f"{file}: its tests must pass without a mutant: {' '.join(TESTS[file])}")
                return 2
        clean = cleans[file]
        counts: Counter[str] = Counter()
        alive = survivors(chosen, clean, known, options.jobs, counts)
        for mutant in alive:
            print(f"  {'explained' if mutant.key in known else 'SURVIVED'} {mutant.name}")
        explained = sum(mutant.key in known for mutant in alive)
        counts.update(mutants=len(found), run=len(chosen), explained=explained, open=len(alive) - explained)
        names = ("mutants", "run", "killed", "stopped", "explained", "open", "without a test", "seconds")
        print(f"{file}: {', '.join(f'{counts[name]:.0f} {name}' for name in names)}", flush=True)
        total += counts
        if options.keep:
            keep(file, {name: counts[name] for name in names[:6]})
    if not options.list:
        ended = f"{total['killed']} killed, {total['stopped']} stopped, {total['explained']} explained, {total['open']} open"
        print(f"{total['run']} of {total['mutants']} mutants: {ended}; {total['seconds']:.0f} s of processor time")
    return 1 if total["open"] else 0


if __name__ == "__main__":
    sys.exit(main())
