"""moe.py computes what Mixtral computes; rows reach their experts, and their outputs return, while others compute, and
whichever rank is late; where there are too few slots for them, there will be more."""

import ast
import contextlib
import inspect
import os
import re
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import compare
import equivalence
import numpy as np
import pytest
import torch
import witness
from launch import in_a_fork, isolated, launch, load, run_folder
from probes import OnGPU, evaluated, phase, sent, together, transfers
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

MOE = "07_expert/moe.py"
PARALLEL = "07_expert/expert_parallel.py"
AUXILIARY, BIAS = "07_expert/auxiliary_loss.py", "07_expert/bias_balancing.py"
CAPACITY, OVERLAP = "07_expert/capacity.py", "07_expert/overlap.py"
SLOTS, SYMMETRIC = "07_expert/slots.py", "07_expert/symmetric_memory.py"
NODES = equivalence.NODES
LAYERS, D, S, B, E, K, FFN = 2, 32, 16, 12, 8, 2, 48
SHAPE = f"--device cpu --dtype float64 --layers {LAYERS} --dim {D} --heads 4 --kv_heads 2 --ffn {FFN}"
SHAPE += f" --seq {S} --batch {B}"
SMALL = f"{SHAPE} --experts {E} --top_k {K}"
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    "recipe, world, flags",
    [
        (PARALLEL, 4, ""),
        (NODES, 4, "--nodes 4 --microbatches 1"),
        pytest.param(SYMMETRIC, 2, "", marks=pytest.mark.thorough),
    ],
)
def test_ranks_without_rows(recipe, world, flags, file=None):
    """All scores are equal: every token has the same quarter of the experts, and whoever holds others is idle."""
    root = equivalence.root_of(recipe)
    weights = compare.read(equivalence.start(root, equivalence.SHAPE))[0]
    tied = {name: tensor * (".gate." not in name) for name, tensor in weights.items()}
    save_file(tied, init := run_folder() / "tied.safetensors")
    common = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init}"
    run, theirs = (
        launch(path, ranks, f"{common} {equivalence.GRADIENT} {own}")
        for path, ranks, own in ((file or recipe, world, flags), (root, 1, "--microbatches 1" * (root == NODES)))
    )
    assert theirs.history[0][3] == 4, "the busiest expert has not four times the mean"
    errors = compare.relative_errors(run.weights, theirs.weights, tied)
    errors |= compare.history_errors(run.history, theirs.history)
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], f"{recipe} with idle ranks")


# -------------------------------------------------------------------------------------------------------- transformers
@pytest.mark.parametrize(
    "recipe, own",
    [
        (MOE, dict(experts="--experts 8 --top_k 2")),
        (NODES, dict(rope="--theta 5e5 --batch 8", shared=1)),
        # batches so large that every expert has rows
        pytest.param(MOE, dict(rope="--theta 10000 --batch 16", experts="--experts 8 --top_k 1"), marks=THOROUGH),
        pytest.param(NODES, dict(rope="--theta 5e5 --batch 8", shared=2), marks=THOROUGH),
    ],
)
def test_computes_what_transformers_computes(recipe, own):
    witness.check(recipe, **own)


# ----------------------------------------------------------------------------------------- functions, alone
@pytest.mark.parametrize("recipe", [MOE, CAPACITY, NODES])
def test_unpermute_rounds_once(recipe, file=None):
    """In bfloat16 the rows of a token are added in fp32: the error is half a unit."""

    def error():
        module, k = load(file or recipe), 8
        order, inverse, _ = module.sort_by_expert(torch.arange(k).repeat(100, 1), k)
        y = torch.randn(100 * k, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
        exact = y[inverse].double().view(100, k, 16).sum(1)
        rows = y.unflatten(0, (k, 100)) if "capacity" in recipe else y  # there, rows are in slots of the experts
        added = module.Unpermute.apply(rows, order, inverse, k)
        return ((added.double() - exact).abs() / (exact.abs() + 1e-3)).max().item()  # sums may cancel

    assert isolated(error) <= 1.01 * 2**-8, "rows are rounded more than once"


@pytest.mark.parametrize("recipe", [PARALLEL, CAPACITY, OVERLAP])
def test_gates_are_not_rounded(recipe, file=None):
    """Experts multiply their hidden units by gates of fp32, and round the product once."""

    def error():
        module, generator, rows = load(file or recipe), torch.Generator().manual_seed(0), 500
        alone = SimpleNamespace(size=lambda: 1)
        experts = module.Experts(module.Config(dim=64, ffn=64, experts=1, top_k=1, device="cpu"), alone)
        x, gates = torch.randn(rows, 64, generator=generator).bfloat16(), torch.rand(rows, 1, generator=generator)
        weight = torch.randn(128, 64, generator=generator).bfloat16()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            experts.gate_up_proj[:], experts.down_proj[:] = weight, torch.eye(64)  # hidden units come out
            gate, up = (x @ weight.T).chunk(2, dim=-1)
            exact = (torch.nn.functional.silu(gate) * up).double() * gates.double()
            given = [x[None], gates[None]] if "capacity" in recipe else [x, gates, torch.tensor([rows]).int()]
            given += [[p.bfloat16() for p in experts.parameters()]] if "overlap" in recipe else []
            y = experts(*given).double().view_as(exact)
        return ((y - exact).abs() / exact.abs().clamp(min=1e-30)).max().item()

    assert isolated(error) <= 1.01 * 2**-8, "gates are rounded"


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_grouped_matmul(dtype, file=None):
    """Each block by its own matrix; in bfloat16 by the kernel of GPUs, which rounds once. No rows: a gradient of 0."""

    def compute():
        torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
        module, generator = load(file or MOE), torch.Generator().manual_seed(0)
        low, wide = getattr(torch, dtype), torch.float32 if dtype == "bfloat16" else torch.float64
        relative, absolute = (2**-8, 1e-5) if dtype == "bfloat16" else (0, 1e-13)
        for sizes in [24, 0, 16, 40], [0, 8, 0, 0], [3, 5, 1, 0], [0, 0]:
            x = torch.randn(sum(sizes), 16, generator=generator).to(low).requires_grad_()
            w = torch.randn(len(sizes), 32, 16, generator=generator).to(wide).requires_grad_()
            dy, ends = torch.randn(sum(sizes), 32, generator=generator).to(low), torch.tensor(sizes).cumsum(0).int()
            y = module.grouped_matmul(x.as_subclass(OnGPU) if dtype == "bfloat16" else x, w, ends)
            found = [t.as_subclass(torch.Tensor) for t in (y, *torch.autograd.grad(y, (x, w), dy))]
            assert [t.dtype for t in found] == [low, low, wide]
            exact = [t.detach().to(low).double().requires_grad_() for t in (x, w)]
            right = torch.cat([rows @ matrix.T for rows, matrix in zip(exact[0].split(sizes), exact[1])])
            right = [right, *torch.autograd.grad(right, exact, dy.double())]
            for ours, theirs in zip(found, right):
                near = (ours - theirs).abs() <= relative * theirs.abs() + absolute
                assert near.all(), f"the product of {sizes} is off by more than its rounding"

    isolated(compute)


@pytest.mark.parametrize("recipe", [MOE, AUXILIARY, BIAS, NODES])
def test_router_keeps_close_scores_apart(recipe, file=None):
    """Under autocast or cast to bfloat16, scores are those of fp32: experts 2^-10 apart would be equal in 16 bits."""

    def compute(top_k):
        module, generator = load(file or recipe), torch.Generator().manual_seed(0)
        groups = dict(groups=4, top_groups=top_k) if recipe == NODES else {}
        router = module.Router(module.Config(dim=64, experts=4, top_k=top_k, device="cpu", **groups))
        one = torch.randn(64, generator=generator).abs()
        with torch.no_grad():
            router.weight.copy_(torch.stack([one, one * (1 + 2**-10), one * (1 - 2**-10), one / 2]) / 16)
        x = torch.randn(50, 64, generator=generator).abs().bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            gates, experts, *_ = router(x)
        logits = x.double() @ router.weight.double().T
        best, order = (logits.sigmoid() if recipe == NODES else logits.softmax(-1)).topk(top_k)
        assert torch.equal(experts, order), "close scores are confused"
        assert order.tolist() == [[1, 0][:top_k]] * 50 and gates.dtype == torch.float32
        wanted = best / best.sum(-1, keepdim=True) if top_k > 1 else best
        scale = 2.5 if recipe == NODES else 1
        assert (gates / (scale * wanted) - 1).abs().max() <= 1e-5, "gates are others"
        assert top_k == 1 or (gates[:, 0] > gates[:, 1]).all()
        assert router.bfloat16()(x)[0].dtype == torch.float32

    for top_k in 2, 1:
        isolated(partial(compute, top_k))


# ------------------------------------------------------------------------------------------------------- bytes, memory
def balanced(module):
    """A probe: token i goes to experts i, i + 1, ... whatever the router says; gates stay differentiable."""

    def forward(self, x):
        probabilities = (x @ self.weight.T).softmax(-1, dtype=self.weight.dtype)
        count = len(self.weight)
        experts = (torch.arange(len(x))[:, None] + torch.arange(self.top_k)) % count
        gates = probabilities.gather(1, experts)
        return gates / gates.sum(-1, keepdim=True), experts

    module.Router.forward = forward
    return lambda: None


def experts_here(module):
    """A probe: what this rank holds of the experts after training, by name."""
    models, build_model = [], module.build_model
    module.build_model = lambda *args: models.append(build_model(*args)) or models[0]
    return lambda: {name: p.detach().numpy() for name, p in models[0].named_parameters() if ".experts." in name}


@pytest.mark.parametrize(
    "recipe, ep, edp, flags, rows",
    [
        (PARALLEL, 2, 2, "", B * S // 4 * K // 2),  # (ep-1)/ep·t·top_k
        (SLOTS, 2, 1, "--slots 1.25", 1.25 * B * S // 2 * K / 2),  # (ep-1)/ep·slots·t·top_k, full or not
        (CAPACITY, 2, 1, "--capacity 1000", B * S // 2 * E / 2),  # an expert needs no more slots than a rank has tokens
    ],
)
def test_bytes_sent_and_held(recipe, ep, edp, flags, rows, file=None):
    """Per layer two all-to-alls of rows in forward, two in backward; of gates in fp32 one and one. Copies are equal."""
    flags = f"{SMALL} --dtype bfloat16 --steps 1 --edp {edp} {flags}"
    probes = launch(file or recipe, ep * edp, flags, probe=together(balanced, sent, experts_here), save=False).probes
    for rank, (_, (seen, _), held) in enumerate(probes):
        assert seen == dict.fromkeys(("forward", "backward"), LAYERS * rows * (2 * D * 2 + 4)), "other rows are sent"
        elements = sum(p.size for p in held.values())
        assert elements == LAYERS * E // ep * 3 * D * FFN, "a rank holds not 1/ep of the experts"
        for name, tensor in held.items():
            assert np.array_equal(tensor, probes[rank % ep][2][name]), f"copies of {name} differ"


@pytest.mark.parametrize("recipe", [CAPACITY, SLOTS, SYMMETRIC])
@in_a_fork
def test_the_cpu_waits_for_nothing(recipe, file=None):
    """A step runs with tensors without numbers, but for one_by_one and push, which count rows on CPUs alone."""
    module = load(file or recipe)
    module.one_by_one, module.push = lambda x, w, ends: x @ w.sum(0).T, lambda *_: None
    module.full_tensor = lambda cfg, name, shape: torch.empty(shape, device="meta")
    module.share = lambda n, dtype, device, ep: ([torch.empty(n, dtype=dtype, device=device)] * 2, lambda: None)
    torch.autocast = lambda *_, **__: contextlib.nullcontext()
    module.dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sizes = dict(layers=LAYERS, dim=D, heads=4, kv_heads=2, ffn=FFN, seq=S, batch=B, experts=E, top_k=K)
    cfg = module.Config(**sizes, device="meta")
    batch = torch.zeros(2, B, S, dtype=torch.long, device="meta")
    loss, norm, *_ = module.train_step(cfg, module.build_model(cfg), Mock(), *batch)
    assert loss.is_meta and norm.is_meta


def hops(module):
    """A probe: of every layer, how many tokens go to each node, [nodes]; of every exchange of rows the phase, the
    ranks that take part, and how many rows go to each."""
    tokens, rows, route, all_to_all = [], [], module.Router.forward, module.dist.all_to_all_single

    def chosen(self, x):
        gates, experts = route(self, x)
        tokens.append(torch.zeros(len(x), 2).scatter_(1, experts // 8, 1).sum(0).tolist())
        return gates, experts

    def exchange(out, x, arriving=None, leaving=None, group=None, async_op=False):
        if x.is_floating_point() and x.shape[1] <= 4:  # top_k
            assert x.dtype == torch.float32, "gates are rounded"
        elif x.is_floating_point():
            rows.append((phase(), module.dist.get_process_group_ranks(group), leaving))
        return all_to_all(out, x, arriving, leaving, group, async_op)

    module.Router.forward, module.dist.all_to_all_single = chosen, exchange
    return lambda: (tokens, rows)


def test_a_token_crosses_once_per_node(file=NODES):
    """Rows to each node: the tokens that have an expert there, once each; as many come back, and so in backward."""
    flags = f"{equivalence.SHAPE} --device cpu --dtype bfloat16 --data {equivalence.documents()} --steps 1"
    probes = launch(file, 4, f"{flags} --nodes 2 --microbatches 1", probe=hops, save=False).probes
    for rank, (tokens, rows) in enumerate(probes):
        peers = [rank % 2, rank % 2 + 2]  # the ranks of the same place on both nodes
        back = [[probes[peer][0][layer][rank // 2] for peer in peers] for layer in range(len(tokens))]
        for name, what in ("forward", "rows"), ("backward", "gradients"):
            crossing = [sent for when, ranks, sent in rows if when == name and ranks == peers]
            assert sorted(crossing) == sorted(tokens + back), f"other {what} cross"
        first = rank // 2 * 2
        assert all(ranks in (peers, [first, first + 1]) for _, ranks, _ in rows), "rows cross beside the first hop"


@pytest.mark.parametrize("name", "expert_parallel capacity slots node_limited".split())
def test_no_all_to_all_is_compiled(name, file=None):
    """torch 2.11 compiles one to gradients of 0, on GPUs; later versions do not, so here the code is read."""
    tree = ast.parse(inspect.getsource(load(file or f"07_expert/{name}.py")))
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name != "backward"]
    sending = {f.name: f for f in functions if "AllToAll.apply(" in ast.unparse(f)}
    left = [name for name, f in sending.items() if "torch.compiler.disable" not in map(ast.unparse, f.decorator_list)]
    assert sending and not left, f"{left} would be compiled"


# ---------------------------------------------------------------------------------------------------------------- load
def rows_of_experts(module):
    """A probe: rows of the experts [layers, e] in every step."""
    steps, train_step, route = [], module.train_step, module.Router.forward

    def forward(self, x):
        gates, experts = route(self, x)
        if torch.is_grad_enabled():
            steps[-1].append(experts.flatten().bincount(minlength=len(self.weight)).tolist())
        return gates, experts

    def step(*args):
        steps.append([])
        return train_step(*args)

    module.Router.forward, module.train_step = forward, step
    return lambda: steps


@pytest.mark.parametrize("recipe, world, flags", [(MOE, 1, ""), (PARALLEL, 4, "--edp 2")])
def test_busiest_expert(recipe, world, flags, file=None):
    """Its rows over the mean, in the worst layer: of the step, of all ranks, without those of validations around it."""
    flags = f"{SMALL} --steps 3 --lr 1e-1 --warmup 0 {flags}"
    run = launch(file or recipe, world, flags, probe=together(rows_of_experts, evaluated()))
    rows = np.sum([rows for rows, _ in run.probes], axis=0)  # steps layers e
    assert rows.shape == (3, LAYERS, E) and (rows.sum(-1) == B * S * K).all()
    wanted = (rows.max(-1) / rows.mean(-1)).max(-1)
    logged = [busiest for *_, busiest in run.history]
    assert logged == pytest.approx(wanted, rel=1e-6) and len(set(logged)) == 3, f"the load is {wanted}, not {logged}"


@pytest.mark.parametrize("recipe", ["06_pipeline/split_backward.py", "10_mixed_precision/fp8_tensorwise.py", MOE])
def test_layers_initialise_themselves(recipe):
    """Pasted into another trainer, they start like nn.Linear: uniformly, up to one over the root of the inputs."""
    module = load(recipe)
    cfg = dict(dim=64, ffn=96, experts=4, top_k=2, device="cpu")
    if recipe == MOE:
        layers = [module.Router(module.Config(**cfg)), module.Experts(module.Config(**cfg))]
    else:
        layers = [module.Linear(64, 96)]
    for p in (p for layer in layers for p in layer.parameters()):
        bound = p.shape[-1] ** -0.5
        assert 0.9 * bound < p.abs().max() <= bound and p.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)


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
    """Rows of another dtype or width are an error: the kernel would write into the memory behind the row."""
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
    weights = compare.read(equivalence.start(MOE, f"{SHAPE} --experts 6"))[0]
    weights["model.layers.0.block_sparse_moe.gate.weight"].zero_()
    save_file(weights, init := run_folder() / "one_sided.safetensors")
    common += f" --init {init}"
    run = launch(file or recipe, world, f"{common} --slots 1 {flags}", probe=scarce)
    root = launch(MOE, 1, common)
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
    probe = together(balanced, writes, evaluated())
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
    module.push, module.find_slots, module.share = delayed(module.push), delayed(module.find_slots), share
    module.torch.from_file = delayed(module.torch.from_file, min(1, rank))
    return lambda: None


def check_late_ranks(file, world, flags):
    equivalence.check(file, world, flags, root=MOE, probe=late)


@pytest.mark.thorough
def test_a_rank_may_be_late():
    """No barrier is missing: whoever reads waits for those who write, whoever writes for those who read."""
    check_late_ranks(SYMMETRIC, 4, "--edp 2")
