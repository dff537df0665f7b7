"""Weights of 16 bits and their fp32 masters: gradients are autocast's, nothing else is rounded, loss scales move."""

import math
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from launch import in_a_fork, isolated, load
from test_lineage import TRAINING
from test_pasted import into_an_empty_file

BF16, FP16 = "10_mixed_precision/bf16.py", "10_mixed_precision/fp16_loss_scaling.py"
SMALL = "--layers 2 --dim 64 --heads 4 --kv_heads 2 --ffn 96 --seq 16 --batch 8 --warmup 0"


def one_graph_at_a_time(forward: Callable) -> Callable:
    """A forward that finds no graph of an earlier one: in torch 2.11 it keeps what compiled code has saved."""
    graphs = weakref.WeakSet()

    def watched(*args):
        assert not graphs, "the graph of the micro-batch before is still there"
        loss = forward(*args)
        if loss.requires_grad:
            graphs.add(loss.grad_fn.metadata.setdefault("witness", torch.nn.Module()))
        return loss

    return watched


def start(file: str, flags: str) -> tuple[ModuleType, tuple, list]:
    """The recipe; what its train_step takes; batches."""
    module = load(file)
    module.forward = one_graph_at_a_time(module.forward)
    sys.argv = ["recipe", *f"{SMALL} --device cpu --dtype bfloat16 {flags}".split()]
    cfg = module.parse_config()
    model, data = module.build_model(replace(cfg, compile=False)), module.load_data(cfg)[0]
    optimizer = module.make_optimizer(cfg, model)  # --compile is for the optimizer, here
    return module, (cfg, model, optimizer), [module.make_batch(cfg, data, i) for i in range(8)]


@in_a_fork
def test_weights_are_rounded_masters(file=None):
    """After each step the matmuls read what the optimizer has, rounded; masters have more bits, from the beginning."""
    module, (cfg, model, optimizer), (batch, *_) = start(file or BF16, "")
    for steps in range(3):
        if steps:
            module.train_step(cfg, model, optimizer, *batch)
        for name, p in model.named_parameters():
            master = model.masters[name]
            if p.ndim == 1 or "embed" in name:  # no matmul reads it
                assert p is master and p.dtype == torch.float32, f"{name} is not its own master"
                continue
            assert p.dtype == torch.bfloat16 and master.dtype == torch.float32
            assert torch.equal(p, master.bfloat16()), f"{name} is not its rounded master after {steps} steps"
            assert not torch.equal(p.float(), master), f"the master of {name} is rounded"
        assert all(p.grad is None for p in model.parameters()), "gradients are left"


def gradients(file: str, flags: str) -> dict[str, torch.Tensor]:
    """Loss and gradients in float32 of a batch, with norm weights around 1 that have all bits of float32."""
    module, (cfg, model, _), (batch, *_) = start(file, flags)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.ndim == 1):
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    loss = module.forward_backward(cfg, model, *batch)
    return {"loss": loss} | {name: p.grad.float() for name, p in model.named_parameters()}


def test_gradient_is_that_of_autocast(file=None):
    """To the bit: the same products of the same rounded operands, and what autocast leaves in fp32 is in fp32."""
    theirs = isolated(lambda: gradients("01_single_gpu/train.py", ""))
    ours = isolated(lambda: gradients(file or BF16, "--microbatches 1"))
    assert ours.keys() == theirs.keys() and all(gradient.any() for gradient in theirs.values())
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{different} differ from autocast's"


@in_a_fork
def test_what_the_optimizer_would_undo_is_refused(file=None):
    """Weights that were loaded beside their masters, and a last micro-batch that would be taken for the sum."""
    module, (cfg, model, optimizer), (batch, *_) = start(file or BF16, "--microbatches 2")
    other = module.build_model(replace(cfg, seed=1))
    module.train_step(cfg, model, optimizer, *batch)
    model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="not its rounded master"):
        module.train_step(cfg, model, optimizer, *batch)
    for name, master in model.masters.items():
        master.data.copy_(other.masters[name])
    optimizer.zero_grad()
    module.train_step(cfg, model, optimizer, *batch)
    module.forward_backward(cfg, model, *batch)
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    with pytest.raises(RuntimeError, match="weight and master have a .grad"):
        module.gradient_norm(optimizer)


@pytest.mark.parametrize("recipe, dtype", [(BF16, torch.bfloat16), (FP16, torch.float16)])
@in_a_fork
def test_norm_and_clip_round_nothing(recipe, dtype, file=None):
    """The norm is that of the same numbers in float64, and what clips gradients, and unscales them, does so in fp32."""
    flags = f"--dtype {str(dtype)[6:]} --microbatches 1 --clip 1e-4"
    module, (cfg, model, optimizer), (batch, *_) = start(file or recipe, flags)
    module.forward_backward(cfg, model, *batch)
    gradients = [p.grad for p in model.parameters()]
    assert {g.dtype for g in gradients} == {dtype, torch.float32}, "gradients are not where backward left"
    for g in gradients:
        g.fill_(1)  # so that the roundings of several norms do not cancel by chance
    exact = torch.cat([g.double().flatten() for g in gradients]).norm()
    norm = module.gradient_norm(optimizer)
    assert norm.dtype == torch.float32 and abs(norm / exact - 1) < 1e-5, f"norm {norm}, exactly {exact}"
    scale = model.scaling.scale if recipe == FP16 else 1.0
    unscaled = {"scale": scale} if recipe == FP16 else {}
    with torch.no_grad():
        optimizer.step(norm / scale, **unscaled)
    clipped = 1e-4 / (exact / scale + 1e-6) / scale
    for slot in optimizer.slots:
        assert (slot.mean / (0.1 * clipped) - 1).abs().max() < 1e-5, "what the norm clips is rounded"


@in_a_fork
def test_overflow_skips_the_step_and_halves_the_scale(file=None):
    """Nothing else that a later step reads has changed. The scale doubles after every third good step, counted anew."""
    module, (cfg, model, optimizer), (batch, *_) = start(file or FP16, "--dtype float16 --growth_interval 3")
    scaling, scales = model.scaling, []
    scaling.scale.fill_(4.0)
    for _ in range(8):
        module.train_step(cfg, model, optimizer, *batch)
        scales.append(scaling.scale.item())
    assert scales == [4, 4, 8, 8, 8, 16, 16, 16], f"scales {scales}"
    kept = [x for slot in optimizer.slots for x in (slot.master, slot.mean, slot.square)]
    kept += [*model.parameters(), optimizer.steps]
    before = [x.detach().clone() for x in kept]
    scaling.scale.fill_(2.0**60)
    for halved in 2.0**59, 2.0**58:
        _, norm = module.train_step(cfg, model, optimizer, *batch)
        assert not norm.isfinite()
        changed = sum(not torch.equal(x, y) for x, y in zip(before, kept))
        assert not changed, f"{changed} of {len(kept)} tensors have changed in a skipped step"
        assert scaling.scale == halved and scaling.good == 0, f"scale {scaling.scale}, {scaling.good} good steps"
    scaling.scale.fill_(2.0**10)
    module.train_step(cfg, model, optimizer, *batch)
    changed = sum(not torch.equal(x, y) for x, y in zip(before, kept))
    assert changed > 0.9 * len(kept), "the step after skipped ones changes nothing"


@in_a_fork
def test_what_no_scale_helps_ends_the_run():
    """A step that overflows with a scale of 2 is tried again with 1; an overflow with 1 ends the run."""
    module, (cfg, model, _), _ = start(FP16, "--dtype float16 --steps 3")
    data, norm, module.build_model = module.load_data(cfg), module.gradient_norm, lambda cfg: model
    for least in 2, 1:

        def overflowing(optimizer, least=least):
            return norm(optimizer) * (math.inf if model.scaling.scale >= least else 1)

        model.scaling.scale.fill_(2.0)
        module.gradient_norm = overflowing
        with pytest.raises(SystemExit, match="gradient norm inf") if least == 1 else nullcontext():
            module.train(cfg, *data)
        assert model.scaling.scale == 1


@pytest.mark.parametrize("path", [path for path in TRAINING if path.startswith("10_mixed_precision/")])
@in_a_fork
def test_can_be_pasted_in_its_order(path, tmp_path):
    """The definitions on the Copy line stand below all that they need to be made."""
    into_an_empty_file(tmp_path, path)
