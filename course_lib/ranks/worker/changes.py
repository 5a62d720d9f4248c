"""Changes that a run leaves in its process and that the next run would meet: then the ranks are forked again.

    dist.all_reduce = mine            a module notes the attributes that are replaced, at no cost without one
    nn.Linear.forward = mine          the methods of tensors, modules, optimizers and of the course's mechanisms, and
    torch.set_default_device("meta")  settings of torch and Python are compared with those of before

Not noticed: other classes, and methods that are only wrapped; objects that stay, such as a list or
`torch.backends.cudnn`; a module of which the run itself was the first to import it, or that is changed through its
`__dict__`. Noticed, though no student did it: `torch.compile` wraps functions of torch when it is used first.
"""

from __future__ import annotations

import gc
import importlib
import inspect
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
replaced: dict[tuple[types.ModuleType, str], Any] = {}  # in this run, with the values before
_methods: list[tuple[Any, str, Any]] = []  # of classes: the dict of the class, a name, and the function
_HOOKS = [value for name, value in vars(hooks).items() if name.startswith("_global_") and isinstance(value, dict)]


class _Watched(types.ModuleType):
    """A module that notes which of its attributes are replaced or added."""

    def __setattr__(self, name: str, value: Any) -> None:
        replaced.setdefault((self, name), vars(self).get(name, _NOTHING))
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        replaced.setdefault((self, name), vars(self).get(name, _NOTHING))
        super().__delattr__(name)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)  # pickled by its name, like any module


def watch(module: types.ModuleType) -> None:
    """Make a module note changes of its attributes."""
    if type(module) is types.ModuleType and module is not sys:  # every run redirects its output
        module.__class__ = _Watched


def watch_all() -> None:
    """Watch all imported modules: once, before workers are forked, in memory that they share."""
    if _methods:
        return
    for module in list(sys.modules.values()):
        watch(module)
    modules = [torch.nn, torch.optim, *(sys.modules[name] for name in sys.modules if name.startswith("course_lib.m"))]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    for kind in {torch.Tensor, *found}:
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType) and (name[0] != "_" or kind in (torch.Tensor, torch.nn.Module)):
                _methods.append((vars(kind), name, value))


def settings() -> tuple[Any, ...]:
    """The settings that a run may change and that are not reset for the next run."""
    devices = (torch.get_default_device(), torch.cuda.is_initialized() and torch.cuda.current_device())
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    modes = (torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(), torch.is_warn_always_enabled())
    smallest = sys.float_info.min / 2  # 0 if denormal numbers are flushed
    exactness = (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), smallest)
    stacks = (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), *map(len, _HOOKS))
    shown = (vars(torch._tensor_str.PRINT_OPTS).copy(), numpy.get_printoptions(), numpy.geterr())
    logs = (logging.root.level, logging.root.handlers.copy(), dist.get_debug_level())
    python = (sys.getrecursionlimit(), sys.gettrace(), sys.getprofile(), gc.isenabled())
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    has_alarm = hasattr(signal, "getitimer") and signal.getitimer(signal.ITIMER_REAL)[0] > 0
    return (devices, casts, modes, exactness, stacks, shown, logs, python, signals, has_alarm)


def made(before: tuple[Any, ...]) -> bool:
    """Whether the run has changed anything. before: the settings as they were."""
    for (module, name), old in replaced.items():
        now = vars(module).get(name, _NOTHING)
        if now is not old and now is not sys.modules.get(f"{module.__name__}.{name}", old):  # and not just imported
            return True
    others = ((body.get(name), old) for body, name, old in _methods if body.get(name) is not old)
    # torch wraps the step of an optimizer when it is used first.
    return settings() != before or any(inspect.unwrap(now) is not inspect.unwrap(old) for now, old in others)
