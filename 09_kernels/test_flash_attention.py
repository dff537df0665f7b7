"""Attention in blocks is attention: whatever the blocks, of parts of the keys, and in the gradients of both outputs.

The file's own cases run in test_kernels.py, in large blocks; here blocks are small, so that rows have many of them.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from einops import rearrange
from launch import in_a_fork, load
from probes import random
from torch import Tensor

RECIPE, GLUON = "09_kernels/flash_attention.py", "09_kernels/flash_attention_gluon.py"


def shrink(module: ModuleType, m: int, n: int) -> None:
    """Give a program m rows of queries and n of keys at a time; three heads, which divide no others, side by side."""
    module.options = lambda kernel, x: dict(BLOCK_M=m, BLOCK_N=n, TOGETHER=3, num_warps=4, num_stages=2)


def tensors(b: int, h: int, kv_heads: int, s: int, t: int, k: int) -> list[Tensor]:
    keys, values = random(b, kv_heads, t, k + 1), random(b, kv_heads, t, k + 2)
    return [random(b, h, s, k), keys[..., 1:].contiguous(), values[..., 2:].contiguous()]  # drawn from different seeds


def close(
    module: ModuleType, ours: Callable, plain: Callable, inputs: list[Tensor], dtype: torch.dtype, what: str = ""
) -> None:
    """Compare outputs and gradients with plain PyTorch's in float64; a log-sum-exp is never rounded to 16 bits."""
    limit = 1e-12 if dtype == torch.float64 else 1e-3
    for name, (error, _) in zip(("o", "lse", "dq", "dk", "dv"), module.errors(ours, plain, inputs, dtype)):
        assert error <= (min(limit, 1e-6) if name == "lse" else limit), f"{what} {name}: the error is {error:.1e}"


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("m, n", [(16, 32), pytest.param(32, 16, marks=pytest.mark.thorough)])
@in_a_fork
def test_many_small_blocks(m, n, causal, file=None):
    """Several blocks per row, of which the last is cut; four heads of queries share two of keys."""
    module = load(file or RECIPE)
    shrink(module, m, n)
    plain, inputs = lambda q, k, v: module.reference(q, k, v, causal), tensors(1, 4, 2, 49, 49 if causal else 37, 16)
    for rung, dtype in ("flash1", torch.float64), ("flash2", torch.float64), ("tma", torch.float16):
        assert rung != "tma" or module.fits(*(x.to(dtype) for x in inputs))
        ours = lambda q, k, v, rung=rung: module.Rung.apply(q, k, v, causal, rung)  # noqa: E731
        close(module, ours, plain, inputs, dtype, rung)


@in_a_fork
def test_rows_that_see_nothing(file=None):
    """Zero keys, or scores of -inf alone: 0, and a log-sum-exp of -inf. Beside them, other rows are right."""
    module = load(file or RECIPE)
    shrink(module, 16, 16)
    for dtype in torch.float64, torch.float16:
        q, k, v = (x.to(dtype) for x in tensors(1, 2, 1, 40, 40, 16))
        o, lse = module.flash_attention_with_lse(q, k[:, :, :0], v[:, :, :0], False)
        assert (o == 0).all() and (lse == -torch.inf).all(), "zero keys"
        q, k = q.abs(), k.clone()
        k[:, :, :20] = -torch.inf  # whole blocks, and part of one
        o, lse = module.flash_attention_with_lse(q, k, v)
        exact, exact_lse = module.reference(q.double(), k.double(), v.double())
        assert (o[:, :, :20] == 0).all() and (lse[:, :, :20] == -torch.inf).all(), "rows of -inf"
        assert torch.allclose(o.double(), exact, atol=1e-3), "rows beside them"
        assert torch.allclose(lse[:, :, 20:].double(), exact_lse[:, :, 20:], atol=1e-5), "rows beside them"


@pytest.mark.thorough
@in_a_fork
def test_views_are_not_copied(file=None):
    """Views of projections are read where they lie, and so is what a model makes of the output."""
    module = load(file or RECIPE)
    copies, contiguous = [], Tensor.contiguous
    Tensor.contiguous = lambda x: copies.append(x.shape) or contiguous(x)
    leaves = [random(2, 40, heads * 16).requires_grad_() for heads in (4, 2, 2)]
    q, k, v = (rearrange(x, "b s (h k) -> b h s k", k=16) for x in leaves)
    o = module.flash_attention(q, k, v)
    joined = rearrange(o, "b h s k -> b s (h k)")
    assert joined.data_ptr() == o.data_ptr(), "heads of a token do not lie side by side"
    gradients = torch.autograd.grad(joined, leaves, random(2, 40, 64))
    assert all(x.is_contiguous() for x in gradients), "gradients are not as projections need them"
    assert all(len(shape) < 4 for shape in copies), f"copied: {copies}"


@pytest.mark.thorough
@in_a_fork
def test_other_strides_are_right(file=None):
    """Gradients that are expanded; elements of a larger tensor that are not aligned, and by columns."""
    module, inputs = load(file or RECIPE), tensors(2, 2, 1, 30, 30, 64)
    functions = module.flash_attention_with_lse, module.reference
    ours, plain = (lambda *x, f=f: tuple(y.sum() for y in f(*x)) for f in functions)
    close(module, ours, plain, inputs, torch.float64, "an expanded gradient")
    for cut in lambda x: x[..., 1:33], lambda x: x.mT[..., :16]:
        ours, plain = (lambda *x, f=f, cut=cut: f(*map(cut, x)) for f in functions)
        close(module, ours, plain, inputs, torch.float16, "a view")


def test_gluon_programs_have_blocks_of_their_own():
    """Each block of each head has one program; a program waits for blocks before its own, whose numbers are smaller."""
    module = load(GLUON)
    find_block = module.find_block.fn
    find_block.__globals__["gl"] = SimpleNamespace(minimum=min)  # plain numbers have no other
    for heads, blocks in (1, 1), (8, 5), (10, 7), (17, 3), (3, 40):
        found = [find_block(number, heads, blocks, module.SIDE) for number in range(heads * blocks)]
        assert sorted(found) == [(head, block) for head in range(heads) for block in range(blocks)]
        for head in range(heads):
            assert [block for other, block in found if other == head] == list(range(blocks))
