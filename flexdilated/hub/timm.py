"""timm's vision transformers: this library's attention in the place of theirs, on their own weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flexdilated.attention import dilated_attention
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.tracing import holds_values
from flexdilated.hub.swap import check_unhooked
from flexdilated.ordering import Order

__all__ = ["TimmAttention", "attention_classes"]

# Where timm's versions keep the classes that `TimmAttention` was compared with.
CLASSES = (
    ("timm.layers.attention", "Attention"),
    ("timm.layers.attention", "AttentionRope"),
    ("timm.models.vision_transformer", "Attention"),
    ("timm.models.eva", "EvaAttention"),
    ("timm.models.vision_transformer_relpos", "RelPosAttention"),
    ("timm.models.beit", "Attention"),
)
HIDDEN = -1e4  # softmax makes 0 of such a number; timm adds the lowest one of the dtype


def attention_classes() -> tuple[type[nn.Module], ...]:
    """timm's attention that can be replaced; none where timm is not imported, since no model can hold any."""
    classes = (getattr(sys.modules.get(module), name, None) for module, name in CLASSES)
    return tuple({cls: None for cls in classes if isinstance(cls, type)})


class TimmAttention(nn.Module):
    """The call of timm's `Attention`, `AttentionRope`, `EvaAttention`, `RelPosAttention` or BEiT's, on the submodules of one.

    timm's own forward runs, with this library's attention where it calls `F.scaled_dot_product_attention`. The parameters, their
    names in the state dict, hooks on the submodules and an optimizer stay as they are. Under a pattern that keeps everything it
    computes what the module did. Tokens are counted as the model lays them out, class and register tokens
    first: to the pattern these are tokens like all others, at the first positions. Tables of relative positions, a layer's own or
    shared by the model's layers, are added to the scores of the pairs that the pattern keeps. timm's methods of the module
    (`reinit_non_persistent_buffers`, `init_weights`, `set_input_size`) work as before. Compared with timm 1.0.31.

    Args:
        module: The module whose state is taken over.
        pattern: Which positions attend to which.
        dropout_p: Probability of dropping an attention weight in training. Default: the module's own.
        is_causal: Whether queries see only keys at their own position and before, whatever a call says.
        backend: `"auto"` or the name of a backend.
        order: The order in which the pattern counts the tokens, such as `flexdilated.ordering.grid_order(grid)`; outputs come back
            in the model's own. Default: as the model has them.
        order_start: How many tokens, class and register tokens, stand before those of the order and stay there.

    Raises:
        ValueError: If the module is none of these or has hooks of its own, the pattern has more groups of heads than it has
            key/value heads, or `order_start` is below 0.
        TypeError: If the order is no `Order`.
    """

    def __init__(
        self,
        module: nn.Module,
        pattern: DilatedPattern,
        *,
        dropout_p: float | None = None,
        is_causal: bool = False,
        backend: str = "auto",
        order: Order | None = None,
        order_start: int = 0,
    ) -> None:
        super().__init__()
        classes, kind = attention_classes(), type(module)
        if not isinstance(module, classes) or not any(kind.forward is cls.forward for cls in classes):
            raise ValueError(f"module must have the forward of timm's attention, got that of {kind.__module__}.{kind.__qualname__}")
        check_unhooked(module)
        if order is not None and not isinstance(order, Order):
            raise TypeError(f"order must be an Order of flexdilated.ordering, got {type(order).__name__}")
        if order_start < 0:
            raise ValueError(f"order_start must be at least 0, got {order_start}")
        # Parameters, buffers, submodules, mode and sizes: all that the module is, in dicts of its own.
        self.__dict__ |= {name: x.copy() if isinstance(x, (dict, set)) else x for name, x in vars(module).items()}
        part: Any = self
        self.kind, self.dropout_p = kind, part.attn_drop.p if dropout_p is None else dropout_p
        if not 0.0 <= self.dropout_p < 1.0:
            raise ValueError(f"dropout_p must be in [0, 1), got {self.dropout_p}")
        self.pattern, self.is_causal, self.backend = pattern, is_causal, backend
        pattern.check_heads(getattr(part, "num_kv_heads", part.num_heads))
        # A scale of one's own acts in timm's own product only.
        self.own_scale: float | None = None if part.fused_attn else part.scale
        self.fused_attn = True  # or timm would multiply by itself
        self.takes_mask = "attn_mask" in inspect.signature(kind.forward).parameters  # or it makes one of relative positions
        self.order = order
        if order is not None:  # as buffers, they follow the module to its device; they are no part of its state
            front = torch.arange(order_start, device=order.permutation.device)
            self.order = Order(*(torch.cat([front, places + order_start]) for places in order))
            for name, places in zip(Order._fields, self.order):
                self.register_buffer(name, places.clone(), persistent=False)

    def __getattr__(self, name: str) -> Any:
        """timm's own methods, on this module."""
        method = getattr(self.__dict__.get("kind"), name, None)
        return partial(method, self) if inspect.isfunction(method) else super().__getattr__(name)

    def forward(self, x: Tensor, *inputs: Tensor | bool | None, **options: Tensor | bool | None) -> Tensor:
        """`(B, N, dim)` from tokens of that shape; the arguments are those of the module that was taken over.

        Args:
            x: Tokens.
            *inputs: As in timm, after the tokens: of `rope`, `attn_mask`, `is_causal`, `shared_rel_pos` and `shared_rel_pos_bias`
                those that the module takes, in its order.
            **options: The same by name.

        `attn_mask` must be the mask of padded patches that NaFlexViT makes, `(B, 1, N, N)` or `(B, 1, 1, N)`: bool, True where
        a key is seen, or numbers to add, 0 or at most -1e4. The outputs of padded patches mean nothing.

        Raises:
            NotImplementedError: If the mask hides other pairs than those of padded tokens (compiled, an assertion fails), or timm
                computes attention otherwise.
            ValueError: If there are other tokens than the order, or a table of relative positions, has.
            TypeError: If an argument is unknown or comes twice.
        """
        if self.order is not None and x.shape[1] != self.order.permutation.shape[0]:
            raise ValueError(f"x must hold the {self.order.permutation.shape[0]} tokens of the order, got {x.shape[1]}")
        mode = ReplacedAttention(self._attend)
        with mode:
            out: Tensor = self.kind.forward(self, x, *inputs, **options)
        if mode.calls != 1:
            raise NotImplementedError(
                f"{self.kind.__qualname__} must call F.scaled_dot_product_attention once, got {mode.calls} calls; use timm 1.0.31"
            )
        return out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
    ) -> Tensor:
        """timm's call of `F.scaled_dot_product_attention`: heads before tokens, `dropout_p` that of its own module."""
        part: Any = self
        group = getattr(part, "num_kv_groups", 1)  # timm repeats a key/value head for each query head that reads it
        q, k, v = (y.transpose(1, 2) for y in (q, k[:, ::group], v[:, ::group]))
        padding = bias = None
        if attn_mask is not None and self.takes_mask:
            padding = _ignored_keys(attn_mask).expand(q.shape[:2])
        elif attn_mask is not None:
            bias = attn_mask.reshape(-1, *attn_mask.shape[-2:])  # (H, N, N)
            if bias.shape[-1] != q.shape[1]:
                raise ValueError(f"x must hold the {bias.shape[-1]} tokens of the table of relative positions, got {q.shape[1]}")
        if self.order is not None:
            places = part.permutation
            q, k, v = (y.index_select(1, places) for y in (q, k, v))
            padding = None if padding is None else padding.index_select(1, places)
            bias = None if bias is None else bias[:, places][:, :, places]
        out = dilated_attention(
            q,
            k,
            v,
            self.pattern,
            is_causal=self.is_causal or is_causal,
            scale=self.own_scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            key_padding_mask=padding,
            score_mod=None if bias is None else lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx],
            backend=self.backend,
        )
        return (out.index_select(1, part.inverse) if self.order is not None else out).transpose(1, 2)

    def init_non_persistent_buffers(self) -> None:
        """Fill what no state dict holds: timm calls it after `to_empty`."""
        if hasattr(self.kind, "init_non_persistent_buffers"):
            self.kind.init_non_persistent_buffers(self)
        if self.order is not None:
            with torch.no_grad():
                for name, places in zip(Order._fields, self.order):
                    self.get_buffer(name).copy_(places)

    def extra_repr(self) -> str:
        return f"{self.pattern}, dropout_p={self.dropout_p}, is_causal={self.is_causal}, backend={self.backend!r}"


class ReplacedAttention(TorchFunctionMode):
    """Where it is active, `attend` is called in place of `F.scaled_dot_product_attention`, `calls` times so far."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.calls = attend, 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self.attend(*args, **(kwargs or {}))


def _ignored_keys(mask: Tensor) -> Tensor:
    """`(B, N)`, True at padding, from timm's mask `(B, 1, N, N)` or `(B, 1, 1, N)`, which may hide padded queries too."""
    message = "attn_mask must hide padded tokens alone, as (B, 1, 1 or N, N), got {}; the pattern says what is seen"
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, mask.shape[3]):
        raise NotImplementedError(message.format(f"shape {tuple(mask.shape)}"))
    hidden = ~mask if mask.dtype == torch.bool else mask <= HIDDEN
    padding = hidden.all(-2, keepdim=True)
    is_padding = ((hidden == padding) | (hidden & padding.mT)).all()
    if mask.dtype != torch.bool:
        is_padding &= (hidden | (mask == 0)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(is_padding, message.format("another mask"))
    elif holds_values(mask) and not bool(is_padding):
        raise NotImplementedError(message.format("another mask"))
    return padding[:, 0, 0]
