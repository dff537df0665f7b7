"""The tensor-parallel recipes train as the root does, split what they say, and communicate and keep what they say."""

import functools
from collections import Counter

import compare
import equivalence
import probes
import pytest
import torch
from launch import launch, load
from streams import streams

TENSOR, VOCAB, SEQUENCE, ASYNC, TWIN = (
    f"04_tensor_sequence/{name}.py"
    for name in ("tensor_parallel", "vocab_parallel", "sequence_parallel", "async_tensor_parallel", "torch_dtensor")
)
OURS = (TENSOR, VOCAB, SEQUENCE, ASYNC)
BY_TOKENS = (SEQUENCE, ASYNC)  # the residual stream is split too
D, H, KV, F, V, S, B = 32, 8, 2, 64, 256, 16, 4
SMALL = f"--device cpu --layers 3 --dim {D} --heads {H} --kv_heads {KV} --ffn {F} --seq {S} --batch {B} --steps 1"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, world, flags", [case for case in equivalence.CASES if case[0].startswith("04")])
def test_equals_root(recipe, world, flags):
    equivalence.check_quickly(recipe, world, flags)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, when", [(SEQUENCE, "at once"), (SEQUENCE, "late"), (ASYNC, "late")])
def test_whenever_streams_get_to_it(recipe, when):
    """A collective writes at some time between its start and the end of the wait for it, a side stream likewise."""
    equivalence.check(recipe, 4, "--heads 4 --kv_heads 2", probe=streams(when))


# -------------------------------------------------------------------------------------------------------------- shapes
def shapes(module):
    """A probe: shapes of this rank's parameters by name, and of what blocks hand on and the loss is given."""
    seen, build_model = {}, module.build_model

    def build(cfg):
        model = build_model(cfg)
        seen.update((name, list(p.shape)) for name, p in model.named_parameters())
        model.model.layers[0].register_forward_hook(lambda part, args, out: seen.update(block=list(out.shape)))
        model.loss.register_forward_hook(lambda part, args, out: seen.update(logits=list(args[0].shape)))
        return model

    module.build_model = build
    return lambda: seen


@pytest.mark.thorough
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("recipe", OURS)
def test_local_shapes(recipe, tp):
    """Every matrix of a block takes 1/tp; key heads are whole; so are norms."""
    k, by_words = D // H, recipe != TENSOR
    kv = max(1, KV // tp) * k
    wanted = {"self_attn.q_proj": [D // tp, D], "self_attn.k_proj": [kv, D], "self_attn.v_proj": [kv, D]}
    wanted |= {"self_attn.o_proj": [D, D // tp], "mlp.gate_proj": [F // tp, D], "mlp.up_proj": [F // tp, D]}
    wanted |= {"mlp.down_proj": [D, F // tp], "input_layernorm": [D], "post_attention_layernorm": [D]}
    wanted = {f"model.layers.{i}.{name}.weight": shape for i in range(3) for name, shape in wanted.items()}
    words = V // tp if by_words else V
    wanted |= {f"{name}.weight": [words, D] for name in ("model.embed_tokens", "lm_head")} | {"model.norm.weight": [D]}
    wanted |= {"block": [B * S // tp, D] if recipe in BY_TOKENS else [B, S, D], "logits": [B, S, words]}
    assert launch(recipe, tp, SMALL, probe=shapes).probes == [wanted] * tp


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", OURS)
def test_replicas_stay_identical(recipe):
    """Norms, and key heads that several ranks hold, are the same to the bit after training."""

    def weights(module):
        models, build_model = [], module.build_model
        module.build_model = lambda cfg: models.append(build_model(cfg)) or models[0]
        return lambda: {name: p.detach().numpy() for name, p in models[0].named_parameters()}

    ranks = launch(recipe, 4, f"{SMALL} --steps 4 --clip 0.5", probe=weights).probes
    for name, mine in ranks[0].items():
        for rank in range(1, 4):
            if "norm" in name or ("k_proj" in name or "v_proj" in name) and rank < 4 // KV:
                assert (mine == ranks[rank][name]).all(), (name, rank)
    key = "model.layers.0.self_attn.k_proj.weight"
    assert (ranks[2][key] == ranks[3][key]).all() and (ranks[0][key] != ranks[2][key]).any()


def biased(module):
    """A probe: queries, keys and values with biases, as Qwen2 has them."""
    init = module.Attention.__init__

    def with_biases(self, *args):
        init(self, *args)
        for layer in (self.q_proj, self.k_proj, self.v_proj):
            layer.bias = torch.nn.Parameter(torch.empty(layer.out_features))

    module.Attention.__init__ = with_biases
    if module.__name__ == "recipe_sequence_parallel":  # there a layer is its weight alone: its bias is added by hand
        apply, forward, added = module.ColumnParallel.apply, module.Attention.forward, []

        def attention(self, *args):
            added.append(torch.cat([layer.bias for layer in (self.q_proj, self.k_proj, self.v_proj)]))
            return forward(self, *args)

        module.Attention.forward = attention
        module.ColumnParallel.apply = lambda *args: apply(*args) + added.pop() if added else apply(*args)
    return lambda: None


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [TENSOR, VOCAB, SEQUENCE])
def test_biases_of_replicated_heads(recipe):
    """A reader's model has biases: those of key heads that several ranks hold are summed as their weights are."""
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} {equivalence.TRAINING}"
    ours, theirs = (
        launch(file, world, f"{flags} --heads 4 --kv_heads 2", probe=biased)
        for file, world in ((recipe, 4), (equivalence.root_of(recipe), 1))
    )
    assert any(name.endswith("k_proj.bias") for name in theirs.weights)
    errors = compare.relative_errors(ours.weights, theirs.weights)
    compare.assert_close(errors, equivalence.TOLERANCE["float64"], recipe)


# ------------------------------------------------------------------------------------------------------- communication
def traffic(module):
    """A probe: bytes of every collective, and of every copy into or out of shared memory, by kind and by whether it is
    forward or backward."""
    seen, dist = {}, module.dist

    def count(kind, tensor):
        phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        seen.setdefault((kind, phase), []).append(tensor.numel() * tensor.element_size())

    def counted(kind, original, which):
        def wrapper(*args, **kwargs):
            count(kind, args[which])
            return original(*args, **kwargs)

        return wrapper

    dist.all_reduce = counted("all-reduce", dist.all_reduce, 0)
    group = dist.ProcessGroup
    group._allgather_base = counted("all-gather", group._allgather_base, 1)  # of the whole
    group._reduce_scatter_base = counted("reduce-scatter", group._reduce_scatter_base, 2)
    for name, which in ("pull", 0), ("push", 0):
        if hasattr(module, name):
            setattr(module, name, counted(name, getattr(module, name), which))
    return lambda: seen


@functools.cache
def per_block(recipe, tp):
    """(kind, phase) -> bytes of each operation that one more layer adds."""
    flags = f"{SMALL} --dtype bfloat16 --layers"
    few, many = (launch(recipe, tp, f"{flags} {layers}", probe=traffic).probes[0] for layers in (2, 3))
    more = {key: sorted((Counter(sizes) - Counter(few[key])).elements()) for key, sizes in many.items()}
    return {key: sizes for key, sizes in more.items() if sizes}


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", OURS)
def test_collectives_per_block(recipe):
    """Tensor: 2 all-reduces forward and 2 backward. Sequence: 2 all-gathers and 2 reduce-scatters, and in backward the
    same and 2 gathers of kept inputs. All of b·s·d activations; asynchronous ones copy the parts of which these are."""
    size, tp = B * S * D * 2, 4  # in bfloat16
    if recipe in (TENSOR, VOCAB):
        wanted = {("all-reduce", phase): [size] * 2 for phase in ("forward", "backward")}
    elif recipe == SEQUENCE:
        wanted = {(kind, "forward"): [size] * 2 for kind in ("all-gather", "reduce-scatter")}
        wanted |= {("all-gather", "backward"): [size] * 4, ("reduce-scatter", "backward"): [size] * 2}
    else:  # what is pulled is a rank's part, [n/tp, d]; what is pushed are inputs of a matmul, all columns of the rank
        wanted = {("pull", "forward"): [size // tp] * 2, ("pull", "backward"): [size // tp] * 4}
        kv = max(1, KV // tp) * D // H
        widths = {"forward": [D // tp, F // tp], "backward": [2 * F // tp, D // tp + 2 * kv]}
        wanted |= {("push", phase): sorted(B * S * width * 2 for width in wide) for phase, wide in widths.items()}
    assert per_block(recipe, tp) == wanted


def copies(module):
    """A probe: bytes copied from and to other ranks' memory, in steps."""
    seen, foreign, share, copy = [0], [], module.share, torch.Tensor.copy_

    def shared(*args):
        memory, barrier = share(*args)
        foreign.extend(m.untyped_storage().data_ptr() for r, m in enumerate(memory) if r != module.dist.get_rank())
        return memory, barrier

    def copy_(self, source, *args):
        if {self.untyped_storage().data_ptr(), source.untyped_storage().data_ptr()} & set(foreign):
            seen[0] += self.nbytes
        return copy(self, source, *args)

    module.share, torch.Tensor.copy_ = shared, copy_
    return lambda: seen[0]


@pytest.mark.thorough
def test_bytes_copied():
    """(tp-1)/tp of b·s·d activations out or in: 4 per block forward, 6 backward; for the head 1 and 2."""
    for tp in 2, 4:
        operations = 3 * 10 + 3
        wanted = operations * (tp - 1) * (B * S * D * 4) // tp
        assert launch(ASYNC, tp, SMALL, probe=copies).probes == [wanted] * tp


@pytest.mark.thorough
def test_logits_are_never_gathered():
    """The loss sends three numbers per token, whatever the vocabulary: their maximum, then sum and target in one."""
    for recipe in VOCAB, SEQUENCE:
        seen = launch(recipe, 2, f"{SMALL} --dtype bfloat16 --vocab 2048", probe=traffic).probes[0]
        sizes = seen["all-reduce", "forward"]
        embedding = [B * S * D * 2] * (1 + 2 * 3) if recipe == VOCAB else []  # and two per block
        assert sorted(sizes) == sorted([*embedding, B * S * 4, 2 * B * S * 4, 4])  # the last is the gradient norm
        assert max(max(sizes) for sizes in seen.values()) == B * S * D * 2 < B * S * 2048 * 2


# ------------------------------------------------------------------------------------------------------------- overlap
def order(module):
    """A probe: what the first rank does in backward of the first column-parallel weights, in its order."""
    seen, group, backward = [], module.dist.ProcessGroup, module.ColumnParallel.backward

    class Work:
        def __init__(self, name, work):
            self.name, self.work = name, work
            seen.append(name)

        def wait(self):
            seen.append(f"{self.name} is there")
            self.work.wait()

    for name in "_allgather_base", "_reduce_scatter_base":
        original = getattr(group, name)
        setattr(group, name, lambda *args, name=name, original=original: Work(name.split("_")[1], original(*args)))
    matmul, barrier, mm = torch.Tensor.__matmul__, group.barrier, torch.mm
    torch.Tensor.__matmul__ = lambda *args: seen.append("matmul") or matmul(*args)
    torch.mm = lambda *args, **kwargs: seen.append("piece") or mm(*args, **kwargs)
    group.barrier = lambda *args, **kwargs: seen.append("barrier") or barrier(*args, **kwargs)
    copy = torch.Tensor.copy_
    torch.Tensor.copy_ = lambda *args: seen.append("copy") or copy(*args)
    kept = []

    def watched(ctx, gradient):
        seen.clear()
        result = backward(ctx, gradient)
        kept.append(list(seen))
        return result

    module.ColumnParallel.backward = staticmethod(watched)
    forward = module.ColumnParallel.forward

    def watched_forward(*args):
        seen.clear()
        result = forward(*args)
        kept.append(list(seen))
        return result

    module.ColumnParallel.forward = staticmethod(watched_forward)
    return lambda: [kept[0], kept[-1]]


@pytest.mark.thorough
def test_sequence_parallel_communicates_beside_matmuls():
    forward, backward = launch(SEQUENCE, 2, SMALL, probe=order).probes[0]
    assert forward == ["allgather", "allgather is there", "matmul"]
    beside = ["allgather", "matmul", "reduce", "allgather is there", "matmul", "reduce is there"]
    assert backward == beside


@pytest.mark.thorough
def test_asynchronous_multiplies_while_tokens_travel():
    """The side stream, as late as it may be, begins when own tokens are multiplied; sums are waited for last."""
    forward, backward = launch(ASYNC, 2, SMALL, probe=probes.together(order, streams("late"))).probes[0][0]
    late = [[step for step in steps if step != "copy"] for steps in (forward, backward)]
    assert late == [["piece", "barrier", "piece"], ["piece", "piece", "barrier", "matmul", "barrier"]]
    forward, backward = launch(
        ASYNC, 3, f"{SMALL} --heads 6 --dim 24 --kv_heads 3 --ffn 96 --batch 3", probe=order
    ).probes[0]
    pull, push = ["copy", "barrier", "copy", "copy", "copy"], ["piece", "copy", "piece", "copy", "piece", "barrier"]
    assert forward == [*pull, "piece", "piece", "piece"] and backward == [*pull, *push, "matmul"]


# -------------------------------------------------------------------------------------------------------------- memory
PLAIN = [(TENSOR, 1, ""), (TENSOR, 2, ""), (TENSOR, 4, ""), (SEQUENCE, 2, ""), (SEQUENCE, 4, ""), (ASYNC, 4, "")]


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
@pytest.mark.parametrize("recipe, tp, flag", [(TENSOR, 2, "--compile"), (SEQUENCE, 2, "--compile"), *PLAIN])
def test_activations_kept(recipe, tp, flag):
    """Tensor parallelism leaves what is in the residual stream whole, with sequence parallelism all take 1/tp."""
    predict, shape = load("01_single_gpu/memory.py"), dict(layers=2, dim=64, heads=8, kv_heads=4, ffn=128, seq=11 * tp)
    flags = " ".join(f"--{name} {value}" for name, value in shape.items())
    flags += f" --device cpu --dtype bfloat16 --batch 1 --steps 1 {flag}"
    cfg = predict.Config(
        **shape, batch=1, dtype="bfloat16", compile=bool(flag), tp=tp, sequence_parallel=recipe != TENSOR
    )
    assert launch(recipe, tp, flags, probe=kept).probes == [predict.saved(cfg, "none")] * tp


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_activations_of_a_large_model(tp):
    """Bytes per b·s·d and layer of llama3_8b: 8 + 26/tp, where the book's GPT has 10 + 24/tp, and of both 34/tp."""
    predict = load("01_single_gpu/memory.py")
    shape = dict(predict.PRESETS["llama3_8b"], seq=8192, batch=1, dtype="bfloat16", compile=True, tp=tp)
    for by_tokens, whole, book in (False, 8, 10), (True, 8 / tp, 10 / tp):
        kept = predict.saved(predict.Config(**shape, sequence_parallel=by_tokens), "none") / (8192 * 4096)
        assert abs(kept - (whole + 26 / tp)) < 0.04  # 1/rms of the norms and log-sum-exp of attention
        books = predict.book_activations(1, 4096, 32, 8192, "selective", tp, by_tokens, once=False) / (8192 * 4096)
        assert books == book + 24 / tp


@pytest.mark.parametrize("recipe", [*OURS, TWIN])
def test_bad_sizes(recipe, monkeypatch):
    """What cannot be split ends with one line that names the flag, whatever the number of processes."""
    module = load(recipe)
    bad = [(3, "--heads 8 --dim 96 --kv_heads 1 --ffn 96", "--heads 8"), (4, "--ffn 386", "--ffn 386")]
    bad += [(3, "--heads 6 --dim 96 --kv_heads 2 --ffn 96", "--kv_heads 2")]
    if recipe not in (TENSOR, VOCAB):
        bad += [(4, "--seq 127 --batch 1", "--seq 127")]
    for world, flags, words in bad:
        monkeypatch.setattr("sys.argv", [recipe, "--device", "cpu", *flags.split()])
        with pytest.raises(SystemExit) as end:
            module.check(module.parse_config(), world)
        assert words in end.value.code and str(world) in end.value.code and "\n" not in end.value.code
    if recipe == ASYNC:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setattr("sys.argv", [recipe, "--device", "cpu"])
        with pytest.raises(SystemExit, match="--nnodes 2: must be 1"):
            module.check(module.parse_config(), 4)


def rows_beyond_the_words(module):
    """A probe: the largest number in the rows of the tables that no word has, before and after training."""
    models, seen, build_model = [], [], module.build_model

    def look():
        tables = models[0].model.embed_tokens.weight, models[0].lm_head.weight
        used = max(0, min(130, 259 - 130 * module.dist.get_rank()))
        seen.append(max(table[used:].abs().sum().item() for table in tables))

    def build(cfg):
        models.append(build_model(cfg))
        look()
        return models[0]

    module.build_model = build
    destroy = module.dist.destroy_process_group
    module.dist.destroy_process_group = lambda: look() or destroy()
    return lambda: seen


@pytest.mark.thorough
def test_padding_is_zero_and_stays_zero():
    assert launch(VOCAB, 2, f"{SMALL} --vocab 259 --steps 3", probe=rows_beyond_the_words).probes == [[0, 0]] * 2
