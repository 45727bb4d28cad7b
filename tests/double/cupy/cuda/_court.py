"""What the judge knows of communicators and operations, and the rules that it enforces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _reduce import reduced
from _waits import Operation, Step, Unit, Waits
from _wire import INVALID_USAGE, REMOTE_ERROR


class Comm:
    """One communicator."""

    def __init__(self, number: int, members: list[Any]) -> None:
        self.number = number
        self.members = members
        #: Status and text, once something is wrong with it.
        self.broken: tuple[int, str] | None = None
        self.left: set[int] = set()
        self.operations: dict[tuple[Any, ...], Operation] = {}
        self.splits: dict[int, tuple[Any, int, int, int]] = {}
        self._counts: dict[tuple[Any, ...], int] = {}

    def __str__(self) -> str:
        names = ", ".join(member.name for member in self.members)
        return f"communicator {self.number} {{{names}}}"

    def join(self, call: dict[str, Any]) -> tuple[Operation, tuple[int, str]]:
        """The operation that a call belongs to, by its place in its sequence, and its part."""
        rank, kind, peer = call["rank"], call["kind"], call["peer"]
        if kind in ("send", "recv"):
            pair = (rank, peer) if kind == "send" else (peer, rank)
            sequence, part = ("p2p", *pair), (rank, kind)
            parts = {(pair[0], "send"), (pair[1], "recv")}
            name = f"{pair[0]} to {pair[1]}"
        else:
            sequence, part, name = ("collective",), (rank, ""), ""
            parts = {(member, "") for member in range(len(self.members))}
        index = self._counts.get((*sequence, part), 0)
        self._counts[(*sequence, part)] = index + 1
        key = (*sequence, index)
        if key not in self.operations:
            self.operations[key] = Operation(self, f"#{index} {name}".rstrip(), parts)
        operation = self.operations[key]
        operation.calls[part] = call
        return operation, part

    def forget(self, operation: Operation) -> None:
        """Drop an operation that is over."""
        for key, known in self.operations.items():
            if known is operation:
                del self.operations[key]
                return


class Court:
    """All communicators of a run.

    Every public method is a message of a client.
    """

    def __init__(self, record: Callable[[str], None]) -> None:
        self.violations: list[str] = []
        self._record = record
        self._comms: dict[int, Comm] = {}
        self._made = 0
        self._waits = Waits()
        #: By unique id: the number of ranks, and who has come, by rank.
        self._coming: dict[bytes, tuple[int, dict[int, tuple[Any, int, Any]]]] = {}
        #: Unique ids that were used up, and why nobody may come with them any more.
        self._used: dict[bytes, tuple[int, str]] = {}

    # Communicators

    def create(
        self, client: Any, request: int, unique: bytes, ndev: int, rank: int, device: Any
    ) -> None:
        """A rank comes to make a communicator."""
        if unique in self._used:
            status, text = self._used[unique]
            client.send("refused", request, status, text)
            if status == INVALID_USAGE:
                self._violation(text, [client])
            return
        expected, there = self._coming.setdefault(unique, (ndev, {}))
        wrong = None
        if ndev != expected:
            wrong = f"{client.name} makes a communicator of {ndev} ranks, others of {expected}"
        elif rank in there:
            wrong = f"{client.name} comes as rank {rank}, as which {there[rank][0].name} came"
        elif device is not None and any(device == other[2] for other in there.values()):
            (twin,) = [other for other, found in there.items() if found[2] == device]
            wrong = f"Duplicate GPU detected: ranks {twin} and {rank} are both on device {device}"
        there[-1 - len(there) if rank in there else rank] = (client, request, device)
        if wrong is not None:
            self._refuse(unique, INVALID_USAGE, wrong)
            self._violation(wrong, [found[0] for found in there.values()])
        elif len(there) == ndev:
            del self._coming[unique]
            self._used[unique] = (INVALID_USAGE, "a unique id makes one communicator only")
            self._make([(there[index][0], there[index][1]) for index in range(ndev)])

    def give_up(self, client: Any, unique: bytes, rank: int) -> None:
        """A rank will not come."""
        self._refuse(unique, REMOTE_ERROR, f"rank {rank} ({client.name}) could not come")

    def split(
        self, client: Any, request: int, number: int, rank: int, color: int, key: int
    ) -> None:
        """A rank comes to split a communicator."""
        comm = self._comms[number]
        if comm.broken is not None:
            client.send("refused", request, *comm.broken)
            return
        comm.splits[rank] = (client, request, color, key)
        if len(comm.splits) < len(comm.members):
            return
        came, comm.splits = comm.splits, {}
        for wanted in sorted({color for _, _, color, _ in came.values()}):
            ranks = sorted(
                (rank for rank in came if came[rank][2] == wanted),
                key=lambda rank: (came[rank][3], rank),
            )
            if wanted == -1:
                for rank in ranks:
                    came[rank][0].send("made", came[rank][1], None, 0, 0, "")
            else:
                self._make([(came[rank][0], came[rank][1]) for rank in ranks])

    def abort(self, client: Any, number: int, rank: int) -> None:
        """A rank aborts a communicator: the others are told, and nothing more ends on it."""
        comm = self._comms.get(number)
        if comm is not None:
            self._break(comm, REMOTE_ERROR, f"{client.name} has left {comm}", fatal=False)
            self.destroy(client, number, rank)

    def destroy(self, client: Any, number: int, rank: int) -> None:
        """A rank frees a communicator."""
        comm = self._comms.get(number)
        if comm is not None:
            comm.left.add(rank)
            if len(comm.left) == len(comm.members):
                del self._comms[number]

    def gone(self, client: Any) -> None:
        """A process has ended, or was killed: as if it had aborted all that it had."""
        for unique, (_, there) in list(self._coming.items()):
            if any(found[0] is client for found in there.values()):
                self._refuse(unique, REMOTE_ERROR, f"{client.name} has ended")
        for comm in list(self._comms.values()):
            for rank, member in enumerate(comm.members):
                if member is client and rank not in comm.left:
                    self.abort(client, comm.number, rank)
        for unit in list(client.in_flight.values()):
            self._waits.done(unit)

    def _make(self, ranks: list[tuple[Any, int]]) -> None:
        self._made += 1
        comm = Comm(self._made, [client for client, _ in ranks])
        self._comms[comm.number] = comm
        for rank, (client, request) in enumerate(ranks):
            client.send("made", request, comm.number, rank, len(ranks), str(comm))

    def _refuse(self, unique: bytes, status: int, text: str) -> None:
        self._used[unique] = (status, text)
        _, there = self._coming.pop(unique, (0, {}))
        for client, request, _ in there.values():
            client.send("refused", request, status, text)

    # Operations

    def issue(
        self, client: Any, number: int, streams: list[int], calls: list[dict[str, Any]]
    ) -> None:
        """A rank launches a unit; its streams may come to it much later."""
        unit = Unit(client, number, frozenset(streams))
        for call in calls:
            comm = self._comms.get(call["comm"])
            if comm is None or comm.broken:
                unit.operations.append(None)
                continue
            operation, part = comm.join(call)
            operation.units[part] = unit
            unit.operations.append((operation, part))
            self._compare(operation, part)
        steps, certain = self._waits.add(unit)
        if steps:
            self._cycle(steps, certain)

    def start(self, client: Any, number: int, payloads: list[bytes]) -> None:
        """All streams of a unit have come to it; with the data that it sends."""
        unit = client.in_flight.get(number)
        if unit is None:
            return  # it has failed meanwhile
        for entry, payload in zip(unit.operations, payloads, strict=True):
            if entry is None or entry[0].comm.broken:
                continue
            operation, part = entry
            operation.arrived[part] = payload
            if operation.arrived.keys() == operation.parts:
                self._finish(operation)

    def done(self, client: Any, number: int) -> None:
        """A unit has ended on its rank."""
        unit = client.in_flight.get(number)
        if unit is not None:
            self._waits.done(unit)

    def _finish(self, operation: Operation) -> None:
        operation.finished = True
        operation.comm.forget(operation)
        call = next(iter(operation.calls.values()))
        if call["kind"] in ("send", "recv"):
            (result,) = [data for part, data in operation.arrived.items() if part[1] == "send"]
        elif call["kind"] == "broadcast":
            result = operation.arrived[call["peer"], ""]
        else:
            data = [operation.arrived[part] for part in sorted(operation.arrived)]
            gather = call["kind"] == "allGather"
            result = b"".join(data) if gather else reduced(data, call["datatype"], call["op"])
        for part, unit in operation.units.items():
            index = unit.operations.index((operation, part))
            unit.client.send("result", unit.number, index, b"" if part[1] == "send" else result)
        operation.arrived = {}

    # Rules

    def violation(self, client: Any, text: str, number: int | None) -> None:
        """A client has found a violation itself; `number`: of the communicator that it breaks."""
        comm = self._comms.get(number) if number is not None else None
        if comm is None:
            self._violation(text, [client])
        else:
            self._violation(text, comm.members)
            self._break(comm, INVALID_USAGE, text, fatal=True)

    def report(self, client: Any, request: int) -> None:
        """A client asks for all violations of the run."""
        client.send("answer", request, list(self.violations))

    def _violation(self, text: str, concerned: list[Any]) -> None:
        self.violations.append(text)
        self._record(text)
        for client in dict.fromkeys(concerned):
            client.send("violation", text)

    def _break(self, comm: Comm, status: int, text: str, fatal: bool) -> None:
        if comm.broken:
            return
        comm.broken = (status, text)
        for rank, member in enumerate(comm.members):
            if rank not in comm.left:
                member.send("broken", comm.number, status, text, fatal)
        for client, request, _, _ in comm.splits.values():
            client.send("refused", request, status, text)

    def _compare(self, operation: Operation, part: tuple[int, str]) -> None:
        """Compare a call with one that came before it at the same place of the sequence."""
        call = operation.calls[part]
        for other, there in operation.calls.items():
            if other != part:
                fields = ["count", "datatype"]
                fields += [] if part[1] else ["kind", "peer", "op"]
                if any(call[field] != there[field] for field in fields):
                    text = "operations do not match:\n" + "\n".join(
                        f"  {operation.units[which].client.name}: {_described(operation, which)}"
                        for which in (other, part)
                    )
                    self._violation(text, operation.comm.members)
                    self._break(operation.comm, INVALID_USAGE, text, fatal=True)
                return

    def _cycle(self, steps: list[Step], certain: bool) -> None:
        lines = [
            "operations wait for each other, and will for ever:"
            if certain
            else "order of operations differs between ranks, may deadlock:"
        ]
        comms = []
        previous = steps[-1][2]
        for unit, earlier, operation in steps:
            first = _described_in(operation, earlier)
            second = _described_in(previous, unit)
            lines.append(f"  {unit.client.name}: {first}\n    then {second}")
            comms.append(operation.comm)
            previous = operation
        text = "\n".join(lines)
        self._violation(text, [member for comm in comms for member in comm.members])
        for comm in comms:
            self._break(comm, INVALID_USAGE, text, fatal=True)


def _described(operation: Operation, part: tuple[int, str]) -> str:
    call = operation.calls[part]
    kind, root = call["kind"], ""
    if kind == "broadcast":
        root = f"root {call['peer']}, "
    what = f"{root}count {call['count']}, data type {call['datatype']}"
    others = len([entry for entry in operation.units[part].operations if entry is not None]) - 1
    group = f", in a group with {others} more" if others else ""
    return f"{kind} {operation.name} ({what}) on {operation.comm}{group}, called at {call['at']}"


def _described_in(operation: Operation, unit: Unit) -> str:
    for part, other in operation.units.items():
        if other is unit:
            return _described(operation, part)
    raise LookupError(operation.name)


#: What a client may ask for.
MESSAGES = {
    *("create", "give_up", "split", "abort", "destroy"),
    *("issue", "start", "done", "violation", "report"),
}
