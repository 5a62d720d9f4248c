# %% [markdown]
# # Planning, by hand
#
# What does a plan hold in memory, what does it send, and which plan do you take? You write two small formulas, and
# choose a plan for 32 GPUs that fits and cannot be told apart from the best. Then you write a planner of your own, and
# hold it against steps that others have measured on up to 3,072 GPUs.
#
# | | you build | minutes | difficulty | points |
# |---|---|---|---|---|
# | 1 | `state_bytes`: weights, gradients and optimizer state on a device | 15 | ★☆☆ | 3 |
# | 2 | `step_traffic`: the bytes that a rank sends in a step | 20 | ★★☆ | 4 |
# | 3 | `choose`: a plan for 32 GPUs | 30 | ★★★ | 5 |
# | 4 | `predict_step`: an open task: how long does a step take on a real machine? | 60 | ★★★ | 3 + 2 |
#
# Below each function stands its check. Nothing that you write can break anything, so run a check as often as you like.
# The 2 points beside those of an open task are for three sentences. No check can read them, so a person does.

# %%
from statistics import mean, median

from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from lessons.L09_planning import checks
from lessons.L09_planning.measured import SEEN

# %% [markdown]
# ## 1. What a device holds
#
# | you build | minutes | difficulty |
# |---|---|---|
# | bytes of weights, gradients and Adam's state, for any plan | 15 | ★☆☆ |
#
# Tensor ranks and stages cut the model: each holds a part. Replicas hold the same, unless ZeRO shares it out:
#
#     ZeRO-1    optimizer state
#     ZeRO-2    optimizer state, gradients
#     ZeRO-3    optimizer state, gradients, weights

# %% nbgrader={"grade_id": "state_bytes", "solution": true}
def state_bytes(parameters, dp, tp, pp, zero, precision):
    """Bytes on one device between the backward pass and the optimizer's step.

    parameters: of the whole model. Tensor ranks and stages cut it evenly.
    dp, tp, pp: replicas, tensor ranks and stages.
    zero: 0 to 3, what the replicas share out.
    precision: "bf16": weights and gradients in 16 bits, and Adam with a 32-bit master
        copy of the weights; "fp32": everything in 32 bits, and no copy.
    Returns three numbers: bytes of weights, of gradients, of the optimizer's state (Adam
    keeps two moments in 32 bits for each weight). Where parameters do not divide, their
    number is rounded up.
    """
    ### BEGIN SOLUTION
    weight, gradient, adam = (2, 2, 4 + 4 + 4) if precision == "bf16" else (4, 4, 4 + 4)
    mine = -(-parameters // (tp * pp))
    share = -(-mine // dp)
    return (
        weight * (share if zero >= 3 else mine),
        gradient * (share if zero >= 2 else mine),
        adam * (share if zero >= 1 else mine),
    )
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: bytes of a parameter</summary>
#
# A number of 16 bits takes 2 bytes, and one of 32 bits takes 4. How many numbers does Adam keep for a weight, with the
# master copy and without it?
# </details>
# <details><summary>Hint 2: how many parameters?</summary>
#
# Which of the three axes cut the model, whatever `zero` says? What of the rest do replicas share out, at each level?
# </details>
# <details><summary>Hint 3: rounding up</summary>
#
# `-(-a // b)` is a divided by b, rounded up.
# </details>

# %% nbgrader={"grade_id": "check_state_bytes", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L09_planning.checks")

### END HIDDEN TESTS
checks.state_bytes(state_bytes).points(3)

# %% [markdown]
# The extra memory in the price is that of ranks which hold as many bytes as you said. The planner's function is
# [`model_state`](../../course_lib/planner/memory.py). Activations come on top, and a margin. PyTorch plans nothing for
# you: it tells afterwards, with `torch.cuda.max_memory_reserved()`.
#
# ## 2. What a rank sends
#
# | you build | minutes | difficulty |
# |---|---|---|
# | bytes of a step for replicas, tensor ranks and stages | 20 | ★★☆ |
#
#     replicas       gradients, once in a step: a ring all-reduce
#     with ZeRO-3    in each micro-batch: gather weights forward, gather them backward, scatter gradients
#     tensor ranks   four ring all-reduces in each layer and micro-batch
#     stages         a message forward to the next stage, one back to the stage before

# %% nbgrader={"grade_id": "step_traffic", "solution": true}
def step_traffic(parameters, layers, message, micro_batches, dp, tp, pp, stage, zero):
    """Bytes that one rank sends in a step, all in 16 bits.

    parameters, layers: on this rank, before ZeRO.
    message: bytes of the hidden states of one micro-batch between two layers.
    micro_batches: of one replica in a step.
    stage: of this rank, from 0 to pp - 1. Tensor ranks hold the same hidden states, so
        each sends a tp-th of them to the next stage, and of their gradients back.
    zero: 0, 1 or 3. ZeRO-1 scatters gradients and gathers weights, once in a step.
    Returns three numbers: between replicas, between tensor ranks, between stages.
    """
    ### BEGIN SOLUTION
    trips = 3 * micro_batches if zero == 3 else 2
    data = trips * 2 * parameters * (dp - 1) / dp
    tensor = 4 * layers * micro_batches * 2 * message * (tp - 1) / tp
    neighbors = (stage > 0) + (stage < pp - 1)
    return data, tensor, neighbors * micro_batches * message / tp
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: a ring</summary>
#
# A tensor goes round n ranks in n pieces. To scatter or to gather, a rank passes on all pieces but one. An all-reduce
# does both.
# </details>
# <details><summary>Hint 2: ZeRO-3</summary>
#
# Take a step of four micro-batches. In the list above, how often does a tensor as large as all parameters go round the
# ring with ZeRO-3, and how often without?
# </details>
# <details><summary>Hint 3: the ends of the pipeline</summary>
#
# Write down for each of four stages to whom it sends something. And for a single stage?
# </details>

# %% nbgrader={"grade_id": "check_step_traffic", "grade": true, "locked": true, "points": 4}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L09_planning.checks")

### END HIDDEN TESTS
checks.step_traffic(step_traffic).points(4)

# %% [markdown]
# The bytes in the price are no formula: four ranks, two replicas of two tensor ranks, have sent them. Your function
# says the same:

# %%
print(f"{sum(step_traffic(6_000, 2, 800, 3, dp=2, tp=2, pp=1, stage=0, zero=0)):,.0f}")

# %% [markdown]
# The planner's own function is [`bytes_sent`](../../course_lib/planner/communication.py). In PyTorch it is NCCL that
# decides, and it often takes a tree in place of a ring, which sends about as much in fewer steps.
#
# ## 3. Choose
#
# | you build | minutes | difficulty |
# |---|---|---|
# | a plan that fits and is tied with the fastest | 30 | ★★★ |
#
# `search` of lesson 09 estimates thousands of plans. You know more than that: which of them can be left out? This is
# one plan, and what is said of it:

# %%
plan = Plan(dp=4, tp=4, pp=2, micro_batch=1, schedule="1f1b", zero=1, sequence_parallel=True, recompute="selective")
found = estimate(ModelSpec(40, 5120, 40, 2048, 51_200, flash_attention=True), Cluster(nodes=4), plan, 64)
print(f"{found.memory.total / 2**30:.0f} of {found.capacity / 2**30:.0f} GiB, {found.step_time.total:.1f} s a step")

# %% nbgrader={"grade_id": "choose", "solution": true}
def choose(model, cluster, global_batch):
    """A plan for 32 GPUs.

    model: a ModelSpec.  cluster: a Cluster with 32 devices.  global_batch: samples.
    Returns a Plan in bf16 that needs at most 90% of a device's memory (memory.total of
    its estimate; `capacity` is what a device has), and that cannot be told apart from the
    best plan that search(..., within=0.9) finds: its step (step_time.total) takes at most
    12% longer, as two set-ups on one machine differ by so much by chance.
    A Plan has dp * tp * pp = 32, micro_batch (samples), zero (0 to 3), sequence_parallel,
    recompute ("none", "selective" or "full"), and schedule: with one stage on each rank "gpipe",
    "1f1b", "zb_h1" or "zb_h2"; with virtual_stages=2 "interleaved_1f1b", "zbv" or "dualpipev".

    You may call estimate(model, cluster, plan, global_batch) for up to 500 plans. It
    raises ValueError for a plan that cannot be.
    """
    ### BEGIN SOLUTION
    best = None
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            for micro_batch in (1, 2, 4):
                for recompute in ("none", "selective", "full"):
                    for zero in (1, 3):
                        try:
                            plan = Plan(
                                dp=cluster.devices // (tp * pp), tp=tp, pp=pp, micro_batch=micro_batch, zero=zero,
                                schedule="zb_h1" if pp > 1 else "1f1b", sequence_parallel=tp > 1, recompute=recompute,
                            )
                            one = estimate(model, cluster, plan, global_batch)
                        except ValueError:
                            continue
                        fits = one.memory.total <= 0.9 * one.capacity
                        if fits and (best is None or one.step_time.total < best.step_time.total):
                            best = one
    return best.plan
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: fewer plans</summary>
#
# All cuts of 32 GPUs, times micro-batches, schedules, ZeRO and recomputation are thousands. For each field of a Plan
# ask: which values can I rule out without an estimate, by what the lessons have shown?
# </details>
# <details><summary>Hint 2: what costs little</summary>
#
# Some fields buy memory or time for almost nothing, so one value is enough. What did lesson 06 say of
# `sequence_parallel`, lesson 03 of ZeRO-1, and lesson 05 of schedules with a small bubble?
# </details>
# <details><summary>Hint 3: what has to be tried</summary>
#
# The others trade memory for time, and which way is better depends on the model. Two models show it: print
# `memory.total` and `step_time.total` for 1.3B and 30B with `recompute` "none" and "full", and again for ZeRO-1 and
# ZeRO-3. `itertools.product` loops over all combinations of a few lists.
# </details>

# %% nbgrader={"grade_id": "check_choose", "grade": true, "locked": true, "points": 5}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L09_planning.checks")

### END HIDDEN TESTS
checks.choose(choose).points(5)

# %% [markdown]
# Nothing is sent here, so there is no price but the plans you try. The planner's own function is
# [`search`](../../course_lib/planner/search.py), and PyTorch has none. Many plans pass, as no estimate can tell them
# apart. To choose among these, measure a step of each shape.
#
# ## 4. An open task: your own planner
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the seconds of a step, for any GPT and any plan on A100s | 60 | ★★★ |
#
# How long does a step take? These ten were measured, for GPTs of 1.7 billion to a trillion parameters, each with
# another plan (Narayanan et al. 2021, table 1). Everything is computed again in the backward pass. The last column is
# what the FLOPs alone would take if each GPU did the 312 TFLOP/s of its data sheet. Replicas add up their gradients in
# 32 bits, over a network of which each GPU has 25 GB/s by the data sheet (12.5 GB/s in the steps that you are going to
# predict):

# %%
def at_peak(model, plan, samples, network):
    flops = model.step_flops(samples) + model.recomputed_flops(samples, "full")
    return flops / (plan.devices * 312e12)


for name, model, plan, samples, network, seconds in SEEN:
    print(f"{name:8}  dp {plan.dp:2} x tp {plan.tp} x pp {plan.pp:2}, stages a rank: {plan.virtual_stages}, "
          f"{plan.micro_batches(samples):3} micro-batches of {plan.micro_batch:2}: {seconds:5.1f} s, "
          f"{at_peak(model, plan, samples, network):4.1f} s at peak")

# %% [markdown]
# First a prediction on paper. Another group measured two steps of GPT-18B, both on 256 GPUs, with 1,024 samples in 8
# micro-batches (vTrain). One is cut as dp 32 x tp 8 x pp 1, the other as dp 4 x tp 8 x pp 8. How many times as long
# does the second take? Write down what you expect, and from what:

# %%
expected = 1.0

# %% [markdown]
# Then write a function that comes closer than the FLOPs alone. What counts is how far off it is, on average, for twelve
# steps that are *not* in the table: these two and ten more of the same group, three models on another cluster, cut in
# other ways. Three levels are on the scale: met, good, and as good as ours. The step at peak is here:

# %%
checks.predict_step(at_peak)

# %% nbgrader={"grade_id": "predict_step", "solution": true}
def predict_step(model, plan, samples, network):
    """Seconds of a training step on A100s, 8 to a node, with everything computed again.

    model: a ModelSpec. It has parameters, layers, hidden, sequence, and the FLOPs of
        step_flops(samples) and, on top, of recomputed_flops(samples, "full").
    plan: a Plan. It has dp, tp, pp, devices, micro_batch, micro_batches(samples), and
        virtual_stages (stages on a rank; 1 without interleaving).
    samples: of the minibatch.
    network: bytes per second from one device to other nodes, by the data sheet. Inside a
        node it says 300e9.

    What counts: the mean of |predicted / measured - 1| over steps that you do not see.
    """
    ### BEGIN SOLUTION
    m, message = plan.micro_batches(samples), 2 * plan.micro_batch * model.sequence * model.hidden
    all_reduces = 6 * model.layers / plan.pp * m  # two in a layer, forward, again forward, and backward
    tensor = all_reduces * 2 * (plan.tp - 1) / plan.tp * message / 230e9
    gradients = 4 * model.parameters / (plan.tp * plan.pp)  # in 32 bits
    data = 2 * (plan.dp - 1) / plan.dp * gradients / network
    bubble = (plan.pp - 1) / (plan.virtual_stages * m)
    # 58% of the peak and 230 GB/s: of all that I tried, the pair that is closest to the ten.
    return (at_peak(model, plan, samples, network) / 0.58 + tensor) * (1 + bubble) + data
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: what is left out</summary>
#
# Lesson 09 takes a step apart. Which of its parts does `at_peak` leave out? For each of them, look for two rows of the
# table in which it should be large and small.
# </details>
# <details><summary>Hint 2: one factor is not enough</summary>
#
# No GPU reaches its peak, so you could multiply by a factor. How far off is the best one on the ten, and what do the
# plans of the ten have in common that others may not have? Count stages and micro-batches.
# </details>
# <details><summary>Hint 3: what you have already</summary>
#
# Lesson 05 has the length of a pipeline's step, part 2 above the bytes. Of the all-reduces in a layer, which are made
# once more if the forward pass is computed again?
# </details>
# <details><summary>Hint 4: what a link carries</summary>
#
# Less than its data sheet says. Among the eight GPUs of a node an all-reduce of 1.07 GB took 8.2 ms (vTrain, with
# nccl-tests). How many bytes did each GPU send in that time, and how many would it be in a second? With a number for
# the links, only one is left to fit.
# </details>

# %% nbgrader={"grade_id": "check_predict_step", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L09_planning.checks")

### END HIDDEN TESTS
checks.predict_step(predict_step).points(3)

# %% [markdown]
# Here are the twelve, beside your steps and those of the course's planner,
# [`estimate`](../../course_lib/planner/estimate.py). It knows more: wide matrices are multiplied faster than narrow
# ones, and `tp` makes them narrower. It has been fitted to machines of many groups, these among them, and to none
# alone. Being closer than ours can be luck: without the traffic of replicas our own step is off by 5.9% on the twelve
# in place of 6.3%, since one error cancels another, and on the ten by 9.0% in place of 3.5%. PyTorch predicts nothing:
# you run a step, and `torch.profiler` says where its time went.

# %%
from lessons.L09_planning.measured import UNSEEN

off, planner_off = [], []
for name, model, plan, samples, network, seconds in UNSEEN:
    mine = predict_step(model, plan, samples, network)
    cluster = Cluster("A100-80GB", nodes=plan.devices // 8, nics_per_node=4)
    theirs = estimate(model, cluster, plan, samples).step_time.total
    off.append(abs(mine / seconds - 1))
    planner_off.append(abs(theirs / seconds - 1))
    print(f"{name:7} dp {plan.dp:2} x tp {plan.tp} x pp {plan.pp:2}, {plan.micro_batches(samples):3} micro-batches: "
          f"measured {seconds:4.1f} s, yours {mine:4.1f} ({mine / seconds - 1:+4.0%}), "
          f"planner {theirs:4.1f} ({theirs / seconds - 1:+4.0%})")
print(f"on average yours is off by {mean(off):.0%}, the planner by {mean(planner_off):.0%}")
print(f"the two of GPT-18B: {UNSEEN[2].seconds / UNSEEN[0].seconds:.2f} times; you expected {expected}")

# %% [markdown]
# And this is what a single factor does that fits the ten as well as one can:

# %%
factor = median(seconds / at_peak(*step) for _, *step, seconds in SEEN)
for table, text in ((SEEN, "the ten that it was fitted to"), (UNSEEN, "the twelve others")):
    off_by = mean(abs(factor * at_peak(*step) / seconds - 1) for _, *step, seconds in table)
    print(f"{factor:.2f} times the time at peak: {off_by:.0%} off on {text}")

# %% [markdown]
# What would you trust your function with? Write three sentences: which part of the step makes your two steps of GPT-18B
# differ, why a factor that fits the ten says little about the twelve, and what you would measure before you believe
# yours for a plan of another kind.

# %% [markdown] nbgrader={"grade_id": "why_predict_step", "grade": true, "solution": true, "points": 2}
# The two steps have the same FLOPs, and the second waits: with 8 stages and 8 micro-batches the bubble adds seven
# eighths to what a device computes, while the gradients of replicas cost the first one more, so it is less than twice
# as long. In the ten, the bubble is at most an eighth of what a device computes, so a factor takes it in without
# knowing it, and it cannot grow with the bubble of others. Mine is furthest off with one tensor rank, whose matrices
# are wide: I would measure one step of that shape, and the link, before I compare it with others.

# %% [markdown]
# ## Everything together
#
# Your plans, and what your functions say of them, beside the planner:

# %%
SHAPES = {"1.3B": ModelSpec(24, 2048, 16, 2048, 51_200, flash_attention=True),
          "13B": ModelSpec(40, 5120, 40, 2048, 51_200, flash_attention=True)}

for name, model in SHAPES.items():
    for device in ("A100-40GB", "A100-80GB"):
        cluster = Cluster(device, nodes=4)
        plan = choose(model, cluster, 64)
        found = estimate(model, cluster, plan, 64)
        mine = sum(state_bytes(model.parameters, plan.dp, plan.tp, plan.pp, plan.zero, "bf16"))
        theirs = found.memory.parameters + found.memory.gradients + found.memory.optimizer
        m, message = plan.micro_batches(64), 2 * plan.micro_batch * model.sequence * model.hidden
        parameters = model.parameters // (plan.tp * plan.pp)
        data, *_ = step_traffic(parameters, model.layers // plan.pp, message, m,
                                plan.dp, plan.tp, plan.pp, 0, plan.zero)
        print(f"{name:5} {device}: dp {plan.dp:2} x tp {plan.tp} x pp {plan.pp}, ZeRO-{plan.zero}; "
              f"state {mine / 2**30:4.1f} GiB (planner {theirs / 2**30:4.1f}), "
              f"data {data / 1e9:4.1f} GB (planner {found.flows['data'].bytes / 1e9:4.1f})")
