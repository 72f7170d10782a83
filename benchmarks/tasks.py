"""Accuracy of small causal models on four tasks: dense attention, a sliding window, and dilated patterns at equal cost.

    python -m benchmarks.tasks            # runs that benchmarks/results/tasks.json lacks, two at a time, a core each
    python -m benchmarks.tasks --quick    # a few steps of each task, in a minute; keeps nothing

All models have 3 layers and 8 heads. Each sparse kind of attention scores about 25 pairs per token and head, dense attention 256
of 512 tokens. The causal mask is the only information about positions. All models begin with three skills, without which they
need many more steps: a token sees the token before it, heads look for keys after a token like the query's, and copy what they find.
The tasks therefore compare what a kind can reach in few steps of training. All kinds of one seed train on the same sequences.

- bigrams: every sequence has its own random table of letter pairs; predict the next letter.
- topic: half of the first 64 of 1,024 tokens name one of 16 topics; answer with it at questions anywhere after.
- recall: 8 pairs of a key and a value, then 64 questions, a key each, 184 to 511 tokens later; answer with its value.
- copy: a string of 32 distinct letters repeats 128 to 256 tokens later; predict each next letter of the repetition.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.environment import provenance, save
from flexdilated import DilatedPattern, dilated_attention

RESULTS = Path(__file__).parent / "results" / "tasks.json"
HEADS, LAYERS, VOCABULARY = 8, 3, 40
PART = 24  # the width of an embedding
WIDTH = 3 * PART
TOKEN, PREVIOUS, FOUND = slice(0, PART), slice(PART, 2 * PART), slice(2 * PART, 3 * PART)
LEARNING_RATE, EVALUATED = 5e-3, 32
IGNORED = -100


KINDS = {
    "dense": DilatedPattern((1024,), (1,)),
    "sliding window": DilatedPattern(window=25),
    "segments": DilatedPattern((49,), (1,)),
    "two local branches": DilatedPattern((19, 29), (1, 1)),
    "nested": DilatedPattern((32, 128, 512), (1, 4, 8)),
    "connected": DilatedPattern((32, 144, 512), (1, 4, 8)),
    "window + nested": DilatedPattern((128, 512), (4, 8), window=17),
    "local + far": DilatedPattern((18, 512), (1, 4)),
    "window + far": DilatedPattern((512,), (4,), window=9),
    "grouped heads": DilatedPattern.grouped((64, 512), (1, 4)),
}


class Batch(NamedTuple):
    """`tokens` `(B, N)`, and the `targets` `(B, N)` at the same positions, `IGNORED` where nothing is asked."""

    tokens: Tensor
    targets: Tensor


def draw_bigrams(batch: int, tokens: int, generator: torch.Generator) -> Batch:
    letters = 16
    total = torch.softmax(3.0 * torch.randn(batch, letters, letters, generator=generator), dim=-1).cumsum(-1)
    drawn = torch.rand(batch, tokens, 1, generator=generator)
    rows, letters_drawn = torch.arange(batch), torch.zeros(batch, tokens + 1, dtype=torch.long)
    for n in range(tokens):
        letters_drawn[:, n + 1] = (drawn[:, n] > total[rows, letters_drawn[:, n]]).sum(-1).clamp(max=letters - 1)
    return Batch(letters_drawn[:, :-1], letters_drawn[:, 1:])


def draw_topic(batch: int, tokens: int, generator: torch.Generator) -> Batch:
    """Topics 0 to 15, a blank, 16, and the question, 17."""
    topics, blank, question, named = 16, 16, 17, 64
    sequences = torch.full((batch, tokens), blank)
    targets = torch.full_like(sequences, IGNORED)
    for row in range(batch):
        topic = int(torch.randint(topics, (), generator=generator))
        sequences[row, torch.randperm(named, generator=generator)[: named // 2]] = topic
        questions = named + torch.randperm(tokens - named, generator=generator)[: tokens // 4]
        sequences[row, questions], targets[row, questions] = question, topic
    return Batch(sequences, targets)


def draw_recall(batch: int, tokens: int, generator: torch.Generator) -> Batch:
    """Keys 0 to 15, values 16 to 31, noise 32 to 39."""
    size, keys, first = 16, 8, 164
    sequences = 2 * size + torch.randint(8, (batch, tokens), generator=generator)
    targets = torch.full_like(sequences, IGNORED)
    for row in range(batch):
        place = 2 * torch.randperm(first // 2, generator=generator)[:keys]
        key = torch.randperm(size, generator=generator)[:keys]
        value = size + torch.randperm(size, generator=generator)[:keys]
        questions = first + 184 + torch.randperm(tokens - first - 184, generator=generator)[:64].reshape(-1, keys)
        sequences[row, place], sequences[row, place + 1] = key, value
        sequences[row, questions], targets[row, questions] = key, value
    return Batch(sequences, targets)


def draw_copy(batch: int, tokens: int, generator: torch.Generator) -> Batch:
    """Letters 0 to 31, noise 32 to 39."""
    length = 32
    sequences = length + torch.randint(8, (batch, tokens), generator=generator)
    targets = torch.full_like(sequences, IGNORED)
    for row in range(batch):
        first = int(torch.randint(tokens - 256 - length + 1, (), generator=generator))
        second = first + int(torch.randint(128, 257, (), generator=generator))
        string = torch.randperm(length, generator=generator)
        sequences[row, first : first + length] = sequences[row, second : second + length] = string
        targets[row, second : second + length - 1] = string[1:]
    return Batch(sequences, targets)


class Task(NamedTuple):
    """Sequences of `tokens` tokens, `steps` steps of `batch` sequences, and the kinds of attention that are run."""

    draw: Callable[[int, int, torch.Generator], Batch]
    tokens: int
    steps: int
    batch: int
    kinds: tuple[str, ...]


FAR = ("dense", "sliding window", "nested", "connected", "window + nested", "local + far", "window + far", "grouped heads")
TASKS = {
    "bigrams": Task(draw_bigrams, 512, 200, 2, tuple(KINDS)),
    "topic": Task(draw_topic, 1024, 100, 4, FAR),
    "recall": Task(draw_recall, 512, 200, 2, FAR),
    "copy": Task(draw_copy, 512, 150, 2, FAR),
}


class Layer(nn.Module):
    """Attention and a feed-forward of twice the width, each after a norm and with a residual connection.

    Initially a query matches its token with the previous tokens of keys, and a value is the token of a key plus what it found.
    """

    def __init__(self, pattern: DilatedPattern) -> None:
        super().__init__()
        self.pattern = pattern
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        match, copy = torch.randn(2, WIDTH, PART) * torch.tensor([0.3, WIDTH**-0.5])[:, None, None]
        with torch.no_grad():
            for parameter in (*self.qkv.parameters(), *self.out.parameters(), *self.ffn[2].parameters()):
                parameter.mul_(0.1)
            q, k, v = self.qkv.weight.unflatten(0, (3, WIDTH))
            q[:, TOKEN] += match
            k[:, PREVIOUS] += match
            v[:, TOKEN] += copy
            v[:, FOUND] += copy
            self.out.weight[FOUND] += copy.T

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(dilated_attention(q, k, v, self.pattern, is_causal=True).flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    """Tokens `(B, N)` to logits `(B, N, V)`; the parts of the width are a token, the token before, and what attention found."""

    def __init__(self, pattern: DilatedPattern) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, PART)
        self.layers = nn.Sequential(*(Layer(pattern) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PART)
        with torch.no_grad():
            self.head.weight.mul_(0.1)[:, FOUND] += torch.eye(PART)

    def forward(self, tokens: Tensor) -> Tensor:
        token = self.embedding(tokens)
        x = self.layers(torch.cat((token, F.pad(token[:, :-1], (0, 0, 1, 0)), torch.zeros_like(token)), dim=-1))
        return F.linear(self.head(self.norm(x)), self.embedding.weight) * PART**-0.5


def settings(task: str, kind: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """What identifies a run; a kept run with other settings is run again."""
    _, tokens, planned, batch, _ = TASKS[task]
    pattern = KINDS[kind]
    branches = [list(branch) for branch in zip(pattern.segment_lengths, pattern.dilation_rates)]
    attention = {"branches": branches, "window": pattern.window or 0}
    return {"task": task, "kind": kind, "seed": seed, "tokens": tokens, "steps": steps or planned, "batch": batch, **attention}


def run(task: str, kind: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """Train one model on one core, and measure it on sequences of another seed, the same for all models."""
    torch.set_num_threads(1)
    about = settings(task, kind, seed, steps)
    draw, tokens, _, batch, _ = TASKS[task]
    steps = about["steps"]
    torch.manual_seed(seed)
    model = Model(KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    data = draw(batch * steps, tokens, torch.Generator().manual_seed(1000 + seed))
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not connected")  # some patterns are here to show what that costs
        for step in range(steps):
            rows, targets = (x[step * batch : (step + 1) * batch] for x in data)
            loss = F.cross_entropy(model(rows).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        rows, targets = draw(EVALUATED, tokens, torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = torch.cat([model(few_rows) for few_rows in rows.split(4)])
    is_question = targets != IGNORED
    metrics = {
        "accuracy": round((logits.argmax(-1) == targets)[is_question].float().mean().item(), 4),
        "loss": round(F.cross_entropy(logits[is_question], targets[is_question]).item(), 4),
        "curve": [round(float(part.mean()), 3) for part in np.array_split(losses, min(steps, 10))],
    }
    return about | metrics


def results(cells: Sequence[tuple[str, str, int]], workers: int) -> Iterator[dict[str, Any]]:
    """Runs of task, kind and seed as they finish, in `workers` processes."""
    if workers == 1:
        yield from (run(*cell) for cell in cells)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from (future.result() for future in as_completed([pool.submit(run, *cell) for cell in cells]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not yet kept: the first seed of every task and kind, then the second, then the third."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two steps of each task; keeps nothing")
    parser.add_argument("--task", choices=list(TASKS), nargs="+", default=list(TASKS), help="default: all")
    parser.add_argument("--kind", choices=list(KINDS), nargs="+", default=list(KINDS), help="default: all that a task has")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind on each task")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="models that train at the same time")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the results")
    options = parser.parse_args(arguments)
    if options.quick:
        for task in options.task:
            for kind in options.kind:
                if kind in TASKS[task].kinds:
                    print(run(task, kind, 0, 2), flush=True)
        return 0
    report: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {"runs": []}
    remaining = [
        cell
        for seed in range(options.seeds)
        for task in options.task
        for kind in TASKS[task].kinds
        if kind in options.kind
        for cell in [settings(task, kind, seed)]
        if not any(cell.items() <= kept_run.items() for kept_run in report["runs"])
    ]
    about = provenance("tasks", "cpu", [])
    about = {name: about[name] for name in ("command", "hardware", "date", "python", "torch", "commit")}
    report["pairs per token and head"] = {
        name: round(pattern.count_pairs(512, HEADS, is_causal=True) / HEADS / 512, 2) for name, pattern in KINDS.items()
    }
    for result in results([(cell["task"], cell["kind"], cell["seed"]) for cell in remaining], options.workers):
        report["runs"].append(result | about)
        save(report, options.output)
        print(f"{result['task']:8} {result['kind']:18} seed {result['seed']}: {result['accuracy']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
