"""Simulate and check pipeline schedules: what every rank does, in order, as the recipes' `schedule` returns it.

Durations of operations are equal, or those that bench.py has measured. pictures.py draws the result.
"""

import inspect
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

Operation = tuple[str, int, int]  # (F, B or W, micro-batch, stage); it also names the message with its output
PEER_TO_PEER = 135e9  # bytes per second of a message of 16 MiB: the ring of 02_data_parallel/collectives.py
UNIT = {"F": 1, "B": 1, "W": 1}
ATTENTION = {"F": 1, "B": 1.25, "W": 0.75}  # attention costs B more than F, and W nothing
QUICK = [(p, m) for p in (1, 2, 3, 4, 8, 16) for m in sorted({p, p + 1, 2 * p, 4 * p, 64})]  # (ranks, micro-batches)
FULL = [(p, m) for p in range(1, 17) for m in sorted({*range(1, 18), 2 * p, 2 * p + 1, 3 * p, 4 * p, 64})]


class Deadlock(Exception):
    """No rank can go on, or the ends of a channel disagree about its next message, which would be taken for another."""


# ---------------------------------------------------------------------------------------------------------- pipeline
@dataclass(frozen=True)
class Pipeline:
    """What every rank does, in order, and where the stages are.

    place: the rank of every stage. A micro-batch goes through `depth` stages, from one whose number is a multiple of
    depth to the last before the next such; DualPipe has two pipelines of this kind, all others have one.
    whole: B computes the weight gradients as well, there is no W. under_way: gradients that a rank may have sent and
    that are not taken yet, before it waits.
    """

    orders: tuple[tuple[Operation, ...], ...]
    place: tuple[int, ...]
    depth: int
    whole: bool
    under_way: int

    def takes(self, operation: Operation) -> Operation | None:
        """The operation of a neighbouring stage whose output this one needs, if there is one."""
        op, i, stage = operation
        if op == "F" and stage % self.depth > 0:
            return op, i, stage - 1
        if op == "B" and stage % self.depth < self.depth - 1:
            return op, i, stage + 1
        return None

    def follows(self, operation: Operation) -> Operation | None:
        """The operation of its own stage that must be done before: F before B, B before W."""
        op, i, stage = operation
        return None if op == "F" else ("F" if op == "B" else "B", i, stage)

    def target(self, operation: Operation) -> int:
        """The rank that takes the output; the operation's own if there is none."""
        op, _, stage = operation
        if op == "F" and stage % self.depth < self.depth - 1:
            return self.place[stage + 1]
        if op == "B" and stage % self.depth > 0:
            return self.place[stage - 1]
        return self.place[stage]


def pipeline(module: ModuleType, ranks: int, microbatches: int, chunks: int = 2) -> Pipeline:
    """Build the pipeline of a recipe. chunks: stages per rank, where the recipe has that choice."""
    chosen = (chunks,) if "chunks" in inspect.signature(module.schedule).parameters else ()
    there, name = [*range(ranks)], Path(module.__file__).stem
    ways = {"interleaved": there * chunks, "zbv": there + there[::-1], "dualpipe": there + there[::-1]}
    place, orders = tuple(ways.get(name, there)), []
    for rank in range(ranks):
        stages = [stage for stage, owner in enumerate(place) if owner == rank]  # by chunk
        order = module.schedule(rank, ranks, *chosen, microbatches)
        orders.append(tuple((op, i, stages[chunk[0] if chunk else 0]) for op, i, *chunk in order))
    depth = ranks if name == "dualpipe" else len(place)
    whole = all(op != "W" for order in orders for op, _, _ in order)
    return Pipeline(tuple(orders), place, depth, whole, ranks if name in ways else 2)


def words(operation: Operation) -> str:
    """Name an operation, or its output, in a message."""
    op, i, stage = operation
    return f"{op} of micro-batch {i} on stage {stage}"


# -------------------------------------------------------------------------------------------------------- simulation
class Slot(NamedTuple):
    """An operation of a rank and when it runs, in the units of `duration`."""

    rank: int
    op: str
    i: int
    stage: int
    start: float
    end: float


def simulate(
    pipeline: Pipeline, duration: dict[str, float] | Callable[[str, int], float] = UNIT, transfer: float = 0
) -> list[Slot]:
    """Run every rank's list in order, each operation as soon as its input is there; sends never block.

    duration: of F, B and W, or a function of operation and stage; a whole backward takes as long as B and W.
    """
    cost = duration if callable(duration) else lambda op, stage: duration[op]
    left = [deque(order) for order in pipeline.orders]
    ends, free, slots, awake = {}, [0.0] * len(left), [], deque(range(len(left)))
    while awake:
        rank = awake.popleft()
        while left[rank]:
            op, i, stage = operation = left[rank][0]
            taken, before = pipeline.takes(operation), pipeline.follows(operation)
            if (taken and taken not in ends) or (before and before not in ends):
                break  # the rank that has it wakes this one
            arrival = ends[taken] + transfer * (pipeline.place[taken[2]] != rank) if taken else 0
            start = max(free[rank], arrival)
            end = start + cost(op, stage) + (cost("W", stage) if op == "B" and pipeline.whole else 0)
            free[rank] = ends[operation] = end
            slots.append(Slot(rank, op, i, stage, start, end))
            left[rank].popleft()
            if (target := pipeline.target(operation)) != rank:
                awake.append(target)
    if any(left):
        raise Deadlock(f"these cannot run: {', '.join(words(order[0]) for order in left if order)}")
    return slots


def makespan(slots: list[Slot]) -> float:
    """Return when the last operation ends; the first starts at 0."""
    return max(slot.end for slot in slots)


def idle(slots: list[Slot]) -> list[float]:
    """Return for how much of the makespan each rank has nothing to do."""
    waiting = [makespan(slots)] * (1 + max(slot.rank for slot in slots))
    for slot in slots:
        waiting[slot.rank] -= slot.end - slot.start
    return waiting


def idle_share(slots: list[Slot]) -> float:
    """Return the share of ranks x makespan in which a rank has nothing to do."""
    waiting = idle(slots)
    return sum(waiting) / (len(waiting) * makespan(slots))


def in_flight(pipeline: Pipeline, until: str = "W") -> list[int]:
    """Return each rank's peak of forwards that wait for their W, or for their B: micro-batches x chunks."""
    last = "B" if pipeline.whole else until
    changes = [[(op == "F") - (op == last) for op, _, _ in order] for order in pipeline.orders]
    return [max(itertools.accumulate(change)) for change in changes]


# --------------------------------------------------------------------------------------------------------- transport
def per_direction(op: str, source: int, target: int) -> Hashable:
    """Share communicators as `connect` of the recipes does: all ranks one per operation and direction."""
    return op, source < target


def steps(pipeline: Pipeline, rank: int) -> Iterator[tuple[str, Operation, int]]:
    """Yield what run_schedule does on a rank, as (what, operation, rank).

    "start": its end of the transfer of the operation's output to that rank. "wait": until the output is on that rank.
    "run": the operation itself.
    """
    outputs, gradients = {}, []  # sent to which rank
    for operation in pipeline.orders[rank]:
        taken, before, target = pipeline.takes(operation), pipeline.follows(operation), pipeline.target(operation)
        if taken and pipeline.place[taken[2]] != rank:
            yield "start", taken, rank
        for need in filter(None, (taken, before)):
            yield "wait", need, rank
        if operation[0] == "B":
            yield "wait", before, outputs.pop(before, rank)  # B frees the output of F: it must have left
        yield "run", operation, rank
        if target != rank:
            yield "start", operation, target
        if operation[0] == "F":
            outputs[operation] = target
        elif operation[0] == "B":
            gradients.append((operation, target))
        if len(gradients) > pipeline.under_way:
            yield "wait", *gradients.pop(0)
    for sent in [*gradients, *outputs.items()]:
        yield "wait", *sent


def rendezvous(pipeline: Pipeline, communicators: Callable[[str, int, int], Hashable] = per_direction) -> list[float]:
    """Run every rank's list as run_schedule does, with a transport that stores nothing; return each rank's idle time.

    communicators(op, source, target): which one carries the outputs of op. A message passes, in no time, when both its
    ends have been started, and all that either rank has started before on that communicator has passed.
    """
    left = [deque(steps(pipeline, rank)) for rank in range(len(pipeline.orders))]
    clock, busy = [0.0] * len(left), [0.0] * len(left)
    arrived = {}  # when an output came to a rank: (operation, rank) -> time
    queues = defaultdict(deque)  # by communicator and rank: ((operation, source, target), when) of transfers it started
    progress = True
    while progress:
        progress = False
        for rank, todo in enumerate(left):
            while todo and (todo[0][0] != "wait" or todo[0][1:] in arrived):
                what, operation, where = todo.popleft()
                progress = True
                if what == "wait":
                    clock[rank] = max(clock[rank], arrived[operation, where])
                elif what == "run":
                    time = 2 if operation[0] == "B" and pipeline.whole else 1
                    busy[rank] += time
                    clock[rank] = arrived[operation, rank] = clock[rank] + time
                else:
                    source = pipeline.place[operation[2]]
                    communicator = communicators(operation[0], source, where)
                    queues[communicator, rank].append(((operation, source, where), clock[rank]))
        for communicator, rank in list(queues):
            progress |= let_pass(queues, communicator, rank, arrived)
    if any(left):
        waits = [(rank, *todo[0][1:]) for rank, todo in enumerate(left) if todo]
        raise Deadlock("; ".join(f"rank {r} waits for {words(what)} to reach rank {to}" for r, what, to in waits))
    return [max(clock) - time for time in busy]


def let_pass(queues: dict, communicator: Hashable, rank: int, arrived: dict[tuple[Operation, int], float]) -> bool:
    """Pass the messages that are next on a rank and that it sends, while they are next on the other end, too."""
    sender, passed = queues[communicator, rank], False
    while sender and sender[0][0][1] == rank:
        (operation, _, target), start = sender[0]
        receiver = queues[communicator, target]
        if not receiver or receiver[0][0][1:] != (rank, target):
            break
        (expected, *_), ready = receiver[0]
        if operation != expected:
            raise Deadlock(f"rank {rank} sends {words(operation)}, rank {target} expects {words(expected)}")
        arrived[operation, target] = max(start, ready)  # the next one is not earlier: both ranks' clocks only go on
        sender.popleft()
        receiver.popleft()
        passed = True
    return passed


# ------------------------------------------------------------------------------------------------------------ claims
@dataclass(frozen=True)
class Claim:
    """A schedule as its recipe's header describes it and its picture shows it.

    p: ranks, r: rank, m: micro-batches, v: chunks. idle(p, F, B, W): of each rank, from the times of a stage's
    operations, W <= F <= B <= 2W. flight(p, r, m, v): peak of forwards that wait for their W, sooner(...): for their B,
    if that differs. enough(p, m): these two hold. allowed(p, m): the schedule exists.
    """

    title: str
    idle: Callable[[int, float, float, float], float]
    flight: Callable[[int, int, int, int], int]
    sooner: Callable[[int, int, int, int], int] | None = None
    enough: Callable[[int, int], bool] = lambda p, m: True
    allowed: Callable[[int, int], bool] = lambda p, m: True
    whole: bool = False  # backward is one operation
    size: float = 1  # layers of a stage in the picture, in layers / p


CLAIMS = {
    "06_pipeline/afab.py": Claim(
        "AFAB", idle=lambda p, F, B, W: (p - 1) * (F + B + W), flight=lambda p, r, m, v: m, whole=True
    ),
    "06_pipeline/1f1b.py": Claim(
        "1F1B", idle=lambda p, F, B, W: (p - 1) * (F + B + W), flight=lambda p, r, m, v: min(m, p - r), whole=True
    ),
    "06_pipeline/interleaved.py": Claim(
        "Interleaved, 2 chunks",
        idle=lambda p, F, B, W: (p - 1) * (F + B + W),
        flight=lambda p, r, m, v: min(m * v, (p - 1 - r) * min(v, 2) + (v - 1) * p + 1),
        allowed=lambda p, m: m % p == 0,
        whole=True,
        size=0.5,
    ),
    "06_pipeline/split_backward.py": Claim(
        "1F1B, backward split", idle=lambda p, F, B, W: (p - 1) * (F + B), flight=lambda p, r, m, v: min(m, p - r)
    ),
    "06_pipeline/zero_bubble.py": Claim(
        "Zero bubble (ZB-H1)",
        idle=lambda p, F, B, W: (p - 1) * (F + B - W),
        flight=lambda p, r, m, v: min(m, p),
        sooner=lambda p, r, m, v: min(m, p - r),
        enough=lambda p, m: m >= p,
    ),
    "06_pipeline/zbv.py": Claim(
        "Zero bubble in a V (ZBV), 2 chunks",
        idle=lambda p, F, B, W: (p - 1) * B,
        flight=lambda p, r, m, v: 2 * p,
        enough=lambda p, m: m >= 2 * p - 1,
        size=0.5,
    ),
    "06_pipeline/dualpipe.py": Claim(
        "DualPipe, 2 directions",
        idle=lambda p, F, B, W: (p // 2 - 1) * (F + B - W) + max(0, (p // 2 - 1) * (B - F) - F),
        flight=lambda p, r, m, v: p + 1,
        enough=lambda p, m: m >= 2 * p and m % 2 == 0,
        allowed=lambda p, m: p % 2 == 0,
    ),
}


def check(module: ModuleType, sizes: Iterable[tuple[int, int]] = QUICK) -> None:
    """Assert what the recipe's header says, for all sizes (ranks, micro-batches) that it allows.

    Every operation once; idle time; micro-batches in flight; smaller ones do not hang without buffers in the transport.
    """
    claim = CLAIMS[f"06_pipeline/{Path(module.__file__).name}"]
    chunks = (1, 2, 3, 4) if "chunks" in inspect.signature(module.schedule).parameters else [1]
    sizes = [(p, m) for p, m in sizes if claim.allowed(p, m)]
    assert sizes, "the recipe allows none of these sizes"
    for (p, m), v in itertools.product(sizes, chunks):
        line = pipeline(module, p, m, v)
        assert line.whole == claim.whole
        first = m if line.depth == len(line.place) else (m + 1) // 2  # of the micro-batches of the other direction
        for rank, order in enumerate(line.orders):
            stages = [stage for stage, owner in enumerate(line.place) if owner == rank]
            visits = [(i, s) for s in stages for i in (range(first) if s < line.depth else range(first, m))]
            every = [(op, *visit) for op in ("FB" if claim.whole else "FBW") for visit in visits]
            assert sorted(order) == sorted(every), f"{p} ranks, {m} micro-batches: rank {rank} does {order}"
        for cost in UNIT, ATTENTION:
            found, expected = idle(simulate(line, cost)), claim.idle(p, **cost)
            if claim.enough(p, m):
                assert all(abs(time - expected) < 1e-9 for time in found), (p, m, v, cost, found, expected)
        if claim.enough(p, m):
            for until, formula in ("W", claim.flight), ("B", claim.sooner or claim.flight):
                found, expected = in_flight(line, until), [formula(p, rank, m, v) for rank in range(p)]
                assert found == expected, (p, m, v, until, found, expected)
        if p <= 8 and m <= 4 * p:
            waiting = rendezvous(line)
            if claim.enough(p, m):  # waiting for sent gradients to be taken costs nothing
                assert all(abs(time - claim.idle(p, **UNIT)) < 1e-9 for time in waiting), (p, m, v, waiting)
