"""Opaque differentiable operators: compilers see one node in the forward and one in the backward, and trace into neither.

An operator takes the tensors of a call, and its options as plain data. It saves tensors, outputs and options for its backward,
which is an operator too and has no derivative.

A CUDA graph replays kernel launches, but no work of the host. Operators that read values of their tensors on the host, or wait for
other processes, therefore have the tag `cudagraph_unsafe`: `mode="reduce-overhead"` leaves them out of its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

from flexdilated.core.collective_order import OVER_RANKS, keep_order, order_kernels
from flexdilated.core.lse import accumulated
from flexdilated.core.pattern import HEADS, OFFSETS, DilatedPattern
from flexdilated.core.tracing import uncached

GRADIENT_MESSAGE = (
    "dilated_attention must not be differentiated twice, got a derivative of its own derivative: the fused attention kernels have "
    "no second derivative; use backend='reference' where one is needed"
)

DATA_DEPENDENT = "_by_values"  # suffix of the operators for calls with documents or dropout, whose values the host reads

# What the dispatcher adds to the keys of tensors in eager code. Modes, tracers and transforms add keys of their own.
EAGER = sum(torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key)).raw_repr() for key in ("BackendSelect", "ADInplaceOrView"))

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
        """The same inputs with q, k and v copied where their last stride is not 1."""
        if self.q.stride(-1) == self.k.stride(-1) == self.v.stride(-1) == 1:
            return self
        return self._replace(q=rows_contiguous(self.q), k=rows_contiguous(self.k), v=rows_contiguous(self.v))


class OpOptions(NamedTuple):
    """The options of a call; operators take them as `encoded` gives them."""

    pattern: DilatedPattern  # in schemas: `encoded_pattern`
    is_causal: bool
    scale: float
    dropout_p: float
    engine: str  # the backend: a pinned schema has this name
    first_head: int  # of the key/value heads held here, among those of the model
    num_kv_heads: int  # key/value heads of the model; in schemas: `num_heads`

    def encoded(self) -> tuple[Any, ...]:
        """Plain data, which `decoded` reads."""
        return uncached(_encoded)(self.pattern), *self[1:]

    @classmethod
    def decoded(cls, values: Sequence[Any]) -> OpOptions:
        """The options of an operator that has values: not of a traced one, whose numbers may be symbols."""
        return cls(uncached(_decoded)(tuple(values[0])), *values[1:])


def encode(pattern: DilatedPattern) -> list[int]:
    """A pattern as integers, for the schema of an operator; `decode` is the inverse.

    Four integers for `heads`, `offsets` and the two flags, two per branch of segments, then the window if there is one. With global
    tokens, the first integer is 2 larger, and the last two are the window (or 0) and the number of global tokens. Saved programs
    contain these integers.
    """
    segments, near = pattern.split("the encoding of operators")
    rules = [HEADS.index(pattern.heads), OFFSETS.index(pattern.offsets), int(pattern.zero_padding), int(pattern.detach_weights)]
    rules[0] += len(HEADS) * (near.global_tokens > 0)
    numbers = [*rules, *(number for branch in segments for number in branch)]
    return [*numbers, *near] if near.global_tokens else [*numbers, *([near.window] if near.window else [])]


def decode(numbers: Sequence[int]) -> DilatedPattern:
    """The pattern of the integers of `encode`. Lengths and rates may be symbols of a compiler."""
    heads, offsets, zeros, detached = (int(number) for number in numbers[:4])
    has_global, heads = divmod(heads, len(HEADS))
    end = len(numbers) - (2 if has_global else len(numbers) % 2)  # an odd number of integers ends with a window
    window, global_tokens = (*numbers[end:], 0, 0)[:2]
    rules: Any = {"heads": HEADS[heads], "offsets": OFFSETS[offsets], "zero_padding": bool(zeros), "detach_weights": bool(detached)}
    near: Any = {"window": window or None, "global_tokens": global_tokens}
    return DilatedPattern(tuple(numbers[4:end:2]), tuple(numbers[5:end:2]), **near, **rules)


_encoded, _decoded = lru_cache(maxsize=256)(encode), lru_cache(maxsize=256)(decode)


class Operator(NamedTuple):
    """A forward and its backward as callables.

    `forward(*Inputs, *options)`; `backward(dout, dlse, q, k, v, *outputs, key_padding_mask, cu_seqlens, seed, *options)`.
    """

    forward: Any
    backward: Any


TENSORS = "Tensor q, Tensor k, Tensor v"
MORE_TENSORS = "Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed"
TYPES = {DilatedPattern: "SymInt[]", Sequence[int]: "SymInt[]", int: "SymInt", float: "float", bool: "bool", str: "str", Any: "str"}
PINNED = {"pattern": "encoded_pattern", "num_kv_heads": "num_heads"}  # names in schemas that exported programs hold


def schema_of(fields: type[tuple[Any, ...]]) -> str:
    """The schema of the fields of a NamedTuple, for example `SymInt[] encoded_pattern, bool is_causal`."""
    hints = get_type_hints(fields).items()
    return ", ".join(f"{TYPES[hint]} {PINNED.get(name, name)}" for name, hint in hints)


def declare(
    name: str, arguments: str, num_outputs: int, run: Callable[..., tuple[Tensor, ...]], tags: Sequence[torch.Tag] = ()
) -> Any:
    """A custom operator without side effects on its arguments; `torch.func.vmap` calls it once per sample."""
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
    shapes: Callable[[Inputs, Sequence[Any]], tuple[Tensor, ...]],
    backward: Callable[[Tensor, Tensor | None, Inputs, tuple[Tensor, ...], O], tuple[Tensor, ...]],
    more_outputs: Sequence[str] = (),
    through: Callable[..., tuple[Tensor, ...]] | None = None,
    over_ranks: bool = False,
) -> Operator:
    """Declare the operators `flexdilated::<name>` and `flexdilated::<name>_backward`, and return them.

    The host reads `cu_seqlens` and `seed`. Calls that have one of them run as a second pair, `flexdilated::<name>_by_values` and
    its backward, which stays out of CUDA graphs.

    Args:
        name: Name of the forward.
        options: Schema of the options, which follow the tensors in the argument list.
        read: Makes one object of the option values.
        forward: `(inputs, options) -> (out, lse, *more_outputs)`; only `out` and `lse` have gradients.
        shapes: `forward` on fake tensors, of the options as they are: outputs of the right shape and dtype, without values.
        backward: `(dout, dlse, inputs, outputs, options) -> (dq, dk, dv)`; `dlse` is None where lse has no gradient.
        more_outputs: Names of the outputs after `out` and `lse`.
        through: Function that the derivative calls instead of the backward operator; it takes the same arguments.
        over_ranks: Whether the operator waits for other ranks. Then it always stays out of CUDA graphs, has no second pair, and its
            forward takes one more tensor before the options (`collective_order.unknown`).
    """
    outputs = ("out", "lse", *more_outputs)
    mask_index, num_tensors = 3 + len(outputs), 6 + over_ranks

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        return forward(Inputs(*arguments[:6]), read(arguments[num_tensors:]))

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        if over_ranks:
            order_kernels()
        return shapes(Inputs(*arguments[:6]), arguments[num_tensors:])

    def fake_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        if over_ranks:  # the forward may have run before a compiler, as under compiled autograd
            order_kernels()
        return tuple(contiguous_like(x) for x in arguments[:3])

    def run_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        inputs = Inputs(*arguments[:3], *arguments[mask_index : mask_index + 3])
        return backward(dout, dlse, inputs, arguments[3:mask_index], read(arguments[mask_index + 3 :]))

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
    reading = plain if over_ranks else pair(name + DATA_DEPENDENT, torch.Tag.cudagraph_unsafe)
    operators = plain if over_ranks else _either(plain, reading, mask_index)
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


def _either(plain: Operator, reading: Operator, mask_index: int) -> Operator:
    """Dispatch to `reading` if the call has `cu_seqlens` or a seed, else to `plain`.

    `mask_index`: index of `key_padding_mask` among the arguments of the backward after `dout` and `dlse`.
    """

    def forward(*arguments: Any) -> Any:
        reads = arguments[4] is not None or arguments[5] is not None
        return (reading if reads else plain).forward(*arguments)

    def backward(*arguments: Any) -> Any:
        reads = arguments[mask_index + 3] is not None or arguments[mask_index + 4] is not None
        return (reading if reads else plain).backward(*arguments)

    return Operator(forward, backward)


def is_plain_eager(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nothing sees a difference between an operator and its implementation.

    Compilers, transforms, tracers, modes, tensors of subclasses and tensors without memory do.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_function_stack():
        return False
    if torch._C._dispatch_tls_local_include_set().raw_repr() & ~EAGER:
        return False
    return all(x is None or (type(x) in (Tensor, Parameter) and not x.is_meta) for x in tensors)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], *, num_tensors: int = 6) -> None:
    """`setup_context` of the derivative: save tensors, outputs and options."""
    ctx.num_inputs, ctx.options = len(inputs), inputs[num_tensors:]
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
    ctx.set_materialize_grads(False)


def differentiate(
    ctx: Any, backward: Callable[..., tuple[Tensor, ...]], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of all arguments of an operator: dq, dk and dv by its backward, None for the others."""
    saved = ctx.saved_tensors
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    return *backward(dout, dlse, *saved, *ctx.options), *(None for _ in range(ctx.num_inputs - 3))


def shapes_of(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised `out` `(B, N, H, D)` and `lse` `(B, H, N)` for queries `(B, N, H, D)`."""
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulated(q.dtype))
    return contiguous_like(q), lse


def contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def rows_contiguous(x: Tensor) -> Tensor:
    """x itself, or a copy whose rows are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def refuse(ctx: Any, *grads: Any) -> NoReturn:
    """Raise: there is no second derivative."""
    raise NotImplementedError(GRADIENT_MESSAGE)
