# %% [markdown]
# # Scenario 8: two clusters
#
# **What you do:** make one job run well across two clusters that are far from each other.<br>
# **Time:** 25 minutes.<br>
# **You need:** the lessons on [data parallelism](../02_data_parallelism.ipynb) and
# [mixed precision](../07_mixed_precision.ipynb).
#
# One cluster is too small for the next model, and so is the other. They are two hundred kilometers apart. A message
# takes two milliseconds on the way, forty times as long as between two machines of one cluster. The plan: four
# replicas in each, a minibatch of 64 samples, and gradients in two large messages, since every message pays for the
# way. The job has begun this morning, and it is not as planned.
#
# Its devices and links are **emulated**: real ranks really send its messages, scaled down by a thousand. What it
# learns is **measured**, on a small model that is trained in the same way. (Where the measurements say *machine*,
# they mean one of the two clusters.)
#
# ## 1. What everybody sees
#
# *Last week* is the rehearsal of the plan. You see samples a second and the loss, step by step, how much memory each
# rank needs at its fullest, the settings, and some lines of the log.

# %% tags=["nbval-ignore-output"]
from lessons.S08_two_clusters.case import CASE

case = CASE.variant()  # seed=1, 2, 3: another cause
case.evidence()

# %%
from lessons import Card

Card("S8_symptom", case.seed)

# %% [markdown]
# ## 2. Suspects

# %%
Card("S8_suspect", case.seed)

# %%
Card("S8_measure", case.seed)

# %% [markdown]
# ## 3. Measure

# %%
from course_lib.classroom.widgets.measuring import Measuring

Measuring(case)

# %% [markdown]
# ## 4. Act

# %%
Card("S8_change", case.seed)

# %% [markdown]
# ## 5. Afterwards

# %%
case.debrief()
