# %% [markdown]
# # Scenario 10: a run bound by memory
#
# **What you do:** bring a run back to life that has no memory left, with every mechanism of the course and in mixed
# precision.<br>
# **Time:** 30 minutes.<br>
# **You need:** all lessons, above all [mixed precision](../07_mixed_precision.ipynb) and
# [planning](../09_planning.ipynb).
#
# The model shall read long documents, so somebody made its sequences longer. Since then no step gets to its end. The
# run has been in 32 bits since its first day, "to be on the safe side". Its devices are A100, and soon there will be
# others.
#
# All plans here are **modelled**: calculated by the planner of the [planning lesson](../09_planning.ipynb), not run.
# One small model is really trained. Any plan is accepted that reaches the targets. Two plans whose steps differ by less
# than an eighth count as equal, since steps of two set-ups on the same machine differ as much by chance.
#
# ## 1. What fills the memory?
#
# This is the job as it stands, and what lies in each device when it stops.

# %%
from lessons import Card
from lessons.S10_memory_bound.case import CASE

case = CASE.variant()  # seed=1 to 5: another model, other devices
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
# The run is moved, as runs are, to devices without bf16. This is how a small model begins in fp16. *Predict:* the loss
# is multiplied by a very large number at first; what becomes of the first steps?

# %%
from lessons.S10_memory_bound.runs import overflow

overflow()

# %% [markdown]
# A gradient that is too large for fp16 is infinite, so the step is skipped, and the next loss is multiplied by half as
# much. After some good steps the scale is doubled, until the next overflow (here after few, with the defaults of
# `torch.amp.GradScaler` after 2,000): skipped steps are the price at which the scale is found, and no reason to worry
# while they stay rare. With the same numbers on all ranks, all skip together.

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
# Go back to the first cell and give it a seed: `CASE.variant(seed=1)`, up to 5. Then run the page again. The questions
# are the same, but the model and the devices are others, so another plan is right: what was best before is wrong nearly
# everywhere else.
