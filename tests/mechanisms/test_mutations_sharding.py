"""Sharding broken in small ways, each of which has to be noticed.

A line of `shards`, `sharding` or `fully_sharded` is changed in a copy that the ranks load instead, and situations that
are right, or refused, have to end otherwise.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from course_lib import RunError, launch, mechanisms
from tests.mechanisms import test_situations_sharding as situations

MODULES = ("buckets", "replicas", "shards", "fully_sharded", "sharding")  # in the order in which they import each other


def page(module: str) -> Path:
    return Path(str(mechanisms.__file__)).with_name(f"{module}.py")


@contextmanager
def broken(module: str = "", line: str = "", instead: str = "") -> Iterator[None]:
    """Within it, the situations use modules of which one has another line."""
    with pytest.MonkeyPatch.context() as patch:
        for short in MODULES:
            name, source = f"course_lib.mechanisms.{short}", page(short).read_text(encoding="utf-8")
            if short == module:
                source = source.replace(line, instead)
            copy = types.ModuleType(name)
            patch.setitem(sys.modules, name, copy)
            exec(compile(source, page(short), "exec"), copy.__dict__)
        for kind in ("FullySharded", "ShardedOptimizer"):
            patch.setattr(situations, kind, getattr(copy, kind))
        yield


def outcome(mutation: tuple[str, str, str], noticed_by: str, way: str) -> str:
    situation = getattr(situations, noticed_by)

    def is_right(rank: int) -> bool:
        with broken(*mutation):
            return situations.is_right(rank, situation, way)

    try:
        return "right" if all(launch(is_right, 2, device="cpu", timeout=20).results) else "wrong"
    except RunError as error:
        return f"{type(error).__name__}: {error}"


# A module, a line's text, another text for it, and the situation and the way that notice.
MUTATIONS = [
    (
        "shards",
        "[self.rank * self.shard_size : (self.rank + 1) * self.shard_size]",
        "[-self.shard_size :]",
        "small_buckets",
        "local",
    ),
    ("shards", "min(max(end, first), last)", "last", "used_now_and_then", "local"),
    ("shards", "            total += other", "            pass", "small_buckets", "local"),
    ("shards", "like).add_(0.0)", "like)", "gradients_of_zero", "sharded"),
    ("shards", "            view.fill_(-0.0)", "            pass", "never_used", "local"),
    ("shards", "total.div_(n)", "total.div_(n + 1)", "small_buckets", "sharded"),
    ("shards", "owner.grad.add_(mean)", "mean", "several_backward_passes_of_different_layers", "FullySharded"),
    (
        "shards",
        "            place.copy_(parameter.detach())",
        "            pass",
        "averaged_weights_are_swapped_in",
        "local",
    ),
    ("shards", "            parameter.data = place", "            pass", "averaged_weights_are_swapped_in", "local"),
    ("shards", ' and name != "step"', "", "scalar_in_the_state", "local"),
    ("shards", "piece(number, value)", "piece(number, 0 * value)", "state_without_the_first", "local"),
    ("shards", "whole[name] = joined", "whole[name] = (0 * joined)", "scalar_in_the_state", "local"),
    ("sharding", "from_first_rank(named.values(), self.group)", "pass", "small_buckets", "local"),
    (
        "sharding",
        "            sharded.update(_hyperparameters(whole))",
        "            pass",
        "a_learning_rate_is_changed",
        "local",
    ),
    (
        "sharding",
        "            whole.update(_hyperparameters(sharded))  #",
        "            pass  #",
        "an_optimizer_that_sets_its_learning_rate",
        "local",
    ),
    (
        "sharding",
        "[bucket.gather() for bucket in self._buckets]",
        "[self._buckets[0].gather()]",
        "small_buckets",
        "local",
    ),
    ("sharding", 'if self.gradients != "sharded":  #', "if False:  #", "forgotten_zero_grad", "local"),
    (
        "sharding",
        "            _forget_zeroed(bucket)",
        "            pass",
        "a_minibatch_is_dropped_by_zero_grad_of_the_model",
        "sharded",
    ),
    ("sharding", "bucket.updated[index].grad = None", "pass", "zero_grad_of_the_model", "sharded"),
    ("sharding", " or self._has_more()", "", "several_backward_passes_of_different_layers", "sharded"),
    (
        "sharding",
        "parameter.grad = self._elsewhere[parameter]",
        "parameter.grad = None",
        "forgotten_zero_grad",
        "sharded",
    ),
    ("sharding", "        if self._buckets:\n", "        if False:\n", "a_group_that_is_refused", "local"),
    ("replicas", "    from_first_rank(model, group)", "    pass", "small_buckets", "FullySharded"),
    (
        "fully_sharded",
        "self._aside[parameter], parameter.grad = gradient, self._aside.get(parameter)",
        "self._aside[parameter] = gradient",
        "several_backward_passes_of_different_layers",
        "FullySharded",
    ),
    (
        "fully_sharded",
        "self._aside.pop(parameter, None)",
        "self._aside.get(parameter)",
        "small_buckets",
        "FullySharded",
    ),
    ("fully_sharded", "            if block.missing:  #", "            if False:  #", "frozen_later", "FullySharded"),
    (
        "fully_sharded",
        "take_back(bucket.parameters, bucket.pieces)\n            self._gathering",
        "self._gathering",
        "averaged_weights_are_swapped_in",
        "FullySharded",
    ),
    (
        "fully_sharded",
        "        self._backward, self._sending = None, None",
        "        self._sending = None",
        "small_buckets",
        "FullySharded",
    ),
]


@pytest.mark.parametrize(("module", "line", "instead", "noticed_by", "way"), MUTATIONS)
def test_a_small_mistake_is_noticed(module: str, line: str, instead: str, noticed_by: str, way: str) -> None:
    assert page(module).read_text(encoding="utf-8").count(line) == 1, "this line is not there, or more than once"
    assert outcome((module, line, instead), noticed_by, way) != "right"


def test_without_a_mistake_the_same_situations_are_right() -> None:
    for noticed_by, way in sorted({(noticed_by, way) for *_, noticed_by, way in MUTATIONS}):
        assert outcome(("", "", ""), noticed_by, way) == "right", (noticed_by, way)
