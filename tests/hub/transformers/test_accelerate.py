"""accelerate's FSDP2 trains models under dilated attention, alone and in `Trainer`, as one process does."""

import copy
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.distributed.processes import exactly
from tests.tolerances import EXACT

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

from flexdilated.hub import transformers as hub  # noqa: E402, F401
from tests.hub.transformers.models import INTERLEAVED, RAGGED, VOCAB, build, longnet  # noqa: E402

TOKENS, BATCH, STEPS = 34, 2, 3


def models(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    torch.manual_seed(11)
    found = {
        "Llama": build("Llama", RAGGED),
        "Llama, tied": build("Llama", INTERLEAVED, tie_word_embeddings=True),
        "LongNet": longnet(vocab_size=VOCAB),
        "LongNet, untied": longnet(vocab_size=VOCAB, tie_embeddings=False),
    }
    return {name: model.to(dtype).train() for name, model in found.items()}


def batches() -> list[Tensor]:
    torch.manual_seed(12)
    return [torch.randint(2, VOCAB, (2 * BATCH, TOKENS)) for _ in range(STEPS)]


def pretend(rank: int) -> None:
    """accelerate trains CPUs as plain data parallelism, whatever its plugin: told that they are GPUs, it runs FSDP2 on them."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.PartialState(cpu=True)._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU


def accelerator_of(rank: int, *, mixed_precision: str = "no", **options: Any) -> Any:
    pretend(rank)
    values = {"cpu_ram_efficient_loading": False, "activation_checkpointing": False, **options}
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **values)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=mixed_precision)
    assert accelerator.is_fsdp2
    return accelerator


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def train(
    model: Any,
    optimizer: Any,
    parts: Iterable[Tensor],
    backward: Callable[[Tensor], None] = Tensor.backward,
    clip: Callable[..., Any] = nn.utils.clip_grad_norm_,
) -> None:
    for tokens in parts:
        backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def check_parameters(model: nn.Module, whole: nn.Module, tolerance: dict[str, float] = EXACT) -> None:
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        torch.testing.assert_close(parameter.full_tensor(), expected[name], **tolerance, msg=lambda t, name=name: f"{name}: {t}")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in model._no_split_modules]


@exactly(2)
def test_training_equals_one_process(rank: int, mesh: DeviceMesh, tmp_path: Path) -> None:
    parts = batches()
    here = [tokens[BATCH * rank :][:BATCH] for tokens in parts]
    for name in ("Llama, tied", "LongNet", "LongNet, untied"):
        whole = models()[name]
        accelerator = accelerator_of(rank)
        sharded = copy.deepcopy(whole)
        sharded, optimizer = accelerator.prepare(sharded, optimizer_of(sharded))
        assert [isinstance(block, FSDPModule) for block in blocks_of(sharded)] == [True, True]
        steps = {"backward": accelerator.backward, "clip": accelerator.clip_grad_norm_}
        start, other = copy.deepcopy(whole), optimizer_of(whole)
        train(sharded, optimizer, here, **steps)
        train(whole, other, parts)
        check_parameters(sharded, whole)
        assert all(not torch.equal(x, y) for x, y in zip(whole.parameters(), start.parameters()))
        # What is saved is a model of one process.
        state = accelerator.get_state_dict(sharded)
        options = {"is_main_process": rank == 0, "save_function": accelerator.save}
        accelerator.unwrap_model(sharded).save_pretrained(tmp_path / name, state_dict=state, **options)
        accelerator.wait_for_everyone()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert type(loaded) is type(whole)
        for key, value in whole.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key], value, **EXACT)
        # Where training was interrupted, it goes on, by the momentum of before.
        accelerator.save_state(tmp_path / f"{name}, state")
        train(sharded, optimizer, here[:1], **steps)
        accelerator.load_state(tmp_path / f"{name}, state")
        check_parameters(sharded, whole)
        train(sharded, optimizer, here[1:], **steps)
        train(whole, other, parts[1:])
        check_parameters(sharded, whole)


@exactly(2)
def test_trainer_equals_one_process(rank: int, mesh: DeviceMesh, tmp_path: Path) -> None:
    # Ranks have unlike numbers of labels, and the loss is a mean over all.
    rows = [
        {"input_ids": row, "labels": [-100] * (5 * i) + row[5 * i :]} for i, row in enumerate(torch.cat(batches())[:6].tolist())
    ] * 2

    def trained(model: Any, batch: int, **options: Any) -> tuple[list[float], Any]:
        options |= {"max_steps": STEPS, "per_device_train_batch_size": batch, "learning_rate": 0.1, "max_grad_norm": 0.5}
        options |= {"optim": "sgd", "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "seed": 3}
        options |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path / f"{batch}"), **options)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer

    for name in ("Llama", "LongNet"):
        whole = models()[name]
        sharded = copy.deepcopy(whole)
        pretend(rank)
        config = {"fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}
        losses, trainer = trained(sharded, BATCH, fsdp=True, **config, accelerator_config={"use_configured_state": True})
        assert trainer.accelerator.is_fsdp2
        trainer.save_model(str(tmp_path / name))
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[key]
        expected, _ = trained(whole, 2 * BATCH)
        torch.testing.assert_close(losses, expected, atol=1e-4, rtol=0)  # they are rounded
        check_parameters(trainer.model, whole)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for key, value in whole.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key], value, **EXACT)
