"""The profiler's report and pictures, of traces with known contents, and of recipes on CPUs."""

import json
import sys
import time

import pytest
from launch import ROOT, launch, load

PROFILING = "01_single_gpu/profiling.py"
RECIPES = ["01_single_gpu/train.py", "02_data_parallel/naive.py"]


def test_spans():
    """Union and difference, of spans that overlap, touch, and lie within others."""
    profiling = load(PROFILING)
    assert profiling.union([(3, 5), (0, 2), (4, 9), (6, 7), (9, 10)]) == [(0, 2), (3, 10)]
    assert profiling.union([(0, 10), (15, 20), (40, 50)], gap=5) == [(0, 20), (40, 50)]
    assert profiling.without([(0, 10), (20, 30)], [(2, 3), (5, 22), (29, 40)]) == [(0, 2), (3, 5), (22, 29)]


def event(name, cat, ts, dur, **args):
    """An event of a trace."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def trace_of_a_gpu():
    """Events as a GPU's trace has them: kernels run long after the CPU has launched them, on two streams."""
    launched = [  # name, category, launch, start, end, stream
        ("gemm", "kernel", 5, 100, 200, 7),
        ("gemm_backward", "kernel", 25, 200, 300, 7),
        ("ncclDevKernel_AllGather_RING_LL", "kernel", 30, 250, 350, 20),
        ("Memcpy PtoP", "gpu_memcpy", 40, 320, 340, 20),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**)", "kernel", 40, 335, 360, 20),
        ("Memcpy DtoD", "gpu_memcpy", 45, 300, 310, 7),
        ("multi_tensor_apply_kernel", "kernel", 70, 370, 400, 7),
    ]
    events = [event("forward", "user_annotation", 0, 20), event("backward", "user_annotation", 20, 40)]
    for i, (name, cat, called, start, end, stream) in enumerate(launched):
        events.append(event(name, cat, start, end - start, correlation=i, stream=stream))
        events.append(event("cudaLaunchKernel", "cuda_runtime", called, 1, correlation=i))
    return events


def test_report_of_a_gpu_trace():
    """Kernels count for the phase that launched them; what runs beside the main stream is communication."""
    profiling = load(PROFILING)
    spans = profiling.classify(trace_of_a_gpu())
    assert spans["forward"] == [(100, 200)] and spans["backward"] == [(200, 300), (300, 310)]
    assert spans["gather"] == [(250, 350)]
    assert spans["optimizer"] == [(370, 400)] and spans["communication"] == [(250, 350), (320, 340), (335, 360)]
    ms = profiling.summarize(spans, step_ms=0.5)
    wanted = dict(step=0.5, forward=0.1, backward=0.11, optimizer=0.03, compute=0.24, communication=0.11, exposed=0.05)
    assert ms == pytest.approx({**wanted, "idle": 0.5 - 0.29})
    shown = profiling.timeline(spans)
    assert shown["exposed"] == [(0.21, 0.26)] and shown["optimizer"] == [(0.27, 0.3)]
    with pytest.raises(SystemExit, match="no kernels"):
        profiling.classify([e for e in trace_of_a_gpu() if e["cat"] != "kernel"])
    assert profiling.summarize(spans, step_ms=0.1)["idle"] == 0


def test_a_kernel_that_sends_is_communication():
    """... on the main stream, too: symmetric_memory.py's writes rows to other ranks."""
    name = load("07_expert/symmetric_memory.py").push_kernel.fn.__name__
    launch_ = event("cuLaunchKernel", "cuda_driver", 5, 1, correlation=0)
    kernel = event(name, "kernel", 100, 10, correlation=0, stream=7)
    spans = load(PROFILING).classify([event("forward", "user_annotation", 0, 20), launch_, kernel])
    assert spans["communication"] == [(100, 110)] and not spans["forward"]


def test_launches_by_the_driver_and_fills():
    """Triton launches through the driver; fills are work; a long copy aside does not make its stream the main one."""
    spans = load(PROFILING).classify(
        [
            event("forward", "user_annotation", 0, 20),
            event("cuLaunchKernel", "cuda_driver", 5, 1, correlation=0),
            event("triton_", "kernel", 100, 100, correlation=0, stream=7),
            event("cudaLaunchKernel", "cuda_runtime", 26, 1, correlation=2),
            event("add", "kernel", 215, 5, correlation=2, stream=20),
            event("add", "kernel", 225, 5, correlation=2, stream=20),
            event("cudaMemcpyAsync", "cuda_runtime", 27, 1, correlation=3),
            event("Memcpy PtoP", "gpu_memcpy", 230, 300, correlation=3, stream=20),
            event("cudaMemsetAsync", "cuda_runtime", 6, 1, correlation=4),
            event("Memset", "gpu_memset", 600, 5, correlation=4, stream=7),
        ]
    )
    assert spans["forward"] == [(100, 200), (600, 605)] and spans["backward"] == []
    assert spans["optimizer"] == [] and spans["communication"] == [(215, 220), (225, 230), (230, 530)]


def test_report_of_a_cpu_trace():
    """What hands a collective over, and waits, is not computation, nor is a function of autograd around it."""
    spans = load(PROFILING).classify(
        [
            event("aten::mm", "cpu_op", 0, 10),
            event("AllToAll", "cpu_op", 14, 30),
            event("aten::clone", "cpu_op", 15, 3),
            event("record_param_comms", "cpu_op", 20, 10),
            event("c10d::alltoall_base_", "cpu_op", 20, 10),
            event("gloo:all_to_all", "user_annotation", 22, 20),
        ]
    )
    compute, communication = [(0, 10), (15, 18)], [(22, 42)]
    assert spans == {**dict(forward=[], backward=[], gather=[]), "optimizer": compute, "communication": communication}


def slow_export(module):
    """A probe: exporting a trace takes four seconds; how many barriers there are."""
    barriers, barrier, export = [], module.dist.barrier, module.profile.export_chrome_trace
    module.dist.barrier = lambda *args: barriers.append(1) or barrier(*args)
    module.profile.export_chrome_trace = lambda self, file: time.sleep(4) or export(self, file)
    return lambda: len(barriers)


@pytest.mark.thorough
def test_profile_of_a_recipe(tmp_path):
    """On CPUs: naive hides nothing; trace, timeline and pictures are there, and --draw draws them."""
    flags = f"02_data_parallel/naive.py --folder {tmp_path} --device cpu --layers 2 --batch 4"
    assert launch(PROFILING, 2, flags, probe=slow_export, save=False).probes == [2, 2]
    for rank in range(2):
        ms = json.loads((tmp_path / f"naive.rank{rank}.json").read_text())["ms"]
        assert 3900 > ms["step"] > ms["compute"] and min(ms["forward"], ms["backward"], ms["optimizer"]) > 0
        assert 0 < 0.9 * ms["communication"] <= ms["exposed"] and ms["compute"] + ms["exposed"] <= ms["step"]
        assert (tmp_path / f"naive.rank{rank}.trace.json.gz").stat().st_size > 1000
    launch(PROFILING, 1, f"--draw {tmp_path}/picture.svg {tmp_path}/naive.rank0.json", save=False)
    flags = f"01_single_gpu/chunked_loss.py --folder {tmp_path} --device cpu --layers 2 --batch 4 --loss_chunks 2"
    launch(PROFILING, 1, flags, save=False)
    ms = json.loads((tmp_path / "chunked_loss.rank0.json").read_text())["ms"]
    assert ms["forward"] > 0.2 * ms["backward"] > 0, "the forward in parts counts as optimizer"
    assert "02_data_parallel/naive.py" in (tmp_path / "picture.svg").read_text()
    assert "</svg>" in (tmp_path / "naive.rank0.memory.svg").read_text()


@pytest.mark.parametrize(
    "recipes, line",
    [
        (["nowhere.py"], "nowhere.py: no such file"),
        (RECIPES, "one recipe at a time"),
        (["README.md"], "must be a recipe"),
        ([*RECIPES[:1], "--folder", "README.md"], "--folder README.md: is no folder"),
        (["01_single_gpu/memory.py"], "must be a recipe"),
        (["README.md", "--draw", "nowhere/x.svg"], "must be an .svg file"),
        (["README.md", "--draw", "x.svg"], "README.md must be timelines"),
    ],
)
def test_bad_input_ends_in_one_line(recipes, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [PROFILING, *recipes])
    with pytest.raises(SystemExit, match=line):
        load(PROFILING).main()
