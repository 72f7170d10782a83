"""All ranks of a sharded attention in one process: a thread each, messages through queues."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flexdilated.core.call import Call
from flexdilated.core.custom_op import Inputs
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import ContextPlan
from flexdilated.distributed.runtime.backward import context_backward
from flexdilated.distributed.runtime.forward import context_forward
from flexdilated.distributed.runtime.task_attention import OutputGradients, TaskAttention
from tests.distributed.cases import ShardedCase
from tests.tolerances import EXACT

TIMEOUT = 300.0  # seconds


class Mail:
    """The messages between ranks, in the order in which they were sent, counted in bytes by (receiver, sender)."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[int, int]] = Counter()
        self._boxes: dict[tuple[int, int], list[Tensor | None]] = {}
        self._asked: Counter[tuple[int, int]] = Counter()
        self._news = threading.Condition()

    def put(self, receiver: int, sender: int, message: Tensor) -> None:
        with self._news:
            self.bytes[receiver, sender] += message.numel() * message.element_size()
            self._boxes.setdefault((receiver, sender), []).append(message)
            self._news.notify_all()

    def ask(self, receiver: int, sender: int) -> int:
        with self._news:
            self._asked[receiver, sender] += 1
            return self._asked[receiver, sender] - 1

    def take(self, receiver: int, sender: int, number: int) -> Tensor:
        with self._news:
            box = self._boxes.setdefault((receiver, sender), [])
            if not self._news.wait_for(lambda: len(box) > number, TIMEOUT):
                raise TimeoutError(f"rank {receiver} waits for a message that rank {sender} does not send")
            message, box[number] = box[number], None
        assert message is not None
        return message


class SimulatedTransport:
    """`Transport` over a `Mail`."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self.rank, self._mail = rank, mail

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        for peer, message in sends.items():
            if message.numel():
                self._mail.put(peer, self.rank, message.clone())
        awaited = [(peer, self._mail.ask(self.rank, peer), into) for peer, into in receives.items() if into.numel()]
        for _, _, into in awaited:
            into.fill_(torch.nan)  # what nobody sends must not look like an answer

        def wait() -> None:
            for peer, number, into in awaited:
                message = self._mail.take(self.rank, peer, number)
                assert message.shape == into.shape, (message.shape, into.shape)
                into.copy_(message)

        return wait


def run_ranks(num_ranks: int, work: Callable[[int], object]) -> list[object]:
    results: list[object] = [None] * num_ranks
    errors: list[BaseException] = []

    def target(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    if errors:
        raise next((e for e in errors if not isinstance(e, TimeoutError)), errors[0])
    assert not any(thread.is_alive() for thread in threads), "a rank waits for a message that nobody sends"
    return results


def work_of(
    inputs: Inputs,
    plan: ContextPlan,
    exchange: str,
    rank: int,
    scale: float,
    *,
    dropout_p: float = 0.0,
    seed: int | None = None,
    kept: bool = True,
) -> TaskAttention:
    heads = {"first_head": plan.within.start, "num_kv_heads": plan.num_kv_heads}
    call = Call(plan.pattern, plan.is_causal, scale, dropout_p, backend="sdpa", **heads)
    inputs = inputs._replace(seed=None if seed is None else torch.tensor([seed]))
    return TaskAttention(inputs, op_options=call.op_options(), plan=plan, exchange=exchange, rank=rank, keeps=kept)


def simulate(
    case: ShardedCase,
    exchange: str,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    kept: bool = True,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> tuple[dict[str, Tensor], Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """What all ranks give for a case, put together, and the bytes of forward and backward by (receiver, sender)."""
    plan, given, mask = case.plan(), case.named(dtype), case.mask()
    lse = case.expected()["lse"]
    given["dlse"] = given["dlse"].masked_fill(lse == -torch.inf, 0.0)
    given = {name: x.to(device) for name, x in given.items()}
    mask = None if mask is None else mask.to(device)
    num_ranks = len(case.shard_lengths)

    def part(rank: int) -> TaskAttention:
        here = case.shard(rank)
        tensors = [given[name][:, here].contiguous() for name in "qkv"]
        inputs = Inputs(*tensors, key_padding_mask=None if mask is None else mask[:, here])
        return work_of(inputs, plan, exchange, rank, case.scale, dropout_p=dropout_p, seed=seed, kept=kept)

    mail = Mail()

    def ahead(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        return context_forward(part(rank), SimulatedTransport(rank, mail))

    outs: list[Any] = run_ranks(num_ranks, ahead)
    forward_bytes, mail.bytes = mail.bytes, Counter()

    def back(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        here = case.shard(rank)
        out, lse, received = outs[rank]
        asked = OutputGradients(given["dout"][:, here].contiguous(), given["dlse"][:, :, here].contiguous(), out, lse)
        return context_backward(part(rank), asked, received if kept else None, SimulatedTransport(rank, mail))

    grads: list[Any] = run_ranks(num_ranks, back)
    whole = {"out": torch.cat([x[0] for x in outs], dim=1), "lse": torch.cat([x[1] for x in outs], dim=2)}
    for i, name in enumerate(("dq", "dk", "dv")):
        whole[name] = torch.cat([x[i] for x in grads], dim=1)
    return {name: x.cpu() for name, x in whole.items()}, forward_bytes, mail.bytes


def check(case: ShardedCase, exchange: str, device: str = "cpu") -> None:
    got, *bytes_moved = simulate(case, exchange, device=device)
    for counted, planned in zip(bytes_moved, cost_model.bytes_received(case.plan(), exchange, **case.sizes())):
        received = [sum(n for (receiver, _), n in counted.items() if receiver == rank) for rank in range(len(planned))]
        assert received == planned.tolist()
    expected = case.expected()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
