"""Probes for launch(): each is called with a recipe's module before main, and may return what reports after."""

import functools
import gc
import itertools
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

Report = Callable[[], Any]


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Random normal elements, the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def together(*probes: Callable[[ModuleType], Report]) -> Callable[[ModuleType], Report]:
    """One probe of several: it reports the list of their reports."""

    def probe(module: ModuleType) -> Report:
        reports = [probe(module) for probe in probes]
        return lambda: [report and report() for report in reports]

    return probe


def saves(module: ModuleType) -> Report:
    """How many files this rank writes."""
    written, to_bytes = [0], module.to_bytes

    def noted(*args):
        written[0] += 1
        return to_bytes(*args)

    module.to_bytes = noted
    return lambda: written[0]


def phase() -> str:
    """Whether autograd computes gradients at the moment: "backward", else "forward"."""
    return "backward" if torch._C._current_graph_task_id() != -1 else "forward"


class Operations(TorchDispatchMode):
    """Calls seen(name, arguments, result) for every operation."""

    def __init__(self, seen: Callable[[str, tuple, object], object]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen(function._schema.name, args, result)
        return result


def watch_steps(module: ModuleType, begin: Callable[[], object], seen: Callable[[str, tuple, object], object]) -> None:
    """Call begin() before every step, and seen(name, arguments, result) for each of its operations."""
    train_step = module.train_step

    def step(*args):
        begin()
        with Operations(seen):
            return train_step(*args)

    module.train_step = step


SENT = {  # of each element that goes in, by a rank of n
    "allgather": lambda n: n - 1,
    "alltoall": lambda n: (n - 1) / n,
    "allreduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
}


def collective(name: str, args: tuple) -> tuple[str, list[torch.Tensor], ProcessGroup] | None:
    """The kind of a collective, the tensors that go in, and its group; None of all other operations."""
    if not name.startswith("c10d::") or "barrier" in name:
        return None
    kind = next((kind for kind in SENT if kind in name), name)
    given = args[0 if kind == "allreduce" else 1]
    group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
    return kind, given if isinstance(given, list | tuple) else [given], group


def communication(module: ModuleType) -> Report:
    """(Kind, dtype, elements that go in, size of the group) of each step's collectives, whoever asks for them."""
    steps = []

    def note(name, args, _):
        if found := collective(name, args):
            kind, tensors, group = found
            steps[-1].append((kind, str(tensors[0].dtype), sum(map(torch.numel, tensors)), group.size()))

    watch_steps(module, lambda: steps.append([]), note)
    return lambda: steps


def sent(module: ModuleType) -> Report:
    """Bytes that transfers of keys and of rows send from this rank, {"forward": ., "backward": .}; and who takes part
    in all-to-alls of all with all."""
    seen, meets = {"forward": 0, "backward": 0}, set()

    def note(name, args, _):
        kind, (x, *_), group = collective(name, args) or ("", [None], None)
        if kind not in ("allgather", "alltoall", "reduce_scatter"):
            return
        rows = len(x) * (group.size() - 1) if kind == "allgather" else len(x) - len(x) // group.size()
        if kind == "alltoall" and args[4]:  # how many rows each rank gets
            rows = len(x) - args[4][group.rank()]
        elif kind == "alltoall":
            meets.add(tuple(module.dist.get_process_group_ranks(group)))
        if x.is_floating_point():  # else counts
            seen[phase()] += rows * x[:1].nbytes

    watch_steps(module, lambda: None, note)
    return lambda: (seen, meets)


def transfers(module: ModuleType) -> Report:
    """[phase, width, whether there is a matmul between its start and the first wait] of every transfer of a step that
    is waited for after it has started."""
    found, matmuls = [], []

    class Work:
        def __init__(self, work, width):
            self.work, self.before, self.entry = work, len(matmuls), [phase(), width, None]
            found.append(self.entry)

        def wait(self):
            if self.entry[2] is None:  # the first wait counts
                self.entry[2] = len(matmuls) > self.before
            return self.work.wait()

    def starts(owner, name):
        original = getattr(owner, name)

        def start(*args, **kwargs):
            work = original(*args, **kwargs)
            if work is None and name == "reduce_scatter_tensor":  # it has waited itself
                found.append([phase(), args[0].shape[-1], False])
            return Work(work, args[0].shape[-1]) if work else None

        setattr(owner, name, start)

    for name in "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor":
        starts(module.dist, name)
    is_matmul = re.compile(r"mm\b|scaled_dot_product").search
    watch_steps(module, lambda: None, lambda name, *_: is_matmul(name) and matmuls.append(name))
    return lambda: found


def kept(module: ModuleType) -> Report:
    """Bytes of activations that a forward keeps for its backward, each storage once."""
    storages, sizes, forward = {}, [], module.forward

    def watched(cfg, model, *batch):
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            if tensor.is_floating_point() and tensor.ndim:  # else token ids, or their number
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(cfg, model, *batch)
        sizes.append(sum(storage.nbytes() for address, storage in storages.items() if address not in weights))
        storages.clear()
        return loss

    module.forward = watched
    return lambda: sizes[0]


class OnGPU(torch.Tensor):
    """A tensor in CPU memory that says it is on a GPU."""

    is_cuda = True


def settled(count: Callable[[], int], most: int, patience: float = 2) -> int:
    """What `count` gives once it is at most `most`; after `patience` seconds, what it still gives.

    gloo's threads let go of a tensor a moment after the wait for its transfer. What a recipe holds, stays.
    """
    end = time.monotonic() + patience
    while (now := count()) > most and time.monotonic() < end:
        time.sleep(0.001)
    return now


def bytes_of_tensors() -> int:
    """Bytes of all tensors on the CPU that were made since gc.freeze(), if that was called; each storage once.

    Of a DTensor, its local tensor counts.
    """
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def alive(references: list[weakref.ref], peak: int, enough: int) -> int:
    """Return peak, or how many of these tensors are in memory if that is more. A peak beyond enough is final."""
    if peak > enough:
        return peak
    return max(peak, settled(lambda: sum(reference() is not None for reference in references), enough))


def group_is_gone(patience: float) -> Callable[[ModuleType], Report]:
    """A probe: after main, whether there is a default process group, and how many threads of gloo are left.

    Of a group that outlives destroy_process_group, threads release tensors at the end of the process, which aborts it
    now and then. patience: seconds that the last of them may take to end.
    """

    def threads() -> int:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return sum("gloo" in name for name in names)

    def report() -> tuple[bool, int]:
        return torch.distributed.is_initialized(), settled(threads, 0, patience)

    return lambda module: report


def results_of_steps(module: ModuleType) -> Report:
    """[loss, gradient norm] of every step on this rank, as train_step returns them."""
    seen, train_step = [], module.train_step

    def step(*args):
        result = train_step(*args)
        seen.append([getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)().item() for tensor in result])
        return result

    module.train_step = step
    return lambda: seen


def waits(module: ModuleType) -> Report:
    """Asserts that what a step, or an evaluation, starts asynchronously, collectives and messages, is waited for before
    it ends."""
    if not hasattr(module, "dist"):
        return lambda: None
    group, started, watching = module.dist.ProcessGroup, [], [False]

    class Watched:
        def __init__(self, name, work):
            self.name, self.work, self.waited = name, work, False
            started.append(self)

        def wait(self, *timeout):
            work, self.work, self.waited = self.work, None, True  # it would hold the tensor
            return work.wait(*timeout) if work else True

    def watched(name, original):
        def start(*args, **kwargs):
            work = original(*args, **kwargs)
            return Watched(name, work) if watching[0] else work

        return start

    def whole(function):
        def call(*args):
            watching[0] = True
            result = function(*args)
            watching[0] = False
            forgotten = [work.name for work in started if not work.waited]
            assert not forgotten, f"nobody has waited for: {', '.join(forgotten)}"
            started.clear()
            return result

        return call

    names = (
        "allreduce allreduce_coalesced _allgather_base _reduce_scatter_base alltoall_base"  # until torch 2.11
        " all_gather_single reduce_scatter_single all_to_all_single send recv"
    )
    for name in names.split():
        if hasattr(group, name):
            setattr(group, name, watched(name, getattr(group, name)))
    module.train_step, module.evaluate = whole(module.train_step), whole(module.evaluate)
    return lambda: None


def whole_parameters(module: ModuleType) -> Report:
    """The bits of this rank's parameters that have the shape of the whole model's, by name, after training."""
    models, build_model = [], module.build_model
    module.build_model = lambda *args: models.append(build_model(*args)) or models[0]
    shapes: dict[str, torch.Size] = {}

    def noted(draw, cfg, name, shape):
        shapes[name] = shape
        return draw(cfg, name, shape)

    for draw in {"full_tensor", "full_adapter"} & vars(module).keys():
        setattr(module, draw, functools.partial(noted, getattr(module, draw)))

    def report() -> dict[str, bytes]:
        found = {}
        for name, p in models[0].named_parameters():
            p = p.detach()
            whole = not hasattr(p, "placements") and p.shape == shapes.get(name) and p.untyped_storage().nbytes()
            if whole:
                found[name] = p.numpy().tobytes()
        return found

    return report


def dtypes_of_the_optimizer(module: ModuleType) -> Report:
    """The dtypes of all that the optimizer reads and writes: parameters, gradients, moments.

    Of an optimizer that keeps masters, those and the moments: it takes gradients as they come.
    """
    seen, optimizers, make = set(), [], module.make_optimizer
    module.make_optimizer = lambda *args: optimizers.append(make(*args)) or optimizers[0]
    if hasattr(module, "Slot"):
        return lambda: sorted({str(t.dtype) for s in optimizers[0].slots for t in (s.master, s.mean, s.square)})
    clip = module.clip_gradients

    def clipped(*args):
        for group in optimizers[0].param_groups:
            for p in group["params"]:
                seen.update(str(t.dtype) for t in (p, p.grad) if t is not None)
        return clip(*args)

    def report() -> list[str]:
        for state in optimizers[0].state.values():
            seen.update(str(state[key].dtype) for key in ("exp_avg", "exp_avg_sq", "momentum") if key in state)
        return sorted(seen)

    module.clip_gradients = clipped
    return report


def slow_steps(working: int, reading: int, batching: int, seconds: float) -> Callable[[ModuleType], Report]:
    """A probe that puts the clock forward in train_step in step `working`, while the loss of step `reading` is read,
    and while the batch is made that is made during step `batching`."""

    def probe(module: ModuleType) -> Report:
        steps, train_step, item, make_batch = [0], module.train_step, torch.Tensor.item, module.make_batch
        clock, ahead = time.perf_counter, [0.0]
        time.perf_counter = lambda: clock() + ahead[0]

        def step(*args):
            steps[0] += 1
            ahead[0] += seconds * (steps[0] == working)
            result = train_step(*args)
            if steps[0] == reading:
                torch.Tensor.item = slow_item
            return result

        def slow_item(tensor):
            torch.Tensor.item = item
            ahead[0] += seconds
            return tensor.item()

        def batch(cfg, data, number):
            ahead[0] += seconds * (number == batching)  # the first has number 0
            return make_batch(cfg, data, number)

        module.train_step, module.make_batch = step, batch
        return lambda: None

    return probe


def things_in_memory(module: ModuleType) -> Report:
    """Tensors, other objects of Python, hooks on parameters, gradients: when steps 5 and 9 begin, after collection."""
    models, counts, steps, train_step = [], [], [0], module.train_step
    build_model = module.build_model

    def build(*args):
        model = build_model(*args)
        models.append(weakref.ref(model))
        return model

    def count() -> tuple[int, int, int, int]:
        gc.collect()
        things = gc.get_objects()
        tensors = [thing for thing in things if issubclass(type(thing), torch.Tensor)]
        gradients = sum(tensor.is_leaf and tensor.grad is not None for tensor in tensors)
        return len(tensors), len(things) - len(tensors), hooks(), gradients

    def hooks() -> int:
        kept = [(p._post_accumulate_grad_hooks, p._backward_hooks) for p in models[0]().parameters()]
        return sum(len(hooks or {}) for pair in kept for hooks in pair)

    def step(*args):
        steps[0] += 1
        if steps[0] in (5, 9):  # what steps 5 to 8 have left
            for _ in range(100):
                now = count()
                if not counts or all(new <= old for new, old in zip(now, counts)):
                    break
                time.sleep(0.02)  # gloo's threads let go of what they have sent a moment after the wait for it
            counts.extend(now)
        return train_step(*args)

    module.build_model, module.train_step = build, step
    return lambda: {kind: counts[i::4] for i, kind in enumerate(("tensors", "objects", "hooks", "gradients"))}


def kept_outside_autograd(enough: int) -> Callable[[ModuleType], Report]:
    """A probe: bytes that a forward leaves although what it saves is thrown away. enough: as in left_by_backward."""

    def probe(module: ModuleType) -> Report:
        kept, train_step = [], module.train_step

        def step(cfg, *args):
            result = train_step(cfg, *args)
            *_, model, _, inputs, targets = args
            model = model.chunks[0] if hasattr(model, "chunks") else model  # where a rank has several stages, the first
            x, targets = held(module, cfg, model, inputs, targets)
            if getattr(model, "stage", 0):  # a later one; on a mesh, a rank of tp has its rows of the tokens
                shape = (x.numel() // model.tp.size(), cfg.dim) if on_mesh(model) else (*x.shape, cfg.dim)
                x = torch.zeros(shape, requires_grad=True)
            with torch.no_grad():  # of fewer sequences: leaves weights that are gathered
                module.forward(cfg, model, x[: len(x) // 8], targets[: len(targets) // 8])
            before = settled(bytes_of_tensors, 0, 0.05)
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
                out = module.forward(cfg, model, x, targets)
            there = before + out.untyped_storage().nbytes()
            kept.append(settled(lambda: bytes_of_tensors() - there, enough))
            return result

        module.train_step = step
        return lambda: kept[-1]

    return probe


def left_by_backward(enough: int) -> Callable[[ModuleType], Report]:
    """A probe: bytes beside the gradients that the last backward leaves while its graph is still there.

    enough: bytes that may be left; more is waited for, as gloo's threads let go late.
    """

    def probe(module: ModuleType) -> Report:
        forward_backward, backward, start, left = module.forward_backward, torch.Tensor.backward, [0], []

        def step(cfg, model, *batch):
            def watched(loss):
                backward(loss)
                there = start[0] + sum(p.grad.nbytes for p in model.parameters() if p.requires_grad)
                left.append(settled(lambda: bytes_of_tensors() - there, enough))

            torch.Tensor.backward, start[0] = watched, bytes_of_tensors()
            return forward_backward(cfg, model, *batch)

        module.forward_backward = step
        return lambda: left[-1]

    return probe


def last_rank_is_late(module: ModuleType) -> Report:
    """The last rank has its new weights, or shards of them, when the others may already gather them."""
    clip = module.clip_gradients

    def late(*args):
        norm = clip(*args)  # all ranks wait for it
        time.sleep(0.05 * (module.dist.get_rank() == module.dist.get_world_size() - 1))
        return norm

    module.clip_gradients = late
    return lambda: None


def dies_in_the_second_step(module: ModuleType) -> Report:
    """The last rank fails while the others go on to a collective that it will never join."""
    original, steps = module.train_step, []

    def train_step(*args):
        steps.append(1)
        last = not hasattr(module, "dist") or module.dist.get_rank() == module.dist.get_world_size() - 1
        if last and len(steps) == 2:
            raise RuntimeError("the last rank has had enough")
        return original(*args)

    module.train_step = train_step
    return lambda: None


def ends_early(module: ModuleType) -> Report:
    """The line with which train ends, None if it does not."""
    original, lines = module.train, []

    def train(*args):
        try:
            original(*args)
        except SystemExit as end:
            lines.append(end.code)

    module.train = train
    return lambda: lines[0] if lines else None


def batches(module: ModuleType) -> Report:
    """How many tokens are trained on and held out; then of each batch that is made its step, and how many it is of."""
    made, load_data, make_batch = [], module.load_data, module.make_batch

    def load(cfg):
        parts = load_data(cfg)
        made.append(tuple(len(ids) for ids, _ in parts))
        return parts

    def batch(cfg, data, step):
        made.append((step, len(data[0])))
        return make_batch(cfg, data, step)

    module.load_data, module.make_batch = load, batch
    return lambda: made


def on_mesh(model) -> bool:
    """Whether a model is split in all ways at once, as those of 08_4d."""
    return hasattr(model, "dp_tp") or hasattr(model, "dp_cp")


def held(module: ModuleType, cfg, model, *batch: torch.Tensor) -> list[torch.Tensor]:
    """What forward takes of tensors [b, s]: with context parallelism, this rank's tokens; of a mesh, its sequences."""
    if on_mesh(model):
        batch = [x.chunk(model.dp.size())[model.dp.rank()] for x in batch]
    if hasattr(module, "attention") and hasattr(model, "cp"):
        return [x[:, module.shard(cfg, model.cp)] for x in batch]
    return list(batch)


def evaluated(double: bool = True, odd: bool = False, inference: bool = True) -> Callable[[ModuleType], Report]:
    """A probe: what `evaluate` returns on this rank: after the first step twice, and of another batch; after the last.

    The other batch has twice as many sequences, or half as many if not `double`; if `odd` one more, which makes ranks'
    parts and micro-batches unequal, and a third batch has one sequence. `inference`: the other is read in that mode.
    """

    def probe(module: ModuleType) -> Report:
        losses, steps, train_step = [], [], module.train_step

        def step(cfg, *args):
            *_, model, _, inputs, targets = args
            result = train_step(cfg, *args)
            other = [torch.cat((x, x.flip(1))) if double else x[: len(x) // 2] for x in (inputs, targets)]
            other = [torch.cat((x, x[:1])) if odd else x for x in other]
            steps.append(1)
            fewer = [(inputs[:1], targets[:1])] if odd else []
            after = {cfg.steps: [(inputs, targets)], 1: [(inputs, targets), (inputs, targets), other, *fewer]}
            for batch in after.get(len(steps), []):
                with torch.inference_mode(inference and batch is other):
                    losses.append(module.evaluate(cfg, model, *batch).item())
            return result

        module.train_step = step
        return lambda: losses

    return probe


def activations_in_memory(module: ModuleType) -> Report:
    """The most micro-batches, or chunks of them, whose saved activations are in memory at the end of a forward."""
    saved, peak, forwards = weakref.WeakSet(), [0], itertools.count()
    original = module.forward

    class Saved:
        def __init__(self, tensor, micro):
            self.tensor, self.micro = tensor, micro

    def forward(*args):
        micro = next(forwards)

        def pack(tensor):
            box = Saved(tensor, micro)
            saved.add(box)
            return box

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            output = original(*args)
        peak[0] = max(peak[0], len({box.micro for box in saved}))
        return output

    module.forward = forward
    return lambda: peak[0]


def kind_of(part: torch.nn.Module) -> str:
    """The name of a module's class. fully_shard makes it a subclass, and FSDPBlock of Block."""
    return type(part).__name__.removeprefix("FSDP")


def dtypes(module: ModuleType) -> Report:
    """The dtypes of what every kind of part of the model hands on: {"Block": ["torch.bfloat16"], ...}."""
    seen, build_model = {}, module.build_model

    def watched(*args):
        model = build_model(*args)
        for part in model.modules():
            part.register_forward_hook(note)
        return model

    def note(part, args, out) -> None:
        seen.setdefault(kind_of(part), set()).add((out[0] if isinstance(out, tuple) else out).dtype)

    module.build_model = watched
    return lambda: {kind: sorted(map(str, dtypes)) for kind, dtypes in seen.items()}


def compiled(module: ModuleType) -> Report:
    """The kinds of parts of the model that are compiled, and those that are not."""
    models, build_model = [], module.build_model
    module.build_model = lambda *args: models.append(build_model(*args)) or models[0]

    def kinds(is_compiled):
        model, wrapper = models[0], torch._dynamo.OptimizedModule
        inside = {part._orig_mod: True for part in model.modules() if isinstance(part, wrapper)}
        # .compile() of a module of torch.nn compiles nothing
        own = {part: not type(part).__module__.startswith("torch.nn.") for part in model.modules()}
        known = {part: inside.get(part, own[part] and bool(part._compiled_call_impl)) for part in model.modules()}
        return {kind_of(part) for part, yes in known.items() if yes == is_compiled and not isinstance(part, wrapper)}

    return lambda: [kinds(True), kinds(False)]


def freezes(*names: str) -> Callable[[ModuleType], Report]:
    """A probe: parameters whose names contain one of these are not trained."""

    def probe(module: ModuleType) -> Report:
        init = module.Model.__init__

        def frozen(self, *args):
            init(self, *args)
            for name, p in self.named_parameters():
                p.requires_grad_(p.requires_grad and not any(part in name for part in names))

        module.Model.__init__ = frozen
        return lambda: None

    return probe


def one_sequence_alone_runs_a_block(module: ModuleType) -> Report:
    """One sequence of a global batch, the first or the last in turns, goes through block 2; the others skip it."""
    batches, ran = [], [0]
    train_step, forward, block_forward = module.train_step, module.Model.forward, module.Block.forward
    module.train_step = lambda *args: batches.append(args[-2]) or train_step(*args)

    def chosen_forward(self, ids):
        self.model.layers[2].chosen = (ids == batches[-1][-(len(batches) % 2 == 0)]).all(1)
        return forward(self, ids)

    def chosen_block(self, x, rope):
        chosen = getattr(self, "chosen", None)
        if chosen is None:
            return block_forward(self, x, rope)
        if not chosen.any():
            return x + 0  # a tensor of its own, as from every block
        ran[0] += 1
        return torch.where(chosen[:, None, None], block_forward(self, x, rope), x)

    module.Model.forward, module.Block.forward = chosen_forward, chosen_block
    return lambda: ran[0]


def gathered_at_a_time(module: ModuleType) -> Report:
    """Most blocks whose weights are in memory when one is gathered or a part computes, and of other units; after."""
    models, blocks, ends, build_model, train_step = [], [0], [0], module.build_model, module.train_step
    after, gather = [], module.gather

    def here():
        return [unit.full.untyped_storage().nbytes() > 0 for unit in models[0].units]

    def count(*_):
        first, *middle, last = here()
        blocks[0], ends[0] = max(blocks[0], sum(middle)), max(ends[0], first + last)

    def build(cfg):
        models.append(build_model(cfg))
        for part in models[0].modules():
            part.register_forward_pre_hook(count)
            part.register_full_backward_pre_hook(count)
        return models[0]

    def step(*args):
        result = train_step(*args)
        after.append(sum(here()))
        return result

    module.gather = lambda *args: gather(*args) or count()
    module.build_model, module.train_step = build, step
    return lambda: [blocks[0], ends[0], max(after)]
