"""Profile one step of any recipe: a trace, a memory timeline, and how much communication hides behind computation.

Each rank writes a trace for ui.perfetto.dev and a timeline: when the GPU computed (forward, backward, norm and
optimizer) and when it communicated; rank 0 draws the memory. Communication is *exposed* while nothing computes, idle is
neither. On all but the slowest rank, communication includes waiting for that one. On GPUs, events are kernels and
copies, and those on side streams (copies, sums of received data) count as communication. On CPUs they are operators.
Forward and backward of torch_pipelining.py run inside the library, and count as optimizer.

Parent:   none, it profiles the others
Run:      torchrun --nproc_per_node 4 01_single_gpu/profiling.py 02_data_parallel/bucketed.py
          python 01_single_gpu/profiling.py --draw overlap.svg profile/naive.rank0.json profile/bucketed.rank0.json
Source:   Ultra-Scale Playbook, "Profiling GPU compute and communication" and appendix A1
"""

import argparse
import gzip
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import matplotlib
import torch
import torch.distributed as dist
from matplotlib import pyplot
from torch.profiler import ProfilerActivity, profile, record_function

# ------------------------------------------------------------------------------------------------------------ config
WARMUP = 6  # steps before the first profiled one: compilation, first allocations, communicators
GPU_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace
COMMUNICATION = ("nccl", "gloo:", "symmetric_memory", "push_kernel")  # parts of names
PHASES = {"forward": "#9cc3e6", "backward": "#a9d6a0", "optimizer": "#d9c2e9"}
FUNCTIONS = {  # of recipes, and their phases: chunked_loss.py has two forwards, a split backward two backwards
    "forward": "forward",
    "hidden_states": "forward",
    "chunk_loss": "forward",
    "backward_input": "backward",
    "backward_weights": "backward",
}
HATCHES = {"backward": "///", "optimizer": "\\\\\\"}  # for those who see no colors
VISIBLE = 3e-4  # of the longest step; a picture shows no shorter span or gap
INK = "#757d88"  # of texts and axes, legible on white and on black


# ---------------------------------------------------------------------------------------------------------- training
def load(recipe: str) -> ModuleType:
    """Import a recipe from its file; names like 1f1b are no module names."""
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(recipe).stem}", recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(recipe: str, flags: list[str], folder: str) -> tuple[Path, Path, float]:
    """Train with the recipe; trace a step, then one with allocations. Return both paths and the ms of the first."""
    module, stem = load(recipe), f"{Path(recipe).stem}.rank{os.environ.get('RANK', 0)}"
    files = [Path(folder, f"{stem}.trace.json.gz"), Path(folder, f"{stem}.memory.json.gz")]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    profiles = [profile(activities=activities, profile_memory=memory) for memory in (False, True)]
    train_step, steps, starts = module.train_step, iter(range(WARMUP + 3)), []

    def labelled(name, function):
        def wrapper(*args, **kwargs):
            with record_function(name):
                return function(*args, **kwargs)

        return wrapper

    def watched_step(*args):
        step = next(steps)
        if step == 0:
            with profile(activities=activities):  # the first takes long to start
                pass
        if step > WARMUP:
            starts.append(time.perf_counter())  # the recipe has waited for the GPU: the step before is over
            profiles[step - WARMUP - 1].stop()
            profiles[step - WARMUP - 1].export_chrome_trace(str(files[step - WARMUP - 1]))  # lost when the next starts
        if WARMUP <= step <= WARMUP + 1:
            if dist.is_initialized():
                dist.barrier()  # profilers start at their own pace: what is measured must not be waiting for them
            profiles[step - WARMUP].start()
            starts.append(time.perf_counter())
        return train_step(*args)

    Path(folder).mkdir(parents=True, exist_ok=True)
    module.train_step = watched_step
    for name, phase in FUNCTIONS.items():
        if hasattr(module, name):
            setattr(module, name, labelled(phase, getattr(module, name)))
    backward, torch.Tensor.backward = torch.Tensor.backward, labelled("backward", torch.Tensor.backward)
    sys.argv = [recipe, *flags, "--steps", str(WARMUP + 3)]
    try:
        module.main()
    finally:
        torch.Tensor.backward = backward
    return *files, (starts[1] - starts[0]) * 1e3


def read(file: Path) -> list[dict]:
    """The events of a trace."""
    with gzip.open(file, "rt") as lines:
        return json.load(lines)["traceEvents"]


def phases(events: list[dict]) -> list[tuple[str, float, float]]:
    """When the CPU was in a forward, and when in a backward."""
    found = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in PHASES]
    return sorted((e["name"], e["ts"], e["ts"] + e["dur"]) for e in found)


def classify(events: list[dict]) -> dict[str, list[tuple[float, float]]]:
    """(start, end), in microseconds, of all work by the phase that launched it, of communication, of its gathers."""
    windows, spans = phases(events), {kind: [] for kind in (*PHASES, "communication", "gather")}
    work = [e for e in events if e.get("cat") in GPU_EVENTS]
    launched = any(e.get("cat") == "cuda_runtime" and e["name"].startswith("cudaLaunch") for e in events)
    if launched and not any(e["cat"] == "kernel" for e in work):
        raise SystemExit("the trace has no kernels, although the CPU has launched some: the profiler lost them")
    launches = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    if not work:
        work = [e for e in events if e.get("cat") == "cpu_op"]
        calls = [(e["ts"], e["ts"] + e["dur"]) for e in work if e["name"].startswith(("c10d::", "record_"))]
        # what hands a collective over does not compute; a function of autograd around it waits, too, and its operators
        # are counted by themselves
        work = [e for e in work if not any(e["ts"] <= start and end <= e["ts"] + e["dur"] for start, end in calls)]
        work += [e for e in events if e["name"].startswith("gloo:")]
    time_of = Counter()
    for e in work:
        time_of[e.get("args", {}).get("stream")] += e["dur"] if e["cat"] == "kernel" else 0
    main_stream = time_of.most_common(1)[0][0]
    for e in work:
        launch = launches.get(e.get("args", {}).get("correlation"), e["ts"])
        phase = next((name for name, start, end in windows if start <= launch <= end), "optimizer")
        aside = main_stream is not None and e["args"]["stream"] != main_stream  # copies, and sums of what has come
        kind = "communication" if aside or any(word in e["name"] for word in COMMUNICATION) else phase
        spans[kind].append((e["ts"], e["ts"] + e["dur"]))
        if "allgather" in e["name"].lower().replace("_", ""):
            spans["gather"].append(spans[kind][-1])
    return spans


def union(spans: list[tuple[float, float]], gap: float = 0) -> list[tuple[float, float]]:
    """Sorted spans that do not touch; those less than `gap` apart are joined."""
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def without(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What of the spans is in none of the others; both as union() returns them."""
    left = []
    for start, end in spans:
        for other_start, other_end in others:
            if other_end > start and other_start < end:
                left.append((start, other_start))
                start = max(start, other_end)
        left.append((start, end))
    return [(start, end) for start, end in left if end > start]


def length(spans: list[tuple[float, float]]) -> float:
    """Sum of the lengths, in milliseconds."""
    return sum(end - start for start, end in spans) / 1e3


def summarize(spans: dict[str, list[tuple[float, float]]], step_ms: float) -> dict[str, float]:
    """Milliseconds of a step by what the GPU does. Idle: neither computes nor communicates, as between two kernels."""
    compute = union([span for phase in PHASES for span in spans[phase]])
    communication = union(spans["communication"])
    busy = length(union(compute + communication))
    return {
        "step": step_ms,
        **{phase: length(union(spans[phase])) for phase in PHASES},
        "compute": length(compute),
        "communication": length(communication),
        "exposed": length(without(communication, compute)),
        "idle": max(0.0, step_ms - busy),
    }


def timeline(spans: dict[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    """The spans, in milliseconds from the first on, joined where a picture could not show the gap."""
    compute = union([span for phase in PHASES for span in spans[phase]])
    exposed = without(union(spans["communication"]), compute)
    first = min(start for kind in spans.values() for start, _ in kind)
    shown = {**spans, "exposed": exposed}
    gaps = {kind: 50 if kind in PHASES else 1 for kind in shown}  # microseconds that a picture cannot show
    return {
        kind: [(round((a - first) / 1e3, 3), round((b - first) / 1e3, 3)) for a, b in union(found, gaps[kind])]
        for kind, found in shown.items()
    }


# -------------------------------------------------------------------------------------------------------------- main
def draw(files: list[str], picture: str) -> None:
    """Two rows per timeline, compute and communication, on one scale. The sums count what is too short for a bar."""
    style = {"svg.fonttype": "none", "svg.hashsalt": "overlap", "font.size": 10, "savefig.transparent": True}
    style |= {"axes.titlesize": 10, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False}
    style |= {"legend.frameon": False, "hatch.linewidth": 0.5, "hatch.color": INK}
    inks = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
    matplotlib.rcParams.update(style | dict.fromkeys(inks, INK))
    try:
        reports = [json.loads(Path(file).read_text()) for file in files]
        visible = VISIBLE * max(report["ms"]["step"] for report in reports)
    except (LookupError, TypeError, ValueError):
        raise SystemExit(f"--draw {picture}: {' '.join(files)} must be timelines that were written before") from None
    shape = dict(figsize=(6.6, 1.2 * len(reports) + 1), squeeze=False, layout="constrained")
    figure, axes = pyplot.subplots(len(reports), sharex=True, **shape)
    bars = [(phase, phase, 1.1, 0.8, color) for phase, color in PHASES.items()]
    bars += [("hidden communication", "hidden", 0.1, 0.4, "#f2b661"), ("exposed: high", "exposed", 0.1, 0.8, "#d64541")]
    for axis, report in zip(axes.flat, reports):
        ms, spans = report["ms"], report["timeline"]
        spans["hidden"] = without(spans["communication"], spans["exposed"])
        for label, kind, bottom, height, color in bars:
            shown = union([(start, end) for start, end in spans[kind] if end - start > visible], visible)
            widths = [(start, end - start) for start, end in shown]
            axis.broken_barh(widths, (bottom, height), fc=color, lw=0, hatch=HATCHES.get(kind), label=label)
        axis.set_yticks([0.5, 1.5], ["communication", "compute"])
        sums = "step {step:.0f} ms: backward {backward:.0f}, communication {communication:.1f}, exposed {exposed:.1f}"
        axis.set_title(f"{report['recipe']}\n{sums.format(**ms)}")
    axes[-1, 0].set_xlim(0)  # once all bars are there: it ends autoscaling, for all axes
    axes[-1, 0].set_xlabel(f"milliseconds; one step on {reports[0]['where']}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncol=3)
    figure.savefig(picture, metadata={"Date": None})


def draw_memory(events: list[dict], picture: Path) -> None:
    """Allocated bytes against the time at which the CPU asked for them."""
    device = 1 if any(e.get("cat") in GPU_EVENTS for e in events) else 0
    changes = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == device]
    changes.sort(key=lambda e: e["ts"])
    first = changes[0]["ts"]
    figure, axis = pyplot.subplots(figsize=(10, 4))
    for name, start, end in phases(events):
        axis.axvspan((start - first) / 1e3, (end - first) / 1e3, color=PHASES[name], alpha=0.5, linewidth=0)
    times = [(e["ts"] - first) / 1e3 for e in changes]
    axis.step(times, [e["args"]["Total Allocated"] / 2**30 for e in changes], where="post", color="black", linewidth=1)
    axis.set(
        xlabel="milliseconds of the CPU",
        ylabel="GiB allocated" + ("" if device else " since the step began"),
        ylim=(0, None),
        xlim=(0, times[-1]),
    )
    axis.set_title("blue: forward, green: backward, white: norm and optimizer", fontsize=9, loc="left")
    figure.savefig(picture)


def parse_config() -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and the recipe's."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="FILE", help="a recipe, then its flags; with --draw, timelines")
    parser.add_argument("--folder", default="profile", help="where to write; default: profile")
    parser.add_argument("--draw", metavar="SVG", help="draw timelines that were written before into this picture")
    args, flags = parser.parse_known_args()
    for file in args.files:
        if not Path(file).is_file():
            raise SystemExit(f"{file}: no such file")
    if not args.draw and not (args.files[0].endswith(".py") and "def train_step" in Path(args.files[0]).read_text()):
        raise SystemExit(f"{args.files[0]}: must be a recipe, which ends in .py and has a train_step")
    picture = Path(args.draw or "overlap.svg")
    if picture.suffix != ".svg" or picture.is_dir() or not picture.parent.is_dir():
        raise SystemExit(f"--draw {args.draw}: must be an .svg file in a folder that is there")
    if Path(args.folder).exists() and not Path(args.folder).is_dir():
        raise SystemExit(f"--folder {args.folder}: is no folder")
    if not args.draw and len(args.files) > 1:
        raise SystemExit(f"{args.files[1]}: one recipe at a time; several files only with --draw")
    return args, flags


def main() -> None:
    args, flags = parse_config()
    if args.draw:
        return draw(args.files, args.draw)
    (recipe,) = args.files
    trace, memory, step_ms = run(recipe, flags, args.folder)
    spans = classify(read(trace))
    ms = summarize(spans, step_ms)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    where = f"{world} x {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}"
    report = {"recipe": recipe, "where": where, "rank": rank, "ms": ms, "timeline": timeline(spans)}
    Path(str(trace).replace(".trace.json.gz", ".json")).write_text(json.dumps(report))
    shares = "  ".join(f"{name} {value:.1f} ms ({value / ms['step']:.1%})" for name, value in ms.items())
    print(f"rank {rank}  {shares}", flush=True)
    if rank == 0:
        draw_memory(read(memory), Path(str(memory).replace(".json.gz", ".svg")))
        print(f"wrote {trace}, to be opened in ui.perfetto.dev, and beside it memory and timeline", flush=True)


if __name__ == "__main__":
    main()
