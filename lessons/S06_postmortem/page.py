# %% [markdown]
# # Scenario 6: a postmortem
#
# **What you do:** find out why a run was lost, and design the next one so that it learns, and wastes less.<br>
# **Time:** 35 minutes.<br>
# **You need:** the lessons on [mixed precision](../07_mixed_precision.ipynb) and
# [pipeline parallelism](../05_pipeline_parallelism.ipynb).
#
# A run has gone wrong. It has eight devices, two replicas of four stages, float16, and a fixed loss scale. For some
# hours it learned as planned. It still runs, for whatever that is worth, and its checkpoints are there. Your
# manager has two questions. Why was it lost, and from where can it go on? And why are its devices idle for nearly half
# of the time, even when all is well?
#
# ## 1. What is left of it

# %% tags=["nbval-ignore-output"]
from lessons.S06_postmortem.case import CASE

case = CASE.variant()  # seed=1, 2, 3: another cause
case.evidence()

# %% [markdown]
# What the run learns is **measured**: a small model is really trained, by its two replicas, on its data, with its
# recipe. The run's devices and links are **emulated**, with a **jitter** of about 1% on the time of each report.
#
# ## 2. Why was it lost, and from where does it go on?
#
# Say what you suspect before you measure it. Some mistakes bend a curve. Others only leave it flatter than it would
# have been, so compare what you measure with the plan, too. Then set one thing right and choose a checkpoint: not the
# last one, but the last good one, unless what was learned since is worth keeping.

# %% tags=["nbval-ignore-output"]
from course_lib.classroom.widgets.measuring import Measuring

Measuring(case)

# %%
case.debrief()

# %% [markdown]
# ## 3. Why were the devices idle?
#
# This is a step of such a run while all was well, with 64 samples.

# %%
from course_lib.classroom.scenarios.jobs.step import step
from course_lib.figures import gantt

gantt(step(CASE.healthy.clocked(0)).timeline, title="Two replicas of four stages, four micro-batches each")

# %% [markdown]
# Design the next run. It has the same work, 64 samples and 16 layers, and gets eight devices of 16 MB. A step should be
# at least 1.2 times as fast. Each pass of a layer takes as long as half a sample more than its samples do, however few
# they are.
# Write down a plan that you believe in, then run it. Change the numbers and run the cell again: the table keeps all
# that you have tried. Its plans are replicas x stages, micro-batches. Its bytes are those of the device that holds the
# most (*doubled*: with twice the layers) and of the one that sends the most, and its device-hours those of ten thousand
# steps.

# %%
from lessons.S06_postmortem.case import redesign

redesign(dp=2, pp=4, micro_batches=4)

# %% [markdown]
# More than one plan will do, and each has its price. Compare at least three before you recommend one:
#
# - Which is the cheapest one that fits?
# - Which would you take if the next model may have twice the layers, and what do you pay for that today?
# - In which are devices the busiest, and why is it not the fastest?
#
# ## 4. The report
#
# A postmortem asks what let the mistake through, not who made it. Write three sentences: what was seen too late, which
# check would have seen it on the first day, and who would have to be told by it.
