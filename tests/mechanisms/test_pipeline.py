"""Pipelines on real ranks, against one process with the whole model and against PyTorch's own runtime.

Every schedule takes each stage's micro-batches in order, so a process that runs the whole model on one micro-batch
after the other adds up the same numbers in the same order: there, bits have to be equal. The whole minibatch at once
adds up in another order. A gradient is a sum over samples x positions, of products that are themselves sums as long as
the widest layer, and n numbers of rounding error eps make an error of at most n eps relative to the sum of magnitudes;
`close` allows that relative to the largest number in the tensor.
"""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as theirs
from torch import Tensor, nn

from course_lib import Pace, RankFailed, data, launch
from course_lib.mechanisms import batches, between_stages
from course_lib.mechanisms.between_stages import StageMessages
from course_lib.mechanisms.pipeline import run_schedule
from course_lib.model import GPTConfig, TinyGPT
from course_lib.schedules import SCHEDULES, Action, Schedule, ScheduleError
from tests import random_schedules
from tests.mechanisms.training import gradient_of

pytestmark = pytest.mark.long

CONFIG = GPTConfig(layers=7, hidden=8, heads=2)
SAMPLES = 11
SUM_LENGTH = SAMPLES * CONFIG.sequence + CONFIG.ffn_width
DTYPES = [torch.float32, torch.float64]
KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_grad"}

Gradients = dict[str, Tensor]
Case = tuple[str, int, int, torch.dtype, str]  # schedule, stages, micro-batches, dtype, what is special


def build(dtype: torch.dtype, special: str) -> TinyGPT:
    model = TinyGPT(replace(CONFIG, tied_embeddings="tied" in special), 0, dtype)
    if "frozen" in special:  # all of the first stage or two, and one matrix somewhere
        model.blocks[:3].requires_grad_(False)
        model.get_parameter("blocks.6.mlp.up.weight").requires_grad_(False)
    return model


def cut(model: TinyGPT, n_stages: int) -> list[nn.Module]:
    """Nine blocks in stages, most of them uneven."""
    bounds = [stage * len(model.blocks) // n_stages for stage in range(n_stages + 1)]
    return [model.blocks[first:last] for first, last in itertools.pairwise(bounds)]


def minibatch(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    return data.examples([(10 + 7 * sample, 99 - 5 * sample) for sample in range(samples)])


def gradients_of(model: nn.Module) -> Gradients:
    """Gradients by name; of a tied parameter, which is on two ranks, the head's part goes by the head's name."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def in_a_pipeline(rank: int, cases: list[Case]) -> list[tuple[Tensor | None, Gradients]]:
    return [one_step(*case) for case in cases]


def one_step(name: str, n: int, m: int, dtype: torch.dtype, special: str) -> tuple[Tensor | None, Gradients]:
    model = build(dtype, special)
    loss = run_schedule(SCHEDULES[name](n, m), cut(model, n), *minibatch(), data.answer_loss)
    return loss, gradients_of(model)


@functools.lru_cache
def alone(m: int, dtype: torch.dtype, special: str) -> tuple[Tensor, Gradients]:
    """One process, the whole model, m micro-batches one after the other, each weighted by its size."""
    model, total = build(dtype, special), torch.zeros((), dtype=dtype)
    for inputs, targets in zip(*(batches.micro_batches(tensor, m) for tensor in minibatch()), strict=True):
        loss = data.answer_loss(model(inputs), targets)
        loss.backward(torch.full_like(loss, len(inputs) / SAMPLES))
        total += loss.detach() * (len(inputs) / SAMPLES)
    return total, gradients_of(model)


def allowed(reference: Tensor) -> float:
    return SUM_LENGTH * torch.finfo(reference.dtype).eps * max(1, float(reference.abs().max()))


def close(found: Tensor, reference: Tensor) -> bool:
    return float((found - reference).abs().max()) <= allowed(reference)


def cases(p: int) -> list[Case]:
    """Every schedule, with more and with fewer micro-batches than stages, none of them a divisor of the samples."""
    found, (dtype, special) = [], (torch.float32, "") if p == 4 else (torch.float64, "frozen")
    for name in SCHEDULES:
        n = 2 * p if name in ("interleaved_1f1b", "zbv", "dualpipev") else p
        found.append((name, n, n + 1, dtype, special))
        if name != "dualpipev":
            found.append((name, n, p - 1, torch.float32, "frozen"))
    return found


@pytest.mark.parametrize("p", [2, 4])
def test_gradients_and_loss_are_those_of_one_process(p: int) -> None:
    by_rank = launch(in_a_pipeline, p, (cases(p),)).results
    for (name, n, m, dtype, special), *outcomes in zip(cases(p), *by_rank, strict=True):
        losses = [loss for loss, _ in outcomes if loss is not None]
        found = {key: grad for _, gradients in outcomes for key, grad in gradients.items()}
        for pieces in (m, 1):
            loss, reference = alone(pieces, dtype, special)
            assert found.keys() == reference.keys(), (name, m)
            same = torch.equal if pieces == m else close
            assert all(same(found[key], reference[key]) for key in reference), (name, n, m, special, pieces)
            assert len(losses) == 1
            assert same(losses[0], loss)


@pytest.mark.parametrize("p", [1, 8])
def test_one_rank_is_a_pipeline_too_and_so_are_eight(p: int) -> None:
    few = [("1f1b", p, 3, torch.float32, ""), ("zb_h2", p, 3, torch.float32, ""), ("gpipe", p, 9, torch.float32, "")]
    for (name, _, m, dtype, special), *outcomes in zip(few, *launch(in_a_pipeline, p, (few,)).results, strict=True):
        found = {key: grad for _, gradients in outcomes for key, grad in gradients.items()}
        _, reference = alone(m, dtype, special)
        assert all(torch.equal(found[key], reference[key]) for key in reference), name


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv"])
def test_the_parts_of_a_tied_embedding_add_up_to_its_gradient(name: str) -> None:
    """What first and last stage each have is a part; adding the two up is left to whoever ties them."""
    case: Case = (name, 4 if name == "zbv" else 2, 4, torch.float64, "tied")
    _, reference = alone(4, torch.float64, "tied")
    parts = [outcome[0][1] for outcome in launch(in_a_pipeline, 2, ([case],)).results]
    token = "blocks.0.token.weight"
    if name == "zbv":  # both ends of the V are on rank 0
        assert close(parts[0][token], reference[token])
    else:
        assert close(parts[0][token] + parts[1][token], reference[token])


PADDING = -100


def padded_loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def unequally_padded() -> tuple[Tensor, Tensor]:
    """Every sample has as many targets as its number says, at least one."""
    inputs, _ = minibatch()
    rows = [torch.arange(inputs.shape[1]) <= sample % inputs.shape[1] for sample in range(SAMPLES)]
    return inputs, torch.where(torch.stack(rows), inputs, PADDING)


def test_a_mean_that_leaves_out_padding_counts_by_the_tokens_that_are_left() -> None:
    def step(rank: int) -> tuple[Tensor | None, Gradients]:
        model, schedule = build(torch.float64, ""), SCHEDULES["1f1b"](2, 4)
        tokens = lambda targets: int((targets != PADDING).sum())  # noqa: E731
        loss = run_schedule(schedule, cut(model, 2), *unequally_padded(), padded_loss, weigh=tokens)
        return loss, gradients_of(model)

    (_, first), (loss, last) = launch(step, 2).results
    model = build(torch.float64, "")
    expected = padded_loss(model(unequally_padded()[0]), unequally_padded()[1])
    expected.backward()
    assert loss is not None
    assert close(loss, expected.detach())
    reference = gradients_of(model)
    assert (first | last).keys() == reference.keys()
    assert all(close((first | last)[name], reference[name]) for name in reference)


def test_a_second_step_adds_to_the_gradients() -> None:
    def twice(rank: int) -> bool:
        model = build(torch.float64, "")
        seen = []
        for _ in range(2):
            run_schedule(SCHEDULES["zb_h1"](2, 3), cut(model, 2), *minibatch(), data.answer_loss)
            seen.append({name: grad.clone() for name, grad in gradients_of(model).items()})
        return all(close(seen[1][name], 2 * seen[0][name]) for name in seen[0])

    assert launch(twice, 2).results == [True, True]


# PyTorch's runtime

THEIRS = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "zb_h1": theirs.ScheduleInterleavedZeroBubble,  # with one stage on each rank
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}


def both_runtimes(rank: int, p: int, m: int) -> list[tuple[str, bool, bool]]:
    """For each schedule: its name, whether losses are the same, and whether all gradients are, bit for bit."""
    inputs, targets = minibatch(m)
    found = []
    for name, kind in THEIRS.items():
        schedule = SCHEDULES[name](p if name in ("gpipe", "1f1b", "zb_h1") else 2 * p, m)
        n = schedule.n_stages
        ours, other = build(torch.float32, ""), build(torch.float32, "")
        loss = run_schedule(schedule, cut(ours, n), inputs, targets, data.answer_loss)
        stages = [theirs.PipelineStage(cut(other, n)[s], s, n, torch.device("cpu")) for s in schedule.stages_of(rank)]
        single = name in ("gpipe", "1f1b")
        runtime: Any = kind(stages[0] if single else stages, n_microbatches=m, loss_fn=data.answer_loss)
        losses: list[Tensor] = []
        first, last = 0 in schedule.stages_of(rank), n - 1 in schedule.stages_of(rank)
        runtime.step(*([inputs] if first else []), target=targets if last else None, losses=losses if last else None)
        own = [parameter for stage in schedule.stages_of(rank) for parameter in cut(ours, n)[stage].parameters()]
        peers = [parameter for stage in schedule.stages_of(rank) for parameter in cut(other, n)[stage].parameters()]
        same = all(torch.equal(gradient_of(a), gradient_of(b)) for a, b in zip(own, peers, strict=True))
        found.append((name, loss is None or close(loss, torch.stack(losses).mean().detach()), same))
    return found


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_gradients_are_those_of_pytorch_s_runtime(p: int, m: int) -> None:
    """m is a power of two, so that dividing by it, before or after the sum, rounds nothing."""
    for found in launch(both_runtimes, p, (p, m)).results:
        assert found == [(name, True, True) for name in THEIRS]


# Any schedule that can run


class Multiply(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def run_at_random(rank: int, schedules: list[Schedule]) -> list[dict[int, float]]:
    found = []
    for schedule in schedules:
        stages = [Multiply(2.0 + stage) for stage in range(schedule.n_stages)]
        inputs = torch.arange(1.0, 1 + schedule.n_micro_batches, dtype=torch.float64)[:, None]
        run_schedule(schedule, stages, inputs, inputs, lambda output, targets: output.mean())
        found.append({s: float(gradient_of(stages[s].factor)) for s in schedule.stages_of(rank)})
    return found


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_schedules_drawn_at_random_run_on_real_ranks(n_ranks: int) -> None:
    random = Random(n_ranks)
    drawn = [random_schedules.that_can_run(random, n_ranks) for _ in range(25)]
    for schedule, *by_rank in zip(drawn, *launch(run_at_random, n_ranks, (drawn,)).results, strict=True):
        n, m = schedule.n_stages, schedule.n_micro_batches
        product = torch.arange(2.0, 2 + n).prod().item()
        found = {stage: value for rank in by_rank for stage, value in rank.items()}
        assert found == pytest.approx({stage: (m + 1) / 2 * product / (2 + stage) for stage in range(n)}, rel=1e-12)


def test_a_schedule_that_cannot_run_is_refused_on_all_ranks_before_anything_is_sent() -> None:
    crossed = Schedule([list(row) for row in SCHEDULES["1f1b"](2, 2).actions])
    crossed.actions[1][0], crossed.actions[1][1] = crossed.actions[1][1], crossed.actions[1][0]

    def refused(rank: int) -> tuple[str, float]:
        try:
            run_at_random(rank, [crossed])
        except ScheduleError as refusal:
            ones = torch.ones(1)
            dist.all_reduce(ones)  # only works if nobody is left behind
            return str(refusal), float(ones)
        return "", 0.0

    words = "rank 1 waits forever in B of micro-batch 0 on stage 1: it needs F of micro-batch 0 on stage 1"
    for text, total in launch(refused, 2).results:
        assert words in text
        assert total == 2


# What travels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_may_have_sixteen_bits(dtype: torch.dtype) -> None:
    m = 3
    run = launch(in_a_pipeline, 2, ([("1f1b", 2, m, dtype, ""), ("zb_h1", 2, m, dtype, "")],))
    _, reference = alone(m, dtype, "")
    for outcomes in zip(*run.results, strict=True):
        found = {key: grad for _, gradients in outcomes for key, grad in gradients.items()}
        assert all(torch.equal(found[key], reference[key]) for key in reference)
        assert {grad.dtype for grad in found.values()} == {dtype}


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_with_a_way_back_no_two_ranks_send_to_each_other_in_the_same_group(name: str) -> None:
    def directions(rank: int) -> tuple[Any, set[tuple[str, bool]]]:
        way_back, seen, send = dist.new_group([0, 1]), set(), dist.isend

        def noted(tensor: Tensor, group: Any, group_dst: int) -> Any:
            seen.add(("back" if group is way_back else "there", group_dst > rank))
            return send(tensor, group=group, group_dst=group_dst)

        model, schedule = build(torch.float64, ""), SCHEDULES[name](4 if "interleaved" in name else 2, 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "isend", noted)
            stages = cut(model, schedule.n_stages)
            loss = run_schedule(schedule, stages, *minibatch(), data.answer_loss, way_back=way_back)
        return loss, seen

    (_, first), (loss, second) = launch(directions, 2).results
    assert first == {("there", True)} and second == {("back", False)}
    assert torch.isclose(loss, alone(4, torch.float64, "")[0])


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_where_a_rank_that_receives_cannot_compute_it_asks_for_nothing_ahead(name: str) -> None:
    """As on a GPU, where a receive may hold up kernels that CUDA has to load first."""

    def receives_at_once(rank: int) -> Any:
        way_back, receive = dist.new_group(range(4)), dist.irecv

        def at_once(tensor: Tensor, **where: Any) -> Any:
            work = receive(tensor, **where)
            work.wait()
            return work

        model, schedule = build(torch.float64, ""), SCHEDULES[name](8 if "interleaved" in name else 4, 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(between_stages, "ASK_AHEAD", ())
            patch.setattr(dist, "irecv", at_once)
            stages = cut(model, schedule.n_stages)
            return run_schedule(schedule, stages, *minibatch(), data.answer_loss, way_back=way_back)

    losses = [loss for loss in launch(receives_at_once, 4).results if loss is not None]
    assert torch.isclose(losses[0], alone(4, torch.float64, "")[0])


def test_each_activation_and_each_gradient_travels_once() -> None:
    run = launch(in_a_pipeline, 4, ([("1f1b", 4, 5, torch.float32, "")],))
    activations = SAMPLES * CONFIG.sequence * CONFIG.hidden * 4  # bytes of all micro-batches between two stages
    description = 64 * 8
    sent = [run.timeline.bytes_sent(rank) for rank in range(4)]
    assert sent == [activations + description] + [2 * activations + description] * 2 + [activations]


def used_by(schedule: Schedule, rank: int, peer: int, answer: Action) -> set[Action]:
    """The messages from a rank that its peer needed for what it did between its last message to the rank and this."""
    used: set[Action] = set()
    for op, stage, k in schedule.actions[peer]:
        if op == "W":
            continue
        forward = op == "F"
        source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        if schedule.rank_of.get(source) == rank:
            used.add(Action("F" if forward else "B", stage, k))
        if answer == Action("F" if forward else "B", target, k):
            return used
        if schedule.rank_of.get(target) == rank:
            used.clear()
    raise LookupError(f"rank {peer} never sends {answer}")


def freed_too_late_or_too_early(rank: int, schedule: Schedule) -> list[str]:
    """Compare, after each message, what is still held of what was sent with what its receivers may still need."""
    found, used, sent = [], set[Action](), set[Action]()
    send, fetch = StageMessages.send, StageMessages.fetch

    def fetching(self: StageMessages, message: Action) -> Tensor:
        tensor = fetch(self, message)
        peer = schedule.rank_of[message.stage + (-1 if message.op == "F" else 1)]
        if peer != rank:
            used.update(used_by(schedule, rank, peer, message))
        if set(self.sending) != sent - used:
            found.append(f"{message}: {set(self.sending) ^ (sent - used)}")
        return tensor

    def sending(self: StageMessages, message: Action, tensor: Tensor) -> None:
        send(self, message, tensor)
        if schedule.rank_of[message.stage] != rank:
            sent.add(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageMessages, "fetch", fetching)
        patch.setattr(StageMessages, "send", sending)
        stages = [Multiply(2.0) for _ in range(schedule.n_stages)]
        inputs = torch.ones(schedule.n_micro_batches, 1, dtype=torch.float64)
        run_schedule(schedule, stages, inputs, inputs, nn.functional.mse_loss)
    return found


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_what_was_sent_is_let_go_of_once_its_receiver_has_used_it(name: str) -> None:
    schedule = SCHEDULES[name](6 if name in ("interleaved_1f1b", "zbv") else 3, 6)
    assert launch(freed_too_late_or_too_early, 3, (schedule,)).results == [[]] * 3


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_timeline_shows_the_schedule(name: str) -> None:
    n = 4 if name in ("interleaved_1f1b", "zbv", "dualpipev") else 2
    run = launch(in_a_pipeline, 2, ([(name, n, 4, torch.float32, "")],))
    for rank, row in enumerate(SCHEDULES[name](n, 4).actions):
        marks = [span for span in run.timeline.of(rank) if span.kind in KINDS.values()]
        assert [(m.kind, m.stage, m.micro_batch) for m in marks] == [(KINDS[a.op], a.stage, a.micro_batch) for a in row]


def test_a_group_of_some_ranks_is_a_pipeline_of_its_own() -> None:
    def in_groups(rank: int) -> tuple[Tensor | None, Gradients]:
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        model = build(torch.float32, "")
        group = groups[rank in (0, 2)]
        loss = run_schedule(SCHEDULES["1f1b"](2, 3), cut(model, 2), *minibatch(), data.answer_loss, group)
        return loss, gradients_of(model)

    results = launch(in_groups, 4).results
    total, reference = alone(3, torch.float32, "")
    for first, last in ((1, 3), (0, 2)):  # new_group sorts its ranks
        found = results[first][1] | results[last][1]
        assert results[first][0] is None
        assert torch.equal(results[last][0], total)
        assert all(torch.equal(found[key], reference[key]) for key in reference)


# Nobody waits for a send


class WaitForFile(nn.Module):
    """A last stage that is busy until the stage before it has computed everything."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def forward(self, x: Tensor) -> Tensor:
        deadline = time.monotonic() + 20
        while not self.file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the stage before has not computed all its micro-batches meanwhile")
            time.sleep(0.01)
        return x


class CountToFile(nn.Module):
    def __init__(self, file: Path, calls: int) -> None:
        super().__init__()
        self.file, self.left, self.factor = file, calls, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            self.file.touch()
        return x * self.factor


@pytest.mark.parametrize("n_numbers", [1, 2**18])
def test_a_stage_computes_on_while_the_next_one_has_not_taken_its_messages(tmp_path: Path, n_numbers: int) -> None:
    m = 6

    def step(rank: int, file: Path) -> float:
        stages = [CountToFile(file, m), WaitForFile(file)]
        loss = run_schedule(SCHEDULES["gpipe"](2, m), stages, inputs, inputs, lambda output, targets: output.mean())
        return 0.0 if loss is None else float(loss)

    inputs = torch.ones(m, n_numbers)
    assert launch(step, 2, (tmp_path / "done",)).results == [0.0, 1.0]


# Bad input


def step_of_two_stages(schedule: Schedule, group: dist.ProcessGroup | None = None) -> None:
    ones, stages = torch.ones(4, 4), [nn.Linear(4, 4), nn.Linear(4, 4)]
    run_schedule(schedule, stages, ones, ones, nn.functional.mse_loss, group)


def test_a_schedule_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(RankFailed, match="schedule is for 3 ranks; the group has 2"):
        launch(lambda rank: step_of_two_stages(SCHEDULES["1f1b"](3, 2)), 2)


def test_a_rank_outside_the_group_is_told_so() -> None:
    with pytest.raises(RankFailed, match="group does not contain rank 2"):
        launch(lambda rank: step_of_two_stages(SCHEDULES["1f1b"](2, 2), dist.new_group([0, 1])), 3)


# The bubble


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_run_has_the_bubble_of_the_papers(name: str) -> None:
    p, m = 4, 8
    case: Case = (name, p, m, torch.float32, "")
    run = launch(in_a_pipeline, p, ([case],), pace=Pace({"forward": 1.0, "backward": 2.0}))
    assert run.timeline.idle_fraction() == pytest.approx((p - 1) / (m + p - 1), rel=1e-9)


def test_actions_are_named_in_plain_words() -> None:
    assert str(Action("I", 2, 3)) == "I of micro-batch 3 on stage 2"
