"""Each test must be able to fail: every bug of the folders' `bugs.diff` turns the check red that it names.

Several were shipped by others. Losses under AdamW show none of those that only scale the gradient, which is why
equivalence.py compares gradients.
"""

import contextlib
import inspect
import re
from collections.abc import Callable

import contract
import equivalence
import launch as launching
import mutation
import probes
import puzzle
import pytest
import recipes
import schedules
from equivalence import ROOT_RECIPE
from launch import ROOT, RankFailed, launch, load
from mutation import Bug, bugs, mutate
from test_lineage import FAMILY, TRAINING

BUGS = bugs()
ON_GPUS = {"09_kernels/flash_attention_gluon.py"}  # has no interpreter: its check runs on GPUs alone
pytestmark = pytest.mark.thorough


def equal(bug: Bug, file: str, modes: tuple[str, ...] = ("gradient",)) -> None:
    """Compare with the root: in simulated streams if the bug names them, compiled by the first half of the compiler.

    Two layers where each takes long, as it is traced or interpreted.
    """
    compiled = bug.seen.startswith("compiled")
    flags = bug.flags + " --compile" * compiled + " --layers 2" * (compiled or bug.recipe == recipes.KERNELS)
    equivalence.check(file, bug.world, flags, equivalence.root_of(bug.recipe), mutation.probe_of(bug), modes)


def held(world: int, file: str) -> None:
    """Two blocks, one other unit, and none between the steps have their weights in memory."""
    run = launch(file, world, f"{contract.SMALL} --steps 2", probe=probes.gathered_at_a_time)
    assert run.probes == [[2, 1, 0]] * world, "weights are held"


def right_schedule(file: str) -> None:
    """The schedule is what the recipe's header says."""
    schedules.check(load(file), [(4, 8)])


# The checks that a bug may name: a function, what its error must say, and fixed arguments. Other arguments go by name:
# `file` is the one with the bug; `recipe`, `world` and `flags` are the bug's.
Check = tuple[Callable[..., None], str] | tuple[Callable[..., None], str, dict[str, object]]
SEES: dict[str, Check] = {
    "one step": (equal, "is off by|(loss|norm) nan"),
    "refused": (equal, "a unit has a .grad|a unit is summed over the replicas"),
    "four steps": (equal, "is off by", {"modes": ["training"]}),
    "lengths": (equal, "document lengths must fill"),
    "late": (equal, "is off by|exit code -11|has waited for|was let go|does not wait|has changed while"),
    "compiled, late": (equal, "is off by|has waited for"),
    "compiled, at once": (equal, "is off by"),
    "freed": (equal, "storage of size 0|has no attribute 'wait'"),
    "sizes of halves": (equal, "is off by|shape|[sS]plit|has no attribute 'wait'"),
    "held": (held, "weights are held"),
    "schedule": (right_schedule, ""),
    **{promise: (check, "") for promise, check in contract.CHECKS.items()},
}


def check_that_sees(bug: Bug) -> tuple[Callable[..., None], str, dict[str, object]]:
    """The check of a bug, what it must say, and arguments of its own.

    As SEES has them, or as a call says, like test_muon.test_orthogonalise(dtype="float64"): the function of that file,
    with arguments that are read in it.
    """
    if bug.seen in SEES:
        check, words, *own = SEES[bug.seen]
        return check, words, dict(*own)
    call = re.fullmatch(r"(\w+)\.(\w+)(?:\((.*)\))?", bug.seen)
    assert call, f"{bug.where}: no check is called {bug.seen!r}"
    file, name, arguments = call.groups()
    module = load(next(ROOT.glob(f"*/{file}.py")))
    return getattr(module, name), "", eval(f"dict({arguments or ''})", vars(module))


@pytest.mark.parametrize("bug", BUGS, ids=[f"{bug.recipe}: {bug.what}" for bug in BUGS])
def test_a_bug_is_seen(bug, tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "IMPATIENT", True)
    check, words, own = check_that_sees(bug)
    file, parameters = mutate(bug, tmp_path), inspect.signature(check).parameters
    folder = tmp_path / "empty"
    folder.mkdir()
    given = {"bug": bug, "recipe": bug.recipe, "file": file, "world": bug.world, "flags": bug.flags}
    given |= {"form": bug.flags, "tmp_path": folder}
    if "file" not in parameters:  # then the file with the bug is the recipe
        given["recipe"] = file
    arguments = {name: given[name] for name in parameters if name in given} | own
    with pytest.raises((AssertionError, RankFailed, TimeoutError, schedules.Deadlock)) as seen:
        check(**arguments)
    words = words.replace("is off by", r"is off by|step \d+: loss \S+ gradient norm (nan|inf)")  # which ends the run
    assert re.search(words, str(seen.value)), f"red for another reason: {seen.value}"
    assert not re.search(r"\b(NameError|UnboundLocalError|ImportError)\b", str(seen.value)), "no bug: it cannot run"


@pytest.mark.parametrize("waits", [True, False])
def test_a_hang_is_noticed(waits, tmp_path, monkeypatch):
    """Ranks that wait for each other are given up long before the timeout; a rank that computes for as long is not."""
    monkeypatch.setattr(launching, "IMPATIENT", True)
    monkeypatch.setattr(launching, "HANGS", 1.0)
    wait = "dist.recv(torch.zeros(1), 1 - dist.get_rank())"
    compute = "end = time.time() + 4 * dist.get_rank()\n    while time.time() < end:\n        pass\n    dist.barrier()"
    body = f"dist.init_process_group('gloo')\n    {wait if waits else compute}"
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"import time, torch\nimport torch.distributed as dist\n\n\ndef main():\n    {body}\n")
    with pytest.raises(TimeoutError, match="hang") if waits else contextlib.nullcontext():
        launch(recipe, 2, save=False)


def test_puzzle(tmp_path, capsys, monkeypatch):
    """It shows both runs; hints name the wrong gradients and the definition; the answer has the line."""
    recipe = "02_data_parallel/naive.py"
    found = [bug for bug in puzzle.puzzles() if bug.recipe == recipe]
    number = next(i for i, bug in enumerate(found) if "averages" in bug.what)
    bug, file = found[number], mutate(found[number], tmp_path)
    steps = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", puzzle.symptom(bug, file), re.M)
    assert len(steps) == 10 and steps[0][0] == steps[0][1] and float(steps[0][2]) > 1.5 * float(steps[0][3])
    assert re.search(r"(\d+) of \1 gradients are wrong", puzzle.gradients(bug, file))
    assert puzzle.definition(bug) == "It is in forward_backward."
    monkeypatch.setattr("sys.argv", ["puzzle.py", recipe, str(number + 1), "--reveal"])
    puzzle.main()
    answer = capsys.readouterr().out
    assert bug.what in answer and "\n+" in answer


def test_every_recipe_has_its_bug():
    """Each training recipe, and each file of kernels that a CPU can run."""
    kernels = {path for path, recipe in FAMILY.items() if "@triton.jit" in recipe.source} - ON_GPUS
    assert {bug.recipe for bug in BUGS} == {*TRAINING, *kernels} and ROOT_RECIPE in TRAINING


def test_bugs_have_names_of_their_own():
    """... in their recipe: the stored measurements are found by them."""
    names = [(bug.recipe, bug.what) for bug in BUGS]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
