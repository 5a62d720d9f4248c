# %% [markdown]
# # Scenario 3: make it fit, then make it fast
#
# **What you do:** find the smallest node that can hold a large model without a risk, make another one fit on its node,
# and then make it fast.<br>
# **Time:** 25 minutes.<br>
# **You need:** the lessons up to [combining mechanisms](../08_combining_mechanisms.ipynb), and
# [planning](../09_planning.ipynb).
#
# Two groups each want to train a large model further, each on a single node. One asks you which node to buy. The other
# one, yours, has its node already. Nobody has asked yet whether the models fit. There is no second node, and no memory
# outside of the devices.
#
# Everything here is **modelled**: calculated by the planner of the [planning lesson](../09_planning.ipynb), not run.
# Any plan is accepted that reaches the targets. Two plans whose steps differ by less than an eighth count as equal,
# since steps of two set-ups on the same machine differ as much by chance.
#
# ## 1. Where can it fit?
#
# This is the other group's job on the largest node that there is, with the first plan that somebody thought of.

# %%
from lessons import Card
from lessons.S03_fit_then_fast.case import CASE

case = CASE.variant()  # seed=1 to 5: other models, and other nodes that hold them
neighbor = CASE.variant(case.seed + 1)
neighbor.evidence()

# %%
Card("S3_limit", neighbor.seed)

# %% [markdown]
# ## 2. Make it fit
#
# Now to your own group's model. Set each list, and decide. Below the lists stands whether there can be such a plan;
# what it costs you see when you have decided. You may try as often as you like.

# %%
Card("S3_plan", case.seed)

# %% [markdown]
# ## 3. Make it fast
#
# What fits is not yet good. Look at what the time of your step went into before you change anything.

# %%
Card("S3_better", case.seed)

# %% [markdown]
# ## 4. Defend it
#
# Write it as you would say it to your team. Your plan of step 3 is then set beside the usual choices and beside the
# best that a search finds, and you compare your sentences with a good answer.

# %%
Card("S3_defend", case.seed)

# %% [markdown]
# ## 5. Afterwards
#
# When a plan of yours has reached all targets of step 3, this says what the usual choices lead to, and where such a
# choice had to be made in earnest.

# %%
case.debrief()

# %% [markdown]
# Go back to the first cell and give it a seed: `CASE.variant(seed=1)`, up to 5. Then run the page again. The questions
# are the same, but the model and the goal are others, so another plan is right: what was best before is wrong nearly
# everywhere else.
