"""What the root's speed is compared with: the same training, with transformers' Llama instead of ours.

    python tests/tools/library.py --preset smollm_1_7b --batch 4 --seq 2048 --dtype bfloat16 --compile

Data, initial weights, optimizer, clipping, log and flags are the root's; model, attention and loss are the library's,
compiled whole. In bfloat16 both are autocast over float32 weights; the library's residual stream is then float32.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

from launch import load

ROOT_RECIPE = load("01_single_gpu/train.py")


def build_model(cfg) -> LlamaForCausalLM:
    """transformers' model with the root's initial weights, in float32, with its default attention (SDPA)."""
    assert cfg.rope_factor == 1, "not translated into rope_parameters here"
    config = LlamaConfig(
        vocab_size=cfg.vocab,
        hidden_size=cfg.dim,
        intermediate_size=cfg.ffn,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.theta},
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device(cfg.device):
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(ROOT_RECIPE.full_tensor(cfg, name, p.shape))
    if cfg.compile:
        model.compile()
    return model


def train_step(cfg, model: LlamaForCausalLM, optimizer, inputs, targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward with the library's loss, backward, clip, AdamW; as the root's, without waiting for the GPU."""
    inputs, targets = inputs.to(cfg.device), targets.to(cfg.device)
    with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        loss = model(input_ids=inputs, labels=targets, shift_labels=targets).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


def main() -> None:
    ROOT_RECIPE.build_model, ROOT_RECIPE.train_step = build_model, train_step
    ROOT_RECIPE.main()


if __name__ == "__main__":
    main()
