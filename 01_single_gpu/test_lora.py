"""LoRA trains A and B of W + alpha/rank·B·A, and writes what PEFT and transformers read."""

import json
import sys
from pathlib import Path

import equivalence
import pytest
import torch
from compare import assert_close, history_errors, relative_errors
from launch import in_a_fork, isolated, launch, load
from recipes import LORA, ROOT_RECIPE
from safetensors.torch import load_file

SCALE = 300 / 5
SHAPE = f"{equivalence.SHAPE} --device cpu --dtype float64"
ADAPTERS = "--lora_rank 5 --lora_alpha 300"
PREFIX = "base_model.model."  # of PEFT's names


def adapters(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by the names of the linears' weights, from a folder of PEFT's."""
    found = load_file(folder / "adapter_model.safetensors")
    linears = [name.removesuffix(".lora_A.weight") for name in found if name.endswith(".lora_A.weight")]
    pairs = {f"{name}.weight": (found[f"{name}.lora_A.weight"], found[f"{name}.lora_B.weight"]) for name in linears}
    assert len(found) == 2 * len(pairs) and all(name.startswith(PREFIX) for name in pairs), sorted(found)
    return {name.removeprefix(PREFIX): pair for name, pair in pairs.items()}


def merged(weights: dict[str, torch.Tensor], pairs: dict[str, tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """The weights with SCALE·B·A added."""
    return weights | {name: weights[name] + SCALE * b @ a for name, (a, b) in pairs.items()}


def trained_inside_merged_weights(flags: str, pairs: dict[str, tuple[torch.Tensor, ...]]):
    """Train A and B with the root's model, whose linears are W + SCALE·B·A. Return merged weights and the history."""
    root = load(ROOT_RECIPE)
    sys.argv = ["train.py", *flags.split()]
    cfg = root.parse_config()
    torch.set_default_dtype(torch.float64)
    model, (data, _), history = root.build_model(cfg), root.load_data(cfg), []
    frozen, leaves = model.state_dict(), [x.requires_grad_() for pair in pairs.values() for x in pair]
    optimizer = torch.optim.AdamW(leaves, betas=(0.9, 0.95), eps=cfg.eps, weight_decay=cfg.weight_decay)
    for step in range(cfg.steps):
        inputs, targets = root.make_batch(cfg, data, step)
        logits = torch.func.functional_call(model, merged(frozen, pairs), inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=root.IGNORE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, cfg.clip)
        history.append((loss.item(), norm.item()))
        root.set_learning_rate(cfg, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    assert min(norm for _, norm in history) > cfg.clip, "the clip never acted"
    return {name: x.detach() for name, x in merged(frozen, pairs).items()}, history


def test_trains_inside_merged_weights(tmp_path, file=LORA):
    """Three steps with a clip that acts; A as --adapters has it before the first, B is 0."""
    init = equivalence.start(ROOT_RECIPE, equivalence.SHAPE)
    flags = f"{SHAPE} --data {equivalence.documents()} --init {init}"
    launch(file, 1, f"{flags} {ADAPTERS} --steps 0 --adapters {tmp_path}", save=False)
    pairs = adapters(tmp_path)
    assert not any(b.any() for _, b in pairs.values()), "B does not start at 0"
    for a, _ in pairs.values():  # up to 6 standard errors
        assert abs(a.std() * (3 * a.shape[1]) ** 0.5 - 1) < 4 / a.numel() ** 0.5, "A has another variance"
    assert len({a.flatten()[0].item() for a, _ in pairs.values()}) == len(pairs), "two linears have the same A"
    flags += f" {equivalence.TRAINING} --steps 3"
    ours = launch(file, 1, f"{flags} {ADAPTERS}")
    weights, history = isolated(lambda: trained_inside_merged_weights(flags, pairs))
    errors = relative_errors(ours.weights, weights) | history_errors(ours.history, history)
    assert_close(errors, equivalence.TOLERANCE["float64"], "training inside merged weights")


@pytest.mark.parametrize("file, world", [(LORA, 1), ("03_zero/lora.py", 2), ("04_tensor_sequence/lora.py", 2)])
def test_what_peft_reads(tmp_path, file, world):
    """Names, and what config says of them: with it, the adapters make the merged weights that are saved."""
    init = equivalence.start(ROOT_RECIPE, equivalence.SHAPE)
    run = launch(file, world, f"{SHAPE} {ADAPTERS} --init {init} --steps 2 --lr 0.1 --adapters {tmp_path}/new")
    pairs, config = adapters(tmp_path / "new"), json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    linears = {name for name, tensor in run.weights.items() if ".layers." in name and tensor.ndim == 2}
    assert set(pairs) == linears, "not all linears of the blocks have an adapter"
    config["target_modules"] = set(config["target_modules"])
    modules = {name.split(".")[-2] for name in linears}
    assert config == dict(peft_type="LORA", r=5, lora_alpha=300, target_modules=modules), f"the config is {config}"
    errors = relative_errors(run.weights, merged(load_file(init), pairs), load_file(init))
    assert_close(errors, 1e-12, "merged weights")


@in_a_fork
def test_frozen_weights_take_two_bytes(file=LORA):
    """... and no gradient, no moments; adapters are fp32, and so are the weights into which they are merged."""
    module = load(file)
    cfg = module.Config(layers=2, dim=32, ffn=48, seq=16, device="cpu", dtype="bfloat16")
    model, data = module.build_model(cfg), module.load_data(cfg)[0]
    optimizer = module.make_optimizer(cfg, model)
    module.train_step(cfg, model, optimizer, *module.make_batch(cfg, data, 0))
    seen = {("lora_" in name, p.dtype, p.requires_grad, p in optimizer.state) for name, p in model.named_parameters()}
    frozen, trained = (False, torch.bfloat16, False, False), (True, torch.float32, True, True)
    assert seen == {frozen, trained}, f"other dtypes, gradients or moments: {seen}"
    weights = model.state_dict()
    module.merge_adapters(weights, 1.0)
    assert all((x.dtype == torch.float32) == ("_proj." in name) for name, x in weights.items()), "merged in 16 bits"
