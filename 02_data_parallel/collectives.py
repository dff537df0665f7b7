"""Collectives: what each of them does, all-reduce built from send and receive, and how fast messages of all sizes are.

Ring: the tensor in N chunks; N-1 steps sum a chunk on its way around, N-1 more hand the sums around. Each rank sends
2·(N-1)·K/N of K bytes, the least there can be. Tree, by recursive doubling: log2(N) exchanges of all K bytes, with
partners 1, 2, 4 ... ranks away: K·log2(N) bytes, but the fewest steps; ranks beyond a power of two hand theirs in
before, and get the sum after. Time is steps · latency + bytes / bandwidth.

Parent:   none, it trains nothing
Run:      torchrun --nproc_per_node 4 02_data_parallel/collectives.py
Source:   Thakur et al. 2005, Optimization of Collective Communication Operations in MPICH; Ultra-Scale Playbook, A0
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

    rings: int = 4  # rings at work at once, each on a part of the tensor; one alone does not fill NVLink
    smallest: int = 1 << 10  # bytes of the shortest message in the table
    largest: int = 1 << 24  # and of the longest: 268435456 for GPUs
    repeats: int = 10  # timed runs of each, of which the table has the median
    device: Literal["cuda", "cpu"] = "cuda"  # cpu where torch finds no GPU


def parse_config() -> Config:
    """Turn the command line into a Config."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, argument_default=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for f in fields(Config):
        choices = get_args(f.type) or None
        parser.add_argument(f"--{f.name}", type=type(f.default), choices=choices, help=f"default: {f.default}")
    return Config(**{"device": "cuda" if torch.cuda.is_available() else "cpu", **vars(parser.parse_args())})


def check(cfg: Config, world: int) -> None:
    """End the program with one line that names the flag that cannot work, its value, and what would."""
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    problems = [
        (world < 2, f"start it with torchrun --nproc_per_node 4 {os.path.relpath(__file__)}, at least 2 processes"),
        (cfg.rings < 1, f"--rings {cfg.rings}: must be at least 1"),
        (cfg.smallest < 4 or cfg.smallest % 4, f"--smallest {cfg.smallest}: must be a multiple of 4, a number's bytes"),
        (cfg.largest < cfg.smallest, f"--largest {cfg.largest}: must be at least --smallest {cfg.smallest}"),
        (cfg.repeats < 1, f"--repeats {cfg.repeats}: must be at least 1"),
        (cfg.device == "cuda" and local > gpus, f"--device cuda: {gpus} GPUs for {local} processes, use --device cpu"),
    ]
    for wrong, problem in problems:
        if wrong:
            raise SystemExit(problem)


# ----------------------------------------------------------------------------------------------------- communication
def examples(cfg: Config) -> list[tuple[str, str, Tensor, Tensor]]:
    """Every collective with small numbers: name, what it does, what this rank had before, what it has after."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(n, device=cfg.device) + 10 * rank  # rank 2 of 4 has 20 21 22 23
    shown = []

    def show(name: str, what: str, before: Tensor, after: Tensor | list[Tensor]) -> None:
        shown.append((name, what, before, after if isinstance(after, Tensor) else torch.cat(after)))

    x = mine.clone()
    dist.broadcast(x, 0)  # K bytes leave rank 0, in a chain or a tree; all wait for them
    show("broadcast", "rank 0's numbers, to all", mine, x)
    x = mine.clone()
    dist.reduce(x, 0)  # K bytes from each but rank 0, which waits; what the others hold then is unspecified
    show("reduce", "the sum, to rank 0", mine, x if rank == 0 else x[:0])
    x = mine.clone()
    dist.all_reduce(x)  # 2 (N-1)/N of K bytes out and in per rank; all wait for all
    show("all-reduce", "the sum, to all", mine, x)
    parts = [torch.empty_like(mine[:1]) for _ in range(n)]
    dist.gather(mine[:1], parts if rank == 0 else None, 0)  # K bytes from each to rank 0, which waits
    show("gather", "what each has, to rank 0", mine[:1], parts if rank == 0 else mine[:0])
    parts = [torch.empty_like(mine[:1]) for _ in range(n)]
    dist.all_gather(parts, mine[:1])  # N-1 times K bytes in per rank; all wait for all
    show("all-gather", "what each has, to all", mine[:1], parts)
    x = torch.empty_like(mine[:1])
    dist.scatter(x, list(mine.chunk(n)) if rank == 0 else None, 0)  # K/N bytes from rank 0 to each, who wait for them
    show("scatter", "rank 0's parts, one to each", mine if rank == 0 else mine[:0], x)
    x = torch.empty_like(mine[:1])
    dist.reduce_scatter(x, list(mine.chunk(n)))  # (N-1)/N of K bytes out and in per rank; all wait for all
    show("reduce-scatter", "the sum, a part to each", mine, x)
    x = torch.empty_like(mine)
    dist.all_to_all_single(x, mine)  # (N-1)/N of K bytes out and in per rank; all wait for all
    show("all-to-all", "part i of each, to rank i: a transpose", mine, x)
    return shown


def barrier(cfg: Config) -> tuple[float, float]:
    """When this rank, which has slept rank/10 seconds, comes to a barrier, and when it leaves; by the host's clock."""
    time.sleep(dist.get_rank() / 10)
    arrived = time.monotonic()
    dist.barrier()  # no data; all wait for all
    if cfg.device == "cuda":
        torch.cuda.synchronize()  # the clock is the CPU's
    return arrived, time.monotonic()


def exchange(outgoing: Tensor, to: int, incoming: Tensor, source: int, group: dist.ProcessGroup | None) -> list:
    """Start to send one tensor and to receive another. Both in one batch: else NCCL might wait in a circle."""
    send = dist.P2POp(dist.isend, outgoing, to, group=group)  # its bytes, to one neighbour
    receive = dist.P2POp(dist.irecv, incoming, source, group=group)  # as many, from another
    return dist.batch_isend_irecv([send, receive])  # nobody waits yet


def ring_all_reduce(x: Tensor, rings: list[dist.ProcessGroup]) -> int:
    """Replace x, contiguous, by its sum over the ranks. Returns how many bytes this rank has sent.

    rings: groups of all ranks with communicators of their own, each of which reduces a part of x at the same time as
    the others: while one adds, another transfers, and together they fill links that one alone does not.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = [part.tensor_split(n) for part in x.view(-1).tensor_split(len(rings))]  # by ring, then rank
    arriving = [torch.empty_like(chunk[0]) for chunk in chunks]  # the first chunks are the longest
    sent, transfers = 0, {}
    for step in range(2 * (n - 1)):
        for i, chunk in enumerate(chunks):
            if step > 0:
                finish(transfers[i])
            outgoing, incoming = chunk[(rank - step) % n], chunk[(rank - step - 1) % n]
            if step < n - 1:  # reduce-scatter: the sum so far of a chunk comes from the left, and grows
                buffer, target = arriving[i][: incoming.numel()], incoming
            else:  # all-gather: finished sums go around, and replace
                buffer, target = incoming, None
            works = exchange(outgoing, (rank + 1) % n, buffer, (rank - 1) % n, rings[i])
            transfers[i] = works, buffer, target
            sent += outgoing.nbytes
    for transfer in transfers.values():
        finish(transfer)
    return sent


def finish(transfer: tuple[list, Tensor, Tensor | None]) -> None:
    """Wait for a transfer and add what came to where it belongs."""
    works, buffer, target = transfer
    for work in works:
        work.wait()
    if target is not None:
        target.add_(buffer)


def tree_all_reduce(x: Tensor) -> int:
    """Replace x by its sum over the ranks, by recursive doubling. Returns how many bytes this rank has sent."""
    rank, n, theirs, sent = dist.get_rank(), dist.get_world_size(), torch.empty_like(x), 0
    core = 1 << (n.bit_length() - 1)  # the ranks beyond the largest power of two hand in theirs, and get the sum back
    extra = rank + core if rank + core < n else None
    if rank >= core:
        dist.send(x, rank - core)  # K bytes; waits until they are taken
        sent += x.nbytes
    elif extra:
        dist.recv(theirs, extra)  # K bytes; waits for them
        x.add_(theirs)
    distance = 1
    while rank < core and distance < core:
        for work in exchange(x, rank ^ distance, theirs, rank ^ distance, None):  # K bytes out and in
            work.wait()
        x.add_(theirs)  # twice as many ranks as before now have the same sum
        sent += x.nbytes
        distance *= 2
    if rank >= core:
        dist.recv(x, rank - core)  # K bytes; waits for them
    elif extra:
        dist.send(x, extra)  # K bytes; waits until they are taken
        sent += x.nbytes
    return sent


def seconds(cfg: Config, collective: Callable, *args: object) -> float:
    """Median time of a collective, on the slowest rank, after two runs that do not count.

    On GPUs a recorded CUDA graph is timed: the collective without Python, which is slower than the steps of a ring.
    """
    for _ in range(2):
        collective(*args)
    if cfg.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            collective(*args)
        collective, args = graph.replay, ()
    taken = []
    for _ in range(1 + cfg.repeats):  # the first replay loads the graph
        dist.barrier()  # a common start: waiting for a late rank is not the message's time
        if cfg.device == "cuda":
            torch.cuda.synchronize()  # the barrier itself must be over
        start = time.perf_counter()
        collective(*args)
        if cfg.device == "cuda":
            torch.cuda.synchronize()  # the time until the data is there, not until it is asked for
        taken.append(time.perf_counter() - start)
    median = torch.tensor([statistics.median(taken[1:])], device=cfg.device, dtype=torch.float64)
    dist.all_reduce(median, dist.ReduceOp.MAX)  # 8 bytes
    return median.item()


# -------------------------------------------------------------------------------------------------------------- main
def print_examples(cfg: Config) -> None:
    """What every rank has before and after each collective."""
    texts = [None] * dist.get_world_size()
    shown = [
        (name, what, *(" ".join(map(str, x.tolist())) or "-" for x in pair)) for name, what, *pair in examples(cfg)
    ]
    dist.all_gather_object(texts, (shown, barrier(cfg)))  # some text, for rank 0 to print; all wait for all
    if dist.get_rank() > 0:
        return
    for rows in zip(*(shown for shown, _ in texts)):
        print(f"{rows[0][0]}: {rows[0][1]}")
        for rank, (_, _, before, after) in enumerate(rows):
            print(f"    rank {rank}    {before:>{3 * len(rows)}}  ->  {after}")
    print("barrier: nobody leaves before the last has come")
    first = min(arrived for _, (arrived, _) in texts)
    for rank, (_, (arrived, left)) in enumerate(texts):
        print(f"    rank {rank}    comes after {arrived - first:.2f} s, leaves after {left - first:.2f} s")


def print_table(cfg: Config) -> None:
    """Time and bandwidth of all-reduce against the size of the message, by the library, the ring and the tree.

    Algorithm bandwidth is K / time. Bus bandwidth is what a link carries if each rank sends the least there can be,
    2·(N-1)/N·K bytes: it can be compared with the link's own, whatever the number of ranks.
    """
    n, rings = dist.get_world_size(), [dist.new_group() for _ in range(cfg.rings)]
    library = "NCCL" if cfg.device == "cuda" else "gloo"
    rows, size = [], cfg.smallest
    while size <= cfg.largest:
        x = torch.zeros(size // 4, device=cfg.device)
        sent = ring_all_reduce(x, rings), tree_all_reduce(x)
        calls = (dist.all_reduce, x), (ring_all_reduce, x, rings), (tree_all_reduce, x)
        rows.append((size, sent, [seconds(cfg, *call) for call in calls]))
        size *= 4
    if dist.get_rank() > 0:
        return
    print(
        f"\nall-reduce on {n} ranks; GB/s: algorithm bandwidth | bus bandwidth; the ring is {cfg.rings} rings at once"
    )
    print("bytes".rjust(12) + "".join(f"{name:>33}" for name in (library, "ring", "tree")) + "   ring / " + library)
    latency, longest = rows[0][2][0], rows[-1][2][0]  # of the library
    half = latency * rows[-1][0] / max(longest - latency, 1e-9)  # here latency is half of the time
    for i, (size, _, times) in enumerate(rows):
        if size > half and (i == 0 or rows[i - 1][0] <= half):
            print(f"------------ from {half:,.0f} bytes on, bandwidth counts for more than latency")
        cells = [f"{t * 1e6:12,.0f} us {size / t / 1e9:7.2f} |{2 * (n - 1) / n * size / t / 1e9:7.2f}" for t in times]
        print(f"{size:12,}" + "".join(f"{cell:>33}" for cell in cells) + f"{times[0] / times[1]:10.0%}")
    ratios = [f"{name} {bytes_sent / rows[-1][0]:.3f}" for name, bytes_sent in zip(("ring", "tree"), rows[-1][1])]
    print(f"sent by rank 0, of the tensor's bytes: {', '.join(ratios)}; 2(N-1)/N is {2 * (n - 1) / n:.3f}")


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
