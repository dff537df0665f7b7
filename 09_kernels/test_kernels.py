"""Every kernel computes what PyTorch does, in every dtype; what is written over is never read as if it were not.

All of it in Triton's interpreter, which is slow: sizes are small, and where a CPU would run one large program, the test
asks for many small ones.
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
from probes import random
from test_lineage import FAMILY
from torch import Tensor, nn
from torch._subclasses import CrossRefFakeMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

KERNELS = [path for path in FAMILY if path.startswith("09") and path != "09_kernels/train.py"]
FLASH, MATMUL = "09_kernels/flash_attention.py", "09_kernels/matmul.py"
GROUPED, FP8 = "09_kernels/grouped_matmul.py", "09_kernels/fp8_matmul.py"
OWN_TESTS = FLASH, MATMUL, GROUPED, "09_kernels/fp8_matmul.py"  # which prove them in less time than their checks take
GLUON = "09_kernels/flash_attention_gluon.py"  # which has no interpreter: on a CPU it says so, and checks nothing
ELEMENTWISE, SOFTMAX, RMSNORM = "09_kernels/elementwise.py", "09_kernels/softmax.py", "09_kernels/rmsnorm.py"
SWIGLU, ROPE, CROSS_ENTROPY = "09_kernels/swiglu.py", "09_kernels/rope.py", "09_kernels/cross_entropy.py"
COALESCING = "09_kernels/coalescing.py"


def check(recipe: str, file: str | None, few: bool) -> None:
    """Run a file's own check in bfloat16, which rounds most, and float64, which shows all other bugs; or in others.

    All that is empty is NaN.
    """
    torch.use_deterministic_algorithms(recipe != COALESCING, warn_only=True)  # which has 2 GiB that nobody touches
    module, out = load(file or recipe), io.StringIO()
    if torch.float64 in getattr(module, "DTYPES", ()):
        module.DTYPES = [x for x in module.DTYPES if (x in (torch.bfloat16, torch.float64)) == few]
        if not few and (all_cases := getattr(module, "cases", None)):  # in these dtypes a third of the cases
            module.cases = lambda *args: itertools.islice(all_cases(*args), 0, None, 3)
    with contextlib.redirect_stdout(out):
        module.check(torch.device("cpu"))  # which is not "cpu", whose bfloat16 the file leaves out
    lines = out.getvalue().splitlines()
    assert lines and all(re.search("worst error|equal to the bit", line) for line in lines), lines


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


@pytest.mark.parametrize("recipe", [SOFTMAX, RMSNORM, pytest.param(SWIGLU, marks=pytest.mark.thorough)])
@in_a_fork
def test_many_small_programs(recipe, file=None):
    """As on a GPU, where a program has few elements, and a row several blocks: the smaller ones of the same cases."""
    module = load(file or recipe)
    module.elements, module.tile = lambda x: 2048, lambda x: (4, 64)
    module.LONGEST_BLOCK, module.BLOCK = 512, 256
    torch.use_deterministic_algorithms(True, warn_only=True)
    for what, ours, plain, inputs in module.cases("cpu"):
        if max([0, *(x.numel() for x in inputs)]) <= 60_000:
            for mine, theirs in module.errors(ours, plain, inputs, torch.float32):
                assert mine <= 2 * max(theirs, torch.finfo(torch.float32).eps / 4), f"{what}: the error is {mine:.1e}"


@in_a_fork
def test_large_vocabulary(file=None):
    """Several programs, the last with rows beyond the end, and several blocks per row."""
    module, targets = load(file or CROSS_ENTROPY), torch.arange(20) * 1000
    alone = lambda x, w: module.cross_entropy_sum(x @ w.T, targets)  # noqa: E731
    fused = lambda x, w: module.linear_cross_entropy_sum(x, w, targets, 20)  # noqa: E731
    plain = lambda x, w: module.linear_reference(x, w, targets)  # noqa: E731
    for ours in alone, fused:
        pairs = module.errors(ours, plain, [random(20, 5), random(20_000, 5)], torch.float64)
        assert all(mine <= 1e-12 for mine, _ in pairs), pairs


@in_a_fork
def test_norms_keep_dtypes(file=None):
    """An fp32 weight beside bf16 activations: those stay bf16, and its gradient is fp32, and nowhere rounded."""
    module = load(file or RMSNORM)
    x, weight = random(6, 40, dtype=torch.bfloat16).requires_grad_(), random(40, dtype=torch.float32).requires_grad_()
    y = module.rms_norm(x, weight)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    wide = weight.detach().double().requires_grad_()
    module.reference(x.double(), wide).sum().backward()
    assert module.relative_error(weight.grad, wide.grad) < 1e-6, "the gradient of the weight is rounded"


def attention(module: ModuleType, *queries: Tensor) -> list[Tensor]:
    found = []
    for q in queries:
        o, lse = module.flash2(q, q, q, True, 0.1)
        found += [o, lse, *module.flash2_gradients(q, o, lse, lse, q, q, q, True, 0.1)]
    return found


FAR = {  # file: results for a tensor [3, 40], and what has been written into it
    SOFTMAX: lambda module, x: [module.softmax_rows(x), module.softmax_rows_backward(x, random(3, 40).half())],
    RMSNORM: lambda module, x: module.normalize(x, x, x[0] * 1, 1e-5),
    SWIGLU: lambda module, x: [module.silu_mul_rows(x, x), module.silu_mul_gradients(x, x, x, x, x * 1), x * 1],
    ROPE: lambda module, x: [module.rotate(y, module.table(3, 8, "cpu")) * 1 for y in (x[None], x[:, None])],
    CROSS_ENTROPY: lambda module, x: [*module.losses(x, torch.arange(3), module.IGNORE, True), x * 1],
    MATMUL: lambda module, x: [module.pipelined(x, x.T), module.pipelined(x.T, x)],
    GROUPED: lambda module, x: [module.grouped_weight_gradient(x, x, torch.tensor([1, 3], dtype=torch.int32))],
    FLASH: lambda module, x: attention(module, x[None, None], x[None, :, None], x[:, None, None]),
    FP8: lambda module, x: [y.float() for quantize in module.quantizers().values() for y in quantize(x)],
}


@pytest.mark.parametrize("recipe", FAR)
@in_a_fork
def test_more_than_2_31_elements(recipe):
    """Rows that lie 2^30 elements apart (pages that nobody touches take no memory) give what they give side by side."""
    module, near = load(recipe), random(3, 40, dtype=torch.float16)
    far = torch.empty(2**31 + 40, dtype=torch.float16).as_strided((3, 40), (2**30, 1)).copy_(near)
    right, found = (FAR[recipe](module, x) for x in (near, far))
    for i, (mine, theirs) in enumerate(zip(found, right, strict=True)):
        assert mine is None or torch.equal(mine, theirs), f"result {i} is another"


def raises(error: type[Exception], words: str, function: Callable[[], object]) -> None:
    with pytest.raises(error, match=words):
        function()


MODIFIED = "modified by an inplace operation|has been modified inplace"  # the second where it was a view


@in_a_fork
def test_swiglu_writes_over_its_inputs(file=None):
    """The gradients of gate and up lie where gate and up were. Whoever needs these raises: before it, or afterwards."""
    module = load(file or SWIGLU)
    for function, more in (module.silu_mul, []), (module.swiglu, [random(3, 6).requires_grad_()]):
        x, y = random(5, 6).requires_grad_(), random(6, 5).view(5, 6).requires_grad_()
        gate, up = x * 1, y * 1
        places = gate.data_ptr(), up.data_ptr()
        gradients = torch.autograd.grad(function(gate, up, *more).sum(), (gate, up))
        assert tuple(z.data_ptr() for z in gradients) == places, "the gradients have memory of their own"
        for gate, up in (x.sigmoid(), y * 1), (x * 1, y.exp()):
            raises(RuntimeError, MODIFIED, function(gate, up, *more).sum().backward)
        loss = function(x * 1, y * 1, *more).sum()
        loss.backward(retain_graph=True)
        raises(RuntimeError, MODIFIED, loss.backward)
        with torch.no_grad():
            function(x, y, *more)  # no gradient will be written


@in_a_fork
def test_cross_entropy_writes_over_the_logits(file=None):
    module, targets = load(file or CROSS_ENTROPY), torch.arange(5)
    x, weight = random(5, 7).requires_grad_(), random(9, 7).requires_grad_()
    logits = x * 1
    place = logits.data_ptr()
    (gradient,) = torch.autograd.grad(module.cross_entropy_sum(logits, targets), logits)
    assert gradient.data_ptr() == place, "the gradient has memory of its own"
    raises(RuntimeError, MODIFIED, module.cross_entropy_sum(x.exp(), targets).backward)
    for loss in module.cross_entropy_sum(x * 1, targets), module.linear_cross_entropy_sum(x * 1, weight, targets, 2):
        loss.backward(retain_graph=True)
        raises(RuntimeError, MODIFIED, loss.backward)
    torch.zeros_like = torch.empty_like = None  # nothing of the size of x or of the weight is made without gradients
    with torch.no_grad():
        module.cross_entropy_sum(x, targets)
        module.linear_cross_entropy_sum(x, weight, targets, 2)


@in_a_fork
def test_rope_rotates_in_place_and_leaves_the_gradient_alone(file=None):
    """The incoming gradient may be that of others, too. What needs x before the rotation raises.

    Selective checkpointing that keeps what a projection returned: recomputation does not rotate it again.
    """
    module = load(file or ROPE)
    x, weight, rope = random(2, 3, 8).requires_grad_(), random(8, 8).requires_grad_(), module.table(3, 4, "cpu")
    before, dy = x * 1, random(2, 3, 8).neg()
    after = module.rotate(before, rope)
    assert after.data_ptr() == before.data_ptr(), "the result has memory of its own"
    after.backward(dy)
    assert torch.equal(dy, random(2, 3, 8).neg()), "backward has changed the gradient that it was handed"
    raises(RuntimeError, MODIFIED, module.rotate(x.exp(), rope).sum().backward)

    def block(x: Tensor) -> Tensor:
        return module.rotate(nn.functional.linear(x, weight), rope).exp()

    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    (right,) = torch.autograd.grad(block(x).sum(), weight)
    (found,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, context_fn=keep).sum(), weight)
    assert torch.equal(found, right), "rotated twice"


@in_a_fork
def test_refusals():
    """Inputs that a kernel does not take end with one clear error; inputs at the edge, and strided weights, are taken.

    Nothing writes over views of parameters, expanded tensors and shared memory.
    """
    rmsnorm, swiglu, rope, loss, matmul = (load(path) for path in (RMSNORM, SWIGLU, ROPE, CROSS_ENTROPY, MATMUL))
    x, p, long, weight = random(3, 8), nn.Parameter(random(3, 8)), torch.zeros(1, 2**16 + 1), torch.ones(2**16 + 1)
    assert (rmsnorm.rms_norm(long[:, 1:], weight[1:]) == 0).all()
    assert torch.allclose(rmsnorm.rms_norm(x, random(16)[::2]), rmsnorm.reference(x, random(16)[::2]))
    y, row, targets, table = p * 1, p[:1] * 1, torch.zeros(3).long(), rope.table(3, 4, "cpu")
    linear, w, offsets = load(GROUPED).grouped_linear, random(2, 8, 8).float(), torch.tensor([1, 3], dtype=torch.int32)
    fp8, attention, gluon = load(FP8), load(FLASH).flash_attention, load(GLUON).flash_attention
    single, low, one = x.float(), x.bfloat16(), torch.ones(())
    x8, scale, *_ = fp8.quantize_reference(low, "rows")
    q, k, v = random(1, 4, 8, 64), random(1, 2, 8, 64), random(1, 2, 8, 64)
    halves = [z.bfloat16() for z in (q, k, v)]
    for error, function, *given in [
        ("65537 elements", rmsnorm.rms_norm, long, weight),
        ("must be alike", rmsnorm.add_rms_norm, x, x[:1], random(8)),
        ("int64", load(SOFTMAX).softmax, torch.arange(3)),
        ("int64", load(ELEMENTWISE).elu, torch.arange(3)),
        ("int64", rmsnorm.rms_norm, x.long(), random(8)),
        (r"\[m, k\] and \[k, n\]", load("09_kernels/tiling.py").dot, single, single),
        ("must be alike", swiglu.silu_mul, y, row),
        ("writes over its inputs", swiglu.silu_mul, y, y),
        ("writes over its inputs", swiglu.silu_mul, y, row.expand(3, 8)),
        ("leaves", swiglu.swiglu, *p.split(4, 1), random(5, 4)),
        ("uint8", loss.cross_entropy_sum, x, targets.byte()),
        ("leaves", loss.cross_entropy_sum, p[:, :5], targets),
        (r"\[n\]", loss.cross_entropy_sum, y, targets[:2]),
        (r"\[v, d\]", loss.linear_cross_entropy_sum, x, random(4, 5), targets),
        ("must not be a leaf", rope.rotate, p[None], table),
        ("expanded", rope.rotate, row.view(1, 1, 8).expand(1, 3, 8), table),
        ("contiguous", rope.rotate, y[None, :, ::2], table),
        ("does not fit", rope.rotate, y[None], (table[0][:2], table[1][:2])),
        (r"\[m, k\] and \[k, n\]", matmul.matmul, single, single),
        (r"\[n, k\]", matmul.linear, single, single[:, :7]),
        ("float16", matmul.matmul, single, single.half().T),
        (r"\[e, n, k\]", linear, single, w, offsets[:1]),
        ("int32", linear, single, w, offsets.long()),
        ("float64", linear, single, w.double(), offsets),
        ("16 bytes", linear, single[:, :7], w[:, :, :7], offsets),
        ("float64", fp8.quantize_rows, x),
        (r"must be \[m, k\]", fp8.quantize_tensor, low[0]),
        ("in float32", fp8.matmul_tensorwise, x8, one.double(), x8, one),
        ("height is 64", fp8.quantize_blocks, low, 64),
        (r"\[m, k\] and \[n, k\]", fp8.matmul_tensorwise, x8, one, x8.T, one),
        ("bfloat16", fp8.matmul_tensorwise, low, one, low, one),
        (r"scales are \[3\] and \[3\]: must be \[\] and \[\]", fp8.matmul_tensorwise, x8, scale, x8, scale),
        (r"be \[3, 1\] and \[1, 1\] or \[3, 1\] and \[3, 1\]", fp8.matmul_blockwise, x8, one, x8, one),
        ("as many keys as queries", attention, q, k[:, :, :5], v[:, :, :5]),
        (r"must be \[b, h, s, k\]", attention, q, k[:, :0], v[:, :0]),
        ("kv heads divide h", attention, q[:, :3], k, v),
        ("must be alike", attention, q, k.float(), v),
        ("256 wide", attention, *(z.repeat(1, 1, 1, 4) for z in (q, k, v))),
        *(("must be positive", attention, q, k, v, True, factor) for factor in (0, float("inf"))),
        (r"must be \[b, h, s, k\]", gluon, halves[0], *(z[:, :, :5] for z in halves[1:])),
        ("must be alike", gluon, q, k, v),
        ("must be 64 or 128", gluon, *(z[..., :32] for z in halves)),
        ("must be on a GPU of compute capability 9.0", gluon, *halves),
    ]:
        raises(ValueError, error, functools.partial(function, *given))


OFFSETS = torch.tensor([10, 10, 40], dtype=torch.int32)
WHOLE = {  # file: a function, and the sizes of what it is given
    MATMUL: (lambda module, x, w: module.linear(x, w), (40, 24), (16, 24)),
    GROUPED: (lambda module, x, w: module.grouped_linear(x, w, OFFSETS), (40, 24), (3, 16, 24)),
    FLASH: (lambda module, q, k: module.flash_attention(q, k, k.sin()), (2, 4, 20, 16), (2, 2, 20, 16)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", WHOLE)
@in_a_fork
def test_compiles_whole(recipe):
    """torch.compile takes it into one graph, forward and backward."""
    function, *sizes = WHOLE[recipe]
    module, leaves = load(recipe), [random(*size).float().requires_grad_() for size in sizes]
    model = lambda *x: function(module, *x).square().sum()  # noqa: E731
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, exact = (torch.autograd.grad(run(*leaves), leaves) for run in (compiled, model))
    assert all(torch.equal(x, y) for x, y in zip(found, exact))
    with CrossRefFakeMode():  # sizes and strides that a compiler is told are those of all results
        torch.autograd.grad(model(*leaves), leaves)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [SOFTMAX, RMSNORM, SWIGLU, ROPE, CROSS_ENTROPY])
@in_a_fork
def test_gradients_of_gradients_are_refused(recipe, file=None):
    """Kernels leave no graph: the gradient of a penalty on gradients would lack all that goes through them."""
    _, ours, _, inputs = next(load(file or recipe).cases("cpu"))
    loss = ours(*(x.requires_grad_(x.is_floating_point()) for x in inputs)).square().sum()
    raises(RuntimeError, "create_graph", lambda: torch.autograd.grad(loss, inputs[0], create_graph=True))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [SOFTMAX, RMSNORM, SWIGLU, ROPE])
@in_a_fork
def test_a_result_that_is_changed_in_place(recipe, file=None):
    """As with PyTorch's operations: backward needs it, and raises, or is as right as before."""
    for _, ours, _, inputs in itertools.islice(load(file or recipe).cases("cpu"), 2):
        leaf, *_ = [x.requires_grad_() for x in inputs]
        (x, *others), changed = ([y] if isinstance(y, Tensor) else y for y in (ours(*inputs), ours(*inputs)))
        (right,) = torch.autograd.grad(sum(y.sum() for y in (2 * x, *others)), leaf)
        changed[0].mul_(2)
        try:
            (found,) = torch.autograd.grad(sum(y.sum() for y in changed), leaf)
        except RuntimeError as problem:
            assert re.search(MODIFIED, str(problem)), problem
        else:
            assert torch.allclose(found, right), "the gradient is another"


@in_a_fork
def test_swiglu_rounds_once(file=None):
    """In bfloat16 all is computed in float32: gradients are the exact ones, rounded, but for near ties."""
    module, given = load(file or SWIGLU), random(3, 50, 60).bfloat16()
    gate, up, dh = wide = [x.double().requires_grad_() for x in given]
    dgate, dup = torch.empty(2, 50, 60, dtype=torch.bfloat16)
    module.silu_mul_gradients(given[2], *given[:2], dgate, dup)
    for mine, exact in zip((dgate, dup), torch.autograd.grad(module.reference(gate, up), wide[:2], dh)):
        assert (mine == exact.bfloat16()).float().mean() > 0.98, "rounded more than once"


@in_a_fork
def test_autocast_does_not_reach_swiglu(file=None):
    """Under autocast, gate and up are bfloat16 and the weight is float32: its gradient is, too."""
    module = load(file or SWIGLU)
    for dtype in torch.bfloat16, torch.float32:
        x, weight = random(6, 8).to(dtype).requires_grad_(), nn.Parameter(random(5, 8).float())
        with torch.autocast("cpu", torch.bfloat16):
            y = module.swiglu(x * 1, x * 1, weight)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == dtype and weight.grad.dtype == torch.float32


@in_a_fork
def test_targets_of_cross_entropy(file=None):
    """A target that is no column gives NaN, and an ignored index other than -100 works as in torch."""
    module = load(file or CROSS_ENTROPY)
    x, weight = (random(n, 9).requires_grad_() for n in (6, 9))

    def losses(targets: Tensor, ignored: int) -> list[Tensor]:
        targets = targets.repeat_interleave(2)[::2]
        alone = module.cross_entropy_sum(x @ weight.T, targets, ignored)
        return [alone, module.linear_cross_entropy_sum(x, weight, targets, ignore_index=ignored)]

    for wrong in 9, -1, -100, 2**40:
        assert all(loss.isnan() for loss in losses(torch.tensor([3, 5, wrong, 5, 0, 1]), 5)), f"target {wrong}"
    targets = torch.tensor([3, 5, 8, 5, 0, 1])
    exact = nn.functional.cross_entropy(x @ weight.T, targets, ignore_index=5, reduction="sum")
    right = torch.autograd.grad(exact, (x, weight))
    for loss in losses(targets, 5):
        found = [loss, *torch.autograd.grad(loss, (x, weight))]
        assert all(torch.allclose(mine, theirs, 1e-12, 1e-12) for mine, theirs in zip(found, (exact, *right))), found
    least = torch.full((2, 50), torch.finfo(torch.float32).min)
    assert abs(module.cross_entropy_sum(least, torch.tensor([3, 4])).item() / (2 * np.log(50)) - 1) < 1e-6


@in_a_fork
def test_linear_cross_entropy_adds_up_in_float32(file=None):
    """In bfloat16, over 64 chunks: a weight's gradient is off by the roundings of the logits, and one of its own."""
    module = load(file or CROSS_ENTROPY)
    n, d, v = 1024, 16, 30
    x, weight, targets = random(n, d, dtype=torch.bfloat16) + 1, random(v, d).bfloat16().float(), torch.arange(n) % v
    wide = weight.double().requires_grad_()
    (exact,) = torch.autograd.grad(module.linear_reference(x.double(), wide, targets), wide)

    def error(chunk: int, dtype: torch.dtype) -> float:
        leaf = weight.to(dtype).requires_grad_()
        (dw,) = torch.autograd.grad(module.linear_cross_entropy_sum(x, leaf, targets, chunk), leaf)
        assert dw.dtype == dtype
        return module.relative_error(dw, exact)

    for dtype in torch.float32, torch.bfloat16:
        assert error(16, dtype) <= 1.1 * error(n, dtype) <= 2**-8, f"sums over chunks are rounded: {dtype}"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0].startswith("09")])
def test_equals_root(recipe, world, flags):
    """The root with the kernels pasted in trains as the root, in other shapes, too."""
    equivalence.check(recipe, world, flags)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, words", [(ELEMENTWISE, "worst error"), (GLUON, "nothing is checked")])
def test_run_as_a_user(recipe, words):
    """Without a GPU: the check alone, a line for each thing that is tried, in seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    end = subprocess.run([sys.executable, recipe], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert end.returncode == 0 and not end.stderr, end.stderr
    assert all(words in line for line in end.stdout.splitlines()) and words in end.stdout, end.stdout
