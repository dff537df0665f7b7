"""Every recipe keeps every promise of tests/contract.py."""

import itertools
import re
import subprocess

import contract
import equivalence
import probes
import pytest
from launch import ROOT, load
from recipes import EXCEPTIONS, FLAGS, OTHERS, REFUSED, keeps, matches, rows
from test_lineage import TRAINING

ASKED = {  # promises that are not asked of all recipes
    # where attention, matmuls or the loss are cut
    "large_values": "01_*/train.py 03_*/zero3.py 04_* 05_* 06_*/zbv.py 07_*/moe.py 09_*",
    "frozen": "02_* 04_* 05_* 06_* 07_*",
    # where something runs beside the computation; of 05, striped.py and usp.py do what zigzag.py does with other tokens
    "streams": "02_*/overlap.py 02_*/bucketed.py 02_*/co*.py 03_*/zero1_overlap.py 03_*/zero[23]*.py 03_*/hsdp.py"
    " 03_*/offload.py 03_*/lora.py 04_*/sequence_parallel.py 04_*/async_tensor_parallel.py 05_*/all_gather_kv.py"
    " 05_*/ring.py 05_*/zigzag.py 05_*/documents.py 07_*/expert_parallel.py 07_*/overlap.py",
    # the line that ends a run is the same to the letter, except where train is another; each way to sum the loss once
    "divergence": "01_*/train.py 01_*/lora.py 02_*/naive.py 02_*/diloco.py */accelerate_* 03_*/zero3.py"
    " 03_*/torch_fsdp.py 04_*/vocab_parallel.py 04_*/torch_dtensor.py 05_*/zigzag.py 06_*/1f1b.py 06_*/zbv.py"
    " 06_*/torch_pipelining.py 07_*/moe.py 07_*/expert_parallel.py 07_*/capacity.py 07_*/slots.py 08_*/train.py"
    " 08_*/checkpoint.py 09_*/train.py 10_*/fp16_loss_scaling.py 10_*/fp8_tensorwise.py",
}
PLAIN = {  # promises of which the plain run asks these recipes alone, and the thorough run all
    # the first of a folder, and those that add up in a way of their own
    "bfloat16": "01_*/[tg]*.py 02_*/naive.py 03_*/zero1_*.py 03_*/zero3.py 04_*/[sv]*.py 05_*/all_gather_kv.py"
    " 05_*/zigzag.py 06_*/1f1b.py 06_*/zbv.py 07_*/moe.py 07_*/expert_parallel.py 08_*/train.py 09_* 10_*",
    "large_values": "01_* 03_* 04_*/[va]*.py 05_*/blockwise.py 05_*/zigzag.py 05_*/usp.py 06_* 07_* 09_*",
    # the first of a folder, those with a train of their own, and those that keep most between steps
    "run": "0[18]_*/train.py 01_*/muon.py 02_*/naive.py 02_*/bucketed.py 02_*/copy_engines.py 02_*/diloco.py"
    " 03_*/zero[13].py 03_*/offload.py 04_*/[at]*parallel.py 05_*/zigzag.py 05_*/documents.py 06_*/1f1b.py 06_*/zbv.py"
    " 07_*/moe.py 07_*/overlap.py 07_*/slots.py 08_*/checkpoint.py 10_*/fp16*.py 10_*/fp8_d*.py 10_*/s*.py",
}


def kept() -> list:
    """Return the promises to try. Of library twins, which start slowly, the plain run tries the gradient alone."""
    parameters = []
    for promise, recipe in itertools.product(contract.CHECKS, TRAINING):
        if keeps(recipe, promise) and matches(recipe, ASKED.get(promise, "*")):
            plain = promise not in contract.THOROUGH and matches(recipe, PLAIN.get(promise, "*"))
            plain = plain and (promise == "gradient" or not matches(recipe, "*/torch_* */accelerate_*"))
            parameters.append(pytest.param(promise, recipe, marks=() if plain else pytest.mark.thorough))
    return parameters


@pytest.mark.parametrize("promise, recipe", kept())
def test_contract(promise, recipe):
    contract.CHECKS[promise](recipe)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", OTHERS)
def test_other_sizes(recipe, world, flags):
    """Training is the root's where the hardest case may not show that it is not; no wait is missing."""
    compiled = "--compile" in flags
    probe = equivalence.without_kernels if compiled else probes.waits
    equivalence.check(recipe, world, flags + " --layers 2" * compiled, probe=probe)


@pytest.mark.parametrize("recipe, world, flags, line", rows(REFUSED))
def test_refused_sizes(recipe, world, flags, line):
    """Sizes that cannot be shared out end with one line that names the flag and what would work."""
    said = contract.refusal(load(recipe), int(world), f"--device cpu {flags}")
    assert said and said.startswith(line) and "\n" not in said, said


def test_exceptions_are_of_something():
    """Each pattern has its recipes, and each promise is one of the contract or is asked for in its code."""
    source = "".join((ROOT / "tests" / name).read_text() for name in ("contract.py", "equivalence.py", "recipes.py"))
    asked = {*contract.CHECKS, *re.findall(r"(?:keeps|own_flags)\(.+?, [\"'](.+?)[\"']\)", source)}
    for patterns, promise, _ in rows(EXCEPTIONS) + rows(FLAGS):
        assert promise in asked, promise
        for pattern in patterns.split():
            assert any(matches(recipe, pattern) for recipe in TRAINING), pattern


@pytest.mark.thorough
def test_what_the_first_step_imports_does_not_hold_the_group(tmp_path):
    """In a process of its own: here all is imported before the group is made. Every recipe has the line against it."""
    code = f"""
import runpy, sys
sys.path.append({str(ROOT / "tests")!r})
sys.argv = "naive.py {contract.SMALL} --steps 1".split()
runpy.run_path("02_data_parallel/naive.py", run_name="__main__")
from probes import group_is_gone
print("threads left:", group_is_gone(5)(None)()[1])"""
    (tmp_path / "alone.py").write_text(code)
    command = ["torchrun", "--standalone", "--nproc_per_node", "1", str(tmp_path / "alone.py")]
    end = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert end.stdout.splitlines()[-1:] == ["threads left: 0"], end.stdout + end.stderr
    for recipe in TRAINING:
        source = (ROOT / recipe).read_text()
        assert ("\nimport torch.distributed.nn " in source) == ("\nimport torch.distributed as dist\n" in source)
