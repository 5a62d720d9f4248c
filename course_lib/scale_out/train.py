"""Train a TinyGPT on all ranks there are: in a notebook by `launch`, elsewhere by torchrun.

    one node        torchrun --standalone --nproc-per-node 8 -m course_lib.scale_out.train
    several nodes   the same on each of them:
                    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 \\
                        -m course_lib.scale_out.train
    Slurm           sbatch --nodes 2 course_lib/scale_out/slurm.sh
    a notebook      launch(train, 4, (Options(steps=20),))

Where there are as many GPUs as ranks, each rank takes one and they talk through NCCL; elsewhere through gloo.
With --checkpoints the run goes on from the newest checkpoint in that folder, if there is one, also on another number
of ranks. So the command that starts a run is the command that starts it again.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import data
from course_lib.mechanisms import batches, checkpoint
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.model import GPTConfig, TinyGPT


@dataclass(frozen=True)
class Options:
    """What to train. On the command line: --steps 100 --save-every 50, and so on.

    steps: in all, those before a resumed checkpoint included.  batch: samples of a step, over all ranks.
    checkpoints: the folder to resume from and to save to, on a file system that all nodes share; "" saves nothing.
    save_every: steps between checkpoints; 0 saves after the last step only.
    device: "cpu" or "cuda"; "" takes GPUs where there are as many as ranks.

    Raises ValueError for a number that is too small or an unknown device.
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

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("save_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} has to be at least {least}")
        if self.device not in ("", "cpu", "cuda"):
            raise ValueError(f"device={self.device!r} is unknown; choose 'cpu', 'cuda' or '' for either")

    @property
    def uses_gpu(self) -> bool:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
        return self.device == "cuda" or (not self.device and torch.cuda.device_count() >= ranks_here)


def train(rank: int, options: Options) -> list[float]:
    """Train on this rank's share of every minibatch; the loss of each step, over all ranks, from where it began."""
    device = torch.device("cuda", torch.cuda.current_device()) if options.uses_gpu else torch.device("cpu")
    config = GPTConfig(layers=options.layers, hidden=options.hidden, heads=options.heads)
    replica = DataParallel(TinyGPT(config, options.seed, device=device))
    optimizer = torch.optim.Adam(replica.parameters(), lr=options.learning_rate)
    done = 0
    if options.checkpoints and checkpoint.steps(options.checkpoints):
        done = checkpoint.resume(replica.module, optimizer, options.checkpoints)
    losses = []
    problems, _ = data.train_test_split()
    minibatches = data.minibatches(problems, options.batch, options.seed)
    for step, batch in enumerate(itertools.islice(minibatches, done, options.steps), done + 1):
        inputs, targets = (part.to(device) for part in batches.split(batch, dist.get_world_size())[rank])
        losses.append(train_step(replica, optimizer, inputs, targets, options.batch))
        if is_due(step, options):
            checkpoint.save(checkpoint.training_state(replica.module, optimizer), options.checkpoints, step)
    return losses


def train_step(
    replica: DataParallel, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, samples: int
) -> float:
    """One step on this rank's share; returns the mean loss over the whole minibatch of so many samples."""
    optimizer.zero_grad()
    loss = data.answer_loss(replica(inputs), targets)
    loss.backward()
    replica.finish()
    optimizer.step()
    total = loss.detach() * len(inputs) / samples
    dist.all_reduce(total)
    return float(total)


def is_due(step: int, options: Options) -> bool:
    """Whether a checkpoint is to be saved after this step, the first being 1."""
    is_regular = options.save_every > 0 and step % options.save_every == 0
    return bool(options.checkpoints) and (is_regular or step == options.steps)


def options_from(words: Sequence[str] | None = None) -> Options:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="course_lib.scale_out.train", description=(__doc__ or "").splitlines()[0])
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help=f"default: {field.default!r}")
    try:
        return Options(**vars(parser.parse_args(words)))
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    """What torchrun starts on every rank."""
    options = options_from()
    if options.uses_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    losses = train(dist.get_rank(), options)
    if dist.get_rank() == 0:
        news = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else "nothing left to do"
        print(f"{dist.get_world_size()} ranks, steps {options.steps - len(losses) + 1} to {options.steps}: {news}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
