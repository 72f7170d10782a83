"""What exported programs hold of this library: the names and schemas of its operators, which they ask for when they are loaded."""

from __future__ import annotations

import pytest
import torch

import flexdilated.distributed.attention
from flexdilated.core.custom_op import Flat, schema_of

OPTIONS = (
    "SymInt[] segment_lengths, SymInt[] dilation_rates, str heads, str offsets, bool zero_padding, bool detach_weights, "
    "bool is_causal, float scale, float dropout_p, str engine, SymInt first_head, SymInt num_heads"
)
PLACE = "str group_name, SymInt rank, SymInt[] shard_lengths, str exchange, bool differentiable, bool keeps, str made_by"
MASKS = "Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed"
QKV = "Tensor q, Tensor k, Tensor v"
SAVED = f"Tensor dout, Tensor? dlse, {QKV}, Tensor out, Tensor lse"


@pytest.mark.parametrize(
    ("name", "arguments", "outputs"),
    [
        ("mixture", f"{QKV}, {MASKS}, {OPTIONS}", 2),
        ("mixture_backward", f"{SAVED}, {MASKS}, {OPTIONS}", 3),
        ("mixture_by_values", f"{QKV}, {MASKS}, {OPTIONS}", 2),
        ("mixture_by_values_backward", f"{SAVED}, {MASKS}, {OPTIONS}", 3),
        ("mixture_tangent", f"Tensor dq, Tensor dk, Tensor dv, {QKV}, Tensor out, Tensor lse, {MASKS}, {OPTIONS}", 2),
        ("context_parallel", f"{QKV}, {MASKS}, Tensor unknown, {OPTIONS}, {PLACE}", 4),
        ("context_parallel_backward", f"{SAVED}, Tensor received, Tensor number, {MASKS}, {OPTIONS}, {PLACE}", 3),
    ],
)
def test_schemas_stay(name: str, arguments: str, outputs: int) -> None:
    schema = getattr(torch.ops.flexdilated, name).default._schema
    assert str(schema) == f"flexdilated::{name}({arguments}) -> ({', '.join(['Tensor'] * outputs)})"


def test_a_schema_is_made_of_the_fields() -> None:
    assert schema_of(Flat) == OPTIONS
    assert flexdilated.distributed.attention.CONTEXT_PARALLEL.forward._name == "context_parallel"
