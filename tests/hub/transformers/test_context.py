"""Models over ranks: tokens by this library's exchange, parameters by FSDP2, heads by wrappers that send them for tokens."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from flexdilated.distributed import shard_sequence
from tests.distributed.processes import exactly
from tests.tolerances import EXACT, SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub import transformers as hub  # noqa: E402
from flexdilated.hub.transformers.cache import CACHE  # noqa: E402
from tests.hub.transformers.models import GROUPED, INTERLEAVED, RAGGED, build, dilated, gpt_oss, longnet  # noqa: E402

TOKENS, BATCH, VOCAB = 34, 2, 31
IGNORED = -100


def models() -> dict[str, Any]:
    found = {}
    for name, pattern, options in (("Llama", RAGGED, {}), ("Qwen3", GROUPED, {}), ("GPT2", INTERLEAVED, None)):
        torch.manual_seed(11)
        if options is None:  # learned positions
            sizes = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
            config = transformers.GPT2Config(**sizes, embd_pdrop=0.0, resid_pdrop=0.0, **dilated(pattern))
            found[name] = transformers.GPT2LMHeadModel(config).double()
        else:
            found[name] = build(name, pattern, **options).double()
    torch.manual_seed(12)
    found["LongNet"] = longnet(vocab_size=VOCAB).double()
    return found


def labelled(tokens: Tensor) -> dict[str, Tensor]:
    """Labels of whole sequences, moved by one, some of them ignored."""
    labels = tokens.clone()
    labels[:, 5:9] = IGNORED
    return {"labels": labels, "shift_labels": F.pad(labels[:, 1:], (0, 1), value=IGNORED)}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_gradients(model: Any, expected: dict[str, Tensor], reduce: Any, tolerance: Any = EXACT) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(reduce(parameter.grad), expected[name], **tolerance, msg=lambda t, name=name: f"{name}: {t}")


def summed(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient


@exactly(2)
def test_shards_of_tokens_equal_one_process(rank: int, world: DeviceMesh) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    torch.manual_seed(3)
    tokens = torch.randint(2, VOCAB, (BATCH, TOKENS))
    borders = torch.tensor([0, 9, 20, TOKENS])
    packed = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    even, uneven, documents = (slice(None), None, {}), (slice(None), (13, TOKENS - 13), {}), (slice(0, 1), None, packed)
    calls = {"Llama": (even, documents), "Qwen3": (uneven,), "GPT2": (uneven,), "LongNet": (uneven, documents)}
    for name, whole in models().items():
        sharded = hub.shard_context(copy.deepcopy(whole).train(), mesh)
        whole.train()
        for rows, lengths, options in calls[name]:
            batch = {"input_ids": tokens[rows], **labelled(tokens[rows])}
            count = int((batch["shift_labels"] != IGNORED).sum())
            told = {**options, "use_cache": False, "num_items_in_batch": count}
            for model in (whole, sharded):
                model.zero_grad()
            if options and name != "LongNet":  # the model's own positions would go on from one document to the next
                positions = {"position_ids": torch.cat([torch.arange(n) for n in borders.diff().tolist()])[None]}
            else:
                positions = {}
            expected = whole(**batch, **told, **positions)
            expected.loss.backward()
            # Shards are cut by hand: what the library cuts is tested elsewhere.
            first = TOKENS // 2 if lengths is None else lengths[0]
            here = slice(0, first) if rank == 0 else slice(first, TOKENS)
            mine = {key: value[:, here] for key, value in batch.items()}
            out = sharded(**mine, **told, **({} if lengths is None else {"shard_lengths": lengths}))
            out.loss.backward()
            torch.testing.assert_close(out.logits, expected.logits[:, here], **EXACT)
            torch.testing.assert_close(summed(out.loss.detach()), expected.loss.detach(), **SINGLE)  # the library's is float32
            check_gradients(sharded, gradients(whole), summed, SINGLE)
    # As the library computes them again in the backward.
    model = models()["Llama"]
    sharded = hub.shard_context(copy.deepcopy(model), mesh, exchange="ring").train()
    sharded.gradient_checkpointing_enable()
    model.train()(tokens).logits.sin().sum().backward()
    sharded(tokens[:, 17 * rank :][:, :17]).logits.sin().sum().backward()
    check_gradients(sharded, gradients(model), summed)
    compiled_documents(mesh, tokens[:1], rank)
    refuses_what_is_not_known_of_shards(sharded, tokens[:, :17], rank)
    if hasattr(transformers, "StableLmConfig"):  # whose layers keep what they are given from their attention
        sharded = hub.shard_context(build("StableLm"), mesh)
        for option, of in (("cu_seq_lens_q", packed), ("shard_lengths", {"shard_lengths": (17, 17)})):
            with pytest.raises(NotImplementedError, match=f"{option} must be None over a mesh with layers that do not hand it on"):
                sharded(tokens[:1, 17 * rank :][:, :17], **of)
    # Two calls of attention in each layer; older versions have a class for each implementation.
    if not hasattr(transformers.models.diffllama.modeling_diffllama, "DIFFLLAMA_ATTENTION_CLASSES"):
        torch.manual_seed(14)
        model = build("DiffLlama").double()
        sharded = hub.shard_context(copy.deepcopy(model), mesh).train()
        model.train()(tokens).logits.sin().sum().backward()
        sharded(tokens[:, 17 * rank :][:, :17]).logits.sin().sum().backward()
        check_gradients(sharded, gradients(model), summed, SINGLE)
    # Learned sinks, of which each rank's rows give a part of the gradient, beside experts.
    if hasattr(transformers, "GptOssConfig"):
        for exchange in ("gather", "heads"):
            torch.manual_seed(15)
            model = gpt_oss(RAGGED)  # in float32: its experts take no float64
            sharded = hub.shard_context(copy.deepcopy(model), mesh, exchange=exchange).train()
            expected = model.train()(tokens, use_cache=False).logits
            expected.sin().sum().backward()
            out = sharded(tokens[:, 17 * rank :][:, :17], use_cache=False).logits
            torch.testing.assert_close(out, expected[:, 17 * rank :][:, :17], **SINGLE)
            out.sin().sum().backward()
            assert model.model.layers[0].self_attn.sinks.grad.abs().min() > 1e-6
            check_gradients(sharded, gradients(model), summed, SINGLE)
    # A window must hold the tokens of all ranks, not those of one.
    for window in (TOKENS, TOKENS - 1):
        torch.manual_seed(13)
        model = build("Mistral", sliding_window=window).double()
        sharded = hub.shard_context(copy.deepcopy(model), mesh)
        if window == TOKENS:
            expected = model(tokens, use_cache=False).logits[:, 17 * rank :][:, :17]
            torch.testing.assert_close(sharded(tokens[:, 17 * rank :][:, :17]).logits, expected, **EXACT)
            continue
        with pytest.raises(NotImplementedError, match="sliding_window must be None with 'flexdilated' attention, got 33"):
            sharded(tokens[:, 17 * rank :][:, :17])


def compiled_documents(mesh: DeviceMesh, tokens: Tensor, rank: int) -> None:
    """Borders inside of shards, whose positions nobody can read while a compiler traces."""
    torch.manual_seed(16)
    model = build("Llama", num_hidden_layers=1).double()
    sharded = torch.compile(hub.shard_context(copy.deepcopy(model), mesh), backend="eager")
    lengths = (13, TOKENS - 13)
    for borders in ([0, 13, TOKENS], [0, 9, 20, TOKENS]):
        packed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(borders))
        with torch.no_grad():
            out = sharded(tokens.split(lengths, 1)[rank], shard_lengths=lengths, **packed).logits
            expected = [model(part, use_cache=False).logits for part in tokens.split(packed["cu_seq_lens_q"].diff().tolist(), 1)]
        torch.testing.assert_close(out, torch.cat(expected, 1).split(lengths, 1)[rank], **EXACT)


def refuses_what_is_not_known_of_shards(model: Any, tokens: Tensor, rank: int) -> None:
    positions = torch.arange(17)[None] + 17 * rank
    model(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens))
    with pytest.raises(ValueError, match=f"position_ids must be None, or count from {17 * rank} in the whole sequence on rank"):
        model(tokens, position_ids=positions + 1)
    with pytest.raises(ValueError, match=r"shard_lengths must be at least 1 in a model over a mesh of the library, got \(0, 17\)"):
        model(tokens[:, : 17 * rank], shard_lengths=(0, 17))
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    with pytest.raises(NotImplementedError, match="attention_mask must be None in a model over a mesh, got a mask"):
        model(tokens, attention_mask=mask)
    with pytest.raises(NotImplementedError, match="logits_to_keep must be 0 in a model over a mesh, got 1: it would keep"):
        model(tokens, logits_to_keep=1)
    for given, shown in (({"use_cache": True}, "use_cache=True"), ({CACHE: hub.DilatedCache()}, "DilatedCache")):
        with pytest.raises(
            NotImplementedError, match=f"use_cache must be False and {CACHE} None in a model over a mesh, got {shown};"
        ):
            model(tokens, **given)
    with pytest.raises(NotImplementedError, match=f"use_cache must be False and {CACHE} None in a model over a mesh"):
        model.generate(tokens, max_new_tokens=2)
    for given in ({}, {"shift_labels": tokens}):
        missing = "num_items_in_batch" if given else "shift_labels"
        with pytest.raises(ValueError, match=f"labels must come with {missing} in a model over a mesh"):
            model(tokens, labels=tokens, **given)
    with pytest.raises(ValueError, match="model must be without a mesh, got LlamaForCausalLM with one"):
        hub.shard_context(model, model._dilated_context.mesh)


@exactly(2)
def test_what_no_shard_can_do_is_refused_on_every_rank(rank: int, world: DeviceMesh) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    torch.manual_seed(3)
    tokens = torch.randint(2, VOCAB, (BATCH, TOKENS))
    batch = shard_sequence({"input_ids": tokens, **labelled(tokens)}, mesh)
    for build_model in (lambda: build("Llama"), lambda: longnet(vocab_size=VOCAB)):
        torch.manual_seed(4)
        model = hub.shard_context(build_model(), mesh)
        # As a loader gives them that knows nothing of the mesh: other sequences, each shifted by itself.
        others = torch.randint(2, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(rank))
        with pytest.raises(ValueError, match=r"^labels must be those of one sequence in shards .* as Trainer's is not, by "):
            model(input_ids=others, **labelled(others), num_items_in_batch=9)
        with pytest.raises(ValueError, match=r"^num_items_in_batch must be the number .* got 9 on rank 0, 10 on rank 1$"):
            model(**batch, num_items_in_batch=torch.tensor(9 + rank))
        padded = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
        padded["attention_mask"][0, -1] = 0
        with pytest.raises(NotImplementedError, match=r"^attention_mask must be None in a model over a mesh, got a mask"):
            model(**padded, num_items_in_batch=9)
        model(**batch, num_items_in_batch=9)
        # Another loader gives the batches of an evaluation.
        with pytest.raises(ValueError, match=r"^labels must be those of one sequence in shards .* as Trainer's is not, by "):
            model.train(not model.training)(input_ids=others, **labelled(others), num_items_in_batch=9)
        # What is ignored shows nothing, until something else does.
        torch.manual_seed(4)
        model = hub.shard_context(build_model(), mesh)
        hidden = {"labels": others.clone(), "shift_labels": others.clone()}
        hidden["labels"][:, 0] = hidden["shift_labels"][:, -1] = IGNORED
        with pytest.warns(UserWarning, match="the labels between shards are all ignored, so ranks cannot tell"):
            model(input_ids=others, **hidden, num_items_in_batch=9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(input_ids=others, **hidden, num_items_in_batch=9)
        with pytest.raises(ValueError, match=r"^labels must be those of one sequence in shards .* as Trainer's is not, by "):
            model(input_ids=others, **labelled(others), num_items_in_batch=9)
        model(**batch, num_items_in_batch=9)
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    more = {"num_key_value_heads": 3, "num_local_experts": 2, "sliding_window": None}
    config = transformers.MixtralConfig(**sizes, **more, **dilated(RAGGED))
    experts = hub.shard_context(transformers.MixtralForCausalLM(config), mesh)
    with pytest.raises(NotImplementedError, match="output_router_logits must be False in a model over a mesh, got True"):
        experts(batch["input_ids"], output_router_logits=True)


@exactly(2)
def test_sharded_parameters_equal_one_process(rank: int, world: DeviceMesh) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(4)
    tokens = torch.randint(2, VOCAB, (2 * BATCH, TOKENS))
    for by_tokens in (False, True):  # each rank its own sequences, or its own part of all
        for name, whole in models().items():
            if name == "GPT2" if by_tokens else name == "Qwen3":
                continue
            sharded = copy.deepcopy(whole)
            if by_tokens:
                hub.shard_context(sharded, mesh["dp"])
            blocks = [module for module in sharded.modules() if type(module).__name__ in sharded._no_split_modules]
            assert len(blocks) == 2
            for module in (*blocks, sharded):
                fully_shard(module, mesh=mesh)
            expected = whole(tokens, use_cache=False).logits
            expected.sin().sum().backward()
            here = (slice(None), slice(17 * rank, 17 * rank + 17)) if by_tokens else slice(BATCH * rank, BATCH * rank + BATCH)
            logits = sharded(tokens[here], use_cache=False).logits
            (2 * logits.sin().sum()).backward()  # FSDP2 averages over its ranks
            torch.testing.assert_close(logits, expected[here], **EXACT)
            assert all(isinstance(parameter, dist.tensor.DTensor) for parameter in sharded.parameters())
            check_gradients(sharded, gradients(whole), lambda gradient: gradient.full_tensor())


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("mesh") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    dist.destroy_process_group()


def test_models_that_cannot_be_sharded_are_refused(mesh: DeviceMesh) -> None:
    shard = hub.shard_context
    with pytest.raises(ValueError, match=r"exchange must be one of \('auto', 'gather', 'ring', 'heads'\), got 'post'"):
        shard(build("Llama"), mesh, exchange="post")
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got str"):
        shard(build("Llama"), "cp")
    with pytest.raises(TypeError, match="model must be a PreTrainedModel, got Linear"):
        shard(nn.Linear(2, 2), mesh)
    # Positions by the padding; a loss of its own; several parts; no decoder.
    parts = transformers.LlavaConfig(
        text_config={"model_type": "llama", "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "vocab_size": 31},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1},
    )
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, **dilated(RAGGED)}
    for other in (
        transformers.RobertaForCausalLM(transformers.RobertaConfig(**sizes, intermediate_size=24, is_decoder=True)),
        transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**sizes)),
        transformers.LlavaForConditionalGeneration(parts),
        build("ViT"),
    ):
        with pytest.raises(NotImplementedError, match=rf"model must be one of .*LlamaForCausalLM.* got {type(other).__name__}$"):
            shard(other, mesh)
    dense = build("Llama")
    dense.config.dilated_pattern = None
    with pytest.raises(NotImplementedError, match="model must have a dilated_pattern and 'flexdilated' attention"):
        shard(dense, mesh)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(NotImplementedError, match="rope_type must not depend on the longest position over a mesh, got 'dynamic'"):
        shard(build("Llama", rope_parameters=rope), mesh)
    with pytest.raises(ValueError, match="model must have a mesh, got LlamaForCausalLM without; use shard_context"):
        hub.context_mesh(build("Llama"))
    tokens = torch.ones(1, 5, dtype=torch.int64)
    for model in (build("Llama"), longnet()):
        with pytest.raises(ValueError, match="shard_lengths must be None without a mesh, got some"):
            model(tokens, shard_lengths=(5,))
    with pytest.raises(ValueError, match="shift_labels must come with labels, got them alone"):
        longnet()(tokens, shift_labels=tokens)


def test_layers_that_mix_tokens_otherwise_are_refused(mesh: DeviceMesh) -> None:
    model = build("Llama")
    model.model.layers[1].self_attn = nn.Identity()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **options: (hidden_states, None)
    shard = hub.shard_context(model, mesh)
    with pytest.raises(NotImplementedError, match=r"every layer must attend .*got 1 that did of 2 of LlamaModel"):
        shard(torch.ones(1, 5, dtype=torch.int64))
