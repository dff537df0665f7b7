"""Find the best layout: predict memory and step time of every way to cut a model over GPUs, as recipes here train.

1. Which layouts fit in memory? The fullest rank counts, at its fullest moment.
2. Which of them reach the global batch?
3. Which is the fastest? In a simulation every rank runs its pipeline's operations. Compute takes its time at measured
   rates; S bytes on n ranks take latency + S·(n-1)/n / bandwidth, half of it where it overlaps with compute.

Parent:   none; split_layers, schedule and flops_per_token are 08_4d/moe.py's, schedule_in_a_v is 06_pipeline/zbv.py's
Run:      python 08_4d/plan.py --preset llama3_8b --gpus 64 --batch 512 --seq 8192
          python 08_4d/plan.py --playbook
          python 08_4d/plan.py --scale --draw 08_4d/scale.svg
Source:   Ultra-Scale Playbook, "Finding the best training configuration"; Llama 3, arXiv:2407.21783, table 4
"""

import argparse
import bisect
import csv
import functools
import itertools
import json
import math
import os
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, get_args

import matplotlib
from matplotlib import pyplot

# ------------------------------------------------------------------------------------------------------------ config
GIB = 2**30
PRESETS = {  # of train.py, and the two larger models of Llama 3.1
    "tiny": dict(),
    "smollm_1_7b": dict(layers=24, dim=2048, heads=32, kv_heads=32, ffn=8192, vocab=49152),
    "llama3_1b": dict(layers=16, dim=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256),
    "llama3_8b": dict(layers=32, dim=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "llama3_70b": dict(layers=80, dim=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    "llama3_405b": dict(layers=126, dim=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256),
    # mixtures of experts, as in 08_4d/moe.py, where Qwen3's heads are dim / heads wide, not 128
    "mixtral_8x7b": dict(layers=32, dim=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, experts=8, top_k=2),
    "olmoe_1b_7b": dict(layers=16, dim=2048, heads=16, kv_heads=16, ffn=1024, vocab=50304, experts=64, top_k=8),
    "qwen3_30b_a3b": dict(layers=48, dim=2048, heads=32, kv_heads=4, ffn=768, vocab=151936, experts=128, top_k=8),
}
NVLINK_LATENCY = 20e-6  # seconds per collective inside a node: all-reduce of 1 KiB to 256 MiB, suite collectives
# The share of its time that a collective costs beside a matmul, which lends it SMs: suites zero and zero_8b.
CONTENTION = 0.5
# Everyone waits for tensor parallelism's collectives, which begin when the last rank does: 45 of 134 MB on 2 ranks take
# 15.0 ms in a step (tensor_few_layers, profile), and 9.5 ms by the rates above. On 4 ranks 17.3 and 13.9, 1.25 times.
WAITING = 1.6
HOST = 6e-3  # seconds per step in which a GPU idles, and clips, logs: profiles of suites data_parallel, zero_stages
# The next eight are of nanotron and fitted on half of its sweep. SPEED: of its compute, which is eager, to our rates.
SPEED = 0.75
# Seconds in which it launches a block's kernels, forward and backward: a block of a small micro-batch takes as long.
LAUNCH = 4.45e-3
# Extra launch seconds per rank of tp in a pipeline over several nodes: of any model and micro-batch.
CROWDED = 2.1e-3
# Seconds that a message between stages costs each of the two where pipelines crawl, see stall. Pipelines predicted to
# need FULL bytes crawl, too: the allocator frees blocks in every micro-batch, and asks for them again.
STALL = 0.29
FULL = 7.6e10
# FRAGMENTS: bytes that the allocator loses. HELD: gathered activations whose memory waits for NCCL's stream, because
# the CPU is ahead; by pp, 25 if that is above 2. COPIES: bytes per weight of ZeRO-1's copies at the optimizer.
FRAGMENTS = 3e8
HELD = {1: 45, 2: 0}
COPIES = 9
# The playbook's models (8.5): no grouped queries.
BOOK = {
    "1.34B": dict(layers=16, dim=2048, heads=32, kv_heads=32, ffn=8192),
    "3.57B": dict(layers=28, dim=3072, heads=32, kv_heads=32, ffn=8192),
    "8.86B": dict(layers=32, dim=4096, heads=32, kv_heads=32, ffn=14336),
    "80B": dict(layers=80, dim=8192, heads=64, kv_heads=64, ffn=28672),
}
BOOK_RUNS = dict(machine="H100-EFA", zero=1, recompute="none")
COLUMNS = "model nodes dp tp pp micro_batches micro_batch_size zero tokens_per_s_per_gpu gpu_memory_GB".split()
# Its best configurations (8.4): nodes, model, GB, dp, tp, pp, micro-batches, sequences in one, ZeRO, tokens/s/GPU.
CELLS = """
 1 1.34B 41.76   4  1  2  16 4 1 38895 |  1 3.57B 56.87   4  1  2  32 2 1 16426 |  1 8.86B 63.07   2  1  4 128 1 1  7503
 2 1.34B 19.45   8  1  2  32 1 1 36497 |  2 3.57B 54.31   8  1  2  16 2 1 15402 |  2 8.86B 58.34   4  4  1  16 4 1  7290
 4 1.34B 16.39  16  1  2  16 1 1 33677 |  4 3.57B 53.33  16  1  2   8 2 1 14210 |  4 8.86B 61.10  16  1  2  16 1 1  7186
 8 1.34B 16.27  32  1  2   8 1 1 28494 |  8 3.57B 36.73  32  1  2   8 1 1 12501 |  8 8.86B 59.09  32  1  2   8 1 1  6555
16 1.34B 38.84  64  2  1   1 4 0 30186 | 16 3.57B 66.20  32  4  1   1 8 0 13337 | 16 8.86B 66.88  16  8  1   2 8 0  6028
32 1.34B 19.57  64  4  1   1 4 0 23775 | 32 3.57B 38.98  64  4  1   1 4 0 10323 | 32 8.86B 63.39  32  8  1   1 8 0  5428
64 1.34B  8.40 128  2  2   1 2 1  4603 | 64 3.57B 16.42 128  4  1   1 2 1  4045 | 64 8.86B 57.76 128  4  1   1 2 0  3101
 4   80B 65.97   1  8  4 256 1 0   285 |  8   80B 63.07   1  4 16 256 1 0   665 | 16   80B 61.18   1  4 32 256 1 0   662
32   80B 64.21   4  4 16  64 1 1   594 | 64   80B 53.46  32 16  1   4 2 1   343"""
# Llama 3 405B, table 4: dp, cp, tp, pp, sequences per dp rank, tokens of one, MFU in %.
LLAMA = [(64, 1, 8, 16, 32, 8192, 43), (128, 1, 8, 16, 16, 8192, 41), (8, 16, 8, 16, 16, 131072, 38)]
CHUNKS = 1, 2, 4  # stages per rank that are tried
RULES = (  # of layouts, as cuts tries them
    "tp must divide --heads and --ffn, and divide --kv_heads or be its multiple; twice cp must divide --seq; pp times "
    "--chunks must be at most --layers; --shard must divide dp; ZeRO-2 and 3 need dp above 1"
)
# Most predicted speeds on one host, with 8,192 tokens or more per GPU and micro-batch, are off by less than this, all
# by less than 8 %. With 4,096 tokens, layouts of SmolLM-1.7B were off by 25 and 33 %.
ERROR = 0.05
MODEL = "layers dim heads kv_heads ffn vocab experts top_k seq".split()  # flags on which the FLOPs of a token depend
RECOMPUTE = "none", "selective", "full"  # as 01_single_gpu/train.py, selective_ and activation_checkpointing.py
# Megatron-LM's flags. Its selective recomputation differs: it runs the MLP again, torchtitan's every second matmul.
SELECTIVE = {"granularity": "selective", "modules": "layernorm mlp"}
KINDS = {"none": {}, "selective": SELECTIVE, "full": {"granularity": "full", "method": "uniform", "num-layers": 1}}
AXES = dict(dp="data", cp="context", tp="tensor", pp="pipeline")
SCALE = 8, 64, 512, 2048, 8192, 16384  # GPUs of --scale
# of pictures: texts and axes are legible on white and on black, and nobody needs the colors
INK = "#757d88"
MARKS = [("#4f93d1", "o"), ("#d9822b", "^"), ("#3f9f5c", "s"), ("#d64541", "P"), ("#9a6dd7", "D"), ("#2aa198", "v")]
PARTS = dict(  # of a step
    compute=("#9cc3e6", ""),
    recompute=("#5b8db8", "xxx"),
    tp=("#f2b661", "///"),
    cp=("#d9c2e9", "---"),
    ep=("#e3a5b4", "..."),
    dp=("#a9d6a0", "\\\\\\"),
    pp=("#c3a3e0", "+++"),
    optimizer=("#c8c8c8", ""),
    bubble=("#e58f65", "|||"),
)


@dataclass(frozen=True)
class Machine:
    """A kind of cluster: what each of its GPUs reaches. Rates are per second; a node has --gpus_per_node GPUs."""

    peak: float  # bf16 FLOPs by which MFU is counted
    usable: float  # GiB that tensors may take: nvidia-smi's, less about 2 for CUDA and NCCL, and 4 % for fragments
    bandwidth: float  # bytes of memory that AdamW moves
    matmuls: float  # FLOPs of matmuls within a step, at the power limit
    grouped: float  # of those of experts, a matrix for each block of rows
    # FLOPs of causal attention, forward and backward, which has 2.5 times as many, by head size, for long sequences; s
    # tokens reach s/(s+400) of it
    attention: dict[int, tuple[float, float]]
    nvlink: float  # bytes of a collective inside a node
    pair: float  # bytes of one send and receive of 16 MiB inside a node
    network: float  # bytes between nodes
    hop: float  # seconds that a step of a ring between nodes takes
    pod: int = 2**30  # nodes within which all can send at full speed at once
    oversubscribed: float = 1  # how many times slower each is if all send to another pod at once


# Matmuls: 740e12 with dim 2048 (kernel_steps.json), less with 4096: what one GPU needs for llama3_8b leaves 690e12
# (suite mixed_llama3_8b). Attention: head 64 kernel_steps.json, 128 6 % below what context_attention has alone. NVLink:
# suite collectives. AdamW: 3.4e12 on an H200 (kernel_steps.json), on an H100 as many fewer as its specification has.
# Experts' matmuls: suite expert_layer. Not measured: the network, 400 Gb/s of which NCCL reaches about 80 %, and its
# latency.
ATTENTION = {64: (440e12, 390e12), 128: (590e12, 510e12)}
H100 = Machine(
    peak=989.5e12,
    usable=74,
    bandwidth=2.4e12,
    matmuls=720e12,
    grouped=585e12,
    attention=ATTENTION,
    nvlink=349e9,
    pair=135e9,
    network=40e9,
    hop=15e-6,
)
MACHINES = {
    "H100": H100,
    "H200": replace(H100, usable=132, bandwidth=3.4e12),
    # AWS, where the playbook was measured (5.1): all-gathers of 256 MB take 1.0 ms on 8 ranks and 23 on 512, which is
    # 511 hops and the bytes
    "H100-EFA": replace(H100, hop=43e-6),
    # Llama 3's (3.3.1): pods of 3,072 GPUs, between which the network is oversubscribed 1:7.
    "H100-pods": replace(H100, pod=384, oversubscribed=7),
    # Nothing was measured of the next two: each number is the share of the specification that an H100 reaches. 80 GB,
    # NVLink, 200 Gb/s between nodes; and 24 GB, PCIe 4.0, 10 Gb/s.
    "A100": Machine(
        peak=312e12,
        usable=74,
        bandwidth=1.46e12,
        matmuls=227e12,
        grouped=184e12,
        attention={64: (139e12, 123e12), 128: (186e12, 161e12)},
        nvlink=233e9,
        pair=90e9,
        network=20e9,
        hop=15e-6,
    ),
    "RTX4090": Machine(
        peak=165e12,
        usable=21,
        bandwidth=0.72e12,
        matmuls=120e12,
        grouped=98e12,
        attention={64: (73e12, 65e12), 128: (98e12, 85e12)},
        nvlink=24e9,
        pair=9.5e9,
        network=1e9,
        hop=15e-6,
    ),
}


@dataclass(frozen=True)
class Config:
    """Every field is a flag. Flags override the preset, which overrides these defaults."""

    preset: Literal[tuple(PRESETS)] = "tiny"
    layers: int = 8
    dim: int = 128
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 384
    vocab: int = 256
    experts: int = 0  # MLPs of --ffn in every layer, of which a router chooses --top_k for each token; 0: one MLP
    top_k: int = 1
    seq: int = 128
    batch: int = 16  # sequences per step, over all ranks
    gpus: int = 8
    gpus_per_node: int = 8
    machine: Literal[tuple(MACHINES)] = "H100"
    memory: float = 0.0  # GiB per GPU that tensors may take; 0: what this machine has
    tflops: float = 0.0  # bf16 TFLOP/s of a GPU by its specification; 0: what this machine has
    dp: int = 0  # ranks that split the batch; 0 here and below: whatever is best
    cp: int = 0  # ranks that split every sequence
    tp: int = 0  # ranks that split every block
    pp: int = 0  # ranks that split the layers
    ep: int = 0  # neighbours among the dp·cp ranks that split the experts; dp·cp/ep ranks hold the same ones
    chunks: int = 0  # stages per rank of pp: 1 is 1F1B, more are interleaved
    zbv: bool = False  # plan only zero-bubble pipelines in a V, as 06_pipeline/zbv.py: backward split in B and W
    zero: Literal[0, 1, 2, 3] = 0  # 1: dp·cp ranks share AdamW's state; 2: summed gradients, too; 3: weights, too
    shard: int = 0  # ranks that share the weights with ZeRO-3; fewer than dp: HSDP
    microbatches: int = 0  # parts of a rank's batch that go through the pipeline one after another
    recompute: Literal[("any", *RECOMPUTE)] = "any"  # what backward computes again; any: the least that fits
    ours: bool = False  # only what recipes here can do
    top: int = 12  # rows of the table
    draw: str = ""  # draw the result into this .svg file
    measured: str = ""  # a .csv file of nanotron's runs: append predictions instead, and say how good they are
    playbook: bool = False  # compare with the playbook's best configurations instead
    scale: bool = False  # the best layouts of three models on 8 to 16,384 H100s instead


@dataclass(frozen=True)
class Trainer:
    """What differs between programs that train: train.py has the defaults."""

    speed: float = 1  # of compute
    zero: bool = True  # AdamW's state is sharded over dp·cp
    accumulates: bool = False  # gradients add up in fp32, with one micro-batch, too
    sent: int = 2  # bytes of a gradient on the wire
    all_to_all: bool = True  # reduces gradients so; otherwise by rings, and without ZeRO these gather sums, too
    cast: int = 0  # bytes per weight and micro-batch of a copy in bf16, and of its gradient in fp32
    gathers_keys: bool = False  # context parallelism gathers all keys and values before attention, and has no ring
    async_tp: bool = False  # all of tp's collectives overlap with matmuls, as in async_tensor_parallel.py
    launch: float = 0  # seconds in which the CPU launches a block's kernels, forward and backward: they wait for it
    crowded: float = 0  # seconds that this takes longer, per rank of tp, in a pipeline over several nodes
    stall: float = 0  # seconds that each message of a crawling pipeline costs both stages
    hidden: bool = True  # ZeRO's collectives overlap with compute
    eager: bool = False  # not compiled: norms and SwiGLU keep more for backward, the loss has fp32 logits
    tied: bool = False  # embedding and head are one matrix: a single stage holds it once
    shares: bool = False  # a stage takes blocks until it has its share of the weights, see equal_shares
    held: bool = False  # memory waits for NCCL's stream, and ZeRO copies, see HELD and COPIES


# The recipes of one technique without ZeRO: fp32 weights, whose bf16 copies and fp32 gradients are made anew each time.
FP32_WEIGHTS = Trainer(zero=False, sent=4, all_to_all=False, cast=8)


@dataclass(frozen=True)
class Step:
    """Seconds of a step by what they are spent on; their sum is the step."""

    compute: float  # this and the next four: the mean of all stages
    recompute: float  # forward once more, with its communication
    tp: float
    cp: float
    ep: float
    dp: float  # what the step takes less without ZeRO's traffic
    pp: float  # and then without messages
    optimizer: float  # and what the host does meanwhile
    bubble: float  # the rest: the pipeline's ends, uneven stages

    def total(self) -> float:
        """Seconds of the step."""
        return sum(asdict(self).values())


# ------------------------------------------------------------------------------------------------------------- model
# Of a rank: n tokens of a micro-batch. d, f, v: --dim, --ffn, --vocab.


def tokens(cfg: Config) -> int:
    """Tokens of a micro-batch that a rank of cp has; tp ranks have the same ones."""
    return cfg.batch // (cfg.dp * cfg.microbatches) * cfg.seq // cfg.cp


def kv_width(cfg: Config) -> int:
    """Width of a rank's keys; with more tp ranks than key heads each rank has one head."""
    return cfg.dim // cfg.heads * max(1, cfg.kv_heads // cfg.tp)


def matrices(cfg: Config) -> int:
    """Elements of a block's matrices on a rank, without experts; their router is on all ranks."""
    mlp = 0 if cfg.experts else 3 * cfg.dim * cfg.ffn
    return (2 * cfg.dim * cfg.dim + mlp) // cfg.tp + 2 * cfg.dim * kv_width(cfg) + cfg.dim * cfg.experts


def table_elements(cfg: Config) -> int:
    """Elements of the embedding, or of the head, on a rank."""
    return -(-cfg.vocab // cfg.tp) * cfg.dim


def expert_matrices(cfg: Config) -> int:
    """Elements of a block's experts on a rank: 1/tp of each of experts/ep."""
    return cfg.experts // max(1, cfg.ep) * 3 * cfg.dim * cfg.ffn // cfg.tp


def split_layers(cfg: Config, stages: int) -> list[range]:
    """Divide the layers so that the largest stage, which sets the pace, is as small as possible."""
    head = 6 * cfg.dim * cfg.vocab  # FLOPs per token
    block = (flops_per_token(cfg) - head) / cfg.layers
    counts = [1] * stages  # layers of each stage
    loads = [block] * stages  # FLOPs per token of each stage
    loads[0] += cfg.dim  # embedding: backward adds dim elements per token
    loads[-1] += head
    for _ in range(cfg.layers - stages):
        # of equal loads the last, since later stages keep fewer activations
        lightest = min(reversed(range(stages)), key=loads.__getitem__)
        counts[lightest] += 1
        loads[lightest] += block
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts)]


def equal_shares(cfg: Config, stages: int) -> list[range]:
    """Divide the layers as nanotron does: each stage takes blocks until it has its share of all weights.

    The last ones have the head's, too, so the first stages have more blocks, and they hold more micro-batches.
    """
    block = 4 * cfg.dim**2 + 3 * cfg.dim * cfg.ffn
    share = (cfg.layers * block + cfg.dim * cfg.vocab) / stages
    counts = [0] * stages
    stage = 0
    for i in range(1, cfg.layers + 1):
        counts[stage] += 1
        if i * block >= (stage + 1) * share:
            stage += 1
    return [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(stages)]


@functools.cache
def layers_of(stages: int, shares: bool, **model: int) -> list[int]:
    """How many layers each stage has, the same for all layouts with as many stages."""
    split = equal_shares if shares else split_layers
    return [len(layers) for layers in split(Config(**model), stages)]


def has_ends(cfg: Config, rank: int) -> tuple[bool, bool]:
    """Return whether a rank of pp has the embedding, and whether it has the head."""
    return rank == 0, rank == (0 if cfg.zbv else cfg.pp - 1)


def stages(cfg: Config, by: Trainer) -> list[list[int]]:
    """Elements of the units of every rank of pp, as ZeRO gathers them: embedding, blocks, norm and head.

    The experts of a block are a separate unit, which is sharded over edp ranks, and not among these.
    """
    table, p = table_elements(cfg), cfg.pp
    head = cfg.dim
    if p > 1 or not by.tied:
        head += table
    chunks = cfg.chunks if p * cfg.chunks <= cfg.layers else 1  # Llama 3's first and last chunk have no block
    counts = layers_of(p * chunks, by.shares, **{name: getattr(cfg, name) for name in MODEL})
    units_of_ranks = []
    for rank in range(p):
        has_embedding, has_head = has_ends(cfg, rank)
        layers = counts[rank] + counts[2 * p - 1 - rank] if cfg.zbv else sum(counts[rank::p])
        units = [matrices(cfg) + 2 * cfg.dim] * layers
        if has_embedding:
            units.insert(0, table)
        if has_head:
            units.append(head)
        units_of_ranks.append(units)
    return units_of_ranks


def stall(cfg: Config, by: Trainer) -> float:
    """Seconds that a message between stages costs each of the two.

    Some of nanotron's pipelines over several nodes crawl: a micro-batch takes 0.6 s longer with two stages and 1.1 with
    more, of any model and any size. On 64 nodes all do, on fewer those with tp over four nodes, and most without ZeRO
    and with dp of 4 or more. The cause is not known.
    """
    crawls = cfg.gpus >= 512 or cfg.tp >= 32 or (not by.zero and cfg.dp >= 4)
    return by.stall if crawls and spans_nodes(cfg) else 0


def spans_nodes(cfg: Config) -> bool:
    """Whether the layout has a pipeline, on several nodes."""
    return cfg.pp > 1 and cfg.gpus > cfg.gpus_per_node


def ahead(cfg: Config, rank: int) -> int:
    """Micro-batches in flight on a rank of pp, each in one of its stages, beside the one whose backward runs first."""
    if cfg.zbv:
        return 2 * cfg.pp - 1
    return (cfg.pp - 1 - rank) * min(cfg.chunks, 2) + (cfg.chunks - 1) * cfg.pp


def kept(cfg: Config, eager: bool = False) -> int:
    """Bytes that a block keeps of a micro-batch, as saved() of 01_single_gpu/memory.py explains."""
    if cfg.recompute == "full":
        return tokens(cfg) // cfg.tp * 2 * cfg.dim
    attention = 4 * cfg.dim + 4 * kv_width(cfg) * cfg.tp + 4 * cfg.heads  # q, o, k, v, log-sum-exp
    if cfg.recompute == "selective":  # also x, the outputs of o_proj, gate and up, in eager mode of down
        return tokens(cfg) // cfg.tp * ((6 if eager else 4) * cfg.dim + attention + 4 * cfg.ffn)
    mlp = (8 if eager else 6) * cfg.ffn
    if cfg.experts:
        # per row its input, which every rank of tp has, gate, up, their product, and two permutations with inverses;
        # per token what the router reads, which tp gathers, and its probabilities
        mlp = cfg.top_k * (2 * cfg.dim * cfg.tp + 6 * cfg.ffn + 32 * cfg.tp)
        mlp += 2 * cfg.dim * (cfg.tp - 1) + 4 * cfg.experts * cfg.tp
    return tokens(cfg) // cfg.tp * ((16 if eager else 8) * cfg.dim + 8 + attention + mlp)


def widest(cfg: Config) -> int:
    """Bytes that a block's backward takes at its widest moment, the derivative of SwiGLU, beside what it has kept."""
    d, f, n = cfg.dim, cfg.ffn, tokens(cfg) // cfg.tp
    if cfg.experts:  # gradients of the rows' outputs and products, and of down_proj
        again = 0 if cfg.recompute == "none" else kept(replace(cfg, recompute="none"))
        return again + n * (2 * d + cfg.top_k * (2 * d * cfg.tp + 2 * f)) + 2 * expert_matrices(cfg) // 3
    if cfg.recompute == "full":
        return n * (14 * d + 8 + 4 * kv_width(cfg) * cfg.tp + 4 * cfg.heads + 12 * f)
    if cfg.recompute == "selective":
        return n * (2 * d + 8 * f)
    return n * (2 * d + 2 * f) + 2 * d * f // cfg.tp  # and down_proj's gradient


def memory_of_shards(cfg: Config) -> int:
    """Bytes of a rank at its fullest moment with ZeRO-3 or HSDP: 03_zero/zero3.py, which has full weights of few units.

    These are the head and the last block, which are not gathered again, and two more: one computes, one is gathered.
    """
    d, n = cfg.dim, tokens(cfg) // cfg.tp
    table, block = table_elements(cfg), matrices(cfg) + 2 * d
    activations, temporary = cfg.layers * kept(cfg), widest(cfg)
    logits, norm = 2 * n * cfg.vocab, n * (10 * d + 4)
    shard = (2 * table + cfg.layers * block) // cfg.shard
    gradients = 0 if cfg.microbatches > 1 else 4 * shard  # they come with the first backward
    moments = {
        "loss": activations + norm + 2 * logits + 2 * (table + block),
        "head": activations + norm + logits + 2 * n * d + 2 * (table + block) + 2 * table,
        "last block": activations + temporary + 4 * block + 6 * table,
        "first block": gradients + kept(cfg) + temporary + 4 * block + 8 * block,
        "embedding": gradients + 6 * table + 4 * block,
    }
    return 16 * shard - gradients + buffers(cfg) + max(moments.values())


def buffers(cfg: Config) -> int:
    """Bytes of token ids and targets, a micro-batch's rotary tables, and cuBLAS's workspace."""
    return 16 * tokens(cfg) + rotary_tables(cfg) + 2**26


def rotary_tables(cfg: Config) -> int:
    """Bytes of cosine and sine: each micro-batch in flight has its own."""
    return 8 * cfg.seq // cfg.cp * (cfg.dim // cfg.heads)


def memory(cfg: Config, by: Trainer, stage: int, units: list[int]) -> int:
    """Bytes of a rank of pp at its fullest moment, as torch counts them; 01_single_gpu/memory.py says more of each.

    Always: 2N of bf16 weights, 12N/(dp·cp) of fp32 masters and moments; of M elements of experts 12M·ep/(dp·cp), as
    only edp = dp·cp/ep ranks hold the same ones. Each micro-batch in flight keeps what its blocks do. With several
    micro-batches come 4N of fp32 sums, with ZeRO-2 4N/(dp·cp) instead. With chunks ZeRO-2 also has the whole sums of
    two: a chunk is reduced after pp micro-batches. Beside these come at the loss the logits and their gradient, in a
    block's backward its temporaries and the gradients of units that ZeRO is reducing, and at the optimizer the shard's.
    What nanotron's allocator and ZeRO need more is fitted: FRAGMENTS, HELD, COPIES.
    """
    has_embedding, has_head = has_ends(cfg, stage)
    d, n = cfg.dim, tokens(cfg) // cfg.tp
    N, layers = sum(units), blocks_of(cfg, stage, units)
    block, expert = matrices(cfg) + 2 * d, expert_matrices(cfg)
    M = layers * expert
    table = table_elements(cfg) if has_head else 0  # of the head
    shards = cfg.dp * cfg.cp if by.zero else 1
    shard = N // shards + M // max(1, shards // max(1, cfg.ep))
    sums, shard_sums = gradient_sums(cfg, by, N, M, shards)
    all_sums = sums + shard_sums
    # The first backward allocates the sums; from the second on one micro-batch fewer is in flight. Chunks are alike.
    activations = layers / cfg.chunks * kept(cfg, by.eager)
    message = 0 if has_head else 2 * n * d
    one_in_flight = activations + message + rotary_tables(cfg)
    m = cfg.microbatches * cfg.chunks
    first_in_flight = max(0, min(ahead(cfg, stage), m - 1)) * one_in_flight
    in_flight = max(0, min(ahead(cfg, stage), m - cfg.chunks - 1)) * one_in_flight
    temporary = message + widest(cfg)  # of one block in backward
    forward = all_sums + in_flight + activations
    moments = {"last block, first backward": first_in_flight + activations + temporary + 4 * table}
    if has_head:
        logits = (4 if by.eager else 2) * n * cfg.vocab
        norm = n * (10 * d + 4)
        moments["loss"] = forward + norm + 2 * logits
        moments["head"] = forward + norm + logits + 2 * n * d + 2 * table
    if all_sums:
        moments["last block"] = forward + temporary
    # ZeRO reduces the gradients of two units at once, if they are not kept as whole sums
    reduction, two_reductions = 0, 0
    if not sums:
        reduction = 2 * block
        two_reductions = reduction + 2 * (expert or (block if layers > 1 else table))
    backward = (all_sums or 4 * shard) + first_in_flight
    gradient = 4 * (expert or block)
    moments["first block"] = backward + kept(cfg, by.eager) + max(temporary + two_reductions, gradient + reduction)
    moments["embedding"] = backward + reduction
    if has_embedding:
        moments["embedding"] += 4 * table_elements(cfg)
    moments["optimizer"] = shard_sums or 4 * shard
    if by.held and by.zero:
        moments["optimizer"] += COPIES * N
    always = 2 * (N + M) + 12 * shard + buffers(cfg)
    if by.held:
        always += int(FRAGMENTS)
        if not stall(cfg, by):
            always += HELD.get(cfg.pp, 25) * (2 * tokens(cfg) * d * (cfg.tp - 1) // cfg.tp)  # other tp ranks' tokens
    return int(always + max(moments.values()))


def gradient_sums(cfg: Config, by: Trainer, N: int, M: int, shards: int) -> tuple[int, int]:
    """Bytes of the fp32 sums of gradients of a rank of pp: whole ones, and shards."""
    if cfg.microbatches == 1 and not by.accumulates:
        return 0, 0
    if cfg.zero < 2:
        return 4 * (N + M), 0
    whole = 0 if cfg.chunks == 1 else 8 * N // cfg.chunks  # of two chunks
    return whole, 4 * N // shards


def blocks_of(cfg: Config, rank: int, units: list[int]) -> int:
    """How many blocks a rank of pp has."""
    return len(units) - sum(has_ends(cfg, rank))


def most_memory(cfg: Config, by: Trainer) -> float:
    """GiB of the fullest stage: the ends hold tables; of others with as many layers the first has most in flight."""
    if cfg.shard > 1:
        return memory_of_shards(cfg) / GIB
    units = stages(cfg, by)
    inner = {len(units[stage]): stage for stage in reversed(range(1, cfg.pp - 1))}
    return max(memory(cfg, by, stage, units[stage]) for stage in {0, *inner.values(), cfg.pp - 1}) / GIB


# ---------------------------------------------------------------------------------------------------------- training
def flops_per_token(cfg: Config) -> float:
    """Count the FLOPs of forward and backward: 6 per weight in a matmul, and 6·layers·dim·seq in causal attention.

    The embedding is a lookup, only the unmasked half of attention counts, and recomputation does not count.
    Of the experts those count through which a token goes.
    """
    kv = cfg.dim // cfg.heads * cfg.kv_heads
    attention = 2 * cfg.dim * cfg.dim + 2 * cfg.dim * kv
    experts = 3 * cfg.dim * cfg.ffn * cfg.top_k + cfg.dim * cfg.experts  # and their router
    weights = cfg.layers * (attention + experts) + cfg.dim * cfg.vocab
    return 6 * weights + 6 * cfg.layers * cfg.dim * cfg.seq


def schedule(rank: int, ranks: int, chunks: int, microbatches: int) -> list[tuple[str, int, int]]:
    """Return what a rank does, in order: (F forward or B backward, micro-batch, chunk)."""
    forwards, backwards = [], []
    for start in range(0, microbatches, ranks):  # a group of micro-batches goes through all chunks, then the next
        for chunk in range(chunks):
            for i in range(start, min(start + ranks, microbatches)):
                forwards.append(("F", i, chunk))
                backwards.append(("B", i, chunks - 1 - chunk))
    # forwards before the first gradient can arrive: one per later rank (two with several chunks, because a later rank
    # alternates between F and B), and p for each chunk but the last
    warmup = min((ranks - 1 - rank) * min(chunks, 2) + (chunks - 1) * ranks, len(forwards))
    operations = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards):
        operations += pair  # one forward, one backward
    return operations + backwards[len(backwards) - warmup :]


def schedule_in_a_v(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int, int]]:
    """Return what a rank of ZBV does, in order: (F, B input gradient or W weight gradients, micro-batch, chunk)."""
    later, rounds = ranks - rank, max(microbatches, 2 * ranks - 1) - ranks
    order = ["F0"] * (2 * later - 1) + ["F1", "F0"] * rank + ["F1", "B1", "W1"] * later
    order += ["F0", "B0", "W0", "F1", "B1", "W1"] * (rounds - later + 1) + ["B0", "W0", "F1", "B1", "W1"] * (later - 1)
    order += ["B0", "B1"] * rank + ["B0", "W0"] * later + ["W1"] * rank + ["W0"] * rank
    number = {op: itertools.count() for op in order}
    numbered = [(op[0], next(number[op]), int(op[1])) for op in order]
    return [operation for operation in numbered if operation[1] < microbatches]


def ring(cfg: Config, size: float, ranks: int, stride: int, all_to_all: bool = False) -> float:
    """Seconds in which `ranks` ranks, `stride` apart, all-gather, reduce-scatter or exchange (all_to_all) size bytes.

    A ring between nodes has the network cards of all its ranks on a node, and its ranks - 1 steps each wait for the
    slowest link. It leaves a pod by one link alone. An all-to-all sends all that is for other nodes through a rank's
    own card, and all ranks send to other pods at once.
    """
    at = MACHINES[cfg.machine]
    node, pod = (min(ranks, max(1, n * cfg.gpus_per_node // stride)) for n in (1, at.pod))  # ranks in one
    if ranks == 1:
        return 0
    if node == ranks:
        return NVLINK_LATENCY + size * (ranks - 1) / ranks / at.nvlink
    if all_to_all:
        return at.hop + size * (ranks - node + (at.oversubscribed - 1) * (ranks - pod)) / ranks / at.network
    return at.hop * (ranks - 1) + size * (ranks - 1) / ranks / min(at.nvlink, node * at.network)


def message(cfg: Config, size: float, ranks: int, stride: int) -> float:
    """Seconds until a neighbour in a group of ranks, `stride` apart, has size bytes; the slowest pair counts."""
    at, nodes = MACHINES[cfg.machine], ranks * stride / cfg.gpus_per_node
    if nodes <= 1:
        return NVLINK_LATENCY + size / at.pair
    return at.hop + size * (at.oversubscribed if nodes > at.pod else 1) / at.network


def beside(compute: float, communication: float) -> float:
    """Seconds that communication adds to the compute that it overlaps with."""
    return max(CONTENTION * min(compute, communication), communication - compute)


def gathered(cfg: Config) -> float:
    """Seconds of one of tp's collectives, of the tokens of a micro-batch. Inside a node, it waits for the last rank."""
    waiting = WAITING if cfg.tp <= cfg.gpus_per_node else 1
    return waiting * ring(cfg, 2 * tokens(cfg) * cfg.dim, cfg.tp, 1)


def expert_times(cfg: Config) -> tuple[tuple[float, float], float]:
    """Seconds of a block's experts in forward and backward of a micro-batch; and of one exchange of its rows.

    Experts are equally busy. The sender sorts rows by expert, the receiver sorts what arrives; both undo it on the way
    back.
    """
    if not cfg.experts:
        return (0, 0), 0
    at, d, f = MACHINES[cfg.machine], cfg.dim, cfg.ffn // cfg.tp
    rows = tokens(cfg) * cfg.top_k
    matmuls = 6 * rows * d * f / at.grouped
    forward = matmuls + 2 * rows * (4 * (d + f) + 4 * d) / at.bandwidth
    backward = 2 * matmuls + 2 * rows * (5 * (d + f) + 4 * d) / at.bandwidth
    waiting = WAITING if cfg.ep * cfg.tp <= cfg.gpus_per_node else 1
    exchange = waiting * ring(cfg, 2 * rows * d, max(1, cfg.ep), cfg.tp, True)
    return (forward, backward), exchange


def block_times(cfg: Config, by: Trainer) -> dict[str, tuple[float, float]]:
    """Seconds of a block's forward and backward of a micro-batch: compute, and what communication adds to it.

    tp: forward waits for two all-gathers and two reduce-scatters; backward for two gathers, while four more collectives
    overlap with matmuls. With experts it waits for three, and two overlap.
    cp: keys and values pass by in a ring beside attention, in backward their fp32 gradients, too; or they are gathered,
    as by 05_context_ring/all_gather_kv.py.
    ep: rows go to their experts and back, and so do their gradients; nothing overlaps.
    recompute: backward runs forward's elementwise kernels once more, or all of forward.
    """
    at, n = MACHINES[cfg.machine], tokens(cfg)
    linear = 2 * n * matrices(cfg) / at.matmuls
    attention, attention_backward = attention_times(cfg)
    width = 36 * cfg.dim if cfg.experts else 36 * cfg.dim + 8 * cfg.ffn
    elementwise = 2 * n * width / cfg.tp / at.bandwidth
    experts, exchange = expert_times(cfg)
    copies = 0
    if cfg.tp > 1 and by.cast > 0:  # sequence_parallel.py puts weights together for one matmul; train.py does not
        copies = 4 * matrices(cfg) / at.bandwidth
    forward = (linear + attention + elementwise / 3 + copies + experts[0]) / by.speed
    backward = (2 * linear + attention_backward + elementwise * 2 / 3 + experts[1]) / by.speed
    tp, cp = tensor_times(cfg, by, linear), context_times(cfg, by)
    again = 0
    if cfg.recompute == "selective":
        again = elementwise / 3 / by.speed
    if cfg.recompute == "full":
        down_proj = 2 * n * cfg.dim * cfg.ffn / cfg.tp / at.matmuls / by.speed  # backward does not need its output
        again = forward if cfg.experts else forward - down_proj
        again += tp[0] * 3 / 4
        again += cp[0]
        again += 2 * exchange
    launch = by.launch
    if cfg.tp > 1 and spans_nodes(cfg):
        launch += by.crowded * cfg.tp
    idle = max(0, launch - forward - backward - sum(tp) - sum(cp))  # the GPU waits for the CPU
    compute = forward + idle / 3, backward + idle * 2 / 3
    return dict(compute=compute, recompute=(0, again), tp=tp, cp=cp, ep=(2 * exchange, 2 * exchange))


def attention_times(cfg: Config) -> tuple[float, float]:
    """Seconds of attention of a block, forward and backward of a micro-batch."""
    chunk = cfg.seq if cfg.cp == 1 else cfg.seq // (2 * cfg.cp)
    flops = 2 * tokens(cfg) * cfg.seq * cfg.dim / cfg.tp * (1 + 400 / chunk)
    forward, backward = MACHINES[cfg.machine].attention[128 if cfg.dim // cfg.heads > 64 else 64]
    return flops / forward, 2.5 * flops / backward


def tensor_times(cfg: Config, by: Trainer, linear: float) -> tuple[float, float]:
    """Seconds that tp adds to a block's forward and backward, whose matmuls take `linear` and twice that."""
    gather = gathered(cfg)
    if by.async_tp:
        return beside(linear, 4 * gather), beside(2 * linear, 6 * gather)
    if cfg.experts:  # their tokens are gathered, and the gradients of these reduced, with nothing beside
        return 4 * gather, 3 * gather + beside(2 * linear, 2 * gather)
    return 4 * gather, 2 * gather + beside(2 * linear, 4 * gather)


def context_times(cfg: Config, by: Trainer) -> tuple[float, float]:
    """Seconds that cp adds to a block's forward and backward."""
    if cfg.cp == 1:
        return 0, 0
    kv = 2 * tokens(cfg) * kv_width(cfg)  # elements of a rank's keys and values
    if by.gathers_keys:
        gather, reduce = (ring(cfg, kv * cfg.cp * size, cfg.cp, cfg.tp) for size in (2, 4))
        return gather, gather + reduce
    hops = (message(cfg, kv * size, cfg.cp, cfg.tp) for size in (2, 6))
    forward, backward = (beside(seconds / cfg.cp, hop) for seconds, hop in zip(attention_times(cfg), hops))
    return (cfg.cp - 1) * forward, (cfg.cp - 1) * backward


def stage_times(cfg: Config, by: Trainer, stage: int, units: list[int]) -> dict[str, list[float]]:
    """Seconds of forward and backward of a micro-batch on a stage, by what they are spent on.

    Backward moves the gradients of a unit into one tensor, and adds them to fp32 sums. In ZBV the matmuls of weight
    gradients add to fp32 sums themselves; those of experts cannot.
    """
    at, n, layers = MACHINES[cfg.machine], tokens(cfg), blocks_of(cfg, stage, units)
    has_embedding, has_head = has_ends(cfg, stage)
    forward, backward = {}, {}
    for kind, seconds in block_times(cfg, by).items():
        forward[kind] = layers * seconds[0]
        backward[kind] = layers * seconds[1]
    gather = gathered(cfg)
    gradient_item = (14 if cfg.microbatches > 1 or by.accumulates else 4) + by.cast  # bytes moved per element
    moves = sum(units) * (8 if cfg.zbv else gradient_item) + layers * expert_matrices(cfg) * gradient_item
    compute = moves / at.bandwidth
    tensor, tensor_backward = 0, 0
    if has_embedding:
        tensor += gather
        tensor_backward += gather
    if has_head:
        head = 2 * n * cfg.dim * cfg.vocab / cfg.tp / at.matmuls
        logits = 2 * n * cfg.vocab / cfg.tp / at.bandwidth  # one pass over them
        forward["compute"] += (head + logits) / by.speed
        compute = 2 * head + 2 * logits + compute
        tensor += gather
        tensor_backward += beside(2 * head, 2 * gather)
    backward["compute"] += compute / by.speed
    forward["tp"] += tensor
    backward["tp"] += tensor_backward
    return {kind: [forward[kind], backward[kind]] for kind in forward}


def times_of(cfg: Config, by: Trainer, parts: list[list[int]]) -> list[dict[str, list[float]]]:
    """The times of all stages; those between the ends that have as many layers are alike."""
    kinds = [(*has_ends(cfg, stage), len(units)) for stage, units in enumerate(parts)]
    examples = {kind: stage for stage, kind in enumerate(kinds)}
    times = {kind: stage_times(cfg, by, stage, parts[stage]) for kind, stage in examples.items()}
    return [times[kind] for kind in kinds]


def share_of_weights(cfg: Config, by: Trainer) -> float:
    """Share of a block's backward that is the gradients of its weights: the W of ZBV."""
    at = MACHINES[cfg.machine]
    matmuls = matrices(cfg) / at.matmuls
    if cfg.experts:
        matmuls += 3 * cfg.top_k * cfg.dim * cfg.ffn / cfg.tp / at.grouped
    backward = sum(both[1] for both in block_times(cfg, by).values())
    return 2 * tokens(cfg) * matmuls / by.speed / backward


def shares(cfg: Config) -> list[list[float]]:
    """Return, for each rank of pp, which part of its work each of its chunks is; interleaved ones count as equal."""
    if not cfg.zbv:
        return [[1 / cfg.chunks] * cfg.chunks] * cfg.pp
    head = 6 * cfg.dim * cfg.vocab
    block = (flops_per_token(cfg) - head) / cfg.layers
    loads = [block * len(layers) for layers in split_layers(cfg, 2 * cfg.pp)]
    loads[-1] += head
    pairs = list(zip(loads, reversed(loads)))[: cfg.pp]
    return [[one / (one + other), other / (one + other)] for one, other in pairs]


def simulate(seconds: list[tuple[float, ...]], transfer: float, cfg: Config, microbatches: int, by: Trainer) -> float:
    """Run every rank's schedule, each operation as soon as its input is there; return when all has ended.

    seconds: by rank of pp, of a micro-batch's forward and backward, the all-gather of its weights, beside the first
    forwards, and the reduction of its gradients, beside the last backwards. A chunk takes its share of all four.
    transfer: of a message between ranks.
    """
    p, last = cfg.pp, cfg.pp * cfg.chunks - 1  # last stage
    parts, w_share = shares(cfg), share_of_weights(cfg, by) if cfg.zbv else 0
    orders = [deque(order_of(cfg, rank, microbatches)) for rank in range(p)]
    rank_of_stage = [min(s, last - s) if cfg.zbv else s % p for s in range(last + 1)]
    ends = {}
    compute_ends, reduce_ends = [0.0] * p, [0.0] * p
    ready = deque(range(p))
    while ready:
        rank = ready.popleft()
        order = orders[rank]
        forward, backward, gather, reduce = seconds[rank]
        while order:
            op, i, chunk = order[0]
            part = parts[rank][chunk]
            stage = last - rank if cfg.zbv and chunk else chunk * p + rank
            source, target = (stage - 1, stage + 1) if op == "F" else (stage + 1, stage - 1)
            start = compute_ends[rank]
            if 0 <= source <= last and op != "W":
                if (op, i, source) not in ends:
                    break  # the rank that has it adds this one to `ready`
                arrival = ends[op, i, source]
                if rank_of_stage[source] != rank:
                    arrival += transfer
                start = max(start, arrival)
            if op == "F":
                duration = part * forward
                wait = gather * sum(parts[rank][: chunk + 1]) - start
                if i == 0 and wait > 0:
                    duration += beside(duration, wait) if by.hidden else wait
            else:
                duration = part * backward * (w_share if op == "W" else 1 - w_share)
            end = start + duration
            ends[op, i, stage] = compute_ends[rank] = end
            if op == ("W" if cfg.zbv else "B") and i == microbatches - 1:
                reduction = reduce * part
                if by.hidden:  # it runs on beside compute, and slows down this backward, or those of later chunks
                    compute_ends[rank] += CONTENTION * min(duration, reduction)
                    if cfg.chunks == 1:
                        ends[op, i, stage] = compute_ends[rank]
                reduce_start = start if by.hidden else end
                reduce_ends[rank] = max(reduce_ends[rank], reduce_start) + reduction
            order.popleft()
            if 0 <= target <= last and rank_of_stage[target] != rank:
                ready.append(rank_of_stage[target])
    return max(*compute_ends, *reduce_ends)


def order_of(cfg: Config, rank: int, microbatches: int) -> list[tuple[str, int, int]]:
    """Return the operations of a rank of pp, in order."""
    if cfg.zbv:
        return schedule_in_a_v(rank, cfg.pp, microbatches)
    return schedule(rank, cfg.pp, cfg.chunks, microbatches)


def end(seconds: list[tuple[float, ...]], transfer: float, cfg: Config, by: Trainer) -> float:
    """Simulate, of a long step its first micro-batches alone: the others take as long as the last of these."""
    count, smaller_count = min(cfg.microbatches, 8 * cfg.pp), 7 * cfg.pp  # with chunks the pace settles late
    time = simulate(seconds, transfer, cfg, count, by)
    if cfg.microbatches > count:
        pace = (time - simulate(seconds, transfer, cfg, smaller_count, by)) / (count - smaller_count)
        time += (cfg.microbatches - count) * pace
    return time


def added_by_shards(cfg: Config, by: Trainer, units: list[int], forward: float, backward: float) -> float:
    """Seconds that a step of ZeRO-3 or HSDP takes longer than its compute.

    In each micro-batch weights are gathered beside forward and again beside backward, except those of the last two
    units, which are still there, and of the embedding; and gradients are reduced. With the last micro-batch the groups
    of HSDP add up their fp32 shards.
    """
    gather = sum(ring(cfg, 2 * unit, cfg.shard, cfg.tp) for unit in units)
    traffic = sum(ring(cfg, 2 * unit, cfg.shard, cfg.tp) for unit in units[1:-2])  # beside backward
    traffic += sum(ring(cfg, 2 * unit, cfg.shard, cfg.tp, True) for unit in units)
    groups = sum(2 * ring(cfg, 4 * unit / cfg.shard, cfg.dp // cfg.shard, cfg.shard * cfg.tp) for unit in units)
    last = beside(forward, gather) + beside(backward, traffic + groups)
    return (cfg.microbatches - 1) * (beside(forward, gather) + beside(backward, traffic)) + last


def step_time(cfg: Config, by: Trainer) -> Step:
    """Predict a step. With ZeRO-2 gradients are reduced beside every backward, or in chunks that of every pp-th."""
    units = stages(cfg, by)  # of every rank of pp
    times = times_of(cfg, by, units)
    compute, messages, traffic = [], [], []  # of every rank: forward and backward, the same with messages, and ZeRO's
    for rank in range(cfg.pp):
        forward = sum(seconds[0] for seconds in times[rank].values())
        backward = sum(seconds[1] for seconds in times[rank].values())
        wait = message_stall(cfg, by) * (2 if 0 < rank < cfg.pp - 1 else 1)  # for each neighbour
        gather, reduce = zero_times(cfg, by, rank, units[rank])
        compute.append((forward, backward, 0, 0))
        messages.append((forward + wait, backward + wait, 0, 0))
        if cfg.zero == 2:
            interval = 1 if cfg.chunks == 1 else cfg.pp  # of backwards, at whose end gradients are reduced
            added = beside(interval * (backward + wait), reduce) / interval
            traffic.append((forward + wait, backward + wait + added, gather, 0))
        else:
            traffic.append((forward + wait, backward + wait, gather, reduce))
    transfer = message(cfg, 2 * tokens(cfg) // cfg.tp * cfg.dim, cfg.pp, cfg.dp * cfg.cp * cfg.tp)
    with_zero = end(traffic, transfer, cfg, by)
    with_messages = end(messages, transfer, cfg, by) if cfg.dp * cfg.cp > 1 else with_zero
    alone = end(compute, 0, cfg, by) if cfg.pp > 1 else with_messages
    if cfg.shard > 1:
        forward, backward, _, _ = compute[0]
        with_zero = with_messages + added_by_shards(cfg, by, units[0], forward, backward)
    mean = {kind: cfg.microbatches * sum(sum(kinds[kind]) for kinds in times) / cfg.pp for kind in times[0]}
    return Step(
        **mean,
        dp=with_zero - with_messages,
        pp=with_messages - alone,
        optimizer=max(optimizer_time(cfg, by, rank, units[rank]) for rank in range(cfg.pp)) + HOST,
        bubble=max(0, alone - sum(mean.values())),
    )


def message_stall(cfg: Config, by: Trainer) -> float:
    """Seconds that a message between stages costs each of the two, also because memory is full."""
    if by.stall and cfg.pp > 1 and most_memory(cfg, by) * GIB > FULL:
        return by.stall
    return stall(cfg, by)


def zero_times(cfg: Config, by: Trainer, rank: int, units: list[int]) -> tuple[float, float]:
    """Seconds in which a rank of pp all-gathers its weights, if they are sharded, and reduces their gradients."""
    shards, ep, expert = cfg.dp * cfg.cp, max(1, cfg.ep), expert_matrices(cfg)
    blocks = blocks_of(cfg, rank, units) if expert else 0
    reduce = sum(ring(cfg, by.sent * unit, shards, cfg.tp, by.all_to_all) for unit in units)
    reduce += blocks * ring(cfg, by.sent * expert, shards // ep, cfg.tp * ep, by.all_to_all)
    if not by.zero:
        return 0, 2 * reduce
    gather = sum(ring(cfg, 2 * unit, shards, cfg.tp) for unit in units)
    gather += blocks * ring(cfg, 2 * expert, shards // ep, cfg.tp * ep)
    return gather, reduce


def optimizer_time(cfg: Config, by: Trainer, rank: int, units: list[int]) -> float:
    """Seconds in which AdamW updates the weights of a rank of pp."""
    expert = blocks_of(cfg, rank, units) * expert_matrices(cfg)
    size = 40 * (sum(units) + expert)
    if by.zero:
        ranks = cfg.shard if cfg.shard > 1 else cfg.dp * cfg.cp  # they update the same weights together
        size = 46 * (sum(units) + expert * max(1, cfg.ep)) / ranks
    return size / MACHINES[cfg.machine].bandwidth


@dataclass(frozen=True)
class Plan:
    """A layout with what is predicted of it."""

    cfg: Config
    memory: float  # GiB of the fullest stage
    step: Step
    tokens: float  # per second and GPU
    mfu: float


def predict(cfg: Config, by: Trainer) -> Plan:
    """Predict a layout's memory, step and speed."""
    step = step_time(cfg, by)
    speed = cfg.batch * cfg.seq / step.total() / (cfg.dp * cfg.cp * cfg.tp * cfg.pp)
    peak = 1e12 * cfg.tflops or MACHINES[cfg.machine].peak
    return Plan(cfg, most_memory(cfg, by), step, speed, speed * flops_per_token(cfg) / peak)


def divisors(n: int) -> list[int]:
    """Divisors of n, rising."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def cuts(cfg: Config) -> list[Config]:
    """Ways to cut the model over the GPUs, with one sequence per micro-batch; ZeRO-3 and HSDP without cp and pp."""
    found = []
    for tp, cp, pp in itertools.product(divisors(cfg.gpus), repeat=3):
        dp, left = divmod(cfg.gpus, tp * cp * pp)
        m = max(1, cfg.batch // max(1, dp))
        uneven = cfg.heads % tp or (cfg.kv_heads % tp and tp % cfg.kv_heads) or cfg.ffn % tp or m * cfg.seq // cp % tp
        uneven = uneven or (cp > 1 and cfg.seq % (2 * cp)) or pp > cfg.layers or left
        uneven = uneven or (cfg.experts and math.gcd(cfg.dim, cfg.ffn // tp) % 8)  # for grouped matmuls in bf16
        given = all(want in (0, size) for want, size in ((cfg.dp, dp), (cfg.cp, cp), (cfg.tp, tp), (cfg.pp, pp)))
        if not uneven and given:
            sizes = dict(dp=dp, cp=cp, tp=tp, pp=pp, microbatches=m, batch=m * dp)
            shards = {1} if cfg.experts else {1, dp, min(dp, max(1, cfg.gpus_per_node // tp)), cfg.shard or 1}
            chunks = [2] if cfg.zbv else [cfg.chunks] if cfg.chunks else [1] if pp == 1 else CHUNKS
            cuts_of_experts = [ep for ep in divisors(dp * cp) if (cfg.experts or 1) % ep == 0 and cfg.ep in (0, ep)]
            for shard, stages, ep in itertools.product(shards, chunks, cuts_of_experts):
                zero = 3 if shard > 1 else cfg.zero
                asked = cfg.shard in (0, shard) and cfg.zero in (0, zero) and (zero == 3) == (shard > 1)
                possible = dp % shard == 0 and (shard == 1 or cp == pp == 1) and (zero != 2 or dp * cp > 1)
                if asked and possible and (stages == 1 or pp > 1 and pp * stages <= cfg.layers):
                    found.append(replace(cfg, **sizes, zero=zero, shard=shard, chunks=stages, ep=ep))
    return found


def needs(cfg: Config) -> str:
    """Return what a layout needs that no recipe here has with it."""
    missing = []
    if cfg.zbv:
        missing.append("ZBV")
    if cfg.recompute != "none":
        missing.append("recomputation")
    if cfg.zero > 1 and max(cfg.cp, cfg.tp, cfg.pp) > 1:
        missing.append(f"ZeRO-{cfg.zero}")
    return " and ".join(missing)


def usable(cfg: Config) -> float:
    """GiB of a GPU that tensors may take."""
    return cfg.memory or MACHINES[cfg.machine].usable


def fitting(cfg: Config, by: Trainer) -> list[Config]:
    """Return the layout as it fits: with the least recomputation, and with ZeRO-2 if that recomputes less.

    ZeRO-0 and AFAB are not tried: they send as much, idle as long, and have more in memory than ZeRO-1 and 1F1B. With
    experts only ZeRO-1, without or with full recomputation, is modelled.
    """
    stages = [1, 2] if cfg.dp * cfg.cp > 1 and not cfg.experts else [1]
    kinds = RECOMPUTE
    if cfg.experts:
        kinds = "none", "full"
    if cfg.zbv:
        kinds = ("none",)
    layouts = []
    for zero in [cfg.zero] if cfg.zero else stages:
        for recompute in kinds if cfg.recompute == "any" else [cfg.recompute]:
            layout = replace(cfg, zero=zero, recompute=recompute)
            if layouts and layouts[0].recompute == recompute:
                break
            if not (cfg.ours and needs(layout)) and most_memory(layout, by) <= usable(cfg):
                layouts.append(layout)
                break
    return layouts


def least(cfg: Config, by: Trainer) -> float:
    """Lower bound of a step: a micro-batch passes all earlier ranks, one rank works, the last gradient goes back."""
    busy = [sum(sum(both) for both in times.values()) for times in times_of(cfg, by, stages(cfg, by))]
    if cfg.zbv:
        return cfg.microbatches * max(busy)
    starts = (seconds / cfg.chunks for seconds in itertools.accumulate([0, *busy]))
    return max(start + cfg.microbatches * seconds for start, seconds in zip(starts, busy))


def progress(text: str) -> None:
    """Say on a terminal what is being done, in place of what was."""
    if sys.stderr.isatty():
        print(f"{text:60}", end="\r", file=sys.stderr, flush=True)


def fits(one: Config, by: Trainer) -> bool:
    """Whether a cut fits with one sequence per micro-batch, or with all at once, which needs no fp32 sums."""
    return any(fitting(replace(one, microbatches=m), by) for m in {one.microbatches, 1})


def low_memory(cfg: Config) -> float:
    """GiB of 10_mixed_precision/low_memory.py: 2 bytes of weights, 4 of moments and, after the loss, 2 of gradients."""
    one = replace(cfg, dp=1, cp=1, tp=1, pp=1, chunks=1, zero=1, microbatches=1, recompute="selective")
    n, elements, width = tokens(one), sum(stages(one, Trainer())[0]), cfg.dim // cfg.heads
    loss = cfg.layers * kept(one) + n * (10 * cfg.dim + 4 + 4 * cfg.vocab)
    always = 6 * elements + 16 * n + 8 * cfg.seq * width + 2**26
    return (always + max(loss, 2 * elements + kept(one) + widest(one))) / GIB


def would_fit(cfg: Config, by: Trainer) -> str:
    """Name what would help where nothing fits: other sizes, more GPUs, fewer flags, on one GPU another recipe."""
    layouts = cuts(cfg)
    node = cfg.gpus_per_node
    ways = []
    if not layouts:
        return f". {RULES}"
    if sizes := sorted({one.dp for one in layouts if fits(one, by)}):
        if any(cfg.batch % dp == 0 for dp in sizes):
            return ""  # the choice of micro-batches leaves none: the counts before this say it
        return f". --batch {cfg.batch}: must be divisible by dp, {' or '.join(map(str, sizes))}"
    if cfg.gpus == 1 and not cfg.experts and low_memory(cfg) <= usable(cfg):
        ways.append(f"with 10_mixed_precision/low_memory.py ({low_memory(cfg):.1f} GiB)")
    changes = []
    if cfg.ours:
        changes.append("without --ours")
    if cfg.recompute != "any":
        changes.append("with --recompute any")
    dropped = " and ".join(changes)
    for gpus in (cfg.gpus * 2**i for i in range(14)):
        gpus = gpus if gpus <= node else math.ceil(gpus / node) * node  # whole nodes
        asked = replace(cfg, gpus=gpus)
        for flags, one in ("", asked), (dropped, replace(asked, ours=False, recompute="any")):
            if any(cfg.batch % cut.dp == 0 and fits(cut, by) for cut in cuts(one)):
                more = f"with {gpus:,} GPUs" if gpus > cfg.gpus else ""
                return f". It would fit {' or '.join([*ways, f'{more} {flags}'.strip()])}"
    return f". It would fit {' or '.join(ways) or 'with nothing that is planned here'}"


def plans(cfg: Config, by: Trainer, keep: int = 0) -> tuple[list[Plan], str]:
    """Take the playbook's three steps: what fits, what makes the batch, what is fastest. Return the fastest first.

    keep: skip layouts whose lower bound is above the keep-th best; 0: none.
    """
    layouts = cuts(cfg)
    progress(f"{len(layouts):,} layouts on {cfg.gpus:,} GPUs: which fit?")
    fit = [layout for layout in layouts if fits(layout, by)]
    reach = [replace(layout, batch=cfg.batch) for layout in fit if cfg.batch % layout.dp == 0]
    choices = []
    for layout, m in itertools.product(reach, divisors(cfg.batch)):
        choice = replace(layout, microbatches=m)
        if cfg.microbatches not in (0, m) or cfg.batch // layout.dp % m:
            continue
        if layout.chunks > 1 and not layout.zbv and m % layout.pp:
            continue
        if tokens(choice) % layout.tp == 0:
            choices += fitting(choice, by)
    floors = [keep and least(choice, by) for choice in choices]
    rows, totals = [], []
    for count, i in enumerate(sorted(range(len(choices)), key=floors.__getitem__)):
        if not keep or len(totals) < keep or floors[i] < totals[keep - 1]:
            rows.append(predict(choices[i], by))
            bisect.insort(totals, rows[-1].step.total())
            progress(f"{count:,} of {len(choices):,} layouts on {cfg.gpus:,} GPUs")
    steps = f"layouts of these sizes: {len(layouts)}, fit in {usable(cfg):g} GiB: {len(fit)}, make the batch: "
    steps += f"{len(reach)}, choices of micro-batches that fit: {len(choices)}"
    return sorted(rows, key=lambda row: row.step.total()), steps


def nanotron(zero: int, model: str = "") -> Trainer:
    """The playbook's program, with one of its models: eager, fp32 gradients, async tp, rings, ZeRO-1 beside nothing."""
    by = Trainer(SPEED, bool(zero), accumulates=True, sent=4, all_to_all=False, async_tp=True, eager=True)
    by = replace(by, launch=LAUNCH, crowded=CROWDED, stall=STALL, hidden=not zero)
    return replace(by, tied=model in ("1.34B", "3.57B"), shares=True, held=True)


def runs_of(file: str) -> list[dict[str, str]]:
    """Read the runs of a .csv file; exit with one line that names what is wrong with it."""
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error):
        raise SystemExit(f"--measured {file}: cannot be read as .csv") from None
    if missing := [name for name in COLUMNS if not rows or name not in rows[0]]:
        raise SystemExit(f"--measured {file}: must have runs, and a column {missing[0]}")
    for number, row in enumerate(rows, 2):
        for name in COLUMNS:
            known, kind = BOOK.keys() | PRESETS.keys(), int if name in COLUMNS[1:8] else float
            try:
                valid = row[name] in known if name == "model" else kind(row[name]) > (-1 if name == "zero" else 0)
            except (TypeError, ValueError):
                valid = False
            if not valid:
                wanted = "a whole number > 0" if kind is int else "a number > 0"
                if name == "zero":
                    wanted = "0 or 1"
                if name == "model":
                    wanted = f"one of {', '.join(sorted(known))}"
                raise SystemExit(f"--measured {file}: line {number}: {name} {row[name]}: must be {wanted}")
        if math.prod(int(row[axis]) for axis in ("dp", "tp", "pp")) != 8 * int(row["nodes"]) or int(row["zero"]) > 1:
            raise SystemExit(f"--measured {file}: line {number}: dp·tp·pp must be 8 per node, and zero 0 or 1")
    return rows


def measured(rows: list[dict[str, str]]) -> list[tuple[Plan, float, float]]:
    """Predict runs of nanotron on nodes of 8 H100s, with sequences of 4,096: the plan, measured tokens/s/GPU and GB."""
    found = []
    for row in rows:
        sizes = {axis: int(row[axis]) for axis in ("dp", "tp", "pp")} | {"microbatches": int(row["micro_batches"])}
        model = {**BOOK[row["model"]], "vocab": 131072} if row["model"] in BOOK else PRESETS[row["model"]]
        cfg = Config(**model, seq=4096, cp=1, chunks=1, gpus=8 * int(row["nodes"]), **sizes, **BOOK_RUNS)
        cfg = replace(cfg, batch=cfg.dp * cfg.microbatches * int(row["micro_batch_size"]))
        plan = predict(cfg, nanotron(int(row["zero"]), row["model"]))
        found.append((plan, float(row["tokens_per_s_per_gpu"]), float(row["gpu_memory_GB"])))
    return found


def quality(rows: list[dict[str, str]], found: list[tuple[Plan, float, float]]) -> str:
    """Say how good predictions are. A cell is a model on so many nodes; pairs of runs within 3 % do not count."""
    cells = defaultdict(list)
    lines = []
    middle = statistics.median
    for row, (plan, tokens, _) in zip(rows, found):
        cells[row["model"], int(row["nodes"])].append((plan.tokens, tokens))
    for name, inside in (("up to 8 nodes", lambda n: n <= 8), ("above 8 nodes", lambda n: n > 8)):
        some = [runs for (_, nodes), runs in cells.items() if inside(nodes)]
        pairs = [pair for runs in some for pair in itertools.combinations(runs, 2)]
        right = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs if abs(a[1] - b[1]) >= 0.03 * max(a[1], b[1])]
        near = [abs(ours / real - 1) for runs in some for ours, real in runs if real >= 0.8 * max(r for _, r in runs)]
        if right:
            share = f"{sum(right) / len(right):.1%} of {len(right):,}"
            lines.append(f"{name}: {share} pairs within a cell are in the right order")
        if near:
            share = f"{sum(error <= 0.2 for error in near) / len(near):.0%} are predicted within 20 %"
            of = f"of the {len(near)} runs within 20 % of their cell's best"
            lines.append(f"{name}: {of} {share}; the median error is {middle(near):.1%}")
    errors = [abs(plan.memory * GIB / 1e9 / real - 1) for plan, _, real in found]
    share = f"{sum(error <= 0.1 for error in errors) / len(errors):.0%} of runs within 10 %"
    lines.append(f"memory: {share}; the median error is {middle(errors):.1%}")
    several = [runs for runs in cells.values() if len(runs) > 1]
    if lost := [1 - max(runs, key=lambda run: run[0])[1] / max(real for _, real in runs) for runs in several]:
        slower = f"by {middle(lost):.1%} in the median, by {max(lost):.0%} at most"
        lines.append(f"the run predicted fastest is slower than its cell's best {slower}")
    return "\n".join(lines)


def compare(file: str, picture: str) -> None:
    """Print the lines of a .csv file with predicted tokens/s/GPU and GB at their ends, then how good these are."""
    rows = runs_of(file)
    runs = measured(rows)
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow([*rows[0], "predicted_tokens_per_s_per_gpu", "predicted_GB"])
    for row, (plan, *_) in zip(rows, runs):
        out.writerow([*row.values(), f"{plan.tokens:.1f}", f"{plan.memory * GIB / 1e9:.2f}"])
    print(quality(rows, runs))
    if picture:
        draw(runs, picture, draw_measured, 3.2, 1, 2)


def cells() -> list[tuple[Plan, int, Plan, int, str, float, float]]:
    """The playbook's 26 cells: our plan and ZeRO, its layout as we predict it and its ZeRO, model, GB and tokens/s."""
    found = []
    for cell in CELLS.replace("\n", "|").split("|")[1:]:
        nodes, name, gb, *sizes, zero, measured = cell.split()
        dp, tp, pp, m, _ = map(int, sizes)
        cfg = Config(**BOOK[name], vocab=131072, seq=4096, batch=256, gpus=8 * int(nodes), cp=1, chunks=1, **BOOK_RUNS)
        book = predict(replace(cfg, dp=dp, tp=tp, pp=pp, microbatches=m), nanotron(int(zero), name))
        best = [(rows[0], zero) for zero in (0, 1) if (rows := plans(cfg, nanotron(zero, name), keep=1)[0])]
        ours = max(best, key=lambda pair: pair[0].tokens)
        found.append((*ours, book, int(zero), name, float(gb), float(measured)))
    return found


def playbook() -> str:
    """The playbook's best configurations beside ours: dp tp pp micro-batches ZeRO. Gain: ours over its, predicted."""
    head, cut = "nodes model {:21}| {:19}| tokens/s/GPU, predicted        |  GB, predicted | gain", " dp tp pp   m, "
    lines = [head.format(f"{cut}book", f"{cut}ours")]
    rows = cells()
    same, cut, near = 0, 0, 0
    for ours, our_zero, book, zero, name, gb, measured in rows:
        a, b = ((c.dp, c.tp, c.pp, c.microbatches, z) for c, z in ((book.cfg, zero), (ours.cfg, our_zero)))
        sizes = ["{:>4}{:>3}{:>3}{:>4} Z{}".format(*choice) for choice in (a, b)]
        line = f"{book.cfg.gpus // 8:>5} {name:>5} {sizes[0]} | {sizes[1]} |{measured:>12,.0f}{book.tokens:>11,.0f}"
        line += f"{book.tokens / measured - 1:>+8.0%} |{gb:>5.1f}{book.memory * GIB / 1e9:>10.1f} |"
        lines.append(f"{line}{ours.tokens / book.tokens - 1:>+5.0%}")
        if a == b:
            same += 1
        if a[:3] == b[:3]:
            cut += 1
        if ours.tokens < 1.05 * book.tokens:
            near += 1
    errors = sorted(abs(row[2].tokens / row[6] - 1) for row in rows)
    half = errors[len(rows) // 2]
    most = errors[int(0.9 * len(rows))]
    end = f"""Of {len(rows)} choices {same} are the same, {cut} have the same dp, tp and pp; {near} of the book's are
within 5 % of ours as we predict both. The book's are predicted within {half:.0%} of what it measured in
half of the cells, and within {most:.0%} in 90 %. --measured FILE compares other runs."""
    return "\n".join([*lines, end])


def llama() -> list[tuple[Plan, float, int]]:
    """Llama 3's own layouts as we predict them, and their MFU by the paper's formula: predicted, and published in %.

    That formula (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) counts causal attention as if nothing were
    masked: 6·layers·dim·seq more than flops_per_token. Llama 3 gathers keys and values. Assumed: 1 sequence per
    micro-batch, 8 chunks, fp32 gradients by rings.
    """
    found, by = [], Trainer(all_to_all=False, sent=4, gathers_keys=True)
    for dp, cp, tp, pp, m, seq, mfu in LLAMA:
        layout = dict(dp=dp, cp=cp, tp=tp, pp=pp, ep=1, chunks=8, microbatches=m, zero=2, recompute="selective")
        sizes = dict(preset="llama3_405b", gpus=dp * cp * tp * pp, batch=dp * m, seq=seq)
        plan = predict(Config(**PRESETS["llama3_405b"], **sizes, **layout), by)
        masked = 6 * plan.cfg.layers * plan.cfg.dim * seq
        found.append((plan, plan.mfu * (1 + masked / flops_per_token(plan.cfg)), mfu))
    return found


def scale() -> tuple[str, list[Plan]]:
    """The best layouts from 8 to 16,384 GPUs, and Llama 3's own ones: text, and our plans.

    Tokens of a batch: 4 Mi up to 1,024 GPUs, the lower end of what the playbook names; then 4,096 per GPU, up to 16 Mi.
    """
    ours, lines = [], []
    for preset, gpus in itertools.product(("llama3_8b", "llama3_70b", "llama3_405b"), SCALE):
        batch = min(2**24, max(2**22, 4096 * gpus)) // 8192
        rows, _ = plans(Config(**PRESETS[preset], preset=preset, gpus=gpus, batch=batch, seq=8192), Trainer(), keep=1)
        if rows:
            ours.append(rows[0])
        else:
            lines.append(f"{preset} on {gpus} GPUs: no layout fits")
    lines = [table(ours, True), *lines, "Llama 3 405B as published, with its interleaved schedule:"]
    lines.append(table([plan for plan, *_ in llama()], True))
    text = "{:,} GPUs: predicted {:.1%}, by the formula of the paper {:.1%}, published {} %"
    lines += [text.format(plan.cfg.gpus, plan.mfu, theirs, mfu) for plan, theirs, mfu in llama()]
    return "\n".join(lines), ours


# -------------------------------------------------------------------------------------------------------------- main
def zero_of(cfg: Config) -> str:
    """How the ranks of dp share the model."""
    return f"HSDP-{cfg.shard}" if 1 < cfg.shard < cfg.dp else f"ZeRO-{cfg.zero}"


def shape(cfg: Config) -> str:
    """The layout in words."""
    sizes = " ".join(f"{axis} {getattr(cfg, axis)}" for axis in (*AXES, "ep") if getattr(cfg, axis) > 1)
    if cfg.zbv:
        sizes += " in a V"
    elif cfg.chunks > 1:
        sizes += f" in {cfg.chunks} chunks"
    if cfg.zero > 1:
        sizes += f" {zero_of(cfg)}"
    sizes = f"{sizes or 'one GPU'}, {cfg.microbatches} micro-batch{'es' if cfg.microbatches > 1 else ''}"
    return sizes if cfg.recompute == "none" else f"{sizes}, {cfg.recompute} recomputation"


def table(rows: list[Plan], several: bool = False) -> str:
    """One line per layout, and per run if there are several."""
    head = "   dp   ZeRO   cp   tp   pp   ep chunks micro-batches recomputes |   GiB | ms: step"
    head += "".join(f"{f.name:>10}" for f in fields(Step))
    run = "model         GPUs  batch |" if several else ""
    lines = [f"{run}{head} | tokens/s/GPU    MFU"]
    for row in rows:
        c = row.cfg
        parts = "".join(f"{seconds * 1e3:>10,.0f}" for seconds in asdict(row.step).values())
        line = f"{c.preset:11}{c.gpus:>7,}{c.batch:>7,} |" if several else ""
        line += f"{c.dp:>5} {zero_of(c):>6}{c.cp:>5}{c.tp:>5}{c.pp:>5}{c.ep:>5}{c.chunks:>7}{c.microbatches:>14}"
        line += f"{c.recompute:>11} |{row.memory:>6.1f} |{row.step.total() * 1e3:>9,.0f}{parts} |"
        line += f"{row.tokens:>13,.0f}{row.mfu:>7.1%}"
        if needs(c):
            line += f" | needs {needs(c)}"
        lines.append(line)
    return "\n".join(lines)


def reason(rows: list[Plan]) -> str:
    """Explain the first row: what bounds it, what the fastest of another cut loses to it, how many are as fast."""
    best = rows[0]
    names = {axis: f"{word} parallelism's communication" for axis, word in AXES.items()}
    names |= dict(bubble="the pipeline's bubble", compute="compute itself", optimizer="the optimizer and the host")
    names |= dict(recompute="recomputation", ep="the exchange of rows between experts")
    parts = asdict(best.step)
    total = best.step.total()
    losses = {kind: seconds for kind, seconds in parts.items() if kind != "compute"}
    loss = max(losses, key=losses.get)
    text = f"Best: {shape(best.cfg)}. It computes for {parts['compute'] / total:.0%} of the step, and loses most, "
    text += f"{parts[loss] / total:.1%}, to {names[loss]}."
    for row in rows:
        if any(getattr(row.cfg, axis) != getattr(best.cfg, axis) for axis in (*AXES, "ep")):
            more = {kind: 1e3 * (seconds - parts[kind]) for kind, seconds in asdict(row.step).items()}
            worse, better = max(more, key=more.get), min(more, key=more.get)
            text += f" Next: {shape(row.cfg)}, {row.step.total() / total - 1:.1%} slower: loses {more[worse]:,.1f}"
            text += f" ms more to {names[worse]}"
            if more[better] < -0.5:
                text += f", and {-more[better]:,.1f} less to {names[better]}"
            text += "."
            break
    if best.cfg.experts:
        text += " Experts count as equally busy."
    if len(near := ties(rows)) > 1:
        text += f" The first {len(near)} are within {ERROR:.0%}, the error of most predictions on one host with 8,192"
        text += " tokens per GPU and micro-batch; "
        text += f"cut along the fewest axes is {shape(simplest(rows).cfg)}."
    return text


def ties(rows: list[Plan]) -> list[Plan]:
    """Return the rows that are as fast as the first within the error of predictions."""
    return [row for row in rows if row.step.total() < (1 + ERROR) * rows[0].step.total()]


def simplest(rows: list[Plan]) -> Plan:
    """Return the one of these that is cut along the fewest axes; rather without a pipeline, and with a recipe here."""
    sizes = [[getattr(row.cfg, name) > 1 for name in (*AXES, "ep", "chunks", "shard")] for row in ties(rows)]
    ranks = [(sum(cut), row.cfg.pp > 1, needs(row.cfg) > "") for cut, row in zip(sizes, rows)]
    return rows[ranks.index(min(ranks))]


def command(cfg: Config) -> str:
    """The line that trains with this layout."""
    nodes = max(1, cfg.gpus // cfg.gpus_per_node)
    processes = min(cfg.gpus, cfg.gpus_per_node)
    hosts = ""
    if nodes > 1:
        hosts = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_id run1 --rdzv_endpoint HOST:29500 "
    sizes = {f.name: getattr(cfg, f.name) for f in fields(Config)[1:9]}  # the model's
    preset = "llama3_8b" if cfg.preset in ("llama3_70b", "llama3_405b") else cfg.preset  # train.py has none for these
    defaults = {**asdict(Config()), **PRESETS[preset]}
    if cfg.experts and "experts" not in PRESETS[preset]:  # moe.py has other defaults, so name every size
        preset = "tiny"
        defaults = dict.fromkeys(sizes)
    model = f"--preset {preset}"
    for name, size in sizes.items():
        if size != defaults[name]:
            model += f" --{name} {size}"
    file, names = "08_4d/train.py", (*AXES, "chunks")
    if cfg.experts:
        file, names = "08_4d/moe.py", (*AXES, "ep", "chunks")
    if cfg.zero > 1:
        file, names = ("03_zero/hsdp.py", ["shard"]) if 1 < cfg.shard < cfg.dp else (f"03_zero/zero{cfg.zero}.py", [])
    layout = " ".join(f"--{name} {getattr(cfg, name)}" for name in (*names, "microbatches", "batch", "seq"))
    layout += {"llama3_70b": " --lr 1.5e-4", "llama3_405b": " --lr 8e-5"}.get(cfg.preset, "")  # Llama 3, table 3
    return f"torchrun {hosts}--nproc_per_node {processes} {file} {model} {layout} --dtype bfloat16 --compile"


def elsewhere(cfg: Config) -> list[str]:
    """The nearest flags of Megatron-LM and torchtitan, and settings of nanotron, of those that can do it."""
    lines = []
    if not cfg.zbv:
        fsdp = is_fsdp(cfg)
        name = "Megatron-LM with ZeRO-1" if cfg.zero == 2 and not fsdp else "Megatron-LM"
        order = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if max(cfg.tp, cfg.cp) > 1 and not fsdp else ""  # it asks for this
        lines.append(f"{name}: {order}{typed(megatron(cfg))}")
    if titan_stages(cfg) and (cfg.ep <= 1 or cfg.ep % cfg.cp == 0):  # its ep is a multiple of cp
        lines.append(f"torchtitan: {typed(titan(cfg))}")
    simple = cfg.cp == cfg.chunks == 1 and not cfg.experts and cfg.zero < 2 and cfg.recompute != "selective"
    if simple and cfg.microbatches >= cfg.pp - 1:
        lines.append(f"nanotron: {settings(cfg)}")
    return lines


def is_fsdp(cfg: Config) -> bool:
    """Whether Megatron-LM needs its FSDP, which has no pipelines."""
    return cfg.zero > 1 and cfg.pp == 1


def megatron(cfg: Config) -> dict[str, object]:
    """Flags of Megatron-LM."""
    shard, experts, fsdp = max(cfg.shard, 1), cfg.experts > 0, is_fsdp(cfg)
    stages = "|".join(f"t*{len(stage)}" for stage in split_layers(cfg, cfg.pp * cfg.chunks))
    return {
        "tensor-model-parallel-size": cfg.tp,
        "sequence-parallel": cfg.tp > 1,
        "context-parallel-size": cfg.cp,
        "pipeline-model-parallel-size": cfg.pp,
        "pipeline-model-parallel-layout": cfg.pp > 1 and f"'E{stages}L'",
        "num-experts": experts and cfg.experts,
        "moe-router-topk": experts and cfg.top_k,
        "expert-model-parallel-size": experts and cfg.ep,
        "moe-token-dispatcher-type": experts and "alltoall",
        "moe-grouped-gemm": experts,
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": True,
        "overlap-param-gather": True,
        "use-megatron-fsdp": fsdp,
        "ckpt-format": fsdp and "fsdp_dtensor",
        "data-parallel-sharding-strategy": fsdp and {2: "optim_grads", 3: "optim_grads_params"}[cfg.zero],
        "num-distributed-optimizer-instances": 1 < shard < cfg.dp and cfg.dp // shard,
        "micro-batch-size": cfg.batch // cfg.dp // cfg.microbatches,
        "global-batch-size": cfg.batch,
        "seq-length": cfg.seq,
        "bf16": True,
        **{f"recompute-{name}": value for name, value in KINDS[cfg.recompute].items()},
    }


def titan_stages(cfg: Config) -> tuple[int, int] | None:
    """The size of torchtitan's stages, and as how many layers each of embedding and head counts.

    It cuts stages of equal size. None: it has no such stages.
    """
    stages = cfg.pp * cfg.chunks
    for layers in 1, 0:
        size = -(-(cfg.layers + 2 * layers) // stages)
        if -(-(cfg.layers + 2 * layers) // size) == stages:
            return size, layers
    return None


def titan(cfg: Config) -> dict[str, object]:
    """Flags of torchtitan."""
    shard, experts = max(cfg.shard, 1), cfg.experts > 0
    size, layers = titan_stages(cfg)
    sequences = cfg.batch // cfg.dp // cfg.microbatches
    schedule = "1F1B" if cfg.chunks == 1 else "Interleaved1F1B"
    flags = {
        "parallelism.data_parallel_replicate_degree": cfg.dp // shard if shard > 1 else 1,
        "parallelism.data_parallel_shard_degree": shard if shard > 1 else cfg.dp,
        "parallelism.fsdp_reshard_after_forward": "always" if cfg.zero == 3 else "never",
        "parallelism.context_parallel_degree": cfg.cp,
        "parallelism.tensor_parallel_degree": cfg.tp,
        "parallelism.expert_parallel_degree": experts and cfg.ep,
        "parallelism.expert_tensor_parallel_degree": experts and min(cfg.tp, cfg.ep) > 1 and cfg.tp,
        "parallelism.pipeline_parallel_degree": cfg.pp,
        "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble" if cfg.zbv else schedule,
        "parallelism.pipeline_parallel_layers_per_stage": size,
        "parallelism.pipeline_parallel_first_stage_less_layers": layers,
        "parallelism.pipeline_parallel_last_stage_less_layers": layers,
        "parallelism.pipeline_parallel_microbatch_size": sequences,
        "training.local_batch_size": cfg.batch // cfg.dp if cfg.pp > 1 else sequences,
        "training.global_batch_size": cfg.batch,
        "training.seq_len": cfg.seq,
        "activation_checkpoint.mode": cfg.recompute,
        "compile.enable": not cfg.zbv,
    }
    return {flag: value for flag, value in flags.items() if cfg.pp > 1 or "pipeline_parallel" not in flag}


def settings(cfg: Config) -> str:
    """The layout as nanotron's file has it; JSON is YAML, too."""
    cut = dict(dp=cfg.dp, tp=cfg.tp, pp=cfg.pp, pp_engine="1f1b", tp_mode="REDUCE_SCATTER")
    cut |= dict(tp_linear_async_communication=cfg.tp > 1, recompute_layer=cfg.recompute == "full")
    m = cfg.microbatches
    amount = dict(micro_batch_size=cfg.batch // cfg.dp // m, batch_accumulation_per_replica=m, sequence_length=cfg.seq)
    return json.dumps(dict(parallelism=cut, tokens=amount, optimizer=dict(zero_stage=1)))


def typed(flags: dict[str, object]) -> str:
    """Flags as one types them: True stands alone, False is left out."""
    words = []
    for flag, value in flags.items():
        if value is not False:
            words.append(f"--{flag}" if value is True else f"--{flag} {value}")
    return " ".join(words)


def draw_plans(rows: list[Plan], upper: pyplot.Axes, lower: pyplot.Axes) -> None:
    """The fastest layout of each cut. Above: memory against speed, by tp. Below: where the time of the best goes.

    Open marks need what no recipe here has.
    """
    best = {}
    for row in rows:
        best.setdefault(tuple(getattr(row.cfg, axis) for axis in (*AXES, "ep")), row)
    for tp, (color, mark) in zip(sorted({row.cfg.tp for row in rows}), itertools.cycle(MARKS)):
        for fill in color, "none":
            some = [row for row in best.values() if row.cfg.tp == tp and bool(needs(row.cfg)) == (fill == "none")]
            style = dict(color=color, markerfacecolor=fill, label=f"tp {tp}" if fill == color else None)
            upper.plot([row.memory for row in some], [row.tokens for row in some], mark, **style)
    upper.plot(rows[0].memory, rows[0].tokens, "o", color=INK, markerfacecolor="none", markersize=15)
    upper.set(xlabel="GiB of the fullest stage", ylabel="tokens/s/GPU, predicted", ylim=(0, 1.1 * rows[0].tokens))
    upper.legend(loc="upper left", ncol=2, columnspacing=0.8, handletextpad=0)
    title = "{preset}, {gpus} x {machine}, {batch} x {seq} tokens: the fastest of each dp, cp, tp, pp{and_ep}\n"
    title += "open marks: no recipe here trains it; circle: the fastest"
    upper.set_title(title.format(and_ep=", ep" if rows[0].cfg.experts else "", **asdict(rows[0].cfg)))
    shown = list(best.values())[:12]
    for place, row in enumerate(shown):
        start = 0
        for kind, seconds in asdict(row.step).items():
            if kind == "ep" and not row.cfg.experts:
                continue
            color, hatch = PARTS[kind]
            lower.barh(place, seconds, left=start, color=color, hatch=hatch, label=None if place else kind)
            start += seconds
        lower.text(0.01, place, shape(row.cfg), color="black", va="center", transform=lower.get_yaxis_transform())
    lower.set(yticks=[], xlabel="seconds of a step, best number of micro-batches")
    lower.invert_yaxis()
    lower.legend(ncol=4, loc="lower left", bbox_to_anchor=(0, 1))


def draw_scale(ours: list[Plan], axes: pyplot.Axes) -> None:
    """MFU of the best layout by GPUs and model, with its tp, cp and pp below; Llama 3's published values."""
    ticks = [f"{n:,}" for n in SCALE]
    for (color, mark), preset in zip(MARKS, dict.fromkeys(plan.cfg.preset for plan in ours)):
        rows = {SCALE.index(plan.cfg.gpus): plan for plan in ours if plan.cfg.preset == preset}
        mfus = [100 * row.mfu for row in rows.values()]
        axes.plot([*rows], mfus, f"{mark}-", color=color)
        axes.text(max(rows) + 0.6, mfus[-1] - 1, preset, color=color)
        cuts = {place: f"{row.cfg.tp}·{row.cfg.cp}·{row.cfg.pp}" for place, row in rows.items()}
        ticks = [f"{tick}\n{cuts.get(place, '-')}" for place, tick in enumerate(ticks)]
    places, published, predicted = zip(*((SCALE.index(p.cfg.gpus), mfu, 100 * theirs) for p, theirs, mfu in llama()))
    places = [place + 0.2 * (1 + places[:i].count(place)) for i, place in enumerate(places)]
    axes.vlines(places, published, predicted, color=INK, lw=1)
    axes.plot(places, published, "x", color=INK, mew=2, label="405B, published; the lowest: 131,072 tokens")
    axes.plot(places, predicted, "_", color=INK, mew=2, label="the same, predicted; both by the paper's formula")
    axes.set_xticks([-0.7, *range(len(SCALE))], ["H100s\n8b\n70b\n405b", *ticks])
    axes.tick_params(length=0)
    axes.set(xlabel="tp·cp·pp of the best layout", ylabel="MFU, %", ylim=0, xlim=(-0.9, 6.9))
    axes.set_title("Predicted MFU of the best layout, sequences of 8,192 tokens")
    axes.legend(loc="lower left")


def draw_measured(found: list[tuple[Plan, float, float]], left: pyplot.Axes, right: pyplot.Axes) -> None:
    """Predicted against measured, one mark per run: speed and memory."""
    nodes = {(0, 2): "1 and 2 nodes", (2, 8): "4 and 8", (8, 32): "16 and 32", (32, 1e9): "64"}
    for ((above, most), label), (color, mark) in zip(nodes.items(), MARKS):
        some = [run for run in found if above < run[0].cfg.gpus / run[0].cfg.gpus_per_node <= most]
        speeds = [(tokens, plan.tokens) for plan, tokens, _ in some]
        sizes = [(gb, plan.memory * GIB / 1e9) for plan, _, gb in some]
        for axes, pairs in ((left, speeds), (right, sizes)) if some else ():
            axes.plot(*zip(*pairs), mark, color=color, mfc="none", ms=4, mew=0.8, label=label, rasterized=True)
    for axes, what in ((left, "tokens/s/GPU"), (right, "GB of the fullest GPU")):
        axes.axline((100, 100), slope=1, color=INK, linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=f"{what}, measured", ylabel=f"{what}, predicted")
        for axis in axes.xaxis, axes.yaxis:
            axis.set_major_formatter("{x:,g}")
    right.legend(loc="lower right", handletextpad=0)


def draw(rows: list, file: str, how: Callable[..., None], height: float, *grid: int) -> None:
    """Write a picture: text as text, and the same bytes each time."""
    style = {"svg.fonttype": "none", "svg.hashsalt": "plan", "font.size": 10, "savefig.transparent": True}
    style |= {"axes.titlesize": 10, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False}
    style |= {"legend.frameon": False, "hatch.linewidth": 0.5, "hatch.color": "#404a56"}
    inks = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
    matplotlib.rcParams.update(style | dict.fromkeys(inks, INK))
    figure, axes = pyplot.subplots(*grid, figsize=(6.6, height), squeeze=False, layout="constrained")
    how(rows, *axes.flat)
    figure.savefig(file, metadata={"Date": None}, dpi=130)
    pyplot.close(figure)


def parse_config() -> Config:
    """Read the command line. Flags override the preset, which overrides the defaults of Config."""
    parser = argparse.ArgumentParser(description=__doc__, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.formatter_class, parser.usage = argparse.RawDescriptionHelpFormatter, argparse.SUPPRESS
    for f in fields(Config):
        if f.type is bool:
            parser.add_argument(f"--{f.name}", action="store_true")
        else:
            choices = get_args(f.type) or None
            parser.add_argument(f"--{f.name}", type=type(f.default), choices=choices, help=f"default: {f.default}")
    flags = vars(parser.parse_args())
    for task in "measured", "playbook", "scale":
        extra = sorted(flags.keys() - {task, task != "playbook" and "draw"})
        if flags.get(task) and extra:
            raise SystemExit(f"--{extra[0]}: not beside --{task}, which has layouts of its own")
    return Config(**{**PRESETS[flags.get("preset", "tiny")], **flags})


def check(cfg: Config) -> None:
    """Exit with one line that names the invalid flag, its value, and what would work."""
    for flag, value in asdict(cfg).items():
        least = min(1, getattr(Config, flag)) if type(value) in (int, float) else 0
        if type(value) in (int, float) and not least <= value < 1e12:
            raise SystemExit(f"--{flag} {value}: must be at least {least}, and below 1e12")
    gpus, node = cfg.gpus, cfg.gpus_per_node
    sizes = [(axis, getattr(cfg, axis)) for axis in AXES]
    product = math.prod(size or 1 for _, size in sizes)
    sharded = cfg.zero == 3 or cfg.shard > 1
    problems = [
        *((size and gpus % size, f"--{axis} {size}: must divide --gpus {gpus}") for axis, size in sizes),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (gpus > node and gpus % node, f"--gpus {gpus}: must be a multiple of --gpus_per_node {node}"),
        (cfg.shard and gpus % cfg.shard, f"--shard {cfg.shard}: must divide --gpus {gpus}"),
        (cfg.shard > 1 and cfg.zero not in (0, 3), f"--shard {cfg.shard}: --zero must be 3"),
        (cfg.experts and cfg.top_k > cfg.experts, f"--top_k {cfg.top_k}: must be at most --experts {cfg.experts}"),
        (not cfg.experts and cfg.top_k > 1, f"--top_k {cfg.top_k}: --experts must be above 0"),
        (not cfg.experts and cfg.ep > 1, f"--ep {cfg.ep}: --experts must be above 0"),
        (cfg.ep and cfg.dp * cfg.cp % cfg.ep, f"--ep {cfg.ep}: must divide --dp times --cp, {cfg.dp * cfg.cp}"),
        (cfg.ep and cfg.experts % cfg.ep, f"--ep {cfg.ep}: must divide --experts {cfg.experts}"),
        (cfg.ep and gpus % cfg.ep, f"--ep {cfg.ep}: must divide --gpus {gpus}"),
        (cfg.experts and (sharded or cfg.zero == 2), f"--experts {cfg.experts}: --zero must be 1, and --shard 0"),
        (cfg.experts and cfg.recompute == "selective", f"--experts {cfg.experts}: --recompute must be none or full"),
        (cfg.zbv and (1 in (gpus, cfg.pp) or cfg.zero > 1), "--zbv: --gpus and --pp must be above 1, and --zero 1"),
        (cfg.zbv and cfg.recompute not in ("any", "none"), "--zbv: --recompute must be none"),
        (cfg.zbv and cfg.chunks not in (0, 2), f"--chunks {cfg.chunks}: --zbv has 2"),
        (cfg.ours and (cfg.zbv or cfg.recompute in RECOMPUTE[1:]), "--ours: must go without --zbv and --recompute"),
        (cfg.zero == 3 and 1 in (cfg.dp, cfg.shard), "--zero 3: --dp and --shard must be above 1"),
        (sharded and max(cfg.cp, cfg.pp) > 1, "--zero 3: must go without --cp and --pp, and so must --shard"),
        (gpus % product, f"--gpus {gpus}: must be divisible by {product}, the product of --dp, --cp, --tp and --pp"),
        (cfg.batch % max(1, cfg.microbatches), f"--microbatches {cfg.microbatches}: must divide --batch {cfg.batch}"),
        (cfg.experts and math.gcd(cfg.dim, cfg.ffn) % 8, f"--ffn {cfg.ffn}, --dim {cfg.dim}: must be multiples of 8"),
        (cfg.layers > 10_000, f"--layers {cfg.layers}: must be at most 10000"),
        (cfg.draw and not cfg.draw.endswith(".svg"), f"--draw {cfg.draw}: must end in .svg"),
        (not os.path.isdir(os.path.dirname(cfg.draw) or "."), f"--draw {cfg.draw}: there is no such folder"),
        (os.path.exists(cfg.draw) and not os.path.isfile(cfg.draw), f"--draw {cfg.draw}: is no file"),
        (cfg.measured and not os.path.isfile(cfg.measured), f"--measured {cfg.measured}: cannot be read as .csv"),
    ]
    for wrong, problem in problems:
        if wrong:
            raise SystemExit(problem)


def main() -> None:
    cfg = parse_config()
    check(cfg)
    if cfg.measured:
        return compare(cfg.measured, cfg.draw)
    if cfg.playbook:
        return print(playbook())
    if cfg.scale:
        text, rows = scale()
        print(text)
        return draw(rows, cfg.draw, draw_scale, 4) if cfg.draw else None
    by = Trainer(1e12 * cfg.tflops / MACHINES[cfg.machine].peak or 1)
    rows, steps = plans(cfg, by, 0 if cfg.draw else max(cfg.top, 12))
    if not rows:
        raise SystemExit(f"--gpus {cfg.gpus}: {steps}{would_fit(cfg, by)}")
    print(f"{cfg.preset}, {cfg.gpus} x {cfg.machine}, {cfg.batch} x {cfg.seq} tokens; {steps}.")
    print(table(rows[: cfg.top]), reason(rows), sep="\n")
    best, simple = rows[0].cfg, simplest(rows).cfg
    ours = [one for one in dict.fromkeys((best, simple)) if not needs(one)]
    ours = ours or [row.cfg for row in rows if not needs(row.cfg)][:1]
    for one in ours:
        print(f"{shape(one)}:\n  {command(one)}")
    print(f"{shape(simple)}, elsewhere:", *elsewhere(simple), sep="\n  ")
    if cfg.draw:
        draw(rows, cfg.draw, draw_plans, 8, 2)


if __name__ == "__main__":
    main()
