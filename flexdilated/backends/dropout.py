"""Attention dropout: seeds, and the random numbers of a part of a model's tokens or heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.core.tracing import answers_while_traced


class Dropout(NamedTuple):
    """Attention dropout: the probability, and a seed that gives the same mask in forward and backward."""

    p: float
    seed: int


def draw_seed(dropout_p: float, first_sequence: int) -> Tensor:
    """A random seed `(1,)` int64 for attention dropout. Drawn outside the operators: activation checkpointing then draws it again.

    `first_sequence` is mixed in, so that shards of a batch get independent seeds from equal generators.
    """
    refuse_draws_again(dropout_p)
    return torch.randint(1 << 62, (1,), device="cpu") ^ fold_in(0, first_sequence)


def refuse_draws_again(dropout_p: float) -> None:
    """Raise NotImplementedError for dropout if a compiled backward may draw other numbers (torch 2.13, pytorch/pytorch#190717)."""
    if dropout_p > 0.0 and torch.compiler.is_compiling() and torch.is_grad_enabled() and _draws_again():
        raise NotImplementedError(
            "dropout_p must be 0 in training compiled with torch._functorch.config.activation_memory_budget < 1 or "
            f"aggressive_recomputation, got {dropout_p}: the backward would drop other weights; use torch.utils.checkpoint instead"
        )


@answers_while_traced
def _draws_again() -> bool:
    from torch._functorch import config  # loaded by compilers

    return config.activation_memory_budget < 1 or config.aggressive_recomputation


def fold_in(seed: int, ordinal: int) -> int:
    """The seed of part `ordinal`. Consecutive ordinals give seeds that differ in all bits: a CPU generator reads only 32.

    Source: the finaliser of SplitMix64, doi 10.1145/2660193.2660195, figure 16.
    """
    z = (seed + ordinal * 0x9E3779B97F4A7C15) % (1 << 64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return (z ^ (z >> 31)) % (1 << 63)


@contextmanager
def seeded_draws(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a generator with this seed inside the block; None: no change. For a part of the tokens or heads."""
    if seed is None:
        yield
    elif device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        module = torch.get_device_module(device)
        with torch.random.fork_rng(devices=[device], device_type=device.type), module.device(device):
            module.manual_seed(seed)
            yield
