"""Divergence: a few elements need 256 steps, the others one. By mask, by program, or from a list.

The 32 lanes of a warp share one stream of instructions: one expensive element, of S steps, makes all lanes wait.

    by mask      steps = n + S · n                            whatever the data is; eager and torch.compile do this
    by program   steps = n + S · BLOCK · (blocks in need)     few if elements in need stand together, else most blocks
    by list      steps = n + S · (elements in need)           and 8 bytes for the list; sectors move again

Parent:   none
Run:      python 09_kernels/divergence.py
Source:   NVIDIA, CUDA C++ Programming Guide, "SIMT Architecture"
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
# The function is y' = -y³ over one unit of time, in 1 step where |y| <= CALM, else in STEPS explicit Euler steps
# (y -= y³/S, stable where y² < 2·S). Each step needs the one before. This equation has a closed form, most have none.
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
BLOCK = 1024  # elements of a program: all of them take the expensive side, or none
STEPS = 256  # of an element in need; the others take 1
CALM = tl.constexpr(0.125)  # up to this size, 1 step will do
SECTOR = 32  # bytes that memory moves at least
FLOPS = 4  # of one step, y - y * y * (y * h), in 3 instructions: 2 multiplications and 1 fused multiply-add
STEP_RATE = 132 * 128 * 1.98e9 / 3  # fp32 steps per second of an H100 or H200: SMs x lanes x clock / instructions


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def widen(x):
    """Compute in fp32, or in float64 where the tensors are."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def in_need(x):
    """Which elements need all steps. NaN needs none: no comparison with it is true."""
    return tl.abs(x) > CALM


@triton.jit
def step(y, h):
    """One explicit Euler step of y' = -y³ over a time of h."""
    return y - y * y * (y * h)


@triton.jit
def masked(x_ptr, y_ptr, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute both sides for all of BLOCK elements of x [n]; keep one.

    Triton has no branch per element: tl.where selects between two sides that have both been computed.
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # 64 bits: n may be beyond 2^31
    inside = offset < n
    x = widen(tl.load(x_ptr + offset, inside, 0))
    fine = x
    for _ in range(STEPS):
        fine = step(fine, 1 / STEPS)
    y = tl.where(in_need(x), fine, step(x, 1.0))
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def branched(x_ptr, y_ptr, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Skip the expensive side where none of BLOCK elements of x [n] needs it."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    x = widen(tl.load(x_ptr + offset, inside, 0))
    need = in_need(x) & inside
    y = step(x, 1.0)
    if tl.max(need.to(tl.int32), 0) > 0:  # a scalar: all warps of the program take the same side
        fine = x
        for _ in range(STEPS):
            fine = step(fine, 1 / STEPS)
        y = tl.where(need, fine, y)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def collect(x_ptr, y_ptr, list_ptr, count_ptr, n, BLOCK: tl.constexpr):
    """Do the cheap step for BLOCK elements of x [n]; append the indices of those in need to list [n].

    The list costs bytes: if half of all elements are in need, at random places, nearly every sector moves again.
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    x = widen(tl.load(x_ptr + offset, inside, 0))
    tl.store(y_ptr + offset, step(x, 1.0).to(y_ptr.dtype.element_ty), inside)
    need = (in_need(x) & inside).to(tl.int32)
    found = tl.sum(need, 0)
    if found > 0:
        # One atomic add reserves places for all of them. The order of the list differs from run to run, y does not.
        first = tl.atomic_add(count_ptr, found.to(count_ptr.dtype.element_ty))
        place = first + tl.cumsum(need, 0) - 1
        tl.store(list_ptr + place, offset.to(list_ptr.dtype.element_ty), need > 0)


@triton.jit
def from_list(x_ptr, y_ptr, list_ptr, count_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Do all steps for BLOCK of the elements whose indices are in `list`."""
    count = tl.load(count_ptr)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first < count:  # the CPU does not know the count: it launches enough programs for n, most have nothing to do
        place = first + tl.arange(0, BLOCK)
        inside = place < count
        offset = tl.load(list_ptr + place, inside, 0)
        y = widen(tl.load(x_ptr + offset, inside, 0))  # gather
        for _ in range(STEPS):
            y = step(y, 1 / STEPS)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), inside)  # scatter


def with_output(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return x made contiguous, an empty tensor like it, and its number of elements. Raises ValueError for integers."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: must be one of {', '.join(str(dtype) for dtype in DTYPES)}")
    x = x.contiguous()
    return x, torch.empty_like(x), x.numel()


def by_mask(x: Tensor, steps: int = STEPS) -> Tensor:
    """x of any shape -> y, contiguous; both sides for every element. There is no gradient.

    x float16, bfloat16, float32 or float64; computed in float32 (float64), rounded once. Raises ValueError for others.
    """
    x, y, n = with_output(x)
    if n:
        masked[(triton.cdiv(n, BLOCK),)](x, y, n, STEPS=steps, BLOCK=BLOCK)
    return y


def by_program(x: Tensor, steps: int = STEPS) -> Tensor:
    """The same; blocks of 1,024 elements of which none is in need skip the expensive side."""
    x, y, n = with_output(x)
    if n:
        branched[(triton.cdiv(n, BLOCK),)](x, y, n, STEPS=steps, BLOCK=BLOCK)
    return y


def by_list(x: Tensor, steps: int = STEPS) -> Tensor:
    """The same; elements in need are listed first. Takes 4 bytes of memory per element (8 beyond 2^31 elements)."""
    x, y, n = with_output(x)
    integer = torch.int32 if n < 2**31 else torch.int64
    indices = torch.empty(n, dtype=integer, device=x.device)
    count = torch.zeros(1, dtype=integer, device=x.device)
    if n:
        grid = (triton.cdiv(n, BLOCK),)
        collect[grid](x, y, indices, count, n, BLOCK=BLOCK)
        from_list[grid](x, y, indices, count, STEPS=steps, BLOCK=BLOCK)
    return y


WAYS = by_mask, by_program, by_list


# --------------------------------------------------------------------------------------------------------- reference
def reference(x: Tensor, steps: int = STEPS) -> Tensor:
    """The same in plain PyTorch: by mask."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    fine = wide
    for _ in range(steps):
        fine = fine - fine * fine * (fine * (1 / steps))
    return torch.where(wide.abs() > CALM.value, fine, wide - wide * wide * wide).to(x.dtype)


def make_input(n: int, share: float, together: bool, device: str) -> Tensor:
    """x [n], float32, of which a share needs all steps: in random places, or at the front."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.rand(n, device=device, generator=generator) * CALM.value
    in_need = round(n * share)
    places = slice(in_need) if together else torch.randperm(n, device=device, generator=generator)[:in_need]
    x[places] += 1
    return x


def cost(x: Tensor, steps: int = STEPS) -> tuple[int, int]:
    """Bytes and FLOPs that the problem needs: x read, y written; 1 step per element, all steps of those in need."""
    in_need = int((x.abs() > CALM.value).sum())
    return 2 * x.nbytes, FLOPS * (x.numel() - in_need + in_need * steps)


def steps_taken(way: Callable, x: Tensor, steps: int = STEPS) -> int:
    """Steps that the lanes execute, useful or not."""
    need = torch.nn.functional.pad(x.flatten().abs() > CALM.value, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    if way is by_mask:
        return need.numel() * (steps + 1)
    blocks = int(need.any(1).sum()) if way is by_program else triton.cdiv(int(need.sum()), BLOCK)
    return need.numel() + blocks * BLOCK * steps


def break_even(share: float, itemsize: int, bandwidth: float) -> float:
    """Steps below which the list cannot beat the mask, for a share below 1 of elements in need, at random places.

    The mask takes, per element, the longer of its bytes and its steps. The list takes the same bytes first, and then,
    for those in need, the longer of their steps and their bytes: index written and read, x gathered, y scattered. A
    sector moves as a whole if any of its elements is in need. Atomics and launches come on top. bandwidth: in bytes/s.
    """
    touched = 1 - (1 - share) ** (SECTOR / itemsize)  # share of the sectors
    first, second = 2 * itemsize / bandwidth, (2 * 4 * share + 2 * itemsize * touched) / bandwidth
    return STEP_RATE * max(first + second, first / (1 - share))


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and x, in float64."""
    steps = STEPS if device == "cuda" else 16  # the interpreter is slow
    torch.manual_seed(0)
    x = torch.randn(40, 90, dtype=torch.float64, device=device)
    tried = {"both signs": x, "strided": x[::2, 1:-2], "transposed": x.T, "0 elements": x[:0]}
    tried |= {"1 element": torch.full_like(x[0, :1], CALM.value), "NaN": torch.where(x > 2, float("nan"), x)}
    for share, together in (0, False), (1 / 1024, False), (1 / 8, False), (1 / 8, True), (1, True):
        how = "together" if together else "at random"
        tried[f"share {share:.4f} {how}"] = make_input(5000, share, together, device).double()
    for way, (what, x) in product(WAYS, tried.items()):
        yield f"{way.__name__}, {what}", partial(way, steps=steps), partial(reference, steps=steps), [x]


# ----------------------------------------------------------------------------------------------------------- measure
def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor; inf where one has NaN or inf and the other has not."""
    finite = exact.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return float("inf")
    return ((actual - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-300)).item()


def check(device: str) -> None:
    """Compare with float64; exit if an error is above twice PyTorch's own, or two roundings if that is more."""
    for dtype in DTYPES:
        if dtype == torch.bfloat16 and device == "cpu":
            continue  # Triton's interpreter cuts bits off instead of rounding
        least, worst = max(torch.finfo(dtype).eps / 4, 5e-13), (0.0, 0.0, 0.0, "")
        for what, ours, plain, (x,) in cases(device):
            low = x.to(dtype)
            mine, theirs = (relative_error(f(low), plain(low.double())) for f in (ours, plain))
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


def compare_ways(what: str, x: Tensor, steps: int, bandwidth: float) -> list[dict]:
    """Rows of the three ways: useful TFLOP/s, and the share of what the memory or the arithmetic units allow."""
    bytes_needed, flops = cost(x, steps)
    names = {way: f"{way.__name__}, {steps_taken(way, x, steps) * FLOPS / flops:.2f}x the steps" for way in WAYS}
    runs = {names[way]: partial(way, x, steps) for way in WAYS}
    return compare(what, runs, flops, min(STEP_RATE * FLOPS, bandwidth * flops / bytes_needed), "TFLOP/s")


def measure() -> list[dict]:
    """Time 2^26 elements in float32 for shares in need of 0 to 1, at random and together; then by number of steps.

    Each name ends in the steps that the lanes execute per useful step.
    """
    n, bandwidth, rows = 2**26, copy_rate(), []
    for share in 0, 1 / 1024, 1 / 64, 1 / 8, 1 / 2, 1:
        for together in (False, True) if 0 < share < 1 else (False,):
            x = make_input(n, share, together, "cuda")
            where = "together" if together else "at random"
            rows += compare_ways(f"share {share:.4f} {where}", x, STEPS, bandwidth)
    x = make_input(n, 1 / 2, False, "cuda")
    print(f"at a share of 1/2 the list cannot pay below {break_even(1 / 2, x.itemsize, bandwidth):.0f} steps")
    for steps in 1, 8, 64:
        rows += compare_ways(f"share 0.5000 at random, {steps} steps", x, steps, bandwidth)
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
# Copy:     DTYPES, BLOCK, STEPS, CALM, widen, in_need, step, collect, from_list, with_output, by_list (call by_list;
#           put your formulas into in_need and step)
