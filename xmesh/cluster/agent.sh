#!/bin/sh
# AGENT [options] HOST COMMAND...    what an MPI launcher calls in place of ssh.
#
# Runs COMMAND, which is text for a shell as with ssh, on a host of the emulated cluster whose name is
# in XMESH_CLUSTER: in the host's network namespace, under the host's name, and with shared memory
# (POSIX and System V) of its own, so that no MPI finds a way round the network.
while :; do
  case $1 in
    -[bceFIiJlmopRS]) shift 2 ;; # ssh's options that take a value
    -*) shift ;;
    *) break ;;
  esac
done
host=$1
shift
exec ip netns exec "${XMESH_CLUSTER:?is not set}-$host" unshare --uts --ipc --mount sh -c '
  echo "$0" >/proc/sys/kernel/hostname || exit
  mount -t tmpfs -o nosuid,nodev xmesh /dev/shm || exit
  exec sh -c "$1"' "$host" "$*"
