"""overlap.py: one half of the batch travels while the other computes. slots.py, symmetric_memory.py: rows are in their
slots when they are read, whichever rank is late; where slots are too few there will be more; the CPU waits for nothing.

Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

import math
import os
import re
import time

import compare
import equivalence
import numpy as np
import pytest
import torch
from launch import isolated, launch, load
from probes import OnGPU, all_to_alls, phase, together
from torch.multiprocessing.reductions import StorageWeakRef

PARALLEL = "07_expert/expert_parallel.py"
OVERLAP = "07_expert/overlap.py"
SLOTS = "07_expert/slots.py"
SYMMETRIC = "07_expert/symmetric_memory.py"
context = load("05_context_ring/test_context.py")
expert, capacity = load("07_expert/test_expert.py"), load("07_expert/test_capacity.py")
LAYERS, D, S, B, K = expert.LAYERS, expert.D, expert.S, expert.B, expert.K
SHAPE = expert.SHAPE


# --------------------------------------------------------------------------------------------- overlap: who takes turns
def test_halves_take_turns(layers=3, file=None):
    """While rows of a half are under way, the other half computes: in forward, and in backward.

    But in the last layer, when there is nothing left to do: the last transfer of forward, the first one of backward.
    """
    flags = f"{SHAPE} --experts 6 --top_k {K} --layers {layers} --steps 1"
    for transfers in launch(file or OVERLAP, 2, flags, probe=context.transfers, save=False).probes:
        for name, alone in ("forward", -1), ("backward", 0):
            of_phase = [transfer for transfer in transfers if transfer[0] == name]
            assert sorted(width for _, width, _ in of_phase) == [1] * 2 * layers + [D] * 4 * layers
            assert of_phase.pop(alone) == [name, D, False]
            missing = [hidden for *_, hidden in of_phase].count(False)
            assert not missing, f"{name}: {missing} transfers without computation"


# ------------------------------------------------------------------------------------- symmetric memory: rows and slots
WIDTHS = [  # of rows, their dtypes
    *((1, dtype) for dtype in (torch.int64, torch.float32, torch.float64)),
    *((width, torch.bfloat16) for width in (33, 64, 4096)),
    *((7, torch.float32), (48, torch.float64), (2051, torch.float32)),
]


def test_kernel(file=None):
    """The kernel writes, to the bit, what the loop over ranks writes, and nothing else.

    5,000 rows are not a multiple of the kernel's block of any width here; no rows are none. Some have no place; rows
    are read more than once, and from a tensor that is not contiguous.
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
                right = torch.full((ranks, size + 2, width), 77).to(dtype)
                for row, to in zip(source.tolist(), place.tolist()):
                    if to >= 0:
                        right[to // size, 1 + to % size] = x[row]
                for who, found in zip(("the kernel", "the loop"), written):
                    wrong = (found != right).any(-1).sum().item()
                    assert not wrong, f"{who} has {wrong} wrong rows of {count} of {width} {dtype}"

    isolated(compute)


def test_rows_that_do_not_fit_the_memory():
    """Of another dtype or width: an error, where the kernel would write into what is behind the row."""

    def compute():
        module = load(SYMMETRIC)
        memory = torch.zeros(4, 3)
        to, place = module.Shared([memory], torch.tensor([memory.data_ptr()])), torch.arange(2)
        for wrong in torch.ones(2, 3).double(), torch.ones(2, 3).bfloat16(), torch.ones(2, 4), torch.ones(2, 2):
            for rows in wrong, wrong.as_subclass(OnGPU):
                with pytest.raises(TypeError, match=r"do not fit"):
                    module.push(rows, place, place, to, 4)
        assert not memory.any()

    isolated(compute)


def chosen_experts():
    """(experts [ranks, t, k], slots) of 3 ranks, which hold 2 of 6 experts each: as many rows on every rank."""
    generator = torch.Generator().manual_seed(0)
    for t, k in (1, 1), (7, 2), (5, 6):
        yield torch.rand(3, t, 6, generator=generator).argsort(2)[..., :k], 3.0
    scarce = torch.rand(3, 9, 6, generator=generator).argsort(2)[..., :2]
    for slots in 1.03, 1.0, 0.5, 0.04:  # the first: 18.54 rows, of which there may be 19
        yield scarce, slots
    for expert_of_all in range(6):  # others have no rows
        yield torch.full((3, 4, 1), expert_of_all), 3.0
    yield torch.full((3, 4, 1), 3), 1.5  # the second half of rank 1's rows have a slot, nothing of rank 2's
    yield torch.tensor([4, 2, 0])[:, None, None] + torch.arange(2).expand(3, 5, 2), 1.0  # to one other rank each
    yield torch.tensor([[0, 1], [1, 0], [0, 1], [5, 0]]).expand(3, 4, 2), 2.0  # nothing for rank 1


def slots_of_rows(module):
    """A probe: instead of training, dispatch rows, and bring them back. A token is [rank, number], its gates as well.

    Reports of every case what there is on this rank.
    """
    found = []

    def exchange(cfg, *data):
        ep = module.dist.group.WORLD
        for experts, slots in chosen_experts():
            _, t, k = experts.shape
            memory = module.Memory(ep, slots, torch.zeros(()))
            x = torch.stack([torch.full((t,), 1.0 + ep.rank()), 1.0 + torch.arange(t)], 1).requires_grad_()
            gates = (1 + 100.0 * ep.rank() + torch.arange(t * k)).view(t, k).requires_grad_()
            _, inverse, ends = module.sort_by_expert(experts[ep.rank()], 6)
            rows, their_gates, ends, route = module.dispatch(x, gates, inverse, ends, memory)
            sent = [tensor.tolist() for tensor in (route.there, ends, route.back, rows, their_gates[:, 0])]
            back = module.combine(rows * their_gates, route, memory)
            back.backward(torch.ones_like(back) * (1 + ep.rank()))
            found.append([*sent, memory.missing.item(), back.tolist(), x.grad.tolist(), gates.grad.tolist()])

    module.train = exchange
    return lambda: found


def test_every_row_has_its_slot(file=None):
    """On the rank of its expert, in the order of experts, and in these of ranks and rows; no other slot is written.

    And back. A row for which there is no slot has place -1, and only such rows have. Against loops.
    """
    seen = launch(file or SYMMETRIC, 3, f"{SHAPE} --experts 6", probe=slots_of_rows, save=False).probes
    for number, (experts, factor) in enumerate(chosen_experts()):
        _, t, k = experts.shape
        n, slots = t * k, math.ceil(factor * t * k)
        wanted = [  # (expert, rank, row) of the rows of each rank, in the order of slots
            sorted((e, r, i) for r in range(3) for i, e in enumerate(experts[r].flatten().tolist()) if e // 2 == here)
            for here in range(3)
        ]
        everything = max(map(len, wanted)) <= slots
        for rank, (there, ends, back, rows, gates, missing, brought, x_gradient, gates_gradient) in enumerate(
            cases[number] for cases in seen
        ):
            slot = {(r, i): h * slots + s for h in range(3) for s, (_, r, i) in enumerate(wanted[h]) if s < slots}
            assert there == [slot.get((rank, i), -1) for i in range(n)], f"places of case {number}"
            mine = wanted[rank][:slots]
            assert ends == [sum(e <= last for e, *_ in mine) for last in (2 * rank, 2 * rank + 1)], f"case {number}"
            empty = slots - len(mine)
            assert back == [r * n + i for _, r, i in mine] + [-1] * empty, f"origins of case {number}"
            assert rows == [[1 + r, 1 + i // k] for _, r, i in mine] + [[0, 0]] * empty, f"rows of case {number}"
            assert gates == [1 + 100 * r + i for _, r, i in mine] + [0] * empty, f"gates of case {number}"
            needed = len(wanted[rank]) / n if len(wanted[rank]) > slots else 0
            assert missing == pytest.approx(needed, rel=1e-6), f"case {number}"
            if everything:
                weight = [[1 + 100 * rank + i for i in range(token * k, token * k + k)] for token in range(t)]
                sums = [[(1 + rank) * sum(w), (1 + token) * sum(w)] for token, w in enumerate(weight)]
                assert brought == sums, f"case {number}"
                assert x_gradient == [[(1 + rank) * sum(w)] * 2 for w in weight], f"case {number}"
                gradients = [[(1 + rank) * (2 + rank + token)] * k for token in range(t)]
                assert gates_gradient == gradients, f"case {number}"


# ------------------------------------------------------------------------------ slots, symmetric memory: too few slots
def scarce(module):
    """A probe: before each validation, slots are as few as before the first step."""
    evaluate = module.evaluate

    def with_few(cfg, model, *batch):
        model.memory.slots = cfg.slots
        return evaluate(cfg, model, *batch)

    module.evaluate = with_few
    return lambda: None


def check_too_few_slots(file, world, flags):
    """A run that starts with too few slots trains and validates as the root does; the log says when slots are added."""
    common = f"{SHAPE} --experts 6 --top_k {K} --steps 3 --validate 1 --warmup 0 --lr 1e-2"
    run = launch(file, world, f"{common} --slots 0.3 {flags}", probe=scarce)
    root = launch(equivalence.MOE, 1, common)
    errors = compare.relative_errors(run.weights, root.weights) | compare.history_errors(run.history, root.history)
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], f"{file} with too few slots")
    lines = run.output[0].splitlines()
    validated, right = (
        [line for line in of if "validation loss" in line] for of in (lines, root.output[0].splitlines())
    )
    assert validated == right, f"a validation is off by what found no slot: {validated}, not {right}"
    for when in "step 1", "validation":
        first = next(line for line in lines if line.startswith(f"{when}:"))
        assert re.fullmatch(rf"{when}: --slots 0.3 held too few rows, grown to \d(\.25|\.5|\.75)?", first), first


@pytest.mark.parametrize("recipe", [SLOTS, pytest.param(SYMMETRIC, marks=pytest.mark.thorough)])
def test_too_few_slots(recipe):
    check_too_few_slots(recipe, 2, "")


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [SLOTS, SYMMETRIC])
def test_too_few_slots_of_copies(recipe):
    check_too_few_slots(recipe, 6, "--edp 2")


def validated_at_once(module):
    """A probe: a validation follows each step before its flag is read."""
    train_step = module.train_step

    def step(cfg, model, optimizer, *batch):
        result = train_step(cfg, model, optimizer, *batch)
        module.evaluate(cfg, model, *batch)
        return result

    module.train_step = step
    return lambda: None


@pytest.mark.thorough
def test_a_validation_hides_no_step():
    """Slots that it adds do not make good for a step that the optimizer has skipped."""
    equivalence.check(SLOTS, 2, "--slots 0.3", probe=validated_at_once)


def growing(module):
    """A probe: instead of training, one rank has too few slots. Reports what each is told, and has then."""
    found = []

    def lacking(cfg, *data):
        model = module.build_model(cfg)
        for missing in 1.3, 1.5, 2.0:
            model.memory.missing.fill_(missing * model.dp.rank())
            told = module.overflow(model).item()
            module.grow(model, "step 7")
            found.append((told, model.memory.slots, model.memory.missing.item(), module.overflow(model).item()))

    module.train = lacking
    return lambda: found


@pytest.mark.parametrize("recipe", [SLOTS, SYMMETRIC])
def test_one_rank_has_too_few_slots(recipe, file=None):
    """All ranks repeat the step, with as many slots: more than were missing, but no more than can be full."""
    run = launch(file or recipe, 2, f"{SHAPE} --experts 6 --slots 1.25", probe=growing, save=False)
    assert run.probes == [[(1, 1.5, 0, 0), (1, 1.75, 0, 0), (1, 2, 0, 0)]] * 2, f"ranks do not grow alike: {run.probes}"
    assert run.output[0].splitlines()[0] == "step 7: --slots 1.25 held too few rows, grown to 1.5"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [SLOTS, SYMMETRIC])
def test_the_worst_layer_counts(recipe, file=None):
    """Too few slots in one layer, which is not the last, are too few."""

    def probe(module):
        layers, route = [0], module.Router.forward

        def forward(self, x):
            gates, experts = route(self, x)
            layers[0] += 1
            spread = (torch.arange(len(x))[:, None] + torch.arange(self.top_k)) % len(self.weight)
            return gates, torch.zeros_like(experts) + torch.arange(self.top_k) if layers[0] == 2 else spread

        module.Router.forward = forward
        return lambda: None

    flags = f"{SHAPE} --layers 3 --experts 8 --top_k {K} --steps 1 --slots 1.9"
    first = launch(file or recipe, 2, flags, probe=probe, save=False).output[0].splitlines()[0]
    line = "step 1: --slots 1.9 held too few rows, grown to 2"  # all rows of both ranks
    assert first == line, f"begins with {first}, not with {line}"


def test_padding_travels(slots=1.25):
    """slots.py sends its slots, full or not, (ep-1)/ep·slots·t·top_k·d elements, and the CPU waits for nothing."""
    rows = math.ceil(slots * B * S // 2 * K / 2)
    each = ("forward", D), ("forward", 1), ("forward", D), ("backward", D), ("backward", D), ("backward", 1)
    wanted = [(phase, width, rows, rows, 8 * width * rows) for phase, width in each]
    probe = together(expert.balanced, capacity.waits_for_the_gpu, all_to_alls)
    flags = f"{SHAPE} --experts 8 --top_k {K} --steps 1 --slots {slots}"
    for _, waits, exchanges in launch(SLOTS, 2, flags, probe=probe, save=False).probes:
        assert not waits[0], f"the CPU waits for {waits[0]}"
        assert sorted(exchanges) == sorted(wanted * LAYERS)


def test_who_shares_experts_is_on_one_host(monkeypatch):
    """Eight processes on two hosts: copies of experts may be on another host, ranks that share them may not."""
    module = load(SYMMETRIC)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for edp in 2, 4, 8:
        module.check(module.Config(device="cpu", edp=edp), 8)
    with pytest.raises(SystemExit, match="^--edp 1: 8 ranks share .* the 4 of one host"):
        module.check(module.Config(device="cpu"), 8)


# -------------------------------------------------------------------------- symmetric memory: bytes, and nobody waits
def written_to_others(module):
    """A probe: [phase, width, rows] that each push of the last step writes into others' memory, and the experts."""
    pushed, routed, ranks = [], [], []
    push, train_step, route, build_model = module.push, module.train_step, module.Router.forward, module.build_model

    def pushing(x, source, place, to, size):
        pushed.append((phase(), x.shape[1], int(((place >= 0) & (place // size != ranks[0])).sum())))
        push(x, source, place, to, size)

    def forward(self, x):
        gates, experts = route(self, x)
        routed.append(experts)
        return gates, experts

    def step(*args):
        pushed.clear(), routed.clear()
        return train_step(*args)

    def build(*args):
        model = build_model(*args)
        ranks.append(model.ep.rank())
        return model

    module.push, module.train_step, module.Router.forward, module.build_model = pushing, step, forward, build
    return lambda: (pushed, [experts.tolist() for experts in routed])


@pytest.mark.thorough
def test_bytes_written(world=4, edp=2, experts=8, forced=True, file=None):
    """Rows go to other ranks twice in forward and twice in backward, per layer; gates once and once, origins once.

    With balanced experts a rank writes (ep-1)/ep·t·top_k·d elements in each; else what its tokens chose. And the CPU
    does not wait.
    """
    ep, t = world // edp, B * S // world

    probe = together(*[expert.balanced] * forced, written_to_others, capacity.waits_for_the_gpu)
    flags = f"{SHAPE} --experts {experts} --top_k {K} --steps 2 --edp {edp}"
    seen = launch(file or SYMMETRIC, world, flags, probe=probe, save=False).probes
    for rank, (*_, (pushed, _), waits) in enumerate(seen):
        assert not waits[1], f"the CPU waits for {waits[1]}"  # the first step has allocated the memory
        group = [other for other in range(world) if other // ep == rank // ep]  # that share out the experts with it
        wanted = []
        for layer in range(LAYERS):
            chosen = {other: np.array(seen[other][-2][1][layer]).flatten() // (experts // ep) for other in group}
            there = int((chosen[rank] != rank % ep).sum())
            back = sum(int((chosen[other] == rank % ep).sum()) for other in group if other != rank)
            if forced:
                assert there == back == (ep - 1) * t * K // ep
            wanted += [("forward", 1, there), ("forward", 1, there), ("forward", D, there), ("forward", D, back)]
            wanted += [("backward", D, there), ("backward", D, back), ("backward", 1, back)]
        assert sorted(pushed) == sorted(wanted), f"rank {rank}"


# ---------------------------------------------------------------------- symmetric memory: other sizes, and late ranks
def validating(module):
    """A probe: after the first step a validation with twice the batch, after the second with a third of it.

    Asserts that memory is allocated where it must grow, and nowhere else: a batch that is smaller again fits. What it
    replaces is let go first.
    """
    allocated, held, steps, train_step, share = [], [], [0], module.train_step, module.share

    def counted(*args):
        assert not any(not old.expired() for old in held), "old memory is still held"
        allocated.append(steps[0])
        tensors, barrier = share(*args)
        held.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        return tensors, barrier

    def step(cfg, model, optimizer, inputs, targets):
        result = train_step(cfg, model, optimizer, inputs, targets)
        with torch.no_grad():
            here = inputs.chunk(model.dp.size())[model.dp.rank()], targets.chunk(model.dp.size())[model.dp.rank()]
            for_all = [torch.cat([x, x]) if steps[0] == 0 else x[: max(1, len(x) // 3)] for x in here]
            losses = [module.forward(cfg, model, *for_all) for _ in range(2)]
            assert losses[0] == losses[1] and losses[0].isfinite()
        steps[0] += 1
        return result

    def report():
        assert allocated == [0, 0], f"allocated in steps {allocated}"

    module.train_step, module.share = step, counted
    return report


@pytest.mark.thorough
def test_validation_of_another_size(file=None):
    """Before and after memory has grown for a larger batch, and with a smaller one, training is the root's."""
    equivalence.check(file or SYMMETRIC, 2, "", root=equivalence.MOE, probe=validating)


def late(module):
    """A probe: now and then a rank is late, before it writes into others' memory, before a barrier, before it reads.

    And where memory is shared, all ranks are later than the first, which removes the files.
    """
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
