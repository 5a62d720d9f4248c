"""What the lesson on data parallelism says is so."""

from __future__ import annotations

from collections import Counter

import pytest

from course_lib import Link, Pace, data, questions
from course_lib.experiments import training_step
from course_lib.experiments.chunks import follow
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "data_parallelism"
RING = "for n in (2, 4, 8, 16):"
PACE = Pace({"forward": 0.004, "backward": 0.008, "optimizer": 0.004}, link=Link(latency=0.001, bandwidth=2.5e6))


def times_the_gradients() -> dict[int, float]:
    """By the number of ranks in the ring."""
    rows = [line.split() for line in lesson(NAME).shown(RING).splitlines() if line]
    return {int(row[0]): float(row[-4]) for row in rows}


def held() -> list[list[float]]:
    return [lesson(NAME).numbers("bytes_held", f"on {n}:")[1:] for n in (1, 4)]


def terms() -> list[list[float]]:
    """For 1, 2, 4 and 8 ranks: the four terms, their sum, and the emulated time, in milliseconds."""
    return [lesson(NAME).numbers("G = emulated[1]", f"N = {n}:")[1:] for n in (1, 2, 4, 8)]


def gradients_travel_after_the_backward_pass() -> bool:
    step = training_step(2, 4, PACE, overlap=False)
    (backward,) = (span for span in step.of(0) if span.kind == "backward")
    (travel,) = (span for span in step.of(0) if span.kind == "transfer")
    return travel.start >= backward.end


def commonest_sum() -> tuple[int, float]:
    problems, unseen = data.train_test_split()
    sums = Counter(a + b for a, b in [*problems, *unseen])
    ((most, count),) = sums.most_common(1)
    return most, sums.total() / count


def stored(code: str, *words: str) -> bool:
    return all(word in lesson(NAME).shown(code) for word in words)


def complete_half_way() -> set[int]:
    """How many pieces with all eight ranks in it each rank has, in the middle of a ring all-reduce."""
    timeline, sums = follow("ring all-reduce", 8)
    middle = timeline.makespan / 2 + min(span.start for span in timeline.spans)
    there = [one for one in sums if one.source == one.target and one.start <= middle < one.end]
    return set(Counter(one.target for one in there if len(one.members) == 8).values())


def q3(option: str) -> bool:
    outcome = questions.load("Q3").form.run(option)
    return outcome.shown


PROOFS: Proofs = {
    "no share is more than one sample larger than another": lambda: stored(
        "batches.split(torch.arange(10), 4)", "[tensor([0, 1, 2]), tensor([3, 4, 5]), tensor([6, 7]), tensor([8, 9])]"
    ),
    "not all of them fail": lambda: "It runs" in questions.load("Q4").form.run("c").happened,
    "It is the **mean**.": lambda: (
        stored('compare("mean of the four"', "mean of the four   the same")
        and stored('compare("mean of the four"', "one of the four    off by", "sum of the four    off by")
    ),
    "A sum goes with a sum, a mean with a mean": lambda: stored('compare("sum of sums', "the same, up to rounding"),
    "It is far smaller than what any wrong idea is off by.": lambda: (
        min(lesson(NAME).numbers('compare("mean of the four"', "off by")) > 10 * 100 * 512 * 3 * 2**-23
    ),  # three characters of an answer in each of 512 samples; percent
    "counts one and a half times as much as one from a share of three": lambda: (
        (1 / 4 / 2) / (1 / 4 / 3) == 1.5
        and stored(
            'compare("weighted mean"', "weighted mean      the same, up to rounding", "plain mean         off by"
        )
    ),
    "always answering `109`, the commonest sum, is right one time in 90": lambda: commonest_sum() == (109, 90),
    "Forward, backward, then the gradients travel, then everyone updates its weights.": (
        gradients_travel_after_the_backward_pass
    ),
    "Half way, each rank has one piece with all eight in it.": lambda: complete_half_way() == {1},
    "One and a half times the gradients, although each rank needs something from three others.": lambda: (
        times_the_gradients()[4] == 1.5
    ),
    "The few bytes on top count the samples of each share.": lambda: (
        lesson(NAME).numbers("sent by each rank in one step")[-1] == 1.5 * 408_576 + 1.5 * 4
    ),
    "It is $2(N-1)/N$ times the size $G$ of the gradients: less than twice": lambda: all(
        times == 2 * (n - 1) / n < 2 for n, times in times_the_gradients().items()
    ),
    "less than twice, however many ranks there are": lambda: max(times_the_gradients().values()) < 2,
    "Nothing: a replica is a whole model.": lambda: held() == [held()[0], 4 * held()[0]] and held()[0][0] > 0,
    "the longer they train, the further they are apart": lambda: (
        (apart := [lesson(NAME).numbers("follow, 4", f"after {n:2} steps")[1] for n in (1, 5, 20, 80)]) == sorted(apart)
        and apart[0] < apart[-1]
    ),
    "The devices here need 4 ms for a sample's forward pass, 8 ms for its backward pass, and 4 ms for an update.": (
        lambda: all(
            word in lesson(NAME).code("device = {")
            for word in ('"forward": 0.004, "backward": 0.008, "optimizer": 0.004', "latency=0.001, bandwidth=2.5e6")
        )
    ),
    "The emulated line has a device for each rank, and still bends.": lambda: (
        [round(n * row[-1]) for n, row in zip((1, 2, 4, 8), terms(), strict=True)]
        == sorted(round(n * row[-1]) for n, row in zip((1, 2, 4, 8), terms(), strict=True))
    ),
    "The share of time spent on communication grows with every rank.": lambda: (
        (shares := [(row[2] + row[3]) / row[-1] for row in terms()]) == sorted(set(shares))
    ),
    "There is more of it; but above all there is less computing beside it.": lambda: (
        0 < terms()[-1][2] + terms()[-1][3] < (terms()[0][0] - terms()[-1][0]) / 10
    ),
    "The first term falls with $N$, the second stays. The third grows, but is never twice what it was with two ranks; "
    "the last one grows without end.": lambda: (
        [row[0] for row in terms()] == [768 / n for n in (1, 2, 4, 8)]
        and {row[1] for row in terms()} == {4}
        and terms()[1][2] < terms()[2][2] < terms()[3][2] < 2 * terms()[1][2]
        and [row[3] for row in terms()] == [2 * (n - 1) for n in (1, 2, 4, 8)]
    ),
    "Here are all four, beside what the emulated clocks say": lambda: all(row[4] == row[5] for row in terms()),
    "Each step becomes shorter, but the speed-up *worse*": lambda: q3("a"),
    "Computing shrinks with their number, communication and the update do not.": lambda: (
        terms()[0][0] > terms()[-1][0] and terms()[0][1] == terms()[-1][1] and terms()[1][2] < terms()[-1][2]
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
