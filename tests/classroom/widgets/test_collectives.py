"""The explorer of collectives, moved without a browser."""

from __future__ import annotations

from course_lib.classroom.widgets import collectives


def test_a_move_runs_another_collective_and_says_what_it_cost() -> None:
    explorer = collectives.collective_explorer("ring all-reduce", 4)
    assert "Ring all-reduce: 4 ranks, emulated: in the end each has 4 pieces complete" in explorer.sentences.value
    assert "It takes 12 ms, and no rank sends more than 6 pieces." in explorer.sentences.value
    way, ranks = explorer.controls
    way.value = "tree broadcast"
    assert "each has 4 pieces complete, from one rank each. It takes 10 ms" in explorer.sentences.value
    ranks.value = 2
    assert "2 pieces complete, from one rank each. It takes 3 ms" in explorer.sentences.value
    assert "data-fly" in explorer.beside.value


def test_where_no_widget_runs_there_are_pictures_of_what_is_there_half_way() -> None:
    html = collectives.collective_explorer("ring all-reduce", 8)._repr_mimebundle_()["text/html"]
    assert html.count('<img src="data:image/svg+xml;base64,') == 1
    assert len(html) < 200_000
