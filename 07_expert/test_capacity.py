"""Expert capacity: drops what a naive reference drops, sends what the header says, and never waits for the GPU."""

import math
from types import SimpleNamespace

import compare
import equivalence
import pytest
import torch
from equivalence import GRADIENT, MOE, TRAINING
from launch import launch, load, once
from probes import all_to_alls, evaluated, together
from torch.utils._python_dispatch import TorchDispatchMode

CAPACITY = "07_expert/capacity.py"
LAYERS, D, SEQ, BATCH = 2, 32, 16, 8
SMALL = f"--device cpu --layers {LAYERS} --dim {D} --heads 4 --kv_heads 2 --ffn 48 --seq {SEQ} --batch {BATCH}"
SHAPE = f"{equivalence.SHAPE} --device cpu --dtype float64"


def kept(experts, count, capacity):
    """Which rows of experts [t, top_k] are kept, counted one by one."""
    taken, keep = [0] * count, torch.ones(experts.shape, dtype=torch.bool)
    slots = math.ceil(capacity * experts.numel() / count)
    for token, chosen in enumerate(experts.tolist()):
        for i, expert in enumerate(chosen):
            keep[token, i] = taken[expert] < slots
            taken[expert] += 1
    return keep


def dropping(ranks, capacity):
    """A probe of the root: it drops what so many ranks would drop. Reports how many, and of how many rows.

    Both for each layer of each step.
    """

    def probe(module):
        route, dropped, rows = module.Router.forward, [], []

        def forward(self, x):
            gates, experts = route(self, x)
            parts = experts.chunk(ranks)
            keep = torch.cat([kept(part, len(self.weight), capacity) for part in parts])
            if torch.is_grad_enabled():
                dropped.append((~keep).sum().item())
                rows.append(keep.numel())
            return gates * keep, experts

        module.Router.forward = forward
        return lambda: (dropped, rows)

    return probe


@once
def reference(flags, ranks, capacity):
    """The root's run, with the rows dropped that so many ranks drop."""
    return launch(MOE, 1, flags, probe=together(dropping(ranks, capacity), evaluated()))


def check_scarce(file, world, flags, capacity, modes=(GRADIENT, TRAINING)):
    """Gradient, training, validation and the logged share are those of a root that drops the same rows."""
    roots = equivalence.shared(flags)
    init = equivalence.start(MOE, f"{equivalence.SHAPE} {roots}")
    common = f"{SHAPE} --data {equivalence.documents()} --init {init}"
    before, what = compare.read(init)[0], f"{file} on {world} ranks {flags} --capacity {capacity}"
    for mode in modes:
        ours = launch(file, world, f"{common} {mode} {flags} --capacity {capacity}", evaluated())
        theirs = reference(f"{common} {mode} {roots}", world, capacity)
        (dropped, rows), losses = theirs.probes[0]
        errors = compare.relative_errors(ours.weights, theirs.weights, before if mode == GRADIENT else None)
        errors |= compare.history_errors(ours.history, theirs.history)
        for rank, mine in enumerate(ours.probes):
            for i, (loss, right) in enumerate(zip(mine, losses, strict=True)):
                errors[f"validation loss {i} of rank {rank}"] = abs(loss / right - 1)
        compare.assert_close(errors, equivalence.TOLERANCE["float64"], what)
        shares = [sum(dropped[i : i + 5]) / sum(rows[i : i + 5]) for i in range(0, len(rows), 5)]  # 5 layers a step
        assert len(shares) == len(ours.history) and min(shares) > 0, "nothing is dropped"
        assert [share for *_, share in ours.history] == shares, "the logged share is off by some rows"
        if mode == GRADIENT:
            whole = equivalence.reference(MOE, f"{common} {mode} {roots}").weights
            changes = compare.relative_errors(theirs.weights, whole, before)
            assert max(changes.values()) > 1e-3, "dropping changes nothing"


@pytest.mark.parametrize(
    "world, flags, capacity, modes",
    [
        (2, "", 0.5, [GRADIENT, TRAINING]),
        pytest.param(3, "--experts 9 --top_k 4", 0.7, [GRADIENT], marks=pytest.mark.thorough),
        # the gate of a token that keeps its row is not 1
        pytest.param(2, "--top_k 1", 1.0, [GRADIENT], marks=pytest.mark.thorough),
    ],
)
def test_drops_what_the_reference_drops(world, flags, capacity, modes):
    check_scarce(CAPACITY, world, flags, capacity, modes)


def test_unequal_batches_are_refused():
    module, batch = load(CAPACITY), torch.zeros(3, SEQ)
    model = SimpleNamespace(dp=SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match="3 sequences: must be divisible by the 2 ranks"):
        module.evaluate(module.Config(), model, batch, batch)


# ----------------------------------------------------------------------------------------------- a step, from inside
WAITS = "tolist cpu numpy"  # methods that wait for a GPU and that no CPU dispatches
SIZES = "_local_scalar_dense nonzero is_nonzero equal masked_select _unique2 bincount"  # operations that wait


def waits_for_the_gpu(module):
    """A probe: what in each step would make the CPU wait for a GPU.

    But for what only CPUs do: one_by_one, and push without its kernel.
    """
    steps, watching, train_step = [], [False], module.train_step

    def note(name):
        if watching[0]:
            steps[-1].append(name)

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            index = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
            repeats = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
            if name in SIZES.split() or index or repeats:
                note(name)
            return function(*args, **(kwargs or {}))

    def noted(name, original):
        return lambda *args, **kwargs: note(name) or original(*args, **kwargs)

    def watched(function, watch):
        def call(*args):
            before, watching[0] = watching[0], watch
            result = function(*args)
            watching[0] = before
            return result

        return call

    def step(*args):
        steps.append([])
        with Operations():
            return train_step(*args)

    for name in WAITS.split():
        setattr(torch.Tensor, name, noted(name, getattr(torch.Tensor, name)))
    for name in {"one_by_one", "push"} & vars(module).keys():
        setattr(module, name, watched(getattr(module, name), False))
    module.train_step = watched(step, True)
    return lambda: steps


def test_bytes_sent_without_a_wait():
    """The header's formula, with a gate of 4 bytes per row, whatever experts the router chooses.

    And no expert has more slots of a rank than that has tokens.
    """
    ep, experts = 2, 8
    tokens = BATCH * SEQ // ep
    wanted = LAYERS * 2 * experts * tokens * (2 * D * 2 + 4) * (ep - 1) // ep  # forward and backward, 2 bytes each
    flags = f"{SMALL} --capacity 1000 --steps 1 --dtype bfloat16"
    probe = together(waits_for_the_gpu, all_to_alls)
    for (waits,), exchanges in launch(CAPACITY, ep, flags, probe=probe).probes:
        assert not waits and sum(size for *_, size in exchanges) == wanted, (waits, exchanges)
