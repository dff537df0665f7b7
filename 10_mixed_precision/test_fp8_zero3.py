"""ZeRO-3 with fp8 all-gathers has the fp8 weights of one GPU, on any number of ranks, and sends and holds what it says.

That it trains as the root does in float64, where nothing is in fp8, is the contract's. fp8_tensorwise.py is the
reference in bfloat16: it quantizes whole weights, and a micro-batch of it is what a rank has.
Tests that have a parameter `file` run it in place of the recipe: tests/test_bugs.py tries bugs with them.
"""

from collections import Counter
from types import ModuleType, SimpleNamespace

import equivalence
import probes
import pytest
import torch
from launch import RankFailed, in_a_fork, isolated, launch, load
from streams import streams
from torch import Tensor

FP8_ZERO3, TENSORWISE = equivalence.FP8_ZERO3, "10_mixed_precision/fp8_tensorwise.py"
LAYERS, DIM = 3, 22
# of 2,750 elements in a block, 3, 4 and 8 shards need padding, and all cut matrices
SIZES = f"--layers {LAYERS} --dim {DIM} --heads 11 --kv_heads 1 --ffn 25 --seq 16 --batch 24 --warmup 0"
SMALL = f"--device cpu --dtype bfloat16 {SIZES}"
BLOCK, PADDED = 2750, {2: 2750, 3: 2751, 4: 2752, 8: 2752}
HEAD = 256 * DIM + DIM  # the embedding has no norm
WORLDS = [3, *(pytest.param(world, marks=pytest.mark.thorough) for world in (2, 4, 8))]


def whole_weights(module: ModuleType, model, gradients: bool = False) -> dict[str, Tensor]:
    """Name -> fp32 master weight, or its gradient, gathered from all shards."""
    names, found = {p: name for name, p in model.named_parameters()}, {}
    for unit in model.units:
        own = torch.cat([unit.matrices.grad, unit.vectors.grad]) if gradients else unit.shard
        full = own.new_empty(len(own) * unit.group.size())
        module.dist.all_gather_into_tensor(full, own, group=unit.group)
        found |= {names[p]: x.view(p.shape) for p, x in zip(unit.parameters, full.split(unit.sizes))}
    return found


def of_one_gpu(weights: dict[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Name -> what fp8_tensorwise.py makes of a whole weight, for all that it has in fp8."""
    one, linears = load(TENSORWISE), torch.nn.ModuleDict()
    for name, weight in weights.items():
        if "_proj" in name:
            linears[name.replace(".", "-")] = linear = one.Linear(*weight.shape[::-1]).bfloat16()
            linear.weight.data.copy_(weight)
    one.quantize_weights(linears)
    return {name.replace("-", "."): linear.quantized for name, linear in linears.items()}


def what_is_multiplied(module: ModuleType):
    """A probe: of each step, whole weights before it, norms as they are read, and operands of the matmuls by name.

    An operand is (name, 0 as it is or 2 transposed, elements, scale).
    """
    models, used, found = [], [], []
    build_model, multiply, train_step = module.build_model, module.multiply, module.train_step
    module.build_model = lambda cfg: models.append(build_model(cfg)) or models[0]

    def watched(a, a_scale, b, b_scale, **options):
        aligned = a_scale.data_ptr() % 16 == b_scale.data_ptr() % 16 == 0
        assert aligned, "cuBLAS reads scales from multiples of 16 bytes"
        for name, linear in models[0].named_modules():
            for kind in (0, 2) if isinstance(linear, module.Linear) else ():
                ours = linear.quantized[kind]
                if ours.untyped_storage().nbytes() and (ours.data_ptr(), ours.shape) == (b.data_ptr(), b.shape):
                    used.append((f"{name}.weight", kind, b.float(), b_scale.clone()))
        return multiply(a, a_scale, b, b_scale, **options)

    def step(*args):
        used.clear()
        weights = {name: x.clone() for name, x in whole_weights(module, models[0]).items()}
        norms = {name: p.detach().clone() for name, p in models[0].named_parameters() if "layernorm" in name}
        result = train_step(*args)
        found.append((weights, norms, used.copy()))
        return result

    module.multiply, module.train_step = watched, step
    return lambda: found


@pytest.mark.parametrize("world", WORLDS)
@in_a_fork
def test_weights_in_fp8_are_those_of_one_gpu(world, file=None):
    """To the bit, as the matmuls of both micro-batches read them, after the model is built and after each of two steps.

    Norms are whole on each rank, and rounded to bf16 once; some of their weights become negative.
    """
    flags = f"{SMALL} --batch {4 * world} --steps 3 --lr 1.5 --warmup 0"
    run = launch(file or FP8_ZERO3, world, flags, probe=what_is_multiplied)
    exact = [of_one_gpu(weights) for weights, *_ in run.probes[0]]
    for rank, steps in enumerate(run.probes):
        for step, (weights, norms, used) in enumerate(steps):
            wrong = [name for name, p in norms.items() if not torch.equal(p, weights[name].bfloat16())]
            for name, kind, operand, scale in used:
                pairs = zip(("elements", "scale"), (operand, scale), exact[step][name][kind:])
                wrong += [(name, what, kind) for what, x, y in pairs if not torch.equal(x, y.float())]
            assert not wrong, f"step {step} on rank {rank}: others than on one GPU: {wrong[:3]}"
            counts = Counter((name, kind) for name, kind, *_ in used)
            assert len(counts) == 2 * 7 * LAYERS and set(counts.values()) == {2} and len(norms) == 2 * LAYERS
    assert any((p < 0).any() for p in run.probes[0][-1][1].values())


@pytest.mark.thorough
def test_no_graph_outlives_its_micro_batch(file=None):
    """As those of fp8_tensorwise.py."""
    probe = load("10_mixed_precision/test_fp8.py").graphs_at_forwards
    counts = launch(file or FP8_ZERO3, 2, f"{SMALL} --microbatches 2 --steps 1", probe).probes
    assert counts == 2 * [[0, 0]], "the graph of the micro-batch before is still there"


def gradients_of_ranks(module: ModuleType):
    """A probe: validation loss, loss, and the gradients by name, all of the first batch."""
    found, forward_backward = [], module.forward_backward

    def watched(cfg, model, *batch):
        validation = module.evaluate(cfg, model, *batch)
        loss = forward_backward(cfg, model, *batch)
        found.append({"validation": validation, "loss": loss} | whole_weights(module, model, gradients=True))
        return loss

    module.forward_backward = watched
    return lambda: found[0]


def gradients_of_micro_batches(world: int) -> dict[str, Tensor]:
    """The same of fp8_tensorwise.py, which has a micro-batch for each rank."""
    flags = f"{SIZES} --microbatches {world}"
    module, (cfg, model, _), batches = load("10_mixed_precision/test_fp8.py").start(TENSORWISE, flags)
    found = {"validation": module.evaluate(cfg, model, *batches[0])}
    found["loss"] = module.forward_backward(cfg, model, *batches[0])
    return found | {name: model.masters[name].grad for name in model.masters}


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_compute_what_micro_batches_of_one_gpu_do(world, file=None):
    """Gradients of matrices are sums of the same bf16 numbers in fp32, in some order; of norms, rounded to bf16 before.

    The embedding's is added up in bf16, as that of zero3.py.
    """
    exact = isolated(lambda: gradients_of_micro_batches(world))
    for found in launch(file or FP8_ZERO3, world, f"{SMALL} --microbatches 1 --steps 1", gradients_of_ranks).probes:
        errors = {
            name: ((found[name] - x).norm() / x.norm()).item() for name, x in exact.items() if "embed" not in name
        }
        for name, error in errors.items():
            # unit roundoffs of fp32 per addition, where terms may cancel; and of bf16, once per rank
            assert error < (2**-8 if "norm" in name else 1e-6), f"{name} is off by {error:.1e}"


def bytes_of_weights(module: ModuleType):
    """A probe: most bytes of the blocks' weights in forward, in backward, and after each step, in all forms."""
    models, most, backward = [], {"forward": 0, "backward": 0, "after": 0}, torch.Tensor.backward
    build_model, train_step, phase = module.build_model, module.train_step, ["forward"]
    module.build_model = lambda cfg: models.append(build_model(cfg)) or models[0]

    def note():
        blocks = [unit for unit in models[0].units if unit.linears] if models else []
        tensors = [x for unit in blocks for x in (unit.full, unit.transposed, *(m.weight for m in unit.linears))]
        held = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
        most[phase[0]] = max(most[phase[0]], sum(held.values()))

    def noted(function):
        return lambda *args: (function(*args), note())[0]

    def in_backward(loss):
        phase[0] = "backward"
        backward(loss)
        phase[0] = "forward"

    def step(*args):
        result = train_step(*args)
        phase[0] = "after"
        note()
        phase[0] = "forward"
        return result

    torch.Tensor.backward, module.train_step = in_backward, step
    module.gather, module.free, module.transpose = map(noted, (module.gather, module.free, module.transpose))
    return lambda: most


def test_bytes_that_are_sent_and_held(file=None):
    """The header's: a block is gathered in a byte per element, twice, but the last one; gradients are sent in bf16.

    In memory are two blocks, in a byte per element, and in backward one of them transposed, too.
    """
    zero, world, micro = load("03_zero/test_zero.py"), 3, 2
    probe = probes.together(zero.communication, bytes_of_weights)
    run = launch(file or FP8_ZERO3, world, f"{SMALL} --microbatches {micro} --steps 2", probe)
    block, others = PADDED[world], [-(-size // world) for size in (256 * DIM, HEAD)]
    shared = LAYERS * (7 + 2 * DIM + block - BLOCK)
    expected = {
        ("allgather", "torch.uint8"): micro * (2 * LAYERS - 1) * block // world,
        ("allgather", "torch.bfloat16"): micro * sum(others),
        ("alltoall", "torch.bfloat16"): micro * (LAYERS * block + world * sum(others)),
        ("allreduce", "torch.float32"): shared + 2,  # amax and norm vectors; the loss and the norm
    }
    for steps, held in run.probes:
        for step in steps:
            sent = {}
            for kind, dtype, elements, _ in step:
                sent[kind, dtype] = sent.get((kind, dtype), 0) + elements
            assert sent == expected, f"sent are {sent}"
        assert held == {"forward": 2 * block, "backward": 3 * block, "after": 0}, f"bytes held: {held}"


def forgets(module: ModuleType):
    """A probe: a trainer that calls quantize_weights before the first step alone."""
    quantize, calls = module.quantize_weights, []
    module.quantize_weights = lambda model: calls.append(1) or len(calls) > 1 or quantize(model)
    return lambda: None


def has_another_matrix(module: ModuleType):
    """A probe: one projection of each block is a linear of torch."""
    init = module.MLP.__init__

    def changed(self, cfg):
        init(self, cfg)
        self.up_proj = torch.nn.Linear(cfg.dim, cfg.ffn, bias=False)

    module.MLP.__init__ = changed
    return lambda: None


def has_an_fp8_head(module: ModuleType):
    """A probe: the head is in fp8, too, and nobody transposes the last unit."""
    init = module.Model.__init__

    def changed(self, cfg, dp):
        init(self, cfg, dp)
        self.lm_head = module.Linear(cfg.dim, cfg.vocab)

    module.Model.__init__ = changed
    return lambda: None


def leaves_the_linears_out(module: ModuleType):
    """A probe: nobody calls use_fp8."""
    module.use_fp8 = lambda model: None
    return lambda: None


def starts_again(module: ModuleType):
    """A probe: use_fp8 is called again, when weights have been quantized."""
    quantize = module.quantize_weights
    module.quantize_weights = lambda model: quantize(model) or module.use_fp8(model)
    return lambda: None


MISUSE = {
    forgets: "call quantize_weights(model) before the first forward and after each optimizer step",
    has_another_matrix: "a unit with weights of Linear may have no other matrices",
    has_an_fp8_head: "nor be the first or the last",
    leaves_the_linears_out: "call use_fp8(model) before quantize_weights(model)",
    starts_again: "call quantize_weights(model) before the first forward",
}


@pytest.mark.parametrize("how", range(len(MISUSE)))
def test_misuse_is_noticed(how, file=None):
    """Weights in fp8 that are old, or none, end the run with one line."""
    probe, says = list(MISUSE.items())[how]
    try:
        launch(file or FP8_ZERO3, 1, f"{SMALL} --steps 3", probe=probe)
    except RankFailed as failure:
        assert says in failure.output.splitlines()[-1], f"it says {failure.output}"
        return
    raise AssertionError("nobody notices")


@in_a_fork
def test_kernel_in_the_interpreter(file=None):
    """A GPU transposes bytes of all values, in sizes that no tile divides."""
    module = load(file or FP8_ZERO3)
    w = [(torch.arange(m * k) * 7 % 256).byte().view(m, k) for m, k in ((128, 256), (80, 129), (130, 3))]
    linears = [
        SimpleNamespace(quantized=(x, None, torch.empty_like(x.T, memory_format=torch.contiguous_format), None))
        for x in w
    ]
    load("10_mixed_precision/test_fp8.py").pretend_to_be_a_gpu()
    module.transpose(SimpleNamespace(linears=linears, transposed=torch.empty(0)))
    for x, linear in zip(w, linears):
        assert torch.equal(linear.quantized[2], x.T), f"{tuple(x.shape)} differs"


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["at once", "late"])
def test_whenever_streams_get_to_it(when, file=None):
    """Gathered weights are waited for, before forward reads them and before backward's are transposed."""
    flags = f"{SMALL} --steps 3 --clip 0.5"
    plain, run = (launch(file or FP8_ZERO3, 2, flags, probe) for probe in (None, streams(when)))
    different = [name for name, tensor in plain.weights.items() if not torch.equal(tensor, run.weights[name])]
    assert not different, f"{different[:3]} is off by what streams do"


@pytest.mark.thorough
def test_compiled():
    """Compiled, the gradient is as near to that in fp32 as fp8_tensorwise.py's has to be."""
    fp8 = load("10_mixed_precision/test_fp8.py")
    sizes = " ".join(f"--{name} {value}" for name, value in {**fp8.SIZES, "layers": 1}.items())
    exact = isolated(lambda: fp8.gradient("10_mixed_precision/bf16.py", "float32", layers=1))
    probe = probes.together(equivalence.without_kernels, gradients_of_ranks)
    run = launch(FP8_ZERO3, 1, f"--device cpu --dtype bfloat16 {sizes} --steps 1 --compile", probe)
    fp8.assert_near(run.probes[0][1], exact)
