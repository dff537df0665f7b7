"""Muon is what torch.optim.Muon is, and orthogonalises."""

import copy
import types

import equivalence
import pytest
import torch
from compare import assert_close, history_errors, relative_errors
from launch import launch, load
from recipes import MUON
from torch.utils.flop_counter import FlopCounterMode

TRAIN = "01_single_gpu/train.py"


@pytest.mark.parametrize("dtype, low, high", [("float64", 0.68, 1.21), ("bfloat16", 0.6, 1.3)])
def test_orthogonalise(dtype, low, high, file=MUON):
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


def test_flops(file="03_zero/muon.py"):
    """Owners are chosen by the FLOPs that Newton-Schulz takes."""
    module, x = load(file), torch.ones(60, 16)
    with FlopCounterMode(display=False) as counter:
        module.orthogonalise(x)
    assert module.newton_schulz_flops(x) == counter.get_total_flops(), "the FLOPs are others"


@pytest.mark.parametrize("recipe", [MUON, "03_zero/muon.py"])
def test_state_can_be_loaded(recipe, file=None):
    """A second optimizer takes over: one moment per element, beside the step that AdamW's load_state_dict asks for."""
    module, generator = load(file or recipe), torch.Generator().manual_seed(0)
    between, size = [module.Config()], [4, 6]
    if recipe.startswith("03"):  # where the shard is flat
        between, size = [*between, types.SimpleNamespace(owned_shapes=[torch.Size(size)])], [24]
    p, q = torch.nn.Parameter(torch.ones(size)), torch.nn.Parameter(torch.ones(size))
    first, second = (torch.optim.AdamW([dict(params=[x], momentum=0.9)]) for x in (p, q))
    p.grad = torch.ones(size)
    first.step()  # it was AdamW's before
    q.data.copy_(p)
    for _ in range(3):
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        p.grad = torch.randn(size, generator=generator)
        q.grad = p.grad.clone()
        for optimizer in first, second:
            module.muon_step(*between, optimizer)
        assert torch.equal(p, q) and set(first.state[p]) == {"step", "momentum"}, "the state that was loaded is another"


def test_a_tied_head_is_adamws_and_stepped_once():
    module = load(MUON)
    model = module.build_model(module.Config(layers=1, device="cpu"))
    model.lm_head.weight = model.model.embed_tokens.weight
    blocks, tables, _ = (group["params"] for group in module.make_optimizer(module.Config(), model).param_groups)
    assert len(tables) == 1 and tables[0] is model.lm_head.weight and all(p is not tables[0] for p in blocks)


def torchs_muon(module):
    """A probe: the root with torch's Muon, which computes in float64 instead of bfloat16, for the blocks."""

    def make_optimizer(cfg, model):
        torch.Tensor.bfloat16 = torch.Tensor.double
        blocks = [p for p in model.model.layers.parameters() if p.ndim > 1]
        tables = [model.model.embed_tokens.weight, model.lm_head.weight]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [dict(params=tables, weight_decay=cfg.weight_decay), dict(params=vectors, weight_decay=0.0)]
        adamw = torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=cfg.eps)
        options = dict(weight_decay=cfg.weight_decay, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        muon = torch.optim.Muon(blocks, lr=cfg.lr, **options)

        def before(*_):
            muon.param_groups[0]["lr"] = adamw.param_groups[0]["lr"]
            muon.step()
            muon.zero_grad()

        adamw.register_step_pre_hook(before)
        return adamw

    module.make_optimizer = make_optimizer
    return lambda: None


def test_trains_as_with_torchs_muon(file=MUON):
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} {equivalence.TRAINING}"
    ours = launch(file, 1, f"{flags} --momentum 0.9")
    theirs = launch(TRAIN, 1, flags, probe=torchs_muon)
    errors = relative_errors(ours.weights, theirs.weights) | history_errors(ours.history, theirs.history)
    assert_close(errors, 1e-10, "muon.py against torch.optim.Muon")
