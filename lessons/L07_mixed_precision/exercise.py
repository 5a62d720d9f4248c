# %% [markdown]
# # Mixed precision, by hand
#
# Compute and send in 16 bits, add up and remember in 32. Four functions make that safe. Here you write them, and they
# run on real processes. A fifth one predicts what a loss scale does, before you run it. And a sixth one trains with
# master weights in as few bytes as you can.
#
# | | you build | minutes | difficulty | points |
# |---|---|---|---|---|
# | 1 | `update_scale`: who skips a step, and which loss scale comes next | 20 | ★★☆ | 3 |
# | 2 | `master_step`: an update too small for 16 bits | 10 | ★☆☆ | 2 |
# | 3 | `sum_gradients`: long sums and large ones, sent in 16 bits | 20 | ★★☆ | 3 |
# | 4 | `unscale_and_clip`: the norm over all ranks | 20 | ★★☆ | 3 |
# | 5 | `shares_lost`: a loss scale, first on paper and then run | 25 | ★★☆ | |
# | 6 | `held` on paper, then `lighter_update`: an open task: masters in less memory | 40 | ★★★ | 3 |
# | | three sentences at the end: what is rounded, and what bfloat16 would change | 5 | ★★☆ | 2 |
#
# Below each of them but the fifth stands its check. It runs your function on 2, 3 and 4 ranks, in small cases that
# become harder one thing at a time. Once nothing is wrong, it tells you what your solution costs, beside the best
# possible. Nothing that you write can break anything. Run a check as often as you like.
#
# Nearly all of it is for **float16**. It has three digits, and a narrow range: above 65504 there is only `inf`, and
# what is below $2^{-25}$ becomes zero. Part 6 is for bfloat16.

# %%
import torch
import torch.distributed as dist
from torch import nn

from course_lib import launch
from course_lib.data import answer_loss, minibatches, train_test_split
from course_lib.instruments.watch import Watch
from course_lib.model import GPTConfig, TinyGPT
from lessons.L07_mixed_precision import checks

# %% [markdown]
# ## 1. The loss scale
#
# | you build | minutes | difficulty |
# |---|---|---|
# | a dynamic loss scale on which all ranks agree | 20 | ★★☆ |
#
# The loss is multiplied by a scale, and so are all gradients, so that small ones do not become zero. If the scale is
# too large, some become `inf` or `nan`. Such a step must not reach the weights. A dynamic scale looks for the edge by
# itself. With an interval of 3 good steps:
#
#     step           good   good   good   good   overflow   good   good   good   good
#     is taken       yes    yes    yes    yes    no         yes    yes    yes    yes
#     scale after    1024   1024   2048   2048   1024       1024   1024   2048   2048
#     good steps     1      2      0      1      0          1      2      0      1
#
# Here every rank holds gradients of other parameters, as in sharded data parallelism. So it may happen that only one of
# them sees an overflow. In the next step all ranks have to be at the same place with the same scale.

# %% nbgrader={"grade_id": "update_scale", "solution": true}
def update_scale(gradients, scale, good_steps, interval):
    """Whether a step is taken, and the loss scale of the next one.

    gradients: a list of this rank's float16 gradients, still multiplied by the scale. Other
        ranks have others, and a rank may have none (an empty list).
    scale, good_steps: the scale of this step, and how many good steps in a row went
        before it with this scale; the same on all ranks.
    interval: after so many good steps in a row, the scale is doubled.

    Returns (is_taken, scale, good_steps), the same on all ranks. A step is taken if all
    numbers of all gradients on all ranks are finite. Otherwise the scale is halved.
    """
    ### BEGIN SOLUTION
    is_taken = torch.tensor(all(gradient.isfinite().all() for gradient in gradients))
    dist.all_reduce(is_taken, dist.ReduceOp.MIN)
    if not is_taken:
        return False, scale / 2, 0
    if good_steps + 1 == interval:
        return True, scale * 2, 0
    return True, scale, good_steps + 1
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: one rank first</summary>
#
# Go through the columns of the picture: which three things can happen to scale and good steps? `tensor.isfinite()` says
# for each number whether it is neither `inf` nor `nan`, and `.all()` whether that is so for all.
# </details>
# <details><summary>Hint 2: all ranks</summary>
#
# Rank 0 sees an overflow, rank 1 sees none, and rank 2 has no gradients. What has to come out on all of them, and how
# do they learn of it? Besides the sum, `dist.all_reduce` can take others: `dist.ReduceOp.MIN`, `MAX`, `PRODUCT`.
# </details>
# <details><summary>Hint 3: why not the largest gradient?</summary>
#
# Is `nan` larger than 1? `float("nan") > 1` is False, and so is `float("nan") < 1`, so an all-reduce with MAX may lose
# it. What could a rank send in place of its gradients, of which nothing can be lost?
# </details>

# %% nbgrader={"grade_id": "check_update_scale", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L07_mixed_precision.checks")

### END HIDDEN TESTS
checks.update_scale(update_scale).points(3)

# %% [markdown]
# What counts here is the one operation in each step, for a single number: its price is the latency of the link.
#
# In this course it is [`LossScaler`](../../course_lib/mechanisms/loss_scaling.py). PyTorch's `torch.amp.GradScaler` has
# the same rules, with an interval of 2000 steps, and does not ask other ranks. With plain data parallelism it need not:
# all ranks have the same averaged gradient. `ShardedGradScaler` asks.

# %% [markdown]
# ## 2. Master weights
#
# | you build | minutes | difficulty |
# |---|---|---|
# | an update in 32 bits for weights in 16 | 10 | ★☆☆ |
#
# An update below half of a weight's last digit rounds away, and most updates are that small. So there are two copies:
#
#     16 bits    weights  -- forward, backward -->  gradients
#                   ^                                   |
#                   | round                             | to 32 bits
#     32 bits    masters  <-------- optimizer --------- gradients

# %% nbgrader={"grade_id": "master_step", "solution": true}
def master_step(weights, masters, gradients, optimizer):
    """One step of the optimizer, on master weights.

    weights: a list of the model's weights, tensors of 16 bits.
    masters: a list of their copies, parameters in float32.
    gradients: a list of their gradients, in 16 or 32 bits. One may be None: that weight
        was not used, and stays as it is.
    optimizer: an optimizer over the masters.

    Makes one step of the optimizer with these gradients, and writes the new values,
    rounded, into the weights. Afterwards the weights are the same tensors as before,
    with the same dtype, in the same memory: a view of a weight has the new values, too.
    The gradients stay as they are.
    """
    ### BEGIN SOLUTION
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = None if gradient is None else gradient.float()
    optimizer.step()
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master.detach())
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: three steps</summary>
#
# Follow the arrows of the picture from the gradients to the weights. Which of them does the optimizer take, and which
# are left to you?
# </details>
# <details><summary>Hint 2: dtypes</summary>
#
# A parameter in float32 takes a gradient in float32 only; `tensor.float()` has 32 bits. `a = b` makes a new name, while
# `a.copy_(b)` writes into the memory of a, rounded to its dtype. Which of the two keeps a view of a weight right?
# </details>
# <details><summary>Hint 3: what must not be left over</summary>
#
# An optimizer passes over a parameter whose `.grad` is None. A weight was used in the step before, and is not used in
# this one: what stands in the `.grad` of its master?
# </details>

# %% nbgrader={"grade_id": "check_master_step", "grade": true, "locked": true, "points": 2}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L07_mixed_precision.checks")

### END HIDDEN TESTS
checks.master_step(master_step).points(2)

# %% [markdown]
# Nothing travels, and what it costs is memory: four bytes for each master, and four for its gradient as long as the
# step lasts. In this course it is the `step` of [`MasterWeights`](../../course_lib/mechanisms/mixed_precision.py).
# PyTorch's `torch.autocast` has it the other way round: the model's own weights stay in 32 bits, and are rounded on the
# way into each matrix product. `fully_shard` keeps its shards in 32 bits, and gathers them in 16
# (`MixedPrecisionPolicy(param_dtype=...)`).

# %% [markdown]
# ## 3. Sums
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the mean of many gradients, over micro-batches and over ranks | 20 | ★★☆ |
#
# A large minibatch is cut into micro-batches, on each rank. Their gradients are added up, first on the rank, then over
# all ranks. Three things can go wrong, and each of them is silent:
#
#     many small numbers and a large one      3000 + 1 = 3000       the sum stalls
#     a few large numbers                    40000 + 40000 = inf     the sum overflows
#     a part of a small number               2^-24 / 4 = 0           it is lost
#
# Find a place for each addition and each division. What travels has 16 bits.

# %% nbgrader={"grade_id": "sum_gradients", "solution": true}
def sum_gradients(micro_batches):
    """The mean gradient over all micro-batches of all ranks.

    micro_batches: a list of float16 gradients [n], one for each of this rank's
        micro-batches. All ranks have the same number of them, at least one.

    Returns the mean, float32 [n], the same on all ranks, bit for bit. No gradient of a
    micro-batch is changed. A rank sends no more bytes than a ring all-reduce of n float16
    numbers does: 2 (world_size - 1) / world_size of the tensor.
    """
    ### BEGIN SOLUTION
    total = torch.zeros_like(micro_batches[0], dtype=torch.float32)
    for gradient in micro_batches:
        total += gradient
    total /= len(micro_batches) * dist.get_world_size()
    message = total.half()
    dist.all_reduce(message)
    return message.float()
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: on the rank</summary>
#
# 3000 + 1 is 3000 in 16 bits. Add up 3000 and a hundred times 1: in which dtype do you get 3100?
# `torch.zeros_like(tensor, dtype=...)` makes a tensor to add to, and what is added in place takes its dtype.
# </details>
# <details><summary>Hint 2: what is divided, and by what?</summary>
#
# Two ranks have three micro-batches each. Of how many gradients do you want the mean? And in which dtype has $2^{-24}$
# a quarter?
# </details>
# <details><summary>Hint 3: when?</summary>
#
# Two ranks have 40000 each, and the mean is 40000. Where would it go beyond 65504, if you add first and divide then?
# And the other way round?
# </details>

# %% nbgrader={"grade_id": "check_sum_gradients", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L07_mixed_precision.checks")

### END HIDDEN TESTS
checks.sum_gradients(sum_gradients).points(3)

# %% [markdown]
# Half the bytes of float32, and one all-reduce for all micro-batches. (`torch.stack(micro_batches).mean(0)` is right as
# well, though it returns 16 bits: within one operation, PyTorch adds up in 32.) The additions inside of the all-reduce
# are still in 16 bits. A few ranks do no harm. With hundreds, the ring can add up in 32 bits and send in 16, as
# [`all_reduce_in`](../../course_lib/mechanisms/collectives.py) does, as `all_reduce_in(torch.float16,
# accumulate=torch.float32)`. In this course, `MasterWeights.accumulate` adds up micro-batches.
#
# One thing is still lost. A rank rounds its part of the mean to 16 bits before it sends it. If that part is below
# $2^{-25}$, zero travels: four ranks with $2^{-24}$ each end with 0. This is what the loss scale of part 1 is for.
#
# PyTorch's `DistributedDataParallel` divides before it adds up, too. Its gradients have the dtype of the weights, so
# there micro-batches are added up in 16 bits if the weights have 16. `fully_shard` lets you choose what is added up in
# (`MixedPrecisionPolicy(reduce_dtype=...)`).

# %% [markdown]
# ## 4. Unscale, clip, and who skips
#
# | you build | minutes | difficulty |
# |---|---|---|
# | gradients as the optimizer wants them, from those of a scaled loss | 20 | ★★☆ |
#
# Before the optimizer sees them, gradients are divided by the loss scale. If their norm is larger than `max_norm`, all
# are multiplied by one factor, so that the norm is `max_norm`. It is the norm of the *whole* gradient, and of that each
# rank has a part:
#
#     rank 0    [3, 0]          squares  9
#     rank 1    [0, 4]          squares 16        norm of all:  sqrt(9 + 16) = 5

# %% nbgrader={"grade_id": "unscale_and_clip", "solution": true}
def unscale_and_clip(gradients, scale, max_norm):
    """Divide gradients by the loss scale, and clip them, in place.

    gradients: a list of this rank's float32 gradients, still multiplied by the scale. Other
        ranks have those of other parameters, and a rank may have none.
    max_norm: the largest norm that the gradient of all ranks together may have.

    Returns whether the step is to be taken, the same on all ranks: False if any number of
    any gradient on any rank is not finite. (What is in the gradients then does not matter.)
    """
    ### BEGIN SOLUTION
    for gradient in gradients:
        gradient /= scale
    squares = torch.zeros(())
    for gradient in gradients:
        squares += gradient.square().sum()
    dist.all_reduce(squares)
    if not squares.isfinite():
        return False
    factor = max_norm / squares.sqrt()
    if factor < 1:
        for gradient in gradients:
            gradient *= factor
    return True
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: the order</summary>
#
# The scale is 4, `max_norm` is 5, and a gradient is [12, 16]. Is it too long? Try both orders: one gives [3, 4], the
# other [0.75, 1]. Which is right?
# </details>
# <details><summary>Hint 2: the norm</summary>
#
# In the picture, which numbers can be added up over ranks: 3 and 4, or 9 and 16? A rank without gradients takes part,
# too: what does it add? `torch.zeros(())` is a tensor of a single number.
# </details>
# <details><summary>Hint 3: who skips?</summary>
#
# Rank 0 has [1, inf], and rank 1 has [2]. What does each send, and what do both have after the all-reduce? Is there
# anything that they still have to ask?
# </details>
# <details><summary>Hint 4: clip</summary>
#
# Take [3, 0] and [0, 4] from the picture. With `max_norm` 1 they become [0.6, 0] and [0, 0.8]. What should become of
# them with `max_norm` 10?
# </details>

# %% nbgrader={"grade_id": "check_unscale_and_clip", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L07_mixed_precision.checks")

### END HIDDEN TESTS
checks.unscale_and_clip(unscale_and_clip).points(3)

# %% [markdown]
# One operation for a single number says both how long the gradient is and whether anybody has overflowed. PyTorch's
# `torch.nn.utils.clip_grad_norm_` knows the tensors it is given: with shards of `fully_shard` it takes the norm over
# ranks, with plain tensors it takes the norm of those on this rank. Before it you have to call
# `scaler.unscale_(optimizer)`. In this course it is the `clip` of `MasterWeights.step`, and
# [`train_step`](../../course_lib/mechanisms/hybrid.py) takes the norm over a whole mesh.

# %% [markdown]
# ## 5. A scale, on paper
#
# | you build | minutes | difficulty |
# |---|---|---|
# | a prediction of what 16 bits do to gradients, for any loss scale | 25 | ★★☆ |
#
# Until now the scale has found its place by itself. Which place is it? Here is the small GPT that you will train at the
# end. Its minibatch is one of $2^{16}$ micro-batches, and its loss is divided by their number, as in section 5 of the
# lesson. First the gradients of one step in float32, and how many of them there are between one power of two and the
# next:

# %%
CONFIG = GPTConfig(layers=1, hidden=32, heads=2, tied_embeddings=True)
problems, _ = train_test_split()


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def step_in(dtype, scale=1.0, weights_in=torch.float16):
    """Forward and backward in this dtype: the model, the gradients of its parameters, and those of its activations."""
    model, activations = TinyGPT(CONFIG, dtype=weights_in).to(dtype), []

    def keep(module, inputs, output):
        output.retain_grad()
        activations.append(output)

    for module in model.modules():
        if not list(module.children()):  # a layer, such as a linear one, and no block of layers
            module.register_forward_hook(keep)
    inputs, targets = next(minibatches(problems, 64))
    loss = answer_loss(model(inputs).float(), targets) / 2**16
    (scale * loss).backward()
    return model, flat(one.grad for one in model.parameters()), flat(one.grad for one in activations)


model, exact, exact_inside = step_in(torch.float32)

# %% tags=["nbval-ignore-output"]
_, powers = torch.frexp(exact)  # a number is m * 2^power, with m from 1/2 to 1
for power in range(int(powers.min()), int(powers.max()) + 1):
    count = int((powers == power).sum())
    print(f"2^{power - 1} to 2^{power}  {count:5}  {'#' * (count // 50)}")

# %% [markdown]
# **First on paper.** Mark in this picture where float16 becomes zero, and where it begins to have fewer digits. A scale
# of $2^4$ moves everything down by four lines. How many lines can you go, until the first number is too large? Write
# down that scale, and the smallest one at which you would lose next to nothing.
#
# Then let a function do it for any scale. It asks only how large the numbers are, and rounds none of them:
#
# | a number times its scale | in float16 | |
# |---|---|---|
# | $2^{-30}$ | 0 | becomes zero |
# | $2^{-20} + 2^{-30}$ | $2^{-20}$ | subnormal: fewer digits |
# | $1$ | 1 | |
# | $2^{17}$ | inf | overflows |

# %% nbgrader={"grade_id": "shares_lost", "solution": true}
def shares_lost(gradients, scale, dtype):
    """Which shares of the gradients a dtype of 16 bits would lose, by their size alone.

    gradients: float32 [n], those of the loss without a scale.
    scale: the loss scale that they are multiplied by.
    dtype: torch.float16 or torch.bfloat16. `torch.finfo(dtype)` has its limits.

    Returns three shares of all n numbers, each from 0 to 1: those that become zero (a number
    that is zero before does not count), those that are subnormal and do not become zero, and
    those that overflow.
    """
    ### BEGIN SOLUTION
    limits = torch.finfo(dtype)
    sizes = (scale * gradients).abs()
    lost = limits.smallest_normal * limits.eps / 2  # half of the smallest number that is not zero
    found = (sizes > 0) & (sizes <= lost), (sizes > lost) & (sizes < limits.smallest_normal), sizes > limits.max
    return tuple(float(one.float().mean()) for one in found)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: the limits</summary>
#
# Print `torch.finfo(torch.float16)`. Which of its numbers is $2^{-14}$, and what does it mean? Between $2^{-14}$ and
# $2^{-13}$ there are 1024 steps of equal size. The steps below $2^{-14}$ have that size, too: how large is it?
# </details>
# <details><summary>Hint 2: where is zero?</summary>
#
# The numbers next to zero are one such step away. Try `torch.tensor(0.4 * 2**-24).half()`, and then 0.6 in place of
# 0.4. Where is the border, and does `torch.finfo` have it, or two numbers that it can be made of?
# </details>
# <details><summary>Hint 3: shares</summary>
#
# For `torch.tensor([3, -5, 0])`, what is `(x > 2).float().mean()`? Which of the three numbers should count as larger
# than 2 here, and what is missing?
# </details>
#
# Here are the four numbers of the table, divided by a scale of 4, and a zero. PyTorch rounds them, and then the shares
# are counted:

# %%
table = torch.tensor([2.0**-30, -(2.0**-20), 1, 2.0**17, 0]) / 4
for dtype in torch.float16, torch.bfloat16:
    small, rounded = torch.finfo(dtype).smallest_normal, (4 * table).to(dtype)
    lost = (rounded == 0) & (table != 0), (rounded != 0) & (rounded.abs() < small), rounded.isinf()
    found, mine = ([round(float(share), 3) for share in shares]
                   for shares in ([one.float().mean() for one in lost], shares_lost(table, 4.0, dtype)))
    verdict = "exactly" if mine == found else "not yet"
    print(f"{str(dtype)[6:]:8}: rounded by PyTorch {found}, predicted {mine}, {verdict}")

# %% [markdown]
# **Then run it.** *Predict:* will a real backward pass in float16 lose what your function says, or more, or less? Now
# all weights, activations and gradients have 16 bits, in each scale of this table. The last column is how far the whole
# gradient is off, divided by the scale again.

# %% tags=["nbval-ignore-output"]
def off(gradient, scale, exact):
    return (gradient.float() / scale - exact).norm() / exact.norm()


print("           predicted                       run in float16")
print("scale      zero    subnormal  overflow     zero    subnormal  not finite  off by")
for power in range(0, 41, 4):
    scale = 2.0**power
    predicted = shares_lost(exact, scale, torch.float16)
    _, gradient, _ = step_in(torch.float16, scale)
    zero, subnormal, _ = shares_lost(gradient.float(), 1.0, torch.float16)
    zero, broken = (found.float().mean() for found in (gradient == 0, ~gradient.isfinite()))
    print(f"2^{power:<5}" + "".join(f"{share:10.2%}" for share in predicted), end="  ")
    print("".join(f"{share:10.2%}" for share in (zero, subnormal, broken)), f"{off(gradient, scale, exact):11.1e}")

# %%
predicted = [f"2^{power}" for power in range(64) if shares_lost(exact, 2.0**power, torch.float16)[2]][:1]
found = next(power for power in range(64) if not step_in(torch.float16, 2.0**power)[1].isfinite().all())
print("the first scale that overflows: predicted", *predicted, f"and run 2^{found}")

# %% [markdown]
# At large scales and at small ones, the two halves of the table differ. Your function looks at the gradients of the
# parameters. A backward pass has others on its way: those of the activations. *Predict:* are they larger or smaller?
# Which of the two becomes zero first, then, and which overflows first? Your function can tell:

# %% tags=["nbval-ignore-output"]
exact_inside = exact_inside[exact_inside != 0]  # many activations of the prompt do not reach the loss
for power in 0, 8, 32, 36, 40:
    for words, gradients in (("parameters", exact), ("activations", exact_inside)):
        shares = "".join(f"{share:10.2%}" for share in shares_lost(gradients, 2.0**power, torch.float16))
        print(f"2^{power:<3} {words:12} zero, subnormal, overflow: {shares}")

# %% [markdown]
# The gradient of a weight is a sum over all tokens, and those of activations are its parts. Here the parts are smaller.
# So with a small scale they become zero first, and what is zero in one layer is missing in all layers before it: the
# run loses more than you predicted from the sums. With a large scale the sums overflow first, so you could predict the
# edge. Far above it, the parts overflow, too. The layers before compute with `inf`, and `inf - inf` is `nan`, so in the
# end nothing is finite. In another model it may be the other way round, for example if the parts of its sums cancel.
# Then the run overflows at a smaller scale than its parameters say. So a real scaler does not compute the edge. It
# tries.
#
# Between the two edges there is a wide range of scales, all equally good. There the whole gradient is off by about the
# $2^{-11}$ of a single rounding, and a larger scale makes nothing better. Yet at some of these scales your function
# still sees numbers that become zero, and the run hardly any. In the first picture, some lie far below all others.
# Whose are they?

# %%
largest = {name: float(one.grad.abs().max()) for name, one in model.named_parameters()}
print([name for name, size in largest.items() if size < 2**-20 * max(largest.values())])

# %% [markdown]
# The same vector added to all keys of a head adds the same number to all scores of a query, and softmax does not see
# it. So the exact gradient of this bias is zero. What float32 has there is its own rounding, and in float16 there is
# more of that. Nothing is lost with it. So ask *how much* is lost, and then ask *whose* gradients they are.
#
# Now **bfloat16**. *Predict* the three shares for a scale of 1 and one of $2^{40}$, and how far the gradient is off,
# beside float16 at its best. Each is held against float32 with the same rounded weights:

# %% tags=["nbval-ignore-output"]
for dtype, power in (torch.float16, 20), (torch.bfloat16, 0), (torch.bfloat16, 40):
    _, gradient, _ = step_in(dtype, 2.0**power, dtype)
    _, reference, _ = step_in(torch.float32, 1.0, dtype)
    shares = "".join(f"{share:10.2%}" for share in shares_lost(reference, 2.0**power, dtype))
    print(f"{str(dtype)[6:]:9} scale 2^{power:<3}{shares}   off by {off(gradient, 2.0**power, reference):.1e}")

# %% [markdown]
# No scale changes anything, as nothing comes near the ends of the range. But with three bits fewer, a single rounding
# is off by up to $2^{-8}$ in place of $2^{-11}$, whatever the scale.
#
# And real trainings? Micikevicius et al. (2018) used scales from 8 to 32K, and many networks needed none (section 3.2).
# Their object detector needed 8, for the gradients of its activations. And this model? Divided by its own tokens alone,
# its loss would be $2^{16}$ times as large. So look at the line of $2^{16}$ in your table: that is this model with no
# loss scale at all. `torch.amp.GradScaler` begins at $2^{16}$, too, and tries from there.

# %% [markdown]
# ## 6. An open task: masters in less memory
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the bytes of masters, on paper, and a training that holds as few of them as you can | 40 | ★★★ |
#
# Now the weights are in **bfloat16**, and their masters in float32. All ranks have the same weights. They also get the
# same gradients, the mean over all ranks. A bfloat16 number has the first 16 bits of a float32 number: the sign, the
# exponent and the first digits. Usual code rounds a master to such a number. Here a master is *cut off*: the weight is
# the upper 16 of its 32 bits. (In memory, the lower half of a number comes first.)

# %%
def upper_half(master):
    """The upper 16 bits of each float32 number, as a view. It has no memory of its own."""
    return master.view(torch.bfloat16)[..., 1::2]


pi = torch.tensor([3.1415927])
weight = upper_half(pi)
print(f"master {pi.item():.7f}, bits {pi.view(torch.int32).item():08x}")
print(f"weight {weight.item():.7f}, bits {weight.view(torch.int16).item():04x}")

# %% [markdown]
# Below stands a training that is right and heavy. Change whatever you like, as long as the weights keep every bit: what
# counts is the bytes of extra memory, at the moment when there are most, on the rank that holds most. The weights and
# gradients that are given do not count. Time and messages are free.

# %%
def with_whole_masters(weights, gradients, backward, steps, lr):
    masters = [weight.float() for weight in weights]
    for _ in range(steps):
        backward()
        wide = [gradient.float() for gradient in gradients]
        updates = [lr * gradient for gradient in wide]
        masters = [master - update for master, update in zip(masters, updates, strict=True)]
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(upper_half(master))

# %% [markdown]
# **First on paper.** Four ranks train four matrices of 25 x 10 numbers and four vectors of 10. How many bytes does this
# training hold at most? Go through it line by line, and ask which lists are there at the same time. A name holds a list
# until it stands for another one. Then two other ways to do it, which you do not have to write yet:
#
# | | float32 numbers for each number | of which numbers |
# |---|---|---|
# | the training as it is | ? | all |
# | one master for each number, and nothing else | 1 | all |
# | the same in shards, each weight cut by `tensor_split` | 1 | those of the rank that has most |

# %% nbgrader={"grade_id": "held", "solution": true}
def held(sizes, ranks):
    """The most bytes of extra memory on the rank that holds most, in the three ways of the table.

    sizes: how many numbers each weight has, a list.
    Returns three numbers, one for each line of the table.
    """
    ### BEGIN SOLUTION
    whole = 4 * sum(sizes)
    shard = 4 * sum(-(-size // ranks) for size in sizes)  # rank 0 has the longest piece of each
    return 4 * whole, whole, shard  # the masters before and after, the wide gradients and the updates
    ### END SOLUTION


# %% [markdown]
# Is it so? `Watch` is what counts bytes in the checks. Here it watches one process that does what rank 0 does:

# %%
weights, gradients = ([torch.ones(size).bfloat16() for size in [250, 10] * 4] for _ in range(2))
ways = (
    ("as it is", lambda: with_whole_masters(weights, gradients, lambda: None, 2, 0.5)),
    ("one master for each number", lambda: [weight.float() for weight in weights]),
    ("the same in shards", lambda: [weight.tensor_split(4)[0].float() for weight in weights]),
)
for (name, way), predicted in zip(ways, held([250, 10] * 4, ranks=4), strict=True):
    with Watch() as watch:
        kept = way()
    verdict = "exactly" if watch.peak == predicted else "not yet: go through its lines once more"
    print(f"{name}: predicted {predicted:,} bytes, measured {watch.peak:,}, {verdict}")

# %% [markdown]
# **Then build it.** Four levels are on the scale: met, good, as good as ours, and far better than ours. The training as
# it is:

# %%
checks.lighter_update(with_whole_masters)

# %% nbgrader={"grade_id": "lighter_update", "solution": true}
def lighter_update(weights, gradients, backward, steps, lr):
    """Train with master weights, in as few bytes of extra memory as you can.

    weights: a list of bfloat16 tensors, matrices and vectors, the same on all ranks.
    gradients: a list of bfloat16 tensors, one for each weight. Only backward() writes into
        them.
    backward: backward() computes the gradients for the weights as they are, and writes
        them into `gradients`. It takes no extra memory. Call it once in each step. Ranks
        with the same weights get the same gradients.
    steps: how many steps to train.
    lr: the learning rate, a power of two, so that lr * gradient is exact in float32.

    A master begins as its weight, in float32. In each step, lr * gradient is taken from it,
    in float32. Then, on all ranks, the weight is the upper half of its master, in the memory
    that the weight had before. What you keep, you keep in tensors: only they are counted.
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    shards = [weight.view(-1).tensor_split(n) for weight in weights]
    lower = [torch.zeros_like(of_ranks[rank], dtype=torch.int16) for of_ranks in shards]
    for _ in range(steps):
        backward()
        for of_ranks, gradient, low in zip(shards, gradients, lower, strict=True):
            upper = of_ranks[rank]
            master = torch.stack([low, upper.view(torch.int16)], -1).view(torch.float32).flatten()
            master.sub_(gradient.view(-1).tensor_split(n)[rank], alpha=lr)
            low.copy_(master.view(torch.int16)[::2])
            upper.copy_(upper_half(master))
            del master  # before the next one is made
            for other, shard in enumerate(of_ranks):
                dist.broadcast(shard, other)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: what is held?</summary>
#
# In the line that makes the new masters, four lists are there. Which of them does nobody read any more after this line?
# And which number of which list do you need to update a single number of a weight?
# </details>
# <details><summary>Hint 2: in place</summary>
#
# `a` is `torch.ones(1000)`, and `b` is in bfloat16. How many new tensors does `a = a - 0.5 * b.float()` make, and how
# many does `a.sub_(b, alpha=0.5)`? Try it with a = 1 and b = 3. Which dtype has the result, and was a wide `b` needed?
# </details>
# <details><summary>Hint 3: who keeps what?</summary>
#
# All four ranks compute the same new masters. What does a rank need to know of a weight before the next `backward()`,
# and in how many bits? With seven numbers on two ranks, `tensor_split` makes views of four and three. What becomes of
# the whole tensor, if a message is received into such a view?
# </details>
# <details><summary>Hint 4: what does nobody know yet?</summary>
#
# The master of the weight 4049 may be 40490000 or 40490fdb. Which bits do you have to keep, beside the weight, to tell
# the two apart? `torch.tensor([3, 2], dtype=torch.int16).view(torch.int32)` is 131075, in hex 00020003. But as int16,
# the bits ffff are -1. What is 00020000 with -1 added to it, and which number did you want?
# </details>
# <details><summary>Hint 5: how much at a time?</summary>
#
# To take something from a master, it has to be there for a moment, with all its bits. Does that have to be the same
# moment for all numbers of your shard? And what does a name from the last round of your loop still hold?
# </details>

# %% nbgrader={"grade_id": "check_lighter_update", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L07_mixed_precision.checks")

### END HIDDEN TESTS
lighter = checks.lighter_update(lighter_update)
lighter.points(3)

# %% [markdown]
# Ours keeps only the lower halves of its shard, because the upper halves are in the weights: 2 bytes for each of 264
# numbers. It puts together the masters of one weight's shard at a time, 4 bytes for each of up to 63 numbers. That
# makes 780 bytes. One can go on from there: one master at a time, always in the same four bytes, takes 532.
#
# And in earnest? With Adam, mixed precision takes 16 bytes for each parameter: 2 for the weight, 2 for its gradient, 4
# for the master and 8 for the two numbers that Adam keeps. With half a master it is 14. Two libraries of NVIDIA can do
# this, Apex in its `DistributedFusedAdam` and Transformer Engine in its `FusedAdam`. Both call it
# `store_param_remainders`. Apex rounds to the nearest number, and still finds the way back: if the lower half begins
# with a 1, the weight was rounded up. But `copy_` rounds to the even neighbor if both are equally near. So 3f818000 and
# 3f828000 both become 3f82, with the same lower half, and nobody can tell them apart any more.
#
# In PyTorch, `ZeroRedundancyOptimizer` shards what an optimizer keeps, and `fully_shard` keeps the masters themselves
# in shards. The course's own is [`ShardedOptimizer`](../../course_lib/mechanisms/sharding.py).
#
# Numbers that you keep in Python lists are not counted, and take more memory than tensors: whoever does that fools only
# himself.
#
# Time was free here. *Predict:* how many messages does your training send in a step? Each of them pays a latency of at
# least 2 ms, and a backward pass takes 40 ms. Here it is on the emulated clock, and below it the one that was given:

# %%
my_messages = None

# %%
messages = [span for span in lighter.idle.timeline.of(0) if span.kind == "transfer"]
print(f"{len(messages) / 8:.0f} messages in each of 8 steps, expected {my_messages}")
lighter.idle

# %% [markdown]
# Ours sends 32 messages in a step, one for each weight and rank. They are small, so nearly all of their time is
# latency. Real code sends large pieces of many weights at once. It pays for them with memory in which it puts the
# pieces together.

# %% [markdown]
# ## Everything together
#
# Four ranks train a small GPT with weights in float16. The master weights are sharded: each rank has a quarter of them
# in 32 bits, updates it, and sends it to the others in 16. A step that is skipped is tried again with the same samples
# and the smaller scale.

# %%
STEPS, MICRO_BATCHES, LR, MAX_NORM = 30, 2, 1e-3, 1.0


def train(rank):
    world_size = dist.get_world_size()
    model = TinyGPT(CONFIG, dtype=torch.float16)
    weights = flat(model.parameters())
    own = weights.tensor_split(world_size)[rank]  # a view of this rank's quarter
    masters = [nn.Parameter(own.float())]
    optimizer = torch.optim.SGD(masters, lr=LR)
    scale, good_steps, taken, skipped = 2.0**24, 0, 0, 0
    batches = minibatches(problems, 8 * world_size * MICRO_BATCHES)
    inputs, targets = next(batches)
    while taken < STEPS:
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
        micro_batches = []
        for i in range(rank, world_size * MICRO_BATCHES, world_size):  # 8 samples each
            micro_batch = slice(8 * i, 8 * i + 8)
            loss = answer_loss(model(inputs[micro_batch]).float(), targets[micro_batch])
            micro_batches.append(flat(torch.autograd.grad(scale * loss, list(model.parameters()))))
        gradient = sum_gradients(micro_batches).tensor_split(world_size)[rank]
        used = scale
        is_taken, scale, good_steps = update_scale([gradient], scale, good_steps, interval=10)
        if is_taken and unscale_and_clip([gradient], used, MAX_NORM):
            master_step([own], masters, [gradient], optimizer)
            for other, quarter in enumerate(weights.tensor_split(world_size)):
                dist.broadcast(quarter, other)
            inputs, targets = next(batches)
            taken += 1
        else:
            skipped += 1
    return masters[0].detach(), weights, skipped


def train_alone(dtype):
    """One process with whole minibatches, beginning at the same rounded weights; no scale, no masters."""
    model = TinyGPT(CONFIG, dtype=torch.float16).to(dtype)
    start = flat(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches = minibatches(problems, 64)
    for _ in range(STEPS):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        answer_loss(model(inputs).float(), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return start.float(), flat(model.parameters()).float()


run = launch(train, 4, timeout=10)
masters, weights, skipped = zip(*run.results, strict=True)
print("all ranks end with the same weights, bit for bit:", all(torch.equal(one, weights[0]) for one in weights))
print("all ranks have skipped the same number of steps:", len(set(skipped)) == 1)
print("they have skipped at least one:", skipped[0] > 0)

# %% [markdown]
# Where should they end? Each number of a gradient passes some roundings on its way: about a dozen operations forward,
# as many backward, the weights themselves, and the sums. Say 40. Each is off by half a last digit at most, $2^{-11}$ of
# the number. If all of them erred in one direction, that would be $40 \cdot 2^{-11}$, or 2% of the way that the weights
# have gone. This is an estimate and no bound, as a difference of two numbers that are nearly equal, in a norm or a
# softmax, can be off by a larger share than they are. Without masters, the same training in float16 does not get far.

# %%
start, exact = train_alone(torch.float32)
_, naive = train_alone(torch.float16)
way = (exact - start).norm()
TOLERANCE = 40 * 2.0**-11
off, off_alone = ((end - exact).norm() / way for end in (torch.cat(masters), naive))
print(f"your masters end where float32 does, up to {TOLERANCE:.1%} of the way:", bool(off < TOLERANCE))
print("float16 alone misses it by more than half of the way:", bool(off_alone > 0.5))

# %% [markdown]
# What have you seen? Write three sentences: which numbers are still rounded to 16 bits in this training, why the
# masters matter all the same, and what would change with **bfloat16**. It has the range of float32, and three bits
# fewer than float16 for the digits.

# %% [markdown] nbgrader={"grade_id": "why_masters", "grade": true, "solution": true, "points": 2}
# Weights, activations and gradients are rounded, and so is what travels; only the masters and the sums over
# micro-batches have 32 bits. An update below half of a weight's last digit would be lost in every step, and the masters
# add such updates up until the rounded weight changes. With bfloat16 hardly anything overflows or becomes zero (in part
# 5 nothing did), so no loss scale is needed and no step is skipped, but it has fewer digits: without masters, an update
# below $2^{-9}$ of its weight is always lost.
