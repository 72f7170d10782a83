"""Fine-tune a slide encoder on labels of slides: `python -m docs.slide_training.finetune --weights slide_encoder.pth`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from docs.slide_training.data import IN_CHANS, Pack, Slide, make_slides, packs
from flexdilated.hub.gigapath import LongNetViT, create_model

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
    parser.add_argument("--weights", help="a checkpoint; default: random weights")
    parser.add_argument("--arch", default="gigapath_slide_enc12l768d")
    parser.add_argument("--tune", choices=["head", "lora", "all"], default="lora")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--slides", type=int, default=64)
    options = parser.parse_args()
    # Put your own slides here: embeddings, coordinates in pixels of tiles of 256, labels.
    slides = make_slides(options.slides + 64)
    encoder = create_model(options.weights, options.arch, IN_CHANS)
    model = SlideClassifier(encoder, 2, tune=options.tune).train()
    print("losses", [round(loss, 3) for loss in fit(model, slides[64:], epochs=options.epochs)])
    print("accuracy", accuracy(model, slides[:64]))


if __name__ == "__main__":
    main()
