"""The mesh: who is in a group with whom, training equal to the root's in every layout, bytes that each axis sends."""

import contextlib
import io
import itertools
import math
import sys
from types import SimpleNamespace
from unittest.mock import patch

import compare
import contract
import equivalence
import probes
import pytest
import torch
from equivalence import mesh, stages
from launch import in_a_fork, isolated, launch, load
from streams import streams

TWO_D, THREE_D = "08_4d/2d.py", "08_4d/3d.py"
TRAIN, MOE = "08_4d/train.py", "08_4d/moe.py"
context, pipeline = load("05_context_ring/test_context.py"), load("06_pipeline/test_pipeline.py")
SMALL = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --vocab 259 --seq 16 --batch 8 --steps 1"


SIZES = [  # that may fail where the hardest of each recipe, which the contract has, does not
    *((TWO_D, dp * tp, f"--dp {dp} --tp {tp} {flags}") for dp, tp, flags in equivalence.TWO_D[1:5]),
    *((THREE_D, dp * tp * pp, stages(dp, tp, pp, chunks)) for dp, tp, pp, chunks in ((1, 2, 3, 2), (3, 1, 2, 2))),
    *((THREE_D, pp, stages(1, 1, pp, chunks)) for pp, chunks in ((3, 3), (4, 1))),
    *((TRAIN, 8, mesh(*sizes)) for sizes in ((1, 2, 2, 2), (2, 2, 1, 2), (2, 2, 2, 1))),  # any three axes at once
    (TRAIN, 8, mesh(1, 2, 4, 1)),  # two ranks share a key head, four share norms
    (TRAIN, 12, f"{mesh(3, 2, 2, 1)} --batch 12 --microbatches 4"),  # units of which 6 shards need padding
    (TRAIN, 4, f"{mesh(2, 1, 1, 2)} --order tp-cp-pp-dp"),
    (TRAIN, 2, f"{mesh(1, 1, 2, 1)} --kv_heads 4"),  # two key heads on each rank
    (TRAIN, 2, f"{mesh(1, 1, 1, 2)} --layers 12"),  # model.layers.1 and model.layers.10
    (MOE, 8, f"{mesh(1, 2, 2, 2)} --ep 2"),
    (MOE, 8, f"{mesh(2, 2, 1, 2)} --ep 4"),
    (MOE, 8, f"{mesh(2, 2, 2, 1)} --ep 2"),  # copies of experts
    (MOE, 4, f"{mesh(2, 1, 1, 2)} --ep 2 --order tp-cp-pp-dp"),
    (MOE, 4, f"{mesh(1, 2, 1, 2)} --ep 2 --chunks 2 --layers 5"),
    (MOE, 2, f"{mesh(1, 1, 2, 1)} --ep 1"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", SIZES)
def test_gradient_on_other_sizes(recipe, world, flags, monkeypatch):
    monkeypatch.setitem(equivalence.HARDEST, recipe, (world, flags))
    contract.check_gradient(recipe)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["late", "at once"])
@pytest.mark.parametrize(
    "recipe, world, flags",
    [
        (TWO_D, 4, "--dp 2 --tp 2 --heads 4 --kv_heads 2"),
        (TRAIN, 8, f"{mesh(1, 2, 2, 2)} --chunks 2 --layers 5"),
        (MOE, 4, f"{mesh(2, 1, 1, 2)} --ep 2"),
    ],
)
def test_whenever_streams_get_to_it(recipe, world, flags, when):
    """Weights are gathered, gradients reduced and keys passed on as early as they may be, or as late."""
    equivalence.check(recipe, world, flags, probe=streams(when))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe, flags",
    [
        (TWO_D, "--dp 1 --tp 2"),
        (THREE_D, stages(1, 1, 2, 2)),
        (MOE, f"{mesh(1, 1, 2, 1)} --ep 1"),
    ],
)
def test_compiled(recipe, flags):
    """On later stages the first block's input is a leaf, whose gradient comes early; experts gather tokens over tp."""
    equivalence.check_quickly(recipe, 2, f"{flags} --compile")


@pytest.mark.parametrize("recipe", [THREE_D, MOE])
def test_gradients_are_rounded_once(recipe, file=None):
    """In bfloat16, the sum of a rank's micro-batches before it is sent; the sum over the ranks not at all."""

    def errors():
        module, generator = load(file or recipe), torch.Generator().manual_seed(0)
        arriving, mine = (torch.randn(16, n, generator=generator).bfloat16() for n in (30, 480))
        sent, group = [], SimpleNamespace(size=lambda: 16, rank=lambda: 0)

        def exchange(out, x, **_):
            sent.append(x.clone())
            out.copy_(arriving)
            return SimpleNamespace(wait=lambda: None)

        module.dist.all_to_all_single = exchange
        full, shard, none = torch.zeros(480).bfloat16(), torch.zeros(30), torch.nn.Parameter(torch.zeros(0))
        weight, matrices = torch.nn.Parameter(full), torch.nn.Parameter(shard)
        unit = module.Unit(group, [weight], [480, 0], full, shard, matrices, none)
        model = SimpleNamespace(sending=[], units=[unit], stream=None)
        for number, weight.grad in enumerate(mine, 1):
            model.requires_gradient_sync = number == len(mine)
            module.reduce(model, 0)
        pairs = (sent[0], mine), (matrices.grad, arriving)
        return [((x - y.double().sum(0)).abs() / (y.double().sum(0).abs() + 1e-2)).max().item() for x, y in pairs]

    of_microbatches, of_ranks = isolated(errors)
    assert of_microbatches <= 1.01 * 2**-8 and of_ranks <= 1e-4, "gradients are rounded more than once"


def test_stages_on_a_mesh(file=THREE_D):
    """The norm that is logged without clipping is that of all ranks. Weights are gathered while a stage waits for its
    first activations. Of eight micro-batches two gradients and the one that is being sent are in memory.
    """

    def on_the_way(module):
        gathered, models, receive, build = [], [], module.receive, module.build_model

        def watched(model, *arguments):
            gathered.append(all(unit.gathering for unit in model.units))
            return receive(model, *arguments)

        module.receive = watched
        module.build_model = lambda cfg: models.append(build(cfg)) or models[0]
        return lambda: gathered[0]

    flags = SMALL.replace("--steps 1", "--steps 2 --dtype float64 --clip inf")
    probe = probes.together(on_the_way, pipeline.messages({"F": 3, "B": 2, "sent": 3}))
    run = launch(file, 6, f"{flags} --dp 1 --tp 2 --pp 3 --chunks 1 --microbatches 8", probe=probe)
    errors = compare.history_errors(run.history, launch(equivalence.ROOT_RECIPE, 1, flags).history)
    compare.assert_close(errors, 1e-10, "--clip inf")
    for rank, (gathered, peaks) in enumerate(run.probes):
        assert gathered, "weights are gathered when activations are there"
        assert peaks["sent"] == (3 if rank >= 2 else 0) and peaks["F"] <= 3 and peaks["B"] <= 2, "gradients are held"
        assert peaks["forgotten"] == 0, "a message of an evaluation is under way when it ends"
        both = 1 + (2 <= rank < 4)  # a stage in the middle sends activations and gradients
        assert peaks["bytes"] == both * 8 * 16 * 32 * 8 / 2, "messages are not 1/tp of the activations"


def test_stages_share_what_they_must(file=THREE_D):
    """Each direction has a communicator, along the stages and around: on GPUs, neighbours that both start to send on
    one would wait for each other. A rank's stages have one list of reductions, that which forward_backward waits for.
    """

    def own(module):
        models, build = [], module.build_model
        module.build_model = lambda cfg: models.append(build(cfg)) or models[0]
        return lambda: (
            [link[op].group_name for link in models[0].chunks[0].links[:2] for op in "FB"],
            [stage.sending is models[0].sending for stage in models[0].chunks],
        )

    for names, same in launch(file, 2, f"{SMALL} --steps 0 --dp 1 --tp 1 --pp 2 --microbatches 2", probe=own).probes:
        assert len(set(names)) == 4, f"messages share communicators: {names}"
        assert same == [True, True], "reductions of a stage are not waited for"


def test_activations_are_split_over_tp(file=THREE_D):
    """What a forward keeps for its backward beside weights is half with tp 2, but for rotary angles and sums."""

    flags = f"{SMALL} --batch 64 --dp 1 --pp 2 --chunks 1 --microbatches 1"
    alone, split = (launch(file, 2 * tp, f"{flags} --tp {tp}", probe=context.kept).probes[:tp] for tp in (1, 2))
    assert max(split) < 0.55 * alone[0], f"ranks of tp keep {split} of {alone[0]} bytes"


def shown(flags: str, file: str = TRAIN) -> dict[str, list[list[int]]]:
    """What --show prints, in one process that torchrun has not started: the ranks of every group, by axis."""
    module, out = load(file), io.StringIO()
    with patch.object(sys, "argv", ["train.py", "--show", *flags.split()]), contextlib.redirect_stdout(out):
        module.main()
    lines = [line.split() for line in out.getvalue().splitlines()]
    return {axis: [[int(rank) for rank in group.split(",")] for group in groups] for axis, *groups in lines}


def test_the_figure_of_llama_3():
    """Figure 5 of arXiv:2407.21783: 16 GPUs, two on each axis, in the order tp, cp, pp, dp."""
    groups = shown("--dp 2")
    assert groups["dp"][0] == [0, 4] and groups["pp"][0] == [0, 8]  # by default, pp is the slowest
    ranks = shown("--dp 2 --order tp-cp-pp-dp")
    assert ranks["tp"] == [[2 * i, 2 * i + 1] for i in (0, 1, 4, 5, 2, 3, 6, 7)]
    for axis, stride in dict(tp=1, cp=2, pp=4, dp=8).items():
        assert sorted(ranks[axis]) == [[r, r + stride] for r in range(16) if not r & stride], axis
    assert sorted(map(sorted, ranks["dp_cp"])) == [[r, r + 2, r + 8, r + 10] for r in (0, 1, 4, 5)]


SIZES = "--kv_heads 3 --heads 6 --dim 96", "--batch 1 --microbatches 1 --seq 4 --tp 4 --vocab 256"
IMPOSSIBLE = "--dp 0", "--tp 3", "--cp 3", "--pp -1", "--batch 9 --dp 2", "--microbatches 3", "--layers 1", *SIZES


@pytest.mark.parametrize(
    "file, flags",
    [
        *((file, flags) for file in (TRAIN, MOE) for flags in (*IMPOSSIBLE, "--seq 126", "--ffn 385")),
        *((MOE, flags) for flags in ("--experts 7", "--ep 3", "--top_k 9")),
    ],
)
def test_what_cannot_be_is_not_shown(file, flags):
    with pytest.raises(SystemExit, match=r"^--\w+ \S+: must (be (> 0|above|at least|at most|divisible by)|divide) "):
        shown(flags, file)


@pytest.mark.parametrize("file", [TRAIN, MOE])
def test_edges_are_not_refused(file):
    """An odd length where no ranks share a sequence, more ranks than key heads."""
    for world, flags in (2, "--dp 2 --cp 1 --tp 1 --pp 1 --seq 127"), (8, "--dp 1 --cp 1 --tp 8 --pp 1 --kv_heads 2"):
        assert contract.refusal(load(file), world, f"--device cpu {flags}" + " --ep 1" * (file == MOE)) is None, flags


@pytest.mark.parametrize(
    "file, layout",
    [
        (THREE_D, "--dp 1 --tp 2 --pp 2"),
        (TRAIN, "--dp 2 --cp 1 --tp 1 --pp 2"),
        (MOE, "--dp 2 --cp 2 --tp 1 --pp 1 --ep 4"),
    ],
)
def test_the_proposed_line_has_the_layout(file, layout):
    """... when torchrun has not started the recipe."""
    line = contract.refusal(load(file), 0, f"--device cpu {layout}")
    assert line == f"start it with torchrun --nproc_per_node 4 {file} {layout}"


def test_ranks_that_share_experts_are_neighbours(file=MOE):
    """... on dp and cp, in both orders: else their all-to-all would leave the host first."""
    for order in ("tp-cp-dp-pp", "tp-cp-pp-dp"):
        groups = shown(f"--dp 2 --cp 2 --tp 2 --pp 2 --ep 2 --order {order}", file)
        halves = sorted(part for ranks in groups["dp_cp"] for part in (ranks[:2], ranks[2:]))
        assert sorted(groups["ep"]) == halves, order


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 1, 2, 4), (1, 5, 4, 1), (4, 2, 1, 3)])
def test_groups(sizes):
    """Each axis divides all ranks into groups whose members differ in their place on it alone, in its order."""
    dp, cp, tp, pp = sizes
    groups = shown(f"--dp {dp} --cp {cp} --tp {tp} --pp {pp} --kv_heads 2 --batch 48 --seq 160")
    place = {
        t + tp * (c + cp * (d + dp * p)): dict(dp=d, cp=c, tp=t, pp=p)
        for d, c, t, p in itertools.product(range(dp), range(cp), range(tp), range(pp))
    }
    assert sorted(place) == list(range(math.prod(sizes)))
    axes = {axis: (axis,) for axis in ("dp", "cp", "tp", "pp")} | {"dp_cp": ("dp", "cp"), "world": tuple(place[0])}
    axes["dp_cp_tp"] = "dp", "cp", "tp"
    for axis, own in axes.items():
        assert sorted(itertools.chain(*groups[axis])) == sorted(place), f"{axis} does not hold every rank once"
        for group in groups[axis]:
            others = {tuple(n for a, n in place[rank].items() if a not in own) for rank in group}
            assert len(others) == 1, f"{axis}: {group} differ elsewhere"
            if axis != "world":
                order = [tuple(place[rank][a] for a in own) for rank in group]
                assert order == sorted(order), f"{axis}: {group} is not in the order of the axis"
    heads = [{(place[i]["pp"], place[i]["tp"] * min(tp, 2) // tp) for i in group} for group in groups["dp_cp_r"]]
    assert all(len(of) == 1 for of in heads) and len(heads) == pp * min(tp, 2), "a group has other key heads"
    assert sorted(itertools.chain(*groups["dp_cp_r"])) == sorted(place)


def test_busiest_expert(file=MOE):
    """The log has the root's load: rows of all ranks are counted once, in the layers of all stages."""
    flags = f"{SMALL} --steps 2 --dtype float64 --experts 8 --top_k 2 --lr 1e-1 --warmup 0"
    layout = "--dp 1 --cp 2 --tp 2 --pp 2 --ep 2 --microbatches 2"
    run = launch(file, 8, f"{flags} {layout}", probe=probes.evaluated())  # rows of validations do not count
    ours, theirs = ([step[3] for step in of.history] for of in (run, launch("07_expert/moe.py", 1, flags)))
    assert ours == theirs and len(set(theirs)) == 2, f"the root's load is {theirs}, not {ours}"


@in_a_fork
def test_biases_of_split_layers_are_not_replicated():
    """Each of two ranks of tp has its own half of a column-parallel bias; that of a row-parallel layer is on both."""
    module, groups = load(TRAIN), {2: "dp_cp_tp", 1: "dp_cp"}
    model = SimpleNamespace(dp_cp="dp_cp", dp_cp_tp="dp_cp_tp", dp_cp_r="dp_cp_r")
    wanted = {"norm.weight": 2, "q_proj.weight": 1, "q_proj.bias": 1, "o_proj.weight": 1, "o_proj.bias": 2}
    found = {name: module.holders(module.Config(tp=2, kv_heads=2), model, name) for name in wanted}
    assert found == {name: groups[ranks] for name, ranks in wanted.items()}
