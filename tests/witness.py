"""The witness from outside: transformers' Llama computes what the root computes, Mixtral what moe.py does, and GLM-4.5,
which has DeepSeek-V3's experts and a Llama's attention, what node_limited.py does."""

import contextlib
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import compare
import equivalence
import torch
from launch import isolated, launch, load
from safetensors.torch import load_file

ROOT_RECIPE = "01_single_gpu/train.py"
FLAGS = "--device cpu --dtype float64 --layers 3 --dim 48 --heads 6 --kv_heads 2 --ffn 64 --seq 24 --batch 4"
SHAPE = dict(num_hidden_layers=3, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, vocab_size=256)
SHAPE |= dict(intermediate_size=64, rms_norm_eps=1e-5, max_position_embeddings=131072)  # transformers' names of FLAGS
ROPE = "--theta 10000 --rope_factor 32 --seq 512 --batch 2"
EXPERTS = "--experts 8 --top_k 2"


def llama_config(theta: float = 5e5, rope_factor: float = 1.0, tied: bool = False):
    """transformers' config of the root with FLAGS."""
    from transformers import LlamaConfig

    rope = {"rope_type": "default", "rope_theta": theta}
    if rope_factor != 1:
        rope |= {"rope_type": "llama3", "factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    return LlamaConfig(**SHAPE, tie_word_embeddings=tied, rope_parameters=rope)


def mixtral_config(experts: int, top_k: int, theta: float = 5e5):
    """transformers' config of moe.py with FLAGS and that many experts: no window of attention, no auxiliary loss."""
    from transformers import MixtralConfig

    rope = {"rope_type": "default", "rope_theta": theta}
    routing = dict(num_local_experts=experts, num_experts_per_tok=top_k, output_router_logits=False)
    return MixtralConfig(**SHAPE, **routing, sliding_window=None, tie_word_embeddings=False, rope_parameters=rope)


def glm_config(shared: int):
    """transformers' config of node_limited.py with FLAGS and that many shared experts."""
    from transformers import Glm4MoeConfig

    routing = dict(n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    experts = dict(n_shared_experts=shared, moe_intermediate_size=64, first_k_dense_replace=0, norm_topk_prob=True)
    rope = dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=1.0)
    attention = dict(head_dim=8, use_qk_norm=False, attention_bias=False, rope_parameters=rope)
    return Glm4MoeConfig(**SHAPE, **routing, **experts, **attention, tie_word_embeddings=False)


@contextlib.contextmanager
def in_float64():
    """transformers computes norms, rotary angles and the router's softmax in float32: in here that means float64."""
    double = torch.float64
    with patch.multiple(torch, float32=double, float=double), patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def class_of(config):
    """The class of transformers that has such a config."""
    import transformers

    names = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}
    return getattr(transformers, names[config.model_type])


def random_model(config):
    """transformers' model with large random weights, and norm weights that differ from 1, so that no error hides.

    Biases of routers are below -1, so that all biased scores are negative.
    """
    config._attn_implementation = config._experts_implementation = "eager"
    model = class_of(config)(config).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + (p.ndim == 1))  # routers are loaded in float32
        for name, bias in model.named_buffers():
            if name.endswith("bias"):
                bias.copy_(torch.rand(bias.shape, generator=generator) / 10 - 1.1)
    return model


def restarted_positions(last: torch.Tensor) -> torch.Tensor:
    """Positions [b, s] that begin at 0 after the last token of a document: transformers tells documents by them."""
    positions = torch.zeros(last.shape, dtype=torch.long)
    for i in range(1, last.shape[1]):
        positions[:, i] = (positions[:, i - 1] + 1) * ~last[:, i - 1]
    return positions


def loss_of(model, flags: str, documents: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's logits on the root's first batch of these flags, and from them the mean loss of its valid targets.

    documents: attention does not cross from one to the next.
    """
    sys.argv = [ROOT_RECIPE, *flags.split()]
    module = load(ROOT_RECIPE)
    cfg = module.parse_config()
    inputs, targets = module.make_batch(cfg, module.load_data(cfg)[0], 0)
    packed = dict(position_ids=restarted_positions(targets == module.IGNORE), use_cache=False) if documents else {}
    logits = model(input_ids=inputs, **packed).logits
    losses = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return logits, losses[targets != module.IGNORE].sum() / (targets != module.IGNORE).sum()


def first_logits(module):
    """A probe: the logits of the first forward."""
    seen, original = [], module.Model.forward
    module.Model.forward = lambda self, *args: seen.append(original(self, *args)) or seen[-1]
    return lambda: seen[0].detach()


def switch_router(router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route with Switch's gate, the probability. Mixtral's router would renormalise it to 1, which trains no router."""
    logits = torch.nn.functional.linear(x, router.weight)
    gates, experts = logits.softmax(-1).topk(1)
    return logits, gates, experts


def stored(model, folder: Path | str) -> dict[str, torch.Tensor]:
    """The weights in the file that save_pretrained writes: under the published names, whatever they are in memory."""
    model.save_pretrained(folder)
    return load_file(Path(folder) / "model.safetensors")


def check(
    recipe: Path | str = ROOT_RECIPE,
    rope: str = "",
    experts: str = "",
    shared: int = 0,
    tied: bool = False,
    documents: bool = False,
) -> None:
    """Assert that from_pretrained loads what the recipe saves, and computes the same logits, loss and gradients.

    experts: "--experts E --top_k K" of a recipe that has experts. shared: so many are shared, of node_limited.py.
    documents: of one with document masks.
    """
    folder = tempfile.mkdtemp()
    numbers = [float(number) for number in rope.split()[1:4:2]]  # of --theta and --rope_factor
    config = llama_config(*numbers, tied=tied)
    if experts:
        config = mixtral_config(*map(int, experts.split()[1::2]), *numbers[:1])
    if shared:
        config, experts = glm_config(shared), f"--shared {shared} --microbatches 1"
    class_of(config)  # imported here, not in each of the forks
    weights = isolated(lambda: stored(random_model(config), f"{folder}/start"))
    start = f"{FLAGS} --data {equivalence.documents()} {rope} {experts} --init {folder}/start/model.safetensors"
    ours = launch(recipe, 1, f"{start} {equivalence.GRADIENT}", probe=first_logits)
    launch(recipe, 1, f"{start} --steps 0 --save {folder}/model.safetensors")
    saved = load_file(f"{folder}/model.safetensors")
    compare.assert_close(compare.relative_errors(saved, weights), 0, f"{recipe}, saved without training")

    def theirs():
        config.save_pretrained(folder)
        loaded = class_of(config).from_pretrained(folder, dtype=torch.float64).state_dict()
        with in_float64():
            model = random_model(config)
            errors = compare.relative_errors(loaded, model.state_dict())
            compare.assert_close(errors, 0, f"{recipe}, loaded by from_pretrained")
            model.load_state_dict(loaded)
            if experts.endswith("--top_k 1"):
                for layer in model.model.layers:
                    layer.mlp.gate.forward = partial(switch_router, layer.mlp.gate)
            logits, loss = loss_of(model, f"{FLAGS} --data {equivalence.documents()} {rope}", documents)
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.grad)
        return logits.detach(), loss.item(), stored(model, f"{folder}/gradients")

    logits, loss, gradients = isolated(theirs)
    biases = {name for name in weights if name.endswith("bias")}  # of routers, which have no gradient
    change = {name: weights[name] - tensor for name, tensor in ours.weights.items() if name not in biases}
    gradients = {name: gradient for name, gradient in gradients.items() if name not in biases}
    assert all(gradient.any() for gradient in gradients.values()), "an expert has no rows"
    errors = compare.relative_errors(change, gradients)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    errors["logits"] = ((ours.probes[0] - logits).norm() / logits.norm()).item()
    errors["loss"], errors["gradient norm"] = abs(ours.history[0][0] / loss - 1), abs(ours.history[0][1] / norm - 1)
    compare.assert_close(errors, 1e-10, f"{recipe} against transformers")
