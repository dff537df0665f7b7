"""Every recipe keeps every promise of tests/contract.py."""

import os
import subprocess
import sys

import contract
import pytest
from equivalence import CASES, HARDEST
from launch import ROOT, free_port
from test_lineage import TRAINING

PROMISES = [
    pytest.param(promise, marks=pytest.mark.thorough if promise in contract.THOROUGH else ())
    for promise in contract.CHECKS
]


@pytest.mark.parametrize("recipe", TRAINING)
@pytest.mark.parametrize("promise", PROMISES)
def test_contract(promise, recipe):
    contract.CHECKS[promise](recipe)


def test_every_recipe_has_a_hardest_case():
    """... that is one of the cases whose errors the page shows."""
    assert set(HARDEST) == set(TRAINING)
    cases = {(recipe, world, flags) for recipe, world, flags in CASES}
    for recipe, case in HARDEST.items():
        assert (recipe, *case) in cases or recipe == "01_single_gpu/train.py"


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
