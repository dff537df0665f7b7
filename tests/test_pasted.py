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
from launch import ROOT, RankFailed, launch, load
from test_lineage import RULE, copied, read

TOLERANCE = 1e-10
TRAINER = ROOT / "tests" / "pasted.py"
RECIPES = {
    "bucketed": "02_data_parallel/bucketed.py",
    "zero3": "03_zero/zero3.py",
    "one_f_one_b": "06_pipeline/1f1b.py",
    "zbv": "06_pipeline/zbv.py",
    "tensor_parallel": "04_tensor_sequence/tensor_parallel.py",
    "zigzag": "05_context_ring/zigzag.py",
    "ulysses": "05_context_ring/ulysses.py",
}
CASES = [("bucketed", 2), ("bucketed", 3), ("zero3", 2), ("zero3", 4)]
CASES += [("one_f_one_b", 2), ("one_f_one_b", 4), ("zbv", 2), ("tensor_parallel", 4), ("zigzag", 4), ("ulysses", 4)]
BUGS = {  # what a reader may get wrong: technique, ranks, what stands in the pasted trainer, what would be wrong
    "each rank divides by its own tokens": (
        "bucketed",
        2,
        "share(model, targets)) / (targets != IGNORE).sum()",
        "share(model, targets)) / (share(model, targets) != IGNORE).sum()",
    ),
    "each rank clips by the norm of its own shards": ("zero3", 2, "summed(own**2, model.dp).sqrt()", "own"),
    "the gradients of a tied embedding and head are not summed": (
        "one_f_one_b",
        2,
        "dist.all_reduce(model.wte.weight.grad, group=model.tied)",
        "pass",
    ),
    "a row-parallel bias is added before the sum": (
        "tensor_parallel",
        4,
        "self.proj.weight), self.tp) + self.proj.bias",
        "self.proj.weight, self.proj.bias), self.tp)",
    ),
    "position embeddings are those of the first tokens": (
        "zigzag",
        4,
        "self.wpe(shard(Config(), self.cp))",
        "self.wpe(torch.arange(ids.shape[1]))",
    ),
}


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
    """The record of the trainer in one process, with nothing pasted in."""
    return launch(TRAINER, 1, "single", probe=what_main_returns, save=False).probes[0]


def errors(technique: str, world: int, old: str = "", new: str = "") -> dict[str, float]:
    """Relative error of all that the ranks have recorded, each the largest of any rank; `old` becomes `new` before."""
    source = paste(RECIPES[technique])
    if old:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in what is run"
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{technique}.py"
        path.write_text(source)
        records = launch(path, world, technique, probe=what_main_returns, timeout=60, save=False).probes
    theirs, largest = reference(), {}
    assert {name for record in records for name in record} == set(theirs), "not all has been trained, or recorded"
    for record in records:
        for name, error in compare.relative_errors(record, {name: theirs[name] for name in record}).items():
            largest[name] = max(largest.get(name, 0), error if error == error else float("inf"))
    return largest


@pytest.mark.thorough
@pytest.mark.parametrize("technique, world", CASES)
def test_trains_as_before(technique, world):
    """The same losses, gradient norms, gradients and validation losses in every step, and the same weights."""
    compare.assert_close(errors(technique, world), TOLERANCE, f"{RECIPES[technique]}, pasted, on {world} ranks")


def test_the_clip_acts():
    """... in every step, and sequences differ in their numbers of valid targets: else some bugs would not show."""
    trainer = load(TRAINER)
    cfg = trainer.Config()
    for step in range(cfg.steps):
        assert reference()[f"gradient norm of step {step}"] > 1.1 * cfg.clip
        valid = (trainer.make_batch(cfg, cfg.batch, step)[1] != trainer.IGNORE).sum(1)
        assert len(set(valid.tolist())) > cfg.batch // 2


@pytest.mark.thorough
@pytest.mark.parametrize("what", BUGS)
def test_a_bug_is_seen(what):
    name, error = compare.worst(errors(*BUGS[what]))
    assert error > 1e-4, f"{name} is off by {error:.2e} at most"


@pytest.mark.thorough
def test_a_name_that_is_not_listed_is_missed():
    with pytest.raises(RankFailed, match="NameError: name 'flatten'"):
        errors("bucketed", 2, "def flatten(", "def flat(")
