"""Checkpoints, against runs that were never interrupted and against the tensors that went in.

Nothing here is rounded, so every comparison is of bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from course_lib import RankDied, RankFailed, data, launch
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.model import GPTConfig, TinyGPT
from course_lib.scale_out import checkpoint
from tests.mechanisms.training import State, equal

CONFIG = GPTConfig(layers=1, hidden=16, heads=2)


def build(case: str, dtype: torch.dtype, seed: int) -> tuple[TinyGPT, torch.optim.Optimizer]:
    model = TinyGPT(replace(CONFIG, tied_embeddings=case == "tied"), seed, dtype)
    if case == "frozen":
        model.get_parameter("blocks.1.attention.query.weight").requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case == "plain":
        return model, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return model, torch.optim.Adam(parameters, lr=0.01)


def state_of(model: TinyGPT, optimizer: torch.optim.Optimizer) -> State:
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return state | {checkpoint.own_name(): checkpoint.packed(optimizer.state_dict())}


def resume(model: TinyGPT, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    step, state = checkpoint.load(folder)
    model.load_state_dict({name: state[f"model.{name}"] for name in model.state_dict()})
    if checkpoint.own_name() in state:
        optimizer.load_state_dict(checkpoint.unpacked(state[checkpoint.own_name()]))
    return step


def train(
    rank: int, case: str, dtype: torch.dtype, folder: Path | None, first: int, last: int
) -> tuple[State, list[float]]:
    """Train steps first + 1 to last on shares of 7 samples, at once or resumed from a checkpoint."""
    model, optimizer = build(case, dtype, seed=10 * first + rank)
    replica = DataParallel(model)
    if first:
        assert folder and resume(model, optimizer, folder) == first
    losses = []
    for step in range(first, last):
        samples = data.examples([(10 + 7 * sample, 99 - step - 5 * sample) for sample in range(7)])
        inputs, targets = batches.split(samples, dist.get_world_size())[rank]
        optimizer.zero_grad()
        loss = data.answer_loss(replica(inputs), targets)
        loss.backward()
        replica.finish()
        optimizer.step()
        losses.append(float(loss))
    if folder and not first:
        checkpoint.save(state_of(model, optimizer), folder, last)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, losses


@pytest.mark.parametrize("case", ["plain", "tied", "frozen"])
@pytest.mark.parametrize(("n", "dtype"), [(2, torch.float32), (4, torch.float64)])
def test_a_resumed_run_goes_on_bit_for_bit(case: str, dtype: torch.dtype, n: int, tmp_path: Path) -> None:
    uninterrupted = launch(train, n, (case, dtype, None, 0, 5)).results
    launch(train, n, (case, dtype, tmp_path, 0, 2))
    resumed = launch(train, n, (case, dtype, tmp_path, 2, 5)).results
    for (state, losses), (reference, all_losses) in zip(resumed, uninterrupted, strict=True):
        assert losses == all_losses[2:]
        equal(state, reference)


def test_other_numbers_of_ranks_start_with_the_same_model(tmp_path: Path) -> None:
    saved = launch(train, 4, ("tied", torch.float32, tmp_path, 0, 2)).results[0][0]
    for n in (1, 3, 5):
        for state, _ in launch(train, n, ("tied", torch.float32, tmp_path, 2, 2)).results:
            equal(state, saved)


def test_ranks_with_names_of_their_own_are_put_together(tmp_path: Path) -> None:
    """Two stages of a pipeline save; each of three ranks loads the whole."""
    model = TinyGPT(replace(CONFIG, layers=2), seed=5)
    whole = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}

    def stage(rank: int) -> None:
        mine = {name: tensor for name, tensor in whole.items() if (int(name.split(".")[2]) > 1) == rank}
        checkpoint.save(mine, tmp_path, 1)

    def load(rank: int) -> tuple[int, State]:
        return checkpoint.load(tmp_path)

    launch(stage, 2)
    for step, state in launch(load, 3).results:
        assert step == 1
        equal(state, whole)


def save_ones(rank: int, folder: Path, step: int, accident: Callable[..., Any] | None) -> None:
    state = {"a": torch.full((4,), float(step)), f"b{rank}": torch.full((3,), float(step))}
    with pytest.MonkeyPatch.context() as patch:
        if accident and rank == 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", accident)
        checkpoint.save(state, folder, step)


def die(*_: Any) -> None:
    os._exit(9)


def run_out_of_space(*_: Any) -> None:
    raise OSError("no space left on device")


def newest(folder: Path) -> tuple[int, State]:
    return launch(lambda rank: checkpoint.load(folder), 1).results[0]


@pytest.mark.parametrize(("accident", "error"), [(die, RankDied), (run_out_of_space, RankFailed)])
def test_a_crash_while_saving_leaves_the_older_checkpoint(
    accident: Callable[..., Any], error: type[Exception], tmp_path: Path
) -> None:
    launch(save_ones, 2, (tmp_path, 10, None))
    with pytest.raises(error):
        launch(save_ones, 2, (tmp_path, 20, accident))
    assert (tmp_path / "step_00000020").is_dir()
    assert checkpoint.steps(tmp_path) == [10]
    step, state = newest(tmp_path)
    assert (step, set(state)) == (10, {"a", "b0", "b1"})
    assert all(torch.equal(tensor, torch.full_like(tensor, 10)) for tensor in state.values())
    launch(save_ones, 2, (tmp_path, 20, None))  # over the remains of the crash
    assert checkpoint.steps(tmp_path) == [10, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000020"]


def test_the_newest_is_loaded_and_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (3, 100, 20, 100):
        launch(save_ones, 1, (tmp_path, step, None))
    launch(lambda rank: checkpoint.save({"a": torch.ones(1)}, tmp_path, 100), 1)
    assert checkpoint.steps(tmp_path) == [3, 20, 100]
    step, state = newest(tmp_path)
    assert step == 100
    equal(state, {"a": torch.ones(1)})


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_an_empty_or_missing_folder_has_no_step(folder: str, tmp_path: Path) -> None:
    assert newest(tmp_path / folder) == (0, {})
    assert checkpoint.steps(tmp_path / folder) == []


def test_a_folder_that_only_some_ranks_see_is_named(tmp_path: Path) -> None:
    def look(rank: int) -> None:
        checkpoint.load(tmp_path / ("own" if rank == 1 else "shared"))

    launch(save_ones, 1, (tmp_path / "shared", 4, None))
    with pytest.raises(RankFailed, match="the newest steps that ranks see are 4, 0, 4; give a folder"):
        launch(look, 3)
