"""Pipeline schedules by torch.distributed.pipelining: what this folder's other recipes write out, as a library.

It wraps the module of every stage, finds out in the first step what the stages send each other, and runs forwards,
backwards and messages in the order of the schedule that --schedule names. Use it if your model is a chain of stages: a
word changes the schedule. It keeps receive buffers for all m micro-batches, 2·b·s·d elements per stage, and to split a
backward it walks the autograd graph in Python for every micro-batch, which compiled blocks do not survive.

Parent:   06_pipeline/1f1b.py
Lesson:   ONE, LOOP, V, SPLIT, stages_of, Model, Stage, build_schedule, run_schedule, forward_backward
Run:      torchrun --nproc_per_node 8 06_pipeline/torch_pipelining.py
Source:   documentation of torch.distributed.pipelining
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict, dataclass
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
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

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
# The library's schedules, by the stages that rank r of p holds: r alone; r and p + r; r and 2p - 1 - r, in a V.
ONE = ("GPipe", "1F1B")
LOOP = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V = ("ZBVZeroBubble", "DualPipeV")
SPLIT = ("InterleavedZeroBubble", *V)  # gradients of weights are computed apart from those of inputs


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
    seed: int = 0
    data: str = os.path.dirname(os.__file__)  # a file, or a folder's files, read as bytes; or a .bin file of token ids
    init: str = ""  # start from these weights: a .safetensors file, or 'model-*.safetensors' for several
    save: str = ""  # write the trained weights to this .safetensors file
    device: Literal["cuda", "cpu"] = "cuda"  # cpu where torch finds no GPU
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16 is autocast over fp32 weights
    compile: bool = False
    microbatches: int = 8  # parts of the batch that go through the model one after another
    schedule: Literal[ONE + LOOP + V] = "1F1B"  # the library's names


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


def split_layers(cfg: Config, stages: int) -> list[range]:
    """Divide the layers so that the largest stage, which sets the pace, is as small as possible."""
    head = 6 * cfg.dim * cfg.vocab  # FLOPs per token
    block = (flops_per_token(cfg) - head) / cfg.layers
    counts = [1] * stages  # layers of each stage
    loads = [block] * stages  # FLOPs per token of each stage
    loads[0] += cfg.dim  # embedding: backward adds dim elements per token
    loads[-1] += head
    for _ in range(cfg.layers - stages):
        # of equal loads the last, since later stages keep fewer activations
        lightest = min(reversed(range(stages)), key=loads.__getitem__)
        counts[lightest] += 1
        loads[lightest] += block
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts)]


def stages_of(cfg: Config, rank: int, ranks: int) -> list[int]:
    """Return the stages that a rank holds, in the order of the forward."""
    if cfg.schedule in ONE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if cfg.schedule in V else ranks + rank]


class Model(nn.Module):
    """The stages of Llama 3 on a rank: some of the layers; the first also has the embedding, the last one the head."""

    def __init__(self, cfg: Config, pp: dist.ProcessGroup):
        super().__init__()
        self.pp = pp  # the ranks that split the model
        self.stages = stages_of(cfg, pp.rank(), pp.size())
        self.split = split_layers(cfg, len(self.stages) * pp.size())  # the layers of every stage
        self.model = nn.Module()
        if 0 in self.stages:
            self.model.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.model.layers = nn.ModuleDict({str(i): Block(cfg) for stage in self.stages for i in self.split[stage]})
        if len(self.split) - 1 in self.stages:
            self.model.norm = RMSNorm(cfg)
            self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")
        self.tokens = torch.ones((), dtype=torch.int64, device="cpu")  # valid tokens of the global batch
        self.schedule = build_schedule(cfg, self)


class Stage(nn.Module):
    """One stage as the library runs it. It shares the modules of `model`, where they have their full names."""

    def __init__(self, cfg: Config, model: Model, layers: range):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = model.model.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleList(model.model.layers[str(i)] for i in layers)
        self.norm = model.model.norm if layers.stop == cfg.layers else None
        self.lm_head = model.lm_head if layers.stop == cfg.layers else None

    def forward(self, x: Tensor) -> Tensor:
        """ids [b, s], after the first stage activations [b, s, d] -> activations, on the last stage logits [b, s, v]"""
        with torch.autocast(self.cfg.device, torch.bfloat16, enabled=self.cfg.dtype == "bfloat16"):
            rope = rope_table(self.cfg, torch.arange(x.shape[1], device=x.device))
            if self.embed_tokens:
                x = self.embed_tokens(x).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
            for block in self.layers:
                x = block(x, rope)
            return self.lm_head(self.norm(x)) if self.lm_head else x


# ---------------------------------------------------------------------------------------------------------- training
def build_schedule(cfg: Config, model: Model) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """Wrap the stages of this rank for the library, and return the schedule that runs them."""

    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            return loss(logits.flatten(0, 1), targets.flatten()) / tokens

    # if mean_loss held the model, the two would keep each other, and the group, alive
    loss = model.loss
    tokens = model.tokens
    device = torch.device(cfg.device)
    stages = []
    for i in model.stages:
        stage = Stage(cfg, model, model.split[i])
        stages.append(PipelineStage(stage, i, len(model.split), device, group=model.pp))
    schedule = get_schedule_class(cfg.schedule)
    # By default the library divides gradients by the number of micro-batches; here tokens are counted over all of them
    return schedule(
        stages[0] if cfg.schedule in ONE else stages, cfg.microbatches, loss_fn=mean_loss, scale_grads=False
    )


def run_schedule(
    cfg: Config,
    model: Model,
    schedule: PipelineScheduleSingle | PipelineScheduleMulti,
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """Run a schedule on the batch [b, s]; return this rank's part of the loss: 0 except where the last stage is.

    Under torch.no_grad() it evaluates: use another build_schedule(cfg, model) for that, and for every shape of batch,
    since the first step fixes what is sent. Of the schedules in a V, the library can run no forwards alone.
    """
    model.tokens.copy_((targets != IGNORE).sum())
    losses = []  # of micro-batches
    ids = [inputs.to(cfg.device).contiguous()] if 0 in model.stages else []  # torch 2.11 compares strides
    run = schedule.step if torch.is_grad_enabled() else schedule.eval
    # over every boundary b·s·d elements forward, as many back; outputs would be all logits
    run(*ids, target=targets.to(cfg.device), losses=losses, return_outputs=False)
    dtype = torch.promote_types(getattr(torch, cfg.dtype), torch.float32)
    return sum((loss.detach() for loss in losses), torch.zeros((), dtype=dtype, device=cfg.device))


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in .grad"""
    loss = run_schedule(cfg, model, model.schedule, inputs, targets)
    dist.all_reduce(loss, group=model.pp)  # one element, for the log
    return loss


def clip_gradients(cfg: Config, model: Model) -> Tensor:
    """Clip the global gradient norm to --clip; return the norm before clipping."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]  # none in a stage that is frozen
    if not gradients and any(p.requires_grad for p in model.parameters()):
        raise RuntimeError(
            "no parameter of this stage has a .grad; if ZeRO's units have it, take ZeRO's clip_gradients"
        )
    stage_norm = nn.utils.get_total_norm(gradients)
    squares = stage_norm.to(cfg.device, torch.float64) ** 2  # stages may differ in dtype
    dist.all_reduce(squares, group=model.pp)  # one element
    norm = squares.sqrt().to(stage_norm.dtype)  # with one dtype bit-identical on all ranks, so all scale alike
    nn.utils.clip_grads_with_norm_(model.parameters(), cfg.clip, norm)
    return norm


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
    loss = run_schedule(cfg, model, build_schedule(cfg, model), inputs, targets)
    dist.all_reduce(loss, group=model.pp)  # one element
    return loss


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
    """Build the stages of this rank and fill them tensor by tensor, so that at most one full tensor is held twice."""
    with torch.device("meta"):
        model = Model(cfg, dist.group.WORLD)
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


def make_optimizer(cfg: Config, model: Model) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        dict(params=matrices, weight_decay=cfg.weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=cfg.eps, fused=True)


def set_learning_rate(cfg: Config, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Warm up linearly over --warmup steps, then follow a cosine from --lr down to a tenth of it at --steps."""
    warmup = min(1, (step + 1) / (cfg.warmup + 1))
    progress = max(0, step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    decay = 0.55 + 0.45 * math.cos(math.pi * progress)
    for group in optimizer.param_groups:
        group["lr"] = cfg.lr * warmup * decay


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
    weights = {}  # of all stages, on the CPU of rank 0
    rank_weights = model.state_dict()
    rank_shapes = {name: weight.shape for name, weight in rank_weights.items()}
    shapes_by_rank = [None] * model.pp.size()
    dist.all_gather_object(shapes_by_rank, rank_shapes, group=model.pp)  # names and shapes
    for rank, shapes in enumerate(shapes_by_rank):
        for name, shape in shapes.items():
            tensor = rank_weights[name] if name in rank_weights else torch.empty(shape, device=cfg.device)
            dist.broadcast(tensor, group=model.pp, group_src=rank)  # one weight after another
            if dist.get_rank() == 0:
                weights[name] = tensor.cpu()
    if dist.get_rank() == 0:
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
    stages = world if cfg.schedule in ONE else 2 * world
    rounds = max(1, cfg.microbatches // max(1, world))  # of the interleaved schedules, all of one size
    problems = [
        (world < 1, f"start it with torchrun --nproc_per_node 8 {os.path.relpath(__file__)}"),
        (cfg.layers < stages, f"--layers {cfg.layers}: must be at least the number of stages, {stages}"),
        (cfg.batch % cfg.microbatches, f"--microbatches {cfg.microbatches}: must divide --batch {cfg.batch}"),
        (
            cfg.schedule in ("1F1B", "DualPipeV") and cfg.microbatches < stages,
            f"--microbatches {cfg.microbatches}: must be at least {stages}, the stages of --schedule {cfg.schedule}",
        ),
        (
            cfg.schedule.startswith("Interleaved") and cfg.microbatches % rounds,
            f"--microbatches {cfg.microbatches}: --schedule {cfg.schedule} takes multiples of the {world} processes",
        ),
        (
            cfg.validate and (cfg.schedule in V or world == 1 and cfg.schedule in LOOP),
            f"--validate {cfg.validate}: must be 0, or --schedule 1F1B: the library cannot evaluate {cfg.schedule}",
        ),
        (
            cfg.compile and cfg.schedule in SPLIT,
            f"--compile: --schedule {cfg.schedule} splits the backward, which torch cannot do with compiled blocks",
        ),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
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
    check(cfg, int(os.environ.get("WORLD_SIZE", 0)))
    data = load_data(cfg)
    if cfg.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo")
    train(cfg, *data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()


# To paste this into your own trainer
# Take the imports of this file along.
#
# Plumbing: Config, build_model, check, evaluate
# Copy:     ONE, build_schedule, run_schedule, clip_gradients, evaluate
# Use:      1. Stage(cfg, model, layers) is your own module of a stage. Autocast belongs in its forward, which the
#              library calls. model.loss sums, model.tokens is an int64 tensor on the CPU.
#           2. Call run_schedule as forward_backward does; in a validation loop, under torch.no_grad(), with a schedule
#              of its own and equal micro-batches. Once per step: it divides by the valid tokens of its own batch.
# Mind:     Where all of the first stage is frozen, call requires_grad_() on what it embeds: else schedules with a split
#           backward leave out weights of the second.
# Needs:    cfg.clip, cfg.device, cfg.dtype, cfg.microbatches, cfg.schedule, model.loss, model.pp, model.split,
#           model.stages, model.tokens, IGNORE, Stage
