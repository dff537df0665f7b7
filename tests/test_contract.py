"""Every recipe keeps every promise of tests/contract.py."""

import os
import subprocess
import sys

import contract
import pytest
from equivalence import CASES, HARDEST, KERNELS, MOE, ROOT_RECIPE, ROOTS, SHORTER
from launch import ROOT, free_port
from test_lineage import FAMILY, TRAINING


def kept() -> list:
    """What is tried: each promise of each recipe, but large values only where attention, matmuls or the loss are cut,
    bfloat16 where nothing is in fewer bits, and divergence once for each way to sum the loss.

    The plain run asks library twins, which start slowly, for gradients alone, and for bfloat16 and large values only
    the first recipes of a folder, and those that add up in a way of their own.
    """
    pairs = [(promise, recipe) for promise in contract.CHECKS for recipe in TRAINING]
    pairs = [(p, r) for p, r in pairs if p != "large_values" or r[:2] in ("04", "05") or r in LARGE_TOO]
    pairs = [(p, r) for p, r in pairs if p != "bfloat16" or r not in SHORTER]
    pairs = [
        (p, r) for p, r in pairs if p != "frozen" or r[:2] in ("02", "04", "05", "06", "07") and r not in TRAIN_ALL
    ]
    # the line that ends a run is the same to the letter, except where train is another; a loss is summed per folder
    pairs = [(p, r) for p, r in pairs if p != "divergence" or r in DIVERGE or FAMILY[r].lists("train")]
    low = {"02_data_parallel/naive.py", "03_zero/zero1_overlap.py", "06_pipeline/1f1b.py", "06_pipeline/zbv.py", MOE}
    low |= {"03_zero/zero1_masters.py", "03_zero/zero3.py", "07_expert/expert_parallel.py"}
    low |= {f"05_context_ring/{name}.py" for name in ("all_gather_kv", "zigzag", "usp")}
    low |= {f"08_4d/{name}.py" for name in ("train", "moe")}
    large = {f"04_tensor_sequence/{name}.py" for name in ("vocab_parallel", "async_tensor_parallel")}
    large |= {f"05_context_ring/{name}.py" for name in ("blockwise", "zigzag", "usp")}
    later = [
        p in contract.THOROUGH
        or (is_twin(r) and p != "gradient")
        or (p == "run" and r == KERNELS)  # interpreted
        or (p == "run" and r in ("08_4d/2d.py", "08_4d/3d.py"))  # they log and save as train.py, which has more axes
        or (p == "large_values" and r[:2] in ("04", "05") and r not in large)
        or (p == "bfloat16" and r[:2] in ("02", "03", "05", "06", "07", "08") and r not in low)
        for p, r in pairs
    ]
    return [pytest.param(*pair, marks=pytest.mark.thorough if slow else ()) for pair, slow in zip(pairs, later)]


DIVERGE = {ROOT_RECIPE} | {  # one for each way to sum the loss
    f"{name}.py"
    for name in """02_data_parallel/naive 03_zero/zero3 03_zero/torch_fsdp 04_tensor_sequence/vocab_parallel
    04_tensor_sequence/torch_dtensor 05_context_ring/zigzag 06_pipeline/1f1b 06_pipeline/zbv
    06_pipeline/torch_pipelining 07_expert/expert_parallel 08_4d/train 10_mixed_precision/fp8_tensorwise""".split()
}
TRAIN_ALL = {"02_data_parallel/diloco.py"}  # it is not the root
TRAIN_ALL |= {"04_tensor_sequence/lora.py"}  # all but adapters is frozen
LARGE_TOO = (ROOT_RECIPE, MOE, KERNELS, "03_zero/zero3.py", "06_pipeline/zbv.py")


def is_twin(recipe: str) -> bool:
    return recipe.split("/")[1].startswith(("torch_", "accelerate_"))


@pytest.mark.parametrize("promise, recipe", kept())
def test_contract(promise, recipe):
    contract.CHECKS[promise](recipe)


def test_every_recipe_has_a_hardest_case():
    """... that is one of the cases whose errors the page shows."""
    assert set(HARDEST) == set(TRAINING)
    cases = {(recipe, world, flags) for recipe, world, flags in CASES}
    for recipe, case in HARDEST.items():
        assert (recipe, *case) in cases or recipe in ROOTS


@pytest.mark.thorough
def test_what_the_first_step_imports_does_not_hold_the_group():
    """In a process of its own: here all is imported before the group is made. Every recipe has the line against it."""
    code = f"""
import runpy, sys
sys.path.append({str(ROOT / "tests")!r})
sys.argv = "naive.py {contract.SMALL} --steps 1".split()
runpy.run_path("02_data_parallel/naive.py", run_name="__main__")
from probes import group_is_gone
print("threads left:", group_is_gone(5)(None)()[1])"""
    alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    with free_port() as port:
        environment = {**os.environ, **alone, "MASTER_PORT": str(port)}
        end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert end.stdout.splitlines()[-1:] == ["threads left: 0"], end.stdout + end.stderr
    for recipe in TRAINING:
        source = (ROOT / recipe).read_text()
        assert ("\nimport torch.distributed.nn " in source) == ("\nimport torch.distributed as dist\n" in source)
