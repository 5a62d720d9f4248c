"""Nights with a fault: all that is seen comes from running one job, and what is done changes the job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import course
from benchmarks import scenarios as guessers
from course_lib import data
from course_lib.classroom import journal
from course_lib.classroom.runs.training import SMALL
from course_lib.classroom.scenarios.jobs import faults, training
from course_lib.classroom.scenarios.jobs.culprits import ACTS, CULPRITS, CUT
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS, checkpoints
from course_lib.classroom.scenarios.jobs.job import TIMED, Change, Job
from course_lib.classroom.scenarios.jobs.night import Night, night, reached
from course_lib.classroom.scenarios.jobs.step import step
from course_lib.model import TinyGPT
from course_lib.ranks import Link, launch
from lessons.S06_postmortem.case import redesign
from lessons.S08_two_clusters.case import CLUSTERS
from tests.lessons import cases as scenarios

RANKS, STEPS = 4, 4
SMALLER = Job(dp=RANKS, samples=16, nodes=2, seed=7)


@pytest.fixture(autouse=True)
def own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_STATE", str(tmp_path))
    monkeypatch.delenv("COURSE_POLL", raising=False)


# What a job learns, held against programs written by hand, on real ranks


def by_hand(rank: int, batches: Sequence[Sequence[Tensor]], fault: str) -> tuple[list[float], Tensor]:
    """Train as the docs of PyTorch say, with a slip: the losses of this rank, and its weights."""
    model = TinyGPT(SMALL)
    kept = torch.bfloat16 if fault == "kept" else torch.float32
    master = torch.nn.Parameter(parameters_to_vector(model.parameters()).detach().to(kept, copy=True))
    optimizer = torch.optim.AdamW([master], lr=0.01 if fault == "rate" else 3e-3, betas=(0.9, 0.99))
    scale = 2.0**17 if fault == "scale" else 1024.0
    node = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    losses = []
    for inputs, targets in batches:
        share = 0 if fault == "same" else rank
        vector_to_parameters(master.detach().half().float(), model.parameters())
        loss = data.answer_loss(model(inputs[share]), targets[share])
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        sent = (gradient * scale).half()
        if fault == "corrupt" and rank == 1:
            sent[::3] *= -16
        sent = sent.float()
        if fault != "none":
            dist.all_reduce(sent, group=node if fault == "node" else None)
            sent /= 2 if fault == "node" else RANKS
        master.grad = (sent / scale).to(kept)
        if sent.isfinite().all():
            optimizer.step()
    return losses, master.detach().float()


FAULTS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "none": {"together": "none"},
    "node": {"together": "node"},
    "same": {"order": "same"},
    "corrupt": {"corrupt": 1},
    "kept": {"master_weights": False},
    "rate": {"rate": 0.01},
    "sorted": {"order": "sorted"},
    "scale": {"fixed": 2.0**17},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_learns_what_a_faulty_program_learns(fault: str) -> None:
    job = SMALLER.but(**{"fixed": 1024.0, **FAULTS[fault]})
    state, losses = training.begin(), []
    if fault == "kept":
        state = replace(state, weights=state.weights.bfloat16().float())
    for number in range(STEPS):
        state, learned = training.advance(state, job, number)
        losses.append(learned.loss)
    batches: list[Any] = [training.minibatch(SMALLER, number)[:2] for number in range(STEPS)]
    if fault == "sorted":
        problems = iter(sorted(data.train_test_split()[0]))
        batches = [data.examples([next(problems) for _ in range(SMALLER.samples)]) for _ in range(STEPS)]
        batches = [[part.unflatten(0, (RANKS, -1)) for part in batch] for batch in batches]
    ranks = launch(by_hand, RANKS, (batches, fault)).results
    means = [sum(each) / RANKS for each in zip(*(own for own, _ in ranks), strict=True)]
    assert losses == pytest.approx(means, rel=1e-4)
    for own, (_, weights) in zip(state.rows(RANKS).weights, ranks, strict=True):
        assert (own - weights).norm() < 1e-3 * weights.norm()
    assert len(state.weights) == {"none": RANKS, "node": 2}.get(fault, 1)


def test_sums_in_16_bits_overflow_where_each_gradient_fits() -> None:
    for sums, is_skipped in ((torch.float32, False), (torch.float16, True)):
        _, learned = training.advance(training.begin(), SMALLER.but(sums=sums, fixed=2.0**15), 0)
        assert max(learned.own) < float("inf")
        assert learned.is_skipped is is_skipped


def test_a_minibatch_is_split_over_the_replicas_that_there_are() -> None:
    for job in (SMALLER, SMALLER.but(dp=2), SMALLER.but(samples=8)):
        inputs, targets, weight = training.minibatch(job, 3)
        assert inputs.shape[:2] == (job.dp, job.samples // job.dp) == targets.shape[:2]
        assert weight.tolist() == [1] * job.dp


def test_what_only_the_clock_sees_trains_the_same() -> None:
    other = {
        "forward": 1.0,
        "overhead": 1.0,
        "layers": (1,),
        "buckets": 1,
        "overlap": False,
        "in_turn": True,
        "between": CUT,
    }
    other |= {"slow": (0, 2.0), "weak": (0, CUT), "loading": (0, 1.0), "stuck": ("empty", 0)}
    other |= {"saving": 0.0, "patience": 1.0}
    assert set(other) == set(TIMED)
    job = SMALLER.but(corrupt=1)
    weights = training.advance(training.begin(), job, 0)[0].weights
    for field, value in other.items():
        assert training.advance(training.begin(), job.but(**{field: value}), 0)[0].weights.equal(weights), field


def test_broken_samples_overflow_on_one_replica_and_stop_all_updates_until_the_scale_has_fallen() -> None:
    job = SMALLER.but(bad=(2, 1.0))
    state, learned = training.advance(training.begin(), job, 0)
    assert learned.is_skipped and state.scale == 2.0**15
    assert [norm == float("inf") for norm in learned.own] == [False, False, True, False]


# What the clock says, and how a job hangs


def test_the_messages_of_a_step_are_those_of_its_recipe() -> None:
    sent = {name: step(SMALLER.but(**fields).clocked(0)).timeline.bytes_sent(0) for name, fields in FAULTS.items()}
    assert sent["none"] == 0 < sent["node"] < sent["healthy"] == sent["same"] == sent["corrupt"]
    halved = step(SMALLER.but(sums=torch.float16).clocked(0)).timeline
    assert 2 * halved.bytes_sent(0) == sent["healthy"]


@pytest.mark.parametrize(
    ("fields", "odd", "where"),
    [
        ({"stuck": ("logging", 2)}, 2, "mean_loss"),
        ({"stuck": ("empty", 2)}, 2, "broadcast"),
        ({"stuck": ("loader", 2)}, 2, "samples.get"),
        ({"saving": 900.0}, 0, "storage.put"),
        ({"weak": (1, CUT)}, None, "work.wait"),
    ],
)
def test_a_job_that_hangs_leaves_the_last_call_of_each_rank(fields: dict, odd: int | None, where: str) -> None:
    hung = step(SMALLER.but(**fields).clocked(9)).hung
    assert len(hung) == RANKS
    calls = [(call.name, call.number, call.bytes) for call in hung]
    others = {call for rank, call in enumerate(calls) if rank != odd}
    assert len(others) == 1
    assert odd is None or calls[odd] not in others
    assert where in hung[odd or 0].line
    assert not any(word in hung[0].line for word in ("raise", "Error", "#"))


# A night


def a_night(*changes: Change) -> Night:
    return night(SMALLER.but(seed=3).after(*changes))


def test_a_night_is_what_training_step_by_step_gives_and_a_checkpoint_brings_it_back() -> None:
    job, state = SMALLER.but(seed=3), training.begin()
    planned = a_night().reports(24)
    for number, report in enumerate(planned):
        state, learned = training.advance(state, job, number)
        assert report.learned == learned
    assert a_night().state(24).weights.equal(state.weights)
    fault = Change(10, {"order": "same"})
    back = a_night(fault, Change(20, {"order": "shuffled"}, resume=10, minutes=30)).reports(34)
    assert [report.step for report in back[18:22]] == [18, 19, 10, 11]
    assert back[20].begins == pytest.approx(back[19].begins + back[19].seconds + 1800)
    assert back[33].learned == planned[23].learned  # fourteen steps on from the checkpoint, to the last bit
    assert back[12].learned != planned[12].learned
    assert reached(back, planned) == 24


def test_a_jitter_of_one_percent_is_on_times_alone_and_comes_from_the_seed() -> None:
    reports = a_night().reports(9)
    exact = 10 * step(SMALLER.clocked(0)).timeline.makespan
    off = [report.seconds / exact - 1 for report in reports]
    assert 0.002 < max(map(abs, off)) < 0.04
    assert len(set(off)) == 9
    assert [r.seconds for r in Night(SMALLER.but(seed=3)).reports(3)] == [r.seconds for r in reports[:3]]


@pytest.mark.parametrize(("share", "best"), [(1, "levels"), (1 / 50, "local")])
def test_which_way_two_clusters_learn_most_depends_on_what_is_between_them(share: float, best: str) -> None:
    """As the page of S8 says of its own link, and of one that carries a fiftieth."""
    link = Link(0.02, share * 1.5e6)
    ways: dict[str, dict[str, Any]] = {"levels": {"together": "levels"}, "local": {"together": "local"}}
    nights = {name: night(CLUSTERS.but(between=link, **fields)).by(4 * 3600) for name, fields in ways.items()}
    ended = {name: [one.held_out for one in run if one.held_out is not None][-1] for name, run in nights.items()}
    assert min(ended, key=ended.__getitem__) == best


# Cases


def emulated_in_no_time(job: Job) -> Any:
    return SimpleNamespace(timeline=SimpleNamespace(makespan=12.0))  # only the hours in the log come from it


@pytest.mark.parametrize("seed", [-1, 10**12, "1", 1.5])
def test_a_seed_that_is_none_gets_a_sentence(seed: object) -> None:
    with pytest.raises(ValueError, match="is no whole number from 0 to 9999"):
        scenarios.CASES["S02_night_call"].variant(seed)


def test_evidence_has_the_same_form_for_every_night(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "step", emulated_in_no_time)
    for room in scenarios.FAULTS:
        case = scenarios.CASES[room]
        for seed in range(3):
            one = case.variant(seed)
            assert len(one._settings()) == 4
            assert len(one._log()) == 9
            assert not any("{" in line or "|" in line for line in [*one._settings(), *one._log()])


@pytest.mark.parametrize("room", scenarios.FAULTS)
def test_neither_form_nor_elimination_tells_the_culprit(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "step", emulated_in_no_time)
    nights, before = (guessers.nights_of(room, range(first, first + 150)) for first in (0, 1000))
    assert {drawn.name for one in nights for drawn in one._drawn} == set(nights[0].culprits)
    for guess in (guessers.by_form, guessers.by_elimination):
        right = sum(guess(one, before) == one._drawn[0].name for one in nights)
        assert right / len(nights) <= guessers.chance(nights) + 0.1


@pytest.mark.parametrize("room", scenarios.FAULTS)
def test_innocent_nights_differ_by_more_than_culprits_change_them(room: str) -> None:
    """So no speed is the mark of one."""
    planned = [scenarios.load(room, seed).planned for seed in range(8)]
    seconds = [step(job.clocked(0)).timeline.makespan for job in planned]
    assert max(seconds) > 1.5 * min(seconds)
    assert len({job.samples for job in planned}) == 3
    assert len({job.rate for job in planned}) > 2


def test_innocent_losses_differ_by_more_than_most_culprits_change_them() -> None:
    """So no loss is the mark of one; `bench scenarios` learns fingerprints of whole nights."""
    planned = sorted((scenarios.load("S08_two_clusters", seed).planned for seed in range(8)), key=lambda job: job.rate)
    slow, quick = (night(job).reports(40)[-5:] for job in (planned[0], planned[-1]))
    assert fmean(one.learned.loss for one in slow) > 1.06 * fmean(one.learned.loss for one in quick)


def test_every_culprit_act_and_setting_has_its_words() -> None:
    assert {f"culprit: {name}" for name in CULPRITS} <= set(faults._said())
    assert set(ACTS) == set(faults.listed("acts"))
    assert set(ACTS["setting"].places(Job())) <= set(faults.listed("settings"))
    assert {name for one in CULPRITS.values() for name in one.told} <= set(INSTRUMENTS)


@pytest.mark.parametrize(("room", "seed"), [("S02_night_call", 3), ("S06_postmortem", 1)])
def test_the_rules_of_the_debrief_find_it_mend_it_and_pay_par(room: str, seed: int) -> None:
    """Two culprits in one night, and one that bends no curve; `bench scenarios` plays 40 nights of each case."""
    right, cost, par = guessers.play(scenarios.CASES[room].variant(seed))
    assert right
    assert 0 <= cost - par <= guessers.CLOSE


def test_a_night_is_measured_mended_and_paid_for() -> None:
    """The wrong place mends nothing, and all that is done is in the bill."""
    room = "S02_night_call"
    one = next(n for n in map(scenarios.CASES[room].variant, range(99)) if [d.name for d in n._drawn] == ["cut"])
    assert "The watchdog has ended rank" in str(one.evidence())
    assert "no debrief yet" in str(one.debrief())
    node = one._drawn[0].place
    assert guessers.of_calls(one) == ("cable", node)
    assert one.bill().endswith("after 0 changes and 2 measurements since.")
    wrong = one.act("node", next(other for other in range(4) if other != node))
    assert wrong.right is False
    last = checkpoints(one.story.scene)[-1]
    assert one.act("node", node, resume=last).right is True
    for wrong_call in (("nodes", 1), ("node", 9)):
        with pytest.raises(ValueError, match="choose one of"):
            one.act(*wrong_call)


def test_redesigns_are_compared_with_each_other() -> None:
    """The busiest devices are not the fastest, and the cheapest plan that fits has no room for twice the layers."""
    journal.record("ran", "S6_redesign", 0, "dp=2 pp=4 micro_batches=4", right=False)  # as kept by an earlier edition
    assert redesign(1, 8, 64).right is False  # busy for 89% of a step, and too slow
    assert redesign(8, 1, 1).right is False  # fast, and does not fit
    assert redesign(2, 4, 16).right
    rows = redesign(4, 2, 4).outcome.happened.split("```")[1].strip().splitlines()[1:]
    assert [row[:10].strip() for row in rows] == ["2 x 4, 4", "1 x 8, 64", "8 x 1, 1", "2 x 4, 16", "4 x 2, 4"]
    numbers = [list(map(float, re.findall(r"[\d.]+", row[10:]))) for row in rows]
    time, busy, _, doubled, sent, hours = zip(*numbers[1:], strict=True)
    assert hours[3] < hours[2] < hours[0] and doubled[2] < 16 < doubled[3] and sent[2] < sent[3]
    assert busy[0] > busy[3] and time[0] > time[3]
    with pytest.raises(ValueError, match="has to be 8"):
        redesign(3, 2, 4)


def test_a_wrong_instrument_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="is not there; choose one of recorder"):
        scenarios.load("S02_night_call").measure("thermometer")


def test_instructors_have_the_answers_and_students_do_not() -> None:
    page = (Path(__file__).parents[2] / "lessons" / "instructors" / "variants.md").read_text(encoding="utf-8")
    for seed in range(12):
        causes = [" and ".join(map(str, one._drawn)) for one in (scenarios.load(r, seed) for r in scenarios.FAULTS)]
        assert f"| {seed} | {' | '.join(causes)} |" in page
    assert "instructors" in course.FOR_AUTHORS
