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
        Entry("Q5", "Too large for the best device", "01_one_machine_is_not_enough", "memory"),
        Entry("one_machine", "One machine, and a colleague", "01_one_machine_is_not_enough", "open_cases"),
        Entry("Q4", "What does each worker get?", "02_data_parallelism", "replicas"),
        Entry("Q1", "Eight gradients, and then?", "02_data_parallelism", "replicas"),
        Entry("bytes_sent", "How much does each rank send?", "02_data_parallelism", "scaling"),
        Entry("Q2", "One training step, in order", "02_data_parallelism", "step_order"),
        Entry("Q3", "Eight are fine, sixteen are not", "02_data_parallelism", "scaling"),
        Entry("data_distribution", "Ten samples, four workers", "02_data_parallelism", "open_cases"),
        Entry("ideal_speed_up", "Not eight times as fast", "02_data_parallelism", "open_cases"),
        Entry("find_the_flaw", "Eight workers, the speed of one", "02_data_parallelism", "open_cases"),
        Entry("why_partition", "More replicas do not help", "03_layerwise_model_parallelism", "open_cases"),
        Entry("Q6", "Layers in order, and memory", "03_layerwise_model_parallelism", "memory"),
        Entry("Q7", "A batch passes through the stages", "03_layerwise_model_parallelism", "stages"),
        Entry("which_cut", "Two matrices, two cuts each", "04_tensor_parallelism", "tensor"),
        Entry("count_all_reduces", "How many all-reduces?", "04_tensor_parallelism", "tensor"),
        Entry("choose_strategy", "65 billion parameters, 64 devices", "04_tensor_parallelism", "tensor"),
        Entry("Q10", "What is the first stage doing?", "05_pipeline_parallelism", "pipeline"),
        Entry("Q11", "Eight units, one of them active", "05_pipeline_parallelism", "stages"),
        Entry("Q8", "The order that keeps both busiest", "05_pipeline_parallelism", "pipeline"),
        Entry("pipeline_efficiency", "Busy for 40% of the time", "05_pipeline_parallelism", "open_cases"),
        Entry("pipelining_gain", "Just as much to compute", "05_pipeline_parallelism", "open_cases"),
        Entry("tune_a_pipeline", "Nobody dares to change it", "05_pipeline_parallelism", "open_cases"),
        Entry("bytes_per_weight", "What is kept in 32 bits costs memory", "06_mixed_precision", "precision"),
        Entry("one_overflow", "An overflow on one rank", "06_mixed_precision", "precision"),
        Entry("Q9", "Fast, and then it ends badly", "06_mixed_precision", "precision"),
        Entry("why_mixed_precision", "Another attempt at 16 bits", "06_mixed_precision", "efficiency"),
        Entry("diagnose_efficiency", "Fast, idle, and learning nothing", "06_mixed_precision", "efficiency"),
        Entry("optimize_training", "Eight micro-batches, eight exchanges", "06_mixed_precision", "efficiency"),
        Entry("which_axis_across", "Two machines", "07_combining_mechanisms", "strategies"),
        Entry("evaluate_strategy", "Three good reasons", "07_combining_mechanisms", "strategies"),
        Entry("optimize_efficiency", "It fits, and is slow", "08_planning", "strategies"),
        Entry("more_replicas", "From 64 to 1,024", "08_planning", "strategies"),
        Entry("same_plan", "New devices, old plan", "08_planning", "strategies"),
        Entry("which_offer", "Where does the money go?", "08_planning", "strategies"),
        Entry("infrastructure", "Three managers, three offers", "08_planning", "strategies"),
    )
}
