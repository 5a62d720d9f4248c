"""The first import of the fork server, so that every worker forked from it starts with all of this.

The first optimizer a process makes imports 800 modules and 100 MB. Here that happens once, in memory
that all workers share.
"""

from __future__ import annotations

import gc
import os
import signal

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an optimizer's step opens a GPU; processes forked after it cannot use one
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the Stop button signals the whole process group
gc.disable()  # until `freeze`: nothing here is garbage, and collecting takes a fifth of the time

import cloudpickle  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.pipelining  # noqa: E402

from course_lib.ranks.worker import process  # noqa: E402, F401

torch.set_num_threads(1)  # a thread pool started here would be missing in the forked workers
_parameter = torch.nn.Parameter(torch.zeros(1))
_parameter.grad = torch.zeros(1)
torch.optim.AdamW([_parameter]).step()
