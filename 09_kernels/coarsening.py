"""Thread coarsening: more elements per thread need fewer instructions per element, until registers run out.

A thread with r x c elements of C loads r + c elements from shared memory for every step of k, and does r·c
multiply-adds: 1 element loads 2 per multiply-add, 8 x 8 load 1/4. But each element occupies a register from the first
step to the last, and a thread has 255: what does not fit is spilled to memory, and loaded again in every step.

A thread that copies has several loads under way, by Little's law: bytes in flight = bandwidth x latency.

Parent:   09_kernels/tiling.py
Lesson:   TILES, STEP, ELEMENTS, copy_blocks, copy, dot
Run:      python 09_kernels/coarsening.py
Source:   Volkov 2010, "Better performance at lower occupancy" (GTC)
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl

# ------------------------------------------------------------------------------------------------------------ config
TILES = (16, 16), (32, 16), (32, 32), (64, 32), (64, 64), (128, 64), (128, 128), (256, 128)
PEAK = {torch.float32: 67e12, torch.bfloat16: 989.5e12}  # FLOP/s of an H100 or H200: CUDA cores, tensor cores
THREADS = 128  # of a program: 4 warps
STEP = 16  # of k
ELEMENTS = 1, 2, 4, 8, 16, 32, 64  # that a thread copies


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def matmul_dot(
    a_ptr, b_ptr, c_ptr, m, n, k, a_stride, b_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of c [m, n]: for each BLOCK_K of k, a block of a times a block of b."""
    tiles = tl.cdiv(n, BLOCK_N)  # side by side: neighbours take the same rows of a
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inner = tl.arange(0, BLOCK_K)
    b_row = inner[:, None].to(tl.int64) * b_stride  # 64 bits: k·n may be beyond 2^31
    b_step = tl.cast(b_stride, tl.int64) * BLOCK_K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        a = tl.load(a_ptr + row * a_stride + inner[None, :], (row < m) & (inner[None, :] < k - start), 0)
        b = tl.load(b_ptr + b_row + column, (inner[:, None] < k - start) & (column < n), 0)
        total = tl.dot(a, b, total, input_precision="ieee")  # float32 as it is, not rounded to TF32
        a_ptr += BLOCK_K
        b_ptr += b_step
    tl.store(c_ptr + row * n + column, total.to(c_ptr.dtype.element_ty), (row < m) & (column < n))


@triton.jit
def copy_blocks(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Copy BLOCK elements: a thread issues all its loads before it waits for the first."""
    # An H200 moves 4.2 TB/s, and a load takes about 0.7 µs: 3 MB in flight, 22 KB per SM, half of it loads in a copy.
    # An SM has at most 2,048 threads: with one bfloat16 element each, 4 KB of loads are in flight, with four 16 KB,
    # enough by Little's law. Measured, it takes eight, or 16 bytes.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # 64 bits: n may be beyond 2^31
    tl.store(y_ptr + i, tl.load(x_ptr + i, i < n), i < n)


def prepare(a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """a [m, k], b [k, n] -> both with the elements of a row side by side (copied only if they are not), c [m, n].

    Raises ValueError where shapes do not fit, or the kernel does not take the dtype.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"shapes are {list(a.shape)} and {list(b.shape)}: must be [m, k] and [k, n]")
    if a.dtype != b.dtype or a.dtype not in dtypes:
        raise ValueError(f"dtypes are {a.dtype} and {b.dtype}: must both be one of {dtypes}")
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    return a, b, torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)


def dot(a: Tensor, b: Tensor, block_m: int, block_n: int) -> tuple[Tensor, object]:
    """a [m, k], b [k, n], float32 -> their product [m, n], and the compiled kernel (None in the interpreter)"""
    a, b, c = prepare(a, b, (torch.float32,))
    (m, n), kernel = c.shape, None
    if c.numel():
        kernel = matmul_dot[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
            a, b, c, m, n, a.shape[1], a.stride(0), b.stride(0),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=STEP, num_warps=THREADS // 32, num_stages=3,
        )  # fmt: skip
    return c, kernel


def copy(x: Tensor, elements: int) -> Tensor:
    """Return a contiguous copy of x, of any shape, not complex; a thread copies `elements`, a power of two."""
    x, block = x.contiguous(), THREADS * elements
    y = torch.empty_like(x)
    if x.numel():
        copy_blocks[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), BLOCK=block, num_warps=THREADS // 32)
    return y


# --------------------------------------------------------------------------------------------------------- reference
def reference(a: Tensor, b: Tensor) -> Tensor:
    """The same in plain PyTorch, which does not round float32 to TF32 unless told to."""
    return a @ b


def cost(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that move if a, b and c move once, and FLOPs."""
    return (m * k + k * n + m * n) * dtype.itemsize, 2 * m * n * k


def reads(m: int, n: int, k: int, block_m: int, block_n: int, dtype: torch.dtype) -> int:
    """Bytes that all programs load: m·k for each block of columns, k·n for each block of rows."""
    return (m * k * triton.cdiv(n, block_n) + k * n * triton.cdiv(m, block_m)) * dtype.itemsize


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs, a [m, k] and b [k, n], or what is copied."""
    torch.manual_seed(0)
    random = partial(torch.randn, device=device)
    sizes = [(37, 150, 70), (1, 1, 1), (300, 3, 33), (0, 5, 4), (4, 5, 0)]
    if device == "cuda":
        sizes.append((1000, 1500, 2000))
    tried = {f"{m} x {n} x {k}": [random(m, k), random(k, n)] for m, n, k in sizes}
    views = [torch.full(size, float("nan"), device=device)[::2, 3:-197] for size in ((60, 237), (74, 279))]
    tried["strided"] = [view.copy_(random(view.shape)) for view in views]  # what lies between and around is NaN
    tried["transposed"] = [random(40, 30).T, random(70, 40).T]
    for tile in TILES:
        for what in list(tried)[: None if tile == TILES[0] else 2]:  # large tiles take long to compile
            yield f"{tile}, {what}", lambda a, b, tile=tile: dot(a, b, *tile)[0], reference, tried[what]
    for elements, n in product(ELEMENTS, (0, 1, 127, 5000, 100_000)):
        yield f"{elements} per thread of {n}", partial(copy, elements=elements), torch.clone, [random(1, n)]


# ----------------------------------------------------------------------------------------------------------- measure
def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor; inf where one has NaN or inf and the other has not."""
    finite = exact.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return float("inf")
    return ((actual - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-300)).item()


def check(device: str) -> None:
    """Compare with float64; exit if an error is above twice PyTorch's own, or √k roundings of a sum if that is more.

    A sum of k terms has k roundings, in whichever order; they add up to about √k of them.
    """
    worst = (0.0, 0.0, 0.0, "")
    for what, ours, plain, inputs in cases(device):
        exact = plain(*(x.double() for x in inputs))
        mine, theirs = (relative_error(f(*inputs), exact) for f in (ours, plain))
        (_, k), eps = inputs[0].shape, torch.finfo(inputs[0].dtype).eps
        least = max(eps, k**0.5 * torch.finfo(torch.float32).eps) / 4
        worst = max(worst, (mine / max(theirs, least), mine, theirs, what))
    ratio, mine, theirs, what = worst
    print(f"worst error {mine:.1e}, PyTorch's {theirs:.1e}  ({what})", flush=True)
    if not ratio <= 2:
        raise SystemExit(f"the error is {ratio:.1f} times PyTorch's")


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


def grow_tiles(m: int, n: int, k: int) -> list[dict]:
    """Time every tile; print registers and spills of its threads, and the bytes that programs load per FLOP."""
    a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    tiles = {f"{tile[0]} x {tile[1]}": tile for tile in TILES}
    runs = {by: partial(dot, a, b, *tile) for by, tile in tiles.items()}
    _, flops = cost(m, n, k, torch.float32)
    found = compare(f"{m} x {n} x {k}, float32", runs, flops, PEAK[torch.float32], "TFLOP/s")
    for row, (block_m, block_n) in zip(found, TILES):
        _, kernel = dot(a, b, block_m, block_n)
        row |= {"elements": block_m * block_n // THREADS, "registers": kernel.n_regs, "spills": kernel.n_spills}
        row["loaded"] = reads(m, n, k, block_m, block_n, torch.float32)
        print(f"{row['by']:9} {row['elements']:3} elements, {row['registers']:3} registers per thread, ", end="")
        print(f"{row['spills']:5} words of 4 bytes spilled, {row['loaded'] / flops:.4f} bytes per FLOP", flush=True)
    return found


def grow_copies(n: int, dtype: torch.dtype) -> list[dict]:
    """Time copies of n elements by few and by many elements per thread."""
    x = torch.randn(n, device="cuda").to(dtype)
    runs = {f"{elements} elements per thread": partial(copy, x, elements) for elements in ELEMENTS}
    found = compare(f"copy of {n} elements, {str(dtype)[6:]}", runs, 2 * x.nbytes, copy_rate())
    return [row | {"elements": elements} for row, elements in zip(found, ELEMENTS)]


def measure() -> list[dict]:
    """Time 4,096 x 4,096 x 4,096 in float32 by every tile, and a copy of 1 GiB of bfloat16."""
    return grow_tiles(4096, 4096, 4096) + grow_copies(2**29, torch.bfloat16)


# -------------------------------------------------------------------------------------------------------------- main
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    check("cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        measure()


if __name__ == "__main__":
    main()


# To paste this into your own trainer
#
# Plumbing: THREADS, cases, copy_rate, grow_tiles, grow_copies, measure
