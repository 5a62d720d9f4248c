"""Intervals and calibration: the uncertainty of an estimate, and the gain from one measured step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import _published as published
from course_lib.planner import DEVICES, Cluster, ModelSpec, Plan, calibrate, estimate
from course_lib.planner.models import GPT3, MIXTURES

MODEL = ModelSpec(24, 2048, 16, 2048, 51200)
CLUSTER = Cluster(nodes=4)
PLAN = Plan(dp=32, micro_batch=2, recompute="full", overlap=())
WIDE = Plan(dp=4, tp=8)
BATCH = 256


def seconds(cluster: Cluster, plan: Plan = PLAN) -> float:
    return estimate(MODEL, cluster, plan, BATCH).step_time.total


def width(cluster: Cluster) -> float:
    time = estimate(MODEL, cluster, PLAN, BATCH).step_time
    return math.log(time.high / time.low)


def test_the_estimate_lies_in_the_middle_of_its_interval() -> None:
    found = estimate(MODEL, CLUSTER, PLAN, BATCH)
    assert found.step_time.low < found.step_time.total < found.step_time.high
    assert found.step_time.low * found.step_time.high == pytest.approx(found.step_time.total**2)
    low, high = found.step_time.around(found.tokens_per_second)
    assert low < found.tokens_per_second < high
    assert high / low == pytest.approx(found.step_time.high / found.step_time.low)


def test_the_fewer_stacks_of_software_were_published_the_wider_it_is() -> None:
    widths = {device.stacks: Cluster(name).spread for name, device in DEVICES.items()}
    by_stacks = [widths[stacks] for stacks in sorted(widths)]
    assert by_stacks == sorted(by_stacks, reverse=True)
    assert 0 in widths and max(widths) >= 3


def test_an_interval_says_where_it_is_from_and_what_nothing_stands_behind() -> None:
    assert "published steps of" in estimate(MODEL, CLUSTER, PLAN, BATCH).interval
    unknown = estimate(MODEL, Cluster("H200-141GB", nodes=4), PLAN, BATCH).interval
    assert "by how far devices are apart. It is extrapolated: no step was published with H200-141GB. Measure" in unknown
    fp8 = Plan(dp=4, tp=2, pp=4, schedule="zb_h1", precision="fp8")
    said = estimate(MODEL, Cluster("H100-80GB", nodes=4), fp8, BATCH).interval
    assert "no step was published with schedule='zb_h1' or 1.3 billion parameters. Measure" in said


def test_an_interval_says_whether_such_a_step_was_published() -> None:
    """GB300: one source, in 8 and 4 bits, of 8 to 405 billion parameters on up to 256 devices."""
    plan = Plan(dp=8, tp=8, precision="mxfp8", zero=3)
    inside = estimate(GPT3["175B"], Cluster("GB300-279GB", 1, 64), plan, BATCH).interval
    assert "by published steps of 1 stack of software on GB300-279GB." in inside
    assert "It is inside what is known: steps of its precision, size and number of devices were published." in inside
    for other, what in ((replace(plan, precision="bf16"), "precision='bf16'"), (Plan(64, 8, precision="fp8"), "more")):
        cluster = Cluster("GB300-279GB", other.dp // 8, 64)
        assert f"no step was published with {what}" in estimate(GPT3["175B"], cluster, other, BATCH).interval
    small = estimate(MODEL, Cluster("GB300-279GB", 1, 64), plan, BATCH).interval
    assert "no step was published with 1.3 billion parameters. Measure" in small


def test_a_mixture_is_extrapolated_where_only_dense_models_were_published() -> None:
    mixture, plan = MIXTURES["Qwen3 30B"], Plan(dp=16, ep=8, zero=1)
    a100, h100 = (Cluster(name, nodes=2) for name in ("A100-80GB", "H100-80GB"))
    assert "with A100-80GB and experts. Measure" in estimate(mixture, a100, plan, BATCH).why
    assert "It is inside" in estimate(mixture, h100, plan, BATCH).why


def test_what_was_measured_is_known() -> None:
    fast, plan = Cluster("H100-80GB", nodes=4), Plan(dp=4, tp=2, pp=4, schedule="zb_h1", precision="fp8")
    mine = calibrate(MODEL, fast, plan, BATCH, 1.1 * seconds(fast, plan))
    assert "steps of its precision, size and number of devices were published or measured." in said(mine, plan)
    assert "no step was published or measured with schedule='gpipe'" in said(mine, replace(plan, schedule="gpipe"))
    blackwell = Cluster("B200-180GB", nodes=2)
    mine = calibrate(MODEL, blackwell, Plan(dp=16), BATCH, 1.1 * seconds(blackwell, Plan(dp=16)))
    assert "extrapolated" not in said(mine, Plan(dp=16))
    new = Cluster("H200-141GB", nodes=2)
    mine = calibrate(MODEL, new, Plan(dp=16), BATCH, 1.1 * seconds(new, Plan(dp=16)))
    assert "extrapolated" not in said(mine, Plan(dp=16))


def said(cluster: Cluster, plan: Plan) -> str:
    """The end of an estimate's reasons, which are the end of its interval, too."""
    found = estimate(MODEL, cluster, plan, BATCH)
    evidence = found.interval.partition(". ")[2]
    assert found.why.endswith(evidence)
    return evidence


def test_a_measured_step_comes_out_as_measured_and_the_interval_is_narrower() -> None:
    mine = calibrate(MODEL, CLUSTER, PLAN, BATCH, 1.3 * seconds(CLUSTER))
    assert seconds(mine) == pytest.approx(1.3 * seconds(CLUSTER), rel=1e-4)
    assert width(mine) < width(CLUSTER)
    assert "1 measured step of this machine" in estimate(MODEL, mine, PLAN, BATCH).interval


def test_other_plans_on_a_calibrated_machine_are_slower_too() -> None:
    mine = calibrate(MODEL, CLUSTER, PLAN, BATCH, 1.3 * seconds(CLUSTER))
    assert 1.15 < seconds(mine, WIDE) / seconds(CLUSTER, WIDE) < 1.4


def test_several_steps_are_right_on_average() -> None:
    cluster, errors = CLUSTER, (1, 1.08, 0.9)
    plans = PLAN, WIDE, replace(PLAN, micro_batch=2)
    for plan, chance in zip(plans, errors, strict=True):
        cluster = calibrate(MODEL, cluster, plan, BATCH, chance * seconds(CLUSTER, plan))
    off = [seconds(CLUSTER, plan) / seconds(cluster, plan) for plan in plans]
    assert math.log(math.prod(errors) * math.prod(off)) == pytest.approx(0, abs=1e-4)
    assert len(cluster.measured) == 3 and width(cluster) < width(CLUSTER)


def test_what_lesson_09_says_of_three_published_runs_and_of_calibrating_one() -> None:
    """Published: 14.45 s, 60.1 s and 105.22 s; BLOOM's steps before its final run are in benchmarks/published.json."""
    rows = {row["id"]: row for row in published.rows_of("step time")}
    first, *others = (published.predict(rows[name]) for name in ("narayanan-39B-step", "mtnlg-280", "bloom-step"))
    assert first.step_time.total == pytest.approx(14.45, rel=0.05)
    for one, seconds in zip(others, (60.1, 105.22), strict=True):
        assert abs(one.step_time.total / seconds - 1) > 0.1
        assert one.step_time.low < seconds < one.step_time.high
    final, shares, errors = rows["bloom-step"], [], []
    mine = Cluster(**final["cluster"])
    for row in (row for name, row in rows.items() if name.startswith("bloom-sweep")):
        step = published.model_of(row), published.plan_of(row), row["global_batch"], published.published_seconds(row)
        alone = calibrate(step[0], Cluster(**final["cluster"]), *step[1:])
        mine = calibrate(step[0], mine, *step[1:])
        shares.append(alone.spec.matmul)
        errors.append(abs(published.predict(final, alone.spec.matmul).step_time.total / 105.22 - 1))
    assert len(shares) == 4
    assert max(shares) < DEVICES["A100-80GB"].matmul
    like_final = [name for name in rows if name.startswith("bloom-sweep")].index(
        "bloom-sweep-72L-h64-dp16tp4pp6mb2-time"
    )
    assert min(errors) == errors[like_final] < 0.02
    together = estimate(published.model_of(final), mine, published.plan_of(final), 2048).step_time
    assert together.low < 105.22 < together.high and abs(together.total / 105.22 - 1) < 0.02
    assert together.high / together.low < others[1].step_time.high / others[1].step_time.low


@pytest.mark.parametrize(
    ("measured", "complaint"),
    [
        (0, "measured_seconds=0 is no time of a step"),
        (float("nan"), "measured_seconds=nan is no time of a step"),
        (0.001, "measured_seconds=0.001 needs matrix products at 125% of the peak of A100-80GB"),
        (1e6, r"measured_seconds=1e\+06 needs matrix products at 2% of the peak .* of one whole step"),
    ],
)
def test_a_time_that_no_such_machine_could_need_is_refused(measured: float, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        calibrate(MODEL, CLUSTER, PLAN, BATCH, measured)
