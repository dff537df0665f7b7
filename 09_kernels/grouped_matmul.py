"""Matrix multiplication of many experts in one launch: the tiles of all groups of rows are one list.

y = x Wᵀ, with a W [n, k] for each expert. The rows of x [t, k] are sorted by expert: those of expert i end at
offsets[i], which the GPU alone knows. As many programs as there are SMs read all offsets, count the tiles of each
expert, and take every programs-th tile of the list, as matmul.py's persistent programs do.

Parent:   09_kernels/matmul.py
Lesson:   MODELS, find_rows, count_tiles, load_matrix, multiply_groups, sort_experts, multiply_rows, allocate, copied,
          in_rows, grouped_matmul, grouped_matmul_shape, grouped_weight_gradient, grouped_weight_gradient_shape,
          GroupedLinear, check_grouped, grouped_linear
Run:      python 09_kernels/grouped_matmul.py
Source:   Gale et al. 2022, arXiv:2211.15841
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice, product

import torch
from torch import Tensor, nn

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# ------------------------------------------------------------------------------------------------------------ config
DTYPES = torch.bfloat16, torch.float16, torch.float32
PEAK = {torch.bfloat16: 989.5e12}  # FLOP/s of an H100's or H200's tensor cores
BENCHES = {  # in bursts, and after 100 ms of the same: at its power limit a GPU lowers its clocks
    "": triton.testing.do_bench_cudagraph,
    ", sustained": partial(triton.testing.do_bench, warmup=100, rep=100),
}
MODELS = {"OLMoE": (64, 2048, 1024), "Qwen3-30B-A3B": (128, 2048, 768)}  # experts, width, width of an expert


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def locate(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return where the tile begins in [m, n]: GROUP rows of tiles are finished, a column at a time, before the next."""
    across = tl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * across) * GROUP
    high = min(tl.cdiv(m, BLOCK_M) - first, GROUP)  # the last group may have fewer rows of tiles
    within = tile % (GROUP * across)
    return (first + within % high) * BLOCK_M, within // high * BLOCK_N


@triton.jit
def find_rows(offsets_ptr, expert, experts):
    """Return where the rows of an expert begin and end; 0 and 0 beyond the last expert."""
    begin = tl.load(offsets_ptr + expert - 1, (expert > 0) & (expert < experts), 0)
    return begin, tl.load(offsets_ptr + expert, expert < experts, 0)


@triton.jit
def count_tiles(offsets_ptr, experts, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXPERTS: tl.constexpr):
    """Return [EXPERTS] where the tiles of each expert end in the list of all tiles."""
    begin, end = find_rows(offsets_ptr, tl.arange(0, EXPERTS), experts)
    return tl.cumsum(tl.cdiv(end - begin, BLOCK_M) * tl.cdiv(n, BLOCK_N), 0)


@triton.jit
def store_tile(c, total, row, column, PARTS: tl.constexpr):
    """Round a tile and store it, whole or in two halves: until TMA has read it, it waits in shared memory."""
    if PARTS == 1:
        c.store([row, column], total.to(c.dtype))
    else:
        half: tl.constexpr = total.shape[1] // 2
        left, right = total.reshape(total.shape[0], 2, half).permute(0, 2, 1).split()
        c.store([row, column], left.to(c.dtype))
        c.store([row, column + half], right.to(c.dtype))


@triton.jit
def load_matrix(w, expert, row, column, COLUMNS: tl.constexpr):
    """Load a block of an expert's matrix. COLUMNS: matrices are stored by columns, as are their blocks."""
    block = w.load([expert, column, row]) if COLUMNS else w.load([expert, row, column])
    block = block.reshape(block.shape[1], block.shape[2])
    return block.T if COLUMNS else block


@triton.jit(do_not_specialize=["experts", "n", "k"])  # one compilation for all sizes
def multiply_groups(
    x, w, y, y_ptr, offsets_ptr, experts, n, k, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute every programs-th tile of y [t, n]: rows of x [t, k] times the matrix [k, n] of their expert.

    All tiles have as many steps of k: a large expert has more tiles, not longer ones.
    """
    wide: tl.constexpr = 128 // y_ptr.dtype.element_ty.primitive_bitwidth
    n = n // wide * wide  # which is n: now the compiler knows that it can store 16 bytes at a time
    ends = count_tiles(offsets_ptr, experts, n, BLOCK_M, BLOCK_N, EXPERTS)
    for tile in tl.range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0), flatten=True):
        expert = tl.sum((ends <= tile).to(tl.int32), 0)  # experts whose tiles come before
        first = tl.max(tl.where(ends <= tile, ends, 0), 0)
        begin, end = find_rows(offsets_ptr, expert, experts)
        row, column = locate(tile - first, end - begin, n, BLOCK_M, BLOCK_N, GROUP)
        row += begin
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, k, BLOCK_K):
            block = load_matrix(w, expert, start, column, COLUMNS)
            total = tl.dot(x.load([row, start]), block, total, input_precision="ieee")
        if row + BLOCK_M <= end:
            store_tile(y, total, row, column, PARTS)
        else:  # without TMA, which would write the rows behind `end` as well: they are those of another program
            rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]  # 64 bits: t·n may be beyond 2^31
            columns = column + tl.arange(0, BLOCK_N)[None, :]
            tl.store(y_ptr + rows * n + columns, total.to(y_ptr.dtype.element_ty), (rows < end) & (columns < n))


@triton.jit(do_not_specialize=["experts"])
def sort_experts(offsets_ptr, order_ptr, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the experts, those with the most rows first, to order [experts]."""
    expert = tl.arange(0, EXPERTS)[:, None]
    begin, end = find_rows(offsets_ptr, expert, experts)
    rank = tl.zeros([EXPERTS, 1], tl.int32)
    for start in tl.range(0, EXPERTS, BLOCK):
        other = start + tl.arange(0, BLOCK)[None, :]
        first, last = find_rows(offsets_ptr, other, experts)
        more, same = last - first > end - begin, last - first == end - begin
        rank += tl.sum((more | (same & (other < expert))).to(tl.int32), 1, keep_dims=True)
    tl.store(order_ptr + rank, expert, expert < experts)


@triton.jit(do_not_specialize=["experts", "n", "k", "dy_stride", "x_stride"])
def multiply_rows(
    dy_ptr, x_ptr, dw, offsets_ptr, order_ptr, experts, n, k, dy_stride, x_stride, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Compute STRIP tiles of dw [experts, n, k]: dyᵀ x of the rows of one expert; zeros if it has none.

    Descriptors end where the expert does, so programs make them: once for all tiles of a strip. TMA fills with zeros
    what lies beyond, and no row of the next expert is added. A large expert has long tiles: they come first, and a
    program takes the next one when an SM has room. Two stages leave room for several programs on an SM: while one
    begins or stores, the others keep the tensor cores busy.
    """
    tiles = tl.cdiv(n, BLOCK_M) * tl.cdiv(k, BLOCK_N)  # of each expert
    strips = tl.cdiv(tiles, STRIP)
    expert = tl.load(order_ptr + tl.program_id(0) // strips)
    begin, end = find_rows(offsets_ptr, expert, experts)
    high = tl.maximum(end, 1)  # a descriptor has at least one row, read or not
    dy = tl.make_tensor_descriptor(dy_ptr, [high, n], [dy_stride, 1], [BLOCK_K, BLOCK_M])
    x = tl.make_tensor_descriptor(x_ptr, [high, k], [x_stride, 1], [BLOCK_K, BLOCK_N])
    first = tl.program_id(0) % strips * STRIP
    for tile in tl.range(first, min(first + STRIP, tiles), flatten=True):
        row, column = locate(tile, n, k, BLOCK_M, BLOCK_N, GROUP)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(begin, end, BLOCK_K):
            total = tl.dot(dy.load([start, row]).T, x.load([start, column]), total, input_precision="ieee")
        half: tl.constexpr = BLOCK_N // 2
        left, right = total.reshape(BLOCK_M, 2, half).permute(0, 2, 1).split()
        dw.store([expert, row, column], left.to(dw.dtype).reshape(1, BLOCK_M, half))
        dw.store([expert, row, column + half], right.to(dw.dtype).reshape(1, BLOCK_M, half))


def tile(x: Tensor, columns: int) -> dict[str, int]:
    """Return the blocks of a program: 128 bytes of k: a row of TMA's widest swizzle.

    float32 is for CUDA cores, which have their operands in registers, too: its tiles are small.
    """
    if x.element_size() == 4:
        return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32)
    return dict(BLOCK_M=128, BLOCK_N=columns, BLOCK_K=64)


def stored(x: Tensor) -> tuple[Tensor, bool] | None:
    """Return x [..., r, c] as it lies in memory, and whether that is by columns; None if TMA cannot read it.

    TMA takes tensors whose address and rows are multiples of 16 bytes.
    """
    for y, columns in (x, False), (x.mT, True):
        strides = y.stride()[:-1]
        aligned = y.data_ptr() % 16 == 0 and all(stride * y.element_size() % 16 == 0 for stride in strides)
        if y.stride(-1) == 1 and min(strides) >= y.shape[-1] and aligned:  # below, rows would overlap
            return y, columns
    return None


def processors(x: Tensor) -> int:
    """Return how many programs run at a time: one per SM, or two in the interpreter, so that each has several tiles."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Return memory for the descriptors that programs make."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def copied(x: Tensor) -> Tensor:
    """Copy x to memory of its own, row after row."""
    return x.clone(memory_format=torch.contiguous_format)


def in_rows(x: Tensor) -> Tensor:
    """x [t, k] with rows that TMA can read: copied only if they are not."""
    found = stored(x)
    return copied(x) if found is None or found[1] else x


# Operators of their own: torch.compile does not look into them, where strides and addresses decide what is copied.
@torch.library.custom_op("grouped_matmul::grouped_matmul", mutates_args=())
def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """x [t, k], w [e, k, n], stored by rows or by columns -> [t, n]: each row times the matrix of its expert."""
    (experts, k, n), x, sizes = w.shape, in_rows(x), tile(x, 256)
    if not (x.numel() and w.numel()):
        return x.new_zeros(len(x), n)
    w, columns = stored(w) or (copied(w), False)
    y, block = x.new_empty(len(x), n), [sizes["BLOCK_K"], sizes["BLOCK_N"]]
    multiply_groups[(processors(x),)](
        TensorDescriptor.from_tensor(x, [sizes["BLOCK_M"], sizes["BLOCK_K"]]),
        TensorDescriptor.from_tensor(w, [1, *(reversed(block) if columns else block)]),
        TensorDescriptor.from_tensor(y, [sizes["BLOCK_M"], sizes["BLOCK_N"] // 2]),
        y, offsets, experts, n, k, COLUMNS=columns, EXPERTS=max(32, triton.next_power_of_2(experts)),
        **sizes, GROUP=8, PARTS=2, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y


@grouped_matmul.register_fake
def grouped_matmul_shape(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """What grouped_matmul returns, without its elements."""
    return x.new_empty(len(x), w.shape[2])


@torch.library.custom_op("grouped_matmul::grouped_weight_gradient", mutates_args=())
def grouped_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """dy [t, n], x [t, k] -> [e, n, k]: for each expert, dyᵀ x of its rows."""
    dy, x, sizes, experts, strip = in_rows(dy), in_rows(x), tile(x, 256), len(offsets), 2  # tiles
    (t, n), k = dy.shape, x.shape[1]
    if not (t and n and k and experts):
        return x.new_zeros(experts, n, k)
    dw, order = x.new_empty(experts, n, k), torch.empty_like(offsets)
    sort_experts[(1,)](offsets, order, experts, EXPERTS=max(32, triton.next_power_of_2(experts)), BLOCK=32)
    block_m, block_n = sizes["BLOCK_M"], sizes["BLOCK_N"]
    triton.set_allocator(allocate)  # it holds for one thread, and backward runs in another one than forward
    multiply_rows[(experts * triton.cdiv(triton.cdiv(n, block_m) * triton.cdiv(k, block_n), strip),)](
        dy, x, TensorDescriptor.from_tensor(dw, [1, block_m, block_n // 2]),
        offsets, order, experts, n, k, dy.stride(0), x.stride(0),
        **sizes, GROUP=16, STRIP=strip, num_warps=8, num_stages=4 if x.element_size() == 2 else 2,
    )  # fmt: skip
    return dw


@grouped_weight_gradient.register_fake
def grouped_weight_gradient_shape(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """What grouped_weight_gradient returns, without its elements."""
    return x.new_empty(len(offsets), dy.shape[1], x.shape[1])


class GroupedLinear(torch.autograd.Function):
    """x [t, k], weight [e, n, k], offsets [e] -> [t, n]"""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None, offsets)
        return grouped_matmul(x, weight.mT, offsets)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        dx = grouped_matmul(dy, weight, offsets) if ctx.needs_input_grad[0] else None
        return dx, grouped_weight_gradient(dy, x, offsets) if ctx.needs_input_grad[1] else None, None


def check_grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    """Raise ValueError for inputs that the kernels would misread."""
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or offsets.shape != weight.shape[:1]:
        shapes = f"{list(x.shape)}, {list(weight.shape)} and {list(offsets.shape)}"
        raise ValueError(f"shapes are {shapes}: must be [t, k], [e, n, k] and [e]")
    if x.dtype != weight.dtype or x.dtype not in DTYPES or offsets.dtype != torch.int32:
        given = f"{x.dtype}, {weight.dtype} and {offsets.dtype}"
        raise ValueError(f"dtypes are {given}: must be one of {DTYPES} for both matrices, and torch.int32")
    if any(size * x.element_size() % 16 for size in weight.shape[1:]):
        raise ValueError(f"weight is {list(weight.shape)}: its rows and columns must be multiples of 16 bytes, for TMA")


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each row of x [t, k] by the weight [n, k] of its expert: weight [e, n, k] -> y [t, n].

    The rows of expert i end at offsets[i], int32, where those of expert i + 1 begin. The last offset must be t: this is
    not checked, as the CPU would have to wait for the GPU. bfloat16, float16 or float32, added up in float32, rounded
    once. Backward sets Triton's allocator for its thread. Raises ValueError for shapes and dtypes that do not fit.
    """
    check_grouped(x, weight, offsets)
    return GroupedLinear.apply(x, weight, offsets.contiguous())


# --------------------------------------------------------------------------------------------------------- reference
def reference(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The same in plain PyTorch: a matmul for each expert, which waits for the GPU to know the sizes."""
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(sizes), weight)])


def cost(t: int, experts: int, n: int, k: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that move if x, weights and y move once, and FLOPs."""
    return (t * k + experts * n * k + t * n) * dtype.itemsize, 2 * t * n * k


def place_rows(sizes: list[int], device: str) -> Tensor:
    """Return the offsets of experts with so many rows."""
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs: x, weight and offsets, in float64."""
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=torch.float64, device=device)
    large = [([700, 0, 1, 3000, 63, 64, 65, 399], 1000, 520)] if device == "cuda" else []
    several, sparse = [70, 0, 1, 130, 63], [0, 0, 5, 0]
    for sizes, n, k in *large, (several, 136, 72), (sparse, 16, 24), ([0, 0], 8, 16), ([40], 264, 16), ([3] * 40, 8, 8):
        inputs = [random(sum(sizes), k), random(len(sizes), n, k), place_rows(sizes, device)]
        yield f"{len(sizes)} experts, {sum(sizes)} x {n} x {k}", grouped_linear, reference, inputs
    inputs = [random(80, 100), random(3, 40, 48), place_rows([30, 49, 1], device)]
    for what, start in ("views", 8), ("views off by 3", 3):
        view = lambda function, start=start: lambda x, w, o: function(x[:, start : start + 40], w.mT[:, :, :40], o)  # noqa: E731
        yield what, view(grouped_linear), view(reference), inputs


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


def floor(k: int, dtype: torch.dtype) -> float:
    """A quarter of what one rounding of the result, or √k of those in a sum, may be off."""
    return max(torch.finfo(dtype).eps, k**0.5 * torch.finfo(torch.float32).eps) / 4


def check(device: str) -> None:
    """Compare with float64; exit if an error is above twice PyTorch's own, or √k roundings of a sum if that is more.

    The first dtype tries everything, the others the first three cases.
    """
    dtypes = [x for x in DTYPES if x != torch.bfloat16 or device != "cpu"]  # which is integers to the interpreter
    for dtype in dtypes:
        worst = (0.0, 0.0, 0.0, "")
        for what, ours, plain, inputs in islice(cases(device), None if dtype == dtypes[0] else 3):
            least = floor(max(max(x.shape) for x in inputs), dtype)
            for mine, theirs in errors(ours, plain, inputs, dtype):
                worst = max(worst, (mine / max(theirs, least), mine, theirs, what))
        ratio, mine, theirs, what = worst
        print(f"{str(dtype)[6:]:10} worst error {mine:.1e}, PyTorch's {theirs:.1e}  ({what})", flush=True)
        if not ratio <= 2:
            raise SystemExit(f"the error is {ratio:.1f} times PyTorch's")
    if device == "cuda":
        offsets = place_rows(loads(64, 16384, "skewed"), device)
        x, dy = torch.randn(2, 16384, 1024, dtype=torch.bfloat16, device=device)
        x, w = x.requires_grad_(), torch.randn(64, 1024, 1024, dtype=x.dtype, device=device, requires_grad=True)
        run = partial(grouped_linear, x, w, offsets)
        if differing(lambda: (run(), *torch.autograd.grad(run(), (x, w), dy))):
            raise SystemExit("grouped_linear: runs on the same input differ")


def differing(run: Callable[[], tuple[Tensor, ...]], times: int = 100) -> int:
    """Count the repeats whose results differ in any bit from the first: threads have raced for them."""
    first = run()
    return sum(not all(torch.equal(x, y) for x, y in zip(first, run(), strict=True)) for _ in range(times))


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


def loads(experts: int, rows: int, what: str) -> list[int]:
    """Rows of each expert as a router deals them: to all with the same probability, or to some more often."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.randn(experts, generator=generator).mul(what == "skewed").exp()
    return torch.multinomial(chances, rows, True, generator=generator).bincount(minlength=experts).tolist()


def products(t: int, n: int, k: int, sizes: list[int]) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """The three products of a grouped linear layer, x [t, k], weight [e, n, k], by torch's kernel and by ours."""
    shapes = (t, k), (len(sizes), n, k), (t, n)
    x, weight, dy = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    offsets, theirs = place_rows(sizes, "cuda"), nn.functional.grouped_mm
    return {
        "forward": {
            "torch grouped_mm": lambda: theirs(x, weight.mT, offs=offsets),
            "ours": lambda: grouped_matmul(x, weight.mT, offsets),
        },
        "dx": {
            "torch grouped_mm": lambda: theirs(dy, weight, offs=offsets),
            "ours": lambda: grouped_matmul(dy, weight, offsets),
        },
        "dw": {
            "torch grouped_mm": lambda: theirs(dy.mT, x, offs=offsets),
            "ours": lambda: grouped_weight_gradient(dy, x, offsets),
        },
    }


def measure() -> list[dict]:
    """Time 16,384 tokens, each on 8 experts, by torch's grouped_mm and by ours, in bursts and sustained."""
    t, dtype, rows = 131072, torch.bfloat16, []
    for (suffix, bench), model, load in product(BENCHES.items(), MODELS, ("balanced", "skewed")):
        experts, d, f = MODELS[model]
        for part, n, k in ("gate and up", 2 * f, d), ("down", d, f):
            for what, runs in products(t, n, k, loads(experts, t, load)).items():
                what = f"{model}, {load}, {part}, {what}{suffix}"
                rows += compare(what, runs, cost(t, experts, n, k, dtype)[1], PEAK[dtype], "TFLOP/s", bench=bench)
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
# Plumbing: reference, cost, place_rows, cases, check, loads, products, measure
# Copy:     DTYPES, locate, find_rows, count_tiles, store_tile, load_matrix, multiply_groups, sort_experts,
#           multiply_rows, tile, stored, processors, allocate, copied, in_rows, grouped_matmul, grouped_matmul_shape,
#           grouped_weight_gradient, grouped_weight_gradient_shape, GroupedLinear, check_grouped, grouped_linear (call
#           grouped_linear)
