"""One step of a job on real ranks and an emulated clock: all its computing times, and all its messages.

    read the samples
    for each action of the schedule      receive, then for each layer: compute, all-reduce among tensor ranks; send on
    in the last backward pass            a bucket of gradients leaves when its layers are done
    at the end                           wait for all buckets, update the weights; at a checkpoint, rank 0 writes it

A job that hangs really hangs here: its ranks call what does not match, or one of them stands still. What each rank
called last is then all that is known, as on a cluster. (What would wait for ever here raises at once.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from queue import Queue
from threading import Barrier
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from course_lib.classroom.runs import after_barrier
from course_lib.classroom.scenarios.jobs.job import ACTIVATIONS, GRADIENTS, Job
from course_lib.mechanisms.collectives import hierarchical_all_reduce
from course_lib.mechanisms.mesh import Mesh
from course_lib.ranks import launch
from course_lib.ranks.errors import Deadlock, RankFailed, describe_line
from course_lib.timeline import Timeline, compute

_PLACE = r'step\.py", line (\d+)'  # of a traceback


class Call(NamedTuple):
    """The last collective of a rank. number: in its sequence.  line: where its program stands."""

    name: str
    number: int
    bytes: int
    line: str


class Step(NamedTuple):
    """A step: its timeline; of one that hangs, the last call of each rank."""

    timeline: Timeline
    hung: tuple[Call, ...] = ()


@lru_cache(maxsize=256)
def step(job: Job) -> Step:
    """Run a step of a job. Its last part is a checkpoint, unless that takes 0 seconds."""
    try:
        run = launch(_step, job.world, (job,), pace=job.pace, timeout=60)
    except (Deadlock, RankFailed) as error:
        raised = [describe_line(f"{__file__}:{number}") for number in re.findall(_PLACE, error.details)]
        lines = [row.line if "step.py" in row.line else "".join(raised[-1:]) for row in error.report.rows]
        last = [[call for call in calls if call.family == "collective"][-1] for calls in error.histories]
        hung = [Call(one.name, one.order, one.bytes, line) for one, line in zip(last, lines, strict=True)]
        return Step(Timeline([], job.world, "emulated"), tuple(hung))
    return Step(after_barrier(run.timeline))


def _step(rank: int, job: Job) -> None:
    mesh = Mesh(job.dp, job.pp, job.tp)
    how, where = job.stuck or ("", -1)
    stuck = how if rank == where else ""
    groups = _agreeing(rank, job, mesh)
    samples, storage = Queue[int](1), Queue[int](1)
    dist.barrier()
    if stuck != "loader":
        samples.put(job.samples)
    with compute("other", work=dict([job.loading or (-1, 0.0)]).get(job.node(rank), 0.0)):
        samples.get(timeout=0)
    if stuck == "logging":
        mean_loss = torch.zeros(1)
        dist.all_reduce(mean_loss, group=groups[0])
    if stuck != "empty":
        leaving = _passes(job, mesh, groups)
        is_cut = job.weak and job.weak[1].bandwidth < 1
        for work in [Barrier(2, timeout=0)] if is_cut else leaving:  # its wait raises: nobody will answer
            work.wait()
    with compute("optimizer", work=1 / job.pp / job.tp):
        pass
    if job.saving and rank == 0:
        if job.saving > job.patience:
            storage.put(1)  # as much as it takes
        with compute("other", work=job.saving):
            storage.put(2, timeout=0)
    if job.saving:
        dist.broadcast(torch.zeros(1), 0)
    mesh.close()


def _agreeing(rank: int, job: Job, mesh: Mesh) -> list[Any]:
    """The groups in which a rank adds up its gradients; on two levels, inside its node and then across nodes."""
    if job.together == "all":
        return [mesh.group("dp")]
    places = list(map(job.place, range(job.world)))
    inside = [other for other, (node, _) in enumerate(places) if node == places[rank][0]]
    across = [other for other, (_, number) in enumerate(places) if number == places[rank][1]]
    groups = {"none": [[rank]], "levels": [inside, across]}.get(job.together, [inside])
    return [dist.new_group(ranks, use_local_synchronization=True) for ranks in groups]


def _passes(job: Job, mesh: Mesh, groups: list[Any]) -> list[Any]:
    """Forward and backward passes of all micro-batches; the messages that are still on their way."""
    stage, pipeline, leaving = mesh.rank("pp"), mesh.group("pp"), list[Any]()
    work = job.overhead + job.micro_batch / job.tp
    hidden = torch.zeros(int(ACTIVATIONS * job.micro_batch), dtype=torch.uint8)
    arriving = torch.empty_like(hidden)

    def send_gradients(layers: int) -> None:
        gradients = torch.zeros(layers * GRADIENTS // job.tp, dtype=job.sums)
        if len(groups) == 2:
            hierarchical_all_reduce(gradients, *groups)
        else:
            leaving.append(dist.all_reduce(gradients, group=groups[0], async_op=True))

    for action in job.schedule.actions[stage]:
        kind, way = ("forward", 1) if action.op == "F" else ("backward", -1)
        source, target = stage - way, stage + way
        if 0 <= source < job.pp:
            dist.recv(arriving, group=pipeline, group_src=source)
        is_last = action == job.schedule.actions[stage][-1]
        for size in _buckets(job, stage) if is_last else [job.of_stages[stage]]:
            for _ in range(size):
                with compute(kind, micro_batch=action.micro_batch, stage=stage, work=work):
                    pass
                if job.tp > 1:
                    dist.all_reduce(hidden, group=mesh.group("tp"))
            if is_last and job.overlap:
                send_gradients(size)
        if 0 <= target < job.pp:
            leaving.append(dist.isend(hidden, group=pipeline, group_dst=target))
    for size in [] if job.overlap else _buckets(job, stage):
        send_gradients(size)
    return leaving


def _buckets(job: Job, stage: int) -> Iterator[int]:
    """The number of layers in each bucket of a stage."""
    layers, n = job.of_stages[stage], min(job.buckets, job.of_stages[stage])
    return (layers * (i + 1) // n - layers * i // n for i in range(n))
