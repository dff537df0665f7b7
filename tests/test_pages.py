"""Every page says what is true: tables are up to date, commands and links lead somewhere, Python on a page runs."""

import json
import re

import pages
import pytest
import witness
from launch import ROOT, isolated, launch
from test_lineage import FAMILY, difference, parents

PAGES = pages.pages()
every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)


def blocks(page, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def anchors(page) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return {pages.anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}


@every_page
def test_generated_parts_are_up_to_date(page):
    assert page.read_text() == pages.generated(page), "run python tests/pages.py"


@every_page
def test_commands_name_files_that_exist(page):
    for path in re.findall(r"(?<![\w/.])((?:\d\d_\w+|tests)/\w+\.py)", page.read_text()):
        assert (ROOT / path).is_file(), path


@every_page
def test_links_and_pictures_exist(page):
    """Files, and the headings in them. Other sites are not asked."""
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
        if target.startswith("https://"):
            continue
        file, _, heading = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        if heading:
            there = there / "README.md" if there.is_dir() else there
            assert heading in anchors(there), target


@every_page
def test_flags_on_pages_exist(page):
    """A recipe's command has flags that the recipe has, or the file that it is given to."""
    for block in blocks(page, "bash"):
        for command in block.replace("\\\n", " ").splitlines():
            if command.startswith("git"):
                continue
            files = re.findall(r"(?<![\w/.])((?:\d\d_\w+|tests)/\w+\.py)", command)
            own = " ".join((ROOT / file).read_text() for file in files)
            for flag in re.findall(r"--(\w+)", command.partition(files[0])[2] if files else ""):
                assert re.search(rf"^    {flag}: |[\"']--{flag}[\"']", own, re.M), f"{command}: --{flag}"


def test_first_screen():
    """At most 150 lines, the two commands, and the first one's output in the form of a log."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    first, second = [block.strip() for block in blocks(ROOT / "README.md", "bash")[:2]]
    assert first == "pip install -r requirements.txt && torchrun --nproc_per_node 8 06_pipeline/1f1b.py"
    assert second == "pip install -r requirements.txt && pytest -n auto"
    printed = re.search(r"<!-- first -->\n```\n(.*?)\n```\n<!-- /first -->", text, re.S)[1].splitlines()
    line = re.compile(r" +(step \d+|median)  loss [\d.]+  gradient norm [\d.]+  tokens/s/GPU [\d,]+  MFU .+")
    assert len(printed) == 5 and all(line.fullmatch(p) for p in printed if "..." not in p)


def test_every_recipe_is_on_the_reading_path():
    assert list(pages.IDEAS.keys() - FAMILY.keys()) == list(FAMILY.keys() - pages.IDEAS.keys()) == []
    order = list(pages.IDEAS)
    for path in order:  # the root first, a folder in one piece, a parent before its child
        assert all(order.index(parent) < order.index(path) for parent in parents(FAMILY[path])), path
    assert [path.split("/")[0] for path in order] == sorted(path.split("/")[0] for path in order)


@pytest.mark.parametrize("path", FAMILY)
def test_every_recipe_has_a_section(path):
    """Its heading, then its diff with the size that `git diff` has, then its command, then prose."""
    folder, name = path.split("/")
    text = (ROOT / folder / "README.md").read_text()
    assert pages.anchor(name) in anchors(ROOT / folder / "README.md")
    own = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.S | re.M)[1]
    if parent := next(iter(parents(FAMILY[path])), None):
        assert f"git diff --patience --no-index {parent} {path}\n" in own
        assert "+{} −{} lines of code".format(*difference(parent, path)) in own
    assert len(CODE.sub("", own).split()) > 40, "a recipe needs a reason, a price and a use"


def test_every_measured_suite_is_on_a_page():
    stored = json.loads((pages.RESULTS / "speed.json").read_text())
    shown = {name for page in PAGES for name in pages.suites(page.parent.name)}
    assert stored.keys() - shown <= {name for name, (folder, _) in pages.SUITES.items() if folder is None}


def store_bugs(monkeypatch, tmp_path, stored):
    """Let the pages find these bugs, (recipe, what, gradient, loss, end), in the folder of results."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    keys = ["recipe", "what", "gradient", "loss", "end"]
    entries = [dict(zip(keys, (f"03_zero/{name}.py", *rest))) for name, *rest in stored]
    (tmp_path / "bugs.json").write_text(json.dumps(entries))


def test_bugs_become_a_table(monkeypatch, tmp_path):
    """The words that follow from the numbers, in the folder's order; no file, no rows."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert len(pages.bugs("03_zero").splitlines()) == 2
    stored = [("zero3", 1.0, 0.2, None), ("zero1", 0.5, 0.03, None), ("zero1", 3, 4e-5, None)]
    stored += [("zero1", 1e-15, 4e-16, None), ("zero2", None, None, "hangs"), ("zero2", 271.3, float("nan"), None)]
    stored += [("zero2", None, None, "races"), ("zero3", None, None, None), ("zero3", 1e-14, 268.9, None)]
    store_bugs(monkeypatch, tmp_path, [(name, f"{i}: a | b", *rest) for i, (name, *rest) in enumerate(stored)])
    text, _, head, line, *rows = pages.bugs("03_zero").splitlines()
    assert text.startswith("9 bugs; 4 of them change the gradient by more than 1 %; 1 of those")
    assert line.count("---") == 5 and all("a \\| b" in row for row in rows)
    cells = [re.split(r" (?<!\\)\| ", row.removeprefix("| ").removesuffix(" |"))[2:] for row in rows]
    assert cells == [
        ["0.5", "3 %", "hardly"],
        ["3", "0.004 %", "no"],
        ["", "", "yes, it hangs"],
        ["270", "", "yes, the loss is not finite"],
        ["races", "", "not reliably"],
        ["1", "20 %", "yes"],
        ["", "", "yes, the loss is not finite"],
        ["0", "27,000 %", "yes"],
        ["0", "0", "no"],  # changes no number: at the end
    ]
    assert len(pages.bugs("06_pipeline").splitlines()) == 2


def test_the_most_instructive_bugs_are_in_sight(monkeypatch, tmp_path):
    """Of many, those with wrong gradients that the loss curve hides; each of them once; the others can be opened."""
    stored = [("zero1", f"seen {i}", 100.0 + i, 0.5, None) for i in range(20)]
    stored += [("zero3", f"hidden {i}", 0.1 + i, 1e-4, None) for i in range(5)]
    stored += [("zero2", "hidden 4", 4.0, 1e-4, None), ("zero1", "memory", 0.0, 0.0, None)]
    store_bugs(monkeypatch, tmp_path, stored)
    shown, more = pages.bugs("03_zero").split("<details>")
    names = re.findall(r"\) \| (\w+ ?\d*) \|", shown)
    assert names == [*(f"seen {i}" for i in range(13, 20)), *(f"hidden {i}" for i in range(5))]
    assert "<summary>15 more bugs</summary>" in more and re.findall(r"\) \| (\w+ ?\d*) \|", more)[-1] == "memory"


def test_transformers_loads_what_a_recipe_saves(tmp_path, monkeypatch):
    """The page's Python, as it stands: the loss is that with which --init continues."""
    monkeypatch.chdir(tmp_path)
    shape = "--device cpu --layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 4"
    launch("01_single_gpu/train.py", 1, f"{shape} --steps 2 --save {tmp_path}/out.safetensors")
    ours = launch("01_single_gpu/train.py", 1, f"{shape} --steps 1 --init {tmp_path}/out.safetensors").history[0][0]
    python = blocks(ROOT / "01_single_gpu" / "README.md", "python")
    (code,) = [block for block in python if "LlamaForCausalLM(config)" in block]

    def theirs():
        names = {}
        exec(code, names)
        return witness.loss_of(names["model"], shape)[1].item()

    assert abs(isolated(theirs) / ours - 1) < 1e-5  # float32: as in equivalence.py
