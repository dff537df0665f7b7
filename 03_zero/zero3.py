"""ZeRO stage 3: weights are sharded too. Each block's are gathered before it runs, and again before its backward.

(4 + 8 + 4)Ψ/dp bytes for the shards of weights, AdamW's moments and gradients. Whole weights exist for two units at a
time, the one that computes and the next, which is gathered meanwhile. The last block, norm and head, which backward
needs first, are kept from forward to backward, and the embedding's backward needs no weights: with the gradients a
micro-batch moves 3Ψ less these units, (dp-1)/dp of it out of each rank.

Parent:   03_zero/zero2.py
Lesson:   gather, free, Model.forward, before_backward, build_model
Plumbing: backward, forward_backward
Run:      torchrun --nproc_per_node 8 03_zero/zero3.py
Source:   Rajbhandari et al. 2019, ZeRO, arXiv:1910.02054; Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277
"""

import argparse
import json
import os
import time
import zlib
from dataclasses import asdict, dataclass, fields
from functools import partial
from glob import glob
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------------------ config
IGNORE = -100  # the target of a token that nothing predicts: the first one of a document
PEAK_FLOPS = {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989.5e12, "NVIDIA H200": 989.5e12}  # bf16
PRESETS = {  # shapes of SmolLM-1.7B, Llama-3.2-1B and Llama-3.1-8B; tiny, for laptops, is the defaults below
    "tiny": dict(),
    "smollm_1_7b": dict(layers=24, dim=2048, heads=32, kv_heads=32, ffn=8192, vocab=49152, theta=1e4, lr=3e-4),
    "llama3_1b": dict(layers=16, dim=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, rope_factor=32.0, lr=3e-4),
    "llama3_8b": dict(layers=32, dim=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, rope_factor=8.0, lr=3e-4),
}


@dataclass(frozen=True)
class Config:
    """Every field is a flag. What the command line lacks comes from the preset, and what that lacks from here."""

    preset: Literal[tuple(PRESETS)] = "tiny"
    layers: int = 8
    dim: int = 128
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 384
    vocab: int = 256
    theta: float = 5e5  # base of the RoPE wavelengths
    rope_factor: float = 1.0  # by which Llama 3.1 and 3.2 stretch the long wavelengths
    seq: int = 128
    batch: int = 16  # sequences per step, of all ranks together
    steps: int = 40
    lr: float = 3e-3
    weight_decay: float = 0.1
    eps: float = 1e-8
    clip: float = 1.0
    seed: int = 0
    data: str = os.path.dirname(os.__file__)  # a file or a folder's files, read as bytes; or a .bin file of token ids
    init: str = ""  # start from these weights: a .safetensors file, or 'model-*.safetensors' for several
    save: str = ""  # write the trained weights to this .safetensors file
    device: Literal["cuda", "cpu"] = "cuda"  # cpu where torch finds no GPU
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16 is autocast over float32 weights
    compile: bool = False
    microbatches: int = 2  # parts of a rank's batch that go through the model one after another


def parse_config() -> Config:
    """Turn the command line into a Config."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, argument_default=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for f in fields(Config):
        takes = dict(type=type(f.default), choices=get_args(f.type) or None, help=f"default: {f.default}")
        parser.add_argument(f"--{f.name}", **(dict(action="store_true") if f.type is bool else takes))
    flags = {"device": "cuda" if torch.cuda.is_available() else "cpu", **vars(parser.parse_args())}
    return Config(**{**PRESETS[flags.get("preset", "tiny")], **flags})


def check(cfg: Config, world: int) -> None:
    """End the program with one line that names the flag that cannot work, its value, and what would."""
    for flag, value in asdict(cfg).items():
        least = 0 if flag in ("steps", "lr", "weight_decay", "eps", "clip", "seed", "compile") else 1
        if isinstance(value, int | float) and not value >= least:
            raise SystemExit(f"--{flag} {value}: must be at least {least}")
    each = cfg.batch // max(1, world)
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    problems = [
        (world < 1, f"start it with torchrun --nproc_per_node 8 {os.path.relpath(__file__)}"),
        (cfg.batch % max(1, world), f"--batch {cfg.batch}: must be divisible by the number of processes, {world}"),
        (each % cfg.microbatches, f"--microbatches {cfg.microbatches}: must divide the {each} sequences of a process"),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (not Path(cfg.data).exists(), f"--data {cfg.data}: no such file or folder"),
        (cfg.init and not glob(cfg.init), f"--init {cfg.init}: no such file"),
        (cfg.save and not os.access(Path(cfg.save).parent, os.W_OK), f"--save {cfg.save}: no folder to write to"),
        (cfg.save and Path(cfg.save).is_dir(), f"--save {cfg.save}: is a folder, must be a file"),
        (cfg.device == "cuda" and local > gpus, f"--device cuda: {gpus} GPUs for {local} processes, use --device cpu"),
    ]
    for wrong, problem in problems:
        if wrong:
            raise SystemExit(problem)
    for file in glob(cfg.init):
        try:
            names = safe_open(file, "pt").keys()
        except (OSError, SafetensorError):
            raise SystemExit(f"--init {cfg.init}: {file} is no .safetensors file") from None
        if any(name.startswith(f"model.layers.{cfg.layers}.") for name in names):
            raise SystemExit(f"--layers {cfg.layers}: must be all the layers of --init {cfg.init}, which has more")


# ----------------------------------------------------------------------------------------------------- communication
@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced together. Of their n numbers, padded with zeros, a rank owns n/dp."""

    parameters: list[nn.Parameter]  # views of `full`, end to end: matrices first, then vectors, which do not decay
    sizes: list[int]  # of the parameters, and of the padding after them
    full: Tensor  # [n] the weights of the model, in the dtype of the matmuls
    mine: Tensor  # [n/dp] this rank's part of `full`
    shard: Tensor  # [n/dp] this rank's part of the weights, in float32: the original
    matrices: nn.Parameter  # what of the shard is part of a matrix, and
    vectors: nn.Parameter  # ... of a vector; their .grad are views of `gradient`
    gradient: Tensor | None = None  # [n/dp] of the shard, in float32, summed over all ranks
    gathering: dist.Work | None = None  # which fills `full`


def gather(unit: Unit, stream: torch.cuda.Stream | None) -> None:
    """Start to fill `full` with the shards of all ranks, rounded to its dtype, beside what computes."""
    unit.full.untyped_storage().resize_(unit.full.nbytes)
    if stream:
        stream.wait_stream(torch.cuda.current_stream())  # it has read what was in this memory, and written the shard
    with torch.cuda.stream(stream):
        unit.mine.copy_(unit.shard)
        # (dp-1)/dp of the bytes of `full` out and in per rank; who reads it waits. It is all_gather_into_tensor,
        # which torch 2.13 renames to all_gather_single
        unit.gathering = dist.group.WORLD._allgather_base(unit.full, unit.mine)


def free(unit: Unit) -> None:
    """Give back the memory of `full`. It and the parameters stay, to see what is gathered next."""
    unit.full.untyped_storage().resize_(0)


def reduce_scatter(unit: Unit, flat: Tensor, stream: torch.cuda.Stream | None, first: bool) -> dist.Work:
    """Sum the gradients flat [n] of all ranks and add the part of this rank's shard to those of micro-batches before.

    Gradients cross the wire in the dtype in which matmuls make them, and are added in float32: a reduce-scatter in bf16
    would round after every addition, one in float32 would move twice the bytes. `flat` may change after what is
    returned has been waited for.
    """
    if first:
        unit.gradient = torch.empty_like(unit.shard)  # before the stream changes: streams do not share memory
        unit.matrices.grad, unit.vectors.grad = unit.gradient.split([len(unit.matrices), len(unit.vectors)])
    if stream:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        parts = rearrange(torch.empty_like(flat), "(dp n) -> dp n", dp=dist.get_world_size())
        # (dp-1)/dp of its bytes out and in per rank; the sum waits, on GPUs backward goes on
        sending = dist.all_to_all_single(parts, flat, async_op=True)
        sending.wait()
        if first:
            torch.sum(parts, 0, dtype=unit.shard.dtype, out=unit.gradient)
        else:
            unit.gradient += parts.sum(0, dtype=unit.shard.dtype)
    return sending


# ------------------------------------------------------------------------------------------------------------- model
# Axes: b sequences, s tokens, d model width, h heads, k head width, f ffn width, v vocabulary.


class RMSNorm(nn.Module):
    """Root mean square normalisation of the last axis (arXiv:1910.07467)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cfg.dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # a mean of squares needs more digits than bf16 has
        return (self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rope_table(cfg: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [s, k] of the rotary angles at positions [s] (arXiv:2104.09864)."""
    k = cfg.dim // cfg.heads
    frequency = cfg.theta ** (-torch.arange(0, k, 2, dtype=torch.float64, device=positions.device) / k)
    turns = 8192 * frequency / (2 * torch.pi)  # full turns within the context that Llama 3 was first trained on
    keep = ((turns - 1) / 3).clamp(0, 1)  # 4 turns or more: as they are; 1 or less: slowed down by rope_factor
    angle = torch.outer(positions, frequency * (keep + (1 - keep) / cfg.rope_factor)).repeat(1, 2)  # s k
    return angle.cos().to(torch.get_default_dtype()), angle.sin().to(torch.get_default_dtype())


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + k/2) of the last axis of x [b, h, s, k] by the angle of its position."""
    low, high = x.chunk(2, dim=-1)
    return (x * rope[0] + torch.cat((-high, low), dim=-1) * rope[1]).to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which heads / kv_heads query heads share a key and a value head (arXiv:2305.13245)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.k = cfg.dim // cfg.heads
        self.q_proj = nn.Linear(cfg.dim, cfg.heads * self.k, bias=False)
        self.k_proj = nn.Linear(cfg.dim, cfg.kv_heads * self.k, bias=False)
        self.v_proj = nn.Linear(cfg.dim, cfg.kv_heads * self.k, bias=False)
        self.o_proj = nn.Linear(cfg.heads * self.k, cfg.dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q = rotate(rearrange(self.q_proj(x), "b s (h k) -> b h s k", k=self.k), rope)
        k = rotate(rearrange(self.k_proj(x), "b s (h k) -> b h s k", k=self.k), rope)
        v = rearrange(self.v_proj(x), "b s (h k) -> b h s k", k=self.k)
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(rearrange(o, "b h s k -> b s (h k)"))


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.up_proj = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.down_proj = nn.Linear(cfg.ffn, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        torch._dynamo.graph_break()  # compiled, gradients come when the backward of a graph ends: the MLP's come sooner
        return x + self.mlp(self.post_attention_layernorm(x))


class Loss(nn.Module):
    """Cross-entropy of logits [b, s, v], summed over the valid targets [b, s]."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        rows = rearrange(logits, "b s v -> (b s) v")  # contiguous; with v before s the kernel is many times slower
        return nn.functional.cross_entropy(rows, targets.flatten(), ignore_index=IGNORE, reduction="sum")


class Model(nn.Module):
    """Llama 3 with an untied head. Its parameters have the names and shapes of transformers.LlamaForCausalLM's."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.model.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.model.norm = RMSNorm(cfg)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.loss = Loss()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> logits [b, s, v]"""
        rope = rope_table(self.cfg, torch.arange(ids.shape[1], device=ids.device))
        gather(self.units[0], self.gathers)
        gather(self.units[1], self.gathers)
        self.units[0].gathering.wait()  # on GPUs only the stream waits, not this process
        x = self.model.embed_tokens(ids).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
        free(self.units[0])
        for i, block in enumerate(self.model.layers, 1):  # unit i
            self.units[i].gathering.wait()
            gather(self.units[i + 1], self.gathers)
            x = block(x, rope)
            if i < self.cfg.layers:
                free(self.units[i])  # but not the last block, which backward needs at once
            x.register_hook(partial(before_backward, self, i))
        self.units[-1].gathering.wait()
        return self.lm_head(self.model.norm(x))


def before_backward(model: Model, i: int, _: Tensor) -> None:
    """Have the weights of unit i, a block, free those after it, and start to gather those of the block before it."""
    model.units[i].gathering.wait()
    free(model.units[i + 1])
    model.reduce_made(*model.units[i + 1].parameters)  # before the gather on all ranks, gradients or not
    if i > 1:
        gather(model.units[i - 1], model.gathers)


def full_tensor(cfg: Config, name: str, shape: torch.Size) -> Tensor:
    """The whole tensor before training: from --init, else from a generator of the device that (seed, name) seeds."""
    if cfg.init:
        tied = ["model.embed_tokens.weight"] if name == "lm_head.weight" else []  # as in some published models
        files = [safe_open(file, "pt") for file in glob(cfg.init)]
        found = (file.get_tensor(key) for key in [name, *tied] for file in files if key in file.keys())
        if (tensor := next(found, None)) is None or tensor.shape != shape:
            raise SystemExit(f"--init {cfg.init}: must hold {name} of shape {list(shape)}")
        return tensor
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator(cfg.device).manual_seed(zlib.crc32(f"{cfg.seed} {name}".encode()))
    return torch.empty(shape, dtype=torch.float32, device=cfg.device).normal_(0, 0.02, generator=generator)


def make_unit(cfg: Config, model: Model, names: tuple[str, ...]) -> Unit:
    """The unit of the parameters whose names begin so, with its shard filled tensor by tensor."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    named = [(name, p) for name, p in model.named_parameters() if name.startswith(names)]
    named.sort(key=lambda item: -item[1].ndim)
    sizes = [p.numel() for _, p in named]
    each = (sum(sizes) + dp - 1) // dp  # numbers in a shard
    sizes.append(dp * each - sum(sizes))
    full = torch.zeros(dp * each, dtype=getattr(torch, cfg.dtype), device=cfg.device)
    shard = torch.zeros(each, device=cfg.device)
    start = -rank * each  # of a tensor in the shard, if it is there
    for (name, p), part in zip(named, full.split(sizes)):
        own = shard[max(0, start) : max(0, start + p.numel())]
        own.copy_(full_tensor(cfg, name, p.shape).flatten()[max(0, -start) :][: len(own)])
        start += p.numel()
        # .data: autograd shall not see what gather writes
        torch.utils.swap_tensors(p, nn.Parameter(part.view(p.shape).data))
    end = sum(p.numel() for _, p in named if p.ndim > 1) - rank * each  # of the matrices
    matrices, vectors = (nn.Parameter(part) for part in shard.tensor_split([max(0, end)]))
    return Unit([p for _, p in named], sizes, full, full.chunk(dp)[rank], shard, matrices, vectors)


def build_model(cfg: Config) -> Model:
    """The model before training: no rank ever has all weights."""
    with torch.device("meta"):
        model = Model(cfg)
    blocks = [(f"model.layers.{i}.",) for i in range(cfg.layers)]
    parts = [("model.embed_tokens.",), *blocks, ("model.norm.", "lm_head.")]  # in the order of forward
    model.units = []
    for names in parts:
        model.units.append(make_unit(cfg, model, names))
        free(model.units[-1])
    model.gathers = torch.cuda.Stream() if cfg.device == "cuda" else None  # where weights are rounded to be gathered
    model.stream = torch.cuda.Stream() if cfg.device == "cuda" else None  # of reductions
    if cfg.compile:
        for part in (*model.model.layers.children(), model.loss):  # the blocks share one compilation
            part.compile()
    return model


# -------------------------------------------------------------------------------------------------------------- data
def load_data(cfg: Config) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all documents end to end, and the offsets at which documents start.

    A .bin file has uint16 ids, or uint32 ids if --vocab needs these or the upper halves are all 0.
    """
    path = Path(cfg.data)
    if path.suffix == ".bin" and path.stat().st_size > 1:
        ids, starts = np.memmap(path, np.uint16, "r", shape=path.stat().st_size // 2), np.zeros(1, np.int64)
        if cfg.vocab > 2**16 or not ids[1::2].any():  # the upper halves of uint32 ids
            ids = ids[: len(ids) // 2 * 2].view(np.uint32)
    else:
        files = sorted(f for f in path.iterdir() if f.is_file()) if path.is_dir() else [path]
        documents = [np.fromfile(file, np.uint8) for file in files]
        ids = np.concatenate([np.zeros(0, np.uint8), *documents])
        lengths = np.array([len(document) for document in documents])
        starts = lengths.cumsum() - lengths
    if len(ids) <= cfg.seq:
        raise SystemExit(f"--data {cfg.data}: must have more tokens than --seq {cfg.seq}, has {len(ids)}")
    if ids.max() >= cfg.vocab:
        raise SystemExit(f"--vocab {cfg.vocab}: must be above {ids.max()}, the largest {ids.dtype} in {cfg.data}")
    return ids, starts


def make_batch(cfg: Config, data: tuple[np.ndarray, np.ndarray], step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [b, s] of the global batch: windows of the text that (seed, step) alone picks."""
    ids, starts = data
    first = np.random.default_rng((cfg.seed, step)).integers(len(ids) - cfg.seq, size=(cfg.batch, 1))
    where = first + np.arange(cfg.seq + 1)  # b s+1
    window = torch.from_numpy(ids[where].astype(np.int64))
    unrelated = torch.from_numpy(np.isin(where[:, 1:], starts))  # a document does not follow from the one before it
    return window[:, :-1], window[:, 1:].masked_fill(unrelated, IGNORE)


# ---------------------------------------------------------------------------------------------------------- training
def make_optimizer(cfg: Config, model: Model) -> torch.optim.Optimizer:
    """AdamW of this rank's shards, with weight decay only on matrices."""
    matrices = [unit.matrices for unit in model.units]
    vectors = [unit.vectors for unit in model.units]
    groups = [dict(params=matrices, weight_decay=cfg.weight_decay), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=cfg.eps, fused=True)


def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> sum of the losses of the valid targets"""
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        return model.loss(model(inputs), targets)


def flatten(unit: Unit) -> Tensor:
    """The gradients of a unit, end to end in one tensor [n]; those of the parameters are freed."""
    flat = torch.empty_like(unit.full)
    for p, part in zip(unit.parameters, flat.split(unit.sizes)):
        part.zero_() if p.grad is None else part.copy_(p.grad.flatten())  # None: this rank's part of the batch has none
        p.grad = None
    flat[len(flat) - unit.sizes[-1] :].zero_()  # the padding
    return flat


def backward(cfg: Config, model: Model, loss: Tensor, first: bool) -> None:
    """Backward, during which the ranks sum the gradients of each unit as soon as all of them have made them."""
    waiting = model.units[::-1]  # for the sum, in the same order on all ranks
    made = set()  # parameters that have their gradient
    sending = []  # (what to wait for, gradients) of at most two units

    def reduce_made(*parameters: Tensor) -> None:
        made.update(parameters)
        while waiting and made.issuperset(waiting[0].parameters):
            unit = waiting.pop(0)
            if len(sending) == 2:
                sending.pop(0)[0].wait()  # then their memory is used again; on GPUs only the stream waits
            flat = flatten(unit)
            sending.append((reduce_scatter(unit, flat, model.stream, first), flat))

    model.reduce_made = reduce_made  # for before_backward
    hooks = [p.register_post_accumulate_grad_hook(reduce_made) for p in model.parameters()]
    loss.backward()
    for handle in hooks:
        handle.remove()
    reduce_made(*model.parameters())  # what has no gradient by now will get none
    del model.reduce_made  # and the gradients that it holds
    if model.stream:
        torch.cuda.current_stream().wait_stream(model.stream)  # only the GPU's stream waits, not this process


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in the units"""
    tokens = (targets != IGNORE).sum()
    rank, dp = dist.get_rank(), dist.get_world_size()
    inputs, targets = inputs.chunk(dp)[rank].to(cfg.device), targets.chunk(dp)[rank].to(cfg.device)  # b/dp s
    total = 0
    for i, (x, y) in enumerate(zip(inputs.chunk(cfg.microbatches), targets.chunk(cfg.microbatches))):
        loss = forward(cfg, model, x, y) / tokens
        backward(cfg, model, loss, first=i == 0)
        free(model.units[1])  # the first block's, which no backward of a block follows
        total += loss.detach()
    dist.all_reduce(total)  # one number, for the log; everyone waits
    return total


def clip_gradients(cfg: Config, model: Model) -> Tensor:
    """Shorten the gradient of the whole model to norm --clip if it is longer, and return the norm that it had."""
    shards = [p for unit in model.units for p in (unit.matrices, unit.vectors)]
    norm = nn.utils.get_total_norm([p.grad for p in shards]) ** 2
    dist.all_reduce(norm)  # one number, the squares of all shards: they must all scale by the same; everyone waits
    norm = norm.sqrt()
    nn.utils.clip_grads_with_norm_(shards, cfg.clip, norm)
    return norm


def train_step(cfg: Config, model: Model, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor):
    """One optimizer step on the global batch [b, s]. Returns loss and gradient norm on the device, without waiting."""
    loss = forward_backward(cfg, model, inputs, targets)
    norm = clip_gradients(cfg, model)
    optimizer.step()
    optimizer.zero_grad()
    for unit in model.units:
        unit.gradient = None
    return loss, norm


def flops_per_token(cfg: Config) -> float:
    """Forward and backward: 6 per weight in a matmul, and 6 layers x dim x seq in causal attention.

    The embedding is a lookup, attention counts only the unmasked half, and recomputation does not count.
    """
    kv = cfg.dim // cfg.heads * cfg.kv_heads
    block = 2 * cfg.dim * cfg.dim + 2 * cfg.dim * kv + 3 * cfg.dim * cfg.ffn
    return 6 * (cfg.layers * block + cfg.dim * cfg.vocab) + 6 * cfg.layers * cfg.dim * cfg.seq


def log(cfg: Config, label: str, loss: float, norm: float, seconds: float) -> None:
    """Print one line about a step that took so many seconds."""
    speed = cfg.batch * cfg.seq / seconds / dist.get_world_size()
    gpu = torch.cuda.get_device_name() if cfg.device == "cuda" else "cpu"
    mfu = f"{speed * flops_per_token(cfg) / PEAK_FLOPS[gpu]:.1%}" if gpu in PEAK_FLOPS else "-"
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cfg.device == "cuda" else "-"
    tail = f"tokens/s/GPU {speed:,.0f}  MFU {mfu}  memory {memory}"
    if dist.get_rank() == 0:
        print(f"{label:>9}  loss {loss:.4f}  gradient norm {norm:.3f}  {tail}", flush=True)


def save(cfg: Config, model: Model, history: list[tuple[float, float, float]]) -> None:
    """Write the weights for transformers; the metadata holds config and [loss, gradient norm, seconds] per step."""
    metadata = {"format": "pt", "config": json.dumps(asdict(cfg)), "history": json.dumps(history)}
    names, weights = {p: name for name, p in model.named_parameters()}, {}
    for unit in model.units:
        full = unit.shard.new_empty(len(unit.full))
        # one unit after the other, of which rank 0 keeps a copy; everyone waits
        dist.group.WORLD._allgather_base(full, unit.shard).wait()
        for p, part in zip(unit.parameters, full.split(unit.sizes)):
            if dist.get_rank() == 0:
                weights[names[p]] = part.view(p.shape).to("cpu", copy=True)
    if dist.get_rank() == 0:
        save_file(weights, cfg.save, metadata)


def train(cfg: Config, data: tuple[np.ndarray, np.ndarray]) -> None:
    """Build, train, report, save."""
    torch.set_default_dtype(torch.float64 if cfg.dtype == "float64" else torch.float32)  # of the weights
    model = build_model(cfg)
    optimizer = make_optimizer(cfg, model)
    history = []
    batch = make_batch(cfg, data, 0)
    for step in range(cfg.steps):
        start = time.perf_counter()
        loss, norm = train_step(cfg, model, optimizer, *batch)
        batch = make_batch(cfg, data, step + 1)  # the GPU is still busy with the step
        loss, norm = loss.item(), norm.item()  # waits for the GPU
        history.append((loss, norm, time.perf_counter() - start))
        log(cfg, f"step {step + 1}", *history[-1])
    if history:
        log(cfg, "median", *np.median(history[min(5, cfg.steps // 2) :], axis=0))  # without the warm-up
    if cfg.save:
        save(cfg, model, history)


# -------------------------------------------------------------------------------------------------------------- main
def main() -> None:
    cfg = parse_config()
    check(cfg, int(os.environ.get("WORLD_SIZE", 0)))
    data = load_data(cfg)
    if cfg.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo")
    train(cfg, data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
