# %% [markdown]
# # Layer-wise model parallelism, by hand
#
# A model is a list of layers, and each rank gets some of them. You decide where to cut, let the ranks train together,
# and work out what each of them has to hold.
#
# | | you build | minutes | difficulty | points |
# |---|---|---|---|---|
# | 1 | `split_layers`: stages, the most expensive as cheap as possible | 20 | ★★☆ | 3 |
# | 2 | `forward_and_backward`: a step of one rank among its neighbors | 25 | ★★★ | 5 |
# | 3 | `who_holds_what`: the bytes of each rank | 20 | ★★☆ | 4 |
# | 4 | `lighter_step`: an open task: half the memory, the same gradients | 15 | ★★☆ | 3 + 2 |
#
# Below each function stands its check. Nothing that you write can break anything, so run a check as often as you like.
# The 2 points beside those of an open task are for three sentences. No check can read them, so a person does.

# %%
from itertools import combinations, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import launch
from course_lib.data import minibatches, train_test_split
from course_lib.instruments.ledger import Ledger
from lessons.L04_layerwise_model_parallelism import checks

# %% [markdown]
# ## 1. Where to cut
#
# | you build | minutes | difficulty |
# |---|---|---|
# | consecutive layers for each stage | 20 | ★★☆ |
#
# Layers do not all cost the same. Here are six of them, with what each costs, and two ways to make three stages:
#
#     layers            0    1    2    3    4    5
#     costs             2    2    3    3    4    8
#
#     by number       [ 2    2 ][ 3    3 ][ 4    8 ]     the largest stage costs 12
#     by cost         [ 2    2    3 ][ 3    4 ][ 8 ]     the largest stage costs  8
#
# Costs can be bytes: then the most expensive stage decides whether the model fits. They can be seconds: then all the
# others wait for it.

# %% nbgrader={"grade_id": "split_layers", "solution": true}
def split_layers(costs, n_stages):
    """Cut a list of layers so that the most expensive stage is as cheap as possible.

    costs: what each layer costs, a list of whole numbers above 0.
    n_stages: from 1 to the number of layers.
    Returns a list of n_stages ranges, the layers of each stage: [range(0, 3), range(3, 5),
    range(5, 6)]. Each layer is in exactly one, layers are in order, and no stage is empty.
    If several splits are equally good, return any of them.
    """
    ### BEGIN SOLUTION
    best, cheapest = None, float("inf")
    for cuts in combinations(range(1, len(costs)), n_stages - 1):
        stages = [range(first, stop) for first, stop in pairwise((0, *cuts, len(costs)))]
        dearest = max(sum(costs[i] for i in stage) for stage in stages)
        if dearest < cheapest:
            best, cheapest = stages, dearest
    return best
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: a split is its cuts</summary>
#
# Three stages have two cuts. With six layers a cut can lie before layer 1, 2, 3, 4 or 5. Which two make the second
# split in the picture?
# </details>
# <details><summary>Hint 2: filling up is not enough</summary>
#
# Fill one stage after the other up to the mean, with the costs 1, 1, 4, 4, 4 and three stages: what is left for the
# last one? There is a split whose most expensive stage costs 6. How many splits are there at all, for these five
# layers?
# </details>
# <details><summary>Hint 3: all of them</summary>
#
# `itertools.combinations([1, 2, 3], 2)` gives (1, 2), (1, 3) and (2, 3): every choice of two, in order. And
# `itertools.pairwise([0, 2, 5])` gives the neighbors (0, 2) and (2, 5).
# </details>
# <details><summary>Hint 4: which one?</summary>
#
# In the picture, two splits are compared by one number each, 12 and 8. How do you get that number, from the costs and
# the stages?
# </details>

# %% nbgrader={"grade_id": "check_split_layers", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L04_layerwise_model_parallelism.checks")

### END HIDDEN TESTS
cut = checks.split_layers(split_layers)
cut.points(3)

# %% [markdown]
# The price is that of your split of ten layers, a cheap embedding in front and an expensive head at the end. Four ranks
# have sent eight micro-batches through it, on the emulated clock, each rank as slow as its stage. (This is a pipeline,
# as in the next lesson, because there the most expensive stage matters most.)
#
# Trying all splits is fine for ten layers. For 96 layers in 16 stages there are far too many:

# %%
from math import comb

print(f"{comb(9, 3)} splits of 10 layers in 4 stages, {comb(95, 15):.0e} of 96 layers in 16")

# %% [markdown]
# The course's [`split_layers`](../../course_lib/mechanisms/layerwise.py) remembers the best split of the layers from
# each one on, so that it tries every stage only once. `torch.distributed.pipelining.pipeline` takes the cuts from you,
# as a `split_spec`, or from a function of yours, as a `split_policy`. PyTorch has no such function that looks at costs.

# %%
cut.idle

# %% [markdown]
# And a real model? Llama 3 405B was trained with 126 layers on 16 stages. Why not 128 layers, eight on each? A layer
# has 3.19 billion parameters, the embedding in front and the head at the end 2.10 billion each. *Predict:* by how much
# does the most expensive stage exceed eight layers, with 128 layers and with 126?

# %%
my_percent = {128: None, 126: None}

# %%
from course_lib.mechanisms import layerwise

layer, end = 3.19, 2.10  # billion parameters
for layers in 128, 126:
    costs = [end, *[layer] * layers, end]
    held = [sum(costs[i] for i in stage) for stage in layerwise.split_layers(len(costs), 16, costs)]
    print(f"{layers} layers: the first stage holds {held[0]:.1f} billion, the second {held[1]:.1f}, "
          f"the last {held[-1]:.1f}; the largest is {max(held) / (8 * layer) - 1:.1%} more than eight layers, "
          f"expected {my_percent[layers]}")

# %% [markdown]
# Two layers fewer are 1.6% of the model, and the most expensive stage becomes 8% cheaper. So its authors left out one
# layer on the first stage and one on the last (Llama Team 2024, section 3.3.2). In time it holds for the last stage
# alone: a head multiplies by all of its parameters, and an embedding only looks rows up.

# %% [markdown]
# ## 2. A step over ranks
#
# | you build | minutes | difficulty |
# |---|---|---|
# | what one rank does in a step | 25 | ★★★ |
#
# Each rank has its own layers and nothing else. Hidden states go from left to right, and their gradients come back:
#
#     rank 0            rank 1            rank 2
#     inputs            x                 x
#       | stage    .->    | stage    .->    | stage
#       y --------'       y --------'       y -> loss
#                                                  |
#       dy <------.       dy <------.              |
#       | back     '----  | back     '----  back <-'
#                       x.grad            x.grad

# %% nbgrader={"grade_id": "forward_and_backward", "solution": true}
def forward_and_backward(stage, inputs, targets, loss_fn, width):
    """One forward and backward pass of the whole model, as this rank does its part.

    stage: the layers of this rank, a module, [samples, width] -> [samples, any width].
    inputs, targets: the minibatch. All ranks have it, and only the first one computes
        with inputs, only the last one with targets.
    loss_fn: loss_fn(y, targets) is the loss, a mean over samples.
    width: what arrives here from the rank before is [len(inputs), width], in the dtype of
        the inputs.

    Adds to the .grad of the parameters of `stage` their gradient, as loss.backward() does
    in one process. All parameters of a rank may be frozen (requires_grad=False).
    Returns the loss on the last rank, None on the others. There are at least 2 ranks.
    When it returns, nothing is on its way any more.
    """
    ### BEGIN SOLUTION
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    x = inputs
    if rank > 0:
        x = torch.empty(len(inputs), width, dtype=inputs.dtype)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)

    loss = None
    if rank < last:
        dist.send(y.detach(), rank + 1)
        dy = torch.empty_like(y)
        dist.recv(dy, rank + 1)
        if y.requires_grad:  # not if this is the first rank, and frozen
            y.backward(dy)
    else:
        loss = loss_fn(y, targets)
        loss.backward()

    if rank > 0:
        dist.send(x.grad, rank - 1)
    return loss
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: three kinds of ranks</summary>
#
# Follow the arrows in the picture. What does the first rank not receive, and what does the last one not receive? What
# do all of them do? How many conditions do you need to tell them apart?
# </details>
# <details><summary>Hint 2: where the graph begins</summary>
#
# A message brings numbers, and no history, so autograd finds no gradient for `x`. `tensor.requires_grad_()` makes a
# tensor a beginning. Where do you have to say it: before or after the message, before or after the stage?
# </details>
# <details><summary>Hint 3: where the graph ends</summary>
#
# `loss.backward()` begins at one number. For a tensor of several, you say where to begin: with `y = 3 * x`,
# `y.backward(torch.tensor([1.0, 10.0]))` leaves 3 and 30 in `x.grad`. What arrives here that you can begin with?
# </details>
# <details><summary>Hint 4: frozen layers</summary>
#
# A frozen stage in the middle: what still has to come back through it, and to whom? A frozen first stage: is there
# anything that needs a gradient? `y.requires_grad` tells you. And does the rank behind it know?
# </details>

# %% nbgrader={"grade_id": "check_forward_and_backward", "grade": true, "locked": true, "points": 5}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L04_layerwise_model_parallelism.checks")

### END HIDDEN TESTS
step = checks.forward_and_backward(forward_and_backward)
step.points(5)

# %% [markdown]
# Two messages are the least for a rank in the middle: hidden states to the right, a gradient to the left. The best
# possible idle time is just as clear: of four ranks, one is busy. No way of writing this function changes that.
#
# In the course it is [`LayerWise`](../../course_lib/mechanisms/layerwise.py). It also finds out which shape and dtype
# arrive, so that nobody has to know a `width`, and adds up the gradients of a parameter that is on two ranks, such as a
# head that is tied to the embedding. PyTorch's is `torch.distributed.pipelining`, in `stage.py`.

# %%
step.idle

# %% [markdown]
# ## 3. Who holds what
#
# | you build | minutes | difficulty |
# |---|---|---|
# | four numbers for each rank | 20 | ★★☆ |
#
# A network has layers of one kind: `nn.Linear(widths[i], widths[i + 1])` with its bias, and `nn.Tanh` behind it. It is
# trained with AdamW, in float32. For the backward pass
#
# - a linear layer keeps its input,
# - a tanh keeps its output.
#
# So much is kept on a rank with the layers 2 and 3:
#
#     arrives ->  linear 2  tanh 2  ->  linear 3  tanh 3  -> leaves
#        |________|              |______|              |
#        input of 2       output of 2, input of 3     output of 3
#                            (one tensor)

# %% nbgrader={"grade_id": "who_holds_what", "solution": true}
def who_holds_what(widths, stages, samples):
    """The bytes that each rank holds for training.

    widths: layer i is [samples, widths[i]] -> [samples, widths[i + 1]].
    stages: the layers of each rank, as split_layers returns them.
    samples: in the minibatch.

    Returns for each rank four numbers (parameters, gradients, optimizer, activations), in
    bytes. All numbers are float32.
    optimizer: AdamW keeps two numbers for each number of a parameter, and a step, one
        number, for each weight and for each bias.
    activations: what the layers keep for the backward pass, each tensor once. What
        arrives at a rank counts there, and so do the inputs on the first rank.
    """
    ### BEGIN SOLUTION
    ranks = []
    for stage in stages:
        numbers = sum(widths[i] * widths[i + 1] + widths[i + 1] for i in stage)
        steps = 2 * len(stage)
        kept = widths[stage.start] + sum(widths[i + 1] for i in stage)
        ranks.append((4 * numbers, 4 * numbers, 4 * (2 * numbers + steps), 4 * samples * kept))
    return ranks
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: parameters</summary>
#
# What are the shapes of weight and bias of `nn.Linear(5, 3)`, and how many numbers are that? Each of them has a
# gradient, a number as well.
# </details>
# <details><summary>Hint 2: the optimizer</summary>
#
# How many numbers does AdamW keep for each number of a parameter? And how many steps does it keep for a layer, which
# has a weight and a bias?
# </details>
# <details><summary>Hint 3: activations</summary>
#
# In the picture two layers keep three tensors. How many do three layers keep, and how wide is each?
# </details>
# <details><summary>Hint 4: how wide</summary>
#
# Two layers, from 5 to 3 and from 3 to 7, on one rank: for each sample 15 numbers are kept. On two ranks it is 8 and
# 10. Which number is on both?
# </details>

# %% nbgrader={"grade_id": "check_who_holds_what", "grade": true, "locked": true, "points": 4}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L04_layerwise_model_parallelism.checks")

### END HIDDEN TESTS
checks.who_holds_what(who_holds_what).points(4)

# %% [markdown]
# The extra memory in the price is what the fullest of four ranks holds, by your function. Nothing is sent, because
# nothing has to be.
#
# Parameters, gradients and optimizer states of all ranks add up to those of one process. Activations add up to more,
# because what is sent is kept twice: as an output on one side of the cut, and as an input on the other.

# %%
def total(stages):
    return [sum(kind) for kind in zip(*who_holds_what([72, 64, 64, 64, 36], stages, 32), strict=True)]


print("one rank:  ", total([range(4)]))
print("four ranks:", total([range(i, i + 1) for i in range(4)]))

# %% [markdown]
# On a GPU, PyTorch tells you with `torch.cuda.memory_allocated()` what is held now, all kinds together. The course
# counts each kind: [`Ledger`](../../course_lib/instruments/ledger.py) watches what autograd saves. It looks after your
# numbers below.

# %% [markdown]
# ## 4. An open task: half the memory
#
# | you build | minutes | difficulty |
# |---|---|---|
# | a step that holds less at one time | 15 | ★★☆ |
#
# On a minibatch of 64 samples, `forward_and_backward` holds the activations of all of them at once. Change whatever you
# like, as long as loss and gradients stay exact: the bytes of extra memory of the rank that holds most are counted,
# gradients included. Time is free here. Four levels are on the scale: met, good, as good as ours, and far better than
# ours. The step as it is:

# %%
checks.lighter_step(forward_and_backward)

# %% nbgrader={"grade_id": "lighter_step", "solution": true}
def lighter_step(stage, inputs, targets, loss_fn, width):
    """One training step of this rank's stage, in as little memory as you can.

    stage, inputs, targets, loss_fn, width: as for forward_and_backward. loss_fn is a mean
        over its samples, and a loss of the whole minibatch is wanted. There are 64 samples
        where memory counts, and a few elsewhere.

    Returns the loss on the last rank, None elsewhere, and adds to each `parameter.grad`,
    as forward_and_backward does.
    """
    ### BEGIN SOLUTION
    total = None
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        loss = forward_and_backward(stage, x, y, lambda one, other: loss_fn(one, other) / len(targets), width)
        if loss is not None:
            total = loss.detach() + (0 if total is None else total)
    return total
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: what is held</summary>
#
# Part 3 has the list of what a rank holds. Which of these grow with the samples, and which do not?
# </details>
# <details><summary>Hint 2: in pieces</summary>
#
# Do all samples have to be on their way at the same time? Call `backward` for two small losses, one after the other,
# and look at `.grad`: what has become of the first gradient? `tensor.split(3)` makes pieces of three rows.
# </details>
# <details><summary>Hint 3: a mean of means</summary>
#
# One piece has 3 samples and the loss 2, another has 1 sample and the loss 6. The loss of all four is 3: how much did
# each count? A loss that you keep for later keeps its whole graph, unless you `detach` it. And what has a name is held
# until the name stands for something else: what does yours still stand for while the next piece is computed?
# </details>
# <details><summary>Hint 4: below one sample</summary>
#
# With one sample at a time, which tensors are left, and how many bytes has each? The stage has four layers, from 4
# numbers to 4, in 64 bits, and their gradients alone take 640 bytes. Part 5 of exercise 03 does without some of the
# others. And where does a gradient stand before it has been added to `.grad`?
# </details>

# %% nbgrader={"grade_id": "check_lighter_step", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L04_layerwise_model_parallelism.checks")

### END HIDDEN TESTS
lighter = checks.lighter_step(lighter_step)
lighter.points(3)

# %% [markdown]
# Look at the clock, too: your step, the one that was given, and ours. The gradients alone take 640 bytes, and ours, one
# sample at a time, 1,120. One can go on from there: keep the input of the stage alone, compute the input of each layer
# again, and add to the gradients in place, without autograd. That takes 776. PyTorch calls pieces of a minibatch
# gradient accumulation, and computing again is `torch.utils.checkpoint`. The course's own is
# [`micro_batches`](../../course_lib/mechanisms/batches.py).

# %%
lighter.idle

# %% [markdown]
# Memory has a price in time. On this clock, 64 samples at once take 0.6 s. *Predict:* how many bytes and how many
# seconds is it with pieces of 16 samples, and with pieces of 4?

# %%
my_curve = {16: None, 4: None}

# %%
def in_pieces(size):
    def step(stage, inputs, targets, loss_fn, width):
        total = None
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            loss = forward_and_backward(stage, x, y, lambda a, b: loss_fn(a, b) * len(b) / len(targets), width)
            total = None if loss is None else loss.detach() + (0 if total is None else total)
        return total

    return step


for size in 64, 16, 4, 1:
    tried = checks.lighter_step(in_pieces(size))
    found = tried.message.partition(" bytes")[0].split()[-1]
    seconds = tried.idle.timeline.makespan
    print(f"pieces of {size:2}: {found:>6} bytes, {seconds:4.1f} s, predicted {my_curve.get(size)}")

# %% [markdown]
# The smaller the pieces, the more slowly memory falls, since the gradients stay. The time grows as fast as ever: here a
# pass takes as long for one sample as for 64. On real devices it does so, too, as soon as a piece is too small to fill
# them. So one takes the largest pieces that fit.

# %% [markdown]
# What did you give for the memory? Write three sentences: what is held now, what takes longer, and when you would do
# this in earnest.

# %% [markdown] nbgrader={"grade_id": "why_lighter_step", "grade": true, "solution": true, "points": 2}
# Only the activations of one sample are held, beside parameters and gradients. The ranks pass on 64 small messages in
# place of one and compute one after the other for each of them, so the step takes 64 times as long on this clock. One
# would take the largest pieces that fit, and let the next piece begin before the last one has come back: a pipeline.

# %% [markdown]
# ## Everything together
#
# Seven layers learn to add on four ranks. The network reads the six characters of a problem and says three. First cut
# it, by the bytes of each layer as your own function counts them:

# %%
WIDTHS, SAMPLES = [6 * 12, 96, 64, 64, 64, 64, 64, 3 * 12], 32  # 12 characters: the digits, plus, and equals
LAYERS = len(WIDTHS) - 1

each = who_holds_what(WIDTHS, [range(i, i + 1) for i in range(LAYERS)], SAMPLES)
stages = split_layers([sum(layer) for layer in each], n_stages=4)
planned = who_holds_what(WIDTHS, stages, SAMPLES)
for rank, (stage, own) in enumerate(zip(stages, planned, strict=True)):
    print(f"rank {rank}: layers {[*stage]}, {sum(own):,} bytes")
print(f"one process: {sum(sum(own) for own in who_holds_what(WIDTHS, [range(LAYERS)], SAMPLES)):,} bytes")

# %% [markdown]
# Then train. Every rank makes its own layers only, and counts what it really holds.

# %%
def layers(numbers):
    """Some layers of the network, the same in every process."""
    made = []
    for i in numbers:
        with torch.random.fork_rng():
            torch.manual_seed(i)
            made += [nn.Linear(WIDTHS[i], WIDTHS[i + 1]), nn.Tanh()]
    return nn.Sequential(*made)


def loss_fn(y, targets):
    return F.cross_entropy(5 * y.view(-1, 12), targets.flatten())


def problems(steps):
    drawn = minibatches(train_test_split()[0], SAMPLES)
    for inputs, targets in (next(drawn) for _ in range(steps)):
        yield F.one_hot(inputs[:, :6], 12).flatten(1).float(), targets[:, 5:]


def train(rank, steps):
    """Returns this rank's parameters, its losses, and what it held."""
    stage = layers(stages[rank])
    optimizer, losses = torch.optim.AdamW(stage.parameters(), lr=3e-3), []
    for inputs, targets in problems(steps):
        optimizer.zero_grad()
        loss = forward_and_backward(stage, inputs, targets, loss_fn, width=WIDTHS[stages[rank].start])
        optimizer.step()
        losses.append(loss)
    x = torch.zeros(SAMPLES, WIDTHS[stages[rank].start], requires_grad=rank > 0)
    with Ledger(stage, optimizer) as ledger:
        _ = stage(x)  # as long as its output is there, so is what the layers keep
        held = ledger.now
    return list(stage.parameters()), losses[-1], (held.parameters, held.gradients, held.optimizer, held.activations)


def train_alone(steps):
    whole = layers(range(LAYERS))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-3)
    for inputs, targets in problems(steps):
        optimizer.zero_grad()
        loss = loss_fn(whole(inputs), targets)
        loss.backward()
        optimizer.step()
    return list(whole.parameters()), loss


STEPS = 50
run = launch(train, 4, args=(STEPS,), timeout=10)
alone, loss = train_alone(STEPS)
mine = [parameter for parameters, _, _ in run.results for parameter in parameters]

print("weights of one process, to the last bit:", all(map(torch.equal, mine, alone)))
print("its loss, to the last bit:", torch.equal(run.results[-1][1], loss), f"({loss:.2f})")
print("each rank holds what you said:", [tuple(held) for _, _, held in run.results] == [tuple(own) for own in planned])

# %% [markdown]
# To the last bit, because every number comes from the same operation with the same inputs, only on another rank. And
# none of the four ranks has ever held more than its part.
