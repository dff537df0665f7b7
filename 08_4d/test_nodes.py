"""One layout on two hosts, started by the page's Slurm script; a rank that is killed, and torchrun that goes on."""

import contextlib
import os
import re
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import compare
import pytest
import torch
from equivalence import ROOT_RECIPE, SHAPE, TOLERANCE, TRAINING, documents, reference, shared, start
from launch import ROOT, launch
from recipes import mesh

RECIPE = "08_4d/checkpoint.py"
# Run a command on two hosts of one machine: network namespaces, joined by a virtual Ethernet cable. The command is on
# node0; $ON_NODE1 takes another to node1. Torchrun and gloo tell other ranks the name of their host, or the address of
# this name: so hosts have names of their own (UTS namespaces), and an /etc/hosts (mount namespace) that knows them.
# Names and addresses exist inside the namespaces alone: nothing collides, and all is gone with the last process.
HOSTS = """
set -e
printf '127.0.0.1 localhost\\n10.0.0.1 node0\\n10.0.0.2 node1\\n' > $FOLDER/hosts
mount --bind $FOLDER/hosts /etc/hosts
unshare --net --uts sleep 600 & node1=$!
trap "kill $node1" EXIT
until [ "$(readlink /proc/$node1/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
export ON_NODE1="nsenter --target $node1 --net --uts"
ip link add eth0 type veth peer name eth0 netns $node1
up='hostname $1; ip address add $2/24 dev eth0; ip link set eth0 up; ip link set lo up'
sh -ec "$up" up node0 10.0.0.1
$ON_NODE1 sh -ec "$up" up node1 10.0.0.2
code=0; "$@" || code=$?
grep eth0 /proc/net/dev > $FOLDER/received0
$ON_NODE1 grep eth0 /proc/net/dev > $FOLDER/received1
exit $code
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf '%s\\n' $NODES
"""
# The command, without srun's own options, once per node.
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
SLURM_NODEID=0 "$@" & node0=$!
SLURM_NODEID=1 $ON_NODE1 "$@" & node1=$!
wait $node0; code0=$?
wait $node1; code1=$?
echo $code0 $code1 > $FOLDER/codes
exit $((code0 | code1))
"""


def processes(folder: Path, *values: str) -> Iterator[int]:
    """Process ids of a test's processes, on all hosts, with these values in their environment."""
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


def finish(process: subprocess.Popen, folder: Path) -> tuple[str, list[str]]:
    """Wait until a command has ended with 0. Returns its output, and the labels of the log: step 1 ... median."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=300)
    output = (folder / "output").read_text()
    assert process.returncode == 0, output
    return output, re.findall(r"^ *(step \d+|median)  loss", output, flags=re.MULTILINE)


def hosts(folder: Path) -> list[str]:
    """The words before a command that run it on two hosts; none, and a warning, where no namespaces can be made."""
    for user in [], ["--user", "--map-root-user"]:  # as root; as somebody who is root inside alone
        words = ["unshare", *user, "--net", "--uts", "--mount", "sh", "-c", HOSTS, "hosts"]
        with contextlib.suppress(FileNotFoundError, subprocess.TimeoutExpired):
            with running([*words, "true"], folder) as trial:
                if trial.wait(timeout=30) == 0:
                    return words
    warnings.warn("no network namespaces here: both torchruns run on one host, over its loopback", stacklevel=2)
    return []


@pytest.mark.thorough
def test_two_nodes(tmp_path):
    """The Slurm script, with a pipeline from one host to the other: the root's weights, losses and norms.

    Slurm's commands are replaced: scontrol prints the names of the hosts, srun starts its command on each.
    """
    (tmp_path / "bin").mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    layout = mesh(1, 1, 2, 2)  # of 4 ranks, node0 has the first stage, node1 the second
    init = start(ROOT_RECIPE, f"{SHAPE} {shared(layout)}")
    common = f"{SHAPE} --device cpu --dtype float64 --data {documents()} --init {init} {TRAINING}"
    files = f"--checkpoint {tmp_path}/checkpoints --every 2 --save {tmp_path}/weights.safetensors"
    job = ["bash", "08_4d/train.slurm", *f"--preset tiny {common} {layout} {files}".split()]
    on_hosts = hosts(tmp_path)
    slurm = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "NODES": "node0 node1" if on_hosts else "localhost localhost",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "2",
    }
    with running([*on_hosts, *job], tmp_path, **slurm) as script:
        output, steps = finish(script, tmp_path)
    assert (tmp_path / "codes").read_text() == "0 0\n", output  # of both torchruns
    assert steps == ["step 1", "step 2", "step 3", "step 4", "median"], output
    assert {folder.name for folder in (tmp_path / "checkpoints").iterdir()} == {"step-2", "step-4"}
    weights, history = compare.read(f"{tmp_path}/weights.safetensors")
    theirs = reference(ROOT_RECIPE, f"{common} {shared(layout)}")
    errors = compare.relative_errors(weights, theirs.weights) | compare.history_errors(history, theirs.history)
    compare.assert_close(errors, TOLERANCE["float64"], "two nodes")
    batch, seq = (int(re.search(rf"--{size} (\d+)", layout)[1]) for size in ("batch", "seq"))
    passed_on = len(history) * batch * seq * len(weights["model.norm.weight"]) * 8  # bytes of activations: b s d
    for node in range(2) if on_hosts else ():
        received = int((tmp_path / f"received{node}").read_text().split()[1])
        # Of gradients as many go back. Tensor parallelism across hosts would send about 5 times as many, per layer.
        assert passed_on <= received <= 5 * passed_on, f"node{node} received {received:,} bytes"


@pytest.mark.thorough
def test_killed_rank(tmp_path):
    """torchrun starts again what a kill has ended: to the bit the weights, losses and norms of a run without it."""
    flags = "--device cpu --layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --steps 60"
    flags += " --dp 1 --cp 1 --tp 1 --pp 2"
    files = f"--checkpoint {tmp_path}/checkpoints --every 1 --save {tmp_path}/weights.safetensors"
    words = ["torchrun", "--nproc_per_node", "2", "--max_restarts", "2", RECIPE, *f"{flags} {files}".split()]
    with running(words, tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as torchrun:  # as in train.slurm
        end = time.monotonic() + 200
        while not list((tmp_path / "checkpoints").glob("step-[2-9]")):
            assert torchrun.poll() is None and time.monotonic() < end, (tmp_path / "output").read_text()
            time.sleep(0.01)
        (victim,) = processes(tmp_path, "RANK=1")
        os.kill(victim, signal.SIGKILL)
        output, steps = finish(torchrun, tmp_path)
    assert "resumed from" in output, "it has ended before it was killed"
    assert steps.count("step 1") == steps.count("median") == 1 and steps[-2:] == ["step 60", "median"], output
    uninterrupted = launch(RECIPE, 2, flags)
    weights, history = compare.read(f"{tmp_path}/weights.safetensors")
    assert [row[:2] for row in history] == [row[:2] for row in uninterrupted.history]
    assert weights.keys() == uninterrupted.weights.keys()
    assert all(torch.equal(tensor, uninterrupted.weights[name]) for name, tensor in weights.items())
