"""Simulate, check and draw pipeline schedules: what every rank does, in order, as the recipes' `schedule` returns it.

python tests/schedules.py          draw 06_pipeline/schedules.svg from the recipes' own schedules
python tests/schedules.py --full   check all of them against their formulas, for as many sizes as anyone has
"""

import inspect
import itertools
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from launch import ROOT, load

Operation = tuple[str, int, int]  # F, B or W, micro-batch, stage; also names the message that the operation sends
Duration = Mapping[str, float] | Callable[[str, int], float]  # of an operation: by its kind, or by kind and stage
PICTURE = ROOT / "06_pipeline" / "schedules.svg"
UNIT = {"F": 1.0, "B": 1.0, "W": 1.0}
EAGER = ("F", "B")


class Deadlock(Exception):
    """No rank can go on; the message says what each waits for."""


class Crossed(Deadlock):
    """The two ends of a channel disagree about which message is next: as messages carry no tag, a wrong one arrives."""


# ---------------------------------------------------------------------------------------------------------- pipeline
@dataclass(frozen=True)
class Pipeline:
    """What every rank does, in order, and where the stages are.

    place: the rank of every stage. depth: how many stages a micro-batch goes through, those from a multiple of depth to
    the next; DualPipe has two such pipelines, all others one. whole: B computes the gradients of the weights as well.
    """

    orders: tuple[tuple[Operation, ...], ...]
    place: tuple[int, ...]
    depth: int
    whole: bool

    def input(self, operation: Operation) -> Operation | None:
        """The operation of another stage whose output this one takes; None if it takes ids, the loss, or is a W."""
        op, i, stage = operation
        if op == "F" and stage % self.depth:
            return op, i, stage - 1
        if op == "B" and (stage + 1) % self.depth:
            return op, i, stage + 1
        return None

    def own(self, operation: Operation) -> Operation | None:
        """The operation of the same stage that must be done before: F before B, B before W."""
        op, i, stage = operation
        return None if op == "F" else ("FBW"["FBW".index(op) - 1], i, stage)

    def target(self, operation: Operation) -> int:
        """The rank that takes the output; the operation's own if no other does."""
        op, _, stage = operation
        if op == "F" and (stage + 1) % self.depth:
            return self.place[stage + 1]
        if op == "B" and stage % self.depth:
            return self.place[stage - 1]
        return self.place[stage]


def pipeline(module: ModuleType, ranks: int, microbatches: int, chunks: int = 2) -> Pipeline:
    """Build the pipeline of a recipe. chunks: stages per rank, for a recipe that leaves the choice."""
    chosen = [chunks] if "chunks" in inspect.signature(module.schedule).parameters else []
    place = module.place(ranks, *chosen) if hasattr(module, "place") else list(range(ranks))
    stages = [[stage for stage, rank in enumerate(place) if rank == mine] for mine in range(ranks)]
    orders = tuple(
        tuple((op, i, stages[rank][chunk[0] if chunk else 0]) for op, i, *chunk in order)
        for rank, order in enumerate(module.schedule(rank, ranks, *chosen, microbatches) for rank in range(ranks))
    )
    depth = ranks if Path(module.__file__).stem == "dualpipe" else len(place)
    return Pipeline(orders, tuple(place), depth, all(op != "W" for order in orders for op, _, _ in order))


# ---------------------------------------------------------------------------------------------------------- simulation
class Slot(NamedTuple):
    """An operation and when it runs."""

    rank: int
    op: str
    i: int
    stage: int
    start: float
    end: float


def simulate(pipeline: Pipeline, duration: Duration = UNIT, transfer: float = 0) -> list[Slot]:
    """Run every rank's list, in order, each operation as soon as what it needs is there; messages never block.

    A whole backward takes the durations of B and W. transfer: time from the end of an operation until another rank has
    its output. Raises Deadlock if an operation can't run.
    """
    length = duration if callable(duration) else lambda op, stage: duration[op]
    ends: dict[Operation, float] = {}
    slots, position, free = [], [0] * len(pipeline.orders), [0.0] * len(pipeline.orders)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(pipeline.orders):
            while position[rank] < len(order):
                op, i, stage = operation = order[position[rank]]
                needed, own, start = pipeline.input(operation), pipeline.own(operation), free[rank]
                if needed and needed not in ends or own and own not in ends:
                    break
                if needed:
                    start = max(start, ends[needed] + (transfer if pipeline.place[needed[2]] != rank else 0))
                end = start + length(op, stage)
                if op == "B" and pipeline.whole:
                    end += length("W", stage)
                free[rank] = ends[operation] = end
                slots.append(Slot(rank, op, i, stage, start, end))
                position[rank] += 1
                progress = True
    waiting = {r: order[n] for r, (order, n) in enumerate(zip(pipeline.orders, position)) if n < len(order)}
    if waiting:
        raise Deadlock("; ".join(f"rank {rank} waits for what {name(waits)} needs" for rank, waits in waiting.items()))
    return slots


def name(operation: Operation) -> str:
    """An operation in words."""
    op, i, stage = operation
    return f"{op} of micro-batch {i} on stage {stage}"


def makespan(slots: list[Slot]) -> float:
    """When the last operation ends."""
    return max(slot.end for slot in slots)


def idle(slots: list[Slot]) -> list[float]:
    """Time, of every rank, from 0 to the makespan in which it has nothing to do."""
    spare = [makespan(slots)] * (1 + max(slot.rank for slot in slots))
    for slot in slots:
        spare[slot.rank] -= slot.end - slot.start
    return spare


def idle_share(slots: list[Slot]) -> float:
    """Share of ranks x makespan in which a rank has nothing to do."""
    return sum(idle(slots)) / (makespan(slots) * len(idle(slots)))


def in_flight(pipeline: Pipeline, until: str = "W") -> list[int]:
    """Most chunks of a rank, counted once per micro-batch, that have been forward and not yet through `until`, B or W."""
    last, peaks = "B" if pipeline.whole else until, []
    for order in pipeline.orders:
        steps = ((op == "F") - (op == last) for op, _, _ in order)
        peaks.append(max(itertools.accumulate(steps, initial=0)))
    return peaks


# ---------------------------------------------------------------------------------------------------------- transport
def one_way(op: str, source: int, target: int) -> Hashable:
    """A communicator of its own for every operation, source and target: as many as there are channels."""
    return op, source, target


def rendezvous(pipeline: Pipeline, communicators: Callable[[str, int, int], Hashable] = one_way) -> None:
    """Run every rank's list as run_schedule does, over a transport that stores nothing. Raise Deadlock or Crossed.

    A message passes when its sender and its receiver have both started it, each after all it had started before on
    the same communicator. communicators(op, source, target): which one carries the messages of a channel.
    """
    has: list[set[Operation]] = [set() for _ in pipeline.orders]  # results on a rank: its own, and received
    queues = defaultdict(deque)  # (communicator, rank) -> the transfers it has started, as (operation, source, target)

    def start(operation: Operation, source: int, target: int, here: int) -> None:
        """Queue one end of a transfer on the rank `here`, and let pass what can."""
        if source == target:
            return
        communicator = communicators(operation[0], source, target)
        queues[communicator, here].append((operation, source, target))
        look = [here]
        while look:
            queue = queues[communicator, look.pop()]
            if not queue:
                continue
            message, *ends = queue[0]
            other = [queues[communicator, rank] for rank in ends]
            if not all(other):
                continue
            if other[0][0] == other[1][0]:
                has[ends[1]].add(message)
                other[0].popleft(), other[1].popleft()
                look += ends
            elif other[0][0][1:] == other[1][0][1:]:
                sent, expected = (name(queue[0][0]) for queue in other)
                raise Crossed(f"rank {ends[0]} sends {sent}, rank {ends[1]} expects {expected}")

    def run(rank: int) -> Iterator[tuple[Operation, int]]:
        """The life of a rank: yields (operation, rank) where it waits for that operation's result to be there."""
        outputs, gradients = {}, []
        for operation in pipeline.orders[rank]:
            needed, own, target = pipeline.input(operation), pipeline.own(operation), pipeline.target(operation)
            if needed:
                start(needed, pipeline.place[needed[2]], rank, rank)
                yield needed, rank
            if own:
                yield own, rank
            if operation[0] == "B":
                yield own, outputs.pop(own)  # the output is let go: it must have been sent
            has[rank].add(operation)
            start(operation, rank, target, rank)
            if operation[0] == "F":
                outputs[operation] = target
            if operation[0] == "B":
                gradients.append((operation, target))
                if len(gradients) > 2:
                    yield gradients.pop(0)
        yield from [*gradients, *outputs.items()]

    lives = {rank: run(rank) for rank in range(len(pipeline.orders))}
    waits: dict[int, tuple[Operation, int] | None] = dict.fromkeys(lives)
    progress = True
    while progress:
        progress = False
        for rank in list(lives):
            while rank in lives and (waits[rank] is None or waits[rank][0] in has[waits[rank][1]]):
                progress = True
                waits[rank] = next(lives[rank], None)
                if waits[rank] is None:
                    del lives[rank], waits[rank]
    if waits:
        raise Deadlock("; ".join(f"rank {r} waits for {name(what)} to reach rank {at}" for r, (what, at) in waits.items()))
