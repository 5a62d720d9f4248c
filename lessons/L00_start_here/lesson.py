# %% [markdown]
# # Start here
#
# Large models are trained on many devices at once. In this course you do the same on your own computer: your code
# runs on several real processes, they really talk to each other, and you watch what each of them does.
#
# This page takes 15 minutes. You need Python, and it helps if you have trained a model in PyTorch once. Run a cell
# with **Shift + Enter**, from top to bottom. Now and then you are asked to predict what will happen; the results of an
# earlier run are stored here, and *Clear Outputs of All Cells* in the *Edit* menu hides them until you get there.
#
# No mouse is needed: **Ctrl + Enter** runs a cell and stays on it, **Tab** leads to the buttons and sliders that it
# shows, arrows and the space bar use them, and **Escape** leads back to the cell. *Theme* in the *Settings* menu has
# *Increase Content Font Size*, which makes the pictures larger, too.
#
# ## Watch four of them
#
# Four processes train one model here. Each has a part of it, so each piece of the data goes through all of them and
# back. (*Micro-batch* is the name of such a piece.) The cell runs them, and then follows piece number 2. A row is a
# process, a colored bar is a computation, and an arrow is a message. The space bar stops and starts, and the arrow keys
# go from event to event. Neither the cell nor the lines below the picture have to be understood yet.

# %%
from course_lib import Link, Pace, launch
from course_lib.classroom.runs import pipeline_step
from course_lib.classroom.widgets import play
from course_lib.schedules import SCHEDULES

step = pipeline_step(SCHEDULES["1f1b"](4, 4), Pace({"forward": 0.04, "backward": 0.08}, link=Link(latency=0.02)))
play(step, title="Four processes, one model", follow=2)

# %% [markdown]
# Where a row has stripes and no color, a process waits. The time in which it computes nothing is called the *bubble*.
# Why it is there, and what can be done about it, is what this course is about. Now from the beginning.
#
# ## One function, four processes

# %%

def hello(rank):
    print(f"hello, I am number {rank}")

run = launch(hello, world_size=4)

# %% [markdown]
# `launch` started four processes, and each of them called `hello` once. Such a process is called a **rank**, and so is
# its number, which it gets as the first argument. The number of ranks is the **world size**.
#
# *Before you run the next cell, decide:* every rank adds its number to the list `diary`. What does `diary` hold here,
# in the notebook, afterwards?

# %%
import os

diary = []

def write(rank):
    diary.append(rank)
    return diary, os.getpid()

run = launch(write, world_size=4)
print("on the ranks:   ", [pages for pages, _ in run.results])
print("in the notebook:", diary)
print("processes:", len({os.getpid(), *(pid for _, pid in run.results)}))

# %% [markdown]
# It is still empty. The four ranks and the notebook are five processes, each with a memory of its own, and each rank
# wrote into its own copy of the list. Nothing is shared, so **whatever one rank needs to know about another has to be
# sent**. What a rank returns does come back to you, in `run.results`, by rank.
#
# ## A message
#
# Sending is what `torch.distributed` is for, the part of PyTorch that real clusters use. It is usually called `dist`.

# %%
import torch
import torch.distributed as dist


def message(rank):
    box = torch.tensor([0, 0, 0])
    if rank == 0:
        dist.send(torch.tensor([3, 1, 4]), dst=1)
    if rank == 1:
        dist.recv(box, src=0)
    return box.tolist()

launch(message, world_size=2).results

# %% [markdown]
# Rank 1 received what rank 0 sent. Note that there is one function for all ranks; `if rank == ...` makes them
# different. The same function would run unchanged on a cluster.
#
# ## The sum of all
#
# Often every rank has a number and everyone needs the sum of all of them. That is an **all-reduce**, and you will
# meet it again and again. For short experiments there is also a way to run a whole cell on every rank, without a
# function: `%%ranks 4`. In such a cell `rank`, `world_size`, `torch` and `dist` are there already.
#
# *Predict:* rank 0 has 1, rank 1 has 2, rank 2 has 3, rank 3 has 4, and they call the all-reduce twice. What does rank
# 2 print?

# %%
# %load_ext course_lib

# %%
# %%ranks 4
number = torch.tensor(rank + 1)
dist.all_reduce(number)
dist.all_reduce(number)
print("now I have", number.item())

# %% [markdown]
# Every rank has 1 + 2 + 3 + 4 = 10. An all-reduce adds up what all ranks have, and leaves the sum on each of them, *in
# place of* what was there. So the second one adds up four tens. (Click on a rank to see what it printed.)
#
# ## Who waited?
#
# Now the ranks work before they add up, and some have more to do than others. Here a short sleep stands in for the
# work, and `compute` marks it as a model's forward pass, so that the picture shows it. *Predict:* which rank waits
# longest?

# %%
import time

from course_lib.timeline import compute


def work_then_add(rank):
    with compute("forward"):
        time.sleep(0.1 * (rank + 1))
    dist.all_reduce(torch.ones(1))

run = launch(work_then_add, world_size=4)

# %% tags=["nbval-ignore-output"]
from course_lib.figures import gantt

gantt(run.timeline, title="Work, then add up")

# %% [markdown]
# One row is one rank, and time runs to the right. A bar with stripes and no color is a rank that waits, and the short
# dark one at the end is the all-reduce itself. Rank 0 was done first, so it waited longest: an all-reduce cannot end
# before the last rank has arrived with its number. The whole group is as slow as its slowest member.
#
# Every picture that a cell draws has a word like the one above the bars. **Measured** is what happened on your
# machine's clock; **emulated** is a run of real processes with real messages too, but on an emulated clock, which says
# how long other devices and links would take; and **modelled** was calculated and not run.
#
# ## Two polite ranks
#
# Two ranks want to swap a number. Both are polite: each listens first and speaks afterwards. *Predict:* what
# does each of them return?

# %% tags=["raises-exception", "nbval-ignore-output"]
def swap(rank):
    other = 1 - rank
    received = torch.zeros(1)
    dist.recv(received, src=other)
    dist.send(torch.tensor([10.0 + rank]), dst=other)
    return received.item()

launch(swap, world_size=2)

# %% [markdown]
# This cell was meant to fail. Each waits for the other to speak, and nobody ever will: a **deadlock**. On a cluster the
# job seems to run, and keeps all its devices busy with waiting, until a time limit ends it: ten minutes later with
# PyTorch's NCCL backend, thirty with gloo, unless somebody has set another one. (For NCCL a thread called the
# **watchdog** looks at the clock.) What you read then is the operation that timed out, and the rank that complains is
# often one that waited, not the one that made it wait. Here you are told after a moment: the first line says who waited
# for whom, and the table shows each rank's state and the line it was at.
#
# No mistake is a dead end in this course. A rank that crashes or disappears is reported in the same way, and one that
# computes forever is stopped at a time limit. Your notebook keeps its variables, and the next cell works:

# %%
def swap(rank):
    other = 1 - rank
    received = torch.zeros(1)
    if rank == 0:
        dist.send(torch.tensor([10.0 + rank]), dst=other)
        dist.recv(received, src=other)
    else:
        dist.recv(received, src=other)
        dist.send(torch.tensor([10.0 + rank]), dst=other)
    return received.item()

launch(swap, world_size=2).results

# %% [markdown]
# Rank 0 now speaks first, and each has the other's number.
#
# Try your own mistakes. Let both ranks send first, let one raise an exception, or let one return early, and read what
# you are told.
#
# ## Where to go next
#
# This is what leads to what. Each box is an idea, with the lesson that teaches it and the questions about it; it shows
# how many of them you have answered. `python3 course.py progress` names the next three.

# %% tags=["nbval-ignore-output"]
from lessons.site import net

net.Map()

# %% [markdown]
# - **[One machine is not enough](01_one_machine_is_not_enough.ipynb)**, the first lesson: where the memory and the time
#   of a training go, until a single device has too little of both. It needs no ranks.
# - **[Data parallelism](02_data_parallelism.ipynb)**, the first lesson with ranks: four of them train one model
#   together to add numbers, and you find out when four are four times as fast and when they are not.
# - **[Its exercise](../exercises/02_data_parallelism/02_data_parallelism.ipynb)**: build it yourself, with a check
#   that runs your code on real ranks.
#
# Have you forgotten a word? The [glossary](glossary.md) says what each word means, and which lesson explains it.
#
# Three things to keep: a rank is a process with a number and a memory of its own; ranks know about each other only what
# is sent; and whoever needs all the others waits for the slowest.
#
# **Next:** [one machine is not enough](01_one_machine_is_not_enough.ipynb): why anybody goes to this trouble.
