# %% [markdown]
# # Sharded data parallelism
#
# **What you do:** take away from four replicas what is redundant, step by step, until none of it is left. Count what
# that saves and what it sends. Then save activations as well, by computing them again.<br>
# **Afterwards you can:** say what each stage of ZeRO holds and sends, take the lowest one that is enough,
# and say when to recompute.<br>
# **Time:** 60 minutes.<br>
# **You need:** [One machine is not enough](01_one_machine_is_not_enough.ipynb) and
# [Data parallelism](02_data_parallelism.ipynb).
#
# Decide on an answer before you run the next cell, even if it is a guess. (This page comes with its results. To hide
# them until you get there, choose *Clear Outputs of All Cells* in the *Edit* menu.)
#
# ## 1. What four replicas hold
#
# Data parallelism makes training faster, but it does not make a model fit. Can the same ranks do the same training, and
# hold less?
#
# Four ranks train a small model, and just before an update we stop and look. A rank then holds parameters, their
# gradients, and the state of AdamW; the outputs of the model stand here for all activations. *Predict:* which of these
# four are equal on all ranks, number by number?

# %%
import torch
import torch.distributed as dist

from course_lib import data, launch
from course_lib.classroom.runs.training import flat, shares
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.model import TinyGPT
from lessons.L03_sharded_data_parallelism.runs import FOUR_LAYERS, STAGES, sharded_step


def before_the_update(rank):
    replica = DataParallel(TinyGPT(FOUR_LAYERS))
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3)
    for inputs, targets in shares(rank, samples=32, steps=2):
        optimizer.step()  # in the first round nothing, since there are no gradients yet
        outputs = replica(inputs)
        data.answer_loss(outputs, targets).backward()
        replica.finish()
    weights = list(replica.parameters())
    state = [tensor for weight in weights for tensor in optimizer.state[weight].values()]
    return {
        "parameters": flat(weights), "gradients": flat(weight.grad for weight in weights),
        "optimizer state": flat(state), "outputs": outputs.detach().flatten(),
    }

# %%
held = launch(before_the_update, world_size=4).results
parameters = len(held[0]["parameters"])
for kind, mine in held[0].items():
    equal = sum(torch.equal(mine, other[kind]) for other in held)
    print(f"{kind:16} {mine.nbytes:9,} bytes on each rank; the same as rank 0's on {equal} of 4")

# %% tags=["build-only"]
of_model = [[rank[kind].numpy().tobytes() for rank in held] for kind in ("parameters", "gradients", "optimizer state")]
distinct, together = (sum(len(one) for kind in of_model for one in count(kind)) for count in (set, list))

# %% [markdown]
# So of what four replicas hold for the model, {{1 - distinct / together:percent}} is redundant: somebody else has the
# same numbers. With a thousand ranks it would be nearly everything. Only what comes from a rank's own samples is not.
#
# So cut the first three into four parts each, and let every rank keep one of them, its **shard**. The trouble is that
# somebody may need the rest. *Predict:* parameters, gradients, optimizer state: which of these can you cut without
# sending a single byte more than before?
#
# The answer is hidden inside the all-reduce.
#
# ## 2. Inside an all-reduce
#
# An all-reduce is one of the **collectives**: operations that all ranks call together. Here are four of them. Each
# rank has a tensor of four numbers, and rank $r$ fills it with $2^r$. So you can tell from any sum who is in it:
# $2^0 + 2^2 = 5$ is from ranks 0 and 2. The all-gather begins with what the reduce-scatter has left. *Predict:* which
# four numbers does rank 1 hold after each?

# %%
def four_collectives(rank):
    mine = torch.full((4,), 2**rank)
    copy = mine.clone() if rank == 0 else torch.zeros(4, dtype=int)
    part, gathered = torch.zeros(4, dtype=int), torch.zeros(4, dtype=int)
    dist.broadcast(copy, src=0)
    dist.reduce_scatter_single(part[rank : rank + 1], mine)
    dist.all_gather_single(gathered, part[rank : rank + 1])
    dist.all_reduce(mine)
    return {"broadcast": copy, "reduce-scatter": part, "all-gather": gathered, "all-reduce": mine}

for name, tensor in launch(four_collectives, world_size=4).results[1].items():
    print(f"rank 1 after the {name:15}", tensor.tolist())

# %% [markdown]
# Each of them can be made of sends and receives, between neighbors in a ring or between the branches of a tree. Here
# you can watch every piece on its way. The ranks stand on a circle; a slot in a rank is a piece, and a pie in it is a
# sum: each wedge points to a rank whose numbers are in it. *Predict* before you choose *Play*: after which round of a
# ring all-reduce is the first sum finished?
#
# 1. Play the ring reduce-scatter, and then the ring all-gather.
# 2. Play the ring all-reduce, and stop half way. What has just ended, and what begins?
# 3. Take eight ranks, and go from the ring all-reduce to the tree, and to the hierarchy. Who has to wait, and how much
#    does each rank send?

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
# A ring passes pieces on to a neighbor, around and around. Here are three other ways to the same sum:
#
# - a **tree**: pairs add up their tensors, then pairs of pairs, and the whole sum comes down again the same way;
# - a **hierarchical all-reduce**: a ring in each node (a machine with several devices), then rings across the nodes,
#   each with a part of the tensor, then a ring in each node again;
# - **halving and doubling**: a rank swaps half of its tensor with somebody far away, adds up, swaps half of that half
#   with somebody closer, and so on; then all of it backward.
#
# *Predict:* which is fastest for a small tensor, and which for a large one?

# %%
from torch.distributed.device_mesh import init_device_mesh

from course_lib.mechanisms.collectives import hierarchical_all_reduce, tree_all_reduce


def swap(mine, theirs, partner):
    both = [dist.P2POp(dist.irecv, theirs, partner), dist.P2POp(dist.isend, mine, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()

def halving_and_doubling(tensor):
    rank, distance, swapped = dist.get_rank(), dist.get_world_size() // 2, []
    while distance:
        halves = tensor.chunk(2)
        kept, given = halves if rank & distance == 0 else halves[::-1]
        swap(given, arriving := torch.empty_like(kept), rank ^ distance)
        kept += arriving
        swapped.append((kept, given, rank ^ distance))
        tensor, distance = kept, distance // 2
    for kept, given, partner in reversed(swapped):
        swap(kept, given, partner)

# %%
def hierarchy(tensor):
    across, inside = init_device_mesh("cpu", (2, 4)).get_all_groups()  # eight ranks in two nodes of four
    hierarchical_all_reduce(tensor, inside, across)

WAYS = {
    "ring": ring_all_reduce, "tree": tree_all_reduce, "hierarchy": hierarchy, "halving, doubling": halving_and_doubling
}

def add_up(rank, way, size):
    tensor = torch.full((size // 4,), 2.0**rank)
    WAYS[way](tensor)
    return bool((tensor == 2**8 - 1).all())

# %% [markdown]
# Eight ranks, on **emulated** links. A message takes a **latency**, however little it carries, and its bytes come on
# top. So the formula for each way is the number of steps, times how long each of them takes:

# %%
from math import log2

from course_lib import Link, Pace

latency, bandwidth = 0.001, 2.5e6
formulas = {
    "ring": lambda n, size, node: 2 * (n - 1) * (latency + size / n / bandwidth),
    "tree": lambda n, size, node: 2 * log2(n) * (latency + size / bandwidth),
    "hierarchy": lambda n, size, node: 2 * (node - 1) * (latency + size / node / bandwidth)
    + 2 * (n // node - 1) * (latency + size / n / bandwidth),
    "halving, doubling": lambda n, size, node: 2 * log2(n) * latency + 2 * (n - 1) / n * size / bandwidth,
}

# %%
for size in (1024, 1_024_000):
    for way, formula in formulas.items():
        run = launch(add_up, 8, (way, size), pace=Pace(link=Link(latency, bandwidth)))
        predicted = formula(8, size, node=4)
        print(f"{size:9,} bytes, {way:17} emulated {1000 * run.timeline.makespan:7.1f} ms, "
              f"formula {1000 * predicted:7.1f} ms, right: {all(run.results)}")

# %% [markdown]
# The formulas say what the clocks say. So let them go on, to a thousand ranks in nodes of eight. One way is new. The
# tree above waits at every branch until the *whole* tensor is there. NCCL cuts the tensor into chunks that follow each
# other through the tree, and lays two trees, so that the leaves of one are branches of the other and everybody sends
# all the time. Then the tensor counts about twice, however high the tree is (Sanders et al. 2009). It is only a formula
# here, the one in the course's planner.

# %%
from course_lib.figures.axis import duration

formulas["double tree"] = lambda n, size, node: 2 * log2(n) * latency + 2 * size / bandwidth
print(f"{'modelled':24}{'8 ranks':>12}{'64 ranks':>12}{'1024 ranks':>12}")
for name, size in {"10 kB": 1e4, "10 MB": 1e7}.items():
    for way, formula in formulas.items():
        print(f"{name}, {way:17}", *(f"{duration(formula(n, size, 8)):>11}" for n in (8, 64, 1024)))

# %% tags=["build-only"]
large = {way: formula(1024, 1e7, 8) for way, formula in formulas.items()}

# %% [markdown]
# In the upper half, where latency counts, the ring takes longer and longer: it has $2(N-1)$ steps, and whatever halves
# the distance has $2\log_2 N$. In the lower half, where bytes count, most times come close to each other: each rank
# sends about twice the tensor, and no way sends less. Only the plain tree takes far longer, {{large["tree"]:duration}}
# in place of {{large["double tree"]:duration}}, since it sends everything again at each level, one after the other. So
# a tree is not slow for large tensors; a tree without chunks is.
#
# Halving and doubling is ahead in both halves. Why is it not used everywhere? The links here are all alike. In a
# cluster it is hardest on the slow ones: every rank swaps half of the tensor with somebody half the cluster away, all
# at the same time, while a ring talks to neighbors. And it wants a power of two. A hierarchy fits a real cluster: it
# crosses between nodes with an eighth of the tensor on each of eight devices, each through its own network card, where
# one flat ring would leave a node through a single card. (So NCCL lays several rings, one for each card.) Libraries
# choose by the size of the message and the number of ranks; for NCCL look for `NCCL_ALGO` in its documentation. In what
# follows, as in most of this course, a collective counts as its ring.
#
# ## 3. What one piece is good for
#
# Back to what is redundant. Play the ring reduce-scatter to its end again: each rank then has the sum of one piece of
# the gradients. *Predict:* what can it already do with that, before anything else is sent?
#
# Here is a program that does it. *Predict* also: is that still the training of one process?

# %%
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
# | **ZeRO-2** | gradients, too | keeps of each gradient only its shard, from the moment it is computed |
# | **ZeRO-3** | parameters, too | never holds a whole model, only the layer that computes |
#
# PyTorch's name for the third is **FSDP**, fully sharded data parallelism.
#
# Here are all three on four real ranks, beside plain data parallelism. A block is a shard, and a dashed place is one
# that somebody else has. *Predict* before you move the slider: which blocks go with each stage? Then choose *Play*,
# and watch what stage 3 does to a layer that has to compute.

# %%
from lessons.L03_sharded_data_parallelism.explorer import holding_explorer

holding_explorer()

# %% [markdown]
# With stage 3 a layer's shards come in from the other ranks, the layer computes, and it is gone again, once forward and
# once backward; its gradients leave as shards. Activations take as much with every stage: a rank's samples are
# its own.
#
# ## 4. Three stages, counted
#
# You have just built stage 1, and it sends what data parallelism sends. And stage 3?
#
# ### Question: what stage 3 sends and stage 1 does not

# %%
from lessons import Card

Card("stage_3_sends")

# %% tags=["build-only"]
alike = sharded_step(stage=0, ranks=4)

# %% [markdown]
# Now count. Data parallelism holds {{alike.held[0].total / parameters:.0f}} bytes for each parameter on each rank. In a
# step of four ranks each sends {{alike.timeline.bytes_sent(0) / parameters:.0f}}, which is
# {{sent / (4 * parameters):.1f}} times its gradients. *Predict* both numbers for each stage. (A ledger counts what a
# rank holds just before the update.)

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
largest = max(sum(weight.numel() for weight in layer.parameters()) for layer in TinyGPT(FOUR_LAYERS).blocks)

# %%
from course_lib.figures import memory_by_part

memory_by_part({name: step.held[0] for name, step in steps.items()}, title="What each of four ranks holds")

# %% [markdown]
# With four ranks, ZeRO-3 holds {{steps["ZeRO-3"].held[0].total / steps["data parallelism"].held[0].total:percent}} of
# what data parallelism holds, at this moment. While a layer computes it is whole, and so is its gradient until it is
# sent: here {{4 * largest / parameters:.1f}} bytes each on top, since a layer is {{largest / parameters:percent}} of
# this little model. (The more layers, the less. Another layer that is fetched ahead, as in section
# 5, comes on top.)
#
# Stages 1 and 2 send what data parallelism sends, and stage 3 sends {{sends["ZeRO-3"] / sends["ZeRO-1"]:.1f}} times as
# much. (Why are there {{steps["ZeRO-1"].held[0].gradients / parameters:.0f}} bytes of gradients in ZeRO-1? A rank has
# all of its own gradients, and its shard of their mean. ZeRO-2 frees the first during the backward pass.)
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
Card("enough_stage")

# %% [markdown]
# ## 5. Parameters that come and go
#
# In code, all of this is short. A parameter gets a `shard`, and the optimizer sees nothing else. `gather` makes a layer
# whole, `free` takes back its memory, and `keep_own_piece` is for a gradient that has just been computed:

# %%
def gather(layer, *_):
    for weight in layer.parameters():
        weight.untyped_storage().resize_(weight.nbytes)  # memory for all of it
        dist.all_gather_single(weight.data.view(-1), weight.shard)

def free(weights):
    for weight in weights:
        weight.untyped_storage().resize_(0)

def keep_own_piece(weight):
    total = torch.zeros_like(weight.shard)
    dist.reduce_scatter_single(total, weight.grad.flatten())
    weight.shard.grad = total if weight.shard.grad is None else weight.shard.grad + total
    weight.grad = None

# %% [markdown]
# The rest is to call them at the right moments, and PyTorch has hooks for these. A stage is no more than this:

# %%
def shard(model, stage, staying=()):
    for weight in model.parameters():
        weight.shard = weight.data.view(-1).chunk(dist.get_world_size())[dist.get_rank()].clone()
        if stage >= 2:
            weight.register_post_accumulate_grad_hook(keep_own_piece)  # as soon as its gradient is computed
        if stage == 3:
            weight.register_post_accumulate_grad_hook(lambda weight: free([weight]))
    for layer in model.blocks if stage == 3 else ():
        free(layer.parameters())
        layer.register_forward_pre_hook(gather)
        if layer not in staying:
            layer.register_forward_hook(free_until_backward)

def free_until_backward(layer, inputs, output):
    free(layer.parameters())
    output.register_hook(lambda _: gather(layer))  # when the backward pass comes to the layer

# %% [markdown]
# `staying` is for layers that are not freed between their forward and their backward pass. *Predict:* for which layer
# is freeing a waste?
#
# Here is a step. It can have several **passes**, each with a minibatch of its own, whose gradients are added up before
# the update: that is **gradient accumulation**, and every pipeline does it. *Predict* also: with four passes in a step,
# does each stage send as much as with one?

# %%
def step_in_shards(rank, stage, passes=1, last_stay=0, dtype=torch.float32):
    model = TinyGPT(FOUR_LAYERS, dtype=dtype)
    shard(model, stage, staying=[*model.blocks][6 - last_stay :])
    optimizer = torch.optim.AdamW([weight.shard for weight in model.parameters()], lr=1e-3)
    for inputs, targets in shares(rank, 32, passes):
        (data.answer_loss(model(inputs), targets) / passes / dist.get_world_size()).backward()
    for weight in model.parameters() if stage == 1 else ():
        keep_own_piece(weight)
    optimizer.step()
    if stage < 3:
        gather(model)
    return [weight.shard for weight in model.parameters()]

# %%
def sent_by(*how):
    return launch(step_in_shards, 4, how).timeline.bytes_sent(0) / parameters

print("Bytes sent for each parameter:  1 pass  4 passes")
for stage in (1, 2, 3):
    print(f"{STAGES[stage]:30} {sent_by(stage):7.2f} {sent_by(stage, 4):9.2f}")
print(f"{'ZeRO-3, last two blocks stay':30} {sent_by(3, 1, 2):7.2f} {sent_by(3, 4, 2):9.2f}")

def updated(ranks, stage):
    shards = launch(step_in_shards, ranks, (stage, 4, 0, torch.float64)).results
    return torch.cat([torch.cat(pieces) for pieces in zip(*shards, strict=True)])

apart = max((updated(4, stage) - updated(1, 1)).abs().max() for stage in (1, 2, 3))
print("all three the same as one process, up to rounding:", bool(apart < 1e-9))

# %% tags=["build-only"]
four = {stage: sent_by(stage, 4) for stage in (1, 2, 3)}

# %% [markdown]
# The last layer is wanted back at once, so it can stay. That saves its second gather and, more important, nobody waits
# for it at the turn from forward to backward. In a deep model the bytes are few; the waiting counts. (`fully_shard` has
# `reshard_after_forward=False` for it, as TorchTitan uses it for its last layers.)
#
# And "ZeRO-2 sends the same" is true of one pass only. Stage 1 adds up its gradients where they are and sends them once
# in a step. Stage 2 has no room for whole gradients, so it scatters them in every pass, and stage 3 gathers its
# parameters anew as well: {{four[2] / four[1]:.1f}} and {{four[3] / four[1]:.0f}} times the bytes of stage 1 with four
# passes. That is why practice joins ZeRO-1 to pipelines, which live on many passes, and lets a
# rank compute many samples at a time with ZeRO-3.
#
# ### Who waits?
#
# *Predict:* does a rank have to wait for every layer that it gathers?
#
# Here is the course's own ZeRO-3, `FullySharded`, in two variants that send the same. Devices and links are emulated:

# %%
from course_lib.figures import gantt

pace = Pace({"forward": 0.08, "backward": 0.16, "optimizer": 0.0}, Link(latency=0.0002, bandwidth=80e6))
ahead, waiting = (sharded_step(3, ranks=4, pace=pace, prefetch=prefetch).timeline for prefetch in (True, False))
gantt(ahead, waiting, 850, "One step of ZeRO-3, twice", names=("gathered ahead", "gathered when needed"))

# %% [markdown]
# It does not have to wait if it asks in time. Above, the next layer is already on its way while one computes, in the
# thin lane under each rank: that is called **prefetch**. Below, the same bytes travel while the rank waits. Even with
# prefetch, traffic is exposed in three places: before the first layer, in the middle, where the last layer is wanted
# back at once, and after the last gradient. (Point at a bar to read what it is. The reduce-scatter shows as
# `all_to_all`: everyone sends each piece to its owner, and the owner then adds up.)
#
# How does that compare with the other stages? (A device needs {{pace.device["forward"]:duration}} for the forward pass
# of the whole minibatch and {{pace.device["backward"]:duration}} for the backward pass, but a rank has only its share
# to compute. Links carry {{pace.link.bandwidth:data_size}} per second.)

# %%
for stage, name in STAGES.items():
    step = sharded_step(stage, ranks=4, pace=pace).timeline
    print(f"{name:16} {1000 * step.makespan:5.1f} ms, {1000 * step.busy(0):4.1f} ms of it computing")
print(f"{'without prefetch':16} {1000 * waiting.makespan:5.1f} ms")

# %% tags=["build-only"]
from course_lib.planner import Cluster, Plan, estimate
from course_lib.planner.estimate import HIDES
from course_lib.planner.models import GPT3
from lessons.L03_sharded_data_parallelism.explorer import DEVICES, planned

hidden = HIDES
paced = {name: sharded_step(stage, ranks=4, pace=pace).timeline for stage, name in STAGES.items()}

def gathering(name):
    spans = [span for span in paced[name].of(0) if span.name == "all_gather" and not span.background]
    return sum(span.duration for span in spans)

at_scale = {name: planned("13B", 64, stage).step_time for stage, name in STAGES.items()}
one_card = [
    estimate(GPT3["13B"], Cluster(nodes=8, nics_per_node=1), Plan(64, zero=stage, micro_batch=2), 128).step_time.total
    for stage in (1, 3)
]

# %% [markdown]
# Can you find these numbers in what is sent? ZeRO-1 as we have built it scatters after the backward pass and gathers
# after the update, so all of its traffic is exposed. ZeRO-2 scatters during the backward pass, all but the last bucket,
# and gathers at the end. ZeRO-3 sends the most, and is still faster than both *here*.
#
# That is not a law. {{gathering("ZeRO-2"):duration}} of ZeRO-2's step is the gather at the end, which could hide in the
# next forward pass as well; Megatron-LM does that with `--overlap-param-gather`, and it also scatters during the
# backward pass in stage 1. Then only the first and the last bucket are exposed, as in data parallelism. And hidden
# traffic is not free on a real device, since it takes cores and memory bandwidth from what computes: the course's
# planner, fitted to published steps, finds {{hidden:percent}} of it hidden. For a model of 13 billion parameters on 64
# A100 it expects {{at_scale["ZeRO-1"].total:.2f}} s for a step of ZeRO-1, with {{at_scale["ZeRO-1"].data:duration}} of
# exposed traffic, and {{at_scale["ZeRO-3"].total:.2f}} s for one of ZeRO-3, with {{at_scale["ZeRO-3"].data:duration}}.
# So the higher stage is for memory, and costs time: so little here that two set-ups on one machine may differ by more,
# and {{one_card[1] / one_card[0] - 1:percent}} if each node has a single network card in place of eight.
#
# ### When can a layer hide behind another?
#
# A layer of $P$ parameters takes $2PT$ FLOPs for $T$ tokens, and $2P$ bytes to gather in 16 bits. (The backward pass
# has twice as much of both, if gradients travel in 16 bits, too.) With $F$ FLOPs per second and $\beta$ bytes per
# second for each device, computing takes longer than gathering if
#
# $$\frac{2PT}{F} \;\ge\; \frac{2P}{\beta} \qquad\text{or}\qquad T \;\ge\; \frac{F}{\beta}$$
#
# The size of the layer is gone. What counts is how many tokens a rank computes at a time. *Predict* it for an H100 in a
# cluster: tens, hundreds, thousands?

# %%
from course_lib.planner import Cluster

for device, network in {"A100-80GB": "InfiniBand HDR", "H100-80GB": "InfiniBand NDR"}.items():
    cluster = Cluster(device, between=network)
    speed, card = cluster.spec.peak["bf16"] * cluster.spec.matmul, cluster.between_link
    ways = {f"inside a node, {cluster.inside_link.name}": cluster.inside_link.achieved}
    ways |= {f"across nodes, {cards} x {card.name}": cards * card.achieved for cards in (8, 1)}
    for way, bytes_per_second in ways.items():
        print(f"{device}, {way:34} about {round(speed / bytes_per_second, -1):6,.0f} tokens for each device")

# %% [markdown]
# (These are the planner's figures for what devices and links really reach. By data sheets, with 990 TFLOP/s and 400
# GB/s, an H100 needs 2,475 tokens; Austin et al. 2025 count so.) A node with eight cards brings in a layer once,
# through all of them, and shares it inside. With a single card for the whole node it takes eight times as many tokens:
# several long sequences for each device, and then activations are what does not fit. Which brings us to these.
#
# ## 6. Compute again instead of keeping
#
# There was a fourth kind in section 1, the activations that the forward pass leaves for the backward pass. *Predict:*
# which stage leaves fewest of them on a rank?

# %%
for name, step in steps.items():
    print(f"{name:16} at most {step.activations[0]:9,} bytes of activations")

# %% [markdown]
# None of them. They belong to a rank's own samples, so nothing is redundant. But there is another way, and one process
# can use it too: keep only what goes *into* each layer, and compute the rest again when the backward pass comes to that
# layer. This is called **recomputation**, or activation checkpointing. In PyTorch it is
# `torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)` in place of `layer(x)`. *Predict:* how much longer
# does a step take?

# %%
again = {}
for recompute in (False, True):
    again[recompute] = step = sharded_step(3, ranks=4, pace=pace, recompute=recompute)
    timeline, what = step.timeline, "compute again" if recompute else "keep"
    print(f"{what:14} {step.activations[0]:9,} bytes, {1000 * timeline.busy(0):.1f} ms of computing, "
          f"{1000 * timeline.makespan:.1f} ms a step, {timeline.bytes_sent(0):,} bytes sent")
print("the same weights, to the last bit:", torch.equal(again[False].weights, again[True].weights))

# %% [markdown]
# It keeps only {{again[True].activations[0] / again[False].activations[0]:percent}} of the activations, for
# {{again[True].timeline.busy(0) / again[False].timeline.busy(0) - 1:percent}} more computing: a backward pass takes as
# long as two forward passes, so with a second forward pass there are four where there were three. Nothing more is sent,
# since a layer is gathered for its backward pass anyway. The numbers are the same to the last bit, since it is the same
# arithmetic.
#
# Count the FLOPs, on one process, to see that this is not only a matter of our emulated clock:

# %%
from torch.utils.flop_counter import FlopCounterMode

from lessons.L03_sharded_data_parallelism.runs import compute_again


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
# stops within a layer once it has all that the backward pass needs, just before the layer's last matrix product.) Chen
# et al. (2016) proposed this for deep models.
#
# ### Some of it is cheap to compute again
#
# Products of matrices take nearly all of the time, but norms, activation functions and the scores of attention leave
# much of the memory. **Selective recomputation** computes only the latter again. For GPT-3 with 175 billion parameters
# it saves 70% of the activations (Korthikanti et al. 2022), most of it scores; an attention kernel that never stores
# scores (FlashAttention) does that part by itself. In PyTorch you say which results to keep:

# %%
from functools import partial

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

products = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
selective = TinyGPT(FOUR_LAYERS)
for layer in selective.blocks[1:-1]:
    keep_products = partial(create_selective_checkpoint_contexts, products)
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=keep_products)
print(f"keep the products, compute the rest again: {flops(selective, backward=True) / forward:.3f} forward passes")

# %% [markdown]
# ### When does it pay?
#
# If everything fits, a step that recomputes is only longer. But memory can be spent on a larger micro-batch (the
# samples that a device computes at a time), which makes for better matrix products, and for more to hide a gather
# behind. *Predict:* 13 billion parameters on eight A100 with ZeRO-3. With which kind of recomputation does the planner
# expect most tokens per second, if each takes the largest micro-batch that fits?

# %%
from lessons.L03_sharded_data_parallelism.explorer import AGAIN, planned


def largest_that_fits(model, devices, recompute):
    tried = [planned(model, devices, 3, recompute, samples) for samples in (1, 2, 4, 8, 16)]
    return [one for one in tried if one.fits][-1]

for recompute, what in AGAIN.items():
    one = largest_that_fits("13B", 8, recompute)
    print(f"compute {what:13} again, micro-batches of {one.plan.micro_batch:2}: "
          f"{one.tokens_per_second / 8:5,.0f} tokens per second for each device")

# %% tags=["build-only"]
kinds = {recompute: largest_that_fits("13B", 8, recompute).tokens_per_second for recompute in AGAIN}
single = planned("13B", 8, 3, "none", 1).tokens_per_second

# %% [markdown]
# Selective recomputation costs next to nothing here, so a larger micro-batch is ahead by {{kinds["selective"] /
# kinds["none"] - 1:percent}}, less than two set-ups of one machine may differ by. And it depends on what is
# selected. Torchtitan also recomputes every second matrix product, and with the same two samples for each of 64 A100 a
# model of 13 billion parameters falls from 61.1% of the peak to 53.8% (docs/performance.md). Full recomputation loses
# here: no micro-batch makes up for the second forward pass. (Compared with micro-batches of one sample it would win, by
# {{kinds["full"] / single - 1:percent}}. A comparison is only fair if each side has its best micro-batch.) So take what
# is enough: nothing, then selective, then full. IBM's published settings for FSDP go the same way: no recomputation for
# 7 billion parameters, selective for 13, full for 34 and 70 (foundation-model-stack/fms-fsdp, 128 A100).

# %% tags=["build-only"]
from course_lib.planner.memory import RECIPES

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
# 2. Take 13B on 8 devices. There are several ways to make it fit, by a higher stage or by recomputing. Which is
#    slowest?
# 3. Stay with 13B, keep the activations, choose ZeRO-1, and add devices. Why does it never fit for certain?
# 4. Make 175B fit. How many devices does that take? What does a step lose to traffic on 512 of them?

# %%
from lessons.L03_sharded_data_parallelism.explorer import sharding_explorer

sharding_explorer()

# %% tags=["build-only"]
def first_stage(model, devices, recompute="none"):
    stages = {name: planned(model, devices, stage, recompute) for stage, name in STAGES.items()}
    return next((name, one.step_time.total) for name, one in stages.items() if one.fits)

(zero, shorter), (keeping, faster) = first_stage("6.7B", 8), first_stage("13B", 8)
(some, as_fast), (again, slower) = first_stage("13B", 8, "selective"), first_stage("13B", 8, "full")
enough = next(n for n in DEVICES if planned("175B", n, 3, "full").fits)
never, most = planned("13B", DEVICES[-1], 1), planned("175B", DEVICES[-1], 3, "full").step_time

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. {{zero}} is the first, and its step is shorter, {{shorter:duration}} in place of
#    {{planned("6.7B", 8, 0).step_time.total:duration}}: each rank updates only its share of the parameters.
# 2. {{keeping}} while keeping the activations takes {{faster:.2f}} s a step, {{some}} with selective recomputation
#    {{as_fast:.2f}} s, which a planner cannot tell apart. {{again}} with every layer computed again fits as well, and
#    takes {{slower:.2f}} s.
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
# ranks, for the same five steps as in section 4. (It is imported where it is used: ranks have it loaded, and this
# notebook would need seconds.)

# %%
def in_pytorch(rank):
    from torch.distributed.fsdp import fully_shard

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
# - It averages over ranks as if all shares had the same size. Ours refuses shares of different sizes.
# - With `reshard_after_forward=False` it keeps the parameters from forward to backward, for all layers or for the last
#   one. What the model has outside of its layers stays anyway.
# - With `set_requires_gradient_sync(False)` it adds up whole gradients over several passes and scatters them in the
#   last. That is less to send, and more to hold.
# - On a grid of ranks, made by `init_device_mesh` as in section 2, it shards inside a node and replicates across nodes.
#
# The file to read is `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`, from `unshard` to `post_backward`.
#
# For ZeRO-1 there is `torch.distributed.optim.ZeroRedundancyOptimizer`. It saves the same memory. *Predict:* does it
# send the same?

# %%
from torch.nn.parallel import DistributedDataParallel

from course_lib.classroom.runs import after_barrier


def zero_1_in_pytorch(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(TinyGPT(FOUR_LAYERS))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    dist.barrier()
    ((inputs, targets),) = shares(rank, samples=32, steps=1)
    data.answer_loss(model(inputs), targets).backward()
    optimizer.step()

step = after_barrier(launch(zero_1_in_pytorch, world_size=4).timeline)
for operation in ("all_reduce", "broadcast"):
    sent_so = sum(span.bytes for span in step.of(0) if span.name == operation)
    print(f"{operation:10} {sent_so / parameters:.1f} bytes for each parameter")

# %% [markdown]
# It leaves the all-reduce of the gradients whole, and then every rank broadcasts the parameters that it has updated.
# Three halves of an all-reduce: the bytes of ZeRO-3, with the memory of ZeRO-1. (Megatron-LM's distributed optimizer
# and DeepSpeed's stage 1 put the update between the halves, as you did in section 3.)
#
# ## What you know now
#
# - An all-reduce is a reduce-scatter and an all-gather. An update fits between the two.
# - ZeRO-1 cuts the optimizer state and ZeRO-2 the gradients, and both send what data parallelism sends. ZeRO-3 cuts the
#   parameters, too, and sends {{sends["ZeRO-3"] / sends["ZeRO-1"]:.1f}} times as much. With several passes in a step,
#   only stage 1 sends no more.
# - It is the training of one process, up to rounding, in every stage.
# - Parameters of ZeRO-3 can travel while the layer before computes, if a rank has enough tokens at a time. Still, a
#   higher stage is for memory: where all of them hide what they can, it is not faster.
# - Recomputing everything saves activations, which no stage does, for one more forward pass. Selective recomputation
#   saves less of them, and costs little as long as it leaves out matrix products.
#
# ### When it stops being true
#
# - **There is too little to compute.** With few tokens on each rank, or slow links, the traffic of ZeRO-3 is exposed.
# - **Gradients are added up over several passes.** Then stage 2 scatters in each of them, and stage 3 gathers as well.
# - **A layer is too large.** While it computes, it is whole, with all its activations. Then it has to be cut inside.
# - **The optimizer needs whole matrices.** Adam works number by number. What looks at a matrix as a whole, as Muon and
#   Adafactor do, has to bring its shards together first.
#
# ### Further reading
#
# - Austin et al. 2025, *How to Scale Your Model*, chapter on GPUs: tokens for each device, by data sheet.
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC20: the three
#   stages.
# - Zhao et al. 2023, *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, VLDB 16(12): prefetch, and
#   what it took in practice.
# - Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174: recomputing.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198.
# - Sanders et al. 2009, *Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan*, Parallel Computing
#   35(12).
# - Thakur et al. 2005, *Optimization of Collective Communication Operations in MPICH*, International Journal of High
#   Performance Computing Applications 19(1): rings, trees, and when each is best.
#
# **Next:** the [exercise](../exercises/03_sharded_data_parallelism/03_sharded_data_parallelism.ipynb). Build a
# reduce-scatter, ZeRO-1, and a layer that comes and goes, with a check that tells you what your solution costs. Then
# [layer-wise model parallelism](04_layerwise_model_parallelism.ipynb), which cuts the model itself.
