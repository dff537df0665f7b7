"""Every recipe differs from its parent by its lesson alone: what the two share is the same to the letter.

python tests/test_lineage.py                      print the map: recipe, parent, size of the difference
python tests/test_lineage.py --propagate NAME     carry a definition bettered in a parent to all that inherit it
python tests/test_lineage.py --needs              write the Needs of the comments at the end
"""

import __future__

import argparse
import ast
import dis
import functools
import io
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path
from types import CodeType

import pytest
from launch import in_a_fork, load
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
parse = functools.cache(ast.parse)  # for many tests
RULE = re.compile(r"# -{20,} (.+)$")
NOTES = "# To paste this into your own trainer\n"  # the heading behind main, above comments
KEYS = "Parent Lesson Run Source Plumbing Copy Use Mind Needs Together".split()  # of the header, then of these notes
SAME = "the same in every recipe, or nearly: 01_single_gpu/train.py explains it"
SECTIONS = ["config", "communication", "kernels", "model", "training", "reference", "measure", SAME, "main"]
PLACES = """tensor_shapes full_tensor build_model read_ids load_data make_batch make_optimizer set_learning_rate
flops_per_token log validate write_weights save train parse_config check_config check_init check main""".split()
LIBRARIES = {"torch", "triton", "einops", "numpy", "safetensors"}
DRAWING = {"memory.py", "profiling.py", "plan.py", "formats.py"}
ENVIRONMENT = set("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT".split())  # torchrun's
ENVIRONMENT |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"}
INTERPRETER = 'os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))'  # before triton
WITHOUT_TRITON = "the kernels of this file need Triton, which requirements.txt installs on Linux"
BASES = {"nn.Module", "torch.autograd.Function"}
BASES |= {"dcp.DefaultSavePlanner", "dcp.DefaultLoadPlanner", "dcp.HuggingFaceStorageWriter"}  # torch's hooks
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
COLLECTIVES = re.compile(
    r"dist\.(all_reduce|all_gather\w*|reduce|reduce_scatter\w*|broadcast|gather|scatter|all_to_all\w*|i?send|i?recv"
    r"|batch_isend_irecv|barrier|group\.WORLD\.\w+)\("
)
TOKENS = {  # how many a file may have, by class: the first that fits counts
    "01_single_gpu/train.py": 4350,
    "08_4d/[!2]*.py 09_kernels/*attention*.py 09_kernels/train.py": 16300,  # all axes; ladders of kernels
    # several techniques at once
    "01_*/memory.py 07_*/node_limited.py 07_*/symmetric_memory.py 08_*/2d.py 09_*/fp8_*.py 10_*/fp8_zero3.py": 9350,
    "*": 7900,
}
UNNAMED = "found mine each own held here there due kept begun rest wide arrived".split()  # they name no thing
OWN = {f"08_4d/{name}.py": n for name, n in dict([("2d", 110), ("3d", 75)], train=60, moe=70, checkpoint=254).items()}


@dataclass
class Recipe:
    path: str
    source: str
    header: dict[str, list[str]]

    @functools.cached_property  # every worker of pytest has all recipes, and parses few of them
    def definitions(self) -> dict[str, str]:
        """Text of every definition by its name, with the comments before it.

        A class counts as its head and fields, under its name, and its methods, each under Class.method.
        """
        return definitions(self.source, parse(self.source))

    def lists(self, name: str) -> bool:
        """Whether the header names the definition, or its class, as one that differs."""
        named = self.header.get("Lesson", []) + self.header.get("Plumbing", [])
        return name in named or name.split(".")[0] in named


def read(path: str, source: str | None = None) -> Recipe:
    source = source if source is not None else (ROOT / path).read_text()
    text = source.split('"""')[1] + re.sub("^# ?", "", source.partition(NOTES)[2], flags=re.M)
    fields = re.findall(rf"^({'|'.join(KEYS)}):\s+(.+(?:\n {{10}}.+)*)", text, re.M)
    header = {key: re.sub(r"\s+", " ", value).split(", ") for key, value in fields}
    return Recipe(path, source, header)


def copied(recipe: Recipe) -> list[str]:
    """Names of the definitions that the notes' Copy line tells the reader to copy."""
    return re.findall(r"\w+", ", ".join(recipe.header.get("Copy", [])).split("(")[0])


def loaded(code: CodeType) -> set[str]:
    """Global names that compiled code reads; annotations, which are not evaluated, do not count."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(loaded(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def needs(recipe: Recipe) -> list[str]:
    """List what the definitions on the Copy line read from outside.

    Fields of Config, attributes of the model, strings that select parameters or layers, and the recipe's other names.
    """
    nodes = {named(node): node for node in parse(recipe.source).body}
    listed = [nodes[name] for name in copied(recipe)]
    inside = [node for definition in listed for node in ast.walk(definition)]
    read = {dotted(node) for node in inside if isinstance(node, ast.Attribute)}
    fields = {text.removeprefix("self.") for text in read if re.fullmatch(r"(self\.)?cfg\.\w+", text)}
    attributes = {text for text in read if re.fullmatch(r"model\.(model\.)?(?!model$)\w+", text)}
    attributes = {text for text in attributes if not hasattr(nn.Module, text.split(".")[-1])}
    compared = [n for n in inside if isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.In | ast.NotIn)]
    constants = {n.value for compare in compared for n in ast.walk(compare) if isinstance(n, ast.Constant)}
    strings = {f'"{value}"' for value in constants if value and isinstance(value, str)}
    code = compile(ast.Module(listed, []), recipe.path, "exec", __future__.annotations.compiler_flag)
    others = [name for name in nodes if name in loaded(code) - set(copied(recipe))]
    return [*sorted(fields), *sorted(attributes), *sorted(strings), *others]


def with_needs(recipe: Recipe) -> str:
    """The recipe's source, with what its copied definitions need in its notes."""
    source, _, notes = recipe.source.partition(NOTES)
    notes = re.sub(r"^# Needs: .+\n(# {11}.+\n)*", "", notes, count=1, flags=re.M)
    words = dict(break_long_words=False, break_on_hyphens=False)
    lines = textwrap.wrap(", ".join(needs(recipe)), 108, **words)
    line = "".join(f"# {key:10}{text}\n" for key, text in zip(["Needs:", *[""] * len(lines)], lines))
    before, together, after = notes.partition("# Together:")
    return source + NOTES + before + line + together + after


def dotted(node: ast.expr) -> str:
    """The names of a chain of attributes, as a.b.c; of anything else nothing."""
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def named(node: ast.stmt) -> str | None:
    """The name that a statement defines."""
    return getattr(node, "name", None) or (node.targets[0].id if isinstance(node, ast.Assign) else None)


def definitions(source: str, tree: ast.Module) -> dict[str, str]:
    lines, found, last = source.splitlines(), {}, 0
    for node in tree.body:
        if name := named(node):
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
            comments = [line for line in lines[last:start] if line.startswith("#") and not RULE.match(line)]
            body = lines[start : node.end_lineno]
            if isinstance(node, ast.ClassDef):
                methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
                for m in methods:
                    found[f"{name}.{m.name}"] = "\n".join(lines[m.lineno - 1 : m.end_lineno])
                inside = {i for m in methods for i in range(m.lineno - 1, m.end_lineno)}
                body = [
                    line for i, line in enumerate(lines[start : node.end_lineno], start) if i not in inside and line
                ]
            found[name] = "\n".join(comments + body)
        last = node.end_lineno
    return found


def recipes() -> dict[str, Recipe]:
    files = sorted(path for path in ROOT.glob("[01][0-9]_*/*.py") if not path.name.startswith("test_"))
    return {str(path.relative_to(ROOT)): read(str(path.relative_to(ROOT))) for path in files}


def parents(recipe: Recipe) -> list[str]:
    """Paths of the parents; none for the root."""
    return [parent for parent in recipe.header["Parent"] if parent.endswith(".py")]


def docstrings(source: str) -> set[int]:
    """The numbers of the lines of docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    texts = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return {number for text in texts for number in range(text.lineno, text.end_lineno + 1)}


@functools.cache  # a parent has many children
def code(source: str) -> str:
    """The lines of code alone: without comments, blank lines and docstrings."""
    lines, kept = source.splitlines(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in BLANK:
            kept.update(range(token.start[0], token.end[0] + 1))
        elif token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column].rstrip()
    return "".join(f"{lines[number - 1]}\n" for number in sorted(kept - docstrings(source)))


def lines_of_code(source: str) -> int:
    return code(source).count("\n")


def tokens(source: str) -> int:
    """How many tokens a file has, without comments and docstrings."""
    blank, every = docstrings(source), tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in BLANK and token.start[0] not in blank for token in every)


def density() -> float:
    """The median over the training recipes of tokens per line of code."""
    return statistics.median(tokens(recipe.source) / lines_of_code(recipe.source) for recipe in TRAINING.values())


def difference(parent: str, child: str) -> tuple[int, int]:
    """Lines of code that a child adds to its parent and takes from it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, path in ("parent", parent), ("child", child):
            Path(folder, name).write_text(code((ROOT / path).read_text()))
        command = ["git", "diff", "--no-index", "--patience", "--numstat", "parent", "child"]
        counts = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.split() or ["0", "0"]
    return int(counts[0]), int(counts[1])


def own_lines(path: str) -> int:
    """Count a recipe's lines of code that stand in none of its parents."""
    known = {line.strip() for parent in parents(FAMILY[path]) for line in code(FAMILY[parent].source).splitlines()}
    return sum(line.strip() not in known for line in code(FAMILY[path].source).splitlines())


def departures(recipe: Recipe, family: dict[str, Recipe]) -> list[str]:
    """What breaks the rule: definitions that differ unnamed, names without a difference, a changed order."""
    inherited, faults = [family[parent].definitions for parent in parents(recipe)], []
    for name, text in recipe.definitions.items():
        same = any(text == theirs.get(name) for theirs in inherited)
        if not same and not recipe.lists(name):
            faults.append(f"{recipe.path}: {name} differs from that of its parents and is not named in the header")
    for name in recipe.header.get("Lesson", []) + recipe.header.get("Plumbing", []):
        members = [n for n in recipe.definitions if n == name or n.startswith(f"{name}.")]
        if all(any(recipe.definitions[n] == theirs.get(n) for theirs in inherited) for n in members):
            faults.append(f"{recipe.path}: the header names {name}, which does not differ")
    for i, theirs in enumerate(inherited):
        # of the first parent all that has its name, of the others what is theirs to the letter
        compared = {n: text for n, text in theirs.items() if i == 0 or recipe.definitions.get(n) == text}
        # what has the name of the first's, but is another parent's to the letter, stands where that has it
        taken = {n for n in recipe.definitions for others in inherited[1:] if recipe.definitions[n] == others.get(n)}
        compared = {n: text for n, text in compared.items() if n not in taken or recipe.definitions[n] == text}
        both = [name for name in recipe.definitions if name in compared]
        if both != [name for name in theirs if name in both]:
            faults.append(f"{recipe.path}: shared definitions stand in another order")
    return faults


def propagate(name: str, family: dict[str, Recipe]) -> list[str]:
    """Carry a definition from parents to all recipes that inherit it; returns the paths that changed.

    What is like that of any parent stays: it may come from the second.
    """
    changed = []
    for path in TopologicalSorter({path: parents(recipe) for path, recipe in family.items()}).static_order():
        recipe = family[path]
        theirs = [family[p].definitions[name] for p in parents(recipe) if name in family[p].definitions]
        ours = recipe.definitions.get(name)
        if theirs and ours and ours not in theirs and not recipe.lists(name):
            assert recipe.source.count(ours) == 1, f"{path}: {name} is not in one piece"
            family[path] = read(path, recipe.source.replace(ours, theirs[0]))
            (ROOT / path).write_text(family[path].source)
            changed.append(path)
    return changed


FAMILY = recipes()
TRAINING = {path: recipe for path, recipe in FAMILY.items() if "\ndef train_step(" in recipe.source}  # not tools
CHILDREN = [path for path, recipe in FAMILY.items() if parents(recipe)]
PASTED = [path for path, recipe in FAMILY.items() if copied(recipe) and path[:2] != "09"]  # kernels need nothing


@pytest.mark.parametrize("path", CHILDREN)
def test_differs_by_what_it_names(path):
    assert not departures(FAMILY[path], FAMILY)


@pytest.mark.parametrize("path", FAMILY)
def test_header(path):
    recipe = FAMILY[path]
    needed = {"Parent", "Run", "Source"} | ({"Lesson"} if parents(recipe) else set())
    assert needed <= set(recipe.header), "the header lacks a line"
    assert list(recipe.header) == [key for key in KEYS if key in recipe.header], "the header's lines are out of order"
    assert path in " ".join(recipe.header["Run"]), "Run is the command line of another file"
    assert all(parent in FAMILY for parent in parents(recipe))


def test_parents_form_a_tree():
    """All recipes descend from the root; files of kernels, which train nothing, have trees of their own."""
    TopologicalSorter({path: parents(recipe) for path, recipe in FAMILY.items()}).prepare()  # raises at a cycle
    assert [path for path, recipe in TRAINING.items() if not parents(recipe)] == ["01_single_gpu/train.py"]
    ladders = [parent for path in FAMILY.keys() - TRAINING for parent in parents(FAMILY[path])]
    assert all(parent.startswith("09_kernels/") for parent in ladders)


@pytest.mark.parametrize("path", OWN)
def test_4d_is_put_together(path):
    """A recipe that composes others copies their lines unchanged."""
    assert own_lines(path) <= OWN[path]


@pytest.mark.parametrize("path", FAMILY)
def test_imports(path):
    allowed = LIBRARIES | set(sys.stdlib_module_names)
    name = Path(path).name
    allowed |= {"accelerate"} if name.startswith(("torch_", "accelerate_")) else set()
    allowed |= {"matplotlib"} if name in DRAWING else set()
    for node in ast.walk(parse(FAMILY[path].source)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert all(module.split(".")[0] in allowed for module in modules), f"{path} imports {modules}"


@pytest.mark.parametrize("path", FAMILY)
def test_nothing_runs_at_import(path):
    *body, last = parse(FAMILY[path].source).body
    assert ast.unparse(last) == "if __name__ == '__main__':\n    main()"
    for node in body:
        constant = isinstance(node, ast.Assign) and all(t.id.isupper() for t in node.targets)
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        definition = isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
        triton = f"if find_spec('triton') is None:\n    raise SystemExit({WITHOUT_TRITON!r})"
        triton = ast.unparse(node) in (ast.unparse(ast.parse(INTERPRETER)), triton)
        assert constant or docstring or definition or triton, f"{path}:{node.lineno} runs at import"


@in_a_fork
def test_says_that_triton_is_missing():
    """As on a Mac. No other file imports it."""
    sys.modules["triton"] = None
    for path in (path for path, recipe in FAMILY.items() if "import triton" in recipe.source):
        with pytest.raises(SystemExit, match=WITHOUT_TRITON):
            load(path)


@pytest.mark.parametrize("path", FAMILY)
def test_form(path):
    """Sections, sizes, base classes, environment variables, and a reason beside whatever communicates or waits."""
    source = FAMILY[path].source
    lines = source.splitlines()
    sections = [match[1] for line in lines if (match := RULE.match(line))]
    assert sections == [section for section in SECTIONS if section in sections]
    most = next(most for patterns, most in TOKENS.items() if any(fnmatch(path, part) for part in patterns.split()))
    assert tokens(source) <= most
    assert source.split('"""')[1].count("\n") < 14, "the header has more than 14 lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= (30 if node.name == "main" else 60), f"{path}: {node.name} has {length} lines"
        if isinstance(node, ast.ClassDef):
            assert {ast.unparse(base) for base in node.bases} <= BASES, f"{path}: base classes of {node.name}"
    assert set(re.findall(r"environ\S*?[\"'](\w+)", source.replace(INTERPRETER, ""))) <= ENVIRONMENT
    for number, line in enumerate(lines):
        if COLLECTIVES.search(line) or "synchronize(" in line:
            before = lines[number - 1].strip()
            assert "  # " in line or before.startswith("# "), f"{path}:{number + 1} communicates without a comment"


@pytest.mark.parametrize("path", [path for path in TRAINING if path[:2] != "09"])  # kernels are taken from their files
def test_lines_are_plain(path):
    """Few tokens in a line, and locals are nouns."""
    source = FAMILY[path].source
    assert tokens(source) <= 13 * lines_of_code(source)
    names = {node.id for node in ast.walk(parse(source)) if isinstance(node, ast.Name)}
    assert not names & set(UNNAMED)


@pytest.mark.thorough
def test_the_median_line_is_plain():
    assert density() <= 12


@pytest.mark.parametrize("path", TRAINING)
def test_order(path):
    """Config opens the file, behind the constants that it needs; what is the same in every recipe ends it.

    Annotations are not evaluated: a copied `model: Model` works in a file that has no Model.
    """
    names = [name for name in FAMILY[path].definitions if "." not in name]
    assert all(name.isupper() for name in names[: names.index("Config")])
    lesson = FAMILY[path].source.split(f" {SAME}\n")[0]
    assert [name for name in names if name in PLACES] == PLACES, "out of order"
    assert not [name for name in PLACES if re.search(rf"^def {name}\(", lesson, re.M)], "below the last rule"
    assert ast.unparse(parse(FAMILY[path].source).body[1]) == "from __future__ import annotations"


@pytest.mark.parametrize("path", [path for path in TRAINING if path[:2] > "02"])
def test_who_communicates_takes_its_group(path):
    """The group of all ranks is named where the model is built; below, a recipe works in any part of a mesh.

    Rank 0 of all logs, prints validation losses, and saves.
    """
    for node in parse(FAMILY[path].source).body:
        name = getattr(node, "name", None)
        for inner in ast.walk(node):
            call = ast.unparse(inner) if isinstance(inner, ast.Call | ast.Attribute) else ""
            if name not in ("build_model", "log", "validate", "save"):
                assert not call.startswith(("dist.group.WORLD", "dist.get_rank", "dist.get_world_size")), (name, call)
            if isinstance(inner, ast.Call) and name not in ("log", "save", "main", "build_model"):
                collective = COLLECTIVES.match(f"{ast.unparse(inner.func)}(")
                group = any(k.arg == "group" for k in inner.keywords) or ast.unparse(inner.func) == "dist.barrier"
                assert not collective or group, (name, call)


@pytest.mark.parametrize("path", [path for path in TRAINING if path[:2] > "01"])
def test_says_what_to_copy(path):
    """Wherever a lesson is more than other versions of the root's functions."""
    names = copied(FAMILY[path])
    assert all(name in FAMILY[path].definitions for name in names)
    if not set(FAMILY[path].header["Lesson"]) <= set(FAMILY["01_single_gpu/train.py"].definitions) | {"Model.__init__"}:
        assert names, "the header lacks a Copy line"


@pytest.mark.parametrize("path", [path for path in PASTED if path in TRAINING and path[:2] < "09"])
def test_copies_the_norm_and_the_validation_loss(path):
    """A trainer's own would see one shard, one stage, or one rank's tokens. Whoever lists the very same will do."""
    for name in "clip_gradients", "evaluate":
        known = [recipe for of, recipe in FAMILY.items() if of == "01_single_gpu/train.py" or name in copied(recipe)]
        ours = FAMILY[path].definitions[name]
        assert any(ours == recipe.definitions[name] for recipe in known), f"{name} is on no Copy line"


@pytest.mark.parametrize("path", PASTED)
def test_says_what_copies_need(path):
    assert with_needs(FAMILY[path]) == FAMILY[path].source, "python tests/test_lineage.py --needs"


SHARED = "widen tile_indices rows_of check_free relative_error errors differing compare copy_rate"


def test_kernels_are_checked_and_timed_alike():
    """What the files of kernels have in common is the same in all, to the letter."""
    for name in SHARED.split():
        texts = {path: r.definitions[name] for path, r in FAMILY.items() if path[:2] == "09" and name in r.definitions}
        assert len(texts) > 1 and len(set(texts.values())) == 1, f"{name} differs: {sorted(texts)}"


def test_an_unnamed_difference_is_seen():
    """One letter in a comment, a name that does not differ, and a changed order each break the rule."""
    child = FAMILY["06_pipeline/1f1b.py"]

    def faults(old: str, new: str) -> list[str]:
        assert old in child.source
        return departures(read(child.path, child.source.replace(old, new)), FAMILY)

    assert not departures(child, FAMILY)
    text = child.definitions["receive"]
    assert "receive differs" in " ".join(faults(text, text.replace("  # ", "  #  ", 1)))
    assert "names receive" in " ".join(faults("Lesson:   schedule", "Lesson:   schedule, receive"))
    both = child.definitions["flops_per_token"] + "\n\n\n" + child.definitions["log"]
    swapped = child.definitions["log"] + "\n\n\n" + child.definitions["flops_per_token"]
    assert "order" in " ".join(faults(both, swapped))


TOGETHER = """02_data_parallel/bucketed 03_zero/zero3 04_tensor_sequence/sequence_parallel 05_context_ring/zigzag
06_pipeline/1f1b 06_pipeline/zbv 07_expert/expert_parallel 08_4d/checkpoint 09_kernels/rmsnorm 09_kernels/swiglu
09_kernels/cross_entropy 09_kernels/flash_attention 09_kernels/adamw 10_mixed_precision/fp8_tensorwise""".split()
CLASHES = "clip_gradients evaluate receive send schedule run_schedule Linear add_product"


def test_two_recipes_go_into_one_file():
    """The Copy lines of the folders' main recipes give a name to two things only where tests/README.md says so."""
    versions = {}
    for path in (f"{name}.py" for name in TOGETHER):
        for name, text in FAMILY[path].definitions.items():
            if name.split(".")[0] in copied(FAMILY[path]):
                versions.setdefault(name, set()).add(re.sub(r"\s*#.*", "", text))
    assert {name.split(".")[0] for name, texts in versions.items() if len(texts) > 1} == set(CLASHES.split())
    page = (ROOT / "tests" / "README.md").read_text()
    assert all(f"`{name}`" in page for name in CLASHES.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--propagate", metavar="NAME")
    parser.add_argument("--needs", action="store_true")
    args = parser.parse_args()
    if args.needs:
        for path in PASTED:
            (ROOT / path).write_text(with_needs(FAMILY[path]))
        return
    if args.propagate:
        if not any(args.propagate in recipe.definitions for recipe in FAMILY.values()):
            raise SystemExit(f"--propagate {args.propagate}: no recipe defines it")
        print("\n".join(propagate(args.propagate, FAMILY)) or "every copy is like that of its parent already")
        return
    print(f"{'recipe':45} {'parent':42} {'+':>4} {'-':>4}  lines of code, of them in no parent, tokens, per line")
    for path, recipe in FAMILY.items():
        parent = next(iter(parents(recipe)), "")
        added, removed = difference(parent, path) if parent else ("", "")
        lines, own = lines_of_code(recipe.source), own_lines(path) if parent else ""
        size = tokens(recipe.source)
        row = f"{path:45} {parent:42} {added:>4} {removed:>4}  {lines:>4} {own:>4} {size:>6} {size / lines:>5.1f}"
        print(row)
    print(f"\nMedian of the training recipes: {density():.1f} tokens per line of code")


if __name__ == "__main__":
    main()
