"""Two explorers of sharding. One plays a step with each stage on real ranks: who holds what, and what travels.

| stage      -o-----  ZeRO-1         | the memory just before the update  |
| the result, in words               | with every stage                   |
| four ranks, what they hold, and what travels between them               |

The other is about real sizes: the stage that makes a model fit on so many devices, and its cost.

| model      ---o---  6.7B           | the memory of a device by part,    |
| devices    o------  8              | beside its capacity                |
| stage      -o-----  ZeRO-1         |                                    |
| recompute  o------  nothing        |                                    |
| the result, in words                                                   |
| the time of a step by part, without sharding and with the stage         |
"""

from __future__ import annotations

from functools import cache, partial

from course_lib.classroom.runs.holding import HeldStep, held_step
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, View
from course_lib.figures import memory_by_part, step_time_by_part
from course_lib.figures.axis import data_size, duration, memory_size, percent
from course_lib.figures.holdings import holdings
from course_lib.planner import Cluster, Estimate, Plan, estimate
from course_lib.planner.models import GPT3
from lessons.L03_sharded_data_parallelism.runs import STAGES, shard

DEVICE, PER_NODE = "A100-80GB", 8
DEVICES = (8, 16, 32, 64, 128, 256, 512)
USUAL_BYTES, USUAL_SECONDS = 100 * 2**30, 2.0  # on the axes
SAMPLES = 2  # of each device, as one micro-batch
AGAIN = {"none": "nothing", "selective": "what is cheap", "full": "every layer"}  # by the plan's recomputation


@cache
def held(stage: int) -> HeldStep:
    return held_step(partial(shard, stage=stage))


def look(stage: int) -> View:
    """Look at a step with this stage; all stages have the same scale."""
    before = {name: held(one).moments[0][-2].held for one, name in STAGES.items()}
    most = max(one.total for one in held(0).moments[0])
    picture = holdings(*held(stage), most, title=f"Who holds what with {STAGES[stage]}?")
    bars = memory_by_part(before, width=HALF, title="Just before the update")
    return View(f"{STAGES[stage]}. {picture.summary}", bars, picture)


def holding_explorer(stage: int = 0) -> Explorer:
    """An explorer with one control; Play shows what comes, is used and goes."""
    controls = [Slider("stage", tuple(STAGES), stage, tuple(STAGES.values()))]
    return Explorer(controls, lambda *values: [look(*values)], (323, 292))


def planned(model: str, devices: int, stage: int, recompute: str = "none", samples: int = SAMPLES) -> Estimate:
    """An estimate for a model of the family on `devices` A100 in nodes of eight, with one micro-batch each, in bf16."""
    plan = Plan(dp=devices, zero=stage, micro_batch=samples, recompute=recompute)
    return estimate(GPT3[model], Cluster(DEVICE, devices // PER_NODE, PER_NODE), plan, samples * devices)


def draw(model: str, devices: int, stage: int, recompute: str) -> View:
    """Draw the explorer at this setting, with the time of a step without sharding beside it."""
    times = {STAGES[one]: planned(model, devices, one, recompute) for one in sorted({0, stage})}
    name, one = STAGES[stage], times[STAGES[stage]]
    return View(
        describe(model, devices, stage, recompute, one),
        memory_by_part({name: one.memory}, one.capacity, HALF, f"Does {model} fit with {name}?", USUAL_BYTES),
        step_time_by_part(times, WIDTH, f"A step on {devices} devices, if it fits", USUAL_SECONDS),
    )


def describe(model: str, devices: int, stage: int, recompute: str, one: Estimate) -> str:
    """Say whether the model fits, how long a step takes, and which is the first stage that is enough."""
    time, data = one.step_time.total, one.flows["data"]
    need = f"each device needs {memory_size(one.memory.total)}, and has {memory_size(one.capacity)}"
    cost = f"A step takes {duration(time)}, {percent(one.step_time.data / time)} of it for what travels"
    enough = [name for other, name in STAGES.items() if planned(model, devices, other, recompute).fits]
    first = f"The first stage that is sure to fit is {enough[0]}" if enough else "No stage is sure to fit"
    return (
        f"{model} on {devices} devices with {STAGES[stage]} {one.fit}: {need}. {cost} and is not hidden; "
        f"each sends {data_size(round(data.bytes))}. {first}."
    )


def sharding_explorer(model: str = "6.7B", devices: int = 8, stage: int = 1, recompute: str = "none") -> Explorer:
    """An explorer with four controls, three sentences and two pictures; everything is modelled."""
    controls = [
        Slider("model", tuple(GPT3), model),
        Slider("devices", DEVICES, devices),
        Slider("stage", tuple(STAGES), stage, tuple(STAGES.values())),
        Slider("recompute", tuple(AGAIN), recompute, tuple(AGAIN.values())),
    ]
    return Explorer(controls, lambda *values: [draw(*values)], (238, 226))
