"""The looks of the pictures: readable, and to be told apart without color."""

from __future__ import annotations

from itertools import combinations

import pytest

from course_lib.figures.palette import INK, LINES, ORIGINS, PAPER, STYLES, Line, Style
from course_lib.timeline import KINDS

DARK = "#111111"


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2.2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast ratio of WCAG 2.2, 1 to 21."""
    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_the_contrast_formula_is_right() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the textbook near miss


def test_every_kind_has_a_look_and_every_origin_a_name() -> None:
    assert set(STYLES) == set(KINDS)
    assert tuple(ORIGINS) == ("measured", "emulated", "modelled")


# A number on a wait stands on a halo of its own, so its hatching does not count.
@pytest.mark.parametrize("kind", [kind for kind in STYLES if kind != "wait"])
def test_text_on_a_bar_is_readable_over_its_color_and_over_its_pattern(kind: str) -> None:
    style = STYLES[kind]
    assert contrast(style.text, style.fill) >= 4.5
    assert contrast(style.text, style.shade) >= 4.5


def test_micro_batches_are_written_in_ink_on_every_kind_of_compute() -> None:
    assert {style.text for kind, style in STYLES.items() if kind not in ("transfer", "wait")} == {INK}


def test_text_is_readable_on_the_card() -> None:
    assert contrast(INK, PAPER) >= 7


@pytest.mark.parametrize(("a", "b"), list(combinations(STYLES.values(), 2)))
def test_two_kinds_differ_without_color(a: Style, b: Style) -> None:
    assert a.path != b.path
    assert a.shape != b.shape


@pytest.mark.parametrize("style", [style for style in STYLES.values() if style.path])
def test_a_pattern_stands_out_from_its_bar_in_grey(style: Style) -> None:
    assert contrast(style.fill, style.shade) >= 1.35


def test_forward_and_backward_differ_in_grey_where_bars_are_too_narrow_for_patterns() -> None:
    forward, backward, transfer = (STYLES[kind].fill for kind in ("forward", "backward", "transfer"))
    assert contrast(forward, backward) >= 1.5
    assert contrast(backward, transfer) >= 1.5


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("ground", [PAPER, DARK])
def test_lines_stand_out_in_both_themes(line: Line, ground: str) -> None:
    assert contrast(line.color, ground) >= 3


def test_lines_differ_without_color() -> None:
    assert len({line.dash for line in LINES}) == len({line.symbol for line in LINES}) == len(LINES)
