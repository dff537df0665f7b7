"""Probes for launch(): each is called with a recipe's module before main, and returns a function that reports after."""

import itertools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

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


def steps_of_batches(module: ModuleType) -> Report:
    """The steps for which batches are made."""
    steps, original = [], module.make_batch
    module.make_batch = lambda cfg, data, step: steps.append(step) or original(cfg, data, step)
    return lambda: steps


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


def never_a_process_group(module: ModuleType) -> Report:
    """No process group may be made."""

    def forbidden(*_, **__):
        raise AssertionError("made a process group before looking at the flags")

    if hasattr(module, "dist"):
        module.dist.init_process_group = forbidden
    return lambda: None
