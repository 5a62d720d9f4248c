# %% [markdown]
# # Scenario 2: a call in the night
#
# **What you do:** find out why a training job misbehaves, with measurements that cost time, and mend it.<br>
# **Time:** 25 minutes.<br>
# **You need:** the lessons on [data parallelism](../02_data_parallelism.ipynb) and
# [mixed precision](../07_mixed_precision.ipynb).
#
# The phone rings. Job 4711 trains a language model, and until somebody else looks at it, in the evening, every minute
# in which it stands still, is slow, or learns something wrong is yours.
#
# ## 1. What everybody sees

# %% tags=["nbval-ignore-output"]
from lessons.S02_night_call.case import CASE

case = CASE.variant()  # seed=1, 2, 3: another night
case.evidence()

# %% [markdown]
# The job runs on eight devices in four nodes of two: eight replicas, gradients in eight messages, float16 with 32-bit
# master weights, and a loss scale that adapts. Its minibatch, its learning rate and the speed of its devices and links
# stand in the plan above; another night has others. It began at 22:00, was healthy for some hours, and writes a
# checkpoint every ten reports. A fifth node stands by. The log is a night's log: some of its lines may have to do with
# it, most do not. Of the settings that somebody changed some were written down, and not everybody writes everything
# down.
#
# Its devices and links are **emulated**: real ranks really send its messages, scaled down by a thousand, and its clock
# is computed. Each report covers ten steps, and its time has a **jitter** of about 1%, which a seed draws. What it
# learns is **measured**: a small model is really trained, with the job's replicas, data and recipe, by one step for
# each report. Nothing that you see is drawn by hand.
#
# Before you touch anything, say three things aloud. Since when? Is it slow, does it learn less, or does it hang? And
# what could look like this?
#
# ## 2. Measure, rehearse, act
#
# A measurement stops the job for as long as it says; used twice, it costs once. A rehearsal tries a suspect on the
# healthy job, at another place and with another magnitude, so that you see its shape and not tonight's numbers.
#
# What you do has a **place**: a device, a node, a shard, a setting. Everything but waiting ends the job and starts it
# again from a **checkpoint**. The last one may hold what you want to be rid of. Whoever ends a job that hangs cannot
# ask any more where it hung.

# %% tags=["nbval-ignore-output"]
from course_lib.classroom.widgets.measuring import Measuring

Measuring(case)

# %% [markdown]
# Half measures exist, and so do two faults in one night. Look at the curves again after each change.
#
# ## 3. In the morning
#
# When the job is as it was planned, this says what it was, and what the night has cost: beside par, which measures what
# tells the culprit and then mends it in one go, and beside two other ways to spend the night.

# %% tags=["nbval-ignore-output"]
case.debrief()

# %% [markdown]
# Then write the three lines that the day shift needs: what it was and where, what told it from everything else, and
# from which checkpoint the job goes on. `CASE.variant(seed=1)` in the first cell is another night.
