"""The ZeRO recipes train as the root does, hold and communicate what they say, and overlap it as they say."""

import functools
import gc
import itertools
import subprocess

import compare
import equivalence
import probes
import pytest
import torch
import witness
from launch import ROOT, RankFailed, isolated, launch, load
from safetensors.torch import save_file
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

ROOT_RECIPE = "01_single_gpu/train.py"
ZERO1, ZERO2, ZERO3, HSDP, OFFLOAD = (f"03_zero/{name}.py" for name in ("zero1", "zero2", "zero3", "hsdp", "offload"))
TORCH_FSDP, ACCELERATE_FSDP = "03_zero/torch_fsdp.py", "03_zero/accelerate_fsdp.py"
LAYERS = 4
SMALL = f"--device cpu --layers {LAYERS} --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 12"
FLAGS = {ZERO1: "", ZERO2: "", ZERO3: "", HSDP: "--shard 3", OFFLOAD: ""}  # for 3 ranks, which divide no block
every_recipe = pytest.mark.parametrize("recipe", FLAGS)
accumulating = pytest.mark.parametrize("recipe", [ZERO2, ZERO3, HSDP, OFFLOAD])
in_places = pytest.mark.parametrize("recipe", [ZERO3, HSDP])  # where blocks take turns in two places


@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0].startswith("03")])
def test_equals_root(recipe, world, flags):
    equivalence.check(recipe, world, flags)


@pytest.mark.parametrize("when", ["at once", "late"])
@pytest.mark.parametrize(
    "recipe, world, flags",
    [
        (ZERO1, 2, ""),
        (ZERO2, 2, "--microbatches 3"),
        (ZERO3, 2, "--microbatches 3"),
        (HSDP, 4, "--microbatches 3"),
        (OFFLOAD, 2, "--microbatches 3"),
    ],
)
def test_whenever_streams_get_to_it(recipe, world, flags, when):
    """A collective writes at some time between its start and the end of the wait for it, a side stream likewise."""
    equivalence.check(recipe, world, flags, probe=probes.streams(when))


@pytest.mark.parametrize("recipe", [ZERO1, ZERO3])
def test_gradients_in_the_order_of_a_compiled_block(recipe):
    probe = probes.together(equivalence.unfused_attention, probes.streams("at once"))
    equivalence.check(recipe, 2, "--compile", probe=probe)


@functools.cache
def root_with_one_sequence_alone(flags):
    """The root's run with that probe."""
    return launch(ROOT_RECIPE, 1, flags, probe=probes.one_sequence_alone_runs_a_block)


@pytest.mark.parametrize("mode, ran", [(equivalence.GRADIENT, [1, 0, 0]), (equivalence.TRAINING, [2, 0, 2])])
@pytest.mark.parametrize("recipe", [ZERO1, ZERO2, OFFLOAD])
def test_parameters_without_gradient_on_some_ranks(recipe, mode, ran):
    """... count as zero there; all ranks reduce in the same order."""
    init = equivalence.start(ROOT_RECIPE, equivalence.SHAPE)
    common = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init} {mode}"
    theirs = root_with_one_sequence_alone(common)
    ours = launch(recipe, 3, common, probe=probes.one_sequence_alone_runs_a_block, timeout=60)
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
    """A probe: names of the parameters, sizes with padding, shard and its gradient of each unit, after training."""
    models, original = [], module.build_model
    module.build_model = lambda cfg: models.append(original(cfg)) or models[0]

    def report():
        names = {p: name for name, p in models[0].named_parameters()}
        units = models[0].units
        return [([names[p] for p in u.parameters], u.sizes, u.shard.numpy(), u.gradient.numpy()) for u in units]

    return report


def joined(ranks) -> dict[str, torch.Tensor]:
    """The flat tensors of all parameters, and the padding of units, of shards that one after another make a copy."""
    whole = {}
    for i, unit in enumerate(zip(*ranks)):
        names, sizes, *_ = unit[0]
        flat = torch.cat([torch.from_numpy(shard) for _, _, shard, _ in unit])
        whole.update(zip([*names, f"padding {i}"], flat.split(sizes)))
    return whole


def places_of_units(module):
    """A probe: the address to which each unit is gathered."""
    models, original = [], module.build_model
    module.build_model = lambda cfg: models.append(original(cfg)) or models[0]
    return lambda: [unit.full.data_ptr() for unit in models[0].units]


def norms(module):
    """A probe: loss and gradient norm of every step."""
    seen, train_step = [], module.train_step
    module.train_step = lambda *args: seen.append(train_step(*args)) or seen[-1]
    return lambda: [[loss.item(), norm.item()] for loss, norm in seen]


def hooks_left(module):
    """A probe: hooks on parameters after training."""
    models, original = [], module.build_model
    module.build_model = lambda cfg: models.append(original(cfg)) or models[0]
    return lambda: sum(
        len(p._post_accumulate_grad_hooks or {}) + len(p._backward_hooks or {}) for p in models[0].parameters()
    )


@functools.cache
def trained(recipe, steps=3):
    """A run with these four probes."""
    probe = probes.together(shards_of_this_rank, norms, hooks_left, places_of_units)
    return launch(recipe, 3, f"{SMALL} {FLAGS[recipe]} --steps {steps}", probe=probe)


@pytest.mark.parametrize("steps", [0, 3])
@every_recipe
def test_shards_make_the_weights(recipe, steps):
    """To the bit: those of the root before training, those that are saved after. What is padded stays zero."""
    run = trained(recipe, steps)
    ranks = [shards for shards, *_ in run.probes]
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
    module = load(recipe)
    words = equivalence.SHAPE.split()
    shape = {word[2:]: int(value) for word, value in zip(words[::2], words[1::2])}
    with torch.device("meta"):
        weights = dict(module.Model(module.Config(**shape)).named_parameters())
    sizes = [sum(weights[name].numel() for name in names) for names in units_by_hand(weights)]
    assert all(size % 5 for size in sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_agree_to_the_bit(dtype):
    """Shards of hsdp.py and their gradients, on all ranks that own the same."""
    flags = f"{SMALL} --shard 2 --microbatches 1 --steps 3 --dtype {dtype}"
    ranks = launch(HSDP, 6, flags, probe=shards_of_this_rank).probes
    for rank in range(2, 6):
        for ours, theirs in zip(ranks[rank], ranks[rank % 2], strict=True):
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


@every_recipe
def test_weights_that_compute_are_rounded_shards(recipe):
    """In every forward of every step, to the bit, on every rank."""
    flags = f"{SMALL} {FLAGS[recipe]} --dtype bfloat16 --steps 2"
    ranks = launch(recipe, 3, flags, probe=weights_that_compute).probes
    micro = 1 if recipe == ZERO1 else 2
    for steps in zip(*ranks):
        whole = joined([start for start, _ in steps])
        for _, used in steps:
            assert len(used) == 9 * LAYERS + 3
            for name, seen in used.items():
                assert len(seen) == micro
                wanted = whole[name].bfloat16().float()
                assert all(torch.equal(torch.from_numpy(weight).flatten(), wanted) for weight in seen), name
    first, second = (joined([rank[step][0] for rank in ranks]) for step in range(2))
    assert all((first[name] != second[name]).any() for name in first if "padding" not in name)


# ------------------------------------------------------------------------------------------------------- communication
SENT = {  # of each number that goes in, by a rank of n
    "allgather": lambda n: n - 1,
    "alltoall": lambda n: (n - 1) / n,
    "allreduce": lambda n: 2 * (n - 1) / n,
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


@pytest.mark.parametrize(
    "recipe, world, shards, micro, dtype, flags",
    [
        (ZERO1, 3, 3, 1, "bfloat16", ""),
        (ZERO1, 2, 2, 1, "float32", ""),
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
def test_numbers_and_bytes_that_leave_a_rank(recipe, world, shards, micro, dtype, flags):
    """The formulas of the headers, in every step; and the loss and the norm, each one number."""
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
        loss, norm = ("torch.float32", 1, world), ("torch.float32", 1, shards if recipe == HSDP else world)
        assert sums == [*(replicas if recipe == HSDP else []), loss, norm]


# -------------------------------------------------------------------------------------------------------------- memory
def held() -> int:
    """Bytes of all tensors made since gc.freeze(), each storage once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bytes_held(module):
    """A probe: bytes of all tensors when the gradients are there, and after the step; bytes of the batch."""
    gc.freeze()
    seen, clip, train_step = [], module.clip_gradients, module.train_step

    def step(cfg, model, optimizer, *batch):
        result = train_step(cfg, model, optimizer, *batch)
        seen.extend([held(), sum(tensor.untyped_storage().nbytes() for tensor in batch)])
        return result

    module.clip_gradients = lambda *args: seen.append(held()) or clip(*args)
    module.train_step = step
    return lambda: seen[-3:]


@pytest.mark.parametrize(
    "recipe, world, shards, flags",
    [
        (ZERO1, 3, 3, ""),
        (ZERO2, 3, 3, ""),
        (ZERO3, 3, 3, ""),
        (ZERO3, 6, 6, ""),
        (HSDP, 6, 3, "--shard 3"),
        (OFFLOAD, 3, 3, ""),
    ],
)
def test_bytes_held(recipe, world, shards, flags):
    """The formulas of the headers, on every rank, of everything that is in memory between the steps."""
    run = launch(recipe, world, f"{SMALL} {flags} --dtype bfloat16 --steps 2", probe=bytes_held)
    sizes = sizes_by_hand(run.weights, shards)
    everything, largest = sum(sizes), max(sizes)
    exact = [sum(run.weights[name].numel() for name in names) for names in units_by_hand(run.weights)]
    places = 2 * (max(exact[0], exact[-1]) + 2 * exact[1] + 3 * world)  # room for an end of the model and two blocks
    weights = places if recipe in (ZERO3, HSDP) else 2 * everything
    gradients = 2 * everything if recipe == ZERO1 else 2 * 2 * largest  # all of them, or two units on their way
    original, moments, gradient = (times * everything // shards for times in (4, 8, 4))
    formula = [weights + gradients + original + moments + gradient]  # when the gradients are there
    formula += [formula[0] - (gradients if recipe == ZERO1 else 0)]  # zero1.py frees them after the step
    for *bytes_in_memory, batch in run.probes:
        for ours, wanted in zip(bytes_in_memory, formula, strict=True):
            # the rest: batches and a part of them, the optimizer's count of steps, and what is logged
            assert 0 < ours - wanted < 3 * batch + 100 * (LAYERS + 2), (ours, wanted, batch)
        assert 3 * batch + 100 * (LAYERS + 2) < gradient / 2  # nothing of the formula would fit


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


@every_recipe
def test_no_rank_ever_has_the_whole_model(recipe):
    """... in float32, nor, in stage 3, at all: not while it is built either."""
    flags = f"{SMALL} {FLAGS[recipe]} --layers 12 --dtype bfloat16 --steps 0"
    run = launch(recipe, 3, flags, probe=while_it_is_built)
    sizes = sizes_by_hand(run.weights, 3)
    largest = 4 * max(tensor.numel() for tensor in run.weights.values())
    for whole, peak, after in run.probes:
        assert whole == 2  # one is drawn while `own` is still a part of the one before
        assert peak <= after + 2 * largest
        shards = 2 * 4 * sum(sizes) // 3  # weights and gradients
        buffers = 2 * 2 * max(sizes) + (2 * 3 * max(sizes) if recipe in (ZERO3, HSDP) else 2 * sum(sizes))
        assert shards < after < shards + buffers + 1000
        if recipe in (ZERO3, HSDP):
            assert peak - shards < 2 * sum(sizes)  # whole weights would have this in bfloat16 alone


@in_places
def test_blocks_take_turns_in_two_places(recipe):
    """... neighbours in different ones, and a third is for the embedding or the head."""
    for _, _, _, places in trained(recipe).probes:
        (end, *blocks, head), distinct = places, len(set(places))
        assert end == head and distinct == 3 and all(a != b for a, b in itertools.pairwise(blocks))


# --------------------------------------------------------------------------------------------------------------- order
def timeline(module):
    """A probe: what happens in the last step, in order: (what, unit); hidden is what starts while backward runs."""
    events, running, models = [], [False], []
    build_model, train_step, gather, backward = (
        getattr(module, name) for name in ("build_model", "train_step", "gather", "backward")
    )
    reduce_scatter, autograd = module.reduce_scatter, torch.Tensor.backward

    class Watched:
        def __init__(self, work, number):
            self.work, self.number = work, number

        def wait(self):
            events.append(("wait", self.number))
            return self.work.wait()

    def number(unit):
        return models[0].units.index(unit) if models else None

    def gathered(unit, *args):
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

    def watched_autograd(*args, **kwargs):
        running[0] = True
        autograd(*args, **kwargs)
        running[0] = False

    hidden = []
    module.build_model, module.train_step, module.gather, module.reduce_scatter = build, step, gathered, reduced
    torch.Tensor.backward = watched_autograd
    return lambda: (events, hidden)


HEAD = LAYERS + 1  # the last unit
BLOCKS = range(1, HEAD)


@functools.cache
def order(recipe):
    """The events of one step, which are the same on all ranks, and whether each reduction is beside backward."""
    micro = "" if recipe == ZERO1 else "--microbatches 1"
    runs = launch(recipe, 3, f"{SMALL} {FLAGS[recipe]} {micro} --steps 2", probe=timeline).probes
    assert all(run == runs[0] for run in runs)
    return runs[0]


@every_recipe
def test_order_of_forward(recipe):
    """Stages 1 and 2 gather all units first, stage 3 a block during the one before it. Each waits for its own."""
    events, _ = order(recipe)
    if recipe in (ZERO3, HSDP):
        wanted = [("gather", 0), ("gather", 1), ("wait", 0), ("forward", 0)]
        for i in BLOCKS:
            wanted += [("wait", i), ("gather", i + 1), ("forward", i), ("done", i)]
    else:
        wanted = [] if recipe == OFFLOAD else [("gather", i) for i in range(HEAD + 1)]
        wanted += [("wait", 0), ("forward", 0)]
        for i in BLOCKS:
            wanted += [("wait", i), ("forward", i), ("done", i)]
    wanted += [("wait", HEAD), ("forward", HEAD), ("backward", HEAD)]
    assert events[: len(wanted)] == wanted
    if recipe == OFFLOAD:  # after the step, for the next forward
        assert events[-HEAD - 1 :] == [("gather", i) for i in range(HEAD + 1)]
        assert ("gather", 0) not in events[: -HEAD - 1]


@in_places
def test_order_of_backward(recipe):
    """A block is gathered while the one after it is backward, in whose place the one after that has been read. The
    embedding, the last block and the head are not gathered again."""
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


@every_recipe
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


@accumulating
def test_gradients_are_freed_at_once(recipe):
    """One unit's at a time: when its reduction starts they have moved, and none is left."""
    run = launch(recipe, 3, f"{SMALL} {FLAGS[recipe]} --steps 2", probe=gradients_alive)
    assert run.probes == [[1, 0]] * 3


def test_gradients_of_stage_1_stay():
    (most, _), *_ = launch(ZERO1, 3, f"{SMALL} --steps 1", probe=gradients_alive).probes
    assert most == LAYERS + 2


@every_recipe
def test_side_streams_wait_for_the_main_one(recipe):
    """... whenever they are used: else they would read weights or gradients that are not there yet."""
    run = launch(recipe, 3, f"{SMALL} {FLAGS[recipe]} --steps 2", probe=probes.streams("late"))
    units, micro = LAYERS + 2, 1 if recipe == ZERO1 else 2
    reductions = 2 * micro * units
    uses = [[reductions] * 2]
    if recipe in (ZERO3, HSDP):
        gathers = 2 * micro * (2 * units - 3)
        uses = [[gathers] * 2, *uses]
    if recipe == OFFLOAD:
        uses = [[reductions + 2 * units, reductions]]  # the CPU starts these gathers when all gradients have been read
    assert run.probes == [uses] * 3


def offload_and_the_cpu(module):
    """A probe: when the last gradient is reduced, when the CPU waits for the GPU and when it reads gradients."""
    events, build_model, reduce_scatter = [], module.build_model, module.reduce_scatter
    norm = module.nn.utils.get_total_norm

    class Watched(probes.Stream):
        def synchronize(self):
            events.append("synchronize")
            super().synchronize()

    streams = probes.streams("late")(module)
    build_model = module.build_model

    def build(cfg):
        model = build_model(cfg)
        model.stream = Watched(True)
        return model

    module.build_model = build
    module.reduce_scatter = lambda *args: events.append("reduce") or reduce_scatter(*args)
    module.nn.utils.get_total_norm = lambda *args: events.append("norm") or norm(*args)
    return lambda: (events, streams())[0]


def test_the_cpu_waits_for_the_gpu():
    """A wait of the main stream does not stop the CPU, which reads the gradients."""
    for events in launch(OFFLOAD, 2, f"{SMALL} --steps 2", probe=offload_and_the_cpu).probes:
        assert events == 2 * [*["reduce"] * 2 * (LAYERS + 2), "synchronize", "norm"]


# ---------------------------------------------------------------------------------------------------------------- rest
@every_recipe
def test_all_ranks_have_the_same_norm(recipe):
    """To the bit; else they would clip by different factors."""
    run = trained(recipe)
    logged = [[loss, norm] for loss, norm, _ in run.history]
    assert len(logged) == 3 and [seen for _, seen, *_ in run.probes] == [logged] * 3


@every_recipe
def test_padding_has_no_gradient(recipe):
    """... when the norm is taken, though buffers have been used for other units before."""
    flags = f"{SMALL} --batch 10 {FLAGS[recipe].replace('3', '5')} --steps 2"
    run = launch(recipe, 5, flags, probe=shards_of_this_rank)
    for unit in zip(*run.probes):
        padding = unit[0][1][-1]
        gradient = torch.cat([torch.from_numpy(gradient) for *_, gradient in unit])
        assert padding and gradient.any() and not gradient[len(gradient) - padding :].any()


@every_recipe
def test_no_hook_is_left(recipe):
    assert [hooks for _, _, hooks, _ in trained(recipe).probes] == [0] * 3


def test_transformers_loads_what_they_save(tmp_path):
    """Strictly, and computes the loss with which the root continues."""
    shape, files = witness.FLAGS.replace("float64", "float32"), {}
    for recipe in [*FLAGS, TORCH_FSDP, ACCELERATE_FSDP]:
        file = tmp_path / f"{recipe[8:-3]}.safetensors"
        flags = "--microbatches 1" if recipe in FLAGS and recipe != ZERO1 else ""
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
            for recipe in [*FLAGS, TORCH_FSDP, ACCELERATE_FSDP]
        ),
        (ZERO2, 2, "--microbatches 3", ["--microbatches 3", "8 sequences", "--batch 16"]),
        (ZERO3, 2, "--microbatches 0", ["--microbatches 0", "at least 1"]),
        (OFFLOAD, 4, "--microbatches 3", ["--microbatches 3", "4 sequences", "--batch 16"]),
        (HSDP, 4, "--shard 3", ["--shard 3", "processes, 4"]),
        (HSDP, 2, "--shard 4", ["--shard 4", "processes, 2"]),
        (HSDP, 2, "--shard 0", ["--shard 0", "at least 1"]),
        (HSDP, 2, "--shard 1 --microbatches 3", ["--microbatches 3", "8 sequences"]),
    ],
)
def test_bad_flags(recipe, world, flags, words):
    with pytest.raises(RankFailed) as failure:
        launch(recipe, world, f"--device cpu {flags}", probe=probes.never_a_process_group, timeout=60, save=False)
    (line,) = failure.value.output.splitlines()
    assert all(word in line for word in words), line


@every_recipe
def test_a_failing_rank_ends_the_run(recipe):
    with pytest.raises(RankFailed, match="rank 1 has had enough|Connection closed"):
        launch(recipe, 3, f"{SMALL} {FLAGS[recipe]} --steps 9", probe=dies_after_the_first_step, timeout=60)


def dies_after_the_first_step(module):
    """A probe: rank 1 fails while the others go on to a collective that it will never join."""
    original, steps = module.train_step, []

    def train_step(*args):
        steps.append(1)
        if module.dist.get_rank() == 1 and len(steps) == 2:
            raise RuntimeError("rank 1 has had enough")
        return original(*args)

    module.train_step = train_step
    return lambda: None


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nproc_per_node", "2", ZERO3],
        ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", ACCELERATE_FSDP],
    ],
    ids=["torchrun", "accelerate"],
)
def test_as_a_user_types_it(command):
    command = [*command, "--device", "cpu", "--steps", "2"]
    end = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True, timeout=120)
    assert [line.split("  loss")[0].strip() for line in end.stdout.splitlines()] == ["step 1", "step 2", "median"]
