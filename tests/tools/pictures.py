"""Draw what is data: schedules by the recipes' own functions, and what tests/results/ holds, as SVG.

    python tests/tools/pictures.py            write all of them; tests/test_pictures.py compares them with the files
    python tests/tools/pictures.py --balance  first train again what balance.svg shows

Recipes draw other pictures (memory.py, profiling.py, plan.py, formats.py), such as
`python 01_single_gpu/profiling.py tests/results/timelines/zero_stages/*.json --draw 03_zero/timeline.svg`.
Diagrams are files that nothing generates.
"""

import argparse
import functools
import io
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
from matplotlib import pyplot

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

import schedules
from curves import time_to_loss
from launch import ROOT, launch, load
from pages import RESULTS, results

# Legible on white and on black; nobody needs the colors. Sizes are in points: 640 pixels are 480 points.
INK, TEXT = "#757d88", "#1f2328"  # of texts and axes; of texts on a bar
BLUE, GREEN, RED = "#4f93d1", "#3f9f5c", "#d64541"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "pictures", "font.size": 9, "font.sans-serif": ["DejaVu Sans"]}
STYLE |= {"axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"savefig.transparent": True, "legend.frameon": False, "hatch.linewidth": 0.5, "hatch.color": TEXT}
STYLE |= {"grid.alpha": 0.3, "grid.color": INK}
STYLE |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)


def panels(height: float, rows: int = 1, columns: int = 1, width: float = 470, **more: Any) -> tuple[Any, Any]:
    """A figure of so many points, and its axes."""
    matplotlib.rcParams.update(matplotlib.rcParamsDefault | STYLE | {"backend": "svg"})
    figure = pyplot.figure(figsize=(width / 72, height / 72), layout="constrained")
    return figure, figure.subplots(rows, columns, **more)


def drawn(figure: Any, legend: int = 0) -> str:
    """The SVG of a figure, with the legend of its first axes in so many columns."""
    if legend:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=legend)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    pyplot.close(figure)
    text = re.sub(r"(\.\d)\d{4,}|\s*<!--.*?-->", r"\1", file.getvalue())  # a tenth of a point suffices
    return re.sub(r"\s*\n\s*", "\n", text)


OPERATIONS = {  # color of the first chunk and of the second; where a bar of an operation has a line, if it has one
    "F": ("forward", "#9cc3e6", "#5e9bd3", None),
    "B": ("backward", "#a9d6a0", "#74b868", 0.32),
    "W": ("weight gradients", "#f5d595", "#dba23f", -0.42),
}


def draw_slots(axis: Any, line: schedules.Pipeline, slots: list[schedules.Slot], size: float) -> None:
    """A row per rank with its operations and their micro-batches; at its end how many are in flight, times size."""
    ranks, scale = len(line.orders), schedules.makespan(slots)
    bars = {}  # of one look, in one row
    for slot in slots:
        start, width = slot.start, slot.end - slot.start - 0.003 * scale
        bars.setdefault((slot.op, slot.stage >= ranks, slot.rank), []).append((start, width))
        if width > 0.013 * scale:
            axis.text(start + width / 2, slot.rank, f"{slot.i}", ha="center", va="center", color=TEXT)
    for rank, peak in enumerate(schedules.in_flight(line)):
        axis.broken_barh([(0, scale)], (rank - 0.42, 0.84), color=INK, alpha=0.2, label=None if rank else "idle")
        axis.text(1.01 * scale, rank, f"{peak * size:g}", va="center")
    for (op, later, rank), spans in sorted(bars.items()):
        name, *colors, mark = OPERATIONS[op]
        words = None if rank else "second chunk, or direction" if later and op == "F" else None if later else name
        axis.broken_barh(spans, (rank - 0.42, 0.84), color=colors[later], linewidth=0, clip_on=False, label=words)
        if mark:
            axis.broken_barh(spans, (rank + mark, 0.1), color=TEXT, linewidth=0, clip_on=False)
    axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axis.set(xlim=(0, scale), ylim=(ranks - 0.5, -0.5), xticks=[])
    axis.set_title("in flight", loc="right")
    axis.spines[:].set_visible(False)


def draw_schedules(paths: list[str], width: float, ranks: int = 4, microbatches: int = 8) -> str:
    """Schedules whose forwards, backwards and weight gradients of a stage take as long, one above the other."""
    figure, axes = panels(50 + 90 * len(paths), len(paths), width=width, squeeze=False)
    for axis, path in zip(axes[:, 0], paths):
        claim, line = schedules.CLAIMS[path], schedules.pipeline(load(path), ranks, microbatches)
        slots = schedules.simulate(line, dict.fromkeys("FBW", claim.size))
        draw_slots(axis, line, slots, claim.size)
        axis.set_title(f"{claim.title}; idle: {schedules.idle_share(slots):.1%}")
    return drawn(figure, legend=3)


STEP = dict(matmuls=("#9cc3e6", ""), attention=("#a9d6a0", "//"), elementwise=("#f2b661", ""))  # kernels of a step
STEP |= dict(optimizer=("#d9c2e9", "\\\\"), rest=("#c8c8c8", ""))


def draw_step() -> str:
    """Where the milliseconds of a step go: the root's, and below it that with the kernels of this folder."""
    presets = results("kernel_steps.json")
    gpu = presets.pop("measured")["gpu"]
    figure, axes = panels(250, len(presets))
    for axis, (preset, steps) in zip(axes, presets.items()):
        names, ends = [name.replace(", ", ",\n") for name in steps], [0] * len(steps)
        for kind, (color, hatch) in STEP.items():
            widths = [max(0, step[kind]) for step in steps.values()]
            bars = axis.barh(names, widths, 0.75, ends, color=color, hatch=hatch, label=kind)
            axis.bar_label(bars, [f"{ms:.1f}" if ms > 25 else "" for ms in widths], label_type="center", color=TEXT)
            ends = [end + width for end, width in zip(ends, widths)]
        axis.bar_label(bars, [f"{end:.1f}" for end in ends], padding=4)
        axis.set(xlim=(0, 1.1 * max(ends)), title=preset)
        axis.invert_yaxis()
    axes[-1].set_xlabel(f"ms of a step, {gpu}, compiled")
    return drawn(figure, legend=5)


ROOFLINE = {  # file, what is measured, by whom: FLOPs (a root is one) per byte; of a matmul, if each matrix moves once
    ("elementwise", "2^28 elements, forward", "ours"): 4 / 8,
    ("softmax", "16384 x 4096, forward", "ours"): 5 / 4,
    ("rmsnorm", "16384 x 4096, forward", "ours"): 4 / 4,
    ("swiglu", "16384 x 14336, forward", "ours"): 5 / 6,
    ("rope", "4 x 4096 x (32 + 8) heads of 128, forward", "ours"): 3 / 4,
    ("cross_entropy", "16384 x 128256, forward and backward", "ours"): 8 / 6,
    ("adamw", "415,260,672 parameters, bf16 and fp32 masters", "ours"): 17 / 30,
    ("tiling", "4096 x 4096 x 4096, float32", "rows"): 2 * 4096 / 3 / 4,
    ("tiling", "4096 x 4096 x 4096, float32", "tiles"): 2 * 4096 / 3 / 4,
    ("tiling", "4096 x 4096 x 4096, float32", "dot"): 2 * 4096 / 3 / 4,
    ("matmul", "16384 x 4096 -> 14336, forward, sustained", "ours"): 2 / (1 / 14336 + 1 / 4096 + 1 / 16384) / 2,
    ("fp8_matmul", "16384 x 14336 x 4096, tensorwise, sustained", "Triton"): 2 / (1 / 14336 + 2 / 4096 + 1 / 16384),
    ("flash_attention", "2 x 32/8 heads, 8192 x 128, forward", "ours"): 2 * 8192 / (2 + 2 / 4) / 2,
    ("flash_attention_gluon", "2 x 32/8 heads, 8192 x 128, forward", "ours"): 2 * 8192 / (2 + 2 / 4) / 2,
}


def draw_roofline() -> str:
    """FLOP/s of each kernel over its FLOPs per byte, below what memory, CUDA cores and tensor cores allow."""
    figure, axis = panels(330)
    peaks = {str(dtype)[6:]: peak / 1e12 for dtype, peak in load("09_kernels/tiling.py").PEAK.items()}
    peaks["fp8"] = load("09_kernels/fp8_matmul.py").PEAK / 1e12
    copy = next(row["rate"] / row["share"] for row in results("kernels.json")["coalescing"]["rows"])
    axis.plot([0.25, peaks["fp8"] / copy], [copy * 0.25, peaks["fp8"]], color=INK)
    axis.text(40, 250, f"memory: {copy:.3g} TB/s", ha="right")
    for dtype, peak in peaks.items():
        axis.plot([peak / copy, 2**13], [peak, peak], color=INK)
        axis.text(peak / copy * 0.8, peak, f"{dtype}: {peak:,.4g}", ha="right", va="center")
    points, stored = [], results("kernels.json")
    for (name, what, by), intensity in ROOFLINE.items():
        (row,) = (row for row in stored[name]["rows"] if (row["what"], row["by"]) == (what, by))
        rate = row["rate"] * (intensity if row["unit"] == "TB/s" else 1)
        points.append((name if by in ("ours", "Triton") else f"{name}, {by}", (intensity, rate)))
    points.sort(key=lambda dot: dot[1][1])
    for group, x in ([dot for dot in points if dot[1][0] < 16], 0.3), ([dot for dot in points if dot[1][0] > 16], 1.02):
        for i, (name, place) in enumerate(group):
            lead = dict(arrowstyle="-", color=INK, alpha=0.5, relpos=(0, 0.5))
            words = dict(xytext=(x, 0.04 + 0.07 * i + 0.3 * (x > 1)), textcoords="axes fraction", va="center")
            axis.annotate(name, place, **words, arrowprops=lead)
            axis.plot(*place, "o", color=BLUE)
    axis.set(xscale="log", yscale="log", xlim=(0.25, 2**13), ylim=(0.5, 4000))
    axis.set(xlabel="FLOP per byte", ylabel="TFLOP/s of an H200")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid()
    return drawn(figure)


BALANCED = dict(expert_parallel=(RED, "-"), auxiliary_loss=(BLUE, "--"), bias_balancing=(GREEN, ":"))
BALANCE_FLAGS = "--device cpu --layers 3 --dim 64 --heads 4 --ffn 96 --seq 64 --steps 150"


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


def draw_balance(mean: int = 10) -> str:
    """How many times the mean the busiest expert has, step by step, without balancing and with two kinds of it."""
    figure, axis = panels(260)
    for path, steps in results("balance.json").items():
        color, style = BALANCED[Path(path).stem]
        loads = [max(rows) * len(rows) / sum(rows) for rows in steps]
        loads = [statistics.mean(loads[i : i + mean]) for i in range(len(loads) - mean + 1)]
        words = f"{Path(path).name}: {loads[-1]:.2f}× at the end"
        axis.plot(range(mean, mean + len(loads)), loads, style, color=color, linewidth=2, label=words)
    axis.set(xlim=(mean, None), ylim=(1, 4.1), xlabel=f"step; each point is the mean of {mean}")
    axis.set_ylabel("busiest expert / mean")
    axis.grid(axis="y")
    return drawn(figure, legend=1)


def draw_curves() -> str:
    """The loss at the end of a long training in all formats; naive forms are hatched."""
    figure, axis = panels(260)
    for run in sorted(results("curves.json")["runs"], key=lambda run: statistics.mean(run["losses"][-10:])):
        color, hatch = ("#f2b661", "//") if run["naive"] else ("#9cc3e6", "")
        bar = axis.barh(run["label"], statistics.mean(run["losses"][-10:]), 0.7, color=color, hatch=hatch)
        axis.bar_label(bar, fmt="%.3f", padding=4)
    axis.set(xlim=(0, 3.3), xlabel="mean loss of the last 200 steps")
    axis.invert_yaxis()
    return drawn(figure)


def draw_minutes() -> str:
    """The minutes to one loss on unseen text, a mark for each seed; with the mean, the soonest first."""
    found = time_to_loss(results("time.json"))
    means = {label: statistics.mean(times) for label, times in found.items()}
    figure, axis = panels(240)
    for label in sorted(means, key=means.get):
        for minutes, mark in zip(found[label], "o^s"):
            axis.plot(minutes, f"{label}: {means[label]:.2f}", mark, color=BLUE, fillstyle="none")
    axis.set(xlim=0, xlabel="minutes; behind a name, the mean of three seeds")
    axis.invert_yaxis()
    axis.grid()
    return drawn(figure)


def draw_muon() -> str:
    """The loss at the end with AdamW and with Muon, by learning rate; of the best, the mean of three seeds."""
    stored = results("optimizers.json")
    figure, axis = panels(250)
    for name, color, style in ("AdamW", BLUE, "o--"), ("Muon", RED, "s-"):
        runs = sorted((run["seed"], run["lr"], run["last"]) for run in stored["runs"] if run["optimizer"] == name)
        best = runs[-1][1]  # the only rate of other seeds
        mean = statistics.mean(last for _, rate, last in runs if rate == best)
        first = [(rate, last) for seed, rate, last in runs if seed == 0]
        axis.plot(*zip(*first), style, color=color, label=f"{name}; lr {best:g}, three seeds: {mean:.2f}")
    axis.set(xscale="log", xlabel="learning rate", ylabel="loss at the end")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid()
    return drawn(figure, legend=2)


PICTURES = {
    "01_single_gpu/muon.svg": draw_muon,
    "07_expert/balance.svg": draw_balance,
    "09_kernels/step.svg": draw_step,
    "09_kernels/roofline.svg": draw_roofline,
    "10_mixed_precision/curves.svg": draw_curves,
    "10_mixed_precision/minutes.svg": draw_minutes,
}
SCHEDULES = {path.replace(".py", ".svg"): ([path], 470) for path in schedules.CLAIMS}
SCHEDULES["tests/look.svg"] = ["06_pipeline/afab.py", "06_pipeline/1f1b.py"], 310
PICTURES |= {picture: functools.partial(draw_schedules, *what) for picture, what in SCHEDULES.items()}


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
