"""Formats: their limits and casts are torch's to the bit; gradients and updates lose what a count by hand says."""

import functools
import math
import struct
import sys

import pytest
import torch
from launch import isolated, load

FORMATS = load("10_mixed_precision/formats.py")
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
}
CASTS = ["fp16", "bf16", "e4m3", "e5m2"]
INTEGERS = {8: torch.uint8, 16: torch.int16}


def pattern_values(name):
    """What each bit pattern of a torch dtype stands for, in float64."""
    bits = FORMATS.FORMATS[name].bits
    patterns = torch.arange(2**bits, dtype=torch.int32).to(INTEGERS[bits])
    return patterns.view(DTYPES[name]).float().double()


@functools.cache
def inputs():
    """Float32 of all magnitudes (torch casts float64 by way of it), and each with its neighbours.

    That includes all numbers of the short formats, what is half-way between two of them, inf, NaN and zeros.
    """
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).int().view(torch.float32)
    edges = []
    for name in CASTS:
        numbers = pattern_values(name)
        numbers = numbers[numbers.isfinite()].unique()
        edges += [numbers, (numbers[1:] + numbers[:-1]) / 2]
        largest, before = numbers[-1], numbers[-2]
        edges.append(torch.tensor([largest + k * (largest - before) / 2 for k in (1, 2, 3)]).double())
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-149), 3.4e38, -3.4e38])
    edges = torch.cat([*edges, special.double()]).float()
    edges = torch.cat([edges, -edges])
    both = [torch.nextafter(edges, torch.full_like(edges, sign * math.inf)) for sign in (-1, 1)]
    return torch.cat([anything, edges, *both])


def assert_same(found, wanted, x):
    """Equal to the bit, the sign of zero included; any NaN is NaN."""
    found, wanted, x = (t.double() for t in (found, wanted, x))
    same = (found.view(torch.int64) == wanted.view(torch.int64)) | (found.isnan() & wanted.isnan())
    wrong = (~same).nonzero().flatten()
    shown = [(x[i].item(), found[i].item(), wanted[i].item()) for i in wrong[:3]]
    assert not len(wrong), f"{len(wrong)} of {len(x)} differ: (x, found, wanted) {shown}"


@pytest.mark.parametrize("name", DTYPES)
def test_limits_are_torchs(name):
    f, info = FORMATS.FORMATS[name], torch.finfo(DTYPES[name])
    found = FORMATS.limits(f)
    assert (f.bits, found["largest"], found["epsilon"]) == (info.bits, info.max, info.eps)
    assert found["smallest normal"] == info.smallest_normal
    if f.bits <= 16:
        positive = pattern_values(name)
        positive = positive[(positive > 0) & positive.isfinite()]
        smallest = found["smallest normal" if math.isnan(found["smallest subnormal"]) else "smallest subnormal"]
        assert (smallest, found["largest"]) == (positive.min(), positive.max())
        assert 2**f.mantissa == ((positive >= 1) & (positive < 2)).sum()


def test_numbers_of_the_formats_that_torch_lacks():
    """All of OCP's fp4, the ends of its fp6, and tf32: the range of fp32 with the epsilon of fp16."""
    formats = FORMATS.FORMATS
    numbers = {name: [f.value(i) for i in range(f.last + 1)] for name, f in formats.items() if f.bits < 8}
    assert numbers["e2m1"] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (numbers["e3m2"][1], numbers["e3m2"][4], numbers["e3m2"][-1], len(numbers["e3m2"])) == (0.0625, 0.25, 28, 32)
    assert (numbers["e2m3"][1], numbers["e2m3"][8], numbers["e2m3"][-1], len(numbers["e2m3"])) == (0.125, 1, 7.5, 32)
    tf32, fp32, fp16 = (FORMATS.limits(formats[name]) for name in ("tf32", "fp32", "fp16"))
    assert formats["tf32"].bits == 19 and tf32["epsilon"] == fp16["epsilon"] == 2**-10
    assert tf32["smallest normal"] == fp32["smallest normal"] and tf32["largest"] == 2.0**128 - 2.0**117


@pytest.mark.parametrize("name", CASTS)
def test_rounds_like_torch(name):
    """Every cast of torch, to the bit; that to e4m3 saturates, while the format says NaN."""
    f, x = FORMATS.FORMATS[name], inputs()
    wanted = x.to(DTYPES[name])
    assert_same(FORMATS.round_to(x, f, saturate=name == "e4m3"), wanted.float(), x)
    finite = pattern_values(name)
    finite = finite[finite.isfinite()]
    found = FORMATS.round_to(finite, f)
    assert_same(found, finite, finite)
    assert len(found) == 2 * (f.last + 1)
    assert_same(torch.tensor([f.value(i) for i in range(f.last + 1)]), finite[: f.last + 1], finite)


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_rounds_to_fp32_and_tf32(name):
    """fp32 as torch casts float64; tf32 as integers round fp32's bits: the last 13 go, ties to even."""
    f, x = FORMATS.FORMATS[name], inputs().double()
    if name == "fp32":
        x = torch.cat([x[::4], x[::4] * (1 + 2.0**-25), x[::4] * (1 + 2.0**-24), x[::4] * 2.0**-20])
        return assert_same(FORMATS.round_to(x, f), x.float(), x)
    halfway = ((x.float().view(torch.int32) & ~0x1FFF) | 0x1000).view(torch.float32)
    x = torch.cat([x.float(), halfway])
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    magnitude, sign = bits & 0x7FFFFFFF, torch.where(bits >> 31 == 1, -1.0, 1.0)
    kept = (magnitude + 0xFFF + (magnitude >> 13 & 1)) & ~0x1FFF
    wanted = sign * kept.int().view(torch.float32)
    assert_same(FORMATS.round_to(x, f), torch.where(x.isfinite(), wanted, x), x)


def test_rounds_to_a_scale():
    """e8m0 has powers of two alone: no zero, no sign, no inf. (Torch rounds what is between its first two up.)"""
    f, x = FORMATS.FORMATS["e8m0"], inputs()
    between = (x.abs() > 2.0**-127) & (x.abs() < 2.0**-126)
    assert between.any() and (x[between].to(torch.float8_e8m0fnu).float() == 2.0**-126).all()
    low = x[between].abs() < 1.5 * 2.0**-127
    assert torch.equal(FORMATS.round_to(x[between], f), torch.where(low, 2.0**-127, 2.0**-126).double())
    x = x[~between]
    assert_same(FORMATS.round_to(x, f), x.to(torch.float8_e8m0fnu).float(), x)
    assert_same(FORMATS.round_to(pattern_values("e8m0"), f), pattern_values("e8m0"), pattern_values("e8m0"))


def test_overflow():
    """What has no number: inf, NaN, or the largest; and on demand the largest everywhere, with its sign."""
    beyond = torch.tensor([math.inf, -math.inf, 1e39, -1e39], dtype=torch.float64)
    for f in FORMATS.FORMATS.values():
        top = {"inf": math.inf, "nan": math.nan, "numbers": f.largest}[f.top]
        sign = beyond.sign() if f.sign else torch.ones(4)
        assert_same(FORMATS.round_to(beyond, f), top * sign, beyond)
        assert_same(FORMATS.round_to(beyond, f, saturate=True), f.largest * sign, beyond)
        nan = torch.tensor([math.nan])
        assert FORMATS.round_to(nan, f).isnan() and FORMATS.round_to(nan, f, saturate=True).isnan()
    halfway = torch.tensor([65519.999, 65520, 448, 464, 464.001], dtype=torch.float64)
    assert FORMATS.round_to(halfway[:2], FORMATS.FORMATS["fp16"]).tolist() == [65504, math.inf]
    e4m3 = FORMATS.round_to(halfway[2:], FORMATS.FORMATS["e4m3"])
    assert e4m3[:2].tolist() == [448, 448] and e4m3[2].isnan()


@pytest.mark.parametrize("name", ["e3m2", "e2m3", "e2m1"])
def test_rounds_to_the_nearest(name):
    """Against a search through all numbers of the format; of two that are as near, the pattern is even."""
    f = FORMATS.FORMATS[name]
    numbers = [f.value(i) for i in range(f.last + 1)]
    x = torch.arange(-8 * 64, 8 * 64 + 1).double() / 64 * f.largest / 7  # half-way cases among them, and some overflow
    x = torch.cat([x, torch.arange(-512, 513).double() / 64])
    wanted = [min(range(len(numbers)), key=lambda i: (abs(numbers[i] - abs(v)), i % 2)) for v in x.tolist()]
    wanted = torch.copysign(torch.tensor([numbers[i] for i in wanted]).double(), x)
    assert_same(FORMATS.round_to(x, f), wanted, x)


def test_rounds_float64_once():
    """By way of float32 it would round twice: 1 + 2^-11 + 2^-40 would become 1."""
    x = torch.tensor([1 + 2**-11 + 2**-40, 2**-25 + 2**-60], dtype=torch.float64)
    wanted = [struct.unpack("e", struct.pack("e", v))[0] for v in x.tolist()]  # Python's own half, from float64
    assert FORMATS.round_to(x, FORMATS.FORMATS["fp16"]).tolist() == wanted == [1 + 2**-10, 2**-24]


# ----------------------------------------------------------------------------------------------------------- gradients
@functools.cache
def seen():
    return isolated(lambda: FORMATS.observe(3))


def test_update_is_adamws():
    """The step that the root's optimizer makes, to the rounding of float32; gradients are those of an own backward."""

    def compute():
        root = load("01_single_gpu/train.py")
        cfg = root.Config(**root.PRESETS["tiny"], **FORMATS.SMALL, steps=3)
        data, model = root.load_data(cfg)[0], root.build_model(cfg)
        optimizer = root.make_optimizer(cfg, model)
        logits = []
        for step in range(3):
            before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
            root.set_learning_rate(cfg, optimizer, step)
            batch = root.make_batch(cfg, data, step)
            if step == 2:
                model.lm_head.register_forward_hook(lambda layer, x, y: (y.retain_grad(), logits.append(y))[0])
            root.forward_backward(cfg, model, *batch)
            gradients = [p.grad[p.grad != 0].double() for p in model.parameters()]
            root.clip_gradients(cfg, model)
            optimizer.step()
            optimizer.zero_grad()
        after = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        return before, after, gradients, logits[-1].grad, optimizer.param_groups[0]["lr"]

    before, after, gradients, logits, rate = isolated(compute)
    for weight, update, old, new in zip(seen().weights, seen().directions, before, after, strict=True):
        assert torch.equal(weight, old.double())
        torch.testing.assert_close(weight + rate * update, new.double(), rtol=2e-7, atol=1e-9)
    for mine, theirs in zip(seen().gradients["weights"], gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-9)
    outputs = seen().gradients["matmul outputs"]
    assert len(outputs) == 7 * FORMATS.SMALL["layers"] + 1
    torch.testing.assert_close(outputs[0], logits[logits != 0].double(), rtol=1e-4, atol=1e-12)  # backward's first


def test_scale_is_the_largest_without_overflow():
    for name in CASTS:
        f = FORMATS.FORMATS[name]
        for largest in 1e-9, 3.0, f.largest, f.largest * 1.001, 2.0**-30:
            x = torch.tensor([largest, -largest / 2]).double()
            scale = FORMATS.best_scale(x, f)
            assert math.frexp(scale)[0] == 0.5 and scale * largest <= f.largest < 2 * scale * largest


def test_damage_by_hand():
    """Of six elements fp16 loses two to zero and one to inf; a scale saves both, and nothing overflows."""
    x = torch.tensor([2.0**-26, -(2.0**-25), 2.0**-24, 1.0, 1 + 2.0**-11, 70000], dtype=torch.float64)
    zeros, overflows, median, worst = FORMATS.damage([x], FORMATS.FORMATS["fp16"], scaled=False)
    assert (zeros, overflows) == (2 / 6, 1 / 6) and median == worst
    noise = (2.0**-26) ** 2 + (2.0**-25) ** 2 + (2.0**-11) ** 2 + (70000 - 65504) ** 2
    assert worst == pytest.approx(10 * math.log10(x.square().sum().item() / noise), rel=1e-12)
    small, large = x[:3], x[3:5]
    assert FORMATS.damage([small], FORMATS.FORMATS["fp16"], scaled=True) == (0, 0, math.inf, math.inf)
    zeros, overflows, median, worst = FORMATS.damage([large, small, large], FORMATS.FORMATS["fp16"], scaled=False)
    assert zeros == 2 / 7 and overflows == 0 and worst < 10 < 60 < median


def test_lost_updates():
    """By hand: below half of the distance to the neighbour nothing moves, in bf16 between 1 and 2 that is 2^-8."""
    half = 2.0**-8
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, 1 + 2.0**-30]).double()
    update = torch.tensor([half, 1.01 * half, 0.0, -half, 1.01 * half, 0.9 * half]).double()
    case = FORMATS.Observed({}, [weight], [update])
    bf16, fp32 = FORMATS.FORMATS["bf16"], FORMATS.FORMATS["fp32"]
    # lost: a tie that goes to even 1, and what is below; below 1 neighbours are half as far, so that -half moves
    assert FORMATS.lost(case, bf16, 1.0) == 2 / 5
    assert FORMATS.lost(case, fp32, 1.0) == 0 and FORMATS.lost(case, bf16, 0.1) == 1


# ---------------------------------------------------------------------------------------------------------------- main
@pytest.mark.parametrize(
    "flags, line",
    [
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--draw nowhere", "--draw nowhere: no such folder"),
    ],
)
def test_bad_input_ends_in_one_line(flags, line, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["formats.py", *flags.split()])
    with pytest.raises(SystemExit) as end:
        FORMATS.main()
    assert end.value.code == line


def test_command(monkeypatch, capsys, tmp_path):
    """What the README says to type, with fewer steps: tables that have every format, and both pictures."""
    monkeypatch.setattr(sys, "argv", ["formats.py", "--steps", "3", "--draw", str(tmp_path)])
    monkeypatch.setattr(FORMATS, "observe", lambda steps: {3: seen()}[steps])
    FORMATS.main()
    printed = capsys.readouterr().out
    pictures = [(tmp_path / f"formats_{name}.svg").read_text() for name in ("range", "resolution")]
    for f in FORMATS.FORMATS:
        assert f in printed and (f == "e8m0" or all(f">{f}<" in picture for picture in pictures)), f"{f} is left out"
