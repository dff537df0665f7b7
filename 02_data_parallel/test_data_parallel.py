"""The data-parallel recipes train as the root does, their replicas stay alike, and they communicate what they say."""

import os
import tempfile
import time
from types import SimpleNamespace
from unittest.mock import patch

import compare
import equivalence
import probes
import pytest
import simulation
import torch
from launch import in_a_fork, launch, load, once
from streams import streams
from torch.utils.checkpoint import checkpoint

NAIVE, OVERLAP, BUCKETED = (f"02_data_parallel/{name}.py" for name in ("naive", "overlap", "bucketed"))
COALESCED, NO_SYNC, DILOCO = (f"02_data_parallel/{name}.py" for name in ("coalesced", "no_sync", "diloco"))
COPY_ENGINES = "02_data_parallel/copy_engines.py"
TWINS = ["02_data_parallel/torch_ddp.py", "02_data_parallel/accelerate_ddp.py"]
SMALL = "--device cpu --layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 12"
IN_HOOKS = {recipe: "--bucket_mb 0.02" for recipe in (OVERLAP, BUCKETED, COALESCED, COPY_ENGINES)} | {OVERLAP: ""}


def test_diloco_equals_its_simulation():
    simulation.check()


@once
def root_with_one_sequence_alone(flags):
    """The root's run with that probe."""
    return launch("01_single_gpu/train.py", 1, flags, probe=probes.one_sequence_alone_runs_a_block)


def check_one_sequence_alone(recipe, flags):
    """On 3 ranks, training is the root's where all sequences but one skip a block."""
    init = equivalence.start(equivalence.root_of(recipe), equivalence.SHAPE)
    common = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init}"
    common, probe = f"{common} {equivalence.TRAINING}", probes.one_sequence_alone_runs_a_block
    theirs = root_with_one_sequence_alone(common)
    ours = launch(recipe, 3, f"{common} {flags}", probe)
    assert theirs.probes == [4] and ours.probes == [2, 0, 2]
    errors = compare.relative_errors(ours.weights, theirs.weights, compare.read(init)[0])
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], recipe)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [NAIVE, *IN_HOOKS])
def test_parameters_without_gradient_on_some_ranks(recipe):
    """... count as zero there; the sum is right, in whatever order, and whatever bucket, they are reduced."""
    check_one_sequence_alone(recipe, IN_HOOKS.get(recipe, ""))


@pytest.mark.thorough
def test_gradients_in_the_order_of_a_compiled_block():
    probe = probes.together(equivalence.unfused_attention, streams("late"))
    equivalence.check(BUCKETED, 2, "--bucket_mb 0.02 --compile", probe=probe)


def reductions(module):
    """A probe: bytes and phase of every all-reduce, and the phases in which all-reduces are waited for."""
    group, started, waited = module.dist.ProcessGroup, [], []

    class Watched:
        def __init__(self, work):
            self.work = work

        def wait(self, *timeout):
            waited.append(probes.phase())
            return self.work.wait(*timeout)

    def watched(original):
        def start(own, tensors, *options):
            started.append((sum(tensor.nbytes for tensor in tensors), probes.phase()))
            return Watched(original(own, tensors, *options))

        return start

    group.allreduce, group.allreduce_coalesced = watched(group.allreduce), watched(group.allreduce_coalesced)
    if hasattr(module, "Buckets"):  # its all-reduce runs beside backward on a GPU's stream
        copied = module.all_reduce
        module.all_reduce = lambda shared, i: started.append((4 * shared.sizes[i], probes.phase())) or copied(shared, i)
    return lambda: (started, waited)


def bytes_of_gradients(module):
    """A probe: bytes that forward and backward leave in memory: the gradients."""
    forward_backward, found = module.forward_backward, []

    def step(cfg, model, *batch):
        before, size = probes.bytes_of_tensors(), sum(p.nbytes for p in model.parameters())
        loss = forward_backward(cfg, model, *batch)
        found.append(probes.settled(lambda: probes.bytes_of_tensors() - before, size + 500))
        return loss

    module.forward_backward = step
    return lambda: found[0]


def copied_between_ranks(module):
    """A probe: bytes that the last step has copied from or to other ranks' memory."""
    copied, others, share = [0], set(), module.share
    copy, train_step = torch.Tensor.copy_, module.train_step

    def shared(*args):
        memory, barrier = share(*args)
        others.update(m.untyped_storage().data_ptr() for r, m in enumerate(memory) if r != module.dist.get_rank())
        return memory, barrier

    def counted(self, source, *args):
        if others & {self.untyped_storage().data_ptr(), source.untyped_storage().data_ptr()}:
            copied[0] += self.nbytes
        return copy(self, source, *args)

    def step(*args):
        copied[0] = 0
        return train_step(*args)

    module.share, module.train_step, torch.Tensor.copy_ = shared, step, counted
    return lambda: copied[0]


def room_for_copies(module):
    """A probe: bytes of what copies of the others' shards go into."""
    made, buckets = [], module.Buckets
    module.Buckets = lambda *args: made.append(buckets(*args)) or made[0]
    return lambda: made[0].receive_buffer.nbytes


def buckets_by_hand(sizes: list[int], limit: float) -> list[int]:
    """Bytes of the buckets of parameters of these bytes, in backward's order: full before they would pass the limit."""
    buckets = [0]
    for size in sizes:
        most = min(limit, 2**20) if len(buckets) == 1 else limit
        if buckets[-1] and buckets[-1] + size > most:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def parameters(module, **sizes):
    """The model without memory, and bytes of its parameters in about the order of backward."""
    with torch.device("meta"):
        model = module.Model(module.Config(device="cpu", **sizes))
    return model, [p.nbytes for p in model.parameters()][::-1]


def test_buckets():
    """Smaller than any parameter, or larger than the model; just full; the first has 1 MiB at most, to start early."""
    module = load(BUCKETED)
    model, sizes = parameters(module, layers=2, dim=32, heads=4, kv_heads=2, ffn=48)
    for mb in 0, 0.005, 0.02, 257 / 8192, 100:  # the fourth is the exact size of two matrices and a norm
        found = [sum(p.nbytes for p in bucket) for bucket in module.make_buckets(model, mb)]
        assert found == buckets_by_hand(sizes, mb * 2**20)
    first, second, *_ = module.make_buckets(parameters(module)[0], 200)
    assert 2**20 - first[0].nbytes < sum(p.nbytes for p in first) <= 2**20 < sum(p.nbytes for p in second)


@in_a_fork
def test_a_gradient_that_backward_still_reads(file=BUCKETED):
    """One that is a view of it is reduced in a copy, also where it is alone in its bucket."""
    model = torch.nn.Linear(3, 3)
    model.positions, x = torch.nn.Parameter(torch.zeros(2, 3)), torch.ones(1, 2, 3)
    loss = (model(x) + model.positions[None]).square().sum()
    gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    module, done = load(file), SimpleNamespace(wait=lambda: None)
    module.dist.all_reduce = lambda gradient, async_op: gradient.mul_(2) is None or done
    module.backward(model, loss, 0)
    for p, gradient in zip(model.parameters(), gradients):
        assert torch.allclose(p.grad, 2 * gradient), "it is reduced while it is read"


@pytest.mark.parametrize("file", [BUCKETED, COPY_ENGINES])
def test_gradients_keep_their_strides(file):
    """... as views of a bucket: fused AdamW on CPUs takes them for granted. Gaps between elements are left out."""
    transposed, gaps = torch.nn.Parameter(torch.ones(2, 3).T), torch.nn.Parameter(torch.ones(3, 4)[:, :2])
    gradient = torch.arange(6.0).view(3, 2)
    ((transposed + gaps) * gradient).sum().backward()
    gaps.grad = torch.zeros(3, 4)[:, :2].copy_(gaps.grad)
    load(file).flatten([transposed, gaps], *[torch.empty(12)] * (file == COPY_ENGINES))
    assert (transposed.grad.stride(), gaps.grad.stride()) == (transposed.stride(), (2, 1))
    assert torch.equal(transposed.grad, gradient) and torch.equal(gaps.grad, gradient)


@pytest.mark.parametrize("file", IN_HOOKS)
def test_two_gradients_in_a_backward_are_refused(file):
    """A layer runs twice in reentrant checkpoints: its bucket would be reduced after the first of its gradients."""
    module, model, flat = load(file), torch.nn.Linear(3, 3), torch.empty(15)
    model.shared = SimpleNamespace(buffers=[flat], sizes=[15], stream=None)
    model.first = torch.nn.Parameter(torch.ones(1, 3))  # its gradient comes last
    x = checkpoint(model, model.first, use_reentrant=True) + checkpoint(model, model.first, use_reentrant=True)
    with patch.object(module.dist, "get_rank", lambda: 0), pytest.raises(RuntimeError, match="use_reentrant=False"):
        module.backward(model, x.sum(), *[1] * (file != OVERLAP))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [NAIVE, *IN_HOOKS, NO_SYNC])
def test_a_step(recipe, tmp_path, monkeypatch):
    """One reduction per parameter, or per bucket, in the last backward; no gradient is held twice. No file is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flags = "--bucket_mb 0.02 --microbatches 2" if recipe == NO_SYNC else IN_HOOKS.get(recipe, "")
    probe = [reductions, bytes_of_gradients, probes.activations_in_memory]
    probe = probes.together(*probe, *[copied_between_ranks, room_for_copies] * (recipe == COPY_ENGINES))
    run = launch(recipe, 3, f"{SMALL} {flags} --steps 1", probe=probe)
    _, sizes = parameters(load(recipe), layers=2, dim=32, heads=4, kv_heads=2, ffn=48)
    wanted = sizes if recipe in (NAIVE, OVERLAP) else buckets_by_hand(sizes, 0.02 * 2**20)
    if recipe == COPY_ENGINES:  # padded, so that each of 3 ranks sums as many elements
        wanted = [-(-size // 12) * 12 for size in wanted]
    for (started, waited), gradients, micro_batches, *memory in run.probes:
        assert started.pop() == (4, "forward")  # the logged loss
        if recipe == NAIVE:
            assert sorted(started) == sorted((size, "forward") for size in sizes)
        else:
            assert started == [(size, "backward") for size in wanted]
            later = 1 + len(wanted) * (recipe != COPY_ENGINES)
            assert waited == ["forward"] * later, "to wait earlier would hide nothing"
        more = gradients - sum(sizes) * (recipe != COPY_ENGINES)
        assert abs(more) < 500, "gradients are held twice"  # less: gloo's threads held a message when counting began
        assert micro_batches == 1
        if recipe == COPY_ENGINES:  # by the formulas of the header
            assert memory == [2 * 2 * sum(wanted) // 3, 2 * max(wanted) // 3]
    assert [path for path in tmp_path.rglob("*") if path.name in ("0", "1", "2")] == []


def compiled_graphs(module):
    """A probe: the graphs of the compiled blocks and loss. Each one is a part of backward."""
    compile_ = torch.nn.Module.compile
    torch.nn.Module.compile = lambda part: compile_(part, backend="eager")
    return lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.thorough
def test_a_compiled_block_is_backward_in_two_parts():  # the others inherit the block
    """Gradients of the first are reduced during the second. Blocks share one compilation; the loss is a third graph."""
    assert launch(OVERLAP, 1, f"{SMALL} --compile --steps 1", probe=compiled_graphs).probes == [3]


def slow_outer_steps(module):
    """A probe: outer steps take 0.3 s."""
    outer_step = module.outer_step
    module.outer_step = lambda *args: time.sleep(0.3) or outer_step(*args)
    return lambda: None


def test_diloco_communicates_once_per_round():
    """4 steps in rounds of 2: each parameter twice, in 4 bytes per element, and nothing else. Then workers agree."""
    probe = probes.together(probes.whole_parameters, reductions, slow_outer_steps)
    run = launch(DILOCO, 4, f"{SMALL} --inner_steps 2 --steps 4", probe=probe)
    first, sizes = run.probes[0][0], sorted([4 * p.numel() for p in run.weights.values()] * 2)
    for replica, (started, _), _ in run.probes:
        assert len(first) > 10 and replica == first and sorted(size for size, _ in started) == sizes
    assert all(run.history[step][2] > 0.3 for step in (1, 3))


def options_of_the_wrapper(module):
    """A probe: bucket size in bytes, and whether gradients are views, of the DistributedDataParallel in use."""
    seen, clip_gradients = [], module.clip_gradients

    def clipped(cfg, *args):
        data = args[-1]._get_ddp_logging_data()
        seen.append((data["bucket_cap_bytes"], data["gradient_as_bucket_view"]))
        return clip_gradients(cfg, *args)

    module.clip_gradients = clipped
    return lambda: seen


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", TWINS)
def test_options_of_the_twins(recipe):
    run = launch(recipe, 1, f"{SMALL} --bucket_mb 0.5 --steps 1", probe=options_of_the_wrapper)
    assert run.probes == [[(2**19, 1)]]


@pytest.mark.parametrize("recipe", [COPY_ENGINES, "03_zero/zero3_copy_engines.py"])
def test_copy_engines_need_one_host(recipe):
    module = load(recipe)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"), pytest.raises(SystemExit, match="--nnodes 2"):
        module.check(module.Config(device="cpu"), 4)
