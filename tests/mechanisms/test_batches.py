"""Cutting a minibatch: every sample exactly once, in order, in pieces as equal as can be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.mechanisms import batches

each_way = pytest.mark.parametrize("cut", [batches.split, batches.micro_batches])


@each_way
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_every_sample_is_in_exactly_one_piece_and_in_order(cut: Callable, data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 40))
    pieces = data.draw(st.integers(1, samples))
    cut_up = [piece.tolist() for piece in cut(torch.arange(samples), pieces)]
    assert [sample for piece in cut_up for sample in piece] == list(range(samples))
    assert [len(piece) for piece in cut_up] == [samples // pieces + (i < samples % pieces) for i in range(pieces)]


@each_way
def test_inputs_and_targets_are_cut_at_the_same_places(cut: Callable) -> None:
    inputs, targets = torch.arange(20).view(10, 2), torch.arange(10)
    shares = cut((inputs, targets), 4)
    assert [len(share) for share in shares] == [2] * 4
    assert [share[1].tolist() for share in shares] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert all(torch.equal(share[0], inputs[share[1]]) for share in shares)


def test_a_batch_keeps_its_structure() -> None:
    batch = {"text": [torch.arange(6), torch.arange(6) * 2], "weight": (torch.arange(6) * 3,)}
    first, second = batches.split(batch, 2)
    assert list(first) == ["text", "weight"]
    assert type(first["text"]) is list
    assert type(first["weight"]) is tuple
    assert second["text"][1].tolist() == [6, 8, 10]
    assert second["weight"][0].tolist() == [9, 12, 15]


def test_shares_are_views_and_copy_nothing() -> None:
    batch = torch.zeros(4, 3)
    batches.split(batch, 2)[1][0] = 7
    assert batch[2].tolist() == [7, 7, 7]


@each_way
@pytest.mark.parametrize("pieces", [0, -1, 5])
def test_a_number_of_pieces_that_cannot_be_is_refused(cut: Callable, pieces: int) -> None:
    with pytest.raises(ValueError, match=rf"{pieces} .*samples=4; choose from 1 to 4"):
        cut(torch.zeros(4), pieces)
