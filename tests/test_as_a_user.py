"""Recipes by the command of their header, in processes of their own, on two ranks: what forked ranks cannot show.

They leave by os._exit; a process that crashes when its interpreter ends, or imports something too late, does not. One
recipe is tried of each that ends with something else in its hands.
"""

import multiprocessing
import os
import re
import subprocess

import pytest
import torch.distributed.run
from launch import ROOT
from test_lineage import FAMILY

FIRST = "06_pipeline/1f1b.py"  # the README's first command
AT_THE_END = {  # what there is when the interpreter ends
    "02_data_parallel/accelerate_ddp.py": "DistributedDataParallel, by the launcher of accelerate",
    "03_zero/zero3.py": "storages without memory",
    "03_zero/offload.py": "threads of an optimizer",
    "03_zero/accelerate_fsdp.py": "fully_shard",
    "04_tensor_sequence/async_tensor_parallel.py": "memory of all ranks, read piece by piece",
    "04_tensor_sequence/torch_dtensor.py": "DTensor's caches",
    "05_context_ring/torch_context_parallel.py": "a replaced attention",
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
@pytest.mark.parametrize("recipe", AT_THE_END)
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
