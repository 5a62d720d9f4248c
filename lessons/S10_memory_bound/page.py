# %% [markdown]
# # Scenario 10: a run bound by memory
#
# **What you do:** bring a run back to life that has no memory left, with every mechanism of the course and in mixed
# precision.<br>
# **Time:** 30 minutes.<br>
# **You need:** all lessons, above all [mixed precision](../07_mixed_precision.ipynb) and
# [planning](../09_planning.ipynb).
#
# The model shall read long documents, so somebody made its sequences four times as long: 8,192 tokens. Since then no
# step gets to its end. The run has been in 32 bits since its first day, "to be on the safe side", and each matrix is
# cut among the eight devices of a node. There are two nodes of A100 with 40 GB each, and soon there will be others.
#
# Everything here is **modelled**: calculated by the planner of the [planning lesson](../09_planning.ipynb), not run.
# Any plan is accepted that reaches the targets. Two plans whose steps differ by less than an eighth count as equal,
# since steps of two set-ups on the same machine differ as much by chance.
#
# ## 1. What fills the memory?
#
# This is the job as it stands, and what lies in each device when it stops.

# %%
from lessons import Card
from lessons.S10_memory_bound.case import CASE

case = CASE.variant()  # seed=1: another model
case.evidence()

# %%
Card("S10_limit", case.seed)

# %% [markdown]
# ## 2. Everything together
#
# Set each list, and decide. Below the lists stands whether there can be such a plan; what it costs you see when you
# have decided. You may try as often as you like.

# %%
Card("S10_plan", case.seed)

# %% [markdown]
# ## 3. Older devices
#
# The run is moved, as runs are.

# %%
Card("S10_better", case.seed)

# %% [markdown]
# ## 4. Defend it
#
# Write it as you would say it in the review. Your plan of step 3 is then set beside the usual choices and beside the
# best that a search finds, and you compare your sentences with a good answer.

# %%
Card("S10_defend", case.seed)

# %% [markdown]
# ## 5. Afterwards
#
# When a plan of yours has reached all targets of step 3, this says what the usual choices lead to, and where such a
# choice had to be made in earnest.

# %%
case.debrief()

# %% [markdown]
# Go back to the first cell and give it a seed: `CASE.variant(seed=1)`. Then run the page again.
# The questions are the same, but another model asks for another plan. (The brief at the top speaks of the first one;
# what counts is the evidence.)
