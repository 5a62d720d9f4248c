"""The traffic of a step of `mechanisms.hybrid`, to the byte, for a model as model.py builds it.

Estimates are for large machines and round off what does not matter there. On a laptop everything shows: the padding of
a shard, the header of a message. So here is the same arithmetic in whole numbers, to be compared with a trace.

    axis   what one rank sends in a step, for s samples of its replica and h = s x sequence x hidden x size bytes
    dp     reduce-scatter of 32-bit gradients, all-gather of the updated weights    (dp - 1) shard (4 + size)
            and for each parameter, how many replicas had a gradient             (dp - 1) tensors 4
    pp     hidden states down, their gradients up, and one header                h each, and 512
    tp     all-reduces: 4 in each layer, one at each end of the model, the loss's   2 (tp - 1) / tp h each
    all    the loss, around all ranks                                               2 (n - 1) / n 8
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.planner.memory import model_state, share
from course_lib.planner.spec import ModelSpec, Parameters, Plan

DESCRIPTION = 64 * 8  # bytes that tell a stage, once in a pass, shape and dtype of its messages
NUMBER = 8  # bytes of a loss
AXES = ("dp", "pp", "tp", "all")


def all_reduce(n_bytes: int, n: int) -> int:
    return 2 * (n - 1) * n_bytes // n


class Hybrid(NamedTuple):
    """`hybrid.train_step` with ZeRO-1, one stage on each pipeline rank, and the output matrix apart from the embedding.

    mesh: the sizes of dp, pp and tp; rank = (d x pp + p) x tp + t. They divide samples, layers and heads.
    samples: of the whole minibatch.  size: bytes of a number in the model's dtype.
    """

    model: ModelSpec
    mesh: tuple[int, int, int]
    samples: int
    size: int

    def sent(self, rank: int) -> dict[str, int]:
        """Bytes that a rank sends in a step, by axis."""
        dp, pp, tp = self.mesh
        is_first, is_last = self._stage(rank) == 0, self._stage(rank) == pp - 1
        tokens = self.samples // dp * self.model.sequence
        hidden = tokens * self.model.hidden * self.size
        losses = 3 * tokens * 4 * is_last  # one number for each token, and then two
        return {
            "dp": (dp - 1) * sum(shard * (4 + self.size) + 4 * tensors for shard, tensors in self.buckets(rank)),
            "pp": (hidden + DESCRIPTION) * (not is_last) + hidden * (not is_first),
            "tp": all_reduce((4 * self.model.layers // pp + is_first + is_last) * hidden + losses, tp),
            "all": all_reduce(NUMBER, dp * pp * tp),
        }

    def buckets(self, rank: int) -> list[tuple[int, int]]:
        """Numbers in the rank's shard, and tensors, of the parameters that are cut, and of those that are whole."""
        (dp, pp, tp), held = self.mesh, self._parameters(rank)
        is_first, is_last, layers = self._stage(rank) == 0, self._stage(rank) == pp - 1, self.model.layers // pp
        cut, whole = 10 * layers + is_first + is_last, 6 * layers + is_first + 2 * is_last
        return [(share(held.cut // tp, dp), cut), (share(held.whole, dp), whole)]

    def held(self, rank: int) -> tuple[int, int, int]:
        """Bytes of parameters, gradients and Adam's state in 32 bits, without paddings and counts of steps."""
        dp, _, tp = self.mesh
        held = self._parameters(rank)
        return model_state(held.cut // tp + held.whole, Plan(dp, zero=1, precision="fp32"))

    def _stage(self, rank: int) -> int:
        _, pp, tp = self.mesh
        return rank // tp % pp

    def _parameters(self, rank: int) -> Parameters:
        return self.model.parameters_of([self._stage(rank)], self.mesh[1])
