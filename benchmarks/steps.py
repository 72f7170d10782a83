"""How many functions of the package a second call passes, in how many calls: each way into attention, and the backward.

    python -m benchmarks.steps

A count of Python's own calls, by `sys.setprofile`: no clock, and the same on every machine. The first call, for which plans are
made, is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flexdilated
from benchmarks.ranks import Ranks
from flexdilated import DilatedPattern, dilated_attention
from flexdilated.core.call import ScoreMod
from flexdilated.decode import DilatedKVCache

PACKAGE = f"{Path(flexdilated.__file__).parent}/"
INLINE = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")  # frames of their own in some versions of Python only
NUM_TOKENS, NUM_HEADS, HEAD_DIM = 1024, 8, 16
PATTERN = DilatedPattern.causal(NUM_TOKENS, NUM_HEADS)

Steps = Counter[tuple[str, str, int]]  # calls of each function: file, name, line


def steps_of(work: Callable[[], object]) -> Steps:
    """The functions of the package that some work passes, and how often."""
    steps: Steps = Counter()

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in INLINE:
            steps[code.co_filename.removeprefix(PACKAGE), code.co_name, code.co_firstlineno] += 1

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return steps


def measure(forward: Callable[[], Tensor]) -> dict[str, Steps]:
    """The steps of the second call of `forward`, and of its backward."""
    forward().sum().backward()
    outs: list[Tensor] = []
    steps = steps_of(lambda: outs.append(forward()))
    return {"": steps, ", backward": steps_of(outs.pop().sum().backward)}


def attention(mesh: DeviceMesh | None = None, score_mod: ScoreMod | None = None) -> dict[str, Steps]:
    """The steps of `dilated_attention` with gradients, of this rank's shard where there is a mesh."""
    shape = (1, NUM_TOKENS // (1 if mesh is None else mesh.size()), NUM_HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    return measure(lambda: dilated_attention(q, k, v, PATTERN, is_causal=True, mesh=mesh, score_mod=score_mod))


def relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A score function."""
    return score - 0.01 * (q_idx - kv_idx)


def decoding() -> dict[str, Steps]:
    """The steps of one decoded token."""
    cache = DilatedKVCache(PATTERN, batch_size=1, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM)
    token = torch.randn(3, 1, 1, NUM_HEADS, HEAD_DIM)
    with torch.no_grad():
        cache.attend(*token)
        return {"": steps_of(lambda: cache.attend(*token))}


def layer() -> dict[str, Steps]:
    """The steps of one layer of a transformers model: those of a model of two layers less those of one."""
    from transformers import LlamaConfig, LlamaModel  # optional

    from flexdilated.hub.transformers import set_pattern

    def steps(num_layers: int) -> dict[str, Steps]:
        width = NUM_HEADS * HEAD_DIM
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=num_layers,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_HEADS,
        )
        model, ids = LlamaModel(set_pattern(config, PATTERN)), torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
        return measure(lambda: model(ids, use_cache=False).last_hidden_state)

    one, two = steps(1), steps(2)
    return {way: two[way] - one[way] for way in one}


def main() -> None:
    """Print the table; `--functions` prints each function too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--functions", action="store_true", help="each function and how often it is called")
    shows_functions = parser.parse_args().functions
    table = Table(title=f"second calls, causal({NUM_TOKENS}, {NUM_HEADS}), head dim {HEAD_DIM}")
    for column in ("", "files", "functions", "calls"):
        table.add_column(column, justify="left" if not column else "right")
    console = Console()
    with Ranks(2) as ranks:
        paths = {"one process": attention(), "score_mod": attention(score_mod=relative), "two ranks": ranks(attention)[0]}
    if find_spec("transformers") is None:
        console.print("transformers is not installed: its layer is not counted")
    else:
        paths["a layer of transformers"] = layer()
    for name, steps_of_path in (paths | {"a decoding step": decoding()}).items():
        for way, steps in steps_of_path.items():
            files = len({file for file, _, _ in steps})
            table.add_row(f"{name}{way}", str(files), str(len(steps)), str(steps.total()))
            if shows_functions:
                console.print(f"{name}{way}:")
                for (file, function, line), times in sorted(steps.items()):
                    console.print(f"  {times:4} {file}:{line} {function}", highlight=False, markup=False)
    console.print(table)


if __name__ == "__main__":
    main()
