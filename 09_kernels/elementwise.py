"""ELU three ways: eager PyTorch, torch.compile, and a first Triton kernel.

    y = x where x >= 0, else exp(x) - 1          dx = dy where x >= 0, else dy * exp(x)

A GPU runs a kernel many times at once. Each run, a program, loads one block of the elements from memory into registers,
computes, and stores the result: 2 passes over memory. Eager PyTorch, a kernel per operation, makes more than 10.

Parent:   none
Run:      python 09_kernels/elementwise.py
Source:   Clevert et al. 2015, arXiv:1511.07289
"""

import argparse
import os
import random
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl

# ----------------------------------------------------------------------------------------------------------- kernels
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
BLOCK = 1024  # elements of a program: 8 per thread


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


class ELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()  # the kernel counts elements, not strides
        ctx.save_for_backward(x)
        y, n = torch.empty_like(x), x.numel()
        if n:  # else there is nothing to launch
            elu_forward[(triton.cdiv(n, BLOCK),)](x, y, n, BLOCK=BLOCK)  # the grid: a program per block
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()  # the gradient of a transposed or broadcast output has strides of its own
        dx, n = torch.empty_like(x), x.numel()
        if n:
            elu_backward[(triton.cdiv(n, BLOCK),)](dy, x, dx, n, BLOCK=BLOCK)
        return dx


def elu(x: Tensor) -> Tensor:
    """Return x where x >= 0, else exp(x) - 1: contiguous, computed in float32 (float64), rounded once to x's dtype."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: must be one of {', '.join(str(dtype) for dtype in DTYPES)}")
    return ELU.apply(x)


def reference(x: Tensor) -> Tensor:
    """The same in plain PyTorch. Without clamp, exp of a large x is inf, and its backward multiplies that by 0: NaN."""
    return torch.where(x >= 0, x, torch.exp(x.clamp(max=0)) - 1)


def check(device: str) -> None:
    """Exit if y or dx is further from float64 than twice PyTorch's own in that dtype, or than two roundings."""
    x = torch.linspace(-9, 9, 5000, dtype=torch.float64, device=device).view(50, 100)  # the last block is not full
    x[0, :6] = x.new_tensor([-0.0, 80, -1000, -1e30, torch.inf, -torch.inf])
    for dtype in [x for x in DTYPES if x != torch.bfloat16 or device != "cpu"]:  # which the interpreter does not round
        for view in lambda x: x, lambda x: x.T[1:80:2], lambda x: x[:0]:
            results = []
            for function, precision in (elu, dtype), (reference, dtype), (reference, torch.float64):
                leaf = x.to(dtype).to(precision, copy=True).requires_grad_()
                y = view(function(view(leaf)))
                results.append((y, *torch.autograd.grad(y, leaf, y)))  # dy = y
            for ours, plain, exact in zip(*results):
                finite, least = exact.isfinite(), max(torch.finfo(dtype).eps / 4, 5e-13)
                mine, theirs = ((z - exact)[finite].norm() / exact[finite].norm() for z in (ours, plain))
                if not torch.equal(ours.isfinite(), finite) or mine > 2 * max(theirs, least):
                    raise SystemExit(f"{dtype}, {list(y.shape)}: the error is {mine / theirs:.1f} times PyTorch's")
        print(f"{str(dtype)[6:]:10} y and dx: the worst error is at most twice PyTorch's", flush=True)


def measure() -> list[dict]:
    """Time float32, launch included, which decides at small sizes; at large ones it is bytes. The limit is a copy's."""
    functions = {"eager": reference, "torch.compile": torch.compile(reference, dynamic=False), "ours": elu}
    x, y = torch.randn(2, 2**28, device="cuda")
    copy, rows = triton.testing.do_bench(lambda: y.copy_(x), return_mode="median"), []
    for power in range(10, 29, 3):
        runs = {by: Timer("f(x)", globals={"f": f, "x": x[: 2**power]}) for by, f in functions.items()}
        times = {by: runs[by].timeit(500).mean * 1e3 for by in random.Random(power).sample(list(runs), len(runs))}
        graph = triton.testing.do_bench_cudagraph(lambda n=2**power: elu(x[:n]), return_mode="median")
        for by, ms in sorted((times | {"ours, CUDA graph: no launch": graph}).items()):
            rate, share = 2**power * 8 / ms / 1e9, copy / ms / 2 ** (28 - power)
            rows.append(dict(what=f"2^{power} elements, forward", by=by, ms=ms, rate=rate, unit="TB/s", share=share))
            print("{what:22} {by:30} {ms:8.3f} ms  {rate:6.2f} {unit}  {share:4.0%}".format(**rows[-1]), flush=True)
    return rows


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
# Copy:     DTYPES, BLOCK, widen, elu_forward, elu_backward, ELU, elu (call elu)
