"""The parent's side of a run, in the notebook: it starts the workers, hands out the task, listens and judges."""
