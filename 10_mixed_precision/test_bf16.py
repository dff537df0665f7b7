"""bf16 weights and their fp32 masters: what one has and the other has not, and that gradients are autocast's.

And what can be pasted of the folder's recipes.

Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

import sys
from dataclasses import replace

import equivalence
import pytest
import torch
from launch import in_a_fork, isolated, load
from test_lineage import TRAINING
from test_pasted import into_an_empty_file

BF16 = "10_mixed_precision/bf16.py"
SMALL = "--layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 4 --device cpu --dtype bfloat16"


@in_a_fork
def test_weights_are_rounded_masters(file=None):
    """After each step the matmuls read what the optimizer has, rounded; masters have more bits, from the beginning."""
    module = load(file or BF16)
    sys.argv = ["recipe", *SMALL.split()]
    cfg = module.parse_config()
    data, model = module.load_data(cfg)[0], module.build_model(cfg)
    optimizer = module.make_optimizer(cfg, model)
    for steps in range(4):
        if steps:
            module.train_step(cfg, model, optimizer, *module.make_batch(cfg, data, steps))
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
    module = load(file)
    sys.argv = ["recipe", *f"{SMALL} --batch 6 {flags}".split()]
    cfg = module.parse_config()
    model, generator = module.build_model(cfg), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    loss = module.forward_backward(cfg, model, *module.make_batch(cfg, module.load_data(cfg)[0], 0))
    masters = getattr(model, "masters", dict(model.named_parameters()))
    found = {name: masters[name].grad if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"loss": loss} | {name: gradient.float() for name, gradient in found.items()}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradient_is_that_of_autocast(microbatches, file=None):
    """To the bit: the same products of the same rounded operands, and what autocast leaves in fp32 is in fp32."""
    root = "01_single_gpu/train.py" if microbatches == 1 else "01_single_gpu/gradient_accumulation.py"
    flags = f"--microbatches {microbatches}"
    theirs = isolated(lambda: gradients(root, flags * (microbatches > 1)))
    ours = isolated(lambda: gradients(file or BF16, flags))
    assert ours.keys() == theirs.keys() and all(gradient.any() for gradient in theirs.values())
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{different} differ from autocast's"


@in_a_fork
def test_a_forgotten_micro_batch_is_noticed():
    """Its gradient would be taken for the sum."""
    module = load(BF16)
    sys.argv = ["recipe", *f"{SMALL} --microbatches 2".split()]
    cfg = module.parse_config()
    model = module.build_model(cfg)
    optimizer = module.make_optimizer(cfg, model)
    module.forward_backward(cfg, model, *module.make_batch(cfg, module.load_data(cfg)[0], 0))
    module.gradient_norm(optimizer)
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    with pytest.raises(RuntimeError, match="weight and master have a .grad"):
        module.gradient_norm(optimizer)


@in_a_fork
def test_loaded_weights_are_not_undone(file=None):
    """A step refuses weights that are not those of the masters, and takes what was loaded into both."""
    module = load(file or BF16)
    sys.argv = ["recipe", *f"{SMALL} --microbatches 1".split()]
    cfg = module.parse_config()
    model, loaded = module.build_model(cfg), module.build_model(replace(cfg, seed=1))
    optimizer, batch = module.make_optimizer(cfg, model), module.make_batch(cfg, module.load_data(cfg)[0], 0)
    for steps in range(2):
        if steps:
            module.train_step(cfg, model, optimizer, *batch)
        model.load_state_dict(loaded.state_dict())
        with pytest.raises(RuntimeError, match="not its rounded master"):
            module.train_step(cfg, model, optimizer, *batch)
        with torch.no_grad():
            for name, master in model.masters.items():
                master.copy_(loaded.masters[name])
        optimizer.zero_grad()
    module.train_step(cfg, model, optimizer, *batch)


@in_a_fork
def test_norm_is_added_up_in_fp32(file=None):
    """The norm of bf16 gradients is that of the same numbers in float64, and it clips them in fp32."""
    module = load(file or BF16)
    sys.argv = ["recipe", *f"{SMALL} --microbatches 1 --clip 0.1".split()]
    cfg = module.parse_config()
    model = module.build_model(cfg)
    module.forward_backward(cfg, model, *module.make_batch(cfg, module.load_data(cfg)[0], 0))
    optimizer, gradients = module.make_optimizer(cfg, model), [p.grad for p in model.parameters()]
    assert {g.dtype for g in gradients} == {torch.bfloat16, torch.float32}, "gradients are not where backward left"
    for g in gradients:
        g.fill_(1)  # so that the roundings of several norms do not cancel by chance
    exact = torch.cat([g.double().flatten() for g in gradients]).norm()
    norm = module.gradient_norm(optimizer)
    assert norm.dtype == torch.float32 and abs(norm / exact - 1) < 1e-5, f"norm {norm}, exactly {exact}"
    with torch.no_grad():
        optimizer.step(norm)
    for slot in optimizer.slots:
        clipped = slot.parameter.grad.double() * 0.1 / exact
        assert (slot.mean - 0.1 * clipped).norm() < 1e-5 * slot.mean.norm(), "what the norm clips is rounded"


@pytest.mark.parametrize("flags", ["", pytest.param("--compile", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("recipe", [BF16, "10_mixed_precision/stochastic_rounding.py"])
@in_a_fork
def test_learning_rate_comes_from_a_scheduler(recipe, flags):
    """Each step has that of its scheduler, in the same compiled code: with a rate of 0 nothing moves."""
    module = load(recipe)
    equivalence.without_kernels(module)
    sys.argv = ["recipe", *f"{SMALL} --microbatches 1 {flags}".split()]
    cfg = module.parse_config()
    model = module.build_model(replace(cfg, compile=False))  # --compile is for the optimizer, here
    optimizer, batch = module.make_optimizer(cfg, model), module.make_batch(cfg, module.load_data(cfg)[0], 0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.zeros(())], lr=0.1), lambda step: (0.1, 0, 0.3, 0)[step]
    )
    for rate in 0.01, 0, 0.03:
        for group in optimizer.param_groups:
            (group["lr"],) = scheduler.get_last_lr()
        before = [slot.parameter.detach().clone() for slot in optimizer.slots]
        with torch._dynamo.config.patch(error_on_recompile=rate != 0.01):
            module.train_step(cfg, model, optimizer, *batch)
        moved = max((slot.parameter - x).abs().max() for slot, x in zip(optimizer.slots, before))
        assert rate / 2 <= moved <= 2 * rate, f"weights have moved by {moved}, with a learning rate of {rate}"
        scheduler.optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("path", [path for path in TRAINING if path.startswith("10_mixed_precision/")])
@in_a_fork
def test_can_be_pasted_in_its_order(path, tmp_path):
    """The definitions on the Copy line stand below all that they need to be made."""
    into_an_empty_file(tmp_path, path)
