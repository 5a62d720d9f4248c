"""Pictures of what ranks did. Each has a sentence that sums it up, tooltips and a zoomable twin.

gantt(run.timeline)                                  what every rank did, and when
speed_up([Timing.of(t) for t in timelines])          how much faster more ranks are
lost_time({"4 ranks": attribute(run.timeline)})      where the rest of the time went
in_flight(run.timeline)                              how many micro-batches' activations every rank holds
micro_batch_sizes(steps)                             how long a step takes with micro-batches of each size
"""

from course_lib.figures.gantt_chart import gantt
from course_lib.figures.in_flight import held, in_flight
from course_lib.figures.losses import lost_time
from course_lib.figures.micro_batch_chart import SizedStep, micro_batch_sizes
from course_lib.figures.picture import Picture
from course_lib.figures.scaling import Timing, speed_up
from course_lib.figures.shares import Shares, attribute

__all__ = [
    "Picture",
    "Shares",
    "SizedStep",
    "Timing",
    "attribute",
    "gantt",
    "held",
    "in_flight",
    "lost_time",
    "micro_batch_sizes",
    "speed_up",
]
