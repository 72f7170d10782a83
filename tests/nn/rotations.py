"""Rotary positions and xPos by their definitions, as products of complex numbers in float64."""

import torch
from torch import Tensor

HEAD_DIM = 14


def pairs(x: Tensor) -> Tensor:
    """Elements `i` and `i + D / 2` as one complex number, in float64."""
    return torch.complex(x.double()[..., : HEAD_DIM // 2], x.double()[..., HEAD_DIM // 2 :])


def turned(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Each pair times `exp(i p theta)`."""
    theta = torch.tensor([base ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)], dtype=torch.float64)
    angle = positions.double()[:, None, None] * theta
    result = pairs(x) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([result.real, result.imag], dim=-1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())


def xpos_scores(q: Tensor, k: Tensor, positions: Tensor, scale_base: float) -> Tensor:
    """`Re sum_i q_i conj(k_i) zeta_i ** ((p - s) / scale_base) exp(i (p - s) theta_i)`, pair by pair, in float64."""
    q, k = pairs(turned(q, positions)), pairs(turned(k, positions))
    zeta = torch.tensor([(2 * i / HEAD_DIM + 0.4) / 1.4 for i in range(HEAD_DIM // 2)], dtype=torch.float64)
    distance = (positions[:, None] - positions).double()
    decay = zeta ** (distance[..., None] / scale_base)
    return torch.einsum("bqhi,bkhi,qki->bhqk", q, k.conj(), decay.to(q.dtype)).real
