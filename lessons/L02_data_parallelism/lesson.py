# %% [markdown]
# # Data parallelism
#
# **What you do:** train one model on four processes, find out whether that is the same training as on one, and why
# more and more workers bring less and less.<br>
# **Afterwards you can:** split a minibatch so that training stays the same, say what every worker sends, and
# how many workers are worth having.<br>
# **Time:** 65 minutes, and 20 more for the three cases in section 7.<br>
# **You need:** [Start here](00_start_here.ipynb), and one PyTorch model that you have trained yourself.
#
# Every part asks you something first. Decide on an answer before you run the next cell, even if it is a guess: you
# will see more in what follows. (This page comes with its results. To hide them until you get there, choose *Clear
# Outputs of All Cells* in the *Edit* menu.)
#
# ## 1. Many hands
#
# A model learns from a **minibatch**, a small part of the examples at a time. Ours are sums of two numbers, written as
# text. The model reads `37+48=` and should write `085`.

# %%
from course_lib import data

problems, unseen = data.train_test_split()
print([data.solution(problem) for problem in problems[25:30]])
print(len(problems), "sums to learn from, and", len(unseen), "to test with, never seen before")

# %% [markdown]
# You have several workers, and all of them are to train one model at the same time. There are two things to share out:
# the samples of each minibatch, and the model.
#
# ### Question: what does each worker get?
#
# Choose an answer and commit to it. Then it is run, whichever it is, and you see what happens. Try the wrong ones
# as well: not all of them fail. *Other numbers* asks the same of another case.

# %%
from lessons import Card

Card("Q4")

# %% [markdown]
# (Your answers are kept, also when you close the notebook. `python3 course.py progress` shows them.)
#
# ### Shares
#
# *Predict:* a minibatch has 12 samples, and there are four workers. Which samples does each of them get?

# %%
import torch

from course_lib.mechanisms import batches

batches.split(torch.arange(12), 4)

# %% [markdown]
# Every sample goes to exactly one worker.
#
# Now four real ranks do it. Each builds the whole model, takes its share and computes the loss on it.

# %%
import torch.distributed as dist

from course_lib import launch
from course_lib.model import TinyGPT
from course_lib.timeline import compute

minibatch = next(data.minibatches(problems, 512))

def work_on_share(rank):
    model = TinyGPT()
    inputs, targets = batches.split(minibatch, dist.get_world_size())[rank]
    with compute("forward"):
        data.answer_loss(model(inputs), targets)
    return f"{len(inputs)} samples, {sum(p.numel() for p in model.parameters()):,} parameters"

run = launch(work_on_share, world_size=4)
run.results

# %% [markdown]
# And here is a whole training step of four such ranks. A row is one kind of thing that a rank holds, and its blocks are
# all there is of it. *Play* it: the space bar starts and stops, and the arrow keys go from event to event.

# %%
from course_lib.classroom.runs.holding import held_step
from course_lib.classroom.widgets import play
from course_lib.figures.holdings import holdings
from course_lib.mechanisms.data_parallel import DataParallel


def replicate(model):
    replica = DataParallel(model, bucket_mb=0.2)
    return replica, torch.optim.AdamW(replica.parameters()), replica.finish

play(holdings(*held_step(replicate), title="Who holds what?"))

# %% [markdown]
# This is **data parallelism**: the data are split, the model is not. Every rank holds a full copy of the model, a
# **replica**, and works on its own share while the others work on theirs. Only gradients travel. (They travel while the
# backward pass goes on, a part of the model at a time; section 6 comes back to that.)
#
# ## 2. Is it still the same training?
#
# Every worker now has a gradient of its own, each from its own samples. One process with the whole minibatch would have
# one.
#
# ### Question: eight gradients, and then?
#
# Each option trains eight replicas for a few steps. They are compared with each other, and with one process that had
# the whole minibatch in every step. (In 64-bit numbers, so that no difference can be blamed on rounding.) Try all four
# in the end: what is wrong can look right.

# %%
Card("Q1")

# %% [markdown]
# *Predict:* how exactly do four gradients make one? Is it their sum, their mean, or is any of them enough?
#
# First the gradient we are after, computed by one process, here in the notebook:

# %%
def gradient(inputs, targets, model=None):
    model = model or TinyGPT()
    model.zero_grad()
    data.answer_loss(model(inputs), targets).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

whole = gradient(*minibatch)

# %% [markdown]
# Then the candidates. Each of four ranks computes the gradient of its share, and an all-reduce adds up all four.

# %%
def own_and_sum(rank):
    own = gradient(*batches.split(minibatch, 4)[rank])
    total = own.clone()
    dist.all_reduce(total)
    return own, total

own, total = launch(own_and_sum, world_size=4).results[0]

# %%
rounding = minibatch[1].numel() * torch.finfo(torch.float32).eps

def compare(name, candidate):
    difference = ((candidate - whole).abs().max() / whole.abs().max()).item()
    is_same = difference < rounding
    print(f"{name:<18}", "the same, up to rounding" if is_same else f"off by {difference:.0%}")

compare("one of the four", own)
compare("sum of the four", total)
compare("mean of the four", total / 4)

# %% [markdown]
# It is the **mean**. The loss of a minibatch is the mean over its samples, so its gradient is the mean of theirs; and
# with equal shares, the mean of the shares' means is the mean of everything:
#
# $$\nabla L \;=\; \frac{1}{B}\sum_{i=1}^{B}\nabla \ell_i
# \;=\; \frac{1}{N}\sum_{r=0}^{N-1} g_r
# \qquad\text{with}\qquad g_r = \frac{N}{B}\sum_{i\,\in\,\text{share}\;r}\nabla \ell_i$$
#
# for $B$ samples on $N$ ranks, where $g_r$ is the gradient that rank $r$ computes.
#
# The middle of this formula is another way to do it: each rank computes the gradient of the *sum* over its samples, the
# all-reduce adds up these sums, and one division by $B$ comes last. A sum goes with a sum, a mean with a mean:

# %%
def summed(rank):
    inputs, targets = batches.split(minibatch, 4)[rank]
    total = len(inputs) * gradient(inputs, targets)  # of the sum of the losses, not of their mean
    dist.all_reduce(total)
    return total

compare("sum of sums, / B", launch(summed, world_size=4).results[0] / len(minibatch[0]))

# %% [markdown]
# *Up to rounding* has a meaning here. The same numbers were added in another order, and a 32-bit number keeps about
# seven digits, so the last one may differ. `rounding` allows one `eps` for each number in the sum. That is no bound
# (add 1, a hundred million and minus a hundred million, and the 1 may be lost), but gradients stay well below it, and
# it is far smaller than what any wrong idea is off by.
#
# ### Open case: ten samples, four workers
#
# And if the samples cannot be shared out equally? Here is a case to answer in your own words; then you see the run
# behind it, and a model answer to compare yours with.

# %%
Card("data_distribution")

# %% [markdown]
# Here is the same for the first ten samples of our own minibatch, shared out as above. (The samples and the
# model are not those of the card, so the percentage differs. The cell and what it printed are folded away, so that you
# can answer first: choose the three dots to open them, or select the cell and press the space bar.)

# %% jupyter={"outputs_hidden": true, "source_hidden": true}
from course_lib.mechanisms.data_parallel import average_gradients

ten_samples = tuple(tensor[:10] for tensor in minibatch)
whole = gradient(*ten_samples)

def averaged(rank, is_weighted):
    model = TinyGPT()
    inputs, targets = batches.split(ten_samples, 4)[rank]
    data.answer_loss(model(inputs), targets).backward()
    average_gradients(model, samples=len(inputs) if is_weighted else None)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

compare("plain mean", launch(averaged, 4, args=(False,)).results[0])
compare("weighted mean", launch(averaged, 4, args=(True,)).results[0])

# %% [markdown]
# <details><summary>What it shows</summary>
#
# The mean of means needs equal shares. In the plain mean, a sample from a share of two counts one and a half times as
# much as one from a share of three. With each gradient weighted by the size of its share, all samples count the same
# again.
#
# </details>
#
# `average_gradients` is the whole mechanism: an all-reduce for each parameter, and a division. You will build it
# yourself in the [exercise](../exercises/02_data_parallelism/02_data_parallelism.ipynb).
#
# ## 3. Four processes train one model
#
# Now the real thing. `DataParallel` makes the replicas equal at the start, whatever each rank began with. In `finish()`
# the gradients are averaged. The rest is the training loop you know, with `compute` marks for the
# picture.

# %%
from course_lib.classroom.runs.training import shares


def train_step(replica, optimizer, inputs, targets):
    with compute("forward"):
        loss = data.answer_loss(replica(inputs), targets)
    with compute("backward"):
        loss.backward()
    replica.finish()
    with compute("optimizer"):
        optimizer.step()
        optimizer.zero_grad()

# %%
def train(rank, steps, dtype=torch.float32):
    replica = DataParallel(TinyGPT(seed=rank, dtype=dtype), overlap=False)  # what overlap is comes later
    optimizer = torch.optim.AdamW(replica.parameters(), lr=2e-3)
    for step, share in enumerate(shares(rank, 256, steps), start=1):  # this rank's share of each minibatch
        if step == steps:
            dist.barrier()  # all begin the last step together: there will be a picture of it
        train_step(replica, optimizer, *share)
        if step % 50 == 0:
            show_progress(rank, step, replica.module)
    return replica.module.state_dict()

# %% tags=["build-only"]
from collections import Counter

((commonest, times),) = Counter(a + b for a, b in [*problems, *unseen]).most_common(1)

# %% [markdown]
# The test is done in parallel too: each rank answers its share of the unseen sums, and an all-reduce adds up how many
# are right. *Predict:* always answering `{{commonest}}`, the commonest sum, is right one time in
# {{(len(problems) + len(unseen)) / times:.0f}}. How good will the model be after 300 steps?

# %%
def show_progress(rank, step, model):
    share = unseen[rank :: dist.get_world_size()]
    right = torch.tensor(data.share_right(model, share) * len(share))
    dist.all_reduce(right)
    if rank == 0:
        (answer,) = data.complete(model, unseen[20:21])
        print(f"step {step:3}: {right.item() / len(unseen):4.0%} of unseen sums right; {answer}")

# %% tags=["nbval-ignore-output"]
run = launch(train, world_size=4, args=(300,), timeout=300)

# %% [markdown]
# Four processes have taught one model to add. Three things you want to know about any such run:
#
# **Is it right?** The replicas began equal, they got the same gradient in every step, and did the same arithmetic with
# it. The **update rule** is the usual one, with the same mean on every rank. In plain gradient descent with learning
# rate $\eta$ it is this; AdamW puts the same mean into a rule of its own:
#
# $$w \;\leftarrow\; w - \eta \cdot \frac{1}{N}\sum_{r=0}^{N-1} g_r$$
#
# So they should be equal to the last bit, although no weights were sent after the start. And they should be good at
# sums they never saw:

# %%
def rebuilt(state):
    model = TinyGPT()
    model.load_state_dict(state)
    return model

def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

def distance(replicas, other):
    return max((replica - other).abs().max().item() for replica in replicas)

models = [rebuilt(state) for state in run.results]
replicas = [weights_of(model) for model in models]
print("four equal replicas:", distance(replicas, replicas[0]) == 0)
print("over 90% right:", data.share_right(models[0], unseen) > 0.9)

# %% [markdown]
# And is it the training that one process would have done with the whole minibatch? The same function on one rank is
# that process. Compared after a few steps, in 64-bit numbers:

# %%
four = launch(train, world_size=4, args=(20, torch.float64)).results[0]
one = launch(train, world_size=1, args=(20, torch.float64)).results[0]
difference = max((four[name] - one[name]).abs().max().item() for name in one)
print("the same as one process, up to rounding:", difference < 1e-9)

# %% [markdown]
# **Who waited?** Here is the last of a few steps:

# %% tags=["nbval-ignore-output"]
from course_lib.classroom.runs import after_barrier
from course_lib.figures import gantt

last = after_barrier(launch(train, world_size=4, args=(20,)).timeline)
gantt(last, title="One training step of four ranks")

# %% [markdown]
# Forward, backward, then the gradients travel, then everyone updates its weights. If you see ranks that wait, that is
# your computer: four processes share its cores, some come late, and an all-reduce ends for nobody until the last one
# has arrived.
#
# **What does it cost?** The timeline also knows how much each rank sends:

# %%
parameters = sum(parameter.numel() for parameter in models[0].parameters())
print(f"gradients: {parameters:,} numbers of 4 bytes are {4 * parameters:,} bytes")
print(f"sent by each rank in one step, if the all-reduce is a ring: {last.bytes_sent(0):,} bytes")

# %% [markdown]
# {{last.bytes_sent(0) / (4 * parameters):.1f}} times the gradients, although each rank needs something from three
# others. (The few bytes on top count the samples of each share.) Will it be three times as much with seven others?
#
# A good way to do it is a **ring**. Each rank cuts its gradients into $N$ pieces and passes one piece at a
# time to its neighbor, once around to add them up and once more to hand out the sums. *Predict* what that costs:

# %%
Card("bytes_sent")

# %% [markdown]
# Here is a ring made of nothing but sends and receives. A slot in a rank is a piece of its gradients, and a pie in it
# is a sum: each wedge points to a rank whose numbers are in it. Choose *Play*: the pieces go from neighbor to neighbor,
# and the pies fill. The space bar stops them, and arrows go on step by step. After the first trip around, each rank has
# one piece with all eight in it. (All of this was really sent: each number says whose it is.)

# %%
from course_lib.classroom.widgets.collectives import collective_explorer

collective_explorer("ring all-reduce", ranks=8)

# %% [markdown]
# Now count what each rank sends, for other numbers of ranks and for your gradients:

# %%
from course_lib.mechanisms.collectives import ring_all_reduce


def ring(rank):
    ring_all_reduce(torch.ones(parameters))

for n in (2, 4, 8, 16):
    sent = launch(ring, n).timeline.bytes_sent(0)
    print(f"{n:2} ranks: each sends {sent:9,} bytes, {sent / (4 * parameters):.3f} times the gradients")

# %% [markdown]
# It is $2(N-1)/N$ times the size $G$ of the gradients: less than twice, even with a thousand ranks. As long as the
# ranks do all the adding themselves, they cannot all send less (Patarasuk and Yuan 2009). So this is also how the
# timeline counts an all-reduce of `torch.distributed`: by this formula, whatever went over the wires. (Some networks
# have switches that can add. Then each rank sends its gradients only once; Graham et al. 2016.)
#
# And memory? Each replica holds its weights, their gradients, and two more numbers for each weight that AdamW keeps.
# *Predict:* how much of that does each of four ranks save?

# %%
from course_lib.instruments.ledger import count


def bytes_held(rank):
    replica = DataParallel(TinyGPT())
    optimizer = torch.optim.AdamW(replica.parameters())
    inputs, targets = batches.split(minibatch, dist.get_world_size())[rank]
    data.answer_loss(replica(inputs), targets).backward()
    replica.finish()
    optimizer.step()
    return count(replica, optimizer).total

for n in (1, 4):
    print(f"on {n}:", *(f"{held:,} bytes" for held in launch(bytes_held, n).results))

# %% [markdown]
# Nothing: a replica is a whole model. Data parallelism makes training faster; it does not make a model fit. (What
# shrinks are the activations, since a share has fewer samples.)
#
# ## 4. The order of things
#
# ### Question: one step, in order
#
# Your order becomes a program, and real ranks follow it for a few steps: are the replicas still equal, and is it the
# training of one process?

# %%
Card("Q2")

# %% [markdown]
# Here are four orders that people write. *Predict* for each what goes wrong, then let the card run it:
#
# 1. all_reduce after update
# 2. all_reduce before backward
# 3. clear between backward and update
# 4. forward before split
#
# <details><summary>What you should see</summary>
#
# 1. Each replica takes its own step, before the mean is there. The replicas **drift**.
# 2. There are no gradients yet, so nothing is averaged. It ends just like the first.
# 3. The replicas stay equal, but the update finds no gradient: nobody learns anything.
# 4. There is nothing to compute on yet, and the error says so.
# </details>
#
# Do drifting replicas come together again? *Predict:* how far are they apart after 80 steps, compared with 5?

# %%
from lessons.L02_data_parallelism.step_order import follow

order = ("split", "forward", "backward", "update", "all_reduce", "clear")
replicas = launch(follow, 4, args=(order, 4, 80)).results
for step in (1, 5, 20, 80):
    apart = distance([history[step - 1] for history in replicas], replicas[0][step - 1])
    print(f"after step {step:2} the replicas are {apart:.3f} apart")

# %% [markdown]
# They do not: the longer they train, the further apart they are.
#
# In a correct order, `split`, `forward`, `backward`, `all_reduce`, `update` leave no choice. `clear` may also come
# first, second or third: what matters is that it lies between an update and the next backward pass.
#
# ## 5. Four times as fast?
#
# ### Question: eight are fine, sixteen are not
#
# Each answer takes its suspect away and measures again, on a cluster with a fast link inside each machine and a slower
# one between them.

# %%
Card("Q3")

# %% [markdown]
# How many times as fast $N$ ranks are as one is called the **speed-up**. If $T_N$ is the time of a step on $N$ ranks,
#
# $$S_N \;=\; \frac{T_1}{T_N} \qquad\text{and ideally}\qquad T_N = \frac{T_1}{N}, \quad S_N = N$$
#
# The ideal has two conditions. *All* of the work can be shared out, half of it for each of two ranks, a quarter for
# each of four; and nothing is added to it. A step of data parallelism meets neither: every rank does the whole update,
# and gradients have to travel. *Predict:* how many times as fast are 8 ranks really?
#
# Your computer has a few cores, so eight ranks on it cannot compute at the same time. Therefore this part is
# **emulated**: the processes, their messages and gradients are real, but each rank carries a clock of its own. What it
# computes moves that clock by the time that a device of a given speed would take, and a message by the time that a link
# of a given speed would. Nothing really takes that long, and it comes out the same on every computer.

# %%
from course_lib import Link, Pace
from course_lib.classroom.runs import training_step

device = {"forward": 0.004, "backward": 0.008, "optimizer": 0.004}
pace = Pace(device, link=Link(latency=0.001, bandwidth=2.5e6))
ranks = (1, 2, 4, 8)
emulated = [training_step(n, batch_size=64, pace=pace, overlap=False) for n in ranks]

# %% [markdown]
# These devices need {{device["forward"]:duration}} for a sample's forward pass, {{device["backward"]:duration}} for its
# backward pass, and {{device["optimizer"]:duration}} for an update. Links carry {{pace.link.bandwidth:data_size}} per
# second, and every message takes {{pace.link.latency:duration}} on top. (Real devices and links are many thousands of
# times as fast, and real models many thousands of times as large. What counts is the ratio.)
#
# Beside it, what your computer does at its own speed, with a larger model. Two lines, and the ideal:

# %% tags=["nbval-ignore-output"]
from course_lib.figures import Timing, lost_time, speed_up
from course_lib.model import GPTConfig

measured = [training_step(n, batch_size=512, config=GPTConfig()) for n in ranks for _ in range(5)]  # medians count
speed_up([Timing.of(step) for step in emulated + measured], title="More ranks, more speed?")

# %% [markdown]
# Both bend away from the ideal. The measured line does so as soon as there are more ranks than cores, or earlier. The
# emulated line has a device for each rank, and still bends. Where does its time go?

# %%
lost_time({f"N = {step.world_size}": step for step in emulated}, title="Where it goes")

# %% [markdown]
# The share of time spent on communication grows with every rank. There is more of it; but above all there is less
# computing beside it. Gradients are computed in shares, the all-reduce and the update are not. With $C$ for the time in
# which one rank computes the gradients of the whole minibatch, $U$ for an update, $G$ bytes of gradients, and a link of
# bandwidth $\beta$ and latency $\alpha$ (what each message takes on top),
#
# $$T_N \;=\; \frac{C}{N} \;+\; U \;+\; 2\,\frac{N-1}{N}\cdot\frac{G}{\beta} \;+\; 2\,(N-1)\,\alpha$$
#
# The first term falls with $N$, the second stays. The third grows, but is never twice what it was with two ranks; the
# last one grows without limit. Here are all four, beside what the emulated clocks say:

# %%
G = emulated[1].bytes_sent(0)  # with two ranks, each sends as many bytes as are to be averaged
for step in emulated:
    n = step.world_size
    terms = 64 * 0.012 / n, 0.004, 2 * (n - 1) / n * G / 2.5e6, 2 * (n - 1) * 0.001
    parts = " + ".join(f"{1000 * seconds:5.1f}" for seconds in terms)
    print(f"N = {n}: {parts} = {1000 * sum(terms):5.1f} ms, emulated {1000 * step.makespan:5.1f} ms")

# %% [markdown]
# ### Or a larger minibatch for more ranks
#
# So far the minibatch stayed the same, and each share became smaller. That is **strong scaling**. One can also keep the
# share and let the minibatch grow with the ranks, which is **weak scaling**. *Predict:* how many times as many samples
# per second do 8 ranks manage then, with 64 samples for each?

# %%
weak = [training_step(n, batch_size=64 * n, pace=pace, overlap=False) for n in ranks]
timings = [Timing.of(step, label="same minibatch") for step in emulated]
timings += [Timing.of(step, work=step.world_size, label="same share") for step in weak]
speed_up(timings, title="Samples per second, beside one rank")

# %% tags=["build-only"]
per_second = 8 * weak[0].makespan / weak[-1].makespan

# %% [markdown]
# {{per_second:.1f}} times. Thousands of devices are used like this. But it is another training, with 8 times the
# samples in each step. Is such a step worth 8 steps? The gradient of a minibatch is an estimate of the gradient of all
# data. As long as it is rough, twice the samples save nearly half of the steps; once it is good, more samples save next
# to nothing. In between lies the **critical batch size**.
#
# One can estimate it from what the ranks have anyway: how large the gradients of small shares are, and how large their
# mean is. From these two follow the size of the true gradient and that of the noise around it. Their ratio, in samples,
# is the **noise scale** (McCandlish et al. 2018, appendix A). *Predict:* is it larger before the training or after it?

# %%
def noise_scale(model, n=16):
    own = torch.stack([gradient(*share, model) for share in batches.split(minibatch, n)])
    large = len(minibatch[0])
    small = large // n
    of_small, of_large = own.square().sum(1).mean(), own.mean(0).square().sum()
    true = (large * of_large - small * of_small) / (large - small)
    noise = (of_small - of_large) / (1 / small - 1 / large)
    return (noise / true).item()

# %% tags=["nbval-ignore-output"]
print(f"untrained: {noise_scale(TinyGPT()):.0f} samples, after 300 steps: {noise_scale(models[0]):.0f} samples")

# %% [markdown]
# After it: the better a model is, the less its samples agree on what to change. (Our own minibatch is larger than
# either, so for this model most of it is wasted.) So a larger minibatch pays later in the training. Llama 3's 405B
# began with 4 million tokens and ended with 16 million (Llama Team 2024, section 3.4.1).
#
# ## 6. Turn the knobs
#
# Faster links are one remedy, and the most expensive one. A larger minibatch is another. The third is to hide the
# exchange: the backward pass begins at the last layer, so the gradients of the last layers are ready while those of the
# first are still being computed. `DataParallel` collects them in **buckets** and sends each as soon as it is full. That
# is called **overlap**.
#
# Every move of a control runs one step of emulated devices, on real ranks, and draws it. Try these:
#
# 1. Take 8 ranks and the slowest link. Which one of the other controls helps the speed-up most?
# 2. Switch overlap off and on, and watch the thin lane under each rank. It shows what travels in the background.
# 3. Make the batch as small as it goes. Are 8 ranks faster than 4? Which term of the formula is to blame?
# 4. How close to 8 times can you get with 8 ranks, and what is the slowest link that still gets you near it?

# %%
from lessons.L02_data_parallelism.explorer import DataParallelExplorer

DataParallelExplorer()

# %% tags=["build-only"]
from lessons.L02_data_parallelism.explorer import BATCH_SIZES, LINK_SPEEDS, DataParallelSetting

(small, usual, large), (_, link, _, enough, fastest) = BATCH_SIZES, LINK_SPEEDS

def step_time(*setting):
    return DataParallelSetting(*setting).run().makespan

def faster(samples, link):
    return step_time(1, samples, link, True) / step_time(8, samples, link, True)

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. A larger batch, by far. With {{large}} samples in place of {{usual}}, eight ranks are {{faster(large, 2):.1f}}
#    times as fast as one, rather than {{faster(usual, 2):.1f}} times. Overlap can hide little here, since the link is
#    busy for longer than the ranks compute.
# 2. With overlap, the first buckets are on their way while the backward pass goes on. With four ranks, {{usual}}
#    samples and a link of {{link}} MB/s, a step takes {{step_time(4, usual, link, True):duration}} in place of
#    {{step_time(4, usual, link, False):duration}}. But each bucket goes around the ring by itself and pays for its own
#    messages. Where there is little to compute, that costs more than it hides.
# 3. With overlap they are slower than four, whatever the link. Without it they are faster: with the fastest link a step
#    takes {{step_time(8, small, fastest, False):duration}} in place of {{step_time(4, small, fastest,
#    False):duration}}, and with overlap {{step_time(8, small, fastest, True):duration}}. The last term is to blame:
#    each exchange is {{2 * (8 - 1)}} messages, one after the other, and overlap makes three exchanges of one.
# 4. {{faster(large, max(LINK_SPEEDS)):.1f}} times, with {{large}} samples, overlap and the fastest link. A link of
#    {{enough}} MB/s still gives {{faster(large, enough):.1f}} times.
# </details>
#
# ## 7. Three cases
#
# For another day, or for a room to discuss: answer in your own words, then compare with the run and a model answer.

# %%
Card("find_the_flaw")

# %%
Card("ideal_speed_up")

# %%
Card("evaluate_replicas")

# %% [markdown]
# ## 8. The same in PyTorch
#
# PyTorch has two tools for this. `DistributedSampler` says which samples are a rank's, and `DistributedDataParallel`
# averages the gradients while the backward pass goes on. *Predict:* 512 samples on four ranks, then 10. Is what comes
# out the gradient of one process?

# %%
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def in_pytorch(rank, samples):
    replica = DistributedDataParallel(TinyGPT(seed=rank))  # all ranks get the weights of rank 0
    mine = list(DistributedSampler(range(samples), shuffle=False))
    inputs, targets = (tensor[mine] for tensor in minibatch)
    data.answer_loss(replica(inputs), targets).backward()
    return mine, torch.cat([parameter.grad.flatten() for parameter in replica.parameters()])

# %%
for samples in (512, 10):
    results = launch(in_pytorch, 4, (samples,)).results
    whole = gradient(*(tensor[:samples] for tensor in minibatch))
    print("they take", *(mine[:3] for mine, _ in results), "..." if samples > 12 else "")
    compare(f"{samples} samples", results[0][1])

# %% [markdown]
# With 512 samples it is. With 10 the sampler **pads**: every rank is to have three, so it begins again at the front,
# and samples 0 and 1 count twice. (With `drop_last=True` it leaves two out instead.) And if you give the ranks shares
# of 3, 3, 2 and 2, as in section 2? `DistributedDataParallel` averages over *ranks*, so that is the plain mean again.
#
# A rank with little memory can take its share in portions and add up their gradients. This is called
# **gradient accumulation**, and `no_sync` keeps the ranks from averaging after each portion:

# %%
from contextlib import nullcontext


def in_portions(rank):
    replica = DistributedDataParallel(TinyGPT(seed=rank))
    portions = zip(*(tensor.chunk(4) for tensor in batches.split(minibatch, 4)[rank]), strict=True)
    for number, (inputs, targets) in enumerate(portions, start=1):
        with replica.no_sync() if number < 4 else nullcontext():
            (data.answer_loss(replica(inputs), targets) / 4).backward()
    return torch.cat([parameter.grad.flatten() for parameter in replica.parameters()])

# %%
run, whole = launch(in_portions, 4), gradient(*minibatch)
compare("four portions", run.results[0])
print("all-reduces:", sum(span.name == "all_reduce" for span in run.timeline.of(0)))

# %% [markdown]
# The same functions run on a cluster. Put them into `train.py`, with `dist.init_process_group()` before the first and
# `rank = dist.get_rank()` in place of `launch`, and start it with `torchrun --nproc-per-node 4 train.py`. What
# `DistributedDataParallel` does differently from ours:
#
# - It averages over ranks as if all shares had the same size. Ours counts each by its samples.
# - `backward()` returns when all gradients are averaged. Ours asks you to call `finish()`.
# - A parameter that takes no part in the loss is an error in the next step, unless you say
#   `find_unused_parameters=True`.
#
# The file to read is `torch/nn/parallel/distributed.py`. It hands the buckets to code in C++, the `Reducer`.
#
# ## What you know now
#
# - Each rank holds the whole model and computes on its share. The mean of the gradients, weighted by the shares, is
#   the gradient of the minibatch, up to rounding.
# - One all-reduce in each step, after the backward pass and before the update, keeps the replicas equal.
# - Each rank sends $2(N-1)/N$ times the size of the gradients in every step: less than twice, however many ranks there
#   are.
# - Ideally, $N$ ranks are $N$ times as fast. Computing shrinks with their number, communication and the update do not.
#   That is where the speed-up ends; a minibatch that grows with the ranks goes on, up to the critical batch size.
#
# ### When it stops being true
#
# - **The minibatch runs out.** With as many ranks as samples there is nothing left to split. A larger minibatch gives
#   more ranks work, but changes what is learned, and beyond the critical batch size the new samples are wasted. The
#   learning rate has to grow with it: in proportion for plain gradient descent (Goyal et al. 2017), like the square
#   root for Adam (Malladi et al. 2022).
# - **The model does not fit.** Every rank needs all of it. The next lessons divide what a replica holds, and then the
#   model itself.
# - **One rank is slow.** All wait for it, in every step.
#
# ### Further reading
#
# - Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 13(12): buckets
#   and overlap, as PyTorch does them.
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, Journal of
#   Parallel and Distributed Computing 69(2): why ranks that do all the adding cannot all send less than in a ring.
# - Graham et al. 2016, *Scalable Hierarchical Aggregation Protocol (SHArP): A Hardware Architecture for Efficient Data
#   Reduction*, COM-HPC: switches that add.
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, arXiv:1706.02677.
# - McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, arXiv:1812.06162: the critical batch size.
# - Malladi et al. 2022, *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*, NeurIPS.
#
# **Next:** the [exercise](../exercises/02_data_parallelism/02_data_parallelism.ipynb). Split a batch, average
# gradients and build the ring yourself; a check runs your functions on real ranks. Then
# [sharded data parallelism](03_sharded_data_parallelism.ipynb).
