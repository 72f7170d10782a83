"""torchscale's models without flash-attn: this library's attention in the place of theirs, on their own weights."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from flexdilated.attention import dilated_attention
from flexdilated.core.pattern import DilatedPattern
from flexdilated.hub.swap import check_unhooked, find_modules, put_modules

__all__ = ["TorchscaleAttention", "replace_attention"]

LAYOUT = ("args", "embed_dim", "num_heads", "head_dim", "q_proj", "k_proj", "v_proj", "out_proj")
# What tells torchscale's dilated attention from its plain one, which has the same attributes and the same `args`.
DILATED_METHODS = ("dense_to_sparse", "sparse_to_dense")


def replace_attention(model: nn.Module, *, apply_padding_mask: bool = False, backend: str = "auto") -> int:
    """Replace torchscale's `DilatedAttention` modules in a model, in place, and say how many were replaced.

    Any copy of torchscale is known by its attributes, whatever package holds it. The replacement takes over the projections, the
    LayerNorm and the xPos module themselves: the parameters, their names in the state dict, hooks and wrappers on them stay as they
    are, and so does an optimizer. Outputs and gradients equal torchscale's (its zero keys, shifted positions and constant mixing
    weights included), on any device and in any dtype, without flash-attn. Two things differ: attention dropout, which
    torchscale keeps in evaluation, is active in training only, and padding masks may take effect.
    Source: torchscale, component/dilated_attention.py, commit 4d1e0e8.

    Args:
        model: A model that holds such modules.
        apply_padding_mask: Whether the keys of `key_padding_mask` are ignored. torchscale's dilated attention takes that mask and
            ignores it, so a padded sequence attends to its padding; False reproduces that.
        backend: `"auto"` or the name of a backend.

    Returns:
        How many modules were replaced; one that the model holds at several places counts once.

    Raises:
        ValueError: If there is no such module, the model itself is one, or, by its path, one is not self-attention, has lengths and
            rates that are no pattern, has hooks, or is `seq_parallel`. Nothing is changed then.
    """
    modules = find_modules(model, _is_dilated_attention)
    if not modules:
        raise ValueError(f"model must hold a DilatedAttention of torchscale, got none in {type(model).__name__}")
    if model in modules:
        raise ValueError("model must hold the DilatedAttention to replace, got one itself; use TorchscaleAttention(module)")
    places: dict[str, nn.Module] = {}
    for module, paths in modules.items():
        try:
            replacement = TorchscaleAttention(module, apply_padding_mask=apply_padding_mask, backend=backend)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{paths[0]!r}: {error}") from error
        places.update(dict.fromkeys(paths, replacement))
    put_modules(model, places)
    return len(modules)


class TorchscaleAttention(nn.Module):
    """The call of torchscale's `DilatedAttention`, on the submodules of one.

    Args:
        module: The module whose projections, `inner_attn_ln`, `xpos`, lengths, rates and dropout are taken over.
        apply_padding_mask: As in `replace_attention`.
        backend: `"auto"` or the name of a backend.

    Raises:
        ValueError: If the module is not self-attention, its lengths and rates are no pattern, or it has hooks of its own.
        TypeError: If a length or rate is no integer.
    """

    def __init__(self, module: nn.Module, *, apply_padding_mask: bool = False, backend: str = "auto") -> None:
        super().__init__()
        source: Any = module
        if not getattr(source, "self_attention", True) or getattr(source, "encoder_decoder_attention", False):
            raise ValueError("module must be self-attention, got self_attention=False or encoder_decoder_attention=True")
        if getattr(source.args, "seq_parallel", False):
            raise ValueError(
                "args.seq_parallel must be False, got True: it would read keys of other ranks; give every rank whole rows"
            )
        check_unhooked(module)
        self.args = source.args
        self.pattern = DilatedPattern.torchscale(
            _numbers("segment_length", source.args.segment_length), _numbers("dilated_ratio", source.args.dilated_ratio)
        )
        self.embed_dim, self.num_heads, self.head_dim = source.embed_dim, source.num_heads, source.head_dim
        self.scaling = source.head_dim**-0.5
        self.self_attention, self.encoder_decoder_attention = True, False
        self.dropout = float(getattr(source, "dropout", getattr(getattr(source, "dropout_module", None), "p", 0.0)))  # by versions
        self.apply_padding_mask, self.backend = apply_padding_mask, backend
        # In torchscale's order, in which an optimizer lists the parameters.
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = source.k_proj, source.v_proj, source.q_proj, source.out_proj
        self.inner_attn_ln: nn.Module | None = getattr(source, "inner_attn_ln", None)
        self.xpos: nn.Module | None = getattr(source, "xpos", None)
        # The mode of this module alone: its submodules keep theirs.
        self.training = module.training

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: dict[str, Any] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """`(B, N, embed_dim)` and None, for torchscale's weights, from query, key and value `(B, N, embed_dim)`.

        The arguments are torchscale's. `key_padding_mask` `(B, N)`, nonzero where a key is ignored, has an effect only with
        `apply_padding_mask`. `attn_mask` and `rel_pos` must be None, as for torchscale on flash-attn, and so must
        `incremental_state`: torchscale's own decoding is correct inside the first segment only. `is_first_step` has no effect
        without it.

        Raises:
            NotImplementedError: If an argument that must be None is not.
            ValueError: If a shape is wrong.
        """
        if incremental_state is not None:
            raise NotImplementedError(
                "incremental_state must be None, got a state: torchscale's cache decodes only inside the first segment; "
                "run the whole sequence"
            )
        for name, argument in (("attn_mask", attn_mask), ("rel_pos", rel_pos)):
            if argument is not None:
                raise NotImplementedError(
                    f"{name} must be None, got a tensor: dilated attention takes no bias, here as in torchscale"
                )
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 3 or x.shape[-1] != self.embed_dim or x.shape != query.shape:
                raise ValueError(f"{name} must have shape (B, N, {self.embed_dim}), the same for all three, got {tuple(x.shape)}")
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (rearrange(x, "b n (h d) -> b n h d", h=self.num_heads) for x in (q, k, v))
        if self.xpos is not None:
            q = self._rotate(q, downscale=False)
            k = self._rotate(k, downscale=True)
        ignored = key_padding_mask.bool() if self.apply_padding_mask and key_padding_mask is not None else None
        out = dilated_attention(
            q,
            k,
            v,
            self.pattern,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            key_padding_mask=ignored,
            backend=self.backend,
        ).flatten(2)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        return self.out_proj(out), None

    def extra_repr(self) -> str:
        return f"{self.pattern}, dropout={self.dropout}, apply_padding_mask={self.apply_padding_mask}, backend={self.backend!r}"

    def _rotate(self, x: Tensor, *, downscale: bool) -> Tensor:
        """q or k `(B, N, H, D)` by torchscale's xPos, which takes heads in the batch."""
        assert self.xpos is not None
        rotated = self.xpos(rearrange(x, "b n h d -> (b h) n d"), offset=0, downscale=downscale)
        # xPos computes in the dtype of its table, which may be wider than that of the values.
        return rearrange(rotated.to(x.dtype), "(b h) n d -> b n h d", h=self.num_heads)


def _is_dilated_attention(module: nn.Module) -> bool:
    args = getattr(module, "args", None)
    if isinstance(module, TorchscaleAttention) or not all(hasattr(module, name) for name in LAYOUT):
        return False
    if not all(hasattr(args, name) for name in ("segment_length", "dilated_ratio")):
        return False
    has_name = any(cls.__name__ == "DilatedAttention" for cls in type(module).__mro__)
    return has_name or all(callable(getattr(module, name, None)) for name in DILATED_METHODS)


def _numbers(name: str, value: Any) -> Sequence[Any]:
    """torchscale's configurations spell lengths and rates as lists or as the text of one."""
    try:
        return tuple(ast.literal_eval(value) if isinstance(value, str) else value)
    except (SyntaxError, ValueError, TypeError):
        raise ValueError(f"args.{name} must be a list of integers, got {value!r}") from None
