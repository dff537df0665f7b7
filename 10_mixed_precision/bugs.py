"""Bugs that the tests of this folder see: what becomes what, on how many ranks, and what sees it."""

from mutation import Bug

BF16 = "10_mixed_precision/bf16.py"
FP16 = "10_mixed_precision/fp16_loss_scaling.py"

BUGS = [
    Bug(
        "masters start from the rounded weights",
        BF16,
        "nn.Parameter(full.to(p.device, wide))",
        "nn.Parameter(p.detach().to(wide))",
        seen="bfloat16",
    ),
    Bug(
        "the weights are never written: matmuls go on with the first ones",
        BF16,
        "        round_masters(model)\n",
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
        "the norm is that of the weights' gradients, which have been moved: nothing is clipped",
        BF16,
        "clip_grad_norm_(model.masters.values()",
        "clip_grad_norm_(model.parameters()",
        seen="norm of masters",
    ),
    Bug(
        "the loss adds up exponentials in bf16",
        BF16,
        "        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # for sums of exponentials\n",
        "",
        seen="bfloat16",
    ),
    Bug(
        "AdamW gets the bf16 matrices, whose gradients have been moved: they never change",
        BF16,
        "matrices = [p for p in model.masters.values() if p.ndim > 1]",
        "matrices = [p for p in model.parameters() if p.ndim > 1]",
        seen="bfloat16",
    ),
    Bug(
        "what is saved is rounded",
        BF16,
        "{name: master.detach() for name, master",
        "{name: master.detach().bfloat16().to(master.dtype) for name, master",
        seen="bfloat16",
    ),
    Bug("gradients are not divided by the scale again", FP16, "    unscale_gradients(model)\n", ""),
    Bug(
        "gradients are clipped before they are divided by the scale",
        FP16,
        "    unscale_gradients(model)\n    norm = clip_gradients(cfg, model)\n",
        "    norm = clip_gradients(cfg, model)\n    unscale_gradients(model)\n",
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
        "overflow.float()",
        "torch.zeros_like(norm)",
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
