"""Stopped processes of a run that has failed go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import flexdilated
from flexdilated.training import waking
from flexdilated.training.answering import AnsweringStore

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="states of processes are read in /proc")
SCRIPT = """
import os, signal, sys
from torch.distributed import FileStore
from flexdilated.training.waking import sign
sign(FileStore(sys.argv[1], 2), 1)
print("signed", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print("awake", flush=True)
"""
DEADLINE = 300.0  # of a process, for a machine that is busy


@contextmanager
def stopped(folder: Path) -> Iterator[tuple[subprocess.Popen[str], AnsweringStore]]:
    """A process that has signed as rank 1 and is stopped."""
    environment = {**os.environ, "PYTHONPATH": str(Path(flexdilated.__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT, str(folder / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "signed\n"
            end = time.monotonic() + DEADLINE
            while waking._state_of(process.pid)[0] != waking.STOPPED:
                assert time.monotonic() < end
                time.sleep(0.01)
            yield process, AnsweringStore(dist.FileStore(str(folder / "store"), 2), timedelta(seconds=60))
        finally:
            process.kill()


def test_a_stopped_rank_goes_on(tmp_path: Path) -> None:
    with stopped(tmp_path) as (process, store):
        waking.wake_others(store, 0, 3)  # rank 2 has not signed
        out, _ = process.communicate(timeout=DEADLINE)
        assert (out, process.returncode) == ("awake\n", 0)
        waking.wake_others(store, 0, 3)  # there is none any more


@pytest.mark.parametrize("other", ["host", "process"])
def test_processes_of_others_are_left_alone(tmp_path: Path, other: str) -> None:
    with stopped(tmp_path) as (process, store):
        host, pid, begin = json.loads(store.get("process of rank 1"))
        assert pid == process.pid
        store.set("process of rank 1", json.dumps(["another", pid, begin] if other == "host" else [host, pid, "7"]))
        waking.wake_others(store, 0, 2)
        assert waking._state_of(pid) == (waking.STOPPED, begin)


def test_a_process_that_runs_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AnsweringStore(dist.HashStore(), timedelta(seconds=60))
    waking.sign(store, 0)
    host, pid, begin = json.loads(store.get("process of rank 0"))
    assert (host, pid, begin) == (waking._here(), os.getpid(), waking._state_of(os.getpid())[1])
    sent: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
    waking.wake_others(store, 1, 2)
    assert sent == []
    monkeypatch.setattr(waking, "_state_of", lambda _: (waking.STOPPED, begin))
    waking.wake_others(store, 1, 2)
    assert sent == [(os.getpid(), signal.SIGCONT)]


def test_a_store_that_is_gone_wakes_nobody() -> None:
    store = AnsweringStore(dist.HashStore(), timedelta(seconds=60))
    waking.sign(store, 0)
    store.gone = TimeoutError("silent")
    waking.wake_others(store, 1, 2)
