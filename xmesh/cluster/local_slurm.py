"""LocalSlurm: a real Slurm on this machine, its nodes told apart by name and port."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from xmesh.cluster import processes
from xmesh.cluster.owner import Owner
from xmesh.cluster.processes import Outcome
from xmesh.errors import XmeshError, explain

_PREFIX = "xmesh-slurm-"
_RECORD = "owner.json"
_MARK = "XMESH_LOCAL_SLURM"
#: The number of a cluster's first job is drawn up to this. MPICH 5.0 calls its shared memory
#: after the numbers of job and step, and finds that of a job which was killed, or which another
#: cluster on this machine runs: then MPI_Init hangs, or fails for want of memory.
_FIRST_JOBS = 60_000_000
_START_S = 60.0
_CANCEL_S = 10.0
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "squeue", "scancel")
_CONF = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
# Slurm's PMIx makes a folder here for each job step, and a second node must not find the first's.
TmpFS={folder}/tmp.%n
# No cgroups, no binding, no accounting: the nodes are one machine.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=pmi2
FirstJobId={first_job}
ReturnToService=2
KillWait=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# As many CPUs as are written here, not as there are.
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs={cpus} Gres=gpu:{cpus} State=UNKNOWN
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}]
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class LocalSlurm:
    """munged, slurmctld and a slurmd for each node, in a folder of their own.

    A context manager, or ``up`` and ``down``. Uses a munge key, a socket, ports and a cluster name
    of its own, and nothing under /etc. Needs the packages slurm-wlm and munge (Debian, Ubuntu).

    Args:
        num_nodes: how many nodes; they are called ``n0``, ``n1``, ...
        cpus_per_node: how many tasks Slurm puts on a node.
        stays: whether it outlives this process: then only ``down`` removes it.

    Raises:
        XmeshError: numbers below 1; by ``up``: no Slurm, or daemons that do not start.
    """

    def __init__(self, num_nodes: int = 4, cpus_per_node: int = 2, *, stays: bool = False) -> None:
        if num_nodes < 1 or cpus_per_node < 1:
            raise XmeshError(
                explain(
                    "Slurm needs at least one node of at least one CPU",
                    values=f"num_nodes={num_nodes} cpus_per_node={cpus_per_node}",
                    remedy="give for example 4 and 2",
                )
            )
        self._num_nodes, self._cpus_per_node = num_nodes, cpus_per_node
        self._owner = None if stays else Owner.of()
        self._folder: Path | None = None

    @staticmethod
    def missing() -> str:
        """What this machine lacks for it, with a remedy; "" if nothing is seen."""
        absent = [name for name in _PROGRAMS if processes.find_tool(name) is None]
        if absent:
            return f"Slurm needs {', '.join(absent)}; apt-get install slurm-wlm munge"
        return ""

    @classmethod
    def attach(cls, folder: Path) -> LocalSlurm:
        """One that is up, by its folder.

        Raises:
            XmeshError: there is none.
        """
        try:
            record = json.loads((folder / _RECORD).read_text())
            slurm = cls(int(record["num_nodes"]), int(record["cpus_per_node"]))
            slurm._owner = Owner.from_json(record["owner"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise XmeshError(
                explain(
                    "a local Slurm is known by its folder",
                    values=str(folder),
                    context=str(error),
                    remedy="start one: launch/slurm-local up",
                )
            ) from error
        slurm._folder = folder
        return slurm

    @classmethod
    def folders(cls) -> list[Path]:
        """Folders of this user's local Slurms, up or left behind."""
        found = Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_RECORD}")
        return sorted(path.parent for path in found if path.stat().st_uid == os.getuid())

    @classmethod
    def remove_leftovers(cls) -> list[Path]:
        """Remove those whose owner is dead, and only those; their folders."""
        removed = []
        for folder in cls.folders():
            with contextlib.suppress(XmeshError):  # somebody else was quicker
                slurm = cls.attach(folder)
                if slurm._owner is not None and not slurm._owner.alive():
                    slurm.down()
                    removed.append(folder)
        return removed

    @property
    def folder(self) -> Path:
        """Where configuration, logs and state lie.

        Raises:
            XmeshError: it is not up.
        """
        if self._folder is None:
            raise XmeshError(
                explain(
                    "the local Slurm must be up",
                    values=f"{self._num_nodes} nodes, down",
                    remedy="use it as a context manager, or call up() first",
                )
            )
        return self._folder

    def up(self) -> None:
        """Start the daemons and wait until all nodes are idle; after an error nothing is left."""
        lack = self.missing()
        if lack:
            rule, _, remedy = lack.partition("; ")
            raise XmeshError(explain(rule, remedy=remedy))
        if self._folder is not None:
            return
        self.remove_leftovers()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            self._prepare(self._folder)
            self._start(self._folder)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Cancel the jobs, end the daemons, remove the folder; nothing if that has been done."""
        folder = self._folder
        if folder is None:
            return
        if self._daemons(folder):
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                self._cancel_jobs()
        # What is left of tasks first, which would otherwise outlive the daemons.
        processes.end(lambda: self._tasks(folder), grace_s=5)
        processes.end(lambda: self._daemons(folder), grace_s=5)
        processes.end(lambda: self._tasks(folder))
        shutil.rmtree(folder, ignore_errors=True)
        self._folder = None

    def __enter__(self) -> LocalSlurm:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment, in which Slurm's commands speak to this cluster."""
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": processes.full_path()}
        own["TMPDIR"] = str(
            self.folder / "tmp.jobs"
        )  # Open MPI leaves files there, gone with `down`
        return outside | own | dict(extra or {})

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600,
        on_line: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Run a command of Slurm's, ``["srun", "-N4", "-n8", ...]`` for example, to its end.

        Args:
            argv: its words.
            env: more environment variables, for the ranks too.
            timeout_s: seconds after which it and its tasks are ended.
            on_line: called with each line that comes.

        Raises:
            XmeshError: it is not up, or out of time.
        """
        return processes.follow(argv, self.environment(env), timeout_s, on_line)

    def _prepare(self, folder: Path) -> None:
        folder.chmod(0o711)  # munged insists that everybody can reach its socket
        nodes = [f"n{node}" for node in range(self._num_nodes)]
        for name in (
            "state",
            "tmp.jobs",
            *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in nodes),
        ):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        controller_port, *ports = _free_ports(1 + self._num_nodes)
        (folder / "slurm.conf").write_text(
            _CONF.format(
                name=_cluster_name(folder),
                folder=folder,
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                controller_port=controller_port,
                first_job=secrets.randbelow(_FIRST_JOBS) + 1,
                ports=",".join(map(str, ports)),
                last=self._num_nodes - 1,
                cpus=self._cpus_per_node,
            )
        )
        # Made up, so that scripts that ask for GPUs can be tried: they stand for no device.
        for gpu in range(self._cpus_per_node):
            (folder / f"gpu{gpu}").touch()
        (folder / "gres.conf").write_text(
            f"NodeName=n[0-{self._num_nodes - 1}] Name=gpu "
            f"File={folder}/gpu[0-{self._cpus_per_node - 1}]\n"
        )
        record = {
            "num_nodes": self._num_nodes,
            "cpus_per_node": self._cpus_per_node,
            "owner": self._owner.to_json() if self._owner else None,
        }
        (folder / _RECORD).write_text(json.dumps(record))

    def _start(self, folder: Path) -> None:
        munge = ["munged", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
        munge += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"]
        munge += [f"--log-file={folder}/munged.log"]
        conf = ["-f", f"{folder}/slurm.conf"]
        try:
            self._ask(*munge)
            self._ask("slurmctld", *conf)
            for node in range(self._num_nodes):
                self._ask("slurmd", "-N", f"n{node}", *conf)
            deadline = time.monotonic() + _START_S
            while (states := self._states()) != {"idle"}:
                if time.monotonic() > deadline:
                    raise subprocess.SubprocessError(
                        f"the nodes are {', '.join(states) or 'unknown'}"
                    )
                time.sleep(0.2)
        except (subprocess.SubprocessError, OSError) as error:
            logs = [(path, path.read_text(errors="replace")) for path in folder.glob("*.log")]
            said = [
                f"{path.name}: {line}" for path, text in logs for line in text.splitlines()[-4:]
            ]
            raise XmeshError(
                explain(
                    f"Slurm's nodes must be idle within {_START_S:g} s",
                    values=f"{error} {getattr(error, 'stderr', None) or ''}".strip(),
                    context="\n".join(said),
                    remedy="the logs say more; tested with Slurm 22.05 (Debian 12)",
                )
            ) from error

    def _cancel_jobs(self) -> None:
        """Cancel all jobs and wait for their end, so that each srun hears of it and ends, too."""
        deadline = time.monotonic() + _CANCEL_S
        self._ask("scancel", "--user", getpass.getuser(), timeout_s=_CANCEL_S)
        while self._ask("squeue", "--noheader", timeout_s=_CANCEL_S).strip():
            if time.monotonic() > deadline:
                return
            time.sleep(0.2)

    def _states(self) -> set[str]:
        try:
            return set(self._ask("sinfo", "--noheader", "--Node", "--format=%T").split())
        except subprocess.CalledProcessError:
            return set()  # the controller is not there yet

    def _ask(self, *words: str, timeout_s: float = 30) -> str:
        program = processes.find_tool(words[0]) or words[0]
        # Daemons keep what they inherit: a file, because a pipe would be open as long as they are.
        with tempfile.TemporaryFile("w+") as output:
            status = subprocess.run(
                [program, *words[1:]],
                env=self.environment({_MARK: str(self.folder)}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
                start_new_session=True,
            ).returncode
            output.seek(0)
            said = output.read()
        if status:
            raise subprocess.CalledProcessError(status, words, stderr=said)
        return said

    def _daemons(self, folder: Path) -> list[int]:
        """Those that a pid file names, if it is still they, and what was born with the mark."""
        found = set(processes.marked(_MARK, str(folder)))
        for path in folder.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(path.read_text())
                if str(folder) in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                    found.add(pid)
        return sorted(found)

    def _tasks(self, folder: Path) -> list[int]:
        """What srun started: its tasks carry the cluster's name, which no other cluster has."""
        name = _cluster_name(folder)
        return processes.marked("SLURM_CLUSTER_NAME", name)


def _cluster_name(folder: Path) -> str:
    return folder.name.replace("-", "").replace("_", "").lower()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
