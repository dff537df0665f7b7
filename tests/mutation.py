"""Seeded bugs: small changes of a recipe, several of them once shipped by somebody, and what each turns red.

Each folder has its list, `bugs.diff`. tests/test_bugs.py asserts that every one is seen; this file measures what each
does to the gradient and to a loss curve, for tests/BUGS.md.

    python tests/mutation.py [--jobs 2] [FOLDER ...]         measure the bugs of all folders, or of these
    python tests/mutation.py --list [FOLDER ...]             print all bugs, by class, with what was measured
    python tests/mutation.py --long [--jobs 2] [FOLDER ...]  train 300 steps with those that tests/BUGS.md shows
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import multiprocessing
import re
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import compare
import equivalence
import launch as launching
import torch
from launch import ROOT, RankFailed, Run, isolated, launch, load, once, run_folder
from recipes import root_of

RESULTS = ROOT / "tests" / "results" / "bugs.json"
RACES = "waited for", "let go", "does not wait", "changed while"  # what tests/streams.py says of them
CURVE = "--steps 20 --lr 3e-3 --warmup 5"  # of AdamW, with the default clip: 1
LONG_CURVE = CURVE.replace("--steps 20", "--steps 300")
SHOWN = 60  # bugs of tests/BUGS.md
CHECKPOINT = "08_4d/checkpoint.py"
CLASSES = (  # of bugs: what kind of mistake each is
    "dropped collective",
    "wrong group",
    "wrong divisor",
    "wrong formula",
    "wrong place",  # rows, shards, slices, micro-batches or steps that change places, or are left out
    "stale buffer",
    "missing wait",
    "rounding",
    "causality",
    "state not reset",
    "memory kept",
    "check too lax",
    "check too strict",
    "saved file",
    "log",
)


@dataclass(frozen=True)
class Bug:
    """In a recipe, `old` becomes `new`; `seen` names what sees it on `world` ranks with `flags`.

    where: the file and line that has it.
    """

    kind: str
    what: str
    recipe: str
    old: str
    new: str
    world: int
    flags: str
    seen: str
    where: str = field(compare=False)


ENTRY = re.compile(
    r"diff (?P<recipe>.+)\n"
    rf"|@@ (?P<kind>{'|'.join(CLASSES)}) \| (?P<seen>[^|\n]+?)( \| (?P<world>\d+) ranks)?( \| (?P<flags>[^|\n]+))?"
    r" @@[ \n](?P<what>[^-+ \n].*)\n"
    r"(?P<lines>([-+ ].*\n)+)"
    r"|(#.*)?\n"
)


def bugs() -> list[Bug]:
    """The bugs of all folders."""
    return [bug for path in sorted(ROOT.glob("[01][0-9]_*/bugs.diff")) for bug in bugs_of(path)]


def bugs_of(path: Path) -> list[Bug]:
    """The bugs of a file, in the format that CONTRIBUTING.md describes.

    `diff RECIPE` names the recipe of the bugs below it. Lines with a space are old and new; `\\n` behind the last says
    that the newline belongs to it. What is wrong may stand in a line of its own. `#` opens a comment.
    """
    text, place, recipe, found = path.read_text() + "\n", 0, None, []
    while place < len(text):
        line = text.count("\n", 0, place)
        where = f"{path.parent.name}/{path.name}:{line + 1}"
        entry = ENTRY.match(text, place)
        if not entry or (entry["seen"] and not recipe):
            raise ValueError(f"{where}: not in the format that CONTRIBUTING.md describes: {text.splitlines()[line]}")
        place, recipe = entry.end(), entry["recipe"] or recipe
        if entry["seen"]:
            old, new = (
                re.sub(r"\\n\Z", "\n", "\n".join(part[1:] for part in entry["lines"].splitlines() if part[0] in signs))
                for signs in ("- ", "+ ")
            )
            world, flags = int(entry["world"] or 1), entry["flags"] or ""
            found.append(Bug(entry["kind"], entry["what"], recipe, old, new, world, flags, entry["seen"], where))
    return found


def changed(recipe: str, old: str, new: str, folder: Path) -> str:
    """Write the recipe with new source for old, which it has once, into a folder, and return its path."""
    source = (ROOT / recipe).read_text()
    assert source.count(old) == 1, f"{recipe} must contain {old!r} once"
    path = Path(folder) / Path(recipe).name
    path.write_text(source.replace(old, new))
    compile(path.read_text(), path, "exec")  # whatever is wrong with it, Python runs it
    return str(path)


def mutate(bug: Bug, folder: Path) -> str:
    """Write the recipe with the bug into a folder, and return its path."""
    return changed(bug.recipe, bug.old, bug.new, folder)


def probe_of(bug: Bug):
    """The probe with which the bug shows, or None: only simulated streams show what a GPU shows now and then."""
    import probes
    from streams import streams

    if bug.seen == "late":
        return streams("late")
    if bug.seen in ("compiled, late", "compiled, at once"):
        return probes.together(equivalence.unfused_attention, streams(bug.seen.split(", ")[1]))
    return None


@once
def without_bug(recipe: str, world: int, flags: str) -> Run:
    """The run of the recipe as it is."""
    return launch(recipe, world, flags, equivalence.unfused_attention if "--compile" in flags else None)


def resumed(file: str, world: int, flags: str, probe=None, timeout: float = 60) -> Run:
    """A run that ends after 10 of 20 steps, and goes on from the checkpoint that it has written there."""
    with tempfile.TemporaryDirectory() as folder:
        flags += f" --checkpoint {folder} --every 10 --keep 9"
        launch(file, world, flags, probe, timeout)
        shutil.rmtree(f"{folder}/step-20")
        return launch(file, world, flags, probe, timeout)


def error_of_kernel(file: str) -> float | None:
    """The largest error, in float32, of what a file of kernels compares with float64; None if it compares bits.

    What a kernel does not write is 0, not what the memory was before.
    """
    module, found = load(file), []
    relative_error = getattr(module, "relative_error", None)
    module.relative_error = lambda *pair: found.append(relative_error(*pair)) or found[-1]
    module.DTYPES = (torch.float32,)
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        module.check(torch.device("cpu"))
    return max(found, default=None)


def dtype_of(bug: Bug) -> str:
    """Return the dtype in which a bug shows: 16 bits for mixed precision, float64 for all others."""
    low = "float16" if "fp16" in bug.recipe else "bfloat16"
    return low if bug.recipe.startswith("10_mixed_precision/") else "float64"


def measured(bug: Bug) -> dict[str, object]:
    """What the bug does: relative error of the worst tensor's gradient, largest relative difference of the loss curve.

    Both against the recipe without it. Of DiLoCo, which has no gradient of the whole batch, the gradient is the change
    of the weights; of checkpoints, that of a whole run, which is resumed. "end" says what happens instead where nothing
    can be measured. Rounding by chance is no error of a gradient, so that its bugs have one of 32 bits. Of a file of
    kernels, the gradient's error is the largest of all outputs and gradients.
    """
    entry = {"recipe": bug.recipe, "what": bug.what, "gradient": None, "loss": None, "end": None}
    if "def train_step" not in (ROOT / bug.recipe).read_text():
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(AssertionError):
            error = isolated(lambda: error_of_kernel(mutate(bug, Path(folder))))
            return entry | ({"end": "gives NaN"} if error == math.inf else {"gradient": error})
        return entry | {"end": "crashes"}
    root = root_of(bug.recipe)
    flags = bug.flags + (" --compile" if bug.seen.startswith("compiled") else "")
    init = equivalence.start(root, f"{equivalence.SHAPE} {equivalence.shared(flags)}")
    dtype = dtype_of(bug)
    gradient = equivalence.GRADIENT if dtype == "float64" else equivalence.LOW_GRADIENT
    if bug.recipe.endswith(("/stochastic_rounding.py", "/low_memory.py")):
        gradient += " --dtype float32"
    run = launch
    if bug.recipe == CHECKPOINT:
        gradient, run = CURVE, resumed
    common = f"{equivalence.SHAPE} --device cpu --dtype {dtype} --data {equivalence.documents()} --init {init}"
    theirs = {
        key: without_bug(bug.recipe, bug.world, f"{common} {mode} {flags}")
        for key, mode in (("gradient", gradient), ("loss", CURVE))
    }
    with tempfile.TemporaryDirectory() as folder:
        file = mutate(bug, Path(folder))
        try:
            ours = run(file, bug.world, f"{common} {gradient} {flags}", probe_of(bug), timeout=60)
            errors = compare.relative_errors(ours.weights, theirs["gradient"].weights, compare.read(init)[0])
            finite = {name for name, tensor in ours.weights.items() if tensor.isfinite().all()}
            # NaN beside finite weights: an expert that is chosen by the bug alone has no error relative to nothing
            entry["gradient"] = compare.worst({k: e for k, e in errors.items() if e == e or k not in finite})[1]
            if gradient != CURVE:
                ours = run(file, bug.world, f"{common} {CURVE} {flags}", probe_of(bug), timeout=60)
            pairs = zip(ours.history, theirs["loss"].history, strict=True)
            entry["loss"] = max(abs(mine[0] / right[0] - 1) for mine, right in pairs)
        except AssertionError:  # compare.py's, of the names of tensors
            entry["end"] = "saves other tensors"
        except TimeoutError:
            entry["end"] = "hangs"
        except RankFailed as failure:
            races = any(words in failure.output for words in RACES)
            crashes = failure.code < 0 or "Traceback" in failure.output  # by a signal, or by an error
            nan = re.search(r"step \d+: loss \S+ gradient norm nan", failure.output)  # which ends the run
            ends = {"races": races, "crashes": crashes, "gives NaN": nan, "refuses to run": True}
            entry["end"] = next(end for end, so in ends.items() if so)
    finite = {key: None if value != value else value for key, value in entry.items()}
    return finite if finite == entry else {**finite, "end": "gives NaN"}


def measured_long(bug: Bug) -> float | None:
    """How far the mean loss of the last 50 of 300 steps of AdamW is from that of the recipe without the bug.

    None if the run does not get there.
    """
    init = equivalence.start(root_of(bug.recipe), f"{equivalence.SHAPE} {equivalence.shared(bug.flags)}")
    flags = f"{equivalence.SHAPE} --device cpu --dtype {dtype_of(bug)} --data {equivalence.documents()} --init {init}"
    flags += f" {LONG_CURVE} {bug.flags}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours = launch(mutate(bug, Path(folder)), bug.world, flags, probe_of(bug), timeout=600)
        except (RankFailed, TimeoutError):
            return None
    runs = ours, without_bug(bug.recipe, bug.world, flags)
    ours, theirs = (sum(loss for loss, *_ in run.history[-50:]) for run in runs)
    return abs(ours / theirs - 1)


def mistrains(entry: dict) -> bool:
    """Whether a training goes on with a gradient, or an update, that is wrong by more than 1 %.

    No loss curve: a kernel's output, or a run that ends. Not a bit of it changed: the saved file alone is wrong.
    """
    return (entry["gradient"] or 0) > 0.01 and bool(entry["loss"])


def instructive() -> list[Bug]:
    """The bugs of tests/BUGS.md: of each class in turn the one that hides best.

    First come those that somebody has shipped, then those that train with a wrong gradient while the loss moves least.
    """
    stored = {(entry["recipe"], entry["what"]): entry for entry in json.loads(RESULTS.read_text())}
    for bug in bugs():
        if (bug.recipe, bug.what) not in stored:
            raise SystemExit(f"{bug.where} is not measured: python tests/mutation.py {bug.recipe.split('/')[0]}")

    def rank(bug: Bug) -> tuple[bool, bool, float]:
        entry = stored[bug.recipe, bug.what]
        return "shipped" not in bug.what, not mistrains(entry), entry["loss"] or 0

    classes = {kind: sorted([bug for bug in bugs() if bug.kind == kind], key=rank) for kind in CLASSES}
    turns = itertools.zip_longest(*classes.values())
    chosen = [bug for turn in turns for bug in turn if bug][:SHOWN]
    return sorted(chosen, key=lambda bug: CLASSES.index(bug.kind))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--long", action="store_true")
    args = parser.parse_args()
    if args.jobs < 1:
        raise SystemExit(f"--jobs {args.jobs}: must be at least 1")
    known = dict.fromkeys(bug.recipe.split("/")[0] for bug in bugs())
    if unknown := [folder for folder in args.folders if folder not in known]:
        raise SystemExit(f"{unknown[0]}: must be of {', '.join(known)}")
    chosen = [bug for bug in bugs() if not args.folders or bug.recipe.split("/")[0] in args.folders]
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    entries = {(entry["recipe"], entry["what"]): entry for entry in kept}
    if args.list:
        for bug in sorted(chosen, key=lambda bug: CLASSES.index(bug.kind)):
            _, _, *measures = entries.get((bug.recipe, bug.what), {"recipe": "", "what": ""}).items()
            print(f"{bug.kind:18} {bug.recipe:42} seen by {bug.seen}", bug.what, dict(measures), "", sep="\n")
        return
    launching.IMPATIENT = True  # in the pool, too
    run_folder()  # of this process, for those of the pool
    load("01_single_gpu/train.py")
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as jobs:
        if args.long:
            shows = {(bug.recipe, bug.what) for bug in chosen if (entries[bug.recipe, bug.what]["loss"] or 0) > 1e-9}
            chosen = [bug for bug in instructive() if (bug.recipe, bug.what) in shows and bug.recipe != CHECKPOINT]
            futures = {jobs.submit(measured_long, bug): bug for bug in chosen}
            for future in as_completed(futures):
                bug = futures[future]
                entries[bug.recipe, bug.what]["loss_300"] = future.result()
                print(future.result(), bug.recipe, bug.what, flush=True)
        else:
            for bug, entry in zip(chosen, jobs.map(measured, chosen)):
                entries[bug.recipe, bug.what] = entry
                print(entry, flush=True)
    stored = [entries[bug.recipe, bug.what] for bug in bugs() if (bug.recipe, bug.what) in entries]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, stored)) + "\n]\n")


if __name__ == "__main__":
    main()
