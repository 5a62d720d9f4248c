# %% [markdown]
# # Scenario 7: a regression
#
# **What you do:** find the one mechanism of a hybrid job that has become slow, with as few measurements as you can.<br>
# **Time:** 25 minutes.<br>
# **You need:** the lesson on [combining mechanisms](../08_combining_mechanisms.ipynb).
#
# A job runs on two machines of four devices. It has two replicas of two stages of two tensor ranks, a minibatch of 64
# samples, and eight micro-batches for each replica. Last week the cluster was upgraded and the job was started again,
# and since then it has been slower. Several people have changed several things meanwhile. All of them say that theirs
# cannot be it.
#
# The job's devices and links are **emulated**: real ranks really send its messages, scaled down by a thousand.
#
# ## 1. What everybody sees

# %% tags=["nbval-ignore-output"]
from lessons.S07_regression.case import CASE

case = CASE.variant()  # seed=1, 2, 3: another cause
case.evidence()

# %% [markdown]
# Five things could be behind it: tensor ranks on two machines, too few micro-batches, stages of different size, a
# slow link between the machines, or one slow device. Before you measure: draw for each of them how a step would look.
#
# ## 2. Measure

# %%
from lessons import Card

Card("S7_measure", case.seed)

# %%
from course_lib.classroom.widgets.measuring import Measuring

Measuring(case)

# %% [markdown]
# ## 3. Act

# %%
Card("S7_change", case.seed)

# %% [markdown]
# ## 4. Afterwards

# %%
case.debrief()
