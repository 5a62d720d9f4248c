"""The data: its problems, an honest split, and a tiny model that really learns it."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import Tensor, nn

from course_lib import data, launch
from course_lib.model import TinyGPT


class Oracle(nn.Module):
    """A model that does the sum in Python, except where it is told to be wrong."""

    def __init__(self, wrong: Collection[data.Problem] = ()) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.wrong = wrong

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, len(data.VOCABULARY))
        for row, text in enumerate(map(data.decode, tokens)):
            first, second = int(text[:2]), int(text[3:5])
            total = first + second + ((first, second) in self.wrong)
            logits[row, -1, int(f"{total:03d}"[len(text) - data.PROMPT])] = 1
        return logits


def test_text_and_tokens_are_two_ways_to_write_the_same() -> None:
    assert data.decode(data.encode("37+48=085")) == "37+48=085"
    assert data.encode(data.VOCABULARY).tolist() == list(range(12))


def test_training_and_test_problems_are_disjoint_even_when_mirrored() -> None:
    train, test = data.train_test_split()
    assert len(train) + len(test) == 90 * 90
    assert set(train) | set(test) == set(itertools.product(range(10, 100), repeat=2))
    assert not {(b, a) for a, b in test} & set(train)
    assert 0.07 < len(test) / 8100 < 0.13


def test_targets_are_the_next_characters_and_only_the_answer_counts() -> None:
    inputs, targets = data.examples([(37, 48)])
    assert data.decode(inputs[0]) == "37+48=08"
    assert targets[0].tolist() == [data.NO_LOSS] * 5 + [0, 8, 5]


def test_the_loss_does_not_look_at_the_prompt() -> None:
    _, targets = data.examples([(37, 48), (99, 99)])
    logits = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    by_hand = -torch.stack(
        [
            logits[row, 5 + digit].log_softmax(0)[int(f"{answer:03d}"[digit])]
            for row, answer in ((0, 85), (1, 198))
            for digit in range(3)
        ]
    ).mean()
    assert torch.allclose(data.answer_loss(logits, targets), by_hand)


def test_a_seed_decides_the_minibatches() -> None:
    train, _ = data.train_test_split()
    one, same, other = (data.minibatches(train, 16, seed) for seed in (1, 1, 2))
    for _ in range(3):
        inputs, targets = next(one)
        again, _ = next(same)
        assert inputs.shape == targets.shape == (16, 8)
        assert torch.equal(inputs, again)
        assert not torch.equal(inputs, next(other)[0])


def test_the_share_of_right_answers_counts_whole_answers() -> None:
    problems = [(37, 48), (10, 10), (99, 99), (50, 51)]
    assert data.share_right(Oracle(), problems) == 1.0
    assert data.share_right(Oracle(wrong={(99, 99)}), problems) == 0.75
    assert data.complete(Oracle(wrong={(99, 99)}), problems)[2] == "99+99=199"


def test_an_untrained_model_is_right_about_as_often_as_chance() -> None:
    _, test = data.train_test_split()
    assert data.share_right(TinyGPT(), test) < 0.03


def learn(rank: int) -> list[str]:
    """Train until nine in ten unseen sums are right; returns the progress, line by line."""
    problems, unseen = data.train_test_split()
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 100))
    lines = []
    minibatches = itertools.islice(data.minibatches(problems, 64), 1500)
    for step, (inputs, targets) in enumerate(minibatches, start=1):
        data.answer_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        if step % 100 == 0:
            share = data.share_right(model, unseen)
            lines.append(f"step {step}: {share:.1%} right, for instance {data.complete(model, unseen[:1])[0]}")
            if share > 0.9:
                break
    return lines


def test_a_tiny_model_learns_to_add_numbers_that_it_has_never_seen_added() -> None:
    """The model learns on one rank; on four, in lesson 02, it is checked as well."""
    (lines,) = launch(learn, 1, timeout=300).results
    assert float(lines[-1].split()[2].rstrip("%")) > 90, "\n".join(lines)
