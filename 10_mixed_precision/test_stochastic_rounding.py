"""Stochastic rounding: chance is fair, independent, and the same in every run; bytes; what is computed again.

Sums of random numbers are within six standard deviations, which chance would leave once in 500 million sums.
"""

import gc
import re
import zlib
from collections import Counter
from dataclasses import replace

import pytest
import torch
from launch import in_a_fork, isolated, load
from probes import Operations, bytes_of_tensors
from torch import Tensor

SR = "10_mixed_precision/stochastic_rounding.py"
LOW, FP8 = RECIPES = [f"10_mixed_precision/{name}.py" for name in ("low_memory", "fp8_low_memory")]
start = load("10_mixed_precision/test_masters.py").start
SIGMAS = 6


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of fp32 x, in float64: the bf16 number next to it towards zero, and the one away from zero, or the next."""
    lower = x.view(torch.int32) & -0x10000
    return lower.view(torch.float32).double(), (lower + 0x10000).view(torch.float32).double()


@in_a_fork
def test_every_chance_counts(file=None):
    """x rounds up for n of the 65,536 random bits if it lies n/65,536 of the way up; bf16 numbers, NaN and inf stay."""
    module, generator = load(file or SR), torch.Generator().manual_seed(0)
    upper = torch.linspace(1, 0x7F7E, 20).int()  # as bits of bf16: exponents from end to end, then any mantissa
    lower = torch.randint(2**16, (20,), generator=generator, dtype=torch.int32)
    x = (upper << 16 | lower).view(torch.float32)
    x = torch.cat([x, -x])
    low, high = neighbours(x)
    bits = torch.arange(2**16, dtype=torch.int32)[:, None]
    found = module.round_stochastically(x.expand(2**16, -1), bits)
    more = module.round_stochastically(x.expand(2**16, -1), bits | bits << 16)
    assert torch.equal(more, found), "others round up than those of their lowest 16 bits"
    away = (found.double() == high).sum(0)
    assert found.dtype == torch.bfloat16 and ((found.double() == low).sum(0) == 2**16 - away).all(), "no neighbour"
    wanted = (x.double() - low) / (high - low) * 2**16
    assert torch.equal(away.double(), wanted), f"{away.tolist()} round up, not {wanted.tolist()}"
    numbers = bits.flatten().to(torch.int16).view(torch.bfloat16)
    quiet = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN, too
    found = module.round_stochastically(numbers.float(), torch.full(numbers.shape, 0xFFFF, dtype=torch.int32))
    same = (found.view(torch.int16) == numbers.view(torch.int16)) | (found.isnan() & numbers.isnan())
    assert same.all(), f"{numbers[~same][:3].tolist()} have become {found[~same][:3].tolist()}"
    assert module.round_stochastically(quiet, torch.full((4,), 0xFFFF)).isnan().all(), "a NaN is lost"


def test_bits_are_independent(file=None):
    """No bit tells of another: of the same number, of neighbours, of other steps, tensors, seeds and keys."""

    def compute():
        random_bits, n = load(file or SR).random_bits, 2**14
        index, steps = torch.arange(n, dtype=torch.int32), torch.tensor([[1], [2]], dtype=torch.int32)
        names = [f"{seed} {name} {i}" for seed in (0, 1) for name in ("lm_head.weight", "norm.weight") for i in (0, 1)]
        of_tensors = torch.tensor([zlib.crc32(name.encode()) for name in names]).to(torch.int32)
        in_steps = random_bits(of_tensors, steps).flatten()
        streams = [random_bits(index, key) for key in in_steps]
        streams += [random_bits(index + lag, in_steps[0]) for lag in (1, 2, 64, n)]
        bits = torch.stack(streams)[:, None] >> torch.arange(32, dtype=torch.int32)[:, None] & 1
        signs = torch.cat([bits.flatten(0, 1) * 2.0 - 1, torch.ones(1, n)])
        off = ((signs @ signs.T).fill_diagonal_(0).abs().max() / n**0.5).item()  # sums of n signs: variance n
        numbers = torch.cat(streams[: len(in_steps)])
        for half in numbers & 0xFFFF, numbers >> 16 & 0xFFFF:
            counts, mean = half.bincount(minlength=2**16).double(), half.numel() / 2**16
            # 2^16 - 1 degrees of freedom, of each of which the variance is 2
            off = max(off, abs(((counts - mean) ** 2 / mean).sum().item() - 2**16) / 2**8.5)
        close = [random_bits(index, in_steps[0] ^ 1 << bit) for bit in range(16)]
        return off, max(torch.isin(others, streams[0]).sum().item() for others in close)

    off, shared = isolated(compute)
    assert off < SIGMAS, f"two bits agree, or values come, {off:.1f} standard deviations too often, or too rarely"
    assert shared < 2**14 / 100, f"{shared} of {2**14} numbers are those of another key"  # hardly any, by chance


@in_a_fork
def test_an_update_rounds_each_element_by_its_index(file=None):
    """Weight and moments have their own bits of the flat index, whatever else is rounded with them."""
    module, generator = load(file or SR), torch.Generator().manual_seed(0)
    weight, mean, gradient = (torch.randn(3, 100, generator=generator).bfloat16() for _ in range(3))
    square = mean.square()
    decay, pair = 1 - 2.0**-12, torch.tensor([123456789, -987654321], dtype=torch.int32)
    numbers = torch.tensor([0.3, 0, 1, decay, 1], dtype=torch.float64)  # clips; a learning rate of 0
    wide, g = weight.float(), gradient.float() * numbers[0]
    exact = wide * decay, mean.float().lerp(g, 0.1), square.float().lerp(g.square(), 0.05)
    module.update(weight, mean, square, gradient, numbers, pair)
    parts = torch.arange(300, dtype=torch.int32).split(64)
    first, second = (torch.cat([module.random_bits(part, key) for part in parts]) for key in pair)
    bits = first & 0xFFFF, first >> 16 & 0xFFFF, second & 0xFFFF
    for kind, found, x, chance in zip(("weight", "mean", "square"), (weight, mean, square), exact, bits):
        wanted = module.round_stochastically(x.flatten(), chance).view_as(found)
        assert torch.equal(found, wanted), f"the {kind} is not rounded by the bits of its index"


@pytest.mark.parametrize("flags", ["", pytest.param("--compile", marks=pytest.mark.thorough)])
@in_a_fork
def test_each_step_rounds_fairly_and_otherwise(flags, file=None):
    """Right on average; at p of the way, two roundings differ with 2p(1 - p), a third of all. One code has any rate."""
    module, (cfg, model, optimizer), batches = start(file or SR, f"--microbatches 1 --clip inf {flags}")
    keys = torch.cat([optimizer.keys, module.make_optimizer(replace(cfg, seed=1), model).keys])
    assert len(keys.unique()) == keys.numel(), "two tensors, or seeds, share a key"
    module.train_step(cfg, model, optimizer, *batches[0])
    module.forward_backward(cfg, model, *batches[1])
    before, found = [slot.mean.clone() for slot in optimizer.slots], []
    means, g = (torch.cat([x.float().flatten() for x in kept]) for kept in (before, optimizer.gradients()))
    exact = means.lerp(g, 0.1)
    clear = exact.abs() > means.abs() / 64  # else terms cancel, and compiled code rounds their sum in fp32 otherwise
    low, high = (x[clear] for x in neighbours(exact))
    for rate in 0, 0.03:
        for slot, mean in zip(optimizer.slots, before):
            slot.mean.copy_(mean)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step(module.gradient_norm(optimizer))
        found.append(torch.cat([slot.mean.double().flatten() for slot in optimizer.slots])[clear])
    share = (found[0] != found[1]).double().mean()
    assert 0.25 < share < 0.4, f"{share:.0%} of the numbers are rounded otherwise in another step"
    way = (exact[clear] - low) / (high - low)
    for x in found:
        off = ((x - exact[clear]) / (high - low)).sum() / (way * (1 - way)).sum().sqrt()
        assert abs(off) < SIGMAS, f"the mean error is {off:.1f} standard deviations"


@in_a_fork
def test_sums_of_micro_batches_are_fp32(file=None):
    """What the optimizer gets of four micro-batches is the exact sum of their bf16 gradients; of one, its own."""
    module, (cfg, model, optimizer), batches = start(file or SR, "--microbatches 4")
    inputs, targets = batches[0]
    tokens, parameters = (targets != module.IGNORE).sum(), list(model.parameters())
    parts = [
        torch.autograd.grad(module.forward(cfg, model, x, y) / tokens, parameters)
        for x, y in zip(inputs.chunk(4), targets.chunk(4))
    ]
    exact = dict(zip(dict(model.named_parameters()), (sum(g.double() for g in same) for same in zip(*parts))))
    module.forward_backward(cfg, model, inputs, targets)
    for slot, found in zip(optimizer.slots, optimizer.gradients()):
        wanted = exact[slot.name]
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < 1e-6, f"{slot.name}: the sum is off by {error:.1e}"  # 2^-24 three times; one in bf16: 2^-9
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)  # of a micro-batch that nobody has added
    with pytest.raises(RuntimeError, match="lm_head.weight has a .grad beside its sum"):
        module.gradient_norm(optimizer)


@pytest.mark.parametrize("recipe", [SR, FP8])
@in_a_fork
def test_bytes_between_steps(recipe, file=None):
    """All tensors have 6 bytes per parameter between steps, beside 8 of keys per tensor: no master, gradient or sum."""
    for flags in "--microbatches 1", "--microbatches 2":
        gc.freeze()  # what there is already is not counted
        module, (cfg, model, optimizer), batches = start(file or recipe, flags)
        parameters = sum(p.numel() for p in model.parameters())
        smallest = min(p.numel() for p in model.parameters() if p.ndim > 1)
        while batches:
            module.train_step(cfg, model, optimizer, *batches.pop())
            assert all(p.grad is None for p in model.parameters()), "gradients are left"
        total = bytes_of_tensors()
        per_parameter = f"{total / parameters:.2f} bytes per parameter, with {flags}"
        assert 6 * parameters <= total < 6 * parameters + smallest, per_parameter
        dtypes = {x.dtype for slot in optimizer.slots for x in (slot.parameter, slot.mean, slot.square)}
        assert dtypes == {torch.bfloat16}, f"weights and moments are {dtypes}"


@pytest.mark.parametrize("recipe", ["01_single_gpu/selective_checkpointing.py", *RECIPES])
def test_what_only_gpus_compute_is_kept(recipe):
    """Matmuls in fp8, and attention in each of torch's fused kernels, of which a CPU has one."""
    kept = {operator._schema.name for operator in load(recipe).KEPT}
    fused = re.compile(r"aten::_scaled_dot_product_\w+_attention(_for_cpu)?")
    wanted = {name for name in torch._C._dispatch_get_all_op_names() if fused.fullmatch(name)}
    wanted |= {"aten::_scaled_mm"} if recipe == FP8 else set()
    assert len(wanted) > 3 and wanted <= kept, f"{wanted - kept} are computed again"


@pytest.mark.parametrize("recipe", RECIPES)
@in_a_fork
def test_no_matmul_is_computed_again(recipe, file=None):
    """Nor attention; but casts to fp8 are, of weights, too. There are seven linears in a block, and the head."""
    module, (cfg, model, _), batches = start(file or recipe, "")
    counts = Counter()
    with Operations(lambda name, *_: counts.update([name.split("::")[1]])):
        module.forward_backward(cfg, model, *batches[0])
    matmuls, attention = counts["mm"], counts[module.KEPT[-1]._schema.name.split("::")[1]]
    assert (matmuls, attention) == (3 * (7 * cfg.layers + 1), cfg.layers), f"{matmuls} matmuls, {attention} attentions"
    # casts of weight and input, twice, and of the gradient; scales of rows, then of all, kept and not computed again
    once = 7 * cfg.layers * (recipe == FP8)
    assert (counts["cast"], counts["amax"]) == (5 * once, 6 * once), f"{counts['cast']} casts, {counts['amax']} scales"
