"""The twin of 10_mixed_precision/fp8_tensorwise.py: the root with torchao's fp8 linears in its blocks.

    python tests/tools/torchao_linears.py --preset smollm_1_7b --batch 4 --seq 4096 --dtype bfloat16 --compile

It needs torchao, 0.17 with torch 2.11.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

from launch import load

ROOT_RECIPE = load("01_single_gpu/train.py")
build_in_bf16 = ROOT_RECIPE.build_model


def build_model(cfg):
    """The root's model, its blocks' linears replaced, then compiled as the root's is."""
    model = build_in_bf16(dataclasses.replace(cfg, compile=False))
    convert_to_float8_training(model.model.layers, config=Float8LinearConfig(emulate=cfg.device == "cpu"))
    if cfg.compile:
        model.loss = torch.compile(model.loss)
        for block in model.model.layers.children():
            block.compile()
    return model


def main() -> None:
    ROOT_RECIPE.build_model = build_model
    ROOT_RECIPE.main()


if __name__ == "__main__":
    main()
