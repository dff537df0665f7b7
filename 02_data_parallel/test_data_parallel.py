"""The data-parallel recipes train as the root does, their replicas stay alike, and they communicate what they say."""

import itertools
import re
import subprocess
import tempfile
import time

import compare
import equivalence
import probes
import pytest
import simulation
import torch
from contract import refusal
from launch import ROOT, launch, load, once
from streams import streams

NAIVE, OVERLAP, BUCKETED = (f"02_data_parallel/{name}.py" for name in ("naive", "overlap", "bucketed"))
COALESCED, NO_SYNC, DILOCO = (f"02_data_parallel/{name}.py" for name in ("coalesced", "no_sync", "diloco"))
COPY_ENGINES, ACCELERATE = "02_data_parallel/copy_engines.py", "02_data_parallel/accelerate_ddp.py"
SMALL = "--device cpu --layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8"
FLAGS = {
    NAIVE: "",
    OVERLAP: "",
    BUCKETED: "--bucket_mb 0.02",
    COALESCED: "--bucket_mb 0.02",
    NO_SYNC: "--bucket_mb 0.02 --microbatches 2",
    COPY_ENGINES: "--bucket_mb 0.02",
    DILOCO: "--inner_steps 2",
    "02_data_parallel/torch_ddp.py": "",
    ACCELERATE: "",
}
IN_HOOKS = [OVERLAP, BUCKETED, COALESCED, NO_SYNC, COPY_ENGINES]
every_recipe = pytest.mark.parametrize("recipe", FLAGS)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0].startswith("02")])
def test_equals_root(recipe, world, flags):
    equivalence.check_quickly(recipe, world, flags)


def test_diloco_equals_its_simulation():
    simulation.check()


def test_workers_of_diloco_agree_to_the_bit():
    """... after an outer step."""
    first, *others = launch(DILOCO, 4, f"{SMALL} --inner_steps 2 --steps 3", probe=probes.whole_parameters).probes
    assert len(first) > 10 and all(replica == first for replica in others)


@once
def root_with_one_sequence_alone(flags):
    """The root's run with that probe."""
    return launch("01_single_gpu/train.py", 1, flags, probe=probes.one_sequence_alone_runs_a_block)


@pytest.mark.thorough
@pytest.mark.parametrize("mode, ran", [(equivalence.GRADIENT, [1, 0, 0]), (equivalence.TRAINING, [2, 0, 2])])
@pytest.mark.parametrize("recipe", [NAIVE, OVERLAP, BUCKETED, COALESCED, NO_SYNC, COPY_ENGINES])
def test_parameters_without_gradient_on_some_ranks(recipe, mode, ran):
    """... count as zero there; the sum is right, in whatever order, and whatever bucket, they are reduced."""
    init = equivalence.start(equivalence.root_of(recipe), equivalence.SHAPE)
    common = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init} {mode}"
    theirs = root_with_one_sequence_alone(common)
    ours = launch(recipe, 3, f"{common} {FLAGS[recipe]}", probe=probes.one_sequence_alone_runs_a_block, timeout=60)
    assert theirs.probes == [sum(ran)] and ours.probes == ran
    errors = compare.relative_errors(ours.weights, theirs.weights, compare.read(init)[0])
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], recipe)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["at once", "late"])
@pytest.mark.parametrize("recipe", IN_HOOKS)
def test_whenever_streams_get_to_it(recipe, when):
    """A reduction happens between its start and the wait for it. A compiled block makes gradients in its own order."""
    probe = probes.together(equivalence.unfused_attention, streams(when))
    equivalence.check(recipe, 2, f"{FLAGS[recipe]} --compile", probe=probe)


def watch_backward() -> list[bool]:
    """Whether backward is running, in a list of one."""
    running, backward = [False], torch.Tensor.backward

    def watched(*args, **kwargs):
        running[0] = True
        backward(*args, **kwargs)
        running[0] = False

    torch.Tensor.backward = watched
    return running


def collectives(module):
    """A probe: (size, whether it is asynchronous, whether backward is still running) of every all-reduce."""
    seen, running, all_reduce = [], watch_backward(), module.dist.all_reduce
    coalesced = module.dist.ProcessGroup.allreduce_coalesced  # of a list of tensors, always asynchronous

    def counting(tensor, *args, async_op=False, **kwargs):
        seen.append((tensor.numel(), async_op, running[0]))
        return all_reduce(tensor, *args, async_op=async_op, **kwargs)

    def counting_lists(group, tensors):
        seen.append((sum(tensor.numel() for tensor in tensors), True, running[0]))
        return coalesced(group, tensors)

    module.dist.all_reduce, module.dist.ProcessGroup.allreduce_coalesced = counting, counting_lists
    return lambda: seen


def buckets_by_hand(sizes: list[int], limit: float) -> list[int]:
    """Sizes of the buckets of parameters of these sizes, in backward's order: full before they would pass the limit."""
    buckets = [0]
    for size in sizes:
        most = min(limit, 2**20) if len(buckets) == 1 else limit
        if buckets[-1] and 4 * (buckets[-1] + size) > most:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def names_in_order(recipe: str) -> list[str]:
    """Names of the parameters, in the order of the model."""
    module = load(recipe)
    with torch.device("meta"):
        return [
            name
            for name, _ in module.Model(module.Config(layers=2, dim=32, heads=4, kv_heads=2, ffn=48)).named_parameters()
        ]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [NAIVE, OVERLAP])
def test_one_all_reduce_per_parameter(recipe):
    """... and one for the logged loss; naive's after backward, overlap's while it runs, in its order."""
    run = launch(recipe, 2, f"{SMALL} --steps 1", probe=collectives)
    sizes = [run.weights[name].numel() for name in names_in_order(recipe)]
    for seen in run.probes:
        assert sorted(size for size, *_ in seen) == sorted([*sizes, 1])
        hidden = [size for size, asynchronous, running in seen if asynchronous and running]
        assert hidden == (sizes[::-1] if recipe == OVERLAP else [])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mb", [0, 0.005, 0.02, 257 / 8192, 100]
)  # the fourth is the exact size of two matrices and a norm
@pytest.mark.parametrize("recipe", [BUCKETED, COALESCED, NO_SYNC, COPY_ENGINES])
def test_one_reduction_per_bucket(recipe, mb):
    """... while the last backward runs, once per step; smaller than any parameter, or larger than the model."""
    probe = reductions_by_copying if recipe == COPY_ENGINES else collectives
    run = launch(recipe, 2, f"{SMALL} {FLAGS[recipe]} --bucket_mb {mb} --steps 3", probe=probe)
    sizes = [run.weights[name].numel() for name in names_in_order(recipe)[::-1]]
    wanted = buckets_by_hand(sizes, mb * 2**20)
    assert {0: len(wanted) == len(sizes), 100: len(wanted) == 1}.get(mb, 1 < len(wanted) < len(sizes))
    for seen in run.probes:
        hidden = [size for size, asynchronous, running in seen if asynchronous and running]
        assert hidden == 3 * wanted and len(seen) == 3 * (len(wanted) + (recipe != COPY_ENGINES))


def reductions_by_copying(module):
    """A probe: as collectives, of the all-reduce of copy_engines.py, which runs beside backward on a GPU's stream."""
    seen, running, all_reduce = [], watch_backward(), module.all_reduce

    def counting(shared, bucket):
        seen.append((shared.sizes[bucket], True, running[0]))
        all_reduce(shared, bucket)

    module.all_reduce = counting
    return lambda: seen


def test_the_first_bucket_is_small():
    """1 MiB, where the first gradients are smaller than that: the default model has 6 MiB of them."""
    module = load(BUCKETED)
    cfg = module.Config(device="cpu")
    with torch.device("meta"):
        buckets = module.make_buckets(module.Model(cfg), cfg.bucket_mb)
    first, second = (sum(p.nbytes for p in bucket) for bucket in buckets)
    assert first <= 2**20 < first + buckets[1][0].nbytes and second > 2**20


def made_buckets(module):
    """A list of the Buckets that a recipe makes."""
    made, original = [], module.Buckets
    module.Buckets = lambda *args: made.append(original(*args)) or made[0]
    return made


def bytes_copied(module):
    """A probe: bytes that all_reduce copies from the memory of other ranks, and bytes of all gradients."""
    copied, shared, copy = [0], made_buckets(module), torch.Tensor.copy_

    def counting(self, other, *args):
        starts = [b.data_ptr() for b in shared[0].buffers] if shared else []
        size = shared[0].buffers[0].nbytes if shared else 0
        rank = module.dist.get_rank()
        if any(start <= other.data_ptr() < start + size for r, start in enumerate(starts) if r != rank):
            copied[0] += other.nbytes
        return copy(self, other, *args)

    torch.Tensor.copy_ = counting
    return lambda: [copied[0], shared[0].buffers[0].nbytes]


@pytest.mark.thorough
def test_bytes_of_copy_engines():
    """2 (dp-1)/dp of the bytes of the gradients come in, on every rank."""
    for copied, total in launch(COPY_ENGINES, 4, f"{SMALL} {FLAGS[COPY_ENGINES]} --steps 1", probe=bytes_copied).probes:
        assert copied == 2 * 3 * total // 4


def waits(module):
    """A probe: [(which asynchronous all-reduce was waited for, whether inside backward)] before the norm; how many."""
    started, waited, running, at_clip = [], [], watch_backward(), []
    all_reduce, coalesced = module.dist.all_reduce, module.dist.ProcessGroup.allreduce_coalesced
    clip = module.clip_gradients

    class Watched:
        def __init__(self, work):
            self.work, self.number = work, len(started)
            started.append(self)

        def wait(self):
            waited.append((self.number, running[0]))
            return self.work.wait()

    def watched(tensor, *args, async_op=False, **kwargs):
        work = all_reduce(tensor, *args, async_op=async_op, **kwargs)
        return Watched(work) if async_op else work

    def watched_list(group, tensors):
        return Watched(coalesced(group, tensors))

    def clipped(*args):
        at_clip.append((list(waited), len(started)))
        return clip(*args)

    module.dist.all_reduce, module.dist.ProcessGroup.allreduce_coalesced = watched, watched_list
    module.clip_gradients = clipped
    return lambda: at_clip


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [OVERLAP, BUCKETED, COALESCED, NO_SYNC])
def test_each_reduction_is_waited_for_once(recipe):
    """... when backward is over: to wait earlier would hide nothing."""
    for ((waited, started),) in launch(recipe, 2, f"{SMALL} {FLAGS[recipe]} --steps 1", probe=waits).probes:
        assert started > 1 and sorted(waited) == [(number, False) for number in range(started)]


def gradients_in_buckets(module):
    """A probe: whether, after backward, the gradients of each bucket are views into one piece of memory, end to end."""
    together, original = [], module.backward

    def backward(model, loss, bucket_mb):
        original(model, loss, bucket_mb)
        for bucket in module.make_buckets(model, bucket_mb):
            for p, q in itertools.pairwise(bucket):
                same = p.grad.untyped_storage().data_ptr() == q.grad.untyped_storage().data_ptr()
                together.append(same and p.grad.data_ptr() + p.grad.nbytes == q.grad.data_ptr())

    module.backward = backward
    return lambda: together


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [BUCKETED, NO_SYNC, COPY_ENGINES])
def test_gradients_are_views_into_their_bucket(recipe):
    for together in launch(recipe, 2, f"{SMALL} {FLAGS[recipe]} --steps 1", probe=gradients_in_buckets).probes:
        assert len(together) > 5 and all(together)


def compiled_graphs(module):
    """A probe: compiled functions that backward runs. The compiler's first half alone, which is quick."""
    counts, backward, compile_ = [], torch.Tensor.backward, torch.nn.Module.compile
    torch.nn.Module.compile = lambda self: compile_(self, backend="aot_eager")

    def counting(loss):
        seen, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo.extend(following for following, _ in node.next_functions)
        counts.append(sum("CompiledFunction" in node.name() for node in seen))
        backward(loss)

    torch.Tensor.backward = counting
    return lambda: counts


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, per_block", [(NAIVE, 1), (OVERLAP, 2)])  # the others inherit the block
def test_a_compiled_block_is_backward_in_two_parts(recipe, per_block):
    """The gradients of the first can be reduced during the second. The loss is one more."""
    run = launch(recipe, 2, f"{SMALL} --compile --steps 1", probe=compiled_graphs)
    assert all(set(counts) == {2 * per_block + 1} for counts in run.probes)


@pytest.mark.thorough
def test_no_sync_keeps_one_micro_batch():
    """Each micro-batch is backward before the next is forward."""
    probe = probes.together(probes.calls("forward"), probes.activations_in_memory)
    assert launch(NO_SYNC, 2, f"{SMALL} --microbatches 4 --steps 1", probe=probe).probes == [[[4], 1]] * 2


def arriving_and_sizes(module):
    """A probe: elements for which there is room to arrive, and in the largest bucket."""
    made = made_buckets(module)
    return lambda: [(shared.arriving.numel(), max(shared.sizes)) for shared in made]


@pytest.mark.thorough
def test_memory_and_files_of_copy_engines(tmp_path, monkeypatch):
    """Beside the buckets, (dp-1)/dp of the largest; and no file is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = launch(COPY_ENGINES, 4, f"{SMALL} {FLAGS[COPY_ENGINES]} --steps 1", probe=arriving_and_sizes)
    assert all(room == 3 * largest // 4 for ((room, largest),) in run.probes)
    assert [path for path in tmp_path.rglob("*") if re.fullmatch(r"[0-3]", path.name)] == []


def outer_gradients(module):
    """A probe: slow outer steps; how many of their gradients are still in memory after training."""
    outers, make, outer_step = [], module.make_outer_optimizer, module.outer_step
    module.make_outer_optimizer = lambda *args: outers.append(make(*args)) or outers[0]
    module.outer_step = lambda *args: time.sleep(0.3) or outer_step(*args)
    return lambda: sum(p.grad is not None for p in outers[0].param_groups[0]["params"])


@pytest.mark.thorough
def test_outer_steps_count_and_are_cleaned_up():
    """Their time is in the log, their gradients are not kept."""
    run = launch(DILOCO, 2, f"{SMALL} --inner_steps 2 --steps 4", probe=outer_gradients)
    assert run.probes == [0, 0] and [seconds > 0.3 for *_, seconds in run.history] == [False, True, False, True]


def options_of_the_wrapper(module):
    """A probe: bucket size in bytes, and whether gradients are views, of the DistributedDataParallel in use."""
    seen, clip_gradients = [], module.clip_gradients

    def clipped(cfg, *args):
        seen.append(args[-1]._get_ddp_logging_data())
        return clip_gradients(cfg, *args)

    module.clip_gradients = clipped
    return lambda: [(data["bucket_cap_bytes"], data["gradient_as_bucket_view"]) for data in seen]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["02_data_parallel/torch_ddp.py", ACCELERATE])
def test_options_of_the_twins(recipe):
    run = launch(recipe, 2, f"{SMALL} --bucket_mb 0.5 --steps 1", probe=options_of_the_wrapper)
    assert run.probes == [[(2**19, 1)]] * 2


@pytest.mark.thorough
def test_diloco_communicates_once_per_round():
    """4 steps in rounds of 2: each parameter twice, and nothing else, not even for the log."""
    run = launch(DILOCO, 2, f"{SMALL} --inner_steps 2 --steps 4", probe=collectives)
    sizes = [p.numel() for p in run.weights.values()]
    assert [sorted(size for size, *_ in seen) for seen in run.probes] == [sorted(2 * sizes)] * 2


@pytest.mark.thorough
def test_valid_tokens_differ_between_ranks():
    """Else a mean over ranks would look like the sum, and the equivalence above could not tell them apart."""
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --steps 1"
    sequences = launch(NAIVE, 1, flags, probe=probes.valid_tokens).probes[0]
    ranks = [sum(sequences[rank * 3 : rank * 3 + 3]) for rank in range(4)]
    assert len(set(ranks)) == 4, ranks


@pytest.mark.parametrize(
    "recipe, world, flags, words",
    [
        *((recipe, 3, "--batch 16", ["--batch 16", "processes, 3"]) for recipe in FLAGS),
        (NO_SYNC, 2, "--microbatches 3", ["--microbatches 3", "8 sequences"]),
        (NO_SYNC, 2, "--microbatches 0", ["--microbatches 0", "at least 1"]),
        (BUCKETED, 2, "--bucket_mb -1", ["--bucket_mb -1", "at least 0"]),
        (DILOCO, 2, "--inner_steps 0", ["--inner_steps 0", "at least 1"]),
        (DILOCO, 2, "--outer_lr -1", ["--outer_lr -1", "at least 0"]),
        (DILOCO, 2, "--outer_momentum 1", ["--outer_momentum 1.0", "below 1"]),
    ],
)
def test_bad_flags(recipe, world, flags, words):
    line = refusal(load(recipe), world, f"--device cpu {flags}")
    assert "\n" not in line and all(word in line for word in words), line


def test_micro_batches_divide_the_part_of_a_rank():
    module = load(NO_SYNC)
    with pytest.raises(SystemExit, match="--microbatches 4: must divide the 3 sequences"):
        module.check(module.Config(device="cpu", batch=12, microbatches=4), 4)


def test_copy_engines_need_one_host(monkeypatch):
    module = load(COPY_ENGINES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="--nnodes 2"):
        module.check(module.Config(device="cpu"), 4)


@pytest.mark.thorough
def test_started_without_torchrun():
    command = ["python", NAIVE, "--device", "cpu"]
    end = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert end.returncode == 1 and f"torchrun --nproc_per_node 8 {NAIVE}" in end.stderr
    assert len(end.stderr.splitlines()) == 1
