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

FOLDER = ROOT / "08_4d"
PLAN = load("08_4d/plan.py")
# not a second copy: test_memory.py pickles objects, and pickle looks their classes up by the name of the module
MEMORY = sys.modules.get("recipe_memory") or load("01_single_gpu/memory.py")
STORED = json.loads((ROOT / "tests" / "results" / "speed.json").read_text())
TRAIN = PLAN.Trainer()
loaded = functools.cache(load)
# Recipes of one technique: the axis that their processes are, what they do that train.py does not, what is recomputed.
RECIPES = {
    "01_single_gpu/train.py": ("dp", PLAN.FP32_WEIGHTS, "none"),
    "01_single_gpu/activation_checkpointing.py": ("dp", PLAN.FP32_WEIGHTS, "full"),
    "01_single_gpu/selective_checkpointing.py": ("dp", PLAN.FP32_WEIGHTS, "selective"),
    "03_zero/zero1_overlap.py": ("dp", TRAIN, "none"),
    "04_tensor_sequence/sequence_parallel.py": ("tp", PLAN.FP32_WEIGHTS, "none"),
    "05_context_ring/zigzag.py": ("cp", PLAN.FP32_WEIGHTS, "none"),
    "06_pipeline/1f1b.py": ("pp", PLAN.FP32_WEIGHTS, "none"),
}


def config(flags, gpu, **layout):
    """The run that a recipe's flags describe."""
    given = dict(re.findall(r"--(\w+) (\w+)", flags))
    names = ("layers", "vocab", "seq", "batch", "microbatches", "dp", "cp", "tp", "pp")
    sizes = {name: int(given[name]) for name in names if name in given}
    base = dict(dp=1, cp=1, tp=1, pp=1, chunks=1, microbatches=1, recompute="none")
    base["machine"] = "H200" if "H200" in gpu else "H100"
    cfg = PLAN.Config(**{**PLAN.PRESETS[given["preset"]], "preset": given["preset"], **base, **sizes, **layout})
    return PLAN.replace(cfg, gpus=cfg.dp * cfg.cp * cfg.tp * cfg.pp)


def first_rank(cfg, by=TRAIN):
    """GiB of rank 0, whose memory the recipes print."""
    return PLAN.memory(cfg, by, 0, PLAN.stages(cfg, by)[0]) / 2**30


def measured(row):
    """Median tokens/s/GPU of a row's rounds, half their spread in proportion, and GiB."""
    speeds = [turn["tokens"] for turn in row["rounds"]]
    middle = statistics.median(speeds)
    return middle, (max(speeds) - min(speeds)) / 2 / middle, max(turn["memory"] or 0 for turn in row["rounds"])


def stored(files):
    """All stored runs of these recipes: suite, row, GPUs."""
    for suite, content in STORED.items():
        for row in content.get("rows", []):
            if row.get("file") in files and "rounds" in row:
                yield suite, row, content["gpu"]


def pairs_in_order(rows, least):
    """Of every two layouts, rows of (layout, measured, spread, predicted), the faster one must be predicted as that.

    Return how many pairs differ by more than `least` and their spread, and so count.
    """
    faster = [(a, b) for a in rows for b in rows if a[0] != b[0] and a[1] > (1 + max(least, a[2], b[2])) * b[1]]
    for a, b in faster:
        assert a[3] > b[3], f"{a} is faster than {b}"
    return len(faster)


def test_speed_of_one_technique():
    """Within 5 % of nine in ten stored rows, and 8 % of all; layouts that differ by more than 5 % in their order.

    These are the errors that plan.py claims; a row of a single round is less certain than others. Nearly 8 % off is
    tensor parallelism on four GPUs, whose collectives wait less than those of two, see WAITING. Two H200s differ by 1
    to 2 %, and the same row in two suites by 3 %. All recipes on one GPU are one layout, and plan.py knows nothing of
    what makes one of them 5 % slower than another.
    """
    models, errors = collections.defaultdict(list), {}
    for suite, row, gpu in stored(RECIPES):
        axis, by, again = RECIPES[row["file"]]
        gpus = 1 if row["file"].startswith("01") else int(gpu.split()[0])  # one GPU runs a recipe of 01 in every suite
        cfg = config(row["flags"], gpu, **{axis: gpus}, recompute=again)
        (tokens, spread, _), predicted = measured(row), PLAN.predict(cfg, by).tokens
        errors[suite, row["file"], row["flags"]] = abs(predicted / tokens - 1)
        layout = cfg.batch, cfg.dp, cfg.cp, cfg.tp, cfg.pp, cfg.microbatches, again
        models[cfg.preset, cfg.layers, cfg.vocab, cfg.seq].append((layout, tokens, spread, predicted))
    assert max(errors.values()) < 0.08 and sum(error < 0.05 for error in errors.values()) > 0.9 * len(errors), errors
    assert {file for _, file, _ in errors} == set(RECIPES) and len(errors) > 20
    assert sum(pairs_in_order(rows, 0.05) for rows in models.values()) > 10


def test_sharded_weights():
    """zero2, zero3 and hsdp.py: memory within 2 % of every stored row and 3 % of memory.py, speed within 7 %."""
    found, files = [], {f"03_zero/{name}.py": zero for name, zero in (("zero2", 2), ("zero3", 3), ("hsdp", 3))}
    for _, row, gpu in stored(files):
        gpus, zero = int(gpu.split()[0]), files[row["file"]]
        if gpus > 1:
            shard = int(*re.findall(r"--shard (\d+)", row["flags"]) or [gpus if zero == 3 else 1])
            plan = PLAN.predict(config(row["flags"], gpu, dp=gpus, zero=zero, shard=shard), TRAIN)
            tokens, _, peak = measured(row)
            found.append((row["file"], plan.tokens / tokens, plan.memory / peak))
    assert all(0.93 < speed < 1.07 and 0.98 < memory < 1.02 for _, speed, memory in found), found
    assert {file for file, *_ in found} == set(files) and len(found) > 6
    for preset, dp, batch, m in (("smollm_1_7b", 8, 16, 2), ("llama3_8b", 2, 2, 1), ("llama3_1b", 64, 256, 4)):
        for again in PLAN.RECOMPUTE:
            same = dict(PLAN.PRESETS[preset], seq=4096, dp=dp, batch=batch, microbatches=m, recompute=again)
            theirs = sum(MEMORY.peak(MEMORY.Config(**same, dtype="bfloat16", compile=True, zero=3))[1].values())
            ours = PLAN.memory_of_shards(PLAN.Config(**same, cp=1, tp=1, pp=1, shard=dp))
            copies = 4 * same["vocab"] * same["dim"]  # of the head's reduction: memory.py leaves them out
            assert 0.99 * theirs <= ours <= 1.03 * theirs + copies * (again != "none"), (preset, again, ours, theirs)


def test_memory_is_what_memory_py_says():
    """Alone and together: within 2 %, and up to two units more, a reduction's copies that memory.py leaves out."""
    sizes = [
        (1, 1, 16, 1),
        (1, 1, 1, 1),
        (8, 1, 1, 1),
        (1, 2, 1, 1),
        (1, 1, 4, 1),
        (1, 1, 1, 4),
        (2, 2, 2, 2),
        (1, 1, 4, 2),
    ]
    models = [
        ("smollm_1_7b", 2048, (2, "none")),
        ("llama3_8b", 8192, (1, "selective")),
        ("llama3_1b", 4096, (2, "full")),
    ]
    for preset, seq, other in models:
        for (dp, cp, tp, pp), m, (zero, again) in itertools.product(sizes, (1, 2, 8), ((1, "none"), other)):
            same = dict(PLAN.PRESETS[preset], seq=seq, batch=dp * m, microbatches=m, dp=dp, cp=cp, tp=tp, pp=pp)
            same |= dict(zero=zero, recompute=again)
            cfg = PLAN.Config(**same, chunks=1)
            for stage in {0, pp - 1}:
                own = dict(dtype="bfloat16", compile=True, sequence_parallel=True, stage=stage)
                theirs = sum(MEMORY.peak(MEMORY.Config(**same, **own))[1].values())
                units = PLAN.stages(cfg, TRAIN)[stage]
                ours = PLAN.memory(cfg, TRAIN, stage, units)
                assert 0.98 * theirs <= ours <= 1.02 * theirs + 4 * max(units), (preset, dp, cp, tp, pp, m, cfg, stage)


def test_micro_batches_in_flight():
    """As many as the schedule has, beside the one of the first backward."""
    for p, chunks, m in ((1, 1, 3), (4, 1, 2), (4, 1, 8), (2, 2, 4), (4, 2, 4), (4, 3, 8), (8, 4, 16)):
        cfg = PLAN.Config(pp=p, chunks=chunks)
        for rank in range(p):
            steps = (1 if op == "F" else -1 for op, *_ in PLAN.schedule(rank, p, chunks, m))
            assert max(itertools.accumulate(steps)) - 1 == min(PLAN.ahead(cfg, rank), m * chunks - 1)


@pytest.mark.parametrize("zero, pp", [(0, 1), (1, 2)])
def test_tied_embeddings(zero, pp):
    """A single stage has one table less: 2 bytes of weights, 4 of sums, 12 of masters and moments per element."""
    sizes = dict(PLAN.PRESETS["llama3_1b"], seq=4096, dp=1, cp=1, tp=1, pp=pp, chunks=1, batch=4, microbatches=4)
    by = [PLAN.replace(PLAN.nanotron(zero), tied=tied) for tied in (True, False)]
    cfg = PLAN.Config(**sizes)
    tied, not_tied = (PLAN.memory(cfg, each, pp - 1, PLAN.stages(cfg, each)[-1]) / 2**30 for each in by)
    assert not_tied - tied == pytest.approx((pp == 1) * 18 * 128256 * 2048 / 2**30)


def test_the_fullest_stage():
    """Of all stages: later ones have fewer micro-batches in flight, but may have more layers."""
    middle = 0
    for preset, m in itertools.product(PLAN.PRESETS, (1, 2, 8, 64)):
        sizes = dict(PLAN.PRESETS[preset], seq=4096, dp=1, cp=1, tp=1, chunks=1, batch=m, microbatches=m)
        for pp in range(1, min(sizes.get("layers", 8), 48) + 1):
            cfg = PLAN.Config(**sizes, pp=pp, gpus=pp)
            every = [PLAN.memory(cfg, TRAIN, stage, units) for stage, units in enumerate(PLAN.stages(cfg, TRAIN))]
            assert PLAN.most_memory(cfg, TRAIN) == max(every) / 2**30, (cfg, every)
            middle += every.index(max(every)) not in (0, 1, pp - 1)
    assert middle > 10, "the fullest is always one of the first two or the last"


def test_layouts_of_train_py():
    """All stored suites of train.py: memory within 5 %, and layouts in order if half their spread, or 2 %, tells them.

    With none stored, the rows of one technique above are all there is.
    """
    suites = collections.defaultdict(list)
    for suite, row, gpu in stored(["08_4d/train.py"]):
        cfg, (tokens, spread, peak) = config(row["flags"], gpu), measured(row)
        assert abs(first_rank(cfg) / peak - 1) < 0.05, (suite, PLAN.shape(cfg), peak, first_rank(cfg))
        suites[suite].append((cfg, tokens, spread, PLAN.predict(cfg, TRAIN).tokens))
    for rows in suites.values():
        pairs_in_order(rows, 0.02)


def test_recomputation():
    """Full: backward takes as much longer as forward, but for down_proj and its reduce-scatter; selective: a little."""
    sizes = dict(PLAN.PRESETS["llama3_8b"], seq=8192, batch=8, microbatches=8, gpus=8, dp=1, cp=2, tp=2, pp=2, chunks=1)
    none, some, full = (PLAN.Config(**sizes, recompute=again) for again in PLAN.RECOMPUTE)
    times = PLAN.block_times(none, TRAIN)
    forward = sum(pair[0] for pair in times.values())
    again = forward - 2 * 4096 * 4096 * 14336 / 2 / 720e12 - PLAN.gathered(none)
    assert PLAN.block_times(full, TRAIN) == times | {"recompute": (0, pytest.approx(again))}
    assert 0.01 * forward < PLAN.block_times(some, TRAIN)["recompute"][1] < 0.2 * forward
    assert PLAN.predict(full, TRAIN).step.recompute == pytest.approx(8 * 32 / 2 * again)  # of 8 micro-batches, 2 stages


def test_zero_2():
    """Gradients are reduced beside every backward, in chunks beside every pp-th; summed ones are sharded."""
    sizes = dict(PLAN.PRESETS["llama3_8b"], seq=8192, batch=256, microbatches=16, gpus=64, dp=16, cp=1, tp=1)
    one, two = (PLAN.Config(**sizes, pp=1, chunks=1, zero=zero) for zero in (1, 2))
    units = PLAN.stages(one, TRAIN)
    backward = sum(pair[1] for pair in PLAN.times_of(one, TRAIN, units)[0].values())
    reduce = sum(PLAN.ring(one, 2 * unit, 16, 1, True) for unit in units[0])
    slower = PLAN.predict(two, TRAIN).step.dp - PLAN.predict(one, TRAIN).step.dp
    assert slower == pytest.approx(15 * PLAN.beside(backward, reduce), rel=0.02)
    for chunks, part in ((1, 0), (4, 1 / 2)):
        one, two = (PLAN.Config(**sizes, pp=4, chunks=chunks, zero=zero) for zero in (1, 2))
        units = PLAN.stages(one, TRAIN)[0]
        less = PLAN.memory(one, TRAIN, 0, units) - PLAN.memory(two, TRAIN, 0, units)
        assert less == pytest.approx(4 * sum(units) * (1 - part - 1 / 16), rel=0.2), chunks
        rare = PLAN.predict(two, TRAIN).step.dp
    assert rare < slower  # four times instead of sixteen


def simulated(seconds, m, transfer=0, chunks=1, hidden=True):
    """When a pipeline ends whose ranks take so long for forward, backward, ZeRO's gather and its reduction."""
    return PLAN.simulate(
        seconds, transfer, PLAN.Config(pp=len(seconds), chunks=chunks), m, PLAN.replace(TRAIN, hidden=hidden)
    )


@pytest.mark.parametrize("name, chunks", [("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_simulated_as_the_schedules_are(name, chunks):
    """The same end as schedules.py, with stages of their own times; and a long pipeline repeats what it does."""
    recipe = load(f"06_pipeline/{name}.py")
    for p, m in ((1, 3), (2, 6), (4, 4), (4, 8), (8, 16)):
        ranks = [(1 + 0.1 * rank, 2 + 0.3 * (rank == p - 1), 0, 0) for rank in range(p)]
        slots = schedules.simulate(
            schedules.pipeline(recipe, p, m, chunks),
            lambda op, stage, r=ranks, p=p: r[stage % p]["FB".index(op)] / chunks if op in "FB" else 0,
            0.2 * (p > 1),
        )
        assert simulated(ranks, m, 0.2, chunks) == pytest.approx(schedules.makespan(slots))


@pytest.mark.parametrize("p, chunks", [(2, 1), (2, 2), (4, 2), (8, 1), (4, 4)])
def test_a_long_step(p, chunks):
    """It is not simulated whole, but as if it were: here with a slow first rank."""
    ranks = [(0.0322 + 0.0025 * (rank == 0), 0.0505 + 0.003 * (rank == 0), 0.01, 0.02) for rank in range(p)]
    cfg = PLAN.Config(pp=p, chunks=chunks, microbatches=32 * p)
    whole = PLAN.simulate(ranks, 0.001, cfg, 32 * p, TRAIN)
    assert PLAN.end(ranks, 0.001, cfg, TRAIN) == pytest.approx(whole, rel=2e-3)


def test_what_zero_adds():
    """Hidden communication costs half of itself, beside the first forward and the last backward; the rest shows."""
    assert simulated([(10, 20, 4, 8)], 3) == 90 + 2 + 4
    assert simulated([(10, 20, 14, 50)], 1) == 30 + 5 + 30
    assert simulated([(10, 20, 0, 0), (10, 20, 8, 0)], 1) == 60  # gathered while the stage waits
    assert simulated([(10, 20, 0, 8), (10, 20, 0, 0)], 1) == 64  # beside the last backward of all
    # the gradient comes half of 12 later; the first rank waits for no reduction but its own
    assert simulated([(10, 20, 0, 0), (10, 20, 0, 12)], 1) == 66
    assert simulated([(10, 20, 4, 8)], 3, hidden=False) == 90 + 4 + 8
    # halves: of the first chunk's gather, of 1 s that the second chunk's gather goes on, and of two reductions
    assert simulated([(10, 20, 8, 16)], 4, chunks=2) == 120 + 2 + 0.5 + 8


@pytest.mark.parametrize(
    "slower, layout",
    [
        (["pp"], dict(dp=1, cp=4, tp=2, pp=2)),  # the second stage is on another node
        (["cp", "dp"], dict(dp=1, cp=4, tp=4, pp=1)),  # the rings of keys, and of ZeRO, go through both nodes
        (["dp"], dict(dp=2, cp=1, tp=8, pp=1)),
        (["tp"], dict(dp=1, cp=1, tp=16, pp=1)),
    ],
)
def test_two_nodes(slower, layout):
    """What goes from node to node takes longer, what stays on a node does not."""
    sizes = dict(PLAN.PRESETS["llama3_8b"], seq=8192, batch=8, microbatches=4, gpus=16, chunks=1, **layout)
    far, near = (PLAN.predict(PLAN.Config(**sizes, gpus_per_node=n), TRAIN).step for n in (8, 16))
    found = [axis for axis in ("tp", "cp", "dp", "pp") if getattr(far, axis) > 1.001 * getattr(near, axis) + 1e-9]
    assert sorted(found) == sorted(slower), (far, near)


def test_zero_between_nodes(monkeypatch):
    """With tp 8, the two ranks that share weights are on two nodes: half of 2 bytes per element goes through a card."""
    cfg = PLAN.Config(**PLAN.PRESETS["llama3_8b"], seq=8192, batch=2, microbatches=1, dp=2, cp=1, tp=8, pp=1, chunks=1)
    seen, units = [], PLAN.stages(cfg, TRAIN)[0]
    monkeypatch.setattr(PLAN, "simulate", lambda seconds, *_: seen.append(seconds) or 1.0)
    PLAN.step_time(cfg, TRAIN)
    ((_, _, gather, reduce),) = seen[0]
    assert gather == reduce == pytest.approx(len(units) * 15e-6 + sum(units) / 40e9)


def test_groups_of_hsdp_on_two_nodes():
    """Each is on one node: their all-reduce alone leaves it, and costs more than on one large node."""
    sizes = dict(PLAN.PRESETS["llama3_1b"], seq=4096, batch=16, microbatches=1, gpus=16, dp=16, shard=8, chunks=1)
    far, near = (PLAN.Config(**sizes, cp=1, tp=1, pp=1, gpus_per_node=n) for n in (8, 16))
    assert PLAN.predict(far, TRAIN).step.dp > 1.05 * PLAN.predict(near, TRAIN).step.dp


def test_more_ranks_than_key_heads():
    """Each of 32 ranks of tp has one of 8 key heads, which is 128 wide, and 1/32 of all other matrices."""
    cfg = PLAN.Config(**PLAN.PRESETS["llama3_8b"], tp=32)
    assert PLAN.kv_width(cfg) == 128
    assert PLAN.matrices(cfg) == (2 * 4096 * 4096 + 3 * 4096 * 14336) // 32 + 2 * 4096 * 128


def test_finds_the_best(monkeypatch, capsys):
    """The fastest is first, all fit, and the printed line is one that train.py accepts, with as many processes."""
    model = dict(PLAN.PRESETS["llama3_8b"], preset="llama3_8b")
    rows = PLAN.plans(PLAN.Config(**model, gpus=16, batch=64, seq=8192, ours=True), TRAIN)[0]
    speeds, best = [row.tokens for row in rows], rows[0].cfg
    assert speeds == sorted(speeds, reverse=True) and max(row.memory for row in rows) <= 74
    for c in (row.cfg for row in rows):
        assert c.dp * c.cp * c.tp * c.pp == 16 and 64 % (c.dp * c.microbatches) == 0
    flags = "--preset llama3_8b --gpus 16 --batch 64 --seq 8192 --top 900 --ours"
    monkeypatch.setattr(sys, "argv", ["plan.py", *flags.split()])
    PLAN.main()
    head, *lines = capsys.readouterr().out.splitlines()
    launcher, own = next(line for line in lines if "torchrun" in line).split(" 08_4d/train.py ")
    assert f"that fit: {len(rows)}." in head and f"Best: {PLAN.shape(best)}." in "\n".join(lines)
    assert (
        launcher.startswith("  torchrun --nnodes 2 ")
        and " --rdzv_id " in launcher
        and launcher.endswith("--nproc_per_node 8")
    )
    train = loaded("08_4d/train.py")
    cfg = typed(train, f"train.py {own} --device cpu")
    train.check(cfg, 16)
    assert all(getattr(cfg, size) == getattr(best, size) for size in (*PLAN.AXES, "chunks", "microbatches"))


LAYOUT = "dp", "cp", "tp", "pp", "chunks", "microbatches"
QUESTIONS = [  # what only some layouts can do
    dict(gpus=1, batch=6),
    dict(gpus=8, batch=8),  # a layer per stage
    dict(gpus=16, gpus_per_node=16, batch=16, ffn=72, seq=24),  # fewer layers than GPUs
    dict(gpus=8, batch=4, seq=20, ffn=100),  # tp divides the tokens of several sequences
    dict(gpus=8, batch=7, seq=8, layers=3),
    dict(gpus=6, batch=12, dim=48, heads=6, kv_heads=2, vocab=257, seq=36),
    dict(gpus=12, gpus_per_node=12, batch=6, dim=96, heads=12, kv_heads=3, layers=12),
    dict(gpus=8, batch=8, experts=12, top_k=3),
    dict(gpus=8, batch=6, experts=2, ffn=72, seq=12, layers=5),  # half an expert is no multiple of 8
    dict(gpus=4, batch=2, experts=6, heads=2, kv_heads=1, seq=8, layers=1),
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
        assert all(getattr(cfg, name) == getattr(wanted, name) for name in ("dim", "ffn", "vocab", "seq", "batch"))
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
    """Its sizes, and what else Llama's and SmolLM's presets have, also of models for which train.py has no preset."""
    for preset, sizes in PLAN.PRESETS.items():
        cfg = typed(*recipe_of(PLAN.Config(**sizes, preset=preset, dp=1, cp=1, tp=1, pp=1, chunks=1, microbatches=1)))
        assert all(getattr(cfg, name) == size for name, size in sizes.items()), preset
        rope = {"llama3_1b": 32.0, "llama3_8b": 8.0, "llama3_70b": 8.0, "llama3_405b": 8.0}.get(preset, 1.0)
        rates = (3e-3, 10) if preset == "tiny" else ({"llama3_70b": 1.5e-4, "llama3_405b": 8e-5}.get(preset, 3e-4), 100)
        assert (cfg.rope_factor, cfg.lr, cfg.warmup) == (rope, *rates), preset
    chosen = dict(experts=16, top_k=5, dp=1, cp=1, tp=1, pp=1, chunks=1, microbatches=1)
    cfg = typed(*recipe_of(PLAN.Config(**chosen)))
    assert (cfg.experts, cfg.top_k) == (16, 5)


def test_best_only_finds_the_same():
    """Skipping what cannot be faster changes nothing: the bound is below the step of every layout."""
    some = ("llama3_8b", 16, 0, TRAIN), ("llama3_70b", 64, 8, TRAIN), ("llama3_1b", 32, 2, PLAN.nanotron(1))
    for preset, gpus, tp, by in some:
        cfg = PLAN.Config(**PLAN.PRESETS[preset], gpus=gpus, tp=tp, batch=32, seq=8192, shard=int(by.eager))
        rows = PLAN.plans(cfg, by)[0]
        assert len(rows) > 50 and all(PLAN.least(row.cfg, by) <= row.step.total() for row in rows)
        assert [rows[:n] for n in (1, 12)] == [PLAN.plans(cfg, by, n)[0][:n] for n in (1, 12)]


def test_the_simplest_of_those_that_may_be_the_fastest():
    """Of a tiny model many are: the printed one has ranks of dp alone."""
    rows = PLAN.plans(PLAN.Config(), TRAIN)[0]
    near = PLAN.ties(rows)
    assert near == [row for row in rows if row.tokens > rows[0].tokens / 1.05] and 1 < len(near) < len(rows)
    assert rows[0].cfg.pp > 1 and PLAN.simplest(rows) in near
    sizes = "dp", "shard", "cp", "tp", "pp", "chunks"
    assert [getattr(PLAN.simplest(rows).cfg, size) for size in sizes] == [8, 1, 1, 1, 1, 1]


def test_what_fits_with_one_micro_batch_alone():
    """It needs no fp32 sums of gradients; with several ZeRO-2 has no whole ones, and ZeRO-3 no whole weights."""
    sizes = dict(PLAN.PRESETS["llama3_70b"], gpus=32, batch=8, seq=2048, dp=4, tp=8)
    (row,) = PLAN.plans(PLAN.Config(**sizes, ours=True), TRAIN)[0]
    assert row.cfg.microbatches == 1
    assert {row.cfg.zero for row in PLAN.plans(PLAN.Config(**sizes), TRAIN)[0] if row.cfg.microbatches > 1} == {2, 3}


def test_least_recomputation():
    """A layout that is too large gets the least recomputation that makes it fit, and ZeRO-2 if that needs less.

    --ours gives neither.
    """
    cfg = PLAN.Config(**PLAN.PRESETS["llama3_8b"], gpus=64, batch=512, seq=8192, dp=64, cp=1, tp=1, pp=1, chunks=1)
    one = PLAN.replace(cfg, shard=1, microbatches=8)
    fits = {gib: PLAN.fitting(PLAN.replace(one, memory=gib), TRAIN) for gib in (100, 74, 60, 45, 25)}
    found = {gib: [(c.zero, c.recompute) for c in some] for gib, some in fits.items()}
    other, both = [(1, "full"), (2, "none")], [(2, "selective")]
    assert found == {100: [(1, "none")], 74: [(1, "selective"), (2, "none")], 60: other, 45: both, 25: [(2, "full")]}
    assert PLAN.fitting(PLAN.replace(one, ours=True, memory=25), TRAIN) == []
    rows = PLAN.plans(PLAN.replace(cfg, ours=True), TRAIN)[0]
    assert rows and all(row.cfg.recompute == "none" for row in rows)


def test_flags_of_others():
    """Their sizes multiply to the GPUs and the batch."""
    some = PLAN.Config(gpus=16, batch=64, layers=16), PLAN.Config(gpus=8, zero=3), PLAN.Config(recompute="full")
    for cfg in (row.cfg for wanted in some for row in PLAN.plans(wanted, TRAIN)[0]):
        megatron, titan, *nano = PLAN.elsewhere(cfg)
        assert titan.startswith("torchtitan: "), "its stages are of equal size"
        sizes = {name: int(size) for name, size in re.findall(r"--(\S+) (\d+)", f"{megatron} {titan}")}
        layers = [len(stage) for stage in PLAN.split_layers(cfg, cfg.pp * cfg.chunks)]
        assert [int(n) for n in re.findall(r"t\*(\d+)", megatron)] == layers * (cfg.pp > 1)
        axes = "tensor-model", "context", "pipeline-model"
        assert [sizes[f"{axis}-parallel-size"] for axis in axes] == [cfg.tp, cfg.cp, cfg.pp]
        assert math.prod(size for name, size in sizes.items() if name.endswith("_degree")) == cfg.gpus
        local = sizes["training.local_batch_size"] // (cfg.microbatches if cfg.pp > 1 else 1)
        assert local == sizes["micro-batch-size"] == cfg.batch // cfg.dp // cfg.microbatches
        assert sizes["training.global_batch_size"] == sizes["global-batch-size"] == cfg.batch
        for line in nano:
            given = json.loads(line.removeprefix("nanotron: "))
            assert [given["parallelism"][axis] for axis in ("dp", "tp", "pp")] == [cfg.dp, cfg.tp, cfg.pp]
            assert given["tokens"]["batch_accumulation_per_replica"] == cfg.microbatches and cfg.cp == 1


def test_machines():
    """An A100 is slower than an H100, EFA's hops are longer, all-to-alls and messages between pods 7 times slower.

    What does not fit on an H100 may fit on an H200.
    """
    same = dict(PLAN.PRESETS["llama3_8b"], seq=8192, cp=1, tp=1, pp=1, chunks=1, batch=64)
    cfg = PLAN.Config(**same, gpus=64, dp=64, microbatches=1)
    speeds = {name: PLAN.predict(PLAN.replace(cfg, machine=name), TRAIN).tokens for name in PLAN.MACHINES}
    assert speeds["A100"] < 0.4 * speeds["H100"] and speeds["H100-EFA"] < speeds["H100"] <= speeds["H200"]
    assert speeds["H100"] == speeds["H100-pods"]
    cfg = PLAN.Config(**PLAN.PRESETS["llama3_8b"], gpus=8, batch=64, seq=8192, machine="H200")
    assert 74 < max(row.memory for row in PLAN.plans(cfg, TRAIN)[0]) <= 132
    pods, gib = PLAN.Config(machine="H100-pods"), 2**30
    assert PLAN.ring(pods, gib, 6144, 1, True) == pytest.approx(15e-6 + gib * (6136 / 6144 + 6 / 2) / 40e9)
    assert PLAN.ring(pods, gib, 6144, 1) == PLAN.ring(PLAN.Config(), gib, 6144, 1)
    assert PLAN.message(pods, gib, 2, 3072) == pytest.approx(15e-6 + 7 * gib / 40e9)
    assert PLAN.message(pods, gib, 2, 1536) == pytest.approx(15e-6 + gib / 40e9)


def test_another_card(monkeypatch, capsys):
    """A tenth of the FLOPs: compute takes ten times as long, for the same share of the peak, beside the same memory."""
    found = []
    for flags in ("", "--tflops 98.95"):
        words = f"plan.py --preset smollm_1_7b --gpus 1 --batch 2 --seq 4096 --microbatches 2 {flags}"
        monkeypatch.setattr(sys, "argv", words.split())
        PLAN.main()
        _, gib, times, speed = capsys.readouterr().out.splitlines()[2].replace(",", "").split("|")
        found.append((float(gib), float(times.split()[1]), float(speed.split()[1].rstrip("%"))))
    (gib, compute, mfu), (same, slower, other_mfu) = found
    assert gib == same and slower == pytest.approx(10 * compute, rel=0.01) and mfu < other_mfu < 1.25 * mfu


def test_what_would_fit(monkeypatch):
    """Where nothing does: recomputation, more GPUs, and low_memory.py, as large as memory.py says."""
    one = "--preset llama3_8b --gpus 1 --seq 8192 --batch 1"
    for flags, words in (
        (one, "with 10_mixed_precision/low_memory.py (72.2 GiB) or with 2 GPUs"),
        (f"{one} --memory 72", "with 2 GPUs"),
        ("--preset llama3_8b --seq 8192 --batch 8 --memory 20 --recompute none", "with --recompute any"),
        ("--preset llama3_8b --seq 8192 --batch 8 --memory 20 --ours", "without --ours"),
        ("--preset llama3_70b --gpus 8 --batch 64 --seq 8192 --ours", "with 16 GPUs without --ours"),
        ("--preset mixtral_8x7b --gpus 6 --batch 24 --seq 4096", "with 16 GPUs"),  # whole nodes
        ("--memory 0.01", "with nothing that is planned here"),
    ):
        monkeypatch.setattr(sys, "argv", ["plan.py", *flags.split()])
        with pytest.raises(SystemExit) as stop:
            PLAN.main()
        assert stop.value.code.endswith(f". It would fit {words}")
    for preset, seq in (("llama3_8b", 8192), ("llama3_8b", 1024), ("smollm_1_7b", 4096)):
        same = dict(PLAN.PRESETS[preset], seq=seq, batch=1, recompute="selective")
        theirs = MEMORY.peak(MEMORY.Config(**same, dtype="bfloat16", compile=True, precision="stochastic"))[1]
        assert PLAN.low_memory(PLAN.Config(**same)) * 2**30 == pytest.approx(sum(theirs.values()), rel=0.01)


def test_taken_from_moe_py():
    """Definitions and presets are those of moe.py and train.py: else it would predict another program."""
    ours, theirs = (FAMILY[f"08_4d/{name}.py"].definitions for name in ("plan", "moe"))
    assert all(ours[name] == theirs[name] for name in ("split_layers", "schedule", "flops_per_token"))
    for name, sizes in (load("08_4d/train.py").PRESETS | load("08_4d/moe.py").PRESETS).items():
        assert PLAN.PRESETS[name] == {key: size for key, size in sizes.items() if key in PLAN.PRESETS["olmoe_1b_7b"]}


def test_zbv(monkeypatch):
    """The order of zbv.py; both tables on rank 0; for equal F, B and W each rank idles (p-1)·B/2; as measured."""
    recipe = load("06_pipeline/zbv.py")
    for ranks, m in ((2, 1), (2, 3), (3, 5), (4, 16)):
        for rank in range(ranks):
            assert PLAN.schedule_in_a_v(rank, ranks, m) == recipe.schedule(rank, ranks, m)
    row = next(row for row in STORED["pipeline"]["rows"] if row["file"] == "06_pipeline/zbv.py")
    cfg = config(row["flags"], STORED["pipeline"]["gpu"], pp=4, chunks=2, zbv=True)
    found, (tokens, _, peak) = PLAN.predict(cfg, PLAN.FP32_WEIGHTS), measured(row)
    assert abs(found.tokens / tokens - 1) < 0.04 and abs(found.memory / peak - 1) < 0.03
    head, layers = 6 * 2048 * 49152, PLAN.flops_per_token(cfg) - 6 * 2048 * 49152
    assert PLAN.shares(cfg)[0][1] == pytest.approx((2 / 24 * layers + head) / (5 / 24 * layers + head))
    assert PLAN.stages(cfg, TRAIN)[0][-1] == 49152 * 2048 + 2048  # the head
    monkeypatch.setattr(PLAN, "shares", lambda cfg: [[0.5, 0.5]] * cfg.pp)
    monkeypatch.setattr(PLAN, "share_of_weights", lambda *_: 0.5)
    for ranks, m in ((2, 3), (2, 8), (4, 7), (4, 16)):
        cfg = PLAN.Config(pp=ranks, chunks=2, zbv=True)
        assert PLAN.simulate([(2, 4, 0, 0)] * ranks, 0, cfg, m, TRAIN) == 6 * m + (ranks - 1)
        # chunk 1 is reduced in four seconds, from its last W on, which the last rank's other Ws follow; then chunk 0
        assert PLAN.simulate([(2, 4, 0, 8)] * ranks, 0, cfg, m, TRAIN) == 6 * m + (ranks - 1) - ranks + 8
        assert PLAN.simulate([(2, 4, 0, 0)] * ranks, 1e-3, cfg, m, TRAIN) < 6 * m + (ranks - 1) + 0.1


def test_plans_of_zbv():
    """Only pipelines in a V, which no recipe of this folder has, nor Megatron-LM."""
    wanted = PLAN.Config(**PLAN.PRESETS["llama3_8b"], gpus=16, batch=32, seq=8192, zbv=True)
    rows, best = PLAN.plans(wanted, TRAIN)[0], PLAN.plans(wanted, TRAIN, keep=1)[0][0]
    tight = PLAN.plans(PLAN.replace(wanted, memory=18), TRAIN)[0]
    found = {(row.cfg.chunks, row.cfg.zero, row.cfg.recompute, PLAN.needs(row.cfg)) for row in rows + tight}
    assert found == {(2, 1, "none", "ZBV")} and 0 < len(tight) < len(rows) and best == rows[0]
    assert all(PLAN.least(row.cfg, TRAIN) <= row.step.total() for row in rows)
    assert min(row.cfg.pp for row in rows) == 2 and " in a V, " in PLAN.shape(rows[0].cfg)
    (line,) = PLAN.elsewhere(rows[0].cfg)
    assert line.startswith("torchtitan: ") and "pipeline_parallel_schedule ZBVZeroBubble" in line
    for preset, experts in (("llama3_8b", 0), ("mixtral_8x7b", 2 * 3 * 4096 * 14336)):
        cfg = PLAN.replace(rows[0].cfg, **PLAN.PRESETS[preset])
        backward = sum(both[1] for both in PLAN.block_times(cfg, TRAIN).values())
        matmuls = 2 * PLAN.tokens(cfg) * (PLAN.matrices(cfg) / 720e12 + experts / cfg.tp / 585e12)
        assert PLAN.share_of_weights(cfg, TRAIN) == pytest.approx(matmuls / backward)


def test_gathered_keys():
    """All keys and values once in forward; in backward once more, and their gradients in fp32. No ring, no overlap."""
    cfg = PLAN.Config(**PLAN.PRESETS["llama3_8b"], seq=2**15, batch=1, dp=1, cp=4, tp=2, pp=1, microbatches=1)
    elements = 2 * 2**15 * 512 * 3 / 4  # 2 of tp have 4 key heads each
    once, sums = (20e-6 + elements * size / 349e9 for size in (2, 4))
    assert PLAN.block_times(cfg, PLAN.replace(TRAIN, gathers_keys=True))["cp"] == pytest.approx((once, once + sums))
    assert PLAN.block_times(cfg, TRAIN)["cp"] != pytest.approx((once, once + sums))


def test_experts_as_measured():
    """expert_parallel.py on two and four GPUs: memory within 1 %, speed within 5 %.

    It has fp32 weights: at the loss as many bytes as bf16 weights with fp32 masters. Experts are about equally busy.
    """
    for suite, gpus in (("expert", 2), ("expert_more", 2), ("olmoe", 2), ("expert_four", 4)):
        row = next(row for row in STORED[suite]["rows"] if row["file"].endswith("expert_parallel.py"))
        found = PLAN.predict(config(row["flags"], STORED[suite]["gpu"], dp=gpus, ep=gpus), PLAN.FP32_WEIGHTS)
        tokens, _, peak = measured(row)
        assert abs(found.tokens / tokens - 1) < 0.05 and abs(found.memory / peak - 1) < 0.01, (suite, found)


def test_shared_out_experts():
    """2(Ψ + Ψe/ep)/(tp·pp) bytes of weights, the same state; four exchanges per layer, of (ep-1)/ep of all rows."""
    shape = dict(PLAN.PRESETS["mixtral_8x7b"], layers=2, vocab=2**20, seq=4096, batch=8, gpus=8, dp=8, chunks=1)
    shape |= dict(cp=1, tp=1, pp=1, microbatches=1, zero=1, recompute="none")
    whole, half, alone = (PLAN.predict(PLAN.Config(**shape, ep=ep), TRAIN) for ep in (1, 2, 8))
    experts = 2 * 8 * 3 * 4096 * 14336  # elements; of two layers
    assert (whole.memory - half.memory) * 2**30 == pytest.approx(2 * experts / 2)  # the loss, for a large vocabulary
    assert (whole.memory - alone.memory) * 2**30 == pytest.approx(2 * experts * 7 / 8)
    assert whole.step.ep == 0 and half.step.optimizer == alone.step.optimizer == whole.step.optimizer
    rows = 2 * 4096 * 2 * 4096  # bytes: of a token two rows, of 4096 elements each
    once = [PLAN.WAITING * (20e-6 + rows * (ep - 1) / ep / 349e9) for ep in (2, 8)]
    assert [half.step.ep, alone.step.ep] == pytest.approx([2 * 4 * seconds for seconds in once])
    moved = 4 * experts / 2 / 2.4e12  # twice 16 bits, of gradients that half.step has not
    assert whole.step.compute - half.step.compute == pytest.approx(moved)
    # weights are gathered and gradients exchanged by the ranks that have copies, both half beside compute
    all_ranks, half_of_them = (20e-6 + experts / copies * (n - 1) / n / 349e9 for n, copies in ((8, 1), (4, 2)))
    assert whole.step.dp - half.step.dp == pytest.approx(0.5 * 2 * 2 * (all_ranks - half_of_them))
    shape |= dict(batch=16, microbatches=2)  # whose gradients are summed in fp32
    sums = [PLAN.most_memory(PLAN.Config(**shape, ep=ep), TRAIN) * 2**30 for ep in (1, 8)]
    assert sums[0] - sums[1] == pytest.approx((2 + 4) * experts * 7 / 8)
    shape |= dict(gpus=16, dp=4, tp=4)  # an exchange of four ranks of ep is one between two nodes
    crossing = PLAN.block_times(PLAN.Config(**shape, ep=4), TRAIN)["ep"]
    assert crossing == pytest.approx([2 * (15e-6 + 2 * rows * 2 / 4 / 40e9)] * 2)  # two micro-batches of two sequences


def test_time_of_a_block_with_experts():
    """Attention and two norms as in one without an MLP, a router, and the experts; all of it is computed again."""
    shape = dict(PLAN.PRESETS["mixtral_8x7b"], seq=4096, batch=8, dp=8, cp=1, tp=1, pp=1, microbatches=1)
    none, full, sent = (
        PLAN.Config(**shape, ep=ep, recompute=again) for ep, again in ((1, "none"), (1, "full"), (2, "full"))
    )
    without, forward = (PLAN.block_times(c, TRAIN)["compute"][0] for c in (PLAN.replace(none, experts=0, ffn=0), none))
    assert forward == pytest.approx(without + 2 * 4096 * 4096 * 8 / 720e12 + PLAN.expert_times(none)[0][0])
    again = [PLAN.block_times(cfg, TRAIN)["recompute"][1] for cfg in (full, sent)]
    assert again == pytest.approx([forward, forward + 2 * PLAN.expert_times(sent)[1]])


def test_plans_of_experts():
    """Experts get ZeRO-1, with full recomputation or none, and no settings of nanotron, which has no experts."""
    wanted = PLAN.Config(**PLAN.PRESETS["mixtral_8x7b"], preset="mixtral_8x7b", gpus=16, batch=16, seq=4096)
    rows, _ = PLAN.plans(wanted, TRAIN)
    found = {(row.cfg.zero, row.cfg.shard, row.cfg.recompute) for row in rows}
    assert found == {(1, 1, "none"), (1, 1, "full")} and {row.cfg.ep for row in rows} == {1, 2, 4, 8}
    plain = next(row.cfg for row in rows if (row.cfg.pp, row.cfg.cp, row.cfg.chunks, row.cfg.ep) == (2, 1, 1, 8))
    megatron, titan = PLAN.elsewhere(plain)
    assert "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8" in megatron
    assert "--parallelism.expert_parallel_degree 8" in titan
    # NVIDIA's example for Megatron-Core, and what version 0.9 is said to reach with Mixtral: 468 TFLOP/s of H100s, by a
    # formula that counts all of attention
    rows, _ = PLAN.plans(PLAN.replace(wanted, gpus=64, batch=256), TRAIN, keep=12)
    theirs = next(row for row in PLAN.ties(rows) if (row.cfg.tp, row.cfg.pp, row.cfg.ep) == (1, 4, 8))
    whole = theirs.mfu * (1 + 6 * 32 * 4096 * 4096 / PLAN.flops_per_token(theirs.cfg))
    assert abs(whole * 989.5 / 468 - 1) < 0.1


def test_experts_are_cut_by_tp():
    """Each rank of tp has its part of every expert, but the inputs of all rows."""
    one, two = (
        PLAN.Config(**PLAN.PRESETS["mixtral_8x7b"], seq=4096, tp=tp, ep=2, dp=4, pp=1, cp=1, batch=4) for tp in (1, 2)
    )
    one, two = (PLAN.replace(cfg, microbatches=1, recompute="none") for cfg in (one, two))
    assert PLAN.expert_matrices(one) == 2 * PLAN.expert_matrices(two) == 4 * 3 * 4096 * 14336
    more = 2 * (2 * 4096 + 32) + 2 * 4096 + 4 * 8  # of a token: rows with their orders, what the router reads and says
    assert PLAN.kept(two) == PLAN.kept(one) / 2 + 4096 / 2 * more
    wide = 4096 / 2 * (2 * 4096 + 2 * (2 * 2 * 4096 + 2 * 14336)) + 2 * PLAN.expert_matrices(two) / 3
    assert PLAN.widest(two) == wide  # gradients of the output, of rows and of products; and of down_proj
    once, linear = PLAN.gathered(two), 2 * 4096 * PLAN.matrices(two) / 720e12
    added = PLAN.block_times(two, TRAIN)["tp"]
    assert added == pytest.approx((4 * once, 3 * once + PLAN.beside(2 * linear, 2 * once)))
    (one, _), (two, _) = PLAN.expert_times(one)[0], PLAN.expert_times(two)[0]
    assert two < one < 2 * two  # rows are copied on both


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--tp 3", "--tp 3: must divide --gpus 8"),
        ("--gpus 12", "--gpus 12: must be a multiple of --gpus_per_node 8"),
        ("--batch 0", "--batch 0: must be at least 1, and below 1e12"),
        ("--draw plan.png", "--draw plan.png: must end in .svg"),
        ("--measured none.csv", "--measured none.csv: cannot be read as .csv"),
        ("--measured /dev/zero", "--measured /dev/zero: cannot be read as .csv"),
        ("--shard 3", "--shard 3: must divide --gpus 8"),
        ("--draw none/x.svg", "--draw none/x.svg: there is no such folder"),
        ("--heads 7", "--heads 7: --dim 128 must be an even multiple of it"),
        (
            "--preset llama3_405b --batch 8",
            "--gpus 8: layouts of these sizes: 43, fit in 74 GiB: 0, make the batch: 0, choices of micro-batches that "
            "fit: 0. It would fit with 128 GPUs",
        ),
        ("--zbv --pp 1", "--zbv: --gpus and --pp must be above 1, and --zero 1"),
        ("--zbv --recompute full", "--zbv: --recompute must be none"),
        ("--zbv --chunks 4", "--chunks 4: --zbv has 2"),
        ("--ours --recompute full", "--ours: must go without --zbv and --recompute"),
        ("--experts 4 --top_k 5", "--top_k 5: must be at most --experts 4"),
        ("--top_k 2", "--top_k 2: --experts must be above 0"),
        ("--ep 2", "--ep 2: --experts must be above 0"),
        ("--experts 8 --ep 8 --dp 2 --cp 1", "--ep 8: must divide --dp times --cp, 2"),
        ("--experts 6 --ep 4", "--ep 4: must divide --experts 6"),
        ("--experts 9 --ep 3", "--ep 3: must divide --gpus 8"),
        ("--experts 8 --zero 2", "--experts 8: --zero must be 1, and --shard 0"),
        ("--experts 8 --recompute selective", "--experts 8: --recompute must be none or full"),
        ("--zero 1 --shard 2", "--shard 2: --zero must be 3"),
        ("--shard 2 --pp 2", "--zero 3: must go without --cp and --pp, and so must --shard"),
        ("--tp 8 --dp 8", "--gpus 8: must be divisible by 64, the product of --dp, --cp, --tp and --pp"),
        ("--microbatches 3", "--microbatches 3: must divide --batch 16"),
        ("--playbook --scale", "--scale: not beside --playbook, which has layouts of its own"),
        ("--scale --gpus 8", "--gpus: not beside --scale, which has layouts of its own"),
        ("--experts 4 --ffn 100", "--ffn 100, --dim 128: must be multiples of 8"),
    ],
)
def test_bad_input(monkeypatch, flags, problem):
    monkeypatch.setattr(sys, "argv", ["plan.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        PLAN.main()
    assert stop.value.code == problem


def test_playbook():
    """Of the book's own choices half are predicted within 6 %, speed and memory, and nine of ten within 15 %."""
    rows = PLAN.cells()
    errors = sorted(abs(book.tokens / tokens - 1) for _, _, book, _, _, _, tokens in rows)
    memory = sorted(abs(book.memory * PLAN.GIB / 1e9 / gb - 1) for _, _, book, _, _, gb, _ in rows)
    assert len(rows) == 26 and all(each[13] < 0.06 and each[23] < 0.15 for each in (errors, memory))
    assert all(ours.tokens >= book.tokens or book.memory > 74 for ours, _, book, *_ in rows)


RUNS = """model,nodes,dp,tp,pp,micro_batches,micro_batch_size,zero,tokens_per_s_per_gpu,gpu_memory_GB
1.34B,1,4,2,1,64,1,0,{},{}
3.57B,1,8,1,1,16,2,1,{},{}
1.34B,1,2,1,4,32,4,1,{},{}
"""


def compared(tmp_path, capsys, *numbers):
    """The lines of --measured for RUNS with such speeds and sizes, and what it says of them."""
    file = tmp_path / "runs.csv"
    file.write_text(RUNS.format(*numbers))
    PLAN.compare(str(file), "")
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(",", 2)[0] for line in lines[:4]] == file.read_text().splitlines(), "other lines, or order"
    return [line.split(",")[-2:] for line in lines[1:4]], "\n".join(lines[4:])


def test_measured_runs(tmp_path, capsys):
    """Runs as fast and as large as predicted are perfect; of two that are the other way round the choice is wrong."""
    found, _ = compared(tmp_path, capsys, *6 * [1])
    speeds, sizes = ([float(row[i]) for row in found] for i in (0, 1))
    cfg = PLAN.Config(**PLAN.BOOK["1.34B"], vocab=131072, seq=4096, batch=256, gpus=8, chunks=1)
    plan = PLAN.predict(PLAN.replace(cfg, dp=4, cp=1, tp=2, pp=1, microbatches=64), PLAN.nanotron(0, "1.34B"))
    assert speeds[0] == pytest.approx(plan.tokens, abs=0.1) and sizes[0] == pytest.approx(plan.memory * 1.0737, 1e-3)
    a, b, c = zip(speeds, sizes)
    _, said = compared(tmp_path, capsys, *a, *b, *c)
    assert "100.0% of 1 pairs within a cell are in the right order" in said and "memory: 100% of runs" in said
    assert "100% are predicted within 20 %; the median error is 0.0%" in said and "by 0% at most" in said
    _, said = compared(tmp_path, capsys, *c, *b, *a)
    lost = 1 - min(a[0], c[0]) / max(a[0], c[0])
    assert ": 0.0% of 1 pairs within a cell" in said and f"by {lost:.0%} at most" in said and lost > 0.05


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("1.34B,1,4,2", "2B,1,4,2", "line 2: model 2B: must be one of "),
        ("1.34B,1,4,2", "1.34B,1,,2", "line 2: dp : must be a whole number > 0"),
        ("1.34B,1,4,2", "1.34B,2,4,2", "line 2: dp·tp·pp must be 8 per node"),
        ("64,1,0,1,1", "64,1,3,1,1", "line 2: dp·tp·pp must be 8 per node, and zero 0 or 1"),
        ("zero,", "", "must have runs, and a column zero"),
    ],
)
def test_runs_that_cannot_be(tmp_path, old, new, problem):
    file = tmp_path / "runs.csv"
    file.write_text(RUNS.format(*6 * [1]).replace(old, new, 1))
    with pytest.raises(SystemExit, match=f"^--measured {re.escape(str(file))}: {re.escape(problem)}"):
        PLAN.compare(str(file), "")


def test_what_waits_for_the_cpu():
    """A small block takes as long as its launches, in pipelines over several nodes longer with every rank of tp."""
    cfg = PLAN.Config(**PLAN.BOOK["1.34B"], vocab=131072, seq=4096, batch=8, dp=1, cp=1, tp=8, chunks=1, microbatches=8)
    for gpus, pp, each in ((8, 1, 0.1), (16, 1, 0.1), (8, 2, 0.1), (16, 2, 0.1 + 8 * 0.01)):
        times = PLAN.block_times(PLAN.replace(cfg, gpus=gpus, pp=pp), PLAN.Trainer(launch=0.1, crowded=0.01))
        assert sum(map(sum, times.values())) == pytest.approx(each)


@pytest.mark.parametrize(
    "model, zero, sizes, extra",
    [
        *(("1.34B", 0, dict(gpus=16, dp=16 // pp, pp=pp, seq=4096), extra) for pp, extra in ((1, 0), (2, 2), (4, 4))),
        *(("8.86B", 1, dict(gpus=8, dp=4, pp=2, seq=seq), extra) for seq, extra in ((2048, 0), (8192, 2))),
    ],
)
def test_a_pipeline_that_crawls(model, zero, sizes, extra):
    """Of nanotron, over several nodes without ZeRO, or where memory is full, as with long sequences.

    There are two messages per micro-batch and neighbour, beside which all else is short.
    """
    common = dict(vocab=131072, cp=1, tp=1, chunks=1, batch=32 * sizes["dp"], microbatches=32)
    cfg = PLAN.Config(**PLAN.BOOK[model], **common, **sizes)
    by = [PLAN.replace(PLAN.nanotron(zero), stall=wait) for wait in (10, 0)]
    slow, fast = (PLAN.predict(cfg, each).step.total() for each in by)
    assert (slow - fast) / 32 == pytest.approx(10 * extra, rel=0.1, abs=2)


def test_llama_3():
    """All three fit; by the paper's formula their MFU, to which nothing is fitted, is within 10 % with 8,192 tokens.

    With 131,072 tokens it is not: the formula counts attention across documents, which Llama masks.
    """
    short, shorter, long = PLAN.llama()
    assert all(plan.memory < 74 for plan, *_ in PLAN.llama())
    assert all(0 < theirs / mfu * 100 - 1 < 0.1 for _, theirs, mfu in (short, shorter))
    assert long[1] / long[2] * 100 > 1.2


def test_what_people_use():
    """8B on 64 GPUs: ranks of dp alone.

    70B on 64 and 405B on 1,024 H100s: NVIDIA's layouts for Megatron-LM, bf16 without recomputation (Megatron Bridge,
    performance recipes llama3_70b_pretrain_64gpu_h100_bf16 and llama31_405b_pretrain_1024gpu_h100_bf16), is the best or
    equal to it within the error.
    """
    cfg = PLAN.Config(**PLAN.PRESETS["llama3_8b"], gpus=64, batch=512, seq=8192)
    best = PLAN.simplest(PLAN.plans(cfg, TRAIN, 12)[0]).cfg
    assert (best.dp, best.cp, best.tp, best.pp) == (64, 1, 1, 1)
    for preset, gpus, batch, layout in (("llama3_70b", 64, 256, (2, 4, 4)), ("llama3_405b", 1024, 512, (2, 8, 8))):
        cfg = PLAN.Config(**PLAN.PRESETS[preset], gpus=gpus, batch=batch, seq=8192)
        (best,) = PLAN.plans(PLAN.replace(cfg, recompute="none"), TRAIN, 1)[0][:1]
        cp, tp, pp = layout
        theirs = PLAN.plans(PLAN.replace(cfg, cp=cp, tp=tp, pp=pp, recompute="none"), TRAIN, 1)[0][0]
        assert theirs.step.total() < 1.05 * best.step.total(), preset
    assert (best.cfg.tp, best.cfg.cp) == (8, 2)


@pytest.mark.thorough
def test_stored_picture_is_up_to_date(monkeypatch, tmp_path):
    """What it says: layouts, axes and titles (matplotlib's releases draw the same with other bytes)."""
    flags = "--preset llama3_8b --gpus 64 --batch 512 --seq 8192"
    monkeypatch.setattr(sys, "argv", ["plan.py", *flags.split(), "--draw", str(tmp_path / "new.svg")])
    PLAN.main()
    files = tmp_path / "new.svg", FOLDER / "plan.svg"
    texts = [re.findall(r"<text[^>]*>([^<]+)</text>", file.read_text()) for file in files]
    assert texts[0] == texts[1] and len(texts[0]) > 20, f"python 08_4d/plan.py {flags} --draw 08_4d/plan.svg"
