"""timm's vision transformers: this library's attention in the place of theirs, on their own weights."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from flexdilated.attention import dilated_attention
from flexdilated.core.hardware import holds_values
from flexdilated.core.pattern import DilatedPattern
from flexdilated.hub.swap import check_unhooked
from flexdilated.ordering import Order

__all__ = ["TimmAttention", "attention_classes"]

# Where timm's versions keep the classes that `TimmAttention` follows.
CLASSES = (
    ("timm.layers.attention", "Attention"),
    ("timm.layers.attention", "AttentionRope"),
    ("timm.models.vision_transformer", "Attention"),
    ("timm.models.eva", "EvaAttention"),
    ("timm.models.vision_transformer_relpos", "RelPosAttention"),
    ("timm.models.beit", "Attention"),
)
# What they hold and what they are called with, as of timm 1.0.31: another version may compute what is not followed here.
PARTS = {"qkv", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop", "rel_pos"}
TENSORS = {"q_bias", "k_bias", "v_bias", "relative_position_bias_table", "relative_position_index"}
HIDDEN = -1e4  # softmax makes 0 of such a number; timm adds the lowest one of the dtype
ARGUMENTS = {"self", "x", "rope", "attn_mask", "is_causal", "shared_rel_pos", "shared_rel_pos_bias"}


def attention_classes() -> tuple[type[nn.Module], ...]:
    """timm's attention that can be replaced; none where timm is not imported, since no model can hold any."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in CLASSES)
    return tuple({cls: None for cls in found if isinstance(cls, type)})


class TimmAttention(nn.Module):
    """The call of timm's `Attention`, `AttentionRope`, `EvaAttention`, `RelPosAttention` or BEiT's, on the submodules of one.

    The parameters, their names in the state dict, hooks on the submodules and an optimizer stay as they are. Under a pattern that
    keeps everything it computes what the module did. Tokens are counted as the model lays them out, class and register tokens
    first: to the pattern these are tokens like all others, at the first positions. Tables of relative positions, a layer's own or
    shared by the model's layers, are added to the scores of the pairs that the pattern keeps. What timm calls of its attention to
    fill, reset or resize a model (`reinit_non_persistent_buffers`, `init_weights`, `set_input_size`) works as before.
    Source: timm 1.0.31, layers/attention.py, models/eva.py, models/vision_transformer_relpos.py and models/beit.py.

    Args:
        module: The module whose projections, norms, gate and dropout are taken over.
        pattern: Which positions attend to which.
        dropout_p: Probability of dropping an attention weight in training. Default: the module's own.
        is_causal: Whether queries see only keys at their own position and before, whatever a call says.
        backend: `"auto"` or the name of an engine.
        order: The order in which the pattern counts the tokens, such as `flexdilated.ordering.grid_order(grid)`; outputs come back
            in the model's own. Default: as the model has them.
        order_start: How many tokens, class and register tokens, stand before those of the order and stay there.

    Raises:
        ValueError: If the module is none of these, is of a version with other parts or arguments, or has hooks of its own,
            the pattern has more groups of heads than it has key/value heads, or `order_start` is below 0.
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
        _check(module)
        if order is not None and not isinstance(order, Order):
            raise TypeError(f"order must be an Order of flexdilated.ordering, got {type(order).__name__}")
        if order_start < 0:
            raise ValueError(f"order_start must be at least 0, got {order_start}")
        source: Any = module
        dropout_p = source.attn_drop.p if dropout_p is None else dropout_p
        if not 0.0 <= dropout_p < 1.0:
            raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
        self.pattern, self.dropout_p, self.is_causal, self.backend = pattern, dropout_p, is_causal, backend
        self.num_heads = source.num_heads
        self.num_kv_heads = getattr(source, "num_kv_heads", source.num_heads)
        pattern.check_heads(self.num_kv_heads)
        self.arguments = tuple(inspect.signature(type(module).forward).parameters)[2:]  # after self and x
        self.num_prefix_tokens = getattr(source, "num_prefix_tokens", 0)  # which are not turned
        self.rotate_half = getattr(source, "rotate_half", False)
        # A scale of one's own acts in timm's own product only.
        self.scale: float | None = None if source.fused_attn else source.scale
        # In timm's order, in which an optimizer lists the parameters.
        for name, bias in module.named_parameters(recurse=False):
            self.register_parameter(name, bias)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
        for name, part in module.named_children():
            self.add_module(name, part)
        # What timm's own methods, borrowed below, and its functions for models read.
        self.kind = type(module)
        self.window_size = getattr(source, "window_size", None)
        self.num_relative_distance = getattr(source, "num_relative_distance", None)
        for name in {"rel_pos"} | TENSORS:
            if getattr(source, name, self) is None:
                setattr(self, name, None)
        self.order = order
        if order is not None:  # as buffers, they follow the module to its device; they are no part of its state
            front = torch.arange(order_start, device=order.permutation.device)
            self.order = Order(*(torch.cat([front, places + order_start]) for places in order))
            for name, places in zip(Order._fields, self.order):
                self.register_buffer(name, places.clone(), persistent=False)
        # The mode of this module alone: its submodules keep theirs.
        self.training = module.training

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
            NotImplementedError: If the mask hides other pairs than those of padded tokens (compiled, an assertion fails).
            ValueError: If there are other tokens than the order, or a table of relative positions, has.
            TypeError: If an argument is unknown or comes twice.
        """
        names = self.arguments
        given = dict(zip(names, inputs))
        if len(inputs) > len(names) or not options.keys() <= set(names) - given.keys():
            raise TypeError(f"arguments must be x, {', '.join(names)}, each once, got {len(inputs) + 1} and {sorted(options)}")
        given |= options
        mask = given.get("attn_mask")
        padding = _ignored_keys(mask).expand(x.shape[:2]) if isinstance(mask, Tensor) else None
        part: Any = self
        gate = getattr(part, "gate", None)
        gate = None if gate is None else gate(x).sigmoid()
        q, k, v = self._project(x)  # (B, N, H, D)
        if hasattr(part, "q_norm"):
            q, k = part.q_norm(q), part.k_norm(k)
        rope = given.get("rope")
        if isinstance(rope, Tensor):
            q, k = self._turn(q, rope).type_as(v), self._turn(k, rope).type_as(v)
        if self.order is not None:
            if part.permutation.shape[0] != x.shape[1]:
                raise ValueError(f"x must hold the {part.permutation.shape[0]} tokens of the order, got {x.shape[1]}")
            q, k, v = (y.index_select(1, part.permutation) for y in (q, k, v))
            padding = None if padding is None else padding.index_select(1, part.permutation)
        bias = self._relative(given, x.shape[1])
        out = dilated_attention(
            q,
            k,
            v,
            self.pattern,
            is_causal=self.is_causal or bool(given.get("is_causal", False)),
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            key_padding_mask=padding,
            score_mod=None if bias is None else lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx],
            backend=self.backend,
        ).flatten(2)
        out = out.index_select(1, part.inverse) if self.order is not None else out
        out = part.norm(out) if hasattr(part, "norm") else out
        return part.proj_drop(part.proj(out if gate is None else out * gate))

    def reset_parameters(self) -> None:
        """The initial values that timm gives a module of this kind."""
        self._borrow("reset_parameters")

    def init_non_persistent_buffers(self) -> None:
        """Fill what no state dict holds: timm calls it after `to_empty`."""
        self._borrow("init_non_persistent_buffers")
        if self.order is not None:
            with torch.no_grad():
                for name, places in zip(Order._fields, self.order):
                    self.get_buffer(name).copy_(places)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Resize the table of relative positions to a grid of `window_size` tokens, as timm does.

        Raises:
            ValueError: If there is an order, which is that of another grid.
        """
        if self.order is not None and self.window_size is not None and tuple(window_size) != tuple(self.window_size):
            raise ValueError(f"window_size must stay {tuple(self.window_size)} with an order of its tokens, got {window_size}")
        self._borrow("set_window_size", window_size)

    def _init_buffers(self) -> None:
        self._borrow("_init_buffers")

    def _borrow(self, name: str, *arguments: Any) -> None:
        """A method of the class that was taken over, on what was taken over, where it has one."""
        method = getattr(self.kind, name, None)
        if method is not None:
            method(self, *arguments)

    def extra_repr(self) -> str:
        return f"{self.pattern}, dropout_p={self.dropout_p}, is_causal={self.is_causal}, backend={self.backend!r}"

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        part: Any = self
        if getattr(part, "qkv", None) is None:
            q, k, v = part.q_proj(x), part.k_proj(x), part.v_proj(x)
        else:
            qkv = part.qkv(x)
            if getattr(part, "q_bias", None) is not None:
                qkv = qkv + torch.cat([part.q_bias, part.k_bias, part.v_bias])
            q, k, v = qkv.chunk(3, dim=-1)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return tuple(rearrange(y, "b n (h d) -> b n h d", h=h) for y, h in zip((q, k, v), heads))

    def _relative(self, given: dict[str, Tensor | bool | None], num_tokens: int) -> Tensor | None:
        """`(H, N, N)` what the relative position of a query and a key adds to their score, in the order of the pattern, or None."""
        part: Any = self
        bias: Tensor | None = None
        if getattr(part, "rel_pos", None) is not None:
            bias = part.rel_pos.get_bias()[0]  # which takes the place of a shared one
        else:
            for shared in (given.get("shared_rel_pos"), given.get("shared_rel_pos_bias")):
                if isinstance(shared, Tensor):
                    bias = shared.reshape(-1, *shared.shape[-2:])
            if getattr(part, "relative_position_bias_table", None) is not None:
                own = rearrange(part.relative_position_bias_table[part.relative_position_index], "q k h -> h q k")
                bias = own if bias is None else own + bias
        if bias is None:
            return None
        if bias.shape[-1] != num_tokens:
            raise ValueError(f"x must hold the {bias.shape[-1]} tokens of the table of relative positions, got {num_tokens}")
        return bias[:, part.permutation][:, :, part.permutation] if self.order is not None else bias

    def _turn(self, x: Tensor, rope: Tensor) -> Tensor:
        """q or k `(B, N, H, D)` by timm's rotary positions, which take heads before tokens."""
        from timm.layers import apply_rot_embed_cat  # optional

        first, rest = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        half = {"half": True} if self.rotate_half else {}
        turned = apply_rot_embed_cat(rearrange(rest, "b n h d -> b h n d"), rope, **half)
        return torch.cat([first, rearrange(turned, "b h n d -> b n h d")], dim=1)


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


def _check(module: nn.Module) -> None:
    known, kind = attention_classes(), type(module)
    if not isinstance(module, known) or not any(kind.forward is cls.forward for cls in known):
        raise ValueError(f"module must have the forward of timm's attention, got that of {kind.__module__}.{kind.__qualname__}")
    check_unhooked(module)
    parts = {name for name, _ in module.named_children()}
    tensors = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    arguments = set(inspect.signature(kind.forward).parameters)
    unknown = (parts - PARTS) | (tensors - TENSORS) | (arguments - ARGUMENTS)
    if unknown or not {"attn_drop", "proj", "proj_drop"} <= parts or ("q_norm" in parts) != ("k_norm" in parts):
        raise ValueError(
            f"module must have the parts and arguments of timm 1.0.31, got others: {sorted(unknown or parts)}; use that version"
        )
