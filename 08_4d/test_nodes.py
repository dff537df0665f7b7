"""The page's Slurm script on two nodes: when a rank is killed, torchrun goes on, and trains as if nothing had been."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import compare
import pytest
import torch
from launch import ROOT, free_port, launch
from recipes import mesh

RECIPE = "08_4d/checkpoint.py"
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf 'localhost\\nlocalhost\\n'
"""
# The command, without srun's own options, once per node.
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
"$@" & node0=$!
"$@" && wait $node0
"""
SLURM = dict(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[0-1]", SLURM_NNODES="2")
SLURM |= dict(SLURM_GPUS_ON_NODE="2", SLURM_CPUS_PER_TASK="2")


def processes(folder: Path, *values: str) -> Iterator[int]:
    """Process ids of a test's processes with these values in their environment."""
    wanted = {value.encode() for value in (f"FOLDER={folder}", *values)}
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted <= set(file.read_bytes().split(b"\0")):
                yield int(file.parent.name)


@contextlib.contextmanager
def running(words: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """Start a command; in the end kill what is left of it. A worker of torchrun is in a session of its own."""
    environment = {**os.environ, "FOLDER": str(folder), "OMP_NUM_THREADS": "1", **variables}
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        while left := list(processes(folder)):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        process.wait()


@pytest.mark.thorough
def test_killed_rank(tmp_path):
    """To the bit the weights, losses and norms of a run without a kill. Slurm's srun and scontrol are scripts."""
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    flags = f"--preset tiny --device cpu --dtype float32 --dim 32 --ffn 48 --steps 40 {mesh(1, 1, 2, 2)}"
    flags += " --layers 4 --chunks 2"
    files = f"--checkpoint {tmp_path}/checkpoints --every 1 --save {tmp_path}/weights.safetensors"
    with free_port() as port:
        script = (ROOT / "08_4d" / "train.slurm").read_text().replace(":29500", f":{port}")
        words, path = ["bash", "-c", script, "train.slurm", *f"{flags} {files}".split()], os.environ["PATH"]
        with running(words, tmp_path, PATH=f"{tmp_path}:{path}", **SLURM) as job:
            end = time.monotonic() + 200
            while not list((tmp_path / "checkpoints").glob("step-[2-9]")):
                assert job.poll() is None and time.monotonic() < end, (tmp_path / "output").read_text()
                time.sleep(0.01)
            (victim,) = processes(tmp_path, "RANK=3")
            os.kill(victim, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(timeout=300)
    output = (tmp_path / "output").read_text()
    assert job.returncode == 0, output
    assert "resumed from" in output, "it has ended before it was killed"
    steps = re.findall(r"^ *(step \d+|median)  loss", output, flags=re.MULTILINE)
    assert steps.count("step 1") == steps.count("median") == 1 and steps[-2:] == ["step 40", "median"], output
    uninterrupted = launch(RECIPE, 4, flags)
    weights, history = compare.read(f"{tmp_path}/weights.safetensors")
    assert [row[:2] for row in history] == [row[:2] for row in uninterrupted.history]
    torch.testing.assert_close(weights, uninterrupted.weights, rtol=0, atol=0)
