"""Slides over processes: each takes every p-th, and the numbers are those of one process."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from flexdilated.slides.gigapath import ARCHITECTURES, Architecture, create_model
from tests.commands import invoke, invoke_ranks
from tests.slides.tools import GRIDS, IN_CHANS, draw_tiles, write_trident
from tests.tolerances import SINGLE


def name_an_architecture(_: int) -> None:
    ARCHITECTURES["tiny"] = Architecture(64, 2)


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_of_torchrun_write_what_one_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, one of which has a bad slide and names it; the other one goes on."""
    monkeypatch.setitem(ARCHITECTURES, "tiny", Architecture(64, 2))
    monkeypatch.chdir(tmp_path)
    for i, count in enumerate((53, 1, 131, 17, 200)):
        write_trident(tmp_path / "slides", f"s{i}", *draw_tiles(count, seed=i))
    x, coords = draw_tiles(150)
    x[149] = torch.nan
    write_trident(tmp_path / "slides", "bad", x, coords)
    torch.save({"model": create_model(None, "tiny", IN_CHANS, slide_ngrids=GRIDS).state_dict()}, tmp_path / "weights.pth")
    fixed = ["--arch=tiny", f"--in-chans={IN_CHANS}", f"--slide-ngrids={GRIDS}", "--device=cpu", "--weights=weights.pth", "--tiles"]
    two = ["slides", "encode-all", "slides", *fixed, "--output=two"]
    done = invoke_ranks(2, tmp_path, *two, prepare=name_an_architecture)
    assert [code for code, _, _ in done] == [1, 0]
    assert ["error: 'slides/bad.h5' embeddings must be finite, got nan in tile 149" in err for *_, err in done] == [True, False]
    assert ["wrote 2 slides" in done[0][1], "wrote 3 slides" in done[1][1]] == [True, True]
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        code, _, err = invoke(*two, "--collect=two.h5")
    assert code == 2
    assert "--collect must come with one process, got 2 ranks of torchrun; run the same command again without" in err
    for output in ("one", "two"):
        code, _, _ = invoke("slides", "encode-all", "slides", *fixed, f"--output={output}", f"--collect={output}.h5")
        assert code == 1
    with h5py.File(tmp_path / "one.h5") as alone, h5py.File(tmp_path / "two.h5") as shared:
        assert list(shared["names"]) == list(alone["names"]) == [b"s0", b"s1", b"s2", b"s3", b"s4"]
        np.testing.assert_allclose(shared["embeddings"], alone["embeddings"], **SINGLE)
        for name in alone["tiles"]:
            np.testing.assert_allclose(shared["tiles"][name]["embeddings"], alone["tiles"][name]["embeddings"], **SINGLE)
