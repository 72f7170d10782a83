"""Opaque differentiable operators: `torch.compile` and `torch.export` see one node forward and one backward, and trace neither.

An operator takes the tensors of a call and its options as plain data. It saves tensors, outputs and options; its backward, an
operator too, is given all of them, and refuses to be differentiated.

A CUDA graph replays launches, and nothing that the host did between them. So operators whose course depends on what the host reads
of their tensors, or that wait for other processes, have the tag `cudagraph_unsafe`: `mode="reduce-overhead"` leaves them out of its
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn, TypeVar, get_type_hints

import torch
from torch import Tensor

from flexdilated.core.collective_order import OVER_RANKS, keep_order, order_kernels
from flexdilated.core.lse import accumulated
from flexdilated.core.pattern import DilatedPattern, decode
from flexdilated.core.tracing import uncached

GRADIENT_MESSAGE = (
    "dilated_attention must not be differentiated twice, got a derivative of its own derivative: the fused attention kernels have "
    "no second derivative; use backend='reference' where one is needed"
)

BY_VALUES = "_by_values"  # behind the name of an operator: the same, for calls with documents or dropout

O = TypeVar("O")  # noqa: E741 - the options of an operator


class Inputs(NamedTuple):
    """The tensors of a call."""

    q: Tensor  # (B, N, H, D)
    k: Tensor  # (B, N, Hkv, D)
    v: Tensor
    key_padding_mask: Tensor | None = None  # (B, N) bool, True where a key is ignored
    cu_seqlens: Tensor | None = None  # borders of packed documents
    seed: Tensor | None = None  # (1,) int64, of attention dropout

    def rows_contiguous(self) -> Inputs:
        """With q, k and v as kernels read them: any strides but the last."""
        if self.q.stride(-1) == self.k.stride(-1) == self.v.stride(-1) == 1:
            return self
        return self._replace(q=rows_contiguous(self.q), k=rows_contiguous(self.k), v=rows_contiguous(self.v))


class Flat(NamedTuple):
    """The options of a call as operators take them."""

    encoded_pattern: Sequence[int]  # by `encode`
    is_causal: bool
    scale: float
    dropout_p: float
    engine: str
    first_head: int  # of the key/value heads held here, among those of the model
    num_heads: int  # key/value heads of the model

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern that an operator was given."""
        return uncached(_decoded)(tuple(self.encoded_pattern))


@lru_cache(maxsize=256)
def _decoded(numbers: tuple[int, ...]) -> DilatedPattern:
    return decode(numbers)


class Operator(NamedTuple):
    """`forward` takes `(*Inputs, *options)`; `backward` `(dout, dlse, q, k, v, *outputs, mask, cu_seqlens, seed, *options)`."""

    forward: Any
    backward: Any


TENSORS = "Tensor q, Tensor k, Tensor v"
MORE_TENSORS = "Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed"
TYPES = {Sequence[int]: "SymInt[]", int: "SymInt", float: "float", bool: "bool", str: "str", Any: "str"}


def schema_of(fields: type[tuple[Any, ...]]) -> str:
    """The fields of a NamedTuple as arguments of an operator."""
    return ", ".join(f"{TYPES[annotation]} {name}" for name, annotation in get_type_hints(fields).items())


def declare(
    name: str, arguments: str, num_outputs: int, run: Callable[..., tuple[Tensor, ...]], tags: Sequence[torch.Tag] = ()
) -> Any:
    """A custom operator of tensors and options that writes to none of them; `torch.func.vmap` calls it for each sample."""
    schema = f"({arguments}) -> ({', '.join(['Tensor'] * num_outputs)})"
    declared = torch.library.custom_op(f"flexdilated::{name}", run, mutates_args=(), schema=schema, tags=tags)

    def by_sample(info: Any, in_dims: tuple[Any, ...], *values: Any) -> Any:
        samples = (
            (x.select(dim, i) if isinstance(dim, int) else x for x, dim in zip(values, in_dims)) for i in range(info.batch_size)
        )
        return tuple(torch.stack(xs) for xs in zip(*(declared(*sample) for sample in samples))), (0,) * num_outputs

    declared.register_vmap(by_sample)
    return declared


def operator(
    name: str,
    options: str,
    read: Callable[[Sequence[Any]], O],
    *,
    forward: Callable[[Inputs, O], tuple[Tensor, ...]],
    shapes: Callable[[Inputs, O], tuple[Tensor, ...]],
    backward: Callable[[Tensor, Tensor | None, Inputs, tuple[Tensor, ...], O], tuple[Tensor, ...]],
    more_outputs: Sequence[str] = (),
    through: Callable[..., tuple[Tensor, ...]] | None = None,
    over_ranks: bool = False,
) -> Operator:
    """The two operators `flexdilated::<name>` and `flexdilated::<name>_backward`, and the same again for calls that read values.

    Borders of documents and seeds are read on the host. Calls with one of them run as `flexdilated::<name>_by_values`.

    Args:
        name: Of the operator.
        options: The schema of the options, behind the tensors.
        read: The options from their values.
        forward: `out`, `lse` and more outputs, which get no gradient.
        shapes: The same without values, for tracing.
        backward: `dq, dk, dv` for `dout` and, where lse has a gradient, `dlse`; given inputs, outputs and options.
        more_outputs: The names of the outputs behind out and lse.
        through: What the derivative calls in place of the backward operator.
        over_ranks: Whether calls wait for other ranks; then they depend on the host, and there is no second pair. The forward is
            given an `unknown` tensor more, before the options.
    """
    outputs = ("out", "lse", *more_outputs)
    last, num_tensors = 3 + len(outputs), 6 + over_ranks

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        return forward(Inputs(*arguments[:6]), read(arguments[num_tensors:]))

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        if over_ranks:
            order_kernels()
        return shapes(Inputs(*arguments[:6]), read(arguments[num_tensors:]))

    def fake_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        if over_ranks:  # the forward may have run before a compiler, as under compiled autograd
            order_kernels()
        return tuple(contiguous_like(x) for x in arguments[:3])

    def run_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        inputs = Inputs(*arguments[:3], *arguments[last : last + 3])
        return backward(dout, dlse, inputs, arguments[3:last], read(arguments[last + 3 :]))

    saved = ", ".join(f"Tensor {output}" for output in outputs)
    inputs_schema, backward_schema = (
        f"{TENSORS}, {MORE_TENSORS}, {'Tensor unknown, ' if over_ranks else ''}{options}",
        f"Tensor dout, Tensor? dlse, {TENSORS}, {saved}, {MORE_TENSORS}",
    )

    def pair(name: str, *tags: torch.Tag) -> Operator:
        return Operator(
            declare(name, inputs_schema, len(outputs), run, tags),
            declare(f"{name}_backward", f"{backward_schema}, {options}", 3, run_backward, tags),
        )

    plain = pair(name, *(OVER_RANKS if over_ranks else ()))
    reading = plain if over_ranks else pair(name + BY_VALUES, torch.Tag.cudagraph_unsafe)
    operators = plain if over_ranks else _either(plain, reading, last)
    backward_of = operators.backward if through is None else through
    for variant in dict.fromkeys((plain, reading)):
        if over_ranks:
            keep_order(variant.forward)
            keep_order(variant.backward)
        variant.forward.register_fake(fake)
        variant.backward.register_fake(fake_backward)
        variant.forward.register_autograd(
            lambda ctx, dout, dlse, *_: differentiate(ctx, backward_of, dout, dlse),
            setup_context=partial(save, num_tensors=num_tensors),
        )
        variant.backward.register_autograd(refuse)
    return operators


def _either(plain: Operator, reading: Operator, last: int) -> Operator:
    """The first pair, or the second pair if documents or a seed are given; `last` tensors come before the mask in the backward."""

    def forward(*arguments: Any) -> Any:
        reads = arguments[4] is not None or arguments[5] is not None
        return (reading if reads else plain).forward(*arguments)

    def backward(*arguments: Any) -> Any:
        reads = arguments[last + 3] is not None or arguments[last + 4] is not None
        return (reading if reads else plain).backward(*arguments)

    return Operator(forward, backward)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], *, num_tensors: int = 6) -> None:
    """Save the inputs of the backward."""
    ctx.num_inputs, ctx.options = len(inputs), inputs[num_tensors:]
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
    ctx.set_materialize_grads(False)


def differentiate(
    ctx: Any, backward: Callable[..., tuple[Tensor, ...]], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of every argument of an operator, by its backward."""
    saved = ctx.saved_tensors
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    return *backward(dout, dlse, *saved, *ctx.options), *(None for _ in range(ctx.num_inputs - 3))


def shapes_of(q: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of queries `(B, N, H, D)`, without values."""
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulated(q.dtype))
    return contiguous_like(q), lse


def contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def rows_contiguous(x: Tensor) -> Tensor:
    """x itself, or a copy whose rows are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def refuse(ctx: Any, *grads: Any) -> NoReturn:
    """The derivative of a derivative."""
    raise NotImplementedError(GRADIENT_MESSAGE)
