"""Measure speed on the GPUs at hand, alternating what is compared, and store it for the README.

    python tests/bench.py [SUITE ...] [--rounds 2]      all suites that fit the GPUs, or: single, four

Each line is a run of its own, by torchrun, with a warm-up that does not count; the lines of a suite take turns for as
many rounds as asked, so that a GPU that grows warm slows all of them. `idle` runs a pipeline recipe with CUDA events
around every forward and backward: the share of the time in which a stage computes nothing.
"""

import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys

import torch
from launch import ROOT, isolated, launch

RESULTS = ROOT / "tests" / "results" / "speed.json"
SMOLLM = "--preset smollm_1_7b --seq 2048 --dtype bfloat16 --compile --steps 25"
PIPELINE = "--preset smollm_1_7b --layers 27 --seq 4096 --batch 16 --microbatches 16 --dtype bfloat16 --compile"
SUITES = {  # name: (GPUs, [(file, flags)]); the first line is what the others are compared with
    "single": (
        1,
        [
            ("tests/library.py", f"{SMOLLM} --batch 4"),
            ("01_single_gpu/train.py", f"{SMOLLM} --batch 4"),
            ("01_single_gpu/gradient_accumulation.py", f"{SMOLLM} --batch 16 --microbatches 4"),
            ("01_single_gpu/activation_checkpointing.py", f"{SMOLLM} --batch 4"),
            ("01_single_gpu/selective_checkpointing.py", f"{SMOLLM} --batch 4"),
        ],
    ),
    "four": (
        4,
        [
            ("02_data_parallel/naive.py", f"{SMOLLM} --batch 16"),
            ("06_pipeline/afab.py", f"{PIPELINE} --steps 12"),
            ("06_pipeline/1f1b.py", f"{PIPELINE} --steps 12"),
        ],
    ),
}
IDLE = {"four": [("06_pipeline/afab.py", f"{PIPELINE} --steps 8"), ("06_pipeline/1f1b.py", f"{PIPELINE} --steps 8")]}
NUMBER = {"tokens": r"tokens/s/GPU ([\d,]+)", "mfu": r"MFU ([\d.]+)%", "memory": r"memory ([\d.]+) GiB"}


def run(file: str, flags: str, gpus: int) -> dict[str, float | None]:
    """One run in processes of its own; the numbers of its last line, and its last loss."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(gpus), file, *flags.split()]
    end = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if end.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{end.stderr[-3000:]}")
    lines = end.stdout.splitlines()
    found = {key: re.search(pattern, lines[-1]) for key, pattern in NUMBER.items()}
    numbers = {key: float(match[1].replace(",", "")) if match else None for key, match in found.items()}
    return numbers | {"loss": float(re.search(r"loss ([\d.]+)", lines[-2])[1])}


def events_around_operations(module):
    """A probe: for each step [milliseconds of the step, of its forwards, of its backwards], by CUDA events.

    The span reaches from the first operation to the all-reduce of the loss, for which all stages wait.
    """
    steps = []

    def timed(kind, function):
        def wrapper(*args):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if kind == "step":
                steps.append([])
            record = (kind, start, end)
            steps[-1].append(record)
            start.record()
            result = function(*args)
            end.record()
            return result

        return wrapper

    module.forward_backward = timed("step", module.forward_backward)
    module.forward = timed("F", module.forward)
    torch.Tensor.backward = timed("B", torch.Tensor.backward)

    def report():
        torch.cuda.synchronize()  # the events of the last step
        return [
            [
                sum(start.elapsed_time(end) for kind, start, end in step if kind == wanted)
                for wanted in ("step", "F", "B")
            ]
            for step in steps
        ]

    return report


def idle(file: str, flags: str, gpus: int) -> dict[str, object]:
    """Idle share of a pipeline, mean over stages, median over the steps after warm-up, beside the formula's."""
    ranks = launch(file, gpus, flags, probe=events_around_operations, timeout=500, save=False).probes
    settled = list(zip(*ranks))[len(ranks[0]) // 2 :]  # step -> rank -> [span, forward, backward]
    shares = [1 - sum(f + b for _, f, b in step) / sum(span for span, _, _ in step) for step in settled]
    m = int(re.search(r"--microbatches (\d+)", flags)[1])
    per_stage = [[statistics.median(column) for column in zip(*rank)] for rank in zip(*settled)]
    return {
        "idle": statistics.median(shares),
        "formula": (gpus - 1) / (m + gpus - 1),
        "forward_ms": [f / m for _, f, _ in per_stage],
        "backward_ms": [b / m for _, _, b in per_stage],
        "step_ms": [span for span, _, _ in per_stage],
    }


def measure(suite: str, rounds: int) -> dict[str, object]:
    """All lines of a suite, taking turns."""
    gpus, lines = SUITES[suite]
    taken = {line: [] for line in lines}
    for turn in range(rounds):
        for line in lines:
            taken[line].append(run(*line, gpus))
            print(f"round {turn + 1}  {line[0]:45} {taken[line][-1]}", flush=True)
    rows = [{"file": file, "flags": flags, "rounds": runs} for (file, flags), runs in taken.items()]
    for file, flags in IDLE.get(suite, []):
        row = next(row for row in rows if row["file"] == file)
        row["pipeline"] = idle(file, flags, gpus)
        print(f"idle     {file:45} {row['pipeline']}", flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": f"{gpus} x {isolated(torch.cuda.get_device_name)}",  # CUDA in this process would forbid it to fork
        "torch": torch.__version__,
        "command": f"python tests/bench.py {suite} --rounds {rounds}",
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    present = torch.cuda.device_count()
    suites = args.suites or [name for name, (gpus, _) in SUITES.items() if gpus <= present]
    if not suites:
        raise SystemExit(f"no suite fits {present} GPUs")
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for suite in suites:
        stored[suite] = measure(suite, args.rounds)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
