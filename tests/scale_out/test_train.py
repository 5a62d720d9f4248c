"""The training program: under torchrun against `launch`, interrupted against uninterrupted, and its command line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from course_lib import RankFailed, data, launch
from course_lib.model import GPTConfig, TinyGPT
from course_lib.scale_out import checkpoint
from course_lib.scale_out.train import Options, is_due, options_from, train

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
OPTIONS = Options(steps=4, batch=10, layers=1, hidden=16, heads=2, device="cpu")  # 10 does not divide by 4


def parameters(folder: Path) -> dict[str, Tensor]:
    """The model's parameters in the newest checkpoint."""
    state = launch(lambda rank: checkpoint.load(folder)[1], 1).results[0]
    return {name: tensor for name, tensor in state.items() if name.startswith("model.")}


def equal(folder: Path, reference: Path) -> None:
    expected = parameters(reference)
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, expected[name]), name


PIPELINES = replace(OPTIONS, pp=2, micro_batches=3)  # two of them on 4 ranks
ONE_MODEL = replace(OPTIONS, pp=2, tp=2, schedule="zbv", micro_batches=4, layers=2, sequence_parallel=True, zero=False)


@pytest.mark.parametrize("options", [OPTIONS, PIPELINES, ONE_MODEL], ids=["replicas", "pipelines", "one model"])
def test_the_losses_are_those_of_one_process(options: Options) -> None:
    """The losses agree to 1e-5: 10 samples are added in another order, over 4 steps, in float32."""
    alone = TinyGPT(GPTConfig(layers=options.layers, hidden=options.hidden, heads=options.heads), options.seed)
    optimizer = torch.optim.Adam(alone.parameters(), lr=options.learning_rate)
    minibatches = data.minibatches(data.train_test_split()[0], options.batch, options.seed)
    expected = []
    for inputs, targets in (next(minibatches) for _ in range(options.steps)):
        optimizer.zero_grad()
        loss = data.answer_loss(alone(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in launch(train, 4, (options,)).results:
        assert losses == pytest.approx(expected, rel=1e-5)


OVERFLOWING = replace(OPTIONS, precision="fp16", loss_scale=2.0**18)  # in the first steps only: then it has come down


@pytest.mark.parametrize("options", [OPTIONS, OVERFLOWING, ONE_MODEL], ids=["fp32", "fp16", "one model"])
def test_a_run_that_is_started_again_goes_on_as_if_it_had_not_stopped(tmp_path: Path, options: Options) -> None:
    whole = replace(options, steps=6, checkpoints=str(tmp_path / "whole"))
    halves = replace(options, steps=3, checkpoints=str(tmp_path / "halves"))
    expected = launch(train, 4, (whole,)).results
    first = launch(train, 4, (halves,)).results
    second = launch(train, 4, (replace(halves, steps=6),)).results
    assert [a + b for a, b in zip(first, second, strict=True)] == expected
    equal(tmp_path / "halves", tmp_path / "whole")
    assert launch(train, 4, (replace(halves, steps=6),)).results == [[]] * 4


@pytest.mark.parametrize(
    ("ranks", "other", "words"),
    [
        (
            2,
            {"pp": 1, "tp": 2},
            "4 ranks, pp=2, tp=1, schedule=1f1b, .* and this run has 2 ranks, pp=1, tp=2,",
        ),
        (2, {}, "is from 4 ranks, pp=2, .* and this run has 2 ranks, pp=2,"),
        (4, {"zero": False}, "zero=True, .* and this run has 4 .* zero=False"),
        (8, {}, "is from 4 ranks, .* and this run has 8 ranks"),
        (4, {"hidden": 32}, "hidden=16, .* and this run has .* hidden=32"),
        (4, {"precision": "bf16"}, "precision=fp32, and this run has .* precision=bf16"),
    ],
)
def test_a_run_of_another_model_or_on_its_ranks_in_another_way_is_refused(
    tmp_path: Path, ranks: int, other: dict[str, Any], words: str
) -> None:
    halves = replace(PIPELINES, steps=1, checkpoints=str(tmp_path))
    launch(train, 4, (halves,))
    with pytest.raises(RankFailed, match=words):
        launch(train, ranks, (replace(halves, steps=2, **other),))


def test_checkpoints_are_saved_when_they_are_due() -> None:
    every_3 = Options(steps=8, save_every=3, checkpoints="somewhere")
    assert [step for step in range(1, 9) if is_due(step, every_3)] == [3, 6, 8]
    assert [step for step in range(1, 9) if is_due(step, replace(every_3, save_every=0))] == [8]
    assert not any(is_due(step, replace(every_3, checkpoints="")) for step in range(1, 9))


def test_every_option_is_on_the_command_line() -> None:
    assert options_from([]) == Options()
    words = "--steps 5 --batch 6 --save-every 2 --learning-rate 0.1 --checkpoints x --device cpu"
    assert options_from(words.split()) == Options(5, 6, learning_rate=0.1, checkpoints="x", save_every=2, device="cpu")
    words = (
        "--pp 2 --tp 4 --schedule gpipe --micro-batches 3 --sequence-parallel --no-zero --precision bf16 --max-norm 1"
    )
    assert options_from(words.split()) == Options(
        pp=2, tp=4, schedule="gpipe", micro_batches=3, sequence_parallel=True, zero=False, precision="bf16", max_norm=1
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--steps 0", "steps=0 has to be at least 1"),
        ("--schedule 2f2b", "schedule='2f2b' is unknown; choose one of ['naive', 'gpipe', '1f1b'"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_from(words.split())
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (replace(OPTIONS, batch=3), "4 pieces cannot be cut from a batch of samples=3"),
        (replace(OPTIONS, pp=3), "dp=1 x pp=3 x tp=1 makes 3 ranks, and there are 4"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(options: Options, complaint: str) -> None:
    with pytest.raises(RankFailed, match=complaint):
        launch(train, 4, (options,))


SRUN = """#!/bin/bash
# srun's part: the same command on every node, at the same time; an error of one is an error.
status=0
jobs=()
for pid in $HOST_PIDS; do
    if [ "$pid" = here ]; then "$@" & else nsenter --target "$pid" --net --uts -- "$@" & fi
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || status=$?; done
exit $status
"""


def cluster(folder: Path, nodes: str, pids: str) -> dict[str, str]:
    """An environment with Slurm's commands, in which a job of two nodes has just begun."""
    commands = {"srun": SRUN, "scontrol": f"#!/bin/bash\nprintf '{nodes}\\n'\n"}
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    python = {"PATH": path, "PYTHONPATH": str(ROOT)}
    return {**os.environ, **job, **python, "RANKS_PER_NODE": "1", "HOST_PIDS": pids, "PORT": str(free_port())}


def free_port() -> int:
    """A free port outside of the range of the system, which could assign it to the ranks of another test."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("there is no free port")


def two_hosts(folder: Path) -> list[str]:
    """The words before a command that runs it beside two hosts; none if hosts cannot be made."""
    words = ["unshare", "--map-root-user", "--net", "--mount", "bash", str(ROOT / "tests/scale_out/hosts.sh")]
    if not all(shutil.which(word) for word in ("unshare", "nsenter", "ip", "mount")):
        return []
    attempt = subprocess.run([*words, str(folder), "true"], capture_output=True, timeout=20)
    return [*words, str(folder)] if attempt.returncode == 0 else []


@pytest.mark.skipif(sys.platform != "linux", reason="Slurm's script is for Linux")
@pytest.mark.parametrize(
    ("job", "ranks"),
    [({}, 1), ({"SLURM_GPUS_ON_NODE": "8"}, 8), ({"SLURM_GPUS_ON_NODE": "8", "RANKS_PER_NODE": "2"}, 2)],
    ids=["one", "as many as GPUs", "as many as said"],
)
def test_a_node_has_as_many_ranks_as_it_is_told(tmp_path: Path, job: dict[str, str], ranks: int) -> None:
    environment = cluster(tmp_path, "localhost", "here")
    for name in ("RANKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        environment.pop(name, None)
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    command = ["bash", str(ROOT / "course_lib/scale_out/slurm.sh"), "--steps", "4"]
    said = subprocess.run(command, env=environment | job, capture_output=True, text=True, check=True).stdout
    assert f" --nproc-per-node {ranks} " in said
    assert said.endswith(" -m course_lib.scale_out.train --steps 4\n")


@pytest.mark.skipif(sys.platform != "linux", reason="Slurm's script is for Linux")
def test_two_nodes_train_the_same_parameters_as_launch(tmp_path: Path) -> None:
    """slurm.sh runs two agents of one rank each: on two hosts, or both on this one if no hosts can be made."""
    folder, reference = tmp_path / "torchrun", tmp_path / "launch"
    launch(train, 2, (replace(PIPELINES, checkpoints=str(reference)),))
    beside = two_hosts(tmp_path)
    environment = cluster(tmp_path, r"node0\nnode1" if beside else "localhost", "" if beside else "here here")
    words = f"--steps 4 --batch 10 --layers 1 --hidden 16 --heads 2 --device cpu --checkpoints {folder}"
    words += " --pp 2 --micro-batches 3"
    command = [*beside, "bash", str(ROOT / "course_lib/scale_out/slurm.sh"), *words.split()]
    limited = ["timeout", "--kill-after=5", "240", *command]  # other tests may hold both cores
    job = subprocess.run(limited, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    assert re.search(r"2 ranks, steps 1 to 4: loss [\d.]+ -> [\d.]+, [\d.e-]+ s a step", job.stdout)
    equal(folder, reference)
