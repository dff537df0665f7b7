"""Every page says what is true: tables are up to date, commands and links lead somewhere, Python on a page runs."""

import functools
import json
import math
import re
import statistics

import bench
import mutation
import pages
import pytest
import witness
from launch import ROOT, isolated, launch
from test_lineage import FAMILY, parents

PAGES = pages.pages()
every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)


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
        if heading:
            there = there / "README.md" if there.is_dir() else there
            assert heading in anchors(there), target


@every_page
def test_commands_exist(page):
    """Every file that is named; and a recipe's command has flags that it has, or the file that it is given to."""
    named = re.findall(r"(?<![\w/.])((?:\d\d_\w+|tests)/\w+\.py)", page.read_text())
    assert [path for path in named if not (ROOT / path).is_file()] == []
    for block in blocks(page, "bash"):
        for command in block.replace("\\\n", " ").splitlines():
            if command.startswith("git"):
                continue
            files = re.findall(r"(?<![\w/.])((?:\d\d_\w+|tests)/\w+\.py)", command)
            own = " ".join((ROOT / file).read_text() for file in files)
            for flag in re.findall(r"--(\w+)", command.partition(files[0])[2] if files else ""):
                assert re.search(rf"^    {flag}: |[\"']--{flag}[\"']", own, re.M), f"{command}: --{flag}"


def test_first_screen():
    """At most 150 lines; the two commands, and what the first one prints."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    first, second = [block.strip() for block in blocks(ROOT / "README.md", "bash")[:2]]
    assert first == "pip install -r requirements.txt && torchrun --nproc_per_node 8 06_pipeline/1f1b.py"
    assert second == "pip install -r requirements.txt && pytest -n auto"
    printed = re.search(r"<!-- first -->\n```\n(.*?)\n```\n<!-- /first -->", text, re.S)[1]
    assert re.findall(r"(step \d+|median)  loss [\d.]+  gradient norm [\d.]+ ", printed)[::3] == ["step 1", "median"]


def test_facts():
    """Every number of the first screen is computed again from what is stored, by other code."""
    names = "equivalence", "bugs", "speed"
    entries, bugs, speed = (json.loads((pages.RESULTS / f"{name}.json").read_text()) for name in names)
    ranks = {}
    for entry in entries:
        if entry["device"] == "cpu" and entry["recipe"][:2] != "10":  # what that folder teaches is off in float64
            ranks.setdefault(entry["recipe"], []).append((entry["ranks"], entry["errors"]["gradient"]))
    most, cases = [max(found)[0] for found in ranks.values()], sum(ranks.values(), [])
    losses = [bug["loss"] for bug in bugs if (bug["gradient"] or 0) > 0.01 and bug["loss"]]
    expected = [len(ranks), len(cases), max(most), most.count(1), f"{max(error for _, error in cases):.1e}"]
    expected += [len(bugs), len(losses), 1, sum(loss < 0.01 for loss in losses), 1, 20]
    assert "--steps 20 " in mutation.CURVE

    def least_and_most(key, *pairs):
        found = []
        for ours, theirs in pairs:
            for suite in speed.values():
                best = {}
                for row in suite.get("rows", [])[: suite.get("alike", 0)]:
                    keys = [statistics.median(turn[k] or 0 for turn in row["rounds"]) for k in ("tokens", key)]
                    best[row["file"]] = max(best.get(row["file"], keys), keys)
                if ours in best and theirs in best:
                    found.append(best[ours][1] / best[theirs][1])
        return sorted({f"{min(found):.2f}", f"{max(found):.2f}"})

    *alone, tensorwise, zero3 = [(ours, theirs) for ours, (theirs, _) in pages.SAME.items()]
    for pair in alone:
        expected += least_and_most("tokens", pair)
    expected += least_and_most("tokens", tensorwise, zero3) + least_and_most("memory", tensorwise, zero3)
    expected += least_and_most("tokens", ("06_pipeline/zbv.py", "06_pipeline/torch_pipelining.py"))
    same, rounds = {}, []
    for suite in speed.values():
        for row in [row for row in suite.get("rows", []) if "rounds" in row]:
            turns = [turn["tokens"] for turn in row["rounds"]]
            same.setdefault((row["file"], row["flags"], suite["gpu"]), []).append(statistics.median(turns))
            rounds.append((max(turns) - min(turns)) / statistics.median(turns))
    apart = max(max(tokens) / min(tokens) - 1 for tokens in same.values()), max(rounds)
    expected += [f"{100 * share:.0f}" for share in apart]
    text = re.search(r"<!-- facts -->(.*?)<!-- /facts -->", (ROOT / "README.md").read_text(), re.S)[1]
    text = text.replace("\u2011", "-")
    assert re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?(?!\w)", text) == list(map(str, expected))


def test_every_stored_layout_is_on_the_page():
    """Predicted within 8 %, and in the right order where speeds differ by more than 2 %."""
    text = re.search(r"<!-- layouts -->\n(.*?)<!-- /layouts -->", (ROOT / "08_4d/README.md").read_text(), re.S)[1]
    rows = [re.sub(r"\u2011|,(?=\d)", "", line).split(" | ") for line in text.splitlines()[2:]]
    stored = json.loads((pages.RESULTS / "speed.json").read_text()).values()
    files = [row["file"] for suite in stored for row in suite.get("rows", []) if "rounds" in row]
    assert len(rows) == sum(file.startswith("08_4d/") for file in files)
    runs = [(row[:2], math.prod(map(int, re.findall(r"[dctp]p\s(\d+)", row[2]))), *map(int, row[3:5])) for row in rows]
    assert all(0.92 < predicted / tokens < 1.08 for *_, tokens, predicted in runs)
    pairs = [(a, b) for a in runs for b in runs if a[:2] == b[:2] and a[2] > 1.02 * b[2]]
    assert all(a[3] > b[3] for a, b in pairs) and len(pairs) > 50


def test_every_recipe_is_on_the_reading_path():
    assert list(pages.IDEAS.keys() - FAMILY.keys()) == list(FAMILY.keys() - pages.IDEAS.keys()) == []
    order = list(pages.IDEAS)
    for path in order:  # the root first, a folder in one piece, a parent before its child
        assert all(order.index(parent) < order.index(path) for parent in parents(FAMILY[path])), path
    assert [path.split("/")[0] for path in order] == sorted(path.split("/")[0] for path in order)
    assert list(pages.FOLDERS) == list(dict.fromkeys(path.split("/")[0] for path in order))


def test_first_table():
    """A row per folder: its recipes in reading order, and the worst of their errors."""
    rows = [line.split(" | ") for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| [`")]
    links = [re.findall(r"\]\((.+?)\)", " ".join(row)) for row in rows]
    assert [link for row in links for link in row if link.endswith(".py")] == list(pages.IDEAS)
    assert [row[0] for row in links] == [f"{folder}/README.md" for folder in pages.FOLDERS]
    measured = json.loads((pages.RESULTS / "equivalence.json").read_text())
    assert rows[-1][2] == ""  # in float64, what the files of 10 teach is off
    for folder, row in zip(pages.FOLDERS, rows[:-1]):
        ours = [e for e in measured if e["recipe"].startswith(folder) and e["device"] == "cpu"]
        worst = max(error for e in ours for error in e["errors"].values())
        assert row[2].split()[0] == pages.tied(f"{worst:.0e}"), folder


@every_page
def test_marks_are_explained(page):
    """What stands beside a number is said outside of the tables."""
    text = page.read_text()
    prose = re.sub(r"^\|.*$", "", text, flags=re.M)
    assert [mark for mark in "†‡" if mark in text] == [mark for mark in "†‡" if mark in prose]


@every_page
def test_measurements_are_generated(page):
    """Sizes of diffs, GPUs and their numbers stand between markers alone, where they cannot be forgotten."""
    by_hand = re.sub(r"<!-- (.+?) -->\n.*?<!-- /\1 -->", "", page.read_text(), flags=re.S)
    assert not re.findall(r"\+\d+ −\d+|x NVIDIA|^\|.*\d\.\d.*|lines of code$", by_hand, re.M)


def test_every_recipe_has_a_section():
    """Its heading, then the markers between which its diff and its command are, then prose."""
    for path in FAMILY:
        folder, name = path.split("/")
        text = (ROOT / folder / "README.md").read_text()
        own = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
        assert own and f"<!-- {name} -->" in own[1], path
        assert len(CODE.sub("", own[1]).split()) > 40, f"{path} needs a reason, a price and a use"


def test_every_measured_suite_is_on_a_page():
    stored = json.loads((pages.RESULTS / "speed.json").read_text())
    shown = {name for page in PAGES for name in pages.suites(page.parent.name)}
    assert {name.split(" on ")[0] for name in stored} - shown <= pages.NO_TABLE


def test_every_suite_can_run():
    """Its recipes exist, and have the flags."""
    for file, flags in {run for *_, runs in bench.SUITES.values() for run in runs}:
        fields = re.findall(r"^    (\w+): ", (ROOT / file).read_text(), re.M)
        assert set(re.findall(r"--(\w+)", flags)) <= {*fields} or file.startswith("tests/"), f"{file} {flags}"


def store(monkeypatch, tmp_path, file: str, content) -> None:
    """Let the pages find this content in the folder of results."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    (tmp_path / file).write_text(json.dumps(content))


def test_speed_is_over_the_twin_or_the_baseline(monkeypatch, tmp_path):
    """Median over that of the library twin, each at its best flags; without a twin over the folder's baseline.

    The least and the most of all suites.
    """

    def row(file, *tokens, flags=""):
        return {"file": f"{file}.py", "flags": flags, "rounds": [{"tokens": n} for n in tokens]}

    zero = [row("03_zero/torch_fsdp", 90, 100, 300), row("03_zero/torch_fsdp", 200, flags="--best")]
    zero += [row("03_zero/zero1", 80, 96, 99), row("03_zero/zero3", 107, 107)]
    expert = [row("07_expert/expert_parallel", 80, 100, 300), row("07_expert/overlap", 90, 95, 400)]
    expert += [row("07_expert/capacity", 600)]  # with other settings
    two = [row("03_zero/torch_fsdp", 50), row("03_zero/zero3", 60)]
    stored = {"zero": {"alike": 4, "rows": zero}, "zero_two": {"alike": 2, "rows": two}}
    stored["expert"] = {"alike": 2, "rows": expert}
    store(monkeypatch, tmp_path, "speed.json", stored)
    assert [pages.ratio(f"03_zero/{name}.py") for name in ("zero1", "zero3", "zero2")] == ["0.48", "0.54 to 1.20", ""]
    gains = [pages.gain(f"07_expert/{name}.py") for name in ("expert_parallel", "overlap", "capacity", "moe")]
    assert gains == ["", "0.95", "", ""]


TIMES = """
rope 1.50 2, forward: eager 9, ours 1; 4, forward: eager 9, compiled 3, ours 2; 4, backward: compiled 4.5, ours 3
adamw 1.50 n: fused 3, ours 2
matmul 2.00 a, forward: cuBLAS 9, ours 1; a, sustained: cuBLAS 8, slow 9, ours 2; b, sustained: cuBLAS 1, ours 1
fp8_matmul - a, quantize rows: eager 9, ours 1
fp8_matmul 1.50 a, sustained: _scaled_mm 6, Triton 9, Gluon 4; a, bfloat16, sustained: torch.matmul 1
"""


@pytest.mark.parametrize("line", TIMES.strip().splitlines())
def test_speed_of_a_kernel(monkeypatch, tmp_path, line):
    """Over the fastest other contender: at the first size with forward and backward, or the mean of what is sustained.

    Quantisation alone does not count, nor what only one side has.
    """
    name, gain, times = line.split(" ", 2)
    rows = []
    for part in times.split("; "):
        what, contenders = part.split(": ")
        rows += [{"what": what, "by": by, "ms": float(ms)} for by, ms in map(str.split, contenders.split(", "))]
    store(monkeypatch, tmp_path, "kernels.json", {name: {"rows": rows}})
    assert pages.kernel_gain(f"09_kernels/{name}.py") == gain.strip("-")


def test_bugs_are_called_what_their_numbers_say(monkeypatch, tmp_path):
    """Each with whether somebody who watches the loss would have seen it; and how many nobody would."""
    words = {  # gradient, loss, end: would you have seen it?
        (0.5, 0.03, None): "hardly",
        (3, 4e-5, None): "no",
        (None, None, "hangs"): "yes, it hangs",
        (271.3, float("nan"), None): "yes, the loss is not finite",
        (None, None, "races"): "not reliably",
        (1.0, 0.2, None): "yes",
        (640, 0.0, None): "no",  # the saved file alone is wrong
        (5, None, None): "yes, the loss is not finite",
        (1e-15, 4e-16, None): "no",  # changes no number: at the end
    }
    keys = "gradient", "loss", "end"
    found = [{"recipe": "03_zero/zero1.py", "what": f"{bug}", **dict(zip(keys, bug))} for bug in words]
    store(monkeypatch, tmp_path, "bugs.json", found[::-1])
    text, _, _, _, *rows = pages.bugs("03_zero", everything=True).splitlines()
    assert text.startswith(
        "9 bugs; 4 of them train with a gradient or update that is wrong by more than 1 %; 1 of those"
    )
    assert sorted(row.split(" | ")[4][:-2] for row in rows) == sorted(words.values())
    assert rows[-1].endswith("| 0 | 0 | no |")


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
