"""bf16 weights and their fp32 masters: what one has and the other has not, and that gradients are autocast's.

And what can be pasted of the folder's recipes.

Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

import ast
import builtins
import dis
import re
import sys
from dataclasses import replace
from types import CodeType

import equivalence
import pytest
import torch
from launch import in_a_fork, isolated, load
from test_lineage import TRAINING, copied

BF16 = "10_mixed_precision/bf16.py"
SMALL = "--layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 4 --device cpu --dtype bfloat16"


def trained(file: str | None, flags: str, steps: int):
    """The recipe's model after some steps, and its weights and masters before."""
    module = load(file or BF16)
    sys.argv = ["recipe", *f"{SMALL} {flags}".split()]
    cfg = module.parse_config()
    data, model = module.load_data(cfg)[0], module.build_model(cfg)
    optimizer = module.make_optimizer(cfg, model)
    before = {name: (p.detach().clone(), model.masters[name].detach().clone()) for name, p in model.named_parameters()}
    for step in range(steps):
        module.set_learning_rate(cfg, optimizer, step)
        module.train_step(cfg, model, optimizer, *module.make_batch(cfg, data, step))
    return model, before


@in_a_fork
def test_weights_are_rounded_masters(file=None):
    """After each step the matmuls read what the optimizer has, rounded; masters have more bits, from the beginning."""
    for steps in 0, 1, 3:
        model, _ = trained(file, "", steps)
        for name, p in model.named_parameters():
            master = model.masters[name]
            if p.ndim == 1 or "embed" in name:  # no matmul reads it
                assert p is master and p.dtype == torch.float32, f"{name} is not its own master"
                continue
            assert p.dtype == torch.bfloat16 and master.dtype == torch.float32
            assert torch.equal(p, master.bfloat16()), f"{name} is not its rounded master after {steps} steps"
            assert not torch.equal(p.float(), master), f"the master of {name} is rounded"
        assert all(p.grad is None for p in model.parameters()), "gradients are left"


def gradients(file: str, flags: str) -> dict[str, torch.Tensor]:
    """Loss and gradients in float32 of a batch, with norm weights around 1 that have all bits of float32."""
    module = load(file)
    sys.argv = ["recipe", *f"{SMALL} --batch 6 {flags}".split()]
    cfg = module.parse_config()
    model, generator = module.build_model(cfg), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    loss = module.forward_backward(cfg, model, *module.make_batch(cfg, module.load_data(cfg)[0], 0))
    masters = getattr(model, "masters", dict(model.named_parameters()))
    found = {name: masters[name].grad if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"loss": loss} | {name: gradient.float() for name, gradient in found.items()}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradient_is_that_of_autocast(microbatches, file=None):
    """To the bit: the same products of the same rounded operands, and what autocast leaves in fp32 is in fp32."""
    root = "01_single_gpu/train.py" if microbatches == 1 else "01_single_gpu/gradient_accumulation.py"
    flags = f"--microbatches {microbatches}"
    theirs = isolated(lambda: gradients(root, flags * (microbatches > 1)))
    ours = isolated(lambda: gradients(file or BF16, flags))
    assert ours.keys() == theirs.keys() and all(gradient.any() for gradient in theirs.values())
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{different} differ from autocast's"


@in_a_fork
def test_small_updates_add_up(file=None):
    """A step of 1e-7 is lost in bf16, whose numbers near 0.02 are 2^-13 apart; masters keep it."""
    model, before = trained(file, "--lr 1e-7 --warmup 0 --weight_decay 0", 1)
    kept = lost = 0
    for name, p in model.named_parameters():
        weight, master = before[name]
        if p is model.masters[name]:
            continue
        moved = model.masters[name] != master
        kept += moved.sum().item()
        lost += (moved & (p == weight)).sum().item()
    assert kept > 1000 and lost > 0.95 * kept, f"{kept} masters have moved, {lost} of them without their weights"


@in_a_fork
def test_norm_is_added_up_in_fp32(file=None):
    """The norm of bf16 gradients is that of the same numbers in float64, and it clips them in fp32."""
    module = load(file or BF16)
    sys.argv = ["recipe", *f"{SMALL} --microbatches 1 --clip 0.1".split()]
    cfg = module.parse_config()
    model = module.build_model(cfg)
    module.forward_backward(cfg, model, *module.make_batch(cfg, module.load_data(cfg)[0], 0))
    optimizer, gradients = module.make_optimizer(cfg, model), [p.grad for p in model.parameters()]
    assert {g.dtype for g in gradients} == {torch.bfloat16, torch.float32}, "gradients are not where backward left"
    for g in gradients:
        g.fill_(1)  # so that the roundings of several norms do not cancel by chance
    exact = torch.cat([g.double().flatten() for g in gradients]).norm()
    norm = module.gradient_norm(optimizer)
    assert norm.dtype == torch.float32 and abs(norm / exact - 1) < 1e-5, f"norm {norm}, exactly {exact}"
    with torch.no_grad():
        optimizer.step(norm)
    for slot in optimizer.slots:
        clipped = slot.parameter.grad.double() * 0.1 / exact
        assert (slot.mean - 0.1 * clipped).norm() < 1e-5 * slot.mean.norm(), "what the norm clips is rounded"


@pytest.mark.parametrize("flags", ["", pytest.param("--compile", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("recipe", [BF16, "10_mixed_precision/stochastic_rounding.py"])
@in_a_fork
def test_learning_rate_comes_from_a_scheduler(recipe, flags):
    """Each step has that of its scheduler, in the same compiled code: with a rate of 0 nothing moves."""
    module = load(recipe)
    equivalence.without_kernels(module)
    sys.argv = ["recipe", *f"{SMALL} --microbatches 1 {flags}".split()]
    cfg = module.parse_config()
    model = module.build_model(replace(cfg, compile=False))  # --compile is for the optimizer, here
    optimizer, batch = module.make_optimizer(cfg, model), module.make_batch(cfg, module.load_data(cfg)[0], 0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.zeros(())], lr=0.1), lambda step: (0.1, 0, 0.3, 0)[step]
    )
    for rate in 0.01, 0, 0.03:
        for group in optimizer.param_groups:
            (group["lr"],) = scheduler.get_last_lr()
        before = [slot.parameter.detach().clone() for slot in optimizer.slots]
        with torch._dynamo.config.patch(error_on_recompile=rate != 0.01):
            module.train_step(cfg, model, optimizer, *batch)
        moved = max((slot.parameter - x).abs().max() for slot, x in zip(optimizer.slots, before))
        assert rate / 2 <= moved <= 2 * rate, f"weights have moved by {moved}, with a learning rate of {rate}"
        scheduler.optimizer.step()
        scheduler.step()


def globals_of(code: CodeType) -> set[str]:
    """Names that code, or the functions and classes in it, read and do not define."""
    read = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for inner in code.co_consts:
        read |= globals_of(inner) if isinstance(inner, CodeType) else set()
    return {name for name in read if not name.startswith("__")}


@pytest.mark.parametrize("path", [path for path in TRAINING if path.startswith("10_mixed_precision/")])
@in_a_fork
def test_what_to_copy_is_complete(path, tmp_path):
    """It can be pasted below the imports in the order of the Copy line, which names all else that it reads."""
    recipe, names = TRAINING[path], copied(TRAINING[path])
    prose = ", ".join(recipe.header["Copy"]).split("(", 1)[1]
    imports, found = [], {}
    for node in ast.parse(recipe.source).body:
        name = node.targets[0].id if isinstance(node, ast.Assign) else getattr(node, "name", None)
        found[name] = ast.unparse(node)
        imports += [found[name]] * isinstance(node, ast.Import | ast.ImportFrom)
    assert [name.isupper() for name in names] == sorted((name.isupper() for name in names), reverse=True)
    listed = [found[name] for name in names]
    provided = {name for line in imports for name in re.findall(r"\w+", line)} | set(dir(builtins)) | set(names)
    missing = globals_of(compile("\n".join(imports + listed), path, "exec")) - provided
    assert missing <= set(re.findall(r"\w+", prose)), f"{missing} are read, and neither listed nor named"
    (tmp_path / "pasted.py").write_text("\n".join([*imports, *(f"{name} = object" for name in missing), *listed]))
    load(tmp_path / "pasted.py")
