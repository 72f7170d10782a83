"""What of the travelling of rows is hidden behind computing, in the forward and the backward of each exchange.

    python -m benchmarks.lab.overlap                   # a minute
    python -m benchmarks.lab.overlap --quick           # whether it runs

All ranks are threads of one process. A message arrives a time after it was sent that grows with its bytes, and a kernel sleeps a
time that grows with its pairs, instead of computing: so four ranks need no four devices. The link is so fast that what the busiest
rank receives takes as long as its kernels. With `t` that time and `T`, `T0` the seconds of all ranks with and without it,
`1 - (T - T0) / t` was hidden: 1, nothing was waited for; 0, all of it.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flexdilated import DilatedPattern
from flexdilated.backends.kernel import Options
from flexdilated.core.call import Call
from flexdilated.core.custom_op import Inputs, OpOptions
from flexdilated.core.pieces import Piece
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import EXCHANGES, context_plan
from flexdilated.distributed.runtime import backward, forward, task_attention
from flexdilated.distributed.runtime.backward import context_backward
from flexdilated.distributed.runtime.forward import context_forward
from flexdilated.distributed.runtime.task_attention import OutputGradients, TaskAttention
from tests.distributed.simulation import Mail, SimulatedTransport, run_ranks

RANKS, HEADS, HEAD_DIM = 4, 4, 8
SECONDS_PER_PAIR = 1e-7


class Asleep:
    """Stands for the loop of a rank and its kernel: sleeps a time per pair and gives zeros."""

    def __init__(self, inputs: Inputs, op_options: OpOptions, pieces: Sequence[Piece], seed: int | None) -> None:
        self.kernel = self
        self.pairs = sum(piece.segments * piece.offsets * piece.heads * piece.rows**2 for piece in pieces)

    def differentiating(self, dlse: Tensor | None) -> Asleep:
        return self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        time.sleep(SECONDS_PER_PAIR * q.shape[:3].numel() * k.shape[2])
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward(self, *tensors: Any, **named: Any) -> tuple[Tensor, ...]:
        q, k, v = tensors[2:5]
        time.sleep(2 * SECONDS_PER_PAIR * q.shape[:3].numel() * k.shape[2])
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def asleep_forward(q: Tensor, k: Tensor, v: Tensor, loop: Asleep, branch_outs: None) -> tuple[Tensor, Tensor]:
    """The forward of the pieces inside a shard."""
    time.sleep(SECONDS_PER_PAIR * loop.pairs)
    return torch.zeros_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])


def asleep_backward(
    dout: Tensor, dlse: None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, loop: Asleep, sums: Any, branch_outs: None
) -> Any:
    """The gradients of the pieces inside a shard."""
    time.sleep(2 * SECONDS_PER_PAIR * loop.pairs)
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class SlowMail(Mail):
    """Messages that arrive some seconds per byte after they were sent."""

    def __init__(self, seconds_per_byte: float) -> None:
        super().__init__()
        self.seconds_per_byte = seconds_per_byte
        self._due: dict[tuple[int, int], list[float]] = {}
        self._busy: dict[int, float] = {}  # until when the link of a receiver is
        self._lock = threading.Lock()

    def put(self, receiver: int, sender: int, message: Tensor) -> None:
        with self._lock:
            begin = max(time.perf_counter(), self._busy.get(receiver, 0.0))
            self._busy[receiver] = begin + message.numel() * message.element_size() * self.seconds_per_byte
            self._due.setdefault((receiver, sender), []).append(self._busy[receiver])
        super().put(receiver, sender, message)

    def take(self, receiver: int, sender: int, number: int) -> Tensor:
        message = super().take(receiver, sender, number)
        with self._lock:
            due = self._due[receiver, sender][number]
        time.sleep(max(0.0, due - time.perf_counter()))
        return message


def run(exchange: str, tokens: int, delays: tuple[float, float]) -> tuple[float, float]:
    """Seconds of all ranks' forwards, and of their backwards."""
    pattern = DilatedPattern((tokens // RANKS, tokens), (1, 2))
    shards = (tokens // RANKS,) * RANKS
    plan = context_plan(pattern, shards, HEADS, range(HEADS), 1, ((0, tokens),), False)
    call = Call(pattern, scale=HEAD_DIM**-0.5, backend="sdpa", num_kv_heads=HEADS)
    parts = [[torch.randn(1, shards[0], HEADS, HEAD_DIM) for _ in range(4)] for _ in range(RANKS)]
    outs: list[tuple[Tensor, ...]] = [()] * RANKS

    def work_of(rank: int) -> TaskAttention:
        return TaskAttention(Inputs(*parts[rank][:3]), op_options=call.op_options(), plan=plan, exchange=exchange, rank=rank)

    def run_forward(transport: Callable[[int], SimulatedTransport]) -> Callable[[int], object]:
        def work(rank: int) -> None:
            outs[rank] = context_forward(work_of(rank), transport(rank))

        return work

    def run_backward(transport: Callable[[int], SimulatedTransport]) -> Callable[[int], object]:
        def work(rank: int) -> None:
            out, lse, received = outs[rank]
            gradients = OutputGradients(dout=parts[rank][3], dlse=None, out=out, lse=lse)
            context_backward(work_of(rank), gradients, received, transport(rank))

        return work

    durations = []
    for pass_, delay in zip((run_forward, run_backward), delays):
        mail = SlowMail(delay)
        begin = time.perf_counter()
        run_ranks(RANKS, pass_(lambda rank, mail=mail: SimulatedTransport(rank, mail)))
        durations.append(time.perf_counter() - begin)
    return durations[0], durations[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the share that each exchange hides."""
    parser = argparse.ArgumentParser(description="What of the travelling of rows is hidden behind computing.")
    parser.add_argument("--quick", action="store_true")
    tokens, repeats = (1024, 1) if parser.parse_args(arguments).quick else (4096, 3)
    pattern = DilatedPattern((tokens // RANKS, tokens), (1, 2))
    plan = context_plan(pattern, (tokens // RANKS,) * RANKS, HEADS, range(HEADS), 1, ((0, tokens),), False)
    with (
        mock.patch.object(task_attention, "PieceLoop", Asleep),
        mock.patch.object(forward, "forward", asleep_forward),
        mock.patch.object(backward, "backward", asleep_backward),
    ):
        for exchange in EXCHANGES:
            run(exchange, tokens, (0.0, 0.0))
            received = [int(x.max()) for x in cost_model.bytes_received(plan, exchange, head_dim=HEAD_DIM, itemsize=4)]
            computed = [times * SECONDS_PER_PAIR * int(cost_model.pairs(plan, exchange).max()) for times in (1, 2)]
            delays = computed[0] / received[0], computed[1] / received[1]
            bare, slow = (
                [median(x) for x in zip(*(run(exchange, tokens, d) for _ in range(repeats)))] for d in ((0.0, 0.0), delays)
            )
            hidden = [1 - (with_delay - without) / t for with_delay, without, t in zip(slow, bare, computed)]
            print(
                f"{exchange}: forward {hidden[0]:.2f} of {computed[0]:.3f} s, backward {hidden[1]:.2f} of {computed[1]:.3f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
