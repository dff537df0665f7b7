"""node_limited.py routes as DeepSeek-V3 does, and a token crosses the network once per node.

Its root is itself on one rank, where it is compared with transformers.
Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

import ast
import inspect

import compare
import equivalence
import pytest
import torch
import witness
from launch import isolated, launch, load, run_folder
from probes import phase
from safetensors.torch import save_file

RECIPE = equivalence.NODES
TOP_K = 4  # of 16 experts, in 4 groups of which 2 are chosen; two nodes hold 8 each


@pytest.mark.parametrize("shared", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_computes_what_transformers_computes(shared, file=RECIPE):
    """GLM-4.5 has these experts, and a Llama's attention: from_pretrained loads what is saved, and logits, loss and
    gradients are equal. With biases below -1, so that all biased scores are negative; all experts of a layer have rows.
    """
    folder = run_folder() / f"glm{shared}"
    folder.mkdir(exist_ok=True)
    batch = f"{witness.FLAGS} --batch 8 --data {equivalence.documents()}"
    flags, generator = f"{batch} --shared {shared} --microbatches 1", torch.Generator().manual_seed(2)
    start = launch(RECIPE, 1, f"{flags} --steps 0").weights
    for name, x in start.items():
        noise = torch.randn(x.shape, generator=generator)
        x.copy_(noise.sigmoid() / 10 - 1.1 if name.endswith("bias") else 0.2 * noise + (x.ndim == 1))
    save_file(start, folder / "start.safetensors")
    flags += f" --init {folder}/start.safetensors"
    ours = launch(file, 1, f"{flags} {equivalence.GRADIENT}", probe=witness.first_logits)
    launch(file, 1, f"{flags} --steps 0 --save {folder}/model.safetensors")
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    def theirs():
        routing = dict(n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5)
        experts = dict(n_shared_experts=shared, moe_intermediate_size=64, first_k_dense_replace=0, norm_topk_prob=True)
        rope = dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=1.0)
        attention = dict(head_dim=8, use_qk_norm=False, attention_bias=False, rope_parameters=rope)
        config = Glm4MoeConfig(**witness.SHAPE, **routing, **experts, **attention, tie_word_embeddings=False)
        config._attn_implementation = config._experts_implementation = "eager"
        config.save_pretrained(folder)
        loaded = Glm4MoeForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
        with witness.in_float64():
            model = Glm4MoeForCausalLM(config).double()
            model.load_state_dict(loaded)
            logits, loss = witness.loss_of(model, batch)
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.grad)
        return logits.detach(), loss.item(), witness.stored(model, folder / "gradients")

    logits, loss, gradients = isolated(theirs)
    change = {name: start[name] - tensor for name, tensor in ours.weights.items() if not name.endswith("bias")}
    gradients = {name: gradient for name, gradient in gradients.items() if not name.endswith("bias")}
    assert all(gradient.any() for gradient in gradients.values()), "an expert has no rows"
    errors = compare.relative_errors(change, gradients)
    errors["logits"] = ((ours.probes[0] - logits).norm() / logits.norm()).item()
    errors["loss"] = abs(ours.history[0][0] / loss - 1)
    compare.assert_close(errors, 1e-10, f"{file} against transformers")


def hops(module):
    """A probe: of every layer, how many tokens go to each node, [nodes]; of every exchange of rows the phase, the
    ranks that take part, and how many rows go to each."""
    tokens, rows, route, all_to_all = [], [], module.Router.forward, module.dist.all_to_all_single

    def chosen(self, x):
        gates, experts = route(self, x)
        tokens.append(torch.zeros(len(x), 2).scatter_(1, experts // 8, 1).sum(0).tolist())
        return gates, experts

    def exchange(out, x, arriving=None, leaving=None, group=None, async_op=False):
        if x.is_floating_point() and x.shape[1] <= TOP_K:
            assert x.dtype == torch.float32, "gates are rounded"
        elif x.is_floating_point():
            rows.append((phase(), module.dist.get_process_group_ranks(group), leaving))
        return all_to_all(out, x, arriving, leaving, group, async_op)

    module.Router.forward, module.dist.all_to_all_single = chosen, exchange
    return lambda: (tokens, rows)


def test_a_token_crosses_once_per_node(file=RECIPE):
    """Rows to each node: the tokens that have an expert there, once each; as many come back, and so in backward."""
    flags = f"{equivalence.SHAPE} --device cpu --dtype bfloat16 --data {equivalence.documents()} --steps 1"
    probes = launch(file, 4, f"{flags} --nodes 2 --microbatches 1", probe=hops, save=False).probes
    for rank, (tokens, rows) in enumerate(probes):
        peers = [rank % 2, rank % 2 + 2]  # the ranks of the same place on both nodes
        back = [[probes[peer][0][layer][rank // 2] for peer in peers] for layer in range(len(tokens))]
        for name, what in ("forward", "rows"), ("backward", "gradients"):
            crossing = [sent for when, ranks, sent in rows if when == name and ranks == peers]
            assert sorted(crossing) == sorted(tokens + back), f"other {what} cross"
        first = rank // 2 * 2
        assert all(ranks in (peers, [first, first + 1]) for _, ranks, _ in rows), "rows cross beside the first hop"


@pytest.mark.parametrize("name", "expert_parallel capacity slots node_limited".split())
def test_no_all_to_all_is_compiled(name, file=None):
    """torch 2.11 compiles one to gradients of 0, on GPUs; later versions do not, so here the code is read."""
    tree = ast.parse(inspect.getsource(load(file or f"07_expert/{name}.py")))
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name != "backward"]
    sending = {f.name: f for f in functions if "AllToAll.apply(" in ast.unparse(f)}
    left = [name for name, f in sending.items() if "torch.compiler.disable" not in map(ast.unparse, f.decorator_list)]
    assert sending and not left, f"{left} would be compiled"
