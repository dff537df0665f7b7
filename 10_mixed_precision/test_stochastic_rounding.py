"""Stochastic rounding: chance is fair, independent, and the same in every run; what arrives of small updates; bytes.

Each rounding is compared with AdamW's formula in float64, applied to what the recipe had before the step. Given that,
the errors have expectation 0 and a known variance, and none knows of another: sums of them are within six standard
deviations, which chance would leave once in 500 million sums. Nothing is rounded in float64: that the recipe then
equals the root is the contract's. Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py
tries bugs with them.
"""

import gc
import sys
import zlib
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from launch import in_a_fork, isolated, load
from probes import bytes_of_tensors
from torch import Tensor

SR = "10_mixed_precision/stochastic_rounding.py"
SMALL = "--layers 2 --dim 64 --heads 4 --kv_heads 2 --ffn 96 --seq 16 --batch 8 --warmup 0 --device cpu"
KEPT = "weight", "mean", "square"
SIGMAS = 6


def start(file: str | None, flags: str) -> tuple[ModuleType, tuple, tuple]:
    """The recipe; what its train_step takes; its data."""
    module = load(file or SR)
    sys.argv = ["recipe", *f"{SMALL} --dtype bfloat16 {flags}".split()]
    cfg = module.parse_config()
    model = module.build_model(replace(cfg, compile=False))  # --compile is for the optimizer, here
    return module, (cfg, model, module.make_optimizer(cfg, model)), module.load_data(cfg)[0]


def kept_by(optimizer) -> dict[str, tuple[Tensor, ...]]:
    """Copies of weight, mean and square of each parameter."""
    slots = {slot.name: (slot.parameter, slot.mean, slot.square) for slot in optimizer.slots}
    return {name: tuple(x.detach().clone() for x in kept) for name, kept in slots.items()}


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of fp32 x, in float64: the bf16 number next to it towards zero, and the one away from zero, or the next."""
    lower = x.view(torch.int32) & -0x10000
    return lower.view(torch.float32).double(), (lower + 0x10000).view(torch.float32).double()


def keys(file: str | None, count: int) -> Tensor:
    """Those of a tensor in that many steps [count, 1], as the recipe makes them."""
    of_tensor = torch.tensor(zlib.crc32(b"0 lm_head.weight 0")).to(torch.int32)
    return load(file or SR).random_bits(of_tensor, torch.arange(1, count + 1, dtype=torch.int32))[:, None]


def some_values(count: int) -> Tensor:
    """Float32 of all magnitudes, from bf16's smallest number on, at 2 to 98 % of the way between neighbours."""
    generator = torch.Generator().manual_seed(0)
    upper = torch.linspace(1, 0x7F7E, count).int()  # as bits of bf16: exponents from end to end, then any mantissa
    lower = torch.randint(0x0500, 0xFB00, (count,), generator=generator, dtype=torch.int32)
    x = (upper << 16 | lower).view(torch.float32)
    return torch.cat([x, -x])


# ------------------------------------------------------------------------------------------------------------ rounding
@in_a_fork
def test_every_chance_counts(file=None):
    """Of the 65,536 values of the random bits, exactly as many round up as x is 65,536ths of the way up.

    Of larger integers, the lowest 16 bits count.
    """
    module, x = load(file or SR), some_values(20)
    low, high = neighbours(x)
    bits = torch.arange(2**16, dtype=torch.int32)[:, None]
    found = module.round_stochastically(x.expand(2**16, -1), bits)
    for more in bits | bits << 16, bits.long() << 40 | bits, bits.short():
        same = torch.equal(module.round_stochastically(x.expand(2**16, -1), more), found)
        assert same, f"others of {more.dtype} round up, not those of their lowest 16 bits"
    away = (found.double() == high).sum(0)
    assert found.dtype == torch.bfloat16 and ((found.double() == low).sum(0) == 2**16 - away).all(), "no neighbour"
    wanted = (x.double() - low) / (high - low) * 2**16
    assert torch.equal(away.double(), wanted), f"{away.tolist()} round up, not {wanted.tolist()}"


@in_a_fork
def test_what_bf16_holds_stays(file=None):
    """All 65,536 numbers of bf16, among them zeros of both signs, subnormals, inf and NaN, whatever the bits."""
    module = load(file or SR)
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    quiet = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN, too
    for chance in 0, 1, 0x7FFF, 0xFFFF:
        bits = torch.full(numbers.shape, chance, dtype=torch.int32)
        found = module.round_stochastically(numbers.float(), bits)
        same = (found.view(torch.int16) == numbers.view(torch.int16)) | (found.isnan() & numbers.isnan())
        assert same.all(), f"{numbers[~same][:3].tolist()} have become {found[~same][:3].tolist()}"
        assert module.round_stochastically(quiet, bits[:4]).isnan().all(), "a NaN is lost"


# -------------------------------------------------------------------------------------------------------------- chance
@in_a_fork
def test_bits_are_uniform(file=None):
    """Each value of the upper and of the lower 16 bits is as frequent as chance allows, over indices and over steps."""
    random_bits = load(file or SR).random_bits
    index = torch.arange(2**21, dtype=torch.int32)
    of_indices = random_bits(index, keys(file, 1)[0])
    of_steps = random_bits(index[:512], keys(file, 2**12)).flatten()
    for bits in of_indices, of_steps:
        for half in bits & 0xFFFF, bits >> 16 & 0xFFFF:
            counts, mean = half.bincount(minlength=2**16).double(), bits.numel() / 2**16
            chi_square = ((counts - mean) ** 2 / mean).sum().item()
            # 2^16 - 1 degrees of freedom, of each of which the variance is 2
            off = (chi_square - (2**16 - 1)) / (2 * (2**16 - 1)) ** 0.5
            assert abs(off) < SIGMAS, f"frequencies are off by {off:.1f} standard deviations"


def test_bits_are_independent(file=None):
    """No bit tells of another: of the same number, of neighbours, of other steps, tensors and seeds."""

    def compute():
        random_bits, n = load(file or SR).random_bits, 2**14
        index, steps = torch.arange(n, dtype=torch.int32), torch.tensor([[1], [2]], dtype=torch.int32)
        names = [f"{seed} {name} {i}" for seed in (0, 1) for name in ("lm_head.weight", "norm.weight") for i in (0, 1)]
        of_tensors = torch.tensor([zlib.crc32(name.encode()) for name in names]).to(torch.int32)
        in_steps = random_bits(of_tensors, steps).flatten()
        streams = [random_bits(index, key) for key in in_steps]
        streams += [random_bits(index + lag, in_steps[0]) for lag in (1, 2, 64, n)]
        bits = torch.stack(streams)[:, None] >> torch.arange(32, dtype=torch.int32)[:, None] & 1
        signs = bits.flatten(0, 1) * 2.0 - 1
        return ((signs @ signs.T).fill_diagonal_(0).abs().max() / n**0.5).item()  # sums of n signs: variance n

    off = isolated(compute)
    assert off < SIGMAS, f"two bits agree {off:.1f} standard deviations too often, or too rarely"


def test_close_keys_share_no_bits(file=None):
    """Keys that differ in one of their lower bits do not give the same numbers in another order.

    Of so many tensors, some have keys that agree in the upper bits. Of 2^16 numbers of 32 bits, one is found among 2^16
    others on average.
    """

    def compute():
        random_bits, index, key = load(file or SR).random_bits, torch.arange(2**16, dtype=torch.int32), keys(file, 1)[0]
        numbers = random_bits(index, key)
        return [torch.isin(random_bits(index, key ^ 1 << bit), numbers).sum().item() for bit in range(16)]

    shared = max(isolated(compute))
    assert shared < 2**16 / 100, f"{shared} of 65,536 numbers are those of another key"


@in_a_fork
def test_no_two_tensors_share_a_key(file=None):
    """Weights and moments of all tensors of the presets have their own keys, with any of several seeds."""
    for preset in "smollm_1_7b", "llama3_8b":
        for seed in range(3):
            module = load(file or SR)
            sys.argv = ["recipe", "--device", "cpu", "--preset", preset, "--seed", str(seed)]
            cfg = module.parse_config()
            with torch.device("meta"):
                model = module.Model(cfg)
            optimizer = module.make_optimizer(cfg, model)
            count, different = optimizer.keys.numel(), len(optimizer.keys.unique())
            assert count >= 2 * len(optimizer.slots) == 2 * len(list(model.parameters()))
            assert different == count, f"{count} keys, {different} different ones"


# ------------------------------------------------------------------------------------------------------------- layouts
@in_a_fork
def test_layouts_round_alike(file=None):
    """Rows, columns or any elements of a tensor round as in the whole, with the indices that they have there."""
    module, key = load(file or SR), keys(file, 1)[0]
    shape = 96, 40
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    index = torch.arange(whole.numel(), dtype=torch.int32).view(shape)

    def rounded(part) -> Tensor:
        return module.round_stochastically(whole[part].contiguous(), module.random_bits(index[part], key) & 0xFFFF)

    found = module.round_stochastically(whole.flatten(), module.random_bits(index.flatten(), key) & 0xFFFF)
    some = torch.randperm(96, generator=torch.Generator().manual_seed(1))[:7]
    for part in (slice(32, 64),), (slice(None), slice(10, 20)), (some,), (95, slice(39, 40)):
        assert torch.equal(rounded(part), found.view(shape)[part]), f"{part} is rounded otherwise than in the whole"


@pytest.mark.parametrize("width", [1024, 7])
@in_a_fork
def test_an_update_rounds_each_element_by_its_index(width, file=None):
    """In rows of any width: weight and moments are what bits of the flat index make of them, for each its own bits."""
    module, generator = load(file or SR), torch.Generator().manual_seed(0)
    weight, mean, gradient = (torch.randn(3, width, generator=generator).bfloat16() for _ in range(3))
    square = mean.square()
    decay, pair = 1 - 2.0**-12, torch.tensor([123456789, -987654321], dtype=torch.int32)
    wide, g = weight.float(), gradient.float()
    exact = wide * decay, mean.float().lerp(g, 0.1), square.float().lerp(g.square(), 0.05)
    numbers = torch.tensor([1, 0, 1, decay, 1], dtype=torch.float64)  # no clip, a learning rate of 0
    module.update(weight, mean, square, gradient, numbers, pair)
    first, second = (module.random_bits(torch.arange(3 * width, dtype=torch.int32), key) for key in pair)
    bits = first & 0xFFFF, first >> 16 & 0xFFFF, second & 0xFFFF
    for kind, found, x, chance in zip(KEPT, (weight, mean, square), exact, bits):
        wanted = module.round_stochastically(x.flatten(), chance).view_as(found)
        assert torch.equal(found, wanted), f"the {kind} is not rounded by the bits of its index"


@in_a_fork
def test_runs_repeat_and_seeds_differ(file=None):
    """Two runs are the same to the bit; from the same weights, with the same batch, another seed rounds otherwise."""

    def run(seed: int) -> list[Tensor]:
        module, (cfg, model, optimizer), data = start(file, f"--seed {seed}")
        init, _, _ = start(file, "")[1]
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(module.full_tensor(init, name, p.shape))
        for step in range(2):
            module.train_step(cfg, model, optimizer, *module.make_batch(init, data, step))
        return [x for kept in kept_by(optimizer).values() for x in kept]

    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), "a run does not repeat"
    # at p of the way, two roundings differ with 2p(1 - p): of all p alike, a third; embeddings of absent bytes stay
    shares = [(x != y).float().mean().item() for x, y in zip(first, other, strict=True)]
    assert min(shares) > 0.02, f"with another seed, {min(shares):.0%} are rounded otherwise"


# ------------------------------------------------------------------------------------------------------------ training
def steps_of(file: str | None, flags: str, count: int):
    """Of each step: {name: (kept before it, kept after it, what AdamW's formula gives of the former, gradient)}."""
    module, (cfg, model, optimizer), data = start(file, f"--microbatches 1 --clip 0.5 {flags}")
    for step in range(count):
        module.set_learning_rate(cfg, optimizer, step)
        module.forward_backward(cfg, model, *module.make_batch(cfg, data, step))
        gradients = {name: p.grad.double() for name, p in model.named_parameters()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        assert norm > 0.5, "the clip does not act"
        before, exact = kept_by(optimizer), {}
        for name, (weight, mean, square) in before.items():
            gradient = gradients[name] = gradients[name] * 0.5 / (norm + 1e-6)
            mean = 0.9 * mean.double() + 0.1 * gradient
            square = 0.95 * square.double() + 0.05 * gradient**2
            rate = optimizer.param_groups[0]["lr"]
            adam = mean / (1 - 0.9 ** (step + 1)) / ((square / (1 - 0.95 ** (step + 1))).sqrt() + cfg.eps)
            weight = weight.double() * (1 - rate * cfg.weight_decay * (weight.ndim > 1)) - rate * adam
            exact[name] = weight, mean, square
        with torch.no_grad():
            optimizer.step(module.gradient_norm(optimizer))
        optimizer.zero_grad()
        after = kept_by(optimizer)
        yield {name: (before[name], after[name], exact[name], gradients[name]) for name in before}


def error_and_variance(found: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a rounding to bf16, in float64: its error, the variance it must have, and the distance of the neighbours."""
    low, high = neighbours(exact.float())
    return found.double() - exact, ((exact - low) * (high - exact)).clamp_min(0), high - low


@pytest.mark.parametrize("flags", ["", pytest.param("--compile", marks=pytest.mark.thorough)])
@in_a_fork
def test_training_rounds_fairly(flags, file=None):
    """In each step, the errors of weights and moments are as often up as down, and know nothing of each other.

    They are added up in three ways: away from zero, as rounding to nearest would go, and along the change of the step.
    That would show a bias of any kind. Then errors are paired: of weights with those of moments, of tensors of the same
    size, of steps that follow each other.
    """
    fair, rows = {}, {}
    for step, tensors in enumerate(steps_of(file, flags, 4)):
        for name, (before, after, exact, _) in tensors.items():
            for kind, old, found, x in zip(KEPT, before, after, exact):
                assert found.dtype == torch.bfloat16, f"{kind} of {name} is {found.dtype}"
                error, variance, distance = error_and_variance(found, x)
                # fp32's own roundings: 2^-24 of old, new and gradient, which is ten times their sum at most
                slack = 2**-19 * (x.abs() + old.double().abs())
                wrong = (error.abs() > distance.abs() + slack).sum().item()
                assert not wrong, f"{kind} of {name}: {wrong} numbers are no neighbours of the exact ones"
                chance = variance > 0.05 * distance**2  # from 1 to 19 of 20: sums of few are not yet normal
                nearest = (x - x.bfloat16().double()) / distance.abs()
                for way, direction in (
                    ("away from zero", distance.sign() / distance.abs()),
                    ("to the nearest", nearest / distance.abs()),
                    ("with the change", (x - old.double()).sign() / distance.abs()),
                ):
                    direction = torch.where(chance, direction, 0.0)
                    off = (error * direction).sum() / (variance * direction**2).sum().sqrt().clamp_min(1)
                    fair[step, name, kind, way] = off.item()
                if x.ndim > 1:
                    usual = torch.where(chance, error / variance.sqrt(), 0.0)
                    rows.setdefault(x.numel(), {})[step, name, kind] = usual.flatten()
    worst = max(fair, key=lambda key: abs(fair[key]))
    assert abs(fair[worst]) < SIGMAS, f"{worst}: the mean error is {fair[worst]:.1f} standard deviations"
    for size, errors in rows.items():
        names, errors = list(errors), torch.stack(list(errors.values()))
        pairs = (errors @ errors.T) / ((errors != 0).double() @ (errors != 0).double().T).sqrt().clamp_min(1)
        off, i = pairs.fill_diagonal_(0).abs().flatten().max(0)
        pair = [names[k] for k in divmod(i.item(), len(names))]
        assert off < SIGMAS, f"errors of {pair} are correlated: {off:.1f} standard deviations"
        off = (errors[:, 1:] * errors[:, :-1]).sum(1) / (errors[:, 1:] * errors[:, :-1] != 0).sum(1).sqrt()
        assert off.nan_to_num().abs().max() < SIGMAS, f"neighbours are rounded alike, among {size}"


@in_a_fork
def test_small_updates_arrive(file=None):
    """Where rounding to nearest would move few weights, all together move as far along fp32's step as fp32 does.

    A step u of a weight whose neighbours are d apart has the variance |u|(d - |u|): over n weights, the sum of u times
    what has moved is that of u^2 within six times the root of the sum of u^2 times that, some sqrt(d / (n |u|)) of it.
    """
    wanted, arrived, nearest, variances = {}, {}, {}, {}
    for tensors in steps_of(file, "--lr 2e-6 --dim 96 --weight_decay 0", 3):
        for name, (before, after, exact, _) in tensors.items():
            old = before[0].double()
            u = exact[0] - old
            for sums, x in (
                (wanted, u * u),
                (arrived, u * (after[0].double() - old)),
                (nearest, u * (exact[0].bfloat16().double() - old)),
                (variances, u * u * error_and_variance(after[0], exact[0])[1]),
            ):
                sums[name] = sums.get(name, 0) + x.sum().item()
    matrices = [name for name, (before, *_) in tensors.items() if before[0].ndim > 1]
    for names in [matrices, *([name] for name in matrices)]:
        all_of_it, arrives, rounded, variance = (
            sum(sums[name] for name in names) for sums in (wanted, arrived, nearest, variances)
        )
        bound, label = SIGMAS * variance**0.5 / all_of_it, names[0] if len(names) == 1 else "all matrices"
        assert abs(arrives / all_of_it - 1) < bound, f"{label}: {arrives / all_of_it:.3f} of the step arrives"
        assert names is not matrices or (rounded < 0.1 * all_of_it and bound < 0.2), (rounded / all_of_it, bound)


# ------------------------------------------------------------------------------------------------------- micro-batches
@in_a_fork
def test_sums_of_micro_batches_are_fp32(file=None):
    """What the optimizer gets of four micro-batches is the exact sum of their bf16 gradients; of one, its own."""
    module, (cfg, model, optimizer), data = start(file, "--microbatches 4")
    inputs, targets = module.make_batch(cfg, data, 0)
    tokens, parameters, exact = (targets != module.IGNORE).sum(), list(model.parameters()), None
    for x, y in zip(inputs.chunk(4), targets.chunk(4)):
        part = torch.autograd.grad(module.forward(cfg, model, x, y) / tokens, parameters)
        exact = [g.double() + (total if exact else 0) for g, total in zip(part, exact or part)]
    module.forward_backward(cfg, model, inputs, targets)
    for name, wanted, found in zip(dict(model.named_parameters()), exact, gradients_of(optimizer, model)):
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < 1e-6, f"{name}: the sum is off by {error:.1e}"  # 2^-24 three times; one in bf16: 2^-9
    norm, right = module.gradient_norm(optimizer), torch.cat([x.flatten() for x in exact]).norm()
    assert abs(norm / right - 1) < 1e-5, f"norm {norm}, exactly {right}"
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)  # of a micro-batch that nobody has added
    with pytest.raises(RuntimeError, match="lm_head.weight has a .grad beside its sum"):
        module.gradient_norm(optimizer)


def gradients_of(optimizer, model) -> list[Tensor]:
    """What AdamW takes, in the order of the model's parameters."""
    by_name = {slot.name: g for slot, g in zip(optimizer.slots, optimizer.gradients())}
    return [by_name[name] for name, _ in model.named_parameters()]


# --------------------------------------------------------------------------------------------------------------- bytes
@pytest.mark.parametrize("recipe", [SR, *(f"10_mixed_precision/{name}low_memory.py" for name in ("", "fp8_"))])
@in_a_fork
def test_bytes_between_steps(recipe, file=None):
    """All tensors of the process together have 6 bytes per parameter between steps: no master, gradient or sum is left.

    Beside them there are 8 bytes of keys per tensor and the count of steps, together less than the smallest matrix.
    """
    for flags in "--microbatches 1", "--microbatches 2":
        gc.freeze()  # what there is already is not counted
        module, (cfg, model, optimizer), data = start(file or recipe, flags)
        parameters = sum(p.numel() for p in model.parameters())
        smallest = min(p.numel() for p in model.parameters() if p.ndim > 1)
        for step in range(3):
            module.train_step(cfg, model, optimizer, *module.make_batch(cfg, data, step))
            assert all(p.grad is None for p in model.parameters()), "gradients are left"
            total = bytes_of_tensors()
            per_parameter = f"{total / parameters:.2f} bytes per parameter, with {flags}"
            assert 6 * parameters <= total < 6 * parameters + smallest, per_parameter
        dtypes = {x.dtype for kept in kept_by(optimizer).values() for x in kept}
        assert dtypes == {torch.bfloat16}, f"weights and moments are {dtypes}"
