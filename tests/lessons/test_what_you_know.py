"""What a lesson says at its end is in its table of conclusions, or is named here with what it is.

python -m pytest -q -s tests/lessons/test_what_you_know.py -k prints      the tables
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.lessons.conclusions import Conclusion
from tests.notebooks.lesson import lesson

TABLES = {
    module.NAME: module.CONCLUSIONS
    for file in sorted(Path(__file__).parent.glob("L*/test_conclusions.py"))
    if (module := importlib.import_module(f"tests.lessons.{file.parent.name}.test_conclusions"))
}
DEFINITION, ADVICE, BY_PARTS = "a definition", "advice", "what the table says of each part"
PUBLISHED = "what published recipes do, with their sources on the page"
OF_ITSELF: dict[str, dict[str, str]] = {
    "data_parallelism": {
        "Each rank holds the whole model and computes on its share.": DEFINITION,
        "Ideally, $N$ ranks are $N$ times as fast.": DEFINITION,
        "Computing shrinks with their number, communication and the update do not.": BY_PARTS,
    },
    "layerwise_model_parallelism": {"Consecutive layers are on consecutive ranks.": DEFINITION},
    "pipeline_parallelism": {"A stage passes a micro-batch on and starts the next at once.": DEFINITION},
    "mixed_precision": {
        "Compute and send in 16 bits; remember and add up in 32.": ADVICE,
        "32-bit sums, master weights and loss scaling put them right.": BY_PARTS,
        "With 8 bits each tensor or block has a scale of its own, and with 4 bits each block.": PUBLISHED,
        "What adds up stays in 32 bits, and embedding and head in 16 bits.": PUBLISHED,
    },
}


def known(name: str) -> list[str]:
    """The sentences of "What you know now"."""
    (text,) = (text for text in lesson(name).texts if "## What you know now" in text)
    text = text.partition("## What you know now")[2].partition("###")[0]
    bullets = [" ".join(bullet.split()) for bullet in re.split(r"\n- ", text)[1:]]
    return [sentence for bullet in bullets for sentence in re.split(r"(?<=\.) (?=[A-Z0-9])", bullet)]


def is_in(table: list[Conclusion], sentence: str) -> bool:
    return any(one.sentence in sentence or sentence in one.sentence for one in table)


@pytest.mark.parametrize("name", OF_ITSELF)
def test_what_a_lesson_says_at_its_end_is_confirmed_elsewhere(name: str) -> None:
    open_ = [one for one in known(name) if not is_in(TABLES[name], one) and one not in OF_ITSELF[name]]
    assert open_ == [], "confirm these in the table of conclusions"
    assert OF_ITSELF[name].keys() <= set(known(name)), "the lesson no longer says this"


@pytest.mark.parametrize("name", TABLES)
def test_a_table_prints_as_sentences_each_with_its_second_ground(name: str) -> None:
    assert len({one.sentence for one in TABLES[name]}) == len(TABLES[name])
    for sentence, elsewhere, holds in TABLES[name]:
        assert sentence and elsewhere and callable(holds)
        print(f"{name}: {sentence}\n    {elsewhere}")
