"""ELU three ways: eager PyTorch, torch.compile, and a first Triton kernel.

    y = x where x >= 0, else exp(x) - 1          dx = dy where x >= 0, else dy * exp(x)

A kernel is a function that the GPU runs many times at once. Triton calls each run a program: it takes one block of
the elements, loads it from memory into registers, computes, and stores the result. Eager PyTorch starts one kernel
per operation (clamp, exp, subtract, compare, select), and every one of them reads and writes whole tensors: more than
10 passes over n elements. torch.compile and our kernel do all of it in registers: one read, one write, 2 passes.

Two costs decide the time. A launch takes the CPU some microseconds, however small the tensor: this decides at small
sizes, and a CUDA graph avoids it. At large sizes the time is bytes divided by bandwidth, and the arithmetic hides
behind it. In between, tensors that fit into the L2 cache (50 to 60 MB) move faster than memory allows: the table shows
shares above 100 %.

Parent:   none
Copy:     DTYPES, widen, elu_forward, elu_backward, block_length, ELU, elu (call elu)
Run:      python 09_kernels/elementwise.py
Source:   Clevert et al. 2015, arXiv:1511.07289
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl

# ------------------------------------------------------------------------------------------------------------ config
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
SIZES = tuple(2**power for power in range(10, 29, 3))  # elements that are timed: 2^10, 2^13, ..., 2^28


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def widen(x):
    """Compute in fp32, or in float64 where the tensors are."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def elu_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Write y [n] of x [n]: this program's BLOCK elements of it."""
    # All programs run this same text. The program's id says which block is its own.
    start = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: n may be beyond 2^31
    # The positions of the block: a vector of a length known at compile time.
    # Triton spreads it over the threads.
    offset = start + tl.arange(0, BLOCK)
    # The last block may reach beyond the end.
    # Where the mask is false, load gives its last argument, 0, and nothing is stored.
    inside = offset < n
    # A pointer plus a vector of offsets is a vector of addresses.
    # load brings what stands there into registers.
    x = widen(tl.load(x_ptr + offset, inside, 0))
    # Between load and store everything stays in registers and costs no memory traffic:
    # this is what fusion saves.
    y = tl.where(x >= 0, x, tl.exp(x) - 1)
    # One rounding to the tensor's dtype, one write.
    # Programs share nothing, so they may run in any order.
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def elu_backward(dy_ptr, x_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    """Write dx [n] of dy and x [n]: exp(x) is computed again, which is cheaper than loading it."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    x = widen(tl.load(x_ptr + offset, inside, 0))
    dy = widen(tl.load(dy_ptr + offset, inside, 0))
    dx = tl.where(x >= 0, dy, dy * tl.exp(x))
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), inside)


def block_length(x: Tensor) -> int:
    """Elements of a program, a power of two: on a GPU 8 per thread, in the interpreter, which is slow, many."""
    return 1024 if x.is_cuda else 2**17


class ELU(torch.autograd.Function):
    """x of any shape -> ELU of x, contiguous"""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()  # the kernel counts elements, not strides
        ctx.save_for_backward(x)
        y, n, block = torch.empty_like(x), x.numel(), block_length(x)
        if n:  # else there is nothing to launch
            elu_forward[(triton.cdiv(n, block),)](x, y, n, BLOCK=block)  # the grid: a program per block
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()  # the gradient of a transposed or broadcast output has strides of its own
        dx, n, block = torch.empty_like(x), x.numel(), block_length(x)
        if n:
            elu_backward[(triton.cdiv(n, block),)](dy, x, dx, n, BLOCK=block)
        return dx


def elu(x: Tensor) -> Tensor:
    """Return x where x >= 0, else exp(x) - 1, for x of any shape and stride; the result is contiguous.

    x float16, bfloat16, float32 or float64; computed in float32 (float64), rounded once. Near 0, exp(x) is near 1 and
    loses the last bits of x: in float32 the result has an absolute error of up to 1e-7. torch's elu uses expm1.
    Raises ValueError for any other dtype.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: must be one of {', '.join(str(dtype) for dtype in DTYPES)}")
    return ELU.apply(x)


# --------------------------------------------------------------------------------------------------------- reference
def reference(x: Tensor) -> Tensor:
    """The same in plain PyTorch.

    Without clamp, exp of a large x is inf. where drops it, but its backward multiplies it by 0, and dx is NaN.
    """
    return torch.where(x >= 0, x, torch.exp(x.clamp(max=0)) - 1)


def cost(n: int, passes: int, dtype: torch.dtype) -> int:
    """Bytes that n elements take in that many passes: 2 forward, 3 backward. The FLOPs, a few per byte, are free."""
    return passes * n * dtype.itemsize


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs, in float64."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device, generator=generator)

    for n in 1000, 2**18, 2**18 + 5, 0, *([2**26 + 5] if device == "cuda" else []):
        yield f"{n} elements", elu, reference, [random(n)]
    half = torch.full((1,), 0.5, dtype=torch.float64, device=device)
    yield "1 element", elu, reference, [half]
    yield "a scalar", elu, reference, [half.squeeze()]
    yield "strided", lambda x: elu(x[:, ::2, 1:-2]), lambda x: reference(x[:, ::2, 1:-2]), [random(3, 40, 20)]
    yield "transposed", lambda x: elu(x.T), lambda x: reference(x.T), [random(20, 30)]
    yield "gradient transposed", lambda x: elu(x).T, lambda x: reference(x).T, [random(20, 30)]
    yield "gradient broadcast", lambda x: elu(x).sum(0), lambda x: reference(x).sum(0), [random(20, 30)]
    infinity = float("inf")
    extremes = torch.tensor([0, -0.0, 10, -10, -1000, -1e30, infinity, -infinity], dtype=torch.float64, device=device)
    yield "extreme values", elu, reference, [extremes]


# ----------------------------------------------------------------------------------------------------------- measure
def outputs_and_gradients(function: Callable, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Call function on copies of the inputs; return its outputs, and the gradients of a random sum of them."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator(inputs[0].device).manual_seed(1)
    gradients = [torch.randn(y.shape, device=y.device, generator=generator).to(dtype).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, gradients)
    return [x.detach() for x in outputs] + [x.grad for x in leaves if x.requires_grad]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor; inf where one has NaN or inf and the other has not."""
    actual = actual.double()
    if not torch.equal(actual.isfinite(), exact.isfinite()):
        return float("inf")
    difference = torch.where(exact.isfinite(), actual - exact, 0).norm()
    return (difference / exact[exact.isfinite()].norm().clamp_min(1e-300)).item()


def errors(ours: Callable, plain: Callable, inputs: list[Tensor], dtype: torch.dtype) -> list[tuple[float, float]]:
    """Errors of every output and gradient against float64: of ours, and of plain PyTorch in the same dtype."""
    low = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    exact = outputs_and_gradients(plain, [x.double() if x.is_floating_point() else x for x in low], dtype)
    pairs = zip(outputs_and_gradients(ours, low, dtype), outputs_and_gradients(plain, low, dtype), exact, strict=True)
    return [(relative_error(mine, right), relative_error(theirs, right)) for mine, theirs, right in pairs]


def check(device: str) -> None:
    """Compare with float64; exit if an error is above twice PyTorch's own, or two roundings if that is more.

    PyTorch's float64 is what all is compared with: ours may differ from it by 1e-12.
    """
    for dtype in DTYPES:
        if dtype == torch.bfloat16 and device == "cpu":
            continue  # Triton's interpreter cuts bits off instead of rounding
        least, worst = 5e-13 if dtype == torch.float64 else torch.finfo(dtype).eps / 4, (0.0, 0.0, 0.0, "")
        for what, ours, plain, inputs in cases(device):
            for mine, theirs in errors(ours, plain, inputs, dtype):
                worst = max(worst, (mine / max(theirs, least), mine, theirs, what))
        ratio, mine, theirs, what = worst
        print(f"{str(dtype)[6:]:10} worst error {mine:.1e}, PyTorch's {theirs:.1e}  ({what})", flush=True)
        if not ratio <= 2:
            raise SystemExit(f"the error is {ratio:.1f} times PyTorch's")


def milliseconds(contenders: dict[str, Callable[[], object]], rounds: int = 3) -> dict[str, float]:
    """Median time of each on the GPU, in CUDA graphs: the CPU plays no part. They take turns, in random order."""
    times = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            times[name].append(triton.testing.do_bench_cudagraph(contenders[name], rep=20, return_mode="median"))
    return {name: statistics.median(found) for name, found in times.items()}


def milliseconds_of_calls(contenders: dict[str, Callable[[], object]], calls: int = 200) -> dict[str, float]:
    """Median time of one call as a program makes it, launch included: wall clock around many calls. In random order.

    The CPU runs ahead of the GPU: a call costs the longer of what the CPU needs to launch it and the GPU to run it.
    """
    times = {name: [] for name in contenders}
    for turn in range(5):
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            run = contenders[name]
            run()  # compiles what is not yet compiled
            torch.cuda.synchronize()  # the GPU is idle when the clock starts
            start = time.perf_counter()
            for _ in range(calls):
                run()
            torch.cuda.synchronize()  # the last call is done when the clock stops
            times[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def forward_and_backward(
    contenders: dict[str, Callable[[], tuple[Tensor, ...]]], inputs: list[Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Times of forward, and of backward: what is left when forward is taken from both."""

    def both(run: Callable[[], tuple[Tensor, ...]], gradients: list[Tensor]) -> None:
        torch.autograd.grad(run(), inputs, gradients)

    gradients = [torch.randn_like(y) for y in next(iter(contenders.values()))()]
    forward = milliseconds(contenders)
    whole = milliseconds({name: lambda run=run: both(run, gradients) for name, run in contenders.items()})
    return forward, {name: whole[name] - forward[name] for name in contenders}


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


def measure() -> list[dict]:
    """Time forward at all SIZES with the launch, ours without it too; then backward of the largest. Float32."""
    rows, limit, dtype = [], copy_rate(), torch.float32
    compiled = torch.compile(reference, dynamic=False)  # each size gets code of its own
    functions = {"eager": reference, "torch.compile": compiled, "F.elu": F.elu, "ours": elu}
    for n in SIZES:
        torch.compiler.reset()  # or the sizes before it count towards the limit of recompilations
        x = torch.randn(n, dtype=dtype, device="cuda")
        times = milliseconds_of_calls({by: lambda f=f, x=x: f(x) for by, f in functions.items()})
        times |= milliseconds({"ours, CUDA graph: no launch": lambda x=x: elu(x)})
        rows += compare(f"2^{n.bit_length() - 1} elements, forward", times, cost(n, 2, dtype), limit)
    x.requires_grad_()
    _, backward = forward_and_backward({by: lambda f=f: (f(x),) for by, f in functions.items()}, [x])
    return rows + compare(f"2^{n.bit_length() - 1} elements, backward", backward, cost(n, 3, dtype), limit)


# -------------------------------------------------------------------------------------------------------------- main
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(device)
    if device == "cuda":
        measure()


if __name__ == "__main__":
    main()
