"""What all recipes do alike, whatever they teach: flags, data, weights by name, precision, log, saved file."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import time

import compare
import equivalence
import numpy as np
import probes
import pytest
import torch
from launch import ROOT, RankFailed, free_port, launch, load
from safetensors.torch import save_file
from test_lineage import TRAINING

ROOT_RECIPE = "01_single_gpu/train.py"
SMALL = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8"
CASES = {recipe: (world, flags) for recipe, world, flags in reversed(equivalence.CASES) if "--compile" not in flags}
CASES[ROOT_RECIPE] = 1, ""  # recipe: (ranks, flags), the smallest of its cases
RECIPES = [(recipe, *CASES[recipe]) for recipe in TRAINING]
# DTensor's caches hold the group until the end of the process
KEEP_THE_GROUP = {"03_zero/torch_fsdp.py", "03_zero/accelerate_fsdp.py", "04_tensor_sequence/torch_dtensor.py"}
every_recipe = pytest.mark.parametrize("recipe, world, flags", RECIPES, ids=TRAINING)


@every_recipe
def test_starts_as_root(recipe, world, flags):
    """Without --init too, every layout draws the same weights."""
    ours = launch(recipe, world, f"{SMALL} {flags} --steps 0").weights
    theirs = launch(equivalence.root_of(recipe), 1, f"{SMALL} --steps 0").weights
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@functools.cache
def root_evaluated(recipe, flags):
    return launch(recipe, 1, flags, probe=probes.evaluated)


@every_recipe
def test_evaluates(recipe, world, flags):
    """Between steps a model computes under no_grad, on every rank, what the root does; and goes on training as it."""
    if recipe == "02_data_parallel/diloco.py":
        world = 1  # workers have weights of their own until they meet
    root = equivalence.root_of(recipe)
    init = equivalence.start(root, f"{equivalence.SHAPE} {equivalence.shared(flags)}")
    common = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init}"
    common = f"{common} {equivalence.TRAINING}"
    ours = launch(recipe, world, f"{common} {flags}", probe=probes.evaluated)
    theirs = root_evaluated(root, f"{common} {equivalence.shared(flags)}")
    assert len(theirs.probes[0]) == 1 + 2 * 4
    for losses in ours.probes:
        for mine, wanted in zip(losses, theirs.probes[0], strict=True):
            assert abs(mine / wanted - 1) < equivalence.TOLERANCE["float64"]
    errors = compare.relative_errors(ours.weights, theirs.weights) | compare.history_errors(
        ours.history, theirs.history
    )
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], recipe)


@every_recipe
def test_low_precision(recipe, world, flags):
    """In float32 and bfloat16 the gradient is as near to the root's as rounding allows; as on GPUs, in small."""
    equivalence.check_low_precision(recipe, world, flags, "cpu")


@every_recipe
def test_bfloat16_is_the_dtype_of_everything_but_the_loss(recipe, world, flags):
    """Matmuls, residual stream and logits are in 16 bits, the loss in 32."""
    seen = launch(recipe, world, f"{SMALL} {flags} --steps 1 --dtype bfloat16", probe=probes.dtypes).probes
    low = dict.fromkeys(("Block", "Attention", "MLP", "RMSNorm"), ["torch.bfloat16"])
    for rank in seen:
        assert low.items() <= rank.items(), rank
        assert rank.get("Linear", low["MLP"]) == low["MLP"]  # it is not called where functions take its weight
    assert seen[-1]["Loss"] == ["torch.float32"]


@every_recipe
def test_compile(recipe, world, flags):
    """--compile compiles blocks and loss; without it nothing is compiled."""
    for flag, wanted in ("--compile", {"Block", "Loss"}), ("", set()):
        for yes, no in launch(recipe, world, f"{SMALL} {flags} --steps 0 {flag}", probe=probes.compiled).probes:
            assert wanted == yes & {"Block", "Loss"} and not wanted & no and (wanted or not yes)


@every_recipe
def test_log_and_saved_file(recipe, world, flags):
    """One rank logs each step and the medians after the warm-up, with what it saves; each step has its own batch.

    After it nothing holds the process group any more: of a gloo group that outlives destroy_process_group the threads
    release tensors at the end of the process, which aborts it now and then.
    """
    start = time.perf_counter()
    probe = probes.together(probes.calls("save_file"), probes.steps_of_batches, probes.threads_of_gloo)
    run = launch(recipe, world, f"{SMALL} {flags} --steps 12", probe=probe)
    history, silent = np.array(run.history), run.output[1:]
    assert [calls for (calls,), *_ in run.probes] == [1] + [0] * (world - 1) and not any(silent)
    assert all(steps == list(range(13)) for _, steps, _ in run.probes)
    if recipe not in KEEP_THE_GROUP:
        assert [threads for *_, threads in run.probes] == [0] * world
    assert 0 < history[:, 2].sum() < time.perf_counter() - start and (history[:, 2] > 0).all()
    lines = run.output[0].splitlines()
    labels = [*(f"step {step}" for step in range(1, 13)), "median"]
    numbers = [*history, np.median(history[5:], axis=0)]
    for line, label, (loss, norm, seconds) in zip(lines, labels, numbers, strict=True):
        speed = f"tokens/s/GPU {8 * 16 / seconds / world:,.0f}"
        assert re.split("  +", line.strip())[:4] == [label, f"loss {loss:.4f}", f"gradient norm {norm:.3f}", speed]


def test_what_the_first_step_imports_does_not_hold_the_group():
    """In a process of its own: here all is imported before the group is made. Every recipe has the line against it."""
    code = f"""
import runpy, sys
sys.path.append({str(ROOT / "tests")!r})
sys.argv = "naive.py {SMALL} --steps 1".split()
runpy.run_path("02_data_parallel/naive.py", run_name="__main__")
from probes import threads_of_gloo
print("threads left:", threads_of_gloo(None)())"""
    alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    environment = {**os.environ, **alone, "MASTER_PORT": str(free_port())}
    end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert end.stdout.splitlines()[-1:] == ["threads left: 0"], end.stdout + end.stderr
    for recipe in TRAINING:
        source = (ROOT / recipe).read_text()
        assert ("\nimport torch.distributed.nn " in source) == ("\nimport torch.distributed as dist\n" in source)


def bad_inputs(folder):
    """Flags that cannot work, and words that the one line about them must have."""
    np.full(500, 300, np.uint16).tofile(folder / "ids.bin")
    (folder / "short.txt").write_text("too short")
    (folder / "empty").mkdir(exist_ok=True)
    save_file({"model.layers.8.mlp.up_proj.weight": torch.zeros(384, 128)}, folder / "deep.safetensors")
    (folder / "text.safetensors").write_text("not weights")
    return [
        ("--heads 7", ["--heads 7", "--dim 128"]),
        ("--heads 128", ["--heads 128", "--dim 128", "even"]),
        ("--kv_heads 3", ["--kv_heads 3", "--heads 8"]),
        ("--layers 0", ["--layers 0", "at least 1"]),
        ("--batch 0", ["--batch 0", "at least 1"]),
        ("--steps -1", ["--steps -1", "at least 0"]),
        ("--lr -1", ["--lr -1", "at least 0"]),
        ("--lr nan", ["--lr nan", "at least 0"]),
        ("--warmup -1", ["--warmup -1", "at least 0"]),
        ("--clip 0", ["--clip 0", "above 0", "inf"]),
        ("--clip -1", ["--clip -1", "at least 0"]),
        ("--data nowhere.txt", ["--data nowhere.txt", "no such file"]),
        (f"--data {folder}/short.txt", ["--data", "short.txt", "--seq 128", "has 9"]),
        (f"--data {folder}/empty", [f"--data {folder}/empty", "--seq 128", "has 0"]),
        (f"--data {folder}/ids.bin", ["--vocab 256", "300", "uint16"]),
        ("--vocab 100", ["--vocab 100", "must be above"]),
        ("--init nowhere.safetensors", ["--init nowhere.safetensors", "no such file"]),
        (f"--init {folder}/text.safetensors", ["--init", "text.safetensors", "no .safetensors file"]),
        (f"--init {folder}", ["--init", "no .safetensors file"]),
        (f"--init {folder}/deep.safetensors", ["--layers 8", "--init", "more"]),
        ("--save nowhere/out.safetensors", ["--save nowhere/out.safetensors", "no folder"]),
        (f"--save {folder}", [f"--save {folder}", "is a folder"]),
        ("--device cuda", ["--device cuda", f"{torch.cuda.device_count()} GPUs for"]),
    ]


@every_recipe
def test_bad_input(recipe, world, flags, tmp_path, monkeypatch):
    """Every rank ends with one line, before there is a process group, and with an exit code that is not 0."""
    module = load(recipe)
    for bad, words in bad_inputs(tmp_path):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torch.cuda.device_count() + 1 if "cuda" in bad else world))
        sys.argv = [recipe, "--device", "cpu", *flags.split(), *bad.split()]
        with pytest.raises(SystemExit) as end:
            cfg = module.parse_config()
            module.check(cfg, world)
            module.load_data(cfg)
        line = end.value.code
        assert isinstance(line, str) and "\n" not in line and all(word in line for word in words), (bad, line)
    with pytest.raises(RankFailed) as failure:
        launch(recipe, world, f"--device cpu {flags} --heads 7", probe=probes.never_a_process_group, timeout=60)
    (line,) = failure.value.output.splitlines()
    assert "--heads 7" in line and failure.value.code == 1


@every_recipe
def test_flags_of_the_root(recipe, world, flags):
    """Every recipe has the root's flags, with its defaults, but it may train for fewer steps."""
    root, ours = ({f.name: f.default for f in dataclasses.fields(load(path).Config)} for path in (ROOT_RECIPE, recipe))
    assert 0 < ours["steps"] <= root.pop("steps")
    assert root.items() <= ours.items() and load(recipe).PRESETS == load(ROOT_RECIPE).PRESETS


@every_recipe
def test_bad_world(recipe, world, flags, monkeypatch):
    """Single-GPU recipes say that they use one process, the others how to start them."""
    module = load(recipe)
    sys.argv = [recipe, "--device", "cpu"]
    words = ["--nproc_per_node 2", "1 process"] if world == 1 else ["torchrun --nproc_per_node"]
    with pytest.raises(SystemExit) as end:
        module.check(module.parse_config(), 2 if world == 1 else 0)
    assert all(word in end.value.code for word in words)
