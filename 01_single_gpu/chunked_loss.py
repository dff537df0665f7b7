"""Chunked loss: head and cross-entropy take one chunk of the tokens at a time, so the logits never exist as a whole.

With a vocabulary of 128,256, the logits of 16,384 tokens take 4 GB in bf16, and their gradient as much again: often the
peak of a step. 1. Run forward through the blocks, and detach the hidden states. 2. For each chunk of them, run forward
and backward of head and loss; the head's gradient adds up in .grad. 3. Run backward through the blocks.
Memory: logits and their gradient of one chunk, and one more gradient of the hidden states. Nothing is computed twice;
the head's gradient is added up in several parts.

Parent:   01_single_gpu/train.py
Lesson:   Model, hidden_states, chunk_loss, backward_in_chunks, forward_backward, evaluate
Run:      python 01_single_gpu/chunked_loss.py
Source:   Hsu et al. 2024, arXiv:2410.10989; Wijmans et al. 2024, arXiv:2411.09009
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
    seed: int = 0
    data: str = os.path.dirname(os.__file__)  # a file, or a folder's files, read as bytes; or a .bin file of token ids
    init: str = ""  # start from these weights: a .safetensors file, or 'model-*.safetensors' for several
    save: str = ""  # write the trained weights to this .safetensors file
    device: Literal["cuda", "cpu"] = "cuda"  # cpu where torch finds no GPU
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16 is autocast over fp32 weights
    compile: bool = False
    loss_chunks: int = 8  # parts of the tokens that go through head and loss one after another


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
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")

    def hidden_states(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> what the head reads [b, s, d]"""
        rope = rope_table(self.cfg, torch.arange(ids.shape[1], device=ids.device))
        x = self.model.embed_tokens(ids).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
        for block in self.model.layers:
            x = block(x, rope)
        return self.model.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> logits [b, s, v]"""
        return self.lm_head(self.hidden_states(ids))


# ---------------------------------------------------------------------------------------------------------- training
def hidden_states(cfg: Config, model: Model, inputs: Tensor) -> Tensor:
    """inputs [b, s] -> what the head reads [t, d], t = b·s"""
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        return model.hidden_states(inputs).flatten(0, 1)


def chunk_loss(cfg: Config, model: Model, x: Tensor, targets: Tensor) -> Tensor:
    """x [t/loss_chunks, d], targets [t/loss_chunks] -> sum of the losses of the chunk's valid targets"""
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        return model.loss(model.lm_head(x), targets)


def backward_in_chunks(cfg: Config, model: Model, x: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
    """Run head and loss chunk by chunk, then backward of all that x comes from; return the sum of losses / tokens.

    x [t, d]: hidden states, with their graph; targets [t]; tokens []: valid targets of the global batch
    """
    total, gradients = 0, []
    for part, y in zip(x.detach().chunk(cfg.loss_chunks), targets.chunk(cfg.loss_chunks)):  # t/loss_chunks d
        part.requires_grad_()
        loss = chunk_loss(cfg, model, part, y) / tokens
        loss.backward()  # adds to the head's .grad, and frees the logits before the next chunk makes its own
        gradients.append(part.grad)
        total += loss.detach()
    if x.requires_grad:  # else the head alone is trained
        x.backward(torch.cat(gradients))
    return total


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in .grad"""
    tokens = (targets != IGNORE).sum()
    inputs, targets = inputs.to(cfg.device), targets.to(cfg.device)
    return backward_in_chunks(cfg, model, hidden_states(cfg, model, inputs), targets.flatten(), tokens)


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
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, without gradients"""
    tokens = (targets != IGNORE).sum()
    x, y = hidden_states(cfg, model, inputs.to(cfg.device)), targets.to(cfg.device).flatten()
    parts = zip(x.chunk(cfg.loss_chunks), y.chunk(cfg.loss_chunks))  # t/loss_chunks d
    return sum(chunk_loss(cfg, model, *part) for part in parts) / tokens


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
    """Build the model and fill it tensor by tensor, so that at most one full tensor is held twice."""
    with torch.device("meta"):
        model = Model(cfg)
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
# Plumbing: Config
# Copy:     chunk_loss, backward_in_chunks, hidden_states, evaluate
# Use:      Call backward_in_chunks in place of loss.backward(), with what the head reads [t, d] and targets [t]. tokens
#           counts the valid targets of the global batch, and model.loss sums.
# Needs:    cfg.device, cfg.dtype, cfg.loss_chunks, model.hidden_states, model.lm_head, model.loss, IGNORE
# Together: - Buckets: see 02_data_parallel/bucketed.py. Not under DDP, which expects one backward.
#           - ZeRO: if the head is the embedding, too, do not hook unit 0: call reduce(model, 0) after each micro-batch.
#           - FSDP2, which gathers weights in forwards: call register_fsdp_forward_method(model, "hidden_states").
