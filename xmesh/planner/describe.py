"""What ``print(plan)`` shows: who sends what to whom, when, and how far from the bound that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from xmesh.planner.plans import Plan
from xmesh.planner.rotation import RotatedTransfers
from xmesh.planner.strategy import hops_of, hosts_of
from xmesh.planner.transfer import Transfer
from xmesh.topology import Topology

#: Rows that a table shows before "... N more".
MAX_ROWS = 40
#: Unit tasks of a plan by rule up to which all its transfers are looked at; more take seconds.
ENUMERATE_LIMIT = 10_000
#: Unit tasks of a plan by rule up to which they are counted.
_COUNT_LIMIT = 1_000_000
_BOX_WIDTH = 40


class HostTraffic(NamedTuple):
    """Bytes that cross the NICs of one host.

    Attributes:
        host: index of the host in the plan's topology.
        sent_nbytes: bytes that its ranks send to other hosts.
        received_nbytes: bytes that its ranks get from other hosts.
    """

    host: int
    sent_nbytes: int
    received_nbytes: int


def describe(plan: Plan) -> str:
    """A plan as text, for people to read.

    A plan by rule of more than ``ENUMERATE_LIMIT`` unit tasks is described by its counts alone.
    """
    nbytes = plan.itemsize
    for extent in plan.src.shape:
        nbytes *= extent
    head = (
        f"plan {plan.name}: {plan.src.describe()} -> {plan.dst.describe()}, "
        f"shape {plan.src.shape}, {plan.dtype}, {nbytes_text(nbytes)}"
    )
    parts = _by_rule(plan) if isinstance(plan.table, RotatedTransfers) else _listed(plan)
    return "\n".join([head, *parts, f"  digest      {plan.digest.hex()[:12]}"])


def host_traffic(plan: Plan) -> list[HostTraffic]:
    """Bytes over the NICs of each host with a rank in the plan, by host.

    Counted from the messages that ranks post, not from the model that the plan was made by.
    """
    topology = plan.topology
    sent = dict.fromkeys(sorted({topology.host(rank) for rank in plan.ranks}), 0)
    received = dict(sent)
    for transfer in plan.table.all():
        chunk_volumes = (sum(box.volume for box in chunk) for chunk in transfer.chunks)
        before = list(accumulate(chunk_volumes, initial=0))
        for rank in transfer.ranks:
            host = topology.host(rank)
            for hop in hops_of(transfer, topology, rank):
                if topology.host(hop.peer) != host:
                    side = sent if hop.kind == "send" else received
                    side[host] += (before[hop.last] - before[hop.first]) * plan.itemsize
    return [HostTraffic(host, sent[host], received[host]) for host in sent]


def _listed(plan: Plan) -> list[str]:
    transfers = plan.transfers()
    forms = Counter(transfer.strategy for transfer in transfers)
    across = sum(_crosses(transfer, plan.topology) for transfer in transfers)
    known = "proven best for these transfers" if plan.optimal else "not known to be the best"
    lines = [
        f"  strategy    {plan.strategy}" + _forms_text(forms, plan.strategy),
        f"  scheduler   {plan.scheduler}, seed {plan.seed}; schedule {known}",
        f"  moves       {_count(len(plan.unit_tasks), 'unit task')} in "
        f"{_count(len(transfers), 'transfer')}: {across:,} between hosts, "
        f"{len(transfers) - across:,} inside a host",
        f"  copies      {nbytes_text(_kept_nbytes(plan))} stay on the rank that holds them",
    ]
    if not transfers:
        return [*lines, "  makespan    0 s: nothing moves"]
    return [*lines, "", *_transfer_table(plan, transfers), "", *_host_table(plan), "", *_ends(plan)]


def _by_rule(plan: Plan) -> list[str]:
    count = plan.streams.count(_COUNT_LIMIT)
    tasks = f"{count:,}" if count <= _COUNT_LIMIT else f"more than {_COUNT_LIMIT:,}"
    src, dst = plan.streams.src, plan.streams.dst
    lines = [
        f"  strategy    {plan.strategy}",
        f"  scheduler   senders and order by rule, in "
        f"{max(len(src.group_ranks), len(dst.group_ranks)):,} rounds",
        f"  moves       {tasks} unit tasks, too many to search",
        f"  from        {len(src.cells):,} boxes on {len(src.group_ranks):,} sets of ranks",
        f"  to          {len(dst.cells):,} boxes on {len(dst.group_ranks):,} sets of ranks",
    ]
    if count <= ENUMERATE_LIMIT:
        return [*lines, "", *_host_table(plan), "", *_ends(plan)]
    left_out = f"left out for more than {ENUMERATE_LIMIT:,} unit tasks"
    return [*lines, f"  makespan    {left_out}, and so are the lower bound and the hosts"]


def _ends(plan: Plan) -> list[str]:
    bound_s = plan.lower_bound_s
    ratio = (
        f"{plan.makespan_s / bound_s:.3f} times the lower bound" if bound_s else "nothing to move"
    )
    lines = []
    if any(transfer.strategy == "tree" for transfer in plan.table.all()):
        # Said, since the table of hosts shows it: the model leaves it out along with latencies.
        lines = ["  trees       small boxes go by tree, whose root sends them several times"]
    return [
        *lines,
        f"  makespan    {seconds_text(plan.makespan_s)}, {ratio}",
        f"  lower bound {seconds_text(bound_s)}",
    ]


def _transfer_table(plan: Plan, transfers: Sequence[Transfer]) -> list[str]:
    topology = plan.topology
    shown = transfers[:MAX_ROWS]
    rows = [
        (
            index,
            _boxes_text(transfer),
            nbytes_text(transfer.volume * plan.itemsize),
            f"{transfer.sender} ({topology.host_name(transfer.sender)})",
            _receivers_text(transfer, topology),
            transfer.strategy,
            len(transfer.chunks),
            seconds_text(start_s),
        )
        for index, (transfer, start_s) in enumerate(
            zip(shown, plan.schedule.starts_s, strict=False)
        )
    ]
    header = ("#", "box", "bytes", "from", "to", "form", "chunks", "start")
    return table_lines(header, rows, "><><<<>>", len(transfers))


def _host_table(plan: Plan) -> list[str]:
    bound_s = plan.lower_bound_s
    traffic = host_traffic(plan)

    def share(host: int, nbytes: int) -> str:
        seconds = nbytes / plan.cost.host_bandwidth_Bps(plan.topology, host)
        return f"{seconds / bound_s:.0%}" if bound_s else "-"

    mine = frozenset(plan.ranks)
    rows = [
        (
            plan.topology.host_names[host],
            ranks_text([r for r in plan.topology.ranks_of_host(host) if r in mine]),
            nbytes_text(sent),
            share(host, sent),
            nbytes_text(received),
            share(host, received),
        )
        for host, sent, received in traffic[:MAX_ROWS]
    ]
    header = ("host", "ranks", "sent", "of bound", "received", "of bound")
    return table_lines(header, rows, "<<>>>>", len(traffic))


def _crosses(transfer: Transfer, topology: Topology) -> bool:
    return topology.host(transfer.sender) != topology.host(transfer.receivers[0])


def _kept_nbytes(plan: Plan) -> int:
    volume = sum(
        stream.volume * len(set(stream.senders).intersection(stream.receivers))
        for stream in plan.streams
    )
    return volume * plan.itemsize


def _forms_text(forms: Counter[str], strategy: str) -> str:
    if set(forms) <= {strategy}:
        return ""
    return " (" + ", ".join(f"{count} by {form}" for form, count in sorted(forms.items())) + ")"


def _boxes_text(transfer: Transfer) -> str:
    first = str(transfer.boxes[0])
    if len(first) > _BOX_WIDTH:
        first = first[: _BOX_WIDTH - 4] + "...]"
    more = len(transfer.boxes) - 1
    return f"{first} +{more}" if more else first


def _receivers_text(transfer: Transfer, topology: Topology, most: int = 4) -> str:
    groups = hosts_of(transfer.receivers, topology)
    texts = [f"{ranks_text(group)} ({topology.host_name(group[0])})" for group in groups[:most]]
    if len(groups) > most:
        texts.append(f"... {_count(len(groups) - most, 'host')} more")
    return ", ".join(texts)


# --- Words and tables, for the command line too ---------------------------------------------------


def table_lines(
    header: Sequence[str], rows: Iterable[Sequence[object]], align: str, total: int = 0
) -> list[str]:
    """Rows under a header, in columns.

    Args:
        header: a word per column.
        rows: what to show, each as long as the header.
        align: "<" or ">" per column.
        total: rows that there are; where fewer are given, a last line says how many more.
    """
    cells = [tuple(header), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  " + "  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)).rstrip()
        for row in cells
    ]
    hidden = total - (len(cells) - 1)
    return [*lines, f"  ... {hidden:,} more"] if hidden > 0 else lines


def nbytes_text(nbytes: int) -> str:
    """Bytes in binary units, three digits: ``"1.50 MiB"``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1):
        if nbytes < 1023.5 * 1024**power:
            return f"{_three_digits(nbytes / 1024**power)} {unit}"
    return f"{_three_digits(nbytes / 1024**5)} PiB"


def seconds_text(seconds: float) -> str:
    """Seconds in s, ms or us, three digits: ``"41.9 ms"``."""
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def ranks_text(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks in their order, runs written as ranges: ``"0-3,8,9"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts: list[str] = []
    for found in runs:
        texts += map(str, found) if len(found) < 3 else [f"{found[0]}-{found[-1]}"]
    return ",".join(texts[:most]) + (",..." if len(texts) > most else "")


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
