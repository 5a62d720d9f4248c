"""The same training under torchrun, on one node or many: `train` is the program, slurm.sh starts it on a cluster."""
