# %% [markdown]
# # Combining mechanisms, by hand
#
# Replicas, stages and tensor ranks at once: a rank then works with three groups of others, some of its gradients are
# copies, some are shards, and some are partial sums. Three functions keep this apart. Here you write them. At the end
# they train a small GPT on eight real processes.
#
# | | you build | minutes | difficulty | points |
# |---|---|---|---|---|
# | 1 | `mesh_groups`: with whom a rank works, on each axis | 15 | ★☆☆ | 2 |
# | 2 | `gradient_norm`: the norm of a whole model, each number counted once | 20 | ★★☆ | 3 |
# | 3 | `complete_gradients`: what is added up, what is averaged, and where | 20 | ★★☆ | 3 |
# | 4 | `faster_completion`: an open task: two links at work at once | 25 | ★★★ | 3 + 2 |
#
# Below each function stands its check. It runs your function on 2, 3 and 4 ranks (in the last part also on 8), in small
# cases that become harder one thing at a time. Once nothing is wrong, it tells you what your solution costs, beside the
# lowest price known. Nothing that you write can break anything. Run a check as often as you like. The 2 points beside
# those of an open task are for three sentences. No check can read them, so a person does.

# %%
import torch
import torch.distributed as dist

from course_lib import launch
from course_lib.data import answer_loss, minibatches, train_test_split
from course_lib.mechanisms.hybrid import ModelPart
from course_lib.mechanisms.pipeline import run_schedule
from course_lib.mechanisms.tensor_parallel import placements
from course_lib.model import GPTConfig, TinyGPT
from course_lib.schedules import SCHEDULES
from lessons.L08_combining_mechanisms import checks

# %% [markdown]
# ## 1. Ranks on a mesh
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the three groups of a rank | 15 | ★☆☆ |
#
# A mesh of dp x pp x tp is a block. Tensor ranks talk the most, so they are next to each other; then come stages, and
# replicas last. A mesh of 2 x 2 x 3 has 12 ranks:
#
#                      replica 0                         replica 1
#     stage 0     rank 0   rank 1   rank 2          rank 6   rank 7   rank 8
#     stage 1     rank 3   rank 4   rank 5          rank 9   rank 10  rank 11
#
#     rank 4 works with    1, 4          on "pp": the other stages of its replica
#                          3, 4, 5       on "tp": those that share its layers
#                          4, 10         on "dp": those that hold the same part of the model
#
# Nothing is sent in this part. It is arithmetic, and all ranks have to do the same.


# %% nbgrader={"grade_id": "mesh_groups", "solution": true}
def mesh_groups(rank, dp, pp, tp):
    """With whom a rank shares each axis of a mesh.

    rank: a number from 0 to dp * pp * tp - 1.
    dp, pp, tp: how many replicas, stages and tensor ranks there are. Of two neighboring
        ranks, the tensor rank differs first, then the stage, then the replica.

    Returns {"dp": [...], "pp": [...], "tp": [...]}: for each axis, a list of all ranks that
    differ from this one on that axis alone, and this one, in ascending order (int).
    """
    ### BEGIN SOLUTION
    d, p, t = rank // (pp * tp), rank // tp % pp, rank % tp
    return {
        "dp": [(other * pp + p) * tp + t for other in range(dp)],
        "pp": [(d * pp + other) * tp + t for other in range(pp)],
        "tp": [(d * pp + p) * tp + other for other in range(tp)],
    }
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: three numbers</summary>
#
# In the picture, rank 7 has replica 1, stage 0 and tensor rank 1. How do you find these in the 7, with 2 stages and 3
# tensor ranks? It is like time: 7,384 seconds are 2 hours, 3 minutes and 4 seconds.
# </details>
# <details><summary>Hint 2: from three numbers to a rank</summary>
#
# How many ranks lie before replica 1 in the picture, and how many of that replica before its stage 1? So which rank has
# replica 1, stage 1 and tensor rank 2? (It is 11.)
# </details>
# <details><summary>Hint 3: a group</summary>
#
# Write down the three numbers of 1 and 4, of 3, 4 and 5, and of 4 and 10. In each group, which of them stay, and what
# does the other one do?
# </details>
# <details><summary>Hint 4: without digits</summary>
#
# `torch.arange(12).view(2, 2, 3)` is the block of the picture, and there `block[1, 0, 2]` is 8. Which of the three
# indices changes within a group on "pp"? And how do you find the place of a number in a block, without looking?
# </details>

# %% nbgrader={"grade_id": "check_mesh_groups", "grade": true, "locked": true, "points": 2}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L08_combining_mechanisms.checks")

### END HIDDEN TESTS
checks.mesh_groups(mesh_groups).points(2)

# %% [markdown]
# This order is a convention, and all tools have to keep to the same. Launchers number the ranks of a machine one after
# the other, so the tensor ranks come to lie in one machine, where links are fast.
#
# PyTorch's `init_device_mesh` makes the same block, in the order of the sizes it is given, and the process groups as
# well. In this course it stands in [`Mesh`](../../course_lib/mechanisms/mesh.py).

# %% [markdown]
# ## 2. The norm of a gradient on a mesh
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the norm of the whole model's gradient, known to all ranks | 20 | ★★☆ |
#
# To clip a gradient, all ranks need its norm: the root of the sum of all squares, over the whole model. Each rank has a
# part of it. Some numbers are nowhere else, others are on several ranks:
#
#                        copies on             who holds what, on a mesh of 2 x 1 x 2
#     a cut matrix       dp                    rank 0: left    1: right    2: left    3: right
#     a whole norm       dp, tp                rank 0: all     1: all      2: all     3: all
#     an embedding       dp, pp                the first stage and the last have it, stages between them do not
#
# Each number of the model has to be in the sum once.


# %% nbgrader={"grade_id": "gradient_norm", "solution": true}
def gradient_norm(gradients, copied_on, groups):
    """The norm of the whole model's gradient.

    gradients: a list of what this rank holds, tensors in float32. One may be None: that
        parameter is not trained. Other ranks hold other shapes and other numbers of them.
    copied_on: for each gradient a tuple of axes, like ("dp", "tp"). Along these there are
        copies, which are equal. Of a group of "dp" and "tp" all ranks have one, of a group
        of "pp" the first and the last. It may be (): then no other rank has a copy.
    groups: what mesh_groups returns for this rank. All ranks together are the mesh.

    Returns the norm as a number, the same on all ranks. Communicates once, one number. The
    gradients stay as they are.
    """
    ### BEGIN SOLUTION
    rank = dist.get_rank()
    squares = torch.zeros(())
    for gradient, axes in zip(gradients, copied_on, strict=True):
        counts = all(rank == groups[axis][0] for axis in axes)
        if counts and gradient is not None:
            squares += gradient.square().sum()
    dist.all_reduce(squares)
    return squares.sqrt().item()
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: what can be added up</summary>
#
# Three ranks hold 3, 4 and 12, and the norm of all is 13. Which numbers did they add up? A rank without gradients takes
# part, too: `torch.zeros(())` is a tensor of a single number.
# </details>
# <details><summary>Hint 2: copies</summary>
#
# Two replicas both hold [3, 4]. What is the norm, and what comes out if both add? How many of them should count it, and
# how can they agree on who it is, without a message?
# </details>
# <details><summary>Hint 3: a rule</summary>
#
# All ranks of a group have the same list `groups["dp"]`, and each knows its own number. What can a rank find out about
# its place in that list? Look at "pp", too: which ranks of that group have a copy?
# </details>
# <details><summary>Hint 4: several axes</summary>
#
# With copies on "dp" and "tp", on a mesh of 2 x 1 x 2, all four ranks have one. Ask each of them for its place on both
# axes. How many are in the same place on one of the axes, and how many on both?
# </details>

# %% nbgrader={"grade_id": "check_gradient_norm", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L08_combining_mechanisms.checks")

### END HIDDEN TESTS
checks.gradient_norm(gradient_norm).points(3)

# %% [markdown]
# One number, once: what it costs is the latency of the link, however large the model is.
#
# `torch.nn.utils.clip_grad_norm_` does the same for `DTensor`s, which know where they are cut and where they are
# copies. With plain tensors it takes the norm of what this rank holds, and says nothing. In this course it is
# [`clip_grad_norm`](../../course_lib/mechanisms/hybrid.py).

# %% [markdown]
# ## 3. Partial sums and averages
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the gradients of a step, complete on all ranks | 20 | ★★☆ |
#
# After the backward pass, no gradient is complete. Replicas have seen other samples, so what they have is averaged. And
# some parameters have worked in several places of one model. Each place knows a partial sum of their gradient:
#
#     a scale before a cut layer     each tensor rank knows what came back through its own columns     add on "tp"
#     an embedding, used twice       the first stage knows one partial sum, the last the other         add on "pp"
#     a bias after a cut layer       all tensor ranks have the same gradient, it is whole              add nowhere
#
# Whoever adds up too little or too much gets another training, and no error.


# %% nbgrader={"grade_id": "complete_gradients", "solution": true}
def complete_gradients(gradients, added_on, groups):
    """Make the gradients what one process with the whole minibatch and model would have.

    gradients: a list of what this rank has after its backward pass, tensors in float64. One
        may be None: that parameter is not trained, on no rank.
    added_on: for each gradient a tuple of axes, of "tp" and "pp". Along these each rank of
        the group has a partial sum. Along the others of these two axes nothing is missing.
    groups: a dict of process groups of this rank, for "dp", "pp" and "tp". A group may
        consist of this rank alone.

    The loss is a mean over samples, and each replica has seen the same number of them.
    Changes the tensors in place. Copies of a gradient end the same on all ranks, bit for bit.
    """
    ### BEGIN SOLUTION
    known = [(one, axes) for one, axes in zip(gradients, added_on, strict=True) if one is not None]
    for axis in ("tp", "pp", "dp"):
        chosen = [one for one, axes in known if axis in (*axes, "dp")]
        size = dist.get_world_size(groups[axis])
        if chosen and size > 1:
            flat = torch.cat([one.flatten() for one in chosen])
            dist.all_reduce(flat, group=groups[axis])
            if axis == "dp":
                flat /= size
            for one, total in zip(chosen, flat.split([one.numel() for one in chosen]), strict=True):
                one.copy_(total.view_as(one))
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: which group</summary>
#
# `dist.all_reduce(gradient, group=groups["dp"])` adds up over replicas alone. Without a group all ranks take part: what
# would be added to what?
# </details>
# <details><summary>Hint 2: sum or mean</summary>
#
# In each of two replicas, two tensor ranks know a partial sum: 2 and 3 in one, 4 and 5 in the other. The gradient of
# the whole minibatch is 7. Where did you add, and where did you take a mean? `dist.get_world_size(group)` is the size
# of a group.
# </details>
# <details><summary>Hint 3: one gradient</summary>
#
# Take the scale in the table, then the embedding, then the bias: through which groups does each of them have to go?
# Which of the groups is none of them allowed to leave out? And a gradient that is None: on which ranks is it?
# </details>
# <details><summary>Hint 4: fewer messages</summary>
#
# Each message pays the latency. Which gradients can travel together? `torch.cat` joins flat tensors and `.split([6,
# 2])` takes them apart, into tensors of their own: `copy_` brings numbers back to where they belong.
# </details>

# %% nbgrader={"grade_id": "check_complete_gradients", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L08_combining_mechanisms.checks")

### END HIDDEN TESTS
checks.complete_gradients(complete_gradients).points(3)

# %% [markdown]
# A message for each group is enough. With a message for each gradient the bytes are the same, but each pays the latency
# of the link.
#
# With PyTorch's `DTensor` each gradient says of itself whether it is `Partial`, and becomes whole where it is used.
# Shared parameters of a pipeline are left to you there. In this course it is
# [`complete_gradients`](../../course_lib/mechanisms/hybrid.py), where replicas also share out the update (ZeRO-1).

# %% [markdown]
# ## 4. An open task: two links
#
# | you build | minutes | difficulty |
# |---|---|---|
# | complete gradients sooner | 25 | ★★★ |
#
# Part 3 does one thing after the other. Change whatever you like, as long as the gradients stay exact: the emulated
# clock counts. Eight ranks, 2 x 2 x 2, stand in two nodes, a replica in each, and every rank has a link into its node
# and another one to the other node:
#
# | | a message arrives | bytes that leave in 1 ms | who talks there |
# |---|---|---|---|
# | inside a node | 4 ms after its last byte has left | 100 | tensor ranks, stages |
# | between nodes | 4 ms after its last byte has left | 25 | replicas |
#
# Each rank has 288 bytes of gradients that are complete in their replica, and 48 bytes of partial sums, half of them on
# "tp" and "pp", half on "pp" alone. The backward pass takes 40 ms, then all of them are there. An all-reduce of two
# ranks has two rounds, so it pays a latency twice. Use collectives or messages by hand, one or the other, in the three
# groups that are there; those of two groups do not slow each other down.
#
# **First on paper.** How long does part 3 take, with one message in each group? And what is the least that any function
# can take? What is complete has to cross between the nodes, in each direction, and each sum once.

# %%
expected, least = None, None  # your milliseconds

# %% [markdown]
# Four levels are on the scale: met, good, as good as ours, and far better than ours. Your part 3, as it is:

# %%
checks.faster_completion(complete_gradients)

# %% nbgrader={"grade_id": "faster_completion", "solution": true}
def faster_completion(gradients, added_on, groups):
    """Make each gradient that of the whole minibatch, in place, in as little emulated time as you can.

    gradients, added_on, groups: as for complete_gradients.
    """
    ### BEGIN SOLUTION
    known = [(one, axes) for one, axes in zip(gradients, added_on, strict=True) if one is not None]
    early = [one for one, axes in known if not axes]
    if early:
        message = torch.cat([one.flatten() for one in early])
        handle = dist.all_reduce(message, group=groups["dp"], async_op=True)
    complete_gradients([one for one, axes in known if axes], [axes for _, axes in known if axes], groups)
    if early:
        handle.wait()
        for one, mean in zip(early, message.split([one.numel() for one in early]), strict=True):
            one.copy_(mean.view_as(one) / dist.get_world_size(groups["dp"]))
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: who waits?</summary>
#
# Draw two lines, one for the link inside the node and one for the link between the nodes. Which of them does nothing in
# part 3, and when?
# </details>
# <details><summary>Hint 2: who need not wait?</summary>
#
# A mean over replicas of 6 and 8 is 7. If the 6 is 2 + 4 of two tensor ranks, which of the numbers can leave for the
# other node at once, and which cannot? With `async_op=True` a collective comes back at once, with a handle. All ranks
# have to begin the messages of a group in the same order.
# </details>
# <details><summary>Hint 3: how many messages?</summary>
#
# If each of four gradients leaves alone, how many latencies does the link between the nodes pay, one after the other?
# Which of the four are ready at the same time?
# </details>
# <details><summary>Hint 4: rounds</summary>
#
# Two ranks want the sum of what both have. How many latencies does an all-reduce of two rounds pay, and how many does
# it take if both speak at once? `dist.isend(tensor, rank, group)` names the other one by its number among all ranks,
# and `dist.get_process_group_ranks(group)` lists these.
# </details>

# %% nbgrader={"grade_id": "check_faster_completion", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L08_combining_mechanisms.checks")

### END HIDDEN TESTS
completed_sooner = checks.faster_completion(faster_completion)
completed_sooner.points(3)

# %% [markdown]
# Part 3 takes 78 ms: the 40, two latencies in each of three groups, one after the other, and the bytes. Ours is made of
# all-reduces, too, and takes 69: what is complete leaves at once, while the partial sums pay their four latencies
# inside. By hand, with messages that go straight, it is 57. No function is faster than 56: on four links, 4 x 288 bytes
# and the 48 of the sums take 12 ms to leave, and the last one needs 4 more. PyTorch's `DistributedDataParallel` and
# `fully_shard` begin with what is complete, too. The course's own step is
# [`train_step`](../../course_lib/mechanisms/hybrid.py).

# %%
print(f"part 3: you expected {expected} ms, and it takes 78. The least: you said {least}, the bound is 56.")

# %%
completed_sooner.idle

# %% [markdown]
# Why is your function faster? Write three sentences: what you save, what happens at the same time now, and what would
# change if the link inside a node were the slow one.

# %% [markdown] nbgrader={"grade_id": "why_faster_completion", "grade": true, "solution": true, "points": 2}
# The first 16 ms of the link between the nodes are no longer idle: what is complete leaves at once, and partial sums
# follow, so replicas pay two latencies more, and save the time of their bytes. While partial sums are added up inside a
# node, the other gradients are already on their way between the nodes. If the link inside were the slow one, the
# partial sums would take longest, and all that is complete would cross between the nodes behind them at no cost.

# %% [markdown]
# ## Everything together
#
# Eight ranks, 2 x 2 x 2, train a GPT whose first stage and last stage share an embedding. The mesh is made of your
# groups. The backward pass is that of the lessons, with sequence parallelism: each tensor rank sees its own positions
# in the norms, so their gradients are partial sums. Then your functions take over, and every rank makes its own update.

# %%
CONFIG = GPTConfig(layers=2, hidden=32, heads=4, tied_embeddings=True)
STEPS, LR, MAX_NORM = 10, 0.3, 2.0
problems, _ = train_test_split()


class YourMesh:
    def __init__(self, rank, dp, pp, tp):
        self.ranks = mesh_groups(rank, dp, pp, tp)
        self.groups = {
            axis: dist.new_group(ranks, use_local_synchronization=True) for axis, ranks in self.ranks.items()
        }

    def group(self, axis):
        return self.groups[axis]

    def size(self, axis):
        return dist.get_world_size(self.groups[axis])

    def rank(self, axis):
        return dist.get_rank(self.groups[axis])


def train(rank, dp, pp, tp, added_nowhere=(), copied_nowhere=()):
    mesh = YourMesh(rank, dp, pp, tp)
    part = ModelPart(TinyGPT(CONFIG, dtype=torch.float64), mesh, SCHEDULES["1f1b"](pp, 2), sequence_parallel=True)
    parameters, added_on, copied_on = [], [], []
    for name, parameter in part.named_parameters():
        place, stages = placements(part)[name], ("pp",) * (parameter in part.tied)
        parameters.append(parameter)
        added = stages + ("tp",) * place.is_partial
        copied = ("dp", *stages) + ("tp",) * (not place.is_sharded)
        added_on.append(tuple(axis for axis in added if axis not in added_nowhere))
        copied_on.append(tuple(axis for axis in copied if axis not in copied_nowhere))
    optimizer = torch.optim.SGD(parameters, lr=LR)
    batches, norms = minibatches(problems, 32), []
    for _ in range(STEPS):
        own = [tensor.chunk(dp)[mesh.rank("dp")] for tensor in next(batches)]
        optimizer.zero_grad()
        run_schedule(part.schedule, part.stages, *own, part.loss_fn(1.0), mesh.group("pp"))
        gradients = [parameter.grad for parameter in parameters]
        complete_gradients(gradients, added_on, mesh.groups)
        norms.append(float(gradient_norm([one.float() for one in gradients], copied_on, mesh.ranks)))
        torch._foreach_mul_(gradients, min(1.0, MAX_NORM / (norms[-1] + 1e-6)))
        optimizer.step()
    return norms


def train_alone():
    """One process with whole minibatches, and PyTorch's own clipping."""
    model = TinyGPT(CONFIG, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches, norms = minibatches(problems, 32), []
    for _ in range(STEPS):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        answer_loss(model(inputs), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms


alone = torch.tensor(train_alone())
print("a step is clipped, and another is not:", bool((alone > MAX_NORM).any() and (alone < MAX_NORM).any()))
for sizes in ((2, 2, 2), (4, 1, 2), (1, 2, 4)):
    norms = launch(train, 8, args=sizes, timeout=10).results
    off = (torch.tensor(norms[0]) / alone - 1).abs().max()
    print(f"dp, pp, tp = {sizes}:")
    print("    all ranks know the same norms, bit for bit:", all(one == norms[0] for one in norms))
    print("    the norms of all steps are those of one process, up to 0.001%:", bool(off < 1e-5))

# %% [markdown]
# The norm of a later step depends on every gradient and every update before it, on all eight ranks. So ten norms that
# agree say that the training is the same.
#
# And if you forget an axis? *Predict* for each of these three: does the run fail, do ranks disagree on the norm, and is
# the first norm already wrong, by how much? Partial sums that nobody adds up on "tp"; the same on "pp"; and a norm that
# takes the replicas for different parts of the model.

# %%
forgotten = {"sums on tp": (("tp",), ()), "sums on pp": (("pp",), ()), "copies on dp": ((), ("dp",))}
for what, missing in forgotten.items():
    norms = launch(train, 8, args=(2, 2, 2, *missing), timeout=10).results
    first, last = (torch.tensor(norms[0]) / alone - 1)[[0, -1]]
    print(f"without {what}: all ranks know the same norms: {all(one == norms[0] for one in norms)}; "
          f"the first one is off by {first:+.1%}, the tenth by {last:+.1%}")

# %% [markdown]
# Nothing fails, and all ranks agree: a run with such a mistake looks healthy. Only one process on the same samples, or
# a mesh of another shape, shows it. With two replicas counted as different parts, each square is there twice, and the
# norm is $\sqrt 2$ times as large. What does that do to the training, and in which steps?

# %% [markdown]
# ## At full size
#
# Llama 3 405B on 8,192 H100: 64 replicas of 16 stages of 8 tensor ranks. A replica works on 32 sequences of 8,192
# tokens in each step, one at a time. *Predict:* how many gigabytes does a GPU send on each axis in a step? A layer has
# four all-reduces of its hidden states on "tp", and a quarter more with sequence parallelism, as here: positions are
# gathered once more on the way back. A stage has up to 8 layers. It hands hidden states on and gradients back on "pp",
# each tensor rank an eighth of them. And on "dp" the gradients of 405 billion parameters, cut into 128 parts, go around
# once. All of it has 16 bits.

# %%
my_gigabytes = {"tensor": None, "pipeline": None, "data": None}

# %%
from course_lib.planner import Cluster, Plan, estimate
from course_lib.planner.models import LLAMA3

cluster = Cluster("H100-80GB", nodes=1024, between="InfiniBand NDR")
plan = Plan(dp=64, tp=8, pp=16, micro_batch=1, schedule="1f1b", zero=1, sequence_parallel=True, recompute="none")
step = estimate(LLAMA3["405B"], cluster, plan, 64 * 32)
for axis, flow in step.flows.items():
    print(f"{axis:8}: {flow.bytes / 1e9:5.1f} GB over {flow.link}, predicted {my_gigabytes[axis]}; "
          f"{flow.seconds:.2f} s, of which {flow.exposed:.2f} s make the step longer")
print(f"the whole step: {step.step_time.total:.1f} s")

# %% [markdown]
# On the axis that is adjacent in your `mesh_groups`, a GPU sends 48 times as much as on "dp", and 280 times as much as
# on "pp". These tensor ranks stand in one node. *Predict:* what does a step take if the mesh is laid out the other way
# round, so that replicas are adjacent and tensor ranks stand in eight nodes?

# %%
my_seconds = None

# %%
tensor = step.flows["tensor"]
longer = tensor.bytes / cluster.between_link.achieved - tensor.exposed
print(f"tensor ranks across nodes: {step.step_time.total + longer:.0f} s, predicted {my_seconds}")

# %% [markdown]
# Nearly twice as long, with the same bytes. No message has become larger: they only take the slow way. (The planner's
# numbers are modelled. What replicas send is left as it was, and latencies of the slow network, which an all-reduce of
# eight ranks pays 14 times, come on top.)
