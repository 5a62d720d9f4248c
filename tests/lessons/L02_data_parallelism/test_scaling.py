"""bytes_sent, counted on real ranks; Q3, judged on calculated steps, which are those of real ranks to the last bits."""

from __future__ import annotations

import pytest

from course_lib import Pace, Span, Timeline
from course_lib.classroom import questions
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.runs.training import SMALL
from course_lib.model import TinyGPT
from lessons.L02_data_parallelism.questions import QUESTIONS, Gradients, Machines, _count_bytes

GRADIENTS = 4 * sum(parameter.numel() + 1 for parameter in TinyGPT(SMALL).parameters())  # and how many ranks had one


def calculated(case: Machines, workers: int, pace: Pace) -> Timeline:
    """A textbook step: computing is divided among ranks, the ring all-reduce is not, and everyone updates."""
    samples = case.batch_size / workers
    compute = sum(pace.compute_seconds(kind, samples) or 0 for kind in ("forward", "backward"))
    travel = pace.collective_seconds("all_reduce", GRADIENTS + 4, list(range(workers)))  # with the number of samples
    update = pace.compute_seconds("optimizer", 1) or 0
    spans = []
    for rank in range(workers):
        spans.append(Span(rank, "forward", "", 0.0, compute))
        spans.append(Span(rank, "transfer", "all_reduce", compute, compute + travel))
        spans.append(Span(rank, "optimizer", "", compute + travel, compute + travel + update))
    return Timeline(spans, workers, "emulated")


@pytest.mark.parametrize("seed", range(12))
def test_q3_describes_what_its_cluster_does(seed: int) -> None:
    case = QUESTIONS["Q3"].case(seed)
    one, few, many = (calculated(case, n, case.pace()).makespan for n in (1, case.devices_per_node, case.workers))
    assert one / few > 0.9 * case.devices_per_node
    assert round(one / many) == case.gained < 0.7 * case.workers


def test_q3_has_the_numbers_of_the_team_that_got_ten_times_from_sixteen() -> None:
    assert "16 workers gave only about 10 times" in questions.load("Q3").text


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_real_ranks_take_as_long_as_calculated(workers: int) -> None:
    case = Machines(devices_per_node=2, batch_size=16)
    step, expected = case.step(workers, case.pace()), calculated(case, workers, case.pace())
    assert step.makespan == pytest.approx(expected.makespan, rel=1e-9)
    for rank in range(workers):
        assert step.busy(rank) == pytest.approx(expected.busy(rank), rel=1e-9)
        assert step.transferring(rank) == pytest.approx(expected.transferring(rank), rel=1e-9)


def sent(answer: str, seed: int = 0) -> Outcome:
    return questions.load("bytes_sent", seed).form.run(answer)


@pytest.mark.parametrize("answer", ["700 kB", "0.7 MB", "700,000 bytes", "5.6 Mbit"])
def test_the_bytes_of_a_ring_are_accepted_in_any_unit(answer: str) -> None:
    assert sent(answer).right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("5.6 MB", "what all 8 ranks send together"),
        ("350 kB", "once around the ring"),
        ("400 kB", "the size of the gradients"),
        ("800 kB", "after 7, every piece is where it belongs"),
        ("2.8 MB", "send all gradients to 7 others"),
        ("50 kB", "That is one piece"),
        ("175 kB", "each number takes 4"),
        ("700 MB", "factor of a thousand"),
        ("87.5 kB", "a byte has eight bits"),
        ("667.6 kB", "1 MiB is 1,048,576"),
    ],
)
def test_ways_to_miss_the_bytes_are_recognized(answer: str, words: str) -> None:
    outcome = sent(answer)
    assert outcome.right is False
    assert words in outcome.why


@pytest.mark.parametrize("case", [Gradients(100_000, 8), Gradients(40_000, 4), Gradients(50_000, 5)])
def test_the_count_is_the_one_of_patarasuk_and_yuan(case: Gradients) -> None:
    n = case.ranks
    assert _count_bytes(case).measured == 2 * (n - 1) / n * 4 * case.parameters
