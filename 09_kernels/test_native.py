"""Every kernel of a Llama step compiles for an H100, on a machine that has none: the interpreter accepts more.

Natively a float that is handed to a kernel has 32 bits, a variable keeps its type through a loop, float32 may become
TF32, and what a program holds must fit into shared memory. Nothing is computed, so shapes are those of real models, and
so are blocks.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from launch import ROOT, load

SHARED_MEMORY = 227 * 1024  # bytes that a program on an H100 can have
KERNELS = {  # file: kernels that must have been compiled
    "09_kernels/tiling.py": "matmul_dot",
    "09_kernels/coarsening.py": "matmul_dot",
    "09_kernels/rmsnorm.py": "rms_norm_forward rms_norm_backward",
    "09_kernels/swiglu.py": "silu_mul_forward silu_mul_backward",
    "09_kernels/rope.py": "rotate_kernel",
    "09_kernels/cross_entropy.py": "loss_kernel gradient_kernel scale_kernel",
    "09_kernels/softmax.py": "softmax_forward softmax_backward softmax_forward_long softmax_backward_long",
    "09_kernels/adamw.py": "squares_kernel adamw_kernel",
    "09_kernels/matmul.py": "matmul_blocks matmul_tuned matmul_descriptors matmul_persistent",
    "09_kernels/grouped_matmul.py": "multiply_groups sort_experts multiply_rows",
    "09_kernels/flash_attention.py": "flash1_forward flash1_backward flash2_forward row_sums flash2_keys "
    "flash2_queries tma_forward tma_keys tma_queries",
    "09_kernels/flash_attention_gluon.py": "attend_kernel prepare_kernel backward_kernel finish_kernel",
    "09_kernels/fp8_matmul.py": "amax_kernel cast_kernel blocks_kernel matmul_kernel blockwise_kernel "
    "blockwise_gluon_kernel",
    "10_mixed_precision/fp8_delayed_scaling.py": "cast_kernel",
    "10_mixed_precision/fp8_zero3.py": "transpose_kernel cast_kernel",
}


LONG = [recipe for recipe in KERNELS if "attention" in recipe or "matmul" in recipe]


@pytest.mark.thorough
@pytest.mark.parametrize("recipes", [*([recipe] for recipe in LONG), [x for x in KERNELS if x not in LONG]])
def test_compiles_for_a_gpu(recipes):
    """In a process of its own, in which Triton compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT / 'tests'}"}
    end = subprocess.run(
        [sys.executable, __file__, *recipes], env=environment, capture_output=True, text=True, timeout=600
    )
    assert end.returncode == 0, end.stderr[-3000:]
    compiled = [line.split() for line in end.stdout.splitlines()]
    wanted = {(recipe, kernel) for recipe in recipes for kernel in KERNELS[recipe].split()}
    assert {(recipe, kernel) for recipe, kernel, _ in compiled} == wanted
    assert all(int(shared) <= SHARED_MEMORY for *_, shared in compiled), end.stdout


def name_of(dtype: torch.dtype) -> str:
    fp8 = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}
    name = str(dtype)[6:].replace("uint", "u").replace("bfloat", "bf")
    return fp8.get(dtype) or name.replace("float", "fp").replace("int", "i")


def type_of(name: str, value: object) -> str:
    """The type of an argument, as Triton spells it."""
    if isinstance(value, torch.Tensor):
        return f"*{name_of(value.dtype)}"
    if hasattr(value, "block_shape"):  # a descriptor; in Gluon it has a layout
        block = f"{name_of(value.base.dtype)}[{','.join(map(str, value.block_shape))}]"
        return f"tensordesc<{block}{f',{value.layout!r}' if hasattr(value, 'layout') else ''}>"
    assert isinstance(value, int), f"{name} would have 32 bits"
    return "i32" if value < 2**31 else "i64"


def compile_instead(self, *arguments, grid, warmup=False, **options):
    """In place of a launch: compile the kernel for an H100, for arguments like these; print its shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    chosen = {key: options.pop(key) for key in ("num_warps", "num_stages") if key in options}
    values, signature, constants, attributes = {**dict(zip(self.arg_names, arguments)), **options}, {}, {}, {}
    for i, parameter in enumerate(self.params):
        value, special = values[parameter.name], not parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and special):
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        signature[parameter.name] = type_of(f"{self.__name__}: {parameter.name}", value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and special):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if self.is_gluon() else triton.compiler.ASTSource)(self, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)
    assert "tf32" not in kernel.asm["ptx"], f"{self.__name__} rounds float32 to TF32"
    print(Path(self.fn.__code__.co_filename).relative_to(ROOT), self.__name__, kernel.metadata.shared)


def try_all(self, *arguments, grid, warmup=False, **options):
    """In place of tuning: compile the kernel with each of the choices."""
    for config in self.configs:
        self.fn.run(*arguments, grid=grid, **options, **config.all_kwargs())


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Memory that nobody reads, of an activation: no leaf."""
    return torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point).clone()


def launch_all(recipe: str, module: ModuleType) -> None:
    """Launch every kernel of a file, forward and backward, as for one layer of a model in bf16.

    Float64 shows a float that has 32 bits where it should have 64.
    """
    if recipe.endswith("rmsnorm.py"):
        for d, dtype in (65536, torch.bfloat16), (1000, torch.float64):
            x, weight = tensor(4, d, dtype=dtype), tensor(d, dtype=torch.promote_types(dtype, torch.float32))
            sum(y.sum() for y in module.add_rms_norm(x, x, weight)).backward()
            module.rms_norm(x, weight).sum().backward()
    elif recipe.endswith("swiglu.py"):
        module.swiglu(tensor(4, 14336), tensor(4, 14336), tensor(64, 14336)).sum().backward()
        module.silu_mul(*(tensor(4, 1000, dtype=torch.float64) for _ in range(2))).sum().backward()
    elif recipe.endswith("rope.py"):
        for heads, k, dtype in (32, 128, torch.bfloat16), (3, 96, torch.float64):
            table = tensor(64, k, dtype=torch.promote_types(dtype, torch.float32)).detach()
            module.rotate(tensor(2, 64, heads * k, dtype=dtype), (table, table)).sum().backward()
    elif recipe.endswith("softmax.py"):
        for v, dtype in (100, torch.float64), (4096, torch.bfloat16), (128256, torch.bfloat16):
            module.softmax(tensor(4, v, dtype=dtype)).sum().backward()
    elif recipe.endswith("cross_entropy.py"):
        module.add_product = lambda *_: None  # cuBLAS
        targets = torch.zeros(4, dtype=torch.int64)
        module.cross_entropy_sum(tensor(4, 1000, dtype=torch.float64), targets).backward()
        module.linear_cross_entropy_sum(tensor(4, 256), tensor(128256, 256), targets).backward()
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
            x, weight = tensor(4096, 1024, dtype=dtype).detach(), tensor(64, 512, 1024, dtype=dtype).detach()
            y = module.grouped_matmul(x, weight.mT, offsets)
            module.grouped_matmul(y, weight, offsets), module.grouped_weight_gradient(y, x, offsets)
    elif recipe.endswith("fp8_matmul.py"):
        x, w = (torch.empty(size, 1024, dtype=torch.bfloat16) for size in (512, 256))
        for name, (multiply, *kinds) in module.ladder().items():
            a, a_scale, *_ = module.quantizers()[kinds[0]](x)
            b, b_scale, *_ = module.quantizers()[kinds[1]](w)
            multiply(a, a_scale, b, b_scale, torch.float32 if name == "tensorwise" else torch.bfloat16)
            if multiply is module.matmul_blockwise:  # which was the kernel in Gluon
                module.matmul_blockwise_triton(a, a_scale, b, b_scale)
    elif recipe.endswith("matmul.py"):
        x, weight, dy = (torch.empty(*s, dtype=torch.bfloat16) for s in ((4096, 1024), (512, 1024), (4096, 512)))
        for function in module.ladder().values():
            function(x, weight.T)
        for function, a, b in (module.matmul, dy, weight), (module.matmul, dy.T, x):
            function(a, b)
        for function in module.blocks, module.descriptors, module.matmul:
            function(x.float(), weight.T.float())
    elif recipe.endswith(("tiling.py", "coarsening.py")):
        module.dot(torch.empty(256, 512), torch.empty(512, 256), *([64, 64] if "coarsening" in recipe else []))
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
    elif recipe.endswith("fp8_zero3.py"):
        w = torch.empty(512, 1024, dtype=torch.uint8).view(module.E4M3)
        linears = [SimpleNamespace(quantized=(w, None, w.T.contiguous(), None))]
        module.transpose(SimpleNamespace(linears=linears, transposed=w))
        module.cast(torch.empty(512, 1024, dtype=torch.bfloat16), torch.ones(()), module.E4M3)
    else:
        module.cast(torch.empty(512, 1024, dtype=torch.bfloat16), torch.ones(()), torch.ones(()), module.E4M3)


def main(*recipes: str) -> None:
    """Call the functions of files with tensors that say they are on a GPU."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    JITFunction.run, Autotuner.run = compile_instead, try_all
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    for recipe in recipes:
        launch_all(recipe, load(recipe))


if __name__ == "__main__":
    main(*sys.argv[1:])
