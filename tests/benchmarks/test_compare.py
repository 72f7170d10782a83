import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    """The script, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("bench_compare", Path(__file__).parents[2] / "benchmarks" / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, overhead: float, speedup: float, *, quick: bool = False) -> str:
    """A pytest-benchmark report with one ratio of either direction, one crossover, and one benchmark that failed."""
    info = {"device_class": "cpu-x-2threads", "quick": quick, "torch": "2.13.0", "commit": "abc", "date": "2026-01-02"}
    ratios = [
        {"name": "overhead", "value": overhead, "target": 1.12, "better": "lower"},
        {"name": "speed-up", "value": speedup, "target": 0.8, "better": "higher"},
    ]
    crossing = {"name": "crossover", "tokens": None, "speedups": {"1024": 0.5, "2048": 0.9}}
    benchmarks = [
        {"extra_info": info | {"ratios": ratios}},
        {"extra_info": info | {"ratios": [], "crossover": crossing}},
        {"extra_info": {}},
    ]
    path = folder / "run.json"
    path.write_text(json.dumps({"machine_info": {"cpu": {"brand_raw": "X"}, "python_version": "3.11"}, "benchmarks": benchmarks}))
    return str(path)


def run(compare: ModuleType, folder: Path, overhead: float, speedup: float, *options: str) -> int:
    return compare.main([write_run(folder, overhead, speedup), "--results", str(folder), *options])


def test_compare_keeps_ratios_with_their_provenance(compare: ModuleType, tmp_path: Path) -> None:
    assert run(compare, tmp_path, 1.0, 1.0, "--keep") == 0
    kept = json.loads((tmp_path / "cpu-x-2threads.json").read_text())
    assert kept["device_class"] == "cpu-x-2threads"
    entry = kept["measurements"]["overhead"]
    provenance = {"cpu": "X", "python": "3.11", "torch": "2.13.0", "commit": "abc", "date": "2026-01-02"}
    assert entry == {"value": 1.0, "target": 1.12, "better": "lower"} | provenance


@pytest.mark.parametrize(("overhead", "speedup"), [(1.2, 1.0), (1.0, 1 / 1.2)])
def test_compare_rejects_a_loss_of_a_fifth(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], overhead: float, speedup: float
) -> None:
    assert run(compare, tmp_path, 1.0, 1.0, "--keep") == 0
    before = (tmp_path / "cpu-x-2threads.json").read_text()
    assert run(compare, tmp_path, overhead, speedup) == 1
    assert "worse than kept" in capsys.readouterr().out
    assert (tmp_path / "cpu-x-2threads.json").read_text() == before


@pytest.mark.parametrize(("overhead", "speedup"), [(1.14, 1.0), (1.0, 1 / 1.14), (0.5, 2.0)])
def test_compare_accepts_a_loss_of_a_seventh_and_any_gain(
    compare: ModuleType, tmp_path: Path, overhead: float, speedup: float
) -> None:
    assert run(compare, tmp_path, 1.0, 1.0, "--keep") == 0
    assert run(compare, tmp_path, overhead, speedup) == 0


def test_compare_keeps_no_quick_run(compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main([write_run(tmp_path, 1.0, 1.0, quick=True), "--results", str(tmp_path), "--keep"])
    assert "--keep must come with a run at full size" in capsys.readouterr().err
    assert not (tmp_path / "cpu-x-2threads.json").exists()


def test_compare_rejects_a_run_without_measurements(compare: ModuleType) -> None:
    with pytest.raises(ValueError, match="measurements of one class of machine, got \\[\\]"):
        compare.read_run({"machine_info": {}, "benchmarks": []})
