"""Attention with warps that have different jobs: one loads, two or three compute, one adds up gradients in order.

Gluon, which comes with Triton, leaves the schedule of warps to you, on GPUs of compute capability 9.0 alone.
Forward: while one group of warps computes exponentials, another multiplies, and one warp loads blocks for both.
Backward: one kernel of five products, instead of two with seven. dq is added in order: two runs agree to the bit.

Parent:   09_kernels/flash_attention.py
Lesson:   SIDE, COPY_IN, COPY_OUT, add_in, ADD_IN, SYNC, make_barriers, wait_until_added, find_block, load_forward,
          halves, row_max, row_sum, attend_block, attend_rows, attend_kernel, spread, load_backward,
          differentiate_block, differentiate, add_queries, backward_kernel, prepare_kernel, finish_kernel, blocks_of,
          vectors_of, attend, attend_backward
Run:      python 09_kernels/flash_attention_gluon.py
Source:   Shah et al. 2024, FlashAttention-3, arXiv:2407.08608
"""

import argparse
import math
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# ------------------------------------------------------------------------------------------------------------ config
DTYPES = torch.bfloat16, torch.float16
PEAK = 989.5e12  # FLOP/s of an H100 or H200's tensor cores in bf16
BENCHES = {  # in bursts, and after 100 ms of the same: at its power limit a GPU lowers its clocks
    "": triton.testing.do_bench_cudagraph,
    ", sustained": partial(triton.testing.do_bench, warmup=100, rep=100),
}
LOG2_E = math.log2(math.e)
SIDE = 8  # heads of keys that are finished before others begin: what they read stays in the L2


# ----------------------------------------------------------------------------------------------------------- kernels
# names that differ between Triton 3.6 and later; 3.6 has none for an addition by TMA
COPY_IN = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
COPY_OUT = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
SYNC = getattr(gl, "barrier", None) or gl.thread_barrier  # of the warps that do the same


@gl._core.builtin
def add_in(desc, coordinates, source, _semantic=None):
    """Let the TMA add a block of shared memory to global memory, without waiting for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = triton._C.libtriton.ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coordinates, source.handle)


ADD_IN = getattr(tma, "async_atomic_add", None) or add_in
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Make mbarriers for NUMBER blocks: a phase of one ends when COUNT have arrived, and all its bytes."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], BARRIER)
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def wait_until_added():
    """Wait until all can read what this warp's TMA has stored or added; tma.store_wait waits until it has been sent."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, lanes)
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def find_block(number, heads, blocks, SIDE: gl.constexpr):
    """Return the head and the block of a program. SIDE heads come before all others: the L2 holds what they read."""
    first = number // (SIDE * blocks) * SIDE
    side = gl.minimum(heads - first, SIDE)  # the last ones may be fewer
    within = number % (SIDE * blocks)
    return first + within % side, within // side


# Forward: one warp asks the Tensor Memory Accelerator (TMA) for blocks of keys and values. Two groups of four warps
# (three where heads are 64 wide) have 64 queries each. An mbarrier per stage says that it is full; another one says
# that all have read it and it may be loaded again. A group multiplies its queries by the keys of a block, and its
# probabilities of the block before by their values. The groups take turns at the tensor cores.


@gluon.jit
def load_forward(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, full, empty, batch, row, q_column, column, blocks,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Load the queries of each group, then keys and values, from the diagonal to the left, as soon as there is room.

    A stage has the keys of a block and the values of the block before, which are multiplied at the same time.
    """
    BYTES: gl.constexpr = k_desc.block_type.nbytes
    Q_BYTES: gl.constexpr = GROUPS * q_desc.block_type.nbytes
    mbarrier.expect(q_full, Q_BYTES)
    for group in gl.static_range(GROUPS):
        COPY_IN(q_desc, [batch, row + 64 * group, q_column], q_full, q_smem.index(group))
    mbarrier.expect(full.index(0), BYTES)
    COPY_IN(k_desc, [batch, (blocks - 1) * BLOCK, column], full.index(0), k_smem.index(0))
    for i in range(1, blocks):
        stage, key = i % STAGES, (blocks - 1 - i) * BLOCK
        mbarrier.wait(empty.index(stage), (i // STAGES) & 1 ^ 1)
        mbarrier.expect(full.index(stage), 2 * BYTES)
        COPY_IN(k_desc, [batch, key, column], full.index(stage), k_smem.index(stage))
        COPY_IN(v_desc, [batch, key + BLOCK, column], full.index(stage), v_smem.index(stage))
    last = blocks % STAGES
    mbarrier.wait(empty.index(last), (blocks // STAGES) & 1 ^ 1)
    mbarrier.expect(full.index(last), BYTES)
    COPY_IN(v_desc, [batch, 0, column], full.index(last), v_smem.index(last))


@gluon.jit
def halves(x):
    """Return the left half and the right half of a tile."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def row_max(x, LAYOUT: gl.constexpr):
    """Return the maximum of each row. First of four columns each: one after the other would wait for each other."""
    left, right = halves(x)
    left, right = halves(gl.maximum(left, right))
    return gl.convert_layout(gl.max(gl.maximum(left, right), 1), LAYOUT)


@gluon.jit
def row_sum(x, LAYOUT: gl.constexpr):
    """Return the sum of each row, likewise."""
    left, right = halves(x)
    left, right = halves(left + right)
    return gl.convert_layout(gl.sum(left + right, 1), LAYOUT)


@gluon.jit
def attend_block(
    i, p, o, top, total, q, k_smem, v_smem, full, empty, turn, i_row, i_key, blocks, SCALE: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    MASK: gl.constexpr, S: gl.constexpr, OUT: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Multiply the queries by the keys of this block, and the probabilities of the block before by its values.

    Then compute the probabilities of this block, while other groups multiply: they take turns.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    stage = i % STAGES
    k, v = k_smem.index(stage).reshape([BLOCK, D]), v_smem.index(stage).reshape([BLOCK, D])
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    mbarrier.wait(turn.index(GROUP), (i & 1) ^ (GROUP > 0))  # group 0 begins
    x = gl.zeros([64, BLOCK], gl.float32, S)
    x = warpgroup_mma(q, k.permute((1, 0)), x, use_acc=False, is_async=True)
    o = warpgroup_mma(p, v, o, is_async=True)
    mbarrier.arrive(turn.index((GROUP + 1) % GROUPS), count=1)
    x, o, p = warpgroup_mma_wait(0, deps=[x, o, p])  # p is an operand in registers: it must stay until then
    mbarrier.arrive(empty.index(stage), count=1)
    if MASK:
        x = gl.where(i_row[:, None] >= ((blocks - 1 - i) * BLOCK + i_key)[None, :], x, float("-inf"))
    higher = gl.maximum(top, row_max(x, ROWS) * SCALE)
    alpha = gl.exp2(top - higher)
    y = gl.exp2(x * SCALE - higher[:, None])
    total = total * alpha + row_sum(y, ROWS)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    return gl.convert_layout(y.to(k_smem.dtype), P), o, higher, total


@gluon.jit
def attend_rows(
    q_smem, k_smem, v_smem, q_full, full, empty, turn, o_desc, lse_ptr, batch, row, q_column, blocks, s,
    SCALE: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of the output, and their log-sum-exp: the work of one group of four warps."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])  # which thread has which score
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)  # the same threads: nothing moves between S and P
    q = q_smem.index(GROUP).reshape([64, D])
    first = row + 64 * GROUP
    i_row = first + gl.arange(0, 64, gl.SliceLayout(1, S))
    i_key = gl.arange(0, BLOCK, gl.SliceLayout(0, S))
    mbarrier.wait(q_full, 0)
    mbarrier.wait(full.index(0), 0)
    x = gl.zeros([64, BLOCK], gl.float32, S)
    x = warpgroup_mma(q, k_smem.index(0).reshape([BLOCK, D]).permute((1, 0)), x, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    mbarrier.arrive(empty.index(0), count=1)
    key = (blocks - 1) * BLOCK + i_key[None, :]
    x = gl.where((i_row[:, None] >= key) & (key < s) if CAUSAL else key < s, x, float("-inf"))
    top = gl.maximum(gl.max(x, 1) * SCALE, -1e30)  # finite: a row may see nothing of its first block
    p = gl.exp2(x * SCALE - top[:, None])
    total = gl.sum(p, 1)
    p = gl.convert_layout(p.to(k_smem.dtype), P)
    o = gl.zeros([64, D], gl.float32, OUT)
    masked = 1
    if CAUSAL:
        masked = gl.maximum(blocks - (first + 1) // BLOCK, 1)  # blocks with keys that are later than the first row
        for i in range(1, masked):
            p, o, top, total = attend_block(
                i, p, o, top, total, q, k_smem, v_smem, full, empty, turn, i_row, i_key, blocks, SCALE, GROUP, GROUPS,
                D, BLOCK, STAGES, True, S, OUT, P,
            )  # fmt: skip
    for i in range(masked, blocks):
        p, o, top, total = attend_block(
            i, p, o, top, total, q, k_smem, v_smem, full, empty, turn, i_row, i_key, blocks, SCALE, GROUP, GROUPS,
            D, BLOCK, STAGES, False, S, OUT, P,
        )  # fmt: skip
    last = blocks % STAGES
    mbarrier.wait(full.index(last), (blocks // STAGES) & 1)
    o = warpgroup_mma(p, v_smem.index(last).reshape([BLOCK, D]), o, is_async=True)
    gl.store(lse_ptr + i_row, (top + gl.log2(total)) * 0.6931471805599453, i_row < s)  # ln 2
    inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, OUT))
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    q.store((o * inverse[:, None]).to(k_smem.dtype))  # nobody reads the queries any more
    fence_async_shared()  # or the TMA would read what was there before
    SYNC()
    COPY_OUT(o_desc, [batch, first, q_column], q_smem.index(GROUP))  # leaves out rows beyond the end
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["s", "b"])  # not compiled anew for other lengths
def attend_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, s, b, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, SCALE: gl.constexpr,
    D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Compute 64·GROUPS rows of one head. Long rows start first; heads that share keys run side by side."""
    SHARE: gl.constexpr = HEADS // KV_HEADS
    rows = gl.cdiv(s, 64 * GROUPS)
    number, later = find_block(gl.program_id(0), HEADS * b, rows, SIDE * SHARE)
    head, batch, row = number % HEADS, number // HEADS, (rows - 1 - later) * (64 * GROUPS)
    blocks = gl.cdiv(s, BLOCK)
    if CAUSAL:
        blocks = gl.minimum(blocks, gl.cdiv(row + 64 * GROUPS, BLOCK))
    q_column, column = head * D, head // SHARE * D
    lse_ptr += number.to(gl.int64) * s
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_full = make_barriers(1, 1).index(0)
    full, empty, turn = make_barriers(STAGES, 1), make_barriers(STAGES, GROUPS), make_barriers(GROUPS, 1)
    # a loading warp needs few registers; a group of four warps takes what it leaves
    if GROUPS == 2:
        gl.warp_specialize([
            (attend_rows, (
                q_smem, k_smem, v_smem, q_full, full, empty, turn, o_desc, lse_ptr, batch, row, q_column, blocks, s,
                SCALE, 0, GROUPS, D, BLOCK, STAGES, CAUSAL,
            )),
            (attend_rows, (
                q_smem, k_smem, v_smem, q_full, full, empty, turn, o_desc, lse_ptr, batch, row, q_column, blocks, s,
                SCALE, 1, GROUPS, D, BLOCK, STAGES, CAUSAL,
            )),
            (load_forward, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, full, empty, batch, row, q_column, column,
                blocks, BLOCK, STAGES, GROUPS,
            )),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (attend_rows, (
                q_smem, k_smem, v_smem, q_full, full, empty, turn, o_desc, lse_ptr, batch, row, q_column, blocks, s,
                SCALE, 0, GROUPS, D, BLOCK, STAGES, CAUSAL,
            )),
            (attend_rows, (
                q_smem, k_smem, v_smem, q_full, full, empty, turn, o_desc, lse_ptr, batch, row, q_column, blocks, s,
                SCALE, 1, GROUPS, D, BLOCK, STAGES, CAUSAL,
            )),
            (attend_rows, (
                q_smem, k_smem, v_smem, q_full, full, empty, turn, o_desc, lse_ptr, batch, row, q_column, blocks, s,
                SCALE, 2, GROUPS, D, BLOCK, STAGES, CAUSAL,
            )),
            (load_forward, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, full, empty, batch, row, q_column, column,
                blocks, BLOCK, STAGES, GROUPS,
            )),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


# Backward: a program has 128 keys, and loops over all queries of all heads that share them; dk and dv stay in
# registers. Scores are computed transposed, [keys, queries], so that probabilities are the operand of the next product
# as they are, without a way through shared memory. The first product starts from -lse / scale and the second one from
# -delta, so that nothing is subtracted later. A part of dq goes to shared memory while dk is computed; from there,
# another warp lets the TMA add it to an fp32 tensor in global memory.
#
# Additions in any order would differ from run to run. So each block of queries has a counter, and the program of key
# block j waits until blocks 0 to j - 1 have added theirs. Programs draw their number from a counter when they start: a
# program waits for smaller numbers alone, which are running already. All begin with the last queries, of all heads that
# share the keys, so a program is one block of queries behind the one for which it waits.


@gluon.jit
def spread(smem, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Repeat a vector of shared memory in all rows of an accumulator, each element in a register of its own.

    Where rows share a register, ptxas copies it just before the product, and would wait for the product before.
    """
    x = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT) + smem.reshape([COLUMNS]).load(gl.SliceLayout(0, LAYOUT))[None]
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def load_backward(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem,
    kv_full, full, empty, batch, kv_head, key, last, n, HEADS: gl.constexpr, D: gl.constexpr, SHARE: gl.constexpr,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the keys and values of this program, then blocks of queries, of all heads that share the keys."""
    KV_BYTES: gl.constexpr = 2 * k_desc.block_type.nbytes
    Q_BYTES: gl.constexpr = 2 * (q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
    mbarrier.expect(kv_full, KV_BYTES)
    COPY_IN(k_desc, [batch, key, kv_head * D], kv_full, k_smem)
    COPY_IN(v_desc, [batch, key, kv_head * D], kv_full, v_smem)
    for t in range(SHARE * n):
        row, head = (last - t // SHARE) * BLOCK_Q, kv_head * SHARE + t % SHARE
        stage, phase = t % STAGES, (t // STAGES) & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), Q_BYTES)
        COPY_IN(q_desc, [batch, row, head * D], full.index(stage), q_smem.index(stage))
        COPY_IN(lse_desc, [batch * HEADS + head, row], full.index(stage), lse_smem.index(stage))
        COPY_IN(do_desc, [batch, row, head * D], full.index(stage), do_smem.index(stage))
        COPY_IN(delta_desc, [batch * HEADS + head, row], full.index(stage), delta_smem.index(stage))


@gluon.jit
def differentiate_block(
    t, n, i, dk, dv, k, v, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, full, empty, dq_full, dq_empty,
    key, s, SCALE: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
    CAUSAL: gl.constexpr, S: gl.constexpr, Q: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Add the gradients that block t of n blocks of queries gives to dk and dv, and hand over the part of dq."""
    stage, buffer = t % STAGES, t & 1
    q, do = q_smem.index(stage).reshape([BLOCK_Q, D]), do_smem.index(stage).reshape([BLOCK_Q, D])
    x, dp = spread(lse_smem.index(stage), 128, BLOCK_Q, S), spread(delta_smem.index(stage), 128, BLOCK_Q, S)
    x = warpgroup_mma(k, q.permute((1, 0)), x, is_async=True)  # scores less the log-sum-exp
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
    x = warpgroup_mma_wait(1, deps=[x])
    p = gl.exp2(x * SCALE)
    if MASK:
        i_key = key + gl.arange(0, 128, gl.SliceLayout(1, S))[:, None]
        i_query = i * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, S))[None, :]
        p = gl.where(i_key <= i_query if CAUSAL else i_key < s, p, 0.0)
    p16 = gl.convert_layout(p.to(k.dtype), P)
    dv = warpgroup_mma(p16, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (p * dp).to(k.dtype)
    ds_smem.store(ds)  # for dq, to which all warps have keys to add
    ds16 = gl.convert_layout(ds, P)
    fence_async_shared()
    SYNC()
    dq = gl.zeros([BLOCK_Q, D], gl.float32, Q)
    dq = warpgroup_mma(ds_smem.permute((1, 0)), k, dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(ds16, q, dk, is_async=True)
    dv, p16, dq = warpgroup_mma_wait(1, deps=[dv, p16, dq])  # dk may still be on its way while dq is stored
    mbarrier.wait(dq_empty.index(buffer), ((t >> 1) & 1) ^ 1)
    dq_smem.index(buffer).reshape([BLOCK_Q, D]).store(dq)
    fence_async_shared()
    SYNC()
    mbarrier.arrive(dq_full.index(buffer), count=1)
    mbarrier.wait(full.index((t + 1) % STAGES), ((t + 1) // STAGES) & 1, pred=t + 1 < n)  # the next block
    dk, ds16 = warpgroup_mma_wait(0, deps=[dk, ds16])
    mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def differentiate(
    q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, ds_smem, dq_smem, kv_full, full, empty, dq_full, dq_empty,
    dk_desc, dv_desc, batch, kv_head, key, last, n, s, SCALE: gl.constexpr, D: gl.constexpr, SHARE: gl.constexpr,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of 128 keys: the work of eight warps."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_Q, 16])
    KV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1] if BLOCK_Q == 128 else [4, 2], [16, 64, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, KV, 2)
    k, v = k_smem.reshape([128, D]), v_smem.reshape([128, D])
    dk, dv = gl.zeros([128, D], gl.float32, KV), gl.zeros([128, D], gl.float32, KV)
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(full.index(0), 0)
    whole = n  # blocks of queries that see all of these keys
    if CAUSAL:
        whole = gl.maximum(n - 128 // BLOCK_Q, 0)
    elif key + 128 > s:
        whole = 0
    for t in range(SHARE * whole):
        dk, dv = differentiate_block(
            t, SHARE * n, last - t // SHARE, dk, dv, k, v, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
            full, empty, dq_full, dq_empty, key, s, SCALE, D, BLOCK_Q, STAGES, False, CAUSAL, S, Q, P,
        )  # fmt: skip
    for t in range(SHARE * whole, SHARE * n):
        dk, dv = differentiate_block(
            t, SHARE * n, last - t // SHARE, dk, dv, k, v, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
            full, empty, dq_full, dq_empty, key, s, SCALE, D, BLOCK_Q, STAGES, True, CAUSAL, S, Q, P,
        )  # fmt: skip
    SYNC()  # nobody reads the keys and values any more
    v.store(dv.to(k_smem.dtype))
    k.store((dk * (SCALE * 0.6931471805599453)).to(k_smem.dtype))  # SCALE has a factor log2(e)
    fence_async_shared()
    SYNC()
    COPY_OUT(dv_desc, [batch, key, kv_head * D], v_smem)
    COPY_OUT(dk_desc, [batch, key, kv_head * D], k_smem)
    tma.store_wait(0)


@gluon.jit
def add_queries(
    dq_desc, dq_smem, dq_full, dq_empty, turn_ptr, batch, kv_head, j, last, n, queries, HEADS: gl.constexpr,
    D: gl.constexpr, SHARE: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Add this program's parts of dq to those of the programs before it: the work of one warp."""
    for t in range(SHARE * n):
        i, head, buffer = last - t // SHARE, kv_head * SHARE + t % SHARE, t & 1
        turn, part = turn_ptr + (batch * HEADS + head) * queries + i, dq_smem.index(buffer)
        mbarrier.wait(dq_full.index(buffer), (t >> 1) & 1)
        if j == 0:
            COPY_OUT(dq_desc, [batch, i * BLOCK_Q, head * D], part)
        else:
            while gl.atomic_add(turn, 0, sem="acquire") < j:  # how many have added theirs
                pass
            ADD_IN(dq_desc, [batch, i * BLOCK_Q, head * D], part)
        tma.store_wait(0)  # it has been read, and may be overwritten
        mbarrier.arrive(dq_empty.index(buffer), count=1)
        wait_until_added()
        SYNC()
        gl.atomic_add(turn, 1, sem="release")


@gluon.jit(do_not_specialize=["s", "b"])
def backward_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, lse_desc, delta_desc, turn_ptr, s, b,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, SCALE: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of 128 keys of one head, and their part of dq. Programs with many queries start first."""
    SHARE: gl.constexpr = HEADS // KV_HEADS
    number = gl.atomic_add(turn_ptr, 1, sem="relaxed")  # a program waits for smaller numbers alone: those have started
    number, j = find_block(number, KV_HEADS * b, gl.cdiv(s, 128), SIDE)
    kv_head, batch = number % KV_HEADS, number // KV_HEADS
    queries = gl.cdiv(s, BLOCK_Q)  # blocks of them
    key, last, n = j * 128, queries - 1, queries
    if CAUSAL:
        n = queries - key // BLOCK_Q
    k_smem = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES] + lse_desc.block_type.shape, lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES] + lse_desc.block_type.shape, lse_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, BLOCK_Q], k_desc.dtype)
    ds_smem = gl.allocate_shared_memory(k_desc.dtype, [128, BLOCK_Q], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)
    kv_full, dq_full, dq_empty = make_barriers(1, 1).index(0), make_barriers(2, 1), make_barriers(2, 1)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    gl.warp_specialize([
        (differentiate, (
            q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, ds_smem, dq_smem, kv_full, full, empty, dq_full,
            dq_empty, dk_desc, dv_desc, batch, kv_head, key, last, n, s, SCALE, D, SHARE, BLOCK_Q, STAGES, CAUSAL,
        )),
        (load_backward, (
            q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, q_smem, do_smem, k_smem, v_smem, lse_smem,
            delta_smem, kv_full, full, empty, batch, kv_head, key, last, n, HEADS, D, SHARE, BLOCK_Q, STAGES,
        )),
        (add_queries, (
            dq_desc, dq_smem, dq_full, dq_empty, turn_ptr + 1, batch, kv_head, j, last, n, queries, HEADS, D, SHARE,
            BLOCK_Q,
        )),
    ], [1, 1], [24, 24])  # fmt: skip


@triton.jit(do_not_specialize=["h", "s", "padded"])
def prepare_kernel(
    o_ptr, do_ptr, dlse_ptr, lse_ptr, from_ptr, delta_ptr, h, s, padded, o_batch, o_head, o_row, do_batch, do_head,
    do_row, INVERSE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write -lse / scale, and -(sum(o·do) - dlse), from which accumulators start; 0 beyond the last row."""
    blocks = padded // ROWS
    number = tl.program_id(0).to(tl.int64)  # 64 bits: a tensor may have more than 2^31 elements
    head, batch = number // blocks % h, number // blocks // h
    row = number % blocks * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)[None, :]
    inside = row[:, None] < s
    o = tl.load(o_ptr + batch * o_batch + head * o_head + row[:, None] * o_row + column, inside, 0)
    do = tl.load(do_ptr + batch * do_batch + head * do_head + row[:, None] * do_row + column, inside, 0)
    at = (batch * h + head) * s + row
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) - tl.load(dlse_ptr + at, row < s, 0)
    lse = tl.load(lse_ptr + at, row < s, 0)
    at = (batch * h + head) * padded + row
    tl.store(delta_ptr + at, -delta)
    tl.store(from_ptr + at, -lse * INVERSE)


@triton.jit
def finish_kernel(total_ptr, dq_ptr, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Scale dq, and round it once, when all of its parts are in."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dq = tl.load(total_ptr + i, i < n, 0) * SCALE
    tl.store(dq_ptr + i, dq.to(dq_ptr.dtype.element_ty), i < n)


def empty_heads(x: Tensor) -> Tensor:
    """Return a tensor of x's shape [b, h, s, k], a view of [b, s, h, k]: the heads of a token lie side by side."""
    b, h, s, k = x.shape
    return x.new_empty(b, s, h, k).transpose(1, 2)


def empty_rows(q: Tensor) -> Tensor:
    """Return a tensor for the log-sum-exp [b, h, s]: fp32, or float64 where q is."""
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def blocks_of(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x [b, h, s, k] as blocks of rows of one head; copy it if its heads do not lie side by side."""
    flat = x.transpose(1, 2)  # b s h k
    row, head, element = flat.stride()[1:]
    if (head, element) != (flat.shape[3], 1) or flat.stride(0) % 8 or row % 8 or flat.data_ptr() % 16:
        flat = flat.clone(memory_format=torch.contiguous_format)  # contiguous() returns what is not aligned as it is
    block = [1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, str(x.dtype)[6:]))
    return TensorDescriptor.from_tensor(flat.flatten(2), block, layout)


def vectors_of(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x [b·h, padded s], fp32, as blocks of rows of one head."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(x, [1, rows], layout)


# An operator of its own: torch.compile does not look into it, where addresses become descriptors.
@torch.library.custom_op("flash_attention_gluon::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, h, s, k]; k, v [b, kv heads, s, k] -> o like q, a view of [b, s, h, k]; log-sum-exp [b, h, s]"""
    (b, h, s, d), o, lse = q.shape, empty_heads(q), empty_rows(q)
    groups, registers = (2, 240) if d == 128 else (3, 160)
    if o.numel():
        attend_kernel[(triton.cdiv(s, 64 * groups) * b * h,)](
            blocks_of(q, 64), blocks_of(k, 128), blocks_of(v, 128), blocks_of(o, 64), lse, s, b, HEADS=h,
            KV_HEADS=k.shape[1], SCALE=scale * LOG2_E, D=d, BLOCK=128, STAGES=2, CAUSAL=causal, GROUPS=groups,
            REGISTERS=registers, SIDE=SIDE, num_warps=4,
        )  # fmt: skip
    return o, lse


@attend.register_fake
def attend_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What attend returns, without its elements."""
    return empty_heads(q), empty_rows(q)


@torch.library.custom_op("flash_attention_gluon::attend_backward", mutates_args=())
def attend_backward(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of o and of the log-sum-exp, and what attend took and returned -> gradients of q, k, v"""
    (b, h, s, d), kv_heads, rows = q.shape, k.shape[1], 64 if q.shape[3] == 128 else 128
    dq, dk, dv = empty_heads(q), empty_heads(k), empty_heads(v)
    if q.numel() == 0:
        return dq, dk, dv
    do = do if do.stride(3) == 1 else do.contiguous()
    start, delta = q.new_empty(2, b * h, triton.cdiv(s, 128) * 128, dtype=torch.float32)
    prepare_kernel[(start.numel() // 64,)](
        o, do, dlse.contiguous(), lse, start, delta, h, s, start.shape[1], *o.stride()[:3], *do.stride()[:3],
        INVERSE=1 / scale, D=d, ROWS=64, num_warps=4,
    )  # fmt: skip
    total = q.new_empty(b, s, h, d, dtype=torch.float32).transpose(1, 2)  # of all parts of dq
    turns = torch.zeros(1 + b * h * triton.cdiv(s, rows), dtype=torch.int32, device=q.device)
    backward_kernel[(triton.cdiv(s, 128) * b * kv_heads,)](
        blocks_of(q, rows), blocks_of(do, rows), blocks_of(k, 128), blocks_of(v, 128), blocks_of(total, rows),
        blocks_of(dk, 128), blocks_of(dv, 128), vectors_of(start, rows), vectors_of(delta, rows), turns, s, b,
        HEADS=h, KV_HEADS=kv_heads, SCALE=scale * LOG2_E, D=d, BLOCK_Q=rows, STAGES=2, CAUSAL=causal, SIDE=SIDE,
        num_warps=8,
    )  # fmt: skip
    finish_kernel[(triton.cdiv(dq.numel(), 4096),)](total, dq, dq.numel(), SCALE=scale, BLOCK=4096, num_warps=8)
    return dq, dk, dv


@attend_backward.register_fake
def attend_backward_shapes(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What attend_backward returns, without its elements."""
    return empty_heads(q), empty_heads(k), empty_heads(v)


class FlashAttention(torch.autograd.Function):
    """q [b, h, s, k]; k, v [b, kv heads, t, k] -> o [b, h, s, k], log-sum-exp [b, h, s]"""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = attend(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale = causal, scale
        return o, lse

    @staticmethod
    def backward(ctx, do: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, o, lse = ctx.saved_tensors
        return *attend_backward(do, o, lse, dlse, q, k, v, ctx.causal, ctx.scale), None, None


def flash_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """As flash_attention; also return the logarithm of the sum of e^(scale·q·k) of each query, [b, h, s], in fp32.

    From it, attention to several sets of keys can be merged: the weight of a set is e^(its log-sum-exp), divided by the
    sum of those of all sets. Gradients flow through it, too.
    """
    fine = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
    if not fine or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        raise ValueError(f"shapes are {shapes}: must be [b, h, s, k] and twice [b, kv heads, s, k]; kv heads divide h")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(f"dtypes are {q.dtype}, {k.dtype}, {v.dtype}: must be alike, and one of {DTYPES}")
    if q.shape[3] not in (64, 128):
        raise ValueError(f"the heads are {q.shape[3]} wide: must be 64 or 128")
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        raise ValueError(f"the tensors are on {q.device}: must be on a GPU of compute capability 9.0, an H100 or H200")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}: must be positive")
    return FlashAttention.apply(q, k, v, causal, scale)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """Attend from q [b, h, s, k] to k, v [b, kv heads, s, k]: softmax(scale·q kᵀ) v, scale 1/√k if not given.

    Query head i uses key head i // (h / kv heads). If causal, query i sees keys 0 to i. bf16 and fp16, heads 64 or 128
    wide, as many keys as queries, any number of them; on an H100 or H200. Fastest for views of [b, s, h, k], as
    projections make them: others are copied first. The output is one: rearrange(o, "b h s k -> b s (h k)") is a view.
    Gradients are the same to the bit in every run. Raises ValueError for anything else: use flash_attention.py there.
    """
    return flash_attention_with_lse(q, k, v, causal, scale)[0]


# --------------------------------------------------------------------------------------------------------- reference
def reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, with all scores in memory, in fp32 or float64: output and log-sum-exp."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.to(wide) @ k.to(wide).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None].masked_fill(lse[..., None] == -torch.inf, 0)).exp()
    return p.to(v.dtype) @ v, lse


def library(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's own function; the log-sum-exp, which that does not return, by reference."""
    if q.numel() == 0 or k.numel() == 0:
        return reference(q, k, v, causal, scale)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return o, reference(q, k, v, causal, scale)[1]


def cost(b: int, h: int, kv_heads: int, s: int, k: int, causal: bool, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Bytes and FLOPs of forward, bytes and FLOPs of backward: all tensors once; two products, and five.

    Backward reads q, k, v, o, do and the log-sum-exp, and writes dq, dk, dv.
    """
    queries, keys, rows = b * h * s * k * dtype.itemsize, b * kv_heads * s * k * dtype.itemsize, b * h * s * 4
    flops = 4 * b * h * s * s * k // (2 if causal else 1)
    return 2 * queries + 2 * keys + rows, flops, 4 * queries + 4 * keys + rows, flops * 5 // 2


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, PyTorch's, and the inputs q [b, h, s, k], k, v [b, kv heads, s, k], in float64."""
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=torch.float64, device=device)

    def inputs(b: int, h: int, kv_heads: int, s: int, k: int) -> list[Tensor]:
        return [random(b, s, heads, k).transpose(1, 2) for heads in (h, kv_heads, kv_heads)]

    # each number of heads is a compilation of its own, so there are few; 9 and 10 heads of keys are more than SIDE
    shapes = (2, 8, 2, 1999, 128), (3, 6, 3, 1025, 64), (1, 6, 3, 2048, 64), (5, 8, 2, 192, 128), (3, 6, 3, 1, 64)
    for shape, causal in product(shapes, (True, False)):
        what = "{} {} {} {} {}, ".format(*shape) + ("causal" if causal else "full")
        yield what, partial(flash_attention_with_lse, causal=causal), partial(library, causal=causal), inputs(*shape)
    scaled = partial(flash_attention_with_lse, scale=0.3), partial(library, scale=0.3)
    yield "scale", *scaled, inputs(1, 2, 2, 300, 64)
    yield "contiguous", flash_attention_with_lse, library, [x.contiguous() for x in inputs(1, 8, 2, 300, 128)]
    yield "no queries", flash_attention_with_lse, library, inputs(1, 6, 3, 0, 64)


# ----------------------------------------------------------------------------------------------------------- measure
def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor; inf where one has NaN or inf and the other has not."""
    finite = exact.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return float("inf")
    return ((actual - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-300)).item()


def errors(ours: Callable, plain: Callable, inputs: list[Tensor], dtype: torch.dtype) -> list[tuple[float, float]]:
    """Errors of every output and gradient against float64: of ours, and of plain PyTorch in the same dtype."""
    results = []
    # PyTorch's first: a thread in which autograd has run nothing yet has no CUDA context, which TMA asks for
    for function, precision in (plain, torch.float64), (plain, dtype), (ours, dtype):
        low = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        leaves = [x.to(precision, copy=True).requires_grad_() if x.is_floating_point() else x for x in low]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator(outputs[0].device).manual_seed(1)
        dys = [torch.randn(y.shape, device=y.device, generator=generator).to(dtype).to(y.dtype) for y in outputs]
        torch.autograd.backward(outputs, dys)
        results.append([*outputs, *(x.grad for x in leaves if x.requires_grad)])
    triples = zip(*results, strict=True)
    return [(relative_error(mine, exact), relative_error(theirs, exact)) for exact, theirs, mine in triples]


def check(device: str) -> None:
    """Compare with float64; exit if an error is above twice PyTorch's own, or two roundings if that is more."""
    if device != "cuda":
        return print("Gluon has no interpreter, and this is for an H100 or H200: nothing is checked.")
    for dtype in DTYPES:
        least, worst = torch.finfo(dtype).eps / 4, (0.0, 0.0, 0.0, "")
        for what, *case in cases(device):
            for mine, theirs in errors(*case, dtype):
                worst = max(worst, (mine / max(theirs, least), mine, theirs, what))
        ratio, mine, theirs, what = worst
        print(f"{str(dtype)[6:]:10} worst error {mine:.1e}, PyTorch's {theirs:.1e}  ({what})", flush=True)
        if not ratio <= 2:
            raise SystemExit(f"the error is {ratio:.1f} times PyTorch's")
    for k in 64, 128:
        inputs = inputs_of(1, 8, 2, 4096, k)
        do = torch.randn_like(inputs[0])
        forward, backward = flash_attention_with_lse, lambda *x, do=do: torch.autograd.grad(flash_attention(*x), x, do)
        if differing(partial(forward, *inputs)) or differing(partial(backward, *inputs)):
            raise SystemExit(f"heads of {k}: runs on the same input differ")


def differing(run: Callable[[], tuple[Tensor, ...]], times: int = 100) -> int:
    """Count the repeats whose results differ in any bit from the first: threads have raced for them."""
    first = run()
    return sum(not all(torch.equal(x, y) for x, y in zip(first, run(), strict=True)) for _ in range(times))


def compare(
    what: str,
    runs: dict[str, Callable[[], object]],
    amount: float,
    limit: float,
    unit: str = "TB/s",
    before: Iterable[dict] = (),
    bench: Callable[..., float] = triton.testing.do_bench_cudagraph,
) -> list[dict]:
    """Time runs, in random order, less the rows before; return rows with bytes or FLOPs per second."""
    times, rows = {by: [] for by in runs}, []
    for turn in range(3):
        for by in random.Random(turn).sample(list(runs), len(runs)):
            times[by].append(bench(runs[by], return_mode="median"))
    for by in runs:
        ms = statistics.median(times[by]) - sum(row["ms"] for row in before if row["by"] == by)
        rate, share = amount / ms / 1e9, amount / ms * 1e3 / limit
        rows.append({"what": what, "by": by, "ms": ms, "rate": rate, "unit": unit, "share": share})
        print(f"{what:45} {by:30} {ms:8.3f} ms  {rate:7.2f} {unit:8}  {share:4.0%}", flush=True)
    return rows


def contenders(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], tuple[Tensor]]]:
    """Causal attention by PyTorch's two fast kernels, and by the best of ours for these inputs."""

    def library_by(backend: SDPBackend) -> tuple[Tensor]:
        with sdpa_kernel([backend]):
            shared = q.shape[1] != k.shape[1]
            return (F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared),)

    return {
        "cuDNN": lambda: library_by(SDPBackend.CUDNN_ATTENTION),
        "FlashAttention 2 (PyTorch)": lambda: library_by(SDPBackend.FLASH_ATTENTION),
        "ours": lambda: (flash_attention(q, k, v),),
    }


def inputs_of(b: int, h: int, kv_heads: int, s: int, k: int) -> list[Tensor]:
    """Make random q, k, v in bfloat16, as projections make them: views of [b, s, h, k]."""
    shapes = [(b, s, heads, k) for heads in (h, kv_heads, kv_heads)]
    made = [torch.randn(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for shape in shapes]
    return [x.requires_grad_() for x in made]


def measure() -> list[dict]:
    """Time causal attention of an 8B and a 1.7B model in bfloat16, with 16,384 tokens, in bursts and sustained."""
    shapes, rows = ((2, 32, 8, 8192, 128), (2, 32, 32, 8192, 64), (4, 32, 8, 4096, 128), (4, 32, 32, 4096, 64)), []
    for (suffix, bench), (b, h, kv_heads, s, k) in product(BENCHES.items(), shapes):
        what = f"{b} x {h}/{kv_heads} heads, {s} x {k}"
        inputs = inputs_of(b, h, kv_heads, s, k)
        do = torch.randn_like(inputs[0])
        runs = contenders(*inputs)
        both = {by: lambda run=run, x=inputs, do=do: torch.autograd.grad(run(), x, do) for by, run in runs.items()}
        _, flops, _, flops_backward = cost(b, h, kv_heads, s, k, True, torch.bfloat16)
        forward = compare(f"{what}, forward{suffix}", runs, flops, PEAK, "TFLOP/s", bench=bench)
        what = f"{what}, backward{suffix}"
        backward = compare(what, both, flops_backward, PEAK, "TFLOP/s", forward, bench)
        for row in backward[:3:2] if not suffix else ():  # of cuDNN and ours
            row["differ"] = differing(both[row["by"]])
            print(f"{row['what']}: {row['differ']} of 100 repeats by {row['by']} differ", flush=True)
        rows += forward + backward
    return rows


# -------------------------------------------------------------------------------------------------------------- main
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    check("cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        measure()


if __name__ == "__main__":
    main()


# To paste this into your own trainer
# Take the imports of this file along.
#
# Plumbing: DTYPES, BARRIER, flash_attention_with_lse, flash_attention, cost, cases, check, measure
# Copy:     LOG2_E, SIDE, DTYPES, COPY_IN, COPY_OUT, add_in, ADD_IN, SYNC, BARRIER, make_barriers, wait_until_added,
#           find_block, load_forward, halves, row_max, row_sum, attend_block, attend_rows, attend_kernel, spread,
#           load_backward, differentiate_block, differentiate, add_queries, backward_kernel, prepare_kernel,
#           finish_kernel, empty_heads, empty_rows, blocks_of, vectors_of, attend, attend_shapes, attend_backward,
#           attend_backward_shapes, FlashAttention, flash_attention_with_lse, flash_attention (call flash_attention on q
#           [b, h, s, k] and k, v [b, kv heads, s, k]; unlike torch's scaled_dot_product_attention, it is causal unless
#           causal=False)
