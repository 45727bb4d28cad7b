#!/bin/sh
# NIC COUNT COMMAND...    runs a rank bound to one of its host's COUNT network interfaces.
#
# Local rank i of n takes interface i * COUNT / n: the ranks in blocks, as Topology.uniform has it.
nics=$1
shift
local=${MPI_LOCALRANKID:-${OMPI_COMM_WORLD_LOCAL_RANK:?neither MPICH nor Open MPI started this}}
size=${MPI_LOCALNRANKS:-$OMPI_COMM_WORLD_LOCAL_SIZE}
XMESH_NIC=$((local * nics / size))
export XMESH_NIC UCX_NET_DEVICES="eth$XMESH_NIC" OMPI_MCA_btl_tcp_if_include="eth$XMESH_NIC"
exec "$@"
