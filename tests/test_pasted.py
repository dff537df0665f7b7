"""What a recipe's Copy line lists works in a trainer that shares nothing else with the recipe: that of pasted.py.

The definitions are taken from the recipe as it is now. A change of a signature, or of what has to be called when, turns
this red until the glue in pasted.py follows; then the Copy line has to say so too.
"""

import ast
import functools
import re
import tempfile
from pathlib import Path

import compare
import pytest
import torch
import torch.distributed.device_mesh  # noqa: F401  imported once, before the ranks are forked
from launch import ROOT, launch, load
from test_lineage import RULE, copied, read

TOLERANCE = 1e-10
TRAINER = ROOT / "tests" / "pasted.py"
RECIPES = {  # technique: recipe, ranks
    "bucketed": ("02_data_parallel/bucketed.py", 3),
    "zero3": ("03_zero/zero3.py", 4),
    "one_f_one_b": ("06_pipeline/1f1b.py", 4),
    "zbv": ("06_pipeline/zbv.py", 2),
    "tensor_parallel": ("04_tensor_sequence/tensor_parallel.py", 4),
    "zigzag": ("05_context_ring/zigzag.py", 4),
    "ulysses": ("05_context_ring/ulysses.py", 4),
}
BUGS = [  # what a reader may get wrong: technique, what stands in the trainer, what would be wrong
    # each rank divides by its own tokens
    ("bucketed", "targets)) / (targets != IGNORE).sum()", "targets)) / (share(model, targets) != IGNORE).sum()"),
    # each rank clips by the norm of its own shards
    ("zero3", "summed(squares, group).sqrt()", "squares.sqrt()"),
    # the gradients of a tied embedding and head are not summed
    ("one_f_one_b", "dist.all_reduce(model.wte.weight.grad, group=model.tied)", "pass"),
    # a row-parallel bias is added before the sum
    ("tensor_parallel", "self.proj.weight), self.tp) + self.proj.bias", "self.proj.weight, self.proj.bias), self.tp)"),
    # position embeddings are those of the first tokens
    ("zigzag", "self.wpe(shard(Config(), self.cp))", "self.wpe(torch.arange(ids.shape[1]))"),
]


def definitions(path: str) -> tuple[str, str]:
    """Return a recipe's imports, and the definitions that its Copy line lists, with the comments above them."""
    recipe = read(path)
    lines, imports, listed, wanted = recipe.source.splitlines(), [], [], set(copied(recipe))
    for node in ast.parse(recipe.source).body:
        name = node.targets[0].id if isinstance(node, ast.Assign) else getattr(node, "name", None)
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += lines[start : node.end_lineno]
        elif name in wanted:
            wanted.remove(name)
            while lines[start - 1].startswith("#") and not RULE.match(lines[start - 1]):
                start -= 1
            listed += [*lines[start : node.end_lineno], "", ""]
    assert not wanted, f"{path} does not define {wanted}, which its Copy line lists"
    return "\n".join(imports), "\n".join(listed)


def paste(path: str) -> str:
    """Return the source of the trainer with a recipe's definitions pasted in, and the recipe's imports above it."""
    imports, listed = definitions(path)
    trainer = TRAINER.read_text()
    (marker,) = re.findall(r"^# -+ pasted here$", trainer, re.M)
    source = imports + "\n" + trainer.replace(marker, f"{marker}\n{listed}")
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(names) == len(set(names)), f"the trainer must not define what is pasted: {sorted(names)}"
    return source


def what_main_returns(module):
    """A probe: the record of the training."""
    records, main = [], module.main
    module.main = lambda: records.append(main())
    return lambda: records[0]


@functools.cache
def reference() -> dict[str, torch.Tensor]:
    """The record of the trainer in one process, with nothing pasted in; the clip acts."""
    record = launch(TRAINER, 1, "single", probe=what_main_returns, save=False).probes[0]
    assert min(norm for name, norm in record.items() if "gradient norm" in name) > 0.6 > load(TRAINER).Config.clip
    return record


def errors(technique: str, old: str = "", new: str = "") -> dict[str, float]:
    """Relative error of all that the ranks have recorded, each the largest of any rank; `old` becomes `new` before."""
    recipe, world = RECIPES[technique]
    source = paste(recipe)
    if old:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in what is run"
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{technique}.py"
        path.write_text(source)
        records = launch(path, world, technique, probe=what_main_returns, save=False).probes
    theirs, largest = reference(), {}
    assert {name for record in records for name in record} == set(theirs), "not all has been trained, or recorded"
    for record in records:
        for name, error in compare.relative_errors(record, {name: theirs[name] for name in record}).items():
            largest[name] = max(largest.get(name, 0), error if error == error else float("inf"))
    return largest


@pytest.mark.thorough
@pytest.mark.parametrize("technique", RECIPES)
def test_trains_as_before(technique):
    """The same losses, gradient norms, gradients and validation losses in every step, and the same weights."""
    compare.assert_close(errors(technique), TOLERANCE, f"{RECIPES[technique][0]}, pasted")


@pytest.mark.thorough
@pytest.mark.parametrize("technique, old, new", BUGS)
def test_a_bug_is_seen(technique, old, new):
    name, error = compare.worst(errors(technique, old, new))
    assert error > 1e-4, f"{name} is off by {error:.2e} at most"
