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


@pytest.mark.thorough
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
    """At most 150 lines, also with ten folders; the two commands, and the first one's output in the form of a log."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) + 10 - len(pages.FOLDERS) <= 150
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
    assert list(pages.FOLDERS) == list(dict.fromkeys(path.split("/")[0] for path in order))


def test_first_table_has_every_recipe(monkeypatch):
    """A row per folder: links in reading order, the worst error, and the best speed of what is no library twin."""
    found = [("02_data_parallel/naive.py", "cpu", 1e-13), ("02_data_parallel/diloco.py", "cpu", 3e-12)]
    found += [("03_zero/zero1.py", "cpu", 1e-14), ("03_zero/zero1.py", "cuda", 1.0)]
    entries = [{"recipe": path, "device": device, "errors": {"gradient": error}} for path, device, error in found]
    speeds = {"03_zero/zero1.py": "0.96", "03_zero/zero3.py": "1.07", "03_zero/torch_fsdp.py": "1.10"}
    monkeypatch.setattr(pages, "results", lambda name: entries)
    monkeypatch.setattr(pages, "ratio", lambda path: speeds.get(path, ""))
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in pages.all_folders().splitlines()[2:]]
    links = [re.findall(r"\]\((.+?)\)", " ".join(row)) for row in rows]
    assert [link for row in links for link in row if link.endswith(".py")] == list(pages.IDEAS)
    assert [row[0] for row in links] == [f"{folder}/README.md" for folder in pages.FOLDERS]
    ends = {folder: row[3:] for folder, row in zip(pages.FOLDERS, rows)}
    assert ends.pop("02_data_parallel") == ["3e-12 ‡", ""] and ends.pop("03_zero") == ["1e-14", "1.07"]
    assert all(end == ["", ""] for end in ends.values())


@every_page
def test_marks_are_explained(page):
    """What stands beside a number is said outside of the tables."""
    text = page.read_text()
    prose = re.sub(r"^\|.*$", "", text, flags=re.M)
    assert [mark for mark in "†‡" if mark in text] == [mark for mark in "†‡" if mark in prose]


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


def test_attention_becomes_a_table(monkeypatch, tmp_path):
    """Each rank's time below that of one call for as many tokens, with its share of the ideal; no file, no table."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.attention() == pages.speed("05_context_ring") == "Not measured yet."
    numbers = {"forward_ms": 2.5, "both_ms": 10.0, "share_forward": 1.04, "share": 0.951}
    rows = [{"file": "05_context_ring/zigzag.py", "seq": seq, "rank": 3, **numbers} for seq in (2048, 1024)]
    whole = [{"seq": seq, "forward_ms": 10.4, "both_ms": 38.2} for seq in (1024, 2048)]
    stored = {"date": "today", "gpu": "1 x GPU", "torch": "3", "command": "run", "rows": rows, "whole": whole}
    (tmp_path / "speed.json").write_text(json.dumps({"context_attention": stored}))
    note, _, _, _, *lines = pages.attention().splitlines()
    assert note == "1 x GPU, torch 3, today, `run`"
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    one, ours = ["one call for all tokens", "", "10.40", "", "38.20", ""], ["3", "2.50", "1.04", "10.00", "0.95"]
    file = "[`zigzag.py`](#zigzagpy)"
    assert cells == [["1,024", *one], ["1,024", file, *ours], ["2,048", *one], ["2,048", file, *ours]]


def test_layer_of_experts_becomes_tables(monkeypatch, tmp_path):
    """Times over that of our layer with bf16 weights, and the sum of the matmuls' over it; no file, no table."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.expert_layer() == "Not measured yet."
    rows = [{"label": "loop", "forward_ms": 7.5, "both_ms": 25.0}]
    rows += [{"label": pages.OURS, "forward_ms": 3.75, "both_ms": 10.0}]
    matmuls = [{"label": name, "ms": ms, "tflops": 600.4} for name, ms in (("up", 5.25), ("down", 2.25))]
    about = {"date": "today", "gpu": "1 x GPU", "torch": "3", "transformers": "5", "command": "run"}
    stored = {"expert_layer": {**about, "rows": rows, "matmuls": matmuls}}
    (tmp_path / "speed.json").write_text(json.dumps(stored))
    note, layers, alone, last = pages.expert_layer().split("\n\n")
    assert note == "1 x GPU, torch 3, transformers 5, today, `run`"
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in layers.splitlines()[2:]]
    assert cells == [["loop", "7.50", "25.00", "2.50"], [pages.OURS, "3.75", "10.00", "1.00"]]
    assert alone.splitlines()[2:] == ["| up | 5.25 | 600 |", "| down | 2.25 | 600 |"]
    assert last.startswith("The 2 grouped matmuls alone take 7.50 ms, 75% of the time of ")


def test_speed_over_the_baseline(monkeypatch, tmp_path):
    """Where no library trains the same, a recipe's median over that of the folder's baseline, both in one suite."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    tokens = {"expert_parallel": (80, 100, 300), "overlap": (90, 95, 400), "capacity": (600, 600, 600)}
    rows = [{"file": f"07_expert/{n}.py", "rounds": [{"tokens": x} for x in xs]} for n, xs in tokens.items()]
    (tmp_path / "speed.json").write_text(json.dumps({"expert": {"alike": 2, "rows": rows}}))
    found = [pages.gain(f"07_expert/{name}.py") for name in (*tokens, "symmetric_memory")]
    assert found == ["", "0.95", "", ""]  # itself; both; under other settings; not measured


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
