# %% [markdown]
# # Scenario 6: a postmortem
#
# **What you do:** find out why a run was lost, and design the next one so that it learns, and wastes less.<br>
# **Time:** 30 minutes.<br>
# **You need:** the lessons on [mixed precision](../07_mixed_precision.ipynb) and
# [pipeline parallelism](../05_pipeline_parallelism.ipynb).
#
# A run of six days is lost. It had eight devices, two replicas of four stages, float16, and a fixed loss scale of
# 65,536. The one before it, with the same data and the same model, had gone well. There is a last checkpoint, and you
# have the cluster for an afternoon. Your manager has two questions. Why was it lost? And why were the devices idle
# for nearly half of the time, in the good run, too?
#
# What the run learns is **measured**: a small model is really trained as the large one was, on four ranks that stand
# for its replicas. Its devices and links are **emulated**.
#
# ## 1. What is left of it
#
# *Last week* is the run that went well, and *now* the one that was lost: samples a second and the loss, step by step,
# how much memory each rank needed at its fullest, the settings, and some lines of the log.

# %% tags=["nbval-ignore-output"]
from lessons.S06_postmortem.case import CASE

case = CASE.variant()  # seed=1, 2, 3: another cause
case.evidence()

# %%
from lessons import Card

Card("S6_symptom", case.seed)

# %% [markdown]
# ## 2. Why was it lost?

# %%
Card("S6_suspect", case.seed)

# %%
Card("S6_measure", case.seed)

# %%
from course_lib.classroom.widgets.measuring import Measuring

Measuring(case)

# %%
Card("S6_change", case.seed)

# %% [markdown]
# ## 3. Why were the devices idle?
#
# The good run was no faster. This is a step of it.

# %%
from course_lib.classroom.scenarios.jobs.replay import replay
from course_lib.figures import gantt

gantt(replay(case.case.healthy), title="Two replicas of four stages, four micro-batches each")

# %%
Card("S6_redesign")

# %% [markdown]
# ## 4. The report
#
# When a change has helped, this says what it was, and what it has cost you to find out.

# %%
case.debrief()

# %% [markdown]
# A postmortem asks what let the mistake through, not who made it. Write three sentences: what was seen too late,
# which check would have seen it on the first day, and who would have to be told by it.
