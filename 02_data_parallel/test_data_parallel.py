"""The data-parallel recipes train as the root does, their replicas stay alike, and they communicate what they say."""

import subprocess

import equivalence
import probes
import pytest
from launch import ROOT, RankFailed, launch

NAIVE = "02_data_parallel/naive.py"
SMALL = "--device cpu --layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8"


@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0].startswith("02")])
def test_equals_root(recipe, world, flags):
    equivalence.check(recipe, world, flags)


def weights_of_this_rank(module):
    """A probe: the weights after training, as bytes."""
    models, original = [], module.build_model
    module.build_model = lambda cfg: models.append(original(cfg)) or models[0]
    return lambda: {name: p.numpy().tobytes() for name, p in models[0].state_dict().items()}


def test_replicas_agree_to_the_bit():
    first, *others = launch(NAIVE, 4, f"{SMALL} --steps 3", probe=weights_of_this_rank).probes
    assert all(replica == first for replica in others)


def collectives(module):
    """A probe: the sizes of all tensors that are all-reduced."""
    sizes, original = [], module.dist.all_reduce
    module.dist.all_reduce = lambda tensor, *args, **kwargs: sizes.append(tensor.numel()) or original(tensor)
    return lambda: sizes


def test_one_all_reduce_per_parameter():
    """... and one for the logged loss; together the size of the model."""
    run = launch(NAIVE, 2, f"{SMALL} --steps 1", probe=collectives)
    sizes = [p.numel() for p in run.weights.values()]
    assert [sorted(probe) for probe in run.probes] == [sorted([*sizes, 1])] * 2


def test_valid_tokens_differ_between_ranks():
    """Else a mean over ranks would look like the sum, and the equivalence above could not tell them apart."""
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --steps 1"
    sequences = launch(NAIVE, 1, flags, probe=probes.valid_tokens).probes[0]
    ranks = [sum(sequences[rank * 3 : rank * 3 + 3]) for rank in range(4)]
    assert len(set(ranks)) == 4, ranks


def test_batch_must_divide():
    with pytest.raises(RankFailed) as failure:
        launch(NAIVE, 3, "--device cpu --batch 16", probe=probes.never_a_process_group, timeout=60)
    (line,) = failure.value.output.splitlines()
    assert "--batch 16" in line and "processes, 3" in line


def test_started_without_torchrun():
    command = ["python", NAIVE, "--device", "cpu"]
    end = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert end.returncode == 1 and f"torchrun --nproc_per_node 8 {NAIVE}" in end.stderr
    assert len(end.stderr.splitlines()) == 1


def dies_after_the_first_step(module):
    """A probe: rank 1 fails while the others go on to a collective that it will never join."""
    original, steps = module.train_step, []

    def train_step(*args):
        steps.append(1)
        if module.dist.get_rank() == 1 and len(steps) == 2:
            raise RuntimeError("rank 1 has had enough")
        return original(*args)

    module.train_step = train_step
    return lambda: None


def test_a_failing_rank_ends_the_run():
    with pytest.raises(RankFailed, match="rank 1 has had enough|Connection closed"):
        launch(NAIVE, 4, f"{SMALL} --steps 9", probe=dies_after_the_first_step, timeout=60)


def test_torchrun():
    """The header's command as a user types it."""
    command = ["torchrun", "--nproc_per_node", "2", NAIVE, "--device", "cpu", "--steps", "2"]
    end = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert [line.split("  loss")[0].strip() for line in end.stdout.splitlines()] == ["step 1", "step 2", "median"]
