"""Checkpoints of a 4D training: sharded, written while it goes on, resumed in any layout on any number of ranks.

1. Every --every steps each rank copies weights and moments to the CPU. A thread writes them while training goes on.
2. Files hold rectangles of full tensors, known by name and offset, each with a checksum; none is unpickled. A rank that
   resumes reads what overlaps with its own shards, whoever wrote it.
3. A folder step-N.writing becomes step-N when all ranks have written: what a kill interrupts does not count.
Per checkpoint 12Ψ bytes: fp32 weights and two moments.

Parent:   08_4d/train.py
Lesson:   Config, SaveSlices, Writer, checksum, sync, LoadSlices, verify, place, pieces, snapshot, whole, chosen,
          run_and_name, training_of, key_of, write_files, write, resume, train
Run:      torchrun --nproc_per_node 8 08_4d/checkpoint.py --checkpoint checkpoints
Source:   torch.distributed.checkpoint, in PyTorch; Wan et al. 2024, ByteCheckpoint, arXiv:2407.20143
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
import weakref
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn  # before there is a group, or gloo's threads outlive it and abort the process at exit
from einops import einsum, rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

# ------------------------------------------------------------------------------------------------------------ config
IGNORE = -100  # target of a token that must not be predicted: the first one of a document
SENDS_IN_FLIGHT = 2  # tensors that a stage is sending before it waits for the oldest to leave
VOCABULARY = "model.embed_tokens.weight", "lm_head.weight"  # tensors with a row per vocabulary id
# The axis of a weight [out, in] along which a layer is split: 0 is column-parallel, 1 is row-parallel.
SPLIT = dict(q_proj=0, k_proj=0, v_proj=0, o_proj=1, gate_proj=0, up_proj=0, down_proj=1, embed_tokens=0, lm_head=0)
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
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16 is autocast over bf16 weights, fp32 masters
    compile: bool = False
    dp: int = 1  # ranks that split the batch
    cp: int = 2  # ranks that split every sequence
    tp: int = 2  # ranks that split every block
    pp: int = 2  # ranks that split the layers
    chunks: int = 1  # stages per process; 1 is 1F1B
    microbatches: int = 4  # parts of a rank's batch that go through the pipeline one after another
    order: Literal["tp-cp-dp-pp", "tp-cp-pp-dp"] = "tp-cp-dp-pp"  # of ranks on the mesh, fastest first; Llama 3: second
    checkpoint: str = ""  # write to this folder, which all ranks see; if there are checkpoints, go on from the newest
    every: int = 5  # steps from one checkpoint to the next; the last step has one, too
    keep: int = 2  # the newest so many checkpoints stay
    resume: str = ""  # go on once from this checkpoint, such as step-10, and set newer ones aside; else from the newest
    show: bool = False  # print which ranks form a group and leave, without torchrun


# ----------------------------------------------------------------------------------------------------- communication
def group_ranks(cfg: Config) -> dict[str, list[list[int]]]:
    """Return the ranks of all groups by axis: ranks of a group differ in their place on this axis alone.

    Ranks of dp_cp, in this order, have different tokens; ranks of dp_cp_tp are a stage of the pipeline. If tp is above
    kv_heads, r neighbours on tp hold the same key and value heads; dp_cp_r joins them over all of dp and cp.
    """
    sizes = dict(pp=cfg.pp, dp=cfg.dp, cp=cfg.cp, r=max(1, cfg.tp // cfg.kv_heads))
    slowest_first = " ".join(reversed(cfg.order.split("-"))).replace("tp", "kv r")  # such as "pp dp cp kv r"
    ranks = torch.arange(cfg.pp * cfg.dp * cfg.cp * cfg.tp)
    mesh = rearrange(ranks, f"({slowest_first}) -> pp dp cp kv r", **sizes)
    patterns = {  # a row per group; beside each pattern the rows for pp 2, dp 1, cp 2, tp 2 and at least 2 key heads
        "tp": "pp dp cp kv r -> (pp dp cp) (kv r)",  # [0 1] [2 3] [4 5] [6 7]
        "cp": "pp dp cp kv r -> (pp dp kv r) cp",  # [0 2] [1 3] [4 6] [5 7]
        "dp": "pp dp cp kv r -> (pp cp kv r) dp",  # [0] [1] [2] [3] [4] [5] [6] [7]
        "pp": "pp dp cp kv r -> (dp cp kv r) pp",  # [0 4] [1 5] [2 6] [3 7]
        "dp_cp": "pp dp cp kv r -> (pp kv r) (dp cp)",  # [0 2] [1 3] [4 6] [5 7]
        "dp_cp_r": "pp dp cp kv r -> (pp kv) (dp cp r)",  # [0 2] [1 3] [4 6] [5 7]; with 1 key head like dp_cp_tp
        "dp_cp_tp": "pp dp cp kv r -> pp (dp cp kv r)",  # [0 1 2 3] [4 5 6 7]
        "world": "pp dp cp kv r -> 1 (pp dp cp kv r)",  # [0 1 2 3 4 5 6 7]
    }
    return {axis: rearrange(mesh, pattern).tolist() for axis, pattern in patterns.items()}


def make_groups(cfg: Config) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group of each axis. All ranks make all groups, in the same order."""
    tables = group_ranks(cfg)
    tables |= dict.fromkeys(("back", "wrap", "wrap_back"), tables["pp"])  # more communicators: see build_model
    groups = {}
    for axis, rows in tables.items():
        groups[axis], _ = dist.new_subgroups_by_enumeration(rows)
    return groups


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced together: n elements, with zeros at the end so that N ranks divide n."""

    group: dist.ProcessGroup  # the N ranks that hold the unit; each owns, and updates, n/N elements
    parameters: list[nn.Parameter]  # views of `full`: matrices first, then vectors
    sizes: list[int]  # elements of the parameters, and of the padding after them
    full: Tensor  # [n] the weights, in the dtype of the matmuls
    shard: Tensor  # [n/N] this rank's fp32 master weights
    matrices: nn.Parameter  # matrix elements of the shard (decayed)
    vectors: nn.Parameter  # vector elements of the shard (not decayed)
    gather_work: dist.Work | None = None  # the all-gather of `full`; None: gather before use
    sums: Tensor | None = None  # [n] fp32: gradients of this rank's earlier micro-batches


def gather(unit: Unit, stream: torch.cuda.Stream | None) -> None:
    """Start the all-gather of `full` unless it is up to date; wait on `unit.gather_work` before reading it."""
    if unit.gather_work is None:
        if stream:
            stream.wait_stream(torch.cuda.current_stream())  # after all reads of old weights and writes of the shard
        with torch.cuda.stream(stream):
            part = unit.full.chunk(unit.group.size())[unit.group.rank()]
            part.copy_(unit.shard)  # rounded
            # (N-1)/N of the bytes of `full` out and in per rank; the unit's forward waits
            unit.gather_work = dist.all_gather_into_tensor(unit.full, part, group=unit.group, async_op=True)


def reduce_scatter(unit: Unit, flat: Tensor, stream: torch.cuda.Stream | None) -> dist.Work:
    """Start to sum the gradients flat [n] over the ranks; each rank gets the sums of its shard.

    Keep flat until the returned work is done. A reduce-scatter in two steps: an all-to-all in the dtype in which
    backward computed the gradients, then a local sum in fp32. It pays inside one host: across hosts of G GPUs it
    sends G/4 (two hosts) to G/2 (many) times the bytes of an fp32 ring.
    """
    if unit.matrices.grad is not None:
        raise RuntimeError("a unit has a .grad already: reduce once per step, in or after its last backward (see Use)")
    gradient = torch.empty_like(unit.shard)  # not on `stream`: memory belongs to the stream that allocates it
    unit.matrices.grad, unit.vectors.grad = gradient.split([len(unit.matrices), len(unit.vectors)])
    if stream:
        stream.wait_stream(torch.cuda.current_stream())  # flat is complete
    with torch.cuda.stream(stream):
        parts = rearrange(torch.empty_like(flat), "(r n) -> r n", r=unit.group.size())
        # (N-1)/N of the bytes of flat out and in per rank; the sum below waits, on GPUs backward goes on
        work = dist.all_to_all_single(parts, flat, group=unit.group, async_op=True)
        work.wait()
        torch.sum(parts, 0, dtype=gradient.dtype, out=gradient)
    return work


def take_gradients(unit: Unit) -> Tensor:
    """Move the gradients of a unit into one tensor [n]: those of the parameters are freed."""
    flat = torch.empty_like(unit.full)
    *parts, padding = flat.split(unit.sizes)
    for p, part in zip(unit.parameters, parts):
        if p.grad is None:  # this rank did not use it
            part.zero_()
        else:
            part.copy_(p.grad.flatten())
        p.grad = None
    padding.zero_()
    return flat


def reduce(model: nn.Module, i: int) -> None:
    """Take the gradients of unit i, which backward has finished; with the last micro-batch, start to reduce them."""
    unit = model.units[i]
    flat = take_gradients(unit)
    if not model.requires_gradient_sync:
        unit.sums = flat.to(unit.shard.dtype) if unit.sums is None else unit.sums.add_(flat)
        return
    if unit.sums is not None:
        flat.copy_(unit.sums.add_(flat))  # rounded once
        unit.sums = None  # as large as flat at least: no wait for an older reduction, the stage before this one is idle
    elif len(model.reductions_in_flight) == 2:  # wait for the older one, to reuse its memory
        model.reductions_in_flight[0][0].wait()
        model.reductions_in_flight.pop(0)
    work = reduce_scatter(unit, flat, model.reduce_stream)
    model.reductions_in_flight.append((work, flat))


@torch.compiler.disable  # also where the model around it is compiled
def before_forward(model: nn.Module, i: int, x: Tensor) -> None:
    """Start the missing gathers from unit i on; wait for unit i. Reduce it when backward has the gradient of input x.

    Backward computes that gradient last of all in unit i.
    """
    for unit in model.units[i:]:
        gather(unit, model.gather_stream)  # those that are out of date, in the order of forward
    model.units[i].gather_work.wait()
    if x.requires_grad:  # false under torch.no_grad(), and for ids
        x.register_hook(lambda gradient: reduce(model, i))


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


class ColumnParallel(torch.autograd.Function):
    """Tokens of all ranks times weights split by their outputs: x [n/tp, d], weights [f/tp, d] -> each [n, f/tp].

    Weights have the dtype of the matmuls, and are neither cast nor concatenated: autograd would keep the copy until
    backward.
    """

    @staticmethod
    @torch.compiler.disable  # a compiler would wait for communication where it begins
    def forward(ctx, x: Tensor, tp: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)  # this rank's tokens alone
        ctx.tp = tp
        full_x, work = gather_tokens(x, tp)
        work.wait()
        return tuple(full_x @ weight.T for weight in weights)

    @staticmethod
    def backward(ctx, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        full_x, gather_work = gather_tokens(x, ctx.tp)  # overlaps with the matmuls of dx
        full_dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:]):
            full_dx.addmm_(dy, weight)
        dx, reduce_work = reduce_scatter_tokens(full_dx, ctx.tp)  # overlaps with the matmuls of the dws
        gather_work.wait()
        dws = [dy.T @ full_x for dy in dys]
        reduce_work.wait()
        return dx, None, *dws


class RowParallel(torch.autograd.Function):
    """Columns of the tokens times weights split by their inputs: x [n, f/tp], weight [d, f/tp] -> [n/tp, d]."""

    @staticmethod
    @torch.compiler.disable
    def forward(ctx, x: Tensor, weight: Tensor, tp: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        y, work = reduce_scatter_tokens(x @ weight.T, tp)
        work.wait()
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        full_dy, work = gather_tokens(dy, ctx.tp)
        work.wait()
        dx = full_dy @ weight
        dw = full_dy.T @ x
        return dx, dw, None


def column_parallel(x: Tensor, tp: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
    """x [n/tp, d], weights [f/tp, d] -> each [n, f/tp]. On one rank plain matmuls, which a compiler sees."""
    if tp.size() > 1:
        return ColumnParallel.apply(x, tp, *weights)
    return tuple(nn.functional.linear(x, weight) for weight in weights)


def row_parallel(x: Tensor, tp: dist.ProcessGroup, weight: Tensor) -> Tensor:
    """x [n, f/tp], weight [d, f/tp] -> [n/tp, d]"""
    return RowParallel.apply(x, weight, tp) if tp.size() > 1 else nn.functional.linear(x, weight)


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


def connect(links: dict[str, dist.ProcessGroup], path: list[int], device: str) -> dict[str, dist.ProcessGroup]:
    """Open the connections between neighbours, over a communicator per direction; return links.

    "F" carries activations to the next stage, "B" gradients to the one before; path: the rank of each stage. On GPUs
    the transfers of one communicator run one at a time, in the order in which they were started. If both directions
    shared one, two neighbours that each had started a send first would wait for each other forever.
    """
    greeting = torch.zeros(1, device=device)
    for rank, next_rank in zip(path, path[1:]):
        for op, source, target in (("F", rank, next_rank), ("B", next_rank, rank)):
            # NCCL connects on first use, which blocks the host until both ends call: here, not inside a schedule
            if links[op].rank() == source:
                dist.send(greeting, group=links[op], group_dst=target)  # 4 bytes; waits for the target
            if links[op].rank() == target:
                dist.recv(greeting, group=links[op], group_src=source)  # 4 bytes; waits for the source
    return links


def receive(
    model: nn.Module, op: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Receive what an operation takes from a neighbour: activations for a forward (F), gradients for a backward (B).

    Call it right before the operation, not earlier: a pending NCCL receive occupies SMs.
    None on the first stage, whose forward starts from ids, and on the last, whose backward starts from the loss.
    """
    source = model.stage - 1 if op == "F" else model.stage + 1
    if not 0 <= source < model.stages:
        return None
    link = model.links[min(source, model.stage)][op]
    if model.path[source] == model.pp.rank():
        return link.popleft()  # a queue, see send
    buffer = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(buffer, group=link, group_src=model.path[source])  # the bytes of shape in; the operation waits for them
    return buffer


def send(model: nn.Module, op: str, tensor: Tensor) -> dist.Work | None:
    """Start to send what an operation has computed to the neighbour that takes it; None if there is no such stage.

    If the neighbour is on this rank, the tensor waits for it in a queue.
    """
    target = model.stage + 1 if op == "F" else model.stage - 1
    if not 0 <= target < model.stages:
        return None
    link = model.links[min(target, model.stage)][op]
    if model.path[target] == model.pp.rank():
        link.append(tensor)
        return None
    return dist.isend(tensor, group=link, group_dst=model.path[target])  # its bytes out; this stage goes on


def wait_for_send(work: dist.Work | None) -> None:
    """Wait until a message has left."""
    if work:
        work.wait()


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

    def __init__(self, cfg: Config, cp: dist.ProcessGroup, tp: dist.ProcessGroup):
        super().__init__()
        self.cp, self.tp = cp, tp
        self.k = cfg.dim // cfg.heads
        heads = cfg.heads // tp.size()  # of this rank
        kv_heads = max(1, cfg.kv_heads // tp.size())
        self.q_proj = nn.Linear(cfg.dim, heads * self.k, bias=False)
        self.k_proj = nn.Linear(cfg.dim, kv_heads * self.k, bias=False)
        self.v_proj = nn.Linear(cfg.dim, kv_heads * self.k, bias=False)
        self.o_proj = nn.Linear(heads * self.k, cfg.dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = column_parallel(x, self.tp, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        q = rearrange(q, "(b s) (h k) -> b h s k", s=len(rope[0]), k=self.k)  # b h/tp s/cp k
        k = rearrange(k, "(b s) (h k) -> b h s k", s=len(rope[0]), k=self.k)
        v = rearrange(v, "(b s) (h k) -> b h s k", s=len(rope[0]), k=self.k)
        q = rotate(q, rope)
        k = rotate(k, rope)
        if self.cp.size() > 1:
            o = attention(q, k, v, self.cp)
        else:
            o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = rearrange(o, "b h s k -> (b s) (h k)")
        return row_parallel(o, self.tp, self.o_proj.weight)  # (b s)/tp d


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: Config, tp: dist.ProcessGroup):
        super().__init__()
        self.tp = tp
        ffn = cfg.ffn // tp.size()  # of this rank
        self.gate_proj = nn.Linear(cfg.dim, ffn, bias=False)
        self.up_proj = nn.Linear(cfg.dim, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = column_parallel(x, self.tp, self.gate_proj.weight, self.up_proj.weight)  # (b s) f/tp
        return row_parallel(nn.functional.silu(gate) * up, self.tp, self.down_proj.weight)  # (b s)/tp d


class Block(nn.Module):
    """Attention, then MLP; each reads a normalised residual stream and adds to it."""

    def __init__(self, cfg: Config, cp: dist.ProcessGroup, tp: dist.ProcessGroup):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg)
        self.self_attn = Attention(cfg, cp, tp)
        self.post_attention_layernorm = RMSNorm(cfg)
        self.mlp = MLP(cfg, tp)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        torch._dynamo.graph_break()  # the MLP's gradients are ready while attention is still in backward
        return x + self.mlp(self.post_attention_layernorm(x))


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


class Stage(nn.Module):
    """One stage of Llama 3, with 1/tp of each matrix; the first stage has the embedding, the last one the head."""

    def __init__(self, cfg: Config, groups: dict, links: list[dict], path: list[int], stage: int, background: tuple):
        super().__init__()
        self.cfg = cfg
        dp, tp, pp = groups["dp"], groups["tp"], groups["pp"]
        self.dp = dp  # the ranks that split the batch
        self.tp = tp  # the ranks that split every block
        self.pp = pp  # the ranks that split the model
        self.cp = groups["cp"]  # the ranks that split every sequence
        self.dp_cp = groups["dp_cp"]  # the ranks that hold the same matrices
        self.dp_cp_tp = groups["dp_cp_tp"]  # the ranks that hold the same norms
        self.dp_cp_r = groups["dp_cp_r"]  # the ranks that hold the same key heads
        self.links = links  # for each stage but the last: communicators, or queues, to the next one, by operation
        self.path = path  # the rank of each stage
        self.stage = stage
        self.stages = len(path)
        self.units: list[Unit] = []  # filled by make_units: replicated ones, then others in the order of forward
        self.replicated = 0  # how many units, the first ones, are replicated on tp
        self.gather_stream, self.reduce_stream, self.reductions_in_flight = background  # those of Model
        self.requires_gradient_sync = True  # whether backward reduces: with the last micro-batch
        self.model = nn.Module()
        if self.stage == 0:
            self.model.embed_tokens = Embedding(cfg, tp)
        layers = split_layers(cfg, self.stages)[self.stage]
        self.model.layers = nn.ModuleDict({str(i): Block(cfg, self.cp, tp) for i in layers})
        if self.stage == self.stages - 1:
            self.model.norm = RMSNorm(cfg)
            self.lm_head = nn.Linear(cfg.dim, -(-cfg.vocab // tp.size()), bias=False)
        self.loss = Loss(cfg, tp)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """ids [b, s/cp], or activations [(b s/cp)/tp, d] -> activations, on the last stage logits [(b s/cp), v/tp]"""
        rope = rope_table(self.cfg, positions)
        x = x.view_as(x)  # a leaf's hook may run before the gradients of weights are there; that of a view runs after
        for i in range(self.replicated):
            before_forward(self, i, x.detach())  # run_schedule reduces them
        if self.stage == 0:
            before_forward(self, self.replicated, x)
            x = self.model.embed_tokens(x).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
            x = ReduceScatterTokens.apply(rearrange(x, "b s d -> (b s) d"), self.tp)  # (b s)/tp d
        for i, block in enumerate(self.model.layers.children(), self.replicated + int(self.stage == 0)):
            before_forward(self, i, x)
            x = block(x, rope)
        if self.stage < self.stages - 1:
            return x
        before_forward(self, len(self.units) - 1, x)
        (logits,) = column_parallel(self.model.norm(x), self.tp, self.lm_head.weight)
        return logits


class Model(nn.Module):
    """The stages of a rank."""

    def __init__(self, cfg: Config, groups: dict, links: list[dict], path: list[int]):
        super().__init__()
        dp, tp, pp = groups["dp"], groups["tp"], groups["pp"]
        self.dp = dp  # the ranks that split the batch
        self.tp = tp  # the ranks that split every block
        self.pp = pp  # the ranks that split the model
        self.cp = groups["cp"]  # the ranks that split every sequence
        self.dp_cp = groups["dp_cp"]  # the ranks with different tokens
        self.world = groups["world"]  # the ranks that train this model
        self.units: list[Unit] = []  # of all stages, filled by build_model
        self.gather_stream = torch.cuda.Stream() if cfg.device == "cuda" else None  # of weights
        self.reduce_stream = torch.cuda.Stream() if cfg.device == "cuda" else None  # of gradients
        self.reductions_in_flight: list[tuple[dist.Work, Tensor]] = []  # what to wait for, gradients to keep until then
        # the stages of a rank share them
        background = self.gather_stream, self.reduce_stream, self.reductions_in_flight
        stages = [stage for stage, rank in enumerate(path) if rank == pp.rank()]
        self.chunks = nn.ModuleList(Stage(cfg, groups, links, path, stage, background) for stage in stages)


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


@torch.no_grad()
def make_unit(
    named: list[tuple[str, nn.Parameter]],
    initial: Callable[[str, torch.Size], Tensor],
    group: dist.ProcessGroup,
    device: str,
    dtype: torch.dtype,
) -> Unit:
    """Build a unit from named parameters. initial(name, shape) returns the full initial weight of one."""
    if not named:
        raise ValueError("a unit needs at least one parameter")
    if frozen := [name for name, p in named if not p.requires_grad]:
        raise ValueError(f"{frozen[0]} is frozen, a unit is trained: see 03_zero/lora.py")
    named = sorted(named, key=lambda item: -item[1].ndim)  # matrices first
    parameters = [p for _, p in named]
    sizes = [p.numel() for p in parameters]
    shard_size = -(-sum(sizes) // group.size())  # rounded up
    sizes.append(group.size() * shard_size - sum(sizes))  # the padding
    full = torch.zeros(sum(sizes), dtype=dtype, device=device)
    shard = torch.zeros(shard_size, dtype=torch.promote_types(dtype, torch.float32), device=device)
    shard_start = group.rank() * shard_size  # this and start, lo and hi count from the start of `full`
    start = 0
    for (name, p), weight in zip(named, full.split(sizes)):
        lo = max(start, shard_start)
        hi = max(lo, min(start + p.numel(), shard_start + shard_size))  # lo ... hi of p are in the shard, maybe none
        shard[lo - shard_start : hi - shard_start] = initial(name, p.shape).flatten()[lo - start : hi - start]
        # p becomes a view of `full`; of .data, as autograd must not notice that gather overwrites the weights
        torch.utils.swap_tensors(p, nn.Parameter(weight.view(p.shape).data))
        start += p.numel()
    matrix_elements = sum(p.numel() for p in parameters if p.ndim > 1)
    matrices, vectors = shard.tensor_split([max(0, matrix_elements - shard_start)])  # one of them may be empty
    return Unit(group, parameters, sizes, full, shard, nn.Parameter(matrices), nn.Parameter(vectors))


def check_units(model: nn.Module) -> None:
    """Raise unless each parameter that is trained is in one unit: outside of them nothing is trained, nor saved."""
    members = [p for unit in model.units for p in unit.parameters]
    for name, p in model.named_parameters():
        if p.requires_grad and sum(p is other for other in members) != 1:
            raise ValueError(f"{name} must be in exactly one unit")


def holders(cfg: Config, model: nn.Module, name: str) -> dist.ProcessGroup:
    """Return the ranks that hold the same elements of a parameter: ZeRO sums its gradient over them, and shards it."""
    _, parts = placement(name, cfg.tp, cfg.kv_heads)
    if parts == cfg.tp:  # each rank of tp has a part of its own
        return model.dp_cp
    return model.dp_cp_tp if parts == 1 else model.dp_cp_r


def make_units(cfg: Config, model: nn.Module) -> None:
    """Divide the parameters into units: those that are replicated on tp, then the others in the order of forward."""
    parameters = list(model.named_parameters())
    group_of = {name: holders(cfg, model, name) for name, _ in parameters}
    units = []  # (name, parameter) of each unit, and the ranks that hold it
    for group in dict.fromkeys(group_of.values()):
        if group is not model.dp_cp:
            named = [(name, p) for name, p in parameters if group_of[name] is group]  # replicated on tp
            units.append((named, group))
    model.replicated = len(units)
    blocks = [f"model.layers.{i}." for i in range(cfg.layers)]
    for prefix in ["model.embed_tokens.", *blocks, ("model.norm.", "lm_head.")]:
        named = [(name, p) for name, p in parameters if name.startswith(prefix) and group_of[name] is model.dp_cp]
        if named:  # of this stage
            units.append((named, model.dp_cp))
    initial = partial(local_tensor, cfg, model.tp)
    for named, group in units:
        model.units.append(make_unit(named, initial, group, cfg.device, getattr(torch, cfg.dtype)))
    check_units(model)
    if model.stage == 0:
        proxy = weakref.proxy(model)  # torch never frees a cycle through such a hook: weights and group would stay
        embedding = model.model.embed_tokens.weight
        embedding.register_post_accumulate_grad_hook(lambda p: reduce(proxy, proxy.replicated))  # the last gradient


# ---------------------------------------------------------------------------------------------------------- training
def schedule(rank: int, ranks: int, chunks: int, microbatches: int) -> list[tuple[str, int, int]]:
    """Return what a rank does, in order: (F forward or B backward, micro-batch, chunk)."""
    forwards, backwards = [], []
    for start in range(0, microbatches, ranks):  # a group of micro-batches goes through all chunks, then the next
        for chunk in range(chunks):
            for i in range(start, min(start + ranks, microbatches)):
                forwards.append(("F", i, chunk))
                backwards.append(("B", i, chunks - 1 - chunk))
    # forwards before the first gradient can arrive: one per later rank (two with several chunks, because a later rank
    # alternates between F and B), and p for each chunk but the last
    warmup = min((ranks - 1 - rank) * min(chunks, 2) + (chunks - 1) * ranks, len(forwards))
    operations = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards):
        operations += pair  # one forward, one backward
    return operations + backwards[len(backwards) - warmup :]


def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs of Stage.forward, targets [b, s] -> activations [(b s)/tp, d], on the last stage the sum of the losses"""
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        output = model(inputs, shard(cfg, model.cp))
        if model.stage < model.stages - 1:
            return output
        return model.loss(output, targets.flatten())


def run_schedule(
    cfg: Config,
    chunks: nn.ModuleList,
    operations: list[tuple[str, int, int]],
    inputs: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
    tokens: Tensor,
) -> Tensor:
    """Run a rank's operations on micro-batches [b/m, s]; return its part of the loss: 0 without the last stage.

    chunks: the rank's stages. forward(cfg, stage, x, targets) returns contiguous activations [(b/m s)/tp, d] in
    cfg.dtype, on the last stage the summed loss. 06_pipeline/interleaved.py says which lists work. A list of forwards
    alone, under torch.no_grad(), evaluates.
    """
    dtype = getattr(torch, cfg.dtype)
    loss = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=cfg.device)
    saved = {}  # by micro-batch and chunk: input and output of its forward, and the Work that sends the output
    send_buffers = []  # gradients, without backwards activations, in flight: (Work, tensor), the oldest first
    # with several chunks, a rank may send p in a row before the next rank of the ring takes one
    sends_in_flight = chunks[0].pp.size() if len(chunks) > 1 else SENDS_IN_FLIGHT
    last = {chunk: step for step, (_, _, chunk) in enumerate(operations)}  # of a stage's last backward
    for step, (op, i, chunk) in enumerate(operations):
        model = chunks[chunk]
        shape = inputs[i].numel() // model.tp.size(), cfg.dim  # (b/m s)/tp d
        message = receive(model, op, shape, dtype, inputs[i].device)  # activations or dy; None at the ends
        if op == "F":
            x = inputs[i] if message is None else message.requires_grad_(torch.is_grad_enabled())
            output = forward(cfg, model, x, targets[i])
            if model.stage == model.stages - 1:
                output = output / tokens
                loss += output.detach()
            elif (output.dtype, output.shape) != (dtype, shape):  # the next stage would read memory that nobody wrote
                raise ValueError(f"forward must return {dtype} {list(shape)}, not {output.dtype} {list(output.shape)}")
            work = send(model, op, output.detach())
            if torch.is_grad_enabled():
                saved[i, chunk] = x, output, work
            else:
                send_buffers.append((work, output))
        else:
            x, output, work = saved.pop((i, chunk))
            wait_for_send(work)  # returns at once: its gradient has come back, so the output has arrived
            model.requires_gradient_sync = step == last[chunk]  # ZeRO reduces
            if output.requires_grad:  # else all parameters of the first stage are frozen
                output.backward(message)
            work = send(model, op, x.grad)
            send_buffers.append((work, x.grad))
            for unit in reversed(range(model.replicated)):
                reduce(model, unit)  # all blocks of this stage have added to these
        if len(send_buffers) > sends_in_flight:
            wait_for_send(send_buffers.pop(0)[0])  # and frees what was sent
    for work, _ in send_buffers:
        wait_for_send(work)
    for _, _, work in saved.values():  # of forwards whose backward the list does not have
        wait_for_send(work)
    return loss


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over valid tokens of the global batch; its gradient is then in the shards"""
    tokens = (targets != IGNORE).sum()
    rank = model.dp.rank()
    positions = shard(cfg, model.cp)  # [s/cp], which this rank holds
    if inputs.shape[1] != len(positions) * model.cp.size():
        raise ValueError(f"sequences have {inputs.shape[1]} tokens: must have --seq {cfg.seq}, which cp divides")
    # ranks of tp share a batch; ranks of pp, too, but only the first reads the inputs and only the last the targets
    inputs = inputs.chunk(cfg.dp)[rank].to(cfg.device)[:, positions]  # b/dp s/cp
    targets = targets.chunk(cfg.dp)[rank].to(cfg.device)[:, positions]
    for unit in model.units:
        gather(unit, model.gather_stream)  # later stages do it while they wait for activations
    operations = schedule(model.pp.rank(), model.pp.size(), cfg.chunks, cfg.microbatches)
    inputs = inputs.tensor_split(cfg.microbatches)  # m times [b/dp/m, s/cp]
    targets = targets.tensor_split(cfg.microbatches)
    loss = run_schedule(cfg, model.chunks, operations, inputs, targets, tokens)
    if model.reduce_stream:
        torch.cuda.current_stream().wait_stream(model.reduce_stream)  # the GPU's stream waits, not this process
    model.reductions_in_flight.clear()
    for group in (model.dp_cp, model.pp):  # on tp, all have the same loss
        dist.all_reduce(loss, group=group)  # one element, for the log
    return loss


def clip_gradients(cfg: Config, model: Model) -> Tensor:
    """Clip the global gradient norm to --clip; return the norm before clipping."""
    shards = [p for unit in model.units for p in (unit.matrices, unit.vectors)]
    squares = nn.utils.get_total_norm([p.grad for p in shards]) ** 2
    dist.all_reduce(squares, group=model.world)  # one element
    norm = squares.sqrt()  # bit-identical on all ranks, so all scale alike
    nn.utils.clip_grads_with_norm_(shards, cfg.clip, norm)
    return norm


def train_step(cfg: Config, model: Model, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor):
    """Run one optimizer step on the global batch [b, s]; return loss and gradient norm, without waiting for the GPU."""
    loss = forward_backward(cfg, model, inputs, targets)
    norm = clip_gradients(cfg, model)
    optimizer.step()
    optimizer.zero_grad()
    for unit in model.units:
        unit.gather_work = None  # the shards have changed: the next forward gathers them
    return loss, norm


@torch.no_grad()
def evaluate(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, on all ranks, without gradients"""
    tokens = (targets != IGNORE).sum()
    rank = model.dp.rank()
    positions = shard(cfg, model.cp)  # [s/cp], which this rank holds
    if inputs.shape[1] != len(positions) * model.cp.size():
        raise ValueError(f"sequences have {inputs.shape[1]} tokens: must have --seq {cfg.seq}, which cp divides")
    inputs = inputs.tensor_split(cfg.dp)[rank].to(cfg.device)[:, positions]  # b/dp s/cp
    targets = targets.tensor_split(cfg.dp)[rank].to(cfg.device)[:, positions]
    inputs = inputs.tensor_split(cfg.microbatches)  # m times [b/dp/m, s/cp]
    targets = targets.tensor_split(cfg.microbatches)
    operations = schedule(model.pp.rank(), model.pp.size(), cfg.chunks, cfg.microbatches)
    forwards = [operation for operation in operations if operation[0] == "F"]
    loss = run_schedule(cfg, model.chunks, forwards, inputs, targets, tokens)
    for group in (model.dp_cp, model.pp):  # on tp, all have the same loss
        dist.all_reduce(loss, group=group)  # one element
    return loss


def parameter_names(model: Model) -> dict[nn.Parameter, str]:
    """Return the name of each parameter of this rank's stages in the whole model."""
    return {p: name for chunk in model.chunks for name, p in chunk.named_parameters()}


class SaveSlices(dcp.DefaultSavePlanner):
    """Say of each tensor of a state which rectangle of a full tensor it is: places[name]."""

    def __init__(self, places: dict[str, TensorWriteData], key: int):
        super().__init__(flatten_state_dict=False)
        self.places, self.key = places, key

    def create_local_plan(self) -> SavePlan:
        shards = ((MetadataIndex(name, place.chunk.offsets), place) for name, place in self.places.items())
        self.plan = SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=place) for index, place in shards])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]


class Writer(dcp.HuggingFaceStorageWriter):
    """Write tensors from where they are: the parent copies all of them first, and training waits while it does."""

    def write_data(self, plan: SavePlan, planner: SaveSlices) -> torch.futures.Future:
        if plan.items:
            file = f"{self.path}/rank-{plan.storage_data['shard_index']}.safetensors"
            offsets = {item.index.fqn: {"saved_offsets": item.index.offset} for item in plan.items}
            tensors = {name: planner.state_dict[name] for name in offsets}
            sums = {name: checksum(planner.key, name, offsets[name], tensor) for name, tensor in tensors.items()}
            metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
            save_file(tensors, file, {**metadata, "checksums": json.dumps(sums)})
            sync(file)
        done = torch.futures.Future()
        done.set_result([])
        return done


def checksum(key: int, name: str, offsets: dict[str, list[int]], tensor: Tensor) -> int:
    """Return the CRC-32 of a rectangle, of what says where it belongs, and of the checkpoint's own key."""
    label = f"{key} {name} {list(offsets['saved_offsets'])} {tensor.dtype} {list(tensor.shape)}"
    return zlib.crc32(tensor.flatten().view(torch.uint8).numpy(), zlib.crc32(label.encode()))


def sync(path: Path | str) -> None:
    """Wait until a file, or the names in a folder, are on disk: a rename may be there before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class LoadSlices(dcp.DefaultLoadPlanner):
    """Read into each tensor of a state the rectangle places[name] of a full one, from all stored ones it overlaps."""

    def __init__(self, places: dict[str, TensorWriteData]):
        super().__init__(flatten_state_dict=False)
        self.places = places

    def create_local_plan(self) -> LoadPlan:
        stored, items = self.metadata.state_dict_metadata, []
        for name, place in self.places.items():
            chunks = stored[name].chunks if name in stored else []
            # those of one checkpoint do not overlap: all are there if each is there once, and their sizes add up
            once = len({chunk.offsets for chunk in chunks}) == len(chunks)
            if not once or sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(place.size):
                raise ValueError(f"the checkpoint has not each row of {name} once: a file is missing or doubled")
            items += create_read_items_for_chunk_list(name, stored[name], [place.chunk])
        return LoadPlan(items)

    def create_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        read = {item.dest_index.fqn for plan in plans for item in plan.items}
        if unread := self.metadata.state_dict_metadata.keys() - read:
            raise ValueError(f"the checkpoint has {min(unread)}, the model has not")
        return plans

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]


def verify(folder: str, key: int, writers: dist.ProcessGroup) -> None:
    """Read all files of a checkpoint, each on one rank; if one is damaged, every rank exits with one line."""
    damaged = ""
    damages = [""] * writers.size()
    for file in sorted(Path(folder).glob("*.safetensors"))[writers.rank() :: writers.size()]:
        try:
            if not file.is_file():  # a pipe would be waited for
                raise OSError
            with safe_open(file, "pt") as stored:
                offsets, sums = (json.loads(stored.metadata()[of]) for of in ("DCP_SHARDING_INFO", "checksums"))
                for name in stored.keys():
                    if checksum(key, name, offsets[name], stored.get_tensor(name)) != sums[name]:
                        damaged = f"{file}: {name} is damaged, or of another checkpoint"
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            damaged = f"{file}: cannot be read"
    dist.all_gather_object(damages, damaged, group=writers)  # a line of each rank
    if any(damages):
        raise SystemExit(f"{max(damages)}; --resume names an older checkpoint")


def place(cfg: Config, tp: dist.ProcessGroup, name: str, p: Tensor, rows: range) -> TensorWriteData:
    """Return which rectangle of the full tensor some rows of this rank's parameter p are, without the padding.

    A rank's part of a fused qkv weight is three rectangles: keep three parameters, or store it under three names.
    """
    axis, parts = placement(name, tp.size(), cfg.kv_heads)
    start = [0] * p.ndim
    start[axis] = tp.rank() * parts // tp.size() * p.shape[axis]
    full = [n * parts if i == axis else n for i, n in enumerate(p.shape)]
    full[0] = cfg.vocab if name in VOCABULARY else full[0]
    first, last = (min(start[0] + row, full[0]) for row in (rows.start, rows.stop))
    chunk = ChunkStorageMetadata(torch.Size([first, *start[1:]]), torch.Size([last - first, *p.shape[1:]]))
    dtype = torch.promote_types(p.dtype, torch.float32)
    return TensorWriteData(chunk, TensorProperties(dtype), torch.Size(full))


def pieces(unit: Unit, flat: Tensor) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
    """Yield each parameter of a unit, the index of its first element on this rank, and its elements in flat.

    flat begins as unit.shard does, at element rank·n/dp of the unit: weights, gradients or moments.
    """
    start = -unit.group.rank() * len(unit.shard)  # where a parameter starts in the shard
    for p, size in zip(unit.parameters, unit.sizes):
        yield p, max(0, -start), flat[max(0, start) : max(0, start + size)]
        start += size


def snapshot(
    cfg: Config, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, TensorWriteData]]:
    """Copy this rank's share of weights and moments to the CPU: by name, tensors and the rectangles that they are.

    A unit is put together on the ranks of its group; of each tensor each of them keeps as many rows as the others. A
    file could not hold the several rectangles into which a piece of a shard falls.
    """
    names, state, places, tp = parameter_names(model), {}, {}, model.tp
    for unit in model.units:
        moments = [optimizer.state[p] for p in (unit.matrices, unit.vectors)]
        shards = {key: torch.cat([of[key] for of in moments]) for key in ("exp_avg", "exp_avg_sq")}
        for kind, shard in {"weight": unit.shard, **shards}.items():
            full = shard.new_empty(len(unit.full))
            # (N-1)/N of the bytes of a unit in fp32 out and in per rank, N ranks in its group
            dist.all_gather_into_tensor(full, shard, group=unit.group)
            for p, flat in zip(unit.parameters, full.split(unit.sizes)):
                rank, ranks = unit.group.rank(), unit.group.size()
                rows = range(len(p) * rank // ranks, len(p) * (rank + 1) // ranks)
                where, name = place(cfg, tp, names[p], p, rows), f"{kind} {names[p]}"
                if where.chunk.sizes[0]:  # no row of the padding
                    rows = flat.view(p.shape)[rows.start :][: where.chunk.sizes[0]]
                    places[name], state[name] = where, rows.to("cpu", copy=True)
    return state, places


def whole(cfg: Config) -> list[Path]:
    """Return the folders of all whole checkpoints, the newest last."""
    folders = Path(cfg.checkpoint).glob("step-*") if cfg.checkpoint else []
    steps = {int(number): folder for folder in folders if (number := folder.name.removeprefix("step-")).isdecimal()}
    return [steps[step] for step in sorted(steps)]


def run_and_name(cfg: Config) -> str:
    """Return what `resume` notes when it has read the checkpoint of --resume: by which run, and its name.

    torchrun's --rdzv_id names a run: it is the same after a restart, and in a job that Slurm has queued again.
    (TORCHELASTIC_RESTART_COUNT does not tell: each torchrun counts its own restarts.)
    """
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')} {cfg.resume}"


def chosen(cfg: Config) -> list[Path]:
    """Return the checkpoint to go on from, if any: that of --resume, until this run has read it; else the newest."""
    note = Path(cfg.checkpoint, "resumed")
    known = os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none"
    newest = not cfg.resume or known and note.is_file() and note.read_text() == run_and_name(cfg)
    return [folder for folder in whole(cfg) if newest or folder.name == cfg.resume][-1:]


def training_of(folder: Path | str) -> dict:
    """Return step, config, history and key of a checkpoint; exit with one line if they are not those of this folder."""
    try:
        file = Path(folder, "training.json")
        training = json.loads(file.read_text() if file.is_file() else "null")  # a pipe would be waited for
        content = {name: training[name] for name in ("step", "config", "history")}
        if training["key"] == key_of(content) and Path(folder).name == f"step-{training['step']}":
            return training
    except (OSError, RecursionError, ValueError, KeyError, TypeError):
        pass
    raise SystemExit(f"{folder}/training.json is damaged, or of another step; --resume names an older checkpoint")


def key_of(training: dict) -> int:
    """Return a number that no other checkpoint has: the history holds losses and times."""
    return zlib.crc32(json.dumps(training).encode())


def write_files(
    cfg: Config,
    folder: Path,
    key: int,
    state: dict[str, Tensor],
    places: dict[str, TensorWriteData],
    writers: dist.ProcessGroup,
) -> None:
    """Write a snapshot; when all ranks have, give the checkpoint its name and remove the oldest."""
    unfinished = folder.with_suffix(".writing")
    storage, planner = Writer(str(unfinished), save_distributed=True), SaveSlices(places, key)
    dcp.save(state, storage_writer=storage, planner=planner, process_group=writers)  # waits for all ranks
    if writers.rank() == 0:
        for path in (unfinished / "training.json", unfinished):
            sync(path)
        unfinished.rename(folder)  # at once: a reader finds all of it or nothing
        sync(folder.parent)  # before an older one is removed
        for old in whole(cfg)[: -cfg.keep]:
            shutil.rmtree(old.rename(old.with_suffix(".removing")))  # half of it is not taken for a checkpoint


def write(
    cfg: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    history: list[tuple[float, float, float]],
    writers: dist.ProcessGroup,
    thread: Executor,
) -> Future:
    """Start to write a checkpoint after `step` steps; training may go on. Wait for the result before the next one.

    Call it once per step, and not before the first; steps that were skipped do not count. torch's async_save would copy
    the state once more before its thread starts.
    """
    finite = torch.tensor(int(all(unit.shard.isfinite().all() for unit in model.units)))
    dist.all_reduce(finite, dist.ReduceOp.MIN, group=writers)  # one element
    if not finite:
        raise SystemExit(f"--checkpoint {cfg.checkpoint}: step {step} is not written, weights are inf or NaN")
    folder = Path(cfg.checkpoint, f"step-{step}")
    state, places = snapshot(cfg, model, optimizer)
    training = {"step": step, "config": vars(cfg), "history": history}
    key = [key_of(training)]
    if writers.rank() == 0:
        folder.with_suffix(".writing").mkdir(parents=True)
        (folder.with_suffix(".writing") / "training.json").write_text(json.dumps({**training, "key": key[0]}))
    dist.broadcast_object_list(key, group=writers, group_src=0)  # a number; everyone waits until the folder is there
    return thread.submit(write_files, cfg, folder, key[0], state, places, writers)


def resume(
    cfg: Config, model: nn.Module, optimizer: torch.optim.Optimizer, writers: dist.ProcessGroup
) -> tuple[int, list[tuple[float, float, float]]]:
    """Read a whole checkpoint, if there is one, into weights and moments; return its step and history."""
    if cfg.checkpoint and writers.rank() == 0:
        for folder in [*Path(cfg.checkpoint).glob("step-*.removing"), *Path(cfg.checkpoint).glob("step-*.writing")]:
            # what a kill has interrupted; renamed first, so that a run which still writes there fails
            shutil.rmtree(folder.rename(folder.with_suffix(".removing")))
    folders = whole(cfg)
    choice = [str(folder) for folder in chosen(cfg)] or [""]
    dist.broadcast_object_list(choice, group=writers, group_src=0)  # on NFS, nodes may see an old list of folders
    if not choice[0]:
        return 0, []
    training = training_of(choice[0])
    step, history = training["step"], training["history"]
    verify(choice[0], training["key"], writers)
    names, state, places, parts = parameter_names(model), {}, {}, []
    for unit in model.units:
        unit.gather_work = None  # the next forward gathers what is read here
        moments = {kind: torch.zeros_like(unit.shard) for kind in ("exp_avg", "exp_avg_sq")}
        for kind, shard in {"weight": unit.shard, **moments}.items():
            for p, first, part in pieces(unit, shard):
                width = math.prod(p.shape[1:])  # of a row; the memory of p may be freed (ZeRO-3)
                rows = range(first // width, -(-(first + len(part)) // width))  # whole rows around the piece
                where, name = place(cfg, model.tp, names[p], p, rows), f"{kind} {names[p]}"
                if len(part) and where.chunk.sizes[0]:  # not in the padding
                    places[name], state[name] = where, torch.empty(where.chunk.sizes, dtype=where.properties.dtype)
                    parts.append((part, state[name].flatten()[first - rows.start * width :][: len(part)]))
        for key, shard in moments.items():
            matrices, vectors = shard.split([len(unit.matrices), len(unit.vectors)])
            optimizer.state[unit.matrices][key], optimizer.state[unit.vectors][key] = matrices, vectors
        for p in (unit.matrices, unit.vectors):
            optimizer.state[p]["step"] = torch.tensor(float(step), dtype=torch.float32, device=cfg.device)
    reader = dcp.HuggingFaceStorageReader(choice[0])
    try:
        dcp.load(state, storage_reader=reader, planner=LoadSlices(places), process_group=writers)
    except dcp.CheckpointException as error:  # on every rank, what has failed on any
        reason = str(min(error.failures.items())[1][0])
        raise SystemExit(f"{choice[0]}: {reason}; --resume names an older checkpoint") from None
    for part, read in parts:
        part[: len(read)].copy_(read)
    if writers.rank() == 0:
        for newer in folders[folders.index(Path(choice[0])) + 1 :]:
            newer.rename(newer.with_suffix(f".aside-{time.time_ns()}"))
        if cfg.resume:
            Path(cfg.checkpoint, "resumed").write_text(run_and_name(cfg))
        late = f", since this run has read {cfg.resume} before" if cfg.resume not in ("", Path(choice[0]).name) else ""
        print(f"resumed from {choice[0]}{late}", flush=True)
    return step, history


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


def local_tensor(cfg: Config, tp: dist.ProcessGroup, name: str, shape: torch.Size) -> Tensor:
    """Return this rank's part, of the given shape, of a full tensor of the initial weights."""
    axis, parts = placement(name, tp.size(), cfg.kv_heads)
    full_shape = list(shape)
    full_shape[axis] *= parts
    padding = full_shape[0] - cfg.vocab if name in VOCABULARY else 0  # rows that make tp divide the vocabulary
    full_shape[0] -= padding
    full = full_tensor(cfg, name, torch.Size(full_shape))
    if padding:
        full = nn.functional.pad(full, (0, 0) * (full.ndim - 1) + (0, padding))
    return full.chunk(parts, axis)[tp.rank() * parts // tp.size()]


def build_model(cfg: Config) -> Model:
    """Build this rank's part of the model: no rank ever has all weights."""
    groups = make_groups(cfg)
    pp = groups["pp"]
    path = list(range(pp.size())) * cfg.chunks  # the rank of each stage
    links = connect({"F": pp, "B": groups["back"]}, path[: pp.size()], cfg.device)
    # From the last rank messages wrap around to the first. With two ranks, activations then go both ways between the
    # same two, and so do gradients: on one communicator, ranks that each had started a send first would wait forever.
    wrap_links = {"F": deque(), "B": deque()}  # of one rank: queues, see send
    if pp.size() > 1:
        wrap_links = connect({"F": groups["wrap"], "B": groups["wrap_back"]}, path[pp.size() - 1 :][:2], cfg.device)
    with torch.device("meta"):
        model = Model(cfg, groups, [links if rank > 0 else wrap_links for rank in path[1:]], path)
    for chunk in model.chunks:
        make_units(cfg, chunk)
        model.units += chunk.units
    if cfg.compile:
        for chunk in model.chunks:
            chunk.loss = torch.compile(chunk.loss)  # its own .compile() would leave a module of torch.nn as it is
            for block in chunk.model.layers.children():  # the blocks share one compilation
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
    """Return AdamW for this rank's shards, with weight decay on matrices only."""
    matrices = [unit.matrices for unit in model.units]
    vectors = [unit.vectors for unit in model.units]
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


def unshard(cfg: Config, model: Model) -> dict[str, Tensor]:
    """Return the full weights of this rank's stages on the CPU of their first rank, {} on others; all take part."""
    names, weights, tp = parameter_names(model), {}, model.tp
    for unit in model.units:
        full = unit.shard.new_empty(len(unit.full))
        # (N-1)/N of the bytes of a unit out and in per rank, N ranks in its group
        dist.all_gather_into_tensor(full, unit.shard, group=unit.group)
        for p, weight in zip(unit.parameters, full.split(unit.sizes)):
            if model.dp_cp.rank() == 0:
                axis, parts = placement(names[p], tp.size(), cfg.kv_heads)
                shards = [weight.new_empty(p.shape) for _ in range(tp.size())] if tp.rank() == 0 else None
                # a part out of each rank, all into one
                dist.gather(weight.view(p.shape), shards, group=tp, group_dst=0)
                if tp.rank() == 0:
                    whole = torch.cat(shards[:: tp.size() // parts], axis)
                    weights[names[p]] = (whole[: cfg.vocab] if names[p] in VOCABULARY else whole).cpu()  # unpadded
    return weights


def save(cfg: Config, model: Model, history: list[tuple[float, float, float]]) -> None:
    """Write the weights for transformers; the metadata holds config and [loss, gradient norm, seconds] per step."""
    weights = {}  # of all stages, on the CPU of rank 0
    rank_weights = unshard(cfg, model)
    rank_shapes = {name: weight.shape for name, weight in rank_weights.items()}
    shapes_by_rank = [None] * model.pp.size()
    dist.all_gather_object(shapes_by_rank, rank_shapes, group=model.pp)  # names and shapes
    for rank, shapes in enumerate(shapes_by_rank):
        for name, shape in shapes.items():
            if name in rank_weights:
                tensor = rank_weights[name].to(cfg.device)
            else:
                tensor = torch.empty(shape, device=cfg.device)
            dist.broadcast(tensor, group=model.pp, group_src=rank)  # one weight after another
            if dist.get_rank() == 0:
                weights[name] = tensor.cpu()
    if dist.get_rank() == 0:
        write_weights(cfg, weights, history)


def train(cfg: Config, data: tuple[np.ndarray, np.ndarray], unseen: tuple[np.ndarray, np.ndarray]) -> None:
    """Build the model, resume, train it, log every step, write checkpoints, save."""
    torch.set_default_dtype(torch.float64 if cfg.dtype == "float64" else torch.float32)  # of the weights
    model = build_model(cfg)
    optimizer = make_optimizer(cfg, model)
    writers, thread = dist.new_group(backend="gloo"), ThreadPoolExecutor(1)  # all ranks' threads talk to each other
    (first, history), writing = resume(cfg, model, optimizer, writers), None
    old = len(history)
    batch = make_batch(cfg, data, first)
    for step in range(first, cfg.steps):
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
        if cfg.checkpoint and ((step + 1) % cfg.every == 0 or step + 1 == cfg.steps):
            if writing:
                writing.result()  # the one before; raises what went wrong
            writing = write(cfg, model, optimizer, step + 1, history, writers, thread)
    if writing:
        writing.result()
    if ours := history[old:]:  # of this layout
        log(cfg, "median", *np.median(ours[min(5, len(ours) // 2) :], axis=0))  # without the slow first steps
    if cfg.save:
        save(cfg, model, history)
    if cfg.resume and writers.rank() == 0:
        Path(cfg.checkpoint, "resumed").unlink(missing_ok=True)  # the same command may follow, and means what it says


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


def check_folder(cfg: Config) -> None:
    """Exit with one line unless --checkpoint is a folder, or can be made one, in which resume and write can work."""
    folder = Path(cfg.checkpoint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--checkpoint {folder}: is no folder: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise SystemExit(f"--checkpoint {folder}: no folder to write to")
    for path in folder.glob("step-*.*ing"):  # .writing or .removing: resume removes these folders
        if path.is_symlink() or not path.is_dir():
            raise SystemExit(f"--checkpoint {folder}: {path.name} must be a folder, no file or link: move it away")


def show(cfg: Config) -> None:
    """Print which ranks form the groups of each axis, if the layout is possible."""
    check(cfg, cfg.dp * cfg.cp * cfg.tp * cfg.pp)
    for axis, groups in group_ranks(cfg).items():
        print(f"{axis:>8}  {'  '.join(','.join(map(str, ranks)) for ranks in groups)}")


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
    may_be_zero = "steps validate warmup lr weight_decay seed compile show".split()
    for flag, value in asdict(cfg).items():
        if isinstance(value, int | float) and not (value > 0 or (value == 0 and flag in may_be_zero)):
            raise SystemExit(f"--{flag} {value}: must be {'at least' if flag in may_be_zero else 'above'} 0")
    if cfg.checkpoint:
        check_folder(cfg)
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    tp, parts, layout = cfg.tp, cfg.dp * cfg.microbatches, f"--dp {cfg.dp} --cp {cfg.cp} --tp {cfg.tp} --pp {cfg.pp}"
    mesh, stages = cfg.dp * cfg.cp * tp * cfg.pp, cfg.pp * cfg.chunks
    uneven = cfg.chunks > 1 and cfg.microbatches % cfg.pp
    tokens = cfg.batch // parts * cfg.seq // cfg.cp  # that a rank has of a micro-batch
    problems = [
        (world < 1, f"start it with torchrun --nproc_per_node {mesh} {os.path.relpath(__file__)} {layout}"),
        (mesh != world, f"{layout}: {mesh} ranks, must be the number of processes, {world}"),
        (cfg.batch % parts, f"--batch {cfg.batch}: must be divisible by {parts}, --dp times --microbatches"),
        (
            cfg.resume and restarts and os.environ["TORCHELASTIC_RUN_ID"] == "none",
            f"--resume {cfg.resume}: --max_restarts needs torchrun's --standalone, or an --rdzv_id for each run",
        ),
        (cfg.resume and not chosen(cfg), f"--resume {cfg.resume}: there is none in --checkpoint {cfg.checkpoint}"),
        (uneven, f"--microbatches {cfg.microbatches}: must be a multiple of --pp {cfg.pp}, or --chunks 1"),
        (cfg.layers < stages, f"--layers {cfg.layers}: must be at least --pp times --chunks, {stages}"),
        (cfg.cp > 1 and cfg.seq % (2 * cfg.cp), f"--seq {cfg.seq}: must be divisible by {2 * cfg.cp}, twice --cp"),
        (cfg.dim % (2 * cfg.heads), f"--heads {cfg.heads}: --dim {cfg.dim} must be an even multiple of it"),
        (cfg.heads % cfg.kv_heads, f"--kv_heads {cfg.kv_heads}: --heads {cfg.heads} must be a multiple of it"),
        (cfg.heads % tp, f"--heads {cfg.heads}: must be divisible by --tp {tp}"),
        (
            cfg.kv_heads % tp and tp % cfg.kv_heads,
            f"--kv_heads {cfg.kv_heads}: must divide --tp {tp}, or be its multiple",
        ),
        (cfg.ffn % tp, f"--ffn {cfg.ffn}: must be divisible by --tp {tp}"),
        (tokens % tp, f"--tp {tp}: must divide the {tokens} tokens of a micro-batch"),
        (cfg.save and not os.access(f"{Path(cfg.save).resolve().parent}/", os.W_OK), f"--save {cfg.save}: no folder"),
        (os.path.exists(cfg.save) and not os.path.isfile(cfg.save), f"--save {cfg.save}: is no file"),
    ]
    for wrong, problem in problems:
        if wrong:
            raise SystemExit(problem)
    for folder in chosen(cfg):
        step, stored = (training_of(folder)[name] for name in ("step", "config"))
        if step > cfg.steps:
            raise SystemExit(f"--steps {cfg.steps}: must be at least {step}: the run resumes from {folder}")
        for flag in ("layers", "dim", "heads", "kv_heads", "ffn", "vocab", "theta", "rope_factor", "dtype", "seed"):
            if getattr(cfg, flag) != stored[flag]:
                wanted = f"must be {stored[flag]}, as in the checkpoint {folder}"
                raise SystemExit(f"--{flag} {getattr(cfg, flag)}: {wanted}")
        if bool(cfg.validate) != bool(stored["validate"]):
            wanted = "above 0" if stored["validate"] else "0"
            raise SystemExit(f"--validate {cfg.validate}: must be {wanted}, as in {folder}: it holds out text")
    if cfg.init:
        check_init(cfg)


def main() -> None:
    cfg = parse_config()
    if cfg.show:
        return show(cfg)
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
# Plumbing: check_folder, check
# Copy:     is_split, placement, SaveSlices, Writer, checksum, sync, LoadSlices, verify, place, pieces, snapshot, whole,
#           chosen, run_and_name, training_of, key_of, write_files, write, resume
# Use:      1. Write parameter_names(model): the name in the whole model of each parameter of this rank. Train with
#              units of 03_zero (model.units) and AdamW: no other optimizer's state is stored.
#           2. Call resume before the first step, and write after one, as train does. The attributes of cfg are stored
#              as JSON.
# Mind:     - The scheduler, the order of the data and random states are yours: derive them from the step that resume
#             returns, or store them beside it. Here the batch follows from the step, if --data, --batch and --seq stay.
#           - torchrun's --max_restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, new ranks look for the
#             addresses of dead ones (pytorch issue 167288).
# Needs:    cfg.checkpoint, cfg.device, cfg.keep, cfg.kv_heads, cfg.resume, cfg.vocab, model.tp, model.units, "k_proj",
#           "v_proj", VOCABULARY, SPLIT, parameter_names
# Together: Without tensor parallelism: SPLIT = {}, VOCABULARY = (), and model.tp a group of this rank alone.
