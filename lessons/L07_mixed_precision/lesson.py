# %% [markdown]
# # Mixed precision
#
# **What you do:** train in 16 bits, watch it go wrong in three different ways, and put each of them right.<br>
# **Time:** 45 minutes. The last two cases can wait for another day.<br>
# **You need:** [Data parallelism](02_data_parallelism.ipynb); for the last two cases
# [Pipeline parallelism](05_pipeline_parallelism.ipynb).
#
# Decide on an answer before you run the next cell, even if it is a guess. (This page comes with its results. To hide
# them until you get there, choose *Clear Outputs of All Cells* in the *Edit* menu.)
#
# ## 1. Half the bits
#
# A number in PyTorch has 32 bits, unless you say otherwise. With 16, twice as many fit into the same memory and
# through the same cable, and a GPU multiplies them many times as fast. So why not use 16 everywhere?
#
# There are two formats of 16 bits. *Predict:* what do they make of 1.001?

# %%
import torch

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    print(f"{dtype!s:16} 1.001 becomes {torch.tensor(1.001, dtype=dtype).item():.7f}")

# %% [markdown]
# In **bfloat16** the next number after $1$ is {{1 + torch.finfo(torch.bfloat16).eps:.4f}}, and in **float16** it is
# {{1 + torch.finfo(torch.float16).eps:.5f}}. A number has a few bits for its digits and a few for its size, and the two
# formats spend them in different ways:

# %%
print("format      next after 1   smallest   largest")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    smallest = torch.nextafter(torch.tensor(0.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)).item()
    print(f"{str(dtype)[6:]:10} 1 + {info.eps:9.7f}    {smallest:7.0e}   {info.max:7.0e}")

# %% [markdown]
# bfloat16 reaches as far as float32, with two to three digits. float16 has one digit more and ends early: at
# {{torch.finfo(torch.float16).max:.0f}} above, and at $2^{-24}$ below. Keep both flaws in mind, *few digits* and
# *narrow range*. Everything that goes wrong in this lesson comes from one or the other.
#
# How fast are 16 bits on your computer? *Predict* an order, from the fastest format to the slowest:

# %% tags=["nbval-ignore-output"]
from torch.utils.benchmark import Timer

from course_lib import data
from course_lib.model import GPTConfig, TinyGPT

problems, unseen = data.train_test_split()
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs, targets = (tensor.to(device) for tensor in next(data.minibatches(problems, 32)))
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    model = TinyGPT(GPTConfig(hidden=128), dtype=dtype).to(device)
    step = Timer("data.answer_loss(model(inputs).float(), targets).backward()", globals=globals())
    seconds = min(step.timeit(1).mean for _ in range(3))
    print(f"{str(dtype)[6:]:10} {1000 * seconds:6.1f} ms forward and backward on this {device} (measured)")

# %% tags=["build-only"]
from course_lib.planner import models

parameters = models.GPT3["1.3B"].parameters

# %% [markdown]
# On a CPU 16 bits can be faster or many times slower: it depends on whether it has circuits for a format, or must
# imitate it. So these times say something about your CPU, and nothing about the GPUs on which large models are trained.
# These have such circuits, the older ones for float16 alone. Here is what their data sheets say of matrix products, and
# what the planner makes of that for one step of a model with {{parameters / 1e9:.1f}} billion parameters (modelled, as
# we have no such device):

# %%
from course_lib.planner import Cluster, Plan, estimate
from course_lib.planner.models import GPT3

for name in ("V100-32GB", "A100-80GB", "H100-80GB"):
    cluster = Cluster(name, nodes=1, devices_per_node=1)
    peak = [cluster.spec.peak[precision] / 1e12 for precision in ("fp32", "fp16")]
    step = [estimate(GPT3["1.3B"], cluster, Plan(precision=p), 64).step_time.total for p in ("fp32", "fp16")]
    print(f"{name} {peak[0]:5.1f} TFLOP/s in float32, {peak[1]:5.1f} in float16;",
          f"a step: {step[0]:4.1f} s and {step[1]:4.1f} s (modelled)")

# %% tags=["build-only"]
peaks = [Cluster(name).spec.peak for name in ("V100-32GB", "A100-80GB", "H100-80GB")]
faster = [round(peak["fp16"] / peak["fp32"]) for peak in peaks]

# %% [markdown]
# That is {{min(faster):in_words}} to {{max(faster):in_words}} times the peak, and less than that in a step, since not
# everything is a matrix product. (A100 and H100 can also multiply numbers of 32 bits with the digits of float16, a
# format called TF32, half as fast as in 16 bits. Nothing becomes smaller by that.)
#
# ## 2. Long sums
#
# Begin at zero and add one, again and again, in bfloat16. *Predict:* where are you after a thousand times?

# %%
from lessons.L07_mixed_precision.runs import running_sum

for dtype, ones in ((torch.bfloat16, 1000), (torch.float16, 5000), (torch.float32, 5000)):
    print(f"{str(dtype)[6:]:10} {ones} ones add up to {running_sum(0, 1, ones, dtype)[-1]:g}")

# %% tags=["build-only"]
def limit(dtype):
    return 2 / torch.finfo(dtype).eps  # from here on its numbers are 2 apart

# %% [markdown]
# From {{limit(torch.bfloat16):g}} on, bfloat16 has only every second number. ${{limit(torch.bfloat16):g}} + 1$ lies
# halfway between two of them and is rounded to the even one, which is {{limit(torch.bfloat16):g}} again: the sum
# **stalls**. In float16 the same happens at {{limit(torch.float16):g}}. (And in float32 at
# {{limit(torch.float32):thousands}}.)
#
# Training is full of long sums. Gradients are one: a large minibatch is often cut into **micro-batches**, one after
# the other, whose gradients are added up before one update. `backward()` adds to `.grad`, in the dtype of the weight.
# (`MasterWeights` is the subject of section 3. Here it only adds up in 32 bits.) *Predict:* how many of 1000
# micro-batches count?

# %%
from course_lib.mechanisms.mixed_precision import MasterWeights


def accumulate(in_32_bits):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    master = MasterWeights([weight], torch.optim.SGD, lr=1)
    for _ in range(1000):
        weight.sum().backward()  # a gradient of 1
        if in_32_bits:
            master.accumulate()  # add it to a gradient in float32, clear this one
    master.accumulate()
    return master.master_parameters[0].grad.item()

print("added up in 16 bits:", accumulate(in_32_bits=False))
print("added up in 32 bits:", accumulate(in_32_bits=True))

# %% [markdown]
# {{1 - accumulate(in_32_bits=False) / 1000:percent}} of the micro-batches were computed for nothing, and no error said
# so.
#
# Across ranks there is another sum: the all-reduce. Five ranks add up five copies of the same sum,
# $256 + 1 + 1 + 1 + 1$, where rank 0 has the large number. *Predict:* is it 256, 260, or something else?

# %%
from course_lib import launch
from course_lib.mechanisms.collectives import all_reduce_in


def total(rank, accumulate):
    tensor = torch.full((5,), 256.0 if rank == 0 else 1.0)
    return all_reduce_in(torch.bfloat16, accumulate)(tensor).tolist()

for accumulate_in in (torch.bfloat16, torch.float32):
    run = launch(total, world_size=5, args=(accumulate_in,))
    print(f"{str(accumulate_in)[6:]:9}: {run.results[0]}, {run.timeline.bytes_sent(0)} bytes sent")

# %% [markdown]
# The ring adds in bfloat16 at every hop. It starts each of the five numbers on another rank, so the 256 comes first in
# one sum, last in another, and the same sum comes out differently. Where the 256 comes first or second, all ones after
# it are lost. Where it comes last, the ones have added up to 4, and 256 + 4 is 260. (The other two get to 260 by luck:
# on their way they come to 259, which lies halfway between 258 and 260, and 260 is the even one.) In the second line
# the numbers *travel* in 16 bits all the same, and are *added* in 32 bits by one rank, which rounds once. That costs
# not a byte more.
#
# ## 3. From step to step
#
# ### Question: fast, and then it ends badly
#
# Each option trains on real ranks, with everything else left as it is.

# %%
from lessons import Card

Card("Q9")

# %% [markdown]
# *Predict:* a model in bfloat16 takes one step with a learning rate of 0.00001. What share of its weights is changed?

# %%
from functools import partial
from itertools import islice

from course_lib.classroom.runs.training import train
from lessons.L07_mixed_precision.runs import share_moved

small = GPTConfig(layers=1, hidden=32, heads=2)
torch.set_num_threads(1)  # so small a model is no faster with more

def moved(lr, dtype):
    model = TinyGPT(small, dtype=dtype)
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    train(model, islice(data.minibatches(problems, 64), 1), data.answer_loss, optimizer)
    return share_moved(before, model.parameters())

# %% tags=["nbval-ignore-output"]
for lr in (1e-2, 1e-3, 1e-4, 1e-5):
    print(f"learning rate {lr:7}: {moved(lr, torch.bfloat16):4.0%} of the weights move in bfloat16,",
          f"{moved(lr, torch.float32):.0%} in float32")

# %% [markdown]
# An update is a sum too: a weight, plus something small. What is below half of the weight's last digit rounds away. The
# smaller the learning rate, the fewer weights are left that still learn, and every schedule ends with a small learning
# rate.
#
# The remedy is to keep two copies. The model computes with weights of 16 bits. The optimizer works on **master
# weights** of 32 bits, where small updates add up, and after each step the model gets them, rounded:

# %%
def losses(dtype, has_master_weights, steps=300, lr=1e-5):
    model = TinyGPT(small, dtype=dtype)
    make = partial(torch.optim.AdamW, lr=lr)
    optimizer = MasterWeights(model.parameters(), make) if has_master_weights else make(model.parameters())
    return train(model, islice(data.minibatches(problems, 64), steps), data.answer_loss, optimizer)

# %%
bfloat16_master = "bfloat16 with master weights"
curves = {
    "float32": losses(torch.float32, False),
    "bfloat16": losses(torch.bfloat16, False),
    bfloat16_master: losses(torch.bfloat16, True),
}

# %% tags=["nbval-ignore-output"]
from course_lib.figures import loss_curves

loss_curves(curves, title="The same training, three times")

# %%
from course_lib.figures import loss_at_end

progress = {name: curve[0] - loss_at_end(curve) for name, curve in curves.items()}
print("bfloat16 alone gets less than a quarter as far:", progress["bfloat16"] < progress["float32"] / 4)
print("with master weights it is like float32:", abs(progress[bfloat16_master] / progress["float32"] - 1) < 0.05)

# %% [markdown]
# (You see two lines where there are three: the one with master weights lies on that of float32.)
#
# Each step of that training was right, and most of it was forgotten at once. An error in a product or in one gradient
# is small, different in every step, and gone with it. The weights are the one thing that lives through all steps: what
# is rounded away there is lost for good, and more is lost the smaller the updates become. The rule of thumb: *compute
# and send in 16 bits, remember and add up in 32.*
#
# This is `step` of `MasterWeights`, but for the loss scale, which comes next:
#
# ```python
# for parameter, master in zip(model_parameters, master_parameters):
#     master.grad = parameter.grad.to(torch.float32)
# optimizer.step()                      # an optimizer over the masters
# for parameter, master in zip(model_parameters, master_parameters):
#     parameter.copy_(master)           # rounds
# ```
#
# ### Question: what is kept in 32 bits costs memory
#
# Commit to a number, with its unit. Then it is counted.

# %%
Card("bytes_per_weight")

# %% [markdown]
# Then there is all that is not kept for each weight: the gradients on their way to other ranks, and the activations,
# which are most of the memory in a long sequence or a large batch. *Predict:* how much smaller are the activations?

# %%
from course_lib.instruments.ledger import Ledger

inputs, targets = next(data.minibatches(problems, 64))
for dtype in (torch.float32, torch.bfloat16):
    model = TinyGPT(small, dtype=dtype)
    with Ledger(model) as ledger:
        data.answer_loss(model(inputs).float(), targets).backward()
    print(f"{str(dtype)[6:]:9} {max(sample.held.activations for sample in ledger.samples):9,} bytes of activations")

# %% tags=["build-only"]
from course_lib.planner import memory

of_16_bits, of_32_bits = memory.recipe(Plan()), memory.recipe(Plan(fp32_gradients=True))

# %% [markdown]
# Half, but for the few that are in 32 bits in both: the logits and their loss. (The masters need not be whole on each
# rank: that is one of the things that sharded data parallelism cuts up.)
#
# For what is kept for each weight, you will read three different numbers. They differ in the gradients:
# {{of_16_bits.gradient}} bytes in 16 bits make **{{sum(of_16_bits)}}**; {{of_32_bits.gradient}} bytes in 32 bits, in
# which micro-batches are added up, make **{{sum(of_32_bits)}}**; and both side by side, as here while micro-batches are
# being added up, make **{{sum(of_16_bits) + of_32_bits.gradient}}**. This course says {{sum(of_16_bits)}} unless it
# says more.
#
# ## 4. Small gradients
#
# In a large training run, the loss is the mean over a minibatch of millions of tokens, so each token's part in the
# gradient is divided by millions. Ours has few tokens; but let us say that it is one of $2^{16}$ micro-batches of a
# large minibatch, and divide its loss accordingly. In float32, that changes nothing. In float16 everything below
# $2^{-25}$ is zero. *Predict:* how much of the gradient is lost?

# %%
from lessons.L07_mixed_precision.runs import share_vanishing

MICRO_BATCHES = 2**16

def gradients(dtype, scale):
    model = TinyGPT(small, dtype=dtype)
    inputs, targets = next(data.minibatches(problems, 64))
    loss = data.answer_loss(model(inputs).float(), targets) / MICRO_BATCHES
    (scale * loss).backward()
    return [weight.grad for weight in model.parameters()]

def zeros(gradients):
    return sum((gradient == 0).sum().item() for gradient in gradients) / sum(map(torch.numel, gradients))

# %% tags=["nbval-ignore-output"]
exact = gradients(torch.float32, scale=1)
print(f"of the finished gradient, float16 would lose {share_vanishing(exact, torch.float16):.0%}")
print(f"of a backward pass in float16, {zeros(gradients(torch.float16, scale=1)):.0%} are zeros")

# %% [markdown]
# More is lost on the way than at its end: what vanishes in the last layer is missing in all layers before it. Here is
# how large the numbers of the finished gradient are, and what float16 would make of them:

# %% tags=["nbval-ignore-output"]
from lessons.L07_mixed_precision.figure import number_range
from lessons.L07_mixed_precision.runs import Format, exponents

float16 = Format.of(torch.float16)
number_range(exponents(exact), float16, title="How large are the gradients?")

# %% [markdown]
# The gradients are not too different from each other for float16. They just lie too low, and above them is a lot of
# room: it ends at $2^{16}$. *Predict:* what happens if you multiply the loss by {{MICRO_BATCHES:,}}, and divide the
# gradients by it once they are in float32?

# %% tags=["nbval-ignore-output"]
scaled = gradients(torch.float32, scale=2**16)
print(f"of the finished gradient, float16 now loses {share_vanishing(scaled, torch.float16):.1%}")
number_range(exponents(scaled), float16, title="With the loss multiplied by 65,536")

# %% [markdown]
# This is **loss scaling**. Every gradient is proportional to the loss, so one multiplication moves them all, and a
# power of two changes no digit of them. Does it matter for learning? Here is the same training in float32, and in
# float16 without and with what you now know.

# %%
from course_lib.mechanisms.mixed_precision import LossScaler


def micro_batch_loss(logits, targets):
    return data.answer_loss(logits, targets) / MICRO_BATCHES

def losses_of_micro_batches(dtype, has_master_weights, scaler=None, steps=150):
    model = TinyGPT(small, dtype=dtype)
    make = partial(torch.optim.AdamW, lr=3e-3, eps=1e-15)
    optimizer = MasterWeights(model.parameters(), make, scaler) if has_master_weights else make(model.parameters())
    curve = train(model, islice(data.minibatches(problems, 64), steps), micro_batch_loss, optimizer, scaler)
    return [loss * MICRO_BATCHES for loss in curve]

# %%
everything = "float16, master weights and scaling"
curves = {
    "float32": losses_of_micro_batches(torch.float32, False),
    "float16": losses_of_micro_batches(torch.float16, False),
    "float16, master weights": losses_of_micro_batches(torch.float16, True),
    everything: losses_of_micro_batches(torch.float16, True, LossScaler(2.0**16)),
}

# %% tags=["nbval-ignore-output"]
loss_curves(curves, title="One ingredient after the other")

# %%
progress = {name: curve[0] - loss_at_end(curve) for name, curve in curves.items()}
print("float16 alone: its loss is", curves["float16"][-1], "after", len(curves["float16"]) - 1, "step")
print("master weights, no scaling: less than a quarter as far:",
      progress["float16, master weights"] < progress["float32"] / 4)
print("master weights and scaling: like float32:", abs(progress[everything] / progress["float32"] - 1) < 0.05)

# %% [markdown]
# float16 alone ends at once: AdamW divides by the root of a mean of squares of gradients, and squares vanish first. Its
# first step is $0 / 0$. With master weights the squares are taken in 32 bits, but of gradients most of which are zero.
# It takes both. (Then the line lies on that of float32 again.)
#
# ## 5. How large a scale?
#
# Too small, and gradients vanish. Too large, and they overflow: above {{torch.finfo(torch.float16).max:.0f}} there is
# only `inf`, and one `inf` in a weight is the end. A **dynamic** scale looks for the edge by itself. If any gradient is
# `inf` or `nan`, this step is skipped and the scale halved; after so many good steps in a row it is doubled. *Predict:*
# the scale begins at $2^{30}$. How does it go on?

# %%
def trajectory(scale, steps):
    model = TinyGPT(small, dtype=torch.float16)
    scaler = LossScaler(scale, growth_interval=5)
    master = MasterWeights(model.parameters(), torch.optim.AdamW, scaler, lr=1e-3)
    line = []
    for inputs, targets in islice(data.minibatches(problems, 64), steps):
        used = scaler.scale_factor
        scaler.scale(data.answer_loss(model(inputs).float(), targets)).backward()
        line.append((used, master.step()))
    return line

# %% tags=["nbval-ignore-output"]
import math

for used, is_taken in trajectory(scale=2.0**30, steps=40):
    print(f"2^{math.log2(used):.0f}{'' if is_taken else ' skipped'}", end=", ")

# %% [markdown]
# It falls until nothing overflows. After five good steps in a row it is doubled again; where that goes over the edge,
# a step is skipped, and it is halved. (Real runs wait for {{torch.amp.GradScaler("cpu").get_growth_interval()}} steps
# before they try.) On one rank, `torch.amp.GradScaler` does exactly the same, number for number.
#
# ### Question: an overflow on one rank
#
# Each option is tried by four replicas, which begin equal and compute the same.

# %%
Card("one_overflow")

# %% [markdown]
# ## 6. Turn the knobs
#
# Now mix it yourself. Every move begins a real training, like the one in section 4. You see the curve of its loss as it
# goes on, beside the same training in float32. Move on whenever you have seen enough: the old run ends where it is, and
# a new one begins. Above it are the gradients of the first step, where the loss scale has put them. Try these:
#
# 1. It begins with float16, which learns nothing. Which is the smallest loss scale that helps? What happens at the
#    largest?
# 2. Choose the dynamic scale, and watch the gradients. Where do they come to rest?
# 3. bfloat16, no loss scale, and no master copy. Is it any good at a learning rate of 0.003? And at 0.00001?
# 4. Take the master copy away in float16, with the best loss scale. Why does the scale not help?
# 5. Is there anything that a loss scale changes in bfloat16 or float32?

# %% tags=["nbval-ignore-output"]
from lessons.L07_mixed_precision.explorer import MixedPrecisionExplorer

MixedPrecisionExplorer()

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. 2⁸ is enough, and then it learns as well as float32. At 2⁴⁰ gradients overflow in every step, so every step is
#    skipped.
# 2. It comes down from 2⁴⁰, at the price of a few skipped steps. The largest gradients come to rest near the upper end
#    of what float16 can hold.
# 3. At 0.003 it is as good as float32, and at 0.00001 it hardly learns.
# 4. The gradients are divided by the scale before they are squared, and squares vanish in float16. After one step the
#    loss is not a number.
# 5. No, not a digit.
# </details>
#
# The third one is treacherous. With a large learning rate bfloat16 alone looks fine, and learning rates fall
# as a training goes on.
#
# ## 7. All of it, on four ranks
#
# Now the whole recipe: a model in float16, gradients averaged in float16, master weights and a dynamic scale.
# *Predict:* how many bytes does each of four ranks send in two hundred steps, compared with float32?

# %%
from course_lib.classroom.runs.training import shares
from course_lib.mechanisms.data_parallel import DataParallel


def whole_training(rank, dtype):
    replica, scaler = DataParallel(TinyGPT(small, seed=rank, dtype=dtype)), LossScaler()
    master = MasterWeights(replica.parameters(), torch.optim.AdamW, scaler, lr=3e-3)  # once the replicas are equal
    curve, skipped = [], 0
    for inputs, targets in shares(rank, samples=64, steps=200):
        loss = data.answer_loss(replica(inputs).float(), targets)
        curve.append(loss.item())
        scaler.scale(loss).backward()
        replica.finish()
        skipped += not master.step()
    return curve[0] - loss_at_end(curve), skipped

# %%
runs = {dtype: launch(whole_training, world_size=4, args=(dtype,)) for dtype in (torch.float32, torch.float16)}
for dtype, run in runs.items():
    print(f"{str(dtype)[6:]}: {run.timeline.bytes_sent(0):,} bytes sent")

# %%
in_32, in_16 = (run.results for run in runs.values())
print("all ranks skipped the same number of steps:", len({skipped for _, skipped in in_16}) == 1)
print("as far as float32:", abs(in_16[0][0] / in_32[0][0] - 1) < 0.1)

# %% [markdown]
# Half the bytes, and just as good. (What is not halved are the few bytes that count samples and ask for overflows.)
#
# ## 8. Three cases
#
# Answer in a few sentences, as you would to a colleague. Then a run shows you how it is, and you compare with a good
# answer, point by point. The last two ask for what you know of
# [pipelines](05_pipeline_parallelism.ipynb) and of [data parallelism](02_data_parallelism.ipynb) as well.

# %%
Card("why_mixed_precision")

# %%
Card("diagnose_efficiency")

# %%
Card("optimize_training")

# %% [markdown]
# ## 9. The same in PyTorch
#
# `torch.autocast` computes in 16 bits what is safe there, while the model keeps its weights in 32 bits: they are their
# own masters. `torch.amp.GradScaler` is the dynamic loss scale. Here each of four ranks trains an MLP of its own, first
# with what you know from this lesson. Rank 3 has much larger inputs, so that its gradients overflow earlier than those
# of the others:

# %%
import torch.nn.functional as F

from course_lib.model import MLP


def own_data(rank):
    torch.manual_seed(rank)
    return torch.randn(20, 2, 64, small.hidden) * (8 if rank == 3 else 1)

def ours(rank):
    torch.manual_seed(0)
    mlp, scaler = MLP(small).to(torch.float16), LossScaler(2.0**16, growth_interval=5)
    master = MasterWeights(mlp.parameters(), torch.optim.AdamW, scaler, lr=1e-3)
    train(mlp, own_data(rank).to(torch.float16), F.mse_loss, master, scaler)
    return scaler.scale_factor, [weight.detach() for weight in master.master_parameters]

# %%
def step(mlp, x, y, optimizer, scaler):
    with torch.autocast("cpu", dtype=torch.float16):
        output = mlp(x)
    scaler.scale(F.mse_loss(output.float(), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

# %%
def in_pytorch(rank, make_scaler):
    torch.manual_seed(0)
    mlp = MLP(small).to(torch.float16).float()  # ours have begun with rounded weights, too
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    scaler = make_scaler(device="cpu", init_scale=2.0**16, growth_interval=5)
    for x, y in own_data(rank).to(torch.float16):
        step(mlp, x, y, optimizer, scaler)
    return scaler.get_scale(), [weight.detach() for weight in mlp.parameters()]

# %%
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def compare(run, others):
    is_equal = [all(map(torch.equal, own[1], other[1])) for own, other in zip(run, others, strict=True)]
    scales = ", ".join(f"2^{math.log2(scale):g}" for scale, _ in run)
    return f"loss scales {scales}; our weights on {sum(is_equal)} of {len(run)} ranks"

by_hand = launch(ours, world_size=4).results
print("ours             ", compare(by_hand, by_hand))
for scaler in (torch.amp.GradScaler, ShardedGradScaler):
    print(f"{scaler.__name__:17}", compare(launch(in_pytorch, world_size=4, args=(scaler,)).results, by_hand))

# %% [markdown]
# With `ShardedGradScaler` the ranks end with our scale and, to the last bit, with our weights. `GradScaler` asks no
# other rank: where rank 3 skips, the others go on, and soon they have another scale.
#
# Under `torchrun --nproc-per-node 4` the same functions run after `dist.init_process_group()`. What PyTorch does
# differently:
#
# - Autocast rounds a weight when a pass first needs it, and keeps the copy until the `with` ends. `MasterWeights`
#   rounds once after each step. With autocast there is no model in 16 bits, so gradients have 32 bits in the end, and
#   these are what DistributedDataParallel sends.
# - Autocast chooses by operation. Matrix products take 16 bits, and a sum of numbers of 16 and of 32 bits takes 32. So
#   in a whole model what goes from block to block has 32 bits, where ours has 16 bits everywhere.
# - On a CPU autocast takes bfloat16, on a GPU float16, unless you name another format.
#
# The files to read are `torch/amp/autocast_mode.py` and `torch/amp/grad_scaler.py`, from `unscale_` to `update`; and
# `torch/distributed/fsdp/sharded_grad_scaler.py` for the all-reduce in between.
#
# ## What you know now
#
# - Compute and send in 16 bits; remember and add up in 32.
# - Three things go wrong in 16 bits: a long sum stalls, a small update rounds away, a small gradient becomes zero.
#   32-bit sums, master weights and loss scaling put them right.
# - bfloat16 has the range of float32 and needs no loss scaling. float16 has more digits and needs it.
# - When a gradient overflows, all ranks skip the step, or they are no longer training the same model.
#
# ### When it stops being true
#
# - **On hardware without 16-bit circuits** nothing is faster; messages and activations still become smaller.
# - **Where a layer needs its digits** (norms, softmax, the loss), the layer itself adds up in 32 bits inside, or should
#   be left in 32 bits altogether. `torch.autocast` keeps a list of such layers.
# - **Below 16 bits** one scale for all is not enough: with 8 bits, every tensor or block of one gets its own.
#
# ### Further reading
#
# - Micikevicius et al. 2018, *Mixed Precision Training*, ICLR: master weights, loss scaling, sums in 32 bits.
# - Kalamkar et al. 2019, *A Study of BFLOAT16 for Deep Learning Training*, arXiv:1905.12322.
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC20: the 16 bytes
#   for each weight, and how to shard them.
#
# **Next:** the [exercise](../exercises/07_mixed_precision/07_mixed_precision.ipynb), in which you write the loss scale,
# the masters and the sums; or [combining mechanisms](08_combining_mechanisms.ipynb).
