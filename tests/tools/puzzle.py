"""Find the bug: one line of a recipe is wrong. Here is what a user would see of it.

    python tests/tools/puzzle.py                                             a bug of any recipe
    python tests/tools/puzzle.py 04_tensor_sequence/tensor_parallel.py       a bug of this one
    python tests/tools/puzzle.py 04_tensor_sequence/tensor_parallel.py 3     its third
    ... 3 --hint 1       which gradients are wrong
    ... 3 --hint 2       in which definition it is
    ... 3 --reveal       the line, and what is wrong with it

The bugs are those that the tests are tested with (`bugs.diff` of each folder; do not look there). Each changes the
gradient. Few change the loss: AdamW divides most errors away.
"""

import argparse
import difflib
import json
import random
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

import compare
import equivalence
from launch import ROOT, Run, launch, run_folder
from mutation import RESULTS, Bug, bugs, mutate
from test_lineage import FAMILY

STEPS = "--steps 10 --lr 3e-3 --warmup 5"  # of AdamW, with the default clip: 1


def puzzles() -> list[Bug]:
    """All bugs that train, and whose gradient is off by more than a hundredth."""
    found = {(e["recipe"], e["what"]): e for e in json.loads(RESULTS.read_text()) if not e["end"]}
    keys = {key for key, entry in found.items() if (entry["gradient"] or 0) > 0.01}
    return [bug for bug in bugs() if (bug.recipe, bug.what) in keys and bug.seen in ("one step", "four steps")]


def runs(bug: Bug, mode: str, wrong: str) -> tuple[Run, Run, str]:
    """The recipe as it is, and with the bug, from the same weights; and these."""
    root = equivalence.root_of(bug.recipe)
    init = equivalence.start(root, f"{equivalence.SHAPE} {equivalence.shared(bug.flags)}")
    flags = f"{equivalence.SHAPE} {bug.flags} {mode}"
    common = f"{flags} --device cpu --dtype float64 --data {equivalence.documents()} --init {init}"
    return *(launch(file, bug.world, common) for file in (bug.recipe, wrong)), init


def symptom(bug: Bug, file: str) -> str:
    """Loss and gradient norm of ten steps, right and wrong."""
    right, wrong, _ = runs(bug, STEPS, file)
    lines = ["step     loss: right     wrong     gradient norm: right     wrong"]
    for step, (mine, theirs) in enumerate(zip(right.history, wrong.history, strict=True), 1):
        lines.append(f"{step:4}{mine[0]:16.4f}{theirs[0]:10.4f}{mine[1]:25.3f}{theirs[1]:10.3f}")
    return "\n".join(lines)


def gradients(bug: Bug, file: str) -> str:
    """The relative error of each tensor's gradient; of tensors of the blocks, the worst block's."""
    right, wrong, init = runs(bug, equivalence.GRADIENT, file)
    errors = compare.relative_errors(wrong.weights, right.weights, compare.read(init)[0])
    errors = sorted(errors.items(), key=lambda item: -item[1])
    lines = [f"{error:10.1e}  {name}" for name, error in errors if error > 1e-10]
    return "\n".join(lines[:12] + [f"{len(lines)} of {len(errors)} gradients are wrong"])


def definition(bug: Bug) -> str:
    """Where the bug is."""
    recipe = FAMILY[bug.recipe]
    starts = {recipe.source.find(text): name for name, text in recipe.definitions.items()}
    return f"It is in {starts[max(start for start in starts if start <= recipe.source.index(bug.old))]}."


def answer(bug: Bug, file: str) -> str:
    """The lines that differ, and what is wrong with them."""
    right, wrong = (Path(path).read_text().splitlines() for path in (ROOT / bug.recipe, file))
    return "\n".join([*list(difflib.unified_diff(right, wrong, "right", "wrong", lineterm="", n=2))[2:], "", bug.what])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", nargs="?", metavar="RECIPE")
    parser.add_argument("number", nargs="?", type=int, metavar="NUMBER")
    parser.add_argument("--hint", type=int, choices=(1, 2))
    parser.add_argument("--reveal", action="store_true")
    args = parser.parse_args()
    recipe = args.recipe or random.choice(puzzles()).recipe
    found = [bug for bug in puzzles() if bug.recipe == recipe]
    if not found:
        raise SystemExit(f"{recipe}: no bug of it is a puzzle; try {random.choice(puzzles()).recipe}")
    number = random.randint(1, len(found)) if args.number is None else args.number
    if not 1 <= number <= len(found):
        raise SystemExit(f"{number}: the bugs of {recipe} are 1 to {len(found)}")
    bug, again = found[number - 1], f"python tests/tools/puzzle.py {recipe} {number}"
    passing = run_folder()  # is removed at the end
    # the file stays, in a folder of its own: an earlier puzzle is not lost, and nobody else has prepared the place
    folder = passing if args.reveal or args.hint else tempfile.mkdtemp(prefix=f"puzzle-{Path(recipe).parent}-")
    file = mutate(bug, Path(folder))
    if args.reveal:
        print(answer(bug, file))
    elif args.hint:
        print(gradients(bug, file) if args.hint == 1 else definition(bug))
    else:
        flags = f"--nproc_per_node {bug.world} {bug.flags}".strip()
        print(f"Bug {number} of {len(found)} in {recipe}, with {flags}.\n\n{symptom(bug, file)}\n\nFind it in {file}")
        print(f"Hints: {again} --hint 1 (or 2)\nAnswer: {again} --reveal")


if __name__ == "__main__":
    main()
