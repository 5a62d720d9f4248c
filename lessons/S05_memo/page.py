# %% [markdown]
# # Scenario 5: the memo
#
# **What you do:** recommend a plan for some nodes, and defend it in a memo of two pages.<br>
# **Time:** 90 minutes.<br>
# **You need:** the lessons up to [planning](../09_planning.ipynb).
#
# Your group has been given a few nodes, and the head of the group expects that they are nearly as many times as fast as
# one. The model does not fit on one GPU. She wants a memo with
#
# 1. a plan: data, tensor and pipeline parallelism, micro-batches, precision;
# 2. how it solves the out-of-memory problem;
# 3. where and why gradients are synchronised, and what that does to the scaling;
# 4. micro-batches in a pipeline against naive splitting of the layers;
# 5. what mixed precision gains, and what stays in higher precision;
# 6. the likeliest bottleneck, and what to try first.
#
# Beside the text stand eight numbers. Write them between the quotes of their cells, with a unit, such as "3.4 GB",
# "25%" or "8.8 s", and run the cell. They are compared with the plan that you decided on last, to within 2%. The text
# itself nobody can judge but you: its cards say what a good one has. Whenever you decide on another plan, its card says
# which numbers and texts belonged to the old one.
#
# What you type into a card is kept within a second, in the folder `.course`, and a number when its cell has run. You
# can close this page and come back, and you can change every answer until you hand the memo in. All costs here are
# **modelled**, by the planner.
#
# ## 1. The plan
#
# Decide first, then run it. Whatever meets the three demands is a good plan.

# %%
from lessons import Card
from lessons.S05_memo import memo

SEED = 0  # 1, 2, 3, 4: other nodes, another model, and other things that may be changed
Card("S5_plan", SEED)

# %% [markdown]
# To try a plan before you decide, write one here.

# %%
from textwrap import fill

from course_lib.planner import Plan, estimate

case = memo.brief(SEED)
tried = estimate(case.model, case.cluster, Plan(dp=case.cluster.devices), case.batch)
print(fill(tried.why, 90))

# %% [markdown]
# `tried.memory`, `tried.step_time`, `tried.flows` and `tried.bubble` have what you can quote, and
# `memo.one_node(case).step_time` has the best plan on one node. Derive a number first, then look it up.
#
# ## 2. Out of memory

# %%
Card("S5_memory", SEED)

# %% tags=["nbval-ignore-output"]
memo.numbers(SEED, state="", need="")

# %% [markdown]
# ## 3. Gradients and scaling

# %%
Card("S5_gradients", SEED)

# %% tags=["nbval-ignore-output"]
memo.numbers(SEED, sent="", speed_up="")

# %% [markdown]
# ## 4. Micro-batches or naive splitting

# %%
Card("S5_pipeline", SEED)

# %% tags=["nbval-ignore-output"]
memo.numbers(SEED, bubble="", naive="")

# %% [markdown]
# ## 5. Mixed precision

# %%
Card("S5_precision", SEED)

# %% tags=["nbval-ignore-output"]
memo.numbers(SEED, wide="")

# %% [markdown]
# ## 6. What limits it, and what to try first
#
# Decide on both first: they are run with your plan. Then write down why.

# %% tags=["nbval-ignore-output"]
memo.numbers(SEED, lost="")

# %%
Card("S5_bottleneck", SEED)

# %%
Card("S5_mitigation", SEED)

# %%
Card("S5_advice", SEED)

# %% [markdown]
# ## Hand it in
#
# These are all eight numbers, beside the plan that you decided on last.

# %% tags=["nbval-ignore-output"]
memo.numbers(SEED)

# %% [markdown]
# The next cell writes two files. `S05_memo.html` is the memo, two pages when it is printed. `S05_sheet.html` is for
# whoever marks it: what the runs say of your numbers and choices, and the levels of each section. Run it again after
# each change.

# %% tags=["nbval-ignore-output"]
for file in memo.export("S05_memo", author="", seed=SEED):
    print(file.name)

# %% [markdown]
# <details><summary>When you have handed it in: what good memos have in common</summary>
#
# - They begin with the fullest device, and say which choice makes which part of its memory smaller.
# - They give each link the traffic that it can carry, and know what crosses the slow one.
# - They derive a number before they read it off, and say where the two differ.
# - They name the price of each choice, and one thing that would change the recommendation.
#
# A wrong turn at the start is the most expensive. In the first brief replicas alone with ZeRO-3 fit, and are slower on
# four nodes than one node is by itself. Tensor ranks over two nodes fit, too, and are slower still.
#
# </details>
#
# ### Where such plans were made
#
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC21,
#   arXiv:2104.04473, section 3: how to choose among plans, with measurements.
# - Le Scao et al. 2022, *BLOOM: A 176B-Parameter Open-Access Multilingual Language Model*, arXiv:2211.05100: data,
#   tensor and pipeline parallelism with bf16 on 384 A100.
