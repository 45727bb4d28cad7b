#!/bin/sh
# One rank per GPU, by the mpiexec of MPICH, Intel MPI or Open MPI. README.md says why each setting.
#
#     launch/mpirun-gpu.sh HOSTFILE RANKS PROGRAM ...            HOSTFILE: as that MPI wants it
#
# CUDA_VISIBLE_DEVICES: the GPUs of each host, where not all of them are meant.
# NETWORK_DEVICE, MPIEXEC, MPIEXEC_OPTIONS: see mpirun-mpich.sh and mpirun-openmpi.sh.
set -eu
if [ $# -lt 3 ]; then sed -n '4,7s/^# *//p' "$0" >&2; exit 2; fi
hosts=$1 ranks=$2
shift 2
here=$(dirname "$(readlink -f "$0")")
case $("${MPIEXEC:-mpiexec}" --version 2>&1) in
  *"Open MPI"* | *OpenRTE* | *PRRTE*)
    script=mpirun-openmpi.sh
    # Other hosts get no variable that is not named.
    for name in CUDA_VISIBLE_DEVICES $(env | sed -n 's/^\(NCCL_[A-Z0-9_]*\|XMESH_[A-Z0-9_]*\)=.*/\1/p'); do
      if eval "[ -n \"\${$name:-}\" ]"; then MPIEXEC_OPTIONS="${MPIEXEC_OPTIONS:-} -x $name"; fi
    done
    export MPIEXEC_OPTIONS ;;
  *) script=mpirun-mpich.sh ;;
esac
exec "$here/$script" "$hosts" "$ranks" "$here/bind-gpu.sh" "$@"
