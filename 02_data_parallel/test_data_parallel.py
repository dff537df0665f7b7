"""The data-parallel recipes train as the root does, their replicas stay alike, and they communicate what they say."""

import dataclasses
import itertools
import re
import subprocess

import compare
import equivalence
import probes
import pytest
import simulation
import torch
from launch import ROOT, RankFailed, launch, load

NAIVE, OVERLAP, BUCKETED = (f"02_data_parallel/{name}.py" for name in ("naive", "overlap", "bucketed"))
NO_SYNC, COPY_ENGINES, DILOCO = (f"02_data_parallel/{name}.py" for name in ("no_sync", "copy_engines", "diloco"))
COLLECTIVES, ACCELERATE = "02_data_parallel/collectives.py", "02_data_parallel/accelerate_ddp.py"
SMALL = "--device cpu --layers 2 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8"
FLAGS = {
    NAIVE: "",
    OVERLAP: "",
    BUCKETED: "--bucket_mb 0.02",
    NO_SYNC: "--bucket_mb 0.02 --microbatches 2",
    COPY_ENGINES: "--bucket_mb 0.02",
    DILOCO: "--inner_steps 2",
    "02_data_parallel/torch_ddp.py": "",
    ACCELERATE: "",
}
every_recipe = pytest.mark.parametrize("recipe", FLAGS)


@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0].startswith("02")])
def test_equals_root(recipe, world, flags):
    equivalence.check(recipe, world, flags)


def test_diloco_equals_its_simulation():
    simulation.check()


def weights_of_this_rank(module):
    """A probe: the weights after training, as bytes."""
    models, original = [], module.build_model
    module.build_model = lambda cfg: models.append(original(cfg)) or models[0]
    return lambda: {name: p.numpy().tobytes() for name, p in models[0].state_dict().items()}


@every_recipe
def test_replicas_agree_to_the_bit(recipe):
    first, *others = launch(recipe, 4, f"{SMALL} {FLAGS[recipe]} --steps 3", probe=weights_of_this_rank).probes
    assert all(replica == first for replica in others)


def one_sequence_alone_runs_a_block(module):
    """A probe: only the first sequence of a global batch goes through block 2; a rank without it never runs it."""
    batches, make_batch, ran = [], module.make_batch, [0]
    module.make_batch = lambda *args: batches.append(make_batch(*args)) or batches[-1]

    def forward(self, ids):
        rope = module.rope_table(self.cfg, torch.arange(ids.shape[1], device=ids.device))
        x = self.model.embed_tokens(ids).to(getattr(torch, self.cfg.dtype))
        chosen = (ids == batches[0][0][0]).all(1)
        for i, block in enumerate(self.model.layers):
            if i != 2:
                x = block(x, rope)
            elif chosen.any():
                ran[0] += 1
                x = torch.where(chosen[:, None, None], block(x, rope), x)
        return self.lm_head(self.model.norm(x))

    module.Model.forward = forward
    return lambda: ran[0]


@pytest.mark.parametrize("recipe", [NAIVE, OVERLAP, BUCKETED, NO_SYNC, COPY_ENGINES])
def test_parameters_without_gradient_on_some_ranks(recipe):
    """... count as zero there; the sum is right, in whatever order, and whatever bucket, they are reduced."""
    init = equivalence.start(equivalence.root_of(recipe), f"{equivalence.SHAPE}")
    common = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --init {init}"
    common += f" {equivalence.GRADIENT}"
    theirs = launch(equivalence.root_of(recipe), 1, common, probe=one_sequence_alone_runs_a_block)
    ours = launch(recipe, 3, f"{common} {FLAGS[recipe]}", probe=one_sequence_alone_runs_a_block, timeout=60)
    assert theirs.probes == [1] and ours.probes == [1, 0, 0]
    errors = compare.relative_errors(ours.weights, theirs.weights, compare.read(init)[0])
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], recipe)


def watch_backward() -> list[bool]:
    """Whether backward is running, in a list of one."""
    running, backward = [False], torch.Tensor.backward

    def watched(*args, **kwargs):
        running[0] = True
        backward(*args, **kwargs)
        running[0] = False

    torch.Tensor.backward = watched
    return running


def collectives(module):
    """A probe: (size, whether it is asynchronous, whether backward is still running) of every all-reduce."""
    seen, running, all_reduce = [], watch_backward(), module.dist.all_reduce

    def counting(tensor, *args, async_op=False, **kwargs):
        seen.append((tensor.numel(), async_op, running[0]))
        return all_reduce(tensor, *args, async_op=async_op, **kwargs)

    module.dist.all_reduce = counting
    return lambda: seen


def buckets_by_hand(sizes: list[int], limit: float) -> list[int]:
    """Sizes of the buckets of parameters of these sizes, in backward's order: full before they would pass the limit."""
    buckets = [0]
    for size in sizes:
        most = min(limit, 2**20) if len(buckets) == 1 else limit
        if buckets[-1] and 4 * (buckets[-1] + size) > most:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def names_in_order(recipe: str) -> list[str]:
    """Names of the parameters, in the order of the model."""
    module = load(recipe)
    with torch.device("meta"):
        return [
            name
            for name, _ in module.Model(module.Config(layers=2, dim=32, heads=4, kv_heads=2, ffn=48)).named_parameters()
        ]


@pytest.mark.parametrize("recipe", [NAIVE, OVERLAP])
def test_one_all_reduce_per_parameter(recipe):
    """... and one for the logged loss; naive's after backward, overlap's while it runs."""
    run = launch(recipe, 2, f"{SMALL} --steps 1", probe=collectives)
    sizes = [p.numel() for p in run.weights.values()]
    for seen in run.probes:
        assert sorted(size for size, *_ in seen) == sorted([*sizes, 1])
        hidden = [size for size, asynchronous, running in seen if asynchronous and running]
        assert len(hidden) == (len(sizes) if recipe == OVERLAP else 0)


@pytest.mark.parametrize("mb", [0, 0.005, 0.02, 100])
@pytest.mark.parametrize("recipe", [BUCKETED, NO_SYNC, COPY_ENGINES])
def test_one_reduction_per_bucket(recipe, mb):
    """... while the last backward runs, once per step; smaller than any parameter, or larger than the model."""
    probe = reductions_by_copying if recipe == COPY_ENGINES else collectives
    run = launch(recipe, 2, f"{SMALL} {FLAGS[recipe]} --bucket_mb {mb} --steps 3", probe=probe)
    sizes = [run.weights[name].numel() for name in names_in_order(recipe)[::-1]]
    wanted = buckets_by_hand(sizes, mb * 2**20)
    assert {0: len(wanted) == len(sizes), 100: len(wanted) == 1}.get(mb, 1 < len(wanted) < len(sizes))
    for seen in run.probes:
        hidden = [size for size, asynchronous, running in seen if asynchronous and running]
        assert hidden == 3 * wanted and len(seen) == 3 * (len(wanted) + (recipe != COPY_ENGINES))


def reductions_by_copying(module):
    """A probe: as collectives, of the all-reduce of copy_engines.py, which runs beside backward on a GPU's stream."""
    seen, running, all_reduce = [], watch_backward(), module.all_reduce

    def counting(shared, bucket):
        seen.append((shared.sizes[bucket], True, running[0]))
        all_reduce(shared, bucket)

    module.all_reduce = counting
    return lambda: seen


def test_the_first_bucket_is_small():
    """1 MiB, where the first gradients are smaller than that: the default model has 6 MiB of them."""
    module = load(BUCKETED)
    cfg = module.Config(device="cpu")
    with torch.device("meta"):
        buckets = module.make_buckets(cfg, module.Model(cfg))
    first, second = (sum(p.nbytes for p in bucket) for bucket in buckets)
    assert first <= 2**20 < first + buckets[1][0].nbytes and second > 2**20


def barriers(module):
    """A probe: how often a rank waits at barriers of shared memory in a step, and how many buckets there are."""
    count, share = [0], module.share
    sizes_of_buckets = []

    def counting(cfg, sizes):
        shared = share(cfg, sizes)
        sizes_of_buckets.extend(sizes)

        def barrier():
            count[0] += 1
            shared.barrier()

        return dataclasses.replace(shared, barrier=barrier)

    module.share = counting
    return lambda: (count[0], len(sizes_of_buckets))


def test_barriers_of_copy_engines():
    """Two per bucket, and a last one: without it a rank would change gradients that another still copies."""
    for count, buckets in launch(COPY_ENGINES, 2, f"{SMALL} {FLAGS[COPY_ENGINES]} --steps 3", probe=barriers).probes:
        assert buckets > 2 and count == 3 * (2 * buckets + 1)


def bytes_copied(module):
    """A probe: bytes that all_reduce copies from the memory of other ranks, and bytes of all gradients."""
    copied, shared = [0], []
    share, copy = module.share, torch.Tensor.copy_

    def watched(cfg, sizes):
        shared.append(share(cfg, sizes))
        return shared[0]

    def counting(self, other, *args):
        starts = [b.data_ptr() for b in shared[0].buffers] if shared else []
        size = shared[0].buffers[0].nbytes if shared else 0
        rank = module.dist.get_rank()
        if any(start <= other.data_ptr() < start + size for r, start in enumerate(starts) if r != rank):
            copied[0] += other.nbytes
        return copy(self, other, *args)

    module.share, torch.Tensor.copy_ = watched, counting
    return lambda: [copied[0], shared[0].buffers[0].nbytes]


def test_bytes_of_copy_engines():
    """2 (dp-1)/dp of the bytes of the gradients come in, on every rank."""
    for copied, total in launch(COPY_ENGINES, 4, f"{SMALL} {FLAGS[COPY_ENGINES]} --steps 1", probe=bytes_copied).probes:
        assert copied == 2 * 3 * total // 4


def waits(module):
    """A probe: how many asynchronous all-reduces were waited for when the gradients' norm is taken, and of how many."""
    started, waited, all_reduce, clip = [0], [0], module.dist.all_reduce, module.clip_gradients
    at_clip = []

    class Watched:
        def __init__(self, work):
            self.work = work

        def wait(self):
            waited[0] += 1
            return self.work.wait()

    def watched(tensor, *args, async_op=False, **kwargs):
        work = all_reduce(tensor, *args, async_op=async_op, **kwargs)
        started[0] += async_op
        return Watched(work) if async_op else work

    def clipped(*args):
        at_clip.append((waited[0], started[0]))
        return clip(*args)

    module.dist.all_reduce, module.clip_gradients = watched, clipped
    return lambda: at_clip


@pytest.mark.parametrize("recipe", [OVERLAP, BUCKETED, NO_SYNC])
def test_each_reduction_is_waited_for_once(recipe):
    for ((waited, started),) in launch(recipe, 2, f"{SMALL} {FLAGS[recipe]} --steps 1", probe=waits).probes:
        assert waited == started > 0


def gradients_in_buckets(module):
    """A probe: whether, after backward, the gradients of each bucket are views into one piece of memory, end to end."""
    together, original = [], module.backward

    def backward(cfg, model, loss):
        original(cfg, model, loss)
        for bucket in module.make_buckets(cfg, model):
            for p, q in itertools.pairwise(bucket):
                same = p.grad.untyped_storage().data_ptr() == q.grad.untyped_storage().data_ptr()
                together.append(same and p.grad.data_ptr() + p.grad.nbytes == q.grad.data_ptr())

    module.backward = backward
    return lambda: together


@pytest.mark.parametrize("recipe", [BUCKETED, NO_SYNC, COPY_ENGINES])
def test_gradients_are_views_into_their_bucket(recipe):
    for together in launch(recipe, 2, f"{SMALL} {FLAGS[recipe]} --steps 1", probe=gradients_in_buckets).probes:
        assert len(together) > 5 and all(together)


def test_diloco_communicates_once_per_round():
    """4 steps in rounds of 2: each parameter twice, and nothing else, not even for the log."""
    run = launch(DILOCO, 2, f"{SMALL} --inner_steps 2 --steps 4", probe=collectives)
    sizes = [p.numel() for p in run.weights.values()]
    assert [sorted(size for size, *_ in seen) for seen in run.probes] == [sorted(2 * sizes)] * 2


def test_valid_tokens_differ_between_ranks():
    """Else a mean over ranks would look like the sum, and the equivalence above could not tell them apart."""
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} --steps 1"
    sequences = launch(NAIVE, 1, flags, probe=probes.valid_tokens).probes[0]
    ranks = [sum(sequences[rank * 3 : rank * 3 + 3]) for rank in range(4)]
    assert len(set(ranks)) == 4, ranks


@every_recipe
def test_batch_must_divide(recipe):
    with pytest.raises(RankFailed) as failure:
        launch(recipe, 3, "--device cpu --batch 16", probe=probes.never_a_process_group, timeout=60)
    (line,) = failure.value.output.splitlines()
    assert "--batch 16" in line and "processes, 3" in line


@pytest.mark.parametrize(
    "recipe, flags, words",
    [
        (NO_SYNC, "--microbatches 3", ["--microbatches 3", "8 sequences", "--batch 16"]),
        (NO_SYNC, "--microbatches 0", ["--microbatches 0", "at least 1"]),
        (BUCKETED, "--bucket_mb -1", ["--bucket_mb -1", "at least 0"]),
        (DILOCO, "--inner_steps 0", ["--inner_steps 0", "at least 1"]),
        (DILOCO, "--outer_lr -1", ["--outer_lr -1", "at least 0"]),
        (DILOCO, "--outer_momentum 1", ["--outer_momentum 1.0", "below 1"]),
        (COLLECTIVES, "--smallest 5", ["--smallest 5", "multiple of 4"]),
        (COLLECTIVES, "--rings 0", ["--rings 0", "at least 1"]),
        (COLLECTIVES, "--largest 4", ["--largest 4", "--smallest 1024"]),
        (COLLECTIVES, "--device cuda", ["--device cuda", "GPUs for"]),
    ],
)
def test_bad_flags(recipe, flags, words, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torch.cuda.device_count() + 1 if "cuda" in flags else 2))
    with pytest.raises(RankFailed) as failure:
        launch(recipe, 2, f"--device cpu {flags}", probe=probes.never_a_process_group, timeout=60, save=False)
    (line,) = failure.value.output.splitlines()
    assert all(word in line for word in words), line


def test_copy_engines_need_one_host(monkeypatch):
    module = load(COPY_ENGINES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="--nnodes 2"):
        module.check(module.Config(device="cpu"), 4)


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


@pytest.mark.parametrize("recipe", [NAIVE, BUCKETED])
def test_a_failing_rank_ends_the_run(recipe):
    with pytest.raises(RankFailed, match="rank 1 has had enough|Connection closed"):
        launch(recipe, 4, f"{SMALL} --steps 9", probe=dies_after_the_first_step, timeout=60)


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nproc_per_node", "2", BUCKETED, "--device", "cpu"],
        [
            "accelerate",
            "launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            ACCELERATE,
            "--device",
            "cpu",
        ],
    ],
    ids=["torchrun", "accelerate"],
)
def test_as_a_user_types_it(command):
    end = subprocess.run([*command, "--steps", "2"], cwd=ROOT, text=True, capture_output=True, check=True, timeout=120)
    assert [line.split("  loss")[0].strip() for line in end.stdout.splitlines()] == ["step 1", "step 2", "median"]


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
        assert {name: before for name, before, _ in shown}["all-reduce"] == numbers[rank]
    printed = run.output[0]
    sent = float(re.search(r"ring ([\d.]+)", printed.splitlines()[-1])[1])
    assert abs(sent - 2 * (n - 1) / n) < 0.02 and not any(run.output[1:])  # the chunks of 3 ranks are not equally long
    times = re.findall(r"comes after ([\d.]+) s, leaves after ([\d.]+) s", printed)
    comes, leaves = ([float(t) for t in column] for column in zip(*times, strict=True))
    assert len(comes) == n and max(comes) > 0.05 and min(leaves) >= max(comes) - 0.01  # printed in hundredths


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
