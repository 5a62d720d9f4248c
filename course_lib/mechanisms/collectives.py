"""Ring collectives, out of nothing but send and recv.

The n ranks stand in a ring, and each only ever talks to its two neighbors: it sends to the right and receives
from the left. A tensor is cut into n chunks, and every rank sends one chunk per step, so all links work all the
time. After n - 1 steps each rank holds the sum of one chunk (reduce-scatter), after n - 1 more of all (all-gather).

    reduce-scatter, 3 ranks         chunk 0        chunk 1        chunk 2
    start                rank 0     a0             a1             a2  ->
                         rank 1     b0  ->         b1             b2
                         rank 2     c0             c1  ->         c2
    after step 1         rank 0     a0             a1+c1  ->
                         rank 1                    b1             b2+a2  ->
                         rank 2     c0+b0  ->                     c2
    after step 2         rank 0     a0+c0+b0
                         rank 1                    b1+a1+c1
                         rank 2                                   c2+b2+a2

An all-reduce sends 2 (n - 1) chunks from each rank, 2 (n - 1) / n of the tensor: nearly the same for 4 ranks as for
4,000, and no algorithm sends less.

A ring of many ranks takes many steps, and each takes a link's latency. Two other ways to the same sum take fewer:

    tree           pairs add up, then pairs of pairs, and the sum comes back the same way: 2 log2(n) steps, but each
                   carries the whole tensor
    hierarchical   a ring in every node, rings across the nodes on a chunk each, and a ring in every node again:
                   2 (g - 1) + 2 (n / g - 1) steps for nodes of g, and the bytes of one ring

Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations";
Thakur et al. 2005, "Optimization of collective communication operations in MPICH".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.mechanisms.groups import Group, rank_in
from course_lib.timeline import compute


@torch.no_grad()
def ring_all_reduce(tensor: Tensor, group: Group = None) -> Tensor:
    """Replace the tensor on every rank by its sum over the group, in place, and return it.

    tensor: any shape and any dtype that torch can add, the same on all ranks. The ranks' results are equal bit
    for bit, because each element is added up once, on one rank, and then copied.

    Raises ValueError on a rank that is not in the group, RuntimeError for a tensor that is not contiguous.
    """
    ring_reduce_scatter(tensor, group)
    return ring_all_gather(tensor, group)


@torch.no_grad()
def ring_reduce_scatter(tensor: Tensor, group: Group = None) -> Tensor:
    """Sum the tensor over the group; rank r gets chunk r of the sum, flat.

    The chunks are those of `tensor.flatten().tensor_split(world_size)`: where the ranks do not divide the
    elements, the first chunks are one longer. Works in place: chunk r of `tensor` becomes the returned sum, and the
    other chunks are left holding partial sums.

    Raises ValueError on a rank that is not in the group, RuntimeError for a tensor that is not contiguous.
    """
    rank, chunks = _chunks(tensor, group)
    arriving = torch.empty_like(chunks[0])  # no chunk is longer than the first
    for step in range(1, len(chunks)):
        own = chunks[(rank - 1 - step) % len(chunks)]
        received = arriving[: len(own)]
        _send_right_receive_left(chunks[(rank - step) % len(chunks)], received, group)
        with compute("other", "add", work=0):
            own += received
    return chunks[rank]


@torch.no_grad()
def ring_all_gather(tensor: Tensor, group: Group = None) -> Tensor:
    """Fill the tensor with chunk r of rank r, for every rank r of the group, in place, and return it.

    Only this rank's own chunk (as `ring_reduce_scatter` cuts them) is read; what the others hold is overwritten.

    Raises ValueError on a rank that is not in the group, RuntimeError for a tensor that is not contiguous.
    """
    rank, chunks = _chunks(tensor, group)
    for step in range(len(chunks) - 1):
        newest, missing = chunks[(rank - step) % len(chunks)], chunks[(rank - step - 1) % len(chunks)]
        _send_right_receive_left(newest, missing, group)
    return tensor


@torch.no_grad()
def tree_all_reduce(tensor: Tensor, group: Group = None) -> Tensor:
    """Replace the tensor on every rank by its sum over the group, in place, and return it: up a tree, and down again.

    Raises ValueError on a rank that is not in the group, RuntimeError for a tensor that is not contiguous.
    """
    flat = tensor.view(-1)
    arriving = torch.empty_like(flat)
    for parent, child in _tree(group):
        if child is None:
            dist.send(flat, group=group, group_dst=parent)
        else:
            dist.recv(arriving, group=group, group_src=child)
            with compute("other", "add", work=0):
                flat += arriving
    tree_broadcast(flat, group)
    return tensor


@torch.no_grad()
def tree_broadcast(tensor: Tensor, group: Group = None) -> Tensor:
    """Fill the tensor on every rank with that of the group's first rank, in place, and return it: down a tree.

    Raises ValueError on a rank that is not in the group, RuntimeError for a tensor that is not contiguous.
    """
    flat = tensor.view(-1)
    for parent, child in reversed(_tree(group)):
        if child is None:
            dist.recv(flat, group=group, group_src=parent)
        else:
            dist.send(flat, group=group, group_dst=child)
    return tensor


@torch.no_grad()
def hierarchical_all_reduce(tensor: Tensor, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> Tensor:
    """Replace the tensor by its sum over all nodes, in place, and return it.

    inside: this rank's node.  across: the ranks that have the same place in the other nodes.
    """
    flat = tensor.view(-1)
    ring_all_reduce(ring_reduce_scatter(flat, inside), across)
    ring_all_gather(flat, inside)
    return tensor


def all_reduce_in(dtype: torch.dtype, accumulate: torch.dtype | None = None) -> Callable[..., Tensor]:
    """An all-reduce, to be called like `ring_all_reduce`, that sends numbers of `dtype` and adds them in `accumulate`.

        all_reduce_in(torch.bfloat16)(tensor, group)
        all_reduce_in(torch.bfloat16, accumulate=torch.float32)(tensor, group)

    accumulate: dtype of the sums, at least as wide as `dtype`, which it is if None. Both ways send 2 (n - 1) / n of the
        tensor from each of n ranks:

        in dtype     a ring: each sum is rounded at every hop, n - 1 times (so do the rings of NCCL)
        in a wider   everyone's pieces go to the rank that adds them up; a sum is rounded once, when it is complete

    The tensor, of whatever dtype, is replaced by the sum, in place; the ranks' results are equal bit for bit.
    """
    accumulate = accumulate or dtype

    @torch.no_grad()
    def all_reduce(tensor: Tensor, group: Group = None) -> Tensor:
        lowered = tensor.to(dtype).flatten()
        if accumulate == dtype:
            ring_all_reduce(lowered, group)
        else:
            _add_own_chunk(lowered, accumulate, group)
            ring_all_gather(lowered, group)
        return tensor.copy_(lowered.view_as(tensor))

    return all_reduce


def _add_own_chunk(flat: Tensor, accumulate: torch.dtype, group: Group) -> None:
    """Reduce-scatter: chunk r of rank r becomes the sum of everyone's, added up from rank 0 on, rounded once."""
    rank, chunks = _chunks(flat, group)
    own = chunks[rank]
    arrived = flat.new_empty(len(chunks), len(own))
    sizes = [len(chunk) for chunk in chunks]
    dist.all_to_all_single(arrived.view(-1), flat, [len(own)] * len(chunks), sizes, group=group)
    with compute("other", "add", work=0):
        total = own.new_zeros(len(own), dtype=accumulate)
        for piece in arrived:
            total += piece
        own.copy_(total)


def _send_right_receive_left(outgoing: Tensor, incoming: Tensor, group: Group) -> None:
    rank, world_size = rank_in(group), dist.get_world_size(group)
    # In one batch: a send ends when its receive has begun, so if every rank sent first, none would ever receive.
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % world_size)
    for work in dist.batch_isend_irecv([receive, send]):
        work.wait()


def _tree(group: Group) -> list[tuple[int | None, int | None]]:
    """This rank's children, level by level from the leaves, each as (None, child), and at last (parent, None)."""
    rank, world_size = rank_in(group), dist.get_world_size(group)
    distances = [2**level for level in range((world_size - 1).bit_length())]
    children = [(None, rank + far) for far in distances if rank % (2 * far) == 0 and rank + far < world_size]
    return children + [(rank - far, None) for far in distances if rank % (2 * far) == far]


def _chunks(tensor: Tensor, group: Group) -> tuple[int, tuple[Tensor, ...]]:
    """This rank's number in the group, and the tensor flat, cut into a chunk for each of its ranks."""
    return rank_in(group), tensor.view(-1).tensor_split(dist.get_world_size(group))
