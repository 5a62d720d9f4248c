"""The sentences of the lesson on layer-wise model parallelism, with their proofs."""

from __future__ import annotations

from functools import lru_cache
from inspect import signature
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from course_lib import data, launch
from course_lib.classroom import questions
from course_lib.classroom.runs.steps import LayerWiseStep
from course_lib.mechanisms.layerwise import LayerWise
from course_lib.model import GPTConfig, TinyGPT
from lessons.L04_layerwise_model_parallelism.explorer import LAYERS, UNITS, LayerWiseSetting
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "layerwise_model_parallelism"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
TIED = GPTConfig(layers=2, tied_embeddings=True)
EXAMPLES = data.fixed_examples(8)


def shares() -> list[float]:
    """The bytes of each rank, as shares of one process's."""
    (alone,) = numbers("launch(held, 4", "one process alone")
    return [numbers("launch(held, 4", f"rank {rank}")[1] / alone for rank in range(4)]


def bytes_of_blocks() -> list[float]:
    return numbers("sizes = stage_bytes(", "bytes of weights")


def fullest(cut: str) -> float:
    return max(numbers("costs in", cut)[4:])


def parameters(block: int) -> int:
    return sum(p.numel() for p in TinyGPT(GPTConfig(layers=8)).blocks[block].parameters())


def tied(module: torch.nn.Module) -> Any:
    """The gradient of the token embedding, which is the head's matrix, too."""
    (weight,) = (w for name, w in module.named_parameters() if name.endswith(("token.weight", "output.weight")))
    return weight.grad


def tied_in_pytorch(rank: int) -> Any:
    part = TinyGPT(TIED, dtype=torch.float64).blocks[2 * rank : 2 * rank + 2]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=1, loss_fn=data.answer_loss)
    schedule.step(*[EXAMPLES[0]][rank:], target=EXAMPLES[1])
    return tied(part)


def tied_in_ours(rank: int) -> Any:
    chain = LayerWise(TinyGPT(TIED, dtype=torch.float64).blocks)
    output = chain(EXAMPLES[0])
    chain.backward(None if output is None else data.answer_loss(output, EXAMPLES[1]))
    return tied(chain)


def only_ours_adds_up_gradients_of_two_uses() -> bool:
    model = TinyGPT(TIED, dtype=torch.float64)
    data.answer_loss(model(EXAMPLES[0]), EXAMPLES[1]).backward()
    ours, theirs = (launch(train, 2).results for train in (tied_in_ours, tied_in_pytorch))
    same = [torch.allclose(one, tied(model), rtol=0, atol=1e-12) for one in (*ours, *theirs, sum(theirs))]
    return same == [True, True, False, False, True]


@lru_cache
def explored(units: int, samples: int = 32, vocabulary: int = 1000, cut: str = "number") -> LayerWiseStep:
    return LayerWiseSetting(units, samples, vocabulary, cut).run()


def fullest_unit(*setting: Any) -> float:
    """The fullest unit's MiB in the explorer."""
    return round(max(held.total for held in explored(*setting).held) / 2**20, 2)


PROOFS: Proofs = {
    # The answers to the tasks of the explorer.
    "The fullest unit holds 5.7 MiB alone and 1.41 MiB of eight, but eight units are no better than six. The time is "
    "the same with any number of them.": lambda: (
        [fullest_unit(units) for units in (1, 6, 8)] == [5.7, 1.41, 1.41]
        and len({round(explored(units).timeline.makespan, 9) for units in UNITS}) == 1
    ),
    "They are shared out too: together the units hold those that one would hold.": lambda: (
        sum(held.activations for held in explored(4, 64).held) == explored(1, 64).held[0].activations
    ),
    "With four units and 32 samples, the last one, which has the head, with 6.09 MiB. A cut by bytes gives the head a "
    "unit of its own, and 5.44 MiB are left.": lambda: (
        [fullest_unit(4, 32, 4000, cut) for cut in ("number", "bytes")] == [6.09, 5.44]
        and max(explored(4, 32, 4000).held, key=lambda held: held.total) == explored(4, 32, 4000).held[-1]
    ),
    "The head alone makes half of all there is.": lambda: (
        {fullest_unit(8, 32, 4000, cut) for cut in ("number", "bytes")} == {5.44}
        and abs(5.44 / fullest_unit(1, 32, 4000) - 1 / 2) < 0.01
    ),
    "A quarter of the memory.": lambda: abs(sum(shares()) / 4 - 1 / 4) < 1e-12,
    "Every move trains a model with 6 layers on real ranks.": lambda: LAYERS == 6,
    "Here it trains for the same 20 steps as in section 2": lambda: (
        "launch(in_pytorch, 4, (20,))" in lesson(NAME).code("launch(in_pytorch")
        and shows("launch(in_pytorch", "all weights there: True", "equal to the last bit: True")
    ),
    "It does not add up the gradients of a parameter with two uses, on two ranks. Ours does.": (
        only_ours_adds_up_gradients_of_two_uses
    ),
    "with the `SplitPoint`s that you give to `pipeline(model, ...)`": lambda: (
        "split_spec" in signature(pipelining.pipeline).parameters and len(pipelining.SplitPoint) > 0
    ),
    "`torch/distributed/pipelining/stage.py`, `forward_one_chunk` and `backward_one_chunk`": lambda: all(
        hasattr(PipelineStage, name) for name in ("forward_one_chunk", "backward_one_chunk")
    ),
    "our model is a list of ten blocks, an embedding, eight layers and a head": lambda: shows(
        "split_layers(10, n_stages=4)", str({"Embedding": 1, "Transformer": 8, "Head": 1})
    ),
    "Every block on one rank, in order, and no stage more than one block larger than another.": lambda: shows(
        "split_layers(10, n_stages=4)", "[range(0, 3), range(3, 6), range(6, 8), range(8, 10)]"
    ),
    "train it on four processes none of which keeps more than its part": lambda: shows(
        "has trained blocks", *(f"blocks {blocks}\n" for blocks in ("0, 1, 2", "3, 4, 5", "6, 7", "8, 9"))
    ),
    "A model needs twice the memory of your device, and you have four devices.": lambda: max(shares()) < 1 / 2,
    "A quarter on average, and together exactly what one process holds.": lambda: (
        abs(sum(shares()) - 1) < 1e-12 and shows("launch(held, 4", "together what one holds: True")
    ),
    "embedding and head are far smaller than a layer here: the fullest rank holds more than a third.": lambda: (
        max(shares()) > 1 / 3 and 10 * max(parameters(0), parameters(9)) < parameters(1)
    ),
    "To the last bit.": lambda: shows("def train_alone(", "equal to the last bit: True", "all weights there: True"),
    "A rank sends activations to the next and a gradient of the same size to the one before": lambda: (
        numbers("sent by rank 1", "sent by")[-1] == 2 * numbers("sent by rank 1", "samples")[-1]
    ),
    "It depends on the samples, their length and the width of the model": lambda: (
        (row := numbers("sent by rank 1", "samples"))[-1] == 64 * row[1] * row[2] * row[3]
    ),
    "Not at all, it takes exactly as long.": lambda: shows(
        "gantt(four, compare=alone", "600 ms, emulated", "exactly as long"
    ),
    "a device takes 20 ms for a block forward, and 40 ms backward": lambda: (
        numbers("computes for", "one rank")[0] == 10 * (20 + 40)
    ),
    "One rank is busy at a time: $p$ devices are as fast as one.": lambda: (
        numbers("computes for", "one rank") == [600, 600] and sum(numbers("computes for", "computes")[1::2]) == 100
    ),
    "Head and embedding are five times as large as a layer.": lambda: (
        [round(size / bytes_of_blocks()[1]) for size in bytes_of_blocks()] == [5, *[1] * 8, 5]
    ),
    "makes the most expensive stage as cheap as can be": lambda: (
        fullest("by bytes") == bytes_of_blocks()[0] < fullest("by number")
    ),
    "which has many weights and computes next to nothing": lambda: bytes_of_blocks()[0] > bytes_of_blocks()[1],
    "A cut between layers cannot make a stage smaller than its largest block.": lambda: (
        fullest("by bytes") == max(bytes_of_blocks())
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)


def test_the_stages_of_q7_are_as_equal_as_it_says() -> None:
    assert "4 equal stages" in questions.load("Q7").text
    computing = questions.load("Q7").form.run("d").happened
    assert all(one == other for one, other in pairwise(computing.split(": ")[-1].rstrip(".").split(", ")))
