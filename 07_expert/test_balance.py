"""Auxiliary losses and biases are those of the whole batch, whoever holds it, and both balance the load.

Each is compared with the root, to which the same is added in the plainest way: the probes with_auxiliary_loss and
with_bias see all tokens at once, count with one-hot vectors, and add the losses to the loss.
"""

from types import SimpleNamespace

import compare
import equivalence
import probes
import pytest
import torch
from launch import Run, isolated, launch, load, once
from torch import nn

AUXILIARY = "07_expert/auxiliary_loss.py"
BIAS = "07_expert/bias_balancing.py"
BALANCE, Z = 3.0, 0.3  # so large that each changes the gradients of all routers by more than a hundredth
RATE = 0.02  # of the biases: probabilities are near 1/8


# ----------------------------------------------------------------------------------------------------- reference probes
def with_auxiliary_loss(balance: float, z: float):
    """A probe of the root: add the auxiliary losses of all layers to what is trained, not to what is logged.

    They are of all tokens, also of those whose targets are ignored.
    """

    def probe(module):
        routed, route = [], module.Router.forward

        def watched(self, x):
            gates, experts = route(self, x)
            routed.append((x @ self.weight.T, experts))
            return gates, experts

        def forward_backward(cfg, model, inputs, targets):
            routed.clear()
            loss = module.forward(cfg, model, inputs, targets) / (targets != module.IGNORE).sum()
            auxiliary = 0
            for logits, experts in routed:
                share = nn.functional.one_hot(experts, cfg.experts).to(logits.dtype).mean((0, 1))
                auxiliary += balance * cfg.experts * (share * logits.softmax(-1).mean(0)).sum()
                auxiliary += z * logits.exp().sum(-1).log().square().mean()
            (loss + auxiliary).backward()
            return loss.detach()

        module.Router.forward, module.forward_backward = watched, forward_backward
        return lambda: None

    return probe


def with_bias(rate: float):
    """A probe of the root: choose experts by probability + bias, and move the biases once after each optimizer step.

    Reports the biases, [layers, e], and which part of the tokens would have had other experts without them.
    """

    def probe(module):
        biases, counts, changed, train_step = {}, {}, [], module.train_step

        def route(self, x):
            probabilities = (x @ self.weight.T).softmax(-1)
            bias = biases.setdefault(self, torch.zeros(probabilities.shape[-1]))
            ranked = (probabilities.detach() + bias).argsort(-1, descending=True)
            chosen = nn.functional.one_hot(ranked[:, : self.top_k], len(bias)).sum(1)  # t e, of zeros and ones
            plain = nn.functional.one_hot(probabilities.topk(self.top_k).indices, len(bias)).sum(1)
            changed.extend((chosen != plain).any(-1).tolist())
            counts[self] = counts.get(self, 0) + chosen.sum(0)
            experts = ranked[:, : self.top_k]
            whole = (chosen * probabilities).sum(-1, keepdim=True) if self.top_k > 1 else 1  # one is not renormalised
            return (probabilities / whole).take_along_dim(experts, -1), experts

        def step(*args):
            result = train_step(*args)
            for router, rows in counts.items():
                biases[router] = biases[router] + rate * torch.sign(rows.double().mean() - rows)
            counts.clear()
            return result

        module.Router.forward, module.train_step = route, step
        return lambda: (torch.stack(list(biases.values())), sum(changed) / len(changed))

    return probe


# ---------------------------------------------------------------------------------------------- equality with the root
def flags_of(flags: str, mode: str) -> tuple[str, str, str]:
    """Flags of the recipe, and of the root, for a case; and the weights from which both start."""
    shared = equivalence.shared(flags)
    init = equivalence.start(equivalence.MOE, f"{equivalence.SHAPE} {shared}")
    common = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init} {mode}"
    return f"{common} {flags}", f"{common} {shared}", init


@once
def reference(flags: str, auxiliary: tuple[float, float] | None, rate: float) -> Run:
    """The root's run, with auxiliary losses or with biases; sequences differ in their valid tokens."""
    probe = with_auxiliary_loss(*auxiliary) if auxiliary else with_bias(rate)
    run = launch(equivalence.MOE, 1, flags, probes.together(probe, probes.valid_tokens))
    assert len(set(run.probes[0][1])) > 1, "all sequences have as many valid tokens"
    return run


def biases(module):
    """A probe: the biases of all layers after training, [layers, e]."""
    models, build_model = [], module.build_model
    module.build_model = lambda *args: models.append(build_model(*args)) or models[0]
    return lambda: torch.stack([block.mlp.gate.bias for block in models[0].model.layers])


def assert_equal(ours: Run, theirs: Run, what: str, before=None) -> None:
    """Weights, or their changes, losses and norms to 1e-10, and the load of the busiest expert exactly."""
    errors = compare.relative_errors(ours.weights, theirs.weights, before)
    errors |= compare.history_errors(ours.history, theirs.history)
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], what)
    assert [step[3] for step in ours.history] == [step[3] for step in theirs.history], f"{what}: the load differs"


def check_auxiliary_loss(world: int, flags: str, file: str = AUXILIARY, modes=("GRADIENT", "TRAINING")) -> None:
    """Gradient and training are the root's with the same losses, whatever is validated in between."""
    for mode in modes:
        ours, roots, init = flags_of(flags, getattr(equivalence, mode))
        probe = equivalence.without_kernels if "--compile" in flags else probes.evaluated()
        run = launch(file, world, f"{ours} --balance {BALANCE} --z {Z}", probe)
        theirs = reference(roots, (BALANCE, Z), 0.0)
        before = compare.read(init)[0] if mode == "GRADIENT" else None
        assert_equal(run, theirs, f"{file} on {world} ranks, {mode.lower()}", before)


def check_bias(world: int, flags: str, file: str = BIAS, rate: float = RATE) -> None:
    """Four steps of training, and the biases to the bit, are the root's with biases; all ranks have the same.

    Whatever is validated in between.
    """
    ours, roots, _ = flags_of(flags, equivalence.TRAINING)
    run = launch(file, world, f"{ours} --bias_rate {rate}", probes.together(probes.evaluated(), biases))
    theirs = reference(roots, None, rate)
    moved, changed = theirs.probes[0][0]
    assert changed > 0.1 and len(moved.unique()) > 3, "the biases change nothing"
    assert_equal(run, theirs, f"{file} on {world} ranks")
    assert all(torch.equal(seen, moved) for _, seen in run.probes), "biases are not the root's on all ranks"


@pytest.mark.parametrize(
    "world, flags, modes",
    [
        (4, "--edp 2", ["GRADIENT"]),
        pytest.param(3, "--experts 6 --top_k 1", ["GRADIENT", "TRAINING"], marks=pytest.mark.thorough),
        pytest.param(2, "--layers 2 --compile", ["GRADIENT"], marks=pytest.mark.thorough),
    ],
)
def test_auxiliary_losses_are_those_of_the_whole_batch(world, flags, modes):
    check_auxiliary_loss(world, flags, modes=modes)


@pytest.mark.parametrize(
    "world, flags",
    [(2, "--microbatches 3"), pytest.param(4, "--edp 2 --microbatches 1 --top_k 1", marks=pytest.mark.thorough)],
)
def test_biases_are_those_of_the_whole_step(world, flags):
    check_bias(world, flags)


# ----------------------------------------------------------------------------------------------------------- witnesses
def test_formulas_are_those_of_transformers():
    """Random logits, the losses of three ranks summed: Mixtral's balancing loss, which counts top_k as often, and
    Switch's z-loss."""

    def both() -> list[tuple[float, float]]:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
        from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

        module, found = load(AUXILIARY), []
        for tokens, experts, top_k in (60, 8, 2), (33, 5, 1), (90, 16, 6):
            logits = 3 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            counts = logits.topk(top_k).indices.flatten().bincount(minlength=experts)
            dp = SimpleNamespace(size=lambda: 3)
            parts = [(part, counts / counts.sum()) for part in logits.chunk(3)]
            balance, z = (
                sum(module.auxiliary_loss(*part, *scales, dp).item() for part in parts) for scales in ((1, 0), (0, 1))
            )
            found.append((top_k * balance, load_balancing_loss_func((logits,), experts, top_k).item()))
            found.append((z, router_z_loss_func(logits[None]).item()))
        return found

    for ours, theirs in isolated(both):
        assert abs(ours / theirs - 1) < 1e-6  # transformers counts in float32


# ------------------------------------------------------------------------------------------------------------- balance
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
