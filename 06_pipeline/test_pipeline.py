"""The pipeline recipes train as the root does, and their schedules have the bubble and the memory of the formulas."""

import collections
import inspect
import itertools
import types
import weakref

import compare
import contract
import equivalence
import probes
import pytest
import schedules
import torch
from launch import launch, load, once
from torch import Tensor

NAIVE, TWIN = "06_pipeline/naive.py", "06_pipeline/torch_pipelining.py"
TIED = "06_pipeline/tied_embeddings.py"
ONE_F_ONE_B, INTERLEAVED, ZBV, DUALPIPE = (f"06_pipeline/{name}.py" for name in "1f1b interleaved zbv dualpipe".split())
SPLIT = ["06_pipeline/split_backward.py", "06_pipeline/zero_bubble.py", ZBV, DUALPIPE]
RECIPES = ["06_pipeline/afab.py", ONE_F_ONE_B, INTERLEAVED, *SPLIT]
SMALL = "--device cpu --layers 8 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8 --microbatches 8 --steps 1"
SIZES = [  # that may fail where the hardest of each recipe, which the contract has, does not: a stage, a micro-batch
    *((recipe, 1, "--microbatches 4") for recipe in RECIPES[:-1]),
    *((recipe, 3, "--microbatches 1 --layers 6") for recipe in RECIPES if recipe not in (INTERLEAVED, DUALPIPE)),
    (INTERLEAVED, 2, "--microbatches 2 --chunks 3 --layers 7"),
    (INTERLEAVED, 3, "--microbatches 4 --chunks 1"),
    (DUALPIPE, 2, "--microbatches 1"),
    (DUALPIPE, 4, "--microbatches 3"),  # fewer than the order needs, and an odd number
    (NAIVE, 8, "--layers 11"),
    (TWIN, 3, "--microbatches 3"),  # of torch's schedules one that places stages in a V, and the one without
    (TWIN, 4, "--microbatches 6 --schedule ZBVZeroBubble --layers 11"),
]


def unchecked(module):
    """A probe: micro-batches need not divide the batch."""
    module.check = lambda *_: None


def embedding_alone(module):
    """A probe: the first stage has no layers."""
    unchecked(module)
    split_layers = module.split_layers
    module.split_layers = lambda cfg, stages: [range(0), *split_layers(cfg, stages - 1)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe, world, flags, change",
    [
        (NAIVE, 3, "", unchecked),
        ("06_pipeline/afab.py", 3, "--microbatches 5", unchecked),
        (ONE_F_ONE_B, 3, "--microbatches 4", unchecked),
        (INTERLEAVED, 2, "--microbatches 4 --chunks 1", unchecked),
        (SPLIT[0], 3, "--microbatches 3", embedding_alone),
        (ZBV, 2, "--microbatches 3", embedding_alone),
    ],
)
def test_frozen_first_stage(recipe, world, flags, change):
    """Nothing of it is trained, and so no gradient goes back through it; all else is trained as by the root.

    Micro-batches need not divide the batch where a recipe does without leaves of their shape, or has no layer there.
    """
    common = (
        "--device cpu --dtype float64 --layers 3 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 6 --steps 2"
    )
    probe = probes.freezes("embed_tokens", "layers.0.")
    theirs = launch("01_single_gpu/train.py", 1, common, probe=probe)
    ours = launch(recipe, world, f"{common} {flags}", probe=probes.together(probe, change))
    compare.assert_close(compare.relative_errors(ours.weights, theirs.weights), 1e-10, recipe)


def norms_of_a_bf16_stage(module: types.ModuleType):
    """A probe: the last stage clips gradients in bfloat16; the returned norm, and the squares before and after."""
    clip, found = module.clip_gradients, []

    def squares(gradients: list[Tensor]) -> float:
        return sum(gradient.double().square().sum().item() for gradient in gradients)

    def mixed(cfg, model):
        if model.pp.rank() == model.pp.size() - 1:
            for p in model.parameters():
                gradient, p.grad = p.grad.bfloat16(), None
                p.data, p.grad = p.data.bfloat16(), gradient
        gradients = [p.grad for p in model.parameters()]
        before, norm = squares(gradients), clip(cfg, model)
        found.extend((norm.item(), before, squares(gradients)))
        return norm

    module.clip_gradients = mixed
    return lambda: found


def test_stages_of_other_dtypes():
    """A float64 stage and one in bfloat16 have one norm, up to the rounding of the latter, and are scaled by it."""
    flags = SMALL.replace("--layers 8", "--layers 2 --dtype float64 --clip 0.1")
    norms, before, after = zip(*launch(ONE_F_ONE_B, 2, flags, norms_of_a_bf16_stage, save=False).probes)
    assert all(abs(norm / sum(before) ** 0.5 - 1) < 2**-8 for norm in norms), f"norms {norms} of squares {before}"
    assert abs(sum(after) ** 0.5 / 0.1 - 1) < 2**-8, "not scaled to --clip"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", SIZES)
def test_gradient_on_other_sizes(recipe, world, flags, monkeypatch):
    monkeypatch.setitem(equivalence.HARDEST, recipe, (world, flags))
    contract.check_gradient(recipe)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["06_pipeline/1f1b.py", SPLIT[0], TWIN])
def test_compiled(recipe):
    """Blocks with a whole backward, and with one that leaves out the gradients of weights; torch's stages."""
    equivalence.check_quickly(recipe, 2, "--microbatches 4 --compile")


@pytest.mark.parametrize("sizes", [schedules.QUICK, pytest.param(schedules.FULL, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_schedule(recipe, sizes):
    """Every operation once, idle time and micro-batches in flight as the header says, and no rank waits for ever."""
    schedules.check(load(recipe), sizes)


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
        new_group=lambda *_, **__: Group(next(numbers), rank, ranks),
        get_process_group_ranks=lambda group: [*range(ranks)],
        new_subgroups_by_enumeration=lambda pairs: (None, None),
        send=send,
        isend=send,
        recv=receive,
    )
    cfg = module.Config(layers=len(line.place), dim=8, heads=2, kv_heads=1, ffn=8, vocab=8, device="cpu")
    model = module.build_model(cfg)
    greetings, sent, received = list(notes), {}, {}
    stages = [stage for stage, owner in enumerate(line.place) if owner == rank]
    for op, i, stage in line.orders[rank]:
        part, taken = model.chunks[stages.index(stage)] if len(stages) > 1 else model, line.takes((op, i, stage))
        if taken and line.place[taken[2]] != rank:
            module.receive(part, op, (1,), torch.float32, torch.device("cpu"))
            received[taken] = notes[-1]
        if line.target((op, i, stage)) != rank:
            module.send(part, op, torch.zeros(1))
            sent[op, i, stage] = notes[-1]
    return greetings, sent, received


@pytest.mark.parametrize("recipe", [*RECIPES, TIED])
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


def operands_in_memory(most):
    """A probe: micro-batches, or chunks of them, whose dy is in memory after a B, at most; and what else is.

    That is the number of tensors returned by parts of the model in the forward of a micro-batch that are in memory
    after its B, other than the operands of its W. And the number of gradients that hold on to a graph.
    """

    def probe(module):
        parts, waiting, peak, others, graphs, done = {}, [], [0], [0], [0], []
        if not hasattr(module, "backward_input"):
            return lambda: (0, 0, 0)
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
            kept = {tensor.data_ptr() for _, *pair in operands for tensor in pair}
            done[:] = [part for part in seen if (tensor := part()) is not None and tensor.data_ptr() not in kept]
            waiting.append(weakref.ref(operands[0][2]))
            return upstream, operands

        def watched_send(model, op, *rest):
            if op[0] == "B":
                graphs[0] += sum(p.grad is not None and p.grad.requires_grad for p in model.parameters())
                others[0] = probes.alive(done, others[0], 0)
                peak[0] = probes.alive(waiting, peak[0], most)
            return send(model, op, *rest)

        module.forward, module.backward_input, module.send = watched_forward, watched_backward, watched_send
        return lambda: (peak[0], others[0], graphs[0])

    return probe


def messages(enough):
    """A probe: bytes sent in a step; activations, and gradients, that are in memory when another has arrived, and
    gradients that have been sent, at most; and how many of an evaluation's messages nobody has waited for.
    """

    def probe(module):
        seen, peaks, sent, train_step = {kind: [] for kind in enough}, dict.fromkeys(enough, 0), [], module.train_step
        receive, send, isend = module.receive, module.send, module.dist.isend

        def note(kind, tensor):
            seen[kind].append(weakref.ref(tensor))
            peaks[kind] = probes.alive(seen[kind], peaks[kind], enough[kind])

        def received(model, op, *rest):
            tensor = receive(model, op, *rest)
            if tensor is not None:
                note(op[0], tensor)
            return tensor

        def sending(model, op, *rest):
            work = send(model, op, *rest)
            if work and op[0] == "B":
                note("sent", rest[-1])
            return work

        class Message:
            def __init__(self, tensor, group, group_dst):
                self.work = isend(tensor, group=group, group_dst=group_dst)
                self.bytes, self.waited = tensor.nbytes, False
                sent.append(self)

            def wait(self):
                if not self.waited:
                    self.work.wait()
                self.waited, self.work = True, None  # which would hold the tensor

        def step(cfg, model, optimizer, inputs, targets):
            sent.clear()
            result = train_step(cfg, model, optimizer, inputs, targets)
            total = sum(message.bytes for message in sent)
            sent.clear()
            module.evaluate(cfg, model, inputs, targets)
            peaks.update(bytes=total, forgotten=sum(not message.waited for message in sent))
            return result

        module.receive, module.send, module.dist.isend, module.train_step = received, sending, Message, step
        return lambda: peaks

    return probe


def waiting_for_weights(order):
    """The most micro-batches, or chunks of them, between B and W in a rank's list; 0 where B does both."""
    split = any(op == "W" for op, *_ in order)
    return max(itertools.accumulate(((op == "B") - (op == "W")) * split for op, *_ in order))


@once
def observed(recipe):
    """Reports of the probes after a step on 4 ranks. Beside what is in flight or pending for W, one tensor lives: the
    one that is being sent, has just arrived, or has just been used."""
    line = schedules.pipeline(load(recipe), 4, 8)
    late = max(map(waiting_for_weights, line.orders))
    enough = {"F": max(schedules.in_flight(line, "B")) + 1, "B": late + 2, "sent": line.under_way + 1}
    probe = probes.together(operands_in_memory(late), messages(enough), probes.activations_in_memory)
    return launch(recipe, 4, SMALL, probe=probe).probes


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_activations_in_memory(recipe):
    """Between F and B, as many as the simulator counts; beside them a received one that has just been used, at most."""
    in_flight = schedules.in_flight(schedules.pipeline(load(recipe), 4, 8), until="B")
    for flying, (_, peaks, activations) in zip(in_flight, observed(recipe), strict=True):
        assert activations == flying and peaks["F"] <= flying + 1, "activations are held"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", SPLIT)
def test_weight_gradients_keep_their_operands_alone(recipe):
    """Between B and W x and dy are in memory, for as many micro-batches as the schedule lets wait, and nothing else."""
    line = schedules.pipeline(load(recipe), 4, 8)
    for order, (found, *_) in zip(line.orders, observed(recipe), strict=True):
        assert found == (waiting_for_weights(order), 0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_messages(recipe):
    """A micro-batch crosses a boundary as microbatch x seq x dim float32 elements, and so does its gradient.

    Gradients that have been sent or used are let go: not all of them at the end of the step. Forwards alone, which
    evaluate, leave no message under way.
    """
    line, message = schedules.pipeline(load(recipe), 4, 8), 1 * 16 * 32 * 4
    for rank, (order, (_, peaks, _)) in enumerate(zip(line.orders, observed(recipe), strict=True)):
        assert peaks["bytes"] == message * sum(line.target(operation) != rank for operation in order)
        assert peaks["B"] <= waiting_for_weights(order) + 2, "gradients that have been used are held"
        assert peaks["forgotten"] == 0, "a message of an evaluation is under way when it ends"
        under_way = line.under_way + 1 if rank or line.under_way > 2 else 0
        assert peaks["sent"] <= under_way and (line.under_way > 2 or peaks["sent"] == under_way), "gradients are held"


@pytest.mark.parametrize("recipe", [NAIVE, *RECIPES, TIED, "08_4d/3d.py"])
@pytest.mark.parametrize("output", [torch.zeros(1, 8, 4, dtype=torch.bfloat16), torch.zeros(1, 8, 2)])
def test_activations_that_the_next_stage_does_not_take_are_refused(recipe, output):
    """It would read what nobody has written. Under autocast, models of others return float32."""
    module, stage = load(recipe), torch.nn.Module()
    stage.stage, stage.stages, stage.tp = 0, 2, types.SimpleNamespace(size=lambda: 1)
    cfg, ids = types.SimpleNamespace(dtype="float32", dim=4, device="cpu"), torch.zeros(1, 8, dtype=torch.int64)
    module.forward = lambda *_: output
    with pytest.raises(ValueError, match=r"must return torch.float32 \[.*8, 4\], not torch"):
        if recipe == NAIVE:
            module.forward_backward(cfg, stage, ids, ids)
        elif "chunks" in inspect.signature(module.run_schedule).parameters:
            module.run_schedule(cfg, torch.nn.ModuleList([stage]), [("F", 0, 0)], (ids,), (ids,), 1)
        else:
            module.run_schedule(cfg, stage, [("F", 0)], (ids,), (ids,), 1)


@pytest.mark.parametrize("recipe", [NAIVE, *RECIPES, TIED, TWIN])
def test_a_clip_that_sees_no_gradient_is_refused(recipe):
    """ZeRO's units have taken them, say: the norm would be 0, and nothing would be clipped."""
    model = torch.nn.Linear(2, 2)
    model.stage, model.stages = 0, 2
    with pytest.raises(RuntimeError, match="no parameter of this stage has a .grad"):
        load(recipe).clip_gradients(types.SimpleNamespace(device="cpu"), model)


@pytest.mark.parametrize("recipe", SPLIT)
def test_gradients_have_memory_and_strides_of_their_own(recipe):
    """A clip would scale twice what two parameters share; fused AdamW on CPUs takes strides like the parameter's."""
    module, model, x = load(recipe), torch.nn.Module(), torch.randn(2, 3, 8, requires_grad=True)
    model.weight, model.delta, model.experts = (torch.nn.Parameter(torch.randn(2, 4, 8)) for _ in range(3))

    def output():
        return (x @ (model.weight + model.delta).mT + torch.bmm(x, model.experts.mT).square()).sum()

    for times in 1, 2:
        module.backward_input(model, [], x, output(), None)
        for p, gradient in zip(model.parameters(), torch.autograd.grad(output(), [*model.parameters()])):
            assert torch.allclose(p.grad, times * gradient) and p.grad.stride() == p.stride()
        assert model.weight.grad.data_ptr() != model.delta.grad.data_ptr()


@pytest.mark.parametrize("recipe", SPLIT)
@pytest.mark.parametrize("kind, tokens, times", [(Tensor, 1, 257), (probes.OnGPU, 257, 3)])
def test_weight_gradients_are_added_up_in_fp32(recipe, kind, tokens, times, monkeypatch):
    """... of bf16 operands, by a GPU also within a product. 257 is no number of bf16."""

    def addmm(total, dy, x, out_dtype, out):  # that of CPUs takes no out_dtype
        out.copy_((total + dy.float() @ x.float()).to(out_dtype))

    monkeypatch.setattr(torch, "addmm", addmm)
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    x, dy = (torch.ones(1, tokens, n, dtype=torch.bfloat16).as_subclass(kind) for n in (2, 3))
    load(recipe).backward_weights([(weight, x, dy)] * times)
    assert (weight.grad == tokens * times).all(), "sums are rounded"


@pytest.mark.parametrize("recipe", SPLIT)
def test_micro_batches_of_two_shapes_are_refused(recipe):
    """Gradients of a larger one would be summed to the shape of the leaves that prepare_linears has laid out."""
    module = load(recipe)
    with pytest.raises(ValueError, match="3 sequences in 2 micro-batches: must have the same shape"):
        module.prepare_linears(module.Linear(4, 4), (torch.zeros(1, 8), torch.zeros(2, 8)), torch.float32)


@pytest.mark.parametrize("recipe", SPLIT)
def test_activations_of_another_shape_are_refused(recipe):
    """Heads as an axis, say: gradients would be summed over them to the shape of the leaves."""
    module = load(recipe)
    linear = module.Linear(4, 4)
    module.prepare_linears(linear, (torch.zeros(1, 8),), torch.float32)
    assert linear(torch.ones(1, 8, 4)).shape == (1, 8, 4)
    with pytest.raises(ValueError, match="x must have the shape"):
        linear(torch.ones(2, 1, 8, 4))


def unlike_a_fresh_model(module):
    """A probe: before the third step, in what this model differs from a new one with the same weights."""
    differences, steps, train_step = [], [], module.train_step

    def results(cfg, model, *batch):
        found = {"validation loss": module.evaluate(cfg, model, *batch)}
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
@pytest.mark.parametrize("recipe", SPLIT)
def test_a_step_leaves_nothing_but_weights(recipe):
    """In bf16 after two steps: losses and gradients to the bit those of a new model with these weights.

    Casts of the weights before would be seen here alone: in float64, a cast is the weight itself.
    """
    flags = SMALL.replace("--steps 1", "--steps 3 --dtype bfloat16 --lr 1e-2 --warmup 0")
    assert launch(recipe, 2, flags, probe=unlike_a_fresh_model).probes == [[]] * 2


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


REFUSED = [  # recipes, ranks, flags, what the one line must have
    (RECIPES, 4, "--layers 3", ("--layers 3", "processes, ")),
    (RECIPES, 2, "--microbatches 6", ("--microbatches 6", "--batch 16")),
    ([INTERLEAVED], 4, "--microbatches 2", ("--microbatches 2", "multiple", "processes, 4")),
    ([INTERLEAVED], 2, "--layers 5 --chunks 3", ("--layers 5", "--chunks", "processes, 6")),
    ([ZBV], 4, "--layers 7", ("--layers 7", "twice", "processes, 8")),
    ([DUALPIPE], 3, "", ("--nproc_per_node 3", "even")),
    ([TWIN], 1, "--schedule LoopedBFS --validate 1", ("--validate 1", "LoopedBFS", "0, or --schedule 1F1B")),
    ([TWIN], 2, "--schedule ZBVZeroBubble --validate 1", ("--validate", "ZBVZeroBubble")),
]


@pytest.mark.parametrize("recipe", [*RECIPES, TWIN])
def test_sizes(recipe):
    """What cannot be split ends with one line that names the flag and what would work."""
    module = load(recipe)
    for recipes, world, flags, words in REFUSED:
        if recipe in recipes:
            line = contract.refusal(module, world, f"--device cpu {flags}")
            assert isinstance(line, str) and "\n" not in line and all(word in line for word in words), (flags, line)
