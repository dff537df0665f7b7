"""Every recipe by the command of its header, in processes of its own, on two ranks: what forked ranks cannot show.

They leave by os._exit; a process that crashes when its interpreter ends, or imports something too late, does not.
"""

import os
import re
import subprocess

import pytest
from launch import ROOT
from test_lineage import FAMILY, TRAINING

FIRST = "06_pipeline/1f1b.py"  # the README's first command
SMALL = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 16 --steps 2"


def command(recipe: str) -> list[str]:
    """The header's command, on at most two ranks."""
    (run,) = FAMILY[recipe].header["Run"][:1]
    words = re.sub(r"(--nproc_per_node|--num_processes) \d+", r"\1 2", run).split()
    shard = ["--shard", "2"] if recipe.endswith("hsdp.py") else []
    return [*words[: words.index(recipe) + 1], *SMALL.split(), *shard]


def start(recipe: str) -> None:
    one_thread = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }  # several would wait for each other where other tests run beside
    end = subprocess.run(command(recipe), cwd=ROOT, env=one_thread, text=True, capture_output=True, timeout=200)
    assert end.returncode == 0, end.stdout + end.stderr
    lines = [line.split("  loss")[0].strip() for line in end.stdout.splitlines()]
    assert lines == ["step 1", "step 2", "median"], end.stdout


def test_first_command():
    start(FIRST)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [recipe for recipe in TRAINING if recipe != FIRST])
def test_run(recipe):
    start(recipe)
