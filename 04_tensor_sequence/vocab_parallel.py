"""Vocabulary parallelism: embedding, head and loss are split over the words too: no rank has all logits.

A rank holds v/tp rows of both tables. It looks up its own words, zeros stand for the others', and the ranks' sum is the
embedding: one all-reduce of b·s·d activations, and in backward one for the gradient of the head's input. Its logits are
[b s v/tp]; the softmax needs only the largest of a row and the sum of its exponentials, so that the loss takes two
all-reduces, of 4 and 8 bytes per token, where a row of gathered logits has 2·v in bfloat16. Words that are added so
that tp divides their number get a logit of -inf: they would count in the softmax otherwise. What every rank still holds
whole are the norms.

Parent:   04_tensor_sequence/tensor_parallel.py
Lesson:   WORDS, SPLIT, Embedding, Loss, Model
Plumbing: build_model, save
Run:      torchrun --nproc_per_node 8 04_tensor_sequence/vocab_parallel.py
Source:   Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053
"""

import argparse
import json
import os
import time
import zlib
from dataclasses import asdict, dataclass, fields
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
WORDS = "model.embed_tokens.weight", "lm_head.weight"  # the tensors with a row per word
# along which axis of a weight [out, in] a layer is split: by 0 column-parallel, or by words; by 1 row-parallel
SPLIT = dict(q_proj=0, k_proj=0, v_proj=0, o_proj=1, gate_proj=0, up_proj=0, down_proj=1, embed_tokens=0, lm_head=0)
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
    steps: int = 20  # half the root's: on two cores processes wait long for each other, in every layer
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
    tp = max(1, world)
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    problems = [
        (world < 1, f"start it with torchrun --nproc_per_node 8 {os.path.relpath(__file__)}"),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.heads % tp, f"--heads {cfg.heads}: must be divisible by the number of processes, {tp}"),
        (cfg.kv_heads % tp and tp % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: must divide, or be divisible by, {tp}"),
        (cfg.ffn % tp, f"--ffn {cfg.ffn}: must be divisible by the number of processes, {tp}"),
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
class Enter(torch.autograd.Function):
    """Where split weights begin (Megatron's f): hands x on, and sums its gradient, of which each rank has a part."""

    @staticmethod
    @torch.compiler.disable  # as in Leave
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # autograd may use it elsewhere
        dist.all_reduce(gradient)  # 2 (tp-1)/tp of the bytes of x out and in per rank; everyone waits
        return gradient


class Leave(torch.autograd.Function):
    """Where split weights end (Megatron's g): sums all ranks' outputs, and hands on the gradient, which is whole."""

    @staticmethod
    @torch.compiler.disable  # torch 2.11 gives a sum that it has compiled no gradient
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)  # 2 (tp-1)/tp of the bytes of x out and in per rank; everyone waits
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


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
        tp = dist.get_world_size()
        self.k = cfg.dim // cfg.heads
        heads, kv_heads = cfg.heads // tp, max(1, cfg.kv_heads // tp)  # of this rank
        self.q_proj = nn.Linear(cfg.dim, heads * self.k, bias=False)
        self.k_proj = nn.Linear(cfg.dim, kv_heads * self.k, bias=False)
        self.v_proj = nn.Linear(cfg.dim, kv_heads * self.k, bias=False)
        self.o_proj = nn.Linear(heads * self.k, cfg.dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = Enter.apply(x)
        q = rotate(rearrange(self.q_proj(x), "b s (h k) -> b h s k", k=self.k), rope)  # b h/tp s k
        k = rotate(rearrange(self.k_proj(x), "b s (h k) -> b h s k", k=self.k), rope)
        v = rearrange(self.v_proj(x), "b s (h k) -> b h s k", k=self.k)
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return Leave.apply(self.o_proj(rearrange(o, "b h s k -> b s (h k)")))  # b s d


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: Config):
        super().__init__()
        ffn = cfg.ffn // dist.get_world_size()  # of this rank
        self.gate_proj = nn.Linear(cfg.dim, ffn, bias=False)
        self.up_proj = nn.Linear(cfg.dim, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = Enter.apply(x)
        x = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)  # b s f/tp
        return Leave.apply(self.down_proj(x))  # b s d


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
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    """The words of which this rank has the rows, [v/tp, d], and zeros for the others."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(-(-cfg.vocab // dist.get_world_size()), cfg.dim))

    def forward(self, ids: Tensor) -> Tensor:
        row = ids - dist.get_rank() * len(self.weight)
        here = (row >= 0) & (row < len(self.weight))
        return nn.functional.embedding(row.where(here, 0), self.weight).masked_fill(~here[..., None], 0)  # b s d


class Loss(nn.Module):
    """Cross-entropy of logits [b, s, v/tp], summed over the valid targets [b, s].

    Of a row with logits z and target y it is log Σ exp(z - top) + top - z_y; each rank has a part of the sum, and one
    of them has z_y. Its gradient needs no communication, for sums leave the split region as activations do.
    """

    def __init__(self, cfg: Config):
        super().__init__()
        self.vocab = cfg.vocab

    def wide(self, rows: Tensor, words: Tensor) -> Tensor:
        """Logits in float32, of the padding -inf."""
        return rows.to(torch.promote_types(rows.dtype, torch.float32)).masked_fill(words >= self.vocab, -torch.inf)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        rows, targets = rearrange(logits, "b s v -> (b s) v"), targets.flatten().int()  # 64 bits take a GPU longer
        words = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device) + dist.get_rank() * rows.shape[1]
        top = self.wide(rows.detach(), words).amax(1)
        torch._dynamo.graph_break()  # compiled as one, the logits in float32 would be kept
        dist.all_reduce(top, dist.ReduceOp.MAX)  # 2 (tp-1)/tp of 4 bytes per token out and in; everyone waits
        rows = self.wide(rows, words)
        exponentials = (rows - top[:, None]).exp().sum(1)
        wanted = rows.where(words == targets[:, None], 0).sum(1)  # z_y on the rank that has it, else 0
        exponentials, wanted = Leave.apply(torch.stack([exponentials, wanted]))  # 8 bytes per token likewise, in one
        return (exponentials.log() + top - wanted).where(targets != IGNORE, 0).sum()


class Model(nn.Module):
    """Llama 3 with an untied head. Its parameters have the names and shapes of transformers.LlamaForCausalLM's."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.model = nn.Module()
        self.model.embed_tokens = Embedding(cfg)
        self.model.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.model.norm = RMSNorm(cfg)
        self.lm_head = nn.Linear(cfg.dim, -(-cfg.vocab // dist.get_world_size()), bias=False)
        self.loss = Loss(cfg)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> logits [b, s, v/tp]"""
        rope = rope_table(self.cfg, torch.arange(ids.shape[1], device=ids.device))
        x = self.model.embed_tokens(ids).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
        x = Leave.apply(x)  # of zeros on all ranks but one
        for block in self.model.layers:
            x = block(x, rope)
        return self.lm_head(Enter.apply(self.model.norm(x)))


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


def placement(cfg: Config, name: str) -> tuple[int, int]:
    """Along which axis a tensor is split, and into how many parts: tp / parts ranks in a row hold the same part."""
    tp, layer = dist.get_world_size(), name.split(".")[-2]
    if layer in ("k_proj", "v_proj"):
        return SPLIT[layer], min(tp, cfg.kv_heads)  # heads stay whole
    return (SPLIT[layer], tp) if layer in SPLIT else (0, 1)


def build_model(cfg: Config) -> Model:
    """This rank's part of the model before training, cut tensor by tensor: no rank ever has the whole model."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = Model(cfg)
    model.to_empty(device=cfg.device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            axis, parts = placement(cfg, name)
            shape = [n * parts if i == axis else n for i, n in enumerate(p.shape)]
            rows = cfg.vocab if name in WORDS else shape[0]
            full = full_tensor(cfg, name, torch.Size([rows, *shape[1:]]))
            if rows < shape[0]:
                full = nn.functional.pad(full, (0, 0, 0, shape[0] - rows))
            p.copy_(full.chunk(parts, axis)[rank * parts // tp])
    model.replicas, _ = dist.new_subgroups(max(1, tp // cfg.kv_heads))  # the ranks with the same key heads
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
    """AdamW, with weight decay only on matrices."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [dict(params=matrices, weight_decay=cfg.weight_decay), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=cfg.eps, fused=True)


def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> sum of the losses of the valid targets"""
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        return model.loss(model(inputs), targets)


def sum_replicas(cfg: Config, model: Model) -> None:
    """Sum the gradients of the key and value heads that several ranks hold, each for its own query heads."""
    if cfg.kv_heads < dist.get_world_size():
        layers = [block.self_attn for block in model.model.layers]
        gradients = [part.weight.grad for layer in layers for part in (layer.k_proj, layer.v_proj)]
        # a method of the group, because dist.all_reduce_coalesced around it warns that it will be deprecated
        # 2 (r-1)/r of their bytes out and in per rank, with r replicas, who wait
        model.replicas.allreduce_coalesced(gradients).wait()


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in .grad"""
    tokens = (targets != IGNORE).sum()
    inputs, targets = inputs.to(cfg.device), targets.to(cfg.device)
    loss = forward(cfg, model, inputs, targets) / tokens
    loss.backward()
    sum_replicas(cfg, model)
    return loss.detach()


def clip_gradients(cfg: Config, model: Model) -> Tensor:
    """Shorten the gradient of the whole model to norm --clip if it is longer, and return the norm that it had."""
    held_by = {}  # number of ranks -> gradients
    for name, p in model.named_parameters():
        held_by.setdefault(dist.get_world_size() // placement(cfg, name)[1], []).append(p.grad)
    squares = [nn.utils.get_total_norm(gradients) ** 2 / ranks for ranks, gradients in held_by.items()]
    norm = torch.stack(squares).sum()  # what n ranks hold counts 1/n on each
    dist.all_reduce(norm)  # one number: all ranks must scale by the same; everyone waits
    norm = norm.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), cfg.clip, norm)
    return norm


def train_step(cfg: Config, model: Model, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor):
    """One optimizer step on the global batch [b, s]. Returns loss and gradient norm on the device, without waiting."""
    loss = forward_backward(cfg, model, inputs, targets)
    norm = clip_gradients(cfg, model)
    optimizer.step()
    optimizer.zero_grad()
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
    rank, tp, weights = dist.get_rank(), dist.get_world_size(), {}
    for name, p in model.named_parameters():
        axis, parts = placement(cfg, name)
        shards = [torch.empty_like(p) for _ in range(tp)] if rank == 0 else None
        dist.gather(p.detach(), shards)  # the bytes of a part out of each rank, into rank 0; everyone waits
        if rank == 0:
            whole = torch.cat(shards[:: tp // parts], axis)
            weights[name] = (whole[: cfg.vocab] if name in WORDS else whole).cpu()  # without the padding
    if rank == 0:
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
