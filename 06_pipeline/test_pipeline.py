"""The pipeline recipes train as the root does, and their schedules have the bubble and the memory of the formulas."""

import itertools
import random
import subprocess
import weakref

import equivalence
import probes
import pytest
import schedules
import torch
from launch import ROOT, RankFailed, free_port, launch, load

RECIPES = ["06_pipeline/afab.py", "06_pipeline/1f1b.py"]
SMALL = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8 --microbatches 8 --steps 1"


@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0] in RECIPES])
def test_equals_root(recipe, world, flags):
    equivalence.check(recipe, world, flags)


@pytest.mark.parametrize("recipe", RECIPES)
def test_schedule(recipe):
    """Bubble and micro-batches in flight, for as many stages and micro-batches as anyone has."""
    schedules.check(load(recipe), schedules.FLIGHT[recipe], range(1, 17), [*range(1, 18), 32, 64])


@pytest.mark.parametrize("recipe, expected", [(RECIPES[0], [8, 8, 8, 8]), (RECIPES[1], [4, 3, 2, 1])])
def test_in_flight_in_memory(recipe, expected):
    assert launch(recipe, 4, SMALL, probe=probes.activations_in_memory).probes == expected


def received_in_memory(module):
    """A probe: the most received activations that are in memory when another arrives."""
    arrived, peak, receive = [], [0], module.receive

    def watched(cfg, model, op):
        tensor = receive(cfg, model, op)
        if op == "F" and tensor is not None:
            arrived.append(weakref.ref(tensor))
            peak[0] = max(peak[0], sum(reference() is not None for reference in arrived))
        return tensor

    module.receive = watched
    return lambda: peak[0]


def test_received_activations_are_let_go():
    """One per micro-batch in flight, and that of the backward just done; none on the first stage."""
    peaks = launch(RECIPES[1], 4, SMALL, probe=received_in_memory).probes
    assert peaks[0] == 0 and all(p <= most + 1 for p, most in zip(peaks[1:], (3, 2, 1)))


def bytes_sent(module):
    """A probe: bytes handed to isend."""
    sent, original = [], module.dist.isend

    def isend(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    module.dist.isend = isend
    return lambda: sum(sent)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_sent(recipe):
    """Each micro-batch crosses a boundary as microbatch x seq x dim float32 numbers, and so does its gradient."""
    crossing = 8 * (1 * 16 * 32) * 4
    expected = [crossing, 2 * crossing, 2 * crossing, crossing]
    assert launch(recipe, 4, SMALL, probe=bytes_sent).probes == expected


@pytest.mark.parametrize("p", [2, 3, 4])
def test_executor_runs_any_valid_list(p):
    """Random orders of F and B that respect what needs what: the same weights, and nothing waits for ever."""

    def shuffled(seed):
        choose, order = random.Random(seed), [[] for _ in range(p)]
        f, b = [0] * p, [0] * p
        while min(b) < 8:
            ready = [("F", s) for s in range(p) if f[s] < 8 and (s == 0 or f[s] < f[s - 1])]
            ready += [("B", s) for s in range(p) if b[s] < f[s] and (s == p - 1 or b[s] < b[s + 1])]
            op, s = choose.choice(ready)
            order[s].append((op, (f if op == "F" else b)[s], 0))
            (f if op == "F" else b)[s] += 1
        return order

    def with_order(order):
        def probe(module):
            module.schedule = lambda stage, stages, microbatches: order[stage]
            return lambda: None

        return probe

    reference = launch(RECIPES[0], p, SMALL).weights
    for seed in range(3):
        weights = launch(RECIPES[0], p, SMALL, probe=with_order(shuffled(seed)), timeout=60).weights
        assert all(torch.equal(weights[name], reference[name]) for name in reference)


def interleaved(rank, ranks, microbatches):
    """Two chunks per rank, micro-batches in groups of as many as there are ranks (arXiv:2104.04473, section 2.2)."""
    groups = range(0, microbatches, ranks)
    forwards = [(i, chunk) for group in groups for chunk in (0, 1) for i in range(group, group + ranks)]
    backwards = [(i, 1 - chunk) for i, chunk in forwards]
    ahead = 2 * (ranks - 1 - rank) + ranks
    forwards, backwards = [("F", *f) for f in forwards], [("B", *b) for b in backwards]
    pairs = [op for pair in zip(forwards[ahead:], backwards) for op in pair]
    return forwards[:ahead] + pairs + backwards[len(forwards) - ahead :]


def two_chunks(module):
    """A probe: each of two ranks holds stages r and r + 2, and the last rank sends on to the first."""
    dist, build_model, connect = module.dist, module.build_model, module.connect

    def connect_in_a_ring(cfg):
        links = connect(cfg)
        return links | {("F", 1): dist.new_group([0, 1]), ("B", 0): dist.new_group([0, 1])}

    def build_chunks(cfg):
        rank, links = dist.get_rank(), connect_in_a_ring(cfg)
        module.connect = lambda cfg: links
        chunks = torch.nn.ModuleList()
        for stage in rank, rank + 2:
            module.Model = lambda cfg, _rank, _ranks, stage=stage, model=original: model(cfg, stage, 4)
            chunks.append(build_model(cfg))
        return chunks

    def forward_backward(cfg, chunks, inputs, targets):
        operations, tokens = interleaved(dist.get_rank(), 2, cfg.microbatches), (targets != module.IGNORE).sum()
        micro = inputs.chunk(cfg.microbatches), targets.chunk(cfg.microbatches)
        loss = module.run_schedule(cfg, list(chunks), operations, *micro, tokens)
        dist.all_reduce(loss)
        return loss

    original = module.Model
    module.build_model, module.forward_backward = build_chunks, forward_backward
    return lambda: None


def test_executor_runs_chunks():
    """A list with two chunks per rank, such as an interleaved schedule's, in the same executor."""
    schedules.simulate([interleaved(rank, 2, 8) for rank in range(2)])
    ours = launch(RECIPES[0], 2, f"{SMALL} --clip 1e9", probe=two_chunks, timeout=60)
    theirs = launch(RECIPES[0], 4, f"{SMALL} --clip 1e9")
    weights = {name.split(".", 1)[1]: tensor for name, tensor in ours.weights.items()}
    assert ours.history[0][0] == theirs.history[0][0] and set(weights) == set(theirs.weights)
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.weights.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_smallest_cases(recipe):
    """One stage, and one micro-batch: the same as on one device."""
    for world, flags in (1, "--microbatches 4"), (2, "--microbatches 1"), (3, "--microbatches 1"):
        equivalence.check(recipe, world, flags)


def test_stages_are_balanced():
    """Every layer has one stage, and no other split has a slowest stage with fewer FLOPs: head and embedding count."""
    module = load(RECIPES[0])
    shapes = [dict(dim=64, ffn=96, vocab=256), dict(dim=64, ffn=96, vocab=4096), dict(dim=512, ffn=2048, vocab=256)]
    for shape, layers, stages in itertools.product(shapes, range(2, 11), range(2, 6)):
        if layers < stages:
            continue
        cfg = module.Config(layers=layers, heads=4, kv_heads=2, **shape)
        split = module.split_layers(cfg, stages)
        assert [layer for part in split for layer in part] == list(range(layers)) and all(map(len, split))
        head = 6 * cfg.dim * cfg.vocab
        block = (module.flops_per_token(cfg) - head) / layers

        def slowest(counts, block=block, head=head, cfg=cfg):
            return max([counts[0] * block + cfg.dim, *(n * block for n in counts[1:-1]), counts[-1] * block + head])

        cuts = itertools.combinations(range(1, layers), stages - 1)
        others = [[b - a for a, b in zip((0, *cut), (*cut, layers))] for cut in cuts]
        assert slowest([len(part) for part in split]) == min(map(slowest, others))


def test_smollm_on_four_stages():
    """The head of SmolLM weighs 1.4 blocks: the last stage gets fewer layers."""
    module = load(RECIPES[0])
    cfg = module.Config(**module.PRESETS["smollm_1_7b"])
    assert [len(part) for part in module.split_layers(cfg, 4)] == [6, 6, 7, 5]


@pytest.mark.parametrize("recipe", RECIPES)
def test_bad_input(recipe):
    for world, flags, words in [
        (3, "--layers 2", ("--layers 2", "processes, 3")),
        (2, "--microbatches 3", ("--microbatches 3", "--batch 16")),
        (2, "--microbatches 0", ("--microbatches 0", "at least 1")),
    ]:
        with pytest.raises(RankFailed) as failure:
            launch(recipe, world, f"--device cpu {flags}", timeout=20)
        (line,) = failure.value.output.splitlines()
        assert all(word in line for word in words) and failure.value.code == 1


def test_picture_is_up_to_date():
    assert schedules.PICTURE.read_text() == schedules.draw(), "run python tests/schedules.py"


def test_torchrun_on_two_nodes():
    """The README's command for two nodes, here with two launchers on one machine."""
    command = (
        "torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_id test --rdzv_endpoint localhost:{port}"
    )
    command = command.format(port=free_port()).split() + ["06_pipeline/1f1b.py", "--device", "cpu", "--steps", "2"]
    nodes = [subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        output = "".join(node.communicate(timeout=240)[0] for node in nodes)
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0]
    assert output.count("median  loss") == 1 and output.count("step 2") == 1
