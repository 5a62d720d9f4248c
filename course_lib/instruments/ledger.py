"""The memory ledger: the bytes that a rank holds while it trains, by kind.

    bytes      parameters   there all the time
      ^        optimizer    made by the first step, there from then on
      |        gradients    grow through the backward pass, until they are set to None
      |        activations  saved by forward operations for backward: they grow, and go as backward uses them
      |             ____
      |         ___/    \\___                     the peak is where forward turns into backward
      |     ___/            \\____
      |____/_________________________\\____
      |  forward         | backward  | step  ->  time

        with Ledger(model, optimizer) as ledger:
            train_step()
        ledger.peak.held, ledger.peak.activations

Bytes are those of storages, each counted once: a tied parameter, the views of a flat buffer, and a tensor that three
operations save are one storage. A storage counts whole even if only a view of it is used, since it is kept whole. A
storage that would belong to several kinds counts as the first of: parameters, gradients, optimizer, activations.

Autograd reports what it saves (`torch.autograd.graph.saved_tensors_hooks`), so nothing is estimated, and nothing is
computed differently. The ledger leaves out what autograd does not report: temporary results inside an operation, the
free memory of an allocator, communication buffers without gradients.

A Transformer block of model.py saves, for b samples of s tokens, hidden size h, a heads, MLP width f and e bytes per
number:

    2 e s b h   inputs of the two norms                e s b h     input of query, key and value, stored once
    3 e s b h   query, key and value                   e s b h     mixed values, which are also the input of out
      e s b h   input of up                          2 e s b f     input of GELU, input of down
    4 e s b     mean and 1 / deviation of each norm    4 a s b     log-sum-exp of each row of scores, at least 32 bits

With f = 4 h and e = 2 the terms in h are 32 s b h. Korthikanti et al. 2022 count s b h (34 + 5 a s / h), that is
34 s b h + 5 a s^2 b. The reasons for the difference:

    - 2 s b h     masks of two dropouts on hidden states, a byte for each number: this model has no dropout
    - a s^2 b     mask of the dropout on scores, likewise
    - 4 a s^2 b   scores after softmax, and after dropout: scaled_dot_product_attention does not save them. Its
                  backward pass computes them anew from query, key and log-sum-exp (Dao et al. 2022)
    + 8 s b + 4 a s b     the norms' statistics and the log-sum-exp, which the paper leaves out as small

This holds on the CPU; kernels of a GPU round some of it up and keep the norms' statistics in 32 bits.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1;
Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness";
Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (the kinds).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from course_lib.instruments.watch import tensors_in


@dataclass(frozen=True)
class Bytes:
    """Bytes that one rank holds.

    parameters: of the module, its buffers included.
    gradients: in `.grad` of the module's and of the optimizer's parameters; None counts nothing.
    optimizer: the optimizer's state, and parameters of its own (a shard's, or float32 master weights).
        Adam's has two numbers for each number of the parameter and 4 bytes, the step, for each parameter tensor.
    activations: saved by forward operations for the backward pass.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


class Sample(NamedTuple):
    """The bytes held at one moment of a ledger.

    event: "start"; "turn", before activations fall after they have grown, as at the start of a backward pass; "step"
        and "stepped", before and after the optimizer's step; "end".
    """

    event: str
    held: Bytes


def count(model: nn.Module, optimizer: Any = None) -> Bytes:
    """Count the bytes that this rank holds now: the module's parameters and gradients, and the optimizer's state.

    optimizer: a torch.optim.Optimizer, such as those of the mechanisms.
    Activations are zero, as nobody knows what was saved before; see `Ledger`. A module on the device "meta", which
    holds no numbers, counts as on any other device.
    """
    in_model, in_optimizer = _holders(model, optimizer)
    gradients = [tensor.grad for tensor in (*in_model, *in_optimizer) if tensor.grad is not None]
    counted: set[UntypedStorage] = set()
    sizes = []
    for tensors in (in_model, gradients, in_optimizer):
        found = set(map(_storage, tensors)) - counted
        sizes.append(sum(storage.nbytes() for storage in found))
        counted |= found
    return Bytes(*sizes)


class Ledger:
    """A record of the bytes that a module and its optimizer hold on this rank during the `with` block.

    optimizer: see `count`.

    samples: a Sample for each event, in order.
    now: the bytes held at this moment.
    peak: the sample with the largest total, the first of equal ones.

    Autograd reports to the innermost saved_tensors_hooks only, those of other open ledgers included. So checkpointing
    with use_reentrant=False hides what a block recomputes during its backward pass; with use_reentrant=True it is
    seen.

    With hooks, autograd does not notice that a tensor which it saved was changed in place.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.samples: list[Sample] = []
        self._is_open = self._is_growing = False
        # For each storage that autograd holds: its bytes when it was saved, and the number of saved tensors in it.
        self._sizes: dict[UntypedStorage, int] = {}
        self._uses: Counter[UntypedStorage] = Counter()

    def __enter__(self) -> Ledger:
        self._is_open = True
        self._buffers = {id(buffer) for buffer in self.model.buffers()}
        self._hooks = contextlib.ExitStack()
        for hook in self._watch():
            self._hooks.enter_context(hook)
        self._record("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._record("end")
        self._is_open = False

    def _watch(self) -> Iterator[contextlib.AbstractContextManager[object]]:
        """Register every hook that the ledger needs; each removes itself."""
        if self.optimizer is not None:
            yield self.optimizer.register_step_pre_hook(lambda *_: self._record("step"))
            yield self.optimizer.register_step_post_hook(lambda *_: self._record("stepped"))
        yield saved_tensors_hooks(self._save, lambda saved: saved)

    @property
    def now(self) -> Bytes:
        return replace(count(self.model, self.optimizer), activations=sum(self._sizes.values()))

    @property
    def peak(self) -> Sample:
        return max(self.samples, key=lambda sample: sample.held.total)

    def _record(self, event: str) -> None:
        self.samples.append(Sample(event, self.now))

    def _save(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves; autograd keeps the returned value until backward has used it."""
        origin = tensor if tensor._base is None else tensor._base
        is_own = isinstance(origin, nn.Parameter) or id(origin) in self._buffers
        if is_own:
            return tensor.detach()
        storage = _storage(tensor)
        self._sizes.setdefault(storage, storage.nbytes())
        self._uses[storage] += 1
        self._is_growing = True
        # An operation's own output refers to the operation; holding it directly would keep both alive forever.
        kept = tensor.detach()
        weakref.finalize(kept, self._forget, storage).atexit = False  # when autograd frees it
        return kept

    def _forget(self, storage: UntypedStorage) -> None:
        if self._is_growing and self._is_open:
            self._is_growing = False
            self._record("turn")
        self._uses[storage] -= 1
        if not self._uses[storage]:
            del self._uses[storage], self._sizes[storage]


def _holders(model: nn.Module, optimizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors whose storages are counted; those of the optimizer include parameters of its own."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is None:
        return tensors, []
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return tensors, [*own, *tensors_in(optimizer.state)]


def _storage(tensor: Tensor) -> UntypedStorage:
    """The storage of a tensor; of a DTensor, that of its local one."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
