"""`Trainer` trains models under dilated attention."""

from pathlib import Path

import pytest
import torch

from tests.hub.transformers.models import build, draw_tokens, longnet
from tests.tolerances import SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")


def test_trainer_lowers_the_loss_of_both_kinds_of_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    text = b"the quick brown fox jumps over the lazy dog. " * 12
    rows = [{"input_ids": list(text[i : i + 32]), "labels": list(text[i : i + 32])} for i in range(0, 512, 32)]
    for name, model in (("longnet", longnet()), ("llama", build("Llama", vocab_size=256))):
        batch = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")}
        before = model(**batch).loss.item()
        options = {"max_steps": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
        options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path / name), use_cpu=True, **options)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        assert trainer.state.global_step == 2
        assert model.eval()(**batch).loss.item() < before
        trainer.save_model()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_trainer_smooths_the_loss_of_the_next_token(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    for model in (longnet(vocab_size=31), build("Llama")):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), label_smoothing_factor=1e-9, report_to="none", use_cpu=True
        )
        trainer, tokens = transformers.Trainer(model=model, args=arguments), draw_tokens()
        loss = trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
        torch.testing.assert_close(loss, model(tokens, labels=tokens).loss, **SINGLE)
