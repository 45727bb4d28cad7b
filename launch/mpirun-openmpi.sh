#!/bin/sh
# Open MPI: start ranks on the hosts of a host file. README.md says why each setting.
#
#     launch/mpirun-openmpi.sh HOSTFILE RANKS PROGRAM ...        HOSTFILE: lines of host slots=ranks
#
# NETWORK_DEVICE: the Ethernet interface for MPI, eth0 for example; default: all that there are.
# MPIEXEC: the launcher, where it is not the mpirun in PATH.
set -eu
if [ $# -lt 3 ]; then sed -n '4,7s/^# *//p' "$0" >&2; exit 2; fi
hosts=$1 ranks=$2
shift 2
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
if [ -n "${NETWORK_DEVICE:-}" ]; then
  export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_btl_tcp_if_include="$NETWORK_DEVICE"
fi
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Other hosts get OMPI_... and what -x names, and nothing else of this environment.
forward="-x OMP_NUM_THREADS -x OPENBLAS_NUM_THREADS"
if [ -n "${PYTHONPATH:-}" ]; then forward="$forward -x PYTHONPATH"; fi
exec "${MPIEXEC:-mpirun}" --hostfile "$hosts" -n "$ranks" --map-by slot $forward ${MPIEXEC_OPTIONS:-} "$@"
