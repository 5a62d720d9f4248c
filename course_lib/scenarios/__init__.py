"""The ten scenarios: cases in which one diagnoses and decides as engineers do, and sees the decision run.

    from course_lib import scenarios
    night = scenarios.load("S02_night_call")            scenarios.load("S02_night_call", seed=1): another cause
    night.evidence()

A case with a fault is a healthy job, what may be wrong with it, and what one may change: `faults`. A case that asks for
a plan is a model, a cluster and what the plan must reach: `plans`. Their prose is in sources/scenarios/.
"""
