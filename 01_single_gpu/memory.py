"""Predict the memory of a training run, term by term, and check it against the measured peak.

In backward gradients grow while activations shrink, so the peak may be at several moments of a step: `moments` lists
them, for a Llama as the recipes here train it. `walk` takes a pipeline's operations from the recipe's schedule.
With fewer tokens per micro-batch than --dim the prediction is about 1 % too low: small operators are not counted.
--measure RECIPE trains with that recipe and compares its peak with the prediction for the same flags and processes.
--playbook prints what the playbook's formulas give (functions book_...), for a GPT with GELU and bf16 weights.

Parent:   none, it predicts the others
Run:      python 01_single_gpu/memory.py --preset llama3_8b --seq 4096 --batch 8 --dp 8 --zero 3 --dtype bfloat16
          python 01_single_gpu/memory.py --measure 01_single_gpu/train.py --batch 4 --dtype bfloat16 --compile
          python 01_single_gpu/memory.py --playbook
Source:   Ultra-Scale Playbook, "Memory usage in transformers" and "ZeRO"; Korthikanti et al. 2022, arXiv:2205.05198
"""

import importlib.util
import json
import math
import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import matplotlib
import torch
from matplotlib import pyplot

# ------------------------------------------------------------------------------------------------------------ config
GIB = 2**30
PRESETS = {  # the root's
    "tiny": dict(),
    "smollm_1_7b": dict(layers=24, dim=2048, heads=32, kv_heads=32, ffn=8192, vocab=49152),
    "llama3_1b": dict(layers=16, dim=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256),
    "llama3_8b": dict(layers=32, dim=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
}
SCHEDULES = "1f1b", "afab", "split_backward", "zero_bubble", "interleaved", "zbv", "dualpipe"  # files of 06_pipeline
FP8 = "tensorwise", "delayed_scaling", "blockwise"  # files of 10_mixed_precision, after fp8_
RECIPES = {  # what --measure can predict, and in what a recipe's memory differs from the root's
    "01_single_gpu": {
        **{name: {} for name in ("train", "gradient_accumulation", "lora")},
        "activation_checkpointing": dict(recompute="full"),
        "selective_checkpointing": dict(recompute="selective"),
    },
    "02_data_parallel": {name: {} for name in ("naive", "overlap", "bucketed", "coalesced", "no_sync")},
    "03_zero": {
        "zero1_overlap": dict(zero=1),
        "zero2": dict(zero=2),
        **{name: dict(zero=3) for name in ("zero3", "torch_fsdp", "lora")},
    },
    # uncompiled, their loss keeps more than the root's, which is what is predicted
    "04_tensor_sequence": {"vocab_parallel": {}, "sequence_parallel": dict(sequence_parallel=True)},
    "05_context_ring": {
        "all_gather_kv": dict(gather_kv=True),
        **{name: {} for name in ("ring", "striped", "zigzag", "usp")},
        "ulysses": dict(ulysses=0),
    },
    "06_pipeline": {"naive": {}, **{name: dict(schedule=name) for name in SCHEDULES}},
    "10_mixed_precision": {
        **{name: dict(precision="masters") for name in ("bf16", "fp16_loss_scaling")},
        **{f"fp8_{name}": dict(precision="masters", fp8=name) for name in FP8},
        "fp8_zero3": dict(zero=3, fp8="tensorwise"),
        "stochastic_rounding": dict(precision="stochastic"),
        "fp8_stochastic_rounding": dict(precision="stochastic", fp8="tensorwise"),
        "low_memory": dict(precision="stochastic", recompute="selective"),
    },
}
# what the number of processes is
PROCESSES = {
    "02_data_parallel": "dp",
    "03_zero": "dp",
    "04_tensor_sequence": "tp",
    "05_context_ring": "cp",
    "06_pipeline": "pp",
    "10_mixed_precision": "dp",
}
WORKSPACE = 2 * 32 * 2**20  # of cuBLAS on Hopper: 32 MiB for the thread of forward, as many for that of backward
STEPS = 4  # of a measured run; the first two compile kernels, and tune them on copies of their arguments
KINDS = {  # colors and hatches of the picture
    "weights": ("#5b8db8", ""),
    "gradients": ("#a9d6a0", "///"),
    "optimizer": ("#d9c2e9", "\\\\\\"),
    "weight copies": ("#9cc3e6", "xxx"),
    "activations": ("#f2b661", ""),
    "logits": ("#e58f65", "|||"),
    "temporary": ("#c8c8c8", "---"),
}
INK = "#757d88"  # of texts and axes, legible on white and on black


@dataclass(frozen=True)
class Config:
    """The sizes are the root's; what is below them says how the run is cut and what it keeps."""

    preset: Literal[tuple(PRESETS)] = "tiny"
    layers: int = 8
    dim: int = 128
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 384
    vocab: int = 256
    seq: int = 128
    batch: int = 16  # sequences per step, of all ranks and micro-batches together
    dtype: Literal["float32", "float16", "bfloat16", "float64"] = "float32"  # of the matmuls
    precision: Literal["autocast", "masters", "stochastic"] = "autocast"  # has fp32 weights, the others 16-bit ones
    fp8: Literal[("none", *FP8)] = "none"  # of linears, with bfloat16
    lora_rank: int = 0  # of adapters, beside weights that are frozen, in the dtype of the matmuls; 0: there are none
    compile: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    microbatches: int = 1
    zero: Literal[0, 1, 2, 3] = 0  # 1: optimizer sharded over dp·cp; 2: and accumulated gradients; 3: and weights
    dp: int = 1
    tp: int = 1  # blocks, embedding and head are cut; norms are not
    sequence_parallel: bool = False  # what tp does not cut is cut along the sequence
    cp: int = 1  # ranks that split every sequence
    gather_kv: bool = False  # attention gathers the keys and values of all of them
    ulysses: int = 1  # of them, ranks that swap tokens for heads around attention; 0: all
    pp: int = 1
    stage: int = 0  # the rank in the pipeline whose memory is predicted
    schedule: Literal[SCHEDULES] = "1f1b"
    chunks: int = 2  # stages per rank of the interleaved schedule


# ------------------------------------------------------------------------------------------------------------- model
# Axes: b sequences, s tokens, d model width, h heads, k head width, f ffn width, v vocabulary; of a rank's micro-batch.


def item(cfg: Config) -> int:
    """Bytes of an activation."""
    return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[cfg.dtype]


def fp32_item(cfg: Config) -> int:
    """Bytes of the root's weights and of what a norm computes with: never below float32."""
    return max(4, item(cfg))


def weight_item(cfg: Config) -> int:
    """Bytes of a weight that the model has, and of its gradient; without autocast in the dtype of the matmuls."""
    return item(cfg) if cfg.zero or cfg.precision != "autocast" or cfg.lora_rank else fp32_item(cfg)


def copy_item(cfg: Config) -> int:
    """Bytes of the copy of a weight that autocast makes for a matmul; split backward has one copy for all of a step."""
    return item(cfg) if item(cfg) < weight_item(cfg) and not split_backward(cfg) else 0


def in_fp8(cfg: Config) -> bool:
    """Whether the linears of the blocks multiply in fp8; recipes of fp8 do with bfloat16 alone."""
    return cfg.fp8 != "none" and cfg.dtype == "bfloat16"


def tokens(cfg: Config) -> int:
    """Tokens of a micro-batch, b·s, of which a rank has b·s/cp."""
    return cfg.batch // (cfg.dp * cfg.microbatches) * cfg.seq // cfg.cp


def kv_width(cfg: Config) -> int:
    """Width of all keys together. With more ranks of tp than key heads each has one of its own."""
    return cfg.dim // cfg.heads * max(cfg.kv_heads, cfg.tp)


def matrices(cfg: Config) -> int:
    """Elements of the matrices of one block."""
    return (2 * cfg.dim * cfg.dim + 2 * cfg.dim * kv_width(cfg) + 3 * cfg.dim * cfg.ffn) // cfg.tp


def table_elements(cfg: Config) -> int:
    """Elements of the rank's part of the embedding, or of the head."""
    return -(-cfg.vocab // cfg.tp) * cfg.dim


def adapters(cfg: Config) -> int:
    """Elements of LoRA's matrices beside one block: rank times the inputs and outputs of seven linears."""
    return cfg.lora_rank * (9 * cfg.dim + 2 * kv_width(cfg) + 3 * cfg.ffn)


def split_backward(cfg: Config) -> bool:
    """Whether backward is split: B for the gradients of activations, and W later, for those of matrices."""
    return cfg.schedule not in ("1f1b", "afab", "interleaved")


def stages(cfg: Config) -> int:
    """Stages of the model."""
    return cfg.pp * {"interleaved": cfg.chunks, "zbv": 2}.get(cfg.schedule, 1)


def rank_stages(cfg: Config) -> list[int]:
    """The stage of each chunk of the rank. ZBV turns around at the last rank; DualPipe's chunks are two directions."""
    if cfg.schedule == "interleaved":
        return [*range(cfg.stage, stages(cfg), cfg.pp)]
    return [cfg.stage] + ([stages(cfg) - 1 - cfg.stage] if cfg.schedule in ("zbv", "dualpipe") else [])


def rank_layers(cfg: Config) -> list[int]:
    """Layers of each chunk, as 06_pipeline divides them: by the FLOPs of backward and forward, the head's included."""
    head = 6 * cfg.dim * cfg.vocab
    block = 6 * matrices(replace(cfg, tp=1)) + 6 * cfg.dim * cfg.seq
    counts, load = [1] * stages(cfg), [block] * stages(cfg)
    load[0] += cfg.dim
    load[-1] += head
    for _ in range(cfg.layers - stages(cfg)):
        lightest = min(reversed(range(stages(cfg))), key=load.__getitem__)
        counts[lightest] += 1
        load[lightest] += block
    return [counts[stage] for stage in rank_stages(cfg)]


def chunk_parameters(cfg: Config) -> list[dict[str, int]]:
    """Elements of each chunk, before ZeRO's cuts."""
    table = table_elements(cfg)
    chunks = []
    for stage, layers in zip(rank_stages(cfg), rank_layers(cfg)):
        is_last = stage == stages(cfg) - 1
        chunk = {
            "embedding": table if stage == 0 else 0,
            "blocks": layers * (matrices(cfg) + 2 * cfg.dim),
            "norm": cfg.dim if is_last else 0,
            "head": table if is_last else 0,
        }
        chunks.append(chunk)
    return chunks


def parameters(cfg: Config) -> dict[str, int]:
    """Elements of the rank's part of the model, before ZeRO's cuts."""
    chunks = chunk_parameters(cfg)
    return {part: sum(chunk[part] for chunk in chunks) for part in chunks[0]}


def per_token(cfg: Config, stream: int, split: int) -> int:
    """Bytes of a micro-batch: each token has `stream` in the residual stream and `split` in what tp cuts."""
    return tokens(cfg) * stream // (cfg.tp if cfg.sequence_parallel else 1) + tokens(cfg) * split // cfg.tp


def attended(cfg: Config) -> int:
    """Bytes per token that attention keeps: q, k, v, o and a log-sum-exp per head, with cp of the rank's tokens alone.

    Ulysses keeps o of all tokens and some heads, and o_proj keeps it as it came back, of some tokens and all heads. It
    repeats key heads if there are fewer than ranks.
    """
    ranks = cfg.ulysses or cfg.cp
    kv = cfg.dim // cfg.heads * max(cfg.kv_heads, ranks * cfg.tp)
    return ((3 if ranks > 1 else 2) * cfg.dim + 2 * kv) * item(cfg) + cfg.heads * fp32_item(cfg)


def matmul_inputs(cfg: Config) -> tuple[int, int]:
    """Bytes per token that matmuls alone keep of their inputs: in the residual stream, and in what tp cuts.

    Those are two normalised inputs and SwiGLU's product. In fp8 each linear keeps its input transposed, 1 byte per
    element: o_proj, too, beside the one that attention keeps. Compiled, q, k and v share one, and gate and up another.
    Uncompiled each has its own, and with delayed scaling always, since each has a history of its own, and so a scale.
    Blockwise scaling keeps a scale of 4 bytes for 128 elements.
    """
    if not in_fp8(cfg):
        return 2 * cfg.dim * item(cfg), cfg.ffn * item(cfg)
    normalised = 2 if cfg.compile and cfg.fp8 != "delayed_scaling" else 5
    scales = 4 / 128 if cfg.fp8 == "blockwise" else 0
    return int((normalised + 1) * cfg.dim * (1 + scales)), int(cfg.ffn * (1 + scales))


def saved(cfg: Config, recompute: str) -> int:
    """Bytes of activations that one block keeps from forward to backward.

    Compiled, the partitioner decides: it keeps what matmuls and attention need, and recomputes norms and products, but
    for the two 1/rms and SwiGLU's product, the input of down_proj. The two residual sums cost o_proj's output to redo.
    Uncompiled, each operation keeps its inputs: a norm x and weight·x, both in float32, and its output for the matmul;
    SwiGLU the gate, its silu, up and the product. Fused attention keeps q, k, v, o and a log-sum-exp per head, and in
    bfloat16 no s·s matrix exists; float32 with grouped-query heads, on GPUs, falls back to attention that has one.
    Selective checkpointing keeps the outputs of matmuls and attention, down's too if no compiler sees that nobody needs
    it. With sequence parallelism the normalised input, cut along the sequence, is gathered again in backward.
    An adapter keeps what is between its two matrices.
    """
    d, f, e, w, attention = cfg.dim, cfg.ffn, item(cfg), fp32_item(cfg), attended(cfg)
    stream, split = matmul_inputs(cfg)
    split += 7 * cfg.lora_rank * e
    if recompute == "full":
        return per_token(cfg, d * e, 0)  # x
    if recompute == "selective":
        outputs = (2 if cfg.compile else 3) * d * e  # x, the outputs of o_proj and down_proj
        return per_token(cfg, outputs, attention + 2 * f * e)
    if cfg.compile:
        return per_token(cfg, 2 * d * e + 2 * w + stream, attention + 2 * f * e + split)  # x, o_proj's output
    return per_token(cfg, 4 * d * w + 2 * w + stream, attention + 3 * f * e + split)


def widest(cfg: Config) -> int:
    """Bytes of activations of one block, what it has kept included, at the widest moment of its backward.

    That is the derivative of SwiGLU, when dy, the gradient of the block's output, and the product's gradient are live.
    Compiled, one kernel reads gate, up and that gradient and writes the gradients of gate and up. Without recomputation
    the product is free by then, and one of them takes the memory of up. With it, the same kernel also writes the
    product, 6·f in all. Uncompiled, the gradients of silu and up are made while the product is free.
    """
    d, kv, f, e = cfg.dim, kv_width(cfg), cfg.ffn, item(cfg)
    _, product = matmul_inputs(cfg)
    if not cfg.compile:
        stream = d * e
        if cfg.recompute != "none" and e < fp32_item(cfg):
            stream += d * e  # x beside its copy in float32
        if cfg.recompute == "selective":
            stream += d * e  # down_proj's output, which nobody asks for
        return saved(cfg, "none") + per_token(cfg, stream, 3 * f * e - product)
    if cfg.recompute == "full":
        attention = (3 * d + 2 * kv) * e + cfg.heads * fp32_item(cfg)  # o in two layouts: attention's and the matmul's
        return per_token(cfg, 5 * d * e + 2 * fp32_item(cfg), attention + 6 * f * e)
    split = 2 * f * e - product if cfg.recompute == "none" else 4 * f * e
    return saved(cfg, cfg.recompute) + per_token(cfg, d * e, split)


def widest_weights(cfg: Config, accumulating: bool) -> int:
    """Bytes of copies and gradients of weights that come and go in a block's backward, at the same moment.

    Without recomputation down_proj's gradient is live, in bf16 as the matmul makes it and in float32, and its copy is
    freed; uncompiled, the bf16 gradient is freed too, and the float32 one as well if it was added to an earlier one.
    Recomputation makes the copies of a block anew. Frozen weights have neither.
    """
    if cfg.lora_rank:
        return 0
    down_proj = cfg.dim * cfg.ffn // cfg.tp
    if not cfg.compile:
        return weights_in_backward(cfg, down_proj, accumulating)
    if cfg.recompute == "full":
        return copy_item(cfg) * (matrices(cfg) - down_proj)
    return weight_item(cfg) * down_proj if cfg.recompute == "none" else 0


def weights_in_backward(cfg: Config, elements: int, accumulating: bool) -> int:
    """Bytes of a block's gradients and copies of weights, uncompiled, after backward of matrices of so many elements.

    Their copies are freed, and so are their gradients if they were added to earlier ones.
    """
    gradients = 0 if accumulating else weight_item(cfg) * elements
    copies = 0 if cfg.recompute == "none" else copy_item(cfg) * matrices(cfg)
    return gradients + copies - copy_item(cfg) * elements


def gathering(cfg: Config, accumulating: bool) -> int:
    """Bytes of one block in backward of an attention that gathers keys and values, which can be its widest moment.

    Per token the last rank, which has the most, holds 2·kv·((3·cp-1)·e + cp·w) bytes: keys and values of all ranks as
    they arrived, those of the others side by side, gradients of all as attention makes them, and in fp32 for the
    reduce-scatter; and then 2·kv·(cp-1)·e, the others' gradients side by side, or 2·kv·(w+e) + d·e, its own sums in two
    precisions and the gradient of q, if that is more. Beside them: x, its normalised copy, what attention keeps, the
    gradients of the block's output, of o, and of q, in fp32 and a part; of weights the gradients of o_proj and the MLP,
    whose copies are freed. In a ring, keys of two ranks are less than what the derivative of SwiGLU or the last norm
    takes. Left out are what cuDNN allocates for itself and, in float32, the scores.
    """
    if not cfg.gather_kv:
        return 0
    d, kv, n = cfg.dim, 2 * kv_width(cfg), cfg.cp
    e, w = item(cfg), fp32_item(cfg)
    copies = n - 1 if n > 2 else 0  # one rank's are read where they are
    keys = kv * ((n + copies + n) * e + n * w)
    keys += max(kv * (n - 1) * e, kv * (w + e) + d * e)
    norm = d * (2 * e if cfg.compile else 2 * w + e) + w
    split = attended(cfg) + d * e + keys + d * (w + e)
    weights = weights_in_backward(cfg, (3 * d * cfg.ffn + d * d) // cfg.tp, accumulating)
    return per_token(cfg, norm + d * e, split) + weights


def replicas(cfg: Config) -> int:
    """Ranks that sum their gradients, over which ZeRO shards: dp·cp."""
    return cfg.dp * cfg.cp


def resident(cfg: Config) -> dict[str, int]:
    """Bytes that are there all the time. The root: 4N of float32 weights and 8N of AdamW's moments.

    ZeRO, which has no autocast: weights in the dtype of the matmuls, with stage 3 only those gathered just then, and
    shards in float32 of the weights and of the moments, 12N/(dp·cp); with fp8 also shards of the blocks' matrices, of 1
    byte per element. With masters the same, on one GPU: 2N and 12N, or 4N and 8N of what is its own master. With
    stochastic rounding moments have the dtype of the weights: 2N and 4N. In fp8 the matrices of the blocks have two
    copies besides, of 1 byte per element: as they are, and transposed. With LoRA the weights alone, which ZeRO-3
    shards, and adapters in float32 with their moments, whole on every rank.
    """
    n = sum(parameters(cfg).values())
    weights = weight_item(cfg) * n
    if cfg.lora_rank:
        adapter = fp32_item(cfg) * cfg.layers * adapters(cfg)
        base = weights // replicas(cfg) if cfg.zero else weights
        return {"weights": base + adapter, "optimizer": 2 * adapter}
    copies = sum(rank_layers(cfg)) * matrices(cfg) if in_fp8(cfg) else 0
    if not cfg.zero:
        surplus = fp32_surplus(cfg, parameters(cfg))
        optimizer = 3 * fp32_item(cfg) * n - 2 * surplus if has_masters(cfg) else 2 * weights
        return {"weights": weights + surplus, "optimizer": optimizer, "weight copies": 2 * copies}
    return {
        "weights": weights if cfg.zero < 3 else 0,
        "optimizer": 3 * (fp32_item(cfg) * n // replicas(cfg)),
        "weight copies": copies // replicas(cfg),
    }


def gathered(cfg: Config, blocks: int, other: int = 0) -> int:
    """Bytes of weights that ZeRO-3 has gathered: elements of blocks, which may be in fp8, and of another unit."""
    if cfg.zero < 3:
        return 0
    block_item = 1 if in_fp8(cfg) else item(cfg)
    return block_item * blocks + item(cfg) * other


def gradients(cfg: Config, processed: int, *units: int) -> int:
    """Bytes of gradients when backward has processed so many parameters.

    With ZeRO only the last two `units` have full gradients, in flight; all others have fp32 shards, or in
    stage 1, before the last of several micro-batches, full fp32 sums. With LoRA the blocks of those parameters have
    gradients of their adapters.
    """
    if cfg.lora_rank:
        n = parameters(cfg)
        blocks = min(cfg.layers, max(0, processed - n["norm"] - n["head"]) * cfg.layers // n["blocks"])
        return fp32_item(cfg) * blocks * adapters(cfg)
    if not cfg.zero:
        return weight_item(cfg) * processed
    shards = 1 if keeps_sums(cfg) else replicas(cfg)
    return weight_item(cfg) * sum(units) + fp32_item(cfg) * processed // shards


def has_masters(cfg: Config) -> bool:
    """Whether AdamW updates fp32 masters; weights of 32 bits are their own."""
    return cfg.precision == "masters" and item(cfg) < fp32_item(cfg)


def fp32_surplus(cfg: Config, parts: dict[str, int]) -> int:
    """Bytes that embedding and norms, and their gradients, take beyond those of matrices: beside masters they are fp32.

    No matmul reads them, so each is its own master. parts: elements, of which blocks and head have matrices
    """
    if not has_masters(cfg):
        return 0
    others = sum(parts.values()) - sum(rank_layers(cfg)) * matrices(cfg) - parts["head"]
    return (fp32_item(cfg) - weight_item(cfg)) * others


def sums_apart(cfg: Config) -> bool:
    """Whether each of several micro-batches makes gradients anew, and moves them to fp32 sums."""
    return cfg.precision == "stochastic" or has_masters(cfg)


def keeps_sums(cfg: Config) -> bool:
    """Whether whole gradients add up over micro-batches, in fp32, beside weights of a lower precision."""
    return cfg.zero == 1 and cfg.microbatches > 1


@dataclass(frozen=True)
class Operation:
    """An operation of the rank's schedule, and what its memory holds within it. Tuples have an entry for each chunk."""

    name: str  # F, B or W
    chunk: int
    in_flight: tuple[int, ...]  # micro-batches between F and B, with this one at the end of F and within B
    w_queue: tuple[int, ...]  # micro-batches between B and W, with this one at the end of W
    has_gradients: tuple[bool, ...]  # of matrices: from the first W, or B if it is not split, to the optimizer
    sends: int  # gradients of inputs that are being sent


def walk(cfg: Config) -> list[Operation]:
    """Return the operations of the recipe's schedule on this rank; equal ones once."""
    recipe = load(str(Path(__file__).resolve().parents[1] / "06_pipeline" / f"{cfg.schedule}.py"))
    sizes = [cfg.chunks] if cfg.schedule == "interleaved" else []
    send_limit = cfg.pp if cfg.schedule in ("interleaved", "zbv", "dualpipe") else 2
    stage_of_chunk = rank_stages(cfg)
    in_flight = [0 for _ in stage_of_chunk]
    w_queue = [0 for _ in stage_of_chunk]
    has_gradients = [False for _ in stage_of_chunk]
    sends = []  # messages of every B so far
    operations = {}
    for op, _, *chunks in recipe.schedule(cfg.stage, cfg.pp, *sizes, cfg.microbatches):
        chunk = sum(chunks)  # 0 if the schedule names none
        stage = stage_of_chunk[chunk]
        messages = sum(sends[-send_limit:])
        if op == "F":
            in_flight[chunk] += 1
        if op == "W":
            has_gradients[chunk] = True
        if op == "B" and stays(cfg, stage):
            messages -= 1  # this B takes the gradient of the last one, which was for this rank
        key = Operation(op, chunk, tuple(in_flight), tuple(w_queue), tuple(has_gradients), messages)
        operations[key] = True
        if op == "B":
            sends.append(1 if stage > 0 else 0)
            in_flight[chunk] -= 1
            if split_backward(cfg):
                w_queue[chunk] += 1
            else:
                has_gradients[chunk] = True
        if op == "W":
            w_queue[chunk] -= 1
    return list(operations)


def stays(cfg: Config, stage: int) -> bool:
    """Whether what a stage hands to the next one stays on this rank, where it is the other's input."""
    return cfg.schedule != "dualpipe" and {stage, stage + 1} <= {*rank_stages(cfg)}


def block_copies(cfg: Config) -> int:
    """Bytes of the copies of a block's weights that a micro-batch keeps from forward to backward."""
    if cfg.recompute != "none":
        return 0
    adapter_item = item(cfg) if item(cfg) < fp32_item(cfg) else 0  # adapters are in float32
    return copy_item(cfg) * matrices(cfg) + adapter_item * adapters(cfg)


def saved_by_chunk(cfg: Config, chunk: int) -> dict[str, int]:
    """Bytes that a micro-batch keeps of a chunk from forward to backward; of the head what head_moments begins with."""
    layers, head = rank_layers(cfg)[chunk], chunk_parameters(cfg)[chunk]["head"]
    activations, logits = layers * saved(cfg, cfg.recompute), 0
    if head:
        activations += norm_inputs(cfg)
        logits = per_token(cfg, 0, cfg.vocab) * (item(cfg) if cfg.compile else fp32_item(cfg))
    copies = layers * block_copies(cfg) + copy_item(cfg) * head
    return {"activations": activations, "weight copies": copies, "logits": logits}


def norm_inputs(cfg: Config) -> int:
    """Bytes that the last norm, which is not compiled, keeps: x and weight·x in float32, 1/rms, and its output."""
    return per_token(cfg, (2 * fp32_item(cfg) + item(cfg)) * cfg.dim + fp32_item(cfg), 0)


def operands(cfg: Config, layers: int, head: bool) -> int:
    """Bytes that a micro-batch keeps of some blocks, and of the head, for W: x and dy of every matrix.

    x: two normalised inputs, attention's output and SwiGLU's product. dy: for o and down the gradients of the residual
    stream, then those of q, k, v, gate and up. For the head: the normalised input and the gradient of the logits.
    """
    if not split_backward(cfg):
        return 0
    d, e = cfg.dim, item(cfg)
    blocks = layers * per_token(cfg, 4 * d * e, (2 * d + 2 * kv_width(cfg) + 3 * cfg.ffn) * e)
    return blocks + per_token(cfg, d * e, cfg.vocab * e) if head else blocks


def forward_moments(cfg: Config, chunk: int) -> dict[str, dict[str, int]]:
    """What the end of forward has beside what is kept: uncompiled, logits and their float32 copy, for the log-softmax.

    Autocast's cache has copies of all weights until then, also if no micro-batch keeps them.
    """
    if cfg.compile or not chunk_parameters(cfg)[chunk]["head"]:
        return {}
    copies = 0 if cfg.recompute == "none" else copy_item(cfg) * rank_layers(cfg)[chunk] * matrices(cfg)
    logit_item = item(cfg) + fp32_item(cfg) if item(cfg) < fp32_item(cfg) else item(cfg)
    logits = per_token(cfg, 0, cfg.vocab) * logit_item
    return {"end of forward": {"weights": gathered_at_head(cfg), "weight copies": copies, "logits": logits}}


def gathered_at_head(cfg: Config) -> int:
    """Bytes of the weights that ZeRO-3 has gathered around the head: those of the last block, norm and head."""
    return gathered(cfg, matrices(cfg) + 2 * cfg.dim, table_elements(cfg) + cfg.dim)


def head_moments(cfg: Config) -> dict[str, dict[str, int]]:
    """What backward adds above the blocks, from the loss down to the last norm, which is not compiled.

    The norm keeps x and weight·x in float32 and its output. The compiled loss reads logits and writes their gradient;
    uncompiled, forward has log-softmax, and backward log-softmax and two gradients, all float32. The gradient of the
    head, if W does not compute it, is first in the dtype of the matmul. With sequence parallelism, the gathered input
    and its gradient are beside it, for the tokens of all tp ranks. Where the vocabulary is small, the norm's backward
    is the widest: six tensors in float32, in the derivative of its square.
    """
    d, e, w, c = cfg.dim, item(cfg), fp32_item(cfg), copy_item(cfg)
    head, logits = table_elements(cfg), per_token(cfg, 0, cfg.vocab)
    base = {"weights": gathered_at_head(cfg), "weight copies": c * head, "activations": norm_inputs(cfg)}
    peaks = {"loss": {**base, "logits": (2 * e if cfg.compile else 3 * w) * logits}}
    dx = per_token(cfg, e * d, 0)
    temporary = dx
    if cfg.sequence_parallel:
        temporary += 2 * e * d * tokens(cfg)
    if not split_backward(cfg) and not cfg.lora_rank:
        temporary += (c or e) * head
    peaks["head"] = {**base, "logits": e * logits, "temporary": temporary}
    if c:
        temporary = dx + (c + w) * head
        peaks["head in float32"] = {"activations": per_token(cfg, 2 * w * d, 0), "temporary": temporary}
    peaks["last norm"] = {
        "weights": gathered_at_head(cfg),
        "gradients": gradients(cfg, head, head),
        "activations": per_token(cfg, 2 * w * d, 0) + operands(cfg, 0, True),
        "temporary": per_token(cfg, 4 * w * d, 0),
    }
    return peaks


def backward_moments(cfg: Config, chunk: int, accumulating: bool) -> dict[str, dict[str, int]]:
    """Backward of a micro-batch through a chunk: what it holds, and gradients that no earlier micro-batch has made.

    Backward of block i: the gradients of all after it, all that the blocks up to i have kept, and the temporaries
    of i, most of them in SwiGLU, or in attention that gathers keys. That is linear in i, so the last and the first
    block suffice. Then the embedding, whose gradient is dense. If backward is split, the blocks after i keep operands
    instead of gradients, and so SwiGLU's product is not free at its derivative; the gradient of the embedding is added
    to that of earlier micro-batches out of place.
    """
    n, layers = chunk_parameters(cfg)[chunk], rank_layers(cfg)[chunk]
    if has_masters(cfg) and cfg.microbatches > 1:  # gradients of norms have their masters' dtype: they are sums at once
        n |= {"blocks": layers * matrices(cfg), "norm": 0}
    block, top, total = n["blocks"] // layers, n["norm"] + n["head"], sum(n.values())
    before_first = total - n["embedding"] - block  # parameters that have been through backward before the first block
    activations, temporary = saved(cfg, cfg.recompute), block_temporaries(cfg, accumulating and not cfg.zero)
    weights = gathered(cfg, 2 * block if in_fp8(cfg) else block)  # in fp8 transposed, too
    peaks = head_moments(cfg) if n["head"] else {}
    peaks["last block"] = {
        "weights": weights + gathered(cfg, block),  # the next one is being gathered
        "gradients": gradients(cfg, top, top),
        "temporary": temporary,
    }
    units = [block, block if layers > 2 else top][: layers - 1]  # of which ZeRO is reducing gradients
    peaks["first block"] = {
        "weights": weights,
        "gradients": gradients(cfg, before_first, *units),
        "temporary": temporary,
    }
    table = gradients(cfg, n["embedding"])
    peaks["embedding"] = {
        "weights": weights,
        "gradients": gradients(cfg, total, block, n["embedding"]) + fp32_surplus(cfg, n),
        "temporary": embedding_temporaries(cfg, table, accumulating and not cfg.zero),
    }
    processed = {"last norm": n["head"], "last block": top, "first block": before_first, "embedding": total}
    for name, kinds in peaks.items():
        blocks = {"first block": 1, "embedding": 0}.get(name, layers)  # not yet through backward
        head = n["head"] > 0 and name in ("last block", "first block", "embedding")
        kinds["activations"] = kinds.get("activations", 0) + blocks * activations
        kinds["activations"] += operands(cfg, layers - blocks, head)
        kinds["weight copies"] = kinds.get("weight copies", 0) + blocks * block_copies(cfg)
        if split_backward(cfg):
            kinds["gradients"] = table if name == "embedding" and not accumulating else 0
        elif accumulating:
            kinds["gradients"] = kinds.get("gradients", 0) - gradients(cfg, processed.get(name, 0))
    return peaks


def block_temporaries(cfg: Config, adds: bool) -> int:
    """Bytes of one block in backward beside the activations that it has kept; adds: to gradients of weights."""
    if split_backward(cfg):
        peak = widest(cfg) + per_token(cfg, 0, cfg.ffn * item(cfg))
    else:
        peak = max(widest(cfg) + widest_weights(cfg, adds), gathering(cfg, adds))
    return peak - saved(cfg, cfg.recompute)


def embedding_temporaries(cfg: Config, table: int, adds: bool) -> int:
    """Bytes beside the embedding's gradient, of `table` bytes, while it is computed, and added to an earlier one."""
    if cfg.lora_rank or not table:
        return 0
    rows = per_token(cfg, (fp32_item(cfg) if has_masters(cfg) else weight_item(cfg)) * cfg.dim, 0)
    if split_backward(cfg):
        rows = max(rows, table)  # the first gradient is copied
    return rows + table if adds else rows


def moments(cfg: Config) -> dict[str, dict[str, int]]:
    """Bytes by kind at the moments of a step at which memory can peak; tensors of a few elements are left out.

    Beside an operation's own, a rank holds what its other micro-batches keep, the gradients of its weights, and of
    messages its outputs until their gradients are there, and gradients of its inputs that are being sent, see walk.
    If backward is split, it has one copy of its matrices until its operations have ended, and W adds to gradients
    without temporaries. Last come norm, clipping and AdamW, which work in place: all gradients, no activations. Left
    out is what 10_mixed_precision takes for one matrix then: uncompiled, AdamW in fp32; in fp8, the new beside the old.
    """
    base = resident(cfg)
    base["temporary"] = 16 * tokens(cfg) + rotary_tables(cfg) + WORKSPACE  # token ids and targets have 8 bytes each
    peaks = {}
    for operation in walk(cfg):
        others = other_microbatches(cfg, operation)
        for name, kinds in operation_moments(cfg, operation).items():
            total = {kind: sum(part.get(kind, 0) for part in (base, others, kinds)) for kind in KINDS}
            peaks[name] = max(total, peaks.get(name, total), key=lambda kinds: sum(kinds.values()))
    optimizer = {kind: base.get(kind, 0) for kind in KINDS}
    optimizer["gradients"] = gradients_at_optimizer(cfg)
    return peaks | {"optimizer": optimizer}


def operation_moments(cfg: Config, operation: Operation) -> dict[str, dict[str, int]]:
    """Bytes by kind that an operation has, at its moments."""
    chunk = operation.chunk
    if operation.name == "F":
        return forward_moments(cfg, chunk)
    if operation.name == "W":
        return {"weight gradients": {}}
    has_embedding = operation.has_gradients[chunk] or operation.w_queue[chunk] > 0  # its gradient is computed by B
    return backward_moments(cfg, chunk, has_embedding and not sums_apart(cfg))


def other_microbatches(cfg: Config, operation: Operation) -> dict[str, int]:
    """Bytes by kind that a rank holds beside an operation's own: of other micro-batches, gradients and messages."""
    kinds = dict.fromkeys(KINDS, 0)
    if split_backward(cfg) and item(cfg) < fp32_item(cfg):
        copies = sum(rank_layers(cfg)) * matrices(cfg) + parameters(cfg)["head"]
        kinds["weight copies"] = item(cfg) * copies
    kinds["temporary"] = rotary_tables(cfg) * max(0, sum(operation.in_flight) - 1)
    messages, processed = operation.sends, 0
    chunks = zip(rank_stages(cfg), rank_layers(cfg), chunk_parameters(cfg))
    for chunk, (stage, layers, n) in enumerate(chunks):
        count, w_count = operation.in_flight[chunk], operation.w_queue[chunk]
        if operation.has_gradients[chunk]:
            processed += sum(n.values())
        elif w_count:
            processed += n["embedding"]
        messages += count * messages_kept(cfg, stage)
        kinds["activations"] += w_count * operands(cfg, layers, n["head"] > 0)
        if operation.name == "B" and operation.chunk == chunk:
            count -= 1
        for kind, size in saved_by_chunk(cfg, chunk).items():
            kinds[kind] += count * size
    kinds["activations"] += messages * per_token(cfg, item(cfg) * cfg.dim, 0)
    kinds["gradients"] = fp32_item(cfg) * processed if sums_apart(cfg) else gradients(cfg, processed)
    return kinds


def messages_kept(cfg: Config, stage: int) -> int:
    """Tensors of a message's size that a micro-batch in flight keeps between stages."""
    count = 0
    if stage + 1 < stages(cfg) and not stays(cfg, stage):
        count += 1  # the output, if no stage of this rank has it as its input
    if stage > 0 and item(cfg) < fp32_item(cfg) and not cfg.compile and cfg.recompute == "none":
        count += 1  # the input: the first norm keeps it in float32 alone
    return count


def rotary_tables(cfg: Config) -> int:
    """Bytes of cosine and sine: each forward has its own."""
    return fp32_item(cfg) * 2 * cfg.seq // cfg.cp * (cfg.dim // cfg.heads)


def gradients_at_optimizer(cfg: Config) -> int:
    """Bytes of all gradients as the optimizer reads them."""
    n, sums = parameters(cfg), sums_apart(cfg) and cfg.microbatches > 1
    if (cfg.zero or sums) and not cfg.lora_rank:
        return fp32_item(cfg) * sum(n.values()) // replicas(cfg)
    return gradients(cfg, sum(n.values())) + fp32_surplus(cfg, n)


def peak(cfg: Config) -> tuple[str, dict[str, int]]:
    """The fullest moment, and its bytes by kind."""
    return max(moments(cfg).items(), key=lambda pair: sum(pair[1].values()))


# The playbook's letters: a heads, b sequences, h width, L layers, N parameters, s tokens, t tp ranks, v vocabulary.


def book_parameters(h: int, L: int, v: int, s: int = 0) -> int:
    """1.7: a GPT's parameters. The plots (1.13) and the widget (0.4) add h·s for positions, the text does not."""
    return h * (v + s) + L * (12 * h * h + 13 * h) + 2 * h


def book_states(
    n: float, zero: int = 0, dp: int = 1, master: bool = True, accumulate: bool = False
) -> dict[str, float]:
    """1.9 and 2.21 to 2.23: bytes of bf16 weights 2N, gradients 2N, and 12N of AdamW, sharded from right to left.

    Accumulating gradients in float32 adds 4N. Erratum of 2.11, 2.25 and 3.11: these plots leave out the float32 weights
    (master=False, 8N), which the text counts. In pure float32 (1.8) the sum is 16N too.
    """
    shards = [dp if zero >= stage else 1 for stage in (3, 2, 1)]
    optimizer = (12 if master else 8) * n / shards[2]
    gradients = (6 if accumulate else 2) * n / shards[1]
    return {"weights": 2 * n / shards[0], "gradients": gradients, "optimizer": optimizer}


def book_activations(L: int, h: int, a: int, s: int, recompute="none", t=1, sp=False, once=True) -> float:
    """1.11, 1.12 and 3.12: bytes of one sequence, with GELU, dropout, and without fused attention.

    Per layer and token 34h: 10h that tensor parallelism leaves whole unless the sequence is parallel too, and 24h that
    it cuts. 5·a·s² are attention scores, which selective recomputation drops; full keeps a layer's input. Once, s·h,
    dropout of the embedding: 1.13 and 1.17 count it, 2.11, 2.25, 3.11 and 3.21 do not.
    """
    embedding = s * h if once else 0
    if recompute == "full":
        return L * 2 * s * h + embedding
    scores = 5 * a * s * s / t if recompute == "none" else 0
    layer = s * h * (34 / t if sp else 10 + 24 / t) + scores
    return L * layer + embedding


def book_widget(a, b, h, h_ff, L, s, v, act: str, t=1, sp=False, mixed=True) -> dict[str, float]:
    """0.4: bytes of activations by part, without recomputation. B: bytes per element; 1 for a dropout mask.

    Erratum: with sequence parallelism the widget does not divide the scores a·s²·b by t; here they are divided always.
    """
    B, cut = 2 if mixed else 4, t if sp else 1
    scores = (2 * B + 1) * a * s * s * b / t
    attention = s * b * h * ((5 * B + 1) / t if sp else 4 * B / t + B + 1) + scores
    widths = {"relu": 1, "gelu": 2, "swiglu": 4}[act]
    forward = s * b * h * (B + 1) / cut + widths * s * b * h_ff * B / t
    outside = (s * b * h * (1 + 2 * B) + 4 * s * b * v) / cut
    norms = 2 * s * b * h * B / cut
    return {"attention": L * attention, "feed-forward": L * forward, "norms": L * norms, "outside": outside}


def book_tables() -> dict[str, dict[str, list[float]]]:
    """The playbook's tables: title -> row -> numbers, in GiB where the title says nothing else."""
    gpt = {"1B": (16, 2048, 32), "3B": (28, 3072, 24), "8B": (32, 4096, 32)}
    gpt |= {"70B": (80, 8192, 64), "405B": (126, 16384, 128)}
    ffn, short, long = {"1B": 8192, "8B": 14336, "70B": 28672}, (1, 4, 16), (1, 2, 4, 8, 16)

    def llama(name: str, v: int) -> int:  # without norms; the 1B has one table for embedding and head
        layers, dim, heads = gpt[name]
        blocks = layers * matrices(Config(dim=dim, heads=heads, kv_heads=8, ffn=ffn[name]))
        return blocks + (1 if name == "1B" else 2) * v * dim

    def states(n: float, **cut) -> list[float]:
        return [value / GIB for value in book_states(n, master=False, **cut).values()]

    def activations(name: str, thousands: tuple[int, ...], recompute="selective", once=False, **cut) -> list[float]:
        return [book_activations(*gpt[name], 1024 * k, recompute, once=once, **cut) / GIB for k in thousands]

    totals = {}
    for n in 1, 7, 70, 405:
        totals[f"{n}B"] = [sum(book_states(n, accumulate=flag).values()) for flag in (False, True)]
    presets = {"8B": (32, 32, 4096, 16384, 32, 256, 30522, "swiglu")}
    presets["70B"] = 64, 32, 8192, 32768, 80, 256, 30522, "swiglu", 8
    widget = {name: [x / GIB for x in book_widget(*preset).values()] for name, preset in presets.items()}
    tables = {"0.4, 0.5 activations: attention, feed-forward, norms, outside the layers": widget}
    tables |= {"1.10 GB: bf16, and with float32 gradients": totals}
    tables["1.13 float32 weights at 1k, 2k, 4k, 8k, 16k tokens"] = {
        name: [4 * book_parameters(h, L, 128256, 1024 * k) / GIB for k in long] for name, (L, h, _) in gpt.items()
    }
    for recompute in ("none", "selective", "full"):
        title = f"1.13, 1.17 activations, recomputation {recompute}, at 1k, 2k, 4k, 8k, 16k tokens"
        tables[title] = {name: activations(name, long, recompute, once=True) for name in gpt}
    columns = "weights, gradients, optimizer (erratum: 8N where the text has 12N), activations at 1k"
    tables[f"2.11 {columns} tokens"] = {n: states(llama(n, 128256)) + activations(n, (1,)) for n in ffn}
    n, n_70b = llama("8B", 131072), llama("70B", 131072)
    tables[f"2.25 8B on 8 GPUs: {columns}, 4k, 16k tokens"] = {
        f"ZeRO-{zero}": states(n, zero=zero, dp=8) + activations("8B", short) for zero in range(4)
    }
    tables[f"3.11 70B: {columns}, 4k, 16k tokens"] = {
        f"tp {t}": states(n_70b / t) + activations("70B", short, t=t) for t in (1, 8, 16)
    }
    tables["3.21 70B with sequence parallelism: activations at 1k, 4k, 16k tokens"] = {
        f"tp {t}": activations("70B", short, t=t, sp=True) for t in (8, 16)
    }
    tables["2.12 weights of 70B in 2 bytes: GB, GiB (erratum: 133 is printed)"] = {"70B": [140, 140e9 / GIB]}
    return tables


# ---------------------------------------------------------------------------------------------------------- training
def load(recipe: str) -> ModuleType:
    """Import a recipe from its file; names like 1f1b are no module names."""
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(recipe).stem}", recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def config_of(recipe: str, cfg: object, rank: int, world: int) -> Config:
    """What to predict for a rank of a recipe whose own Config is cfg."""
    folder, name = Path(recipe).resolve().parent.name, Path(recipe).stem
    values = {f.name: getattr(cfg, f.name) for f in fields(Config) if hasattr(cfg, f.name)}
    values |= RECIPES[folder][name]
    if folder in PROCESSES:
        values[PROCESSES[folder]] = world
    if PROCESSES.get(folder) == "pp":
        values["stage"] = rank
    return Config(**values)


def measure_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes in the storages of the weights, and of the optimizer's state and the shards it steps, if separate."""
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    states = list(getattr(optimizer, "state", {}).values())
    states += [vars(slot) for slot in getattr(optimizer, "slots", [])]
    tensors = [t for state in states for t in state.values() if torch.is_tensor(t)]
    tensors += [p for group in optimizer.param_groups for p in group.get("params", [])]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    optimizer_bytes = sum(size for address, size in sizes.items() if address not in weights)
    return {"weights": sum(weights.values()), "optimizer": optimizer_bytes}


def measure(recipe: str, flags: list[str]) -> tuple[Config, int, dict[str, int]]:
    """Train a few steps. The run as our Config, the peak of the last two in bytes, and those of weights and optimizer.

    The recipe's own Config is the first argument of its train_step, and so its flags need not be understood here.
    """
    module = load(recipe)
    steps = iter(range(STEPS))
    measurement = []
    train_step = module.train_step

    def watched_step(cfg, model, optimizer, *batch):
        if next(steps) == STEPS - 2:
            torch.cuda.reset_peak_memory_stats()
        result = train_step(cfg, model, optimizer, *batch)
        measurement[:] = cfg, torch.cuda.max_memory_allocated(), measure_tensors(model, optimizer)
        return result

    module.train_step = watched_step
    sys.argv = [recipe, *flags, "--steps", str(STEPS)]
    module.main()
    cfg, peak_bytes, tensors = measurement
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return config_of(recipe, cfg, rank, world), peak_bytes, tensors


def compare(recipe: str, flags: list[str], file: str | None) -> None:
    """Measure, print prediction and measurement of this rank, and let rank 0 add them to a file."""
    folder, name = Path(recipe).resolve().parent.name, Path(recipe).stem
    recipes = [f"{folder}/{name}.py" for folder, names in RECIPES.items() for name in names]
    if f"{folder}/{name}.py" not in recipes or not Path(recipe).is_file():
        raise SystemExit(f"--measure {recipe}: must be one of {', '.join(recipes)}")
    if not torch.cuda.is_available() or {"cpu", "--device=cpu"} & set(flags):
        raise SystemExit(f"--measure {recipe}: needs a GPU, since torch counts no peak on CPUs")
    cfg, measured, tensors = measure(recipe, flags)
    moment, kinds = peak(cfg)
    rank = int(os.environ.get("RANK", 0))
    total = sum(kinds.values())
    predicted = f"predicted {total / GIB:.2f} GiB at: {moment}"
    error = f"measured {measured / GIB:.2f} GiB  error {total / measured - 1:+.1%}"
    parts = "  ".join(f"{kind} {kinds[kind] / GIB:.3f} held {size / GIB:.3f}" for kind, size in tensors.items())
    print(f"rank {rank}  {recipe}  {predicted}  {error}  {parts}", flush=True)
    if file and rank == 0:
        rows = json.loads(Path(file).read_text())["rows"] if Path(file).exists() else []
        row = {"file": f"{folder}/{name}.py", "flags": " ".join(flags), "gpus": int(os.environ.get("WORLD_SIZE", 1))}
        rows = [old for old in rows if row != {key: old[key] for key in row}]  # measured again: replaced
        row |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "moment": moment}
        rows.append({**row, "predicted": kinds, "measured": measured})
        Path(file).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


# -------------------------------------------------------------------------------------------------------------- main
def draw(picture: Path, bars: dict[str, dict[str, int]], measured: list[int | None], title: str) -> None:
    """A bar per moment or run, stacked by kind; a tick is what was measured, if it was. The optimizer's are apart."""
    style = {"svg.fonttype": "none", "svg.hashsalt": "memory", "font.size": 10, "savefig.transparent": True}
    style |= {"hatch.color": "#404a56", "hatch.linewidth": 0.5, "axes.spines.top": False, "axes.spines.right": False}
    inks = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
    matplotlib.rcParams.update(style | dict.fromkeys(inks, INK))
    places = [place + 0.5 if label.endswith(", optimizer") else place for place, label in enumerate(bars)]
    figure, axis = pyplot.subplots(figsize=(6.6, 0.3 * len(bars) + 1.9), layout="constrained")
    left = [0] * len(bars)
    for kind, (color, hatch) in KINDS.items():
        sizes = [kinds[kind] / GIB for kinds in bars.values()]
        patches = axis.barh(places, sizes, 0.7, left, color=color, hatch=hatch, label=kind)
        left = [bar.get_x() + bar.get_width() for bar in patches]
    if any(measured):
        axis.plot([size and size / GIB for size in measured], places, "|", color=INK, ms=20, mew=2.5, label="measured")
    axis.set(xlabel="GiB per rank", yticks=places, yticklabels=bars, ylim=(places[-1] + 0.6, -0.6))
    figure.suptitle(title, x=0.01, ha="left", size=9, wrap=True)
    figure.legend(loc="outside lower center", ncol=4, frameon=False)
    figure.savefig(picture, metadata={"Date": None})


def report(cfg: Config) -> None:
    """The peak by kind, and all moments."""
    name, kinds = peak(cfg)
    n = sum(parameters(cfg).values())
    print(f"{n:,} parameters per rank before ZeRO, {tokens(cfg):,} tokens per micro-batch; the peak is at: {name}")
    for kind, size in [*kinds.items(), ("peak", sum(kinds.values()))]:
        print(f"{kind:15}{size:>20,} bytes {size / GIB:>10.3f} GiB")
    totals = [f"{name} {sum(kinds.values()) / GIB:.2f}" for name, kinds in moments(cfg).items()]
    print("moments         " + "   ".join(totals))


def parse_config() -> tuple[Namespace, Config | list[str]]:
    """Our own flags, and the run to predict; with --measure the recipe's flags instead."""
    actions = ArgumentParser(add_help=False, allow_abbrev=False)
    actions.add_argument("--measure", metavar="RECIPE", help="train with this recipe, whose flags follow, and compare")
    actions.add_argument("--json", metavar="FILE", help="add what was measured to this file")
    actions.add_argument(
        "--draw", nargs="+", metavar="SVG [FILE]", help="draw into a picture; FILE as --json writes it"
    )
    actions.add_argument("--playbook", action="store_true", help="print the playbook's tables")
    args, flags = actions.parse_known_args()
    if args.measure:
        return args, flags
    parser = ArgumentParser(parents=[actions], description=__doc__, argument_default=SUPPRESS, allow_abbrev=False)
    parser.formatter_class, parser.usage = RawDescriptionHelpFormatter, SUPPRESS
    for f in fields(Config):
        if f.type is bool:
            parser.add_argument(f"--{f.name}", action="store_true")
        else:
            choices = get_args(f.type) or None
            parser.add_argument(f"--{f.name}", type=type(f.default), choices=choices, help=f"default: {f.default}")
    values = {name: value for name, value in vars(parser.parse_args()).items() if name not in vars(args)}
    return args, Config(**{**PRESETS[values.get("preset", "tiny")], **values})


def check(cfg: Config) -> None:
    """Exit with one line that names the invalid flag, its value, and what would work."""
    for flag, value in asdict(cfg).items():
        least = 0 if flag in ("zero", "stage", "ulysses", "lora_rank") else 1
        if type(value) is int and value < least:
            raise SystemExit(f"--{flag} {value}: must be at least {least}")
    parts, cut = cfg.dp * cfg.microbatches, math.gcd(cfg.heads, cfg.ffn)
    kv, seq = max(1, cfg.kv_heads // cfg.tp), cfg.seq // cfg.cp
    swap = cfg.ulysses or cfg.cp
    uneven = cfg.kv_heads % cfg.tp and cfg.tp % cfg.kv_heads
    low = cfg.dtype == "float16" or cfg.fp8 != "none" and (cfg.zero, cfg.fp8) != (3, "tensorwise")
    several = cfg.zero or split_backward(cfg) or max(cfg.dp, cfg.tp, cfg.cp, cfg.pp) > 1
    low_memory = (cfg.precision, cfg.recompute, cfg.fp8) == ("stochastic", "selective", "none")
    m = cfg.microbatches
    times = {"interleaved": "--chunks times ", "zbv": "twice "}.get(cfg.schedule, "")
    problems = [
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.batch % parts, f"--batch {cfg.batch}: must be divisible by --dp times --microbatches, {parts}"),
        (cut % cfg.tp, f"--tp {cfg.tp}: must divide --heads and --ffn, and so {cut}"),
        (uneven, f"--kv_heads {cfg.kv_heads}: must divide --tp {cfg.tp}, or be its multiple"),
        (cfg.seq % cfg.cp, f"--cp {cfg.cp}: must divide --seq {cfg.seq}"),
        (cfg.sequence_parallel and seq % cfg.tp, f"--tp {cfg.tp}: must divide --seq / --cp, {seq}"),
        (cfg.cp % swap, f"--ulysses {swap}: must divide --cp {cfg.cp}"),
        (cfg.heads // cfg.tp % swap, f"--ulysses {swap}: must divide --heads {cfg.heads} / --tp {cfg.tp}"),
        (
            kv % swap and swap % kv,
            f"--ulysses {swap}: must divide --kv_heads {cfg.kv_heads} / --tp {cfg.tp}, or be a multiple of it",
        ),
        (cfg.layers > 10_000, f"--layers {cfg.layers}: must be at most 10000"),
        (cfg.layers < stages(cfg), f"--layers {cfg.layers}: must be at least {times}--pp {cfg.pp}"),
        (cfg.stage >= cfg.pp, f"--stage {cfg.stage}: must be below --pp {cfg.pp}"),
        (cfg.schedule == "dualpipe" and cfg.pp % 2, f"--pp {cfg.pp}: must be even with --schedule dualpipe"),
        (
            cfg.schedule == "interleaved" and cfg.chunks > 1 and m % cfg.pp,
            f"--microbatches {m}: must be a multiple of --pp {cfg.pp}",
        ),
        (cfg.zero and cfg.pp > 1, f"--zero {cfg.zero}: is predicted without --pp only"),
        (
            low and cfg.precision == "autocast",
            f"--precision autocast: must be masters or stochastic with --fp8 {cfg.fp8} and --dtype {cfg.dtype}",
        ),
        (
            cfg.precision != "autocast" and (several or cfg.lora_rank or cfg.recompute != "none" and not low_memory),
            f"--precision {cfg.precision}: needs one GPU and no --recompute or --lora_rank, except as in low_memory.py",
        ),
        (
            cfg.lora_rank and (max(cfg.tp, cfg.cp, cfg.pp) > 1 or cfg.zero in (1, 2) or cfg.recompute != "none"),
            f"--lora_rank {cfg.lora_rank}: is predicted without --tp, --cp, --pp, --zero 1 and 2, and --recompute only",
        ),
        (
            cfg.schedule not in ("1f1b", "afab") and (cfg.zero or cfg.gather_kv or cfg.recompute != "none"),
            f"--schedule {cfg.schedule}: is predicted without --zero, --gather_kv and --recompute only",
        ),
    ]
    for wrong, problem in problems:
        if wrong:
            raise SystemExit(problem)


def main() -> None:
    args, run = parse_config()
    if args.measure:
        return compare(args.measure, run, args.json)
    if args.playbook:
        for title, rows in book_tables().items():
            lines = [f"{name:8}" + "".join(f"{x:>12,.3f}" for x in row) for name, row in rows.items()]
            print(title, *lines, sep="\n  ")
        return
    picture = Path(args.draw[0] if args.draw else "memory.svg")
    if picture.suffix != ".svg" or picture.is_dir() or not picture.parent.is_dir():
        raise SystemExit(f"--draw {picture}: must be an .svg file in a folder that is there")
    if args.draw and len(args.draw) > 1:
        if missing := [file for file in args.draw[1:] if not Path(file).is_file()]:
            raise SystemExit(f"--draw {missing[0]}: no such file")
        try:
            rows = [row for file in args.draw[1:] for row in json.loads(Path(file).read_text())["rows"]]
            bars = {row.get("label", Path(row["file"]).stem): row["predicted"] for row in rows}
            title = f"predicted by kind, and measured peak; {rows[0]['gpus']} x {rows[0]['gpu']}, {rows[0]['flags']}"
            measured = [row["measured"] for row in rows]
        except (AttributeError, LookupError, TypeError, ValueError):
            raise SystemExit(f"--draw {' '.join(args.draw[1:])}: must be files that --json has written") from None
        return draw(picture, bars, measured, title)
    check(run)
    report(run)
    if args.draw:
        draw(picture, moments(run), [], " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
