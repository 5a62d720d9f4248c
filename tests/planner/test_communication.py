"""Traffic: bytes of each algorithm, and groups with their links."""

from __future__ import annotations

import pytest

from course_lib.planner import LINKS, Cluster, Interconnect, Plan
from course_lib.planner.communication import (
    LONG_RING,
    Spread,
    bytes_sent,
    collective_seconds,
    group,
    hierarchical_seconds,
    message_seconds,
    ring_seconds,
    tree_seconds,
)

PLAIN = Interconnect("plain", 100.0, 0.5, latency=2.0, launch=10.0, source="", origin="")


@pytest.mark.parametrize(("op", "factor"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_ring_sends_what_nccl_tests_say(op: str, factor: int, n: int) -> None:
    assert bytes_sent(op, 1000.0, n) == pytest.approx(1000 * factor * (n - 1) / n)


def test_a_ring_by_hand() -> None:
    assert ring_seconds("all_reduce", 400.0, 4, PLAIN) == pytest.approx(10 + 6 * 2 + 2 * 3 / 4 * 400 / 50)
    assert ring_seconds("all_gather", 400.0, 4, PLAIN) == pytest.approx(10 + 3 * 2 + 3 / 4 * 400 / 50)


def test_a_tree_needs_few_steps_and_sends_everything_twice() -> None:
    assert tree_seconds(400.0, 64, PLAIN) == pytest.approx(10 + 2 * 6 * 2 + 2 * 400 / 50)


def test_a_message_is_its_latency_and_its_bytes() -> None:
    assert message_seconds(400.0, PLAIN) == pytest.approx(10 + 2 + 400 / 50)


def test_hierarchical_sends_a_share_between_nodes() -> None:
    cluster = Cluster("A100-80GB", nodes=4, devices_per_node=8)
    ranks = Spread(32, 8)
    inside = ring_seconds("all_reduce", 1e9, 8, cluster.inside_link)
    between = ring_seconds("all_reduce", 1e9 / 8, 4, cluster.between_link)
    assert hierarchical_seconds("all_reduce", 1e9, ranks, cluster) == pytest.approx(inside + between)


def test_small_messages_between_nodes_take_the_tree_and_large_ones_the_ring_while_it_is_short() -> None:
    def seconds(n_bytes: float, nodes: int) -> float:
        return collective_seconds("all_reduce", n_bytes, Spread(nodes, 1), Cluster(nodes=nodes))

    link = Cluster(nodes=8).between_link
    assert seconds(1e4, 8) == tree_seconds(1e4, 8, link) < ring_seconds("all_reduce", 1e4, 8, link)
    assert ring_seconds("all_reduce", 1e10, 8, link) < seconds(1e10, 8) < tree_seconds(1e10, 8, link)
    assert seconds(1e10, 64) == tree_seconds(1e10, 64, link)


def test_the_longer_a_ring_through_nodes_the_less_bandwidth_is_left() -> None:
    def seconds(nodes: int, n_bytes: float = 1e12) -> float:
        return collective_seconds("all_gather", n_bytes, Spread(8 * nodes, 8), Cluster(nodes=nodes))

    halved = LONG_RING // 8
    alone = 1e12 / (8 * Cluster(nodes=2).between_link.achieved)
    assert seconds(halved) == pytest.approx(2 * alone, rel=0.01)
    assert seconds(4 * halved) == pytest.approx(5 * alone, rel=0.01)


def test_small_gathers_wait_for_every_hop_and_most_hops_are_inside_a_node() -> None:
    cluster = Cluster(nodes=4)
    inside, between = cluster.inside_link.latency, cluster.between_link
    found = collective_seconds("all_gather", 1e-9, Spread(32, 8), cluster)
    assert found == pytest.approx(between.launch + 28 * inside + 3 * between.latency)


def test_tensor_groups_are_inside_nodes_data_groups_across_and_stages_farthest_apart() -> None:
    plan = Plan(dp=4, tp=8, pp=4)
    assert group(plan.tp, 1, 8) == Spread(8, 8)
    assert group(plan.dp, plan.tp, 8) == Spread(4, 1)
    assert group(plan.pp, plan.tp * plan.dp, 8).nodes == 4


def test_devices_are_numbered_tensor_first_then_data_then_stages() -> None:
    plan, per_node = Plan(dp=4, tp=2, pp=2), 4
    members = [data * plan.tp for data in range(plan.dp)]  # stage 0, tensor rank 0
    nodes = {device // per_node for device in members}
    assert group(plan.dp, plan.tp, per_node) == Spread(4, 4 // len(nodes))


def test_traffic_inside_a_node_uses_the_fast_link() -> None:
    cluster = Cluster(nodes=2)
    inside, between = (collective_seconds("all_gather", 1e9, ranks, cluster) for ranks in (Spread(2, 2), Spread(2, 1)))
    ratio = cluster.inside_link.achieved / cluster.between_link.achieved
    assert between / inside == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("link", LINKS.values(), ids=lambda link: link.name)
def test_every_link_names_its_source_and_the_origin_of_what_it_achieves(link: Interconnect) -> None:
    assert link.source and link.origin
    assert 0 < link.fraction <= 1


def test_vendor_figures_are_turned_into_one_direction() -> None:
    printed = {"NVLink 2": 300e9, "NVLink 3": 600e9, "NVLink 4": 900e9, "NVLink 5": 1800e9}
    assert {name: 2 * LINKS[name].bandwidth for name in printed} == printed
