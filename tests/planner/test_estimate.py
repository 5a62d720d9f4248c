"""Estimates: parts that add up, effects that go the right way, and plans that cannot exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from course_lib.planner import DEVICES, Cluster, Device, Estimate, ModelSpec, Plan, estimate
from course_lib.planner.compute import layer_times

GPT3 = ModelSpec(96, 12288, 96, 2048, 51200)
SMALL = ModelSpec(24, 2048, 16, 2048, 51200)
PLAN = Plan(dp=2, tp=8, pp=8, sequence_parallel=True, recompute="selective")


def of(plan: Plan = PLAN, model: ModelSpec = GPT3, global_batch: int = 128, **cluster: Any) -> Estimate:
    return estimate(model, Cluster(nodes=plan.devices // 8, **cluster), plan, global_batch)


def test_the_parts_of_a_step_add_up() -> None:
    found = of()
    assert found.step_time.total == pytest.approx(sum(found.step_time.parts.values()))
    assert found.bubble == found.step_time.bubble / found.step_time.total
    assert found.tokens_per_second == pytest.approx(128 * 2048 / found.step_time.total)


def test_mfu_counts_what_is_needed_and_flops_what_is_computed() -> None:
    """Korthikanti et al. 2022, equations 7 and 8, without the recomputation of attention counted twice."""
    h, s, layers, vocab, batch = 12288, 2048, 96, 51200, 128
    needed = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    full = of(replace(PLAN, recompute="full"))
    available = full.step_time.total * 128 * 312e12
    assert full.mfu == pytest.approx(needed / available)
    assert full.flops == pytest.approx(needed + 24 * batch * layers * s * h**2 * (1 + s / (6 * h)))
    assert of(replace(PLAN, recompute="none")).flops == pytest.approx(needed)


def test_bytes_are_attributed_to_the_link_they_cross() -> None:
    found = of()
    assert found.flows["tensor"].link == "NVLink 3"
    assert found.flows["pipeline"].link == found.flows["data"].link == "InfiniBand HDR"
    assert set(found.traffic) == {"NVLink 3", "InfiniBand HDR"}
    assert sum(found.traffic.values()) == pytest.approx(sum(flow.bytes for flow in found.flows.values()))


def test_gradient_traffic_is_two_times_the_parameters_and_zero_3_three_times() -> None:
    def sent(zero: int) -> float:
        return estimate(SMALL, Cluster(), Plan(dp=8, zero=zero), 8).flows["data"].bytes

    once = 2 * SMALL.parameters * 7 / 8  # bf16
    assert [sent(zero) for zero in (0, 1, 2, 3)] == pytest.approx([2 * once, 2 * once, 2 * once, 3 * once])


def test_hybrid_sharding_gathers_inside_a_node_and_sums_shares_between_nodes() -> None:
    """Zhao et al. 2023, section 3.2.2: 2 M (W - 1) / (G W) bytes cross hosts, against 3 M (W - 1) / W."""
    cluster, nodes, per_node = Cluster(nodes=16), 16, 8
    full, hybrid = (estimate(SMALL, cluster, Plan(dp=128, zero=3, shards=n), 128) for n in (None, per_node))
    model = 2 * SMALL.parameters
    inside = 3 * model * (per_node - 1) / per_node
    between = hybrid.flows["data"].bytes - inside
    assert between == pytest.approx(2 * model * (nodes - 1) / nodes / per_node, rel=1e-4)
    assert full.flows["data"].bytes == pytest.approx(3 * model * 127 / 128)
    assert hybrid.step_time.data < full.step_time.data
    assert hybrid.memory.optimizer == pytest.approx(full.memory.optimizer * 16, rel=1e-4)


def test_hidden_traffic_costs_less_than_exposed_but_not_nothing() -> None:
    alone, hidden = (of(replace(PLAN, overlap=overlap)) for overlap in ((), ("data", "tensor", "pipeline")))
    for name in ("data", "tensor"):
        assert 0 < hidden.flows[name].exposed < alone.flows[name].exposed
        assert alone.flows[name].exposed == pytest.approx(alone.flows[name].seconds)
    assert hidden.step_time.total < alone.step_time.total


def test_sequence_parallel_traffic_hides_half_behind_the_products_beside_it() -> None:
    """Forward too, where an all-reduce would have nothing beside it."""
    pieces, whole = (
        of(replace(PLAN, sequence_parallel=cut, overlap=("tensor",))).flows["tensor"] for cut in (True, False)
    )
    assert pieces.exposed == pytest.approx(pieces.seconds / 2)
    assert whole.exposed > 0.7 * whole.seconds


def gain(precision: str, hidden: int) -> float:
    model = ModelSpec(8, hidden, hidden // 128, 4096, 51200, flash_attention=True)
    machine = Cluster("GB200-186GB", 1, 1)
    sixteen, fewer = (estimate(model, machine, Plan(precision=bits), 8) for bits in ("bf16", precision))
    return sixteen.step_time.total / fewer.step_time.total


def test_casting_eats_what_narrow_products_gain_from_fewer_bits() -> None:
    for precision, most in (("fp8", 2), ("mxfp8", 2), ("nvfp4", 4)):
        gains = [gain(precision, hidden) for hidden in (1024, 4096, 16384)]
        assert 1 < gains[0] < gains[1] < gains[2] < most
    assert gain("mxfp8", 8192) < gain("fp8", 8192) < gain("nvfp4", 8192)


def test_parameters_are_gathered_in_8_bits_but_not_in_4() -> None:
    """A gather of bytes a parameter, beside a reduce-scatter of two."""
    plan, cluster = Plan(dp=64, zero=1), Cluster("GB200-186GB", 1, 64)
    each = GPT3.parameters * 63 / 64
    sent = {bits: replace(plan, precision=bits) for bits in ("bf16", "fp8", "mxfp8", "nvfp4")}
    found = {bits: estimate(GPT3, cluster, one, 64).flows["data"].bytes / each for bits, one in sent.items()}
    assert found == pytest.approx({"bf16": 4, "fp8": 3, "mxfp8": 3, "nvfp4": 4})


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    inside = estimate(GPT3, Cluster(nodes=2), Plan(tp=8, pp=2), 8)
    across = estimate(GPT3, Cluster(nodes=2), Plan(tp=16, pp=1), 8)
    assert across.flows["tensor"].link == "InfiniBand HDR"
    assert across.step_time.tensor > 3 * inside.step_time.tensor


def test_more_micro_batches_make_the_bubble_smaller() -> None:
    shares = [of(global_batch=batch).bubble for batch in (16, 64, 256)]
    assert shares == sorted(shares, reverse=True)


def test_recomputation_trades_time_for_memory() -> None:
    none, selective, full = (of(replace(PLAN, recompute=mode)) for mode in ("none", "selective", "full"))
    assert none.memory.total > selective.memory.total > full.memory.total
    assert none.step_time.total < selective.step_time.total < full.step_time.total


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_some_layers_computed_again_cost_their_share(recompute: str) -> None:
    """The cost includes that of context ranks, whose traffic a second forward repeats."""
    split = replace(PLAN, tp=4, cp=2)
    none, some, all_of_them = (
        of(replace(split, recompute=how, recomputed=share))
        for how, share in (("none", 1), (recompute, 0.25), (recompute, 1))
    )
    for part in ("compute", "recompute", "tensor", "context", "bubble"):
        least, middle, most = (one.step_time.parts[part] for one in (none, some, all_of_them))
        assert middle == pytest.approx(0.75 * least + 0.25 * most), part
    for flow in ("tensor", "context"):
        least, middle, most = (one.flows[flow].bytes for one in (none, some, all_of_them))
        assert middle == pytest.approx(0.75 * least + 0.25 * most), flow
        assert (most > least) == (recompute == "full"), flow
    assert some.flops == pytest.approx(0.75 * none.flops + 0.25 * all_of_them.flops)


def test_a_faster_network_helps_only_where_traffic_is_exposed() -> None:
    slow, fast = (of(replace(PLAN, overlap=()), between=link) for link in ("InfiniBand EDR", "InfiniBand NDR"))
    assert fast.step_time.data < slow.step_time.data / 3
    assert fast.step_time.compute == slow.step_time.compute


def test_one_device_has_no_traffic_and_no_bubble() -> None:
    found = estimate(SMALL, Cluster(nodes=1, devices_per_node=1), Plan(), 4)
    assert found.flows == {}
    assert found.traffic == {}
    assert found.bubble == 0


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("interleaved_1f1b", 3), ("zb_h1", 1), ("gpipe", 1)])
def test_the_timeline_of_an_estimate_takes_as_long_as_its_parts_say(schedule: str, v: int) -> None:
    plan = replace(PLAN, schedule=schedule, virtual_stages=v, overlap=("pipeline",))
    found = of(plan)
    parts = found.step_time.parts
    expected = sum(parts[name] for name in ("compute", "recompute", "tensor", "context", "pipeline", "bubble"))
    timeline = found.timeline()
    assert timeline.makespan == pytest.approx(expected, rel=0.02)
    assert timeline.world_size == plan.pp
    assert timeline.origin == "modelled"


def test_why_names_the_binding_constraint() -> None:
    small_batch = of(replace(PLAN, dp=1, pp=16), global_batch=16)
    assert "the pipeline's bubble" in small_batch.why
    assert "micro-batches" in small_batch.why
    assert of().why.startswith("It fits: the fullest device (pipeline rank 0) needs")
    slow = of(Plan(dp=8), model=SMALL, global_batch=8, inside="PCIe 3")
    assert "gradients" in slow.why


def test_why_says_what_to_shrink_when_it_does_not_fit() -> None:
    plan = Plan(dp=8, micro_batch=2)
    found = of(plan, SMALL, 16, device="A100-40GB")
    assert found.fit == "may fit"
    assert found.why.startswith("It may fit: each device needs 45.0 GiB, 38.5 GiB to 52.4 GiB by the software")
    large = Plan(dp=8, micro_batch=4)
    assert of(large, SMALL, 32, device="A100-40GB").why.startswith("It does not fit: each device needs")
    assert "of it is activations. To shrink it, recompute more of them" in found.why
    assert of(replace(plan, zero=1), SMALL, 16, device="A100-40GB").fits


CHANGES: dict[str, dict[str, Any]] = {
    "cut the model further": {"dp": 1, "tp": 8, "shards": None},
    "let all replicas share it": {"zero": 3, "shards": None},
    "recompute more of them": {"recompute": "full"},
    "share them among tensor ranks": {"dp": 1, "tp": 8, "sequence_parallel": True},
    "make micro-batches smaller": {"micro_batch": 1},
}
SHARED = Plan(dp=8, zero=3, recompute="full")


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        (Plan(dp=8), "optimizer"),
        (Plan(dp=8, zero=1, shards=2), "optimizer"),
        (Plan(dp=4, tp=2, micro_batch=4, zero=3), "activations"),
        (replace(SHARED, micro_batch=4), "activations"),
        (Plan(tp=4, pp=2, sequence_parallel=True), "activations"),
        (SHARED, "activations"),
    ],
)
def test_why_proposes_only_what_shrinks_the_part_that_it_names(plan: Plan, part: str) -> None:
    model = replace(SMALL, layers=48, hidden=8192, heads=64)
    found = of(plan, model, 64)
    said = found.why.split(f"of it is {part}. To shrink it, ")[1]
    ways = [change for words, change in CHANGES.items() if words in said.split(".")[0]]
    assert ways
    for change in ways:
        assert getattr(of(replace(plan, **change), model, 64).memory, part) < getattr(found.memory, part)


def test_why_does_not_propose_to_share_out_what_all_devices_share_already() -> None:
    model = replace(SMALL, layers=48, hidden=8192, heads=64)
    assert "of it is optimizer, which cannot shrink on these devices, and" in of(SHARED, model, 64).why
    smallest = Plan(tp=8, sequence_parallel=True, recompute="full")
    assert (
        "of it is optimizer. To shrink it, cut the model in another way, or take more devices"
        in of(smallest, model, 64, device="A100-40GB").why
    )


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_every_device_names_its_source_and_the_origin_of_what_it_achieves(device: Device) -> None:
    assert device.source and device.origin
    precision = "bf16" if "bf16" in device.peak else "fp16"
    model = ModelSpec(2, 256, 4, 128, 1000)
    found = estimate(model, Cluster(device.name, devices_per_node=1), Plan(precision=precision), 2)
    assert 0 < found.mfu < 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp": 5, "dp": 2}, r"tp=5 does not divide heads=96.*so use tp=1, 2, 3, 4, 6"),
    ({"dp": 3}, r"dp=3 x tp=8 x pp=8 makes 192, but the cluster has 128 devices; with dp=2 it would"),
    (
        {"micro_batch": 3},
        r"global_batch=128 does not divide among dp=2 ranks in micro-batches of 3; dp x micro_batch has to",
    ),
    (
        {"dp": 1, "tp": 1, "pp": 128, "sequence_parallel": False},
        r"pp=128 x virtual_stages=1 makes 128 stages of 96 layers",
    ),
    ({"tp": 1, "dp": 16}, r"sequence_parallel=True shares work among tensor ranks, and tp=1"),
    (
        {"schedule": "dualpipev", "virtual_stages": 2, "micro_batch": 8},
        r"8 micro-batches are too few for dualpipev on 16 stages; use at least as many, or zbv",
    ),
    (
        {"schedule": "interleaved_1f1b", "virtual_stages": 5},
        r"96 layers do not divide among pp=8 x virtual_stages=5; .* virtual_stages=2, 3, 4, 6 or 12",
    ),
    (
        {"schedule": "interleaved_1f1b", "virtual_stages": 2, "micro_batch": 16},
        r"4 micro-batches do not go through pp=8 in rounds",
    ),
]


def test_activations_on_the_host_are_free_of_memory_and_wait_on_a_narrow_link_alone() -> None:
    model = ModelSpec(32, 4096, 32, 8192, 32000, ffn_hidden=14336, gated_mlp=True, flash_attention=True)
    plan = Plan(dp=8, zero=3)
    for device, link in (("GB200-186GB", 0.8 * 450e9), ("H100-80GB", 0.8 * 63e9)):
        here, away = (estimate(model, Cluster(device), replace(plan, offloaded=share), 8) for share in (0.0, 0.75))
        assert away.memory.activations == pytest.approx(here.memory.activations / 4)
        of_layer, parts = 0.75 * here.memory.activations / 32 / link, layer_times(model, here.cluster.spec, plan.slice)
        late = max(of_layer - parts.forward, 0) + max(of_layer - parts.backward - parts.weight_grad, 0)
        assert away.step_time.recompute == pytest.approx(32 * late)
        assert (late > 0) == (device == "H100-80GB")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"schedule": "2f2b"}, "schedule='2f2b' is unknown; choose one of naive, gpipe, 1f1b"),
        ({"dp": 8, "zero": 3, "shards": 3}, "shards=3 cannot share out zero=3 among 8 replicas; choose a divisor"),
        ({"recompute": "full", "recomputed": 12}, "recomputed=12 is no share of the layers; give one from 0 to 1"),
        ({"dispatch": "sorted"}, "dispatch='sorted' is unknown; choose one of fused, capacity, all-to-all"),
        ({"offloaded": 1.1}, "offloaded=1.1 is no share of the layers"),
    ],
)
def test_a_plan_with_wrong_values_is_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Plan(**values)


@pytest.mark.parametrize(("change", "complaint"), REFUSED, ids=[complaint[:20] for _, complaint in REFUSED])
def test_a_plan_that_cannot_exist_is_refused_with_what_to_change(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        estimate(GPT3, Cluster(nodes=16), replace(PLAN, **change), 128)


def test_a_precision_the_device_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="precision='bf16' is nothing V100-32GB computes in; it has fp16, fp32"):
        estimate(SMALL, Cluster("V100-32GB"), Plan(dp=8), 8)
