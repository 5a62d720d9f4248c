"""Proofs of sentences in the lesson on layer-wise model parallelism."""

from __future__ import annotations

from inspect import signature
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from course_lib import data, launch
from course_lib.classroom import questions
from course_lib.mechanisms.layerwise import LayerWise
from course_lib.model import GPTConfig, TinyGPT
from lessons.L04_layerwise_model_parallelism.explorer import LayerWiseSetting
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "layerwise_model_parallelism"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
TIED = GPTConfig(layers=2, tied_embeddings=True)
EXAMPLES = data.fixed_examples(8)


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


def activations(units: int) -> int:
    return sum(held.activations for held in LayerWiseSetting(units, 64, 1000, "number").run().held)


def the_last_of_four_is_the_fullest() -> bool:
    totals = [held.total for held in LayerWiseSetting(4, 32, 4000, "number").run().held]
    return max(totals) == totals[-1]


def times_that_each_of_four_begins() -> list[int]:
    step = LayerWiseSetting(4, 8, 12, "number").run().timeline
    computing = [[span for span in step.of(rank) if span.kind in ("forward", "backward")] for rank in range(4)]
    return [1 + sum(two.start > one.end for one, two in pairwise(spans)) for spans in computing]


PROOFS: Proofs = {
    "together exactly what one process holds": lambda: shows("launch(held, 4", "together what one holds: True"),
    "To the last bit.": lambda: shows("def train_alone(", "equal to the last bit: True", "all weights there: True"),
    "A rank sends activations to the next and a gradient of the same size to the one before": lambda: (
        numbers("sent by rank 1", "sent by")[-1] == 2 * numbers("sent by rank 1", "samples")[-1]
    ),
    "Twice, and the last one once, since it goes back right away.": lambda: (
        times_that_each_of_four_begins() == [2, 2, 2, 1]
    ),
    "And with one device the step takes exactly as long.": lambda: shows(
        "gantt(four, compare=alone", "600 ms", "exactly as long"
    ),
    "A cut between layers cannot make a stage smaller than its largest block.": lambda: (
        max(numbers("costs in", "by bytes")[4:]) == max(numbers("sizes = stage_bytes(", "bytes of weights"))
    ),
    "together the units hold those that one would hold": lambda: activations(4) == activations(1),
    "With four units and 32 samples, the last one, which has the head": the_last_of_four_is_the_fullest,
    "Here it trains for the same steps as in section 2": lambda: shows(
        "launch(in_pytorch", "all weights there: True", "equal to the last bit: True"
    ),
    "with the `SplitPoint`s that you give to `pipeline(model, ...)`": lambda: (
        "split_spec" in signature(pipelining.pipeline).parameters and len(pipelining.SplitPoint) > 0
    ),
    "It does not add up the gradients of a parameter with two uses, on two ranks. Ours does.": (
        only_ours_adds_up_gradients_of_two_uses
    ),
    "`torch/distributed/pipelining/stage.py`, `forward_one_chunk` and `backward_one_chunk`": lambda: all(
        hasattr(PipelineStage, name) for name in ("forward_one_chunk", "backward_one_chunk")
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)


def test_the_stages_of_q7_are_as_equal_as_it_says() -> None:
    assert "4 equal stages" in questions.load("Q7").text
    computing = questions.load("Q7").form.run("d").happened
    assert all(one == other for one, other in pairwise(computing.split(": ")[-1].rstrip(".").split(", ")))
