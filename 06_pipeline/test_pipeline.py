"""The pipeline recipes train as the root does, and their schedules have the bubble and the memory of the formulas."""

import itertools
import random
import subprocess
import time
import weakref

import equivalence
import probes
import pytest
import schedules
import torch
from launch import ROOT, RankFailed, free_port, launch, load

NAIVE = "06_pipeline/naive.py"
RECIPES = ["06_pipeline/afab.py", "06_pipeline/1f1b.py"]
SMALL = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8 --microbatches 8 --steps 1"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0][:2] == "06"])
def test_equals_root(recipe, world, flags):
    equivalence.check(recipe, world, flags)


@pytest.mark.parametrize("recipe", RECIPES)
def test_schedule(recipe):
    """Bubble and micro-batches in flight, for as many stages and micro-batches as anyone has."""
    schedules.check(load(recipe), schedules.FLIGHT[recipe], range(1, 17), [*range(1, 18), 32, 64])


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, expected", [(RECIPES[0], [8, 8, 8, 8]), (RECIPES[1], [4, 3, 2, 1])])
def test_in_flight_in_memory(recipe, expected):
    assert launch(recipe, 4, SMALL, probe=probes.activations_in_memory).probes == expected


def received_in_memory(module):
    """A probe: the most received activations that are in memory when another arrives."""
    arrived, peak, receive = [], [0], module.receive

    def watched(model, op, *args):
        tensor = receive(model, op, *args)
        if op == "F" and tensor is not None:
            arrived.append(weakref.ref(tensor))
            peak[0] = max(peak[0], sum(reference() is not None for reference in arrived))
        return tensor

    module.receive = watched
    return lambda: peak[0]


@pytest.mark.thorough
def test_received_activations_are_let_go():
    """One per micro-batch in flight, and that of the backward just done; none on the first stage."""
    peaks = launch(RECIPES[1], 4, SMALL, probe=received_in_memory).probes
    assert peaks[0] == 0 and all(p <= most + 1 for p, most in zip(peaks[1:], (3, 2, 1)))


def bytes_sent(module):
    """A probe: bytes handed to send or isend during training."""
    sent, train_step, dist = [], module.train_step, module.dist

    def counted(original):
        def send(tensor, *args, **kwargs):
            sent.append(tensor.numel() * tensor.element_size())
            return original(tensor, *args, **kwargs)

        return send

    def step(*args):
        sent.clear()  # connect has sent greetings
        return train_step(*args)

    dist.send, dist.isend, module.train_step = counted(dist.send), counted(dist.isend), step
    return lambda: sum(sent)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [NAIVE, *RECIPES])
def test_bytes_sent(recipe):
    """Each micro-batch crosses a boundary as microbatch x seq x dim float32 elements, and so does its gradient."""
    crossing = 8 * (1 * 16 * 32) * 4
    expected = [crossing, 2 * crossing, 2 * crossing, crossing]
    flags = SMALL.replace("--microbatches 8", "") if recipe == NAIVE else SMALL
    assert launch(recipe, 4, flags, probe=bytes_sent).probes == expected


@pytest.mark.thorough
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
            order[s].append((op, (f if op == "F" else b)[s]))
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


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_that_are_sent_are_let_go(recipe):
    """Two of them, and the one that is being sent: not all of them until the end of the step."""
    assert launch(recipe, 4, SMALL, probe=probes.gradients_in_flight).probes == [0, 3, 3, 3]


def forwards_alone(module):
    """A probe: after the step, the loss of a smaller batch, three times, by a list of forwards.

    Stages are late, the last one most: what has not been sent when the list ends must be waited for.
    """
    losses, train_step, receive, dist = [], module.train_step, module.receive, module.dist

    def late(model, *args):
        time.sleep(0.01 * model.stage)
        return receive(model, *args)

    def step(cfg, model, optimizer, inputs, targets):
        result = train_step(cfg, model, optimizer, inputs, targets)
        module.receive, tokens = late, (targets[:6] != module.IGNORE).sum()
        for _ in range(3):
            with torch.no_grad():
                micro = inputs[:6].chunk(3), targets[:6].chunk(3)
                loss = module.run_schedule(cfg, model, [("F", i) for i in range(3)], *micro, tokens)
                dist.all_reduce(loss)
            losses.append(loss.item())
        return result

    module.train_step = step
    return lambda: losses


def loss_after_the_step(module):
    """A probe of the root: the same loss."""
    losses, train_step = [], module.train_step

    def step(cfg, model, optimizer, inputs, targets):
        result = train_step(cfg, model, optimizer, inputs, targets)
        with torch.no_grad():
            tokens = (targets[:6] != module.IGNORE).sum()
            losses.append((module.forward(cfg, model, inputs[:6], targets[:6]) / tokens).item())
        return result

    module.train_step = step
    return lambda: losses


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_forwards_alone_evaluate(recipe):
    shape = SMALL.replace("--microbatches 8", "")
    (theirs,) = launch("01_single_gpu/train.py", 1, f"{shape} --dtype float64", probe=loss_after_the_step).probes[0]
    for world in 2, 4:
        ranks = launch(recipe, world, f"{SMALL} --dtype float64", probe=forwards_alone, timeout=60).probes
        assert all(abs(loss / theirs - 1) < equivalence.TOLERANCE["float64"] for losses in ranks for loss in losses)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_smallest_cases(recipe):
    """One stage, and one micro-batch: the same as on one device."""
    for world, flags in (1, "--microbatches 4"), (2, "--microbatches 1"), (3, "--microbatches 1"):
        equivalence.check(recipe, world, flags)


def test_stages_are_balanced():
    """Every layer has one stage, and no other split has a slowest stage with fewer FLOPs: head and embedding count."""
    module = load(NAIVE)
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
    module = load(NAIVE)
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


@pytest.mark.thorough
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
