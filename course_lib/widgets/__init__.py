"""Things to turn and press: explorers and question cards, with real ranks behind their sliders and buttons.

    from course_lib.widgets.data_parallel import DataParallelExplorer
    from course_lib.widgets.cards import Card

Each is imported by its own name, so that nothing is loaded that a notebook does not show.
"""
