"""Every kernel computes what PyTorch does, in every dtype; what is written over is never read as if it were not.

All of it in Triton's interpreter, which is slow: sizes are small, and where a CPU would run one large program, the test
asks for many small ones. Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries
bugs with them.
"""

import contextlib
import functools
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import equivalence
import numpy as np
import pytest
import torch
from launch import ROOT, in_a_fork, load
from test_lineage import FAMILY
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

KERNELS = [path for path in FAMILY if path.startswith("09") and path != "09_kernels/train.py"]
# whose own tests prove them in less time than their checks take
OWN_TESTS = [f"09_kernels/{name}.py" for name in ("flash_attention", "matmul", "grouped_matmul", "fp8_matmul")]
GLUON = "09_kernels/flash_attention_gluon.py"  # which has no interpreter: on a CPU it says so, and checks nothing
ELEMENTWISE, SOFTMAX, RMSNORM = "09_kernels/elementwise.py", "09_kernels/softmax.py", "09_kernels/rmsnorm.py"
SWIGLU, ROPE, CROSS_ENTROPY = "09_kernels/swiglu.py", "09_kernels/rope.py", "09_kernels/cross_entropy.py"
COALESCING, TILING, DIVERGENCE = "09_kernels/coalescing.py", "09_kernels/tiling.py", "09_kernels/divergence.py"


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# ------------------------------------------------------------------------------------------------------- right results
def check(recipe: str, file: str | None, few: bool) -> None:
    """Run a file's own check, of the dtype that rounds most and of float64, which shows every other bug; or of others.

    In bfloat16, too, which the interpreter of the tests rounds as GPUs do. All that is empty is NaN.
    """
    torch.use_deterministic_algorithms(recipe != COALESCING, warn_only=True)  # which has 2 GiB that nobody touches
    module, out = load(file or recipe), io.StringIO()
    if torch.float64 in getattr(module, "DTYPES", ()):
        module.DTYPES = [x for x in module.DTYPES if (x in (torch.bfloat16, torch.float64)) == few]
        if not few and (cases := getattr(module, "cases", None)):  # in these dtypes a third of the cases
            module.cases = lambda *args: itertools.islice(cases(*args), 0, None, 3)
    with contextlib.redirect_stdout(out):
        module.check(torch.device("cpu"))  # which is not "cpu", whose bfloat16 the file leaves out
    lines = out.getvalue().splitlines()
    assert len(lines) >= 2 and all(re.search("worst error|equal to the bit", line) for line in lines), lines


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(x, marks=pytest.mark.thorough if x in OWN_TESTS else ()) for x in KERNELS if x != GLUON],
)
@in_a_fork
def test_check(recipe, file=None):
    """Forward and gradients of all cases: at most twice PyTorch's own error in each dtype."""
    check(recipe, file, True)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [x for x in KERNELS if re.search("^DTYPES = .*float64", FAMILY[x].source, re.M)])
@in_a_fork
def test_check_in_other_dtypes(recipe):
    check(recipe, None, False)


def shrink(module: ModuleType) -> None:
    """Give each program few elements, and each row several blocks."""
    sizes = dict(block_length=256, elements=2048, tile=(4, 64))
    for name, size in sizes.items():
        if hasattr(module, name):
            setattr(module, name, lambda x, size=size: size)
    if hasattr(module, "LONGEST_BLOCK"):
        module.LONGEST_BLOCK, module.BLOCK = 512, 256


@pytest.mark.parametrize(
    "recipe",
    [
        SOFTMAX,
        RMSNORM,
        *(pytest.param(path, marks=pytest.mark.thorough) for path in (SWIGLU, "09_kernels/elementwise.py")),
    ],
)
@in_a_fork
def test_many_small_programs(recipe, file=None):
    """As on a GPU, where a program has few elements: the smaller ones of the same cases."""
    module = load(file or recipe)
    shrink(module)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for what, ours, plain, inputs in module.cases("cpu"):
        if max([0, *(x.numel() for x in inputs)]) <= 60_000:
            for mine, theirs in module.errors(ours, plain, inputs, torch.float32):
                assert mine <= 2 * max(theirs, torch.finfo(torch.float32).eps / 4), f"{what}: the error is {mine:.1e}"


@in_a_fork
def test_many_rows_of_cross_entropy(file=None):
    """5,000 rows of 37: several programs, of which the last has rows beyond the end."""
    module = load(file or CROSS_ENTROPY)
    targets = (torch.arange(5000) * 7 % 37).masked_fill(torch.arange(5000) % 3 == 0, module.IGNORE)
    pairs = module.errors(
        lambda x, t: module.cross_entropy_sum(x * 1, t), module.reference, [random(5000, 37), targets], torch.float64
    )
    assert all(mine <= 1e-12 for mine, _ in pairs), pairs


@in_a_fork
def test_wide_head(file=None):
    """20,000 columns: several blocks per row, of which the second sweep makes gradients."""
    module, targets = load(file or CROSS_ENTROPY), torch.tensor([0, 19_999, -100, 16_384, 5, 16_383, 9])
    pairs = module.errors(
        lambda x, w: module.linear_cross_entropy_sum(x, w, targets, 4),
        lambda x, w: module.linear_reference(x, w, targets),
        [random(7, 5), 3 * random(20_000, 5)],
        torch.float64,
    )
    assert all(mine <= 1e-12 for mine, _ in pairs), f"errors of {pairs}"


@in_a_fork
def test_many_tokens_of_rope(file=None):
    """30 x 150 tokens: several programs; a table that is longer than the text, and not contiguous."""
    module = load(file or ROPE)
    rope = tuple(nn.functional.pad(half, (0, 5))[:, :16] for half in module.table(160, 16, "cpu"))
    pairs = module.errors(
        lambda x: module.rotate(x * 1, rope), lambda x: module.reference(x, rope), [random(30, 150, 48)], torch.float64
    )
    assert all(mine <= 1e-12 for mine, _ in pairs), pairs


@pytest.mark.parametrize("recipe", [ELEMENTWISE, SOFTMAX, RMSNORM, SWIGLU, ROPE, CROSS_ENTROPY])
@in_a_fork
def test_rounds_once(recipe, file=None):
    """In bfloat16, all is computed in float32: outputs and gradients are the exact ones, rounded, but for near ties."""
    module = load(file or recipe)
    _, ours, plain, inputs = next(iter(module.cases("cpu")))
    low = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
    exact = module.outputs_and_gradients(plain, [x.double() if x.is_floating_point() else x for x in low], low[0].dtype)
    found = module.outputs_and_gradients(ours, low, low[0].dtype)
    for i, (mine, right) in enumerate(zip(found[: 1 if recipe == SOFTMAX else None], exact)):  # backward reads its y
        share = (mine == right.to(mine.dtype)).float().mean()
        assert share > 0.98 or mine.dtype != torch.bfloat16, f"result {i}: {1 - share:.0%} are rounded more than once"


@in_a_fork
def test_norms_keep_dtypes(file=None):
    """An fp32 weight beside bf16 activations: those stay bf16, and its gradient is fp32, and nowhere rounded."""
    module = load(file or RMSNORM)
    x, weight = (random(6, 40) * 8).round() / 8, random(40, dtype=torch.float32).requires_grad_()
    x = x.bfloat16().requires_grad_()  # of few bits, so that the sum is exact
    total, y = module.add_rms_norm(x, x * 2, weight)
    (total.sum() + y.float().sum()).backward()
    assert total.dtype == y.dtype == x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    wide, right = (z.detach().double().requires_grad_() for z in (x, weight))
    summed, normed = module.add_reference(wide, wide * 2, right)
    (summed.sum() + normed.sum()).backward()
    assert module.relative_error(weight.grad, right.grad) < 1e-6, "the gradient of the weight is rounded"
    assert module.relative_error(x.grad, wide.grad) < 2**-8


def far_apart(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows that lie 2^30 elements apart: pages that nobody touches take no memory."""
    whole = torch.empty((rows - 1) * 2**30 + columns, dtype=dtype)
    return whole.as_strided((rows, columns), (2**30, 1)).copy_(random(rows, columns))


def attention(module: ModuleType, q: Tensor) -> list[Tensor]:
    o, lse = module.flash2(q, q, q, True, 0.1)
    return [o, lse, *module.flash2_gradients(q, o, lse, lse, q, q, q, True, 0.1)]


FAR = {  # file: results for a tensor [3, 40], and what has been written into it
    SOFTMAX: lambda module, x: [module.softmax_rows(x), module.softmax_rows_backward(x, random(3, 40).half())],
    RMSNORM: lambda module, x: module.normalize(x, x, x[0] * 1, 1e-5),
    SWIGLU: lambda module, x: [module.silu_mul_rows(x, x), module.silu_mul_gradients(x, x, x, x, x * 1), x * 1],
    ROPE: lambda module, x: [
        module.rotate(x[None], module.table(3, 8, "cpu")) * 1,  # tokens, and then sequences, lie far apart
        module.rotate(x[:, None], module.table(3, 8, "cpu")) * 1,
    ],
    CROSS_ENTROPY: lambda module, x: [
        *module.losses(x, torch.arange(3), module.IGNORE, True),
        x * 1,
        module.write_gradient(x, torch.arange(3), module.IGNORE, *x[:, :2].T.float(), torch.ones(()), x),
        x * 1,
    ],
    "09_kernels/matmul.py": lambda module, x: [module.pipelined(x, x.T), module.pipelined(x.T, x)],
    "09_kernels/grouped_matmul.py": lambda module, x: [
        module.grouped_weight_gradient(x, x, torch.tensor([1, 3], dtype=torch.int32))
    ],
    "09_kernels/flash_attention.py": lambda module, x: [
        *(y for view in (x[None, None], x[None, :, None], x[:, None, None]) for y in attention(module, view))
    ],
    "09_kernels/fp8_matmul.py": lambda module, x: [
        y.float() for quantize in module.quantizers().values() for y in quantize(x)
    ],
}


@pytest.mark.parametrize("recipe", FAR)
@in_a_fork
def test_more_than_2_31_elements(recipe, file=None):
    """What lies beyond them is found as if it lay side by side."""
    module, x = load(file or recipe), far_apart(3, 40, torch.float16)
    right, found = (FAR[recipe](module, y) for y in (x.clone(memory_format=torch.contiguous_format), x))
    for i, (mine, theirs) in enumerate(zip(found, right, strict=True)):
        assert mine is None or torch.equal(mine, theirs), f"result {i} is another"


# ------------------------------------------------------------------------------------------------------------ in place
def raises(error: type[Exception], words: str, function: Callable[[], object]) -> None:
    with pytest.raises(error, match=words):
        function()


MODIFIED = "modified by an inplace operation|has been modified inplace"  # the second where it was a view


@in_a_fork
def test_swiglu_writes_over_its_inputs(file=None):
    """The gradients of gate and up lie where gate and up were; h, computed again, is no part of them."""
    module = load(file or SWIGLU)
    for function, more in (module.silu_mul, []), (module.swiglu, [random(3, 6).requires_grad_()]):
        leaves = [random(2, 5, 6).requires_grad_(), random(2, 5, 6).neg().requires_grad_()]
        gate, up = (x * 1 for x in leaves)
        places = gate.data_ptr(), up.data_ptr()
        arrived = torch.autograd.grad(function(gate, up, *more).sum(), (gate, up))
        assert tuple(x.data_ptr() for x in arrived) == places, "the gradients have memory of their own"


@in_a_fork
def test_swiglu_raises_where_its_inputs_are_needed(file=None):
    """By an operation before it, or by a second backward: autograd says so instead of computing with gradients."""
    module = load(file or SWIGLU)
    for function, more in (module.silu_mul, []), (module.swiglu, [random(3, 6)]):
        x, y = random(5, 6).requires_grad_(), random(6, 5).view(5, 6).requires_grad_()
        raises(ValueError, "leaves", lambda f=function, m=more: f(x, y * 1, *m))  # noqa: B023
        raises(ValueError, "leaves", lambda f=function, m=more: f(x * 1, y, *m))  # noqa: B023
        for gate, up in (x.sigmoid(), y * 1), (x * 1, y.exp()):
            loss = function(gate, up, *more).sum()
            raises(RuntimeError, MODIFIED, loss.backward)
        loss = function(x * 1, y * 1, *more).sum()
        loss.backward(retain_graph=True)
        raises(RuntimeError, MODIFIED, loss.backward)
        with torch.no_grad():
            function(x, y, *more)  # no gradient will be written


@in_a_fork
def test_cross_entropy_writes_over_the_logits(file=None):
    module = load(file or CROSS_ENTROPY)
    x = random(5, 7).requires_grad_()
    logits = x * 1
    place = logits.data_ptr()
    (arrived,) = torch.autograd.grad(module.cross_entropy_sum(logits, torch.arange(5)), logits)
    assert arrived.data_ptr() == place, "the gradient has memory of its own"


@in_a_fork
def test_cross_entropy_raises_where_logits_are_needed(file=None):
    module, targets = load(file or CROSS_ENTROPY), torch.arange(5)
    x, weight = random(5, 7).requires_grad_(), random(9, 7).requires_grad_()
    raises(ValueError, "leaves", lambda: module.cross_entropy_sum(x, targets))
    raises(RuntimeError, MODIFIED, module.cross_entropy_sum(x.exp(), targets).backward)
    for loss in module.cross_entropy_sum(x * 1, targets), module.linear_cross_entropy_sum(x * 1, weight, targets, 2):
        loss.backward(retain_graph=True)
        raises(RuntimeError, MODIFIED, loss.backward)
    with torch.no_grad():
        module.cross_entropy_sum(x, targets)


@in_a_fork
def test_rope_rotates_in_place_and_leaves_the_gradient_alone(file=None):
    """The incoming gradient may be that of others, too. What needs x before the rotation raises."""
    module = load(file or ROPE)
    x, rope = random(2, 3, 8).requires_grad_(), module.table(3, 4, "cpu")
    before = x * 1
    place = before.data_ptr()
    after = module.rotate(before, rope)
    assert after.data_ptr() == before.data_ptr() == place, "the result has memory of its own"
    dy = random(2, 3, 8).neg()
    kept = dy.clone()
    after.backward(dy)
    assert torch.equal(dy, kept), "backward has changed the gradient that it was handed"
    before = x.exp()
    loss = module.rotate(before, rope).sum()
    raises(RuntimeError, MODIFIED, loss.backward)
    raises(ValueError, "leaf", lambda: module.rotate(x, rope))
    (cos, sin), wide = rope, x * 1
    raises(ValueError, "does not fit", lambda: module.rotate(wide, (cos[:2], sin[:2])))
    raises(ValueError, "does not fit", lambda: module.rotate(wide[:, :, :6], rope))
    raises(ValueError, "contiguous", lambda: module.rotate(wide[..., ::2], rope))


@in_a_fork
def test_rope_where_a_projection_is_kept(file=None):
    """Selective checkpointing that keeps what a matmul returned: recomputation does not rotate it again."""
    module = load(file or ROPE)
    x, weight, rope = random(2, 3, 8), random(8, 8).requires_grad_(), module.table(3, 4, "cpu")

    def block(x: Tensor) -> Tensor:
        return module.rotate(nn.functional.linear(x, weight), rope).exp()

    (right,) = torch.autograd.grad(block(x).sum(), weight)
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    (found,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, context_fn=keep).sum(), weight)
    assert torch.equal(found, right), "rotated twice"


def check_written_over(recipe: str, file: str) -> None:
    """All that is promised of what a file writes over."""
    if recipe == SWIGLU:
        test_swiglu_writes_over_its_inputs(file)
        test_swiglu_raises_where_its_inputs_are_needed(file)
    elif recipe == CROSS_ENTROPY:
        test_cross_entropy_writes_over_the_logits(file)
        test_cross_entropy_raises_where_logits_are_needed(file)
    else:
        test_rope_rotates_in_place_and_leaves_the_gradient_alone(file)
        test_rope_where_a_projection_is_kept(file)


# --------------------------------------------------------------------------------------------------------- edge cases
@in_a_fork
def test_zeros_that_need_all_steps(tmp_path, file=None):
    """With another formula, as the file invites: lanes beyond the end hold 0, and still are in nobody's list."""
    changed, text = tmp_path / "divergence.py", (ROOT / (file or DIVERGENCE)).read_text()
    assert text.count("tl.abs(x) > CALM") == 1
    changed.write_text(text.replace("tl.abs(x) > CALM", "tl.abs(x) < CALM"))
    module, n = load(str(changed)), 1000
    for value, count in (7.0, 0), (0.0, n):
        x, y, indices = (
            torch.full((2048,), value),
            torch.full((2048,), -5.0),
            torch.full((2048,), -1, dtype=torch.int32),
        )
        found = torch.zeros(1, dtype=torch.int32)
        module.collect[(1,)](x, y, indices, found, n, BLOCK=module.BLOCK)
        assert found == count and (indices[n:] == -1).all() and (y[n:] == -5).all()


@in_a_fork
def test_refusals(file=None):
    """What a kernel does not take ends with one clear error; what is at the edge is taken, strided weights are, too."""
    rmsnorm, softmax, x = load(file or RMSNORM), load(SOFTMAX), random(3, 8)
    long, weight = torch.zeros(1, 2**16 + 1), torch.ones(2**16 + 1)
    assert (rmsnorm.rms_norm(long[:, 1:], weight[1:]) == 0).all()
    assert torch.allclose(rmsnorm.rms_norm(x, random(16)[::2]), rmsnorm.reference(x, random(16)[::2]))
    for error, function in [
        ("65537 elements", lambda: rmsnorm.rms_norm(long, weight)),
        ("65537 elements", lambda: rmsnorm.add_rms_norm(long, long, weight)),
        ("must be alike", lambda: rmsnorm.add_rms_norm(x, x[:1], random(8))),
        ("must be alike", lambda: rmsnorm.rms_norm(x, random(4))),
        ("int64", lambda: softmax.softmax(torch.arange(3))),
        ("int64", lambda: load(ELEMENTWISE).elu(torch.arange(3))),
        *(("int64", lambda way=way: way(torch.arange(3))) for way in load(DIVERGENCE).WAYS),
        ("int64", lambda: load(SWIGLU).silu_mul(x.long(), x.long())),
        ("int64", lambda: load(CROSS_ENTROPY).cross_entropy_sum(x.long(), torch.zeros(3).long())),
        ("int64", lambda: load(CROSS_ENTROPY).linear_cross_entropy_sum(x.long(), x, torch.zeros(3).long())),
        ("uint8", lambda: load(CROSS_ENTROPY).cross_entropy_sum(x, torch.zeros(3).byte())),
        ("float32", lambda: load(CROSS_ENTROPY).linear_cross_entropy_sum(x, x, torch.zeros(3))),
        ("int64", lambda: load(ROPE).rotate(x[None].long(), (x, x))),
        ("3 dimensions", lambda: load(COALESCING).transpose(load(COALESCING).transpose_far, long[None])),
        (r"\[m, k\]", lambda: load(TILING).dot(long, long)),
        ("float64", lambda: load(TILING).dot(long.double(), long.double().T)),
    ]:
        raises(ValueError, error, function)


@in_a_fork
def test_memory_of_others_is_not_written_over(file=None):
    """Constants, views of parameters, expanded tensors and shared memory are refused; other strides are read right."""
    swiglu, cross_entropy, rope = load(file or SWIGLU), load(CROSS_ENTROPY), load(ROPE)
    p, x, weight = (random(6, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    y, row, targets = x * 1, x[:1] * 1, torch.arange(12).view(6, 2)[:, 0] % 4
    for function, more in (swiglu.silu_mul, []), (swiglu.swiglu, [weight]):
        for gate, up in (y, torch.ones(6, 8).double()), p[:, :8].split(8, 1) * 2, (y, y), (y, row.expand(6, 8)):
            raises(ValueError, "writes over its inputs", lambda: function(gate, up, *more))  # noqa: B023
        raises(ValueError, "must be alike", lambda: function(y, row, *more))  # noqa: B023
    for logits in p[:, :5], row.expand(6, 8):
        raises(ValueError, "writes over its inputs", lambda: cross_entropy.cross_entropy_sum(logits, targets))  # noqa: B023
    raises(ValueError, r"\[n\]", lambda: cross_entropy.cross_entropy_sum(y, targets[:5]))
    raises(ValueError, r"\[v, d\]", lambda: cross_entropy.linear_cross_entropy_sum(x, weight[:, :5], targets))
    raises(ValueError, "must not be a leaf", lambda: rope.rotate(p[None], rope.table(6, 4, "cpu")))
    expanded = row.view(1, 1, 8).expand(1, 5, 8)
    raises(ValueError, "expanded", lambda: rope.rotate(expanded, rope.table(5, 4, "cpu")))
    exact = cross_entropy.reference(y, targets)
    assert torch.allclose(cross_entropy.cross_entropy_sum(y * 1, targets), exact), "targets have a stride"
    exact = cross_entropy.linear_reference(x, weight, targets)
    assert torch.allclose(cross_entropy.linear_cross_entropy_sum(x, weight, targets), exact), "targets have a stride"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [ELEMENTWISE, SOFTMAX, RMSNORM, SWIGLU, ROPE, CROSS_ENTROPY])
@in_a_fork
def test_gradients_of_gradients_are_refused(recipe, file=None):
    """Kernels leave no graph: the gradient of a penalty on gradients would lack all that goes through them."""
    for _, ours, _, inputs in load(file or recipe).cases("cpu"):
        if all(1 < x.numel() < 1e5 for x in inputs if x.is_floating_point()):
            leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
            results = ours(*inputs)
            loss = sum(y.square().sum() for y in (results if isinstance(results, tuple) else (results,)))
            raises(RuntimeError, "create_graph", lambda: torch.autograd.grad(loss, leaves, create_graph=True))  # noqa: B023


@in_a_fork
def test_autocast_does_not_reach_swiglu(file=None):
    """Under autocast, gate and up are bfloat16 and the weight is float32: its gradient is, too."""
    swiglu = load(file or SWIGLU)
    for dtype in torch.bfloat16, torch.float32:
        gate, up, weight = random(6, 8).to(dtype), random(7, 8)[1:].to(dtype), nn.Parameter(random(5, 8).float())
        with torch.autocast("cpu", torch.bfloat16):
            y = swiglu.swiglu(gate.requires_grad_() * 1, up.requires_grad_() * 1, weight)
        y.sum().backward()
        exact = swiglu.matmul_reference(gate.double(), up.double(), weight.double())
        assert y.dtype == gate.grad.dtype == dtype and weight.grad.dtype == torch.float32
        assert swiglu.relative_error(y.detach(), exact.detach()) < 2 * torch.finfo(dtype).eps


@in_a_fork
def test_results_may_be_changed_in_place():
    """As those of PyTorch's operations: by a residual add, a scale, a rotation."""
    rmsnorm, swiglu, rope = (load(path) for path in (RMSNORM, SWIGLU, ROPE))
    x, weight = random(2, 3, 8).requires_grad_(), random(8)
    results = [rmsnorm.rms_norm(x, weight), swiglu.silu_mul(x * 1, x * 2), swiglu.swiglu(x * 1, x * 2, random(8, 8))]
    results += [rmsnorm.add_rms_norm(x, x * 1, weight)[1]]
    for y in results:
        exact = (y.detach() * 2).sum()
        y.mul_(2)
        assert torch.allclose(y.sum(), exact)
        y.sum().backward()
    rope.rotate(rmsnorm.rms_norm(x, weight) * 1, rope.table(3, 4, "cpu")).sum().backward()


@in_a_fork
def test_rows_of_the_least_logits(file=None):
    """float32's most negative number everywhere: the loss is log v."""
    module = load(file or CROSS_ENTROPY)
    logits = torch.full((2, 50), torch.finfo(torch.float32).min)
    assert abs(module.cross_entropy_sum(logits, torch.tensor([3, 4])).item() / (2 * np.log(50)) - 1) < 1e-6


@in_a_fork
def test_targets_of_cross_entropy(file=None):
    """IGNORE counts nothing, and its row of the gradient is 0, even where logits are inf; no column gives NaN."""
    module = load(file or CROSS_ENTROPY)
    x, targets = random(6, 9).requires_grad_(), torch.tensor([3, module.IGNORE, 8, module.IGNORE, 0, 1])
    (dx,) = torch.autograd.grad(module.cross_entropy_sum(x * 1, targets), x)
    assert (dx[targets == module.IGNORE] == 0).all() and (dx[targets != module.IGNORE] != 0).all()
    whole = torch.autograd.grad(module.cross_entropy_sum(x * 1, torch.full((6,), module.IGNORE)), x)[0]
    assert (whole == 0).all()
    for wrong in 9, -1, -99, 2**40:
        targets[2] = wrong
        assert module.cross_entropy_sum(x.detach() * 1, targets).isnan(), f"target {wrong} of 9 columns"
        assert module.linear_cross_entropy_sum(x.detach(), random(9, 9), targets).isnan(), f"target {wrong} of 9 rows"
    with torch.no_grad():
        low = x.clone()
        low[:, 2:5] = -torch.inf
        exact = nn.functional.cross_entropy(low, targets.clamp(0, 1), reduction="sum")
        assert torch.allclose(module.cross_entropy_sum(low, targets.clamp(0, 1)), exact)


@in_a_fork
def test_ignore_index(file=None):
    """As torch's: another index than -100 may be ignored, a column of the logits, too; -100 is then a wrong target."""
    module, targets = load(file or CROSS_ENTROPY), torch.tensor([3, 5, 8, 5, 0])
    exact = nn.functional.cross_entropy
    for ours, plain, inputs in [
        (lambda x, **more: module.cross_entropy_sum(x * 1, **more), exact, [random(5, 9)]),
        (module.linear_cross_entropy_sum, lambda x, w, **more: exact(x @ w.T, **more), [random(5, 4), random(9, 4)]),
    ]:
        pairs = module.errors(
            lambda *x, ours=ours: ours(*x, targets=targets, ignore_index=5),
            lambda *x, plain=plain: plain(*x, target=targets, ignore_index=5, reduction="sum"),
            inputs,
            torch.float64,
        )
        assert all(mine <= 1e-12 for mine, _ in pairs), pairs
        assert ours(*inputs, targets=targets.masked_fill(targets == 0, -100), ignore_index=5).isnan()


@in_a_fork
def test_linear_cross_entropy_without_gradients(file=None):
    """Under no_grad nothing of the size of x or of the weight is made; one of the two may need no gradient."""
    module = load(file or CROSS_ENTROPY)
    x, weight, targets = random(50, 20).requires_grad_(), random(70, 20).requires_grad_(), torch.arange(50)
    made, zeros, empty = [], torch.zeros_like, torch.empty_like
    torch.zeros_like = lambda y, **more: made.append(y.shape) or zeros(y, **more)
    torch.empty_like = lambda y, **more: made.append(y.shape) or empty(y, **more)
    with torch.no_grad():
        loss = module.linear_cross_entropy_sum(x, weight, targets, 16)
    assert not made and loss.grad_fn is None and not loss.requires_grad, f"made {made}"
    exact = module.linear_reference(x, weight, targets)
    assert torch.allclose(loss, exact)
    for leaf in x, weight:
        others = [y if y is leaf else y.detach() for y in (x, weight)]
        (alone,) = torch.autograd.grad(module.linear_cross_entropy_sum(*others, targets, 16), leaf)
        (right,) = torch.autograd.grad(exact, leaf, retain_graph=True)
        assert torch.allclose(alone, right)


@in_a_fork
def test_linear_cross_entropy_adds_up_in_float32(file=None):
    """In bfloat16, over 64 chunks: a weight's gradient is off by the roundings of the logits, and one of its own."""
    module = load(file or CROSS_ENTROPY)
    n, d, v = 1024, 16, 30
    x, weight, targets = random(n, d, dtype=torch.bfloat16) + 1, random(v, d).bfloat16().float(), torch.arange(n) % v

    def error(chunk: int, dtype: torch.dtype) -> float:
        leaf = weight.to(dtype).requires_grad_()
        (found,) = torch.autograd.grad(module.linear_cross_entropy_sum(x, leaf, targets, chunk), leaf)
        assert found.dtype == dtype
        return module.relative_error(found, exact)

    wide = weight.double().requires_grad_()
    (exact,) = torch.autograd.grad(module.linear_reference(x.double(), wide, targets), wide)
    for dtype in torch.float32, torch.bfloat16:
        assert error(16, dtype) <= 1.1 * error(n, dtype) <= 2**-8, (
            f"sums over chunks are rounded, as the weight: {dtype}"
        )


# --------------------------------------------------------------------------------------------------------- as a user
@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0].startswith("09")])
def test_equals_root(recipe, world, flags):
    """The root with the kernels pasted in trains as the root, in other shapes, too."""
    equivalence.check(recipe, world, flags)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [ELEMENTWISE, GLUON])
def test_run_as_a_user(recipe):
    """Without a GPU: the check alone, a line for each thing that is tried, in seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    end = subprocess.run(
        [sys.executable, recipe], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120
    )
    assert end.returncode == 0 and not end.stderr, end.stderr
    words, lines = "nothing is checked" if recipe == GLUON else "worst error", end.stdout.splitlines()
    assert len(lines) == (1 if recipe == GLUON else 3) and all(words in line for line in lines), end.stdout


INTERPRETED = """os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))"""


@pytest.mark.parametrize("recipe", [path for path in KERNELS if path != GLUON])
@in_a_fork
def test_command_line(recipe):
    """Every file chooses the interpreter as the ones above do, before it needs it, and checks before anything else."""
    module, out, checked, source = load(recipe), io.StringIO(), [], FAMILY[recipe].source
    assert 0 < source.index(INTERPRETED) < source.index("\nimport triton\n")
    module.check = checked.append
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        sys.argv = [recipe]
        module.main()
        for flags, code in (["--help"], 0), (["--device", "cpu"], 2):
            sys.argv[1:] = flags
            with pytest.raises(SystemExit) as end:
                module.main()
            assert end.value.code == code
    assert checked == ["cpu"]
    assert source.split("\n")[0].strip('"') in out.getvalue() and "unrecognized arguments" in out.getvalue()
