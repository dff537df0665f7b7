"""Every recipe by the command of its header, in processes of its own, on two ranks: what forked ranks cannot show.

They leave by os._exit; a process that crashes when its interpreter ends, or imports something too late, does not.
"""

import multiprocessing
import os
import re
import subprocess

import pytest
import torch.distributed.run
from launch import ROOT
from test_lineage import FAMILY, TRAINING

FIRST = "06_pipeline/1f1b.py"  # the README's first command
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # several would wait for each other where other tests run beside
SMALL = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 16 --steps 2"


def command(recipe: str) -> list[str]:
    """The header's command, on at most two ranks."""
    (run,) = FAMILY[recipe].header["Run"][:1]
    words = re.sub(r"(--nproc_per_node|--num_processes) \d+", r"\1 2", run).split()
    own = {"03_zero/hsdp.py": "--shard 2", "08_4d/moe.py": "--dp 2 --cp 1 --tp 1 --pp 1 --ep 2"}.get(recipe, "")
    own = "--dp 1 --cp 1 --tp 1 --pp 2" if recipe[:2] == "08" and not own else own  # layouts of two ranks
    return [*words[: words.index(recipe) + 1], *SMALL.split(), *own.split()]


def assert_trained(code: int | None, output: str) -> None:
    assert code == 0, output
    lines = [line.split("  loss")[0].strip() for line in output.splitlines()]
    assert lines == ["step 1", "step 2", "median"], output


def run(words: list[str]) -> None:
    end = subprocess.run(words, cwd=ROOT, env=ONE_THREAD, text=True, stdout=subprocess.PIPE, timeout=200)
    assert_trained(end.returncode, end.stdout)


def test_first_command():
    run(command(FIRST))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [recipe for recipe in TRAINING if recipe != FIRST])
def test_run(recipe, tmp_path):
    """The launcher is a fork, which has imported torch already; the processes that it starts import all they need."""
    program, *words = command(recipe)
    if program != "torchrun":
        return run([program, *words])

    def torchrun() -> None:
        with open(tmp_path / "output", "w") as output:
            os.dup2(output.fileno(), 1)
        os.chdir(ROOT)
        os.environ.update(ONE_THREAD)
        torch.distributed.run.main(words)

    launcher = multiprocessing.get_context("fork").Process(target=torchrun)
    launcher.start()
    launcher.join(timeout=200)
    launcher.terminate()  # if it has not ended: it stops what it has started
    launcher.join()
    assert_trained(launcher.exitcode, (tmp_path / "output").read_text())
