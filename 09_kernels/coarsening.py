"""Thread coarsening: more elements per thread need fewer instructions per element, until registers run out.

A program of 128 threads computes a tile of C. A thread that has r x c elements of it loads r + c elements from shared
memory for every step of k, and does r·c multiply-adds: 1 element loads 2 per multiply-add, 8 x 8 load 1/4. Addresses,
masks and barriers are shared by more work too. But each element of the tile occupies a register from the first step
to the last, and a thread has 255: what does not fit is spilled to memory, and loaded again in every step.

What computes nothing gains in another way: a thread that has several loads under way waits once for all of them.
Little's law: bytes in flight = bandwidth x latency. An H200 moves 4.2 TB/s, and a load takes about 0.7 µs: 3 MB in
flight, 22 KB per SM, half of it loads in a copy. An SM has at most 2,048 threads: with one bfloat16 element each,
4 KB of loads are in flight, too few; with four 16 KB, enough by this law. Measured, it takes eight, or 16 bytes.

Parent:   09_kernels/tiling.py
Lesson:   TILES, STEP, ELEMENTS, copy_blocks, copy, dot
Plumbing: THREADS, cases, check, copy_rate, grow_tiles, grow_copies, measure
Run:      python 09_kernels/coarsening.py
Source:   Volkov 2010, "Better performance at lower occupancy" (GTC)
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable, Iterator
from importlib.util import find_spec

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


def cases(device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what is tried, a [m, k] and b [k, n]."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def surrounded(*shape: int) -> Tensor:
        """View every other row of a larger tensor: what lies between and around is NaN."""
        view = torch.full((2 * shape[0], shape[1] + 200), float("nan"), device=device)
        view = view[::2, 3 : 3 + shape[1]]
        return view.copy_(random(*shape))

    large = [(1000, 1500, 2000)] if device == "cuda" else []
    for m, n, k in (37, 150, 70), (1, 1, 1), (300, 3, 33), (0, 5, 4), (4, 5, 0), *large:
        yield f"{m} x {n} x {k}", random(m, k), random(k, n)
    yield "strided", surrounded(30, 37), surrounded(37, 79)
    yield "transposed", random(40, 30).T, random(70, 40).T


# ----------------------------------------------------------------------------------------------------------- measure
def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor; inf where one has NaN or inf and the other has not."""
    actual = actual.double()
    if not torch.equal(actual.isfinite(), exact.isfinite()):
        return float("inf")
    difference = torch.where(exact.isfinite(), actual - exact, 0).norm()
    return (difference / exact[exact.isfinite()].norm().clamp_min(1e-300)).item()


def check(device: str) -> None:
    """Compare products with float64 as 09_kernels/tiling.py does, and copies, to the bit, with what is copied."""
    for tile in TILES:
        worst = (0.0, 0.0, 0.0, "")
        for what, a, b in list(cases(device))[: None if tile == TILES[0] else 2]:  # large tiles take long to compile
            exact = reference(a.double(), b.double())
            mine, theirs = relative_error(dot(a, b, *tile)[0], exact), relative_error(reference(a, b), exact)
            least = max(1, a.shape[1] ** 0.5) * torch.finfo(torch.float32).eps / 4
            worst = max(worst, (mine / max(theirs, least), mine, theirs, what))
        ratio, mine, theirs, what = worst
        print(f"tile {tile[0]:3} x {tile[1]:3}  worst error {mine:.1e}, PyTorch's {theirs:.1e}  ({what})", flush=True)
        if not ratio <= 2:
            raise SystemExit(f"the error is {ratio:.1f} times PyTorch's")
    for elements in ELEMENTS:
        for n in 0, 1, 127, 5000, 100_000:
            x = torch.arange(n, device=device).float()
            if not torch.equal(copy(x, elements), x):
                raise SystemExit(f"{elements} elements per thread: a copy of {n} elements differs")
    print(f"copies by {ELEMENTS[0]} to {ELEMENTS[-1]} elements per thread are equal to the bit")


def milliseconds(contenders: dict[str, Callable[[], object]], rounds: int = 3) -> dict[str, float]:
    """Median time of each on the GPU, in CUDA graphs: the CPU plays no part. They take turns, in random order."""
    times = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            times[name].append(triton.testing.do_bench_cudagraph(contenders[name], rep=20, return_mode="median"))
    return {name: statistics.median(found) for name, found in times.items()}


def copy_rate() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB: the limit of what only moves bytes."""
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / triton.testing.do_bench(lambda: y.copy_(x), return_mode="median") * 1e3


def compare(what: str, times: dict[str, float], amount: float, limit: float, unit: str = "TB/s") -> list[dict]:
    """Rows of the table: bytes (FLOPs) that the problem needs per second, and their share of the limit."""
    rows = []
    for by, ms in times.items():
        rate = amount / ms * 1e3
        rows.append({"what": what, "by": by, "ms": ms, "rate": rate / 1e12, "unit": unit, "share": rate / limit})
        print(f"{what:45} {by:30} {ms:8.3f} ms  {rate / 1e12:7.2f} {unit:8}  {rate / limit:4.0%}", flush=True)
    return rows


def grow_tiles(m: int, n: int, k: int) -> list[dict]:
    """Time every tile; print registers and spills of its threads, and the bytes that programs load per FLOP."""
    a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    tiles = {f"{tile[0]} x {tile[1]}": tile for tile in TILES}
    times = milliseconds({by: lambda t=t: dot(a, b, *t) for by, t in tiles.items()})
    _, flops = cost(m, n, k, torch.float32)
    found = compare(f"{m} x {n} x {k}, float32", times, flops, PEAK[torch.float32], "TFLOP/s")
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
    times = milliseconds({f"{e} elements per thread": lambda e=e: copy(x, e) for e in ELEMENTS})
    found = compare(f"copy of {n} elements, {str(dtype)[6:]}", times, 2 * x.nbytes, copy_rate())
    return [row | {"elements": elements} for row, elements in zip(found, ELEMENTS)]


def measure() -> list[dict]:
    """Time 4,096 x 4,096 x 4,096 in float32 by every tile, and a copy of 1 GiB of bfloat16."""
    return grow_tiles(4096, 4096, 4096) + grow_copies(2**29, torch.bfloat16)


# -------------------------------------------------------------------------------------------------------------- main
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(device)
    if device == "cuda":
        measure()


if __name__ == "__main__":
    main()
