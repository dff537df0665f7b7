"""Fp8 in many small blocks: groups that reach over the edge, views, and all products of a linear layer."""

import functools
from types import ModuleType

import probes
import pytest
import torch
from launch import in_a_fork, load
from torch import Tensor

FP8_MATMUL = "09_kernels/fp8_matmul.py"
random = functools.partial(probes.random, dtype=torch.bfloat16)


def small(file: str | None) -> ModuleType:
    """The file with blocks of 16 x 16 and small tiles: several to a program. All that is empty is NaN."""
    module = load(file or FP8_MATMUL)
    module.BLOCK, module.TILE, module.GROUP = 16, (16, 32, 16), 2
    torch.use_deterministic_algorithms(True, warn_only=True)
    return module


@in_a_fork
def test_every_bfloat16_is_rounded(file=None):
    """With the scale 1, of all values up to the largest of fp8: to nearest, ties to even, subnormals too."""
    module = load(file or FP8_MATMUL)
    for dtype in module.E4M3, module.E5M2:
        bits = torch.arange(2**15, dtype=torch.int16)
        x = bits.view(torch.bfloat16)[bits.view(torch.bfloat16) <= torch.finfo(dtype).max]
        x = torch.nn.functional.pad(torch.cat([x, -x]), (0, -2 * len(x) % 128)).view(-1, 128)
        for given in x, x.float():
            values, scale, *_ = module.quantize_tensor(given, dtype)
            assert scale == 1 and module.same(values, x.to(dtype))


def quantized(module: ModuleType, kind: str, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    return module.quantize_reference(x, kind, dtype or module.E4M3)[:2]


@in_a_fork
def test_small_tiles(file=None):
    """Rows of different magnitudes, 5 rows of tiles in groups of 2; a in either format; any number of tiles and SMs."""
    module = small(file)
    x = random(75, 50) * torch.logspace(-9, 9, 75, 2.0)[:, None].bfloat16()
    y = random(70, 50) * torch.logspace(5, -5, 70, 2.0)[:, None].bfloat16()
    given = [(2, name, x, dtype, y) for name in module.ladder() for dtype in (module.E4M3, module.E5M2)]
    for rows, programs in (1, 4), (4, 4), (5, 4), (9, 4), (3, 1), (11, 3):
        given.append((programs, "rowwise", random(16 * rows, 16), module.E4M3, random(64, 16)))
    for programs, name, a, dtype, b in given:
        module.processors = lambda x, programs=programs: programs
        multiply, *kinds = module.ladder()[name]
        operands = *quantized(module, kinds[0], a, dtype), *quantized(module, kinds[1], b)
        found, exact = multiply(*operands, torch.float32), module.reference(*operands)
        error = (found - exact).norm(dim=1) / exact.norm(dim=1)
        assert (error <= 1e-6).all(), f"{name}, {programs} programs: rows have errors of up to {error.max():.1e}"


@pytest.mark.thorough
@in_a_fork
def test_operands_in_any_layout(file=None):
    """Views whose rows begin anywhere: the same to the bit. Empty operands; without k, zeros."""
    module = small(file)
    for name, (multiply, *kinds) in module.ladder().items():
        operands = *quantized(module, kinds[0], random(40, 50)), *quantized(module, kinds[1], random(35, 50))
        shifted = []
        for x in operands:
            whole = torch.zeros([size + 3 for size in x.shape]).to(x.dtype)
            shifted.append(whole[tuple(slice(1, size + 1) for size in x.shape)].copy_(x))
        found = multiply(*shifted)
        assert found.is_contiguous() and torch.equal(found, multiply(*operands)), name
        for m, n, k in (0, 5, 20), (5, 0, 20), (5, 4, 0):
            nothing = [module.quantizers()[kind](random(size, k))[:2] for kind, size in zip(kinds, (m, n))]
            assert torch.equal(multiply(*nothing[0], *nothing[1]), torch.zeros(m, n).bfloat16()), f"{name}, {m, n, k}"


@pytest.mark.parametrize("kind", ["blocks", pytest.param("rows", marks=pytest.mark.thorough)])
@in_a_fork
def test_linear(kind, file=None):
    """y = x wᵀ, dx = dy w and dw = dyᵀ x of what the kernels write, in both layouts: off by the roundings of fp8 alone.

    e4m3 rounds by at most 2^-4, in the mean square by about 2^-5.3: two operands have less than 2^-4 together.
    """
    module = small(file)
    x, w, dy = random(45, 50), random(40, 50), random(45, 40)
    multiply = module.matmul_rowwise if kind == "rows" else module.matmul_blockwise
    lines, blocks = module.quantizers()["rows" if kind == "rows" else "lines"], module.quantizers()[kind]
    x8, w8, dy8 = lines(x), blocks(w), lines(dy)  # values, scales, and both of the transposed
    products = {
        "y": (multiply(*x8[:2], *w8[:2]), x.double() @ w.double().T),
        "dx": (multiply(*dy8[:2], *w8[2:]), dy.double() @ w.double()),
        "dw": (multiply(*dy8[2:], *x8[2:]), dy.double().T @ x.double()),
    }
    for name, (found, exact) in products.items():
        error = module.relative_error(found, exact)
        assert 2**-8 < error < 2**-4, f"{name}: the error is {error:.1e}"
