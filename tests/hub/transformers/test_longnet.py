"""LongNet as a model of the library."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from tests.hub.transformers.models import BATCH, INTERLEAVED, RAGGED, TOKENS, build, draw_tokens, longnet, mask_of, run
from tests.nn.test_initial_weights import RECIPES, check_distribution, moments
from tests.tolerances import SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402


@pytest.mark.parametrize("tied", [False, True])
def test_longnet_round_trip_by_the_auto_classes(tmp_path: Path, tied: bool) -> None:
    model, tokens = longnet(tie_embeddings=tied, num_kv_heads=2, position="rotary"), torch.randint(256, (BATCH, TOKENS))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, hub.LongNetForCausalLM)
    assert isinstance(transformers.AutoConfig.from_pretrained(tmp_path), hub.LongNetHFConfig)
    assert loaded.config.to_longnet() == model.config.to_longnet()
    assert loaded.config.to_longnet().pattern == RAGGED
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        assert half(tokens).logits.dtype == torch.bfloat16


def test_longnet_has_every_field_of_longnets_configuration(tmp_path: Path) -> None:
    options = {"num_kv_heads": 2, "ffn_dim": 31, "position": "rotary", "scale_base": 99.0, "scale": 0.3, "tie_embeddings": False}
    options |= {"dropout_p": 0.1, "attention_dropout_p": 0.2, "backend": "sdpa"}
    config = LongNetConfig(vocab_size=50, embed_dim=32, num_layers=1, num_heads=4, pattern=RAGGED, **options)
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    assert all(getattr(config, name) != default for name, default in fields.items())
    values = {name: getattr(config, name) for name in fields if name != "pattern"}
    found = hub.LongNetHFConfig(dilated_pattern=RAGGED, **values)
    assert found.to_longnet() == config
    found.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).to_longnet() == config
    with_defaults = {name: default for name, default in fields.items() if default is not dataclasses.MISSING}
    assert all(getattr(hub.LongNetHFConfig().to_longnet(), name) == default for name, default in with_defaults.items())


def test_longnet_equals_longnet_lm_and_its_loss() -> None:
    model, tokens = longnet(), torch.randint(256, (BATCH, TOKENS))
    plain = LongNetLM(LongNetConfig(vocab_size=256, embed_dim=24, num_layers=2, num_heads=4, ffn_dim=31, pattern=RAGGED)).eval()
    plain.load_state_dict(model.model.state_dict())
    labels = tokens.clone()
    labels[:, :5] = -100
    output = model(tokens, labels=labels)
    torch.testing.assert_close(output.logits, plain(tokens), rtol=0, atol=0)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected, **SINGLE)
    loss, logits = model(tokens, labels=labels, return_dict=False)
    torch.testing.assert_close((loss, logits), (output.loss, output.logits), rtol=0, atol=0)
    (logits_alone,) = model(tokens, return_dict=False)
    torch.testing.assert_close(logits_alone, output.logits, rtol=0, atol=0)


@pytest.mark.parametrize("side", ["left", "right", "among"])
def test_longnet_padded_rows_equal_the_documents_alone(side: str) -> None:
    model, tokens, mask = longnet().double(), torch.randint(256, (BATCH, TOKENS)), mask_of([TOKENS, 17, 11], side)
    logits = model(tokens, attention_mask=mask).logits
    for b in range(BATCH):
        real = mask[b].bool()
        # Rotary positions are float32 tables: another length centres xPos elsewhere.
        torch.testing.assert_close(logits[b, real], model(tokens[b, real][None]).logits[0], **SINGLE)


def test_longnet_compiles_no_graph_for_each_padded_length() -> None:
    model, graphs = longnet(num_layers=1), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=graphs)
    counts = []
    with torch.no_grad():
        for length, side in ((23, "left"), (19, "left"), (31, "right"), (27, "left"), (37, "right")):
            tokens, real = torch.randint(256, (2, length)), torch.arange(length) < torch.tensor([[length], [17]])
            mask = (real if side == "right" else real.flip(1)).long()
            torch.testing.assert_close(
                compiled(tokens, attention_mask=mask).logits, model(tokens, attention_mask=mask).logits, **SINGLE
            )
            counts.append(graphs.frame_count)
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("borders", [[0, 7, 17, 23], [0, 23], [0, 7, 7, 23, 23]], ids=str)
def test_longnet_loss_of_packed_documents_is_the_mean_over_each_documents_own_labels(borders: list[int]) -> None:
    model, tokens, cuts = longnet().double(), torch.randint(256, (1, TOKENS)), torch.tensor(borders)
    documents = [part for part in tokens.split(cuts.diff().tolist(), dim=1) if part.shape[1]]
    logits = torch.cat([model(part).logits[0, :-1] for part in documents])
    expected = torch.nn.functional.cross_entropy(logits.float(), torch.cat([part[0, 1:] for part in documents]))
    given = tokens.clone()
    loss = model(tokens, labels=given, cu_seq_lens_q=cuts, cu_seq_lens_k=cuts).loss
    torch.testing.assert_close(loss, expected, **SINGLE)
    assert torch.equal(given, tokens)


def test_longnet_takes_what_the_library_s_packing_collator_gives() -> None:
    model, lengths = longnet(), [7, 10, 6]
    rows = [{"input_ids": torch.randint(2, 256, (n,)).tolist()} for n in lengths]
    expected = torch.cat([model(torch.tensor([row["input_ids"]])).logits for row in rows], dim=1)
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False)(rows)
    torch.testing.assert_close(model(**batch).logits, expected, **SINGLE)
    with pytest.raises(TypeError, match="unexpected keyword argument 'position_ids'"):
        model(**transformers.DataCollatorWithFlattening()(rows))


def test_longnet_refuses_names_of_no_argument() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'position_id'"):
        longnet()(torch.randint(256, (BATCH, TOKENS)), position_id=None)
    with pytest.raises(NotImplementedError, match="inputs_embeds must be None in LongNetForCausalLM"):
        longnet()(torch.randint(256, (BATCH, TOKENS)), inputs_embeds=torch.zeros(BATCH, TOKENS, 24))


def test_longnet_refuses_other_caches_and_wrong_shapes() -> None:
    model, tokens = longnet(), torch.randint(256, (BATCH, TOKENS))
    with pytest.raises(NotImplementedError, match=f"{CACHE} must be a DilatedCache in LongNetForCausalLM, got DynamicCache"):
        model(tokens, **{CACHE: transformers.DynamicCache()})
    with pytest.raises(ValueError, match="cache and past_key_values are two names of one argument, got both"):
        model(tokens, cache=hub.DilatedCache(), past_key_values=hub.DilatedCache())
    with pytest.raises(NotImplementedError, match=r"cache_implementation must be None in .* got 'static'"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    for number in (torch.tensor([3]), -3):
        with pytest.raises(ValueError, match="logits_to_keep must be an integer of at least 0 in LongNetForCausalLM, got"):
            model(tokens, logits_to_keep=number)
    with pytest.raises(ValueError, match="tie_word_embeddings must be False in LongNetHFConfig, got True; use tie_embeddings"):
        longnet(tie_word_embeddings=True)
    borders = torch.tensor([0, 7, 23])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="cu_seq_lens_q must be None with a DilatedCache, got borders"):
        model(tokens[:1], cu_seq_lens_q=borders, cu_seq_lens_k=borders, use_cache=True)
    with pytest.raises(ValueError, match=r"input_ids must have shape \(B, N\), got \(23,\)"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of input_ids=\(3, 23\), got \(3, 22\)"):
        model(tokens, attention_mask=torch.ones(BATCH, TOKENS - 1))
    with pytest.raises(ValueError, match="embed_dim must be a multiple"):
        hub.LongNetHFConfig(embed_dim=25)
    with pytest.raises(ValueError, match="pattern keys must be among"):
        hub.LongNetHFConfig(dilated_pattern={"widow": 3})


@pytest.mark.parametrize("recipe", ["forwards", "backwards", "init_weights"])
def test_longnet_after_the_meta_device_has_the_constructors_distribution(recipe: str) -> None:
    expected = moments(longnet(tie_embeddings=False))
    with torch.device("meta"):
        model = longnet(tie_embeddings=False)
    model.to_empty(device="cpu")
    RECIPES[recipe](model)
    check_distribution(model, expected)


def test_longnet_initialises_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = longnet(embed_dim=96, ffn_dim=256)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.ffn.fc1.weight"
    kept = {key: value for key, value in weights.items() if key != name}
    assert len(kept) == len(weights) - 1
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(loaded[name].std(), weights[name].std(), rtol=0.1, atol=0)
    for key, value in kept.items():
        torch.testing.assert_close(loaded[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_longnet_token_embeddings_can_be_resized(tmp_path: Path, tied: bool) -> None:
    model, tokens = longnet(tie_embeddings=tied), torch.tensor([[25, 3]])
    before = model(tokens).logits
    model.tie_weights()
    model.resize_token_embeddings(259)
    torch.testing.assert_close(model(tokens).logits[..., :256], before, **SINGLE)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_longnet() == loaded.model.config == model.model.config
    logits = loaded(torch.tensor([[258, 3]])).logits
    assert logits.shape == (1, 2, 259)
    torch.testing.assert_close(logits, model(torch.tensor([[258, 3]])).logits, rtol=0, atol=0)


def test_longnet_computed_again_in_the_backward_has_the_same_gradients() -> None:
    model, tokens = longnet().train(), torch.randint(256, (BATCH, TOKENS))
    _, expected = run(model, input_ids=tokens)
    calls = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # an older name
    enable()
    _, gradients = run(model, input_ids=tokens)
    assert len(calls) == 2 * len(model.model.layers)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("position", "options"), [("xpos", {}), ("xpos", {"num_beams": 3}), ("rotary", {"num_return_sequences": 2, "do_sample": True})]
)
def test_longnet_decodes_by_a_bounded_cache(position: str, options: dict[str, Any]) -> None:
    model, tokens = longnet(position=position, num_kv_heads=2).double(), torch.randint(1, 256, (BATCH, TOKENS))
    mask = mask_of([TOKENS, 17, 5], "left")
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **options}
    generated = []
    for cache in ({}, {CACHE: hub.DilatedCache()}, {"use_cache": False}):
        torch.manual_seed(3)
        generated.append(model.generate(tokens, **options, **cache))
    torch.testing.assert_close(generated[0], generated[2], rtol=0, atol=0)
    torch.testing.assert_close(generated[1], generated[2], rtol=0, atol=0)
    output = model.generate(tokens, **options, return_dict_in_generate=True)
    assert isinstance(output.past_key_values, hub.DilatedCache)


@pytest.mark.parametrize("drafts", ["model", "prompt", "chunks"])
def test_longnet_decodes_drafts_and_chunks(drafts: str) -> None:
    model, tokens = longnet(), torch.randint(1, 7, (1, TOKENS))
    chosen = {
        "model": {"assistant_model": longnet(dilated_pattern=INTERLEAVED)},
        "prompt": {"prompt_lookup_num_tokens": 3},
        "chunks": {"prefill_chunk_size": 4},
    }
    length = {"max_new_tokens": 19, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1000}  # older prompt lookup needs one
    generated = model.generate(tokens, **length, **chosen[drafts])
    torch.testing.assert_close(generated, model.generate(tokens, **length, use_cache=False), rtol=0, atol=0)


def test_longnet_logits_behind_a_cache() -> None:
    model, tokens, mask = longnet().double(), torch.randint(256, (BATCH, TOKENS)), mask_of([TOKENS, 17, 5], "left")
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).logits
        output = model(tokens[:, :15], attention_mask=mask[:, :15], use_cache=True)
        rest = model(tokens[:, 15:], attention_mask=mask, **{CACHE: output.past_key_values})
        logits = torch.cat([output.logits, rest.logits], dim=1)
        last = model(tokens, attention_mask=mask, use_cache=True, logits_to_keep=1).logits
        few = model(tokens, attention_mask=mask, logits_to_keep=3).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **SINGLE)  # rotary tables, as above
    torch.testing.assert_close(last, expected[:, -1:], **SINGLE)
    torch.testing.assert_close(few, expected[:, -3:], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of input_ids=\(3, 8\) behind 23 tokens seen, got"):
        model(tokens[:, 15:], attention_mask=mask[:, 15:], **{CACHE: output.past_key_values})


@pytest.mark.parametrize(
    "options",
    [
        {"dilated_pattern": DilatedPattern((7,), (2,), zero_padding=True)},  # where positions shift
        {"dilated_pattern": DilatedPattern((1 << 16, 3**11), (1, 2))},  # whose common multiple is too long for xPos
    ],
)
def test_longnet_generates_without_a_cache_where_none_can_be(options: dict[str, Any]) -> None:
    model, tokens = longnet(**options), torch.randint(1, 256, (1, 9))
    output = model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    assert output.sequences.shape == (1, 14)


def test_trainer_smooths_the_loss_of_the_next_token(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    for model in (longnet(vocab_size=31), build("Llama")):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), label_smoothing_factor=1e-9, report_to="none", use_cpu=True
        )
        trainer, tokens = transformers.Trainer(model=model, args=arguments), draw_tokens()
        loss = trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
        torch.testing.assert_close(loss, model(tokens, labels=tokens).loss, **SINGLE)
