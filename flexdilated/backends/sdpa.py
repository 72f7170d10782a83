"""The kernels behind `scaled_dot_product_attention`, called by their aten names because those return and take the lse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated.backends.request import Request
from flexdilated.merge import safe_lse
from flexdilated.transforms import may_draw

__all__ = ["KERNELS", "Dropout", "Kernel", "Options", "aligned", "choose_kernel", "differential", "why_not"]

aten = torch.ops.aten

# Scores that the math kernel holds at once: 64 MiB in float32.
MATH_SCORES = 1 << 24

# Kernels hold the scale in float32: what is smaller may be 0 to them.
LEAST_SCALE = torch.finfo(torch.float32).tiny


class Dropout(NamedTuple):
    """Attention dropout: the probability, and a seed that gives the same mask in forward and backward."""

    p: float
    seed: int


class Options(NamedTuple):
    """What a kernel call needs besides its tensors.

    `ignored` is `(batch, keys)` bool, True for a key that no query may see. Ignored keys and values hold zeros.
    """

    is_causal: bool
    scale: float
    ignored: Tensor | None = None
    dropout: Dropout | None = None


Forward = Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """Dense attention on `(batch, heads, rows, D)` tensors; as many queries as keys where it is causal.

    `forward` gives `out` and `lse`, `backward` the gradients for a given `out` and `lse`: these may be the mixture's instead of
    the kernel's own, which makes the sum over all pieces the exact gradient of the mixture.
    """

    name: str
    why_not: Callable[[Request], str | None]
    run_forward: Forward
    run_backward: Backward
    head_dim_multiple: int = 1
    shares_kv: bool = True  # whether k and v may have fewer heads than q

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        """`out` `(batch, heads, rows, D)`; `lse` `(batch, heads, rows)`, -inf where no key reaches."""
        head_dim = q.shape[-1]
        q, options, _ = _with_positive_scale(q, options)
        k, v = self._repeat(k, q), self._repeat(v, q)
        out, lse = self.run_forward(self._pad(q), self._pad(k), self._pad(v), options)
        out = out[..., :head_dim]
        if options.ignored is not None:
            # Kernels disagree about rows that a mask empties (aten's CPU flash returns lse = 0): say it ourselves.
            empty = _empty_rows(options.ignored, options.is_causal)
            lse = lse.masked_fill(empty[:, None], -math.inf)
            out = out.masked_fill(empty[:, None, :, None], 0.0)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`dq, dk, dv` for `dout` and, where given, `dlse`.

        The gradient of lse needs no kernel of its own: `ds = p (dout v^T - (rowsum(dout out) - dlse))` is the usual formula with
        one more column: `dlse` in dout, -1 in out, 0 in q, k and v.
        """
        head_dim, kv_heads = q.shape[-1], k.shape[1]
        q, options, factor = _with_positive_scale(q, options)
        if dlse is not None:
            q, k, v = (F.pad(x, (0, 1)) for x in (q, k, v))
            out = F.pad(out, (0, 1), value=-1.0)
            dout = torch.cat([dout, dlse[..., None].to(dout.dtype)], dim=-1)
        k, v = self._repeat(k, q), self._repeat(v, q)
        dout, q, k, v, out = (self._pad(x) for x in (dout, q, k, v, out))
        dq, dk, dv = (x[..., :head_dim] for x in self.run_backward(dout, q, k, v, out, safe_lse(lse), options))
        if dk.shape[1] != kv_heads:
            dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in (dk, dv))
        return dq if factor == 1.0 else dq * factor, dk, dv

    def _pad(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % self.head_dim_multiple
        return F.pad(x, (0, missing)) if missing else x

    def _repeat(self, x: Tensor, q: Tensor) -> Tensor:
        group = q.shape[1] // x.shape[1]
        return x if self.shares_kv or group == 1 else x.repeat_interleave(group, dim=1)


def choose_kernel(request: Request) -> Kernel:
    """The first kernel of the table that can run a request.

    Raises:
        NotImplementedError: If none can, with every reason.
    """
    for kernel in KERNELS:
        if kernel.why_not(request) is None:
            return kernel
    raise NotImplementedError(f"backend 'sdpa' cannot run this on {request.hardware}: {why_not(request)}")


def why_not(request: Request) -> str | None:
    """Why no kernel of this engine can run a request, or None."""
    reasons = [(kernel.name, kernel.why_not(request)) for kernel in KERNELS]
    if any(reason is None for _, reason in reasons):
        return None
    return "; ".join(f"{name}: {reason}" for name, reason in reasons)


def _with_positive_scale(q: Tensor, options: Options) -> tuple[Tensor, Options, float]:
    """Queries times a factor, options whose scale makes the same scores of them, and the factor; it is 1 for a usual scale.

    aten's kernels mask scores before they scale them, or look for the largest before: a scale that is not above 0 gives NaN there.
    """
    if options.scale >= LEAST_SCALE:
        return q, options, 1.0
    factor, scale = (-1.0, -options.scale) if options.scale <= -LEAST_SCALE else (options.scale, 1.0)
    return q * factor, options._replace(scale=scale), factor


def _empty_rows(ignored: Tensor, is_causal: bool) -> Tensor:
    """The queries that see no key: `(batch, rows)`, or `(batch, 1)` where all see the same keys."""
    visible = ~ignored
    if is_causal:
        return visible.cumsum(dim=1) == 0
    return ~visible.any(dim=1, keepdim=True)


def _bias(ignored: Tensor | None, q: Tensor) -> Tensor | None:
    """`ignored` as an additive mask `(batch, 1, 1, rows)` in the dtype of the queries."""
    if ignored is None:
        return None
    # Contiguous whatever the strides of `ignored`: the CPU kernel of older torch reads a mask as if its last stride were 1.
    bias = torch.zeros(ignored.shape, dtype=q.dtype, device=q.device)
    return bias.masked_fill_(ignored, -math.inf)[:, None, None, :]


# -- aten's flash attention for CPU -------------------------------------------------------------------------------------------


def _cpu_flash_why_not(request: Request) -> str | None:
    if request.hardware.device_type != "cpu":
        return "it runs on CPU only"
    if request.dropout:
        return "it has no dropout"
    return _unmodified(request) or _disabled("flash_sdp_enabled")


def _cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, options.is_causal, attn_mask=_bias(options.ignored, q), scale=options.scale
    )
    return out, lse


def _cpu_flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, options.is_causal, attn_mask=_bias(options.ignored, q), scale=options.scale
    )
    return dq, dk, dv


# -- what kernels on CUDA ask of memory ---------------------------------------------------------------------------------------

ALIGNMENT = 16  # bytes that they load at once, without a look at where a row begins


def aligned(x: Tensor) -> Tensor:
    """x itself where all of its rows begin aligned, else a copy."""
    steps = (x.data_ptr(), *(stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride()[:-1]) if size > 1))
    if x.stride(-1) == 1 and all(step % ALIGNMENT == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


# -- flash attention on CUDA --------------------------------------------------------------------------------------------------


def _cuda_why_not(request: Request, level: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> str | None:
    hardware = request.hardware
    if hardware.device_type != "cuda" or hardware.capability is None:
        return "it runs on CUDA only"
    if hardware.capability < level:
        return f"it needs sm_{level[0]}{level[1]} or newer"
    if request.dtype not in dtypes:
        return f"it has no {_name(request.dtype)} kernel there"
    if request.dropout:
        return "its attention dropout is not used here: the math kernel's is"
    return _unmodified(request)


def _flash_why_not(request: Request) -> str | None:
    reason = _cuda_why_not(request, (8, 0), (torch.bfloat16, torch.float16))
    if reason is not None:
        return reason
    if request.masked:
        return "it has no key padding mask"
    if request.head_dim > 248:  # 256, less the column that a gradient of lse adds
        return f"head_dim must be at most 248, got {request.head_dim}"
    return _disabled("flash_sdp_enabled")


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    q, k, v = (aligned(x) for x in (q, k, v))
    result = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, options.is_causal, False, scale=options.scale)
    return result[0], result[1]


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = (aligned(x) for x in (dout, q, k, v, out))
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # read only under dropout
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        options.is_causal,
        seed,
        seed,
        scale=options.scale,
    )
    return dq, dk, dv


# -- cuDNN attention ----------------------------------------------------------------------------------------------------------


def _cudnn_why_not(request: Request) -> str | None:
    reason = _cuda_why_not(request, (8, 0), (torch.bfloat16, torch.float16))
    if reason is not None:
        return reason
    if request.masked:
        return "its key padding mask is not used here: the memory-efficient kernel's is"
    if request.head_dim > 120:  # 128, less the column that a gradient of lse adds
        return f"head_dim must be at most 120, got {request.head_dim}"
    return _disabled("cudnn_sdp_enabled")


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    q, k, v = (aligned(x) for x in (q, k, v))
    result = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, options.is_causal, False, scale=options.scale)
    return result[0], result[1].view(q.shape[:3])  # cuDNN's lse has a trailing dim of 1


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = (aligned(x) for x in (dout, q, k, v, out))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # read only under dropout
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous()[..., None],
        seed,
        seed,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        options.is_causal,
        scale=options.scale,
    )
    return dq, dk, dv


# -- memory-efficient attention -----------------------------------------------------------------------------------------------


def _efficient_why_not(request: Request) -> str | None:
    half = (torch.float16, torch.bfloat16) if request.hardware.has_fast_bfloat16 else (torch.float16,)
    dtypes = (torch.float32, *half)
    return _cuda_why_not(request, (5, 0), dtypes) or _disabled("mem_efficient_sdp_enabled")


def _efficient_bias(ignored: Tensor | None, q: Tensor) -> Tensor | None:
    """The additive mask as `(batch, heads, rows, rows)`; its batch stride must be a multiple of 16 bytes, hence the padding."""
    bias = _bias(ignored, q)
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
        *(aligned(x) for x in (q, k, v)), _efficient_bias(options.ignored, q), True, 0.0, options.is_causal, scale=options.scale
    )
    return out, lse[..., : q.shape[2]]  # its rows are padded to a multiple of 32


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros((), dtype=torch.int64)  # read only under dropout
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        aligned(dout),
        *(aligned(x) for x in (q, k, v)),
        _efficient_bias(options.ignored, q),
        # Half-precision kernels find row m of `out` at m * heads * D elements, whatever its strides say. `dout`, which they read
        # along with it, aten copies itself.
        out.transpose(1, 2).contiguous().transpose(1, 2),
        F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf),
        seed,
        seed,
        0.0,
        (True, True, True, False),
        options.is_causal,
        scale=options.scale,
    )
    return dq, dk, dv


# -- plain tensor operations --------------------------------------------------------------------------------------------------


def _math_why_not(request: Request) -> str | None:
    if request.hardware.device_type == "mps" and request.dtype == torch.float64:
        return "MPS has no float64"
    return _disabled("math_sdp_enabled")


def _math_rows(q: Tensor, k: Tensor) -> range:
    """Starts of the query chunks whose scores fit in `MATH_SCORES`."""
    step = max(1, MATH_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return range(0, q.shape[2], step)


def _math_scores(q: Tensor, k: Tensor, start: int, options: Options) -> Tensor:
    """Masked scores of the queries `start...` against all keys."""
    scores = q @ k.transpose(-1, -2) * options.scale
    rows, keys = torch.arange(start, start + q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    if options.is_causal:
        scores = scores.masked_fill(keys > rows[:, None], -math.inf)
    if options.ignored is not None:
        scores = scores.masked_fill(options.ignored[:, None, None, :], -math.inf)
    return scores


def _math_masks(q: Tensor, k: Tensor, starts: range, dropout: Dropout | None) -> list[Callable[[Tensor], Tensor]]:
    """Per chunk, the function that applies attention dropout to its weights; the same for the same seed."""
    if dropout is None:
        return [torch.positive for _ in starts]  # the weights themselves

    def apply(weights: Tensor, seed: int) -> Tensor:
        generator = torch.Generator(device=q.device).manual_seed(seed)
        # In float32 whatever the default dtype: it may be another in the backward, and a coarse one drops too many.
        with may_draw():
            kept = torch.rand(weights.shape, generator=generator, device=q.device, dtype=torch.float32) >= dropout.p
        return weights * kept / (1.0 - dropout.p)

    return [partial(apply, seed=dropout.seed + start) for start in starts]


def _math_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, v = (_accumulated(x) for x in (q, k, v))
    outs, lses = [], []
    starts = _math_rows(q, k)
    for start, drop in zip(starts, _math_masks(q, k, starts, options.dropout)):
        scores = _math_scores(q[:, :, start : start + starts.step], k, start, options)
        lse = torch.logsumexp(scores, dim=-1)
        outs.append(drop(torch.exp(scores - safe_lse(lse)[..., None])) @ v)
        lses.append(lse)
    return torch.cat(outs, dim=2).to(dtype), torch.cat(lses, dim=2)


def _math_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = q.dtype
    dout, q, k, v, out = (_accumulated(x) for x in (dout, q, k, v, out))
    delta = (dout * out).sum(dim=-1, keepdim=True)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    starts = _math_rows(q, k)
    for start, drop in zip(starts, _math_masks(q, k, starts, options.dropout)):
        rows = slice(start, start + starts.step)
        q_i, dout_i = q[:, :, rows], dout[:, :, rows]
        weights = torch.exp(_math_scores(q_i, k, start, options) - lse[:, :, rows, None])
        dv += drop(weights).transpose(-1, -2) @ dout_i
        dscores = weights * (drop(dout_i @ v.transpose(-1, -2)) - delta[:, :, rows]) * options.scale
        dq[:, :, rows] = dscores @ k
        dk += dscores.transpose(-1, -2) @ q_i
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def differential(
    tangents: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """`sum p (dscore v + dv)` and `sum p dscore` over the keys, by plain tensor operations whatever kernel computed lse.

    `dscore = scale (dq k^T + q dk^T)` and `p = exp(score - lse)`, where lse may be the mixture's.

    Args:
        tangents: `dq, dk, dv`, of the shapes of q, k and v.
        q: `(batch, heads, rows, D)`.
        k: `(batch, kv_heads, rows, D)`.
        v: The shape of k.
        lse: `(batch, heads, rows)`.
        options: Those of the forward.
    """
    group = q.shape[1] // k.shape[1]
    dq, dk, dv, q, k, v = (_accumulated(x) for x in (*tangents, q, k, v))
    dk, dv, k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (dk, dv, k, v))
    outs, sums = [], []
    starts, lse = _math_rows(q, k), safe_lse(lse)
    for start, drop in zip(starts, _math_masks(q, k, starts, options.dropout)):
        rows = slice(start, start + starts.step)
        weights = torch.exp(_math_scores(q[:, :, rows], k, start, options) - lse[:, :, rows, None])
        dscores = (dq[:, :, rows] @ k.transpose(-1, -2) + q[:, :, rows] @ dk.transpose(-1, -2)) * options.scale
        moved = weights * dscores
        outs.append(drop(moved) @ v + drop(weights) @ dv)
        sums.append(moved.sum(dim=-1))
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _accumulated(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _unmodified(request: Request) -> str | None:
    return "it has no score_mod or mask_mod" if request.modified else None


def _disabled(flag: str) -> str | None:
    """Why the user has switched a kernel off (`torch.nn.attention.sdpa_kernel`), or None."""
    if torch.compiler.is_compiling():  # the switches cannot be traced; the kernel is chosen when the compiled graph runs
        return None
    if getattr(torch.backends.cuda, flag)():
        return None
    return "it is switched off (torch.nn.attention.sdpa_kernel)"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# In order of preference.
KERNELS: tuple[Kernel, ...] = (
    # It sums the key gradients of shared heads in half precision; older ones do not know shared heads.
    Kernel("cpu_flash", _cpu_flash_why_not, _cpu_flash_forward, _cpu_flash_backward, shares_kv=False),
    Kernel("flash", _flash_why_not, _flash_forward, _flash_backward, head_dim_multiple=8),
    Kernel("cudnn", _cudnn_why_not, _cudnn_forward, _cudnn_backward, head_dim_multiple=8, shares_kv=False),
    Kernel("efficient", _efficient_why_not, _efficient_forward, _efficient_backward, head_dim_multiple=8, shares_kv=False),
    Kernel("math", _math_why_not, _math_forward, _math_backward, shares_kv=False),
)
