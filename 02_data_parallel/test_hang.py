"""Whoever does not come to a collective is named: rank, collective, line; and all ranks end with exit code 1."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from contract import SMALL
from launch import ROOT, RankFailed, in_a_fork, launch, load

HANG = "02_data_parallel/hang.py"
EMBEDDING, NORM = "all_reduce(float32 [256, 32])", "all_reduce(float32 [32])"


def line(file: Path | str, text: str) -> str:
    """Where the only line with a text stands in a recipe."""
    (number,) = (i for i, line in enumerate((ROOT / file).read_text().splitlines(), 1) if text in line)
    return f"{Path(file).name}:{number}"


def kept(folder: Path):
    """A probe: what each rank is told to print when it gives up. One is a little late."""

    def probe(module):
        give_up, rank = module.give_up, module.os.environ["RANK"]

        def watched(store, ranks, text):
            time.sleep(0.3 * (rank == "1"))
            (folder / rank).write_text(text)
            give_up(store, ranks, text)

        module.give_up = watched
        return lambda: None

    return probe


@pytest.mark.parametrize("hang", ["raise", "skip", "size", "one_rank"])
def test_says_who_what_and_where(hang, tmp_path, file=HANG):
    summed, alone = line(file, "dist.all_reduce(gradient)"), line(file, "dist.all_reduce(gradients[0].norm())")
    usual = f"call {EMBEDDING} at {summed}"
    wanted = {
        "raise": f"ranks [0, 1] {usual}; ranks [2] left by ValueError('raised by --hang raise') at "
        + line(file, 'ValueError("raised'),
        "skip": f"ranks [0, 1] {usual}; ranks [2] call {NORM} at {summed}",
        "size": f"ranks [0, 1] {usual}; ranks [2] call all_reduce(float32 [1, 32]) at {summed}",
        "one_rank": f"ranks [0] call all_reduce(float32 []) at {alone}; ranks [1, 2] {usual}",
    }
    with pytest.raises(RankFailed) as failure:
        launch(file, 3, f"{SMALL} --batch 6 --steps 1 --timeout 30 --hang {hang}", probe=kept(tmp_path))
    assert failure.value.code == 1, "another exit code"
    assert len(list(tmp_path.iterdir())) == 3, "a rank ends before the others have given up"
    said = [(tmp_path / f"{rank}").read_text() for rank in range(3)]
    assert said[0] == f"collective 1: {wanted[hang]}", "says something else"
    assert said[1] == "" and (said[2].endswith("raised by --hang raise\n") if hang == "raise" else said[2] == "")


@in_a_fork
def test_waits_for_a_while(file=HANG):
    """A rank that does not come is named after the time-out, by the first that waits; one that comes late is not."""
    module, store, said = load(file), dist.HashStore(), []
    module.dist.get_rank, module.faulthandler.dump_traceback_later = lambda: 4, lambda timeout: None
    module.give_up = lambda store, ranks, text: said.append((ranks, text))
    for waiting in 6, 1:
        store.set(f"group 7 3 {waiting}", "call barrier() at a.py:1")
        module.meet(store, "group 7", (1, 4, 6), 3, "call barrier() at a.py:1", 0.1)
        text = "collective 3: ranks [1] did not come within 0.1 s; ranks [4, 6] call barrier() at a.py:1"
        assert said == [([4, 6], text)], "says something else, or gives up although all have come"


def in_a_group(module):
    """A probe: instead of training, collectives of a part of the ranks, and of two groups of all. Reports the calls."""
    seen, meet = [], module.meet

    def some(cfg, *data):
        part, again = dist.new_group([0, 2]), dist.new_group([0, 1, 2])
        x = module.torch.zeros(3)
        for group in None, None, None, None, again:
            module.dist.all_reduce(x, dist.ReduceOp.SUM, part)  # torch warns rank 1, and returns
            module.dist.broadcast(x, src=0, group=group)

    def watched(store, name, members, number, call, timeout):
        seen.append((members, number, call.split(" at ")[0]))
        meet(store, name, members, number, call, timeout)
        assert store.check([f"{name} {number} {dist.get_rank()}"]), "deleted before it is read"
        assert number < 3 or not store.check([f"{name} {number - 2} {dist.get_rank()}"]), "keys are kept"

    module.train, module.meet = some, watched
    return lambda: seen


def test_groups_count_for_themselves(file=HANG):
    """Ranks outside a group are not waited for, and numbers of a group are its own, of two of the same ranks, too."""
    run = launch(file, 3, f"{SMALL} --batch 6", probe=in_a_group, save=False)
    part = [((0, 2), i, "call all_reduce(float32 [3])") for i in range(1, 6)]
    whole = [((0, 1, 2), i, "call broadcast(float32 [3])") for i in (1, 2, 3, 4, 1)]
    both = [call for pair in zip(part, whole) for call in pair]
    assert run.probes == [both, whole, both], "other numbers"


@in_a_fork
def test_a_restart_has_keys_of_its_own():
    """torchrun's store keeps those of the former attempt, in which some rank may not have come."""
    module, prefixes = load(HANG), set()
    module.check = module.load_data = module.dist.init_process_group = module.dist.TCPStore = lambda *_, **__: []
    module.dist.PrefixStore = lambda prefix, server: prefixes.add(prefix) or sys.exit()
    sys.argv = ["hang.py", "--device", "cpu"]
    for attempt in "01":
        os.environ.update(TORCHELASTIC_RESTART_COUNT=attempt, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        with pytest.raises(SystemExit):
            module.main()
    assert len(prefixes) == 2, "the store has the keys of the former attempt"
