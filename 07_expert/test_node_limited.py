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
from contract import refusal
from launch import isolated, launch, load, run_folder
from probes import phase, together
from safetensors.torch import save_file

RECIPE = equivalence.NODES
TOP_K, TOP_GROUPS = 4, 2  # of 16 experts in 4 groups


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


def choices(module):
    """A probe: the experts [t, top_k] of every layer's tokens in the first forward."""
    seen, forward = [], module.Router.forward

    def chosen(self, x):
        gates, experts = forward(self, x)
        seen.append(experts.tolist())
        return gates, experts

    module.Router.forward = chosen
    return lambda: seen


def exchanges(module):
    """A probe: of every all-to-all of wide rows, the phase, the ranks that take part, and how many rows go to each."""
    seen, all_to_all = [], module.dist.all_to_all_single

    def exchange(out, x, arriving=None, leaving=None, group=None, async_op=False):
        if x.is_floating_point() and x.shape[1] <= TOP_K:
            assert x.dtype == torch.float32, "gates are rounded"
        elif x.is_floating_point():
            seen.append((phase(), module.dist.get_process_group_ranks(group), leaving))
        return all_to_all(out, x, arriving, leaving, group, async_op)

    module.dist.all_to_all_single = exchange
    return lambda: seen


def test_a_token_crosses_once_per_node(file=RECIPE):
    """Rows to each node: the tokens that have an expert there, once each; as many come back, and so in backward."""
    flags = f"{equivalence.SHAPE} --device cpu --dtype bfloat16 --data {equivalence.documents()} --steps 1"
    run = launch(file, 4, f"{flags} --nodes 2 --microbatches 1", probe=together(choices, exchanges), save=False)
    layers, most, rows_per_expert = 5, 0, 0
    across = [[0, 2], [1, 3], [0, 2], [1, 3]]
    wanted = [[[0, 0] for _ in range(layers)] for _ in range(4)]
    for rank, (layer_choices, _) in enumerate(run.probes):
        for layer, tokens in enumerate(layer_choices):
            for experts in tokens:
                nodes = {expert // 8 for expert in experts}
                assert len({expert // 4 for expert in experts}) <= TOP_GROUPS, "experts of too many groups"
                most, rows_per_expert = most + len(nodes), rows_per_expert + len(experts)
                for node in nodes:
                    wanted[rank][layer][node] += 1
    assert most < 0.6 * rows_per_expert  # the case shows something
    for rank, (_, seen) in enumerate(run.probes):
        crossing = [(phase, sent) for phase, ranks, sent in seen if ranks == across[rank]]
        inside = [ranks for _, ranks, _ in seen if ranks != across[rank]]
        assert set(map(tuple, inside)) == {(rank // 2 * 2, rank // 2 * 2 + 1)}, "rows cross beside the first hop"
        back = [[wanted[peer][layer][rank // 2] for peer in across[rank]] for layer in range(layers)]
        there = wanted[rank]
        forward = [sizes for layer in range(layers) for sizes in (there[layer], back[layer])]
        backward = [sizes for layer in reversed(range(layers)) for sizes in (there[layer], back[layer])]
        assert [sent for phase, sent in crossing if phase == "forward"] == forward, "other rows cross"
        assert [sent for phase, sent in crossing if phase == "backward"] == backward, "other gradients cross"


@pytest.mark.parametrize("nodes", [4, pytest.param(2, marks=pytest.mark.thorough)])
def test_ties_and_a_node_without_tokens(nodes, file=RECIPE):
    """All scores are 0.5: every token has the same experts, on one or two nodes, and all else stands idle."""
    weights = compare.read(equivalence.start(RECIPE, equivalence.SHAPE))[0]
    tied = {name: tensor * ("mlp.gate." not in name) for name, tensor in weights.items()}
    save_file(tied, init := run_folder() / f"tied{nodes}.safetensors")
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init}"
    flags += f" {equivalence.GRADIENT} --microbatches 1"
    theirs = launch(RECIPE, 1, flags, probe=choices)
    chosen = {expert // (16 // nodes) for layer in theirs.probes[0] for token in layer for expert in token}
    assert len(chosen) < nodes, "all nodes have tokens"
    ours = launch(file, 4, f"{flags} --nodes {nodes}")
    errors = compare.relative_errors(ours.weights, theirs.weights, tied)
    errors |= compare.history_errors(ours.history, theirs.history)
    compare.assert_close(errors, 1e-10, f"{file}, ties on {nodes} nodes")


def routed(file: str, x: torch.Tensor, **sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sigmoids of a router of random weights, its gates and its experts."""

    def compute():
        module = load(file)
        router = module.Router(module.Config(dim=x.shape[1], device="cpu", **sizes))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            weight = torch.randn(router.weight.shape, generator=generator).sort(0).values / 100
            router.weight.copy_(weight[:1] + (weight - weight[:1]) / 100)  # sigmoids near each other
            return (x.double() @ router.weight.double().T).sigmoid(), *router(x)

    return isolated(compute)


@pytest.mark.parametrize("top_k", [1, 4])
def test_router_alone(top_k, file=RECIPE):
    """One expert per group: the groups with the best experts are chosen, in fp32 under autocast. Gates add up to the
    scale; with top_k 1 the gate is the score times it."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    scores, gates, experts = routed(file, x, groups=16, top_groups=top_k, top_k=top_k)
    best, order = scores.topk(top_k)
    assert torch.equal(experts, order), "others are chosen"
    assert gates.dtype == torch.float32
    assert ((gates / (2.5 * (best / best.sum(1, keepdim=True) if top_k > 1 else best)) - 1).abs() < 1e-6).all(), "scale"


def test_groups_count_by_their_two_best(file=RECIPE):
    """Neither the group with the highest score is kept, nor the one with the highest sum of all."""

    def kept() -> list[int]:
        module = load(file)
        router = module.Router(module.Config(dim=16, experts=12, groups=3, top_groups=1, top_k=2, device="cpu"))
        scores = torch.tensor([0.9, 0.1, 0.1, 0.1, 0.6, 0.6, 0.0, 0.0, 0.45, 0.45, 0.45, 0.45])
        with torch.no_grad():
            router.weight.zero_()
            router.bias.copy_(scores)
        return sorted(router(torch.ones(1, 16))[1][0].tolist())

    assert isolated(kept) == [4, 5], "another group is kept"


@pytest.mark.parametrize("name", "expert_parallel capacity slots node_limited".split())
def test_no_all_to_all_is_compiled(name, file=None):
    """torch 2.11 compiles one to gradients of 0, on GPUs; later versions do not, so here the code is read."""
    tree = ast.parse(inspect.getsource(load(file or f"07_expert/{name}.py")))
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name != "backward"]
    sending = {f.name: f for f in functions if "AllToAll.apply(" in ast.unparse(f)}
    left = [name for name, f in sending.items() if "torch.compiler.disable" not in map(ast.unparse, f.decorator_list)]
    assert sending and not left, f"{left} would be compiled"


def test_flags():
    module = load(RECIPE)
    for world, flags in [(8, "--nodes 4"), (8, "--shared 0"), (8, "--top_k 8"), (16, "--nodes 2 --batch 32")]:
        assert refusal(module, world, f"--device cpu {flags}") is None, flags
    for world, flags, words in [
        (8, "--nodes 3", "--nodes 3: must divide both the 8 ranks that share the experts and --groups 4: 4 would do"),
        (8, "--nodes 8", "--groups 4"),
        (8, "--groups 3", "--groups 3: must divide --experts 16"),
        (8, "--top_groups 5", "--top_groups 5: must be at most --groups 4"),
        (8, "--top_k 9", "--top_k 9: --top_groups 2 have 8 experts"),
    ]:
        line = refusal(module, world, f"--device cpu {flags}")
        assert isinstance(line, str) and "\n" not in line and words in line, (flags, line)
