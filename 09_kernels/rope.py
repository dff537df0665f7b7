"""Rotary positions in one kernel that rotates in place: each element is read once and written once.

PyTorch's `x * cos + cat((-high, low)) * sin` is five kernels; compiled, it is one, which writes a new tensor. Queries
and keys before the rotation are of no use to anyone, so this one writes over them: 2 passes over b·s·h·k elements and
no memory. Backward is the rotation by the opposite angle. It writes a new tensor, since autograd may have handed the
gradient to others, too.

Parent:   none
Run:      python 09_kernels/rope.py
Source:   Su et al. 2021, arXiv:2104.09864
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from einops import rearrange
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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


@triton.jit
def rotate_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, n, s, h, x_batch, x_token, y_batch, y_token, table_stride,
    K: tl.constexpr, SIGN: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs (i, i + K/2) of all heads of TOKENS tokens of x [b, s, h·K] by SIGN times their angles."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # of all b·s
    pair = tl.arange(0, PAIRS)[None, :]
    known = (token < n)[:, None] & (pair < K // 2)
    angle = (token % s)[:, None] * table_stride + pair
    cos = widen(tl.load(cos_ptr + angle, known, 0))[:, None, :]  # read once for all heads
    sin = SIGN * widen(tl.load(sin_ptr + angle, known, 0))[:, None, :]
    head = tl.arange(0, HEADS)[None, :, None]
    inside = known[:, None, :] & (head < h)
    column = head * K + pair[:, None, :]
    at = ((token // s) * x_batch + (token % s) * x_token)[:, None, None] + column
    low = widen(tl.load(x_ptr + at, inside, 0))
    high = widen(tl.load(x_ptr + at + K // 2, inside, 0))
    at = ((token // s) * y_batch + (token % s) * y_token)[:, None, None] + column
    tl.store(y_ptr + at, (low * cos - high * sin).to(y_ptr.dtype.element_ty), inside)
    tl.store(y_ptr + at + K // 2, (high * cos + low * sin).to(y_ptr.dtype.element_ty), inside)


def turn(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    """Write x [b, s, h·k], rotated by sign times the angles [s, k], to y [b, s, h·k], which may be x."""
    (b, s, width), k = x.shape, cos.shape[1]
    heads, pairs = triton.next_power_of_2(width // k), triton.next_power_of_2(k // 2)
    tokens = max(1, (1024 if x.is_cuda else 2**16) // (heads * pairs))  # the interpreter needs few, large programs
    if x.numel():
        rotate_kernel[(triton.cdiv(b * s, tokens),)](
            x, y, cos, sin, b * s, s, width // k, x.stride(0), x.stride(1), y.stride(0), y.stride(1), cos.stride(0),
            K=k, SIGN=sign, TOKENS=tokens, HEADS=heads, PAIRS=pairs,
            num_warps=8 if tokens * heads * pairs > 1024 else 4,
        )  # fmt: skip


class Rotate(torch.autograd.Function):
    """x [b, s, h·k] -> x, rotated in place"""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn(x, x, cos, sin, 1)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin)
        return x

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
        turn(dy, dx, *ctx.saved_tensors, -1)
        return dx, None, None


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [b, s, h·k] by the cosine and sine [s, k] of its tokens, and return it: use what is returned.

    x is written over; under selective checkpointing, whose policy may keep what a projection returns, a copy is. A
    checkpointed region must hold the projection, too: recomputation would rotate an x from outside a second time.

    Pairs are (i, i + k/2) of each head, as in Llama's published weights; of the table, the left half is read. x is what
    a projection returns: all heads of a token side by side. (A slice of a merged projection works, too, but autograd
    then copies the gradient of the whole; what split or chunk return must not be changed in place.) The table has both
    halves of a row, k columns, and gets no gradient. Raises ValueError for shapes that do not fit, integers and leaves.
    """
    (_, s, width), (cos, sin) = x.shape, rope
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}: must have a floating-point dtype")
    if cos.shape[0] < s or width % cos.shape[1] or cos.shape[1] % 2:
        raise ValueError(f"a table {list(cos.shape)} does not fit x {list(x.shape)}: needs a row per token, heads of k")
    if cos.shape != sin.shape or cos.stride() != sin.stride():
        raise ValueError("cosine and sine must have the same shape and strides")
    if x.stride(2) != 1 or cos.stride(1) != 1:
        raise ValueError("the last axis of x and of the table must be contiguous")
    if torch.is_grad_enabled() and x.requires_grad and (x if x._base is None else x._base).is_leaf:
        raise ValueError("x is rotated in place: it must not be a leaf, such as a parameter, nor a view of one")
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        raise ValueError("x is expanded: it must have memory for each of its elements")
    if not torch.compiler.is_compiling() and is_in_torch_dispatch_mode():
        x = x.clone()  # what selective checkpointing keeps would be rotated again (nothing public tells that it is on)
    return Rotate.apply(x, cos, sin)


# --------------------------------------------------------------------------------------------------------- reference
def reference(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """The same in plain PyTorch, into a new tensor."""
    x = rearrange(x, "b s (h k) -> b s h k", k=rope[0].shape[1])
    cos, sin = rope[0][: x.shape[1], None], rope[1][: x.shape[1], None]  # s 1 k
    low, high = x.chunk(2, dim=-1)
    return rearrange((x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype), "b s h k -> b s (h k)")


def table(s: int, k: int, device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Cosine and sine [s, k] of the angles of s positions."""
    frequency = 5e5 ** (-torch.arange(0, k, 2, dtype=torch.float64, device=device) / k)
    angle = torch.outer(torch.arange(s, device=device), frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def cost(n: int, width: int, dtype: torch.dtype) -> int:
    """Bytes that n tokens of that many elements take, read and written; the table stays in the L2."""
    return 2 * n * width * dtype.itemsize


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs, in float64. The table is in at least float32."""
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=torch.float64, device=device)

    def both(s: int, k: int, rotation: Callable, view: Callable = lambda x: x) -> Callable:
        wide = table(s, k, device)

        def run(x: Tensor) -> Tensor:
            x = view(x * 1)  # a leaf must not be written over
            return rotation(x, wide if x.dtype == torch.float64 else tuple(t.float() for t in wide))

        return run

    sizes = [(2, 9, 3, 8), (1, 130, 1, 64), (3, 4, 5, 12), (1, 1, 1, 2), (0, 4, 1, 2)]
    if device == "cuda":
        sizes.append((4, 4096, 32, 128))
    for b, s, h, k in sizes:
        yield f"{b} x {s} x {h} heads of {k}", both(s, k, rotate), both(s, k, reference), [random(b, s, h * k)]
    part = lambda x: x[:, 1:, 16:48]  # noqa: E731  queries of a merged projection
    yield "a view", both(12, 8, rotate, part), both(12, 8, reference, part), [random(2, 8, 64)]
    by_token = lambda x: x.transpose(0, 1)  # noqa: E731
    yield "transposed", both(6, 8, rotate, by_token), both(6, 8, reference, by_token), [random(5, 3, 16)]


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
    """Time queries and keys of 4 x 4,096 tokens, 32 and 8 heads of 128, in bfloat16: eager, torch.compile and ours."""
    b, s, k, dtype, limit = 4, 4096, 128, torch.bfloat16, copy_rate()
    rope = table(s, k, "cuda", torch.float32)
    inputs = [torch.randn(b, s, h * k, dtype=dtype, device="cuda", requires_grad=True) for h in (32, 8)]
    dys = [torch.randn_like(x) for x in inputs]

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return reference(q, rope), reference(k, rope)

    runs = {"eager": partial(plain, *inputs), "torch.compile": partial(torch.compile(plain), *inputs)}
    both = {by: lambda run=run: torch.autograd.grad(run(), inputs, dys) for by, run in runs.items()}
    # in place: in a graph of autograd, every repeat would add to the one before
    runs["ours"] = torch.no_grad()(lambda: [rotate(x, rope) for x in inputs])
    ours = {"ours": torch.no_grad()(lambda: [turn(x, torch.empty_like(x), *rope, -1) for x in inputs])}
    what, moved = f"{b} x {s} x (32 + 8) heads of {k}", cost(b * s, 40 * k, dtype)
    rows = compare(f"{what}, forward", runs, moved, limit)
    rows += compare(f"{what}, backward", both, moved, limit, before=rows)
    return rows + compare(f"{what}, backward", ours, moved, limit)


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
# Copy:     widen, rotate_kernel, turn, Rotate, rotate (call rotate)
