"""The streams of a GPU, simulated on a CPU at their two extremes: everything happens at once, or as late as it may.

On a GPU the main stream computes, side streams copy and add, and collectives run on streams of their own. Only waits
order them: an operation happens at some time between its start and the end of the first wait for it. What is missing,
a wait, shows as a wrong number once a week. Here the two ends of that interval are tried on purpose. If both give the
numbers of one device, to 1e-10 in float64, no wait is missing that these numbers depend on.

- A `Queue` holds work that has been started and has not happened. Each group of ranks has one for its collectives,
  each side stream one for its operations. `wait` makes what is waited for happen, and all that is before it.
- Operations on tensors are caught below autograd (`OnStream`), collectives where Python hands them to a process group
  (`COLLECTIVES` says what each one writes). A collective that is missing there is refused: it would not be late.
- Whatever is started must be waited for before the step ends, by the main stream or by a side stream.
- A side stream waits for the main one whenever it is given something to read, and right before that: else it may read
  too early.
- Memory: what a side stream still reads or writes must belong to somebody else too, else a GPU's allocator gives it
  away (`Loan`). Exempt is what the side stream itself has allocated; a collective keeps what it uses until it is waited
  for.
- A message is sent at once, because its receiver may already wait for it; it must not change until it has been waited
  for.

Not simulated: DistributedDataParallel and DTensor, which start their collectives from C++.

    launch("03_zero/zero3.py", 2, flags, probe=streams("late"))
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = {  # methods of a process group, and which of the arguments that follow it writes
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "broadcast": 0,
    "_allgather_base": 0,
    "_reduce_scatter_base": 0,
    "alltoall_base": 0,
    "all_gather_single": 0,  # from here on the names of torch 2.13
    "reduce_scatter_single": 0,
    "all_to_all_single": 0,
    "barrier": None,
}
NOT_SIMULATED = (
    "all_gather_single_coalesced allgather allgather_coalesced allgather_into_tensor_coalesced alltoall gather "
    "recv_anysource reduce reduce_scatter reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter"
).split()


class Queue:
    """Work in its order, done when it is put there, or as late as it is asked for."""

    def __init__(self, late: bool):
        self.late, self.todo, self.done = late, [], 0

    def put(self, work: Callable[[], None]) -> int:
        """Start work; return its number."""
        self.todo.append(work)
        if not self.late:
            self.run()
        return self.end()

    def end(self) -> int:
        """The number of the last work that has been started."""
        return self.done + len(self.todo)

    def run(self, number: int | None = None) -> None:
        """Do all work, or that up to a number."""
        while self.todo and (number is None or self.done < number):
            work = self.todo.pop(0)
            self.done += 1
            work()


class Stream(Queue):
    """A side stream, as far as recipes use it. Waiting for the main stream takes nothing: that one is never late."""

    def __init__(self, late: bool):
        super().__init__(late)
        self.allocated: dict[int, StorageWeakRef] = {}  # storages that operations of this stream have made
        self.has_waited = False  # for the main stream, before what is put here now
        self.missed: Missed | None = None  # looks at the main stream since then

    def wait_stream(self, main) -> None:
        if not self.missed:
            self.missed = Missed(self)
            self.missed.__enter__()
        self.has_waited = True

    def begin(self) -> None:
        """End the look at the main stream: from here on, operations are this stream's."""
        if self.missed:
            self.missed.__exit__(None, None, None)
            self.missed = None

    def record_event(self) -> Callable[[], None]:
        """Return the wait for all that has been started by now."""
        number = self.end()
        return lambda: self.run(number)

    def synchronize(self) -> None:
        self.run()

    def owns(self, tensor: torch.Tensor) -> bool:
        storage = self.allocated.get(tensor.untyped_storage()._cdata)
        return storage is not None and not storage.expired()


class Loan:
    """Tensors that work will use later: aliases, which keep the memory here and leave its ownership where it was."""

    lent = Counter()  # by storage, the aliases of all loans

    def __init__(self, arguments, stream: Stream | None):
        self.aliases: list[torch.Tensor] = []
        self.arguments = torch.utils._pytree.tree_map_only(torch.Tensor, self.alias, arguments)
        self.watched = [t for t in self.aliases if not (stream and stream.owns(t))]
        assert not (stream and self.watched) or stream.has_waited, "a side stream does not wait for what it reads"
        Loan.lent.update(t.untyped_storage()._cdata for t in self.aliases)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        self.aliases.append(tensor.detach())
        return self.aliases[-1]

    def take(self):
        """Return the arguments, to be used now. Raises if nobody but loans holds their memory any more."""
        for tensor in self.watched:
            storage = tensor.untyped_storage()
            others = torch._C._storage_Use_Count(storage._cdata) - 1 - Loan.lent[storage._cdata]  # 1: `storage`
            assert others > 0, f"memory of {list(tensor.shape)} was let go while a side stream had still to use it"
        Loan.lent.subtract(t.untyped_storage()._cdata for t in self.aliases)
        return self.arguments


def writing(tensors: list[torch.Tensor], work: Callable[[], None]) -> Callable[[], None]:
    """Return the work that will write these tensors. Autograd takes them for written now, as when a GPU is told to."""
    tensors = tuple(tensor.detach() for tensor in tensors)  # aliases: who owns them is not changed
    torch.autograd.graph.increment_version(tensors)
    Loan.lent.update(t.untyped_storage()._cdata for t in tensors)

    def then() -> None:
        Loan.lent.subtract(t.untyped_storage()._cdata for t in tensors)
        with torch.autograd._unsafe_preserve_version_counter(tensors):
            work()

    return then


class Missed(TorchDispatchMode):
    """The main stream computes after a side stream has waited for it: that wait does not count."""

    def __init__(self, stream: Stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(not r.alias_info or r.alias_info.is_write for r in function._schema.returns):  # else a view
            self.stream.has_waited = False
        return function(*args, **(kwargs or {}))


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
            loan = Loan((args, kwargs), self.stream)
            self.stream.put(writing(written, lambda: run(function, loan)))
            return written[0]
        out = function(*args, **kwargs)
        if not any(r.alias_info for r in schema.returns):  # else a view
            storage = out.untyped_storage()
            self.stream.allocated[storage._cdata] = StorageWeakRef(storage)
            if "empty" not in schema.name:  # which reads nothing, and writes nothing
                room, loan = Loan(out, self.stream), Loan((args, kwargs), self.stream)
                self.stream.put(writing([out], lambda: room.take().copy_(run(function, loan))))
        return out


def run(function: Callable, loan: Loan):
    args, kwargs = loan.take()
    return function(*args, **kwargs)


def streams(when: str) -> Callable[[ModuleType], Callable[[], None]]:
    """Return a probe for launch(): side streams and collectives are "at once", or "late".

    What is compiled goes through the first half of the compiler alone, which is quick: gradients come in the order in
    which a compiled block makes them.
    """
    late = {"late": True, "at once": False}[when]

    def probe(module: ModuleType) -> Callable[[], None]:
        dist, current = module.dist, [None]  # the stream in use, None for the main one
        queues = defaultdict(lambda: Queue(late))  # of collectives, by the name of their group
        started, in_step, build_model, train_step = [], [False], module.build_model, module.train_step
        compile_ = torch.nn.Module.compile

        class Work:
            """A collective: put into its group's queue behind what is before it on its stream."""

            def __init__(self, group, name: str, start: Callable, arguments: tuple, written: list[torch.Tensor]):
                stream, self.name, self.waited, self.let_go = current[0], name, False, False
                before, loan = stream.end() if stream else 0, Loan(arguments, stream)

                def work():
                    if stream:
                        stream.run(before)
                    if not self.let_go:
                        loan.watched = []  # the collective keeps its tensors itself
                    start(group, *loan.take()).wait()

                self.queue = queues[group.group_name]
                self.number = self.queue.put(writing(written, work))
                started.append(self)

            def wait(self, *_) -> bool:
                self.waited = True
                if current[0]:  # the process goes on, and from here on what the collective uses is not its own
                    self.let_go = True
                    current[0].put(partial(self.queue.run, self.number))
                else:
                    self.queue.run(self.number)
                return True

        class Message:
            """A message on its way: it has been sent, and must not change until it is waited for."""

            def __init__(self, work, tensors: list[torch.Tensor]):
                self.name, self.work, self.waited = "send", work, False
                self.tensors = [(tensor, tensor.clone()) for tensor in tensors]
                started.append(self)

            def wait(self, *_) -> bool:
                self.waited = True
                assert all(torch.equal(*pair) for pair in self.tensors), "a message has changed while it was sent"
                return self.work.wait()

        def deferred(name, which, original):
            def collective(group, *arguments, **options):
                tensors = arguments[which] if which is not None else []
                tensors = tensors if isinstance(tensors, list | tuple) else [tensors]
                return Work(group, name, lambda g, *args: original(g, *args, **options), arguments, tensors)

            return collective

        def refused(name, original):
            def collective(*args, **kwargs):
                assert not in_step[0], f"ProcessGroup.{name}: say in streams.COLLECTIVES what it writes"
                return original(*args, **kwargs)

            return collective

        @contextlib.contextmanager
        def on(stream):
            previous, current[0] = current[0], stream
            if stream:
                stream.begin()
            with OnStream(stream) if stream and late else contextlib.nullcontext():
                yield
            current[0] = previous
            if stream:
                stream.has_waited = False

        class Main:
            def wait_stream(self, stream):
                stream.run()

            def wait_event(self, event):
                event()

        def build(*args):
            model = build_model(*args)
            for part in (model, getattr(model, "shared", None)):
                for name in ("gather_stream", "reduce_stream", "stream"):
                    if getattr(part, name, 0) is None:
                        object.__setattr__(part, name, Stream(late))  # a dataclass may be frozen
            for stage in getattr(model, "chunks", ()):
                if hasattr(stage, "gather_stream"):
                    stage.gather_stream, stage.reduce_stream = model.gather_stream, model.reduce_stream
            return model

        def step(*args):
            started.clear()
            in_step[0] = True
            result = train_step(*args)
            in_step[0] = False
            forgotten = [work.name for work in started if not work.waited]
            assert not forgotten, f"nobody has waited for: {', '.join(forgotten)}"
            return result

        group, send = dist.ProcessGroup, dist.ProcessGroup.send
        for name in filter(partial(hasattr, group), COLLECTIVES):
            setattr(group, name, deferred(name, COLLECTIVES[name], getattr(group, name)))
        for name in filter(partial(hasattr, group), NOT_SIMULATED):
            setattr(group, name, refused(name, getattr(group, name)))
        group.send = lambda self, tensors, *args: Message(send(self, tensors, *args), tensors)
        for device in torch.cuda, torch.cpu:
            device.stream, device.current_stream = on, Main
        torch.cpu.Stream = lambda: Stream(late)
        torch.nn.Module.compile = lambda part: compile_(part, backend="aot_eager")
        module.build_model, module.train_step = build, step
        return lambda: None

    return probe
