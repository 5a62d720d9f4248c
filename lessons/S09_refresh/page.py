# %% [markdown]
# # Scenario 9: new hardware, old plan
#
# **What you do:** find out what an old plan gives away on new devices, and choose again; then the network
# changes.<br>
# **Time:** 25 minutes.<br>
# **You need:** the lessons up to [combining mechanisms](../08_combining_mechanisms.ipynb), and
# [planning](../09_planning.ipynb).
#
# For three years a model has been trained on 128 V100, in 16 nodes. Last week they were replaced by fewer devices of a
# newer kind. Somebody changed the number of replicas, and nothing else, and started the job again. It runs, and
# everybody is content, except for the one who signed the order: an H100 has eight times the peak of a V100, and an A100
# more than twice. Whose fault is it, the devices', the network's, or the plan's?
#
# Everything here is **modelled**: calculated by the planner of the [planning lesson](../09_planning.ipynb), not run.
# Any plan is accepted that reaches the targets. Two plans whose steps differ by less than an eighth count as equal,
# since steps of two set-ups on the same machine differ as much by chance.
#
# ## 1. What does it give away?
#
# This is the job before and after, as the planner sees it.

# %%
from lessons import Card
from lessons.S09_refresh.case import CASE

case = CASE.variant()  # seed=1 to 5: another model, other devices, another old plan
case.evidence()

# %%
Card("S9_limit", case.seed)

# %% [markdown]
# ## 2. Choose again
#
# The lists below begin with the old plan. Under them stands whether there can be such a plan; what it costs you see
# when you have decided. You may try as often as you like.

# %%
Card("S9_plan", case.seed)

# %% [markdown]
# ## 3. Another room
#
# Then there is news from the machine room.

# %%
Card("S9_better", case.seed)

# %% [markdown]
# ## 4. Pass it on
#
# Write it down for the next refresh. Your plan of step 3 is then set beside the usual choices and beside the best
# that a search finds, and you compare your sentences with a good answer.

# %%
Card("S9_defend", case.seed)

# %% [markdown]
# ## 5. Afterwards
#
# When a plan of yours has reached all targets of step 3, this says what the usual choices lead to, and where such a
# choice had to be made in earnest.

# %%
case.debrief()

# %% [markdown]
# Go back to the first cell and give it a seed: `CASE.variant(seed=1)`, up to 5. Then run the page again. The questions
# are the same, but the model, the devices and the old plan are others, so another plan is right: what was best before
# is wrong nearly everywhere else.
