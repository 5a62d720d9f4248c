"""Loss curves, and the sizes of numbers beside the range of a format, read back from their SVG."""

from __future__ import annotations

import math
import re

import pytest
import torch

from course_lib.figures import loss_at_end, loss_curves
from lessons.L07_mixed_precision.figure import FATES, lost, number_range, power
from lessons.L07_mixed_precision.runs import Format, exponents
from tests.figures.drawn import SVG, boxes, parsed, places, texts, written

FALLING = [3.0 - 0.02 * step for step in range(101)]
BROKEN = [3.0, 2.9, math.nan]
HALF = Format.of(torch.float16)


def line(svg: str) -> list[tuple[float, float]]:
    """The points of the last curve."""
    drawn = [path.attrib for path in parsed(svg).iter(f"{SVG}path") if path.get("fill") == "none"]
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", drawn[-1]["d"])]


def test_losses_stand_where_the_axes_say() -> None:
    svg = loss_curves({"float32": FALLING}).svg
    numbers = [(float(text), x, y) for text, x, y in written(svg) if re.fullmatch(r"[\d.]+", text)]
    below = max(y for _, _, y in numbers)
    across = {number: x for number, x, y in numbers if y == below}
    up = {number: y - 4 for number, _, y in numbers if y != below}
    points = line(svg)
    assert len(points) == len(FALLING)
    for step, loss in ((0, 3.0), (100, 1.0)):
        assert points[step] == pytest.approx((across[step], up[loss]), abs=0.02)


def test_a_training_that_goes_on_has_room_to_the_right() -> None:
    grown = [line(loss_curves({"float32": FALLING[:steps]}, steps=100).svg)[-1][0] for steps in (25, 50, 100)]
    places_of = places(loss_curves({"float32": FALLING[:25]}, steps=100).svg)
    assert grown == sorted(grown)
    assert grown[0] < places_of["40"][0] < grown[1] < places_of["60"][0]


def test_a_line_ends_where_the_loss_is_no_number_and_says_so() -> None:
    picture = loss_curves({"float32": FALLING, "float16": BROKEN, "late": []}, steps=100)
    assert "✗ float16: not a number" in texts(picture.svg)
    assert picture.summary == (
        "Loss over 100 steps: float32 from 3 to 1.19; float16 is not a number after 2 steps; late has not begun."
    )
    assert "nan" not in picture.svg


def test_the_table_has_ten_steps_of_every_training() -> None:
    rows = loss_curves({"float32": FALLING, "float16": BROKEN}, steps=101).rows
    assert [row["step"] for row in rows] == list(range(0, 101, 10))
    assert rows[1] == {"step": 10, "float32": FALLING[10], "float16": ""}


def test_the_loss_at_the_end_is_the_mean_of_the_last_steps() -> None:
    assert loss_at_end([9.0] * 50 + [1.0] * 10 + [2.0] * 10) == 1.5
    assert loss_at_end([4.0, 2.0]) == 3
    assert math.isnan(loss_at_end(BROKEN))


# Numbers beside a range

SHARES = {-30: 0.1, -26: 0.1, -25: 0.2, 0: 0.2, 15: 0.1, 16: 0.3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_format_ends_where_numbers_become_zero_and_infinite(dtype: torch.dtype) -> None:
    holds = Format.of(dtype)
    assert torch.tensor(2.0**holds.lowest, dtype=torch.float64).to(dtype) == 0
    assert torch.tensor(1.01 * 2.0**holds.lowest, dtype=torch.float64).to(dtype) > 0
    assert torch.tensor(2.0**holds.highest, dtype=torch.float64).to(dtype).isinf()
    assert torch.tensor(0.99 * 2.0**holds.highest, dtype=torch.float64).to(dtype).isfinite()


def test_what_is_lost_is_what_rounding_loses() -> None:
    numbers = torch.randn(10_000, dtype=torch.float64) * 2.0**-24
    shares = lost(exponents([numbers]), HALF)
    assert shares["zero"] == pytest.approx((numbers.half() == 0).double().mean().item())
    assert sum(shares.values()) == pytest.approx(1)
    scaled = lost(exponents([numbers * 2.0**40]), HALF)
    assert scaled["infinite"] == pytest.approx((numbers * 2.0**40).half().isinf().double().mean().item(), abs=0.002)


def test_bars_stand_where_the_axis_says_and_look_like_their_fate() -> None:
    svg = number_range(SHARES, HALF).svg
    bars = {box.tip.split(" to ")[0]: box for box in boxes(svg)}
    kept = FATES["kept"].fill
    assert [bars[power(e)].fill for e in SHARES] == ["zero", "zero", kept, kept, kept, "infinite"]
    left, right = (places(svg)[power(e)][0] for e in (-20, 30))
    for exponent in SHARES:
        assert bars[power(exponent)].x == pytest.approx(left + (right - left) * (exponent + 20) / 50, abs=0.1)
    assert bars[power(16)].height == pytest.approx(3 * bars[power(15)].height, abs=0.05)


def test_it_says_how_many_are_lost_at_either_end() -> None:
    picture = number_range(SHARES, HALF)
    assert {"20% zero", "30% infinite", "what float16 holds"} <= set(texts(picture.svg))
    assert picture.summary == (
        "The numbers lie between 2⁻³⁰ and 2¹⁷. float16 holds 2⁻²⁵ to 2¹⁶, so 20% of them become zero and 30% infinite."
    )
    assert picture.rows[0]["in float16"] == FATES["zero"].label


def test_a_format_that_reaches_further_than_the_picture_has_no_edges() -> None:
    written_there = texts(number_range(SHARES, Format.of(torch.bfloat16)).svg)
    assert not [text for text in written_there if "%" in text and text.endswith(("zero", "infinite"))]
    assert "what bfloat16 holds" in written_there
