"""Loss scaling: what an overflow leaves as it was, how the scale moves, and what small gradients gain.

Scales are powers of two, so that the recipe equals the root in float64 with a scale of 65,536: that is the contract's.
Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

import sys
from types import ModuleType

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
def test_scale_changes_no_step():
    """In float32, steps with a clip that acts are the same to the bit with any scale that is a power of two."""
    found = []
    for scale in 1.0, 2.0**16:
        module, (cfg, model, optimizer), batch = start(None, "--clip 0.1")
        model.scaling.scale.fill_(scale)
        norms = [module.train_step(cfg, model, optimizer, *batch)[1] for _ in range(3)]
        found.append([*norms, *state_of(model, optimizer)])
    assert found[0][0] > 0.1 and all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@in_a_fork
def test_small_gradients_survive(file=None):
    """Of the gradient in float32, fp16 loses most where the loss is scaled down, and little where it is scaled up."""

    def gradient(dtype: str, scale: float) -> torch.Tensor:
        """What has arrived in the first moment: a tenth of the gradient."""
        module, (cfg, model, optimizer), batch = start(file, f"--dtype {dtype} --clip 0.1 --microbatches 1")
        model.scaling.scale.fill_(scale)
        module.forward_backward(cfg, model, *batch)
        left = torch.cat([g.double().flatten() for g in optimizer.gradients()]) / scale
        norm = module.gradient_norm(optimizer) / scale
        with torch.no_grad():
            optimizer.step(norm, model.scaling.scale)
        clip = (0.1 / (norm + 1e-6)).clamp(max=1)
        arrived = torch.cat([10 * slot.mean.flatten() for slot in optimizer.slots]) / clip
        assert (arrived - left).norm() < 1e-6 * left.norm(), "gradients are rounded when they are unscaled"
        return arrived

    exact, lost, kept = gradient("float32", 1.0), gradient("float16", 2.0**-14), gradient("float16", 2.0**10)
    errors = [((found - exact).norm() / exact.norm()).item() for found in (lost, kept)]
    zeros = [(found == 0)[exact != 0].float().mean().item() for found in (lost, kept)]
    assert zeros[0] > 0.3 and zeros[1] < 0.02, f"shares that have become zero: {zeros}"
    assert errors[1] < 0.01 < errors[0], f"errors {errors}"  # 2^-11 per rounding, and some roundings in a row
