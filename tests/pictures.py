"""Draw pictures from the recipes' headers, functions and measured timelines, as plain SVG for light and dark pages.

python tests/pictures.py        write all of them; tests/test_pictures.py compares them with the files
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import torch
import torch.distributed as dist
from launch import ROOT, launch, load
from test_lineage import FAMILY, TRAINING, difference, lines_of_code, parents

# ------------------------------------------------------------------------------------------------------------- canvas
SANS, MONO = "system-ui, sans-serif", "ui-monospace, monospace"
GROUND = "ground"
COLORS = {  # role: (in light mode, in dark mode)
    GROUND: ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "rule": ("#afb8c1", "#4a525c"),
    "plain": ("#e6eaee", "#2b323b"),
    "added": ("#116329", "#56d364"),
    "removed": ("#a40e26", "#ff7b72"),
    "folder01": ("#0550ae", "#79c0ff"),
    "folder02": ("#116329", "#7ee787"),
    "folder03": ("#953800", "#ffa657"),
    "folder04": ("#6639ba", "#d2a8ff"),
    "folder05": ("#0a6670", "#5fd4de"),
    "folder06": ("#a40e26", "#ff9492"),
    "folder07": ("#7a4e00", "#e3b341"),
    "folder08": ("#8a1a6b", "#ff9bce"),
    "folder09": ("#3d5a00", "#b5d46a"),
    "folder10": ("#45515e", "#b1bac4"),
    "sum1": ("#edf3f9", "#18222d"),
    "sum2": ("#cfe0f1", "#1d3650"),
    "sum3": ("#a9c9e8", "#255078"),
    "sum4": ("#8bd49c", "#2a7040"),
    "rank0": ("#b5d4f0", "#1f4e79"),
    "rank1": ("#fbd3ad", "#6b4116"),
    "all-reduce": ("#dcc5f3", "#5a3a82"),
    "all-gather": ("#94dbd5", "#17625d"),
    "reduce-scatter": ("#f3b9c6", "#7d2f45"),
    "forward": ("#9cc3e6", "#2c659c"),
    "backward": ("#a9d6a0", "#38733f"),
    "optimizer": ("#d9c2e9", "#6b4a8c"),
    "gather": ("#2fa8a0", "#37b5ac"),
    "reduction": ("#f2b661", "#d08a2a"),
    "exposed": ("#d64541", "#ff6b60"),
}


def contrast(ink: str, ground: str) -> float:
    """Contrast ratio of two colors, from 1 to 21 (WCAG 2); text that reads well has 4.5."""

    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))

    darker, lighter = sorted((luminance(ink), luminance(ground)))
    return (lighter + 0.05) / (darker + 0.05)


class Box(NamedTuple):
    """A rectangle: its left upper corner, width and height."""

    x: float
    y: float
    w: float
    h: float

    def holds(self, other: "Box") -> bool:
        """Whether all of the other lies in this one."""
        return (
            self.x <= other.x
            and self.y <= other.y
            and other.x + other.w <= self.x + self.w
            and other.y + other.h <= self.y + self.h
        )

    def touches(self, other: "Box") -> bool:
        """Whether the two overlap."""
        return (
            self.x < other.x + other.w
            and other.x < self.x + self.w
            and self.y < other.y + other.h
            and other.y < self.y + self.h
        )


@dataclass
class Canvas:
    """An SVG in the making. A text raises ValueError if it is small, pale, overlaps with another or leaves its box."""

    title: str
    width: float
    height: float
    font: str = SANS
    parts: list[str] = field(default_factory=list)
    fills: list[tuple[Box, str]] = field(default_factory=list)  # what lies under a text: the last box that holds it
    texts: list[Box] = field(default_factory=list)

    def __post_init__(self):
        self.box(Box(0, 0, self.width, self.height), GROUND)

    def box(self, box: Box, role: str, radius: float = 0) -> None:
        """Fill a rectangle."""
        self.fills.append((box, role))
        rounded = f' rx="{radius:g}"' if radius else ""
        x, y, w, h = (short(value) for value in box)
        self.parts.append(f'<rect class="{role}" x="{x}" y="{y}" width="{w}" height="{h}"{rounded}/>')

    def text(self, x: float, y: float, *runs: tuple[str, str], size: int = 12, anchor: str = "start") -> None:
        """Write (text, role) runs, one after another, with the baseline at y. Estimates 0.6 em per character."""
        width = 0.6 * size * sum(len(text) for text, _ in runs)
        place = Box(x - width * {"start": 0, "middle": 0.5, "end": 1}[anchor], y - 0.8 * size, width, size)
        words = "".join(text for text, _ in runs)
        under = [role for box, role in self.fills if box.touches(place)][-1]
        fits = [box for box, role in self.fills if role == under and box.holds(place)]
        if not fits or any(place.touches(other) for other in self.texts):
            raise ValueError(f"{self.title}: {words!r} leaves its box or overlaps with another text")
        for _, role in runs:
            for ink, ground in zip(COLORS[role], COLORS[under]):
                if size < 11 or contrast(ink, ground) < 4.5:
                    raise ValueError(f"{self.title}: {words!r} cannot be read on {under}")
        self.texts.append(place)
        spans = "".join(f'<tspan class="{role}">{escape(text)}</tspan>' for text, role in runs)
        self.parts.append(
            f'<text x="{short(x)}" y="{short(y)}" font-size="{size}" text-anchor="{anchor}" '
            f'xml:space="preserve">{spans}</text>'
        )

    def label(self, box: Box, text: str, role: str = "ink", size: int = 12) -> None:
        """Write a text in the middle of a box."""
        self.text(box.x + box.w / 2, box.y + box.h / 2 + 0.35 * size, (text, role), size=size, anchor="middle")

    def line(self, *points: tuple[float, float], role: str = "rule", arrow: bool = False) -> None:
        """Draw a line through the points, on request with a head at its end."""
        path = "M" + "L".join(f"{short(x)} {short(y)}" for x, y in points)
        self.parts.append(f'<path class="{role} line" d="{path}"/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)  # lines are horizontal or vertical
            wings = [(x - 5 * dx + 3.5 * side * dy, y - 5 * dy + 3.5 * side * dx) for side in (1, -1)]
            head = "L".join(f"{short(x)} {short(y)}" for x, y in [(x, y), *wings])
            self.parts.append(f'<path class="{role}" d="M{head}z"/>')

    def bars(self, spans: list[tuple[float, float]], y: float, height: float, role: str) -> None:
        """Fill a bar from x to x for each span, all in one path."""
        path = "".join(f"M{short(a)} {short(y)}h{short(b - a, 3)}v{height:g}h{short(a - b, 3)}z" for a, b in spans)
        self.parts.append(f'<path class="{role}" d="{path}"/>')

    def svg(self) -> str:
        """The picture, with the colors that it uses, in both modes."""
        body = "\n".join(self.parts)
        used = [role for role in COLORS if f'class="{role}"' in body or f'class="{role} line"' in body]
        light, dark = (
            " ".join(
                f".{role}{{fill:{COLORS[role][mode]}}}" + f" .{role}.line{{fill:none;stroke:{COLORS[role][mode]}}}"
                if f'class="{role} line"' in body
                else f".{role}{{fill:{COLORS[role][mode]}}}"
                for role in used
            )
            for mode in (0, 1)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" font-family="{self.font}">\n'
            f"<title>{escape(self.title)}</title>\n"
            f"<style>{light} .line{{stroke-width:1.5}}\n"
            f"@media (prefers-color-scheme: dark){{{dark}}}</style>\n"
            f"{body}\n</svg>\n"
        )


def short(value: float, digits: int = 2) -> str:
    """A coordinate with at most so many decimals."""
    return f"{round(value, digits) + 0:.{digits}f}".rstrip("0").rstrip(".")


def legend(canvas: Canvas, x: float, y: float, entries: list[tuple[str, str]], size: int = 12) -> None:
    """A row of (role, text), each with a sample of the role's color; y is the baseline."""
    for role, text in entries:
        canvas.box(Box(x, y - 10, 12, 12), role, radius=2)
        canvas.text(x + 17, y, (text, "ink"), size=size)
        x += 17 + 0.6 * size * len(text) + 16


# ------------------------------------------------------------------------------------------------------------- family
def descent(family: dict[str, list[str]]) -> list[tuple[str, list[bool]]]:
    """Return (path, levels) of every recipe, parents first, from path -> parents.

    `levels` has an entry per generation: whether the recipe, or its ancestor there, is followed by a sibling.
    """

    def below(path: str, levels: list[bool]) -> list[tuple[str, list[bool]]]:
        children = sorted(child for child, theirs in family.items() if theirs and theirs[0] == path)
        lines = [(path, levels)]
        for child in children:
            lines += below(child, [*levels, child != children[-1]])
        return lines

    return [line for path in sorted(family) if not family[path] for line in below(path, [])]


def draw_family() -> str:
    """The tree of the recipes by their first parents; beside each how many lines of code it adds and removes."""
    row, small_row, indent, size, width, left, tops = 22, 15, 14, 13, 480, 12, 74
    lines = descent({path: parents(recipe) for path, recipe in FAMILY.items()})
    tools = [path for path, levels in lines if not levels and path not in TRAINING]
    tree = [(path, levels) for path, levels in lines if path not in tools]
    second = sum(len(parents(FAMILY[path])) > 1 for path, _ in tree)
    height = tops + row * (len(lines) + 1) + small_row * second + 22
    canvas = Canvas("Family tree of the recipes", width, height, MONO)
    canvas.text(left, 24, ("Each recipe below the one it changes", "ink"), size=14)
    canvas.text(
        width - left, 46, ("lines of code: ", "muted"), ("+added", "added"), (" −removed", "removed"), anchor="end"
    )

    def name(x: float, y: float, path: str, *right: tuple[str, str]) -> None:
        folder, file = path.split("/")
        canvas.text(x, y, (f"{folder}/", f"folder{folder[:2]}"), (file, "ink"), size=size)
        canvas.text(width - left, y, *right, anchor="end")

    y, open_at = tops, {}  # where the connector of a generation begins
    for path, levels in tree:
        x, theirs = left + indent * len(levels), parents(FAMILY[path])
        if theirs:
            added, removed = difference(theirs[0], path)
            corner = x - indent + 5
            canvas.line((corner, open_at[len(levels)]), (corner, y - 4), (x - 3, y - 4))
            open_at[len(levels)] = y - 4
            name(x, y, path, (f"+{added}", "added"), (f" −{removed}", "removed"))
        else:
            name(x, y, path, (f"{lines_of_code(FAMILY[path].source)} lines", "muted"))
        open_at[len(levels) + 1] = y + 5
        if theirs[1:]:
            y += small_row
            also = ", ".join(Path(other).name for other in theirs[1:])
            canvas.text(x + indent, y, (f"and {also}", "muted"), size=11)
        y += row
    y += row
    canvas.text(left, y, ("Tools, which train nothing", "muted"), size=size)
    for path in tools:
        y += row
        name(left, y, path, (f"{lines_of_code(FAMILY[path].source)} lines", "muted"))
    return canvas.svg()


# --------------------------------------------------------------------------------------------------------------- ring
class Ring(NamedTuple):
    """A recorded ring all-reduce."""

    sends: list[list[tuple[int, int, int]]]  # per step: (sender, receiver, chunk)
    held: list[list[list[list[int]]]]  # before the first step and after each: [rank][chunk] -> times each rank is in it
    sent: list[float]  # per rank: bytes sent, in sizes of the tensor


def watched_ring(module: ModuleType) -> Callable[[], Any]:
    """A probe: instead of main, run the ring on n chunks of n elements, of which rank r sets the r-th to 1.

    So the r-th element of a chunk counts how often the chunk holds rank r's contribution. Reports (receiver, chunk) per
    step, the chunks before and after each step, and the bytes sent, in sizes of the tensor.
    """
    sends, held, sent = [], [], []

    def main() -> None:
        dist.init_process_group("gloo")
        rank, n = dist.get_rank(), dist.get_world_size()
        x = torch.eye(n)[rank].repeat(n)
        exchange, finish = module.exchange, module.finish

        def watched_exchange(outgoing, incoming, group):
            sends.extend((to, tensor.storage_offset() // n) for tensor, to in outgoing)
            return exchange(outgoing, incoming, group)

        def watched_finish(*transfer):
            finish(*transfer)
            held.append(x.view(n, n).int().tolist())

        module.exchange, module.finish = watched_exchange, watched_finish
        sent.append(module.ring_all_reduce(x, [dist.group.WORLD]) / x.nbytes)
        dist.destroy_process_group()

    module.main = main
    return lambda: (sends, held, sent[0])


@functools.cache
def ring(ranks: int = 4) -> Ring:
    """Run the recipe's ring all-reduce and record it."""
    probes = launch("02_data_parallel/collectives.py", ranks, probe=watched_ring, save=False).probes
    sends, held, sent = zip(*probes)
    steps = [[(rank, *sends[rank][step]) for rank in range(ranks)] for step in range(len(sends[0]))]
    return Ring(steps, [list(now) for now in zip(*held)], list(sent))


def draw_ring(ranks: int = 4) -> str:
    """Per step, the chunks of every rank and which are sent: reduce-scatter on the left, all-gather on the right."""
    cell_w, cell_h, gap, left, top = 38, 24, 14, 62, 92
    recorded, half = ring(ranks), ranks - 1
    panel_w, panel_h = ranks * (cell_w + 4) + 34, ranks * (cell_h + gap) + 50
    width, height = left + 2 * panel_w + 4, top + half * panel_h + 36
    canvas = Canvas(f"Ring all-reduce on {ranks} ranks, step by step", width, height)
    canvas.text(14, 26, (f"Ring all-reduce of {ranks} chunks on {ranks} ranks", "ink"), size=15)
    steps, sent = len(recorded.sends), max(recorded.sent)
    canvas.text(14, 46, (f"{steps} steps; a rank sends {sent:g} × the tensor", "muted"))
    canvas.text(left, top - 22, ("reduce-scatter", "ink"), size=13)
    canvas.text(left + panel_w, top - 22, ("all-gather", "ink"), size=13)
    for step, sends in enumerate(recorded.sends):
        x0, y0 = left + panel_w * (step // half), top + panel_h * (step % half)
        canvas.text(x0, y0, (f"step {step + 1}", "muted"))
        cells = {
            (rank, chunk): Box(x0 + chunk * (cell_w + 4), y0 + 20 + rank * (cell_h + gap), cell_w, cell_h)
            for rank in range(ranks)
            for chunk in range(ranks)
        }
        for (rank, chunk), cell in cells.items():
            contributions = sum(recorded.held[step + 1][rank][chunk])
            canvas.box(cell, f"sum{contributions}", radius=3)
            canvas.label(cell, str(contributions))
            if step < half and chunk == 0:
                canvas.text(14, cell.y + 16, (f"rank {rank}", "muted"))
        for sender, receiver, chunk in sends:
            tail, head = cells[sender, chunk], cells[receiver, chunk]
            x = tail.x + cell_w / 2
            if receiver > sender:
                canvas.line((x, tail.y + cell_h), (x, head.y), role="ink", arrow=True)
            else:  # around: out below the last rank, in above the first
                canvas.line((x, tail.y + cell_h), (x, tail.y + cell_h + gap - 4), role="ink")
                canvas.line((x, head.y - gap + 2), (x, head.y), role="ink", arrow=True)
    shades = [(f"sum{count}", str(count)) for count in range(1, ranks)]
    canvas.text(14, height - 16, ("ranks in a sum:", "muted"))
    legend(canvas, 132, height - 16, [*shades, (f"sum{ranks}", f"{ranks}, complete")])
    return canvas.svg()


# ------------------------------------------------------------------------------------------------------------- blocks
class Part(NamedTuple):
    """A computation of a block, on each rank."""

    label: str
    shape: str = ""  # of its output, where that is new
    split: str = ""  # how its weights are cut: columns, their outputs, or rows, their inputs
    partial: bool = False  # the output is this rank's term of a sum
    same: bool = False  # every rank computes the same


class Exchange(NamedTuple):
    """A point at which ranks communicate: the collectives of forward and of backward, in their order."""

    shape: str  # behind it
    forward: tuple[str, ...]
    backward: tuple[str, ...]


def block(stream: str, tokens: str, same: bool, enter: Exchange, leave: Exchange) -> list[Part | Exchange]:
    """A Llama block, top to bottom; `stream` is the shape of the residual stream, `tokens` that between split weights."""
    norm, add = Part("RMSNorm", same=same), Part("+", same=same)
    return [
        norm,
        enter,
        Part("q k v", "b h/tp s k", "columns"),
        Part("attention"),
        Part("o", f"{tokens} d", "rows", partial=True),
        leave,
        add,
        norm,
        enter,
        Part("gate up", f"{tokens} f/tp", "columns"),
        Part("SwiGLU"),
        Part("down", f"{tokens} d", "rows", partial=True),
        leave,
        add._replace(shape=stream),
    ]


BLOCKS = {  # recipe: (shape of the residual stream, the block)
    "04_tensor_sequence/tensor_parallel.py": (
        "b s d",
        block(
            "b s d",
            "b s",
            True,
            enter=Exchange("b s d", (), ("all-reduce",)),
            leave=Exchange("b s d", ("all-reduce",), ()),
        ),
    ),
    "04_tensor_sequence/sequence_parallel.py": (
        "(b s)/tp d",
        block(
            "(b s)/tp d",
            "(b s)",
            False,
            enter=Exchange("(b s) d", ("all-gather",), ("all-gather", "reduce-scatter")),
            leave=Exchange("(b s)/tp d", ("reduce-scatter",), ("all-gather",)),
        ),
    ),
}


def draw_weight(canvas: Canvas, x: float, y: float, split: str, rank: int) -> None:
    """A matrix cut in two by columns or rows, with the half of the rank filled."""
    side = 14
    half = (side / 2, side) if split == "columns" else (side, side / 2)
    corner = (x + rank * side / 2, y) if split == "columns" else (x, y + rank * side / 2)
    canvas.box(Box(x, y, side, side), GROUND)
    canvas.box(Box(*corner, *half), "ink")


def draw_exchange(canvas: Canvas, box: Box, exchange: Exchange) -> None:
    """A frame across the ranks with the collectives of forward, and below them those of backward."""
    canvas.line(*((x, y) for x, y in corners(box)), role="rule")
    for i, (phase, names) in enumerate([("forward", exchange.forward), ("backward", exchange.backward)]):
        y = box.y + 4 + 22 * i
        canvas.text(box.x + 8, y + 14, (phase, "muted"), size=11)
        x = box.x + 68
        for name in names:
            pill = Box(x, y, 0.6 * 11 * len(name) + 10, 19)
            canvas.box(pill, name, radius=9)
            canvas.label(pill, name, size=11)
            x += pill.w + 4
        if not names:
            canvas.text(x + 2, y + 14, ("nothing", "muted"), size=11)


def corners(box: Box) -> list[tuple[float, float]]:
    """The outline of a box, closed."""
    x, y, w, h = box
    return [(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)]


def draw_block(canvas: Canvas, x: float, y: float, stream: str, parts: list[Part | Exchange]) -> float:
    """One recipe's block on two ranks, side by side, with the residual stream on the left; returns where it ends."""
    lane, gap, margin, high, room = 124, 8, 18, 26, 22
    left = x + margin
    centers = [left + lane / 2, left + lane + gap + lane / 2]
    for rank in (0, 1):
        canvas.text(centers[rank], y, (f"rank {rank}", "muted"), anchor="middle")
    y += 8
    shape, residual = stream, y + room / 2
    for part in [*parts, None]:
        for center in centers:
            canvas.line((center, y), (center, y + room))
        canvas.text(
            left + lane + gap / 2, y + room / 2 + 4, (shape, "ink" if part else "ink"), size=11, anchor="middle"
        )
        y += room
        if part is None:
            return y
        if isinstance(part, Exchange):
            draw_exchange(canvas, Box(left, y, 2 * lane + gap, 50), part)
            y, shape = y + 50, part.shape
            continue
        for rank in (0, 1):
            box = Box(left + rank * (lane + gap), y, lane, high)
            canvas.box(box, "plain" if part.same else f"rank{rank}", radius=4)
            canvas.label(box, part.label)
            if part.split:
                draw_weight(canvas, box.x + 8, box.y + 6, part.split, rank)
        if part.label == "+":
            canvas.line(
                (centers[0], residual), (x + 6, residual), (x + 6, y + high / 2), (left, y + high / 2), arrow=True
            )
            residual = y + high + room / 2
        shape = part.shape or shape
        shape = f"{shape}, partial" if part.partial else shape
        y += high
    return y


def draw_blocks() -> str:
    """A Llama block under tensor and under sequence parallelism: weights, shapes and collectives on two ranks."""
    column, top, width = 292, 62, 620
    canvas = Canvas("A Llama block under tensor parallelism and under tensor and sequence parallelism", width, 940)
    canvas.text(14, 26, ("A Llama block on 2 ranks", "ink"), size=15)
    for i, (recipe, (stream, parts)) in enumerate(BLOCKS.items()):
        x = 14 + i * (column + 14)
        canvas.text(x + 18, top - 8, (Path(recipe).name, "ink"), size=13)
        bottom = draw_block(canvas, x, top + 12, stream, parts)
    y = bottom + 20
    legend(canvas, 14, y, [("plain", "the same on both ranks"), ("rank0", "only rank 0"), ("rank1", "only rank 1")])
    for i, split in enumerate(("columns", "rows")):
        draw_weight(canvas, 14 + 280 * i, y + 12, split, 0)
        canvas.text(35 + 280 * i, y + 23, (f"weights split by {split}", "ink"))
    return canvas.svg()


# ----------------------------------------------------------------------------------------------------------- timeline
TIMELINES = ROOT / "tests" / "results" / "timelines" / "zero_stages"
STAGES = ("zero1", "zero1_overlap", "zero2", "zero3")
PHASES = ("forward", "backward", "optimizer")
Spans = list[tuple[float, float]]


def read_timeline(stage: str) -> tuple[dict[str, Any], dict[str, Spans]]:
    """The stored report of a stage, and its spans; `reduction` is what of communication is no gather."""
    report = json.loads((TIMELINES / f"{stage}.json").read_text())
    spans = {kind: [(start, end) for start, end in found] for kind, found in report["timeline"].items()}
    spans["reduction"] = load("01_single_gpu/profiling.py").without(spans["communication"], spans["gather"])
    return report, spans


def draw_timeline() -> str:
    """One step of each ZeRO stage on one time axis: compute, communication, and what of it nothing hides."""
    left, right, top, group, lane, width = 106, 14, 62, 84, 17, 640
    timelines = [read_timeline(stage) for stage in STAGES]
    (where,) = {report["where"] for report, _ in timelines}
    end = max(stop for _, spans in timelines for found in spans.values() for _, stop in found)
    scale = (width - left - right) / end
    bottom = top + group * len(STAGES)
    canvas = Canvas("Timelines of the ZeRO stages: compute and communication", width, bottom + 82)
    canvas.text(14, 26, (f"One step of each ZeRO stage, {where}", "ink"), size=15)
    for tick in range(0, int(end) + 1, 50):
        x = left + tick * scale
        canvas.line((x, top - 8), (x, bottom))
        canvas.text(x, bottom + 16, (f"{tick} ms" if tick else "0", "muted"), size=11, anchor="middle")
    for i, (report, spans) in enumerate(timelines):
        y, ms = top + group * i, report["ms"]
        numbers = ", ".join(f"{kind} {ms[kind]:.0f} ms" for kind in ("step", "communication", "exposed"))
        heading = [(Path(report["recipe"]).name, "ink"), (f"  {numbers}", "muted")]
        canvas.box(Box(left - 2, y - 10, 0.6 * 12 * sum(len(text) for text, _ in heading) + 6, 17), GROUND)
        canvas.text(left, y + 3, *heading)
        rows = {"compute": (y + 12, lane, PHASES), "communication": (y + 33, lane, ("gather", "reduction"))}
        for row, (at, high, kinds) in rows.items():
            canvas.text(left - 8, at + 13, (row, "muted"), size=11, anchor="end")
            for kind in kinds:
                canvas.bars([(left + a * scale, left + b * scale) for a, b in spans[kind]], at, high, kind)
        canvas.text(left - 8, y + 63, ("exposed", "muted"), size=11, anchor="end")
        canvas.bars([(left + a * scale, left + b * scale) for a, b in spans["exposed"]], y + 54, 9, "exposed")
    legend(canvas, 14, bottom + 44, [(phase, phase) for phase in PHASES])
    named = [("gather", "all-gather"), ("reduction", "reduction"), ("exposed", "exposed: nothing computes")]
    legend(canvas, 14, bottom + 66, named)
    return canvas.svg()


# --------------------------------------------------------------------------------------------------------------- main
PICTURES = {
    "tests/family.svg": draw_family,
    "02_data_parallel/ring.svg": draw_ring,
    "04_tensor_sequence/blocks.svg": draw_blocks,
    "03_zero/timeline.svg": draw_timeline,
}


def main() -> None:
    for path, draw in PICTURES.items():
        (ROOT / path).write_text(draw())


if __name__ == "__main__":
    main()
