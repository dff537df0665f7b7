"""Train a Llama on one GPU with all that is not a matmul or attention in kernels of our own, copied from this folder.

1. Residual add and norm are one kernel. Queries and keys are rotated in place. SwiGLU's gradients are written over its
   inputs, and its output is computed twice. Projections of one input add up its gradient inside their matmuls.
2. Logits exist for a few thousand tokens at a time, and their gradient is written over them.
3. One kernel clips, updates fp32 masters and writes the bf16 weights, so that autocast casts nothing.

Parent:   01_single_gpu/train.py, 09_kernels/rmsnorm.py, 09_kernels/swiglu.py, 09_kernels/rope.py,
          09_kernels/cross_entropy.py, 09_kernels/adamw.py
Lesson:   Project, project, RMSNorm, Attention.forward, MLP.forward, Block.forward, Loss, Model.__init__,
          Model.hidden, Model.forward, make_optimizer, forward, train_step
Run:      python 09_kernels/train.py
Source:   Llama 3, arXiv:2407.21783; Liger Kernel, Hsu et al. 2024, arXiv:2410.10989
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from glob import glob
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import numpy as np
import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl

# ------------------------------------------------------------------------------------------------------------ config
IGNORE = -100  # target of a token that must not be predicted: the first one of a document
LONGEST_ROW = 2**16  # elements of a row, which one program holds; beyond some 8,192, backward spills registers
TRITON = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
PEAK_FLOPS = {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989.5e12, "NVIDIA H200": 989.5e12}  # bf16
# SmolLM-1.7B, Llama-3.2-1B and Llama-3.1-8B. The first two are published with a tied head, as in tied_embeddings.py
PRESETS = {
    "tiny": {},  # the defaults below: for laptops
    "smollm_1_7b": dict(layers=24, dim=2048, heads=32, kv_heads=32, ffn=8192, vocab=49152, theta=1e4, lr=3e-4),
    "llama3_1b": dict(layers=16, dim=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, rope_factor=32.0, lr=3e-4),
    "llama3_8b": dict(layers=32, dim=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, rope_factor=8.0, lr=3e-4),
}


@dataclass(frozen=True)
class Config:
    """Every field is a flag. Flags override the preset, which overrides these defaults."""

    preset: Literal[tuple(PRESETS)] = "tiny"
    layers: int = 8
    dim: int = 128
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 384
    vocab: int = 256
    theta: float = 5e5  # base of the RoPE wavelengths
    rope_factor: float = 1.0  # Llama 3.1 and 3.2 stretch long wavelengths by this factor
    seq: int = 128
    batch: int = 4  # sequences per step, over all ranks; few, for Triton's interpreter
    steps: int = 6
    validate: int = 0  # steps between two validation losses, on text that is then not trained on; 0: none
    warmup: int = 10  # steps over which the learning rate rises to --lr; a cosine then takes it to a tenth at --steps
    lr: float = 3e-3
    weight_decay: float = 0.1
    eps: float = 1e-8
    clip: float = 1.0  # largest gradient norm; inf turns clipping off
    seed: int = 0
    data: str = os.path.dirname(os.__file__)  # a file, or a folder's files, read as bytes; or a .bin file of token ids
    init: str = ""  # start from these weights: a .safetensors file, or 'model-*.safetensors' for several
    save: str = ""  # write the trained weights to this .safetensors file
    device: Literal["cuda", "cpu"] = "cuda"  # cpu where torch finds no GPU
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16: fp32 master weights
    compile: bool = False


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


def rescale(x: Tensor, scale: Tensor) -> None:
    """Multiply a contiguous x by scale [], in place."""
    block = 4096 if x.is_cuda else 2**17
    if x.numel():
        scale_kernel[(triton.cdiv(x.numel(), block),)](x, scale, x.numel(), BLOCK=block)


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


# ------------------------------------------------------------------------------------------------------------- model
# Axes: b sequences, s tokens, d model width, h heads, k head width, f ffn width, v vocabulary.


class Project(torch.autograd.Function):
    """x [b, s, d], weights [f, d] -> x @ weight.T of each; their gradients of x are added up inside the matmuls"""

    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(nn.functional.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *dys: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        dys = [rows_of(dy) for dy in dys]
        rows = rows_of(x)
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:]):
            dx.addmm_(dy, weight)  # a kernel that adds would read two tensors and write a third
        dws = [dy.T @ rows for dy in dys]
        return dx.view(x.shape), *dws


def project(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Multiply x [b, s, d] by the transpose of each weight [f, d]."""
    if not torch.is_grad_enabled():  # nothing to save, and torch 2.11 fails to compile Project.apply here
        return tuple(nn.functional.linear(x, weight) for weight in weights)
    return Project.apply(x, *weights)


class RMSNorm(nn.Module):
    """Root mean square normalisation of the last axis (arXiv:1910.07467)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cfg.dim))

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, branch [b, s, d] -> their sum, the residual stream; the sum normalised"""
        if branch is None:
            return x, rms_norm(x, self.weight)
        return add_rms_norm(x, branch, self.weight)


def rope_table(cfg: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine [s, k] of the rotary angles at positions [s] (arXiv:2104.09864)."""
    k = cfg.dim // cfg.heads
    exponent = torch.arange(0, k, 2, dtype=torch.float64, device=positions.device) / k
    frequency = cfg.theta**-exponent
    turns = 8192 * frequency / (2 * torch.pi)  # full turns within 8192 tokens, the context of Llama 3's pretraining
    share = ((turns - 1) / 3).clamp(0, 1)  # 4 turns or more: unchanged; 1 turn or less: slowed down by rope_factor
    frequency = frequency * (share + (1 - share) / cfg.rope_factor)
    angle = torch.outer(positions, frequency).repeat(1, 2)  # s k
    dtype = torch.get_default_dtype()
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Attention(nn.Module):
    """Causal attention; heads / kv_heads query heads share one key head and one value head (arXiv:2305.13245)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.k = cfg.dim // cfg.heads
        self.q_proj = nn.Linear(cfg.dim, cfg.heads * self.k, bias=False)
        self.k_proj = nn.Linear(cfg.dim, cfg.kv_heads * self.k, bias=False)
        self.v_proj = nn.Linear(cfg.dim, cfg.kv_heads * self.k, bias=False)
        self.o_proj = nn.Linear(cfg.heads * self.k, cfg.dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = project(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        q = rearrange(rotate(q, rope), "b s (h k) -> b h s k", k=self.k)
        k = rearrange(rotate(k, rope), "b s (h k) -> b h s k", k=self.k)
        v = rearrange(v, "b s (h k) -> b h s k", k=self.k)
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = rearrange(o, "b h s k -> b s (h k)")
        return self.o_proj(o)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.up_proj = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.down_proj = nn.Linear(cfg.ffn, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj.weight, self.up_proj.weight)
        return swiglu(gate, up, self.down_proj.weight)


class Block(nn.Module):
    """Attention, then MLP; each reads a normalised residual stream and adds to it."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, branch: Tensor | None, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [b, s, d], and what the block before has yet to add to it -> the same of this block"""
        x, normed = self.input_layernorm(x, branch)
        x, normed = self.post_attention_layernorm(x, self.self_attn(normed, rope))
        return x, self.mlp(normed)


class Loss(nn.Module):
    """Cross-entropy of the logits x [t, d] @ weight [v, d].T, summed over the valid targets [t]."""

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy_sum(x, weight, targets)


class Model(nn.Module):
    """Llama 3 with an untied head. Parameters have the names and shapes of transformers.LlamaForCausalLM."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.model.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.model.norm = RMSNorm(cfg)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.loss = Loss()

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> what the head reads [b, s, d]"""
        rope = rope_table(self.cfg, torch.arange(ids.shape[1], device=ids.device))
        x = self.model.embed_tokens(ids).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
        branch = None
        for block in self.model.layers:
            x, branch = block(x, branch, rope)
        return self.model.norm(x, branch)[1]

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> logits [b, s, v]"""
        x = self.hidden(ids)
        return nn.functional.linear(x, self.lm_head.weight.to(x.dtype))


# ---------------------------------------------------------------------------------------------------------- training
def slots_by_name(model: Model, optimizer: AdamW) -> dict[str, Slot]:
    """Return what the optimizer keeps for each parameter of the model."""
    slots = {slot.parameter: slot for slot in optimizer.slots}
    return {name: slots[p] for name, p in model.named_parameters()}


def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> sum of the losses of the valid targets"""
    return model.loss(model.hidden(inputs).flatten(0, 1), model.lm_head.weight, targets.flatten())


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in .grad"""
    tokens = (targets != IGNORE).sum()
    inputs, targets = inputs.to(cfg.device), targets.to(cfg.device)
    loss = forward(cfg, model, inputs, targets) / tokens
    loss.backward()
    return loss.detach()


def train_step(cfg: Config, model: Model, optimizer: AdamW, inputs: Tensor, targets: Tensor):
    """Run one optimizer step on the global batch [b, s]; return loss and gradient norm, without waiting for the GPU."""
    loss = forward_backward(cfg, model, inputs, targets)
    norm = optimizer.step()  # clips, too
    optimizer.zero_grad()
    return loss, norm


@torch.no_grad()
def evaluate(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, without gradients"""
    tokens = (targets != IGNORE).sum()
    inputs, targets = inputs.to(cfg.device), targets.to(cfg.device)
    return forward(cfg, model, inputs, targets) / tokens


# ------------------------------------------- the same in every recipe, or nearly: 01_single_gpu/train.py explains it
def tensor_shapes(cfg: Config) -> dict[str, list[int]]:
    """Return the shape of every tensor of the full model by its published name."""
    d, f, v = cfg.dim, cfg.ffn, cfg.vocab
    kv = cfg.dim // cfg.heads * cfg.kv_heads
    block = {
        "input_layernorm": [d],
        "self_attn.q_proj": [d, d],
        "self_attn.k_proj": [kv, d],
        "self_attn.v_proj": [kv, d],
        "self_attn.o_proj": [d, d],
        "post_attention_layernorm": [d],
        "mlp.gate_proj": [f, d],
        "mlp.up_proj": [f, d],
        "mlp.down_proj": [d, f],
    }
    shapes = {"model.embed_tokens": [v, d], "model.norm": [d], "lm_head": [v, d]}
    for i in range(cfg.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def full_tensor(cfg: Config, name: str, shape: torch.Size) -> Tensor:
    """Return one full tensor of the initial weights: from --init, or drawn by a generator seeded with (seed, name).

    Published models that tie their head store it as the embedding.
    """
    if cfg.init:
        files = {}
        for path in glob(cfg.init) or [cfg.init]:
            file = safe_open(path, "pt")
            files |= dict.fromkeys(file.keys(), file)
        stored = name if name in files else "model.embed_tokens.weight"
        return files[stored].get_tensor(stored)
    if len(shape) == 1:
        return torch.ones(shape)
    seed = zlib.crc32(f"{cfg.seed} {name}".encode())
    generator = torch.Generator(cfg.device).manual_seed(seed)
    tensor = torch.empty(shape, dtype=torch.float32, device=cfg.device)
    return tensor.normal_(0, 0.02, generator=generator)


def build_model(cfg: Config) -> Model:
    """Build the model and fill it tensor by tensor, so that at most one full tensor is held twice.

    The matmuls of the blocks have weights in their own dtype. Embedding, head and norms are few, and stay in fp32.
    """
    with torch.device("meta"):
        model = Model(cfg)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.to(getattr(torch, cfg.dtype))
    model.to_empty(device=cfg.device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(full_tensor(cfg, name, p.shape))
    if cfg.compile:
        model.loss = torch.compile(model.loss)  # its own .compile() would leave a module of torch.nn as it is
        for block in model.model.layers.children():  # the blocks share one compilation
            block.compile()
    return model


def read_ids(cfg: Config) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of --data, and the offset at which each document starts.

    Text has one id per byte and one document per file. A .bin file is one document of uint16 ids, or of uint32 ids if
    --vocab is above 65536. It is memory-mapped, never read whole.
    """
    path = Path(cfg.data)
    if not path.exists():
        raise SystemExit(f"--data {cfg.data}: no such file or folder")
    if path.suffix == ".bin":
        ids = np.memmap(path, np.uint32 if cfg.vocab > 2**16 else np.uint16, "r")
        starts = np.zeros(1, np.int64)
        valid = ids[1:4096:2].any()  # ids of twice this width are small: their upper halves are 0
    else:
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        documents = [np.fromfile(file, np.uint8) for file in files]
        ids = np.concatenate([np.zeros(0, np.uint8), *documents])
        starts = np.cumsum([0, *map(len, documents[:-1])])
        valid = ids.all()  # text has no byte 0, other files have
    if not valid:
        raise SystemExit(f"--data {cfg.data}: must be text, or a .bin file of uint16 ids, uint32 if --vocab is > 65536")
    return ids, starts


def load_data(cfg: Config) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return the text to train on, and that for --validate, the last twentieth: ids, and where documents start."""
    ids, starts = read_ids(cfg)
    least = (cfg.seq + 1) * (20 if cfg.validate else 1)
    if len(ids) < least:
        raise SystemExit(f"--data {cfg.data}: must have at least {least} tokens with --seq {cfg.seq}, has {len(ids)}")
    cut = len(ids) * 19 // 20 if cfg.validate else len(ids)
    unseen = starts >= cut
    training = ids[:cut], starts[~unseen]
    validation = ids[cut:], starts[unseen] - cut
    return training, validation


def make_batch(cfg: Config, data: tuple[np.ndarray, np.ndarray], step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [b, s] of the global batch: windows of the text, chosen by (seed, step) alone.

    A window may hold several documents. Attention crosses from one to the next; the loss does not.
    """
    ids, starts = data
    random = np.random.default_rng((cfg.seed, step))
    first = random.integers(len(ids) - cfg.seq, size=(cfg.batch, 1))
    positions = first + np.arange(cfg.seq + 1)  # b s+1
    window = torch.from_numpy(ids[positions].astype(np.int64))
    if window.max() >= cfg.vocab:
        raise SystemExit(f"--vocab {cfg.vocab}: must be above {window.max()}, an id in {cfg.data}")
    inputs, targets = window[:, :-1], window[:, 1:]
    unrelated = np.isin(positions[:, 1:], starts)  # a document does not follow from the one before it
    return inputs, targets.masked_fill(torch.from_numpy(unrelated), IGNORE)


def make_optimizer(cfg: Config, model: Model) -> AdamW:
    """Return AdamW, with weight decay on matrices only, and with masters that are not rounded as the weights are."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        dict(params=matrices, weight_decay=cfg.weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]
    optimizer = AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=cfg.eps, clip=cfg.clip)
    for name, slot in slots_by_name(model, optimizer).items():
        if slot.master.dtype != slot.parameter.dtype:
            slot.master.copy_(full_tensor(cfg, name, slot.master.shape))
    return optimizer


def set_learning_rate(cfg: Config, optimizer: AdamW, step: int) -> None:
    """Warm up linearly over --warmup steps, then follow a cosine from --lr down to a tenth of it at --steps."""
    warm = min(1, (step + 1) / (cfg.warmup + 1))
    decayed = max(0, step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    for group in optimizer.param_groups:
        group["lr"] = cfg.lr * warm * (0.55 + 0.45 * math.cos(math.pi * decayed))


def flops_per_token(cfg: Config) -> float:
    """Count the FLOPs of forward and backward: 6 per weight in a matmul, and 6·layers·dim·seq in causal attention.

    The embedding is a lookup, only the unmasked half of attention counts, and recomputation does not count.
    """
    kv = cfg.dim // cfg.heads * cfg.kv_heads
    attention = 2 * cfg.dim * cfg.dim + 2 * cfg.dim * kv
    mlp = 3 * cfg.dim * cfg.ffn
    weights = cfg.layers * (attention + mlp) + cfg.dim * cfg.vocab
    return 6 * weights + 6 * cfg.layers * cfg.dim * cfg.seq


def log(cfg: Config, label: str, loss: float, norm: float, seconds: float) -> None:
    """Print one line for a step that took `seconds`. MFU: model FLOPs per second over the GPU's dense bf16 peak."""
    speed = cfg.batch * cfg.seq / seconds
    gpu = torch.cuda.get_device_name() if cfg.device == "cuda" else "cpu"
    mfu = f"{speed * flops_per_token(cfg) / PEAK_FLOPS[gpu]:.1%}" if gpu in PEAK_FLOPS else "-"
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cfg.device == "cuda" else "-"
    tail = f"tokens/s/GPU {speed:,.0f}  MFU {mfu}  memory {memory}"
    print(f"{label:>9}  loss {loss:.4f}  gradient norm {norm:.3f}  {tail}", flush=True)


def validate(cfg: Config, model: Model, unseen: tuple[np.ndarray, np.ndarray]) -> None:
    """Print the mean loss of a batch of unseen text, the same one each time."""
    inputs, targets = make_batch(cfg, unseen, 0)
    loss = evaluate(cfg, model, inputs, targets).item()
    print(f"{'':>9}  validation loss {loss:.4f}", flush=True)


def write_weights(cfg: Config, weights: dict[str, Tensor], history: list[tuple[float, ...]]) -> None:
    """Write full weights for transformers; the metadata holds config and the numbers of each step."""
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise SystemExit(f"--save {cfg.save}: not written, weights are inf or NaN; try a lower --lr or more --warmup")
    metadata = {"format": "pt", "config": json.dumps(asdict(cfg)), "history": json.dumps(history)}
    part = Path(f"{os.path.realpath(cfg.save)}.tmp")
    part.write_bytes(to_bytes(weights, metadata))
    part.replace(part.with_suffix(""))  # at once: whoever has mapped an older file keeps that


def save(cfg: Config, model: Model, optimizer: AdamW, history: list[tuple[float, float, float]]) -> None:
    """Write the weights for transformers; the metadata holds config and [loss, gradient norm, seconds] per step."""
    masters = {name: slot.master for name, slot in slots_by_name(model, optimizer).items()}
    write_weights(cfg, masters, history)


def train(cfg: Config, data: tuple[np.ndarray, np.ndarray], unseen: tuple[np.ndarray, np.ndarray]) -> None:
    """Build the model, train it, log every step, save."""
    torch.set_default_dtype(torch.float64 if cfg.dtype == "float64" else torch.float32)  # of the weights
    model = build_model(cfg)
    optimizer = make_optimizer(cfg, model)
    history = []
    batch = make_batch(cfg, data, 0)
    for step in range(cfg.steps):
        start = time.perf_counter()
        set_learning_rate(cfg, optimizer, step)
        loss, norm = train_step(cfg, model, optimizer, *batch)
        batch = make_batch(cfg, data, step + 1)  # the next one, while the GPU is still busy
        loss, norm = loss.item(), norm.item()  # waits for the GPU
        if not math.isfinite(loss + norm):
            raise SystemExit(f"step {step + 1}: loss {loss}, gradient norm {norm}; try a lower --lr or more --warmup")
        history.append((loss, norm, time.perf_counter() - start))
        log(cfg, f"step {step + 1}", *history[-1])
        if cfg.validate and (step + 1) % cfg.validate == 0:
            validate(cfg, model, unseen)
    if history:
        log(cfg, "median", *np.median(history[min(5, cfg.steps // 2) :], axis=0))  # without the slow first steps
    if cfg.save:
        save(cfg, model, optimizer, history)


def parse_config() -> Config:
    """Read the command line. Flags override the preset, which overrides the defaults of Config."""
    parser = ArgumentParser(usage=SUPPRESS, description=__doc__, argument_default=SUPPRESS, allow_abbrev=False)
    parser.formatter_class = RawDescriptionHelpFormatter
    for name, hint in get_type_hints(Config).items():
        default = getattr(Config, name)
        kind = dict(type=type(default), choices=get_args(hint) or None)
        if hint is bool:
            kind = dict(action="store_true")
        parser.add_argument(f"--{name}", help=f"default: {default}", **kind)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    flags = {"device": device, **vars(parser.parse_args())}
    preset = PRESETS[flags.get("preset", "tiny")]
    return Config(**{**preset, **flags})


def check_config(cfg: Config, path: Path) -> None:
    """Exit with one line unless config.json, beside the weights, describes this model where shapes do not show it."""
    config = json.loads(path.read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    published = dict(rope_theta=1e4, factor=1) | config | rope
    wanted = dict(model_type="llama", hidden_act="silu", rms_norm_eps=1e-5, num_attention_heads=cfg.heads)
    wanted |= dict(rope_theta=cfg.theta, factor=cfg.rope_factor)
    if cfg.rope_factor != 1:
        wanted |= dict(rope_type="llama3", low_freq_factor=1, high_freq_factor=4)
        wanted |= dict(original_max_position_embeddings=8192)
    for name, value in wanted.items():
        if published.get(name) != value:
            raise SystemExit(f"--init {cfg.init}: {path} has {name} {published.get(name)}, this model has {value}")
    if cfg.vocab > 256 and not cfg.data.endswith(".bin"):
        raise SystemExit(f"--data {cfg.data}: must be a .bin file, of ids by the tokenizer beside {path}")


def check_init(cfg: Config) -> None:
    """Exit with one line unless the files of --init hold every tensor of the model, and no other."""
    stored = {}
    for path in glob(cfg.init) or [cfg.init]:
        try:
            file = safe_open(path, "pt")
        except (OSError, SafetensorError):
            raise SystemExit(f"--init {cfg.init}: {path} is no .safetensors file") from None
        stored |= {name: file.get_slice(name).get_shape() for name in file.keys()}
    shapes = tensor_shapes(cfg)
    if "lm_head.weight" not in stored:  # a tied head is stored as the embedding
        shapes.pop("lm_head.weight", None)
    for name in sorted(stored.keys() | shapes.keys()):
        if stored.get(name) != shapes.get(name):
            raise SystemExit(f"--init {cfg.init}: {name} is {stored.get(name)}, the model has {shapes.get(name)}")
    published = Path(path).with_name("config.json")
    if published.is_file():
        check_config(cfg, published)


def check(cfg: Config, world: int) -> None:
    """Exit with one line that names the invalid flag, its value, and what would work."""
    may_be_zero = "steps validate warmup lr weight_decay seed compile".split()
    for flag, value in asdict(cfg).items():
        if isinstance(value, int | float) and not (value > 0 or (value == 0 and flag in may_be_zero)):
            raise SystemExit(f"--{flag} {value}: must be {'at least' if flag in may_be_zero else 'above'} 0")
    problems = [
        (world > 1, f"--nproc_per_node {world}: this recipe trains in 1 process"),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.save and not os.access(f"{Path(cfg.save).resolve().parent}/", os.W_OK), f"--save {cfg.save}: no folder"),
        (os.path.exists(cfg.save) and not os.path.isfile(cfg.save), f"--save {cfg.save}: is no file"),
        (cfg.compile and cfg.device == "cpu", "--compile: needs a GPU; Triton's interpreter cannot be compiled"),
        (cfg.device == "cpu" and not triton.knobs.runtime.interpret, "--device cpu: needs TRITON_INTERPRET=1"),
    ]
    for wrong, problem in problems:
        if wrong:
            raise SystemExit(problem)
    if cfg.init:
        check_init(cfg)


def main() -> None:
    cfg = parse_config()
    check(cfg, int(os.environ.get("WORLD_SIZE", 1)))
    train(cfg, *load_data(cfg))


if __name__ == "__main__":
    main()


# To paste this into your own trainer
# Take the imports of this file along.
#
# Plumbing: Config, build_model, slots_by_name, set_learning_rate, save, train, check
# Copy:     project, rms_norm, add_rms_norm, swiglu, rotate, linear_cross_entropy_sum, AdamW (and what they call: the
#           files of the kernels name it)
