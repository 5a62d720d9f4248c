# %% [markdown]
# # Tensor parallelism
#
# **What you do:** cut the matrices of a transformer so that all ranks work on every layer at the same time, find the
# places where they have to talk, and see what it costs when they are far apart.<br>
# **Afterwards you can:** cut a layer so that it computes the same, count what that sends, and say how many
# tensor ranks to use, and where.<br>
# **Time:** 45 minutes.<br>
# **You need:** to know what a matrix product is; [Data parallelism](02_data_parallelism.ipynb); reduce-scatter and
# all-gather from [Sharded data parallelism](03_sharded_data_parallelism.ipynb); and for section 9 stages, micro-batches
# and the bubble from [Pipeline parallelism](05_pipeline_parallelism.ipynb).
#
# Every part asks you something first. Decide on an answer before you run the next cell, even if it is a guess: you
# will see more in what follows. (This page comes with its results. To hide them until you get there, choose *Clear
# Outputs of All Cells* in the *Edit* menu.)
#
# ## 1. One matrix, two workers
#
# A replica needs the whole model. Stages of whole layers need only a part of it, but they take turns, unless
# micro-batches fill the gaps. Can two ranks work on *one* layer at the same time, each holding half of it? Take its
# matrix, and a pair of scissors:

# %%
import torch

torch.manual_seed(0)
x, A = torch.randn(3, 4), torch.randn(4, 6)
for name, dim in (("by columns", 1), ("by rows", 0)):
    print(name, [list(share.shape) for share in A.chunk(2, dim)])

# %% [markdown]
# There are two ways. *Predict* for each: to compute its part of the product $xA$, does a rank need all of $x$? And how
# do you get $xA$ from the two parts: put them side by side, or add them up?

# %%
def compare(name, result, whole):
    difference = (result - whole).abs().max() / whole.abs().max()
    print(f"{name:<28}", "the same, up to rounding" if difference < 1e-5 else f"off by {difference:.0%}")

whole = x @ A
left, right = A.chunk(2, dim=1)
compare("columns, side by side", torch.cat([x @ left, x @ right], dim=1), whole)
upper, lower = A.chunk(2, dim=0)
x_left, x_right = x.chunk(2, dim=1)
compare("rows, added up", x_left @ upper + x_right @ lower, whole)

# %% tags=["build-only"]
from course_lib.model import GPTConfig

wider = GPTConfig().ffn_width / GPTConfig().hidden

# %% [markdown]
# | cut | a rank needs | a rank gets | the whole is |
# |---|---|---|---|
# | **by columns** | all of $x$ | some columns of the result, finished values | its parts side by side |
# | **by rows** | only its columns of $x$ | a **partial sum** for every number of the result | the sum of the parts |
#
# The second one gives you an idea of what will travel: a sum over ranks is an all-reduce.
#
# ## 2. Two matrices
#
# A transformer's MLP has two of them, with a function in between that works on each number alone:
#
# $$y = \mathrm{gelu}(u)\,B \qquad\text{with}\qquad u = xA$$
#
# $A$ makes $x$ {{wider:in_words}} times as wide, $B$ makes it narrow again. Both are to be shared by all ranks. Each
# can be cut in two ways, so there are four combinations.
#
# ### Question: which cuts?
#
# Whatever you choose is run on real ranks, and what they send is counted. (For a collective, such as an all-reduce, the
# timeline counts what each rank sends if it goes around in a ring.) Try the others, too.

# %%
from lessons import Card

Card("which_cut")

# %% [markdown]
# Here is that cut with layers you can use in a model of your own. They are made from the whole layers, and each rank
# keeps its share. (PyTorch's `Linear` stores a matrix as [outputs, inputs], so its *columns* in our formula are the
# first dimension.) The cell is folded away: answer first, then choose its three dots to open it, or select it and press
# the space bar.

# %% jupyter={"source_hidden": true}
import torch.nn.functional as F

from course_lib import launch
from course_lib.mechanisms.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from course_lib.model import MLP, GPTConfig


def cut_mlp(rank):
    torch.manual_seed(0)
    mlp, x = MLP(GPTConfig(hidden=64)), torch.randn(32, 16, 64, requires_grad=True)
    up, down = ColumnParallelLinear(mlp.up), RowParallelLinear(mlp.down)
    y = down(F.gelu(up(x)))
    y.sum().backward()
    return y.detach(), mlp(x).detach(), list(up.weight.shape), list(down.weight.shape)

# %%
run = launch(cut_mlp, world_size=4)
y, whole, shape_of_up, shape_of_down = run.results[0]
compare("four ranks and one process", y, whole)
print("of", [256, 64], "and", [64, 256], "each rank holds", shape_of_up, "and", shape_of_down)

# %% [markdown]
# Only a share of both matrices is on each rank, and so only a share of their gradients and of the optimizer's numbers:
# unlike a replica, this does make a model fit. *Predict:* forward and backward, how often did the ranks have to talk?

# %%
def travels(timeline):
    return [span.name for span in timeline.of(0) if span.kind == "transfer" and span.name != "broadcast"]

travels(run.timeline)

# %% [markdown]
# (The `broadcast`s left out here came first. They gave all ranks the first one's weights.)
#
# You could see one of the two all-reduces coming: after $B$ each rank has a partial sum of $y$. It is called **g**. The
# other is on the way back. All ranks have used the same $x$, each for its own columns of $A$, so each has found only a
# partial sum of the *gradient of* $x$. At the place where $x$ goes into $A$, nothing happens on the way forward, and on
# the way back these gradients are added up. That is **f**. The two are mirror images:
#
# | | forward | backward |
# |---|---|---|
# | **f**, before $A$ | nothing | all-reduce |
# | **g**, after $B$ | all-reduce | nothing |
#
# ## 3. What goes wrong
#
# The all-reduce of f is easily forgotten: no error says so. *Predict:* without f, which of these four come out wrong:
# $y$, the gradient of $x$, those of $A$ and of $B$? And without g? And if $A$ is cut by rows, and the GELU is taken
# before the sum and not after it?

# %%
from lessons.L06_tensor_parallelism.runs import WAYS, run_cut

for way in WAYS:
    run = run_cut(way, ranks=4)
    print(f"{way:<36}{run.sent:8,} bytes  {'wrong: ' + ', '.join(run.wrong) if run.wrong else 'right'}")

# %% tags=["build-only"]
from lessons.L06_tensor_parallelism.explorer import PACE


def explored(ranks, hidden):
    return run_cut("columns, rows", ranks, hidden, pace=PACE).timeline

# %% [markdown]
# - All four cuts are right, but only one is cheap.
# - **Without f**, the gradient of $x$ is wrong, and with it those of *all layers before*. The loss of this step is
#   right. This layer's own gradients are right, so looking at them proves nothing.
# - **Without g**, $y$ is wrong, and you will see it in the loss. (The gradients are right only because they were given
#   the right gradient of $y$ here; with a real loss they would go wrong, too.)
# - **GELU before the sum** spoils everything: $\mathrm{gelu}(u_0 + u_1)$ is not
#   $\mathrm{gelu}(u_0) + \mathrm{gelu}(u_1)$. It is the reason why $A$ is cut by columns.
#
# ## 4. Cut it yourself
#
# Every move of a control runs a forward and a backward pass on real ranks, and compares the numbers with those of one
# process. The lower picture shows who holds what: each rank has a color and a pattern, and what all ranks hold is
# blank. Above and below stand the collectives of the run, with the bytes that a rank sends for each in a ring. The
# picture beside the controls shows what every rank did. It is **emulated**, with links of
# {{PACE.link.bandwidth:data_size}} per second. (Real ones are far faster, and so are real devices; what counts
# is the ratio.) The sentences add what the formula predicts.
#
# 1. Go through all cuts. Where is the all-reduce of four times the size, and why is it there?
# 2. Take 8 ranks and the smallest hidden size, then the largest. Which one makes better use of the ranks? What grows
#    with the square of the hidden size, and what with the hidden size itself?
# 3. Are 8 ranks faster than 4 with hidden size 64?
# 4. Move *sequence* to *parallel*. What becomes of the two all-reduces, and how many bytes does it save? You will
#    need this in section 8.

# %%
from lessons.L06_tensor_parallelism.explorer import TensorParallelExplorer

TensorParallelExplorer()

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. In *rows, rows* it comes before the GELU: partial sums have to be added up there, and there they are
#    {{wider:in_words}} times as wide. In *columns, columns* it is on the way back, and *rows, columns* has one in each
#    direction.
# 2. The largest. Eight ranks then compute for {{1 - explored(8, 128).idle_fraction():percent}} of the time, with the
#    smallest for {{1 - explored(8, 32).idle_fraction():percent}}. Computing grows with the square of the hidden size,
#    what travels with the hidden size itself.
# 3. Yes, but not by much: {{explored(8, 64).makespan:duration}} in place of {{explored(4, 64).makespan:duration}}.
# 4. Each becomes a reduce-scatter and an all-gather, one of them forward and the other backward. Here it saves not a
#    byte, and costs none.
# </details>
#
# ## 5. Attention, by heads
#
# Attention, the other part of a transformer block, has four matrices: query, key and value, then out. *Predict:* which
# of them are cut by columns, and which by rows? And why not through the middle of a head?
#
# `parallelize` does it for a whole model. Here is what each of two ranks holds of a block:

# %%
from course_lib.mechanisms.tensor_parallel import parallelize
from course_lib.model import TinyGPT

config = GPTConfig(layers=1, hidden=64, heads=4)

def shapes(rank):
    model = parallelize(TinyGPT(config))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}

own = launch(shapes, world_size=2).results[0]
for name, parameter in TinyGPT(config).blocks[1].named_parameters():
    share = own[f"blocks.1.{name}"]
    print(f"{name:<24}{list(parameter.shape)!s:<12}", share if share != list(parameter.shape) else "whole, on both")

# %% [markdown]
# Query, key and value are cut by columns, into **whole heads**; out by rows. It is the MLP's trick again: a head
# looks at no other head, as one hidden unit looks at no other. Within a head that is not so. Its scores are products
# of *all* numbers of a query with all of a key, and go through a softmax, which like the GELU wants finished sums.
# So heads cannot be shared by just any number of ranks:

# %% tags=["nbval-ignore-output"]
from course_lib import RunError

try:
    launch(shapes, world_size=3)
except RunError as error:
    print(error.message)

# %% [markdown]
# (Many models have fewer heads of keys and values than of queries. If there are fewer than ranks, several ranks hold
# the same one, and its gradients are added up among them.)
#
# ### Question: how many all-reduces?

# %%
Card("count_all_reduces")

# %% [markdown]
# ## 6. The two ends of the model
#
# At both ends of the model are matrices with a row for every token of the vocabulary. They are cut by **vocabulary**:
# each rank embeds the tokens it has and outputs zeros for the others (one more all-reduce), and each has its share of
# the logits. The loss needs them all, it seems: a softmax over the whole vocabulary. *Predict:* with 8,192 tokens,
# how much less travels if only what the loss needs of each share is exchanged, and not the logits?

# %%
import torch.distributed as dist

from course_lib.classroom.runs import after_barrier
from course_lib.mechanisms.tensor_parallel import gather_from_ranks, vocab_parallel_cross_entropy

wide = GPTConfig(vocab=8192, layers=1, hidden=16, heads=4)
tokens = torch.arange(4 * 9).view(4, 9)

def of_all_logits(logits, targets, vocab):
    return F.cross_entropy(gather_from_ranks(logits, -1, vocab).flatten(0, 1), targets.flatten())

# %%
def evaluate(rank, loss_of):
    logits = parallelize(TinyGPT(wide))(tokens[:, :-1])
    dist.barrier()  # what travels from here on travels for the loss
    return loss_of(logits, tokens[:, 1:], wide.vocab).item()

for name, loss_of in (("all logits gathered", of_all_logits), ("what the loss needs", vocab_parallel_cross_entropy)):
    run = launch(evaluate, world_size=4, args=(loss_of,))
    print(f"{name}: {after_barrier(run.timeline).bytes_sent(0):7,} bytes, loss {run.results[0]:.4f}")

# %% tags=["build-only"]
def sent(loss_of):
    return after_barrier(launch(evaluate, world_size=4, args=(loss_of,)).timeline).bytes_sent(0)

# %% [markdown]
# {{sent(of_all_logits) / sent(vocab_parallel_cross_entropy):,.0f}} times less. What travels are three numbers for each
# target: the largest logit (so that nothing overflows), the sum of the exponentials, and the logit of the target
# itself, which only one rank has.
#
# $$-\log\mathrm{softmax}(z)_t \;=\; \log \sum_{r}\;\sum_{v\,\in\,\text{share}\;r} e^{z_v - m} \;-\; (z_t - m)
# \qquad\text{with}\qquad m = \max_v z_v$$
#
# ## 7. Is it the same training?
#
# All parts together: four ranks learn to add, each with its share of every matrix. They all read the *same* samples.
# *Predict:* there is no averaging of gradients in this loop. Is one missing?

# %%
from itertools import islice

from course_lib import data
from course_lib.mechanisms.tensor_parallel import full_state

problems, unseen = data.train_test_split()

def learn(model, loss_of, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for inputs, targets in islice(data.minibatches(problems, 256), steps):
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

# %%
def loss_of_shares(logits, targets):
    return vocab_parallel_cross_entropy(logits, targets, vocab=12)

def train(rank, steps, dtype=torch.float32):
    model = parallelize(TinyGPT(dtype=dtype))
    learn(model, loss_of_shares, steps)
    return full_state(model), sum(parameter.numel() for parameter in model.parameters())

four, _ = launch(train, world_size=4, args=(20, torch.float64)).results[0]
one, _ = launch(train, world_size=1, args=(20, torch.float64)).results[0]
difference = max((four[name] - one[name]).abs().max().item() for name in one)
print("the same as one process, up to rounding:", difference < 1e-9)

# %% [markdown]
# Now to the end, which takes a while. Two ranks are enough: with more ranks than your computer
# has cores, most of them would just wait for their turn.

# %%
state, held = launch(train, world_size=2, args=(300,), timeout=300).results[0]
model = TinyGPT()
model.load_state_dict(state)
print("over 90% of unseen sums right:", data.share_right(model, unseen) > 0.9)
print(f"each rank held {held:,} of {sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# Nothing is missing. A rank's gradients belong to weights that it alone has, so there is nobody to average them with.
# What all ranks hold (norms, positions, the biases after g) has got the same gradient everywhere, because f and g have
# made the hidden states and their gradients the same everywhere.
#
# `full_state` puts the shares together again, so what is saved fits any number of ranks.
#
# ## 8. What is not cut yet
#
# Outside of f and g all ranks do the same work on the same hidden states, and all *keep* them for the backward pass.
# **Sequence parallelism** cuts these, too, by positions: g becomes a reduce-scatter, after which each rank has its
# positions of the sum, and f an all-gather, which brings them together again. *Predict:* does that cost more bytes? And
# with four ranks, how much of what a rank keeps is saved: three quarters, half, less?

# %%
from collections import Counter

from course_lib.instruments.ledger import Ledger

long = GPTConfig(sequence=64, layers=2, hidden=64, heads=4)

def step(rank, is_cut):
    blocks = parallelize(TinyGPT(long), sequence_parallel=is_cut).blocks
    embedded = blocks[0](torch.zeros(8, 64, dtype=torch.long)).detach().requires_grad_()
    dist.barrier()
    with Ledger(blocks[1:-1]) as ledger:
        blocks[1:-1](embedded).sum().backward()
    return ledger.peak.held.activations

# %%
for is_cut in (False, True):
    run = launch(step, world_size=4, args=(is_cut,))
    timeline = after_barrier(run.timeline)
    print(f"sequence parallel: {is_cut!s:<6} {dict(Counter(travels(timeline)))}")
    print(f"    {run.results[0]:,} bytes of activations kept, {timeline.bytes_sent(0):,} bytes sent")

# %% tags=["build-only"]
from course_lib.planner import Plan, estimate
from lessons.L06_tensor_parallelism import questions as asked

large, nodes = asked.LARGE, asked.NODES
all_reduces = travels(after_barrier(launch(step, world_size=4, args=(False,)).timeline))
kept = [launch(step, world_size=4, args=(is_cut,)).results[0] for is_cut in (False, True)]
plans = [Plan(tp=8, pp=8, sequence_parallel=is_cut) for is_cut in (False, True)]
whole, own = (estimate(large, nodes, plan, asked.BATCH) for plan in plans)

# %% [markdown]
# Not a byte more: in a ring, an all-reduce *is* a reduce-scatter and an all-gather, one after the other. And
# {{1 - kept[1] / kept[0]:percent}} less is kept: the inputs of the norms are shared now. The inputs of the matrices are
# still whole, since f has put them together and autograd holds on to what it made.
#
# Megatron-LM goes further. It keeps only a rank's own positions of these as well, and gathers them a second time on the
# way back. Then all that is kept is divided by the number of ranks, for {{own.flows["tensor"].bytes /
# whole.flows["tensor"].bytes:.2f}} times the bytes: each f makes three messages of half an all-reduce, and each g two.
# This is the kind that the planner counts (and so does [planning](09_planning.ipynb)). For the model of the next
# section on {{nodes.devices_per_node}} tensor ranks it says {{own.memory.activations:memory_size}} of activations in
# place of {{whole.memory.activations:memory_size}}, modelled. So it is a choice: a little memory for nothing, or most
# of it for more messages.
#
# A rank has seen only its own positions now when it finds the gradients of norms and biases, so these have to be added
# up once in a step. That is what `sum_partial_gradients` is for.
#
# ## 9. Inside a node, or across
#
# Data parallelism exchanges gradients once in a step, and hides most of it behind the backward pass. The all-reduces
# of f and g come {{len(all_reduces) / long.layers:in_words}} times in *every layer*, with full recomputation
# {{asked.all_reduces(2, recomputes=True) / 2:in_words}} times, and nobody can go on before they
# are done. So the speed of the link decides. *Predict:* eight ranks in one node, or four in each of two nodes with a
# much slower link between them. What becomes of the speed-up?

# %%
from course_lib import Link, Pace
from course_lib.figures import Timing, speed_up

device = {"forward": 4e-6, "backward": 8e-6}
inside, between = Link(latency=0.0002, bandwidth=4e6), Link(latency=0.0005, bandwidth=4e5)

def timing(ranks, ranks_per_node):
    pace = Pace(device, inside, between, ranks_per_node)
    timeline = run_cut("columns, rows", ranks, pace=pace).timeline
    return Timing.of(timeline, label=f"nodes of {ranks_per_node}")

speed_up([timing(ranks, per_node) for per_node in (8, 4) for ranks in (1, 2, 4, 8)], title="Across nodes?")

# %% tags=["build-only"]
def faster(ranks, ranks_per_node):
    return timing(1, ranks_per_node).seconds / timing(ranks, ranks_per_node).seconds

# %% [markdown]
# Up to four ranks the two lines are the same. With eight, the nodes of four have to use a link that is
# {{round(inside.bandwidth / between.bandwidth):in_words}} times slower: that is {{faster(8, 4):.1f}} times as fast as
# one rank, and {{faster(8, 4) < faster(4, 4):slower|faster}} than four ranks were. For one step of $L$ layers, with
# hidden states of $H$ bytes, each of $N$ ranks sends
#
# $$4L \cdot 2\,\frac{N-1}{N}\,H$$
#
# in $4L$ collectives that nothing hides, each of them $2(N-1)$ messages around the ring, while its share of the
# computing falls as $1/N$. (With full recomputation it is $6L$.)
#
# Real machines? The planner knows the data sheets. A model of {{large.parameters / 1e9:.0f}} billion parameters on
# {{nodes.nodes}} nodes of {{nodes.devices_per_node}} A100s, with tensor groups from a single device to all
# {{nodes.devices}}, and the rest of the devices as pipeline stages (modelled):

# %%
from course_lib.planner import Plan, estimate
from lessons.L06_tensor_parallelism.questions import BATCH, LARGE, NODES

for tp in (1, 2, 4, 8, 16, 32, 64):
    e = estimate(LARGE, NODES, Plan(tp=tp, pp=64 // tp), BATCH)
    waits, layers = e.step_time.tensor / e.step_time.total, -(-LARGE.layers * tp // 64)
    print(f"tp {tp:2} x pp {64 // tp:2}, up to {layers:2} layers on a device: {e.bubble:3.0%} bubble, "
          f"{waits:3.0%} waits for f and g, {e.mfu:3.0%} of peak")

# %% tags=["build-only"]
from dataclasses import replace


def with_layers(layers):
    model = replace(large, layers=layers)
    return {tp: estimate(model, nodes, Plan(tp=tp, pp=64 // tp), asked.BATCH) for tp in (1, 2, 4, 8, 16)}

real, even = with_layers(large.layers), with_layers(64)

# %% [markdown]
# From {{nodes.devices_per_node}} to {{2 * nodes.devices_per_node}} the groups leave their nodes, and it shows. But why
# does it get better up to 4 tensor ranks, and worse already at 8, inside a node?
#
# - **Up to 4** it is the stages that get better. {{large.layers}} layers do not make 64 equal stages, nor 32: some
#   devices have a layer more than the others, which wait for them. 16 stages have five layers each, and fewer stages
#   make a shorter bubble. With 64 layers, which all these numbers divide, 2 tensor ranks are as good as 4
#   ({{even[2].mfu:percent}} and {{even[4].mfu:percent}}).
# - **At 8** each device takes part in twice as many layers, so it sends more than twice as much, and waits
#   {{real[8].step_time.tensor / real[4].step_time.tensor:.1f}} times as long. And its share of each product is
#   narrower, so the device computes it less well: computing takes {{real[8].step_time.compute /
#   real[4].step_time.compute - 1:percent}} longer, for the same work. (The emulated devices above know nothing of
#   that.)
#
# So inside a node, too: as many tensor ranks as the memory and the stages ask for, and no more.
#
# ### Case: choosing a strategy
#
# Write a few sentences, then compare. The planner judges each of the proposals, and searches all plans for the best.

# %%
Card("choose_strategy")

# %% [markdown]
# ## 10. The same in PyTorch
#
# `parallelize_module` is PyTorch's tensor parallelism. You tell it which layers are cut, and how. Here it cuts the same
# model on our ranks, for the same steps as in section 7:

# %%
from torch.distributed.device_mesh import init_device_mesh


def in_pytorch(rank):
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ColwiseParallel(), RowwiseParallel()
    cuts = {f"attention.{name}": columns for name in ("query", "key", "value")}
    cuts |= {"attention.out": rows, "mlp.up": columns, "mlp.down": rows}
    model, mesh = TinyGPT(dtype=torch.float64), init_device_mesh("cpu", (4,))  # the same seed on every rank
    for block in model.blocks[1:-1]:
        parallelize_module(block, mesh, cuts)
    learn(model, data.answer_loss, steps=20)
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}

# %%
theirs = launch(in_pytorch, world_size=4).results[0]
difference = max((theirs[name] - four[name]).abs().max().item() for name in four)
print("the same as ours, up to rounding:", difference < 1e-9)

# %% [markdown]
# The same function runs under `torchrun --nproc-per-node 4`, with `dist.init_process_group()` before it. What
# `parallelize_module` does differently:
#
# - The cut weights are `DTensor`s, which know what the other ranks hold. f and g come from that: a plain input of a
#   column-parallel layer counts as copied to all ranks, so its gradient is added up.
# - Query, key and value get an f each, where ours share one. So a block has six all-reduces, and not four (with full
#   recomputation eight, and not six).
# - It cuts what you name, and nothing else: here embedding and head are whole on all ranks. `RowwiseParallel` cuts an
#   embedding as well, `ColwiseParallel` a head, and inside `loss_parallel()` the loss is found as in section 6.
# - What it cuts is rank 0's. What it leaves whole stays as each rank has made it, so give all of them the same seed.
# - `SequenceParallel` for the norms is section 8.
#
# The file to read is `torch/distributed/tensor/parallel/style.py`, from `ColwiseParallel` on.
#
# ## What you know now
#
# - Two matrices with a function between them that works on each number alone: the first by columns, the second by
#   rows. Attention works the same way, with heads in place of hidden units.
# - One all-reduce forward (g) and one backward (f) for each such pair, four for each transformer block, each of all
#   hidden states. With full recomputation it is six.
# - Parameters, gradients and optimizer state are divided by the number of ranks; with sequence parallelism, so are the
#   activations between the blocks, for the same bytes, and with a second gathering all of them, for a quarter more.
# - The loss needs three numbers for each target from each rank, not the logits.
# - It talks in every layer and hides nothing. Keep it on the fastest links you have, inside a node, and there use no
#   more ranks than you need.
# - Replicas that shard everything (ZeRO-3) are the other way to make a large model fit. They are as fast as long as
#   each device has enough samples for each time that weights are fetched.
#
# ### When it stops being true
#
# - **Narrow models.** What a layer computes grows with the square of the width, what travels only with the width. So
#   with a small hidden size there is little to compute for each byte, and more ranks can be slower than fewer.
# - **More ranks than heads**, or numbers that do not divide: some ranks idle, or it cannot be done.
# - **Links as fast between nodes as inside.** Some machines join dozens of devices by the same fast links. There, a
#   *node* is as large as that.
# - **Nothing hides** holds for f and g as they are here. f can run while the gradients of the weights are computed, as
#   in Megatron-LM, and cutting a product into pieces, so that one travels while the next is computed, hides a part of
#   both (Wang et al. 2023).
#
# ### Further reading
#
# - Shoeybi et al. 2019, *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism*,
#   arXiv:1909.08053: f and g.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198: sequence
#   parallelism.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC21: why
#   tensor groups stay inside a node.
# - Wang et al. 2023, *Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
#   Models*, ASPLOS: hiding a part of what travels.
#
# **Next:** the [exercise](../exercises/06_tensor_parallelism/06_tensor_parallelism.ipynb), in which you write f and g,
# cut heads and take the loss from shares; or [mixed precision](07_mixed_precision.ipynb), which makes each number
# smaller.
