"""Static slots: each rank has a fixed number of slots for rows, so that the CPU never waits to learn their number.

1. A rank has slots for slots·t·top_k rows, as many for each rank that they come from. Ranks exchange counts, and the
   GPU finds the slot of each row: the CPU never reads them.
2. An all-to-all moves all slots, full and empty: (ep-1)/ep·slots·t·top_k·d elements, twice in forward and twice in
   backward. Rows are then sorted by expert, empty slots last, and the grouped matmul reads the full ones alone.
3. If a row finds no slot, a flag on all ranks makes the optimizer skip the step. The CPU adds slots and repeats it.

Parent:   07_expert/expert_parallel.py, 07_expert/capacity.py
Lesson:   Config, Memory, Route, exchange, find_slots, dispatch, combine, one_by_one, MLP, overflow, grow, train_step,
          train
Run:      torchrun --nproc_per_node 8 07_expert/slots.py
Source:   Lepikhin et al. 2020, GShard, arXiv:2006.16668 (static shapes); torch.amp.GradScaler (skipped steps)
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
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
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

# ------------------------------------------------------------------------------------------------------------ config
IGNORE = -100  # target of a token that must not be predicted: the first one of a document
PEAK_FLOPS = {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989.5e12, "NVIDIA H200": 989.5e12}  # bf16
# Shapes of Mixtral 8x7B, OLMoE-1B-7B and Qwen3-30B-A3B. Attention stays Llama's: OLMoE and Qwen3 also normalise queries
# and keys, and Qwen3's heads are 128 wide, not dim / heads. OLMoE does not renormalise its gates; here all do.
PRESETS = {
    "tiny": {},  # the defaults below: for laptops
    "mixtral_8x7b": dict(
        layers=32, dim=4096, heads=32, kv_heads=8, ffn=14336, experts=8, top_k=2, vocab=32000, theta=1e6, lr=3e-4
    ),
    "olmoe_1b_7b": dict(
        layers=16, dim=2048, heads=16, kv_heads=16, ffn=1024, experts=64, top_k=8, vocab=50304, theta=1e4, lr=3e-4
    ),
    "qwen3_30b_a3b": dict(
        layers=48, dim=2048, heads=32, kv_heads=4, ffn=768, experts=128, top_k=8, vocab=151936, theta=1e6, lr=3e-4
    ),
}


@dataclass(frozen=True)
class Config:
    """Every field is a flag. Flags override the preset, which overrides these defaults."""

    preset: Literal[tuple(PRESETS)] = "tiny"
    layers: int = 8
    dim: int = 128
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 192  # of one expert
    experts: int = 8
    top_k: int = 2  # experts per token
    vocab: int = 256
    theta: float = 5e5  # base of the RoPE wavelengths
    rope_factor: float = 1.0  # Llama 3.1 and 3.2 stretch long wavelengths by this factor
    seq: int = 128
    batch: int = 16  # sequences per step, over all ranks
    steps: int = 12
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
    edp: int = 1  # ranks that hold a copy of each expert; the others share out the experts
    slots: float = 4.0  # slots of a rank, over the rows that it gets if experts are equally busy; more when too few


# ----------------------------------------------------------------------------------------------------- communication
class AllToAll(torch.autograd.Function):
    """Send the i-th of ep equal parts of x to rank i; return the parts from all ranks. Backward is the same."""

    @staticmethod
    def forward(ctx, x: Tensor, ep: dist.ProcessGroup) -> Tensor:
        ctx.ep = ep
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(y, x.contiguous(), group=ep)  # (ep-1)/ep of its bytes out and in
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        dx = AllToAll.apply(dy, ctx.ep)
        return dx, None


@dataclass
class Memory:
    """How many rows a rank has slots for, in all layers alike; n is t·top_k."""

    ep: dist.ProcessGroup
    slots: float  # slots of a rank, over n; at most ep: then all rows of all ranks could come to this one
    shortage: Tensor  # [] the largest `slots` that was needed since grow, where it was above `slots`; else 0


@dataclass(frozen=True)
class Route:
    """How the rows of one layer travel. Each rank's send buffer has as many slots for every rank."""

    send_order: Tensor  # [slots·n] the row in each slot of the send buffer; any row in an empty one
    send_inverse: Tensor  # [n] the slot of each row
    expert_order: Tensor  # [slots·n] sorts the slots of the receive buffer by this rank's experts, empty ones last
    expert_inverse: Tensor  # [slots·n] its inverse permutation
    k: int  # rows per token


@torch.compiler.disable  # torch 2.11 loses the gradient of the all-to-all
def exchange(x: Tensor, ep: dist.ProcessGroup) -> Tensor:
    """Exchange equal parts of x between the ranks of ep, as AllToAll does."""
    return AllToAll.apply(x, ep)


@torch.compiler.disable  # a compiler would take the number of slots for a constant, and fail when it grows
def find_slots(inverse: Tensor, ends: Tensor, memory: Memory) -> tuple[Tensor, Tensor, Tensor]:
    """Find Route.send_order and Route.send_inverse, and the number of rows that go to each expert, [ep, e/ep].

    inverse, ends: as sort_by_expert returns them. Writes memory.shortage where slots are too few.
    """
    ep, n = memory.ep.size(), len(inverse)
    size = math.ceil(memory.slots * n / ep)  # slots for the rows from one rank to another
    send_counts = ends.diff(prepend=ends.new_zeros(1)).view(ep, -1)  # ep e/ep
    send_sizes = send_counts.sum(1)  # ep
    most = send_sizes.max()
    shortage = torch.where(most > size, most * ep / n, 0)
    memory.shortage = torch.maximum(memory.shortage, shortage)
    rank_ends = send_sizes.cumsum(0)  # ep, where each rank's rows end, among those sorted by expert
    rank = torch.searchsorted(rank_ends, inverse, right=True)  # n, to which each row goes
    slot = inverse - (rank_ends - send_sizes)[rank]  # n, its number among the rows to that rank
    send_inverse = rank * size + slot.clamp(max=size - 1)  # rows without a slot share the last: the step is repeated
    send_order = torch.zeros(ep * size, dtype=torch.long, device=ends.device)
    send_order.scatter_(0, send_inverse, torch.arange(n, device=ends.device))
    return send_order, send_inverse, send_counts


def dispatch(
    x: Tensor, gates: Tensor, inverse: Tensor, ends: Tensor, memory: Memory
) -> tuple[Tensor, Tensor, Tensor, Route]:
    """Send tokens x [t, d] and their gates [t, top_k] to the ranks of their experts. inverse, ends: sort_by_expert.

    Return the rows for this rank's experts [slots·n, d], sorted by expert, with the empty slots behind them; their
    gates [slots·n, 1]; the ends [e/ep] of the experts' blocks; and the route, for combine.
    """
    k = gates.shape[1]
    send_order, send_inverse, send_counts = find_slots(inverse, ends, memory)
    x = Permute.apply(x, send_order, send_inverse, k)
    gates = Permute.apply(gates.view(-1, 1), send_order, send_inverse, 1)
    x = exchange(x, memory.ep)
    gates = exchange(gates, memory.ep)
    receive_counts = exchange(send_counts, memory.ep)  # ep e/ep, rows from each rank to this rank's experts
    size = len(x) // memory.ep.size()  # slots for the rows from one rank to another
    slot = torch.arange(size, device=x.device).repeat(memory.ep.size(), 1)  # ep size
    expert_ends = receive_counts.cumsum(1)  # ep e/ep
    experts = torch.searchsorted(expert_ends, slot, right=True)  # ep size, e/ep in empty slots
    expert_order, expert_inverse, ends = sort_by_expert(experts, receive_counts.shape[1])
    x = Permute.apply(x, expert_order, expert_inverse, 1)
    gates = Permute.apply(gates, expert_order, expert_inverse, 1)
    return x, gates, ends, Route(send_order, send_inverse, expert_order, expert_inverse, k)


def combine(y: Tensor, route: Route, memory: Memory) -> Tensor:
    """Send the experts' outputs y [slots·n, d] back to their tokens, and add those of each: [t, d]."""
    y = Unpermute.apply(y, route.expert_order, route.expert_inverse, 1)
    y = exchange(y, memory.ep)
    return Unpermute.apply(y, route.send_order, route.send_inverse, route.k)


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


# More axes: e experts, t tokens of all sequences, n = t·top_k rows: each is a token for one of its experts.
class Router(nn.Module):
    """Choose top_k experts for each token, and the gates by which their outputs are weighted."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.top_k = cfg.top_k
        self.weight = nn.Linear(cfg.dim, cfg.experts, bias=False).weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [t, d] -> gates [t, top_k], which are differentiable and add up to 1 if top_k > 1; experts [t, top_k]"""
        fp32 = x.to(torch.promote_types(x.dtype, torch.float32))  # in bf16 close scores would be equal
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(fp32, self.weight.to(fp32.dtype))  # t e
            probabilities = logits.softmax(-1)
        gates, experts = probabilities.topk(self.top_k)
        if self.top_k == 1:
            return gates, experts  # as Switch: renormalised it would always be 1, and the router would not learn
        return gates / gates.sum(-1, keepdim=True), experts


def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows n = (t top_k) of experts [t, top_k] by expert, without waiting for the GPU.

    Returns order [n]: sorted row i is row order[i]; inverse [n]: row i is sorted row inverse[i]; and ends [e], int32:
    the sorted rows of expert i, one of `count`, end before row ends[i].
    """
    sorted_experts, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(count, device=experts.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    rows = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, rows)
    return order, inverse, ends


class Permute(torch.autograd.Function):
    """Copy each token to its k rows, in sorted order: x [t, d] -> [n, d], where row i is token order[i] // k.

    Backward is Unpermute; that of plain indexing would sort the indices again, or add row by row with atomics.
    """

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        dx = Unpermute.apply(dy, order, inverse, ctx.k)
        return dx, None, None, None


class Unpermute(torch.autograd.Function):
    """Add the k rows of each token: x [n, d], in sorted order -> [t, d]. Backward is Permute."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.k = k
        if k == 1:
            return x[inverse]  # without the sums below, which uncompiled move six times the bytes
        dtype = torch.promote_types(x.dtype, torch.float32)  # of the sums
        # k terms written out compile to one kernel that reads whole rows; .sum() over an axis of k is far slower
        columns = inverse.view(-1, k).unbind(1)  # k columns [t]: a row of each token
        y = sum(x[rows].to(dtype) for rows in columns)
        # torch 2.11 compiles a .to that changes nothing, at the end of a Function, to gradients of 0
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        dx = Permute.apply(dy, order, inverse, ctx.k)
        return dx, None, None, None


def grouped_matmul(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each block of rows by the matrix of its expert: x [n, d], w [e, f, d] -> [n, f]. ends: sort_by_expert.

    An expert without rows has a gradient of zeros.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return nn.functional.grouped_mm(x, w.to(x.dtype).mT, offs=ends)  # one kernel; the sizes stay on the GPU
    return one_by_one(x, w, ends)


@torch.compiler.disable  # the number of rows of an expert is known only when it runs
def one_by_one(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Do what grouped_matmul does with a matmul per expert, in any dtype and on any device."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()  # waits for the GPU
    empty = len(x) - sum(sizes)
    blocks = [rows @ matrix.T for rows, matrix in zip(x.split([*sizes, empty]), w)]
    padding = blocks[0].new_zeros(empty, w.shape[1])
    return torch.cat([*blocks, padding])


class Experts(nn.Module):
    """One SwiGLU per expert (arXiv:2002.05202)."""

    def __init__(self, cfg: Config, ep: dist.ProcessGroup):
        super().__init__()
        experts = cfg.experts // ep.size()  # of this rank
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * cfg.ffn, cfg.dim))  # both in one matmul
        self.down_proj = nn.Parameter(torch.empty(experts, cfg.dim, cfg.ffn))
        for p in self.parameters():
            bound = p.shape[-1] ** -0.5  # that of nn.Linear, for each expert
            nn.init.uniform_(p, -bound, bound)

    def forward(self, x: Tensor, gates: Tensor, ends: Tensor) -> Tensor:
        """x [n, d] and gates [n, 1], sorted by expert -> the experts' outputs times the gates, [n, d]

        down_proj is linear: what it reads may be multiplied as well. Then backward does not need the outputs.
        """
        gate, up = grouped_matmul(x, self.gate_up_proj, ends).chunk(2, dim=-1)
        hidden = (nn.functional.silu(gate) * up * gates).to(x.dtype)  # n f
        return grouped_matmul(hidden, self.down_proj, ends)


class MLP(nn.Module):
    """Experts: each token goes through top_k of them, and this rank holds e/ep."""

    def __init__(self, cfg: Config, memory: Memory):
        super().__init__()
        self.memory = memory
        self.top_k = cfg.top_k
        self.gate = Router(cfg)
        self.experts = Experts(cfg, memory.ep)
        rows = torch.zeros(cfg.experts, dtype=torch.long)
        self.register_buffer("rows", rows, persistent=False)  # of each expert, in this step

    def forward(self, x: Tensor) -> Tensor:
        tokens = rearrange(x, "b s d -> (b s) d")
        gates, experts = self.gate(tokens)
        _, inverse, ends = sort_by_expert(experts, len(self.rows))
        if torch.is_grad_enabled():  # not in a validation
            self.rows += ends.diff(prepend=ends.new_zeros(1))
        rows, gates, ends, route = dispatch(tokens, gates, inverse, ends, self.memory)
        y = self.experts(rows, gates, ends)
        return combine(y, route, self.memory).view_as(x)


class Block(nn.Module):
    """Attention, then MLP; each reads a normalised residual stream and adds to it."""

    def __init__(self, cfg: Config, memory: Memory):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg)
        self.mlp = MLP(cfg, memory)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Model(nn.Module):
    """Llama 3 with experts. Parameters have the names and shapes of transformers.MixtralForCausalLM in memory."""

    def __init__(self, cfg: Config, dp: dist.ProcessGroup, ep: dist.ProcessGroup, edp: dist.ProcessGroup):
        super().__init__()
        self.cfg = cfg
        self.dp, self.ep, self.edp = dp, ep, edp
        self.memory = Memory(ep, min(cfg.slots, ep.size()), torch.zeros((), device=cfg.device))  # of all blocks
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.model.layers = nn.ModuleList(Block(cfg, self.memory) for _ in range(cfg.layers))
        self.model.norm = RMSNorm(cfg)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> logits [b, s, v]"""
        rope = rope_table(self.cfg, torch.arange(ids.shape[1], device=ids.device))
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


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in .grad"""
    tokens = (targets != IGNORE).sum()
    rank, dp = model.dp.rank(), model.dp.size()
    inputs = inputs.chunk(dp)[rank].to(cfg.device)  # b/dp s
    targets = targets.chunk(dp)[rank].to(cfg.device)
    loss = forward(cfg, model, inputs, targets) / tokens
    loss.backward()
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, p in parameters:
        if p.grad is None:  # this rank did not use it; the other ranks would wait for its all-reduce forever
            p.grad = torch.zeros_like(p)
        # an expert's gradient holds the tokens of all ep ranks already: only those of its copies are summed
        group = model.edp if ".experts." in name else model.dp
        dist.all_reduce(p.grad, group=group)  # 2 (n-1)/n of its bytes out and in, for n ranks
    loss = loss.detach()
    dist.all_reduce(loss, group=model.dp)  # one element, for the log
    return loss


def clip_gradients(cfg: Config, model: Model) -> Tensor:
    """Clip the global gradient norm to --clip; return the norm before clipping."""
    gradients = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    experts = [gradient for name, gradient in gradients if ".experts." in name]
    others = [gradient for name, gradient in gradients if ".experts." not in name]  # the same on all ranks
    squares = nn.utils.get_total_norm(experts).to(cfg.device) ** 2
    squares = squares / model.edp.size()  # edp ranks have the same experts
    # one element. Not over ep: if groups rounded differently, they would also clip differently
    dist.all_reduce(squares, group=model.dp)
    squares = nn.utils.get_total_norm(others) ** 2 + squares
    norm = squares.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), cfg.clip, norm)
    return norm


def count_rows(model: Model) -> Tensor:
    """Return the rows of each expert in this step, [layers, e]; count from 0 again."""
    rows = torch.stack([block.mlp.rows for block in model.model.layers]).float()  # layers e
    dist.all_reduce(rows, group=model.dp)  # 4 bytes per layer and expert
    for block in model.model.layers:
        block.mlp.rows.zero_()
    return rows


def measure_imbalance(rows: Tensor) -> Tensor:
    """Return the rows of the busiest expert over the mean of its layer, in the worst layer."""
    loads = rows.amax(1) / rows.mean(1)  # layers
    return loads.amax()


def overflow(model: Model) -> Tensor:
    """Return 1, on all ranks, if any of them had too few slots since the last call of grow; else 0."""
    dist.all_reduce(model.memory.shortage, dist.ReduceOp.MAX, group=model.dp)  # one element
    return (model.memory.shortage > 0).float()


def grow(model: Model, when: str) -> None:
    """Set slots to what was needed, rounded up to the next quarter, and print that. All ranks grow alike."""
    slots = model.memory.slots
    shortage = model.memory.shortage.item() // 0.25 * 0.25 + 0.25
    model.memory.slots = min(model.ep.size(), max(slots, shortage))
    model.memory.shortage.zero_()
    if model.dp.rank() == 0:
        print(f"{when}: --slots {slots:g} held too few rows, grown to {model.memory.slots:g}", flush=True)


def train_step(cfg: Config, model: Model, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor):
    """Run one optimizer step on the global batch [b, s]; return loss, gradient norm and the busiest expert's load."""
    loss = forward_backward(cfg, model, inputs, targets)
    norm = clip_gradients(cfg, model)
    optimizer.found_inf = overflow(model)  # where it is 1, fused AdamW does nothing; the CPU does not wait
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm, measure_imbalance(count_rows(model))


@torch.no_grad()
def evaluate(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, on all ranks, without gradients"""
    if len(inputs) % model.dp.size():
        raise ValueError(
            f"{len(inputs)} sequences: must be divisible by the {model.dp.size()} ranks, which have equal slots"
        )
    tokens = (targets != IGNORE).sum()
    rank, dp = model.dp.rank(), model.dp.size()
    inputs = inputs.tensor_split(dp)[rank].to(cfg.device)  # b/dp s
    targets = targets.tensor_split(dp)[rank].to(cfg.device)
    loss = forward(cfg, model, inputs, targets)
    while overflow(model):  # waits for the GPU
        grow(model, "validation")
        loss = forward(cfg, model, inputs, targets)
    dist.all_reduce(loss, group=model.dp)  # one element
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
        "block_sparse_moe.gate": [cfg.experts, d],
    }
    for i in range(cfg.experts):
        expert = f"block_sparse_moe.experts.{i}"
        block |= {f"{expert}.w1": [f, d], f"{expert}.w2": [d, f], f"{expert}.w3": [f, d]}  # gate, down, up
    shapes = {"model.embed_tokens": [v, d], "model.norm": [d], "lm_head": [v, d]}
    for i in range(cfg.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def view_as_published(weights: dict[str, Tensor], first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield names and views as in published Mixtral checkpoints: matrices w1 (gate), w2 (down), w3 (up) per expert.

    first: the number of the first expert in these weights.
    """
    for name, tensor in weights.items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        module, _, parameter = name.rpartition(".")
        if not module.endswith(".experts"):
            yield name, tensor
            continue
        stacks = {"w2": tensor}  # e d f
        if parameter == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=-2)
            stacks = {"w1": gate, "w3": up}  # e f d
        for matrix, stack in stacks.items():
            for i, expert in enumerate(stack, first):
                yield f"{module}.{i}.{matrix}.weight", expert


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
    """Build the model with this rank's experts, tensor by tensor, so that at most one full tensor is held twice.

    dp is all ranks: they train what is not an expert. ep shares out the experts, edp holds copies of the same.
    """
    ep_size = dist.get_world_size() // cfg.edp
    mesh = init_device_mesh(cfg.device, (cfg.edp, ep_size), mesh_dim_names=("edp", "ep"))
    ep, edp = mesh["ep"].get_group(), mesh["edp"].get_group()
    with torch.device("meta"):
        model = Model(cfg, dist.group.WORLD, ep, edp)
    model.to_empty(device=cfg.device)
    with torch.no_grad():
        first = ep.rank() * cfg.experts // ep.size()  # of this rank's experts
        for name, tensor in view_as_published(dict(model.named_parameters()), first):
            tensor.copy_(full_tensor(cfg, name, tensor.shape))
        for buffer in model.buffers():
            buffer.zero_()
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
    Of the experts those count through which a token goes.
    """
    kv = cfg.dim // cfg.heads * cfg.kv_heads
    attention = 2 * cfg.dim * cfg.dim + 2 * cfg.dim * kv
    experts = 3 * cfg.dim * cfg.ffn * cfg.top_k + cfg.dim * cfg.experts  # and their router
    weights = cfg.layers * (attention + experts) + cfg.dim * cfg.vocab
    return 6 * weights + 6 * cfg.layers * cfg.dim * cfg.seq


def log(cfg: Config, label: str, loss: float, norm: float, seconds: float, load: float) -> None:
    """Print one line for a step that took `seconds`. MFU: model FLOPs per second over the GPU's dense bf16 peak."""
    speed = cfg.batch * cfg.seq / seconds / dist.get_world_size()
    gpu = torch.cuda.get_device_name() if cfg.device == "cuda" else "cpu"
    mfu = f"{speed * flops_per_token(cfg) / PEAK_FLOPS[gpu]:.1%}" if gpu in PEAK_FLOPS else "-"
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cfg.device == "cuda" else "-"
    tail = f"tokens/s/GPU {speed:,.0f}  MFU {mfu}  memory {memory}"
    if dist.get_rank() == 0:
        print(f"{label:>9}  loss {loss:.4f}  gradient norm {norm:.3f}  busiest expert {load:.2f}x  {tail}", flush=True)


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


def save(cfg: Config, model: Model, history: list[tuple[float, float, float, float]]) -> None:
    """Write the weights for transformers; the metadata holds config and [loss, norm, seconds, load] per step.

    All ranks take part: each tensor of experts is gathered on all of them, one after another; rank 0 collects them on
    its CPU.
    """
    weights = {}
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            full = tensor.new_empty(model.ep.size() * len(tensor), *tensor.shape[1:])
            # 1/ep of the bytes of full out and the rest in per rank
            dist.all_gather_into_tensor(full, tensor, group=model.ep)
            tensor = full
        if dist.get_rank() == 0:
            weights[name] = tensor.cpu()
    if dist.get_rank() == 0:
        write_weights(cfg, dict(view_as_published(weights)), history)


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
        loss, norm, load = train_step(cfg, model, optimizer, *batch)
        next_batch = make_batch(cfg, data, step + 1)  # while the GPU is still busy
        while optimizer.found_inf:  # waits for the GPU; no weight has changed
            grow(model, f"step {step + 1}")
            loss, norm, load = train_step(cfg, model, optimizer, *batch)
        batch = next_batch
        loss, norm, load = loss.item(), norm.item(), load.item()  # waits for the GPU
        if not math.isfinite(loss + norm):
            raise SystemExit(f"step {step + 1}: loss {loss}, gradient norm {norm}; try a lower --lr or more --warmup")
        history.append((loss, norm, time.perf_counter() - start, load))
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
    wanted = dict(model_type="mixtral", hidden_act="silu", rms_norm_eps=1e-5, num_attention_heads=cfg.heads)
    wanted |= dict(num_experts_per_tok=cfg.top_k)
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
        (cfg.batch % max(1, world), f"--batch {cfg.batch}: must be divisible by the number of processes, {world}"),
        (max(1, world) % cfg.edp, f"--edp {cfg.edp}: must divide the number of processes, {world}"),
        (
            cfg.experts % max(1, world // cfg.edp),
            f"--experts {cfg.experts}: must be divisible by the ranks that share them, {world // cfg.edp}",
        ),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.top_k > cfg.experts, f"--top_k {cfg.top_k}: must be at most --experts {cfg.experts}"),
        (
            cfg.dtype == "bfloat16" and cfg.device == "cuda" and math.gcd(cfg.dim, cfg.ffn) % 8,
            f"--ffn {cfg.ffn}: it and --dim {cfg.dim} must be multiples of 8, for matmuls of bfloat16",
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
# Plumbing: Block.__init__, Model.__init__, evaluate
# Copy:     AllToAll, Memory, Route, exchange, find_slots, dispatch, combine, Router, sort_by_expert, Permute,
#           Unpermute, grouped_matmul, one_by_one, Experts, MLP, clip_gradients, overflow, grow, evaluate (the optimizer
#           must be AdamW with fused=True, which leaves out a step that has to be repeated; Model.__init__ shows how to
#           make Memory, train_step and train how to repeat a step)
# Needs:    cfg.clip, cfg.device, cfg.dim, cfg.experts, cfg.ffn, cfg.top_k, model.dp, model.edp, model.ep, model.memory,
#           ".experts.", IGNORE, forward
