"""Measure speed on the GPUs at hand, alternating what is compared, and store it for the pages.

    python tests/tools/bench.py [SUITE ...] [--rounds 2]      all suites that fit the GPUs, or those named

Each line of a suite is a run of its own. The lines take turns, for as many rounds as asked, in an order drawn from the
number of the round: a GPU that grows warm slows all of them. What is measured is stored after every round. A recipe of
one process in a suite for several GPUs runs on each of them at once, and the slowest counts.
Of some suites more is measured: the idle share of pipelines, beside what schedules.py simulates from the measured
durations; the timeline of the slowest rank by 01_single_gpu/profiling.py, whose --draw makes a picture of those in
tests/results/timelines.

expert_layer        one layer of experts, ours and that of transformers
context_attention   what one rank of four computes in the attention of 05_context_ring, without transfers
collectives         the table of 02_data_parallel/collectives.py
kernels [NAME ...]  `measure` of the files of 09_kernels, the median round, into tests/results/kernels.json
kernel_steps        where the milliseconds of a step go, of the root and of 09_kernels/train.py
memory              needs no GPU: the measured peaks beside what 01_single_gpu/memory.py predicts, for its --draw

Another card than the first one's has results of its own, "NAME on CARD".
"""

import argparse
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

import schedules
from launch import ROOT, isolated, launch, load, own_folder
from rows import write_rows

RESULTS = ROOT / "tests" / "results" / "speed.json"
KERNELS, KERNEL_STEPS = (RESULTS.parent / name for name in ("kernels.json", "kernel_steps.json"))
SMOLLM = "--preset smollm_1_7b --seq 2048 --dtype bfloat16 --compile"
LARGE = "--preset llama3_8b --seq 8192 --dtype bfloat16 --compile"
STAGED = "--preset smollm_1_7b --seq 4096 --batch 16 --microbatches 16 --dtype bfloat16 --compile --steps 10"
MOE = "07_expert/moe.py"
# one long sequence; the warm-up is short because a step is long
LONG = "--preset llama3_8b --layers 8 --batch 1 --dtype bfloat16 --compile --warmup 2 --steps 8"
# random ids and no learning, so that experts are about equally busy, and stay so
RANDOM_IDS = own_folder() / "random_ids.bin"
EXPERTS = f"--preset olmoe_1b_7b --layers 4 --seq 4096 --dtype bfloat16 --compile --steps 10 --lr 0 --data {RANDOM_IDS}"
# random ids, too; one in a thousand ends a document, by --eos 0
DOCUMENTS = own_folder() / "random_documents.bin"
LLAMAS = {  # one GPU, with matmuls large enough that the CPU is ahead of the GPU
    "smollm_1_7b": "--preset smollm_1_7b --seq 4096 --batch 4 --dtype bfloat16 --steps 20",
    "llama3_1b": "--preset llama3_1b --seq 8192 --batch 4 --dtype bfloat16 --steps 15",
}
MIXED = LLAMAS["smollm_1_7b"]
LLAMA_2_7B = "--layers 32 --dim 4096 --heads 32 --kv_heads 32 --ffn 11008 --vocab 32000"


def layouts(gpus: int) -> str:
    """Lines of every way to split so many GPUs; a pipeline has four micro-batches per stage."""
    ways = [sizes for sizes in itertools.product((4, 2, 1), repeat=4) if math.prod(sizes) == gpus]
    line = "\n    08_4d: train --dp {} --cp {} --tp {} --pp {} --microbatches {}"
    return "".join(line.format(*sizes, 4 * sizes[3]) for sizes in ways)


# name: GPUs, how many lines from the first on do the same work and are compared with it, the flags of all lines; then
# lines, each with a folder, recipes in it, a line for each of these, and their own flags; several suites may share them
TEXT = f"""
single: 1, 2, {SMOLLM} --steps 25
    tests/tools: library --batch 4
    01_single_gpu: train --batch 4
    01_single_gpu: gradient_accumulation --batch 16 --microbatches 4
    01_single_gpu: activation_checkpointing selective_checkpointing --batch 4
chunked: 1, 2, {LLAMAS["llama3_1b"]} --compile
    01_single_gpu: train chunked_loss
data_parallel: 4, 9, {SMOLLM} --steps 15
    02_data_parallel: torch_ddp --batch 16
    02_data_parallel: torch_ddp --batch 16 --bucket_mb 100
    02_data_parallel: accelerate_ddp naive overlap bucketed coalesced copy_engines --batch 16
    01_single_gpu: train --batch 4
larger_buckets: 4, 4, {SMOLLM} --steps 15 --batch 16
    02_data_parallel: torch_ddp --bucket_mb 100
    02_data_parallel: torch_ddp bucketed coalesced --bucket_mb 200
strong_scaling: 4, 7, {SMOLLM} --steps 15
    02_data_parallel: torch_ddp --batch 4
    02_data_parallel: torch_ddp --batch 4 --bucket_mb 100
    02_data_parallel: naive bucketed coalesced copy_engines --batch 4
    01_single_gpu: train --batch 1
zero: 4, 8, {SMOLLM} --steps 15 --batch 16
zero_two: 2, 8, {SMOLLM} --steps 15 --batch 8
    03_zero: torch_fsdp zero1 zero1_masters
    03_zero: zero1_overlap zero2 zero3 zero3_copy_engines --microbatches 1
    03_zero: hsdp --microbatches 1 --shard 2
one_gpu: 1, 5, {SMOLLM} --steps 15 --batch 4
    03_zero: torch_fsdp
    03_zero: zero3 zero1_overlap --microbatches 1
    04_tensor_sequence: sequence_parallel
    06_pipeline: 1f1b --microbatches 1
    01_single_gpu: train
    01_single_gpu: train --seq 4096
zero_stages: 2, 1, {SMOLLM} --steps 15 --layers 8 --vocab 8192 --batch 8
    03_zero: zero1
    03_zero: zero1_overlap zero2 zero3 --microbatches 1
zero_more: 4, 4, {SMOLLM} --steps 15
    03_zero: torch_fsdp accelerate_fsdp --batch 16
    03_zero: offload --batch 16 --microbatches 1 --steps 8
    01_single_gpu: train --batch 4
zero_8b: 4, 3, {LARGE} --steps 8 --batch 4
zero_8b_two: 4, 3, {LARGE} --steps 8 --batch 8
    03_zero: torch_fsdp
    03_zero: zero3 zero3_copy_engines --microbatches 1
tensor: 4, 5, {LARGE} --steps 8 --batch 2
    04_tensor_sequence: torch_dtensor sequence_parallel async_tensor_parallel vocab_parallel tensor_parallel
context: 2, 3, {LONG} --seq 32768
    05_context_ring: torch_context_parallel
    05_context_ring: torch_context_parallel --rotate alltoall
    05_context_ring: zigzag
    01_single_gpu: train
context_more: 2, 5, {LONG} --seq 32768
    05_context_ring: torch_context_parallel all_gather_kv ring striped ulysses
context_64k: 2, 2, {LONG} --seq 65536
context_128k: 2, 2, {LONG} --layers 4 --seq 131072
    05_context_ring: torch_context_parallel zigzag
context_four: 4, 5, {LONG} --seq 32768
    05_context_ring: torch_context_parallel zigzag all_gather_kv ulysses
    05_context_ring: usp --ulysses 2
context_documents: 2, 3, {LONG} --seq 65536 --data {DOCUMENTS}
    05_context_ring: zigzag
    05_context_ring: documents --eos 0
    05_context_ring: documents
context_million: 2, 1, {LONG} --layers 1 --vocab 256 --steps 3 --seq 1048576
    05_context_ring: zigzag
tensor_few_layers: 4, 3, {LARGE} --steps 15 --batch 2 --layers 4 --vocab 8192
    04_tensor_sequence: torch_dtensor sequence_parallel async_tensor_parallel
pipeline: 4, 5, {STAGED}
pipeline_two: 2, 5, {STAGED}
    06_pipeline: torch_pipelining --schedule 1F1B
    06_pipeline: 1f1b split_backward interleaved zbv
pipeline_more: 4, 3, {STAGED}
    06_pipeline: split_backward zero_bubble dualpipe
pipeline_twins: 4, 3, {STAGED.replace(" --compile", "")}
    06_pipeline: torch_pipelining --compile --schedule 1F1B
    06_pipeline: torch_pipelining --compile --schedule Interleaved1F1B
    06_pipeline: torch_pipelining --schedule ZBVZeroBubble
expert: 2, 4, {EXPERTS} --batch 8
expert_more: 2, 4, {EXPERTS} --batch 16
expert_four: 4, 4, {EXPERTS} --batch 8
    07_expert: expert_parallel overlap
    07_expert: slots symmetric_memory --slots 1.25
olmoe: 2, 3, --preset olmoe_1b_7b --seq 4096 --batch 8 --dtype bfloat16 --compile --steps 10
    07_expert: expert_parallel overlap --lr 0 --data {RANDOM_IDS}
    07_expert: symmetric_memory --slots 1.25 --lr 0 --data {RANDOM_IDS}
    07_expert: expert_parallel --steps 30
documents: 1, 3, {LLAMAS["llama3_1b"]} --compile --data {DOCUMENTS}
    01_single_gpu: train
    01_single_gpu: document_mask --eos 0
    01_single_gpu: document_mask
muon: 1, 2, {LLAMAS["smollm_1_7b"]} --compile
    01_single_gpu: train muon
muon_two: 2, 3, {SMOLLM} --steps 15 --batch 8
    03_zero: zero1_overlap --microbatches 1
    03_zero: zero1 muon
lora: 1, 1, --preset llama3_8b --seq 4096 --dtype bfloat16 --compile --steps 12 --batch 2
    01_single_gpu: lora
lora_two: 2, 1, --preset llama3_8b --seq 4096 --dtype bfloat16 --compile --steps 12 --batch 4
    03_zero: lora --microbatches 1
kernels_smollm: 1, 2, {LLAMAS["smollm_1_7b"]}
kernels_llama3_1b: 1, 2, {LLAMAS["llama3_1b"]}
    01_single_gpu: train --compile
    09_kernels: train
mixed_smollm: 1, 8, {MIXED} --compile
    01_single_gpu: train
    10_mixed_precision: bf16 --microbatches 1
    10_mixed_precision: fp16_loss_scaling --microbatches 1 --dtype float16
    10_mixed_precision: fp8_tensorwise fp8_delayed_scaling fp8_blockwise --microbatches 1
    10_mixed_precision: stochastic_rounding fp8_stochastic_rounding --microbatches 1
mixed_two: 1, 7, {MIXED} --compile --microbatches 2
    01_single_gpu: gradient_accumulation
    10_mixed_precision: bf16 fp8_tensorwise fp8_delayed_scaling fp8_blockwise
    10_mixed_precision: stochastic_rounding fp8_stochastic_rounding
fp8_torchao: 1, 3, {MIXED} --compile
    tests/tools: torchao_linears torchao_fsdp
    10_mixed_precision: fp8_tensorwise --microbatches 1
mixed_llama3_8b: 1, 2, {LARGE} --steps 200 --warmup 20 --batch 1 --microbatches 1
    10_mixed_precision: stochastic_rounding fp8_stochastic_rounding
low_memory: 1, 2, {LARGE} --steps 12 --batch 1
low_memory_7b: 1, 2, {LLAMA_2_7B} --seq 1024 --batch 12 --dtype bfloat16 --compile --steps 12 --lr 3e-4
    10_mixed_precision: low_memory fp8_low_memory
fp8_zero3: 2, 4, --preset smollm_1_7b --seq 4096 --batch 8 --dtype bfloat16 --compile --steps 20
    03_zero: zero3 --microbatches 1
    10_mixed_precision: fp8_zero3 --microbatches 1
    tests/tools: torchao_fsdp
    10_mixed_precision: fp8_tensorwise --batch 4 --microbatches 1
fp8_zero3_8b: 2, 4, {LARGE} --steps 8 --batch 4 --layers 8
fp8_zero3_four: 4, 4, {LARGE} --steps 8 --batch 8
    03_zero: zero3 --microbatches 1
    03_zero: torch_fsdp
    10_mixed_precision: fp8_zero3 --microbatches 1
    tests/tools: torchao_fsdp
layouts_8b: 2, 5, {LARGE} --steps 6 --batch 8
    03_zero: zero1_overlap --microbatches 4{layouts(2)}
layouts_8b_few_layers: 2, 4, {LARGE} --steps 8 --batch 8 --layers 8{layouts(2)}
layouts_four: 4, 13, {LARGE} --steps 6 --batch 16 --layers 8
    03_zero: zero1_overlap --microbatches 4{layouts(4)}
    08_4d: 3d --dp 2 --tp 1 --pp 2 --microbatches 8
    08_4d: 3d --dp 1 --tp 1 --pp 4 --microbatches 16
layouts_smollm: 2, 4, --preset smollm_1_7b --seq 4096 --batch 32 --dtype bfloat16 --compile --steps 10{layouts(2)}
four: 4, 1, --preset smollm_1_7b --batch 16 --dtype bfloat16 --compile
    02_data_parallel: naive --seq 2048 --steps 25
    06_pipeline: afab 1f1b --layers 27 --seq 4096 --microbatches 16 --steps 12
"""


def suites_of(text: str) -> dict[str, tuple[int, int, list[tuple[str, str]]]]:
    """The suites of such a text, each with GPUs, lines that are compared, and (file, flags) of all lines."""
    found = {}
    for heads, lines in re.findall(r"((?:\S.*\n)+)((?: +.*\n)+)", text):
        for name, gpus, alike, shared in (re.split(": |, ", head) for head in heads.splitlines()):
            runs = []
            for line in lines.splitlines():
                folder, names, flags = re.fullmatch(r" +(\S+): (.+?)((?: --.*)?)", line).groups()
                runs += [(f"{folder}/{file}.py", shared + flags) for file in names.split()]
            found[name] = int(gpus), int(alike), runs
    return found


SUITES = suites_of(TEXT)
IDLE = "pipeline", "pipeline_two", "pipeline_more", "four"  # suites whose stages' idle time is measured, too
PROFILED = {  # recipes of a suite of which a profile is kept
    "data_parallel": "naive overlap bucketed coalesced copy_engines",
    "zero_stages": "zero1 zero1_overlap zero2 zero3",
    "tensor_few_layers": "torch_dtensor sequence_parallel async_tensor_parallel",
    "layouts_8b_few_layers": "train",
    "layouts_smollm": "train",
    "expert": "expert_parallel overlap slots symmetric_memory",
    "olmoe": "expert_parallel",
    "fp8_zero3": "zero3 fp8_zero3",
    "fp8_zero3_four": "zero3 fp8_zero3",
}
TIMELINES = RESULTS.parent / "timelines"
DRAWN = {"data_parallel": TIMELINES, "zero_stages": TIMELINES / "zero_stages", "tensor_few_layers": TIMELINES}
DOES = {  # what a GPU kernel does, by parts of its name; the first that fits counts, and all others are elementwise
    "elementwise": r"^triton_(poi|red|per)",  # torch.compile names these after what is around them, too
    "attention": r"sdpa|flash|fmha|attention|^(attend|backward|prepare|finish)_kernel",
    "optimizer": r"adamw|multi_tensor|squares",
    "matmuls": r"nvjet|gemm|cutlass|cublas|splitk|triton_tem",
}
ATTENTION = "09_kernels/flash_attention_gluon.py"
STAGES = [f"03_zero/{name}.py" for name in ("zero1_overlap", "zero2", "zero3")]
NUMBER = {"tokens": r"tokens/s/GPU ([\d,]+)", "mfu": r"MFU ([\d.]+)%", "memory": r"memory ([\d.]+) GiB"}


def outputs(command: list[str], gpus: int) -> list[str]:
    """Run a command on each of the GPUs at the same time; return the outputs."""
    environments = [{**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(gpus)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([sys.executable, *command], cwd=ROOT, env=own, **pipes) for own in environments]
    ends = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, ends):
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{errors[-3000:]}")
    return [printed for printed, _ in ends]


def run(file: str, flags: str, gpus: int) -> dict[str, float | None]:
    """One run in processes of its own; the numbers of its last line. Of several, the slowest."""
    single = file.startswith(("01_", "09_", "10_", "tests/")) and not file.endswith(("fp8_zero3.py", "_fsdp.py"))
    if single and gpus > 1:
        ends = outputs([file, *flags.split()], gpus)
    else:  # forks of this process, which has imported torch: a start takes a third of torchrun's
        ends = launch(file, gpus, flags, timeout=500, save=False).output[:1]
    runs = []
    for printed in ends:
        last = [line for line in printed.splitlines() if "tokens/s/GPU" in line][-1]  # a warning may stand behind it
        found = {key: re.search(pattern, last) for key, pattern in NUMBER.items()}
        runs.append({key: float(match[1].replace(",", "")) if match else None for key, match in found.items()})
    each = {"each": [numbers["tokens"] for numbers in runs]} if len(runs) > 1 else {}
    return min(runs, key=lambda numbers: numbers["tokens"]) | each


def events(count: int) -> list[torch.cuda.Event]:
    """CUDA events to measure the time from one to the next."""
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def events_around_operations(module):
    """A probe: for each step, milliseconds of the step, of each operation in its order, and of summing replicas.

    By CUDA events. The step reaches from the first operation to the all-reduce of the loss, for which all ranks wait.
    """
    steps = []

    def timed(kind, function):
        def wrapper(*args):
            start, end = events(2)
            if kind == "step":
                steps.append({"step": [], "operations": [], "replicas": []})
            steps[-1][kind].append((start, end))
            start.record()
            result = function(*args)
            end.record()
            return result

        return wrapper

    module.forward_backward = timed("step", module.forward_backward)
    module.forward = timed("operations", module.forward)
    if hasattr(module, "backward_input"):
        module.backward_input = timed("operations", module.backward_input)
        module.backward_weights = timed("operations", module.backward_weights)
    else:
        torch.Tensor.backward = timed("operations", torch.Tensor.backward)
    if hasattr(module, "sum_replicas"):
        module.sum_replicas = timed("replicas", module.sum_replicas)

    def report():
        torch.cuda.synchronize()  # the events of the last step
        return [{kind: [a.elapsed_time(b) for a, b in pairs] for kind, pairs in step.items()} for step in steps]

    return report


def idle(file: str, flags: str, gpus: int) -> dict[str, object]:
    """Idle share of a pipeline, mean over ranks, median over the steps after warm-up, beside what is expected.

    formula: with equal durations of F, B and W. simulated: with the measured ones of every stage, and a transfer that
    takes what schedules.PEER_TO_PEER says.
    """
    module, sys.argv = load(file), [file, *flags.split()]
    cfg = module.parse_config()
    line = schedules.pipeline(module, gpus, cfg.microbatches)
    ranks = launch(file, gpus, flags, probe=events_around_operations, timeout=500, save=False).probes
    settled = [steps[len(steps) // 2 :] for steps in ranks]
    durations = defaultdict(list)
    for order, steps in zip(line.orders, settled, strict=True):
        for step in steps:
            for (op, _, stage), ms in zip(order, step["operations"], strict=True):
                durations[op, stage].append(ms)
    middle = {key: statistics.median(times) for key, times in durations.items()}
    transfer = 2 * cfg.batch // cfg.microbatches * cfg.seq * cfg.dim / schedules.PEER_TO_PEER * 1e3  # in bf16
    # a whole backward is timed as B, and has no W
    slots = schedules.simulate(line, lambda op, stage: middle.get((op, stage), 0), transfer)
    shares = []
    for steps in zip(*settled):  # of all ranks
        busy = sum(sum(step["operations"]) + sum(step["replicas"]) for step in steps)
        shares.append(1 - busy / sum(sum(step["step"]) for step in steps))
    makespan, replicas = schedules.makespan(slots), [sum(step["replicas"]) for steps in settled for step in steps]
    return {
        "idle": statistics.median(shares),
        "simulated": schedules.idle_share(slots) * makespan / (makespan + statistics.median(replicas)),
        "formula": schedules.idle_share(schedules.simulate(line)),
    }


def profiled(file: str, flags: str, gpus: int, suite: str) -> list[dict[str, float]]:
    """Milliseconds of a step by what the GPU does, by rank. Keeps the timeline of the one that computes longest."""
    timelines = DRAWN.get(suite, own_folder())
    with tempfile.TemporaryDirectory() as folder:
        launch("01_single_gpu/profiling.py", gpus, f"{file} --folder {folder} {flags}", timeout=500, save=False)
        reports = [json.loads(Path(folder, f"{Path(file).stem}.rank{rank}.json").read_text()) for rank in range(gpus)]
    slowest = max(reports, key=lambda report: report["ms"]["compute"])
    timelines.mkdir(parents=True, exist_ok=True)
    Path(timelines, f"{Path(file).stem}.json").write_text(json.dumps(slowest) + "\n")
    return [report["ms"] for report in reports]


def collectives(gpus: int) -> dict[str, object]:
    """The table of 02_data_parallel/collectives.py."""
    file, flags = "02_data_parallel/collectives.py", "--largest 268435456"
    printed = launch(file, gpus, flags, save=False).output[0]
    table = printed[printed.index("all-reduce on") :]
    print(table, flush=True)
    return {**where(gpus), "table": table, "command": f"torchrun --nproc_per_node {gpus} {file} {flags}"}


class Rank:
    """A group of which only one rank is there, and a transfer in it: what is sent has arrived, at once."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.wait = lambda: rank, lambda: size, lambda: None


def attention_of(file: str | None, seq: int, rank: int, cp: int) -> list[Callable[[], None]]:
    """Forward, and forward and backward, of a rank's attention without transfers; of all of it if there is no file."""

    def heads(n: int) -> torch.Tensor:
        return torch.randn(1, seq // cp, n, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    q, k, v, gradient = heads(32).requires_grad_(), heads(8).requires_grad_(), heads(8).requires_grad_(), heads(32)
    group, module = Rank(rank, cp), load(file) if file else None
    if module:
        module.ring_exchange = lambda x, cp: (x, group)
        module.gather = lambda x, cp: (x.expand(group.size(), *x.shape), group)
        module.dist = SimpleNamespace(reduce_scatter_tensor=lambda *_, **__: None)

    def attend(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            if file:
                o = module.attention(q, k, v, group)
            else:
                o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if backward:
            o.backward(gradient)
            q.grad = k.grad = v.grad = None

    return [partial(attend, False), partial(attend, True)]


def medians(runs: list[Callable[[], None]], rounds: int) -> list[float]:
    """Milliseconds of each, in so many runs that to wait for the GPU at their end costs nothing; they take turns."""
    from torch.utils.benchmark import Timer  # not above: to import it touches CUDA, and a fork could not use that then

    for run in runs:
        run()  # compiles
    timers = [Timer("run()", globals={"run": run}) for run in runs]
    times = [[timer.blocked_autorange(min_run_time=0.3).median * 1e3 for timer in timers] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times)]


def context_attention(rounds: int) -> dict[str, object]:
    """What one rank of cp 4 computes in attention (llama3_8b's heads). share: of it, a quarter of one call for all."""
    cp, rows = 4, []
    torch._dynamo.config.recompile_limit = 64  # a process of a training has one rank, and needs few
    names = [("all_gather_kv", 3), ("ring", 3), ("striped", 0), ("striped", 3)]
    names += [("zigzag", rank) for rank in range(cp)]
    files = [(f"05_context_ring/{name}.py", rank) for name, rank in names]
    for seq in 32768, 131072:
        pairs = [attention_of(None, seq, 0, 1), *(attention_of(file, seq, rank, cp) for file, rank in files)]
        middle = medians([run for pair in pairs for run in pair], rounds)
        (_, whole), *ours = zip(middle[::2], middle[1::2])
        for (file, rank), (forward, both) in zip(files, ours):
            row = {"file": file, "seq": seq, "rank": rank, "forward_ms": forward, "both_ms": both}
            rows.append(row | {"share": whole / cp / both})
            print(rows[-1], flush=True)
    return {"rows": rows}


def layers_of_experts() -> list[tuple[str, torch.nn.Module]]:
    """Layers of OLMoE's shape by what they are called: ours and that of transformers."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    cfg = load(MOE).Config(**load(MOE).PRESETS["olmoe_1b_7b"])
    shape = dict(hidden_size=cfg.dim, intermediate_size=cfg.ffn, num_local_experts=cfg.experts)

    def ours(dtype: torch.dtype, loop: bool = False) -> torch.nn.Module:
        own = load(MOE)
        own.grouped_matmul = own.one_by_one if loop else own.grouped_matmul
        layer = own.MLP(cfg).to(dtype)
        layer.gate.float()
        if not loop:
            layer.compile()
        return layer

    def theirs(implementation: str) -> torch.nn.Module:
        config = MixtralConfig(**shape, num_experts_per_tok=cfg.top_k, num_attention_heads=cfg.heads)
        config._experts_implementation = implementation
        layer = MixtralSparseMoeBlock(config).to(torch.bfloat16)
        if implementation != "eager":
            layer.compile()
        return layer

    with torch.device("cuda"):
        return [
            ("moe.py, compiled", ours(torch.float32)),
            ("moe.py with bf16 weights, compiled", ours(torch.bfloat16)),
            ("moe.py with a loop over experts, bf16 weights", ours(torch.bfloat16, loop=True)),
            ("transformers, grouped_mm, bf16 weights, compiled", theirs("grouped_mm")),
            ("transformers, loop over experts, bf16 weights", theirs("eager")),
        ]


def expert_layer(rounds: int) -> dict[str, object]:
    """One layer of experts on one GPU, OLMoE's shape, 16,384 tokens, bfloat16: ours and the library's."""
    import transformers

    torch.manual_seed(0)
    x = torch.randn(4, 4096, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient, layers = torch.randn_like(x), layers_of_experts()
    for _, layer in layers:
        for p in layer.parameters():
            torch.nn.init.normal_(p, 0, 0.02)

    def once(layer: torch.nn.Module, backward: bool) -> None:
        with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(backward):
            y = layer(x)
            y = y[0] if isinstance(y, tuple) else y
        if backward:
            y.backward(gradient)
            x.grad = None
            layer.zero_grad()

    middle = medians([partial(once, layer, backward) for _, layer in layers for backward in (False, True)], rounds)
    times = zip(layers, middle[::2], middle[1::2])
    rows = [{"label": label, "forward_ms": forward, "both_ms": both} for (label, _), forward, both in times]
    print(*rows, sep="\n", flush=True)
    return {"transformers": transformers.__version__, "rows": rows}


ON_ONE_GPU = dict(context_attention=context_attention, expert_layer=expert_layer)


def on_one_gpu(name: str, rounds: int) -> dict[str, object]:
    """Measure by one of ON_ONE_GPU, in a process of its own; return what it stores, with card and command."""
    command = f"python tests/tools/bench.py {name} --rounds {rounds}"
    return {**where(1), "command": command, **isolated(partial(ON_ONE_GPU[name], rounds))}


def kernel(name: str) -> list[dict[str, object]]:
    """Check a file of 09_kernels natively, then time it."""
    module = load(f"09_kernels/{name}.py")
    module.check("cuda")
    return module.measure()


def kernels(names: list[str], rounds: int) -> bool:
    """Run `measure` of these files of 09_kernels, or of all; store after each. Return whether all of them could run."""
    files = [path.stem for path in (ROOT / "09_kernels").glob("*.py") if "\ndef measure(" in path.read_text()]
    if unknown := [name for name in names if name not in files]:
        raise SystemExit(f"kernels {' '.join(unknown)}: must be of {', '.join(sorted(files))}")
    stored, failed = json.loads(KERNELS.read_text()) if KERNELS.exists() else {}, []
    for name in names or sorted(files):
        print(f"09_kernels/{name}.py", flush=True)
        try:
            found = [isolated(partial(kernel, name)) for _ in range(rounds)]
        except (AssertionError, EOFError) as error:  # it raised an error; it crashed
            print(f"09_kernels/{name}.py failed:\n{str(error)[-3000:]}", flush=True)
            failed.append(name)
            continue
        middle = [sorted(same, key=lambda row: row["ms"])[(rounds - 1) // 2] for same in zip(*found, strict=True)]
        about = {**where(1), "triton": importlib.metadata.version("triton")}
        about["command"] = f"python tests/tools/bench.py kernels {name} --rounds {rounds}"
        stored[named(name, about["gpu"], stored)] = {**about, "rows": middle}
        write_rows(KERNELS, stored)
    return not failed


def step_by_kind(file: str, flags: str, attention: str = "") -> dict[str, float]:
    """Milliseconds of a training step by what its GPU kernels do. rest: the time in which no kernel runs.

    attention: a file whose flash_attention takes the place of PyTorch's own.
    """
    module = load(file)
    if attention:
        ours = load(attention).flash_attention
        torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, **_: ours(q, k, v)  # in this process alone
    sys.argv = [file, *flags.split()]
    cfg = module.parse_config()
    data, model = module.load_data(cfg)[0], module.build_model(cfg)
    optimizer, batch, steps = module.make_optimizer(cfg, model), module.make_batch(cfg, data, 0), 6
    for _ in range(10):
        module.train_step(cfg, model, optimizer, *batch)[0].item()  # waits for the GPU
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            module.train_step(cfg, model, optimizer, *batch)[0].item()
        torch.cuda.synchronize()  # or the trace would end before the kernels do
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = dict.fromkeys(DOES, 0.0)
    for event in events:
        kind = next((kind for kind, parts in DOES.items() if re.search(parts, event["name"], re.I)), "elementwise")
        found[kind] += event["dur"] / 1e3 / steps  # from µs
    whole = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
    return found | {"rest": whole / 1e3 / steps - sum(found.values())}  # of the same steps: clocks change


def kernel_steps() -> None:
    """Store where the milliseconds of a step go, of the root, and of 09_kernels/train.py with two kinds of attention.

    Stores after each.
    """
    stored = {"measured": {**where(1), "command": "python tests/tools/bench.py kernel_steps"}}
    for preset, flags in LLAMAS.items():
        runs = {
            "01_single_gpu/train.py": ("01_single_gpu/train.py", f"{flags} --compile"),
            "09_kernels/train.py": ("09_kernels/train.py", flags),
            f"09_kernels/train.py, {ATTENTION}": ("09_kernels/train.py", flags, ATTENTION),
        }
        for name, run in runs.items():
            stored.setdefault(preset, {})[name] = isolated(partial(step_by_kind, *run))
            print(f"{preset:12} {name:60}", *(f"{k} {ms:.1f}" for k, ms in stored[preset][name].items()), flush=True)
            write_rows(KERNEL_STEPS, stored)


def memory(stored: dict[str, dict]) -> list[dict[str, object]]:
    """Bytes by kind at the peak, with what was measured, and at the optimizer's step, of recipes by what they shard."""
    predict, peaks, steps = load("01_single_gpu/memory.py"), [], []
    for suite, file in [("data_parallel", "02_data_parallel/naive.py"), *(("zero", file) for file in STAGES)]:
        row = next(row for row in stored[suite]["rows"] if row["file"] == file)
        gpus, gpu = stored[suite]["gpu"].split(" x ")
        sys.argv = [file, *row["flags"].split()]
        cfg = predict.config_of(file, load(file).parse_config(), 0, int(gpus))
        moment, kinds = predict.peak(cfg)
        about = {"file": file, "flags": row["flags"], "gpus": int(gpus), "gpu": gpu}
        measured = round(max(turn["memory"] for turn in row["rounds"]) * 2**30)
        for rows, when, bytes_of, found in (
            (peaks, moment, kinds, measured),
            (steps, "optimizer", predict.moments(cfg)["optimizer"], None),
        ):
            rows.append({**about, "label": f"{Path(file).stem}, {when}", "predicted": bytes_of, "measured": found})
    return peaks + steps


def where(gpus: int) -> dict[str, str]:
    """Date, GPUs and version of torch."""
    name = isolated(torch.cuda.get_device_name)  # CUDA in this process would forbid it to fork
    return {"date": datetime.date.today().isoformat(), "gpu": f"{gpus} x {name}", "torch": torch.__version__}


def measure(suite: str, rounds: int, gpus: int | None, brief: bool) -> Iterator[dict[str, object]]:
    """All lines of a suite, taking turns; then what is looked at more closely. Yields all there is after each part."""
    usual, alike, lines = SUITES[suite]
    gpus = gpus or usual
    rows = [{"file": file, "flags": flags, "rounds": []} for file, flags in lines]
    command = f"python tests/tools/bench.py {suite} --rounds {rounds}" + (f" --gpus {gpus}" if gpus != usual else "")
    result = {**where(gpus), "command": command, "alike": alike, "rows": rows}
    if any("torchao" in file for file, _ in lines):
        result["note"] = f"torchao {importlib.metadata.version('torchao')}"
    for turn in range(rounds):
        for row in random.Random(turn).sample(rows, len(rows)):
            row["rounds"].append(run(row["file"], row["flags"], gpus))
            print(f"round {turn + 1}  {row['file']:45} {row['rounds'][-1]}", flush=True)
        yield result
    for row in [] if brief else rows:
        file, flags = row["file"], row["flags"]
        if suite in IDLE and file.startswith("06_pipeline/") and "torch" not in file:
            row["pipeline"] = idle(file, flags, gpus)
        if Path(file).stem in PROFILED.get(suite, "").split():
            row["profile"] = profiled(file, re.sub(r"--steps \d+", "", flags), gpus, suite)
        print(f"{file:45}", {key: row[key] for key in ("pipeline", "profile") if key in row}, flush=True)
        yield result


def named(suite: str, gpu: str, stored: dict[str, dict]) -> str:
    """The key of a result: the name of what is measured, and the card's if another card was measured first."""
    first = stored.get(suite, {"gpu": gpu})["gpu"]
    return suite if first.split()[3] == gpu.split()[3] else f"{suite} on {gpu.split()[3]}"


def check(args: argparse.Namespace, present: int) -> None:
    """Exit with one line that names what cannot be measured, and what would work; `present`: GPUs of this machine."""
    known = [*SUITES, *ON_ONE_GPU, "collectives"] + (["memory", "kernel_steps"] if len(args.suites) == 1 else [])
    if args.suites[:1] != ["kernels"] and (unknown := [suite for suite in args.suites if suite not in known]):
        raise SystemExit(f"{unknown[0]}: must be of {', '.join(known)}; or memory, kernel_steps or kernels, alone")
    if args.rounds < 1:
        raise SystemExit(f"--rounds {args.rounds}: must be at least 1")
    if args.suites == ["memory"]:
        return
    if not present:
        raise SystemExit("torch finds no GPU: only the suite memory needs none")
    for suite in args.suites:
        gpus = args.gpus or SUITES.get(suite, [1])[0]
        if not 1 <= gpus <= present:
            raise SystemExit(f"{suite}: {gpus} GPUs are wanted, here are {present}: see --gpus")


def write_ids(suites: list[str]) -> None:
    """Write the ids that these suites train on."""
    flags = " ".join(each for suite in suites if suite in SUITES for _, each in SUITES[suite][2])
    if str(RANDOM_IDS) in flags:
        np.random.default_rng(0).integers(0, 50304, 20_000_000).astype(np.uint16).tofile(RANDOM_IDS)
    if str(DOCUMENTS) in flags:
        generator = np.random.default_rng(0)
        ids = generator.integers(1, 50304, 20_000_000) * (generator.random(20_000_000) > 1e-3)
        ids.astype(np.uint32).tofile(DOCUMENTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    others = f"{', '.join(ON_ONE_GPU)}, collectives, memory, kernel_steps; or kernels and the names of files"
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}, {others}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gpus", type=int, help="other than the number that a suite is made for")
    parser.add_argument("--brief", action="store_true", help="speed and memory alone, no profiles, idle shares")
    args = parser.parse_args()
    present = torch.cuda.device_count()
    check(args, present)
    os.chdir(ROOT)  # where the names of recipes are paths
    if args.suites[:1] == ["kernels"]:
        raise SystemExit(not kernels(args.suites[1:], args.rounds))
    if args.suites == ["kernel_steps"]:
        return kernel_steps()
    stored = json.loads(RESULTS.read_text())
    if args.suites == ["memory"]:
        return write_rows(RESULTS.parent / "memory.json", {"rows": memory(stored)})
    suites = args.suites or [name for name, (gpus, *_) in SUITES.items() if gpus <= present]
    suites += ["collectives"] if present > 1 and not args.suites else []
    write_ids(suites)
    for suite in suites:
        if suite in SUITES:
            results = measure(suite, args.rounds, args.gpus, args.brief)
        else:
            results = [on_one_gpu(suite, args.rounds) if suite in ON_ONE_GPU else collectives(present)]
        for result in results:
            stored[named(suite, result["gpu"], stored)] = result
            write_rows(RESULTS, stored)


if __name__ == "__main__":
    main()
