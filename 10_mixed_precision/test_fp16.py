"""Loss scaling: what an overflow leaves as it was, how the scale moves, and that unscaling rounds nothing.

Scales are powers of two, so that the recipe equals the root in float64 with a scale of 65,536: that is the contract's.
Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from launch import in_a_fork, load

FP16 = "10_mixed_precision/fp16_loss_scaling.py"
SMALL = "--layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 4 --warmup 0 --device cpu"


def start(file: str | None, flags: str) -> tuple[ModuleType, tuple, tuple]:
    """The recipe; what its train_step takes; a batch."""
    module = load(file or FP16)
    sys.argv = ["recipe", *f"{SMALL} {flags}".split()]
    cfg = module.parse_config()
    model = module.build_model(cfg)
    return module, (cfg, model, module.make_optimizer(cfg, model)), module.make_batch(cfg, module.load_data(cfg)[0], 0)


def state_of(model: torch.nn.Module, optimizer) -> list[torch.Tensor]:
    """Weights, masters, moments and step counter."""
    kept = [x for slot in optimizer.slots for x in (slot.master, slot.mean, slot.square)]
    return [x.detach().clone() for x in (*model.parameters(), *kept, optimizer.steps)]


@in_a_fork
def test_overflow_skips_the_step(file=None):
    """Nothing that a later step reads has changed, but the scale: it is half, and good steps are counted from zero."""
    module, (cfg, model, optimizer), batch = start(file, "--dtype float16")
    module.train_step(cfg, model, optimizer, *batch)
    before, scaling = state_of(model, optimizer), model.scaling
    scaling.scale.fill_(2.0**60)
    scaling.good.fill_(5)
    for halved in 2.0**59, 2.0**58:
        _, norm = module.train_step(cfg, model, optimizer, *batch)
        assert not norm.isfinite()
        same = [torch.equal(x, y) for x, y in zip(before, state_of(model, optimizer), strict=True)]
        assert all(same), f"{same.count(False)} of {len(same)} tensors have changed in a skipped step"
        assert scaling.scale == halved and scaling.good == 0, f"scale {scaling.scale}, {scaling.good} good steps"
    scaling.scale.fill_(2.0**10)
    module.train_step(cfg, model, optimizer, *batch)
    changed = [not torch.equal(x, y) for x, y in zip(before, state_of(model, optimizer), strict=True)]
    assert sum(changed) > 0.9 * len(changed), "the step after skipped ones changes nothing"


@in_a_fork
def test_scale_falls_to_1(capsys):
    """A gradient that overflows with a scale of 2 is tried with 1; one that overflows with 1 ends the run."""
    module, (cfg, model, _), _ = start(None, "--dtype float16 --steps 3")
    norm, module.build_model = module.gradient_norm, lambda cfg: model
    for least in 2, 1:

        def overflowing(optimizer, least=least):
            return norm(optimizer) * (math.inf if model.scaling.scale >= least else 1)

        model.scaling.scale.fill_(2.0)
        module.gradient_norm = overflowing
        with pytest.raises(SystemExit, match="gradient norm inf") if least == 1 else nullcontext():
            module.train(cfg, *module.load_data(cfg))
        assert model.scaling.scale == 1
    assert capsys.readouterr().out.count("step 3") == 1


@in_a_fork
def test_no_scale_helps_weights_that_are_not_finite():
    """One line says where to look, and not that the masters are others."""
    module, (cfg, model, _), _ = start(None, "--dtype float16 --steps 1")
    for weight in model.lm_head.weight, model.masters["lm_head.weight"]:
        weight.data[0, 0] = math.nan
    module.build_model = lambda cfg: model
    with pytest.raises(SystemExit, match="look for NaN in --init"):
        module.train(replace(cfg, init="weights"), *module.load_data(cfg))


@in_a_fork
def test_scale_grows(file=None):
    """It doubles after every third good step, where three are asked for."""
    module, (cfg, model, optimizer), batch = start(file, "--dtype float16 --growth_interval 3")
    model.scaling.scale.fill_(4.0)
    scales = []
    for _ in range(7):
        module.train_step(cfg, model, optimizer, *batch)
        scales.append(model.scaling.scale.item())
    assert scales == [4, 4, 8, 8, 8, 16, 16], f"scales {scales}"


@in_a_fork
def test_gradients_are_unscaled_in_fp32():
    """The first moment is a tenth of the clipped gradient, of which fp16 would have lost much."""
    module, (cfg, model, optimizer), batch = start(None, "--dtype float16 --clip 0.1 --microbatches 1")
    scale = model.scaling.scale
    module.forward_backward(cfg, model, *batch)
    left = torch.cat([g.double().flatten() for g in optimizer.gradients()]) / scale
    norm = module.gradient_norm(optimizer) / scale
    assert norm > 0.1, "the clip does not act"
    with torch.no_grad():
        optimizer.step(norm, scale)
    arrived = torch.cat([10 * slot.mean.flatten() for slot in optimizer.slots])
    assert (arrived - left * 0.1 / norm).norm() < 1e-5 * arrived.norm(), "gradients are rounded when they are unscaled"
