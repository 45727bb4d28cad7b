#!/bin/sh
# MPICH (and Intel MPI): start ranks on the hosts of a host file. README.md says why each setting.
#
#     launch/mpirun-mpich.sh HOSTFILE RANKS PROGRAM ...          HOSTFILE: lines of host:ranks
#
# NETWORK_DEVICE: the NIC for MPI, eth0 or mlx5_0:1 for example; default: MPICH's own choice.
# MPIEXEC: the launcher, where it is not the mpiexec in PATH.
set -eu
if [ $# -lt 3 ]; then sed -n '4,7s/^# *//p' "$0" >&2; exit 2; fi
hosts=$1 ranks=$2
shift 2
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
if [ -n "${NETWORK_DEVICE:-}" ]; then
  export UCX_NET_DEVICES="$NETWORK_DEVICE"
fi
# Hydra hands this environment to all ranks by itself.
exec "${MPIEXEC:-mpiexec}" -f "$hosts" -n "$ranks" ${MPIEXEC_OPTIONS:-} "$@"
