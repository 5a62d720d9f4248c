# %% [markdown]
# # Scenario 5: the memo
#
# **What you do:** recommend a plan for 32 GPUs, and defend it in a memo of two pages.<br>
# **Time:** 90 minutes.<br>
# **You need:** the lessons up to [planning](../09_planning.ipynb).
#
# Your group has been given 4 nodes of 8 A100 with 40 GiB each. Inside a node a GPU sends 300 GB/s (NVLink), between
# nodes 25 Gbit/s (Ethernet). You are to train a model of 13 billion parameters, with 40 layers of width 5,120, on
# minibatches of 256 samples of 2,048 tokens. It does not fit on one GPU. It has been trained on one node, and the head
# of the group expects that four nodes are nearly four times as fast: at least 80% of that. She wants a memo with
#
# 1. a plan: data, tensor and pipeline parallelism, micro-batches, precision;
# 2. how it solves the out-of-memory problem;
# 3. where and why gradients are synchronised, and what that does to the scaling;
# 4. micro-batches in a pipeline against naive splitting of the layers;
# 5. what mixed precision gains, and what stays in higher precision;
# 6. the likeliest bottleneck, and what to try first.
#
# Everything you type is kept within a second, in the folder `.course`. You can close this page and come back, and you
# can change every answer until you hand the memo in. All costs here are **modelled**, by the planner.
#
# ## 1. The plan
#
# Decide first, then run it. Whatever meets the three demands is a good plan. The numbers in your text are compared with
# the plan that you decided on last.

# %%
from lessons import Card

Card("S5_plan")

# %% [markdown]
# To try a plan before you decide, write one here.

# %%
from textwrap import fill

from course_lib.planner import Plan, estimate
from lessons.S05_memo.memo import CASE

tried = estimate(CASE.model, CASE.cluster, Plan(dp=32), CASE.batch)
print(fill(tried.why, 90))

# %% [markdown]
# `tried.memory`, `tried.step_time`, `tried.flows` and `tried.bubble` have the numbers that you can quote.
#
# ## 2. Out of memory

# %%
Card("S5_memory")

# %% [markdown]
# ## 3. Gradients and scaling

# %%
Card("S5_gradients")

# %% [markdown]
# ## 4. Micro-batches or naive splitting

# %%
Card("S5_pipeline")

# %% [markdown]
# ## 5. Mixed precision

# %%
Card("S5_precision")

# %% [markdown]
# ## 6. What limits it, and what to try first
#
# Both are run with your plan.

# %%
Card("S5_bottleneck")

# %%
Card("S5_mitigation")

# %% [markdown]
# ## Hand it in
#
# This writes the memo twice: `S05_memo.md` with its figures beside it, and `S05_memo.html`, which has everything in it
# and can be printed. Below each section stands what the comparison of your numbers has found. Run it again after each
# change.

# %% tags=["nbval-ignore-output"]
from lessons.S05_memo import memo

for file in memo.export("S05_memo", author=""):
    print(file.name)

# %% [markdown]
# <details><summary>When you have handed it in: what good memos have in common</summary>
#
# - They begin with the fullest device, and say which choice makes which part of its memory smaller.
# - They give each link the traffic that it can carry, and know what crosses the slow one.
# - They derive a number before they read it off, and say where the two differ.
# - They name the price of each choice, and one thing that would change the recommendation.
#
# A wrong turn at the start is the most expensive. Replicas alone with ZeRO-3 fit, and are slower on four nodes than one
# node is by itself. Tensor ranks over two nodes fit, too, and are slower still.
#
# </details>
#
# ### Where such plans were made
#
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC21,
#   arXiv:2104.04473, section 3: how to choose among plans, with measurements.
# - Le Scao et al. 2022, *BLOOM: A 176B-Parameter Open-Access Multilingual Language Model*, arXiv:2211.05100: data,
#   tensor and pipeline parallelism with bf16 on 384 A100.
