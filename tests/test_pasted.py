"""What a recipe's Copy line lists works in trainers that share nothing else with the recipe: those of pasted.py.

The definitions are taken from the recipe as it is now. A change of a signature, or of what has to be called when, turns
this red until the glue in pasted.py follows; then the Copy line has to say so too.
"""

import ast
import builtins
import functools
import importlib
import re
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import compare
import pytest
import torch
import torch.distributed.device_mesh  # noqa: F401  imported once, before the ranks are forked
from launch import ROOT, in_a_fork, launch, load
from test_lineage import FAMILY, copied, loaded, named, parse, read
from torch import Tensor, nn

TOLERANCE = 1e-10
ROUNDED = 2.0**-8  # of bf16: sums in fp32 round a few elements otherwise than those in float64
TRAINER = ROOT / "tests" / "pasted.py"
PIPELINE, CLIP = "06_pipeline/1f1b.py", "03_zero/zero1_overlap.py:clip_gradients"
RECIPES = {  # technique: recipes, ranks, what it equals in one process, if it is not `single`: technique, recipe
    "bucketed": ("02_data_parallel/bucketed.py 01_single_gpu/chunked_loss.py 02_data_parallel/bucketed.py:evaluate", 3),
    "zero3": ("03_zero/zero3.py", 4),
    "llama_zero3": ("03_zero/zero3.py", 2, "llama"),
    "lora_zero3": ("03_zero/zero3.py", 2, "lora"),
    "zero1": ("03_zero/zero1_overlap.py 01_single_gpu/chunked_loss.py 03_zero/zero1_overlap.py:evaluate", 3),
    "checkpoint": ("03_zero/zero3.py 08_4d/checkpoint.py", 2),
    "one_f_one_b": (PIPELINE, 4),
    "llama_one_f_one_b": (f"03_zero/zero1_overlap.py {PIPELINE} {PIPELINE}:evaluate {CLIP}", 4, "llama"),
    "zbv": ("06_pipeline/zbv.py", 2),
    "tensor_parallel": (f"04_tensor_sequence/tensor_parallel.py 03_zero/zero1_overlap.py {CLIP}", 4),
    "llama_tensor_parallel": ("04_tensor_sequence/tensor_parallel.py", 2, "llama"),
    "zigzag": ("05_context_ring/zigzag.py", 4),
    "llama_zigzag": ("05_context_ring/zigzag.py", 2, "llama"),
    "fp8": ("10_mixed_precision/fp8_tensorwise.py", 1, "rounded"),
    "experts": ("07_expert/expert_parallel.py", 4, "moe", "07_expert/moe.py"),
}
BUGS = [  # what a reader may get wrong: technique, what stands in the trainer, what would be wrong
    # a chunked loss runs backward by itself, without the buckets
    ("bucketed", "backward(model, (x * leaf.grad).sum(), bucket_mb=0.02)", "x.backward(leaf.grad)"),
    # a tied embedding and head is in the head's unit, which is reduced before backward reaches the lookup
    ("zero1", '("wte.", "wpe."): model.wpe, **blocks, ("ln_f.",)', '("wpe.",): model.wpe, **blocks, ("ln_f.", "wte.")'),
    # each stage, each place on tp, clips by a norm of its own
    ("llama_one_f_one_b", "dist.all_reduce(norm, group=model.world)", "dist.all_reduce(norm, group=model.dp)"),
    ("tensor_parallel", "dist.all_reduce(norm, group=model.world)", "dist.all_reduce(norm, group=model.dp)"),
    # each rank of tp has all of a gradient, which is summed over tp, too
    ("tensor_parallel", "p.grad /= model.tp.size()", "pass"),
    # the gradients of a tied embedding and head are not summed
    ("one_f_one_b", "dist.all_reduce(model.wte.weight.grad, group=model.tied)", "pass"),
    # a row-parallel bias is added before the sum
    ("tensor_parallel", "self.proj.weight), self.tp) + self.proj.bias", "self.proj.weight, self.proj.bias), self.tp)"),
    # position embeddings are those of the first tokens
    ("zigzag", "self.wpe(shard(Config(), self.cp))", "self.wpe(torch.arange(ids.shape[1]))"),
    # replicas beside it go apart
    ("zigzag", "backward_and_sum(model, loss, model.dp_cp)", "backward_and_sum(model, loss, model.cp)"),
    # weights are not bf16, so that nothing is in fp8
    ("fp8", "child.weight.data = child.weight.bfloat16()", "pass"),
    # the gradient of what the MLP reads is not summed
    ("llama_tensor_parallel", "(block.input_layernorm, block.post_attention_layernorm)", "[block.input_layernorm]"),
    # gradients of different experts are summed
    ("experts", 'group=model.edp if ".experts." in name else model.dp)', "group=model.dp)"),
    # the step is taken to be the number of logged ones
    ("checkpoint", "optimizer, 2, log,", "optimizer, len(log), log,"),
]


def definitions(*paths: str) -> tuple[str, str]:
    """Return recipes' imports, and the definitions that their Copy lines list, in their order.

    PATH:NAME is one definition, in place of other recipes' of this name. Without it, what two recipes define in two
    ways is left out: the trainer has its own for both.
    """
    imports, listed = [], {}
    for path, _, name in (path.partition(":") for path in paths):
        recipe = read(path)
        nodes = parse(recipe.source).body
        imports += [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        found = {named(node): ast.unparse(node) for node in nodes}
        unknown = [name for name in copied(recipe) if name not in found]
        assert not unknown, f"{recipe.path} does not define {unknown}, which its Copy line lists"
        if name:
            listed[name] = found[name]
        else:
            listed |= {n: found[n] if listed.get(n, found[n]) == found[n] else "" for n in copied(recipe)}
    imports.sort(key=lambda line: not line.startswith("from __future__"))  # these have to come first
    return "\n".join(imports), "\n\n\n".join(filter(None, listed.values()))


def paste(*paths: str) -> str:
    """Return the source of the trainer with recipes' definitions pasted in, and the recipes' imports above it."""
    imports, listed = definitions(*paths)
    trainer = TRAINER.read_text()
    (marker,) = re.findall(r"^# -+ pasted here$", trainer, re.M)
    source = imports + "\n" + trainer.replace(marker, f"{marker}\n{listed}")
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(names) == len(set(names)), f"the trainer must not define what is pasted: {sorted(names)}"
    return source


def what_main_returns(module):
    """A probe: the record of the training."""
    records, main = [], module.main
    module.main = lambda: records.append(main())
    return lambda: records[0]


def records(technique: str, recipes: str, world: int, old: str = "", new: str = "") -> list[dict[str, Tensor]]:
    """What the ranks of the trainer have recorded, with recipes pasted in; `old` becomes `new` before."""
    source = paste(*recipes.split())
    if old:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in what is run"
        source = source.replace(old, new)
    if technique.startswith(("llama", "lora")):  # imported once, before the ranks are forked
        importlib.import_module("transformers.models.llama.modeling_llama")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{technique}.py"
        path.write_text(source)
        return launch(path, world, technique, probe=what_main_returns, save=False).probes


@functools.cache
def reference(technique: str = "single", recipe: str = "") -> dict[str, Tensor]:
    """The record of the trainer in one process; the clip acts."""
    (record,) = records(technique, recipe, 1)
    assert min(norm for name, norm in record.items() if "gradient norm" in name) > 0.6 > load(TRAINER).Config.clip
    return record


def errors(technique: str, old: str = "", new: str = "") -> dict[str, float]:
    """Relative error of all that the ranks have recorded, each the largest of any rank; `old` becomes `new` before."""
    recipes, world, *of_one = RECIPES[technique]
    ours, theirs, largest = records(technique, recipes, world, old, new), reference(*of_one), {}
    assert {name for record in ours for name in record} == set(theirs), "not all has been trained, or recorded"
    for record in ours:
        for name, error in compare.relative_errors(record, {name: theirs[name] for name in record}).items():
            largest[name] = max(largest.get(name, 0), error if error == error else float("inf"))
    return largest


@pytest.mark.thorough
@pytest.mark.parametrize("technique", RECIPES)
def test_trains_as_before(technique):
    """The same losses, gradient norms, gradients and validation losses in every step, and the same weights."""
    tolerance = ROUNDED if technique == "fp8" else TOLERANCE
    compare.assert_close(errors(technique), tolerance, f"{RECIPES[technique][0]}, pasted")


@pytest.mark.thorough
@pytest.mark.parametrize("technique, old, new", BUGS)
def test_a_bug_is_seen(technique, old, new):
    name, error = compare.worst(errors(technique, old, new))
    assert error > (10 * ROUNDED if technique == "fp8" else 1e-4), f"{name} is off by {error:.2e} at most"


# ------------------------------------------------------------------------------------------------------------ kernels
COPIED = {path: " ".join(FAMILY[path].header["Copy"]) for path in FAMILY if "Copy" in FAMILY[path].header}
# those of 09_kernels/train.py name what they call in files of their own
KERNELS = [path for path in COPIED if path[:2] == "09" and path != "09_kernels/train.py"]


def into_an_empty_file(folder: Path, *paths: str) -> ModuleType:
    """Import a file that holds the imports of these recipes, and what their Copy lines list, but nothing else."""
    file = folder / Path(paths[0]).name
    file.write_text("\n".join(definitions(*paths)))
    return load(file)


@pytest.mark.parametrize("path", KERNELS)
@in_a_fork
def test_a_kernel_needs_nothing_else(path, tmp_path):
    """The definitions on the Copy line can be run in its order, and need no others; what it says to call is there."""
    names = vars(into_an_empty_file(tmp_path, path)).keys() | vars(builtins).keys() | {"__annotations__"}
    missing = loaded(compile("\n".join(definitions(path)), path, "exec")) - names
    assert not missing, f"Copy does not list {missing}"
    to_call = set(re.findall(r"\w+", COPIED[path].partition("(call ")[2])) & FAMILY[path].definitions.keys()
    assert to_call <= names, f"Copy does not list {to_call - names}, which it says to call"


class Llama(nn.Module):
    """A block, a norm and a head of one's own, which call torch's functions, or kernels in place of them."""

    def __init__(self):
        super().__init__()
        shapes = dict(q=(32, 24), k=(16, 24), v=(16, 24), o=(24, 32), gate=(40, 24), up=(40, 24), down=(24, 40))
        shapes |= dict(first=(24,), second=(24,), last=(24,), head=(37, 24))
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) / shape[-1] ** 0.5))

    def attend(self, f: SimpleNamespace, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[1]), 10.0 ** -torch.arange(4)).repeat(1, 2)  # s k
        rope = angle.cos(), angle.sin()
        q, k, v = (nn.functional.linear(x, weight) for weight in (self.q, self.k, self.v))
        q, k, v = (y.unflatten(2, (-1, 8)).transpose(1, 2) for y in (f.rotate(q, rope), f.rotate(k, rope), v))
        return f.flash_attention(q, k, v).transpose(1, 2).flatten(2) @ self.o.T

    def forward(self, f: SimpleNamespace, x: Tensor, targets: Tensor) -> Tensor:
        x = x + self.attend(f, f.rms_norm(x, self.first))
        x, y = f.add_rms_norm(x, self.attend(f, f.rms_norm(x, self.second)), self.last)
        x = x + f.swiglu(y @ self.gate.T, y @ self.up.T, self.down)
        x = x + f.silu_mul(x @ self.gate.T, x @ self.up.T) @ self.down.T
        x = f.rms_norm(x, self.last).flatten(0, 1)
        loss = f.cross_entropy_sum(x @ self.head.T, targets, ignore_index=5)
        return loss + 2 * f.linear_cross_entropy_sum(x, self.head, targets, ignore_index=5)


def of_torch() -> SimpleNamespace:
    """Return the functions of torch that the kernels replace."""
    f, total = nn.functional, dict(reduction="sum")

    def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x.unflatten(2, (-1, rope[0].shape[1]))
        turned = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
        return (x * rope[0][:, None] + turned * rope[1][:, None]).flatten(2)

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return f.rms_norm(x, weight.shape, weight, 1e-5)

    return SimpleNamespace(
        rotate=rotate,
        rms_norm=rms_norm,
        add_rms_norm=lambda x, branch, weight: (x + branch, rms_norm(x + branch, weight)),
        silu_mul=lambda gate, up: f.silu(gate) * up,
        swiglu=lambda gate, up, weight: (f.silu(gate) * up) @ weight.T,
        flash_attention=lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        cross_entropy_sum=lambda x, y, **more: f.cross_entropy(x, y, **more, **total),
        linear_cross_entropy_sum=lambda x, weight, y, **more: f.cross_entropy(x @ weight.T, y, **more, **total),
    )


@pytest.mark.thorough
@in_a_fork
def test_kernels_in_place_of_torchs_functions(tmp_path):
    """In float32, loss and gradients are torch's but for rounding: 6e-8, in sums of up to a hundred elements."""
    names = "rmsnorm", "swiglu", "rope", "cross_entropy"
    kernels = into_an_empty_file(tmp_path, *(f"09_kernels/{name}.py" for name in names))
    kernels.flash_attention = into_an_empty_file(tmp_path, "09_kernels/flash_attention.py").flash_attention
    model, x = Llama(), torch.randn(2, 19, 24, generator=torch.Generator().manual_seed(1))
    targets, found = torch.arange(38) * 7 % 37, []
    for functions in kernels, of_torch():
        loss = model(functions, x.requires_grad_(), targets)
        gradients = torch.autograd.grad(loss, [x, *model.parameters()])
        found.append(dict(zip(["loss", "x", *dict(model.named_parameters())], [loss.detach(), *gradients])))
    compare.assert_close(compare.relative_errors(*found), 1e-5, "kernels")
