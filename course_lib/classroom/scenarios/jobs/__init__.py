"""A training job on two machines, what may be wrong with it, and what one may find out about that."""

from course_lib.ranks import warm_up

warm_up()  # it imports torch for the ranks while this process does
