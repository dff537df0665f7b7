"""LoRA with ZeRO-3: frozen weights are sharded in 2 bytes and gathered, adapters are whole and all-reduced.

1. Each block is gathered before its forward and again before its backward, as in zero3.py. It has no master weights, no
   moments and no gradients, and nothing of it is reduced.
2. Every rank has all adapters, and the same AdamW. One all-reduce per step sums their gradients.

Memory: 2Ψ/dp bytes for Ψ frozen weights, full weights of two units, 16 bytes per element of the adapters. A rank sends
(dp-1)/dp of 4Ψ bytes per micro-batch (embedding, last block and head once: 2), and of 8 per adapter element per step.

Parent:   03_zero/zero3.py, 01_single_gpu/lora.py
Lesson:   Unit, after_backward, make_unit, check_units, build_model, sum_gradients, forward_backward
Run:      torchrun --nproc_per_node 8 03_zero/lora.py
Source:   Hu et al. 2021, arXiv:2106.09685; Rajbhandari et al. 2019, ZeRO, arXiv:1910.02054
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
import weakref
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, or gloo's threads outlive it and abort the process at exit
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
    steps: int = 40
    validate: int = 0  # steps between two validation losses, on text that is then not trained on; 0: none
    warmup: int = 10  # steps over which the learning rate rises to --lr; a cosine then takes it to a tenth at --steps
    lr: float = 3e-3
    weight_decay: float = 0.1
    eps: float = 1e-8
    clip: float = 1.0  # largest gradient norm; inf turns clipping off
    lora_rank: int = 16
    lora_alpha: float = 32.0  # lora_alpha / lora_rank scales what the adapters add
    seed: int = 0
    data: str = os.path.dirname(os.__file__)  # a file, or a folder's files, read as bytes; or a .bin file of token ids
    init: str = ""  # start from these weights: a .safetensors file, or 'model-*.safetensors' for several
    save: str = ""  # write the weights, with the adapters merged, to this .safetensors file
    adapters: str = ""  # write the adapters to this folder, as PEFT reads them
    device: Literal["cuda", "cpu"] = "cuda"  # cpu where torch finds no GPU
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16 is autocast, frozen weights are bf16
    compile: bool = False
    microbatches: int = 2  # parts of a rank's batch that go through the model one after another


# ----------------------------------------------------------------------------------------------------- communication
@dataclass(eq=False)
class Unit:
    """Frozen weights that are gathered together: n elements, padded with zeros to a multiple of the N ranks."""

    group: dist.ProcessGroup  # the N ranks that hold the unit; each keeps n/N elements
    parameters: list[nn.Parameter]  # views of `full`
    sizes: list[int]  # elements of the parameters, and of the padding after them
    full: Tensor  # [n] the weights, in the dtype of the matmuls
    shard: Tensor  # [n/N] this rank's, in the same dtype
    gather_work: dist.Work | None = None  # the all-gather of `full`; None if that is free
    backward_hooks: weakref.WeakSet = field(default_factory=weakref.WeakSet)  # of a forward that awaits its backward


def gather(unit: Unit, stream: torch.cuda.Stream | None) -> None:
    """Start the all-gather of `full` unless it is up to date; wait on `unit.gather_work` before reading it."""
    if unit.gather_work is None:
        unit.full.untyped_storage().resize_(unit.full.nbytes)  # undoes what free did
        if stream:
            stream.wait_stream(torch.cuda.current_stream())  # after all reads of this memory and writes of the shard
        with torch.cuda.stream(stream):
            part = unit.full.chunk(unit.group.size())[unit.group.rank()]
            part.copy_(unit.shard)  # rounded
            # (N-1)/N of the bytes of `full` out and in per rank; the unit's forward waits
            unit.gather_work = dist.all_gather_into_tensor(unit.full, part, group=unit.group, async_op=True)


def free(unit: Unit) -> None:
    """Free the memory of `full`. The tensor stays, and so do the parameters, to be filled by the next gather."""
    if unit.gather_work:
        unit.gather_work.wait()  # it may still write to that memory
    unit.full.untyped_storage().resize_(0)
    unit.gather_work = None


@torch.compiler.disable  # also where the model around it is compiled
def before_forward(model: nn.Module, i: int, x: Tensor) -> None:
    """Wait for the weights of unit i, which will read x, and prefetch the next unit's.

    Backward computes dx, the gradient of x, last of all in unit i: then a hook calls after_backward.
    """
    for unit in model.units[i : i + 2]:
        gather(unit, model.gather_stream)
    unit = model.units[i]
    unit.gather_work.wait()
    if not x.requires_grad:  # the ids, or under torch.no_grad()
        return
    if unit.backward_hooks:
        raise RuntimeError("a second forward before backward: run backward after each forward, or delete its loss")

    def hook(dx: Tensor) -> None:
        after_backward(model, i)

    x.register_hook(hook)
    unit.backward_hooks.add(hook)  # a weak set: when the graph is deleted without a backward, the hook leaves it


@torch.compiler.disable  # also where the model around it is compiled
def after_forward(model: nn.Module, i: int) -> None:
    """Free the weights of unit i after its forward. Those of the last two units stay: backward needs them first."""
    if i < len(model.units) - 2:
        free(model.units[i])


def after_backward(model: nn.Module, i: int) -> None:
    """Wait for the weights of unit i - 1, free those of unit i, reduce its gradients, prefetch unit i - 2."""
    unit = model.units[i]
    unit.backward_hooks.clear()
    if i > 1:  # unit 0 must be an embedding: its backward needs no weights
        model.units[i - 1].gather_work.wait()
    free(unit)
    if i > 2:
        gather(model.units[i - 2], model.gather_stream)


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


class LoRALinear(nn.Module):
    """A frozen linear without bias, and a trained adapter beside it. x [..., in] -> [..., out]

    The adapter adds alpha / rank · (x·Aᵀ)·Bᵀ. A starts as a linear of torch.nn does, B at 0.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        self.scale = alpha / rank
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        return y + self.scale * self.lora_B(self.lora_A(x))


class Attention(nn.Module):
    """Causal attention; heads / kv_heads query heads share one key head and one value head (arXiv:2305.13245)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.k = cfg.dim // cfg.heads
        self.q_proj = LoRALinear(cfg.dim, cfg.heads * self.k, cfg.lora_rank, cfg.lora_alpha)
        self.k_proj = LoRALinear(cfg.dim, cfg.kv_heads * self.k, cfg.lora_rank, cfg.lora_alpha)
        self.v_proj = LoRALinear(cfg.dim, cfg.kv_heads * self.k, cfg.lora_rank, cfg.lora_alpha)
        self.o_proj = LoRALinear(cfg.heads * self.k, cfg.dim, cfg.lora_rank, cfg.lora_alpha)

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
        self.gate_proj = LoRALinear(cfg.dim, cfg.ffn, cfg.lora_rank, cfg.lora_alpha)
        self.up_proj = LoRALinear(cfg.dim, cfg.ffn, cfg.lora_rank, cfg.lora_alpha)
        self.down_proj = LoRALinear(cfg.ffn, cfg.dim, cfg.lora_rank, cfg.lora_alpha)

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
        torch._dynamo.graph_break()  # the MLP's gradients are ready while attention is still in backward
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Llama 3 with an untied head. Parameters have the names and shapes of transformers.LlamaForCausalLM."""

    def __init__(self, cfg: Config, dp: dist.ProcessGroup):
        super().__init__()
        self.cfg = cfg
        self.dp = dp  # the ranks that split the batch
        self.units: list[Unit] = []  # filled by build_model, in the order of forward
        self.gather_stream = torch.cuda.Stream() if cfg.device == "cuda" else None  # of weights
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.model.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.model.norm = RMSNorm(cfg)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")
        for name, p in self.named_parameters():
            p.requires_grad_("lora_" in name)
            p.data = p.data if p.requires_grad else p.data.to(getattr(torch, cfg.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> logits [b, s, v]"""
        rope = rope_table(self.cfg, torch.arange(ids.shape[1], device=ids.device))
        before_forward(self, 0, ids)
        x = self.model.embed_tokens(ids).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
        after_forward(self, 0)
        for i, block in enumerate(self.model.layers, 1):
            before_forward(self, i, x)
            x = block(x, rope)
            after_forward(self, i)
        before_forward(self, len(self.units) - 1, x)
        return self.lm_head(self.model.norm(x))


@torch.no_grad()
def make_unit(
    named: list[tuple[str, nn.Parameter]],
    initial: Callable[[str, torch.Size], Tensor],
    group: dist.ProcessGroup,
    device: str,
    dtype: torch.dtype,
) -> Unit:
    """Build a unit from named frozen parameters. initial(name, shape) returns the full weight of one."""
    if not named:
        raise ValueError("a unit needs at least one parameter")
    if trained := [name for name, p in named if p.requires_grad]:
        raise ValueError(f"{trained[0]} is trained: gradients of a unit are not reduced")
    parameters = [p for _, p in named]
    sizes = [p.numel() for p in parameters]
    shard_size = -(-sum(sizes) // group.size())  # rounded up
    sizes.append(group.size() * shard_size - sum(sizes))  # the padding
    full = torch.zeros(sum(sizes), dtype=dtype, device=device)
    shard = torch.zeros(shard_size, dtype=dtype, device=device)
    shard_start = group.rank() * shard_size  # this and start, lo and hi count from the start of `full`
    start = 0
    for (name, p), weight in zip(named, full.split(sizes)):
        lo = max(start, shard_start)
        hi = max(lo, min(start + p.numel(), shard_start + shard_size))  # lo ... hi of p are in the shard, maybe none
        shard[lo - shard_start : hi - shard_start] = initial(name, p.shape).flatten()[lo - start : hi - start]
        # p becomes a view of `full`; of .data, as autograd must not notice that gather overwrites the weights
        torch.utils.swap_tensors(p, nn.Parameter(weight.view(p.shape).data, requires_grad=False))
        start += p.numel()
    return Unit(group, parameters, sizes, full, shard)


def check_units(model: nn.Module) -> None:
    """Raise unless each frozen parameter is in one unit."""
    members = [p for unit in model.units for p in unit.parameters]
    for name, p in model.named_parameters():
        if not p.requires_grad and sum(p is other for other in members) != 1:
            raise ValueError(f"{name} must be in exactly one unit")


# ---------------------------------------------------------------------------------------------------------- training
def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> sum of the losses of the valid targets"""
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        logits = model(inputs).flatten(0, 1)
        return model.loss(logits, targets.flatten())


def sum_gradients(model: nn.Module) -> None:
    """Sum the gradients of the adapters over the ranks, all in one message."""
    adapters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in adapters])
    # 2·(dp-1)/dp of their bytes out and in per rank
    dist.all_reduce(flat, group=model.dp)
    for p, part in zip(adapters, flat.split([p.numel() for p in adapters])):
        p.grad = part.view(p.shape)


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in .grad"""
    tokens = (targets != IGNORE).sum()
    rank, dp = model.dp.rank(), model.dp.size()
    inputs = inputs.chunk(dp)[rank].to(cfg.device)  # b/dp s
    targets = targets.chunk(dp)[rank].to(cfg.device)
    total = 0
    for x, y in zip(inputs.chunk(cfg.microbatches), targets.chunk(cfg.microbatches)):  # b/dp/microbatches s
        loss = forward(cfg, model, x, y) / tokens
        loss.backward()  # gathers and frees the weights of each block, see before_forward
        free(model.units[1])  # of the first block alone: its input has no gradient that would call after_backward
        total += loss.detach()
    sum_gradients(model)
    dist.all_reduce(total, group=model.dp)  # one element, for the log
    return total


def clip_gradients(cfg: Config, model: Model) -> Tensor:
    """Clip the global gradient norm to --clip; return the norm before clipping."""
    return nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)


def train_step(cfg: Config, model: Model, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor):
    """Run one optimizer step on the global batch [b, s]; return loss and gradient norm, without waiting for the GPU."""
    loss = forward_backward(cfg, model, inputs, targets)
    norm = clip_gradients(cfg, model)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


@torch.no_grad()
def evaluate(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, on all ranks, without gradients"""
    tokens = (targets != IGNORE).sum()
    rank, dp = model.dp.rank(), model.dp.size()
    inputs = inputs.tensor_split(dp)[rank].to(cfg.device)  # b/dp s
    targets = targets.tensor_split(dp)[rank].to(cfg.device)
    microbatches = zip(inputs.tensor_split(cfg.microbatches), targets.tensor_split(cfg.microbatches))
    loss = sum(forward(cfg, model, x, y) for x, y in microbatches)
    dist.all_reduce(loss, group=model.dp)  # one element
    return loss / tokens


def merge_adapters(weights: dict[str, Tensor], scale: float) -> None:
    """Replace W, A and B of every linear by W + scale·B·A, in the dtype of A and B: fp32 rounds little away."""
    for name in [name for name in weights if name.endswith(".lora_A.weight")]:
        linear = name.removesuffix(".lora_A.weight")
        a = weights.pop(name)
        b = weights.pop(f"{linear}.lora_B.weight")
        weights[f"{linear}.weight"] = weights[f"{linear}.weight"] + scale * (b @ a)


def save_adapters(cfg: Config, model: nn.Module) -> None:
    """Write the folder --adapters: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(...), FOLDER)."""
    weights = {f"base_model.model.{name}": p.detach() for name, p in model.named_parameters() if "lora_" in name}
    linears = sorted({name.split(".")[-3] for name in weights})  # base_model. ... .q_proj.lora_A.weight
    config = dict(peft_type="LORA", r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, target_modules=linears)
    if model.dp.rank() > 0:
        return
    folder = Path(cfg.adapters)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(to_bytes(weights, {"format": "pt"}))


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


def full_adapter(cfg: Config, name: str, shape: torch.Size) -> Tensor:
    """Return one matrix of an adapter: B [out, rank] is 0, A [rank, in] has a variance of 1/(3·in), as in torch.nn."""
    if "lora_B" in name:
        return torch.zeros(shape, device=cfg.device)
    tensor = full_tensor(replace(cfg, init=""), name, shape)  # with a standard deviation of 0.02
    return tensor / 0.02 / (3 * shape[1]) ** 0.5


def build_model(cfg: Config) -> Model:
    """Build the model unit by unit, filled tensor by tensor: no rank ever has all weights."""
    dp = dist.group.WORLD
    with torch.device("meta"):
        model = Model(cfg, dp)
    blocks = [f"model.layers.{i}." for i in range(cfg.layers)]
    dtype = getattr(torch, cfg.dtype)
    for prefix in ["model.embed_tokens.", *blocks, ("model.norm.", "lm_head.")]:
        named = [(name, p) for name, p in model.named_parameters() if name.startswith(prefix) and not p.requires_grad]
        model.units.append(make_unit(named, partial(full_tensor, cfg), dp, cfg.device, dtype))
        free(model.units[-1])
    check_units(model)
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.utils.swap_tensors(p, nn.Parameter(full_adapter(cfg, name, p.shape).to(p.dtype)))
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


def make_optimizer(cfg: Config, model: Model) -> torch.optim.Optimizer:
    """Return AdamW of the adapters."""
    adapters = [p for p in model.parameters() if p.requires_grad]
    decay = cfg.weight_decay
    return torch.optim.AdamW(adapters, lr=cfg.lr, betas=(0.9, 0.95), eps=cfg.eps, weight_decay=decay, fused=True)


def set_learning_rate(cfg: Config, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Warm up linearly over --warmup steps, then follow a cosine from --lr down to a tenth of it at --steps."""
    warmup = min(1, (step + 1) / (cfg.warmup + 1))
    progress = max(0, step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    decay = 0.55 + 0.45 * math.cos(math.pi * progress)
    for group in optimizer.param_groups:
        group["lr"] = cfg.lr * warmup * decay


def flops_per_token(cfg: Config) -> float:
    """Count the FLOPs of forward and backward: 4 per frozen weight in a matmul, 6 per element of an adapter.

    Causal attention has 6·layers·dim·seq. The embedding is a lookup, only the unmasked half of attention counts, and
    recomputation does not count.
    """
    kv = cfg.dim // cfg.heads * cfg.kv_heads
    block = 2 * cfg.dim * cfg.dim + 2 * cfg.dim * kv + 3 * cfg.dim * cfg.ffn
    adapters = cfg.lora_rank * (9 * cfg.dim + 2 * kv + 3 * cfg.ffn)  # inputs and outputs of seven linears
    frozen = 4 * (cfg.layers * block + cfg.dim * cfg.vocab)
    return frozen + 6 * cfg.layers * adapters + 6 * cfg.layers * cfg.dim * cfg.seq


def log(cfg: Config, label: str, loss: float, norm: float, seconds: float) -> None:
    """Print one line for a step that took `seconds`. MFU: model FLOPs per second over the GPU's dense bf16 peak."""
    speed = cfg.batch * cfg.seq / seconds / dist.get_world_size()
    gpu = torch.cuda.get_device_name() if cfg.device == "cuda" else "cpu"
    mfu = f"{speed * flops_per_token(cfg) / PEAK_FLOPS[gpu]:.1%}" if gpu in PEAK_FLOPS else "-"
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cfg.device == "cuda" else "-"
    tail = f"tokens/s/GPU {speed:,.0f}  MFU {mfu}  memory {memory}"
    if dist.get_rank() == 0:
        print(f"{label:>9}  loss {loss:.4f}  gradient norm {norm:.3f}  {tail}", flush=True)


def validate(cfg: Config, model: Model, unseen: tuple[np.ndarray, np.ndarray]) -> None:
    """Print the mean loss of a batch of unseen text, the same one each time."""
    inputs, targets = make_batch(cfg, unseen, 0)
    loss = evaluate(cfg, model, inputs, targets).item()
    if dist.get_rank() == 0:
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
    names = {p: name for name, p in model.named_parameters()}
    weights = {name: p.detach().cpu() for p, name in names.items() if p.requires_grad}
    for unit in model.units:
        gather(unit, model.gather_stream)
        unit.gather_work.wait()
        if dist.get_rank() == 0:
            weights |= {names[p]: p.to("cpu", copy=True) for p in unit.parameters}
        free(unit)
    if dist.get_rank() == 0:
        merge_adapters(weights, cfg.lora_alpha / cfg.lora_rank)
        write_weights(cfg, weights, history)


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
    if cfg.adapters:
        save_adapters(cfg, model)


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
    share = cfg.batch // max(1, world)
    folder = Path(cfg.adapters).resolve()
    place = folder if folder.exists() else folder.parent
    problems = [
        (world < 1, f"start it with torchrun --nproc_per_node 8 {os.path.relpath(__file__)}"),
        (cfg.batch % max(1, world), f"--batch {cfg.batch}: must be divisible by the number of processes, {world}"),
        (
            share % cfg.microbatches,
            f"--microbatches {cfg.microbatches}: must divide the {share} sequences of a process",
        ),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.lora_rank > cfg.dim, f"--lora_rank {cfg.lora_rank}: must be at most --dim {cfg.dim}"),
        (cfg.save and not os.access(f"{Path(cfg.save).resolve().parent}/", os.W_OK), f"--save {cfg.save}: no folder"),
        (os.path.exists(cfg.save) and not os.path.isfile(cfg.save), f"--save {cfg.save}: is no file"),
        (cfg.adapters and not os.access(place, os.W_OK), f"--adapters {cfg.adapters}: no folder for it"),
        (cfg.adapters and folder.exists() and not folder.is_dir(), f"--adapters {cfg.adapters}: is no folder"),
    ]
    for wrong, problem in problems:
        if wrong:
            raise SystemExit(problem)
    if cfg.init:
        check_init(cfg)


def main() -> None:
    cfg = parse_config()
    check(cfg, int(os.environ.get("WORLD_SIZE", 0)))
    data = load_data(cfg)
    if cfg.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # torch 2.13 has other names for both, and warns on every rank
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor).*", FutureWarning)
    dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo")
    train(cfg, *data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()


# To paste this into your own trainer
# Take the imports of this file along.
#
# Plumbing: Config, Model.__init__, save_adapters, save, check
# Copy:     Unit, gather, free, before_forward, after_forward, after_backward, make_unit, check_units, sum_gradients,
#           clip_gradients, evaluate, save_adapters
# Use:      beside what 01_single_gpu/lora.py says:
#           1. Give the model the attributes of Model.__init__. Put each frozen parameter into one unit, the embedding
#              into unit 0. Call check_units. Adapters start equal on all ranks.
#           2. Call before_forward before and after_forward after each unit (for unit 0 not, if embedding and head are
#              one tensor). After each backward free all units.
#           3. Call sum_gradients after the last backward, and divide the loss by the valid tokens of all ranks.
#           4. Gather each unit, as save does, before you merge adapters or save weights.
# Needs:    cfg.adapters, cfg.clip, cfg.device, cfg.lora_alpha, cfg.lora_rank, cfg.microbatches, model.dp,
#           model.gather_stream, model.units, "lora_", IGNORE, forward
