"""Cross-entropy that writes the gradient over the logits; and fused with the head, so that logits never exist whole.

1. Forward reads the logits once, with a running maximum and a running sum of exponentials.
2. Backward reads them again and writes the gradient, softmax - one_hot, in their place: 3 passes over n·v elements in
   all, and no memory.
linear_cross_entropy_sum also has the head's matmul and both matmuls of its backward, for `chunk` tokens at a time, all
in forward; backward multiplies by the gradient of the loss. Memory: chunk·v elements, a copy of an fp32 weight in the
dtype of x, and the gradients. The weight's is added up over the chunks in fp32.

Parent:   none
Run:      python 09_kernels/cross_entropy.py
Source:   online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867; in chunks, Hsu et al. 2024, arXiv:2410.10989
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
IGNORE = -100  # target of a token that must not be predicted: the first one of a document


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def tile_indices(columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of this program's tile. Neighbouring programs have neighbouring tiles of the same rows."""
    tiles = tl.cdiv(columns, COLUMNS)  # of a row
    program = tl.program_id(0).to(tl.int64)  # 64 bits: a tensor may have more than 2^31 elements
    row = program // tiles * ROWS + tl.arange(0, ROWS)[:, None]
    return row, program % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]


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


@triton.jit
def loss_kernel(
    logits_ptr, target_ptr, loss_ptr, top_ptr, log_ptr, n, v, stride, IGNORED: tl.constexpr, GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Loss, maximum and log(sum(exp(x - maximum))) of ROWS rows of logits [n, v], STEPS x LANES columns at a time.

    Each lane has a maximum and a sum of its own. They are merged once, at the end of the row, so that threads exchange
    nothing inside the loop; STEPS elements share one rescaling. Where GRADIENT is set, a second sweep writes softmax -
    one_hot over the logits. It goes backwards: what was read last is still in the L2.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]  # 64 bits: n·v may be beyond 2^31
    row = tl.minimum(row, n - 1)  # the last program computes the last row several times
    logits_ptr += row * stride
    lane = tl.arange(0, STEPS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    wide: tl.constexpr = top_ptr.dtype.element_ty
    target = tl.load(target_ptr + row)
    known = (target >= 0) & (target < v)
    # read before the merge, at which all threads meet: later, another may have written the gradient here
    score = tl.load(logits_ptr + target, known, 0).to(wide)
    highest = tl.full(
        [ROWS, 1, LANES], -3.4028234663852886e38, wide
    )  # finite, so that logits of -inf leave a sum of 0 and not NaN
    total = tl.zeros([ROWS, 1, LANES], wide)
    keep: tl.constexpr = "evict_last" if GRADIENT else ""  # in the L2, for the second sweep
    for start in tl.range(0, v, STEPS * LANES):
        column = start + lane
        x = tl.load(logits_ptr + column, column < v, float("-inf"), eviction_policy=keep).to(wide)
        higher = tl.maximum(highest, tl.max(x, 1, keep_dims=True))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 1, keep_dims=True)
        highest = higher
    top = tl.max(highest, 2, keep_dims=True)
    log = tl.log(tl.sum(total * tl.exp(highest - top), 2, keep_dims=True))  # ROWS 1 1
    loss = log - (score - top)  # in this order: of large logits, top + log would lose the bits of log
    tl.store(loss_ptr + row, tl.where(target == IGNORED, 0, tl.where(known, loss, float("nan"))))
    tl.store(top_ptr + row, top)
    tl.store(log_ptr + row, log)
    if GRADIENT:
        last = (tl.cdiv(v, STEPS * LANES) - 1) * (STEPS * LANES)
        for start in tl.range(0, v, STEPS * LANES):
            column = last - start + lane
            x = tl.load(logits_ptr + column, column < v, float("-inf"), eviction_policy="evict_first").to(wide)
            gradient = tl.exp((x - top) - log) - tl.where(column == target, 1, 0)
            gradient = tl.where(target == IGNORED, 0, gradient)
            tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), column < v)


@triton.jit
def gradient_kernel(
    logits_ptr, target_ptr, top_ptr, log_ptr, scale_ptr, out_ptr, n, v, stride, out_stride, IGNORED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write scale·(softmax - one_hot) for one tile of the logits [n, v]; rows without a target get zeros."""
    row, column = tile_indices(v, ROWS, COLUMNS)
    inside = (row < n) & (column < v)
    target = tl.load(target_ptr + row, row < n, IGNORED)
    top, log = tl.load(top_ptr + row, row < n, 0), tl.load(log_ptr + row, row < n, 0)
    x = tl.load(logits_ptr + row * stride + column, inside, float("-inf")).to(top.dtype)
    gradient = (tl.exp((x - top) - log) - tl.where(column == target, 1, 0)) * tl.load(scale_ptr)
    gradient = tl.where(target == IGNORED, 0, gradient)
    tl.store(out_ptr + row * out_stride + column, gradient.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def scale_kernel(x_ptr, scale_ptr, n, BLOCK: tl.constexpr):
    """Multiply x [n] by scale; where scale is 1, as it is for the last loss of a step, read nothing."""
    scale = tl.load(scale_ptr)
    if scale != 1:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, i < n, 0)
        tl.store(x_ptr + i, (x * scale).to(x_ptr.dtype.element_ty), i < n)


def losses(logits: Tensor, targets: Tensor, ignored: int, gradient: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, v], targets [n] -> loss [n], 0 where the target is ignored; maximum m [n]; log(sum(exp(x - m))) [n]

    With `gradient`, that of the sum of the losses is written over the logits.
    """
    (n, v), wide = logits.shape, torch.promote_types(logits.dtype, torch.float32)
    loss, top, log = logits.new_empty(3, n, dtype=wide)
    lanes = min(triton.next_power_of_2(v), 4096 if gradient else 1024)
    steps = min(triton.next_power_of_2(v) // lanes, 4 if gradient else 8)
    rows = 1 if logits.is_cuda else max(1, 2**17 // (steps * lanes))  # the interpreter needs few, large programs
    if n:
        loss_kernel[(triton.cdiv(n, rows),)](
            logits, targets, loss, top, log, n, v, logits.stride(0),
            IGNORED=ignored, GRADIENT=gradient, ROWS=rows, STEPS=steps, LANES=lanes, num_warps=max(lanes // 256, 1),
        )  # fmt: skip
    return loss, top, log


def write_gradient(
    logits: Tensor, targets: Tensor, ignored: int, top: Tensor, log: Tensor, scale: Tensor, out: Tensor
) -> None:
    """Write the gradient of scale [] times the sum of the losses to out [n, v], which may be the logits."""
    n, v = logits.shape
    columns = min(triton.next_power_of_2(v), 2048 if logits.is_cuda else 8192)  # wider tiles took longer
    rows = 1 if logits.is_cuda else max(1, 2**17 // columns)
    if n:
        gradient_kernel[(triton.cdiv(v, columns) * triton.cdiv(n, rows),)](
            logits, targets, top, log, scale, out, n, v, logits.stride(0), out.stride(0),
            IGNORED=ignored, ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip


def rescale(x: Tensor, scale: Tensor) -> None:
    """Multiply a contiguous x by scale [], in place."""
    block = 4096 if x.is_cuda else 2**17
    if x.numel():
        scale_kernel[(triton.cdiv(x.numel(), block),)](x, scale, x.numel(), BLOCK=block)


class CrossEntropy(torch.autograd.Function):
    """logits [n, v], targets [n] -> sum of the losses; the gradient is written over the logits"""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        loss, top, log = losses(logits, targets, ignored)
        ctx.save_for_backward(logits, targets, top, log)
        ctx.ignored = ignored
        return loss.sum()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        logits, targets, top, log = ctx.saved_tensors
        out = torch.empty_like(logits) if torch.compiler.is_compiling() else logits  # which plans memory itself
        write_gradient(logits, targets, ctx.ignored, top, log, gradient, out)
        if out is logits:  # an operation that has saved the logits gets an error instead of gradients
            torch.autograd.graph.increment_version(logits)
        return out, None, None


def cross_entropy_sum(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Sum the losses of logits [n, v] for the targets [n]; backward writes the gradient over the logits.

    A target of ignore_index counts nothing; any other that is no column of the logits makes the loss NaN. Computed in
    float32, in float64 for float64. The logits must come from an operation that does not need them in backward, as a
    matmul does not; autograd raises RuntimeError if one does, or if backward runs twice. Raises ValueError for leaves,
    for integers, and for shapes that do not fit.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits are {list(logits.shape)}, targets {list(targets.shape)}: must be [n, v] and [n]")
    if not logits.is_floating_point() or targets.dtype not in (torch.int32, torch.int64):
        found = f"logits are {logits.dtype}, targets {targets.dtype}"
        raise ValueError(f"{found}: must have a floating-point dtype, and int32 or int64")
    check_free(logits)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return CrossEntropy.apply(logits, targets.contiguous(), ignore_index)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [m, n] += a [m, k] @ b [k, n], where total has more bits: the product is not rounded before it is added."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class LinearCrossEntropy(torch.autograd.Function):
    """x [n, d], weight [v, d], targets [n] -> sum of the losses of x @ weight.T, with all gradients"""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, ignored: int, training: bool) -> Tensor:
        low, buffer = weight.to(x.dtype), x.new_empty(min(chunk, len(x)), len(weight))  # chunk v
        loss = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        if training:
            dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=loss.dtype)
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            logits = torch.mm(x[part], low.T, out=buffer[: len(x[part])])
            loss += losses(logits, targets[part], ignored, training)[0].sum()
            if training:  # logits are their gradient from here on
                torch.mm(logits, low, out=dx[part])
                add_product(dweight, logits.T, x[part])
        ctx.save_for_backward(*((dx, dweight) if training else ()))
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this gradient cannot be differentiated again: create_graph must be False")
        dx, dweight = ctx.saved_tensors
        rescale(dx, gradient)
        rescale(dweight, gradient)
        torch.autograd.graph.increment_version((dx, dweight))  # backward must not run twice
        return dx, dweight.to(ctx.dtype), None, None, None, None


@torch.compiler.disable  # nothing here is left to fuse, and it may not see memory that is written twice
def linear_cross_entropy_sum(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 0, ignore_index: int = IGNORE
) -> Tensor:
    """Sum the losses of the logits x [n, d] @ weight [v, d].T for the targets [n], of `chunk` tokens at a time.

    By default the logits of a chunk are at most 2^29 elements, 1 GiB in bf16: matmuls need some thousand tokens.
    The matmuls run in the dtype of x. The gradient of the weight is added up in float32 (float64 for float64) and
    returned in the dtype of the weight: give fp32 weights to lose nothing. A target of ignore_index counts nothing;
    any other that is no row of the weight makes the loss NaN. Backward can run once; RuntimeError otherwise. Raises
    ValueError for integers, and for shapes that do not fit.
    """
    if x.ndim != 2 or weight.shape[1:] != x.shape[1:] or targets.shape != x.shape[:1]:
        shapes = f"{list(x.shape)}, {list(weight.shape)} and {list(targets.shape)}"
        raise ValueError(f"x, weight and targets are {shapes}: must be [n, d], [v, d] and [n]")
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}: must have floating-point dtypes")
    if targets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"targets are {targets.dtype}: must be int32 or int64")
    training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    chunk = chunk or max(2**29 // len(weight) // 256, 1) * 256
    return LinearCrossEntropy.apply(x, weight, targets.contiguous(), chunk, ignore_index, training)


# --------------------------------------------------------------------------------------------------------- reference
def reference(logits: Tensor, targets: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="sum")


def linear_reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same with the head."""
    return reference(x @ weight.to(x.dtype).T, targets)


def cost(n: int, d: int, v: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the loss of n rows of v logits and its gradient, in 3 passes; FLOPs of the head's three matmuls."""
    return 3 * n * v * dtype.itemsize, 3 * 2 * n * d * v


def cases(device: str) -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Yield what is tried, ours, plain PyTorch's, and the inputs, in float64."""
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=torch.float64, device=device)

    def some(n: int, v: int) -> Tensor:
        return torch.randint(v, (n,), device=device).masked_fill(torch.arange(n, device=device) % 5 == 1, IGNORE)

    def ours(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_sum(logits * 1, targets)  # a leaf must not be written over

    for n, v in (7, 1000), (130, 37), (3, 20011), (0, 9), *([(4096, 128256)] if device == "cuda" else []):
        yield f"{n} x {v}", ours, reference, [3 * random(n, v), some(n, v)]
    falling = -torch.arange(9000, dtype=torch.float64, device=device)[None] * torch.tensor([[1], [-1]], device=device)
    yield "maximum first, and last", ours, reference, [falling / 50, some(2, 9000)]
    masked = random(4, 300).masked_fill(random(4, 300) > 0, -torch.inf)
    masked[:, 5], target = 1.0, torch.full((4,), 5, device=device)
    yield "masked with -inf", ours, reference, [masked, target]
    large = torch.tensor([[1e4, -1e4, 9990.0], [-3e4, -3.1e4, -3e4]], dtype=torch.float64, device=device)
    yield "large values", ours, reference, [large, torch.zeros(2, dtype=torch.int64, device=device)]
    view = [random(9, 40), some(9, 20)]
    yield "a view", lambda x, t: ours(x[:, 10:30], t), lambda x, t: reference(x[:, 10:30], t), view
    yield "transposed", lambda x, t: ours(x.T, t), lambda x, t: reference(x.T, t), [random(20, 9), some(9, 20)]
    for n, d, v, chunk in (50, 24, 300, 16), (19, 8, 40, 19), (25, 5, 7, 4), (0, 8, 9, 4):
        fused = lambda x, w, t, chunk=chunk: 0.25 * linear_cross_entropy_sum(x * 1, w, t, chunk)  # noqa: E731
        plain = lambda x, w, t: 0.25 * linear_reference(x, w, t)  # noqa: E731
        yield f"{n} x {d} x {v}, with the head", fused, plain, [random(n, d), random(v, d), some(n, v)]


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


def add_peaks(rows: list[dict], runs: dict[str, Callable[[], object]]) -> None:
    """Add to the rows of the table the GiB that each run allocates beyond what was allocated before, gradients too."""
    for row in rows:
        torch.cuda.synchronize()  # all memory that the run before took is free again
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runs[row["by"]]()
        row["GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"{row['what']:45} {row['by']:30} {row['GiB']:.2f} GiB", flush=True)


def measure() -> list[dict]:
    """Time the loss of 16,384 x 128,256 bf16 logits, then with a head of 4,096, by eager, torch.compile and ours."""
    n, d, v, limit = 16384, 4096, 128256, copy_rate()
    moved, flops = cost(n, d, v, torch.bfloat16)
    targets = torch.randint(v, (n,), device="cuda")

    def step(loss: Callable, *inputs: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(*inputs, targets), inputs)

    logits = torch.randn(n, v, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    free, one = torch.empty_like(logits), torch.ones((), device="cuda")

    def ours(out: Tensor, logits: Tensor = logits) -> None:
        write_gradient(logits, targets, IGNORE, *losses(logits, targets, IGNORE)[1:], one, out)

    runs = {"eager": step(reference, logits), "torch.compile": step(torch.compile(reference), logits)}
    runs["ours"] = partial(ours, free)  # to other memory, so that every repeat reads the same logits
    rows = compare(f"{n} x {v}, forward and backward", runs, moved, limit)
    runs["ours"] = partial(ours, logits.detach())  # where it belongs
    add_peaks(rows, runs)
    del logits, free, runs, ours
    x = torch.randn(n, d, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(v, d, dtype=torch.bfloat16, device="cuda").mul_(0.02).requires_grad_()
    compiled = torch.compile(reference)
    runs = {"matmul, then torch.compile": step(lambda x, w, t: compiled(x @ w.T, t), x, weight)}
    runs["ours"] = step(linear_cross_entropy_sum, x, weight)
    fused = compare("with the head, forward and backward", runs, flops, 989.5e12, "TFLOP/s")
    add_peaks(fused, runs)
    return rows + fused


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
# Copy:     IGNORE, tile_indices, check_free, loss_kernel, gradient_kernel, scale_kernel, losses, write_gradient,
#           rescale, CrossEntropy, cross_entropy_sum, add_product, LinearCrossEntropy, linear_cross_entropy_sum (call
#           cross_entropy_sum or linear_cross_entropy_sum: unlike torch's, they return a sum, not a mean, and the logits
#           are overwritten by their gradient)
