# %% [markdown]
# # One machine is not enough
#
# **What you do:** count every byte that a training step holds, on a real model, and let the model grow until no device
# has room for it. Then find out how long you would have to wait for it anyway.<br>
# **Afterwards you can:** say what a training step of any model holds and how long training takes, and
# which of the two limits of a device it meets first.<br>
# **Time:** 50 minutes.<br>
# **You need:** [Start here](00_start_here.ipynb), and one PyTorch model that you have trained yourself.
#
# Decide on an answer before you run the next cell, even if it is a guess. (This page comes with its results. To hide
# them until you get there, choose *Clear Outputs of All Cells* in the *Edit* menu.)
#
# ## 1. What the model is made of
#
# All models of this course are small GPTs, built like the large ones. Text comes in as **tokens**: characters or pieces
# of words, each of them a number. For each place in the text, the model says which token may come next.
#
# ![From left to right: tokens, embedding, layers of attention and MLP with their norms and residuals, head,
# logits](images/model.svg)
#
# - The **embedding** looks up a row of numbers for each token, and adds one for its place. From there to the head these
#   rows are called **hidden states**.
# - In **attention** each place of the text looks at itself and at those before it, in several **heads** side by side.
# - The **MLP** works on each place alone: a matrix makes its row four times as wide, a curved function (the **GELU**)
#   acts on each number, and a second matrix makes the row narrow again.
# - Before each of the two a **norm** brings the numbers to the same scale. What comes out is added to what went in:
#   that is the **residual**.
# - The **head** makes the **logits**: for each place a number for each token of the vocabulary, larger for those that
#   are likelier to come next.
#
# (So *head* means two things: the end of the model, and one of several parts of attention. Three matrices make a
# *query*, a *key* and a *value* for each place and head; a fourth, *out*, brings the heads together.)
#
# *Predict:* where are most of the parameters: in the embedding, attention, the MLP or the head? Does the same part also
# compute the most, and keep the most for the backward pass? Here is a small model, with a few samples:

# %%
import torch
from torch.utils.flop_counter import FlopCounterMode

from course_lib.instruments.ledger import Ledger
from course_lib.model import GPTConfig, TinyGPT

config = GPTConfig(vocab=256, sequence=128, layers=4, hidden=128, heads=4)
model = TinyGPT(config)
tokens = torch.randint(config.vocab, (8, config.sequence + 1), generator=torch.Generator().manual_seed(0))

# %% [markdown]
# And here is each part by itself. (Its layers are all alike, so one of them is enough.)

# %%
embedding, layer, head = model.blocks[0], model.blocks[1], model.blocks[-1]
parts = {"embedding": embedding, "norm 1": layer.attention_norm, "attention": layer.attention,
         "norm 2": layer.mlp_norm, "MLP": layer.mlp, "head": head}
print("part        what comes out   parameters  million FLOPs  MiB kept for backward")
out = tokens[:, :-1]
for name, part in parts.items():
    with Ledger(part) as kept, FlopCounterMode(display=False) as forward:
        out = part(out)
    numbers, flops, held = sum(p.numel() for p in part.parameters()), forward.get_total_flops(), kept.peak.held
    shape = " x ".join(map(str, out.shape))
    print(f"{name:9} {shape:>16} {numbers:12,} {flops / 1e6:14.0f} {held.activations / 2**20:22.2f}")

# %% tags=["build-only"]
wide, places = config.hidden, config.sequence  # a layer's products: 24 h^2 FLOPs for a token, and 4 h for each place

def mlp(seen):
    return 16 * wide / (24 * wide + 4 * seen)

# %% [markdown]
# A **FLOP** is a floating-point operation: one multiplication, or one addition. In a layer, the MLP has two thirds of
# the parameters and of the FLOPs in this table, and attention nearly all the rest. The MLP also keeps the most for the
# backward pass. The table leaves something out: queries are multiplied with keys, and the result with values, without
# any parameters. This counter does not see that on a CPU. With these products the MLP has {{mlp(places):percent}} of a
# layer's FLOPs here, or {{mlp(places / 2):percent}} if the kernel skips what lies after each place. The longer the
# text, the smaller is that share. An embedding only looks up, so it has many parameters and no FLOPs. The norms are the
# other way round: hardly any parameters, and still an eighth of what a layer keeps.
#
# ## 2. Where does the memory go?
#
# A billion parameters of four bytes each take {{4e9:memory_size}} (a GiB has $2^{30}$ bytes). Still, people run out of
# memory when they train such a model on a device that has 16.
#
# ### Question: the weights fit, and training does not
#
# Choose an answer and commit to it. Then it is run, whichever it is: what would help must make the model fit. Try the
# others as well, and compare what is held each time. *Other numbers* asks the same of another model.

# %%
from lessons import Card

Card("Q5")

# %% [markdown]
# What is it, beside the weights, that took the room? Our small model can tell, because there you can count.

# %%
import torch.nn.functional as F

optimizer = torch.optim.AdamW(model.parameters())
parameters = sum(parameter.numel() for parameter in model.parameters())
print(f"{parameters:,} parameters of 4 bytes are {4 * parameters:,} bytes")

# %% [markdown]
# *Predict:* how many times as much is in memory at the fullest moment of training? Twice, four times, ten times?
#
# A **ledger** keeps the books while you train. It asks PyTorch what is held, and estimates nothing.

# %%
def train_step(samples=8):
    loss = F.cross_entropy(model(tokens[:samples, :-1]).flatten(0, 1), tokens[:samples, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

with Ledger(model, optimizer) as ledger:
    train_step()
    train_step()

print(f"at its fullest: {ledger.peak.held.total / (4 * parameters):.1f} times the parameters")

# %% [markdown]
# And here is what it was made of, at five moments of these two steps. (In the ledger, a forward pass ends with a
# *turn*, and a *step* is where the update begins.)

# %%
from course_lib.figures import memory_by_part


def held_at(event, step):
    return [sample.held for sample in ledger.samples if sample.event == event][step]

moments = {
    "before": held_at("start", 0),
    "step 1, after forward": held_at("turn", 0),
    "step 1, after backward": held_at("step", 0),
    "step 2, after forward": held_at("turn", 1),
    "step 2, after backward": held_at("step", 1),
}
memory_by_part(moments, title="What one process holds while it trains")

# %% [markdown]
# Four kinds of things, and each has its own time:
#
# - **Parameters** are always there.
# - **Activations** are what the forward pass computes and the backward pass will need. They grow until the loss is
#   there, and go as the backward pass uses them up. Here they are most of what is held at the fullest moment.
# - **Gradients** are computed in the backward pass and stay until they are cleared.
# - **Optimizer state** is made by the first update and never goes again. AdamW keeps two numbers for each parameter.
#
# That is why a job can survive its first step and run out of memory in the second.
#
# ## 3. Bytes for each parameter
#
# Leave the activations aside for a moment. *Predict:* how many bytes does training need for every parameter, with
# everything in 32 bits?

# %%
held = held_at("step", 1)
for name in ("parameters", "gradients", "optimizer"):
    print(f"{name:10} {getattr(held, name) / parameters:5.2f} bytes for each parameter")

# %% tags=["build-only"]
state = round((held.parameters + held.gradients + held.optimizer) / parameters)

# %% [markdown]
# In all **{{state:in_words}} bytes**, for a parameter that takes four. In mixed precision, which computes with 16 bits,
# it is sixteen as well: 2 for the parameter, 2 for its gradient, and 12 for what the optimizer keeps in 32 bits, a copy
# of the parameter and its two numbers (Rajbhandari et al. 2020). A [later lesson](07_mixed_precision.ipynb) is about
# that.
#
# So you can already say what fits. *Predict:* a good data-center GPU has 80 GiB. How many parameters could a model
# have, if nothing but these {{state:in_words}} bytes were needed?

# %%
GiB = 2**30
print(f"{80 * GiB / 16 / 1e9:.1f} billion")

# %% [markdown]
# Then there would be no room for a single activation. How many bytes do those take?
#
# ## 4. What the backward pass needs
#
# *Predict:* you train on twice as many samples at a time. Which of the four kinds grow?

# %%
print("samples    parameters     gradients     optimizer   activations")
for samples in (1, 2, 4, 8):
    with Ledger(model, optimizer) as ledger:
        train_step(samples)
    turn, step = held_at("turn", 0), held_at("step", 0)
    sizes = (turn.parameters, step.gradients, turn.optimizer, turn.activations)
    print(f"{samples:7}", *(f"{size / 2**20:9.2f} MiB" for size in sizes))

# %% [markdown]
# Only the activations, and in proportion. A sample of $s$ tokens leaves about $16\,s\,h$ numbers behind in each layer,
# if the layer is $h$ wide: the inputs of its norms ($2\,s\,h$), of its matrices ($7\,s\,h$) and of its GELU
# ($4\,s\,h$), and the queries, keys and values of its attention ($3\,s\,h$). That grows with the width of the
# model. The parameters, $12\,h^2$ in a layer, grow with its square. So the wider the model, the more the
# {{state:in_words}} bytes count.
#
# You can always take fewer samples at a time and add up their gradients. But one sample is the least, and the
# {{state:in_words}} bytes do not care.
#
# ## 5. Let it grow
#
# Nobody has to buy a GPU to find out what fits. The course's **planner** does the same bookkeeping for models that you
# could not build here. Is it right? Hold it against the ledger, on our small model. (`micro_batch` says how many
# samples pass through a device at a time, `global_batch` how many one update is made from. If they are more, the
# gradients of several micro-batches are added up.)

# %%
from course_lib.planner import Cluster, ModelSpec, Plan, estimate

small = ModelSpec(layers=4, hidden=128, heads=4, sequence=128, vocab=256, tied_embeddings=False, dropout=False,
                  flash_attention=True)
plan = Plan(micro_batch=8, precision="fp32")
planned = estimate(small, Cluster("laptop-CPU", nodes=1, devices_per_node=1), plan, global_batch=8).memory
counted = {"parameters": turn.parameters, "gradients": step.gradients, "optimizer": turn.optimizer,
           "activations": turn.activations}
activations = planned.activations + planned.logits
for name, predicted in {**planned.parts, "activations": activations}.items():
    if name in counted:
        print(f"{name:12} planned {predicted:12,.0f}   counted {counted[name]:12,}   {predicted / counted[name]:.3f}")
fullest = ledger.peak.held.total
print(f"at the most  planned {planned.tensors:12,.0f}   counted {fullest:12,}   {planned.tensors / fullest:.3f}")

# %% [markdown]
# Parameters and gradients to the byte, the optimizer up to its count of steps, activations within a few percent. All
# together the planner says more than the ledger has ever seen at one moment. It stays on the safe side: it adds up all
# gradients, all activations and some buffers, while in reality gradients come as activations go. That is good enough
# here; how far a planner can be trusted with large models, [planning](09_planning.ipynb) asks.
#
# The models of GPT-3's paper (Brown et al. 2020, table 2.1; two of them rounded so that everything divides) make a
# family of eight, from 125 million to 175 billion parameters. *Predict:* which is the largest that you can train on one
# A100, a GPU with 80 GiB, one sample at a time?

# %%
from course_lib.planner.models import GPT3, LLAMA3
from lessons.L01_one_machine_is_not_enough.explorer import TOKENS, on_one_device
from lessons.L01_one_machine_is_not_enough.figure import limits

alone = {name: on_one_device(name, "A100-80GB", samples=1, recompute="none") for name in GPT3}
large, family = LLAMA3["70B"], GPT3["6.7B"]  # for the cells below
limits(alone, TOKENS, width=850, title="Which of eight models can one A100 train?")

# %% [markdown]
# Look at the left half: above the dashed line nothing fits. (The right half comes in a moment.)
#
# Would a better device do? Here is a model of {{large.parameters / 1e9:.0f}} billion parameters, in the shape of Llama
# 3 (Llama Team 2024, table 3), on the device with the most memory in the planner's catalogue. *Predict:* which of the
# three changes below makes it fit? (`tp=8` cuts each matrix in eight; more of that in section 8.)

# %%
from course_lib.planner import DEVICES

most = max(DEVICES, key=lambda name: DEVICES[name].memory)
one_by_one = Plan(micro_batch=1)

def try_with(what, devices=1, plan=one_by_one, batch=256, **changes):
    planned = estimate(large, Cluster(most, 1, devices, **changes), plan, batch)
    print(f"{what:35} {planned.memory.total / GiB:5.0f} GiB of {planned.capacity / GiB:.0f}, {planned.fit}")

print(f"On a {most}:")
try_with("as it is")
try_with("every FLOP of the peak reached", matmul=1.0)
try_with("a minibatch of a single sample", batch=1)
try_with("eight devices, an eighth on each", devices=8, plan=Plan(tp=8))

# %% tags=["build-only"]
needed = estimate(large, Cluster(most, 1, 1), one_by_one, global_batch=256).memory.total

# %% [markdown]
# A faster device makes nothing smaller. A smaller minibatch does not help either: it was taken one sample at a time
# from the start. More than four fifths of the {{needed:memory_size}} are the {{state:in_words}} bytes of each
# parameter. (A "GB" on a data sheet may be a billion bytes or a GiB. This page counts in GiB.)
#
# A model can also grow in another way: its **texts** get longer. *Predict:* the model of
# {{family.parameters / 1e9:.1f}} billion parameters was trained on {{family.sequence:,}} tokens at a time. What do its
# activations take for one sample of 64 times as many?

# %%
from dataclasses import replace

print("tokens of a sample    keeping all scores    flash attention    and layers recomputed")
for tokens_at_once in (2048, 8192, 32_768, 131_072):
    row = []
    for flash, recompute in ((False, "none"), (True, "none"), (True, "full")):
        long = replace(family, sequence=tokens_at_once, flash_attention=flash)
        needs = estimate(long, Cluster(most, 1, 1), Plan(recompute=recompute), global_batch=1).memory
        row.append((needs.activations + needs.logits) / GiB)
    print("{:18,} {:17,.0f} GiB {:14,.0f} GiB {:19,.0f} GiB".format(tokens_at_once, *row))

# %% [markdown]
# Attention compares every place with every other, and that makes a **score** for each pair of places, in each head. If
# all of them are kept for the backward pass, activations grow with the **square** of the length. A **flash attention**
# kernel never stores them: it computes them again, block by block (Dao et al. 2022), and so does our small model. Then
# activations grow in proportion. For long texts even that is too much for one device. One can recompute whole layers,
# cut the remaining activations (lesson [06](06_tensor_parallelism.ipynb)), or share out the places of a text:
# that is called *context parallelism*, and the planner knows it as `cp`.
#
# ## 6. And if it did fit?
#
# Suppose that a device had all the memory in the world. How long would you wait?
#
# A parameter takes part in one multiplication and one addition for each token, and that is nearly all that a forward
# pass costs. *Predict:* and the backward pass, which computes gradients of the inputs and of the weights?

# %%
with FlopCounterMode(display=False) as forward:
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
with FlopCounterMode(display=False) as backward:
    loss.backward()

in_matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
each = in_matrices * tokens[:, 1:].numel()
print(f"forward:  {forward.get_total_flops() / each:.1f} FLOPs for each parameter of a matrix and each token")
print(f"backward: {backward.get_total_flops() / forward.get_total_flops():.1f} times as many")

# %% [markdown]
# Backward is twice as much as forward, so it is six FLOPs for each parameter and token in all. (The products inside
# attention come on top.) The rule of thumb is
#
# $$\text{training} \;\approx\; 6 \cdot \text{parameters} \cdot \text{tokens}$$
#
# How many tokens? Hoffmann et al. (2022) found about twenty for each parameter to be a good use of a given amount of
# computing. Then a model of twice the size needs four times as much. *Predict:* how long does the largest of the
# family train on one H100, 20 tokens for each parameter?

# %%
from course_lib.figures.axis import long_time

for name in ("125M", "1.3B", "6.7B", "13B", "175B"):
    on_h100 = on_one_device(name, "H100-80GB", samples=1, recompute="none")
    print(f"{name:>5} {on_h100.fit:>13}  {long_time(TOKENS[name] / on_h100.tokens_per_second)}")

# %% [markdown]
# Centuries. And that is not because the planner is pessimistic: with every FLOP of the peak it would still be

# %%
peak = Cluster("H100-80GB").spec.peak["bf16"]
print(f"{long_time(6 * GPT3['175B'].parameters * TOKENS['175B'] / peak)} for 175B")

# %% [markdown]
# So there are **two limits**. Memory stops you at once. Computing only makes you wait, here for longer than you live.
# Look at the right half of the picture above again: the lines are a day, a month and a year, and 90% of such
# runs lie within the short stroke in each point. A thousand devices would turn a century into {{round(100 * 365.25 / 7
# / 1000):in_words}} weeks, if they could share the work perfectly.
#
# ## 7. Push against both limits
#
# Turn the knobs. Everything here is modelled, so a device costs nothing. Try these:
#
# 1. What is the largest model that fits on an RTX 4090, a card made for games? And how long would it
#    train? Is there one that may fit?
# 2. Take 6.7B on a B200. How many samples at a time can it hold? Switch *recompute* to "every layer": now the backward
#    pass computes activations anew in place of keeping them. What does that buy, and what does it cost?
# 3. Is there a model that fits on a device, but would train for longer than a month? And one that does not fit, but
#    would be done within a year?
# 4. Find a setting in which recomputing makes the difference between fitting and not. Can it help 175B?
#
# (The part with stripes and no color is what the planner sets aside for bytes that no tensor is in. And software
# differs in what it keeps: a model *may fit* where it fits with lean software only. The strokes below the bar show the
# range. The end of this page says more about both.)

# %%
from lessons.L01_one_machine_is_not_enough.explorer import memory_explorer

memory_explorer()

# %% tags=["build-only"]
from lessons.L01_one_machine_is_not_enough.explorer import SAMPLES


def largest(device, *fits):
    return [name for name in GPT3 if on_one_device(name, device, 1, "none").fit in fits][-1]

def most_samples(model, device, recompute="none"):
    return max(samples for samples in SAMPLES if on_one_device(model, device, samples, recompute).fits)

def seconds(model, device, samples=1, recompute="none"):
    return TOKENS[model] / on_one_device(model, device, samples, recompute).tokens_per_second

surely, perhaps = largest("RTX-4090", "fits"), largest("RTX-4090", "fits", "may fit")
kept, again = most_samples("6.7B", "B200-180GB"), most_samples("6.7B", "B200-180GB", "full")
longer = seconds("6.7B", "B200-180GB", again, "full") / seconds("6.7B", "B200-180GB", kept) - 1

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. {{surely}}, which would train for {{seconds(surely, "RTX-4090"):long_time}}. {{perhaps}} may fit, one sample at a
#    time, and takes {{seconds(perhaps, "RTX-4090"):long_time}}.
# 2. {{kept}} samples at a time; with recomputing {{again}}, the most that you can choose. But the training takes
#    {{longer:percent}} longer with these {{again}} than with {{kept}} whose activations are kept. On a single device it
#    pays only where nothing else fits. (Where it saves traffic between devices it can pay as well: lesson 06 has such a
#    case.)
# 3. 6.7B, one sample at a time, fits on an H200 and takes {{seconds("6.7B", "H200-141GB"):long_time}} there. On an H100
#    it does not fit, and would take {{seconds("6.7B", "H100-80GB"):long_time}}.
# 4. 6.7B on a B200, eight samples at a time: it may fit, and with recomputing it does. 175B cannot be helped: its
#    {{state:in_words}} bytes alone are {{state * GPT3["175B"].parameters:memory_size}}.
# </details>
#
# ## 8. Two ways to share
#
# Eight devices have eight times the memory and eight times the speed. But what do you give each of them? *Predict:*
# which of these makes 13B fit into devices of 80 GiB? (`dp`, `tp` and `pp` are the numbers of ranks that share the
# samples, each matrix, and the layers; with `zero=3`, those that share the samples share the model's state as well.)

# %%
model_13b = GPT3["13B"]
node = Cluster("A100-80GB", nodes=1, devices_per_node=8)
ways = {
    "a share of the samples": Plan(dp=8),
    "a share of each matrix": Plan(tp=8),
    "a share of the layers": Plan(pp=8),
    "samples, and a share of the model's state": Plan(dp=8, zero=3),
}
for name, way in ways.items():
    shared = estimate(model_13b, node, way, 256)
    text = f"{shared.memory.total / GiB:4.0f} GiB, {shared.fit}"
    print(f"{name:41} {text:23} {shared.mfu:.0%} of the peak, if it fits")

# %% [markdown]
# Sharing out the **samples** leaves the whole model on each device: faster, but no smaller. Sharing out the **model**
# makes it smaller, by its matrices, by its layers, or by its state. Each of these is a lesson of this course, and each
# has a price: shares have to be put together again, over links that are slower than memory. In the end you combine
# them.
#
# ### Case: one machine, and a colleague
#
# The two limits in one story. Answer in a few sentences, as you would to the colleague. Then the numbers are worked
# out, and you compare with a good answer, point by point.

# %%
Card("one_machine")

# %% [markdown]
# ## 9. The same in PyTorch
#
# Our ledger asks for what the backward pass will need. PyTorch has a counter too, `MemTracker`, which looks at every
# operation and at what it makes. Here both watch the same step:

# %%
from torch.distributed._tools.mem_tracker import MemTracker

theirs = MemTracker()
theirs.track_external(model, optimizer)
with theirs:
    train_step()
(peak,) = theirs.get_tracker_snapshot("peak").values()
theirs_by_kind = {getattr(kind, "value", kind): size for kind, size in peak.items()}

# %%
with Ledger(model, optimizer) as ledger:
    train_step()
ours = ledger.peak.held
for kind, size in {"Parameter": ours.parameters, "Optstate": ours.optimizer, "Activation": ours.activations}.items():
    print(f"{kind:10} theirs {theirs_by_kind[kind]:12,}   ours {size:12,}")
print(f"{'Temp':10} theirs {theirs_by_kind['Temp']:12,}")

# %% tags=["build-only"]
from course_lib.planner import memory  # noqa: F401

# %% [markdown]
# Parameters and optimizer state are the same to the byte. Activations are, but for the text itself, which no operation
# has made, and for some single numbers. What it does differently:
#
# - It also counts what is there for a moment only (`Temp`): here {{theirs_by_kind["Temp"]:memory_size}}, twice the size
#   of the logits.
# - It can say so for every module: `theirs.display_modulewise_snapshots()`.
# - On a GPU there are more numbers. `torch.cuda.max_memory_allocated()` is the most that tensors took at one time.
#   `torch.cuda.max_memory_reserved()` is more: the allocator also keeps blocks that no tensor is in at the moment. And
#   what `nvidia-smi` shows is more again: the driver's context and the buffers of NCCL, which PyTorch does not
#   allocate. It is this last one that has to fit.
#
# One process needs no `torchrun`: `python train.py` starts it. The files to read are
# `torch/distributed/_tools/mem_tracker.py` (the underscore says that it may still change) and, for the FLOPs,
# `torch/utils/flop_counter.py`.
#
# ## What you know now
#
# - Training holds parameters, gradients, optimizer state and activations. The first three are {{state:in_words}} bytes
#   for each parameter with Adam, in 32 bits as in mixed precision.
# - Activations grow with the samples at a time and with the length of a text, or with its square where attention keeps
#   its scores.
# - The memory is fullest where the forward pass turns into the backward pass, from the second step on; or in the
#   update, if gradients take more than activations.
# - Training costs about six FLOPs for each parameter and token.
# - A model of many billions of parameters meets both limits of one device: it does not fit, and it would take too long.
#
# ### When it stops being true
#
# - **Sixteen is for Adam.** Plain gradient descent keeps nothing; then it is eight. Momentum and Muon keep one number
#   for each parameter, Adafactor less than one, Shampoo and SOAP more than Adam.
# - **Long texts.** With attention that keeps its scores, activations grow with the square of the length.
# - **Not every byte is the model's.** A device also holds its driver, communication buffers and holes between tensors.
#   The planner sets aside {{memory.DRIVER:memory_size}}, half as much for each group that the device talks in, and
#   {{memory.HOLES:percent}} of everything else.
# - **Software differs.** Some software computes the loss in one kernel, some keeps two copies of the logits in 32 bits
#   for it. So the planner gives a range, which has nine in ten published figures in it. A model *fits* if all of the
#   range is below what the device has, *may fit* if only a part of it is, and *does not fit* otherwise.
#
# ### Further reading
#
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC20, section 3:
#   where the sixteen bytes come from.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198: what
#   activations there are, layer by layer.
# - Dao et al. 2022, *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness*, NeurIPS.
# - Hoffmann et al. 2022, *Training Compute-Optimal Large Language Models*, arXiv:2203.15556: twenty tokens for each
#   parameter.
# - Brown et al. 2020, *Language Models are Few-Shot Learners*, arXiv:2005.14165: the family of eight.
#
# **Next:** [Data parallelism](02_data_parallelism.ipynb), the first way to share.
