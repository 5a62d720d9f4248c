"""Cases in which one diagnoses and decides as engineers do, and sees the decision run.

A case with a fault is a healthy job, what may be wrong with it, and what one may change: `jobs.faults`. A case that
asks for a plan is a model, a cluster and what the plan must reach: `plans`. Each is a room of the course.
"""
