"""Checkpoints, against runs that were never interrupted and against the tensors that went in.

Nothing here is rounded, so every comparison is of bits.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from course_lib import RankDied, RankFailed, data, launch
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.model import GPTConfig, TinyGPT
from course_lib.scale_out import checkpoint
from course_lib.scale_out.checkpoint import CheckpointError
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


def train(
    rank: int, case: str, dtype: torch.dtype, folder: Path | None, first: int, last: int
) -> tuple[State, list[float]]:
    """Steps first + 1 to last, on shares of 7 samples: all in one go, or resumed where a checkpoint was left."""
    model, optimizer = build(case, dtype, seed=10 * first + rank)
    replica = DataParallel(model)
    if first:
        assert folder and checkpoint.resume(model, optimizer, folder) == first
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
        checkpoint.save(checkpoint.training_state(model, optimizer), folder, last)
    return {name: tensor.clone() for name, tensor in checkpoint.training_state(model, optimizer).items()}, losses


@pytest.mark.parametrize("case", ["plain", "tied", "frozen"])
@pytest.mark.parametrize(("n", "dtype"), [(2, torch.float32), (4, torch.float64)])
def test_a_resumed_run_goes_on_bit_for_bit(case: str, dtype: torch.dtype, n: int, tmp_path: Path) -> None:
    uninterrupted = launch(train, n, (case, dtype, None, 0, 5), device="cpu").results
    launch(train, n, (case, dtype, tmp_path, 0, 2), device="cpu")
    resumed = launch(train, n, (case, dtype, tmp_path, 2, 5), device="cpu").results
    for (state, losses), (reference, all_losses) in zip(resumed, uninterrupted, strict=True):
        assert losses == all_losses[2:]
        equal(state, reference)


def test_other_numbers_of_ranks_start_from_the_same_bits(tmp_path: Path) -> None:
    saved = launch(train, 4, ("tied", torch.float32, tmp_path, 0, 2), device="cpu").results[0][0]
    for n in (1, 3):
        for state, _ in launch(train, n, ("tied", torch.float32, tmp_path, 2, 2), device="cpu").results:
            equal(state, saved)


def test_one_process_without_a_process_group_loads_and_saves(tmp_path: Path) -> None:
    saved = launch(train, 2, ("frozen", torch.float32, tmp_path, 0, 2), device="cpu").results[0][0]
    model, optimizer = build("frozen", torch.float32, seed=99)
    assert checkpoint.resume(model, optimizer, tmp_path) == 2
    equal(dict(checkpoint.training_state(model, optimizer)), saved)
    checkpoint.save(checkpoint.training_state(model, optimizer), tmp_path, 7)
    other, its_optimizer = build("frozen", torch.float32, seed=98)
    assert checkpoint.resume(other, its_optimizer, tmp_path) == 7
    equal(dict(checkpoint.training_state(other, its_optimizer)), saved)


ROWS, COLUMNS = torch.arange(14.0).view(7, 2), torch.arange(40.0, 54.0).view(2, 7)


def shards(rank: int, folder: Path, is_saving: bool) -> tuple[Tensor, Tensor]:
    """A tensor of 7 rows and one of 7 columns, cut among all ranks."""
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    pieces = [whole.chunk(n, dim) for dim, whole in enumerate((ROWS, COLUMNS))]
    rows, columns = (
        part[rank].clone() if rank < len(part) else part[0].narrow(dim, 0, 0).clone()  # nothing is left for the last
        for dim, part in enumerate(pieces)
    )
    state = {
        "rows": checkpoint.sharded(rows, mesh, 0, length=7),
        "columns": checkpoint.sharded(columns, mesh, -1, length=7),
    }
    if is_saving:
        checkpoint.save(state, folder, 1)
    else:
        rows.zero_(), columns.zero_()
        checkpoint.load(state, folder)
    return rows, columns


def test_shards_are_cut_anew_for_another_number_of_ranks(tmp_path: Path) -> None:
    """Cut for 5 ranks, 7 is 2 + 2 + 2 + 1 + 0."""
    for n, readers in ((5, 4), (2, 2), (2, 4)):
        folder = tmp_path / f"{n} {readers}"
        launch(shards, n, (folder, True), device="cpu")
        results = launch(shards, readers, (folder, False), device="cpu").results
        assert torch.equal(torch.cat([rows for rows, _ in results]), ROWS)
        assert torch.equal(torch.cat([columns for _, columns in results], dim=1), COLUMNS)
        whole = {"rows": torch.zeros(7, 2), "columns": torch.zeros(2, 7)}
        checkpoint.load(whole, folder)
        equal(whole, {"rows": ROWS, "columns": COLUMNS})


def test_tensor_parallel_shards_and_their_optimizer_state_move_between_meshes(tmp_path: Path) -> None:
    """A 2 x 2 mesh, data by tensor: the weight is cut by rows among tensor ranks, the bias is whole everywhere."""

    def cut(dp: int, tp: int) -> Callable[[int], tuple[nn.Linear, torch.optim.Optimizer, Any]]:
        def build_on(rank: int) -> tuple[nn.Linear, torch.optim.Optimizer, Any]:
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))["tp"]
            part = nn.Linear(3, 8 // tp)
            part.bias = nn.Parameter(torch.zeros(5))
            describe = lambda name, t: checkpoint.sharded(t, mesh, 0) if name == "weight" else t  # noqa: E731
            return part, torch.optim.Adam(part.parameters()), describe

        return build_on

    def save(rank: int) -> None:
        part, optimizer, describe = cut(2, 2)(rank)
        place = rank % 2
        with torch.no_grad():
            part.weight.copy_(torch.arange(24.0).view(8, 3)[4 * place : 4 * place + 4])
            part.bias.copy_(torch.arange(5.0))
        part.weight.grad, part.bias.grad = part.weight.detach().clone(), part.bias.detach().clone()
        before = part.weight.detach().clone(), part.bias.detach().clone()
        optimizer.step()
        with torch.no_grad():
            part.weight.copy_(before[0])
            part.bias.copy_(before[1])
        checkpoint.save(checkpoint.training_state(part, optimizer, describe), tmp_path, 3)

    def resume(rank: int, dp: int, tp: int) -> State:
        part, optimizer, describe = cut(dp, tp)(rank)
        assert checkpoint.resume(part, optimizer, tmp_path, describe=describe) == 3
        return dict(checkpoint.training_state(part, optimizer))

    launch(save, 4, device="cpu")
    weight = torch.arange(24.0).view(8, 3)
    for dp, tp in ((1, 4), (2, 2), (4, 1), (1, 2)):
        for rank, state in enumerate(launch(resume, dp * tp, (dp, tp), device="cpu").results):
            expected = weight.chunk(tp)[rank % tp]
            assert torch.equal(state["model.weight"], expected)
            assert torch.equal(state["optimizer.weight.exp_avg"], torch.lerp(torch.zeros(()), expected, 0.1))
            assert torch.equal(state["model.bias"], torch.arange(5.0))
            assert state["optimizer.weight.step"] == 1


def test_ranks_with_names_of_their_own_are_put_together(tmp_path: Path) -> None:
    """Two stages of a pipeline save; one process, and two that are cut elsewhere, load."""

    def stage(rank: int, cut: int, is_saving: bool) -> State:
        blocks = TinyGPT(replace(CONFIG, layers=2), seed=5 if is_saving else 6).blocks
        mine = dict((blocks[:cut] if rank == 0 else blocks[cut:]).state_dict())  # with the names they had
        if is_saving:
            checkpoint.save(mine, tmp_path, 1)
        else:
            checkpoint.load(mine, tmp_path)
        return mine

    launch(stage, 2, (1, True), device="cpu")
    reference = dict(TinyGPT(replace(CONFIG, layers=2), seed=5).blocks.state_dict())
    first, last = launch(stage, 2, (3, False), device="cpu").results
    equal(first | last, reference)
    whole = dict(TinyGPT(replace(CONFIG, layers=2), seed=7).blocks.state_dict())
    checkpoint.load(whole, tmp_path)
    equal(whole, reference)


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


@pytest.mark.parametrize(("accident", "error"), [(die, RankDied), (run_out_of_space, RankFailed)])
def test_a_crash_while_saving_leaves_the_older_checkpoint(
    accident: Callable[..., Any], error: type[Exception], tmp_path: Path
) -> None:
    launch(save_ones, 2, (tmp_path, 10, None), device="cpu")
    with pytest.raises(error):
        launch(save_ones, 2, (tmp_path, 20, accident), device="cpu")
    assert (tmp_path / "step_00000020.writing").is_dir()
    assert checkpoint.steps(tmp_path) == [10]
    state = {"a": torch.zeros(4), "b0": torch.zeros(3), "b1": torch.zeros(3)}
    assert checkpoint.load(state, tmp_path) == 10
    assert all(torch.equal(tensor, torch.full_like(tensor, 10)) for tensor in state.values())
    launch(save_ones, 2, (tmp_path, 20, None), device="cpu")  # over what the crash has left
    assert checkpoint.steps(tmp_path) == [10, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000020"]


def test_the_newest_is_loaded_unless_a_step_is_named(tmp_path: Path) -> None:
    value = torch.zeros(1)
    for step in (3, 100, 20, 20):
        checkpoint.save({"value": torch.tensor([float(step)])}, tmp_path, step)
    assert checkpoint.steps(tmp_path) == [3, 20, 100]
    for step in (3, 20, 100):
        assert checkpoint.load({"value": value}, tmp_path, step) == step == value.item()
    assert checkpoint.load({"value": value.zero_()}, tmp_path) == 100 == value.item()


def test_a_part_of_a_checkpoint_is_loaded_when_told_so(tmp_path: Path) -> None:
    model, optimizer = build("plain", torch.float32, seed=0)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    checkpoint.save(checkpoint.training_state(model, optimizer), tmp_path, 1)
    other = TinyGPT(CONFIG, seed=1)
    weights = {f"model.{name}": tensor for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"optimizer\.\S+ \[.*\] has no tensor on any rank to go to"):
        checkpoint.load(weights, tmp_path)
    checkpoint.load(weights, tmp_path, part=True)
    equal(dict(other.state_dict()), dict(model.state_dict()))


def refusal(rank: int, folder: Path, step: int | None, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> str:
    """What is said when rank 1 asks for this; rank 0 asks for the right thing."""
    right = {"a": torch.zeros(4), "b0": torch.zeros(3), "b1": torch.zeros(3)}
    state = right if rank == 0 else {**right, name: torch.zeros(shape, dtype=dtype)}
    with pytest.raises(CheckpointError) as refused:
        checkpoint.load(state, folder, step)
    assert not any(tensor.any() for tensor in state.values())
    return str(refused.value)


@pytest.mark.parametrize(
    ("step", "shape", "dtype", "name", "words"),
    [
        (None, (5,), torch.float32, "a", "rank 1: a is [5] here and [4] in the checkpoint"),
        (None, (4,), torch.float64, "a", "rank 1: a is torch.float64 here and torch.float32 in the checkpoint"),
        (None, (4,), torch.float32, "c", "rank 1: c is not in the checkpoint"),
        (15, (4,), torch.float32, "a", "holds no checkpoint of step=15; complete there: 10"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    step: int | None, shape: tuple[int, ...], dtype: torch.dtype, name: str, words: str, tmp_path: Path
) -> None:
    launch(save_ones, 2, (tmp_path, 10, None), device="cpu")
    texts = launch(refusal, 2, (tmp_path, step, shape, dtype, name), device="cpu").results
    assert texts[0] == texts[1]
    assert words in texts[0]


def test_a_shorter_model_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    checkpoint.save(TinyGPT(replace(CONFIG, layers=2)).state_dict(), tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has no tensor on any rank to go to; and \d+ more"):
        checkpoint.load({k: v for k, v in TinyGPT(CONFIG).state_dict().items() if "blocks.2" not in k}, tmp_path)


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_an_empty_or_missing_folder_is_named(folder: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"folder='\S+' holds no checkpoint; there is none"):
        checkpoint.load({"a": torch.zeros(1)}, tmp_path / folder)
    assert checkpoint.steps(tmp_path / folder) == []


def test_a_folder_that_only_some_ranks_see_is_named(tmp_path: Path) -> None:
    def look(rank: int, folders: list[Path]) -> None:
        checkpoint.load({"a": torch.zeros(1)}, folders[rank])

    checkpoint.save({"a": torch.ones(1)}, tmp_path / "shared", 4)
    with pytest.raises(RankFailed, match="holds no checkpoint that rank 1 can see; complete there: 4"):
        launch(look, 2, ([tmp_path / "shared", tmp_path / "own"],), device="cpu")


def test_something_else_than_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['step'\] is a int; a state holds tensors"):
        checkpoint.save({"step": 3}, tmp_path, 1)  # type: ignore[dict-item]
    assert checkpoint.steps(tmp_path) == []


def test_a_shard_of_the_wrong_length_is_refused() -> None:
    def describe(rank: int) -> None:
        checkpoint.sharded(torch.zeros(2 - rank, 3), init_device_mesh("cpu", (2,)), 0, length=4)

    with pytest.raises(RankFailed, match=r"local has length 1 along dim=0; of length=4 .* rank 1 holds 2"):
        launch(describe, 2, device="cpu")


def test_a_tied_parameter_is_found_under_each_of_its_names() -> None:
    model, optimizer = build("tied", torch.float32, seed=0)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    state = checkpoint.training_state(model, optimizer)
    for prefix, key in itertools.product(("model", "optimizer"), ("", ".exp_avg", ".exp_avg_sq", ".step")):
        if (prefix == "model") == (key == ""):
            first, second = (state[f"{prefix}.blocks.{name}{key}"] for name in ("0.token.weight", "2.output.weight"))
            assert first.data_ptr() == second.data_ptr()
