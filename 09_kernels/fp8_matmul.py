"""Matrix multiplication in fp8: scales bring each operand into the few values that 8 bits can have.

A group of elements shares a scale, its largest magnitude (amax) over the largest of the format: x ~ x8 · scale. The
larger the group, the more one outlier costs the others; the smaller, the more work has the matmul:
    tensorwise   one scale per tensor                             C = scale_a scale_b (A8 B8ᵀ)
    rowwise      one per row of A and of B                        C_ij = scale_ai scale_bj (A8 B8ᵀ)_ij
    blockwise    one per 128 elements of a row, or per 128 x 128  C = Σ over blocks of 128 of k of scaled products
Hopper's tensor cores add up fp8 products in about 14 bits; blockwise adds its sums of 128 products in fp32.

Parent:   none
Run:      python 09_kernels/fp8_matmul.py
Source:   Micikevicius et al. 2022, arXiv:2209.05433; DeepSeek-AI 2024, arXiv:2412.19437, section 3.3 (3.3.2: 14 bits)
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

# ------------------------------------------------------------------------------------------------------------ config
E4M3 = torch.float8_e4m3fn  # 3 bits of mantissa; ends at 448
E5M2 = torch.float8_e5m2  # 2 bits of mantissa; ends at 57,344
OUTPUTS = torch.bfloat16, torch.float32
BLOCK = 128  # the side of a block that shares a scale
LEAST = 2.0**-100  # amax counts as at least that: its inverse stays finite
TILE = 128, 256, 128  # rows, columns of c that a program computes, and how many of k it multiplies at a time
GROUP = 8  # rows of tiles that programs of one time share
PEAK = 1979e12  # FLOP/s of an H100 or H200 in fp8
BENCHES = {  # in bursts, and after 100 ms of the same: at its power limit a GPU lowers its clocks
    "": triton.testing.do_bench_cudagraph,
    ", sustained": partial(triton.testing.do_bench, warmup=100, rep=100),
}


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def magnitude(x):
    """Bits of |x|, as an integer: integers are in the order of the floats, then comes inf, then NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, LIMIT: tl.constexpr, LEAST: tl.constexpr):
    """Return amax / LIMIT and its inverse, each rounded once; amax is given by its bits."""
    amax = tl.maximum(bits.to(tl.float32, bitcast=True), LEAST, propagate_nan=tl.PropagateNan.ALL)
    limit = tl.full(amax.shape, LIMIT, tl.float32)
    return tl.div_rn(amax, limit), tl.div_rn(limit, amax)


@triton.jit
def to_fp8(x, inverse, dtype: tl.constexpr):
    """Scale x and round it to nearest, ties to even. The conversion saturates: finite values stay finite, NaN NaN."""
    return (x.to(tl.float32) * inverse).to(dtype)


@triton.jit
def read_tile(x_ptr, tile, m, k, x_stride, BLOCK: tl.constexpr):
    """Return a tile of x [m, k], 0 outside, and its rows and columns."""
    across = tl.cdiv(k, BLOCK)
    row = (tile // across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = (tile % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < m)[:, None] & (column < k)[None, :]
    return tl.load(x_ptr + row[:, None] * x_stride + column[None, :], inside, 0), row, column


@triton.jit
def write_tile(x, x_ptr, row, column, m, k, x_stride):
    """Write a tile of x [m, k]."""
    inside = (row < m)[:, None] & (column < k)[None, :]
    tl.store(x_ptr + row[:, None] * x_stride + column[None, :], x, inside)


@triton.jit
def amax_kernel(x_ptr, rows_ptr, columns_ptr, m, k, x_stride, TENSOR: tl.constexpr, BLOCK: tl.constexpr):
    """Raise the bits of amax to those of a tile: of x [m, k], or of each row and each column.

    The largest of integers is the same in whatever order programs arrive.
    """
    x, row, column = read_tile(x_ptr, tl.program_id(0), m, k, x_stride, BLOCK)
    bits = magnitude(x)
    if TENSOR:
        tl.atomic_max(rows_ptr, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    else:
        tl.atomic_max(rows_ptr + row, tl.max(bits, 1), row < m, sem="relaxed")
        tl.atomic_max(columns_ptr + column, tl.max(bits, 0), column < k, sem="relaxed")


@triton.jit
def cast_kernel(
    x_ptr, rows_ptr, columns_ptr, y_ptr, scale_ptr, t_ptr, t_scale_ptr, m, k, x_stride, y_stride, t_stride,
    TENSOR: tl.constexpr, LIMIT: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of x [m, k] in fp8, and the same transposed, with scales per tensor or per row of each; the scales.

    Hopper multiplies fp8 operands with k contiguous alone. A linear y = x wᵀ, and its gradients dx = dy w and
    dw = dyᵀ x, therefore read each operand as it is and transposed. rows_ptr and columns_ptr have the bits of amax.
    A group of zeros stays zeros. NaN or inf makes the scale NaN or inf, and all of the group NaN once it is multiplied
    out: what has diverged is seen.
    """
    tile, across = tl.num_programs(0) - 1 - tl.program_id(0), tl.cdiv(k, BLOCK)  # the last are still in the L2
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x, row, column = read_tile(x_ptr, tile, m, k, x_stride, BLOCK)
    if TENSOR:
        scale, inverse = scale_of(tl.load(rows_ptr), LIMIT, LEAST)
        y = to_fp8(x, inverse, dtype)
        t = y
        if tile == 0:
            tl.store(scale_ptr, scale)
    else:
        scale, inverse = scale_of(tl.load(rows_ptr + row, row < m, 0), LIMIT, LEAST)
        t_scale, t_inverse = scale_of(tl.load(columns_ptr + column, column < k, 0), LIMIT, LEAST)
        y = to_fp8(x, inverse[:, None], dtype)
        t = to_fp8(x, t_inverse[None, :], dtype)
        if tile % across == 0:
            tl.store(scale_ptr + row, scale, row < m)
        if tile < across:
            tl.store(t_scale_ptr + column, t_scale, column < k)
    write_tile(y, y_ptr, row, column, m, k, y_stride)
    write_tile(tl.trans(t), t_ptr, column, row, k, m, t_stride)


@triton.jit
def blocks_kernel(
    x_ptr, y_ptr, scale_ptr, t_ptr, t_scale_ptr, m, k, x_stride, y_stride, t_stride,
    SQUARE: tl.constexpr, LIMIT: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of x [m, k] in fp8, the same transposed, and their scales: of the tile, or of each row of each.

    scale [m / BLOCK, k / BLOCK], or by columns [m, k / BLOCK] and [k, m / BLOCK]: neighbours are loaded together.
    """
    tile, across = tl.program_id(0), tl.cdiv(k, BLOCK)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x, row, column = read_tile(x_ptr, tile, m, k, x_stride, BLOCK)
    bits = magnitude(x)
    if SQUARE:
        scale, inverse = scale_of(tl.max(tl.max(bits, 1), 0), LIMIT, LEAST)
        y = to_fp8(x, inverse, dtype)
        t = y
        tl.store(scale_ptr + tile, scale)
    else:
        scale, inverse = scale_of(tl.max(bits, 1), LIMIT, LEAST)
        t_scale, t_inverse = scale_of(tl.max(bits, 0), LIMIT, LEAST)
        y = to_fp8(x, inverse[:, None], dtype)
        t = to_fp8(x, t_inverse[None, :], dtype)
        tl.store(scale_ptr + (tile % across).to(tl.int64) * m + row, scale, row < m)
        tl.store(t_scale_ptr + (tile // across).to(tl.int64) * k + column, t_scale, column < k)
    write_tile(y, y_ptr, row, column, m, k, y_stride)
    write_tile(tl.trans(t), t_ptr, column, row, k, m, t_stride)


@triton.jit
def locate(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return where the tile begins in [m, n]: GROUP rows of tiles are finished, a column at a time, before the next."""
    across = tl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * across) * GROUP
    high = min(tl.cdiv(m, BLOCK_M) - first, GROUP)  # the last group may have fewer rows of tiles
    within = tile % (GROUP * across)
    return (first + within % high) * BLOCK_M, within // high * BLOCK_N


@triton.jit(do_not_specialize=["m", "n", "k"])  # one compilation for all sizes
def matmul_kernel(
    a, b, c, a_scale_ptr, b_scale_ptr, m, n, k,
    ROWWISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute every programs-th tile of c [m, n]; a [m, k], b [n, k] and c are descriptors: the hardware moves blocks.

    Loads run ahead, from one tile into the next. A tile is stored in two halves, which need half the shared memory.
    """
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        top, left = locate(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, k, BLOCK_K):
            total = tl.dot(a.load([top, start]), b.load([left, start]).T, total)
        if ROWWISE:
            row, column = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
            total *= tl.load(a_scale_ptr + row, row < m, 0)[:, None]
            total *= tl.load(b_scale_ptr + column, column < n, 0)[None, :]
        else:
            total *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
        halves = total.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        c.store([top, left], halves[0].to(c.dtype))
        c.store([top, left + BLOCK_N // 2], halves[1].to(c.dtype))


@triton.jit(do_not_specialize=["m", "n", "k"])  # one compilation for all sizes
def blockwise_kernel(
    a, b, c, a_scale_ptr, b_scale_ptr, m, n, k, a_stride, b_stride,
    SQUARE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of c [m, n]: what BLOCK of k sum up to is scaled, and added in fp32 registers.

    In Triton all warps wait for their product, and then all of them scale. Scales of a [k / BLOCK, m]; of b
    [n / BLOCK, k / BLOCK] if SQUARE, else [k / BLOCK, n].
    """
    top, left = locate(tl.program_id(0), m, n, BLOCK, BLOCK, GROUP)
    row, column, blocks = top + tl.arange(0, BLOCK), left + tl.arange(0, BLOCK), tl.cdiv(k, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for block in tl.range(0, blocks):
        scale = tl.load(a_scale_ptr + block * a_stride + row, row < m, 0)[:, None]
        if SQUARE:
            scale *= tl.load(b_scale_ptr + left // BLOCK * b_stride + block)
        else:
            scale = scale * tl.load(b_scale_ptr + block * b_stride + column, column < n, 0)[None, :]
        total += tl.dot(a.load([top, block * BLOCK]), b.load([left, block * BLOCK]).T) * scale
    c.store([top, left], total.to(c.dtype))


# names that differ between Triton 3.6 and later
COPY_IN = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
COPY_OUT = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Make mbarriers for NUMBER blocks: a phase of one ends when COUNT have arrived, and all its bytes."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], BARRIER)
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def load_blocks(
    a, b, a_scale, b_scale, a_smem, b_smem, a_scale_smem, b_scale_smem, full, empty, m, n, k,
    SQUARE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The warp that loads blocks of a and b, and their scales, of all tiles of this program, where there is room."""
    BYTES: gl.constexpr = 3 * (a.block_type.nbytes + a_scale.block_type.nbytes) + b.block_type.nbytes
    blocks, count = gl.cdiv(k, BLOCK), 0
    for tile in range(gl.program_id(0), gl.cdiv(m, 192) * gl.cdiv(n, BLOCK), gl.num_programs(0)):
        top, left = locate(tile, m, n, 192, BLOCK, GROUP)
        for block in range(blocks):
            stage = count % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES) & 1 ^ 1)
            mbarrier.expect(ready, BYTES if SQUARE else BYTES + 4 * BLOCK)
            for part in gl.static_range(3):
                COPY_IN(a, [top + 64 * part, block * BLOCK], ready, a_smem.index(stage * 3 + part))
                COPY_IN(a_scale, [block, top + 64 * part], ready, a_scale_smem.index(stage * 3 + part))
            COPY_IN(b, [left, block * BLOCK], ready, b_smem.index(stage))
            if not SQUARE:
                COPY_IN(b_scale, [block, left], ready, b_scale_smem.index(stage))
            count += 1


@gluon.jit
def multiply_blocks(
    c, c_smem, b_scale, a_smem, b_smem, a_scale_smem, b_scale_smem, full, empty, m, n, k, b_stride,
    PART: gl.constexpr, SQUARE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A group of four warps: 64 of the 192 rows of each tile."""
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])  # which thread has which element
    blocks, count = gl.cdiv(k, BLOCK), 0
    for tile in range(gl.program_id(0), gl.cdiv(m, 192) * gl.cdiv(n, BLOCK), gl.num_programs(0)):
        top, left = locate(tile, m, n, 192, BLOCK, GROUP)
        total = gl.zeros([64, BLOCK], gl.float32, C)
        for block in range(blocks):
            stage = count % STAGES
            if SQUARE:
                square = gl.load(b_scale + left // BLOCK * b_stride + block)
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            product = gl.zeros([64, BLOCK], gl.float32, C)
            a, b = a_smem.index(stage * 3 + PART), b_smem.index(stage).permute((1, 0))
            product = warpgroup_mma(a, b, product, use_acc=False, is_async=True)
            scale = a_scale_smem.index(stage * 3 + PART).reshape([64]).load(gl.SliceLayout(1, C))
            product = warpgroup_mma_wait(0, deps=[product])
            if SQUARE:
                mbarrier.arrive(empty.index(stage), count=1)
                total += product * (scale * square)[:, None]
            else:  # loaded late: registers for it are free when the product is there
                columns = b_scale_smem.index(stage).reshape([BLOCK]).load(gl.SliceLayout(0, C))
                total += product * (scale[:, None] * columns[None, :])
                mbarrier.arrive(empty.index(stage), count=1)
            count += 1
        tma.store_wait(0)  # the tile before this one has left shared memory
        c_smem.store(total.to(c.dtype))
        fence_async_shared()  # or the TMA would read what was there before
        COPY_OUT(c, [top + 64 * PART, left], c_smem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "n", "k", "b_stride"])
def blockwise_gluon_kernel(
    a, b, c, a_scale, b_scale, m, n, k, b_stride,
    SQUARE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute every programs-th tile of c [m, n], 192 x 128, as blockwise_kernel does. All but m, n, k are descriptors.

    Scales of a [k / BLOCK, m]; of b [k / BLOCK, n], or if SQUARE, [n / BLOCK, k / BLOCK], by its address.
    """
    a_smem = gl.allocate_shared_memory(a.dtype, [STAGES * 3] + a.block_type.shape, a.layout)
    b_smem = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    c_smem = gl.allocate_shared_memory(c.dtype, [3] + c.block_type.shape, c.layout)
    a_scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES * 3, 1, 64], a_scale.layout)
    b_scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK], a_scale.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 3)
    gl.warp_specialize([
        (multiply_blocks, (
            c, c_smem.index(0), b_scale, a_smem, b_smem, a_scale_smem, b_scale_smem, full, empty, m, n, k, b_stride,
            0, SQUARE, BLOCK, STAGES, GROUP,
        )),
        (multiply_blocks, (
            c, c_smem.index(1), b_scale, a_smem, b_smem, a_scale_smem, b_scale_smem, full, empty, m, n, k, b_stride,
            1, SQUARE, BLOCK, STAGES, GROUP,
        )),
        (multiply_blocks, (
            c, c_smem.index(2), b_scale, a_smem, b_smem, a_scale_smem, b_scale_smem, full, empty, m, n, k, b_stride,
            2, SQUARE, BLOCK, STAGES, GROUP,
        )),
        (load_blocks, (
            a, b, a_scale, b_scale, a_smem, b_smem, a_scale_smem, b_scale_smem, full, empty, m, n, k,
            SQUARE, BLOCK, STAGES, GROUP,
        )),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip


def processors(x: Tensor) -> int:
    """Return how many programs run at a time: one per SM, or two in the interpreter, so that each has several tiles."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def rounds(tiles: int, x: Tensor) -> tuple[int]:
    """As few programs as need no more rounds: 2,048 tiles take 132 SMs 16 rounds, and 128 SMs, too."""
    return (triton.cdiv(tiles, triton.cdiv(tiles, processors(x))),)


def rows_of_16_bytes(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty [m, k] whose rows begin at multiples of 16 bytes, as descriptors need."""
    return torch.empty(m, k + -k % (16 // dtype.itemsize), dtype=dtype, device=device)[:, :k]


def quantize_operands(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, tuple[int], dict[str, object]]:
    """x [m, k] -> x with the elements of a row side by side, empty fp8 [m, k] and [k, m], the grid, what kernels take.

    Raises ValueError for what they do not take.
    """
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x is {list(x.shape)} {x.dtype}: must be [m, k] in bfloat16, float16 or float32")
    if dtype not in (E4M3, E5M2):
        raise ValueError(f"dtype is {dtype}: must be {E4M3} or {E5M2}")
    x = x if x.stride(1) == 1 else x.contiguous()
    y, t = (rows_of_16_bytes(*shape, dtype, x.device) for shape in (x.shape, x.shape[::-1]))
    tiles = triton.cdiv(x.shape[0], BLOCK) * triton.cdiv(x.shape[1], BLOCK)
    options = dict(LIMIT=torch.finfo(dtype).max, LEAST=LEAST, BLOCK=BLOCK)
    return x, y, t, (tiles,), options


def find_amax(x: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Write the bits of amax of x: of all of it into rows [], or of each row and each column into rows and columns."""
    (m, k), tensor = x.shape, rows.dim() == 0
    grid = (triton.cdiv(m, BLOCK) * triton.cdiv(k, BLOCK),)
    amax_kernel[grid](x, rows, columns, m, k, x.stride(0), TENSOR=tensor, BLOCK=BLOCK, num_warps=8)


def quantize_tensor(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [m, k] -> x8 [m, k], its scale [], x8 transposed [k, m], the same scale; x ~ x8 · scale"""
    x, y, t, grid, options = quantize_operands(x, dtype)
    scale, amax = torch.ones((), device=x.device), torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel():
        find_amax(x, amax, amax)
        strides = x.stride(0), y.stride(0), t.stride(0)
        cast_kernel[grid](x, amax, amax, y, scale, t, scale, *x.shape, *strides, TENSOR=True, **options, num_warps=8)
    return y, scale, t, scale


def quantize_rows(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [m, k] -> x8 [m, k], scales of its rows [m]; the same of x transposed: [k, m], [k], scaled on its own"""
    x, y, t, grid, options = quantize_operands(x, dtype)
    scale, t_scale = (torch.ones(size, device=x.device) for size in x.shape)
    rows, columns = (torch.zeros(size, dtype=torch.int32, device=x.device) for size in x.shape)
    if x.numel():
        find_amax(x, rows, columns)
        strides = x.stride(0), y.stride(0), t.stride(0)
        cast_kernel[grid](
            x, rows, columns, y, scale, t, t_scale, *x.shape, *strides, TENSOR=False, **options, num_warps=8
        )
    return y, scale, t, t_scale


def quantize_blocks(x: Tensor, height: int = 1, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [m, k] -> x8 [m, k], a scale per height x 128 elements; the same of x transposed: [k, m]

    height 1: scales [m, k/128] and [k, m/128], stored by columns; 128: scales [m/128, k/128], and those transposed.
    """
    if height not in (1, BLOCK):
        raise ValueError(f"height is {height}: must be 1 or {BLOCK}")
    x, y, t, grid, options = quantize_operands(x, dtype)
    (m, k), (high, wide), square = x.shape, (triton.cdiv(size, BLOCK) for size in x.shape), height == BLOCK
    scale = torch.empty(*((high, wide) if square else (wide, m)), device=x.device)
    t_scale = scale if square else torch.empty(high, k, device=x.device)
    if x.numel():
        strides = x.stride(0), y.stride(0), t.stride(0)
        blocks_kernel[grid](x, y, scale, t, t_scale, m, k, *strides, SQUARE=square, **options, num_warps=4)
    return y, scale if square else scale.T, t, t_scale.T


def for_descriptors(x: Tensor) -> Tensor:
    """Return x where its rows begin at multiples of 16 bytes, else a copy."""
    if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return rows_of_16_bytes(*x.shape, x.dtype, x.device).copy_(x)


def prepare(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, shapes: list[tuple[list, list]]
) -> tuple[Tensor, Tensor, Tensor]:
    """a [m, k], b [n, k] -> both as descriptors need them, c [m, n]: 0 if k is.

    Raises ValueError where dtypes, shapes, or those of the scales do not fit.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"shapes are {list(a.shape)} and {list(b.shape)}: must be [m, k] and [n, k]")
    if not {a.dtype, b.dtype} <= {E4M3, E5M2} or dtype not in OUTPUTS:
        raise ValueError(f"dtypes are {a.dtype} and {b.dtype}, of the result {dtype}: must be fp8 and one of {OUTPUTS}")
    found = list(a_scale.shape), list(b_scale.shape)
    if found not in shapes or {a_scale.dtype, b_scale.dtype} != {torch.float32}:
        wanted = " or ".join(f"{x} and {y}" for x, y in shapes)
        raise ValueError(f"scales are {found[0]} and {found[1]}: must be {wanted}, in float32")
    c = rows_of_16_bytes(len(a), len(b), dtype, a.device)
    return for_descriptors(a), for_descriptors(b), c if a.shape[1] else c.zero_()


def matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, c: Tensor) -> Tensor:
    """Launch matmul_kernel for prepared operands; scales [] or [m] and [n]."""
    (m, n), k, (block_m, block_n, block_k) = c.shape, a.shape[1], TILE
    stages = 4 if c.dtype == torch.bfloat16 else 3  # half a tile of c waits in shared memory beside them
    if c.numel() and k:
        grid = rounds(triton.cdiv(m, block_m) * triton.cdiv(n, block_n), a)
        matmul_kernel[grid](
            TensorDescriptor.from_tensor(a, [block_m, block_k]), TensorDescriptor.from_tensor(b, [block_n, block_k]),
            TensorDescriptor.from_tensor(c, [block_m, block_n // 2]),
            a_scale.contiguous(), b_scale.contiguous(), m, n, k,
            ROWWISE=a_scale.dim() == 1, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=GROUP,
            num_warps=8, num_stages=stages,
        )  # fmt: skip
    return c.contiguous()


def matmul_tensorwise(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a [m, k], b [n, k] in fp8, scales [] -> (a · a_scale) (b · b_scale)ᵀ [m, n] in bfloat16 or float32"""
    a, b, c = prepare(a, a_scale, b, b_scale, dtype, [([], [])])
    return matmul(a, a_scale, b, b_scale, c)


def matmul_rowwise(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a [m, k], b [n, k] in fp8, scales [m] and [n] -> their product [m, n] in bfloat16 or float32"""
    a, b, c = prepare(a, a_scale, b, b_scale, dtype, [([len(a)], [len(b)])])
    return matmul(a, a_scale, b, b_scale, c)


def prepare_blocks(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool]:
    """The same for blockwise products; the scales side by side as the kernels load them; whether b has squares."""
    blocks = triton.cdiv(a.shape[-1], BLOCK)
    shapes = [([len(a), blocks], [triton.cdiv(len(b), BLOCK), blocks]), ([len(a), blocks], [len(b), blocks])]
    a, b, c = prepare(a, a_scale, b, b_scale, dtype, shapes)
    square = len(b_scale) == triton.cdiv(len(b), BLOCK)
    return a, b, c, for_descriptors(a_scale.T), for_descriptors(b_scale if square else b_scale.T), square


def matmul_blockwise_triton(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """As matmul_blockwise, in Triton: it runs anywhere."""
    a, b, c, a_scale, b_scale, square = prepare_blocks(a, a_scale, b, b_scale, dtype)
    if c.numel() and a.shape[1]:
        blockwise_kernel[(triton.cdiv(len(a), BLOCK) * triton.cdiv(len(b), BLOCK),)](
            *(TensorDescriptor.from_tensor(x, [BLOCK, BLOCK]) for x in (a, b, c)), a_scale, b_scale,
            *c.shape, a.shape[1], a_scale.stride(0), b_scale.stride(0),
            SQUARE=square, BLOCK=BLOCK, GROUP=GROUP, num_warps=8, num_stages=3,
        )  # fmt: skip
    return c.contiguous()


def blocks_of(x: Tensor, rows: int, columns: int) -> GluonDescriptor:
    """Describe x as blocks, which tensor cores read where TMA puts them; lines of scales lie there as they are."""
    dtype = {1: gl.float8e4nv, 2: gl.bfloat16, 4: gl.float32}[x.element_size()]  # only its size matters
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    layout = plain if rows == 1 else gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return GluonDescriptor.from_tensor(x, [rows, columns], layout)


def matmul_blockwise_gluon(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """As matmul_blockwise, in Gluon: for GPUs of compute capability 9.0. Equal to Triton's to the bit."""
    a, b, c, a_scale, b_scale, square = prepare_blocks(a, a_scale, b, b_scale, dtype)
    if c.numel() and a.shape[1]:
        blockwise_gluon_kernel[rounds(triton.cdiv(len(a), 192) * triton.cdiv(len(b), BLOCK), a)](
            blocks_of(a, 64, BLOCK), blocks_of(b, BLOCK, BLOCK), blocks_of(c, 64, BLOCK), blocks_of(a_scale, 1, 64),
            b_scale if square else blocks_of(b_scale, 1, BLOCK), *c.shape, a.shape[1], b_scale.stride(0),
            SQUARE=square, BLOCK=BLOCK, STAGES=3, GROUP=GROUP, num_warps=4,
        )  # fmt: skip
    return c.contiguous()


def matmul_blockwise(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a [m, k], b [n, k] in fp8 -> their product [m, n] in bfloat16 or float32; sums of 128 of k are added in fp32.

    a_scale [m, k/128]; b_scale [n/128, k/128] (forward, gradient of the input) or [n, k/128] (gradient of the weight).
    """
    hopper = a.is_cuda and torch.cuda.get_device_capability(a.device) == (9, 0)
    return (matmul_blockwise_gluon if hopper else matmul_blockwise_triton)(a, a_scale, b, b_scale, dtype)


# --------------------------------------------------------------------------------------------------------- reference
def quantize(x: Tensor, height: int, width: int, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """x [m, k] -> x8, a scale per height x width elements, in plain PyTorch; divisors are tensors: rounded once."""
    (m, k), x = x.shape, x.float()
    groups = torch.nn.functional.pad(x, (0, -k % width, 0, -m % height)).unflatten(1, (-1, width))
    amax = groups.unflatten(0, (-1, height)).abs().amax((1, 3)).clamp_min(LEAST)
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    inverse = (limit / amax).repeat_interleave(height, 0)[:m].repeat_interleave(width, 1)[:, :k]
    return (x * inverse).clamp(-limit[0, 0], limit[0, 0]).to(dtype), amax / limit


def quantize_reference(x: Tensor, kind: str, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What quantize_tensor, quantize_rows, quantize_blocks with height 1 and 128 return."""
    found = []
    for y in x, x.T:
        height, width = {"tensor": y.shape, "rows": (1, y.shape[1]), "lines": (1, BLOCK), "blocks": (BLOCK, BLOCK)}[
            kind
        ]
        values, scale = quantize(y, height, width, dtype)
        found += values, scale[0, 0] if kind == "tensor" else scale[:, 0] if kind == "rows" else scale
    return tuple(found)


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """x [m, k] in fp8, scale [], [m], [m, k/128] or [m/128, k/128] -> x · scale in float64"""
    if scale.dim() == 2:
        scale = scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
        scale = scale if len(scale) == len(x) else scale.repeat_interleave(BLOCK, 0)[: len(x)]
    return x.double() * (scale[:, None] if scale.dim() == 1 else scale).double()


def reference(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """The product in float64."""
    return dequantize(a, a_scale) @ dequantize(b, b_scale).T


def scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool = False) -> Tensor:
    """PyTorch's own, for sizes that are multiples of 128; fast: tensor cores add up all of k, in fewer bits.

    Squares need a k that is a multiple of 512: cuBLAS reads their scales with a stride of so many, and PyTorch has not
    always said so (pytorch/pytorch#166752): results were wrong without an error.
    """
    if a_scale.dim() == 1:
        a_scale, b_scale = a_scale[:, None], b_scale[None, :]
    elif a_scale.dim() == 2:
        lines = len(b_scale) == len(b)
        a_scale, b_scale = a_scale.T.contiguous().T, b_scale.T.contiguous() if lines else b_scale.contiguous().T
    return torch._scaled_mm(a, b.T, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


def cost(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that move if a, b, in fp8, and c move once, and FLOPs."""
    return m * k + k * n + m * n * dtype.itemsize, 2 * m * n * k


def quantizers() -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    """Ours, by the name of their reference."""
    return {
        "tensor": quantize_tensor,
        "rows": quantize_rows,
        "lines": lambda x, dtype=E4M3: quantize_blocks(x, 1, dtype),
        "blocks": lambda x, dtype=E4M3: quantize_blocks(x, BLOCK, dtype),
    }


def ladder() -> dict[str, tuple[Callable[..., Tensor], str, str]]:
    """The matmuls, and how each of its operands is quantized."""
    return {
        "tensorwise": (matmul_tensorwise, "tensor", "tensor"),
        "rowwise": (matmul_rowwise, "rows", "rows"),
        "blockwise": (matmul_blockwise, "lines", "blocks"),
        "blockwise, dw": (matmul_blockwise, "lines", "lines"),
    }


def inputs(device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what is quantized: in the interpreter, which rounds wrongly to fp8, powers of two, whose fp8 is exact."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        x = torch.randn(*shape, device=device, generator=generator)
        exact = torch.randint(-6, 7, shape, device=device, generator=generator).float().exp2().copysign(x)
        return (exact if device == "cpu" else x).bfloat16()

    for m, k in (300, 200), (1, 1), (3, 257), *([(4096, 14336)] if device == "cuda" else []):
        yield f"{m} x {k}", random(m, k)
    yield "strided", random(200, 300)[::2, 3:150]
    yield "transposed", random(30, 140).T
    yield "large", random(140, 260) * 2.0**60
    yield "small", random(140, 260) * 2.0**-60
    yield "zeros", torch.zeros(4, 5, device=device).bfloat16()
    if device != "cpu":
        yield "all magnitudes", random(140, 260) * torch.logspace(-120, 120, 260, 2.0, device=device).bfloat16()
        x = random(300, 260)
        x[7, 9], x[130, 140], x[5, 200] = float("nan"), float("inf"), -float("inf")
        yield "NaN and inf", x


def cases(device: str) -> Iterator[tuple[str, Tensor, Tensor, torch.dtype]]:
    """Yield what is multiplied, a [m, k] and b [n, k], and the dtype of a in fp8: that of gradients may be e5m2."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        """Rows of different magnitudes, as activations have."""
        x = torch.randn(*shape, device=device, generator=generator)
        return (x * torch.randn(shape[0], 1, device=device, generator=generator).exp()).bfloat16()

    large = [(4096, 4096, 4096), (2048, 1024, 14336)] if device == "cuda" else []
    for m, n, k in (300, 400, 500), (1, 1, 1), (130, 3, 33), (3, 300, 130), *large:
        yield f"{m} x {n} x {k}", random(m, k), random(n, k), E4M3
    yield "a in e5m2", random(130, 260), random(140, 260), E5M2


# ----------------------------------------------------------------------------------------------------------- measure
def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor; inf where one has NaN or inf and the other has not."""
    finite = exact.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return float("inf")
    return ((actual - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-300)).item()


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit; all NaNs count as one."""
    wide = [x.float().flatten() for x in (a, b)]  # has a value for each of fp8
    bits = [torch.where(x.isnan(), torch.nan, x).view(torch.int32) for x in wide]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def check_quantizers(device: str) -> None:
    """Compare values, scales, and those of the transposed, with plain PyTorch's: equal to the bit."""
    for kind, ours in quantizers().items():
        for dtype in E4M3, E5M2:
            names = []
            for what, x in inputs(device):
                pairs = zip(ours(x, dtype), quantize_reference(x, kind, dtype), strict=True)
                if wrong := [i for i, (mine, right) in enumerate(pairs) if not same(mine, right)]:
                    raise SystemExit(f"quantize {kind} {dtype}, {what}: results {wrong} differ from PyTorch's")
                names.append(what)
            print(f"quantize {kind:6} {str(dtype)[6:]:15} equal to the bit  ({', '.join(names)})", flush=True)


def check_matmul(name: str, dtype: torch.dtype, device: str) -> None:
    """Compare a matmul with float64 of the same fp8 operands; exit if its error is above twice the largest of three.

    These are PyTorch's own, of _scaled_mm or of dequantized operands in fp32; a rounding of the result; and that of a
    sum of k terms in fp32, or in tensor cores, which keep about 14 bits of it: 2^-12.
    """
    (ours, *kinds), worst = ladder()[name], (0.0, 0.0, 0.0, "")
    for what, a, b, low in cases(device):
        a, a_scale, *_ = quantize_reference(a, kinds[0], low)
        b, b_scale, *_ = quantize_reference(b, kinds[1])
        exact = reference(a, a_scale, b, b_scale)
        whole, blockwise = all(size % BLOCK == 0 for size in (*a.shape, len(b))), "blockwise" in name
        if device == "cuda" and whole and not (blockwise and dtype == torch.float32):
            plain = scaled_mm(a, a_scale, b, b_scale, fast=not blockwise)  # adds up as ours does
        else:
            plain = (dequantize(a, a_scale).float() @ dequantize(b, b_scale).float().T).to(dtype)
        mine, theirs = (relative_error(c, exact) for c in (ours(a, a_scale, b, b_scale, dtype), plain))
        sums = 2**-12 if device == "cuda" else a.shape[1] ** 0.5 * torch.finfo(torch.float32).eps / 4
        worst = max(worst, (mine / max(theirs, sums, torch.finfo(dtype).eps / 4), mine, theirs, what))
    ratio, mine, theirs, what = worst
    print(f"{name:24} {str(dtype)[6:]:10} worst error {mine:.1e}, PyTorch's {theirs:.1e}  ({what})", flush=True)
    if not ratio <= 2:
        raise SystemExit(f"the error is {ratio:.1f} times PyTorch's")


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


def copy_rate() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB: the limit of what only moves bytes."""
    x, y = torch.randn(2, 2**29, device="cuda")
    return 2 * x.nbytes / triton.testing.do_bench(lambda: y.copy_(x), return_mode="median") * 1e3


def check(device: str) -> None:
    """Check quantization, then products; on GPUs also that every run gives the same bits."""
    check_quantizers(device)
    for name in ladder():
        for dtype in OUTPUTS if device != "cpu" else OUTPUTS[1:]:  # the interpreter cuts bits of bfloat16 off
            check_matmul(name, dtype, device)
    for k in (4096, 128) if device == "cuda" else ():  # with 128, the TMA still stores a tile when the next is ready
        x, w = torch.randn(2, 4096, k, device=device).bfloat16()
        for kind, run in quantizers().items():
            if differing(lambda run=run, x=x: tuple(y.float() for y in run(x))):
                raise SystemExit(f"quantize {kind}: runs on the same input differ")
        for name, (run, *kinds) in ladder().items():
            operands = [y for z, kind in zip((x, w), kinds) for y in quantizers()[kind](z)[:2]]
            if differing(lambda run=run, operands=operands: (run(*operands),)):
                raise SystemExit(f"{name}: runs on the same input differ")
            if "blockwise" in name and not torch.equal(run(*operands), matmul_blockwise_triton(*operands)):
                raise SystemExit(f"{name}: the kernels in Gluon and in Triton differ")


def contenders(kind: str, operands: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's products and ours of the same fp8 operands."""
    if kind in ("tensorwise", "rowwise"):
        ours = matmul_tensorwise if kind == "tensorwise" else matmul_rowwise
        runs = {"_scaled_mm, fast": lambda: scaled_mm(*operands, fast=True), "_scaled_mm": lambda: scaled_mm(*operands)}
        return runs | {"Triton": lambda: ours(*operands)}
    runs = {"_scaled_mm": scaled_mm, "Triton": matmul_blockwise_triton, "Gluon": matmul_blockwise}
    return {by: lambda f=f: f(*operands) for by, f in runs.items()}


def measure_matmul(m: int, n: int, k: int) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """What is timed for y [m, n] = x [m, k] w [n, k]ᵀ: the product, and blockwise also the gradient of w."""
    x, w, dy = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((m, k), (n, k), (m, n)))
    ours, found = quantizers(), {"bfloat16": {"torch.matmul": lambda: x @ w.T}}
    for kind, left, right in (
        ("tensorwise", "tensor", "tensor"),
        ("rowwise", "rows", "rows"),
        ("blockwise", "lines", "blocks"),
    ):
        found[kind] = contenders(kind, [*ours[left](x)[:2], *ours[right](w)[:2]])
    found["blockwise, dw"] = contenders("blockwise", [*ours["lines"](dy)[2:], *ours["lines"](x)[2:]])
    return {f"{m} x {n} x {k}, {kind}": runs for kind, runs in found.items()}


def measure_quantizers(m: int, k: int) -> list[dict]:
    """Time them against a copy of as many bytes: x is read twice where amax comes first, fp8 is written twice."""
    x, rows, limit = torch.randn(m, k, device="cuda").bfloat16(), [], copy_rate()
    for kind, ours in quantizers().items():
        plain = lambda x, kind=kind: quantize_reference(x, kind)  # noqa: E731
        runs = {"eager": plain, "torch.compile": torch.compile(plain, dynamic=False), "ours": ours}
        runs = {by: partial(f, x) for by, f in runs.items()}
        passes = 4 if kind in ("lines", "blocks") else 6  # bytes per element
        rows += compare(f"{m} x {k}, quantize {kind}", runs, passes * m * k, limit)
    return rows


def measure() -> list[dict]:
    """Time the linears of Llama 3 8B for 16,384 tokens, and the quantization of their activations."""
    rows, m = [], 16384
    for suffix, bench in BENCHES.items():
        for n, k in (4096, 4096), (14336, 4096), (4096, 14336):
            for what, runs in measure_matmul(m, n, k).items():
                limit = PEAK / (2 if "bfloat16" in what else 1)
                flops = cost(m, n, k, torch.bfloat16)[1]
                rows += compare(what + suffix, runs, flops, limit, "TFLOP/s", bench=bench)
    return rows + measure_quantizers(m, 4096) + measure_quantizers(m, 14336)


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
# Copy:     E4M3, E5M2, OUTPUTS, BLOCK, LEAST, TILE, GROUP, magnitude, scale_of, to_fp8, read_tile, write_tile,
#           amax_kernel, cast_kernel, blocks_kernel, locate, matmul_kernel, blockwise_kernel, COPY_IN, COPY_OUT,
#           BARRIER, make_barriers, load_blocks, multiply_blocks, blockwise_gluon_kernel, processors, rounds,
#           rows_of_16_bytes, quantize_operands, find_amax, quantize_tensor, quantize_rows, quantize_blocks,
#           for_descriptors, prepare, matmul, matmul_tensorwise, matmul_rowwise, prepare_blocks,
#           matmul_blockwise_triton, blocks_of, matmul_blockwise_gluon, matmul_blockwise (call quantize_tensor and
#           matmul_tensorwise, quantize_rows and matmul_rowwise, or quantize_blocks and matmul_blockwise). None has a
#           gradient: call them in an autograd.Function. torch.compile breaks its graph there.
