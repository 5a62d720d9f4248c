"""Cases in which students diagnose and decide as engineers do, and see their decision run.

A case with a fault has a healthy job, possible faults and possible changes: `jobs.faults`. A case that asks for a plan
has a model, a cluster and targets: `plans`. Each is a room of the course.
"""
