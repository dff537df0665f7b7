"""Attention that never writes its scores to memory: softmax block by block, forward and backward.

o = softmax(scale·q kᵀ) v has 4·s·t·k FLOPs per head (half of them if causal); to write the scores [s, t] and read them
back would take most of the time. So a block of queries goes through the blocks of keys one by one, and keeps for each
query the highest score m so far, the sum l of e^(score - m), and the sum of e^(score - m)·v. If a block raises m, both
sums are multiplied by e^(old m - m). At the end o is the second sum over l. Backward computes the scores again from q
and k, and the probabilities from the log-sum-exp m + log l of each query, which forward has saved.
The ladder: flash1 (keys in the outer loop), flash2 (queries in the outer loop), tma (the GPU's copy unit loads blocks).

Parent:   none
Run:      python 09_kernels/flash_attention.py
Source:   Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608
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
from triton.tools.tensor_descriptor import TensorDescriptor

# ------------------------------------------------------------------------------------------------------------ config
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
PEAK = 989.5e12  # FLOP/s of an H100 or H200's tensor cores in bf16
BENCHES = {  # in bursts, and after 100 ms of the same: at its power limit a GPU lowers its clocks
    "": triton.testing.do_bench_cudagraph,
    ", sustained": partial(triton.testing.do_bench, warmup=100, rep=100),
}
LOG2_E = math.log2(math.e)
SIZES = {  # kernel, head width: rows of queries, rows of keys, warps, blocks in shared memory, heads side by side
    ("forward", 64): (128, 64, 8, 3, 16),
    ("forward", 128): (64, 64, 4, 3, 8),
    ("keys", 64): (64, 64, 4, 3, 16),
    ("keys", 128): (64, 64, 4, 2, 16),
    ("queries", 64): (128, 64, 8, 3, 16),
    ("queries", 128): (64, 64, 4, 2, 16),
}  # so small that an SM runs two programs: while one computes exponentials, the other multiplies
COUNTS = ["s", "t", "b", "h", "kv_heads"]  # kernels are not compiled anew for other values


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def widen(x):
    """Compute in fp32, or in float64 where the tensors are."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


# Axes: b sequences, h heads of queries, s queries, t keys, k head width. A head is a number below b·h.
@triton.jit
def assign(blocks, heads, TOGETHER: tl.constexpr):
    """Return head and block of this program: first block 0 of TOGETHER heads, then their block 1, and so on."""
    first = tl.program_id(0) // (blocks * TOGETHER) * TOGETHER
    place = tl.program_id(0) % (blocks * TOGETHER)
    side_by_side = tl.minimum(heads - first, TOGETHER)
    return first + place % side_by_side, place // side_by_side


@triton.jit
def head_of(x_ptr, head, h, batch_stride, head_stride):
    """Point to a head of x [b, h, ..]; 64 bits, as x may have more than 2^31 elements."""
    batch = tl.cast(head // h, tl.int64)
    return x_ptr + batch * batch_stride + tl.cast(head % h, tl.int64) * head_stride


@triton.jit
def load_rows(x_ptr, start, length, stride, ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows of a head from row `start` on; beyond the last row, and beyond column K, lie zeros."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    x_ptr += tl.cast(start, tl.int64) * stride
    inside = start + row < length
    if K < COLUMNS:
        inside = inside & (column < K)
    return tl.load(x_ptr + row.to(tl.int64) * stride + column, inside, 0)


@triton.jit
def store_rows(x_ptr, x, start, length, stride, ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Store rows of a head from row `start` on."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    x_ptr += tl.cast(start, tl.int64) * stride
    tl.store(
        x_ptr + row.to(tl.int64) * stride + column, x.to(x_ptr.dtype.element_ty), (start + row < length) & (column < K)
    )


@triton.jit
def add_product(total, a, b):
    """Add a b to total, in its dtype; float32 as it is, not rounded to TF32."""
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def reach(start, t, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the ends of the fully visible and of all visible blocks of keys, for BLOCK_M queries from `start` on."""
    if CAUSAL:
        return (start + 1) // BLOCK_N * BLOCK_N, tl.minimum(start + BLOCK_M, t)
    return t // BLOCK_N * BLOCK_N, t


@triton.jit
def add_keys(
    q, k, v, highest, total, o, start, at, t,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add keys from `at` on to the sums of queries from `start` on; SCALE contains log₂ e, highest is in base 2."""
    scores = tl.dot(q, k.T, input_precision="ieee")  # M N
    if MASKED:
        row, column = start + tl.arange(0, BLOCK_M)[:, None], at + tl.arange(0, BLOCK_N)[None, :]
        seen = (column <= row) & (column < t) if CAUSAL else column < t
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * SCALE)
    finite = tl.where(higher == float("-inf"), 0, higher)  # -inf minus -inf is NaN: a row may have seen nothing yet
    p = tl.exp2(scores * SCALE - finite[:, None])  # one multiply-add, one exponential
    shrink = tl.exp2(highest - finite)
    total = total * shrink + tl.sum(p, 1)
    o = add_product(o * shrink[:, None], p.to(v.dtype), v)
    return higher, total, o


@triton.jit
def finish(
    o_ptr, lse_ptr, o, highest, total, head, start, s, h,
    K: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Divide once per output; write o [b, s, h, k] and the log-sum-exp [b, h, s]. A row that sees no key becomes 0."""
    total = tl.where(total == 0, 1, total)
    o = o / total[:, None]
    o_ptr = head_of(o_ptr, head, h, tl.cast(s, tl.int64) * h * K, K)
    store_rows(o_ptr, o, start, s, h * K, BLOCK_M, K, COLUMNS)
    row = start + tl.arange(0, BLOCK_M)
    lse = highest * 0.6931471805599453 + tl.log(total)  # log 2
    tl.store(lse_ptr + tl.cast(head, tl.int64) * s + row, lse, row < s)


@triton.jit
def probabilities(x, y, lse, seen, SCALE: tl.constexpr, MASKED: tl.constexpr):
    """e^(score - log-sum-exp) of queries x and keys y; of keys x and queries y, transposed. All in base 2."""
    scores = tl.dot(x, y.T, input_precision="ieee")
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    return tl.exp2(scores * SCALE - lse)


# flash1: one program per head; keys in the outer loop, queries in the inner one. For each block of keys, partial
# outputs travel to memory and back. Only as many SMs work as there are heads.


@triton.jit(do_not_specialize=COUNTS)
def flash1_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, highest_ptr, total_ptr, s, t, h, kv_heads, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one head of o [b·h, s, k], which is 0, in fp32, with highest scores (-inf) and sums (0) [b·h, s]."""
    head = tl.program_id(0)
    q_ptr = head_of(q_ptr, head, h, q_b, q_h)
    k_ptr = head_of(k_ptr, head // (h // kv_heads), kv_heads, k_b, k_h)
    v_ptr = head_of(v_ptr, head // (h // kv_heads), kv_heads, v_b, v_h)
    o_ptr += tl.cast(head, tl.int64) * s * K
    highest_ptr += tl.cast(head, tl.int64) * s
    total_ptr += tl.cast(head, tl.int64) * s
    for at in tl.range(0, t, BLOCK_N):
        k = load_rows(k_ptr, at, t, k_s, BLOCK_N, K, COLUMNS)
        v = load_rows(v_ptr, at, t, v_s, BLOCK_N, K, COLUMNS)
        column = at + tl.arange(0, BLOCK_N)[None, :]
        first = at // BLOCK_M * BLOCK_M if CAUSAL else 0
        for start in tl.range(first, s, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            q = load_rows(q_ptr, start, s, q_s, BLOCK_M, K, COLUMNS)
            o = load_rows(o_ptr, start, s, K, BLOCK_M, K, COLUMNS)
            highest = tl.load(highest_ptr + row, row < s, float("-inf"))
            total = tl.load(total_ptr + row, row < s, 0)
            seen = (column <= row[:, None]) & (column < t) if CAUSAL else column < t
            scores = tl.where(seen, tl.dot(q, k.T, input_precision="ieee") * SCALE, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0, higher)
            p = tl.exp(scores - finite[:, None])
            before = total * tl.exp(highest - finite)  # the old sum, less by what the maximum has grown
            total = before + tl.sum(p, 1)
            o = add_product(o * before[:, None], p.to(v.dtype), v)
            store_rows(o_ptr, o / tl.where(total == 0, 1, total)[:, None], start, s, K, BLOCK_M, K, COLUMNS)
            tl.store(highest_ptr + row, higher, row < s)
            tl.store(total_ptr + row, total, row < s)
        tl.debug_barrier()  # other threads of the program read what these have written


@triton.jit(do_not_specialize=COUNTS)
def flash1_backward(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, dq_ptr, dk_ptr, dv_ptr, s, t, h, kv_heads, padded,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s,
    BASE2: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute dk, dv of one head of keys, and add dq [b·h, s, k], which is 0, in fp32, of the heads that share it."""
    kv_head = tl.program_id(0)
    group = h // kv_heads
    k_ptr = head_of(k_ptr, kv_head, kv_heads, k_b, k_h)
    v_ptr = head_of(v_ptr, kv_head, kv_heads, v_b, v_h)
    dk_ptr = head_of(dk_ptr, kv_head, kv_heads, tl.cast(t, tl.int64) * kv_heads * K, K)
    dv_ptr = head_of(dv_ptr, kv_head, kv_heads, tl.cast(t, tl.int64) * kv_heads * K, K)
    for at in tl.range(0, t, BLOCK_N):
        k = load_rows(k_ptr, at, t, k_s, BLOCK_N, K, COLUMNS)
        v = load_rows(v_ptr, at, t, v_s, BLOCK_N, K, COLUMNS)
        dk = widen(tl.zeros([BLOCK_N, COLUMNS], k.dtype))
        dv = dk
        column = at + tl.arange(0, BLOCK_N)[None, :]
        for head in tl.range(kv_head * group, kv_head * group + group):
            lse_ptr = rows_ptr + tl.cast(head, tl.int64) * 2 * padded
            first = at // BLOCK_M * BLOCK_M if CAUSAL else 0
            for start in tl.range(first, s, BLOCK_M):
                row = start + tl.arange(0, BLOCK_M)[:, None]
                q = load_rows(head_of(q_ptr, head, h, q_b, q_h), start, s, q_s, BLOCK_M, K, COLUMNS)
                do = load_rows(head_of(do_ptr, head, h, do_b, do_h), start, s, do_s, BLOCK_M, K, COLUMNS)
                lse, delta = tl.load(lse_ptr + row), tl.load(lse_ptr + padded + row)
                seen = (column <= row) & (column < t) if CAUSAL else column < t
                p = probabilities(q, k, lse, seen, BASE2, True)
                ds = p * (tl.dot(do, v.T, input_precision="ieee") - delta)
                dv = add_product(dv, p.to(do.dtype).T, do)
                dk = add_product(dk, ds.to(q.dtype).T, q)
                own_ptr = dq_ptr + tl.cast(head, tl.int64) * s * K
                dq = load_rows(own_ptr, start, s, K, BLOCK_M, K, COLUMNS)
                dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee") * SCALE
                store_rows(own_ptr, dq, start, s, K, BLOCK_M, K, COLUMNS)
        store_rows(dk_ptr, dk * SCALE, at, t, kv_heads * K, BLOCK_N, K, COLUMNS)
        store_rows(dv_ptr, dv, at, t, kv_heads * K, BLOCK_N, K, COLUMNS)
        tl.debug_barrier()  # other threads of the program read what these have written


# flash2: one program per block of queries, whose output stays in registers and is divided by the sum once, at the end.
# One factor, scale·log₂ e, goes into a base-2 exponential, so scaling the scores takes no instruction of its own. Only
# blocks on the diagonal have a mask. Long rows start first; heads that share keys run side by side, for the L2 cache.
#
# Backward in three kernels, without atomics, so that two runs agree to the bit: row sums of do·o; one program per block
# of keys, which loops over all queries of all heads that share it, for dk and dv; one per block of queries for dq.


@triton.jit(do_not_specialize=COUNTS)
def flash2_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, s, t, b, h, kv_heads, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one head of o [b, s, h, k], and their log-sum-exp [b, h, s]."""
    head, block = assign(tl.cdiv(s, BLOCK_M), b * h, TOGETHER)
    start = (tl.cdiv(s, BLOCK_M) - 1 - block) * BLOCK_M  # the last rows see most keys: they start first
    k_ptr = head_of(k_ptr, head // (h // kv_heads), kv_heads, k_b, k_h)
    v_ptr = head_of(v_ptr, head // (h // kv_heads), kv_heads, v_b, v_h)
    q = load_rows(head_of(q_ptr, head, h, q_b, q_h), start, s, q_s, BLOCK_M, K, COLUMNS)
    o = widen(tl.zeros([BLOCK_M, COLUMNS], q.dtype))
    total = widen(tl.zeros([BLOCK_M], q.dtype))
    highest = total + float("-inf")
    unmasked, end = reach(start, t, CAUSAL, BLOCK_M, BLOCK_N)
    # Two loops, unrolled: blocks of keys that all queries see, then those that the diagonal or the end cuts (masked).
    # With queries 256 to 383 and 64 keys at a time, keys 0 to 255 and 256 to 383.
    for masked in tl.static_range(2):
        first = unmasked if masked else 0
        last = end if masked else unmasked
        for at in tl.range(first, last, BLOCK_N):
            k = load_rows(k_ptr, at, t, k_s, BLOCK_N, K, COLUMNS)
            v = load_rows(v_ptr, at, t, v_s, BLOCK_N, K, COLUMNS)
            highest, total, o = add_keys(
                q, k, v, highest, total, o, start, at, t, SCALE, CAUSAL, masked, BLOCK_M, BLOCK_N
            )  # fmt: skip
    finish(o_ptr, lse_ptr, o, highest, total, head, start, s, h, K, BLOCK_M, COLUMNS)


@triton.jit(do_not_specialize=COUNTS)
def row_sums(
    do_ptr, o_ptr, lse_ptr, dlse_ptr, rows_ptr, s, h, padded, do_b, do_h, do_s, o_b, o_h, o_s,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write what backward needs of each row to rows [b·h, 2, padded]: log-sum-exp in base 2, sum of do·o, less dlse.

    A row that saw no key, and one beyond the end, has the log-sum-exp inf: its probabilities will be 0.
    """
    blocks = padded // ROWS
    head, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * ROWS
    do = load_rows(head_of(do_ptr, head, h, do_b, do_h), start, s, do_s, ROWS, K, COLUMNS)
    o = load_rows(head_of(o_ptr, head, h, o_b, o_h), start, s, o_s, ROWS, K, COLUMNS)
    row = start + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + tl.cast(head, tl.int64) * s + row, row < s, float("-inf"))
    dlse = tl.load(dlse_ptr + tl.cast(head, tl.int64) * s + row, row < s, 0)
    rows_ptr += tl.cast(head, tl.int64) * 2 * padded
    tl.store(rows_ptr + row, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))  # log₂ e
    tl.store(rows_ptr + padded + row, tl.sum(widen(do) * widen(o), 1) - dlse)


@triton.jit(do_not_specialize=COUNTS)
def flash2_keys(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, dk_ptr, dv_ptr, s, t, b, h, kv_heads, padded,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s,
    BASE2: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of one head of dk, dv [b, t, kv heads, k]: from all queries of the heads that share it."""
    kv_head, block = assign(tl.cdiv(t, BLOCK_N), b * kv_heads, TOGETHER)
    group = h // kv_heads
    at = block * BLOCK_N
    k = load_rows(head_of(k_ptr, kv_head, kv_heads, k_b, k_h), at, t, k_s, BLOCK_N, K, COLUMNS)
    v = load_rows(head_of(v_ptr, kv_head, kv_heads, v_b, v_h), at, t, v_s, BLOCK_N, K, COLUMNS)
    dk = widen(tl.zeros([BLOCK_N, COLUMNS], k.dtype))
    dv = dk
    column = at + tl.arange(0, BLOCK_N)[:, None]
    # queries from `first` to `unmasked` see some of these keys, those after them all; keys beyond t are never stored
    first = at // BLOCK_M * BLOCK_M if CAUSAL else 0
    unmasked = tl.cdiv(at + BLOCK_N - 1, BLOCK_M) * BLOCK_M if CAUSAL else 0
    for head in tl.range(kv_head * group, kv_head * group + group):
        own_q_ptr = head_of(q_ptr, head, h, q_b, q_h)
        own_do_ptr = head_of(do_ptr, head, h, do_b, do_h)
        lse_ptr = rows_ptr + tl.cast(head, tl.int64) * 2 * padded
        # Two loops, unrolled: blocks of queries that see some of these keys (masked), then those that see all.
        # With keys 256 to 383 and 64 queries at a time, queries 256 to 383 and from 384 on.
        for masked in tl.static_range(1, -1, -1):
            begin = first if masked else unmasked
            end = tl.minimum(unmasked, s) if masked else s
            for start in tl.range(begin, end, BLOCK_M):
                row = start + tl.arange(0, BLOCK_M)[None, :]
                q = load_rows(own_q_ptr, start, s, q_s, BLOCK_M, K, COLUMNS)
                do = load_rows(own_do_ptr, start, s, do_s, BLOCK_M, K, COLUMNS)
                lse, delta = tl.load(lse_ptr + row), tl.load(lse_ptr + padded + row)
                p = probabilities(k, q, lse, column <= row, BASE2, masked)  # N M
                dv = add_product(dv, p.to(do.dtype), do)
                ds = p * (tl.dot(v, do.T, input_precision="ieee") - delta)
                dk = add_product(dk, ds.to(q.dtype), q)
    stride = tl.cast(t, tl.int64) * kv_heads * K
    store_rows(head_of(dk_ptr, kv_head, kv_heads, stride, K), dk * SCALE, at, t, kv_heads * K, BLOCK_N, K, COLUMNS)
    store_rows(head_of(dv_ptr, kv_head, kv_heads, stride, K), dv, at, t, kv_heads * K, BLOCK_N, K, COLUMNS)


@triton.jit(do_not_specialize=COUNTS)
def flash2_queries(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, dq_ptr, s, t, b, h, kv_heads, padded,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s,
    BASE2: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one head of dq [b, s, h, k]."""
    head, block = assign(tl.cdiv(s, BLOCK_M), b * h, TOGETHER)
    start = (tl.cdiv(s, BLOCK_M) - 1 - block) * BLOCK_M  # as in forward
    k_ptr = head_of(k_ptr, head // (h // kv_heads), kv_heads, k_b, k_h)
    v_ptr = head_of(v_ptr, head // (h // kv_heads), kv_heads, v_b, v_h)
    q = load_rows(head_of(q_ptr, head, h, q_b, q_h), start, s, q_s, BLOCK_M, K, COLUMNS)
    do = load_rows(head_of(do_ptr, head, h, do_b, do_h), start, s, do_s, BLOCK_M, K, COLUMNS)
    row = start + tl.arange(0, BLOCK_M)[:, None]
    lse_ptr = rows_ptr + tl.cast(head, tl.int64) * 2 * padded
    lse, delta = tl.load(lse_ptr + row), tl.load(lse_ptr + padded + row)
    dq = widen(tl.zeros([BLOCK_M, COLUMNS], q.dtype))
    unmasked, end = reach(start, t, CAUSAL, BLOCK_M, BLOCK_N)
    # Two loops, unrolled: blocks of keys that all queries see, then those that the diagonal or the end cuts (masked).
    # With queries 256 to 383 and 64 keys at a time, keys 0 to 255 and 256 to 383.
    for masked in tl.static_range(2):
        first = unmasked if masked else 0
        last = end if masked else unmasked
        for at in tl.range(first, last, BLOCK_N):
            k = load_rows(k_ptr, at, t, k_s, BLOCK_N, K, COLUMNS)
            v = load_rows(v_ptr, at, t, v_s, BLOCK_N, K, COLUMNS)
            column = at + tl.arange(0, BLOCK_N)[None, :]
            seen = (column <= row) & (column < t) if CAUSAL else column < t
            p = probabilities(q, k, lse, seen, BASE2, masked)  # M N
            ds = p * (tl.dot(do, v.T, input_precision="ieee") - delta)
            dq = add_product(dq, ds.to(k.dtype), k)
    dq_ptr = head_of(dq_ptr, head, h, tl.cast(s, tl.int64) * h * K, K)
    store_rows(dq_ptr, dq * SCALE, start, s, h * K, BLOCK_M, K, COLUMNS)


# tma: the same loops, but the tensor memory accelerator copies whole blocks to shared memory while earlier blocks are
# computed. Threads compute no addresses, and registers hold none.


@triton.jit(do_not_specialize=COUNTS)
def tma_forward(
    q_blocks, k_blocks, v_blocks, o_ptr, lse_ptr, s, t, b, h, kv_heads,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one head of o [b, s, h, k], and their log-sum-exp [b, h, s]."""
    head, block = assign(tl.cdiv(s, BLOCK_M), b * h, TOGETHER)
    start = (tl.cdiv(s, BLOCK_M) - 1 - block) * BLOCK_M
    batch, query_head, kv_head = head // h, head % h, head % h // (h // kv_heads)
    q = q_blocks.load([batch, query_head, start, 0]).reshape([BLOCK_M, K])  # rows beyond the last are 0
    o = tl.zeros([BLOCK_M, K], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = total + float("-inf")
    unmasked, end = reach(start, t, CAUSAL, BLOCK_M, BLOCK_N)
    # Two loops, unrolled: blocks of keys that all queries see, then those that the diagonal or the end cuts (masked).
    # With queries 256 to 383 and 64 keys at a time, keys 0 to 255 and 256 to 383.
    for masked in tl.static_range(2):
        first = unmasked if masked else 0
        last = end if masked else unmasked
        for at in tl.range(first, last, BLOCK_N):
            k = k_blocks.load([batch, kv_head, at, 0]).reshape([BLOCK_N, K])
            v = v_blocks.load([batch, kv_head, at, 0]).reshape([BLOCK_N, K])
            highest, total, o = add_keys(
                q, k, v, highest, total, o, start, at, t, SCALE, CAUSAL, masked, BLOCK_M, BLOCK_N
            )  # fmt: skip
    finish(o_ptr, lse_ptr, o, highest, total, head, start, s, h, K, BLOCK_M, K)


@triton.jit(do_not_specialize=COUNTS)
def tma_keys(
    q_blocks, k_blocks, v_blocks, do_blocks, rows_ptr, dk_ptr, dv_ptr, s, t, b, h, kv_heads, padded,
    BASE2: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of one head of dk, dv [b, t, kv heads, k]: from all queries of the heads that share it."""
    kv_head, block = assign(tl.cdiv(t, BLOCK_N), b * kv_heads, TOGETHER)
    group = h // kv_heads
    at = block * BLOCK_N
    batch = kv_head // kv_heads
    k = k_blocks.load([batch, kv_head % kv_heads, at, 0]).reshape([BLOCK_N, K])
    v = v_blocks.load([batch, kv_head % kv_heads, at, 0]).reshape([BLOCK_N, K])
    dk = tl.zeros([BLOCK_N, K], tl.float32)
    dv = tl.zeros([BLOCK_N, K], tl.float32)
    column = at + tl.arange(0, BLOCK_N)[:, None]
    first = at // BLOCK_M * BLOCK_M if CAUSAL else 0
    unmasked = tl.cdiv(at + BLOCK_N - 1, BLOCK_M) * BLOCK_M if CAUSAL else 0
    for head in tl.range(kv_head * group, kv_head * group + group):
        lse_ptr = rows_ptr + tl.cast(head, tl.int64) * 2 * padded
        # Two loops, unrolled: blocks of queries that see some of these keys (masked), then those that see all.
        # With keys 256 to 383 and 64 queries at a time, queries 256 to 383 and from 384 on.
        for masked in tl.static_range(1, -1, -1):
            begin = first if masked else unmasked
            end = tl.minimum(unmasked, s) if masked else s
            for start in tl.range(begin, end, BLOCK_M):
                row = start + tl.arange(0, BLOCK_M)[None, :]
                q = q_blocks.load([batch, head % h, start, 0]).reshape([BLOCK_M, K])
                do = do_blocks.load([batch, head % h, start, 0]).reshape([BLOCK_M, K])
                lse, delta = tl.load(lse_ptr + row), tl.load(lse_ptr + padded + row)
                p = probabilities(k, q, lse, column <= row, BASE2, masked)
                dv = add_product(dv, p.to(do.dtype), do)
                ds = p * (tl.dot(v, do.T) - delta)
                dk = add_product(dk, ds.to(q.dtype), q)
    stride = tl.cast(t, tl.int64) * kv_heads * K
    store_rows(head_of(dk_ptr, kv_head, kv_heads, stride, K), dk * SCALE, at, t, kv_heads * K, BLOCK_N, K, K)
    store_rows(head_of(dv_ptr, kv_head, kv_heads, stride, K), dv, at, t, kv_heads * K, BLOCK_N, K, K)


@triton.jit(do_not_specialize=COUNTS)
def tma_queries(
    q_blocks, k_blocks, v_blocks, do_blocks, rows_ptr, dq_ptr, s, t, b, h, kv_heads, padded,
    BASE2: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one head of dq [b, s, h, k]."""
    head, block = assign(tl.cdiv(s, BLOCK_M), b * h, TOGETHER)
    start = (tl.cdiv(s, BLOCK_M) - 1 - block) * BLOCK_M
    batch, query_head, kv_head = head // h, head % h, head % h // (h // kv_heads)
    q = q_blocks.load([batch, query_head, start, 0]).reshape([BLOCK_M, K])
    do = do_blocks.load([batch, query_head, start, 0]).reshape([BLOCK_M, K])
    row = start + tl.arange(0, BLOCK_M)[:, None]
    lse_ptr = rows_ptr + tl.cast(head, tl.int64) * 2 * padded
    lse, delta = tl.load(lse_ptr + row), tl.load(lse_ptr + padded + row)
    dq = tl.zeros([BLOCK_M, K], tl.float32)
    unmasked, end = reach(start, t, CAUSAL, BLOCK_M, BLOCK_N)
    # Two loops, unrolled: blocks of keys that all queries see, then those that the diagonal or the end cuts (masked).
    # With queries 256 to 383 and 64 keys at a time, keys 0 to 255 and 256 to 383.
    for masked in tl.static_range(2):
        first = unmasked if masked else 0
        last = end if masked else unmasked
        for at in tl.range(first, last, BLOCK_N):
            k = k_blocks.load([batch, kv_head, at, 0]).reshape([BLOCK_N, K])
            v = v_blocks.load([batch, kv_head, at, 0]).reshape([BLOCK_N, K])
            column = at + tl.arange(0, BLOCK_N)[None, :]
            seen = (column <= row) & (column < t) if CAUSAL else column < t
            p = probabilities(q, k, lse, seen, BASE2, masked)
            ds = p * (tl.dot(do, v.T) - delta)
            dq = add_product(dq, ds.to(k.dtype), k)
    dq_ptr = head_of(dq_ptr, head, h, tl.cast(s, tl.int64) * h * K, K)
    store_rows(dq_ptr, dq * SCALE, start, s, h * K, BLOCK_M, K, K)


# launching


def options(kernel: str, x: Tensor) -> dict[str, int]:
    """Return the sizes for a kernel and x [b, h, s, k]; the interpreter, which is slow, has large blocks."""
    m, n, warps, stages, together = SIZES[kernel, 64 if x.shape[-1] <= 64 else 128]
    if not x.is_cuda:
        m, n = 128, 128
    elif x.element_size() > 2:
        m, n, warps, stages = 32, 32, 8, 1  # products of float32 and float64 take more registers
    return dict(BLOCK_M=m, BLOCK_N=n, TOGETHER=together, num_warps=warps, num_stages=stages)


def columns(x: Tensor) -> int:
    """Return the width of a block for x [b, h, s, k]: a power of 2, of at least 16."""
    return max(16, triton.next_power_of_2(x.shape[-1]))


def strides(*tensors: Tensor) -> list[int]:
    """Return the first three strides of each tensor [b, h, s, k]; elements of a row lie side by side."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def empty_heads(x: Tensor) -> Tensor:
    """Return a tensor of x's shape [b, h, s, k], a view of [b, s, h, k]: the heads of a token lie side by side."""
    b, h, s, k = x.shape
    return x.new_empty(b, s, h, k).transpose(1, 2)


def empty_rows(q: Tensor) -> Tensor:
    """Return a tensor for the log-sum-exp [b, h, s]: fp32, or float64 where q is."""
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def fits(*tensors: Tensor) -> bool:
    """Whether descriptors take the tensors [b, h, s, k]: 16 bits per element, 16-byte alignment, no padded columns."""
    return all(
        x.element_size() == 2
        and x.numel() > 0
        and x.shape[3] == columns(x)
        and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride % 8 == 0 for stride in x.stride()[:3])
        for x in tensors
    )


def blocks_of(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x [b, h, s, k] as blocks of rows of one head."""
    return TensorDescriptor.from_tensor(x, [1, 1, rows, x.shape[3]])


def flash1(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, h, s, k]; k, v [b, kv heads, t, k] -> o like q, log-sum-exp [b, h, s]; FlashAttention 1"""
    (b, h, s, width), t = q.shape, k.shape[2]
    o = q.new_zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    highest, total = torch.full_like(o[..., 0], -torch.inf), torch.zeros_like(o[..., 0])
    m, n, warps = (options("keys", q)[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps"))
    if o.numel():
        flash1_forward[(b * h,)](
            q, k, v, o, highest, total, s, t, h, k.shape[1], *strides(q, k, v),
            SCALE=scale, CAUSAL=causal, K=width, BLOCK_M=m, BLOCK_N=n, COLUMNS=columns(q),
            num_warps=warps, num_stages=1,
        )  # fmt: skip
    return empty_heads(q).copy_(o), highest + total.log()


def flash1_gradients(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what flash1 returns, and what it took and returned -> gradients of q, k, v"""
    (b, h, s, width), (_, kv_heads, t, _) = q.shape, k.shape
    dq, dk, dv = q.new_zeros(q.shape, dtype=lse.dtype), empty_heads(k), empty_heads(v)
    rows = base2_rows(do, o, lse, dlse)
    m, n, warps = (options("keys", q)[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps"))
    if k.numel():
        flash1_backward[(b * kv_heads,)](
            q, k, v, do, rows, dq, dk, dv, s, t, h, kv_heads, rows.shape[2], *strides(q, k, v, do),
            BASE2=scale * LOG2_E, SCALE=scale, CAUSAL=causal, K=width, BLOCK_M=m, BLOCK_N=n, COLUMNS=columns(q),
            num_warps=warps, num_stages=1,
        )  # fmt: skip
    return empty_heads(q).copy_(dq), dk, dv


def flash2(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, h, s, k]; k, v [b, kv heads, t, k] -> o like q, log-sum-exp [b, h, s]; by pointers"""
    (b, h, s, width), t = q.shape, k.shape[2]
    o, lse, chosen = empty_heads(q), empty_rows(q), options("forward", q)
    if o.numel():
        flash2_forward[(b * h * triton.cdiv(s, chosen["BLOCK_M"]),)](
            q, k, v, o, lse, s, t, b, h, k.shape[1], *strides(q, k, v),
            SCALE=scale * LOG2_E, CAUSAL=causal, K=width, COLUMNS=columns(q), **chosen,
        )  # fmt: skip
    return o, lse


def base2_rows(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor) -> Tensor:
    """do, o [b, h, s, k]; lse and its gradient [b, h, s] -> [b·h, 2, s, padded to blocks]; see row_sums"""
    b, h, s, k = o.shape
    rows, padded = 128 if do.is_cuda else 1024, triton.cdiv(s, 1024) * 1024
    found = lse.new_empty(b * h, 2, padded)
    if found.numel():
        row_sums[(b * h * padded // rows,)](
            do, o, lse, dlse, found, s, h, padded, *strides(do, o),
            K=k, ROWS=rows, COLUMNS=columns(o), num_warps=8,
        )  # fmt: skip
    return found


def flash2_gradients(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what flash2 returns, and what it took and returned -> gradients of q, k, v; by pointers"""
    (b, h, s, width), (_, kv_heads, t, _) = q.shape, k.shape
    dq, dk, dv = empty_heads(q), empty_heads(k), empty_heads(v)
    rows = base2_rows(do, o, lse, dlse)
    numbers = dict(BASE2=scale * LOG2_E, SCALE=scale, CAUSAL=causal, K=width, COLUMNS=columns(q))
    if dk.numel():
        chosen = options("keys", q)
        flash2_keys[(b * kv_heads * triton.cdiv(t, chosen["BLOCK_N"]),)](
            q, k, v, do, rows, dk, dv, s, t, b, h, kv_heads, rows.shape[2], *strides(q, k, v, do),
            **numbers, **chosen,
        )  # fmt: skip
    if dq.numel():
        chosen = options("queries", q)
        flash2_queries[(b * h * triton.cdiv(s, chosen["BLOCK_M"]),)](
            q, k, v, do, rows, dq, s, t, b, h, kv_heads, rows.shape[2], *strides(q, k, v, do),
            **numbers, **chosen,
        )  # fmt: skip
    return dq, dk, dv


def tma(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, h, s, k]; k, v [b, kv heads, t, k] -> o like q, log-sum-exp [b, h, s]; by descriptors of what fits"""
    (b, h, s, width), t = q.shape, k.shape[2]
    o, lse, chosen = empty_heads(q), empty_rows(q), options("forward", q)
    m, n = chosen["BLOCK_M"], chosen["BLOCK_N"]
    tma_forward[(b * h * triton.cdiv(s, m),)](
        blocks_of(q, m), blocks_of(k, n), blocks_of(v, n), o, lse, s, t, b, h, k.shape[1],
        SCALE=scale * LOG2_E, CAUSAL=causal, K=width, **chosen,
    )  # fmt: skip
    return o, lse


def tma_gradients(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what tma returns, and what it took and returned -> gradients of q, k, v; by descriptors"""
    (b, h, s, width), (_, kv_heads, t, _) = q.shape, k.shape
    dq, dk, dv = empty_heads(q), empty_heads(k), empty_heads(v)
    rows = base2_rows(do, o, lse, dlse)
    numbers = dict(BASE2=scale * LOG2_E, SCALE=scale, CAUSAL=causal, K=width)
    chosen = options("keys", q)
    m, n = chosen["BLOCK_M"], chosen["BLOCK_N"]
    tma_keys[(b * kv_heads * triton.cdiv(t, n),)](
        blocks_of(q, m), blocks_of(k, n), blocks_of(v, n), blocks_of(do, m), rows, dk, dv, s, t, b, h, kv_heads,
        rows.shape[2], **numbers, **chosen,
    )  # fmt: skip
    chosen = options("queries", q)
    m, n = chosen["BLOCK_M"], chosen["BLOCK_N"]
    tma_queries[(b * h * triton.cdiv(s, m),)](
        blocks_of(q, m), blocks_of(k, n), blocks_of(v, n), blocks_of(do, m), rows, dq, s, t, b, h, kv_heads,
        rows.shape[2], **numbers, **chosen,
    )  # fmt: skip
    return dq, dk, dv


def side_by_side(x: Tensor) -> Tensor:
    """Return x [b, h, s, k], copied only where the elements of a row do not lie side by side."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


# An operator of its own: torch.compile does not look into it, where addresses decide which kernel runs.
@torch.library.custom_op("flash_attention::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, h, s, k]; k, v [b, kv heads, t, k] -> o like q, a view of [b, s, h, k]; log-sum-exp [b, h, s]"""
    q, k, v = (side_by_side(x) for x in (q, k, v))
    return (tma if fits(q, k, v) else flash2)(q, k, v, causal, scale)


@attend.register_fake
def attend_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What attend returns, without its elements."""
    return empty_heads(q), empty_rows(q)


@torch.library.custom_op("flash_attention::attend_backward", mutates_args=())
def attend_backward(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of o and of the log-sum-exp, and what attend took and returned -> gradients of q, k, v"""
    do, o, q, k, v = (side_by_side(x) for x in (do, o, q, k, v))
    gradients = tma_gradients if fits(do, q, k, v) else flash2_gradients
    return gradients(do, o, lse.contiguous(), dlse.contiguous(), q, k, v, causal, scale)


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
    """As flash_attention; also return the logarithm of the sum of e^(scale·q·k) of each query, [b, h, s].

    From it, attention to several sets of keys can be merged: the weight of a set is e^(its log-sum-exp), divided by the
    sum of those of all sets. It is fp32 (float64 where q is), -inf for a query that sees no key, and gradients flow
    through it, too.
    """
    fine = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[::3] == k.shape[::3]
    if not fine or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        raise ValueError(f"shapes are {shapes}: must be [b, h, s, k] and twice [b, kv heads, t, k]; kv heads divide h")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(f"dtypes are {q.dtype}, {k.dtype}, {v.dtype}: must be alike, and one of {DTYPES}")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"{q.shape[2]} queries and {k.shape[2]} keys: causal attention needs as many keys as queries")
    if not 1 <= q.shape[3] <= 128:
        raise ValueError(f"the heads are {q.shape[3]} wide: must be 1 to 128")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}: must be positive")
    return FlashAttention.apply(q, k, v, causal, scale)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """Attend from q [b, h, s, k] to k, v [b, kv heads, t, k]: softmax(scale·q kᵀ) v, scale 1/√k if not given.

    Query head i uses key head i // (h / kv heads). If causal, query i sees keys 0 to i, and t must be s. Any strides,
    without a copy if the elements of a row lie side by side. The output [b, h, s, k] is a view of [b, s, h, k]:
    rearrange(o, "b h s k -> b s (h k)") copies nothing. Head widths of 64 and 128 are fast in 16 bits; all others up to
    128, and fp32 and float64, which is for tests, are right. Raises ValueError for what does not fit.
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


def cost(
    b: int, h: int, kv_heads: int, s: int, t: int, k: int, causal: bool, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """Bytes and FLOPs of forward, bytes and FLOPs of backward: all tensors once; two products, and five.

    Backward reads q, k, v, o, do and the log-sum-exp, and writes dq, dk, dv. Its two kernels compute seven products.
    """
    queries, keys, rows = b * h * s * k * dtype.itemsize, b * kv_heads * t * k * dtype.itemsize, b * h * s * 4
    flops = 4 * b * h * s * t * k // (2 if causal else 1)
    return 2 * queries + 2 * keys + rows, flops, 4 * queries + 4 * keys + rows, flops * 5 // 2


def ladder(*inputs: Tensor) -> dict[str, tuple[Callable, Callable]]:
    """Forward and backward of each rung. What does not fit descriptors is for pointers."""
    two = flash2, flash2_gradients
    return {"flash1": (flash1, flash1_gradients), "flash2": two, "tma": (tma, tma_gradients) if fits(*inputs) else two}


class Rung(torch.autograd.Function):
    """Attention by the functions of one rung: their outputs must be those of the others."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, rung: str) -> tuple[Tensor, Tensor]:
        ctx.scale = q.shape[3] ** -0.5
        o, lse = ladder(q, k, v)[rung][0](q, k, v, causal, ctx.scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.rung = causal, rung
        return o, lse

    @staticmethod
    def backward(ctx, do: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, o, lse = ctx.saved_tensors
        do, dlse = do.contiguous(), dlse.contiguous()
        gradients = ladder(q, k, v)[ctx.rung][1]
        return *gradients(do, o, lse, dlse, q, k, v, ctx.causal, ctx.scale), None, None


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, PyTorch's, and the inputs q [b, h, s, k], k, v [b, kv heads, t, k], in float64."""
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=torch.float64, device=device)

    def inputs(b: int, h: int, kv_heads: int, s: int, t: int, k: int) -> list[Tensor]:
        return [random(b, h, s, k), random(b, kv_heads, t, k), random(b, kv_heads, t, k)]

    def pair(what: str, given: list[Tensor], *more, view: Callable = lambda x: x):
        attend = lambda function: lambda *x: function(*map(view, x), *more)  # noqa: E731
        return what, attend(flash_attention_with_lse), attend(library), given

    large = [(2, 8, 2, 2048, 2048, 128), (1, 6, 3, 1999, 1999, 64), (1, 4, 4, 1025, 1025, 128)]
    for shape in (2, 2, 1, 130, 130, 64), (1, 2, 1, 150, 150, 128), *(large if device == "cuda" else []):
        yield pair("causal {} {} {} {} {} {}".format(*shape), inputs(*shape))
        yield pair("full {} {} {} {} {} {}".format(*shape), inputs(*shape), False)
    for rung in ladder(random(1, 1, 1, 1)):
        ours = lambda q, k, v, rung=rung: Rung.apply(q, k, v, True, rung)  # noqa: E731
        yield rung, ours, library, inputs(1, 2, 1, 140, 140, 64)
        if device == "cuda":
            yield rung, ours, library, inputs(1, 4, 2, 999, 999, 128)
    yield pair("more keys than queries", inputs(1, 2, 2, 33, 140, 64), False)
    yield pair("more queries than keys", inputs(1, 2, 1, 300, 5, 64), False)
    yield pair("narrow heads", inputs(1, 3, 1, 40, 40, 8))
    yield pair("heads of odd width", inputs(1, 2, 2, 20, 20, 33))
    yield pair("scale", inputs(1, 2, 2, 50, 50, 64), True, 0.7)
    yield pair("no keys", inputs(1, 2, 2, 5, 0, 64), False)
    yield pair("no queries", inputs(1, 2, 2, 0, 5, 64), False)
    projected = [random(2, 70, heads * 64) for heads in (2, 1, 1)]
    yield pair("views of projections", projected, view=lambda x: x.unflatten(2, (-1, 64)).transpose(1, 2))
    yield pair("every other element", inputs(1, 2, 2, 60, 60, 128), view=lambda x: x[:, :, ::2, ::2])
    loud = inputs(1, 1, 1, 500, 500, 64)  # many rows: only where the two highest scores are close do errors show
    yield pair("large scores", [loud[0] * 100, loud[1] * 100, loud[2]])


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
    """Compare with float64; exit if an error is above twice PyTorch's own, or what roundings cause if that is more.

    A score is off by half an eps of float32, times its size, and so is the log-sum-exp, which forward hands to
    backward: e^score is off by that factor. PyTorch's float64 is what all is compared with: ours may differ from it.
    """
    for dtype in DTYPES:
        if dtype == torch.bfloat16 and device == "cpu":
            continue  # Triton's interpreter cuts bits off instead of rounding
        eps, worst = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2, (0.0, 0.0, 0.0, "")
        for what, ours, plain, inputs in cases(device):
            scores = plain(*(x.to(dtype).double() for x in inputs))[1]  # the largest of a row, nearly
            largest = max([0.0, *scores[scores.isfinite()].abs().flatten().tolist()])
            least = max(torch.finfo(dtype).eps / 4, 5e-13, eps * largest)
            for mine, theirs in errors(ours, plain, inputs, dtype):
                worst = max(worst, (mine / max(theirs, least), mine, theirs, what))
        ratio, mine, theirs, what = worst
        print(f"{str(dtype)[6:]:10} worst error {mine:.1e}, PyTorch's {theirs:.1e}  ({what})", flush=True)
        if not ratio <= 2:
            raise SystemExit(f"the error is {ratio:.1f} times PyTorch's")
    if device == "cuda":
        inputs = inputs_of(1, 8, 2, 4096, 128)
        do = torch.randn_like(inputs[0])
        forward, backward = flash_attention_with_lse, lambda *x: torch.autograd.grad(flash_attention(*x), x, do)
        if differing(partial(forward, *inputs)) or differing(partial(backward, *inputs)):
            raise SystemExit("runs on the same input differ")


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
        if not suffix:
            runs |= {rung: lambda x=inputs, rung=rung: Rung.apply(*x, True, rung)[:1] for rung in ladder(*inputs)}
        both = {by: lambda run=run, x=inputs, do=do: torch.autograd.grad(run(), x, do) for by, run in runs.items()}
        _, flops, _, flops_backward = cost(b, h, kv_heads, s, s, k, True, torch.bfloat16)
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
# Copy:     DTYPES, LOG2_E, SIZES, COUNTS, widen, assign, head_of, load_rows, store_rows, add_product, reach, add_keys,
#           finish, probabilities, flash2_forward, row_sums, flash2_keys, flash2_queries, tma_forward, tma_keys,
#           tma_queries, options, columns, strides, empty_heads, empty_rows, fits, blocks_of, flash2, base2_rows,
#           flash2_gradients, tma, tma_gradients, side_by_side, attend, attend_shapes, attend_backward,
#           attend_backward_shapes, FlashAttention, flash_attention_with_lse, flash_attention (call flash_attention on q
#           [b, h, s, k] and k, v [b, kv heads, t, k]; unlike torch's scaled_dot_product_attention, it is causal unless
#           causal=False)
