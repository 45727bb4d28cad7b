#!/bin/sh
# bind-gpu.sh PROGRAM ...    one rank per GPU: device 0 of each rank is a GPU of its own.
#
# The node's GPUs are turned by the local rank, so that the others stay visible behind it: local rank
# 1 of 0,1,2,3 gets 1,2,3,0. More ranks than GPUs on a node are an error, not a GPU for two.
# Slurm's comes last: in a batch job it is there for mpiexec too, and then 0 for all ranks of a node.
local=${MPI_LOCALRANKID:-${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-}}}
if [ -z "$local" ]; then echo "bind-gpu.sh: start it by srun or mpiexec" >&2; exit 2; fi
all=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd ,)}
if ! turned=$(echo "$all" | awk -F , -v first="$local" '
    first >= NF { exit 1 }
    { for (i = 0; i < NF; i++) printf "%s%s", $((first + i) % NF + 1), i < NF - 1 ? "," : "\n" }'); then
  if [ -z "$all" ]; then echo "bind-gpu.sh: this node shows no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES" >&2
  else echo "bind-gpu.sh: local rank $local has no GPU; the node's are: $all. Start fewer ranks per node" >&2; fi
  exit 2
fi
CUDA_VISIBLE_DEVICES=$turned exec "$@"
