"""What a recipe's Copy line lists works in a trainer that shares nothing else with the recipe: pasted.py.

The definitions are taken from the recipe as it is now. A change of a signature, or of what has to be called when, turns
this red until the glue in pasted.py follows; then the Copy line has to say so too.
"""

import ast
import builtins
import functools
import re
import tempfile
from pathlib import Path
from types import ModuleType

import compare
import pytest
from launch import ROOT, in_a_fork, launch, load
from test_lineage import FAMILY, copied, loaded, named, parse
from torch import Tensor

TRAINER = ROOT / "tests" / "pasted.py"
TECHNIQUES = {  # ranks, what it equals in one process, recipes
    "bucketed": (2, "gpt2", "02_data_parallel/bucketed.py"),
    "zero3": (2, "gpt2", "03_zero/zero3.py"),
    "checkpoint": (2, "gpt2", "03_zero/zero3.py", "08_4d/checkpoint.py"),
    "pipeline": (4, "llama", "06_pipeline/1f1b.py"),
    "tensor_parallel": (2, "llama", "04_tensor_sequence/tensor_parallel.py"),
    "zigzag": (4, "gpt2", "05_context_ring/zigzag.py"),
    "experts": (4, "moe", "07_expert/expert_parallel.py"),
    "kernel": (1, "llama", "09_kernels/rmsnorm.py"),
    "gpt2": (1, ""),
    "llama": (1, ""),
    "moe": (1, "", "07_expert/moe.py"),
}
KERNELS = [path for path in FAMILY if path[:2] == "09" and path != "09_kernels/train.py" and copied(FAMILY[path])]


def definitions(*paths: str) -> tuple[str, str]:
    """Return recipes' imports, and the definitions that their Copy lines list, in their order."""
    imports, listed = [], {}
    for path in paths:
        nodes = parse(FAMILY[path].source).body
        imports += [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        texts = {named(node): ast.unparse(node) for node in nodes}
        for name in copied(FAMILY[path]):
            assert name in texts, f"{path} does not define {name}, which its Copy line lists"
            assert listed.setdefault(name, texts[name]) == texts[name], f"{name} of {path} is another one"
    imports.sort(key=lambda line: not line.startswith("from __future__"))  # these have to come first
    return "\n".join(imports), "\n\n\n".join(listed.values())


@functools.cache
def logs(technique: str) -> list[dict[str, Tensor]]:
    """Return what each rank of the trainer returns, with recipes pasted in."""
    world, _, *recipes = TECHNIQUES[technique]
    load(TRAINER)  # and what it imports: once, before the ranks are forked
    imports, listed = definitions(*recipes)
    before, after = re.split(r"^# -+ pasted here$", TRAINER.read_text(), flags=re.M)
    source = "\n".join([imports, before, listed, after])
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(names) == len(set(names)), f"the trainer must not define what is pasted: {sorted(names)}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{technique}.py"
        path.write_text(source)
        return launch(path, world, technique, probe=lambda module: lambda: module.log, save=False).probes


@pytest.mark.thorough
@pytest.mark.parametrize("technique", [name for name, (_, reference, *_) in TECHNIQUES.items() if reference])
def test_trains_as_before(technique):
    """The same gradient norms and validation losses in every step, and the same weights after the last."""
    (expected,), seen = logs(TECHNIQUES[technique][1]), set()
    assert min(norm for name, norm in expected.items() if "norm of" in name) > load(TRAINER).CLIP, "the clip never acts"
    for rank, log in enumerate(logs(technique)):
        errors = compare.relative_errors(log, {name: expected[name] for name in log})
        compare.assert_close(errors, 1e-10, f"{technique}, pasted, on rank {rank}")
        seen |= log.keys()
    assert seen == expected.keys(), "not all has been trained, or logged"


def into_an_empty_file(folder: Path, path: str) -> ModuleType:
    """Import a file that holds the imports of a recipe, and what its Copy line lists, but nothing else."""
    file = folder / Path(path).name
    file.write_text("\n".join(definitions(path)))
    return load(file)


@pytest.mark.parametrize("path", KERNELS)
@in_a_fork
def test_a_kernel_needs_nothing_else(path, tmp_path):
    """The definitions on the Copy line can be run in its order, and need no others."""
    names = vars(into_an_empty_file(tmp_path, path)).keys() | vars(builtins).keys() | {"__annotations__"}
    missing = loaded(compile("\n".join(definitions(path)), path, "exec")) - names
    assert not missing, f"Copy does not list {missing}"


def test_what_to_call_is_copied():
    for path, recipe in FAMILY.items():
        words = " ".join(" ".join(recipe.header.get(key, [])) for key in ("Copy", "Use", "Mind", "Together"))
        called = {name for names in re.findall(r"[Cc]all (\w+)(?: or (\w+))?", words) for name in names}
        missing = called & recipe.definitions.keys() - copied(recipe)
        assert not missing or not copied(recipe), f"{path}: Copy does not list {missing}"
