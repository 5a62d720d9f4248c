"""Pictures of what ranks did. Each has a sentence that sums it up, tooltips and a zoomable twin.

gantt(run.timeline)                                  what every rank did, and when
speed_up([Timing.of(t) for t in timelines])          how much faster more ranks are
lost_time({"4 ranks": attribute(run.timeline)})      where the rest of the time went
who_holds_what(run.pieces, run.traffic, 4)           how matrices are cut, and what travels between the ranks
"""

from course_lib.figures.gantt_chart import gantt
from course_lib.figures.losses import lost_time
from course_lib.figures.picture import Picture
from course_lib.figures.scaling import Timing, speed_up
from course_lib.figures.shares import Shares, attribute
from course_lib.figures.who_holds_what import who_holds_what

__all__ = ["Picture", "Shares", "Timing", "attribute", "gantt", "lost_time", "speed_up", "who_holds_what"]
