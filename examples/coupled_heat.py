"""A heat equation on one group of ranks, a spectrum of its field on another, at the same time.

    mpiexec -n 6 python examples/coupled_heat.py --steps 200 --size 256 --every 20

Four ranks solve du/dt = laplace(u) on a periodic square, cut by rows. Every few steps the field
goes to two other ranks, cut by columns, while the solver goes on. They transform along the columns,
reshard among themselves to rows, transform along the rows, and sum the power by wave number. At the
end a single process does all of it again, and the spectra must be equal.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import xmesh

Array = NDArray[Any]


def say(text: str) -> None:
    """Print a line in one piece, however many ranks print at the same time."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def initial_field(size: int, rows: slice) -> Array:
    """A few hot spots, at places without symmetry."""
    y, x = np.ogrid[rows, 0:size]
    spots = [(0.2, 0.3, 0.05), (0.5, 0.8, 0.1), (0.9, 0.1, 0.02), (0.7, 0.4, 0.03)]
    bumps = [np.exp(-((y / size - a) ** 2 + (x / size - b) ** 2) / w**2) for a, b, w in spots]
    field: Array = np.sum(bumps, axis=0)
    return field


def advance(field: Array, above: Array, below: Array) -> Array:
    """One explicit step on some rows, with the rows just above and below them."""
    padded = np.concatenate([above, field, below])
    sides = np.roll(field, 1, axis=1) + np.roll(field, -1, axis=1)
    stepped: Array = field + 0.2 * (padded[:-2] + padded[2:] + sides - 4 * field)
    return stepped


def power_by_wave_number(transformed: Array, rows: slice, size: int) -> Array:
    """Sum of |F|^2 over rings of wave numbers, for some rows of the transformed field."""
    k = np.fft.fftfreq(size, d=1 / size)
    ring = np.rint(np.hypot(k[rows, None], k[None, :])).astype(int)
    power = np.abs(transformed) ** 2
    return np.bincount(ring.ravel(), weights=power.ravel(), minlength=size)


def solve(
    args: argparse.Namespace, comm: MPI.Intracomm, rows: slice, field_moves: xmesh.Resharder
) -> float:
    """The solver group: a transfer is started, and ends while the next steps are computed.

    Returns the seconds for which transfers were waited for.
    """
    up, down = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    field = initial_field(args.size, rows)
    above, below = np.empty_like(field[:1]), np.empty_like(field[:1])
    snapshot = field.copy()  # what is sent must not change until the transfer is over
    request = field_moves.start(snapshot)
    waited_s = 0.0
    for step in range(1, args.steps + 1):
        comm.Sendrecv(field[-1:], down, recvbuf=above, source=up)
        comm.Sendrecv(field[:1], up, recvbuf=below, source=down)
        field = advance(field, above, below)
        request.test()  # lets the transfer move on
        if step % args.every == 0:
            began_s = time.perf_counter()
            request.wait()
            waited_s += time.perf_counter() - began_s
            snapshot[:] = field
            request = field_moves.start(snapshot)
    request.wait()
    return waited_s


def analyse(
    args: argparse.Namespace,
    comm: MPI.Intracomm,
    rows: slice,
    field_moves: xmesh.Resharder,
    turns: xmesh.Resharder,
) -> list[Array] | None:
    """The analysis group: a spectrum for each field that comes, on its first rank."""
    spectra = []
    frames = args.steps // args.every + 1
    request = field_moves.start()
    for frame in range(frames):
        columns = request.wait()
        if frame + 1 < frames:
            request = field_moves.start()  # the next field may come while we look at this one
        transformed = np.fft.fft(turns(np.fft.fft(columns, axis=0)), axis=1)
        power = power_by_wave_number(transformed, rows, args.size)
        total = comm.reduce(power, op=MPI.SUM)
        if total is not None:  # on rank 0
            spectra.append(total)
            low = total[1:4] / total.sum()
            say(
                f"step {frame * args.every:4d} of {args.steps}: power at wave numbers 1, 2, 3: "
                + "  ".join(f"{share:7.3%}" for share in low)
            )
    return spectra if comm.rank == 0 else None


def largest_difference(args: argparse.Namespace, spectra: list[Array]) -> float:
    """Largest relative difference to the same computation in one process."""
    everything = slice(0, args.size)
    difference = 0.0
    field = initial_field(args.size, everything)
    for step in range(args.steps + 1):
        if step % args.every == 0:
            wanted = power_by_wave_number(np.fft.fft2(field), everything, args.size)
            found = spectra[step // args.every]
            difference = max(difference, float(np.abs(found - wanted).max() / wanted.max()))
        field = advance(field, field[-1:], field[:1])
    return difference


def main() -> int:
    parser = argparse.ArgumentParser(description="A heat solver and a spectrum of its field.")
    parser.add_argument("--steps", type=int, default=200, help="time steps (200)")
    parser.add_argument("--size", type=int, default=256, help="rows and columns of the field (256)")
    parser.add_argument("--every", type=int, default=20, help="steps between two spectra (20)")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    if comm.size < 3:
        say("start it on 3 ranks or more: mpiexec -n 6 python examples/coupled_heat.py")
        return 2
    if args.size < comm.size or args.every < 1 or args.steps < 0:
        if comm.rank == 0:
            say("--size must be at least the number of ranks, --every 1, and --steps 0")
        return 2

    analysts = comm.size // 3
    solver_mesh = xmesh.DeviceMesh.arange((comm.size - analysts,))
    analysis_mesh = xmesh.DeviceMesh.arange((analysts,), start=solver_mesh.size)
    shape = (args.size, args.size)
    solver_rows = xmesh.Layout(solver_mesh, "S0 R", shape, uneven="balanced")
    columns = xmesh.Layout(analysis_mesh, "R S0", shape, uneven="balanced")
    rows = xmesh.Layout(analysis_mesh, "S0 R", shape, uneven="balanced")

    spectra: list[Array] | None = None
    waited_s = 0.0
    with xmesh.World(comm) as world:
        hand_over = xmesh.plan(solver_rows, columns, "float64", world.topology, name="field")
        turn = xmesh.plan(columns, rows, "complex128", world.topology, name="spectrum")
        solver_comm = world.communicator(solver_mesh)
        analysis_comm = world.communicator(analysis_mesh)
        # Made once, used for every field.
        with (
            xmesh.Resharder(hand_over, world) as field_moves,
            xmesh.Resharder(turn, world) as turns,
        ):
            if solver_comm is not None:
                (box,) = solver_rows.boxes(comm.rank)
                waited_s = solve(args, solver_comm, box.slices()[0], field_moves)
            if analysis_comm is not None:
                (box,) = rows.boxes(comm.rank)
                spectra = analyse(args, analysis_comm, box.slices()[0], field_moves, turns)
    waited_s = comm.allreduce(waited_s, op=MPI.MAX)
    if spectra is None:
        return 0
    say(f"the solver waited {waited_s * 1e3:.1f} ms in all for transfers to end")
    difference = largest_difference(args, spectra)
    right = difference < 1e-12
    say(
        f"{len(spectra)} spectra, largest relative difference to one process: {difference:.1e}: "
        + ("equal" if right else "WRONG")
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
