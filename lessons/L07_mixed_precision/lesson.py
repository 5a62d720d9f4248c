# %% [markdown]
# # Mixed precision
#
# **What you do:** train in 16 bits, watch it go wrong in three different ways, put each of them right, and go on
# to fewer bits.<br>
# **Afterwards you can:** tell from a run what its few bits do to it, say which numbers need all their bits, and
# choose a format.<br>
# **Time:** 60 minutes, and 20 more for the three cases in section 8.<br>
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
# There are two formats of 16 bits. *Predict:* what does each make of 1.001?

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
# {{torch.finfo(torch.float16).max:.0f}} above, and at $2^{-24}$ below. So one has *few digits* and the other a *narrow
# range*, and everything that goes wrong in this lesson comes from one or the other. Large language models are trained
# in bfloat16 today. So we begin with it, and float16 comes later.
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
# not a byte more. Here is how they add up; then each finished sum goes
# to all ranks:

# %%
import inspect

from course_lib.mechanisms import collectives

print(inspect.getsource(collectives._add_own_chunk))

# %% [markdown]
# ## 3. From step to step
#
# ### Question: fast, and then it ends badly
#
# Each option trains on real ranks, with everything else left as it is.

# %%
from lessons import Card

Card("Q9")

# %% [markdown]
# Here is a training loop, which we use from now on. The model computes in its own format; the loss, a mean over many
# numbers, is in 32 bits in every case.

# %%
import math
from functools import partial
from itertools import islice

small = GPTConfig(layers=1, hidden=32, heads=2)
torch.set_num_threads(1)  # so small a model is no faster with more

def training(model, optimizer, steps, divide_by=1, scaler=None):
    losses = []
    for inputs, targets in islice(data.minibatches(problems, 64), steps):
        loss = data.answer_loss(model(inputs).float(), targets) / divide_by
        losses.append(divide_by * loss.item())
        if not math.isfinite(losses[-1]):
            break
        (scaler.scale(loss) if scaler else loss).backward()  # you meet the scaler in section 5
        optimizer.step()
        optimizer.zero_grad()
    return losses

# %% [markdown]
# *Predict:* a model in bfloat16 takes one step with a learning rate of 0.00001. What share of its weights is changed?

# %%
from lessons.L07_mixed_precision.runs import share_moved


def moved(lr, dtype):
    model = TinyGPT(small, dtype=dtype)
    before = [weight.detach().clone() for weight in model.parameters()]
    training(model, torch.optim.AdamW(model.parameters(), lr=lr), steps=1)
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
# weights** of 32 bits, where small updates add up, and after each step the model gets them, rounded. This is `step` of
# `MasterWeights`, except for the loss scale:
#
# ```python
# for parameter, master in zip(model_parameters, master_parameters):
#     master.grad = parameter.grad.to(torch.float32)
# optimizer.step()                      # an optimizer over the masters
# for parameter, master in zip(model_parameters, master_parameters):
#     parameter.copy_(master)           # rounds
# ```

# %%
def losses(dtype, has_master_weights, steps=300, lr=1e-5):
    model = TinyGPT(small, dtype=dtype)
    make = partial(torch.optim.AdamW, lr=lr)
    optimizer = MasterWeights(model.parameters(), make) if has_master_weights else make(model.parameters())
    return training(model, optimizer, steps)

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
# ### Question: what is kept in 32 bits costs memory
#
# Commit to a number, with its unit. Then it is counted.

# %%
Card("bytes_per_weight")

# %% tags=["build-only"]
from course_lib.planner import memory

of_16_bits, of_32_bits = memory.recipe(Plan()), memory.recipe(Plan(fp32_gradients=True))

# %% [markdown]
# You will read three different numbers for that, and they differ in the gradients: {{of_16_bits.gradient}} bytes in 16
# bits make **{{sum(of_16_bits)}}** in all; {{of_32_bits.gradient}} bytes in 32 bits make **{{sum(of_32_bits)}}**; and
# both side by side make **{{sum(of_16_bits) + of_32_bits.gradient}}**. This course says {{sum(of_16_bits)}} unless it
# says more. (The masters need not be whole on each rank: that is one of the things that sharded data parallelism cuts
# up.)
#
# ## 4. All of it, on four ranks
#
# Now the whole recipe of today: a model in bfloat16, gradients averaged in bfloat16, and master weights. *Predict:* how
# many bytes does each of four ranks send in two hundred steps, compared with float32? And how well does it learn?

# %%
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import DataParallel


def whole_training(rank, dtype):
    replica = DataParallel(TinyGPT(small, seed=rank, dtype=dtype))
    master = MasterWeights(replica.parameters(), torch.optim.AdamW, lr=3e-3)  # once the replicas are equal
    curve = []
    for minibatch in islice(data.minibatches(problems, 64), 200):
        inputs, targets = batches.split(minibatch, 4)[rank]
        loss = data.answer_loss(replica(inputs).float(), targets)
        curve.append(loss.item())
        loss.backward()
        replica.finish()
        master.step()
    return curve[0] - loss_at_end(curve)

# %%
runs = {dtype: launch(whole_training, world_size=4, args=(dtype,)) for dtype in (torch.float32, torch.bfloat16)}
for dtype, run in runs.items():
    print(f"{str(dtype)[6:]}: {run.timeline.bytes_sent(0):,} bytes sent")
in_32, in_16 = (run.results[0] for run in runs.values())
print("as far as float32:", abs(in_16 / in_32 - 1) < 0.1)

# %% [markdown]
# Half the bytes, and it learns as well. (What is not halved are the few bytes that count samples.) But do not expect it
# to be faster here: a small model waits for Python most of the time, your CPU does with 16 bits what you have measured
# in section 1, and ranks in one computer have no slow cable between them. On a GPU it saves time, too. We measured one
# step of the course's own model on an H200 (98 million parameters in 12 layers, 16 sequences of 512 tokens; PyTorch
# 2.11; `benchmarks/mixed_precision.py` repeats it on yours): 117.6 ms and 6.4 GiB in float32, 31.2 ms and 4.4 GiB in
# bfloat16 with master weights. `torch.autocast` took 32.4 ms and 5.1 GiB: its weights stay in 32 bits.
#
# ## 5. float16, and its narrow range
#
# GPUs older than the A100 have circuits for float16 alone. It has more digits than bfloat16, but everything below
# $2^{-25}$ is zero, and the gradients of single activations are small numbers: a token's part in the loss is divided by
# the number of tokens. How small depends on *whose* tokens these are. In DistributedDataParallel each rank divides by
# its own, and the mean over ranks is taken of finished gradients. torchtitan, which trains in bfloat16, divides
# before the backward pass, by the tokens of the whole minibatch, `global_valid_tokens` in its `trainer.py`, as ranks
# may have different numbers of them.

# %% tags=["build-only"]
(_, targets), MICRO_BATCHES = next(data.minibatches(problems, 64)), 2**16
tokens = int((targets != data.NO_LOSS).sum())

# %% [markdown]
# Ours has {{tokens}} tokens in a minibatch. Let us say that it is one of $2^{16}$ micro-batches of a large minibatch,
# which then has {{tokens * MICRO_BATCHES / 1e6:.0f}} million tokens, and divide its loss in both ways. *Predict:* in
# which of the two does float16 lose gradients?

# %%
MICRO_BATCHES = 2**16

def gradients(dtype, divide_by=1, scale=1.0):
    model = TinyGPT(small, dtype=dtype)
    inputs, targets = next(data.minibatches(problems, 64))
    loss = data.answer_loss(model(inputs).float(), targets) / divide_by
    (scale * loss).backward()
    return [weight.grad for weight in model.parameters()]

def zeros(gradients):
    return sum((gradient == 0).sum().item() for gradient in gradients) / sum(map(torch.numel, gradients))

# %% tags=["nbval-ignore-output"]
for words, divide_by in (("its own tokens", 1), ("the tokens of the minibatch", MICRO_BATCHES)):
    print(f"divided by {words:27}: {zeros(gradients(torch.float16, divide_by)):4.0%} zeros after a pass in float16,",
          f"{zeros(gradients(torch.float32, divide_by)):.0%} in float32")

# %% [markdown]
# Here is how large the numbers of the second gradient are in float32, and what float16 would make of them. In its own
# backward pass it loses even more: what vanishes in the last layer is missing from all layers before it.

# %% tags=["nbval-ignore-output"]
from lessons.L07_mixed_precision.figure import number_range
from lessons.L07_mixed_precision.runs import Format, exponents

exact = gradients(torch.float32, MICRO_BATCHES)
number_range(exponents(exact), Format.of(torch.float16), title="How large are the gradients?")

# %% [markdown]
# They are not too different from each other for float16. They just lie too low, and above them is a lot of room: it
# ends at $2^{16}$. So multiply the loss by {{MICRO_BATCHES:,}}, and divide the gradients by it once they are in
# float32. This is **loss scaling**. Every gradient is proportional to the loss, so one multiplication moves them all,
# and a power of two changes no digit of them. *Predict* which of these trainings needs it:

# %%
from course_lib.mechanisms.mixed_precision import LossScaler


def losses_in(dtype, divide_by=1, scale=1.0):
    model, scaler = TinyGPT(small, dtype=dtype), LossScaler(scale)
    eps = 1e-8 / divide_by  # AdamW adds it to the gradients' size, so it has to be divided like them
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, scaler, lr=3e-3, eps=eps)
    return training(model, optimizer, 150, divide_by, scaler)

# %%
curves = {
    "float32": losses_in(torch.float32),
    "float16, its own tokens": losses_in(torch.float16),
    "float16, all tokens": losses_in(torch.float16, MICRO_BATCHES),
    "float16, all tokens, scaled": losses_in(torch.float16, MICRO_BATCHES, scale=2.0**16),
}

# %% tags=["nbval-ignore-output"]
loss_curves(curves, title="Who needs a loss scale?")

# %%
progress = {name: curve[0] - loss_at_end(curve) for name, curve in curves.items()}
for name in list(curves)[1:]:
    share = progress[name] / progress["float32"]
    print(f"{name:27}: {'as far as float32' if abs(share - 1) < 0.05 else 'nowhere' if share < 0.05 else share}")

# %% [markdown]
# So a loss scale is not always needed: divided by its own tokens, our model trains in float16 as in float32. The same
# is true elsewhere. Micikevicius et al. (2018) needed none for their image classifiers (section 4.1). Their object
# detector diverged without one: its activation gradients between $2^{-27}$ and $2^{-24}$ mattered, the smaller ones did
# not, and a scale of 8 was enough (section 3.2 and figure 3). Their language model, an LSTM, learned well without one
# for 300,000 steps and then diverged; a scale of 128 prevented that (section 4.5). Nobody knows beforehand. So in
# float16 one always scales, and lets the scale find its size.
#
# ### How large a scale?
#
# Too small, and gradients vanish. Too large, and they overflow: above {{torch.finfo(torch.float16).max:.0f}} there is
# only `inf`, and one `inf` in a weight is the end. So a **dynamic** scale looks for the edge, and an update whose
# gradients are `inf` or `nan` is skipped. This is how the scale adapts after each step:

# %%
print(inspect.getsource(LossScaler._adapt))

# %% [markdown]
# *Predict:* with a growth interval of 5, the scale begins at $2^{30}$. How does it go on?

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
for used, is_taken in trajectory(scale=2.0**30, steps=40):
    print(f"2^{math.log2(used):.0f}{'' if is_taken else ' skipped'}", end=", ")

# %% [markdown]
# It falls until nothing overflows. After five good steps in a row it is doubled again; where that goes over the edge,
# a step is skipped, and it is halved. (Real runs wait for {{torch.amp.GradScaler("cpu").get_growth_interval()}} steps
# before they try.)
#
# ### Question: an overflow in one place
#
# Each option is run by four ranks, and compared with one process that has the whole batch.

# %%
Card("one_overflow")

# %% [markdown]
# ## 6. Turn the knobs
#
# Now mix it yourself. Every move begins a real training, like those in section 5. You see the curve of its loss as it
# goes on, beside the same training in float32. Move on whenever you have seen enough: the old run ends where it is, and
# a new one begins. Above it are the gradients of the first step, where the loss scale has put them. Try these:
#
# 1. It begins with float16, and a loss that is divided by all tokens of a large minibatch. Which is the smallest loss
#    scale that helps? What happens at the largest? And which is needed if the loss is divided by its own tokens?
# 2. Choose the dynamic scale, and watch the gradients. Where do they come to rest?
# 3. bfloat16, no loss scale, and no master copy. Is it any good at a learning rate of 0.003? And at 0.00001?
# 4. Take the master copy away in float16, with the best loss scale. Why does the scale not help?

# %% tags=["nbval-ignore-output"]
from lessons.L07_mixed_precision.explorer import MixedPrecisionExplorer

MixedPrecisionExplorer()

# %% tags=["build-only"]
h100 = Cluster("H100-80GB").spec.peak

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. The smallest one on the slider that moves nearly all gradients into the range is enough. At 2⁴⁰ gradients overflow
#    in every step, so every step is skipped. Divided by its own tokens, the loss needs no scale.
# 2. It comes down from 2⁴⁰, at the price of a few skipped steps. The largest gradients come to rest near the upper end
#    of what float16 can hold.
# 3. At 0.003 it is as good as float32, and at 0.00001 it hardly learns. This is treacherous: learning rates fall as a
#    training goes on.
# 4. The gradients are divided by the scale before they are squared, and squares vanish in float16, as does AdamW's
#    `eps`. After one step the loss is not a number.
# </details>
#
# ## 7. Eight bits, and four
#
# An H100 has {{round(h100["fp8"] / h100["fp16"]):in_words}} times the peak with numbers of 8 bits that it has with 16
# bits, and the newest GPUs are faster again with 4 bits. There are few such numbers. **E4M3** has 4 bits for the size
# and 3 bits for the digits, and ends at {{torch.finfo(torch.float8_e4m3fn).max:.0f}}. **E2M1** has 4 bits in all:

# %%
from lessons.L07_mixed_precision.few_bits import E2M1, E4M3, FP4, FP8, FP8_BLOCKS, MXFP8, NVFP4, rounded

numbers = 10 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
print("all of E2M1, and the same below zero:", rounded(numbers, E2M1).abs().unique().tolist())
print("E4M3 is PyTorch's:", torch.equal(rounded(numbers, E4M3), numbers.to(torch.float8_e4m3fn).float()))

# %% [markdown]
# No CPU multiplies such numbers, so we emulate them: each number is rounded to the format, and kept in float32. (The
# second line compares our rounding with PyTorch's.) With so narrow a range, one loss scale for everything is not
# enough. Each tensor gets a scale of its own, or each **block** of a few numbers, so that the largest one just fits:
#
# ```python
# scale = blocks.abs().amax(1, keepdim=True) / 448     # 6 for E2M1
# result = rounded(blocks / scale) * scale
# ```
#
# Large language models have outliers: a few activations are up to 100,000 times as large as the others (Sun et al.
# 2024). Now let one number in a matrix of {{256 * 256:thousands}} be an outlier. *Predict:* how far off are all the
# other rows, with one scale for the tensor and with one for each block?

# %%
formats = {
    "FP8, one scale": FP8,
    "FP8, blocks of 128": FP8_BLOCKS,  # DeepSeek-V3's activations
    "MXFP8, blocks of 32": MXFP8,      # a power of two as scale
    "FP4, one scale": FP4,
    "NVFP4, blocks of 16": NVFP4,      # an E4M3 number as scale, and one in float32 for the tensor
}

def error(low, outlier):
    numbers = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    numbers[0, 0] = outlier
    return ((low(numbers) - numbers)[1:].norm() / numbers[1:].norm()).item()

print(" " * 21, "outlier of 1   of 100   of 100,000")
for name, low in formats.items():
    print(f"{name:21} {error(low, 1):12.1%} {error(low, 100):8.1%} {error(low, 100_000):12.1%}")

# %% [markdown]
# An outlier takes the range away from all that share its scale. In FP8 there is enough of it for a factor of a hundred,
# but not for a hundred thousand. In FP4 nothing is left at all. In blocks the outlier harms only its own block.
#
# Does it matter for learning? Our model is too small to grow outliers of its own, so it gets a channel a hundred times
# as large as the others, and the layers that read it have weights a hundred times smaller: the same function. Inputs
# and outputs of every matrix product of every layer are rounded, forward and backward. Embedding, head, norms, softmax,
# sums, and the master weights stay in float32. *Predict:* which follow float32?

# %%
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, low):
        ctx.low = low
        ctx.save_for_backward(x, weight)
        return low(x) @ low(weight).T

    @staticmethod
    def backward(ctx, gradient):  # blocks lie along the dimension that is summed over, hence the .T
        (x, weight), low = ctx.saved_tensors, ctx.low
        return low(gradient) @ low(weight.T).T, low(gradient.T) @ low(x.T).T, None

def linear(layer, low, x):
    return Product.apply(x.flatten(0, -2), layer.weight, low).view(*x.shape[:-1], -1) + layer.bias

def quantize(model, low):
    for layer in model.blocks[1:-1].modules():  # between embedding and head
        if isinstance(layer, torch.nn.Linear):
            layer.forward = partial(linear, layer, low)

# %%
@torch.no_grad()
def grow_outlier(model, factor=100):
    for layer in model.blocks[1:-1]:
        layer.attention_norm.weight[0] *= factor
        layer.mlp_norm.weight[0] *= factor
        for reader in (layer.attention.query, layer.attention.key, layer.attention.value, layer.mlp.up):
            reader.weight[:, 0] /= factor

def losses_with(low, steps=100):
    model = TinyGPT(small)
    grow_outlier(model)
    if low:
        quantize(model, low)
    return training(model, torch.optim.AdamW(model.parameters(), lr=3e-3), steps)

# %%
tried = [name for name in formats if "128" not in name]  # our rows have only 32 numbers
curves = {"float32": losses_with(None), **{name: losses_with(formats[name]) for name in tried}}

# %% tags=["nbval-ignore-output"]
drawn = {name: curve for name, curve in curves.items() if "MXFP8" not in name}  # it lies on FP8's
loss_curves(drawn, title="Matrix products, rounded to 8 bits and to 4")

# %% tags=["nbval-ignore-output"]
start = curves["float32"][0]
for name, curve in curves.items():
    share = (start - loss_at_end(curve)) / (start - loss_at_end(curves["float32"]))
    print(f"{name:21} {share:4.0%} of the way of float32")

# %% [markdown]
# In 8 bits both follow float32. In 4 bits one scale falls far behind, and blocks come most of the way.
#
# The rule of thumb holds all the more. Without masters, with weights kept in MXFP8 from step to step, this is the share
# of them that one step moves:

# %%
def moved_in(low, lr):
    model = TinyGPT(small)
    kept = [weight for weight in model.blocks[1:-1].parameters() if weight.dim() > 1]
    before = [low(weight.detach()) for weight in kept]
    training(model, torch.optim.AdamW(model.parameters(), lr=lr), steps=1)
    return share_moved(before, [low(weight.detach()) for weight in kept])

# %% tags=["nbval-ignore-output"]
for lr in (1e-3, 1e-4, 1e-5):
    print(f"learning rate {lr:7}: {moved_in(MXFP8, lr):5.1%} of the weights move in MXFP8")

# %% [markdown]
# A short run of a small model proves little here, and it errs on the optimistic side. Fishman et al. (2025) saw FP8
# with a scale for each tensor fail only after 200 billion tokens, when the outliers had grown. Su et al. (2025) trained
# about a thousand models in MX formats, and saw sudden instabilities, above all in the larger ones. So look at what
# those who trained large models have kept in higher precision:
#
# - **DeepSeek-V3** (Liu et al. 2024, section 3.3) multiplies E4M3, gradients included, with a scale for each 1 x 128
#   activations and each 128 x 128 weights. Embedding, head, norms, attention, and the choice of experts stay in 16 bits
#   or 32 bits; sums, master weights and gradients in 32 bits. (But Adam's two numbers for each weight are in bfloat16.)
# - **NVIDIA's NVFP4** (2025; 12 billion parameters, 10 trillion tokens) multiplies E2M1, with a scale for each 1 x 16
#   numbers, or 16 x 16 weights. About 16% of the linear layers stay in bfloat16, most of them the last ones; so do
#   embedding, head, norms and attention. Master weights, the optimizer, and sums of gradients are in 32 bits.
# - **Transformer Engine**, the library for it, has a recipe for each in 2026: `Float8CurrentScaling` with a scale for
#   each tensor, `Float8BlockScaling` for DeepSeek's blocks, `MXFP8BlockScaling`, and `NVFP4BlockScaling`.
#
# Four bits take two more tricks in NVIDIA's run. Before the product for the weights' gradient, groups of 16 numbers are
# mixed by a **random Hadamard transform**, which spreads an outlier over its group and cancels out in the product. And
# gradients are rounded **stochastically**, up or down at random. *Predict:* what is the mean of many numbers of 0.2,
# rounded to E2M1 in both ways?

# %%
many = torch.full((100_000,), 0.2)
print(f"nearest: {rounded(many, E2M1).mean():.1f}, stochastic: {rounded(many, E2M1, stochastic=True).mean():.1f}")

# %% [markdown]
# With all that, the loss of the model of 12 billion parameters ended about 1.5% above that of the same one trained in
# FP8, and it answered test questions as well.
#
# ## 8. Three cases
#
# Answer in a few sentences, as you would to a colleague. Then a run shows you what happens, and you compare your answer
# with a good one, point by point. The last two also ask for what you know about
# [pipelines](05_pipeline_parallelism.ipynb) and [data parallelism](02_data_parallelism.ipynb).

# %%
Card("why_mixed_precision")

# %%
Card("diagnose_efficiency")

# %%
Card("optimize_training")

# %% [markdown]
# ## 9. The same in PyTorch
#
# Sharded data parallelism keeps its shards in 32 bits, so they are the masters. A `MixedPrecisionPolicy` says in which
# format layers are gathered and computed, and in which gradients are added up over the ranks:

# %%
def sharded(rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = TinyGPT(small)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=policy)
    inputs, targets = next(data.minibatches(problems, 64))
    logits = model(inputs)
    data.answer_loss(logits.float(), targets).backward()
    weight = next(model.parameters())
    return logits.dtype, weight.dtype, weight.grad.dtype

print("logits {}, weights {}, gradients {}".format(*launch(sharded, world_size=2).results[0]))

# %% [markdown]
# Without sharding there is `torch.autocast`, which computes in 16 bits what is safe there, while the model keeps its
# weights in 32 bits; and for float16 `torch.amp.GradScaler`, the dynamic loss scale:
#
# ```python
# with torch.autocast("cuda", dtype=torch.bfloat16):
#     logits = model(inputs)
# loss_fn(logits.float(), targets).backward()
# ```
#
# - Autocast rounds a weight when a pass first needs it, and keeps the copy until the `with` ends. `MasterWeights`
#   rounds once after each step. With autocast there is no model in 16 bits, so gradients have 32 bits in the end, and
#   these are what DistributedDataParallel sends.
# - Autocast chooses by operation. Matrix products take 16 bits, and a sum of numbers of 16 and of 32 bits takes 32. So
#   in a whole model what goes from block to block has 32 bits, where ours has 16 bits everywhere.
# - On a CPU autocast takes bfloat16, on a GPU float16, unless you name another format.
# - For 8 bits and fewer there are torchao and Transformer Engine, on GPUs that have the circuits.
#
# The files to read are `torch/amp/autocast_mode.py` and `torch/amp/grad_scaler.py`, from `unscale_` to `update`; and
# `torch/distributed/fsdp/sharded_grad_scaler.py`, which asks the other ranks.
#
# ## What you know now
#
# - Compute and send in 16 bits; remember and add up in 32.
# - Three things go wrong in 16 bits: a long sum stalls, a small update rounds away, a small gradient becomes zero.
#   32-bit sums, master weights and loss scaling put them right.
# - bfloat16 has the range of float32 and needs no loss scaling. float16 has more digits, and whether it needs scaling
#   depends on the model and on what its loss is divided by.
# - With 8 bits each tensor or block has a scale of its own, and with 4 bits each block. What adds up stays in 32 bits,
#   and embedding and head in 16 bits.
#
# ### When it stops being true
#
# - **On hardware without 16-bit circuits** nothing is faster; messages and activations still become smaller.
# - **Where a layer needs its digits** (norms, softmax, the loss), the layer itself adds up in 32 bits inside, or should
#   be left in 32 bits altogether. `torch.autocast` keeps a list of such layers.
#
# ### Further reading
#
# - Micikevicius et al. 2018, *Mixed Precision Training*, ICLR: master weights, loss scaling, sums in 32 bits.
# - Kalamkar et al. 2019, *A Study of BFLOAT16 for Deep Learning Training*, arXiv:1905.12322.
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC20: the 16 bytes
#   for each weight, and how to shard them.
# - Sun et al. 2024, *Massive Activations in Large Language Models*, arXiv:2402.17762.
# - Liu et al. 2024, *DeepSeek-V3 Technical Report*, arXiv:2412.19437; NVIDIA 2025, *Pretraining Large Language Models
#   with NVFP4*, arXiv:2509.25149; [Transformer
#   Engine](https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html), its recipes.
# - What goes wrong below 16 bits: Fishman et al. 2025, *Scaling FP8 Training to Trillion-Token LLMs*, ICLR,
#   arXiv:2409.12517; Su et al. 2025, *Characterization and Mitigation of Training Instabilities in Microscaling
#   Formats*, arXiv:2506.20752.
#
# **Next:** the [exercise](../exercises/07_mixed_precision/07_mixed_precision.ipynb), in which you write the loss scale,
# the masters and the sums; or [combining mechanisms](08_combining_mechanisms.ipynb).
