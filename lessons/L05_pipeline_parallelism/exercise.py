# %% [markdown]
# # Pipeline parallelism, by hand
#
# The layers of a model are on several ranks, and a minibatch flows through them in pieces. You write down who does what
# and when, let ranks do it, and find out how long they are idle and how large the pieces should be.
#
# | | you build | minutes | difficulty | points |
# |---|---|---|---|---|
# | 1 | `pipeline_actions`: GPipe and 1F1B, as lists | 20 | ★★☆ | 4 |
# | 2 | `interleaved_actions`: the same, for a rank that has several stages | 20 | ★★★ | 4 |
# | 3 | `run_actions`: a rank that does what its list says | 30 | ★★★ | 5 |
# | 4 | `bubble`: the share of idle time, also with a slow stage | 15 | ★★☆ | 3 |
# | 5 | `best_micro_batches`: how many micro-batches make a step shortest | 15 | ★★☆ | 3 |
# | 6 | `faster_pipeline`: an open task: a pipeline with a slow stage | 25 | ★★★ | 3 + 2 |
#
# Below each function stands its check. Nothing that you write can break anything, so run a check as often as you like.
# The 2 points beside those of an open task are for three sentences. No check can read them, so a person does.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import launch
from course_lib.data import minibatches, train_test_split
from course_lib.figures import gantt
from course_lib.planner import simulate
from course_lib.schedules import Action, Schedule, as_text
from lessons.L05_pipeline_parallelism import checks

# %% [markdown]
# ## 1. A schedule is a list
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the list of one rank, in GPipe and in 1F1B | 20 | ★★☆ |
#
# There is one stage on each rank. `F2` is the forward pass of micro-batch 2 through a stage, `B2` its backward pass. In
# **GPipe** every rank does all forward passes, then all backward passes:
#
#     rank 0    F0 F1 F2 F3                B0 B1 B2 B3
#     rank 1       F0 F1 F2 F3          B0 B1 B2 B3
#     rank 2          F0 F1 F2 F3 B0 B1 B2 B3
#
# In **1F1B** the last rank goes back at once, one forward and one backward in turn. The others begin with a few forward
# passes more, as many as there are stages behind them, and then do the same:
#
#     rank 0    F0 F1 F2       B0 F3 B1    B2    B3
#     rank 1       F0 F1    B0 F2 B1 F3 B2    B3
#     rank 2          F0 B0 F1 B1 F2 B2 F3 B3
#
# The gaps need not be written down: they arise because a rank has to wait.

# %% nbgrader={"grade_id": "pipeline_actions", "solution": true}
def pipeline_actions(name, stage, n_stages, n_micro_batches):
    """What the rank of one stage does in a step, in order.

    name: "gpipe" or "1f1b".
    stage: from 0 to n_stages - 1.
    n_micro_batches: at least 1; it may be smaller than n_stages.
    Returns a list of Action(op, stage, micro_batch), with op "F" or "B". Forward passes
    are in the order of micro-batches, and so are backward passes.
    """
    ### BEGIN SOLUTION
    behind = n_stages - 1 - stage
    ahead = n_micro_batches if name == "gpipe" else min(behind, n_micro_batches)
    forwards = [Action("F", stage, k) for k in range(n_micro_batches)]
    backwards = [Action("B", stage, k) for k in range(n_micro_batches)]
    actions = forwards[:ahead]
    for k in range(n_micro_batches - ahead):
        actions += [forwards[ahead + k], backwards[k]]
    return actions + backwards[n_micro_batches - ahead :]
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: GPipe</summary>
#
# Two lists, one behind the other. How many actions has each, and what is the same in all of them?
# </details>
# <details><summary>Hint 2: three phases</summary>
#
# 1F1B has a beginning with forward passes alone, a middle with pairs, and an end with backward passes alone. Look at
# rank 0 above: how many are in each? And on the last rank?
# </details>
# <details><summary>Hint 3: how many at the beginning?</summary>
#
# Above, count for each rank the forward passes before its first pair, and the stages behind it. What does the rank wait
# for meanwhile, and how many backward passes are left for the end?
# </details>
# <details><summary>Hint 4: few micro-batches</summary>
#
# With two micro-batches and three stages behind: how many forward passes can there be at the beginning? What is left of
# the middle?
# </details>

# %% nbgrader={"grade_id": "check_pipeline_actions", "grade": true, "locked": true, "points": 4}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L05_pipeline_parallelism.checks")

### END HIDDEN TESTS
schedule = checks.pipeline_actions(pipeline_actions)
schedule.points(4)

# %% [markdown]
# The price is that of your 1F1B with 4 stages and 8 micro-batches, run with messages of one number. The activations of
# a micro-batch are 1,000 bytes. The first rank holds four of them at a time. In GPipe it would hold all eight, and be
# idle for as long.
#
# The course's builders are [`gpipe`](../../course_lib/schedules.py) and `one_forward_one_backward`. PyTorch's
# `ScheduleGPipe` and `Schedule1F1B` are loops that run each pass as they come to it; only its later schedules are lists
# that are made first and run then. Yours fit into everything that the course makes for lists:

# %%
print(as_text(Schedule([pipeline_actions("1f1b", stage, 4, 8) for stage in range(4)])))

# %%
schedule.idle

# %% [markdown]
# ## 2. Several stages on a rank
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the list of one rank in interleaved 1F1B | 20 | ★★★ |
#
# The bubble is as long as it takes a micro-batch to come from the first rank to the last and back. Cut the model into
# more stages than there are ranks, and deal them out in turn: then each hop is shorter, and a micro-batch comes by
# several times. With two ranks and two stages on each, rank 0 has stages 0 and 2, rank 1 has 1 and 3. `F2.1` is
# micro-batch 2 on stage 1:
#
#     rank 0  F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 ...
#     rank 1       F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 ...
#
#     rank 0  ... B0.0 F3.2 B1.0      B2.2      B3.2 B2.0 B3.0
#     rank 1  ... F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1
#
# Micro-batches travel in groups, as many as there are ranks. A group goes through all stages of a rank before the next
# group starts, and backward it goes through them the other way round. As in 1F1B, a rank begins with some forward
# passes, goes on in pairs, and ends with backward passes.
#
# How many at the beginning? A rank goes back for the first time when the first gradient arrives from the last stage,
# and until then it should not stand still. Follow micro-batch 0 through the picture, until its gradient is back on rank
# 0 and on rank 1. How many forward passes has each rank done before its first pair, and what for?

# %% nbgrader={"grade_id": "interleaved_actions", "solution": true}
def interleaved_actions(rank, n_ranks, stages_per_rank, n_micro_batches):
    """What one rank does in a step of interleaved 1F1B, in order.

    rank: from 0 to n_ranks - 1. It has the stages rank, rank + n_ranks,
        rank + 2 * n_ranks, ..., which are stages_per_rank, at least two.
    n_micro_batches: a multiple of n_ranks.
    Returns a list of Action(op, stage, micro_batch), with op "F" or "B".
    """
    ### BEGIN SOLUTION
    stages = range(rank, n_ranks * stages_per_rank, n_ranks)

    def passes(op, stages):
        return [
            Action(op, stage, k)
            for first in range(0, n_micro_batches, n_ranks)
            for stage in stages
            for k in range(first, first + n_ranks)
        ]

    forwards, backwards = passes("F", stages), passes("B", stages[::-1])
    ahead = (stages_per_rank - 1) * n_ranks + 2 * (n_ranks - 1 - rank)
    ahead = min(ahead, len(forwards))
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - ahead :]
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: two lists first</summary>
#
# Take the forward passes of rank 0 alone: F0.0 F1.0 F0.2 F1.2 F2.0 F3.0 F2.2 F3.2. What changes fastest, and what
# slowest? Now its backward passes: which of the three runs the other way round?
# </details>
# <details><summary>Hint 2: how many come first?</summary>
#
# In the lists above there are 4 on rank 0, and 2 on rank 1, before the first pair. With four ranks and two stages on
# each, it is 10 on rank 0, 8 on rank 1, and 4 on rank 3. With four ranks and three stages on each, rank 3 has 8. What
# does one rank more behind you cost, and one stage more on each? Can it be more than there are?
# </details>
# <details><summary>Hint 3: the rest</summary>
#
# Look at rank 1 behind its first two passes: what takes turns with what? Which of the two lists ends first, and what is
# left of the other? `zip` stops at the end of the shorter list.
# </details>

# %% nbgrader={"grade_id": "check_interleaved_actions", "grade": true, "locked": true, "points": 4}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L05_pipeline_parallelism.checks")

### END HIDDEN TESTS
in_turn = checks.interleaved_actions(interleaved_actions)
in_turn.points(4)

# %% [markdown]
# The price is that of 4 ranks with two stages each, and 8 micro-batches. A pass takes as long here as in part 1, so in
# the same model, cut into stages half as long, the bubble would be half as many seconds. It is paid for in two ways.
# One is messages: of these four ranks, the two in the middle send twice as many as in part 1 (32, not 16), and the two
# at the ends three times as many (24, not 8): the last rank now hands activations on to the first, which sends their
# gradients back. The other is memory: a rank holds the activations of more passes, each half as large.
#
# PyTorch's `ScheduleInterleaved1F1B` makes the same lists. The course's
# [`interleaved_1f1b`](../../course_lib/schedules.py) also takes a number of micro-batches that the ranks do not divide:
# its groups are then as equal as possible.

# %%
print(as_text(Schedule([interleaved_actions(rank, 2, 2, 4) for rank in range(2)])))

# %%
in_turn.idle

# %% [markdown]
# ## 3. Run it
#
# | you build | minutes | difficulty |
# |---|---|---|
# | forward and backward passes of a stage, with messages to its neighbors | 30 | ★★★ |
#
# A rank knows its own stage and nothing of the others. What it needs comes as a message:
#
#     F    receive x from the rank before    y = module(x)          send y to the rank after
#     B    receive dy from the rank after    go back from y         send x.grad to the rank before
#
# The first rank takes `x` from its inputs. The last rank makes a loss of `y`, and goes back from there.

# %% nbgrader={"grade_id": "run_actions", "solution": true}
def run_actions(actions, module, inputs, targets, loss_fn, width):
    """Do what the list of this rank says.

    actions: of this rank, as pipeline_actions returns them; its stage is its rank.
    module: the stage of this rank, [samples, ...] -> [samples, ...].
    inputs, targets: the minibatch, cut into micro-batches, which may differ in size:
        inputs[k] has len(inputs[k]) samples. All ranks have them, and only the first
        one computes with inputs, only the last one with targets.
    loss_fn: loss_fn(y, targets[k]) is the mean over a micro-batch.
    width: what travels between two stages is [len(inputs[k]), width], in the dtype of
        the inputs.

    Adds to the .grad of the parameters of `module` the gradient of the mean loss over
    the whole minibatch. Does one pass of `module` for each action, in the order of the
    list. When it returns, nothing is on its way any more.
    """
    ### BEGIN SOLUTION
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    samples = sum(len(target) for target in targets)
    in_flight, sending = {}, []
    for op, _, k in actions:
        if op == "F":
            x = inputs[k]
            if rank > 0:
                x = torch.empty(len(inputs[k]), width, dtype=inputs[k].dtype)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = module(x)
            if rank < last:
                sending.append(dist.isend(y.detach(), rank + 1))
            else:
                y = loss_fn(y, targets[k]) * len(targets[k]) / samples
            in_flight[k] = x, y
        else:
            x, y = in_flight.pop(k)
            dy = None
            if rank < last:
                dy = torch.empty_like(y)
                dist.recv(dy, rank + 1)
            y.backward(dy)
            if rank > 0:
                sending.append(dist.isend(x.grad, rank - 1))
    for handle in sending:
        handle.wait()
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: where autograd begins and ends</summary>
#
# What arrives has no history, and autograd would stop there: `x.requires_grad_()` makes it a beginning.
# `y.backward(dy)` goes back from a gradient that came from elsewhere. What is the rank before waiting for then?
# </details>
# <details><summary>Hint 2: several at a time</summary>
#
# Look at the list of rank 0 in part 1. When `B0` comes, which micro-batches have gone forward, and not yet back? What
# do you need of each of them, when its turn comes?
# </details>
# <details><summary>Hint 3: who waits for whom?</summary>
#
# In 1F1B a rank may send forward while the next one sends back. What happens if both use `dist.send`? `dist.isend`
# comes back at once, with a handle. When do you have to wait for it at the latest?
# </details>
# <details><summary>Hint 4: the loss</summary>
#
# The gradients of micro-batches add up, and the loss of each is a mean over its own samples. With 3 samples of loss 2
# and 1 sample of loss 6, the loss of all four is 3: how much did each micro-batch count? And who has to know that,
# besides the last rank?
# </details>

# %% nbgrader={"grade_id": "check_run_actions", "grade": true, "locked": true, "points": 5}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L05_pipeline_parallelism.checks")

### END HIDDEN TESTS
run = checks.run_actions(run_actions)
run.points(5)

# %% [markdown]
# Each of the ranks in the middle sends an activation and a gradient for each micro-batch. You told each rank what
# arrives, by `width`. PyTorch's `torch.distributed.pipelining` finds out with a trial run, and the course's
# [`run_schedule`](../../course_lib/mechanisms/pipeline.py) sends shape and dtype along with the first message. It is
# your loop, for several stages on a rank and for backward passes in two halves.

# %%
run.idle

# %% [markdown]
# ## 4. The bubble
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the share of idle time in a step of GPipe, for any stages | 15 | ★★☆ |
#
# With equal stages it is $(p-1)/(m+p-1)$. Now a stage may be slower than the others, and another one on the way back.
# Messages take no time. Three stages, the second twice as slow, and three micro-batches, forward:
#
#     rank 0    F0 F1 F2
#     rank 1       F0 F0 F1 F1 F2 F2
#     rank 2             F0    F1    F2

# %% nbgrader={"grade_id": "bubble", "solution": true}
def bubble(forward, backward, n_micro_batches):
    """The share of time in which a rank computes nothing, in a step of GPipe, 0 to 1.

    forward, backward: seconds for one micro-batch, a list with one number for each
        stage. There is one stage on each rank.

    The step begins with the first forward pass and ends with the last backward pass; the
    share is a mean over ranks.
    """
    ### BEGIN SOLUTION

    def seconds(each):
        return sum(each) + (n_micro_batches - 1) * max(each)

    step = seconds(forward) + seconds(backward)
    busy = n_micro_batches * (sum(forward) + sum(backward))
    return 1 - busy / (len(forward) * step)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: busy time</summary>
#
# The picture is 8 turns long, and of 24 places 12 are filled. Could you have found the 12 without the picture, from the
# seconds that each stage takes?
# </details>
# <details><summary>Hint 2: the length of a step</summary>
#
# Look at one direction. When do the three micro-batches leave the last stage, counted in turns? What decides about the
# first, and what about the distance to the next?
# </details>
# <details><summary>Hint 3: the pace</summary>
#
# Two stages of 3 and 1 seconds, four micro-batches, forward: the first one leaves after 4 seconds, the last one after
# 13. What if the slow stage comes second? On the way back another stage may be the slowest.
# </details>

# %% nbgrader={"grade_id": "check_bubble", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L05_pipeline_parallelism.checks")

### END HIDDEN TESTS
idle = checks.bubble(bubble)
idle.points(3)

# %% [markdown]
# The last line of the price is no formula: four ranks have run GPipe on the emulated clock, with a slow stage forward
# and another one backward. Your function says the same. The general case, with any schedule and slow links, has no
# formula, and the course plays it on a clock: [`simulate`](../../course_lib/planner/simulate.py). PyTorch predicts
# nothing here: you run a step and look at the trace of `torch.profiler`.

# %%
print(f"your formula: {bubble([2, 2, 5, 2], [4, 4, 4, 8], 6):.1%}")
idle.idle

# %% [markdown]
# ## 5. How many micro-batches?
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the number of micro-batches that makes a step of 1F1B shortest, and fits | 15 | ★★☆ |
#
# More micro-batches make the bubble smaller. But each has a fixed cost, and few large ones need more memory. With equal
# stages a step of 1F1B takes as long as one of GPipe: $m + p - 1$ turns in each direction. A turn takes
#
# $$\text{overhead} + \text{per sample} \cdot \frac{\text{samples}}{m}$$

# %% nbgrader={"grade_id": "best_micro_batches", "solution": true}
def best_micro_batches(samples, n_stages, overhead, per_sample, room):
    """The number of micro-batches with which a step of 1F1B is shortest.

    samples: in the minibatch. All micro-batches have the same size, so their number
        divides the samples.
    overhead, per_sample: a pass of a micro-batch of b samples through a stage takes
        overhead + per_sample * b seconds, forward and backward alike.
    room: of how many samples stage 0 can hold the activations at a time. It holds as
        many micro-batches as there are stages, or all, if there are fewer.

    At least one number fits, and no two are equally good.
    """
    ### BEGIN SOLUTION
    best, shortest = 0, float("inf")
    for m in range(1, samples + 1):
        size = samples // m
        if samples % m == 0 and min(m, n_stages) * size <= room:
            step = (m + n_stages - 1) * (overhead + per_sample * size)
            if step < shortest:
                best, shortest = m, step
    return best
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: try them all</summary>
#
# How many numbers are there to choose from, for 12 samples? Do you need a formula for the best one, or can you look at
# each?
# </details>
# <details><summary>Hint 2: the step</summary>
#
# The text above has both: how many turns there are, and how long a turn takes. With 12 samples, 3 stages, an overhead
# of 2 and 1 second for each sample, one direction takes 32 seconds in 2 micro-batches, and 42 in 12. Do you have to
# count both directions to find the best?
# </details>
# <details><summary>Hint 3: the memory</summary>
#
# How many micro-batches does stage 0 hold at a time? There are two cases. With 12 samples and 3 stages, it holds 12
# samples with 2 micro-batches, and 6 with 6. Which numbers does `room` rule out?
# </details>

# %% nbgrader={"grade_id": "check_best_micro_batches", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L05_pipeline_parallelism.checks")

### END HIDDEN TESTS
choice = checks.best_micro_batches(best_micro_batches)
choice.points(3)

# %% [markdown]
# The price is that of the step that you chose, on four emulated ranks. Its idle time is not the smallest one possible:
# more micro-batches would make the bubble smaller, and the step longer. Frameworks leave this number to you; in
# Megatron-LM you set `--micro-batch-size`, and a schedule of PyTorch is given its `n_microbatches`. In lesson 05
# [`MicroBatchExplorer`](../../lessons/L05_pipeline_parallelism/explorer_micro_batches.py) draws what you computed.

# %%
choice.idle

# %% [markdown]
# And on 512 GPUs? Two models were trained with small micro-batches and with large ones, nothing else was changed (steps
# on A100s, measured by the authors of vTrain). The table says how many times as long the step takes with the large
# ones.
#
# | | stages | samples of a replica | micro-batches of | measured |
# |---|---|---|---|---|
# | GPT-39B | 4 | 96 | 2 or 8 samples | 1.075 |
# | GPT-3 | 32 | 768 | 2 or 6 samples | 1.070 |
#
# *Predict:* what does the bubble alone say of them, by your formula, with equal stages? Is it more than was measured,
# or less, and why?

# %%
my_times = {"GPT-39B": None, "GPT-3": None}

# %%
PAIRS = {"GPT-39B": (4, 96, 2, 8, 1.075), "GPT-3": (32, 768, 2, 6, 1.070)}

for name, (stages, samples, small, large, measured) in PAIRS.items():
    idle_small, idle_large = (bubble([1] * stages, [1] * stages, samples // size) for size in (small, large))
    print(f"{name:7}: idle {idle_small:.1%} or {idle_large:.1%}, so {(1 - idle_small) / (1 - idle_large):.3f} times "
          f"as long; expected {my_times[name]}, measured {measured:.3f}")

# %% [markdown]
# The bubble exaggerates: with few samples, a pass is less efficient. Its fixed cost is the overhead of this part. How
# large is it, in samples? One pair of steps is enough to find it, and the other one to test it:

# %%
def times_as_long(overhead, stages, samples, small, large):
    of_small, of_large = ((samples / size + stages - 1) * (overhead + size) for size in (small, large))
    return of_large / of_small


(*pair, measured), (*other, measured_too) = PAIRS.values()
overhead = next(x / 100 for x in range(200) if times_as_long(x / 100, *pair) < measured)
print(f"overhead of a pass, from GPT-39B: {overhead:.2f} samples")
print(f"with it, GPT-3 takes {times_as_long(overhead, *other):.3f} times as long; measured {measured_too:.3f}")
print(f"best number for the 768 samples of GPT-3, if all fit: {best_micro_batches(768, 32, overhead, 1.0, 768)}")

# %% [markdown]
# An overhead that was found with one model explains six of the seven percent of the other. It is about a quarter of a
# sample of 2,048 tokens, on these GPUs, with eight tensor ranks: there all-reduces have latencies, and narrow matrices
# are slow. With other devices or other tensor ranks it is another number. (Whether micro-batches of 3 samples fit is
# another question: the first stage of GPT-3 holds 32 of them at a time.)

# %% [markdown]
# ## 6. An open task: a slow stage
#
# | you build | minutes | difficulty |
# |---|---|---|
# | a step of a pipeline of which one stage is slow | 25 | ★★★ |
#
# Stage 1 takes twice as long as the others. A pass costs one unit of time, and one more for each sample; a unit is 1 ms
# forward and 2 ms backward, and a message takes 1 ms. The step below cuts the minibatch in two. Change whatever you
# like, as long as the gradients stay exact: the emulated clock counts. Four ranks have 24 samples, and minibatches of
# other sizes are tried, too. Three levels are on the scale: met, good, and as good as ours. The step as it is:

# %%
def in_halves(stage, inputs, targets, loss_fn, width):
    sizes = [len(inputs) // 2, len(inputs) - len(inputs) // 2]
    actions = pipeline_actions("gpipe", dist.get_rank(), dist.get_world_size(), len(sizes))
    run_actions(actions, stage, [*inputs.split(sizes)], [*targets.split(sizes)], loss_fn, width)


checks.faster_pipeline(in_halves)

# %% [markdown]
# **Predict before you build.** Part 4 mentioned the simulator. It plays lists without a single message, so an idea
# costs you a line. Here is the step above, and the same one in three micro-batches. Is that enough? Try ideas of your
# own.

# %%
def predicted(name, n_micro_batches, samples=24):
    """Milliseconds of a step in equal micro-batches, on these four ranks."""
    lists = Schedule([pipeline_actions(name, stage, 4, n_micro_batches) for stage in range(4)])
    units = [(1 + samples / n_micro_batches) * slow for slow in (1, 2, 1, 1)]
    return simulate(lists, forward=units, backward=[2 * unit for unit in units], transfer=1).makespan


print(f"in_halves, predicted: {predicted('gpipe', 2):.0f} ms")
print(f"in three parts: {predicted('gpipe', 3):.0f} ms")

# %% [markdown]
# The first number is that of the check above, exactly. So it is with both schedules of part 1, whenever micro-batches
# are equal. The simulator knows one cost for each stage, so it cannot tell a small micro-batch from a large one. If
# yours differ in size, take its prediction as a start, and let the check decide.

# %% nbgrader={"grade_id": "faster_pipeline", "solution": true}
def faster_pipeline(stage, inputs, targets, loss_fn, width):
    """Train this rank's stage on one minibatch, in as little emulated time as you can.

    stage, loss_fn, width: as module, loss_fn and width for run_actions.
    inputs, targets: the whole minibatch [samples, ...], on every rank.

    When it returns, each `parameter.grad` is the gradient of the mean loss over all samples,
    and nothing is on its way any more.
    """
    ### BEGIN SOLUTION
    ends = [round(len(inputs) * end / 24) for end in (0, 3, 9, 17, 22, 24)]
    sizes = [size for size in torch.tensor(ends).diff().tolist() if size]  # small at both ends
    actions = pipeline_actions("1f1b", dist.get_rank(), dist.get_world_size(), len(sizes))
    run_actions(actions, stage, [*inputs.split(sizes)], [*targets.split(sizes)], loss_fn, width)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: the bubble</summary>
#
# While the first micro-batch is on its way to the last stage, the last stage is idle. How long is that, for two
# micro-batches, and for twelve?
# </details>
# <details><summary>Hint 2: the overhead</summary>
#
# Every pass costs one unit more than its samples, and the slow stage pays it twice. How much is that in all for two
# micro-batches, and for twelve?
# </details>
# <details><summary>Hint 3: the order</summary>
#
# What does the slow rank do between its last forward pass and its first backward pass? Is there something that it could
# do meanwhile?
# </details>
# <details><summary>Hint 4: sizes may differ</summary>
#
# Only the first micro-batch fills the pipeline, and only the last one empties it. Which of your micro-batches would you
# make smaller, if you had to make another one larger?
# </details>

# %% nbgrader={"grade_id": "check_faster_pipeline", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L05_pipeline_parallelism.checks")

### END HIDDEN TESTS
pipelined = checks.faster_pipeline(faster_pipeline)
pipelined.points(3)

# %% [markdown]
# Your step, the one that was given, and ours: 1F1B, with the best of all sizes. A search through all orders finds one
# of 185 ms, in which a small first micro-batch goes back last. As long as all ranks cut the minibatch alike, nothing is
# faster: with two to five micro-batches all orders were tried, and with six the slow stage alone computes for 180 ms,
# and needs 8 ms more until the first sample arrives and after the last one has left. PyTorch's
# `torch.distributed.pipelining` takes equal micro-batches, and leaves their number to you; `best_micro_batches` above
# is the same choice in numbers. The course's own is [`run_schedule`](../../course_lib/mechanisms/pipeline.py).

# %%
pipelined.idle

# %% [markdown]
# Why is your step faster? Write three sentences: where the time went before, what you pay now, and what the slow stage
# still costs.

# %% [markdown] nbgrader={"grade_id": "why_faster_pipeline", "grade": true, "solution": true, "points": 2}
# With two micro-batches, ranks wait long until the first one arrives, and the slow one waits between its last forward
# pass and its first backward pass; smaller ones arrive sooner, and 1F1B goes back in that gap. Each micro-batch pays
# the overhead of a pass anew, so four or five are best, small ones at both ends. All others still wait for the slow
# stage, which no order of passes changes: only moving a layer would.

# %% [markdown]
# ## Everything together
#
# Four ranks, one layer on each, learn to add. The network reads the six characters of a problem and says three. First
# choose the number of micro-batches, for devices that take 8 ms for a pass and 3 ms more for each sample, and have room
# for 16 samples. (`run_actions` has one stage on each rank, so interleaved 1F1B is only simulated.)

# %%
SAMPLES, STAGES = 32, 4
m = best_micro_batches(SAMPLES, STAGES, overhead=0.008, per_sample=0.003, room=16)
seconds = 0.008 + 0.003 * SAMPLES / m
lists = Schedule([pipeline_actions("1f1b", stage, STAGES, m) for stage in range(STAGES)])
step = simulate(lists, seconds, seconds)
print(f"{m} micro-batches; by your formula idle {bubble([seconds] * STAGES, [seconds] * STAGES, m):.1%}, "
      f"by the simulator {step.idle_fraction():.1%}")
halves = Schedule([interleaved_actions(rank, STAGES, 2, m) for rank in range(STAGES)])
print(f"with two half stages on each rank: {simulate(halves, seconds / 2, seconds / 2).idle_fraction():.1%}")
gantt(step, title="Your schedule, played by the simulator")

# %% [markdown]
# Then train, with both schedules. One process with the whole network and the whole minibatch does the same. The third
# training has 30 samples, which do not divide evenly.

# %%
def stage_of(rank):
    """The layer of one rank, the same in every process."""
    sizes = [6 * 12, 64, 64, 64, 3 * 12]  # 12 characters: the digits, plus, and equals
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        linear = nn.Linear(sizes[rank], sizes[rank + 1], dtype=torch.float64)
    return nn.Sequential(linear, nn.ReLU()) if rank < 3 else linear


def loss_fn(y, targets):
    return F.cross_entropy(y.view(-1, 12), targets.flatten())


def problems(samples, steps=20):
    drawn = minibatches(train_test_split()[0], samples)
    for inputs, targets in (next(drawn) for _ in range(steps)):
        yield F.one_hot(inputs[:, :6], 12).flatten(1).double(), targets[:, 5:]


def train(rank, name, samples):
    """Returns the parameters of this rank's stage, after the last step."""
    module = stage_of(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    actions = pipeline_actions(name, rank, dist.get_world_size(), m)
    for inputs, targets in problems(samples):
        optimizer.zero_grad()
        run_actions(actions, module, inputs.tensor_split(m), targets.tensor_split(m), loss_fn, width=64)
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def train_alone(samples):
    whole = nn.Sequential(*(stage_of(rank) for rank in range(4)))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    for inputs, targets in problems(samples):
        optimizer.zero_grad()
        loss = loss_fn(whole(inputs), targets)
        loss.backward()
        optimizer.step()
    return list(whole.parameters()), loss.item()


for name, samples in (("gpipe", 32), ("1f1b", 32), ("1f1b", 30)):
    alone, loss = train_alone(samples)
    stages = launch(train, 4, args=(name, samples), timeout=10).results
    mine = [parameter for stage in stages for parameter in stage]
    same = all(torch.allclose(one, other, rtol=0, atol=1e-10) for one, other in zip(mine, alone, strict=True))
    print(f"{name}, {samples} samples: equal to one process, up to rounding: {same} (loss {loss:.2f})")
