"""The mesh: who is in a group with whom, training equal to the root's in every layout, bytes that each axis sends."""

import contextlib
import io
import sys
from unittest.mock import patch

import compare
import contract
import equivalence
import probes
import pytest
import recipes
from launch import launch, load
from recipes import mesh, stages
from streams import streams

TWO_D, THREE_D = "08_4d/2d.py", "08_4d/3d.py"
TRAIN, MOE = "08_4d/train.py", "08_4d/moe.py"
pipeline = load("06_pipeline/test_pipeline.py")
SMALL = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --vocab 259 --seq 16 --batch 8 --steps 1"


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["late", "at once"])
@pytest.mark.parametrize(
    "recipe, world, flags",
    [
        (TWO_D, 4, "--dp 2 --tp 2 --heads 4 --kv_heads 2"),
        (THREE_D, 4, stages(2, 1, 2, 2)),
        (TRAIN, 8, f"{mesh(1, 2, 2, 2)} --chunks 2 --layers 5"),
        (MOE, 4, f"{mesh(2, 1, 1, 2)} --ep 2"),
    ],
)
def test_whenever_streams_get_to_it(recipe, world, flags, when):
    """Weights are gathered, gradients reduced and keys passed on as early as they may be, or as late."""
    equivalence.check(recipe, world, flags, probe=streams(when))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, flags", [(THREE_D, stages(1, 1, 2, 2)), (MOE, f"{mesh(1, 1, 2, 1)} --ep 1")])
def test_compiled(recipe, flags):
    """On later stages the first block's input is a leaf, whose gradient comes early; experts gather tokens over tp."""
    equivalence.check_quickly(recipe, 2, f"{flags} --compile")


def test_gradients_are_rounded_once(file=TRAIN):
    """In bfloat16, the sum of a rank's micro-batches before it is sent; the sum over the ranks not at all."""
    with patch.dict(recipes.HARDEST, {TRAIN: (4, "--dp 4 --cp 1 --tp 1 --pp 1 --microbatches 3")}):
        world, roots, ours, init = contract.hardest(TRAIN, "bfloat16")
    run = launch(file, world, f"{ours} {equivalence.LOW_GRADIENT}")
    exact = equivalence.in_parts(recipes.ROOT_RECIPE, f"{roots} {equivalence.LOW_GRADIENT}", 4 * 3, True, 3)
    errors = compare.relative_errors(run.weights, exact.weights, compare.read(init)[0])
    compare.assert_close(errors, contract.ROUNDED_ONCE, "gradients in bfloat16")


def test_stages_on_a_mesh(file=THREE_D):
    """Messages are 1/tp of the activations, two gradients are kept, as many micro-batches are in flight as in 1F1B."""
    flags = f"{SMALL} --dtype float64 --dp 1 --tp 2 --pp 3 --chunks 1 --microbatches 8"
    probe = pipeline.messages({"F": 3, "B": 2, "sent": 3})
    for rank, peaks in enumerate(launch(file, 6, flags, probe=probe).probes):
        assert peaks["sent"] == (3 if rank >= 2 else 0) and peaks["F"] <= 3 and peaks["B"] <= 2, "gradients are held"
        both = 1 + (2 <= rank < 4)  # a stage in the middle sends activations and gradients
        assert peaks["bytes"] == both * 8 * 16 * 32 * 8 / 2, "messages are not 1/tp of the activations"


def test_each_direction_has_a_communicator(file=THREE_D):
    """On one, GPUs that both start to send would wait for each other."""

    def own(module):
        models, build = [], module.build_model
        module.build_model = lambda cfg: models.append(build(cfg)) or models[0]
        return lambda: {link[op].group_name for link in models[0].chunks[0].links[:2] for op in "FB"}

    for names in launch(file, 2, f"{SMALL} --steps 0 --dp 1 --tp 1 --pp 2 --microbatches 2", probe=own).probes:
        assert len(names) == 4, f"messages share communicators: {names}"


def shown(flags: str, file: str = TRAIN) -> dict[str, list[list[int]]]:
    """What --show prints, in one process that torchrun has not started: the ranks of every group, by axis."""
    module, out = load(file), io.StringIO()
    with patch.object(sys, "argv", ["train.py", "--show", *flags.split()]), contextlib.redirect_stdout(out):
        module.main()
    lines = [line.split() for line in out.getvalue().splitlines()]
    return {axis: [[int(rank) for rank in group.split(",")] for group in groups] for axis, *groups in lines}


def test_the_figure_of_llama_3():
    """Figure 5 of arXiv:2407.21783: 16 GPUs, two on each axis. Ranks that share experts are neighbours on dp and cp."""
    groups = shown("--dp 2")
    assert groups["dp"][0] == [0, 4] and groups["pp"][0] == [0, 8]  # by default, pp is the slowest
    ranks = shown("--dp 2 --order tp-cp-pp-dp")
    assert ranks["tp"] == [[2 * i, 2 * i + 1] for i in (0, 1, 4, 5, 2, 3, 6, 7)]
    for axis, stride in dict(tp=1, cp=2, pp=4, dp=8).items():
        assert sorted(ranks[axis]) == [[r, r + stride] for r in range(16) if not r & stride], axis
    assert sorted(map(sorted, ranks["dp_cp"])) == [[r, r + 2, r + 8, r + 10] for r in (0, 1, 4, 5)]
    for order in ("tp-cp-dp-pp", "tp-cp-pp-dp"):
        groups = shown(f"--dp 2 --cp 2 --tp 2 --pp 2 --ep 2 --order {order}", MOE)
        assert sorted(groups["ep"]) == sorted(part for r in groups["dp_cp"] for part in (r[:2], r[2:])), order


@pytest.mark.parametrize("file, ep", [(TRAIN, ""), (MOE, " --ep 1")])
def test_impossible_layouts(file, ep):
    """They are not shown. An odd length is fine where no ranks share it."""
    bad = ["--tp 3", "--cp 3", "--layers 1", "--batch 9", "--seq 126", "--ffn 385", "--dim 96 --heads 6 --kv_heads 3"]
    bad += ["--batch 1 --microbatches 1 --seq 4 --tp 4 --vocab 256", *["--experts 7", "--ep 3"] * (file == MOE)]
    for flags in bad:
        with pytest.raises(SystemExit, match=r"^--\w+ \S+: must (be (at least|divisible by)|divide) "):
            shown(flags, file)
    odd = f"--device cpu --dp 2 --cp 1 --tp 1 --pp 1{ep} --seq 127"
    assert contract.refusal(load(file), 2, odd) is None, "an odd length is refused"


def test_busiest_expert(file=MOE):
    """The log has the root's load: rows of all ranks are counted once, in the layers of all stages."""
    flags = f"{SMALL} --steps 2 --dtype float64 --experts 8 --top_k 2 --lr 1e-1 --warmup 0"
    layout = "--dp 1 --cp 2 --tp 1 --pp 2 --ep 2 --microbatches 2"
    run = launch(file, 4, f"{flags} {layout}", probe=probes.evaluated())  # rows of validations do not count
    ours, theirs = ([step[3] for step in of.history] for of in (run, launch("07_expert/moe.py", 1, flags)))
    assert ours == theirs and len(set(theirs)) == 2, f"the root's load is {theirs}, not {ours}"
