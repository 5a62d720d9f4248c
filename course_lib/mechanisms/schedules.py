"""Pipeline schedules, handed out here beside the mechanism that runs them; the planner, next door, reads them too."""

from course_lib.schedules import (
    OPS,
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    as_text,
    in_order,
    inputs_of,
    messages_from,
    messages_of,
    peak_in_flight,
    validate,
)

__all__ = [
    "OPS",
    "SCHEDULES",
    "Action",
    "Schedule",
    "ScheduleError",
    "as_text",
    "in_order",
    "inputs_of",
    "messages_from",
    "messages_of",
    "peak_in_flight",
    "validate",
]
