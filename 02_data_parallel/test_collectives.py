"""collectives.py: every collective by its definition, ring and tree against the library, and the printed table."""

import re
import sys
import time

import probes
import pytest
import torch
from launch import RankFailed, launch, load

COLLECTIVES = "02_data_parallel/collectives.py"


def the_examples(module):
    """A probe: what examples() returns on this rank."""
    found, original = [], module.examples
    module.examples = lambda cfg: found.append(original(cfg)) or found[0]
    return lambda: [(name, before.tolist(), after.tolist()) for name, _, before, after in found[0]]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_examples_of_collectives(world):
    """Each collective by its definition; and what collectives.py prints, down to the bytes that rank 0 sends."""
    run = launch(COLLECTIVES, world, "--device cpu --largest 2048 --repeats 1", probe=the_examples, save=False)
    n, ranks = world, range(world)
    numbers = [[i + 10 * rank for i in range(n)] for rank in ranks]
    total = [sum(column) for column in zip(*numbers)]
    wanted = {
        "broadcast": [numbers[0]] * n,
        "reduce": [total] + [[]] * (n - 1),
        "all-reduce": [total] * n,
        "gather": [[row[0] for row in numbers]] + [[]] * (n - 1),
        "all-gather": [[row[0] for row in numbers]] * n,
        "scatter": [[numbers[0][rank]] for rank in ranks],
        "reduce-scatter": [[total[rank]] for rank in ranks],
        "all-to-all": [[row[rank] for row in numbers] for rank in ranks],
    }
    for rank, shown in enumerate(run.probes):
        assert {name: after for name, _, after in shown} == {name: after[rank] for name, after in wanted.items()}
        before = {name: before for name, before, _ in shown}
        one_each = dict.fromkeys(("gather", "all-gather"), numbers[rank][:1])
        assert before == {
            **dict.fromkeys(wanted, numbers[rank]),
            **one_each,
            "scatter": numbers[0] if rank == 0 else [],
        }
    printed = run.output[0]
    sent = float(re.search(r"ring ([\d.]+)", printed.splitlines()[-1])[1])
    assert abs(sent - 2 * (n - 1) / n) < 0.02 and not any(run.output[1:])  # the chunks of 3 ranks are not equally long
    times = re.findall(r"comes after ([\d.]+) s, leaves after ([\d.]+) s", printed)
    comes, leaves = ([float(t) for t in column] for column in zip(*times, strict=True))
    assert (
        len(comes) == n and min(comes) == 0 and max(comes) > 0.05 and min(leaves) >= max(comes) - 0.01
    )  # printed in hundredths
    first = [f"    rank {rank}    {' '.join(map(str, row)):>{3 * n}}" for rank, row in enumerate(numbers)]
    assert f"all\n{first[0]}  ->  {' '.join(map(str, numbers[0]))}\n{first[1]}" in printed


def known_times(module):
    """A probe: the library takes 0.1 ms + bytes / 1e8 per second, the ring twice, the tree four times as long."""
    factors = {"all_reduce": 1, "ring_all_reduce": 2, "tree_all_reduce": 4}
    module.seconds = lambda cfg, call, x, *rings: factors[call.__name__] * (1e-4 + x.nbytes / 1e8)
    return lambda: None


def test_printed_table():
    """Every cell: microseconds, algorithm and bus bandwidth in GB/s; the line is where latency is half of the time."""
    flags = "--device cpu --smallest 1024 --largest 65536"
    lines = launch(COLLECTIVES, 4, flags, probe=known_times, save=False).output[0].splitlines()
    rows = [line for line in lines if re.match(r" +[\d,]+ +[\d,]+ us", line)]
    for row, size in zip(rows, [1024, 4096, 16384, 65536], strict=True):
        cells = [float(cell.replace(",", "")) for cell in re.findall(r"[\d.,]+", row)]
        times = [factor * (1e-4 + size / 1e8) for factor in (1, 2, 4)]
        wanted = [(t * 1e6, size / t / 1e9, 1.5 * size / t / 1e9) for t in times]
        assert cells == pytest.approx([size, *sum(wanted, ()), 50], abs=0.5)
        assert all(abs(a - b) < 0.0051 for i, (a, b) in enumerate(zip(cells[1:-1], sum(wanted, ()))) if i % 3)
    (line,) = [i for i, line in enumerate(lines) if line.startswith("----")]
    latency = 1e-4 + 1024 / 1e8
    assert (
        lines[line + 1] == rows[2]
        and f"from {latency * 65536 / (1e-4 + 65536 / 1e8 - latency):,.0f} bytes" in lines[line]
    )


def time_of_naps(module):
    """A probe: instead of the table, seconds() of a collective that takes its naps; and how often it is called."""
    naps, found = iter([0.5, 0.5, 0.5, 0.2, 0.2, 0.3]), []

    def instead_of_the_table(cfg):
        called = []
        nap = lambda: called.append(1) or time.sleep(next(naps) + 0.05 * module.dist.get_rank())  # noqa: E731
        found.extend([module.seconds(cfg, nap), len(called)])

    module.print_table = instead_of_the_table
    return lambda: found


def test_seconds():
    """The median of the slowest rank: 0.2 + 0.05 s; the first three calls do not count."""
    for taken, called in launch(COLLECTIVES, 2, "--device cpu --repeats 3", probe=time_of_naps, save=False).probes:
        assert called == 6 and 0.25 <= taken < 0.29


def exchanges_and_waits(module):
    """A probe: the group of every exchange, and "wait" for every wait, in order."""
    seen, exchange, finish = [], module.exchange, module.finish
    module.exchange = lambda *args: seen.append(id(args[-1])) or exchange(*args)
    module.finish = lambda *args: seen.append("wait") or finish(*args)
    module.seconds = lambda cfg, call, *args: call(*args) and 1.0 or 1.0
    return lambda: seen


def test_rings_work_at_once():
    """All start a step before the first is waited for, each in a group of its own; also where they are timed."""
    flags = "--device cpu --largest 1024 --rings 3"
    for seen in launch(COLLECTIVES, 2, flags, probe=exchanges_and_waits, save=False).probes:
        assert "wait" not in seen[:3] and len(set(seen[:3])) == 3
        assert (
            len([group for group in seen if group in seen[:3]]) == 2 * 3 * 2
        )  # steps, rings, sent once and timed once


def all_reduces(cfg_sizes):
    """A probe: instead of the table, all-reduce tensors of these sizes by ring and tree; bytes claimed and counted."""

    def probe(module):
        sent, results, send = [0], [], module.exchange

        def exchange(outgoing, *args):
            sent[0] += outgoing.nbytes
            return send(outgoing, *args)

        def send_alone(tensor, *args, original=module.dist.send):
            sent[0] += tensor.nbytes
            return original(tensor, *args)

        def instead_of_the_table(cfg):
            rank = module.dist.get_rank()
            groups = [module.dist.new_group() for _ in range(3)]
            for size in cfg_sizes:
                for rings in 0, 1, 3:
                    x = torch.arange(size, dtype=torch.float64) * (rank + 1) + rank
                    sum_of_all = x.clone()
                    module.dist.all_reduce(sum_of_all)
                    before = sent[0]
                    claimed = module.ring_all_reduce(x, groups[:rings]) if rings else module.tree_all_reduce(x)
                    results.append((size, rings, claimed, sent[0] - before, torch.equal(x, sum_of_all)))

        module.exchange, module.dist.send, module.print_table = exchange, send_alone, instead_of_the_table
        return lambda: results

    return probe


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_ring_and_tree(world):
    """Equal to the library's sum, also where nothing divides; bytes by the formulas, counted where they are sent."""
    sizes = [1, 7, world * 3 * 8, 1000]
    ranks = launch(COLLECTIVES, world, "--device cpu", probe=all_reduces(sizes), save=False).probes
    for rank, results in enumerate(ranks):
        assert len(results) == 3 * len(sizes)
        for size, rings, claimed, counted, right in results:
            assert right and claimed == counted, (rank, size, rings, claimed, counted)
            if rings and size == world * 3 * 8:
                assert counted == 2 * (world - 1) * size * 8 // world
            if not rings and world in (2, 4):
                assert counted == size * 8 * {2: 1, 4: 2}[world]
    for rings in 1, 3:  # where chunks are uneven, the ranks together still send 2 (N-1) K
        assert all(
            sum(results[i][3] for results in ranks) == 2 * (world - 1) * size * 8
            for i, (size, r, *_) in enumerate(ranks[0])
            if r == rings
        )


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--smallest 5", ["--smallest 5", "multiple of 4"]),
        ("--smallest 0", ["--smallest 0", "multiple of 4"]),
        ("--repeats 0", ["--repeats 0", "at least 1"]),
        ("--rings 0", ["--rings 0", "at least 1"]),
        ("--largest 4", ["--largest 4", "--smallest 1024"]),
        ("--device cuda", ["--device cuda", "GPUs for"]),
    ],
)
def test_bad_flags(flags, words, monkeypatch):
    module = load(COLLECTIVES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torch.cuda.device_count() + 1))
    monkeypatch.setattr(sys, "argv", [COLLECTIVES, "--device", "cpu", *flags.split()])
    with pytest.raises(SystemExit) as end:
        module.check(module.parse_config(), 2)
    assert "\n" not in end.value.code and all(word in end.value.code for word in words), end.value.code


def test_bad_flags_end_before_there_is_a_process_group():
    with pytest.raises(RankFailed, match="--rings 0") as failure:
        launch(COLLECTIVES, 2, "--device cpu --rings 0", probe=probes.never_a_process_group, timeout=60, save=False)
    assert len(failure.value.output.splitlines()) == 1


def test_collectives_need_two():
    module = load(COLLECTIVES)
    with pytest.raises(SystemExit, match="at least 2 processes"):
        module.check(module.Config(device="cpu"), 1)
