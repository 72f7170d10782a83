"""Users' functions over shards in one graph, as `torch.compile(fullgraph=True)` takes them.

The compiler traces what a rank computes between its messages, functions included, and finds what they hold. What a rank does is an
outline of integers to it, constants of its graph; messages, and the tables of rows, are opaque operators. They move what
`functions` moves. All ranks of a call are compiled so, or none: a compiled backward runs whole, and computes a forward again
where the compiler likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexdilated.core.call import Call
from flexdilated.core.checks import call_mod, check_seen, first_pair, refuse_shards_of_torch
from flexdilated.core.collective_order import OVER_RANKS, keep_order, order_kernels, unknown
from flexdilated.core.custom_op import TENSORS, Flat, Inputs, Operator, declare, refuse, schema_of
from flexdilated.core.hardware import is_symbolic, without_autocast
from flexdilated.distributed import functions
from flexdilated.distributed.agreement import in_turn
from flexdilated.distributed.contract import Contract, Terms, contract_of
from flexdilated.distributed.outline import Sizes, TracedProgram, num_rows, outline_of, tables_of
from flexdilated.distributed.place import Place, plan_of, resolve
from flexdilated.distributed.plan import ContextPlan
from flexdilated.distributed.program import program
from flexdilated.distributed.rank import swap_keys, swap_outputs, swap_queries
from flexdilated.distributed.rows import Grads, Rows
from flexdilated.distributed.telling import telling_call


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, place: Place) -> tuple[Tensor, Tensor]:
    """As `functions.attend`, of a checked call while a compiler traces it. Every rank must call backward as there.

    Raises:
        NotImplementedError: Where documents, dropout or sizes that change from call to call would need another graph each time, or
            functions a position of torchscale's zero keys.
    """
    _refuse(q, call, place)
    first = functions.first_score(q, call)
    sizes = Sizes(
        q.shape[0],
        k.shape[2],
        q.shape[2] // k.shape[2],
        q.shape[3],
        call.key_padding_mask is not None,
        call.score_mod is not None,
        call.mask_mod is not None,
        first is not None and first.requires_grad,
    )
    planned = call.flat()._replace(scale=1.0)  # one that changes from call to call is a symbol
    outline = outline_of(tuple(planned), tuple(place), tuple(sizes), q.dtype)
    if outline.refused:
        raise NotImplementedError(outline.refused)
    mask, options = call.key_padding_mask, (*call.flat(), *place, *sizes._replace(runs=outline.runs))
    places, firsts = _TABLES(unknown(q.device), outline.num_places, outline.num_lanes, *options)
    received, token, number = _FETCH.forward(q, k, v, mask, unknown(q.device), outline.num_received(sizes), *options)
    token = functions.tied_to_function(token, first)

    def deliver(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal token
        out, lse, token = _DELIVER.forward(out, lse, token, number, num_rows(outline.out.receives), *options)
        return out, lse

    traced: Any = TracedProgram(outline, places, firsts)
    inputs = Inputs(q, k, v, mask, None, None)
    out, lse = functions.mixture(inputs, call, traced, outline.pieces, outline.start, lambda: received, deliver)
    tie: Any = _Tie.apply
    return tie(out, token), tie(lse, token)


class _Tie(torch.autograd.Function):
    """A tensor as it is. Its gradient is one for a tensor without elements too, and made of both.

    A compiler leaves out what no output needs, in a forward, in a backward and where a forward is computed again in the backward,
    and makes what needs no gradient in the forward. Other ranks wait for the messages all the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return x + token.sum()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        (token,) = ctx.saved_tensors
        return dx, token + dx[:0].flatten().to(token.dtype)


def _refuse(q: Tensor, call: Call, place: Place) -> None:
    if call.cu_seqlens is not None:
        raise NotImplementedError(
            "cu_seqlens must come without score_mod and mask_mod in compiled code, got both: the graph would depend on its "
            "values; call dilated_attention outside of torch.compile, or once per document"
        )
    if call.dropout_p > 0.0:
        raise NotImplementedError(
            f"dropout_p must be 0 with score_mod and mask_mod over several ranks under fullgraph=True, got {call.dropout_p}"
        )
    for dim, name in enumerate(("batch size", "number of tokens", "number of heads", "head dim")):
        if is_symbolic(q.shape[dim]):
            raise NotImplementedError(
                f"q must have a static {name} for score_mod and mask_mod over several ranks under fullgraph=True, got a "
                f"dynamic one; use torch.compile(dynamic=False), or torch._dynamo.mark_static(q, {dim}) before the call"
            )
    changing = [length for length in place.shard_lengths if is_symbolic(length)]
    if changing:
        raise NotImplementedError(
            "shard_lengths must be static for score_mod and mask_mod over several ranks under fullgraph=True, got lengths that "
            "change from call to call; use torch.compile(dynamic=False)"
        )
    if call.mask_mod is not None:
        check_seen(call_mod("mask_mod", call.mask_mod, *first_pair(q)[1:]))


# -- operators ------------------------------------------------------------------------------------------------------------------


class _Asked:
    """A call as its operators are told of it. Behind their own arguments come the fields of `Flat`, `Place` and `Sizes`."""

    def __init__(self, options: Sequence[Any]) -> None:
        flat, place = len(Flat._fields), len(Flat._fields) + len(Place._fields)
        self.flat, self.place, self.sizes = Flat(*options[:flat]), Place(*options[flat:place]), Sizes(*options[place:])

    @property
    def group(self) -> dist.ProcessGroup:
        return resolve(self.place.group_name)

    def plan(self) -> ContextPlan:
        return plan_of(self.flat, self.place, self.sizes.kv_heads, self.sizes.group)

    def shapes(self, tokens: int) -> list[tuple[int, ...]]:
        """Of q, k and v."""
        batch, kv_heads, group, head_dim, *_ = self.sizes
        return [(batch, tokens, heads, head_dim) for heads in (kv_heads * group, kv_heads, kv_heads)]

    def rows(self, like: Tensor, inputs: Inputs | None = None) -> Rows:
        """Of some tensors, or the same sizes and places without values."""
        if inputs is None:
            q, k, v = (like.new_empty(shape) for shape in self.shapes(0))
            mask = like.new_empty((self.sizes.batch, 0), dtype=torch.bool) if self.sizes.masked else None
            inputs = Inputs(q, k, v, mask, None, None)
        return Rows(inputs, program(self.plan(), self.sizes.runs, self.place.rank, like.device), keeps=True)

    def contract(self, rows: Rows) -> Contract:
        bare = Inputs(rows.q, rows.k, rows.v, rows.mask, None, None)
        terms = Terms.of(bare, self.flat, self.place.exchange, differentiable=self.place.differentiable)
        _, _, _, _, _, score_mod, mask_mod, learns, _ = self.sizes
        terms = terms._replace(score_mod=score_mod, mask_mod=mask_mod, score_mod_learns=learns, one_graph=True)
        return contract_of(self.plan(), terms)


def _tables(unknown: Tensor, num_places: int, num_lanes: int, *options: Any) -> tuple[Tensor, Tensor]:
    asked = _Asked(options)
    return tables_of(program(asked.plan(), asked.sizes.runs, asked.place.rank, unknown.device), unknown.device)


def _tables_shapes(unknown: Tensor, num_places: int, num_lanes: int, *options: Any) -> tuple[Tensor, Tensor]:
    return unknown.new_empty(num_places, dtype=torch.int32), unknown.new_empty(num_lanes, dtype=torch.int64)


def _fetch(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, unknown: Tensor, num_received: int, *options: Any
) -> tuple[Tensor, ...]:
    """Rows of other ranks, flat as `Rows.take` reads them, a tensor without elements, and the number of the call."""
    asked = _Asked(options)
    with telling_call(asked.group):
        refuse_shards_of_torch(len(asked.place.shard_lengths))
        rows = asked.rows(q, Inputs(q, k, v, key_padding_mask, None, None))
        contract = asked.contract(rows)
        with in_turn(asked.group), without_autocast(q.device):
            number = contract.agree(asked.group)
            received = q.new_empty(rows.num_received)
            rows.take(received)
            transport = contract.transport(asked.group, q.device, number, backward=False)
            for wait in (swap_queries(rows, transport), swap_keys(rows, transport)):
                wait()
    return received, q.new_empty(0), torch.tensor(number)


def _fetch_shapes(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, unknown: Tensor, num_received: int, *options: Any
) -> tuple[Tensor, ...]:
    order_kernels()
    return q.new_empty(num_received), q.new_empty(0), torch.empty((), dtype=torch.int64, device="cpu")


def _return(dreceived: Tensor, dtoken: Tensor, number: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, as far as their rows were received elsewhere."""
    asked = _Asked(options)
    with telling_call(asked.group, is_backward=True), without_autocast(dreceived.device):
        rows = asked.rows(dreceived)
        transport = asked.contract(rows).transport(asked.group, dreceived.device, int(number.item()), backward=True)
        shapes = asked.shapes(asked.place.shard_lengths[asked.place.rank])
        own = Grads(rows, *(dreceived.new_zeros(shape, dtype=rows.sums) for shape in shapes))
        return functions.return_rows(rows, dreceived, own, transport)


def _return_shapes(dreceived: Tensor, dtoken: Tensor, number: Tensor, *options: Any) -> tuple[Tensor, ...]:
    order_kernels()
    asked = _Asked(options)
    return tuple(dreceived.new_empty(shape) for shape in asked.shapes(asked.place.shard_lengths[asked.place.rank]))


def _deliver(
    out: Tensor, lse: Tensor, token: Tensor, number: Tensor, num_rows: int, *options: Any, back: bool
) -> tuple[Tensor, ...]:
    """Outputs and lse of rows computed for others, `(E, B, group, D)` and `(E, B, group)`, sent home, or their gradients `back`.

    And a tensor without elements for the one that is given. What is sent `back` needs that of what was sent home.
    """
    asked = _Asked(options)
    with telling_call(asked.group, is_backward=back), without_autocast(out.device):
        rows = asked.rows(out)
        transport = asked.contract(rows).transport(asked.group, out.device, int(number.item()), backward=back)
        out, lse = swap_outputs(rows, transport, out, lse, back=back)
        return out.contiguous(), lse.contiguous(), token.clone()


def _deliver_shapes(out: Tensor, lse: Tensor, token: Tensor, number: Tensor, num_rows: int, *options: Any) -> tuple[Tensor, ...]:
    order_kernels()
    return out.new_empty(num_rows, *out.shape[1:]), lse.new_empty(num_rows, *lse.shape[1:]), token.new_empty(0)


def _over_ranks(name: str, arguments: str, outputs: int, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    options = ", ".join(schema_of(each) for each in (Flat, Place, Sizes))
    made = declare(name, f"{arguments}, {options}", outputs, run, OVER_RANKS)
    made.register_fake(shapes)
    return made


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, number = output
    ctx.num_inputs, ctx.options = len(inputs), inputs[6:]
    ctx.save_for_backward(number)


def _differentiate(ctx: Any, dreceived: Tensor, dtoken: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *_FETCH.backward(dreceived, dtoken, *ctx.saved_tensors, *ctx.options), *[None] * (ctx.num_inputs - 3)


def _save_delivery(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, _, number, _, *ctx.options = inputs
    ctx.num_rows = out.shape[0]
    ctx.save_for_backward(output[-1], number)


def _differentiate_delivery(ctx: Any, dout: Tensor, dlse: Tensor, dtoken: Tensor) -> tuple[Tensor | None, ...]:
    token, number = ctx.saved_tensors
    dout, dlse, dtoken = _DELIVER.backward(dout, dlse, token + dtoken, number, ctx.num_rows, *ctx.options)
    return dout, dlse, dtoken, *[None] * (2 + len(ctx.options))


_TABLES = _over_ranks("context_tables", "Tensor unknown, SymInt num_places, SymInt num_lanes", 2, _tables, _tables_shapes)
_FETCH = Operator(
    _over_ranks(
        "context_fetch", f"{TENSORS}, Tensor? key_padding_mask, Tensor unknown, SymInt num_received", 3, _fetch, _fetch_shapes
    ),
    _over_ranks("context_fetch_backward", "Tensor dreceived, Tensor dtoken, Tensor number", 3, _return, _return_shapes),
)
_DELIVER = Operator(
    *(
        _over_ranks(
            name,
            "Tensor out, Tensor lse, Tensor token, Tensor number, SymInt num_rows",
            3,
            partial(_deliver, back=back),
            _deliver_shapes,
        )
        for name, back in (("context_deliver", False), ("context_deliver_backward", True))
    )
)
for _each in (*_FETCH, *_DELIVER):
    keep_order(_each)
_FETCH.forward.register_autograd(_differentiate, setup_context=_save)
_DELIVER.forward.register_autograd(_differentiate_delivery, setup_context=_save_delivery)
for _each in (_FETCH.backward, _DELIVER.backward):
    _each.register_autograd(refuse)
