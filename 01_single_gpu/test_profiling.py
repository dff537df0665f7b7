"""The profiler's report and pictures, of traces with known contents, and of recipes on CPUs."""

import json
import sys

import pytest
from launch import ROOT, launch, load

PROFILING = "01_single_gpu/profiling.py"


def event(name, cat, ts, dur, **args):
    """An event of a trace."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def trace_of_a_gpu():
    """Events as a GPU's trace has them: kernels run long after the CPU has launched them, on two streams.

    Triton launches through the driver, fills are work, and a long copy aside does not make its stream the main one.
    """
    sends = load("07_expert/symmetric_memory.py").push_kernel.fn.__name__
    launched = [  # name, category, launch, start, end, stream
        ("gemm", "kernel", 5, 100, 200, 7),
        ("Memset", "gpu_memset", 6, 202, 205, 7),
        ("triton_", "kernel", 25, 205, 300, 7),
        ("ncclDevKernel_AllGather_RING_LL", "kernel", 30, 250, 350, 20),
        ("Memcpy PtoP", "gpu_memcpy", 40, 320, 340, 20),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**)", "kernel", 40, 345, 360, 20),
        ("Memcpy DtoD", "gpu_memcpy", 45, 300, 310, 7),
        ("multi_tensor_apply_kernel", "kernel", 70, 370, 400, 7),
        (sends, "kernel", 75, 400, 410, 7),  # on the main stream, writes rows to other ranks
        ("Memcpy PtoP", "gpu_memcpy", 75, 410, 800, 20),
    ]
    events = [event("forward", "user_annotation", 0, 20), event("backward", "user_annotation", 20, 40)]
    for i, (name, cat, called, start, end, stream) in enumerate(launched):
        by = ("cuLaunchKernel", "cuda_driver") if name == "triton_" else ("cudaLaunchKernel", "cuda_runtime")
        events.append(event(name, cat, start, end - start, correlation=i, stream=stream))
        events.append(event(*by, called, 1, correlation=i))
    return events


def test_report_of_a_gpu_trace():
    """Kernels count for the phase that launched them; what runs beside the main stream is communication."""
    profiling = load(PROFILING)
    spans = profiling.classify(trace_of_a_gpu())
    assert spans["forward"] == [(100, 200), (202, 205)] and spans["backward"] == [(205, 300), (300, 310)]
    assert spans["gather"] == [(250, 350)] and spans["optimizer"] == [(370, 400)]
    assert spans["communication"] == [(250, 350), (320, 340), (345, 360), (400, 410), (410, 800)]
    ms = profiling.summarize(spans, step_ms=0.9)
    wanted = dict(step=0.9, forward=0.103, backward=0.105, optimizer=0.03, compute=0.238, communication=0.51)
    assert ms == pytest.approx({**wanted, "exposed": 0.45, "idle": 0.9 - 0.688})
    assert profiling.timeline(spans)["exposed"] == [(0.21, 0.26), (0.3, 0.7)]
    assert profiling.summarize(spans, step_ms=0.1)["idle"] == 0
    with pytest.raises(SystemExit, match="no kernels"):
        profiling.classify([e for e in trace_of_a_gpu() if e["cat"] != "kernel"])


def test_report_of_a_cpu_trace():
    """What hands a collective over, and waits, is not computation, nor is a function of autograd around it."""
    cpu = "cpu_op"
    events = [event("aten::mm", cpu, 0, 10), event("AllToAll", cpu, 14, 30), event("aten::clone", cpu, 15, 3)]
    events += [event(name, cpu, 20, 10) for name in ("record_param_comms", "c10d::alltoall_base_")]
    events += [event("gloo:all_to_all", "user_annotation", 22, 20)]
    spans = load(PROFILING).classify(events)
    assert spans["optimizer"] == [(0, 10), (15, 18)] and spans["communication"] == [(22, 42)]


@pytest.mark.thorough
def test_profile_of_a_recipe(tmp_path):
    """On CPUs: naive hides nothing; trace, timeline and pictures are there, and --draw draws them."""
    sizes = f"--folder {tmp_path} --device cpu --layers 2 --batch 4"
    launch(PROFILING, 2, f"02_data_parallel/naive.py {sizes}", save=False)
    for rank in range(2):
        ms = json.loads((tmp_path / f"naive.rank{rank}.json").read_text())["ms"]
        assert ms["step"] > ms["compute"] and min(ms["forward"], ms["backward"], ms["optimizer"]) > 0
        assert 0 < 0.9 * ms["communication"] <= ms["exposed"] and ms["compute"] + ms["exposed"] <= ms["step"]
        assert (tmp_path / f"naive.rank{rank}.trace.json.gz").stat().st_size > 1000
    launch(PROFILING, 1, f"--draw {tmp_path}/picture.svg {tmp_path}/naive.rank0.json", save=False)
    launch(PROFILING, 1, f"01_single_gpu/chunked_loss.py {sizes} --loss_chunks 2", save=False)
    ms = json.loads((tmp_path / "chunked_loss.rank0.json").read_text())["ms"]
    assert ms["forward"] > 0.2 * ms["backward"] > 0, "the forward in parts counts as optimizer"
    assert "02_data_parallel/naive.py" in (tmp_path / "picture.svg").read_text()
    assert "</svg>" in (tmp_path / "naive.rank0.memory.svg").read_text()


@pytest.mark.parametrize(
    "words, line",
    [
        ("nowhere.py", "nowhere.py: no such file"),
        ("01_single_gpu/train.py 02_data_parallel/naive.py", "one recipe at a time"),
        ("01_single_gpu/memory.py", "must be a recipe"),
        ("README.md --draw x.svg", "README.md must be timelines"),
    ],
)
def test_bad_input_ends_in_one_line(words, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [PROFILING, *words.split()])
    with pytest.raises(SystemExit, match=line):
        load(PROFILING).main()
