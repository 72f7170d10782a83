"""Every name: the place of its arguments in the table, their warnings, the docs' table, dropout, copies; and the factories."""

import copy
import pickle
import warnings

import pytest
import torch

from flexdilated import DilatedPattern, compat
from flexdilated.compat import ARGUMENTS
from tests.compat.cases import (
    BARE,
    EMBED,
    FACTORIES,
    GIVEN,
    GROUPED,
    HEADS,
    HILBERT,
    LAYERS,
    LENGTHS,
    MIGRATION,
    RATES,
    TRANSFORMERS,
    arguments,
    build,
    expected_warnings,
    inputs,
    only,
)

NAMES = (*BARE, *LAYERS, HILBERT, *TRANSFORMERS, *FACTORIES)


def test_every_name_of_the_earlier_packages_is_here() -> None:
    public = {name for name, value in vars(compat).items() if callable(value) and not name.startswith("_")} - {"NoReturn"}
    assert public == set(NAMES)
    assert set(GIVEN) == set(ARGUMENTS)


# Arguments without effect, or without effect in some classes, that each name accepts.
BARE_ARGUMENTS = "device dtype enable_memory_pool enable_profiling lightweight_pool"
RING = f"{BARE_ARGUMENTS} block_size ring_size use_checkpointing use_flash_attention use_pattern_cache use_tf32"
RING_LAYER = "block_size device dtype enable_memory_pool ring_size use_checkpointing use_flash_attention use_pattern_cache use_tf32"
ACCEPTED = {
    **dict.fromkeys(BARE, RING),
    "DilatedAttention": f"{BARE_ARGUMENTS} op",
    "ImprovedDilatedAttention": f"{BARE_ARGUMENTS} use_tf32",
    HILBERT: f"{RING} hilbert_chunk_size",
    **dict.fromkeys(LAYERS, RING_LAYER),
    "MultiheadDilatedAttention": "device dtype op",
    "ImprovedMultiheadDilatedAttention": "device dtype use_tf32",
    "RingMultiheadDilatedAttentionHybrid": "device dtype enable_memory_pool ring_size use_flash_attention use_pattern_cache",
    **dict.fromkeys(FACTORIES, "block_size device dtype enable_memory_pool ring_size use_checkpointing use_tf32"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_each_name_accepts_the_arguments_of_the_earlier_one(name: str) -> None:
    assert arguments(name) & set(GIVEN) == set(ACCEPTED[name].split())


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_arguments_without_effect_warn_once_by_name_and_others_never(name: str) -> None:
    build(name)  # warnings are errors here
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(name, **{argument: GIVEN[argument] for argument in arguments(name) & set(GIVEN)})
    assert sorted(str(warning.message) for warning in caught) == expected_warnings(name)
    assert all(warning.filename == build.__code__.co_filename for warning in caught)


def test_a_loop_that_builds_layers_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            compat.RingDilatedAttention(LENGTHS, RATES, use_tf32=True, block_size=7)
    assert len(caught) == 2


@pytest.mark.parametrize(
    ("name", "positional", "options", "message"),
    [
        ("RingDilatedAttention", (LENGTHS, RATES), {"sparsity": 1}, "got an unexpected keyword argument 'sparsity'"),
        ("RingDilatedAttention", (LENGTHS, RATES, 0.0, None), {}, "too many positional arguments"),
        ("RingDilatedAttention", (LENGTHS,), {"block_size": 7}, "missing a required argument: 'dilation_rates'"),
        ("DilatedAttention", (LENGTHS, RATES, None, 0.0, None), {"op": None}, "multiple values for argument 'op'"),
    ],
)
def test_unknown_missing_and_repeated_arguments_raise(
    name: str, positional: tuple[object, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) {message}$"):
        getattr(compat, name)(*positional, **options)


@pytest.mark.parametrize(
    ("name", "positional", "last"),
    [
        ("DilatedAttention", (LENGTHS, RATES, None, 0.0), "op"),
        ("ImprovedDilatedAttention", (LENGTHS, RATES, 0.0), "use_tf32"),
        ("MultiheadDilatedAttention", (EMBED, HEADS, RATES, LENGTHS, 0.0, True, True, 1e-5, 1.0, "cpu", None), "op"),
        ("ImprovedMultiheadDilatedAttention", (EMBED, HEADS, RATES, LENGTHS, 0.0, True, True, 1e-5, 1.0, "cpu", None), "use_tf32"),
    ],
)
def test_last_positional_argument_has_no_effect(name: str, positional: tuple[object, ...], last: str) -> None:
    build = getattr(compat, name)
    assert build(*positional, None).attention.pattern == GROUPED  # None does not warn
    with pytest.warns(UserWarning, match=f"^{last} has no effect: "):
        build(*positional, True)


def test_table_in_the_docs_has_every_argument_and_the_text_of_the_warnings() -> None:
    section = MIGRATION.read_text().split("| argument |")[1].split("\n\n")[0]
    rows = [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in section.splitlines()[2:]]
    assert {name for name, _, _ in rows} == set().union(*(arguments(name) for name in NAMES)) - {"embed_dim", "num_heads"}
    assert {name: meaning for name, meaning, warns in rows if warns != "never"} == ARGUMENTS


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_dropout_drops_weights_in_training_only(name: str) -> None:
    argument = "attention_dropout" if "attention_dropout" in arguments(name) else "dropout"
    module, x = build(name, **{argument: 0.4}).eval(), inputs(name)
    with torch.no_grad():
        plain = only(module(*x))
        assert torch.equal(only(module(*x)), plain)
        assert not torch.allclose(only(module.train()(*x)), plain)
    with pytest.raises(ValueError, match=r"^dropout_p must be in \[0, 1\), got 1.0$"):
        build(name, **{argument: 1.0})


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_modules_are_pickled_and_copied(name: str) -> None:
    module, x = build(name).eval(), inputs(name)
    for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(only(twin(*x)), only(module(*x)))
        if name in LAYERS:
            twin.load_state_dict({key.replace("inner_attn_ln", "norm"): y for key, y in module.state_dict().items()})


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
            warnings.filterwarnings("ignore", "pattern with segments")  # once per process
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
