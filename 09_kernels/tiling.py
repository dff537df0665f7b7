"""Matrix multiplication in float32: each rung loads fewer bytes for the same FLOPs.

C [m, n] = A [m, k] B [k, n] has 2·m·n·k FLOPs. Programs with tiles of block_m x block_n of C load
m·k·(n / block_n) + k·n·(m / block_m) elements together: tiles twice as high and twice as wide halve that.

rows: a program computes part of one row of C. Every element of A is loaded n / block_n times, of B m times.
tiles: a program keeps a tile of C in registers, and adds a column of A times a row of B to it, k times.
dot: the same tile, in steps of block_k: blocks of A and B wait in shared memory for all threads of the program, and
the next blocks are loaded meanwhile. In bfloat16 tl.dot runs on tensor cores, and adds up in float32.

Parent:   none
Run:      python 09_kernels/tiling.py
Source:   Lam, Rothberg and Wolf 1991, doi:10.1145/106972.106981
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
TILES = {"rows": (1, 128), "tiles": (64, 128), "dot": (128, 128)}  # the elements of C that a program computes
PEAK = {torch.float32: 67e12, torch.bfloat16: 989.5e12}  # FLOP/s of an H100 or H200: CUDA cores, tensor cores


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def matmul_rows(a_ptr, b_ptr, c_ptr, m, n, k, a_stride, b_stride, BLOCK: tl.constexpr):
    """Compute BLOCK elements of one row of c [m, n]: for each of k, one element of a times BLOCK of b."""
    row = (tl.program_id(0) % m).to(tl.int64)  # neighbours take the same columns of b
    column = tl.program_id(0) // m * BLOCK + tl.arange(0, BLOCK)
    a_ptr += row * a_stride
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, k):
        total += tl.load(a_ptr) * tl.load(b_ptr + column, column < n, 0)
        a_ptr += 1
        b_ptr += b_stride
    tl.store(c_ptr + row * n + column, total, column < n)


@triton.jit
def matmul_tiles(
    a_ptr, b_ptr, c_ptr, m, n, k, a_stride, b_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile of c [m, n]: for each of k, BLOCK_M elements of a times BLOCK_N of b, an outer product.

    a is stored by columns, so that neighbouring threads read neighbouring elements of a column.
    """
    tiles = tl.cdiv(n, BLOCK_N)  # side by side: neighbours take the same rows of a
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # in registers until it is complete
    for _ in tl.range(0, k):
        a = tl.load(a_ptr + row, row < m, 0)  # BLOCK_M 1
        b = tl.load(b_ptr + column, column < n, 0)  # 1 BLOCK_N
        total += a * b
        a_ptr += a_stride
        b_ptr += b_stride
    tl.store(c_ptr + row * n + column, total, (row < m) & (column < n))


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


def rows(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k], b [k, n], float32 -> their product [m, n]; a program computes part of a row."""
    a, b, c = prepare(a, b, (torch.float32,))
    (m, n), block = c.shape, TILES["rows"][1]
    if c.numel():
        matmul_rows[(m * triton.cdiv(n, block),)](
            a, b, c, m, n, a.shape[1], a.stride(0), b.stride(0), BLOCK=block, num_warps=4
        )
    return c


def tiles(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k], b [k, n], float32 -> their product [m, n]; a program computes a tile."""
    a, b, c = prepare(a, b, (torch.float32,))
    a = a.T.contiguous()  # k m
    (m, n), (block_m, block_n) = c.shape, TILES["tiles"]
    if c.numel():
        matmul_tiles[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
            a, b, c, m, n, len(a), a.stride(0), b.stride(0), BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4
        )
    return c


def dot(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k], b [k, n], float32, on GPUs also bfloat16 -> their product [m, n]; a tile, in blocks of k.

    It is added up in float32. Triton's interpreter would multiply the bits of bfloat16 as if they were integers.
    """
    a, b, c = prepare(a, b, (torch.float32, torch.bfloat16))
    (m, n), (block_m, block_n) = c.shape, TILES["dot"]
    if c.numel():
        matmul_dot[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
            a, b, c, m, n, a.shape[1], a.stride(0), b.stride(0),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=128 // a.element_size(), num_warps=8, num_stages=3,
        )  # fmt: skip
    return c


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


def ladder(dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The rungs for a dtype: bfloat16 is for tensor cores."""
    return {"rows": rows, "tiles": tiles, "dot": dot} if dtype == torch.float32 else {"dot": dot}


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs, a [m, k] and b [k, n]."""
    torch.manual_seed(0)
    large = [(1000, 1500, 2000), (4096, 4096, 4096)] if device == "cuda" else []
    sizes = (19, 150, 70), (1, 1, 1), (130, 3, 5), (1, 257, 35), (0, 5, 4), (4, 5, 0), *large
    for dtype in PEAK if device == "cuda" else (torch.float32,):  # see dot
        random = partial(torch.randn, dtype=dtype, device=device)
        tried = {f"{m} x {n} x {k}": [random(m, k), random(k, n)] for m, n, k in sizes}
        larger = [torch.full(size, float("nan"), dtype=dtype, device=device) for size in ((60, 237), (74, 279))]
        views = [x[::2, 3:-197] for x in larger]  # what lies between and around is NaN
        tried["strided"] = [view.copy_(random(view.shape)) for view in views]
        tried["transposed"] = [random(40, 30).T, random(70, 40).T]
        tried["large and small"] = [random(20, 40) * 1e30, random(40, 20) * 1e-30]
        for (rung, ours), (what, inputs) in product(ladder(dtype).items(), tried.items()):
            yield f"{rung}, {str(dtype)[6:]}, {what}", ours, reference, inputs


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


def climb(m: int, n: int, k: int, dtype: torch.dtype) -> list[dict]:
    """Time cuBLAS and each rung, print the bytes that each rung loads; return the rows of the table."""
    a, b = torch.randn(m, k, device="cuda").to(dtype), torch.randn(k, n, device="cuda").to(dtype)
    contenders = {"torch.matmul": reference} | ladder(dtype)
    runs = {by: partial(f, a, b) for by, f in contenders.items()}
    (_, flops), least = cost(m, n, k, dtype), reads(m, n, k, m, n, dtype)
    found = compare(f"{m} x {n} x {k}, {str(dtype)[6:]}", runs, flops, PEAK[dtype], "TFLOP/s")
    for row in found:
        if row["by"] in TILES:
            row["loaded"] = reads(m, n, k, *TILES[row["by"]], dtype)
            speed, intensity = row["loaded"] / row["ms"] / 1e9, row["loaded"] / flops
            print(f"{row['by']:6} loads {row['loaded'] / least:8.1f} times the least: ", end="")
            print(f"{row['loaded'] / 1e9:8.2f} GB, {speed:6.2f} TB/s, {intensity:7.4f} bytes per FLOP", flush=True)
    return found


def measure() -> list[dict]:
    """Time 4,096 x 4,096 x 4,096 in float32 and bfloat16, and count the bytes that programs load."""
    return [row for dtype in PEAK for row in climb(4096, 4096, 4096, dtype)]


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
# Copy:     TILES, prepare, matmul_dot, dot (forward alone)
