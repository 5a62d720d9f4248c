"""The planner: memory, time, bubble and traffic of any plan, say on a thousand GPUs, without running it.

    ModelSpec  +  Cluster  +  Plan   ->   estimate   ->   memory by part, time by part, traffic by link, and why
    spec.py       hardware.py              |
                                           compute.py         one device: products by shape, the rest by bytes
                                           communication.py   collectives and messages over links
                                           bubbles.py         waiting in closed form;  simulate.py  action by action
                                           memory.py          bytes on the fullest device
                                           explain.py         the binding constraint in words
                                           calibrate.py       a measured step: your machine in place of a typical one

`search` estimates every legal plan; printed, it shows the few that could be the fastest and the measurement that would
decide (alternatives.py). Time and memory are intervals, and `why` says whether a step is extrapolated.
`python3 course.py bench planner` holds all of it against what was published.
"""

from course_lib.planner.calibrate import calibrate
from course_lib.planner.estimate import Estimate, Flow, StepTime, estimate
from course_lib.planner.hardware import DEVICES, LINKS, Cluster, Device, Interconnect
from course_lib.planner.memory import Fit, Memory
from course_lib.planner.search import Found, search
from course_lib.planner.simulate import simulate
from course_lib.planner.spec import ModelSpec, Plan
