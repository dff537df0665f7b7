"""What every recipe keeps, whatever it teaches: one function per promise, which raises AssertionError if it is broken.

Each takes a recipe and, to try a bug, the file that runs in its place, and most of them launch it once: what one launch
can show is asserted together. tests/test_contract.py calls all of them for every recipe; tests/test_bugs.py calls them
for recipes with bugs, which they must see.
"""

import contextlib
import dataclasses
import io
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import compare
import equivalence
import numpy as np
import probes
import torch
from launch import RankFailed, Run, isolated, launch, load, once
from recipes import EDGES, HARDEST, LORA, MOE, NODES, SMALLEST, cases_of, keeps, on_one_device, own_flags, root_of
from safetensors.torch import save_file
from streams import streams
from test_lineage import FAMILY

SMALL = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8"
FROZEN = "embed_tokens", "norm", "k_proj"  # parts of names
SLOW = 1000  # seconds by which the clock is put forward in a step
STEPS = 10


# ------------------------------------------------------------------------------------------------------------ equality
def hardest(recipe: str, dtype: str, large: bool = False) -> tuple[int, str, str, str]:
    """Ranks of the hardest case, the root's flags for it, the recipe's, and the weights from which both start."""
    world, flags = HARDEST[recipe]
    if "--layers" not in flags:
        flags += f" {own_flags(recipe, 'hardest')}"
    root = root_of(recipe)
    if dtype == "bfloat16" and root == NODES:  # sums of a node are rounded: others may be chosen after them
        flags = equivalence.to_all_experts(root, flags)
    init = equivalence.start(root, f"{equivalence.SHAPE} {equivalence.shared(flags)}", large)
    common = f"{equivalence.SHAPE} --device cpu --data {equivalence.documents()} --init {init} --dtype {dtype}"
    return world, f"{common} {equivalence.shared(flags)}", f"{common} {flags}", init


def check_gradient(recipe: str, file: str | None = None) -> None:
    """One step of gradient descent in float64: the gradient, the loss and the norm are the root's; no wait is missing.

    All ranks have the same norm to the bit: else they would clip by different factors, and drift apart.
    """
    world, roots, ours, init = hardest(recipe, "float64")
    probe = probes.together(probes.results_of_steps, probes.waits)
    run = launch(file or recipe, world, f"{ours} {equivalence.GRADIENT}", probe)
    reference = equivalence.reference(root_of(recipe), f"{roots} {equivalence.GRADIENT}")
    errors = compare.relative_errors(run.weights, reference.weights, compare.read(init)[0])
    if keeps(recipe, "one log"):
        errors |= compare.history_errors(run.history, reference.history)
        assert all(seen == run.probes[0][0] for seen, _ in run.probes), "ranks differ in the loss, or in the norm"
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], f"{recipe} on {world} ranks, gradient")


def check_training(recipe: str, file: str | None = None) -> None:
    """Three steps of AdamW with a clip that acts; after the first and the last a validation loss.

    Weights, losses and norms are the root's, and so are validation losses, on all ranks; of the same batch they are the
    same to the bit. Whole tensors agree to the bit on all ranks.
    """
    world, roots, ours, _ = hardest(recipe, "float64")
    world = world if keeps(recipe, "one model") else 1
    probe = probes.together(probes.evaluated(*forms_of_evaluation(recipe)), probes.whole_parameters)
    run = launch(file or recipe, world, f"{ours} {equivalence.TRAINING} --steps 3", probe)
    roots += f" {equivalence.TRAINING} --steps 3"
    reference = of_root(root_of(recipe), roots, "evaluated", *forms_of_evaluation(recipe))
    assert min(norm for _, norm, *_ in reference.history) > 0.5, "the clip never acted"
    errors = compare.relative_errors(run.weights, reference.weights)
    errors |= compare.history_errors(run.history, reference.history)
    for rank, (losses, parameters) in enumerate(run.probes):
        assert losses[0] == losses[1], f"{recipe}: two evaluations of the same batch differ"
        for i, (mine, theirs) in enumerate(zip(losses, reference.probes[0], strict=True)):
            errors[f"validation loss {i} on rank {rank}"] = abs(mine / theirs - 1)
        for name, bits in parameters.items():
            saved = keeps(recipe, "saved as trained")
            one = run.weights[name].numpy().tobytes() if saved else run.probes[0][1][name]
            assert bits == one, f"{recipe}: {name} is not the same on all ranks"
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], f"{recipe} on {world} ranks, training")


def forms_of_evaluation(recipe: str) -> tuple[bool, bool, bool]:
    """Whether a recipe evaluates a larger batch than it trains on, one that divides unevenly, and in inference mode."""
    other = keeps(recipe, "other batches")
    return other, other and keeps(recipe, "uneven batches"), keeps(recipe, "inference mode")


def check_frozen(recipe: str, file: str | None = None) -> None:
    """Frozen parameters stay; all others are trained as by the root, with a clip that acts."""
    world, roots, ours, init = hardest(recipe, "float64")
    flags, probe = "--weight_decay 0.1 --lr 0.01 --warmup 0 --clip 0.5 --steps 2", probes.freezes(*FROZEN)
    run = launch(file or recipe, world, f"{ours} {flags}", probe)
    reference = of_root(root_of(recipe), f"{roots} {flags}", "freezes", *FROZEN)
    errors = compare.relative_errors(run.weights, reference.weights)
    errors |= compare.history_errors(run.history, reference.history)
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], f"{recipe} on {world} ranks, frozen parameters")
    start = compare.read(init)[0]
    for name in (name for name in start if any(part in name for part in FROZEN)):
        assert torch.equal(run.weights[name], start[name]), f"{recipe} trains {name}, which is frozen"


@once
def of_root(root: str, flags: str, probe: str, *arguments: object) -> Run:
    """The root's run with a probe of that name."""
    return launch(root, 1, flags, probe=getattr(probes, probe)(*arguments))


def check_streams(recipe: str, file: str | None = None) -> None:
    """Training equals the root's if asynchronous operations run as early as they may, and as late.

    An operation may run at any time between its start and the end of the wait for it.
    """
    for when in "at once", "late":
        probe = probes.together(probes.last_rank_is_late, streams(when))
        equivalence.check(file or recipe, *HARDEST[recipe], root_of(recipe), probe)


def check_evaluation(recipe: str, file: str | None = None) -> None:
    """Evaluations change nothing: after each of them, training goes on as without it, to the bit."""
    world, flags = SMALLEST[recipe]
    flags = f"{SMALL} {flags} --batch 24 --steps 3"
    without, run = (
        launch(file or recipe, world, flags, probe) for probe in (None, probes.evaluated(*forms_of_evaluation(recipe)))
    )
    assert all(run.probes), "nothing was evaluated"
    for name, tensor in without.weights.items():
        assert torch.equal(tensor, run.weights[name]), f"{recipe}: after evaluations, {name} is trained otherwise"
    logged = [[(loss, norm, *rest) for loss, norm, _, *rest in of.history] for of in (without, run)]
    assert logged[0] == logged[1], f"{recipe}: after evaluations, the log is another"


def check_large_values(recipe: str, file: str | None = None) -> None:
    """Float32, with logits beyond 300 and attention scores of 20: as near to float64 as the root's float32.

    An exponential without its maximum subtracted, or a maximum of the wrong rows, is right only for small numbers.
    """
    world, roots, ours, init = hardest(recipe, "float32", large=True)
    root, before = root_of(recipe), compare.read(init)[0]
    exact = equivalence.reference(root, f"{roots.replace('float32', 'float64')} {equivalence.LOW_GRADIENT}")
    theirs = equivalence.reference(root, f"{roots} {equivalence.LOW_GRADIENT}")
    run = launch(file or recipe, world, f"{ours} {equivalence.LOW_GRADIENT}")
    roots_errors = compare.relative_errors(theirs.weights, exact.weights, before)
    usual = statistics.median(roots_errors.values())  # of a tensor, the root's error may be small by chance
    errors = {
        name: error / max(roots_errors[name], usual)
        for name, error in compare.relative_errors(run.weights, exact.weights, before).items()
    }
    if keeps(recipe, "one log"):
        errors["loss"] = abs(run.history[0][0] / exact.history[0][0] - 1) / 1e-6
    compare.assert_close(errors, LARGE_ERROR, f"{recipe} on {world} ranks, large values")


LARGE_ERROR = 4  # times the root's own error in float32: sums of as many roundings in another order


def parts_of(recipe: str, world: int, flags: str) -> int | None:
    """Into how many parts the batch is cut, each with a gradient of its own; None where the model is cut otherwise."""
    if not keeps(recipe, "cut batch"):
        return None
    default = {f.name: f.default for f in dataclasses.fields(load(recipe).Config)}.get("microbatches", 1)
    given = re.search(r"--microbatches (\d+)", flags)
    return (world if recipe[:2] in ("02", "03") else 1) * (int(given[1]) if given else default)


def check_bfloat16(recipe: str, file: str | None = None) -> None:
    """In bfloat16, nothing is rounded that the root does not round.

    Where the batch is cut, the gradient is the exact sum of what the root computes for each part: one more rounding in
    an accumulation or a reduction is seen. Where matmuls are cut, partial sums are rounded, so that errors differ: at
    most twice the root's. The optimizer sees fp32 alone (where it keeps masters, gradients may have the dtype of their
    weights). Matmuls, residual stream and logits have 16 bits, the loss 32.
    """
    world, roots, ours, init = hardest(recipe, "bfloat16")
    root, low = root_of(recipe), not keeps(recipe, "autocast")
    probe = probes.together(probes.dtypes, probes.dtypes_of_the_optimizer)
    run = launch(file or recipe, world, f"{ours} {equivalence.LOW_GRADIENT}", probe)
    for seen, optimizer in run.probes:
        assert optimizer == ["torch.float32"], f"the optimizer has {optimizer}"
        halves = dict.fromkeys(("Block", "Attention", "MLP", "RMSNorm"), ["torch.bfloat16"])
        assert halves.items() <= seen.items(), seen
        assert seen.get("Linear", halves["MLP"]) == halves["MLP"]  # it is not called where functions take its weight
    kinds = "Loss", "CrossEntropyLoss"  # not every stage of a pipeline has one
    losses = [seen[kind] for seen, _ in run.probes for kind in kinds if kind in seen]
    assert losses and all(loss == ["torch.float32"] for loss in losses), losses
    for what, logged in zip(("loss", "norm"), run.history[0]):
        assert torch.tensor(logged).bfloat16().item() != logged, f"the {what} that is logged has 16 bits"
    before, parts = compare.read(init)[0], parts_of(recipe, *HARDEST[recipe])
    if keeps(recipe, "norm of the change"):
        changes = [(run.weights[name] - tensor).double() / 100 for name, tensor in before.items()]  # rate 100
        norm = torch.stack([change.norm() for change in changes]).norm().item()
        error = abs(run.history[0][1] / norm - 1)
        assert error < NORM, f"the norm is off by {error:.1e}: it, or what it is of, has 16 bits"
    flags = f"{roots} {equivalence.LOW_GRADIENT}"
    if parts:
        rounded = 0 if keeps(recipe, "exact sums") else parts // world
        exact = equivalence.in_parts(root, flags, parts, low, rounded)
        errors = compare.relative_errors(run.weights, exact.weights, before)
        errors["loss"] = abs(run.history[0][0] / exact.history[0][0] - 1)  # the log's, too, is a sum in fp32
        compare.assert_close(errors, ROUNDED_ONCE, f"{recipe} in bfloat16")
        return
    exact = equivalence.reference(root, flags.replace("bfloat16", "float32")).weights
    theirs = equivalence.in_parts(root, flags, 1, low).weights
    own = compare.relative_errors(theirs, exact, before)
    errors = compare.relative_errors(run.weights, exact, before)  # 0 of biases that count
    errors = {name: error and error / own[name] for name, error in errors.items()}
    compare.assert_close(errors, equivalence.TOLERANCE["bfloat16"], f"{recipe} on {world} ranks in bfloat16")


ROUNDED_ONCE = 1e-5  # fp32 sums, and fp32 weights that take the step; a bf16 rounding is 2e-3
NORM = 1e-4  # squares added up in fp32, one after the other on some CPUs; rounded to bf16 it is off by up to 4e-3


def check_partial_sums(recipe: str, file: str | None = None) -> None:
    """What a recipe adds up itself, the ranks' parts of a matmul in bfloat16, is rounded once: by half a unit."""

    def error() -> float:
        sum_products = getattr(load(file or recipe), "sum_products", None)
        if not sum_products:
            return 0.0
        parts = torch.randn(16, 500, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
        exact = parts.double().sum(0)
        return ((sum_products(parts).double() - exact).abs() / (exact.abs() + 1e-2)).max().item()  # sums may cancel

    assert isolated(error) <= 1.01 * 2**-8, "partial sums are rounded more than once"


# ----------------------------------------------------------------------------------------------------------- log, file
def check_run(recipe: str, file: str | None = None) -> None:
    """Ten small steps: what is logged, what is saved, what the clock sees, what is left in memory, and of the group.

    A validation follows step 4 and step 8, of text that is in no batch.

    In steps 4, 6 and 7 the clock is put forward, in train_step, where the loss is read, and while the next batch is
    made: each must show in its seconds, from which the published speeds come.
    """
    world, flags = SMALLEST[recipe]
    flags += f" {own_flags(recipe, 'run')}"
    start = time.perf_counter()
    probe = probes.together(
        probes.saves,
        probes.batches,
        probes.slow_steps(4, 6, 7, SLOW),
        probes.things_in_memory,
        probes.group_is_gone(5 if keeps(recipe, "group is gone") else 0),
    )
    flags += f" --data {equivalence.documents()} --steps {STEPS} --validate 4"
    run = launch(file or recipe, world, f"{SMALL} {flags}", probe=probe)
    elapsed = time.perf_counter() - start
    for rank, (saves, batches, _, alive, (initialised, threads)) in enumerate(run.probes):
        assert saves == (rank == 0), "one rank saves"
        (text, unseen), *made = batches
        wanted = [(step, text) for step in range(STEPS + 1)]  # and one that is not trained on
        for step in 4, 8:
            wanted.insert(wanted.index((step, text)) + 1, (0, unseen))  # when the next step's batch is there
        assert 18 * unseen < text < 20 * unseen, "not a twentieth of the text is held out"
        assert made == wanted, "each step has its own batch, each validation the same one, and no other is made"
        growth = {kind: counts[-1] - counts[0] for kind, counts in alive.items()}
        if not keeps(recipe, "no objects left"):
            del growth["objects"]
        assert max(growth.values()) <= 0, f"left by every step: {growth}"
        held = alive["gradients"][0] and keeps(recipe, "no gradients between steps")
        assert not held, "gradients are held between steps"
        assert not initialised, "the process group is not destroyed"
        left = threads and keeps(recipe, "group is gone")
        assert not left, "something holds the process group, whose threads go on"
    assert not any(run.output[1:]), "one rank logs"
    history = np.array(run.history)
    seconds = history[:, 2]
    assert min(seconds[[3, 5, 6]]) > SLOW, f"of a step that took {SLOW} s the log says {seconds[[3, 5, 6]]}"
    assert 0 < seconds.min() and seconds.sum() < elapsed + 3 * SLOW
    labels = [*(f"step {step}" for step in range(1, STEPS + 1)), "median"]
    numbers = [*history, np.median(history[5:], axis=0)]
    lines = run.output[0].splitlines()
    for after in 4, 8:
        assert re.fullmatch(r" +validation loss \d\.\d{4}", lines.pop(after)), "no validation"
    for line, label, (loss, norm, duration, *_) in zip(lines, labels, numbers, strict=True):
        speed = f"tokens/s/GPU {8 * 16 / duration / world:,.0f}"
        shown = [part for part in re.split("  +", line.strip()) if not part.startswith(("busiest", "dropped"))][:4]
        assert shown == [label, f"loss {loss:.4f}", f"gradient norm {norm:.3f}", speed], (shown, speed)


def check_log_line(recipe: str, file: str | None = None) -> None:
    """MFU, by the formula, of the speed of all ranks; peak memory; a GPU without a known peak has no MFU."""

    experts = root_of(recipe) in (MOE, NODES)
    drops = "dropped" in FAMILY[recipe].definitions["log"]
    preset, of_experts = ("olmoe_1b_7b", (3.14159, 0.0314159)[: 1 + drops]) if experts else ("smollm_1_7b", ())

    def lines() -> list[str]:
        module, out = load(file or recipe), io.StringIO()
        sys.argv = [recipe, "--device", "cuda", "--preset", preset, "--seq", "2048", "--batch", "16"]
        cfg = module.parse_config()
        torch.cuda.max_memory_allocated = lambda: 3 * 2**29
        torch.distributed.get_rank, torch.distributed.get_world_size = lambda *_: 0, lambda *_: 4
        with contextlib.redirect_stdout(out):
            for gpu in "NVIDIA H200", "Unknown":
                torch.cuda.get_device_name = lambda gpu=gpu: gpu
                module.log(cfg, "step 3", 1.23456, 0.5, 0.5, *of_experts)
        return out.getvalue().splitlines()

    known, unknown = isolated(lines)
    speed = 16 * 2048 / 0.5 / (1 if on_one_device(recipe) else 4)
    layers, d, f, v = (16, 2048, 8 * 1024, 50304) if experts else (24, 2048, 8192, 49152)
    f += 1024 if recipe == NODES else 0  # of the shared expert
    router = d * 64 if experts else 0
    lora = root_of(recipe) == LORA  # frozen weights have no gradient; adapters have 16 (in + out) elements
    each, adapters = (4, 16 * (11 * d + 3 * f)) if lora else (6, 0)
    flops = each * (layers * (4 * d * d + 3 * d * f + router) + d * v) + 6 * layers * (d * 2048 + adapters)
    wanted = ["loss 1.2346", "gradient norm 0.500", *(["busiest expert 3.14x"] if experts else [])]
    wanted += [*(["dropped 3.1%"] if drops else []), f"tokens/s/GPU {speed:,.0f}"]
    for line, mfu in (known, f"MFU {speed * flops / 989.5e12:.1%}"), (unknown, "MFU -"):
        assert line.split("  ")[-2 - len(wanted) :] == [*wanted, mfu, "memory 1.5 GiB"], line


def check_build(recipe: str, file: str | None = None) -> None:
    """Without --init, too, every layout draws the root's weights, on all ranks; --compile compiles blocks and loss."""
    world, flags = SMALLEST[recipe]
    flags += " --compile" if keeps(recipe, "compile") else ""
    probe = probes.together(probes.compiled, probes.whole_parameters)
    run = launch(file or recipe, world, f"{SMALL} {flags} --steps 0", probe=probe)
    theirs = of_root(root_of(recipe), f"{SMALL} --steps 0", "freezes").weights
    assert set(run.weights) == set(theirs), "names differ"
    assert all(torch.equal(run.weights[name], tensor) for name, tensor in theirs.items()), "not the root's weights"
    drawn = {}
    for (yes, _), parameters in run.probes:
        both = "Block" in yes and yes & {"Loss", "CrossEntropyLoss"}
        assert "--compile" not in flags or both, "blocks or loss: not compiled"
        assert all(drawn.setdefault(name, bits) == bits for name, bits in parameters.items()), "ranks draw others"


def check_activations(recipe: str, file: str | None = None) -> None:
    """What a forward keeps for its backward goes through save_for_backward, and is freed with the loss.

    Whatever else a module or a context holds is invisible to checkpointing and offloading, and may outlive the step.
    Nor does a backward leave anything in its context. Half of one activation of the residual stream is the limit.
    """
    world, flags = SMALLEST[recipe]
    limit = 128 * 16 * 32 * 4 // world // 2
    seen = [probes.kept_outside_autograd(limit)]
    if "autograd.Function" in FAMILY[recipe].source and keeps(recipe, "bytes of backward"):
        seen.append(probes.left_by_backward(limit))
    flags += " --batch 128 --steps 2"  # the first step may make buffers
    run = launch(file or recipe, world, f"{SMALL} {flags} {own_flags(recipe, 'activations')}", probes.together(*seen))
    for kept, *left in run.probes:
        assert kept < limit, f"a forward keeps {kept} bytes beside save_for_backward"
        assert sum(left) < limit, f"{left} bytes beside the gradients are in memory until the end of backward"


# ------------------------------------------------------------------------------------------------------------- failure
def failure_of(*launched: object) -> RankFailed:
    """Launch, and return the failure; raise if there is none."""
    try:
        launch(*launched)
    except RankFailed as failure:
        return failure
    raise AssertionError("a rank has to fail, and the run ends well")


def check_failure(recipe: str, file: str | None = None) -> None:
    """An error on one rank ends the run with that error, and leaves no rank hanging."""
    world, flags = SMALLEST[recipe]
    failure = failure_of(file or recipe, world, f"{SMALL} {flags} --steps 9", probes.dies_in_the_second_step)
    words = "has had enough", "Connection closed", "Connection reset"
    assert failure.code and any(word in failure.output for word in words), failure.output


def check_divergence(recipe: str, file: str | None = None) -> None:
    """A loss that is no number ends the run: on every rank, in the same step, with one line, and nothing is saved.

    Nor are the weights that the last step makes infinite.
    """
    world, flags = SMALLEST[recipe]
    flags += f" {own_flags(recipe, 'divergence')}"
    probe = probes.together(probes.saves, probes.ends_early)
    run = launch(file or recipe, world, f"{SMALL} {flags} --steps 20 --lr 1e6 --warmup 0 --clip inf", probe=probe)
    lines = {line for _, line in run.probes}
    assert len(lines) == 1, lines
    line = lines.pop()
    assert line and re.fullmatch(r"step \d+: .*(nan|inf).* --lr .*", line), line
    assert not any(saves for saves, _ in run.probes)
    failure = failure_of(file or recipe, world, f"{SMALL} {flags} --steps 1 --lr 1e39 --warmup 0 --clip inf")
    assert failure.code == 1 and "weights are inf or NaN" in failure.output, failure.output


TINY = dict(layers=16, dim=16, heads=8, kv_heads=8, ffn=16)  # every recipe takes them


def small_weights(recipe: str) -> dict[str, torch.Tensor]:
    module = load(recipe)
    return {name: torch.zeros(shape) for name, shape in module.tensor_shapes(module.Config(**TINY)).items()}


def bad_inputs(recipe: str, folder: Path) -> list[tuple[str, list[str]]]:
    """Flags that cannot work, and words that the one line about them must have."""
    sizes = " ".join(f"--{flag} {size}" for flag, size in TINY.items())
    np.full(500, 300, np.uint16).tofile(folder / "ids.bin")
    np.arange(1, 500, dtype=np.int64).tofile(folder / "int64.bin")
    np.save(folder / "ids.npy", np.arange(500, dtype=np.uint16))
    for name in "empty", "of_ids":
        (folder / name).mkdir(exist_ok=True)
    np.arange(500, dtype=np.uint16).tofile(folder / "of_ids" / "part-0.bin")
    (folder / "short.txt").write_text("too short")
    (folder / "text.safetensors").write_text("not weights")
    weights = small_weights(recipe)
    norm = "model.norm.weight"
    wrong = {
        "deep": weights | {"model.layers.16.input_layernorm.weight": torch.ones(16)},
        "wide": weights | {norm: torch.ones(32)},
        "lacking": {name: tensor for name, tensor in weights.items() if name != norm},
    }
    for name, tensors in wrong.items():
        save_file(tensors, folder / f"{name}.safetensors")
    init = f"{sizes} --init {folder}"
    bad = [
        ("--momentum 1", ["--momentum 1.0", "below 1"]),
        ("--lora_rank 129", ["--lora_rank 129", "--dim 128"]),
        ("--heads 7", ["--heads 7", "--dim 128"]),
        ("--heads 128", ["--heads 128", "--dim 128", "even"]),
        ("--kv_heads 3", ["--kv_heads 3", "--heads 8"]),
        ("--layers 0", ["--layers 0", "above 0"]),
        ("--steps -1", ["--steps -1", "at least 0"]),
        ("--lr nan", ["--lr nan", "at least 0"]),
        ("--clip 0", ["--clip 0", "above 0"]),
        ("--eps 0", ["--eps 0", "above 0"]),  # a weight without a gradient would be 0/0
        ("--data nowhere.txt", ["--data nowhere.txt", "no such file"]),
        (f"--data {folder}/short.txt", ["--data", "short.txt", "--seq 128", "has 9"]),
        (f"--data {folder}/empty", [f"--data {folder}/empty", "--seq 128", "has 0"]),
        (f"--data {folder}/ids.bin", ["--vocab 256", "300"]),
        (f"--data {folder}/int64.bin", ["--data", "int64.bin", "uint16"]),
        (f"--data {folder}/int64.bin --vocab 70000", ["--data", "int64.bin", "uint32"]),
        (f"--data {folder}/ids.npy", ["--data", "ids.npy", "must be text"]),
        (f"--data {folder}/of_ids", ["--data", "of_ids", "a .bin file"]),
        ("--vocab 100", ["--vocab 100", "must be above"]),
        ("--init nowhere.safetensors", ["--init nowhere.safetensors", "no .safetensors file"]),
        (f"--init {folder}/text.safetensors", ["--init", "text.safetensors", "no .safetensors file"]),
        (f"--init {folder}", ["--init", "no .safetensors file"]),
        (f"{init}/deep.safetensors", ["--init", "deep.safetensors", "layers.16.", "the model has None"]),
        (f"{init}/wide.safetensors", ["--init", "wide.safetensors", f"{norm} is [32]", "the model has [16]"]),
        (f"{init}/lacking.safetensors", ["--init", "lacking.safetensors", f"{norm} is None"]),
        ("--save nowhere/out.safetensors", ["--save nowhere/out.safetensors", "no folder"]),
        (f"--save {folder}/text.safetensors/out", ["--save", "text.safetensors/out", "no folder"]),
        (f"--save {folder}", [f"--save {folder}", "is no file"]),
        ("--save /dev/null", ["--save /dev/null", "is no file"]),
        ("--compile", ["--compile", "needs a GPU"]),
    ]
    known = vars(load(recipe).Config())
    bad = [(flags, words) for flags, words in bad if flags.split()[0].removeprefix("--") in known]
    return [(flags, words) for flags, words in bad if flags != "--compile" or not keeps(recipe, "compile")]


def refusal(module: ModuleType, world: int, flags: str) -> str | None:
    """What the recipe says of these flags before it makes a process group; None if it would begin to train."""
    local = torch.cuda.device_count() + 1 if "cuda" in flags else max(1, world)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local)), patch.object(sys, "argv", ["recipe", *flags.split()]):
        try:
            cfg = module.parse_config()
            module.check(cfg, world)
            module.make_batch(cfg, module.load_data(cfg)[0], 0)
        except SystemExit as end:
            return end.code
    return None


def without_groups(module: ModuleType) -> None:
    """A probe: no process group can be made."""
    getattr(module, "dist", module).init_process_group = None


def check_bad_input(recipe: str, file: str | None = None) -> None:
    """Every rank ends with one line that names the flag, before there is a process group, with an exit code not 0."""
    module, (world, flags) = load(file or recipe), SMALLEST[recipe]
    with tempfile.TemporaryDirectory() as folder:
        for bad, words in bad_inputs(recipe, Path(folder)):
            line = refusal(module, world, f"--device cpu {flags} {bad}")
            assert isinstance(line, str) and "\n" not in line and all(word in line for word in words), (bad, line)
        alone = on_one_device(recipe)
        line = refusal(module, 2 if alone else 0, "--device cpu")
        words = ["--nproc_per_node 2", "1 process"] if alone else ["torchrun --nproc_per_node"]
        assert line and all(word in line for word in words), line
        Path(folder, "tiny.txt").write_text("of 14 bytes...")
        for bad, word in ("--heads 7", "--heads 7"), (f"--data {folder}/tiny.txt", "tiny.txt"):
            failure = failure_of(file or recipe, world, f"--device cpu {flags} {bad}", without_groups)
            assert len(failure.output.splitlines()) == 1 and word in failure.output, failure.output
            assert failure.code == 1


def valid_inputs(recipe: str, folder: Path) -> list[tuple[int, str]]:
    """(ranks, flags) at the edge of what is possible, for a recipe."""
    sizes = " ".join(f"--{flag} {size}" for flag, size in TINY.items())
    (folder / "window.txt").write_bytes(bytes(range(1, 18)))
    np.arange(1, 1001, dtype=np.uint16).tofile(folder / "ids.bin")
    (np.arange(1000, dtype=np.uint32) + 70000).tofile(folder / "wide.bin")
    weights = {name: tensor.half() for name, tensor in small_weights(recipe).items()}
    weights.pop("lm_head.weight", None)  # tied to the embedding
    save_file(weights, folder / "tied[1].safetensors")
    everywhere = [
        f"--seq 16 --vocab 18 --data {folder}/window.txt",  # one window, the largest id of the vocabulary
        f"--vocab 1001 --data {folder}/ids.bin",
        f"--vocab 71000 --data {folder}/wide.bin",
        f"{sizes} --init {folder}/tied[1].safetensors --save {folder}/out.safetensors",
        "--clip inf --lr 0 --weight_decay 0 --eps 1e-300 --warmup 0 --seed 0",
        "--warmup 1000 --steps 3",
        "--steps 0 --save out.safetensors",  # a file beside the reader
        "--heads 64 --kv_heads 64 --dim 128",  # heads of width 2, as many key heads as query heads
    ]
    config, (world, own) = FAMILY[recipe].definitions["Config"], SMALLEST[recipe]
    cases = [(world, f"{own} {flags}") for flags in everywhere]
    for _, world, flags in cases_of(EDGES, recipe):
        pairs = re.findall(r"--(\w+) (\S+)", flags)
        cases.append((world, " ".join(f"--{flag} {size}" for flag, size in pairs if f" {flag}:" in config)))
    return cases


def check_valid_input(recipe: str, file: str | None = None) -> None:
    """The recipe accepts every size at the edge of what is possible."""
    module = load(file or recipe)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for world, flags in valid_inputs(recipe, Path(folder)):
            line = refusal(module, world, f"--device cpu {flags}")
            assert line is None, f"{recipe} on {world} ranks refuses {flags}: {line}"


def check_second_node(recipe: str, file: str | None = None) -> None:
    """Rank 3, which is the second process of the second node, takes its GPU 1, before there is a process group."""
    source = Path(load(file or recipe).__file__).read_text()
    alone = "Accelerator", "needs one host", "nnodes", "of one host may"
    if on_one_device(recipe) or any(words in source for words in alone):
        return  # one process; a library that does it; one node

    def chosen() -> list[object]:
        module, seen = load(file or recipe), []

        def stop(*_, **__):
            seen.append("group")
            raise KeyboardInterrupt

        torch.cuda.device_count, torch.cuda.is_available = lambda: 2, lambda: True
        torch.cuda.set_device, module.dist.init_process_group = seen.append, stop
        os.environ.update(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
        sys.argv = [recipe, "--device", "cuda", "--dtype", "bfloat16"]
        sys.argv += SMALLEST[recipe][1].split() if recipe[:2] == "08" else []  # a layout of four ranks
        with contextlib.suppress(KeyboardInterrupt):
            module.main()
        return seen

    seen = isolated(chosen)
    assert seen == [1, "group"], f"{recipe} sets up {seen}"


def check_flags(recipe: str, file: str | None = None) -> None:
    """Every recipe has the root's flags, with its defaults, but may train fewer steps, and a layer for each stage.

    What is interpreted without a GPU may have smaller batches.
    """
    files = root_of(recipe), file or recipe
    root, ours = ({f.name: f.default for f in dataclasses.fields(load(path).Config)} for path in files)
    assert 0 < ours["steps"] <= root.pop("steps")
    assert ours["layers"] == root.pop("layers") * (1 if keeps(recipe, "as many layers") else 2)
    assert keeps(recipe, "as large a batch") or ours["batch"] <= root.pop("batch")
    assert root.items() <= ours.items() and load(file or recipe).PRESETS == load(files[0]).PRESETS


# promises that the plain run leaves to the thorough one
THOROUGH = ("activations", "streams", "frozen", "failure", "divergence", "evaluation")
CHECKS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
