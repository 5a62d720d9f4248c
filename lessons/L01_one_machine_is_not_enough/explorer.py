"""An explorer of the limits of one device: which models fit, and how long they would train.

| model      ---o---  6.7B          | what lies in memory,         |
| device     --o----  A100-80GB     | against what the device has  |
| at a time  -o-----  1 sample      |                              |
| recompute  o------  nothing       |                              |
| what it needs, in words           |                              |
| memory and training time of all models, and the limits          |
"""

from __future__ import annotations

from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, View
from course_lib.figures import memory_by_part
from course_lib.figures.axis import counted, long_time, memory_size, number
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate
from lessons.L01_one_machine_is_not_enough.figure import limits

# Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1: layers, hidden, heads; with heads that divide
# the hidden size: where the table's heads do not, another number of heads or another hidden size.
SHAPES = {
    "125M": (12, 768, 12),
    "350M": (24, 1024, 16),
    "760M": (24, 1536, 16),
    "1.3B": (24, 2048, 16),
    "2.7B": (32, 2560, 32),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "175B": (96, 12288, 96),
}
FAMILY = {name: ModelSpec(*shape, sequence=2048, vocab=50257, flash_attention=True) for name, shape in SHAPES.items()}
TOKENS = {name: 20.0 * model.parameters for name, model in FAMILY.items()}  # Hoffmann et al. 2022, "Chinchilla"
DEVICES = ("laptop-CPU", "RTX-4090", "A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB")
SAMPLES = (1, 2, 4, 8, 16)
AGAIN = {"none": "nothing", "full": "every layer"}
BATCH = 256  # samples of a minibatch; they pass through the device `samples` at a time


def on_one_device(model: str, device: str, samples: int, recompute: str) -> Estimate:
    """An estimate of training a model of the family on a single device in bf16, `samples` at a time."""
    return estimate(FAMILY[model], Cluster(device, 1, 1), Plan(micro_batch=samples, recompute=recompute), BATCH)


def draw(model: str, device: str, samples: int, recompute: str) -> View:
    """Draw the explorer at this setting."""
    family = {name: on_one_device(name, device, samples, recompute) for name in FAMILY}
    one = family[model]
    return View(
        describe(model, one),
        memory_by_part({model: one.memory}, one.capacity, HALF, f"Does {model} fit into one {device}?"),
        limits(family, TOKENS, WIDTH, f"Which models can one {device} train?", chosen=model),
    )


def describe(model: str, one: Estimate) -> str:
    """Say in two sentences whether the model fits and how long its training takes."""
    needs = f"it needs {memory_size(one.memory.total)}, and the device has {memory_size(one.capacity)}"
    seconds = TOKENS[model] / one.tokens_per_second
    low, high = map(long_time, one.step_time.around(seconds))
    time = f"{number(TOKENS[model] / 1e9)} billion tokens would take {long_time(seconds)} ({low} to {high})"
    if one.fits:
        return f"{model} fits: {needs}. Training it on {time}, without a pause."
    return f"{model} does not fit: {needs}. If it did, {time}."


def memory_explorer(
    model: str = "6.7B", device: str = "A100-80GB", samples: int = 1, recompute: str = "none"
) -> Explorer:
    """An explorer with four controls, two sentences and two pictures; everything is modelled."""
    controls = [
        Slider("model", tuple(FAMILY), model),
        Slider("device", DEVICES, device),
        Slider("at a time", SAMPLES, samples, [counted(n, "sample") for n in SAMPLES]),
        Slider("recompute", tuple(AGAIN), recompute, tuple(AGAIN.values())),
    ]
    return Explorer(controls, lambda *values: [draw(*values)])
