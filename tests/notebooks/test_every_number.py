"""No number in a lesson's prose is unproved: a field holds it, a quoted sentence or a conclusion covers it, a source is
named, or it needs none.

Numbers are found by `numbers`. Questions and tasks are left out, as they claim nothing.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.lesson import NOTEBOOKS, Proofs, lesson
from tests.notebooks.numbers import NOT_PROSE, NUMBER, SENTENCE, SOURCE, dots


def modules(kind: str) -> list[Any]:
    files = sorted(Path(__file__).parents[1].glob(f"lessons/*/{kind}.py"))
    return [importlib.import_module(f"tests.lessons.{file.parent.name}.{kind}") for file in files]


LESSONS = [path.stem[3:] for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
PROOFS: dict[str, Proofs] = {
    **{name: {} for name in LESSONS},
    **{module.NAME: module.PROOFS for module in modules("test_sentences")},
}
CONCLUSIONS = {module.NAME: [one.sentence for one in module.CONCLUSIONS] for module in modules("test_conclusions")}

ARITHMETIC = "nothing but arithmetic"
FORMATS = "bits of a number format"
MICIKEVICIUS = "Micikevicius et al. 2018, sections 3.2 and 4.5"
NVFP4 = "NVIDIA 2025, arXiv:2509.25149, sections 3 and 4"
H200 = "benchmarks/mixed_precision.py, run on one"
NO_PROOF: dict[str, dict[str, str]] = {  # a part of a sentence, and why it needs no proof
    "start_here": {
        "This page takes 15 minutes.": "test_teaching_plan compares it with the plan",
        "when four are four times as fast and when they are not": "what another lesson asks",
        "Every rank has 1 + 2 + 3 + 4 = 10.": ARITHMETIC,
        "ten minutes later with PyTorch's NCCL backend, thirty with gloo": "documentation of init_process_group",
    },
    "one_machine_is_not_enough": {
        "Look at the left half: above the dashed line nothing fits. (The right half": "halves of a picture",
        "Look at the right half of the picture above again": "half of a picture",
        "A billion parameters of four bytes each take": "what is asked about",
        "Then a model of twice the size needs four times as much.": ARITHMETIC,
        'A "GB" on a data sheet may be a billion bytes or a GiB.': "what the units mean",
        "(lesson [06]": "the number of a lesson",
        "lesson 06 has such a case": "the number of a lesson",
        "Eight devices have eight times the memory and eight times the speed.": ARITHMETIC,
    },
    "data_parallelism": {
        "half of it for each of two ranks, a quarter for each of four": ARITHMETIC,
        "a 32-bit number keeps about seven digits": FORMATS,
        "with 8 times the samples in each step": ARITHMETIC,
        "twice the samples save nearly half of the steps": "McCandlish et al. 2018, section 2.2",
    },
    "sharded_data_parallelism": {
        "Play the ring all-reduce, and stop half way.": "a task",
        "swaps half of its tensor with somebody far away, adds up, swaps half of that half": "the program below it",
        "every rank swaps half of the tensor with somebody half the cluster away": "the program above it",
        "For a model of 13 billion parameters on 64 A100 it expects": "the setting of fields",
        "(The backward pass has twice as much of both, if": "two products; a gather and a scatter",
        "With a single card for the whole node it takes eight times as many tokens": ARITHMETIC,
        "Torchtitan also recomputes every second matrix product, and with the same two samples for each of 64 A100 a "
        "model of 13 billion parameters falls from 61.1% of the peak to 53.8% (": "the page is named",
        "no recomputation for 7 billion parameters, selective for 13, full for 34 and 70 (foundation-model-stack/"
        "fms-fsdp, 128 A100)": "the repository is named",
    },
    "layerwise_model_parallelism": {
        "The head of the largest GPT-3": "a name",
        "For the largest GPT-3": "a name",
        "and that of Llama 3.2 with a billion": "a name",
    },
    "pipeline_parallelism": {
        "Give the last rank a third more to do, as an output layer": "a task",
        "messages of a tenth of a forward pass make its step": "the setting of a field",
    },
    "mixed_precision": {
        "With 16, twice as many fit into the same memory and through the same cable": FORMATS,
        "remember and add up in 32.": FORMATS,
        "and a scale of 8 was enough (section 3.2 and figure 3)": MICIKEVICIUS,
        "an LSTM, learned well without one for 300,000 steps and then diverged; a scale of 128 prevented": MICIKEVICIUS,
        "We measured one step of the course's own model on an H200 (98 million parameters in 12 layers, 16 sequences "
        "of 512 tokens; PyTorch 2.11; `benchmarks/mixed_precision.py` repeats it on yours): 117.6 ms and 6.4 GiB in "
        "float32, 31.2 ms and 4.4 GiB in bfloat16 with master weights.": H200,
        "`torch.autocast` took 32.4 ms and 5.1 GiB": H200,
        "(2025; 12 billion parameters, 10 trillion tokens) multiplies E2M1, with a scale for each 1 x 16 numbers, or "
        "16 x 16 weights. About 16% of the linear layers stay in bfloat16": NVFP4,
        "has a recipe for each in 2026": "documentation of transformer_engine.common.recipe, release 2.15",
        "groups of 16 numbers are mixed by a **random Hadamard transform**": NVFP4,
        "With all that, the loss of the model of 12 billion parameters ended about 1.5% above": NVFP4,
    },
    "combining_mechanisms": {
        "with two stages in each of 256, a device has half of the gradients": ARITHMETIC,
        "For 6.7B on 512 H100 and as many samples, 512 replicas take": "the setting of a field",
    },
    "planning": {
        "plans for 39 billion parameters, choosing by it loses": "a name",
        "So half-way through we ask whether you should believe it.": "half of the page",
        "The same model on 1,024 A100, with 2,048 samples in a minibatch.": "what is asked about",
        "a device keeps little more than the 2 bytes of each of its weights and the 2 of its gradient": FORMATS,
        "so take twice as many.": "a rule of thumb, which the search then confirms",
        "For less than a tenth, $m": ARITHMETIC,
        "Say the model is to see 20 tokens for each of its parameters, and an hour": "what is asked about",
        "an hour of a device costs 2 dollars": "an example",
    },
}

ENDLESS = re.compile(r"[\w:·]$")  # a heading, or "like this:", before a cell
ITEM = re.compile(r"^(?:-|\d\.) ")
CLAIMS_NOTHING = re.compile(r"\W*(?:Predict|Take|Keep|Make|Try|Choose|Switch|Stay|Leave|Find)\b|.*\?\W*$")


def looked_at(name: str) -> str:
    """The prose on one line, at full length, with dots in place of the parts that are left out."""
    words, is_code, is_reading = [], False, False
    for line in "\n\n".join(lesson(name).texts).split("\n"):
        is_heading, is_fence = line.startswith("#"), line.startswith("```")
        is_code ^= is_fence
        is_reading = "Further reading" in line if is_heading else is_reading and not line.startswith("**Next")
        line = ITEM.sub(lambda item: dots(item[0][:-2]) + ". ", line)  # an item ends the sentence before it
        words += [dots(word) if is_heading or is_fence or is_code or is_reading else word for word in line.split()]
        if words and (is_heading or not line.strip()):
            words[-1] = ENDLESS.sub(".", words[-1])
    return NOT_PROSE.sub(dots, " ".join(words))


def covered(name: str, quotes: Iterable[str]) -> set[int]:
    """The places in the prose that a quote covers."""
    prose, found = lesson(name).prose, (re.escape(" ".join(quote.split())) for quote in quotes)
    return {place for quote in found for match in re.finditer(quote, prose) for place in range(*match.span())}


def numbers(name: str) -> Iterator[tuple[int, str]]:
    """The place of each number that needs a proof, and the sentence around it."""
    text, prose = looked_at(name), lesson(name).prose
    for sentence in SENTENCE.finditer(text):
        said = prose[slice(*sentence.span())].strip()
        if not (CLAIMS_NOTHING.match(said.lstrip("-0123456789. ")) or SOURCE.search(said)):
            yield from ((number.start(), said) for number in NUMBER.finditer(text, *sentence.span()))


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("It takes 1.82 s, 24.9% of it on an A100, and sends 1,024 messages.", ["1.82", "24.9", "1,024"]),
        ("Half the bytes, a third of the time, four times as fast, in seven turns.", 4),
        ("Four ranks: ranks 0 and 1 and stage 2 have 16 bits, as section 3 says of ZeRO-3 and `f(8)` and $2^4$.", []),
        ("It takes {{runs[4].makespan:duration}} with {{2 + 2}} ranks and {{3e9 / 1e9}} billion parameters, 6.7B.", []),
    ],
)
def test_a_number_is_what_can_be_wrong(said: str, found: list[str] | int) -> None:
    numbers = [number[0] for number in NUMBER.finditer(NOT_PROSE.sub(dots, said))]
    assert (len(numbers) if isinstance(found, int) else numbers) == found


@pytest.mark.parametrize("name", PROOFS)
def test_every_number_is_proved_or_has_a_source(name: str) -> None:
    proved = covered(name, [*PROOFS[name], *CONCLUSIONS.get(name, ()), *NO_PROOF.get(name, ())])
    unproved = {sentence: None for place, sentence in numbers(name) if place not in proved}
    assert not unproved, "quote these in the lesson's table with what proves them:\n" + "\n".join(unproved)


@pytest.mark.parametrize(("name", "quote"), [(name, quote) for name in NO_PROOF for quote in NO_PROOF[name]])
def test_what_needs_no_proof_is_still_said_and_has_a_number(name: str, quote: str) -> None:
    places = covered(name, [quote]) - covered(name, PROOFS[name])
    assert any(place in places for place, _ in numbers(name))
