"""SwiGLU's elementwise half, silu(gate)·up, in one kernel forward and one backward that writes over its inputs.

Forward reads two tensors and writes one (3 passes over n·f elements). Nothing but gate and up is kept: backward
computes the sigmoid again, which costs no time, since the kernel waits for memory anyway. Backward reads three tensors
and writes two (5 passes), over gate and up themselves, which nobody needs any more. With the matmul that follows, the
product need not be kept, either: the backward kernel writes it, too (6 passes), just before the matmul that reads it.
From forward to backward that is 2·n·f elements instead of 3·n·f, in the largest tensors of a block.

Parent:   none
Run:      python 09_kernels/swiglu.py
Source:   Shazeer 2020, arXiv:2002.05202
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl

# ------------------------------------------------------------------------------------------------------------ config
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def widen(x):
    """Compute in fp32, or in float64 where the tensors are."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


def rows_of(x: Tensor) -> Tensor:
    """View x [..., d] as rows [n, d]; copy it only where its strides leave no other way."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


@triton.jit
def tile_indices(columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of this program's tile. Neighbouring programs have neighbouring tiles of the same rows."""
    tiles = tl.cdiv(columns, COLUMNS)  # of a row
    program = tl.program_id(0).to(tl.int64)  # 64 bits: a tensor may have more than 2^31 elements
    row = program // tiles * ROWS + tl.arange(0, ROWS)[:, None]
    return row, program % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def silu_mul_forward(
    gate_ptr, up_ptr, h_ptr, n, f, gate_stride, up_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write h = silu(gate)·up [n, f] for one tile of ROWS x COLUMNS elements."""
    row, column = tile_indices(f, ROWS, COLUMNS)
    inside = (row < n) & (column < f)
    gate = widen(tl.load(gate_ptr + row * gate_stride + column, inside, 0))
    up = widen(tl.load(up_ptr + row * up_stride + column, inside, 0))
    h = gate * sigmoid(gate) * up
    tl.store(h_ptr + row * f + column, h.to(h_ptr.dtype.element_ty), inside)


@triton.jit
def silu_mul_backward(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, f,
    dh_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    RECOMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one tile of gate and up [n, f], which may be written over them; and h over dh."""
    row, column = tile_indices(f, ROWS, COLUMNS)
    inside = (row < n) & (column < f)
    dh = widen(tl.load(dh_ptr + row * dh_stride + column, inside, 0))
    gate = widen(tl.load(gate_ptr + row * gate_stride + column, inside, 0))
    up = widen(tl.load(up_ptr + row * up_stride + column, inside, 0))
    share = sigmoid(gate)
    dgate = dh * up * share * (1 + gate * (1 - share))
    dup = dh * gate * share
    tl.store(dgate_ptr + row * dgate_stride + column, dgate.to(dgate_ptr.dtype.element_ty), inside)
    tl.store(dup_ptr + row * dup_stride + column, dup.to(dup_ptr.dtype.element_ty), inside)
    if RECOMPUTE:
        tl.store(dh_ptr + row * dh_stride + column, (gate * share * up).to(dh_ptr.dtype.element_ty), inside)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), of the exponential of a negative number, which cannot overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1, small) / (1 + small)


def tile(x: Tensor) -> tuple[int, int]:
    """Return rows and columns of a program's tile; the interpreter, which is slow, needs few and large programs."""
    columns = min(triton.next_power_of_2(x.shape[1]), 1024)
    return max(1, (1024 if x.is_cuda else 2**17) // columns), columns


def silu_mul_rows(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [n, f] -> h [n, f]"""
    (n, f), (rows, columns) = gate.shape, tile(gate)
    h = gate.new_empty(n, f)
    if h.numel():
        silu_mul_forward[(triton.cdiv(n, rows) * triton.cdiv(f, columns),)](
            gate, up, h, n, f, gate.stride(0), up.stride(0), ROWS=rows, COLUMNS=columns
        )
    return h


def silu_mul_gradients(
    dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, recompute: bool = False
) -> None:
    """Write the gradients of gate and up [n, f] to dgate and dup, which may be gate and up; h over dh if asked to."""
    (n, f), (rows, columns) = gate.shape, tile(gate)
    if gate.numel():
        silu_mul_backward[(triton.cdiv(n, rows) * triton.cdiv(f, columns),)](
            dh, gate, up, dgate, dup, n, f,
            dh.stride(0), gate.stride(0), up.stride(0), dgate.stride(0), dup.stride(0),
            RECOMPUTE=recompute, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip


class SiluMul(torch.autograd.Function):
    """gate, up [n, f] -> silu(gate)·up [n, f]"""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu_mul_rows(gate, up)

    @staticmethod
    def backward(ctx, dh: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        gate, up = dgate, dup = ctx.saved_tensors
        if torch.compiler.is_compiling():  # it must not write over what was saved; it plans memory itself
            dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        silu_mul_gradients(rows_of(dh), gate, up, dgate, dup)
        if dgate is gate:  # an operation that has saved gate or up gets an error instead of their gradients
            torch.autograd.graph.increment_version((gate, up))
        return dgate, dup


class SwiGLU(torch.autograd.Function):
    """gate, up [n, f], weight [d, f] -> (silu(gate)·up) @ weight.T [n, d]"""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return silu_mul_rows(gate, up) @ weight.T

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        gate, up, weight = ctx.saved_tensors
        dgate, dup = gate, up
        if torch.compiler.is_compiling():
            dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        dh = dy @ weight
        silu_mul_gradients(dh, gate, up, dgate, dup, recompute=True)  # dh is h from here on
        if dgate is gate:
            torch.autograd.graph.increment_version((gate, up))
        return dgate, dup, dy.T @ dh


def check_free(*tensors: Tensor) -> None:
    """Raise ValueError where backward would write over memory that is not this operation's alone.

    Compiled, backward writes elsewhere.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return
    for x in tensors:
        if (x if x._base is None else x._base).is_leaf:
            raise ValueError(
                "backward writes over its inputs: they must not be leaves, such as parameters, nor views of them"
            )
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
            raise ValueError("backward writes over its inputs: they must not be expanded")
    if len({x.data_ptr() for x in tensors if x.numel()}) < sum(x.numel() > 0 for x in tensors):
        raise ValueError("backward writes over its inputs: they must not share memory")


def check_swiglu(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError for what the kernels would not read, or write, as it is meant."""
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.is_floating_point():
        found = f"gate is {list(gate.shape)} {gate.dtype}, up {list(up.shape)} {up.dtype}"
        raise ValueError(f"{found}: must be alike, and of a floating-point dtype")
    check_free(gate, up)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate)·up for gate and up [..., f] of one dtype; backward writes their gradients over them.

    So both must be results of operations that do not need them in backward, as a matmul is; autograd raises
    RuntimeError if one does, or if backward runs twice. Raises ValueError for leaves, integers and shared memory; gate
    and up may be parts of one tensor, but must not overlap.
    """
    check_swiglu(gate, up)
    return SiluMul.apply(rows_of(gate), rows_of(up)).view(gate.shape)


def swiglu(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """Return (silu(gate)·up) @ weight [d, f].T, keeping gate, up [..., f] and weight; conditions as for silu_mul.

    The gradient of the weight needs silu(gate)·up again. The backward kernel has all of it in registers, and writes it
    over the gradient that it has just read: one more pass, for n·f elements less from forward to backward. The matmul
    has the dtype of gate and up.
    """
    check_swiglu(gate, up)
    with torch.autocast(gate.device.type, enabled=False):  # it would cast the matmul of forward alone
        y = SwiGLU.apply(rows_of(gate), rows_of(up), weight.to(gate.dtype))
    return y.view(*gate.shape[:-1], len(weight))


# --------------------------------------------------------------------------------------------------------- reference
def reference(gate: Tensor, up: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return nn.functional.silu(gate) * up


def matmul_reference(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """The same with the matmul after it."""
    return reference(gate, up) @ weight.T


def cost(n: int, f: int, passes: int, dtype: torch.dtype) -> int:
    """Bytes that n rows of f elements take in that many passes."""
    return passes * n * f * dtype.itemsize


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs, in float64."""
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=torch.float64, device=device)

    def ours(gate: Tensor, up: Tensor) -> Tensor:
        return silu_mul(gate * 1, up * 1)  # leaves must not be written over

    def with_matmul(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return swiglu(gate * 1, up * 1, weight)

    for n, f in (5, 3000), (300, 100), (2, 9), (0, 8), *([(16384, 14336)] if device == "cuda" else []):
        yield f"{n} x {f}", ours, reference, [random(n, f), random(n, f)]
    for n, f, d in (50, 300, 20), (21, 33, 37), (0, 8, 4):
        inputs = [random(n, f), random(n, f), random(d, f) / f**0.5]
        yield f"{n} x {f} x {d}, with the matmul", with_matmul, matmul_reference, inputs
    halves = lambda x: silu_mul(*(x * 1).chunk(2, -1)), lambda x: reference(*x.chunk(2, -1))
    yield "halves of one tensor", *halves, [random(2, 9, 60)]
    transposed = lambda x, y: ours(x.mT, y.mT), lambda x, y: reference(x.mT, y.mT)
    yield "transposed", *transposed, [random(30, 7), random(30, 7)]
    large = torch.tensor([[-1e4, -80.0, -20.0, 0.0, 20.0, 80.0, 1e4]], dtype=torch.float64, device=device)
    yield "large values", ours, reference, [large, torch.ones_like(large)]


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
    """Time 16,384 rows of 14,336 elements in bfloat16 by eager, torch.compile and ours."""
    n, f, dtype, limit = 16384, 14336, torch.bfloat16, copy_rate()
    gate, up = (torch.randn(n, f, dtype=dtype, device="cuda", requires_grad=True) for _ in range(2))
    # ours writes gradients to other memory here, so that every repeat reads the same gate and up
    dh, dgate, dup = torch.randn_like(gate), torch.empty_like(gate), torch.empty_like(up)
    plain = {"eager": reference, "torch.compile": torch.compile(reference)}
    runs = {by: partial(function, gate, up) for by, function in plain.items()}
    both = {by: lambda run=run: torch.autograd.grad(run(), [gate, up], dh) for by, run in runs.items()}
    ours = {"ours": partial(torch.no_grad()(silu_mul_gradients), dh, gate, up, dgate, dup)}
    runs["ours"] = partial(torch.no_grad()(silu_mul), gate, up)
    rows = compare(f"{n} x {f}, forward", runs, cost(n, f, 3, dtype), limit)
    rows += compare(f"{n} x {f}, backward", both, cost(n, f, 5, dtype), limit, before=rows)
    return rows + compare(f"{n} x {f}, backward", ours, cost(n, f, 5, dtype), limit)


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
# Copy:     widen, rows_of, tile_indices, silu_mul_forward, silu_mul_backward, sigmoid, tile, silu_mul_rows,
#           silu_mul_gradients, SiluMul, SwiGLU, check_free, check_swiglu, silu_mul, swiglu (call silu_mul, or swiglu
#           with the weight of the matmul)
