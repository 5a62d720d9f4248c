"""The sentences of the lesson on one machine, with their proofs."""

from __future__ import annotations

from importlib import import_module
from statistics import mean

import pytest
import torch

from course_lib.classroom.runs.training import train
from course_lib.figures.palette import LIKELY
from course_lib.instruments.ledger import Ledger
from course_lib.model import GPTConfig, TinyGPT, Transformer
from course_lib.planner import Cluster, estimate, memory
from course_lib.planner.models import GPT3, LLAMA3
from lessons.L01_one_machine_is_not_enough import questions as asked
from lessons.L01_one_machine_is_not_enough.explorer import DEVICES, on_one_device
from tests.notebooks.lesson import Proofs, is_proved, lesson
from tests.planner.test_memory_interval import MEASURED, outside

NAME = "one_machine_is_not_enough"
numbers, shown, shows = lesson(NAME).numbers, lesson(NAME).shown, lesson(NAME).shows
GiB = 2**30
DAY = 86_400


def part(name: str) -> list[float]:
    """The numbers of a part of the model: parameters, millions of FLOPs, MiB kept."""
    return numbers("parts = {", f"{name} ")[-3:]


def of_layer(name: str) -> list[float]:
    """The numbers of a part, as shares of the whole layer's."""
    parts = [part(one) for one in ("norm 1", "attention", "norm 2", "MLP")]
    return [size / sum(sizes) for size, *sizes in zip(part(name), *parts, strict=True)]


def near(share: float, what: float) -> bool:
    return abs(share - what) < 0.01


def counted(kind: str) -> list[float]:
    """Bytes of a kind, by PyTorch's counter and by the ledger."""
    return numbers("theirs_by_kind[kind]", f"{kind} ")


def by_samples() -> list[list[float]]:
    """Rows for 1, 2, 4 and 8 samples: their number, then MiB of the four kinds."""
    rows = numbers("for samples in (1, 2, 4, 8):", "MiB")
    return [rows[i : i + 5] for i in range(0, len(rows), 5)]


def numbers_left_behind_by_a_layer(hidden: int, sequence: int) -> float:
    """The numbers that a layer keeps for the backward pass, as a multiple of sequence x hidden."""
    layer = Transformer(GPTConfig(hidden=hidden, sequence=sequence, heads=2))
    x = torch.ones(1, sequence, hidden, requires_grad=True)
    with Ledger(layer) as ledger:
        layer(x).sum().backward()
    return max(sample.held.activations for sample in ledger.samples) / 4 / sequence / hidden


def fullest(samples: int, sequence: int) -> str:
    """The event with the most bytes held in two steps of a small model."""
    model = TinyGPT(GPTConfig(vocab=64, sequence=sequence, layers=2, hidden=64))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(samples, sequence, dtype=torch.long)
    with Ledger(model, optimizer) as ledger:
        train(model, 2 * [(tokens, tokens)], lambda logits, _: logits.square().mean(), optimizer)
    return ledger.peak.event


def fits(model: str, device: str, samples: int = 1, recompute: str = "none") -> bool:
    return on_one_device(model, device, samples, recompute).fits


def planned(line: str) -> float:
    """The planned bytes, as a share of the counted ones."""
    return numbers("planned.tensors", line)[-1]


PROOFS: Proofs = {
    "a matrix makes its row four times as wide": lambda: GPTConfig().ffn_width == 4 * GPTConfig().hidden,
    "two thirds of the parameters and of the FLOPs in this table, and attention nearly all the rest": lambda: all(
        near(of_layer("MLP")[i], 2 / 3) and near(of_layer("attention")[i], 1 / 3) for i in (0, 1)
    ),
    "An embedding only looks up, so it has many parameters and no FLOPs.": lambda: (
        part("embedding")[1] == 0 and part("embedding")[0] > part("head")[0]
    ),
    "hardly any parameters, and still an eighth of what a layer keeps": lambda: (
        near(of_layer("norm 1")[2] + of_layer("norm 2")[2], 1 / 8) and of_layer("norm 1")[0] < 0.002
    ),
    "This counter does not see that on a CPU.": lambda: part("attention")[1] == round(2 * 4 * 128**2 * 8 * 128 / 1e6),
    "people run out of memory when they train such a model on a device that has 16.": lambda: (
        16 * GiB < 16e9 * (1 + memory.HOLES) + memory.DRIVER
    ),
    "Here they are most of what is held at the fullest moment.": lambda: shows(
        "memory_by_part(moments", "by step 2, after forward", "most of it (77%) activations"
    ),
    "AdamW keeps two numbers for each parameter.": lambda: numbers("bytes for each parameter", "optimizer") == [2 * 4],
    "Only the activations, and in proportion.": lambda: (
        len({tuple(row[1:4]) for row in by_samples()}) == 1
        and [round(row[4] / by_samples()[0][4], 1) for row in by_samples()] == [1, 2, 4, 8]
    ),
    "leaves about $16\\,s\\,h$ numbers behind in each layer": lambda: (
        15.9 < numbers_left_behind_by_a_layer(64, 32) < 16.5 and 15.9 < numbers_left_behind_by_a_layer(256, 16) < 16.5
    ),
    "The parameters, $12\\,h^2$ in a layer, grow with its square.": lambda: all(
        abs(sum(p.numel() for p in Transformer(GPTConfig(hidden=h)).parameters()) / (12 * h * h) - 1) < 2 / h
        for h in (64, 256)
    ),
    "Parameters and gradients to the byte, the optimizer up to its count of steps, activations within a few percent.": (
        lambda: (
            planned("parameters") == planned("gradients") == planned("optimizer") == 1
            and 0.95 < planned("activations") < 1.05
        )
    ),
    "the planner says more than the ledger has ever seen at one moment": lambda: 1 < planned("at the most") < 1.25,
    "A faster device makes nothing smaller": lambda: (
        numbers("try_with(", "as it is")[0]
        == numbers("try_with(", "every FLOP")[0]
        == numbers("try_with(", "single sample")[0]
    ),
    "More than four fifths of the": lambda: (
        16 * LLAMA3["70B"].parameters / GiB > 4 / 5 * numbers("try_with(", "as it is")[0]
    ),
    "Backward is twice as much as forward, so it is six FLOPs for each parameter and token in all.": lambda: (
        numbers("as backward", "ward:") == [2, 2]
    ),
    "the lines are a day, a month and a year, and 90% of such runs lie within the short stroke in each point": (
        lambda: "90%" in LIKELY and shows("limits(alone, TOKENS", "with 90%")
    ),
    "Centuries.": lambda: numbers("long_time(TOKENS", "years")[-1] > 200,
    "faster, but no smaller": lambda: (
        numbers("ways = {", "a share of the samples")[0] >= 16 * GPT3["13B"].parameters / GiB
    ),
    "Sharing out the **model** makes it smaller, by its matrices, by its layers, or by its state.": lambda: (
        max(numbers("ways = {", "fits   ")[::2]) < 80
        and [line.split("GiB, ")[1][:4] for line in shown("ways = {").splitlines() if line]
        == ["does", "fits", "fits", "fits"]
    ),
    "The memory is fullest where the forward pass turns into the backward pass, from the second step on; or in the "
    "update, if gradients take more than activations.": lambda: (
        fullest(samples=4, sequence=32) == "turn" and fullest(samples=1, sequence=4) == "stepped"
    ),
    "fits on an H200": lambda: fits("6.7B", "H200-141GB") and not fits("6.7B", "H100-80GB"),
    "6.7B on a B200, eight samples at a time: it may fit, and with recomputing it does. 175B cannot be": lambda: (
        [on_one_device("6.7B", "B200-180GB", 8, how).fit for how in ("none", "full")] == ["may fit", "fits"]
        and not any(fits("175B", device, 1, "full") for device in DEVICES)
    ),
    "Parameters and optimizer state are the same to the byte. Activations are, but for the text itself, which no "
    "operation has made, and for some single numbers.": lambda: (
        counted("Parameter")[0] == counted("Parameter")[1]
        and counted("Optstate")[0] == counted("Optstate")[1]
        and 0 <= counted("Activation")[0] - (counted("Activation")[1] - 8 * 129 * 8) < 100
    ),
    "twice the size of the logits": lambda: counted("Temp") == [2 * 8 * 128 * 256 * 4],
    "It can say so for every module: `theirs.display_modulewise_snapshots()`.": lambda: callable(
        import_module("torch.distributed._tools.mem_tracker").MemTracker.display_modulewise_snapshots
    ),
    "half as much for each group that the device talks in": lambda: memory.CHANNELS == memory.DRIVER / 2,
    "Some software computes the loss in one kernel, some keeps two copies of the logits in 32 bits": lambda: (
        memory.PLAIN_LOSS == 2 * 4
    ),
    "which has nine in ten published figures in it": lambda: (
        mean(outside(one) <= memory.SPREAD for one in MEASURED) >= 0.9
    ),
    "Is there one that may fit?": lambda: (
        [on_one_device(name, "RTX-4090", 1, "none").fit for name in ("760M", "1.3B", "2.7B")] == list(memory.FITS)
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)


def test_the_case_of_the_colleague_has_the_planner_s_numbers() -> None:
    """107 GB and 5.6e21 FLOPs: 65 days at best on one H100, about four months by the planner, three weeks on eight."""
    assert 106e9 < 16 * asked.SEVEN.parameters < 108e9
    flops = 6 * asked.SEVEN.parameters * asked.TOKENS
    peak = Cluster("H100-80GB").spec.peak["bf16"]
    assert 5.55e21 < flops < 5.65e21
    assert round(flops / peak / DAY) == 65
    eight = estimate(asked.SEVEN, *asked.MACHINES["each of eight H100"], 256)
    one = estimate(asked.SEVEN, *asked.MACHINES["one H100"], 256)

    assert 2.5 < asked.TOKENS / eight.tokens_per_second / DAY / 7 < 3.5
    assert 4 < asked.TOKENS / one.tokens_per_second / DAY / 30.4 < 5
