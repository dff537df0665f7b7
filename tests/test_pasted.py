"""What a recipe's Copy line lists trains in a trainer that has nothing else of the recipe: see pasted.py.

The definitions are taken from the recipe as it is now, so that a change of a signature, or of what has to be called when,
turns this red, and then the Copy line or the glue has to follow.
"""

import ast
import functools
import re
import tempfile
from pathlib import Path

import compare
import pytest
from launch import ROOT, launch
from test_lineage import read

TOLERANCE = 1e-10
TRAINER = ROOT / "tests" / "pasted.py"
RECIPES = {
    "bucketed": "02_data_parallel/bucketed.py",
    "zero3": "03_zero/zero3.py",
    "one_f_one_b": "06_pipeline/1f1b.py",
    "tensor_parallel": "04_tensor_sequence/tensor_parallel.py",
}


def listed(docstring: str) -> list[str]:
    """Names that the Copy line lists, up to the parenthesis."""
    return re.search(r"^Copy: +([^(]+?)\s*(?:\(|^\w+:)", docstring, re.M)[1].replace("\n", " ").split(",")


def copied(path: str) -> tuple[str, str]:
    """Return a recipe's imports, and the definitions that its Copy line lists, with the comments above them."""
    source = read(path).source
    tree, lines = ast.parse(source), source.splitlines()
    wanted = {name.strip() for name in listed(ast.get_docstring(tree))}
    imports, pasted = [], []
    for node in tree.body:
        name = node.targets[0].id if isinstance(node, ast.Assign) else getattr(node, "name", None)
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += lines[start : node.end_lineno]
        elif name in wanted:
            wanted.remove(name)
            while lines[start - 1].startswith("# ") and not lines[start - 1].startswith("# --"):
                start -= 1
            pasted += [*lines[start : node.end_lineno], "", ""]
    assert not wanted, f"{path} does not define what its Copy line lists: {wanted}"
    return "\n".join(imports), "\n".join(pasted)


def paste(recipe: str) -> str:
    """Return the source of the trainer with the definitions pasted in, and the recipe's imports above it."""
    trainer = TRAINER.read_text()
    imports, pasted = copied(recipe)
    (marker,) = re.findall(r"^# -+ pasted here$", trainer, re.M)
    return f"{imports}\n" + trainer.replace(marker, f"{marker}\n{pasted}")


def what_main_returns(module):
    """A probe: the record of the training."""
    records, main = [], module.main
    module.main = lambda: records.append(main())
    return lambda: records[0]


@functools.cache
def reference() -> dict:
    """The record of the trainer that nothing is pasted into."""
    return launch(TRAINER, 1, "single", probe=what_main_returns, save=False).probes[0]


def errors(technique: str, world: int, old: str = "", new: str = "") -> dict[str, float]:
    """Relative error of all that the ranks report, the largest of each; `old` becomes `new` before training."""
    source = paste(RECIPES[technique])
    assert source.count(old) == 1 or not old, f"{old!r} stands there {source.count(old)} times"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{technique}.py"
        path.write_text(source.replace(old, new) if old else source)
        records = launch(path, world, technique, probe=what_main_returns, timeout=60, save=False).probes
    theirs, largest = reference(), {}
    assert {name for record in records for name in record} == set(theirs)
    for record in records:
        for name, error in compare.relative_errors(record, {name: theirs[name] for name in record}).items():
            largest[name] = max(largest.get(name, 0), error)
    return largest
