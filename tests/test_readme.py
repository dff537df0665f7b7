"""The README's tables come from the code and from stored results.

python tests/test_readme.py --write     regenerate them between their markers
"""

import ast
import json
import re
import statistics
import sys

import witness
from launch import ROOT, isolated, launch
from test_lineage import FAMILY, difference, lines_of_code, parents

README = ROOT / "README.md"
RESULTS = ROOT / "tests" / "results"
STEPS = [  # the reading path: what to diff, and what one sees
    ("01_single_gpu/train.py", "01_single_gpu/gradient_accumulation.py", "the batch in micro-batches"),
    ("01_single_gpu/train.py", "01_single_gpu/activation_checkpointing.py", "blocks that run forward twice"),
    ("01_single_gpu/activation_checkpointing.py", "01_single_gpu/selective_checkpointing.py", "... except matmuls"),
    ("01_single_gpu/train.py", "02_data_parallel/naive.py", "a slice of the batch, one all-reduce per gradient"),
    ("02_data_parallel/naive.py", "02_data_parallel/overlap.py", "each all-reduce starts while backward goes on"),
    ("02_data_parallel/overlap.py", "02_data_parallel/bucketed.py", "few large all-reduces"),
    ("02_data_parallel/bucketed.py", "02_data_parallel/coalesced.py", "... without copies into flat buckets"),
    ("02_data_parallel/bucketed.py", "02_data_parallel/no_sync.py", "micro-batches, of which the last communicates"),
    ("02_data_parallel/bucketed.py", "02_data_parallel/copy_engines.py", "an all-reduce of copies and sums"),
    ("02_data_parallel/naive.py", "02_data_parallel/diloco.py", "workers that meet every 10 steps"),
    ("02_data_parallel/naive.py", "02_data_parallel/torch_ddp.py", "the same by the library"),
    ("02_data_parallel/torch_ddp.py", "02_data_parallel/accelerate_ddp.py", "... and by the library around it"),
    ("02_data_parallel/naive.py", "03_zero/zero1.py", "each rank updates a part, and gathers the rest"),
    ("03_zero/zero1.py", "03_zero/zero1_overlap.py", "... in units, in low precision, while others compute"),
    ("03_zero/zero1_overlap.py", "03_zero/zero2.py", "gradients add up in shards"),
    ("03_zero/zero2.py", "03_zero/zero3.py", "... and weights are sharded"),
    ("03_zero/zero3.py", "03_zero/hsdp.py", "... inside groups, with replicas across"),
    ("03_zero/zero3.py", "03_zero/zero3_copy_engines.py", "... without taking SMs from compute"),
    ("03_zero/zero2.py", "03_zero/offload.py", "the optimizer on the CPU"),
    ("02_data_parallel/naive.py", "03_zero/torch_fsdp.py", "ZeRO-3 by the library"),
    ("03_zero/torch_fsdp.py", "03_zero/accelerate_fsdp.py", "... and by the library around it"),
    ("01_single_gpu/train.py", "04_tensor_sequence/tensor_parallel.py", "every block split, two all-reduces in each"),
    ("04_tensor_sequence/tensor_parallel.py", "04_tensor_sequence/vocab_parallel.py", "... and embedding, head, loss"),
    (
        "04_tensor_sequence/vocab_parallel.py",
        "04_tensor_sequence/sequence_parallel.py",
        "... and the tokens in between",
    ),
    (
        "04_tensor_sequence/sequence_parallel.py",
        "04_tensor_sequence/async_tensor_parallel.py",
        "transfers overlap with matmuls",
    ),
    ("01_single_gpu/train.py", "04_tensor_sequence/torch_dtensor.py", "the same by the library"),
    ("01_single_gpu/train.py", "06_pipeline/naive.py", "stages: the model cut, not the batch"),
    ("06_pipeline/naive.py", "06_pipeline/afab.py", "several micro-batches in the pipeline at once"),
    ("06_pipeline/afab.py", "06_pipeline/1f1b.py", "the same operations in another order"),
]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown, with numbers to the right."""
    numbers = [all(not row[i] or row[i][0] in "0123456789+" for row in rows) for i in range(len(head))]
    lines = [head, ["---:" if right else "---" for right in numbers], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def link(path: str) -> str:
    return f"[`{path}`]({path})"


def title(path: str) -> str:
    """First line of a recipe's docstring."""
    return ast.get_docstring(ast.parse(FAMILY[path].source)).splitlines()[0].rstrip(".")


def map_of_recipes() -> str:
    """Recipe, what it shows, and the lines that it adds to and takes from its parent."""
    rows = []
    for path in sorted(FAMILY, key=lambda path: bool(parents(FAMILY[path]))):  # the root first
        parent = next(iter(parents(FAMILY[path])), None)
        size = (
            "+{} −{}".format(*difference(parent, path))
            if parent
            else f"{lines_of_code(FAMILY[path].source)} lines of code"
        )
        rows.append([link(path), title(path), f"`{parent.split('/')[1]}`" if parent else "", size])
    return table(["recipe", "what it shows", "parent", "difference"], rows)


def reading_path() -> str:
    """The pairs of files to diff, in order."""
    rows = [[f"`{a}` → `{b}`", what, "+{} −{}".format(*difference(a, b))] for a, b, what in STEPS]
    return table(["`git diff --patience --no-index A B`", "what changes", "lines"], rows)


def equivalence() -> str:
    """Worst errors of each recipe over all its cases."""
    entries, rows = json.loads((RESULTS / "equivalence.json").read_text()), []

    def worst(path: str, device: str, *keys: str) -> str:
        ours = [e["errors"] for e in entries if e["recipe"] == path and e["device"] == device]
        errors = [errors[key] for errors in ours for key in keys if key in errors]
        return f"{max(errors):.1e}" if errors else ""

    for path in FAMILY:
        ours = [entry for entry in entries if entry["recipe"] == path]
        if ours:
            ranks = {device: sorted({e["ranks"] for e in ours if e["device"] == device}) for device in ("cpu", "cuda")}
            bf16 = [e["errors"]["bfloat16"] for e in ours if e["device"] == "cuda"]
            rows.append(
                [
                    f"`{path}`",
                    ", ".join(map(str, ranks["cpu"])),
                    worst(path, "cpu", "gradient"),
                    worst(path, "cpu", "training"),
                    worst(path, "cpu", "gradient history", "training history"),
                    ", ".join(map(str, ranks["cuda"])),
                    worst(path, "cuda", "float32"),
                    f"{max(bf16):.2f}" if bf16 else "",
                ]
            )
    head = [
        "recipe",
        "CPU ranks",
        "gradient",
        "trained weights",
        "loss, norm",
        "GPUs",
        "gradient fp32",
        "bf16, × root's own",
    ]
    return table(head, rows)


def label(row: dict, rows: list[dict]) -> str:
    """The file, and those of its flags that another line of the same file does not have."""
    others = [other["flags"] for other in rows if other["file"] == row["file"]]
    flags = re.findall(r"--\S+ [^-\s]\S*", row["flags"])
    own = [flag for flag in flags if not all(f"{flag} " in f"{other} " for other in others)]
    alone = ", on each GPU alone, the slowest" if "each" in row["rounds"][0] else ""
    return f"`{' '.join([row['file'], *own])}`{alone}"


def exposed(row: dict) -> str:
    """Exposed communication of the rank that computes longest: the others also wait for it."""
    if "profile" not in row:
        return ""
    slowest = max(row["profile"], key=lambda ms: ms["compute"])
    return f"{slowest['exposed'] / slowest['step']:.1%}"


def speed() -> str:
    """A table per suite: median and range of the rounds, and ratios to the first line, where the work is the same."""
    file, parts = RESULTS / "speed.json", []
    for name, suite in (json.loads(file.read_text()) if file.exists() else {}).items():
        if name == "collectives":
            continue
        rows, first = [], suite["rows"][0]
        for i, row in enumerate(suite["rows"]):
            tokens, mfu, memory = (measured(row, key) for key in ("tokens", "mfu", "memory"))
            median, pipeline = statistics.median(tokens), row.get("pipeline")
            compared = i < suite["alike"] > 1
            rows.append(
                [
                    label(row, suite["rows"]),
                    f"{median:,.0f}",
                    f"{min(tokens):,.0f} to {max(tokens):,.0f}" if len(tokens) > 1 else "",
                    f"{median / statistics.median(measured(first, 'tokens')):.3f}" if compared else "",
                    f"{statistics.median(mfu):.1f} %" if mfu else "",
                    f"{max(memory):.1f} GiB" if memory else "",
                    exposed(row),
                    f"{pipeline['idle']:.1%} ({pipeline['formula']:.1%})" if pipeline else "",
                    "{forward:.2f} + {backward:.2f}".format(**row["block_ms"]) if "block_ms" in row else "",
                ]
            )
        head = [
            "file",
            "tokens/s/GPU",
            "in all rounds",
            "× first",
            "MFU",
            "memory",
            "exposed communication",
            "idle (formula)",
            "block, ms forward + backward",
        ]
        filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
        text = table([head[i] for i in filled], [[row[i] for i in filled] for row in rows])
        flags = "\n".join(f"{row['file']:42} {row['flags']}" for row in suite["rows"])
        note = f"{suite['gpu']}, torch {suite['torch']}, {suite['date']}, `{suite['command']}`"
        note += f", code of {suite['commit']}" if "commit" in suite else ""
        note += f" ({suite['note']})" if "note" in suite else ""
        details = f"<details><summary>flags</summary>\n\n```\n{flags}\n```\n\n</details>"
        parts.append(f"{note}\n\n{text}\n\n{details}")
    return "\n\n".join(parts)


def collectives() -> str:
    """The bandwidth table of collectives.py, as it was printed."""
    stored = json.loads((RESULTS / "speed.json").read_text()).get("collectives")
    if not stored:
        return ""
    note = f"{stored['gpu']}, torch {stored['torch']}, {stored['date']}, `{stored['command']}`"
    return f"{note}\n\n```\n{stored['table'].rstrip()}\n```"


def measured(row: dict, key: str) -> list[float]:
    """The numbers of the rounds; none, an empty cell, where there is no measurement."""
    return [numbers[key] for numbers in row["rounds"] if numbers[key] is not None]


def generated(text: str) -> str:
    """The README with its tables regenerated."""
    for name, make in dict(
        map=map_of_recipes, reading=reading_path, equivalence=equivalence, speed=speed, collectives=collectives
    ).items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        assert len(pattern.findall(text)) == 1, f"the README needs one pair of markers for {name}"
        text = pattern.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)
    return text


def test_tables_are_up_to_date():
    assert README.read_text() == generated(README.read_text()), "run python tests/test_readme.py --write"


def test_commands_name_files_that_exist():
    for path in re.findall(
        r"(?:torchrun|python|git diff|sbatch)[^\n`]*?((?:\d\d_\w+|tests)/\w+\.py)", README.read_text()
    ):
        assert (ROOT / path).is_file(), path


def test_transformers_loads_what_a_recipe_saves(tmp_path, monkeypatch):
    """The page's Python, as it stands: the loss is that with which --init continues."""
    monkeypatch.chdir(tmp_path)
    shape = "--device cpu --layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 4"
    launch("01_single_gpu/train.py", 1, f"{shape} --steps 2 --save {tmp_path}/out.safetensors")
    ours = launch("01_single_gpu/train.py", 1, f"{shape} --steps 1 --init {tmp_path}/out.safetensors").history[0][0]
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)

    def theirs():
        names = {}
        exec(code, names)
        return witness.loss_of(names["model"], shape)[1].item()

    assert abs(isolated(theirs) / ours - 1) < 1e-5  # float32: as in equivalence.py


def test_every_folder_is_on_the_reading_path():
    assert {path.split("/")[0] for path in FAMILY} == {p.split("/")[0] for a, b, _ in STEPS for p in (a, b)}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    README.write_text(generated(README.read_text()))
