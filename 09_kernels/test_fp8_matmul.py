"""Fp8 in many small blocks: groups that reach over the edge, extreme values, views, and all products of a linear layer.

All of it in Triton's interpreter. Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py
tries bugs with them.
"""

from types import ModuleType

import pytest
import torch
from launch import in_a_fork, load
from torch import Tensor

FP8_MATMUL = "09_kernels/fp8_matmul.py"


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def small(file: str | None) -> ModuleType:
    """The file with blocks of 16 x 16 and small tiles: several to a program. All that is empty is NaN."""
    module = load(file or FP8_MATMUL)
    module.BLOCK, module.TILE, module.GROUP = 16, (16, 32, 16), 2
    torch.use_deterministic_algorithms(True, warn_only=True)
    return module


# -------------------------------------------------------------------------------------------------------- quantization
@in_a_fork
def test_small_blocks(file=None):
    """Values and scales, also of x transposed, are PyTorch's to the bit: sizes that no block of 16 divides; any dtype.

    Zeros stay zeros, tiny groups vanish, huge ones do not overflow; NaN and inf spoil their group, and no other.
    """
    module, extremes = small(file), random(48, 48)
    extremes[:16, :16] = 0
    extremes[16:32, :16] *= 2.0**-120
    extremes[32:, :16] *= 2.0**120
    extremes[0, 20], extremes[20, 20], extremes[40, 20] = torch.nan, torch.inf, -torch.inf
    given = [(random(*shape), module.E4M3) for shape in ((37, 20), (32, 16), (1, 33), (20, 1))]
    given += [(random(19, 35, dtype=dtype), module.E5M2) for dtype in (torch.float16, torch.float32)]
    for kind, quantize in module.quantizers().items():
        for x, dtype in [*given, (extremes, module.E4M3)]:
            pairs = zip(quantize(x, dtype), module.quantize_reference(x, kind, dtype), strict=True)
            same = [module.same(mine, theirs) for mine, theirs in pairs]
            assert all(same), f"{kind}, {x.shape}, {x.dtype}: {same}"
    groups = (~extremes.isfinite()).view(3, 16, 3, 16).any(3, keepdim=True)
    for height, spoilt in (1, groups), (16, groups.any(1, keepdim=True)):
        found = module.dequantize(*module.quantize_blocks(extremes, height)[:2])
        assert torch.equal(found.isnan(), spoilt.expand(3, 16, 3, 16).reshape(48, 48)) and not found.isinf().any()
        assert (found[extremes == 0] == 0).all(), "zeros are no zeros"


@in_a_fork
def test_every_bfloat16_is_rounded(file=None):
    """With the scale 1, of all values up to the largest of fp8: to nearest, ties to even, subnormals too."""
    module = load(file or FP8_MATMUL)
    for dtype in module.E4M3, module.E5M2:
        bits = torch.arange(2**15, dtype=torch.int16)
        x = bits.view(torch.bfloat16)[bits.view(torch.bfloat16) <= torch.finfo(dtype).max]
        x = torch.nn.functional.pad(torch.cat([x, -x]), (0, -2 * len(x) % 128)).view(-1, 128)
        values, scale, *_ = module.quantize_tensor(x, dtype)
        assert scale == 1 and module.same(values, x.to(dtype))


# -------------------------------------------------------------------------------------------------------------- matmul
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
def test_operands_in_any_layout():
    """Views whose rows begin anywhere, operands and scales stored by columns: the same to the bit."""
    module = small(None)
    for name, (multiply, *kinds) in module.ladder().items():
        operands = *quantized(module, kinds[0], random(40, 50)), *quantized(module, kinds[1], random(35, 50))
        right = multiply(*operands)
        columns = [x.T.contiguous().T for x in operands if x.dim()] if kinds[0] != "tensor" else operands
        shifted = []
        for x in operands:
            whole = torch.zeros([size + 3 for size in x.shape]).to(x.dtype)
            shifted.append(whole[tuple(slice(1, size + 1) for size in x.shape)].copy_(x))
        for what, given in ("by columns", columns), ("off by one", shifted):
            found = multiply(*given)
            assert found.is_contiguous() and torch.equal(found, right), f"{name}, {what}"


@pytest.mark.thorough
@in_a_fork
def test_nothing_to_multiply(file=None):
    """Without rows or columns there is no element; without k all are 0."""
    module = small(file)
    for m, n, k in (0, 5, 20), (5, 0, 20), (5, 4, 0):
        x, w = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16)
        for name, (multiply, *kinds) in module.ladder().items():
            operands = [y for z, kind in zip((x, w), kinds) for y in module.quantizers()[kind](z)[:2]]
            found = multiply(*operands)
            assert found.shape == (m, n) and (found == 0).all(), name


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


def test_refusals():
    """What a kernel does not take ends with one clear error."""
    module = load(FP8_MATMUL)
    x, one = random(4, 8), torch.ones(())
    x8, scale, *_ = module.quantize_reference(x, "rows")
    for words, function, *given in [
        (r"\[m, k\]", module.quantize_tensor, x[0]),
        ("float64", module.quantize_rows, x.double()),
        ("height is 64", module.quantize_blocks, x, 64),
        (r"\[m, k\] and \[n, k\]", module.matmul_tensorwise, x8, one, x8.T, one),
        ("bfloat16", module.matmul_tensorwise, x, one, x, one),
        (r"scales are \[4\] and \[4\]: must be \[\] and \[\]", module.matmul_tensorwise, x8, scale, x8, scale),
        ("in float32", module.matmul_rowwise, x8, scale.double(), x8, scale),
        (r"be \[4, 1\] and \[1, 1\] or \[4, 1\] and \[4, 1\]", module.matmul_blockwise, x8, one, x8, one),
    ]:
        with pytest.raises(ValueError, match=words):
            function(*given)
