# %% [markdown]
# # Layer-wise model parallelism
#
# **What you do:** cut a model between its layers, train it on four processes, each of which keeps only its own part,
# and find out what that costs.<br>
# **Afterwards you can:** decide where to cut, say what each device will hold and send, and build a model that fits on
# none of them.<br>
# **Time:** 35 minutes.<br>
# **You need:** [One machine is not enough](01_one_machine_is_not_enough.ipynb) and
# [Data parallelism](02_data_parallelism.ipynb); for the case in section 5
# [Sharded data parallelism](03_sharded_data_parallelism.ipynb).
#
# ## 1. Cut between two layers
#
# A model needs more memory than your device has, and you have four devices. Data parallelism is no help: it puts a
# whole copy on each of them. But a model is a list of layers, and no layer needs the weights of another. So give each
# device a few layers in a row, a **stage**. (The stages of ZeRO are something else.)
#
# *Predict:* our model is a list of ten blocks, an embedding, eight layers and a head. How would you deal them out to
# four ranks? Here is the list, and what `split_layers` does with it:

# %%
from collections import Counter

from course_lib.mechanisms.layerwise import LayerWise, split_layers
from course_lib.model import GPTConfig, TinyGPT

config = GPTConfig(layers=8)
print(dict(Counter(type(block).__name__ for block in TinyGPT(config).blocks)))
split_layers(10, n_stages=4)

# %% [markdown]
# Every block is on one rank, in order, and no stage is more than one block larger than another. Order matters: what one
# block outputs is what the next one takes in, so consecutive blocks should be neighbors.
#
# ### Question: layers in order, and memory
#
# Choose an answer and commit to it. Whichever you choose is tried, and you see what happens. (A *unit* is a device; in
# the runs it is a rank.)

# %%
from lessons import Card

Card("Q6")

# %% [markdown]
# Now four real ranks train it. `LayerWise` keeps a rank's own blocks and frees the others. A rank passes on the output
# of its last block: hidden states, the only **activations** that have to travel. On the way back it gets the gradient
# of that output, and passes on the gradient of its input.

# %%
from itertools import islice

import torch

from course_lib import data, launch

problems, unseen = data.train_test_split()

def train(rank, steps):
    chain = LayerWise(TinyGPT(config).blocks)
    optimizer = torch.optim.AdamW(chain.parameters(), lr=2e-3)
    for inputs, targets in islice(data.minibatches(problems, 64), steps):
        output = chain(inputs)  # on the last rank; None on the others
        chain.backward(None if output is None else data.answer_loss(output, targets))
        optimizer.step()
        optimizer.zero_grad()
    return chain.state_dict()

# %%
run = launch(train, world_size=4, args=(20,))
for rank, state in enumerate(run.results):
    blocks = sorted({name.split(".")[1] for name in state}, key=int)
    print(f"rank {rank} has trained blocks {', '.join(blocks)}")

# %% [markdown]
# This is **layer-wise model parallelism**. *Predict:* one process alone holds the weights, their gradients and two
# more numbers for each weight that AdamW keeps. How much of all that does each of four ranks hold?

# %%
from course_lib.instruments.ledger import count


def held(rank, is_split):
    model = TinyGPT(config)
    part = LayerWise(model.blocks) if is_split else model
    for parameter in part.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(part.parameters())
    optimizer.step()
    return count(part, optimizer).total

# %%
(alone,) = launch(held, 1, args=(False,)).results
parts = launch(held, 4, args=(True,)).results
print(f"one process alone: {alone:,} bytes")
for rank, own in enumerate(parts):
    print(f"rank {rank}: {own:9,} bytes, {own / alone:.0%}")
print("together what one holds:", sum(parts) == alone)

# %% [markdown]
# It is {{sum(parts) / len(parts) / alone:percent}} on average, and together exactly what one process holds. With more
# devices the average falls, so the model may be far larger than a device. But the four are not equal, because embedding
# and head are far smaller than a layer here: the fullest rank holds {{max(parts) / alone:percent}}. We come back to
# that.
#
# One thing here is a convenience: every rank builds the *whole* model first, and keeps its part. A model that fits on
# no device is built differently. On PyTorch's `meta` device a tensor has a shape but no data, so the whole model costs
# nothing there. Then each rank makes room for its own stage alone, and fills it: with random numbers if the model is
# new, or from a file, as here.

# %%
import tempfile
from pathlib import Path

file = Path(tempfile.mkdtemp()) / "weights.pt"
torch.save(TinyGPT(config).state_dict(), file)

def own_stage(rank):
    with torch.device("meta"):
        blocks = TinyGPT(config).blocks
    own = split_layers(10, 4)[rank]
    stage = blocks[own.start : own.stop].to_empty(device="cpu")
    weights = torch.load(file, mmap=True)  # what is not asked for is not read
    stage.load_state_dict({name: weights[f"blocks.{name}"] for name in stage.state_dict()})
    return sum(weight.nbytes for weight in blocks.parameters() if not weight.is_meta)

# %%
built = launch(own_stage, 4).results
for rank, own in enumerate(built):
    print(f"rank {rank} has built {own:9,} bytes of weights")
print("together the whole model:", sum(built) == sum(weight.nbytes for weight in TinyGPT(config).parameters()))

# %% [markdown]
# ## 2. Is it still the same training?
#
# Four processes, and none has the whole model. *Predict:* after 20 steps, are their weights those of one process that
# trained alone: to the last bit, up to rounding, or only roughly?

# %%
def train_alone(rank, steps):
    model = TinyGPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for inputs, targets in islice(data.minibatches(problems, 64), steps):
        data.answer_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()

(one,) = launch(train_alone, 1, args=(20,)).results
together = {name: weights for state in run.results for name, weights in state.items()}
print("all weights there:", together.keys() == one.keys())
print("equal to the last bit:", all(torch.equal(together[name], one[name]) for name in one))

# %% [markdown]
# To the last bit. Data parallelism adds the same numbers in another order, and is the same up to rounding. Here nothing
# changes at all: every number is computed by the same operation from the same inputs, only somewhere else. (For GPUs to
# agree like that they have to be of one kind, and their operations deterministic.)
#
# What travels is little. A rank sends activations to the next and a gradient of the same size to the one before:

# %%
activations = 64 * config.sequence * config.hidden * 4
sent = [launch(train, 4, args=(steps,)).timeline.bytes_sent(1) for steps in (1, 2)]
print(f"64 samples x {config.sequence} characters x {config.hidden} numbers of 4 bytes: {activations:,} bytes")
print(f"sent by rank 1 in a step, to both sides: {sent[1] - sent[0]:,} bytes")

# %% tags=["build-only"]
from course_lib.planner.models import GPT3

large = GPT3["175B"]

# %% [markdown]
# It depends on the samples, their length and the width of the model, not on how many weights there are. For the largest
# GPT-3, in 16 bits, it is {{2 * large.sequence * large.hidden / 1e6:.0f}} MB for each sample and direction, at a border
# of stages that hold {{2 * large.parameters / 8 / 1e9:.0f}} GB of weights each if there are eight.
#
# ## 3. Who is busy?
#
# So much for the memory. Now the time.
#
# ### Question: a batch passes through the stages

# %%
Card("Q7")

# %% [markdown]
# Our ten blocks, now. *Predict:* how often does a rank begin to compute in a step? And with one device in place of
# four, how much longer would the step be?

# %%
from course_lib import Pace
from course_lib.figures import gantt
from lessons.L04_layerwise_model_parallelism.runs import layerwise_step

pace = Pace({"forward": 0.02, "backward": 0.04})
alone, four = (layerwise_step(ranks, samples=32, config=config, pace=pace).timeline for ranks in (1, 4))
gantt(four, compare=alone, title="A training step", names=("on four ranks", "on one"))

# %% [markdown]
# Twice, and the last one once, since it goes back right away. And with one device the step takes exactly as long. The
# first rank computes and hands over, then the second, and so on to the last and all the way back, and at any time three
# of the four devices wait. (This is **emulated**, as in the last lesson: a device takes
# {{pace.device["forward"]:duration}} for a block forward and {{pace.device["backward"]:duration}} backward, and a
# message takes no time. Embedding and head are charged like a layer, to keep the stages about equal; in reality an
# embedding computes next to nothing, and a head computes more the larger its vocabulary is.)

# %%
print(f"one rank {1000 * alone.makespan:.1f} ms, four ranks {1000 * four.makespan:.1f} ms")
for rank in range(4):
    print(f"rank {rank} computes for {four.busy(rank) / four.makespan:.0%} of the time")

# %% [markdown]
# Why can they not work at the same time? A layer needs the output of the one before it, for the same samples; and on
# the way back it needs the gradient of the one after it. With $p$ equal stages of $t$ seconds each, a step takes
#
# $$T \;=\; p \cdot t \qquad\text{and every device is busy for}\qquad \frac{t}{T} \;=\; \frac{1}{p}$$
#
# of it. The time that activations are on their way comes on top. So $p$ devices are at best as fast as one would be if
# the model fit there: the price for a model that does fit.
#
# ## 4. Where to cut
#
# Equal layers make equal stages. But the first block of a language model is an embedding, which has many weights and
# computes next to nothing, and the last one is a head that turns every position into a number for each word of the
# vocabulary. Both grow with the vocabulary. *Predict:* with a vocabulary of 4,000, how do the ten blocks compare in
# memory?

# %%
from course_lib.mechanisms.layerwise import stage_bytes

blocks = TinyGPT(GPTConfig(vocab=4000, layers=8)).blocks
sizes = stage_bytes(blocks, [range(i, i + 1) for i in range(10)])
for block, size in zip(blocks, sizes, strict=True):
    print(f"{type(block).__name__:<12} {size:9,} bytes of weights")

# %% [markdown]
# Head and embedding are {{round(sizes[0] / sizes[1]):in_words}} times as large as a layer. A cut by number does not
# look at that. But `split_layers` also takes `costs`, of any kind, and makes the most expensive stage as cheap as
# possible:

# %%
for name, costs in {"by number": None, "by bytes": sizes}.items():
    stages = split_layers(10, 4, costs)
    print(name, [len(stage) for stage in stages], "blocks;", stage_bytes(blocks, stages), "bytes")

# %% [markdown]
# The fullest rank decides whether the model fits. The slowest one decides how fast training is, as soon as all of them
# work at the same time, so costs can also be seconds, as you measure them. The two need not ask for the same cut: an
# embedding is large and computes next to nothing.

# %% tags=["build-only"]
from course_lib.planner import ModelSpec
from lessons.L04_layerwise_model_parallelism import explorer

small = ModelSpec(16, 2048, 32, 8192, 128256, kv_heads=8, ffn_hidden=8192, gated_mlp=True)
head = [one.vocab * one.hidden / one.layer_parameters.total for one in (large, small)]

def fullest(units, vocabulary=1000, cut="number"):
    step = explorer.LayerWiseSetting(units, samples=32, vocabulary=vocabulary, cut=cut).run()
    return max(own.total for own in step.held)

# %% [markdown]
# ### Turn the knobs
#
# Every move trains a model with {{explorer.LAYERS:in_words}} layers on real ranks, one for each unit. Memory is
# measured at its fullest, which on most ranks is before there are any gradients. Time is emulated, and compared with
# what a simulator predicted. Try these:
#
# 1. From one unit to eight: what happens to memory, and what to time?
# 2. Take 64 samples. Which part of memory grows, and is it shared out like the rest?
# 3. Take the largest vocabulary. Which rank is the fullest? What does a cut by bytes do about it?
# 4. With eight units and that vocabulary, can any cut bring the fullest rank down to an eighth? What would have to be
#    cut for that?

# %%
from lessons.L04_layerwise_model_parallelism.explorer import LayerWiseExplorer

LayerWiseExplorer()

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. The fullest unit holds {{fullest(1):memory_size}} alone, {{fullest(6):memory_size}} with five others, and with
#    seven still {{fullest(8):memory_size}}. The time is the same with any number of them.
# 2. The activations. They are shared out too: together the units hold those that one would hold. That is so because a
#    block ends with a sum, which needs nothing for its backward pass. A layer that needs its own output, as a tanh
#    does, keeps it on one side of a border, and the layer behind it on the other. (What nobody needs after it was sent
#    can go: Megatron-LM frees it with `deallocate_pipeline_outputs`.)
# 3. With four units and 32 samples, the last one, which has the head, with {{fullest(4, 4000):memory_size}}. A cut by
#    bytes gives the head a unit of its own, and {{fullest(4, 4000, "bytes"):memory_size}} are left.
# 4. No. The head alone makes {{fullest(8, 4000, "bytes") / fullest(1, 4000):percent}} of all there is. It would have to
#    be cut inside.
# </details>
#
# A cut between layers cannot make a stage smaller than its largest block. (The head of the largest GPT-3 has
# {{head[0]:.1f}} times the parameters of a layer, and that of Llama 3.2 with a billion parameters {{head[1]:.1f}}
# times.) To go on you have to cut *inside* a layer, and that is [tensor parallelism](06_tensor_parallelism.ipynb).
#
# ## 5. A case
#
# Answer in a few sentences, as you would to a colleague. Then a run shows you what happens, and you compare your answer
# with a good one, point by point.

# %%
Card("why_partition")

# %% [markdown]
# ## 6. The same in PyTorch
#
# PyTorch's package for this is `torch.distributed.pipelining`. It can cut a minibatch as well, which is what the next
# lesson is about; with `n_microbatches=1` it leaves it whole. Here it trains for the same steps as in section 2:

# %%
def cut_in_pytorch(rank):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    own = split_layers(10, 4)[rank]
    part = TinyGPT(config).blocks[own.start : own.stop]
    stage = PipelineStage(part, rank, num_stages=4, device=torch.device("cpu"))
    return part, ScheduleGPipe(stage, n_microbatches=1, loss_fn=data.answer_loss)

# %%
def in_pytorch(rank, steps):
    part, chain = cut_in_pytorch(rank)
    optimizer = torch.optim.AdamW(part.parameters(), lr=2e-3)
    for inputs, targets in islice(data.minibatches(problems, 64), steps):
        _ = chain.step(inputs) if rank == 0 else chain.step(target=targets)  # forward and backward
        optimizer.step()
        optimizer.zero_grad()
    return part.state_dict(prefix="blocks.")

# %%
theirs = {name: weights for state in launch(in_pytorch, 4, (20,)).results for name, weights in state.items()}
print("all weights there:", theirs.keys() == one.keys())
print("equal to the last bit:", all(torch.equal(theirs[name], one[name]) for name in one))

# %% [markdown]
# The same function runs under `torchrun --nproc-per-node 4 train.py`, with `dist.init_process_group()` before it. What
# PyTorch does differently:
#
# - You say where to cut: by hand, as here, or with the `SplitPoint`s that you give to `pipeline(model, ...)`.
# - Only the first rank is given the inputs. Ours takes them on every rank, and reads them on the first.
# - It does not add up the gradients of a parameter with two uses, on two ranks. Ours does.
#
# The file to read is `torch/distributed/pipelining/stage.py`, `forward_one_chunk` and `backward_one_chunk`.
#
# You may have used this lesson's mechanism without knowing: Hugging Face's `device_map="auto"` puts a model's layers on
# several GPUs in this way when it is loaded. That is made for inference, and only one GPU works at a time
# ([Accelerate's documentation](https://huggingface.co/docs/accelerate/concept_guides/big_model_inference) says so).
# For training, large runs go on to pipelines, the next lesson.
#
# ## What you know now
#
# - Consecutive layers are on consecutive ranks. Each holds its own weights, gradients, optimizer state and activations,
#   and together they hold everything once, except for some of what crosses a border.
# - Activations travel forward, gradients of the same size back. Nothing else does.
# - It is the training of one process, to the last bit.
# - One rank is busy at a time: $p$ devices are as fast as one.
# - The fullest stage decides whether the model fits. Cut by what blocks cost, not by their number.
#
# ### When it stops being true
#
# - **A single layer is too large.** Then it has to be cut inside.
# - **A parameter has two uses.** A head that is tied to the token embedding lives on the first and the last rank, and
#   the two have to add up their gradients. (`LayerWise` does.)
# - **A layer needs more than the one before it.** Connections that skip over stages travel, too.
# - **Something is added up over all layers.** Gradients are clipped by a norm over all stages. So one more number
#   travels, it is added up in another order, and what follows is the same up to rounding.
# - **Waiting costs too much.** Cut the minibatch as well, and let the pieces follow each other:
#   [pipeline parallelism](05_pipeline_parallelism.ipynb).
#
# ### Further reading
#
# - Huang et al. 2019, *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, NeurIPS: its
#   figure 2b is the picture of section 3.
# - Krizhevsky et al. 2012, *ImageNet Classification with Deep Convolutional Neural Networks*, NeurIPS: a network on
#   two devices, because it did not fit on one. (It was cut *inside* its layers, as in tensor parallelism.)
# - Dean et al. 2012, *Large Scale Distributed Deep Networks*, NeurIPS: models cut over many machines.
#
# **Next:** the [exercise](../exercises/04_layerwise_model_parallelism/04_layerwise_model_parallelism.ipynb). Cut a
# model, train it over ranks, and work out what each of them holds. Then
# [pipeline parallelism](05_pipeline_parallelism.ipynb), where all stages work at the same time.
