"""Write the generated parts of all pages: what stands between <!-- name --> and <!-- /name -->.

    python tests/tools/pages.py            rewrite them from the code and from what tests/results/ holds
    python tests/tools/pages.py --first    also run the first command of README.md, and show what it prints

Prose is written by hand, in the pages; their sections are in reading order. A number on a page comes from here.
"""

import argparse
import difflib
import json
import re
import statistics
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

import mutation
from launch import load, once
from test_lineage import FAMILY, ROOT, difference, lines_of_code, parents

RESULTS = ROOT / "tests" / "results"
FOLDERS = [path.name for path in sorted(ROOT.glob("[01][0-9]_*"))]
PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in FOLDERS)]
PAGES += [ROOT / "tests" / "README.md", ROOT / "tests" / "BUGS.md"]
SAME = {  # recipes of which a library has the very technique, its twin, and what README.md calls it
    "02_data_parallel/bucketed.py": ("02_data_parallel/torch_ddp.py", "DDP"),
    "03_zero/zero3.py": ("03_zero/torch_fsdp.py", "FSDP2"),
    "04_tensor_sequence/sequence_parallel.py": ("04_tensor_sequence/torch_dtensor.py", "DTensor"),
    "05_context_ring/zigzag.py": ("05_context_ring/torch_context_parallel.py", "`context_parallel`"),
    "06_pipeline/1f1b.py": ("06_pipeline/torch_pipelining.py", "torch's 1F1B"),
    "10_mixed_precision/fp8_tensorwise.py": ("tests/tools/torchao_linears.py", "torchao"),
    "10_mixed_precision/fp8_zero3.py": ("tests/tools/torchao_fsdp.py", "torchao"),
}
BASES = {"10_mixed_precision/fp8_zero3.py": "03_zero/zero3.py"}  # where it is not the one that the page names
ROUNDING = "10_mixed_precision"  # in float64, where errors are compared, what its files teach is off
MARKS = {f"01_single_gpu/{name}.py": " †" for name in ("train", "document_mask", "tied_embeddings", "muon", "lora")}
MARKS["02_data_parallel/diloco.py"] = " ‡"  # what the pages say of their errors
HIDDEN = 0.01  # a difference of the loss curve that nobody sees
SHOWN = 5  # so many bugs are on a folder's page
IN_SIGHT, ON_PAGE = 40, 160  # lines of a diff that are in sight, and that are on a page at all
WIDTH = 88  # columns of code that a page shows
COLUMNS = {  # of what is measured: title, and how a number is written; shares are in percent
    "file": ("file", "{}"),
    "label": ("layer", "{}"),
    "what": ("what", "{}"),
    "by": ("by", "{}"),
    "seq": ("tokens", "{:,}"),
    "rank": ("rank", "{}"),
    "tokens": ("tokens/s/GPU", "{:,.0f}"),
    "ratio": ("× first", "{:.3f}"),
    "mfu": ("MFU, %", "{:.1f}"),
    "memory": ("memory, GiB", "{:.1f}"),
    "exposed": ("exposed, %", "{:.1f}"),
    "idle": ("idle, %", "{:.1f}"),
    "simulated": ("simulated, %", "{:.1f}"),
    "formula": ("formula, %", "{:.1f}"),
    "forward_ms": ("forward, ms", "{:.2f}"),
    "both_ms": ("forward and backward, ms", "{:.2f}"),
    "GiB": ("peak, GiB", "{:.2f}"),
    "loaded": ("bytes loaded", "{:.1e}"),
    "registers": ("registers per thread", "{}"),
    "spills": ("words spilled", "{}"),
    "ms": ("ms", "{:,.3g}"),
    "share": ("share, %", "{:.0f}"),
}
WRITTEN_HERE = "ours", "Triton", "Gluon"  # contenders of a kernel file that are the file's own


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown, without empty columns; numbers stand to the right, but not in the first column."""
    columns = [column for column in zip(head, *rows) if any(column[1:])]
    numbers = [all(cell[:1] in "+-0123456789" for cell in column[1:]) for column in columns[1:]]
    rule = ["---", *("---:" if right else "---" for right in numbers)]
    lines = [list(line) for line in zip(*columns)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def folded(summary: str, text: str) -> str:
    """Text that shows once its summary is clicked."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def results(name: str, key: str = "") -> list | dict:
    stored = json.loads((RESULTS / name).read_text())
    return stored[key] if key else stored


def about(stored: dict) -> str:
    """Where, with what, when and how something was measured."""
    versions = [f"{name} {stored[name]}" for name in ("torch", "triton", "transformers") if name in stored]
    command = " ".join([stored["command"], stored.get("flags", "")]).strip()
    return ", ".join([*filter(None, [stored.get("gpu")]), *versions, stored["date"], f"`{command}`"])


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@once
def recipes_of(folder: str) -> list[str]:
    """The recipes of a folder in reading order, that of the sections of its page."""
    headings = re.findall(r"^## (\w+\.py)$", (ROOT / folder / "README.md").read_text(), re.M)
    return [f"{folder}/{name}" for name in headings]


def way(folder: str) -> str:
    """Links to the folder before and to the one after."""
    at = FOLDERS.index(folder)
    before = [f"← [{name}](../{name}/README.md)" for name in FOLDERS[:at][-1:]]
    after = [f"[{name}](../{name}/README.md) →" for name in FOLDERS[at + 1 :][:1]]
    return " · ".join([*before, "[all folders](../README.md#the-recipes)", *after])


def first_parent(path: str) -> str | None:
    """The parent with which a recipe is compared."""
    return next(iter(parents(FAMILY[path])), None)


def size(path: str) -> str:
    """Lines of code that a recipe adds to its parent and takes from it, or all of its own."""
    if parent := first_parent(path):
        return "+{}\u00a0−{}".format(*difference(parent, path))
    return f"{lines_of_code(FAMILY[path].source)}"


def commands(path: str) -> str:
    """The diff with the parent, the first command of the recipe's header, and the lesson."""
    parent = first_parent(path)
    diff = f"git diff --no-index --patience -I '^#' {parent} \\\n    {path}\n" if parent else ""
    run = re.search(r"^Run:\s+(.+)$", FAMILY[path].source, re.M)[1]
    block = f"```bash\n{diff}{run}\n```\n\n{size(path)} lines of code"
    lines = lesson(path, 1)
    if not 0 < len(lines) <= ON_PAGE:
        return block
    change = "\n".join(["```diff", *lines, "```"])
    return f"{block}\n\n{folded('The lesson, as a diff', change) if len(lines) > IN_SIGHT else change}"


def lesson(path: str, context: int) -> list[str]:
    """The lines of a diff of what the header calls the lesson, against the first parent that has the definition."""
    above, lines = [FAMILY[parent].definitions for parent in parents(FAMILY[path])], []
    for name in FAMILY[path].header.get("Lesson", []) if above else []:
        for definition, text in FAMILY[path].definitions.items():
            if definition == name or definition.startswith(f"{name}."):
                before = next((found[definition] for found in above if definition in found), "")
                diff = difflib.unified_diff(before.splitlines(), text.splitlines(), n=context, lineterm="")
                lines += [re.sub(r"^@@ .*", f"@@ {definition}", line) for line in list(diff)[2:]]
    return lines


def look() -> str:
    """The lesson of 1F1B, which is short."""
    return "\n".join(["```diff", *(line for line in lesson("06_pipeline/1f1b.py", 2) if line[:2] != "@@"), "```"])


def code(folder: str, wanted: str) -> str:
    """FILE DEFINITION: its code. FILE DEFINITION:FIRST...LAST: from the one line that begins so to the one other.

    FIRST and LAST have no spaces. A comment behind code stays where the line is not too long for the page with it.
    """
    file, name, _, first, last = re.match(r"(\S+) ([\w.]+)(:(.+?)\.\.\.(.+))?$", wanted).groups()
    lines = FAMILY[f"{folder}/{file}"].definitions[name].splitlines()
    if first:
        begins = [line.replace(" ", "").startswith for line in lines]
        (start,), (end,) = ([i for i, test in enumerate(begins) if test(mark)] for mark in (first, last))
        lines = lines[start : end + 1]
    lines = textwrap.dedent("\n".join(lines)).splitlines()
    lines = [line if len(line) <= WIDTH else re.sub(r"  # [^\"]*$", "", line) for line in lines]
    return "\n".join(["```python", *lines, "```"])


def family(parent: str | None = None, depth: int = 0) -> str:
    """A list of every recipe below its first parent."""
    lines = []
    for path in [path for folder in FOLDERS for path in recipes_of(folder) if first_parent(path) == parent]:
        others = ", ".join(f"`{other}`" for other in parents(FAMILY[path])[1:])
        lines.append(f"{'  ' * depth}* [`{path}`](../{path})" + f", also from {others}" * bool(others))
        lines.append(family(path, depth + 1))
    return "\n".join(filter(None, lines))


def measured(row: dict, key: str) -> list[float]:
    """The numbers of the rounds that have it."""
    return [numbers[key] for numbers in row["rounds"] if numbers[key] is not None]


def apart(row: dict) -> float:
    """How far the rounds of a row are apart, as a share of their median."""
    tokens = measured(row, "tokens")
    return (max(tokens) - min(tokens)) / statistics.median(tokens)


def label(row: dict, rows: list[dict]) -> str:
    """The file, and those of its flags that another row of the same file does not have."""
    others = [other.get("flags", "") for other in rows if other["file"] == row["file"]]
    flags = re.findall(r"--\S+ [^-\s]\S*", row.get("flags", ""))
    own = [flag for flag in flags if not all(f"{flag} " in f"{other} " for other in others)]
    own = [flag for flag in own if flag.split()[0] not in ("--dp", "--cp", "--tp", "--pp") or flag[-2:] != " 1"]
    alone = ", on each GPU alone, the slowest" if "each" in row.get("rounds", [{}])[0] else ""
    return f"`{' '.join([row['file'], *own])}`{alone}"


def flat(row: dict, suite: dict) -> dict:
    """What the columns show of a row: medians of its rounds, its speed over the first row's, and its profile."""
    cells, rows = {key: value for key, value in row.items() if key in COLUMNS}, suite["rows"]
    if "file" in row:
        cells["file"] = label(row, rows)
    if "rounds" in row:
        picks = {"tokens": statistics.median, "mfu": statistics.median, "memory": max}
        cells |= {key: pick(measured(row, key)) for key, pick in picks.items() if measured(row, key)}
        if rows.index(row) < suite["alike"] > 1:  # the same work
            cells["ratio"] = cells["tokens"] / statistics.median(measured(rows[0], "tokens"))
    if "profile" in row:
        slowest = max(row["profile"], key=lambda ms: ms["compute"])  # for which the others also wait
        cells["exposed"] = 100 * slowest["exposed"] / slowest["step"]
    idle = row.get("pipeline", {})  # measured, simulated from the run's own durations, and by the formula
    cells |= {key: 100 * idle[key] for key in ("idle", "simulated", "formula") if key in idle}
    return cells | ({"share": 100 * row["share"]} if row.get("share") else {})


def tabulate(rows: list[dict]) -> str:
    """A row each, with the columns that any of them has."""
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    lines = [[COLUMNS[key][1].format(row[key]) if key in row else "" for key in keys] for row in rows]
    return table([COLUMNS[key][0] for key in keys], lines)


def suite_table(suite: dict) -> str:
    """Return the table of a suite on one card, with the command that measured it."""
    if "table" in suite:  # as a recipe has printed it
        return f"{about(suite)}\n\n```\n{suite['table'].rstrip()}\n```"
    rows = suite["rows"]
    note = about(suite) + (f", code of commit {suite['commit']} or before" if "commit" in suite else "")
    if most := max(apart(row) if "rounds" in row else 0 for row in rows):
        note += f"; rounds differ by at most {100 * most:.1f} %"
    note += f" ({suite['note']})" if "note" in suite else ""
    return f"{note}\n\n{tabulate([flat(row, suite) for row in rows])}"


def speed(name: str) -> str:
    """The table of a suite, that of another card, folded, and the flags of all rows."""
    stored = results("speed.json")
    cards = sorted((key for key in stored if key.split(" on ")[0] == name), key=lambda key: stored[key]["gpu"])
    first, *others = reversed(cards)
    parts = [suite_table(stored[first])]
    parts += [folded(f"on an {stored[other]['gpu'].split()[3]}", suite_table(stored[other])) for other in others]
    flags = [f"{row['file']:42} {row['flags']}" for row in stored[first].get("rows", []) if "flags" in row]
    return "\n\n".join(parts + [folded("flags", "\n".join(["```", *flags, "```"]))] * bool(flags))


def shown(folder: str) -> list[dict]:
    """The suites, of all cards, whose tables a folder's page shows."""
    names = re.findall(r"<!-- speed (\w+) -->", (ROOT / folder / "README.md").read_text())
    return [suite for key, suite in results("speed.json").items() if key.split(" on ")[0] in names]


def ratios(path: str, base: str = "", key: str = "tokens", suites: list[dict] | None = None) -> list[float]:
    """Tokens/s (or memory) over those of base, or of the library twin, at best settings, where both took turns.

    A number for each suite. Accelerate, which wraps the twin, is compared with the twin at the same settings.
    """
    found = []
    for suite in suites or results("speed.json").values():
        alike = suite.get("rows", [])[: suite.get("alike", 0)]
        other = base or (alike[0]["file"] if alike else "")
        ours, theirs = ([row for row in alike if row["file"] == file] for file in (path, other))
        if Path(path).name.startswith("accelerate_"):
            theirs = [row for row in theirs if row["flags"] in [mine["flags"] for mine in ours]]
        if ours and theirs and (base or Path(other).name.startswith(("torch_", "library"))):
            found.append(best(ours, key) / best(theirs, key))
    return found


def best(rows: list[dict], key: str) -> float:
    """The median of the fastest row."""
    row = max(rows, key=lambda row: statistics.median(measured(row, "tokens")))
    return statistics.median(measured(row, key))


def spread(found: list[float]) -> str:
    """The least and the largest of these."""
    return "\u00a0to\u00a0".join(sorted({f"{pick(found):.2f}" for pick in (min, max)})) if found else ""


def gain(path: str, base: str) -> str:
    """Speed over that of the library twin, or without a twin over that of the base."""
    suites, base = shown(path.split("/")[0]), BASES.get(path, base)
    return spread(ratios(path, suites=suites) or (ratios(path, base, suites=suites) if base not in ("", path) else []))


def like_for_like(paths: list[str], key: str = "tokens") -> str:
    """Speed (or memory) over that of the library's same technique, in all stored suites."""
    return spread([ratio for path in paths if path in SAME for ratio in ratios(path, SAME[path][0], key)])


def kernel(wanted: str) -> str:
    """FILE [PATTERN]: the measured rows of a kernel file whose names have the pattern.

    A column for each contender, in milliseconds; or a row for each, if a contender has more numbers than that.
    """
    name, _, pattern = wanted.partition(" ")
    stored, times = results("kernels.json")[name], defaultdict(dict)
    rows = [row for row in stored["rows"] if re.search(pattern, row["what"])]
    limits = dict.fromkeys(f"{row['rate'] / row['share']:,.4g} {row['unit']}" for row in rows)
    rows = [flat(row, stored) for row in rows]
    note = f"{about(stored)}; limit {' or '.join(limits)}"
    for row in rows:
        times[row["what"]][re.sub(", .* the steps", "", row["by"])] = row
    names, lines = list(dict.fromkeys(by for found in times.values() for by in found)), []
    if len(names) > 6 or {"GiB", "loaded"} & set().union(*rows):
        return f"{note}\n\n{tabulate(rows)}"
    for what, found in times.items():
        ours = min([found[by] for by in WRITTEN_HERE if by in found] or found.values(), key=lambda row: row["ms"])
        cells = [f"{found[by]['ms']:.3g}" if by in found else "" for by in names]
        lines.append([what.removesuffix(", sustained"), *cells, f"{ours['share']:.0f}"])
    return f"{note}\n\n{table(['ms', *names, 'share, %'], lines)}"


def worst_error(path: str) -> str:
    """The largest relative error of any tensor, loss or norm, in float64 on CPUs, over all cases of a recipe."""
    entries = [e for e in results("equivalence.json") if e["recipe"] == path and e["device"] == "cpu"]
    errors = [error for entry in entries for error in entry["errors"].values()]
    if not errors or path.startswith(ROUNDING):
        return ""
    return (f"{max(errors):.0e}" if max(errors) else "0").replace("-", "\u2011") + MARKS.get(path, "")


def equivalence() -> str:
    """Worst errors of each recipe over all its cases."""
    entries, rows = results("equivalence.json"), []
    columns = ("cpu", ["gradient"]), ("cpu", ["training"]), ("cpu", ["gradient history", "training history"])
    columns += ("cuda", ["float32"]), ("cuda", ["bfloat16"])
    for path in [path for folder in FOLDERS for path in recipes_of(folder)]:
        own = [entry for entry in entries if entry["recipe"] == path]
        cpu, gpu = (sorted({e["ranks"] for e in own if e["device"] == device}) for device in ("cpu", "cuda"))
        errors = []
        for device, keys in columns:
            values = [e["errors"][key] for e in own for key in keys if e["device"] == device and key in e["errors"]]
            errors.append(f"{max(values):.2g}" if values else "")
        ranks, gpus = ", ".join(map(str, cpu)), ", ".join(map(str, gpu))
        rows += [[f"[`{path}`](../{path})", ranks, *errors[:3], gpus, *errors[3:]]] * bool(own)
    head = ["recipe", "CPU ranks", "gradient", "trained weights", "loss, norm", "GPUs", "gradient fp32"]
    return table([*head, "bf16, × root's own"], rows)


def hides(bug: dict) -> bool:
    """... and the loss curve shows less than that."""
    return mutation.mistrains(bug) and bug["loss"] < HIDDEN


def effects(bug: dict) -> list[str]:
    """The error of the gradient, and by how many percent the loss curve differs over 20 and over 300 steps."""
    loss, later = (bug.get(key) and 100 * bug[key] for key in ("loss", "loss_300"))
    numbers = [f"{float(f'{x:.2g}'):g}" if x is not None else "" for x in (bug["gradient"], loss, later)]
    return [numbers[0], bug["end"] or numbers[1], numbers[2]]


def bug_class(kind: str) -> str:
    """The bugs of a class that tests/BUGS.md shows, and what each of them does."""
    stored = {(bug["recipe"], bug["what"]): bug for bug in results("bugs.json")}
    chosen, rows = [bug for bug in mutation.instructive() if bug.kind == kind], []
    for bug in chosen:
        rows.append([f"[`{bug.recipe}`](../{bug.recipe})", bug.what, *effects(stored[bug.recipe, bug.what])])
    head = ["recipe", "bug", "gradient error", "loss differs by, %, in 20 steps", "after 300, %"]
    count = sum(bug.kind == kind for bug in mutation.bugs())
    return f"{len(chosen)} of {count}:\n\n{table(head, rows)}"


def bugs(folder: str) -> str:
    """How many bugs are seeded in a folder's recipes, and the most instructive, at most one of a recipe.

    These are bugs that the loss curve hides, the largest errors first.
    """
    found = [bug for bug in results("bugs.json") if bug["recipe"].startswith(f"{folder}/")]
    wrong, chosen, rows = [bug for bug in found if mutation.mistrains(bug)], [], []
    for bug in sorted(found, key=lambda bug: (not hides(bug), -(bug["gradient"] or 0))):
        if all(bug[key] != other[key] for other in chosen for key in ("recipe", "what")):
            chosen.append(bug)
    for bug in chosen[:SHOWN]:
        name = Path(bug["recipe"]).name
        rows.append([f"[`{name}`](#{anchor(name)})", bug["what"], *effects(bug)[:2]])
    summary = f"{len(found)} bugs; {len(wrong)} train with a gradient or update that is wrong by more than 1 %; "
    summary += f"{sum(map(hides, wrong))} of those move the loss by less than 1 % over 20 steps."
    return f"{summary}\n\n{table(['recipe', 'bug', 'gradient error', 'loss curve differs by, %'], rows)}"


def all_folders() -> str:
    """A row per folder: the title of its page, and its recipes."""
    rows = []
    for folder in FOLDERS:
        title = (ROOT / folder / "README.md").read_text().splitlines()[0].removeprefix("# ")
        links = ", ".join(f"[`{Path(path).stem}`]({path})" for path in recipes_of(folder))
        rows.append([f"[`{folder}`]({folder}/README.md)", f"{title}: {links}"])
    return table(["folder", "idea, and its recipes in reading order"], rows)


def folder_table(folder: str, base: str) -> str:
    """A row per recipe, with its size, error, and speed over the base."""
    rows = []
    for path in recipes_of(folder):
        name, idea = Path(path).name, FAMILY[path].source.split('"""')[1].splitlines()[0]
        diff = f"[{size(path)}](#{anchor(name)})"
        rows.append([f"[`{name}`]({name})", idea, diff, worst_error(path), gain(path, base)])
    return table(["file", "idea", "diff", "error", "speed"], rows)


def facts() -> str:
    """Three claims, each from stored rows alone: training is equal, tests can fail, and how fast recipes are.

    The error is that of gradients; losses after four steps of AdamW are in the table. Speeds are of equal techniques.
    """
    entries = results("equivalence.json")
    entries = [e for e in entries if e["device"] == "cpu" and not e["recipe"].startswith(ROUNDING)]
    ranks = {path: max(e["ranks"] for e in entries if e["recipe"] == path) for path in {e["recipe"] for e in entries}}
    error, found = max(e["errors"]["gradient"] for e in entries), results("bugs.json")
    wrong = [bug for bug in found if mutation.mistrains(bug)]
    equal = f"""* **Equal.** {len(ranks)} files against training in one process: in {len(entries)} cases of tiny models,
        in float64, on up to {max(ranks.values())} ranks ({list(ranks.values()).count(1)} files on one), the worst
        gradient is off by {error:.1e}."""
    tested = f"""* **Tested.** Each of {len(found)} [seeded bugs](tests/BUGS.md) turns a test red. {len(wrong)}
        train with a gradient or update wrong by more than 1 %; {sum(map(hides, wrong))} of these move AdamW's loss
        curve by less than 1 %, in 20 steps of a tiny model."""
    medians, spreads = defaultdict(list), []
    for stored in results("speed.json").values():
        for row in [row for row in stored.get("rows", []) if "rounds" in row]:
            medians[row["file"], row["flags"], stored["gpu"]].append(statistics.median(measured(row, "tokens")))
            spreads.append(apart(row))
    repeats = max(max(tokens) / min(tokens) - 1 for tokens in medians.values())
    names = dict.fromkeys(name for _, name in SAME.values())
    speeds = {name: like_for_like([path for path in SAME if SAME[path][1] == name]) for name in names}
    speeds["FSDP2"] += " (it sends fp32 gradients, `zero3.py` bf16)"
    speeds["torchao"] += f" at {like_for_like(list(SAME)[-2:], 'memory')} times the memory"
    fast = f"""* **Speed.** Tokens/s over those of a library's same technique on the same GPUs:
        {", ".join(map(" ".join, speeds.items()))}. ZBV, another schedule, over torch's 1F1B:
        {spread(ratios("06_pipeline/zbv.py", SAME["06_pipeline/1f1b.py"][0]))}. A row that was stored twice
        differs by up to {100 * repeats:.0f} %, the rounds of a row by {100 * max(spreads):.0f} %."""
    facts = [re.sub(r"\s+", " ", fact.replace("\u00a0", " ")) for fact in (equal, tested, fast)]
    equal, tested, fast = [textwrap.fill(fact, width=118, subsequent_indent="  ") for fact in facts]
    return f"{equal}\n{tested}\n  Find one: `python tests/tools/puzzle.py`\n{fast}"


def first() -> str:
    """What the first command of README.md prints: its first and its last lines."""
    words = re.search(r"torchrun (.+)", (ROOT / "README.md").read_text())[1].split()
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    lines = run.stdout.rstrip().splitlines()
    return "\n".join(["```", lines[0], "      ...", *lines[-3:], "```"])


def layouts() -> str:
    """A table of the stored layouts: speed and memory, as measured and as plan.py predicts them."""
    tests, rows = load("08_4d/test_plan.py"), []
    chunks = {"08_4d/train.py": 1, "08_4d/3d.py": load("08_4d/3d.py").Config.chunks}
    for suite in shown("08_4d"):
        for row in [row for row in suite["rows"] if row["file"] in chunks]:
            cfg = tests.config(row["flags"], suite["gpu"], chunks=chunks[row["file"]])
            found, _, peak = tests.measured(row)
            tokens, memory = tests.PLAN.predict(cfg, tests.TRAIN).tokens, tests.first_rank(cfg)
            speeds = f"{found:,.0f}", f"{tokens:,.0f}", f"{100 * tokens / found - 100:+.1f}"
            rows.append([cfg.preset, f"{cfg.layers}", tests.PLAN.shape(cfg), *speeds, f"{peak:.1f}", f"{memory:.1f}"])
    head = ["model", "layers", "layout", "tokens/s/GPU", "plan.py", "off by, %", "memory, GiB", "plan.py, GiB"]
    return table(head, rows)


def published() -> str:
    """Llama 3's published layouts: model FLOPs utilisation as it was measured, and as plan.py predicts it."""
    plan, rows = load("08_4d/plan.py"), []
    for ours, theirs, mfu in plan.llama():
        words = f"{ours.cfg.gpus:,}", plan.shape(ours.cfg), f"{ours.cfg.seq:,}"
        rows.append([*words, f"{mfu}", f"{100 * theirs:.1f}", f"{100 * ours.mfu:.1f}", f"{ours.memory:.0f}"])
    head = ["GPUs", "layout", "seq", "published MFU, %", "predicted, %", "of what is computed, %", "memory, GiB"]
    return table(head, rows)


def formats(name: str) -> str:
    """All formats, as formats.py computes them, or what tests/tools/precision.py has stored."""
    stored = results("precision.json")
    tables = stored["formats"] | {"all": load("10_mixed_precision/formats.py").table_of_formats()}
    found = [[f"`{row['label']}`", f"{row['dB']:.1f}"] for row in stored["precision"]]
    head, *rows = (tables | {"precision": [["gradient in", "signal to noise, dB"], *found]})[name]
    return table(head, rows)


MAKERS = {make.__name__: make for make in (facts, first, look, family, equivalence, layouts, published)}
OF_FOLDER = {"bugs": bugs, "way": way, "way on": way}
NAMED = {"speed": speed, "kernel": kernel, "formats": formats, "about": lambda name: about(results(*name.split()))}
NAMED["class"] = bug_class
NAMED["text"] = lambda name: f"```\n{(RESULTS / name).read_text()}```"


def made(page: Path, name: str) -> str:
    """Return the text between the markers of this name."""
    folder, (kind, _, rest) = page.parent.name, name.partition(" ")
    if kind == "recipes":
        return folder_table(folder, rest) if folder in FOLDERS else all_folders()
    if kind == "code":
        return code(folder, rest)
    if kind in NAMED:
        return NAMED[kind](rest)
    if name.endswith(".py"):
        return commands(f"{folder}/{name}")
    if name in OF_FOLDER:
        return OF_FOLDER[name](folder)
    return MAKERS[name]()


def generated(page: Path, kept: tuple[str, ...] = ("first",)) -> str:
    """The page with everything between markers made again, but what is kept."""

    def fill(pair: re.Match) -> str:
        name = pair[1]
        return pair[0] if name in kept else f"<!-- {name} -->\n{made(page, name)}\n<!-- /{name} -->"

    text, pairs = re.subn(r"<!-- (.+?) -->\n.*?<!-- /\1 -->", fill, page.read_text(), flags=re.S)
    assert text.count("<!-- ") == 2 * pairs, f"{page} has a marker without its partner"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--first", action="store_true", help="run the first command of README.md")
    kept = () if parser.parse_args().first else ("first",)
    for page in PAGES:
        page.write_text(generated(page, kept))


if __name__ == "__main__":
    main()
