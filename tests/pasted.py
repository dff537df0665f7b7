"""A trainer of one's own: test_pasted.py pastes into it what the recipes' Copy lines list, and it must train as before.

Up to the line "pasted here" it trains in one process, and is what somebody may have who does not know the recipes:
GPT-2, with position embeddings, LayerNorm, biases, one matrix for q, k and v, and one tensor for embedding and head; or
transformers' Llama, all of it or, as with LoRA, two matrices per block, while the rest is frozen.
After that line stands, recipe by recipe, the glue: what its Copy line leaves to the reader.
"""

# ruff: noqa: F821  the glue calls what is pasted

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

IGNORE = -100


@dataclass
class Config:
    layers: int = 5
    dim: int = 24
    heads: int = 4
    kv_heads: int = 2  # of Llama
    vocab: int = 37
    seq: int = 16
    batch: int = 10
    validation_batch: int = 12
    microbatches: int = 4
    loss_chunks: int = 3
    steps: int = 3
    lr: float = 1e-2
    weight_decay: float = 0.1
    clip: float = 0.5
    device: str = "cpu"
    dtype: str = "float64"


class Attention(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.width = cfg.dim // cfg.heads
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.proj = nn.Linear(cfg.dim, cfg.dim)

    def attend(self, x: Tensor) -> Tensor:
        """[b, s, 3 h k] -> [b, s, h k]"""
        q, k, v = (part.unflatten(2, (-1, self.width)).transpose(1, 2) for part in x.chunk(3, dim=2))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.attend(self.qkv(x)))


class FeedForward(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.up = nn.Linear(cfg.dim, 4 * cfg.dim)
        self.down = nn.Linear(4 * cfg.dim, cfg.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(cfg.dim)
        self.attn = Attention(cfg)
        self.ln_2 = nn.LayerNorm(cfg.dim)
        self.mlp = FeedForward(cfg)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.wte = nn.Embedding(cfg.vocab, cfg.dim)
        self.wpe = nn.Embedding(cfg.seq, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.ln_f = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.head.weight = self.wte.weight

    def embed(self, ids: Tensor) -> Tensor:
        # in this order backward has the gradient of wte before that of wpe
        return self.wpe(torch.arange(ids.shape[1], device=ids.device)) + self.wte(ids)

    def hidden_states(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden_states(ids))


class Llama(nn.Module):
    """transformers' Llama, as a function from ids to logits."""

    def __init__(self, cfg: Config, attention: str = "sdpa"):
        from transformers import LlamaConfig, LlamaForCausalLM  # here: GPT does without

        super().__init__()
        sizes = dict(vocab_size=cfg.vocab, hidden_size=cfg.dim, intermediate_size=40, num_hidden_layers=cfg.layers)
        heads = dict(num_attention_heads=cfg.heads, num_key_value_heads=cfg.kv_heads)
        self.lm = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, attn_implementation=attention))
        for part in [self.lm.model, *self.lm.model.layers]:
            for name, child in part.named_children():
                if "RMSNorm" in type(child).__name__:  # it computes in float32 whatever it gets
                    setattr(part, name, nn.RMSNorm(cfg.dim, 1e-6))

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm(ids).logits


def freeze(model: Llama) -> Llama:
    for name, p in model.named_parameters():
        p.requires_grad_(".q_proj." in name or ".o_proj." in name)
    return model


def initialize(cfg: Config, model: nn.Module) -> nn.Module:
    """Draw all weights, and biases, none of which is 0 or 1: a forgotten one is seen."""
    generator = torch.Generator().manual_seed(0)
    model.to(getattr(torch, cfg.dtype))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if p.ndim == 1 and name.endswith("weight") else 0.0, 0.1, generator=generator)
    return model


def make_batch(cfg: Config, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random ids, and targets of which every sequence ignores another share."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(cfg.vocab, (batch, cfg.seq + 1), generator=generator)
    share = torch.randint(100, (batch, 1), generator=generator)
    ignored = torch.randint(100, (batch, cfg.seq), generator=generator) < share
    return ids[:, :-1], ids[:, 1:].masked_fill(ignored, IGNORE)


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def make_optimizer(cfg: Config, matrices: list[Tensor], vectors: list[Tensor]) -> torch.optim.Optimizer:
    groups = [dict(params=matrices, weight_decay=cfg.weight_decay), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=cfg.lr)


def optimizer_of(cfg: Config, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return make_optimizer(cfg, [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1])


def forward(cfg: Config, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    return sum_of_losses(model(ids), targets)


def mean_loss(cfg: Config, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    return forward(cfg, model, ids, targets) / (targets != IGNORE).sum()


def forward_backward(cfg: Config, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    loss = mean_loss(cfg, model, ids, targets)
    loss.backward()
    return loss.detach()


def clip(cfg: Config, model: GPT) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)


def tensors(model: nn.Module, gradients: bool) -> dict[str, Tensor]:
    """Return copies of the weights that are trained, or of their gradients, by name."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: (p.grad if gradients else p).detach().clone() for name, p in trained}


def train(cfg, model, optimizer, forward_backward, clip, evaluate, tensors, first=0, record=()) -> dict[str, Tensor]:
    """Return losses, gradient norms, gradients and validation losses of all steps, and the weights after the last."""
    record = dict(record)
    for step in range(first, cfg.steps):
        record[f"loss of step {step}"] = forward_backward(cfg, model, *make_batch(cfg, cfg.batch, step))
        record[f"gradient norm of step {step}"] = clip(cfg, model)
        record |= {f"gradient of {name} in step {step}": g for name, g in tensors(model, gradients=True).items()}
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            batch = make_batch(cfg, cfg.validation_batch, 1000 + step)
            record[f"validation loss after step {step}"] = evaluate(cfg, model, *batch)
    return record | tensors(model, gradients=False)


def in_one_process(cfg: Config, model: nn.Module):
    return model, optimizer_of(cfg, model), forward_backward, clip, mean_loss, tensors


def single(cfg: Config):
    return in_one_process(cfg, initialize(cfg, GPT(cfg)))


def llama(cfg: Config):
    return in_one_process(cfg, initialize(cfg, Llama(cfg)))


def lora(cfg: Config):
    return in_one_process(cfg, freeze(initialize(cfg, Llama(cfg))))


# ------------------------------------------------------------------------------------------------------- pasted here

# --------------------------------------------------------- 02_data_parallel/bucketed, beside 01_single_gpu/chunked_loss


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def parts_of(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return parts


def share(model: GPT, batch: Tensor) -> Tensor:
    return batch.tensor_split(model.dp.size())[model.dp.rank()]


def loss_in_chunks(cfg: Config) -> GPT:
    model = initialize(cfg, GPT(cfg))
    model.dp = model.world = dist.group.WORLD
    model.lm_head = model.head
    model.loss = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")
    return model


def forward_backward_bucketed(cfg: Config, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    x = hidden_states(cfg, model, share(model, ids))
    leaf = x.detach().requires_grad_()
    loss = backward_in_chunks(cfg, model, leaf, share(model, targets).flatten(), (targets != IGNORE).sum())
    backward(model, (x * leaf.grad).sum(), bucket_mb=0.02)  # of all but head and loss
    return summed(loss, model.dp)


def bucketed(cfg: Config):
    model = loss_in_chunks(cfg)
    return model, optimizer_of(cfg, model), forward_backward_bucketed, clip, evaluate, tensors


# ------------------------------------------------------------------------------------------------------ 03_zero/zero3


def shards(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    return [unit.matrices for unit in model.units], [unit.vectors for unit in model.units]


def micro_batches(model: nn.Module, ids: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(share(model, ids).tensor_split(2), share(model, targets).tensor_split(2))


def losses_of_share(model: nn.Module, ids: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Yield the losses of two micro-batches, one after another."""
    for x, y in micro_batches(model, ids, targets):
        yield sum_of_losses(model(x), y) / (targets != IGNORE).sum()


def after_step(model: nn.Module) -> None:
    for unit in model.units:
        unit.gathering = None


def forward_backward_zero3(cfg: Config, model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    total = 0
    for loss in losses_of_share(model, ids, targets):
        loss.backward()
        reduce(model, 0)
        total += loss.detach()
    free(model.units[0])
    assert not any(unit.full.untyped_storage().size() for unit in model.units), "whole weights are left after backward"
    return summed(total, model.dp)


def tensors_of_units(model: nn.Module, gradients: bool) -> dict[str, Tensor]:
    names, full = {p: name for name, p in model.named_parameters()}, {}
    for unit in model.units:
        shard = torch.cat([unit.matrices.grad, unit.vectors.grad]) if gradients else unit.shard
        for p, part in zip(unit.parameters, torch.cat(parts_of(shard, unit.group)).split(unit.sizes)):
            full[names[p]] = part.view(p.shape)
    return full


Parts = dict[tuple[str, ...], nn.Module]  # how the names of a unit's parameters begin -> what needs the unit first


def parts_of_gpt(model: GPT) -> Parts:
    blocks = {(f"blocks.{i}.",): block for i, block in enumerate(model.blocks)}
    return {("wte.", "wpe."): model.wpe, **blocks, ("ln_f.",): model.ln_f}


def parts_of_llama(model: Llama) -> Parts:
    """Where nothing is trained, no unit begins. Frozen parameters are in no unit: they stay whole on all ranks."""
    lm = model.lm.model
    blocks = {(f"lm.model.layers.{i}.",): block for i, block in enumerate(lm.layers)}
    parts = {("lm.model.embed_tokens.",): lm.embed_tokens, **blocks, ("lm.model.norm.", "lm.lm_head."): lm.norm}
    return {names: part for names, part in parts.items() if part and any(p.requires_grad for p in part.parameters())}


def make_units(cfg: Config, model: nn.Module, parts: Parts, *first: dist.ProcessGroup) -> torch.optim.Optimizer:
    """Shard what is trained over dp, the first units over other groups; return the optimizer of the shards."""
    start = tensors(model, gradients=False)
    model.units, model.sending, model.gathers, model.stream = [], [], None, None
    groups = [*first, *[model.dp] * len(parts)]
    for i, (names, part) in enumerate(parts.items()):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and name.startswith(names)]
        unit = make_unit(named, lambda name, _: start[name], groups[i], cfg.device, getattr(torch, cfg.dtype))
        model.units.append(unit)
        part.register_forward_pre_hook(lambda _, inputs, i=i: before_forward(model, i, inputs[0]))
    check_units(model)
    optimizer = make_optimizer(cfg, *shards(model))
    optimizer.register_step_post_hook(lambda *_: after_step(model))
    return optimizer


def in_freed_units(cfg: Config, model: nn.Module, parts: Parts):
    model.dp = model.world = dist.group.WORLD
    optimizer = make_units(cfg, model, parts)
    for i, (unit, part) in enumerate(zip(model.units, parts.values())):
        free(unit)
        if i > 0:  # unit 0 stays: nothing would gather it again for its backward
            part.register_forward_hook(lambda *_, i=i: after_forward(model, i))
    return model, optimizer, forward_backward_zero3, clip_gradients, evaluate, tensors_of_units


def zero3(cfg: Config):
    model = initialize(cfg, GPT(cfg))
    return in_freed_units(cfg, model, parts_of_gpt(model))


def llama_zero3(cfg: Config):
    model = initialize(cfg, Llama(cfg))
    return in_freed_units(cfg, model, parts_of_llama(model))


def lora_zero3(cfg: Config):
    model = freeze(initialize(cfg, Llama(cfg)))
    return in_freed_units(cfg, model, parts_of_llama(model))


# ------------------------------------------------------------ 03_zero/zero1_overlap, beside 01_single_gpu/chunked_loss


def forward_backward_zero1(cfg: Config, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    total = 0
    for i, (x, y) in enumerate(micro_batches(model, ids, targets)):
        model.requires_gradient_sync = i == 1
        x = hidden_states(cfg, model, x)
        total += backward_in_chunks(cfg, model, x, y.flatten(), (targets != IGNORE).sum())
        reduce(model, 0)  # a hook on the tied matrix would run once per chunk
    return summed(total, model.dp)


def zero1(cfg: Config):
    model = loss_in_chunks(cfg)
    optimizer = make_units(cfg, model, parts_of_gpt(model))
    return model, optimizer, forward_backward_zero1, clip_gradients, evaluate, tensors_of_units


# ------------------------------------------------------------------------------ 08_4d/checkpoint, beside 03_zero/zero3


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {p: name for name, p in model.named_parameters()}


def checkpoint(cfg: Config):
    """Train two steps, write a checkpoint, start anew and resume; the third step is left to train."""
    global SPLIT, VOCABULARY
    SPLIT, VOCABULARY = {}, ("wte.weight",)
    vars(cfg).update(checkpoint=str(Path(__file__).parent / "checkpoints"), keep=1, resume="")
    tp = init_device_mesh(cfg.device, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp")).get_group("tp")
    model, optimizer, *functions = zero3(cfg)
    model.tp, writers = tp, dist.new_group(backend="gloo")
    record = train(replace(cfg, steps=2), model, optimizer, *functions)
    log = [record["loss of step 1"].item()]  # of every second step
    with ThreadPoolExecutor(1) as thread:
        write(cfg, model, optimizer, 2, log, writers, thread).result()
    model, optimizer, *functions = zero3(cfg)
    model.tp = tp
    first, history = resume(cfg, model, optimizer, writers)
    assert history == log, f"read {history}, written was {log}"
    return model, optimizer, *functions, first, record


# ------------------------------------------------------------- 06_pipeline/1f1b, alone and beside 03_zero/zero1_overlap


class Stage(GPT):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.stage == 0 else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x)) if self.stage == self.stages - 1 else x


def forward_1f1b(cfg: Config, model: Stage, x: Tensor, targets: Tensor) -> Tensor:
    """Return activations, on the last stage the sum of the losses."""
    output = model(x)
    return sum_of_losses(output, targets) if model.stage == model.stages - 1 else output


def forward_backward_1f1b(cfg: Config, model: Stage, ids: Tensor, targets: Tensor) -> Tensor:
    operations, tokens = schedule(model.stage, model.stages, cfg.microbatches), (targets != IGNORE).sum()
    micro = (x.tensor_split(cfg.microbatches) for x in (ids, targets))
    loss = summed(run_schedule(cfg, model, operations, *micro, tokens), model.pp)
    if model.tied and model.stage in (0, model.stages - 1):
        dist.all_reduce(model.wte.weight.grad, group=model.tied)
    return loss


def clip_1f1b(cfg: Config, model: Stage) -> Tensor:
    counted = [p.grad for name, p in model.named_parameters() if name != "wte.weight" or model.stage == 0]
    norm = summed(nn.utils.get_total_norm(counted) ** 2, model.pp).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), cfg.clip, norm)
    return norm


def one_f_one_b(cfg: Config):
    globals()["forward"] = forward_1f1b  # run_schedule calls it by this name
    pp = dist.group.WORLD
    model = initialize(cfg, Stage(cfg))
    model.pp, model.stage, model.stages = pp, pp.rank(), pp.size()
    model.links = connect({"F": pp, "B": dist.new_group()}, [*range(pp.size())], cfg.device)
    model.tied = dist.new_group([0, pp.size() - 1])
    own = torch.arange(cfg.layers).tensor_split(model.stages)[model.stage]
    for i in set(range(cfg.layers)) - set(own.tolist()):
        model.blocks[i] = nn.Identity()
    if model.stage > 0:
        del model.wpe
    if model.stage < model.stages - 1:
        del model.ln_f
    if 0 < model.stage < model.stages - 1:
        del model.wte, model.head
    return model, optimizer_of(cfg, model), forward_backward_1f1b, clip_1f1b, evaluate, tensors


class LlamaStage(Llama):
    def forward(self, x: Tensor) -> Tensor:
        x = self.lm.model.embed_tokens(x) if self.stage == 0 else x
        x = self.lm.model(inputs_embeds=x).last_hidden_state
        return self.lm.lm_head(x) if self.stage == self.stages - 1 else x


class Elsewhere(nn.Module):
    """A block of another stage."""

    def forward(self, x: Tensor, **_) -> Tensor:
        return x


def forward_backward_stage(cfg: Config, model: LlamaStage, ids: Tensor, targets: Tensor) -> Tensor:
    operations, tokens = schedule(model.stage, model.stages, cfg.microbatches), (targets != IGNORE).sum()
    micro = (share(model, x).tensor_split(cfg.microbatches) for x in (ids, targets))
    model.requires_gradient_sync = False  # a schedule does not mark the last micro-batch
    loss = run_schedule(cfg, model, operations, *micro, tokens)
    model.requires_gradient_sync = True
    for i in reversed(range(len(model.units))):
        reduce(model, i)
    return summed(loss, model.world)


def llama_one_f_one_b(cfg: Config):
    globals()["forward"] = forward_1f1b  # run_schedule calls it by this name
    mesh = init_device_mesh(cfg.device, (2, 2), mesh_dim_names=("pp", "dp"))
    backwards = init_device_mesh(cfg.device, (2, 2), mesh_dim_names=("pp", "dp")).get_group("pp")
    model, pp = initialize(cfg, LlamaStage(cfg)), mesh.get_group("pp")
    model.dp, model.pp, model.world = mesh.get_group("dp"), pp, dist.group.WORLD
    model.stage, model.stages = pp.rank(), pp.size()
    model.links = connect({"F": pp, "B": backwards}, [*range(pp.size())], cfg.device)
    own = torch.arange(cfg.layers).tensor_split(model.stages)[model.stage]
    for i in set(range(cfg.layers)) - set(own.tolist()):
        model.lm.model.layers[i] = Elsewhere()
    if model.stage > 0:
        model.lm.model.embed_tokens = None
    if model.stage < model.stages - 1:
        model.lm.model.norm, model.lm.lm_head = nn.Identity(), None
    optimizer = make_units(cfg, model, parts_of_llama(model))
    return model, optimizer, forward_backward_stage, clip_gradients, evaluate, tensors_of_units


# ---------------------------------------------------------------------------------------------------- 06_pipeline/zbv


class WithBias:
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def replaced(linear: nn.Linear) -> nn.Module:
    """Return the pasted layer with the weight of one of the trainer's, and with its bias, if it has one."""
    kind = Linear if linear.bias is None else type("LinearWithBias", (WithBias, Linear), {})
    layer = kind(linear.in_features, linear.out_features)
    layer.weight = linear.weight
    if linear.bias is not None:
        layer.bias = linear.bias
    return layer


class Chunk(Stage):
    """A stage that has its modules from the whole model."""

    def __init__(self, model: GPT, links: list[dict], path: list[int], stage: int):
        nn.Module.__init__(self)
        self.pp, self.links, self.path, self.stage, self.stages = model.pp, links, path, stage, len(path)
        own = torch.arange(len(model.blocks)).tensor_split(len(path))[stage]
        self.blocks = nn.ModuleList(model.blocks[i] for i in own)
        if stage == 0:
            self.wte, self.wpe = model.wte, model.wpe
        if stage == len(path) - 1:
            self.ln_f, self.head = model.ln_f, model.head


def forward_backward_zbv(cfg: Config, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    operations, tokens = schedule(model.pp.rank(), model.pp.size(), 5), (targets != IGNORE).sum()
    return summed(run_schedule(cfg, model.chunks, operations, ids.chunk(5), targets.chunk(5), tokens), model.pp)


def zbv(cfg: Config):
    globals()["forward"] = forward_1f1b  # run_schedule calls it by this name
    model, pp = initialize(cfg, GPT(cfg)), dist.group.WORLD
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, replaced(child))
    down, model.pp = [*range(pp.size())], pp
    path, between = down + down[::-1], pp.size() - 1
    there, back = (
        connect({"F": dist.new_group(), "B": dist.new_group()}, way, cfg.device) for way in (down, down[::-1])
    )
    links = [there] * between + [{"F": deque(), "B": deque()}] + [back] * between
    chunks = [Chunk(model, links, path, stage) for stage, rank in enumerate(path) if rank == pp.rank()]
    model.blocks = nn.ModuleList(b if any(b in c.blocks for c in chunks) else nn.Identity() for b in model.blocks)
    if pp.rank() > 0:
        del model.wte, model.wpe, model.ln_f, model.head
    model.chunks = nn.ModuleList(chunks)
    return model, optimizer_of(cfg, model), forward_backward_zbv, clip_gradients, evaluate, tensors


# ------------------------------------------ 04_tensor_sequence/tensor_parallel, alone and beside 03_zero/zero1_overlap


class ParallelAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(self.qkv(CopyToTP.apply(x, self.tp)))
        return ReduceFromTP.apply(nn.functional.linear(x, self.proj.weight), self.tp) + self.proj.bias


class ParallelFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.up(CopyToTP.apply(x, self.tp)))
        return ReduceFromTP.apply(nn.functional.linear(x, self.down.weight), self.tp) + self.down.bias


def cut(cfg: Config, model: GPT, name: str, full: Tensor) -> Tensor:
    """Return this rank's part; the three parts of qkv are cut one by one."""
    axis, parts = placement(name, model.tp.size(), cfg.heads)
    thirds = full.chunk(3) if ".qkv." in name else [full]
    return torch.cat([third.chunk(parts, axis)[model.tp.rank() * parts // model.tp.size()] for third in thirds], axis)


def unsplit(local: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """Join over tp what a function returns of each rank."""

    def full(model: nn.Module, gradients: bool) -> dict[str, Tensor]:
        joined = {}
        for name, part in local(model, gradients).items():
            parts = parts_of(part, model.tp)
            axis, count = placement(name, model.tp.size(), Config().heads)
            if count > 1:
                thirds = zip(*(p.chunk(3) for p in parts)) if ".qkv." in name else [parts]
                part = torch.cat([torch.cat(third, axis) for third in thirds], axis)
            joined[name] = part
        return joined

    return full


def split(cfg: Config, model: nn.Module) -> nn.Module:
    for name, p in initialize(cfg, model).named_parameters():
        p.data = cut(cfg, model, name, p.data).contiguous()
    return model


def forward_backward_tensor_parallel(cfg: Config, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    total = 0
    for i, loss in enumerate(losses_of_share(model, ids, targets)):
        model.requires_gradient_sync = i == 1
        loss.backward()
        for p in model.units[0].parameters:
            p.grad /= model.tp.size()  # each rank of tp has all of it, and the unit sums over them, too
        reduce(model, 0)
        total += loss.detach()
    return summed(total, model.dp)


def tensor_parallel(cfg: Config):
    global SPLIT
    SPLIT = dict(qkv=0, proj=1, up=0, down=1)
    mesh = init_device_mesh(cfg.device, (2, 2), mesh_dim_names=("tp", "dp"))
    model = GPT(cfg)
    model.dp, model.tp, model.world = mesh.get_group("dp"), mesh.get_group("tp"), dist.group.WORLD
    for block in model.blocks:
        block.attn, block.mlp = ParallelAttention(cfg), ParallelFeedForward(cfg)
        block.attn.tp = block.mlp.tp = model.tp
    count = {name: placement(name, model.tp.size(), cfg.heads)[1] for name, _ in split(cfg, model).named_parameters()}
    parts = {tuple(name for name in count if count[name] == 1): model.wpe}  # replicated
    for i, block in enumerate(model.blocks):
        parts[tuple(name for name in count if f"blocks.{i}." in name and count[name] > 1)] = block
    optimizer = make_units(cfg, model, parts, model.world)
    return model, optimizer, forward_backward_tensor_parallel, clip_gradients, evaluate, unsplit(tensors_of_units)


def llama_tensor_parallel(cfg: Config):
    global SPLIT
    SPLIT = dict(q_proj=0, k_proj=0, v_proj=0, o_proj=1, gate_proj=0, up_proj=0, down_proj=1)
    model, tp = Llama(cfg), dist.group.WORLD
    for block in model.lm.model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.register_forward_hook(lambda module, inputs, output: CopyToTP.apply(output, tp))
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            linear.register_forward_hook(lambda module, inputs, output: ReduceFromTP.apply(output, tp))
    model.tp = tp
    split(cfg, model)
    return model, optimizer_of(cfg, model), forward_backward, clip_gradients, mean_loss, unsplit(tensors)


# ----------------------------------------------------------------------------------------------- 05_context_ring/zigzag


class SplitAttention(Attention):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (-1, self.width)).transpose(1, 2) for part in x.chunk(3, dim=2))
        return attention(q, k, v, self.cp).transpose(1, 2).flatten(2)


class SplitGPT(GPT):
    def embed(self, ids: Tensor) -> Tensor:
        return self.wpe(shard(Config(), self.cp)) + self.wte(ids)


def forward_backward_context(cfg: Config, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    held, tokens = shard(cfg, model.cp), (targets != IGNORE).sum()
    loss = sum_of_losses(model(share(model, ids)[:, held]), share(model, targets)[:, held]) / tokens
    backward_and_sum(model, loss, model.dp_cp)
    return summed(loss.detach(), model.dp_cp)


def on_a_mesh(cfg: Config, model: nn.Module, dp: int) -> nn.Module:
    mesh = init_device_mesh(cfg.device, (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "cp"))
    model.dp, model.cp, model.dp_cp = mesh.get_group("dp"), mesh.get_group("cp"), dist.group.WORLD
    return model


def zigzag(cfg: Config):
    model = on_a_mesh(cfg, SplitGPT(cfg), dp=2)
    for block in model.blocks:
        block.attn = SplitAttention(cfg)
        block.attn.cp = model.cp
    initialize(cfg, model)
    return model, optimizer_of(cfg, model), forward_backward_context, clip, evaluate, tensors


class SplitLlama(Llama):
    def forward(self, ids: Tensor) -> Tensor:
        return self.lm(ids, position_ids=shard(Config(), self.cp)[None]).logits


def llama_zigzag(cfg: Config):
    from transformers import AttentionInterface

    def ring(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **more):
        return attention(q, k, v, model.cp).transpose(1, 2), None

    AttentionInterface.register("ring", ring)
    model = on_a_mesh(cfg, initialize(cfg, SplitLlama(cfg, "ring")), dp=1)
    return model, optimizer_of(cfg, model), forward_backward_context, clip, evaluate, tensors


# -------------------------------------------------------------------------- 07_expert/moe and 07_expert/expert_parallel


def with_experts(cfg: Config, model: GPT, *groups: dist.ProcessGroup) -> GPT:
    vars(cfg).update(experts=4, ffn=20, top_k=2)
    for block in model.blocks:
        block.mlp = MLP(cfg, *groups)
    return initialize(cfg, model)


def moe(cfg: Config):
    return in_one_process(cfg, with_experts(cfg, GPT(cfg)))


def forward_backward_experts(cfg: Config, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    total = 0
    for loss in losses_of_share(model, ids, targets):
        loss.backward()
        total += loss.detach()
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad, group=model.edp if ".experts." in name else model.dp)
    return summed(total, model.dp)


def tensors_experts(model: GPT, gradients: bool) -> dict[str, Tensor]:
    held = tensors(model, gradients).items()
    return {name: torch.cat(parts_of(x, model.ep)) if ".experts." in name else x for name, x in held}


def experts(cfg: Config):
    mesh = init_device_mesh(cfg.device, (2, 2, 1), mesh_dim_names=("edp", "ep", "alone"))
    model = with_experts(cfg, GPT(cfg), mesh.get_group("alone"))  # draws all experts; keeps a part below
    model.dp, model.ep, model.edp = dist.group.WORLD, mesh.get_group("ep"), mesh.get_group("edp")
    for block in model.blocks:
        block.mlp.ep = model.ep
        for p in block.mlp.experts.parameters():
            p.data = p.data.chunk(model.ep.size())[model.ep.rank()].clone()
    return model, optimizer_of(cfg, model), forward_backward_experts, clip_gradients, evaluate, tensors_experts


# ----------------------------------------------------------------------------------- 10_mixed_precision/fp8_tensorwise


def in_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = x.abs().max().float() * (1 / torch.finfo(dtype).max)
    return (x.float() * (1 / scale)).to(dtype).double() * scale


class Rounded(torch.autograd.Function):
    """The products of fp8 by hand, in float64."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = in_fp8(x, torch.float8_e4m3fn), in_fp8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return (x @ weight.T).bfloat16()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), dy = ctx.saved_tensors, in_fp8(dy, torch.float8_e5m2)
        return (dy @ weight).bfloat16(), (dy.flatten(0, 1).T @ x.flatten(0, 1)).bfloat16()


class RoundedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x, self.weight) + self.bias


def replace_linears(cfg: Config, layer) -> GPT:
    """Return the model with other linears in its blocks, whose weights are bf16; nothing else is."""
    model = initialize(cfg, GPT(cfg))
    for part in model.blocks.modules():
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                child.weight.data = child.weight.bfloat16()
                setattr(part, name, layer(child))
    return model


def rounded(cfg: Config):
    return in_one_process(cfg, replace_linears(cfg, RoundedLinear))


def fp8(cfg: Config):
    model = replace_linears(cfg, replaced)
    quantize_weights(model)
    optimizer = optimizer_of(cfg, model)
    optimizer.register_step_post_hook(lambda *_: quantize_weights(model))
    return model, optimizer, forward_backward, clip, mean_loss, tensors


def main() -> dict[str, Tensor]:
    cfg, technique = Config(), globals()[sys.argv[1]]
    if technique is not single:
        dist.init_process_group("gloo")
    record = train(cfg, *technique(cfg))
    if technique is not single:
        dist.destroy_process_group()
    return record


if __name__ == "__main__":
    main()
