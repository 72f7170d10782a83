"""Fine-tune a slide encoder on labels: `python -m docs.slide_training.finetune FOLDER --labels labels.csv --weights w.pth`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from docs.slide_training.data import Pack, Slide, make_slides, packs, read_slides
from flexdilated.hub.gigapath import LongNetViT, create_model
from flexdilated.hub.slides import Reading

Tune = Literal["head", "lora", "all"]


class SlideClassifier(nn.Module):
    """`head(norm(encoder(slide)))`. Training drops elements in the encoder only where it is tuned."""

    def __init__(self, encoder: LongNetViT, num_classes: int, *, tune: Tune) -> None:
        super().__init__()
        self.tune = tune
        if tune != "all":
            encoder.requires_grad_(False)
        if tune == "lora":
            from peft import LoraConfig, inject_adapter_in_model

            projections = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
            inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=projections), encoder)
        # Activations of a layer are computed again in the backward: memory for one layer instead of all.
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
    """Train, and give the mean loss of every epoch. A step sees `accumulate` packs, each slide with the same weight."""
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
    """The share of slides whose label is found."""
    was_training = model.training
    model.eval()
    right = sum(int((model(pack).argmax(-1) == pack.labels).sum()) for pack in packs(slides, token_budget))
    model.train(was_training)
    return right / len(slides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="slides, as of encode-slides; default: made up ones")
    parser.add_argument("--labels", type=Path, help="a .csv of the columns slide and label")
    parser.add_argument("--tile-size-level0", type=float, help="side of a tile at level 0, where files do not say it")
    parser.add_argument("--coords", type=Path, help="folder of coordinates, where embeddings have none")
    parser.add_argument("--weights", help="a checkpoint; default: random weights")
    parser.add_argument("--arch", default="gigapath_slide_enc12l768d")
    parser.add_argument("--tune", choices=["head", "lora", "all"], default="lora")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where to write the classifier")
    options = parser.parse_args()
    if (options.folder is None) != (options.labels is None):
        parser.error("FOLDER and --labels come together")
    slides, classes = make_slides(128), ["left", "right"]
    if options.folder is not None:
        reading = Reading(options.coords, tile_size_level0=options.tile_size_level0)
        slides, classes = read_slides(options.folder, options.labels, reading)
    order = torch.randperm(len(slides), generator=torch.Generator().manual_seed(0)).tolist()
    train, test = ([slides[i] for i in part] for part in (order[len(order) // 5 :], order[: len(order) // 5]))
    encoder = create_model(options.weights, options.arch, slides[0].x.shape[1])
    model = SlideClassifier(encoder, len(classes), tune=options.tune).train()
    print("losses", [round(loss, 3) for loss in fit(model, train, epochs=options.epochs)])
    print(f"accuracy on {len(test)} slides that it has not seen", accuracy(model, test))
    if options.output is not None:
        torch.save({"model": model.state_dict(), "classes": classes, "tune": options.tune, "arch": options.arch}, options.output)


if __name__ == "__main__":
    main()
