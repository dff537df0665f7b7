"""What plan.py predicts, against what was measured, published, and what memory.py and the simulated schedules say."""

import collections
import contextlib
import functools
import itertools
import json
import math
import re
import statistics
import sys
from unittest.mock import patch

import pytest
import schedules
import torch
from launch import ROOT, load
from test_lineage import FAMILY

PLAN = load("08_4d/plan.py")
# not a second copy: test_memory.py pickles objects, and pickle looks their classes up by the name of the module
MEMORY = sys.modules.get("recipe_memory") or load("01_single_gpu/memory.py")
STORED = json.loads((ROOT / "tests" / "results" / "speed.json").read_text())
TRAIN, SINGLE = PLAN.Trainer(), PLAN.FP32_WEIGHTS
loaded = functools.cache(load)
# Recipes: the sizes that are the number of GPUs, how they train, the layout beside, whether their memory is predicted.
RECIPES = {
    "01_single_gpu/train.py": ("", SINGLE, {}, False),
    "01_single_gpu/activation_checkpointing.py": ("", SINGLE, dict(recompute="full"), False),
    "01_single_gpu/selective_checkpointing.py": ("", SINGLE, dict(recompute="selective"), False),
    "03_zero/zero1_overlap.py": ("dp", TRAIN, {}, True),
    "03_zero/zero2.py": ("dp", TRAIN, dict(zero=2), True),
    "03_zero/zero3.py": ("dp shard", TRAIN, dict(zero=3), True),
    "03_zero/hsdp.py": ("dp shard", TRAIN, dict(zero=3), True),
    "04_tensor_sequence/sequence_parallel.py": ("tp", SINGLE, {}, False),
    "05_context_ring/zigzag.py": ("cp", SINGLE, {}, False),
    "06_pipeline/1f1b.py": ("pp", SINGLE, {}, False),
    "06_pipeline/zbv.py": ("pp", SINGLE, dict(chunks=2, zbv=True), True),
    "07_expert/expert_parallel.py": ("dp ep", SINGLE, {}, True),
    "08_4d/train.py": ("", TRAIN, {}, True),
}


def config(flags, gpu, **layout):
    """The run that a recipe's flags describe."""
    given = dict(re.findall(r"--(\w+) (\w+)", flags))
    names = ("layers", "vocab", "seq", "batch", "microbatches", "dp", "cp", "tp", "pp", "shard")
    sizes = {name: int(given[name]) for name in names if name in given}
    base = dict(dp=1, cp=1, tp=1, pp=1, chunks=1, microbatches=1, recompute="none")
    base["machine"] = "H200" if "H200" in gpu else "H100"
    cfg = PLAN.Config(**{**PLAN.PRESETS[given["preset"]], "preset": given["preset"], **base, **layout, **sizes})
    return PLAN.replace(cfg, gpus=cfg.dp * cfg.cp * cfg.tp * cfg.pp)


def first_rank(cfg, by=TRAIN):
    """GiB of rank 0, whose memory the recipes print."""
    return PLAN.memory(cfg, by, 0, PLAN.stages(cfg, by)[0]) / 2**30


def measured(row):
    """Median tokens/s/GPU of a row's rounds, half their spread in proportion, and GiB."""
    speeds = [turn["tokens"] for turn in row["rounds"]]
    middle = statistics.median(speeds)
    return middle, (max(speeds) - min(speeds)) / 2 / middle, max(turn["memory"] or 0 for turn in row["rounds"])


def stored():
    """The name of a suite, the file and layout of a row, what was measured, and the plan, of all rows of RECIPES."""
    for suite, content in STORED.items():
        for row in content.get("rows", []):
            if row.get("file") in RECIPES and "rounds" in row:
                sizes, by, layout, _ = RECIPES[row["file"]]
                gpus = int(content["gpu"].split()[0])
                if gpus > 1 or "shard" not in sizes:
                    cfg = config(row["flags"], content["gpu"], **layout, **dict.fromkeys(sizes.split(), gpus))
                    yield suite, row["file"], measured(row), PLAN.predict(cfg, by)


def test_stored_runs():
    """Speed within 8 % of all stored rows, and 5 % of most, as plan.py claims; memory within 5 % of all, 1 % of most.
    Of two layouts in a suite the faster is predicted as that, if half their spread, or 2 %, tells them."""
    speeds, memories, suites, pairs = [], [], collections.defaultdict(list), 0
    for suite, file, (tokens, spread, peak), plan in stored():
        cfg = plan.cfg
        speeds.append(abs(plan.tokens / tokens - 1))
        memories += [abs(plan.memory / peak - 1)] * RECIPES[file][3]
        suites[suite, cfg.preset, cfg.layers, cfg.vocab, cfg.seq].append((cfg, tokens, spread, plan.tokens))
    assert max(speeds) < 0.08 and sum(error < PLAN.ERROR for error in speeds) > 0.85 * len(speeds), speeds
    assert max(memories) < 0.05 and sum(error < 0.01 for error in memories) > 0.9 * len(memories), memories
    for rows in suites.values():
        for (a, fast, *of_a), (b, slow, *of_b) in itertools.permutations(rows, 2):
            if a != b and fast > (1 + max(0.02, of_a[0], of_b[0])) * slow:
                pairs += 1
                assert of_a[1] > of_b[1], f"{PLAN.shape(a)} is faster than {PLAN.shape(b)}"
    assert {file for _, file, *_ in stored()} == RECIPES.keys() and pairs > 50


def test_memory_is_what_memory_py_says():
    """Within 2 %, and up to two units more, a reduction's copies that memory.py leaves out."""
    sizes = (1, 1, 16, 1), (8, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 4), (2, 2, 2, 2)
    models = ("smollm_1_7b", 2048, 2, "none"), ("llama3_8b", 8192, 1, "selective"), ("llama3_1b", 4096, 2, "full")
    for (preset, seq, *others), (dp, cp, tp, pp), m in itertools.product(models, sizes, (1, 8)):
        same = dict(PLAN.PRESETS[preset], seq=seq, batch=dp * m, microbatches=m, dp=dp, cp=cp, tp=tp, pp=pp)
        for zero, recompute in (1, "none"), others:
            cfg = PLAN.Config(**same, chunks=1, zero=zero, recompute=recompute)
            for stage in {0, pp - 1}:
                own = dict(zero=zero, recompute=recompute, sequence_parallel=True, stage=stage)
                theirs = MEMORY.peak(MEMORY.Config(**same, **own, dtype="bfloat16", compile=True))[1]
                theirs, units = sum(theirs.values()), PLAN.stages(cfg, TRAIN)[stage]
                ours = PLAN.memory(cfg, TRAIN, stage, units)
                assert 0.98 * theirs <= ours <= 1.02 * theirs + 4 * max(units), (cfg, stage, ours, theirs)


def simulated(seconds, m, transfer=0, chunks=1):
    """When a pipeline ends whose ranks take so long for forward, backward, ZeRO's gather and its reduction."""
    return PLAN.simulate(seconds, transfer, PLAN.Config(pp=len(seconds), chunks=chunks), m, TRAIN)


@pytest.mark.parametrize("name, chunks", [("1f1b", 1), ("interleaved", 3)])
def test_simulated_as_the_schedules_are(name, chunks):
    """The same end as schedules.py, with stages of their own times. A long step is not simulated whole, but as if."""
    recipe = load(f"06_pipeline/{name}.py")
    for p, m in ((1, 3), (2, 6), (4, 4), (8, 16)):
        ranks = [(1 + 0.1 * rank, 2 + 0.3 * (rank == p - 1), 0, 0) for rank in range(p)]
        line, hop = schedules.pipeline(recipe, p, m, chunks), 0.2 * (p > 1)

        def takes(op, stage, ranks=ranks):
            return ranks[stage % len(ranks)]["FB".index(op)] / chunks if op in "FB" else 0

        slots = schedules.simulate(line, takes, hop)
        assert simulated(ranks, m, 0.2, chunks) == pytest.approx(schedules.makespan(slots))
        slow_first = [(0.0322 + 0.0025 * (rank == 0), 0.0505 + 0.003 * (rank == 0), 0.01, 0.02) for rank in range(p)]
        cfg = PLAN.Config(pp=p, chunks=chunks, microbatches=32 * p)
        whole = PLAN.simulate(slow_first, 0.001, cfg, 32 * p, TRAIN)
        assert PLAN.end(slow_first, 0.001, cfg, TRAIN) == pytest.approx(whole, rel=2e-3)


def test_what_zero_adds():
    """Hidden communication costs half of itself, beside the first forward and the last backward; the rest shows."""
    assert simulated([(10, 20, 4, 8)], 3) == 90 + 2 + 4
    assert simulated([(10, 20, 14, 50)], 1) == 30 + 5 + 30
    # halves: of the first chunk's gather, of 1 s that the second chunk's gather goes on, and of two reductions
    assert simulated([(10, 20, 8, 16)], 4, chunks=2) == 120 + 2 + 0.5 + 8


def test_zbv(monkeypatch):
    """The order of zbv.py; rank 0 has the head, too; a chunk is reduced beside the Ws that follow its own."""
    recipe, layout = load("06_pipeline/zbv.py"), dict(pp=4, dp=1, cp=1, tp=1, chunks=2, microbatches=8, zbv=True)
    cfg = PLAN.Config(**PLAN.PRESETS["llama3_8b"], **layout, seq=4096, batch=8)
    assert 0.48 < PLAN.shares(cfg)[0][0] < 0.49 and 0.38 < PLAN.share_of_weights(cfg, TRAIN) < 0.45
    monkeypatch.setattr(PLAN, "shares", lambda cfg: [[0.5, 0.5]] * cfg.pp)
    monkeypatch.setattr(PLAN, "share_of_weights", lambda *_: 0.5)
    for ranks, m in ((2, 3), (3, 5), (4, 16)):
        for rank in range(ranks):
            assert PLAN.schedule_in_a_v(rank, ranks, m) == recipe.schedule(rank, ranks, m)
        equal = PLAN.Config(pp=ranks, chunks=2, zbv=True)  # F, B and W: idle for ranks - 1, reduced for 8 - ranks more
        assert PLAN.simulate([(2, 4, 0, 8)] * ranks, 0, equal, m, TRAIN) == 6 * m + 7


def test_two_nodes():
    """Transfers between nodes take longer; HSDP's shards stay inside a node, and their transfers take as long."""
    sizes = dict(PLAN.PRESETS["llama3_8b"], seq=8192, batch=16, microbatches=1, gpus=16, chunks=1)
    cases = ((1, 4, 2, 2, 0), ["pp"]), ((1, 4, 4, 1, 0), ["cp", "dp"]), ((16, 1, 1, 1, 8), ["dp"])
    for layout, slower in cases:
        cfg = PLAN.Config(**sizes, **dict(zip(("dp", "cp", "tp", "pp", "shard"), layout)))
        far, near = (PLAN.predict(PLAN.replace(cfg, gpus_per_node=n), TRAIN).step for n in (8, 16))
        found = [axis for axis in ("cp", "dp", "pp", "tp") if getattr(far, axis) > 1.001 * getattr(near, axis) + 1e-9]
        assert found == slower, (far, near)
    assert PLAN.ring(PLAN.Config(), 2**30, 16, 1, True) == pytest.approx(15e-6 + 2**30 * 8 / 16 / 40e9)


def test_finds_the_best(monkeypatch, capsys, tmp_path):
    """The fastest is first, all fit, and the printed line starts as many processes."""
    model = dict(PLAN.PRESETS["llama3_8b"], preset="llama3_8b", gpus=16, batch=64, seq=8192, ours=True)
    rows = PLAN.plans(PLAN.Config(**model), TRAIN)[0]
    speeds, best = [row.tokens for row in rows], rows[0].cfg
    assert speeds == sorted(speeds, reverse=True) and max(row.memory for row in rows) <= 74
    assert all(PLAN.least(row.cfg, TRAIN) <= row.step.total() for row in rows), "what is skipped may be the best"

    def printed(flags):
        monkeypatch.setattr(sys, "argv", ["plan.py", *flags.split()])
        PLAN.main()
        return capsys.readouterr().out

    picture = tmp_path / "plan.svg"
    said = printed(f"--preset llama3_8b --gpus 16 --batch 64 --seq 8192 --ours --draw {picture}")
    assert f"that fit: {len(rows)}." in said and f"Best: {PLAN.shape(best)}." in said
    assert PLAN.shape(best) in picture.read_text()
    assert re.search("  torchrun --nnodes 2 .*--nproc_per_node 8 08_4d/train.py ", said)
    one_gpu = "--preset smollm_1_7b --gpus 1 --batch 2 --seq 4096 --microbatches 2"
    rows = [printed(f"{one_gpu} {flags}").splitlines()[2].split() for flags in ("", "--tflops 98.95")]
    fast, slow = (int(row[13].replace(",", "")) for row in rows)  # ms of compute
    assert slow == pytest.approx(10 * fast, rel=0.01), "a tenth of the FLOPs does not compute ten times as long"


def test_stored_picture():
    """plan.svg has the best layout. ZeRO alone, the simplest, is within the error of it."""
    cfg = PLAN.Config(**PLAN.PRESETS["llama3_8b"], gpus=64, batch=512, seq=8192)
    best = PLAN.plans(cfg, TRAIN, keep=12)[0]
    assert PLAN.shape(best[0].cfg) in (ROOT / "08_4d" / "plan.svg").read_text()
    simple = PLAN.simplest(best).cfg
    assert (simple.dp, simple.cp, simple.tp, simple.pp) == (64, 1, 1, 1)


LAYOUT = "dp", "cp", "tp", "pp", "chunks", "microbatches"
QUESTIONS = [  # what only some layouts can do
    dict(gpus=16, gpus_per_node=16, batch=16, ffn=96, seq=24),  # fewer layers than GPUs
    dict(gpus=8, batch=4, seq=20, ffn=100),  # tp divides the tokens of several sequences
    dict(gpus=6, batch=12, dim=48, heads=6, kv_heads=2, vocab=257, seq=36),
    dict(gpus=8, batch=6, experts=2, ffn=72, seq=12, layers=5),  # half an expert is no multiple of 8
    dict(gpus=8, batch=32, zero=2),
    dict(gpus=8, batch=16, zero=3),
]


def accepted(wanted):
    """The layouts with which train.py, or moe.py, trains this model, of the numbers of chunks that are tried."""
    module, found = loaded(f"08_4d/{'moe' if wanted.experts else 'train'}.py"), set()
    names = [f.name for f in PLAN.fields(module.Config) if hasattr(wanted, f.name) and f.name not in LAYOUT]
    given = {name: getattr(wanted, name) for name in names} | dict(device="cuda", dtype="bfloat16")
    sizes = itertools.product(*[PLAN.divisors(wanted.gpus)] * 4, PLAN.CHUNKS, PLAN.divisors(wanted.batch))
    for size, ep in itertools.product(sizes, PLAN.divisors(wanted.gpus) if wanted.experts else [1]):
        layout = dict(zip(LAYOUT, size)) | ({"ep": ep} if wanted.experts else {})
        if math.prod(size[:4]) == wanted.gpus and (size[3] > 1 or size[4] == 1):
            with contextlib.suppress(SystemExit):
                module.check(module.Config(**{**given, **layout}), wanted.gpus)
                found.add((*size, ep))
    return found


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_layouts_that_the_recipes_accept(monkeypatch, question):
    """All of these are found, and no others; the printed line has the sizes."""
    wanted = PLAN.Config(**question, ours=True, memory=1e6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 16)
    rows = [row.cfg for row in PLAN.plans(wanted, TRAIN)[0]]
    for one in rows:
        module, line = recipe_of(one)
        cfg = typed(module, f"{line} --device cuda")
        names = [name for name in (*LAYOUT, "ffn", "vocab", "seq", "batch") if hasattr(cfg, name)]
        assert all(getattr(cfg, name) == getattr(one, name) for name in names)
        module.check(cfg, wanted.gpus)
    found = {(*(getattr(one, name) for name in LAYOUT), one.ep) for one in rows if one.zero < 2}
    assert found == (set() if wanted.zero else accepted(wanted)) and rows


def recipe_of(cfg):
    """The recipe that the printed line starts, and what comes behind torchrun's own flags."""
    line = re.search(r"0\d_\S+\.py .*", PLAN.command(cfg))[0]
    return loaded(line.split()[0]), line


def typed(module, line):
    """Parse that line as the recipe does."""
    with patch.object(sys, "argv", line.split()):
        return module.parse_config()


def test_the_printed_line_has_the_model():
    """Its sizes, and what else the presets have, also of models for which train.py has no preset."""
    for preset, sizes in PLAN.PRESETS.items():
        cfg = typed(*recipe_of(PLAN.Config(**sizes, preset=preset, dp=1, cp=1, tp=1, pp=1, chunks=1, microbatches=1)))
        assert all(getattr(cfg, name) == size for name, size in sizes.items()), preset
        assert preset != "llama3_70b" or (cfg.rope_factor, cfg.lr) == (8.0, 1.5e-4)
    ours, theirs = (FAMILY[f"08_4d/{name}.py"].definitions for name in ("plan", "moe"))
    assert all(ours[name] == theirs[name] for name in ("split_layers", "schedule", "flops_per_token"))
    for name, sizes in (loaded("08_4d/train.py").PRESETS | loaded("08_4d/moe.py").PRESETS).items():
        assert PLAN.PRESETS[name] == {key: size for key, size in sizes.items() if key in PLAN.PRESETS["olmoe_1b_7b"]}


def test_least_recomputation():
    """A layout gets the least recomputation that makes it fit, and ZeRO-2 if that needs less."""
    cfg = PLAN.Config(**PLAN.PRESETS["llama3_8b"], gpus=64, batch=512, seq=8192, dp=64, cp=1, tp=1, pp=1, chunks=1)
    one = PLAN.replace(cfg, shard=1, microbatches=8)
    fits = {gib: PLAN.fitting(PLAN.replace(one, memory=gib), TRAIN) for gib in (100, 74, 60, 45, 25)}
    found = {gib: [(c.zero, c.recompute) for c in some] for gib, some in fits.items()}
    other, both = [(1, "full"), (2, "none")], [(2, "selective")]
    assert found == {100: [(1, "none")], 74: [(1, "selective"), (2, "none")], 60: other, 45: both, 25: [(2, "full")]}


def test_flags_of_others():
    """Their sizes multiply to the GPUs and the batch; experts, and unequal stages, have flags where others can."""
    for cfg in (row.cfg for row in PLAN.plans(PLAN.Config(gpus=16, batch=64, layers=16), TRAIN)[0]):
        megatron, titan, *nano = PLAN.elsewhere(cfg)
        sizes = {name: int(size) for name, size in re.findall(r"--(\S+) (\d+)", f"{megatron} {titan}")}
        axes = "tensor-model", "context", "pipeline-model"
        assert [sizes[f"{axis}-parallel-size"] for axis in axes] == [cfg.tp, cfg.cp, cfg.pp]
        assert math.prod(size for name, size in sizes.items() if name.endswith("_degree")) == cfg.gpus
        local = sizes["training.local_batch_size"] // (cfg.microbatches if cfg.pp > 1 else 1)
        assert local == sizes["micro-batch-size"] == cfg.batch // cfg.dp // cfg.microbatches
        for line in nano:
            given = json.loads(line.removeprefix("nanotron: "))
            assert [given["parallelism"][axis] for axis in ("dp", "tp", "pp")] == [cfg.dp, cfg.tp, cfg.pp]
    layout = dict(dp=8, cp=1, tp=1, pp=2, gpus=16, batch=16, seq=4096, microbatches=2, recompute="none")
    megatron, titan = PLAN.elsewhere(PLAN.Config(**PLAN.PRESETS["mixtral_8x7b"], **layout, chunks=1, ep=8))
    assert "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8" in megatron
    assert "--parallelism.expert_parallel_degree 8" in titan
    megatron, *_ = PLAN.elsewhere(PLAN.Config(**PLAN.PRESETS["llama3_1b"], **layout, chunks=1))  # with a large head
    assert "--pipeline-model-parallel-layout 'Et*10|t*6L'" in megatron
    (titan,) = PLAN.elsewhere(PLAN.Config(**PLAN.PRESETS["llama3_8b"], **layout, chunks=2, zbv=True))
    assert "pipeline_parallel_schedule ZBVZeroBubble" in titan


RUNS = """model,nodes,dp,tp,pp,micro_batches,micro_batch_size,zero,tokens_per_s_per_gpu,gpu_memory_GB
1.34B,1,4,2,1,64,1,0,{},{}
3.57B,1,8,1,1,16,2,1,{},{}
1.34B,1,2,1,4,32,4,1,{},{}
"""


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--shard 2 --pp 2", "--zero 3: must go without --cp and --pp, and so must --shard"),
        ("--scale --gpus 8", "--gpus: not beside --scale"),
        ("--preset mixtral_8x7b --gpus 6 --batch 24 --seq 4096", "It would fit with 16 GPUs"),  # whole nodes
        ("--preset llama3_8b --gpus 1 --seq 8192 --batch 1", "/low_memory.py (72.2 GiB) or with 2 GPUs"),
        ("--preset llama3_8b --seq 8192 --batch 8 --memory 20 --ours", "It would fit without --ours"),
        ("1.34B,1,4,2 > 2B,1,4,2", "line 2: model 2B: must be one of "),  # of a file of runs with this change
        ("1.34B,1,4,2 > 1.34B,2,4,2", "line 2: dp·tp·pp must be 8 per node"),
        ("zero,>", "must have runs, and a column zero"),
    ],
)
def test_what_cannot_be(monkeypatch, tmp_path, flags, problem):
    if ">" in flags:
        old, new = flags.split(">")
        file = tmp_path / "runs.csv"
        file.write_text(RUNS.format(*6 * [1]).replace(old.strip(), new.strip(), 1))
        flags = f"--measured {file}"
    monkeypatch.setattr(sys, "argv", ["plan.py", *flags.split()])
    with pytest.raises(SystemExit, match=re.escape(problem)):
        PLAN.main()


def test_experts():
    """2(Ψ + Ψe/ep)/(tp·pp) bytes of weights, the same state; four exchanges per layer, of (ep-1)/ep of all rows."""
    shape = dict(PLAN.PRESETS["mixtral_8x7b"], layers=2, vocab=2**20, seq=4096, batch=8, gpus=8, dp=8, chunks=1)
    shape |= dict(cp=1, tp=1, pp=1, microbatches=1, zero=1, recompute="none")
    whole, half = (PLAN.predict(PLAN.Config(**shape, ep=ep), TRAIN) for ep in (1, 2))
    experts = 2 * 8 * 3 * 4096 * 14336  # elements; of two layers
    assert (whole.memory - half.memory) * 2**30 == pytest.approx(2 * experts / 2)  # the loss, for a large vocabulary
    assert whole.step.ep == 0 and half.step.optimizer == whole.step.optimizer
    rows = 2 * 4096 * 2 * 4096  # bytes: of a token two rows, of 4096 elements each
    assert half.step.ep == pytest.approx(2 * 4 * PLAN.WAITING * PLAN.ring(whole.cfg, rows, 2, 1))
    # weights are gathered and gradients exchanged by the ranks that have copies, both half beside compute
    less = PLAN.ring(whole.cfg, experts, 8, 1) - PLAN.ring(whole.cfg, experts / 2, 4, 2)
    assert whole.step.dp - half.step.dp == pytest.approx(0.5 * 2 * 2 * less)


def test_plans_of_experts():
    """NVIDIA's example for Megatron-Core is among the best, and reaches the 468 TFLOP/s that it is said to."""
    wanted = PLAN.Config(**PLAN.PRESETS["mixtral_8x7b"], gpus=64, batch=256, seq=4096)
    rows, _ = PLAN.plans(wanted, TRAIN, keep=12)
    theirs = next(row for row in PLAN.ties(rows) if (row.cfg.tp, row.cfg.pp, row.cfg.ep) == (1, 4, 8))
    tight = PLAN.replace(theirs.cfg, zero=0, recompute="any", memory=50)
    assert [(one.zero, one.recompute) for one in PLAN.fitting(tight, TRAIN)] == [(1, "full")], "more is modelled"
    whole = theirs.mfu * (1 + 6 * 32 * 4096 * 4096 / PLAN.flops_per_token(theirs.cfg))
    assert abs(whole * 989.5 / 468 - 1) < 0.1


def test_playbook():
    """Of the book's own choices half are predicted within 6 %, speed and memory, and nine of ten within 15 %."""
    rows = PLAN.cells()
    errors = sorted(abs(book.tokens / tokens - 1) for _, _, book, _, _, _, tokens in rows)
    memory = sorted(abs(book.memory * PLAN.GIB / 1e9 / gb - 1) for _, _, book, _, _, gb, _ in rows)
    assert len(rows) == 26 and all(each[13] < 0.06 and each[23] < 0.15 for each in (errors, memory))
    assert all(ours.tokens >= book.tokens or book.memory > 74 for ours, _, book, *_ in rows)


def test_measured_runs(tmp_path, capsys):
    """Runs as fast and as large as predicted are perfect; of two that are the other way round the choice is wrong."""
    file, picture = tmp_path / "runs.csv", tmp_path / "runs.svg"

    def compared(*numbers):
        file.write_text(RUNS.format(*numbers))
        PLAN.compare(str(file), str(picture))
        lines = capsys.readouterr().out.splitlines()
        return [line.split(",")[-2:] for line in lines[1:4]], "\n".join(lines[4:])

    (a, b, c), _ = compared(*6 * [1])
    _, said = compared(*a, *b, *c)
    assert "100.0% of 1 pairs within a cell are in the right order" in said and "memory: 100% of runs" in said
    assert "100% are predicted within 20 %; the median error is 0.0%" in said and "by 0% at most" in said
    assert ": 0.0% of 1 pairs within a cell" in compared(*c, *b, *a)[1]
    assert "measured" in picture.read_text()


def test_pipelines_that_crawl():
    """... over several nodes without ZeRO, or where memory is full: two messages per micro-batch and neighbour wait."""
    cases = [("1.34B", 0, dict(gpus=16, dp=16 // pp, pp=pp, seq=4096), extra) for pp, extra in ((1, 0), (2, 2), (4, 4))]
    cases += [("8.86B", 1, dict(gpus=8, dp=4, pp=2, seq=seq), extra) for seq, extra in ((2048, 0), (8192, 2))]
    for model, zero, sizes, extra in cases:
        batch = dict(batch=32 * sizes["dp"], microbatches=32, vocab=131072, cp=1, tp=1, chunks=1)
        cfg, by = PLAN.Config(**PLAN.BOOK[model], **sizes, **batch), PLAN.nanotron(zero)
        slow, fast = (PLAN.predict(cfg, PLAN.replace(by, stall=wait)).step.total() for wait in (10, 0))
        assert (slow - fast) / 32 == pytest.approx(10 * extra, rel=0.1, abs=2)


def test_llama_3():
    """All three fit. By the paper's formula the MFU is within 10 %; with 131,072 tokens that counts masked scores."""
    short, shorter, long = PLAN.llama()
    assert all(plan.memory < 74 for plan, *_ in PLAN.llama())
    assert all(0 < theirs / mfu * 100 - 1 < 0.1 for _, theirs, mfu in (short, shorter))
    assert long[1] / long[2] * 100 > 1.2
