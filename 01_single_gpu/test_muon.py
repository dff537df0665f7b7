"""Muon is what torch.optim.Muon is, and orthogonalises."""

import copy

import contract
import equivalence
import pytest
import torch
from compare import assert_close, history_errors, relative_errors
from launch import launch, load
from torch.utils.flop_counter import FlopCounterMode

TRAIN = "01_single_gpu/train.py"


@pytest.mark.parametrize("dtype, low, high", [("float64", 0.68, 1.21), ("bfloat16", 0.6, 1.3)])
def test_orthogonalise(dtype, low, high, file=equivalence.MUON):
    """Singular vectors stay, singular values are about 1, whatever their shape and size; and 0 stays 0."""
    module, generator, exact = load(file), torch.Generator().manual_seed(0), dtype == "float64"
    dtype = getattr(torch, dtype)
    for shape in (48, 48), (16, 60), (60, 16), (1, 30):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        values = torch.linspace(0.05, 1, len(v), dtype=torch.float64)
        x = 2e-7 / values.norm() * u @ values.diag() @ v
        core = u.T @ module.orthogonalise(x.to(dtype)).double() @ v.T
        around = (core - core.diag().diag()).abs().max()
        assert core.diag().min() > low and core.diag().max() < high, (shape, "its singular values are not about 1")
        assert around < (1e-10 if exact else 0.1), (shape, "its singular vectors have changed")
    assert not module.orthogonalise(torch.zeros(4, 6, dtype=dtype)).any()
    small = module.orthogonalise(torch.tensor([1, 1e-5], dtype=dtype).diag())[1, 1]  # 480 times larger, and no more
    assert 4.5e-3 < small < 5e-3, "small singular values are not enlarged 480 times"


@pytest.mark.parametrize("shape", [(16, 60), (60, 16), (24, 24)])
def test_flops(shape, file="03_zero/muon.py"):
    """What Newton-Schulz takes is what its owners are chosen by."""
    module, x = load(file), torch.ones(shape)
    with FlopCounterMode(display=False) as counter:
        module.orthogonalise(x)
    assert module.newton_schulz_flops(x) == counter.get_total_flops(), "the FLOPs are others"


def resumes(module):
    """A probe: whether a second optimizer takes over the state of the first, and steps as it would."""
    seen, muon_step = [], module.muon_step

    def step(cfg, *others):  # in 03 the model, and the optimizer
        optimizer = others[-1]
        twin = torch.optim.AdamW(
            [{**g, "params": [p.detach().clone() for p in g["params"]]} for g in optimizer.param_groups]
        )
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for ours, theirs in zip(optimizer.param_groups, twin.param_groups):
            for p, q in zip(ours["params"], theirs["params"]):
                q.grad = p.grad.clone()
        for one in optimizer, twin:
            muon_step(cfg, *others[:-1], one)
        mine, its = (list(one.param_groups[0]["params"]) for one in (optimizer, twin))
        seen.append(all(torch.equal(p, q) for p, q in zip(mine, its)))
        states = [optimizer.state[p] for p in mine]
        seen.append(all(set(state) == {"step", "momentum"} for state in states))

    module.muon_step = step
    return lambda: seen


@pytest.mark.parametrize("recipe, world", [(equivalence.MUON, 1), ("03_zero/muon.py", 2)])
def test_state_can_be_loaded(recipe, world, file=None):
    """One moment per element, beside the step that AdamW's load_state_dict asks for."""
    run = launch(file or recipe, world, f"{contract.SMALL} --steps 3", probe=resumes)
    assert run.probes == [[True] * 6] * world, "the state that was loaded is another"


class Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def torchs_muon(module):
    """A probe: the root with torch's Muon, which computes in float64 instead of bfloat16, for the blocks."""

    def make_optimizer(cfg, model):
        torch.Tensor.bfloat16 = torch.Tensor.double
        blocks = [p for p in model.model.layers.parameters() if p.ndim > 1]
        tables = [p for p in model.parameters() if p.ndim > 1 and all(p is not block for block in blocks)]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [dict(params=tables, weight_decay=cfg.weight_decay), dict(params=vectors, weight_decay=0.0)]
        adamw = torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=cfg.eps)
        like_adamw = dict(weight_decay=cfg.weight_decay, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        return Both(torch.optim.Muon(blocks, lr=cfg.lr, **like_adamw), adamw)

    module.make_optimizer = make_optimizer
    return lambda: None


def test_trains_as_with_torchs_muon(file=equivalence.MUON):
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} {equivalence.TRAINING}"
    ours = launch(file, 1, f"{flags} --momentum 0.9")
    theirs = launch(TRAIN, 1, flags, probe=torchs_muon)
    errors = relative_errors(ours.weights, theirs.weights) | history_errors(ours.history, theirs.history)
    assert_close(errors, 1e-10, "muon.py against torch.optim.Muon")
