"""The pipeline recipes train as the root does, and their schedules have the bubble and the memory of the formulas."""

import collections
import itertools
import re
import types
import weakref
from unittest.mock import patch

import compare
import probes
import pytest
import schedules
import torch
from launch import Run, in_a_fork, launch, load
from torch.nn.modules.module import register_module_forward_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

NAIVE, TWIN = "06_pipeline/naive.py", "06_pipeline/torch_pipelining.py"
TIED = "06_pipeline/tied_embeddings.py"
ONE_F_ONE_B, INTERLEAVED, ZBV, DUALPIPE = (f"06_pipeline/{name}.py" for name in "1f1b interleaved zbv dualpipe".split())
SPLIT = ["06_pipeline/split_backward.py", "06_pipeline/zero_bubble.py", ZBV, DUALPIPE]
RECIPES = ["06_pipeline/afab.py", ONE_F_ONE_B, INTERLEAVED, *SPLIT]
SMALL = "--device cpu --layers 8 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8 --microbatches 8 --steps 1"
ORDERS = [ONE_F_ONE_B, INTERLEAVED, SPLIT[0], ZBV, DUALPIPE]  # one of each run_schedule, or way to connect ranks


def embedding_alone(module):
    """A probe: the first stage has no layers."""
    split_layers = module.split_layers
    module.split_layers = lambda cfg, stages: [range(0), *split_layers(cfg, stages - 1)]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world", [(NAIVE, 3), (ONE_F_ONE_B, 3), (SPLIT[0], 3), (INTERLEAVED, 2), (ZBV, 2)])
def test_frozen_first_stage(recipe, world):
    """Nothing of it is trained, and so no gradient goes back through it; all else is trained as by the root."""
    common = "--device cpu --dtype float64 --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 6"
    probe = probes.freezes("embed_tokens")
    theirs = launch("01_single_gpu/train.py", 1, f"{common} --steps 2", probe=probe)
    common += f" --microbatches {world}" * (recipe != NAIVE)
    ours = launch(recipe, world, f"{common} --steps 2", probe=probes.together(probe, embedding_alone))
    compare.assert_close(compare.relative_errors(ours.weights, theirs.weights), 1e-10, recipe)


def test_stages_of_other_dtypes(monkeypatch):
    """Whatever the dtype of a stage, squares of all are summed in float64, and gradients are scaled by their norm."""

    def add_others(squares, group):
        assert squares.dtype == torch.float64
        squares += 58

    module, stage = load(ONE_F_ONE_B), torch.nn.Linear(2, 2).bfloat16()
    monkeypatch.setattr(module.dist, "all_reduce", add_others)
    stage.pp = None
    for p in stage.parameters():
        p.grad = torch.ones_like(p)
    assert module.clip_gradients(types.SimpleNamespace(device="cpu", clip=4), stage) == 8
    assert (stage.weight.grad == 0.5).all(), "not scaled to --clip"


@pytest.mark.parametrize("sizes", [schedules.QUICK, pytest.param(schedules.FULL, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_schedule(recipe, sizes):
    """Every operation once, idle time and micro-batches in flight as the header says, and no rank waits for ever."""
    schedules.check(load(recipe), sizes)


def transport(module, line: schedules.Pipeline, rank: int) -> tuple[list, dict, dict]:
    """A rank's greetings, and the communicator and both ends of all that it sends and receives; nothing is sent."""
    notes = []

    def send(tensor, group, group_dst):
        notes.append((group.group_name, rank, group_dst))

    def receive(tensor, group, group_src):
        notes.append((group.group_name, group_src, rank))

    module.dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(line.orders))
    with patch.multiple(module.dist, send=send, isend=send, recv=receive):
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
    module.dist.destroy_process_group()
    return greetings, sent, received


@pytest.mark.parametrize("recipe", ORDERS)
@in_a_fork
def test_communicators(recipe):
    """Both ends of a message name one communicator, and nobody waits for ever for what shares it, as GPUs would."""
    for p, m in (2, 4), (4, 8):
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
    """A probe: the most micro-batches, or chunks, whose dy is in memory after a B; tensors of a forward that are after
    its B, other than the operands of its W; gradients that hold on to a graph."""

    def probe(module):
        parts, waiting, peak, others, graphs, done = {}, [], [0], [0], [0], []
        if not hasattr(module, "backward_input"):
            return lambda: (0, 0, 0)
        forward, backward_input, send = module.forward, module.backward_input, module.send

        def watched_forward(cfg, model, x, *rest):
            seen = parts[id(x)] = []
            with register_module_forward_hook(lambda part, args, output: seen.append(weakref.ref(output))):
                return forward(cfg, model, x, *rest)

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
    gradients that have been sent, at most.
    """

    def probe(module):
        seen, peaks = {kind: [] for kind in enough}, dict.fromkeys((*enough, "bytes"), 0)
        receive, send = module.receive, module.send

        def note(kind, tensor):
            seen[kind].append(weakref.ref(tensor))
            peaks[kind] = probes.alive(seen[kind], peaks[kind], enough[kind])

        def received(model, op, *rest):
            tensor = receive(model, op, *rest)
            if tensor is not None and torch.is_grad_enabled():  # not in a validation
                note(op[0], tensor)
            return tensor

        def sending(model, op, tensor):
            work = send(model, op, tensor)
            if work and torch.is_grad_enabled():
                peaks["bytes"] += tensor.nbytes
                if op[0] == "B":
                    note("sent", tensor)
            return work

        module.receive, module.send = received, sending
        return lambda: peaks

    return probe


def waiting_for_weights(order):
    """The most micro-batches, or chunks of them, between B and W in a rank's list; 0 where B does both."""
    split = any(op == "W" for op, *_ in order)
    return max(itertools.accumulate(((op == "B") - (op == "W")) * split for op, *_ in order))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ORDERS)
def test_memory_and_messages(recipe):
    """Between F and B, as many activations are in memory as the simulator counts; between B and W x and dy alone.

    Beside them lives one tensor, that has just been sent, has arrived, or been used. A micro-batch crosses a boundary
    as microbatch x seq x dim elements, and so does its gradient. An evaluation leaves no message under way.
    """
    line, message = schedules.pipeline(load(recipe), 4, 8), 1 * 16 * 32 * 4
    in_flight, late = schedules.in_flight(line, until="B"), [waiting_for_weights(order) for order in line.orders]
    enough = {"F": max(in_flight) + 1, "B": max(late) + 2, "sent": line.under_way + 1}
    probe = probes.waits, operands_in_memory(max(late)), messages(enough), probes.activations_in_memory
    probe = probes.together(*probe, probes.evaluated())
    for rank, (_, operands, peaks, activations, _) in enumerate(launch(recipe, 4, SMALL, probe=probe).probes):
        flying, waiting = in_flight[rank], late[rank]
        assert activations == flying and peaks["F"] <= flying + 1, "activations are held"
        assert operands == (waiting, 0, 0), "more than the operands of W is held"
        assert peaks["bytes"] == message * sum(line.target(operation) != rank for operation in line.orders[rank])
        assert peaks["B"] <= waiting + 2, "gradients that have been used are held"
        under_way = line.under_way + 1 if rank or line.under_way > 2 else 0
        assert peaks["sent"] <= under_way and (line.under_way > 2 or peaks["sent"] == under_way), "gradients are held"


@pytest.mark.parametrize("recipe", [ONE_F_ONE_B, SPLIT[0]])
@pytest.mark.parametrize("output", [torch.zeros(1, 8, 4, dtype=torch.bfloat16), torch.zeros(1, 8, 2)])
def test_activations_that_the_next_stage_does_not_take_are_refused(recipe, output):
    """It would read what nobody has written. Under autocast, models of others return float32."""
    module, stage = load(recipe), torch.nn.Module()
    stage.stage, stage.stages = 0, 2
    cfg, ids = types.SimpleNamespace(dtype="float32", dim=4, device="cpu"), torch.zeros(1, 8, dtype=torch.int64)
    module.forward = lambda *_: output
    with pytest.raises(ValueError, match=r"must return torch.float32 \[.*8, 4\], not torch"):
        module.run_schedule(cfg, stage, [("F", 0)], (ids,), (ids,), 1)


@pytest.mark.parametrize("recipe", [ONE_F_ONE_B, DUALPIPE, TIED])
def test_a_clip_that_sees_no_gradient_is_refused(recipe):
    """ZeRO's units have taken them, say: the norm would be 0, and nothing would be clipped."""
    model = torch.nn.Linear(2, 2)
    model.stage, model.stages = 0, 2
    with pytest.raises(RuntimeError, match="no parameter of this stage has a .grad"):
        load(recipe).clip_gradients(types.SimpleNamespace(device="cpu"), model)


def test_gradients_have_memory_and_strides_of_their_own():
    """A clip would scale twice what two parameters share; fused AdamW on CPUs takes strides like the parameter's."""
    module, model, x = load(SPLIT[0]), torch.nn.Module(), torch.randn(2, 3, 8, requires_grad=True)
    model.weight, model.delta, model.experts = (torch.nn.Parameter(torch.randn(2, 4, 8)) for _ in range(3))

    def output():
        return (x @ (model.weight + model.delta).mT + torch.bmm(x, model.experts.mT).square()).sum()

    for times in 1, 2:
        module.backward_input(model, [], x, output(), None)
        for p, gradient in zip(model.parameters(), torch.autograd.grad(output(), [*model.parameters()])):
            assert torch.allclose(p.grad, times * gradient) and p.grad.stride() == p.stride()
        assert model.weight.grad.data_ptr() != model.delta.grad.data_ptr()


def test_weight_gradients_are_added_up_in_fp32(monkeypatch):
    """... of bf16 operands, by a GPU also within a product. 257 is no number of bf16."""

    def addmm(total, dy, x, out_dtype, out):  # that of CPUs takes no out_dtype
        out.copy_((total + dy.float() @ x.float()).to(out_dtype))

    monkeypatch.setattr(torch, "addmm", addmm)
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    x, dy = (torch.ones(1, 257, n, dtype=torch.bfloat16).as_subclass(probes.OnGPU) for n in (2, 3))
    load(SPLIT[0]).backward_weights([(weight, x, dy)] * 3)
    assert (weight.grad == 257 * 3).all(), "sums are rounded"


def test_micro_batches_of_other_shapes_are_refused():
    """A larger one, or heads as an axis: gradients would be summed to the shape of the leaves of prepare_linears."""
    module = load(SPLIT[0])
    linear = module.Linear(4, 4)
    with pytest.raises(ValueError, match="3 sequences in 2 micro-batches: must have the same shape"):
        module.prepare_linears(linear, (torch.zeros(1, 8), torch.zeros(2, 8)), torch.float32)
    module.prepare_linears(linear, (torch.zeros(1, 8),), torch.float32)
    assert linear(torch.ones(1, 8, 4)).shape == (1, 8, 4)
    with pytest.raises(ValueError, match="x must have the shape"):
        linear(torch.ones(2, 1, 8, 4))


def logged_losses(run: Run) -> list[float]:
    """The losses of all steps and of the validations between them, as they are printed."""
    return [float(loss) for loss in re.findall(r"loss (\d\.\d+)", run.output[0])]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [SPLIT[0], ZBV])
def test_casts_are_those_of_the_newest_weights(recipe):
    """In bfloat16, losses of steps and validations are the root's; with casts of older weights, off by 2 percent."""
    flags = SMALL.replace("--steps 1", "--steps 3 --validate 1 --dtype bfloat16 --lr 1e-2 --warmup 0")
    root = launch("01_single_gpu/train.py", 1, flags.replace("--microbatches 8", ""))
    run = launch(recipe, 2, flags)
    for mine, theirs in zip(logged_losses(run), logged_losses(root), strict=True):
        assert abs(mine / theirs - 1) < 0.01, f"the loss is {mine}, not {theirs}"


def test_stages_are_balanced():
    """Every layer has one stage, and no other split has a slowest stage with fewer FLOPs: head and embedding count."""
    module = load(NAIVE)
    shapes = [dict(dim=64, ffn=96, vocab=256), dict(dim=64, ffn=96, vocab=4096), dict(dim=512, ffn=2048, vocab=256)]
    for shape, (layers, stages) in itertools.product(shapes, [(2, 2), (5, 3), (9, 4), (10, 5)]):
        cfg = module.Config(layers=layers, heads=4, kv_heads=2, **shape)
        split = module.split_layers(cfg, stages)
        assert [layer for part in split for layer in part] == list(range(layers)) and all(map(len, split))
        head = 6 * cfg.dim * cfg.vocab
        block = (module.flops_per_token(cfg) - head) / layers

        def slowest(*cuts, ends=(cfg.dim, head), block=block, layers=layers):
            first, *middle, last = (b - a for a, b in itertools.pairwise((0, *cuts, layers)))
            return max(first * block + ends[0], *(n * block for n in middle), last * block + ends[1])

        others = itertools.starmap(slowest, itertools.combinations(range(1, layers), stages - 1))
        assert slowest(*(part[0] for part in split[1:])) == min(others)
