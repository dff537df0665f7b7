"""fp8 with a scale per 128 elements: an outlier takes resolution from its neighbours alone.

Activations and gradients have a scale for each 128 elements of a row, weights one for each square of 128 x 128.
1. A product sums along k, and its scales change every 128 of k: each partial sum is scaled, then added in fp32.
2. dw sums along the other axis of x and dy: both are quantized a second time for it. A square serves both ways.
3. All of it is e4m3: with a scale for so few elements, gradients need no more range.
4. A program finds the amax of the groups in its tile: quantization is one pass instead of two.

Parent:   10_mixed_precision/fp8_tensorwise.py, 09_kernels/fp8_matmul.py
Lesson:   GRADIENT, quantize_reference, quantize_tiles, shapes_of_tiles, quantize, dequantize, multiply,
          Multiply, quantize_weights
Run:      python 10_mixed_precision/fp8_blockwise.py --dtype bfloat16 --dim 512 --kv_heads 8 --ffn 512 --layers 1
Source:   DeepSeek-AI 2024, arXiv:2412.19437, section 3.3
"""

from __future__ import annotations

import json
import math
import os
import time
import weakref
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import numpy as np
import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton is imported
if find_spec("triton") is None:
    raise SystemExit("the kernels of this file need Triton, which requirements.txt installs on Linux")
import triton
import triton.language as tl

# ------------------------------------------------------------------------------------------------------------ config
E4M3 = torch.float8_e4m3fn
GRADIENT = E4M3
BLOCK = 128  # the side of a block that shares a scale
LEAST = 2.0**-100  # amax counts as at least that: its inverse stays finite
IGNORE = -100  # target of a token that must not be predicted: the first one of a document
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
    batch: int = 16  # sequences per step, over all ranks
    microbatches: int = 2  # parts of the batch that go through the model one after another
    steps: int = 40
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
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16: and fp8 in the linears of the blocks
    compile: bool = False


# ----------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def magnitude(x):
    """Bits of |x|, as an integer: integers are in the order of the floats, then comes inf, then NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, LIMIT: tl.constexpr, LEAST: tl.constexpr):
    """Return amax / LIMIT and its inverse, each rounded once; amax is given by its bits."""
    amax = tl.maximum(bits.to(tl.float32, bitcast=True), LEAST, propagate_nan=tl.PropagateNan.ALL)
    limit = tl.full(amax.shape, LIMIT, tl.float32)
    return tl.div_rn(amax, limit), tl.div_rn(limit, amax)


@triton.jit
def to_fp8(x, inverse, dtype: tl.constexpr):
    """Scale x and round it to nearest, ties to even. The conversion saturates: finite values stay finite, NaN NaN."""
    return (x.to(tl.float32) * inverse).to(dtype)


@triton.jit
def read_tile(x_ptr, tile, m, k, x_stride, BLOCK: tl.constexpr):
    """Return a tile of x [m, k], 0 outside, and its rows and columns."""
    across = tl.cdiv(k, BLOCK)
    row = (tile // across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = (tile % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < m)[:, None] & (column < k)[None, :]
    return tl.load(x_ptr + row[:, None] * x_stride + column[None, :], inside, 0), row, column


@triton.jit
def write_tile(x, x_ptr, row, column, m, k, x_stride):
    """Write a tile of x [m, k]."""
    inside = (row < m)[:, None] & (column < k)[None, :]
    tl.store(x_ptr + row[:, None] * x_stride + column[None, :], x, inside)


@triton.jit
def blocks_kernel(
    x_ptr, y_ptr, scale_ptr, t_ptr, t_scale_ptr, m, k, x_stride, y_stride, t_stride,
    SQUARE: tl.constexpr, LIMIT: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of x [m, k] in fp8, the same transposed, and their scales: of the tile, or of each row of each.

    scale [m / BLOCK, k / BLOCK], or by columns [m, k / BLOCK] and [k, m / BLOCK]: neighbours are loaded together.
    """
    tile, across = tl.program_id(0), tl.cdiv(k, BLOCK)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x, row, column = read_tile(x_ptr, tile, m, k, x_stride, BLOCK)
    bits = magnitude(x)
    if SQUARE:
        scale, inverse = scale_of(tl.max(tl.max(bits, 1), 0), LIMIT, LEAST)
        y = to_fp8(x, inverse, dtype)
        t = y
        tl.store(scale_ptr + tile, scale)
    else:
        scale, inverse = scale_of(tl.max(bits, 1), LIMIT, LEAST)
        t_scale, t_inverse = scale_of(tl.max(bits, 0), LIMIT, LEAST)
        y = to_fp8(x, inverse[:, None], dtype)
        t = to_fp8(x, t_inverse[None, :], dtype)
        tl.store(scale_ptr + (tile % across).to(tl.int64) * m + row, scale, row < m)
        tl.store(t_scale_ptr + (tile // across).to(tl.int64) * k + column, t_scale, column < k)
    write_tile(y, y_ptr, row, column, m, k, y_stride)
    write_tile(tl.trans(t), t_ptr, column, row, k, m, t_stride)


def quantize_reference(x: Tensor, height: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [m, k] -> x8, a scale [m / height, k / 128] per height x 128 elements: what the kernel does, in PyTorch"""
    m, k = x.shape
    padded = nn.functional.pad(x.float(), (0, -k % BLOCK, 0, -m % height))
    groups = rearrange(padded, "(m a) (k b) -> m k a b", a=height, b=BLOCK)
    amax = groups.abs().amax((2, 3), keepdim=True).clamp(min=LEAST)
    largest = torch.finfo(dtype).max
    limit = torch.full_like(amax, largest)
    y = (groups * (limit / amax)).clamp(-largest, largest).to(dtype)
    y = rearrange(y, "m k a b -> (m a) (k b)")[:m, :k]
    scale = amax / limit
    return y.contiguous(), scale[:, :, 0, 0]


@torch.library.custom_op("fp8_blockwise::quantize_tiles", mutates_args=())
def quantize_tiles(x: Tensor, dtype: torch.dtype, height: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [m, k] -> x8, scales [k/128, m]; x8 of x transposed, [m/128, k]; height 128: [m/128, k/128], and transposed"""
    m, k = x.shape
    rows, columns = triton.cdiv(m, BLOCK), triton.cdiv(k, BLOCK)  # of blocks
    x = x.contiguous()
    square = height == BLOCK
    if not x.is_cuda:
        y, scale = quantize_reference(x, height, dtype)
        t, t_scale = quantize_reference(x.T, height, dtype)
        if not square:
            scale, t_scale = scale.T.contiguous(), t_scale.T.contiguous()
        return y, scale, t, t_scale
    y = torch.empty(m, k, dtype=dtype, device=x.device)
    t = torch.empty(k, m, dtype=dtype, device=x.device)
    shape, t_shape = (columns, m), (rows, k)
    if square:
        shape = t_shape = (rows, columns)
    scale = torch.empty(shape, device=x.device, dtype=torch.float32)
    t_scale = torch.empty(t_shape, device=x.device, dtype=torch.float32)
    blocks_kernel[(rows * columns,)](
        x, y, scale, t, t_scale, m, k, k, k, m,
        SQUARE=square, LIMIT=torch.finfo(dtype).max, LEAST=LEAST, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    if square:
        t_scale = scale.T.clone(memory_format=torch.contiguous_format)
    return y, scale, t, t_scale


@quantize_tiles.register_fake
def shapes_of_tiles(x: Tensor, dtype: torch.dtype, height: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x.shape
    rows, columns = -(-m // BLOCK), -(-k // BLOCK)  # of blocks
    shape, t_shape = (columns, m), (rows, k)
    if height == BLOCK:
        shape, t_shape = (rows, columns), (columns, rows)
    scale = x.new_empty(shape, dtype=torch.float32)
    t_scale = x.new_empty(t_shape, dtype=torch.float32)
    return x.new_empty(m, k, dtype=dtype), scale, x.new_empty(k, m, dtype=dtype), t_scale


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [m, k] -> x8 [m, k], scales [m, k/128]; x8 of x transposed [k, m], its scales [k, m/128]

    Scales lie side by side along m, or k, as the matmul loads them. inf or NaN in a group makes it NaN.
    """
    y, scale, t, t_scale = quantize_tiles(x, dtype, 1)
    return y, scale.T, t, t_scale.T


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """x [m, k] in fp8, scale [m, k/128] or [m/128, k/128] -> x · scale in fp32"""
    scale = scale if len(scale) == len(x) else scale.repeat_interleave(BLOCK, 0)[: len(x)]
    return x.float() * scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool = False) -> Tensor:
    """a [m, k], b [n, k] in fp8; scales [m, k/128], and [n, k/128] or [n/128, k/128] -> their product [m, n] in bf16

    fast has no meaning here: there is no product of more than 128 of k without fp32.
    """
    if a.is_cuda:
        return torch._scaled_mm(a, b.T, a_scale, b_scale.T, out_dtype=torch.bfloat16)
    return (dequantize(a, a_scale) @ dequantize(b, b_scale).T).bfloat16()


class Multiply(torch.autograd.Function):
    """x [t, d], weight [f, d] and what quantize makes of the weight -> x weightᵀ [t, f]; all products in fp8"""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, w: Tensor, w_scale: Tensor, w_t: Tensor, w_t_scale: Tensor) -> Tensor:
        x8, x_scale, x_t, x_t_scale = quantize(x, E4M3)  # the scales of x_t are others
        ctx.save_for_backward(x_t, x_t_scale, w_t, w_t_scale)
        return multiply(x8, x_scale, w, w_scale, fast=True)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_t, x_t_scale, w_t, w_t_scale = ctx.saved_tensors
        dy8, dy_scale, dy_t, dy_t_scale = quantize(dy, GRADIENT)
        dx = multiply(dy8, dy_scale, w_t, w_t_scale)  # t d, dy w
        dw = multiply(dy_t, dy_t_scale, x_t, x_t_scale)  # f d, dyᵀ x
        return dx, dw, None, None, None, None


# ------------------------------------------------------------------------------------------------------------- model
# Axes: b sequences, s tokens, d model width, h heads, k head width, f ffn width, v vocabulary.


class RMSNorm(nn.Module):
    """Root mean square normalisation of the last axis (arXiv:1910.07467)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cfg.dim))

    def forward(self, x: Tensor) -> Tensor:
        fp32 = x.to(torch.promote_types(x.dtype, torch.float32))  # bf16 has too few mantissa bits for a mean of squares
        weighted = self.weight * fp32
        mean_square = fp32.square().mean(-1, keepdim=True)
        return (weighted * torch.rsqrt(mean_square + 1e-5)).to(x.dtype)


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


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + k/2) of the last axis of x [b, h, s, k] by the angle of its position."""
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Linear(nn.Module):
    """A linear layer whose weight [f, d] is in fp8, too, if it is in bf16: quantize_weights has written it."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Linear(inputs, outputs, bias=False).weight  # initialised, for a trainer that does not
        self.quantized: tuple[Tensor, ...] = ()  # by quantize; no buffers, whose dtype Model.to would change
        self.version = 0, -1  # which weight is in fp8, and its version
        self.diagonal: Tensor | None = None  # of that weight, as bits, if backward checks it

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> [..., f]"""
        compiling = torch.compiler.is_compiling()
        empty = not compiling and not x.numel()  # a compiler may not know the number of rows
        if self.weight.dtype != torch.bfloat16 or empty:
            y = nn.functional.linear(x, self.weight)
            if y.dtype == self.weight.dtype:  # else by autocast
                return y
        # in a compiled graph there are no versions
        if not compiling and self.version != (id(self.weight), self.weight._version):
            raise RuntimeError("Linear needs bfloat16 weights and quantize_weights(model) after each optimizer step")
        rows = Multiply.apply(x.reshape(-1, x.shape[-1]), self.weight, *self.quantized)
        return rows.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal attention; heads / kv_heads query heads share one key head and one value head (arXiv:2305.13245)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.k = cfg.dim // cfg.heads
        self.q_proj = Linear(cfg.dim, cfg.heads * self.k)
        self.k_proj = Linear(cfg.dim, cfg.kv_heads * self.k)
        self.v_proj = Linear(cfg.dim, cfg.kv_heads * self.k)
        self.o_proj = Linear(cfg.heads * self.k, cfg.dim)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q = rearrange(self.q_proj(x), "b s (h k) -> b h s k", k=self.k)
        k = rearrange(self.k_proj(x), "b s (h k) -> b h s k", k=self.k)
        v = rearrange(self.v_proj(x), "b s (h k) -> b h s k", k=self.k)
        q = rotate(q, rope)
        k = rotate(k, rope)
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = rearrange(o, "b h s k -> b s (h k)")
        return self.o_proj(o)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.gate_proj = Linear(cfg.dim, cfg.ffn)
        self.up_proj = Linear(cfg.dim, cfg.ffn)
        self.down_proj = Linear(cfg.ffn, cfg.dim)

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Block(nn.Module):
    """Attention, then MLP; each reads a normalised residual stream and adds to it."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Loss(nn.Module):
    """Cross-entropy of logits [t, v], summed over the valid targets [t]."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # for sums of exponentials
        return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


class Model(nn.Module):
    """Llama 3 with an untied head. Parameters have the names and shapes of transformers.LlamaForCausalLM."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.masters: dict[str, Tensor] = {}  # what AdamW updates: in fp32, or the parameter if that has 32 bits
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.model.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.model.norm = RMSNorm(cfg)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.loss = Loss()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> logits [b, s, v]"""
        rope = rope_table(self.cfg, torch.arange(ids.shape[1], device=ids.device))
        x = self.model.embed_tokens(ids).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
        for block in self.model.layers:
            x = block(x, rope)
        return self.lm_head(self.model.norm(x))


# ---------------------------------------------------------------------------------------------------------- training
@dataclass
class Slot:
    """A parameter; its master, which is the parameter itself if that has 32 bits or more; AdamW's moments of it."""

    parameter: Tensor
    master: Tensor
    mean: Tensor
    square: Tensor
    version: int = -1  # p._version when the master was last rounded into it; writes through p.data go unnoticed


def update(
    weight: Tensor | None, master: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, numbers: Tensor
) -> None:
    """Run AdamW for one master [n], then round it into its weight. Compiled, it is one pass over memory.

    numbers [5]: what clips the gradient, learning rate, root of the correction of `square`, weight decay, eps
    """
    factor, rate, correction, decay, eps = numbers
    gradient = gradient.to(master.dtype) * factor
    mean.lerp_(gradient, 0.1)  # betas 0.9, 0.95
    square.lerp_(gradient.square(), 0.05)
    master.mul_(decay).sub_(rate * mean / (square.sqrt() / correction + eps))
    if weight is not None:
        weight.copy_(master)


class AdamW:
    """AdamW of the masters, which clips their gradients, too. Its decisions are made on the GPU.

    Set "lr" in its param_groups before a step. torch's schedulers take only torch's optimizers: give them one that
    has any tensor, and copy their get_last_lr() into "lr". One count of steps serves all parameters: one that is
    trained later starts without bias correction.
    """

    def __init__(self, cfg: Config, groups: list[dict]):
        self.clip, self.eps = cfg.clip, cfg.eps
        self.param_groups = [dict(group, lr=cfg.lr) for group in groups]
        self.slots = [slot for group in groups for slot in group["slots"]]
        self.steps = torch.zeros((), dtype=torch.float64, device=cfg.device)
        self.update = torch.compile(update, dynamic=True) if cfg.compile else update  # one compilation for all sizes

    def gradients(self) -> list[Tensor]:
        """Those of one micro-batch, or the sums of several, in the order of the slots; None where there is none."""
        for s in self.slots:
            p, master = s.parameter, s.master
            if p is master:
                continue
            if p.grad is not None and master.grad is not None:
                raise RuntimeError("weight and master have a .grad: call accumulate_gradients after each backward")
            if s.version != p._version and not torch.allclose(p, master.to(p.dtype), 0, 0, equal_nan=True):
                raise RuntimeError("a weight is not its rounded master: load weights into model.masters, too")
        return [s.master.grad if s.parameter.grad is None else s.parameter.grad for s in self.slots]

    def step(self, norm: Tensor) -> None:
        """Clip to a norm of --clip, given the norm [] of all gradients; update masters and weights."""
        self.steps += 1
        factor = (self.clip / (norm + 1e-6)).clamp(max=1)
        correction = (1 - 0.95**self.steps).sqrt()
        gradients = iter(self.gradients())
        for group in self.param_groups:
            rate = group["lr"] / (1 - 0.9**self.steps)
            decay = 1 - group["lr"] * group["weight_decay"]
            constants = (torch.full_like(rate, x) for x in (decay, self.eps))
            numbers = torch.stack([factor, rate, correction, *constants])
            for slot, gradient in zip(group["slots"], gradients):
                if gradient is not None:
                    weight = None if slot.parameter is slot.master else slot.parameter.view(-1)
                    state = (x.view(-1) for x in (slot.master, slot.mean, slot.square))
                    self.update(weight, *state, gradient.flatten(), numbers)
                slot.version = slot.parameter._version

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for slot in self.slots:
            slot.parameter.grad = slot.master.grad = None


def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> sum of the losses of the valid targets"""
    return model.loss(model(inputs).flatten(0, 1), targets.flatten())


def accumulate_gradients(model: nn.Module) -> None:
    """Add the gradients of a micro-batch to those of the masters, in fp32: in bf16 later ones would be rounded away.

    Those of embedding and norms are fp32, and have been added up by backward.
    """
    for name, p in model.named_parameters():
        master = model.masters[name]
        if master is not p and p.grad is not None:
            master.grad = p.grad.to(master.dtype) if master.grad is None else master.grad.add_(p.grad)
            p.grad = None


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch

    Its gradient is in the .grad of the weights; after several micro-batches, in that of the masters.
    """
    tokens = (targets != IGNORE).sum()
    inputs, targets = inputs.to(cfg.device), targets.to(cfg.device)
    total = 0
    for x, y in zip(inputs.chunk(cfg.microbatches), targets.chunk(cfg.microbatches)):  # b/microbatches s
        loss = forward(cfg, model, x, y) / tokens
        loss.backward()
        if cfg.microbatches > 1:
            accumulate_gradients(model)
        total += loss.detach()
        del loss  # frees its graph: in torch 2.11 that keeps what compiled autograd.Functions have saved
    return total


def gradient_norm(optimizer: AdamW) -> Tensor:
    """Return the global norm of the gradients [], which are added up in fp32 although they may have 16 bits."""
    by_dtype = defaultdict(list)  # one kernel reads many tensors, but of one dtype
    for gradient in optimizer.gradients():
        if gradient is not None:
            by_dtype[gradient.dtype].append(gradient)
    norms = []
    for dtype, gradients in by_dtype.items():
        norms += torch._foreach_norm(gradients, 2, dtype=torch.promote_types(dtype, torch.float32))
    return torch.stack(norms).norm()


def check_weight(owner: weakref.ref[Linear], equal: Tensor, gradient: Tensor) -> None:
    """Raise if a weight is not what quantize_weights has read: a hook, which backward calls with the gradient of it.

    The version of a weight is not enough: fused optimizers, collectives, writes through .data and compiled code leave
    it as it was. On a GPU the answer is read in the next backward, so that nobody waits for it.
    """
    linear = owner()
    if linear is not None and linear.weight.dtype == torch.bfloat16:
        diagonal = linear.weight.detach().diagonal().view(torch.int16)  # bits: NaN equals NaN
        equal.copy_((diagonal == linear.diagonal).all(), non_blocking=True)
        if not equal:
            raise RuntimeError(
                "a weight has changed: call quantize_weights(model) after each optimizer step, and ZeRO's gathers"
            )


def register_check(linears: list[Linear]) -> None:
    """Let each backward check the last weight that is trained, which stands for all."""
    trainable = [linear for linear in linears if linear.weight.requires_grad]
    checked = [linear for linear in trainable if linear.diagonal is not None]  # by an earlier call
    for linear in checked or trainable[-1:]:
        if linear.diagonal is None or linear.version[0] != id(linear.weight):  # else the weight has its hook
            equal = torch.ones((), dtype=torch.bool, pin_memory=torch.cuda.is_available())
            # a weak reference: torch never frees a cycle through a hook
            linear.weight.register_hook(partial(check_weight, weakref.ref(linear), equal))
        linear.diagonal = linear.weight.detach().diagonal().view(torch.int16).clone()


@torch.no_grad()
def quantize_weights(model: nn.Module) -> None:
    """Write the weights of the linears in fp8, as they are and transposed: for all micro-batches of the next step."""
    linears = [m for m in model.modules() if isinstance(m, Linear) and m.weight.dtype == torch.bfloat16]
    register_check(linears)
    for linear in linears:
        linear.quantized = quantize_tiles(linear.weight, E4M3, BLOCK)  # in squares
        linear.version = id(linear.weight), linear.weight._version


def train_step(cfg: Config, model: Model, optimizer: AdamW, inputs: Tensor, targets: Tensor):
    """Run one optimizer step on the global batch [b, s]; return loss and gradient norm, without waiting for the GPU."""
    loss = forward_backward(cfg, model, inputs, targets)
    norm = gradient_norm(optimizer)
    with torch.no_grad():
        optimizer.step(norm)
    quantize_weights(model)
    optimizer.zero_grad()
    return loss, norm


@torch.no_grad()
def evaluate(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, without gradients"""
    tokens = (targets != IGNORE).sum()
    micro = (x.to(cfg.device).chunk(cfg.microbatches) for x in (inputs, targets))  # b/microbatches s
    return sum(forward(cfg, model, x, y) for x, y in zip(*micro)) / tokens


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

    Weights of matmuls have the dtype of the matmuls; their masters start from the numbers before they were rounded.
    Embedding and norms are their own masters.
    """
    with torch.device("meta"):
        model = Model(cfg)
    dtype = getattr(torch, cfg.dtype)
    master_dtype = torch.promote_types(dtype, torch.float32)
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, (nn.Embedding, RMSNorm)):  # no matmul reads them: autocast, too, leaves them in fp32
            module.to(master_dtype)
    model.to_empty(device=cfg.device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            full = full_tensor(cfg, name, p.shape)
            p.copy_(full)
            model.masters[name] = p if p.dtype == master_dtype else full.to(p.device, master_dtype)
    quantize_weights(model)
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
    """Return AdamW of the masters, with weight decay on matrices only."""
    slots = []
    for name, p in model.named_parameters():
        master = model.masters[name]
        slots.append(Slot(p, master, torch.zeros_like(master), torch.zeros_like(master)))
    matrices = [slot for slot in slots if slot.master.ndim > 1]
    vectors = [slot for slot in slots if slot.master.ndim < 2]
    return AdamW(cfg, [dict(slots=matrices, weight_decay=cfg.weight_decay), dict(slots=vectors, weight_decay=0.0)])


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


def save(cfg: Config, model: Model, history: list[tuple[float, float, float]]) -> None:
    """Write the weights for transformers; the metadata holds config and [loss, gradient norm, seconds] per step."""
    write_weights(cfg, {name: master.detach() for name, master in model.masters.items()}, history)


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
        save(cfg, model, history)


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
    kv = cfg.dim // cfg.heads * cfg.kv_heads
    sizes = dict(dim=cfg.dim, ffn=cfg.ffn, kv_heads=kv, seq=cfg.batch // cfg.microbatches * cfg.seq)
    fp8 = cfg.device == "cuda" and cfg.dtype == "bfloat16"  # a CPU multiplies any sizes
    # torch wants scales of squares in rows of a multiple of four; one rule for all sizes
    wrong_flag = next((name for name, size in sizes.items() if fp8 and size % (4 * BLOCK)), "")
    problems = [
        (world > 1, f"--nproc_per_node {world}: this recipe trains in 1 process"),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.batch % cfg.microbatches, f"--microbatches {cfg.microbatches}: must divide --batch {cfg.batch}"),
        (
            wrong_flag,
            f"--{wrong_flag} {getattr(cfg, wrong_flag, 0)}: blocks need multiples of {4 * BLOCK}, "
            f"not {sizes.get(wrong_flag)}",
        ),
        (cfg.save and not os.access(f"{Path(cfg.save).resolve().parent}/", os.W_OK), f"--save {cfg.save}: no folder"),
        (os.path.exists(cfg.save) and not os.path.isfile(cfg.save), f"--save {cfg.save}: is no file"),
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
# Plumbing: check
# Copy:     E4M3, GRADIENT, BLOCK, LEAST, magnitude, scale_of, to_fp8, read_tile, write_tile, blocks_kernel,
#           quantize_reference, quantize_tiles, shapes_of_tiles, quantize, dequantize, multiply, Multiply, Linear,
#           check_weight, register_check, quantize_weights (call it before the first forward and after each optimizer
#           step; otherwise as fp8_tensorwise.py says)
