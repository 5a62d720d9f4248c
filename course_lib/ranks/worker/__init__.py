"""The worker's side of a run, on every rank: it runs the student's function and notes what it does."""
