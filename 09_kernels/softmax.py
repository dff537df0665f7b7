"""Softmax over rows of any length: short rows in registers, long rows block by block with a running maximum and sum.

y = e^(x - m) / s, with the row's largest element m, and s the sum of e^(x - m). A row in a program's registers is read
and written once: 2 passes over n·d elements. A longer row takes 3: one sweep finds m and s together, a second one
writes y. In the first sweep each lane has an m and an s of its own. A new element x changes them to

    s·e^(m - x) + 1 and x  if x > m        s + e^(x - m) and m  otherwise

Backward, dx = y·(dy - sum of y·dy), reads y and dy and writes dx: 3 passes, or 5 for a long row.

Parent:   none
Run:      python 09_kernels/softmax.py
Source:   Milakov and Gimelshein 2018, arXiv:1805.02867
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl

# ------------------------------------------------------------------------------------------------------------ config
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
LONGEST_BLOCK = 2**14  # elements: longer rows do not fit into the registers of one program
BLOCK = 2**13  # elements of a long row that a program takes at a time


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def widen(x):
    """Compute in fp32, or in float64 where the tensors are."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def softmax_forward(x_ptr, y_ptr, n, d, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the softmax of ROWS rows of x [n, d] to y [n, d]: a row lies in one block, d <= COLUMNS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # 64 bits: n·d may be beyond 2^31
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < n) & (column < d)
    x = widen(tl.load(x_ptr + row * x_stride + column, inside, float("-inf")))
    y = tl.exp(x - tl.max(x, 1, keep_dims=True))  # a row of -inf alone becomes NaN, as in PyTorch
    y *= 1 / tl.sum(y, 1, keep_dims=True)  # ROWS 1: a division per row, not per element
    tl.store(y_ptr + row * d + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def softmax_forward_long(
    x_ptr, y_ptr, d, x_stride,
    LOWEST: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the softmax of one row of x [n, d] to y [n, d], COLUMNS elements at a time."""
    x_ptr += tl.program_id(0).to(tl.int64) * x_stride  # 64 bits: n·d may be beyond 2^31
    y_ptr += tl.program_id(0).to(tl.int64) * d
    total = widen(tl.zeros([COLUMNS], x_ptr.dtype.element_ty))
    highest = total + LOWEST  # finite: a lane may meet -inf first, and -inf minus -inf is NaN
    # the loads of the next blocks are under way while this one is computed: STAGES of them
    for start in tl.range(0, d, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        x = widen(tl.load(x_ptr + column, column < d, float("-inf")))
        scale = tl.exp(-tl.abs(x - highest))
        total = tl.where(x > highest, total * scale + 1, total + scale)
        highest = tl.maximum(highest, x)
    row_highest = tl.max(highest, 0)
    inverse = 1 / tl.sum(total * tl.exp(highest - row_highest), 0)
    last = (tl.cdiv(d, COLUMNS) - 1) * COLUMNS
    for start in tl.range(0, d, COLUMNS, num_stages=STAGES):
        column = last - start + tl.arange(0, COLUMNS)
        y = tl.exp(widen(tl.load(x_ptr + column, column < d, float("-inf"))) - row_highest) * inverse
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), column < d)


@triton.jit
def softmax_backward(dy_ptr, y_ptr, dx_ptr, n, d, dy_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write dx [n, d] of ROWS rows: a row lies in one block, d <= COLUMNS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < n) & (column < d)
    y = widen(tl.load(y_ptr + row * d + column, inside, 0))
    dy = widen(tl.load(dy_ptr + row * dy_stride + column, inside, 0))
    dx = y * (dy - tl.sum(y * dy, 1, keep_dims=True))
    tl.store(dx_ptr + row * d + column, dx.to(dx_ptr.dtype.element_ty), inside)


@triton.jit
def softmax_backward_long(dy_ptr, y_ptr, dx_ptr, d, dy_stride, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """Write dx of one row, COLUMNS elements at a time."""
    dy_ptr += tl.program_id(0).to(tl.int64) * dy_stride
    y_ptr += tl.program_id(0).to(tl.int64) * d
    dx_ptr += tl.program_id(0).to(tl.int64) * d
    total = widen(tl.zeros([COLUMNS], y_ptr.dtype.element_ty))
    for start in tl.range(0, d, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        y = widen(tl.load(y_ptr + column, column < d, 0))
        total += y * widen(tl.load(dy_ptr + column, column < d, 0))
    mean = tl.sum(total, 0)  # of dy, weighted by y
    last = (tl.cdiv(d, COLUMNS) - 1) * COLUMNS
    for start in tl.range(0, d, COLUMNS, num_stages=STAGES):
        column = last - start + tl.arange(0, COLUMNS)
        y = widen(tl.load(y_ptr + column, column < d, 0))
        dx = y * (widen(tl.load(dy_ptr + column, column < d, 0)) - mean)
        tl.store(dx_ptr + column, dx.to(dx_ptr.dtype.element_ty), column < d)


def elements(x: Tensor) -> int:
    """Return how many elements a program takes: on a GPU a few per thread, in the interpreter, which is slow, many."""
    return 8192 if x.is_cuda else 2**17


def rows_of(x: Tensor) -> Tensor:
    """View x [..., d] as rows [n, d]; copy it only where its strides leave no other way."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def softmax_rows(x: Tensor) -> Tensor:
    """x [n, d] -> the softmax of its rows [n, d]"""
    n, d = x.shape
    y = torch.empty(n, d, dtype=x.dtype, device=x.device)
    if d > LONGEST_BLOCK:
        # 32 warps: an SM works on one row at a time, so that few rows share the L2 cache
        stages = 8 // x.element_size()  # in shared memory
        lowest = torch.finfo(torch.promote_types(x.dtype, torch.float32)).min
        softmax_forward_long[(n,)](x, y, d, x.stride(0), LOWEST=lowest, COLUMNS=BLOCK, STAGES=stages, num_warps=32)
        return y
    columns = triton.next_power_of_2(d)
    rows = max(1, elements(x) // columns)
    softmax_forward[(triton.cdiv(n, rows),)](
        x, y, n, d, x.stride(0), ROWS=rows, COLUMNS=columns, num_warps=min(max(rows * columns // 1024, 4), 32)
    )
    return y


def softmax_rows_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Gradient of y [n, d], and y [n, d], contiguous -> gradient of x [n, d]"""
    n, d = y.shape
    dx = torch.empty_like(y)
    if d > LONGEST_BLOCK:
        stages = 8 // y.element_size()
        softmax_backward_long[(n,)](dy, y, dx, d, dy.stride(0), COLUMNS=BLOCK, STAGES=stages, num_warps=32)
        return dx
    columns = triton.next_power_of_2(d)
    rows = max(1, elements(y) // columns)
    softmax_backward[(triton.cdiv(n, rows),)](
        dy, y, dx, n, d, dy.stride(0), ROWS=rows, COLUMNS=columns, num_warps=min(max(rows * columns // 1024, 4), 32)
    )
    return dx


class Softmax(torch.autograd.Function):
    """x [n, d] -> the softmax of its rows [n, d]"""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = softmax_rows(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        (y,) = ctx.saved_tensors
        return softmax_rows_backward(rows_of(dy), y)


def softmax(x: Tensor) -> Tensor:
    """Return e^x of x [..., d], divided by its sum over the last axis. Rows may have any length.

    x float16, bfloat16, float32 or float64; computed in float32 (float64), rounded once. An element of -inf (a mask)
    becomes 0; a row of nothing else becomes NaN, as in PyTorch. Raises ValueError for other dtypes.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"dtype is {x.dtype}: must be one of {DTYPES}")
    return Softmax.apply(rows_of(x)).view(x.shape) if x.numel() else x.clone()


# --------------------------------------------------------------------------------------------------------- reference
def reference(x: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return torch.softmax(x, -1)


def cost(n: int, d: int, passes: int, dtype: torch.dtype) -> int:
    """Bytes that n rows of d elements take in that many passes: the problem needs 2 forward, 3 backward."""
    return passes * n * d * dtype.itemsize


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs, in float64."""
    np.seterr(all="ignore")  # the interpreter computes with numpy, which warns of the inf and NaN that are tried here
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=torch.float64, device=device)
    large = [(16384, 4096), (600, 128256)] if device == "cuda" else []
    for n, d in (7, 512), (300, 1000), (1, 1), (0, 5), (5, 0), (8, LONGEST_BLOCK), (8, 20001), *large:
        yield f"{n} x {d}", softmax, reference, [random(n, d)]
    yield "strided", lambda x: softmax(x[:, ::2, 1:-2]), lambda x: reference(x[:, ::2, 1:-2]), [random(3, 40, 20)]
    yield "transposed", lambda x: softmax(x.T), lambda x: reference(x.T), [random(20, 30)]
    for what, d in ("short", 300), ("long", 2 * BLOCK + 10):
        slopes = torch.linspace(-1, 1, 8, dtype=torch.float64, device=device)
        rising = torch.outer(slopes, torch.linspace(-20, 20, d, dtype=torch.float64, device=device))
        yield f"{what}, rising and falling", softmax, reference, [rising]
        scales = torch.tensor([1e30, -1e30, 1e-30, *[3] * 5], device=device)
        yield f"{what}, large and small", softmax, reference, [random(8, d) * scales[:, None]]
        x = random(8, d).masked_fill(random(8, d) > 0, float("-inf"))
        x[0], x[1, : d // 2], x[2, 1:] = float("-inf"), float("-inf"), float("-inf")
        yield f"{what}, masked", softmax, reference, [x]
        both = lambda x: torch.cat([softmax(x), x], -1), lambda x: torch.cat([reference(x), x], -1)
        yield f"{what}, gradient strided", *both, [random(5, d)]


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
    """Exit if an error against float64 is above twice PyTorch's own, or two roundings (1e-12 in float64)."""
    for dtype in DTYPES:
        if dtype == torch.bfloat16 and device == "cpu":
            continue  # Triton's interpreter cuts bits off instead of rounding
        least, worst = max(torch.finfo(dtype).eps / 4, 5e-13), (0.0, 0.0, 0.0, "")
        for what, *case in cases(device):
            for mine, theirs in errors(*case, dtype):
                worst = max(worst, (mine / max(theirs, least), mine, theirs, what))
        ratio, mine, theirs, what = worst
        print(f"{str(dtype)[6:]:10} worst error {mine:.1e}, PyTorch's {theirs:.1e}  ({what})", flush=True)
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


def measure() -> list[dict]:
    """Time rows of 4,096 and of 128,256 elements in bfloat16 by eager, torch.compile and ours."""
    rows, dtype, limit = [], torch.bfloat16, copy_rate()
    functions = {"eager": reference, "torch.compile": torch.compile(reference, dynamic=False), "ours": softmax}
    for n, d in (16384, 4096), (4096, 128256):
        x = torch.randn(n, d, dtype=dtype, device="cuda", requires_grad=True)
        dy = torch.randn_like(x)
        runs = {by: partial(f, x) for by, f in functions.items()}
        both = {by: lambda f=f, x=x, dy=dy: torch.autograd.grad(f(x), x, dy) for by, f in functions.items()}
        forward = compare(f"{n} x {d}, forward", runs, cost(n, d, 2, dtype), limit)
        rows += forward + compare(f"{n} x {d}, backward", both, cost(n, d, 3, dtype), limit, before=forward)
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
# Copy:     DTYPES, LONGEST_BLOCK, BLOCK, widen, softmax_forward, softmax_forward_long, softmax_backward,
#           softmax_backward_long, elements, rows_of, softmax_rows, softmax_rows_backward, Softmax, softmax (call
#           softmax)
