"""A trainer of one's own: test_pasted.py pastes into it what the recipes' Copy lines list, and it must train as before.

Up to the line "pasted here" it trains in one process, and knows nothing of the recipes. Its models are transformers'
GPT-2, with LayerNorm, frozen position embeddings, and one tensor for embedding and head, and a plain Llama with biases
and names of its own. It accumulates gradients and clips them. After that line stands, technique by technique, the glue:
what the Copy lines leave to the reader. Each cfg has no more than the Needs lines name.
"""

# ruff: noqa: F821  the glue calls what is pasted

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

IGNORE = -100
LAYERS, WIDTH, HEAD, HIDDEN, VOCAB = 4, 24, 6, 40, 37
SEQUENCES, LENGTH, MICRO_BATCHES, STEPS, CLIP = 8, 16, 2, range(3), 0.5
AdamW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def rotated(x: Tensor) -> Tensor:
    """x [b, h, s, k]: the complex numbers of which its last axis consists, turned by their positions."""
    angles = torch.outer(torch.arange(x.shape[2]), torch.tensor([1, 0.01, 0.0001])).to(x.dtype)
    numbers = torch.view_as_complex(x.unflatten(3, (-1, 2)))
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(3)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(WIDTH, 1e-5) for _ in range(2))
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))
        self.feed_forward = FeedForward()

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(2, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def new_llama() -> nn.Sequential:
    embedding, blocks = nn.Embedding(VOCAB, WIDTH), [Block() for _ in range(LAYERS)]
    return nn.Sequential(embedding, *blocks, nn.RMSNorm(WIDTH, 1e-5), nn.Linear(WIDTH, VOCAB))


def new_gpt2(attention: str = "sdpa") -> nn.Module:
    sizes = dict(vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=WIDTH // HEAD)
    dropout = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False, attn_implementation=attention))
    model.transformer.wpe.requires_grad_(False)
    return model


def initialized(model: nn.Module) -> nn.Module:
    """Draw all weights, and biases, none of which is 0 or 1: a forgotten one is seen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.double().named_parameters():
            p.normal_(1.0 if p.ndim == 1 and name.endswith("weight") else 0.0, 0.1, generator=generator)
    return model


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Return random ids, and targets of which every sequence ignores another share."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
    share = torch.randint(100, (SEQUENCES, 1), generator=generator)
    ignored = torch.randint(100, (SEQUENCES, LENGTH), generator=generator) < share
    return ids[:, :-1], ids[:, 1:].masked_fill(ignored, IGNORE)


def sum_of_losses(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    output = model(ids)
    logits = getattr(output, "logits", output).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")


def accumulate(model: nn.Module, ids: Tensor, targets: Tensor) -> None:
    for x, y in zip(ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)):
        loss = sum_of_losses(model, x, y) / (targets != IGNORE).sum()
        loss.backward()


def clip(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def validate(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return sum_of_losses(model, ids, targets) / (targets != IGNORE).sum()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def train(model, accumulate=accumulate, clip=clip, validate=validate, weights=weights, optimizer=None, steps=STEPS):
    """Return gradient norm and validation loss of each step, and the weights after the last."""
    optimizer, log = optimizer or AdamW(model.parameters()), {}
    for step in steps:
        accumulate(model, *batch(step))
        log[f"gradient norm of step {step}"] = clip(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            log[f"validation loss after step {step}"] = validate(model, *batch(1000 + step))
    return log | weights(model)


def gpt2() -> dict[str, Tensor]:
    return train(initialized(new_gpt2()))


def llama() -> dict[str, Tensor]:
    return train(initialized(new_llama()))


# ------------------------------------------------------------------------------------------------------- pasted here

SPLIT = dict(wq=0, wk=0, wv=0, wo=1, w1=0, w2=1, w3=0)
VOCABULARY = ("transformer.wte.weight",)


def forward(cfg: SimpleNamespace, model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return sum_of_losses(model, x, targets)


def micro_losses(model: nn.Module, ids: Tensor, targets: Tensor, dp: dist.ProcessGroup, tokens=slice(None)):
    """Yield this rank's losses one by one: of some rows of the batch, and some tokens of these."""
    micro = (x.chunk(dp.size())[dp.rank()][:, tokens].chunk(MICRO_BATCHES) for x in (ids, targets))
    for x, y in zip(*micro):
        yield sum_of_losses(model, x, y) / (targets != IGNORE).sum()


def groups_of(**sizes: int) -> list[dist.ProcessGroup]:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return [mesh.get_group(name) for name in sizes]


def bucketed() -> dict[str, Tensor]:
    def accumulate(model: nn.Module, ids: Tensor, targets: Tensor) -> None:
        first, last = micro_losses(model, ids, targets, dist.group.WORLD)
        first.backward()
        backward(model, last, bucket_mb=0.02)

    return train(initialized(new_gpt2()), accumulate, validate=partial(evaluate, SimpleNamespace(device="cpu")))


def in_freed_units(tp: dist.ProcessGroup | None = None) -> list:
    """Return GPT-2 in units, and how it is trained. Unit 0 stays whole: nothing would gather it for its backward."""

    def accumulate(model: nn.Module, ids: Tensor, targets: Tensor) -> None:
        for loss in micro_losses(model, ids, targets, model.dp):
            loss.backward()
            reduce(model, 0)
        free(model.units[0])
        assert not any(unit.full.untyped_storage().size() for unit in model.units), "whole weights are left"

    def after_step(*_) -> None:
        for unit in model.units:
            unit.gather_work = unit.gradient = None

    def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
        for unit in model.units:
            gather(unit, None)
            unit.gather_work.wait()
        return weights(model)

    model, cfg = initialized(new_gpt2()), SimpleNamespace(clip=CLIP, device="cpu", microbatches=MICRO_BATCHES)
    gpt = model.transformer
    model.dp, model.world, model.tp = dist.group.WORLD, dist.group.WORLD, tp
    model.units, model.reductions_in_flight, model.gather_stream, model.reduce_stream = [], [], None, None
    blocks = {f"transformer.h.{i}.": block for i, block in enumerate(gpt.h)}
    for i, (names, part) in enumerate({"transformer.wte.": gpt.wte, **blocks, "transformer.ln_f.": gpt.ln_f}.items()):
        named = [(name, p) for name, p in model.named_parameters() if name.startswith(names) and p.requires_grad]
        model.units.append(make_unit(named, lambda name, _: model.get_parameter(name), model.dp, "cpu", torch.float64))
        free(model.units[i])
        part.register_forward_pre_hook(lambda _, inputs, i=i: before_forward(model, i, inputs[0]))
        if i > 0:
            part.register_forward_hook(lambda *_, i=i: after_forward(model, i))
    check_units(model)
    optimizer = AdamW([p for unit in model.units for p in (unit.matrices, unit.vectors)])
    optimizer.register_step_post_hook(after_step)
    return [model, accumulate, partial(clip_gradients, cfg), partial(evaluate, cfg), gathered_weights, optimizer]


def zero3() -> dict[str, Tensor]:
    return train(*in_freed_units())


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {p: name for name, p in model.named_parameters()}


def checkpoint() -> dict[str, Tensor]:
    """Train two steps, write a checkpoint, start anew, resume, and train the third."""
    folder, (_, tp) = str(Path(__file__).parent / "checkpoints"), groups_of(dp=dist.get_world_size(), tp=1)
    cfg = SimpleNamespace(checkpoint=folder, device="cpu", keep=1, kv_heads=1, resume="", vocab=VOCAB)
    writers = dist.new_group(backend="gloo")
    model, *functions, optimizer = in_freed_units(tp)
    log = train(model, *functions, optimizer, STEPS[:2])
    history = [log["gradient norm of step 1"].item()]  # of every second step
    with ThreadPoolExecutor(1) as thread:
        write(cfg, model, optimizer, 2, history, writers, thread).result()
    model, *functions, optimizer = in_freed_units(tp)
    step, read = resume(cfg, model, optimizer, writers)
    assert read == history, f"read {read}, written was {history}"
    return log | train(model, *functions, optimizer, STEPS[step:])


def pipeline() -> dict[str, Tensor]:
    def accumulate(model: nn.Module, ids: Tensor, targets: Tensor) -> None:
        micro = (x.chunk(dp.size())[dp.rank()].tensor_split(cfg.microbatches) for x in (ids, targets))
        operations = schedule(model.stage, model.stages, cfg.microbatches)
        run_schedule(cfg, model, operations, *micro, (targets != IGNORE).sum())
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp)

    cfg = SimpleNamespace(clip=CLIP, device="cpu", dim=WIDTH, dtype="float64", microbatches=3)
    (pp, dp), (backwards, _) = (groups_of(pp=2, dp=2) for _ in range(2))
    model = initialized(new_llama())[slice(2) if pp.rank() == 0 else slice(2, None)]
    model.pp, model.stage, model.stages = pp, pp.rank(), pp.size()
    model.links = connect({"F": pp, "B": backwards}, [*range(pp.size())], cfg.device)
    if model.stage == 0:  # run_schedule calls it by this name
        globals()["forward"] = lambda cfg, model, x, targets: model(x)
    return train(model, accumulate, partial(clip_gradients, cfg), partial(evaluate, cfg))


def tensor_parallel() -> dict[str, Tensor]:
    model, cfg, tp = initialized(new_llama()), SimpleNamespace(clip=CLIP, kv_heads=2), dist.group.WORLD
    model.tp, split = tp, {}
    for name, p in model.named_parameters():
        axis, parts = placement(name, tp.size(), cfg.kv_heads)
        if parts > 1:
            split[name] = axis
            p.data = p.data.chunk(parts, axis)[tp.rank()].contiguous()
    for block in model[1:-2]:
        for part in block.attention_norm, block.ffn_norm:
            part.register_forward_hook(lambda of, _, y: CopyToTP.apply(y, tp))
        for part in block.wo, block.feed_forward.w2:
            part.register_forward_hook(lambda of, _, y: ReduceFromTP.apply(y - of.bias, tp) + of.bias)
    log = train(model, clip=partial(clip_gradients, cfg))
    return log | {name: torch.cat(all_gather(log[name], tp), axis) for name, axis in split.items()}


def zigzag() -> dict[str, Tensor]:
    def ring(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **more) -> tuple[Tensor, None]:
        return attention(q, k, v, cp).transpose(1, 2), None

    def accumulate(model: nn.Module, ids: Tensor, targets: Tensor) -> None:
        first, last = micro_losses(model, ids, targets, dp, positions)
        first.backward()
        backward_and_sum(model, last, dist.group.WORLD)

    (dp, cp), cfg = groups_of(dp=2, cp=2), SimpleNamespace(device="cpu", seq=LENGTH)
    AttentionInterface.register("ring", ring)
    model, positions = initialized(new_gpt2("ring")), shard(cfg, cp)
    model.cp, more = cp, {"position_ids": positions[None]}
    model.register_forward_pre_hook(lambda module, inputs, _: (inputs, more), with_kwargs=True)
    return train(model, accumulate, validate=partial(evaluate, cfg))


def with_experts(*groups: dist.ProcessGroup) -> nn.Module:
    model, cfg = new_llama(), SimpleNamespace(dim=WIDTH, experts=4, ffn=20, top_k=2)
    for block in model[1:-2]:
        block.feed_forward = MLP(cfg, *groups)
    return initialized(model)


def moe() -> dict[str, Tensor]:
    return train(with_experts())


def experts() -> dict[str, Tensor]:
    def accumulate(model: nn.Module, ids: Tensor, targets: Tensor) -> None:
        for loss in micro_losses(model, ids, targets, model.dp):
            loss.backward()
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad, group=model.edp if ".experts." in name else model.dp)

    (edp, ep, one), cfg = groups_of(edp=2, ep=2, one=1), SimpleNamespace(clip=CLIP, device="cpu")
    model = with_experts(one)  # draws all experts; a part of them stays
    model.dp, model.edp = dist.group.WORLD, edp
    for block in model[1:-2]:
        block.feed_forward.ep = ep
        for p in block.feed_forward.experts.parameters():
            p.data = p.data.chunk(ep.size())[ep.rank()].clone()
    log = train(model, accumulate, partial(clip_gradients, cfg), partial(evaluate, cfg))
    return {name: torch.cat(all_gather(x, ep)) if ".experts." in name else x for name, x in log.items()}


def kernel() -> dict[str, Tensor]:
    model = initialized(new_llama())
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(rms_norm, weight=module.weight, eps=1e-5)
    return train(model)


def main() -> None:
    global log
    dist.init_process_group("gloo")
    log = globals()[sys.argv[1]]()
    dist.destroy_process_group()
