"""Data about recipes: the sizes at which each is compared with its root, and the promises that it does not keep.

A new recipe adds a line to SIZES, rows to REFUSED for sizes that it refuses, and one to EXCEPTIONS for each promise of
contract.py that it does not keep.
"""

import itertools
import math
import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from launch import ROOT


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
# which proves a recipe when there is time for one: shards with padding, shared heads. With a plus, one that may fail
# where the hardest does not; the thorough run has it.
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
03_zero/zero1_overlap.py: +2 --microbatches 1 | 2 --microbatches 3 | 3 --microbatches 2 | *4 --microbatches 3
03_zero/zero1_overlap.py: 5 --batch 10 | 8 --batch 16
03_zero/zero2.py: 2 --microbatches 1 | 3 --microbatches 2 | *4 --microbatches 3 | 5 --batch 10 | 8 --batch 16
03_zero/zero3.py: 2 | +2 --compile | 3 | *4 --microbatches 3 | 5 --batch 10 | 8 --batch 16
03_zero/zero3_copy_engines.py: 2 --microbatches 1 | 3 | *4 --microbatches 3 | +5 --batch 10 | 8 --batch 16
03_zero/hsdp.py: 2 --shard 2 | 4 --shard 2 --microbatches 1 | +3 --shard 1 --microbatches 4 | +5 --shard 5 --batch 10
03_zero/hsdp.py: *6 --shard 3 --microbatches 2 | 8 --shard 4 --batch 16
03_zero/offload.py: 2 | 3 | *4 --microbatches 3 | +5 --batch 10
03_zero/lora.py: 2 | *3 --lora_rank 12 | 4 --batch 16 | 8 --batch 16 | 2 --compile
# the last of 5 ranks has none of 16 rows
03_zero/torch_fsdp.py: 2 | 3 | 4 | *5 --batch 10 | 8 --batch 16
03_zero/accelerate_fsdp.py: 2 | *4
04_tensor_sequence/tensor_parallel.py: 2 | 3 --kv_heads 3 --ffn 96 | +3 --kv_heads 1 --ffn 96
04_tensor_sequence/tensor_parallel.py: *4 --heads 4 --kv_heads 2 | 8 --heads 8 --kv_heads 2
04_tensor_sequence/vocab_parallel.py: 2 | 2 --compile | 3 --kv_heads 3 --ffn 96 --vocab 259
04_tensor_sequence/vocab_parallel.py: *4 --heads 4 --kv_heads 2 --vocab 257 | 8 --heads 8 --kv_heads 2 --vocab 257
04_tensor_sequence/sequence_parallel.py: 2 | 2 --compile | +3 --kv_heads 1 --ffn 96 --vocab 259
04_tensor_sequence/sequence_parallel.py: *4 --heads 4 --kv_heads 2 --batch 6 | 8 --heads 8 --kv_heads 2 --vocab 257
04_tensor_sequence/async_tensor_parallel.py: 2 | +2 --compile | +3 --kv_heads 3 --ffn 96 --vocab 259
04_tensor_sequence/async_tensor_parallel.py: *4 --heads 4 --kv_heads 2 --batch 6
04_tensor_sequence/async_tensor_parallel.py: 8 --heads 8 --kv_heads 2 --vocab 257
04_tensor_sequence/lora.py: 2 | 3 --kv_heads 3 --ffn 96 | *4 --heads 4 --kv_heads 2 | 8 --heads 8 --kv_heads 2
# vocabulary 261 is cut into 66, 66, 66 and 63
04_tensor_sequence/torch_dtensor.py: 2 | +2 --compile | 3 --kv_heads 3 --ffn 96
04_tensor_sequence/torch_dtensor.py: *4 --heads 4 --kv_heads 4 --vocab 261 | 8 --heads 8 --kv_heads 8 --dim 64
05_context_ring/blockwise.py: 1 --blocks 4 | *1 --blocks 3 | 1 --blocks 1 | 1 --blocks 4 --compile
05_context_ring/all_gather_kv.py: 2 | 2 --compile | *3 | 4 --kv_heads 3 | 8
05_context_ring/ring.py: 2 | 3 --kv_heads 6 | *4 | +8
05_context_ring/striped.py: 2 | *3 --kv_heads 1 | 4 | 8
05_context_ring/zigzag.py: 2 | +2 --compile | 3 --kv_heads 1 | *4 | +8 --seq 48
05_context_ring/documents.py: 2 | 2 --compile | 3 | *4 | 8 --seq 48
05_context_ring/ulysses.py: 2 | +3 --kv_heads 3 | *4 --heads 8 --kv_heads 2 | 8 --heads 8 --kv_heads 2
05_context_ring/usp.py: 4 --ulysses 2 | +2 --ulysses 2 | 3 --ulysses 1 | 8 --ulysses 2
05_context_ring/usp.py: *8 --ulysses 4 --heads 8 --kv_heads 2
05_context_ring/torch_context_parallel.py: 2 | 2 --rotate alltoall | *3 --rotate alltoall | +4 | 8 --seq 48
06_pipeline/naive.py: 2 | 3 | *4 | 8 --layers 11
06_pipeline/afab.py: 2 --microbatches 4 | 3 --microbatches 2 | *4 --microbatches 6 | 8 --microbatches 12 --layers 11
06_pipeline/1f1b.py: 2 --microbatches 4 | +2 --microbatches 4 --compile | 3 --microbatches 2 | *4 --microbatches 6
06_pipeline/1f1b.py: 8 --microbatches 12 --layers 11
06_pipeline/tied_embeddings.py: 1 --microbatches 2 | 2 --microbatches 4 | 3 --microbatches 2 | *4 --microbatches 6
06_pipeline/tied_embeddings.py: 8 --microbatches 12 --layers 11
06_pipeline/split_backward.py: 2 --microbatches 4 | +2 --microbatches 4 --compile | 3 --microbatches 2
06_pipeline/split_backward.py: *4 --microbatches 6 | 8 --microbatches 12 --layers 11
06_pipeline/zero_bubble.py: 2 --microbatches 4 | 3 --microbatches 2 | *4 --microbatches 6
06_pipeline/zero_bubble.py: 8 --microbatches 12 --layers 11
# 2 ranks: wraps around to the rank before
06_pipeline/interleaved.py: 2 --microbatches 4 | 2 --microbatches 4 --compile
06_pipeline/interleaved.py: +2 --microbatches 2 --chunks 3 --layers 7 | *3 --microbatches 6 --layers 7
06_pipeline/interleaved.py: 4 --microbatches 12 --layers 11 | 8 --microbatches 8 --layers 17 --batch 16
06_pipeline/zbv.py: 2 --microbatches 4 | 2 --microbatches 4 --compile | *3 --microbatches 6 --layers 7
06_pipeline/zbv.py: 4 --microbatches 12 --layers 11 | 8 --microbatches 16 --layers 17 --batch 16
# 3 micro-batches: fewer than the order needs, and an odd number
06_pipeline/dualpipe.py: 2 --microbatches 4 | +4 --microbatches 3 | *4 --microbatches 12 --layers 7
06_pipeline/dualpipe.py: 8 --microbatches 16 --layers 11 --batch 16
06_pipeline/torch_pipelining.py: 2 --microbatches 4 | +2 --microbatches 4 --compile | 3 --microbatches 3
06_pipeline/torch_pipelining.py: 4 --microbatches 6 --schedule GPipe
06_pipeline/torch_pipelining.py: 4 --microbatches 6 --schedule Interleaved1F1B --layers 11
06_pipeline/torch_pipelining.py: 4 --microbatches 6 --schedule LoopedBFS --layers 11
06_pipeline/torch_pipelining.py: *4 --microbatches 6 --schedule InterleavedZeroBubble --layers 11
06_pipeline/torch_pipelining.py: +4 --microbatches 6 --schedule ZBVZeroBubble --layers 11
06_pipeline/torch_pipelining.py: 2 --microbatches 6 --schedule DualPipeV | 8 --microbatches 12 --layers 11
07_expert/moe.py: +1 --compile
# 8 experts: one per rank; 56: more than tokens of a rank
07_expert/expert_parallel.py: 2 | 2 --compile | 2 --top_k 1 | 3 --experts 9 --top_k 4 | *4 --edp 2 --top_k 4
07_expert/expert_parallel.py: 8 --batch 16 --top_k 1 | +8 --experts 56 --top_k 4 --batch 16 | +6 --edp 2 --experts 6
# test_balance.py has others
07_expert/auxiliary_loss.py: 2 --balance 0 --z 0 | *4 --edp 2 --balance 0 --z 0
07_expert/bias_balancing.py: 2 --bias_rate 0 --microbatches 1 | *4 --bias_rate 0 --microbatches 3 --edp 2
07_expert/node_limited.py: 1 --compile | 2 --nodes 2 | 2 --nodes 2 --compile | +2 --nodes 2 --shared 0
07_expert/node_limited.py: *4 --nodes 2 --microbatches 3 --layers 1 | 4 --nodes 4 --microbatches 1 --top_groups 3
07_expert/node_limited.py: 4 --nodes 2 --edp 2 --batch 16 --top_k 1 | 8 --batch 16 | 8 --nodes 2 --batch 16
07_expert/node_limited.py: 8 --nodes 4 --batch 16 --groups 8 --top_groups 4 | 8 --nodes 2 --edp 2 --batch 16
# experts / top_k or more: nothing is dropped
07_expert/capacity.py: 2 --capacity 4 | +2 --capacity 4 --compile | +3 --experts 9 --top_k 4 --capacity 2.25
07_expert/capacity.py: *4 --edp 2 --top_k 4 --capacity 2 | 6 --edp 2 --experts 6 --capacity 3
07_expert/capacity.py: 8 --batch 16 --top_k 1 --capacity 8
07_expert/overlap.py: 2 | +2 --compile | 3 --experts 9 --top_k 4 | *4 --edp 2 | 8 --batch 16 --top_k 1
# too few slots at first: steps are repeated
07_expert/slots.py: 2 | 2 --slots 1 | 2 --compile | +3 --experts 9 --top_k 4 | *4 --edp 2
07_expert/symmetric_memory.py: 2 | 2 --slots 1 | 2 --compile | 3 --experts 9 --top_k 4 | *4 --edp 2
07_expert/symmetric_memory.py: +8 --batch 16 --top_k 1 --slots 8
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
# Like those with a plus, but not on the pages: one stage, one micro-batch, one sequence per rank.
RARE = """
06_pipeline/1f1b.py: 1 --microbatches 4
06_pipeline/split_backward.py: 3 --microbatches 1 --layers 6
06_pipeline/interleaved.py: 3 --microbatches 4 --chunks 1
06_pipeline/zbv.py: 1 --microbatches 4 | 3 --microbatches 1 --layers 6
06_pipeline/dualpipe.py: 2 --microbatches 1
07_expert/overlap.py: 2 --batch 2
"""
# The edge of what is possible, which `check` must accept, in the format of SIZES; flags that a recipe has not are left
# out. With a star: the smallest case, for promises that hold at any size; elsewhere it is the first of SIZES.
EDGES = """
01_single_gpu/gradient_accumulation.py: 1 --microbatches 16
02_* 03_* 10_mixed_precision/fp8_zero3.py: 8 --batch 8 --microbatches 1 | 1 --batch 1 --microbatches 1 --shard 1
02_* 03_* 10_mixed_precision/fp8_zero3.py: 2 --batch 8 --microbatches 4 | 2 --bucket_mb 0 --batch 8 --microbatches 1
02_data_parallel/diloco.py: 2 --inner_steps 100 --steps 5 --outer_momentum 0 --outer_lr 0
03_zero/hsdp.py: 8 --shard 8 --batch 8 --microbatches 1 | 8 --shard 1 --batch 8 --microbatches 1
04_*: 8 --heads 8 --kv_heads 8 --seq 8 --batch 1 | 1 | 2 --ffn 2
04_*parallel.py 04_*lora.py: 8 --heads 8 --kv_heads 4 | 8 --heads 8 --kv_heads 1
04_*/[vs]*.py: 4 --vocab 257 | 4 --vocab 259
05_*/blockwise.py: 1 --seq 9 --blocks 9
05_*/[ru]*.py: 8 --seq 8 --kv_heads 1 --ulysses 4 | 8 --seq 8 --kv_heads 2 --ulysses 8
05_*/zigzag.py: 8 --seq 16
06_*/[!iz]*.py 06_*/zero_bubble.py: 8 --layers 8 | 2 --layers 2
06_*/interleaved.py 06_*/zbv.py: 8 --layers 16 | 2 --layers 4
06_*/[!d]*.py: 1 --layers 2 | 3 --layers 8 --batch 12 --microbatches 12
06_*: 2 --batch 16 --microbatches 16 | 8 --batch 8 --microbatches 8 --layers 16
06_*/[!i]*.py: 8 --microbatches 1 --layers 16 --schedule GPipe | 2 --microbatches 1 --schedule GPipe
07_*: 1 --experts 1 --top_k 1 --microbatches 1 --groups 1 --top_groups 1
07_*: 1 --experts 8 --top_k 8 --microbatches 1 --groups 1 --top_groups 1
07_*: 1 --batch 1 --microbatches 1 --groups 1 --top_groups 1
07_*/[!m]*.py: 8 --experts 8 --batch 8 --microbatches 1 --groups 1 --top_groups 1
07_*/[!m]*.py: 3 --experts 9 --batch 3 --microbatches 1 --groups 1 --top_groups 1
07_*/[!m]*.py: 8 --experts 2 --top_k 2 --edp 4 --microbatches 1 --groups 1 --top_groups 1
08_4d/2d.py: *4 --dp 2 --tp 2 | 8 --dp 1 --tp 8 | 8 --dp 8 --tp 1 --batch 8 --microbatches 1 | 8 | 1 --dp 1 --tp 1
08_4d/3d.py: *4 --dp 1 --tp 2 --pp 2 | 8 --dp 1 --tp 1 --pp 8 --chunks 1 --microbatches 1 | 8 --dp 1 --tp 8 --pp 1
08_4d/3d.py: 8 | 8 --dp 8 --tp 1 --pp 1 --batch 8 --microbatches 1 | 1 --dp 1 --tp 1 --pp 1
08_4d/3d.py: 3 --dp 1 --tp 1 --pp 3 --batch 6 --microbatches 6
08_4d/train.py 08_4d/checkpoint.py: *4 --dp 1 --cp 1 --tp 2 --pp 2
08_4d/moe.py: *4 --dp 2 --cp 1 --tp 2 --pp 1 --ep 2 --microbatches 2
08_4d/[!23]*.py: 8 --dp 1 --cp 1 --tp 8 --pp 1 --ep 1 | 8 --dp 1 --cp 1 --tp 1 --pp 8 --microbatches 1 --ep 1 | 8
08_4d/[!23]*.py: 8 --dp 8 --cp 1 --tp 1 --pp 1 --batch 8 --microbatches 1 | 8 --dp 1 --cp 8 --tp 1 --pp 1 --seq 16
08_4d/[!23]*.py: 3 --dp 1 --cp 1 --tp 1 --pp 3 --ep 1 | 1 --dp 1 --cp 1 --tp 1 --pp 1 --ep 1
"""
# recipe | ranks | flags that cannot be shared out among them | how the line about them begins
REFUSED = """
01_single_gpu/gradient_accumulation.py | 1 | --microbatches 5 | --microbatches 5: must divide --batch 16
01_single_gpu/muon.py | 1 | --lr 1e39 | --lr 1e+39: must be at most 1e30
01_single_gpu/lora.py | 1 | --adapters no/new | --adapters no/new: no folder for it
01_single_gpu/lora.py | 1 | --adapters /dev/null | --adapters /dev/null: is no folder
02_data_parallel/naive.py | 3 | --batch 16 | --batch 16: must be divisible by the number of processes, 3
02_data_parallel/no_sync.py | 3 | --batch 16 | --batch 16: must be divisible by the number of processes, 3
02_data_parallel/copy_engines.py | 3 | --batch 16 | --batch 16: must be divisible by the number of processes, 3
02_data_parallel/diloco.py | 3 | --batch 16 | --batch 16: must be divisible by the number of processes, 3
02_data_parallel/no_sync.py | 4 | --batch 12 --microbatches 4 | --microbatches 4: must divide the 3 sequences
02_data_parallel/bucketed.py | 2 | --bucket_mb -1 | --bucket_mb -1.0: must be at least 0
02_data_parallel/diloco.py | 2 | --inner_steps 4 --validate 6 | --validate 6: must be a multiple of --inner_steps 4
02_data_parallel/diloco.py | 2 | --outer_momentum 1 | --outer_momentum 1.0: must be below 1
02_data_parallel/hang.py | 1 | --hang skip | --hang skip: needs --nproc_per_node 2 or more
03_zero/hsdp.py | 4 | --shard 3 | --shard 3: must divide the number of processes, 4
04_tensor_sequence/tensor_parallel.py | 3 | --heads 8 --dim 96 --kv_heads 1 --ffn 96 | --heads 8: must be divisible by
04_tensor_sequence/tensor_parallel.py | 3 | --heads 6 --dim 96 --kv_heads 2 --ffn 96 | --kv_heads 2: must divide, or be
04_tensor_sequence/tensor_parallel.py | 4 | --ffn 386 | --ffn 386: must be divisible by the number of processes, 4
04_tensor_sequence/sequence_parallel.py | 4 | --seq 127 --batch 1 | --seq 127: times --batch 1, must be divisible by 4
04_tensor_sequence/torch_dtensor.py | 8 | --kv_heads 4 | --kv_heads 4: must be divisible by the number of processes, 8
05_context_ring/blockwise.py | 1 | --seq 126 --blocks 4 | --seq 126: must be divisible by --blocks 4
05_context_ring/ring.py | 4 | --seq 127 | --seq 127: must be divisible by the number of processes, 4
05_context_ring/striped.py | 8 | --seq 8 | --seq 8: must be at least 16
05_context_ring/zigzag.py | 4 | --seq 12 | --seq 12: must be divisible by 8
05_context_ring/ulysses.py | 8 | --dim 96 --heads 12 --kv_heads 4 | --heads 12: must be divisible by the number of
05_context_ring/usp.py | 4 | --dim 96 --heads 12 --kv_heads 6 --ulysses 4 | --kv_heads 6: must divide, or be divisible
05_context_ring/usp.py | 4 | --ulysses 3 | --ulysses 3: must divide the number of processes, 4
05_context_ring/torch_context_parallel.py | 4 | --seq 12 | --seq 12: must be divisible by 8
06_pipeline/1f1b.py | 4 | --layers 3 | --layers 3: must be at least the number of processes, 4
06_pipeline/1f1b.py | 2 | --microbatches 6 | --microbatches 6: must divide --batch 16
06_pipeline/interleaved.py | 4 | --microbatches 2 | --microbatches 2: must be a multiple of the number of processes, 4
06_pipeline/interleaved.py | 2 | --layers 5 --chunks 3 | --layers 5: must be at least --chunks times the processes, 6
06_pipeline/zbv.py | 4 | --layers 7 | --layers 7: must be at least twice the number of processes, 8
06_pipeline/dualpipe.py | 3 | --seed 0 | --nproc_per_node 3: must be an even number of processes in all
06_pipeline/torch_pipelining.py | 1 | --schedule LoopedBFS --validate 1 | --validate 1: must be 0, or --schedule 1F1B
07_expert/moe.py | 1 | --top_k 9 | --top_k 9: must be at most --experts 8
07_expert/moe.py | 1 | --device cuda --dtype bfloat16 --ffn 100 | --ffn 100: it and --dim 128 must be multiples of 8
07_expert/expert_parallel.py | 4 | --edp 3 | --edp 3: must divide the number of processes, 4
07_expert/expert_parallel.py | 8 | --experts 6 --edp 2 | --experts 6: must be divisible by the ranks that share them, 4
07_expert/bias_balancing.py | 1 | --bias_rate 1e300 | --bias_rate 1e+300: must be at most 1
07_expert/node_limited.py | 8 | --nodes 3 | --nodes 3: must divide both the 8 ranks that share the experts and --groups
07_expert/node_limited.py | 8 | --groups 3 | --groups 3: must divide --experts 16
07_expert/node_limited.py | 8 | --top_groups 5 | --top_groups 5: must be at most --groups 4
07_expert/node_limited.py | 8 | --top_k 9 | --top_k 9: --top_groups 2 have 8 experts
10_mixed_precision/fp8_tensorwise.py | 1 | --device cuda --dtype bfloat16 --ffn 136 | --ffn 136: fp8 matmuls take
10_mixed_precision/fp8_tensorwise.py | 1 | --device cuda --dtype bfloat16 --seq 5 | --seq 5: fp8 matmuls take
10_mixed_precision/fp8_blockwise.py | 1 | --device cuda --dtype bfloat16 | --dim 128: blocks need multiples of 512
"""
# recipes | promise of contract.py, or a part of one | why they do not keep it
EXCEPTIONS = """
*/diloco.py | one log | each worker logs and clips its own
*/diloco.py | one model | workers have weights of their own until they meet
*/diloco.py | frozen | it is another training
04_*/lora.py | frozen | all but adapters is frozen
*/lora.py | saved as trained | adapters are saved merged
*/lora.py */muon.py */diloco.py | norm of the change | their steps are no plain gradient descent
04_*/async_tensor_parallel.py | other batches | its shared memory is as large as the batch of a step
07_*/capacity.py 07_*/slots.py 07_*/symmetric_memory.py | uneven batches | all ranks have as many slots
06_*/torch_pipelining.py | uneven batches | the library takes equal micro-batches
04_*/torch_dtensor.py | inference mode | its loss_parallel does not work there
*/torch_fsdp.py */accelerate_fsdp.py */torch_dtensor.py */torch_context_parallel.py | group is gone | DTensor caches it
03_*/zero1.py 03_*/muon.py 03_*/offload.py | no gradients between steps | one fp32 buffer: the header's formulas have it
05_*/torch_context_parallel.py | no objects left | the library keeps a wrapper per context
05_*/documents.py | no objects left | einops keeps up to 1,024 shapes
01_* 10_*/*low_memory.py | activations | checkpointing keeps its inputs itself, on purpose
06_*/torch_pipelining.py | activations | the library's stages call themselves
06_* 08_* | bytes of backward | a backward does not begin at the loss
10_*/fp8_zero3.py | bytes of backward | shards have other gradients
09_*/train.py | compile | no CPU can compile its kernels: they are interpreted
09_*/train.py | as large a batch | its kernels are interpreted
06_*/interleaved.py 06_*/zbv.py | as many layers | a rank has two stages
05_*/torch_context_parallel.py | float32 on GPUs | its library has no such attention there
03_*/zero1_overlap.py | exact sums | it sends the sum of its micro-batches in bf16: the header's formula
04_* 05_* 07_* 08_* 09_* 01_*/chunked_loss.py */diloco.py | cut batch | the model is cut, or the loss
03_*/zero1_*.py 03_*/zero[23]*.py 03_*/*fsdp.py 03_*/hsdp.py 03_*/offload.py | autocast | weights are bf16
08_* 09_*/train.py | autocast | weights are bf16
10_*/fp8_*.py 10_*/stochastic_rounding.py 10_*/low_memory.py | bfloat16 | fewer bits, of which their own tests say more
"""
# recipes | which launches | flags that they need there, or that keep them short. LoRA's: else gradients are too small
# for the clip; those of A, which begin at 0, are near eps, where AdamW enlarges rounding.
FLAGS = """
01_*/lora.py | root | --lora_alpha 300 --eps 1e-4
03_*/lora.py 04_*/lora.py | all | --lora_alpha 300 --eps 1e-4
08_* | hardest | --layers 3
09_* | hardest | --layers 2
05_* 09_* | run | --layers 1
08_*/[!3]*.py | run | --layers 2
09_* | divergence | --layers 1
09_* | activations | --steps 1
"""


@cache
def rows(table: str) -> list[list[str]]:
    return [re.split(r" \| ", line) for line in table.strip().splitlines()]


def matches(recipe: str, patterns: str) -> bool:
    return any(fnmatch(recipe, pattern) for pattern in patterns.split())


def keeps(recipe: str, promise: str) -> bool:
    """Whether a recipe keeps a promise, or a part of one."""
    return not any(promise == other and matches(recipe, patterns) for patterns, other, _ in rows(EXCEPTIONS))


def own_flags(recipe: str, launches: str) -> str:
    """The flags that a recipe needs in some launches."""
    return " ".join(flags for patterns, when, flags in rows(FLAGS) if when == launches and matches(recipe, patterns))


def cases_of(text: str, recipe: str) -> list[tuple[str, int, str]]:
    """The cases of a recipe in a text like SIZES: its star or plus, ranks, flags."""
    found = []
    for patterns, cases in (line.split(": ") for line in text.strip().splitlines() if line[0] != "#"):
        for ranks, _, flags in (case.partition(" ") for case in cases.split(" | ") if matches(recipe, patterns)):
            flags = f"{own_flags(recipe, 'all')} {flags}".strip()
            found.append((ranks.rstrip("0123456789"), int(ranks.strip("*+")), flags))
    return found


ROOT_RECIPE = "01_single_gpu/train.py"
MOE = "07_expert/moe.py"  # the root of a family of its own
NODES = "07_expert/node_limited.py"  # on one rank, where its tests compare it with transformers
TIED = "01_single_gpu/tied_embeddings.py"  # and of those that have its name, as below
MUON = "01_single_gpu/muon.py"
LORA = "01_single_gpu/lora.py"
DOCUMENTS = "01_single_gpu/document_mask.py"
FP8_ZERO3 = "10_mixed_precision/fp8_zero3.py"  # the only one of its folder on several ranks
KERNELS = "09_kernels/train.py"  # which no CPU can compile: there its kernels are interpreted
ROOTS = {recipe: (1, own_flags(recipe, "root")) for recipe in (ROOT_RECIPE, MOE, NODES, TIED, MUON, LORA, DOCUMENTS)}
CASES, HARDEST, OTHERS = [], dict(ROOTS), []
for recipe in dict.fromkeys(re.findall(r"^([^#:\s]+): ", SIZES, re.M)):
    for mark, world, flags in cases_of(SIZES, recipe):
        CASES.append((recipe, world, flags))
        if mark == "*":
            HARDEST[recipe] = world, flags
        if mark == "+":
            OTHERS.append((recipe, world, flags))
    OTHERS += [(recipe, world, flags) for _, world, flags in cases_of(RARE, recipe)]
CASES += [
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
OTHERS += [case for case in CASES if case[0][:2] == "08" and case[1] < 8]
OTHERS += [
    ("08_4d/train.py", 8, mesh(1, 2, 4, 1)),  # two ranks share a key head, four share norms
    ("08_4d/train.py", 6, f"{mesh(3, 1, 2, 1)} --batch 12 --microbatches 4"),  # padding of 3 shards, and of 6
    ("08_4d/moe.py", 8, f"{mesh(2, 2, 1, 2)} --ep 4"),
    ("08_4d/moe.py", 8, f"{mesh(2, 2, 2, 1)} --ep 2"),  # copies of experts
]
HARDEST["08_4d/2d.py"] = 8, "--dp 2 --tp 4 --heads 8 --kv_heads 2 --vocab 257"
HARDEST["08_4d/3d.py"] = 8, stages(2, 2, 2, 2)
HARDEST["08_4d/train.py"] = 8, mesh(2, 1, 2, 2)
HARDEST["08_4d/checkpoint.py"] = 4, mesh(2, 1, 2, 1)
HARDEST["08_4d/moe.py"] = 8, f"{mesh(2, 1, 2, 2)} --ep 2 --top_k 8"
SMALLEST = {recipe: (world, flags) for recipe, world, flags in reversed(CASES) if "--compile" not in flags} | ROOTS
for recipe in SMALLEST:
    SMALLEST[recipe] = next((case for star, *case in cases_of(EDGES, recipe) if star), SMALLEST[recipe])


def on_one_device(recipe: str) -> bool:
    """Whether a recipe trains in one process."""
    return "\nimport torch.distributed as dist\n" not in (ROOT / recipe).read_text()


def root_of(recipe: str) -> str:
    """The recipe that trains the same model on one device."""
    if same := [root for root in (TIED, MUON, LORA) if Path(root).name == Path(recipe).name]:
        return same[0]
    if recipe in (DOCUMENTS, "05_context_ring/documents.py"):
        return DOCUMENTS
    if recipe == NODES:
        return NODES
    return MOE if recipe.startswith("07") or recipe == "08_4d/moe.py" else ROOT_RECIPE
