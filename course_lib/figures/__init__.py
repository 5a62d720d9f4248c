"""Pictures of what ranks did and of what plans cost. Each has a sentence that sums it up, tooltips, a table.

All but `gantt` and the maps are charts: a notebook shows them as figures to zoom into.

gantt(run.timeline)                                  what every rank did, and when
speed_up([Timing.of(t) for t in timelines])          how much faster more ranks are
lost_time({"4 ranks": run.timeline})                 where the rest of the time went
collective_times({"1 MB": {"ring": {8: 0.002}}})     how long algorithms take with more and more ranks
who_holds_what(run)                                  how matrices are cut, and what travels between the ranks
mesh_map((2, 2, 2), step)                            who talks to whom on a mesh of ranks, and how much
in_flight(run.timeline)                              how many micro-batches' activations every rank holds
micro_batch_sizes(steps)                             how long a step takes with micro-batches of each size
loss_curves({"float32": losses})                     how the loss of each training falls
number_range(exponents(gradients), Format.of(dtype)) how large numbers are, and which a format loses

memory_by_part({"plan": estimate.memory}, capacity)  what lies in a device's memory; devices(estimate): of each
step_time_by_part({"plan": estimate})                what the time of a step goes into
speed_up([Timing.planned(e) for e in estimates])     how much faster more devices are
plan_map(search(...))                                every plan, by memory and time
roofline({"plan": estimate})                         how fast the links let the devices compute
limits({"1.3B": estimate}, tokens)                   what one device is too small and too slow for
"""

from course_lib.figures.breakdown import lost_time, time_breakdown
from course_lib.figures.costs import devices, memory_by_part, step_time_by_part
from course_lib.figures.gantt_chart import gantt
from course_lib.figures.in_flight import held, in_flight
from course_lib.figures.limits import limits
from course_lib.figures.loss_curves import loss_at_end, loss_curves
from course_lib.figures.mesh_map import mesh_map
from course_lib.figures.micro_batch_chart import SizedStep, micro_batch_sizes
from course_lib.figures.number_range import number_range
from course_lib.figures.picture import Picture
from course_lib.figures.plan_map import plan_map
from course_lib.figures.roofline import roofline
from course_lib.figures.scaling import Timing, collective_times, speed_up
from course_lib.figures.who_holds_what import who_holds_what
