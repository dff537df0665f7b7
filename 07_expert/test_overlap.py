"""overlap.py: one half of the batch travels while the other computes. slots.py, symmetric_memory.py: rows are in their
slots when they are read, whichever rank is late; where slots are too few there will be more."""

import os
import re
import time

import compare
import equivalence
import numpy as np
import pytest
import torch
from launch import isolated, launch, load, run_folder
from probes import OnGPU, evaluated, phase, together, transfers
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef

OVERLAP = "07_expert/overlap.py"
SLOTS = "07_expert/slots.py"
SYMMETRIC = "07_expert/symmetric_memory.py"
expert = load("07_expert/test_expert.py")
LAYERS, D, S, B, K = expert.LAYERS, expert.D, expert.S, expert.B, expert.K
SHAPE = expert.SHAPE


# --------------------------------------------------------------------------------------------- overlap: who takes turns
def test_halves_take_turns(file=None):
    """While rows of a half are under way, the other half computes, but in the last layer, with nothing left to do."""
    layers = 3
    flags = f"{SHAPE} --experts 6 --top_k {K} --layers {layers} --steps 1"
    for found in launch(file or OVERLAP, 2, flags, probe=transfers, save=False).probes:
        for name, alone in ("forward", -1), ("backward", 0):
            of_phase = [transfer for transfer in found if transfer[0] == name]
            assert sorted(width for _, width, _ in of_phase) == [1] * 2 * layers + [D] * 4 * layers
            assert of_phase.pop(alone) == [name, D, False]
            missing = [hidden for *_, hidden in of_phase].count(False)
            assert not missing, f"{name}: {missing} transfers without computation"


# ---------------------------------------------------------------------------------------- symmetric memory: its kernel
WIDTHS = (1, torch.int64), (1, torch.float64), (33, torch.bfloat16), (4096, torch.bfloat16), (2051, torch.float32)


def test_kernel(file=None):
    """The kernel writes, to the bit, what the loop over ranks writes, and nothing else.

    Rows fill no block, some have no place, some are read more than once, from a tensor that is not contiguous.
    """

    def compute():
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
        module = load(file or SYMMETRIC)
        assert type(module.push_kernel).__name__ == "InterpretedFunction"
        generator = torch.Generator().manual_seed(0)
        for width, dtype in WIDTHS:
            for count in [0, 1, 5000] if width == 1 else [0, 3, 131]:
                ranks, size = 3, count // 2 + 1
                x = (1000 * torch.randn(width, count // 2 + 1, generator=generator)).to(dtype).T
                source = torch.randint(len(x), (count,), generator=generator)
                place = torch.randperm(ranks * size, generator=generator)[:count]
                place[::5] = -1
                written = []
                for rows in x.as_subclass(OnGPU), x:
                    everything = torch.full((ranks, size + 2, width), 77).to(dtype)  # a row more on both sides
                    tensors = [tensor[1:-1] for tensor in everything]
                    to = module.Shared(tensors, torch.tensor([tensor.data_ptr() for tensor in tensors]))
                    module.push(rows, source, place, to, size)
                    written.append(everything)
                wrong = (written[0] != written[1]).any(-1).sum().item()
                assert not wrong, f"the kernel has {wrong} wrong rows of {count} of {width} {dtype}"

    isolated(compute)


def test_rows_that_do_not_fit_the_memory():
    """Of another dtype or width: an error, where the kernel would write into what is behind the row."""
    module, memory, place = load(SYMMETRIC), torch.zeros(4, 3), torch.arange(2)
    to = module.Shared([memory], torch.tensor([memory.data_ptr()]))
    for rows in torch.ones(2, 3).double(), torch.ones(2, 3).bfloat16(), torch.ones(2, 4), torch.ones(2, 2):
        with pytest.raises(TypeError, match=r"do not fit"):
            module.push(rows.as_subclass(OnGPU), place, place, to, 4)
    assert not memory.any()


# ------------------------------------------------------------------------------ slots, symmetric memory: too few slots
def scarce(module):
    """A probe: at each validation, slots are as few as before the first step. One follows each step at once, before it
    is known whether the step has to be repeated."""
    evaluate, train_step = module.evaluate, module.train_step

    def with_few(cfg, model, *batch):
        model.memory.slots = cfg.slots
        return evaluate(cfg, model, *batch)

    def step(cfg, model, optimizer, *batch):
        result = train_step(cfg, model, optimizer, *batch)
        with_few(cfg, model, *batch)
        return result

    def within(x, source, place, to, size):
        assert place.max() < size * len(to.tensors), "rows are written behind the memory"
        push(x, source, place, to, size)

    module.evaluate, module.train_step = with_few, step
    if push := getattr(module, "push", None):
        module.push = within
    return lambda: None


@pytest.mark.parametrize(
    "recipe, world, flags",
    [
        (SLOTS, 2, ""),
        pytest.param(SYMMETRIC, 2, "", marks=pytest.mark.thorough),
        pytest.param(SYMMETRIC, 4, "--edp 2", marks=pytest.mark.thorough),
    ],
)
def test_too_few_slots(recipe, world, flags, file=None):
    """A run that starts with too few slots, most in the first layer, trains and validates as the root, and says so."""
    common = f"{SHAPE} --experts 6 --top_k {K} --steps 3 --validate 1 --warmup 0 --lr 1e-2"
    weights = compare.read(equivalence.start(equivalence.MOE, f"{SHAPE} --experts 6"))[0]
    weights["model.layers.0.block_sparse_moe.gate.weight"].zero_()
    save_file(weights, init := run_folder() / "one_sided.safetensors")
    common += f" --init {init}"
    run = launch(file or recipe, world, f"{common} --slots 1 {flags}", probe=scarce)
    root = launch(equivalence.MOE, 1, common)
    errors = compare.relative_errors(run.weights, root.weights) | compare.history_errors(run.history, root.history)
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], f"{recipe} with too few slots")
    lines = run.output[0].splitlines()
    validated, right = (
        [line for line in of if "validation loss" in line] for of in (lines, root.output[0].splitlines())
    )
    assert validated == right, f"a validation is off by what found no slot: {validated}, not {right}"
    for when in "step 1", "validation":
        first = next(line for line in lines if line.startswith(f"{when}:"))
        assert re.fullmatch(rf"{when}: --slots \S+ held too few rows, grown to \d(\.25|\.5|\.75)?", first), first


def test_who_shares_experts_is_on_one_host(monkeypatch):
    """Eight processes on two hosts: copies of experts may be on another host, ranks that share them may not."""
    module = load(SYMMETRIC)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for edp in 2, 4, 8:
        module.check(module.Config(device="cpu", edp=edp), 8)
    with pytest.raises(SystemExit, match="^--edp 1: 8 ranks share .* the 4 of one host"):
        module.check(module.Config(device="cpu"), 8)


# ------------------------------------------------------------- symmetric memory: bytes, nobody waits, and who is late
def writes(module):
    """A probe: phase, width and rows that each push of the last step writes into others' memory; how often memory is
    allocated. Asserts that what it replaces is let go first."""
    pushed, last, held, allocated = [], [], [], [0]
    push, train_step, share = module.push, module.train_step, module.share

    def pushing(x, source, place, to, size):
        others = (place >= 0) & (place // size != module.dist.get_rank())
        pushed.append((phase(), x.shape[1], int(others.sum())))
        push(x, source, place, to, size)

    def step(*args):
        pushed.clear()
        result = train_step(*args)
        last[:] = pushed
        return result

    def sharing(*args):
        assert all(old.expired() for old in held), "old memory is still held"
        allocated[0] += 1
        tensors, barrier = share(*args)
        held.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        return tensors, barrier

    module.push, module.train_step, module.share = pushing, step, sharing
    return lambda: (last, allocated[0])


@pytest.mark.thorough
def test_bytes_written(file=None):
    """Per layer rows cross twice in forward, twice in backward, (ep-1)/ep·t·top_k·d elements of balanced experts; gates
    once and once, origins once. Memory is allocated for the first batch and for a larger one alone."""
    ep, batch = 3, 9
    rows = batch * S // ep * K * (ep - 1) // ep
    widths = ("forward", 1), ("forward", 1), ("forward", D), ("forward", D), ("backward", D), ("backward", D)
    wanted = [(name, width, rows) for name, width in (*widths, ("backward", 1))]
    probe = together(expert.balanced, writes, evaluated())
    flags = f"{SHAPE} --experts 6 --top_k {K} --batch {batch} --steps 2"
    for _, (pushed, allocated), _ in launch(file or SYMMETRIC, ep, flags, probe=probe, save=False).probes:
        assert sorted(pushed) == sorted(wanted * LAYERS), "other rows are written"
        assert allocated == 2, f"memory is allocated {allocated} times"


def late(module):
    """A probe: now and then a rank is late, before it writes into others' memory, at a barrier, before it reads; and
    all ranks are later than the first, which removes the files of shared memory."""
    rank = int(os.environ["RANK"])
    random = np.random.default_rng(rank)

    def delayed(original, probability=0.25):
        def function(*args, **kwargs):
            if random.random() < probability:
                time.sleep(0.01)
            return original(*args, **kwargs)

        return function

    def share(*args):
        tensors, barrier = shared(*args)
        past = delayed(lambda: None)
        return tensors, delayed(lambda: (barrier(), past()))

    shared = module.share
    module.push, module.places, module.share = delayed(module.push), delayed(module.places), share
    module.torch.from_file = delayed(module.torch.from_file, min(1, rank))
    return lambda: None


def check_late_ranks(file, world, flags):
    equivalence.check(file, world, flags, root=equivalence.MOE, probe=late)


@pytest.mark.thorough
def test_a_rank_may_be_late():
    """No barrier is missing: whoever reads waits for those who write, whoever writes for those who read."""
    check_late_ranks(SYMMETRIC, 4, "--edp 2")
