"""A step on a mesh of real ranks, against one process and against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from course_lib.model import TinyGPT
from course_lib.ranks.parent import pool
from lessons.L08_combining_mechanisms import runs as meshes
from lessons.L08_combining_mechanisms.explorer import MESHES
from lessons.L08_combining_mechanisms.runs import CONFIG, SAMPLES, HybridExperiment

HIDDEN = SAMPLES * CONFIG.sequence * CONFIG.hidden * 4  # bytes of the hidden states of all samples


@pytest.mark.parametrize(
    "experiment",
    [
        *map(HybridExperiment, MESHES),
        HybridExperiment((2, 2, 2), 1, "gpipe", torch.bfloat16),
        HybridExperiment((1, 2, 2), 2, "zb_h1"),
        HybridExperiment((4, 1, 1), 2, "gpipe"),
        HybridExperiment((2, 1, 2), 4, "1f1b", torch.bfloat16),
    ],
)
def test_a_step_is_that_of_one_process_and_sends_what_was_predicted(experiment: HybridExperiment) -> None:
    step = experiment.run()
    assert experiment.is_right(step)
    for rank in range(experiment.ranks):
        sent = {axis: _sent_by(rank, by_pair) for axis, by_pair in step.sent.items()}
        assert sent == experiment.predicted.sent(rank)
        assert sum(sent.values()) == step.timeline.bytes_sent(rank)


def test_gradients_that_leave_early_are_the_same_and_make_a_step_shorter() -> None:
    late, early = (HybridExperiment((2, 1, 2), 1, overlap=overlap) for overlap in (False, True))
    step = early.run()
    assert early.is_right(step)
    assert step.timeline.makespan < late.run().timeline.makespan


def _sent_by(rank: int, by_pair: dict[tuple[int, int], int]) -> int:
    return sum(count for (source, _), count in by_pair.items() if source == rank)


def test_ranks_talk_to_their_neighbors_on_an_axis_only() -> None:
    sent = HybridExperiment((2, 2, 2)).run().sent
    assert set(sent["tp"]) == {(rank, rank ^ 1) for rank in range(8)}
    assert set(sent["pp"]) == {(rank, rank ^ 2) for rank in range(8)}
    assert set(sent["dp"]) == {(rank, rank ^ 4) for rank in range(8)}
    # Hidden states of one replica's samples down, as many gradients up; 512 bytes describe them.
    assert sent["pp"][0, 2] == HIDDEN // 2 + 512
    assert sent["pp"][2, 0] == HIDDEN // 2


def test_the_axes_of_a_mesh_are_those_of_the_mechanism() -> None:
    experiment = HybridExperiment((2, 2, 2))
    assert [experiment.group(5, axis) for axis in ("dp", "pp", "tp")] == [[1, 5], [5, 7], [4, 5]]
    assert experiment.words == "dp 2 x pp 2 x tp 2"


def test_the_ranks_of_a_mesh_can_be_used_again() -> None:
    HybridExperiment((1, 2, 1), samples=8).run()
    assert pool.last_world_size("launch") == 2  # ranks that keep a group are not reused


def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "_train", _train_without_an_average)
    experiment = HybridExperiment((2, 1, 1))
    step = HybridExperiment.run.__wrapped__(experiment)
    assert not experiment.is_right(step)
    assert step.off > max(meshes.ROUNDING.values())


def _train_without_an_average(rank: int, *arguments: object) -> object:
    """Train replicas without averaging: each updates its shard with twice its own gradients."""
    from course_lib.mechanisms import shards

    def own_alone(held: shards.Shards, gradients: list[Any]) -> Tensor:
        message = right(held, gradients)
        message[held.rank] *= 2
        message[1 - held.rank] = 0
        return message

    right = shards.Shards._message
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.Shards, "_message", own_alone)
        return meshes._train(rank, *arguments)  # type: ignore[arg-type]


def test_the_same_update_in_16_bits_is_off_by_rounding_alone() -> None:
    step = HybridExperiment((1, 1, 2), dtype=torch.bfloat16).run()
    assert meshes.ROUNDING[torch.float32] < step.off < meshes.ROUNDING[torch.bfloat16]


def test_the_rate_makes_an_update_far_larger_than_the_weights() -> None:
    before, (after, _) = TinyGPT(CONFIG).state_dict(), meshes._one_process(SAMPLES)
    assert max((after[name] - before[name]).abs().max() for name in after) > 10 * max(
        weight.abs().max() for weight in before.values()
    )
