"""Pipeline schedules, handed out here beside the mechanism that runs them; the planner, next door, reads them too."""

from course_lib.schedules import SCHEDULES, Action, Schedule, ScheduleError, as_text, peak_in_flight, validate  # noqa: F401
