"""Each test must be able to fail: bugs put into the recipes, most of them one line, turn the recipe's test red.

Several were shipped by others. Losses under AdamW show none of those that only scale the gradient, which is why
equivalence.py compares gradients.
"""

from dataclasses import dataclass
from types import ModuleType

import equivalence
import pytest
import schedules
from launch import ROOT, launch, load
from test_lineage import FAMILY


@dataclass(frozen=True)
class Bug:
    """In a recipe, `old` becomes `new`; to be seen on `world` ranks with `flags`."""

    what: str
    recipe: str
    old: str
    new: str
    world: int = 1
    flags: str = ""


ROOT_RECIPE = "01_single_gpu/train.py"
ACCUMULATION = "01_single_gpu/gradient_accumulation.py"
FULL = "01_single_gpu/activation_checkpointing.py"
NAIVE = "02_data_parallel/naive.py"
AFAB, ONE_F_ONE_B = "06_pipeline/afab.py", "06_pipeline/1f1b.py"
MICRO = dict(flags="--microbatches 4")
PIPELINE = dict(world=3, flags="--microbatches 4")

BUGS = [
    # the model and the step, in a recipe that is compared with the root
    Bug("attention sees the future", ACCUMULATION, "is_causal=True", "is_causal=False", **MICRO),
    Bug("a clip that does not act", ACCUMULATION, "model.parameters(), cfg.clip", "model.parameters(), 1e9", **MICRO),
    Bug("weight decay on norms", ACCUMULATION, "weight_decay=0.0", "weight_decay=cfg.weight_decay", **MICRO),
    Bug("the first token of a document is predicted", NAIVE, ".masked_fill(unrelated, IGNORE)", "", world=2),
    # gradient accumulation
    Bug(
        "each micro-batch divided by its own tokens",
        ACCUMULATION,
        "x, y) / tokens",
        "x, y) / (y != IGNORE).sum()",
        **MICRO,
    ),
    Bug("micro-batches not divided at all", ACCUMULATION, "x, y) / tokens", "x, y)", **MICRO),
    Bug(
        "gradients of all but the last lost",
        ACCUMULATION,
        "loss.backward()",
        "model.zero_grad(); loss.backward()",
        **MICRO,
    ),
    # checkpointing
    Bug("the checkpoint cuts the graph", FULL, "self.body, x, rope", "self.body, x.detach(), rope"),
    Bug(
        "the recomputation is not of the same function",
        FULL,
        "x = x + self.self_attn(",
        "x = x + (1 if torch._C._current_graph_task_id() == -1 else 2) * self.self_attn(",
    ),
    Bug(
        "the checkpoint cuts the graph",
        "01_single_gpu/selective_checkpointing.py",
        "self.body, x, rope",
        "self.body, x.detach(), rope",
    ),
    # data parallelism
    Bug("gradients never reduced", NAIVE, "dist.all_reduce(p.grad)", "pass", world=2),
    Bug("gradients averaged", NAIVE, "dist.all_reduce(p.grad)", "dist.all_reduce(p.grad.div_(dp))", world=2),
    Bug("all ranks train on the same part", NAIVE, "inputs.chunk(dp)[rank]", "inputs.chunk(dp)[0]", world=2),
    Bug(
        "each rank divides by its own tokens",
        NAIVE,
        "inputs, targets) / tokens",
        "inputs, targets) / (targets != IGNORE).sum()",
        world=2,
    ),
    Bug(
        "a hook that averages the weights instead of the gradients, once shipped by picotron",
        NAIVE,
        "        dist.all_reduce(p.grad)",
        "        dist.all_reduce(p.data.div_(dp))",
        world=2,
    ),
    Bug(
        "micro-batches accumulated but only the last one's gradient reduced, shipped by picotron_tutorial",
        NAIVE,
        "    loss.backward()\n",
        "    half, total = len(inputs) // 2, loss.detach()\n"
        "    (forward(cfg, model, inputs[:half], targets[:half]) / tokens).backward()\n"
        "    first = [p.grad.clone() for p in model.parameters()]\n"
        "    model.zero_grad()\n"
        "    (forward(cfg, model, inputs[half:], targets[half:]) / tokens).backward()\n"
        "    for p, g in zip(model.parameters(), first):\n"
        "        dist.all_reduce(p.grad)\n"
        "        p.grad += g\n"
        "    dist.all_reduce(total)\n"
        "    return total\n",
        world=2,
    ),
    # pipelines
    Bug(
        "the loss is divided for the log and not for backward, shipped by picotron",
        AFAB,
        "                output = output / tokens\n                total += output.detach()\n",
        "                total += output.detach() / tokens\n",
        **PIPELINE,
    ),
    Bug(
        "the same in 1F1B, with the micro-batches as the only divisor",
        ONE_F_ONE_B,
        "                output = output / tokens\n                total += output.detach()\n",
        "                total += output.detach() / tokens\n                output = output / (tokens / 4)\n",
        **PIPELINE,
    ),
    Bug("norm of the own stage alone", AFAB, "dist.all_reduce(norm)", "pass", **PIPELINE),
    Bug(
        "one stage goes backward in another order",
        AFAB,
        "pop((i, chunk))",
        "pop((i ^ (model.stage == 1), 0))",
        **PIPELINE,
    ),
    Bug(
        "other rotary angles on later stages", AFAB, "torch.arange(x.", "(1 + self.stage) * torch.arange(x.", **PIPELINE
    ),
    Bug(
        "gradients of all but the last lost",
        AFAB,
        "output.backward(",
        "model.zero_grad(); output.backward(",
        **PIPELINE,
    ),
    Bug("targets of another micro-batch", ONE_F_ONE_B, "targets[i])", "targets[i - 1])", **PIPELINE),
]


def mutate(bug: Bug, folder) -> str:
    """Write the recipe with the bug into a folder, and return its path."""
    source = (ROOT / bug.recipe).read_text()
    assert source.count(bug.old) >= 1, f"{bug.recipe} no longer contains {bug.old!r}"
    path = folder / bug.recipe.split("/")[1]
    path.write_text(source.replace(bug.old, bug.new))
    return str(path)


@pytest.mark.parametrize("bug", BUGS, ids=[f"{bug.recipe}: {bug.what}" for bug in BUGS])
def test_equivalence_sees(bug, tmp_path):
    with pytest.raises(AssertionError, match="is off by"):
        equivalence.check(mutate(bug, tmp_path), bug.world, bug.flags, root=ROOT_RECIPE)


def test_the_log_does_not_see_the_scale(tmp_path):
    """picotron's bug: gradients as many times too large as there are tokens, and the loss of step 1 is right."""
    bug = next(bug for bug in BUGS if "divided for the log" in bug.what)
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} {equivalence.GRADIENT}"
    right = launch(bug.recipe, bug.world, f"{flags} {bug.flags}").history[0]
    wrong = launch(mutate(bug, tmp_path), bug.world, f"{flags} {bug.flags}").history[0]
    assert abs(wrong[0] / right[0] - 1) < 1e-14 and wrong[1] > 100 * right[1]


def schedule_is_1f1b(module: ModuleType) -> bool:
    """What test_pipeline.py asserts of the schedule, for 4 stages and 8 micro-batches."""
    try:
        idle = schedules.idle_share(schedules.simulate(schedules.lists(module, 4, 8)))
    except schedules.Deadlock:
        return False
    flight = [schedules.in_flight(order) for order in schedules.lists(module, 4, 8)]
    return abs(idle - 3 / 11) < 1e-12 and flight == [4, 3, 2, 1]


@pytest.mark.parametrize("ahead", ["stages - stage", "stages - 2 - stage", "microbatches", "0", "stage"])
def test_schedule_sees(ahead, tmp_path):
    """Any other number of forwards before the first backward costs time, memory or everything."""
    assert schedule_is_1f1b(load(ONE_F_ONE_B))
    bug = Bug("", ONE_F_ONE_B, "stages - 1 - stage", ahead)
    assert not schedule_is_1f1b(load(mutate(bug, tmp_path)))


def test_every_recipe_has_its_bug():
    """The root's own are in its children, which inherit its code; and transformers is its witness."""
    assert {bug.recipe for bug in BUGS} | {ROOT_RECIPE} == set(FAMILY)
