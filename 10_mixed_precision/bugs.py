"""Bugs that the tests of this folder see: what becomes what, on how many ranks, and what sees it."""

from mutation import Bug

BF16 = "10_mixed_precision/bf16.py"
FP16 = "10_mixed_precision/fp16_loss_scaling.py"

BUGS = [
    Bug(
        "masters start from the rounded weights",
        BF16,
        "else full.to(p.device, wide)",
        "else p.detach().to(wide)",
        seen="bfloat16",
    ),
    Bug(
        "the weights are never written: matmuls go on with the first ones",
        BF16,
        "        weight.copy_(master)\n",
        "        pass\n",
        seen="rounded masters",
    ),
    Bug(
        "gradients of micro-batches are added up in bf16",
        BF16,
        "master.grad.add_(p.grad)",
        "master.grad.copy_((master.grad + p.grad).to(p.dtype))",
        seen="bfloat16",
    ),
    Bug(
        "the last micro-batch's gradient replaces those before",
        BF16,
        "master.grad.add_(p.grad)",
        "master.grad.copy_(p.grad)",
        seen="bfloat16",
    ),
    Bug(
        "gradients stay beside those of the masters, and are added again with the next micro-batch's",
        BF16,
        "            p.grad = None\n",
        "",
        seen="bfloat16",
    ),
    Bug(
        "each micro-batch divides its loss by its own valid tokens, not the batch's",
        BF16,
        "forward(cfg, model, x, y) / tokens",
        "forward(cfg, model, x, y) / (y != IGNORE).sum()",
        flags="--microbatches 3",
    ),
    Bug(
        "the norm is of the last gradient alone",
        BF16,
        "gradients, 2, dtype=wide)",
        "gradients[-1:], 2, dtype=wide)",
    ),
    Bug(
        "the norm is added up in bf16",
        BF16,
        "gradients, 2, dtype=wide)).norm()",
        "gradients, 2)).norm().float()",
        seen="norm in fp32",
    ),
    Bug(
        "the norm is measured, and nothing is clipped",
        BF16,
        "(self.clip / (norm + 1e-6)).clamp(max=1)",
        "torch.ones_like(norm)",
    ),
    Bug(
        "the first step's moments are not corrected for having begun at zero",
        BF16,
        'group["lr"] / (1 - 0.9**self.steps)',
        'group["lr"] * torch.ones_like(self.steps)',
    ),
    Bug(
        "the step is counted after its correction",
        BF16,
        "(1 - 0.95**self.steps).sqrt()",
        "(1 - 0.95 ** (self.steps + 1)).sqrt()",
    ),
    Bug(
        "decay moves with the gradient's clip",
        BF16,
        'group["lr"] * group["weight_decay"]',
        'group["lr"] * group["weight_decay"] * factor.item()',
    ),
    Bug(
        "the loss adds up exponentials in bf16",
        BF16,
        "        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # for sums of exponentials\n",
        "",
        seen="bfloat16",
    ),
    Bug(
        "vectors decay, too",
        BF16,
        "dict(slots=vectors, weight_decay=0.0)",
        "dict(slots=vectors, weight_decay=cfg.weight_decay)",
    ),
    Bug(
        "what is saved is rounded",
        BF16,
        "{name: master.detach() for name, master",
        "{name: master.detach().bfloat16().to(master.dtype) for name, master",
        seen="bfloat16",
    ),
    Bug("gradients are not divided by the scale again", FP16, ".clamp(max=1) / scale", ".clamp(max=1)"),
    Bug(
        "gradients are clipped by a norm that has the scale in it",
        FP16,
        "gradient_norm(optimizer) / model.scaling.scale",
        "gradient_norm(optimizer)",
    ),
    Bug(
        "the loss that is logged has the scale in it",
        FP16,
        "        total += loss.detach()",
        "        total += loss.detach() * model.scaling.scale",
    ),
    Bug(
        "a step with inf in its gradients is not skipped: all weights become NaN",
        FP16,
        "        skip = ~norm.isfinite()\n",
        "        skip = torch.zeros_like(norm, dtype=torch.bool)\n",
        seen="overflow",
    ),
    Bug(
        "the scale stays as it is after an overflow: no step is ever good again",
        FP16,
        "torch.where(overflow, 0.5,",
        "torch.where(overflow, 1.0,",
        seen="overflow",
    ),
    Bug(
        "good steps before an overflow count for the next growth",
        FP16,
        "torch.where(overflow, 0, scaling.good + 1)",
        "scaling.good + 1",
        seen="overflow",
    ),
    Bug(
        "the scale grows once, and never again",
        FP16,
        "    scaling.good.masked_fill_(grown, 0)\n",
        "",
        seen="growth",
    ),
    Bug(
        "the scale grows after each good step",
        FP16,
        "scaling.good == cfg.growth_interval",
        "scaling.good >= 1",
        seen="growth",
    ),
]
