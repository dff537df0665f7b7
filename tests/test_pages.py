"""Every page says what is true: generated parts are up to date, links and commands lead somewhere, Python runs."""

import functools
import json
import re

import mutation
import pages
import pytest
import witness
from launch import ROOT, isolated, launch
from test_lineage import FAMILY, parents

every_page = pytest.mark.parametrize("page", pages.PAGES, ids=[str(page.relative_to(ROOT)) for page in pages.PAGES])
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)
FILES = re.compile(r"(?<![\w/.])((?:\d\d_\w+|tests)/[\w/]+\.py)")


def blocks(page, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


@functools.cache
def anchors(page) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return {pages.anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.thorough
@every_page
def test_generated_parts_are_up_to_date(page):
    assert page.read_text() == pages.generated(page), "run python tests/tools/pages.py"


@every_page
def test_links_and_pictures_exist(page):
    """Files, and the headings in them. Other sites are not asked."""
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
        if target.startswith("https://"):
            continue
        file, _, heading = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not heading or heading in anchors(there), target


@every_page
def test_commands_exist(page):
    """Every file that is named; and a recipe's command has flags that it has, or the file that it is given to."""
    assert [path for path in FILES.findall(page.read_text()) if not (ROOT / path).is_file()] == []
    for command in "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
        files = [] if command.startswith("git") else FILES.findall(command)
        own = " ".join((ROOT / file).read_text() for file in files)
        for flag in re.findall(r"--(\w+)", command.partition(files[0])[2] if files else ""):
            assert re.search(rf"^    {flag}: |[\"']--{flag}[\"']", own, re.M), f"{command}: --{flag}"


def test_every_recipe_has_a_section():
    """In reading order: a parent before its child."""
    order = [path for folder in pages.FOLDERS for path in pages.recipes_of(folder)]
    assert sorted(order) == sorted(FAMILY)
    assert all(order.index(parent) < order.index(path) for path in order for parent in parents(FAMILY[path]))


def test_facts():
    """Numbers of the first screen, computed again from what is stored, by other code."""
    entries, bugs = (json.loads((pages.RESULTS / f"{name}.json").read_text()) for name in ("equivalence", "bugs"))
    ranks = {}
    for entry in entries:
        if entry["device"] == "cpu" and entry["recipe"][:2] != "10":  # what that folder teaches is off in float64
            ranks.setdefault(entry["recipe"], []).append((entry["ranks"], entry["errors"]["gradient"]))
    most, cases = [max(found)[0] for found in ranks.values()], sum(ranks.values(), [])
    losses = [bug["loss"] for bug in bugs if (bug["gradient"] or 0) > 0.01 and bug["loss"]]
    expected = [len(ranks), len(cases), max(most), most.count(1), f"{max(error for _, error in cases):.1e}"]
    expected += [len(bugs), len(losses), 1, sum(loss < 0.01 for loss in losses), 1, 20]
    assert "--steps 20 " in mutation.CURVE
    text = re.search(r"<!-- facts -->(.*?)[*] [*][*]Speed", (ROOT / "README.md").read_text(), re.S)[1]
    assert re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?(?!\w)", text) == list(map(str, expected))


def test_speed_is_compared_at_best_settings():
    """The median of the fastest row over that of the library's, from rows that took turns."""
    ours, theirs, rows = "03_zero/zero3.py", "03_zero/torch_fsdp.py", []
    for file, speed in (theirs, 8), (theirs, 10), (ours, 9), (ours, 11), (ours, 30):
        rounds = [{"tokens": tokens, "memory": 100 / speed} for tokens in (1, speed, 50)]
        rows.append({"file": file, "flags": "", "rounds": rounds})
    suite = {"alike": 4, "rows": rows}
    assert pages.ratios(ours, theirs, suites=[suite]) == pages.ratios(ours, suites=[suite]) == [1.1]
    assert pages.ratios(ours, theirs, "memory", [suite]) == pytest.approx([10 / 11])


@pytest.mark.thorough
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
