"""Factory functions: the classes that they build, what they warn of and refuse."""

import warnings

import pytest
import torch

from flexdilated import DilatedPattern, compat
from tests.compat.cases import EMBED, FACTORIES, GIVEN, GROUPED, HEADS, LENGTHS, RATES, arguments, expected_warnings


@pytest.mark.parametrize("kind", ["auto", "standard", "improved", "ring"])
def test_factories_build_the_classes_with_all_their_arguments(kind: str) -> None:
    attention = compat.create_dilated_attention(kind, LENGTHS, RATES, dropout=0.25)
    assert type(attention) is (compat.RingDilatedAttention if kind == "ring" else compat.ImprovedDilatedAttention)
    assert (attention.attention.pattern, attention.attention.dropout_p) == (GROUPED, 0.25)
    options = {"bias": False, "layer_norm_eps": 0.1, "dtype": torch.float64, "device": "meta", "dropout": 0.25}
    layer = compat.create_multihead_dilated_attention(kind, EMBED, HEADS, LENGTHS, RATES, **options)
    assert type(layer) is (compat.RingMultiheadDilatedAttention if kind == "ring" else compat.ImprovedMultiheadDilatedAttention)
    assert (layer.attention.pattern, layer.attention.dropout_p) == (GROUPED, 0.25)
    assert (layer.q_proj.bias, layer.q_proj.weight.dtype, layer.inner_attn_ln.eps) == (None, torch.float64, 0.1)
    assert layer.q_proj.weight.is_meta
    assert compat.create_dilated_attention(kind).attention.pattern == DilatedPattern.grouped((2048, 4096, 8192), (1, 2, 4))


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_warn_of_what_has_no_effect_and_refuse_what_they_do_not_know(name: str) -> None:
    factory = getattr(compat, name)
    for kind in ("auto", "ring"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            given = {argument: GIVEN[argument] for argument in arguments(name) & set(GIVEN)}
            factory(kind, segment_lengths=LENGTHS, dilation_rates=RATES, **given)
        assert sorted(str(warning.message) for warning in caught) == expected_warnings(name)
        assert all(warning.filename == __file__ for warning in caught)
    for kind, use in (("distributed", r"DilatedAttention\(mesh="), ("block_sparse_ring", r"dilated_attention\(mask_mod=")):
        with pytest.raises(NotImplementedError, match=rf"^attention_type must be one of .*, got '{kind}'; .*{use}"):
            factory(kind)
    with pytest.raises(ValueError, match=r"^attention_type must be one of \('auto', .*, got 'fast'$"):
        factory("fast")
    with pytest.raises(TypeError, match="unexpected keyword argument 'sparsity_ratio'"):
        factory(sparsity_ratio=0.9)
