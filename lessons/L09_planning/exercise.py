# %% [markdown]
# # Planning, by hand
#
# What does a plan hold in memory, what does it send, and which plan do you take? You write two small formulas, and then
# choose a plan for 32 GPUs that fits and cannot be told apart from the best.
#
# | | you build | minutes | difficulty | points |
# |---|---|---|---|---|
# | 1 | `state_bytes`: weights, gradients and optimizer state on a device | 15 | ★☆☆ | 3 |
# | 2 | `step_traffic`: the bytes that a rank sends in a step | 20 | ★★☆ | 4 |
# | 3 | `choose`: a plan for 32 GPUs | 30 | ★★★ | 5 |
#
# Below each function stands its check. Nothing that you write can break anything, so run a check as often as you like.

# %%
from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from lessons.L09_planning import checks

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
# Three trips round the ring for each micro-batch, where an all-reduce makes two in a step.
# </details>
# <details><summary>Hint 3: the ends of the pipeline</summary>
#
# The first stage sends nothing back, and the last one nothing forward. A single stage is both.
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
    A Plan has dp * tp * pp = 32, micro_batch (samples), schedule ("1f1b", "zb_h1", ...),
    zero (0 to 3), sequence_parallel, recompute ("none", "selective" or "full").

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
# <details><summary>Hint 1: what never wins</summary>
#
# Tensor ranks on several nodes. Micro-batches so large that the pipeline has few.
# </details>
# <details><summary>Hint 2: what costs little</summary>
#
# `sequence_parallel=True` wherever there are tensor ranks, `zero=1` wherever there are replicas, and in a pipeline a
# schedule with a small bubble, such as `"zb_h1"`.
# </details>
# <details><summary>Hint 3: what has to be tried</summary>
#
# `tp`, `pp`, the micro-batch, `recompute`, and ZeRO-1 or ZeRO-3: loops over these are fewer than 300 plans. Of those
# that fit, take the one with the smallest `step_time.total`.
# </details>

# %% nbgrader={"grade_id": "check_choose", "grade": true, "locked": true, "points": 5}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L09_planning.checks")

### END HIDDEN TESTS
checks.choose(choose).points(5)

# %% [markdown]
# Nothing is sent here, so there is no price but the plans you try. The planner's own function is
# [`search`](../../course_lib/planner/search.py), and PyTorch has none. Many plans pass, as
# no estimate can tell them apart. To choose among these, measure a step of each shape.
#
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
