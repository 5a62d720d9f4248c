"""What the lesson on combining mechanisms says is so."""

from __future__ import annotations

import pytest

from course_lib.widgets.mesh import MESHES
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "combining_mechanisms"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
GROUPS, SENT = "def neighbors(", "for samples in (64, 256):"


def sent(samples: int) -> dict[str, float]:
    """Bytes of a step, by axis."""
    return dict(zip(("tp", "pp", "dp"), numbers(SENT, f"{samples:3} samples:")[1:], strict=True))


def norms() -> list[float]:
    """Of one process, with the squares of all ranks, with each gradient once."""
    return numbers("by_rank = launch(")


def counted(rank: int) -> list[float]:
    return numbers("for rank, kinds in enumerate(by_rank)", f"rank {rank} counts")[1:]


PROOFS: Proofs = {
    "arrange the ranks in nine ways": lambda: len(MESHES) == 9,
    "Rank 5 works with rank 4 on every layer of its stage (tp)": lambda: shows(
        GROUPS, "rank 5: dp [1, 5]   pp [5, 7]   tp [4, 5]"
    ),
    "With ranks 0, 2, 3 and 6 it never has to talk at all": lambda: (
        set(range(8)) - set(numbers(GROUPS, "rank 5:")) == {0, 2, 3, 6}
    ),
    "A little more than a quarter: half of the layers, and half of each of their matrices.": lambda: all(
        25 < share < 26 for share in numbers("def what_it_holds(", "%")[3::4]
    ),
    "Each of these ways to arrange eight ranks is the same training": lambda: (
        lesson(NAME).shown("def train_alone(").count("the same\n") == 3
    ),
    "Too large, and not by a round factor": lambda: (
        norms()[1] > norms()[0] == norms()[2] and abs(norms()[1] / norms()[0] - 2**0.5) > 0.01
    ),
    "It clips too often and too much": lambda: norms()[1] > norms()[0],
    "Only replica 0 counts": lambda: shows(
        "for rank, kinds in enumerate(by_rank)", *(f"rank {rank} counts nothing" for rank in (4, 5, 6, 7))
    ),
    "Of what all tensor ranks have, the first counts it; of the embedding, the first stage.": lambda: (
        [len(counted(rank)) for rank in range(4)] == [3, 2, 2, 1]
    ),
    "Tensor parallelism sends by far the most": lambda: all(
        sent(samples)["tp"] > 5 * max(sent(samples)["pp"], sent(samples)["dp"]) for samples in (64, 256)
    ),
    "with more samples, the other two grow, and this one does not": lambda: (
        sent(64)["dp"] == sent(256)["dp"]
        and sent(256)["tp"] == pytest.approx(4 * sent(64)["tp"], rel=0.01)
        and sent(256)["pp"] == pytest.approx(4 * sent(64)["pp"], rel=0.01)
    ),
    "Whatever you choose, the updated weights are those of one process.": lambda: shows(
        "MeshExplorer()", "The updated weights are those of one process."
    ),
    "All skip, and all halve their scale.": lambda: shows(
        "def train_with_an_overflow(", "step 3: loss 2.2, skipped", str([2.0**9] * 8)
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
