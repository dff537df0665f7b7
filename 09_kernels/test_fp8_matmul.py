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


def assert_quantized(module: ModuleType, kind: str, x: Tensor, what: str, dtype: torch.dtype | None = None) -> None:
    """Values and scales of x and of x transposed are PyTorch's, to the bit."""
    dtype = dtype or module.E4M3
    found, right = module.quantizers()[kind](x, dtype), module.quantize_reference(x, kind, dtype)
    same = [module.same(mine, theirs) for mine, theirs in zip(found, right, strict=True)]
    assert all(same), f"{kind}, {what}: {same}"


def assert_close(module: ModuleType, found: Tensor, exact: Tensor, what: str) -> None:
    error = module.relative_error(found, exact)
    assert error <= 1e-6, f"{what}: the error is {error:.1e}"


# -------------------------------------------------------------------------------------------------------- quantization
@in_a_fork
def test_small_blocks(file=None):
    """Rows and columns that no block of 16 divides, and one that it does; elements of three dtypes."""
    module = small(file)
    for kind in module.quantizers():
        for shape in (37, 20), (32, 16), (1, 33), (20, 1):
            assert_quantized(module, kind, random(*shape), f"{shape}")
        for dtype in torch.float16, torch.float32:
            assert_quantized(module, kind, random(19, 35, dtype=dtype), f"{dtype}", module.E5M2)


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


@in_a_fork
def test_extreme_values(file=None):
    """Zeros stay zeros, tiny groups vanish, huge ones do not overflow; NaN and inf spoil their group, and no other."""
    module = small(file)
    x = random(48, 48)
    x[:16, :16] = 0
    x[16:32, :16] *= 2.0**-120
    x[32:, :16] *= 2.0**120
    x[0, 20], x[20, 20], x[40, 20] = torch.nan, torch.inf, -torch.inf
    for kind in module.quantizers():
        assert_quantized(module, kind, x, "extreme values")
    for height in 1, 16:
        values, scale, transposed, t_scale = module.quantize_blocks(x, height)
        for found, given in (module.dequantize(values, scale), x), (module.dequantize(transposed, t_scale), x.T):
            spoilt = ~given.isfinite()
            if height == 1:
                spoilt = spoilt.view(48, 3, 16).any(2, keepdim=True).expand(48, 3, 16).reshape(48, 48)
            else:
                spoilt = spoilt.view(3, 16, 3, 16).any((1, 3)).repeat_interleave(16, 0).repeat_interleave(16, 1)
            assert torch.equal(found.isnan(), spoilt) and not found.isinf().any()
            assert (found[given == 0] == 0).all(), "zeros are no zeros"
            error = (found - given.double())[~spoilt].abs()
            largest = given.double()[~spoilt].abs()
            assert (error <= largest * 2**-4 + 2**-100 + largest.max() * 2**-10).all()


# -------------------------------------------------------------------------------------------------------------- matmul
def quantized(module: ModuleType, kind: str, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    return module.quantize_reference(x, kind, dtype or module.E4M3)[:2]


@pytest.mark.parametrize("m, n, k", [(75, 70, 50), pytest.param(16, 33, 200, marks=pytest.mark.thorough)])
@in_a_fork
def test_small_tiles(m, n, k, file=None):
    """Rows of different magnitudes, 5 rows of tiles in groups of 2, 2 programs; a in either format."""
    module = small(file)
    for name, (multiply, *kinds) in module.ladder().items():
        for dtype in module.E4M3, module.E5M2:
            x = random(m, k) * torch.logspace(-9, 9, m, 2.0)[:, None].bfloat16()
            y = random(n, k) * torch.logspace(5, -5, n, 2.0)[:, None].bfloat16()
            operands = *quantized(module, kinds[0], x, dtype), *quantized(module, kinds[1], y)
            found, exact = multiply(*operands, torch.float32), module.reference(*operands)
            assert_close(module, found, exact, name)
            error = (found - exact).norm(dim=1) / exact.norm(dim=1)
            assert (error <= 1e-6).all(), f"{name}: rows have errors of up to {error.max():.1e}"


@in_a_fork
def test_tiles_are_shared_by_programs(file=None):
    """Any number of tiles, any number of SMs: no tile is left out."""
    module = small(file)
    for rows, programs in (1, 4), (4, 4), (5, 4), (9, 4), (3, 1), (11, 3):
        module.processors = lambda x, programs=programs: programs
        operands = *quantized(module, "rows", random(16 * rows, 16)), *quantized(module, "rows", random(64, 16))
        found = module.matmul_rowwise(*operands, torch.float32)
        assert_close(module, found, module.reference(*operands), f"{rows} x 2 tiles, {programs} SMs")


@pytest.mark.thorough
@in_a_fork
def test_operands_in_any_layout(file=None):
    """Views whose rows begin anywhere, operands and scales stored by columns: the same to the bit."""
    module = small(file)
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
    for m, n, k in (0, 5, 20), (5, 0, 20), (5, 4, 0), (0, 0, 0):
        x, w = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16)
        for name, (multiply, *kinds) in module.ladder().items():
            operands = [y for z, kind in zip((x, w), kinds) for y in module.quantizers()[kind](z)[:2]]
            found = multiply(*operands)
            assert found.shape == (m, n) and (found == 0).all(), name


@pytest.mark.parametrize(
    "kind", ["blocks", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("tensor", "rows"))]
)
@in_a_fork
def test_linear(kind, file=None):
    """y = x wᵀ, dx = dy w and dw = dyᵀ x of what the kernels write, in both layouts: off by the roundings of fp8 alone.

    e4m3 rounds by at most 2^-4, in the mean square by about 2^-5.3: two operands have less than 2^-4 together.
    """
    module = small(file)
    x, w, dy = random(45, 50), random(40, 50), random(45, 40)
    quantize = module.quantizers()
    multiply = {
        "tensor": module.matmul_tensorwise,
        "rows": module.matmul_rowwise,
        "blocks": module.matmul_blockwise,
    }
    lines = "lines" if kind == "blocks" else kind
    x8, x_scale, xt8, xt_scale = quantize[lines](x)
    w8, w_scale, wt8, wt_scale = quantize[kind](w)
    dy8, dy_scale, dyt8, dyt_scale = quantize[lines](dy)
    products = {
        "y": (multiply[kind](x8, x_scale, w8, w_scale), x.double() @ w.double().T),
        "dx": (multiply[kind](dy8, dy_scale, wt8, wt_scale), dy.double() @ w.double()),
        "dw": (multiply[kind](dyt8, dyt_scale, xt8, xt_scale), dy.double().T @ x.double()),
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
        ("float16", lambda x: module.quantize_blocks(x, dtype=torch.float16), x),
        ("height is 64", module.quantize_blocks, x, 64),
        (r"\[m, k\] and \[n, k\]", module.matmul_tensorwise, x8, one, x8.T, one),
        ("bfloat16", module.matmul_tensorwise, x, one, x, one),
        ("float64", module.matmul_tensorwise, x8, one, x8, one, torch.float64),
        (r"scales are \[4\] and \[4\]: must be \[\] and \[\]", module.matmul_tensorwise, x8, scale, x8, scale),
        (r"must be \[4\] and \[4\]", module.matmul_rowwise, x8, one, x8, one),
        ("in float32", module.matmul_rowwise, x8, scale.double(), x8, scale),
        (r"be \[4, 1\] and \[1, 1\] or \[4, 1\] and \[4, 1\]", module.matmul_blockwise, x8, one, x8, one),
    ]:
        with pytest.raises(ValueError, match=words):
            function(*given)
