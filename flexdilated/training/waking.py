"""Stopped processes of a run that has failed: they cannot end, and torchrun waits half a minute before it kills them."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a torch that is built without torch.distributed still trains in one process
    from flexdilated.training.answering import AnsweringStore

STOPPED = "T"  # by SIGSTOP or SIGTSTP, not by a debugger


def _state_of(pid: int) -> tuple[str, str]:
    """A process's state, and when it began; another process may have its number later."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _here() -> str:
    """What is shared by the processes that know each other's numbers: this start of a host, and a namespace there."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def sign(store: AnsweringStore, rank: int) -> None:
    """Say which process is that of a rank. Nothing where there is no /proc."""
    with suppress(OSError):
        store.set(f"process of rank {rank}", json.dumps([_here(), os.getpid(), _state_of(os.getpid())[1]]))


def wake_others(store: AnsweringStore, rank: int, count: int) -> None:
    """Let the other ranks go on that are stopped on this host, to meet the failure of this one and end."""
    with suppress(RuntimeError, TimeoutError, OSError):  # of a store that is gone
        here = _here()
        for other in range(count):
            if other != rank and store.check([key := f"process of rank {other}"]):
                host, pid, begin = json.loads(store.get(key))
                with suppress(OSError):  # it has ended
                    if host == here and _state_of(pid) == (STOPPED, begin):
                        os.kill(pid, signal.SIGCONT)
