"""moe.py computes what Mixtral computes; with expert parallelism rows reach their experts, and their outputs return.

Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

from types import SimpleNamespace

import contract
import equivalence
import numpy as np
import pytest
import torch
import witness
from contract import refusal
from launch import isolated, launch, load, once
from probes import OnGPU, all_to_alls, evaluated, together
from streams import streams

MOE = "07_expert/moe.py"
PARALLEL = "07_expert/expert_parallel.py"
LAYERS, D, S, B, E, K = 2, 32, 16, 12, 8, 2
SHAPE = f"--device cpu --dtype float64 --layers {LAYERS} --dim {D} --heads 4 --kv_heads 2 --ffn 48"
SHAPE += f" --seq {S} --batch {B}"
SMALL = f"{SHAPE} --experts {E} --top_k {K}"


SIZES = [  # that may fail where the hardest of each recipe, which the contract has, does not
    (PARALLEL, 8, "--experts 56 --top_k 4 --batch 16"),  # more experts than tokens of a rank
    (PARALLEL, 6, "--edp 2 --experts 6"),
    ("07_expert/bias_balancing.py", 2, "--bias_rate 0 --microbatches 1"),
    ("07_expert/capacity.py", 3, "--experts 9 --top_k 4 --capacity 2.25"),
    ("07_expert/overlap.py", 3, "--experts 9 --top_k 4"),
    ("07_expert/overlap.py", 2, "--batch 2"),  # a sequence on each rank: there are no halves to take turns
    ("07_expert/slots.py", 3, "--experts 9 --top_k 4"),
    ("07_expert/slots.py", 2, "--slots 1"),  # too few: the step is repeated
    ("07_expert/slots.py", 8, "--batch 16 --top_k 1 --slots inf"),
    ("07_expert/symmetric_memory.py", 3, "--experts 9 --top_k 4"),
    ("07_expert/symmetric_memory.py", 2, "--slots 1"),
    ("07_expert/symmetric_memory.py", 8, "--batch 16 --top_k 1 --slots inf"),  # no more than all rows ever come
]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", SIZES)
def test_gradient_on_other_sizes(recipe, world, flags, monkeypatch):
    monkeypatch.setitem(equivalence.HARDEST, recipe, (world, flags))
    contract.check_gradient(recipe)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe, flags", [(MOE, ""), ("07_expert/capacity.py", "--capacity 4"), ("07_expert/overlap.py", "")]
)
def test_compiled(recipe, flags):
    """Rows in any number, slots, and halves that take turns; what other recipes compile these compile, too."""
    equivalence.check_quickly(recipe, 1 if recipe == MOE else 2, f"{flags} --compile")


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["at once", "late"])
@pytest.mark.parametrize("recipe", [PARALLEL, "07_expert/overlap.py"])
def test_whenever_streams_get_to_it(recipe, when):
    """Rows, and their gradients, arrive at some time between the start of their exchange and the wait for it.

    A batch of 4 on each of 3 ranks; its halves have different numbers of rows for each expert.
    """
    equivalence.check(recipe, 3, "--experts 9", probe=streams(when))


# -------------------------------------------------------------------------------------------------------- transformers
@pytest.mark.parametrize(
    "rope, top_k",
    [
        ("", 2),
        pytest.param("--theta 10000 --batch 16", 1, marks=pytest.mark.thorough),  # so that every expert has rows
    ],
)
def test_computes_what_transformers_computes(rope, top_k):
    witness.check(MOE, rope, f"--experts 8 --top_k {top_k}")


# ----------------------------------------------------------------------------------------- functions, alone
@pytest.mark.parametrize("recipe", [MOE, "07_expert/capacity.py", "07_expert/node_limited.py", "08_4d/moe.py"])
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


@pytest.mark.parametrize(
    "recipe",
    "moe expert_parallel auxiliary_loss bias_balancing node_limited capacity overlap slots symmetric_memory".split(),
)
def test_gates_are_not_rounded(recipe, file=None):
    """Experts multiply their hidden units by gates of fp32, and round the product once."""
    recipe = f"07_expert/{recipe}.py"

    def error():
        module, generator, rows = load(file or recipe), torch.Generator().manual_seed(0), 500
        alone = () if recipe == MOE else (SimpleNamespace(size=lambda: 1),)
        experts = module.Experts(module.Config(dim=64, ffn=64, experts=1, top_k=1, device="cpu"), *alone)
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


def test_grouped_matmul(file=None):
    """Each block by its own matrix. An expert without rows has a gradient: zeros, even where memory was in use."""

    def compute():
        torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
        module, generator = load(file or MOE), torch.Generator().manual_seed(2)
        for sizes in [3, 0, 2, 4], [0, 5, 0, 0], [0, 0, 0, 6], [1], [0, 0], [2, 3, 1]:
            x = torch.randn(sum(sizes), 5, generator=generator, dtype=torch.float64, requires_grad=True)
            w = torch.randn(len(sizes), 7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
            dy = torch.randn(sum(sizes), 7, generator=generator, dtype=torch.float64)
            y = module.grouped_matmul(x, w, torch.tensor(sizes).cumsum(0).int())
            expert = [e for e, size in enumerate(sizes) for _ in range(size)]
            assert y.shape == dy.shape and all((y[i] - w[e] @ x[i]).norm() <= 1e-14 for i, e in enumerate(expert))
            dx, dw = torch.autograd.grad(y, (x, w), dy)
            assert all((dx[i] - dy[i] @ w[e]).norm() <= 1e-13 for i, e in enumerate(expert))
            right = torch.zeros_like(w)
            for i, e in enumerate(expert):
                right[e] += torch.outer(dy[i], x[i].detach())
            assert (dw - right).norm() <= 1e-13
            assert all(not dw[e].any() for e, size in enumerate(sizes) if size == 0), "garbage in a gradient"

    isolated(compute)


def test_grouped_matmul_in_one_kernel():
    """What GPUs run in bfloat16: rounded once, zeros for an expert without rows, and the gradients' dtypes."""

    def compute():
        module, generator = load(MOE), torch.Generator().manual_seed(0)
        for sizes in [24, 0, 16, 40], [0, 8, 0, 0], [3, 5, 1, 0], [0, 0]:
            x = torch.randn(sum(sizes), 16, generator=generator).bfloat16().requires_grad_()
            w = torch.randn(len(sizes), 32, 16, generator=generator).requires_grad_()
            dy, ends = torch.randn(sum(sizes), 32, generator=generator).bfloat16(), torch.tensor(sizes).cumsum(0).int()
            y = module.grouped_matmul(x.as_subclass(OnGPU), w, ends).as_subclass(torch.Tensor)
            found = [y, *(g.as_subclass(torch.Tensor) for g in torch.autograd.grad(y, (x, w), dy))]
            assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
            exact = [t.detach().double().requires_grad_() for t in (x, w.bfloat16())]
            right = module.one_by_one(*exact, ends)
            right = [right, *torch.autograd.grad(right, exact, dy.double())]
            for ours, theirs in zip(found, right):
                assert ((ours - theirs).abs() <= 2**-8 * theirs.abs() + 1e-5).all(), sizes  # sums are of float32

    isolated(compute)


@pytest.mark.parametrize("recipe", [MOE, "07_expert/auxiliary_loss.py", "07_expert/bias_balancing.py", "08_4d/moe.py"])
def test_router_keeps_close_scores_apart(recipe, file=None):
    """Under bfloat16's autocast too, scores are those of fp32: in 16 bits experts 2^-10 apart would be equal.

    A model cast to bfloat16 still routes in fp32.
    """

    def compute():
        module = load(file or recipe)
        router = module.Router(module.Config(dim=64, experts=4, top_k=2, device="cpu"))
        generator = torch.Generator().manual_seed(0)
        one = torch.randn(64, generator=generator).abs()
        with torch.no_grad():
            router.weight.copy_(torch.stack([one, one * (1 + 2**-10), one * (1 - 2**-10), one / 2]) / 16)
        x = torch.randn(50, 64, generator=generator).abs().bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            gates, experts, *_ = router(x)
        exact = (x.double() @ router.weight.double().T).softmax(-1)
        highest, order = exact.topk(2)
        assert torch.equal(experts, order), "close scores are confused"
        assert order.tolist() == [[1, 0]] * 50 and gates.dtype == torch.float32
        assert (gates / (highest / highest.sum(-1, keepdim=True)) - 1).abs().max() <= 1e-5
        assert (gates[:, 0] > gates[:, 1]).all()
        assert router.bfloat16()(x)[0].dtype == torch.float32

    isolated(compute)


# -------------------------------------------------------------------------------------------------- dispatch, combine
ROUTES = [  # rows of ranks 0, 1, 2 for experts 0 to 5: ranks hold two each
    [[0, 0, 5, 2, 0, 0], [1, 0, 2, 0, 4, 1], [3, 1, 0, 0, 0, 0]],  # 0 and 2 send to one other rank, nothing to itself
    [[0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 7]],  # rank 0 has no rows
    [[0, 0, 0, 1, 0, 0], [0, 0, 1, 2, 0, 0], [0, 0, 4, 0, 0, 0]],  # all go to one rank
    [[0, 0, 0, 0, 0, 0]] * 3,
]


def there_and_back(module):
    """A probe: instead of training, send rows through dispatch, multiply them by their gates, and combine.

    A row is [rank, number, expert]: every rank knows what may come to it. Reports what is wrong.
    """
    wrong = []

    def exchange(cfg, *data):
        ep = module.dist.group.WORLD
        for number, route in enumerate(ROUTES):
            counts = torch.tensor(route[ep.rank()])
            experts = torch.arange(6).repeat_interleave(counts)
            n = len(experts)
            x = torch.stack([torch.full((n,), ep.rank()), torch.arange(n), experts], 1).double().requires_grad_()
            gates = (100.0 * ep.rank() + torch.arange(n)).double()[:, None].requires_grad_()
            rows, their_gates, ends, way = module.dispatch(x, gates, counts.cumsum(0).int(), ep)
            here = [sum(counts[expert] for counts in route) for expert in (2 * ep.rank(), 2 * ep.rank() + 1)]
            found = {
                "ends": ends.tolist() == [here[0], sum(here)],
                "experts": rows[:, 2].tolist() == [2 * ep.rank()] * here[0] + [2 * ep.rank() + 1] * here[1],
                "gates": torch.equal(their_gates[:, 0], 100 * rows[:, 0] + rows[:, 1]),
                "rows": len({tuple(row) for row in rows.tolist()}) == len(rows) == sum(here),
                "order": torch.equal(module.combine(rows, way, ep), x),
            }
            weight = torch.arange(3.0 * n, dtype=torch.float64).view(n, 3) + ep.rank()
            y = module.combine(rows * their_gates, way, ep)
            found["products"] = torch.equal(y, x * gates)
            y.backward(weight)
            found["gradients of rows"] = torch.equal(x.grad, weight * gates)
            found["gradients of gates"] = torch.equal(gates.grad, (weight * x).sum(1, keepdim=True))
            wrong.extend(f"{name} of route {number}" for name, right in found.items() if not right)

    module.train = exchange
    return lambda: wrong


def test_rows_go_to_their_experts_and_back(file=None):
    """With their gates; and gradients go the way back. Ranks may have no rows: for others, for themselves, at all."""
    flags = f"{SHAPE} --experts 6"
    assert launch(file or PARALLEL, 3, flags, probe=there_and_back, save=False).probes == [[]] * 3


# --------------------------------------------------------------------------------------------------------------- bytes
def balanced(module):
    """A probe: token i goes to experts i, i + 1, ... whatever the router says; gates stay differentiable."""

    def forward(self, x):
        probabilities = (x @ self.weight.T).softmax(-1)
        count = len(self.weight)
        experts = (torch.arange(len(x))[:, None] + torch.arange(self.top_k)) % count
        gates = probabilities.gather(1, experts)
        return gates / gates.sum(-1, keepdim=True), experts

    module.Router.forward = forward
    return lambda: None


def test_bytes_sent():
    """Two all-to-alls of rows in forward and two in backward, per layer; of gates one and one. Nothing else.

    With balanced experts a rank sends, and gets, (ep-1)/ep·t·top_k·d elements in each.
    """
    rows = B * S // 4 * K // 2  # of 4 ranks, each in a pair that shares out the experts

    flags = f"{SHAPE} --experts {E} --top_k {K} --steps 1 --edp 2"
    each = ("forward", D), ("forward", 1), ("forward", D), ("backward", D), ("backward", D), ("backward", 1)
    wanted = [(phase, width, rows, rows, 8 * width * rows) for phase, width in each]
    for _, exchanges in launch(PARALLEL, 4, flags, probe=together(balanced, all_to_alls)).probes:
        assert sorted(exchanges) == sorted(wanted * LAYERS)


# -------------------------------------------------------------------------------------------------------------- memory
def experts_here(module):
    """A probe: what this rank holds of the experts after training: its place among those that share them, tensors."""
    models, build_model = [], module.build_model
    module.build_model = lambda *args: models.append(build_model(*args)) or models[0]

    def report():
        held = {name: p.detach().numpy() for name, p in models[0].named_parameters() if ".experts." in name}
        return models[0].ep.size(), models[0].ep.rank(), held

    return report


def in_one_tensor(weights, name):
    """All experts of a layer in one tensor, as they are in memory, from the file."""
    folder, part = name.replace(".mlp.", ".block_sparse_moe.").rsplit(".", 1)
    names = [f"{folder}.{i}" for i in range(E)]
    if part == "down_proj":
        return torch.stack([weights[f"{expert}.w2.weight"] for expert in names])
    return torch.stack([torch.cat([weights[f"{expert}.{w}.weight"] for w in ("w1", "w3")]) for expert in names])


def test_each_rank_holds_its_share(world=4, edp=2, file=None):
    """e/ep experts on each rank; copies agree to the bit after training, and the file has every expert once."""
    ep = world // edp
    run = launch(file or PARALLEL, world, f"{SMALL} --edp {edp} --steps 2 --warmup 0", probe=experts_here)
    root = root_built(f"{SMALL} --steps 0")
    assert {name: t.shape for name, t in run.weights.items()} == {name: t.shape for name, t in root.items()}
    for size, rank, held in run.probes:
        assert size == ep, f"{size} ranks share the experts"
        assert len(held) == 2 * LAYERS
        for name, mine in held.items():
            whole = in_one_tensor(run.weights, name)
            assert mine.nbytes == whole.nbytes // ep, f"{name} is not 1/{ep} of the experts"
            assert mine.tobytes() == whole.chunk(ep)[rank].numpy().tobytes(), f"copies of {name} differ"
            assert not np.array_equal(mine, in_one_tensor(root, name).chunk(ep)[rank]), f"{name} was not trained"
    assert sorted(rank for _, rank, _ in run.probes) == sorted([*range(ep)] * edp)


@once
def root_built(flags):
    """The root's weights."""
    return launch(MOE, 1, flags).weights


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


def unwritten(module):
    """A probe: memory that nobody has written holds the largest numbers there are."""
    torch.use_deterministic_algorithms(True)
    return lambda: None


LOADS = f"{SMALL} --steps 3 --lr 1e-1 --warmup 0"


def test_busiest_expert(recipe=PARALLEL, world=4, flags="--edp 2", file=None):
    """The root's load: of the step, with the rows of all ranks, and without those of validations around it."""
    run = launch(file or recipe, world, f"{LOADS} {flags}", probe=together(unwritten, evaluated()))
    logged = [busiest for *_, busiest in run.history]
    assert logged == roots_loads(), f"the root's load is {roots_loads()}, not {logged}"


@once
def roots_loads():
    """The loads that the root logs: the rows of the busiest expert over the mean, in the worst layer."""
    run = launch(MOE, 1, LOADS, probe=together(unwritten, rows_of_experts, evaluated()))
    logged, rows = [busiest for *_, busiest in run.history], np.array(run.probes[0][1])  # steps layers e
    assert rows.shape == (3, LAYERS, E) and (rows.sum(-1) == B * S * K).all()
    wanted = (rows.max(-1) / rows.mean(-1)).max(-1)
    assert logged == pytest.approx(wanted, rel=1e-6) and len(set(logged)) == 3  # float32
    return logged


# --------------------------------------------------------------------------------------------------------------- sizes
REFUSED = [  # recipes, ranks, flags, what the one line must have
    ((MOE, PARALLEL), 1, "--top_k 9", ["--top_k 9", "at most", "--experts 8"]),
    ((MOE, PARALLEL), 1, "--device cuda --dtype bfloat16 --ffn 100", ["--ffn 100", "--dim 128", "multiples of 8"]),
    ((PARALLEL,), 4, "--edp 3", ["--edp 3", "divide", "4"]),
    ((PARALLEL,), 8, "--experts 6 --edp 2", ["--experts 6", "divisible", "4"]),
    ((PARALLEL,), 8, "--batch 12", ["--batch 12", "8"]),
]


@pytest.mark.parametrize("recipe", [MOE, PARALLEL])
def test_sizes(recipe, file=None):
    """Experts that cannot be shared out end with one line that names the flag and what would work."""
    module = load(file or recipe)
    for recipes, world, flags, words in REFUSED:
        if recipe in recipes:
            line = refusal(module, world, f"--device cpu {flags}")
            assert isinstance(line, str) and "\n" not in line and all(word in line for word in words), (flags, line)


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
