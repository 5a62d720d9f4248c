"""Pictures of what ranks did and of what plans cost. Each has a sentence that sums it up, tooltips, a table.

All but `gantt` are charts: a notebook shows them as figures to zoom into.

gantt(run.timeline)                                  what every rank did, and when
speed_up([Timing.of(t) for t in timelines])          how much faster more ranks are
lost_time({"4 ranks": run.timeline})                 where the rest of the time went
collective_times({"1 MB": {"ring": {8: 0.002}}})     how long algorithms take with more and more ranks
in_flight(run.timeline)                              how many micro-batches' activations every rank holds
loss_curves({"float32": losses})                     how the loss of each training falls

memory_by_part({"plan": estimate.memory}, capacity)  what lies in a device's memory; devices(estimate): of each
step_time_by_part({"plan": estimate})                what the time of a step goes into
speed_up([Timing.planned(e) for e in estimates])     how much faster more devices are
plan_map(search(...))                                every plan, by memory and time
"""

from course_lib.figures.breakdown import lost_time, time_breakdown
from course_lib.figures.costs import devices, memory_by_part, step_time_by_part
from course_lib.figures.gantt_chart import gantt
from course_lib.figures.in_flight import held_activations, in_flight
from course_lib.figures.loss_curves import loss_at_end, loss_curves
from course_lib.figures.picture import Picture
from course_lib.figures.plan_map import plan_map
from course_lib.figures.scaling import Timing, collective_times, speed_up
