"""The check that every recipe has to pass: it trains exactly as its root does on one device.

    python tests/equivalence.py [RECIPE ...]      run all checks on the CPU and store the errors for the README

In float64, where rounding is near 1e-15 and the effect of a bug far above 1e-6. Two runs are compared with the root's:
one step of gradient descent, which turns the change of the weights into the gradient, and four steps of AdamW with a
clip that acts. The text is cut into short documents, so that every rank and micro-batch has its own number of valid
tokens; norm weights are random; 6 query heads share 2 key and value heads; 5 layers split evenly over nothing.
"""

import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import compare
import torch
from launch import ROOT, Run, launch
from safetensors.torch import save_file

TOLERANCE = 1e-10
SHAPE = "--dtype float64 --layers 5 --dim 48 --heads 6 --kv_heads 2 --ffn 64 --seq 24 --batch 12 --device cpu"
GRADIENT = (
    "--steps 1 --eps 1e4 --lr 1e4 --clip 1e9 --weight_decay 0"  # AdamW as gradient descent with rate lr / eps = 1
)
TRAINING = "--steps 4 --lr 1e-2 --clip 0.5"
RESULTS = ROOT / "tests" / "results" / "equivalence.json"

# Recipe, number of ranks, flags of its own. Layers: --layers 8 where 8 stages need them.
CASES = [
    ("01_single_gpu/gradient_accumulation.py", 1, "--microbatches 4"),
    ("01_single_gpu/activation_checkpointing.py", 1, ""),
    ("01_single_gpu/selective_checkpointing.py", 1, ""),
    ("02_data_parallel/naive.py", 2, ""),
    ("02_data_parallel/naive.py", 3, ""),
    ("02_data_parallel/naive.py", 4, ""),
    ("02_data_parallel/naive.py", 8, "--batch 16"),
    ("06_pipeline/afab.py", 2, "--microbatches 4"),
    ("06_pipeline/afab.py", 3, "--microbatches 2"),
    ("06_pipeline/afab.py", 4, "--microbatches 6"),
    ("06_pipeline/afab.py", 8, "--microbatches 12 --layers 11"),
    ("06_pipeline/1f1b.py", 2, "--microbatches 4"),
    ("06_pipeline/1f1b.py", 3, "--microbatches 2"),
    ("06_pipeline/1f1b.py", 4, "--microbatches 6"),
    ("06_pipeline/1f1b.py", 8, "--microbatches 12 --layers 11"),
]


def root_of(recipe: str) -> str:
    """The recipe that trains the same model on one device."""
    return "07_expert/moe.py" if recipe.startswith(("07", "08")) else "01_single_gpu/train.py"


@functools.cache
def documents() -> str:
    """A folder with 2,000 files of 1, 2, 4 ... 32 bytes, cut from the source of argparse."""
    folder = tempfile.mkdtemp()
    generator = torch.Generator().manual_seed(0)
    text, sizes = Path(compare.argparse.__file__).read_bytes(), 2 ** torch.randint(0, 6, (2000,), generator=generator)
    for i, size in enumerate(sizes.tolist()):
        Path(folder, f"{i:04}.txt").write_bytes(text[30 * i : 30 * i + size])
    return folder


def shared(flags: str) -> str:
    """The flags that the root knows: without those of a layout."""
    words = flags.split()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    return " ".join(f"{flag} {value}" for flag, value in pairs if flag in ("--layers", "--batch", "--seq", "--vocab"))


@functools.cache
def start(root: str, flags: str) -> str:
    """A file with the weights that (seed, name) draw, but random numbers around 1 for the norms."""
    weights = launch(root, 1, f"{SHAPE} {flags} --steps 0").weights
    generator = torch.Generator().manual_seed(1)
    for tensor in weights.values():
        if tensor.ndim == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    file = tempfile.mkdtemp() + "/start.safetensors"
    save_file(weights, file)
    return file


@functools.cache
def reference(root: str, flags: str) -> Run:
    """The root's run. What it is to show must be there: a clip that acts in training, tokens that have no target."""
    run = launch(root, 1, flags, probe=valid_tokens)
    assert TRAINING not in flags or min(norm for _, norm, _ in run.history) > 0.5, "the clip never acted"
    assert len(set(run.probes[0])) > 1, "all sequences have as many valid tokens"
    return run


def valid_tokens(module: ModuleType) -> Callable[[], list[int]]:
    """A probe: the number of valid targets of each sequence of the first batch."""
    made = []
    original = module.make_batch
    module.make_batch = lambda *args: made.append(original(*args)) or made[-1]
    return lambda: (made[0][1] != module.IGNORE).sum(1).tolist()


def check(recipe: Path | str, world: int, flags: str, root: str | None = None) -> dict[str, float]:
    """Assert that a recipe trains as its root does; returns the worst error in gradient, norms and trained weights."""
    root = root or root_of(str(recipe))
    init = start(root, shared(flags))
    common = f"{SHAPE} --data {documents()} --init {init}"
    worst = {}
    for name, mode in ("gradient", GRADIENT), ("training", TRAINING):
        ours = launch(recipe, world, f"{common} {mode} {flags}")
        theirs = reference(root, f"{common} {mode} {shared(flags)}")
        before = compare.read(init)[0] if name == "gradient" else None
        errors = compare.relative_errors(ours.weights, theirs.weights, before)
        what = f"{recipe} on {world} ranks, {name}"
        worst[name] = compare.assert_close(errors, TOLERANCE, what)
        history = compare.history_errors(ours.history, theirs.history)
        worst[f"{name} history"] = compare.assert_close(history, TOLERANCE, what)
    return worst


def main() -> None:
    chosen = sys.argv[1:]
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() and chosen else []
    done = [entry for entry in stored if entry["recipe"] not in chosen]
    for recipe, world, flags in CASES:
        if not chosen or recipe in chosen:
            errors = check(recipe, world, flags)
            print(f"{recipe:45} {world} ranks {flags:30} {errors}", flush=True)
            done.append({"recipe": recipe, "ranks": world, "flags": flags, "errors": errors})
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(sorted(done, key=lambda e: (e["recipe"], e["ranks"])), indent=1) + "\n")


if __name__ == "__main__":
    main()
