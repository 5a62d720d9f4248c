"""The two ends of a language model, cut by vocabulary: each rank has some tokens' rows of the matrices.

    tokens     -- embedding of this rank's tokens, zeros for the others --g-- hidden states, whole
    hidden states --f-- logits of this rank's tokens --> loss, from three numbers per target, never from all logits

The loss of a target t is log sum_v exp(z_v) - z_t. Each rank adds up the exponentials of its own logits z, and one rank
has the target's; the largest logit of all, m, is subtracted first so that no exponential overflows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.tensor_parallel.linear import sum_over_ranks
from course_lib.mechanisms.tensor_parallel.placement import shard_parameters, shard_range

IGNORED = -100  # a target that is left out of the loss


class VocabParallelEmbedding(nn.Module):
    """An embedding of which this rank has some tokens' rows: tokens [...] -> hidden states [..., hidden], on all ranks.

    Each rank looks up the tokens that it has and outputs zeros for the others; the sum is the embedding.

    embedding: the whole one, without options such as padding_idx. It gets the weights of the group's first rank.

    A token outside of the vocabulary becomes zeros, as it does in PyTorch's own.
    """

    weight: nn.Parameter

    def __init__(self, embedding: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        self.num_embeddings, self.group = embedding.num_embeddings, group
        shard_parameters(self, embedding, {"weight": 0}, group)

    def forward(self, tokens: Tensor) -> Tensor:
        row, is_mine = _own_rows(tokens, self.num_embeddings, self.group)
        return sum_over_ranks(F.embedding(row, self.weight) * is_mine.unsqueeze(-1), self.group)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocab: int, group: Group = None) -> Tensor:
    """The mean cross-entropy, from each rank's share of the logits: what travels is three numbers per target.

    logits: this rank's share [..., vocab / ranks].  targets: tokens [...], the same on all ranks; -100 is
    left out of the mean.  vocab: size of the whole vocabulary.
    Returns what F.cross_entropy does, on every rank; computed in float32 at least. Nobody checks that targets are of
    this vocabulary.
    """
    is_counted = targets != IGNORED
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    logits = logits - largest.unsqueeze(-1)  # so that exp cannot overflow
    row, is_mine = _own_rows(targets, vocab, group)
    logit = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) * is_mine
    sum_of_exp, logit = sum_over_ranks(torch.stack([logits.exp().sum(-1), logit]), group)
    return (sum_of_exp.log() - logit)[is_counted].mean()


def _own_rows(tokens: Tensor, vocab: int, group: Group) -> tuple[Tensor, Tensor]:
    """Which of this rank's rows a token has, and whether it has one; where not, the row is any."""
    own = shard_range(vocab, dist.get_rank(group), dist.get_world_size(group))
    return (tokens - own.start).clamp(0, len(own) - 1), (tokens >= own.start) & (tokens < own.stop)
