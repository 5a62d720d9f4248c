"""The explorers that only calculate, moved without a browser."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from course_lib.classroom.widgets.explorer import Explorer
from course_lib.figures.axis import memory_size
from course_lib.figures.svg import text_width
from course_lib.figures.words import RECOMPUTED
from course_lib.planner import Cluster, ModelSpec, Plan, estimate, search
from course_lib.planner.models import GPT3
from lessons.L01_one_machine_is_not_enough import explorer as one_machine
from lessons.L03_sharded_data_parallelism import explorer as sharding
from lessons.L09_planning import explorer as refresh
from tests.figures.drawn import SVG, parsed, written


@pytest.fixture
def one() -> Explorer:
    return one_machine.memory_explorer()


@pytest.fixture(scope="module")
def renewed() -> Explorer:
    return refresh.refresh_explorer()


def test_a_move_draws_what_the_planner_says_of_the_new_setting(one: Explorer) -> None:
    model, _, at_a_time, _ = one.controls
    model.value = "13B"
    at_a_time.value = 4
    gpt = ModelSpec(40, 5120, 40, 2048, 50257, flash_attention=True)
    planned = estimate(gpt, Cluster("A100-80GB", 1, 1), Plan(micro_batch=4), 256)
    assert not planned.fits
    assert f"13B does not fit: it needs {memory_size(planned.memory.total)}" in one.sentences.value
    assert "Does 13B fit into one A100-80GB?" in one.beside.value


def test_computing_again_saves_memory_and_costs_time() -> None:
    kept, again = (one_machine.on_one_device("2.7B", "A100-80GB", 8, how) for how in ("none", "full"))
    assert again.memory.total < kept.memory.total
    assert again.tokens_per_second < kept.tokens_per_second


def test_every_setting_of_the_limits_can_be_drawn() -> None:
    for device in one_machine.DEVICES:
        for recompute in RECOMPUTED:
            view = one_machine.draw("125M", device, 16, recompute)
            assert view.beside.summary and view.below.summary


@pytest.mark.parametrize("device", one_machine.DEVICES)
def test_names_in_the_limits_stand_clear_of_the_axes_and_of_each_other(device: str) -> None:
    svg = one_machine.draw("6.7B", device, 1, "none").below.svg
    paths = (re.fullmatch(r"M([\d.]+),([\d.]+)L[\d.]+,\2", path.attrib["d"]) for path in parsed(svg).iter(f"{SVG}path"))
    limits = [float(level[1]) for level in paths if level]
    names = [(x, y) for text, x, y in written(svg) if text in GPT3]  # the ends of their words
    for smallest, axis in zip(names[:: len(GPT3)], (limits[0], limits[-1]), strict=True):
        assert smallest[0] - text_width("125M", 11) > axis + 6
    (words,) = [(x - text_width(text, 11), y) for text, x, y in written(svg) if text.startswith("a device has")]
    assert not [x for x, y in names[: len(GPT3)] if x > words[0] and abs(y - words[1]) < 12]


def test_the_sizes_of_the_family_are_those_in_its_names() -> None:
    for name, model in GPT3.items():
        size = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
        assert model.parameters == pytest.approx(size, rel=0.05)


def test_the_old_cluster_is_compared_with_itself() -> None:
    view = refresh.draw("A100-80GB", "InfiniBand HDR", 8)
    assert "1.00 times as fast as before" in view.sentences
    assert "The old plan cannot be told apart from it." in view.sentences


def test_the_best_of_the_menu_is_about_as_fast_as_the_best_of_all() -> None:
    for cluster in (refresh.OLD, refresh.cluster("H100-80GB", "Ethernet 25", 4)):
        of_all = search(refresh.MODEL, cluster, refresh.BATCH).best.step_time.total
        assert of_all <= refresh.best(cluster).step_time.total <= 1.1 * of_all


@pytest.mark.parametrize("device", refresh.DEVICES)
def test_every_setting_of_the_refresh_can_be_drawn(device: str) -> None:
    for network in refresh.NETWORKS:
        for nodes in refresh.NODES:
            assert refresh.draw(device, network, nodes).below.summary


def test_the_old_plan_keeps_its_model_parallelism_on_new_hardware() -> None:
    old, carried = (
        refresh.best(refresh.OLD).plan,
        refresh.old_plan(refresh.cluster("H100-80GB", "Ethernet 25", 16)).plan,
    )
    assert carried == replace(old, dp=2 * old.dp)


def test_a_move_of_the_refresh_draws_the_three_plans(renewed: Explorer) -> None:
    devices, network, _ = renewed.controls
    devices.value = "H100-80GB"
    network.value = "InfiniBand NDR"
    assert "A step on 32 H100-80GB with InfiniBand NDR" in renewed.below.value
    for name in ("before", "old plan", "best plan"):
        assert f">{name}<" in renewed.below.value


def test_a_stage_is_what_the_planner_says_of_it() -> None:
    explorer = sharding.sharding_explorer()
    model, devices, stage, _ = explorer.controls
    model.value, devices.value, stage.value = "13B", 64, 2
    cluster, plan = Cluster("A100-80GB", 8, 8), Plan(dp=64, zero=2, micro_batch=2)
    planned = estimate(GPT3["13B"], cluster, plan, 128)
    assert planned.fits
    needs = f"13B on 64 devices with ZeRO-2 fits: each device needs {memory_size(planned.memory.total)}"
    assert needs in explorer.sentences.value
    assert "The first stage that is sure to fit is ZeRO-2." in explorer.sentences.value
    assert "Does 13B fit with ZeRO-2?" in explorer.beside.value
    assert "A step on 64 devices, if it fits" in explorer.below.value


def test_without_sharding_there_is_nothing_to_compare_with_and_for_some_models_no_stage_is_enough() -> None:
    assert len(sharding.draw("350M", 8, 0, "none").below.rows) == 1
    assert len(sharding.draw("350M", 8, 1, "none").below.rows) == 2
    assert "No stage is sure to fit." in sharding.draw("175B", 8, 3, "full").sentences
