"""The pictures of plans, read back from their SVG."""

from __future__ import annotations

import math
import re

import pytest

from course_lib.figures import devices, memory_by_part, plan_map, step_time_by_part
from course_lib.figures.axis import long_time, memory_size, powers
from course_lib.figures.bars import PITCH
from course_lib.figures.costs import MEMORY_PARTS
from course_lib.figures.palette import LIKELY
from course_lib.figures.words import plan_in_words
from course_lib.instruments.ledger import Bytes
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate
from lessons.L01_one_machine_is_not_enough.figure import limits
from lessons.L09_planning.figure import roofline
from tests.figures.charts import FOUND, GPT, NODES, PLANS
from tests.figures.drawn import boxes, parsed, places, texts, written

FAST, DEEP = PLANS.values()
LARGE = estimate(GPT, NODES, Plan(dp=16, micro_batch=32), 512)
GiB = 2**30


def test_a_bar_of_memory_is_cut_in_proportion_to_the_bytes() -> None:
    svg = memory_by_part({"deep": DEEP.memory}, DEEP.capacity).svg
    drawn = {box.fill: box.width for box in boxes(svg)}
    by_color = {"parameters": MEMORY_PARTS["parameters"].fill}
    scale = drawn["optimizer"] / DEEP.memory.optimizer
    held = {part: size for part, size in DEEP.memory.parts.items() if size > 0}
    assert len(held) >= 4
    for part, size in held.items():
        assert drawn[by_color.get(part, part)] == pytest.approx(scale * size, abs=0.02)


def test_the_line_of_the_capacity_stands_where_the_axis_says() -> None:
    picture = memory_by_part({"wide": FAST.memory}, FAST.capacity)
    where = places(picture.svg)
    (line,) = [
        e.attrib for e in parsed(picture.svg).iter() if e.tag.endswith("line") and "stroke-dasharray" in e.attrib
    ]
    gib = (where["60"][0] - where["20"][0]) / 40
    assert float(line["x1"]) == pytest.approx(where["20"][0] + gib * (80 - 20), abs=0.05)
    assert FAST.capacity == 80 * GiB
    assert "a device has 80 GiB" in where


@pytest.mark.parametrize(("capacity", "anchor"), [(1, None), (80, "end")])
def test_the_name_of_the_capacity_goes_to_where_there_is_room(capacity: int, anchor: str | None) -> None:
    svg = memory_by_part({"wide": FAST.memory}, capacity * GiB, width=415).svg
    (name,) = [e for e in parsed(svg).iter() if e.text == f"a device has {capacity} GiB"]
    assert name.attrib.get("text-anchor") == anchor


def test_whether_a_plan_fits_is_said_in_the_sentence_and_in_the_table() -> None:
    fits = memory_by_part({"wide": FAST.memory}, FAST.capacity)
    bursts = memory_by_part({"large": LARGE.memory, "wide": FAST.memory}, FAST.capacity)
    assert fits.summary.endswith("so it fits.")
    assert "large: " in bursts.summary and bursts.summary.endswith("so it does not fit.")
    assert [row["fits"] for row in bursts.rows] == ["does not fit", "fits"]


def test_what_a_ledger_has_counted_is_called_measured_and_what_is_planned_modelled() -> None:
    counted = memory_by_part({"here": Bytes(parameters=3000, gradients=3000, optimizer=6000)})
    assert "measured (in a real run)" in texts(counted.svg)
    assert "modelled (calculated, not run)" in texts(memory_by_part({"wide": FAST.memory}).svg)
    assert counted.rows[0]["all"] == "11.7 KiB"


def test_the_first_pipeline_rank_holds_the_most_activations() -> None:
    held = devices(DEEP)
    assert list(held) == [f"pipeline rank {rank}" for rank in range(4)]
    activations = [memory.activations for memory in held.values()]
    assert activations == sorted(activations, reverse=True)
    assert max(memory.total for memory in held.values()) == DEEP.memory.total


def test_the_parts_of_a_step_fill_its_bar() -> None:
    svg = step_time_by_part(PLANS).svg
    lengths = {name: sum(box.width for box in boxes(svg) if box.tip.startswith(f"{name}: ")) for name in PLANS}
    ratio = DEEP.step_time.total / FAST.step_time.total
    assert lengths["deep"] / lengths["wide"] == pytest.approx(ratio, rel=1e-3)
    bubble = [box for box in boxes(svg) if box.fill == "bubble"]
    assert [box.tip.split(":")[0] for box in bubble] == ["deep"]
    assert bubble[0].width / lengths["deep"] == pytest.approx(DEEP.bubble, rel=1e-2)


def strokes(svg: str) -> list[str]:
    """The paths that are drawn as lines in the color of the text."""
    paths = [e.attrib for e in parsed(svg).iter() if e.tag.endswith("path")]
    return [path["d"] for path in paths if path.get("stroke") == "currentColor"]


def test_a_whisker_reaches_from_where_to_where_nine_in_ten_steps_end() -> None:
    picture = step_time_by_part(PLANS)
    bars = {name: [box for box in boxes(picture.svg) if box.tip.startswith(f"{name}: ")] for name in PLANS}
    for (name, one), row in zip(PLANS.items(), picture.rows, strict=True):
        ends = [box for box in boxes(picture.svg) if box.tip.startswith(f"{name}, {LIKELY}: ")]
        left = min(box.x for box in bars[name])
        scale = sum(box.width for box in bars[name]) / one.step_time.total
        likely = [left + scale * seconds for seconds in (one.step_time.low, one.step_time.high)]
        assert [end.x + 8 for end in ends] == pytest.approx(likely, abs=0.1)
        middle = ends[0].y + 8
        low, high = (f"{end.x + 8:.2f},{middle:.2f}" for end in ends)
        assert f"M{low}L{high}" in strokes(picture.svg)
        bar = bars[name][0]
        assert bar.y + bar.height < middle < bar.y + PITCH  # between this bar and the next
        assert row["with 90% (s)"] == f"{one.step_time.low:.4g} to {one.step_time.high:.4g}"
    assert LIKELY in texts(picture.svg)
    assert picture.summary.endswith(FAST.interval)


def test_every_plan_of_the_front_has_its_place_and_its_tooltip() -> None:
    svg = plan_map(FOUND).svg
    where = places(svg)
    numbers = {float(text): place for text, place in where.items() if re.fullmatch(r"[\d.]+", text)}
    below = max(y for _, y in numbers.values())
    across = {number: x for number, (x, y) in numbers.items() if y == below}
    (low, x0), (high, x1) = min(across.items()), max(across.items())
    tips = {box.tip: box for box in boxes(svg) if not box.tip.startswith("90%")}
    for one in FOUND.pareto:
        (box,) = [box for tip, box in tips.items() if tip.startswith(f"{plan_in_words(one.plan)}: ")]
        share = math.log(one.memory.total / GiB / low) / math.log(high / low)
        assert box.x + 8 == pytest.approx(x0 + share * (x1 - x0), abs=0.1)


def test_the_map_says_how_many_plans_fit_and_which_is_the_fastest() -> None:
    summary = plan_map(FOUND).summary
    assert summary.startswith(f"{sum(one.fits for one in FOUND):,} of {len(FOUND):,} plans fit into 80 GiB")
    assert f"the fastest of them is {plan_in_words(FOUND.best.plan)}" in summary


def test_a_point_of_the_roofline_is_its_flops_by_its_bytes() -> None:
    # Of 16 devices in a ring, 8 in each of two nodes, two send to the other node.
    inside, between = roofline({"wide": FAST}).rows
    flops, (sent,) = GPT.step_flops(64) / 16, FAST.traffic.values()
    assert (inside["link"], between["link"]) == ("NVLink 3", "InfiniBand HDR")
    assert inside["FLOPs a byte"] == pytest.approx(flops / (sent * 7 / 8))
    assert between["FLOPs a byte"] == pytest.approx(flops / (sent / 8))
    assert inside["TFLOP/s"] == between["TFLOP/s"] == pytest.approx(FAST.mfu * 312)


def test_no_plan_is_faster_than_its_roof() -> None:
    over_nodes = {
        "tensor": estimate(GPT, NODES, Plan(tp=16), 64),
        "ZeRO-3": estimate(GPT, NODES, Plan(dp=16, zero=3), 64),
    }
    rows = roofline({**PLANS, **over_nodes}).rows
    assert len(rows) == 8
    assert all(row["TFLOP/s"] <= row["roof (TFLOP/s)"] for row in rows)  # type: ignore[operator]


def test_a_slower_network_has_its_ridge_further_to_the_right() -> None:
    # The speed of products on an A100, 0.771 of 312 TFLOP/s, by 0.8 of 25 and of 3.125 GB/s.
    slow = Cluster("A100-80GB", nodes=2, between="Ethernet 25")
    assert "11,825 for InfiniBand HDR" in roofline({"wide": FAST}).summary
    assert "94,598 for Ethernet 25" in roofline({"wide": estimate(GPT, slow, Plan(dp=16), 64)}).summary


SIZES = {"small": (12, 768, 12), "middle": (24, 2048, 16), "large": (96, 12288, 96)}
ALONE: dict[str, Estimate] = {
    name: estimate(ModelSpec(*shape, 2048, 50257), Cluster("A100-80GB", 1, 1), Plan(), 64)
    for name, shape in SIZES.items()
}
TOKENS = {name: 20.0 * one.model.parameters for name, one in ALONE.items()}


def test_the_limits_name_the_largest_model_that_fits_and_the_time_of_the_last() -> None:
    picture = limits(ALONE, TOKENS)
    assert "fits into 80 GiB is middle" in picture.summary
    seconds = TOKENS["large"] / ALONE["large"].tokens_per_second
    low, high = ALONE["large"].step_time.around(seconds)
    assert f"{long_time(seconds)} ({long_time(low)} to {long_time(high)} with 90%" in picture.summary
    assert [row["fits"] for row in picture.rows] == ["fits", "fits", "does not fit"]


def test_models_that_do_not_fit_stand_above_the_line() -> None:
    svg = limits(ALONE, TOKENS).svg
    heights = {box.tip.split(": ")[0]: box.y + 8 for box in boxes(svg) if "iB" in box.tip}
    (line,) = [y - 14 for text, _, y in written(svg) if text == "a device has 80 GiB"]
    assert heights["large"] < line < heights["middle"] < heights["small"]


def test_sizes_and_times_as_people_write_them() -> None:
    assert [memory_size(size) for size in (12, 2**10, 1.5 * 2**20, 78 * 2**30)] == [
        "12 B",
        "1 KiB",
        "1.5 MiB",
        "78 GiB",
    ]
    assert [long_time(t) for t in (0.02, 7200, 200_000, 1e9)] == ["20 ms", "2 hours", "2.31 days", "31.7 years"]


@pytest.mark.parametrize(("low", "high"), [(0.3, 80), (1, 1000), (2.2e-3, 4e5)])
def test_marks_of_a_logarithmic_axis_are_round_and_inside(low: float, high: float) -> None:
    marks = powers(low, high)
    assert len(marks) >= 2
    assert all(low <= mark <= high and f"{mark:.0e}"[0] in "125" for mark in marks)


def test_a_plan_is_described_without_what_it_does_not_use() -> None:
    assert plan_in_words(Plan(dp=4)) == "data 4 x tensor 1 x pipeline 1, micro-batches of 1"
    half = Plan(dp=4, recompute="selective", recomputed=0.5)
    assert plan_in_words(half).endswith("micro-batches of 1, selective recomputation of 50% of the layers")
    plan = Plan(2, 8, 4, 2, "interleaved_1f1b", 3, 1, True, "full")
    assert plan_in_words(plan) == (
        "data 2 x tensor 8 x pipeline 4, interleaved_1f1b with 3 stages each, micro-batches of 2, ZeRO-1, "
        "sequence parallelism, full recomputation"
    )
