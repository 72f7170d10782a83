"""The program of docs/guides/three-axes.md: data, context and tensor parallelism at once equal one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from tests.distributed.processes import Ranks
from tests.tolerances import EXACT

three_axes = pytest.importorskip("docs.three_axes")
CONFIG = LongNetConfig(
    vocab_size=13, embed_dim=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=11, pattern=DilatedPattern((5, 18), (1, 3))
)
MAX_NORM = 0.3  # below that of the gradients
STEPS, PARTS = 2, 2  # steps of the optimizer, and batches of each


def draw() -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(2210)
    tokens = torch.randint(13, (2 * STEPS, PARTS, 2, 18), generator=generator)
    return [[(part, part.roll(-1, 1)) for part in step] for step in tokens]


def seeded(make: Callable[[], LongNetLM], seed: int) -> LongNetLM:
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def train_whole(steps: list[list[tuple[Tensor, Tensor]]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = seeded(lambda: LongNetLM(CONFIG), 5)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False), []
    for step in steps:
        loss = sum(F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in step) / PARTS
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, dict(model.named_parameters())


def train(mesh: DeviceMesh, steps: list[list[tuple[Tensor, Tensor]]], folder: Path, *, loads: bool) -> list[Tensor]:
    model = seeded(lambda: three_axes.build(CONFIG, mesh, compiler=None if loads else "eager"), 5 + loads)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False), []
    if loads:
        three_axes.load(model, optimizer, folder)
    for step in steps:
        loss = three_axes.accumulate(model, step, mesh)
        assert three_axes.clip(model, MAX_NORM) > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss / mesh.size())
    if not loads:
        three_axes.save(model, optimizer, folder)
    _, expected = train_whole(draw() if loads else steps)
    for name, x in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        assert isinstance(x, DTensor)
        torch.testing.assert_close(x.full_tensor(), expected[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    return losses


def check_eight(rank: int, _: DeviceMesh, folder: Path) -> list[Tensor]:
    return train(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp")), draw()[:STEPS], folder, loads=False)


def check_three(rank: int, _: DeviceMesh, folder: Path) -> list[Tensor]:
    return train(init_device_mesh("cpu", (1, 3, 1), mesh_dim_names=("dp", "cp", "tp")), draw()[STEPS:], folder, loads=True)


@pytest.mark.slow
@pytest.mark.sweep  # of axes that other tests take one or two at a time
@pytest.mark.ranks
def test_eight_ranks_on_three_axes_equal_one_process_and_three_go_on(tmp_path: Path) -> None:
    expected, _ = train_whole(draw())
    for size, check, losses in ((8, check_eight, expected[:STEPS]), (3, check_three, expected[STEPS:])):
        folder = tmp_path / f"of {size}"
        folder.mkdir()
        with Ranks(size, folder) as ranks:
            for found in ranks.run(check, tmp_path / "checkpoint"):
                torch.testing.assert_close(found, losses, **EXACT)
