"""In node_limited.py a token crosses the network once per node.

Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

import ast
import inspect

import equivalence
import pytest
import torch
from launch import launch, load
from probes import phase

RECIPE = equivalence.NODES
TOP_K = 4  # of 16 experts, in 4 groups of which 2 are chosen; two nodes hold 8 each


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
