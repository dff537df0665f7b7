"""Matmuls in fp8: what is quantized by which scale, what is multiplied, and what the gradients are.

The reference quantizes in float64 with formats.py, which shares no line with the recipes, and multiplies in float64.
"""

import copy
from types import ModuleType

import equivalence
import pytest
import torch
from launch import in_a_fork, load
from torch import Tensor, nn

FOLDER = "10_mixed_precision"
NAMES = "tensorwise", "delayed_scaling", "blockwise"
TENSORWISE, DELAYED, BLOCKWISE = KINDS = [f"{FOLDER}/fp8_{name}.py" for name in NAMES]
STOCHASTIC = f"{FOLDER}/fp8_stochastic_rounding.py"  # its linears are those of fp8_tensorwise.py, to the letter
LOW = f"{FOLDER}/fp8_low_memory.py"  # casts weights when they are used: test_low_memory.py
FORMATS, start = load(f"{FOLDER}/formats.py"), load(f"{FOLDER}/test_masters.py").start
SIZES = "--dim 128 --kv_heads 4 --ffn 256 --seq 32 --batch 4 --microbatches 1"
ROUNDED = 2.0**-8  # of bf16, by element; and some room for sums in fp32
BLOCK = 128
OLD = r"quantize_weights\(model\) after each optimizer step"  # what is said of weights in fp8


def uneven(m: int, k: int, seed: int, scale: float = 1.0) -> Tensor:
    """A bf16 tensor [m, k] whose rows, columns and blocks all differ in magnitude: a scale of the wrong one is seen."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randn(size, generator=generator).exp() for size in (m, k))
    return (torch.randn(m, k, generator=generator) * rows[:, None] * columns * scale).bfloat16()


def rounded(x: Tensor, height: int, width: int, name: str) -> Tensor:
    """x [m, k] after each height x width elements were divided by their scale, rounded, and multiplied by it."""
    f, (m, k) = FORMATS.FORMATS[name], x.shape
    whole = nn.functional.pad(x.float(), (0, -k % width, 0, -m % height))
    blocks = whole.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    # in fp32, as recipes compute it: it decides to which side an element falls
    inverse = 1 / (amax * (1 / f.largest)) if (m, k) == (height, width) else torch.tensor(f.largest) / amax
    found = FORMATS.round_to(blocks * inverse, f, saturate=True) * (amax.double() / f.largest)
    return found.nan_to_num(0).flatten(2).flatten(0, 1)[:m, :k]  # where a block is 0


def expected(recipe: str, x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx and dw in float64 from operands in fp8: each is quantized along what its product sums up."""

    def operand(z: Tensor, name: str = "e4m3", rows: int = 1) -> Tensor:
        return rounded(z, rows, BLOCK, "e4m3") if recipe == BLOCKWISE else rounded(z, *z.shape, name)

    y = operand(x) @ operand(weight, rows=BLOCK).T
    dx = operand(dy, "e5m2") @ operand(weight.T, rows=BLOCK).T
    return [y, dx, operand(dy.T, "e5m2") @ operand(x.T).T]


def quantized_linear(module: ModuleType, weight: Tensor) -> torch.nn.Module:
    """A linear of the recipe with this weight, as it is in a model before the first step."""
    linear = module.Linear(weight.shape[1], weight.shape[0]).bfloat16()
    linear.weight.data.copy_(weight)
    if hasattr(module, "quantize_weights"):
        module.quantize_weights(linear)
    return linear


def errors(actual: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Norm of the difference over the norm, of each."""
    return [((a.double() - e).norm() / e.norm()).item() for a, e in zip(actual, exact, strict=True)]


def products(module: ModuleType, x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, dw of the recipe's linear, which gets two sequences."""
    linear, x = quantized_linear(module, weight), x.clone().requires_grad_()
    y = linear(x.view(2, len(x) // 2, x.shape[1])).flatten(0, 1)
    y.backward(dy)
    return [y.detach(), x.grad, linear.weight.grad]


@pytest.mark.parametrize("recipe", [*KINDS, LOW])
@in_a_fork
def test_products_are_those_of_quantized_operands(recipe, file=None):
    """Forward and both gradients, of tensors whose rows, columns and blocks differ, in sizes that no block divides."""
    module = load(file or recipe)
    for t, f, d in (256, 384, 128), (48, 80, 208):
        x, weight, dy = uneven(t, d, 1), uneven(f, d, 2, 0.02), uneven(t, f, 3, 1e-6)
        actual = products(module, x, weight, dy)
        assert [z.dtype for z in actual] == [torch.bfloat16] * 3
        for name, error in zip(("y", "dx", "dw"), errors(actual, expected(recipe, x, weight, dy))):
            assert error < ROUNDED, f"{name} of {t} x {f} x {d} is off by {error:.1e}"
    y, dx, dw = products(module, x[:0], weight, dy[:0])  # as of an expert without tokens
    assert y.shape == (0, f) and dx.shape == (0, d) and not dw.any()


@pytest.mark.parametrize("recipe", KINDS)
@in_a_fork
def test_zeros_and_what_has_diverged(recipe, file=None):
    """Zeros stay zeros, tiny and huge numbers are right, and inf or NaN reach the result: they are seen."""
    module = load(file or recipe)
    x, weight, dy = uneven(128, 256, 1), uneven(128, 256, 2), uneven(128, 128, 3)
    for operands in (0 * x, weight, dy), (x, 0 * weight, dy), (x, weight, 0 * dy):
        for actual, exact in zip(products(module, *operands), expected(recipe, *operands)):
            assert actual.isfinite().all() and (exact.any() or not actual.any()), "zeros are none any more"
    for scale in 2.0**-60, 2.0**60:  # of one operand each: the products stay within fp32
        operands = x * scale, weight / scale, dy
        found = errors(products(module, *operands), expected(recipe, *operands))
        assert max(found) < ROUNDED, f"errors {found} at magnitudes of {scale}"
    for wrong in float("nan"), float("inf"):
        x[5, 200] = dy[5, 100] = wrong
        y, dx, dw = products(module, x, weight, dy)
        assert not y[5].isfinite().any() and not dw[:, 200].isfinite().any(), f"{wrong} in x is not seen"
        assert not dx[5].isfinite().any() and not dw[100].isfinite().any(), f"{wrong} in dy is not seen"


def linears(module: ModuleType, model: torch.nn.Module) -> list[torch.nn.Module]:
    """All linears that are in fp8."""
    return [m for m in model.modules() if isinstance(m, module.Linear)]


@pytest.mark.parametrize("recipe", [TENSORWISE, DELAYED, STOCHASTIC])
@in_a_fork
def test_forward_has_the_newest_weights(recipe, file=None):
    """After each step the model computes what a model does that is built from its weights."""
    module, (cfg, model, optimizer), batches = start(file or recipe, SIZES)
    for batch in batches[:2]:
        before = [linear.weight.clone() for linear in linears(module, model)]
        module.train_step(cfg, model, optimizer, *batch)
        for linear, weight in zip(linears(module, model), before):
            fresh = quantized_linear(module, linear.weight.data).quantized
            same = [torch.equal(x.float(), y.float()) for x, y in zip(fresh, linear.quantized, strict=True)]
            assert all(same) and not torch.equal(linear.weight, weight), f"in fp8 are other weights: {same}"


@pytest.mark.parametrize("recipe", [*KINDS, LOW])
@in_a_fork
def test_what_would_not_be_in_fp8_is_noticed(recipe, file=None):
    """Linear refuses fp32 weights under autocast, and notices weights other than those in fp8, in forward or backward.
    Micro-batches, a copied model and a frozen weight are not taken for that."""
    module, x = load(file or recipe), uneven(16, 32, 0)
    linear = module.Linear(32, 16)
    linear(x.float())  # fp32, as the whole model is
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="needs bfloat16 weights"):
        linear(x.float())
    if recipe == LOW:  # casts weights at each use
        return
    model = nn.Sequential(*(module.Linear(32, 32) for _ in range(3))).bfloat16()
    with pytest.raises(RuntimeError, match=OLD):
        model(x)
    module.quantize_weights(model)
    model = copy.deepcopy(model)
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        module.quantize_weights(model)
        for _ in range(2):  # micro-batches
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=OLD):
        model(x).sum().backward()
    model[1].weight = nn.Parameter(model[1].weight.detach())  # as when it is loaded with assign=True
    module.quantize_weights(model)
    model[1].weight.data.mul_(2)  # raises no version
    with pytest.raises(RuntimeError, match=OLD):
        model(x).sum().backward()
    model[1].weight.detach().mul_(2)  # raises it: no backward is needed
    with pytest.raises(RuntimeError, match=OLD), torch.no_grad():
        model(x)


@in_a_fork
def test_all_linears_of_the_blocks_and_nothing_else(file=None):
    """Seven products of each block and both their gradients are in fp8; embedding and norms are fp32."""
    module, (cfg, model, _), batches = start(file or TENSORWISE, SIZES)
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {name for name, _ in model.named_parameters() if "embed" in name or "norm" in name}
    multiply, seen = module.multiply, []
    module.multiply = lambda a, *rest, **options: seen.append(a.dtype) or multiply(a, *rest, **options)
    module.forward_backward(cfg, model, *batches[0])
    forward, backward = [torch.float8_e4m3fn] * 7 * cfg.layers, [torch.float8_e5m2] * 14 * cfg.layers
    assert seen == forward + backward, f"{len(seen)} products in fp8"


@in_a_fork
def test_scales_follow_the_history(file=None):
    """The scale is that of the largest amax of the last steps, of all micro-batches, whose forwards may run ahead."""
    module, (cfg, model, _), _ = start(file or DELAYED, f"{SIZES} --history 3")
    linear = model.model.layers[0].mlp.up_proj
    shape = 16, linear.weight.shape[1]
    amaxes, seen, cast = [1.0, 8.0, 2.0, 0.5, 0.25, 64.0, 1.0], [], module.cast
    for amax in amaxes:
        scales = []
        module.cast = lambda x, scale, *rest, scales=scales: scales.append(scale.item()) or cast(x, scale, *rest)
        x = torch.full(shape, amax / 2).bfloat16()
        x[3, 5] = -amax
        sums = [linear((x / part).requires_grad_()).sum() for part in (1, 2)]
        for y in sums:
            y.backward()
        with torch.no_grad():
            linear(1000 * x)  # a validation leaves no trace
        module.shift_histories(cfg, model)
        seen.append(round(scales[0] * 448, 3))
    assert seen == [1, 1, 8, 8, 8, 2, 64], f"scales for amax {seen}, where it was {amaxes}"
    assert linear.past[1].tolist() == [1, 1, 1], "dy has another history"


@in_a_fork
def test_what_exceeds_the_history(file=None):
    """It saturates; inf and NaN become NaN, and do not enter the history; one of zeros says nothing."""
    module, amax, x = load(file or DELAYED), torch.tensor(2.0), uneven(16, 16, 1)
    y, scale, *_ = module.quantize(x, amax, torch.zeros(3), module.E4M3)
    # with the least scale, all of a tensor would saturate next to 0
    assert scale == 1 and torch.equal(y.float(), x.float().to(module.E4M3).float())
    for begin in (lambda: None), pretend_to_be_a_gpu:
        begin()
        for wrong in float("nan"), float("inf"):
            amax = torch.tensor(2.0)
            y, *_ = module.quantize(torch.tensor([[wrong, 3.0] * 8] * 16).bfloat16(), amax, torch.ones(4), module.E4M3)
            assert amax == 3, f"{wrong} makes amax {amax}"
            assert y[0, 0].isnan() and y[0, 1] == 448, f"{wrong} becomes {y[0, 0]} in fp8"


def pretend_to_be_a_gpu() -> list[bool]:
    """Let Triton's interpreter run kernels, and float64 be cuBLAS; return for each product whether it adds up fast."""
    fast = []

    def scaled_mm(a, b, a_scale, b_scale, out_dtype, use_fast_accum=False) -> Tensor:
        fast.append(use_fast_accum)
        if a_scale.dim():  # groups of 128: of k, and of columns of b, too, where those share a scale
            assert a_scale.stride(0) == b_scale.stride(int(b_scale.shape[1] == b.shape[1])) == 1, "scales lie elsewhere"
            a_scale = a_scale.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
            wide = b_scale.repeat_interleave(BLOCK, 0)[: len(b)]
            b_scale = wide if wide.shape == b.shape else wide.repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
        return ((a.double() * a_scale.double()) @ (b.double() * b_scale.double())).to(out_dtype)

    torch._scaled_mm, Tensor.is_cuda = scaled_mm, property(lambda self: True)
    return fast


@in_a_fork
def test_a_transposed_copy_of_more_than_2_31_elements():
    """A tile of a tensor [2^30, 8], of which only the first rows are there: no other page takes memory."""
    module, x = load(DELAYED), uneven(16, 8, 0)
    kernel, amax, scale = module.cast_kernel, torch.zeros(()), torch.ones(())
    y, t = (torch.empty(size, dtype=torch.float8_e4m3fn) for size in (128, 8 * 2**30))
    kernel[(1,)](x, scale, amax, y, t, 2**30, 8, ROWS=16, COLUMNS=8)
    assert torch.equal(t.view(8, -1)[:, :16].T.float(), y.view(16, 8).float()), "it lies elsewhere"


@pytest.mark.parametrize("recipe", KINDS)
@in_a_fork
def test_kernel_in_the_interpreter(recipe, file=None):
    """A GPU's kernels write what a CPU does, to the bit; of a linear's products, forward's alone may add up fast."""
    module = load(file or recipe)
    shapes = [(100, 200), (64, 128), (1, 1), (130, 3)]
    given = uneven(48, 208, 1), uneven(80, 208, 2), uneven(48, 80, 3)

    def quantized(shape: tuple[int, int]) -> list[Tensor]:
        """Everything in fp8, scales, and amax where there is one."""
        x, amax = uneven(*shape, 0), torch.tensor(4.0)
        if recipe == BLOCKWISE:
            return [*module.quantize_tiles(x, module.E4M3, 1), *module.quantize_tiles(x, module.E4M3, BLOCK)]
        own = [amax] if recipe == DELAYED else []
        return [*module.cast(x, torch.tensor(0.37), *own, module.E4M3), amax]

    expected = [quantized(shape) for shape in shapes], products(module, *given)
    fast = pretend_to_be_a_gpu()
    for shape, theirs in zip(shapes, expected[0]):
        same = [torch.equal(x.float(), y.float()) for x, y in zip(quantized(shape), theirs, strict=True)]
        assert all(same), f"{shape} differs: {same} of what is in fp8, scales, and amax"
    found = errors(products(module, *given), expected[1])
    assert max(found) < ROUNDED, f"y, dx, dw of a GPU differ by {found}"
    assert fast == [recipe != BLOCKWISE, False, False], f"which products differs: {fast} are fast"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", KINDS)
@in_a_fork
def test_compiled_blocks(recipe):
    """One graph serves all steps, with the loss of uncompiled blocks; there, too, old weights are noticed."""
    module, (cfg, model, optimizer), batches = start(recipe, f"{SIZES} --layers 1")
    equivalence.without_kernels(module)
    module.train_step(cfg, model, optimizer, *batches[0])  # before it, delayed scaling has no history
    eager = module.forward_backward(cfg, model, *batches[1])
    model.model.layers[0].compile(fullgraph=True)
    compiled = module.forward_backward(cfg, model, *batches[1])
    assert abs(eager / compiled - 1) < 2e-3, f"loss {eager}, compiled {compiled}"
    with torch._dynamo.config.patch(error_on_recompile=True):
        module.train_step(cfg, model, optimizer, *batches[1])
        with torch.profiler.profile() as profile:
            module.forward_backward(cfg, model, *batches[2])
        casts = sum(event.count for event in profile.key_averages() if event.key.startswith("fp8_"))
        # q, k and v share a cast of their input, and gate and up; but not with delayed scaling: each has its history
        assert casts == (14 if recipe == DELAYED else 11), f"{casts} casts of seven inputs and gradients"
        linears(module, model)[-1].weight.detach().mul_(2)
        with pytest.raises(RuntimeError, match=OLD):
            module.forward_backward(cfg, model, *batches[2])
