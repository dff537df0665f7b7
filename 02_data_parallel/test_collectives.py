"""collectives.py: every collective by its definition, three all-reduces against the library, and the printed table."""

import contextlib
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from launch import in_a_fork, launch, load

COLLECTIVES = "02_data_parallel/collectives.py"


def the_examples(module):
    """A probe: what examples() returns on this rank."""
    found, original = [], module.examples
    module.examples = lambda cfg: found.append(original(cfg)) or found[0]
    return lambda: {name: (before.tolist(), after.tolist()) for name, _, before, after in found[0]}


def test_examples_of_collectives():
    """Each collective by its definition. Nobody leaves a barrier before the last one has come."""
    n, ranks = 3, range(3)
    run = launch(COLLECTIVES, n, "--device cpu --largest 2048 --repeats 1", probe=the_examples, save=False)
    numbers = [[i + 10 * rank for i in range(n)] for rank in ranks]
    total, ones = [sum(column) for column in zip(*numbers)], [row[:1] for row in numbers]
    gathered = [row[0] for row in numbers]
    wanted = {
        "broadcast": (numbers, [numbers[0]] * n),
        "reduce": (numbers, [total, [], []]),
        "all-reduce": (numbers, [total] * n),
        "gather": (ones, [gathered, [], []]),
        "all-gather": (ones, [gathered] * n),
        "scatter": ([numbers[0], [], []], [[number] for number in numbers[0]]),
        "reduce-scatter": (numbers, [[number] for number in total]),
        "all-to-all": (numbers, [[row[rank] for row in numbers] for rank in ranks]),
    }
    for rank, shown in enumerate(run.probes):
        assert shown == {name: (before[rank], after[rank]) for name, (before, after) in wanted.items()}
    times = re.findall(r"comes after ([\d.]+) s, leaves after ([\d.]+) s", run.output[0])
    comes, leaves = ([float(t) for t in column] for column in zip(*times, strict=True))
    assert len(comes) == n and min(comes) == 0 and max(comes) > 0.05
    assert min(leaves) >= max(comes) - 0.01  # printed in hundredths


def known_times(module):
    """A probe: the library takes 10 us, the others 2, 4 and 8 times as long. Reports how many rings and trees."""
    groups = []

    def seconds(cfg, call, x, *rest):
        groups.append(len(set(rest[0])) if rest else 0)
        return 2 ** (len(groups) - 1) * 1e-5

    module.seconds = seconds
    return lambda: groups


def test_printed_bandwidth():
    """Microseconds, algorithm and bus bandwidth in GB/s of each way, and the share of the library's speed."""
    flags = "--device cpu --smallest 65536 --largest 65536 --rings 3 --trees 2"
    run = launch(COLLECTIVES, 4, flags, probe=known_times, save=False)
    assert run.probes[0] == [0, 3, 0, 2]
    (row,) = re.findall(r"^ +65,536 .*", run.output[0], re.M)
    cells = sum(((10 * times, 6.5536 / times, 1.5 * 6.5536 / times) for times in (1, 2, 4, 8)), ())
    assert [float(n) for n in re.findall(r"[\d.]+", row.replace(",", ""))] == pytest.approx([65536, *cells, 50], 0.01)


@in_a_fork
def test_seconds():
    """The median of the slowest rank, without the first replay. All ranks meet before; a GPU's launch is waited for."""
    module, seen, clock, naps, tensor = load(COLLECTIVES), [], [0.0], iter([0.5, 0.2, 0.2, 0.3]), torch.tensor

    def replay():
        seen.append("launch")
        clock[0] += next(naps)

    torch.cuda.CUDAGraph = lambda: SimpleNamespace(replay=replay)
    torch.cuda.graph = lambda graph: contextlib.nullcontext()
    torch.cuda.synchronize = lambda: seen.append("wait")
    torch.tensor = lambda *args, device, **options: tensor(*args, **options)
    module.dist.barrier = lambda: seen.append("meet")
    module.dist.all_reduce = lambda median, op: median.add_(0.05 * (op == module.dist.ReduceOp.MAX))  # a slower rank
    module.time = SimpleNamespace(perf_counter=lambda: seen.append("clock") or clock[0])
    assert module.seconds(SimpleNamespace(device="cuda", repeats=3), lambda: None) == pytest.approx(0.25)
    assert seen == ["meet", "wait", "clock", "launch", "wait", "clock"] * 4


def test_binary_trees():
    """Every tree spans all ranks and is ceil(log2(N)) deep. Inner nodes of a tree are leaves of the next.

    One rank is the exception if N is odd, as one must be: in each tree all even positions, (N+1)/2, are inner nodes.
    """
    binary_tree = load(COLLECTIVES).binary_tree
    for n in range(2, 34):
        tree, following = ([binary_tree(rank, n, shift) for rank in range(n)] for shift in (1, 2))
        for rank, (parents, children, depth) in enumerate(tree):
            assert len(parents) == (rank != 1) and len(children) <= 2, (n, rank)
            assert depth == (1 + tree[parents[0]][2] if parents else 0), (n, rank)  # so no circle: all hang on the root
            assert all(tree[child][0] == [rank] for child in children), (n, rank)
        assert max(depth for *_, depth in tree) == math.ceil(math.log2(n)), n
        inner = [{rank for rank, node in enumerate(nodes) if node[1]} for nodes in (tree, following)]
        assert inner[0] & inner[1] == ({1} if n % 2 else set()), n


def all_reduces(module):
    """A probe: instead of the table, all-reduce by every algorithm, and compare with the library and the formulas."""
    dist, groups = module.dist, []
    exchange, batch, send, finish = module.exchange, dist.batch_isend_irecv, dist.send, module.finish
    steps, batches, sent, received, alone, before = Counter(), [], [], [], [], []

    def watched_finish(works, sums):
        before.extend([len(steps)] * bool(works))
        finish(works, sums)

    def watched_exchange(sends, receives, group):
        number, rank = groups.index(group), dist.get_rank()
        steps[number] += 1
        sent.extend((number, steps[number], rank, to, x.nbytes) for x, to in sends)
        received.extend((number, steps[number], source, rank, x.nbytes) for x, source in receives)
        batches.clear()
        works = exchange(sends, receives, group)
        assert len(batches) == bool(sends or receives), "messages of a step are in several batches"
        return works

    def of_all_ranks(found):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
        return sum(gathered[1:], gathered[0])

    def compare(size):
        rank, n, chunk = dist.get_rank(), dist.get_world_size(), size // 12 + 1  # a half has up to 6 chunks
        core, height = 1 << math.floor(math.log2(n)), math.ceil(math.log2(n))
        chunks = math.ceil(math.ceil(size / 2) / chunk)
        for all_reduce, args, wanted in (  # and exchanges by group
            (module.ring_all_reduce, [groups[:1]], [2 * (n - 1)]),
            (module.ring_all_reduce, [groups[:3]], [2 * (n - 1)] * 3),
            (module.double_tree_all_reduce, [groups[:2], chunk], [2 * height + chunks - 1] * 2),
            (module.double_tree_all_reduce, [groups[:4], size], [2 * height] * 4),
            (module.recursive_doubling_all_reduce, [], None),
        ):
            for log in steps, sent, received, alone, before:
                log.clear()
            x = torch.arange(size, dtype=torch.float64) * (rank + 1) + rank
            sum_of_all = x.clone()
            dist.all_reduce(sum_of_all)
            claimed, counted = all_reduce(x, *args), sum(message[-1] for message in sent) + sum(alone)
            assert torch.equal(x, sum_of_all) and claimed == counted, (size, wanted, claimed, counted)
            assert sorted(of_all_ranks(sent)) == sorted(of_all_ranks(received)), (size, wanted)
            if wanted:  # the ranks together send 2 (N-1) K; rings, and trees, start before the first is waited for
                assert (list(steps.values()), before[0]) == (wanted, len(wanted)), (size, steps, wanted)
                assert of_all_ranks(counted) == 2 * (n - 1) * size * 8 and counted <= 2 * 8 * (size + 4)
            else:
                times = math.log2(core) + (rank + core < n) if rank < core else 1
                assert counted == times * size * 8, (size, counted)
            if all_reduce is module.ring_all_reduce and size % (3 * n) == 0:
                assert counted == 2 * (n - 1) * size * 8 // n

    def instead_of_the_table(cfg):
        groups.extend([dist.new_group() for _ in range(4)] + [None])
        for size in 1, 7, 120, 1000:
            compare(size)

    module.exchange, module.finish = watched_exchange, watched_finish
    dist.batch_isend_irecv = lambda operations: batches.append(1) or batch(operations)
    dist.send = lambda tensor, *args: alone.append(tensor.nbytes) or send(tensor, *args)
    module.print_examples, module.print_table = lambda cfg: None, instead_of_the_table
    return lambda: None


def test_all_reduce():
    """Equal to the library's sum, also where nothing divides; bytes and steps by the formulas.

    Sender and receiver start every transfer in the same step, in the only batch of that step: so NCCL cannot deadlock.
    """
    launch(COLLECTIVES, 5, "--device cpu", probe=all_reduces, save=False)


def test_flags():
    """Impossible sizes end with one line that names the flag; the smallest possible ones are not refused."""
    module = load(COLLECTIVES)
    for flag, value in dict(smallest=5, repeats=0, rings=0, trees=3, chunk=6, largest=4).items():
        with pytest.raises(SystemExit, match=f"^--{flag} {value}: must be .*$"):
            module.check(module.Config(device="cpu", **{flag: value}), 2)
    smallest = module.Config(device="cpu", smallest=4, largest=4, repeats=1, rings=1, trees=2, chunk=4)
    module.check(smallest, 2)
    with pytest.raises(SystemExit, match="at least 2 processes"):
        module.check(smallest, 1)
