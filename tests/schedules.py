"""Simulate and draw pipeline schedules: lists of (op, micro-batch), one per stage, as `schedule` returns them.

python tests/schedules.py        draw 06_pipeline/schedules.svg from the recipes' own schedules
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from launch import ROOT, load

Operation = tuple[str, int]
PICTURE = ROOT / "06_pipeline" / "schedules.svg"
RECIPES = {"AFAB": "06_pipeline/afab.py", "1F1B": "06_pipeline/1f1b.py"}
FLIGHT = {  # micro-batches in flight, by the headers: (stages, stage, micro-batches) ->
    "06_pipeline/afab.py": lambda p, stage, m: m,
    "06_pipeline/1f1b.py": lambda p, stage, m: min(m, p - stage),
}
FILL = {"F": "#9cc3e6", "B": "#a9d6a0"}


@dataclass(frozen=True)
class Slot:
    """An operation of a stage and when it runs, in units of one forward."""

    stage: int
    operation: Operation
    start: float
    end: float


class Deadlock(Exception):
    """No stage can go on; the message says what each waits for."""


def lists(module: ModuleType, stages: int, microbatches: int) -> list[list[Operation]]:
    """The operations of every stage."""
    return [module.schedule(stage, stages, microbatches) for stage in range(stages)]


def simulate(orders: list[list[Operation]], forward: float = 1, backward: float = 2) -> list[Slot]:
    """Run every stage's list, in order, each operation as soon as what it needs is there. Transfers take no time.

    F of stage s needs F of s - 1, B of s needs its own F and B of s + 1. Raises Deadlock if that can't go on.
    """
    ends, slots, position, free = {}, [], [0] * len(orders), [0.0] * len(orders)
    while any(position[stage] < len(order) for stage, order in enumerate(orders)):
        progress = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                op, i = operation = order[position[stage]]
                needs = [("F", i, stage - 1)] if op == "F" else [("F", i, stage), ("B", i, stage + 1)]
                needs = [need for need in needs if 0 <= need[2] < len(orders)]
                if any(need not in ends for need in needs):
                    break
                start = max([free[stage], *(ends[need] for need in needs)])
                free[stage] = ends[op, i, stage] = start + (forward if op == "F" else backward)
                slots.append(Slot(stage, operation, start, free[stage]))
                position[stage] += 1
                progress = True
        if not progress:
            raise Deadlock(str([order[p] for order, p in zip(orders, position) if p < len(order)]))
    return slots


def idle_share(slots: list[Slot]) -> float:
    """Share of stages x time, from the first operation to the last, in which a stage has nothing to do."""
    stages = 1 + max(slot.stage for slot in slots)
    return 1 - sum(slot.end - slot.start for slot in slots) / (stages * max(slot.end for slot in slots))


def in_flight(order: list[Operation]) -> int:
    """Most micro-batches of a stage that have been forward and not yet backward."""
    count = peak = 0
    for op, _ in order:
        count += 1 if op == "F" else -1
        peak = max(peak, count)
    return peak


def check(
    module: ModuleType, flight: Callable[[int, int, int], int], stages: range, microbatches: Iterable[int]
) -> None:
    """Assert what the headers say, for all these sizes: every operation once, the bubble, the micro-batches in flight.

    flight(stages, stage, microbatches) is how many a stage may have. Whatever a backward costs, the bubble is the same.
    """
    for p, m in itertools.product(stages, microbatches):
        orders = lists(module, p, m)
        for stage, order in enumerate(orders):
            assert sorted(order) == sorted((op, i) for op in "FB" for i in range(m))
            for op in "FB":  # both ends of every link must take the micro-batches in the same order
                assert [o for o in order if o[0] == op] == [o for o in orders[0] if o[0] == op]
            assert in_flight(order) == flight(p, stage, m), (p, stage, m)
        for backward in (1, 2, 2.5):
            idle = idle_share(simulate(orders, backward=backward))
            assert abs(idle - (p - 1) / (m + p - 1)) < 1e-12, (p, m, idle)


def draw(stages: int = 4, microbatches: int = 8) -> str:
    """An SVG: time to the right, a row per stage, a box per operation with the number of its micro-batch."""
    unit, row, left, panel = 22, 26, 70, stages * 26 + 62
    charts = {name: simulate(lists(load(path), stages, microbatches)) for name, path in RECIPES.items()}
    width = left + unit * max(slot.end for slots in charts.values() for slot in slots) + 110
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{panel * len(charts) + 10}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, slots) in enumerate(charts.items()):
        top = panel * number + 34
        orders = lists(load(RECIPES[name]), stages, microbatches)
        title = f"{name}: {stages} stages, {microbatches} micro-batches, idle {idle_share(slots):.1%} of the time"
        svg.append(f'<text x="{left}" y="{top - 12}" font-weight="bold">{title}</text>')
        for rank, order in enumerate(orders):
            y = top + row * rank
            end = left + unit * max(slot.end for slot in slots)
            svg.append(f'<text x="8" y="{y + 16}">stage {rank}</text>')
            svg.append(f'<rect x="{left}" y="{y}" width="{end - left:g}" height="{row - 4}" fill="#eeeeee"/>')
            svg.append(f'<text x="{end + 8:g}" y="{y + 16}">{in_flight(order)} in flight</text>')
        for slot in slots:
            op, i = slot.operation
            x, y, w = left + unit * slot.start, top + row * slot.stage, unit * (slot.end - slot.start)
            svg.append(
                f'<rect x="{x:g}" y="{y}" width="{w:g}" height="{row - 4}" fill="{FILL[op]}" stroke="white"/>'
                f'<text x="{x + w / 2:g}" y="{y + 15}" text-anchor="middle" font-size="11">{i}</text>'
            )
    legend = "blue: forward, green: backward (twice as long), grey: idle; the number is the micro-batch"
    svg += [f'<text x="{left}" y="{panel * len(charts)}">{legend}</text>', "</svg>"]
    return "\n".join(svg) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
