"""An explorer of the limits of one device: the models that fit, and their training times.

| model      ---o---  6.7B          | the memory by part,          |
| device     --o----  A100-80GB     | beside the device's memory   |
| at a time  -o-----  1 sample      |                              |
| recompute  o------  nothing       |                              |
| the result, in words              |                              |
| memory and training time of all models, and the limits          |
"""

from __future__ import annotations

from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, View
from course_lib.figures import memory_by_part
from course_lib.figures.axis import counted, long_time, memory_size, number
from course_lib.figures.words import RECOMPUTED
from course_lib.planner import Cluster, Estimate, Plan, estimate
from course_lib.planner.models import GPT3
from lessons.L01_one_machine_is_not_enough.figure import limits

TOKENS = {name: 20.0 * model.parameters for name, model in GPT3.items()}  # Hoffmann et al. 2022, "Chinchilla"
DEVICES = ("laptop-CPU", "RTX-4090", "A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB")
SAMPLES = (1, 2, 4, 8, 16)
BATCH = 256  # samples of a minibatch, which pass through the device `samples` at a time


def on_one_device(model: str, device: str, samples: int, recompute: str) -> Estimate:
    """A model of the family, trained on a single device in bf16, `samples` at a time."""
    return estimate(GPT3[model], Cluster(device, 1, 1), Plan(micro_batch=samples, recompute=recompute), BATCH)


def draw(model: str, device: str, samples: int, recompute: str) -> View:
    """Draw the explorer at this setting."""
    family = {name: on_one_device(name, device, samples, recompute) for name in GPT3}
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
    if one.fit == "may fit":
        least, most = memory_size(one.memory.low), memory_size(one.memory.high)
        return f"{model} may fit: {needs}; it can be {least} to {most}, by the software. If it fits, {time}."
    if one.fits:
        return f"{model} fits: {needs}. Training it on {time}, without a pause."
    return f"{model} does not fit: {needs}. If it did, {time}."


def memory_explorer(
    model: str = "6.7B", device: str = "A100-80GB", samples: int = 1, recompute: str = "none"
) -> Explorer:
    """An explorer with four controls, two sentences and two pictures; everything is modelled."""
    controls = [
        Slider("model", tuple(GPT3), model),
        Slider("device", DEVICES, device),
        Slider("at a time", SAMPLES, samples, [counted(n, "sample") for n in SAMPLES]),
        Slider("recompute", tuple(RECOMPUTED), recompute, tuple(RECOMPUTED.values())),
    ]
    return Explorer(controls, lambda *values: [draw(*values)])
