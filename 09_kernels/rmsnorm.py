"""RMSNorm in one kernel forward and one backward, alone or with the residual add in front of it.

A norm computes little: its time is that of the bytes it moves. Forward reads x and writes y (2 passes over n·d
elements), backward reads x and dy and writes dx (3). With the residual add, both have 4: two tensors come in, two go
out. The gradient of the weight is a sum over all rows: each program adds up its own rows in fp32 registers and writes
one row of partial sums, which are then added in a fixed order. No atomics: two runs agree to the bit.

Parent:   none
Run:      python 09_kernels/rmsnorm.py
Source:   Zhang and Sennrich 2019, arXiv:1910.07467
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

# ------------------------------------------------------------------------------------------------------------ config
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
LONGEST_ROW = 2**16  # elements of a row, which one program holds; beyond some 8,192, backward spills registers


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def widen(x):
    """Compute in fp32, or in float64 where the tensors are."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def rms_norm_forward(
    x_ptr, branch_ptr, weight_ptr, sum_ptr, y_ptr, rstd_ptr, n, d, x_stride, branch_stride,
    EPS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows of x [n, d], or of x + branch, which is rounded and written to `sum` first."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # 64 bits: n·d may be beyond 2^31
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < n) & (column < d)
    x = tl.load(x_ptr + row * x_stride + column, inside, 0)
    if ADD:
        x = widen(x) + widen(tl.load(branch_ptr + row * branch_stride + column, inside, 0))
        x = x.to(y_ptr.dtype.element_ty)  # the norm is that of the sum as it is stored
        tl.store(sum_ptr + row * d + column, x, inside)
    x = widen(x)
    # EPS is a constant: a float that is handed to a kernel has 32 bits, which float64 would notice
    rstd = 1 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / d + EPS)  # ROWS 1
    y = widen(tl.load(weight_ptr + column, column < d, 0)) * x * rstd
    tl.store(y_ptr + row * d + column, y.to(y_ptr.dtype.element_ty), inside)
    tl.store(rstd_ptr + row, rstd, row < n)


@triton.jit
def rms_norm_backward(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, n, d, dy_stride, dsum_stride, x_stride,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx [n, d] of every programs-th block of rows, and this program's row of partial sums for the weight."""
    column = tl.arange(0, COLUMNS)[None, :]
    weight = widen(tl.load(weight_ptr + column, column < d, 0))
    total = tl.zeros([1, COLUMNS], weight.dtype)
    first = tl.program_id(0).to(tl.int64) * ROWS
    # the loads of the next blocks are under way while this one is computed: STAGES of them
    for start in tl.range(first, n, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < n) & (column < d)
        x = widen(tl.load(x_ptr + row * x_stride + column, inside, 0))
        dy = widen(tl.load(dy_ptr + row * dy_stride + column, inside, 0))
        rstd = tl.load(rstd_ptr + row, row < n, 0)
        normed = x * rstd
        total += tl.sum(dy * normed, 0, keep_dims=True)
        slope = weight * dy
        dx = rstd * (slope - normed * (tl.sum(slope * normed, 1, keep_dims=True) / d))
        if ADD:
            dx += widen(tl.load(dsum_ptr + row * dsum_stride + column, inside, 0))
        tl.store(dx_ptr + row * d + column, dx.to(dx_ptr.dtype.element_ty), inside)
    tl.store(partial_ptr + tl.program_id(0) * d + column, total, column < d)


def elements(x: Tensor) -> int:
    """Return how many elements a program takes: on a GPU a few per thread, in the interpreter, which is slow, many."""
    return 8192 if x.is_cuda else 2**17


def rows_of(x: Tensor) -> Tensor:
    """View x [..., d] as rows [n, d]; copy it only where its strides leave no other way."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def normalize(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, branch [n, d] -> their sum, or x if there is no branch; the normalised sum [n, d]; 1/rms [n]"""
    (n, d), add = x.shape, branch is not None
    y, total = x.new_empty(n, d), x.new_empty(n, d) if add else x
    rstd = x.new_empty(n, dtype=torch.promote_types(x.dtype, torch.float32))
    branch = branch if add else x
    columns = triton.next_power_of_2(d)
    rows = max(1, elements(x) // columns)
    if n:
        rms_norm_forward[(triton.cdiv(n, rows),)](
            x, branch, weight, total, y, rstd, n, d, x.stride(0), branch.stride(0),
            EPS=eps, ADD=add, ROWS=rows, COLUMNS=columns, num_warps=min(max(rows * columns // 1024, 4), 32),
        )  # fmt: skip
    return total, y, rstd


def normalize_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of y and of the sum [n, d], the sum x [n, d] -> gradient of the sum, and of the weight [d]"""
    (n, d), add = x.shape, dsum is not None
    dsum = dsum if add else dy
    columns = triton.next_power_of_2(d)
    rows = max(1, elements(x) // columns // (1 + add))
    block = (2 + add) * rows * columns * x.element_size()  # bytes of a program's loads, which wait in shared memory
    stages = max(1, min(4, 200_000 // block))  # of which an H100 has 227 KiB per program
    # one program per SM, or two in the interpreter: partial sums must have company
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    dx, partial = x.new_empty(n, d), rstd.new_empty(programs, d)
    rms_norm_backward[(programs,)](
        dy, dsum, x, weight, rstd, dx, partial, n, d, dy.stride(0), dsum.stride(0), x.stride(0),
        ADD=add, ROWS=rows, COLUMNS=columns, STAGES=stages, num_warps=min(max(columns // 512, 4), 32),
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


class Norm(torch.autograd.Function):
    """x [n, d], weight [d] -> x normalised [n, d]"""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _, y, rstd = normalize(x, None, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = normalize_backward(rows_of(dy), None, x, weight, rstd)
        return dx, dweight, None


class AddNorm(torch.autograd.Function):
    """x, branch [n, d], weight [d] -> their sum, and the sum normalised [n, d]"""

    @staticmethod
    def forward(ctx, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, rstd = normalize(x, branch, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        return total, y

    @staticmethod
    def backward(ctx, dsum: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = normalize_backward(rows_of(dy), rows_of(dsum), x, weight, rstd)
        return dx, dx, dweight, None


def check_norm(x: Tensor, branch: Tensor, weight: Tensor) -> None:
    """Raise ValueError for inputs that the kernels would misread."""
    if x.shape[-1] > LONGEST_ROW:
        raise ValueError(f"a row has {x.shape[-1]} elements: must be at most {LONGEST_ROW}")
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}: must have a floating-point dtype")
    if x.shape != branch.shape or x.dtype != branch.dtype or weight.shape != x.shape[-1:]:
        shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in (x, branch, weight))
        raise ValueError(f"x, branch and weight are {shapes}: must be alike, and the weight a row")


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Divide x [..., d] by the root of the mean square of its rows, and multiply it by weight [d].

    x float16, bfloat16, float32 or float64; computed in float32 (float64), rounded once.
    Raises ValueError for shapes that do not fit, and for a row of more than 65,536 elements.
    """
    check_norm(x, x, weight)
    return Norm.apply(rows_of(x), weight.contiguous(), eps).view(x.shape)


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Add branch to the residual stream x [..., d]; return the sum, and the sum normalised as by rms_norm."""
    check_norm(x, branch, weight)
    total, y = AddNorm.apply(rows_of(x), rows_of(branch), weight.contiguous(), eps)
    return total.view(x.shape), y.view(x.shape)


# --------------------------------------------------------------------------------------------------------- reference
def reference(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """The same in plain PyTorch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_reference(x: Tensor, branch: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """The same with the residual add."""
    return x + branch, reference(x + branch, weight, eps)


def cost(n: int, d: int, passes: int, dtype: torch.dtype) -> int:
    """Bytes that n rows of d elements take in that many passes; weight and 1/rms are next to nothing."""
    return passes * n * d * dtype.itemsize


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs, in float64."""
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=torch.float64, device=device)
    for n, d in (7, 512), (300, 1000), (40, 5), *([(16384, 4096)] if device == "cuda" else []):
        yield f"{n} x {d}", rms_norm, reference, [random(n, d), random(d)]
        yield f"{n} x {d}, added", add_rms_norm, add_reference, [random(n, d), random(n, d), random(d)]
    strided = [random(3, 40, 20), random(17)]
    yield "strided", lambda x, w: rms_norm(x[:, ::2, 1:-2], w), lambda x, w: reference(x[:, ::2, 1:-2], w), strided
    transposed = [random(20, 30), random(20)]
    yield "transposed", lambda x, w: rms_norm(x.T, w), lambda x, w: reference(x.T, w), transposed
    scales = torch.tensor([[1e4], [1e-2], [0], [1]], device=device)
    yield "large and small rows", rms_norm, reference, [random(4, 64) * scales, random(64)]


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
    """Time 16,384 rows of 4,096 elements in bfloat16, the weight in float32, by eager, torch.compile and ours."""
    n, d, dtype, limit, rows = 16384, 4096, torch.bfloat16, copy_rate(), []
    x, branch, dy = torch.randn(3, n, d, dtype=dtype, device="cuda")
    weight = torch.randn(d, device="cuda")
    for what, ours, plain, inputs, passes in (
        (f"{n} x {d}", rms_norm, reference, [x, weight], (2, 3)),
        (f"{n} x {d}, added", add_rms_norm, add_reference, [x, branch, weight], (4, 4)),
    ):
        inputs = [x.requires_grad_() for x in inputs]
        dys = [dy] * (len(inputs) - 1)  # of both outputs, if a branch is added
        functions = {"eager": plain, "torch.compile": torch.compile(plain), "ours": ours}
        runs = {by: partial(f, *inputs) for by, f in functions.items()}
        both = {
            by: lambda run=run, inputs=inputs, dys=dys: torch.autograd.grad(run(), inputs, dys)
            for by, run in runs.items()
        }
        forward = compare(f"{what}, forward", runs, cost(n, d, passes[0], dtype), limit)
        rows += forward + compare(f"{what}, backward", both, cost(n, d, passes[1], dtype), limit, before=forward)
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
# Copy:     LONGEST_ROW, widen, rms_norm_forward, rms_norm_backward, elements, rows_of, normalize, normalize_backward,
#           Norm, AddNorm, check_norm, rms_norm, add_rms_norm (call rms_norm or add_rms_norm, with the eps of your
#           model: 1e-5, as in Llama 3, if you give none)
