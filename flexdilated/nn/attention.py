"""Dilated attention as modules: the bare mixture, and the multi-head layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.attention import dilated_attention
from flexdilated.backends import BACKENDS
from flexdilated.core.call import MaskMod, ScoreMod
from flexdilated.core.checks import check_dense, check_exchange, check_options
from flexdilated.core.hardware import dtype_name
from flexdilated.core.integers import as_integer
from flexdilated.core.keywords import renamed
from flexdilated.core.losses import check_losses
from flexdilated.core.pattern import DilatedPattern
from flexdilated.decode import DilatedKVCache
from flexdilated.distributed.mesh import canonical_mesh, group_of
from flexdilated.distributed.sharding import replicated_like
from flexdilated.nn.initial_weights import reset_modules, set_initial_projections
from flexdilated.nn.padding import ignored_keys
from flexdilated.nn.position import Rotation


class DilatedAttention(nn.Module):
    """`dilated_attention` with its options held by a module; dropout is active in training mode only.

    >>> DilatedAttention(DilatedPattern.causal(64, 4), is_causal=True)(*torch.randn(3, 2, 64, 4, 8)).shape  # q, k, v
    torch.Size([2, 64, 4, 8])

    Args:
        pattern: Which positions attend to which.
        is_causal: Whether a query sees only keys at its own position and before.
        scale: Multiplies `q @ k^T`. Default: `D ** -0.5`.
        dropout_p: Probability of dropping an attention weight in training, in [0, 1).
        backend: `"auto"` or the name of a backend.
        mesh: A 1-D `DeviceMesh` over which the sequence is sharded, such as `mesh["cp"]`. Default: the sequence is whole.
        exchange: With `mesh`: how keys and values move, `"auto"`, `"gather"`, `"ring"` or `"heads"`.

    Raises:
        TypeError: If the pattern is no `DilatedPattern`, the mesh no `DeviceMesh`, or another argument of the wrong type.
        ValueError: If the probability or the scale is out of range, the mesh does not fit, or the exchange is unknown.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        backend: str = "auto",
        mesh: DeviceMesh | None = None,
        exchange: str = "auto",
    ) -> None:
        super().__init__()
        check_options(pattern, is_causal, scale, dropout_p, torch.float64)
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend must be one of {('auto', *BACKENDS)}, got {backend!r}")
        check_exchange(exchange, mesh)
        if mesh is not None:
            group_of(mesh)
        self.pattern, self.is_causal, self.scale, self.dropout_p, self.backend = pattern, is_causal, scale, dropout_p, backend
        self.mesh, self.exchange = canonical_mesh(mesh), exchange

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        sinks: Tensor | None = None,
        shard_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """`(B, N, H, D)` from q `(B, N, H, D)` and k, v `(B, N, Hkv, D)`.

        Arguments and errors are those of `flexdilated.dilated_attention`; `is_causal` replaces the module's own setting for this
        call.
        """
        return dilated_attention(
            q,
            k,
            v,
            self.pattern,
            is_causal=self.is_causal if is_causal is None else is_causal,
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            score_mod=score_mod,
            mask_mod=mask_mod,
            sinks=sinks,
            backend=self.backend,
            mesh=self.mesh,
            exchange=self.exchange,
            shard_lengths=shard_lengths,
        )

    def extra_repr(self) -> str:
        options = f"is_causal={self.is_causal}, scale={self.scale}, dropout_p={self.dropout_p}, backend={self.backend!r}"
        return f"{self.pattern}, {options}"

    def __prepare_scriptable__(self) -> NoReturn:  # torch.jit.script asks every module of a model first
        raise NotImplementedError(
            "torch.jit.script must be given a model without dilated attention, got DilatedAttention; use torch.export.export or "
            "torch.jit.trace"
        )


class _TokenNorm(nn.LayerNorm):
    """A LayerNorm of whole tokens, also of those whose heads are sharded: every rank then normalises them itself."""

    def forward(self, x: Tensor) -> Tensor:
        """`(..., normalized_shape)` to the same; a DTensor comes back replicated."""
        weight, bias = replicated_like(x, self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class MultiheadDilatedAttention(nn.Module):
    """Multi-head dilated self-attention, called as `nn.MultiheadAttention(batch_first=True)` is.

    >>> attention = MultiheadDilatedAttention(32, 4, DilatedPattern.causal(64, 4), is_causal=True)
    >>> x = torch.randn(2, 64, 32)
    >>> attention(x, x, x)[0].shape
    torch.Size([2, 64, 32])

    `out_proj(inner_attn_ln(dilated_attention(q_proj(query), k_proj(key), v_proj(value))))`. By default it has a LayerNorm before
    the output projection and its own initial weights; `from_torch` and `flexdilated.convert` keep the weights of a module.
    Query, key and value have the same length. Hooks, adapters, parametrizations and quantization of the projections work;
    `torch.compile` looks for hooks once, at the first call: register them before.

    With a mesh, inputs and output are this rank's contiguous shards. For tensor parallelism use torch's `parallelize_module`, with
    `ColwiseParallel(use_local_output=False)` on `q_proj`, `k_proj` and `v_proj`, and `RowwiseParallel()` on `out_proj`.
    Source: LongNet, arXiv 2307.02486; sub-LayerNorm and initial gains: MAGNETO, arXiv 2210.06423.

    Args:
        embed_dim: Elements of an input token.
        num_heads: Query heads; must divide `embed_dim`.
        pattern: Which positions attend to which.
        num_kv_heads: Key/value heads; must divide `num_heads`. Default: `num_heads`.
        scale: Multiplies `q @ k^T`. Default: `head_dim ** -0.5`; muP uses `1 / head_dim` times a constant.
        sinks: Whether each head learns the score of one more key, of value 0, as in gpt-oss: the parameter `sinks`
            `(num_heads,)`, 0 at first.
        dropout_p: Probability of dropping an attention weight in training.
        bias: Whether the four projections have a bias.
        layer_norm: Whether a LayerNorm (`inner_attn_ln`) comes before the output projection.
        layer_norm_eps: Its epsilon.
        gamma_init: Gain of the initial value and output projections; MAGNETO's is `sqrt(log(2 * num_layers))` for a decoder.
        is_causal: Whether a query sees only keys at its own position and before, unless a call says otherwise.
        backend: `"auto"` or the name of a backend.
        mesh: A 1-D `DeviceMesh` over which the sequence is sharded, such as `mesh["cp"]`. Default: the sequence is whole.
        exchange: With `mesh`: how keys and values move, as in `flexdilated.dilated_attention`.
        device: Where the parameters live.
        dtype: Of the parameters.

    Raises:
        TypeError: If the pattern is no `DilatedPattern`, or the mesh no `DeviceMesh`.
        ValueError: If a number does not divide or is out of range, the mesh does not fit, or the exchange is unknown.

    Warns:
        UserWarning: Once, as `flexdilated.dilated_attention`, for the longest segment.
    """

    # What nn.TransformerEncoderLayer and nn.TransformerEncoder read before they take a fused path: these send them to `forward`.
    batch_first = True
    _qkv_same_embed_dim = False

    @property
    def in_proj_weight(self) -> Tensor | None:
        return getattr(self.q_proj, "weight", None)  # an adapter may show none

    @property
    def in_proj_bias(self) -> Tensor | None:
        return getattr(self.q_proj, "bias", None)

    @renamed(dropout="dropout_p", batch_first="tensors (B, N, E) and no option for it")
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: DilatedPattern,
        *,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        sinks: bool = False,
        dropout_p: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        is_causal: bool = False,
        backend: str = "auto",
        mesh: DeviceMesh | None = None,
        exchange: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        embed_dim, num_heads = as_integer("embed_dim", embed_dim), as_integer("num_heads", num_heads)
        num_kv_heads = as_integer("num_kv_heads", num_kv_heads)
        if embed_dim < 1:
            raise ValueError(f"embed_dim must be at least 1, got {embed_dim}")
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim={embed_dim}, got {num_heads}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}")
        if not gamma_init > 0.0:
            raise ValueError(f"gamma_init must be above 0, got {gamma_init}")
        if not isinstance(sinks, bool):
            raise TypeError(f"sinks must be a bool, got {sinks!r}; the layer makes the parameter itself")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.gamma_init = embed_dim // num_heads, gamma_init
        kv_dim = num_kv_heads * self.head_dim

        def linear(width: int) -> nn.Linear:
            return nn.Linear(embed_dim, width, bias=bias, device=device, dtype=dtype)

        self.q_proj, self.k_proj, self.v_proj, self.out_proj = linear(embed_dim), linear(kv_dim), linear(kv_dim), linear(embed_dim)
        self.inner_attn_ln = _TokenNorm(embed_dim, eps=layer_norm_eps, device=device, dtype=dtype) if layer_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sinks else None
        self.attention = DilatedAttention(
            pattern, is_causal=is_causal, scale=scale, dropout_p=dropout_p, backend=backend, mesh=mesh, exchange=exchange
        )
        check_losses(pattern, None, num_kv_heads, is_causal)
        set_initial_projections(self, gamma_init)
        self.reset_parameters()

    init_weights = reset_modules

    def reset_parameters(self) -> None:
        """Set the sinks to 0; the projections reset themselves."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @classmethod
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        pattern: DilatedPattern,
        *,
        dropout_p: float | None = None,
        is_causal: bool = False,
        backend: str = "auto",
        mesh: DeviceMesh | None = None,
        exchange: str = "auto",
    ) -> MultiheadDilatedAttention:
        """A dilated layer with the weights of an `nn.MultiheadAttention`, on its device and in its dtype.

        It has no `inner_attn_ln` and the same dropout, so under a pattern that keeps everything it computes the same.

        Args:
            module: The layer to convert, with `batch_first=True`.
            pattern: Which positions attend to which.
            dropout_p: Replaces the module's own.
            is_causal: As in the constructor, like all that follow.

        Raises:
            ValueError: If the module is sequence-first, projects keys or values from another width, adds keys of its own, or has
                an output projection of another shape, dtype or device, or with a bias where the others have none.
        """
        if not module.batch_first:
            raise ValueError("module must have batch_first=True, got batch_first=False")
        if module.in_proj_weight is None:
            raise ValueError(f"module must project from one width={module.embed_dim}, got kdim={module.kdim}, vdim={module.vdim}")
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("module must not add keys of its own, got add_bias_kv or add_zero_attn")
        weight, out = module.in_proj_weight, module.out_proj
        if not isinstance(out, nn.Linear):
            raise ValueError(f"module must have a plain out_proj, got {type(out).__name__}")
        in_kind = _kind((module.embed_dim,) * 2, weight, module.in_proj_bias)
        if (out_kind := _kind(tuple(out.weight.shape), out.weight, out.bias)) != in_kind:
            raise ValueError(f"module must have an out_proj like its in_proj, of {in_kind}, got {out_kind}")
        converted = cls(
            module.embed_dim,
            module.num_heads,
            pattern,
            dropout_p=module.dropout if dropout_p is None else dropout_p,
            bias=module.in_proj_bias is not None,
            layer_norm=False,
            is_causal=is_causal,
            backend=backend,
            mesh=mesh,
            exchange=exchange,
            device=weight.device,
            dtype=weight.dtype,
        )
        projections = (converted.q_proj, converted.k_proj, converted.v_proj)
        with torch.no_grad():
            for projection, part in zip(projections, weight.chunk(3)):
                projection.weight.copy_(part)
            converted.out_proj.weight.copy_(out.weight)
            if module.in_proj_bias is not None:
                for projection, part in zip(projections, module.in_proj_bias.chunk(3)):
                    projection.bias.copy_(part)
                converted.out_proj.bias.copy_(out.bias)
        return converted.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        rotation: Rotation | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        cache: DilatedKVCache | None = None,
        lengths: Tensor | None = None,
        shard_lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, None]:
        """The call of `nn.MultiheadAttention`; returns `(out, None)`.

        Args:
            query: `(B, N, embed_dim)`, or `(N, embed_dim)` without a batch.
            key: As query, of the same length.
            value: As key.
            key_padding_mask: `(B, N)`, or `(N,)` without a batch: bool, True where a key is ignored; or a float mask of 0 and -inf.
            need_weights: Must be False.
            attn_mask: Must be None, unless `is_causal=True`; its values are not read, as in torch.
            average_attn_weights: Has no effect, since no weights are returned.
            is_causal: Whether a query sees only keys at its own position and before; a module made causal stays so.
            cu_seqlens: `(num_documents + 1,)` boundaries of packed documents, for B = 1.
            rotation: What `flexdilated.nn.Rotary` or `XPos` gives for the positions of the tokens; applied after projection.
            score_mod: Function of a score and the positions of its pair, as in `flexdilated.dilated_attention`.
            mask_mod: Function of the positions of a pair: whether the query sees the key.
            cache: For decoding: the tokens follow the tokens that the cache holds, and join them. Only its mesh counts.
            lengths: `(B,)` int64, with `cache`: tokens of each sequence before its padding.
            shard_lengths: With a mesh: tokens of each rank. Default: equally many; with `cache`, all tokens on every rank.

        Returns:
            `out`, the shape of query, and None.

        Raises:
            NotImplementedError: If weights or an arbitrary mask are asked for, a tensor is nested, or a cache comes with a mask,
                with documents, with dropout in training or without causality.
            ValueError: If a shape is wrong, shard lengths come without a mesh, or the cache is for another pattern.
        """
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "score_mod": score_mod, "mask_mod": mask_mod}
        if need_weights:
            raise NotImplementedError(
                "need_weights must be False, got True: dilated attention never forms its weights; "
                "flexdilated.attention_map computes those of chosen queries"
            )
        if attn_mask is not None and not is_causal:
            raise NotImplementedError("attn_mask must be None unless is_causal=True, got a mask; use mask_mod=")
        if cache is not None:
            self._check_cache(cache, is_causal, {"key_padding_mask": key_padding_mask, **options})
            options = {"lengths": lengths}
        if shard_lengths is not None:
            options["shard_lengths"] = shard_lengths
        if cache is None and lengths is not None:
            raise ValueError("lengths must come with cache, got no cache; use key_padding_mask")
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_dense(name, x, nested="build nn.TransformerEncoder with enable_nested_tensor=False")
            if x.dim() not in (2, 3) or x.shape[-1] != self.embed_dim:
                raise ValueError(f"{name} must have shape (B, N, {self.embed_dim}) or (N, {self.embed_dim}), got {tuple(x.shape)}")
            if x.shape != query.shape:
                want = f"must have the shape of query={tuple(query.shape)}"
                raise ValueError(f"{name} {want}, got {tuple(x.shape)}; use nn.MultiheadAttention for cross-attention")
        key_padding_mask = ignored_keys(key_padding_mask)
        has_batch = query.dim() == 3
        if not has_batch:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        # Modules are called, never their weights read: hooks, adapters, parametrizations and quantization act in the call. One
        # product for all three would save nothing: on a CPU it takes as long or longer, since the weights must be joined first.
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))  # (B, N, H, D)
        if rotation is not None:
            q, k = rotation.apply(q, k)
        if cache is not None:
            backend = self.attention.backend
            out = cache.attend(q, k, v, scale=self.attention.scale, sinks=self.sinks, backend=backend, **options)
        else:
            is_causal = is_causal or self.attention.is_causal
            out = self.attention(q, k, v, is_causal=is_causal, key_padding_mask=key_padding_mask, sinks=self.sinks, **options)
        out = self.out_proj(self.inner_attn_ln(out.flatten(2)))
        return out if has_batch else out[0], None

    def _check_cache(self, cache: DilatedKVCache, is_causal: bool, excluded: dict[str, Any]) -> None:
        if not isinstance(cache, DilatedKVCache):
            raise TypeError(f"cache must be a DilatedKVCache, got {type(cache).__name__}")
        for name, value in excluded.items():
            if value is not None:
                raise NotImplementedError(f"{name} must be None with cache, got a value; padding is told by lengths")
        if not (is_causal or self.attention.is_causal):
            raise NotImplementedError(
                "cache must come with is_causal=True, got is_causal=False: later tokens would change earlier ones"
            )
        if self.training and self.attention.dropout_p > 0.0:
            raise NotImplementedError(f"cache must come without dropout, got {self.attention.dropout_p}; call eval() first")
        if cache.pattern != self.attention.pattern:
            raise ValueError(f"cache must be for the layer's pattern={self.attention.pattern}, got {cache.pattern}")


def _kind(shape: tuple[int, ...], weight: Tensor, bias: Tensor | None) -> str:
    """A projection in words."""
    dtype = dtype_name(weight.dtype)
    return f"shape {shape} in {dtype} on {weight.device} {'without' if bias is None else 'with'} bias"
