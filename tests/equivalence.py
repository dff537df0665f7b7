"""The check that every recipe has to pass: it trains exactly as its root does on one device.

    python tests/equivalence.py [--device cuda] [--jobs 4] [RECIPE ...]     run the checks, store errors for the README

On the CPU in float64, where rounding is near 1e-15 and the effect of a bug far above 1e-6. Two runs are compared with
the root's: one step of gradient descent, which turns the change of the weights into the gradient, and four steps of
AdamW with a clip that acts. The text is cut into short documents, so that every rank and micro-batch has its own number
of valid tokens; norm weights are random; 6 query heads share 2 key and value heads; 5 layers split evenly over nothing.

On CPUs, tests/contract.py has low precision: where only the batch is cut, nothing is rounded that the root does not
round. On GPUs, over NCCL, the gradients of all cases that fit: in float32 to 1e-5 (Muon: in float64), and in bfloat16
no further from the root's float32 gradient than twice as far as the root's own bfloat16 gradient is. A layout rounds
the same numbers as often as the root; where it adds up in another order, or rounds the parts of a sum before adding
them, both errors are random sums of as many roundings of the same size, so their norms are alike, and twice leaves room
for chance in small tensors. Recipes whose weights are themselves bfloat16, with master weights beside them, round more:
gradients are handed over in 16 bits, and a CPU adds up that of the embedding in 16 bits, a row per token. Their measure
is the root with bfloat16 weights, which rounds all of that too, whatever instructions a CPU has.
"""

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import ModuleType

import compare
import probes
import torch
from launch import ROOT, Run, launch, once, run_folder
from safetensors.torch import save_file

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2}  # the last in multiples of the root's own error
SHAPE = "--layers 5 --dim 48 --heads 6 --kv_heads 2 --ffn 64 --seq 24 --batch 12"
GPU_SHAPE = "--layers 5 --dim 384 --heads 6 --kv_heads 2 --ffn 512 --seq 192 --batch 12"
# AdamW as gradient descent with rate lr / eps = 1
GRADIENT = "--steps 1 --eps 1e12 --lr 1e12 --clip 1e9 --weight_decay 0 --warmup 0"
LOW_GRADIENT = GRADIENT.replace("--lr 1e12", "--lr 1e14")  # rate 100: float32 weights must not round the change away
TRAINING = "--steps 4 --lr 1e-2 --clip 0.5 --warmup 1"
# what is trained: the root's flags too
MODEL = "--layers --batch --seq --vocab --dim --heads --kv_heads --ffn --experts --top_k".split()
MODEL += "--lora_rank --lora_alpha --eps --groups --top_groups --shared".split()
LARGE = {"lm_head": 1000, "q_proj": 15, "k_proj": 15, "embed_tokens": 50}  # times the weights, by their names
LOW_WEIGHTS = [  # recipes whose weights have the dtype of the matmuls
    f"03_zero/{name}.py"
    for name in """zero1_masters zero1_overlap zero2 zero3 zero3_copy_engines hsdp offload torch_fsdp
    accelerate_fsdp""".split()
] + [
    "08_4d/2d.py",
    "08_4d/3d.py",
    "08_4d/train.py",
    "08_4d/checkpoint.py",
    "08_4d/moe.py",
    "09_kernels/train.py",  # those of its blocks
]
SHORTER = [  # recipes that round more than that in bfloat16, and whose own tests say how much
    f"10_mixed_precision/{name}.py"
    for name in """fp8_tensorwise fp8_delayed_scaling fp8_blockwise fp8_zero3 stochastic_rounding
    fp8_stochastic_rounding low_memory fp8_low_memory""".split()
]
CONTEXT_TWIN = "05_context_ring/torch_context_parallel.py"  # on GPUs, its library has no attention in float32
KEYS = "recipe", "ranks", "flags", "device"
RESULTS = ROOT / "tests" / "results" / "equivalence.json"


def mesh(dp: int, cp: int, tp: int, pp: int) -> str:
    """Flags of 08_4d for a layout: more micro-batches than stages, a vocabulary that tp does not divide."""
    sizes = f"--dp {dp} --cp {cp} --tp {tp} --pp {pp} --microbatches {min(16 // dp, 2 * pp)}"
    return f"{sizes} --heads 8 --vocab 259 --seq 32 --batch 16" + (" --layers 9" if pp == 8 else "")


def stages(dp: int, tp: int, pp: int, chunks: int) -> str:
    """Flags of 3d.py for a layout: twice as many micro-batches as ranks of pp, uneven stages."""
    sizes = f"--dp {dp} --tp {tp} --pp {pp} --chunks {chunks} --microbatches {2 * pp} --batch {2 * pp * dp}"
    return f"{sizes} --heads 8 --kv_heads 2 --vocab 259 --layers {max(5, pp * chunks + 1)}"


TWO_D = [  # dp, tp; batches and key heads that do not divide evenly; neighbours on tp with the same key head
    *((1, 2, "--heads 4 --kv_heads 2"), (2, 1, "--microbatches 3"), (2, 2, "--heads 4 --kv_heads 2 --vocab 257")),
    *((1, 4, "--heads 4 --kv_heads 1"), (3, 2, "--kv_heads 2"), (2, 4, "--heads 8 --kv_heads 2 --vocab 257")),
]
THREE_D = [  # dp, tp, pp; stages of a rank; all ways to split 8, and three stages
    *((dp, tp, pp, 1 + (pp < 8)) for dp, tp, pp in itertools.product((1, 2, 4, 8), repeat=3) if dp * tp * pp == 8),
    *((1, 1, 8, 2), (2, 2, 2, 1), (1, 2, 3, 2), (1, 1, 3, 3), (3, 1, 2, 2), (2, 1, 1, 2)),
]
EIGHT = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8]  # the 20 ways
EXPERTS = [  # dp, cp, tp, pp and ep: of all dp cp ranks, of some of them, of one
    *((2, 1, 2, 2, 2), (1, 2, 2, 2, 2), (2, 2, 2, 1, 2), (2, 2, 1, 2, 4), (4, 2, 1, 1, 4)),
    *((8, 1, 1, 1, 8), (1, 8, 1, 1, 2), (4, 1, 1, 2, 2), (1, 2, 4, 1, 2), (1, 1, 4, 2, 1)),
]
# A recipe's cases: number of ranks, flags of its own; more layers where 8 stages need them. With a star, the hardest,
# which proves a recipe when there is time for one: shards with padding, shared heads.
SIZES = """
01_single_gpu/train.py: 1 --compile
01_single_gpu/gradient_accumulation.py: *1 --microbatches 4
01_single_gpu/activation_checkpointing.py: *1
01_single_gpu/selective_checkpointing.py: *1 | 1 --compile
01_single_gpu/chunked_loss.py: *1 --loss_chunks 5 | 1 --compile
01_single_gpu/tied_embeddings.py: 1 --compile
01_single_gpu/muon.py: 1 --compile
01_single_gpu/lora.py: 1 --compile
01_single_gpu/document_mask.py: 1 --compile
02_data_parallel/naive.py: 2 | *3 | 4 | 8 --batch 16
02_data_parallel/hang.py: 2 | *3
02_data_parallel/overlap.py: 2 | *3
02_data_parallel/bucketed.py: *2 --bucket_mb 0.05 | 3 --bucket_mb 0 | 4 | 8 --batch 16 --bucket_mb 0.05
02_data_parallel/coalesced.py: *2 --bucket_mb 0.05 | 3 --bucket_mb 0 | 4
02_data_parallel/no_sync.py: 2 --microbatches 2 | *4 --microbatches 3 --bucket_mb 0.05
# of 5 ranks with buckets that 5 does not divide
02_data_parallel/copy_engines.py: 2 --bucket_mb 0.05 | 3 --bucket_mb 0 | 4 | *5 --batch 10 --bucket_mb 0.05
02_data_parallel/diloco.py: 2 --inner_steps 1 --outer_lr 1 --outer_momentum 0
02_data_parallel/diloco.py: *3 --inner_steps 1 --outer_lr 1 --outer_momentum 0
02_data_parallel/diloco.py: 1 --inner_steps 3 --outer_lr 1 --outer_momentum 0
02_data_parallel/torch_ddp.py: 2 | *4 --bucket_mb 0.05
02_data_parallel/accelerate_ddp.py: 2 | *4 --bucket_mb 0.05
# units of which 5 shards need padding
03_zero/zero1.py: 2 | 3 | 4 | *5 --batch 10 | 8 --batch 16
# of one layer 7 matrices: the eighth rank owns none
03_zero/muon.py: 2 | *3 | 4 | 5 --batch 10 | 8 --batch 16 --layers 1
03_zero/zero1_masters.py: 2 | 3 | *5 --batch 10
03_zero/zero1_overlap.py: 2 --microbatches 1 | 2 --microbatches 3 | 3 --microbatches 2 | *4 --microbatches 3
03_zero/zero1_overlap.py: 5 --batch 10 | 8 --batch 16
03_zero/zero2.py: 2 --microbatches 1 | 3 --microbatches 2 | *4 --microbatches 3 | 5 --batch 10 | 8 --batch 16
03_zero/zero3.py: 2 | 2 --compile | 3 | *4 --microbatches 3 | 5 --batch 10 | 8 --batch 16
03_zero/zero3_copy_engines.py: 2 --microbatches 1 | 3 | *4 --microbatches 3 | 5 --batch 10 | 8 --batch 16
03_zero/hsdp.py: 2 --shard 2 | 4 --shard 2 --microbatches 1 | 3 --shard 1 --microbatches 4 | 5 --shard 5 --batch 10
03_zero/hsdp.py: *6 --shard 3 --microbatches 2 | 8 --shard 4 --batch 16
03_zero/offload.py: 2 | 3 | *4 --microbatches 3 | 5 --batch 10
# the last of 5 ranks has none of 16 rows
03_zero/torch_fsdp.py: 2 | 3 | 4 | *5 --batch 10 | 8 --batch 16
03_zero/accelerate_fsdp.py: 2 | *4
04_tensor_sequence/tensor_parallel.py: 2 | 3 --kv_heads 3 --ffn 96 | 3 --kv_heads 1 --ffn 96
04_tensor_sequence/tensor_parallel.py: *4 --heads 4 --kv_heads 2 | 8 --heads 8 --kv_heads 2
04_tensor_sequence/vocab_parallel.py: 2 | 2 --compile | 3 --kv_heads 3 --ffn 96 --vocab 259
04_tensor_sequence/vocab_parallel.py: *4 --heads 4 --kv_heads 2 --vocab 257 | 8 --heads 8 --kv_heads 2 --vocab 257
04_tensor_sequence/sequence_parallel.py: 2 | 2 --compile | 3 --kv_heads 1 --ffn 96 --vocab 259
04_tensor_sequence/sequence_parallel.py: *4 --heads 4 --kv_heads 2 --batch 6 | 8 --heads 8 --kv_heads 2 --vocab 257
04_tensor_sequence/async_tensor_parallel.py: 2 | 2 --compile | 3 --kv_heads 3 --ffn 96 --vocab 259
04_tensor_sequence/async_tensor_parallel.py: *4 --heads 4 --kv_heads 2 --batch 6
04_tensor_sequence/async_tensor_parallel.py: 8 --heads 8 --kv_heads 2 --vocab 257
# vocabulary 261 is cut into 66, 66, 66 and 63
04_tensor_sequence/torch_dtensor.py: 2 | 2 --compile | 3 --kv_heads 3 --ffn 96
04_tensor_sequence/torch_dtensor.py: *4 --heads 4 --kv_heads 4 --vocab 261 | 8 --heads 8 --kv_heads 8 --dim 64
05_context_ring/blockwise.py: 1 --blocks 4 | *1 --blocks 3 | 1 --blocks 1 | 1 --blocks 4 --compile
05_context_ring/all_gather_kv.py: 2 | 2 --compile | *3 | 4 --kv_heads 3 | 8
05_context_ring/ring.py: 2 | 3 --kv_heads 6 | *4 | 8
05_context_ring/striped.py: 2 | *3 --kv_heads 1 | 4 | 8
05_context_ring/zigzag.py: 2 | 2 --compile | 3 --kv_heads 1 | *4 | 8 --seq 48
05_context_ring/documents.py: 2 | 2 --compile | 3 | *4 | 8 --seq 48
05_context_ring/ulysses.py: 2 | 3 --kv_heads 3 | *4 --heads 8 --kv_heads 2 | 8 --heads 8 --kv_heads 2
05_context_ring/usp.py: 4 --ulysses 2 | 2 --ulysses 2 | 3 --ulysses 1 | 8 --ulysses 2
05_context_ring/usp.py: *8 --ulysses 4 --heads 8 --kv_heads 2
05_context_ring/torch_context_parallel.py: 2 | 2 --rotate alltoall | *3 --rotate alltoall | 4 | 8 --seq 48
06_pipeline/naive.py: 2 | 3 | *4 | 8 --layers 11
06_pipeline/afab.py: 2 --microbatches 4 | 3 --microbatches 2 | *4 --microbatches 6 | 8 --microbatches 12 --layers 11
06_pipeline/1f1b.py: 2 --microbatches 4 | 2 --microbatches 4 --compile | 3 --microbatches 2 | *4 --microbatches 6
06_pipeline/1f1b.py: 8 --microbatches 12 --layers 11
06_pipeline/tied_embeddings.py: 1 --microbatches 2 | 2 --microbatches 4 | 3 --microbatches 2 | *4 --microbatches 6
06_pipeline/tied_embeddings.py: 8 --microbatches 12 --layers 11
06_pipeline/split_backward.py: 2 --microbatches 4 | 2 --microbatches 4 --compile | 3 --microbatches 2
06_pipeline/split_backward.py: *4 --microbatches 6 | 8 --microbatches 12 --layers 11
06_pipeline/zero_bubble.py: 2 --microbatches 4 | 3 --microbatches 2 | *4 --microbatches 6
06_pipeline/zero_bubble.py: 8 --microbatches 12 --layers 11
# 2 ranks: wraps around to the rank before
06_pipeline/interleaved.py: 2 --microbatches 4 | 2 --microbatches 4 --compile
06_pipeline/interleaved.py: 2 --microbatches 2 --chunks 3 --layers 7 | *3 --microbatches 6 --layers 7
06_pipeline/interleaved.py: 4 --microbatches 12 --layers 11 | 8 --microbatches 8 --layers 17 --batch 16
06_pipeline/zbv.py: 2 --microbatches 4 | 2 --microbatches 4 --compile | *3 --microbatches 6 --layers 7
06_pipeline/zbv.py: 4 --microbatches 12 --layers 11 | 8 --microbatches 16 --layers 17 --batch 16
# 3 micro-batches: fewer than the order needs, and an odd number
06_pipeline/dualpipe.py: 2 --microbatches 4 | 4 --microbatches 3 | *4 --microbatches 12 --layers 7
06_pipeline/dualpipe.py: 8 --microbatches 16 --layers 11 --batch 16
06_pipeline/torch_pipelining.py: 2 --microbatches 4 | 2 --microbatches 4 --compile | 3 --microbatches 3
06_pipeline/torch_pipelining.py: 4 --microbatches 6 --schedule GPipe
06_pipeline/torch_pipelining.py: 4 --microbatches 6 --schedule Interleaved1F1B --layers 11
06_pipeline/torch_pipelining.py: 4 --microbatches 6 --schedule LoopedBFS --layers 11
06_pipeline/torch_pipelining.py: *4 --microbatches 6 --schedule InterleavedZeroBubble --layers 11
06_pipeline/torch_pipelining.py: 4 --microbatches 6 --schedule ZBVZeroBubble --layers 11
06_pipeline/torch_pipelining.py: 2 --microbatches 6 --schedule DualPipeV | 8 --microbatches 12 --layers 11
07_expert/moe.py: 1 --compile
# 8 experts: one per rank; 56: more than tokens of a rank
07_expert/expert_parallel.py: 2 | 2 --compile | 2 --top_k 1 | 3 --experts 9 --top_k 4 | *4 --edp 2 --top_k 4
07_expert/expert_parallel.py: 8 --batch 16 --top_k 1 | 8 --experts 56 --top_k 4 --batch 16 | 6 --edp 2 --experts 6
# test_balance.py has others
07_expert/auxiliary_loss.py: 2 --balance 0 --z 0 | *4 --edp 2 --balance 0 --z 0
07_expert/bias_balancing.py: 2 --bias_rate 0 --microbatches 1 | *4 --bias_rate 0 --microbatches 3 --edp 2
07_expert/node_limited.py: 1 --compile | 2 --nodes 2 | 2 --nodes 2 --compile | 2 --nodes 2 --shared 0
07_expert/node_limited.py: *4 --nodes 2 --microbatches 3 --layers 1 | 4 --nodes 4 --microbatches 1 --top_groups 3
07_expert/node_limited.py: 4 --nodes 2 --edp 2 --batch 16 --top_k 1 | 8 --batch 16 | 8 --nodes 2 --batch 16
07_expert/node_limited.py: 8 --nodes 4 --batch 16 --groups 8 --top_groups 4 | 8 --nodes 2 --edp 2 --batch 16
# experts / top_k or more: nothing is dropped
07_expert/capacity.py: 2 --capacity 4 | 2 --capacity 4 --compile | 3 --experts 9 --top_k 4 --capacity 2.25
07_expert/capacity.py: *4 --edp 2 --top_k 4 --capacity 2 | 6 --edp 2 --experts 6 --capacity 3
07_expert/capacity.py: 8 --batch 16 --top_k 1 --capacity 8
07_expert/overlap.py: 2 | 2 --compile | 3 --experts 9 --top_k 4 | *4 --edp 2 | 8 --batch 16 --top_k 1
# too few slots at first: steps are repeated
07_expert/slots.py: 2 | 2 --slots 1 | 2 --compile | 3 --experts 9 --top_k 4 | *4 --edp 2
07_expert/symmetric_memory.py: 2 | 2 --slots 1 | 2 --compile | 3 --experts 9 --top_k 4 | *4 --edp 2
07_expert/symmetric_memory.py: 8 --batch 16 --top_k 1 --slots 8
09_kernels/train.py: *1 | 1 --kv_heads 6 --vocab 259
10_mixed_precision/bf16.py: 1 --microbatches 1 | *1 --microbatches 3 | 1 --compile
10_mixed_precision/fp16_loss_scaling.py: 1 --microbatches 1 | *1 --microbatches 3
10_mixed_precision/fp8_tensorwise.py: 1 --microbatches 1 | *1 --microbatches 3
10_mixed_precision/fp8_delayed_scaling.py: 1 --microbatches 1 | *1 --microbatches 3
10_mixed_precision/fp8_blockwise.py: 1 --microbatches 1 | *1 --microbatches 3
# units of which 4 and 5 shards need padding
10_mixed_precision/fp8_zero3.py: 2 | 2 --compile | 3 | *4 --microbatches 3 | 5 --batch 10 | 8 --batch 16
10_mixed_precision/stochastic_rounding.py: 1 --microbatches 1 | *1 --microbatches 3 | 1 --compile
10_mixed_precision/fp8_stochastic_rounding.py: 1 --microbatches 1 | *1 --microbatches 3
10_mixed_precision/low_memory.py: 1 --microbatches 1 | *1 --microbatches 3 | 1 --compile
10_mixed_precision/fp8_low_memory.py: 1 --microbatches 1 | *1 --microbatches 3
"""
ROOT_RECIPE = "01_single_gpu/train.py"
MOE = "07_expert/moe.py"  # the root of a family of its own
NODES = "07_expert/node_limited.py"  # on one rank, where its tests compare it with transformers
TIED = "01_single_gpu/tied_embeddings.py"  # and of those that have its name, as below
MUON = "01_single_gpu/muon.py"
LORA = "01_single_gpu/lora.py"
DOCUMENTS = "01_single_gpu/document_mask.py"
BLOCKWISE = "05_context_ring/blockwise.py"  # the only one of its folder on one device
FP8_ZERO3 = "10_mixed_precision/fp8_zero3.py"  # the only one of its folder on several
KERNELS = "09_kernels/train.py"  # which no CPU can compile: there its kernels are interpreted
# else gradients are too small for the clip; those of A, which begin at 0, are near eps, where AdamW enlarges rounding
LORA_FLAGS = "--lora_alpha 300 --eps 1e-4"
ROOTS = {recipe: (1, "") for recipe in (ROOT_RECIPE, MOE, NODES, TIED, MUON, DOCUMENTS)} | {LORA: (1, LORA_FLAGS)}
CASES, HARDEST = [], dict(ROOTS)
for recipe, cases in (line.split(": ") for line in SIZES.splitlines() if line and line[0] != "#"):
    for ranks, _, flags in (case.partition(" ") for case in cases.split(" | ")):
        CASES.append((recipe, int(ranks.strip("*")), flags))
        if ranks[0] == "*":
            HARDEST[recipe] = CASES[-1][1:]
CASES += [
    *(("03_zero/lora.py", n, f"{LORA_FLAGS} {flags}") for n, flags in ((2, ""), (4, "--batch 16"), (8, "--batch 16"))),
    ("04_tensor_sequence/lora.py", 2, LORA_FLAGS),
    *(("04_tensor_sequence/lora.py", n, f"{LORA_FLAGS} --heads {n} --kv_heads 2") for n in (4, 8)),
    ("04_tensor_sequence/lora.py", 3, f"{LORA_FLAGS} --kv_heads 3 --ffn 96"),
    ("03_zero/lora.py", 2, f"{LORA_FLAGS} --compile"),
    ("03_zero/lora.py", 3, f"{LORA_FLAGS} --lora_rank 12"),
    *(("08_4d/2d.py", dp * tp, f"--dp {dp} --tp {tp} {flags}") for dp, tp, flags in TWO_D),
    *(("08_4d/3d.py", dp * tp * pp, stages(dp, tp, pp, chunks)) for dp, tp, pp, chunks in THREE_D),
    *(("08_4d/train.py", 8, mesh(*sizes)) for sizes in EIGHT),
    ("08_4d/train.py", 8, f"{mesh(2, 1, 2, 2)} --order tp-cp-pp-dp"),
    ("08_4d/train.py", 16, mesh(2, 2, 2, 2)),
    ("08_4d/train.py", 12, f"{mesh(3, 2, 2, 1)} --batch 12 --microbatches 4"),  # units of which 6 shards need padding
    ("08_4d/train.py", 8, f"{mesh(1, 2, 2, 2)} --chunks 2 --layers 5"),
    *(("08_4d/train.py", 2, mesh(*sizes)) for sizes in ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))),
    ("08_4d/train.py", 2, f"{mesh(1, 1, 2, 1)} --kv_heads 4"),  # two key heads on each rank
    ("08_4d/train.py", 2, f"{mesh(1, 1, 1, 2)} --layers 12"),  # model.layers.1 and model.layers.10
    *(("08_4d/checkpoint.py", math.prod(sizes), mesh(*sizes)) for sizes in ((2, 1, 1, 1), (2, 1, 2, 1))),
    *(("08_4d/moe.py", 8, f"{mesh(*sizes)} --ep {ep}") for *sizes, ep in EXPERTS),
    # every token goes to all experts: where scores are close, bfloat16 may choose others than the root
    ("08_4d/moe.py", 8, f"{mesh(2, 1, 2, 2)} --ep 2 --top_k 8"),
    ("08_4d/moe.py", 12, f"{mesh(3, 2, 2, 1)} --batch 12 --microbatches 4 --ep 2"),
    ("08_4d/moe.py", 16, f"{mesh(2, 2, 2, 2)} --ep 2"),
    ("08_4d/moe.py", 4, f"{mesh(1, 2, 1, 2)} --ep 2 --chunks 2 --layers 5"),
    ("08_4d/moe.py", 4, f"{mesh(2, 1, 1, 2)} --ep 2 --order tp-cp-pp-dp"),
    *(("08_4d/moe.py", 2, f"{mesh(*sizes)} --ep {ep}") for *sizes, ep in ((2, 1, 1, 1, 2), (1, 1, 2, 1, 1))),
]
CASES.sort(key=lambda case: case[0][:2])  # by folder, each in its order
HARDEST["03_zero/lora.py"] = 3, f"{LORA_FLAGS} --lora_rank 12"
HARDEST["04_tensor_sequence/lora.py"] = 4, f"{LORA_FLAGS} --heads 4 --kv_heads 2"
HARDEST["08_4d/2d.py"] = 8, "--dp 2 --tp 4 --heads 8 --kv_heads 2 --vocab 257"
HARDEST["08_4d/3d.py"] = 8, stages(2, 2, 2, 2)
HARDEST["08_4d/train.py"] = 8, mesh(2, 1, 2, 2)
HARDEST["08_4d/checkpoint.py"] = 4, mesh(2, 1, 2, 1)
HARDEST["08_4d/moe.py"] = 8, f"{mesh(2, 1, 2, 2)} --ep 2 --top_k 8"


def on_one_device(recipe: str) -> bool:
    """Whether a recipe trains in one process."""
    return recipe[:2] in ("01", "10") and recipe != FP8_ZERO3 or recipe in (MOE, BLOCKWISE, KERNELS)


def root_of(recipe: str) -> str:
    """The recipe that trains the same model on one device."""
    if same := [root for root in (TIED, MUON, LORA) if Path(root).name == Path(recipe).name]:
        return same[0]
    if recipe in (DOCUMENTS, "05_context_ring/documents.py"):
        return DOCUMENTS
    if recipe == NODES:
        return NODES
    return MOE if recipe.startswith("07") or recipe == "08_4d/moe.py" else ROOT_RECIPE


@once
def documents() -> str:
    """A folder with 2,000 files of 1, 2, 4 ... 32 bytes, cut from the source of argparse."""
    folder = run_folder() / "documents"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    text, sizes = Path(argparse.__file__).read_bytes(), 2 ** torch.randint(0, 6, (2000,), generator=generator)
    for i, size in enumerate(sizes.tolist()):
        Path(folder, f"{i:04}.txt").write_bytes(text[30 * i : 30 * i + size])
    return str(folder)


def shared(flags: str) -> str:
    """Those of the flags that decide what is trained, not how: the root's run has these alone."""
    words = flags.split()
    return " ".join(f"{a} {b}" for a, b in zip(words, words[1:]) if a in MODEL)


@once
def start(root: str, flags: str, large: bool = False) -> str:
    """A file with the weights that (seed, name) draw, but random numbers around 1 for the norms.

    large: so large that logits reach 300, and their maxima differ by more than 100 from token to token: of that float32
    has no exponential. Attention scores reach 20.
    """
    weights = launch(root, 1, f"{flags} --device cpu --dtype float64 --steps 0").weights
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if root == LORA:
            tensor.copy_(tensor.bfloat16())  # as published weights are, which it freezes
        if large:
            tensor *= next((scale for part, scale in LARGE.items() if part in name), 1)
    file = run_folder() / f"start{zlib.crc32(repr((root, flags, large)).encode())}.safetensors"
    save_file(weights, file)
    return str(file)


@once
def reference(root: str, flags: str) -> Run:
    """The root's run. Checks that the case is not vacuous: the clip acts, valid tokens differ."""
    run = launch(root, 1, flags, probe=probes.valid_tokens)
    assert TRAINING not in flags or min(norm for _, norm, *_ in run.history) > 0.5, "the clip never acted"
    assert len(set(run.probes[0])) > 1, "all sequences have as many valid tokens"
    return run


def bfloat16_weights(module: ModuleType) -> Callable[[], None]:
    """A probe of the root: the gradient of a copy of the model whose weights are bfloat16."""
    forward_backward = module.forward_backward

    def rounded(cfg, model, *batch):
        low = copy.deepcopy(model).to(torch.bfloat16)
        loss = forward_backward(cfg, low, *batch)
        for p, q in zip(model.parameters(), low.parameters()):
            p.grad = q.grad.to(p.dtype)
        return loss

    module.forward_backward = rounded
    return lambda: None


def sum_of_parts(parts: int, low_weights: bool, rounded: int = 0) -> Callable[[ModuleType], Callable[[], None]]:
    """A probe of the root: the gradients of so many parts of the batch, computed one by one and summed in float64.

    rounded: the sum of so many that follow each other is rounded to bfloat16 first; 0 if none is.
    """

    def probe(module: ModuleType) -> Callable[[], None]:
        def summed(cfg, model, inputs, targets):
            tokens, low = (targets != module.IGNORE).sum(), model
            if low_weights:
                low = copy.deepcopy(model).to(torch.bfloat16)
            totals, sums = ([torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()] for _ in range(2))
            loss = 0.0
            for i, (x, y) in enumerate(zip(inputs.chunk(parts), targets.chunk(parts)), 1):
                part = module.forward(cfg, low, x, y) / tokens
                part.backward()
                loss += part.detach()
                for p, total, gradient in zip(low.parameters(), totals, sums):
                    gradient += 0 if p.grad is None else p.grad  # it is frozen
                    p.grad = None
                    if not rounded or i % rounded == 0:
                        total += gradient.bfloat16() if rounded else gradient
                        gradient.zero_()
            for p, total in zip(model.parameters(), totals):
                p.grad = total.to(p.dtype) if p.requires_grad else None
            return loss

        module.forward_backward = summed
        return lambda: None

    return probe


@once
def low_reference(root: str, flags: str, low_weights: bool) -> Run:
    """The root's run in bfloat16, under autocast or with bfloat16 weights."""
    return launch(root, 1, f"{flags} --dtype bfloat16", probe=bfloat16_weights if low_weights else None)


def unfused_attention(module: ModuleType) -> Callable[[], None]:
    """A probe: no fused CPU attention. torch 2.11 cannot compile its backward in float64 (pytorch/pytorch#185539)."""
    torch.backends.cuda.enable_flash_sdp(False)  # despite its name, on CPUs too
    return lambda: None


def without_kernels(module: ModuleType) -> Callable[[], None]:
    """A probe: the compiler traces, differentiates and partitions, but generates no kernels, which takes longest."""
    unfused_attention(module)
    compile_ = torch.compile  # which modules call, too
    torch.compile = lambda function, **options: compile_(function, backend="aot_eager_decomp_partition", **options)
    return lambda: None


def check_quickly(recipe: str, world: int, flags: str) -> dict[str, float]:
    """As check, but the compiler generates kernels for the roots alone."""
    quick = "--compile" in flags and recipe not in (ROOT_RECIPE, MOE)
    return check(recipe, world, flags, probe=without_kernels if quick else None)


def check(
    recipe: Path | str,
    world: int,
    flags: str,
    root: str | None = None,
    probe: Callable[[ModuleType], Callable[[], object]] | None = None,
    modes: tuple[str, ...] = ("gradient", "training"),
) -> dict[str, float]:
    """Assert that a recipe trains as its root does, on the CPU in float64. Returns the worst errors."""
    probe = probe or (unfused_attention if "--compile" in flags else None)
    root = root or root_of(str(recipe))
    init = start(root, f"{SHAPE} {shared(flags)}")
    common = f"{SHAPE} --device cpu --dtype float64 --data {documents()} --init {init}"
    worst = {}
    alone = Path(recipe).name == "diloco.py" and world > 1  # workers log and clip their own; simulation.py has the rest
    for name in ["gradient"] if "--compile" in flags or alone else modes:
        mode = {"gradient": GRADIENT, "training": TRAINING}[name]
        ours = launch(recipe, world, f"{common} {flags} {mode}", probe)
        theirs = reference(root, f"{common} {shared(flags)} {mode}")
        before = compare.read(init)[0] if name == "gradient" else None
        errors = compare.relative_errors(ours.weights, theirs.weights, before)
        what = f"{recipe} on {world} ranks, {name}"
        worst[name] = compare.assert_close(errors, TOLERANCE["float64"], what)
        if not alone:
            history = compare.history_errors(ours.history, theirs.history)
            worst[f"{name} history"] = compare.assert_close(history, TOLERANCE["float64"], what)
    return worst


def to_all_experts(root: str, flags: str) -> str:
    """Flags with which every token goes to all experts: there is nothing that rounding could choose otherwise."""
    if root == NODES:
        return f"{flags} --top_k 16 --groups 4 --top_groups 4"
    _, _, count = f" --experts 8 {flags}".rpartition(" --experts ")
    return f"{flags} --top_k {count.split()[0]}" if root == MOE else flags


def check_low_precision(recipe: str, world: int, flags: str) -> dict[str, float]:
    """Assert that a recipe's gradient is its root's on GPUs. Returns the worst errors, as TOLERANCE has them.

    In bfloat16, tokens go to all experts: where two scores are close it would choose others than float32, and then both
    gradients are right, of different functions.
    """
    root = root_of(recipe)
    alone = Path(recipe).name == "diloco.py" and world > 1  # its log is that of one worker
    worst = {}
    # Newton-Schulz enlarges small singular values, and what float32 rounded in them, up to 480 times
    wide = "float64" if root == MUON else "float32"
    for dtype in [wide] * (recipe != CONTEXT_TWIN) + ["bfloat16"] * (recipe not in SHORTER):
        flags = to_all_experts(root, flags) if dtype == "bfloat16" else flags
        init = start(root, f"{GPU_SHAPE} {shared(flags)}")
        before = compare.read(init)[0]
        common = f"{GPU_SHAPE} --device cuda --data {documents()} --init {init}"
        exact = reference(root, f"{common} --dtype {wide} {shared(flags)} {LOW_GRADIENT}")
        ours = launch(recipe, world, f"{common} --dtype {dtype} {flags} {LOW_GRADIENT}")
        errors = compare.relative_errors(ours.weights, exact.weights, before)
        errors |= compare.history_errors(ours.history, exact.history) if dtype == wide and not alone else {}
        if dtype == "bfloat16":
            theirs = low_reference(root, f"{common} {shared(flags)} {LOW_GRADIENT}", recipe in LOW_WEIGHTS)
            roots = compare.relative_errors(theirs.weights, exact.weights, before)
            errors = {name: error and error / roots[name] for name, error in errors.items()}  # 0 of biases that count
        worst[dtype] = compare.assert_close(errors, TOLERANCE[dtype], f"{recipe} on {world} ranks in {dtype}")
    return worst


def measured(case: tuple[str, int, str], device: str) -> dict[str, object]:
    """Run the check of a case, and return what is stored of it."""
    recipe, world, flags = case
    errors = check(*case) if device == "cpu" else check_low_precision(*case)
    print(f"{recipe:45} {world} ranks {flags:30}", *(f"{key} {error:.1e}" for key, error in errors.items()), flush=True)
    return {"recipe": recipe, "device": device, "ranks": world, "flags": flags, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="all if none is given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="*", help="cases of so many ranks; all if none is given")
    parser.add_argument("--jobs", type=int, default=1, help="cases that are checked at the same time")
    args = parser.parse_args()
    if args.jobs < 1:
        raise SystemExit(f"--jobs {args.jobs}: must be at least 1")
    if unknown := {*args.recipes} - {recipe for recipe, *_ in CASES}:
        raise SystemExit(f"{' '.join(sorted(unknown))}: must be recipes that are compared with their root")
    most = torch.cuda.device_count() if args.device == "cuda" else math.inf
    cases = [case for case in CASES if case[0] in (args.recipes or [case[0]])]
    cases = [case for case in cases if case[1] in (args.ranks or [case[1]]) and case[1] <= most]
    if not cases:
        raise SystemExit("no case has these recipes and ranks, and fits the GPUs at hand")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    run_folder()  # of this process, for those of the pool
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as jobs:
        futures = {jobs.submit(measured, case, args.device): case for case in cases}
        for future in as_completed(futures):
            if problem := future.exception():
                print(*futures[future], problem, flush=True)
                continue
            entries = {tuple(entry[key] for key in KEYS): entry for entry in [*kept, future.result()]}
            kept = [entry for (*case, _), entry in entries.items() if tuple(case) in CASES]  # some are of older cases
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text("[\n" + ",\n".join(sorted(json.dumps(entry) for entry in kept)) + "\n]\n")
    if any(future.exception() for future in futures):
        raise SystemExit("not all cases are equal to their root")


if __name__ == "__main__":
    main()
