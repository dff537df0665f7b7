"""Documents that share a row train as if each were alone, and cost no more than that."""

import numpy as np
import pytest
import torch
from compare import assert_close, relative_errors
from contract import refusal
from equivalence import documents, without_kernels
from launch import in_a_fork, load
from probes import OnGPU
from recipes import DOCUMENTS, ROOT_RECIPE
from witness import check

IGNORE = -100
LENGTHS = [[5, 1, 10], [16], [1, 1, 13, 1]]


def batch(lengths: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets, with documents of these lengths in each row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(40, (len(lengths), sum(lengths[0]) + 1), generator=generator)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    for row, sizes in zip(targets, lengths):
        row[torch.tensor(sizes[:-1], dtype=torch.long).cumsum(0) - 1] = IGNORE
    return inputs, targets


@in_a_fork
def test_equals_each_document_alone(file=DOCUMENTS):
    """The sum of losses and all gradients; alone, a document's positions begin at 0."""
    torch.set_default_dtype(torch.float64)
    root, module = load(ROOT_RECIPE), load(file)
    sizes = dict(layers=2, dim=32, heads=4, kv_heads=2, ffn=48, vocab=40, device="cpu", dtype="float64")
    root_cfg, cfg = root.Config(**sizes), module.Config(**sizes)
    theirs, ours = root.build_model(root_cfg), module.build_model(cfg)  # with the same weights
    inputs, targets = batch(LENGTHS)
    loss, total = module.forward(cfg, ours, inputs, targets), 0
    loss.backward()
    for x, y, sizes in zip(inputs, targets, LENGTHS):
        for one, other in zip(x.split(sizes), y.split(sizes)):
            part = root.forward(root_cfg, theirs, one[None], other[None])
            part.backward()
            total += part.detach()
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (ours, theirs)]
    errors = relative_errors(*gradients) | {"loss": abs(loss.item() / total.item() - 1)}
    assert_close(errors, 1e-10, "documents, each alone")
    assert_close(relative_errors({"logits": ours(inputs)}, {"logits": theirs(inputs)}), 1e-10, "without lengths")


def test_end_of_a_document_in_a_file_of_ids(tmp_path, file=DOCUMENTS):
    """The token after --eos is not predicted, and sees nothing before it. An --eos beyond the vocabulary is refused."""
    ids = np.array([7, 7, 3, 7, 7, 7, 3, 3, 7], np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    module = load(file)
    for eos in 3, -1:  # no token ends a document
        cfg = module.Config(data=str(tmp_path / "ids.bin"), seq=7, batch=1, vocab=8, eos=eos)
        inputs, targets = module.make_batch(cfg, module.load_data(cfg)[0], 0)
        after = inputs == eos
        assert after.any() == (eos == 3), "a batch without the token"
        assert torch.equal(targets == module.IGNORE, after), "a token after --eos is predicted"
    for eos, refused in (255, False), (256, True), (-2, True):
        line = refusal(module, 1, f"--device cpu --eos {eos}")
        assert line.startswith(f"--eos {eos}: ") if refused else line is None


@pytest.mark.parametrize("lengths", [[5, 1, 10], [10, 12, 10]])
def test_lengths_that_do_not_fill_rows(lengths, file=DOCUMENTS):
    """Too few, and documents that go on in the next row: a wrong gradient without an error."""
    check, refused = load(file).check_lengths, ""
    check(torch.tensor([10, 6, 16]), 2, 16)
    try:
        check(torch.tensor(lengths), 2, 16)
    except ValueError as problem:
        refused = str(problem)
    assert "must fill 2 rows of 16 tokens" in refused, "lengths that do not fill the rows are taken"


@in_a_fork
def test_scores_between_documents_are_not_computed(file=DOCUMENTS):
    """Each document is a call of its own; rows of one document are one call, and no rows are none, with gradients."""
    attention, attend, calls = load(file).attention, torch.nn.functional.scaled_dot_product_attention, []
    torch.nn.functional.scaled_dot_product_attention = lambda *x, **how: calls.append(x[0].shape) or attend(*x, **how)
    q = torch.randn(3, 4, 16, 8, requires_grad=True)
    for lengths, shapes in ([4] * 12, [(1, 4, 4, 8)] * 12), ([16] * 3, [(3, 4, 16, 8)]), ([], []):
        calls.clear()
        rows = q[: sum(lengths) // 16]
        o = attention(rows, rows, rows, torch.tensor(lengths, dtype=torch.long))
        assert calls == shapes and o.shape == rows.shape and torch.autograd.grad(o.sum(), q), "other calls"
        assert len(lengths) != 3 or torch.equal(o, attend(q, q, q, is_causal=True)), "rows are not causal"


@in_a_fork
def test_one_kernel_for_all_documents(file=DOCUMENTS):
    """On a GPU in bf16: it gets all tokens in a line, where documents begin and end, and the length of the longest."""
    attention, q = load(file).attention, torch.randn(2, 4, 16, 8).bfloat16()
    k, v, lengths = q[:, :2] + 1, q[:, 2:] - 1, torch.tensor([5, 1, 10, 16])

    def kernel(q, k, v, first, second, *options):
        assert first is second and first.dtype == torch.int32 and first.tolist() == [0, 5, 6, 16, 32], "other ends"
        assert options == (16, 16, 0.0, True, False), "other lengths, or not causal"
        tokens = (x.unflatten(0, (1, -1)).transpose(1, 2).as_subclass(torch.Tensor) for x in (q, k, v))
        return (attention(*tokens, lengths).transpose(1, 2)[0],)

    torch.ops.aten._flash_attention_forward = kernel
    found = attention(q.as_subclass(OnGPU), k, v, lengths)
    assert torch.equal(found, attention(q, k, v, lengths)), "other results"
    q, k, v = (x.float() for x in (q, k, v))  # which the kernel does not take
    torch.ops.aten._flash_attention_forward = None
    assert torch.equal(attention(q.as_subclass(OnGPU), k, v, lengths), attention(q, k, v, lengths))


@pytest.mark.thorough
@in_a_fork
def test_lengths_compile_nothing_anew(file=DOCUMENTS):
    """The first batch compiles, the first with another number of documents does once more, and no other."""
    module = load(file)
    without_kernels(module)
    cfg = module.Config(layers=2, dim=32, ffn=48, seq=32, batch=8, data=documents(), device="cpu", compile=True)
    model, data = module.build_model(cfg), module.load_data(cfg)[0]
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for step in range(8):
            module.forward_backward(cfg, model, *module.make_batch(cfg, data, step))


@pytest.mark.thorough
def test_computes_what_transformers_computes(file=DOCUMENTS):
    """Its packed attention tells documents by positions that begin anew."""
    check(file, documents=True)
