"""Each test must be able to fail: every bug of the folders' `bugs.py` turns the check red that it names.

Several were shipped by others. Losses under AdamW show none of those that only scale the gradient, which is why
equivalence.py compares gradients.
"""

import re
from collections.abc import Callable

import contract
import equivalence
import launch as launching
import mutation
import probes
import pytest
import schedules
import simulation
import witness
from equivalence import ROOT_RECIPE
from launch import RankFailed, launch, load
from mutation import Bug, bugs, mutate
from test_lineage import TRAINING

BUGS = bugs()
PIPELINE_TESTS = "06_pipeline/test_pipeline.py"
pytestmark = pytest.mark.thorough


def equal(bug: Bug, file: str) -> None:
    """Compare with the root: in simulated streams if the bug names them, compiled by the first half of the compiler."""
    flags = bug.flags + (" --compile" if bug.seen.startswith("compiled") else "")
    equivalence.check(file, bug.world, flags, equivalence.root_of(bug.recipe), mutation.probe_of(bug))


def held(bug: Bug, file: str) -> None:
    """Two blocks, one other unit, and none between the steps have their weights in memory."""
    run = launch(file, bug.world, f"{contract.SMALL} --steps 2", probe=probes.gathered_at_a_time)
    assert run.probes == [[2, 1, 0]] * bug.world, "weights are held"


def in_flight(bug: Bug, file: str) -> None:
    """Two gradients, and the one that is being sent, are in memory at a time."""
    flags = f"{contract.SMALL} --microbatches 8 --steps 1"
    assert launch(file, 4, flags, probe=probes.gradients_in_flight).probes == [0, 3, 3, 3], "gradients are held"


SEES: dict[str, tuple[Callable[[Bug, str], None], str]] = {  # check, and what it must say
    "equivalence": (equal, "is off by"),
    "late": (equal, "is off by|exit code -11|has waited for|was let go|does not wait|has changed while"),
    "at once": (equal, "is off by"),
    "compiled, late": (equal, "is off by|has waited for"),
    "compiled, at once": (equal, "is off by"),
    "freed": (equal, "storage of size 0|has no attribute 'wait'"),
    "held": (held, "weights are held"),
    "in flight": (in_flight, "gradients are held"),
    "simulation": (lambda bug, file: simulation.check(file), "is off by"),
    "transformers": (
        lambda bug, file: witness.check(file, "--theta 10000 --rope_factor 32 --seq 512 --batch 2"),
        "is off by|names or shapes",
    ),
    "schedule": (
        lambda bug, file: schedules.check(load(file), [(4, 8)]),
        "",
    ),
    "communicators": (lambda bug, file: load(PIPELINE_TESTS).test_communicators(file), ""),
    "leftovers": (lambda bug, file: load(PIPELINE_TESTS).test_a_step_leaves_nothing_but_weights(file), ""),
    "operands": (lambda bug, file: load(PIPELINE_TESTS).test_weight_gradients_keep_their_operands_alone(file), ""),
    **{
        promise: (lambda bug, file, check=check: check(bug.recipe, file), "")
        for promise, check in contract.CHECKS.items()
    },
}


@pytest.mark.parametrize("bug", BUGS, ids=[f"{bug.recipe}: {bug.what}" for bug in BUGS])
def test_a_bug_is_seen(bug, tmp_path, monkeypatch):
    monkeypatch.setattr(launching.launch, "__defaults__", (*launching.launch.__defaults__[:3], 60, True))  # some hang
    check, words = SEES[bug.seen]
    with pytest.raises((AssertionError, RankFailed, TimeoutError, schedules.Deadlock)) as seen:
        check(bug, mutate(bug, tmp_path))
    assert re.search(words, str(seen.value)), f"red for another reason: {seen.value}"


def test_the_log_does_not_see_the_scale(tmp_path):
    """picotron's bug: gradients as many times too large as there are tokens, and the loss of step 1 is right."""
    bug = next(bug for bug in BUGS if "divided for the log" in bug.what)
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} {equivalence.GRADIENT}"
    right = launch(bug.recipe, bug.world, f"{flags} {bug.flags}").history[0]
    wrong = launch(mutate(bug, tmp_path), bug.world, f"{flags} {bug.flags}").history[0]
    assert abs(wrong[0] / right[0] - 1) < 1e-14 and wrong[1] > 100 * right[1]


def test_every_recipe_has_its_bug():
    assert {bug.recipe for bug in BUGS} == set(TRAINING) and ROOT_RECIPE in TRAINING


def test_bugs_have_names_of_their_own():
    """... in their recipe: the stored measurements are found by them."""
    names = [(bug.recipe, bug.what) for bug in BUGS]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
