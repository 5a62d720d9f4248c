# %% [markdown]
# # Scenario 4: defaults for a fleet
#
# **What you do:** write the function that chooses a plan for teams who do not want to choose one, and try it on a dozen
# models and clusters.<br>
# **Time:** 60 minutes.<br>
# **You need:** the lesson on [planning](../09_planning.ipynb).
#
# You are on a platform team. Twelve groups train models of 0.35 to 70 billion parameters on what your company has
# bought over the years: gaming cards with PCIe, V100 without bf16, A100 on a slow network, H100, H200, B200. Most
# groups take whatever plan the platform proposes. So far it proposes what the largest group once needed.
#
# You write the defaults anew: a short function that gets a model, a cluster and a minibatch, and returns a `Plan`. It
# may ask whether a plan fits for certain: `estimate(model, cluster, plan, global_batch).fits`, from
# `course_lib.planner`. It may ask at most 48 times for each group, and what a search tries counts, too: a default has
# to be explained to those who get it. What counts is the worst case, not the mean: a group for which the default does
# not run calls you at night. And next year there will be groups that you do not know yet.
#
# ## 1. Before you write
#
# Decide on an answer, then run it on all twelve.

# %%
from lessons import Card

Card("S4_unfit")

# %%
Card("S4_costly")

# %% [markdown]
# ## 2. Your policy
#
# This one is a start: replicas everywhere. All that you need of a model is in `model.parameters`, `model.layers`,
# `model.heads`, `model.sequence`; of a cluster in `cluster.devices`, `cluster.devices_per_node`, `cluster.spec.memory`
# (bytes), `cluster.spec.peak` (a number for each precision that it computes in). *Predict:* for how many of the twelve
# does it run?

# %%
from course_lib.planner import Plan
from lessons.S04_defaults import fleet


def policy(model, cluster, global_batch):
    return Plan(dp=cluster.devices)


fleet.trial(policy)

# %% [markdown]
# The worst comes first. Where nothing runs, the last column says why: a sentence of the planner, or what your function
# raised. Otherwise the second column says how many times as long a step takes as with the best plan that `search` finds
# there (modelled).
#
# Change the function above until it runs for all twelve, and then until the worst is at most 1.5 times as long as the
# best.
#
# <details><summary>Hint 1: what do replicas hold twice?</summary>
#
# The optimizer's state, most of all. With `zero=1` they share it out, and send hardly more.
#
# </details>
# <details><summary>Hint 2: what comes first?</summary>
#
# Write down a dozen plans, from the cheapest to the most frugal, and return the first that fits. Which change costs
# nothing, which costs a little, and which costs a third of the computing?
#
# </details>
# <details><summary>Hint 3: the last two</summary>
#
# Not every device computes in bf16. And one of the twelve has very long samples, which `cp` can divide.
#
# </details>
#
# ## 3. Groups that nobody has seen
#
# Six pairs of a model and a cluster are drawn now, and others each time. Their best plans are searched for, which takes
# a few seconds. The policy is good if it runs for all six, and the worst is at most 1.5 times as long as the best.
# *Predict:* which of your rules was made for one of the twelve alone?

# %% tags=["nbval-ignore-output"]
fleet.hand_in(policy)

# %% [markdown]
# ## 4. The page that goes with it

# %%
Card("S4_page")

# %% [markdown]
# <details><summary>When your policy runs for all of them: what there is to see</summary>
#
# - **A default that stops is cheaper than one that is slow.** The first is fixed within an hour. Tensor ranks over a
#   whole node run nearly everywhere, and cost a small model on a slow bus three quarters of its time.
# - **The cheapest change first.** Sharing out the optimizer's state costs next to nothing. Computing again what takes
#   little time comes next. Cutting matrices and layers comes last, and no further than needed.
# - **The odd ones decide.** A mean over the fleet hides the one group with long samples, and the one without bf16.
# - **A rule outlives a table.** A plan for each known group is perfect for the twelve, and nothing for the next.
# - **Say what it assumes.** The planner knows devices and links, not your kernels: compare a short run with its
#   interval.
#
# </details>
#
# ### Where such defaults were made
#
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC21,
#   arXiv:2104.04473, section 3: rules for what to cut first, each from measurements. Tensor ranks stay inside a node.
# - Hagemann et al. 2023, *Efficient Parallelization Layouts for Large-Scale Distributed Model Training*,
#   arXiv:2311.05610: many layouts tried for models of several sizes, and made into a few recommendations. One of them
#   is a micro-batch of 1, since a larger one asks for computing again or for more cutting. Is it right for all of your
#   twelve?
