"""What a run has changed in its process, so that the next one would meet it: then the ranks are forked again.

    dist.all_reduce = mine            a module notes who replaces an attribute, at no cost as long as nobody does
    nn.Linear.forward = mine          classes that students know, and
    torch.set_default_device("meta")  settings of torch and Python are compared with what they were

Not noticed: other classes, and objects that stay, such as a list or `torch.backends.cudnn`; a module of which the run
itself was the first to import it, or that is changed through its `__dict__`. Noticed, though no student did it:
`torch.compile` wraps functions of torch when it is used first.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import types
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.nn.modules import module as hooks

_NOTHING = object()
_replaced: dict[tuple[types.ModuleType, str], Any] = {}  # what stood there first
_bodies: list[tuple[Any, list[Any]]] = []  # of classes: where their attributes are, and those that they had
_HOOKS = [value for name, value in vars(hooks).items() if name.startswith("_global_") and isinstance(value, dict)]


class _Watched(types.ModuleType):
    """A module that notes what is replaced in it, or added to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        _replaced.setdefault((self, name), vars(self).get(name, _NOTHING))
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _replaced.setdefault((self, name), vars(self).get(name, _NOTHING))
        super().__delattr__(name)


def watch_all() -> None:
    """Watch what has been imported: once, where workers are forked before that, in memory that they share."""
    if not _bodies:
        for module in list(sys.modules.values()):
            watch(module)
        _remember_classes()


def watch(module: types.ModuleType) -> None:
    """From now on, this module notes it."""
    if type(module) is types.ModuleType and module is not sys:  # whose output every run redirects
        module.__class__ = _Watched


def _remember_classes() -> None:
    names = ["torch.nn", "torch.optim", "torch.distributed", *(n for n in sys.modules if n.startswith("course_lib."))]
    found = [value for name in names for value in list(vars(sys.modules[name]).values())]
    for value in {torch.Tensor: None, **{value: None for value in found if issubclass(type(value), type)}}:
        if value.__module__.startswith(("torch", "course_lib")):
            _bodies.append((vars(value), list(vars(value).values())))


def begin() -> None:
    """A run begins."""
    _replaced.clear()


def settings() -> tuple[Any, ...]:
    """Those that a run may leave different, and that nobody sets back."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return (
        autocast,
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_warn_always_enabled(),
        sys.float_info.min / 2,  # 0 if denormal numbers are flushed
        vars(torch._tensor_str.PRINT_OPTS).copy(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        [len(each) for each in _HOOKS],
        dist.get_debug_level(),
        (numpy.geterr(), numpy.get_printoptions()),
        (sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile(), gc.isenabled()),
        (logging.root.level, list(logging.root.handlers)),
        signals,
        hasattr(signal, "getitimer") and signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    )


def made(before: tuple[Any, ...]) -> bool:
    """Whether the run has changed anything. before: the settings as they were."""
    return any(_is_new(*place, old) for place, old in _replaced.items()) or _bodies_differ() or settings() != before


def _is_new(module: types.ModuleType, name: str, old: Any) -> bool:
    """Whether something else stands there now, other than a submodule that has been imported."""
    now = vars(module).get(name, _NOTHING)
    return now is not old and now is not sys.modules.get(f"{module.__name__}.{name}", old)


def _bodies_differ() -> bool:
    """What has been added does not count: torch does that itself."""
    return any(list(body.values())[: len(values)] != values for body, values in _bodies)
