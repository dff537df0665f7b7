"""Triton's interpreter with the bfloat16 and fp8 of a GPU: tests/launch.py imports it before any kernel runs.

The interpreter holds bfloat16 as integers of 16 bits. It makes them of float32 by cutting the lower bits off, where a
GPU rounds to nearest even, and it adds, multiplies and compares the integers. Here float32 is rounded as torch does,
and bfloat16 is computed in float32 and rounded. Fp8, which the interpreter rounds without a carry into an odd exponent,
and reads as if it had no NaN, is rounded to nearest even, too, and saturates. And where a kernel promises an alignment
that is none (`tl.multiple_of`), it fails: the interpreter would not care, and a GPU would read something else.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
CONVERT, BINARY, DOT = interpreter._convert_float, InterpreterBuilder.binary_op, InterpreterBuilder.create_dot


def convert(data: np.ndarray, given: tl.dtype, wanted: tl.dtype, rounding: Any) -> np.ndarray:
    """Float32 to the bits of bfloat16, and back; to those of fp8, and from there to float16 or float32."""
    if given == tl.float32 and wanted in FP8:
        x, limit = torch.from_numpy(data.astype(np.float32)), torch.finfo(FP8[wanted]).max
        return x.clamp(-limit, limit).to(FP8[wanted]).view(torch.uint8).numpy()
    if given in FP8 and wanted in (tl.float16, tl.float32):
        x = torch.from_numpy(np.array(data, np.uint8)).view(FP8[given])
        return x.half().numpy() if wanted == tl.float16 else x.float().numpy()
    if (given, wanted) == (tl.float32, tl.bfloat16):
        return torch.from_numpy(data.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    if (given, wanted) == (tl.bfloat16, tl.float32):
        return (data.astype(np.uint32) << 16).view(np.float32)
    return CONVERT(data, given, wanted, rounding)


def wide(builder: InterpreterBuilder, x: TensorHandle) -> TensorHandle:
    """Bfloat16 as float32."""
    return builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x


def binary_op(builder: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Callable) -> TensorHandle:
    """Compute a binary operator; of bfloat16, round the result."""
    if lhs.dtype.scalar != tl.bfloat16:
        return BINARY(builder, lhs, rhs, op)
    found = BINARY(builder, wide(builder, lhs), wide(builder, rhs), op)
    return found if found.data.dtype == np.bool_ else builder.cast_impl(found, tl.bfloat16)


def dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest) -> TensorHandle:
    """Multiply matrices, as tensor cores do: products of bfloat16 are added up in float32."""
    return DOT(builder, wide(builder, a), wide(builder, b), *rest)


def keep_promise(x: TensorHandle, name: str, values: list[int]) -> None:
    """Where a kernel says that x, or the first of a block, is a multiple (of bytes, if x are addresses): it must be."""
    if name == "tt.divisibility":
        assert int(x.data.flat[0]) % values[-1] == 0, f"{x.data.flat[0]} is no multiple of {values[-1]}"


def install() -> None:
    """Let kernels that run from now on in this process, and in its forks, compute so."""
    TensorHandle.set_attr = keep_promise
    interpreter._convert_float = convert
    InterpreterBuilder.binary_op, InterpreterBuilder.create_dot = binary_op, dot
