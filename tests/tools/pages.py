"""Write the generated parts of all pages: what stands between <!-- name --> and <!-- /name -->.

    python tests/tools/pages.py            rewrite them from the code and from what tests/results/ holds
    python tests/tools/pages.py --first    also run the first command of README.md, and show what it prints

Prose is written by hand, in the pages. A number on a page comes from here.
"""

import argparse
import difflib
import functools
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

import schedules
from curves import AUTOCAST, lowest_loss, time_to_loss
from launch import load, once
from test_lineage import FAMILY, ROOT, TRAINING, clashes, lines_of_code, own_lines, parents
from test_lineage import difference as count_difference

RESULTS = ROOT / "tests" / "results"
IDEAS = {  # the reading order, and what a recipe adds to its parent
    "01_single_gpu/train.py": "the root: a Llama, AdamW, one GPU",
    "01_single_gpu/gradient_accumulation.py": "the batch in micro-batches",
    "01_single_gpu/activation_checkpointing.py": "blocks run forward twice, and keep one tensor",
    "01_single_gpu/selective_checkpointing.py": "... all but matmuls and attention",
    "01_single_gpu/chunked_loss.py": "head and loss by chunks: the logits never exist as a whole",
    "01_single_gpu/document_mask.py": "tokens attend within their document",
    "01_single_gpu/tied_embeddings.py": "one matrix embeds the tokens and computes the logits",
    "01_single_gpu/muon.py": "matrices move along their orthogonalised momentum",
    "01_single_gpu/lora.py": "weights are frozen in 2 bytes, narrow matrices beside them are trained",
    "01_single_gpu/memory.py": "predict the memory of a run, then measure it",
    "01_single_gpu/profiling.py": "where the time of a step goes",
    "02_data_parallel/collectives.py": "all-reduce from send and receive, timed",
    "02_data_parallel/naive.py": "each rank a part of the batch, one all-reduce per gradient",
    "02_data_parallel/overlap.py": "each all-reduce starts while backward goes on",
    "02_data_parallel/bucketed.py": "few large all-reduces",
    "02_data_parallel/coalesced.py": "... without copies into buckets",
    "02_data_parallel/no_sync.py": "micro-batches; only the last one communicates",
    "02_data_parallel/copy_engines.py": "an all-reduce of copies, which takes no SMs",
    "02_data_parallel/diloco.py": "workers that meet every few steps",
    "02_data_parallel/hang.py": "name the rank that does not come to a collective",
    "02_data_parallel/torch_ddp.py": "the same by torch's DistributedDataParallel",
    "02_data_parallel/accelerate_ddp.py": "... by Accelerate around it",
    "03_zero/zero1.py": "optimizer state in shards",
    "03_zero/zero1_masters.py": "... bf16 weights over fp32 master shards",
    "03_zero/zero1_overlap.py": "... in units, beside compute, with micro-batches",
    "03_zero/zero2.py": "gradients in shards",
    "03_zero/zero3.py": "weights in shards",
    "03_zero/zero3_copy_engines.py": "... moved without taking SMs",
    "03_zero/hsdp.py": "shards inside a node, replicas across nodes",
    "03_zero/offload.py": "optimizer state and step on the CPU",
    "03_zero/muon.py": "ZeRO-1 whose shards are whole matrices, for Muon",
    "03_zero/lora.py": "frozen weights in shards, gathered and never reduced",
    "03_zero/torch_fsdp.py": "ZeRO-3 by torch's fully_shard",
    "03_zero/accelerate_fsdp.py": "... by Accelerate around it",
    "04_tensor_sequence/tensor_parallel.py": "every matmul of a block split, two all-reduces",
    "04_tensor_sequence/vocab_parallel.py": "... embedding, head and loss, too",
    "04_tensor_sequence/sequence_parallel.py": "... and the tokens in between",
    "04_tensor_sequence/async_tensor_parallel.py": "transfers overlap with the matmuls that need them",
    "04_tensor_sequence/lora.py": "... with adapters, of which one matrix is split",
    "04_tensor_sequence/torch_dtensor.py": "the same by torch's DTensor",
    "05_context_ring/blockwise.py": "attention by blocks of queries and keys, on one GPU",
    "05_context_ring/all_gather_kv.py": "tokens split, attention gathers keys and values",
    "05_context_ring/ring.py": "... which pass from rank to rank instead",
    "05_context_ring/striped.py": "... every cp-th token to a rank, so that none idles",
    "05_context_ring/zigzag.py": "... or an early and a late part, with fewer masks",
    "05_context_ring/documents.py": "... within documents, wherever they begin and end",
    "05_context_ring/ulysses.py": "tokens swapped for heads around attention",
    "05_context_ring/usp.py": "... inside a host, a zigzag ring across hosts",
    "05_context_ring/torch_context_parallel.py": "the same by torch's context_parallel",
    "06_pipeline/naive.py": "the layers cut into stages",
    "06_pipeline/afab.py": "several micro-batches in the pipeline at once",
    "06_pipeline/1f1b.py": "the same operations in an order that frees memory",
    "06_pipeline/interleaved.py": "several stages per rank, for shorter gaps",
    "06_pipeline/split_backward.py": "backward in two: what others wait for goes first",
    "06_pipeline/zero_bubble.py": "... and the rest fills the gaps",
    "06_pipeline/zbv.py": "... placed in a V, and backward fills the gaps",
    "06_pipeline/dualpipe.py": "... a pipeline in each direction, weights twice",
    "06_pipeline/tied_embeddings.py": "1F1B whose first and last stage hold one matrix",
    "06_pipeline/torch_pipelining.py": "the same by torch.distributed.pipelining",
    "07_expert/moe.py": "many MLPs; a router sends each token to a few",
    "07_expert/expert_parallel.py": "experts shared out, tokens travel to them and back",
    "07_expert/auxiliary_loss.py": "... kept equally busy by a loss",
    "07_expert/bias_balancing.py": "... or by biases, without one",
    "07_expert/node_limited.py": "DeepSeek-V3's routing: experts on few nodes, each of which a token reaches once",
    "07_expert/capacity.py": "a fixed number of slots per expert; rows that find none are dropped",
    "07_expert/overlap.py": "half of the batch travels while the other half computes",
    "07_expert/slots.py": "a fixed number of slots that grows when rows find none: the CPU never waits",
    "07_expert/symmetric_memory.py": "... and a kernel writes each row straight to its expert",
    "08_4d/2d.py": "the first mix: ZeRO over dp, tensor and sequence parallelism over tp",
    "08_4d/3d.py": "... on the stages of an interleaved pipeline",
    "08_4d/train.py": "... and context parallelism: four axes on one mesh",
    "08_4d/moe.py": "... and experts, shared out over part of it",
    "08_4d/checkpoint.py": "saved in one layout, resumed in any other, killed at any time",
    "08_4d/plan.py": "which layout: memory and time of all of them, predicted",
    "09_kernels/elementwise.py": "a first kernel: ELU, in one read and one write",
    "09_kernels/coalescing.py": "neighbouring lanes read neighbouring addresses",
    "09_kernels/softmax.py": "rows in registers, and rows that are too long for that",
    "09_kernels/rmsnorm.py": "residual add and norm together, weight gradient without atomics",
    "09_kernels/swiglu.py": "backward writes over its inputs",
    "09_kernels/rope.py": "queries and keys rotated where they are",
    "09_kernels/cross_entropy.py": "the gradient over the logits; logits a few rows at a time",
    "09_kernels/adamw.py": "clip, step and bf16 copy of hundreds of parameters in two launches",
    "09_kernels/train.py": "the root, with the kernels of a Llama pasted in",
    "09_kernels/tiling.py": "each element that is loaded serves a whole tile",
    "09_kernels/coarsening.py": "more elements per thread, until registers run out",
    "09_kernels/matmul.py": "from a tile per program to what cuBLAS reaches, rung by rung",
    "09_kernels/flash_attention.py": "attention whose scores never reach memory",
    "09_kernels/flash_attention_gluon.py": "warps with different jobs; gradients added in a fixed order",
    "09_kernels/grouped_matmul.py": "the matmuls of all experts in one launch",
    "09_kernels/fp8_matmul.py": "8 bits per element, and scales for a tensor, a row or a block",
    "09_kernels/divergence.py": "a few elements need far more steps than the others",
    "10_mixed_precision/formats.py": "4 to 32 bits: range, resolution, and what is left of real gradients",
    "10_mixed_precision/bf16.py": "bf16 weights that are written once per step, from fp32 masters",
    "10_mixed_precision/fp16_loss_scaling.py": "the same in fp16, whose small gradients need a scale",
    "10_mixed_precision/fp8_tensorwise.py": "matmuls in 8 bits, with the scale of the tensor at hand",
    "10_mixed_precision/fp8_delayed_scaling.py": "scales from earlier steps: a tensor is read once",
    "10_mixed_precision/fp8_blockwise.py": "a scale per 128 elements, or 128 × 128: DeepSeek-V3's",
    "10_mixed_precision/fp8_zero3.py": "ZeRO-3 that gathers blocks in fp8: half the bytes",
    "10_mixed_precision/stochastic_rounding.py": "bf16 weights and moments without masters: 8 bytes per parameter",
    "10_mixed_precision/fp8_stochastic_rounding.py": "both: an 8B model on one GPU, in fp8",
    "10_mixed_precision/low_memory.py": "an 8B model on 80 GB, with selective checkpointing",
    "10_mixed_precision/fp8_low_memory.py": "the same in fp8: weights are cast when they are used",
}
FOLDERS = {  # and what each teaches
    "01_single_gpu": "the program that all others change, its memory and its time",
    "02_data_parallel": "each rank a part of the batch; sum gradients while backward runs",
    "03_zero": "optimizer state, gradients and weights in shards, gathered when needed",
    "04_tensor_sequence": "every matmul split, then the tokens between matmuls",
    "05_context_ring": "long sequences split; only attention communicates",
    "06_pipeline": "layers in stages, and schedules that keep all of them busy",
    "07_expert": "many MLPs shared out over ranks; tokens travel to a few of them",
    "08_4d": "all of it on one mesh, planned, saved and resumed",
    "09_kernels": "what a GPU does in a step, in Triton: passes over memory, matmuls, attention",
    "10_mixed_precision": "which numbers may have 16 bits or 8, and which must not",
}
SUITES = {  # of tests/results/speed.json, in the order of the pages: a sentence for each
    "single": "One GPU, against the Llama of `transformers`, compiled, with the same AdamW.",
    "chunked": "Llama-3.2-1B, four sequences of 8,192 tokens: logits of 128,256 columns.",
    "documents": "Llama-3.2-1B, rows of 8,192 tokens. With `--eos 0` a document has 1,000 on average, without it a "
    "row is one. MFU counts scores between documents, too.",
    "muon": "SmolLM-1.7B, 16,384 tokens per step: too few for Newton-Schulz to be cheap.",
    "lora": "Llama-3.1-8B, frozen in bf16, and adapters of rank 16.",
    "data_parallel": "Enough work per GPU to hide communication: four sequences each.",
    "larger_buckets": "Larger buckets suit these GPUs better, so here both sides have them.",
    "strong_scaling": "One sequence per GPU: too little work to hide communication behind.",
    "zero": "The stages, against `fully_shard`, on a model that would fit without them.",
    "zero_two": "The same on two GPUs.",
    "zero_more": "Accelerate, the CPU's optimizer, and what each GPU reaches alone.",
    "zero_8b": "A model that does not fit without sharding, one sequence per GPU.",
    "zero_8b_two": "The same with two sequences per GPU.",
    "one_gpu": "A world of one: what the recipes cost where nothing is sent.",
    "muon_two": "Muon on two GPUs, four sequences of 2,048 tokens each, beside AdamW.",
    "lora_two": "Llama-3.1-8B on two GPUs, frozen weights in shards, two sequences of 4,096 tokens each.",
    "tensor": "A whole model, split over all GPUs.",
    "tensor_few_layers": "Four layers: async_tensor_parallel.py idles for up to a quarter of so short a step.",
    "context": "One sequence of 32,768 tokens for all GPUs; in the last line, for one GPU alone.",
    "context_more": "The same with other recipes, against the library's default.",
    "context_64k": "One sequence of 65,536 tokens.",
    "context_128k": "One sequence of 131,072 tokens, and half as many layers.",
    "context_documents": "One sequence of 65,536 tokens. `--eos 0`: documents of 1,000 on average; MFU counts scores "
    "between them, which are not computed, so it is too high.",
    "context_four": "One sequence of 32,768 tokens for four GPUs.",
    "context_million": "A million tokens: one layer and a small vocabulary, so that they fit.",
    "pipeline": "The schedules, against torch's 1F1B, whole model, 16 micro-batches of one sequence.",
    "pipeline_two": "The same on two GPUs: 13 layers on the first, 11 and the head on the second.",
    "pipeline_more": "Two more, against split_backward.py.",
    "pipeline_twins": "Torch's schedules among themselves; ZBV is not compiled, since torch cannot.",
    "four": "Two schedules. The first line trains another model and batch: compare its MFU alone.",
    "expert": "OLMoE's shape with 4 layers, against expert_parallel.py, 16,384 tokens per GPU.",
    "expert_more": "The same with 32,768 tokens per GPU.",
    "expert_four": "The same on four GPUs, with 8,192 tokens each.",
    "olmoe": "OLMoE with all 16 layers on two GPUs, 16,384 tokens each. The last line trains on text: the router "
    "makes some experts busier than others.",
    "layouts_8b": "Llama-3.1-8B on two GPUs, in every way to split them, against ZeRO alone.",
    "layouts_8b_few_layers": "The same with 8 layers, and the exposed communication, from a profile.",
    "layouts_four": "Four GPUs, 8 layers, in every way to split them. 3d.py has two stages per GPU; with `--pp 4` "
    "each of them has one layer, and the last one also the head, which costs two.",
    "layouts_smollm": "SmolLM-1.7B on two GPUs, 16,384 tokens per GPU and micro-batch.",
    "kernels_smollm": "SmolLM-1.7B, four sequences of 4,096 tokens, against the root, compiled.",
    "kernels_llama3_1b": "Llama-3.2-1B, four sequences of 8,192 tokens: the vocabulary is larger.",
    "mixed_smollm": "SmolLM-1.7B, four sequences of 4,096 tokens, compiled.",
    "mixed_two": "SmolLM-1.7B, two micro-batches, the default, against gradient_accumulation.py.",
    "fp8_torchao": "The same with one micro-batch, against torchao's linears: in the root, and in FSDP2 on one GPU.",
    "mixed_llama3_8b": "Llama-3.1-8B, one sequence of 8,192 tokens, on one GPU, compiled.",
    "low_memory": "Llama-3.1-8B on one GPU with 80 GB, one sequence of 8,192 tokens.",
    "low_memory_7b": "Llama 2 7B's shape on one GPU with 80 GB, twelve sequences of 1,024 tokens.",
    "fp8_zero3": "SmolLM-1.7B on two GPUs, four sequences of 4,096 tokens each, in shards.",
    "fp8_zero3_four": "Llama-3.1-8B on four GPUs, two sequences of 8,192 tokens each.",
}
NO_TABLE = {"zero_stages", "pipeline_parts", "fp8_zero3_8b"}  # for a picture, the predictions, and an aside
NO_TABLE |= {"collectives", "context_attention", "expert_layer"}  # these have tables of their own
ELSEWHERE = {"one_gpu": "03_zero"}  # a suite that is not on the page of the last folder of which it has a file
BASELINES = {  # where no library trains the same: what speed is over
    "01_single_gpu": "01_single_gpu/train.py",
    "05_context_ring": "05_context_ring/zigzag.py",
    "08_4d": "03_zero/zero1_overlap.py",
    "07_expert": "07_expert/expert_parallel.py",
    "09_kernels": "01_single_gpu/train.py",
    "10_mixed_precision": "01_single_gpu/train.py",
    "10_mixed_precision/fp8_zero3.py": "03_zero/zero3.py",
}
SAME = {  # recipes of which a library has the very technique, its twin, and what README.md calls it
    "02_data_parallel/bucketed.py": ("02_data_parallel/torch_ddp.py", "DDP"),
    "03_zero/zero3.py": ("03_zero/torch_fsdp.py", "FSDP2"),
    "04_tensor_sequence/sequence_parallel.py": ("04_tensor_sequence/torch_dtensor.py", "DTensor"),
    "05_context_ring/zigzag.py": ("05_context_ring/torch_context_parallel.py", "`context_parallel`"),
    "06_pipeline/1f1b.py": ("06_pipeline/torch_pipelining.py", "torch's 1F1B"),
    "10_mixed_precision/fp8_tensorwise.py": ("tests/tools/torchao_linears.py", "torchao"),
    "10_mixed_precision/fp8_zero3.py": ("tests/tools/torchao_fsdp.py", "torchao"),
}
ROUNDING = "10_mixed_precision"  # in float64, where errors are compared, what its files teach is off
SEEN = 0.05, 0.01  # difference of the loss curve that everybody sees, and that nobody sees
NOTHING = 1e-10  # a difference below is rounding
WIDE = 84  # characters of a line that a page shows as a whole
IN_SIGHT, ON_PAGE = 40, 160  # lines of a diff that are in sight, and that are on a page at all
WIDTH = 88  # columns of code that a page shows
SHOWN = 5  # so many bugs are on a folder's page; tests/BUGS.md has all
OURS = "moe.py with bf16 weights, compiled"  # the layer of experts with which others are compared
WRITTEN_HERE = "ours", "Triton", "Gluon"  # contenders of a kernel file that are the file's own
LADDERS = "coalescing", "coarsening", "divergence", "tiling"  # kernel files whose rungs have names of their own
CHOSEN = {"divergence": "share 0.1250 at random"}  # where the first rows are no use
SUMMED = re.compile(r", (forward|backward)$")
ROUNDED = "gradients of weights", "gradients of matmul outputs"  # tables of formats.py
LONG = "coalescing", "tiling", "coarsening", "cross_entropy", "adamw"  # a row for each that is compared
ON_PAGE_ROWS = {  # of what is measured, the rows on the folder's page; tests/KERNELS.md has all
    "elementwise": r"2\^(10|19|22|28) ",
    "coalescing": "float32",
    "grouped_matmul": "OLMoE, .*, gate and up, .*sustained",
    "flash_attention": "8192 .*sustained",
    "flash_attention_gluon": "8192 .*sustained",
    "fp8_matmul": "14336 x 4096, .*sustained",
    "divergence": r"0\.(0010|1250|5000) (at random|together)$",
}
RUNGS = {  # of the way to cuBLAS: file: what is measured, and the rungs in order
    "tiling": ("4096 x 4096 x 4096, float32", ("rows", "tiles", "dot")),
    "coarsening": ("4096 x 4096 x 4096, float32", ("16 x 16", "64 x 64", "256 x 128")),
    "matmul": ("16384 x 4096 -> 14336, forward", "blocks ordered pipelined tuned descriptors persistent".split()),
}
TOGETHER = """02_data_parallel/bucketed 03_zero/zero3 04_tensor_sequence/sequence_parallel 05_context_ring/zigzag
06_pipeline/1f1b 06_pipeline/zbv 07_expert/expert_parallel 08_4d/checkpoint 09_kernels/rmsnorm 09_kernels/swiglu
09_kernels/cross_entropy 09_kernels/flash_attention 09_kernels/adamw 10_mixed_precision/fp8_tensorwise""".split()
EVERYWHERE = {"clip_gradients", "evaluate"}  # each layout has its own
MORE = {  # what else a row of a kernel may hold: the column, and how it is written
    "GiB": ("peak, GiB", "{:.2f}"),
    "steps": ("steps per useful one", "{}"),
    "read": ("sectors read", "{}×"),
    "written": ("sectors written", "{}×"),
    "elements": ("elements per thread", "{}"),
    "registers": ("registers per thread", "{}"),
    "spills": ("words spilled", "{}"),
    "loaded": ("GB loaded", "{:.2f}"),
    "differ": ("repeats that differ, of 100", "{}"),
}
NAMES = (  # of contenders that say more: coalescing.py's excess of sectors, divergence.py's steps for a useful one
    re.compile(r"(?P<by>\w+) (?P<read>\d+)x, (?P<written>\d+)x$"),
    re.compile(r"(?P<by>\w+), (?P<steps>[\d.]+)x the steps$"),
)
MARKS = {f"01_single_gpu/{name}.py": " †" for name in ("train", "document_mask", "tied_embeddings", "muon", "lora")}
MARKS |= {"02_data_parallel/diloco.py": " ‡"}  # what the pages say of their errors
NOT_COMPARED = {  # measured, on the folder's page, but where it is not what the recipe is for
    "03_zero/zero2.py",  # with one micro-batch, where it does what zero1_overlap.py does
    "03_zero/hsdp.py",  # inside one node
    "03_zero/offload.py",  # older code, with one micro-batch: nothing hides the CPU's step
}
UNIT = r"%|dB|ms|[KMGT]i?B(?:/s)?|TFLOP/s"
UNITS = re.compile(rf"[-+]?[\d,.]+(?: to [\d,.]+)?([ \xa0]?(?:{UNIT}))$")  # of a number
KEPT = re.compile(r"(`[^`]*`|\]\([^)]*\))")  # of a cell, that somebody may copy: code, and where a link leads
# what no line may end within, as GitHub breaks lines at spaces and behind hyphens
HYPHEN = re.compile(r"(?<![\w.])-(?=\d)|(?<=\de)-(?=\d)|(?<=micro)-(?=batch)")
SPACE = re.compile(
    rf" (?=[−†‡])|(?<=\d) (?=to \d)|(?<=\d to) (?=\d)|(?<=\d) (?=(?:{UNIT}|layers|chunks|micro.batches)(?!\w))"
    r"|(?<=[dctp]p) (?=\d)|(?<=×) "
    r"|(?<=[\d*%]) (?=[·+(])|(?<=[·+]) (?=[\d*])"
)


def tied(cell: str) -> str:
    """The cell with hyphens and spaces within its numbers that do not break, but not within code."""
    parts = KEPT.split(cell)
    parts[::2] = [SPACE.sub("\u00a0", HYPHEN.sub("\u2011", part)) for part in parts[::2]]
    return "".join(parts)


def table(head: list[str], rows: list[list[str]], labels: int = 0) -> str:
    """Markdown, without empty columns; a unit that every number of a column has is in its head alone.

    Numbers stand to the right; the first columns may be labels, which begin with numbers and are none.
    """
    columns = []
    for i, (title, *cells) in enumerate(zip(head, *rows)):
        right = i >= labels and all(re.match(r"\**\[?[-+]?[0-9]|-?$", cell) for cell in cells)
        found = [UNITS.match(cell) for cell in cells if cell not in ("", "0")]
        units = {match[1] if match else None for match in found}
        if len(units) == 1 and (unit := units.pop()):
            title, cells = f"{title},\u00a0{unit.strip()}", [cell.removesuffix(unit) for cell in cells]
        if any(cells):
            columns.append([tied(title), "---:" if right else "---", *map(tied, cells)])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in zip(*columns))


def folded(summary: str, text: str) -> str:
    """Text that shows once its summary is clicked."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def results(name: str) -> list | dict:
    return json.loads((RESULTS / name).read_text())


def both_cards(name: str) -> list[dict]:
    """The results of a suite, one per card: that of the H200 before that of the H100."""
    found = [stored for key, stored in results("speed.json").items() if key.split(" on ")[0] == name]
    return sorted(found, key=card, reverse=True)


def card(stored: dict) -> str:
    return stored["gpu"].split()[3]


def about(stored: dict, *versions: str) -> str:
    """Where, with what, when and how something was measured."""
    return ", ".join([stored["gpu"], f"torch {stored['torch']}", *versions, stored["date"], f"`{stored['command']}`"])


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def section(path: str, page: str = "") -> str:
    """A link to the section of a recipe on its folder's page, which is `page` from where the link stands."""
    name = Path(path).name
    return f"[`{name}`]({page}#{anchor(name)})"


def first_parent(path: str) -> str | None:
    """The parent with which a recipe is compared."""
    return next(iter(parents(FAMILY[path])), None)


difference = once(count_difference)  # runs git


def size(path: str) -> str:
    """Lines of code that a recipe adds to its parent and takes from it, or all of its own."""
    if parent := first_parent(path):
        return "+{} −{} lines".format(*difference(parent, path))
    return f"{lines_of_code(FAMILY[path].source)}\u00a0lines"


def commands(path: str) -> str:
    """The diff with the parent, and the first command of the recipe's header."""
    parent = first_parent(path)
    diff = f"git diff --patience --no-index {parent} {path}\n" if parent else ""
    if len(diff) > WIDE:
        diff = diff.replace(f"{parent} ", f"{parent} \\\n    ")
    run = re.search(r"^Run:\s+(.+)$", FAMILY[path].source, re.M)[1]
    code = f"```bash\n{diff}{run}\n```\n\n{size(path)} of code"
    lines = lesson(path, 1)
    if not 0 < len(lines) <= ON_PAGE:
        return code
    block = "\n".join(["```diff", *lines, "```"])
    if len(lines) > IN_SIGHT:
        block = folded("The lesson, as a diff", block)
    return f"{code}\n\n{block}"


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


def recipes_of(folder: str) -> list[str]:
    return [path for path in IDEAS if path.startswith(f"{folder}/")]


def all_folders() -> str:
    """A row per folder: its recipes, the largest of their errors, and the speed of the library's technique."""
    rows = []
    for folder, idea in FOLDERS.items():
        paths = recipes_of(folder)
        links = ", ".join(f"[`{Path(path).stem}`]({path})" for path in paths)
        rows.append([f"[`{folder}`]({folder}/README.md)", f"{idea}: {links}", worst_error(paths), like_for_like(paths)])
    return table(["folder", "idea, and its recipes in reading order", "error", "speed"], rows)


def facts() -> str:
    """Three claims, each from stored rows alone: training is equal, tests can fail, and how fast recipes are.

    The error is that of gradients; losses after four steps of AdamW are in the table. Speeds are of equal techniques.
    """
    entries = results("equivalence.json")
    entries = [e for e in entries if e["device"] == "cpu" and not e["recipe"].startswith(ROUNDING)]
    ranks = {path: max(e["ranks"] for e in entries if e["recipe"] == path) for path in {e["recipe"] for e in entries}}
    error, found = max(e["errors"]["gradient"] for e in entries), results("bugs.json")
    wrong = [bug for bug in found if mistrains(bug)]
    equal = f"""* **Equal.** {len(ranks)} files against training in one process: in {len(entries)} cases of tiny models,
        in float64, on up to {max(ranks.values())} ranks ({list(ranks.values()).count(1)} files on one), the worst
        gradient is off by {error:.1e}."""
    tested = f"""* **Tested.** Each of {len(found)} [seeded bugs](tests/BUGS.md) turns a test red. {len(wrong)}
        train with a gradient or update wrong by more than 1 %; {sum(map(hides, wrong))} of these move AdamW's loss
        curve by less than 1 %, in 20 steps of a tiny model."""
    rows = [row for stored in results("speed.json").values() for row in stored.get("rows", []) if "rounds" in row]
    names = dict.fromkeys(name for _, name in SAME.values())
    speeds = {name: like_for_like([path for path in SAME if SAME[path][1] == name]) for name in names}
    speeds["FSDP2"] += " (it sends fp32 gradients, `zero3.py` bf16)"
    speeds["torchao"] += f" at {like_for_like(list(SAME)[-2:], 'memory')} times the memory"
    fast = f"""* **Speed.** Tokens/s over those of a library's same technique on the same GPUs:
        {", ".join(map(" ".join, speeds.items()))}. ZBV, another schedule, over torch's 1F1B:
        {spread(ratios("06_pipeline/zbv.py", SAME["06_pipeline/1f1b.py"][0]))}. A row that was stored twice
        differs by up to {100 * repeats():.0f} %, the rounds of a row by {100 * max(map(apart, rows)):.0f} %."""
    fill = functools.partial(textwrap.fill, width=118, subsequent_indent="  ", break_on_hyphens=False)
    equal, tested, fast = (fill(tied(re.sub(r"\s+", " ", fact))) for fact in (equal, tested, fast))
    return f"{equal}\n{tested}\n  Find one: `python tests/tools/puzzle.py`\n{fast}"


def like_for_like(paths: list[str], key: str = "tokens") -> str:
    """Speed (or memory) over that of the library's same technique, in all stored suites."""
    return spread([ratio for path in paths if path in SAME for ratio in ratios(path, SAME[path][0], key)])


def spread(found: list[float]) -> str:
    """The least and the largest of these."""
    return " to ".join(sorted({f"{pick(found):.2f}" for pick in (min, max)})) if found else ""


def repeats() -> float:
    """How far apart the medians of a row are that two suites have, of the same file and flags on the same GPUs."""
    medians = defaultdict(list)
    for stored in results("speed.json").values():
        for row in [row for row in stored.get("rows", []) if "rounds" in row]:
            medians[row["file"], row["flags"], stored["gpu"]].append(statistics.median(measured(row, "tokens")))
    return max(max(tokens) / min(tokens) - 1 for tokens in medians.values())


def folder_table(folder: str) -> str:
    """A row per recipe, with its size, error and speed; the diff is linked to where the page names the parent."""
    rows = []
    for path in recipes_of(folder):
        parent, name = first_parent(path), Path(path).name
        diff = f"[{size(path).removesuffix(' lines') if parent else size(path)}](#{anchor(name)})"
        ours = ratio(path) or gain(path) or spread(kernel_gains(path))
        rows.append([f"[`{name}`]({name})", IDEAS[path], diff, worst_error([path]), ours])
    return table(["file", "idea", "diff", "error", "speed"], rows)


def way(folder: str) -> str:
    folders = list(FOLDERS)
    at = folders.index(folder)
    before = [f"← [{name}](../{name}/README.md)" for name in folders[:at][-1:]]
    after = [f"[{name}](../{name}/README.md) →" for name in folders[at + 1 :][:1]]
    return " · ".join([*before, "[all folders](../README.md#the-recipes)", *after])


def worst_error(paths: list[str]) -> str:
    """The largest relative error of any tensor, loss or norm, in float64 on CPUs, over all cases of these recipes."""
    paths = [path for path in paths if not path.startswith(ROUNDING)]
    entries = [e for e in results("equivalence.json") if e["recipe"] in paths and e["device"] == "cpu"]
    errors = [(error, entry["recipe"]) for entry in entries for error in entry["errors"].values()]
    if not errors:
        return ""
    worst, path = max(errors)
    return (f"{worst:.0e}" if worst else "0") + MARKS.get(path, "")


def suites(folder: str) -> dict[str, dict]:
    """The suites whose tables a folder's page shows, in order: of its files, and none of a later folder."""
    found, order = [], list(SUITES)
    for name, stored in results("speed.json").items():
        suite = name.split(" on ")[0]  # on another card than that of the main table
        if suite not in NO_TABLE:
            last = max(FOLDERS.keys() & {row["file"].split("/")[0] for row in stored["rows"]})
            if ELSEWHERE.get(suite, last) == folder:
                found.append((order.index(suite) if suite in order else len(order), name, stored))
    return {name: stored for _, name, stored in sorted(found, key=lambda entry: entry[:2])}


def ratio(path: str, base: str | None = None) -> str:
    """Speed over that of base, or of the library twin, in the suites of the folder's page."""
    return "" if path in NOT_COMPARED else spread(ratios(path, base, stored=suites(path.split("/")[0])))


def ratios(path: str, base: str | None = None, key: str = "tokens", stored: dict | None = None) -> list[float]:
    """Tokens/s (or memory) over those of base, or of the library twin, at best settings, where both took turns.

    A number for each suite. Accelerate, which wraps the twin, is compared with the twin at the same settings.
    """
    found = []
    for suite in (stored or results("speed.json")).values():
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


def gain(path: str) -> str:
    """Tokens/s over those of the folder's baseline, where it has one."""
    base = BASELINES.get(path, BASELINES.get(path.split("/")[0], path))
    return ratio(path, base) if base != path else ""


def contenders(name: str) -> list[dict]:
    """The stored rows of a kernel file, without those of quantization alone. `mine`: the file's own kernel."""
    rows, file = results("kernels.json").get(name, {"rows": []})["rows"], name.split(" on ")[0]
    rows = [row for row in rows if row["what"].startswith(CHOSEN.get(file, "")) and "quantize" not in row["what"]]
    own = {row["by"] for row in rows if file in LADDERS and not row["by"].startswith(("torch", "x.T"))}
    return [row | {"mine": row["by"] in own | {*WRITTEN_HERE}} for row in rows]


def quickest(name: str, mine: bool) -> dict[str, dict]:
    """Return the fastest row of the file's own kernels (mine), or of all others, by what is measured.

    That is every product under sustained load, or else forward and backward of the first size that has both.
    """
    sizes = {}
    for row in contenders(name):
        sizes.setdefault(SUMMED.sub("", row["what"]), {}).setdefault(row["what"], []).append(row)
    sustained = {what: rows for whats in sizes.values() for what, rows in whats.items() if "sustained" in what}
    chosen = sustained or max(sizes.values(), key=len, default={})
    found = {what: [row for row in rows if row["mine"] == mine] for what, rows in chosen.items()}
    return {what: min(rows, key=lambda row: row["ms"]) for what, rows in found.items() if rows}


def kernel_gain(path: str, card: str = "") -> str:
    """Time of the fastest other contender over ours: of forward and backward together, or the mean over products."""
    ours, theirs = (quickest(Path(path).stem + card, mine) for mine in (True, False))
    pairs = [(theirs[what]["ms"], ours[what]["ms"]) for what in ours if what in theirs]
    if not pairs or Path(path).stem in LADDERS:
        return ""
    if "sustained" in next(iter(ours)):
        return f"{statistics.geometric_mean(their / our for their, our in pairs):.2f}"
    their, our = map(sum, zip(*pairs))
    return f"{their / our:.2f}"


def kernel_gains(path: str) -> list[float]:
    """The gains on an H200 and an H100, where they are measured."""
    return [float(text) for text in (kernel_gain(path), kernel_gain(path, " on H100")) if text]


def measured_rows(name: str) -> list[dict]:
    """Return the stored rows of a kernel file, with their limit, and with fields from the contenders' names."""
    rows = results("kernels.json")[name]["rows"]
    for row in rows:
        row["limit"] = f"{significant(row['rate'] / row['share'])} {row['unit']}" if row["share"] else ""
        for match in filter(None, [pattern.match(row["by"]) for pattern in NAMES]):
            row |= match.groupdict()
        if "loaded" in row:
            row["loaded"] /= 1e9
    return rows


def kernel_rows(path: str) -> str:
    """All that is measured of a kernel file, on one card after the other."""
    stored, parts = results("kernels.json"), []
    for name in sorted(name for name in stored if name.split(" on ")[0] == Path(path).stem):
        text = [about(stored[name], f"Triton {stored[name]['triton']}"), long_table(measured_rows(name))]
        parts.append(folded(f"on an {name.split()[-1]}", "\n\n".join(text)) if " on " in name else "\n\n".join(text))
    return "\n\n".join(parts)


def kernel_table(path: str) -> str:
    """A table in sight: milliseconds by contender, and the share of the limit of ours, or of the fastest."""
    name, stored = Path(path).stem, results("kernels.json")
    rows = [row for row in measured_rows(name) if re.search(ON_PAGE_ROWS.get(name, ""), row["what"])]
    limits = " or ".join(dict.fromkeys(row["limit"] for row in rows))
    card = stored[name]["gpu"].split()[-1]
    note = f"{card}, limit {limits}, [all rows](../tests/KERNELS.md#{anchor(Path(path).name)})"
    if name in LONG:
        return f"{note}\n\n{long_table(rows, without=('rate', 'limit'))}"
    names, lines = list(dict.fromkeys(row["by"] for row in rows)), []
    for what in dict.fromkeys(row["what"] for row in rows):
        found = {row["by"]: row for row in rows if row["what"] == what}
        ours = [found[by] for by in WRITTEN_HERE if by in found] or list(found.values())
        cells = [fastest(found[by], rows) if by in found else "" for by in names]
        best = min(ours, key=lambda row: row["ms"])
        lines.append([what.removesuffix(", sustained"), *cells, f"{best['share']:.0%}"])
    return f"{note}\n\n{table(['ms', *names, 'share'], lines, labels=1)}"


def cards() -> str:
    """Gains and shares of the limit on an H200 and an H100, of kernel files that have been measured on both."""
    rows = []
    for path in [path for path in recipes_of("09_kernels") if path not in TRAINING]:
        gains, shares = [], []
        for card in "", " on H100":
            ours = quickest(Path(path).stem + card, True).values()
            gains.append(kernel_gain(path, card))
            total = sum(row["ms"] for row in ours)
            shares.append(f"{sum(row['share'] * row['ms'] for row in ours) / total:.0%}" if ours else "")
        if all(gains):
            rows.append([section(path), *gains, *shares])
    return table(["file", "gain, H200", "gain, H100", "share of the limit, H200", "share of the limit, H100"], rows)


def ladder() -> str:
    """The rungs of a matmul: what all programs load, registers of a thread, and the speed as a share of cuBLAS's."""
    stored, lines, theirs = results("kernels.json"), [], {}
    for name, (what, rungs) in RUNGS.items():
        found = {row["by"]: row for row in measured_rows(name) if row["what"] == what}
        theirs |= {what: found["torch.matmul"]["ms"]} if "torch.matmul" in found else {}
        for row in map(found.get, rungs):
            share = theirs[what] / row["ms"]
            more = [f"{row[key]:,.0f}" if key in row else "" for key in ("loaded", "registers", "spills")]
            lines.append([f"{name}: {row['by']}", *more, f"{'█' * round(12 * share)} {share:.0%}"])
    everything = ", ".join(f"[{name}](../tests/KERNELS.md#{name}py)" for name in RUNGS)
    head = ["rung", "GB loaded", "registers per thread", "spilled", "of cuBLAS's speed"]
    return f"{stored['matmul']['gpu'].split()[-1]}, all rows: {everything}\n\n{table(head, lines, labels=1)}"


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


def fastest(row: dict, rows: list[dict]) -> str:
    """The milliseconds of a row, bold if no other contender at the same is faster; ours in another setting is none."""
    ms = f"{row['ms']:#.3g}" if row["ms"] < 10 else f"{row['ms']:,.1f}"
    others = [other for other in rows if other["what"] == row["what"] and not other["by"].startswith("ours,")]
    return f"**{ms}**" if row in others and row["ms"] == min(other["ms"] for other in others) else ms


def significant(x: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{x:,.0f}" if x >= 999.5 else f"{float(f'{x:.6g}'):.3g}"


def long_table(rows: list[dict], without: tuple[str, ...] = ()) -> str:
    """A row for each that is compared; `without` these columns."""
    lines = []
    for row in rows:
        more = {title: form.format(row[key]) if key in row else "" for key, (title, form) in MORE.items()}
        cells = {"what": row["what"], "by": row["by"], **more, "ms": fastest(row, rows)}
        rate = f"{significant(row['rate'])} {row['unit']}"
        cells |= {"rate": rate, "share": f"{row['share']:.0%}", "limit": row["limit"]}
        lines.append({title: cell for title, cell in cells.items() if title not in without})
    return table(list(lines[0]), [list(line.values()) for line in lines], labels=2)


def kernel_steps() -> str:
    """Where the milliseconds of a step go, of the root and with our kernels."""
    stored, rows = results("kernel_steps.json"), []
    note = about(stored.pop("measured"))
    for preset, found in stored.items():
        steps = {name: ms | {"step": sum(ms.values())} for name, ms in found.items()}
        root, ours = steps.pop(BASELINES["09_kernels"]), steps.pop("09_kernels/train.py")
        lines = [(kind, root[kind], ours[kind]) for kind in root]
        lines += [(f"step, with {Path(name).name}", root["step"], ms["step"]) for name, ms in steps.items()]
        for kind, theirs, mine in lines:
            share = f"{mine / theirs - 1:+.1%}" if kind != "rest" else ""
            rows.append([preset, kind, f"{theirs:.1f}", f"{mine:.1f}", f"{mine - theirs:+.1f}", share])
    head = ["preset", "kernels", "root, ms", "`train.py`, ms", "difference, ms", "difference"]
    return f"{note}\n\n{table(head, rows)}"


def equivalence() -> str:
    """Worst errors of each recipe over all its cases."""
    entries, rows = results("equivalence.json"), []
    for path in IDEAS:
        cpu, gpu = ([e for e in entries if e["recipe"] == path and e["device"] == device] for device in ("cpu", "cuda"))

        def worst(ours: list[dict], *keys: str, digits: str = ".1e") -> str:
            errors = [entry["errors"][key] for entry in ours for key in keys if key in entry["errors"]]
            return f"{max(errors):{digits}}" if errors else ""

        if cpu or gpu:
            ranks = [",\u00a0".join(map(str, sorted({entry["ranks"] for entry in ours}))) for ours in (cpu, gpu)]
            errors = worst(cpu, "gradient"), worst(cpu, "training"), worst(cpu, "gradient history", "training history")
            on_gpus = worst(gpu, "float32"), worst(gpu, "bfloat16", digits=".2f")
            rows.append([f"[`{path}`](../{path})", ranks[0], *errors, ranks[1], *on_gpus])
    head = ["recipe", "CPU ranks", "gradient", "trained weights", "loss, norm", "GPUs", "gradient fp32"]
    return table([*head, "bf16, × root's own"], rows)


def bugs(folder: str, everything: bool = False) -> str:
    """The most instructive of the seeded bugs of a folder's recipes, or all; those that change no number last."""
    order = list(IDEAS)
    ours = [bug for bug in results("bugs.json") if bug["recipe"].startswith(f"{folder}/")]
    ours.sort(key=lambda bug: (without_effect(bug), order.index(bug["recipe"])))
    wrong = [bug for bug in ours if mistrains(bug)]
    summary = f"{len(ours)} bugs; {len(wrong)} of them train with a gradient or update that is wrong by more than 1 %; "
    summary += f"{sum(map(hides, wrong))} of those move the loss by less than 1 % over 20 steps."
    if everything:
        return f"{summary}\n\n{bugs_table(ours, f'../{folder}/README.md')}"
    shown = instructive(ours)
    few = bugs_table([bug for bug in ours if bug in shown])
    return f"{summary}\n\n{few}\n\n[All {len(ours)}](../tests/BUGS.md#{folder})"


def instructive(found: list[dict]) -> list[dict]:
    """The bugs to show: those that the loss curve hides, the largest errors first; each recipe in turn, none twice."""
    ranked = sorted(found, key=lambda bug: (not hides(bug), without_effect(bug), -(bug["gradient"] or 0)))
    ranked = list({bug["what"]: bug for bug in reversed(ranked)}.values())[::-1]
    turns = defaultdict(itertools.count)  # the recipe's worst, its second, ...
    turn = {bug["what"]: next(turns[bug["recipe"]]) for bug in ranked}
    return sorted(ranked, key=lambda bug: turn[bug["what"]])[:SHOWN]


def mistrains(bug: dict) -> bool:
    """Whether a training goes on with a gradient, or an update, that is wrong by more than 1 %.

    No loss curve: a kernel's output, or a run that ends. Not a bit of it changed: the saved file alone is wrong.
    """
    return (bug["gradient"] or 0) > 0.01 and bool(bug["loss"])


def hides(bug: dict) -> bool:
    """... and the loss curve shows less than that."""
    return mistrains(bug) and bug["loss"] < SEEN[1]


def without_effect(bug: dict) -> bool:
    """Whether a bug changes no number: it is about time, memory, processes, or input that is refused."""
    trains = bug["recipe"] in TRAINING  # a kernel alone has no loss curve
    numbers = (bug["gradient"], bug["loss"]) if trains else (bug["gradient"],)
    return not bug["end"] and all(number is not None and number < NOTHING for number in numbers)


def bugs_table(found: list[dict], page: str = "") -> str:
    """A row per bug. page: that of the folder, from where the table stands."""
    rows = []
    for bug in found:
        gradient = "races" if bug["end"] == "races" else digits(bug["gradient"])
        rows.append([section(bug["recipe"], page), bug["what"], gradient, percent(bug["loss"]), seen(bug)])
    return table(["recipe", "bug", "gradient error", "loss curve differs by", "would you have seen it?"], rows)


def digits(number: float | None) -> str:
    """Two significant digits; 0 is what rounding explains, and what is not finite has none."""
    if number is None or not math.isfinite(number):
        return ""
    return f"{float(f'{number:.2g}') if number >= NOTHING else 0:g}"


def percent(share: float | None) -> str:
    """A share in percent, with two digits."""
    if share is None or not math.isfinite(share):
        return ""
    rounded = float(f"{100 * share:.2g}") if share >= NOTHING else 0
    return f"{rounded:,.9f}".rstrip("0").rstrip(".") + (" %" if rounded else "")


def seen(bug: dict) -> str:
    """Whether somebody who watches the loss would have noticed."""
    if bug["end"]:
        return "not reliably" if bug["end"] == "races" else f"yes, it {bug['end']}"
    if bug["recipe"] not in TRAINING:
        return ""
    if bug["loss"] is None or not math.isfinite(bug["loss"]):
        return "yes, the loss is not finite"
    return "yes" if bug["loss"] > SEEN[0] else "no" if bug["loss"] < SEEN[1] else "hardly"


def label(row: dict, rows: list[dict], folder: str) -> str:
    """The file, and those of its flags that another line of the same file does not have."""
    others = [other["flags"] for other in rows if other["file"] == row["file"]]
    flags = re.findall(r"--\S+ [^-\s]\S*", row["flags"])
    own = [flag for flag in flags if not all(f"{flag} " in f"{other} " for other in others)]
    own = [flag for flag in own if not re.fullmatch("--(dp|cp|tp|pp) 1", flag)]  # an axis that is not split
    alone = ", on each GPU alone, the slowest" if "each" in row["rounds"][0] else ""
    return f"`{' '.join([row['file'].removeprefix(f'{folder}/'), *own])}`{alone}"


def measured(row: dict, key: str) -> list[float]:
    """The numbers of the rounds; none, an empty cell, where there is no measurement."""
    return [numbers[key] for numbers in row["rounds"] if numbers[key] is not None]


def speed(folder: str) -> str:
    """A table per suite, in which another card has columns of its own, and how each was measured."""
    parts, found = [], suites(folder)
    for name in found:
        if " on " in name:
            continue
        cards = both_cards(name)
        assert len({tuple(row["file"] for row in stored["rows"]) for stored in cards}) == 1, name
        head = ["file", "tokens/s/GPU", "× first", "MFU", "memory", "exposed", "idle (expected)", "block, ms"]
        tables = [cells(stored, folder) for stored in cards]
        rows = tables[0]
        if len(cards) > 1:  # without MFU, which would make the table too wide
            speeds = [(f"{card(stored)}, tokens/s", "× first") for stored in cards]
            head = [head[0], *itertools.chain(*speeds), *head[4:]]
            rows = [[same[0][0], *(cell for row in same for cell in row[1:3]), *same[0][4:]] for same in zip(*tables)]
        note = ", and ".join(dict.fromkeys(map(where, cards)))
        details = folded("commands", "\n\n".join(map(as_run, cards)))
        parts.append("\n\n".join(filter(None, [SUITES.get(name), note, table(head, rows), details])))
    return "\n\n".join(parts)


def cells(suite: dict, folder: str) -> list[list[str]]:
    """A row per line of a suite: the median of the rounds, and its ratio to the first, where the work is the same."""
    rows, first = [], suite["rows"][0]
    for i, row in enumerate(suite["rows"]):
        tokens, mfu, memory = (measured(row, key) for key in ("tokens", "mfu", "memory"))
        median, pipeline = statistics.median(tokens), row.get("pipeline")
        # the rank that computes longest, for which the others also wait
        slowest = max(row.get("profile", []), key=lambda ms: ms["compute"], default=None)
        rows.append(
            [
                label(row, suite["rows"], folder),
                f"{median:,.0f}",
                f"{median / statistics.median(measured(first, 'tokens')):.3f}" if i < suite["alike"] > 1 else "",
                f"{statistics.median(mfu):.1f} %" if mfu else "",
                " to ".join(f"{gib:.1f}" for gib in sorted({min(memory), max(memory)})) + " GiB" if memory else "",
                f"{slowest['exposed'] / slowest['step']:.1%}" if slowest else "",
                waiting(pipeline) if pipeline else "",
                "{forward:.2f} + {backward:.2f}".format(**row["block_ms"]) if "block_ms" in row else "",
            ]
        )
    return rows


def where(suite: dict) -> str:
    """GPUs, how far rounds are apart, and a note, if there is one."""
    most = max(map(apart, suite["rows"]))
    note = f"; rounds differ by at most {tied(f'{100 * most:.1f} %')}" if most else ""
    return suite["gpu"] + note + (f" ({suite['note']})" if "note" in suite else "")


def apart(row: dict) -> float:
    """How far the rounds of a row are apart, as a share of their median."""
    tokens = measured(row, "tokens")
    return (max(tokens) - min(tokens)) / statistics.median(tokens)


def as_run(suite: dict) -> str:
    """Versions, the command of all lines, and that of each, with its rounds where the command has another number."""
    flags = []
    for row in suite["rows"]:
        rounds = f"--rounds {len(row['rounds'])}"
        other = "--rounds" in suite["command"] and rounds not in suite["command"]
        flags.append(f"{row['file']:42} {row['flags']}" + f"  # {rounds}" * other)
    how = [f"torch {suite['torch']}", suite["date"]]
    how += [f"code of commit {suite['commit']} or before"] if "commit" in suite else []
    return "\n".join(["```", ", ".join(how), suite["command"], "", *flags, "```"])


def waiting(pipeline: dict) -> str:
    """Measured idle share; simulated from the run's own durations, if it was; by the formula."""
    expected = [f"{pipeline[key]:.1%}" for key in ("simulated", "formula") if key in pipeline]
    return f"{pipeline['idle']:.1%} ({', '.join(expected)})"


def predictions() -> str:
    """Tokens per second of every schedule for several numbers of ranks, from what one GPU needs for every operation."""
    stored, rows, near = results("speed.json"), [], []
    both = stored["pipeline_more"], stored["pipeline"]  # a recipe that both have is of the second
    trained = {row["file"]: (row, int(suite["gpu"].split()[0])) for suite in both for row in suite["rows"]}
    sizes = [(ranks, each * ranks) for ranks in schedules.PREDICTED_RANKS for each in (2, 4)]
    other, ratios = "pipeline_parts on H100", []
    for path in schedules.CLAIMS:
        found = [schedules.tokens_per_second(path, ranks, m) for ranks, m in sizes]
        slower = [schedules.tokens_per_second(path, ranks, m, other) for ranks, m in sizes]
        ratios += [theirs / tokens for (tokens, _), (theirs, _) in zip(found, slower)]
        rows.append([section(path), *(f"{tokens / 1000:.0f}k ({1 - busy:.0%})" for tokens, busy in found)])
        if path in trained:
            row, gpus = trained[path]
            guess = 16 * 4096 / schedules.predict(path, gpus, 16, 24)[1] * 1e3 / gpus
            tokens = statistics.median(measured(row, "tokens"))
            near.append([section(path), f"{gpus}", f"{guess:,.0f}", f"{tokens:,.0f}", f"{guess / tokens - 1:+.1%}"])
    predicted = table(["file", *(f"{ranks} ranks, m {m}" for ranks, m in sizes)], rows)
    last = f"With the durations of {about(stored[other])}, all tokens per second"
    last += f" are {min(ratios):.2f} to {max(ratios):.2f} of these."
    check = table(["file", "GPUs", "predicted, tokens/s/GPU", "measured", "difference"], near)
    return f"{about(stored['pipeline_parts'])}\n\n{predicted}\n\n{last}\n\n{check}"


def layouts() -> str:
    """A table of the stored layouts: speed and memory, as measured and as plan.py predicts them."""
    tests, rows = load("08_4d/test_plan.py"), []
    chunks = {"08_4d/train.py": 1, "08_4d/3d.py": load("08_4d/3d.py").Config.chunks}
    for suite in suites("08_4d").values():
        for row in [row for row in suite["rows"] if row["file"] in chunks]:
            cfg = tests.config(row["flags"], suite["gpu"], chunks=chunks[row["file"]])
            found, _, peak = tests.measured(row)
            tokens, memory = tests.PLAN.predict(cfg, tests.TRAIN).tokens, tests.first_rank(cfg)
            words = cfg.preset, f"{cfg.layers}", tests.PLAN.shape(cfg)
            speeds = f"{found:,.0f}", f"{tokens:,.0f}", f"{tokens / found - 1:+.1%}"
            rows.append([*words, *speeds, f"{peak:.1f} GiB", f"{memory:.1f} GiB"])
    head = ["model", "layers", "layout", "tokens/s/GPU", "plan.py", "off by", "memory", "plan.py"]
    alike = len({row[0] for row in rows}) == 1  # one model, which the page names
    return table(head[alike:], [row[alike:] for row in rows])


def measured_runs() -> str:
    """The summary of plan.py --measured for half of the playbook's runs."""
    return "```\n" + (RESULTS / "measured_runs.txt").read_text() + "```"


def inheritance() -> str:
    """Lines of code, and how many of them stand in no parent."""
    rows = []
    for path in recipes_of("08_4d"):
        if parents(FAMILY[path]):
            names = ", ".join(f"`{parent}`" for parent in parents(FAMILY[path]))
            rows.append([f"`{Path(path).name}`", names, f"{lines_of_code(FAMILY[path].source)}", f"{own_lines(path)}"])
    return table(["file", "parents", "lines of code", "of them in no parent"], rows)


def together() -> str:
    """Names that two recipes' Copy lines give to different code, for every two of the folders' main recipes."""
    rows = []
    for a in TOGETHER:
        cells = []
        for b in TOGETHER:
            names = clashes([f"{a}.py", f"{b}.py"])
            shown = [f"`{name}`" for name in names if name not in EVERYWHERE]
            cells.append("—" if a == b else "<br>".join(shown + ["†"] * (len(shown) < len(names))))
        rows.append([f"`{Path(a).name}`", *cells])
    return table(["", *(f"`{Path(path).name}`" for path in TOGETHER)], rows)


def published() -> str:
    """Llama 3's published layouts: model FLOPs utilisation as it was measured, and as plan.py predicts it."""
    plan, rows = load("08_4d/plan.py"), []
    for ours, theirs, mfu in plan.llama():
        words = f"{ours.cfg.gpus:,}", plan.shape(ours.cfg), f"{ours.cfg.seq:,}"
        rows.append([*words, f"{mfu} %", f"{100 * theirs:.1f} %", f"{100 * ours.mfu:.1f} %", f"{ours.memory:.0f} GiB"])
    head = ["GPUs", "layout", "seq", "published MFU", "predicted", "of what is computed"]
    return table([*head, "memory"], rows)


def attention() -> str:
    """Attention on the slowest of four ranks: its time, and its speed over a quarter of one call for all tokens."""
    head, parts = ["tokens", "file", "forward, ms", "× ideal", "forward and backward, ms", "× ideal"], []
    for stored in both_cards("context_attention"):
        rows = []
        for whole in stored["whole"]:
            tokens, slowest = f"{whole['seq']:,}", {}
            rows.append([tokens, "one call for all", f"{whole['forward_ms']:.2f}", "", f"{whole['both_ms']:.2f}", ""])
            for row in sorted(stored["rows"], key=lambda row: row["both_ms"]):
                if row["seq"] == whole["seq"]:
                    keys = "forward_ms", "share_forward", "both_ms", "share"
                    slowest[row["file"]] = [f"{row[key]:.2f}" for key in keys]
            rows += [[tokens, section(path), *slowest[path]] for path in IDEAS if path in slowest]
        parts += [about(stored), table(head, rows)]
    return "\n\n".join(parts)


def expert_layer() -> str:
    """Time of one layer of experts, ours and the library's, and of its grouped matmuls alone."""
    head, parts = ["layer", "forward, ms", "forward and backward, ms", "× time of moe.py, bf16 weights"], []
    for stored in both_cards("expert_layer"):
        (ours,) = [row["both_ms"] for row in stored["rows"] if row["label"] == OURS]
        rows = [(row["label"], row["forward_ms"], row["both_ms"]) for row in stored["rows"]]
        rows = [[label, f"{forward:.2f}", f"{both:.2f}", f"{both / ours:.2f}"] for label, forward, both in rows]
        alone, total = stored["matmuls"], sum(row["ms"] for row in stored["matmuls"])
        rates = [f"{pick(row['tflops'] for row in alone):.0f}" for pick in (min, max)]
        share = f"{total / ours:.0%} of the time of {OURS}"
        last = f"The {len(alone)} grouped matmuls of forward and backward alone take {total:.2f} ms ({share}), at"
        last += f" {' to '.join(rates)} TFLOP/s."
        parts += [about(stored, f"transformers {stored['transformers']}"), table(head, rows), last]
    return "\n\n".join(parts)


def collectives() -> str:
    """The bandwidth table of collectives.py, as it was printed."""
    stored = results("speed.json")["collectives"]
    return f"{about(stored)}\n\n```\n{stored['table'].rstrip()}\n```"


def predictor() -> tuple[object, dict]:
    """01_single_gpu/memory.py, and its fields for Llama 3 8B in bfloat16, compiled, 8,192 tokens per sequence."""
    module = load("01_single_gpu/memory.py")
    return module, dict(module.PRESETS["llama3_8b"], preset="llama3_8b", seq=8192, dtype="bfloat16", compile=True)


def memory_of_stages() -> str:
    """Memory of each stage of ZeRO at its fullest moment, as memory.py predicts it."""
    module, fields = predictor()
    rows, shown = [], [kind for kind in module.KINDS if kind != "temporary"]  # which is too little for a column
    for stage, label in enumerate(("no sharding", "`zero1_overlap.py`", "`zero2.py`", "`zero3.py`")):
        _, kinds = module.peak(module.Config(**fields, batch=32, microbatches=4, dp=8, zero=stage))
        gib = [kinds[kind] / 2**30 for kind in shown] + [sum(kinds.values()) / 2**30]
        rows.append([label, *(f"{size:.1f}" for size in gib)])
    command = "python 01_single_gpu/memory.py --preset llama3_8b --seq 8192 --batch 32 --microbatches 4 --dp 8 --zero 3"
    text = table(["GiB", *(kind.replace("weight ", "") for kind in shown), "peak"], rows)
    return f"`{command} --dtype bfloat16 --compile`, and with `--zero` 0, 1 and 2:\n\n{text}"


def memory_of_blocks() -> str:
    """What one block keeps for backward under tensor and sequence parallelism, as memory.py predicts it."""
    module, fields = predictor()
    rows = []
    for tp in 1, 2, 4, 8:
        both = [module.Config(**fields, batch=1, tp=tp, sequence_parallel=sequence) for sequence in (False, True)]
        rows.append([str(tp), *(f"{module.saved(cfg, 'none') / 2**20:,.0f}" for cfg in both)])
    return table(["tp", "tensor parallel, MiB", "with sequence parallelism, MiB"], rows)


def formats() -> str:
    """The table of formats, as formats.py computes it, without what another column says, too."""
    columns = zip(*load("10_mixed_precision/formats.py").table_of_formats())
    head, *rows = zip(*(column for column in columns if column[0] not in ("in [1, 2)", "decades", "bits in MX")))
    return table(list(head), list(map(list, rows)))


def rounded(name: str) -> str:
    """A row per format: the error of the gradients of a small root, as tests/tools/precision.py has stored it."""
    head, *stored = results("precision.json")["formats"][name]
    found = defaultdict(dict)
    for line in stored:
        row = dict(zip(head, line))
        found[row["format"]][row["scale"]] = row["become zero"], row["SNR, median tensor"]
    rows = [[name, *(found[name][scale][i] for i in (0, 1) for scale in ("none", "per tensor"))] for name in found]
    return table(["format", "become zero", "with a scale", "SNR of the median tensor", "with a scale"], rows)


def updates() -> str:
    """How many updates rounding to nearest loses, as tests/tools/precision.py has stored it."""
    head, *rows = results("precision.json")["formats"]["updates"]
    return table(head, rows)


def precision() -> str:
    """How far the gradient of each recipe is from float64's."""
    stored = results("precision.json")
    rows = [[f"`{row['label']}`", f"{row['dB']:.1f}"] for row in stored["precision"]]
    rows[0][0] = f"the root, {stored['precision'][0]['label']}"
    text = table(["gradient in", "signal to noise, dB"], rows, labels=1)
    note = f"torch {stored['torch']}, {stored['date']}, `{stored['command']}`"
    return f"{note}, a model of `{stored['flags']}`:\n\n{text}"


def curves() -> str:
    """The loss at the end of a long training in every format, and in naive forms; the best comes first."""
    stored, rows = results("curves.json"), []
    most = max(run["steps"] for run in stored["runs"])
    for run in sorted(stored["runs"], key=lambda run: (run["steps"] < most, run["last"] or 0)):
        last = f"{run['last']:.3f}" if run["steps"] == most else f"NaN after {run['steps']} steps"
        link = f"../{run['recipe']}".removeprefix("../10_mixed_precision/")
        rows.append([f"[{run['label']}]({link})" + " †" * run["naive"], last])
    return f"{about(stored)}, `{stored['flags']}`\n\n{table(['format', 'loss of the last 100 steps'], rows)}"


def minutes() -> str:
    """Tokens per second of each format, with steps and minutes to the lowest loss that all formats reached."""
    stored, found = results("time.json"), time_to_loss(results("time.json"))
    runs = {run["label"]: run for run in stored["runs"]}
    speeds = {label: [run["speed"] for run in stored["runs"] if run["label"] == label] for label in runs}
    means = {label: statistics.mean(minutes for _, minutes in times) for label, times in found.items()}
    rows = []
    for label in sorted(means, key=means.get):
        steps, minutes = zip(*found[label])
        link = f"../{runs[label]['recipe']}".removeprefix("../10_mixed_precision/")
        cells = [f"{statistics.mean(speeds[label]):,.0f}", f"{min(steps):.0f} to {max(steps):.0f}"]
        cells += [f"{min(minutes):.2f} to {max(minutes):.2f}", f"{means[label]:.2f}"]
        rows.append([f"[{label}]({link})", *cells, f"{means[AUTOCAST] / means[label]:.2f}"])
    head = ["format", "tokens/s", "steps", "minutes", "mean", "gain"]
    stored["command"] += " --seeds " + " ".join(map(str, lowest_loss(stored)))
    losses = ", ".join(f"{loss:.3f}" for loss in lowest_loss(stored).values())
    note = (
        f"{about(stored)}, `{stored['flags']}`, one micro-batch, {stored['bytes'] / 1e6:.0f} MB of text; to losses of"
    )
    return f"{note} {losses}\n\n{table(head, rows)}"


def optimizers() -> str:
    """How the curves of AdamW and Muon were measured."""
    stored = results("optimizers.json")
    note = f"; {stored['note']}" if "note" in stored else ""
    return f"{about(stored)}, `{stored['flags']}`{note}."


def falling() -> str:
    """The loss of Llama-3.1-8B on one GPU: means of the ten steps up to some."""
    rows, steps = [], range(20, 141, 40)
    for row in results("speed.json")["mixed_llama3_8b"]["rows"]:
        losses = row["rounds"][0]["losses"]
        means = [f"{statistics.mean(losses[i - 10 : i]):.2f}" if i <= len(losses) else "" for i in steps]
        rows.append([section(row["file"]), *means])
    return table(["mean loss of ten steps, up to step", *map(str, steps)], rows)


def first() -> str:
    """What the first command of README.md prints: its first and its last lines."""
    words = re.search(r"torchrun (.+)", (ROOT / "README.md").read_text())[1].split()
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    lines = run.stdout.rstrip().splitlines()
    return "\n".join(["```", lines[0], "      ...", *lines[-3:], "```"])


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(ROOT.glob("[01][0-9]_*/README.md")), *(ROOT / "tests").glob("*.md")]


MAKERS = [facts, first, look, equivalence, together, optimizers, collectives, attention, predictions, expert_layer]
MAKERS += [layouts, inheritance, published, ladder, cards, updates, precision, curves, minutes]
MAKERS = {make.__name__: make for make in MAKERS} | {"runs": measured_runs, "steps": kernel_steps, "8B": falling}
MAKERS |= {"03_zero memory": memory_of_stages, "04_tensor_sequence memory": memory_of_blocks}
MAKERS |= {"table of formats": formats, **{name: functools.partial(rounded, name) for name in ROUNDED}}
OF_FOLDER = {"recipes": folder_table, "speed": speed, "bugs": bugs, "way": way, "way on": way}


def made(page: Path, name: str) -> str:
    """Return the text between the markers of this name."""
    folder, (kind, _, rest) = page.parent.name, name.partition(" ")
    if name in FOLDERS:
        return bugs(name, everything=True)
    if name.endswith(".py"):
        return kernel_rows(f"09_kernels/{name}") if page.name == "KERNELS.md" else commands(f"{folder}/{name}")
    if kind == "code":
        return code(folder, rest)
    if rest == "measured":
        return kernel_table(f"{folder}/{kind}.py")
    if name in OF_FOLDER:
        return OF_FOLDER[name](folder) if folder in FOLDERS else all_folders()
    return (MAKERS.get(name) or MAKERS[f"{folder} {name}"])()


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
    for page in pages():
        page.write_text(generated(page, kept))


if __name__ == "__main__":
    main()
