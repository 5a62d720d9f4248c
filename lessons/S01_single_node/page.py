# %% [markdown]
# # Scenario 1: one node
#
# **What you do:** choose a plan for a model on a single node, where it does not run as it was started, and defend
# it.<br> **Time:** 25 minutes.<br> **You need:** the lessons up to [combining
# mechanisms](../08_combining_mechanisms.ipynb), and [planning](../09_planning.ipynb).
#
# There is one node, and there will be no second one this year. On it a model shall be trained. The node costs the same
# whether it computes or waits, and it is yours if you can say what you will do with it. A colleague has already tried,
# and got no further than an error.
#
# Everything here is **modelled**: calculated by the planner of the [planning lesson](../09_planning.ipynb), not run.
# Any plan is accepted that reaches the targets. Two plans whose steps differ by less than an eighth count as equal,
# since steps of two set-ups on the same machine differ as much by chance.
#
# ## 1. What went wrong?
#
# This is what the colleague left: the job, the machine, and what the planner says a device would have to hold.

# %%
from lessons import Card
from lessons.S01_single_node.case import CASE

case = CASE.variant()  # seed=1 to 5: another model, node and goal
case.evidence()

# %%
Card("S1_limit", case.seed)

# %% [markdown]
# ## 2. A plan that runs
#
# First it has to run, and not slowly. Set each list, and decide. Below the lists stands whether there can be such a
# plan; what it costs you see when you have decided. You may try as often as you like.

# %%
Card("S1_plan", case.seed)

# %% [markdown]
# ## 3. A plan for three months
#
# Now one thing more is asked of it.

# %%
Card("S1_better", case.seed)

# %% [markdown]
# ## 4. Defend it
#
# Write it as you would say it in the meeting. Your plan of step 3 is then set beside the usual choices and beside the
# best that a search finds, and you compare your sentences with a good answer.

# %%
Card("S1_defend", case.seed)

# %% [markdown]
# ## 5. Afterwards
#
# When a plan of yours has reached all targets of step 3, this says what the usual choices lead to, and where such a
# choice had to be made in earnest.

# %%
case.debrief()

# %% [markdown]
# Go back to the first cell and give it a seed: `CASE.variant(seed=1)`, up to 5. Then run the page again. The questions
# are the same, but the model, the node and the goal are others, so another plan is right: what was best before is wrong
# nearly everywhere else.
