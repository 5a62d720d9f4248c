# %% [markdown]
# # Scenario 2: a call in the night
#
# **What you do:** find out why a training job misbehaves, with measurements that cost time, and fix it.<br>
# **Time:** 25 minutes.<br>
# **You need:** the lessons on [data parallelism](../02_data_parallelism.ipynb) and
# [mixed precision](../07_mixed_precision.ipynb).
#
# It is three in the morning, and the phone says that job 4711 is not as it was. It trains a language model on eight
# devices in two machines of four: eight replicas, a minibatch of 64 samples, float16 with 32-bit master weights and a
# dynamic loss scale. It is booked for six weeks. Last week it was healthy. Every minute in which the cluster does not
# train costs as much as any other minute, so you would rather think than measure, and rather measure than try.
#
# The job's devices and links are **emulated**: real ranks really send its messages, scaled down by a thousand. What
# it learns is **measured**: a small model is really trained in the same way, on four ranks that stand for the eight.
#
# ## 1. What everybody sees
#
# This is what the job reports without being asked: samples a second and the loss, step by step, and how much memory
# each rank needs at its fullest. With it come the settings and some lines of the log. Nobody knows yet whether any of
# it matters.

# %% tags=["nbval-ignore-output"]
from lessons.S02_night_call.case import CASE

case = CASE.variant()  # seed=1, 2, 3: the same call, with another cause
case.evidence()

# %%
from lessons import Card

Card("S2_symptom", case.seed)

# %% [markdown]
# ## 2. Suspects
#
# Before you measure anything: what could look like this?

# %%
Card("S2_suspect", case.seed)

# %%
Card("S2_measure", case.seed)

# %% [markdown]
# ## 3. Measure
#
# Each measurement stops the job for as long as it says. What you have paid for once, you can look at again.

# %%
from course_lib.classroom.widgets.measuring import Measuring

Measuring(case)

# %% [markdown]
# ## 4. Act
#
# You may try more than once. So did everybody who has been on call.

# %%
Card("S2_change", case.seed)

# %% [markdown]
# ## 5. In the morning
#
# When a change has helped, this says what it was, what it has cost you, and what the other changes would have led to.

# %%
case.debrief()

# %% [markdown]
# Go back to the first cell and give it a seed: `CASE.variant(seed=1)`. Then run the page again.
# The reports will look alike, and the cause will be another one.
