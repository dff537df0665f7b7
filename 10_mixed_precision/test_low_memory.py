"""Llama 8B on 80 GB: what is computed again, what is not, and that the head's gradient is added up in fp32.

That the recipes equal the root in float64 is the contract's; their fp8 products are test_fp8.py's, bytes between steps
and rounding test_stochastic_rounding.py's. Tests that have a parameter `file` run it in place of the recipe.
"""

import sys
from collections import Counter
from types import ModuleType

import pytest
import torch
from launch import in_a_fork, load
from torch.utils._python_dispatch import TorchDispatchMode

LOW, FP8 = RECIPES = [f"10_mixed_precision/{name}.py" for name in ("low_memory", "fp8_low_memory")]
SMALL = "--layers 2 --dim 64 --heads 4 --kv_heads 2 --ffn 96 --seq 16 --batch 8 --device cpu --dtype bfloat16"


def start(file: str, flags: str) -> tuple[ModuleType, tuple, tuple]:
    """The recipe; what its train_step takes; a batch."""
    module = load(file)
    sys.argv = ["recipe", *f"{SMALL} {flags}".split()]
    cfg = module.parse_config()
    model = module.build_model(cfg)
    batch = module.make_batch(cfg, module.load_data(cfg)[0], 0)
    return module, (cfg, model, module.make_optimizer(cfg, model)), batch


class Executed(TorchDispatchMode):
    """Counts operations that are executed; what a checkpoint has kept is not."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES)
@in_a_fork
def test_no_matmul_is_computed_again(recipe, file=None):
    """Nor attention; but casts to fp8 are, of weights, too. Seven linears a block, and the head of each chunk."""
    module, (cfg, model, _), batch = start(file or recipe, "--loss_chunks 4")
    with Executed() as mode:
        module.forward_backward(cfg, model, *batch)
    matmuls, attention = mode.counts["aten.mm.default"], mode.counts[f"{module.KEPT[-1]}"]
    assert (matmuls, attention) == (3 * (7 * cfg.layers + 4), cfg.layers), f"{matmuls} matmuls, {attention} attentions"
    casts = mode.counts["fp8_tensorwise.cast.default"]  # of weight and input, twice, and of the gradient
    assert casts == 5 * 7 * cfg.layers * (recipe == FP8), f"{casts} casts"
    scales = mode.counts["aten.amax.default"]  # of rows, then of all; kept, and not computed again
    assert scales == 6 * 7 * cfg.layers * (recipe == FP8), f"{scales} scales"


@pytest.mark.parametrize("recipe", RECIPES)
@in_a_fork
def test_head_is_added_up_in_fp32(recipe, file=None):
    """The optimizer gets the exact sum of five chunks' bf16 gradients; a .grad beside it is refused."""
    module, (cfg, model, optimizer), (inputs, targets) = start(file or recipe, "--loss_chunks 5")
    tokens, exact = (targets != module.IGNORE).sum(), 0
    with torch.no_grad():
        x = module.hidden_states(cfg, model, inputs)
    for part in zip(x.chunk(5), targets.flatten().chunk(5), strict=True):
        loss = module.chunk_loss(cfg, model, *part) / tokens
        exact = exact + torch.autograd.grad(loss, model.lm_head.weight)[0].double()
    module.forward_backward(cfg, model, inputs, targets)
    by_name = {slot.name: g for slot, g in zip(optimizer.slots, optimizer.gradients())}
    error = ((by_name["lm_head.weight"].double() - exact).norm() / exact.norm()).item()
    assert error < 1e-6, f"the head's gradient is off by {error:.1e}"  # 2^-24 four times; one in bf16: 2^-9
    assert all(by_name[name].dtype == p.dtype for name, p in model.named_parameters() if name != "lm_head.weight")
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)  # as a tied head has, and a forgotten sum
    with pytest.raises(RuntimeError, match="lm_head.weight has a .grad beside its sum"):
        module.gradient_norm(optimizer)


@in_a_fork
def test_a_layer_that_would_not_be_in_fp8_is_noticed():
    """It starts as nn.Linear does, and refuses fp32 weights under autocast."""
    module, x = load(FP8), torch.randn(16, 32)
    linear, same = (torch.manual_seed(0) and kind(32, 16) for kind in (module.Linear, torch.nn.Linear))
    assert torch.equal(linear.weight, same.weight)
    linear(x)  # fp32, as the whole model is
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="needs bfloat16 weights"):
        linear(x)
