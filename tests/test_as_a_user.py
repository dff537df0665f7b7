"""Recipes by the command of their header, in processes of their own, on two ranks: what forked ranks cannot show.

They leave by os._exit; a process that crashes when its interpreter ends, or imports something too late, does not. One
recipe is tried of each that ends with something else in its hands. Twins with DTensor are not: its cache keeps the
process group, whose threads abort the end of the interpreter once in some hundred runs.
"""

import os
import re
import subprocess

import pytest
from launch import ROOT
from test_lineage import FAMILY

FIRST = "06_pipeline/1f1b.py"  # the README's first command
AT_THE_END = {  # what there is when the interpreter ends
    "02_data_parallel/accelerate_ddp.py": "DistributedDataParallel, by the launcher of accelerate",
    "03_zero/zero3.py": "storages without memory",
    "03_zero/offload.py": "threads of an optimizer",
    "04_tensor_sequence/async_tensor_parallel.py": "memory of all ranks, read piece by piece",
    "06_pipeline/zbv.py": "four communicators per rank",
    "06_pipeline/torch_pipelining.py": "the library's stages",
    "07_expert/symmetric_memory.py": "Triton's interpreter",
    "08_4d/checkpoint.py": "a thread that writes, with a group of its own",
    "10_mixed_precision/fp8_delayed_scaling.py": "operators of its own",
}
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # several would wait for each other where other tests run beside
SMALL = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 16 --steps 2"


def command(recipe: str) -> list[str]:
    """The header's command, on at most two ranks."""
    (run,) = FAMILY[recipe].header["Run"][:1]
    run = run.replace("accelerate launch", "accelerate launch --main_process_port 0")  # any: two tests may run at once
    words = re.sub(r"(--nproc_per_node|--num_processes) \d+", r"\1 2", run).split()
    layout = "--dp 1 --cp 1 --tp 1 --pp 2".split() if recipe[:2] == "08" else []  # of two ranks
    return [*words[: words.index(recipe) + 1], *SMALL.split(), *layout]


@pytest.mark.parametrize(
    "recipe", [FIRST, *(pytest.param(recipe, marks=pytest.mark.thorough) for recipe in AT_THE_END)]
)
def test_command(recipe):
    end = subprocess.run(command(recipe), cwd=ROOT, env=ONE_THREAD, text=True, stdout=subprocess.PIPE, timeout=200)
    assert end.returncode == 0, end.stdout
    lines = [line.split("  loss")[0].strip() for line in end.stdout.splitlines()]
    assert lines == ["step 1", "step 2", "median"], end.stdout
