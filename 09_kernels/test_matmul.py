"""Matmuls in many small tiles: programs that compute several, tiles that reach over the edge of an expert, odd strides.

All of it in Triton's interpreter. Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py
tries bugs with them.
"""

from types import ModuleType

import pytest
import torch
from launch import in_a_fork, load
from torch import Tensor

MATMUL, GROUPED = "09_kernels/matmul.py", "09_kernels/grouped_matmul.py"


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def shrink(module: ModuleType, programs: int) -> None:
    """Give each program small tiles; so many of them share the work."""
    module.tile = lambda x, columns: dict(BLOCK_M=16, BLOCK_N=32 if columns > 128 else 16, BLOCK_K=16)
    module.processors = lambda x: programs


def assert_close(module: ModuleType, found: Tensor, exact: Tensor, what: str) -> None:
    error = module.relative_error(found, exact)
    assert error <= 1e-6, f"{what}: the error is {error:.1e}"


def layouts(m: int, n: int, k: int) -> dict[str, tuple[Tensor, Tensor]]:
    """a [m, k] and b [k, n], stored as in the products of a linear layer, and both by columns."""
    a, b = random(m, k), random(k, n)
    by_columns = [x.T.contiguous().T for x in (a, b)]
    return {
        "forward": (a, by_columns[1]),
        "dx": (a, b),
        "dw": (by_columns[0], b),
        "both by columns": tuple(by_columns),
    }


# -------------------------------------------------------------------------------------------------------------- matmul
@pytest.mark.parametrize("m, n, k", [(132, 20, 24), pytest.param(16, 300, 8, marks=pytest.mark.thorough)])
@in_a_fork
def test_small_tiles(m, n, k, file=None):
    """9 rows of tiles in groups of 8: the last group is lower. 5 programs, of which some have a tile more."""
    module = load(file or MATMUL)
    shrink(module, 5)
    torch.use_deterministic_algorithms(True, warn_only=True)  # all that is empty is NaN
    for layout, (a, b) in layouts(m, n, k).items():
        for rung, function in module.ladder().items():
            assert_close(module, function(a, b), a.double() @ b.double(), f"{rung}, {layout}")


@in_a_fork
def test_tiles_are_shared_by_programs(file=None):
    """Any number of tiles, any number of SMs: no tile is left out."""
    module = load(file or MATMUL)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for rows, programs in (1, 4), (4, 4), (5, 4), (9, 4), (3, 1), (11, 3):
        shrink(module, programs)
        a, b = random(16 * rows, 8), random(8, 32)
        assert_close(module, module.matmul(a, b), a.double() @ b.double(), f"{rows} tiles, {programs} SMs")


@pytest.mark.thorough
@in_a_fork
def test_operands_are_not_copied(file=None):
    """Forward and both gradients of a linear layer read x, weight and dy as they are stored."""

    def forbidden(*_, **__):
        raise AssertionError("operands were copied")

    module = load(file or MATMUL)
    x, weight, dy = random(24, 16).requires_grad_(), random(40, 16).requires_grad_(), random(24, 40)
    torch.Tensor.contiguous = torch.Tensor.clone = torch.Tensor.copy_ = forbidden
    read, describe = [], module.TensorDescriptor.from_tensor
    module.TensorDescriptor.from_tensor = lambda y, block: read.append(y.data_ptr()) or describe(y, block)
    torch.autograd.grad(module.linear(x, weight), (x, weight), dy)
    assert {y.data_ptr() for y in (x, weight, dy)} <= set(read), "operands were copied"


@in_a_fork
def test_linear(file=None):
    """Dimensions in front, and none; nothing to add up gives zeros; a gradient is computed only where it is needed."""
    module = load(file or MATMUL)
    for shape, n in (((2, 3, 16), 8), ((16,), 24), ((0, 16), 8), ((3, 0), 5), ((2, 0, 4), 3), ((5, 8), 0)):
        x, weight = random(*shape).requires_grad_(), random(n, shape[-1]).requires_grad_()
        y, exact = module.linear(x, weight), torch.nn.functional.linear(x, weight)
        assert y.shape == exact.shape and torch.allclose(y, exact, atol=1e-6), f"{shape} -> {n}"
        dy = random(*y.shape)
        found, right = (torch.autograd.grad(z, (x, weight), dy) for z in (y, exact))
        assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(found, right)), f"{shape} -> {n}"
    x, weight, multiply, made = random(4, 8), random(8, 8), module.matmul, []
    module.matmul = lambda a, b: made.append(a.shape) or multiply(a, b)
    for needs in (x, weight):
        made.clear()
        needs.requires_grad_(True)
        module.linear(x, weight).sum().backward()
        assert len(made) == 2 and needs.grad is not None, "a gradient is computed that nobody needs"
        needs.requires_grad_(False)


def test_refusals():
    """What a kernel does not take ends with one clear error."""
    matmul, grouped = load(MATMUL), load(GROUPED)
    x, w, offsets = random(4, 8), random(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)
    for words, function, *given in [
        (r"\[m, k\] and \[k, n\]", matmul.matmul, x, x),
        (r"\[m, k\] and \[k, n\]", matmul.matmul, x, w),
        ("float64", matmul.matmul, x.double(), x.double().T),
        ("float16", matmul.matmul, x, x.half().T),
        (r"\[n, k\]", matmul.linear, x, x[:, :7]),
        (r"\[e, n, k\]", grouped.grouped_linear, x[:, :4], w, offsets),
        (r"\[e, n, k\]", grouped.grouped_linear, x, w, offsets[:1]),
        ("int32", grouped.grouped_linear, x, w, offsets.long()),
        ("float64", grouped.grouped_linear, x.double(), w.double(), offsets),
        ("16 bytes", grouped.grouped_linear, x[:, :7], w[:, :, :7], offsets),
    ]:
        with pytest.raises(ValueError, match=words):
            function(*given)


# ------------------------------------------------------------------------------------------------------------- grouped
SIZES = {
    "tiles reach over edges": [5, 16, 17, 1, 31],
    "empty first, between and last": [0, 20, 0, 0, 3, 0],
    "one has all": [0, 0, 50, 0],
    "one expert": [37],
    "more experts than rows": [0, 1] * 9,
    "no rows": [0, 0, 0],
}


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def products(module: ModuleType, x: Tensor, weight: Tensor, dy: Tensor, offsets: Tensor) -> list[Tensor]:
    """y, dx and dw."""
    x, weight = (z.detach().requires_grad_() for z in (x, weight))
    y = module.grouped_linear(x, weight, offsets)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


@pytest.mark.parametrize("what", SIZES)
@in_a_fork
def test_small_groups(what, file=None):
    """Several tiles per expert and per program, and fewer tiles than programs."""
    module, sizes = load(file or GROUPED), SIZES[what]
    torch.use_deterministic_algorithms(True, warn_only=True)
    n, k = 40, 24
    x, weight, dy = random(sum(sizes), k), random(len(sizes), n, k), random(sum(sizes), n)
    exact = [z.double() for z in (x, weight)]
    rows = [part.double() for part in dy.split(sizes)]
    right = [
        torch.cat([part @ w.T for part, w in zip(exact[0].split(sizes), exact[1])]),
        torch.cat([part @ w for part, w in zip(rows, exact[1])]),
        torch.stack([d.T @ part for d, part in zip(rows, exact[0].split(sizes))]),
    ]
    for programs in 1, 3:
        shrink(module, programs)
        for name, mine, theirs in zip(("y", "dx", "dw"), products(module, x, weight, dy, offsets_of(sizes)), right):
            assert mine.shape == theirs.shape
            assert_close(module, mine, theirs, f"{what}, {programs} programs: {name}")


@in_a_fork
def test_experts_do_not_see_each_other(file=None):
    """NaN in the rows or in the weight of an expert stays there, also where a block holds rows of two."""
    module = load(file or GROUPED)
    sizes, n, k, sick = [21, 30, 0, 9, 20], 40, 24, 1
    x, weight, dy, offsets = random(80, k), random(5, n, k), random(80, n), offsets_of(sizes)
    for small in True, False:
        if small:
            shrink(module, 2)
        healthy = products(module, x, weight, dy, offsets)
        others = torch.ones(80, dtype=torch.bool)
        others[21:51] = False
        experts = torch.arange(5) != sick
        for spoilt in range(3):
            given = [z.clone() for z in (x, weight, dy)]
            given[spoilt][sick if spoilt == 1 else ~others] = float("nan")
            found = products(module, given[0], given[1], given[2], offsets)
            for name, mine, right, kept in zip(("y", "dx", "dw"), found, healthy, (others, others, experts)):
                assert torch.equal(mine[kept], right[kept]), f"{name} of other experts has changed"


@pytest.mark.thorough
@in_a_fork
def test_groups_in_any_layout(file=None):
    """Weights stored by columns, as views, and gradients that are expanded or transposed."""
    module, sizes = load(file or GROUPED), [9, 0, 30, 1]
    shrink(module, 2)
    offsets, x, dy = offsets_of(sizes), random(40, 24), random(40, 32)
    right = None
    for what, weight in {
        "by rows": random(4, 32, 24),
        "by columns": random(4, 32, 24).mT.contiguous().mT,
        "view": torch.cat([random(4, 32, 24), random(4, 32, 24)], 2)[:, :, :24],
        "odd view": torch.cat([random(4, 32, 24)[:, :, :1], random(4, 32, 24)], 2)[:, :, 1:],
        "off by one": torch.cat([random(1), random(4, 32, 24).flatten()])[1:].view(4, 32, 24),
        "rows of x": random(4, 32, 24),
    }.items():
        given = torch.cat([x[:, :3], x], 1)[:, 3:] if what == "rows of x" else x
        found = products(module, given, weight, dy.T.contiguous().T, offsets)
        right = right or found
        assert all(torch.equal(p, q) for p, q in zip(found, right)), what
    expanded = products(module, x, weight, dy[:1].expand(40, 32), offsets)
    same = products(module, x, weight, dy[:1].repeat(40, 1), offsets)
    assert all(torch.equal(p, q) for p, q in zip(expanded, same)), "an expanded gradient"
    twice = torch.tensor([9, 9, 9, 20, 39, 39, 40, 40], dtype=torch.int32)[::2]
    assert all(torch.equal(p, q) for p, q in zip(products(module, x, weight, dy, twice), right)), "offsets"


# ------------------------------------------------------------------------------------------------------------ compiled
@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [MATMUL, GROUPED])
def test_compiles_whole(recipe):
    """torch.compile takes both linears into one graph, forward and backward."""
    module, leaves = load(recipe), [random(40, 24).requires_grad_()]
    if recipe == MATMUL:
        leaves.append(random(16, 24).requires_grad_())
        model = lambda x, w: module.linear(x, w).square()  # noqa: E731
    else:
        leaves.append(random(3, 16, 24).requires_grad_())
        offsets = module.place_rows([10, 0, 30], "cpu")
        model = lambda x, w: module.grouped_linear(x, w, offsets).square()  # noqa: E731
    exact = torch.autograd.grad(model(*leaves).sum(), leaves)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(compiled(*leaves).sum(), leaves), exact))
