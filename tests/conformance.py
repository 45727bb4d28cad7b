"""What every transport must do, whatever memory the arrays lie in: cases over a *world* of ranks.

A world says which ranks run in this process, where their arrays lie, and how to call a resharder.
Everything is checked against oracle.py, with guard elements around all arrays that a caller makes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import draws
import ml_dtypes
import numpy as np
import oracle

import xmesh
from xmesh import Box, DeviceMesh, Layout, Plan, Resharder
from xmesh.planner import STRATEGIES

#: Of the double; a real CuPy has none.
engine: Any = getattr(cupy, "_engine", None)

#: Elements of 1, 2, 3, 4, 8, 12 and 16 bytes, some of them of types that only other libraries name.
DTYPES: tuple[Any, ...] = (
    *("?", "u1", "<f2", "V3", "<f4", "<f8", "<c16", [("a", "<f8"), ("b", "<i4")], "S5"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
)


class World:
    """Ranks, and how they are called.

    Attributes:
        ranks: those that run in this process.
        size: how many there are in all.
    """

    ranks: Sequence[int]
    size: int

    def on_device(self, rank: int) -> bool:
        """Where the arrays of a rank lie."""
        raise NotImplementedError

    def resharder(self, plan: Plan, **options: Any) -> Resharder:
        raise NotImplementedError

    def start(self, reshard: Resharder, local: dict[int, Any], out: dict[int, Any]) -> Any:
        """Begin a call with the arguments of this process's ranks."""
        raise NotImplementedError

    def results(self, request: Any) -> dict[int, Any]:
        """Wait for a call: what its ranks get."""
        raise NotImplementedError

    def together(self, problem: str) -> None:
        """Fail on all ranks, if any has a problem."""
        raise NotImplementedError


class Loopback(World):
    """All ranks in this process."""

    def __init__(self, size: int, device: bool) -> None:
        self.ranks, self.size, self._device = range(size), size, device

    def on_device(self, rank: int) -> bool:
        return self._device

    def resharder(self, plan: Plan, **options: Any) -> Resharder:
        return Resharder(plan, like=cupy if self._device else None, **options)

    def start(self, reshard: Resharder, local: dict[int, Any], out: dict[int, Any]) -> Any:
        return reshard.start(local, out)

    def results(self, request: Any) -> dict[int, Any]:
        results: dict[int, Any] = request.wait()
        return results

    def together(self, problem: str) -> None:
        assert not problem, problem


class OverMpi(World):
    """A rank of a communicator.

    Args:
        comm: the communicator.
        transport: "mpi" or "nccl".
        on_device: of each rank.
    """

    def __init__(self, comm: Any, transport: str, on_device: Callable[[int], bool]) -> None:
        self.ranks, self.size, self._comm = (comm.rank,), comm.size, comm
        self._transport, self._on_device = transport, on_device

    def on_device(self, rank: int) -> bool:
        return self._on_device(rank)

    def resharder(self, plan: Plan, **options: Any) -> Resharder:
        (rank,) = self.ranks
        like = cupy if self.on_device(rank) else None
        options = {"timeout_s": 45, "transport": self._transport, "like": like, **options}
        return Resharder(plan, self._comm, **options)

    def start(self, reshard: Resharder, local: dict[int, Any], out: dict[int, Any]) -> Any:
        (rank,) = self.ranks
        return reshard.start(local.get(rank), out.get(rank))

    def results(self, request: Any) -> dict[int, Any]:
        (rank,) = self.ranks
        result = request.wait()
        return {} if result is None else {rank: result}

    def together(self, problem: str) -> None:
        draws.together(self._comm, problem)


class Held:
    """An array inside guard elements, in the memory of the host or of the GPU.

    Attributes:
        array: what is passed to a call.
    """

    def __init__(self, made: oracle.Guarded, device: bool) -> None:
        self._made, self._bytes = made, None
        self.array: Any = made.view
        if device:
            view, buffer = made.view, made.buffer
            self._bytes = cupy.asarray(_bytes(buffer))
            offset = view.ctypes.data - buffer.ctypes.data if view.size else 0
            memory = self._bytes.data + offset
            self.array = cupy.ndarray(view.shape, view.dtype, memory, view.strides)

    def fetch(self) -> oracle.Guarded:
        """As it is now, on the host."""
        if self._bytes is not None:
            _bytes(self._made.buffer)[:] = self._bytes.get()
        return self._made

    def unchanged(self) -> bool:
        made = self.fetch()
        return made.buffer.tobytes() == made.before.tobytes()


def _bytes(buffer: Any) -> Any:
    return buffer.reshape(-1).view(np.uint8)


def on_host(array: Any) -> Any:
    """A result as NumPy's array, with the bytes between its fields."""
    if not isinstance(array, cupy.ndarray):
        return array
    return array.view(np.dtype((np.void, array.dtype.itemsize))).get().view(array.dtype)


class Call:
    """Arguments of the ranks of this process, and what must come of them.

    Args:
        world: whose ranks.
        plan: what is called.
        seed: of the data, and of how arrays lie in memory.
        out: whether outputs are passed; None for now and then.
    """

    def __init__(self, world: World, plan: Plan, seed: int = 0, out: bool | None = None) -> None:
        self.world, self.plan = world, plan
        array = oracle.whole(plan.src.shape, plan.dtype, seed)
        self.sources: dict[int, list[Held]] = {}
        self.outs: dict[int, list[Held]] = {}
        self.wanted: dict[int, list[Any]] = {}
        for rank in world.ranks:
            device = world.on_device(rank)
            memory = oracle.MEMORY[(rank + seed) % 5]
            held = oracle.held(array, plan.src, rank)
            if held:
                copies = [oracle.guarded_copy(a, memory) for a in held]
                self.sources[rank] = [Held(made, device) for made in copies]
            wanted = oracle.held(array, plan.dst, rank)
            if wanted:
                self.wanted[rank] = wanted
                if seed % 3 != 1 if out is None else out:
                    memory = oracle.MEMORY[(rank + 2 * seed) % 5]
                    empty = [oracle.guarded(a.shape, a.dtype, memory) for a in wanted]
                    self.outs[rank] = [Held(made, device) for made in empty]
        self.local, self.out = (
            {rank: oracle.as_argument([made.array for made in each]) for rank, each in held.items()}
            for held in (self.sources, self.outs)
        )

    def start(self, reshard: Resharder) -> Any:
        return self.world.start(reshard, self.local, self.out)

    def problem(self, request: Any) -> str:
        """Wait; what is wrong with what came, "" if nothing."""
        results = self.world.results(request)
        if results.keys() != self.wanted.keys():
            return f"results of ranks {sorted(results)}, wanted those of {sorted(self.wanted)}"
        for rank, result in results.items():
            problem = self._of_rank(rank, result)
            if problem:
                return f"rank {rank}: {problem}\n{self.plan}"
        return ""

    def _of_rank(self, rank: int, result: Any) -> str:
        arrays = oracle.as_arrays(result)
        kind = cupy.ndarray if self.world.on_device(rank) else np.ndarray
        if not all(isinstance(array, kind) for array in arrays):
            return f"arrays of {', '.join(type(array).__name__ for array in arrays)}"
        if not all(made.unchanged() for made in self.sources.get(rank, ())):
            return "an input changed"
        if rank in self.out:
            if result is not self.out[rank]:
                return "the result is not out"
            fetched = [made.fetch() for made in self.outs[rank]]
            if not all(made.intact() for made in fetched):
                return "elements around an output changed"
            return oracle.difference([made.view for made in fetched], self.wanted[rank])
        return oracle.difference([on_host(array) for array in arrays], self.wanted[rank])


def run(world: World, plan: Plan, calls: int = 2, seed: int = 0) -> None:
    """Make a resharder, and call it."""
    problem = ""
    with world.resharder(plan, staging_nbytes=[0, 1000, 1 << 26][seed % 3]) as reshard:
        for i in range(calls):
            call = Call(world, plan, seed + i)
            problem = problem or call.problem(call.start(reshard))
    world.together(problem)


def rows_to_all(world: World, shape: tuple[int, ...] = (6, 5), **options: Any) -> Plan:
    """From rows on each rank to everything on each rank: everyone sends and receives."""
    mesh = DeviceMesh.arange((world.size,))
    rest = " R" * (len(shape) - 1)
    src, dst = Layout(mesh, f"S0{rest}", shape), Layout(mesh, f"R{rest}", shape)
    return xmesh.plan(src, dst, **{"dtype": "<f4", "scheduler": "naive", **options})


# The cases.


def random_pairs(world: World, strategy: str, count: int) -> None:
    """Layouts by specs and by boxes, of disjoint ranks, overlapping ones, and the same."""
    rng = np.random.default_rng([world.size, len(strategy)])
    for i in range(count):
        plan = draws.plan(rng, world.size, strategy=strategy, scheduler="naive")
        run(world, plan, seed=i)


def every_dtype(world: World) -> None:
    for i, dtype in enumerate(DTYPES):
        mesh = DeviceMesh.arange((world.size,))
        shape = (2 * world.size + 1, 7)
        src, dst = Layout(mesh, "S0 R", shape), Layout(mesh, "R S0", shape)
        strategy = STRATEGIES[i % len(STRATEGIES)]
        plan = xmesh.plan(src, dst, dtype, scheduler="naive", strategy=strategy)
        run(world, plan, calls=3, seed=i)


def boxes_without_elements(world: World) -> None:
    """Fewer rows than ranks; and arrays with no element at all."""
    for shape in ((max(1, world.size - 1), 3), (0, 3), (3, 0), ()):
        run(world, rows_to_all(world, shape) if shape else _scalar(world), calls=3)


def _scalar(world: World) -> Plan:
    layout = Layout(DeviceMesh([0]), "", ())
    return xmesh.plan(layout, Layout(DeviceMesh.arange((world.size,)), "", ()), "<f8")


def several_boxes_per_rank(world: World) -> None:
    """Rows in turn, to columns in turn."""
    rows, columns = 2 * world.size + 1, 3 * world.size
    by_row: dict[int, list[Box]] = {rank: [] for rank in range(world.size)}
    by_column: dict[int, list[Box]] = {rank: [] for rank in range(world.size)}
    for i in range(rows):
        by_row[i % world.size].append(Box((i, 0), (i + 1, columns)))
    for i in range(columns):
        by_column[-i % world.size].append(Box((0, i), (rows, i + 1)))
    shape = (rows, columns)
    src, dst = Layout.from_boxes(by_row, shape), Layout.from_boxes(by_column, shape)
    for strategy in STRATEGIES:
        run(world, xmesh.plan(src, dst, "<i2", scheduler="naive", strategy=strategy), calls=3)


def ranks_in_neither_mesh(world: World) -> None:
    """They get nothing, and need not make it."""
    src, dst = Layout(DeviceMesh([0]), "R", (5,)), Layout(DeviceMesh([world.size - 1]), "R", (5,))
    run(world, xmesh.plan(src, dst, "<i4"), calls=3)


def several_in_flight(world: World) -> None:
    """Of two resharders in turns, waited for in another order."""
    plans = [rows_to_all(world), rows_to_all(world, (7, 3), dtype="<f8", name="other")]
    reshards = [world.resharder(plan) for plan in plans]
    problem = ""
    for turn in range(2):
        calls = [Call(world, plans[i % 2], 10 * turn + i) for i in range(6)]
        requests = [call.start(reshards[i % 2]) for i, call in enumerate(calls)]
        for i in (3, 0, 5, 1, 4, 2):
            problem = problem or calls[i].problem(requests[i])
    for reshard in reshards:
        reshard.close()
    world.together(problem)


def more_in_flight_than_there_are_tags(world: World) -> None:
    plan = rows_to_all(world, (2, 3))
    problem = ""
    with world.resharder(plan) as reshard:
        calls = [Call(world, plan, seed) for seed in range(40)]
        requests = [call.start(reshard) for call in calls]
        for call, request in zip(calls, requests, strict=True):
            problem = problem or call.problem(request)
    world.together(problem)


def repeated_calls_stay_flat(world: World, calls: int = 100) -> None:
    """Device memory neither grows from call to call nor from resharder to resharder."""
    plan = rows_to_all(world, (world.size, 16), chunk_nbytes=32)
    problem = ""
    seen = []
    for count in (calls, calls // 5, calls // 5):
        with world.resharder(plan) as reshard:
            for i in range(count):
                call = Call(world, plan, seed=i % 5, out=i % 2 == 0)
                request = call.start(reshard)
                if i % 10 == 0:
                    problem = problem or call.problem(request)
                else:
                    world.results(request)
                del call, request
                if i in (count // 2, count - 1):
                    gc.collect()
                    seen.append(engine.allocated_nbytes(0))
        del reshard
        gc.collect()
        seen.append(engine.allocated_nbytes(0))
    # The slots of a resharder are there while it is open.
    if len(set(seen[0:2])) > 1 or seen[0:3] != seen[3:6] or seen[3:6] != seen[6:9]:
        problem = problem or f"memory of the device: {seen}"
    world.together(problem)


def a_slow_producer(world: World) -> None:
    """What a stream writes late is what is sent, if the call is made in that stream."""
    plan = rows_to_all(world, (2 * world.size, 4))
    problem = ""
    with world.resharder(plan) as reshard:
        for seed in range(3):
            call, stream = Call(world, plan, seed), cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.Stream.null.synchronize()
            late = {rank: [made.array.copy() for made in e] for rank, e in call.sources.items()}
            for arrays in call.sources.values():
                for made in arrays:
                    made.array[...] = 0
            cupy.cuda.Stream.null.synchronize()
            with stream:
                engine.delay(stream.ptr, 0.2)
                for rank, arrays in call.sources.items():
                    for made, new in zip(arrays, late[rank], strict=True):
                        made.array[...] = new
                request = call.start(reshard)
            problem = problem or call.problem(request)
    world.together(problem)


def a_slow_consumer(world: World) -> None:
    """What still reads ``out`` in the stream of the call sees what was there before it."""
    plan = rows_to_all(world, (2 * world.size, 4))
    problem = ""
    with world.resharder(plan) as reshard:
        for seed in (0, 2, 3):
            call, stream = Call(world, plan, seed, out=True), cupy.cuda.Stream(non_blocking=True)
            for arrays in call.outs.values():
                for made in arrays:
                    made.array[...] = -7
            cupy.cuda.Stream.null.synchronize()
            with stream:
                engine.delay(stream.ptr, 0.2)
                before = [made.array.copy() for each in call.outs.values() for made in each]
                request = call.start(reshard)
            problem = problem or call.problem(request)
            if not all((array.get(stream) == -7).all() for array in before):
                problem = problem or "out was written before its reader had read it"
    world.together(problem)


Case = Callable[[World], None]
CASES: tuple[Case, ...] = (
    *(every_dtype, boxes_without_elements, several_boxes_per_rank, ranks_in_neither_mesh),
    *(several_in_flight, more_in_flight_than_there_are_tags),
)
ON_DEVICES: tuple[Case, ...] = (repeated_calls_stay_flat, a_slow_producer, a_slow_consumer)
