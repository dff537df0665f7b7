"""Documents over ranks: every score that a document needs, once; no other document's token changes anything."""

import itertools

import pytest
import torch
from contract import SMALL
from launch import launch, load

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
        for row, queries, keys, causal in module.visible(tuple(sum(LENGTHS, [])), rank, owner, cp, 48):
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
