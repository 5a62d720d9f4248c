"""What the first page says is so."""

from __future__ import annotations

import pytest

from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "start_here"
shown, shows = lesson(NAME).shown, lesson(NAME).shows


PROOFS: Proofs = {
    "It is still empty. The four ranks and the notebook are five processes": lambda: shows(
        "def write(", "[[0], [1], [2], [3]]", "in the notebook: []", "processes: 5"
    ),
    "Rank 1 received what rank 0 sent.": lambda: shows("def message(", "[[0, 0, 0], [3, 1, 4]]"),
    "Every rank has 1 + 2 + 3 + 4 = 10.": lambda: shown("dist.all_reduce(number)").count("now I have 10") == 4,
    "Rank 0 now speaks first, and each has the other's number.": lambda: shows(
        "    if rank == 0:\n        dist.send(torch.tensor([10.0", "[11.0, 10.0]"
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
