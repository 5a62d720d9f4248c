"""Train a TinyGPT on all ranks: in a notebook by `launch`, elsewhere by torchrun.

    one node        torchrun --standalone --nproc-per-node 8 -m course_lib.scale_out.train
    several nodes   the same on each of them:
                    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 \\
                        -m course_lib.scale_out.train
    Slurm           sbatch --nodes 2 course_lib/scale_out/slurm.sh
    a notebook      launch(train, 4, (Options(steps=20),))

Ranks are replicas, unless some share a model: 8 with --pp 2 --tp 2 --micro-batches 4 are two pipelines of two stages,
each stage on two ranks. See course_lib.mechanisms.hybrid.

If there are as many GPUs as ranks, each rank takes one and they talk through NCCL; otherwise through gloo.
With --checkpoints the run goes on from the newest checkpoint in that folder, if there is one. So the command that
starts a run is the command that starts it again. On another number of ranks or another mesh it is refused.

At its end a run prints the mean time of a step. Give it to `course_lib.planner.calibrate`, and the planner's estimates
are those of your machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import data
from course_lib.mechanisms import hybrid, tensor_parallel
from course_lib.mechanisms.mixed_precision import LossScaler
from course_lib.mechanisms.sharding import ShardedOptimizer
from course_lib.model import GPTConfig, TinyGPT
from course_lib.scale_out import checkpoint
from course_lib.schedules import SCHEDULES, Schedule

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    """Options of a training run. On the command line: --steps 100 --save-every 50, and so on.

    steps: in all, those before a resumed checkpoint included.  batch: samples of a step, over all ranks.
    checkpoints: the folder to resume from and to save to, on a file system that all nodes share; "" saves nothing.
    save_every: steps between checkpoints; 0 saves after the last step only.
    device: "cpu" or "cuda"; "" takes GPUs if there are as many as ranks.
    pp, tp: ranks of a pipeline, and ranks among which each of its layers is cut; all others are replicas.
    schedule: of the pipeline, a name in SCHEDULES.  micro_batches: of each replica, in a step.
    sequence_parallel: tensor ranks share the work between layers, too.
    zero: replicas share the optimizer's state (ZeRO-1).
    precision: "fp32", "bf16" or "fp16".  loss_scale: the first one in fp16; it adapts.
    max_norm: of the clipped gradient; 0 does not clip.

    Raises ValueError for a number that is too small or an unknown name.
    """

    steps: int = 100
    batch: int = 64
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    learning_rate: float = 3e-3
    seed: int = 0
    checkpoints: str = ""
    save_every: int = 0
    device: str = ""
    pp: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    sequence_parallel: bool = False
    zero: bool = True
    precision: str = "fp32"
    loss_scale: float = 2.0**16
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "save_every", "pp", "tp", "micro_batches", "max_norm"):
            least = 0 if name in ("save_every", "max_norm") else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} has to be at least {least}")
        for name, known in (("schedule", SCHEDULES), ("precision", PRECISIONS), ("device", ("", "cpu", "cuda"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {[*known]}")

    @property
    def uses_gpu(self) -> bool:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
        return self.device == "cuda" or (not self.device and torch.cuda.device_count() >= ranks_here)


def train(rank: int, options: Options) -> list[float]:
    """Train on this rank; return the loss of each step, over all ranks, from the first step of this run on."""
    device = torch.device("cuda", torch.cuda.current_device()) if options.uses_gpu else torch.device("cpu")
    replicas = max(1, dist.get_world_size() // (options.pp * options.tp))
    mesh = hybrid.Mesh(replicas, options.pp, options.tp, device.type)
    part = hybrid.ModelPart(build(options).to(device), mesh, schedule_of(options), options.sequence_parallel)
    optimizer = hybrid.make_optimizer(part, torch.optim.Adam, options.zero, lr=options.learning_rate)
    scaler = LossScaler(options.loss_scale) if options.precision == "fp16" else None
    done, losses = resume(optimizer, scaler, options), []
    problems, _ = data.train_test_split()
    minibatches = data.minibatches(problems, options.batch, options.seed)
    for step, batch in enumerate(itertools.islice(minibatches, done, options.steps), done + 1):
        inputs, targets = (tokens.to(device) for tokens in batch)
        losses.append(hybrid.train_step(part, optimizer, inputs, targets, scaler, options.max_norm or None))
        if is_due(step, options):
            checkpoint.save(state_of(part, optimizer, scaler, options), options.checkpoints, step)
    return losses


def build(options: Options) -> TinyGPT:
    """The whole model."""
    config = GPTConfig(layers=options.layers, hidden=options.hidden, heads=options.heads)
    return TinyGPT(config, options.seed, PRECISIONS[options.precision])


def schedule_of(options: Options) -> Schedule:
    """The schedule for the ranks of a pipeline; some schedules need two stages on each."""
    stages = 2 * options.pp if options.schedule in ("interleaved_1f1b", "zbv", "dualpipev") else options.pp
    return SCHEDULES[options.schedule](stages, options.micro_batches)


def state_of(
    part: hybrid.ModelPart, optimizer: ShardedOptimizer, scaler: LossScaler | None, options: Options
) -> dict[str, Tensor]:
    """The content of a checkpoint: the whole model, and what belongs to this rank, its shards of the optimizer."""
    model = tensor_parallel.full_state(part, part.mesh.group("tp"))
    own = {"optimizer": optimizer.state_dict(), "scaler": scaler and scaler.state_dict()}
    others = {"layout": layout_of(options), checkpoint.own_name(): own}
    packed = {name: checkpoint.packed(value) for name, value in others.items()}
    return {f"model.{name}": tensor for name, tensor in model.items()} | packed


def layout_of(options: Options) -> str:
    """The model, and how its training lies on the ranks, which have to be the same when it goes on."""
    names = ("pp", "tp", "schedule", "zero", "layers", "hidden", "heads", "precision")
    return f"{dist.get_world_size()} ranks, " + ", ".join(f"{name}={getattr(options, name)}" for name in names)


def resume(optimizer: ShardedOptimizer, scaler: LossScaler | None, options: Options) -> int:
    """Go on from the newest checkpoint; return its step, 0 if there is none.

    Raises CheckpointError if the ranks did something else when it was saved, or trained another model.
    """
    step, state = checkpoint.load(options.checkpoints) if options.checkpoints else (0, {})
    if step:
        if (layout := checkpoint.unpacked(state["layout"])) != layout_of(options):
            raise checkpoint.CheckpointError(
                f"the checkpoint of step {step} is from {layout}, and this run has {layout_of(options)}; "
                "go on with the same, or load its model and begin anew"
            )
        own = checkpoint.unpacked(state[checkpoint.own_name()])
        optimizer.load_state_dict(own["optimizer"])
        if scaler is not None:
            scaler.load_state_dict(own["scaler"])
    return step


def is_due(step: int, options: Options) -> bool:
    """Whether to save a checkpoint after this step; the first step is 1."""
    is_regular = options.save_every > 0 and step % options.save_every == 0
    return bool(options.checkpoints) and (is_regular or step == options.steps)


def options_from(words: Sequence[str] | None = None) -> Options:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="course_lib.scale_out.train", description=(__doc__ or "").splitlines()[0])
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        is_switch = isinstance(field.default, bool)
        kind: Any = {"action": argparse.BooleanOptionalAction} if is_switch else {"type": type(field.default)}
        parser.add_argument(flag, default=field.default, help=f"default: {field.default!r}", **kind)
    try:
        return Options(**vars(parser.parse_args(words)))
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    """The program that torchrun starts on every rank."""
    options = options_from()
    if options.uses_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    began = time.perf_counter()
    losses = train(dist.get_rank(), options)
    if dist.get_rank() == 0:
        each = (time.perf_counter() - began) / max(1, len(losses))
        news = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {each:.3g} s a step" if losses else "nothing left to do"
        print(f"{dist.get_world_size()} ranks, steps {options.steps - len(losses) + 1} to {options.steps}: {news}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
