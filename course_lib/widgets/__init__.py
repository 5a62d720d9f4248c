"""Things to turn and press: explorers that run real ranks behind their sliders.

from course_lib.widgets.data_parallel import DataParallelExplorer
DataParallelExplorer()
"""
