# %% [markdown]
# # Combining mechanisms
#
# **What you do:** train one model on eight ranks that share the samples, the layers *and* each layer, in 16 bits if
# you like, arrange the ranks in nine ways, and find out who has to talk to whom, about what, and how much.<br>
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
# a block, 2 x 2 x 2: two **replicas**, each a pipeline of two **stages**, each stage on two **tensor ranks**.
#
#                     replica 0                      replica 1
#     stage 0     rank 0 ===== rank 1            rank 4 ===== rank 5
#                   |            |                 |            |
#     stage 1     rank 2 ===== rank 3            rank 6 ===== rank 7
#
# *Predict:* with which ranks does rank 5 have to talk, and about what? Then let the ranks say it themselves. `Mesh`
# puts each of them into its groups:

# %%
import torch
import torch.distributed as dist

from course_lib import launch
from course_lib.mechanisms.hybrid import AXES, Mesh


def neighbors(rank):
    mesh = Mesh(dp=2, pp=2, tp=2)
    return {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in AXES}

for rank, groups in enumerate(launch(neighbors, world_size=8).results):
    print(f"rank {rank}:", "   ".join(f"{axis} {members}" for axis, members in groups.items()))

# %% [markdown]
# Three groups of two, one for each axis. Rank 5 works with rank 4 on every layer of its stage (tp), hands hidden
# states on to rank 7 and gets gradients back (pp), and once in a step averages gradients with rank 1 (dp), which holds
# the same part of the model. With ranks 0, 2, 3 and 6 it never has to talk at all, but for a few single numbers such as
# the loss.
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
# 3. gradients that have arisen in parts are added up: that of the shared embedding, from the first stage and the last
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
# ## 4. How much each axis sends
#
# *Predict:* which of the three axes sends the most bytes in a step, and which the least? And with four times as many
# samples?
#
# Every message of a run is in its timeline, so there is nothing to estimate: `HybridExperiment` trains one step on such
# a mesh and adds up, for every two ranks, what went from one to the other.

# %%
from lessons.L08_combining_mechanisms.runs import HybridExperiment

for samples in (64, 256):
    step = HybridExperiment((2, 2, 2), samples=samples).run()
    counts = {axis: sum(step.sent[axis].values()) for axis in ("tp", "pp", "dp")}
    print(f"{samples:3} samples:", "   ".join(f"{axis} {number:9,} bytes" for axis, number in counts.items()))

# %% [markdown]
# Tensor parallelism sends by far the most: twice forward and twice backward in every layer, for every micro-batch, and
# nobody can go on without the result. The pipeline sends the same hidden states, but only where two stages meet.
# Replicas send as many bytes as there are gradients and parameters, once in a step, *however many samples there are*:
# with more samples, the other two grow, and this one does not.
#
# Here is the block of the second run. Lines are as wide as what is sent over them:

# %%
from lessons.L08_combining_mechanisms.figure import mesh_map

mesh_map((2, 2, 2), step, title="Who talks to whom, with 256 samples?")

# %% [markdown]
# ## 5. Arrange them yourself
#
# Now you choose. Each move trains one step on eight real ranks, which stand for eight devices in two machines of four.
# Inside a machine links are fast, between the two there is a slow one. Under the map stands what the planner said
# beforehand. (The planner is the subject of the next lesson.) Choose *Play*, and dots run along a line while something
# is on its way there.
#
# 1. Walk through all arrangements. Which sends the most bytes, and which the fewest? Is it the fewest bytes that make
#    the shortest step?
# 2. Take 1 x 1 x 8. What do the ranks do for most of the time? Then 2 x 1 x 4 and 1 x 2 x 4: which lines cross from one
#    machine to the other now?
# 3. Take 2 x 4 x 1, which sends little. Who waits, and for what? Which two controls help?
# 4. Halve the bits. Which lines become thinner, and what does the picture say of the weights?

# %%
from lessons.L08_combining_mechanisms.explorer import MeshExplorer

MeshExplorer()

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. 1 x 1 x 8 sends the most, 17 MB, and 2 x 4 x 1 the fewest, 0.8 MB. But 4 x 1 x 2 makes the shortest step, and sends
#    more than four times as much as 2 x 4 x 1.
# 2. They wait for the slow link, and compute for 33% of the time. In 2 x 1 x 4 only the replicas' lines cross, in
#    1 x 2 x 4 only those of the pipeline.
# 3. Stages wait for each other while the pipeline fills and drains: they are idle for 45% of the time. With eight
#    micro-batches and `zb_h1` it is 16%.
# 4. All of them. Only those of the replicas keep more than half of their bytes, since gradients are added up in 32
#    bits. The weights are those of one process, up to the rounding of 16 bits.
# </details>
#
# No axis is best. Tensor ranks wait for links, stages wait for each other while the pipeline fills and drains. Replicas
# wait for nobody until the end, but of all memory they share out the optimizer's alone. (In 16 bits only the bytes
# change here; on a GPU the computing would be faster too.) Whatever you choose, the updated weights are those of one
# process.
#
# ## 6. In 16 bits
#
# Mixed precision goes with all of this. The parameters are bfloat16 or float16, what is passed on between stages and
# tensor ranks too; gradients are added up in float32, and the float32 masters are shared out over the replicas with
# the optimizer's state.
#
# float16 needs a loss scale. *Predict:* in the third step, one gradient on rank 5 overflows, and only there. Which of
# the eight ranks update their weights in this step?

# %%
from course_lib.mechanisms.mixed_precision import LossScaler


def train_with_an_overflow(rank):
    part, story = make_part((2, 2, 2), dtype=torch.float16), []
    optimizer, scaler = make_optimizer(part, torch.optim.Adam, lr=3e-3), LossScaler(2.0**10)
    for step, minibatch in enumerate(minibatches(4), start=1):
        before, factor = training.flat(part.parameters()), float("inf") if rank == 5 and step == 3 else 1.0
        hook = next(part.parameters()).register_hook(lambda gradient, factor=factor: gradient * factor)
        loss = train_step(part, optimizer, *minibatch, scaler)
        hook.remove()
        is_skipped = torch.equal(training.flat(part.parameters()), before)
        story.append(f"step {step}: loss {loss:.1f}, {'skipped' if is_skipped else 'updated'}")
    return story, scaler.scale_factor

# %%
results = launch(train_with_an_overflow, world_size=8).results
print("\n".join(results[0][0]))
print("loss scale afterwards, by rank:", [scale for _, scale in results])

# %% [markdown]
# All skip, and all halve their scale. Had the others gone on, the replicas would have been different models from here
# on. Every rank has to know before it updates, so one number, whether all is finite, goes around all eight.
#
# ## 7. Where do the slow links go?
#
# ### Question: two machines
#
# You have seen the answer on the map, if you looked for it. Decide, and let the axis of your choice reach across. Try
# the others as well.

# %%
from lessons import Card

Card("which_axis_across")

# %% [markdown]
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

by_columns = ["attention.query", "attention.key", "attention.value", "mlp.up"]
cuts = dict.fromkeys(by_columns, ColwiseParallel()) | dict.fromkeys(["attention.out", "mlp.down"], RowwiseParallel())

# %%
def in_pytorch(rank):
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
# - Pipelines are a third axis, with `torch.distributed.pipelining`. You cut the model into stages by hand and give each
#   of them its place.
#
# The file to read is `torch/distributed/device_mesh.py`, at `init_device_mesh` and `DeviceMesh`.
#
# ## What you know now
#
# - Data, pipeline and tensor parallelism cut three different things, so one mesh has an axis for each.
# - Every arrangement is the same training. Memory, idle time and links decide between them.
# - A gradient that has arisen in parts is added up on all ranks that have one. In a norm, each gradient counts once.
# - The axis that talks most gets the fastest links.
# - With float16, all ranks skip an update or none does.
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
