"""Every kernel of a Llama step compiles for an H100, on a machine that has none: the interpreter accepts more.

Natively a float that is handed to a kernel has 32 bits, a variable keeps its type through a loop, float32 may become
TF32, and what a program holds must fit into shared memory. Nothing is computed, so shapes are those of real models, and
so are blocks.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from launch import ROOT, load
from test_lineage import FAMILY

SHARED_MEMORY = 227 * 1024  # bytes that a program on an H100 can have
LONG = [path for path in FAMILY if re.match("09.*(attention|matmul)", path)]
SHORT = [path for path in FAMILY if re.match("09.*(adamw|cross|rms|rope|soft|swi)|10.*fp8_(del|zero)", path)]


@pytest.mark.thorough
@pytest.mark.parametrize("recipes", [*([recipe] for recipe in LONG), SHORT])
def test_compiles_for_a_gpu(recipes):
    """In a process of its own, in which Triton compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT / 'tests'}"}
    end = subprocess.run(
        [sys.executable, __file__, *recipes], env=environment, capture_output=True, text=True, timeout=600
    )
    assert end.returncode == 0, end.stderr[-3000:]
    compiled = [line.split() for line in end.stdout.splitlines()]
    assert {(recipe, kernel) for recipe, kernel, _ in compiled} == {pair for path in recipes for pair in kernels(path)}
    assert all(int(shared) <= SHARED_MEMORY for *_, shared in compiled), end.stdout


def kernels(recipe: str) -> list[tuple[str, str]]:
    """The recipe with each of its kernels: functions in Triton that are given a grid."""
    source, functions = FAMILY[recipe].source, FAMILY[recipe].definitions.items()
    jitted = [name for name, text in functions if re.search(r"^@\w+\.jit", text, re.M)]
    return [(recipe, name) for name in jitted if re.search(rf"{name}(\[|\.fn)", source)]


def compile_instead(self, launch, *arguments, grid, warmup=False, **options):
    """In place of a launch: compile the kernel for arguments like these; print its shared memory."""
    kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
    assert "fp32" not in kernel.src.signature.values(), f"{self.__name__}: a float has 32 bits"
    assert "tf32" not in kernel.asm["ptx"], f"{self.__name__} rounds float32 to TF32"
    print(Path(self.fn.__code__.co_filename).relative_to(ROOT), self.__name__, kernel.metadata.shared)


def try_all(self, *arguments, grid, warmup=False, **options):
    """In place of tuning: compile the kernel with each of the choices."""
    for config in self.configs:
        self.fn.run(*arguments, grid=grid, **options, **config.all_kwargs())


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Memory that nobody reads, of an activation: no leaf."""
    return torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point).clone()


ROWS = {  # file: results for rows x and a weight w; their backward launches the other kernels
    "09_kernels/rmsnorm.py": lambda module, x, w: [*module.add_rms_norm(x, x, w), module.rms_norm(x, w)],
    "09_kernels/swiglu.py": lambda module, x, w: [module.swiglu(x * 1, x * 1, x), module.silu_mul(x * 1, x * 1)],
    "09_kernels/rope.py": lambda module, x, w: [module.rotate(x[None] * 1, [w.detach().view(8, -1)] * 2)],
    "09_kernels/softmax.py": lambda module, x, w: [module.softmax(x), module.softmax(x[:, :4096])],
    "09_kernels/cross_entropy.py": lambda module, x, w: [
        module.cross_entropy_sum(x * 1, torch.zeros(4).long()),
        module.linear_cross_entropy_sum(x[:, :256], tensor(128256, 256, dtype=x.dtype), torch.zeros(4).long()),
    ],
}


def launch_all(recipe: str, module: ModuleType) -> None:
    """Launch every kernel of a file, forward and backward, as for one layer of a model in bf16.

    Float64 shows a float that has 32 bits where it should have 64.
    """
    if recipe in ROWS:
        if recipe.endswith("cross_entropy.py"):
            module.add_product = lambda *_: None  # cuBLAS
        for width, dtype in (2**16, torch.bfloat16), (960, torch.float64):
            x, weight = tensor(4, width, dtype=dtype), tensor(width, dtype=torch.promote_types(dtype, torch.float32))
            sum(y.sum() for y in ROWS[recipe](module, x, weight)).backward()
    elif recipe.endswith("adamw.py"):
        make = torch.tensor
        torch.tensor = lambda *values, pin_memory=False, **options: make(*values, **options)  # there is none to pin for
        for dtype in torch.bfloat16, torch.float64:
            p = torch.nn.Parameter(torch.zeros(160, dtype=dtype))
            p.grad = torch.zeros_like(p)
            module.AdamW([dict(params=[p])], lr=0.1).step()
    elif recipe.endswith("grouped_matmul.py"):
        offsets = torch.empty(64, dtype=torch.int32)
        for dtype in torch.bfloat16, torch.float32:
            x, weight = torch.empty(4096, 1024, dtype=dtype), torch.empty(64, 512, 1024, dtype=dtype)
            y = module.grouped_matmul(x, weight.mT, offsets)
            module.grouped_matmul(y, weight, offsets), module.grouped_weight_gradient(y, x, offsets)
    elif recipe.endswith("fp8_matmul.py"):
        for name, (multiply, *kinds) in module.ladder().items():
            operands = []
            for kind, size in zip(kinds, (512, 256)):
                operands += module.quantizers()[kind](torch.empty(size, 1024, dtype=torch.bfloat16))[:2]
            multiply(*operands, torch.float32 if name == "tensorwise" else torch.bfloat16)
            if multiply is module.matmul_blockwise:  # which was the kernel in Gluon
                module.matmul_blockwise_triton(*operands)
    elif recipe.endswith("matmul.py"):
        x, weight, dy = (torch.empty(*s, dtype=torch.bfloat16) for s in ((4096, 1024), (512, 1024), (4096, 512)))
        for function in module.ladder().values():
            function(x, weight.T)
        for a, b in (dy, weight), (dy.T, x):
            module.matmul(a, b)
        for function in module.blocks, module.descriptors, module.matmul:
            function(x.float(), weight.T.float())
    elif "flash" in recipe:
        q, k, v = (torch.empty(1, 256, heads, 128, dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2, 2))
        if "gluon" in recipe:
            narrow = (x[..., :64] for x in (q, k, v))
            rungs = [(module.attend, module.attend_backward, *given) for given in ((q, k, v), narrow)]
        else:
            rungs = [(*functions, q, k, v) for functions in module.ladder(q, k, v).values()]
            rungs.append((module.flash2, module.flash2_gradients, *(x[..., :16].float() for x in (q, k, v))))
        for forward, backward, q, k, v in rungs:
            o, lse = forward(q, k, v, True, 0.1)
            backward(o, o, lse, lse, q, k, v, True, 0.1)
    else:
        scales = [torch.ones(())] * (1 if "zero3" in recipe else 2)
        module.cast(torch.empty(512, 1024, dtype=torch.bfloat16), *scales, module.E4M3)
        if "zero3" in recipe:
            w = torch.empty(512, 1024, dtype=torch.uint8).view(module.E4M3)
            linears = [SimpleNamespace(quantized=(w, None, w.T.contiguous()))]
            module.transpose(SimpleNamespace(linears=linears, transposed=w))


def main(*recipes: str) -> None:
    """Call the functions of files with tensors that say they are on a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    gpu = dict(target=GPUTarget("cuda", 90, 32), device=0, stream=0)
    driver.set_active(SimpleNamespace(**{f"get_current_{what}": lambda *_, x=x: x for what, x in gpu.items()}))
    JITFunction.run, Autotuner.run = functools.partialmethod(compile_instead, JITFunction.run), try_all
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    for recipe in recipes:
        launch_all(recipe, load(recipe))


if __name__ == "__main__":
    main(*sys.argv[1:])
