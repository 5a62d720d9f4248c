"""Things to turn and press: explorers that run real ranks behind their sliders.

    from course_lib.widgets.data_parallel import DataParallelExplorer
    DataParallelExplorer()

(Nothing is imported here: ranks import experiments.py, and need no ipywidgets.)
"""
