"""Ranks of real processes of which one has another package, another clock, or no room for files, as on a host of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

import flexdilated
from tests.training import runs
from tests.training import test_ranks as ranks

Popen: TypeAlias = "subprocess.Popen[str]"
PACKAGE = Path(flexdilated.__file__).parent
AHEAD = 320_000_000  # seconds, ten years
COMPILER = shutil.which("c++") or shutil.which("g++")
# The calls by which a process asks for the time of day; the kernel's own timers are left alone.
CLOCK = """
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

extern "C" int clock_gettime(clockid_t clock, timespec* now) {
    static auto real = reinterpret_cast<int (*)(clockid_t, timespec*)>(dlsym(RTLD_NEXT, "clock_gettime"));
    int code = real(clock, now);
    if (code == 0 && clock == CLOCK_REALTIME) now->tv_sec += AHEAD;
    return code;
}

extern "C" time_t time(time_t* kept) {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}
"""


def started(folder: Path, text: Path, odd: str, *more: str, rank: int = 1, **changes: object) -> AbstractContextManager[Popen]:
    """The command under torchrun on two ranks, of which one runs some words of a shell before."""
    script = folder / "host.sh"
    lines = [f'cd "{folder}"', f'[ "$RANK" != {rank} ] || {odd}', f'exec "{sys.executable}" -m flexdilated "$@"']
    script.write_text("\n".join(lines))  # Python looks for modules where it starts, which is where this package is
    return ranks.started(2, folder / "run", text, *more, program=["--no-python", "sh", str(script)], **changes)


@pytest.mark.ranks
@pytest.mark.slow
@ranks.needs_proc
def test_a_rank_of_another_version_is_named(tmp_path: Path, text: Path) -> None:
    copy = tmp_path / "other" / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    names = copy / "_version.py"
    here = f'__version__ = "{flexdilated.__version__}"'
    assert here in names.read_text()
    names.write_text(names.read_text().replace(here, '__version__ = "9.9.9"'))
    with started(tmp_path, text, f"export PYTHONPATH='{copy.parent}'") as process:
        code, out, (error,) = ranks.ended(process)
    assert code == 1  # torchrun's
    assert "step" not in out
    held = f"'{flexdilated.__version__}' on rank 0 and '9.9.9' on rank 1"
    assert error == f"error: ranks must agree on the version of flexdilated, got {held}"
    assert not list((tmp_path / "run").rglob("*"))


@pytest.mark.ranks
@pytest.mark.slow
@ranks.needs_proc
@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="compiles a library that is loaded first")
def test_a_rank_whose_clock_is_ten_years_ahead_trains_as_others(tmp_path: Path, text: Path) -> None:
    library, source = tmp_path / "clock.so", tmp_path / "clock.cpp"
    source.write_text(CLOCK)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", f"-DAHEAD={AHEAD}", "-o", str(library), str(source), "-ldl"], check=True)
    told = subprocess.run(
        ["env", f"LD_PRELOAD={library}", sys.executable, "-c", "import time; print(time.time())"], capture_output=True, check=True
    )
    assert abs(float(told.stdout) - time.time() - AHEAD) < ranks.DEADLINE
    ranks.run_alone(tmp_path / "whole", text)
    with started(tmp_path, text, f"export LD_PRELOAD='{library}'") as process:
        code, out, errors = ranks.ended(process)
    assert (code, errors) == (0, [])
    assert re.search(r"saved in", out)
    steps = ranks.SMALL["steps"]
    expected, found = (ranks.history(tmp_path / run / "dilated", steps=steps) for run in ("whole", "run"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.ranks
@pytest.mark.slow
@ranks.needs_proc
def test_a_rank_without_room_for_a_checkpoint_is_named_and_the_last_one_kept(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    ranks.run_ranks(2, run, text, killed=7)  # behind the checkpoint of step 5
    kept = runs.contents(run / "dilated" / "checkpoint-5")
    room = "ulimit -f 8"  # in blocks of 512 bytes, or of 1,024: to the kernel a disk is as full for the file that grows
    with started(tmp_path, text, room, "--resume", rank=0) as process:
        code, out, errors = ranks.ended(process)
    assert code == 1
    assert "saved in" not in out
    full = r"\S*(\[Errno 27\] )?File too large.*\(on rank 0, which writes it\)"
    assert re.fullmatch(rf"error: the checkpoint must be writable, got \S+checkpoint-7: .*{full}", errors[0])
    # The other may speak before torchrun ends it.
    for error in errors[1:]:
        assert error.startswith("error: rank 0 was lost by its error (the checkpoint must be writable, got ")
    assert ranks.latest(run / "dilated") == run / "dilated" / "checkpoint-5"
    assert runs.contents(run / "dilated" / "checkpoint-5") == kept
    ranks.run_alone(run, text, "--resume")
