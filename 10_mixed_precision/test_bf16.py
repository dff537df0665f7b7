"""bf16 weights and their fp32 masters: what one has and the other has not.

That gradients are exact sums of those of the micro-batches is the contract's (tests/contract.py, bfloat16). Tests that
have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

import sys

import torch
from launch import isolated, load

BF16 = "10_mixed_precision/bf16.py"
SMALL = "--layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 4 --device cpu --dtype bfloat16"


def trained(file: str | None, flags: str, steps: int):
    """The recipe's model after some steps, and the gradient norm of each; and the model before."""
    module = load(file or BF16)
    sys.argv = ["recipe", *f"{SMALL} {flags}".split()]
    cfg = module.parse_config()
    data, model, norms = module.load_data(cfg), module.build_model(cfg), []
    optimizer = module.make_optimizer(cfg, model)
    before = {name: (p.detach().clone(), model.masters[name].detach().clone()) for name, p in model.named_parameters()}
    for step in range(steps):
        module.set_learning_rate(cfg, optimizer, step)
        norms.append(module.train_step(cfg, model, optimizer, *module.make_batch(cfg, data, step))[1].item())
    return model, norms, before


def test_weights_are_rounded_masters(file=None):
    """After each step the matmuls read what the optimizer has, rounded; masters have more bits, from the beginning."""

    def compute():
        for steps in 0, 1, 3:
            model, _, _ = trained(file, "", steps)
            for name, p in model.named_parameters():
                master = model.masters[name]
                assert p.dtype == torch.bfloat16 and master.dtype == torch.float32
                assert torch.equal(p, master.bfloat16()), f"{name} is not its rounded master after {steps} steps"
                assert p.ndim == 1 or not torch.equal(p.float(), master), f"the master of {name} is rounded"
            assert all(p.grad is None for p in model.parameters()), "gradients are left"

    isolated(compute)


def test_small_updates_add_up(file=None):
    """A step of 1e-5 of a weight of 1e-2 is lost in bf16, whose numbers are 2^-8 apart there; masters keep it."""

    def compute():
        model, _, before = trained(file, "--lr 1e-7 --warmup 0 --weight_decay 0", 1)
        kept = lost = 0
        for name, p in model.named_parameters():
            weight, master = before[name]
            moved = model.masters[name] != master
            kept += moved.sum().item()
            lost += (moved & (p == weight)).sum().item()
        assert kept > 1000 and lost > 0.95 * kept, f"{kept} masters have moved, {lost} of them without their weights"

    isolated(compute)


def test_norm_is_that_of_all_micro_batches(file=None):
    """The norm that clips is of the gradients that the masters take, and nearly that of one micro-batch."""

    def compute():
        one, three = (trained(file, f"--batch 6 --microbatches {n} --clip 0.1", 2)[1] for n in (1, 3))
        # a bf16 gradient is off by 2^-9 of itself at most, and its parts by as much of theirs
        assert one[0] > 0.1 and all(abs(x / y - 1) < 0.02 for x, y in zip(one, three)), f"norms {one} and {three}"

    isolated(compute)


def test_norm_is_added_up_in_fp32(file=None):
    """The norm of bf16 gradients is that of the same numbers in float64; rounded to bf16, it would be off by 2^-9."""

    def compute():
        module = load(file or BF16)
        sys.argv = ["recipe", *f"{SMALL} --microbatches 1".split()]
        cfg = module.parse_config()
        model = module.build_model(cfg)
        module.forward_backward(cfg, model, *module.make_batch(cfg, module.load_data(cfg), 0))
        gradients = [p.grad for p in model.parameters()]
        assert {g.dtype for g in gradients} == {torch.bfloat16}, "one micro-batch leaves its gradients where they are"
        exact = torch.cat([g.double().flatten() for g in gradients]).norm()
        norm = module.gradient_norm(module.make_optimizer(cfg, model))
        assert norm.dtype == torch.float32 and abs(norm / exact - 1) < 1e-5, f"norm {norm}, exactly {exact}"

    isolated(compute)
