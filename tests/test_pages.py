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


def store_kernels(monkeypatch, tmp_path, name, *rows):
    """Let the pages find these rows of a kernel file: (what, by, ms, rate, unit, share, more)."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    keys = "what", "by", "ms", "rate", "unit", "share"
    found = [dict(zip(keys, row)) | (row[6] if len(row) > 6 else {}) for row in rows]
    about = {"date": "today", "gpu": "1 x GPU", "torch": "3", "triton": "4", "command": "run"}
    (tmp_path / "kernels.json").write_text(json.dumps({name: {**about, "rows": found}}))


def cells_of(text: str) -> list[list[list[str]]]:
    """The cells of all tables of a text, without the lines that separate heads."""
    tables = [[line for line in part.splitlines() if line.startswith("| ")] for part in text.split("\n\n")]
    rows = [[re.split(r" (?<!\\)\| ", row[2:-2]) for row in found if "---" not in row] for found in tables]
    return [found for found in rows if found]


def test_alike_kernels_become_columns(monkeypatch, tmp_path):
    """A column per contender, the fastest bold; other contenders, another table; no file, no table and no speed."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    path = "09_kernels/cross_entropy.py"
    assert pages.kernel_table(path) == "Not measured yet." and pages.kernel_gain(path) == ""
    store_kernels(
        monkeypatch,
        tmp_path,
        "cross_entropy",
        ("a x b, forward", "eager", 0.25, 1.0, "TB/s", 0.25),
        ("a x b, forward", "ours", 0.0625, 3.0, "TB/s", 0.75),
        ("a x b, forward", "ours, in a graph", 0.01, 3.0, "TB/s", 0.75),
        ("a x b, backward", "eager", 12.5, 1.0, "TB/s", 0.25),
        ("head", "matmul", 30.0, 495.0, "TFLOP/s", 0.5, {"GiB": 12.5}),
        ("head", "ours", 25.0, 99.0, "TFLOP/s", 0.1, {"GiB": 1.0}),
    )
    assert pages.kernel_table(path).startswith("1 x GPU, torch 3, Triton 4, today, `run`\n\n")
    first, second = cells_of(pages.kernel_table(path))
    assert first[0] == ["ms · share of the limit", "eager", "ours", "ours, in a graph", "limit"]
    assert first[1:] == [
        ["a x b, forward", "0.250 · 25%", "**0.0625** · 75%", "0.0100 · 75%", "4 TB/s"],
        ["a x b, backward", "**12.5** · 25%", "", "", "4 TB/s"],
    ]
    assert second == [
        ["ms · share of the limit", "matmul", "ours", "matmul: peak, GiB", "ours: peak, GiB", "limit"],
        ["head", "30.0 · 50%", "**25.0** · 10%", "12.50", "1.00", "990 TFLOP/s"],
    ]
    assert pages.kernel_gain(path) == "1.20"  # the head: it is measured as a whole


def test_speed_of_a_kernel(monkeypatch, tmp_path):
    """Forward and backward of the fastest other contender over ours, at the first size that has both."""
    rows = [("2 elements, forward", by, ms) for by, ms in (("eager", 9.0), ("ours", 1.0))]
    rows += [("4 elements, forward", by, ms) for by, ms in (("eager", 9.0), ("compiled", 3.0), ("ours", 2.0))]
    rows += [("4 elements, backward", by, ms) for by, ms in (("eager", 5.0), ("compiled", 4.5), ("ours", 3.0))]
    rows += [("4 elements, backward", "ours, otherwise", 0.5)]
    store_kernels(monkeypatch, tmp_path, "rope", *((*row, 1.0, "TB/s", 0.5) for row in rows))
    assert pages.kernel_gain("09_kernels/rope.py") == "1.50" and pages.kernel_gain("09_kernels/softmax.py") == ""
    store_kernels(monkeypatch, tmp_path, "adamw", ("n", "fused", 3.0, 1, "TB/s", 1), ("n", "ours", 2.0, 1, "TB/s", 1))
    assert pages.kernel_gain("09_kernels/adamw.py") == "1.50"
    rows = [("a, forward", "cuBLAS", 9.0), ("a, forward", "ours", 1.0)]
    rows += [("a, forward, sustained", by, ms) for by, ms in (("cuBLAS", 8.0), ("slow", 9.0), ("ours", 2.0))]
    rows += [("a, dw, sustained", by, ms) for by, ms in (("cuBLAS", 1.0), ("ours", 1.0))]
    store_kernels(monkeypatch, tmp_path, "matmul", *((*row, 1.0, "TFLOP/s", 0.5) for row in rows))
    assert pages.kernel_gain("09_kernels/matmul.py") == "2.00"  # the mean of 4 and 1
    rows = [("a, quantize rows", "eager", 9.0), ("a, quantize rows", "ours", 1.0)]
    store_kernels(monkeypatch, tmp_path, "fp8_matmul", *((*row, 1.0, "TB/s", 0.5) for row in rows))
    assert pages.kernel_gain("09_kernels/fp8_matmul.py") == ""
    rows += [("a, sustained", by, ms) for by, ms in (("_scaled_mm", 6.0), ("Triton", 9.0), ("Gluon", 4.0))]
    rows += [("a, bfloat16, sustained", "torch.matmul", 1.0)]  # a peer alone: nothing to compare
    store_kernels(monkeypatch, tmp_path, "fp8_matmul", *((*row, 1.0, "TB/s", 0.5) for row in rows))
    assert pages.kernel_gain("09_kernels/fp8_matmul.py") == "1.50"  # over the fastest of its own kernels


def test_other_kernels_become_rows(monkeypatch, tmp_path):
    """Kernels that are compared with each other have a row each; what is counted beside times has columns."""
    store_kernels(
        monkeypatch,
        tmp_path,
        "coalescing",
        ("copy", "x.clone()", 0.5, 4.0, "TB/s", 1.0),
        ("copy", "copy_far 8x, 4x", 2.0, 1.0, "TB/s", 0.25),
    )
    assert cells_of(pages.kernel_table("09_kernels/coalescing.py")) == [
        [
            ["what", "by", "sectors read", "sectors written", "ms", "rate", "share of the limit", "limit"],
            ["copy", "x.clone()", "", "", "**0.500**", "4 TB/s", "100%", "4 TB/s"],
            ["copy", "copy_far", "8×", "4×", "2.00", "1 TB/s", "25%", "4 TB/s"],
        ]
    ]
    more = {"elements": 8, "registers": 255, "spills": 0, "loaded": 3.4e10}
    store_kernels(monkeypatch, tmp_path, "coarsening", ("m", "16 x 16", 4.0, 10.0, "TFLOP/s", 0.2, more))
    (found,) = cells_of(pages.kernel_table("09_kernels/coarsening.py"))
    assert found[1][2:7] == ["8", "255", "0", "34.00", "**4.00**"]
    store_kernels(
        monkeypatch,
        tmp_path,
        "divergence",
        ("share 0", "by_mask, 257.00x the steps", 4.0, 10.0, "TFLOP/s", 0.5),
        ("share 0", "by_list, 1.00x the steps", 2.0, 20.0, "TFLOP/s", 1.0),
    )
    (found,) = cells_of(pages.kernel_table("09_kernels/divergence.py"))
    assert found[1] == ["share 0", "4.00 · 50%", "**2.00** · 100%", "257.00", "1.00", "20 TFLOP/s"]


def test_steps_become_a_table(monkeypatch, tmp_path):
    """A row per kind and preset, with the difference; then the whole step."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.kernel_steps() == "Not measured yet."
    about = {"date": "today", "gpu": "1 x GPU", "torch": "3", "command": "run"}
    steps = {
        "01_single_gpu/train.py": {"matmuls": 50.0, "rest": 2.0},
        "09_kernels/train.py": {"matmuls": 51, "rest": 1},
        "09_kernels/train.py, 09_kernels/flash_attention_gluon.py": {"matmuls": 49, "rest": 1},
    }
    (tmp_path / "kernel_steps.json").write_text(json.dumps({"measured": about, "llama3_1b": steps}))
    (found,) = cells_of(pages.kernel_steps())
    assert [row[1:] for row in found[1:]] == [
        ["matmuls", "50.0", "51.0", "+1.0", "+2.0%"],
        ["rest", "2.0", "1.0", "-1.0", ""],
        ["step", "52.0", "52.0", "+0.0", "+0.0%"],
        ["step, with flash_attention_gluon.py", "52.0", "50.0", "-2.0", "-3.8%"],
    ]


def test_speed_over_a_baseline_of_another_folder(monkeypatch, tmp_path):
    """The root's, for the training with kernels of our own."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    tokens = {"01_single_gpu/train.py": 100, "09_kernels/train.py": 107}
    rows = [{"file": file, "rounds": [{"tokens": n}]} for file, n in tokens.items()]
    (tmp_path / "speed.json").write_text(json.dumps({"kernels_smollm": {"alike": 2, "rows": rows}}))
    assert pages.gain("09_kernels/train.py") == "1.07" and pages.ratio("09_kernels/train.py") == ""


def test_bugs_of_kernels_have_no_loss_curve(monkeypatch, tmp_path):
    """A kernel alone trains nothing: nobody could have seen its bug in a loss; without an error it comes last."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    keys = ["recipe", "what", "gradient", "loss", "end"]
    stored = [("09_kernels/rope.py", "slow", 0.0, None, None), ("09_kernels/rope.py", "wrong", 0.5, None, None)]
    stored += [("09_kernels/rope.py", "crash", None, None, "crashes")]
    (tmp_path / "bugs.json").write_text(json.dumps([dict(zip(keys, bug)) for bug in stored]))
    (found,) = cells_of(pages.bugs("09_kernels"))
    assert [row[1:] for row in found[1:]] == [
        ["wrong", "0.5", "", ""],
        ["crash", "", "", "yes, it crashes"],
        ["slow", "0", "", ""],
    ]


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
