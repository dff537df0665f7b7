"""On a machine with GPUs, the equivalence of all recipes over NCCL. Elsewhere there is nothing to collect here."""

import equivalence
import pytest
import torch

if GPUS := torch.cuda.device_count():

    @pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[1] <= GPUS])
    def test_equals_root(recipe, world, flags):
        equivalence.check_on_gpus(recipe, world, flags)

    def test_float32_is_not_tf32():
        assert not torch.backends.cuda.matmul.allow_tf32
