"""One call of dilated attention: its options on the way to a backend, and the documents that it packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexdilated.core.custom_op import OpOptions
from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.functorch import is_mapped, is_transformed
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.tracing import holds_values, is_symbolic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: FlexAttention's score function, from `(score, b, h, q_idx, kv_idx)` to the score.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: FlexAttention's mask function, from `(b, h, q_idx, kv_idx)` to whether the query sees the key.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

EXCHANGES = ("auto", "gather", "ring", "heads")


class Call(NamedTuple):
    """The options of `dilated_attention`, and which heads of a model the tensors hold.

    `check` completes it: a scale, a number of heads, and whether the score function learns. Methods and no properties: the
    compiler of torch 2.9 looks for those in the fields.
    """

    pattern: DilatedPattern
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    backend: str = "auto"
    return_lse: bool = False
    mesh: DeviceMesh | None = None
    exchange: str = "auto"
    shard_lengths: Sequence[int] | None = None
    sinks: Tensor | None = None  # (H,), of the heads held here: the score of one more key, of value 0, that every query sees
    first_head: int = 0  # of the key/value heads held here, among those of the model
    num_kv_heads: int | None = None  # key/value heads of the model; None: all of them are held here
    first_sequence: int = 0  # of the batch held here, among those of all ranks
    score_mod_requires_grad: bool = False

    def replaced(self, **options: Any) -> Call:
        """The call with other options. The compiler of torch 2.9 cannot pass on the result of `_replace` at a graph break."""
        return Call(**{**self._asdict(), **options}) if torch.compiler.is_compiling() else self._replace(**options)

    def is_modified(self) -> bool:
        """Whether it has a score or mask function."""
        return self.score_mod is not None or self.mask_mod is not None

    def part_of_heads(self, num_held: int) -> range | None:
        """The key/value heads held here, where they are not all of the model's."""
        if self.num_kv_heads in (None, num_held):
            return None
        return range(self.first_head, self.first_head + num_held)

    def checked_scale(self) -> float:
        """The scale, of a checked call."""
        assert self.scale is not None
        return self.scale

    def dispatch_key(self, q: Tensor, k: Tensor, v: Tensor) -> DispatchKey:
        """The `DispatchKey` of this call, by which a backend is chosen."""
        return DispatchKey.of(
            q,
            k,
            self.pattern,
            self.key_padding_mask,
            self.cu_seqlens,
            self.dropout_p,
            modified=self.is_modified(),
            differentiable=torch.is_grad_enabled()
            and (self.score_mod_requires_grad or q.requires_grad or k.requires_grad or v.requires_grad),
            transformed=is_transformed(q, k, v),
            wants_lse=self.return_lse,
            dynamic=torch.compiler.is_compiling() and is_symbolic(q.shape[1]),
        )

    def op_options(self) -> OpOptions:
        """The options of a checked call that its operation needs."""
        assert self.num_kv_heads is not None
        assert self.scale is not None
        return OpOptions(
            pattern=self.pattern,
            is_causal=self.is_causal,
            scale=self.scale,
            dropout_p=self.dropout_p,
            engine=self.backend,
            first_head=self.first_head,
            num_kv_heads=self.num_kv_heads,
        )


def documents(cu_seqlens: Tensor | None, num_tokens: int, hint: str = "") -> tuple[tuple[int, int], ...]:
    """`(first token, number of tokens)` of each packed document; error messages end in `hint`.

    Raises ValueError if the boundaries do not rise from 0 to `num_tokens`. Raises NotImplementedError if they have no values, or if
    torch.func.vmap maps over them outside of an operator that receives the boundaries of each sample.
    """
    if cu_seqlens is None:
        return ((0, num_tokens),)
    if not holds_values(cu_seqlens):  # only operators accept such tensors: they compute shapes without values
        raise NotImplementedError(
            "cu_seqlens must hold values for this call, got a meta or fake tensor: score_mod, mask_mod, backend='flex' and "
            "backend='reference' plan by them; use backend='sdpa' without functions"
        )
    if is_mapped(cu_seqlens):
        raise NotImplementedError(
            "cu_seqlens must be the same for every sample of torch.func.vmap with backend='reference', score_mod or mask_mod, or "
            "under a derivative of torch.func, got mapped borders; loop over the samples, or use backend='sdpa' without functions"
        )
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != num_tokens or any(b < a for a, b in pairwise(borders)):
        shown = borders if len(borders) <= 8 else [*borders[:4], "...", *borders[-3:]]
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens={num_tokens}{hint}, got {shown}")
    return tuple((a, b - a) for a, b in pairwise(borders))


def refuse_compiled_borders(call: Call, feature: str) -> None:
    """Raise NotImplementedError for documents in compiled code, if the graph would be valid for their boundaries only."""
    if call.cu_seqlens is not None and torch.compiler.is_compiling():
        raise NotImplementedError(
            f"cu_seqlens must come without {feature} in compiled code, got both: the graph would depend on its values; call "
            "dilated_attention outside of torch.compile, or once per document"
        )
