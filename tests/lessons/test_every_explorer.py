"""Every explorer: each control changes its part of the run, and everything is said in words, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course_lib.classroom.widgets import collectives
from lessons.L01_one_machine_is_not_enough import explorer as one_machine
from lessons.L02_data_parallelism.explorer import DataParallelExplorer, DataParallelSetting
from lessons.L03_sharded_data_parallelism import explorer as sharding
from lessons.L04_layerwise_model_parallelism.explorer import LayerWiseExplorer, LayerWiseSetting
from lessons.L05_pipeline_parallelism.explorer import PipelineExplorer, PipelineSetting
from lessons.L05_pipeline_parallelism.explorer_micro_batches import MicroBatchExplorer
from lessons.L06_tensor_parallelism.explorer import TensorParallelExplorer
from lessons.L07_mixed_precision.explorer import MixedPrecisionExplorer, MixedPrecisionSetting
from lessons.L08_combining_mechanisms.explorer import HybridExperiment, MeshExplorer
from lessons.L09_planning import explorer as refresh
from tests.classroom.widgets.hands import move
from tests.lessons.stand_ins import Cut

# The first setting, and the values to which controls are moved, in the order of the setting's fields.
FIRST: dict[Any, Any] = {
    DataParallelExplorer: DataParallelSetting(ranks=4, batch_size=32, link_speed=5, overlap=True),
    LayerWiseExplorer: LayerWiseSetting(units=4, samples=32, vocabulary=1000, cut="number"),
    PipelineExplorer: PipelineSetting(ranks=4, micro_batches=8, name="gpipe", moved=0),
    TensorParallelExplorer: Cut(ranks=4, hidden=64, way="columns, rows", sequence_parallel=False),
    MixedPrecisionExplorer: MixedPrecisionSetting("float16", 1.0, has_master_weights=True, learning_rate=3e-3),
    MeshExplorer: HybridExperiment((2, 2, 2), micro_batches=4, name="1f1b", dtype=torch.float32),
}
MOVES: dict[Any, dict[str, Any]] = {
    DataParallelExplorer: {"ranks": 6, "batch size": 64, "link speed": 100, "overlap": False},
    LayerWiseExplorer: {"units": 8, "minibatch": 64, "vocabulary": 4000, "cut": "bytes"},
    PipelineExplorer: {"stages": 8, "micro-batches": 16, "schedule": "1f1b", "cut": 2},
    TensorParallelExplorer: {"ranks": 2, "hidden size": 32, "cut of A, B": "rows, rows", "sequence": True},
    MixedPrecisionExplorer: {
        "format": "bfloat16",
        "loss scale": None,
        "weights": False,
        "learning": 1e-5,
        "divided by": 1,
    },
    MeshExplorer: {"dp x pp x tp": (1, 4, 2), "micro-batches": 8, "schedule": "gpipe", "precision": torch.bfloat16},
}
OTHERS = [
    MicroBatchExplorer,
    one_machine.memory_explorer,
    refresh.refresh_explorer,
    sharding.sharding_explorer,
    collectives.collective_explorer,
    sharding.holding_explorer,
]


@pytest.mark.parametrize(("explorer", "label"), [(one, label) for one in MOVES for label in MOVES[one]])
@pytest.mark.usefixtures("one_piece")
def test_each_control_changes_its_part_of_the_run(
    called: list[Any], begun: list[Any], explorer: Any, label: str
) -> None:
    first, (value, place) = FIRST[explorer], (MOVES[explorer][label], [*MOVES[explorer]].index(label))
    shown = explorer()
    assert [control.label for control in shown.controls] == [*MOVES[explorer]]
    called.clear()
    begun.clear()
    move(shown, label, value)
    run = called + [setting for setting, _ in begun]
    assert first._replace(**{first._fields[place]: value}) in run


@pytest.mark.parametrize("explorer", [*MOVES, *OTHERS])
@pytest.mark.usefixtures("called", "one_piece")
def test_pictures_and_controls_say_what_they_are_also_where_no_widget_runs(explorer: Any) -> None:
    shown = explorer()
    bundle = shown._repr_mimebundle_()
    stored = bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert stored.count('<img src="data:image/svg+xml;base64,') == len(shown.view.pictures)
    assert "<script" not in stored and "<svg" not in stored and "nan" not in bundle["text/plain"]
    assert bundle["text/plain"] in stored
    assert f"Run this cell for the controls: {', '.join(control.label for control in shown.controls)}." in stored
    for place in (shown.beside, shown.below)[: len(shown.view.pictures)]:
        assert "aria-label" in place.value
        assert any(origin in place.value for origin in ("emulated", "measured", "modelled"))
