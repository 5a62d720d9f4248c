# %% [markdown]
# # Tensor parallelism, by hand
#
# Every rank holds a share of every matrix, and all of them work on the same samples at the same time. Four functions
# make that happen. Here you write them, and they run on real processes.
#
# | | you build | minutes | difficulty | points |
# |---|---|---|---|---|
# | 1 | `column_parallel`: a layer with some of its outputs on each rank | 15 | ★★☆ | 2 |
# | 2 | `row_parallel`: a layer with some of its inputs on each rank | 15 | ★★☆ | 2 |
# | 3 | `cut_heads`: what a rank holds of an attention layer | 20 | ★★☆ | 3 |
# | 4 | `cross_entropy`: the loss, from a share of the logits | 30 | ★★★ | 4 |
# | 5 | `faster_block`: an open task: fewer sums over a slow link | 15 | ★★☆ | 3 + 2 |
# | 6 | `all_reduce_ms` on paper: a layer of a real GPT | 10 | ★☆☆ | |
#
# Below each function stands its check. It runs your function on 2, 3 and 4 ranks, in small cases that become harder one
# thing at a time, and compares what it leaves with what one process with the whole matrices would have. Once nothing is
# wrong, it tells you what your solution costs, beside the lowest price known. Nothing that you write can break
# anything. Run a check as often as you like. The 2 points beside those of an open task are for three sentences. No
# check can read them, so a person does.

# %%
from dataclasses import replace
from math import isclose

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import launch
from course_lib.data import NO_LOSS, answer_loss, minibatches, train_test_split
from course_lib.mechanisms.tensor_parallel.linear import conjugate
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import Cluster
from course_lib.planner.communication import ring_seconds
from lessons.L06_tensor_parallelism import checks

# %% [markdown]
# ## 1. Cut by columns
#
# | you build | minutes | difficulty |
# |---|---|---|
# | a linear layer with some of its outputs on each rank, forward and backward | 15 | ★★☆ |
#
# Every rank holds all of x, and some of the layer's outputs. (They are columns in the formula $y = xA$. PyTorch stores
# the weight as [outputs, inputs], so there they are rows of `weight`.)
#
#     rank 0    x ----- weight_0 ---->  y_0        forward: nothing has to travel
#     rank 1    x ----- weight_1 ---->  y_1
#
#     rank 0    dx? <-- weight_0 -----  dy_0       backward: what does each rank find out about x,
#     rank 1    dx? <-- weight_1 -----  dy_1                 and what is missing?
#
# PyTorch finds the gradients on the way back, but it does not know of other ranks. So you need a place where one thing
# happens forward, and another one backward. `conjugate(x, forward, backward)` is such a place: it returns `forward(x)`,
# and when the gradient comes back, `backward(gradient)` goes on to x. For example, this outputs x as it is, and doubles
# the gradient:

# %%
x = torch.ones(3, requires_grad=True)
conjugate(x, lambda x: x, lambda gradient: 2 * gradient).sum().backward()
x.grad

# %% nbgrader={"grade_id": "column_parallel", "solution": true}
def column_parallel(x, weight, bias):
    """This rank's outputs of a linear layer.

    x: [..., inputs], the same on all ranks, in any float dtype.
    weight, bias: this rank's shares, [its outputs, inputs] and [its outputs]. Ranks may
        have different numbers of outputs.

    Returns y, [..., its outputs]. When backward() is called, this rank gets the gradient
    of its weight and of its bias, and every rank the whole gradient of x, the same on all,
    bit for bit. Use conjugate and dist.all_reduce, which changes the tensor that it is given.
    """
    ### BEGIN SOLUTION
    def all_reduced(gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total

    x = conjugate(x, lambda x: x, all_reduced)
    return F.linear(x, weight, bias)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: forward</summary>
#
# What of y can this rank compute on its own? `F.linear(x, weight, bias)` is enough. The check then finds that one of
# the gradients is wrong. Which one?
# </details>
# <details><summary>Hint 2: backward</summary>
#
# Two ranks have one output each, y_0 = 2x and y_1 = 5x, and the loss is y_0 + y_1. What is the gradient of x? And what
# does rank 0 find, what does rank 1?
# </details>
# <details><summary>Hint 3: where?</summary>
#
# `conjugate` is a place on the way: what you do there backward happens to the gradient that comes by. Which gradients
# come by before the layer, and which behind it? Which of them have the same shape on all ranks?
# </details>
# <details><summary>Hint 4: a function for the way back</summary>
#
# It gets the gradient, and has to return a tensor. `dist.all_reduce` returns none: it changes the one that it is given,
# which autograd may still need. `tensor.clone()` makes a copy.
# </details>

# %% nbgrader={"grade_id": "check_column_parallel", "grade": true, "locked": true, "points": 2}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L06_tensor_parallelism.checks")

### END HIDDEN TESTS
checks.column_parallel(column_parallel).points(2)

# %% [markdown]
# The place where nothing happens forward and an all-reduce backward is Megatron-LM's **f**. What a rank sends is the
# gradient of x, however wide the layer is. If you forget f, the layer's own gradients are right, the loss is right, and
# all layers *before* it learn the wrong thing.
#
# In this course it is [`copy_to_ranks`](../../course_lib/mechanisms/tensor_parallel/linear.py). In PyTorch you would
# write no f at all: `parallelize_module` with `ColwiseParallel()` turns the weight into a `DTensor`, which knows how it
# is cut, and communicates when an operation needs it.

# %% [markdown]
# ## 2. Cut by rows
#
# | you build | minutes | difficulty |
# |---|---|---|
# | a linear layer with some of its inputs on each rank, forward and backward | 15 | ★★☆ |
#
# The next layer of an MLP takes what the first one has output, and that is on different ranks: each has some of the
# inputs. So this layer is cut the other way.
#
#     rank 0    x_0 ---- weight_0 ---->  a partial sum of y \
#                                                           >  y, on both
#     rank 1    x_1 ---- weight_1 ---->  a partial sum of y /
#
# After it, all ranks hold the same y, and go on with it in the same way. So they all come back with the same gradient
# of y.

# %% nbgrader={"grade_id": "row_parallel", "solution": true}
def row_parallel(x, weight, bias):
    """A linear layer of which this rank has some inputs.

    x: this rank's inputs, [..., its inputs], in any float dtype. Ranks may have different numbers of them.
    weight: this rank's share, [outputs, its inputs].
    bias: [outputs], the same on all ranks. Each of them keeps it, so each needs its gradient.

    Returns y, [..., outputs], the same on all ranks, bit for bit. When backward() is called, this rank
    gets the gradient of its x and its weight, and every rank that of the bias.
    """
    ### BEGIN SOLUTION
    def all_reduced(partial_sum):
        total = partial_sum.clone()
        dist.all_reduce(total)
        return total

    partial_sum = F.linear(x, weight)
    return conjugate(partial_sum, all_reduced, lambda gradient: gradient) + bias
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: forward</summary>
#
# Two inputs on two ranks: y = 2 x_0 + 5 x_1, where rank 0 has x_0 = 1 and rank 1 has x_1 = 3. What can each compute,
# and how do both come to 17?
# </details>
# <details><summary>Hint 2: the bias</summary>
#
# How often is it in the sum, if each rank adds it before? Dividing it by the number of ranks makes y right. Look at
# what that does to its gradient.
# </details>
# <details><summary>Hint 3: backward</summary>
#
# In y = a + b, with a gradient of 4 for y, what are those of a and b? Which rank has that number already?
# </details>
# <details><summary>Hint 4: what `conjugate` stands around</summary>
#
# Three things happen: a product, a sum over ranks, and the bias. Around which of them does autograd need help? What has
# to happen there forward, and what is left to do backward?
# </details>

# %% nbgrader={"grade_id": "check_row_parallel", "grade": true, "locked": true, "points": 2}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L06_tensor_parallelism.checks")

### END HIDDEN TESTS
checks.row_parallel(row_parallel).points(2)

# %% [markdown]
# This is **g**, the mirror image of f. The two layers together have cost one all-reduce on each way, of x and of y, and
# what lies between them, the wide part of an MLP, never travels. In this course g is
# [`sum_over_ranks`](../../course_lib/mechanisms/tensor_parallel/linear.py), and the layers are `ColumnParallelLinear`
# and `RowParallelLinear`.
#
# You may have called `dist.all_reduce` on the partial sum itself, and got a warning for it. The gradient then goes on
# as it is, as if nothing had been summed, which is what g wants. For f it would be wrong.
#
# Beware of `torch.distributed.nn.functional.all_reduce`, which PyTorch calls differentiable. It sums on the way back as
# well. That is right if each rank goes on to a loss of its own, and the losses are added up. Here all ranks have the
# same loss, and the gradient would come out as many times too large as there are ranks.

# %% [markdown]
# ## 3. Cut the heads
#
# | you build | minutes | difficulty |
# |---|---|---|
# | what a rank holds of an attention layer | 20 | ★★☆ |
#
# An attention layer is like an MLP, with heads for hidden units: its first matrix is cut by columns, and its last by
# rows. The first one is three matrices in one, as in many models: the rows for all queries, then those for all keys,
# then those for all values. With two heads that are three wide (q01 is number 1 of the query of head 0):
#
#     rows of qkv          q00 q01 q02 q10 q11 q12   k00 k01 k02 k10 k11 k12   v00 v01 v02 v10 v11 v12
#     columns of out       head 0 ....  head 1 ....
#
# A score is a product of a whole query with a whole key, and a rank that has both needs nobody else. So heads go to the
# ranks whole. Which rank gets which heads is up to you. If the ranks do not divide the heads, some ranks get one more.

# %% nbgrader={"grade_id": "cut_heads", "solution": true}
def cut_heads(qkv, bias, out, heads):
    """This rank's share of an attention layer: some heads, whole.

    qkv, bias: the weight [3 * hidden, hidden] and the bias [3 * hidden] that make queries,
        keys and values, in this order. hidden = heads * width, and a head's rows lie side by side.
    out: the weight [hidden, hidden] of the layer after the heads. Its inputs, which
        are its columns, are the numbers that the heads output, head after head.
    heads: how many there are; at least as many as ranks. All arguments are the same on all ranks.

    Returns this rank's rows of qkv and of bias, with queries, keys and values in this order,
    and the columns of out that belong to the same heads. Each head is on exactly one rank,
    and no rank has more of them than it has to.
    """
    ### BEGIN SOLUTION
    hidden = len(out)
    of_heads = torch.arange(hidden).view(heads, hidden // heads)  # one head's rows in each row
    own = of_heads.tensor_split(dist.get_world_size())[dist.get_rank()].flatten()
    rows = torch.cat([own, own + hidden, own + 2 * hidden])
    return qkv[rows], bias[rows], out[:, own]
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: one matrix first</summary>
#
# Take the queries alone. Which rows has head 1 in the picture? With four heads that are two wide, on two ranks, rank 1
# has the rows 4, 5, 6 and 7. Which rows are these for any head?
# </details>
# <details><summary>Hint 2: three matrices in one</summary>
#
# At which row do the keys begin in the picture, and at which the values? With the four heads, rank 1 has the rows from
# 4, from 12 and from 20 on. What would a plain cut through qkv give to rank 0?
# </details>
# <details><summary>Hint 3: out</summary>
#
# PyTorch's weight is [outputs, inputs]. Which of the two are the heads, for `out`? `matrix[:, [0, 3]]` takes the
# columns 0 and 3.
# </details>
# <details><summary>Hint 4: row numbers</summary>
#
# A list or a tensor of row numbers can be an index: `matrix[[4, 5, 0]]` takes three rows. `torch.arange(6).view(3, 2)`
# is [[0, 1], [2, 3], [4, 5]]: if these are rows of heads, how many heads are there, and which of them are yours? What
# do you have to do to the numbers for keys and values?
# </details>

# %% nbgrader={"grade_id": "check_cut_heads", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L06_tensor_parallelism.checks")

### END HIDDEN TESTS
checks.cut_heads(cut_heads).points(3)

# %% [markdown]
# Cutting sends nothing. The check runs attention with your shares on each rank, adds up what all ranks output, and
# compares that with the whole layer. The bytes are those of the share and of that attention.
#
# Megatron-LM avoids the three places: it orders the rows of qkv by heads, so that a plain cut gives whole heads. Where
# queries, keys and values lie one after the other, a plain cut runs just as well, outputs numbers of the right shape,
# and is wrong. PyTorch's `ColwiseParallel` cuts like this: it knows nothing of heads. This course's
# [`parallelize`](../../course_lib/mechanisms/tensor_parallel/transformer.py) keeps three layers, and cuts each of them.
# It refuses a number of heads that the ranks do not divide: all would wait for those with one more.

# %% [markdown]
# ## 4. The loss
#
# | you build | minutes | difficulty |
# |---|---|---|
# | loss and gradient from a share of the logits, with three numbers for each target | 30 | ★★★ |
#
# The last matrix of a language model is cut by columns as well, so each rank has the logits of some tokens. They could
# be gathered, but a vocabulary is large. For one target t with logits z the loss is
#
# $$-\log \frac{e^{z_t}}{\sum_v e^{z_v}} \;=\; \log \sum_v e^{z_v - m} \;-\; (z_t - m)$$
#
# with any number m. And its gradient for each logit is
#
# $$\frac{\partial}{\partial z_v} \;=\; \frac{e^{z_v - m}}{\sum_u e^{z_u - m}} \;-\; [\,v = t\,]$$
#
# where the bracket is 1 for the target and 0 for all other tokens. What of this does a rank not have?

# %% nbgrader={"grade_id": "cross_entropy", "solution": true}
def cross_entropy(logits, targets, first):
    """Loss and gradient from a share of the logits.

    logits: [targets, its tokens], of this rank's tokens, in any float dtype, which loss and
        gradient have, too. They may be large; they stay as they are.
    targets: int64 [targets], token numbers in the whole vocabulary, the same on all ranks.
    first: the number of this rank's first token; the others follow. Every token is on
        one rank, and ranks may have different numbers of them.

    Returns (loss, gradient): the mean of the targets' cross-entropies, a tensor without
    dimensions, the same on all ranks, bit for bit; and its gradient with respect to this rank's logits.
    Each rank gives at most three numbers a target to the others.
    """
    ### BEGIN SOLUTION
    largest = logits.amax(dim=1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    shifted = logits - largest[:, None]
    exponentials = shifted.exp()

    place = targets - first
    is_mine = (place >= 0) & (place < logits.shape[1])
    rows = is_mine.nonzero().flatten()  # the targets whose token is here,
    columns = place[rows]  # and where it is
    sums = torch.zeros(2, len(targets), dtype=logits.dtype)
    sums[0] = exponentials.sum(dim=1)
    sums[1, rows] = shifted[rows, columns]
    dist.all_reduce(sums)

    gradient = exponentials / sums[0][:, None]
    gradient[rows, columns] -= 1
    return (sums[0].log() - sums[1]).mean(), gradient / len(targets)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: three numbers</summary>
#
# In the two formulas, underline what one rank cannot know. For each target that comes to three numbers. Which of them
# can be added up over ranks, and which cannot? `dist.all_reduce(tensor, dist.ReduceOp.MAX)` takes the largest. (On CPUs
# it may pass over a `nan` that one rank has, so look for one beforehand if it matters.)
# </details>
# <details><summary>Hint 2: why m?</summary>
#
# The exponential of 1,000 is more than any number here can hold, and that of -2,000 is zero. Which m makes the largest
# exponential 1? Rank 0 has logits up to 3, and rank 1 up to 1,000: can their sums of exponentials be added up, if each
# has subtracted its own largest?
# </details>
# <details><summary>Hint 3: the target's logit</summary>
#
# A rank has the tokens 4 to 7, and the targets are 5, 2 and 9. In its logits they would stand in the columns 1, -2 and
# 5. Which of them are there? And what should a rank put into a sum for a target that it does not have?
# </details>
# <details><summary>Hint 4: fewer messages, and the mean</summary>
#
# Of the three numbers, which have the same operation, so that they can travel as one tensor? And if the loss is a mean
# over four targets, how much does one of them count in the gradient?
# </details>

# %% nbgrader={"grade_id": "check_cross_entropy", "grade": true, "locked": true, "points": 4}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L06_tensor_parallelism.checks")

### END HIDDEN TESTS
checks.cross_entropy(cross_entropy).points(4)

# %% [markdown]
# Two operations are the least if you subtract the largest logit of all: one for it, and one for the two sums that need
# it. (With an all-gather, one is enough: each rank then puts together the logarithms of all ranks' sums. But what a
# rank sends grows with their number.) What a rank sends does not depend on the size of the vocabulary.
#
# In this course it is [`vocab_parallel_cross_entropy`](../../course_lib/mechanisms/tensor_parallel/vocab.py), and in
# PyTorch a context around the loss, `torch.distributed.tensor.parallel.loss_parallel()`.

# %% [markdown]
# ## 5. An open task: a slow link
#
# | you build | minutes | difficulty |
# |---|---|---|
# | a block with fewer sums | 15 | ★★☆ |
#
# In some models attention and MLP stand side by side: both read x, and both are added to it. `first` and `second` are
# such layers, cut for each rank: they take a whole x and return a partial sum of their output. The block below is
# right, and the link is slow: on each of four ranks a whole x takes 82 ms to leave, and arrives 2 ms later. An
# all-reduce takes 135 ms, in six rounds of a ring. Change whatever you like, as long as the result and the gradients
# stay exact: the emulated clock counts. A call of a layer takes 20 ms forward and 40 ms backward, however few samples
# it is given. Use collectives or messages by hand, one or the other, and no groups of your own: on this clock they do
# not slow each other down, and on a real link they do. Four levels are on the scale: met, good, as good as ours, and
# far better than ours. The block as it is:

# %%
def all_reduced(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def one_after_the_other(x, first, second):
    y = conjugate(first(conjugate(x, lambda x: x, all_reduced)), all_reduced, lambda gradient: gradient)
    z = conjugate(second(conjugate(x, lambda x: x, all_reduced)), all_reduced, lambda gradient: gradient)
    return x + y + z


checks.faster_block(one_after_the_other)

# %% nbgrader={"grade_id": "faster_block", "solution": true}
def faster_block(x, first, second):
    """x + first(x) + second(x), in as little emulated time as you can.

    x: the same on all ranks.
    first, second: a rank's share of two layers. Each takes x and returns a partial sum.

    Returns the same tensor on all ranks. Backward, each rank computes the gradients of its
    own shares, and every rank the whole gradient of x.
    """
    ### BEGIN SOLUTION
    own = conjugate(x, lambda x: x, all_reduced)
    return x + conjugate(first(own) + second(own), all_reduced, lambda gradient: gradient)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: count</summary>
#
# How many all-reduces does the block take forward, and how many backward? How many bytes has each of them?
# </details>
# <details><summary>Hint 2: two sums</summary>
#
# Two ranks have y = 1 and y = 2, z = 10 and z = 20. In how many ways can you come to 33, and how many numbers does each
# rank send for that?
# </details>
# <details><summary>Hint 3: the same backward</summary>
#
# Where does x go into two layers? On the way back, autograd adds up what comes from both. Does it do that before your
# `conjugate` or behind it, and how often is a sum over ranks taken?
# </details>
# <details><summary>Hint 4: under the all-reduce</summary>
#
# Four ranks, and a part of x that rank 2 adds up. How many steps of a ring does the part of rank 3 need to get there,
# and how many would it need at least? What does each step cost, beside the bytes, and do the bytes become more?
# </details>

# %% nbgrader={"grade_id": "check_faster_block", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L06_tensor_parallelism.checks")

### END HIDDEN TESTS
block = checks.faster_block(faster_block)
block.points(3)

# %% [markdown]
# Your block, the one that was given, and ours: one all-reduce on each way, 390 ms. No block that calls each layer once
# is faster than 370: the layers take 120, each way a rank sends one and a half times a whole x, which takes 123, and
# the last byte arrives 2 ms later. By hand, in two rounds, it is 374; in two pieces, of which the second is on its way
# while the first is added up, it is 370. GPT-J put the two layers side by side for this reason; PaLM did because their
# first products can then be one (Chowdhery et al. 2022, section 2). With `torch.distributed.tensor`,
# `parallelize_module` sums behind each layer of its plan. The course's own layers are
# [`ColumnParallelLinear`](../../course_lib/mechanisms/tensor_parallel/linear.py) and its counterpart.

# %%
block.idle

# %% [markdown]
# Why is your block faster? Write three sentences: what it sends now, why the result is still exact, and why a usual
# block, in which the MLP reads the output of attention, cannot do the same.

# %% [markdown] nbgrader={"grade_id": "why_faster_block", "grade": true, "solution": true, "points": 2}
# It sends one sum forward and one backward, in place of two and two. Sums over ranks and over layers may be exchanged,
# so the numbers are those of one process, up to rounding. In a usual block the MLP needs the whole output of attention
# before it can begin, so that sum has to be complete first.

# %% [markdown]
# ## 6. On paper: a layer of a real GPT
#
# | you find out | minutes | difficulty |
# |---|---|---|
# | how far apart tensor ranks may be | 10 | ★☆☆ |
#
# So far links were emulated. Now take one layer of GPT-3: hidden size 12,288. A micro-batch is one sequence of 2,048
# tokens, in 16 bits, and eight H100 are its tensor ranks. In one node they talk over NVLink, which brings about 369
# GB/s in one direction to each. In eight nodes each has a card of 400 Gbit/s to itself, of which about 40 GB/s are
# reached.
#
# What does an all-reduce behind attention or MLP carry, and how much of that does a rank send in a ring? Each of the
# eight computes its share of the layer in a little more than a millisecond forward. *Predict:* which share of the way
# forward, with its two all-reduces, is spent on messages, over NVLink and over InfiniBand?

# %% nbgrader={"grade_id": "all_reduce_ms", "solution": true}
def all_reduce_ms(tokens, hidden, ranks, bytes_per_second):
    """How many milliseconds one all-reduce takes, in a ring, without latencies.

    tokens, hidden: what is summed is [tokens, hidden], in 16 bits.
    bytes_per_second: what leaves a rank.
    """
    ### BEGIN SOLUTION
    sent = 2 * (ranks - 1) / ranks * 2 * tokens * hidden
    return 1000 * sent / bytes_per_second
    ### END SOLUTION


# %%
my_shares = {"NVLink 4": None, "InfiniBand NDR": None}  # put your prediction here

# %% [markdown]
# The planner has a catalogue of devices and links. A layer's matrices have $12h^2$ parameters, so its products take
# $24h^2$ FLOPs for each token forward. (The products of queries and keys are a few percent more, and left out here.)
# Beside your function stands the planner's, which also counts latencies and the start of the operation, and its bytes
# alone:

# %%
cluster, tokens, hidden = Cluster("H100-80GB", between="InfiniBand NDR"), 2048, 12_288
speed = cluster.spec.peak["bf16"] * cluster.spec.matmul  # what large products reach
computes = 1000 * 24 * hidden**2 * tokens / 8 / speed
print(f"a rank computes {computes:.2f} ms forward")
for link in cluster.inside_link, cluster.between_link:
    mine = all_reduce_ms(tokens, hidden, 8, link.achieved)
    sends = 1000 * ring_seconds("all_reduce", 2 * tokens * hidden, 8, link)
    share = 2 * sends / (2 * sends + computes)
    without = 1000 * ring_seconds("all_reduce", 2 * tokens * hidden, 8, replace(link, latency=0.0, launch=0.0))
    verdict = "exactly" if isclose(mine, without, rel_tol=1e-9) else "not yet"
    print(f"{link.name:14}: an all-reduce takes {sends:.2f} ms, its bytes alone {without:.3f}, yours {mine:.3f}: "
          f"{verdict}; two of them are {share:.0%} of the way forward, predicted {my_shares[link.name]}")

# %% [markdown]
# Inside a node about a third of the way forward is messages, and across nodes nearly four fifths. Little of it can
# hide, since the next layer needs the sum. The way back has twice the products, and two all-reduces more. So tensor
# ranks stay inside a node. What crosses nodes had better be rare or small: a gradient once in a step, or the
# activations between two stages.
#
# Which way out is there, if tensor ranks have to cross nodes all the same? *Predict:* at which hidden size are messages
# only a fifth of the way forward, with eight ranks, and with two? And does a larger micro-batch help?

# %%
my_hidden = {8: None, 2: None}

# %%
def share_across(tokens, hidden, ranks):
    sends = 2 * all_reduce_ms(tokens, hidden, ranks, cluster.between_link.achieved)
    return sends / (sends + 1000 * 24 * hidden**2 * tokens / ranks / speed)


for ranks in 8, 2:
    enough = next(hidden for hidden in range(1024, 10**6, 1024) if share_across(2048, hidden, ranks) <= 0.2)
    print(f"{ranks} ranks: a fifth at a hidden size of {enough:,}, predicted {my_hidden[ranks]}")
print(f"GPT-3, 2,048 tokens: {share_across(2048, 12_288, 8):.0%}, 16,384 tokens: {share_across(16_384, 12_288, 8):.0%}")

# %% [markdown]
# A larger micro-batch does not help: products and messages both grow with the tokens. A larger hidden size does, since
# products grow with its square, but no model is that wide. Fewer tensor ranks help most, since each computes more and
# sends less.

# %% [markdown]
# ## Everything together
#
# Here is a transformer block made of your functions. It takes its share out of a whole block, and has what f and g
# stand between: a column-parallel layer, something that works on each head or hidden unit alone, and a row-parallel
# layer.

# %%
CONFIG = GPTConfig(layers=2, hidden=32, heads=4)


def share(tensor, dim):
    return tensor.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


class Block(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.norm_1, self.norm_2 = whole.attention_norm, whole.mlp_norm
        attention, mlp = whole.attention, whole.mlp
        three = (attention.query, attention.key, attention.value)
        weight, bias = (torch.cat([getattr(layer, name) for layer in three]) for name in ("weight", "bias"))
        shares = [*cut_heads(weight, bias, attention.out.weight, CONFIG.heads)]
        shares += [share(mlp.up.weight, 0), share(mlp.up.bias, 0), share(mlp.down.weight, 1)]
        self.shares = nn.ParameterList(one.detach().clone() for one in shares)
        self.out_bias, self.down_bias = attention.out.bias, mlp.down.bias

    def forward(self, x):
        qkv, qkv_bias, out, up, up_bias, down = self.shares
        heads = column_parallel(self.norm_1(x), qkv, qkv_bias).unflatten(-1, (3, -1, CONFIG.head_width))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + row_parallel(mixed.transpose(1, 2).flatten(2), out, self.out_bias)
        hidden = F.gelu(column_parallel(self.norm_2(x), up, up_bias))
        return x + row_parallel(hidden, down, self.down_bias)


# %% [markdown]
# Four ranks now train a small GPT to add two numbers, and all of them see the same samples. One process does the same
# with `TinyGPT` as it is, and PyTorch's own cross-entropy. (Only targets in the answer count, hence `is_answer`.)

# %%
problems, _ = train_test_split()


def train(rank, steps):
    embedding, *blocks, head = TinyGPT(CONFIG, dtype=torch.float64).blocks
    body = nn.Sequential(embedding, *map(Block, blocks), head.norm)
    output = nn.Parameter(share(head.output.weight, 0).detach().clone())
    first = sum(len(part) for part in torch.arange(CONFIG.vocab).tensor_split(dist.get_world_size())[:rank])
    parameters, batches, losses = [*body.parameters(), output], minibatches(problems, 32), []
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(steps):
        inputs, targets = next(batches)
        is_answer = targets != NO_LOSS
        logits = column_parallel(body(inputs)[is_answer], output, torch.zeros(len(output), dtype=torch.float64))
        loss, gradient = cross_entropy(logits.detach(), targets[is_answer], first)
        optimizer.zero_grad()
        logits.backward(gradient)
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(parameter.numel() for parameter in parameters), embedding.token.weight.detach()


def train_alone(steps):
    model = TinyGPT(CONFIG, dtype=torch.float64)
    optimizer, batches, losses = torch.optim.SGD(model.parameters(), lr=0.1), minibatches(problems, 32), []
    for _ in range(steps):
        inputs, targets = next(batches)
        loss = answer_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(parameter.numel() for parameter in model.parameters()), model.blocks[0].token.weight.detach()


STEPS = 20
run = launch(train, 4, args=(STEPS,), timeout=10)
alone, of_all, embedding = train_alone(STEPS)
losses, held, embedding_of_rank_0 = run.results[0]

same = all(torch.equal(rank_embedding, embedding_of_rank_0) for _, _, rank_embedding in run.results)
print("what all ranks hold is equal on all, bit for bit:", same)
print("losses of one process, up to rounding:", torch.allclose(torch.tensor(losses), torch.tensor(alone), atol=1e-6))
print("its embedding, up to rounding:", torch.allclose(embedding_of_rank_0, embedding, rtol=0, atol=1e-10))
print(f"a rank holds {held:,} of {of_all:,} parameters")
operations = [span for span in run.timeline.of(0) if span.kind == "transfer"]
print("all-reduces in a step:", len(operations) / STEPS)

# %% [markdown]
# Each block has two pairs of layers, and each pair an f and a g. The head has one f, and your loss takes two more. The
# embedding lies before everything that is cut, and its gradient comes through every f. So it is the first that would be
# wrong without one of them.
