"""Write the small files that later versions must load, with what they compute: `python -m tests.release.save_artefacts FOLDER`.

Run once, by the version whose number the folder bears. Weights are drawn from a seed; outputs are of a CPU in float32.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, MultiheadDilatedAttention
from flexdilated.slides.gigapath import LongNetViT
from tests.commands import invoke
from tests.training import runs

SEED = 105
TEXT = b"the quick brown fox jumps over the lazy dog. " * 101  # what the small run learned
TRAIN = {"steps": 3, "embed-dim": 8, "eval-every": 3, "eval-sequences": 1, "seed": 7}


def train(output: Path, text_path: Path, *more: str) -> tuple[int, str, str]:
    return invoke(*runs.arguments(output, text_path, *more, **TRAIN))


def language_model() -> LongNetLM:
    pattern = DilatedPattern((5, 13), (1, 3), offsets="interleaved")
    config = LongNetConfig(vocab_size=29, embed_dim=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=11, pattern=pattern)
    return LongNetLM(config).eval()


def layer() -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(12, 3, DilatedPattern.torchscale((7, 17), (1, 2))).eval()


def vision() -> LongNetViT:
    pattern = DilatedPattern.torchscale((7, 17), (1, 2))
    return LongNetViT(in_chans=11, embed_dim=12, depth=1, num_heads=3, mlp_ratio=2.0, slide_ngrids=7, pattern=pattern).eval()


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    coords = torch.randint(0, 7 * 256, (1, 19, 2)).float()
    return {"tokens": torch.randint(29, (2, 23)), "x": torch.randn(2, 19, 12), "tiles": torch.randn(1, 19, 11), "coords": coords}


def disturb(module: nn.Module) -> nn.Module:
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    given = inputs()
    model, attention, slides = disturb(language_model()), disturb(layer()), disturb(vision())
    model.save_pretrained(folder / "longnet")
    save_file(attention.state_dict(), folder / "attention.safetensors")
    save_file(slides.state_dict(), folder / "vision.safetensors")
    (folder / "pattern.json").write_text(json.dumps(DilatedPattern.gigapath().to_dict()) + "\n")
    program = torch.export.export(attention, (given["x"],) * 3)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    torch.export.save(program, folder / "attention.pt2")
    with torch.no_grad():
        outputs = {"logits": model(given["tokens"]), "attended": attention(given["x"], given["x"], given["x"])[0]}
        outputs["embedded"] = slides(given["tiles"], given["coords"])[0]
    save_file({**given, **{name: value.contiguous() for name, value in outputs.items()}}, folder / "expected.safetensors")
    (folder / "text.txt").write_bytes(TEXT)
    assert train(folder / "run", folder / "text.txt")[0] == 0
    for name in ("text.txt", "run/loss.png", "run/sample.txt"):
        (folder / name).unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
