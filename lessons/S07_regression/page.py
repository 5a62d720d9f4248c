# %% [markdown]
# # Scenario 7: a regression
#
# **What you do:** find the one mechanism of a hybrid job that has become slow, with as few measurements as you can.<br>
# **Time:** 25 minutes.<br>
# **You need:** the lesson on [combining mechanisms](../08_combining_mechanisms.ipynb).
#
# A job runs on four nodes of two devices. It has two replicas of two stages of two tensor ranks, and eight
# micro-batches for each replica. Today the cluster was upgraded while the job went on. Since some time it has been
# slower. Several people have changed several things meanwhile. All of them say that theirs cannot be it, and not all of
# them have written down what they did.
#
# ## 1. What everybody sees

# %% tags=["nbval-ignore-output"]
from lessons.S07_regression.case import CASE

case = CASE.variant()  # seed=1, 2, 3: another cause
case.evidence()

# %% [markdown]
# The job's devices and links are **emulated**: real ranks really send its messages, scaled down by a thousand. The time
# of a report has a **jitter** of about 1%. What it learns is **measured**, on a small model.
#
# Seven things could be behind it: tensor ranks on two nodes, too few micro-batches, stages of different size, a slow
# link, a slow device, a node that waits for its data, or gradients that leave late. Before you measure, draw for each
# of them how a step would look. A rehearsal on the healthy job tells whether you were right.
#
# ## 2. Measure, rehearse, act

# %% tags=["nbval-ignore-output"]
from course_lib.classroom.widgets.measuring import Measuring

Measuring(case)

# %% [markdown]
# ## 3. Afterwards
#
# When the job is as fast as before, this says what it was, and what it has cost beside par and two other ways.

# %% tags=["nbval-ignore-output"]
case.debrief()

# %% [markdown]
# Which of the seven look alike in throughput alone, and which single measurement parts the most of them?
