"""A training step without a model: all computing times and all messages of devices and links.

Real ranks send real messages on an emulated clock, so a replay shows who waits for whom in a job of any size, in a
blink.

    for each action of the schedule      receive, then for each layer: compute, all-reduce among tensor ranks; send on
    in the last backward pass            a bucket of gradients leaves when its layers are done
    at the end                           wait for all buckets, update the weights
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from course_lib.classroom.runs import after_barrier
from course_lib.classroom.scenarios.jobs.job import ACTIVATIONS, DEVICES, GRADIENTS, Job
from course_lib.mechanisms.mesh import Mesh
from course_lib.ranks import launch
from course_lib.timeline import Timeline, compute


@lru_cache(maxsize=128)
def replay(job: Job) -> Timeline:
    """Run one step of a job, on the emulated clock."""
    return after_barrier(launch(_step, DEVICES, (job,), pace=job.pace).timeline)


def _step(rank: int, job: Job) -> None:
    mesh = Mesh(job.dp, job.pp, job.tp)
    dist.barrier()
    stage, pipeline = mesh.rank("pp"), mesh.group("pp")
    hidden = torch.zeros(int(ACTIVATIONS * job.micro_batch), dtype=torch.uint8)
    arriving, leaving = torch.empty_like(hidden), list[Any]()
    for action in job.schedule.actions[stage]:
        kind, way = ("forward", 1) if action.op == "F" else ("backward", -1)
        source, target = stage - way, stage + way
        if 0 <= source < job.pp:
            dist.recv(arriving, group=pipeline, group_src=source)
        is_last = action == job.schedule.actions[stage][-1]
        for size in _buckets(job, stage) if is_last else [job.of_stages[stage]]:
            for _ in range(size):
                with compute(kind, micro_batch=action.micro_batch, stage=stage, work=job.micro_batch / job.tp):
                    pass
                dist.all_reduce(hidden, group=mesh.group("tp"))
            if is_last:
                gradients = torch.zeros(size * GRADIENTS // job.tp, dtype=torch.uint8)
                leaving.append(dist.all_reduce(gradients, group=mesh.group("dp"), async_op=True))
        if 0 <= target < job.pp:
            leaving.append(dist.isend(hidden, group=pipeline, group_dst=target))
    for work in leaving:
        work.wait()
    with compute("optimizer", work=1 / job.pp / job.tp):
        pass
    mesh.close()


def _buckets(job: Job, stage: int) -> Iterator[int]:
    """The number of layers in each bucket of a stage."""
    layers, n = job.of_stages[stage], min(job.buckets, job.of_stages[stage])
    return (layers * (i + 1) // n - layers * i // n for i in range(n))
