"""Runs on real ranks that lessons, questions, checks and explorers share."""

from course_lib.experiments.steps import after_barrier, layerwise_step, pipeline_step, training_step
