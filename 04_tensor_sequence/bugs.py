"""Bugs that the tests of this folder see: what becomes what, on how many ranks, and what sees it."""

from mutation import Bug

ASYNC = "04_tensor_sequence/async_tensor_parallel.py"
SEQUENCE = "04_tensor_sequence/sequence_parallel.py"
TENSOR = "04_tensor_sequence/tensor_parallel.py"
TORCH_DTENSOR = "04_tensor_sequence/torch_dtensor.py"
VOCAB = "04_tensor_sequence/vocab_parallel.py"

BUGS = [
    Bug(
        "row-parallel outputs are not all-reduced: each rank keeps its partial sum",
        TENSOR,
        "        dist.all_reduce(x, group=tp)  #",
        "        #",
        world=2,
    ),
    Bug(
        "gradients of column-parallel inputs are not all-reduced in backward",
        TENSOR,
        "        dist.all_reduce(gradient, group=ctx.tp)  #",
        "        #",
        world=2,
    ),
    Bug(
        "the gradient of an all-reduced output is all-reduced again in backward",
        TENSOR,
        (
            "        return x\n"
            "\n"
            "    @staticmethod\n"
            "    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:\n"
            "        return gradient, None"
        ),
        (
            "        ctx.tp = tp\n"
            "        return x\n"
            "\n"
            "    @staticmethod\n"
            "    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:\n"
            "        return Leave.apply(gradient, ctx.tp), None"
        ),
        world=2,
    ),
    Bug(
        "gradients of key and value heads that several ranks hold are not summed",
        TENSOR,
        "    sum_replicas(model)\n",
        "",
        world=4,
        flags="--heads 4 --kv_heads 2",
    ),
    Bug(
        "gradients of replicated key and value heads are summed over all ranks",
        TENSOR,
        "max(1, tp.size() // cfg.kv_heads)",
        "tp.size()",
        world=4,
        flags="--heads 4 --kv_heads 2",
    ),
    Bug(
        "shared key and value heads are assigned to ranks round-robin instead of to neighbours",
        TENSOR,
        "[tp.rank() * parts // tp.size()]",
        "[tp.rank() % parts]",
        world=4,
        flags="--heads 4 --kv_heads 2",
    ),
    Bug("replicated tensors count once per rank in the gradient norm", TENSOR, "** 2 / ranks for", "** 2 for", world=2),
    Bug(
        "tensors held by two ranks count twice in the gradient norm",
        TENSOR,
        "** 2 / ranks for",
        "** 2 / (ranks if ranks > 2 else 1) for",
        world=4,
        flags="--heads 4 --kv_heads 2",
    ),
    Bug(
        "the gradient norm covers this rank's shard alone, without an all-reduce",
        TENSOR,
        "    dist.all_reduce(norm, group=model.tp)  #",
        "    #",
        world=2,
    ),
    Bug(
        "the saved weights repeat rank 0's shard instead of joining all shards",
        TENSOR,
        "shards[:: tp.size() // parts]",
        "[shards[0]] * parts",
        world=2,
    ),
    Bug(
        "the all-reduced output is stored on ctx (a reference cycle keeps it until garbage collection)",
        TENSOR,
        "        x = x.clone(memory_format=torch.contiguous_format)",
        "        ctx.sum = x = x.clone(memory_format=torch.contiguous_format)",
        world=2,
        seen="run",
    ),
    Bug(
        "the all-reduce of replicated key and value head gradients is not waited for",
        TENSOR,
        "model.replicas.allreduce_coalesced(gradients).wait()",
        "model.replicas.allreduce_coalesced(gradients)",
        world=4,
        flags="--heads 4 --kv_heads 2",
        seen="gradient",
    ),
    Bug(
        "padding rows of the vocabulary are not masked out of the softmax",
        VOCAB,
        "ids >= self.vocab, -torch.inf",
        "ids < 0, -torch.inf",
        world=2,
        flags="--vocab 259",
    ),
    Bug(
        "exponentials of gathered logits are all-reduced as if they were split",
        VOCAB,
        "        rows = self.wide(rows, ids)\n",
        (
            "        rows = torch.cat(dist.nn.functional.all_gather(rows), 1)\n"
            "        ids = torch.arange(rows.shape[1]) + dist.get_rank() * rows.shape[1]\n"
        ),
        world=2,
    ),
    Bug(
        "each rank subtracts its own largest logit, without an all-reduce of the maximum",
        VOCAB,
        "        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.tp)  #",
        "        #",
        world=2,
    ),
    Bug(
        "all ranks number their vocabulary ids from 0 in the loss",
        VOCAB,
        "device=rows.device) + self.tp.rank()",
        "device=rows.device) + 0",
        world=2,
    ),
    Bug(
        "embeddings of ids on other ranks are not zeroed before the all-reduce",
        VOCAB,
        ".masked_fill(~here[..., None], 0)",
        "",
        world=2,
    ),
    Bug(
        "the gradient of the head's input is not all-reduced over the vocabulary shards",
        VOCAB,
        "Enter.apply(self.model.norm(x), self.tp)",
        "self.model.norm(x)",
        world=2,
    ),
    Bug(
        "the largest logit is not subtracted before exp (fp32 overflows above 88)",
        VOCAB,
        "top = self.wide(rows.detach(), ids).amax(1)",
        "top = torch.zeros(len(rows), device=rows.device)",
        world=2,
        seen="large_values",
    ),
    Bug(
        "fewer key heads than ranks are refused, although ranks can share them",
        VOCAB,
        "(cfg.kv_heads % tp and tp % cfg.kv_heads, ",
        "(cfg.kv_heads % tp, ",
        world=4,
        flags="--heads 4 --kv_heads 2",
        seen="valid_input",
    ),
    Bug(
        "gradients of the norm weights are not summed over the ranks",
        SEQUENCE,
        "model.tp.allreduce_coalesced(replicated).wait()",
        "pass",
        world=2,
    ),
    Bug(
        "gradients of key and value heads that several ranks hold are not summed",
        SEQUENCE,
        "model.replicas.allreduce_coalesced(gradients).wait()",
        "pass",
        world=4,
        flags="--heads 4 --kv_heads 2",
    ),
    Bug(
        "input gradients of column-parallel layers are averaged over the ranks instead of summed",
        SEQUENCE,
        "gradient @ weight, ctx.tp)",
        "gradient @ weight / dist.get_world_size(), ctx.tp)",
        world=2,
    ),
    Bug(
        "backward gathers each rank's mean activation instead of its tokens",
        SEQUENCE,
        "rows, gathered = gather_tokens(x, ctx.tp)  # overlaps",
        "rows, gathered = gather_tokens(x * 0 + x.mean(), ctx.tp)  # overlaps",
        world=2,
    ),
    Bug(
        "replicated tensors count once per rank in the gradient norm", SEQUENCE, "** 2 / ranks for", "** 2 for", world=2
    ),
    Bug(
        "the backward of row-parallel layers does not wait for the gathered gradients",
        SEQUENCE,
        "gathered.wait()  # everyone waits\n        return rows @ weight, rows",
        "return rows @ weight, rows",
        world=2,
        seen="late",
    ),
    Bug(
        "the weight gradient of column-parallel layers does not wait for the gathered tokens",
        SEQUENCE,
        "        gathered.wait()\n        gradient",
        "        gradient",
        world=2,
        seen="late",
    ),
    Bug(
        "a column-parallel input gradient is returned before its reduce-scatter is done",
        SEQUENCE,
        "        scattered.wait()\n        return x, gradient",
        "        return x, gradient",
        world=2,
        seen="late",
    ),
    Bug(
        "the ranks' largest logits are summed instead of maximised (logits near 30 underflow on four ranks)",
        SEQUENCE,
        "dist.all_reduce(top, dist.ReduceOp.MAX, group=self.tp)",
        "dist.all_reduce(top, group=self.tp)",
        world=4,
        flags="--heads 4 --kv_heads 2",
        seen="large_values",
    ),
    Bug(
        "each rank's tokens are copied from the next rank's buffer",
        ASYNC,
        "rows[r].copy_(room[r][tp, : len(x)])",
        "rows[r].copy_(room[(r + 1) % tp][tp, : len(x)])",
        world=3,
        flags="--kv_heads 3 --ffn 96",
    ),
    Bug(
        "each rank receives the products meant for the rank before it",
        ASYNC,
        "room[r][rank, :tokens].copy_(leaving[r])",
        "room[r][rank, :tokens].copy_(leaving[r - 1])",
        world=3,
        flags="--kv_heads 3 --ffn 96",
    ),
    Bug(
        "a rank's own tokens are zeroed in its weight gradient",
        ASYNC,
        "        rows[rank].copy_(x)\n",
        "        rows[rank].zero_()\n",
        world=2,
    ),
    Bug(
        "gradients of the norm weights are not summed over the ranks",
        ASYNC,
        "model.tp.allreduce_coalesced(replicated).wait()",
        "pass",
        world=2,
    ),
    Bug(
        "all operations use one shared buffer instead of alternating between two",
        ASYNC,
        "Shared(tp, rooms,",
        "Shared(tp, [rooms[0]] * 2,",
        world=2,
    ),
    Bug(
        "matmuls do not wait for the arrival of the other ranks' tokens",
        ASYNC,
        "        shared.device.current_stream().wait_event(arrival)\n        if r",
        "        if r",
        world=2,
        seen="late",
    ),
    Bug(
        "the weight gradient of column-parallel layers does not wait for the gathered tokens",
        ASYNC,
        "            shared.device.current_stream().wait_event(arrival)\n",
        "            pass\n",
        world=2,
        seen="late",
    ),
    Bug(
        "the column-parallel input gradient is summed before all ranks' parts have arrived",
        ASYNC,
        ("        shared.device.current_stream().wait_event(arrived)\n        return shared.total(parts), "),
        "        return shared.total(parts), ",
        world=2,
        seen="late",
    ),
    Bug(
        "a rank's tokens and partial sum share one buffer slot that others may read",
        ASYNC,
        (
            "    room[rank][tp, : len(x)].copy_(x)\n"
            "    shared.stream.wait_stream(shared.device.current_stream())\n"
            "    with shared.device.stream(shared.stream):\n"
            "        shared.barrier()  # all have put theirs into their rooms\n"
            "        for r in [(rank + i) % tp for i in range(1, tp)]:  # each rank begins with another one\n"
            "            rows[r].copy_(room[r][tp, : len(x)])"
        ),
        (
            "    room[rank][rank, : len(x)].copy_(x)\n"
            "    shared.stream.wait_stream(shared.device.current_stream())\n"
            "    with shared.device.stream(shared.stream):\n"
            "        shared.barrier()  # all have put theirs into their rooms\n"
            "        for r in [(rank + i) % tp for i in range(1, tp)]:  # each rank begins with another one\n"
            "            rows[r].copy_(room[r][r, : len(x)])"
        ),
        world=4,
        flags="--heads 4 --kv_heads 2",
        seen="late",
    ),
    Bug(
        "the largest logit of all tokens is subtracted instead of each token's own (underflow to log 0)",
        ASYNC,
        "top = self.wide(rows.detach(), ids).amax(1)",
        "top = self.wide(rows.detach(), ids).amax().repeat(len(rows))",
        world=2,
        seen="large_values",
    ),
    Bug(
        "partial sums are rounded to bf16 after every addition instead of once",
        ASYNC,
        "return parts.sum(0, dtype=parts.dtype)  # without dtype, autocast on GPUs would return fp32",
        "return sum(parts.unbind())",
        world=4,
        flags="--dtype bfloat16 --heads 4 --kv_heads 2",
        seen="partial_sums",
    ),
    Bug(
        "gathers always use one buffer and overwrite tokens that a slower rank still copies",
        ASYNC,
        "room, rows, arrivals = shared.rooms[shared.turn], x.new_empty(tp, *x.shape), {}",
        "room, rows, arrivals = shared.rooms[0], x.new_empty(tp, *x.shape), {}",
        world=2,
        seen="late",
    ),
    Bug(
        "gradients of the norm weights are not summed over the ranks",
        TORCH_DTENSOR,
        "        if p.grad.placements != p.placements:\n",
        (
            "        if p.ndim == 1:\n"
            "            p.grad = type(p.grad).from_local(p.grad.to_local(), p.device_mesh, p.placements)\n"
            "        if p.grad.placements != p.placements:\n"
        ),
        world=2,
    ),
    Bug(
        "the gradient norm covers this rank's shards alone, and nothing is clipped",
        TORCH_DTENSOR,
        "nn.utils.clip_grad_norm_(model.parameters(), cfg.clip).full_tensor()",
        "nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])",
        world=2,
    ),
    Bug(
        "every rank loads the first rank's shard of each initial tensor",
        TORCH_DTENSOR,
        "p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None))",
        "p.to_local().copy_(full[tuple(slice(n) for n in p.to_local().shape)])",
        world=2,
    ),
    Bug(
        "the loss is divided by tp, as if each rank had its own sequences",
        TORCH_DTENSOR,
        "        loss.backward()",
        "        (loss / dist.get_world_size()).backward()",
        world=2,
    ),
]
