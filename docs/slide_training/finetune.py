"""Fine-tune a slide encoder on labels: `python -m docs.slide_training.finetune FOLDER --labels labels.csv --weights w.pth`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from docs.slide_training.data import Pack, Slide, add_folder, make_slides, packs, read_slides, reading_of, split
from flexdilated.slides.gigapath import LongNetViT, create_model, read_checkpoint

Tune = Literal["head", "lora", "all"]


class SlideClassifier(nn.Module):
    """`head(encoder(slide))`. Dropout in the encoder is active only if the encoder is tuned."""

    def __init__(self, encoder: LongNetViT, num_classes: int, *, tune: Tune) -> None:
        super().__init__()
        self.tune = tune
        if tune != "all":
            encoder.requires_grad_(False)
        if tune == "lora":
            from peft import LoraConfig, inject_adapter_in_model

            projections = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
            inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=projections), encoder)
        # The backward recomputes a layer's activations: memory for one layer instead of all.
        for layer in encoder.encoder.layers if tune != "head" else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        self.encoder, self.head = encoder, nn.Linear(encoder.embed_dim, num_classes)

    def forward(self, pack: Pack) -> Tensor:
        """`(S, num_classes)`."""
        with torch.set_grad_enabled(self.tune != "head" and torch.is_grad_enabled()):
            (embedding,) = self.encoder(pack.x, pack.coords, cu_seqlens=pack.cu_seqlens)
        return self.head(embedding)

    def train(self, mode: bool = True) -> SlideClassifier:
        """A frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.tune == "head":
            self.encoder.eval()
        return self


def fit(
    model: SlideClassifier,
    slides: Sequence[Slide],
    *,
    epochs: int,
    learning_rate: float = 1e-3,
    token_budget: int = 2048,
    accumulate: int = 1,
    seed: int = 0,
) -> list[float]:
    """Train; return the mean loss of every epoch. A step has `accumulate` packs, and each slide has the same weight."""
    generator = torch.Generator().manual_seed(seed)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=learning_rate, weight_decay=0.01)
    done, all_of_them = 0, epochs * len(slides)
    losses = []
    for _ in range(epochs):
        order = torch.randperm(len(slides), generator=generator).tolist()
        total = 0.0
        pending = list(packs([slides[i] for i in order], token_budget))
        for start in range(0, len(pending), accumulate):
            step = pending[start : start + accumulate]
            count = sum(len(pack.labels) for pack in step)
            for pack in step:
                loss = F.cross_entropy(model(pack), pack.labels, reduction="sum")
                (loss / count).backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(learned, 1.0)
            done += count
            warm_up, cosine = min(1.0, 10 * done / all_of_them), 0.5 + 0.5 * math.cos(math.pi * done / (all_of_them + 1))
            optimizer.param_groups[0]["lr"] = learning_rate * warm_up * cosine
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(total / len(slides))
    return losses


@torch.inference_mode()
def accuracy(model: SlideClassifier, slides: Sequence[Slide], token_budget: int = 2048) -> float:
    """The share of slides that are classified correctly."""
    was_training = model.training
    model.eval()
    right = sum(int((model(pack).argmax(-1) == pack.labels).sum()) for pack in packs(slides, token_budget))
    model.train(was_training)
    return right / len(slides)


def save(model: SlideClassifier, classes: Sequence[str], arch: str, path: Path) -> None:
    """Write a classifier for `load` and `flexdilated slides`; adapters are added to the weights that they adapt."""
    adapted = {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")}
    weights = {}
    for name, value in model.state_dict().items():
        layer, _, part = name.partition(".base_layer.")
        if layer in adapted:
            weights[f"{layer}.{part}"] = value + adapted[layer].get_delta_weight("default") if part == "weight" else value
        elif ".lora_" not in name:
            weights[name] = value
    torch.save({"model": weights, "classes": list(classes), "arch": arch}, path)


def load(path: Path) -> tuple[SlideClassifier, list[str]]:
    """A classifier in evaluation mode, and the names of its classes."""
    saved = read_checkpoint(path)
    model = SlideClassifier(create_model(path, saved.arch, saved.in_chans), len(saved.classes), tune="head")
    model.head.load_state_dict(saved.head.state_dict())
    return model.eval(), list(saved.classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_folder(parser)
    parser.add_argument(
        "--labels", type=Path, help="a .csv with the columns slide, label and, if patients have several slides, patient"
    )
    parser.add_argument("--weights", help="a checkpoint; default: random weights")
    parser.add_argument("--arch", default="gigapath_slide_enc12l768d")
    parser.add_argument("--tune", choices=["head", "lora", "all"], default="lora")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--token-budget", type=int, default=2048, help="maximum number of tiles in a pack")
    parser.add_argument("--accumulate", type=int, default=1, help="packs in a step")
    parser.add_argument("--output", type=Path, help="where to write the classifier")
    options = parser.parse_args()
    if (options.folder is None) != (options.labels is None):
        parser.error("FOLDER and --labels come together")
    slides, classes = make_slides(128), ["left", "right"]
    if options.tune == "lora" and find_spec("peft") is None:
        parser.error("--tune lora needs peft, which is not installed: pip install peft, or --tune head")
    if min(options.epochs, options.token_budget, options.accumulate) < 1:
        parser.error("--epochs, --token-budget and --accumulate must be at least 1")
    try:
        if options.folder is not None:
            slides, classes = read_slides(options.folder, options.labels, reading_of(options))
        train, test = split(slides)
        encoder = create_model(options.weights, options.arch, slides[0].x.shape[1])
    except (ValueError, OSError) as error:
        parser.error(str(error))
    counts = [[sum(slide.label == i for slide in part) for i in range(len(classes))] for part in (train, test)]
    for name, trained, held_out in zip(classes, *counts):
        print(f"{name}: {trained} slides to train on, {held_out} held out")
    model = SlideClassifier(encoder, len(classes), tune=options.tune).train()
    numbers = {"epochs": options.epochs, "token_budget": options.token_budget, "accumulate": options.accumulate}
    print("losses", [round(loss, 3) for loss in fit(model, train, learning_rate=options.learning_rate, **numbers)])
    guess = counts[1][counts[0].index(max(counts[0]))] / len(test)
    print(
        f"accuracy on {len(test)} slides that it has not seen {accuracy(model, test):.3f}; of the most frequent label {guess:.3f}"
    )
    if options.output is not None:
        save(model, classes, options.arch, options.output)


if __name__ == "__main__":
    main()
