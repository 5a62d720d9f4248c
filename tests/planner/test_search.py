"""The search: every plan it returns is legal, none better was left out, and the front is a front."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace

import pytest

from course_lib.planner import Cluster, Found, ModelSpec, Plan, estimate, search
from course_lib.planner.memory import FITS

MODEL = ModelSpec(12, 1536, 12, 1024, 50304)
CLUSTER = Cluster("A100-40GB", nodes=2, devices_per_node=4)
BATCH = 16


@pytest.fixture(scope="module")
def found() -> Found:
    return search(MODEL, CLUSTER, BATCH)


def test_clusters_with_the_same_fields_are_one_to_a_cache() -> None:
    same = replace(CLUSTER)
    assert (same, hash(same)) == (CLUSTER, hash(CLUSTER))
    assert replace(CLUSTER, between="InfiniBand NDR") != CLUSTER


def test_every_plan_is_legal_and_there_once(found: Found) -> None:
    for one in found:
        one.plan.check(MODEL, CLUSTER.devices, BATCH)
    assert len({one.plan for one in found}) == len(found)


def test_an_estimate_from_the_search_is_the_estimate_of_its_plan(found: Found) -> None:
    for one in list(found)[:: max(1, len(found) // 20)]:
        again = estimate(MODEL, CLUSTER, one.plan, BATCH)
        assert (again.step_time, again.memory, again.flows) == (one.step_time, one.memory, one.flows)


def test_plans_that_fit_come_before_those_that_may_and_the_fastest_first(found: Found) -> None:
    keys = [(FITS.index(one.fit), one.step_time.total) for one in found]
    assert keys == sorted(keys)
    assert found.best is found[0]


def test_no_plan_is_left_out(found: Found) -> None:
    """The search has all combinations of small numbers, except those that `check` refuses."""
    tried = {one.plan for one in found}
    sizes = (1, 2, 3, 4, 6, 8, 12, 16)
    for tp, pp, micro_batch, zero in itertools.product((1, 2, 4), sizes, sizes, (0, 1)):
        dp = 8 // (tp * pp)
        if dp == 0 or (zero and dp == 1):
            continue
        plan = Plan(dp, tp, pp, micro_batch, zero=zero)
        try:
            plan.check(MODEL, CLUSTER.devices, BATCH)
        except ValueError:
            assert plan not in tried
        else:
            assert plan in tried


def test_all_mechanisms_are_tried(found: Found) -> None:
    plans = [one.plan for one in found]
    assert {plan.zero for plan in plans} == {0, 1, 2, 3}
    assert {plan.zero for plan in plans if plan.virtual_stages > 1} == {0, 1, 2}
    assert {plan.recompute for plan in plans} == {"none", "selective", "full"}
    assert {plan.schedule for plan in plans} == {"1f1b", "zb_h1", "interleaved_1f1b"}
    assert {plan.sequence_parallel for plan in plans} == {False, True}
    assert max(plan.virtual_stages for plan in plans) > 2


def test_nothing_beats_a_plan_of_the_pareto_front_in_both(found: Found) -> None:
    def cost(one: object) -> tuple[float, float]:
        return one.step_time.total, one.memory.total  # type: ignore[attr-defined]

    assert found.pareto
    for front in found.pareto:
        time, memory = cost(front)
        assert not any(t < time and m < memory for t, m in map(cost, found))
    times = [cost(one) for one in found.pareto]
    assert times == sorted(times)
    assert [m for _, m in times] == sorted((m for _, m in times), reverse=True)


def test_long_sequences_are_shared_among_context_ranks_and_short_ones_are_not(found: Found) -> None:
    long = ModelSpec(8, 1024, 16, 65536, 50304, flash_attention=True)
    plans = [one.plan for one in search(long, Cluster("H100-80GB", nodes=2), 4)]
    assert {plan.cp for plan in plans} == {1, 2, 4, 8}
    assert {one.plan.cp for one in found} == {1}
    for plan in plans:
        plan.check(long, 16, 4)


def test_llama_3_with_131k_tokens_is_planned_with_context_parallelism() -> None:
    llama = ModelSpec(
        126, 16384, 128, 131072, 128256, 8, 53248, gated_mlp=True, tied_embeddings=False, flash_attention=True
    )
    best = search(llama, Cluster("H100-80GB", nodes=128, between="RoCE 400"), 8, fp32_gradients=True).best
    assert best.plan.cp > 1
    assert best.plan.fp32_gradients


def test_on_a_rack_tensor_groups_stay_as_small_as_anyone_has_them_and_micro_batches_are_powers_of_two() -> None:
    """On 72 devices of one NVLink, a group could have 144."""
    model = ModelSpec(6, 6144, 48, 1024, 50304)
    plans = [one.plan for one in search(model, Cluster("GB200-186GB", devices_per_node=72), 36 * 12)]
    assert {plan.tp for plan in plans} == {1, 2, 3, 4, 6, 8, 12}
    assert {plan.micro_batch for plan in plans} == {1, 2, 4, 8, 16}


def test_a_search_leaves_garbage_collection_as_it_was() -> None:
    gc.disable()
    search(MODEL, CLUSTER, BATCH)
    assert not gc.isenabled()
    gc.enable()
    search(MODEL, CLUSTER, BATCH)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_share_of_memory_can_be_kept_free(found: Found) -> None:
    careful = search(MODEL, CLUSTER, BATCH, within=0.1)
    assert careful.best.memory.high <= 0.1 * careful.best.capacity < found.best.memory.high
    with pytest.raises(ValueError, match="no plan fits"):
        _ = search(MODEL, CLUSTER, BATCH, within=0.01).best


def test_plans_that_cannot_be_told_apart_from_the_best_are_named_the_simplest_first(found: Found) -> None:
    assert found.best in found.tied
    slowest = max(one.step_time.total for one in found.tied)
    assert 1.1 < slowest / found.best.step_time.total < 1.3
    assert all(one.fits for one in found.tied)
    stages = [one.plan.virtual_stages for one in found.tied]
    assert stages == sorted(stages)


def test_stages_of_one_layer_are_tried_only_where_there_are_no_larger_ones(found: Found) -> None:
    interleaved = {(one.plan.pp, one.plan.virtual_stages) for one in found if one.plan.virtual_stages > 1}
    assert interleaved == {(2, 2), (2, 3), (4, 3)}  # twelve layers


def test_if_nothing_fits_best_says_what_comes_nearest() -> None:
    huge = ModelSpec(96, 12288, 96, 2048, 51200)
    with pytest.raises(ValueError, match=r"no plan fits; the smallest is Plan\(.*It does not fit"):
        _ = search(huge, CLUSTER, 8).best


def test_a_device_without_bf16_is_searched_in_fp16() -> None:
    assert search(MODEL, Cluster("V100-32GB", devices_per_node=2), 4).best.plan.precision == "fp16"


def test_a_plan_that_may_fit_is_the_best_where_none_fits_for_certain() -> None:
    def rank(within: float) -> list[int]:
        return [FITS.index(one.memory.fit(within * one.capacity)) for one in search(MODEL, CLUSTER, BATCH, within)]

    for within in (0.1, 0.06):
        assert rank(within) == sorted(rank(within))
    assert set(rank(0.1)) == {0, 1, 2}
    assert set(rank(0.06)) == {1, 2}
    small = search(MODEL, CLUSTER, BATCH, within=0.06)
    assert small.best.memory.low < 0.06 * small.best.capacity < small.best.memory.high
    assert all(one.memory.low < 0.06 * one.capacity for one in small.tied)
