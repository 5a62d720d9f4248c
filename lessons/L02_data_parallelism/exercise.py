# %% [markdown]
# # Data parallelism, by hand
#
# Every rank holds the whole model, works on its own share of the minibatch, and at the end of the step all ranks have
# one and the same gradient. Four functions make that happen. Here you write them, and they run on real processes.
#
# | | you build | minutes | difficulty | points |
# |---|---|---|---|---|
# | 1 | `split_batch`: who works on which samples | 10 | ★☆☆ | 2 |
# | 2 | `average_gradients`: one gradient out of many | 15 | ★★☆ | 3 |
# | 3 | `ring_all_reduce`: the sum over all ranks, out of nothing but messages | 35 | ★★★ | 5 |
# | 4 | `backward_in_buckets`: gradients that leave while the backward pass goes on | 25 | ★★★ | 4 |
# | 5 | `ends` on paper, then `faster_backward`: an open task: which messages hide? | 30 | ★★★ | 3 + 2 |
#
# Below each function stands its check. It runs your function on 2, 3 and 4 ranks, in small cases that become harder one
# thing at a time, and compares what it leaves with what a single process would have. At the first case that goes wrong
# it asks you a question if it knows the idea behind it, and shows what was expected and what is there. Once nothing is
# wrong, it tells you what your solution costs, beside the lowest price known. Nothing that you write can break
# anything: a deadlock, an endless loop or a crash ends in a sentence and a line number. Run a check as often as you
# like. The 2 points beside those of an open task are for three sentences. No check can read them, so a person does.

# %%
import statistics
import time

import torch
import torch.distributed as dist

from course_lib import Link, Pace, launch
from course_lib.classroom.checks.part import on_the_clock
from course_lib.data import answer_loss, minibatches, train_test_split
from course_lib.model import TinyGPT
from lessons.L02_data_parallelism import checks

# %% [markdown]
# ## 1. Split a minibatch
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the share of one rank, also when the samples cannot be divided evenly | 10 | ★☆☆ |
#
# All ranks run the same program and see the same minibatch. What differs is one number, `rank`. Ten samples on four
# ranks:
#
#     minibatch    [ 0  1  2  3  4  5  6  7  8  9 ]
#     shares       [ 0  1  2 ]  [ 3  4  5 ]  [ 6  7 ]  [ 8  9 ]
#
# A step is over when the slowest rank is done, so no share should be larger than it must. And none should be smaller: a
# plain mean over ranks, as in the next part, is closest to the mean over samples when shares are as equal as can be.

# %% nbgrader={"grade_id": "split_batch", "solution": true}
def split_batch(batch, rank, world_size):
    """This rank's share of a minibatch.

    batch: a tensor [samples, ...], one sample in each row, at least world_size of them.
    Returns the rows that this rank works on, as a tensor. Each sample is in exactly one
    rank's share, no share is empty, and no two differ by more than one sample.

    Every rank calls this twice, with the inputs and with the targets. Their rows have
    to stay together.
    """
    ### BEGIN SOLUTION
    least, left_over = divmod(len(batch), world_size)
    start = rank * least + min(rank, left_over)
    stop = start + least + (1 if rank < left_over else 0)
    return batch[start:stop]
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: how many samples?</summary>
#
# In the picture, how large are the shares, and by how much do they differ? How large would they be with 11 samples on
# four ranks, and which ranks could have the larger ones?
# </details>
# <details><summary>Hint 2: where does a share start?</summary>
#
# With ten samples on four ranks the shares start at 0, 3, 6 and 8; with seven on three ranks at 0, 3 and 5. How far is
# it from one start to the next, and at which rank does that change? A rank knows nothing but its number: how many of
# the shares in front of it are the larger ones?
# </details>
# <details><summary>Hint 3: two numbers at once</summary>
#
# `divmod(11, 4)` is `(2, 3)`: two for everybody, and three left over. A slice, `batch[3:6]`, is a view of these rows:
# nothing is copied.
# </details>

# %% nbgrader={"grade_id": "check_split_batch", "grade": true, "locked": true, "points": 2}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L02_data_parallelism.checks")

### END HIDDEN TESTS
checks.split_batch(split_batch).points(2)

# %% [markdown]
# `batch.tensor_split(world_size)[rank]` is this function in a line. If your price shows extra bytes, your share is a
# copy. A slice is a view: it takes no memory, whatever the size of the batch. The idle time is that of a step in which
# each sample takes equally long; with ten samples on four ranks some idle time is left even at best. Which sample goes
# to which rank is free, as a mean does not depend on the order: PyTorch's `DistributedSampler` deals samples out one by
# one, like cards. The course's own function is [`split`](../../course_lib/mechanisms/batches.py).

# %% [markdown]
# ## 2. Average the gradients
#
# | you build | minutes | difficulty |
# |---|---|---|
# | the gradient of the whole minibatch, on every rank | 15 | ★★☆ |
#
# After its backward pass each rank holds the gradient of the mean loss over *its own* samples. What the optimizer needs
# is the gradient of the mean over *all* samples, the same on every rank. With ten samples on four ranks the shares
# differ in size, so think about how much each rank's gradient should count.
#
# `dist.all_reduce(tensor)` replaces a tensor on every rank by the sum over all ranks. All ranks have to call it.

# %% nbgrader={"grade_id": "average_gradients", "solution": true}
def average_gradients(model, samples):
    """Replace each parameter's gradient by that of the whole minibatch.

    model: after a backward pass; `parameter.grad` belongs to the mean loss over this
        rank's samples. All ranks have the same parameters. Those that are frozen have
        no gradient (`parameter.grad is None`), and stay so.
    samples: how many samples this rank has; other ranks may have more or fewer.

    All ranks end with the same gradients, bit for bit: replicas would drift apart otherwise.
    """
    ### BEGIN SOLUTION
    total = torch.tensor(samples)
    dist.all_reduce(total)
    weight = samples / total.item()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= weight
            dist.all_reduce(parameter.grad)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: equal shares first</summary>
#
# The check begins with equal shares. Two ranks have the gradients 2 and 4 for the same number: what is that of the mean
# over all samples? `dist.get_world_size()` is the number of ranks.
# </details>
# <details><summary>Hint 2: shares of different size</summary>
#
# Rank 0 has the gradient 2, a mean over 3 samples, and rank 1 has 6, over 1 sample. The mean over all four is 3, and
# not 4. What does each rank have to put in, so that a plain sum comes to 12?
# </details>
# <details><summary>Hint 3: how many samples are there on all ranks?</summary>
#
# No rank knows the shares of the others. `dist.all_reduce` adds up any tensor, also one that you make for it:
# `torch.tensor(5)` on one rank and `torch.tensor(3)` on another become 8 on both.
# </details>

# %% nbgrader={"grade_id": "check_average_gradients", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L02_data_parallelism.checks")

### END HIDDEN TESTS
averaging = checks.average_gradients(average_gradients)
averaging.points(3)

# %% [markdown]
# The last line of the price is time. Once your function is right, the check also runs one training step with it, on
# four ranks with emulated links between them. Here is what each rank did, and how much of the time it computed nothing.
# The best possible is one operation for everything, since each pays the latency of the link anew;
# `DistributedDataParallel` gathers gradients in buckets for this reason. It pays with memory for the copies. The
# course's own function is [`average_gradients`](../../course_lib/mechanisms/data_parallel.py).
#
# A small thing: `samples / total` is a float32 number if `total` is a tensor, with seven digits. `total.item()` is a
# Python number, and nothing is lost.

# %%
averaging.idle

# %% [markdown]
# ## 3. A ring all-reduce
#
# | you build | minutes | difficulty |
# |---|---|---|
# | what is inside `dist.all_reduce`, out of `send` and `recv` | 35 | ★★★ |
#
# If every rank sent its whole tensor to every other, the traffic would grow with each rank. Instead the ranks stand in
# a ring. Each sends to its right neighbor and receives from its left one, and the tensor is cut into as many chunks as
# there are ranks. There are two phases, of `world_size - 1` rounds each.
#
# **Add up.** In every round each rank sends one chunk, and adds the chunk that arrives to its own. In the next round it
# sends that sum on. With three ranks and chunks a, b and c (c2 is chunk c of rank 2):
#
#     round 1    rank 0 sends a          rank 1 sends b          rank 2 sends c
#                  has c2 + c0             has a0 + a1             has b1 + b2
#     round 2    rank 0 sends c          rank 1 sends a          rank 2 sends b
#                  has b1 + b2 + b0        has c2 + c0 + c1        has a0 + a1 + a2
#
# Now each rank has one finished chunk, the sum over all ranks.
#
# **Hand out.** The finished chunks go around the ring once more, and each rank copies what arrives.

# %% nbgrader={"grade_id": "ring_all_reduce", "solution": true}
def ring_all_reduce(tensor):
    """Replace a tensor, on every rank, by its sum over all ranks, in place.

    tensor: contiguous, with at least world_size elements; any shape and dtype, the
        same on all ranks.

    Uses dist.send, dist.recv, dist.isend and dist.irecv alone. Each rank talks to its
    two neighbors only, and sends 2 (world_size - 1) messages of one chunk. A chunk is
    the world_size-th part of the tensor, rounded up; none is larger. When it returns,
    nothing is on its way any more.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(world_size)

    def exchange(outgoing, incoming):
        sending = dist.isend(outgoing, (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        sending.wait()

    buffer = torch.empty_like(chunks[0])  # no chunk is longer than the first
    for step in range(world_size - 1):
        own = chunks[(rank - step - 1) % world_size]
        arriving = buffer[: len(own)]
        exchange(chunks[(rank - step) % world_size], arriving)
        own += arriving

    for step in range(world_size - 1):
        exchange(chunks[(rank - step + 1) % world_size], chunks[(rank - step) % world_size])
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: chunks</summary>
#
# `tensor.view(-1)` is the tensor as one long row, and `.tensor_split(world_size)` cuts that into chunks. Both are
# views: whatever you write into a chunk (`chunk += ...`, `chunk.copy_(...)`) is written into the tensor.
# </details>
# <details><summary>Hint 2: one round</summary>
#
# `dist.send` comes back only when the other side receives. What happens if all ranks send first? `dist.isend` comes
# back at once, with a handle to `wait()` for. And where do you receive, as long as you still need what is in your
# chunk? `torch.empty_like(chunk)` is a tensor of the same size.
# </details>
# <details><summary>Hint 3: which chunk?</summary>
#
# Follow rank 1 in the picture: what does it send in each round, and to which chunk does it add what arrives? With four
# ranks it sends the chunks 1, 0, 3 and adds to 0, 3, 2. What are these numbers for rank 2? In Python, `-1 % 4` is 3.
# </details>
# <details><summary>Hint 4: the second phase</summary>
#
# At the end of the picture, who has finished which chunk? So what does each rank send first, and where does that belong
# on the other side? With four ranks, rank 1 now sends 2, 1, 0, while 1, 0, 3 arrive.
# </details>

# %% nbgrader={"grade_id": "check_ring_all_reduce", "grade": true, "locked": true, "points": 5}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L02_data_parallelism.checks")

### END HIDDEN TESTS
ring = checks.ring_all_reduce(ring_all_reduce)
ring.points(5)

# %% [markdown]
# A step with your ring at its end, once it is right, over emulated links of 5 ms and 0.6 MB/s. While the ring runs
# nobody computes, so even the best possible ring leaves the ranks idle; hiding it behind the backward pass is what
# buckets are for. They come next. The course's own function is
# [`ring_all_reduce`](../../course_lib/mechanisms/collectives.py). In PyTorch the backend decides what is behind
# `dist.all_reduce`: NCCL chooses between rings and trees, by the size of the message and the number of ranks.

# %%
ring.idle

# %% [markdown]
# ## 4. Buckets
#
# | you build | minutes | difficulty |
# |---|---|---|
# | a backward pass during which gradients are already on their way | 25 | ★★★ |
#
# A backward pass begins at the last layer. When it has come to the middle of the model, the gradients of the second
# half are finished, and nobody sends them yet. Let them leave: not each on its own, since each message pays the latency
# of the link, but in **buckets**.
#
#     compute    | forward | backward:  layer 4   layer 3 | layer 2   layer 1 |
#     network                                             |      bucket 0     | bucket 1 |
#
# Two things make this possible. A hook is a function that autograd calls when a gradient has been computed and stands
# in `parameter.grad`. And an all-reduce with `async_op=True` comes back at once, with a handle to wait for later; until
# then its tensor must not be touched.


# %%
def say(parameter):
    print("the gradient of", tuple(parameter.shape), "is there:", parameter.grad is not None)


model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
hooks = [parameter.register_post_accumulate_grad_hook(say) for parameter in model.parameters()]
model(torch.ones(1, 3)).sum().backward()
for hook in hooks:
    hook.remove()


# %% nbgrader={"grade_id": "backward_in_buckets", "solution": true}
def backward_in_buckets(model, loss, bucket_size):
    """Go back from a loss, and average the gradients over all ranks meanwhile.

    model: all ranks have the same parameters, without gradients. Frozen ones
        (`parameter.requires_grad` is False) get none, and take no hook.
    loss: the mean over this rank's samples. All ranks have equally many.
    bucket_size: a bucket leaves, with one dist.all_reduce, as soon as it holds this
        many numbers or more. What is left over at the end leaves in a last message.

    When it returns, each `parameter.grad` is the mean over ranks, nothing is on its way
    any more, and the model has no hooks. The backward pass never waits for a message.
    """
    ### BEGIN SOLUTION
    bucket, on_their_way = [], []

    def send():
        message = torch.cat([parameter.grad.flatten() for parameter in bucket])
        handle = dist.all_reduce(message, async_op=True)
        on_their_way.append((handle, message, list(bucket)))
        bucket.clear()

    def gradient_is_there(parameter):
        bucket.append(parameter)
        if sum(one.numel() for one in bucket) >= bucket_size:
            send()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(gradient_is_there) for parameter in trained]
    loss.backward()
    for hook in hooks:
        hook.remove()
    if bucket:
        send()

    for handle, message, parameters in on_their_way:
        handle.wait()
        message /= dist.get_world_size()
        parts = message.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: collect</summary>
#
# The hook is called once for each parameter, as in the cell above. What has to be remembered from one call to the next,
# and how do you know that a bucket is full? `numel()` counts the numbers of a tensor, and `torch.cat` makes one tensor
# of several flat ones.
# </details>
# <details><summary>Hint 2: remember</summary>
#
# A bucket of two parameters, with 6 numbers and 2, leaves as a message of 8. Later the sums stand in that message, and
# the parameters know nothing of it. What do you have to keep so that they get their numbers back?
# </details>
# <details><summary>Hint 3: after the backward pass</summary>
#
# What is in the bucket when the backward pass is over? What would hooks do in the next step, if they were still there?
# `message.split([6, 2])` gives views of 6 numbers and of 2.
# </details>

# %% nbgrader={"grade_id": "check_backward_in_buckets", "grade": true, "locked": true, "points": 4}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L02_data_parallelism.checks")

### END HIDDEN TESTS
buckets = checks.backward_in_buckets(backward_in_buckets)
buckets.points(4)

# %% [markdown]
# Six layers, and two of them fill a bucket. The first two messages hide behind the backward pass. The last one cannot:
# it waits for the gradients of the first layer, and then nothing is left to compute. Smaller buckets make that last
# message shorter, and pay the latency more often.
#
# Your buckets fill as gradients arrive, which works as long as all ranks compute the same layers in the same order.
# PyTorch's `DistributedDataParallel` cannot rely on that. It decides beforehand which parameters share a bucket, from
# the last to the first, 25 MiB each, and sends the buckets in that order on all ranks, even if a later one is full
# first. With `gradient_as_bucket_view=True` the gradients are views of the bucket, as `part.view_as(parameter)` is one,
# and nothing is copied back; by default they have memory of their own. The course's own is
# [`DataParallel`](../../course_lib/mechanisms/data_parallel.py).

# %%
buckets.idle

# %% [markdown]
# ## 5. An open task: messages that hide
#
# | you build | minutes | difficulty |
# |---|---|---|
# | when the last message ends, on paper, and a backward pass that ends as early as you can make it | 30 | ★★★ |
#
# Below stands a backward pass that is right and slow. Change whatever you like, as long as every gradient stays exact:
# the emulated clock counts. The model has eight equal layers, and the backward pass of a layer takes 100 ms. Each of
# four ranks has one link. A message arrives 15 ms after its last byte has left, and the gradients of one layer take 20
# ms to leave. An all-reduce goes around a ring, in six rounds: 90 ms, and 30 ms more for each layer in it. Use
# collectives or messages by hand, one or the other, and no groups of your own: they would share a real link, and on
# this clock they do not slow each other down. Four levels are on the scale: met, good, as good as ours, and far better
# than ours. First the step as it is:

# %%
def each_alone(model, loss):
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


checks.faster_backward(each_alone)

# %% [markdown]
# **First on paper.** When does the last message end, if `backward_in_buckets` sends buckets of 1, 2, 4 or 8 layers? The
# forward pass of the eight layers takes 400 ms, so the gradients of the last layer are there at 500 ms, and those of
# the first at 1,200. Draw two lines, one for the device and one for the network, which carries one bucket after the
# other.

# %% nbgrader={"grade_id": "ends", "solution": true}
def ends(layers_per_bucket, layers=8, forward=400, backward=100, rounds=90, carried=30):
    """When the last message ends, in milliseconds from the start of the step.

    layers_per_bucket: it divides the layers.
    forward: of all layers.  backward: of one layer.
    rounds: what each message takes, however short it is.  carried: what it takes for each layer in it.
    """
    ### BEGIN SOLUTION
    end = 0
    for finished in range(layers_per_bucket, layers + 1, layers_per_bucket):
        end = max(end, forward + backward * finished) + rounds + carried * layers_per_bucket
    return end
    ### END SOLUTION


# %%
print("my prediction:", {layers: ends(layers) for layers in (1, 2, 4, 8)})

# %% [markdown]
# **Then build it.** Below the check you will see your prediction beside runs.

# %% nbgrader={"grade_id": "faster_backward", "solution": true}
def faster_backward(model, loss):
    """Go back from a loss, and average the gradients over all ranks, in as little
    emulated time as you can.

    model, loss: as in part 4. A layer has 272 parameters where time counts.

    When it returns, each `parameter.grad` is the mean over ranks; a frozen parameter
    has none. Nothing is on its way any more, and the model has no hooks.
    """
    ### BEGIN SOLUTION
    backward_in_buckets(model, loss, 2 * 272)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: what waits for what</summary>
#
# Draw two lines: when the gradients of each layer are there, and when the network is free. Which of the two does your
# last message wait for?
# </details>
# <details><summary>Hint 2: what you have</summary>
#
# `backward_in_buckets` hides all messages but the last ones. It has one number to choose. When does the last message
# end, for buckets of eight layers, and for buckets of one?
# </details>
# <details><summary>Hint 3: both ends</summary>
#
# A bucket of one layer keeps the network busy for 120 ms, and a layer computes for 100. So after three layers, how far
# is the network behind? What changes with a bucket that is larger, and what does the last one then wait for?
# </details>
# <details><summary>Hint 4: under the all-reduce</summary>
#
# Where do the 90 ms come from? Count how often a number waits for a latency on its way around the ring. How often does
# it have to, if ranks may speak to all others? With two ranks and messages by hand, `dist.isend` and `dist.irecv`, a
# layer takes 35 ms.
# </details>

# %% nbgrader={"grade_id": "check_faster_backward", "grade": true, "locked": true, "points": 3}
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L02_data_parallelism.checks")

### END HIDDEN TESTS
buckets_chosen = checks.faster_backward(faster_backward)
buckets_chosen.points(3)

# %% [markdown]
# Your step, the one that was given, and ours, which has the best size of equal buckets: no other comes below its 1,350
# ms. No step at all is faster than 1,245. The gradients of the last layer are there after 1,200. A sum over four ranks
# makes each of them send one and a half times what it has, on average, which takes 30 ms, and the last byte needs its
# latency. Who sends by hand, straight to all other ranks, comes to 1,275, with the last layer in two rounds to 1,260,
# and if that is cut into 17 pieces to 1,246. Engines that answer users sum small tensors by hand, too, in one shot
# (each sends to all) or in two (to the rank that adds up a part, and from there to all). PyTorch's
# `DistributedDataParallel` leaves the size of its buckets to `bucket_cap_mb`, and makes the first one small, so that
# messages begin early. The course's own is [`DataParallel`](../../course_lib/mechanisms/data_parallel.py).

# %%
buckets_chosen.idle

# %% [markdown]
# Was your prediction right? Here is your `backward_in_buckets` on the same devices, with four sizes:

# %%
def emulated_step(rank, layers_per_bucket):
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    x = torch.ones(2, 16)
    for layer in model:
        x = on_the_clock(layer(x))  # the time of a layer, forward now and backward later
    backward_in_buckets(model, x.sum(), 272 * layers_per_bucket)


pace = Pace({"forward": 0.050, "backward": 0.100}, Link(0.015, 272 * 4 / 0.020))  # 272 numbers of 4 bytes in 20 ms
for layers in 1, 2, 4, 8:
    emulated = 1000 * launch(emulated_step, 4, args=(layers,), pace=pace).timeline.makespan
    verdict = "exactly" if round(emulated) == ends(layers) else "not yet: draw its two lines once more"
    print(f"buckets of {layers}: predicted {ends(layers):,} ms, emulated {emulated:,.0f} ms, {verdict}")

# %% [markdown]
# And on GPUs? A model of 6.5 billion parameters has 32 layers, and 64 H100 are its replicas, each with a card of 400
# Gbit/s. For $T$ tokens on a device, a layer of $P$ parameters takes $2PT$ FLOPs forward and $4PT$ backward. A ring
# sends $2P$ bytes of gradients nearly twice, in 126 rounds. *Predict:* with 8,192 tokens on a device, how much of the
# messages is still to be seen behind the last backward pass, with one layer in a bucket, and with all 32? And with
# 32,768 tokens?

# %%
from course_lib.planner import Cluster

cluster, layer, n = Cluster("H100-80GB", between="InfiniBand NDR"), 202e6, 64
speed, link = cluster.spec.peak["bf16"] * cluster.spec.matmul, cluster.between_link  # what large products reach
rounds = 1000 * 2 * (n - 1) * link.latency
carried = 1000 * 2 * (n - 1) / n * 2 * layer / link.achieved
for tokens in 8192, 32_768:
    computed = 1000 * 2 * layer * tokens / speed
    print(f"{tokens:6,} tokens: a layer takes {2 * computed:4.1f} ms backward, its gradients {carried:.1f} ms on the "
          f"link and {rounds:.1f} ms of rounds; a step computes for {96 * computed:,.0f} ms")
    for size in 1, 4, 32:
        shown = ends(size, 32, 32 * computed, 2 * computed, rounds, carried) - 96 * computed
        print(f"    {size:2} layers in a bucket: {shown:4.0f} ms more")

# %% [markdown]
# With few tokens the link is the slower of the two, and no bucket hides what is left over: then only more tokens on a
# device help, or fewer bytes. With many tokens all but the last bucket hides, so it had better be small. But not too
# small: PyTorch's 25 MiB would be a fifteenth of a layer here, and in a ring of 64 such a message takes as long for its
# rounds as for its bytes.
#
# And on your own computer? Two ranks, 16 layers with a megabyte of gradients each, and a real clock. *Predict:* which
# size is the best one?

# %%
my_best_size = None

# %% tags=["nbval-ignore-output"]
def measured_step(rank, layers_per_bucket):
    """Returns the median seconds of a step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16)))
    x, taken = torch.rand(256, 512), []
    for _ in range(9):
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        backward_in_buckets(model, model(x).square().mean(), 512 * 513 * layers_per_bucket)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


for layers in 1, 4, 16:
    print(f"measured, buckets of {layers:2}: {1000 * max(launch(measured_step, 2, args=(layers,)).results):4.0f} ms")
print("you expected the best one to be", my_best_size)

# %% [markdown]
# Run the cell twice before you believe an order. Here no link stands beside the processor: the cores that compute also
# copy the messages, so little can hide, least of all if your computer has few of them. A message between two processes
# has little latency, so many small ones cost little. On GPUs the latency is real and the link works on its own, and
# there the size of a bucket decides.

# %% [markdown]
# Why is your step faster, and what keeps it from being faster still? Write three sentences that name what the network
# and the devices wait for.

# %% [markdown] nbgrader={"grade_id": "why_faster_backward", "grade": true, "solution": true, "points": 2}
# Messages leave while earlier layers are still computed, so most of their time is hidden. Two layers share the 90 ms of
# a message, so the network keeps up with the backward pass. What is left is the last message: it waits for the first
# layer's gradients, and nothing is left to compute behind which it could hide.

# %% [markdown]
# ## Everything together
#
# `average_gradients` pays the latency of the link once for every parameter. Here all gradients travel as one message,
# and they travel on your ring. The same check can look at this one too: compare its price and its idle time with yours
# above.


# %%
def average_in_one_message(model, samples):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.full((dist.get_world_size(),), samples)
    ring_all_reduce(total)
    message = torch.cat([gradient.flatten() for gradient in gradients])
    message *= samples / total[0].item()
    ring_all_reduce(message)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, message.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


together = checks.average_gradients(average_in_one_message)
together

# %%
together.idle

# %% [markdown]
# Four ranks now train a small GPT to add two numbers. Each step has 30 problems, which four does not divide. Beside it
# one process does the same with all 30. The sums are taken in another order, so the last digits may differ, and no
# more.


# %%
def train(rank, steps):
    """Returns all parameters, after so many steps, as one vector."""
    world_size = dist.get_world_size()
    problems, _ = train_test_split()
    batches = minibatches(problems, 30)
    model = TinyGPT(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        inputs, targets = next(batches)
        inputs = split_batch(inputs, rank, world_size)
        targets = split_batch(targets, rank, world_size)
        optimizer.zero_grad()
        answer_loss(model(inputs), targets).backward()
        average_in_one_message(model, len(inputs))
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def report(replicas):
    same = all(torch.equal(replica, replicas[0]) for replica in replicas)
    print("all replicas equal, bit for bit:", same)
    close = torch.allclose(replicas[0], alone, atol=1e-5)
    print("equal to one process, up to rounding:", close)


alone = launch(train, 1, args=(20,), timeout=10).results[0]
report(launch(train, 4, args=(20,), timeout=10).results)

# %% [markdown]
# And the same with your buckets. Your function takes a plain mean over ranks, and here the shares differ in size, 8, 8,
# 7 and 7. So the *loss* is weighted in place of the gradients, by how much larger or smaller a share is than the
# average one.


# %%
def train_in_buckets(rank, steps):
    world_size = dist.get_world_size()
    batches = minibatches(train_test_split()[0], 30)
    model = TinyGPT(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        inputs, targets = (split_batch(tensor, rank, world_size) for tensor in next(batches))
        optimizer.zero_grad()
        loss = answer_loss(model(inputs), targets) * len(inputs) * world_size / 30
        backward_in_buckets(model, loss, 5_000)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


report(launch(train_in_buckets, 4, args=(20,), timeout=10).results)
