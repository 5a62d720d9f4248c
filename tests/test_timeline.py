"""Timeline's arithmetic against counting ticks one by one, and its trace against Perfetto's format."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import timeline as timeline_module
from course_lib.timeline import COMPUTE_KINDS, KINDS, Span, Timeline, compute, progress, record_with

WORLD_SIZE = 3


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """Draw spans with whole seconds, so that sums are exact; they may overlap in any way."""
    start = draw(st.integers(0, 20))
    kind = draw(st.sampled_from(KINDS))
    return Span(
        rank=draw(st.integers(0, WORLD_SIZE - 1)),
        kind=kind,
        name=draw(st.sampled_from(["", "send", "recv", "all_reduce"])),
        start=float(start),
        end=float(start + draw(st.integers(0, 8))),
        bytes=draw(st.integers(0, 100)),
        background=kind in ("transfer", "wait") and draw(st.booleans()),
    )


timelines = st.lists(spans(), max_size=25).map(lambda some: Timeline(some, WORLD_SIZE))


def covering(timeline: Timeline, rank: int, second: int) -> list[Span]:
    return [s for s in timeline.spans if s.rank == rank and s.start <= second and second + 1 <= s.end]


def state(timeline: Timeline, rank: int, second: int) -> str:
    """The state of a rank in one whole second, the reference: straight from the definition."""
    here = covering(timeline, rank, second)
    foreground = {s.kind for s in here if not s.background}
    if "wait" in foreground:
        return "waiting"
    if "transfer" in foreground:
        return "transferring"
    return "busy" if foreground & set(COMPUTE_KINDS) else "nothing"


@given(timelines)
def test_busy_waiting_and_transferring_count_the_seconds_in_that_state(timeline: Timeline) -> None:
    for rank in range(WORLD_SIZE):
        states = [state(timeline, rank, second) for second in range(30)]
        assert timeline.busy(rank) == states.count("busy")
        assert timeline.waiting(rank) == states.count("waiting")
        assert timeline.transferring(rank) == states.count("transferring")


@given(timelines)
def test_the_idle_fraction_is_the_share_of_seconds_in_which_a_rank_does_not_compute(timeline: Timeline) -> None:
    if not timeline.makespan:
        assert timeline.idle_fraction() == 0
        return
    first = int(min(s.start for s in timeline.spans))
    last = int(max(s.end for s in timeline.spans))
    idle = sum(state(timeline, rank, second) != "busy" for rank in range(WORLD_SIZE) for second in range(first, last))
    assert timeline.idle_fraction() == pytest.approx(idle / (WORLD_SIZE * (last - first)))


@given(timelines)
def test_of_gives_each_span_to_its_rank_in_the_order_they_begin(timeline: Timeline) -> None:
    by_rank = [timeline.of(rank) for rank in range(WORLD_SIZE)]
    assert sorted(map(str, chain.from_iterable(by_rank))) == sorted(map(str, timeline.spans))
    for rank, of_rank in enumerate(by_rank):
        assert all(span.rank == rank for span in of_rank)
        assert all((a.start, -a.end) <= (b.start, -b.end) for a, b in pairwise(of_rank))


def test_time_blocked_inside_a_compute_span_is_not_busy() -> None:
    timeline = Timeline([Span(0, "backward", "", 0.0, 10.0), Span(0, "wait", "all_reduce", 4.0, 7.0)], 1)
    assert (timeline.busy(0), timeline.waiting(0)) == (7.0, 3.0)


def test_a_background_transfer_takes_no_time_from_compute() -> None:
    timeline = Timeline(
        [Span(0, "backward", "", 0.0, 10.0), Span(0, "transfer", "all_reduce", 4.0, 7.0, background=True)], 1
    )
    assert (timeline.busy(0), timeline.transferring(0)) == (10.0, 0.0)


def test_the_makespan_runs_from_the_first_start_to_the_last_end() -> None:
    timeline = Timeline([Span(1, "forward", "", 2.0, 5.0), Span(0, "forward", "", 1.0, 3.0)], 2)
    assert timeline.makespan == 4.0
    assert Timeline([], 2).makespan == 0.0


def test_bytes_are_counted_where_they_leave() -> None:
    timeline = Timeline(
        [
            Span(0, "transfer", "send", 0.0, 1.0, bytes=100, peer=1),
            Span(0, "wait", "send", 1.0, 2.0, bytes=100, peer=1),
            Span(1, "transfer", "recv", 0.0, 1.0, bytes=100, peer=0),
            Span(1, "transfer", "irecv", 0.0, 1.0, bytes=100, peer=0),
            Span(1, "transfer", "all_reduce", 1.0, 2.0, bytes=7, background=True),
        ],
        2,
    )
    assert (timeline.bytes_sent(0), timeline.bytes_sent(1)) == (100, 7)


def trace_of(timeline: Timeline, folder: Path) -> dict[str, Any]:
    timeline.to_chrome_trace(folder / "trace.json")
    return json.loads((folder / "trace.json").read_text(encoding="utf-8"))


def test_a_trace_names_its_ranks_in_order(tmp_path: Path) -> None:
    events = trace_of(Timeline([Span(1, "forward", "", 0.0, 1.0)], 2), tmp_path)["traceEvents"]
    named = {(e["name"], e["pid"]): e["args"] for e in events if e["ph"] == "M"}
    assert named["process_name", 0] == {"name": "rank 0"}
    assert named["process_sort_index", 1] == {"sort_index": 1}


def test_background_transfers_of_a_trace_begin_and_end_beside_other_spans(tmp_path: Path) -> None:
    """Perfetto drops spans of a thread that overlap; pairs of "b" and "e" with one number may."""
    spans = [
        Span(1, "forward", "", 0.0, 1.0),
        *(Span(1, "transfer", "send", t, 2.0, background=True) for t in (0.5, 0.7)),
    ]
    events = trace_of(Timeline(spans, 2), tmp_path)["traceEvents"]
    times = [(e["ph"], e["id2"]["local"], e["ts"]) for e in events if e.get("cat") == "transfer"]
    assert times == [("b", 1, 5e5), ("e", 1, 2e6), ("b", 2, 7e5), ("e", 2, 2e6)]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["forward"]


def test_a_trace_keeps_times_in_microseconds_and_a_zero_that_means_something(tmp_path: Path) -> None:
    span = Span(0, "forward", "", 0.0015, 0.004, micro_batch=0, stage=0)
    trace = trace_of(
        Timeline([span, Span(0, "transfer", "send", 0.004, 0.005, bytes=8, peer=0)], 1, "emulated"), tmp_path
    )
    forward, send = (e for e in trace["traceEvents"] if e["ph"] == "X")
    assert (forward["name"], forward["cat"], forward["ts"], forward["dur"]) == ("forward", "forward", 1500, 2500)
    assert forward["args"] == {"micro_batch": 0, "stage": 0}
    assert send["args"] == {"bytes": 8, "peer": 0}
    assert trace["otherData"] == {"origin": "emulated"}


class Diary:
    """A recorder that writes down its calls."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def begin(
        self, kind: str, name: str, micro_batch: int | None, stage: int | None, work: float, includes: str
    ) -> None:
        self.told.append(("begin", kind, name, micro_batch, stage, work, includes))

    def progress(self, fraction: float) -> None:
        self.told.append(("progress", fraction))

    def end(self, failed: bool) -> None:
        self.told.append("failed" if failed else "end")


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Diary:
    monkeypatch.setattr(timeline_module, "_recorder", None)  # and restore the previous recorder afterwards
    diary = Diary()
    record_with(diary)
    return diary


def test_a_mark_tells_the_recorder_what_begins_how_far_it_is_and_that_it_ended(diary: Diary) -> None:
    with compute("backward", "block 3", micro_batch=0, stage=2, work=1.5, includes="weight_grad"):
        progress(0.5)
    assert diary.told == [("begin", "backward", "block 3", 0, 2, 1.5, "weight_grad"), ("progress", 0.5), "end"]


def test_a_mark_ends_although_the_code_in_it_raises(diary: Diary) -> None:
    with pytest.raises(ZeroDivisionError), compute("forward"):
        _ = 1 / 0
    assert diary.told[-1] == "failed"


def test_marks_do_nothing_without_a_recorder(diary: Diary) -> None:
    record_with(None)
    with compute("forward"):
        progress(0.5)
    assert diary.told == []


@pytest.mark.parametrize("kind", ["wait", "transfer", "Forward"])
def test_only_compute_can_be_marked(kind: str) -> None:
    with (
        pytest.raises(ValueError, match=f"kind='{kind}' is not a kind of compute; choose one of forward"),
        compute(kind),
    ):
        pass
    with pytest.raises(ValueError, match=f"includes='{kind}' is not a kind"), compute("forward", includes=kind):
        pass
