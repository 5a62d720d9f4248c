"""All right solutions pass, and all wrong ones are told their mistake, each mistake of the bank its own only.

Programs whose runs end well share a launch for each case, as the mistakes in a check do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from course_lib import data, launch
from course_lib.classroom.checks.evidence import Evidence
from course_lib.classroom.checks.exercise import Exercise, _again, _judge
from course_lib.classroom.checks.part import Case, Mistake, Observed
from course_lib.classroom.checks.verdict import Verdict
from lessons.L02_data_parallelism import checks_averaging as averaging
from lessons.L02_data_parallelism import checks_ring as ring
from lessons.L02_data_parallelism import checks_splitting as splitting
from tests.classroom.checks.prices import costs, verdict_on
from tests.lessons.bank import ACCIDENTS, RIGHT, WRONG
from tests.lessons.L02_data_parallelism import solutions as s
from tests.lessons.parts import checks

pytestmark = pytest.mark.long

Program = Callable[..., object]


@functools.cache
def observed(exercise: Exercise, case: Case) -> dict[Program, list[Observed]]:
    """The results of all programs of an exercise whose runs end well, by rank, from one launch.

    Without the mistakes that are told in an earlier case: a check names none of them any more.
    """
    programs = [exercise.right, *(one.program for one in untold(exercise, case)), *RIGHT.get(exercise, [])]
    return dict(zip(programs, map(list, zip(*exercise.run(programs, case).results, strict=True)), strict=True))


def untold(exercise: Exercise, case: Case) -> list[Mistake]:
    cases = exercise.all_cases(0)[:-1]
    earlier = cases[: cases.index(case)] if case in cases else []
    found = [Evidence(exercise, one, [], observed(exercise, one)[exercise.right]) for one in earlier]
    return [one for one in exercise.mistakes if not one.fails and all(before.would_pass(one) for before in found)]


@functools.cache
def shared_mistakes(exercise: Exercise, case: Case) -> dict[Mistake, list[Observed]]:
    return {one: observed(exercise, case)[one.program] for one in untold(exercise, case)}


@pytest.fixture(autouse=True, scope="module")
def share_launches() -> Iterator[None]:
    """Let exercises compare with these results, in place of launches of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exercise, "run_mistakes", shared_mistakes)
        yield


def test_an_exercise_compares_with_shared_launches() -> None:
    case = checks.split_batch.all_cases(0)[0]
    shared = observed(checks.split_batch, case)
    assert all(seen is shared[one.program] for one, seen in checks.split_batch.run_mistakes(case).items())


def verdicts(
    exercise: Exercise,
    programs: list[Program],
    leave: Callable[[list[Program], Case], list[list[Observed]]],
    cases: list[Case],
) -> dict[Program, Verdict]:
    """The verdict on each program that does not pass. leave: returns the results of programs in a case, by program."""
    passed: dict[Program, list[Evidence]] = {program: [] for program in programs}
    told: dict[Program, Verdict] = {}
    for case in cases:
        if not (left_over := [program for program in programs if program not in told]):
            break
        right = observed(exercise, case)[exercise.right]
        for program, left in zip(left_over, leave(left_over, case), strict=True):
            found = Evidence(exercise, case, left, right)
            if verdict := _judge(found, passed[program]):
                later = functools.partial(_again, exercise, program, case, exercise.all_cases(0))
                told[program] = _judge(found, passed[program], later) or verdict if ", " in verdict.idea else verdict
            passed[program].append(found)
    return told


def known_verdicts(exercise: Exercise, programs: list[Program], cases: list[Case]) -> dict[Program, Verdict]:
    """The verdicts on programs of the shared launches."""
    return verdicts(exercise, programs, lambda left, case: [observed(exercise, case)[one] for one in left], cases)


@functools.cache
def bank(exercise: Exercise) -> dict[Program, Verdict]:
    """The verdicts on a bank's mistakes."""
    programs = [mistake.program for mistake in exercise.mistakes if not mistake.fails]
    return known_verdicts(exercise, programs, exercise.all_cases(0)[:-1])


def verdicts_on(exercise: Exercise, programs: list[Program]) -> dict[Program, Verdict]:
    def leave(left_over: list[Program], case: Case) -> list[list[Observed]]:
        run = exercise.run(left_over, case)
        return [list(observed) for observed in zip(*run.results, strict=True)]

    return verdicts(exercise, programs, leave, exercise.all_cases(0)[:-1])


MISTAKES = [(exercise, mistake) for exercise in checks.PARTS for mistake in exercise.mistakes]


@pytest.mark.parametrize(
    ("exercise", "mistake"), [pytest.param(*one, id=f"{one[0].name}-{one[1].program.__name__}") for one in MISTAKES]
)
def test_a_mistake_is_recognized_as_itself_and_only_as_itself(exercise: Exercise, mistake: Mistake) -> None:
    verdict = exercise(mistake.program) if mistake.fails else bank(exercise)[mistake.program]
    assert verdict.idea == mistake.program.__name__


@pytest.mark.parametrize("exercise", checks.PARTS, ids=lambda exercise: exercise.name)
def test_mistakes_ask_and_are_at_least_five(exercise: Exercise) -> None:
    assert len(exercise.mistakes) >= (3 if exercise.budget else 5)
    words = [mistake.advice for mistake in exercise.mistakes]
    assert all(said.idea.endswith((".", "`.")) and said.question.endswith("?") for said in words)


@pytest.mark.parametrize("exercise", checks.PARTS, ids=lambda exercise: exercise.name)
def test_right_solutions_pass_however_they_are_written(exercise: Exercise) -> None:
    """All right solutions pass all cases; nbval runs a whole check of one, with other numbers."""
    assert known_verdicts(exercise, RIGHT.get(exercise, []), exercise.all_cases(0)[:-1]) == {}


@functools.cache
def wrong_verdicts(exercise: Exercise) -> dict[Program, Verdict]:
    return verdicts_on(exercise, list(WRONG.get(exercise, {})))


@pytest.mark.parametrize(
    ("exercise", "program"),
    [pytest.param(one, program, id=program.__name__) for one in checks.PARTS for program in WRONG.get(one, {})],
)
def test_a_wrong_result_without_an_idea_is_told_what_is_certain(exercise: Exercise, program: Program) -> None:
    assert WRONG[exercise][program] in wrong_verdicts(exercise)[program].message


@pytest.mark.parametrize(
    ("exercise", "program"), [pytest.param(one, p, id=p.__name__) for one in ACCIDENTS for p in ACCIDENTS[one]]
)
def test_a_run_that_does_not_end_says_why(exercise: Exercise, program: Program) -> None:
    assert ACCIDENTS[exercise][program] in str(exercise(program)).replace("\n", " ")


def verdict_of(exercise: Exercise, name: str) -> Verdict:
    (verdict,) = (verdict for program, verdict in wrong_verdicts(exercise).items() if program.__name__ == name)
    return verdict


def facts_of(exercise: Exercise, name: str) -> dict[str, str]:
    return dict(verdict_of(exercise, name).facts)


def test_what_was_expected_and_what_is_there_are_shown() -> None:
    facts = facts_of(checks.average_gradients, "knows_two_ranks")
    assert float(facts["Got"]) == pytest.approx(1.5 * float(facts["Expected"]), rel=1e-4)
    assert facts_of(checks.split_batch, "copies_into_zeros") == {
        "Where": "rank 0, a row of the result[targets]",
        "Expected": "int64, shape []",
        "Got": "float32, shape []",
    }


def test_one_number_is_shown_with_what_it_means() -> None:
    """Two micro-batches of 2 + 4 s on each of 4 ranks take 30 s; 48 samples are 6 micro-batches of 8, or 12 of 4."""
    idle, best = verdict_of(checks.bubble, "of_two_stages"), verdict_of(checks.best_micro_batches, "twice_as_many")
    assert dict(idle.facts)["Expected"] == "0.6, or 18 s of the 30 s that a step takes"
    assert idle.message.endswith("not what it should be: 0.2, or 6 s of the 30 s that a step takes.")
    assert dict(best.facts)["Expected"] == "6: 9 turns of 12.5 s, and stage 0 holds 32 samples, with room for 1000"
    assert best.message.endswith("12: 15 turns of 8.5 s, and stage 0 holds 16 samples, with room for 1000.")
    assert "Got" not in dict(idle.facts)  # as the message says it


# The right solutions beside one process


def test_the_right_gradient_is_that_of_one_process_with_the_whole_minibatch() -> None:
    case = averaging._case((3, 3, 2, 2), seed=5)
    model, _ = averaging._case((10,), seed=5).arguments(0)
    for left in (programs[0] for programs in checks.average_gradients.run_right(case).results):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(left.values[f"{name}.grad"], parameter.grad, rtol=1e-12, atol=1e-14)


def test_a_share_of_one_rank_alone_is_the_mean_loss_over_its_samples() -> None:
    model, samples = averaging._case((2, 1), seed=3).arguments(0)
    problems, _ = data.train_test_split(3)
    inputs, targets = data.examples([problems[0], problems[len(problems) // 3]])
    before = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    data.answer_loss(model(inputs), targets).backward()
    assert samples == 2
    for mine, parameter in zip(before, model.parameters(), strict=True):
        assert (mine is None) == (parameter.grad is None)
        assert mine is None or torch.equal(mine, parameter.grad)


def averaged_by_pytorch(rank: int, case: Case) -> dict[str, torch.Tensor]:
    model, minibatches, _ = case.arguments(rank)
    parallel = nn.parallel.DistributedDataParallel(model)
    for x, targets in minibatches:
        model.zero_grad()
        nn.functional.mse_loss(parallel(x), targets).backward()
    return {f"{name}.grad": one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("case", checks.backward_in_buckets.cases(3)[2::2], ids=lambda case: case.text)
def test_gradients_that_left_in_buckets_are_those_of_pytorch(case: Case) -> None:
    pytorch = launch(averaged_by_pytorch, case.world_size, (case,)).results
    for theirs, left in zip(pytorch, checks.backward_in_buckets.run_right(case).results, strict=True):
        for name, gradient in theirs.items():
            torch.testing.assert_close(left[0].values[name], gradient, rtol=1e-12, atol=1e-14)


def test_the_right_ring_leaves_the_sum() -> None:
    case = ring._case(4, 3, 3)
    total = sum(case.arguments(rank)[0] for rank in range(4))
    assert all(torch.equal(left[0].values["tensor"], total) for left in checks.ring_all_reduce.run_right(case).results)


@pytest.mark.parametrize(
    ("samples", "ranks", "sizes"), [(11, 3, [3, 4, 4]), (4, 4, [1, 1, 1, 1]), (9, 4, [2, 2, 2, 3])]
)
def test_the_right_shares_are_the_batch(samples: int, ranks: int, sizes: list[int]) -> None:
    batch = torch.arange(samples)
    shares = [splitting.right(batch, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat(shares), batch)
    assert sorted(map(len, shares)) == sizes


# The price


def test_a_view_costs_nothing_and_a_copy_its_bytes() -> None:
    assert [*costs(checks.split_batch, splitting.right)] == ["idle time (emulated)"]  # what is 0 at best is not named
    yours, best = costs(checks.split_batch, s.copied_by_index)["bytes of extra memory on a rank"]
    assert (int(yours) >= 3 * 5 * 4, best) == (True, "0")  # and the index itself
    idle = f"{1 - 10 / (4 * 3):.0%}"
    assert costs(checks.split_batch, splitting.right)["idle time (emulated)"] == (idle, idle)


def ring_bytes(n_bytes: int) -> int:
    """The fewest bytes of an all-reduce on 4 ranks (Patarasuk and Yuan 2009)."""
    return 2 * 3 * n_bytes // 4


def size_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def test_the_best_average_is_one_all_reduce_of_all_gradients_and_the_samples() -> None:
    size = size_of(checks.average_gradients.price_case.arguments(0)[0])
    price = costs(checks.average_gradients, averaging.right)
    assert price["bytes a rank sends"] == (f"{ring_bytes(size + 8):,}",) * 2
    yours, best = price["bytes of extra memory on a rank"]
    assert size <= int(yours.replace(",", "")) <= 3 * size and best == "0"
    exchanging = 6 * (0.002 + (size + 8) / 4 / 1.5e6)
    idle = verdict_on(checks.average_gradients, averaging.right).idle
    assert idle.best == idle.timeline.idle_fraction() == pytest.approx(exchanging / (0.15 + exchanging), rel=1e-9)


def test_buckets_hide_behind_the_backward_pass_and_the_last_does_not() -> None:
    """272 numbers for each layer, so that two fill a bucket of 500."""
    exchanging = 6 * (0.002 + 2 * 272 * 8 / 4 / 5e4)
    idle = verdict_on(checks.backward_in_buckets, s.divided_before).idle
    assert exchanging < 2 * 0.1
    assert idle.timeline.idle_fraction() == pytest.approx(exchanging / (6 * 0.15 + exchanging), rel=1e-9)


def test_what_costs_too_much_gets_a_remark() -> None:
    gathered, often = verdict_on(checks.average_gradients, s.by_gathering).remarks
    assert "times the bytes that are needed" in gathered and "pays the latency" in often
    assert verdict_on(checks.average_gradients, averaging.right).remarks == ()


def test_the_best_ring_sends_its_chunks_and_holds_one() -> None:
    size = 3_000 * 8
    price = costs(checks.ring_all_reduce, s.one_loop)
    assert price["bytes a rank sends"] == (f"{ring_bytes(size):,}",) * 2
    assert price["bytes of extra memory on a rank"][1] == f"{size // 4:,}"
    exchanging = 6 * (0.005 + size / 4 / 6e5)
    idle = verdict_on(checks.ring_all_reduce, s.one_loop).idle
    assert idle.best == idle.timeline.idle_fraction() == pytest.approx(exchanging / (0.1 + exchanging), rel=1e-9)


def test_ranks_that_take_turns_are_idle_longer() -> None:
    idle = verdict_on(checks.ring_all_reduce, s.rank_0_receives_first).idle
    assert idle.timeline.idle_fraction() > idle.best


def test_the_next_launch_works() -> None:
    assert launch(lambda rank: rank, 2).results == [0, 1]
