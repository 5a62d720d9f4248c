r"""All mechanisms at once: data, pipeline and tensor parallelism on one mesh, with ZeRO-1 and mixed precision.

Each axis cuts something else, so they do not get into each other's way: data parallelism the minibatch, pipeline
parallelism the list of layers, tensor parallelism every layer. A rank has a number on each axis, and one group of
ranks to talk to for each. Eight ranks as Mesh(dp=2, pp=2, tp=2):

                    replica 0                         replica 1
    stage 0     rank 0 ===== rank 1               rank 4 ===== rank 5         rank = (d x pp + p) x tp + t
                  |            |                    |            |
    stage 1     rank 2 ===== rank 3               rank 6 ===== rank 7

    axis       ranks, e.g.   says                                        how often
    tensor     0 = 1         partial sums of hidden states: all-reduce   4 times per layer and micro-batch
    pipeline   0 | 2         hidden states down, their gradients up      twice per stage border and micro-batch
    data       0 . 4         gradients: reduce-scatter, all-gather       once per step, every rank its own part
    all        0 ... 7       one number: loss, norm, overflow            once per step, each

So the tensor axis is the last: its neighbors, the most talkative, have neighboring numbers and share a node.

What is on several ranks has to stay the same on all of them, and must not be counted twice in the gradient's norm:

    parameter                        is on                       its gradient is               counts in the norm on
    cut, as most matrices            one tensor rank             whole                         its rank
    whole: norms, some biases        all tensor ranks            the same on each, or          tensor rank 0
                                                                 partial sums with sequence_parallel
    tied embedding, if the ends      first and last stage        a partial sum on both         first stage
    of the pipeline are two ranks    (cut on either)

and of replicas one: with ZeRO-1 each counts the shard that it updates, without it replica 0 counts.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC21.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms import batches, guards, sharding, tensor_parallel, tied_weights
from course_lib.mechanisms.data_parallel import average_gradients, trainable
from course_lib.mechanisms.layerwise import split_layers
from course_lib.mechanisms.mesh import Mesh
from course_lib.mechanisms.mixed_precision import LossScaler
from course_lib.mechanisms.pipeline import run_schedule
from course_lib.mechanisms.replicas import from_first_rank, named_tensors
from course_lib.mechanisms.sharding import ShardedOptimizer
from course_lib.mechanisms.shards import master_dtype
from course_lib.mechanisms.tensor_parallel.vocab import IGNORED
from course_lib.schedules import Schedule


def train_step(
    part: ModelPart,
    optimizer: ShardedOptimizer,
    inputs: Tensor,
    targets: Tensor,
    scaler: LossScaler | None = None,
    max_norm: float | None = None,
) -> float:
    """One step of training on a minibatch; returns its mean loss, on every rank.

    inputs, targets: tokens [samples, sequence], the whole minibatch, the same on all ranks. Each replica takes its
        share and cuts that into the schedule's micro-batches; sizes need not divide. Targets of -100 do not count; each
        micro-batch needs one that does.
    scaler: for float16. If a gradient overflows anywhere, no rank updates anything.
    max_norm: the norm over the whole model's gradient is clipped to this, as torch.nn.utils.clip_grad_norm_ does.

    Raises ValueError, on all ranks and before any update, for too small a minibatch and for a loss that is not finite.
    """
    mesh = part.mesh
    batches.split(inputs, mesh.size("dp") * part.schedule.n_micro_batches)  # so that all ranks hear of too few
    own_inputs, own_targets = batches.split((inputs, targets), mesh.size("dp"))[mesh.rank("dp")]
    scale = 1.0 if scaler is None else scaler.scale_factor
    weight = count(own_targets) * mesh.size("dp") / count(targets)  # 1 for a mean share
    loss_fn = part.loss_fn(weight * scale)
    down, up = mesh.group("pp"), mesh.way_back
    loss = run_schedule(part.schedule, part.stages, own_inputs, own_targets, loss_fn, down, count, way_back=up)
    mean = _mean_over_replicas(part, loss) / scale
    if math.isfinite(mean):
        complete_gradients(part, optimizer)
        if scaler is None or scaler.unscale_and_update(optimizer.shards):
            if max_norm is not None:
                clip_grad_norm(optimizer, max_norm)
            optimizer.step()
    optimizer.zero_grad()
    if not math.isfinite(mean):
        raise ValueError(f"loss={mean}, so nothing was updated; look for inf or nan in the data and the weights")
    return mean


def count(targets: Tensor) -> int:
    """How many targets a loss is the mean over."""
    return int((targets != IGNORED).sum())


def complete_gradients(part: ModelPart, optimizer: ShardedOptimizer) -> None:
    """Add up partial gradients of several ranks, one axis after the other; the result is in the optimizer's shards."""
    mesh = part.mesh
    tensor_parallel.sum_partial_gradients(part, mesh.group("tp"))
    for parameter, ranks in part.tied.items():
        parameter.grad = tied_weights.sum_gradients(parameter, ranks, mesh.group("pp"))
    if dist.get_world_size(optimizer.group) < mesh.size("dp"):  # no ZeRO
        average_gradients(part, mesh.group("dp"))
    optimizer.finish()


def clip_grad_norm(optimizer: ShardedOptimizer, max_norm: float) -> float:
    """Scale all gradients by one factor, so that their norm over the whole model is at most max_norm.

    Returns the norm from before, on every rank the same. Comes after `complete_gradients`.
    """
    counted = [shard for group in optimizer.inner.param_groups if group["counts"] for shard in group["params"]]
    return sharding.clip_grad_norm(optimizer.shards, max_norm, counted=counted)


def _mean_over_replicas(part: ModelPart, loss: Tensor | None) -> float:
    """The loss is on the last stages; of each replica's tensor ranks, which all have it, one puts it in."""
    mesh = part.mesh
    total = torch.zeros((), dtype=torch.float64, device=next(part.parameters()).device)
    if loss is not None and mesh.rank("tp") == 0:
        total += loss / mesh.size("dp")
    dist.all_reduce(total)
    return float(total)


# What a step needs: a rank's part of the model, and its optimizer


class ModelPart(nn.Module):
    """One rank's part of a TinyGPT: its tensor share of the layers of its stages.

    model: the whole one, on every rank and on the device; rank 0's weights count, and nothing remains of it but this
        part. Its dtype is the one to compute in. If that has 16 bits, gradients are still added up in 32: those of
        micro-batches, of tied embeddings, and of replicas.
    schedule: for the ranks of a pipeline, `mesh.size("pp")` of them. Its stages get equal numbers of layers, as far
        as they divide, the embedding goes to the first and the head to the last.
    sequence_parallel: between layers, tensor ranks hold their own positions only, see `tensor_parallel`.

    Parameters have the names that they have in the whole model. `stages` are this rank's, by their numbers. `tied` are
    its parameters of which other ranks of the pipeline have copies, with the numbers of all these ranks.

    Raises ValueError, on all ranks, for a schedule of another number of ranks, more stages than blocks, and a model
    that the tensor ranks cannot share.
    """

    def __init__(self, model: Any, mesh: Mesh, schedule: Schedule, sequence_parallel: bool = False) -> None:
        super().__init__()
        own = guards.rank_for(schedule.n_ranks, mesh.group("pp"))
        self.mesh, self.schedule, self.config = mesh, schedule, model.config
        is_layer = [0, *(1 for _ in model.blocks[1:-1]), 0]
        layers = split_layers(len(model.blocks), schedule.n_stages, costs=is_layer)
        from_first_rank(named_tensors(model).values())
        tensor_parallel.parallelize(model, mesh.group("tp"), sequence_parallel)
        of_rank = [
            nn.ModuleDict({str(i): model.blocks[i] for stage in schedule.stages_of(rank) for i in layers[stage]})
            for rank in range(schedule.n_ranks)
        ]
        self.blocks = of_rank[own]
        self.stages: Mapping[int, nn.Module] = {
            stage: nn.Sequential(*(model.blocks[i] for i in layers[stage])) for stage in schedule.stages_of(own)
        }
        self.tied = {parameter: ranks for parameter, ranks in tied_weights.holders(of_rank).items() if own in ranks}
        for parameter in self.parameters():
            parameter.grad_dtype = master_dtype(parameter.dtype)

    def loss_fn(self, factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        """The mean cross-entropy of a micro-batch, times a factor, from this rank's share of the logits."""
        of, vocab, group = tensor_parallel.vocab_parallel_cross_entropy, self.config.vocab, self.mesh.group("tp")
        return lambda logits, targets: factor * of(logits, targets, vocab, group)


def make_optimizer(
    part: ModelPart, optimizer_cls: type[torch.optim.Optimizer], zero: bool = True, **kwargs: Any
) -> ShardedOptimizer:
    """An optimizer of this rank's parameters, with float32 masters where they have 16 bits.

    zero: whether replicas share it out (ZeRO-1). If not, every rank is a sharding group of its own, with one shard.
    kwargs: for optimizer_cls.

    In its parameter groups `counts` says whether this rank counts them in the norm; see the table at the top.

    Each rank needs something to train: one whose parameters are all frozen has no optimizer.
    """
    mesh, where = part.mesh, tensor_parallel.placements(part)
    kinds: dict[str, list[nn.Parameter]] = {"cut": [], "whole": [], "tied": []}
    for name, parameter in trainable(part).items():
        kinds["tied" if parameter in part.tied else "cut" if where[name].is_sharded else "whole"].append(parameter)
    counts = {"cut": True, "whole": mesh.rank("tp") == 0, "tied": 0 in part.stages}
    is_counted_here = zero or mesh.rank("dp") == 0
    # Copies on other ranks lie alike there: an optimizer's vector instructions may round by an element's place.
    groups = [{"params": held, "counts": counts[kind] and is_counted_here} for kind, held in kinds.items() if held]
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True) if not zero else None
    return ShardedOptimizer(groups, optimizer_cls, alone or mesh.group("dp"), **kwargs)
