"""Plans as answers: their notation, and plans that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.classroom.questions import plan_text
from course_lib.classroom.questions.forms import PlanForm
from course_lib.classroom.questions.outcome import Outcome
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan
from course_lib.planner.search import legal_plans
from course_lib.planner.spec import PRECISIONS, RECOMPUTE

MODEL = ModelSpec(layers=24, hidden=2048, heads=16, sequence=2048, vocab=51200)


def judge(one: Estimate) -> Outcome:
    return Outcome(one.plan.tp == 2, f"{one.plan.devices} devices", "so the judge says")


FORM = PlanForm(MODEL, Cluster(), 64, judge, "two tensor ranks", Plan(dp=8))


@pytest.mark.parametrize(
    "text",
    [
        "dp=4 tp=2 zero=1 recompute=selective sequence_parallel=true",
        "  tp = 2, dp=4,zero=1\nrecompute='selective'  sequence_parallel=TRUE ",
        "DP=4 TP=2 ZeRO=1 recompute=selective sequence_parallel=true",
        'Plan(dp=4, tp=2, zero=1, recompute="selective", sequence_parallel=True)',
        repr(Plan(dp=4, tp=2, zero=1, recompute="selective", sequence_parallel=True)),
    ],
)
def test_a_plan_can_be_written_in_several_ways_and_is_kept_in_one(text: str) -> None:
    assert plan_text.parse(text) == Plan(dp=4, tp=2, zero=1, recompute="selective", sequence_parallel=True)
    assert FORM.read(text) == "dp=4 tp=2 pp=1 micro_batch=1 zero=1 sequence_parallel=True recompute=selective"


@given(
    st.builds(
        Plan,
        *(st.integers(1, 64),) * 4,
        zero=st.integers(1, 3),
        sequence_parallel=st.booleans(),
        recompute=st.sampled_from(RECOMPUTE[1:]),
        precision=st.sampled_from(PRECISIONS),
        cp=st.integers(1, 4),
        overlap=st.sampled_from([(), ("data",), ("data", "tensor")]),
        recomputed=st.sampled_from([1.0, 0.5, 0.125]),
    )
)
def test_what_is_written_reads_as_the_same_plan(plan: Plan) -> None:
    assert plan_text.parse(plan_text.write(plan)) == plan
    assert plan_text.parse(repr(plan)) == plan


def test_shards_and_virtual_stages_are_written_too() -> None:
    plan = Plan(dp=4, pp=2, zero=1, shards=2, schedule="interleaved_1f1b", virtual_stages=3)
    assert plan_text.parse(plan_text.write(plan)) == plan


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "dp=1 x tp=1 x pp=1 makes 1, but the cluster has 8 devices"),
        ("eight replicas", "'eight replicas' is no part of a plan; write for instance"),
        ("dp=8 and tp=1", "'and' is no part of a plan"),
        ("dp=8 gpus=8", "'gpus' is nothing that a plan has; it has dp, tp, pp"),
        ("dp=8 offload=true", "'offload' is nothing that a plan has"),
        ("dp=8 DP=4", "'dp=8 DP=4' has a field twice; write each once"),
        ("dp=eight", "dp=eight is no value for it; write for instance dp=1"),
        ("dp=-8", "dp=-8 has to be at least 1"),
        ("dp=8.0", "dp=8.0 is no value for it"),
        ("dp=" + "9" * 5000, "is no value for it"),
        ("dp=8 sequence_parallel=maybe", "write for instance sequence_parallel=False"),
        ("dp=8 recompute=full recomputed=half", "write for instance recomputed=1.0"),
        ("dp=8 recompute=some", "recompute='some' is unknown; choose one of none, selective, full"),
        ("dp=4", "dp=4 x tp=1 x pp=1 makes 4, but the cluster has 8 devices; with dp=8 it would"),
        ("dp=8 micro_batch=3", "global_batch=64 does not divide among dp=8 ranks in micro-batches of 3"),
        ("dp=8 precision=fp8", "precision='fp8' is nothing A100-80GB computes in; it has bf16, fp16, fp32"),
        ("dp=0", "dp=0 has to be at least 1"),
    ],
)
def test_what_is_no_plan_here_is_refused_in_a_sentence(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        FORM.read(text)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.text(alphabet="dptz =1248,(')\n\"_x", max_size=60))
def test_no_text_makes_it_stumble(text: str) -> None:
    try:
        answer = FORM.read(text)
    except ValueError:
        return
    assert FORM.read(answer) == answer


def test_a_plan_is_judged_by_its_estimate_and_only_a_right_one_is_told_why() -> None:
    right, wrong = FORM.run(FORM.read("dp=4 tp=2")), FORM.run(FORM.read(Plan(dp=8)))
    assert (right.right, right.happened, right.why) == (True, "8 devices", "so the judge says\n\ntwo tensor ranks")
    assert (wrong.right, wrong.why) == (False, "so the judge says")
    assert FORM.words("dp=4 tp=2 precision=fp16") == "data 4 x tensor 2 x pipeline 1, micro-batches of 1, in fp16"
    assert FORM.why == "two tensor ranks"
    assert FORM.read(FORM.example) == FORM.example


def test_every_plan_that_a_search_tries_can_be_chosen() -> None:
    choices = FORM.choices
    for plan in legal_plans(MODEL, FORM.cluster, 64, "bf16"):
        assert all(str(getattr(plan, name)) in values for name, values in choices.items())
    assert choices["dp"] == ["1", "2", "4", "8"]
    assert "precision: bf16, fp16, fp32" in FORM.lines
    assert replace(FORM, start=Plan(dp=4, tp=2)).example == "dp=4 tp=2 pp=1 micro_batch=1"
