"""Llama 8B on 80 GB: what is computed again, and what is not.

That the recipes equal the root in float64 is the contract's; their fp8 products are test_fp8.py's, bytes between steps
and rounding test_stochastic_rounding.py's. Tests that have a parameter `file` run it in place of the recipe.
"""

import re
import sys
from collections import Counter
from types import ModuleType

import pytest
import torch
from launch import in_a_fork, load
from torch.utils._python_dispatch import TorchDispatchMode

LOW, FP8 = RECIPES = [f"10_mixed_precision/{name}.py" for name in ("low_memory", "fp8_low_memory")]
SMALL = "--layers 2 --dim 64 --heads 4 --kv_heads 2 --ffn 96 --seq 16 --batch 8 --device cpu --dtype bfloat16"


def start(file: str) -> tuple[ModuleType, tuple, tuple]:
    """The recipe; what its train_step takes; a batch."""
    module = load(file)
    sys.argv = ["recipe", *SMALL.split()]
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


@pytest.mark.parametrize("recipe", ["01_single_gpu/selective_checkpointing.py", *RECIPES])
def test_what_only_gpus_compute_is_kept(recipe):
    """Matmuls in fp8, and attention in each of torch's fused kernels, of which a CPU has one."""
    kept = {operator._schema.name for operator in load(recipe).KEPT}
    fused = re.compile(r"aten::_scaled_dot_product_\w+_attention(_for_cpu)?")
    wanted = {name for name in torch._C._dispatch_get_all_op_names() if fused.fullmatch(name)}
    wanted |= {"aten::_scaled_mm"} if recipe == FP8 else set()
    assert len(wanted) > 3 and wanted <= kept, f"{wanted - kept} are computed again"


@pytest.mark.parametrize("recipe", RECIPES)
@in_a_fork
def test_no_matmul_is_computed_again(recipe, file=None):
    """Nor attention; but casts to fp8 are, of weights, too. There are seven linears in a block, and the head."""
    module, (cfg, model, _), batch = start(file or recipe)
    with Executed() as mode:
        module.forward_backward(cfg, model, *batch)
    matmuls, attention = mode.counts["aten.mm.default"], mode.counts[f"{module.KEPT[-1]}"]
    assert (matmuls, attention) == (3 * (7 * cfg.layers + 1), cfg.layers), f"{matmuls} matmuls, {attention} attentions"
    casts = mode.counts["fp8_tensorwise.cast.default"]  # of weight and input, twice, and of the gradient
    assert casts == 5 * 7 * cfg.layers * (recipe == FP8), f"{casts} casts"
    scales = mode.counts["aten.amax.default"]  # of rows, then of all; kept, and not computed again
    assert scales == 6 * 7 * cfg.layers * (recipe == FP8), f"{scales} scales"
