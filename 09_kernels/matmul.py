"""Matrix multiplication on tensor cores: from a tile per program to persistent programs that TMA feeds.

C [m, n] = A [m, k] B [k, n] has 2·m·n·k FLOPs, and a tile block_m·block_n / (block_m + block_n) FLOPs per byte in bf16:
64 with 128 x 128, 85 with 128 x 256. An H200's 989 TFLOP/s then ask for 15 or 12 TB/s, and memory gives 4.8. So most
blocks must come from the L2 cache, and be on their way long before they are needed: each rung of the ladder adds one
thing to `pipelined` or to the rung before.

Parent:   09_kernels/tiling.py
Lesson:   DTYPES, PEAK, CHOICES, locate, multiply_blocks, matmul_blocks, time_briefly, matmul_tuned, load_block,
          store_tile, matmul_descriptors, matmul_persistent, prepare, tile, launch_blocks, blocks, ordered, pipelined,
          tuned, stored, describe, descriptors, processors, persistent, matmul, matmul_shape, Linear, linear
Run:      python 09_kernels/matmul.py
Source:   Thakkar et al. 2023, CUTLASS 3, github.com/NVIDIA/cutlass; Tillet et al. 2019, doi:10.1145/3315508.3329973
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
from torch import Tensor, nn

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# ------------------------------------------------------------------------------------------------------------ config
DTYPES = torch.bfloat16, torch.float16, torch.float32
PEAK = {torch.bfloat16: 989.5e12}  # FLOP/s of an H100's or H200's tensor cores
BENCHES = {  # in bursts, and after 100 ms of the same: at its power limit a GPU lowers its clocks
    "": triton.testing.do_bench_cudagraph,
    ", sustained": partial(triton.testing.do_bench, warmup=100, rep=100),
}
# a few of what might be fastest: each takes seconds to compile
CHOICES = [
    triton.Config(dict(BLOCK_M=128, BLOCK_N=columns, GROUP=group), num_warps=8, num_stages=3)
    for columns, group in ((128, 8), (128, 1), (256, 8))
]


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def locate(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return where the tile begins in [m, n]: GROUP rows of tiles are finished, a column at a time, before the next."""
    across = tl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * across) * GROUP
    high = min(tl.cdiv(m, BLOCK_M) - first, GROUP)  # the last group may have fewer rows of tiles
    within = tile % (GROUP * across)
    return (first + within % high) * BLOCK_M, within // high * BLOCK_N


@triton.jit
def multiply_blocks(
    a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of c [m, n], which is contiguous; a [m, k] and b [k, n] have any strides."""
    row, column = locate(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP)
    row = row.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]  # 64 bits: m·k may be beyond 2^31
    column = column.to(tl.int64) + tl.arange(0, BLOCK_N)[None, :]
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptr += row * a_row + inner[None, :] * a_column
    b_ptr += inner[:, None] * b_row + column * b_column
    a_step, b_step = tl.cast(a_column, tl.int64) * BLOCK_K, tl.cast(b_row, tl.int64) * BLOCK_K
    tl.assume(k > 0)  # the sum comes from tensor cores: if it might be 0 as well, they would wait after each step
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        a = tl.load(a_ptr, (row < m) & (inner[None, :] < k - start), 0)
        b = tl.load(b_ptr, (inner[:, None] < k - start) & (column < n), 0)
        total = tl.dot(a, b, total, input_precision="ieee")  # float32 as it is, not rounded to TF32
        a_ptr += a_step
        b_ptr += b_step
    tl.store(c_ptr + row * n + column, total.to(c_ptr.dtype.element_ty), (row < m) & (column < n))


@triton.jit
def matmul_blocks(
    a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile with the blocks that the caller has chosen."""
    multiply_blocks(
        a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column, BLOCK_M, BLOCK_N, BLOCK_K, GROUP
    )  # fmt: skip


def time_briefly(run: Callable[[], object], quantiles: list[float]) -> list[float]:
    """Time a choice for some milliseconds: by default autotune takes ten times as long."""
    return triton.testing.do_bench(run, warmup=2, rep=10, quantiles=quantiles)


@triton.autotune(CHOICES, key=["m", "n", "k", "a_row", "b_row"], do_bench=time_briefly)
@triton.jit
def matmul_tuned(
    a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile with the fastest of CHOICES: the first launch of each `key` times all of them."""
    multiply_blocks(
        a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column, BLOCK_M, BLOCK_N, BLOCK_K, GROUP
    )  # fmt: skip


@triton.jit
def load_block(x, row, column, COLUMNS: tl.constexpr):
    """Load the block of x that begins at (row, column). COLUMNS: x is stored by columns, as are its blocks.

    Tensor cores read a block from shared memory in either direction. So all three products of a linear layer, x Wᵀ,
    dy W and dyᵀ x, load blocks as they lie in memory, and `.T` transposes them.
    """
    return x.load([column, row]).T if COLUMNS else x.load([row, column])


@triton.jit
def store_tile(c, total, row, column, PARTS: tl.constexpr):
    """Round a tile and store it, whole or in two halves: until TMA has read it, it waits in shared memory."""
    if PARTS == 1:
        c.store([row, column], total.to(c.dtype))
    else:
        half: tl.constexpr = total.shape[1] // 2
        left, right = total.reshape(total.shape[0], 2, half).permute(0, 2, 1).split()
        c.store([row, column], left.to(c.dtype))
        c.store([row, column + half], right.to(c.dtype))


@triton.jit(do_not_specialize=["m", "n", "k"])  # one compilation for all sizes
def matmul_descriptors(
    a, b, c, m, n, k, A_COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of c [m, n]: a, b and c are descriptors, of which TMA knows shape, strides and block."""
    row, column = locate(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP)
    tl.assume(k > 0)  # as above
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        left, right = load_block(a, row, start, A_COLUMNS), load_block(b, start, column, B_COLUMNS)
        total = tl.dot(left, right, total, input_precision="ieee")
    store_tile(c, total, row, column, PARTS)


@triton.jit(do_not_specialize=["m", "n", "k"])  # one compilation for all sizes
def matmul_persistent(
    a, b, c, m, n, k, A_COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute every programs-th tile of c [m, n]; loads run ahead, from one tile into the next.

    flatten=True makes one loop of tiles and steps of k: the first blocks of a tile are loaded while the last one is
    multiplied and stored. warp_specialize=True, by which some warps load and others multiply, is no rung: it is right
    only with 4 warps, without flatten, and with stores that are not TMA's, and Triton does not check that.
    flash_attention_gluon.py does it by hand.
    """
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = locate(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, k, BLOCK_K):
            left, right = load_block(a, row, start, A_COLUMNS), load_block(b, start, column, B_COLUMNS)
            total = tl.dot(left, right, total, input_precision="ieee")
        store_tile(c, total, row, column, PARTS)


def prepare(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k], b [k, n] -> memory for c [m, n]; zeros if there is nothing to add up.

    Raises ValueError where shapes or dtypes do not fit.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"shapes are {list(a.shape)} and {list(b.shape)}: must be [m, k] and [k, n]")
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise ValueError(f"dtypes are {a.dtype} and {b.dtype}: must both be one of {DTYPES}")
    make = torch.empty if a.shape[1] else torch.zeros
    return make(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)


def tile(x: Tensor, columns: int) -> dict[str, int]:
    """Return the blocks of a program: 128 bytes of k: a row of TMA's widest swizzle.

    float32 is for CUDA cores, which have their operands in registers, too: its tiles are small.
    """
    if x.element_size() == 4:
        return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32)
    return dict(BLOCK_M=128, BLOCK_N=columns, BLOCK_K=64)


def launch_blocks(a: Tensor, b: Tensor, group: int, stages: int) -> Tensor:
    """Multiply with matmul_blocks: a tile of 128 x 128 per program."""
    c, sizes = prepare(a, b), tile(a, 128)
    (m, n), k = c.shape, a.shape[1]
    if c.numel() and k:
        matmul_blocks[(triton.cdiv(m, sizes["BLOCK_M"]) * triton.cdiv(n, sizes["BLOCK_N"]),)](
            a, b, c, m, n, k, *a.stride(), *b.stride(), **sizes, GROUP=group, num_warps=8, num_stages=stages
        )
    return c


def blocks(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k], b [k, n] -> their product [m, n], added up in float32 and rounded once.

    As tiling.py's `dot` without its pipeline: row after row of tiles, and tensor cores wait for every load.
    """
    return launch_blocks(a, b, 1, 1)


def ordered(a: Tensor, b: Tensor) -> Tensor:
    """The same; programs that run at the same time compute a block of tiles, 8 rows high, not a row.

    132 tiles in one row load 1 + 132 rows and columns of blocks; 12 x 11 of them load 23, and find the rest in L2.
    """
    return launch_blocks(a, b, 8, 1)


def pipelined(a: Tensor, b: Tensor) -> Tensor:
    """The same; while tensor cores work, the blocks of the next two steps are copied to shared memory (num_stages).

    Takes operands with any strides.
    """
    return launch_blocks(a, b, 8, 3)


def tuned(a: Tensor, b: Tensor) -> Tensor:
    """The same, with the fastest of CHOICES; in the interpreter, which has no time to measure, with the first."""
    c = prepare(a, b)
    (m, n), k = c.shape, a.shape[1]
    kernel, more = (matmul_tuned, {}) if a.is_cuda else (matmul_tuned.fn, CHOICES[0].all_kwargs())
    if c.numel() and k:
        kernel[lambda chosen: (triton.cdiv(m, chosen["BLOCK_M"]) * triton.cdiv(n, chosen["BLOCK_N"]),)](
            a, b, c, m, n, k, *a.stride(), *b.stride(), BLOCK_K=tile(a, 128)["BLOCK_K"], **more
        )
    return c


def stored(x: Tensor) -> tuple[Tensor, bool] | None:
    """Return x [..., r, c] as it lies in memory, and whether that is by columns; None if TMA cannot read it.

    TMA takes tensors whose address and rows are multiples of 16 bytes.
    """
    for y, columns in (x, False), (x.mT, True):
        strides = y.stride()[:-1]
        aligned = y.data_ptr() % 16 == 0 and all(stride * y.element_size() % 16 == 0 for stride in strides)
        if y.stride(-1) == 1 and min(strides) >= y.shape[-1] and aligned:  # below, rows would overlap
            return y, columns
    return None


def describe(a: Tensor, b: Tensor, c: Tensor, sizes: dict[str, int], parts: int) -> tuple | None:
    """Return descriptors of a, b and c with their blocks, and whether a and b are stored by columns; None if one fails.

    No side of a block has more than 256 elements, TMA's limit.
    """
    if not (c.numel() and a.shape[1] and stored(a) and stored(b) and stored(c)):
        return None
    (a, a_columns), (b, b_columns) = stored(a), stored(b)
    block_m, block_n, block_k = (sizes[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    return (
        TensorDescriptor.from_tensor(a, [block_k, block_m] if a_columns else [block_m, block_k]),
        TensorDescriptor.from_tensor(b, [block_n, block_k] if b_columns else [block_k, block_n]),
        TensorDescriptor.from_tensor(c, [block_m, block_n // parts]),
    ), dict(A_COLUMNS=a_columns, B_COLUMNS=b_columns)


def descriptors(a: Tensor, b: Tensor) -> Tensor:
    """The same, with TMA, the tensor memory accelerator. What it cannot read goes to `pipelined`.

    One thread asks it for a whole block; the others compute no addresses and no masks, and their registers hold a
    larger tile. TMA fills with zeros what lies beyond the tensor.
    """
    c, sizes = prepare(a, b), tile(a, 256)
    (m, n), k = c.shape, a.shape[1]
    found = describe(a, b, c, sizes, 1)
    if found is None:
        return pipelined(a, b)
    matmul_descriptors[(triton.cdiv(m, sizes["BLOCK_M"]) * triton.cdiv(n, sizes["BLOCK_N"]),)](
        *found[0], m, n, k, **found[1], **sizes, GROUP=8, PARTS=1, num_warps=8, num_stages=3
    )
    return c


def processors(x: Tensor) -> int:
    """Return how many programs run at a time: one per SM, or two in the interpreter, so that each has several tiles."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def persistent(a: Tensor, b: Tensor) -> Tensor:
    """The same; a program computes several tiles. What TMA cannot read goes to `pipelined`.

    A tile is stored in two halves: the second needs no shared memory of its own, which leaves room for a fourth stage.
    """
    c, sizes = prepare(a, b), tile(a, 256)
    (m, n), k = c.shape, a.shape[1]
    found = describe(a, b, c, sizes, 2)
    if found is None:
        return pipelined(a, b)
    tiles = triton.cdiv(m, sizes["BLOCK_M"]) * triton.cdiv(n, sizes["BLOCK_N"])
    # as few programs as need no more rounds: 2,048 tiles take 132 SMs 16 rounds, and 128 SMs, too
    programs = triton.cdiv(tiles, triton.cdiv(tiles, processors(a)))
    matmul_persistent[(programs,)](*found[0], m, n, k, **found[1], **sizes, GROUP=8, PARTS=2, num_warps=8, num_stages=4)
    return c


# An operator of its own: torch.compile does not look into it, where strides and addresses decide which kernel runs.
@torch.library.custom_op("matmul::matmul", mutates_args=())
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k], b [k, n] -> their product [m, n], added up in float32 and rounded once: the fastest rung.

    bfloat16, float16 or float32; stored by rows or by columns, read without a copy. Other views are read element by
    element. Raises ValueError where shapes or dtypes do not fit.
    """
    return persistent(a, b)


@matmul.register_fake
def matmul_shape(a: Tensor, b: Tensor) -> Tensor:
    """What matmul returns, without its elements."""
    return a.new_empty(a.shape[0], b.shape[1])


class Linear(torch.autograd.Function):
    """x [t, k], weight [n, k] -> x weightᵀ [t, n]"""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        return matmul(x, weight.T)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = matmul(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, matmul(dy.T, x) if ctx.needs_input_grad[1] else None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [..., k] by weight [n, k], as nn.functional.linear does without a bias; bfloat16, float16 or float32.

    Raises ValueError where shapes or dtypes differ (autocast does not reach in). Rows that are no multiple of 16 bytes,
    and expanded gradients, such as those of a sum, take the slower `pipelined`.
    """
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"shapes are {list(x.shape)} and {list(weight.shape)}: must be [..., k] and [n, k]")
    y = Linear.apply(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight)  # t n
    return y.view(*x.shape[:-1], len(weight))


# --------------------------------------------------------------------------------------------------------- reference
def reference(a: Tensor, b: Tensor) -> Tensor:
    """The same in plain PyTorch, which does not round float32 to TF32 unless told to."""
    return a @ b


def cost(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that move if a, b and c move once, and FLOPs."""
    return (m * k + k * n + m * n) * dtype.itemsize, 2 * m * n * k


def ladder() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The rungs."""
    return {function.__name__: function for function in (blocks, ordered, pipelined, tuned, descriptors, persistent)}


def cases(device: str, dtype: torch.dtype, first: bool) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs, of matmuls a [m, k] and b [k, n].

    first: with every rung, and in layouts and sizes of which some are not for TMA.
    """
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=dtype, device=device)
    tried = {"37 x 150 x 70": [random(37, 70), random(70, 150)]}
    sizes = [(304, 528, 144)]
    if device == "cuda":
        sizes.append((2064, 1520, 1040))
    for m, n, k in sizes:
        tried[f"{m} x {n} x {k}"] = [random(m, k), random(n, k).T]  # by columns, as weights are in forward
    tried["large and small"] = [random(32, 48) * 1e4, random(24, 48).T * 1e-4]
    rungs = ladder() if first else {"matmul": matmul}
    for (rung, ours), (what, inputs) in product(rungs.items(), tried.items()):
        yield f"{rung}, {what}", ours, reference, inputs

    def surrounded(rows: int, columns: int, start: int) -> Tensor:
        """View every other row of a larger tensor: what lies between and around is NaN."""
        whole = torch.full((2 * rows, columns + 200), float("nan"), dtype=dtype, device=device)
        return whole[::2, start : start + columns].copy_(random(rows, columns))

    views = {f"{m} x {n} x {k}": [random(m, k), random(k, n)] for m, n, k in ((1, 1, 1), (130, 3, 33))}
    views |= {"nothing": [random(0, 4), random(4, 5)], "nothing to add up": [random(4, 0), random(0, 5)]}
    views["rows that TMA cannot write"] = [random(48, 32), random(9, 32).T]
    views["by rows"] = [random(304, 80), random(80, 528)]
    views["a by columns"] = [random(80, 304).T, random(80, 528)]
    views["both by columns"] = [random(80, 304).T, random(528, 80).T]
    views["within others"] = [surrounded(32, 40, 8), surrounded(40, 80, 16)]
    views["within others, by columns"] = [surrounded(40, 32, 8).T, surrounded(80, 40, 16).T]
    views["off by 3"] = [surrounded(32, 40, 3), surrounded(40, 80, 3).T.contiguous().T]
    views["one row, expanded"] = [random(1, 48).expand(32, 48), random(48, 32)[:, ::2]]
    for what, inputs in views.items() if first else ():
        yield what, matmul, reference, inputs
    for t, n, k in ((152, 272, 80), (7, 5, 3))[: 2 if first else 1]:
        yield f"linear, 2 x {t} x {n} x {k}", linear, nn.functional.linear, [random(2, t, k), random(n, k)]


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


def floor(k: int, dtype: torch.dtype) -> float:
    """A quarter of what one rounding of the result, or √k of those in a sum, may be off."""
    return max(torch.finfo(dtype).eps, k**0.5 * torch.finfo(torch.float32).eps) / 4


def check(device: str) -> None:
    """Compare with float64; exit if an error is above twice PyTorch's own, or √k roundings of a sum if that is more.

    A sum of k terms has k roundings, in whichever order; they add up to about √k of them. The first dtype tries every
    rung and every view, the others what matmul chooses.
    """
    dtypes = [x for x in DTYPES if x != torch.bfloat16 or device != "cpu"]  # which is integers to the interpreter
    for dtype in dtypes:
        worst = (0.0, 0.0, 0.0, "")
        for what, ours, plain, inputs in cases(device, dtype, dtype == dtypes[0]):
            if ours is linear:
                least, pairs = floor(max(max(x.shape) for x in inputs), dtype), errors(ours, plain, inputs, dtype)
            else:
                least, exact = floor(inputs[0].shape[1], dtype), plain(*(x.double() for x in inputs))
                pairs = [tuple(relative_error(f(*inputs), exact) for f in (ours, plain))]
            worst = max(worst, *((mine / max(theirs, least), mine, theirs, what) for mine, theirs in pairs))
        ratio, mine, theirs, what = worst
        print(f"{str(dtype)[6:]:10} worst error {mine:.1e}, PyTorch's {theirs:.1e}  ({what})", flush=True)
        if not ratio <= 2:
            raise SystemExit(f"the error is {ratio:.1f} times PyTorch's")
    if device == "cuda":
        x, w, dy = torch.randn(3, 4096, 4096, dtype=torch.bfloat16, device=device)
        x, w = x.requires_grad_(), w.requires_grad_()
        if differing(lambda: (linear(x, w), *torch.autograd.grad(linear(x, w), (x, w), dy))):
            raise SystemExit("linear: runs on the same input differ")


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


def products(t: int, n: int, k: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Random operands of the three products of a linear layer, x [t, k], weight [n, k], as they are stored."""
    x, weight, dy = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((t, k), (n, k), (t, n)))
    what = f"{t} x {k} -> {n}"
    return {f"{what}, forward": (x, weight.T), f"{what}, dx": (dy, weight), f"{what}, dw": (dy.T, x)}


def measure() -> list[dict]:
    """Time the rungs at one size, then cuBLAS and the last rung at the sizes of Llama 3 8B, in bursts and sustained."""
    t, dtype, rows = 16384, torch.bfloat16, []
    for suffix, bench in BENCHES.items():
        for n, k in (4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336):
            amount = cost(t, n, k, dtype)[1]
            for what, operands in products(t, n, k).items():
                functions = {"torch.matmul": reference, "ours": matmul}
                if (n, k) == (14336, 4096) and not suffix:
                    functions = {"torch.matmul": reference} | ladder()
                runs = {by: partial(f, *operands) for by, f in functions.items()}
                rows += compare(what + suffix, runs, amount, PEAK[dtype], "TFLOP/s", bench=bench)
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
# Plumbing: BENCHES, ladder, cases, errors, floor, check, differing, products, measure
# Copy:     DTYPES, locate, multiply_blocks, matmul_blocks, load_block, store_tile, matmul_persistent, prepare, tile,
#           launch_blocks, pipelined, stored, describe, processors, persistent, matmul, matmul_shape, Linear, linear
#           (call linear or matmul)
