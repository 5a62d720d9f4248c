"""Which questions there are: title, lesson, and the file that asks them. (Standard library only; see `progress`.)"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One question. home: the module of course_lib.questions whose QUESTIONS holds it."""

    name: str
    title: str
    lesson: str
    home: str


CATALOG = {
    entry.name: entry
    for entry in (
        Entry("Q4", "What does each worker get?", "02_data_parallelism", "replicas"),
        Entry("Q1", "Eight gradients, and then?", "02_data_parallelism", "replicas"),
        Entry("bytes_sent", "How much does each rank send?", "02_data_parallelism", "scaling"),
        Entry("Q2", "One training step, in order", "02_data_parallelism", "step_order"),
        Entry("Q3", "Eight are fine, sixteen are not", "02_data_parallelism", "scaling"),
        Entry("Q7", "A batch passes through the stages", "03_layerwise_model_parallelism", "stages"),
        Entry("Q11", "Eight units, one of them active", "03_layerwise_model_parallelism", "stages"),
        Entry("Q10", "What is the first stage doing?", "05_pipeline_parallelism", "pipeline"),
        Entry("Q8", "The order that keeps both busiest", "05_pipeline_parallelism", "pipeline"),
    )
}
