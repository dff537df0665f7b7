"""Zigzag ring attention: each rank holds one early and one late part of the sequence, so that all work alike.

The sequence is cut into 2·cp parts, and rank r holds parts r and 2·cp-1-r. With keys of a lower rank, all
queries see the first half of the keys. With keys of a higher rank, the second half of the queries sees all keys. Either
way that is half of the (s/cp)² scores, without a mask, which attention kernels do fastest. Only a rank's own keys need
the causal mask; striped.py needs it in every step. No rank idles, and each sends as many bytes as in ring.py.

Parent:   05_context_ring/ring.py
Lesson:   shard, visible
Run:      torchrun --nproc_per_node 8 05_context_ring/zigzag.py
Source:   Ultra-Scale Playbook, "Zig-Zag Ring Attention"; zhuzilin/ring-flash-attention, issue 2
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, or gloo's threads outlive it and abort the process at exit
from einops import einsum, rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------------------ config
IGNORE = -100  # target of a token that must not be predicted: the first one of a document
BLOCK_GRADIENTS = 9  # so many gradients are summed by one collective: about those of a block
PENDING_PARTS = 4  # results of ring steps that are kept before one pass merges them: 2 cost time, 8 cost memory
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
    steps: int = 10  # fewer than in train.py: on two cores, processes wait long for each other in every layer
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


# ----------------------------------------------------------------------------------------------------- communication
def shard(cfg: Config, cp: dist.ProcessGroup) -> Tensor:
    """Return the positions [s/cp] that this rank holds, in its order, of every sequence of s = cfg.seq tokens.

    Inputs, targets (next tokens, found before the cut) and rotary angles are all cut by these.
    """
    if cp.size() > 1 and cfg.seq % (2 * cp.size()):
        raise ValueError(f"--seq {cfg.seq}: must be divisible by twice the {cp.size()} ranks")
    parts = torch.arange(cfg.seq, device=cfg.device).tensor_split(2 * cp.size())
    return torch.cat([parts[cp.rank()], parts[-1 - cp.rank()]])


def ring_exchange(x: Tensor, cp: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to send x to the next rank and to receive the previous rank's into a new tensor, which is returned.

    Wait on the work before you read the new tensor or write x.
    """
    buffer = torch.empty_like(x)
    send_sizes = [0] * cp.size()
    receive_sizes = [0] * cp.size()
    send_sizes[(cp.rank() + 1) % cp.size()] = len(x)
    receive_sizes[(cp.rank() - 1) % cp.size()] = len(x)
    # the bytes of x out and in per rank, as one all-to-all in which each rank has a message for its neighbour alone:
    # with 2 ranks, a send and a receive of their own would wait for each other
    work = dist.all_to_all_single(buffer, x, receive_sizes, send_sizes, group=cp, async_op=True)
    return buffer, work


def passing_keys(kv: Tensor, cp: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank with its keys and values kv: first this rank, then the one before it, and so on.

    The next keys arrive while the caller computes. Delete kv before the next iteration: else the keys of three ranks
    are in memory, not of two.
    """
    for step in range(cp.size() - 1):
        next_kv, work = ring_exchange(kv, cp)  # all of kv out and in per rank
        yield (cp.rank() - step) % cp.size(), kv
        work.wait()
        kv = next_kv
    yield (cp.rank() + 1) % cp.size(), kv  # the last step, size - 1 ranks before this one


def visible(rank: int, owner: int, s: int) -> tuple[slice, slice, bool] | None:
    """Return which of the s queries of rank see which of the s keys of owner, and whether causally; None if none do."""
    if owner == rank:
        return slice(0, s), slice(0, s), True
    if owner < rank:  # the first part of its keys comes before all queries, the second after all
        return slice(0, s), slice(0, s // 2), False
    return slice(s // 2, s), slice(0, s), False  # its keys lie between the two parts of the queries


# Beside the axes of the model, below: g key heads, each shared by n query heads; t keys.
def masked_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q [b, g·n, s, k], k [b, g, t, k] -> scaled scores [b, g, n, s, t], if causal -inf where t > s."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q = rearrange(q, "b (g n) s k -> b g n s k", g=k.shape[1])
    scale = q.shape[-1] ** -0.5
    scores = einsum(q.to(dtype), k.to(dtype), "b g n s k, b g t k -> b g n s t") * scale
    if not causal:
        return scores
    later = scores.new_ones(scores.shape[-2:]).triu(1).bool()  # s t
    return scores.masked_fill(later, -torch.inf)


def local_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend from q [b, h, s, k] to k, v [b, g, t, k]: output [b, h, s, k], log-sum-exp of the scores [b, h, s, 1].

    On GPUs in bf16 by cuDNN, the fastest that returns the log-sum-exp; it rounds the output to bf16. Elsewhere by plain
    matmuls in fp32 or above, with all scores in memory.
    """
    if q.is_cuda and q.dtype == torch.bfloat16:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
    scores = masked_scores(q, k, causal)
    lse = scores.logsumexp(-1, keepdim=True)
    o = einsum((scores - lse).exp(), v.to(scores.dtype), "b g n s t, b g t k -> b g n s k")
    o = rearrange(o, "b g n s k -> b (g n) s k")
    lse = rearrange(lse, "b g n s 1 -> b (g n) s 1")
    return o, lse


def local_attention_backward(
    do: Tensor, q: Tensor, o: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys add to dq, and what these queries add to dk and dv.

    o, its gradient do and lse must be those of attention to *all* keys: then exp(score - lse) is the probability of a
    key among all of them.
    """
    if q.is_cuda and q.dtype == torch.bfloat16:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout is off, the operator still takes its seed
        sizes = q.shape[2], k.shape[2]
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse.contiguous(), seed, seed, None, None, None, *sizes, 0.0, causal
        )
    scores = masked_scores(q, k, causal)
    q, o, do, lse = (rearrange(x, "b (g n) s k -> b g n s k", g=k.shape[1]) for x in (q, o, do, lse))
    q, k, v, o, do = (x.to(scores.dtype) for x in (q, k, v, o, do))
    p = (scores - lse).exp()  # b g n s t
    dv = einsum(p, do, "b g n s t, b g n s k -> b g t k")
    dp = einsum(do, v, "b g n s k, b g t k -> b g n s t")
    delta = (do * o).sum(-1, keepdim=True)  # b g n s 1
    ds = p * (dp - delta) * q.shape[-1] ** -0.5
    dq = einsum(ds, k, "b g n s t, b g t k -> b g n s k")
    dk = einsum(ds, q, "b g n s t, b g n s k -> b g t k")
    dq = rearrange(dq, "b g n s k -> b (g n) s k")
    return dq, dk, dv


def pack(k: Tensor, v: Tensor) -> Tensor:
    """k, v [b, g, s, k] -> [2, b, s, g, k], with a token's elements side by side, as the projections make them"""
    return torch.stack([rearrange(x, "b g s k -> b s g k") for x in (k, v)])


def unpack(kv: Tensor) -> Tensor:
    """Undo pack: kv [2, b, s, g, k] -> k and v, as one view [2, b, g, s, k]."""
    return rearrange(kv, "n b s g k -> n b g s k")


@torch.compile(dynamic=False, disable=not torch.cuda.is_available())  # one pass over memory
def merge(parts: list[tuple[slice, Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge attention to several sets of keys: for each set, queries, output [b, h, s, k], log-sum-exp [b, h, s, 1].

    The first part has all queries; its output may be overwritten. Outputs are averaged in fp32 or above, each weighted
    by the exponential of its log-sum-exp. With a sigmoid and logaddexp nothing overflows, however far apart these are.
    """
    _, o, lse = parts[0]
    o = o.to(lse.dtype)
    lse = lse.clone()
    for queries, o_part, lse_part in parts[1:]:
        weight = torch.sigmoid(lse_part - lse[:, :, queries])
        o[:, :, queries] = o[:, :, queries].lerp(o_part.to(o.dtype), weight)  # o + weight·(o_part - o)
        lse[:, :, queries] = torch.logaddexp(lse[:, :, queries], lse_part)
    return o.to(dtype), lse


@torch.compile(dynamic=False, disable=not torch.cuda.is_available())
def sum_parts(parts: list[tuple[slice, Tensor]], dtype: torch.dtype) -> Tensor:
    """Add up parts (queries, their gradient) in fp32 or above; the first part [b, h, s, k] has all queries."""
    _, total = parts[0]
    total = total.to(torch.promote_types(total.dtype, torch.float32))
    for queries, part in parts[1:]:
        total[:, :, queries] += part
    return total.to(dtype)


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys of all ranks, which pass by; see attention."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, cp: dist.ProcessGroup) -> Tensor:
        s = q.shape[2]
        dtype = torch.promote_types(q.dtype, torch.float32)
        parts = []  # queries, their output and log-sum-exp, for the keys of each rank
        for owner, kv in passing_keys(pack(k, v), cp):  # kv 2 b s g k
            pair = visible(cp.rank(), owner, s)
            if pair:
                queries, keys, causal = pair
                parts.append((queries, *local_attention(q[:, :, queries], *unpack(kv[:, :, keys]), causal)))
            del kv  # else three ranks' keys would be in memory, not two
            if len(parts) > PENDING_PARTS:
                parts = [(slice(0, s), *merge(parts, dtype))]
        o, lse = merge(parts, q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)  # this rank's tokens alone
        ctx.cp = cp
        return o

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, lse = ctx.saved_tensors
        cp = ctx.cp
        s = q.shape[2]
        dq_parts = []  # queries and their dq, for the keys of each rank
        # sums [2, b, s, g, k]: gradients of kv from all ranks that had these keys before. They pass one step behind kv.
        work = None  # the exchange that brings sums
        for owner, kv in passing_keys(pack(k, v), cp):
            pair = visible(cp.rank(), owner, s)
            if pair:
                queries, keys, causal = pair
                rows = [x[:, :, queries] for x in (do, q, o, lse)]
                dq, dk, dv = local_attention_backward(*rows, *unpack(kv[:, :, keys]), causal)
                dq_parts.append((queries, dq))
            del kv  # else three ranks' keys would be in memory, not two
            if len(dq_parts) > PENDING_PARTS:
                dq_parts = [(slice(0, s), sum_parts(dq_parts, lse.dtype))]
            if owner == cp.rank():
                dkv = pack(dk, dv)  # of this rank's keys; added when the other ranks' sums have come back
                continue
            if work:
                work.wait()
            else:
                sums = dkv.new_zeros(dkv.shape, dtype=lse.dtype)
            if pair:
                sums[:, :, keys] += pack(dk, dv)
            sums, work = ring_exchange(sums, cp)  # the next sums arrive during the next attention
        if work:
            work.wait()  # after the last hop, sums are those of this rank's keys
            dkv = sums + dkv
        return sum_parts(dq_parts, q.dtype), *unpack(dkv.to(k.dtype)), None


@torch.compiler.disable  # a compiler would wait for communication where it begins
def attention(q: Tensor, k: Tensor, v: Tensor, cp: dist.ProcessGroup) -> Tensor:
    """Exact causal attention over whole sequences; each rank holds the tokens that `shard` gives it.

    q [b, h, s/cp, k] and k, v [b, g, s/cp, k] -> o like q.
    """
    with torch.autocast(q.device.type, enabled=False):  # plain matmuls stay in fp32
        return RingAttention.apply(q, k, v, cp)


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

    def __init__(self, cfg: Config, cp: dist.ProcessGroup):
        super().__init__()
        self.cp = cp
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
        o = attention(q, k, v, self.cp)  # b h s/cp k
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

    def __init__(self, cfg: Config, cp: dist.ProcessGroup):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg)
        self.self_attn = Attention(cfg, cp)
        self.post_attention_layernorm = RMSNorm(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Model(nn.Module):
    """Llama 3 with an untied head. Parameters have the names and shapes of transformers.LlamaForCausalLM."""

    def __init__(self, cfg: Config, cp: dist.ProcessGroup):
        super().__init__()
        self.cfg = cfg
        self.cp = cp  # the ranks that split every sequence
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.model.layers = nn.ModuleList(Block(cfg, cp) for _ in range(cfg.layers))
        self.model.norm = RMSNorm(cfg)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s/cp] -> logits [b, s/cp, v], of the tokens that shard gives this rank"""
        rope = rope_table(self.cfg, shard(self.cfg, self.cp))
        x = self.model.embed_tokens(ids).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
        for block in self.model.layers:
            x = block(x, rope)
        return self.lm_head(self.model.norm(x))


# ---------------------------------------------------------------------------------------------------------- training
def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> sum of the losses of the valid targets"""
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        logits = model(inputs).flatten(0, 1)
        return model.loss(logits, targets.flatten())


def backward_and_sum(model: nn.Module, loss: Tensor, group: dist.ProcessGroup) -> None:
    """Run backward; start to sum gradients over the group, a few at a time, as soon as this rank has them.

    The ranks of the group have the same weights, of one dtype, and use all of them, each for other tokens: on a mesh
    the ranks of dp and cp. Call it once per step. With activation checkpointing, set use_reentrant=False: else the hook
    of a weight that is used twice fires twice, and its gradient is summed twice.
    """
    gradients = []  # of this backward, in one order on all ranks, which run through the same graph
    parameters = set()  # whose gradients this backward has computed
    reductions = []

    def reduce() -> None:
        # the group's own method: dist.all_reduce_coalesced, which calls it, warns that it will be deprecated
        # 2 (n-1)/n of their bytes out and in per rank, for n ranks; overlaps with backward
        reductions.append(group.allreduce_coalesced(gradients[:]))
        gradients.clear()

    def hook(p: Tensor) -> None:
        gradients.append(p.grad)
        parameters.add(p)
        if len(gradients) == BLOCK_GRADIENTS:
            reduce()

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]
    try:
        loss.backward()
    finally:  # after an error, too: the next backward would reduce twice
        for handle in handles:
            handle.remove()
    others = [p for p in model.parameters() if p not in parameters]  # that only earlier micro-batches used
    gradients += [p.grad for p in others if p.grad is not None]
    if gradients:
        reduce()
    for reduction in reductions:
        reduction.wait()


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in .grad"""
    tokens = (targets != IGNORE).sum()
    positions = shard(cfg, model.cp)
    if inputs.shape[1] != len(positions) * model.cp.size():
        raise ValueError(f"sequences have {inputs.shape[1]} tokens: must have --seq {cfg.seq}, which cp divides")
    inputs = inputs.to(cfg.device)[:, positions]  # b s/cp
    targets = targets.to(cfg.device)[:, positions]
    loss = forward(cfg, model, inputs, targets) / tokens
    backward_and_sum(model, loss, model.cp)
    loss = loss.detach()
    dist.all_reduce(loss, group=model.cp)  # one element, for the log
    return loss


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
    positions = shard(cfg, model.cp)
    if inputs.shape[1] != len(positions) * model.cp.size():
        raise ValueError(f"sequences have {inputs.shape[1]} tokens: must have --seq {cfg.seq}, which cp divides")
    inputs = inputs.to(cfg.device)[:, positions]  # b s/cp
    targets = targets.to(cfg.device)[:, positions]
    loss = forward(cfg, model, inputs, targets)
    dist.all_reduce(loss, group=model.cp)  # one element
    return loss / tokens


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
    if dist.get_rank() == 0:  # all replicas are the same
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
        (world < 1, f"start it with torchrun --nproc_per_node 8 {os.path.relpath(__file__)}"),
        (cfg.seq % max(1, 2 * world), f"--seq {cfg.seq}: must be divisible by {2 * world}, two parts per process"),
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
# Plumbing: check
# Copy:     shard, ring_exchange, passing_keys, visible, masked_scores, local_attention, local_attention_backward, pack,
#           unpack, merge, sum_parts, PENDING_PARTS, RingAttention, attention, BLOCK_GRADIENTS, backward_and_sum,
#           evaluate
# Use:      1. Cut inputs, targets and positions by shard, as forward_backward and Model.forward do. Targets are the
#              next tokens, shifted before the cut (transformers' labels are not shifted). Twice cp must divide the
#              sequence.
#           2. Divide the loss by the valid tokens of the whole batch, counted before the cut.
#           3. Call attention with rotated q and k.
#           4. Call backward_and_sum for the last micro-batch of a step, loss.backward() for the others.
# Mind:     - attention has no padding mask, no dropout, and the scale k**-0.5: if your model has others, raise an
#             error.
#           - No gradients of gradients: with create_graph=True they are wrong, or an error.
# Needs:    cfg.device, cfg.seq, model.cp, IGNORE, forward
# Together: - Data parallelism: the group of backward_and_sum is all ranks of dp and cp.
#           - ZeRO: units are over dp and cp, and so is model.world for clip_gradients. Call loss.backward():
#             backward_and_sum would sum twice. Take this file's evaluate.
