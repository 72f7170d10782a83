"""The kernels of `scaled_dot_product_attention`, called by their aten names, which return and take the lse."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated.backends.dense.math import MATH
from flexdilated.backends.kernel import NO_FUNCTIONS, Kernel, Options, aligned, bias_of, disabled, with_positive_scale
from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.hardware import SLOW_ON_CPU, dtype_name
from flexdilated.core.lse import accumulated

aten = torch.ops.aten
LEAST_CUDNN = 91501  # `check_prefer_cudnn_attention` in torch's sdp_utils.cpp, torch 2.11 to 2.14


def why_not(request: DispatchKey) -> str | None:
    """Why this backend cannot run a request, or None."""
    reasons = []
    for kernel in KERNELS:
        reason = kernel.why_not(request)
        if reason is None:
            return None
        reasons.append(f"{kernel.name}: {reason}")
    return "; ".join(reasons)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention under any mask, with its lse: what `scaled_dot_product_attention` computes and does not give.

    On a CPU by the kernel below, elsewhere by plain operations. No gradient.

    Args:
        q: `(batch, heads, queries, D)`.
        k: `(batch, heads, keys, D)`.
        v: As k.
        mask: `(batch, heads, queries, keys)` bool: whether a query sees a key.
        scale: Multiplies the scores.

    Returns:
        `out` in the dtype of q and `lse` `(batch, heads, queries)`; 0 and -inf for a query that sees no key.
    """
    q, options, _ = with_positive_scale(q, Options(is_causal=False, scale=scale))
    is_reached = mask.any(-1, keepdim=True)
    mask = mask | ~is_reached  # kernels disagree on a row without a key: let it see everything, and drop what it gives
    # A compiler of torch 2.9 takes the lse of doubles for floats.
    is_told = not (q.dtype == torch.float64 and torch.compiler.is_compiling())
    if q.device.type == "cpu" and is_told and disabled("flash_sdp_enabled") is None:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=options.scale)
    else:
        wide = accumulated(q.dtype)
        scores = (q.to(wide) @ k.to(wide).transpose(-1, -2) * options.scale).masked_fill(~mask, -math.inf)
        out, lse = (torch.softmax(scores, dim=-1) @ v.to(wide)).to(q.dtype), torch.logsumexp(scores, dim=-1)
    return out.masked_fill(~is_reached, 0.0), lse.masked_fill(~is_reached[..., 0], -math.inf)


def _cpu_flash_why_not(request: DispatchKey) -> str | None:
    if request.hardware.device_type != "cpu":
        return "it runs on CPU only"
    if request.dropout:
        return "it has no dropout"
    return NO_FUNCTIONS if request.modified else disabled("flash_sdp_enabled")


def _cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    if dtype in SLOW_ON_CPU:
        q, k, v = q.float(), k.float(), v.float()
    bias = None if options.ignored is None and options.band is None else bias_of(options, q, k.shape[2])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, options.is_causal, attn_mask=bias, scale=options.scale
    )
    return out.to(dtype), lse


def _cpu_flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    if q.dtype in SLOW_ON_CPU:  # torch's backward takes 6 to 11 times as long in a slow one
        dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    bias = None if options.ignored is None and options.band is None else bias_of(options, q, k.shape[2])
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        dout, q, k, v, out, lse, 0.0, options.is_causal, attn_mask=bias, scale=options.scale
    )
    return dq, dk, dv


def _cuda_why_not(request: DispatchKey, level: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> str | None:
    hardware = request.hardware
    if hardware.device_type != "cuda" or hardware.capability is None:
        return "it runs on CUDA only"
    if hardware.capability < level:
        return f"it needs sm_{level[0]}{level[1]} or newer"
    if request.dtype not in dtypes:
        return f"it has no {dtype_name(request.dtype)} kernel there"
    if request.dropout:
        return "attention dropout runs on the math kernel only"
    return NO_FUNCTIONS if request.modified else None


def _fused_why_not(request: DispatchKey, most_head_dim: int, unmasked: str, flag: str) -> str | None:
    """For the kernels in half precision alone. A gradient of lse is one more column of their head dim."""
    reason = _cuda_why_not(request, (8, 0), (torch.bfloat16, torch.float16))
    if reason is not None:
        return reason
    if request.key_padding_mask:
        return unmasked
    head_dim = request.head_dim + int(request.dlse)  # sympy of torch 2.11 adds no bool to a symbol
    if head_dim > most_head_dim:
        return f"head_dim must be at most {most_head_dim}, got {head_dim}"
    return disabled(flag)


def _flash_why_not(request: DispatchKey) -> str | None:
    return _fused_why_not(request, 256, "it has no key padding mask", "flash_sdp_enabled")


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


def _cudnn_why_not(request: DispatchKey) -> str | None:
    unmasked = "cuDNN is not used with a key padding mask; the memory-efficient kernel is"
    reason = _fused_why_not(request, 128, unmasked, "cudnn_sdp_enabled")
    if reason is None and torch.are_deterministic_algorithms_enabled():
        return "its backward is not deterministic, and torch.use_deterministic_algorithms is on"
    return reason


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    if q.shape[2] == 1:
        return MATH.run_forward(q, k, v, options)
    q, k, v = (aligned(x) for x in (q, k, v))
    result = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, options.is_causal, False, scale=options.scale)
    return result[0], result[1].view(q.shape[:3])  # cuDNN's lse has a trailing dim of 1


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[2] == 1:  # cuDNN has no backward for one key, and may give NaN for more (NVIDIA/cudnn-frontend#1072)
        return MATH.run_backward(dout, q, k, v, out, lse, options=options)
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


def _efficient_why_not(request: DispatchKey) -> str | None:
    half = (torch.float16, torch.bfloat16) if request.hardware.has_fast_bfloat16 else (torch.float16,)
    dtypes = (torch.float32, *half)
    return _cuda_why_not(request, (5, 0), dtypes) or disabled("mem_efficient_sdp_enabled")


def _efficient_bias(options: Options, q: Tensor, keys: int) -> Tensor | None:
    """The additive mask as `(batch, heads, rows, keys)`; its batch stride must be a multiple of 16 bytes, hence the padding."""
    bias = bias_of(options, q, keys)
    if bias is None:
        return None
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
        *(aligned(x) for x in (q, k, v)), _efficient_bias(options, q, k.shape[2]), True, 0.0, options.is_causal, scale=options.scale
    )
    return out, lse[..., : q.shape[2]]  # its rows are padded to a multiple of 32


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros((), dtype=torch.int64)  # read only under dropout
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        aligned(dout),
        *(aligned(x) for x in (q, k, v)),
        _efficient_bias(options, q, k.shape[2]),
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


def preferred(request: DispatchKey) -> tuple[Kernel, ...]:
    """The kernels in order of preference: cuDNN before flash on sm_90 and sm_100 from cuDNN 9.15.1 on, as in torch.

    But not for packed documents: the first call of each new shape took 0.4 to 1.1 s longer.
    """
    is_newest = request.hardware.capability in ((9, 0), (10, 0)) and (torch.backends.cudnn.version() or 0) >= LEAST_CUDNN
    if is_newest and not request.packed:
        return tuple(sorted(KERNELS, key=lambda kernel: kernel.name != "cudnn"))
    return KERNELS


KERNELS: tuple[Kernel, ...] = (
    # It sums the key gradients of shared heads in half precision; older ones do not know shared heads.
    Kernel("cpu_flash", _cpu_flash_why_not, _cpu_flash_forward, _cpu_flash_backward, shares_kv=False, windows="mask"),
    Kernel("flash", _flash_why_not, _flash_forward, _flash_backward, head_dim_multiple=8),
    Kernel("cudnn", _cudnn_why_not, _cudnn_forward, _cudnn_backward, head_dim_multiple=8, shares_kv=False),
    Kernel(
        "efficient",
        _efficient_why_not,
        _efficient_forward,
        _efficient_backward,
        head_dim_multiple=8,
        shares_kv=False,
        windows="mask",
    ),
    MATH,
)
