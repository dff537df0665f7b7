"""The ZeRO recipes train as the root does, hold and communicate what they say, and overlap it as they say."""

import functools
import gc
import itertools
import tempfile
import time

import compare
import equivalence
import probes
import pytest
import torch
import witness
from contract import refusal
from launch import RankFailed, isolated, launch, load, once
from safetensors.torch import save_file
from streams import streams
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

ROOT_RECIPE = "01_single_gpu/train.py"
ZERO1, OVERLAP, ZERO2, ZERO3, HSDP, OFFLOAD = (
    f"03_zero/{name}.py" for name in ("zero1", "zero1_overlap", "zero2", "zero3", "hsdp", "offload")
)
COPY_ENGINES = "03_zero/zero3_copy_engines.py"
TORCH_FSDP, ACCELERATE_FSDP = "03_zero/torch_fsdp.py", "03_zero/accelerate_fsdp.py"
LAYERS = 4
SMALL = f"--device cpu --layers {LAYERS} --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 12"
FLAGS = {OVERLAP: "", ZERO2: "", ZERO3: "", HSDP: "--shard 3", OFFLOAD: ""}  # for 3 ranks, which divide no block
every_recipe = pytest.mark.parametrize("recipe", [ZERO1, *FLAGS, COPY_ENGINES])
in_units = pytest.mark.parametrize("recipe", [*FLAGS, COPY_ENGINES])
by_collectives = pytest.mark.parametrize("recipe", FLAGS)
freeing_weights = pytest.mark.parametrize("recipe", [ZERO3, HSDP, COPY_ENGINES])


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0].startswith("03")])
def test_equals_root(recipe, world, flags):
    equivalence.check_quickly(recipe, world, flags)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["at once", "late"])
@pytest.mark.parametrize(
    "recipe, world, flags",
    [
        (OVERLAP, 2, "--microbatches 3"),
        (ZERO2, 2, "--microbatches 3"),
        (ZERO3, 2, "--microbatches 3"),
        (HSDP, 4, "--microbatches 3"),
        (OFFLOAD, 2, "--microbatches 3"),
        (COPY_ENGINES, 2, "--microbatches 3"),
    ],
)
def test_whenever_streams_get_to_it(recipe, world, flags, when):
    """A collective writes at some time between its start and the end of the wait for it, a side stream likewise."""
    equivalence.check(recipe, world, flags, probe=streams(when))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [OVERLAP, ZERO3])
def test_gradients_in_the_order_of_a_compiled_block(recipe):
    probe = probes.together(equivalence.unfused_attention, streams("at once"))
    equivalence.check(recipe, 2, "--compile", probe=probe)


@once
def root_with_one_sequence_alone(flags):
    """The root's run with that probe."""
    return launch(ROOT_RECIPE, 1, flags, probe=probes.one_sequence_alone_runs_a_block)


@pytest.mark.thorough
@pytest.mark.parametrize("mode, ran", [(equivalence.GRADIENT, [1, 0, 0]), (equivalence.TRAINING, [2, 0, 2])])
@every_recipe
def test_parameters_without_gradient_on_some_ranks(recipe, mode, ran):
    """... count as zero there; all ranks reduce in the same order."""
    init = equivalence.start(ROOT_RECIPE, equivalence.SHAPE)
    common = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init} {mode}"
    theirs = root_with_one_sequence_alone(common)
    ours = launch(
        recipe, 3, f"{common} {FLAGS.get(recipe, '')}", probe=probes.one_sequence_alone_runs_a_block, timeout=60
    )
    assert theirs.probes == [sum(ran)] and ours.probes == ran
    errors = compare.relative_errors(ours.weights, theirs.weights, compare.read(init)[0])
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], recipe)


# -------------------------------------------------------------------------------------------------------------- shards
def units_by_hand(weights: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names of the weights of each unit: embedding, every block, final norm and head."""
    blocks = sum(name.endswith("mlp.up_proj.weight") for name in weights)
    parts = [("model.embed_tokens.",), *((f"model.layers.{i}.",) for i in range(blocks)), ("model.norm.", "lm_head.")]
    return [[name for name in weights if name.startswith(names)] for names in parts]


def sizes_by_hand(weights: dict[str, torch.Tensor], shards: int) -> list[int]:
    """Numbers in each unit, with its padding."""
    sizes = [sum(weights[name].numel() for name in names) for names in units_by_hand(weights)]
    return [-(-size // shards) * shards for size in sizes]


def shards_of_this_rank(module):
    """A probe: of each unit the names of its parameters, its sizes, shard after training, and last gradient of that."""
    models, gradients, build_model, clip = [], [], module.build_model, module.clip_gradients
    module.build_model = lambda cfg: models.append(build_model(cfg)) or models[0]

    def before_clipping(cfg, model):
        pieces = [(unit.matrices.grad, unit.vectors.grad) for unit in model.units]
        gradients[:] = [torch.cat(pair).numpy() for pair in pieces]
        return clip(cfg, model)

    module.clip_gradients = before_clipping

    def report():
        names = {p: name for name, p in models[0].named_parameters()}
        units = zip(models[0].units, gradients or [None] * len(models[0].units))
        return [([names[p] for p in u.parameters], u.sizes, u.shard.numpy(), gradient) for u, gradient in units]

    return report


def joined(ranks) -> dict[str, torch.Tensor]:
    """The flat tensors of all parameters, and the padding of units, of shards that one after another make a copy."""
    whole = {}
    for i, unit in enumerate(zip(*ranks)):
        names, sizes, *_ = unit[0]
        flat = torch.cat([torch.from_numpy(shard) for _, _, shard, _ in unit])
        whole.update(zip([*names, f"padding {i}"], flat.split(sizes)))
    return whole


def norms(module):
    """A probe: loss and gradient norm of every step."""
    seen, train_step = [], module.train_step
    module.train_step = lambda *args: seen.append(train_step(*args)) or seen[-1]
    return lambda: [[loss.item(), norm.item()] for loss, norm in seen]


@functools.cache
def trained(recipe, steps=3):
    """A run with that probe."""
    return launch(recipe, 3, f"{SMALL} {FLAGS.get(recipe, '')} --steps {steps}", probe=shards_of_this_rank)


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [0, 3])
@in_units
def test_shards_make_the_weights(recipe, steps):
    """To the bit: those of the root before training, those that are saved after. What is padded stays zero."""
    run = trained(recipe, steps)
    ranks = run.probes
    weights = run.weights if steps else launch(ROOT_RECIPE, 1, f"{SMALL} --steps 0").weights
    parts = joined(ranks)
    padding = [parts.pop(f"padding {i}") for i in range(LAYERS + 2)]
    assert sum(map(len, padding)) >= LAYERS and not torch.cat(padding).any()
    assert set(parts) == set(weights)
    assert all(torch.equal(part, weights[name].flatten()) for name, part in parts.items())
    for rank in ranks:
        assert [set(names) for names, *_ in rank] == [set(names) for names in units_by_hand(weights)]
        assert [len(shard) for _, _, shard, _ in rank] == [size // 3 for size in sizes_by_hand(weights, 3)]


@every_recipe
def test_cases_of_equivalence_have_padding(recipe):
    """On 5 ranks, in every unit: else padding that counts would not be seen."""
    assert any(case[:2] == (recipe, 5) for case in equivalence.CASES)
    module = load(ROOT_RECIPE)
    words = equivalence.SHAPE.split()
    shape = {word[2:]: int(value) for word, value in zip(words[::2], words[1::2])}
    with torch.device("meta"):
        weights = dict(module.Model(module.Config(**shape)).named_parameters())
    sizes = [sum(weights[name].numel() for name in names) for names in units_by_hand(weights)]
    assert all(size % 5 for size in ([sum(sizes)] if recipe == ZERO1 else sizes))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype, shard", [("float32", 2), ("bfloat16", 3)])
def test_replicas_agree_to_the_bit(dtype, shard):
    """Shards of hsdp.py and their gradients, on all ranks that own the same, and the norm on all ranks."""
    flags = f"{SMALL} --shard {shard} --microbatches 1 --steps 3 --dtype {dtype}"
    ranks, logged = zip(*launch(HSDP, 6, flags, probe=probes.together(shards_of_this_rank, norms)).probes)
    assert len(logged[0]) == 3 and all(rank == logged[0] for rank in logged)
    for rank in range(shard, 6):
        for ours, theirs in zip(ranks[rank], ranks[rank % shard], strict=True):
            assert all((a == b).all() for a, b in zip(ours[2:], theirs[2:]))
    assert any((a[2] != b[2]).any() for a, b in zip(ranks[0], ranks[1]))  # these own others


def weights_that_compute(module):
    """A probe: for each step the shards at its start, and the weights with which each module runs forward."""
    steps, train_step, shards = [], module.train_step, shards_of_this_rank(module)
    build_model = module.build_model  # as shards_of_this_rank has wrapped it

    def build(cfg):
        model = build_model(cfg)
        for name, part in model.named_modules():
            if hasattr(part, "weight"):

                def keep(part, _, name=f"{name}.weight"):
                    steps[-1][1].setdefault(name, []).append(part.weight.detach().float().numpy().copy())

                part.register_forward_pre_hook(keep)
        return model

    def step(*args):
        steps.append(([(names, sizes, shard.copy(), 0) for names, sizes, shard, _ in shards()], {}))
        return train_step(*args)

    module.build_model, module.train_step = build, step
    return lambda: steps


@pytest.mark.thorough
@in_units
def test_weights_that_compute_are_rounded_shards(recipe):
    """In every forward of every step, to the bit, on every rank."""
    flags = f"{SMALL} {FLAGS.get(recipe, '')} --dtype bfloat16 --steps 2"
    ranks = launch(recipe, 3, flags, probe=weights_that_compute).probes
    for steps in zip(*ranks):
        whole = joined([start for start, _ in steps])
        for _, used in steps:
            assert len(used) == 9 * LAYERS + 3
            for name, seen in used.items():
                assert len(seen) == 2  # micro-batches
                wanted = whole[name].bfloat16().float()
                assert all(torch.equal(torch.from_numpy(weight).flatten(), wanted) for weight in seen), name
    first, second = (joined([rank[step][0] for rank in ranks]) for step in range(2))
    assert all((first[name] != second[name]).any() for name in first if "padding" not in name)


# ------------------------------------------------------------------------------------------------------- communication
SENT = {  # of each number that goes in, by a rank of n
    "allgather": lambda n: n - 1,
    "alltoall": lambda n: (n - 1) / n,
    "allreduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
}


class Collectives(TorchDispatchMode):
    """Collects (kind, dtype, numbers that go in, size of the group) of every collective, whoever asks for it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            kind = next((kind for kind in SENT if kind in function.name()), function.name())
            given = args[0 if kind == "allreduce" else 1]
            tensors = given if isinstance(given, list | tuple) else [given]
            group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            self.seen.append((kind, str(tensors[0].dtype), sum(map(torch.numel, tensors)), group.size()))
        return function(*args, **(kwargs or {}))


def communication(module):
    """A probe: the collectives of each step."""
    steps, train_step = [], module.train_step

    def step(*args):
        with Collectives() as mode:
            result = train_step(*args)
        steps.append(mode.seen)
        return result

    module.train_step = step
    return lambda: steps


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe, world, shards, micro, dtype, flags",
    [
        (OVERLAP, 3, 3, 1, "bfloat16", "--microbatches 1"),
        (OVERLAP, 2, 2, 1, "float32", "--microbatches 3"),  # which communicate once
        (ZERO2, 3, 3, 1, "bfloat16", "--microbatches 1"),
        (ZERO2, 3, 3, 4, "float32", "--microbatches 4"),
        (ZERO3, 3, 3, 1, "bfloat16", "--microbatches 1"),
        (ZERO3, 3, 3, 2, "float32", "--microbatches 2"),
        (HSDP, 6, 3, 2, "bfloat16", "--shard 3 --microbatches 2"),
        (HSDP, 4, 2, 3, "float32", "--shard 2 --microbatches 3"),
        (HSDP, 2, 1, 2, "bfloat16", "--shard 1 --microbatches 2"),
        (OFFLOAD, 3, 3, 2, "bfloat16", "--microbatches 2"),
    ],
)
def test_elements_and_bytes_that_leave_a_rank(recipe, world, shards, micro, dtype, flags):
    """The formulas of the headers, in every step; and the loss and the norm, each one element."""
    run = launch(recipe, world, f"{SMALL} {flags} --dtype {dtype} --steps 2", probe=communication)
    sizes = sizes_by_hand(run.weights, shards)
    everything, kept = sum(sizes), sizes[0] + sizes[-2] + sizes[-1]
    gathered = micro * (2 * everything - kept) if recipe in (ZERO3, HSDP) else everything
    share = (shards - 1) / shards
    for seen in itertools.chain(*run.probes):
        out = dict.fromkeys(SENT, 0)
        for kind, _, numbers, group in seen:
            out[kind] += SENT[kind](group) * numbers
        assert out["alltoall"] == pytest.approx(micro * share * everything, rel=1e-12)
        assert out["allgather"] == pytest.approx(gathered * share, rel=1e-12)
        assert {given for kind, given, *_ in seen if kind != "allreduce"} == {f"torch.{dtype}"}
        sums = [(given, numbers, group) for kind, given, numbers, group in seen if kind == "allreduce"]
        replicas = [("torch.float32", size // shards, world // shards) for size in reversed(sizes)]
        loss = norm = ("torch.float32", 1, world)
        assert sums == [*(replicas if recipe == HSDP else []), loss, norm]


@pytest.mark.thorough
def test_elements_and_bytes_of_the_simple_form():
    """zero1.py: gradients and weights once each, in fp32 whatever the matmuls have; and the loss and the norm."""
    run = launch(ZERO1, 3, f"{SMALL} --dtype bfloat16 --steps 2", probe=communication)
    elements = -(-sum(tensor.numel() for tensor in run.weights.values()) // 3) * 3
    one = ("allreduce", "torch.float32", 1, 3)
    wanted = [
        ("reduce_scatter", "torch.float32", elements, 3),
        one,
        one,
        ("allgather", "torch.float32", elements // 3, 3),
    ]
    assert all(seen == wanted for seen in itertools.chain(*run.probes))


# -------------------------------------------------------------------------------------------------------------- memory
def held() -> int:
    """Bytes of all tensors made since gc.freeze(), each storage once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def settled() -> int:
    """held(), when gloo's threads have let go of what they have sent: that is a moment after wait() has returned."""
    return min(time.sleep(0.02) or held() for _ in range(5))


def bytes_held(module):
    """A probe: bytes of all tensors when the gradients are there, and after the step; bytes of the batch."""
    gc.freeze()
    seen, clip, train_step = [], module.clip_gradients, module.train_step

    def step(cfg, model, optimizer, *batch):
        result = train_step(cfg, model, optimizer, *batch)
        seen.extend([settled(), sum(tensor.untyped_storage().nbytes() for tensor in batch)])
        return result

    module.clip_gradients = lambda *args: seen.append(settled()) or clip(*args)
    module.train_step = step
    return lambda: seen[-3:]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe, world, shards, flags",
    [
        (ZERO1, 3, 3, ""),
        (OVERLAP, 3, 3, ""),
        (ZERO2, 3, 3, ""),
        (ZERO3, 3, 3, ""),
        (ZERO3, 6, 6, ""),
        (HSDP, 6, 3, "--shard 3"),
        (OFFLOAD, 3, 3, ""),
        (COPY_ENGINES, 3, 3, ""),
    ],
)
def test_bytes_held(recipe, world, shards, flags):
    """The formulas of the headers, on every rank, of everything that is in memory between the steps."""
    run = launch(recipe, world, f"{SMALL} {flags} --dtype bfloat16 --steps 2", probe=bytes_held)
    sizes = sizes_by_hand(run.weights, shards)
    everything, largest = sum(sizes), max(sizes)
    weights = 0 if recipe in (ZERO3, HSDP, COPY_ENGINES) else 2 * everything
    if recipe == COPY_ENGINES:  # what all ranks share, of which each has mapped all
        weights += 2 * (world * largest + everything)
    gradients = 0
    original, moments, gradient = (times * everything // shards for times in (4, 8, 4))
    if recipe == ZERO1:  # one unit, weights and gradients in fp32
        everything = -(-sum(tensor.numel() for tensor in run.weights.values()) // shards) * shards
        weights, original, moments, gradient = 8 * everything, 0, 8 * everything // shards, 4 * everything // shards
    formula = [weights + gradients + original + moments + gradient]  # when the gradients are there
    formula += [weights + original + moments + (gradient if recipe == OFFLOAD else 0)]  # after the step
    for *bytes_in_memory, batch in run.probes:
        for ours, wanted in zip(bytes_in_memory, formula, strict=True):
            # the rest: batches and a part of them, the optimizer's count of steps, and what is logged
            assert 0 < ours - wanted < 3 * batch + 100 * (LAYERS + 2), (ours, wanted, batch)
        assert 3 * batch + 100 * (LAYERS + 2) < gradient / 2  # nothing of the formula would fit


def between_micro_batches(module):
    """A probe: bytes of all tensors when the second micro-batch begins, and dtypes of gradients that are there then."""
    gc.freeze()
    seen, forward, units, build_model = [], module.forward, [], module.build_model
    module.build_model = lambda cfg: (lambda model: units.extend(model.units) or model)(build_model(cfg))

    def watched(*args):
        kept = [getattr(unit, "sums", None) if hasattr(unit, "sums") else unit.gradient for unit in units]
        seen.append([settled(), {str(tensor.dtype) for tensor in kept if tensor is not None}])
        return forward(*args)

    module.forward = watched
    return lambda: [seen[2][0], *seen[3]]  # of the second step, when the moments are there


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, share", [(OVERLAP, 1), (ZERO2, 3)])
def test_gradients_between_micro_batches(recipe, share):
    """Stage 1 keeps whole gradients, stage 2 shards of them, both in fp32."""
    run = launch(recipe, 3, f"{SMALL} --dtype bfloat16 --steps 2", probe=between_micro_batches)
    wanted = 4 * sum(sizes_by_hand(run.weights, 3)) // share
    for before, after, dtypes in run.probes:
        assert 0 <= after - before - wanted < wanted // 20, (before, after, wanted)  # the rest: a loss
        assert dtypes == {"torch.float32"}


def while_it_is_built(module):
    """A probe: most whole tensors at a time while the model is built, most bytes held then, and bytes held after."""
    gc.freeze()
    drawn, whole, peak, after = [], [], [], []
    full_tensor, build_model = module.full_tensor, module.build_model

    def watched(*args):
        tensor = full_tensor(*args)
        drawn.append(StorageWeakRef(tensor.untyped_storage()))
        whole.append(sum(not storage.expired() for storage in drawn))
        peak.append(held())
        return tensor

    def build(cfg):
        model = build_model(cfg)
        after.append(held())
        return model

    module.full_tensor, module.build_model = watched, build
    return lambda: [max(whole), max(peak), *after]


def held_with_gradients(module):
    """A probe: bytes held when the gradients have just been allocated, and bytes held after the model is built."""
    gc.freeze()
    zeros_like, build_model, seen = torch.zeros_like, module.build_model, []

    def watched(*args):
        zeros = zeros_like(*args)
        seen.append(held())
        return zeros

    def build(cfg):
        torch.zeros_like = watched
        model = build_model(cfg)
        torch.zeros_like = zeros_like
        seen.append(held())
        return model

    module.build_model = build
    return lambda: seen


@pytest.mark.thorough
def test_zero1_frees_the_weights_that_it_moves():
    """... before it allocates gradients: 8 bytes per parameter while it is built, no more than in training."""
    run = launch(ZERO1, 3, f"{SMALL} --steps 0", probe=held_with_gradients)
    parameters = sum(tensor.numel() for tensor in run.weights.values())
    for built in run.probes:
        assert len(built) == 2 and all(8 * parameters <= bytes_held < 8.1 * parameters for bytes_held in built), built


@pytest.mark.thorough
@in_units
def test_no_rank_ever_has_the_whole_model(recipe):
    """... in float32, nor, in stage 3, at all: not while it is built either."""
    flags = f"{SMALL} {FLAGS.get(recipe, '')} --layers 12 --dtype bfloat16 --steps 0"
    run = launch(recipe, 3, flags, probe=while_it_is_built)
    sizes = sizes_by_hand(run.weights, 3)
    largest = 4 * max(tensor.numel() for tensor in run.weights.values())
    unit = 2 * max(sizes)
    for whole, peak, after in run.probes:
        assert whole == 1
        shards = (2 if recipe == OFFLOAD else 1) * 4 * sum(sizes) // 3  # offload.py's gradients are there as well
        weights = 2 * sum(sizes) if recipe in (OVERLAP, ZERO2, OFFLOAD) else 0
        shared = 2 * 3 * max(sizes) + 2 * sum(sizes) if recipe == COPY_ENGINES else 0
        assert shards + weights + shared <= after < shards + weights + shared + 1000
        assert peak - shared <= shards + weights + unit + 2 * largest


@pytest.mark.thorough
@freeing_weights
def test_two_blocks_at_a_time(recipe):
    """... have their weights, and of embedding and head one; none between the steps."""
    run = launch(recipe, 3, f"{SMALL} {FLAGS.get(recipe, '')} --steps 2", probe=probes.gathered_at_a_time)
    assert run.probes == [[2, 1, 0]] * 3


# --------------------------------------------------------------------------------------------------------------- order
def timeline(module):
    """A probe: (what happens, to which unit) in the last step, in order; of reductions, whether backward is running."""
    events, hidden, running, models = [], [], [False], []
    build_model, train_step = module.build_model, module.train_step
    gather, reduce_scatter, backward = module.gather, module.reduce_scatter, torch.Tensor.backward

    class Watched:
        def __init__(self, work, number):
            self.work, self.number = work, number

        def wait(self):
            events.append(("wait", self.number))
            return self.work.wait()

    def number(unit):
        return models[0].units.index(unit) if models else None

    def gathered(unit, *args):
        if unit.gathering is None:
            gather(unit, *args)
            events.append(("gather", number(unit)))
            unit.gathering = Watched(unit.gathering, number(unit))

    def reduced(unit, *args):
        events.append(("reduce", number(unit)))
        hidden.append(running[0])
        return reduce_scatter(unit, *args)

    def watch(part, what, i):
        part.register_forward_pre_hook(lambda *_: events.append((what, i)))

    def build(cfg):
        model = build_model(cfg)
        models.append(model)
        last = cfg.layers + 1
        watch(model.model.embed_tokens, "forward", 0)
        watch(model.model.norm, "forward", last)
        for i, block in enumerate(model.model.layers, 1):
            watch(block, "forward", i)
            block.register_forward_hook(lambda *_, i=i: events.append(("done", i)))
            block.mlp.down_proj.register_full_backward_pre_hook(lambda *_, i=i: events.append(("backward", i)))
            block.input_layernorm.register_full_backward_hook(lambda *_, i=i: events.append(("backward done", i)))
        model.lm_head.register_full_backward_pre_hook(lambda *_: events.append(("backward", last)))
        return model

    def step(*args):
        events.clear()
        hidden.clear()
        return train_step(*args)

    def watched_backward(loss):
        running[0] = True
        backward(loss)
        running[0] = False

    module.build_model, module.train_step, module.gather, module.reduce_scatter = build, step, gathered, reduced
    torch.Tensor.backward = watched_backward
    return lambda: (events, hidden)


HEAD = LAYERS + 1  # the last unit
BLOCKS = range(1, HEAD)


@functools.cache
def order(recipe):
    """The events of one step, which are the same on all ranks, and whether each reduction is beside backward."""
    runs = launch(recipe, 3, f"{SMALL} {FLAGS[recipe]} --microbatches 1 --steps 2", probe=timeline).probes
    assert all(run == runs[0] for run in runs)
    return runs[0]


@pytest.mark.thorough
@by_collectives
def test_order_of_forward(recipe):
    """Stages 1 and 2 gather all units first, stage 3 a block during the one before it. Each waits for its own."""
    events, _ = order(recipe)
    if recipe in (ZERO3, HSDP):
        wanted = [("gather", 0), ("gather", 1), ("wait", 0), ("forward", 0)]
        for i in BLOCKS:
            wanted += [("gather", i + 1), ("wait", i), ("forward", i), ("done", i)]
    else:
        wanted = [*(("gather", i) for i in range(HEAD + 1)), ("wait", 0), ("forward", 0)]
        for i in BLOCKS:
            wanted += [("wait", i), ("forward", i), ("done", i)]
    wanted += [("wait", HEAD), ("forward", HEAD), ("backward", HEAD)]
    assert events[: len(wanted)] == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [ZERO3, HSDP])
def test_order_of_backward(recipe):
    """A block is gathered while the one after it is backward, and the one after that has been. The embedding, the last
    block and the head are not gathered again."""
    events, _ = order(recipe)
    events = events[events.index(("backward", HEAD)) :]
    when = {event: place for place, event in enumerate(events)}
    assert [i for what, i in events if what == "gather"] == [*BLOCKS[-2::-1]]
    assert [i for what, i in events if what == "wait"] == [*BLOCKS[::-1]]
    for i in BLOCKS:
        assert when["wait", i] < when["backward", i] < when["backward done", i]
        if i > 1:
            assert when["wait", i] < when["gather", i - 1] < when["backward", i]
        if 1 < i < LAYERS:
            assert when["backward done", i + 1] < when["gather", i - 1]


@pytest.mark.thorough
@by_collectives
def test_reductions_run_beside_backward(recipe):
    """Of all units, from the last to the first on all ranks, each before the block before it is backward."""
    events, hidden = order(recipe)
    assert [i for what, i in events if what == "reduce"] == [*range(HEAD, -1, -1)] and all(hidden)
    when = {event: place for place, event in enumerate(events)}
    for i in BLOCKS:
        assert when["reduce", i + 1] < when["backward", i]


def gradients_alive(module):
    """A probe: most units that have gradients at a time; most gradients left when a reduction starts, or after all."""
    most, models, left = [0], [], [0]
    build_model, reduce_scatter, clip = module.build_model, module.reduce_scatter, module.clip_gradients

    def count(*_):
        most[0] = max(most[0], sum(any(p.grad is not None for p in unit.parameters) for unit in models[0].units))

    def build(cfg):
        models.append(build_model(cfg))
        for p in models[0].parameters():
            p.register_post_accumulate_grad_hook(count)  # before the recipe's own
        return models[0]

    def remaining():
        left[0] = max(left[0], sum(p.grad is not None for p in models[0].parameters()))

    module.build_model = build
    module.reduce_scatter = lambda *args: remaining() or reduce_scatter(*args)
    module.clip_gradients = lambda *args: remaining() or clip(*args)
    return lambda: [most[0], left[0]]


def on_their_way(module):
    """A probe: most flat gradients of a backward that have been launched and not waited for, when one more is made."""
    most, launched, waited = [0], [0], set()
    take, reduce_scatter, backward = module.take_gradients, module.reduce_scatter, torch.Tensor.backward

    class Watched:
        def __init__(self, work):
            self.work, self.number = work, launched[0]
            launched[0] += 1

        def wait(self):
            waited.add(self.number)
            return self.work.wait()

    def counted(*args):
        most[0] = max(most[0], launched[0] - len(waited) + 1)
        return take(*args)

    def again(*args, **kwargs):
        launched[0] = 0
        waited.clear()
        return backward(*args, **kwargs)

    module.take_gradients, module.reduce_scatter = counted, lambda *args: Watched(reduce_scatter(*args))
    torch.Tensor.backward = again
    return lambda: most[0]


@pytest.mark.thorough
@by_collectives
def test_gradients_of_two_units_are_on_their_way(recipe):
    """... at most: the memory of the one before is waited for, and used again."""
    run = launch(recipe, 3, f"{SMALL} {FLAGS[recipe]} --steps 1", probe=on_their_way)
    assert run.probes == [2] * 3


def error_of_sums(module):
    """A probe: relative error of gradients as reduce_scatter adds them, of one micro-batch and of two, in bfloat16."""
    models, build_model = [], module.build_model
    module.build_model = lambda cfg: models.append(build_model(cfg)) or models[0]

    def report():
        unit, alone, errors = models[0].units[1], module.__name__.endswith("overlap"), []  # which adds them up before
        rank, world = unit.dp.rank(), unit.dp.size()
        flats = torch.randn(2, world, len(unit.full), generator=torch.Generator().manual_seed(0)).bfloat16()
        for i, flat in enumerate(flats):
            module.reduce_scatter(unit, flat[rank].clone(), None)
            exact = flats[i if alone else 0 : i + 1].double().sum((0, 1)).chunk(world)[rank]
            summed = torch.cat([unit.matrices.grad, unit.vectors.grad])
            errors.append(((summed - exact).norm() / exact.norm()).item())
            if hasattr(unit, "norm"):
                unit.norm = torch.ones(())
        return errors

    module.dist.destroy_process_group = lambda: None  # the report needs it
    return report


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [OVERLAP, ZERO2, ZERO3, OFFLOAD])
def test_sums_are_in_float32(recipe):
    """bfloat16 alone would be wrong by 1e-3."""
    run = launch(recipe, 3, f"{SMALL} --dtype bfloat16 --steps 0", probe=error_of_sums)
    assert all(max(errors) < 1e-6 for errors in run.probes)


@pytest.mark.thorough
@in_units
def test_gradients_are_freed_at_once(recipe):
    """One unit's at a time: when its reduction starts they have moved, and none is left."""
    run = launch(recipe, 3, f"{SMALL} {FLAGS.get(recipe, '')} --steps 2", probe=gradients_alive)
    assert run.probes == [[1, 0]] * 3


# -------------------------------------------------------------------------------------------------------- copy engines
def copied_from_others(module):
    """A probe of one step: elements copied from the memory of other ranks."""
    copied, shared, in_step = [0], [], [False]
    share, train_step, copy = module.share, module.train_step, torch.Tensor.copy_

    def watched(*args):
        memory, barrier = share(*args)
        shared.extend((r, tensor) for r, tensor in enumerate(memory) if r != module.dist.get_rank())
        return memory, barrier

    def counting(self, other, *args):
        starts = [(tensor.data_ptr(), tensor.nbytes) for _, tensor in shared]
        if in_step[0] and any(start <= other.data_ptr() < start + size for start, size in starts):
            copied[0] += other.numel()
        return copy(self, other, *args)

    def step(*args):
        in_step[0] = True
        return train_step(*args)

    module.share, module.train_step, torch.Tensor.copy_ = watched, step, counting
    return lambda: copied[0]


@pytest.mark.thorough
def test_copies_of_copy_engines():
    """As many elements as zero3.py's."""
    run = launch(COPY_ENGINES, 3, f"{SMALL} --steps 1 --microbatches 1", probe=copied_from_others)
    sizes = sizes_by_hand(run.weights, 3)
    numbers = 3 * sum(sizes) - sizes[0] - sizes[-2] - sizes[-1]
    assert run.probes == [2 * numbers // 3] * 3


@pytest.mark.thorough
def test_no_file_of_copy_engines_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch(COPY_ENGINES, 3, f"{SMALL} --steps 1")
    assert [path for path in tmp_path.rglob("*") if path.name in "012"] == []


def test_copy_engines_need_one_host(monkeypatch):
    module = load(COPY_ENGINES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="--nnodes 2"):
        module.check(module.Config(device="cpu"), 4)


# ---------------------------------------------------------------------------------------------------------------- rest
@pytest.mark.thorough
@in_units
def test_padding_has_no_gradient(recipe):
    """... when the norm is taken, though buffers have been used for other units before."""
    flags = f"{SMALL} --batch 10 {FLAGS.get(recipe, '').replace('3', '5')} --steps 2"
    run = launch(recipe, 5, flags, probe=shards_of_this_rank)
    for unit in zip(*run.probes):
        padding = unit[0][1][-1]
        gradient = torch.cat([torch.from_numpy(gradient) for *_, gradient in unit])
        assert padding and gradient.any() and not gradient[len(gradient) - padding :].any()


@pytest.mark.thorough
def test_transformers_loads_what_they_save(tmp_path):
    """Strictly, and computes the loss with which the root continues."""
    shape, files = witness.FLAGS.replace("float64", "float32"), {}
    for recipe in [ZERO1, *FLAGS, COPY_ENGINES, TORCH_FSDP, ACCELERATE_FSDP]:
        file = tmp_path / f"{recipe[8:-3]}.safetensors"
        flags = "--microbatches 1" if recipe in [*FLAGS, COPY_ENGINES] else ""
        save_file(launch(recipe, 4, f"{shape} {flags} --steps 2 --lr 1e-2").weights, file)
        files[str(file)] = launch(ROOT_RECIPE, 1, f"{shape} --steps 1 --init {file}").history[0][0]

    def theirs():
        from safetensors.torch import load_file
        from transformers import LlamaForCausalLM

        model, losses = LlamaForCausalLM(witness.llama_config()), []
        for file in files:
            model.load_state_dict(load_file(file), strict=True)
            losses.append(witness.loss_of(model, shape)[1].item())
        return losses

    for (file, ours), loss in zip(files.items(), isolated(theirs), strict=True):
        assert abs(loss / ours - 1) < equivalence.TOLERANCE["float32"], file


@pytest.mark.parametrize(
    "recipe, world, flags, words",
    [
        *(
            (recipe, 3, "--batch 16", ["--batch 16", "processes, 3"])
            for recipe in [ZERO1, *FLAGS, COPY_ENGINES, TORCH_FSDP, ACCELERATE_FSDP]
        ),
        (OVERLAP, 2, "--microbatches 3", ["--microbatches 3", "8 sequences"]),
        (ZERO2, 2, "--microbatches 3", ["--microbatches 3", "8 sequences"]),
        (COPY_ENGINES, 2, "--microbatches 3", ["--microbatches 3", "8 sequences"]),
        (ZERO3, 2, "--microbatches 0", ["--microbatches 0", "at least 1"]),
        (OFFLOAD, 4, "--microbatches 3", ["--microbatches 3", "4 sequences"]),
        (HSDP, 4, "--shard 3", ["--shard 3", "processes, 4"]),
        (HSDP, 2, "--shard 4", ["--shard 4", "processes, 2"]),
        (HSDP, 2, "--shard 0", ["--shard 0", "at least 1"]),
        (HSDP, 2, "--shard 1 --microbatches 3", ["--microbatches 3", "8 sequences"]),
    ],
)
def test_bad_flags(recipe, world, flags, words):
    line = refusal(load(recipe), world, f"--device cpu {flags}")
    assert "\n" not in line and all(word in line for word in words), line


def freezes_the_embedding(module):
    """A probe: as whoever fine-tunes does."""
    init = module.Model.__init__

    def frozen(self, *args):
        init(self, *args)
        self.model.embed_tokens.weight.requires_grad_(False)

    module.Model.__init__ = frozen
    return lambda: None


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [ZERO1, OVERLAP, OFFLOAD])  # others share these definitions
def test_what_is_frozen_does_not_train_in_silence(recipe):
    with pytest.raises(RankFailed, match="a frozen parameter"):
        launch(recipe, 2, f"{SMALL} --steps 1", probe=freezes_the_embedding)
