"""Run recipes in forked processes that see the environment torchrun would give them.

`torchrun` imports torch in every process: eight of them take a quarter of a minute on two cores. Here torch is imported
once, in the parent, and a process is a fork: eight gloo ranks start in well under a second.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import gc
import hashlib
import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask for GPUs must not touch CUDA: a fork could not use it then

import einops  # noqa: F401  what recipes import is imported here, once, and not by every process
import numpy.ma  # noqa: F401  which numpy.isin imports
import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # before something imports triton
import torch._dynamo  # noqa: F401  the first optimizer step imports it
import torch._inductor.compile_fx  # noqa: F401  --compile imports it
import torch.distributed
from safetensors import safe_open
from safetensors.torch import load_file


def own_folder() -> Path:
    """Return a folder of this user alone: what lies in it is run and unpickled, so others must not write into it."""
    folder = Path(tempfile.gettempdir(), f"recipes-of-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()  # of a link itself, which anybody can put there
    if not stat.S_ISDIR(about.st_mode) or (about.st_uid, about.st_mode & 0o777) != (os.getuid(), 0o700):
        raise PermissionError(f"{folder} must be a folder of this user alone: remove it, or set TMPDIR")
    return folder


# Inductor's cache of graphs does not know the CPU's capability: code that was generated for AVX2 (ATEN_CPU_CAPABILITY)
# and is compiled again for AVX-512 writes past the end of its tensors. So each capability has its own.
CAPABILITY = torch.backends.cpu.get_cpu_capability()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{own_folder()}/torchinductor_{CAPABILITY}"

ROOT = Path(__file__).resolve().parent.parent
IMPATIENT = False  # whether a launch ends as soon as all its ranks wait for each other, for seeded bugs that hang
HANGS = 4.0  # seconds with hardly any work after which that is so: longer than any pause that a test makes on purpose
gc.freeze()  # to look at all that torch consists of for garbage takes a second each time
atexit.register(gc.unfreeze)  # else Triton's bindings complain of leaks
torch.set_num_threads(1)  # ranks share the cores, and the threads of a pool would not survive the fork

if importlib.util.find_spec("triton"):  # which macOS does not have
    import interpreter

    interpreter.install()  # bfloat16 as on a GPU


@dataclass
class Run:
    """What came out of a recipe: the saved weights, [loss, norm, seconds] per step, output and probe of each rank."""

    weights: dict[str, torch.Tensor]
    history: list[list[float]]
    output: list[str]
    probes: list[Any]


class RankFailed(Exception):
    """A rank ended with an error; the message is what it printed. `code` is its exit code."""

    def __init__(self, rank: int, code: int, output: str):
        super().__init__(f"rank {rank} ended with exit code {code}:\n{output}")
        self.rank, self.code, self.output = rank, code, output

    def __reduce__(self):
        return RankFailed, (self.rank, self.code, self.output)  # through a pool of processes, too


@functools.cache
def run_folder() -> Path:
    """Return a folder that the workers of one run of pytest share; the last of them removes it."""
    folder = own_folder() / os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder.mkdir(exist_ok=True)
    users = open(folder / "users", "w")
    fcntl.flock(users, fcntl.LOCK_SH)

    def leave() -> None:
        with contextlib.suppress(BlockingIOError):  # another worker is still there
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)

    atexit.register(leave)
    return folder


def once(function: Callable) -> Callable:
    """Decorate what is the same for all workers, as the root's runs are: the first computes it, the others read it."""

    @functools.cache
    def shared(*arguments):
        name = hashlib.sha256(repr((function.__qualname__, arguments)).encode()).hexdigest()
        file = run_folder() / name
        with open(f"{file}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            if not file.exists():
                file.write_bytes(pickle.dumps(function(*arguments)))
            return pickle.loads(file.read_bytes())

    return shared


def load(path: Path | str) -> ModuleType:
    """Import a recipe from its file; names like 1f1b are no module names."""
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    exec(compiled(ROOT / path, (ROOT / path).read_text()), vars(module))
    return module


@functools.cache
def compiled(path: Path, source: str) -> CodeType:
    """A recipe's code, which a launch compiles once and not on each of its ranks."""
    return compile(source, path, "exec", dont_inherit=True)


@functools.cache
def read_folder(folder: str, **sizes: int) -> tuple[str, tuple]:
    """The root's definition of load_data, and what it returns for a folder."""
    root = load("01_single_gpu/train.py")
    return inspect.getsource(root.load_data), root.load_data(root.Config(data=folder, **sizes))


def shared_data(recipe: Path | str, flags: str) -> tuple[tuple[numpy.ndarray, numpy.ndarray], ...] | None:
    """The data of a recipe that reads a folder in the run's folder as the root does, to the letter; else None.

    Those of equivalence.py have 2,000 files: each rank would take longer to read them than to train.
    """
    folder = re.search(r"--data (\S+)", flags)
    if folder and Path(folder[1]).parent == run_folder():
        sizes = {name: int(value) for name, value in re.findall(r"--(seq|validate) (\d+)", flags)}
        definition, data = read_folder(folder[1], **sizes)
        return data if definition in (ROOT / recipe).read_text() else None


def launch(
    recipe: Path | str,
    world: int = 1,
    flags: str = "",
    probe: Callable[[ModuleType], Callable[[], Any]] | None = None,
    timeout: float = 300,
    save: bool = True,
) -> Run:
    """Run `main` of a recipe on `world` ranks and return what it saved, if `save`.

    probe(module) is called on every rank before main, may replace functions of the module, and may return a function
    whose result, asked for after main, is that rank's entry of Run.probes. Raises RankFailed as soon as any rank has
    failed and TimeoutError if they take longer than `timeout` seconds, or hang and IMPATIENT is set; either way no
    process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder, free_port() as port:
        saved = Path(folder) / "weights.safetensors"
        argv = [str(ROOT / recipe), *(["--save", str(saved)] if save else []), *flags.split()]
        context, data = multiprocessing.get_context("fork"), shared_data(recipe, flags)
        compiled(ROOT / recipe, (ROOT / recipe).read_text())
        ranks = [
            context.Process(target=run_rank, args=(recipe, argv, rank, world, port, folder, data, probe))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            wait(ranks, folder, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        weights, history = (load_file(saved), read_history(saved)) if saved.exists() else ({}, [])
        output = [(Path(folder) / f"output{rank}").read_text() for rank in range(world)]
        probes = [pickle.loads((Path(folder) / f"probe{rank}").read_bytes()) for rank in range(world)]
        return Run(weights, history, output, probes)


def read_history(path: Path | str) -> list[list[float]]:
    """[loss, gradient norm, seconds] per step, from the metadata of a saved file."""
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt", "metadata lack the format, which other programs ask for"
        return json.loads(file.metadata()["history"])


def isolated(function: Callable[[], Any]) -> Any:
    """The result of function(), computed in a fork: a process cannot be forked once autograd has run in it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)  # again: the parent's pool is gone, and threads would race to make the new one
        try:
            answer = function(), None
        except BaseException:
            answer = None, traceback.format_exc()
        there.send_bytes(pickle.dumps(answer))  # by value: tensors in shared memory would end with this process
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    there.close()
    try:
        result, error = pickle.loads(here.recv_bytes())
    except EOFError:
        result, error = None, "the process has crashed"
    process.join()
    if error:
        raise AssertionError(error)
    return result


def in_a_fork(test: Callable) -> Callable:
    """Decorate a test: it runs in a process of its own, as autograd and changed modules must not stay in this one."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        isolated(lambda: test(*args, **kwargs))

    return run


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A TCP port that nobody else gets before a rank listens on it.

    The socket stays bound here, without listening, and the ranks' store binds the port beside it, as both have
    SO_REUSEADDR. So does NCCL, whose sockets get any port above 32768: this one is below. A name of the port keeps
    other processes like this one away.
    """
    for port in random.Random().sample(range(10_000, 32_000), 100):
        with socket.socket() as held, socket.socket(socket.AF_UNIX) as name:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                name.bind(f"\0launch.py {port}")
                held.bind(("127.0.0.1", port))  # of all addresses, the store could bind none outside Linux
            except OSError:  # somebody has it
                continue
            yield port
            return
    raise OSError("no free port between 10000 and 32000")


def run_rank(recipe, argv, rank, world, port, folder, data, probe) -> None:
    """The life of one process: environment, output into a file, data if they have been read, main, probe."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = argv
    faulthandler.disable()  # pytest's: what a rank says goes into its own output
    gc.freeze()  # what the parent has imported: to look at it for garbage would copy it
    torch.set_num_threads(1)  # again: the parent's pool is gone, and autograd's threads would race to make the new one
    # torch.empty is NaN: what nobody writes must not be right by chance (on GPUs, what is measured would be slower)
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    code = 1
    with open(f"{folder}/output{rank}", "w", buffering=1) as out, contextlib.redirect_stdout(out):
        os.dup2(out.fileno(), 2)
        sys.stderr = out
        try:
            module = load(recipe)
            if data:
                module.load_data = lambda cfg: data
            report = probe and probe(module)
            module.main()
            with open(f"{folder}/probe{rank}", "wb") as file:
                pickle.dump(report and report(), file)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            if isinstance(end.code, str):
                print(end.code, file=out)
        except BaseException:
            traceback.print_exc(file=out)
        out.flush()
    os._exit(code)  # the interpreter's own end would run the parent's exit handlers


def work_of(pid: int) -> float:
    """The CPU time of a process, in ticks of 10 ms; NaN if it is about to run, waits for a disk, or has ended."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return math.nan
    return math.nan if state in "RD" else sum(map(int, numbers[10:14]))


def wait(ranks, folder, timeout) -> None:
    """Return when all ranks have ended well, raise when one has not, time is up, or they hang."""
    start = time.monotonic()
    end, last, idle_since = start + timeout, [], start
    while alive := [process for process in ranks if process.is_alive()]:  # once: waiting for none would take a second
        if any(process.exitcode for process in ranks):
            break
        if time.monotonic() > end:
            raise TimeoutError(f"ranks {[ranks.index(process) for process in alive]} still run after {timeout} s")
        work = [work_of(process.pid) for process in alive] if IMPATIENT else []
        if not work or len(work) != len(last) or not sum(work) - sum(last) <= len(work):  # gloo's threads look round
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > HANGS:
            raise TimeoutError(f"ranks {[ranks.index(process) for process in alive]} hang: none has done anything")
        last = work
        multiprocessing.connection.wait([process.sentinel for process in alive], timeout=1)
    if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
        # others fail for the sake of the first
        first = min(failed, key=lambda rank: os.path.getmtime(Path(folder) / f"output{rank}"))
        raise RankFailed(first, ranks[first].exitcode, (Path(folder) / f"output{first}").read_text())
