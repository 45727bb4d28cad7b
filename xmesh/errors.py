"""Every exception that xmesh raises, and the one shape of their texts.

A text names the rule that was broken, the values that broke it, the context (which rank, which
tensor) and a remedy, each on a line of its own, so that it can be read in a job's log.
"""

from __future__ import annotations


def explain(rule: str, *, values: str = "", context: str = "", remedy: str = "") -> str:
    """Compose an error text.

    Args:
        rule: what must hold, in one sentence.
        values: the values that break it; may span lines (a caret under a place, for example).
        context: rank, tensor, file: where it happened.
        remedy: what to do about it.

    Returns:
        The text: ``rule`` first, then one indented and labelled line for each part given.
    """
    lines = [rule]
    for label, part in (("values", values), ("context", context), ("remedy", remedy)):
        if part:
            head, *rest = part.split("\n")
            lines.append(f"  {label + ':':<9}{head}")
            lines.extend(f"{'':11}{line}" for line in rest)
    return "\n".join(lines)


class XmeshError(Exception):
    """Base of every error that the package raises."""


class MeshError(XmeshError, ValueError):
    """A rank grid that cannot be a DeviceMesh."""


class SpecError(XmeshError, ValueError):
    """A sharding spec that cannot be read, or that does not fit its mesh."""


class LayoutError(XmeshError, ValueError):
    """Mesh, spec and shape that do not fit together, or boxes that are no layout."""


class TopologyError(XmeshError, ValueError):
    """A rank without a host, or hosts that cannot be found out."""


class OptionError(XmeshError, ValueError):
    """An option, such as a time-out or a size, with a value that has no meaning."""


class PlanError(XmeshError, ValueError):
    """Two layouts, or options, for which there is no plan, or a plan that is not sound."""


class ScheduleError(XmeshError, ValueError):
    """A pipeline schedule, or its edges, that cannot be read or could not run."""


class ArrayError(XmeshError, ValueError):
    """An array handed in that disagrees with the layout, the dtype or the plan."""


class AgreementError(XmeshError):
    """Ranks that must call with the same plan did not."""


class PeerError(XmeshError):
    """Another rank could not take part in a transfer; its own error says why."""


class TransferTimeout(XmeshError, TimeoutError):
    """A wait ran out of time; the text names tensor, box, peer, host and bytes outstanding."""


class TransportError(XmeshError):
    """A transport that is not there, or that failed."""


class CallbackError(XmeshError):
    """A user's callback raised, or returned something wrong; the text names the action."""


class ClosedError(XmeshError):
    """Use of something after its ``close()``, or after a failure that closed it."""
