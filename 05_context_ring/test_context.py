"""The context-parallel recipes train as the root does, share out tokens and work, and send and keep what they say."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from launch import in_a_fork, isolated, launch, load, once
from probes import OnGPU, Operations, kept, phase, sent, settled, together, transfers
from torch.multiprocessing.reductions import StorageWeakRef

BLOCKWISE, GATHER, RING, STRIPED, ZIGZAG, DOCUMENTS, ULYSSES, USP, TWIN = (
    f"05_context_ring/{name}.py"
    for name in "blockwise all_gather_kv ring striped zigzag documents ulysses usp torch_context_parallel".split()
)
OURS = (GATHER, RING, ZIGZAG, DOCUMENTS, ULYSSES, USP)  # striped.py sends and keeps what zigzag.py does
LAYERS, D, H, KV, S, B = 2, 32, 8, 4, 32, 4
SMALL = f"--device cpu --layers {LAYERS} --dim {D} --heads {H} --kv_heads {KV} --ffn 48 --seq {S} --batch {B} --steps 1"


@pytest.mark.parametrize("recipe", [GATHER, USP])  # others share evaluate
def test_longer_sequences_are_refused(recipe):
    """... in evaluations, not cut: their loss would be divided by the tokens of all."""
    module, group = load(recipe), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    group.whole = group.ring = group.ulysses = group
    batch = torch.zeros(2, B, 2 * S, dtype=torch.long)
    with pytest.raises(ValueError, match=f"sequences have {2 * S} tokens: must have --seq {S}"):
        module.evaluate(module.Config(seq=S, device="cpu"), SimpleNamespace(cp=group), *batch)


@once
def root_kept():
    """Bytes of activations that the root keeps for its backward."""
    return launch("01_single_gpu/train.py", 1, SMALL, probe=kept).probes[0]


def test_blocks_keep_no_scores():
    """Plain blocks keep for backward what the root's fused attention keeps, and no more."""
    assert launch(BLOCKWISE, 1, SMALL, probe=kept).probes == [root_kept()]


@pytest.mark.parametrize("dtype, size", [("float32", 4), pytest.param("bfloat16", 2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("recipe", OURS)
def test_a_step(recipe, dtype, size):
    """Per layer, keys and values are sent in the dtype of matmuls, gradients in 4 bytes. A rank keeps 1/cp of what the
    root keeps, and an attention output per layer: plain matmuls write it head by head, and o_proj copies it.

    Attention runs while keys travel, as the last rank shows, which always has work; nothing hides the last transfer of
    backward.
    """
    cp, kv, ulysses = 4, KV * D // H, 2
    keys, heads = (cp - 1) * 2 * B * S // cp * kv, 0
    if recipe == ULYSSES:
        keys, heads = 0, (cp - 1) * B * S // cp * (2 * D + 2 * kv) // cp
    if recipe == USP:
        keys = (cp // ulysses - 1) * 2 * B * S // cp * kv
        heads = (ulysses - 1) * B * S // cp * (2 * D + 2 * kv) // ulysses
    wanted = {"forward": LAYERS * (keys + heads) * size, "backward": LAYERS * (keys * (size + 4) + heads * size)}
    twice = LAYERS * B * S * D * 4 * (recipe != DOCUMENTS)
    ranks = launch(recipe, 4, f"{SMALL} --dtype {dtype}", probe=together(sent, kept, transfers)).probes
    for rank, ((seen, meets), bytes_kept, _) in enumerate(ranks):
        assert seen == wanted
        neighbours = (rank // ulysses * ulysses, rank // ulysses * ulysses + 1)
        assert meets == {ULYSSES: {(0, 1, 2, 3)}, USP: {neighbours}}.get(recipe, set())  # heads stay inside a host
        assert dtype != "float32" or bytes_kept == (root_kept() + twice) // 4
    for name in "forward", "backward":
        hidden = [seen for of_phase, _, seen in ranks[-1][-1] if of_phase == name and recipe != ULYSSES]
        of_a_layer = len(hidden) // LAYERS - (name == "backward")
        wanted = ([True] * of_a_layer + [False] * (name == "backward")) * LAYERS
        assert recipe == ULYSSES or (of_a_layer > 0 and hidden == wanted), f"nothing hides transfers of {name}"


def test_scores_of_one_pair_of_blocks_are_in_memory(file=BLOCKWISE):
    """(s/blocks)² of each of 4 heads, forward and backward. All else is smaller: heads are 2 wide."""

    def largest(blocks):
        sizes, (q, k, v) = [], (torch.randn(1, h, 64, 2, requires_grad=True) for h in (4, 2, 2))
        with Operations(lambda *seen: sizes.append(getattr(seen[-1], "nbytes", 0))):
            load(file).attention(q, k, v, blocks).sum().backward()
        return max(sizes)

    found = isolated(lambda: [largest(1), largest(4)])
    assert found == [4 * 4 * 64**2, 4 * 4 * 16**2], "scores of more than one pair are in memory"


def blocks_of_keys(module):
    """A probe: the most blocks of keys and values that are in memory, in forward and in backward.

    A transfer is done when it returns: gloo's work, unlike NCCL's, holds its tensors as long as somebody holds it.
    """
    blocks, peak, ring_exchange = [], {"forward": 0, "backward": 0}, module.ring_exchange
    all_to_all = module.dist.all_to_all_single
    done = SimpleNamespace(wait=lambda: None)
    module.dist.all_to_all_single = lambda *args, async_op, **kwargs: all_to_all(*args, **kwargs) or done

    def in_memory():
        return len({block for block, reference in blocks if not reference.expired()})

    def watched(x, cp):
        arriving, passing = ring_exchange(x, cp)
        if x.dtype == torch.bfloat16:  # else gradients
            blocks.extend((t.untyped_storage()._cdata, StorageWeakRef(t.untyped_storage())) for t in (x, arriving))
            peak[phase()] = max(peak[phase()], settled(in_memory, 2))
        return arriving, passing

    module.ring_exchange = watched
    return lambda: peak


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [RING, DOCUMENTS])
def test_two_blocks_of_keys_are_in_memory(recipe):
    """Of four blocks of keys, two are in memory: one in use, and one that arrives meanwhile."""
    flags = f"{SMALL} --layers 1 --dtype bfloat16"
    assert launch(recipe, 4, flags, probe=blocks_of_keys).probes == [{"forward": 2, "backward": 2}] * 4


def exact_attention(q, k, v, gradient, dtype):
    """Causal attention to all keys in float64, and the gradients of q, k and v: of an output that is kept in dtype."""
    q, k, v, gradient = (x.double() for x in (q, k, v, gradient))
    q, gradient = (x.unflatten(1, (k.shape[1], -1)) for x in (q, gradient))  # b g n s k
    k, v = k[:, :, None], v[:, :, None]
    scale, later = q.shape[-1] ** -0.5, torch.ones(q.shape[-2], k.shape[-2]).triu(1).bool()
    p = (q @ k.mT * scale).masked_fill(later, -torch.inf).softmax(-1)
    o = p @ v
    ds = p * (gradient @ v.mT - (gradient * o.to(dtype)).sum(-1, keepdim=True)) * scale
    return o.flatten(1, 2), (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2), (p.mT @ gradient).sum(2)


def attending(module):
    """A probe: attend to random keys. Reports errors of the output and the gradients of q, k, v: in bfloat16 over those
    of one rounding; in float64, with scores whose exponentials overflow, over the tensor's norm."""
    errors = {}

    def attend(cfg, *data):
        generator, held, parts = torch.Generator().manual_seed(0), slice(None), getattr(cfg, "blocks", None)
        if not parts:
            parts = module.build_model(cfg).cp
            held = module.shard(cfg, parts)
        for dtype in torch.bfloat16, torch.float64:
            whole = [torch.randn(B, h, cfg.seq, 16, generator=generator, dtype=dtype) for h in (H, KV, KV, H)]
            if dtype == torch.float64:  # scores near 1,000 with half of the key heads, near -1,000 with the others
                whole[0][..., 0], whole[1][:, :2, :, 0], whole[1][:, 2:, :, 0] = 100, 40, -40
            *ours, gradient = (x[:, :, held] for x in whole)
            documents = [torch.full([B], cfg.seq)] * hasattr(module, "document_lengths")  # a row is one
            o = module.attention(*(x.requires_grad_() for x in ours), *documents, parts)
            found = [o, *torch.autograd.grad(o, ours, gradient)]
            right = [x[:, :, held] for x in exact_attention(*whole, dtype)]
            base = [(x - x.to(dtype)).norm() if dtype == torch.bfloat16 else x.norm() for x in right]
            errors[dtype] = [((x - y).norm() / b).item() for x, y, b in zip(found, right, base)]

    module.train = attend
    return lambda: errors


@pytest.mark.parametrize("recipe, flags", [(BLOCKWISE, "--blocks 6"), (GATHER, ""), (ZIGZAG, ""), (DOCUMENTS, "")])
def test_attention_rounds_once_and_never_overflows(recipe, flags, file=None):
    """Of six ranks, whose results are merged in two goes, or of six blocks. A nan is no small error."""
    flags = f"{SMALL.replace(f'--seq {S}', '--seq 36')} {flags}"
    world = 1 if recipe == BLOCKWISE else 6
    for errors in launch(file or recipe, world, flags, probe=attending, save=False).probes:
        assert all(error < 1.01 for error in errors[torch.bfloat16]), f"rounded more than once: {errors}"
        assert all(error < 1e-10 for error in errors[torch.float64]), f"exponentials overflow: {errors}"


def attending_as_on_gpus(module):
    """A probe like attending, but results for some of the keys are in the dtype of q, as cuDNN returns them."""
    forward, backward = module.local_attention, module.local_attention_backward
    module.local_attention = lambda q, *rest: tuple(
        x.to(q.dtype) if x.shape == q.shape else x for x in forward(q, *rest)
    )
    module.local_attention_backward = lambda dy, q, *rest: [x.to(q.dtype) for x in backward(dy, q, *rest)]
    return attending(module)


@pytest.mark.parametrize("recipe", [RING, DOCUMENTS])
def test_sums_are_rounded_once(recipe):
    """Six ranks round what they add to the output and to the gradients of q and v, then sums are rounded: 1.48, 2.1 and
    1.5 times one rounding. Sums in bf16, on their way or where they are merged: 1.67, 2.4 and 1.95, and more."""
    flags = SMALL.replace(f"--seq {S}", "--seq 36")
    for found in launch(recipe, 6, flags, probe=attending_as_on_gpus).probes:
        output, q, _, v = found[torch.bfloat16]
        assert output < 1.57 and q < 2.2 and v < 1.6, f"sums are rounded on their way: {output, q, v}"


@in_a_fork
def test_cudnn_gets_the_log_sum_exps_of_a_part(file=RING):
    """... in memory of their own: a slice of rows is not contiguous, and the kernel reads it as if it were."""
    kernels, shapes = torch.ops.aten, [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)]
    kernels._scaled_dot_product_cudnn_attention_backward = lambda *operands: operands
    q, k, v, o, dy = (torch.randn(shape).bfloat16() for shape in shapes)
    q, lse = q.as_subclass(OnGPU), torch.randn(2, 4, 12, 1)[:, :, 6:]
    found = load(file).local_attention_backward(dy, q, o, lse, k, v, True)
    assert all(x is y for x, y in zip(found, (dy, q, k, v, o))) and found[11:] == (6, 6, 0.0, True), "other operands"
    assert found[5].is_contiguous() and torch.equal(found[5], lse), "other log-sum-exps"


def test_a_weight_that_an_earlier_micro_batch_used(file=GATHER):
    """... is summed with those of the last one, over the group that is given: on a mesh it is not cp alone."""
    model = torch.nn.ParameterList(torch.ones(3) for _ in range(2))
    ended = SimpleNamespace(wait=lambda: None)
    group = SimpleNamespace(allreduce_coalesced=lambda gradients: [x.mul_(2) for x in gradients] and ended)
    (model[0] * model[1]).sum().backward()
    load(file).backward_and_sum(model, model[0].sum(), group)
    assert [p.grad.tolist() for p in model] == [[4.0] * 3, [2.0] * 3], "it is not summed"


def test_parts_that_are_not_equal_are_refused():
    """... by shard itself, which is pasted without check: else some tokens are held twice, others not at all."""
    module, group = load(USP), lambda ranks: SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    for seq, ring, ulysses in (6, 2, 1), (9, 3, 1), (10, 1, 4):
        mesh = module.Mesh(group(ring * ulysses), group(ring), group(ulysses))
        with pytest.raises(ValueError, match=f"--seq {seq}: must be divisible by"):
            module.shard(SimpleNamespace(seq=seq, device="cpu"), mesh)


def test_whole_parts(file=DOCUMENTS):
    """They alone have shapes that come back, so cuDNN plans once. A document that begins or ends in a part cuts it."""
    pieces = load(file).visible((40, 8, 4, 44), 0, 0, 2, 48)  # parts of 12 tokens, the rank has the first and the last
    found = {(row.start, queries.start, keys.start): whole for row, queries, keys, _, whole in pieces}
    ends = {(0, 0, 0): True, (0, 12, 0): False, (0, 12, 12): False, (0, 16, 16): False}
    begins = {(1, 0, 0): False, (1, 4, 4): False, (1, 12, 4): False, (1, 12, 12): True}
    assert found == ends | begins, "other pieces are whole parts"


def test_documents_end_with_their_rows():
    """Lengths that run over the end of a row are refused: what is in the next row would see nothing."""
    load(DOCUMENTS).check_lengths(torch.tensor([3, 1, 4]), 2, 4)
    with pytest.raises(ValueError, match="be cut where a row ends"):
        load(DOCUMENTS).check_lengths(torch.tensor([3, 5]), 2, 4)


def test_pieces_are_forgotten():
    """The lengths of documents differ from batch to batch: what is kept of each would fill the memory of a long run."""
    visible = load(DOCUMENTS).visible
    for length in range(1, 600):
        visible((length, 2400 - length), 0, 0, 2, 1200)
    assert visible.cache_info().currsize < 500


@in_a_fork
def test_kernels_get_what_plain_matmuls_get(file=DOCUMENTS):
    """On a GPU in bf16: whole parts go by cuDNN, others by FlashAttention, whose log-sum-exp has no last axis."""
    module, aten, called = load(file), torch.ops.aten, []
    forward, backward, plain = module.local_attention, module.local_attention_backward, torch.Tensor

    def forward_of(name):
        def kernel(q, k, v, *rest):
            called.append(name)
            o, lse = forward(q.as_subclass(plain), k, v, rest[-1], name == "cudnn")
            return o, lse if name == "cudnn" else lse[..., 0]

        return kernel

    def backward_of(name):
        def kernel(gradient, q, k, v, o, lse, *rest):
            called.append(name)
            n, t, _, causal = rest[5:] if name == "cudnn" else rest[2:6]
            assert lse.is_contiguous() and (n, t) == (q.shape[2], k.shape[2]), "other sizes"
            lse = lse if name == "cudnn" else lse[..., None]
            return backward(gradient, q.as_subclass(plain), o, lse, k, v, causal, name == "cudnn")

        return kernel

    for name in "flash", "cudnn":
        setattr(aten, f"_scaled_dot_product_{name}_attention", forward_of(name))
        setattr(aten, f"_scaled_dot_product_{name}_attention_backward", backward_of(name))
    shapes = [(1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), (1, 4, 6, 8)]
    q, k, v, gradient = (torch.randn(shape).bfloat16() for shape in shapes)
    for causal, whole in itertools.product((True, False), repeat=2):
        o, lse = forward(q, k, v, causal, whole)
        right = o, lse, *backward(gradient, q, o, lse, k, v, causal, whole)
        on_gpu, lse = q.as_subclass(OnGPU), torch.cat([lse, lse], 2)[:, :, :6]  # a slice, as of a part
        found = *forward(on_gpu, k, v, causal, whole), *backward(gradient, on_gpu, o, lse, k, v, causal, whole)
        assert all(torch.equal(x, y) for x, y in zip(found, right)), f"other results: causal {causal}, whole {whole}"
    assert called == ["cudnn", "cudnn", "flash", "flash"] * 2, "other kernels"
