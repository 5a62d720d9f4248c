# %% [markdown]
# # Sharded data parallelism
#
# **What you do:** take away from four replicas what each of them holds only as a copy, step by step, until no copies
# are left. Count what that saves and what it sends. Then save activations as well, by computing them again.<br>
# **Time:** 45 minutes.<br>
# **You need:** [One machine is not enough](01_one_machine_is_not_enough.ipynb) and
# [Data parallelism](02_data_parallelism.ipynb).
#
# Decide on an answer before you run the next cell, even if it is a guess. (This page comes with its results. To hide
# them until you get there, choose *Clear Outputs of All Cells* in the *Edit* menu.)
#
# ## 1. What four replicas hold
#
# Data parallelism makes training faster, but it does not make a model fit: every rank holds all of it. Can the same
# ranks do the same training, and hold less?
#
# Four ranks train a small model. `sharded_step` runs it on real processes, and a ledger counts what each of them holds
# just before the update: its parameters, their gradients, and the state of AdamW. *Predict:* of all that the four hold
# together, how much is redundant, a copy of something that is held already?

# %%
from lessons.L03_sharded_data_parallelism.runs import STAGES, sharded_step

replicas = sharded_step(stage=0, ranks=4)
parameters = replicas.weights.numel()
one, four = replicas.held[0].total, sum(held.total for held in replicas.held)
print(f"for each parameter, one rank holds {one / parameters:.0f} bytes, and all four hold {four / parameters:.0f}")
print(f"of that, mere copies: {1 - one / four:.0%}")

# %% [markdown]
# After the gradients are averaged, all four hold the same parameters, the same gradients and the same state. So
# {{1 - one / four:percent}} of all that is copies, and with a thousand ranks it would be nearly everything.
#
# So cut what is there into four parts and let each rank keep one of them, its **shard**. The trouble is that somebody
# may need the rest. *Predict:* parameters, gradients, optimizer state: which of these can you cut without sending a
# single byte more than before?
#
# The answer is hidden inside the all-reduce.
#
# ## 2. Inside an all-reduce
#
# An all-reduce is one of the **collectives**: operations that all ranks call together. Here are four of them. Each
# rank has a tensor of four numbers, and rank $r$ fills it with $2^r$. So you can tell from any sum who is in it:
# $2^0 + 2^2 = 5$ is from ranks 0 and 2.

# %%
import torch
import torch.distributed as dist

from course_lib import launch


def four_collectives(rank):
    mine, part, gathered = torch.full((4,), 2**rank), torch.zeros(4, dtype=int), torch.zeros(4, dtype=int)
    total, copy = mine.clone(), mine if rank == 0 else torch.zeros(4, dtype=int)
    dist.reduce_scatter_single(part[rank : rank + 1], mine)
    dist.all_gather_single(gathered, part[rank : rank + 1])
    dist.all_reduce(total)
    dist.broadcast(copy, src=0)
    return {"broadcast": copy, "reduce-scatter": part, "all-gather": gathered, "all-reduce": total}

for name, tensor in launch(four_collectives, world_size=4).results[1].items():
    print(f"rank 1 after the {name:15}", tensor.tolist())

# %% [markdown]
# (The all-gather had the result of the reduce-scatter to begin with.) Each of them can be made of sends and receives,
# between neighbors in a ring or between the branches of a tree. Here you can watch every piece on its way: a row is a
# rank, a column is a piece, and a number in a piece is a rank that is in the sum. *Predict* before you choose *Play*:
# what do you have when an all-gather comes after a reduce-scatter?
#
# 1. Play the ring reduce-scatter, and then the ring all-gather.
# 2. Play the ring all-reduce, and stop half way. What has just ended, and what begins?
# 3. Take eight ranks. *Pin* the ring all-reduce and go on to the tree all-reduce. Which takes longer, and who waits?

# %%
from course_lib.classroom.widgets.collectives import collective_explorer

collective_explorer("ring reduce-scatter", ranks=4)

# %% [markdown]
# - A **broadcast** gives everyone what one rank has.
# - A **reduce-scatter** adds up, and leaves each rank one piece of the sum.
# - An **all-gather** gives everyone the pieces of all.
# - An **all-reduce** adds up, and leaves everyone the whole sum. It is a reduce-scatter and an all-gather.
#
# The ring of the last lesson was built that way: once around to add up, once more to hand out. What does each half
# cost?

# %%
from course_lib.mechanisms.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def go_around(rank, ring):
    ring(torch.ones(parameters))

for ring in (ring_reduce_scatter, ring_all_gather, ring_all_reduce):
    sent = launch(go_around, 4, (ring,)).timeline.bytes_sent(0)
    print(f"{ring.__name__:20} each of four ranks sends {sent / (4 * parameters):.2f} times the gradients")

# %% [markdown]
# ### Not every all-reduce is a ring
#
# A ring sends few bytes, but in many steps, one after the other: $2(N-1)$ of them for $N$ ranks. Each takes the
# latency of a link, however little it carries. A **tree** adds up pairs, then pairs of pairs, and hands the sum down
# again. That takes $2\log_2 N$ steps, each with the whole tensor. A **hierarchical** all-reduce has a ring in each
# node (a machine with several devices), then rings across the nodes, each with a part of the tensor, then a ring in
# each node again. *Predict:* which is fastest for a small tensor, and which for a large one?
#
# Eight ranks in two nodes of four, on **emulated** links:

# %%
from math import log2

from torch.distributed.device_mesh import init_device_mesh

from course_lib import Link, Pace
from course_lib.mechanisms.collectives import hierarchical_all_reduce, tree_all_reduce

latency, bandwidth = 0.001, 2.5e6

def add_up(rank, way, size):
    tensor = torch.ones(size // 4)
    if way != "hierarchical":
        return {"ring": ring_all_reduce, "tree": tree_all_reduce}[way](tensor)
    across, inside = init_device_mesh("cpu", (2, 4)).get_all_groups()
    return hierarchical_all_reduce(tensor, inside, across)

# %% [markdown]
# A message takes {{latency:duration}}, and its bytes come on top, at {{bandwidth:data_size}} per second. So the formula
# is the number of steps, times how long each of them takes:

# %%
formulas = {
    "ring": lambda n, size, node: 2 * (n - 1) * (latency + size / n / bandwidth),
    "tree": lambda n, size, node: 2 * log2(n) * (latency + size / bandwidth),
    "hierarchical": lambda n, size, node: 2 * (node - 1) * (latency + size / node / bandwidth)
    + 2 * (n // node - 1) * (latency + size / n / bandwidth),
}

# %%
for size in (1_000, 1_000_000):
    for way, formula in formulas.items():
        seconds = launch(add_up, 8, (way, size), pace=Pace(link=Link(latency, bandwidth))).timeline.makespan
        predicted = formula(8, size, node=4)
        print(f"{size:9,} bytes, {way:12} emulated {1000 * seconds:7.1f} ms, formula {1000 * predicted:7.1f} ms")

# %% [markdown]
# The formulas say what the clocks say. So let them go on, to a thousand ranks in nodes of eight:

# %%
from course_lib.figures import collective_times

counts = [8 * 2**k for k in range(8)]
times = {
    f"an all-reduce of {name}": {way: {n: formula(n, size, 8) for n in counts} for way, formula in formulas.items()}
    for name, size in {"10 kB": 1e4, "10 MB": 1e7}.items()
}
collective_times(times, title="Left: latency counts. Right: bytes count.")

# %% [markdown]
# On the left, where latency counts, the ring's line climbs fastest and the tree wins in the end. On the right, where
# bytes count, the tree is last from the start. The hierarchy sends no more bytes than the ring, in far fewer steps:
# {{2 * (8 - 1) + 2 * (counts[-1] // 8 - 1)}} in place of {{2 * (counts[-1] - 1):,}} for {{counts[-1]:,}} ranks. And in
# a real cluster about {{7 / 8:percent}} of its bytes stay on the fast links inside a node, which this picture does not
# even count. Libraries such as NCCL choose among such ways by the size of the message and the number of ranks (its
# documentation names them under `NCCL_ALGO`). In what follows, as in most of this course, a collective counts as its
# ring.
#
# ## 3. What one piece is good for
#
# Back to the copies. Play the ring reduce-scatter to its end again: each rank then has the sum of one piece of the
# gradients. *Predict:* what can it already do with that, before anything else is sent?
#
# Here is a program that does it. *Predict* also: is that still the training of one process?

# %%
from course_lib import data
from course_lib.classroom.runs.training import flat, shares
from course_lib.model import TinyGPT


def mean_of_own_piece(model, inputs, targets):
    data.answer_loss(model(inputs), targets).backward()
    gradients = flat(parameter.grad for parameter in model.parameters())
    model.zero_grad()
    return ring_reduce_scatter(gradients) / dist.get_world_size()

# %%
def update_in_between(rank):
    model = TinyGPT(dtype=torch.float64)
    weights = flat(model.parameters())
    own = weights.tensor_split(dist.get_world_size())[rank]
    optimizer = torch.optim.AdamW([own], lr=1e-3)  # it has never seen the other shards
    for inputs, targets in shares(rank, samples=32, steps=5):
        own.grad = mean_of_own_piece(model, inputs, targets)  # the first half of an all-reduce
        optimizer.step()
        ring_all_gather(weights)  # the second half
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
    return weights

# %%
(alone,) = launch(update_in_between, world_size=1).results
shared = launch(update_in_between, world_size=4).results
print("all four have the same weights:", all(torch.equal(weights, shared[0]) for weights in shared))
print("the same as one process, up to rounding:", bool((shared[0] - alone).abs().max() < 1e-9))

# %% [markdown]
# With the sum of one piece, a rank can update that piece of the parameters. For that it needs the optimizer state of
# this piece alone. Then the all-gather hands out updated parameters, in place of gradients.
#
# The same training, the same bytes, and only a shard of the optimizer state on each rank. So that is the answer to
# section 1: the optimizer state can be cut for free, and the gradients too, since nobody needs more of their sum than
# its own piece.
#
# Rajbhandari et al. (2020) call this **ZeRO**, for "zero redundancy", and it has three stages:
#
# | | is cut | so that a rank |
# |---|---|---|
# | **ZeRO-1** | the optimizer state | updates its own shard only |
# | **ZeRO-2** | gradients, too | frees all gradients but its shard, during the backward pass |
# | **ZeRO-3** | parameters, too | gathers the parameters of a layer when it computes, and gives them up after it |
#
# PyTorch's name for the third is **FSDP**, fully sharded data parallelism.
#
# ## 4. Three stages, counted
#
# Data parallelism holds {{one / parameters:.0f}} bytes for each parameter on each rank. In a step of four ranks each
# sends {{replicas.timeline.bytes_sent(0) / parameters:.0f}}, which is {{sent / (4 * parameters):.1f}} times its
# gradients. *Predict* both numbers for each stage.

# %%
columns = ("parameters", "gradients", "optimizer", "together", "sent")
print("Bytes for each parameter:")
print(" " * 16, *(f"{column:>11}" for column in columns))
steps = {name: sharded_step(stage, ranks=4) for stage, name in STAGES.items()}
for name, step in steps.items():
    held = step.held[0]
    sizes = (held.parameters, held.gradients, held.optimizer, held.total, step.timeline.bytes_sent(0))
    print(f"{name:16}", *(f"{size / parameters:11.2f}" for size in sizes))

# %% tags=["build-only"]
sends = {name: step.timeline.bytes_sent(0) for name, step in steps.items()}

# %%
from course_lib.figures import memory_by_part

memory_by_part({name: step.held[0] for name, step in steps.items()}, title="What each of four ranks holds")

# %% [markdown]
# With four ranks, ZeRO-3 holds {{steps["ZeRO-3"].held[0].total / one:percent}} of what data parallelism holds. Stages 1
# and 2 send what data parallelism sends, and stage 3 sends {{sends["ZeRO-3"] / sends["ZeRO-1"]:.1f}} times as much.
# (Why are there {{steps["ZeRO-1"].held[0].gradients / parameters:.0f}} bytes of gradients in ZeRO-1? A rank has all of
# its own gradients, and its shard of their mean. ZeRO-2 frees the first during the backward pass.)
#
# With $N$ ranks and $\Psi$ parameters in 32 bits, by the formulas of the paper:
#
# | | held by each rank | with very many ranks | sent by each rank |
# |---|---|---|---|
# | data parallelism | $16\,\Psi$ | $16\,\Psi$ | $2\,\frac{N-1}{N}\cdot 4\,\Psi$ |
# | ZeRO-1 | $(8 + 8/N)\,\Psi$ | $8\,\Psi$ | the same |
# | ZeRO-2 | $(4 + 12/N)\,\Psi$ | $4\,\Psi$ | the same |
# | ZeRO-3 | $16/N\,\Psi$ | nearly nothing | $3\,\frac{N-1}{N}\cdot 4\,\Psi$ |
#
# And is it still the same training? Five steps in 64-bit numbers, against one process with the whole minibatch:

# %%
alone = sharded_step(stage=0, ranks=1, dtype=torch.float64, steps=5).weights
for stage, name in STAGES.items():
    weights = sharded_step(stage, ranks=4, dtype=torch.float64, steps=5).weights
    print(f"{name:16} the same as one process, up to rounding: {bool((weights - alone).abs().max() < 1e-9)}")

# %% [markdown]
# ### Question: which stage is enough?
#
# Every answer is tried on real ranks, with a small model and devices that are as small in proportion.

# %%
from lessons import Card

Card("enough_stage")

# %% [markdown]
# ## 5. Parameters that come and go
#
# In ZeRO-3 a rank holds a shard of each layer, and nobody can compute with that. So before a layer computes, an
# all-gather makes it whole, and after it the rank keeps its shard and frees the rest. That happens in the forward
# pass, and again in the backward pass. *Predict:* does a rank have to wait for each layer?
#
# Here is one step, and below it the same with `prefetch=False`. Devices and links are emulated:

# %%
from course_lib.figures import gantt

pace = Pace({"forward": 0.08, "backward": 0.16, "optimizer": 0.0}, Link(latency=0.0002, bandwidth=80e6))
ahead, waiting = (sharded_step(3, ranks=4, pace=pace, prefetch=prefetch).timeline for prefetch in (True, False))
gantt(ahead, waiting, 850, "One step of ZeRO-3, twice")

# %% [markdown]
# It does not have to wait if it asks in time. While one layer computes, the next one is already on its way, in the thin
# lane under each rank: that is called **prefetch**. Below, the same bytes travel while the rank waits. Even with
# prefetch, traffic is exposed in three places: before the first layer, in the middle, where the last layer is wanted
# back at once, and after the last gradient. (Point at a bar to read what it is. `all_to_all` is a
# reduce-scatter: everyone sends each piece to its owner, who adds up.)
#
# How does that compare with the other stages? (A device needs {{pace.device["forward"]:duration}} for the forward pass
# of the whole minibatch and {{pace.device["backward"]:duration}} for the backward pass, but a rank has only its share
# to compute. Links carry {{pace.link.bandwidth:data_size}} per second.)

# %%
for stage, name in STAGES.items():
    step = sharded_step(stage, ranks=4, pace=pace).timeline
    print(f"{name:16} {1000 * step.makespan:5.1f} ms, {1000 * step.busy(0):4.1f} ms of it computing")
print(f"{'without prefetch':16} {1000 * waiting.makespan:5.1f} ms")

# %% [markdown]
# ZeRO-3 sends the most, and is still faster than stages 1 and 2 here. These gather all updated parameters at the end of
# a step, and nothing is left there to hide that behind. (They could gather in the next forward pass; Megatron-LM does,
# with `--overlap-param-gather`.)
#
# When can all of it hide? A layer of $P$ parameters takes $2PT$ FLOPs for $T$ tokens, and $2P$ bytes to gather in 16
# bits. With $F$ FLOPs per second and a link of $\beta$ bytes per second, computing takes longer than gathering if
#
# $$\frac{2PT}{F} \;\ge\; \frac{2P}{\beta} \qquad\text{or}\qquad T \;\ge\; \frac{F}{\beta}$$
#
# The size of the layer is gone. What counts is how many tokens a rank computes at a time:

# %%
from course_lib.planner import Cluster

for device, network in {"A100-80GB": "InfiniBand HDR", "H100-80GB": "InfiniBand NDR"}.items():
    cluster = Cluster(device, between=network)
    speed = cluster.spec.peak["bf16"] * cluster.spec.matmul
    for where, link in (("inside a node", cluster.inside_link), ("one network card", cluster.between_link)):
        tokens = round(speed / link.achieved, -2)
        print(f"{device}, {where:17} {link.name:15} about {tokens:6,.0f} tokens for each device")

# %% [markdown]
# (These are the planner's figures for what devices and links really reach. In nodes of eight cards, a device's share of
# the traffic between nodes can use all of them.)
#
# ### Question: what stage 3 sends and stage 1 does not

# %%
Card("stage_3_sends")

# %% [markdown]
# ## 6. Compute again instead of keeping
#
# The ledger counted parameters, gradients and optimizer state. There was a fourth kind, the activations that the
# forward pass leaves for the backward pass. *Predict:* what does ZeRO-3 do about these?

# %%
for name, step in steps.items():
    print(f"{name:16} at most {step.activations[0]:9,} bytes of activations")

# %% [markdown]
# Nothing. They belong to a rank's own samples, so there are no copies to take away. But there is another way, and one
# process can use it too: keep only what goes *into* each layer, and compute the rest again when the backward pass comes
# to that layer. This is called **recomputation**, or activation checkpointing. In PyTorch it is
# `torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)` in place of `layer(x)`. *Predict:* how much memory
# does it save, and how much longer does a step take?

# %%
again = {}
for recompute in (False, True):
    again[recompute] = step = sharded_step(3, ranks=4, pace=pace, recompute=recompute)
    timeline, what = step.timeline, "compute again" if recompute else "keep"
    print(f"{what:14} {step.activations[0]:9,} bytes, {1000 * timeline.busy(0):.1f} ms of computing, "
          f"{1000 * timeline.makespan:.1f} ms a step, {timeline.bytes_sent(0):,} bytes sent")
print("the same weights, to the last bit:", torch.equal(again[False].weights, again[True].weights))

# %% [markdown]
# Only {{again[True].activations[0] / again[False].activations[0]:percent}} of the activations, for
# {{again[True].timeline.busy(0) / again[False].timeline.busy(0) - 1:percent}} more computing: a backward pass takes as
# long as two forward passes, so with a second forward pass there are four where there were three. Nothing more is sent,
# since a layer is gathered for its backward pass anyway. The numbers are the same to the last bit, since it is the same
# arithmetic.
#
# Count the FLOPs, on one process, to see that this is not only a matter of our emulated clock:

# %%
from torch.utils.flop_counter import FlopCounterMode

from lessons.L03_sharded_data_parallelism.runs import FOUR_LAYERS, compute_again


def flops(model, backward):
    with FlopCounterMode(display=False) as counter:
        loss = data.answer_loss(model(inputs), targets)
        if backward:
            loss.backward()
    return counter.get_total_flops()

# %%
inputs, targets = data.fixed_examples(32)
keeping, computing = TinyGPT(FOUR_LAYERS), TinyGPT(FOUR_LAYERS)
compute_again(computing)
forward = flops(keeping, backward=False)
print(f"keep: {flops(keeping, backward=True) / forward:.3f} forward passes, "
      f"compute again: {flops(computing, backward=True) / forward:.3f}")

# %% [markdown]
# (Less than four, for two reasons: the last block, which makes the model's answer, is not computed again, and PyTorch
# stops within a layer once it has all that the backward pass needs, just before the layer's last matrix product.) Of
# each layer its input is kept, and nothing else. Chen et al. (2016) proposed this for deep models; Korthikanti et al.
# (2022) compute again only what takes much memory and little time.

# %% tags=["build-only"]
from course_lib.planner.memory import RECIPES
from lessons.L03_sharded_data_parallelism.explorer import DEVICES, planned

recipe, first = RECIPES["bf16"], planned("6.7B", 8, 1)

# %% [markdown]
# ## 7. Turn the knobs
#
# Now for models that you could not run here. Everything is **modelled**, on A100 with {{first.capacity:memory_size}} in
# nodes of eight, {{first.plan.micro_batch:in_words}} samples of {{first.model.sequence:,}} tokens for each device, in
# mixed precision. (It also has {{sum(recipe)}} bytes for each parameter: {{recipe.parameter}} for the parameter,
# {{recipe.gradient}} for its gradient, and {{recipe.optimizer}} that the optimizer keeps. So ZeRO-1 can cut away
# {{recipe.optimizer}} of {{sum(recipe)}}.) Try these:
#
# 1. Take 6.7B on 8 devices. Which is the first stage that fits? Is its step longer than that of data parallelism?
# 2. Take 13B on 8 devices. There are two ways to make it fit: a higher stage, or recomputing. Which one is faster?
# 3. Stay with 13B, keep the activations, choose ZeRO-1, and add devices. Why does it never fit for certain?
# 4. Make 175B fit. How many devices does that take? What does a step lose to traffic on 512 of them?

# %%
from lessons.L03_sharded_data_parallelism.explorer import sharding_explorer

sharding_explorer()

# %% tags=["build-only"]
def first_stage(model, devices, recompute="none"):
    stages = {name: planned(model, devices, stage, recompute) for stage, name in STAGES.items()}
    return next((name, one.step_time.total) for name, one in stages.items() if one.fits)

(zero, shorter), (keeping, faster), (again, slower) = (
    first_stage("6.7B", 8), first_stage("13B", 8), first_stage("13B", 8, "full")
)
enough = next(n for n in DEVICES if planned("175B", n, 3, "full").fits)
never, most = planned("13B", DEVICES[-1], 1), planned("175B", DEVICES[-1], 3, "full").step_time

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. {{zero}} is the first, and its step is shorter, {{shorter:duration}} in place of
#    {{planned("6.7B", 8, 0).step_time.total:duration}}: each rank updates only its share of the parameters.
# 2. {{keeping}} while keeping the activations takes {{faster:duration}} a step. {{again}} with recomputing fits as
#    well, and takes {{slower:duration}}.
# 3. What ZeRO-1 does not cut stays: the parameters, their gradients, the activations, and a margin for what no tensor
#    is in. With {{DEVICES[-1]}} devices that is still {{never.memory.total:memory_size}}, and a device has
#    {{never.capacity:memory_size}}: it {{never.fit}}, where the software is lean.
# 4. {{enough}} devices are enough, with ZeRO-3 and recomputing. On {{DEVICES[-1]}} devices
#    {{most.data / most.total:percent}} of the step goes into traffic.
# </details>
#
# ## 8. The same in PyTorch
#
# `fully_shard` is PyTorch's ZeRO-3. It is called for each layer, and then for the whole model. Here it trains on our
# ranks, for the same five steps as in section 4:

# %%
from torch.distributed.fsdp import fully_shard


def in_pytorch(rank):
    model = TinyGPT(FOUR_LAYERS, dtype=torch.float64)  # the same seed on every rank
    for layer in (*model.blocks, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, targets in shares(rank, samples=32, steps=5):
        data.answer_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(parameter.full_tensor() for parameter in model.parameters())

# %%
theirs = launch(in_pytorch, world_size=4).results[0]
print("the same as ours, up to rounding:", bool((theirs - weights).abs().max() < 1e-9))

# %% [markdown]
# `weights` is what our ZeRO-3 had after five steps, and all of it is on real ranks. The same function runs under
# `torchrun --nproc-per-node 4`, with `dist.init_process_group()` before it. What `fully_shard` does differently:
#
# - It cuts every parameter by its first dimension, into `DTensor`s, which know what the other ranks hold. Ours lays all
#   parameters of a layer end to end and cuts that.
# - It does not make the ranks equal at the start. Give all of them the same seed, or load a checkpoint.
# - It averages over ranks as if all shares had the same size. Ours counts each by its samples.
# - With `reshard_after_forward=False` it keeps the parameters from forward to backward. The question above showed what
#   that sends.
# - On a grid of ranks, made by `init_device_mesh` as in section 2, it shards inside a node and replicates across nodes.
#
# The file to read is `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`, from `unshard` to `post_backward`. For
# ZeRO-1 there is `torch.distributed.optim.ZeroRedundancyOptimizer`.
#
# ## What you know now
#
# - An all-reduce is a reduce-scatter and an all-gather. An update fits between the two.
# - ZeRO-1 cuts the optimizer state and ZeRO-2 the gradients, and both send what data parallelism sends. ZeRO-3 cuts the
#   parameters, too, and sends {{sends["ZeRO-3"] / sends["ZeRO-1"]:.1f}} times as much.
# - It is the training of one process, up to rounding, in every stage.
# - Parameters of ZeRO-3 can travel while the layer before computes, if a rank has enough tokens at a time.
# - Recomputing saves activations, which no stage does, for one more forward pass.
#
# ### When it stops being true
#
# - **There is too little to compute.** With few tokens on each rank, or slow links, the traffic of ZeRO-3 is exposed.
# - **Gradients are added up over several passes.** If a rank takes its share in small portions, ZeRO-3 gathers the
#   parameters anew for each of them.
# - **A layer is too large.** While it computes, it is whole, with all its activations. Then it has to be cut inside.
# - **The optimizer needs whole matrices.** Adam works number by number. What looks at a matrix as a whole, as Muon and
#   Adafactor do, cannot work on a flat shard.
#
# ### Further reading
#
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC20: the three
#   stages.
# - Zhao et al. 2023, *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, VLDB 16(12): prefetch, and
#   what it took in practice.
# - Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174: recomputing.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198.
# - Thakur et al. 2005, *Optimization of Collective Communication Operations in MPICH*, International Journal of High
#   Performance Computing Applications 19(1): rings, trees, and when each is best.
#
# **Next:** the [exercise](../exercises/03_sharded_data_parallelism/03_sharded_data_parallelism.ipynb). Build a
# reduce-scatter, ZeRO-1, and a layer that comes and goes, with a check that tells you what your solution costs. Then
# [layer-wise model parallelism](04_layerwise_model_parallelism.ipynb), which cuts the model itself.
