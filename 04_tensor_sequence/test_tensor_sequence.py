"""The tensor-parallel recipes train as the root does, split what they say, and communicate and keep what they say."""

import os
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import equivalence
import probes
import pytest
import torch
from contract import refusal
from launch import in_a_fork, launch, load
from streams import streams
from torch._subclasses.fake_tensor import FakeTensorMode

TENSOR, VOCAB, SEQUENCE, ASYNC, TWIN = (
    f"04_tensor_sequence/{name}.py"
    for name in ("tensor_parallel", "vocab_parallel", "sequence_parallel", "async_tensor_parallel", "torch_dtensor")
)
BY_TOKENS = (SEQUENCE, ASYNC)  # the residual stream is split too
L, D, H, KV, F, V, S, B, TP = 3, 32, 8, 2, 64, 259, 16, 4, 4
SMALL = f"--device cpu --layers {L} --dim {D} --heads {H} --kv_heads {KV} --ffn {F} --vocab {V} --seq {S} --batch {B}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe, world, flags",
    [
        (TENSOR, 3, "--kv_heads 3 --ffn 96"),  # no two ranks hold the same key head, or all hold the same
        (TENSOR, 3, "--kv_heads 1 --ffn 96"),
        (SEQUENCE, 3, "--kv_heads 1 --ffn 96 --vocab 259"),
        (ASYNC, 3, "--kv_heads 3 --ffn 96 --vocab 259"),
        (VOCAB, 2, "--compile"),
        (ASYNC, 2, "--compile"),
        (TWIN, 2, "--compile"),
    ],
)
def test_equals_root(recipe, world, flags):
    """... where the hardest case does not show it."""
    equivalence.check_quickly(recipe, world, flags)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, when", [(SEQUENCE, "at once"), (SEQUENCE, "late"), (ASYNC, "late")])
def test_whenever_streams_get_to_it(recipe, when):
    """A collective writes at some time between its start and the end of the wait for it, a side stream likewise."""
    equivalence.check(recipe, 4, "--heads 4 --kv_heads 2", probe=streams(when))


def test_an_adapter_without_a_gradient():
    """Zeros take part in the sum of a matrix that both ranks hold: the other rank, which used it, waits for them."""
    module, sent = load("04_tensor_sequence/lora.py"), []
    model = torch.nn.ModuleDict({"q_proj": module.LoRALinear(4, 4, 2, 2.0)})
    ended = SimpleNamespace(wait=lambda: None)
    model.tp = SimpleNamespace(size=lambda: 2, allreduce_coalesced=lambda gradients: sent.extend(gradients) or ended)
    model.replicas = None
    module.sum_partial(module.Config(), model)
    assert len(sent) == 1 and model["q_proj"].lora_A.weight.grad is sent[0] and not sent[0].any()


# -------------------------------------------------------------------------------------------------------------- a step
@pytest.mark.parametrize("recipe", [TENSOR, SEQUENCE])
def test_key_heads_without_gradients_are_refused(recipe):
    """ZeRO has taken them, say: what several ranks hold would go apart."""
    attention = torch.nn.ModuleDict(dict(k_proj=torch.nn.Linear(2, 2), v_proj=torch.nn.Linear(2, 2)))
    model, block = torch.nn.Module(), torch.nn.Module()
    block.self_attn, model.model = attention, torch.nn.Module()
    model.model.layers, model.replicas = [block], SimpleNamespace(size=lambda: 2)
    with pytest.raises(RuntimeError, match="key heads have no .grad"):
        load(recipe).sum_replicas(model)
    attention.requires_grad_(False)
    load(recipe).sum_replicas(model)


@in_a_fork
def test_sums_of_parts_keep_their_dtype(file=ASYNC):
    """... under autocast on GPUs, too, which else returns float32."""
    module = load(file)
    torch.set_autocast_enabled("cuda", True)
    with FakeTensorMode():
        parts = torch.empty(2, 4, 8, dtype=torch.bfloat16, device="cuda")
        assert module.total(parts).dtype == torch.bfloat16, "activations are float32"


def weights(module):
    """A probe: this rank's weights after training, by name; shapes of what blocks hand on and the loss is given."""
    models, shapes, build_model = [], {}, module.build_model

    def build(cfg):
        models.append(build_model(cfg))
        models[0].model.layers[0].register_forward_hook(lambda part, args, out: shapes.update(block=list(out.shape)))
        models[0].loss.register_forward_hook(lambda part, args, out: shapes.update(logits=list(args[0].shape)))
        return models[0]

    module.build_model = build
    return lambda: ({name: p.detach().numpy() for name, p in models[0].named_parameters()}, shapes)


def sums_of_replicas(module):
    """A probe: gradients that sum_replicas is given on this rank, and what it makes of them. Key layers have biases."""
    seen, build_model = {}, module.build_model

    def build(cfg):
        model = build_model(cfg)
        for layer in (block.self_attn.k_proj for block in model.model.layers):
            layer.bias = torch.nn.Parameter(torch.zeros(layer.out_features))  # as in a reader's model
        generator = torch.Generator().manual_seed(model.tp.rank())
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            seen[name] = [p.grad.numpy().copy()]
        module.sum_replicas(model)
        for name, p in model.named_parameters():
            seen[name].append(p.grad.numpy().copy())
            p.grad = None
        for layer in (block.self_attn.k_proj for block in model.model.layers):
            layer.bias = None
        return model

    module.build_model = build
    return lambda: seen


def loss_and_embedding(module):
    """A probe: error of the loss of logits in bfloat16; the gradient of an embedding that 300 tokens share."""
    found, build_model = [], module.build_model

    def build(cfg):
        model = build_model(cfg)
        generator = torch.Generator().manual_seed(0)
        logits, targets = 5 * torch.randn(100, V, generator=generator), torch.arange(100)
        rows = len(model.lm_head.weight)  # of the vocabulary, with padding
        padded = torch.nn.functional.pad(logits.bfloat16(), (0, 0 if rows == V else rows * TP - V))
        own = padded[..., slice(None) if rows == V else slice(rows * model.tp.rank(), rows * (model.tp.rank() + 1))]
        exact = torch.nn.functional.cross_entropy(logits.bfloat16().double(), targets, reduction="sum")
        with torch.autocast("cpu", torch.bfloat16):
            found.append(abs(model.loss(own, targets).item() / exact.item() - 1))
            model.model.embed_tokens(torch.full((1, 300), V - 1)).to(torch.bfloat16).sum().backward()
        found.append(model.model.embed_tokens.weight.grad.max().item())
        model.model.embed_tokens.weight.grad = None
        return model

    module.build_model = build
    return lambda: found


def traffic(module):
    """A probe: how often so many bytes are communicated in a step, by kind and by forward or backward."""
    seen, last, dist = Counter(), Counter(), module.dist

    def counted(kind, original, which):
        def wrapper(*args, **kwargs):
            seen[kind, probes.phase(), args[which].numel() * args[which].element_size()] += 1
            return original(*args, **kwargs)

        return wrapper

    def step(*args):
        seen.clear()
        return train_step(*args)

    train_step, module.train_step = module.train_step, step
    dist.all_reduce = counted("all-reduce", dist.all_reduce, 0)
    dist.all_gather_into_tensor = counted("all-gather", dist.all_gather_into_tensor, 0)  # of the whole
    dist.reduce_scatter_tensor = counted("reduce-scatter", dist.reduce_scatter_tensor, 1)
    save, module.save = module.save, lambda *args: last.update(seen) or save(*args)
    return lambda: last


def copies(module):
    """A probe: bytes copied from and to other ranks' memory in a step; elements of all shared memory."""
    seen, foreign, elements, share = [0], set(), [], module.share
    copy, train_step = torch.Tensor.copy_, module.train_step

    def shared(*args):
        memory, barrier = share(*args)
        foreign.update(m.untyped_storage().data_ptr() for r, m in enumerate(memory) if r != module.dist.get_rank())
        elements.append(sum(m.numel() for m in memory) // len(memory))
        return memory, barrier

    def copy_(self, source, *args):
        if foreign & {self.untyped_storage().data_ptr(), source.untyped_storage().data_ptr()}:
            seen[0] += self.nbytes
        return copy(self, source, *args)

    def step(cfg, model, *args):
        seen[0] = 0
        elements[1:] = [model.shared.leaving.numel()]
        return train_step(cfg, model, *args)

    module.share, module.train_step, torch.Tensor.copy_ = shared, step, copy_
    return lambda: (seen[0], sum(elements))


def order(module):
    """A probe: what this rank does, in order, in the first forward and the last backward of column-parallel weights."""
    seen, kept, group, device = [], [], module.dist.ProcessGroup, torch.cpu
    current = device.current_stream

    class Work:
        def __init__(self, name, work):
            self.name, self.work = name, work
            seen.append(name)

        def wait(self):
            seen.append(f"{self.name} is there")
            return self.work.wait()

    class Main:
        def wait_event(self, event):
            seen.append("wait")

        def __getattr__(self, name):
            return getattr(current(), name)

    def noted(name, original):
        return lambda *args, **kwargs: seen.append(name) or original(*args, **kwargs)

    def started(name, original):
        return lambda *args, **kwargs: Work(name, original(*args, **kwargs))

    for name, function in ("gather", "all_gather_into_tensor"), ("reduce", "reduce_scatter_tensor"):
        setattr(module.dist, function, started(name, getattr(module.dist, function)))
    torch.Tensor.__matmul__, torch.mm = noted("matmul", torch.Tensor.__matmul__), noted("piece", torch.mm)
    torch.Tensor.copy_, group.barrier = noted("copy", torch.Tensor.copy_), noted("barrier", group.barrier)
    device.current_stream = Main

    def watched(original):
        def whole(*args):
            seen.clear()
            result = original(*args)
            kept.append(list(seen))
            return result

        return staticmethod(whole)

    for name in "forward", "backward":
        setattr(module.ColumnParallel, name, watched(getattr(module.ColumnParallel, name)))
    return lambda: (kept[0], kept[-1])


def wanted_shapes(recipe):
    """Every matrix of a block takes 1/tp; key heads are whole; so are norms. The vocabulary is padded."""
    kv, rows = max(1, KV // TP) * D // H, V if recipe == TENSOR else -(-V // TP)
    block = {"self_attn.q_proj": (D // TP, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D)}
    block |= {"self_attn.o_proj": (D, D // TP), "mlp.gate_proj": (F // TP, D), "mlp.up_proj": (F // TP, D)}
    block |= {"mlp.down_proj": (D, F // TP), "input_layernorm": (D,), "post_attention_layernorm": (D,)}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(L) for name, shape in block.items()}
    shapes |= {"model.embed_tokens.weight": (rows, D), "lm_head.weight": (rows, D), "model.norm.weight": (D,)}
    return shapes, {"block": [B * S // TP, D] if recipe in BY_TOKENS else [B, S, D], "logits": [B * S, rows]}


def wanted_traffic(recipe):
    """Tensor: 2 all-reduces per block forward and 2 backward. Sequence: 2 all-gathers and 2 reduce-scatters, and in
    backward the same and 2 gathers of kept inputs. All of b·s·d activations; asynchronous ones are copies.

    Logits are never gathered: the loss sends three numbers per token, whatever the vocabulary.
    """
    size, token = B * S * D * 2, B * S * 4  # in bfloat16; one float32 per token
    wanted = Counter({("all-reduce", "forward", 4): 1})  # the norm
    if recipe != TENSOR:
        wanted += {("all-reduce", "forward", token): 1, ("all-reduce", "forward", 2 * token): 1}
    if recipe in (TENSOR, VOCAB):  # with the vocabulary split, embedding and head as well
        each = 2 * L + (recipe == VOCAB)
        return wanted + Counter({("all-reduce", phase, size): each for phase in ("forward", "backward")})
    if recipe == SEQUENCE:  # embedding, 1 and 1; head, 1 and 3
        wanted += {(kind, "forward", size): 2 * L + 1 for kind in ("all-gather", "reduce-scatter")}
        return wanted + Counter(
            {("all-gather", "backward", size): 4 * L + 2, ("reduce-scatter", "backward", size): 2 * L + 1}
        )
    wanted += {("reduce-scatter", "forward", size): 1, ("all-gather", "backward", size): 1}  # the embedding
    return wanted


def wanted_order(recipe):
    """Sequence: in backward, the gather overlaps with the first matmul, the reduction with the second. Asynchronous: a
    rank's own tokens are multiplied before others have come; products travel while the next are computed, own ones come
    last, and sums are waited for after the weights' gradient."""
    if recipe == SEQUENCE:
        backward = ["gather", "matmul", "reduce", "gather is there", "matmul", "reduce is there"]
        return ["gather", "gather is there", "matmul"], backward
    pull = ["copy", "barrier", *TP * ["copy"]]
    push = [*(TP - 1) * ["piece", "copy"], "piece", "barrier"]
    return [*pull, "piece", *(TP - 1) * ["wait", "piece"], "wait"], [*pull, *push, *TP * ["wait"], "matmul", "wait"]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [TENSOR, VOCAB, SEQUENCE, ASYNC])
def test_a_step(recipe):
    """Four ranks, of which two pairs share key heads, hold, send, keep and sum as the header says."""
    nothing = lambda module: lambda: None  # noqa: E731
    own = order if recipe in BY_TOKENS else nothing, copies if recipe == ASYNC else nothing
    probe = probes.together(loss_and_embedding, sums_of_replicas, weights, traffic, *own)
    run = launch(recipe, TP, f"{SMALL} --dtype bfloat16 --steps 3 --clip 0.5", probe=probe)
    exact, sums, held, sent, orders, copied = zip(*run.probes)
    assert all(error < 1e-6 for error, _ in exact), "the loss is rounded before it is complete"
    assert max(gradient for _, gradient in exact) == 300, "gradients of an embedding are added up in 16 bits"
    for rank, (mine, shapes) in enumerate(held):
        assert ({name: w.shape for name, w in mine.items()}, shapes) == wanted_shapes(recipe)
        for name in mine:  # what several ranks hold is the same to the bit, after training, too
            first = 0 if "norm" in name else rank // 2 * 2 if "k_proj" in name or "v_proj" in name else rank
            assert (mine[name] == held[first][0][name]).all(), (name, rank)
    assert (held[0][0][KEY] != held[2][0][KEY]).any()
    if recipe != TENSOR:
        assert not any(held[-1][0][name][V % -(-V // TP) :].any() for name in TABLES), "padding is not zero any more"
    replicated = [name for name in sums[0] if "norm" in name and recipe in BY_TOKENS]
    keys = [name for name in sums[0] if "k_proj" in name or "v_proj" in name]
    assert any(name.endswith("k_proj.bias") for name in keys)
    for name in sums[0]:
        for rank in range(TP):
            together = (
                range(TP) if name in replicated else (rank // 2 * 2, rank // 2 * 2 + 1) if name in keys else [rank]
            )
            exact = sum(sums[other][name][0].astype("float64") for other in together)
            assert abs(sums[rank][name][1] - exact).max() < 1e-5, f"{name}: rounded, or not summed over {together}"
    assert all(one == wanted_traffic(recipe) for one in sent)
    if recipe in BY_TOKENS:
        assert orders[0] == wanted_order(recipe)
    if recipe == ASYNC:  # (tp-1)/tp of b·s·d out or in: 4 per block forward, 6 backward; for the head 1 and 2
        operations, activations = 10 * L + 3, B * S * D
        memory = 3 * activations + 2 * activations // TP  # the header's formula
        assert copied == TP * ((operations * (TP - 1) * activations * 2 // TP, memory),)


TABLES, KEY = ("model.embed_tokens.weight", "lm_head.weight"), "model.layers.0.self_attn.k_proj.weight"


# -------------------------------------------------------------------------------------------------------- activations
def kept(module):
    """A probe: bytes of activations that the last block keeps for its backward, each storage once.

    The number of tokens of a rank, 11, divides no weight: what it does not divide is a copy of a weight.
    """
    storages, forward, compile_ = {}, module.Block.forward, torch.nn.Module.compile

    def pack(tensor):
        if tensor.untyped_storage().nbytes() % 11 == 0:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # kept: the address stays its own
        return tensor

    def watched(self, x, rope, *args):
        storages.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = forward(self, x, rope, *args)
        for table in rope:
            storages.pop(table.untyped_storage().data_ptr(), None)
        return out

    module.Block.forward = watched
    torch.nn.Module.compile = lambda part: compile_(part, backend="aot_eager_decomp_partition")  # what is kept, no code
    return lambda: sum(storage.nbytes() for storage in storages.values())


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, flag", [(TENSOR, "--compile"), (SEQUENCE, "--compile"), (TENSOR, ""), (ASYNC, "")])
def test_activations_kept(recipe, flag):
    """Tensor parallelism leaves what is in the residual stream whole, with sequence parallelism all take 1/tp."""
    predict, shape = load("01_single_gpu/memory.py"), dict(layers=2, dim=64, heads=8, kv_heads=4, ffn=128, seq=22)
    flags = " ".join(f"--{name} {value}" for name, value in shape.items())
    flags += f" --device cpu --dtype bfloat16 --batch 1 --steps 1 {flag}"
    by_tokens = dict(dtype="bfloat16", compile=bool(flag), sequence_parallel=recipe != TENSOR)
    cfg = predict.Config(**shape, **by_tokens, batch=1, tp=2)
    assert launch(recipe, 2, flags, probe=kept).probes == [predict.saved(cfg, "none")] * 2


def test_activations_of_a_large_model():
    """Bytes per b·s·d and layer of llama3_8b: 8 + 26/tp, where the book's GPT has 10 + 24/tp, and of both 34/tp."""
    predict = load("01_single_gpu/memory.py")
    for tp in 1, 8:
        shape = dict(predict.PRESETS["llama3_8b"], seq=8192, batch=1, dtype="bfloat16", compile=True, tp=tp)
        for by_tokens, whole, book in (False, 8, 10), (True, 8 / tp, 10 / tp):
            kept = predict.saved(predict.Config(**shape, sequence_parallel=by_tokens), "none") / (8192 * 4096)
            assert abs(kept - (whole + 26 / tp)) < 0.04  # 1/rms of the norms and log-sum-exp of attention
            books = predict.book_activations(1, 4096, 32, 8192, "selective", tp, by_tokens, once=False) / (8192 * 4096)
            assert books == book + 24 / tp


# -------------------------------------------------------------------------------------------------------------- flags
@pytest.mark.parametrize("recipe", [TENSOR, VOCAB, SEQUENCE, ASYNC, TWIN])
def test_sizes(recipe):
    """Sizes that tp does not divide end with one line that names the flag; others are accepted."""
    module, by_tokens = load(recipe), recipe not in (TENSOR, VOCAB)
    bad = [(3, "--heads 8 --dim 96 --kv_heads 1 --ffn 96", "--heads 8"), (4, "--ffn 386", "--ffn 386")]
    bad += [(3, "--heads 6 --dim 96 --kv_heads 2 --ffn 96", "--kv_heads 2")]
    bad += [(4, "--seq 127 --batch 1", "--seq 127")] * by_tokens
    for world, flags, words in bad:
        line = refusal(module, world, f"--device cpu {flags}")
        assert words in line and str(world) in line and "\n" not in line
    if recipe != TWIN:  # there each sequence is split, not all tokens; and a vocabulary may leave a rank without rows
        assert refusal(module, 4, "--device cpu --seq 6 --batch 2 --vocab 259") is None
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        if recipe == ASYNC:
            with pytest.raises(SystemExit, match="--nnodes 2: must be 1"):
                module.check(module.Config(device="cpu"), 4)
