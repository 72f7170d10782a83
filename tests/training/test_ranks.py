"""Training over ranks: the losses of one process, checkpoints for any number of ranks, killed ranks, stops, refusals."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import flexdilated
from flexdilated import LongNetConfig
from flexdilated.training import distributed
from flexdilated.training.checkpoint import STATE_FILE, latest
from flexdilated.training.options import UserError
from flexdilated.training.trainer import Trainer
from tests.commands import invoke, invoke_ranks, refused
from tests.distributed import processes
from tests.training import runs

DEADLINE = 900.0  # of a command, for a machine that is busy
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}  # of float32 losses after some steps

# Of 37 tokens 2 and 3 ranks have other parts each, whose borders the segments cross.
SMALL: dict[str, int] = {"tokens": 37, "steps": 7, "eval-every": 3, "checkpoint-every": 5}
KILLED: dict[str, int] = {"steps": 13, "eval-every": 13}


def arguments(output: Path, text: Path, *more: str, **changes: object) -> list[str]:
    return runs.arguments(output, text, *more, **{"learning-rate": 1e-3, **SMALL, **changes})


def run_alone(output: Path, text: Path, *more: str, **changes: object) -> None:
    code, _, err = invoke(*arguments(output, text, *more, **changes))
    assert code == 0, err


def run_ranks(
    num_ranks: int,
    output: Path,
    text: Path,
    *more: str,
    killed: int | None = None,
    prepare: Callable[[int], None] | None = None,
    ending: Sequence[int] = (),
    **changes: object,
) -> list[tuple[int, str, list[str]] | None]:
    """Per rank its exit code, standard output, and our own lines of standard error. With `killed` rank 0 ends before that step, and
    the others when they miss it."""
    words = arguments(output, text, *more, **changes)
    folder = output.with_name(f"{output.name}_ranks")
    folder.mkdir(exist_ok=True)
    prepare, ending = (prepare, ending) if killed is None else (partial(end_before, killed), range(num_ranks))
    found = invoke_ranks(num_ranks, folder, *words, prepare=prepare, ending=ending)
    for result in found:
        assert result is None or "Warning" not in result[2], result
    return [result and (*result[:2], errors_of(result[2])) for result in found]


def end_before(step: int, rank: int) -> None:
    """Kill this process, if it is rank 0's, when it comes to a step; end it where a collective fails, as the command does."""
    advance = Trainer._advance

    def advance_or_end(self: Trainer) -> float:
        if rank == 0 and self.step + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return advance(self)
        except RuntimeError:
            os._exit(1)

    Trainer._advance = advance_or_end  # type: ignore[method-assign]


def errors_of(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("error: ")]


def history(folder: Path, *, steps: int) -> dict[str, torch.Tensor]:
    checkpoint = latest(folder)
    assert checkpoint is not None
    assert checkpoint.name == f"checkpoint-{steps}"
    entries = json.loads((checkpoint / STATE_FILE).read_text())["history"]
    assert [entry["step"] for entry in entries] == list(range(1, steps + 1))
    names = ("train", "held_out")
    return {name: torch.tensor([entry[name] for entry in entries if name in entry], dtype=torch.float64) for name in names}


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_rank_ends_the_run_and_any_number_of_ranks_goes_on_of_which_rank_0_alone_prints(tmp_path: Path, text: Path) -> None:
    run_alone(tmp_path / "whole", text, **KILLED)
    assert run_ranks(3, tmp_path / "two", text, killed=8, **KILLED) == [None] * 3
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    run_alone(tmp_path / "one", text, "--resume", **KILLED)
    (code, out, errors), other = run_ranks(2, tmp_path / "two", text, "--resume", **KILLED)
    assert (code, errors, other) == (0, [], (0, "", []))
    printed = ("step 5 of 13", "over 2 ranks", "bits per held-out byte", "sample (", "saved in")
    assert [out.count(line) for line in printed] == [1] * 5
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["dilated", "loss.png", "sample.txt"]
    expected = history(tmp_path / "whole" / "dilated", steps=13)
    for run in ("one", "two"):
        torch.testing.assert_close(history(tmp_path / run / "dilated", steps=13), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.ranks
@pytest.mark.slow
def test_torchrun_starts_the_command(tmp_path: Path, text: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flexdilated"]
    root = str(Path(flexdilated.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, *launch, *arguments(tmp_path / "run", text, "--resume-if-any", steps=2)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=DEADLINE)
    assert (done.returncode, errors_of(done.stderr), "Warning" in done.stderr) == (0, [], False), done.stderr
    assert (done.stdout.count("over 2 ranks"), done.stdout.count("saved in")) == (1, 1)


def go_to_another_host(folder: Path, rank: int) -> None:
    if rank == 1:
        os.chdir(folder)


@pytest.mark.ranks
@pytest.mark.slow
def test_rank_with_another_filesystem_is_named_and_nothing_is_lost(tmp_path: Path, text: Path) -> None:
    (tmp_path / "other").mkdir()
    move = partial(go_to_another_host, tmp_path / "other")
    run_alone(tmp_path / "run_ranks" / "run", text, steps=5)
    before = runs.contents(tmp_path / "run_ranks" / "run")
    found = run_ranks(2, tmp_path / "run", text, "--output=run", "--overwrite", prepare=move, steps=5)
    assert [(code, out) for code, out, _ in found] == [(2, "")] * 2
    (error,) = {error for _, _, errors in found for error in errors}
    seen = "{'dilated': 5} on rank 0 and {} on rank 1"
    assert error == f"error: ranks must agree on the checkpoints that they see in --output, got {seen}"
    assert runs.contents(tmp_path / "run_ranks" / "run") == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device=cpu:0"], "--device must be auto, cpu or cuda (a rank takes cuda:LOCAL_RANK) with several ranks, got 'cpu:0'"),
        (["--context-parallel=3"], "--context-parallel must be 0 or the number of ranks=2, got 3; start with torchrun "),
        (["--timeout-seconds=1"], "all 2 ranks must start within --timeout-seconds=1, got: "),
    ],
)
def test_rank_refuses(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str) -> None:
    started = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert distributed.ranks_started() == (1, 2)
    assert refused(*arguments(tmp_path / "run", text, *options)).startswith(message)
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process that has imported torch")
def test_process_of_a_rank_leaves_at_once_with_its_exit_code() -> None:
    """What a destructor would wait for, of a group or at the end of the interpreter, it does not wait for."""
    script = """
import atexit, os, sys, threading
import torch.distributed as dist
from flexdilated import cli
class Waits:
    def __del__(self):
        threading.Event().wait()
def app(arguments):
    print("app")
    exec(ending)
for ending in ("sys.exit(0)", "sys.exit(3)", "raise ValueError('planted')"):
    if not (child := os.fork()):
        waits = Waits()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(lambda: print("atexit"))
        cli.app = app
        cli.main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    package = str(Path(flexdilated.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=DEADLINE)
    lines = [line for line in result.stdout.splitlines() if not line.startswith("[Gloo]")]  # of torch 2.9
    assert (result.returncode, lines) == (0, [word for code in "031" for word in ("app", "atexit", code)]), result.stderr
    assert result.stderr.count("Traceback") == result.stderr.count("ValueError: planted") == 1


CONFIG = LongNetConfig(**{**vars(runs.CONFIG), "num_layers": 1, "attention_dropout_p": 0.0})

PLAIN = LongNetConfig(**{**vars(CONFIG), "dropout_p": 0.0})


def make_trainer(folder: Path, text: Path, mesh: DeviceMesh | None, config: LongNetConfig = CONFIG, **changes: object) -> Trainer:
    sizes = {"sequence_length": 37, "batch_size": 2, "steps": 5, "learning_rate": 1e-3, "eval_sequences": 2}
    return runs.make_trainer(folder, text, config=config, mesh=mesh, **{**sizes, **changes})


def rank_main(rank: int, num_ranks: int, folder: Path, text: Path, expected: list[float]) -> None:
    world = dist.group.WORLD
    assert world is not None
    mesh = DeviceMesh.from_group(world, "cpu", mesh_dim_names=("cp",))

    stopped = make_trainer(folder / "stopped", text, mesh)
    assert not stopped.run(lambda now: os.kill(os.getpid(), signal.SIGTERM) if rank == 1 and now.step == 3 else None)
    assert stopped.step == 3
    resumed = make_trainer(folder / "stopped", text, mesh)
    resumed.resume()
    whole = make_trainer(folder / "whole", text, mesh)
    assert resumed.run(lambda _: None)
    assert whole.run(lambda _: None)
    assert [entry["train"] for entry in resumed.history] == [entry["train"] for entry in whole.history]
    seeds: list[object] = [None] * num_ranks
    dist.all_gather_object(seeds, torch.initial_seed())
    assert len(set(seeds)) == num_ranks  # dropout of the last step

    plain = make_trainer(folder / "plain", text, mesh, PLAIN)
    plain.resume()
    assert plain.step == 3
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):  # inductor: tests/test_compiled.py
        compiled = make_trainer(folder / "compiled", text, mesh, PLAIN, compile=True)
    for trainer in (plain, compiled):
        assert trainer.run(lambda _: None)
        assert [entry["train"] for entry in trainer.history] == pytest.approx(expected, rel=ROUNDING["rtol"])

    behind = make_trainer(folder / "behind", text, mesh)
    behind.step = rank
    with pytest.raises(UserError, match=r"ranks must agree on the step of the checkpoint, got 0 on rank 0 and 1 on rank 1"):
        behind.run(lambda _: None)

    with pytest.raises(UserError, match=r"ranks must agree on seed, got 0 on rank 0 and 1 on rank 1$"):
        make_trainer(folder / "seeds", text, mesh, seed=rank)

    sick = make_trainer(folder / "sick", text, mesh)
    if rank == 1:
        with torch.no_grad():
            sick.model.layer_norm.weight.fill_(math.nan)
    with pytest.raises(UserError, match=r"the gradient must stay finite, got another at step 0"):
        sick.run(lambda _: None)


@pytest.mark.ranks
@pytest.mark.slow
def test_trainer_stops_resumes_compiles_and_agrees_over_ranks(tmp_path: Path, text: Path) -> None:
    whole = make_trainer(tmp_path / "one", text, None, PLAIN)
    assert whole.run(lambda _: None)
    stopped = make_trainer(tmp_path / "plain", text, None, PLAIN)
    assert not stopped.run(lambda now: os.kill(os.getpid(), signal.SIGTERM) if now.step == 3 else None)
    expected = [entry["train"] for entry in whole.history]
    processes.run_ranks(rank_main, 2, tmp_path, 2, tmp_path, text, expected, deadline=DEADLINE)


def test_trainer_refuses_more_ranks_than_bytes(tmp_path: Path, text: Path) -> None:
    mesh = mock.Mock(**{"get_local_rank.return_value": 0, "size.return_value": 38})
    with pytest.raises(UserError, match=r"--tokens must be at least the number of ranks=38, got 37"):
        make_trainer(tmp_path / "run", text, mesh)
