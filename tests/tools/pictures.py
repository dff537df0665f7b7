"""Draw pictures from the recipes' headers, functions and measured results, as SVG for light and dark pages.

python tests/tools/pictures.py            write all of them; tests/test_pictures.py compares them with the files
python tests/tools/pictures.py --balance  first train again what balance.svg shows
"""

import argparse
import functools
import io
import itertools
import json
import math
import re
import statistics
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import matplotlib
import torch
import torch.distributed as dist
from matplotlib import pyplot

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

import schedules
from curves import time_to_loss
from launch import ROOT, launch, load
from pages import RESULTS, contenders, difference, quickest, results
from test_lineage import FAMILY, TRAINING, lines_of_code, parents

# ------------------------------------------------------------------------------------------------------------- canvas
SANS, MONO = "system-ui, sans-serif", "ui-monospace, monospace"
# a role, and its color in light and in dark mode
PALETTE = """
ground ffffff 0d1117 · ink 1f2328 e6edf3 · muted 59636e 9198a1 · rule afb8c1 4a525c · plain e6eaee 2b323b
folder01 0550ae 79c0ff · folder02 116329 7ee787 · folder03 953800 ffa657 · folder04 6639ba d2a8ff
folder05 0a6670 5fd4de · folder06 a40e26 ff9492 · folder07 7a4e00 e3b341 · folder08 8a1a6b ff9bce
folder09 3d5a00 b5d46a · folder10 45515e b1bac4 · sum1 e6eef6 1b2733 · sum2 cfe0f1 1d3650 · sum3 a9c9e8 255078
sum4 8bd49c 2a7040 · rank0 b5d4f0 1f4e79 · rank1 fbd3ad 6b4116 · rank2 b9dfb0 2f6b35 · rank3 dcc5f3 5a3a82
step0 f6dd8c 6b5510 · step1 a6d99a 2c6a34 · step2 86c8de 1b6079 · step3 b9a8ec 55439a · all-gather 94dbd5 17625d
reduce-scatter f3b9c6 7d2f45 · forward 9cc3e6 2c659c · backward a9d6a0 38733f · optimizer d9c2e9 6b4a8c
forward2 5e9bd3 1b4068 · backward2 74b868 214a27 · weights f5d595 7a5a1c · weights2 dba23f 4d3a12
gather 2fa8a0 37b5ac · other f2b661 d08a2a · exposed d64541 ff6b60
"""
COLORS = {role: (f"#{light}", f"#{dark}") for role, light, dark in re.findall(r"(\S+) (\w{6}) (\w{6})", PALETTE)}


def picture(title: str, width: float, height: float, body: str, font: str = SANS) -> str:
    """The SVG of a body, on no ground, with the colors that it names in both modes."""
    used = [role for role in COLORS if f"var(--{role})" in body]
    light, dark = (";".join(f"--{role}:{COLORS[role][mode]}" for role in used) for mode in (0, 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" font-family="{font}">\n'
        f"<title>{escape(title)}</title>\n<style>.line{{fill:none}} svg{{{light}}}\n"
        f"@media (prefers-color-scheme: dark){{svg{{{dark}}}}}</style>\n{body}\n</svg>\n"
    )


class Box(NamedTuple):
    """A rectangle: its left upper corner, width and height."""

    x: float
    y: float
    w: float
    h: float


@dataclass
class Canvas:
    title: str
    width: float
    font: str = SANS
    parts: list[str] = field(default_factory=list)

    def box(self, box: Box, role: str, text: str = "", size: int = 12, radius: float = 0) -> None:
        """Fill a rectangle, and write a text in its middle."""
        x, y, w, h = box
        rounded = f' rx="{radius:g}"' if radius else ""
        where = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"{rounded}'
        self.parts.append(f'<rect style="fill:var(--{role})" {where}/>')
        if text:
            self.label(box, text, size)

    def cells(self, found: dict[str, list[Box]]) -> None:
        """Fill rectangles, those of a role in one path."""
        for role, boxes in found.items():
            path = "".join(f"M{x:g} {y:g}h{w:g}v{h:g}h{-w:g}z" for x, y, w, h in boxes)
            self.parts.append(f'<path style="fill:var(--{role})" d="{path}"/>')

    def text(self, x: float, y: float, *runs: tuple[str, str], size: int = 12, anchor: str = "start") -> None:
        """Write (text, role) runs, one after another, with the baseline at y."""
        spans = "".join(f'<tspan style="fill:var(--{role})">{escape(text)}</tspan>' for text, role in runs)
        where = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
        self.parts.append(f'<text {where} xml:space="preserve">{spans}</text>')

    def label(self, box: Box, text: str, size: int = 12) -> None:
        self.text(box.x + box.w / 2, box.y + box.h / 2 + 0.35 * size, (text, "ink"), size=size, anchor="middle")

    def line(self, *points: tuple[float, float], role: str = "rule", arrow: bool = False, width: float = 1.5) -> None:
        """Draw a line through the points, on request with a head at its end; its last part is not oblique then."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="line" style="stroke:var(--{role});stroke-width:{width:g}" d="{path}"/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
            wings = [f"L{x - 5 * dx + 3.5 * side * dy:g} {y - 5 * dy + 3.5 * side * dx:g}" for side in (1, -1)]
            self.parts.append(f'<path style="fill:var(--{role})" d="M{x:g} {y:g}{"".join(wings)}z"/>')

    def frame(self, box: Box, role: str) -> None:
        x, y, w, h = box
        self.line((x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y), role=role)

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """A row of (role, text), each with a sample of the role's color; y is the baseline."""
        for role, text in entries:
            self.box(Box(x, y - 10, 12, 12), role, radius=2)
            self.text(x + 17, y, (text, "ink"))
            x += 33 + text_width(text, 12)

    def svg(self, height: float) -> str:
        """The picture, cut off at a height."""
        return picture(self.title, self.width, height, "\n".join(self.parts), self.font)


def text_width(text: str, size: float) -> float:
    """An estimate: 0.6 em per character, which is what monospaced fonts take and more than others do."""
    return 0.6 * size * len(text)


# --------------------------------------------------------------------------------------------------------------- axes
LIGHT = {role: light for role, (light, _) in COLORS.items()}
ROLES = {light: role for role, light in LIGHT.items()}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "pictures", "font.size": 14, "figure.dpi": 72, "hatch.linewidth": 2}
STYLE |= {"legend.frameon": False, "legend.handlelength": 1.4, "legend.columnspacing": 1.2, "legend.markerscale": 0.6}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 14}
STYLE |= {key: LIGHT["ink"] for key in ("text.color", "xtick.labelcolor", "ytick.labelcolor", "axes.titlecolor")}
STYLE |= {key: LIGHT["rule"] for key in ("axes.edgecolor", "xtick.color", "ytick.color")} | {"axes.axisbelow": True}
STYLE |= {"axes.labelcolor": LIGHT["muted"], "grid.color": LIGHT["plain"], "hatch.color": LIGHT["ground"]}


def axes(height: float, rows: int = 1, columns: int = 1, width: float = 560, **more: Any) -> tuple[Any, Any]:
    """A figure of so many pixels, and its axes. Colors are those of LIGHT."""
    matplotlib.rcParams.update(matplotlib.rcParamsDefault | STYLE | {"backend": "svg"})
    figure = pyplot.figure(figsize=(width / 72, height / 72), layout="constrained")
    return figure, figure.subplots(rows, columns, **more)


def drawn(figure: Any, title: str, legend: int = 0) -> str:
    """The SVG of a figure, with text as text, colors that follow the mode, and the last axes' legend in columns."""
    if legend:
        figure.legend(*figure.axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=legend)
    file, (width, height) = io.StringIO(), figure.get_size_inches() * 72
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    pyplot.close(figure)
    body = re.search(r"<svg[^>]*>(.*)</svg>", file.getvalue(), re.S)[1]
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r'fill="(#\w{6})"', r'style="fill: \1"', body)  # of a hatch
    return picture(title, width, height, re.sub(r"(?<=: )#[0-9a-f]{6}", lambda hit: f"var(--{ROLES[hit[0]]})", body))


def beside(axis: Any, y: float, words: str) -> None:
    """Write right of the axes, at the height of a value."""
    axis.annotate(words, (1.02, y), xycoords=("axes fraction", "data"), va="center")


def filled(role: str, hatch: str) -> dict[str, str]:
    return dict(facecolor=LIGHT[role], hatch=hatch, edgecolor=LIGHT["ground"])


def stack(axis: Any, bars: dict[str, dict[str, float]], looks: dict[str, tuple[str, str]]) -> None:
    """A bar for each name, of parts one after another, with the value of each that has room for it, and their sum."""
    most, ends = max(sum(parts.values()) for parts in bars.values()), [0] * len(bars)
    for part, look in looks.items():
        widths = [parts[part] for parts in bars.values()]
        found = axis.barh(list(bars), widths, 0.75, ends, **filled(*look), label=part)
        axis.bar_label(found, [f"{w:.1f}" if w > 0.07 * most else "" for w in widths], label_type="center", fontsize=12)
        ends = [end + width for end, width in zip(ends, widths)]
    axis.bar_label(found, [f"{end:.1f}" for end in ends], padding=5, weight="bold")
    axis.set(xlim=(0, 1.1 * most), ylim=(len(bars) - 0.5, -0.5))


# ------------------------------------------------------------------------------------------------------------- family
def descent(family: dict[str, list[str]], parent: str = "", generation: int = 0) -> list[tuple[str, int]]:
    """From path -> parents: every recipe with its generation, each directly below its first parent or a sibling."""
    children = sorted(path for path, theirs in family.items() if [*theirs, ""][0] == parent)
    return [line for path in children for line in [(path, generation), *descent(family, path, generation + 1)]]


def draw_family() -> str:
    """The tree of the recipes by their first parents; beside each how many lines of code it adds and removes."""
    indent, width, left, y = 14, 480, 12, 46
    groups = {"": [], "Tools, which train nothing": [], "Kernels, one by one": []}
    for path, generation in descent({path: parents(recipe) for path, recipe in FAMILY.items()}):
        kind = "Kernels, one by one" if path.startswith("09_kernels/") else "Tools, which train nothing"
        groups["" if path in TRAINING else kind].append((path, generation))
    canvas = Canvas("Family tree of the recipes", width, MONO)
    key = ("lines of code: ", "muted"), ("+added", "folder02"), (" −removed", "folder06")
    canvas.text(left, 20, ("Each recipe below its parent; ", "ink"), *key)
    for title, found in groups.items():
        if title:
            canvas.text(left, y + 12, (title, "muted"), size=13)
            y += 36
        starts = {}  # generation: where the line to its next recipe starts
        for path, generation in found:
            x, theirs = left + indent * generation, parents(FAMILY[path])
            change = [(f"{lines_of_code(FAMILY[path].source)} lines", "muted")]
            if theirs:
                corner = x - indent + 5
                canvas.line((corner, starts[generation]), (corner, y - 4), (x - 3, y - 4))
                starts[generation] = y - 4
                added, removed = difference(theirs[0], path)
                change = [(f"+{added}", "folder02"), (f" −{removed}", "folder06")]
            folder, file = path.split("/")
            canvas.text(x, y, (f"{folder}/", f"folder{folder[:2]}"), (file, "ink"), size=13)
            canvas.text(width - left, y, *change, anchor="end")
            starts[generation + 1] = y + 5
            others = " ".join(f"and\u00a0{parent[:2]}/{Path(parent).name}" for parent in theirs[1:])
            for line in textwrap.wrap(others, int((width - left - x - indent) / text_width("m", 11))):
                y += 15
                canvas.text(x + indent, y, (line, "muted"), size=11)
            y += 22
    return canvas.svg(y)


# ---------------------------------------------------------------------------------------------------------- schedules
KINDS, LEFT, ROW = {"F": "forward", "B": "backward", "W": "weights"}, 46, 20


def bar(op: str, box: Box) -> Box:
    """At the foot of a B and at the head of a W, for those who see no colors; F has none."""
    return Box(box.x, box.y + {"F": 0, "B": 14, "W": 0}[op], box.w, 0 if op == "F" else 3)


def draw_slots(canvas: Canvas, slots: list[schedules.Slot], top: float, unit: float, numbers: bool = True) -> float:
    """A row per rank, and a box per operation, with the number of its micro-batch if wide enough; returns its end."""
    cells, ranks = defaultdict(list), 1 + max(slot.rank for slot in slots)
    for rank in range(ranks):
        canvas.text(LEFT - 6, top + ROW * rank + 13, (f"rank {rank}", "muted"), anchor="end")
        cells["plain"].append(Box(LEFT, top + ROW * rank, round(unit * schedules.makespan(slots), 1), ROW - 3))
    for slot in slots:
        start, end = (round(LEFT + unit * time, 1) for time in (slot.start, slot.end))
        box = Box(start, top + ROW * slot.rank, round(end - start - 1, 1), ROW - 3)
        cells[KINDS[slot.op] + "2" * (slot.stage >= ranks)].append(box)
        cells["muted"].append(bar(slot.op, box))
    canvas.cells({role: cells[role] for role in sorted(cells, key=lambda role: (role == "muted") - (role == "plain"))})
    for slot in slots:
        if numbers and unit * (slot.end - slot.start) > 8:
            middle = round(LEFT + unit * (slot.start + slot.end) / 2 - 0.5, 1)
            canvas.text(middle, top + ROW * slot.rank + 12, (f"{slot.i}", "ink"), size=11, anchor="middle")
    return top + ROW * ranks


def draw_keys(canvas: Canvas, y: float, keys: dict[str, str]) -> None:
    """A legend, of two entries in a line."""
    for i, (role, words) in enumerate(keys.items()):
        box = Box(LEFT + 0.4 * canvas.width * (i % 2), y + 20 * (i // 2), 17, 17)
        op = next((op for op, kind in KINDS.items() if kind == role), "F")
        canvas.cells({role: [box], "muted": [bar(op, box)]})
        canvas.text(box.x + 22, box.y + 13, (words, "ink"))


def draw_look(ranks: int = 4, microbatches: int = 8) -> str:
    """The schedules of afab.py and 1f1b.py, one above the other, narrow enough for a phone."""
    canvas, top = Canvas("afab.py and 1f1b.py: what each rank does", 400), 0
    for name in "afab", "1f1b":
        line = schedules.pipeline(load(f"06_pipeline/{name}.py"), ranks, microbatches)
        slots, held = schedules.simulate(line), schedules.in_flight(line)
        words = f"keeps at most {max(held)} of {microbatches} micro-batches"
        canvas.text(LEFT, top + 16, (f"{name}.py ", "ink"), (words, "muted"))
        top = draw_slots(canvas, slots, top + 24, (400 - LEFT) / schedules.makespan(slots)) + 8
    draw_keys(canvas, top, {"forward": "forward", "backward": "backward, twice as long", "plain": "idle"})
    return canvas.svg(top + 40)


def draw_schedule(path: str, ranks: int = 4, microbatches: int = 8) -> str:
    """Time to the right. Above, all operations of a stage take as long; below, as long as measured.

    The scale below is that of all recipes' pictures.
    """
    claim, line = schedules.CLAIMS[path], schedules.pipeline(load(path), ranks, microbatches)
    canvas, top = Canvas(f"{claim.title}: {ranks} ranks, {microbatches} micro-batches", 500), 18
    equal = schedules.simulate(line, dict.fromkeys("FBW", claim.size))
    measured = {other: schedules.predict(other, ranks, microbatches, 24)[0] for other in schedules.CLAIMS}
    longest = max(map(schedules.makespan, measured.values()))
    for slots, most in (equal, schedules.makespan(equal)), (measured[path], longest):
        words = f"smollm_1_7b, as measured: {schedules.makespan(slots):.0f} ms"
        words = "equal durations" if slots is equal else words
        canvas.text(LEFT, top - 5, (f"{words}; idle: {schedules.idle_share(slots):.1%}", "ink"))
        canvas.text(500, top - 5, ("in flight", "muted"), anchor="end")
        for rank, peak in enumerate(schedules.in_flight(line)):
            canvas.text(500, top + ROW * rank + 13, (f"{peak * claim.size:g}", "muted"), anchor="end")
        top = draw_slots(canvas, slots, top, (474 - LEFT) / most, slots is equal) + 24
    second = "darker: other direction" if line.depth < len(line.place) else "darker: second chunk"
    backward = "backward" if line.whole else "B: input gradient"
    keys = {"forward": "forward", "backward": backward} | ({} if line.whole else {"weights": "W: weight gradient"})
    keys |= {"forward2": second} if len(line.place) > ranks else {}
    keys["plain"] = "idle"
    draw_keys(canvas, top - 14, keys)
    return canvas.svg(top - 14 + 20 * math.ceil(len(keys) / 2))


def draw_predicted() -> str:
    """For each number of ranks a bar per schedule, tokens per second of the whole pipeline."""
    canvas, left, column, row = Canvas("Predicted tokens per second of each schedule", 440), 104, 170, 20
    canvas.text(0, 14, ("Thousands of tokens per second, predicted:", "ink"))
    canvas.text(0, 30, ("4 micro-batches per rank; the line: 2 per rank", "ink"))
    for place, ranks in enumerate(schedules.PREDICTED_RANKS):
        x, top = left + column * (place % 2), 68 + 176 * (place // 2)
        canvas.text(x, top - 8, (f"{ranks} ranks", "ink"))
        for number, path in enumerate(schedules.CLAIMS):
            y = top + row * number
            few, many = (schedules.tokens_per_second(path, ranks, k * ranks)[0] / 1e3 for k in (2, 4))
            canvas.box(Box(x, y, round(many * 0.6, 1), 16), "forward")
            canvas.box(Box(round(x + few * 0.6 - 2, 1), y, 2, 16), "ink")
            canvas.text(round(x + many * 0.6 + 4, 1), y + 12, (f"{many:.0f}", "ink"))
            if place % 2 == 0:
                canvas.text(left - 8, y + 12, (Path(path).stem, "muted"), anchor="end")
    return canvas.svg(68 + 176 + row * len(schedules.CLAIMS))


# --------------------------------------------------------------------------------------------------------------- ring
def watched_ring(module: ModuleType) -> Callable[[], Any]:
    """A probe: instead of main, sum a one per chunk, so that each chunk is the number of ranks in its sum.

    (receiver, chunk) that this rank sends in each step; its chunks before each step and in the end; sizes sent.
    """
    dist.init_process_group("gloo")
    sends, held, x, exchange = [], [], torch.ones(dist.get_world_size()), module.exchange

    def watched_exchange(outgoing, incoming, group):
        held.append(x.int().tolist())
        sends.extend((to, chunk.storage_offset()) for chunk, to in outgoing)
        return exchange(outgoing, incoming, group)

    module.exchange, module.main = watched_exchange, lambda: None
    sent = module.ring_all_reduce(x, [dist.group.WORLD]) / x.nbytes
    dist.destroy_process_group()
    return lambda: (sends, [*held, x.int().tolist()], sent)


def draw_ring(ranks: int = 4) -> str:
    """Per step, the chunks of every rank and which are sent: reduce-scatter on the left, all-gather on the right."""
    cell_w, cell_h, gap, left, top = 38, 24, 14, 62, 92
    probes = launch("02_data_parallel/collectives.py", ranks, probe=watched_ring, save=False).probes
    (sends, held, sent), half = zip(*probes), ranks - 1
    panel_w, panel_h = ranks * (cell_w + 4) + 34, ranks * (cell_h + gap) + 50
    canvas = Canvas(f"Ring all-reduce on {ranks} ranks, step by step", left + 2 * panel_w + 4)
    canvas.text(14, 26, (f"Ring all-reduce of {ranks} chunks on {ranks} ranks", "ink"), size=15)
    canvas.text(14, 46, (f"{2 * half} steps; a rank sends 2(N−1)/N = {max(sent):g} times the tensor", "muted"))
    canvas.text(left, top - 22, ("reduce-scatter", "ink"), size=13)
    canvas.text(left + panel_w, top - 22, ("all-gather", "ink"), size=13)
    for step in range(2 * half):
        x0, y0 = left + panel_w * (step // half), top + panel_h * (step % half)
        canvas.text(x0, y0, (f"step {step + 1}", "muted"))
        cells = {
            (rank, chunk): Box(x0 + chunk * (cell_w + 4), y0 + 20 + rank * (cell_h + gap), cell_w, cell_h)
            for rank, chunk in itertools.product(range(ranks), repeat=2)
        }
        for (rank, chunk), cell in cells.items():
            count = held[rank][step + 1][chunk]
            canvas.box(cell, f"sum{count}", str(count), radius=3)
            if step < half and chunk == 0:
                canvas.text(14, cell.y + 16, (f"rank {rank}", "muted"))
        for sender in range(ranks):
            receiver, chunk = sends[sender][step]
            tail, head = cells[sender, chunk], cells[receiver, chunk]
            x = tail.x + cell_w / 2
            if receiver > sender:
                canvas.line((x, tail.y + cell_h), (x, head.y), role="ink", arrow=True)
            else:  # around: out below the last rank, in above the first
                canvas.line((x, tail.y + cell_h), (x, tail.y + cell_h + gap - 4), role="ink")
                canvas.line((x, head.y - gap + 2), (x, head.y), role="ink", arrow=True)
    y = top + half * panel_h
    canvas.text(14, y, ("A column is a chunk; arrows are what this step sends.", "muted"))
    shades = [(f"sum{count}", str(count)) for count in range(1, ranks)]
    canvas.text(14, y + 24, ("ranks in the sum", "muted"))
    canvas.legend(144, y + 24, [*shades, (f"sum{ranks}", f"{ranks}: complete")])
    return canvas.svg(y + 40)


# ------------------------------------------------------------------------------------------------------------- blocks
class Part(NamedTuple):
    """A computation of a block, on each rank."""

    label: str
    shape: str = ""  # of its output, where that is new
    split: str = ""  # how its weights are cut: columns, their outputs, or rows, their inputs


class Exchange(NamedTuple):
    """A point at which ranks communicate: the collectives of forward and of backward, in their order."""

    shape: str  # behind it
    forward: tuple[str, ...]
    backward: tuple[str, ...]


def block(stream: str, tokens: str, enter: Exchange, leave: Exchange) -> list[Part | Exchange]:
    """A Llama block, top to bottom: `stream` is the shape of the residual stream, `tokens` what split weights see."""
    found, middle = [], (("q k v", "b h/tp s k", "attention", "o"), ("gate up", f"{tokens} f/tp", "SwiGLU", "down"))
    for first, inside, name, last in middle:
        parts = Part(first, inside, "columns"), Part(name, inside), Part(last, f"{tokens} d, partial", "rows")
        found += [Part("RMSNorm", stream), enter, *parts, leave, Part("+", stream)]
    return found


AR, AG, RS = "all-reduce", "all-gather", "reduce-scatter"
TENSOR = block("b s d", "b s", Exchange("b s d", (), (AR,)), Exchange("b s d", (AR,), ()))
SEQUENCE = block("(b s)/tp d", "(b s)", Exchange("(b s) d", (AG,), (AG, RS)), Exchange("(b s)/tp d", (RS,), (AG,)))
BLOCKS = {"04_tensor_sequence/tensor_parallel.py": TENSOR, "04_tensor_sequence/sequence_parallel.py": SEQUENCE}


def draw_weight(canvas: Canvas, x: float, y: float, split: str, rank: int) -> None:
    """A matrix cut in two by columns or by rows, with the half of the rank filled."""
    side = 14
    half = (side / 2, side) if split == "columns" else (side, side / 2)
    corner = (x + rank * side / 2, y) if split == "columns" else (x, y + rank * side / 2)
    canvas.box(Box(*corner, *half), "ink")
    canvas.frame(Box(x, y, side, side), "ink")


def draw_exchange(canvas: Canvas, box: Box, exchange: Exchange) -> None:
    """A frame across the ranks with the collectives of forward, and below them those of backward."""
    canvas.frame(box, "rule")
    for i, (phase, names) in enumerate([("forward", exchange.forward), ("backward", exchange.backward)]):
        x, y = box.x + 68, box.y + 4 + 22 * i
        canvas.text(box.x + 8, y + 14, (phase, "muted"), size=11)
        for name in names:
            pill = Box(x, y, text_width(name, 11) + 10, 19)
            canvas.box(pill, "rank3" if name == "all-reduce" else name, name, size=11, radius=9)
            x += pill.w + 4
        if not names:
            canvas.text(x + 2, y + 14, ("nothing", "muted"), size=11)


def draw_block(canvas: Canvas, x: float, y: float, parts: list[Part | Exchange]) -> float:
    """A block on two ranks, side by side, with the residual stream to their left; returns where it ends."""
    lane, gap, room = 124, 8, 22  # widths of a rank and between ranks; height between parts
    lanes = [x + 18, x + 18 + lane + gap]
    centers = [left + lane / 2 for left in lanes]
    for rank, center in enumerate(centers):
        canvas.text(center, y, (f"rank {rank}", "muted"), anchor="middle")
    y += 8
    stream, shape, replicated = y + room / 2, parts[0].shape, "/tp" not in parts[0].shape
    for part in [*parts, None]:
        for center in centers:
            canvas.line((center, y), (center, y + room))
        canvas.label(Box(lanes[0], y, 2 * lane + gap, room), shape, size=11)
        y += room
        if isinstance(part, Exchange):
            draw_exchange(canvas, Box(lanes[0], y, 2 * lane + gap, 50), part)
            y += 50
        elif part:
            for rank, left in enumerate(lanes):
                box, same = Box(left, y, lane, 26), replicated and part.shape == parts[0].shape
                canvas.box(box, "plain" if same else f"rank{rank}", part.label, radius=4)
                if part.split:
                    draw_weight(canvas, box.x + 8, box.y + 6, part.split, rank)
            if part.label == "+":
                canvas.line((centers[0], stream), (x + 6, stream), (x + 6, y + 13), (lanes[0], y + 13), arrow=True)
                stream = y + 26 + room / 2
            y += 26
        shape = part.shape if part else ""
    return y


def draw_blocks() -> str:
    """A Llama block under tensor and under sequence parallelism: weights, shapes and collectives on two ranks."""
    column, top = 306, 74
    canvas = Canvas("A Llama block under tensor parallelism, and with sequence parallelism", 620)
    canvas.text(14, 26, ("A Llama block on tp = 2 ranks", "ink"), size=15)
    for i, (recipe, parts) in enumerate(BLOCKS.items()):
        x = 14 + i * column
        canvas.text(x + 18, top - 20, (Path(recipe).name, "ink"), size=13)
        bottom = draw_block(canvas, x, top, parts)
    y = bottom + 24
    canvas.legend(14, y, [("plain", "the same on both ranks"), ("rank0", "only rank 0"), ("rank1", "only rank 1")])
    for i, split in enumerate(("columns", "rows")):
        draw_weight(canvas, 14 + 224 * i, y + 13, split, 0)
        canvas.text(35 + 224 * i, y + 24, (f"weights split by {split}", "ink"))
    return canvas.svg(y + 40)


# ------------------------------------------------------------------------------------------------------------ context
CP, TOKENS = 4, 16
RINGS = dict(ring="contiguous parts", striped="every fourth token", zigzag="an early and a late part")
RINGS = {f"05_context_ring/{name}.py": layout for name, layout in RINGS.items()}
SHARDED = [f"05_context_ring/{name}.py" for name in ("all_gather_kv", "ring", "ulysses", "striped", "zigzag", "usp")]


def member(rank: int, ranks: int) -> SimpleNamespace:
    """A stand-in for a process group, which knows a rank and the size."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: ranks)


@functools.cache
def held(recipe: str) -> list[list[int]]:
    """Per rank, the positions that the recipe's `shard` gives it."""
    module, found = load(recipe), []
    cfg = module.Config(seq=TOKENS, device="cpu")
    for rank in range(CP):
        group = member(rank, CP)
        if hasattr(module, "Mesh"):
            row, column = divmod(rank, cfg.ulysses)
            group = module.Mesh(group, member(row, CP // cfg.ulysses), member(column, cfg.ulysses))
        found.append(module.shard(cfg, group).tolist())
    return found


@functools.cache
def scores(recipe: str) -> list[tuple[int, int, int, int]]:
    """(query, key, rank, step) of all scores that a ring computes, by the recipe's `shard` and `visible`."""
    module, tokens, found = load(recipe), held(recipe), []
    for rank, step in itertools.product(range(CP), repeat=2):
        owner = (rank - step) % CP
        if seen := module.visible(rank, owner, TOKENS // CP):
            queries, keys, causal = seen
            for i, query in enumerate(tokens[rank][queries]):
                behind = tokens[owner][keys][: i + 1] if causal else tokens[owner][keys]
                found += [(query, key, rank, step) for key in behind]
    return sorted(found)


def work(recipe: str) -> tuple[dict[tuple[int, int], int], list[int]]:
    """(rank, step) -> number of scores; and per step that of the rank that has most, for which the others wait."""
    counts = Counter((rank, step) for _, _, rank, step in scores(recipe))
    return counts, [max(counts[rank, step] for rank in range(CP)) for step in range(CP)]


def draw_scores(canvas: Canvas, x: float, y: float, recipe: str, side: float) -> None:
    """The matrix of scores in the order of the tokens, colored by step; ranks beside their queries and above keys."""
    for rank, tokens in enumerate(held(recipe)):
        for token in tokens:
            canvas.text(x - 5, y + (token + 0.5) * side + 4, (str(rank), "muted"), size=11, anchor="end")
            canvas.text(x + (token + 0.5) * side, y - 4, (str(rank), "muted"), size=11, anchor="middle")
    for query, key, _, step in scores(recipe):
        canvas.box(Box(x + key * side, y + query * side, side - 1, side - 1), f"step{step}")


def draw_ranks(canvas: Canvas, x: float, y: float, recipe: str, unit: float) -> None:
    """Per rank and step a frame as long as the step, filled as far as the rank has scores."""
    (counts, lengths), height, pitch, left = work(recipe), 24, 33, x
    for step, length in enumerate(lengths):
        canvas.text(left + length * unit / 2, y - 8, (f"step {step}", "muted"), size=11, anchor="middle")
        for rank in range(CP):
            cell = Box(left, y + rank * pitch, length * unit, height)
            if count := counts[rank, step]:
                canvas.box(cell._replace(w=count * unit), f"step{step}", str(count))
            canvas.frame(cell, "rule")
        left += length * unit
    for rank in range(CP):
        canvas.text(x - 8, y + rank * pitch + 16, (f"rank {rank}", "muted"), size=11, anchor="end")
    below, even = y + CP * pitch + 12, len(scores(recipe)) / CP
    canvas.line((x, below - 10), (left, below - 10), role="ink", arrow=True)
    canvas.text(x, below + 8, (f"time of {sum(lengths)} scores", "ink"), (f"; {even:g} if all worked alike", "muted"))


def draw_steps() -> str:
    """Causal attention on three rings: in which step each score is computed, and how long that takes."""
    width, side, right, y = 640, 12, 292, 110
    unit = (width - 14 - right) / max(sum(work(recipe)[1]) for recipe in RINGS)
    canvas = Canvas("Scores of causal attention on three rings, by step and rank", width)
    canvas.text(14, 26, (f"Causal attention to {TOKENS} tokens on a ring of {CP} ranks", "ink"), size=15)
    words = "Left: a cell is a score, of the query in its row and the key in its column, with the"
    words += "\nranks that hold them. Its color is the step of the ring in which it is computed."
    words += "\nRight: each rank over time, with its number of scores. Empty frame: it idles."
    for i, line in enumerate(words.split("\n")):
        canvas.text(14, 46 + 17 * i, (line, "muted"))
    for recipe, layout in RINGS.items():
        canvas.text(14, y, (Path(recipe).name, "ink"), (f"  {layout}", "muted"), size=13)
        draw_scores(canvas, 32, y + 26, recipe, side)
        draw_ranks(canvas, right, y + 42, recipe, unit)
        y += TOKENS * side + 56
    canvas.legend(14, y, [("step0", "step 0: its own keys"), *((f"step{i}", f"step {i}") for i in range(1, CP))])
    return canvas.svg(y + 18)


HEADS, LENGTH = 4, 8  # heads and tokens in the picture of their exchange


def watched_exchange(module: ModuleType) -> Callable[[], Any]:
    """A probe: instead of main, exchange queries that know their head and token; (head, token)s before and after."""
    dist.init_process_group("gloo")
    tokens = module.shard(SimpleNamespace(seq=LENGTH, device="cpu"), dist.group.WORLD)
    before = torch.cartesian_prod(torch.arange(HEADS), tokens).view(1, HEADS, -1, 2).float()
    during, *_ = module.to_heads(before, before, before, dist.group.WORLD)
    dist.destroy_process_group()
    module.main = lambda: None
    return lambda: [x.int().flatten(0, 2).tolist() for x in (before, during)]


def draw_ulysses() -> str:
    """Heads and tokens in a grid, with the rank that has each: before the exchange, and while attention computes."""
    probes = launch("05_context_ring/ulysses.py", CP, probe=watched_exchange, save=False).probes
    before, during = ({tuple(cell): rank for rank, cells in enumerate(now) for cell in cells} for now in zip(*probes))
    canvas, side, top = Canvas("Ulysses: an all-to-all swaps tokens for heads, another swaps them back", 560), 26, 44
    for x, stage, words in (56, before, "all heads, some tokens"), (344, during, "all tokens, some heads"):
        canvas.text(x, 16, (words, "ink"), size=14)
        canvas.text(x, top - 6, ("tokens →", "muted"), size=14)
        for (head, token), rank in stage.items():
            box = Box(x + token * side, top + head * side, side - 2, side - 2)
            canvas.box(box, f"rank{rank}", str(rank), size=14, radius=3)
    for head in range(HEADS):
        canvas.text(50, top + head * side + 17, (f"head {head}", "muted"), size=14, anchor="end")
    left, right, middle = 64 + LENGTH * side, 336, top + HEADS * side / 2
    canvas.text((left + right) / 2, middle - 18, ("q, k, v", "ink"), size=14, anchor="middle")
    canvas.line((left, middle - 10), (right, middle - 10), role="ink", arrow=True)
    canvas.line((right, middle + 10), (left, middle + 10), role="ink", arrow=True)
    canvas.text((left + right) / 2, middle + 28, ("outputs", "ink"), size=14, anchor="middle")
    kept, y = sum(rank == during[cell] for cell, rank in before.items()) / len(before), top + HEADS * side + 22
    words = f"Numbers are ranks. In each all-to-all a rank keeps {kept:.0%} and sends the rest."
    canvas.text(8, y, (words, "muted"), size=14)
    return canvas.svg(y + 12)


# Bytes of nine files of Python's library that follow each other, the last one cut where a row of 131,072 ends.
LENGTHS = [38413, 4975, 7489, 5990, 21320, 8681, 9656, 24074, 10474]


def scores_of_ranks(lengths: list[int], cp: int) -> list[int]:
    """The scores that each rank computes of a row of documents, by documents.py."""
    visible, found = load("05_context_ring/documents.py").visible, [0] * cp
    for rank, owner in itertools.product(range(cp), repeat=2):
        for _, queries, keys, causal, _ in visible(tuple(lengths), rank, owner, cp, sum(lengths)):
            n, m = queries.stop - queries.start, keys.stop - keys.start
            found[rank] += n * (n + 1) // 2 if causal else n * m
    return found


def draw_documents() -> str:
    """How much each rank computes, with document masks and without."""
    whole, masked = (scores_of_ranks(lengths, 8) for lengths in ([sum(LENGTHS)], LENGTHS))
    shares = [100 * ours / theirs for ours, theirs in zip(masked, whole)]
    figure, axis = axes(330)
    axis.barh(range(8), [100] * 8, color=LIGHT["plain"], label="zigzag.py, which computes all")
    axis.barh(range(8), shares, color=LIGHT["rank0"], label="documents.py")
    for rank, share in enumerate(shares):
        beside(axis, rank, f"{share:.0f} %")
    axis.axvline(statistics.mean(shares), color=LIGHT["ink"], linestyle="--", label="documents.py, shared evenly")
    axis.set_yticks(range(8), [f"rank {rank}" for rank in range(8)])
    words = f"% of the scores in a row of {sum(LENGTHS):,} tokens, {len(LENGTHS)} documents"
    axis.set(xlim=(0, 100), ylim=(7.5, -0.5), xlabel=words)
    return drawn(figure, "Attention's work of 8 ranks, with document masks", legend=2)


def draw_tokens() -> str:
    """Which rank holds which token: a row of ranks for each way in which recipes cut the sequence."""
    cell, left, y, layouts = 33, 52, 58, {}
    canvas = Canvas("Which rank holds which tokens", left + TOKENS * cell)
    for recipe in SHARDED:
        layouts.setdefault(str(held(recipe)), []).append(recipe)
    canvas.text(left - 8, 20, ("token", "muted"), size=14, anchor="end")
    for token in range(TOKENS):
        canvas.text(left + (token + 0.5) * cell, 20, (str(token), "muted"), size=14, anchor="middle")
    for recipes in layouts.values():
        canvas.text(left, y, (", ".join(Path(recipe).name for recipe in recipes), "ink"), size=14)
        canvas.text(left - 8, y + 27, ("rank", "muted"), size=14, anchor="end")
        for rank, tokens in enumerate(held(recipes[0])):
            for token in tokens:
                box = Box(left + token * cell, y + 9, cell - 2, 26)
                canvas.box(box, f"rank{rank}", str(rank), size=14, radius=3)
        y += 66
    u = load(SHARDED[-1]).Config.ulysses
    rows = [" and ".join(map(str, range(first, first + u))) for first in range(0, CP, u)]
    canvas.text(left, y - 10, (f"usp.py also swaps heads between ranks {', '.join(rows)}.", "muted"), size=14)
    return canvas.svg(y)


# --------------------------------------------------------------------------------------------------------------- mesh
MESH, HOST = "08_4d/train.py", 8  # ranks of a host
STAGE, TOKEN = ("forward", "other"), "sum4"  # roles of what a rank has: layers by their stage, and tokens
MESHES = {"tp-cp-dp-pp": "the default", "tp-cp-pp-dp": "as in Llama 3"}  # in figure 5 of arXiv:2407.21783


class Travel(NamedTuple):
    """What the ranks of a group send each other: how often in forward, what else in backward, and how often."""

    name: str
    role: str  # the folder in which the repository introduces it
    width: float  # of its line
    what: str
    forward: int
    per: str
    back: str
    backward: int


TRAVELS = {
    "tp": Travel("tp", "folder04", 7, "activations", 4, "block and micro-batch", "also gradients", 6),
    "cp": Travel("cp", "folder05", 4, "keys and values", 1, "block and micro-batch", "also gradients", 2),
    "dp_cp": Travel("dp × cp", "folder03", 2.5, "weights", 1, "step", "gradients", 1),
    "pp": Travel("pp", "folder06", 1.5, "activations", 1, "micro-batch", "gradients", 1),
}


def mesh(order: str) -> tuple[ModuleType, Any, dict[str, list[list[int]]], list[dict[str, int]]]:
    """Two on each axis: the recipe, its config, the groups by its `group_ranks`, and each rank's place in its own."""
    module = load(MESH)
    cfg = module.Config(dp=2, cp=2, tp=2, pp=2, order=order, device="cpu")
    groups = module.group_ranks(cfg)
    places = [
        {axis: group.index(rank) for axis, found in groups.items() for group in found if rank in group}
        for rank in range(2 * HOST)
    ]
    return module, cfg, groups, places


def draw_share(canvas: Canvas, x: float, y: float, side: float, module: Any, cfg: Any, place: dict[str, int]) -> None:
    """Two grids, with what a rank has filled: layers x parts of the matrices, and parts of batch x sequences."""
    found, parts, height = defaultdict(list), 2 * cfg.cp, cfg.layers * side / cfg.dp
    layers, tokens = module.split_layers(cfg, cfg.pp)[place["pp"]], module.shard(cfg, member(place["cp"], cfg.cp))
    for layer, part in itertools.product(range(cfg.layers), range(cfg.tp)):
        has = layer in layers and part == place["tp"]
        cell = Box(x + 2 * part * side, y + layer * side, 2 * side - 1, side - 1)
        found[STAGE[place["pp"]] if has else "plain"].append(cell)
    for batch, part in itertools.product(range(cfg.dp), range(parts)):
        has = batch == place["dp"] and part * cfg.seq // parts in tokens
        cell = Box(x + (2 * cfg.tp + 1.5 + 1.5 * part) * side, y + batch * height, 1.5 * side - 1, height - 1)
        found[TOKEN if has else "plain"].append(cell)
    canvas.cells(found)


def draw_links(canvas: Canvas, cards: list[Box], groups: dict[str, list[list[int]]]) -> None:
    """The lines of rank 0's groups: neighbours side by side, a bus above for those in its row, below for others."""
    level, first, bottom = cards[0].y - 18, cards[0], cards[0].y + cards[0].h
    for axis, travel in TRAVELS.items():
        (group,) = [group for group in groups[axis] if 0 in group]
        own, name = [cards[rank] for rank in group], (travel.name, travel.role)
        style = dict(role=travel.role, width=travel.width)
        middles = sorted({card.x + card.w / 2 for card in own})
        if group == [0, 1]:
            right, left, middle = first.x + first.w, own[1].x, first.y + first.h / 2
            canvas.line((right, middle), (left, middle), **style)
            canvas.text((right + left) / 2, middle + 17, name, size=11, anchor="middle")
        elif {card.y for card in own} == {first.y}:
            inside = 14 if axis == "cp" else 0  # its line lies below those of others, and between theirs
            ends = [middles[0] + inside, *(x - inside for x in middles[1:])]
            canvas.line((ends[0], level), (ends[-1], level), **style)
            for x in ends:
                canvas.line((x, level - travel.width / 2), (x, first.y), **style)
            over = cards[group[1] - 1 if axis == "cp" else 3]
            canvas.text(over.x + over.w / 2, level + 14, name, size=11, anchor="middle")
            level -= 18
        else:
            bus, several = (bottom + max(card.y for card in own)) / 2, len(middles) > 1
            for card in own:
                x = card.x + card.w / 2
                canvas.line((x, bottom if card.y == first.y else card.y), (x, bus), **style)
            if several:
                canvas.line((middles[0] - 1.25, bus), (middles[-1] + 1.25, bus), **style)
            canvas.text(middles[0] + 8, bus + (-5 if several else 4), name, size=11)


def draw_mesh() -> str:
    """16 ranks on two hosts in both orders: what each has, the groups of rank 0, and what travels in them how often."""
    left, width, card_w, card_h, gap, pad, corridor, above = 14, 640, 57, 60, 16, 10, 36, 46
    host_w, host_h, y = 4 * card_w + 3 * gap + 2 * pad, above + 2 * card_h + corridor + pad, 172
    canvas = Canvas("The mesh: what each of 16 ranks has, and with whom it talks", width)
    canvas.text(left, 26, (canvas.title, "ink"), size=15)
    canvas.text(left, 46, (f"{MESH} --dp 2 --cp 2 --tp 2 --pp 2 on two hosts of {HOST} ranks", "muted"))
    module, cfg, _, places = mesh(next(iter(MESHES)))
    draw_share(canvas, left, 64, 9, module, cfg, places[0])
    canvas.text(124, 78, ("Left: the model. A row is a layer, a column 1/tp of its matrices.", "ink"))
    canvas.text(124, 95, ("Right: the tokens. A row is 1/dp of the batch,", "ink"))
    canvas.text(124, 112, (f"a column 1/{2 * cfg.cp} of each sequence.", "ink"))
    entries = [(role, f"layers of stage {stage}") for stage, role in enumerate(STAGE)]
    canvas.legend(124, 133, [*entries, (TOKEN, "tokens")])
    for order, whose in MESHES.items():
        module, cfg, groups, places = mesh(order)
        between = [axis for axis in order.split("-") if any(len({r // HOST for r in g}) > 1 for g in groups[axis])]
        crossing = f"  {whose}: {' and '.join(between)} between hosts"
        canvas.text(left, y, (f"--order {order}", "ink"), (crossing, "muted"), size=13)
        cards, y = [], y + 31
        for rank, place in enumerate(places):
            host, (row, column) = rank // HOST, divmod(rank % HOST, 4)
            x = left + host * (width - 2 * left - host_w)
            if rank % HOST == 0:
                canvas.text(x, y - 7, (f"host {host}", "muted"))
                canvas.box(Box(x, y, host_w, host_h), "plain", radius=8)
            corner = x + pad + column * (card_w + gap), y + above + row * (card_h + corridor)
            cards.append(Box(*corner, card_w, card_h))
            canvas.box(cards[-1], "ground", radius=5)
            canvas.text(corner[0] + 6, corner[1] + 15, (str(rank), "ink"))
            draw_share(canvas, corner[0] + 6, corner[1] + 22, 4, module, cfg, place)
        draw_links(canvas, cards, groups)
        y += host_h + 32
    canvas.text(left, y, ("Lines are the groups of rank 0. They carry", "ink"), size=13)
    for x, phase in (112, "in forward"), (460, "in backward"):
        canvas.text(x, y + 20, (phase, "muted"))
    times, y = {1: "once", 2: "twice"}, y + 20
    for travel in TRAVELS.values():
        y += 20
        canvas.line((left, y - 4), (left + 28, y - 4), role=travel.role, width=travel.width)
        canvas.text(left + 38, y, (travel.name, travel.role))
        often, again = (times.get(n, f"{n} times") for n in (travel.forward, travel.backward))
        canvas.text(112, y, (f"{travel.what}, {often} per {travel.per}", "ink"))
        canvas.text(460, y, (f"{travel.back}, {again}", "ink"))
    return canvas.svg(y + 18)


# ------------------------------------------------------------------------------------------------------------ kernels
COALESCING = "09_kernels/coalescing.py"
COPIED, SIDE, BLOCK = 256, 16, 8  # elements to copy; rows, and columns, to transpose; elements of a program


def draw_touched(canvas: Canvas, x: float, y: float, line: int, pitch: float, offsets: list[list[int]], n: int) -> None:
    """n float32 elements in lines: those that programs 0 and 1 touch, and what their sectors bring along."""
    sector, spans = load(COALESCING).SECTOR // 4, defaultdict(list)
    fetched = {offset // sector for found in offsets for offset in found}
    for element in range(n):
        row, column = divmod(element, line)
        owners = [f"rank{program}" for program, found in enumerate(offsets) if element in found]
        role = owners[0] if owners else "gather" if element // sector in fetched else "plain"
        left, top = x + column * pitch + column // sector * 4, y + row * pitch * 1.25
        spans[role].append(Box(left, top, pitch - 1, pitch * 1.25 - 1))
    canvas.cells(spans)


def draw_addresses() -> str:
    """Which elements the first two programs of each copy and transpose touch, and in how many sectors too many."""
    module, left, y, pitch, small = load(COALESCING), 14, 84, 9, 8
    canvas = Canvas("Addresses that two programs touch, in copies and transposes", 640)
    canvas.text(left, 26, ("Elements that two programs touch, and the rest of their sectors", "ink"), size=15)
    sector = f"A row of {module.SECTOR // 4} cells is a sector, {module.SECTOR} bytes. Hardware moves whole sectors."
    canvas.text(left, 46, (sector, "muted"))
    words = {"rank0": "program 0", "rank1": "program 1", "gather": "the rest of a sector", "plain": "not touched"}
    canvas.legend(left, 66, list(words.items()))
    for kernel in module.COPIES:
        read, _ = zip(*(module.addresses(kernel, program, (COPIED,), BLOCK) for program in range(2)))
        times = f"  {module.sectors(read[0], 4):g}× the sectors that its elements fill"
        canvas.text(left, y + 16, (kernel.__name__, "ink"), (times, "muted"), size=13)
        draw_touched(canvas, left, y + 24, 64, pitch, [found.tolist() for found in read], COPIED)
        y += COPIED // 64 * pitch * 1.25 + 38
    y += 16
    for i, kernel in enumerate(module.TRANSPOSES):
        found = [module.addresses(kernel, program, (SIDE, SIDE), BLOCK) for program in range(2)]
        x = left + i * (2 * (SIDE * small + 4) + 64)
        canvas.text(x, y, (kernel.__name__, "ink"), size=13)
        for name, offsets in zip(("reads", "writes"), zip(*found)):
            canvas.text(x, y + 18, (f"{name} {module.sectors(offsets[0], 4):g}×", "muted"))
            draw_touched(canvas, x, y + 26, SIDE, small, [o.tolist() for o in offsets], SIDE * SIDE)
            x += SIDE * small + 24
    return canvas.svg(y + 26 + SIDE * small * 1.25 + 14)


def draw_tiles() -> str:
    """Which tiles run together, which blocks of scores exist, and in which order programs add to dq."""
    canvas, pitch, left, y = Canvas("Tiles of a matmul, and blocks of attention", 640), 26, 14, 26
    side, running = 8, 12  # tiles of the matrices, each way; programs that run at a time

    def grid(x: float, title: str, note: str, cells: dict[tuple[int, int], tuple[str, str]]) -> None:
        canvas.text(x, y + 20, (title, "ink"))
        canvas.text(x, y + 36, (note, "muted"))
        for (row, column), (role, text) in cells.items():
            box = Box(x + column * pitch, y + 46 + row * pitch, pitch - 2, pitch - 2)
            canvas.box(box, role, text, size=11, radius=2)

    canvas.text(left, y, ("Which block is where when", "ink"), size=15)
    y += 26
    words = f"A matmul: the first {running} of {side**2} programs run at a time."
    canvas.text(left, y, (words, "ink"), size=13)
    locate = load("09_kernels/matmul.py").locate.fn  # where the tile of a program begins
    for x, name, group in (left, "blocks: row after row", 1), (left + 316, "ordered: groups of 4 rows", 4):
        corners = [locate(tile, 128 * side, 128 * side, 128, 128, group) for tile in range(side**2)]
        tiles = [(row // 128, column // 128) for row, column in corners]
        loaded = sum(len(set(places)) for places in zip(*tiles[:running]))
        cells = {place: ("rank0" if n < running else "plain", f"{n}") for n, place in enumerate(tiles)}
        grid(x, name, f"{running} tiles need {loaded} rows and columns of blocks", cells)
    y += 46 + side * pitch + 28
    canvas.text(left, y, ("Causal attention: rows are blocks of queries, columns are blocks of keys.", "ink"), size=13)
    forward, backward = {}, {}
    for query, key in itertools.product(range(side), repeat=2):
        kind = "rank0" if key < query else "rank1" if key == query else "plain"
        forward[query, key] = kind, f"{query - key}" if key <= query else ""
        step = side - 1 - query + key  # from the last query on; each key is one step behind the one before
        backward[query, key] = (f"step{step % 4}", f"{step}") if key <= query else ("plain", "")
    grid(left, "forward in Gluon: a program per row", "number = step", forward)
    grid(left + 316, "backward in Gluon: a program per column", "number = step; a row adds up left to right", backward)
    y += 46 + side * pitch
    canvas.legend(left, y + 14, [("rank0", "all seen"), ("rank1", "has a mask"), ("plain", "skipped")])
    return canvas.svg(y + 34)


# ------------------------------------------------------------------------------------------------------ checkpointing
CHECKPOINTING = {"train": "none", "selective_checkpointing": "selective", "activation_checkpointing": "full"}
# kinds of memory: the role of its color and its hatch
HELD = dict(weights=("forward", ""), optimizer=("optimizer", ""), activations=("rank1", "//"), rest=("plain", ""))


def checkpointing(compiled: bool) -> dict[str, dict[str, float]]:
    """GiB at the peak of each recipe by kind, as memory.py predicts them with the flags of the measured runs."""
    memory, found = load("01_single_gpu/memory.py"), {}
    shape = memory.PRESETS["smollm_1_7b"] | dict(seq=2048, batch=4, dtype="bfloat16", compile=compiled)
    for recipe, recompute in CHECKPOINTING.items():
        _, kinds = memory.peak(memory.Config(**shape, recompute=recompute))
        sizes = {kind: kinds.get(kind, 0) / memory.GIB for kind in HELD}
        found[f"{recipe}.py"] = sizes | {"rest": sum(kinds.values()) / memory.GIB - sum(sizes.values())}
    return found


def draw_checkpointing() -> str:
    """Memory at the peak of the recipes that keep all, some and no activations; a line is what was measured."""
    figure, panels = axes(420, 2, sharex=True)
    runs = results("speed.json")["single"]["rows"]
    measured = {Path(row["file"]).name: statistics.median(run["memory"] for run in row["rounds"]) for row in runs}
    for axis, compiled in zip(panels, (False, True)):
        bars = checkpointing(compiled)
        stack(axis, bars, HELD)
        axis.set_title("with --compile" if compiled else "without --compile")
    look = dict(color=LIGHT["ink"], markersize=34, markeredgewidth=2, label="measured")
    panels[1].plot([measured[name] for name in bars], list(bars), "|", **look)
    panels[1].set_xlabel("GiB at the peak: SmolLM-1.7B, 8,192 tokens")
    panels[0].set_xlim(0, 70)
    return drawn(figure, "Memory at the peak, without and with activation checkpointing", legend=3)


# ------------------------------------------------------------------------------------------------------------ experts
TOKENS_HERE, EXPERT_FLAGS = 3, "--device cpu --layers 1 --experts 4 --edp 2 --batch 4 --seq 3 --steps 1 --seed 7"


def watched_experts(module: ModuleType) -> Callable[[], Any]:
    """A probe: the tokens that come to each expert of this rank, and the ranks that exchange or sum what."""
    orders, rows, ranks, models = [], {}, {}, []
    sort, dispatch, build, all_reduce = module.sort_by_expert, module.dispatch, module.build_model, dist.all_reduce

    def watched_dispatch(x, gates, ends, ep):
        tokens = TOKENS_HERE * dist.get_rank() + orders[-1][0] // (len(x) // TOKENS_HERE)
        here, _, ends_here, _ = dispatch(tokens[:, None].to(x.dtype), gates.detach(), ends, ep)
        parts = here[:, 0].int().tensor_split(ends_here[:-1].long())
        rows.update({ep.rank() * len(parts) + i: part.tolist() for i, part in enumerate(parts)})
        ranks["rows"] = dist.get_process_group_ranks(ep)
        return dispatch(x, gates, ends, ep)

    def watched_sum(x, group):
        for name, p in models[0].named_parameters():
            if p.grad is x:
                ranks["experts" if ".experts." in name else "all others"] = dist.get_process_group_ranks(group)
        return all_reduce(x, group=group)

    module.dispatch, dist.all_reduce = watched_dispatch, watched_sum
    module.sort_by_expert = lambda *args: orders.append(sort(*args)) or orders[-1]
    module.build_model = lambda cfg: models.append(build(cfg)) or models[0]
    return lambda: (rows, ranks)


def draw_experts() -> str:
    """Tokens go to their experts on the ranks of ep and back; below it, which ranks sum which gradients."""
    canvas, y = Canvas("Expert parallelism: tokens travel to experts and back", 560), 50
    found = launch("07_expert/expert_parallel.py", 4, EXPERT_FLAGS, probe=watched_experts, save=False).probes
    room, lefts = 134, [2 + 140 * rank for rank in range(len(found))]

    def tokens(x: float, y: float, some: list[int]) -> None:
        for i, token in enumerate(some):
            box = Box(x + 20 * i, y, 18, 20)
            canvas.box(box, f"rank{token // TOKENS_HERE}", chr(ord("a") + token), size=14, radius=3)

    def own_tokens(words: str) -> None:
        canvas.text(2, y - 8, (words, "muted"), size=14)
        for rank, x in enumerate(lefts):
            tokens(x + 36, y, [*range(TOKENS_HERE * rank, TOKENS_HERE * (rank + 1))])

    def exchange(words: str) -> None:
        for group in sorted({tuple(ranks["rows"]) for _, ranks in found}):
            box = Box(lefts[group[0]], y + 32, lefts[group[-1]] + room - lefts[group[0]], 24)
            for rank in group:
                for top in box.y - 10, box.y + box.h:
                    canvas.line((lefts[rank] + room / 2, top), (lefts[rank] + room / 2, top + 10), arrow=True)
            canvas.box(box, "plain", words, size=14, radius=5)

    for rank, x in enumerate(lefts):
        canvas.text(x + room / 2, 16, (f"rank {rank}", "ink"), size=14, anchor="middle")
    own_tokens("attention and router, on a rank's own tokens")
    exchange("all-to-all: to the experts")
    y += 68
    for x, (rows, _) in zip(lefts, found):
        for i, (expert, some) in enumerate(rows.items()):
            canvas.text(x + 4, y + 16 + 48 * i, (f"expert {expert}", "ink"), size=14)
            tokens(x + 4, y + 22 + 48 * i, some)
        canvas.frame(Box(x, y, room, 48 * len(rows)), "rule")
    y += 48 * len(rows) - 22
    exchange("all-to-all: outputs back")
    y += 92
    own_tokens("the two outputs of a token are added up")
    y += 52
    canvas.text(2, y, ("Gradients are summed over the ranks with a dot:", "ink"), size=14)
    sums = {f"experts {' and '.join(map(str, rows))}": ranks["experts"] for rows, ranks in found}
    for name, group in (sums | {"all others": found[0][1]["all others"]}).items():
        y += 38
        middles = [lefts[rank] + room / 2 for rank in group]
        canvas.line((middles[0], y), (middles[-1], y), role="ink")
        canvas.text(middles[0], y - 10, (name, "ink"), size=14)
        for x in middles:
            canvas.box(Box(x - 5, y - 5, 10, 10), "ink", radius=5)
    return canvas.svg(y + 14)


# ------------------------------------------------------------------------------------------------------------ balance
BALANCED = dict(expert_parallel=("not balanced", "-"), auxiliary_loss=("losses", "--"), bias_balancing=("biases", ":"))
BALANCE_FLAGS = "--device cpu --layers 3 --dim 64 --heads 4 --ffn 96 --seq 64 --steps 150"
END = 10  # steps of the mean at the end


def watched_rows(module: ModuleType) -> Callable[[], Any]:
    """A probe, for 1 rank: the rows of each expert of the last layer, per step."""
    seen, busiest = [], module.busiest
    module.busiest = lambda rows: seen.append(rows[-1].long().tolist()) or busiest(rows)
    return lambda: seen


def measure_balance() -> None:
    """Train with and without balancing, and store the rows of each expert, per step."""
    paths = [f"07_expert/{name}.py" for name in BALANCED]
    rows = {path: launch(path, 1, BALANCE_FLAGS, probe=watched_rows, save=False).probes[0] for path in paths}
    lines = (f"{json.dumps(path)}: {json.dumps(steps)}" for path, steps in rows.items())
    (RESULTS / "balance.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def busiest(name: str) -> list[float]:
    """Rows of the busiest expert over the mean, as means over END steps that follow each other."""
    steps = results("balance.json")[f"07_expert/{name}.py"]
    loads = [max(rows) * len(rows) / sum(rows) for rows in steps]
    return [statistics.mean(loads[i : i + END]) for i in range(len(loads) - END + 1)]


def draw_balance() -> str:
    """How many times the mean the busiest expert has, step by step, without balancing and with two kinds of it."""
    figure, axis = axes(360)
    for (name, (how, style)), role in zip(BALANCED.items(), ("folder06", "folder01", "folder02")):
        loads = busiest(name)
        words = f"{name}.py, {how}: {loads[-1]:.2f}× at the end"
        axis.plot(range(END, END + len(loads)), loads, style, color=LIGHT[role], linewidth=2.5, label=words)
    axis.set(xlim=(END, END + len(loads) - 1), ylim=(1, 4.1), xlabel=f"step; each point is the mean of {END}")
    axis.set_ylabel("busiest expert / mean")
    axis.grid(axis="y")
    return drawn(figure, "The busiest expert over the mean while training, with and without balancing", legend=1)


# ----------------------------------------------------------------------------------------------------------- timeline
TIMELINES = "timelines/zero_stages"  # of tests/results/
STAGES = ("zero1", "zero1_overlap", "zero2", "zero3")
SPANS = {  # what runs: its name, role, hatch, and lane from below
    "forward": ("forward", "forward", "", 2),
    "backward": ("backward", "backward", "//", 2),
    "optimizer": ("optimizer", "optimizer", "..", 2),
    "gather": ("all-gather", "gather", "", 1),
    "other": ("reductions, copies", "other", "\\\\", 1),
    "exposed": ("exposed: nothing computes", "exposed", "", 0),
}


def draw_timeline() -> str:
    """One step of each ZeRO stage on one time axis: compute, communication, and what of it nothing hides."""
    figure, panels = axes(480, len(STAGES), sharex=True, width=640)
    for axis, stage in zip(panels, STAGES):
        report = results(f"{TIMELINES}/{stage}.json")
        spans = report["timeline"]
        # reductions and, on the side stream, the copies that round a shard to the dtype in which it is sent
        spans["other"] = load("01_single_gpu/profiling.py").without(spans["communication"], spans["gather"])
        for kind, (name, role, hatch, lane) in SPANS.items():
            bars = [(start, end - start) for start, end in spans[kind]]
            axis.broken_barh(bars, (lane + 0.08, 0.84), label=name, linewidth=0, **filled(role, hatch))
        numbers = ", ".join(f"{kind} {report['ms'][kind]:.1f}" for kind in ("step", "communication", "exposed"))
        axis.set_title(f"{stage}.py: {numbers} ms")
        axis.set_yticks([0.5, 1.5, 2.5], ["exposed", "communication", "compute"])
        axis.set_xlim(0)
    panels[-1].set_xlabel(f"ms of one step, {report['where']}")
    return drawn(figure, "Timelines of the ZeRO stages: compute and communication", legend=3)


# ----------------------------------------------------------------------------------------------------------- roofline
OPERATIONS = {  # per element, forward and backward together: operations (an exponential or a root is one); bytes
    "elementwise": (4 + 4, 8 + 12),  # compare, exp, subtract, select; compare, exp, multiply, select
    "softmax": (5 + 4, 4 + 6),  # max, subtract, exp, add, multiply; multiply, add, subtract, multiply
    "rmsnorm": (4 + 9, 4 + 6),  # square, add, two scales; three products with dy, three sums, three scales
    "swiglu": (5 + 10, 6 + 10),  # a sigmoid is exp, add, divide; two products; the sigmoid again, and seven
    "rope": (3 + 3, 4 + 4),  # two products and a sum, each way
    "cross_entropy": (4 + 4, 6),  # max, subtract, exp, add; subtract, exp, subtract, multiply
    "adamw": (2 + 15, 30),  # square and sum for the norm; clip, two moments, decay, root, two divisions, update
}


def moved(name: str, row: dict[str, Any]) -> float:
    """Bytes of what a row has measured, by the `cost` of its file."""
    module, what, half = load(f"09_kernels/{name}.py"), row["what"], torch.bfloat16
    sizes = [int(size) for size in re.findall(r"\d+", what)]
    if name == "grouped_matmul":
        experts, d, f = module.MODELS[what.split(",")[0]]
        n, k = (2 * f, d) if "gate" in what else (d, f)
        return module.cost(round(row["rate"] * row["ms"] * 1e9 / (2 * n * k)), experts, n, k, half)[0]
    if name.startswith("flash"):
        b, h, kv, s, k = sizes[:5]
        keys = (s,) if name == "flash_attention" else ()
        return module.cost(b, h, kv, s, *keys, k, True, half)[2 * ("backward" in what)]
    if name == "divergence":
        flops, moved = reversed(module.cost(module.make_input(2**16, 1 / 8, False, "cpu")))
        return row["rate"] * row["ms"] * 1e9 * moved / flops
    return module.cost(*sizes[:3], torch.float32 if "float32" in what else half)[0]


def dots() -> dict[str, tuple[float, float]]:
    """FLOPs per byte and TFLOP/s of the kernels that compute something: all of quickest(), of tiling.py each rung."""
    points = {}
    for name in {name for name in results("kernels.json") if " on " not in name} - {"coalescing", "tiling"}:
        rows = quickest(name, True).values()
        amount, ms = sum(row["rate"] * row["ms"] for row in rows), sum(row["ms"] for row in rows)
        if name in OPERATIONS:  # amount is of bytes
            operations, size = OPERATIONS[name]
            points[name] = operations / size, operations / size * amount / ms
        else:
            points[name] = amount * 1e9 / sum(moved(name, row) for row in rows), amount / ms
    for row in (row for row in contenders("tiling") if row["mine"]):
        intensity = row["rate"] * row["ms"] * 1e9 / moved("tiling", row)
        points[f"tiling, {row['by']}{', bf16' * ('bfloat16' in row['what'])}"] = intensity, row["rate"]
    (head,) = (row for row in contenders("cross_entropy") if row["mine"] and row["unit"] == "TFLOP/s")
    n, d, v = 16384, 4096, 128256  # rows, width, vocabulary; x and the head are read, their gradients written
    return points | {"cross_entropy, head": (6 * n * d * v / (4 * d * (n + v)), head["rate"])}


def draw_roofline() -> str:
    """FLOP/s of each kernel over its FLOPs per byte, below what memory, CUDA cores and tensor cores allow."""
    figure, axis = axes(500, width=640)
    peaks = {str(dtype)[6:]: peak / 1e12 for dtype, peak in load("09_kernels/tiling.py").PEAK.items()}
    peaks["fp8"] = load("09_kernels/fp8_matmul.py").PEAK / 1e12
    copy = contenders("coalescing")[0]["rate"] / contenders("coalescing")[0]["share"]
    axis.plot([0.25, peaks["fp8"] / copy], [copy * 0.25, peaks["fp8"]], color=LIGHT["ink"])
    axis.text(45, 250, f"memory: {copy:.3g} TB/s", ha="right", va="center")
    for (dtype, peak), units in zip(peaks.items(), ("CUDA cores", "tensor cores", "tensor cores")):
        axis.plot([peak / copy, 2**13], [peak, peak], color=LIGHT["ink"])
        axis.text(peak / copy * 0.8, peak, f"{units}, {dtype}: {peak:,.4g}", ha="right", va="center")
    low, high = 0.2, 3000
    columns = {0.2: [], 0.47: [], 1.03: []}  # of labels, from left to right, in widths of the axes
    for name, (intensity, speed) in sorted(dots().items(), key=lambda dot: -dot[1][1]):
        axis.plot(intensity, speed, "o", color=LIGHT["folder09"])
        column = 0.2 if intensity < 4 else 0.47 if intensity < 64 else 1.03
        wanted = math.log(speed / low) / math.log(high / low) if column > 0.2 else 0.3
        columns[column].append(min([wanted, *(height - 0.045 for height in columns[column])]))
        lead = dict(arrowstyle="-", color=LIGHT["rule"], shrinkA=0, shrinkB=4, relpos=(0, 0.5))
        place = dict(xytext=(column, columns[column][-1]), textcoords="axes fraction")
        axis.annotate(name, (intensity, speed), **place, va="center", arrowprops=lead)
    axis.set(xscale="log", yscale="log", xlim=(0.25, 2**13), ylim=(low, high), xlabel="FLOP per byte", ylabel="TFLOP/s")
    for scale, ticks in (axis.xaxis, (0.25, 1, 4, 16, 64, 256, 1024, 4096)), (axis.yaxis, (1, 10, 100, 1000)):
        scale.set_ticks(ticks, [f"{tick:,g}" for tick in ticks])
        scale.set_ticks([], minor=True)
    axis.grid()
    return drawn(figure, "Roofline: what limits the kernels of this folder")


DOING = dict(matmuls=("forward", ""), attention=("backward", "//"), elementwise=("rank1", ""))  # color, hatch
DOING |= dict(optimizer=("optimizer", "\\\\"), rest=("rule", ""))


def draw_step() -> str:
    """Where the milliseconds of a step go: the root's, and below it that with the kernels of this folder."""
    presets = results("kernel_steps.json")
    gpu = presets.pop("measured")["gpu"]
    figure, panels = axes(130 * len(presets) + 60, len(presets), width=640)
    for axis, (preset, steps) in zip(panels, presets.items()):
        bars = {
            re.sub(".*, .*/", "+ ", name): {kind: max(0, step[kind]) for kind in DOING} for name, step in steps.items()
        }
        stack(axis, bars, DOING)
        axis.set_title(preset)
    panels[-1].set_xlabel(f"ms of a step, {gpu}, compiled")
    return drawn(figure, "Where the time of a training step goes, without and with our kernels", legend=5)


# ------------------------------------------------------------------------------------------------------------- curves
def losses_at_end() -> dict[str, float]:
    """By run of tests/tools/curves.py, the mean loss of the last 200 steps."""
    return {run["label"]: statistics.mean(run["losses"][-10:]) for run in results("curves.json")["runs"]}


def draw_curves() -> str:
    """Loss over the steps in all formats; below it how far those that follow fp32 are from it at the end."""
    stored, ends = results("curves.json"), losses_at_end()
    near = {label: loss - ends["fp32"] for label, loss in ends.items() if loss < ends["fp32"] + 0.1}
    figure, (upper, lower) = axes(540, 2)
    for run in stored["runs"]:
        label, losses, (role, style, mark) = run["label"], run["losses"], ("folder01", "-", "o")
        steps = [stored["each"] * (i + 1) for i in range(len(losses))]
        if run["naive"]:
            role, style, mark = "folder06", "--" if "fp16" in label else ":", "D"
        if label not in near:
            above = 0.15 if "fp16" in label else -0.4
            upper.text(steps[-1], losses[-1] + above, f"{label}: {ends[label]:.2f}", ha="right")
        elif label != "fp32":
            y = list(near).index(label) - 1
            lower.plot(near[label], y, mark, color=LIGHT[role])
            beside(lower, y, f"{near[label]:+.3f}")
        upper.plot(steps, losses, style, color=LIGHT[role])
    last = [ends[label] for label in near]
    upper.text(steps[-1], max(last) + 0.2, f"{len(near)} others: {min(last):.2f} to {max(last):.2f}", ha="right")
    upper.set(xlim=(0, steps[-1]), ylim=(0, 4.5), xlabel="step", ylabel="loss")
    upper.grid(axis="y")
    del near["fp32"]
    lower.set_yticks(range(len(near)), near)
    lower.axvline(0, color=LIGHT["muted"])
    lower.locator_params(axis="x", nbins=4)
    lower.set(ylim=(len(near) - 0.5, -0.5), xlabel="mean loss of the last 200 steps, minus that of fp32")
    lower.grid(axis="y")
    return drawn(figure, "Loss of a small Llama in all formats, and how far each is from fp32 at the end")


def draw_minutes() -> str:
    """Loss on unseen text over minutes, means of the seeds; below it the minutes to one loss, a mark for each seed."""
    stored, found = results("time.json"), time_to_loss(results("time.json"))
    means = {label: statistics.mean(minutes for _, minutes in times) for label, times in found.items()}
    figure, (upper, lower) = axes(540, 2)
    for y, label in enumerate(sorted(means, key=means.get)):
        runs = [run for run in stored["runs"] if run["label"] == label]
        steps, minutes = map(sum, zip(*found[label]))  # of all seeds
        losses = [statistics.mean(at) for at in zip(*(run["losses"] for run in runs))]
        times = [stored["each"] * (i + 1) * minutes / steps for i in range(len(losses))]
        role, style = ("folder06", "--") if "fp8" in label else ("folder01", ":" if "fp32" in label else "-")
        family = label.split()[0].strip(",").replace("stochastic", "bf16")
        words = "" if family in upper.get_legend_handles_labels()[1] else family
        upper.plot(times, losses, style, color=LIGHT[role], label=words)
        for (_, minutes), mark in zip(found[label], "o^s"):
            lower.plot(minutes, y, mark, color=LIGHT[role], fillstyle="none")
    upper.set(xlim=0, xlabel="minutes of training", ylabel="loss on unseen text")
    lower.set(xlim=upper.get_xlim(), xlabel="minutes to the lowest loss that all reach, three seeds")
    lower.set_yticks(range(len(means)), sorted(means, key=means.get))
    lower.set_ylim(len(means) - 0.5, -0.5)
    upper.legend(loc="upper right")
    for axis in upper, lower:
        axis.grid(axis="x" if axis is lower else "y")
    return drawn(figure, "Loss on unseen text over time in all formats, and the time to one loss")


def draw_muon() -> str:
    """Loss over the steps with the best learning rate of AdamW and of Muon, three seeds; and at the end, by rate."""
    stored = results("optimizers.json")
    figure, (curves, by_rate) = axes(320, 1, 2, width=640, sharey=True, gridspec_kw={"width_ratios": (1.3, 1)})
    for name, role, mark in ("AdamW", "folder01", "o--"), ("Muon", "folder06", "s-"):
        mine = [run for run in stored["runs"] if run["optimizer"] == name]
        (best,) = {run["lr"] for run in mine if run["seed"] > 0}
        seeds = [run for run in mine if run["lr"] == best]
        words = f"{name}, lr {best:g}: {statistics.mean(run['last'] for run in seeds):.2f}"
        for run in seeds:
            steps = [stored["each"] * (i + 0.5) for i in range(len(run["losses"]))]
            curves.plot(steps, run["losses"], mark[1:], color=LIGHT[role], label="" if run["seed"] else words)
        ends = sorted((run["lr"], run["last"]) for run in mine if run["seed"] == 0)
        by_rate.plot(*zip(*ends), mark, color=LIGHT[role], label=name)
    curves.set(ylim=(0.5, 3), xlim=0, xlabel="step", ylabel="loss", title="Best learning rate, three seeds")
    ticks = sorted({run["lr"] for run in stored["runs"]})[1::2]
    by_rate.set(xscale="log", xlabel="learning rate", title="At the end")
    by_rate.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    by_rate.set_xticks([], minor=True)
    for axis in curves, by_rate:
        axis.legend(loc="upper right")
        axis.grid(axis="y")
    return drawn(figure, "Loss of a small Llama with AdamW and with Muon, over the steps and by learning rate")


# --------------------------------------------------------------------------------------------------------------- main
DRAWN = {
    "tests": (draw_family, draw_look),
    "01_single_gpu": (draw_checkpointing, draw_muon),
    "02_data_parallel": (draw_ring,),
    "03_zero": (draw_timeline,),
    "04_tensor_sequence": (draw_blocks,),
    "05_context_ring": (draw_tokens, draw_steps, draw_ulysses, draw_documents),
    "06_pipeline": (draw_predicted,),
    "07_expert": (draw_balance, draw_experts),
    "08_4d": (draw_mesh,),
    "09_kernels": (draw_step, draw_addresses, draw_roofline, draw_tiles),
    "10_mixed_precision": (draw_curves, draw_minutes),
}
PICTURES = {
    f"{folder}/{draw.__name__.removeprefix('draw_')}.svg": draw for folder, found in DRAWN.items() for draw in found
}
PICTURES |= {path.replace(".py", ".svg"): functools.partial(draw_schedule, path) for path in schedules.CLAIMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--balance", action="store_true")
    if parser.parse_args().balance:
        measure_balance()
    for path, draw in PICTURES.items():
        (ROOT / path).write_text(draw())


if __name__ == "__main__":
    main()
