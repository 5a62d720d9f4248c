"""Tied weights: copies on several ranks, whose gradients are added up as one process adds up a parameter's uses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from course_lib import launch
from course_lib.mechanisms import tied_weights

FOUND = {0: 1.0, 2: 2.0**24, 3: -(2.0**24)}  # 1 from the last to the first; from the first on, 1 + 2^24 is 2^24


def test_three_ranks_add_up_their_gradients_the_last_one_first() -> None:
    def total(rank: int) -> Tensor | None:
        if rank == 1:  # holds no copy
            return None
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.full((2,), FOUND[rank])
        return tied_weights.sum_gradients(parameter, [0, 2, 3])

    sums = launch(total, 4).results
    assert [None if one is None else one.tolist() for one in sums] == [[1.0, 1.0], None, [1.0, 1.0], [1.0, 1.0]]


def test_what_was_summed_before_is_not_sent_again() -> None:
    def twice(rank: int) -> tuple[Tensor | None, Tensor | None]:
        used, unused = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        for _ in range(2):
            with tied_weights.summed({used: [0, 1], unused: [0, 1]}):
                if rank == 0:
                    (used * 3).sum().backward()
        return used.grad, unused.grad

    assert launch(twice, 2).results == [(torch.tensor([6.0]), torch.tensor([0.0]))] * 2


def test_a_parameter_is_tied_if_it_is_trained_and_several_ranks_hold_it() -> None:
    shared, frozen, alone = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
    frozen.requires_grad_(False)
    on_ranks = [nn.ModuleList([shared, frozen]), nn.ModuleList([alone, alone]), nn.ModuleList([shared, frozen])]
    assert tied_weights.holders(on_ranks) == {shared.weight: [0, 2]}
