"""Pictures of runs and of the costs of plans. Each has a sentence that sums it up, tooltips and a table.

A notebook shows curves and dots as figures to zoom into, and bars as they are.

gantt(run.timeline)                                  the activity of every rank over time
speed_up([Timing.of(t) for t in timelines])          the speed-up of more ranks
lost_time({"4 ranks": run.timeline})                 the causes of lost time
loss_curves({"float32": losses})                     the loss of each training over its steps

memory_by_part({"plan": estimate.memory}, capacity)  the memory of a device; devices(estimate): of each
step_time_by_part({"plan": estimate})                the parts of a step's time
speed_up([Timing.planned(e) for e in estimates])     the speed-up of more devices
plan_map(search(...))                                plans, by memory and time
"""

from course_lib.figures.activations import held_activations
from course_lib.figures.breakdown import lost_time, time_breakdown
from course_lib.figures.costs import devices, memory_by_part, step_time_by_part
from course_lib.figures.gantt_chart import gantt
from course_lib.figures.loss_curves import loss_at_end, loss_curves
from course_lib.figures.picture import Picture
from course_lib.figures.plan_map import plan_map
from course_lib.figures.scaling import Timing, speed_up
