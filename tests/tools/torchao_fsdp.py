"""The twin of 10_mixed_precision/fp8_zero3.py: 03_zero/torch_fsdp.py with torchao's fp8 linears.

    torchrun --nproc_per_node 2 tests/tools/torchao_fsdp.py --preset smollm_1_7b --dtype bfloat16 --compile

Only the linears of the blocks differ: fully_shard gathers their weights in fp8. It needs torchao, 0.17 with torch 2.11.
"""

import sys
from pathlib import Path

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

from launch import load

TWIN = load("03_zero/torch_fsdp.py")
shard, train_step = TWIN.shard, TWIN.train_step


def shard_in_fp8(cfg, model) -> None:
    """Replace the linears of the blocks, then shard as the twin does."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=cfg.device == "cpu")
    convert_to_float8_training(model.model.layers, config=config)
    shard(cfg, model)


def train_step_with_scales(cfg, model, *batch) -> tuple[torch.Tensor, torch.Tensor]:
    """One step, then the scales of all weights by one all-reduce, as torchao recommends."""
    result = train_step(cfg, model, *batch)
    precompute_float8_dynamic_scale_for_fsdp(model)
    return result


def main() -> None:
    """Run the twin, with fp8 linears when it shards and the all-reduce of all scales after each step."""
    TWIN.shard, TWIN.train_step = shard_in_fp8, train_step_with_scales
    TWIN.main()


if __name__ == "__main__":
    main()
