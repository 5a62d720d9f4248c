# %% [markdown]
# # Planning: what will it cost on a thousand GPUs?
#
# **What you do:** put the pieces of this course together into a plan for a large model, find out what it costs
# before anybody pays for it, let a program try thousands of others, and decide what new hardware is worth.<br>
# **Afterwards you can:** narrow down thousands of plans to a few shapes by hand, have a program check them, and
# say what is still to be measured.<br>
# **Time:** 60 minutes.<br>
# **You need:** the lesson on [combining mechanisms](08_combining_mechanisms.ipynb) and those before it.
#
# Everything here is **modelled**: calculated, not run, unless a cell says otherwise. So half-way through we ask
# whether you should believe it. Decide on an answer before you run the next cell, even if it is a guess. (This page
# comes with its results. To hide them until you get there, choose *Clear Outputs of All Cells* in the *Edit* menu.)
#
# ## 1. A first plan
#
# You have 8 nodes of 8 A100 each, and a model of 70 billion parameters, in the shape of Llama 3 (Llama Team 2024,
# table 3). A **plan** says how to share the work: `dp` replicas, `tp` devices for each matrix, `pp` stages of layers.
#
# *Predict:* the simplest plan is data parallelism alone, 64 replicas. Does it fit? `estimate` works it out, and says
# why:

# %%
from textwrap import fill

from course_lib.planner import Cluster, Plan, estimate
from course_lib.planner.search import ALIKE
from lessons.L09_planning.questions import BATCH, MODEL

cluster = Cluster("A100-80GB", nodes=8, between="InfiniBand HDR")
print(f"{MODEL.parameters / 1e9:.1f} billion parameters, {cluster.devices} devices, {BATCH} samples in a minibatch")
print(fill(estimate(MODEL, cluster, Plan(dp=64), BATCH).why, 90))

# %% [markdown]
# Far from it. A replica holds the whole model. So cut it: each matrix among the eight devices of a node, and the
# layers into four stages. That leaves two replicas. *Predict:* does it fit now? And which part of a step will be the
# largest loss: the bubble of the pipeline, the traffic of the tensor ranks, or the gradients?

# %%
first = estimate(MODEL, cluster, Plan(dp=2, tp=8, pp=4), BATCH)
print(fill(first.why, 90))

# %% [markdown]
# Every estimate explains itself like this. Here is what is behind the sentences.

# %%
from course_lib.figures import devices, memory_by_part, step_time_by_part

memory_by_part(devices(first), first.capacity, title="The first plan: what each device of a pipeline holds")

# %% [markdown]
# The devices of one pipeline are not alike. The first stage keeps activations for the most micro-batches, because it
# works ahead of the others; the last one has the logits. **The fullest device decides** whether a plan fits.
#
# So it does not fit yet. (Beside what tensors take, a device needs a **margin**: for its driver, for the communication
# library, and for holes between tensors that the allocator cannot fill. And software differs in what it keeps: a plan
# *fits* if even plain software has room, and *may fit* if only lean software has.) *Predict:* which of these saves the
# most?
#
# - **a** ZeRO-1: the two replicas share out the optimizer's state
# - **b** sequence parallelism: tensor ranks share out also what they all held whole
# - **c** full recomputation: activations are computed again in the backward pass

# %%
from dataclasses import replace

changes = {
    "a: ZeRO-1": {"zero": 1},
    "b: sequence parallelism": {"sequence_parallel": True},
    "c: full recomputation": {"recompute": "full"},
    "a and b": {"zero": 1, "sequence_parallel": True},
}
variants = {"the first plan": first}
for name, change in changes.items():
    variants[name] = estimate(MODEL, cluster, replace(first.plan, **change), BATCH)
for name, one in variants.items():
    print(f"{name:24} {one.memory.total / 2**30:5.1f} GiB {one.step_time.total:6.1f} s  {one.fit}")

# %%
step_time_by_part(variants, title="And what does it cost in time?")

# %% [markdown]
# Of the three, recomputation saves the most memory and costs the most time. On balance sequence parallelism costs
# nothing: it sends more, since what was shared out is gathered once more in the backward pass, but it also divides work
# that every tensor rank did on its own. (The last line, **a** and **b** together, saves even more, and costs nothing.)
# Often memory is paid for with time, but the price differs from one trade to the next.
#
# The line below the end of each bar says where nine in ten such steps would end. Teams with the same devices
# have better or worse kernels and libraries, and the planner cannot know yours (section 4). Most of what it does not
# know moves all the bars together, so their order is known better than their lengths.
#
# ## 2. Who talks to whom, and over which link
#
# Inside a node, A100s are joined by NVLink, and it is
# {{cluster.inside_link.bandwidth / cluster.between_link.bandwidth:in_words}} times as fast as the network between
# nodes. Therefore it matters **which** traffic crosses the network:

# %%
plan_ab = variants["a and b"]
inside, between = cluster.inside_link, cluster.between_link
print(f"{inside.name}: {inside.bandwidth / 1e9:.0f} GB/s one way; {between.name}: {between.bandwidth / 1e9:.0f} GB/s")
for kind, flow in plan_ab.flows.items():
    takes = f"takes {flow.seconds:5.2f} s, of which a device waits for {flow.exposed:5.2f} s"
    print(f"{kind:9} {flow.bytes / 1e9:6.0f} GB over {flow.link:14} {takes}")

# %% tags=["build-only"]
n_bytes = {kind: flow.bytes for kind, flow in plan_ab.flows.items()}

# %% [markdown]
# Compare the last two columns. For tensor traffic a device waits as long as it takes: nobody can go on without the sum.
# Gradients travel while the backward pass goes on, so a part of their time is hidden: that is **overlap**. It decides
# between the two. What can overlap may take a slow link as long as there is enough to compute meanwhile; what cannot is
# paid for in full, however fast the devices are.
#
# Of all bytes, {{n_bytes["tensor"] / sum(n_bytes.values()):percent}} are those of tensor parallelism, and here they
# stay inside a node. *Predict:* what becomes of a step if you spread the tensor ranks over two nodes, `tp=16`? (The
# model allows that. It has {{MODEL.heads}} heads, but only {{MODEL.kv_heads}} of keys and values, so
# {{16 // MODEL.kv_heads:in_words}} tensor ranks hold the same ones.)

# %%
wide = estimate(MODEL, cluster, replace(plan_ab.plan, tp=16, pp=2), BATCH)
wider = {"tp=8, inside a node": plan_ab, "tp=16, over two nodes": wide}
step_time_by_part(wider, title="Tensor ranks over the network")

# %% [markdown]
# That is the rule behind most plans: **who talks most sits closest**.
#
# How far can you go? A **roofline** tells. Across: how much a device computes for every byte that it sends. Up: how
# fast it computes. A link can only bring so many bytes, so there is a slope; and no device is faster than its matrix
# products, so there is a ceiling.

# %%
from lessons.L09_planning.figure import roofline

data_only = estimate(MODEL, cluster, Plan(dp=64, zero=3, recompute="full"), BATCH)
plans = {"tp=8": plan_ab, "tp=16": wide, "ZeRO-3 on 64": data_only}
roofline(plans, title="What the links allow, and what the plans make of it")

# %% [markdown]
# Each plan has a point for each link that it uses. The nearer a point is to the slope, the more it is that link which
# holds it back, and the less a faster device would gain. Far to the right of the slope, a link is not noticed at all.
# With `tp=16` both points have moved towards their slopes, and down. (Speed here is everything that a device computes.
# A plan that recomputes activations, as ZeRO-3 does here, trains less than its point says: of its
# {{data_only.flops / cluster.devices / data_only.step_time.total / 1e12:.0f}} TFLOP/s only {{data_only.mfu *
# cluster.spec.peak["bf16"] / 1e12:.0f}} go into the model.)
#
# ### Case: it fits, and is slow
#
# Somebody has made the other choice, and you are to fix it. Answer in a few sentences; then the planner goes through
# the changes one by one, and you compare with a good answer, point by point.

# %%
from lessons import Card

Card("optimize_efficiency")

# %% [markdown]
# ### Question: from 64 to 1,024
#
# What happens if you buy more devices, and keep the plan?

# %%
Card("more_replicas")

# %% [markdown]
# ## 3. The bubble, played
#
# For its pipeline the planner plays the schedule, action by action, with the times of the stages. *Predict:* four
# stages and eight micro-batches, all stages equal. What share of the time is a stage idle? (The formula is
# $(p-1)/(m+p-1)$, for $p$ stages and $m$ micro-batches.)

# %%
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES

for name in ("gpipe", "1f1b", "zb_h1"):
    played = simulate(SCHEDULES[name](4, 8), forward=1, backward=1, weight_grad=1)
    print(f"{name:6} idle for {played.idle_fraction():.4f} of the time; formula {3 / (8 + 3):.4f}")

# %% [markdown]
# The formula holds for the first two. A zero-bubble schedule beats it by filling gaps with the gradients of the
# weights. Here is a step of our plan, with fewer samples, so that you can see something. (Its bubble is a little larger
# than the formula's: the last stage has the logits, too, and the others wait for it.)

# %%
from course_lib.figures import gantt

few = estimate(MODEL, cluster, plan_ab.plan, 16)
gantt(few.timeline(), title="Four stages, eight micro-batches")

# %% [markdown]
# ## 4. Should you believe it?
#
# A model of reality is worth what it predicts. First a real run: four ranks on your computer, and the planner says
# beforehand, to the byte, what each of them sends.

# %%
import torch
import torch.distributed as dist

from course_lib import data, launch
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import ModelSpec


def one_exchange(rank):
    model = TinyGPT(GPTConfig(vocab=12, sequence=8, layers=2, hidden=64, heads=4))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        dist.all_reduce(parameter.grad)

# %%
tiny = ModelSpec(layers=2, hidden=64, heads=4, sequence=8, vocab=12, tied_embeddings=False)
laptop = Cluster("laptop-CPU", devices_per_node=4)
predicted = estimate(tiny, laptop, Plan(dp=4, precision="fp32"), global_batch=4).flows["data"].bytes
sent = launch(one_exchange, world_size=4).timeline.bytes_sent(0)
print(f"predicted {predicted:,.0f} bytes, sent {sent:,} bytes")

# %% [markdown]
# And on large machines? Papers and logs have published how long their steps took, with what model and what plan. Here
# are three, all on A100: a model of 39 billion parameters (Narayanan et al. 2021, table 1), MT-NLG with 530 billion
# (Smith et al. 2022, section 2.4), and BLOOM (its training log). *Predict:* how far off will the planner be?

# %%
narayanan = ModelSpec(layers=48, hidden=8192, heads=64, sequence=2048, vocab=51200)
mtnlg = ModelSpec(layers=105, hidden=20480, heads=128, sequence=2048, vocab=51200)
bloom = ModelSpec(70, 14336, 112, sequence=2048, vocab=250880, learned_positions=False, dropout=False)
jean_zay = Cluster(nodes=48, between="Omni-Path 100", nics_per_node=4)
bloom_plan = Plan(8, 4, 12, micro_batch=2, zero=1, recompute="full", fp32_gradients=True)

# %%
published = {
    "39B": (narayanan, Cluster(nodes=64), Plan(32, 8, 2, micro_batch=4, recompute="full"), 1536, 14.45),
    "MT-NLG": (mtnlg, Cluster(nodes=280), Plan(8, 8, 35, recompute="full"), 1920, 60.1),
    "BLOOM": (bloom, jean_zay, bloom_plan, 2048, 105.22),
}
for name, (model, machine, plan, batch, seconds) in published.items():
    step = estimate(model, machine, plan, batch).step_time
    print(f"{name:7} published {seconds:6g} s; planner {step.total:5.1f} s, {step.low:5.1f} to {step.high:5.1f} s")

# %% tags=["build-only"]
from benchmarks import _mixtures as mixtures
from benchmarks import _published as evidence
from benchmarks import one_gpu

left_out = evidence.left_out()
steps, inside = evidence.summary(left_out), evidence.coverage(left_out)
one_row = evidence.summary(evidence.after_one_row())
sources = len({evidence.stack_of(one.row)[0] for one in left_out})
bits = {"fp8": 8, "mxfp8": 8, "nvfp4": 4}
eight, four = (
    evidence.summary([one for one in left_out if bits.get(evidence.plan_of(one.row).precision) == n]) for n in (8, 4)
)
mixed, mixed_row = (evidence.summary(found) for found in (mixtures.left_out(), mixtures.after_one_row()))
_, alike = mixtures.least_error()
sets, without_vtrain = evidence.sweeps(), evidence.matmul_of_chips("vtrain")["A100"]
lost_by_choosing, lost_without = ([one.regret(matmul) for one in sets] for matmul in (None, without_vtrain))
of_39b, lost_of_39b = evidence.whole_sweeps()["GPT-39B"]
ours = one_gpu.compared(one_gpu.stored()["rows"])
held, late = [one for one in ours if one.counts], [one for one in ours if one.waited]
even, odd = ([one.ratio("step") - 1 for one in held if one.estimate.model.vocab % 2 == n] for n in (0, 1))
mean_of_held = sum(map(abs, even + odd)) / len(held)
sizes = [one.estimate.model.parameters for one in held]
noted = [one for one in ours if "used" in one.row]
less = 1 - sum(one.ratio("used") for one in noted) / len(noted)
in_32_bits = min(one.ratio("step") for one in ours if "precision" in one.row)

# %% [markdown]
# The first is close, the other two are not: those teams ran other software on other machines with the same devices.
# Bubbles, traffic and shapes are the same physics everywhere, but **no catalogue knows how good your kernels and
# libraries are**. So an estimate has an **interval**, `step_time.low` to `step_time.high`, in which nine in ten such
# steps lie. It is taken from published steps, by how far they lie from what the planner says of them; where fewer have
# been published about a device, it is wider.
#
# Three steps prove nothing, and the planner's few constants were fitted to steps like these. So it is judged in the way
# one judges any model of data: take all steps of one source away, fit the constants to the others, and predict what was
# taken away. On {{steps.n}} steps of {{sources:in_words}} sources, the planner is off by {{steps.mean:.1%}} in the
# mean, with a worst error of {{steps.worst:percent}}, and {{inside:percent}} of the steps lie in their interval. Among
# them are {{eight.n}} steps in 8 bits, off by {{eight.mean:.1%}}, and {{four.n:in_words}} in 4 bits, off by
# {{four.mean:.1%}}. Most of these are from NVIDIA's performance summaries of Megatron Bridge. (`python3 course.py bench
# planner` prints all of them, with their sources.)
#
# Those ran on many devices. A single one is easier to come by. We measured steps of GPTs in bfloat16 on one H100, from
# {{min(sizes) / 1e6:.0f}} million to {{max(sizes) / 1e9:.1f}} billion parameters, and fitted nothing to them. On
# {{len(held)}} steps the planner is off by {{mean_of_held:.1%}} in the mean, from {{-min(even):percent}} too short to
# {{max(even):percent}} too long, and {{-min(odd):percent}} too short where the vocabulary has an odd size, for which
# matrix products are slow. {{all(one.is_inside("step") for one in held):All lie|Not all lie}} in their interval. In
# {{len(noted)}} cases we noted the memory in use. The planner's figure is {{less:percent}} below it in the mean, and
# its interval {{all(one.is_inside("used") for one in noted):always|not always}} includes it. (`python3 course.py bench
# one_gpu` prints all of this, and takes the same steps on your GPU.)
#
# Other steps took longer, up to {{max(1 / one.ratio("step") for one in late):.1f}} times what the planner says. **It
# counts the seconds of the device, and not those of its host.** In eager PyTorch it is Python that begins each kernel.
# Where kernels are short, the GPU has ended one before the next begins, and waits. With
# {{ours[0].estimate.model.parameters / 1e6:.0f}} million parameters and {{ours[0].estimate.model.sequence:,}} tokens, a
# step took {{ours[0].row["step"] * 1e3:.0f}} ms, and its kernels {{ours[0].row["kernels"] * 1e3:.0f}}. The planner says
# {{ours[0].predicted("step") * 1e3:.0f}}. And in float32 it says {{in_32_bits:.1f}} times what we measured. Its `why`
# warns that this is extrapolated.
#
# But what you want to know is **which plan to take**, and what you lose if the planner is wrong. That is its
# **regret**. To find it, somebody has to measure many plans of one model on one machine. Bang et al. (2024, vTrain)
# have: GPT-3 with 175 billion parameters, 1,536 samples, 512 A100. *Predict:* let the planner choose one of these
# plans. How much longer does its step take than that of the best?

# %%
gpt3 = ModelSpec(layers=96, hidden=12288, heads=96, sequence=2048, vocab=51200)
measured = {  # dp, tp, pp: {micro-batch: published seconds}
    (2, 8, 32): {2: 58.56, 3: 57.32, 4: 59.15, 6: 62.64},
    (4, 4, 32): {2: 53.91, 3: 56.30, 4: 59.33, 6: 66.63},
    (4, 8, 16): {2: 56.32, 3: 55.68, 4: 57.50, 6: 60.52},
    (8, 4, 16): {2: 54.26, 3: 55.24, 4: 57.72},
    (8, 8, 8): {2: 55.11, 3: 56.18, 4: 58.24},
}
runs = []
for shape, by_size in measured.items():
    for size, seconds in by_size.items():
        plan = Plan(*shape, micro_batch=size, recompute="full", precision="fp16")
        step = estimate(gpt3, Cluster(nodes=64, nics_per_node=4), plan, 1536).step_time.total
        runs.append((step, seconds, shape, size))
by_time = sorted(runs, key=lambda run: run[1])
for what, (step, seconds, shape, size) in {"chosen": min(runs), "best": by_time[0], "worst": by_time[-1]}.items():
    print(f"{what:6} dp, tp, pp {shape}, micro-batches of {size}: planner {step:.1f} s, published {seconds:.1f} s")
print(f"{len(runs)} plans; the chosen one takes {min(runs)[1] / by_time[0][1] - 1:.1%} longer than the best")

# %% [markdown]
# The planner is wrong about every length, and still chooses nearly the best plan. A plan picked at random would take
# {{sum(run[1] for run in runs) / len(runs) / by_time[0][1] - 1:percent}} longer on average. What the planner does not
# know is much the same for all of them, and that is why one may choose by it. But its constants were fitted to some of
# these steps, so look elsewhere, too. Among the same paper's {{of_39b}} plans for 39 billion parameters, choosing by it
# loses {{lost_of_39b:.1%}}. In {{len(sets):in_words}} sets of {{min(len(one.rows) for one in sets):in_words}} to
# {{max(len(one.rows) for one in sets):in_words}} plans it loses {{min(lost_by_choosing):.1%}} to
# {{max(lost_by_choosing):.1%}}, and no more than {{max(lost_without):.1%}} if this paper's steps are left out of the
# fit.
#
# On your own machine you can do better: measure one step. Before BLOOM was trained, its team tried several plans for
# nearly the same model on the same machine, and its chronicles have the times. What would each of those steps alone
# have told about the final run, and what all four together?

# %%
from course_lib.planner import calibrate

half = {"micro_batch": 2, "zero": 1, "recompute": "full", "precision": "fp16"}
trials = [  # layers, plan, published seconds
    (72, Plan(16, 4, 6, **half), 111.71),
    (72, Plan(4, 8, 12, **half), 128.82),
    (72, Plan(8, 2, 24, **half), 122.75),
    (70, replace(bloom_plan, dp=4, tp=8), 121.63),
]

# %%
all_four, told = jean_zay, []
for layers, plan, seconds in trials:
    trial = replace(bloom, layers=layers, heads=64)
    expected = estimate(trial, jean_zay, plan, 2048).step_time
    where = "inside" if expected.low <= seconds <= expected.high else "OUTSIDE"
    mine = calibrate(trial, jean_zay, plan, 2048, seconds)
    all_four = calibrate(trial, all_four, plan, 2048, seconds)
    told.append(estimate(bloom, mine, bloom_plan, 2048).step_time)
    print(
        f"dp {plan.dp:2} x tp {plan.tp} x pp {plan.pp:2}: {seconds:.1f} s, {where:7} {expected.low:.1f} to "
        f"{expected.high:.1f} s; by this trial alone, BLOOM takes {told[-1].total:.1f} s"
    )
together = estimate(bloom, all_four, bloom_plan, 2048).step_time
print(f"all four: BLOOM takes {together.total:.1f} s, {together.low:.1f} to {together.high:.1f} s")

# %% tags=["build-only"]
shipped = estimate(bloom, jean_zay, bloom_plan, 2048).step_time
off = [abs(one.total / published["BLOOM"][-1] - 1) for one in (*told, together)]

# %% [markdown]
# {{published["BLOOM"][-1]}} s were published. All four trials say that this machine is slower than the catalogue's. The
# fourth lies outside its interval, as one in ten may. It is also the most like BLOOM itself: the same layers, stages
# and precision. Still it tells least, and is {{off[3]:percent}} off, while the first, which is least like BLOOM, is
# {{off[0]:percent}} off. With a single step that is luck, as two set-ups on one machine differ by up to {{ALIKE -
# 1:percent}} by chance. All four together are {{off[4]:percent}} off.
#
# So expect from **calibrating** what it can do. It makes the interval narrower, but not by much: its upper end was
# {{shipped.high / shipped.total - 1:percent}} above the middle, and is {{told[0].high / told[0].total - 1:percent}}
# above it after one step, {{together.high / together.total - 1:percent}} after four. Above all it moves the middle to
# your machine: with one row of a source, the mean error of its other published steps falls from {{steps.mean:.1%}} to
# {{one_row.mean:.1%}}. (A run of `course_lib.scale_out.train` by torchrun
# prints at its end how long a step took.)
#
# What can you trust the planner with? With what fits by far or fails by far, and with the order of plans that are
# further apart than chance. Plans that are closer you measure.
#
# ## 5. By hand first
#
# The same model on 1,024 A100, with 2,048 samples in a minibatch. Before a program tries everything, find out where the
# good plans must be. Two thresholds are enough.
#
# - **Memory, from below.** With ZeRO-1 among many replicas, a device keeps little more than the 2 bytes of each of its
#   weights and the 2 of its gradient. So the model has to be cut into at least $4 N / M$ pieces, for $N$ parameters and
#   a memory of $M$ bytes. (Where gradients add up in 32 bits, as in Megatron-LM, it is $6 N / M$.) Activations need
#   room as well, so take twice as many.
# - **The bubble, from above.** It is $(p-1)/(m+p-1)$. For less than a tenth, $m \ge 9\,(p-1)$: a pipeline needs nine
#   micro-batches for each stage after the first.
#
# *Predict:* if the model is cut into 8 pieces in all, how many of them may be stages, and how many tensor ranks does
# each stage then have?

# %%
thousand, batch = Cluster("A100-80GB", nodes=128), 2048
print(f"at least {4 * MODEL.parameters / thousand.spec.memory:.1f} pieces, and as many again for activations")
for pieces in (8, 16, 32):
    replicas = thousand.devices // pieces
    m = batch // replicas  # micro-batches of one sample
    stages = max(p for p in (1, 2, 4, 8, 16) if m >= 9 * (p - 1))
    shape = f"{stages} stages of {pieces // stages} tensor ranks"
    print(f"{pieces:2} pieces: {replicas:3} replicas with {m:2} micro-batches, {shape}")

# %% [markdown]
# Three shapes, by two lines of arithmetic. All of them have the same number of tensor ranks, inside a node.
#
# ## 6. All of them
#
# *Predict:* how many ways are there to share this model among the 1,024 GPUs? (`tp` up to two nodes, any `pp`,
# micro-batch, ZeRO and recomputation, three schedules, and so on. Recomputation may be selective: only what takes much
# memory and little time is computed again.) And will your three shapes be among the best?

# %%
from course_lib.planner import search

found = search(MODEL, thousand, batch)
print(f"{len(found):,} plans, {sum(one.fits for one in found):,} of them fit")
print(f"{sum(one.fit == 'may fit' for one in found):,} more may fit: they come after these")

# %% [markdown]
# In this picture a dot is the fastest of all plans with the same ranks, ZeRO stage and recomputation. Down is faster,
# left is smaller. Rest the mouse on a dot to see its plan, and click on a name below the picture to hide its dots or to
# bring them back.

# %%
from course_lib.figures import plan_map

plan_map(found, title="Plans for 70 billion parameters on 1,024 A100")

# %% tags=["build-only"]
unsure = sum(one.fit != "fits" for one in found.pareto)

# %% [markdown]
# The line along the lower left edge is the **Pareto front**: the plans that no other beats in both memory and time. It
# has {{len(found.pareto)}} plans, and it is no list to choose from. Of these, {{unsure:in_words}} do not fit or only
# *may* fit, many are far slower than the best, and a plan that is a hundredth behind the front is as good as one on it.
# *Predict:* the fastest plan that fits, against the slowest that fits: twice as fast, six times, fifty times? And how
# many plans are as good as the fastest, as far as anybody can tell?

# %%
from course_lib.figures.words import plan_in_words

best, front = found.best, {id(one) for one in found.pareto}
slowest = max((one for one in found if one.fits), key=lambda one: one.step_time.total)
print(f"{slowest.step_time.total / best.step_time.total:.0f} times. The fastest is")
print(fill(plan_in_words(best.plan), 90))
print(fill(best.why, 90))
on_it = sum(id(one) in front for one in found.tied)
print(f"{len(found.tied)} plans that fit cannot be told apart from it, and {on_it} of these are on the front")

# %% [markdown]
# Steps of two set-ups on one machine differ by up to {{ALIKE - 1:percent}} by chance, so any of these may be the best.
# Most of them are variants of a few **shapes**. Here is the fastest of each shape, and what distinguishes it:

# %%
shapes = {}
for one in sorted(found.tied, key=lambda one: one.step_time.total):
    shapes.setdefault((one.plan.dp, one.plan.tp, one.plan.pp), one)
for (dp, tp, pp), one in shapes.items():
    left, time = (one.capacity - one.memory.total) / 2**30, one.step_time
    waits = f"bubble {time.bubble:.1f} s, tensor ranks {time.tensor:.1f} s, gradients {time.data:.1f} s"
    print(f"dp {dp:3} x tp {tp} x pp {pp}: {time.total:.1f} s, {left:2.0f} GiB left; it waits: {waits}")

# %% [markdown]
# Your three shapes are among them. They lean on different things: many replicas on the network, many stages on the
# schedule, many tensor ranks on the links inside a node. How good these are on your machine decides, and no catalogue
# knows. **So planning does not end with a plan, but with a list of what to measure**: one step of each shape, then
# `calibrate` with these steps, then the variants of the shape that is ahead.
#
# Is it worth that? Say the model is to see 20 tokens for each of its parameters, and an hour of a device costs 2
# dollars. (That is an example. Put in your own price.)

# %%
tokens, price = 20 * MODEL.parameters, 2.0
days = tokens / best.tokens_per_second / 86_400
low, high = best.step_time.around(days)
cost, trying = days * 24 * thousand.devices * price, len(shapes) * thousand.devices * price
print(f"{days:.0f} days ({low:.0f} to {high:.0f}) and {cost / 1e6:.1f} million dollars")
print(f"an hour for each of {len(shapes)} shapes: {trying:,.0f} dollars")
print(f"between two plans that are tied there may be {cost * (ALIKE - 1):,.0f} dollars")

# %% [markdown]
# An hour for each shape costs {{trying / cost / (ALIKE - 1):percent}} of what a wrong choice among them may cost.
# (These are days without failures, of which the planner knows nothing. In 54 days on 16,384 H100 Llama 3 had 419
# unexpected interruptions; Llama Team 2024, section 3.3.4. At that rate there is one every
# {{54 * 16_384 / 419 / thousand.devices:.1f}} days here.)
#
# ## 7. New hardware
#
# The next generation is here.
#
# ### Question: new devices, old plan

# %%
Card("same_plan")

# %% [markdown]
# Here is what the planner says of a step, before and after. (The stored picture is folded away, so that you can answer
# first: choose the three dots to open it, or select the cell and press the space bar.)

# %% jupyter={"outputs_hidden": true}
before = search(MODEL, cluster, BATCH).best
h100 = Cluster("H100-80GB", nodes=8, between="InfiniBand HDR")
carried, anew = estimate(MODEL, h100, before.plan, BATCH), search(MODEL, h100, BATCH).best
print("What the time of a step goes into, on the old cluster and on the new one:")
step_time_by_part({"A100": before, "H100, the same plan": carried, "H100, planned anew": anew}, title="A refresh")

# %% [markdown]
# On this cluster planning anew saves {{1 - anew.step_time.total / carried.step_time.total:percent}}, which nobody could
# tell apart. Is that always so? An `H200-141GB` computes exactly as fast as an `H100-80GB`, but has more memory, and
# faster. A `B300-262GB` has {{Cluster("B300-262GB").spec.memory / cluster.spec.memory:.1f}} times the memory of an
# A100. *Predict:* is the old plan nearly the best there, too?

# %%
refreshed = {}
for device in ("H200-141GB", "B300-262GB"):
    machine = Cluster(device, nodes=8, between="InfiniBand HDR")
    refreshed[device] = [estimate(MODEL, machine, before.plan, BATCH), search(MODEL, machine, BATCH).best]
    for name, one in zip(("same plan", "planned anew"), refreshed[device], strict=True):
        shape = f"dp {one.plan.dp:2} x tp {one.plan.tp} x pp {one.plan.pp}"
        print(f"{device}, {name:12} {shape}: {one.step_time.total:4.1f} s, {one.memory.total / 2**30:3.0f} GiB")

# %% tags=["build-only"]
longer_by = {name: old.step_time.total / new.step_time.total - 1 for name, (old, new) in refreshed.items()}

# %% [markdown]
# With room for more of each layer on a device, the new plans cut each matrix into fewer pieces, and more replicas share
# the samples. On H200 a step of the old plan is {{longer_by["H200-141GB"]:.1%}} longer. Two set-ups differ by {{ALIKE -
# 1:.1%}} by chance, so measure both. On B300 it is {{longer_by["B300-262GB"]:.1%}} longer, and that is more than
# chance. Where memory grows, ask first whether the model still has to be cut so finely.
#
# ### Question: where does the money go?
#
# Every offer is planned by a search of its own. Try all of them, and compare the **MFU**, the share of the peak that
# goes into the model.

# %%
Card("which_offer")

# %% tags=["build-only"]
from lessons.L09_planning import explorer as refresh

tried = list(refresh.worth_a_try(refresh.OLD))

# %% [markdown]
# ## 8. What if
#
# Now you choose. The old cluster is the one above, with its best plan. (To answer at once, the explorer tries some
# plans only: {{len(set(plan.schedule for plan in tried)):in_words}} schedules, and micro-batches of up to
# {{max(plan.micro_batch for plan in tried):in_words}} samples. A whole search may find one that is a little faster.)
# Try these:
#
# 1. Take 8 nodes of H200 and the fastest network. What has become of the pipeline, and what is the memory used for?
# 2. From there, make the network slower, step by step. When does the best plan change, and what does it turn to?
# 3. With which devices does the slowest network cost you least? Why those?
# 4. Find a refresh in which the old plan only *may* fit, and one in which it loses more than chance.

# %%
from lessons.L09_planning.explorer import refresh_explorer

refresh_explorer()

# %% tags=["build-only"]
def on_networks(device, nodes, planned=refresh.best):
    return [planned(refresh.cluster(device, network, nodes)) for network in refresh.NETWORKS]

def longer(one, other):
    return one.step_time.total / other.step_time.total - 1

old, (slow, *_, fast) = refresh.best(refresh.OLD), on_networks("H200-141GB", 8)
lost = {device: longer(*on_networks(device, 8)[::3]) for device in refresh.DEVICES}
least, *_, most = sorted(lost, key=lost.get)
small = [name for name in refresh.DEVICES if not any(one.fits for one in on_networks(name, 4, refresh.old_plan))]

# %% [markdown]
# <details><summary>What you should see</summary>
#
# 1. It still has {{fast.plan.pp:in_words}} stages, but {{fast.plan.tp:in_words}} tensor ranks are enough in place of
#    {{old.plan.tp:in_words}}, and there are {{fast.plan.dp:in_words}} replicas in place of {{old.plan.dp:in_words}}. So
#    each device holds more of every layer: {{fast.memory.total:memory_size}} in place of
#    {{old.memory.total:memory_size}}.
# 2. Only on the slowest network. There it turns to {{slow.plan.pp:in_words}} stages and {{slow.plan.dp:in_words}}
#    replicas, so that each device has fewer gradients to send.
# 3. {{least}}: a step takes {{lost[least]:percent}} longer than on the fastest network, with {{most}}
#    {{lost[most]:percent}}. The longer a device computes, the more can travel meanwhile.
# 4. On four nodes of {{" or ".join(small)}} the old plan {{on_networks(small[0], 4, refresh.old_plan)[0].fit}}. On
#    eight nodes of B200 with the fastest network a step takes {{longer(on_networks("B200-180GB", 8,
#    refresh.old_plan)[-1], on_networks("B200-180GB", 8)[-1]):percent}} longer with it than with a new one; {{ALIKE -
#    1:percent}} might be chance.
# </details>
#
# ### Case: three managers, three offers
#
# The last one is yours to decide, and to defend.

# %%
Card("infrastructure")

# %% [markdown]
# ## 9. The same in PyTorch
#
# PyTorch does not choose a plan for you, but two of its tools count what a planner has to know. `FlopCounterMode`
# counts the FLOPs of a model as it runs. On the device "meta" tensors have a shape and no numbers, so that even the
# {{narayanan.parameters / 1e9:.0f}} billion parameters of section 4 run on your computer:

# %%
from torch.utils.flop_counter import FlopCounterMode

with torch.device("meta"):
    shape = GPTConfig(layers=48, hidden=8192, heads=64, sequence=2048, vocab=51200, tied_embeddings=True)
    large, tokens = TinyGPT(shape), torch.zeros(1, 2048, dtype=torch.long)
with FlopCounterMode(display=False) as counter:
    large(tokens).sum().backward()
print(f"parameters: {sum(p.numel() for p in large.parameters()):,}; planner: {narayanan.parameters:,}")
print(f"FLOPs for a sample: {counter.get_total_flops():,}; planner: {narayanan.step_flops(1):,.0f}")

# %% [markdown]
# `FSDPMemTracker` watches a real step, here of four ranks with `fully_shard`, and says what each byte was for:

# %%
def tracked(rank):
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import fully_shard

    model = TinyGPT(GPTConfig(vocab=12, sequence=8, layers=2, hidden=64, heads=4))
    for block in (*model.blocks, model):
        fully_shard(block)
    adam = torch.optim.Adam(model.parameters())
    with FSDPMemTracker(model, adam) as tracker:
        model(data.fixed_examples(4)[0]).sum().backward()
        adam.step()
        (held,) = tracker.get_tracker_snapshot().values()
        return {kind.value: n_bytes for kind, n_bytes in held.items() if n_bytes and hasattr(kind, "value")}

# %%
ours = estimate(tiny, Cluster(nodes=1, devices_per_node=4), Plan(dp=4, zero=3, precision="fp32"), 4).memory
theirs = launch(tracked, world_size=4).results[0]
print("tracked:", theirs)
print(f"planner: parameters {ours.parameters:,}, gradients {ours.gradients:,}, optimizer {ours.optimizer:,}")

# %% [markdown]
# To the last parameter, FLOP and byte, except for Adam's {{(theirs["OptState"] - ours.optimizer) / 4:.0f}} counters of
# steps, one for each parameter, in 32 bits. What these tools do differently:
#
# - They count what is run, so somebody has to write the model first. The planner begins with five numbers: layers,
#   hidden size, heads, sequence and vocabulary. And they say nothing of time, links, or other plans.
# - `FlopCounterMode` counts matrix products, attention included, and nothing else. So does the planner's MFU.
# - The tracker counts tensors. What a device needs beyond these, the planner's margin, nobody sees from inside Python.
# - The function `tracked` runs under `torchrun --nproc-per-node 4` after `dist.init_process_group()`.
#
# The files to read are `torch/utils/flop_counter.py` and `torch/distributed/_tools/mem_tracker.py`. (The underscore
# says that `_tools` may change with any version.)
#
# ## What you know now
#
# - A plan fits if its fullest device does. Who talks most sits closest: tensor ranks inside a node, pipelines and
#   replicas across.
# - Two thresholds, memory from below and the bubble from above, lead by hand to the shapes that a search finds.
# - Choosing by the planner loses little, even where its lengths are off. Plans closer than chance are tied: here
#   {{len(found.tied)}} of {{len(found):,}}, in {{len(shapes):in_words}} shapes.
# - The best plan depends on the number of devices and on what they are. New hardware may want a new plan.
# - Faster devices gain less than their peak, unless memory and links keep up.
# - What to take home is a list of what to measure: a step of each shape that is tied, before you pay for weeks of one.
#
# ### When it stops being true
#
# - **Small differences.** Plans closer than chance cannot be told apart. Measure a step of each shape.
# - **Bad days.** Slow nodes, failures, a network shared with others: none of this is in it.
# - **Other software.** The numbers behind it, such as the share of the peak that matrix products reach, are in the
#   middle of what was published. Yours may be better or worse: calibrate.
# - **Mixtures of experts.** On {{mixed.n}} of their steps the planner is off by {{mixed.mean:.1%}} without their
#   source, and by {{mixed_row.mean:.1%}} after one step of the same model; runs that one table prints as equal are
#   {{alike:.1%}} off their own mean. Say with `Plan(dispatch=...)` how tokens reach their experts, which matters most,
#   and measure a step of your model before you choose between plans that differ by less than that.
# - **What nobody published.** No published step stands behind zero-bubble schedules here, and on each device there is a
#   largest published run. What lies beyond is extrapolated, and `why` says so.
#
# ### Further reading
#
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC21,
#   arXiv:2104.04473: how to combine all three, measured on 3,072 A100.
# - Bang et al. 2024, *vTrain: A Simulation Framework for Evaluating Cost-Effective and Compute-Optimal Large Language
#   Model Training*, MICRO, arXiv:2312.12391: another planner, with the measured plans of section 4.
# - Llama Team 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783, section 3.3: a plan for 16,384 H100.
# - Williams, Waterman and Patterson 2009, *Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures*, Communications of the ACM 52(4).
#
# **Next:** the [exercise](../exercises/09_planning/09_planning.ipynb), in which you write two formulas and choose a
# plan by hand; or the first of ten [scenarios](scenarios/S01_single_node.ipynb), in which you decide.
