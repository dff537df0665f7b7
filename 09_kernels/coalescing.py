"""Coalescing: a copy and a transpose, with the lanes of a warp on neighbouring addresses, or on distant ones.

The 32 lanes of a warp execute one load together, and memory answers in sectors of 32 bytes. Lanes that ask for
neighbouring float32 elements fill 4 sectors. If each lane asks for an element of another sector, 32 sectors travel, and
7/8 of their bytes are thrown away:

    excess = sectors that the warp touches / sectors that its elements would fill

Parent:   none
Run:      python 09_kernels/coalescing.py
Source:   NVIDIA, CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"
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
DTYPES = torch.uint8, torch.bfloat16, torch.float32, torch.float64  # of 1, 2, 4 and 8 bytes
BLOCK = 1024  # elements of a program of all kernels but transpose_tiled
TILE = 64  # rows, and columns, of the tile of a program of transpose_tiled
SECTOR = 32  # bytes: the least that travels between memory, L2 and an SM
WARP = 32  # lanes that execute one instruction together
PARTS = tl.constexpr(16)  # copy_spread: 16 programs that start together work on 16 distant parts of the tensor


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def copy_near(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Copy x [n] to y [n]. Program p takes elements p·BLOCK to (p + 1)·BLOCK: lanes are neighbours."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # 64 bits: n may be beyond 2^31
    inside = offset < n
    tl.store(y_ptr + offset, tl.load(x_ptr + offset, inside), inside)


@triton.jit
def copy_far(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Copy x [n] to y [n]. Program p takes every programs-th element from p on: each lane has its own sector.

    The L2 cache does not make up for it. Programs that want a sector's other elements run at about the same time, so
    memory need not read it twice. But it crosses from the L2 to an SM once for each of them, on a path that is little
    faster than memory; and a store that fills a part of a sector is slower than one that fills it.
    """
    programs = (n - 1) // BLOCK + 1
    offset = tl.arange(0, BLOCK).to(tl.int64) * programs + tl.program_id(0)
    inside = offset < n
    tl.store(y_ptr + offset, tl.load(x_ptr + offset, inside), inside)


@triton.jit
def copy_spread(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Copy x [n] to y [n]. Lanes are neighbours, but programs p and p + 1 take blocks that are n/16 elements apart."""
    part = ((n - 1) // BLOCK) // PARTS + 1  # blocks of one of the 16 parts
    block = tl.program_id(0) % PARTS * part + tl.program_id(0) // PARTS
    offset = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n  # a block of the last parts may lie beyond the end
    tl.store(y_ptr + offset, tl.load(x_ptr + offset, inside), inside)


@triton.jit
def transpose_far(x_ptr, y_ptr, rows, columns, BLOCK: tl.constexpr):
    """Write x [rows, columns] to y [columns, rows]: read a piece of a row, write it down a column, lanes far apart."""
    pieces = (columns - 1) // BLOCK + 1
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    tl.store(y_ptr + column * rows + row, tl.load(x_ptr + row * columns + column, inside), inside)


@triton.jit
def transpose_tiled(x_ptr, y_ptr, rows, columns, BLOCK: tl.constexpr):
    """Write x [rows, columns] to y [columns, rows]: load a BLOCK x BLOCK tile by rows, store it by columns."""
    pieces = (columns - 1) // BLOCK + 1
    row = (tl.program_id(0) // pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], inside)  # neighbours along a row of x
    inside = (column[:, None] < columns) & (row[None, :] < rows)
    # neighbours along a row of y: for that the threads exchange elements through shared memory, which Triton inserts
    tl.store(y_ptr + column[:, None] * rows + row[None, :], tl.trans(x), inside)


COPIES = copy_near, copy_far, copy_spread
TRANSPOSES = transpose_far, transpose_tiled


def block_of(kernel: Callable) -> int:
    """Elements of a program, or rows and columns of its tile."""
    return TILE if kernel is transpose_tiled else BLOCK


def programs_of(kernel: Callable, shape: tuple[int, ...], block: int) -> int:
    """Return how many programs of the kernel cover x of that shape: [n] to copy, [rows, columns] to transpose."""
    if kernel in TRANSPOSES:
        rows, columns = shape
        return (rows if kernel is transpose_far else triton.cdiv(rows, block)) * triton.cdiv(columns, block)
    blocks = triton.cdiv(shape[0], block)
    return triton.cdiv(blocks, PARTS.value) * PARTS.value if kernel is copy_spread else blocks


def launch(kernel: Callable, x: Tensor, y: Tensor, programs: int, block: int) -> None:
    """Run the first `programs` programs of the kernel on contiguous x and y: x [n] to copy, [rows, columns] else."""
    if programs:
        kernel[(programs,)](x, y, *x.shape, BLOCK=block)


def copy(kernel: Callable, x: Tensor) -> Tensor:
    """Return a contiguous copy of x, of any shape, by copy_near, copy_far or copy_spread; no gradient, not complex."""
    flat = x.contiguous().view(-1)
    y = torch.empty_like(flat)
    launch(kernel, flat, y, programs_of(kernel, flat.shape, block_of(kernel)), block_of(kernel))
    return y.view(x.shape)


def transpose(kernel: Callable, x: Tensor) -> Tensor:
    """Return x [rows, columns], not complex, as [columns, rows], made by transpose_far or transpose_tiled.

    There is no gradient. Raises ValueError if x has not two dimensions.
    """
    if x.dim() != 2:
        raise ValueError(f"x has {x.dim()} dimensions: must have 2")
    x = x.contiguous()
    y = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    launch(kernel, x, y, programs_of(kernel, x.shape, block_of(kernel)), block_of(kernel))
    return y


# --------------------------------------------------------------------------------------------------------- reference
def reference(kernel: Callable, x: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return x.clone() if kernel in COPIES else x.T.contiguous()


def addresses(kernel: Callable, program: int, shape: tuple[int, ...], block: int) -> tuple[Tensor, Tensor]:
    """Offsets, in elements, that a program reads in x of that shape and writes in y, int64, in the order of its lanes.

    Lane i of a warp takes element i of tl.arange. (Where Triton sees neighbours, it gives a lane up to 16 bytes of
    them at once: the excess stays the same.) `check` compares these formulas with what the kernels touch.
    """
    lane = torch.arange(block)
    if kernel in TRANSPOSES:
        rows, columns = shape
        down, across = divmod(program, triton.cdiv(columns, block))
        column = across * block + lane
        row = torch.tensor([down]) if kernel is transpose_far else down * block + lane
        row, column = row[row < rows], column[column < columns]
        return (row[:, None] * columns + column).flatten(), (column[:, None] * rows + row).flatten()
    programs = programs_of(kernel, shape, block)
    if kernel is copy_spread:
        program = program % PARTS.value * (programs // PARTS.value) + program // PARTS.value
    offset = lane * programs + program if kernel is copy_far else program * block + lane
    offset = offset[offset < shape[0]]
    return offset, offset


def sectors(offsets: Tensor, itemsize: int) -> float:
    """Excess of the first warp: sectors that its lanes' elements lie in, over the fewest that could hold them."""
    offsets = offsets[:WARP]
    return (offsets * itemsize // SECTOR).unique().numel() / triton.cdiv(offsets.numel() * itemsize, SECTOR)


def touched(kernel: Callable, program: int, shape: tuple[int, ...], block: int, device: str) -> tuple[Tensor, Tensor]:
    """Offsets that a program reads in x of that shape, and those in y that it writes them to: found by running it.

    x holds its own offsets, y nothing. Programs 0 to p - 1 run, then 0 to p: what only the second run wrote is p's.
    """
    x = torch.arange(torch.Size(shape).numel(), device=device).view(shape)
    before, after = torch.full((2, x.numel()), -1, device=device)
    launch(kernel, x, before, program, block)
    launch(kernel, x, after, program + 1, block)
    written = (after != before).nonzero().flatten()
    return after[written].cpu(), written.cpu()


def cost(n: int, dtype: torch.dtype) -> int:
    """Bytes of a copy or a transpose of n elements: each is read once and written once. There are no FLOPs."""
    return 2 * n * dtype.itemsize


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and x: whole numbers that every dtype holds exactly."""
    torch.manual_seed(0)
    for kernel, dtype in product((*COPIES, *TRANSPOSES), DTYPES):
        huge = device == "cuda" and dtype == torch.uint8  # beyond 2^31 elements: millions of programs
        if kernel in COPIES:
            ours, shapes = copy, [(1,), (0,), (1000,), (4096,), (70001,), (3, 5, 700), *[(2**31 + 2**20,)] * huge]
        else:
            ours, shapes = transpose, [(1, 1), (5, 0), (0, 5), (64, 128), (3, 2000), (130, 65)]
            shapes += [(2**16 + 1, 2**15)] * huge
        random = partial(torch.randint, 1, 250, dtype=dtype, device=device)
        tried = {f"{shape}": random(shape) for shape in shapes}
        tried |= {"strided": random((40, 90))[::2, 1:-2], "transposed": random((70, 50)).T}
        for what, x in tried.items():
            yield f"{kernel.__name__}, {dtype}, {what}", partial(ours, kernel), partial(reference, kernel), [x]


# ----------------------------------------------------------------------------------------------------------- measure
def check_addresses(kernel: Callable, device: str) -> None:
    """Exit unless programs touch what `addresses` says, and program 0 is right where offsets go beyond 2^31."""
    for shape in [(1000,), (5000,)] if kernel in COPIES else [(3, 2000), (130, 65), (64, 64)]:
        block = block_of(kernel) // 4
        last = programs_of(kernel, shape, block) - 1
        for program in {0, min(1, last), last}:
            found, expected = touched(kernel, program, shape, block, device), addresses(kernel, program, shape, block)
            if not all(torch.equal(a.sort().values, b.sort().values) for a, b in zip(found, expected)):
                raise SystemExit(f"{kernel.__name__}: program {program} of {shape} does not touch what addresses says")
    for shape in [(2**31 + 2**20,)] if kernel in COPIES else [(64, 2**25 + 2**20), (2**25 + 2**20, 64)]:
        # 2 GiB each, but empty: the pages that nobody touches take no memory on a CPU
        x, y = (torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(2))
        read, written = (found.to(device) for found in addresses(kernel, 0, shape, block_of(kernel)))
        x.view(-1)[read] = (torch.arange(len(read), device=device) % 250 + 1).to(torch.uint8)
        y.view(-1)[written] = 0
        launch(kernel, x, y, 1, block_of(kernel))
        if not torch.equal(x.view(-1)[read].sort().values, y.view(-1)[written].sort().values):
            raise SystemExit(f"{kernel.__name__}: program 0 of {shape} does not copy its elements")


def check(device: str) -> None:
    """Compare with PyTorch, to the bit, and the formulas of the addresses with what the kernels touch; else exit."""
    for what, ours, plain, inputs in cases(device):
        if not torch.equal(ours(*inputs), plain(*inputs)):
            raise SystemExit(f"{what}: differs from PyTorch's")
    for kernel in (*COPIES, *TRANSPOSES):
        check_addresses(kernel, device)
        print(f"{kernel.__name__:16} equal to the bit, addresses as computed", flush=True)


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
    """Time copies and transposes of 1 GiB in float32 and bfloat16; each kernel's name shows its excess of sectors.

    "8x, 1x" after a name: its warps touch 8 times the sectors of the elements that they read, no more than needed of
    those that they write.
    """

    def name(kernel: Callable, x: Tensor) -> str:
        read, written = (sectors(found, x.itemsize) for found in addresses(kernel, 0, x.shape, block_of(kernel)))
        return f"{kernel.__name__} {read:.0f}x, {written:.0f}x"

    rows, limit = [], copy_rate()
    compiled = torch.compile(lambda x: x.T.contiguous())
    for dtype in torch.float32, torch.bfloat16:
        x = torch.randn(2**30 // dtype.itemsize, device="cuda").to(dtype)
        square = x.view(2**14, -1)
        runs = {name(k, x): lambda k=k, x=x: copy(k, x) for k in COPIES}
        rows += compare(f"copy, {str(dtype)[6:]}", runs, cost(x.numel(), dtype), limit)
        runs = {"x.T.contiguous()": lambda x=square: x.T.contiguous(), "torch.compile": lambda x=square: compiled(x)}
        runs |= {name(k, square): lambda k=k, x=square: transpose(k, x) for k in TRANSPOSES}
        rows += compare(f"transpose, {str(dtype)[6:]}", runs, cost(x.numel(), dtype), limit)
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
# Copy:     transpose_tiled (launch cdiv(rows, BLOCK) * cdiv(columns, BLOCK) programs; BLOCK 64)
