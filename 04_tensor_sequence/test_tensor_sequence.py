"""The tensor-parallel recipes train as the root does, split what they say, and communicate and keep what they say."""

import os
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import probes
import pytest
import torch
from launch import in_a_fork, launch, load
from torch._subclasses.fake_tensor import FakeTensorMode

data_parallel = load("02_data_parallel/test_data_parallel.py")
TENSOR, VOCAB, SEQUENCE, ASYNC, TWIN = (
    f"04_tensor_sequence/{name}.py"
    for name in ("tensor_parallel", "vocab_parallel", "sequence_parallel", "async_tensor_parallel", "torch_dtensor")
)
BY_TOKENS = (SEQUENCE, ASYNC)  # the residual stream is split too
TABLES, KEY = ("model.embed_tokens.weight", "lm_head.weight"), "model.layers.0.self_attn.k_proj.weight"
L, D, H, KV, F, V, S, B, TP = 3, 32, 8, 2, 64, 259, 16, 4, 4
SMALL = f"--device cpu --layers {L} --dim {D} --heads {H} --kv_heads {KV} --ffn {F} --vocab {V} --seq {S} --batch {B}"
ENDED = SimpleNamespace(wait=lambda: None)


def test_an_adapter_without_a_gradient():
    """Zeros take part in the sum of a matrix that both ranks hold: the other rank, which used it, waits for them."""
    module, sent = load("04_tensor_sequence/lora.py"), []
    model = torch.nn.ModuleDict({"q_proj": module.LoRALinear(4, 4, 2, 2.0)})
    model.tp = SimpleNamespace(size=lambda: 2, allreduce_coalesced=lambda gradients: sent.extend(gradients) or ENDED)
    model.replicas = None
    module.sum_partial(module.Config(), model)
    assert len(sent) == 1 and model["q_proj"].lora_A.weight.grad is sent[0] and not sent[0].any()


@in_a_fork
def test_a_gradient_that_autograd_uses_elsewhere():
    """The backward all-reduces a clone, so a term that is added to the copy keeps the gradient of its own rank."""
    module = load(TENSOR)
    module.dist.all_reduce = lambda gradient, group: gradient.mul_(2)
    x, other = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    added = 1 * other  # before the copy is made: its backward comes after that of the copy
    (3 * (module.CopyToTP.apply(x, None) + added)).sum().backward()
    assert (x.grad == 6).all() and (other.grad == 3).all()


@pytest.mark.parametrize("recipe", [TENSOR, SEQUENCE])
def test_key_heads_that_several_ranks_hold(recipe):
    """Gradients of weights and biases are summed. Where ZeRO has taken them, ranks would go apart: it is refused."""
    attention, summed = torch.nn.ModuleDict(dict(k_proj=torch.nn.Linear(2, 2), v_proj=torch.nn.Linear(2, 2))), []
    model = torch.nn.Module()
    model.replicas = SimpleNamespace(
        size=lambda: 2, allreduce_coalesced=lambda tensors: summed.extend(tensors) or ENDED
    )
    model.model = SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)])
    with pytest.raises(RuntimeError, match="key heads have no .grad"):
        load(recipe).sum_replicas(model)
    for p in attention.parameters():
        p.grad = torch.ones(p.shape)
    load(recipe).sum_replicas(model)
    assert all(any(p.grad is tensor for tensor in summed) for p in attention.parameters())
    attention.requires_grad_(False)
    load(recipe).sum_replicas(model)


@in_a_fork
def test_sums_of_parts_keep_their_dtype(file=ASYNC):
    """... under autocast on GPUs, too, which else returns float32."""
    module = load(file)
    torch.set_autocast_enabled("cuda", True)
    with FakeTensorMode():
        parts = torch.empty(2, 4, 8, dtype=torch.bfloat16, device="cuda")
        assert module.sum_products(parts).dtype == torch.bfloat16, "activations are float32"


def test_the_loss_is_not_rounded(monkeypatch):
    """... before it is complete, of logits in bfloat16."""
    module = load(VOCAB)
    monkeypatch.setattr(module.dist, "all_reduce", lambda *_, **__: None)  # one rank has the whole vocabulary
    loss = module.Loss(module.Config(vocab=V), SimpleNamespace(rank=lambda: 0))
    logits, targets = 5 * torch.randn(100, V, generator=torch.Generator().manual_seed(0)), torch.arange(100)
    exact = torch.nn.functional.cross_entropy(logits.bfloat16().double(), targets, reduction="sum")
    assert abs(loss(logits.bfloat16(), targets) / exact - 1) < 1e-6


def weights(module):
    """A probe: this rank's weights after training, by name; shapes of what blocks hand on and the loss is given, and
    elements of shared memory."""
    models, shapes, build_model = [], {}, module.build_model

    def build(cfg):
        models.append(build_model(cfg))
        models[0].model.layers[0].register_forward_hook(lambda part, args, out: shapes.update(block=list(out.shape)))
        models[0].loss.register_forward_hook(lambda part, args, out: shapes.update(logits=list(args[0].shape)))
        if shared := getattr(models[0], "shared", None):
            own = [buffers[shared.tp.rank()] for buffers in shared.buffers]
            shapes["shared"] = sum(tensor.numel() for tensor in (*own, shared.send_buffer))
        return models[0]

    module.build_model = build
    return lambda: ({name: p.detach().numpy() for name, p in models[0].named_parameters()}, shapes)


def order(module):
    """A probe: matmuls, transfers and waits of this rank, in order, in the first forward and the last backward of
    column-parallel weights."""
    seen, kept = [], []

    def noted(owner, name, word):
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: seen.append(word) or original(*args, **options))

    def whole(original):
        def watched(*args):
            seen.clear()
            result = original(*args)
            kept.append(list(seen))
            return result

        return staticmethod(watched)

    waits = (torch.cpu.Stream, "wait_event") if hasattr(module, "Shared") else (module.dist.Work, "wait")
    noted(*waits, "wait")
    for name in "all_gather_into_tensor", "reduce_scatter_tensor":
        noted(module.dist, name, "transfer")
    noted(torch.Tensor, "copy_", "transfer")
    noted(torch.Tensor, "__matmul__", "matmul")
    noted(torch, "mm", "matmul")
    for name in "forward", "backward":
        setattr(module.ColumnParallel, name, whole(getattr(module.ColumnParallel, name)))
    return lambda: (kept[0], kept[-1])


def wanted_shapes(recipe):
    """Every matrix of a block takes 1/tp; key heads are whole; so are norms. The vocabulary is padded."""
    kv, rows = max(1, KV // TP) * D // H, V if recipe == TENSOR else -(-V // TP)
    block = {"self_attn.q_proj": (D // TP, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D)}
    block |= {"self_attn.o_proj": (D, D // TP), "mlp.gate_proj": (F // TP, D), "mlp.up_proj": (F // TP, D)}
    block |= {"mlp.down_proj": (D, F // TP), "input_layernorm": (D,), "post_attention_layernorm": (D,)}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(L) for name, shape in block.items()}
    shapes |= {"model.embed_tokens.weight": (rows, D), "lm_head.weight": (rows, D), "model.norm.weight": (D,)}
    others = {"block": [B * S // TP, D] if recipe in BY_TOKENS else [B, S, D], "logits": [B * S, rows]}
    if recipe == ASYNC:
        others["shared"] = (3 * TP + 2) * B * S * D // TP  # the header's formula
    return shapes, others


def wanted_traffic(recipe):
    """(Kind, dtype, elements that go in) of a step's collectives.

    Of b·s·d activations 2 all-reduces per block forward and 2 backward, or 2 all-gathers and 2 reduce-scatters, and in
    backward 2 more gathers of kept inputs; asynchronous ones are copies. The loss sends three numbers per token.
    """
    size, token, half = B * S * D, B * S, "torch.bfloat16"
    singles = [1, 2 * L * max(1, KV // TP) * D // H * D]  # the norm; gradients of key heads of a pair
    singles += [token, 2 * token] if recipe != TENSOR else []
    singles += [(2 * L + 1) * D] if recipe in BY_TOKENS else []  # gradients of norms
    wanted = Counter(("allreduce", "torch.float32", elements) for elements in singles)
    if recipe in (TENSOR, VOCAB):
        return wanted + Counter({("allreduce", half, size): 2 * (2 * L + (recipe == VOCAB))})
    gathers, reductions = (6 * L + 3, 4 * L + 2) if recipe == SEQUENCE else (1, 1)  # those of the embedding
    return wanted + Counter({("allgather", half, size // TP): gathers, ("reduce_scatter", half, size): reductions})


def wanted_order(recipe):
    """Sequence: in backward, the gather overlaps with the first matmul, the reduction with the second. Asynchronous: a
    rank's own tokens are multiplied before others have come; products travel while the next are computed, own ones come
    last, and sums are waited for after the weights' gradient."""
    if recipe == SEQUENCE:
        backward = ["transfer", "matmul", "transfer", "wait", "matmul", "wait"]
        return ["transfer", "wait", "matmul"], backward
    pull = (TP + 1) * ["transfer"]
    push = [*(TP - 1) * ["matmul", "transfer"], "matmul"]
    return [*pull, "matmul", *(TP - 1) * ["wait", "matmul"], "wait"], [*pull, *push, *TP * ["wait"], "matmul", "wait"]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [TENSOR, VOCAB, SEQUENCE, ASYNC])
def test_a_step(recipe):
    """Four ranks, of which two pairs share key heads, hold, send and keep as the header says."""
    flags = f"{SMALL} --dtype bfloat16 --steps 3 --clip 0.5"
    own = {SEQUENCE: [order], ASYNC: [order, data_parallel.copied_between_ranks]}.get(recipe, [])
    run = launch(recipe, TP, flags, probe=probes.together(weights, probes.communication, *own))
    held, sent, *own = zip(*run.probes)
    for rank, (mine, shapes) in enumerate(held):
        assert ({name: w.shape for name, w in mine.items()}, shapes) == wanted_shapes(recipe)
        for name in mine:  # what several ranks hold is the same to the bit, after training, too
            first = 0 if "norm" in name else rank // 2 * 2 if "k_proj" in name or "v_proj" in name else rank
            assert (mine[name] == held[first][0][name]).all(), (name, rank)
    assert (held[0][0][KEY] != held[2][0][KEY]).any()
    if recipe != TENSOR:
        assert not any(held[-1][0][name][V % -(-V // TP) :].any() for name in TABLES), "padding is not zero any more"
    for *_, last in sent:
        found = Counter(collective[:3] for collective in last)
        assert found == wanted_traffic(recipe), found
    if recipe in BY_TOKENS:
        assert own[0][0] == wanted_order(recipe)
    if recipe == ASYNC:  # (tp-1)/tp of b·s·d out or in: 4 per block forward, 6 backward; for the head 1 and 2
        assert own[1] == TP * ((10 * L + 3) * (TP - 1) * B * S * D * 2 // TP,)


def kept(module):
    """A probe: bytes of activations that the last block keeps. A rank's 11 tokens divide no copy of a weight."""
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
@pytest.mark.parametrize("recipe, flag", [(TENSOR, "--compile"), (SEQUENCE, "--compile"), (ASYNC, "")])
def test_activations_kept(recipe, flag):
    """Tensor parallelism leaves what is in the residual stream whole, with sequence parallelism all take 1/tp."""
    predict, shape = load("01_single_gpu/memory.py"), dict(layers=2, dim=64, heads=8, kv_heads=4, ffn=128, seq=22)
    flags = " ".join(f"--{name} {value}" for name, value in shape.items())
    flags += f" --device cpu --dtype bfloat16 --batch 1 --steps 1 {flag}"
    by_tokens = dict(dtype="bfloat16", compile=bool(flag), sequence_parallel=recipe != TENSOR)
    cfg = predict.Config(**shape, **by_tokens, batch=1, tp=2)
    assert launch(recipe, 2, flags, probe=kept).probes == [predict.saved(cfg, "none")] * 2


def test_ranks_on_two_hosts():
    module = load(ASYNC)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"), pytest.raises(SystemExit, match="--nnodes 2: must be 1"):
        module.check(module.Config(device="cpu"), 4)
