"""Matmuls in many small tiles: programs with several of them, tiles that reach over an expert, odd strides."""

import functools
from types import ModuleType

import probes
import pytest
import torch
from launch import in_a_fork, load
from torch import Tensor

MATMUL, GROUPED = "09_kernels/matmul.py", "09_kernels/grouped_matmul.py"
random = functools.partial(probes.random, dtype=torch.float32)


def shrink(module: ModuleType, programs: int) -> None:
    """Give each program small tiles; so many of them share the work. All that is empty is NaN."""
    module.tile = lambda x, columns: dict(BLOCK_M=16, BLOCK_N=32 if columns > 128 else 16, BLOCK_K=16)
    module.processors = lambda x: programs
    torch.use_deterministic_algorithms(True, warn_only=True)


def assert_close(module: ModuleType, found: Tensor, exact: Tensor, what: str) -> None:
    error = module.relative_error(found, exact)
    assert error <= 1e-6, f"{what}: the error is {error:.1e}"


@in_a_fork
def test_small_tiles(file=None):
    """9 rows of tiles in groups of 8, for 5 programs; operands by rows and by columns; any number of tiles and SMs."""
    module = load(file or MATMUL)
    shrink(module, 5)
    a, b = random(132, 24), random(24, 20)
    a_columns, b_columns = (x.T.contiguous().T for x in (a, b))
    for layout, x, y in ("forward", a, b_columns), ("dx", a, b), ("dw", a_columns, b), ("both", a_columns, b_columns):
        for rung, function in module.ladder().items():
            assert_close(module, function(x, y), a.double() @ b.double(), f"{rung}, {layout}")
    for rows, programs in (1, 4), (4, 4), (5, 4), (9, 4), (3, 1), (11, 3):
        shrink(module, programs)
        a, b = random(16 * rows, 8), random(8, 32)
        assert_close(module, module.matmul(a, b), a.double() @ b.double(), f"{rows} tiles, {programs} SMs")


@pytest.mark.thorough
@in_a_fork
def test_operands_are_not_copied(file=None):
    """Forward and both gradients of a linear layer read x, weight and dy as they are stored."""
    module = load(file or MATMUL)
    x, weight, dy = random(24, 16).requires_grad_(), random(40, 16).requires_grad_(), random(24, 40)
    read, describe = [], module.TensorDescriptor.from_tensor
    module.TensorDescriptor.from_tensor = lambda y, block: read.append(y.data_ptr()) or describe(y, block)
    torch.autograd.grad(module.linear(x, weight), (x, weight), dy)
    assert all(read.count(y.data_ptr()) == 2 for y in (x, weight, dy)), "operands were copied"
    read.clear()
    torch.autograd.grad(module.linear(x, weight.detach()), x, dy)
    torch.autograd.grad(module.linear(x.detach(), weight), weight, dy)
    assert read.count(dy.data_ptr()) == 2, "the gradient of a frozen operand is computed"


@in_a_fork
def test_linear():
    """Dimensions in front, and none; nothing to add up gives zeros."""
    module = load(MATMUL)
    for shape, n in (((2, 3, 16), 8), ((16,), 24), ((0, 16), 8), ((3, 0), 5), ((2, 0, 4), 3), ((5, 8), 0)):
        x, weight = random(*shape).requires_grad_(), random(n, shape[-1]).requires_grad_()
        y, exact = module.linear(x, weight), torch.nn.functional.linear(x, weight)
        found, right = ([z, *torch.autograd.grad(z, (x, weight), random(*exact.shape))] for z in (y, exact))
        assert y.shape == exact.shape and all(torch.allclose(p, q, atol=1e-6) for p, q in zip(found, right)), shape


# tiles reach over edges; empty first, between and last; one has all; more experts than rows
SIZES = [5, 16, 17, 1, 31], [0, 20, 0, 0, 3, 0], [0, 0, 50, 0], [0, 1] * 9, [0, 0, 0]


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32).repeat_interleave(2)[::2]  # not contiguous


def products(module: ModuleType, x: Tensor, weight: Tensor, dy: Tensor, offsets: Tensor) -> list[Tensor]:
    """y, dx and dw."""
    x, weight = (z.detach().requires_grad_() for z in (x, weight))
    y = module.grouped_linear(x, weight, offsets)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


@in_a_fork
def test_small_groups(file=None):
    """Several tiles per expert and per program, and fewer tiles than programs; a gradient that is stored by columns."""
    module = load(file or GROUPED)
    for sizes in SIZES:
        x, weight, dy = random(sum(sizes), 24), random(len(sizes), 40, 24), random(40, sum(sizes)).T
        wide = [z.double().requires_grad_() for z in (x, weight)]
        y = module.reference(*wide, offsets_of(sizes))
        right = [y, *torch.autograd.grad(y, wide, dy.double())]
        for programs in 1, 3:
            shrink(module, programs)
            for name, mine, exact in zip(("y", "dx", "dw"), products(module, x, weight, dy, offsets_of(sizes)), right):
                assert mine.shape == exact.shape
                assert_close(module, mine, exact, f"{sizes}, {programs} programs: {name}")


@in_a_fork
def test_experts_do_not_see_each_other(file=None):
    """NaN in the rows or in the weight of an expert stays there, also where a block holds rows of two."""
    module = load(file or GROUPED)
    offsets, rows, experts = offsets_of([21, 30, 0, 9, 20]), torch.arange(80), torch.arange(5)
    given = random(80, 24), random(5, 40, 24), random(80, 40)
    own = (rows >= 21) & (rows < 51)
    others, spoilt = ~own, (own, experts == 1, own)
    shrink(module, 2)
    healthy = products(module, *given, offsets)
    for i in range(3):
        sick = [z.clone() for z in given]
        sick[i][spoilt[i]] = float("nan")
        found = products(module, *sick, offsets)
        for name, mine, right, kept in zip(("y", "dx", "dw"), found, healthy, (others, others, experts != 1)):
            assert torch.equal(mine[kept], right[kept]), f"{name} of other experts has changed"
    x = given[0].requires_grad_()
    module.grouped_weight_gradient = None  # it is not called for a frozen weight
    torch.autograd.grad(module.grouped_linear(x, given[1], offsets), x, given[2])
