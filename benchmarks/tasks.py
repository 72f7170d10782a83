"""Accuracy of small causal models on five tasks: dense attention, a sliding window, and dilated patterns at equal pairs per token.

    python -m benchmarks.tasks            # what is not yet kept in benchmarks/results/tasks.json, about half an hour on two cores
    python -m benchmarks.tasks --quick    # whether it runs, in a minute; keeps nothing

All models have 3 layers and 8 heads and see 512 tokens. Each sparse kind of attention scores about 24 pairs per token and head,
dense attention 256. A token is embedded beside the token before it, so that every kind starts with the same local skill. There
is no other position than the causal mask.

- bigrams: letters follow a table that is drawn for each sequence; predict the next letter.
- topic: one of 16 topics is named 8 times among the first 32 tokens; answer with it at questions in the second half.
- recall: pairs of a key and a value, then a key that occurred 184 to 500 tokens before; answer with its value.
- copy: a random string of 32 letters comes again 128 to 256 tokens later; predict its letters.
- text: predict the next byte of Python's own sources, on files that were held out.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.environment import commit, describe
from flexdilated import DilatedPattern, dilated_attention
from flexdilated.training.corpus import load_corpus

RESULTS = Path(__file__).parent / "results" / "tasks.json"
TOKENS, HEADS, LAYERS, WIDTH = 512, 8, 3, 64
IGNORED = -100
BOUNDARY = TOKENS // 2


class Kind(NamedTuple):
    """One kind of attention: a dilated pattern, a sliding window of so many tokens, or both in one softmax."""

    pattern: DilatedPattern | None = None
    window: int = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One softmax over the keys of the pattern and of the window; `(B, N, H, D)`, as q, k and v."""
        if not self.window:
            assert self.pattern is not None
            return dilated_attention(q, k, v, self.pattern, is_causal=True)
        out, lse = windowed(q, k, v, self.window)
        if self.pattern is None:
            return out
        far, far_lse = dilated_attention(q, k, v, self.pattern, is_causal=True, return_lse=True)
        weight = torch.sigmoid(far_lse - lse).transpose(1, 2)[..., None]
        return out + weight * (far - out)

    def pairs_per_token(self) -> float:
        """Scored pairs per token and head, the mean over both; a pair that two branches join counts twice."""
        near = sum(min(self.window, n + 1) for n in range(TOKENS)) / TOKENS
        return near + (self.pattern.count_pairs(TOKENS, HEADS, is_causal=True) / (HEADS * TOKENS) if self.pattern else 0)


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Attention to the `window` tokens up to each query: `out` `(B, N, H, D)` and `lse` `(B, H, N)`.

    Blocks of `window` queries score the keys of their own block and of the block before.
    """
    num_tokens, more = q.shape[1], -q.shape[1] % window
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, more)).unflatten(1, (-1, window)).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    k, v = (torch.cat((F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x), dim=3) for x in (k, v))  # (B, H, blocks, 2 window, D)
    distance = window + torch.arange(window)[:, None] - torch.arange(2 * window)
    hidden = ((distance < 0) | (distance >= window)).repeat(q.shape[2], 1, 1)
    hidden[0, :, :window] = True
    scores = (q @ k.transpose(3, 4) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :num_tokens], lse.flatten(2)[..., :num_tokens]


def nested(longest: int) -> DilatedPattern:
    return DilatedPattern((32, 128, longest), (1, 4, 8))


# The topic is named before a boundary of `nested` and asked for behind it.
KINDS = {
    "dense": Kind(DilatedPattern((TOKENS,), (1,))),
    "sliding window": Kind(window=25),
    "segments": Kind(DilatedPattern((48,), (1,))),
    "two local branches": Kind(DilatedPattern((20, 28), (1, 1))),
    "nested": Kind(nested(BOUNDARY)),
    "connected": Kind(DilatedPattern((32, 144, 384), (1, 4, 8))),
    "local + far": Kind(DilatedPattern((16, TOKENS), (1, 4))),
    "window + far": Kind(DilatedPattern((TOKENS,), (4,)), window=8),
    "window + nested": Kind(DilatedPattern((128, TOKENS), (4, 8)), window=16),
    "grouped heads": Kind(DilatedPattern.grouped((64, TOKENS), (1, 4))),
}
FEW = ("dense", "sliding window", "nested", "local + far", "window + far", "grouped heads")
STEPS = {"bigrams": 200, "topic": 200, "text": 200, "recall": 400, "copy": 400}
SHOWN = {"bigrams": tuple(KINDS), "topic": tuple(KINDS), "text": tuple(KINDS), "recall": FEW, "copy": FEW[:4]}
BATCH, RATE, EVALUATED = 4, 3e-3, 16


class Batch(NamedTuple):
    """`tokens` `(B, N)`; `targets` `(B, N)`, what follows or is asked for, `IGNORED` elsewhere."""

    tokens: Tensor
    targets: Tensor


def draw_bigrams(batch: int, generator: torch.Generator) -> Batch:
    letters = 16
    table = torch.softmax(3.0 * torch.randn(batch, letters, letters, generator=generator), dim=-1)
    tokens = torch.zeros(batch, TOKENS + 1, dtype=torch.long)
    rows = torch.arange(batch)
    for n in range(TOKENS):
        tokens[:, n + 1] = torch.multinomial(table[rows, tokens[:, n]], 1, generator=generator)[:, 0]
    return Batch(tokens[:, :-1], tokens[:, 1:])


def draw_topic(batch: int, generator: torch.Generator) -> Batch:
    topics, question = 16, 32
    tokens = torch.randint(topics, question, (batch, TOKENS), generator=generator)
    topic = torch.randint(topics, (batch,), generator=generator)
    for row in range(batch):
        tokens[row, torch.randperm(32, generator=generator)[:8]] = topic[row]
    targets = torch.full_like(tokens, IGNORED)
    asked = BOUNDARY + torch.randperm(TOKENS - BOUNDARY, generator=generator)[:32]
    tokens[:, asked] = question
    targets[:, asked] = topic[:, None]
    return Batch(tokens, targets)


def draw_recall(batch: int, generator: torch.Generator) -> Batch:
    """Keys 0 to 15 and values 16 to 31 among noise from 32 on; each key is told once and asked once, its token alone."""
    keys, values, noise = 16, 16, 8
    tokens = keys + values + torch.randint(noise, (batch, TOKENS), generator=generator)
    targets = torch.full_like(tokens, IGNORED)
    for row in range(batch):
        told = 2 * torch.randperm(82, generator=generator)[:keys]  # pairs of tokens below 164
        asked = 348 + torch.randperm(TOKENS - 348, generator=generator)[:keys]  # 184 to 511 tokens later
        value = keys + torch.randint(values, (keys,), generator=generator)
        tokens[row, told], tokens[row, told + 1] = torch.arange(keys), value
        tokens[row, asked], targets[row, asked] = torch.arange(keys), value
    return Batch(tokens, targets)


def draw_copy(batch: int, generator: torch.Generator) -> Batch:
    letters, length = 16, 32
    tokens = torch.randint(letters, (batch, TOKENS), generator=generator)
    targets = torch.full_like(tokens, IGNORED)
    for row in range(batch):
        first = int(torch.randint(TOKENS - 256 - length, (1,), generator=generator))
        again = first + int(torch.randint(128, 257, (1,), generator=generator))
        tokens[row, again : again + length] = tokens[row, first : first + length]
        # The first two letters say where the string begins.
        targets[row, again + 2 : again + length - 1] = tokens[row, again + 3 : again + length]
    return Batch(tokens, targets)


class Text:
    """Windows of Python's sources; `held_out` takes them from other files."""

    def __init__(self, *, held_out: bool) -> None:
        corpus = load_corpus([], TOKENS)
        self.bytes = corpus.held_out if held_out else corpus.train

    def __call__(self, batch: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(self.bytes.numel() - TOKENS - 1, (batch,), generator=generator)
        rows = torch.stack([self.bytes[start : start + TOKENS + 1] for start in starts.tolist()]).long()
        return Batch(rows[:, :-1], rows[:, 1:])


TASKS: dict[str, Callable[[int, torch.Generator], Batch]] = {
    "bigrams": draw_bigrams,
    "topic": draw_topic,
    "recall": draw_recall,
    "copy": draw_copy,
}
VOCABULARY = 256


class Layer(nn.Module):
    """Attention of a kind, and a feed-forward of four times the width; norms before each."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.kind.attend(q, k, v).flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    """Logits `(B, N, V)` of the token that is asked for."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.token, self.before = nn.Embedding(VOCABULARY, WIDTH // 2), nn.Embedding(VOCABULARY, WIDTH // 2)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.cat((self.token(tokens), self.before(F.pad(tokens[:, :-1], (1, 0)))), dim=-1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def run(task: str, kind: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one model and measure it on sequences of a seed of their own."""
    start = time.monotonic()
    draw, fresh = (Text(held_out=False), Text(held_out=True)) if task == "text" else (TASKS[task], TASKS[task])
    torch.manual_seed(seed)
    model = Model(KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(steps):
        tokens, targets = draw(BATCH, generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    right, asked, losses = 0, 0, 0.0
    generator = torch.Generator().manual_seed(1)  # of the measurement, the same for all
    with torch.no_grad():
        for _ in range(EVALUATED):
            tokens, targets = fresh(BATCH, generator)
            logits, is_asked = model(tokens), targets != IGNORED
            right += int((logits.argmax(-1) == targets)[is_asked].sum())
            losses += float(F.cross_entropy(logits[is_asked], targets[is_asked], reduction="sum"))
            asked += int(is_asked.sum())
    return {
        "task": task,
        "kind": kind,
        "seed": seed,
        "steps": steps,
        "accuracy": round(right / asked, 4),
        "loss": round(losses / asked, 4),
        "seconds": round(time.monotonic() - start, 1),
        "commit": commit(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not yet kept: the first seed of every cell, then the second."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of each task; keeps nothing")
    parser.add_argument("--task", choices=list(STEPS), nargs="+", default=list(STEPS), help="which tasks; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind on each task")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the results")
    options = parser.parse_args(arguments)
    if options.quick:
        for task in options.task:
            print(run(task, "local + far", 0, 2))
        return 0
    report = json.loads(options.output.read_text()) if options.output.exists() else {"runs": []}
    report["command"] = "python -m benchmarks.tasks"
    report["machine"] = {**describe(), "processor": platform.processor() or platform.machine()}
    report["pairs per token and head"] = {name: round(kind.pairs_per_token(), 1) for name, kind in KINDS.items()}
    for seed in range(options.seeds):
        for task in options.task:
            for kind in SHOWN[task]:
                cell = {"task": task, "kind": kind, "seed": seed, "steps": STEPS[task]}
                if any(cell.items() <= each.items() for each in report["runs"]):
                    continue
                found = run(task, kind, seed, STEPS[task])
                report["runs"].append(found)
                options.output.write_text(json.dumps(report, indent=1) + "\n")
                print(f"{task:8} {kind:18} seed {seed}: {found['accuracy']:.3f}, {found['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
