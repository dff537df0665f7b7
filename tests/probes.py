"""Probes for launch(): each is called with a recipe's module before main, and returns a function that reports after."""

import contextlib
import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Report = Callable[[], Any]


def together(*probes: Callable[[ModuleType], Report]) -> Callable[[ModuleType], Report]:
    """One probe of several: it reports the list of their reports."""

    def probe(module: ModuleType) -> Report:
        reports = [probe(module) for probe in probes]
        return lambda: [report() for report in reports]

    return probe


def calls(*names: str) -> Callable[[ModuleType], Report]:
    """A probe: how often functions of the module are called, in the order of their names."""

    def probe(module: ModuleType) -> Report:
        counts = dict.fromkeys(names, 0)

        def counting(name, original):
            def wrapper(*args, **kwargs):
                counts[name] += 1
                return original(*args, **kwargs)

            return wrapper

        for name in names:
            setattr(module, name, counting(name, getattr(module, name)))
        return lambda: list(counts.values())

    return probe


def valid_tokens(module: ModuleType) -> Report:
    """The number of valid targets of each sequence of the first batch."""
    made = []
    original = module.make_batch
    module.make_batch = lambda *args: made.append(original(*args)) or made[-1]
    return lambda: (made[0][1] != module.IGNORE).sum(1).tolist()


def threads_of_gloo(module: ModuleType) -> Report:
    """How many threads of gloo are left after main (Linux). They release tensors, which aborts a process at its end."""

    def threads() -> int:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return sum("gloo" in name for name in names)

    def report() -> int:
        end = time.monotonic() + 5
        while threads() and time.monotonic() < end:  # one may still be about to end
            time.sleep(0.01)
        return threads()

    return report


def steps_of_batches(module: ModuleType) -> Report:
    """The steps for which batches are made."""
    steps, original = [], module.make_batch
    module.make_batch = lambda cfg, data, step: steps.append(step) or original(cfg, data, step)
    return lambda: steps


def validation_loss(module: ModuleType, cfg, model, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The mean loss of a batch, as a validation loop computes it: on every rank, under no_grad."""
    tokens = (targets != module.IGNORE).sum()
    with torch.no_grad():
        if hasattr(module, "run_schedule"):
            micro = inputs.chunk(2), targets.chunk(2)
            loss = module.run_schedule(cfg, model, [("F", i) for i in range(len(micro[0]))], *micro, tokens)
            module.dist.all_reduce(loss)
            return loss.item()
        if hasattr(module, "receive"):  # a pipeline of one micro-batch
            arrived = module.receive(model, "F", (*inputs.shape, cfg.dim), getattr(torch, cfg.dtype), inputs.device)
            loss = module.forward(cfg, model, inputs if arrived is None else arrived, targets)
            module.send(model, "F", loss)
            loss = loss.clone() if model.stage == model.stages - 1 else torch.zeros(())
            module.dist.all_reduce(loss)
            return (loss / tokens).item()
        loss = module.forward(cfg, model, inputs, targets)
        return (getattr(loss, "full_tensor", lambda: loss)() / tokens).item()


def evaluated(module: ModuleType) -> Report:
    """Validation losses: before the first step, and twice after every step, the second time of half a batch."""
    losses, train_step = [], module.train_step

    def step(cfg, *args):
        *_, model, _, inputs, targets = args
        half = len(inputs) // 2
        if not losses:
            losses.append(validation_loss(module, cfg, model, inputs, targets))
        result = train_step(cfg, *args)
        losses.append(validation_loss(module, cfg, model, inputs, targets))
        losses.append(validation_loss(module, cfg, model, inputs[:half], targets[:half]))
        return result

    module.train_step = step
    return lambda: losses


def activations_in_memory(module: ModuleType) -> Report:
    """The most micro-batches whose saved activations are in memory at the end of a forward."""
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
    seen, forward = {}, module.forward

    def watched(cfg, model, *batch):
        for part in model.modules():
            kind = kind_of(part)
            part.register_forward_hook(lambda part, args, out, kind=kind: seen.setdefault(kind, set()).add(out.dtype))
        return forward(cfg, model, *batch)

    module.forward = watched
    return lambda: {kind: sorted(map(str, dtypes)) for kind, dtypes in seen.items()}


def compiled(module: ModuleType) -> Report:
    """The kinds of parts of the model that are compiled, and those that are not."""
    models, build_model = [], module.build_model
    module.build_model = lambda *args: models.append(build_model(*args)) or models[0]

    def kinds(is_compiled):
        return {kind_of(part) for part in models[0].modules() if bool(part._compiled_call_impl) == is_compiled}

    return lambda: [kinds(True), kinds(False)]


def reductions(when: str) -> Callable[[ModuleType], Report]:
    """A probe: asynchronous all-reduces happen "at once" or "late", when they are waited for, which they may be once.

    What is compiled goes through the first half of the compiler alone, which is quick.
    """

    def probe(module: ModuleType) -> Report:
        dist, compile_ = module.dist, torch.nn.Module.compile
        all_reduce, coalesced = dist.all_reduce, dist.ProcessGroup.allreduce_coalesced

        class Work:
            def __init__(self, start):
                self.start = start
                if when == "at once":
                    start().wait()

            def wait(self):
                start, self.start = self.start, None
                assert start, "waited for twice"
                if when == "late":
                    start().wait()

        def reduce(tensor, async_op=False):
            return Work(lambda: all_reduce(tensor, async_op=True)) if async_op else all_reduce(tensor)

        dist.all_reduce = reduce
        dist.ProcessGroup.allreduce_coalesced = lambda group, tensors: Work(lambda: coalesced(group, tensors))
        torch.nn.Module.compile = lambda part: compile_(part, backend="aot_eager")
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


class Queue:
    """Work in its order, done when it is put there, or as late as it is asked for."""

    def __init__(self, late: bool):
        self.late, self.todo, self.done = late, [], 0

    def put(self, work: Callable[[], None]) -> int:
        """Its number."""
        self.todo.append(work)
        if not self.late:
            self.run()
        return self.done + len(self.todo)

    def run(self, number: int | None = None) -> None:
        """Do all work, or that up to a number."""
        while self.todo and (number is None or self.done < number):
            work = self.todo.pop(0)
            self.done += 1
            work()


class Stream(Queue):
    """What recipes do with a side stream of a GPU. Counts how often it is used, and waits for the main stream."""

    uses = waits = 0

    def wait_stream(self, main) -> None:
        self.waits += 1

    def record_event(self) -> Callable[[], None]:
        """What waits for all that is here by now."""
        number = self.done + len(self.todo)
        return lambda: self.run(number)

    def synchronize(self) -> None:
        self.run()


def writing(tensors: list[torch.Tensor], work: Callable[[], None]) -> Callable[[], None]:
    """The work that will write them. Autograd takes them for written now, as when a GPU is told to."""
    tensors = tuple(tensors)
    torch.autograd.graph.increment_version(tensors)

    def then() -> None:
        with torch.autograd._unsafe_preserve_version_counter(tensors):
            work()

    return then


class OnStream(TorchDispatchMode):
    """Puts the operations on tensors into a stream. What gives a new tensor gives it now, and fills it then."""

    def __init__(self, stream: Stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, function._schema
        given = {**{a.name: value for a, value in zip(schema.arguments, args)}, **kwargs}
        written = [given[a.name] for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if written:
            self.stream.put(writing(written, lambda: function(*args, **kwargs)))
            return written[0]
        out = function(*args, **kwargs)
        if not any(r.alias_info for r in schema.returns):  # else a view
            self.stream.put(lambda: out.copy_(function(*args, **kwargs)))
        return out


def streams(when: str) -> Callable[[ModuleType], Report]:
    """A probe: a GPU's side streams at their extremes. What is put on them, and every collective, happens "at once", or
    "late": when the main stream waits for it, or for what comes after it on the same stream or in the same group.

    What is compiled goes through the first half of the compiler alone, which is quick.
    Reports [uses, waits for the main stream before] of each side stream.
    """
    late = {"late": True, "at once": False}[when]

    def probe(module: ModuleType) -> Report:
        dist, current, made = module.dist, [None], []  # the stream in use, None for the main one
        groups = defaultdict(lambda: Queue(late))  # by name
        build_model, compile_ = module.build_model, torch.nn.Module.compile

        class Work:
            """A collective, put in its group's queue by the stream in use, which others may wait for."""

            def __init__(self, group, outputs, start):
                stream = current[0]
                before = stream.done + len(stream.todo) if stream else 0  # on its stream

                def work():
                    if stream:
                        stream.run(before)
                    start().wait()

                self.queue = groups[(group or dist.group.WORLD).group_name]
                self.number = self.queue.put(writing(outputs, work))

            def wait(self):
                if current[0]:
                    current[0].put(lambda: self.queue.run(self.number))
                else:
                    self.queue.run(self.number)

        def deferred(original):
            def collective(*tensors, group=None, async_op=False):
                work = Work(group, tensors[:1], lambda: original(*tensors, group=group, async_op=True))
                return work if async_op else work.wait()

            return collective

        @contextlib.contextmanager
        def on(stream):
            previous, current[0] = current[0], stream
            if stream:
                stream.uses += 1
            with OnStream(stream) if stream and late else contextlib.nullcontext():
                yield
            current[0] = previous

        class Main:
            def wait_stream(self, stream):
                stream.run()

            def wait_event(self, event):
                event()
                if late and dist.get_rank() == 0:
                    time.sleep(0.005)  # the others are ahead

        def build(*args):
            model = build_model(*args)
            for name in "gathers", "stream":
                if hasattr(model, name):
                    made.append(Stream(late))
                    setattr(model, name, made[-1])
            return model

        share = getattr(module, "share", None)

        def shared(*args):
            memory, barrier = share(*args)
            return memory, lambda: current[0].put(barrier) if current[0] else barrier()

        if share:
            module.share = shared

        def of_a_group(original):
            return lambda group, output, mine: Work(group, [output], lambda: original(group, output, mine))

        for name in "_allgather_base", "_reduce_scatter_base":
            setattr(dist.ProcessGroup, name, of_a_group(getattr(dist.ProcessGroup, name)))
        for name in "all_to_all_single", "all_reduce":
            setattr(dist, name, deferred(getattr(dist, name)))
        for device in torch.cuda, torch.cpu:
            device.stream, device.current_stream = on, Main
        torch.cpu.Stream = lambda: made.append(Stream(late)) or made[-1]
        torch.nn.Module.compile = lambda part: compile_(part, backend="aot_eager")
        module.build_model = build
        return lambda: [[stream.uses, stream.waits] for stream in made]

    return probe


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


def never_a_process_group(module: ModuleType) -> Report:
    """No process group may be made."""

    def forbidden(*_, **__):
        raise AssertionError("made a process group before looking at the flags")

    if hasattr(module, "dist"):
        module.dist.init_process_group = forbidden
    return lambda: None
