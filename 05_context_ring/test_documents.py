"""Documents over ranks: every score that a document needs, once; no other document's token changes anything."""

import itertools

import pytest
import torch
from contract import SMALL
from launch import in_a_fork, launch, load
from probes import OnGPU

DOCUMENTS = "05_context_ring/documents.py"
LENGTHS = [[48], [1, 47], [5, 1, 1, 30, 11], [24, 24], [12] * 4, [1] * 48]  # of rows of 48 tokens


def positions(rank: int, cp: int) -> torch.Tensor:
    """Return the positions of the tokens that a rank holds, by the header of zigzag.py."""
    parts = torch.arange(48).chunk(2 * cp)
    return torch.cat([parts[rank], parts[2 * cp - 1 - rank]])


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_each_score_once(cp, file=DOCUMENTS):
    """All pairs of ranks together compute the scores of the mask, each once."""
    module, computed = load(file), torch.zeros(len(LENGTHS), 48, 48)
    for rank, owner in itertools.product(range(cp), repeat=2):
        for row, queries, keys, causal, _ in module.visible(tuple(sum(LENGTHS, [])), rank, owner, cp, 48):
            mine, theirs = positions(rank, cp)[queries], positions(owner, cp)[keys]
            ones = torch.ones(len(mine), len(theirs))
            computed[row, mine[0] : mine[-1] + 1, theirs[0] : theirs[-1] + 1] += ones.tril() if causal else ones
    wanted = torch.stack([torch.block_diag(*[torch.ones(n, n) for n in row]).tril() for row in LENGTHS])
    assert torch.equal(computed, wanted), "other scores are computed"


def changes(module):
    """A probe: where logits change with one token, on this rank; sequences and the token's place are the same."""
    seen, train_step = [], module.train_step

    def step(cfg, model, optimizer, inputs, targets):
        inputs, targets = inputs[:2].clone(), targets[:2].clone()
        targets[:] = 1
        targets[0, [2, 9]] = module.IGNORE  # documents of 3, 7 and 6 tokens
        lengths, held = module.document_lengths(targets), module.shard(cfg, model.cp)
        with torch.no_grad():
            whole = model(inputs[:, held], torch.full([2], inputs.shape[1]))
            assert torch.equal(model(inputs[:, held]), whole), "without lengths, a row is not one document"
            before = model(inputs[:, held], lengths)
            inputs[0, 4] = (inputs[0, 4] + 1) % cfg.vocab
            changed = (before != model(inputs[:, held], lengths)).any(-1)
        seen.extend((row, held[i].item()) for row, i in changed.nonzero().tolist())
        return train_step(cfg, model, optimizer, *batch_of(cfg, inputs, targets))

    def batch_of(cfg, *batch):
        return [x.repeat(cfg.batch // 2, 1) for x in batch]

    module.train_step = step
    return lambda: seen


@pytest.mark.parametrize("world", [1, 4])
def test_no_document_sees_another(world, file=DOCUMENTS):
    """To the bit, wherever its tokens are: a change in one shows in its own later tokens alone."""
    run = launch(file, world, f"{SMALL} --steps 1", probe=changes)
    assert sorted(sum(run.probes, [])) == [(0, i) for i in range(4, 10)], "a change shows elsewhere"


def test_whole_parts(file=DOCUMENTS):
    """They alone have shapes that come back, so cuDNN plans once. A document that begins or ends in a part cuts it."""
    pieces = load(file).visible((40, 8, 4, 44), 0, 0, 2, 48)  # parts of 12 tokens, the rank has the first and the last
    found = {(row.start, queries.start, keys.start): whole for row, queries, keys, _, whole in pieces}
    ends = {(0, 0, 0): True, (0, 12, 0): False, (0, 12, 12): False, (0, 16, 16): False}
    begins = {(1, 0, 0): False, (1, 4, 4): False, (1, 12, 4): False, (1, 12, 12): True}
    assert found == ends | begins, "other pieces are whole parts"


@in_a_fork
def test_kernels_get_what_plain_matmuls_get(file=DOCUMENTS):
    """On a GPU in bf16: whole parts go by cuDNN, others by FlashAttention, whose log-sum-exp has no last axis."""
    module, aten, called = load(file), torch.ops.aten, []
    forward, backward, plain = module.local_attention, module.local_attention_backward, torch.Tensor

    def flash(q, k, v, dropout, causal):
        called.append("flash")
        o, lse = forward(q.as_subclass(plain), k, v, causal, False)
        return o, lse[..., 0]

    def flash_backward(gradient, q, k, v, o, lse, first, second, n, t, dropout, causal, seed, offset):
        called.append("flash")
        assert lse.is_contiguous() and (n, t) == (q.shape[2], k.shape[2]), "other sizes"
        return backward(gradient, q.as_subclass(plain), o, lse[..., None], k, v, causal, False)

    def cudnn(q, k, v, bias, with_lse, dropout, causal):
        called.append("cudnn")
        return forward(q.as_subclass(plain), k, v, causal, True)

    def cudnn_backward(gradient, q, k, v, o, lse, seed, offset, bias, first, second, n, t, dropout, causal):
        called.append("cudnn")
        assert lse.is_contiguous() and (n, t) == (q.shape[2], k.shape[2]), "other sizes"
        return backward(gradient, q.as_subclass(plain), o, lse, k, v, causal, True)

    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward = flash, flash_backward
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward = cudnn, cudnn_backward
    shapes = [(1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), (1, 4, 6, 8)]
    q, k, v, gradient = (torch.randn(shape).bfloat16() for shape in shapes)
    for causal, whole in itertools.product((True, False), repeat=2):
        o, lse = forward(q, k, v, causal, whole)
        right = o, lse, *backward(gradient, q, o, lse, k, v, causal, whole)
        on_gpu, lse = q.as_subclass(OnGPU), torch.cat([lse, lse], 2)[:, :, :6]  # a slice, as of a part
        found = *forward(on_gpu, k, v, causal, whole), *backward(gradient, on_gpu, o, lse, k, v, causal, whole)
        assert all(torch.equal(x, y) for x, y in zip(found, right)), f"other results: causal {causal}, whole {whole}"
    assert called == ["cudnn", "cudnn", "flash", "flash"] * 2, "other kernels"
