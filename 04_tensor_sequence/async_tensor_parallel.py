"""Asynchronous tensor parallelism: matmuls in pieces; one computes while the tokens of the next are in flight.

1. Column-parallel weights multiply a rank's own tokens first, while those of the other ranks arrive.
2. Row-parallel weights multiply the other ranks' tokens first; each product is sent while the next is computed.
3. Copy engines move the data through symmetric memory over NVLink, on one host: NCCL's kernels would take SMs.
Bytes: as sequence_parallel.py, exposed only where copies take longer than the matmuls. Partial sums are added in fp32.
Memory: 3 + 2/tp times n·d activations more than sequence_parallel.py, for send and receive buffers.

Parent:   04_tensor_sequence/sequence_parallel.py, 02_data_parallel/copy_engines.py
Lesson:   Shared, sum_products, start_gather, multiply_and_send, wait_and_multiply, ColumnParallel, RowParallel,
          make_shared
Run:      torchrun --nproc_per_node 8 04_tensor_sequence/async_tensor_parallel.py
Source:   Wang et al. 2023, ASPLOS, doi:10.1145/3567955.3567959; Jangda et al. 2022, CoCoNet, arXiv:2105.05720
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
import warnings
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from glob import glob
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.distributed.nn  # before there is a group, or gloo's threads outlive it and abort the process at exit
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------------------ config
IGNORE = -100  # target of a token that must not be predicted: the first one of a document
VOCABULARY = "model.embed_tokens.weight", "lm_head.weight"  # tensors with a row per vocabulary id
# The axis of a weight [out, in] along which a layer is split: 0 is column-parallel, 1 is row-parallel.
SPLIT = dict(q_proj=0, k_proj=0, v_proj=0, o_proj=1, gate_proj=0, up_proj=0, down_proj=1, embed_tokens=0, lm_head=0)
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
    steps: int = 20  # half the root's: on two cores, processes wait long for each other in every layer
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
class ReduceFromTP(torch.autograd.Function):
    """All-reduce the partial outputs where split weights end (Megatron's g); backward is the identity.

    Add the bias of a row-parallel layer after ReduceFromTP: before it, the bias would count tp times.
    """

    @staticmethod
    @torch.compiler.disable  # torch 2.11 gives no gradient to a sum that it has compiled
    def forward(ctx, x: Tensor, tp: dist.ProcessGroup) -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=tp)  # 2 (tp-1)/tp of the bytes of x out and in per rank
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def share(
    elements: int, dtype: torch.dtype, device: str, group: dist.ProcessGroup
) -> tuple[list[Tensor], Callable[[], None]]:
    """Allocate symmetric memory; return every rank's tensor [elements], readable and writable by all, and a barrier.

    On GPUs the others' tensors are mapped over NVLink; the barrier blocks the current stream. On CPUs each tensor is a
    file that all ranks map; the barrier blocks the process. All ranks of the group must be on one host.
    """
    if device == "cuda":
        gpu = torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(gpu)):  # counted by torch.cuda.memory_allocated
            buffer = torch.empty(elements, dtype=dtype, device=gpu)
        handle = symmetric_memory.rendezvous(buffer, group)
        buffers = [handle.get_buffer(r, buffer.shape, dtype) for r in range(group.size())]
        buffers[group.rank()] = buffer
        return buffers, handle.barrier
    folder = [tempfile.mkdtemp() if group.rank() == 0 else None]
    dist.broadcast_object_list(folder, group=group, group_src=0)  # a path, from rank 0
    files = [f"{folder[0]}/{r}" for r in range(group.size())]
    tensors = [torch.from_file(file, shared=True, size=elements, dtype=dtype) for file in files]
    dist.barrier(group)  # no data; all ranks have mapped the files, which may be unlinked
    shutil.rmtree(folder[0], ignore_errors=True)
    return tensors, partial(dist.barrier, group)


def gather_tokens(x: Tensor, tp: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to gather the n = b·s tokens of all ranks, [n/tp, d] -> [n, d]. Wait on the work before you read them."""
    full_x = x.new_empty(tp.size() * x.shape[0], *x.shape[1:])
    # (tp-1)/tp of the bytes of full_x in and out per rank
    return full_x, dist.all_gather_into_tensor(full_x, x.contiguous(), group=tp, async_op=True)


def reduce_scatter_tokens(full_x: Tensor, tp: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to sum the ranks' [n, d]; each rank gets the sums of its tokens, [n/tp, d]. Wait before you read them."""
    x = full_x.new_empty(full_x.shape[0] // tp.size(), *full_x.shape[1:])
    # (tp-1)/tp of the bytes of full_x out and in per rank
    return x, dist.reduce_scatter_tensor(x, full_x.contiguous(), group=tp, async_op=True)


@dataclass(eq=False)
class Shared:
    """Symmetric memory in which the ranks exchange tokens: two buffers per rank, used in turn.

    Slot r < tp of a buffer [tp + 1, n/tp, d] receives rank r's part of a sum. The last slot holds this rank's tokens,
    for the others to copy. Every operation has one barrier, on the copy stream. After it, all ranks are done with the
    buffer of the previous operation, so the next operation may fill it. In backward, multiply_and_send may write slot
    `rank` before the barrier of start_gather. No other rank may read that slot, so the tokens have one of their own.
    """

    tp: dist.ProcessGroup
    buffers: list[tuple[Tensor, ...]]  # by turn and rank
    send_buffer: Tensor  # [tp, n/tp, d], of this rank alone: products on their way to the other ranks
    barrier: Callable[[], None]
    device: ModuleType  # torch.cuda; or torch.cpu, whose streams and events do nothing: there everything is immediate
    stream: torch.Stream  # of copies and barriers
    sum_products: Callable[[Tensor], Tensor]  # the function below, compiled if the blocks are
    turn: int = 0


def sum_products(parts: Tensor) -> Tensor:
    """Sum the ranks' parts, [tp, n/tp, d] -> [n/tp, d], rounded once."""
    return parts.sum(0, dtype=parts.dtype)  # without dtype, autocast on GPUs would return fp32


def start_gather(x: Tensor, shared: Shared) -> tuple[Tensor, dict[int, torch.Event]]:
    """Start to gather all tokens, x [n/tp, d] -> full_x [tp, n/tp, d]; return it and each rank's arrival event."""
    rank, tp = shared.tp.rank(), shared.tp.size()
    shared.turn ^= 1
    buffers = shared.buffers[shared.turn]
    full_x = x.new_empty(tp, *x.shape)
    arrivals = {}
    buffers[rank][tp, : len(x)].copy_(x)
    shared.stream.wait_stream(shared.device.current_stream())
    with shared.device.stream(shared.stream):
        shared.barrier()  # no data; then all ranks have put their tokens into their buffers
        for i in range(1, tp):
            r = (rank + i) % tp  # each rank begins with another one
            full_x[r].copy_(buffers[r][tp, : len(x)])  # in all (tp-1)/tp of the bytes of full_x in
            arrivals[r] = shared.stream.record_event()
        full_x[rank].copy_(x)
        arrivals[rank] = shared.stream.record_event()
    return full_x, arrivals


def multiply_and_send(x: Tensor, weight: Tensor, shared: Shared) -> tuple[Tensor, torch.Event]:
    """Multiply x [tp, n/tp, f] by weight [f, d], and start to copy the products to the ranks whose tokens they are.

    Return the parts of all ranks, [tp, n/tp, d], to be summed, and the event of their arrival.
    """
    rank, tp, tokens = shared.tp.rank(), shared.tp.size(), x.shape[1]
    shared.turn ^= 1
    buffers = shared.buffers[shared.turn]
    products = shared.send_buffer[:, :tokens]
    for i in range(1, tp):
        r = (rank + i) % tp
        torch.mm(x[r], weight, out=products[r])
        shared.stream.wait_stream(shared.device.current_stream())
        with shared.device.stream(shared.stream):
            # in all (tp-1)/tp of the bytes of products out; overlaps with the next matmul
            buffers[r][rank, :tokens].copy_(products[r])
    part = buffers[rank][rank, :tokens]  # no other rank reads it: the barrier need not wait for it
    torch.mm(x[rank], weight, out=part)
    with shared.device.stream(shared.stream):
        shared.barrier()  # no data; then all ranks have sent their products
    return buffers[rank][:tp, :tokens], shared.stream.record_event()


def wait_and_multiply(
    x: Tensor, full_x: Tensor, weight: Tensor, arrivals: dict[int, torch.Event], shared: Shared
) -> Tensor:
    """Multiply full_x [tp, n/tp, d] by weight [d, f] -> [n, f]: first this rank's x, then others' as they arrive."""
    y = full_x.new_empty(*full_x.shape[:2], weight.shape[1])
    torch.mm(x, weight, out=y[shared.tp.rank()])
    for r, arrival in arrivals.items():
        shared.device.current_stream().wait_event(arrival)
        if r != shared.tp.rank():
            torch.mm(full_x[r], weight, out=y[r])
    return y.flatten(0, 1)


class ColumnParallel(torch.autograd.Function):
    """Tokens of all ranks times weights split by their outputs: x [n/tp, d], weight [f/tp, d] -> [n, f/tp]."""

    @staticmethod
    @torch.compiler.disable  # a compiler would wait for communication where it begins
    def forward(ctx, x: Tensor, weight: Tensor, shared: Shared) -> Tensor:
        ctx.save_for_backward(x, weight)  # this rank's tokens alone
        ctx.shared = shared
        full_x, arrivals = start_gather(x, shared)
        return wait_and_multiply(x, full_x, weight.T, arrivals, shared)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        shared = ctx.shared
        full_x, arrivals = start_gather(x, shared)  # overlaps with the matmuls of dx
        dy_by_rank = dy.view(len(full_x), -1, len(weight))
        dx_parts, dx_arrival = multiply_and_send(dy_by_rank, weight, shared)  # overlaps with the matmul of dw
        for arrival in arrivals.values():
            shared.device.current_stream().wait_event(arrival)
        dw = dy.T @ full_x.flatten(0, 1)
        shared.device.current_stream().wait_event(dx_arrival)
        return shared.sum_products(dx_parts), dw, None


class RowParallel(torch.autograd.Function):
    """Columns of the tokens times weights split by their inputs: x [n, f/tp], weight [d, f/tp] -> [n/tp, d]."""

    @staticmethod
    @torch.compiler.disable
    def forward(ctx, x: Tensor, weight: Tensor, shared: Shared) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shared = shared
        x_by_rank = x.view(shared.tp.size(), -1, x.shape[1])
        parts, arrival = multiply_and_send(x_by_rank, weight.T, shared)
        shared.device.current_stream().wait_event(arrival)
        return shared.sum_products(parts)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        full_dy, arrivals = start_gather(dy, ctx.shared)
        dx = wait_and_multiply(dy, full_dy, weight, arrivals, ctx.shared)
        dw = full_dy.flatten(0, 1).T @ x
        return dx, dw, None


class ReduceScatterTokens(torch.autograd.Function):
    """Sum the ranks' outputs; each rank gets its own tokens: [n, d] -> [n/tp, d].

    Backward gathers the gradients of all n tokens, so the gradient of a table split over tp is complete. A table that
    every rank holds (learned positions, added after this) has the gradient of the rank's tokens alone: sum it over tp.
    """

    @staticmethod
    @torch.compiler.disable
    def forward(ctx, x: Tensor, tp: dist.ProcessGroup) -> Tensor:
        ctx.tp = tp
        y, work = reduce_scatter_tokens(x, tp)
        work.wait()
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        dx, work = gather_tokens(dy, ctx.tp)
        work.wait()
        return dx, None


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

    def __init__(self, cfg: Config, tp: dist.ProcessGroup, shared: Shared):
        super().__init__()
        self.shared = shared
        self.k = cfg.dim // cfg.heads
        heads = cfg.heads // tp.size()  # of this rank
        kv_heads = max(1, cfg.kv_heads // tp.size())
        self.q_proj = nn.Linear(cfg.dim, heads * self.k, bias=False)
        self.k_proj = nn.Linear(cfg.dim, kv_heads * self.k, bias=False)
        self.v_proj = nn.Linear(cfg.dim, kv_heads * self.k, bias=False)
        self.o_proj = nn.Linear(heads * self.k, cfg.dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        weights = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        qkv = ColumnParallel.apply(x, torch.cat(weights).to(x.dtype), self.shared)  # (b s) (q k v)/tp
        q, k, v = qkv.split([len(weight) for weight in weights], dim=-1)
        q = rearrange(q, "(b s) (h k) -> b h s k", s=len(rope[0]), k=self.k)  # b h/tp s k
        k = rearrange(k, "(b s) (h k) -> b h s k", s=len(rope[0]), k=self.k)
        v = rearrange(v, "(b s) (h k) -> b h s k", s=len(rope[0]), k=self.k).contiguous()  # a view would keep qkv
        q = rotate(q, rope)
        k = rotate(k, rope)
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = rearrange(o, "b h s k -> (b s) (h k)")
        return RowParallel.apply(o, self.o_proj.weight.to(x.dtype), self.shared)  # (b s)/tp d


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: Config, tp: dist.ProcessGroup, shared: Shared):
        super().__init__()
        self.shared = shared
        ffn = cfg.ffn // tp.size()  # of this rank
        self.gate_proj = nn.Linear(cfg.dim, ffn, bias=False)
        self.up_proj = nn.Linear(cfg.dim, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = [self.gate_proj.weight, self.up_proj.weight]
        gate_up = ColumnParallel.apply(x, torch.cat(weights).to(x.dtype), self.shared)
        gate, up = gate_up.chunk(2, dim=-1)  # (b s) f/tp
        x = nn.functional.silu(gate) * up
        return RowParallel.apply(x, self.down_proj.weight.to(x.dtype), self.shared)  # (b s)/tp d


class Block(nn.Module):
    """Attention, then MLP; each reads a normalised residual stream and adds to it."""

    def __init__(self, cfg: Config, tp: dist.ProcessGroup, shared: Shared):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg)
        self.self_attn = Attention(cfg, tp, shared)
        self.post_attention_layernorm = RMSNorm(cfg)
        self.mlp = MLP(cfg, tp, shared)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Embedding(nn.Module):
    """The vocabulary rows of this rank, [v/tp, d], and zeros for the ids of the others."""

    def __init__(self, cfg: Config, tp: dist.ProcessGroup):
        super().__init__()
        self.tp = tp
        self.weight = nn.Embedding(-(-cfg.vocab // tp.size()), cfg.dim).weight

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids - self.tp.rank() * len(self.weight)
        is_local = (rows >= 0) & (rows < len(self.weight))
        x = nn.functional.embedding(rows.where(is_local, 0), self.weight)
        return x.masked_fill(~is_local[..., None], 0)  # b s d


class Loss(nn.Module):
    """Cross-entropy of logits [t, v/tp], summed over the valid targets [t]. Any other than IGNORE must be below v.

    With logits z, their maximum top and target y, the loss of a row is log Σ exp(z - top) + top - z_y. Each rank sums
    its part of the vocabulary, and one has z_y. ReduceFromTP adds up both; its backward needs no communication.
    """

    def __init__(self, cfg: Config, tp: dist.ProcessGroup):
        super().__init__()
        self.tp = tp
        self.vocab = cfg.vocab

    def fp32_logits(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the logits in fp32 or above, with -inf for the padding."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.masked_fill(ids >= self.vocab, -torch.inf)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        targets = targets.int()  # 64 bits are slower on a GPU
        v = logits.shape[1]  # of this rank
        ids = torch.arange(v, dtype=torch.int32, device=logits.device) + self.tp.rank() * v
        top = self.fp32_logits(logits.detach(), ids).amax(1)
        torch._dynamo.graph_break()  # compiled in one graph, the fp32 logits would be kept
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.tp)  # 2 (tp-1)/tp of 4 bytes per token
        logits = self.fp32_logits(logits, ids)
        exponentials = (logits - top[:, None]).exp().sum(1)
        target_logits = logits.where(ids == targets[:, None], 0).sum(1)  # z_y on the rank that has it, else 0
        sums = torch.stack([exponentials, target_logits])
        exponentials, target_logits = ReduceFromTP.apply(sums, self.tp)  # 8 bytes per token
        losses = exponentials.log() + top - target_logits
        return losses.where(targets != IGNORE, 0).sum()


class Model(nn.Module):
    """Llama 3 with an untied head. Parameters have the names and shapes of transformers.LlamaForCausalLM."""

    def __init__(self, cfg: Config, tp: dist.ProcessGroup, replicas: dist.ProcessGroup, shared: Shared):
        super().__init__()
        self.cfg = cfg
        self.tp = tp  # the ranks that split every block
        self.replicas = replicas  # those of them that hold the same key heads
        self.shared = shared
        self.model = nn.Module()
        self.model.embed_tokens = Embedding(cfg, tp)
        self.model.layers = nn.ModuleList(Block(cfg, tp, shared) for _ in range(cfg.layers))
        self.model.norm = RMSNorm(cfg)
        self.lm_head = nn.Linear(cfg.dim, -(-cfg.vocab // tp.size()), bias=False)
        self.loss = Loss(cfg, tp)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> logits [b, s, v/tp]"""
        rope = rope_table(self.cfg, torch.arange(ids.shape[1], device=ids.device))
        x = self.model.embed_tokens(ids).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
        x = ReduceScatterTokens.apply(rearrange(x, "b s d -> (b s) d"), self.tp)  # (b s)/tp d
        for block in self.model.layers:
            x = block(x, rope)
        logits = ColumnParallel.apply(self.model.norm(x), self.lm_head.weight.to(x.dtype), self.shared)
        return rearrange(logits, "(b s) v -> b s v", s=ids.shape[1])


def is_split(name: str) -> bool:
    """Return whether ranks hold different parts of a tensor; else it is replicated.

    Split are weights of the layers in SPLIT, and biases of column-parallel ones, if your model has biases.
    """
    path, _, kind = name.rpartition(".")
    layer = path.rpartition(".")[2]
    return layer in SPLIT and (SPLIT[layer] == 0 or kind != "bias")


def placement(name: str, tp: int, kv_heads: int) -> tuple[int, int]:
    """Return the axis along which a tensor is split, and into how many parts; tp/parts adjacent ranks share a part.

    Split q, k and v of a fused qkv weight separately.
    """
    if not is_split(name):
        return 0, 1
    layer = name.split(".")[-2]
    parts = min(tp, kv_heads) if layer in ("k_proj", "v_proj") else tp  # key and value heads stay whole
    return SPLIT[layer], parts


def make_shared(cfg: Config, tp: dist.ProcessGroup) -> Shared:
    """Allocate the memory in which the ranks exchange the tokens of a batch."""
    elements = 2 * (tp.size() + 1) * cfg.batch * cfg.seq // tp.size() * cfg.dim
    memory, barrier = share(elements, getattr(torch, cfg.dtype), cfg.device, tp)
    pairs = [tensor.view(2, tp.size() + 1, -1, cfg.dim) for tensor in memory]  # one per rank
    buffers = list(zip(*pairs))
    send_buffer = torch.empty_like(buffers[0][tp.rank()][: tp.size()])
    device = torch.get_device_module(cfg.device)
    sum_parts = torch.compile(sum_products) if cfg.compile else sum_products
    return Shared(tp, buffers, send_buffer, barrier, device, device.Stream(), sum_parts)


# ---------------------------------------------------------------------------------------------------------- training
def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> sum of the losses of the valid targets"""
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        logits = model(inputs).flatten(0, 1)
        return model.loss(logits, targets.flatten())


def sum_replicas(model: nn.Module) -> None:
    """Sum the gradients of replicated parameters (norms), and of key and value heads that several ranks hold.

    A rank's gradient of a replicated parameter comes from its own tokens alone.
    """
    replicated = [p for name, p in model.named_parameters() if not is_split(name)]
    gradients = [p.grad for p in replicated if p.grad is not None]
    if gradients:  # else the parameters are frozen
        # the group's own method: dist.all_reduce_coalesced, which calls it, warns that it will be deprecated
        model.tp.allreduce_coalesced(gradients).wait()  # 2 (tp-1)/tp of their bytes out and in per rank
    if model.replicas.size() == 1:
        return
    linears = [linear for block in model.model.layers for linear in (block.self_attn.k_proj, block.self_attn.v_proj)]
    parameters = [p for linear in linears for p in linear.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if parameters and not gradients:
        raise RuntimeError("key heads have no .grad: with ZeRO make them a unit over dp and the replicas")
    if gradients:  # else the linears are frozen
        # 2 (r-1)/r of their bytes out and in per rank, with r replicas
        model.replicas.allreduce_coalesced(gradients).wait()


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in .grad"""
    tokens = (targets != IGNORE).sum()
    inputs, targets = inputs.to(cfg.device), targets.to(cfg.device)
    loss = forward(cfg, model, inputs, targets) / tokens
    loss.backward()
    sum_replicas(model)
    return loss.detach()


def clip_gradients(cfg: Config, model: Model) -> Tensor:
    """Clip the global gradient norm to --clip; return the norm before clipping."""
    gradients_by_copies = {}  # number of ranks that have the same gradient -> such gradients
    for name, p in model.named_parameters():
        if p.grad is not None:
            _, parts = placement(name, model.tp.size(), cfg.kv_heads)
            copies = model.tp.size() // parts
            gradients_by_copies.setdefault(copies, []).append(p.grad)
    squares = [nn.utils.get_total_norm(gradients) ** 2 / copies for copies, gradients in gradients_by_copies.items()]
    norm = torch.stack(squares).sum()  # a gradient that n ranks have counts 1/n on each
    dist.all_reduce(norm, group=model.tp)  # one element
    norm = norm.sqrt()  # bit-identical on all ranks, so all scale alike
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
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, without gradients"""
    tokens = (targets != IGNORE).sum()
    inputs, targets = inputs.to(cfg.device), targets.to(cfg.device)
    return forward(cfg, model, inputs, targets) / tokens


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
    """Build this rank's shard of the model and fill it tensor by tensor: no rank ever has the whole model."""
    tp = dist.group.WORLD
    replicas, _ = dist.new_subgroups(max(1, tp.size() // cfg.kv_heads))  # neighbours, as placement says
    shared = make_shared(cfg, tp)
    with torch.device("meta"):
        model = Model(cfg, tp, replicas, shared)
    model.to_empty(device=cfg.device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            axis, parts = placement(name, tp.size(), cfg.kv_heads)
            shape = list(p.shape)
            shape[axis] *= parts
            padding = shape[0] - cfg.vocab if name in VOCABULARY else 0  # rows
            shape[0] -= padding
            full = full_tensor(cfg, name, torch.Size(shape))
            if padding:
                full = nn.functional.pad(full, (0, 0, 0, padding))
            part = tp.rank() * parts // tp.size()
            p.copy_(full.chunk(parts, axis)[part])
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
    tp = model.tp
    weights = {}
    for name, p in model.named_parameters():
        axis, parts = placement(name, tp.size(), cfg.kv_heads)
        shards = [torch.empty_like(p) for _ in range(tp.size())] if tp.rank() == 0 else None
        dist.gather(p.detach(), shards, group=tp, group_dst=0)  # a part out of each rank, all into one
        if dist.get_rank() == 0:
            full = torch.cat(shards[:: tp.size() // parts], axis)
            if name in VOCABULARY:
                full = full[: cfg.vocab]  # without the padding
            weights[name] = full.cpu()
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
    tp = max(1, world)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    problems = [
        (world < 1, f"start it with torchrun --nproc_per_node 8 {os.path.relpath(__file__)}"),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.heads % tp, f"--heads {cfg.heads}: must be divisible by the number of processes, {tp}"),
        (cfg.kv_heads % tp and tp % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: must divide, or be divisible by, {tp}"),
        (cfg.ffn % tp, f"--ffn {cfg.ffn}: must be divisible by the number of processes, {tp}"),
        (cfg.batch * cfg.seq % tp, f"--seq {cfg.seq}: times --batch {cfg.batch}, must be divisible by {tp} processes"),
        (cfg.save and not os.access(f"{Path(cfg.save).resolve().parent}/", os.W_OK), f"--save {cfg.save}: no folder"),
        (os.path.exists(cfg.save) and not os.path.isfile(cfg.save), f"--save {cfg.save}: is no file"),
        (world > max(1, local), f"--nnodes {world // local}: must be 1, all processes share the memory of one host"),
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
# Plumbing: Attention, MLP, Block.__init__, Model, build_model, check
# Copy:     share, Shared, sum_products, start_gather, multiply_and_send, wait_and_multiply, ColumnParallel,
#           RowParallel, clip_gradients (make_shared shows how to make Shared; the rest, gather_tokens to sum_replicas,
#           as sequence_parallel.py says)
# Needs:    cfg.clip, cfg.kv_heads, model.tp, placement
