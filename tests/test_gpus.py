"""On a machine with GPUs, the equivalence of all recipes over NCCL. Elsewhere there is nothing to collect here."""

import json

import equivalence
import pytest
import torch
from launch import launch

pytestmark = pytest.mark.thorough

if GPUS := torch.cuda.device_count():

    @pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[1] <= GPUS])
    def test_equals_root(recipe, world, flags):
        equivalence.check_low_precision(recipe, world, flags)

    def test_float32_is_not_tf32():
        """A matmul in float32 after a recipe's training, to float32's accuracy: TF32 has 1e-3."""

        def probe(module):
            def error():
                x = torch.randn(512, 512, device="cuda")
                return ((x @ x - (x.double() @ x.double())).norm() / (x.double() @ x.double()).norm()).item()

            return error

        assert launch("01_single_gpu/train.py", 1, "--steps 1 --device cuda", probe=probe).probes[0] < 1e-6

    @pytest.mark.parametrize("name", ["naive", "bucketed", "coalesced", "copy_engines"] if GPUS > 1 else [])
    def test_profile_sees_kernels_and_copies(name, tmp_path):
        """Phases, and communication, which naive exposes and the others mostly hide."""
        flags = f"02_data_parallel/{name}.py --folder {tmp_path} --preset smollm_1_7b --layers 4 --seq 1024 --batch 4"
        launch("01_single_gpu/profiling.py", 2, f"{flags} --dtype bfloat16", save=False)
        for rank in range(2):
            ms = json.loads((tmp_path / f"{name}.rank{rank}.json").read_text())["ms"]
            assert min(ms["forward"], ms["backward"], ms["optimizer"], ms["communication"]) > 0.1
            assert (ms["exposed"] > 0.95 * ms["communication"]) == (name == "naive")
