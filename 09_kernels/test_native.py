"""Every kernel of a Llama step compiles for an H100, on a machine that has none: the interpreter accepts more.

Natively a float that is handed to a kernel has 32 bits, a variable keeps its type through a loop, and what a program
holds must fit into shared memory. Tensors are fake, so shapes are those of real models, and so are blocks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = 227 * 1024  # bytes that a program on an H100 can have
KERNELS = {  # file: kernels that must have been compiled
    "rmsnorm": {"rms_norm_forward", "rms_norm_backward"},
    "swiglu": {"silu_mul_forward", "silu_mul_backward"},
    "rope": {"rotate_kernel"},
    "cross_entropy": {"loss_kernel", "gradient_kernel", "scale_kernel"},
    "softmax": {"softmax_forward", "softmax_backward", "softmax_forward_long", "softmax_backward_long"},
    "adamw": {"squares_kernel", "adamw_kernel"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_a_gpu(name):
    """In a process of its own, in which Triton compiles."""
    path = f"{Path(__file__).parents[1] / 'tests'}"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, __file__, name]
    end = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert end.returncode == 0, end.stderr[-3000:]
    compiled = [line.split() for line in end.stdout.splitlines()]
    assert {kernel for kernel, _ in compiled} == KERNELS[name]
    assert all(int(shared) <= SHARED_MEMORY for _, shared in compiled), end.stdout


def compile_instead(self, *arguments, grid, warmup=False, **options):
    """In place of a launch: compile the kernel for an H100, for arguments like these; print its shared memory."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    chosen = {key: options.pop(key) for key in ("num_warps", "num_stages") if key in options}
    values, signature, constants, attributes = {**dict(zip(self.arg_names, arguments)), **options}, {}, {}, {}
    for i, parameter in enumerate(self.params):
        value = values[parameter.name]
        number = isinstance(value, int)
        aligned = isinstance(value, torch.Tensor) or (number and value % 16 == 0)
        if parameter.is_constexpr or (number and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + str(value.dtype)[6:].replace("bfloat", "bf").replace("float", "fp")
            signature[parameter.name] = signature[parameter.name].replace("int", "i")
        else:
            assert number, f"{self.__name__}: {parameter.name} would have 32 bits"
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
        if aligned and signature[parameter.name] != "constexpr":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(self, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)
    print(self.__name__, kernel.metadata.shared)


def main(name: str) -> None:
    """Run a file's functions on tensors that say they are on a GPU."""
    from types import SimpleNamespace

    import torch
    from launch import load
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.runtime.jit import JITFunction

    JITFunction.run = compile_instead
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    make, module = torch.tensor, load(f"09_kernels/{name}.py")
    module.check_free = lambda *_: None  # fake tensors have no memory to be shared
    torch.tensor = lambda *values, pin_memory=False, **options: make(*values, **options)  # there is none to pin for
    for dtype in torch.bfloat16, torch.float32, torch.float64:
        wide = torch.promote_types(dtype, torch.float32)

        def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point)

        if name == "adamw":  # reads addresses: its tensors are real
            parameters = [torch.nn.Parameter(torch.zeros(100, dtype=dtype)) for _ in range(3)]
            for p in parameters:
                p.grad = torch.zeros_like(p)
            module.AdamW([dict(params=parameters)], lr=0.1).step()
            continue
        with FakeTensorMode():
            if name == "rmsnorm":
                for d in 4096, 65536, 1000:
                    x, weight = tensor(64, d), tensor(d, dtype=wide)
                    sum(y.sum() for y in module.add_rms_norm(x, x, weight)).backward()
                    module.rms_norm(x, weight).sum().backward()
            elif name == "swiglu":
                for f in 14336, 1000:
                    module.silu_mul(tensor(64, f) * 1, tensor(64, f) * 1).sum().backward()
                    module.swiglu(tensor(64, f) * 1, tensor(64, f) * 1, tensor(4096, f)).sum().backward()
            elif name == "rope":
                for heads, k in (32, 128), (8, 128), (32, 64), (3, 96):
                    module.rotate(
                        tensor(2, 64, heads * k) * 1, (tensor(64, k, dtype=wide).detach(),) * 2
                    ).sum().backward()
            elif name == "softmax":
                for v in 100, 4096, 128256:
                    module.softmax(tensor(64, v)).sum().backward()
            else:
                module.add_product = lambda *_: None  # cuBLAS
                for v in 128256, 49152, 1000:
                    targets = tensor(64, dtype=torch.int64)
                    module.cross_entropy(tensor(64, v) * 1, targets).backward()
                    module.linear_cross_entropy(tensor(64, 256), tensor(v, 256), targets).backward()


if __name__ == "__main__":
    main(sys.argv[1])
