# %% [markdown]
# # Pipeline parallelism
#
# **What you do:** get all devices of a row to work at the same time, see how long they are idle, and find the schedule
# that wastes least.<br>
# **Afterwards you can:** read a schedule and write one, work out its bubble and its memory, and choose the
# number of micro-batches.<br>
# **Time:** 55 minutes, and 30 more for the four cases in section 7.<br>
# **You need:** [Layer-wise model parallelism](04_layerwise_model_parallelism.ipynb).
#
# ## 1. One works, three wait
#
# The layers of a model are on four devices in a row. This is where the lesson leads: pieces of a minibatch follow each
# other through all four, and their gradients come back. Run the cell, and follow piece number 2. (The space bar starts
# and stops, the arrow keys go from event to event, and *Light up* follows another piece. Messages are slow here, so
# that one sees them.)

# %%
from course_lib import Link, Pace
from course_lib.classroom.runs import pipeline_step
from course_lib.classroom.widgets import play
from course_lib.schedules import SCHEDULES

pace = Pace({"forward": 0.04, "backward": 0.08}, link=Link(latency=0.03))
play(pipeline_step(SCHEDULES["gpipe"](4, 4), pace), title="Four pieces, four devices", follow=2)

# %% [markdown]
# Now back to the beginning, where the minibatch goes forward as a whole from the first device to the last, and its
# gradients come back. At any moment one device works and three wait. Here `step` runs one training step on real ranks,
# by a schedule that you name, and `gantt` draws what each of them did:

# %%
from course_lib.figures import gantt


def step(name, stages, micro_batches):
    forward, backward = 0.16 / micro_batches, 0.32 / micro_batches
    return pipeline_step(SCHEDULES[name](stages, micro_batches), Pace({"forward": forward, "backward": backward}))

whole = step("naive", stages=4, micro_batches=1)
gantt(whole, title="The whole minibatch at once")

# %% tags=["build-only"]
took = {span.kind: span.duration for span in whole.of(0)}

# %% [markdown]
# This is **emulated**, as before: processes, messages and gradients are real, the clocks stand for other devices. These
# need {{took["forward"]:duration}} to bring the minibatch forward through their own layers, their **stage**, and
# {{took["backward"]:duration}} to bring its gradients back. (The number on each bar
# gets a meaning soon.)
#
# ### Question: eight units, one of them active
#
# Each option is tried on eight ranks, and you see how many are active at a time.

# %%
from lessons import Card

Card("Q11")

# %% [markdown]
# Why should the first device wait? It is done with the minibatch, and there is nothing else. So cut the
# minibatch into four **micro-batches**. The first device passes micro-batch 0 on and starts with number 1 at once,
# while its neighbor works on number 0, and so on down the row, like an assembly line.
#
# *Predict:* all four devices have exactly as much to compute as before. How long does a step take now, compared with
# the one above: as long, three quarters, a half, or a quarter?

# %%
pieces = step("gpipe", stages=4, micro_batches=4)
print(f"{pieces.makespan / whole.makespan:.0%} of the time")
gantt(pieces, compare=whole, title="The same work, on one axis", names=("four micro-batches", "the whole minibatch"))

# %% [markdown]
# A bit less than a half: in each direction there are seven short turns in place of four long ones, and a short turn is
# a quarter of a long one. In one of the seven all four devices work at the same time. Before that turn the pipeline
# **fills**, since the last device has nothing to do until something arrives; after it the pipeline **drains**, and the
# first device is the first to have nothing left. On the way back it is the other way round. The idle time has a name,
# the **bubble**: the last device has it at both ends of the step, the first in the middle.
#
# In the picture that you played first, *Light up* also shows all messages at once: {{2 * 3 * 4}} of them, whatever the
# order.
#
# Here is the same as text, as if a forward and a backward pass took equally long. Each column is one turn; F2 is the
# forward pass of micro-batch 2, B2 its backward pass.

# %%
from course_lib.schedules import as_text

print(as_text(SCHEDULES["gpipe"](4, 4)))

# %% [markdown]
# ### Question: what is the first stage doing?
#
# Whatever you answer is looked up in the trace of a real pipeline.

# %%
Card("Q10")

# %% [markdown]
# ## 2. How large is the bubble?
#
# Count turns in the text above, for $p$ stages and $m$ micro-batches. Every rank computes $m$ forward passes. The last
# one begins $p-1$ turns late, because that is how long the first micro-batch needs to get there; and the first one has
# done all of its own $p-1$ turns before the last has. The way back is the same in reverse. So of $m + p - 1$ turns in
# each direction, a rank is busy for $m$ and idle for $p-1$:
#
# $$\text{bubble} \;=\; \frac{p-1}{m+p-1}$$
#
# *Predict:* four stages. How many micro-batches does it take until the devices are busy for 80% of the time?

# %%
p = 4
runs = {m: step("gpipe", p, m) for m in (1, 2, 4, 8, 12, 16)}
for m, run in runs.items():
    print(f"m = {m:2}: idle {run.idle_fraction():.4%}, formula {(p - 1) / (m + p - 1):.4%}, "
          f"{whole.makespan / run.makespan:.1f} times as fast as without")

# %% [markdown]
# It takes {{min(m for m, run in runs.items() if run.idle_fraction() < 0.2001):in_words}} of them. The formula has no
# device speeds in it, and no minibatch: only stages and micro-batches count. With many micro-batches four devices come
# close to being four times as fast as one, which a plain row of devices never is. (That it is right to the last digit
# is no wonder: these devices are emulated, equally fast, and their messages take no time. Qi et al. 2024, table 5,
# calculate it with passes and messages as they were timed on eight A100s: for 1.5 billion parameters and 24
# micro-batches 1F1B loses 24.3%, where the formula says {{7 / 31:.1%}}.)
#
# It also says what to do about more devices. To be busy for 80% of the time, $m = 4(p-1)$: 12 micro-batches for four
# stages, 28 for eight, 252 for 64. A rule of thumb is $m \ge 4p$ (Huang et al. 2019, section 2.3).
#
# ### Question: the order that keeps both busiest
#
# Your order becomes a program for two ranks, and you see how long they are idle. More than one order is best.

# %%
Card("Q8")

# %% [markdown]
# ## 3. Is it still the same training?
#
# A minibatch in pieces, layers on four ranks, gradients that arrive in another order. Is what comes out the gradient
# of one process with the whole model and the whole minibatch?
#
# Here is a real model, and the mechanism itself. `split_layers` cuts its eight blocks into stages, and `run_schedule`
# does what a schedule says: fetch what an action needs, compute, send the result on. Its minibatch cannot even be
# cut into four equal micro-batches.

# %%
import torch
import torch.distributed as dist

from course_lib import data, launch
from course_lib.mechanisms.layerwise import split_layers
from course_lib.mechanisms.pipeline import run_schedule
from course_lib.model import GPTConfig, TinyGPT

problems, _ = data.train_test_split()
inputs, targets = next(data.minibatches(problems, 30))
shape = GPTConfig(layers=6)

# %%
def cut(model, n):
    return [model.blocks[stage.start : stage.stop] for stage in split_layers(len(model.blocks), n)]

def gradients(rank, name, micro_batches):
    model = TinyGPT(shape, dtype=torch.float64)
    schedule = SCHEDULES[name](dist.get_world_size(), micro_batches)
    run_schedule(schedule, cut(model, schedule.n_stages), inputs, targets, data.answer_loss)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

# %% [markdown]
# And the gradient we are after, from one process, here in the notebook. *Predict:* how many of its parameters will
# each rank have a gradient for? And will they agree to the last bit, up to rounding, or not at all?

# %%
model = TinyGPT(shape, dtype=torch.float64)
data.answer_loss(model(inputs), targets).backward()
whole_gradient = {name: p.grad for name, p in model.named_parameters()}

run = launch(gradients, 4, args=("gpipe", 4))
for rank, own in enumerate(run.results):
    off = max((own[name] - whole_gradient[name]).abs().max().item() for name in own)
    print(f"rank {rank}: {len(own)} of {len(whole_gradient)} parameters, the same up to rounding: {off < 1e-12}")
print("each parameter on one rank:", sum(map(len, run.results)) == len(whole_gradient))

# %% [markdown]
# It is the same gradient, so it is the same training: the pieces are weighted by their numbers of samples and added
# up, just like the shares in [data parallelism](02_data_parallelism.ipynb). Nothing here is approximate. The weights
# change only after the last micro-batch has come back, and that is why a pipeline has to drain.
#
# What travels? Between two stages only what one layer hands to the next, and its gradient on the way back:

# %%
hidden = 30 * shape.sequence * shape.hidden * 8
print(f"30 samples x {shape.sequence} characters x {shape.hidden} numbers of 8 bytes: {hidden:,} bytes")
print("sent by each rank:", [f"{run.timeline.bytes_sent(rank):,}" for rank in range(4)])
print(f"for comparison, the gradients of all parameters: {sum(g.nbytes for g in whole_gradient.values()):,} bytes")

# %% [markdown]
# Ranks 1 and 2 send activations down and gradients up, the outer ones only one of them. (The
# {{run.timeline.bytes_sent(0) - hidden}} bytes on top say once what the tensors look like.) That is little, so a
# pipeline is what one puts between machines whose network is slow.
#
# ## 4. What has to be held
#
# The backward pass of a micro-batch needs the activations of its forward pass. Until then, they have to be held.
# *Predict:* with 8 micro-batches, how many does rank 0 hold at most? And rank 3?

# %%
from lessons.L05_pipeline_parallelism.in_flight import in_flight

all_forward_first = runs[8]
in_flight(all_forward_first, title="All forward passes first: activations held")

# %% [markdown]
# All of them, on every rank. With twice the micro-batches, to make the bubble smaller, it is twice as many. (Each is
# half as large if the minibatch stays the same, so this comes to the activations of the whole minibatch, on every rank
# and always.)
#
# Does it have to be so? The last rank could send a gradient back as soon as it has finished its first forward pass.
# And so could every rank: begin with just enough forward passes to keep those behind it busy, then do one backward
# for one forward. This is called **1F1B**, one forward, one backward. *Predict:* what becomes of the bubble?

# %%
print(as_text(SCHEDULES["1f1b"](4, 8)))

# %%
one_for_one = step("1f1b", stages=4, micro_batches=8)
gantt(one_for_one, compare=all_forward_first, title="Two schedules", names=("1F1B", "all forward passes first"))

# %%
in_flight(one_for_one, title="1F1B: activations held")

# %% [markdown]
# The bubble is exactly as large: it lies elsewhere, but filling and draining take as long as ever. What changes is
# memory. Rank $r$ holds no more than $p - r$ micro-batches, *however many there are*. In bytes, counted on real ranks
# while they run the model of section 3:

# %%
from course_lib.instruments.ledger import Ledger


def activations(rank, name, micro_batches):
    stages = cut(TinyGPT(shape), 4)
    with Ledger(stages[rank]) as ledger:
        run_schedule(SCHEDULES[name](4, micro_batches), stages, inputs, targets, data.answer_loss)
    return max(sample.held.activations for sample in ledger.samples)

for name in ("gpipe", "1f1b"):
    for m in (4, 8, 16):
        most = max(launch(activations, 4, args=(name, m)).results)
        print(f"{name:<5} {m:2} micro-batches: the fullest rank holds {most:9,} bytes of activations")

# %% [markdown]
# With 1F1B, more micro-batches do not only make the bubble smaller, they also save memory, since the same number of
# smaller ones is held. (It is the usual choice since Narayanan et al. 2021.)
#
# There is another way to hold little: forget the activations inside a stage, keep its input alone, and compute forward
# a second time when the gradient comes back. This is **activation checkpointing**, or recomputation. GPipe's authors
# used it, which is why all $m$ micro-batches did fit. *Predict:* what does it leave of either schedule's bytes?

# %%
from torch.utils.checkpoint import checkpoint


class Recomputed(torch.nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        return checkpoint(self.stage, x, use_reentrant=False)

# %%
def recomputing(rank, name):
    stages = [Recomputed(stage) for stage in cut(TinyGPT(shape), 4)]
    with Ledger(stages[rank]) as ledger:
        run_schedule(SCHEDULES[name](4, 8), stages, inputs, targets, data.answer_loss)
    return max(sample.held.activations for sample in ledger.samples)

for name in ("gpipe", "1f1b"):
    kept = max(launch(activations, 4, (name, 8)).results)
    again = max(launch(recomputing, 4, (name,)).results)
    print(f"{name:<5} 8 micro-batches: {kept:9,} bytes from forward to backward, {again:7,} with recomputation")

# %% tags=["build-only"]
one = max(launch(activations, 4, ("naive", 8)).results)

# %% [markdown]
# What is left is the inputs of the micro-batches that are held. (On top come the activations of *one*, while it is
# computed again and at once used up, {{one:,}} bytes; the ledger does not see these.) The price is time. A backward
# pass takes about as long as two forward passes, so a second forward pass makes a third more to compute. With 1F1B one
# recomputes only what does not fit otherwise.
#
# ### A schedule is a list
#
# The first version is called **GPipe** (Huang et al. 2019). What makes GPipe GPipe, and 1F1B 1F1B? Nothing but the
# order in which every rank does its work:

# %%
from course_lib.schedules import Action, Schedule, ScheduleError, validate

F0, F1, B0, B1 = ("F", 0), ("F", 1), ("B", 0), ("B", 1)

def schedule_of(*ranks):
    return Schedule([[Action(op, stage, k) for op, k in row] for stage, row in enumerate(ranks)])

print(as_text(schedule_of([F0, F1, B0, B1], [F0, B0, F1, B1])))

# %% [markdown]
# You can write your own. *Predict* what is wrong with this one before you run it:

# %%
try:
    validate(schedule_of([F0, B0, F1, B1], [F0, F1, B0, B1]))
except ScheduleError as error:
    print(error)

# %% [markdown]
# Rank 0 wants a gradient of micro-batch 0 before it sends out number 1, and rank 1 wants number 1 before it sends one
# back: both would wait forever.
#
# ## 5. Filling the bubble
#
# Can there be less idle time without more micro-batches? Two ideas, and both are again nothing but other lists.
#
# **Interleaving.** Give each rank two small stages in place of one large one: rank 0 holds stages 0 and 4, rank 1
# stages 1 and 5, and so on. A micro-batch passes each rank twice. The pipeline is filled when the first *small* stages
# have been passed, which takes half as long, so the bubble is half as long. The price: more than twice as many messages
# (seven borders between eight small stages, where there were three), and more activations held at the start.
#
# **Splitting the backward pass.** It computes two things: the gradient of the stage's *input*, for which the rank
# before is waiting, and the gradients of its *weights*, for which nobody is. Do the first at once, and keep the second
# for a moment in which there is nothing else to do. This is called **zero bubble** (Qi et al. 2024): W in the list
# below, I is the other half.

# %%
print(as_text(SCHEDULES["zb_h1"](4, 6)))

# %% [markdown]
# The simulator plays any schedule on a clock, without any process. *Predict:* which has the smallest bubble, and what
# does it cost? (All parts, F, I and W, take equally long here. What comes out is **modelled**, not run. `naive` sends
# each micro-batch through all stages and back before the next one may start.)

# %%
from course_lib.planner import simulate
from course_lib.schedules import peak_in_flight

p, m = 4, 8
for name, stages_each in {"naive": 1, "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zbv": 2}.items():
    schedule, seconds = SCHEDULES[name](p * stages_each, m), 0.02 / stages_each
    idle = simulate(schedule, forward=seconds, backward=seconds, weight_grad=seconds).idle_fraction()
    peaks = [peak / stages_each for peak in peak_in_flight(schedule)]
    print(f"{name:<17} idle {idle:3.0%}; each rank holds at most {peaks} of {m} micro-batches")

# %% [markdown]
# 1F1B frees memory and asks nothing for it. Interleaving asks for some of it again on every rank, and zero bubble on
# all ranks but the first, because what W needs has to be held until W has run.
#
# Why is "zero bubble" not zero? The last rank still begins $p-1$ turns late, {{p - 1}} of
# {{simulate(SCHEDULES["zb_h1"](p, m), 1, 1, 1).makespan:.0f}}, and as long as all micro-batches enter at the same end,
# nothing can fill these turns. There are three ways out. `zbv` folds the stages into a V, two small ones on each rank,
# so the last rank begins after turns half as long. DualPipe lets micro-batches enter at *both* ends, so that the last
# rank has work at once; each rank then holds two stages, so the parameters are there in two copies. And `zb_h2`
# leaves no gaps after a rank's first action, holding up to $2p-1$ micro-batches: the first rank is done early and
# begins the next step while the others finish this one.
#
# ### Turn the knobs
#
# Every move runs a pipeline of emulated devices, on real ranks, draws it, and says how far it is from what the
# simulator predicted. The model and the minibatch stay the same. Try these:
#
# 1. Keep `gpipe`, and go from 1 to 16 micro-batches. Which part of the picture becomes smaller, and which cannot?
# 2. Switch between `gpipe` and `1f1b`, and watch what every rank holds.
# 3. Which schedule is best for 8 stages and 8 micro-batches? And for 16?
# 4. Give the last rank a third more to do, as an output layer with a large vocabulary easily does. Only one rank has
#    more: where does the time of all the others go? Does `interleaved_1f1b` lose less by it than `gpipe`?

# %%
from lessons.L05_pipeline_parallelism.explorer import PipelineExplorer

PipelineExplorer()

# %% tags=["build-only"]
from lessons.L05_pipeline_parallelism.explorer import PipelineSetting


def explored(stages, micro_batches, name, moved=0):
    return PipelineSetting(stages, micro_batches, name, moved).predict()

def idle(*setting):
    return explored(*setting).idle_fraction()

def slower(name):
    quick, slow = (simulate(SCHEDULES[name](4, 8), 1, 1, 1, transfer=seconds).makespan for seconds in (0, 0.1))
    return slow / quick - 1

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. The bubble, from {{idle(4, 1, "gpipe"):percent}} to {{idle(4, 16, "gpipe"):percent}} of the time. What the devices
#    compute stays as long as it is.
# 2. With `gpipe` every rank holds all micro-batches, however many there are. With `1f1b` the four ranks hold four,
#    three, two and one.
# 3. `zb_h1` both times. Its devices are idle for {{idle(8, 8, "zb_h1"):percent}} of the time, and the second time for
#    {{idle(8, 16, "zb_h1"):percent}}; those of `gpipe` and `1f1b` for {{idle(8, 8, "gpipe"):percent}} and
#    {{idle(8, 16, "gpipe"):percent}}.
# 4. They wait for the last rank, in every turn: with four stages, eight micro-batches and `gpipe`, a step takes
#    {{explored(4, 8, "gpipe", 2).makespan:duration}} in place of {{explored(4, 8, "gpipe").makespan:duration}}.
#    `interleaved_1f1b` has the smaller bubble, and loses as much: it takes
#    {{explored(4, 8, "interleaved_1f1b", 2).makespan:duration}} in place of
#    {{explored(4, 8, "interleaved_1f1b").makespan:duration}}.
# </details>
#
# The fourth one is worth remembering. In the middle of a step every rank goes at the pace of the slowest *rank*, and
# neither more micro-batches nor smaller stages change that. The remedy is a better cut, by what the layers cost and not
# by their number. (Llama 3's 405B has one layer less on its first and on its last rank; Llama Team 2024, section
# 3.3.2.)
#
# ## 6. How small is too small?
#
# So far small micro-batches cost nothing. Then thousands would be best, and nobody does that. Each one has a fixed
# cost, however small it is: the computation has to be started, and a message has to be sent. And a device that is made
# for large matrices is inefficient at small ones. Say a stage takes $h + c\,b$ seconds for a micro-batch of $b$
# samples. A minibatch of $B$ samples has $m = B/b$ of them, so a step takes
#
# $$T(b) \;=\; \Bigl(\frac{B}{b} + p - 1\Bigr)\,(h + c\,b)
# \;=\; \underbrace{B\,c}_{\text{computing}} \;+\; \underbrace{\frac{B\,h}{b}}_{\text{overhead}}
# \;+\; \underbrace{(p-1)(h + c\,b)}_{\text{idle}}$$
#
# The overhead falls with $b$ and the idle time grows, so there is a best size in between, at
# $b = \sqrt{B\,h\,/\,((p-1)\,c)}$.
#
# *Predict:* with the numbers at the top of the next cell, which of the sizes is best? And what is worse, micro-batches
# that are far too small, or far too large?

# %%
B, p, h, c = 32, 4, 0.008, 0.003

def seconds(b):
    return (B / b + p - 1) * (h + c * b)

for b in (1, 2, 4, 8, 16, 32):
    print(f"b = {b:2}: {1000 * seconds(b):3.0f} ms")
print(f"best size by the formula: {(B * h / ((p - 1) * c)) ** 0.5:.1f} samples")

# %% [markdown]
# By the formula, too small by some factor is as bad as too large by the same factor: one sample is about five times too
# small, and 32 are six times too large. They take {{seconds(1):duration}} and {{seconds(32):duration}}, where
# {{seconds(4):duration}} are possible. What decides between them is what the formula leaves out: a real device computes
# small matrices slowly, so that $c$ is larger for small $b$; and 1F1B holds up to $p$ micro-batches, so large ones need
# more room.
#
# Each move runs the size
# you chose on real ranks, and then the other sizes one by one. The model and the minibatch stay the same, so with more
# stages each has less to compute. (Memory counts samples of a device's own layers.) Try these:
#
# 1. Is the best size where the formula says?
# 2. Take the overhead away. Which size is best now, and why is that no contradiction?
# 3. More stages: does the best size become smaller or larger? Which part of each column grows?
# 4. Leave memory for 8 samples only. What do you pay for it?

# %%
from lessons.L05_pipeline_parallelism.explorer_micro_batches import MicroBatchExplorer

MicroBatchExplorer()

# %% tags=["build-only"]
from lessons.L05_pipeline_parallelism.explorer_micro_batches import SIZES, MicroBatchSetting

best = min(SIZES, key=seconds)

def formula(stages, overhead=h):
    return MicroBatchSetting(best, stages, overhead, memory=B).ideal

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. Yes, as near as these sizes come to it: the best is {{best}}, and the formula says {{formula(p):.1f}}.
# 2. One sample. Without a fixed cost, smaller pieces cost nothing and leave less idle time. The formula says so as
#    well: with $h = 0$ its best size is {{formula(p, overhead=0.0):g}}.
# 3. Smaller, by the formula from {{formula(2):.1f}} samples with two stages to {{formula(8):.1f}} with eight. The idle
#    part grows.
# 4. With four stages, and with the overhead, micro-batches have to be half as large as is best, and a step takes
#    {{seconds(best / 2):duration}} in place of {{seconds(best):duration}}.
# </details>
#
# ## 7. Four cases
#
# Answer in a few sentences, as you would to a colleague. Then a run shows you what happens, and you compare your answer
# with a good one, point by point.

# %%
Card("pipeline_efficiency")

# %%
Card("pipelining_gain")

# %%
Card("optimize_stages")

# %%
Card("tune_a_pipeline")

# %% [markdown]
# ## 8. The same in PyTorch
#
# In `torch.distributed.pipelining` a stage and a schedule are two things, too. These are the real ones, on our ranks,
# with the model of section 3. They take only as many of its samples as make four equal micro-batches:

# %%
inputs, targets = inputs[:28], targets[:28]

def in_pytorch(rank, schedule):
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    model = TinyGPT(shape, dtype=torch.float64)
    stage = PipelineStage(cut(model, 4)[rank], rank, num_stages=4, device=torch.device("cpu"))
    pipeline = get_schedule_class(schedule)(stage, n_microbatches=4, loss_fn=data.answer_loss)
    _ = pipeline.step(inputs) if rank == 0 else pipeline.step(target=targets)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

# %%
for name in ("gpipe", "1f1b"):
    theirs, ours = launch(in_pytorch, 4, (name,)).results, launch(gradients, 4, (name, 4)).results
    same = all(torch.equal(mine[key], other[key]) for mine, other in zip(ours, theirs, strict=True) for key in mine)
    print(f"{name:5} the same gradients as ours, to the last bit: {same}")

# %% [markdown]
# The same function runs under `torchrun --nproc-per-node 4 train.py`, with `dist.init_process_group()` before it. What
# these schedules do differently:
#
# - All micro-batches must have the same size. With 30 samples in four of them, a rank expects 8 and is sent 7, and the
#   run ends. Ours takes any sizes, and weights each by its samples.
# - Interleaving takes a list of stages: `ScheduleInterleaved1F1B([stage_0, stage_4], ...)` on rank 0, and so on.
# - A schedule is also a list there, and with `ScheduleZBVZeroBubble` and others it has I and W.
#
# The file to read is `torch/distributed/pipelining/schedules.py`, from `Schedule1F1B._step_microbatches` on.
#
# ## What you know now
#
# - A stage passes a micro-batch on and starts the next at once. The gradients are those of one process, up to
#   rounding.
# - Filling and draining leave a bubble of $(p-1)/(m+p-1)$: more micro-batches make it smaller, more stages larger.
# - GPipe and 1F1B have the same bubble. GPipe holds all $m$ micro-batches, 1F1B at most $p$.
# - Interleaving and zero-bubble schedules make the bubble smaller, for more messages or more memory. They do not cure
#   an uneven cut.
# - The size of a micro-batch has an optimum: overhead grows below it, idle time and memory above.
# - All wait for the slowest stage, in every turn.
#
# ### When it stops being true
#
# - **The stages are uneven.** The formula counts turns of equal length. An embedding, an output layer or a sequence
#   length that varies makes one of them longer, and that one sets the pace.
# - **The minibatch is small.** There are never more micro-batches than samples, and training limits the minibatch. With
#   64 stages and 64 samples the bubble is half of the time.
# - **Messages are slow.** GPipe hides them: with eight micro-batches on four stages, messages of a tenth of a forward
#   pass make its step {{slower("gpipe"):percent}} longer, filling and draining. In 1F1B a rank soon needs what its
#   neighbor has just sent, so every message delays somebody, and it is {{slower("1f1b"):percent}}. (With
#   interleaved stages there is other work in the meantime, and Megatron hides messages behind it.)
# - **Other things wait, too.** To clip gradients one needs their norm over all stages, so no rank may update before the
#   last is done. And ZeRO-2 and ZeRO-3 combine badly with micro-batches: they reduce or gather in each of the $m$
#   passes what plain data parallelism sends once a step. So pipelines are joined to ZeRO-1.
# - **The weights change in between.** Some systems do not drain and update as they go (Narayanan et al. 2019,
#   PipeDream). There is no bubble then, and it is no longer the same training.
#
# ### Further reading
#
# - Huang et al. 2019, *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, NeurIPS.
# - Narayanan et al. 2019, *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP: 1F1B, without draining.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC: 1F1B
#   that drains, interleaving, and how to choose the size of a micro-batch.
# - Qi et al. 2024, *Zero Bubble Pipeline Parallelism*, ICLR.
# - DeepSeek-AI 2024, *DeepSeek-V3 Technical Report*, section 3.2.1: DualPipe, and what it hides.
#
# **Next:** the [exercise](../exercises/05_pipeline_parallelism/05_pipeline_parallelism.ipynb). Write GPipe and 1F1B
# yourself, and the ranks that run them. Then [tensor parallelism](06_tensor_parallelism.ipynb), where all ranks work on
# the same layer at the same time.
