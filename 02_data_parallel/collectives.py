"""Collectives: what each of them does, all-reduce built from send and receive, and how fast messages of all sizes are.

All-reduce of K bytes on N ranks takes steps · latency + bytes / bandwidth:
1. Ring: in N chunks, N-1 steps sum each chunk on its way around, N-1 more pass the sums on. A rank sends 2·(N-1)/N·K
   bytes, the least unless the switch reduces (NVLink SHARP: about K).
2. Recursive doubling: log2(N) steps, the fewest. Each exchanges all K bytes with a partner 1, 2, 4 ... ranks away.
3. Double binary tree (NCCL's, between nodes): each of two trees reduces one half to its root and broadcasts the sum, in
   C chunks and 2·log2(N) + C-1 steps. Inner nodes of one tree are leaves of the other: no rank sends more than 2·K.

Parent:   none, it trains nothing
Run:      torchrun --nproc_per_node 4 02_data_parallel/collectives.py
Source:   Thakur et al. 2005, Collective Communication in MPICH; Sanders et al. 2009, Two-tree algorithms
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

# ------------------------------------------------------------------------------------------------------------ config


@dataclass(frozen=True)
class Config:
    """Every field is a flag."""

    rings: int = 4  # rings that run at once, each on a part of the tensor; a single one does not fill NVLink
    trees: int = 4  # trees that run at once, in pairs, each on a part of the tensor
    chunk: int = 1 << 23  # bytes of the chunks in which a tree passes on its part
    smallest: int = 1 << 10  # bytes of the shortest message in the table
    largest: int = 1 << 24  # bytes of the longest; on GPUs use 268435456
    repeats: int = 10  # timed runs per cell; the table shows their median
    device: Literal["cuda", "cpu"] = "cuda"  # cpu where torch finds no GPU


# ----------------------------------------------------------------------------------------------------- communication
def examples(cfg: Config) -> list[tuple[str, str, Tensor, Tensor]]:
    """Run every collective on a small tensor; return its name, what it does, this rank's tensor before and after."""
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(n, device=cfg.device) + 10 * rank  # rank 2 of 4 has 20 21 22 23
    shown = []

    def show(name: str, what: str, before: Tensor, after: Tensor | list[Tensor]) -> None:
        shown.append((name, what, before, after if isinstance(after, Tensor) else torch.cat(after)))

    x = tensor.clone()
    dist.broadcast(x, 0)  # K bytes leave rank 0, in a chain or a tree
    show("broadcast", "the tensor of rank 0, to all", tensor, x)
    x = tensor.clone()
    dist.reduce(x, 0)  # K bytes from every other rank; what the others then hold is unspecified
    show("reduce", "the sum, to rank 0", tensor, x if rank == 0 else x[:0])
    x = tensor.clone()
    dist.all_reduce(x)  # 2·(N-1)/N·K bytes out and in per rank
    show("all-reduce", "the sum, to all", tensor, x)
    parts = [torch.empty_like(tensor[:1]) for _ in range(n)]
    dist.gather(tensor[:1], parts if rank == 0 else None, 0)  # K bytes from every other rank
    show("gather", "the tensors of all, to rank 0", tensor[:1], parts if rank == 0 else tensor[:0])
    parts = [torch.empty_like(tensor[:1]) for _ in range(n)]
    dist.all_gather(parts, tensor[:1])  # (N-1)·K bytes out and in per rank
    show("all-gather", "the tensors of all, to all", tensor[:1], parts)
    x = torch.empty_like(tensor[:1])
    dist.scatter(x, list(tensor.chunk(n)) if rank == 0 else None, 0)  # K/N bytes to every other rank
    show("scatter", "the shards of rank 0, one to each", tensor if rank == 0 else tensor[:0], x)
    x = torch.empty_like(tensor[:1])
    dist.reduce_scatter(x, list(tensor.chunk(n)))  # (N-1)/N·K bytes out and in per rank
    show("reduce-scatter", "the sum, one shard to each", tensor, x)
    x = torch.empty_like(tensor)
    dist.all_to_all_single(x, tensor)  # (N-1)/N·K bytes out and in per rank
    show("all-to-all", "shard i of each, to rank i: a transpose", tensor, x)
    return shown


def barrier(cfg: Config) -> tuple[float, float]:
    """Sleep rank/10 seconds, then wait at a barrier; return when this rank reached and left it, by the host's clock."""
    time.sleep(dist.get_rank() / 10)
    arrival = time.monotonic()
    dist.barrier()  # no data
    if cfg.device == "cuda":
        torch.cuda.synchronize()  # the clock is the CPU's
    return arrival, time.monotonic()


def exchange(
    sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Start to send and to receive (tensor, rank) pairs in one batch; return the works to wait on.

    Without the batch NCCL runs them one after another, and ranks that all send first deadlock.
    """
    batch = [dist.P2POp(dist.isend, tensor, to, group=group) for tensor, to in sends]
    batch += [dist.P2POp(dist.irecv, tensor, source, group=group) for tensor, source in receives]
    return dist.batch_isend_irecv(batch) if batch else []  # out and in: these tensors; finish waits


def finish(works: list[dist.Work], sums: list[tuple[Tensor, Tensor]]) -> None:
    """Wait for transfers, then add each received buffer to its target."""
    for work in works:
        work.wait()
    for buffer, target in sums:
        target.add_(buffer)


def ring_all_reduce(x: Tensor, rings: list[dist.ProcessGroup]) -> int:
    """Replace x, contiguous, by its sum over the ranks; return how many bytes this rank has sent.

    N-1 steps sum every chunk on its way around, N-1 more pass the sums on.
    rings: groups of all ranks, each with its own communicator. Each reduces one part of x, all at the same time: while
    one adds, another transfers, and together they fill links that a single one does not.
    """
    rank, n, sent = dist.get_rank(), dist.get_world_size(), 0
    parts = [part.tensor_split(n) for part in x.view(-1).tensor_split(len(rings))]  # a part per ring, in n chunks
    buffers = [torch.empty_like(chunks[0]) for chunks in parts]  # the first chunk is the longest
    transfers = [([], []) for _ in rings]
    for step in range(2 * (n - 1)):
        for i, chunks in enumerate(parts):
            finish(*transfers[i])
            outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
            if step < n - 1:  # reduce-scatter: add to the partial sum of a chunk, which the left neighbour sends
                buffer = buffers[i][: incoming.numel()]
                sums = [(buffer, incoming)]
            else:  # all-gather: a finished sum replaces the partial one
                buffer, sums = incoming, []
            # A chunk, 1/N of the part, out to the right and one in from the left; the ring's next step waits for both.
            works = exchange([(outgoing, (rank + 1) % n)], [(buffer, (rank - 1) % n)], rings[i])
            transfers[i] = works, sums
            sent += outgoing.nbytes
    for transfer in transfers:
        finish(*transfer)
    return sent


def recursive_doubling_all_reduce(x: Tensor) -> int:
    """Replace x by its sum over the ranks; return how many bytes this rank has sent.

    In each step a rank exchanges all of x with a partner 1, 2, 4 ... ranks away. Ranks beyond a power of two first add
    their tensor to a partner's, and last get the sum.
    """
    rank, n, theirs, sent = dist.get_rank(), dist.get_world_size(), torch.empty_like(x), 0
    core = 1 << (n.bit_length() - 1)  # the largest power of two; each rank beyond it has a partner below it
    extra = rank + core if rank + core < n else None
    if rank >= core:
        dist.send(x, rank - core)  # K bytes out; waits until the partner receives
        sent += x.nbytes
    elif extra:
        dist.recv(theirs, extra)  # K bytes in; waits for them
        x.add_(theirs)
    distance = 1
    while rank < core and distance < core:
        partner = rank ^ distance
        finish(exchange([(x, partner)], [(theirs, partner)], None), [(theirs, x)])  # K bytes out and in; waits for both
        sent += x.nbytes
        distance *= 2  # groups of this many ranks now hold the same sum
    if rank >= core:
        dist.recv(x, rank - core)  # K bytes in; waits for them
    elif extra:
        dist.send(x, extra)  # K bytes out; waits until the partner receives
        sent += x.nbytes
    return sent


def binary_tree(rank: int, n: int, shift: int) -> tuple[list[int], list[int], int]:
    """Return a rank's parent (none for the root), children and depth in a binary tree over n ranks.

    The parent of a position: clear its lowest set bit and set the next one, or only clear it where that would be beyond
    the last position. 0 is the root, with one child; odd positions are leaves. Of 8:

        0 --- 4 --- 2 --- 1
              |     `---- 3
              `---- 6 --- 5
                    `---- 7

    Rank (p + shift) modulo n takes position p.
    """
    parent = {}
    for position in range(1, n):
        low = position & -position
        above = (position - low) | (low << 1)
        parent[(position + shift) % n] = ((above if above < n else position - low) + shift) % n
    parents = [parent[rank]] if rank in parent else []
    children = [child for child in parent if parent[child] == rank]
    depth = 0
    while rank in parent:
        rank, depth = parent[rank], depth + 1
    return parents, children, depth


def double_tree_all_reduce(x: Tensor, trees: list[dist.ProcessGroup], chunk: int) -> int:
    """Replace x, contiguous, by its sum over the ranks; return how many bytes this rank has sent.

    Each tree reduces its part to its root, and broadcasts the sum.
    trees: an even number of groups of all ranks. Two reduce one half of x each, at the same time; more pairs fill more
    links. Each has its own communicator, which must exist: not all ranks take part in the first step of a tree.
    Tree i is shifted by i ranks, so the inner nodes of a tree are leaves of the next (NCCL mirrors it if n is even).
    If n is odd, one rank is an inner node of both trees of a pair, but has a single child in each.
    chunk: elements per chunk. From depth d, chunk c goes up in step c + height - d, and its sum down in c + height + d:
    chunks follow each other, up and down at once. Both ends start a transfer in the same step, so no rank waits for one
    that another starts later.
    """
    rank, n, sent = dist.get_rank(), dist.get_world_size(), 0
    height = (n - 1).bit_length()  # the largest depth, log2(n) rounded up
    parts = [part.split(chunk) for part in x.view(-1).tensor_split(len(trees))]  # a part per tree, in chunks
    nodes = [binary_tree(rank, n, shift) for shift in range(len(trees))]
    buffers = [[torch.empty_like(part[0]) for _ in node[1]] for part, node in zip(parts, nodes)]  # one per child
    transfers = [([], []) for _ in trees]
    for step in range(2 * height + len(parts[0]) - 1):
        for i, (part, (parents, children, depth)) in enumerate(zip(parts, nodes)):
            finish(*transfers[i])
            up, down = step - height + depth, step - height - depth  # the chunks to send; those after them arrive
            sends, receives, sums = [], [], []
            if 0 <= up < len(part):
                sends += [(part[up], parent) for parent in parents]
            if 0 <= down < len(part):
                sends += [(part[down], child) for child in children]
            if 0 <= up + 1 < len(part):  # the children's partial sums, to add to this rank's chunk
                target = part[up + 1]
                sums = [(buffer[: target.numel()], target) for buffer in buffers[i]]
                receives += [(buffer, child) for (buffer, _), child in zip(sums, children)]
            if 0 <= down + 1 < len(part):  # the finished sum, which replaces the partial one
                receives += [(part[down + 1], parent) for parent in parents]
            # Up to 3 chunks out and 3 in, to and from parent and children; the tree's next step waits for all of them.
            transfers[i] = exchange(sends, receives, trees[i]), sums
            sent += sum(tensor.nbytes for tensor, _ in sends)
    for transfer in transfers:
        finish(*transfer)
    return sent


def seconds(cfg: Config, collective: Callable, *args: object) -> float:
    """Return the median time of a collective on the slowest rank, in seconds, after two warm-up runs.

    On GPUs, time a CUDA graph of it: launched one by one from Python, the steps of a ring would wait for Python.
    """
    for _ in range(2):
        collective(*args)
    if cfg.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            collective(*args)
        collective, args = graph.replay, ()
    taken = []
    for _ in range(1 + cfg.repeats):  # the first replay also loads the graph
        dist.barrier()  # no data, so that the time does not include waiting for a late rank
        if cfg.device == "cuda":
            torch.cuda.synchronize()  # until the barrier itself is over
        start = time.perf_counter()
        collective(*args)
        if cfg.device == "cuda":
            torch.cuda.synchronize()  # until the sum is there, not only the launch
        taken.append(time.perf_counter() - start)
    median = torch.tensor([statistics.median(taken[1:])], device=cfg.device, dtype=torch.float64)
    dist.all_reduce(median, dist.ReduceOp.MAX)  # 8 bytes per rank
    return median.item()


# -------------------------------------------------------------------------------------------------------------- main
def print_examples(cfg: Config) -> None:
    """Print what every rank holds before and after each collective, and when it reaches and leaves a barrier."""
    texts = [None] * dist.get_world_size()
    shown = [
        (name, what, *(" ".join(map(str, x.tolist())) or "-" for x in pair)) for name, what, *pair in examples(cfg)
    ]
    dist.all_gather_object(texts, (shown, barrier(cfg)))  # under 1 KB of text per rank, printed by rank 0; all wait
    if dist.get_rank() > 0:
        return
    for rows in zip(*(shown for shown, _ in texts)):
        print(f"{rows[0][0]}: {rows[0][1]}")
        for rank, (_, _, before, after) in enumerate(rows):
            print(f"    rank {rank}    {before:>{3 * len(rows)}}  ->  {after}")
    print("barrier: no rank leaves before the last has come")
    first = min(arrived for _, (arrived, _) in texts)
    for rank, (_, (arrived, left)) in enumerate(texts):
        print(f"    rank {rank}    comes after {arrived - first:.2f} s, leaves after {left - first:.2f} s")


def print_table(cfg: Config) -> None:
    """Print time and bandwidth of all-reduce by message size, for the library and for the three algorithms.

    Algorithm bandwidth is K / time. Bus bandwidth is 2·(N-1)/N·K / time: what each link carries if every rank sends the
    least that all-reduce needs without reduction inside the switch. Compare it with the link's own bandwidth, for any
    number of ranks. A library that uses NVLink SHARP may exceed that: its ranks send less.
    """
    n, library = dist.get_world_size(), "NCCL" if cfg.device == "cuda" else "gloo"
    groups = [dist.new_group() for _ in range(max(cfg.rings, cfg.trees))]
    for group in groups:
        dist.barrier(group)  # no data, as all must for NCCL to create the group's communicator
    rows, size = [], cfg.smallest
    while size <= cfg.largest:
        x = torch.zeros(size // 4, device=cfg.device)
        ours = (
            (ring_all_reduce, x, groups[: cfg.rings]),
            (recursive_doubling_all_reduce, x),
            (double_tree_all_reduce, x, groups[: cfg.trees], cfg.chunk // 4),
        )
        sent = torch.tensor([call(*args) for call, *args in ours], device=cfg.device)
        rows.append((size, [seconds(cfg, *call) for call in ((dist.all_reduce, x), *ours)]))
        size *= 4
    dist.all_reduce(sent, dist.ReduceOp.MAX)  # 24 bytes per rank
    if dist.get_rank() > 0:
        return
    names = "ring", "recursive doubling", "double tree"
    print(f"\nall-reduce on {n} ranks; GB/s: algorithm bandwidth | bus bandwidth; {cfg.rings} rings, {cfg.trees} trees")
    print("bytes".rjust(12) + "".join(f"{name:>30}" for name in (library, *names)) + "   ring / " + library)
    latency, longest = rows[0][1][0], rows[-1][1][0]  # the library's
    half = latency * rows[-1][0] / max(longest - latency, 1e-9)  # bytes at which latency is half of the time
    for i, (size, times) in enumerate(rows):
        if size > half and (i == 0 or rows[i - 1][0] <= half):
            print(f"------------ from {half:,.0f} bytes on, bandwidth counts for more than latency")
        cells = [f"{t * 1e6:,.0f} us {size / t / 1e9:7.2f} |{2 * (n - 1) / n * size / t / 1e9:7.2f}" for t in times]
        print(f"{size:12,}" + "".join(f"{cell:>30}" for cell in cells) + f"{times[0] / times[1]:10.0%}")
    ratios = ", ".join(f"{name} {most / x.nbytes:.3f}" for name, most in zip(names, sent.tolist()))
    print(f"most bytes sent by a rank, in sizes of the tensor: {ratios}; 2(N-1)/N is {2 * (n - 1) / n:.3f}")


def parse_config() -> Config:
    """Read the command line. Flags override the defaults of Config."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
        argument_default=argparse.SUPPRESS,  # a flag that is not given is not in the result
        allow_abbrev=False,
    )
    for field in fields(Config):
        choices = get_args(field.type) or None
        text = f"default: {field.default}"
        parser.add_argument(f"--{field.name}", type=type(field.default), choices=choices, help=text)
    given = vars(parser.parse_args())
    defaults = {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    return Config(**{**defaults, **given})


def check(cfg: Config, world: int) -> None:
    """Exit with one line that names the invalid flag, its value, and what would work."""
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    problems = [
        (world < 2, f"start it with torchrun --nproc_per_node 4 {os.path.relpath(__file__)}, at least 2 processes"),
        (cfg.rings < 1, f"--rings {cfg.rings}: must be at least 1"),
        (cfg.trees < 2 or cfg.trees % 2, f"--trees {cfg.trees}: must be a multiple of 2"),
        (cfg.chunk < 4 or cfg.chunk % 4, f"--chunk {cfg.chunk}: must be a multiple of 4, one element"),
        (cfg.smallest < 4 or cfg.smallest % 4, f"--smallest {cfg.smallest}: must be a multiple of 4, one element"),
        (cfg.largest < cfg.smallest, f"--largest {cfg.largest}: must be at least --smallest {cfg.smallest}"),
        (cfg.repeats < 1, f"--repeats {cfg.repeats}: must be at least 1"),
        (cfg.device == "cuda" and local > gpus, f"--device cuda: {gpus} GPUs for {local} processes, use --device cpu"),
    ]
    for wrong, problem in problems:
        if wrong:
            raise SystemExit(problem)


def main() -> None:
    cfg = parse_config()
    check(cfg, int(os.environ.get("WORLD_SIZE", 0)))
    if cfg.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo")
    print_examples(cfg)
    print_table(cfg)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
