"""Number formats of 4 to 32 bits: their limits, how to round to any of them, and what they do to real gradients.

All follows from four facts: bits of exponent and mantissa, the bias, and what the largest exponent means. A normal
number is (1 + fraction) · 2^(exponent - bias); below the smallest one, subnormal numbers continue to zero in equal
steps. Exponent bits buy range, mantissa bits buy resolution: the relative rounding error is at most 2^-(mantissa + 1).
The gradients and updates are those of a small root, trained on the CPU in float32.

Parent:   none
Run:      python 10_mixed_precision/formats.py
          python 10_mixed_precision/formats.py --draw 10_mixed_precision
Source:   IEEE 754-2019; Micikevicius et al. 2022, arXiv:2209.05433;
          OCP Microscaling Formats 1.0, Rouhani et al. 2023, arXiv:2310.10537
"""

import argparse
import importlib.util
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Literal

import matplotlib
import torch
from matplotlib import pyplot
from torch import Tensor

# ------------------------------------------------------------------------------------------------------------ config
ROOT = Path(__file__).resolve().parent.parent / "01_single_gpu/train.py"
SMALL = dict(layers=4, dim=64, heads=4, kv_heads=2, ffn=192, seq=64, batch=8, device="cpu")  # what is trained
RATES = 3e-3, 3e-4, 3e-5  # learning rates: the root's, that of its larger presets, and where their cosine ends
BLOCK = 32  # elements that share a scale in e8m0 (MX)
NORMAL = "#5b95cc"
SUBNORMAL = "#b5cfe8"
LINES = {"fp16": "#d64541", "bf16": "#4f93d1", "e5m2": "#d9822b", "e4m3": "#3f9f5c", "e2m1": "#9a6dd7"}
INK = "#757d88"  # of texts and axes, legible on white and on black


@dataclass(frozen=True)
class Config:
    steps: int = 20  # of the root, before gradients and updates are looked at
    draw: str = ""  # write formats_range.svg and formats_resolution.svg into this folder


@dataclass(frozen=True)
class Format:
    """A binary floating-point format. One without a sign bit is a scale: it has no zero and no subnormals, either.

    The largest exponent stands for inf and NaN ("inf"), for numbers and one NaN, all bits 1 ("nan"), or for "numbers".
    """

    name: str
    exponent: int  # bits
    mantissa: int  # bits
    bias: int
    top: Literal["inf", "nan", "numbers"]
    sign: int = 1  # bits

    @property
    def bits(self) -> int:
        return self.sign + self.exponent + self.mantissa

    @property
    def least(self) -> int:
        """Exponent of the smallest normal number."""
        return self.sign - self.bias  # zero and subnormals take exponent field 0

    @property
    def last(self) -> int:
        """Bit pattern of the largest number."""
        return 2 ** (self.exponent + self.mantissa) - 1 - {"inf": 2**self.mantissa, "nan": 1, "numbers": 0}[self.top]

    @property
    def largest(self) -> float:
        return self.value(self.last)

    @property
    def smallest(self) -> float:
        """Smallest number above zero, subnormal where there are subnormals."""
        return self.value(self.sign)  # pattern 0 is zero, but in a scale

    def value(self, pattern: int) -> float:
        """Return the finite number that a bit pattern without its sign stands for."""
        field, fraction = pattern >> self.mantissa, pattern % 2**self.mantissa / 2**self.mantissa
        if self.sign and field == 0:
            return fraction * 2.0**self.least
        return (1 + fraction) * 2.0 ** (field - self.bias)


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 8, 23, 127, "inf"),
        Format("tf32", 8, 10, 127, "inf"),  # what tensor cores read of fp32; stored in 32 bits
        Format("bf16", 8, 7, 127, "inf"),
        Format("fp16", 5, 10, 15, "inf"),
        Format("e5m2", 5, 2, 15, "inf"),
        Format("e4m3", 4, 3, 7, "nan"),  # torch.float8_e4m3fn
        Format("e3m2", 3, 2, 3, "numbers"),  # fp6
        Format("e2m3", 2, 3, 1, "numbers"),  # fp6
        Format("e2m1", 2, 1, 1, "numbers"),  # fp4
        Format("e8m0", 8, 0, 127, "nan", sign=0),  # the scale of a block of 32
    )
}


# ------------------------------------------------------------------------------------------------------------- model
def round_to(x: Tensor, f: Format, saturate: bool = False) -> Tensor:
    """Round x to the nearest number of a format, ties to even, and return it in float64.

    What overflows, inf included, becomes inf; or NaN, where the format has no inf; or the largest number, where it has
    neither. With `saturate` it is always the largest number: so torch casts to e4m3, since 2.12, and to no other.
    NaN stays NaN: in MX formats that have none, the scale of the block has it. e8m0 takes the absolute value.
    """
    x = x.double()
    exponent = ((x.view(torch.int64) >> 52) & 2047) - 1023  # float64's own: floor(log2(abs(x)))
    exponent = exponent.clamp(f.least, 1023)  # subnormals have the spacing of the smallest normal numbers
    spacing = ((exponent - f.mantissa + 1023) << 52).view(torch.float64)  # 2^(exponent - mantissa)
    rounded = (x / spacing).round() * spacing  # a power of two: only round() rounds
    if not f.sign:
        rounded = rounded.abs().clamp(min=2.0**f.least)
    if saturate or f.top == "numbers":
        return rounded.clamp(-f.largest, f.largest)
    overflow = torch.copysign(torch.full_like(x, math.inf if f.top == "inf" else math.nan), x)
    return torch.where(rounded.abs() > f.largest, overflow, rounded)


def limits(f: Format) -> dict[str, float]:
    """Return largest, smallest normal and smallest subnormal number (NaN: none), and epsilon, the step behind 1."""
    one = f.bias << f.mantissa
    return {
        "largest": f.largest,
        "smallest normal": 2.0**f.least,
        "smallest subnormal": f.smallest if f.sign and f.mantissa else math.nan,
        "epsilon": f.value(one + 1) - 1,
    }


def short(x: float) -> str:
    """Write a number in a few digits: 65,504, 1.175e-38, or - for NaN."""
    return "-" if math.isnan(x) else f"{x:,.0f}" if 1000 <= x < 1e6 else f"{x:.4g}"


def table_of_formats() -> list[list[str]]:
    """Return the table, its header first."""
    rows = [["format", "bits", "s/e/m", *limits(FORMATS["fp32"]), "in [1, 2)", "decades", "bits in MX"]]
    for f in FORMATS.values():
        numbers = map(short, limits(f).values())
        shared = f"{f.bits + FORMATS['e8m0'].bits / BLOCK:g}" if f.sign and f.bits <= 8 else "-"
        decades = f"{math.log10(f.largest / f.smallest):.1f}"
        parts = f"{f.sign}/{f.exponent}/{f.mantissa}"
        rows.append([f.name, str(f.bits), parts, *numbers, f"{2**f.mantissa:,}", decades, shared])
    return rows


# ---------------------------------------------------------------------------------------------------------- training
@dataclass(frozen=True)
class Observed:
    """The last step of a training, in float64: gradients of weights and of what matmuls put out, and AdamW's update."""

    gradients: dict[str, list[Tensor]]
    weights: list[Tensor]  # before the step
    directions: list[Tensor]  # the update for a learning rate of 1


def load(recipe: str) -> ModuleType:
    """Import a recipe from its file; names like 1f1b are no module names."""
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(recipe).stem}", recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def direction(optimizer: torch.optim.Optimizer, group: dict, p: Tensor, before: Tensor) -> Tensor:
    """Compute AdamW's update for a learning rate of 1 from its moments: the weights have lost what was rounded away."""
    state, (beta1, beta2) = optimizer.state[p], group["betas"]
    mean = state["exp_avg"].double() / (1 - beta1 ** state["step"].item())
    square = state["exp_avg_sq"].double() / (1 - beta2 ** state["step"].item())
    return -mean / (square.sqrt() + group["eps"]) - group["weight_decay"] * before


def observe(steps: int) -> Observed:
    """Train the root, and keep what the last step sees: gradients before they are clipped, zeros left out."""
    root = load(str(ROOT))
    cfg = root.Config(**root.PRESETS["tiny"], **SMALL, steps=steps)
    data, model = root.load_data(cfg)[0], root.build_model(cfg)
    optimizer, outputs = root.make_optimizer(cfg, model), []
    for step in range(steps):
        if step == steps - 1:
            for layer in model.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.register_full_backward_hook(lambda layer, inputs, gradients: outputs.append(gradients[0]))
        root.set_learning_rate(cfg, optimizer, step)
        root.forward_backward(cfg, model, *root.make_batch(cfg, data, step))
        if step == steps - 1:
            found = {"weights": [p.grad for p in model.parameters()], "matmul outputs": outputs}
            found = {kind: [t[t != 0].double() for t in tensors] for kind, tensors in found.items()}
            before = {p: p.detach().double() for p in model.parameters()}
        root.clip_gradients(cfg, model)
        optimizer.step()
        optimizer.zero_grad()
    places = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    directions = [direction(optimizer, group, p, before[p]) for group, p in places]
    return Observed(found, [before[p] for _, p in places], directions)


# ----------------------------------------------------------------------------------------------------------- measure
def best_scale(x: Tensor, f: Format) -> float:
    """Return the largest power of two that takes no element of x beyond the largest number of the format."""
    return 2.0 ** (math.frexp(f.largest / x.abs().max().item())[1] - 1)


def damage(tensors: list[Tensor], f: Format, scaled: bool) -> tuple[float, float, float, float]:
    """Return the shares of nonzero elements that become zero and that overflow, and the median and least SNR in dB.

    The signal-to-noise ratio of a tensor is that of x to x - rounded(x), with what overflows at the largest number.
    """
    zeros = overflows = 0
    ratios = []
    for x in tensors:
        scale = best_scale(x, f) if scaled else 1.0
        rounded = round_to(x * scale, f, saturate=True) / scale
        zeros += (rounded == 0).sum().item()
        overflows += (~round_to(x * scale, f).isfinite()).sum().item()
        noise = (x - rounded).square().sum().item()
        ratios.append(10 * math.log10(x.square().sum().item() / noise) if noise else math.inf)
    n, ratios = sum(x.numel() for x in tensors), sorted(ratios)
    return zeros / n, overflows / n, ratios[len(ratios) // 2], ratios[0]


def table_of_gradients(tensors: list[Tensor]) -> list[list[str]]:
    """Return the table, its header first."""
    rows = [["format", "scale", "become zero", "overflow", "SNR, median tensor", "SNR, worst tensor"]]
    for name in "fp16", "bf16", "e4m3", "e5m2":
        for scaled in False, True:
            zeros, overflows, median, worst = damage(tensors, FORMATS[name], scaled)
            numbers = f"{zeros:.2%}", f"{overflows:.2%}", f"{median:.1f} dB", f"{worst:.1f} dB"
            rows.append([name, "per tensor" if scaled else "none", *numbers])
    return rows


def lost(seen: Observed, f: Format, rate: float) -> float:
    """Return the share of weights, stored in the format, that rounding to nearest returns as they were."""
    same = total = 0
    for weight, update in zip(seen.weights, seen.directions):
        stored, moved = round_to(weight, f), update != 0
        same += ((round_to(stored + rate * update, f) == stored) & moved).sum().item()
        total += moved.sum().item()
    return same / total


def table_of_updates(seen: Observed) -> list[list[str]]:
    """Return the table, its header first."""
    rows = [["weights in", *(f"lr {rate:g}" for rate in RATES)]]
    for name in "fp32", "fp16", "bf16":
        rows.append([name, *(f"{lost(seen, FORMATS[name], rate):.2%}" for rate in RATES)])
    return rows


# -------------------------------------------------------------------------------------------------------------- main
def new_figure(heights: tuple[int, ...], **options) -> tuple[pyplot.Figure, list[pyplot.Axes]]:
    """Start a picture of panels above each other, whose bytes depend on what it shows alone."""
    style = {"svg.fonttype": "none", "svg.hashsalt": "formats", "font.size": 10, "savefig.transparent": True}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    inks = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
    matplotlib.rcParams.update(style | dict.fromkeys(inks, INK))
    size = 6.6, sum(heights)
    return pyplot.subplots(len(heights), figsize=size, height_ratios=heights, layout="constrained", **options)


def write(figure: pyplot.Figure, picture: Path) -> None:
    """Save a picture, without the date."""
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


def draw_range(picture: Path, seen: Observed) -> None:
    """Draw a bar per format, from its smallest to its largest number, above a histogram of the gradients."""
    low, high = -60, 30  # powers of two that the axis shows; arrows stand where a bar goes on
    figure, (bars, histogram) = new_figure((3, 2), sharex=True)
    for row, f in enumerate(FORMATS.values()):
        smallest, largest = math.log2(f.smallest), math.log2(f.largest)
        for left, right, color in (smallest, f.least, SUBNORMAL), (f.least, largest, NORMAL):
            left, right = max(left, low), min(right, high)
            bars.barh(row, max(right - left, 0), left=left, height=0.8, color=color)
        for end, outward in (smallest, -1), (largest, 1):
            words, cut = short(2**end), not low < end < high
            if cut:
                words = f"← {words}" if outward < 0 else f"{words} →"
            to_right = (outward > 0) != cut
            place = min(max(end, low), high) + (0.7 if to_right else -0.7)
            aligned = "left" if to_right else "right"
            bars.text(place, row, words, ha=aligned, va="center", color="black" if cut else INK)
    bars.set_yticks(range(len(FORMATS)), [f.name if f.sign else f"{f.name}, a scale" for f in FORMATS.values()])
    bars.invert_yaxis()
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in (NORMAL, SUBNORMAL)]
    bars.legend(handles, ["normal", "subnormal"], loc=(0.76, 0.17))
    for (kind, tensors), color in zip(seen.gradients.items(), ("#f2b661", "#3f9f5c")):
        exponents = torch.cat(tensors).abs().log2().floor()
        shares = [round(100 * (exponents == e).double().mean().item(), 2) for e in range(low, high)]
        histogram.stairs(shares, range(low, high + 1), fill=color == "#f2b661", color=color, lw=1.5, label=kind)
    histogram.legend(loc="upper right")
    histogram.set(xlabel="log2 of the absolute value", ylabel="% of gradients", xlim=(low, high))
    write(figure, picture)


def draw_resolution(picture: Path) -> None:
    """Draw the numbers of each format from 1 to 4; below, the largest relative error of rounding, per power of two."""
    figure, (ticks, errors) = new_figure((3, 3))
    signed = [f for f in FORMATS.values() if f.sign]
    for row, f in enumerate(signed):
        if f.mantissa > 7:  # closer together than a line is wide
            ticks.barh(row, 3, left=1, height=0.7, color=NORMAL)
            ticks.text(2.5, row, f"{2**f.mantissa:,} from 1 to 2", ha="center", va="center", color="black")
        else:
            numbers = [f.value((f.bias << f.mantissa) + i) for i in range(2 * 2**f.mantissa + 1)]
            ticks.vlines(numbers, row - 0.35, row + 0.35, color=NORMAL, linewidth=1)
    ticks.set_yticks(range(len(signed)), [f.name for f in signed])
    ticks.invert_yaxis()
    ticks.set(xlabel="value", xlim=(0.99, 4.01))
    low, high = -40, 20
    fractions = 1 + torch.arange(4096, dtype=torch.float64) / 4096  # with all that is half-way between two numbers
    for name, color in LINES.items():
        f, worst = FORMATS[name], []
        octaves = range(low, min(high, math.floor(math.log2(f.largest)) + 1))
        for e in octaves:
            x = fractions * 2.0**e
            worst.append(100 * (round_to(x, f) / x - 1)[x <= f.largest].abs().max().item())
        errors.stairs(worst, range(low, octaves.stop + 1), baseline=None, color=color, lw=1.5)
        errors.text(octaves.stop + 0.4, worst[-1], name, color=color, va="center")
    errors.set_yscale("log")
    errors.set(
        xlabel="log2 of the absolute value", ylabel="rounding error, up to %", xlim=(low, high), ylim=(0.01, 200)
    )
    errors.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    write(figure, picture)


def show(title: str, rows: list[list[str]]) -> None:
    """Print a table in columns; numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    print(title)
    for first, *rest in rows:
        print(f"  {first:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(rest, widths[1:])), sep="  ")
    print()


def parse_config() -> Config:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for field in fields(Config):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default, help=f"default: {field.default}")
    return Config(**vars(parser.parse_args()))


def check(cfg: Config) -> None:
    """Exit with one line that names the invalid flag, its value, and what would work."""
    if cfg.steps < 1:
        raise SystemExit(f"--steps {cfg.steps}: must be at least 1")
    if cfg.draw and not Path(cfg.draw).is_dir():
        raise SystemExit(f"--draw {cfg.draw}: no such folder")


def main() -> None:
    cfg = parse_config()
    check(cfg)
    show("Formats", table_of_formats())
    seen = observe(cfg.steps)
    for kind, tensors in seen.gradients.items():
        show(f"Gradients of {kind} after {cfg.steps} steps, rounded", table_of_gradients(tensors))
    show("Share of weights that AdamW does not move, because weight + update is rounded", table_of_updates(seen))
    if cfg.draw:
        draw_range(Path(cfg.draw, "formats_range.svg"), seen)
        draw_resolution(Path(cfg.draw, "formats_resolution.svg"))


if __name__ == "__main__":
    main()


# To paste this into your own trainer
# Take the imports of this file along.
#
# Copy:     Format, round_to (to try a format that your hardware does not have)
