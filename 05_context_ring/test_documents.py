"""Documents over ranks, on GPUs: the pieces into which attention is cut, and the kernels that get them."""

import itertools

import torch
from launch import in_a_fork, load
from probes import OnGPU

DOCUMENTS = "05_context_ring/documents.py"


def test_whole_parts(file=DOCUMENTS):
    """They alone have shapes that come back, so cuDNN plans once. A document that begins or ends in a part cuts it."""
    pieces = load(file).visible((40, 8, 4, 44), 0, 0, 2, 48)  # parts of 12 tokens, the rank has the first and the last
    found = {(row.start, queries.start, keys.start): whole for row, queries, keys, _, whole in pieces}
    ends = {(0, 0, 0): True, (0, 12, 0): False, (0, 12, 12): False, (0, 16, 16): False}
    begins = {(1, 0, 0): False, (1, 4, 4): False, (1, 12, 4): False, (1, 12, 12): True}
    assert found == ends | begins, "other pieces are whole parts"


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
