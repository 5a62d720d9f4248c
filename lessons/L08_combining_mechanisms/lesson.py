# %% [markdown]
# # Combining mechanisms
#
# **What you do:** train one model on eight ranks that share the samples, the layers *and* each layer, arrange the ranks
# in many ways, and find out who has to talk to whom, about what, how much, and what memory each arrangement needs.<br>
# **Afterwards you can:** arrange ranks in a mesh, say over which of its groups each sum goes, and which
# axis gets the fastest links.<br>
# **Time:** 45 minutes.<br>
# **You need:** the lessons on data, sharded, pipeline and tensor parallelism and on [mixed
# precision](07_mixed_precision.ipynb).
#
# Decide on an answer before you run the next cell, even if it is a guess. (This page comes with its results. To hide
# them until you get there, choose *Clear Outputs of All Cells* in the *Edit* menu.)
#
# ## 1. A block of ranks
#
# You know three ways to share work. They cut three different things: data parallelism the minibatch, pipeline
# parallelism the list of layers, tensor parallelism every layer. So they can be used together. Think of eight ranks as
# a block: two **replicas** side by side, each a pipeline of two **stages**, one below the other, each stage on two
# **tensor ranks**. Here are their lines in one training step, as wide as what was sent over them.
#
# *Predict:* with which ranks does rank 5 have to talk, and about what? Then click on it, or choose it under *Light up*.
# *Play* shows when.

# %%
from course_lib.classroom.widgets import play
from lessons.L08_combining_mechanisms.figure import mesh_map
from lessons.L08_combining_mechanisms.runs import PER_MACHINE, HybridExperiment

step = HybridExperiment((2, 2, 2)).run()
play(mesh_map((2, 2, 2), step, per_machine=PER_MACHINE, width=640, title="A step of eight ranks in two machines"))

# %% [markdown]
# The ranks can say it themselves, too. `Mesh` puts each of them into its groups:

# %%
import torch
import torch.distributed as dist

from course_lib import launch
from course_lib.mechanisms.mesh import AXES, Mesh


def neighbors(rank):
    mesh = Mesh(dp=2, pp=2, tp=2)
    return {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in AXES}

for rank, groups in enumerate(launch(neighbors, world_size=8).results):
    print(f"rank {rank}:", "   ".join(f"{axis} {members}" for axis, members in groups.items()))

# %% [markdown]
# Three groups of two, one for each axis. Rank 5 works with rank 4 on every layer of its stage (tp), hands hidden
# states on to rank 7 and gets gradients back (pp), and once in a step averages gradients with rank 1 (dp), which holds
# the same part of the model. With ranks 0, 2, 3 and 6 it never has to talk at all, except for a few single numbers such
# as the loss.
#
# *Predict:* the model has four layers between its embedding and its head, and the head uses the embedding's matrix.
# What part of its parameters does each rank hold?

# %%
from course_lib import data
from course_lib.mechanisms.hybrid import ModelPart, make_optimizer, train_step
from course_lib.model import GPTConfig, TinyGPT
from course_lib.schedules import SCHEDULES

problems, unseen = data.train_test_split()
config = GPTConfig(layers=4, tied_embeddings=True)
whole = sum(parameter.numel() for parameter in TinyGPT(config).parameters())

# %%
def make_part(sizes, schedule="1f1b", micro_batches=4, dtype=torch.float32, sequence_parallel=False):
    mesh = Mesh(*sizes)
    model = TinyGPT(config, dtype=dtype)
    return ModelPart(model, mesh, SCHEDULES[schedule](sizes[1], micro_batches), sequence_parallel)

def what_it_holds(rank):
    part = make_part((2, 2, 2))
    numbers = sum(parameter.numel() for parameter in part.parameters())
    return f"blocks {', '.join(part.blocks)}: {numbers / whole:.1%} of the parameters"

launch(what_it_holds, world_size=8).results

# %% [markdown]
# A little more than a quarter: half of the layers, and half of each of their matrices. What is more than that are
# the norms and some biases, which every tensor rank has as a whole, and the shared embedding, which the first stage
# needs as embedding and the last as head. And both replicas hold everything.
#
# ## 2. Is it still the same training?
#
# One step of training now goes like this, and each line has been in a lesson before:
#
# 1. each replica takes its share of the minibatch, and cuts it into micro-batches;
# 2. they flow through the pipeline; within each layer, tensor ranks add up their parts;
# 3. partial gradients are added up: that of the shared embedding, from the first stage and the last
#    (and with sequence parallelism those of norms and some biases, of which each tensor rank has seen its positions
#    only; without it, tensor ranks have the same gradient already, and adding up would double it);
# 4. replicas average their gradients, and each updates a part of the parameters (ZeRO-1);
# 5. the updated parameters go to the other replicas.
#
# *Predict:* eight ranks against one process, after five steps. Equal?

# %%
from itertools import islice


def minibatches(steps):
    return islice(data.minibatches(problems, 64), steps)

def train(rank, sizes, schedule="1f1b", steps=5, max_norm=1.0):
    part = make_part(sizes, schedule, dtype=torch.float64)
    optimizer = make_optimizer(part, torch.optim.Adam, lr=3e-3)
    return [train_step(part, optimizer, *minibatch, max_norm=max_norm) for minibatch in minibatches(steps)]

# %%
from course_lib.classroom.runs import training

model = TinyGPT(config, dtype=torch.float64)

def clip():
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

adam = torch.optim.Adam(model.parameters(), lr=3e-3)
alone = training.train(model, minibatches(5), data.answer_loss, adam, combine=clip)
for sizes in ((2, 2, 2), (4, 2, 1), (1, 4, 2)):
    losses = launch(train, world_size=8, args=(sizes,)).results[0]
    off = max(abs(loss - other) for loss, other in zip(losses, alone, strict=True))
    print(f"dp, pp, tp = {sizes}: loss {losses[0]:.3f} -> {losses[-1]:.3f},", "the same" if off < 1e-9 else "another")

# %% [markdown]
# Each of these ways to arrange eight ranks is the same training, up to the rounding of 64-bit numbers. How to arrange
# them is a question of memory and speed alone.
#
# ## 3. The norm of all gradients
#
# Before the update, `clip_grad_norm_` scales all gradients down if their **norm**, the root of the sum of all their
# squares, is too large. On one process that is a line of code. On the mesh each rank has some of the gradients.
# *Predict:* each rank adds up the squares that it has, and an all-reduce over all eight adds up these sums. What comes
# out?

# %%
from course_lib.mechanisms.hybrid import complete_gradients
from course_lib.mechanisms.pipeline import run_schedule

minibatch = next(minibatches(1))

def squares_by_kind(rank):
    part = make_part((2, 2, 2), dtype=torch.float64)
    optimizer = make_optimizer(part, torch.optim.SGD, zero=False, lr=0.0)
    own = [tokens.chunk(2)[part.mesh.rank("dp")] for tokens in minibatch]
    run_schedule(part.schedule, part.stages, *own, part.loss_fn(1.0), part.mesh.group("pp"))
    complete_gradients(part, optimizer)
    kinds = optimizer.inner.param_groups
    return [(sum(p.grad.square().sum().item() for p in kind["params"]), kind["counts"]) for kind in kinds]

# %%
model = TinyGPT(config, dtype=torch.float64)
data.answer_loss(model(minibatch[0]), minibatch[1]).backward()
right = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()

by_rank = launch(squares_by_kind, world_size=8).results
everything = sum(squares for kinds in by_rank for squares, _ in kinds) ** 0.5
counted_once = sum(squares for kinds in by_rank for squares, counts in kinds if counts) ** 0.5
print(f"one process:               {right:.6f}")
print(f"the squares of all ranks:  {everything:.6f}")
print(f"each gradient once:        {counted_once:.6f}")

# %% [markdown]
# Too large, and not by a round factor: replicas count everything twice, tensor ranks the norms and some biases twice
# again, and the shared embedding is on two stages. A run with this mistake does not crash. It clips too often and too
# much, so it is another training, and nothing says so but a comparison with one process.
#
# The third line is what `clip_grad_norm` of `hybrid` does on every rank:
#
# ```python
# for kind in optimizer.inner.param_groups:
#     if kind["counts"]:
#         squares += sum(shard.grad.square().sum() for shard in kind["params"])
# dist.all_reduce(squares)
# norm = squares.sqrt()
# ```
#
# Which ranks count what:

# %%
for rank, kinds in enumerate(by_rank):
    print(f"rank {rank} counts", ", ".join(f"{squares:.4f}" for squares, counts in kinds if counts) or "nothing")

# %% [markdown]
# Only replica 0 counts (with ZeRO-1 each replica counts the part that it updates). In it every rank counts the
# matrices that are cut, for it has a piece that nobody else has. What all tensor ranks have is counted by the first of
# them, and the shared embedding by the first stage.
#
# (In float16 one more number goes around all eight: whether every gradient is finite. If one on rank 5 is not, all
# eight skip the update, as in [mixed precision](07_mixed_precision.ipynb).)
#
# ## 4. How much each axis sends
#
# Eight devices are seldom in one box. So before you count anything:
#
# ### Question: two machines
#
# Decide, and let the axis of your choice reach across. Try the others as well.

# %%
from lessons import Card

Card("which_axis_across")

# %% [markdown]
# *Predict:* which of the three axes sends the most bytes in a step, and which the least? And with four times as many
# samples?
#
# Every message of a run is in its timeline, so there is nothing to estimate: `HybridExperiment` trains one step on such
# a mesh and adds up, for every two ranks, what went from one to the other.

# %%
for samples in (64, 256):
    step = HybridExperiment((2, 2, 2), samples=samples).run()
    counts = {axis: sum(step.sent[axis].values()) for axis in ("tp", "pp", "dp")}
    print(f"{samples:3} samples:", "   ".join(f"{axis} {number:9,} bytes" for axis, number in counts.items()))

# %% [markdown]
# Tensor parallelism sends by far the most: forward and backward in every layer, for every micro-batch, and nobody can
# go on without the result. The pipeline sends the same hidden states, but only where two stages meet.
# Replicas send as many bytes as there are gradients and parameters, once in a step, *however many samples there are*:
# with more samples, the other two grow, and this one does not.
#
# Here is the block of the second run. Lines are as wide as what is sent over them:

# %%
mesh_map((2, 2, 2), step, per_machine=PER_MACHINE, title="Who talks to whom, with 256 samples?")

# %% [markdown]
# ## 5. Arrange them yourself
#
# Now you choose. Each move trains one step on eight real ranks, which stand for eight devices in two machines of four.
# Inside a machine links are fast, between the two there is a slow one. Under the map stands what the planner said
# beforehand. (The planner is the subject of the next lesson.) Choose *Play*, and dots run along a line while something
# is on its way there.
#
# 1. Walk through all arrangements. Which sends the most bytes, and which the fewest? Do the fewest bytes make the
#    shortest step?
# 2. Take 1 x 1 x 8. What do the ranks do for most of the time? Then 2 x 1 x 4 and 1 x 2 x 4: which lines cross from one
#    machine to the other now?
# 3. Take 2 x 4 x 1, which sends little. Who waits, and for what? Which two controls help?
# 4. Halve the bits. Which lines become thinner, and what does the picture say of the weights?

# %%
from lessons.L08_combining_mechanisms.explorer import MESHES, MeshExplorer

MeshExplorer()

# %% tags=["build-only"]
from lessons.L08_combining_mechanisms.figure import total


def step_of(sizes, *setting):
    return HybridExperiment(sizes, *setting).run()

steps = {" x ".join(map(str, sizes)): step_of(sizes) for sizes in MESHES}
n_bytes = {name: sum(total(one.sent, axis) for axis in AXES) for name, one in steps.items()}

def tail(name):
    timeline = steps[name].timeline
    return max(s.end for s in timeline.spans) - max(s.end for s in timeline.spans if s.kind == "backward")

fewest, *_, most = sorted(steps, key=n_bytes.get)
shortest = min(steps, key=lambda name: steps[name].timeline.makespan)
across, halved = steps["1 x 1 x 8"].timeline, step_of((2, 2, 2), 4, "1f1b", torch.bfloat16)
keeps = {axis: total(halved.sent, axis) / total(steps["2 x 2 x 2"].sent, axis) for axis in AXES}

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. {{most}} sends the most, {{n_bytes[most]:data_size}}, and {{fewest}} the fewest, {{n_bytes[fewest]:data_size}}. But
#    {{shortest}} makes the shortest step here, {{steps[shortest].timeline.makespan:duration}}, and sends
#    {{n_bytes[shortest] / n_bytes[fewest]:.1f}} times as much as {{fewest}}.
# 2. They wait for the slow link, and compute for {{across.busy(0) / across.makespan:percent}} of the time. In 2 x 1 x 4
#    only the replicas' lines cross, in 1 x 2 x 4 only those of the pipeline.
# 3. Stages wait for each other while the pipeline fills and drains: they are idle for
#    {{steps["2 x 4 x 1"].timeline.idle_fraction():percent}} of the time. With eight micro-batches and `zb_h1` it is
#    {{step_of((2, 4, 1), 8, "zb_h1").timeline.idle_fraction():percent}}.
# 4. All of them. Those of tensor ranks keep {{keeps["tp"]:percent}} of their bytes, those of stages
#    {{keeps["pp"]:percent}}, and those of replicas {{keeps["dp"]:percent}}, since gradients are added up in 32 bits.
#    The weights are those of one process, up to the rounding of 16 bits.
# </details>
#
# No axis is best. Tensor ranks wait for links, stages wait for each other while the pipeline fills and drains. Replicas
# wait for nobody until the end, but of all memory they share out the optimizer's alone. (In 16 bits only the bytes
# change here; on a GPU the computing would be faster too.) Whatever you choose, the updated weights are those of one
# process.
#
# ### Is the shortest step the shortest anywhere?
#
# {{shortest}} was faster than eight replicas, {{steps["8 x 1 x 1"].timeline.makespan:duration}}. But the replicas spent
# {{tail("8 x 1 x 1") / steps["8 x 1 x 1"].timeline.makespan:percent}} of the step after their last backward pass, with
# gradients and weights. *Predict:* who is faster if gradients leave while the backward pass still runs? And if there
# are four times as many samples? (With a single micro-batch, so that there are no other messages.)

# %%
settings = {
    "as above": {},
    "gradients leave early": {"overlap": True},
    "256 samples": {"samples": 256},
    "256, and leave early": {"samples": 256, "overlap": True},
}
for name, how in settings.items():
    one, other = (HybridExperiment(sizes, 1, **how).run().timeline for sizes in ((8, 1, 1), (4, 1, 2)))
    print(f"{name:22} 8 x 1 x 1: {1000 * one.makespan:6.1f} ms    4 x 1 x 2: {1000 * other.makespan:6.1f} ms")

# %% [markdown]
# Overlap hides a part of what replicas send, and with more samples the rest matters less: it stays what it was, while
# what tensor ranks send grows. With both, the two are as fast as each other. So who is fastest depends on how much
# there is to compute in a step, and so few short samples say nothing of the step of a large run.
#
# ## 6. Memory beside time
#
# An arrangement is chosen for its memory as often as for its time. Our model is too small to show that, so ask the
# planner about a model of 13B on the same machines with A100s in them. In the first nine lines replicas share out the
# optimizer's state, as ours do. Then they share out everything (ZeRO-3): all eight of them, or in **hybrid sharding**
# only the four of each machine, so that weights are fetched inside it and only shards of gradients cross.
# *Predict:* which arrangement needs the least memory? Which is fastest? The same one?

# %%
from course_lib.planner import Cluster, Plan, estimate
from course_lib.planner.models import GPT3

large, machines = GPT3["13B"], Cluster("A100-80GB", nodes=2, devices_per_node=4)
plans = {f"{dp} x {pp} x {tp}": Plan(dp, tp, pp, micro_batch=2, zero=min(1, dp - 1)) for dp, pp, tp in MESHES}
plans["8 x 1 x 1, ZeRO-3"] = Plan(dp=8, zero=3, micro_batch=2)
plans["8 x 1 x 1, hybrid"] = Plan(dp=8, zero=3, shards=4, micro_batch=2)
plans["4 x 1 x 2, ZeRO-3"] = Plan(dp=4, tp=2, zero=3, micro_batch=2)
planned = {name: estimate(large, machines, plan, global_batch=128) for name, plan in plans.items()}
for name, one in planned.items():
    print(f"{name:18} modelled: {one.memory.total / 2**30:4.0f} GiB, {one.fit:12}  {one.step_time.total:5.1f} s a step")

# %% tags=["build-only"]
from dataclasses import replace

all_eight, hybrid = (planned[f"8 x 1 x 1, {how}"] for how in ("ZeRO-3", "hybrid"))
larger = estimate(large, machines, replace(plans["8 x 1 x 1, ZeRO-3"], micro_batch=8, recompute="full"), 128)
thin = Plan(dp=512, zero=1), Plan(dp=256, pp=2, zero=1)  # a sample, or two, for each replica
thin = [estimate(GPT3["6.7B"], Cluster("H100-80GB", nodes=64), plan, 512).step_time.total for plan in thin]

# %% [markdown]
# Eight replicas would be the fastest, and they do not fit. Eight tensor ranks need the least, and take about twice as
# long. Between them memory is paid for with time, though not always at the same price: 2 x 4 x 1 is worse than
# 2 x 2 x 2 in both.
#
# That replicas would be the fastest takes enough samples for each of them, here {{128 // 8}}. With a single one there
# is hardly anything to compute beside the gradients. For 6.7B on 512 H100 and as many samples, 512 replicas take
# {{thin[0]:duration}} a step; with two stages in each of 256, a device has half of the gradients, and a step takes
# {{thin[1]:duration}}.
#
# ZeRO-3 makes eight replicas fit, and fetches all weights for each micro-batch, so small ones make it slow:
# {{all_eight.step_time.data:duration}} of its step is waiting for them. Hybrid sharding waits
# {{hybrid.step_time.data:duration}}, for {{hybrid.memory.total - all_eight.memory.total:memory_size}} more. With
# micro-batches of {{larger.plan.micro_batch}} and everything recomputed ZeRO-3 waits
# {{larger.step_time.data:duration}}, and needs {{larger.memory.total:memory_size}}. And it goes with tensor ranks (the
# last line), but badly across machines: a device fetches half as much, twice as often, and its group has half as many
# network cards.
#
# Here are both on our ranks, for five steps, with PyTorch's `fully_shard`. Given a mesh of two axes, it keeps copies
# along the first and shards along the second:

# %%
from collections import Counter

from torch.distributed.device_mesh import init_device_mesh


def train_sharded(rank, sizes):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards")[-len(sizes):])
    model = TinyGPT(config, dtype=torch.float64)
    for part in (*model.blocks[1:-1], model):
        fully_shard(part, mesh=mesh)
    own = [[tensor.chunk(8)[rank] for tensor in minibatch] for minibatch in minibatches(5)]
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = training.train(model, own, data.answer_loss, adam)
    return sum(parameter.to_local().numel() for parameter in model.parameters()), losses

# %%
for sizes in ((8,), (2, 4)):
    run, sent = launch(train_sharded, world_size=8, args=(sizes,)), Counter()
    for span in run.timeline.of(0):
        sent[span.name] += span.bytes
    print(sizes, f"rank 0 holds {run.results[0][0]:,} numbers and sends", {name: n for name, n in sent.items() if n})

# %% [markdown]
# All that eight shards send goes around all eight ranks. In hybrid sharding the `all_gather`s and the `reduce_scatter`s
# stay among four, and what crosses between the machines is one `all_reduce` of the shards' gradients.
#
# ## 7. A strategy to judge
#
# ### Case: a strategy with three good reasons
#
# Answer in a few sentences, as you would to a colleague. Then four arrangements are run, and you compare with a good
# answer, point by point.

# %%
Card("evaluate_strategy")

# %% [markdown]
# ## 8. The same in PyTorch
#
# `init_device_mesh` makes the groups, and each mechanism of the earlier lessons takes an axis of the mesh. Here are
# four replicas of two tensor ranks: `parallelize_module` on the axis "tp", `fully_shard` on the axis "dp". They are
# compared with our ranks on the same mesh, both without clipping:

# %%
def in_pytorch(rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ColwiseParallel(), RowwiseParallel()
    cuts = {f"attention.{name}": columns for name in ("query", "key", "value")}
    cuts |= {"attention.out": rows, "mlp.up": columns, "mlp.down": rows}
    mesh, model = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")), TinyGPT(config, dtype=torch.float64)
    for block in model.blocks[1:-1]:
        parallelize_module(block, mesh["tp"], cuts)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    replica, adam = mesh.get_local_rank("dp"), torch.optim.Adam(model.parameters(), lr=3e-3)
    shares = [[tensor.chunk(4)[replica] for tensor in minibatch] for minibatch in minibatches(5)]
    return training.train(model, shares, data.answer_loss, adam)

# %%
by_replica = launch(in_pytorch, world_size=8).results[::2]  # of each, the first of its tensor ranks
theirs = torch.tensor(by_replica, dtype=torch.float64).mean(0)
ours = launch(train, world_size=8, args=((4, 1, 2), "1f1b", 5, None)).results[0]
off = (theirs - torch.tensor(ours, dtype=torch.float64)).abs().max()
print("losses of five steps, the same as ours up to rounding:", bool(off < 1e-9))

# %% [markdown]
# The same functions run under `torchrun --nproc-per-node 8`, with `dist.init_process_group()` before them. What PyTorch
# does differently:
#
# - The order matters: first cut a block among tensor ranks, then shard what is left. A weight is then a `DTensor` on
#   both axes.
# - With `fully_shard` the replicas share out parameters and gradients, too (ZeRO-3), where ours share out the
#   optimizer's state alone (ZeRO-1).
# - `clip_grad_norm_` does not work here: some parameters are on both axes, others on "dp" alone, and it refuses to put
#   their norms together. You would add up the squares by yourself, as in section 3, or put every parameter on both.
# - Pipelines are one more axis, with `torch.distributed.pipelining`. You cut the model into stages by hand and give
#   each of them its place.
#
# The file to read is `torch/distributed/device_mesh.py`, at `init_device_mesh` and `DeviceMesh`.
#
# ## What you know now
#
# - Data, pipeline and tensor parallelism cut three different things, so one mesh has an axis for each.
# - Every arrangement is the same training. Memory, idle time and links decide between them.
# - A partial gradient is added up on all ranks that have one. In a norm, each gradient counts once.
# - The axis that talks most gets the fastest links.
# - Where the model fits and each replica has many samples, replicas are the fastest. Stages, tensor ranks and ZeRO-3
#   pay for memory with time.
# - ZeRO-3 fetches weights for each micro-batch. Hybrid sharding keeps that inside a machine.
#
# ### When it stops being true
#
# - **The bytes are not the time.** What replicas send can travel while they compute, what tensor ranks send cannot. The
#   arrangement that sends least need not be the fastest.
# - **Every axis has an end.** Tensor ranks end with the heads of the model and with the devices of a machine, stages
#   with its layers, replicas with the samples of a minibatch. Very large runs therefore add axes: positions of a long
#   sequence (context parallelism), or experts.
# - **Stages are not equal.** Here each has as many layers. An output layer with a large vocabulary makes the last one
#   the slowest, and all others wait for it.
#
# ### Further reading
#
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC21,
#   arXiv:2104.04473: how the three are combined, up to thousands of GPUs.
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC20: what replicas
#   share out.
# - Llama Team 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783, section 3.3: four axes on 16,384 GPUs, and why they
#   stand in this order.
#
# **Next:** the [exercise](../exercises/08_combining_mechanisms/08_combining_mechanisms.ipynb), in which you write the
# groups, the norm and the sums; or [planning](09_planning.ipynb), which finds an arrangement for a thousand GPUs before
# anybody pays for them.
