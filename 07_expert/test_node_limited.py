"""node_limited.py routes as DeepSeek-V3 does, and a token crosses the network once per node.

Its root is itself on one rank: there it computes what transformers' DeepseekV3MoE computes in place of a Llama's MLPs.
Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

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
TOP_K, GROUPS, TOP_GROUPS, NODES = 4, 4, 2, 2
CASE = f"--nodes {NODES} --microbatches 1"  # of 4 ranks; 16 experts in 4 groups


def with_biases(module):
    """A probe: the biases below; reports the logits of the first forward."""
    original, build = module.Model.forward, module.build_model
    logits = []

    def build_model(cfg):
        model = build(cfg)
        for layer, biases in zip(model.model.layers, random_biases(cfg.layers, cfg.experts)):
            layer.mlp.gate.bias.copy_(biases)
        return model

    module.build_model = build_model
    module.Model.forward = lambda self, *args: logits.append(original(self, *args)) or logits[-1]
    return lambda: torch.cat(logits).detach()


def random_biases(layers: int, experts: int) -> torch.Tensor:
    """Biases below -1: scores are at most 1, so all sums are negative."""
    return -1 - 0.1 * torch.rand(layers, experts, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("shared", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_computes_what_transformers_computes(shared, file=RECIPE):
    """Logits, loss and gradients, with biases; all experts of a layer have rows."""
    folder = run_folder() / f"deepseek{shared}"
    folder.mkdir(exist_ok=True)
    batch = f"{witness.FLAGS} --batch 8 --data {equivalence.documents()}"
    flags = f"{batch} --shared {shared}"
    start = launch(RECIPE, 1, f"{flags} --steps 0").weights
    generator = torch.Generator().manual_seed(2)
    for x in start.values():
        x.copy_(0.2 * torch.randn(x.shape, generator=generator) + (x.ndim == 1))
    save_file(start, folder / "start.safetensors")
    flags += f" --init {folder}/start.safetensors --microbatches 1"
    ours = launch(file, 1, f"{flags} {equivalence.GRADIENT}", probe=with_biases)

    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    def theirs():
        sizes = dict(hidden_size=48, moe_intermediate_size=64, n_routed_experts=16, num_experts_per_tok=TOP_K)
        sizes |= dict(n_group=GROUPS, topk_group=TOP_GROUPS, n_shared_experts=shared, routed_scaling_factor=2.5)
        config = DeepseekV3Config(**sizes, norm_topk_prob=True)
        config._experts_implementation = "eager"
        with witness.in_float64():
            model = witness.random_model(witness.llama_config())
            for i, layer in enumerate(model.model.layers):
                layer.mlp = DeepseekV3MoE(config).double()
                layer.mlp.gate.e_score_correction_bias.copy_(random_biases(3, 16)[i])
            with torch.no_grad():
                for name, weight in load(RECIPE).published(dict(model.named_parameters())):
                    weight.copy_(start[name])
            logits, loss = witness.loss_of(model, batch)
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return logits.detach(), loss.item(), dict(load(RECIPE).published(gradients))

    logits, loss, gradients = isolated(theirs)
    assert all(gradient.any() for gradient in gradients.values()), "an expert has no rows"
    change = {name: start[name] - tensor for name, tensor in ours.weights.items()}
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
        if x.is_floating_point() and max(x.shape[1], out.shape[1]) > TOP_K:  # else gates
            seen.append((phase(), module.dist.get_process_group_ranks(group), leaving))
        return all_to_all(out, x, arriving, leaving, group, async_op)

    module.dist.all_to_all_single = exchange
    return lambda: seen


def test_a_token_crosses_once_per_node(file=RECIPE):
    """Rows to each node: the tokens that have an expert there, once each; as many come back, and so in backward."""
    flags = f"{equivalence.SHAPE} --device cpu --data {equivalence.documents()} {CASE} --steps 1"
    run = launch(file, 4, flags, probe=together(choices, exchanges), save=False)
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
    tied = {name: tensor * ("block_sparse_moe.gate" not in name) for name, tensor in weights.items()}
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


def test_flags():
    module = load(RECIPE)
    for world, flags in [(8, "--nodes 4"), (8, "--shared 0"), (8, "--top_k 8"), (16, "--nodes 2 --batch 32")]:
        assert refusal(module, world, f"--device cpu {flags}") is None, flags
    for world, flags, words in [
        (8, "--nodes 3", "--nodes 3: must divide the 8 ranks"),
        (8, "--nodes 8", "--groups 4"),
        (8, "--groups 3", "--groups 3: must divide --experts 16"),
        (8, "--top_groups 5", "--top_groups 5: must be at most --groups 4"),
        (8, "--top_k 9", "--top_k 9: must be at most 8"),
        (8, "--shared -1", "--shared -1: must be > 0 and finite, or 0"),
        (8, "--gate_scale 0", "--gate_scale 0.0: must be > 0"),
    ]:
        line = refusal(module, world, f"--device cpu {flags}")
        assert isinstance(line, str) and "\n" not in line and words in line, (flags, line)
