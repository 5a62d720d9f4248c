"""Runs on real ranks that lessons, questions, checks and explorers share."""

from course_lib.classroom.runs.steps import after_barrier, pipeline_step, training_step
