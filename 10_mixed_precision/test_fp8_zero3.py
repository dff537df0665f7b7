"""ZeRO-3 with fp8 all-gathers has the fp8 weights of one GPU, on any number of ranks, and sends and holds what it says.

The reference is fp8_tensorwise.py: it quantizes whole weights, and a micro-batch of it is what a rank has.
"""

from collections import Counter
from types import ModuleType, SimpleNamespace

import equivalence
import probes
import pytest
import recipes
import torch
from launch import RankFailed, in_a_fork, isolated, launch, load
from mutation import changed
from streams import streams
from torch import Tensor

FP8_ZERO3, TENSORWISE = recipes.FP8_ZERO3, "10_mixed_precision/fp8_tensorwise.py"
LAYERS, DIM = 3, 22
# of 2,750 elements in a block, 3 and 8 shards need padding, and cut matrices
SIZES = f"--layers {LAYERS} --dim {DIM} --heads 11 --kv_heads 1 --ffn 25 --seq 16 --batch 24 --warmup 0"
SMALL = f"--device cpu --dtype bfloat16 {SIZES}"
BLOCK, PADDED = 2750, 2751  # by 3 ranks
HEAD = 256 * DIM + DIM  # the embedding has no norm


def whole_weights(module: ModuleType, model, gradients: bool = False) -> dict[str, Tensor]:
    """Name -> fp32 master weight, or its gradient, gathered from all shards."""
    names, found = {p: name for name, p in model.named_parameters()}, {}
    for unit in model.units:
        own = torch.cat([unit.matrices.grad, unit.vectors.grad]) if gradients else unit.shard
        full = own.new_empty(len(own) * unit.group.size())
        module.dist.all_gather_into_tensor(full, own, group=unit.group)
        found |= {names[p]: x.view(p.shape) for p, x in zip(unit.parameters, full.split(unit.sizes))}
    return found


def seen_by_ranks(module: ModuleType):
    """A probe: of each step, whole weights; validation loss, loss, and gradients by name, all of its batch."""
    found, multiply, forward_backward = [], module.multiply, module.forward_backward

    def aligned(a, a_scale, b, b_scale, **options):
        same = a_scale.data_ptr() % 16 == b_scale.data_ptr() % 16 == 0
        assert same, "cuBLAS reads scales from multiples of 16 bytes"
        return multiply(a, a_scale, b, b_scale, **options)

    def watched(cfg, model, *batch):
        numbers = {"validation": module.evaluate(cfg, model, *batch), "loss": forward_backward(cfg, model, *batch)}
        gradients = whole_weights(module, model, gradients=True)
        found.append((whole_weights(module, model), numbers | gradients))
        return numbers["loss"]

    module.multiply, module.forward_backward = aligned, watched
    module.forward = load("10_mixed_precision/test_masters.py").one_graph_at_a_time(module.forward)
    return lambda: found


def seen_by_one_gpu(flags: str, weights_of_steps: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The numbers that fp8_tensorwise.py finds with these weights. Those of norms are rounded to bf16 once."""
    start = load("10_mixed_precision/test_masters.py").start
    module, (cfg, model, optimizer), batches = start(TENSORWISE, f"{SMALL} {flags}")
    found = []
    for weights, batch in zip(weights_of_steps, batches):
        for name, p in model.named_parameters():
            p.data.copy_(weights[name].bfloat16())
        module.quantize_weights(model)
        numbers = {"validation": module.evaluate(cfg, model, *batch)}
        numbers["loss"] = module.forward_backward(cfg, model, *batch)
        found.append(numbers | {name: master.grad for name, master in model.masters.items()})
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("world", [3, pytest.param(8, marks=pytest.mark.thorough)])
def test_ranks_compute_what_micro_batches_of_one_gpu_do(world, file=None):
    """In two steps. Gradients of matrices are fp32 sums of the same bf16 numbers; the embedding's in bf16."""
    batch = f"--batch {4 * world}"
    run = launch(file or FP8_ZERO3, world, f"{SMALL} {batch} --steps 2 --lr 1.5", seen_by_ranks)
    flags, weights_of_steps = f"{batch} --microbatches {2 * world}", [weights for weights, _ in run.probes[0]]
    exact = isolated(lambda: seen_by_one_gpu(flags, weights_of_steps))
    for rank, steps in enumerate(run.probes):
        for step, (_, found) in enumerate(steps):
            for name, x in exact[step].items():
                error = ((found[name] - x).norm() / x.norm()).item()
                # unit roundoffs of fp32 per addition, where terms may cancel; and of bf16, once per micro-batch
                limit = 2**-8 if "norm" in name else 1e-6
                assert "embed" in name or error < limit, f"{name} is off by {error:.1e} on rank {rank} in step {step}"
    assert any((p < 0).any() for name, p in weights_of_steps[-1].items() if "norm" in name)


def bytes_of_weights(module: ModuleType):
    """A probe: most bytes of the blocks' weights in forward, in backward, and after each step, in all forms."""
    models, most, build_model = [], Counter(), module.build_model
    module.build_model = lambda cfg: models.append(build_model(cfg)) or models[0]

    def noted(name):
        function = getattr(module, name)

        def watched(*args):
            result = function(*args)
            blocks = [unit for unit in models[0].units if unit.linears] if models else []
            tensors = [x for unit in blocks for x in (unit.full, unit.transposed, *(m.weight for m in unit.linears))]
            held = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
            phase = name if name == "train_step" else probes.phase()
            most[phase] = max(most[phase], sum(held.values()))
            return result

        setattr(module, name, watched)

    for name in "gather", "free", "transpose", "train_step":
        noted(name)
    return lambda: dict(most)


def test_bytes_that_are_sent_and_held(file=None):
    """The header's: a block is gathered in a byte per element, twice, but the last one. Two are held, one turned."""
    world, micro = 3, 2
    probe = probes.together(probes.communication, bytes_of_weights)
    run = launch(file or FP8_ZERO3, world, f"{SMALL} --microbatches {micro} --steps 2", probe)
    block, others = PADDED, sum(-(-size // world) for size in (256 * DIM, HEAD))
    shared = LAYERS * (7 + 2 * DIM + PADDED - BLOCK)
    expected = {
        ("allgather", "torch.uint8"): micro * (2 * LAYERS - 1) * block // world,
        ("allgather", "torch.bfloat16"): micro * others,
        ("alltoall", "torch.bfloat16"): micro * (LAYERS * block + world * others),
        ("allreduce", "torch.float32"): shared + 2,  # amax and norm vectors; the loss and the norm
    }
    for steps, held in run.probes:
        for step in steps:
            sent = Counter()
            for kind, dtype, elements, _ in step:
                sent[kind, dtype] += elements
            assert sent == expected, f"sent are {sent}"
        assert held == {"forward": 2 * block, "backward": 3 * block, "train_step": 0}, f"bytes held: {held}"


QUANTIZE = "    quantize_weights(model)\n"
MISUSE = [  # what a trainer does wrong, as a change of the recipe's; what it is told
    (f"{QUANTIZE}    optimizer", "    optimizer", "call quantize_weights(model) before the first forward"),
    (f"{QUANTIZE}    proxy", f"{QUANTIZE}    use_fp8(model)\n    proxy", "call quantize_weights(model) before the"),
    ("    use_fp8(model)\n", "", "call use_fp8(model) before quantize_weights(model)"),
    # one projection of each block is a linear of torch; nobody transposes the last unit
    ("up_proj = Linear(cfg.dim, cfg.ffn)", "up_proj = nn.Linear(cfg.dim, cfg.ffn, bias=False)", "no other matrices"),
    ("nn.Linear(cfg.dim, cfg.vocab, bias=False)", "Linear(cfg.dim, cfg.vocab)", "nor be the first or the last"),
]


@pytest.mark.parametrize("how", range(len(MISUSE)))
@in_a_fork
def test_misuse_is_noticed(how, tmp_path, file=None):
    """Weights in fp8 that are old, or none, end the run with one line."""
    old, new, says = MISUSE[how]
    misused = changed(file or FP8_ZERO3, old, new, tmp_path)
    with pytest.raises(RankFailed) as failure:
        launch(misused, 1, f"{SMALL} --steps 2")
    assert says in failure.value.output.splitlines()[-1], f"it says {failure.value.output}"


@in_a_fork
def test_kernel_in_the_interpreter(file=None):
    """A GPU transposes bytes of all values, in sizes that no tile divides."""
    module = load(file or FP8_ZERO3)
    w = [(torch.arange(m * k) * 7 % 256).byte().view(m, k) for m, k in ((128, 256), (80, 129), (130, 3))]
    linears = [SimpleNamespace(quantized=(x, None, x.new_empty(x.T.shape))) for x in w]
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
    """Gradients have 26 dB to those of the eager fp8_tensorwise.py, as code rounds elsewhere; of a wrong scale 6."""
    probe = probes.together(equivalence.without_kernels, seen_by_ranks)
    run = launch(FP8_ZERO3, 1, f"{SMALL} --layers 1 --microbatches 2 --steps 1 --compile", probe)
    ((weights, found),) = run.probes[0][1]
    (exact,) = isolated(lambda: seen_by_one_gpu("--layers 1 --microbatches 2", [weights]))
    noise = {name: ((found[name] - x).norm() / x.norm()).item() for name, x in exact.items()}
    assert max(noise.values()) < 10 ** (-14 / 20), noise
