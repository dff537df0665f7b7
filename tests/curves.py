"""Loss over many steps in every format, from the same start on the same text; or of AdamW and Muon.

    python tests/curves.py [formats]
    python tests/curves.py optimizers --steps 1000

On one GPU, which several runs share: a loss does not depend on speed. Stored for the page: the mean loss of every 20
steps, and of the last 100; a run whose loss is no number any more ends there.

formats has naive forms, too: a naive form is a recipe in which one line is another: fp16 whose loss is not scaled, bf16
weights and moments that are rounded to nearest, fp8 without scales. optimizers trains with every learning rate of RATES
from one seed, then with the best of each optimizer from two more.
"""

import argparse
import datetime
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from launch import ROOT, isolated

RESULTS = {"formats": ROOT / "tests/results/curves.json", "optimizers": ROOT / "tests/results/optimizers.json"}
MODEL = "--layers 8 --dim 512 --heads 8 --kv_heads 8 --ffn 1536 --seq 512 --batch 16 --lr 1e-3 --compile"
FOLDER = "10_mixed_precision"
EACH = 20  # steps whose mean is stored
RUNS = [  # label, recipe, dtype, what becomes what
    ("fp32", "01_single_gpu/train.py", "float32", ()),
    ("bf16, autocast", "01_single_gpu/train.py", "bfloat16", ()),
    ("bf16", f"{FOLDER}/bf16.py", "bfloat16", ()),
    (
        "bf16, rounded to nearest",
        f"{FOLDER}/stochastic_rounding.py",
        "bfloat16",
        ("if weight.dtype == torch.bfloat16:", "if False:"),
    ),
    ("fp16", f"{FOLDER}/fp16_loss_scaling.py", "float16", ()),
    ("fp16 without loss scaling", f"{FOLDER}/fp16_loss_scaling.py", "float16", ("(2.0**16, 0.0)", "(1.0, -1e9)")),
    ("fp8, tensorwise", f"{FOLDER}/fp8_tensorwise.py", "bfloat16", ()),
    ("fp8, delayed", f"{FOLDER}/fp8_delayed_scaling.py", "bfloat16", ()),
    ("fp8, blockwise", f"{FOLDER}/fp8_blockwise.py", "bfloat16", ()),
    (
        "fp8 without scales",
        f"{FOLDER}/fp8_tensorwise.py",
        "bfloat16",
        ("amax.float().clamp(min=LEAST) * (1 / torch.finfo(dtype).max)", "torch.ones_like(amax, dtype=torch.float32)"),
    ),
    ("stochastic rounding", f"{FOLDER}/stochastic_rounding.py", "bfloat16", ()),
    ("fp8, stochastic rounding", f"{FOLDER}/fp8_stochastic_rounding.py", "bfloat16", ()),
]
OPTIMIZERS = {"AdamW": "01_single_gpu/train.py", "Muon": "01_single_gpu/muon.py"}
RATES = 1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2


def losses(file: Path, flags: str) -> list[float]:
    """The loss of each step, up to the first that is no number."""
    command = [sys.executable, str(file), *flags.split()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr[-3000:]}")
    found = [float(loss) for loss in re.findall(r"^ *step \d+  loss (\S+)", run.stdout, re.M)]
    return found[: next((i for i, loss in enumerate(found) if not math.isfinite(loss)), len(found))]


def measured(label: str, recipe: str, dtype: str, change: tuple[str, ...], flags: str) -> dict:
    """One curve; of a naive form, of a copy of the recipe with its one change."""
    with tempfile.TemporaryDirectory() as folder:
        file, text = Path(folder, Path(recipe).name), (ROOT / recipe).read_text()
        assert not change or text.count(change[0]) == 1, f"{label}: {recipe} has no {change[0]}"
        file.write_text(text.replace(*change) if change else text)
        found = losses(file, f"{flags} --dtype {dtype}")
    means = [sum(part) / len(part) for i in range(0, len(found), EACH) if (part := found[i : i + EACH])]
    last = sum(found[-100:]) / len(found[-100:]) if found else None
    row = {"label": label, "recipe": recipe, "naive": bool(change), "steps": len(found), "last": last, "losses": means}
    print(f"{label:28} {len(found)} steps, loss {last}", flush=True)
    return row


def of_formats(flags: str, jobs: ThreadPoolExecutor) -> list[dict]:
    """One curve of each format and of each naive form."""
    return list(jobs.map(lambda run: measured(*run, flags), RUNS))


def of_optimizers(flags: str, jobs: ThreadPoolExecutor) -> list[dict]:
    """Curves of both optimizers: of all learning rates from one seed, of the best from three."""

    def curve(run: tuple[str, float, int]) -> dict:
        name, rate, seed = run
        label = f"{name}, lr {rate:g}, seed {seed}"
        row = measured(label, OPTIMIZERS[name], "bfloat16", (), f"{flags} --lr {rate} --seed {seed}")
        return row | {"optimizer": name, "lr": rate, "seed": seed}

    rows = list(jobs.map(curve, itertools.product(OPTIMIZERS, RATES, [0])))
    longest = max(row["steps"] for row in rows)
    fine = [row for row in rows if row["steps"] == longest]
    best = [min((row for row in fine if row["optimizer"] == name), key=lambda row: row["last"]) for name in OPTIMIZERS]
    return rows + list(jobs.map(curve, [(row["optimizer"], row["lr"], seed) for row in best for seed in (1, 2)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=RESULTS, default="formats")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--flags", default=MODEL, help="what is trained")
    parser.add_argument("--at_once", type=int, default=6, help="runs that share the GPU")
    args = parser.parse_args()
    gpu = isolated(lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    stored = {"date": datetime.date.today().isoformat(), "gpu": gpu, "torch": torch.__version__, "runs": []}
    stored |= {"command": " ".join(["python tests/curves.py", *sys.argv[1:]]), "flags": args.flags, "each": EACH}
    with ThreadPoolExecutor(args.at_once) as jobs:
        curves = {"formats": of_formats, "optimizers": of_optimizers}[args.what]
        stored["runs"] = curves(f"{args.flags} --steps {args.steps}", jobs)
    if gpu != "cpu":
        RESULTS[args.what].write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
