"""The check that every recipe has to pass: it trains exactly as its root does on one device.

    python tests/equivalence.py [--device cuda] [--jobs 4] [RECIPE ...]     run the checks, store errors for the README

On the CPU in float64: one step of gradient descent, which turns the change of the weights into the gradient, and four
steps of AdamW with a clip that acts. tests/README.md says of what texts, weights and sizes.

On CPUs, tests/contract.py has low precision: where only the batch is cut, nothing is rounded that the root does not
round. On GPUs, over NCCL, the gradients of all cases that fit: in float32 to 1e-5 (Muon: in float64), and in bfloat16
no further from the root's float32 gradient than twice as far as the root's own bfloat16 gradient is. A layout rounds
the same numbers as often as the root; where it adds up in another order, or rounds the parts of a sum before adding
them, both errors are random sums of as many roundings of the same size, so their norms are alike, and twice leaves room
for chance in small tensors. Recipes whose weights are themselves bfloat16, with master weights beside them, round more:
their measure is the root with bfloat16 weights.
"""

import argparse
import copy
import json
import math
import multiprocessing
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import ModuleType

import compare
import torch
from launch import ROOT, Run, launch, once, run_folder
from recipes import CASES, LORA, MOE, MUON, NODES, ROOT_RECIPE, keeps, root_of
from safetensors.torch import save_file

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2}  # the last in multiples of the root's own error
SHAPE = "--layers 5 --dim 48 --heads 6 --kv_heads 2 --ffn 64 --seq 24 --batch 12"
GPU_SHAPE = "--layers 5 --dim 384 --heads 6 --kv_heads 2 --ffn 512 --seq 192 --batch 12"
# AdamW as gradient descent with rate lr / eps = 1
GRADIENT = "--steps 1 --eps 1e12 --lr 1e12 --clip 1e9 --weight_decay 0 --warmup 0"
LOW_GRADIENT = GRADIENT.replace("--lr 1e12", "--lr 1e14")  # rate 100: float32 weights must not round the change away
TRAINING = "--steps 4 --lr 1e-2 --clip 0.5 --warmup 1"
# what is trained: the root's flags too
MODEL = "--layers --batch --seq --vocab --dim --heads --kv_heads --ffn --experts --top_k".split()
MODEL += "--lora_rank --lora_alpha --eps --groups --top_groups --shared".split()
LARGE = {"lm_head": 1000, "q_proj": 15, "k_proj": 15, "embed_tokens": 50}  # times the weights, by their names
KEYS = "recipe", "ranks", "flags", "device"
RESULTS = ROOT / "tests" / "results" / "equivalence.json"


@once
def documents() -> str:
    """A folder with 2,000 files of 1, 2, 4 ... 32 bytes, cut from the source of argparse."""
    folder = run_folder() / "documents"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    text, sizes = Path(argparse.__file__).read_bytes(), 2 ** torch.randint(0, 6, (2000,), generator=generator)
    for i, size in enumerate(sizes.tolist()):
        Path(folder, f"{i:04}.txt").write_bytes(text[30 * i : 30 * i + size])
    return str(folder)


def shared(flags: str) -> str:
    """Those of the flags that decide what is trained, not how: the root's run has these alone."""
    words = flags.split()
    return " ".join(f"{a} {b}" for a, b in zip(words, words[1:]) if a in MODEL)


@once
def start(root: str, flags: str, large: bool = False) -> str:
    """A file with the weights that (seed, name) draw, but random numbers around 1 for the norms.

    large: so large that logits reach 300, and their maxima differ by more than 100 from token to token: of that float32
    has no exponential. Attention scores reach 20.
    """
    weights = launch(root, 1, f"{flags} --device cpu --dtype float64 --steps 0").weights
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if root == LORA:
            tensor.copy_(tensor.bfloat16())  # as published weights are, which it freezes
        if large:
            tensor *= next((scale for part, scale in LARGE.items() if part in name), 1)
    file = run_folder() / f"start{zlib.crc32(repr((root, flags, large)).encode())}.safetensors"
    save_file(weights, file)
    return str(file)


@once
def reference(root: str, flags: str) -> Run:
    """The root's run. Checks that the case is not vacuous: the clip acts."""
    run = launch(root, 1, flags)
    assert TRAINING not in flags or min(norm for _, norm, *_ in run.history) > 0.5, "the clip never acted"
    return run


def sum_of_parts(parts: int, low_weights: bool, rounded: int = 0) -> Callable[[ModuleType], Callable[[], None]]:
    """A probe of the root: the gradients of so many parts of the batch, computed one by one and summed in float64.

    rounded: the sum of so many that follow each other is rounded to bfloat16 first; 0 if none is.
    """

    def probe(module: ModuleType) -> Callable[[], None]:
        def summed(cfg, model, inputs, targets):
            tokens, low = (targets != module.IGNORE).sum(), model
            if low_weights:
                low = copy.deepcopy(model).to(torch.bfloat16)
            totals, sums = ([torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()] for _ in range(2))
            inputs, targets, loss = inputs.to(cfg.device), targets.to(cfg.device), 0.0
            for i, (x, y) in enumerate(zip(inputs.chunk(parts), targets.chunk(parts)), 1):
                part = module.forward(cfg, low, x, y) / tokens
                part.backward()
                loss += part.detach()
                for p, total, gradient in zip(low.parameters(), totals, sums):
                    gradient += 0 if p.grad is None else p.grad  # it is frozen
                    p.grad = None
                    if not rounded or i % rounded == 0:
                        total += gradient.bfloat16() if rounded else gradient
                        gradient.zero_()
            for p, total in zip(model.parameters(), totals):
                p.grad = total.to(p.dtype) if p.requires_grad else None
            return loss

        module.forward_backward = summed
        return lambda: None

    return probe


@once
def in_parts(root: str, flags: str, parts: int, low_weights: bool, rounded: int = 0) -> Run:
    """The root's run with the exact sum of the gradients of so many parts of the batch."""
    probe = sum_of_parts(parts, low_weights, rounded) if low_weights or parts > 1 else None
    return launch(root, 1, flags, probe=probe)


def unfused_attention(module: ModuleType) -> Callable[[], None]:
    """A probe: no fused CPU attention. torch 2.11 cannot compile its backward in float64 (pytorch/pytorch#185539)."""
    torch.backends.cuda.enable_flash_sdp(False)  # despite its name, on CPUs too
    return lambda: None


def without_kernels(module: ModuleType) -> Callable[[], None]:
    """A probe: the compiler traces, differentiates and partitions, but generates no kernels, which takes longest."""
    unfused_attention(module)
    compile_ = torch.compile  # which modules call, too
    torch.compile = lambda function, **options: compile_(function, backend="aot_eager_decomp_partition", **options)
    return lambda: None


def check_quickly(recipe: str, world: int, flags: str) -> dict[str, float]:
    """As check, but the compiler generates kernels for the roots alone."""
    quick = "--compile" in flags and recipe not in (ROOT_RECIPE, MOE)
    return check(recipe, world, flags, probe=without_kernels if quick else None)


def check(
    recipe: Path | str,
    world: int,
    flags: str,
    root: str | None = None,
    probe: Callable[[ModuleType], Callable[[], object]] | None = None,
    modes: tuple[str, ...] = ("gradient", "training"),
) -> dict[str, float]:
    """Assert that a recipe trains as its root does, on the CPU in float64. Returns the worst errors."""
    probe = probe or (unfused_attention if "--compile" in flags else None)
    root = root or root_of(str(recipe))
    init = start(root, f"{SHAPE} {shared(flags)}")
    common = f"{SHAPE} --device cpu --dtype float64 --data {documents()} --init {init}"
    worst = {}
    alone = world > 1 and not keeps(str(recipe), "one log")  # simulation.py has the rest
    for name in ["gradient"] if "--compile" in flags or alone else modes:
        mode = {"gradient": GRADIENT, "training": TRAINING}[name]
        ours = launch(recipe, world, f"{common} {flags} {mode}", probe)
        theirs = reference(root, f"{common} {shared(flags)} {mode}")
        before = compare.read(init)[0] if name == "gradient" else None
        errors = compare.relative_errors(ours.weights, theirs.weights, before)
        what = f"{recipe} on {world} ranks, {name}"
        worst[name] = compare.assert_close(errors, TOLERANCE["float64"], what)
        if not alone:
            history = compare.history_errors(ours.history, theirs.history)
            worst[f"{name} history"] = compare.assert_close(history, TOLERANCE["float64"], what)
    return worst


def to_all_experts(root: str, flags: str) -> str:
    """Flags with which every token goes to all experts: there is nothing that rounding could choose otherwise."""
    if root == NODES:
        return f"{flags} --top_k 16 --groups 4 --top_groups 4"
    _, _, count = f" --experts 8 {flags}".rpartition(" --experts ")
    return f"{flags} --top_k {count.split()[0]}" if root == MOE else flags


def check_low_precision(recipe: str, world: int, flags: str) -> dict[str, float]:
    """Assert that a recipe's gradient is its root's on GPUs. Returns the worst errors, as TOLERANCE has them.

    In bfloat16, tokens go to all experts: where two scores are close it would choose others than float32, and then both
    gradients are right, of different functions.
    """
    root = root_of(recipe)
    alone = world > 1 and not keeps(recipe, "one log")
    worst = {}
    # Newton-Schulz enlarges small singular values, and what float32 rounded in them, up to 480 times
    wide = "float64" if root == MUON else "float32"
    for dtype in [wide] * keeps(recipe, "float32 on GPUs") + ["bfloat16"] * keeps(recipe, "bfloat16"):
        flags = to_all_experts(root, flags) if dtype == "bfloat16" else flags
        init = start(root, f"{GPU_SHAPE} {shared(flags)}")
        before = compare.read(init)[0]
        common = f"{GPU_SHAPE} --device cuda --data {documents()} --init {init}"
        exact = reference(root, f"{common} --dtype {wide} {shared(flags)} {LOW_GRADIENT}")
        ours = launch(recipe, world, f"{common} --dtype {dtype} {flags} {LOW_GRADIENT}")
        errors = compare.relative_errors(ours.weights, exact.weights, before)
        errors |= compare.history_errors(ours.history, exact.history) if dtype == wide and not alone else {}
        if dtype == "bfloat16":
            low = f"{common} --dtype bfloat16 {shared(flags)} {LOW_GRADIENT}"
            theirs = in_parts(root, low, 1, not keeps(recipe, "autocast"))
            roots = compare.relative_errors(theirs.weights, exact.weights, before)
            errors = {name: error and error / roots[name] for name, error in errors.items()}  # 0 of biases that count
        worst[dtype] = compare.assert_close(errors, TOLERANCE[dtype], f"{recipe} on {world} ranks in {dtype}")
    return worst


def measured(case: tuple[str, int, str], device: str) -> dict[str, object]:
    """Run the check of a case, and return what is stored of it."""
    recipe, world, flags = case
    errors = check(*case) if device == "cpu" else check_low_precision(*case)
    print(f"{recipe:45} {world} ranks {flags:30}", *(f"{key} {error:.1e}" for key, error in errors.items()), flush=True)
    return {"recipe": recipe, "device": device, "ranks": world, "flags": flags, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="all if none is given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="*", help="cases of so many ranks; all if none is given")
    parser.add_argument("--jobs", type=int, default=1, help="cases that are checked at the same time")
    args = parser.parse_args()
    if args.jobs < 1:
        raise SystemExit(f"--jobs {args.jobs}: must be at least 1")
    if unknown := {*args.recipes} - {recipe for recipe, *_ in CASES}:
        raise SystemExit(f"{' '.join(sorted(unknown))}: must be recipes that are compared with their root")
    most = torch.cuda.device_count() if args.device == "cuda" else math.inf
    cases = [case for case in CASES if case[0] in (args.recipes or [case[0]])]
    cases = [case for case in cases if case[1] in (args.ranks or [case[1]]) and case[1] <= most]
    if not cases:
        raise SystemExit("no case has these recipes and ranks, and fits the GPUs at hand")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    run_folder()  # of this process, for those of the pool
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as jobs:
        futures = {jobs.submit(measured, case, args.device): case for case in cases}
        for future in as_completed(futures):
            if problem := future.exception():
                print(*futures[future], problem, flush=True)
                continue
            entries = {tuple(entry[key] for key in KEYS): entry for entry in [*kept, future.result()]}
            kept = [entry for (*case, _), entry in entries.items() if tuple(case) in CASES]  # some are of older cases
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text("[\n" + ",\n".join(sorted(json.dumps(entry) for entry in kept)) + "\n]\n")
    if any(future.exception() for future in futures):
        raise SystemExit("not all cases are equal to their root")


if __name__ == "__main__":
    main()
