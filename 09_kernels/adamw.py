"""AdamW, with the clip before it and the bf16 copy after it: two launches for all parameters of a dtype.

The usual step has passes of its own for each: the norm reads gradients (4 bytes per parameter in fp32), clipping reads
and writes them (8), AdamW reads gradient, weight and two moments and writes three of them (28), and a cast writes the
bf16 weights that the next forward reads (6): 46 bytes, and 6 more if bf16 gradients are cast first. Here the norm reads
gradients, and one kernel does the rest: it scales each gradient as it reads it, and writes each weight twice, in fp32
and in bf16: 34 bytes with fp32 gradients, 30 with bf16 ones. A table of addresses makes one launch of hundreds: a small
tensor costs a block, not a launch. Tensors whose address or size is no multiple of 16 have two launches of their own.

Parent:   none
Run:      python 09_kernels/adamw.py
Source:   Loshchilov and Hutter 2017, arXiv:1711.05101; many tensors at once as in NVIDIA Apex, multi_tensor_apply
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate

import torch
from torch import Tensor, nn

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl

# ------------------------------------------------------------------------------------------------------------ config
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64  # of the weights; moments are at least float32
TRITON = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def locate(block, table_ptr, tensors, TENSORS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tensor to which a block belongs, and the first element of the block in it."""
    i = tl.arange(0, TENSORS)
    starts = tl.load(table_ptr + i, i < tensors, 2**62)  # the first block of each tensor
    tensor = tl.sum((starts <= block).to(tl.int64), 0) - 1
    return tensor, (block - tl.load(table_ptr + tensor)) * BLOCK


@triton.jit
def squares_kernel(
    table_ptr, partial_ptr, tensors, blocks,
    GRADIENT: tl.constexpr, WIDE: tl.constexpr, TENSORS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add up the squares of the gradients in every programs-th block; write this program's sum."""
    total = tl.zeros([BLOCK], WIDE)
    for block in tl.range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0)):
        tensor, first = locate(block, table_ptr + tensors, tensors, TENSORS, BLOCK)
        i = first + tl.arange(0, BLOCK)
        inside = i < tl.multiple_of(tl.load(table_ptr + 2 * tensors + tensor), ALIGNED)
        gradient_ptr = tl.load(table_ptr + 3 * tensors + tensor).to(tl.pointer_type(GRADIENT))
        gradient = tl.load(tl.multiple_of(gradient_ptr + i, ALIGNED), inside, 0).to(WIDE)
        total += gradient * gradient
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def adamw_kernel(
    table_ptr, numbers_ptr, norm_ptr, tensors, LOW: tl.constexpr, GRADIENT: tl.constexpr,
    WIDE: tl.constexpr, TENSORS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Clip, update both moments and the weight, and write its low-precision copy, for one block of one tensor."""
    tensor, first = locate(tl.program_id(0).to(tl.int64), table_ptr, tensors, TENSORS, BLOCK)
    i = first + tl.arange(0, BLOCK)
    # told that sizes and addresses are multiples of 16, the compiler loads 16 bytes at once
    inside = i < tl.multiple_of(tl.load(table_ptr + 2 * tensors + tensor), ALIGNED)
    entry = table_ptr + 3 * tensors + tensor
    gradient_ptr = tl.multiple_of(tl.load(entry).to(tl.pointer_type(GRADIENT)) + i, ALIGNED)
    weight_ptr = tl.multiple_of(tl.load(entry + tensors).to(tl.pointer_type(WIDE)) + i, ALIGNED)
    mean_ptr = tl.multiple_of(tl.load(entry + 2 * tensors).to(tl.pointer_type(WIDE)) + i, ALIGNED)
    square_ptr = tl.multiple_of(tl.load(entry + 3 * tensors).to(tl.pointer_type(WIDE)) + i, ALIGNED)
    # from memory, since a float that is handed to a kernel has 32 bits
    rest1, beta2 = (1 - tl.load(numbers_ptr)).to(WIDE), tl.load(numbers_ptr + 1).to(WIDE)
    rest2 = (1 - tl.load(numbers_ptr + 1)).to(WIDE)  # of 1 - 0.999, fp32 would lose 10 bits
    eps = tl.load(numbers_ptr + 2).to(WIDE)
    rate = tl.load(numbers_ptr + 4 + tensor).to(WIDE)  # lr / (1 - beta1^step)
    correction = tl.load(numbers_ptr + 4 + tensors + tensor).to(WIDE)  # sqrt(1 - beta2^step)
    decay = tl.load(numbers_ptr + 4 + 2 * tensors + tensor).to(WIDE)  # 1 - lr·weight_decay
    clip = (tl.load(numbers_ptr + 3) / (tl.load(norm_ptr) + 1e-6)).to(WIDE)
    clip = tl.where(clip > 1, 1, clip)  # NaN stays NaN
    gradient = tl.load(gradient_ptr, inside, 0).to(WIDE) * clip
    mean, square = tl.load(mean_ptr, inside, 0), tl.load(square_ptr, inside, 0)
    mean = mean + rest1 * (gradient - mean)
    square = beta2 * square + rest2 * gradient * gradient
    weight = tl.load(weight_ptr, inside, 0) * decay
    weight -= rate * mean / (tl.sqrt(square) / correction + eps)
    tl.store(mean_ptr, mean, inside)
    tl.store(square_ptr, square, inside)
    tl.store(weight_ptr, weight, inside)
    if LOW != WIDE:
        low_ptr = tl.multiple_of(tl.load(entry + 4 * tensors).to(tl.pointer_type(LOW)) + i, ALIGNED)
        tl.store(low_ptr, weight.to(LOW), inside)


@dataclass
class Slot:
    """A parameter, and what AdamW keeps for it."""

    parameter: Tensor
    master: Tensor  # the parameter itself, unless that has less than 32 bits
    mean: Tensor  # of its gradients
    square: Tensor  # mean of their squares
    group: dict
    form: tuple  # dtype and device of the parameter
    version: int = -1  # p._version when the master was last rounded into it; writes through p.data go unnoticed
    steps: int = 0  # in which it had a gradient

    def check(self) -> None:
        """Raise if the parameter was moved or cast, or loaded without its master, which a step would restore."""
        p = self.parameter
        if self.form != (p.dtype, p.device) or not p.is_contiguous():
            raise ValueError("a parameter has changed its dtype, device or layout: make a new optimizer for it")
        if self.version != p._version and not torch.allclose(p, self.master.to(p.dtype), 0, 0, equal_nan=True):
            raise ValueError("a parameter is not its rounded master: load weights into slots[i].master, too")


@dataclass(frozen=True)
class Launch:
    """What one launch works on: tensors of the same dtypes."""

    # [8, tensors] first block of adamw_kernel, and of squares_kernel; elements; addresses of gradient, master, mean,
    # square and parameter
    table: Tensor
    numbers: Tensor  # [4 + 3·tensors] beta1, beta2, eps, clip; and of each tensor: rates, corrections, decays
    blocks: tuple[int, int]  # of adamw_kernel, and of squares_kernel
    gradients: tuple[Tensor, ...]  # alive until the kernels are launched
    constants: dict[str, object]


class AdamW:
    """AdamW that clips, keeps fp32 masters of bf16 and fp16 parameters, and goes through memory once.

    It computes what torch.nn.utils.clip_grad_norm_ and torch.optim.AdamW do. `params` are parameters, pairs of name and
    parameter, or dicts with `params` of these kinds, and their own `lr` and `weight_decay` if they need them;
    `param_groups` are copies of the dicts, in which a schedule changes lr. Masters begin as copies of the parameters:
    who has these in fp32 copies them over `slots[i].master`. Parameters without a gradient are left alone. The norm is
    that of this process. State is in `slots`; there is no state_dict.
    Raises ValueError for parameters that are not contiguous, on several devices, given twice, without memory of
    their own (as DTensors), and in a step for those that were moved, cast or loaded without masters.
    """

    def __init__(
        self,
        params: Iterable[Tensor | tuple[str, Tensor] | dict],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        clip: float = float("inf"),
    ):
        self.betas, self.eps, self.clip = betas, eps, clip
        entries = [params] if isinstance(params, Tensor) else list(params)
        groups = entries if all(isinstance(entry, dict) for entry in entries) else [dict(params=entries)]
        self.param_groups = [dict(lr=lr, weight_decay=weight_decay) | group for group in groups]
        if any(group.keys() & {"betas", "eps", "clip"} for group in self.param_groups):
            raise ValueError("betas, eps and clip are the same for all groups: give them to AdamW")
        self.slots = []
        for group in self.param_groups:
            entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            group["params"] = [entry if isinstance(entry, Tensor) else entry[1] for entry in entries]
            for p in group["params"]:
                master = p if p.dtype.itemsize >= 4 else p.detach().float()
                mean, square = torch.zeros_like(master), torch.zeros_like(master)
                self.slots.append(Slot(p, master, mean, square, group, (p.dtype, p.device)))
        parameters = [slot.parameter for slot in self.slots]
        if not parameters:
            raise ValueError("AdamW got no parameters: was params a generator that is used up?")
        if not all(p.is_contiguous() for p in parameters):
            raise ValueError("parameters must be contiguous")
        if any(p.numel() and not p.data_ptr() for p in parameters):  # as a DTensor: the kernels take addresses
            raise ValueError("parameters must be plain tensors with memory of their own")
        if len(set(parameters)) < len(parameters) or len({p.device for p in parameters}) > 1:
            raise ValueError("parameters must be on one device, and in one group each")

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for slot in self.slots:
            slot.parameter.grad = None

    def step(self) -> Tensor:
        """Clip and update; return the norm of all gradients before the clip [], without waiting for the GPU."""
        kinds = {}  # a kernel reads and writes tensors of one dtype, and either all or none 16 bytes at once
        stepped = [slot for slot in self.slots if slot.parameter.grad is not None]
        for slot in stepped:
            slot.check()
        for slot in stepped:
            slot.steps += 1
            gradient = slot.parameter.grad.contiguous()
            kept = gradient, slot.master, slot.mean, slot.square, slot.parameter
            addresses = [x.data_ptr() for x in kept]
            aligned = not any(x % 16 for x in (gradient.numel(), *addresses))
            kind = slot.parameter.dtype, gradient.dtype, aligned
            kinds.setdefault(kind, []).append((slot, gradient, addresses))
        launches = [self.launch(*kind, *zip(*entries)) for kind, entries in kinds.items()]
        x = self.slots[0].parameter
        programs = 4 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
        partial = torch.zeros(len(launches), programs, dtype=torch.float64, device=x.device)
        for sums, on in zip(partial, launches):
            constants = {name: value for name, value in on.constants.items() if name != "LOW"}
            constants |= dict(BLOCK=4 * on.constants["BLOCK"], num_warps=8)
            squares_kernel[(programs,)](on.table, sums, len(on.gradients), on.blocks[1], **constants)
        norm = partial.sum().sqrt()
        for on in launches:
            adamw_kernel[(on.blocks[0],)](on.table, on.numbers, norm, len(on.gradients), **on.constants)
        # a backward of what was computed with the old weights gets an error
        torch.autograd.graph.increment_version([slot.parameter for slot in stepped])
        for slot in stepped:
            slot.version = slot.parameter._version
        return norm

    def launch(
        self,
        dtype: torch.dtype,
        gradient: torch.dtype,
        aligned: bool,
        slots: tuple[Slot, ...],
        gradients: tuple[Tensor, ...],
        addresses: tuple[list[int], ...],
    ) -> Launch:
        """Write the tables for tensors of the same dtypes."""
        device, on_gpu = slots[0].parameter.device, slots[0].parameter.is_cuda
        block = 2048 if on_gpu else 2**15  # the interpreter needs few, large programs
        sizes = [x.numel() for x in gradients]
        counts = [[triton.cdiv(size, length) for size in sizes] for length in (block, 4 * block)]
        starts = [list(accumulate(row, initial=0))[:-1] for row in counts]
        beta1, beta2 = self.betas
        numbers = [beta1, beta2, self.eps, self.clip]
        numbers += [slot.group["lr"] / (1 - beta1**slot.steps) for slot in slots]
        numbers += [(1 - beta2**slot.steps) ** 0.5 for slot in slots]
        numbers += [1 - slot.group["lr"] * slot.group["weight_decay"] for slot in slots]
        constants = dict(GRADIENT=TRITON[gradient], WIDE=TRITON[slots[0].master.dtype], LOW=TRITON[dtype])
        constants |= dict(TENSORS=triton.next_power_of_2(len(slots)), BLOCK=block, ALIGNED=16 if aligned else 1)
        # pinned: to copy from any other memory, the CPU would first wait for the GPU
        table = torch.tensor([*starts, sizes, *zip(*addresses)], pin_memory=on_gpu).to(device, non_blocking=True)
        numbers = torch.tensor(numbers, dtype=torch.float64, pin_memory=on_gpu).to(device, non_blocking=True)
        return Launch(table, numbers, (sum(counts[0]), sum(counts[1])), gradients, constants)


# --------------------------------------------------------------------------------------------------------- reference
def reference(groups: list[dict], lr: float, clip: float, **options) -> Callable[[], Tensor]:
    """A step of plain PyTorch, with fp32 masters beside parameters of low precision; returns the norm."""
    parameters = [p for group in groups for p in group["params"]]
    masters = {p: p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in parameters}  # p itself, if wide
    groups = [group | {"params": [masters[p] for p in group["params"]]} for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True, **options)

    def step() -> Tensor:
        for p, master in masters.items():
            master.grad = None if p.grad is None else p.grad.to(master.dtype)
        norm = nn.utils.clip_grad_norm_(masters.values(), clip)
        optimizer.step()
        for p, master in masters.items():
            if p.dtype != master.dtype:
                p.data.copy_(master)
        return norm

    return step


def cost(n: int, gradient: torch.dtype, low: bool) -> int:
    """Bytes of a step of n parameters: gradients twice, weight and moments read and written, and the bf16 copy."""
    return n * (2 * gradient.itemsize + 6 * 4 + 2 * low)


def trained(optimizer: Callable, dtype: torch.dtype, precision: torch.dtype, device: str, clip: float) -> list[Tensor]:
    """Weights and gradient norms after 3 steps in that precision, of numbers that dtype can hold."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device, generator=generator).to(dtype).to(precision)

    parameters = [nn.Parameter(random(shape)) for shape in [(40, 50), (1,), (7, 3, 11), (0,), (130_001,), (64,)]]
    groups = [dict(params=parameters[:3]), dict(params=parameters[3:], weight_decay=0.0, lr=0.02)]
    made = optimizer(groups, lr=0.05, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, clip=clip)
    norms = []
    for step in range(3):
        for p in parameters:
            p.grad = random(p.shape)
        if step == 1:
            parameters[-1].grad = None  # as of an expert that got no tokens
        norms.append((made.step if optimizer is AdamW else made)().double())
    return [*(p.detach() for p in parameters), torch.stack(norms)]


# ----------------------------------------------------------------------------------------------------------- measure
def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor; inf where one has NaN or inf and the other has not."""
    finite = exact.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return float("inf")
    return ((actual - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-300)).item()


def check(device: str) -> None:
    """Compare three steps with float64; exit if an error is above twice PyTorch's own.

    PyTorch's float64 is what all is compared with: ours may differ from it by 1e-12.
    """
    for dtype in DTYPES:
        if dtype == torch.bfloat16 and device == "cpu":
            continue  # Triton's interpreter cuts bits off instead of rounding
        for clip in 1.0, float("inf"):
            exact = trained(reference, dtype, torch.float64, device, clip)
            mine, theirs = (
                max(relative_error(x, right) for x, right in zip(trained(optimizer, dtype, dtype, device, clip), exact))
                for optimizer in (AdamW, reference)
            )
            print(f"{str(dtype)[6:]:10} worst error {mine:.1e}, PyTorch's {theirs:.1e}  (clip {clip})", flush=True)
            if not mine <= 2 * max(theirs, 5e-13):
                raise SystemExit(f"the error is {mine / max(theirs, 5e-13):.1f} times PyTorch's")


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
    """Time a step of 415 million parameters, in matrices and vectors as a Llama has them."""
    limit, shapes = copy_rate(), [(4096, 4096), (14336, 4096), (4096, 14336), (4096,), (1024, 4096), (4096,)] * 3
    rows, bench = [], triton.testing.do_bench  # no CUDA graph: a step reads addresses from the CPU's memory
    for low, precision in (True, torch.bfloat16), (False, torch.float32):
        parameters = [nn.Parameter(torch.randn(shape, device="cuda").to(precision)) for shape in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p)
        options = dict(lr=1e-4, clip=1.0)
        ours, plain = AdamW([dict(params=parameters)], **options), reference([dict(params=parameters)], **options)
        n = sum(p.numel() for p in parameters)
        by = "cast, clip_grad_norm_, AdamW, copy" if low else "clip_grad_norm_, AdamW"
        what = f"{n:,} parameters, {'bf16 and fp32 masters' if low else 'fp32'}"
        rows += compare(what, {by: plain, "ours": ours.step}, cost(n, precision, low), limit, bench=bench)
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
# Copy:     TRITON, locate, squares_kernel, adamw_kernel, Slot, Launch, AdamW
