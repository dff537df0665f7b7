"""The profiler's report and pictures, of traces with known contents, and of recipes on CPUs."""

import itertools
import json
import random
import subprocess
import sys
import time

import pytest
from launch import ROOT, launch, load

PROFILING = "01_single_gpu/profiling.py"
RECIPES = ["01_single_gpu/train.py", "02_data_parallel/naive.py"]


def spans_by_hand(spans):
    """The microseconds that spans with whole ends cover, as a set."""
    return {t for start, end in spans for t in range(int(start), int(end))}


def test_spans():
    """Union and difference of spans, against sets of microseconds."""
    profiling, generator = load(PROFILING), random.Random(0)
    for _ in range(200):
        starts = [generator.randrange(60) for _ in range(13)]
        spans = [(start, start + generator.randrange(1, 12)) for start in starts]
        ours, others = spans[:6], spans[6:]
        united = profiling.union(ours)
        assert spans_by_hand(united) == spans_by_hand(ours)
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(united))
        left = profiling.without(united, profiling.union(others))
        assert spans_by_hand(left) == spans_by_hand(ours) - spans_by_hand(others)
        assert profiling.length(left) == len(spans_by_hand(left)) / 1e3
    assert profiling.union([(0, 10), (15, 20), (40, 50)], gap=5) == [(0, 20), (40, 50)]


def trace_of_a_gpu():
    """Events as a GPU's trace has them: kernels run long after the CPU has launched them, on two streams."""
    label = [("forward", 0, 20), ("backward", 20, 60)]
    launched = [  # name, category, launch, start, end, stream
        ("gemm", "kernel", 5, 100, 200, 7),
        ("gemm_backward", "kernel", 25, 200, 300, 7),
        ("ncclDevKernel_AllGather_RING_LL", "kernel", 30, 250, 350, 20),
        ("Memcpy PtoP", "gpu_memcpy", 40, 320, 340, 20),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**)", "kernel", 40, 335, 360, 20),
        ("Memcpy DtoD", "gpu_memcpy", 45, 300, 310, 7),
        ("multi_tensor_apply_kernel", "kernel", 70, 370, 400, 7),
    ]
    events = [{"ph": "X", "cat": "user_annotation", "name": n, "ts": a, "dur": b - a} for n, a, b in label]
    for i, (name, cat, called, start, end, stream) in enumerate(launched):
        args = {"correlation": i, "stream": stream}
        events.append({"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args})
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": called, "dur": 1}
        events.append({**call, "args": {"correlation": i}})
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


def event(name, cat, ts, dur, **args):
    """An event of a trace."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


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


def test_gaps_of_a_timeline():
    """50 microseconds of compute cannot be seen in a picture, but single collectives can."""
    spans = dict(forward=[(0, 10), (40, 50)], backward=[], optimizer=[], communication=[(60, 70), (80, 90)])
    shown = load(PROFILING).timeline({**spans, "gather": [(80, 90)]})
    assert shown["forward"] == [(0, 0.05)] and shown["communication"] == [(0.06, 0.07), (0.08, 0.09)]
    assert shown["gather"] == [(0.08, 0.09)]


def test_draw(tmp_path, monkeypatch):
    """Bars where the spans are, if long enough to be seen, in the legend's colors; a title with the numbers."""
    profiling, bars = load(PROFILING), []
    spans = dict(
        forward=[(0, 1)], backward=[(2, 5)], optimizer=[(6, 7)], communication=[(1, 4)], exposed=[(1, 2), (3, 3.0005)]
    )
    ms = dict(step=8.0, backward=3.0, communication=3.0, exposed=1.0, idle=5.0)
    (tmp_path / "a.json").write_text(json.dumps(dict(recipe="r", where="w", ms=ms, timeline=spans)))
    add = lambda self, widths, rows, facecolor, **_: bars.append((widths, rows[0], facecolor))  # noqa: E731
    monkeypatch.setattr(profiling.pyplot.Axes, "broken_barh", add)
    profiling.draw([str(tmp_path / "a.json")], str(tmp_path / "p.svg"))
    above = [([(0, 1)], "forward"), ([(2, 3)], "backward"), ([(6, 1)], "optimizer")]
    below = [([(1, 3)], 0.1, profiling.HIDDEN), ([(1, 1)], 0.1, profiling.EXPOSED)]
    assert bars == [(widths, 1.1, profiling.PHASES[phase]) for widths, phase in above] + below
    assert (
        "r: step 8 ms, backward 3 ms, communication 3.0 ms, of which exposed 1.0 ms" in (tmp_path / "p.svg").read_text()
    )


def test_all_timelines_are_drawn_whole(tmp_path, monkeypatch):
    """... on one scale, also where a later one is longer."""
    profiling, axes = load(PROFILING), []
    for step in 10, 200:
        spans = dict.fromkeys([*profiling.PHASES, "communication", "exposed"], [(0, step)])
        ms = dict(step=step, backward=step, communication=step, exposed=step)
        (tmp_path / f"{step}.json").write_text(json.dumps(dict(recipe="r", where="w", ms=ms, timeline=spans)))
    title = profiling.pyplot.Axes.set_title
    monkeypatch.setattr(
        profiling.pyplot.Axes, "set_title", lambda self, *a, **k: axes.append(self) or title(self, *a, **k)
    )
    profiling.draw([str(tmp_path / "10.json"), str(tmp_path / "200.json")], str(tmp_path / "p.svg"))
    assert len(axes) == 2 and all(axis.get_xlim()[0] == 0 and axis.get_xlim()[1] >= 200 for axis in axes)


def test_draw_memory(tmp_path, monkeypatch):
    """Of the GPU if there is one, in GiB, in order of time, from the first change on."""
    profiling, drawn = load(PROFILING), []

    def memory(ts, total, device):
        return event(
            "[memory]", "cpu_instant_event", ts, 0, **{"Device Type": device, "Total Allocated": total, "Bytes": 7}
        )

    events = [memory(3000, 2**30, 1), memory(1000, 2**29, 1), memory(500, 1, 0)]
    events += [event("k", "kernel", 1, 1), event("forward", "user_annotation", 2000, 500)]
    monkeypatch.setattr(profiling.pyplot.Axes, "step", lambda self, x, y, **_: drawn.append((x, y)))
    monkeypatch.setattr(profiling.pyplot.Axes, "axvspan", lambda self, start, end, **_: drawn.append((start, end)))
    profiling.draw_memory(events, tmp_path / "m.svg")
    assert drawn == [(1, 1.5), ([0, 2], [0.5, 1])]


def slow_export(module):
    """A probe: exporting a trace takes a second; how many barriers there are."""
    barriers, barrier, export = [], module.dist.barrier, module.profile.export_chrome_trace
    module.dist.barrier = lambda *args: barriers.append(1) or barrier(*args)
    module.profile.export_chrome_trace = lambda self, file: time.sleep(1) or export(self, file)
    return lambda: len(barriers)


@pytest.mark.thorough
@pytest.mark.parametrize("name, hides", [("naive", False), ("overlap", True)])
def test_profile_of_a_recipe(name, hides, tmp_path):
    """On CPUs: naive hides nothing, overlap does; trace, timeline and pictures are there, and --draw draws them."""
    flags = f"02_data_parallel/{name}.py --folder {tmp_path} --device cpu --layers 2 --batch 4"
    assert launch(PROFILING, 2, flags, probe=slow_export, save=False).probes == [2, 2]
    for rank in range(2):
        ms = json.loads((tmp_path / f"{name}.rank{rank}.json").read_text())["ms"]
        assert 900 > ms["step"] > ms["compute"] and min(ms["forward"], ms["backward"], ms["optimizer"]) > 0
        assert 0 < ms["communication"] and (ms["exposed"] < 0.9 * ms["communication"]) == hides
        assert ms["compute"] + ms["exposed"] <= ms["step"] and ms["idle"] < 0.5 * ms["step"]
        assert (tmp_path / f"{name}.rank{rank}.trace.json.gz").stat().st_size > 1000
    timeline = str(tmp_path / f"{name}.rank0.json")
    command = ["python", PROFILING, "--draw", str(tmp_path / "picture.svg"), timeline]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert f"02_data_parallel/{name}.py" in (tmp_path / "picture.svg").read_text()
    assert "</svg>" in (tmp_path / f"{name}.rank0.memory.svg").read_text()


@pytest.mark.thorough
def test_profiling_without_a_recipe():
    command = ["python", PROFILING, "nowhere.py"]
    end = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert end.returncode == 1 and end.stderr == "nowhere.py: no such file\n"


def test_profiling_one_recipe_at_a_time(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [PROFILING, *RECIPES])
    with pytest.raises(SystemExit, match="one recipe at a time"):
        load(PROFILING).parse_config()
