"""bf16 weights and moments without masters: rounded up or down by chance, so that small updates arrive on average.

Rounded to nearest, an update of less than half the distance to the next bf16 number is lost. Rounded stochastically,
the weight moves by the whole distance, with a probability of update / distance. So each rounding is right on average,
without a master. The same holds for the moments, and for embedding and norms, which are bf16 here. Chance is a hash of
seed, step, the tensor's name and the element's index in the full tensor: every run and every layout rounds alike.
Bytes per parameter: 2 weight + 2 gradient + 4 AdamW moments = 8, and 4 more with several micro-batches.

Parent:   10_mixed_precision/bf16.py, 01_single_gpu/train.py
Lesson:   Model.__init__, build_model, Slot, random_bits, round_stochastically, update, AdamW, make_optimizer,
          accumulate_gradients, forward_backward
Run:      python 10_mixed_precision/stochastic_rounding.py --dtype bfloat16
Source:   Gupta et al. 2015, arXiv:1502.02551; Zamirai et al. 2020, arXiv:2010.06192
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import numpy as np
import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------------------ config
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
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of the matmuls and their weights
    compile: bool = False


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
        self.gate_proj = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.up_proj = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.down_proj = nn.Linear(cfg.ffn, cfg.dim, bias=False)

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


def train_step(cfg: Config, model: Model, optimizer: AdamW, inputs: Tensor, targets: Tensor):
    """Run one optimizer step on the global batch [b, s]; return loss and gradient norm, without waiting for the GPU."""
    loss = forward_backward(cfg, model, inputs, targets)
    norm = gradient_norm(optimizer)
    with torch.no_grad():
        optimizer.step(norm)
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
    problems = [
        (world > 1, f"--nproc_per_node {world}: this recipe trains in 1 process"),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.batch % cfg.microbatches, f"--microbatches {cfg.microbatches}: must divide --batch {cfg.batch}"),
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
# Copy:     random_bits, round_stochastically, Slot, update, AdamW, gradient_norm, accumulate_gradients
# Use:      1. Beside another optimizer, random_bits and round_stochastically are enough.
#           2. make_optimizer makes the slots. A checkpoint holds mean and square of each slot, and optimizer.steps,
#              which keys the random bits.
#           3. With several micro-batches call accumulate_gradients after each backward, as forward_backward does.
#           4. Step and forget gradients as train_step does: by the optimizer's zero_grad, not the model's.
# Needs:    cfg.clip, cfg.compile, cfg.device, cfg.eps, cfg.lr, cfg.seed, model.sums
