"""AdamW in two launches is torch's AdamW after torch's clip, whatever parameters and gradients look like."""

import pytest
import torch
from contract import SMALL
from launch import in_a_fork, launch, load
from probes import random
from recipes import KERNELS, ROOT_RECIPE
from torch import Tensor, nn

ADAMW = "09_kernels/adamw.py"
OPTIONS = dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


def gradient(form: str, p: Tensor, step: int, i: int) -> Tensor | None:
    if form == "odd" and (i == 2 or i == step):
        return None
    dy = random(*p.shape, seed=7 * step + 1) * (3 if step % 2 else 1e-3)
    if form in ("nan", "inf") and i == step == 1:
        dy[7] = float(form)  # under a clip all weights become NaN: the next loss shows it
    return dy.mT.contiguous().mT if form == "odd" and dy.ndim > 1 else dy


def in_groups(weights: list[nn.Parameter]) -> list[dict]:
    return [dict(params=weights[:1], lr=0.03), dict(params=weights[1:], weight_decay=0.0)]


@pytest.mark.parametrize("form", ["odd", "nan", "inf"])
@in_a_fork
def test_equals_torch(form, file=None):
    """Four steps in float64: weights, and the norms of all gradients before the clip.

    Odd are: misaligned weights, strided gradients, gradients that come and go. Learning rates change.
    """
    module, mine, theirs = load(file or ADAMW), [], []
    for shape in (30, 40), (17,), (3, 5, 7), (40_000,), (1,):
        theirs.append(nn.Parameter(random(*shape)))
        place = torch.empty(40_001, dtype=torch.float64)[1 if form == "odd" else 0 :]
        mine.append(nn.Parameter(place[: theirs[-1].numel()].view(shape).copy_(theirs[-1])))
    optimizer = module.AdamW(in_groups(mine), lr=0.01, clip=0.5, **OPTIONS)
    other = torch.optim.AdamW(in_groups(theirs), lr=0.01, **OPTIONS)
    for step in range(4):
        for weights in mine, theirs:
            for i, p in enumerate(weights):
                p.grad = gradient(form, p, step, i)
        for group in optimizer.param_groups + other.param_groups:
            group["lr"] *= 0.5 if step % 2 else 3
        norm, right = optimizer.step(), nn.utils.clip_grad_norm_(theirs, 0.5)
        other.step()
        assert norm.shape == right.shape and module.relative_error(norm, right) <= 1e-12, "the norm differs"
        errors = [module.relative_error(p.detach(), q.detach()) for p, q in zip(mine, theirs)]
        assert max(errors) <= 1e-12, f"step {step}: weights differ from torch's by {errors}"


@in_a_fork
def test_loaded_weights_are_not_undone(file=None):
    """In fp32 they are what is trained; of bf16 a step asks for the masters, and takes them.

    Before the first step, what raises no version counts, too: a broadcast.
    """
    module = load(file or ADAMW)
    layers = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).bfloat16()
    for layer in layers:
        optimizer = module.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0)
        for value in 3.0, 5.0:
            if value == 5:
                layer.load_state_dict({"weight": torch.full((4, 4), value)}, assign=False)
            layer.weight.data = torch.full_like(layer.weight, value)  # elsewhere, as Module.to does
            if layer.weight.dtype == torch.bfloat16:
                optimizer.step()  # without a gradient
                layer.weight.grad = torch.ones_like(layer.weight)
                with pytest.raises(ValueError, match="not its rounded master"):
                    optimizer.step()
                optimizer.slots[0].master.fill_(value)
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
            assert torch.allclose(layer.weight.float(), torch.tensor(value - 0.1), rtol=0.01), layer.weight
            optimizer.zero_grad()


@in_a_fork
def test_what_the_optimizer_cannot_step(file=None):
    """A parameter that was cast or laid out anew, one without an address, and options that a group may not have."""
    AdamW = load(file or ADAMW).AdamW
    for change in Tensor.bfloat16, lambda x: x.T.contiguous().T:
        p = nn.Parameter(random(4, 3))
        optimizer = AdamW([p], lr=0.1)
        p.data = change(p.data)
        p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match="dtype, device or layout"):
            optimizer.step()
    p = nn.Parameter(random(4, 3))
    for words, *groups in [
        ("memory", dict(params=[nn.Parameter(torch.ones(4, device="meta"))])),
        ("no parameters",),
        ("betas, eps and clip", dict(params=[p], betas=(0.9, 0.95))),
        ("contiguous", dict(params=[nn.Parameter(random(3, 4).T)])),
        ("one group each", dict(params=[p]), dict(params=[p])),
    ]:
        with pytest.raises(ValueError, match=words):
            AdamW(groups, lr=0.1)
    before = p.detach().clone()
    assert AdamW(p, lr=0.1).step() == 0 and torch.equal(p, before), "a step without gradients changes weights"


def test_training_starts_from_what_is_not_rounded(file=None):
    """With bf16 weights beside them, too, masters begin as the root's fp32 weights, and it is they that are saved."""
    mine = launch(file or KERNELS, 1, f"{SMALL} --dtype bfloat16 --steps 0").weights
    theirs = launch(ROOT_RECIPE, 1, f"{SMALL} --steps 0").weights
    assert {tensor.dtype for tensor in mine.values()} == {torch.float32}, "rounded weights are saved"
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items()), "masters are rounded"


@in_a_fork
def test_dtypes_side_by_side(file=None):
    """Bf16 and fp32 parameters: one norm clips them all, and what is bf16 is its fp32 master, rounded.

    They begin as zeros: fp32 steps are seen, in which 1 - 0.999 is computed before it is rounded.
    """
    module = load(file or ADAMW)
    dtypes = torch.bfloat16, torch.float32, torch.float32
    weights = [nn.Parameter(torch.zeros(300, dtype=dtype)) for dtype in dtypes]
    optimizer = module.AdamW(enumerate(weights), lr=0.01, clip=1.0, **OPTIONS)  # pairs of name and parameter
    wide = [nn.Parameter(p.detach().double()) for p in weights]
    torchs = torch.optim.AdamW(wide, lr=0.01, **OPTIONS)
    for step in range(3):
        for i, (p, q) in enumerate(zip(weights, wide)):
            p.grad = random(300, seed=10 * step + i).to(p.dtype)
            q.grad = p.grad.double()
        assert module.relative_error(optimizer.step(), nn.utils.clip_grad_norm_(wide, 1.0)) <= 1e-6, "the norm differs"
        torchs.step()
    for slot, q in zip(optimizer.slots, wide):
        assert module.relative_error(slot.master, q.detach()) <= 1e-6, "differs from torch's"
        assert torch.equal(slot.parameter, slot.master.to(slot.parameter.dtype)), "is not its master, rounded"
        assert slot.parameter._version, "a backward of the old weights would be no error"
