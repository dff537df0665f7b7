"""Split backward: the gradient of a stage's input (B) goes out first, those of its weights (W) are computed after.

The stage before waits for B alone, so stages idle for (p-1)(F+B) instead of (p-1)(F+B+W). W needs x and dy, the input
of every linear layer and the gradient of its output, and can run at any time. It is a matmul that adds to the fp32
gradient itself, and weights are cast to bf16 once per step instead of once per micro-batch: each micro-batch moves 12
bytes per parameter, where autocast and .grad move about 30. In memory: that bf16 copy, 2 bytes per parameter, and dy
of all layers of a stage, from B to W.

Parent:   06_pipeline/1f1b.py
Lesson:   InputGradient, Linear, schedule, prepare_linears, backward_input, backward_weights, run_schedule
Run:      torchrun --nproc_per_node 8 06_pipeline/split_backward.py
Source:   Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, figure 1
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

# ------------------------------------------------------------------------------------------------------------ config
IGNORE = -100  # target of a token that must not be predicted: the first one of a document
SENDS_IN_FLIGHT = 2  # tensors that a stage is sending before it waits for the oldest to leave
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
    microbatches: int = 8  # parts of the batch that go through the model one after another


# ----------------------------------------------------------------------------------------------------- communication
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
    buffer = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(buffer, group=model.links[op], group_src=source)  # the bytes of shape in; the operation waits for them
    return buffer


def send(model: nn.Module, op: str, tensor: Tensor) -> dist.Work | None:
    """Start to send what an operation has computed to the neighbour that takes it; None if there is no such stage."""
    target = model.stage + 1 if op == "F" else model.stage - 1
    if not 0 <= target < model.stages:
        return None
    return dist.isend(tensor, group=model.links[op], group_dst=target)  # its bytes out; this stage goes on


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


class InputGradient(torch.autograd.Function):
    """x @ weight.T, whose backward computes the gradient of x alone, and hands on what that of weight will need."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, x_leaf: Tensor, dy_leaf: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        # "gradients" of the leaves: so x and dy leave a compiled backward, too; x without the graph that made it
        return dx, None, x.detach(), dy


class Linear(nn.Module):
    """A linear layer without bias, whose backward leaves out the gradient of its weight while a schedule runs.

    Call it once in a forward: x and dy of two calls would be added up before they are multiplied.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Linear(inputs, outputs, bias=False).weight  # initialised, for a trainer that does not
        self.cast: Tensor | None = None  # the weight in the dtype of the matmuls
        self.leaves: tuple[Tensor, ...] = ()  # two, whose gradients will be x and dy, see InputGradient

    def forward(self, x: Tensor) -> Tensor:
        if self.cast is None:
            return nn.functional.linear(x, self.weight)
        shape = self.leaves[0].shape
        if x.shape != shape:
            raise ValueError(f"x must have the shape {list(shape)} of micro-batches, not {list(x.shape)}")
        return InputGradient.apply(x, self.cast, *self.leaves)


class Attention(nn.Module):
    """Causal attention; heads / kv_heads query heads share one key head and one value head (arXiv:2305.13245)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.k = cfg.dim // cfg.heads
        self.q_proj = Linear(cfg.dim, cfg.heads * self.k)
        self.k_proj = Linear(cfg.dim, cfg.kv_heads * self.k)
        self.v_proj = Linear(cfg.dim, cfg.kv_heads * self.k)
        self.o_proj = Linear(cfg.heads * self.k, cfg.dim)

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
        self.gate_proj = Linear(cfg.dim, cfg.ffn)
        self.up_proj = Linear(cfg.dim, cfg.ffn)
        self.down_proj = Linear(cfg.ffn, cfg.dim)

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


class Model(nn.Module):
    """One stage of Llama 3: some of the layers; the first stage also has the embedding, the last one the head."""

    def __init__(self, cfg: Config, pp: dist.ProcessGroup, links: dict[str, dist.ProcessGroup]):
        super().__init__()
        self.cfg = cfg
        self.pp = pp  # the ranks that split the model
        self.links = links  # communicators by operation, see connect
        self.stage = pp.rank()  # stage i is rank i of the group
        self.stages = pp.size()
        self.model = nn.Module()
        if self.stage == 0:
            self.model.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        layers = split_layers(cfg, self.stages)[self.stage]
        self.model.layers = nn.ModuleDict({str(i): Block(cfg) for i in layers})
        if self.stage == self.stages - 1:
            self.model.norm = RMSNorm(cfg)
            self.lm_head = Linear(cfg.dim, cfg.vocab)
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")

    def forward(self, x: Tensor) -> Tensor:
        """ids [b, s], after the first stage activations [b, s, d] -> activations, on the last stage logits [b, s, v]"""
        rope = rope_table(self.cfg, torch.arange(x.shape[1], device=x.device))
        if self.stage == 0:
            x = self.model.embed_tokens(x).to(getattr(torch, self.cfg.dtype))  # b s d, in the dtype of the matmuls
        for block in self.model.layers.children():
            x = block(x, rope)
        if self.stage < self.stages - 1:
            return x
        return self.lm_head(self.model.norm(x))


# ---------------------------------------------------------------------------------------------------------- training
def schedule(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Return what a stage does, in order: (F forward, B input gradient or W weight gradients, micro-batch)."""
    warmup = min(stages - 1 - stage, microbatches)  # forwards that no backward follows
    operations = [("F", i) for i in range(warmup)]
    for i in range(microbatches):
        if warmup + i < microbatches:
            operations.append(("F", warmup + i))
        operations.append(("B", i))
        operations.append(("W", i))
    return operations


def forward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs of Model.forward, targets [b, s] -> activations [b, s, d], on the last stage the sum of the losses"""
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        output = model(inputs)
        if model.stage < model.stages - 1:
            return output
        return model.loss(output.flatten(0, 1), targets.flatten())


def prepare_linears(model: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Linear]:
    """Cast all matrices once for all micro-batches [b/m, s], give their layers leaves for x and dy; return the layers.

    The leaves have one element in memory: only their gradients are ever read, and those have the full shape.
    """
    if len({micro.shape for micro in inputs}) > 1:  # gradients would be summed to the shape of the leaves
        raise ValueError(f"{sum(map(len, inputs))} sequences in {len(inputs)} micro-batches: must have the same shape")
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    for layer in layers:
        layer.cast = layer.weight.detach().to(dtype)
        element = torch.empty(1, dtype=dtype, device=layer.weight.device)
        outputs_of_layer, inputs_of_layer = layer.weight.shape
        x_leaf = element.expand(*inputs[0].shape, inputs_of_layer).requires_grad_()
        dy_leaf = element.expand(*inputs[0].shape, outputs_of_layer).requires_grad_()
        layer.leaves = x_leaf, dy_leaf
    return layers


def backward_input(
    model: nn.Module, layers: list[Linear], x: Tensor, output: Tensor, dy: Tensor | None
) -> tuple[Tensor | None, list[tuple[nn.Parameter, Tensor, Tensor]]]:
    """B: return dx [b/m, s, d], None if x are ids, and (weight, x, dy) of every linear layer that output needs.

    What the forward saved is freed. Norms and embedding get their gradients here, without the hooks of DDP or FSDP.
    """
    if not output.requires_grad:  # a first stage that is a frozen embedding
        return None, []
    stage_input = [x] if x.requires_grad else []
    parameters = [p for p in model.parameters() if p.requires_grad]
    leaves = [leaf for layer in layers for leaf in layer.leaves]
    # None for what output does not need, and for the weights of layers (see W), unless one is the embedding as well
    gradients = list(torch.autograd.grad(output, stage_input + parameters + leaves, dy, allow_unused=True))
    dx = gradients.pop(0).contiguous() if stage_input else None
    for p in parameters:
        gradient = gradients.pop(0)
        if gradient is None:
            continue
        if p.grad is None:  # copied: the gradient may be another parameter's, too, or have other strides
            p.grad = torch.empty_like(p).copy_(gradient)
        else:
            p.grad = p.grad + gradient
    operands = []
    for layer, layer_x, layer_dy in zip(layers, gradients[::2], gradients[1::2]):
        if layer_x is not None and layer.weight.requires_grad:
            operands.append((layer.weight, layer_x, layer_dy))
    return dx, operands


def backward_weights(operands: list[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
    """W: add dy.T @ x of a micro-batch to each weight's gradient [out, in]; x is [b/m, s, in], dy [b/m, s, out]."""
    for weight, x, dy in operands:
        x = x.flatten(0, 1)
        dy = dy.flatten(0, 1)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if x.dtype == weight.dtype:
            weight.grad.addmm_(dy.T, x)
        elif x.is_cuda:  # bf16 operands; the matmul adds its fp32 sums to the fp32 gradient, which nothing rounds
            torch.addmm(weight.grad, dy.T, x, out_dtype=weight.dtype, out=weight.grad)
        else:
            weight.grad += dy.T @ x


def run_schedule(
    cfg: Config,
    model: nn.Module,
    operations: list[tuple[str, int]],
    inputs: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
    tokens: Tensor,
) -> Tensor:
    """Run a stage's operations on micro-batches [b/m, s]; return its part of the loss: 0 except on the last stage.

    forward(cfg, model, x, targets) returns contiguous activations [b/m, s, d] in cfg.dtype, on the last stage the
    summed loss. Any list works in which each operation comes after those it needs, if both ends of a link take the
    micro-batches in the same order: messages carry no tag. A list of forwards alone, under torch.no_grad(), evaluates.
    """
    dtype = getattr(torch, cfg.dtype)
    loss = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=cfg.device)
    saved = {}  # by micro-batch: input and output of its forward, and the Work that sends the output
    operands = {}  # by micro-batch: weight, x and dy of every linear layer, from B to W
    send_buffers = []  # gradients, without backwards activations, in flight: (Work, tensor), the oldest first
    layers = prepare_linears(model, inputs, dtype) if torch.is_grad_enabled() else []
    for op, i in operations:
        if op == "W":
            backward_weights(operands.pop(i))
            continue
        shape = (*inputs[i].shape, cfg.dim)  # b/m s d
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
                saved[i] = x, output, work
            else:
                send_buffers.append((work, output))
        else:
            x, output, work = saved.pop(i)
            wait_for_send(work)  # returns at once: its gradient has come back, so the output has arrived
            dx, operands[i] = backward_input(model, layers, x, output, message)
            del x, output
            work = send(model, op, dx)
            send_buffers.append((work, dx))
        if len(send_buffers) > SENDS_IN_FLIGHT:
            wait_for_send(send_buffers.pop(0)[0])  # and frees what was sent
    for work, _ in send_buffers:
        wait_for_send(work)
    for _, _, work in saved.values():  # of forwards whose backward the list does not have
        wait_for_send(work)
    for layer in layers:
        layer.cast = None  # from here on the model computes on its own, with the newest weights
        layer.leaves = ()
    return loss


def forward_backward(cfg: Config, model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    """inputs, targets [b, s] -> mean loss over the valid tokens of the global batch, with its gradient in .grad"""
    tokens = (targets != IGNORE).sum()
    operations = schedule(model.stage, model.stages, cfg.microbatches)
    inputs = inputs.to(cfg.device).tensor_split(cfg.microbatches)  # m times [b/m, s]
    targets = targets.to(cfg.device).tensor_split(cfg.microbatches)
    loss = run_schedule(cfg, model, operations, inputs, targets, tokens)
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
    tokens = (targets != IGNORE).sum()
    forwards = [("F", i) for i in range(cfg.microbatches)]
    inputs = inputs.to(cfg.device).tensor_split(cfg.microbatches)  # m times [b/m, s]
    targets = targets.to(cfg.device).tensor_split(cfg.microbatches)
    loss = run_schedule(cfg, model, forwards, inputs, targets, tokens)
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
    """Build this stage and fill it tensor by tensor, so that at most one full tensor is held twice."""
    pp = dist.group.WORLD
    path = list(range(pp.size()))
    links = connect({"F": pp, "B": dist.new_group()}, path, cfg.device)
    with torch.device("meta"):
        model = Model(cfg, pp, links)
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
    problems = [
        (world < 1, f"start it with torchrun --nproc_per_node 8 {os.path.relpath(__file__)}"),
        (cfg.layers < world, f"--layers {cfg.layers}: must be at least the number of processes, {world}"),
        (cfg.batch % cfg.microbatches, f"--microbatches {cfg.microbatches}: must divide --batch {cfg.batch}"),
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
# Plumbing: Attention.__init__, MLP.__init__, Model.__init__
# Copy:     InputGradient, Linear, prepare_linears, backward_input, backward_weights, SENDS_IN_FLIGHT, schedule,
#           run_schedule, clip_gradients, evaluate
# Use:      as 1f1b.py says, and:
#           1. Use Linear for every nn.Linear. It has no bias: add one after it. Code that initialises or decays by the
#              type nn.Linear does not find it. A weight that is used twice in a forward has two Linears that share it.
#           2. Cut the batch into micro-batches of one size.
# Mind:     cfg.dtype is that of matmuls and residual stream. Under autocast, models of transformers have a stream in
#           float32: cast what the embedding returns.
# Needs:    cfg.clip, cfg.device, cfg.dim, cfg.dtype, cfg.microbatches, model.pp, model.stage, model.stages, IGNORE,
#           receive, send, wait_for_send, forward
# Together: as 1f1b.py says. Gradients arrive in .grad without the hooks of DDP or FSDP.
