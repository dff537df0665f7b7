"""Formats: their limits and casts are torch's to the bit; gradients and updates lose what a count by hand says."""

import functools
import math
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
INTEGERS = {8: torch.uint8, 16: torch.int16}


@functools.cache
def inputs():
    """The upper 20 bits of fp32: all numbers of shorter formats, what is half-way between two, and its neighbours."""
    bits = torch.arange(2**20, dtype=torch.int32)[:, None] << 12 | torch.tensor([0, 1, 0xFFF], dtype=torch.int32)
    return bits.view(torch.float32).flatten()


def assert_same(found, wanted):
    """Equal to the bit, the sign of zero included; any NaN is the same."""
    found, wanted = (torch.where(x.isnan(), math.nan, x.double()).view(torch.int64) for x in (found, wanted))
    assert torch.equal(found, wanted), f"{(found != wanted).sum()} of {len(found)} differ"


@pytest.mark.parametrize("name", DTYPES)
def test_limits_and_numbers_are_torchs(name):
    """Those of OCP's fp6 and fp4, which torch lacks, are in test_rounds_to_the_nearest."""
    f, info = FORMATS.FORMATS[name], torch.finfo(DTYPES[name])
    found = FORMATS.limits(f)
    assert (f.bits, found["largest"], found["epsilon"]) == (info.bits, info.max, info.eps)
    assert found["smallest normal"] == info.smallest_normal
    if f.bits <= 16:
        patterns = torch.arange(f.last + 1).to(INTEGERS[f.bits])
        numbers = patterns.view(DTYPES[name]).double()
        assert_same(torch.tensor([f.value(i) for i in range(f.last + 1)]), numbers)
        assert f.smallest == numbers[numbers > 0].min()


@pytest.mark.parametrize("name", DTYPES)
def test_rounds_like_torch(name):
    """Every cast of torch, to the bit; that to e4m3 saturates. Between its first two numbers torch rounds e8m0 up."""
    f, x = FORMATS.FORMATS[name], inputs()
    if name == "fp32":
        x = x.double()
        x = torch.cat([x[::4], x[::4] * (1 + 2.0**-25), x[::4] * (1 + 2.0**-24), x[::4] * 2.0**-20])
    if name == "e8m0":
        between = (x.abs() > 2.0**-127) & (x.abs() < 2.0**-126)
        low = x[between].abs() < 1.5 * 2.0**-127
        assert torch.equal(FORMATS.round_to(x[between], f), torch.where(low, 2.0**-127, 2.0**-126).double())
        x = x[~between]
    assert_same(FORMATS.round_to(x, f, saturate=name == "e4m3"), x.to(DTYPES[name]).float())


def test_rounds_to_tf32():
    """As integers round fp32's bits: the last 13 go, ties to even."""
    x = inputs()[inputs().isfinite()]
    bits = x.view(torch.int32)
    kept = bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF
    assert_same(FORMATS.round_to(x, FORMATS.FORMATS["tf32"]), kept.view(torch.float32))


NUMBERS = {  # OCP's: some of them by their patterns, and how many there are
    "e2m1": (dict(enumerate([0, 0.5, 1, 1.5, 2, 3, 4, 6])), 8),
    "e3m2": ({1: 0.0625, 4: 0.25, 31: 28}, 32),
    "e2m3": ({1: 0.125, 8: 1, 31: 7.5}, 32),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_rounds_to_the_nearest(name):
    """Against a search through all numbers; ties are even. Of float64, once: float32 would move some to the middle."""
    f, (some, count) = FORMATS.FORMATS[name], NUMBERS[name]
    numbers = [f.value(i) for i in range(f.last + 1)]
    assert len(numbers) == count and all(numbers[i] == number for i, number in some.items())
    x = torch.arange(-8 * 64, 8 * 64 + 1).double() / 64 * f.largest / 7  # half-way cases among them, and some overflow
    x = torch.cat([x, torch.arange(-512, 513).double() / 64])
    x = torch.cat([x, x * (1 + 2.0**-40), x * (1 - 2.0**-40)])
    wanted = [min(range(len(numbers)), key=lambda i: (abs(numbers[i] - abs(v)), i % 2)) for v in x.tolist()]
    wanted = torch.copysign(torch.tensor([numbers[i] for i in wanted]).double(), x)
    assert_same(FORMATS.round_to(x, f), wanted)


def test_overflow():
    """What has no number: inf, NaN, or the largest; and on demand the largest everywhere, with its sign."""
    beyond = torch.tensor([math.inf, -math.inf, 1e39, -1e39, math.nan], dtype=torch.float64)
    for f in FORMATS.FORMATS.values():
        top = {"inf": math.inf, "nan": math.nan, "numbers": f.largest}[f.top]
        sign = beyond.sign() if f.sign else torch.where(beyond.isnan(), math.nan, 1.0)
        assert_same(FORMATS.round_to(beyond, f), top * torch.where(beyond.isnan(), math.nan, sign))
        assert_same(FORMATS.round_to(beyond, f, saturate=True), f.largest * torch.where(beyond.isnan(), math.nan, sign))
    e4m3 = FORMATS.round_to(torch.tensor([464, 464.001]), FORMATS.FORMATS["e4m3"])  # torch saturates
    assert e4m3[0] == 448 and e4m3[1].isnan()


def test_damage_by_hand():
    """Of six elements fp16 loses two to zero and one to inf; a scale saves both, and nothing overflows."""
    fp16 = FORMATS.FORMATS["fp16"]
    x = torch.tensor([2.0**-26, -(2.0**-25), 2.0**-24, 1.0, 1 + 2.0**-11, 70000], dtype=torch.float64)
    small, large = x[:3], x[3:5]
    noise = (2.0**-26) ** 2 + (2.0**-25) ** 2 + (2.0**-11) ** 2 + (70000 - 65504) ** 2
    ratio = pytest.approx(10 * math.log10(x.square().sum().item() / noise), rel=1e-12)
    assert FORMATS.damage([x], fp16, scaled=False) == (2 / 6, 1 / 6, ratio, ratio)
    assert FORMATS.damage([small], fp16, scaled=True) == (0, 0, math.inf, math.inf)
    zeros, overflows, median, worst = FORMATS.damage([large, small, large], fp16, scaled=False)
    assert zeros == 2 / 7 and overflows == 0 and worst < 10 < 60 < median
    scale = FORMATS.best_scale(torch.tensor([fp16.largest * 1.001, -1]).double(), fp16)
    assert scale == 0.5, "it is no power of two, or something overflows"


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


def test_command(monkeypatch):
    """It runs on a CPU; flags that cannot work end with one line."""
    monkeypatch.setattr(sys, "argv", "formats.py --steps 3".split())
    isolated(FORMATS.main)
    for flags, line in ("--steps 0", "must be at least 1"), ("--draw nowhere", "no such folder"):
        monkeypatch.setattr(sys, "argv", ["formats.py", *flags.split()])
        with pytest.raises(SystemExit, match=f"^{flags}: {line}$"):
            FORMATS.main()
