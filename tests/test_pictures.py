"""Pictures on disk are those that pictures.py draws, can be read, and show what the recipes and results say."""

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import bench
import curves
import pictures
import probes
import pytest
from launch import ROOT, launch, load
from pages import results

SVG = "{http://www.w3.org/2000/svg}"
BLOCKS = "04_tensor_sequence/test_tensor_sequence.py"


def texts(svg: str) -> list[str]:
    """All texts of a picture, in order."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def stored(path: str) -> str:
    return (ROOT / path).read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("path", pictures.PICTURES)
def test_is_up_to_date(path):
    """By its texts where matplotlib draws: its releases draw the same with other bytes."""
    old, new = stored(path), pictures.PICTURES[path]()
    assert (texts(old) == texts(new)) if "figure_1" in new else (old == new), "run python tests/tools/pictures.py"


@pytest.mark.parametrize("path", sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("*/*.svg")))
def test_reads_well(path):
    """On a phone, by a screen reader, on any ground, and in both modes: every color is there in each."""
    text = stored(path)
    svg = ElementTree.fromstring(text)
    pixels = 4 / 3 if svg.get("width").endswith("pt") else 1
    assert float(svg.get("width").removesuffix("pt")) * pixels <= 640 and len(svg.get("viewBox").split()) == 4
    assert min(float(size) for size in re.findall(r'font(?:-size)?(?:="|: )([\d.]+)', text)) * pixels >= 11
    if path not in pictures.PICTURES:
        assert "#ffffff" not in text and "white" not in text and len(text) < 120_000
        return
    assert svg.get("role") == "img" and svg.find(f"{SVG}title").text
    for colors in svg.find(f"{SVG}style").text.split("@media (prefers-color-scheme: dark)"):
        assert set(re.findall(r"--([\w-]+):#\w{6}", colors)) == set(re.findall(r"var\(--([\w-]+)\)", text))


@pytest.mark.parametrize("recipe", pictures.BLOCKS)
def test_block_communicates_as_drawn(recipe):
    """What one more layer sends, as the tests of 04 find it, are the collectives in the picture, of b·s·d elements."""
    measured = load(BLOCKS)
    size, drawn = measured.B * measured.S * measured.D * 2, Counter()
    for part in pictures.BLOCKS[recipe]:
        if isinstance(part, pictures.Exchange):
            drawn.update((name, phase, size) for phase in ("forward", "backward") for name in getattr(part, phase))
    more = measured.wanted_traffic(recipe)
    measured.L -= 1
    assert drawn and more - measured.wanted_traffic(recipe) == drawn


def test_rings_compute_the_drawn_scores():
    """The slowest rank's scores of each step, of 4 queries a rank; and the tokens of rank 0."""
    found = {Path(recipe).stem: pictures.work(recipe)[1] for recipe in pictures.RINGS}
    assert found == {"ring": [10, 16, 16, 16], "striped": [10, 10, 10, 10], "zigzag": [10, 8, 8, 8]}
    held = {recipe.stem: pictures.held(str(recipe))[0] for recipe in map(Path, pictures.RINGS)}
    assert held == {"ring": [0, 1, 2, 3], "striped": [0, 4, 8, 12], "zigzag": [0, 1, 14, 15]}


def transfers(module):
    """A probe: how often this rank uses the group of each axis, forward and backward; its blocks and its units."""
    used, models, build_model, send = Counter(), [], module.build_model, module.send

    def counted(function):
        def wrapper(*args, **kwargs):
            group = kwargs.get("group")
            used.update((axis, probes.phase()) for axis in ("tp", "cp", "dp_cp") if group is getattr(models[0], axis))
            return function(*args, **kwargs)

        return wrapper

    def sends(model, op, tensor):
        work = send(model, op, tensor)
        used["pp", {"F": "forward", "B": "backward"}[op]] += work is not None
        return work

    module.build_model = lambda cfg: models.append(build_model(cfg)) or models[0]
    module.send = sends
    for name in "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single":
        setattr(module.dist, name, counted(getattr(module.dist, name)))

    def found():  # units: without the one of what tp shares
        units = sum(unit.group is models[0].dp_cp for unit in models[0].units)
        return used, len(models[0].chunks[0].model.layers), units

    return found


@pytest.mark.thorough
def test_mesh_carries_what_the_legend_says():
    """As often as counted on a stage in the middle, which has neither embedding nor head."""
    flags = "--device cpu --steps 1 --layers 3 --batch 4 --microbatches 2 --seq 16 --cp 2 --tp 2 --pp 3"
    used, blocks, units = launch(pictures.MESH, 12, flags, probe=transfers, save=False).probes[5]
    for axis, travel in pictures.TRAVELS.items():
        times = {"block and micro-batch": 2 * blocks, "micro-batch": 2, "step": units}[travel.per]
        found = used[axis, "forward"] / times, used[axis, "backward"] / times
        assert found == (travel.forward, travel.backward), axis


def test_balance():
    """Either kind of balancing takes at least 40 % of what the busiest expert has above the mean."""
    without, *balanced = (pictures.busiest(name)[-1] for name in pictures.BALANCED)
    assert max(balanced) - 1 < 0.6 * (without - 1)


def test_curves():
    """Only naive forms end far from fp32."""
    naive = {run["label"] for run in results("curves.json")["runs"] if run["naive"]}
    ends = pictures.losses_at_end()
    far = {label for label, loss in ends.items() if loss > ends["fp32"] + 0.1}
    assert far and far <= naive


def test_optimizers():
    """Each one's best learning rate lies between others, and Muon's loss is the lower one."""
    runs, means = results("optimizers.json")["runs"], {}
    for name in curves.OPTIMIZERS:
        mine = {(run["lr"], run["seed"]): run["last"] for run in runs if run["optimizer"] == name}
        best = min(curves.RATES, key=lambda rate: mine[rate, 0])
        assert min(curves.RATES) < best < max(curves.RATES)
        means[name] = sum(mine[best, seed] for seed in range(3)) / 3
    assert means["Muon"] < means["AdamW"]


def test_time_to_loss():
    """Losses that fall linearly by validations: half the speed takes twice the time to what the last one reaches."""
    runs = [dict(label="first", seed=0, speed=1.0, losses=[5.0 - 0.1 * i for i in range(1, 11)])]  # 60 tokens a minute
    runs += [dict(runs[0], label="half", speed=0.5), dict(runs[0], label="last", losses=[4.95] * 4 + [4.25, 4.4])]
    runs += [dict(run, seed=1, losses=[4.5, 4.4]) for run in runs[:1]]
    found = curves.time_to_loss(dict(each=20, flags="--seq 30 --batch 2", runs=runs))
    wanted = {"first": [(150, 150), (40, 40)], "half": [(150, 300)], "last": [(100, 100)]}
    assert found == {label: list(map(pytest.approx, times)) for label, times in wanted.items()}


def test_naive_forms_are_changes_of_the_recipes():
    """The line that tests/tools/curves.py changes is there once."""
    for label, recipe, _, change in curves.RUNS + curves.TIMED:
        assert not change or (ROOT / recipe).read_text().count(change[0]) == 1, label


def test_roofline_has_the_kernels_at_their_intensity():
    """FLOPs per byte, forward and backward together, and FLOPs per second; matmuls as measured."""
    rows, found = results("kernels.json"), pictures.dots()
    assert {*pictures.OPERATIONS, "cross_entropy, head", "divergence", "matmul", "flash_attention"} <= found.keys()
    forward, backward = (row for row in rows["rope"]["rows"][:8] if row["by"] == "ours")
    rate = (forward["rate"] * forward["ms"] + backward["rate"] * backward["ms"]) / (forward["ms"] + backward["ms"])
    assert found["rope"] == (0.75, pytest.approx(0.75 * rate))
    dot = next(row for row in rows["tiling"]["rows"] if row["by"] == "dot" and "bfloat16" in row["what"])
    n = int(dot["what"].split(" x ")[0])
    assert found["tiling, dot, bf16"] == pytest.approx((n / 3, 2 * n**3 / dot["ms"] / 1e9))


def test_gpu_kernels_are_sorted_by_what_they_do():
    """By their names, where a fused kernel may also have those of the matmul and the attention around it."""
    names = {
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>(Params)": "matmuls",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
        "squares_kernel": "optimizer",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_mm_3": "elementwise",
        "Memcpy DtoD (Device -> Device)": "elementwise",
    }
    assert {name: bench.kind_of(name) for name in names} == names


def test_timeline_shows_what_the_headers_say():
    """Stage 1 waits for all of its communication, the others hide most; only stage 3 gathers in backward."""
    for stage in pictures.STAGES:
        report = results(f"{pictures.TIMELINES}/{stage}.json")
        exposed = report["ms"]["exposed"] / report["ms"]["communication"]
        assert exposed > 0.95 if stage == "zero1" else exposed < 0.5, stage
        gathers, backward = (report["timeline"][kind] for kind in ("gather", "backward"))
        in_backward = [span for span in gathers if min(backward)[0] < span[0] and span[1] < max(backward)[1]]
        assert bool(in_backward) == (stage == "zero3"), stage
