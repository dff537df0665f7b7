"""Auxiliary losses and biases are those of the whole batch, whoever holds it; expert capacity drops what it says.

Each is compared with the root, to which the same is added in the plainest way.
"""

import math
from types import SimpleNamespace

import compare
import equivalence
import probes
import pytest
import torch
import witness
from equivalence import GRADIENT, MOE, TRAINING
from launch import Run, launch, load, once

AUXILIARY = "07_expert/auxiliary_loss.py"
BIAS = "07_expert/bias_balancing.py"
CAPACITY = "07_expert/capacity.py"
BALANCE, Z = 3.0, 0.3  # so large that each changes the gradients of all routers by more than a hundredth
RATE = 0.02  # of the biases: probabilities are near 1/8


def with_auxiliary_loss(balance: float, z: float):
    """A probe of the root: add transformers' losses, of all layers and tokens, to what is trained, not to the log."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    def probe(module):
        logits, route = [], module.Router.forward

        def watched(self, x):
            logits.append(x @ self.weight.T)
            return route(self, x)

        def forward_backward(cfg, model, inputs, targets):
            logits.clear()
            loss = module.forward(cfg, model, inputs, targets) / (targets != module.IGNORE).sum()
            with witness.in_float64():
                auxiliary = sum(load_balancing_loss_func((x,), cfg.experts, cfg.top_k) for x in logits) / cfg.top_k
                (loss + balance * auxiliary + z * sum(router_z_loss_func(x[None]) for x in logits)).backward()
            return loss.detach()

        module.Router.forward, module.forward_backward = watched, forward_backward
        return lambda: None

    return probe


def with_bias(rate: float):
    """A probe of the root: choose experts by probability + bias, and move the biases once after each optimizer step.
    Reports the biases [layers, e], and which part of the tokens would have had other experts without them."""

    def probe(module):
        biases, counts, changed, train_step = {}, {}, [], module.train_step

        def route(self, x):
            probabilities = (x @ self.weight.T).softmax(-1)
            bias = biases.setdefault(self, torch.zeros(probabilities.shape[-1]))
            experts, plain = (scores.topk(self.top_k).indices for scores in (probabilities + bias, probabilities))
            if torch.is_grad_enabled():  # not in a validation
                counts[self] = counts.get(self, 0) + experts.flatten().bincount(minlength=len(bias))
                changed.extend((experts.sort(-1).values != plain.sort(-1).values).any(-1).tolist())
            gates = probabilities.gather(-1, experts)
            return gates / (gates.sum(-1, keepdim=True) if self.top_k > 1 else 1), experts

        def step(*args):
            result = train_step(*args)
            for router, rows in counts.items():
                biases[router] = biases[router] + rate * torch.sign(rows.double().mean() - rows)
            counts.clear()
            return result

        module.Router.forward, module.train_step = route, step
        return lambda: (torch.stack(list(biases.values())), sum(changed) / len(changed))

    return probe


def kept(experts, count, capacity):
    """Return which rows of experts [t, top_k] are kept, counted one by one."""
    taken, keep = [0] * count, torch.ones(experts.shape, dtype=torch.bool)
    slots = math.ceil(capacity * experts.numel() / count)
    for token, chosen in enumerate(experts.tolist()):
        for i, expert in enumerate(chosen):
            keep[token, i] = taken[expert] < slots
            taken[expert] += 1
    return keep


def dropping(ranks: int, capacity: float):
    """A probe of the root: it drops what so many ranks would drop. Reports the share of each step."""

    def probe(module):
        route, train_step, steps = module.Router.forward, module.train_step, []

        def forward(self, x):
            gates, experts = route(self, x)
            keep = torch.cat([kept(part, len(self.weight), capacity) for part in experts.chunk(ranks)])
            if torch.is_grad_enabled():
                steps[-1].append(keep)
            return gates * keep, experts

        def step(*args):
            steps.append([])
            return train_step(*args)

        module.Router.forward, module.train_step = forward, step
        return lambda: [(~torch.cat(keep)).sum().item() / torch.cat(keep).numel() for keep in steps]

    return probe


@once
def reference(flags: str, kind: str, *numbers: float) -> Run:
    """The root's run, with one of these probes."""
    probe = {"losses": with_auxiliary_loss, "biases": with_bias, "drops": dropping}[kind](*numbers)
    return launch(MOE, 1, flags, probes.together(probe, probes.evaluated()))


def compared(file, world, flags, own, mode, roots, probe=lambda module: None) -> tuple[Run, Run]:
    """Runs of a recipe and of the root, whatever is validated in between: weights, or their changes, and all losses and
    norms agree to 1e-10, and the load of the busiest expert exactly."""
    shared = equivalence.shared(flags)
    init = equivalence.start(MOE, f"{equivalence.SHAPE} {shared}")
    common = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init} {mode}"
    compiled = "--compile" in flags  # once, for one size of batch
    probe = equivalence.without_kernels if compiled else probes.together(probe, probes.evaluated())
    run = launch(file, world, f"{common} {flags} {own}", probe)
    theirs, what = reference(f"{common} {shared}", *roots), f"{file} on {world} ranks {flags} {own}"
    errors = compare.relative_errors(run.weights, theirs.weights, compare.read(init)[0] if mode == GRADIENT else None)
    errors |= compare.history_errors(run.history, theirs.history)
    for rank, seen in enumerate(run.probes if not compiled else []):
        for i, (loss, right) in enumerate(zip(seen[-1], theirs.probes[0][-1], strict=True)):
            errors[f"validation loss {i} of rank {rank}"] = abs(loss / right - 1)
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], what)
    assert [step[3] for step in run.history] == [step[3] for step in theirs.history], f"{what}: the load differs"
    return run, theirs


@pytest.mark.parametrize(
    "world, flags, modes",
    [
        (4, "--edp 2", [GRADIENT]),
        pytest.param(3, "--experts 6 --top_k 1", [GRADIENT, TRAINING], marks=pytest.mark.thorough),
        pytest.param(2, "--layers 2 --compile", [GRADIENT], marks=pytest.mark.thorough),
    ],
)
def test_auxiliary_losses(world, flags, modes, file=AUXILIARY):
    """Gradient and training are the root's with the same losses, of the whole batch."""
    for mode in modes:
        compared(file, world, flags, f"--balance {BALANCE} --z {Z}", mode, ("losses", BALANCE, Z))


def biases(module):
    """A probe: the biases of all layers after training, [layers, e]."""
    models, build_model = [], module.build_model
    module.build_model = lambda *args: models.append(build_model(*args)) or models[0]
    return lambda: torch.stack([block.mlp.gate.bias for block in models[0].model.layers])


@pytest.mark.parametrize(
    "world, flags",
    [(2, "--microbatches 3"), pytest.param(4, "--edp 2 --microbatches 1 --top_k 1", marks=pytest.mark.thorough)],
)
def test_biases(world, flags, file=BIAS):
    """Training, and on all ranks the biases to the bit, are the root's with biases that move once a step."""
    run, theirs = compared(file, world, flags, f"--bias_rate {RATE}", TRAINING, ("biases", RATE), biases)
    moved, changed = theirs.probes[0][0]
    assert changed > 0.1 and len(moved.unique()) > 3, "the biases change nothing"
    assert all(torch.equal(seen, moved) for seen, _ in run.probes), "biases are not the root's on all ranks"


@pytest.mark.parametrize(
    "world, flags, capacity, modes",
    [
        (2, "", 0.5, [GRADIENT, TRAINING]),
        pytest.param(3, "--experts 9 --top_k 4", 0.7, [GRADIENT], marks=pytest.mark.thorough),
        # the gate of a token that keeps its row is not 1
        pytest.param(2, "--top_k 1", 1.0, [GRADIENT], marks=pytest.mark.thorough),
    ],
)
def test_drops(world, flags, capacity, modes, file=CAPACITY):
    """Gradient, training and the logged share are those of a root that drops the same rows."""
    for mode in modes:
        run, theirs = compared(file, world, flags, f"--capacity {capacity}", mode, ("drops", world, capacity))
        shares = theirs.probes[0][0]
        assert min(shares) > 0.01, "nothing is dropped"
        assert [share for *_, share in run.history] == shares, "the logged share is off by some rows"


@pytest.mark.parametrize("name", ["bias_balancing", "node_limited"])
def test_scores_that_are_all_0(name):
    """Biases may choose experts whose scores underflow: gates of 0, where 0 / 0 would be NaN."""
    module = load(f"07_expert/{name}.py")
    router = module.Router(module.Config(dim=4))
    with torch.no_grad():
        router.weight.fill_(-50)[0] = 0
        router.bias[0] = -2
    assert not router(torch.ones(3, 4))[0].any()


def test_biases_in_16_bits_are_noticed():
    """A trainer that casts the whole model takes the biases along: steps of 0.003 would be lost near 1."""
    module = load(BIAS)
    gate = SimpleNamespace(bias=torch.ones(4).bfloat16())
    model = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(mlp=SimpleNamespace(gate=gate))]))
    with pytest.raises(TypeError, match="keep the biases of Router in float32"):
        module.move_biases(module.Config(), model, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))


def test_unequal_batches_are_refused():
    module, batch = load(CAPACITY), torch.zeros(3, 16)
    model = SimpleNamespace(dp=SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match="3 sequences: must be divisible by the 2 ranks"):
        module.evaluate(module.Config(), model, batch, batch)
