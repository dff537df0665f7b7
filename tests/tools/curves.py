"""Loss over many steps in every format, from the same start on the same text; of AdamW and Muon; or over time.

    python tests/tools/curves.py [formats]
    python tests/tools/curves.py optimizers --steps 1000
    python tests/tools/curves.py time --steps 900

Stored for the page: the mean loss of every 20 steps, and of the last 100. A run ends at its first loss that is not
finite. In formats and optimizers several runs share a GPU: a loss does not depend on speed.

formats also runs naive forms, recipes with one line changed: fp16 whose loss is not scaled, bf16 weights and moments
that are rounded to nearest, fp8 without scales. optimizers trains with every learning rate of RATES from one seed, then
with the best of each optimizer from two more.

time gives each run a GPU of its own, and stores its tokens per second and its losses on one batch of unseen text, which
depends on the seed, one of three: of the last twentieth of all .py files of this Python installation.
"""

import argparse
import datetime
import itertools
import math
import os
import queue
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

from launch import ROOT, isolated
from rows import write_rows

MODEL = "--layers 8 --dim 512 --heads 8 --kv_heads 8 --ffn 1536 --seq 512 --batch 16 --lr 1e-3 --compile"
WIDE = "--layers 6 --dim 2048 --heads 32 --kv_heads 32 --ffn 8192 --seq 2048 --batch 16 --lr 6e-4 --compile"
FOLDER = "10_mixed_precision"
EACH = 20  # steps whose mean is stored, or after which unseen text is read
SEEDS = 0, 1, 2
TO_NEAREST = "if weight.dtype == torch.bfloat16:", "if False:"
NO_SCALES = "amax.float().clamp(min=LEAST) * (1 / torch.finfo(dtype).max)", "torch.ones_like(amax, dtype=torch.float32)"
RUNS = [  # label, recipe, dtype, what becomes what
    ("fp32", "01_single_gpu/train.py", "float32", ()),
    ("bf16, autocast", "01_single_gpu/train.py", "bfloat16", ()),
    ("bf16", f"{FOLDER}/bf16.py", "bfloat16", ()),
    ("bf16, rounded to nearest", f"{FOLDER}/stochastic_rounding.py", "bfloat16", TO_NEAREST),
    ("fp16", f"{FOLDER}/fp16_loss_scaling.py", "float16", ()),
    ("fp16 without loss scaling", f"{FOLDER}/fp16_loss_scaling.py", "float16", ("(2.0**16, 0.0)", "(1.0, -1e9)")),
    ("fp8, tensorwise", f"{FOLDER}/fp8_tensorwise.py", "bfloat16", ()),
    ("fp8, delayed", f"{FOLDER}/fp8_delayed_scaling.py", "bfloat16", ()),
    ("fp8, blockwise", f"{FOLDER}/fp8_blockwise.py", "bfloat16", ()),
    ("fp8 without scales", f"{FOLDER}/fp8_tensorwise.py", "bfloat16", NO_SCALES),
    ("stochastic rounding", f"{FOLDER}/stochastic_rounding.py", "bfloat16", ()),
    ("fp8, stochastic rounding", f"{FOLDER}/fp8_stochastic_rounding.py", "bfloat16", ()),
]
TF32 = ("torch.set_default_dtype(", 'torch.set_float32_matmul_precision("high")\n    torch.set_default_dtype(')
TIMED = [("fp32, matmuls in TF32", "01_single_gpu/train.py", "float32", TF32)]
TIMED += [run for run in RUNS if not run[3] and run[2] == "bfloat16"]
OPTIMIZERS = {"AdamW": "01_single_gpu/train.py", "Muon": "01_single_gpu/muon.py"}
RATES = 1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2
GPUS = queue.SimpleQueue()  # a run takes the number of a GPU out, and puts it back


def output(recipe: str, change: tuple[str, ...], flags: str) -> str:
    """Run a recipe, or a copy with one change, and return its output. A loss that is not finite ends the run."""
    with tempfile.TemporaryDirectory() as folder:
        file, text = Path(folder, Path(recipe).name), (ROOT / recipe).read_text()
        assert not change or text.count(change[0]) == 1, f"{recipe} has no {change[0]}"
        file.write_text(text.replace(*change) if change else text)
        command, gpu = [sys.executable, str(file), *flags.split()], GPUS.get()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        try:
            run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        finally:
            GPUS.put(gpu)
    if run.returncode and "gradient norm" not in run.stderr:
        raise SystemExit(f"{recipe} {flags} failed:\n{run.stderr[-3000:]}")
    return run.stdout


def measured(label: str, recipe: str, dtype: str, change: tuple[str, ...], flags: str) -> dict:
    """One curve: the loss of each step, up to the first that is not finite."""
    lines = output(recipe, change, f"{flags} --dtype {dtype}")
    found = [float(loss) for loss in re.findall(r"^ *step \d+  loss (\S+)", lines, re.M)]
    found = found[: next((i for i, loss in enumerate(found) if not math.isfinite(loss)), len(found))]
    means = [sum(part) / len(part) for i in range(0, len(found), EACH) if (part := found[i : i + EACH])]
    last = sum(found[-100:]) / len(found[-100:]) if found else None
    print(f"{label:28} {len(found)} steps, loss {last}", flush=True)
    return {"label": label, "recipe": recipe, "naive": bool(change), "last": last, "losses": means}


def timed(label: str, recipe: str, dtype: str, change: tuple[str, ...], flags: str, seed: int) -> dict:
    """Tokens per second, the median of all steps, and the loss on unseen text after every EACH steps."""
    flags += f" --dtype {dtype} --seed {seed} --validate {EACH}"
    lines = output(recipe, change, flags + " --microbatches 1" * recipe.startswith(FOLDER))
    if not (median := re.search(r"median .*tokens/s/GPU ([\d,]+)", lines)):
        raise SystemExit(f"{label}, seed {seed}: the loss is not finite")
    speed = float(median[1].replace(",", ""))
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+)", lines)]
    print(f"{label:28} seed {seed}, {speed:,.0f} tokens/s, loss {losses[-1]}", flush=True)
    return {"label": label, "recipe": recipe, "seed": seed, "speed": speed, "losses": losses}


def of_optimizers(flags: str, jobs: ThreadPoolExecutor) -> list[dict]:
    """Curves of both optimizers: of all learning rates from one seed, of the best from three."""

    def curve(run: tuple[str, float, int]) -> dict:
        name, rate, seed = run
        label = f"{name}, lr {rate:g}, seed {seed}"
        row = measured(label, OPTIMIZERS[name], "bfloat16", (), f"{flags} --lr {rate} --seed {seed}")
        return row | {"optimizer": name, "lr": rate, "seed": seed}

    rows = list(jobs.map(curve, itertools.product(OPTIMIZERS, RATES, SEEDS[:1])))
    longest = max(len(row["losses"]) for row in rows)
    fine = [row for row in rows if len(row["losses"]) == longest]
    best = [min((row for row in fine if row["optimizer"] == name), key=lambda row: row["last"]) for name in OPTIMIZERS]
    return rows + list(jobs.map(curve, [(row["optimizer"], row["lr"], seed) for row in best for seed in SEEDS[1:]]))


def time_to_loss(stored: dict) -> dict[str, list[float]]:
    """By format, for each seed: minutes of training until the lowest loss that all formats reach from it.

    Compilation and validation do not count. Between two validations the loss falls linearly.
    """
    lowest, found = defaultdict(float), defaultdict(list)
    for run in stored["runs"]:
        lowest[run["seed"]] = max(min(run["losses"]), lowest[run["seed"]])
    tokens = math.prod(int(re.search(rf"--{size} (\d+)", stored["flags"])[1]) for size in ("seq", "batch"))
    for run in stored["runs"]:
        loss, pairs = lowest[run["seed"]], enumerate(itertools.pairwise(run["losses"]), 1)
        i, before, after = next((i, before, after) for i, (before, after) in pairs if after <= loss)
        step = stored["each"] * (i + (before - loss) / (before - after))
        found[run["label"]].append(step * tokens / run["speed"] / 60)
    return found


def gather_text(folder: str) -> None:
    """Link to all .py files of this Python installation from one folder, in the order of a hash."""
    paths = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    for file in {file for path in paths for file in path.rglob("*.py") if file.is_file()}:
        (Path(folder) / f"{zlib.crc32(str(file).encode()):08x}{file.name}").symlink_to(file)


def over_time(flags: str, jobs: ThreadPoolExecutor) -> list[dict]:
    """Each format from each seed, the slowest first, then in random order."""
    with tempfile.TemporaryDirectory() as folder:
        gather_text(folder)
        slow, *others = [[(*run, f"{flags} --data {folder}", seed) for seed in SEEDS] for run in TIMED]
        others = sum(others, [])
        return list(jobs.map(lambda run: timed(*run), slow + random.sample(others, len(others))))


KINDS = {  # what is run, where it is stored, what is trained
    "formats": (lambda flags, jobs: list(jobs.map(lambda run: measured(*run, flags), RUNS)), "curves.json", MODEL),
    "optimizers": (of_optimizers, "optimizers.json", MODEL),
    "time": (over_time, "time.json", WIDE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", nargs="?", choices=KINDS, default="formats")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--at_once", type=int, default=6, help="runs that share a GPU, but not in time")
    args = parser.parse_args()
    train, file, model = KINDS[args.what]
    flags = f"{model} --steps {args.steps}"
    gpus = isolated(lambda: [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(gpus))))
    for gpu in visible.split(",") * (1 if args.what == "time" else args.at_once):
        GPUS.put(gpu)
    about = {"date": datetime.date.today().isoformat(), "gpu": (gpus or ["cpu"])[0], "torch": torch.__version__}
    about |= {"command": f"python tests/tools/curves.py {args.what} --steps {args.steps}", "flags": flags, "each": EACH}
    with ThreadPoolExecutor(GPUS.qsize()) as jobs:
        runs = train(flags, jobs)
    if gpus:
        write_rows(ROOT / "tests" / "results" / file, about | {"runs": runs})


if __name__ == "__main__":
    main()
