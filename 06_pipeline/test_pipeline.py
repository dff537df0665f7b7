"""The pipeline recipes train as the root does, and their schedules have the bubble and the memory of the formulas."""

import collections
import contextlib
import dataclasses
import inspect
import itertools
import random
import subprocess
import time
import types
import weakref

import compare
import equivalence
import probes
import pytest
import schedules
import torch
from launch import ROOT, RankFailed, free_port, launch, load

NAIVE = "06_pipeline/naive.py"
SPLIT = ["06_pipeline/split_backward.py", "06_pipeline/zero_bubble.py"]
CHUNKED = ["06_pipeline/interleaved.py", "06_pipeline/zbv.py", "06_pipeline/dualpipe.py"]
RECIPES = ["06_pipeline/afab.py", "06_pipeline/1f1b.py", *SPLIT, *CHUNKED]
SMALL = "--device cpu --layers 8 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8 --microbatches 8 --steps 1"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0][:2] == "06"])
def test_equals_root(recipe, world, flags):
    equivalence.check_quickly(recipe, world, flags)


@pytest.mark.parametrize("recipe", RECIPES)
def test_schedule(recipe):
    """Every operation once, idle time and micro-batches in flight as the header says, and no rank waits for ever."""
    schedules.check(load(recipe))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_schedule_for_all_sizes(recipe):
    """Up to 16 ranks and 64 micro-batches."""
    schedules.check(load(recipe), schedules.FULL)


class Group:
    """A process group of one rank's world, by its number: that rank makes no other in another order."""

    def __init__(self, number, rank, size):
        self.number, self.rank, self.size = number, lambda: rank, lambda: size


def transport(module, line: schedules.Pipeline, rank: int) -> tuple[list, dict, dict]:
    """What a rank does on which communicator: its greetings, and the other end of all it sends and receives.

    Asked of the recipe's build_model, send and receive, which run with a torch.distributed that only takes notes.
    """
    ranks, notes, numbers = len(line.orders), [], itertools.count(1)

    def send(tensor, group, group_dst):
        notes.append((group.number, rank, group_dst))

    def receive(tensor, group, group_src):
        notes.append((group.number, group_src, rank))

    module.dist = types.SimpleNamespace(
        group=types.SimpleNamespace(WORLD=Group(0, rank, ranks)),
        new_group=lambda: Group(next(numbers), rank, ranks),
        new_subgroups_by_enumeration=lambda pairs: (None, None),
        send=send,
        isend=send,
        recv=receive,
    )
    cfg = module.Config(layers=len(line.place), dim=8, heads=2, kv_heads=1, ffn=8, vocab=8, device="cpu")
    model = module.build_model(cfg)
    greetings, sent, received = list(notes), {}, {}
    stages = [stage for stage, owner in enumerate(line.place) if owner == rank]
    chunked = "handed" in inspect.signature(module.send).parameters
    for op, i, stage in line.orders[rank]:
        operation, taken = ((op, i, stages.index(stage)), {}) if chunked else (op, None), line.takes((op, i, stage))
        if taken and line.place[taken[2]] != rank:
            module.receive(model, *operation[: 1 + chunked], (1,), torch.float32, torch.device("cpu"))
            received[taken] = notes[-1]
        if line.target((op, i, stage)) != rank:
            module.send(model, *operation[: 1 + chunked], torch.zeros(1))
            sent[op, i, stage] = notes[-1]
    return greetings, sent, received


@pytest.mark.parametrize("recipe", RECIPES)
def test_communicators(recipe):
    """Both ends of a message name the same communicator, and nobody waits for ever for what shares it.

    On GPUs, that is: gloo stores what is sent, and so shows no message that is in the way of another.
    """
    for p, m in (2, 4), (2, 6), (4, 8), (8, 16):
        module = load(recipe)
        line = schedules.pipeline(module, p, m)
        ranks = [transport(module, line, rank) for rank in range(p)]
        sent, received = ({k: v for rank in ranks for k, v in rank[end].items()} for end in (1, 2))
        assert sent and sent == received
        assert all(v[1:] == (line.place[k[2]], line.target(k)) for k, v in sent.items())
        channels = {(op, *ends): number for (op, *_), (number, *ends) in sent.items()}
        schedules.rendezvous(line, lambda *channel, channels=channels: channels[channel])
        greetings = [collections.deque(rank[0]) for rank in ranks]
        assert set(sent.values()) <= set(itertools.chain(*greetings)), "the first message would connect, and block"
        while any(greetings):  # each blocks both ends
            ready = [g[0] for g in greetings if g and all(list(greetings[end])[:1] == [g[0]] for end in g[0][1:])]
            assert ready, f"wait for each other: {[g[0] for g in greetings if g]}"
            for end in ready[0][1:]:
                greetings[end].popleft()


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_in_flight_in_memory(recipe):
    """Activations between F and B are in memory, as many as the simulator counts."""
    line = schedules.pipeline(load(recipe), 4, 8)
    peaks = launch(recipe, 4, SMALL, probe=probes.activations_in_memory).probes
    assert peaks == schedules.in_flight(line, until="B")


def operands_in_memory(module):
    """A probe: the most micro-batches, or chunks of them, whose dy is in memory after a B; and what else is.

    That is the number of tensors returned by parts of the model in the forward of a micro-batch that are in memory
    after its B, other than the operands of its W. And the number of gradients that hold on to a graph.
    """
    parts, waiting, peak, others, graphs, done = {}, [], [0], [0], [0], []
    forward, backward_input, send = module.forward, module.backward_input, module.send

    def watched_forward(cfg, model, x, *rest):
        seen = parts[id(x)] = []
        hooks = [
            part.register_forward_hook(lambda part, args, output: seen.append(weakref.ref(output)))
            for part in model.modules()
            if part is not model
        ]
        output = forward(cfg, model, x, *rest)
        for hook in hooks:
            hook.remove()
        return output

    def watched_backward(model, layers, x, output, gradient):
        seen = parts.pop(id(x))
        upstream, operands = backward_input(model, layers, x, output, gradient)
        done[:] = seen, {tensor.data_ptr() for _, *pair in operands for tensor in pair}
        waiting.append(weakref.ref(operands[0][2]))
        return upstream, operands

    def watched_send(model, op, *rest):
        if op[0] == "B":
            seen, kept = done
            graphs[0] += sum(p.grad is not None and p.grad.requires_grad for p in model.parameters())
            alive = [tensor for reference in seen if (tensor := reference()) is not None]
            others[0] = max(others[0], sum(tensor.data_ptr() not in kept for tensor in alive))
            peak[0] = max(peak[0], sum(reference() is not None for reference in waiting))
        return send(model, op, *rest)

    module.forward, module.backward_input, module.send = watched_forward, watched_backward, watched_send
    return lambda: (peak[0], others[0], graphs[0])


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [*SPLIT, *CHUNKED])
def test_weight_gradients_keep_their_operands_alone(recipe):
    """Between B and W x and dy are in memory, for as many micro-batches as the schedule lets wait, and nothing else."""
    line = schedules.pipeline(load(recipe), 4, 8)
    found = launch(recipe, 4, SMALL, probe=operands_in_memory).probes
    for order, (peak, others, graphs) in zip(line.orders, found, strict=True):
        late = itertools.accumulate((op == "B") - (op == "W") for op, *_ in order)
        assert (peak, others, graphs) == (max(late), 0, 0)


@pytest.mark.parametrize("recipe", [*SPLIT, *CHUNKED])
def test_micro_batches_of_two_shapes_are_refused(recipe):
    """Gradients of a larger one would be summed to the shape of the leaves that prepare has laid out."""
    module = load(recipe)
    with pytest.raises(ValueError, match="same shape"):
        module.prepare(module.Linear(4, 4), (torch.zeros(1, 8), torch.zeros(2, 8)), torch.float32)


def received_in_memory(module):
    """A probe: the most received activations that are in memory when another arrives."""
    arrived, peak, receive = [], [0], module.receive

    def watched(model, op, *args):
        tensor = receive(model, op, *args)
        if op[0] == "F" and tensor is not None:
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
    message = 1 * 16 * 32 * 4
    flags = SMALL.replace("--microbatches 8", "") if recipe == NAIVE else SMALL
    expected = [8 * message * n for n in (1, 2, 2, 1)]
    if recipe != NAIVE:
        line = schedules.pipeline(load(recipe), 4, 8)
        sent = [[line.target(operation) != rank for operation in order] for rank, order in enumerate(line.orders)]
        assert recipe in CHUNKED or [message * sum(rank) for rank in sent] == expected
        expected = [message * sum(rank) for rank in sent]
    assert launch(recipe, 4, flags, probe=bytes_sent).probes == expected


def random_order(line: schedules.Pipeline, seed: int) -> list[list[tuple[str, int, int]]]:
    """Shuffle what every rank does, (op, micro-batch, stage), so that each operation still comes after those it needs.

    Both ends of a link take its messages in the same order, and W come late.
    """
    choose, orders, done = random.Random(seed), [[] for _ in line.orders], set()
    left, links = [set(order) for order in line.orders], collections.defaultdict(list)

    def link(taken, rank):
        return schedules.per_direction(taken[0], line.place[taken[2]], rank), line.place[taken[2]], rank

    def ready(operation, rank):
        taken, before = line.takes(operation), line.follows(operation)
        if taken and line.place[taken[2]] != rank:
            return links[link(taken, rank)][:1] == [taken] and (not before or before in done)
        return {taken, before} - {None} <= done

    while any(left):
        can = [(rank, operation) for rank, todo in enumerate(left) for operation in sorted(todo)]
        can = [(rank, operation) for rank, operation in can if ready(operation, rank)]
        rank, operation = choose.choice([pair for pair in can if pair[1][0] != "W" or choose.random() < 0.2] or can)
        if (taken := line.takes(operation)) and line.place[taken[2]] != rank:
            links[link(taken, rank)].pop(0)
        if line.target(operation) != rank:
            links[link(operation, line.target(operation))].append(operation)
        left[rank].remove(operation)
        done.add(operation)
        orders[rank].append(operation)
    return orders


def runnable(line: schedules.Pipeline):
    """Yield random orders in which no rank waits for ever because too many of its gradients must be under way."""
    for seed in itertools.count():
        orders = random_order(line, seed)
        with contextlib.suppress(schedules.Deadlock):
            schedules.rendezvous(dataclasses.replace(line, orders=orders))
            yield orders


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe, p",
    [
        (recipe, p)
        for recipe in ("06_pipeline/afab.py", "06_pipeline/zero_bubble.py", *CHUNKED)
        for p in ((2, 4) if recipe.endswith("dualpipe.py") else (2, 3, 4))
    ],
)
def test_executor_runs_any_valid_list(recipe, p):
    """Random orders that respect what needs what: the same weights, and nothing waits for ever."""
    flags, micro = (SMALL.replace("batch 8", "batch 9").replace("batches 8", "batches 9"), 9) if p == 3 else (SMALL, 8)
    flags += " --dtype float64"
    line = schedules.pipeline(load(recipe), p, micro)

    def with_order(orders):
        def probe(module):
            def schedule(rank, *_):
                stages = [stage for stage, owner in enumerate(line.place) if owner == rank]
                return [(op, i, *([stages.index(s)] if recipe in CHUNKED else [])) for op, i, s in orders[rank]]

            module.schedule = schedule
            return lambda: None

        return probe

    reference = launch(recipe, p, flags).weights
    for orders in itertools.islice(runnable(line), 2):
        run = launch(recipe, p, flags, probe=with_order(orders), timeout=60)
        assert compare.worst(compare.relative_errors(run.weights, reference))[1] < equivalence.TOLERANCE["float64"]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_that_are_sent_are_let_go(recipe):
    """Two of them, and the one that is being sent: not all of them until the end of the step."""
    peaks = launch(recipe, 4, SMALL, probe=probes.gradients_in_flight).probes
    assert max(peaks) <= 1 + (4 if recipe in CHUNKED else 2) and (recipe in CHUNKED or peaks == [0, 3, 3, 3])


def forwards_alone(module):
    """A probe: after the step, the loss of a smaller batch, three times, by a list of forwards.

    Stages are late, the last one most: what has not been sent when the list ends must be waited for.
    """
    losses, train_step, receive, dist = [], module.train_step, module.receive, module.dist

    def late(model, *args):
        time.sleep(0.01 * model.pp.rank())
        return receive(model, *args)

    def step(cfg, model, optimizer, inputs, targets):
        result = train_step(cfg, model, optimizer, inputs, targets)
        module.receive, tokens = late, (targets[:6] != module.IGNORE).sum()
        for _ in range(3):
            with torch.no_grad():
                micro = inputs[:6].chunk(3), targets[:6].chunk(3)
                loss = module.run_schedule(cfg, model, probes.forwards(module, cfg, model, 3), *micro, tokens)
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


def unlike_a_fresh_model(module):
    """A probe: before the third step, in what this model differs from a new one with the same weights."""
    differences, steps, train_step = [], [], module.train_step

    def results(cfg, model, *batch):
        found = {"validation loss": torch.tensor(probes.validation_loss(module, cfg, model, *batch))}
        found["loss"] = module.forward_backward(cfg, model, *batch)
        found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    def step(cfg, model, optimizer, *batch):
        steps.append(1)
        if len(steps) == 3:
            fresh = module.build_model(cfg)
            fresh.load_state_dict(model.state_dict())
            mine, theirs = (results(cfg, part, *batch) for part in (model, fresh))
            assert mine.keys() == theirs.keys()
            differences.extend(name for name in mine if not torch.equal(mine[name], theirs[name]))
        return train_step(cfg, model, optimizer, *batch)

    module.train_step = step
    return lambda: differences


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_leaves_nothing_but_weights(recipe):
    """In bf16 after two steps: losses and gradients to the bit those of a new model with these weights.

    Casts of the weights before would be seen here alone: in float64, a cast is the weight itself.
    """
    flags = SMALL.replace("--steps 1", "--steps 3 --dtype bfloat16 --lr 1e-2 --warmup 0")
    assert launch(recipe, 4, flags, probe=unlike_a_fresh_model).probes == [[]] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_smallest_cases(recipe):
    """One stage, and one micro-batch: the same as on one device."""
    cases = [(1, "--microbatches 4"), (2, "--microbatches 1"), (3, "--microbatches 1 --layers 6")]
    if recipe.endswith("interleaved.py"):
        cases = [(1, "--microbatches 1 --chunks 3"), (3, "--microbatches 3 --chunks 1")]
    if recipe.endswith("dualpipe.py"):
        cases = [(2, "--microbatches 1"), (4, "--microbatches 1")]
    for world, flags in cases:
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
    more = {
        "06_pipeline/interleaved.py": [
            (4, "--microbatches 2", ("--microbatches 2", "multiple", "processes, 4")),
            (2, "--layers 5 --chunks 3", ("--layers 5", "--chunks", "processes, 6")),
        ],
        "06_pipeline/zbv.py": [(4, "--layers 7", ("--layers 7", "twice", "processes, 8"))],
        "06_pipeline/dualpipe.py": [(3, "", ("--nproc_per_node 3", "even"))],
    }.get(recipe, [])
    for world, flags, words in [
        (4, "--layers 3", ("--layers 3", "processes, ")),
        (2, "--microbatches 6", ("--microbatches 6", "--batch 16")),
        (2, "--microbatches 0", ("--microbatches 0", "at least 1")),
        *more,
    ]:
        with pytest.raises(RankFailed) as failure:
            launch(recipe, world, f"--device cpu {flags}", timeout=20)
        (line,) = failure.value.output.splitlines()
        assert all(word in line for word in words) and failure.value.code == 1


@pytest.mark.thorough
def test_pictures_are_up_to_date():
    for file, svg in schedules.pictures().items():
        assert file.read_text() == svg, "run python tests/schedules.py"


@pytest.mark.thorough
def test_torchrun_on_two_nodes():
    """The README's command for two nodes, here with two launchers on one machine."""
    command = (
        "torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_id test --rdzv_endpoint localhost:{port}"
    )
    with free_port() as port:
        words = command.format(port=port).split() + ["06_pipeline/1f1b.py", "--device", "cpu", "--steps", "2"]
        nodes = [subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE) for _ in range(2)]
        try:
            output = "".join(node.communicate(timeout=240)[0] for node in nodes)
        finally:
            for node in nodes:
                node.kill()
    assert [node.returncode for node in nodes] == [0, 0]
    assert output.count("median  loss") == 1 and output.count("step 2") == 1
