"""The ZeRO recipes train as the root does, hold and communicate what they say, and overlap it as they say."""

import gc
from types import SimpleNamespace
from unittest.mock import patch

import probes
import pytest
import torch
from launch import RankFailed, launch, load
from mutation import changed
from torch.multiprocessing.reductions import StorageWeakRef

ROOT_RECIPE = "01_single_gpu/train.py"
data_parallel = load("02_data_parallel/test_data_parallel.py")
ZERO1, OVERLAP, ZERO2, ZERO3, HSDP, OFFLOAD = (
    f"03_zero/{name}.py" for name in ("zero1", "zero1_overlap", "zero2", "zero3", "hsdp", "offload")
)
MUON, LORA = "03_zero/muon.py", "03_zero/lora.py"
MASTERS, COPY_ENGINES = "03_zero/zero1_masters.py", "03_zero/zero3_copy_engines.py"
WHOLE = (ZERO1, MASTERS)  # one unit, which is gathered and reduced at once
FREEING = (ZERO3, HSDP, COPY_ENGINES)  # whole weights are in memory for a while only
IN_UNITS = (OVERLAP, ZERO2, *FREEING, OFFLOAD)
LAYERS = 4
SIZES = dict(layers=LAYERS, dim=32, heads=4, kv_heads=2, ffn=48, seq=16, batch=12)
SMALL = "--device cpu " + " ".join(f"--{name} {size}" for name, size in SIZES.items())
BATCH = (17 + 16) * 12 * 8  # bytes of the token ids of inputs and targets
EMBEDDING = 4 * 256 * 32  # bytes of the largest tensor
ADAPTERS = LAYERS * 16 * (9 * 32 + 2 * 16 + 3 * 48)  # elements, of rank 16


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [ZERO1, OVERLAP, ZERO3, COPY_ENGINES])  # others share these definitions
def test_parameters_without_gradient_on_some_ranks(recipe):
    """... count as zero there; all ranks reduce in the same order."""
    data_parallel.check_one_sequence_alone(recipe, "")


def sizes_by_hand(shards: int, whole: bool = False) -> list[int]:
    """Elements of each unit (embedding, every block, final norm and head; or the whole model), with its padding."""
    module = load(ROOT_RECIPE)
    with torch.device("meta"):
        weights = dict(module.Model(module.Config(**SIZES)).named_parameters())
    parts = [("model.embed_tokens.",), *((f"model.layers.{i}.",) for i in range(LAYERS)), ("model.norm.", "lm_head.")]
    parts = [("",)] if whole else parts
    sizes = [sum(tensor.numel() for name, tensor in weights.items() if name.startswith(names)) for names in parts]
    return [-(-size // shards) * shards for size in sizes]


def bytes_held(most, begins):
    """A probe: bytes of all tensors: most while the model is built; when the last micro-batch begins, with a call of
    `begins`; when the gradients are there; after the step. Once gloo's threads have let go, they are at most `most`."""

    def probe(module):
        gc.freeze()
        peak, seen, build_model = [], [], module.build_model

        def watch(owner, name, note, before):
            function = getattr(owner, name)

            def watched(*args, **options):
                if before:
                    note()
                result = function(*args, **options)
                if not before:
                    note()
                return result

            return patch.object(owner, name, watched)

        def build(cfg):  # with the weights as they are drawn, and zero1.py's gradients
            note = lambda: peak.append(probes.bytes_of_tensors())  # noqa: E731
            with watch(module, "full_tensor", note, False), watch(torch, "zeros_like", note, False):
                return build_model(cfg)

        module.build_model = build
        owner = module.dist if hasattr(module.dist, begins) else module
        for i, watched in enumerate([(owner, begins), (module, "clip_gradients"), (module, "train_step")], 1):
            note = lambda i=i: seen.append(probes.settled(probes.bytes_of_tensors, most[i]))  # noqa: E731
            watch(*watched, note, i < 3).start()
        return lambda: [max(peak), *seen[-3:]]

    return probe


def gradients_alive(module):
    """A probe: most units that have gradients when one is reduced; most flat gradients of others at that time."""
    most, sent, models = [0, 0], [], []
    build_model, take_gradients = module.build_model, module.take_gradients

    def taken(*args):
        units = sum(any(p.grad is not None for p in unit.parameters) for unit in models[0].units)
        flats = probes.settled(lambda: sum(not storage.expired() for storage in sent), 1)
        most[:] = max(most[0], units), max(most[1], flats)
        flat = take_gradients(*args)
        if flat is not None:  # else it has moved into memory that is there for all of them
            sent.append(StorageWeakRef(flat.untyped_storage()))
        return flat

    module.build_model = lambda *args: models.append(build_model(*args)) or models[0]
    module.take_gradients = taken
    return lambda: most


def prefetched(module):
    """A probe: whether the next unit's weights are on their way whenever one computes; this rank's shards after all."""
    seen, models, before_forward = [], [], module.before_forward
    after_backward = getattr(module, "after_backward", None)

    def note(model, i):
        unit = model.units[i]
        seen.append(bool(unit.up_to_date if hasattr(unit, "up_to_date") else unit.gather_work))

    def forward(model, i, x):
        models[:] = [model]
        before_forward(model, i, x)
        if i + 1 < len(model.units):
            note(model, i + 1)

    def backward(model, i):  # what is next is i - 1, and the embedding needs no weights
        after_backward(model, i)
        if i > 2:
            note(model, i - 2)

    module.before_forward, module.after_backward = forward, backward
    return lambda: (all(seen), [unit.shard.tolist() for unit in models[0].units])


def check_communication(recipe, sizes, shards, world, seen):
    """Elements that leave a rank, by the formulas of the headers; and the loss and the norm, each one element."""
    sent, everything = dict.fromkeys(probes.SENT, 0), sum(sizes)
    for kind, _, elements, group in seen:
        sent[kind] += probes.SENT[kind](group) * elements
    one = ("torch.float32", 1, world)
    if recipe == LORA:  # weights are gathered as by zero3.py, and adapters alone are reduced
        reduced = sorted(collective[:3] for collective in seen if collective[0] != "allgather")
        assert reduced == [("allreduce", "torch.float32", n) for n in (1, ADAPTERS)], "other gradients are reduced"
        assert {dtype for kind, dtype, *_ in seen if kind == "allgather"} == {"torch.bfloat16"}
        assert sent["allgather"] == 4 * (2 * everything - sizes[0] - sizes[-2] - sizes[-1]) // 3
        return
    if recipe in WHOLE:  # gradients and weights once each, of zero1.py in fp32 whatever the matmuls have
        reduction, dtype = ("reduce_scatter", one[0]) if recipe == ZERO1 else ("alltoall", "torch.bfloat16")
        weights = ("allgather", dtype, everything // world, world)
        assert seen == [(reduction, dtype, everything, world), ("allreduce", *one), ("allreduce", *one), weights]
        return
    share, micro = (shards - 1) / shards, 1 if recipe == OVERLAP else 2  # overlapped, stage 1 communicates once
    kept = sizes[0] + sizes[-2] + sizes[-1]
    gathered = micro * (2 * everything - kept) if recipe in FREEING else everything
    copied = recipe == COPY_ENGINES
    assert sent["alltoall"] == pytest.approx(0 if copied else micro * share * everything, rel=1e-12)
    assert sent["allgather"] == pytest.approx(0 if copied else gathered * share, rel=1e-12)
    assert {given for kind, given, *_ in seen if kind != "allreduce"} <= {"torch.bfloat16"}
    sums = [(given, elements, group) for kind, given, elements, group in seen if kind == "allreduce"]
    replicas = [("torch.float32", size // shards, world // shards) for size in reversed(sizes)]
    assert sums == [*(replicas if recipe == HSDP else []), one, one]


def memory_by_hand(recipe, sizes, shards, world):
    """Bytes in memory while the model is built, between micro-batches, with all gradients, and between steps; and how
    many there may be beside the last three. No rank ever has the whole model in float32, but zero1.py."""
    everything, largest = sum(sizes), max(sizes)
    if recipe == LORA:  # 2 bytes per frozen weight and 16 per element of an adapter, which is whole
        state = 2 * everything // shards + 12 * ADAPTERS
        building = 2 * everything // shards + 4 * ADAPTERS + 2 * largest + 2 * EMBEDDING
        rest = 3 * BATCH + 200 * LAYERS * 14  # batches and a part of them; AdamW's steps, and what is logged
        return [building, state + 4 * ADAPTERS, state + 4 * ADAPTERS, state], rest
    weights = 0 if recipe in FREEING else 2 * everything
    if recipe == COPY_ENGINES:  # shared memory: each rank has mapped all of it
        weights += 2 * (world * largest + everything)
    original, moments, gradient = (times * everything // shards for times in (4, 8, 4))
    if recipe == ZERO1:  # weights and gradients in fp32
        weights, original, moments, gradient = 8 * everything, 0, 8 * everything // shards, 4 * everything // shards
    state = weights + original + moments
    between = 4 * everything if recipe == OVERLAP else gradient  # whole gradients, in fp32, or shards of them
    if recipe == ZERO1:
        between = 0  # it has no micro-batches: this is when forward begins
    if recipe == MASTERS:
        between = gradient + 4 * everything  # bf16 gradients as they are sent and as they arrive
    always = gradient if recipe == OFFLOAD else 0
    building = weights + original + always + 2 * EMBEDDING + 2 * largest * (recipe not in WHOLE)  # a unit, two tensors
    rest = 3 * BATCH + 100 * (LAYERS + 2)  # batches and a part of them, the optimizer's steps, and what is logged
    assert rest < gradient / 2  # nothing of the formula would fit
    return [building, state + between, state + gradient, state + always], rest


@pytest.mark.parametrize("file", [ZERO3, "10_mixed_precision/fp8_zero3.py"])
def test_a_gather_ends_before_its_memory_is_freed(file):
    full, held = torch.ones(4), []
    work = SimpleNamespace(wait=lambda: held.append(full.untyped_storage().nbytes()))
    unit = SimpleNamespace(full=full, gather_work=work, linears=[])
    load(file).free(unit)
    assert held == [full.nbytes] and not full.untyped_storage().nbytes(), "it is not waited for"


def orthogonalised(module):
    """A probe: the shapes of what this rank orthogonalises."""
    shapes, orthogonalise = [], module.orthogonalise
    module.orthogonalise = lambda x: shapes.append(tuple(x.shape)) or orthogonalise(x)
    return lambda: shapes


def test_each_matrix_has_one_owner():
    """On 3 ranks, together: every matrix of a block once per step. What is sent is ZeRO-1's, and padding."""
    run = launch(MUON, 3, f"{SMALL} --steps 1", probe=probes.together(orthogonalised, probes.communication))
    matrices = sorted(tuple(x.shape) for name, x in run.weights.items() if ".layers." in name and x.ndim > 1)
    assert sorted(shape for shapes, _ in run.probes for shape in shapes) == matrices, "not by one owner each"
    everything = sum(x.numel() for x in run.weights.values())
    for _, (seen,) in run.probes:
        sent = dict.fromkeys(probes.SENT, 0)
        for kind, _, elements, _ in seen:
            sent[kind] += elements
        assert everything <= sent["reduce_scatter"] == 3 * sent["allgather"] < 1.1 * everything
        assert sent["allreduce"] == 2 and not sent["alltoall"]  # the loss and the norm


def test_newton_schulz_is_balanced(file=MUON):
    """Of Llama-3.1-8B's 224 matrices: even on 8 and 16 ranks; on 64 the longest takes 6 % longer, padding 8 %."""
    module = load(file)
    cfg = module.Config(**module.PRESETS["llama3_8b"])
    shapes = [shape for name, shape in module.tensor_shapes(cfg).items() if ".layers." in name and len(shape) > 1]
    matrices = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    for ranks, longer, padded in (8, 1, 1), (16, 1, 1), (64, 1.06, 1.08):
        owned = module.by_owner(matrices, ranks)
        assert sorted(id(p) for part in owned for p in part[:-1]) == sorted(map(id, matrices))
        assert len({sum(p.numel() for p in part) for part in owned}) == 1, "shards of several lengths"
        work = [sum(map(module.newton_schulz_flops, part[:-1])) for part in owned]
        assert max(work) <= longer * sum(work) / ranks, f"{ranks} ranks: the work is not balanced"
        assert sum(p.numel() for part in owned for p in part) <= padded * sum(p.numel() for p in matrices)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe, world, flags", [*((r, 3, "") for r in (*WHOLE, *IN_UNITS, LORA) if r != HSDP), (HSDP, 6, "--shard 3")]
)
def test_a_step(recipe, world, flags, file=None):
    """A step sends, holds and overlaps as the header says, on 3 ranks, which divide no block."""
    nothing = lambda module: None  # noqa: E731
    own = [gradients_alive, prefetched] if recipe in IN_UNITS else [nothing, nothing]
    own += [probes.gathered_at_a_time if recipe in (*FREEING, LORA) else nothing]
    own += [data_parallel.copied_between_ranks if recipe == COPY_ENGINES else nothing]
    sizes = sizes_by_hand(3, recipe in WHOLE)
    formula, rest = memory_by_hand(recipe, sizes, 3, world)
    held = bytes_held([size + rest for size in formula], "all_to_all_single" if recipe == MASTERS else "forward")
    probe = probes.together(held, probes.communication, *own)
    run = launch(file or recipe, world, f"{SMALL} {flags} --dtype bfloat16 --steps 2", probe=probe)
    for rank, (memory, steps, alive, weights, gathered, copied) in enumerate(run.probes):
        assert memory[0] <= formula[0], f"{memory[0]} bytes while the model is built, {formula[0]} are allowed"
        beside = [ours - wanted for ours, wanted in zip(memory[1:], formula[1:], strict=True)]
        assert all(0 < more < rest for more in beside), f"{beside} bytes beside those of the formulas"
        for seen in steps:
            check_communication(recipe, sizes, 3, world, seen)
        if recipe == COPY_ENGINES:  # what zero3.py sends
            numbers = 2 * (3 * sum(sizes) - sizes[0] - sizes[-2] - sizes[-1])
            assert copied == 2 * (2 * numbers // 3)
        if recipe in (*FREEING, LORA):  # of blocks and of embedding and head; none between the steps
            assert gathered == [2, 1, 0], f"weights are held: {gathered}"
        if recipe in IN_UNITS:
            assert weights[0], "a unit waits for weights that could be there"
            assert weights[1] == run.probes[rank % 3][3][1], "replicas of hsdp.py do not agree to the bit"
            assert alive == [1, 0 if recipe == COPY_ENGINES else 1], "gradients are held"


MODEL = '        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")'
FROZEN = "        self.model.embed_tokens.requires_grad_(False)"
EXTRA = "        self.model.extra = RMSNorm(cfg)", "model.extra.weight must be in exactly one unit"
SHARE = "    inputs = inputs.chunk(dp)[rank].to(cfg.device)  # b/dp s"
LOSS = "        loss = forward(cfg, model, x, y) / tokens"
TWO_LOSSES = "        loss = loss + forward(cfg, model, x, y)", "run backward after each forward"
MISUSE = [  # a line, what is put behind it, and what is said about that; others share these definitions
    (ZERO1, MODEL, FROZEN, "a frozen parameter"),
    (ZERO1, SHARE, "    model.lm_head.weight.grad = None", "a .grad is no view"),
    (ZERO1, MODEL, "        self.model.norm.double()", "parameters of several dtypes"),
    (MASTERS, MODEL, FROZEN, "embed_tokens.weight is frozen"),
    (OVERLAP, MODEL, *EXTRA),
    (LORA, MODEL, *EXTRA),
    (ZERO3, LOSS, *TWO_LOSSES),
    (COPY_ENGINES, LOSS, *TWO_LOSSES),
]
STEP = '; return loss and gradient norm, without waiting for the GPU."""'
OTHER_WAYS = [  # to call a model: compiled with the calls around its blocks; a loss nobody reads; a step is given up
    (ZERO3, MODEL, '        self.compile(backend="eager")'),
    (ZERO3, "    total = 0", "    forward(cfg, model, inputs[:1], targets[:1])"),
    (ZERO2, STEP, "    forward_backward(cfg, model, inputs, targets)\n    optimizer.zero_grad()"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, line, more, words", MISUSE)
def test_a_silent_misuse_is_refused(recipe, line, more, words, tmp_path):
    with pytest.raises(RankFailed, match=words):
        launch(changed(recipe, line, f"{line}\n{more}", tmp_path), 1, f"{SMALL} --steps 1")


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, line, more", OTHER_WAYS)
def test_other_ways_to_call_a_model(recipe, line, more, tmp_path):
    files = recipe, changed(recipe, line, f"{line}\n{more}", tmp_path)
    plain, run = (launch(file, 2, f"{SMALL} --steps 2 --dtype float64") for file in files)
    for name, weight in plain.weights.items():
        assert torch.equal(weight, run.weights[name]), name


def test_all_bytes_of_pinned_memory_are_pinned(monkeypatch):
    registered = []
    driver = SimpleNamespace(cudaHostRegister=lambda *range_: registered.append(range_) or "no error")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: registered.append(result))
    tensor = load(OFFLOAD).pinned(1000, torch.float32, "cuda")
    assert registered == [(tensor.data_ptr(), 4000, 0), "no error"]


def test_offload_waits_for_gradients_with_any_clip(monkeypatch):
    """The optimizer reads them on the CPU, and nobody else waits until they are there."""
    module, waits = load(OFFLOAD), []
    monkeypatch.setattr(module.dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda norm: waits.append(1) or False)
    unit = SimpleNamespace(norm=torch.tensor(3.0), matrices=None, vectors=None)
    module.clip_gradients(SimpleNamespace(clip=torch.inf), SimpleNamespace(units=[unit], world=None))
    assert waits, "the CPU does not wait"
