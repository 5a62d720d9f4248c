"""A training job on two machines, its possible faults, and the instruments to find them."""

from course_lib.ranks import warm_up

warm_up()  # it imports torch for the ranks while this process imports it, too
