"""Predicted memory against the playbook's tables, what autograd keeps, what allocators count, and measured peaks."""

import itertools
import json
import re
import sys
from dataclasses import fields, replace

import pytest
import torch
from launch import ROOT, in_a_fork, isolated, load
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

MEMORY = load("01_single_gpu/memory.py")
RECIPES = {"none": "train", "selective": "selective_checkpointing", "full": "activation_checkpointing"}
LOW = [name for name, ours in MEMORY.RECIPES["10_mixed_precision"].items() if "zero" not in ours]  # on one GPU
BLOCKS = ("fp8_tensorwise", "fp8_delayed_scaling", "fp8_blockwise", "low_memory")  # in those of the others nothing else
OF_01, OF_10 = "01_single_gpu/{}.py".format, "10_mixed_precision/{}.py".format
SHAPE = dict(layers=3, dim=256, heads=4, kv_heads=2, ffn=1024, vocab=2048, seq=256, batch=4)
SHORT = {**SHAPE, "seq": 32, "batch": 32}  # from 64 tokens on, bf16 attention asks the CPU, not ATEN_CPU_CAPABILITY
SMOLLM = MEMORY.Config(**MEMORY.PRESETS["smollm_1_7b"], seq=2048, batch=4, dtype="bfloat16", compile=True)


def table(start):
    """The playbook's table whose title starts like this, to three digits after the point."""
    (rows,) = [rows for title, rows in MEMORY.book_tables().items() if title.startswith(start)]
    return {name: [round(x, 3) for x in row] for name, row in rows.items()}


def test_tables_of_the_playbook():
    """In GiB; 1.10 in GB. 2.12 is the exact value of what the book prints as 133. 2.27 is of the ZeRO paper."""
    assert table("1.10")["405B"] == [6480, 8100]
    assert table("1.13 float32")["70B"][0] == 243.977 and table("1.13 float32")["405B"][4] == 1520.928
    assert round(4 * MEMORY.book_parameters(4096, 32, 128256) / 2**30, 3) == 25.963  # 1.7, without positions
    for recompute, gib in dict(none=[9.254, 354.031], selective=[4.254, 34.031], full=[0.254, 2.031]).items():
        assert table(f"1.13, 1.17 activations, recomputation {recompute}")["8B"][0:4:3] == gib  # at 1k and 8k tokens
    assert table("2.11")["1B"] == [2.302, 2.302, 9.207, 1.062] and table("2.12")["70B"] == [140, 130.385]
    parts = {"ZeRO-0": [15, 15, 60], "ZeRO-1": [15, 15, 7.5], "ZeRO-2": [15, 1.875, 7.5], "ZeRO-3": [1.875, 1.875, 7.5]}
    assert table("2.25") == {name: [*states, 4.25, 17, 68] for name, states in parts.items()}
    assert table("3.11")["tp 16"] == [8.219, 8.219, 32.875, 7.188, 28.75, 115]
    assert table("3.21")["tp 16"] == [1.328, 5.312, 21.25]
    sums = [sum(MEMORY.book_states(7.5e9, zero, 64).values()) / 1e9 for zero in range(4)]
    assert [round(x, 1) for x in sums] == [120, 31.4, 16.6, 1.9]


def test_widget_agrees_with_the_text():
    """0.4 with GELU and h_ff = 4h is 1.12, with tensor parallelism 3.12, and SP divides scores too (erratum)."""
    L, h, a, s = 32, 4096, 32, 1024
    for t, sp in (1, False), (8, False), (8, True):
        parts = MEMORY.book_widget(a, 1, h, 4 * h, L, s, 30522, "gelu", t, sp)
        wanted = MEMORY.book_activations(L, h, a, s, "none", t, sp, once=False)
        assert sum(parts.values()) - parts["outside"] == pytest.approx(wanted, rel=1e-12)
    swiglu, relu = (MEMORY.book_widget(a, 1, h, 4 * h, L, s, 30522, act)["feed-forward"] for act in ("swiglu", "relu"))
    assert swiglu - relu == 3 * s * 4 * h * 2 * L


def test_sizes_of_the_root():
    """Its presets and defaults."""
    root = load("01_single_gpu/train.py")
    for preset, sizes in MEMORY.PRESETS.items():
        assert {name: root.PRESETS[preset].get(name) for name in sizes} == sizes
    defaults = {f.name: f.default for f in fields(root.Config)}
    assert all(defaults[f.name] == f.default for f in fields(MEMORY.Config) if f.name in defaults)


def kept_by_block(file):
    """Bytes that autograd keeps of one block's forward, its parameters, those in fp8, and the RoPE table apart."""
    module = load(file)
    cfg = module.Config(**SHORT, device="cpu", dtype="bfloat16")
    block, rope = module.build_model(cfg).model.layers[0], module.rope_table(cfg, torch.arange(cfg.seq))
    x = torch.randn(cfg.batch, cfg.seq, cfg.dim).bfloat16().requires_grad_()
    block.compile(backend="aot_eager_decomp_partition")  # the partitioner of the compiler, without its kernels
    fp8 = [t for layer in block.modules() for t in getattr(layer, "quantized", ())]
    apart, sizes = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *fp8, *rope)}, {}

    def pack(t):
        if t.dtype != torch.uint8:  # the state of the CPU's random numbers, which checkpointing under compilation keeps
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    low = torch.autocast("cpu", torch.bfloat16, enabled=file.startswith("01"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), low:
        block(x, rope)
    return sum(size for address, size in sizes.items() if address not in apart)


@pytest.mark.thorough
@pytest.mark.parametrize("file", [*map(OF_01, (*RECIPES.values(), "lora")), *map(OF_10, BLOCKS)])
def test_kept_by_a_block(file):
    """To the byte, compiled: activations, and the copies that autocast makes of weights, but not of frozen ones. (Peaks
    below are eager.) In fp8 but for scales of whole tensors and of squares.
    """
    found = isolated(lambda: kept_by_block(file))
    cfg = MEMORY.config_of(file, load(file).Config(**SHORT, dtype="bfloat16", compile=True), 0, 1)
    cfg = replace(cfg, microbatches=1)
    scales = found - MEMORY.saved(cfg, cfg.recompute) - MEMORY.block_copies(cfg)
    assert 0 <= scales <= 256 * (cfg.fp8 != "none")


def test_what_tensor_parallelism_cuts():
    """With sequence parallelism all that a block keeps; else not the residual stream, here in bytes per token.

    Each of more ranks than key heads keeps a whole one: as many bytes as with a key head per rank.
    """
    for recompute, stream in {"none": 4 * 2 * 2048 + 8, "selective": 2 * 2 * 2048, "full": 2 * 2048}.items():
        cfg = replace(SMOLLM, recompute=recompute)
        whole = MEMORY.saved(cfg, recompute)
        split, rest = (MEMORY.saved(replace(cfg, tp=4, sequence_parallel=sp), recompute) for sp in (True, False))
        assert split == whole / 4 and rest == split + MEMORY.tokens(cfg) * stream * 3 / 4
    few, each = (MEMORY.saved(replace(SMOLLM, kv_heads=n, tp=8, sequence_parallel=True), "none") for n in (4, 8))
    assert few == each
    both = replace(SMOLLM, tp=4, cp=4, ulysses=4)  # 16 ranks share the heads
    few, each = (MEMORY.saved(replace(both, kv_heads=n), "none") for n in (4, 16))
    assert few == each


def highest(step):
    """Peak of the bytes that a function allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(change.nbytes() for change in sorted(changes, key=lambda e: e.start_ns())))


def allocated(file, shape):
    """Peak of the bytes that a step of a recipe allocates on the CPU, above weights and optimizer state.

    Without oneDNN, whose matmuls allocate room of their own, as much as the instructions of the CPU need.
    """
    torch.backends.mkldnn.set_flags(False)
    module = load(file)
    cfg = module.Config(**shape, device="cpu")
    data, model = module.load_data(cfg)[0], module.build_model(cfg)
    if hasattr(module, "local_attention"):
        module.local_attention, module.local_attention_backward = like_cudnn, like_cudnn_backward
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "file, dtype, vocab, microbatches",
    [
        *((OF_01(name), "bfloat16", 1024, 1) for name in RECIPES.values()),
        (OF_01("gradient_accumulation"), "bfloat16", 1024, 2),
        (OF_01("train"), "float32", 1024, 1),
        (OF_01("selective_checkpointing"), "float32", 128, 1),
        (OF_01("activation_checkpointing"), "bfloat16", 128, 1),
        *((OF_10(name), "bfloat16", 128, 2) for name in ("bf16", "low_memory")),
        (OF_10("stochastic_rounding"), "bfloat16", 128, 1),
        (OF_10("fp16_loss_scaling"), "float16", 1024, 1),
        (OF_10("stochastic_rounding"), "float32", 1024, 2),
    ],
)
def test_peak_on_the_cpu(file, dtype, vocab, microbatches):
    """The allocator's own count of a real step, whose peak is at the loss, the last norm or a block. In low precision
    with 16-bit weights and gradients, masters, fp32 sums. (fp8: on GPUs, below.)

    On the CPU token ids are not copied, 16 bytes a token.
    """
    shape = {**SHAPE, "dim": 128, "ffn": 512, "vocab": vocab, "seq": 128, "dtype": dtype}
    shape["batch"] = 4 * microbatches
    if hasattr(load(file).Config, "microbatches"):
        shape["microbatches"] = microbatches
    found = isolated(lambda: allocated(file, shape))
    cfg = MEMORY.config_of(file, load(file).Config(**shape), 0, 1)
    assert abs(activations(cfg) - found) <= 16 * MEMORY.tokens(cfg)


def activations(cfg):
    """The predicted peak of what the CPU's allocator counts in a step."""
    return sum(MEMORY.peak(cfg)[1].values()) - sum(MEMORY.resident(cfg).values()) - MEMORY.WORKSPACE


def like_cudnn(q, k, v, causal):
    """Tensors of the sizes, layouts and dtypes that cuDNN returns, without the scores that a CPU has in memory."""
    return torch.zeros_like(q), torch.zeros(*q.shape[:3], 1)


def like_cudnn_backward(gradient, q, o, lse, k, v, causal):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def on_rank(file, rank, ranks, shape):
    """One of so many ranks, whose collectives do nothing but to return: what to predict, and what a step allocates."""

    def found():
        torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        return allocated(file, shape)

    return MEMORY.config_of(file, load(file).Config(**shape), rank, ranks), isolated(found)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
def test_peak_of_gathered_keys(ranks):
    """The last rank's 1/cp of the tokens; gathered keys and their gradients. (Those of other recipes: on GPUs, below.)

    Left out are positions, 8 bytes each, of whole sequences if a rank's are a view, and gradients of norms.
    """
    shape = {**SHAPE, "layers": 2, "vocab": 256, "kv_heads": 4, "dtype": "bfloat16", "seq": 256 * ranks, "batch": 2}
    cfg, found = on_rank("05_context_ring/all_gather_kv.py", ranks - 1, ranks, shape)
    assert MEMORY.peak(cfg)[0] == "last block" and cfg.cp == ranks
    assert 0 <= found - activations(cfg) <= 16 * cfg.seq


@pytest.mark.thorough
@pytest.mark.parametrize(
    "schedule, ranks, dtype, vocab",
    [
        *((schedule, 4, "bfloat16", 512) for schedule in MEMORY.SCHEDULES),
        ("zero_bubble", 2, "bfloat16", 4096),
        ("dualpipe", 2, "float32", 4096),
    ],
)
def test_peak_of_pipelines(schedule, ranks, dtype, vocab):
    """The first ranks and the last of every schedule, whose peak is at the loss, the last block or the embedding, with
    its gradients: those of its stages, of embedding and head where the first and the last are.

    The token ids of a whole batch are counted as one micro-batch's; the embedding's gradient comes when backward has
    let go of its rotary table.
    """
    file, moments = f"06_pipeline/{schedule}.py", set()
    shape = dict(layers=2 * ranks + 2, dim=64, heads=4, kv_heads=2, ffn=256, vocab=vocab, seq=64)
    shape |= dict(batch=16, microbatches=8, dtype=dtype)
    for rank in sorted({0, 1, ranks - 1}):
        cfg, found = on_rank(file, rank, ranks, shape)
        moment, _ = MEMORY.peak(cfg)
        moments.add(moment)
        spare = 16 * MEMORY.tokens(cfg) + (moment == "embedding") * 4 * 2 * cfg.seq * cfg.dim // cfg.heads
        assert 0 <= activations(cfg) - found <= spare, (rank, moment)
    assert len(moments) > 1 or ranks == 2 and schedule == "dualpipe"


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


def test_at_the_optimizer():
    """Of SmolLM on 4 ranks each stage's state as in 2.21 to 2.23, with fp32 gradients in shards.

    On one GPU what the headers of 10_mixed_precision say: 16 bytes per parameter, 8 without masters, and 2 more in fp8
    for matrices of the blocks. Embedding and norms beside masters have 4 for the weight, 4 for the gradient and 8 for
    the moments: 16, too. What a moment before the optimizer's holds, the measured peaks above say.
    """
    n, matrices, dp = sum(MEMORY.parameters(SMOLLM).values()), SMOLLM.layers * MEMORY.matrices(SMOLLM), 4
    sizes = {0: 16 * n, 1: 2 * n + 16 * n / dp, 2: 2 * n + 16 * n / dp, 3: 16 * n / dp}
    wanted = [(dict(zero=zero, dp=dp), size) for zero, size in sizes.items()]
    for name in LOW:
        ours = MEMORY.RECIPES["10_mixed_precision"][name]
        wanted.append((ours, (8 if ours["precision"] == "stochastic" else 16) * n + 2 * matrices * ("fp8" in name)))
    for ours, size in wanted:
        kinds = MEMORY.moments(replace(SMOLLM, **ours))["optimizer"]
        assert sum(kinds.values()) - kinds["temporary"] == size, ours


def test_zero_3():
    """From the second micro-batch on, all shards of gradients are there. In fp8 a block is gathered in 1 byte per
    element, in backward transposed, too."""
    full = replace(SMOLLM, zero=3, dp=4)
    once, twice = (MEMORY.moments(replace(full, batch=m * full.batch, microbatches=m)) for m in (1, 2))
    more = {name: sum(twice[name].values()) - sum(once[name].values()) for name in once}
    assert more["optimizer"] == 0 < more["last block"] < more["loss"]
    fp8 = MEMORY.moments(replace(full, fp8="tensorwise"))
    less = {name: once[name]["weights"] - fp8[name]["weights"] for name in fp8}
    assert less["last block"] == MEMORY.matrices(full) + 2 * full.dim and less["first block"] == 0


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tp 3", "--tp 3: must divide --heads and --ffn, and so 8"),
        ("--layers 0", "--layers 0: must be at least 1"),
        ("--pp 5 --schedule zbv", "--layers 8: must be at least twice --pp 5"),
        ("--cp 3 --seq 9 --ulysses 0 --heads 6 --kv_heads 2 --dim 96", "--ulysses 3: must divide --kv_heads 2 /"),
        ("--fp8 tensorwise --zero 2 --dp 2", "--precision autocast: must be masters or stochastic with --fp8 tensor"),
        ("--measure 01_single_gpu/train.py", "--measure 01_single_gpu/train.py: needs a GPU"),
        ("--measure 02_data_parallel/torch_ddp.py", "--measure 02_data_parallel/torch_ddp.py: must be one of 01_"),
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


def measured_run(recipe, flags):
    """Run measure() on a CPU whose allocator says 2 GiB; note which backward came before it forgot the peak.

    Return the config's fields and not the config: another test may have loaded the file, and its class, again.
    """
    forgotten, count, backward = [], itertools.count(1), torch.Tensor.backward
    torch.Tensor.backward = lambda loss: (backward(loss), next(count))
    torch.cuda.reset_peak_memory_stats = lambda: forgotten.append(next(count))
    torch.cuda.max_memory_allocated = lambda: 2 * 2**30
    cfg, *bytes_held = MEMORY.measure(str(ROOT / recipe), flags.split())
    return vars(cfg), bytes_held, forgotten


def test_measure():
    """The recipe's own flags decide; bytes of masters are what the optimizer of 10_mixed_precision holds.

    The peak is of the last two steps: those before it compile.
    """
    flags = "--device cpu --layers 2 --seq 16 --batch 4 --microbatches 2 --dtype bfloat16"
    fields, (peak, held), forgotten = isolated(lambda: measured_run(OF_10("bf16"), flags))
    cfg = MEMORY.Config(**fields)
    assert (cfg.layers, cfg.batch, cfg.microbatches, cfg.dtype) == (2, 4, 2, "bfloat16")
    assert peak == 2 * 2**30 and forgotten == [2 * (MEMORY.STEPS - 2) + 1]
    others = cfg.dim * (cfg.vocab + 2 * cfg.layers + 1)  # of embedding and norms, which have no masters
    n = sum(MEMORY.parameters(cfg).values()) - others
    assert held == {"weights": 2 * n + 4 * others, "optimizer": 12 * n + 8 * others}


def test_report_and_picture(tmp_path, monkeypatch, capsys):
    """The prediction is printed; a measurement is printed, stored, and drawn beside it."""
    run, file, picture = replace(SMOLLM, zero=2, dp=4, batch=16), tmp_path / "memory.json", tmp_path / "memory.svg"
    predicted = MEMORY.peak(run)[1]
    flags = "--preset smollm_1_7b --seq 2048 --batch 16 --dp 4 --zero 2 --dtype bfloat16 --compile"
    monkeypatch.setattr(MEMORY, "measure", lambda *_: (run, 30 * 2**30, {"weights": predicted["weights"]}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.chdir(ROOT)
    for words in f"--measure 01_single_gpu/train.py --json {file} --batch 16", f"--draw {picture} {file}", flags:
        monkeypatch.setattr(sys, "argv", ["memory.py", *words.split()])
        MEMORY.main()
    printed = capsys.readouterr().out
    error = sum(predicted.values()) / (30 * 2**30) - 1
    assert f"measured 30.00 GiB  error {error:+.1%}" in printed
    (row,) = json.loads(file.read_text())["rows"]
    assert row["file"] == "01_single_gpu/train.py" and row["predicted"] == predicted and row["measured"] == 30 * 2**30
    assert all(f">{word}<" in picture.read_text() for word in ("train", "measured", *predicted))
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes", printed)]
    assert sizes == [*predicted.values(), sum(predicted.values())]
