"""Who holds what, read back from its SVG, and the run behind it, against what each stage of ZeRO promises."""

from __future__ import annotations

import re
from functools import partial

import pytest

from course_lib.classroom.runs.holding import held_step
from course_lib.figures.holdings import Moment, holdings
from course_lib.instruments.ledger import Bytes
from course_lib.timeline import Span, Timeline
from lessons.L03_sharded_data_parallelism.runs import shard

TIMELINE = Timeline(
    [Span(rank, "transfer", "all_gather", 1.0, 2.0, bytes=50) for rank in (0, 1)] + [Span(0, "forward", "", 0.0, 4.0)],
    2,
    "emulated",
)
SHARD = Bytes(parameters=50, gradients=50, optimizer=100)
WHOLE = Bytes(parameters=100, gradients=100, optimizer=200)


def moments(held: Bytes, gathered: int) -> list[Moment]:
    return [
        Moment(0.0, "begins", held, 0),
        Moment(2.0, "computes layer 1", held, gathered),
        Moment(3.0, "updates its weights", held, 0),
        Moment(4.0, "is done", held, 0),
    ]


def seen(markup: str, words: str) -> list[tuple[str, str]]:
    """The times and content of each group with these words."""
    groups = re.findall(r'<g data-when="([^"]+)"[^>]*>(.*?)</g>', markup, re.DOTALL)
    return [(when, inside) for when, inside in groups if words in inside]


def blocks(markup: str, part: str) -> int:
    return len(re.findall(rf'<rect[^>]*height="18"[^>]*fill="[^"]*-{part}\)?"', markup))


def test_a_layer_is_whole_only_while_it_computes() -> None:
    markup = holdings(TIMELINE, [moments(SHARD, 50)] * 2, 100).inline()
    for when, inside in seen(markup, "computes layer 1"):
        assert when == "0.5000 0.7500"
        assert inside.count("<rect") == 2  # both shards of it
    for _, inside in seen(markup, "updates"):
        assert "<rect" not in inside


def test_a_shard_flies_from_each_other_rank_while_it_is_gathered() -> None:
    markup = holdings(TIMELINE, [moments(SHARD, 50)] * 2, 100).inline()
    flights = re.findall(r'<g data-when="([^"]+)"[^>]*data-fly="([^ ]+) ([^"]+)"', markup)
    assert [when for when, *_ in flights] == ["0.2500 0.5000"] * 2
    assert {float(right) > 0 for _, right, _ in flights} == {True, False}
    assert {float(down) for *_, down in flights} == {-26.0}  # up to where the layer computes


def test_all_bars_of_memory_share_a_scale_and_the_sentence_says_the_shards() -> None:
    few, many = (holdings(TIMELINE, [moments(held, 0)] * 2, 100, most=400) for held in (SHARD, WHOLE))
    assert many.summary.endswith("each holds everything, like all others; 400 B before the update, and 400 B at most.")
    assert "only its shard of parameters, gradients and optimizer state; 200 B" in few.summary
    ends = []
    for picture in (few, many):
        (_, bar), *_ = seen(picture.inline(), f"{'200' if picture is few else '400'} B")
        ends.append(sum(float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', bar)))
    assert ends[1] == pytest.approx(2 * ends[0], rel=1e-3)


@pytest.mark.parametrize(("stage", "shared"), [(0, ""), (1, "o"), (2, "go"), (3, "pgo")])
def test_real_ranks_hold_only_the_shard_that_their_stage_promises(stage: int, shared: str) -> None:
    step = held_step(partial(shard, stage=stage))
    for own in step.moments:
        before = own[-2].held
        for kind, size in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            share = getattr(before, kind) / size / step.whole
            assert share == pytest.approx(0.25 if kind[0] in shared else 1, rel=0.3), kind
        gathered = [moment.gathered for moment in own if moment.what.startswith("computes layer")]
        assert len(gathered) == 2 * 4 and all(bool(one) is (stage == 3) for one in gathered)
        assert own[-2].gathered == 0
