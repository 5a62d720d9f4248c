"""Random schedules: some that can run, and some with a change, which may not."""

from __future__ import annotations

from random import Random

from course_lib.schedules import Action, Schedule

MOST_RANKS, MOST_MICRO_BATCHES = 3, 3


def that_can_run(random: Random, n_ranks: int | None = None) -> Schedule:
    """Draw a schedule: any stages for each rank, one or more, and then one possible action after the other."""
    n_ranks = n_ranks or random.randint(1, MOST_RANKS)
    n_stages = n_ranks + random.randint(0, 2)
    rank_of = [*range(n_ranks), *(random.randrange(n_ranks) for _ in range(n_stages - n_ranks))]
    random.shuffle(rank_of)
    rows: list[list[Action]] = [[] for _ in range(n_ranks)]
    possible = [Action("F", 0, k) for k in range(random.randint(1, MOST_MICRO_BATCHES))]
    while possible:
        op, stage, k = action = possible.pop(random.randrange(len(possible)))
        rows[rank_of[stage]].append(action)
        if op == "F" and stage < n_stages - 1:
            possible.append(Action("F", stage + 1, k))
        elif op == "F" or (op in "BI" and stage > 0):
            back = stage if op == "F" else stage - 1
            possible.append(Action(random.choice("BI"), back, k))
        if op == "I":
            possible.append(Action("W", stage, k))
    return Schedule(rows)


def tampered_with(schedule: Schedule, random: Random) -> Schedule:
    """Change one thing in a schedule, which may or may not matter."""
    rows = [list(row) for row in schedule.actions]
    row = random.choice([row for row in rows if row] or [[Action("F", 0, 0)]])
    at = random.randrange(len(row))
    change = random.choice(["swap", "drop", "double", "other rank", "other op", "other micro-batch", "other stage"])
    if change == "swap":
        other = random.randrange(len(row))
        row[at], row[other] = row[other], row[at]
    elif change == "drop":
        del row[at]
    elif change == "double":
        row.insert(random.randint(0, len(row)), row[at])
    elif change == "other rank":
        to = random.choice(rows)
        to.insert(random.randint(0, len(to)), row.pop(at))
    elif change == "other op":
        row[at] = row[at]._replace(op=random.choice("FBIWX"))
    elif change == "other micro-batch":
        row[at] = row[at]._replace(micro_batch=random.randint(-1, MOST_MICRO_BATCHES))
    else:
        row[at] = row[at]._replace(stage=random.randint(-1, MOST_RANKS))
    return Schedule(rows)
