"""Two-digit sums as text: small enough to make in code, hard enough that right answers mean something.

A problem is a pair of numbers from 10 to 99. As text it is nine characters, always:

    37+48=085
    prompt|answer

The answer is padded with zeros to three digits. Every problem then has the same number of answer characters,
so the mean loss over characters is the mean over problems, and the share of a minibatch that a rank holds is
simply its number of problems. Chance is low: always answering 109, the commonest sum, is right one time in 90.

The test set holds problems that training never saw, and no mirror images (48+37) of those it saw: a model that only
memorizes does no better there than by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = "0123456789+="
PROMPT = len("37+48=")
ANSWER = len("085")
_TOKENS = {character: token for token, character in enumerate(VOCABULARY)}
TEST_SHARE = 0.1
NO_LOSS = -100  # the target that cross_entropy ignores

Problem = tuple[int, int]


def encode(text: str) -> Tensor:
    """Text -> int64 tokens [len(text)]. Raises KeyError for a character outside VOCABULARY."""
    return torch.tensor([_TOKENS[character] for character in text], dtype=torch.int64)


def _encode_all(texts: Iterable[str], length: int) -> Tensor:
    """Texts of one length -> int64 tokens [number of texts, length], ten times as fast as one by one."""
    return encode("".join(texts)).view(-1, length)


def decode(tokens: Tensor) -> str:
    """Tokens [length] -> text, the inverse of `encode`."""
    return "".join(VOCABULARY[token] for token in tokens.tolist())


def solution(problem: Problem) -> str:
    """The whole text of a problem with numbers from 10 to 99: (37, 48) -> "37+48=085"."""
    first, second = problem
    return f"{first}+{second}={first + second:03d}"


def train_test_split(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """All 8,100 problems, nine tenths for training, the others for testing; a problem stays with its mirror image."""
    draw = torch.rand(100, 100, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for first in range(10, 100):
        for second in range(10, 100):
            is_test = draw[min(first, second)][max(first, second)] < TEST_SHARE
            sides[is_test].append((first, second))
    return sides


def examples(problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [len(problems), 8]: each target is the character after its input.

    Only the answer is learned: targets inside the prompt are NO_LOSS.
    """
    tokens = _encode_all(map(solution, problems), PROMPT + ANSWER)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, : PROMPT - 1] = NO_LOSS
    return inputs, targets


def fixed_examples(n: int) -> tuple[Tensor, Tensor]:
    """Examples of n fixed sums: 10+99, 11+98 and so on, from the first again after 90."""
    return examples([(10 + i % 90, 99 - i % 90) for i in range(n)])


def minibatches(problems: Sequence[Problem], batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches (inputs, targets) of [batch_size, 8] without end, drawn with replacement.

    The same seed gives the same minibatches, so ranks with one seed all see the same ones.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = torch.randint(len(problems), (batch_size,), generator=generator, device="cpu")
        inputs, targets = examples([problems[place] for place in drawn.tolist()])
        yield inputs.contiguous(), targets


def answer_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the answers' characters; logits [batch, sequence, vocab], targets [batch, sequence]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_LOSS)


@torch.no_grad()
def complete(model: nn.Module, problems: Sequence[Problem]) -> list[str]:
    """The text of each problem with the answer of the model, which always takes the likeliest character."""
    device = next(model.parameters()).device
    tokens = _encode_all((solution(problem)[:PROMPT] for problem in problems), PROMPT).to(device)
    for _ in range(ANSWER):
        likeliest = model(tokens)[:, -1].argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, likeliest], dim=1)
    return [decode(row) for row in tokens]


def share_right(model: nn.Module, problems: Sequence[Problem]) -> float:
    """The share of problems, 0 to 1, whose whole answer the model gets right."""
    texts = complete(model, problems)
    return sum(text == solution(problem) for text, problem in zip(texts, problems, strict=True)) / len(problems)
