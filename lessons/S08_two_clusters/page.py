# %% [markdown]
# # Scenario 8: two clusters
#
# **What you do:** make one job run well across two clusters that are far from each other: first right, then fast.<br>
# **Time:** 35 minutes.<br>
# **You need:** the lessons on [data parallelism](../02_data_parallelism.ipynb) and
# [mixed precision](../07_mixed_precision.ipynb).
#
# One cluster is too small for the next model, and so is the other. They are four thousand kilometers apart. A message
# takes twenty milliseconds on the way. Each cluster has lent one node of four devices to a first job on both: node 0 is
# in the first cluster, node 1 in the second, and each has a spare. The plan: a replica on each device, and gradients in
# four messages, since every message pays for the way. For some hours the job went as planned.
#
# ## 1. What everybody sees

# %% tags=["nbval-ignore-output"]
from lessons.S08_two_clusters.case import CASE

case = CASE.variant()  # seed=1, 2, 3: another cause
case.evidence()

# %% [markdown]
# The job's devices and links are **emulated**: real ranks really send its messages, scaled down by a thousand, and a
# report's time has a **jitter** of about 1%. What it learns is **measured**, on a small model that is trained in the
# same way.
#
# ## 2. Make it right

# %% tags=["nbval-ignore-output"]
from course_lib.classroom.widgets.measuring import Measuring

Measuring(case)

# %%
case.debrief()

# %% [markdown]
# ## 3. Make it fast
#
# Nothing is wrong any more. But the plan was a first guess, and devices wait for the way between the clusters. There
# are other ways to let two clusters work on one model. The card compares them on the healthy job, with a minibatch and
# a way of its own, so that its answer is the same after every night. Decide before you run them.

# %%
from lessons import Card

Card("S8_scaling")

# %% [markdown]
# What would have to change for another answer to be right? Distance changes how long a message is on its way, and
# bandwidth how much goes at once. Local steps give up a part of what each step learns, and a two-level sum gives up
# nothing, but it needs the way in every step.
