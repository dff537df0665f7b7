"""Predicted memory against the playbook's tables, what allocators count, and measured peaks."""

import itertools
import json
import sys
from dataclasses import fields, replace

import pytest
import torch
from launch import ROOT, in_a_fork, isolated, load
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

MEMORY = load("01_single_gpu/memory.py")
LOW = [name for name, ours in MEMORY.RECIPES["10_mixed_precision"].items() if "zero" not in ours]  # on one GPU
SMOLLM = MEMORY.Config(**MEMORY.PRESETS["smollm_1_7b"], seq=2048, batch=4, dtype="bfloat16", compile=True)


def table(start):
    """The playbook's table whose title starts like this, to three digits after the point."""
    (rows,) = [rows for title, rows in MEMORY.book_tables().items() if title.startswith(start)]
    return {name: [round(x, 3) for x in row] for name, row in rows.items()}


def test_tables_of_the_playbook():
    """In GiB; 1.10 in GB. 2.27 is of the ZeRO paper. The widget, 0.4, with GELU and h_ff = 4h is 1.12, and 3.12."""
    assert table("1.10")["405B"] == [6480, 8100] and table("1.13 float32")["405B"][4] == 1520.928
    for recompute, gib in dict(none=[9.254, 354.031], selective=[4.254, 34.031], full=[0.254, 2.031]).items():
        assert table(f"1.13, 1.17 activations, recomputation {recompute}")["8B"][0:4:3] == gib  # at 1k and 8k tokens
    assert table("2.11")["1B"] == [2.302, 2.302, 9.207, 1.062] and table("2.25")["ZeRO-2"][:3] == [15, 1.875, 7.5]
    assert table("3.11")["tp 16"] == [8.219, 8.219, 32.875, 7.188, 28.75, 115]
    assert table("3.21")["tp 16"] == [1.328, 5.312, 21.25]
    assert table("0.4")["8B"][:3] == [21, 35, 4] and table("2.12")["70B"] == [140, 130.385]
    sums = [sum(MEMORY.book_states(7.5e9, zero, 64).values()) / 1e9 for zero in range(4)]
    assert [round(x, 1) for x in sums] == [120, 31.4, 16.6, 1.9]
    for t, sp in (1, False), (8, False), (8, True):
        parts = MEMORY.book_widget(32, 1, 4096, 4 * 4096, 32, 1024, 30522, "gelu", t, sp)
        wanted = MEMORY.book_activations(32, 4096, 32, 1024, "none", t, sp, once=False)
        assert sum(parts.values()) - parts["outside"] == pytest.approx(wanted, rel=1e-12)


def test_sizes_of_the_root():
    """Presets and defaults."""
    root = load("01_single_gpu/train.py")
    for preset, sizes in MEMORY.PRESETS.items():
        assert sizes.items() <= root.PRESETS[preset].items()
    defaults = {f.name: f.default for f in fields(root.Config)}
    assert all(defaults[f.name] == f.default for f in fields(MEMORY.Config) if f.name in defaults)


def test_what_no_measured_peak_shows():
    """Key heads of more ranks than there are; at the optimizer, fp32 gradients in shards; in fp8, a gathered block."""
    cut = replace(SMOLLM, tp=4, cp=4, ulysses=4)  # 16 ranks share the heads
    few, each = (MEMORY.saved(replace(cut, kv_heads=n), "none") for n in (4, 16))
    assert few == each
    few, each = (MEMORY.parameters(replace(SMOLLM, tp=16, kv_heads=n)) for n in (4, 16))
    assert few == each
    full = replace(SMOLLM, zero=3, dp=4)
    found, fp8 = MEMORY.moments(full), MEMORY.moments(replace(full, fp8="tensorwise"))
    kinds, n = found["optimizer"], sum(MEMORY.parameters(full).values())
    assert sum(kinds.values()) - kinds["temporary"] == 16 * n / 4
    less = {name: found[name]["weights"] - fp8[name]["weights"] for name in fp8}
    assert less["last block"] == MEMORY.matrices(full) + 2 * full.dim and less["first block"] == 0


def highest(step):
    """Peak of the bytes that a function allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(change.nbytes() for change in sorted(changes, key=lambda e: e.start_ns())))


def allocated(file, rank, ranks, shape):
    """Peak of the bytes that a step of one of the ranks allocates on the CPU, above weights and optimizer state."""
    torch.backends.mkldnn.set_flags(False)  # its matmuls allocate room of their own
    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    module = load(file)
    cfg, zeros = module.Config(**shape, device="cpu"), torch.zeros_like
    data, model = module.load_data(cfg)[0], module.build_model(cfg)
    if hasattr(module, "local_attention"):  # what cuDNN returns, without the scores that a CPU has in memory
        module.local_attention = lambda q, k, v, causal: (zeros(q), torch.zeros(*q.shape[:3], 1))
        module.local_attention_backward = lambda gradient, q, o, lse, k, v, causal: (zeros(q), zeros(k), zeros(v))
    optimizer = module.make_optimizer(cfg, model)
    module.train_step(cfg, model, optimizer, *module.make_batch(cfg, data, 0))  # makes the optimizer's state
    batch = module.make_batch(cfg, data, 1)
    return highest(lambda: module.train_step(cfg, model, optimizer, *batch))


@in_a_fork
def test_logits_of_one_chunk(file="01_single_gpu/chunked_loss.py"):
    """Head and loss hold logits of a fifth of the tokens, and in training their gradient and log-softmax."""
    module, rows = load(file), -(-512 // 5)
    cfg = module.Config(layers=1, dim=32, ffn=48, batch=4, vocab=5000, loss_chunks=5, device="cpu")
    model, batch = module.build_model(cfg), module.make_batch(cfg, module.load_data(cfg)[0], 0)
    module.forward_backward(cfg, model, *batch)  # makes the gradients
    for step, tensors in (module.forward_backward, 3), (module.evaluate, 2):
        held = highest(lambda step=step: step(cfg, model, *batch)) / (4 * rows * cfg.vocab)
        assert held < tensors + 1, f"logits of an earlier chunk are held: {held}"


SHAPE = dict(dim=64, heads=4, kv_heads=2, ffn=256, vocab=512, seq=64, batch=16, dtype="bfloat16")
GATHERED = dict(layers=2, dim=256, kv_heads=4, ffn=1024, vocab=256, seq=1024, batch=2)  # keys and their gradients
CASES = [
    *((f"06_pipeline/{schedule}.py", 4, dict(microbatches=8)) for schedule in MEMORY.SCHEDULES),
    ("06_pipeline/zero_bubble.py", 2, dict(microbatches=8, vocab=4096, dtype="float32")),
    *((f"01_single_gpu/{name}_checkpointing.py", 1, dict(vocab=128)) for name in ("selective", "activation")),
    ("05_context_ring/all_gather_kv.py", 4, GATHERED),
]


@pytest.mark.thorough
@pytest.mark.parametrize("file, ranks, changes", CASES)
def test_peak_on_the_cpu(file, ranks, changes):
    """Uncompiled, the allocator's own count of a real step.

    Token ids of a batch are counted as a micro-batch's, and rotary tables beside the embedding's gradient; of gathered
    keys, positions and gradients of norms are left out.
    """
    shape, gathers = SHAPE | dict(layers=2 * ranks + 2) | changes, file.startswith("05")
    for rank in {ranks - 1} if gathers else {0, ranks - 1}:
        found = isolated(lambda rank=rank: allocated(file, rank, ranks, shape))
        cfg = MEMORY.config_of(file, load(file).Config(**shape), rank, ranks)
        moment, kinds = MEMORY.peak(cfg)
        less = sum(kinds.values()) - sum(MEMORY.resident(cfg).values()) - MEMORY.WORKSPACE - found
        tables = (moment == "embedding") * 4 * 2 * cfg.seq * cfg.dim // cfg.heads
        assert -16 * cfg.seq * gathers <= less <= 16 * MEMORY.tokens(cfg) + tables, rank


def measured_before():
    """(file, flags, GPUs, measured GiB) of all stored runs that can be predicted."""
    for suite, stored in json.loads((ROOT / "tests/results/speed.json").read_text()).items():
        for row in stored.get("rows", []):
            if "file" not in row or row["file"].startswith("07"):
                continue  # memory.py knows no experts
            folder, _, name = row["file"].removesuffix(".py").rpartition("/")
            if name in MEMORY.RECIPES.get(folder, {}) and "flags" in row:  # whole steps, not attention alone
                gpus = 1 if folder == "01_single_gpu" or name in LOW else int(stored["gpu"].split()[0])
                yield pytest.param(row["file"], row["flags"], gpus, row["rounds"][0]["memory"], id=f"{suite} {name}")


@pytest.mark.parametrize("file, flags, gpus, gib", list(measured_before()))
def test_peak_on_gpus(file, flags, gpus, gib, monkeypatch):
    """Runs whose speed was measured: to 0.2 %, or to the digit that was printed."""
    recipe = load(file)
    monkeypatch.setattr(sys, "argv", [file, *flags.split()])
    cfg = MEMORY.config_of(file, recipe.parse_config(), 0, gpus)
    predicted = sum(MEMORY.peak(cfg)[1].values()) / 2**30
    assert predicted == pytest.approx(gib, rel=0.002, abs=0.05)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tp 3", "--tp 3: must divide --heads and --ffn, and so 8"),
        ("--layers 0", "--layers 0: must be at least 1"),
        ("--measure 02_data_parallel/torch_ddp.py", "--measure 02_data_parallel/torch_ddp.py: must be one of 01_"),
        ("--pp 5 --schedule zbv", "--layers 8: must be at least twice --pp 5"),
        ("--cp 3 --seq 9 --ulysses 0 --heads 6 --kv_heads 2 --dim 96", "--ulysses 3: must divide --kv_heads 2 /"),
        ("--fp8 tensorwise --zero 2 --dp 2", "--precision autocast: must be masters or stochastic with --fp8 tensor"),
        ("--measure 01_single_gpu/train.py", "--measure 01_single_gpu/train.py: needs a GPU"),
        ("--draw x.svg tests/results/curves.json", "--draw tests/results/curves.json: must be files that --json has"),
    ],
)
def test_bad_flags(flags, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["memory.py", *flags.split()])
    with pytest.raises(SystemExit) as end:
        MEMORY.main()
    assert str(end.value).startswith(message) and "\n" not in str(end.value)


@in_a_fork
def test_measure():
    """The recipe's own flags decide, masters are the optimizer's, and the peak is of the last two steps."""
    steps, forgotten, backward = [], [], torch.Tensor.backward
    torch.Tensor.backward = lambda loss: steps.append(backward(loss))
    torch.cuda.reset_peak_memory_stats = lambda: forgotten.append(len(steps))
    torch.cuda.max_memory_allocated = lambda: 2**31
    flags = "--device cpu --layers 2 --seq 16 --batch 4 --microbatches 2 --dtype bfloat16"
    cfg, peak, held = MEMORY.measure(str(ROOT / "10_mixed_precision/bf16.py"), flags.split())
    assert (cfg.layers, cfg.batch, cfg.microbatches, cfg.dtype, peak) == (2, 4, 2, "bfloat16", 2**31)
    assert forgotten == [2 * (MEMORY.STEPS - 2)]
    others = cfg.dim * (cfg.vocab + 2 * cfg.layers + 1)  # of embedding and norms, which have no masters
    n = sum(MEMORY.parameters(cfg).values()) - others
    assert held == {"weights": 2 * n + 4 * others, "optimizer": 12 * n + 8 * others}


def test_report(tmp_path, monkeypatch, capsys):
    """The prediction is printed; a measurement is printed and stored beside it."""
    run, file = replace(SMOLLM, zero=2, dp=4, batch=16), tmp_path / "memory.json"
    kinds, recipe = MEMORY.peak(run)[1], "01_single_gpu/train.py"
    total = sum(kinds.values())
    monkeypatch.setattr(MEMORY, "measure", lambda *_: (run, 30 * 2**30, {}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.chdir(ROOT)
    flags = "--preset smollm_1_7b --seq 2048 --batch 16 --dp 4 --zero 2 --dtype bfloat16 --compile"
    for words in f"--measure {recipe} --json {file} --batch 16", flags:
        monkeypatch.setattr(sys, "argv", ["memory.py", *words.split()])
        MEMORY.main()
    printed, (row,) = capsys.readouterr().out, json.loads(file.read_text())["rows"]
    assert f"measured 30.00 GiB  error {total / (30 * 2**30) - 1:+.1%}" in printed
    assert (row["file"], row["predicted"], row["measured"]) == (recipe, kinds, 30 * 2**30)
    assert all(f"{size:,} bytes" in printed for size in (*kinds.values(), total))
