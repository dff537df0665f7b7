"""fp8 matmuls and stochastic rounding: an 8B model trains on one GPU, with nothing in more than 16 bits between steps.

Nothing is new here: the linears of fp8_tensorwise.py, and the optimizer of stochastic_rounding.py. They meet in
train_step, where weights that have been rounded stochastically to bf16 are rounded to nearest to fp8.
Bytes per parameter of a linear of the blocks: 2 weight + 2 in fp8, as it is and transposed + 2 gradient + 4 AdamW
moments = 10; of all others 8. Several micro-batches need 4 more.

Parent:   10_mixed_precision/stochastic_rounding.py, 10_mixed_precision/fp8_tensorwise.py
Lesson:   build_model
Run:      python 10_mixed_precision/fp8_stochastic_rounding.py --dtype bfloat16
Source:   Micikevicius et al. 2022, arXiv:2209.05433; Gupta et al. 2015, arXiv:1502.02551
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
GRADIENT = torch.float8_e5m2  # of gradients: they need range more than resolution
LEAST = 2.0**-100  # amax counts as at least that: zeros stay zeros
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
def cast_kernel(x_ptr, scale_ptr, y_ptr, t_ptr, m, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write a tile of x [m, k] / scale in fp8, and the same transposed. The conversion saturates; NaN stays NaN."""
    tile, across = tl.program_id(0), tl.cdiv(k, COLUMNS)
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # 64 bits: x may have more than 2^31 elements
    column = (tile % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < m)[:, None] & (column < k)[None, :]
    x = tl.load(x_ptr + row[:, None] * k + column[None, :], inside, 0).to(tl.float32)
    y = (x * tl.div_rn(1.0, tl.load(scale_ptr))).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * k + column[None, :], y, inside)
    tl.store(t_ptr + column[:, None] * m + row[None, :], tl.trans(y), tl.trans(inside))


@torch.library.custom_op("fp8_tensorwise::cast", mutates_args=())
def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [m, k], scale [] -> x / scale in fp8 [m, k], and transposed [k, m]: one pass, of 2 bytes in and 2 out"""
    m, k = x.shape
    x = x.contiguous()
    if not x.is_cuda:
        limit = torch.finfo(dtype).max
        y = (x.float() * (1 / scale)).clamp(-limit, limit).to(dtype)  # else e5m2 has inf, e4m3 NaN before torch 2.12
        return y, y.T.clone(memory_format=torch.contiguous_format)
    y = torch.empty(m, k, dtype=dtype, device=x.device)
    t = torch.empty(k, m, dtype=dtype, device=x.device)
    grid = (triton.cdiv(m, 64) * triton.cdiv(k, 128),)
    cast_kernel[grid](x, scale, y, t, m, k, ROWS=64, COLUMNS=128, num_warps=4)
    return y, t


@cast.register_fake
def shapes_of_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tuple(x.new_empty(shape, dtype=dtype) for shape in (x.shape, x.shape[::-1]))


def quantize(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [m, k], its largest magnitude [] -> x8 [m, k], its scale [], x8 transposed [k, m]

    x ~ x8 · scale. inf or NaN in x makes the scale inf or NaN, and all that is computed with it NaN: that is seen.
    """
    scale = amax.float().clamp(min=LEAST) * (1 / torch.finfo(dtype).max)
    x8, x_t = cast(x, scale, dtype)
    return x8, scale, x_t


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude of x [m, k]. By rows first: compiled, it is found while the rows are computed."""
    return x.abs().amax(1).amax()


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool = False) -> Tensor:
    """a [m, k], b [n, k] in fp8 -> (a · a_scale) (b · b_scale)ᵀ [m, n] in bf16

    fast: tensor cores add up all of k themselves, in some 14 bits; else partial sums are moved to fp32 on their way.
    """
    if a.is_cuda:
        return torch._scaled_mm(a, b.T, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return (a.float() @ b.float().T * (a_scale * b_scale)).bfloat16()


class Multiply(torch.autograd.Function):
    """x [t, d], weight [f, d] and what quantize makes of the weight -> x weightᵀ [t, f]; all products in fp8"""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, w8: Tensor, w_scale: Tensor, w_t: Tensor) -> Tensor:
        x8, x_scale, x_t = quantize(x, amax_of(x), E4M3)
        ctx.save_for_backward(x_t, x_scale, w_t, w_scale)
        return multiply(x8, x_scale, w8, w_scale, fast=True)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_t, x_scale, w_t, w_scale = ctx.saved_tensors
        dy8, dy_scale, dy_t = quantize(dy, amax_of(dy), GRADIENT)
        dx = multiply(dy8, dy_scale, w_t, w_scale)  # t d, dy w
        dw = multiply(dy_t, dy_scale, x_t, x_scale)  # f d, dyᵀ x
        return dx, dw, None, None, None


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
        self.sums: dict[str, Tensor] = {}  # of gradients, in fp32
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
    """A parameter, and AdamW's moments of it, in its dtype."""

    name: str
    parameter: Tensor
    mean: Tensor
    square: Tensor


def random_bits(index: Tensor, key: Tensor) -> Tensor:
    """Hash an index and a key (int32) to 32 random bits (int32): products wrap around, shifts bring in zeros."""
    x = index * -1640531535 ^ key  # indices are neighbours: spread them first
    for shift, factor in (16, 0x7FEB352D), (15, -2073254261):
        x = (x ^ (x >> shift & (1 << 32 - shift) - 1)) * factor
    return x ^ (x >> 16 & 0xFFFF)


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round x (fp32) to bf16, up with the probability of how far x is on its way.

    bits: integers whose lowest 16 bits are random. bf16 is the upper half of fp32. What is added to the lower half
    carries as often as it is large. inf and NaN stay.
    """
    rounded = (x.view(torch.int32) + (bits.int() & 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def update(weight: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, numbers: Tensor, keys: Tensor) -> None:
    """Run AdamW for one parameter [n, w] in fp32, then round what is kept. Compiled, it is one pass over memory.

    numbers [5]: what clips the gradient, learning rate, root of the correction of `square`, weight decay, eps
    keys [2], int32: what rounding depends on
    """
    factor, rate, correction, decay, eps = numbers
    dtype = torch.promote_types(weight.dtype, torch.float32)
    new_weight = weight.to(dtype)
    new_mean = mean.to(dtype)
    new_square = square.to(dtype)
    gradient = gradient.to(dtype) * factor
    new_mean = new_mean.lerp(gradient, 0.1)  # betas 0.9, 0.95
    new_square = new_square.lerp(gradient.square(), 0.05)
    new_weight = new_weight * decay - rate * new_mean / (new_square.sqrt() / correction + eps)
    new = new_weight, new_mean, new_square
    if weight.dtype == torch.bfloat16:
        index = torch.arange(weight.numel(), dtype=torch.int32, device=weight.device).view_as(weight)
        bits, more_bits = (random_bits(index, key) for key in keys)
        new = [round_stochastically(x, b) for x, b in zip(new, (bits, bits >> 16, more_bits))]
    for old, x in zip((weight, mean, square), new):
        old.copy_(x)


class AdamW:
    """AdamW that clips gradients, and rounds weights and moments stochastically. Its decisions are made on the GPU.

    Set "lr" in its param_groups before a step. torch's schedulers take only torch's optimizers: give them one that
    has any tensor, and copy their get_last_lr() into "lr". One count of steps serves all parameters: one that is
    trained later starts without bias correction.
    """

    def __init__(self, cfg: Config, groups: list[dict], sums: dict[str, Tensor]):
        self.clip, self.eps, self.sums = cfg.clip, cfg.eps, sums
        self.param_groups = [dict(group, lr=cfg.lr) for group in groups]
        self.slots = [slot for group in groups for slot in group["slots"]]
        self.steps = torch.zeros((), dtype=torch.float64, device=cfg.device)
        keys = [[zlib.crc32(f"{cfg.seed} {slot.name} {i}".encode()) for i in range(2)] for slot in self.slots]
        self.keys = torch.tensor(keys, device=cfg.device).to(torch.int32)  # no two tensors are rounded alike
        self.update = torch.compile(update) if cfg.compile else update

    def gradients(self) -> list[Tensor]:
        """Return the sum of each parameter, or its .grad where there is no sum, in the order of the slots."""
        for slot in self.slots:
            if slot.name in self.sums and slot.parameter.grad is not None:
                raise RuntimeError(
                    f"{slot.name} has a .grad beside its sum: call accumulate_gradients after each backward"
                )
        return [self.sums.get(slot.name, slot.parameter.grad) for slot in self.slots]

    def step(self, norm: Tensor) -> None:
        """Clip to a norm of --clip, given the norm [] of all gradients; update weights and moments."""
        self.steps += 1
        factor = (self.clip / (norm + 1e-6)).clamp(max=1)
        correction = (1 - 0.95**self.steps).sqrt()
        gradients = iter(self.gradients())
        keys = iter(random_bits(self.keys, self.steps.to(torch.int32)))
        for group in self.param_groups:
            rate = group["lr"] / (1 - 0.9**self.steps)
            decay = 1 - group["lr"] * group["weight_decay"]
            constants = (torch.full_like(rate, x) for x in (decay, self.eps))
            numbers = torch.stack([factor, rate, correction, *constants])
            for slot, gradient, key in zip(group["slots"], gradients, keys):
                if gradient is not None:
                    width = math.gcd(gradient.numel(), 1024)  # of rows: static, so that compiled loads have 16 bytes
                    state = (x.view(-1, width) for x in (slot.parameter, slot.mean, slot.square))
                    self.update(*state, gradient.reshape(-1, width), numbers, key)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.sums.clear()
        for slot in self.slots:
            slot.parameter.grad = None


def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> sum of the losses of the valid targets"""
    return model.loss(model(inputs).flatten(0, 1), targets.flatten())


def accumulate_gradients(model: nn.Module) -> None:
    """Move each .grad into a sum in fp32: in bf16, later ones would be rounded away."""
    for name, p in model.named_parameters():
        if p.grad is not None:
            if name in model.sums:
                model.sums[name].add_(p.grad)
            else:
                model.sums[name] = p.grad.to(torch.promote_types(p.dtype, torch.float32))
            p.grad = None


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch

    Its gradient is in the .grad of the weights; after several micro-batches, in the sums.
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
    if linears:
        amaxes = torch._foreach_norm([linear.weight for linear in linears], math.inf)
        for linear, amax in zip(linears, amaxes):
            linear.quantized = quantize(linear.weight, amax, E4M3)
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

    Weights have the dtype of the matmuls, from the first step on.
    """
    with torch.device("meta"):
        model = Model(cfg)
    model.to(getattr(torch, cfg.dtype)).to_empty(device=cfg.device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(full_tensor(cfg, name, p.shape))
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
    """Return AdamW, with weight decay on matrices only."""
    slots = [Slot(name, p, torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()]
    matrices = [slot for slot in slots if slot.parameter.ndim > 1]
    vectors = [slot for slot in slots if slot.parameter.ndim < 2]
    groups = [dict(slots=matrices, weight_decay=cfg.weight_decay), dict(slots=vectors, weight_decay=0.0)]
    return AdamW(cfg, groups, model.sums)


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
    write_weights(cfg, model.state_dict(), history)


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
    wrong_flag = next((name for name, size in sizes.items() if fp8 and size % 16), "")
    problems = [
        (world > 1, f"--nproc_per_node {world}: this recipe trains in 1 process"),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.batch % cfg.microbatches, f"--microbatches {cfg.microbatches}: must divide --batch {cfg.batch}"),
        (
            wrong_flag,
            f"--{wrong_flag} {getattr(cfg, wrong_flag, 0)}: fp8 matmuls take multiples of 16, "
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
# Copy:     E4M3, GRADIENT, LEAST, cast_kernel, cast, shapes_of_cast, quantize, amax_of, multiply, Multiply, Linear,
#           random_bits, round_stochastically, Slot, update, AdamW, gradient_norm, accumulate_gradients, check_weight,
#           register_check, quantize_weights (call it before the first forward and after each optimizer step; of Config,
#           and otherwise, what both parents say)
# Needs:    cfg.clip, cfg.compile, cfg.device, cfg.eps, cfg.lr, cfg.seed, model.sums
