"""Each test must be able to fail: bugs put into the recipes, most of them one line, turn the recipe's test red.

Several were shipped by others. Losses under AdamW show none of those that only scale the gradient, which is why
equivalence.py compares gradients.
"""

from dataclasses import dataclass

import equivalence
import probes
import pytest
import schedules
import simulation
import witness
from launch import ROOT, RankFailed, launch, load
from test_lineage import TRAINING


@dataclass(frozen=True)
class Bug:
    """In a recipe, `old` becomes `new`; to be seen on `world` ranks with `flags`."""

    what: str
    recipe: str
    old: str
    new: str
    world: int = 1
    flags: str = ""


ROOT_RECIPE = "01_single_gpu/train.py"
ACCUMULATION = "01_single_gpu/gradient_accumulation.py"
FULL = "01_single_gpu/activation_checkpointing.py"
NAIVE, OVERLAP, BUCKETED = (f"02_data_parallel/{name}.py" for name in ("naive", "overlap", "bucketed"))
COALESCED, NO_SYNC, DILOCO = (f"02_data_parallel/{name}.py" for name in ("coalesced", "no_sync", "diloco"))
COPY_ENGINES = "02_data_parallel/copy_engines.py"
TORCH_DDP, ACCELERATE_DDP = "02_data_parallel/torch_ddp.py", "02_data_parallel/accelerate_ddp.py"
ZERO1, ZERO1_OVERLAP, ZERO2, ZERO3, HSDP, OFFLOAD = (
    f"03_zero/{name}.py" for name in ("zero1", "zero1_overlap", "zero2", "zero3", "hsdp", "offload")
)
COPY_ENGINES_3 = "03_zero/zero3_copy_engines.py"
TORCH_FSDP, ACCELERATE_FSDP = "03_zero/torch_fsdp.py", "03_zero/accelerate_fsdp.py"
TENSOR, VOCAB, SEQUENCE, ASYNC = (
    f"04_tensor_sequence/{name}.py"
    for name in ("tensor_parallel", "vocab_parallel", "sequence_parallel", "async_tensor_parallel")
)
TORCH_DTENSOR = "04_tensor_sequence/torch_dtensor.py"
NAIVE_PIPELINE, AFAB, ONE_F_ONE_B = (f"06_pipeline/{name}.py" for name in ("naive", "afab", "1f1b"))
MICRO = dict(flags="--microbatches 4")
SMALL_BUCKETS = dict(world=2, flags="--bucket_mb 0.05")
ACCUMULATED = dict(world=2, flags="--bucket_mb 0.05 --microbatches 3")
GROUPS = dict(world=4, flags="--shard 2 --microbatches 3")
REPLICAS = dict(world=4, flags="--heads 4 --kv_heads 2")  # two ranks hold a key head
PULL = (ROOT / ASYNC).read_text()
FROM_OWN_TOKENS = PULL[PULL.index("    room[rank][tp, : len(x)].copy_(x)") : PULL.index("  # in all (tp-1)/tp")]
PADDED = dict(world=2, flags="--vocab 259")
PIPELINE = dict(world=3, flags="--microbatches 4")

BUGS = [
    # the model and the step, in a recipe that is compared with the root
    Bug("attention sees the future", ACCUMULATION, "is_causal=True", "is_causal=False", **MICRO),
    Bug("a clip that does not act", ACCUMULATION, "model.parameters(), cfg.clip", "model.parameters(), 1e9", **MICRO),
    Bug("weight decay on norms", ACCUMULATION, "weight_decay=0.0", "weight_decay=cfg.weight_decay", **MICRO),
    Bug("the first token of a document is predicted", NAIVE, ".masked_fill(unrelated, IGNORE)", "", world=2),
    # gradient accumulation
    Bug(
        "each micro-batch divided by its own tokens",
        ACCUMULATION,
        "x, y) / tokens",
        "x, y) / (y != IGNORE).sum()",
        **MICRO,
    ),
    Bug("micro-batches not divided at all", ACCUMULATION, "x, y) / tokens", "x, y)", **MICRO),
    Bug(
        "gradients of all but the last lost",
        ACCUMULATION,
        "loss.backward()",
        "model.zero_grad(); loss.backward()",
        **MICRO,
    ),
    # checkpointing
    Bug("the checkpoint cuts the graph", FULL, "self.body, x, rope", "self.body, x.detach(), rope"),
    Bug(
        "the recomputation is not of the same function",
        FULL,
        "x = x + self.self_attn(",
        "x = x + (1 if torch._C._current_graph_task_id() == -1 else 2) * self.self_attn(",
    ),
    Bug(
        "the checkpoint cuts the graph",
        "01_single_gpu/selective_checkpointing.py",
        "self.body, x, rope",
        "self.body, x.detach(), rope",
    ),
    # data parallelism
    Bug("gradients never reduced", NAIVE, "dist.all_reduce(p.grad)", "pass", world=2),
    Bug("gradients averaged", NAIVE, "dist.all_reduce(p.grad)", "dist.all_reduce(p.grad.div_(dp))", world=2),
    Bug("all ranks train on the same part", NAIVE, "inputs.chunk(dp)[rank]", "inputs.chunk(dp)[0]", world=2),
    Bug(
        "each rank divides by its own tokens",
        NAIVE,
        "inputs, targets) / tokens",
        "inputs, targets) / (targets != IGNORE).sum()",
        world=2,
    ),
    Bug(
        "a hook that averages the weights instead of the gradients, once shipped by picotron",
        NAIVE,
        "        dist.all_reduce(p.grad)",
        "        dist.all_reduce(p.data.div_(dp))",
        world=2,
    ),
    Bug(
        "micro-batches accumulated but only the last one's gradient reduced, shipped by picotron_tutorial",
        NAIVE,
        "    loss.backward()\n",
        "    half, total = len(inputs) // 2, loss.detach()\n"
        "    (forward(cfg, model, inputs[:half], targets[:half]) / tokens).backward()\n"
        "    first = [p.grad.clone() for p in model.parameters()]\n"
        "    model.zero_grad()\n"
        "    (forward(cfg, model, inputs[half:], targets[half:]) / tokens).backward()\n"
        "    for p, g in zip(model.parameters(), first):\n"
        "        dist.all_reduce(p.grad)\n"
        "        p.grad += g\n"
        "    dist.all_reduce(total)\n"
        "    return total\n",
        world=2,
    ),
    Bug("a copy is reduced", OVERLAP, "all_reduce(p.grad, async", "all_reduce(p.grad.clone(), async", world=2),
    Bug("the last gradient is not reduced", OVERLAP, "< len(order) and", "< len(order) - 1 and", world=2),
    Bug("gradients are no views of their bucket", BUCKETED, "p.grad = part", "part", **SMALL_BUCKETS),
    Bug("the last bucket is not reduced", BUCKETED, "< len(buckets) and", "< len(buckets) - 1 and", **SMALL_BUCKETS),
    Bug("a bucket of one gradient is not reduced", BUCKETED, "grad.view(-1)", "grad.view(-1).clone()", **SMALL_BUCKETS),
    Bug(
        "one gradient of a list is left out",
        COALESCED,
        "[p.grad for p in bucket]",
        "[p.grad for p in bucket[1:] or bucket]",
        **SMALL_BUCKETS,
    ),
    Bug("copies are reduced", COALESCED, "[p.grad for", "[p.grad.clone() for", **SMALL_BUCKETS),
    Bug(
        "every micro-batch reduces all of the sum", NO_SYNC, "if i < cfg.microbatches - 1:", "if False:", **ACCUMULATED
    ),
    Bug("the first micro-batch reduces, not the last", NO_SYNC, "i < cfg.microbatches - 1", "i > 0", **ACCUMULATED),
    Bug("reduced without what was there before", NO_SYNC, "loss.backward()  #", "model.zero_grad()  #", **ACCUMULATED),
    Bug("the wrong shard is summed", COPY_ENGINES, "copy_(shards[r][rank])", "copy_(shards[r][r])", **SMALL_BUCKETS),
    Bug("sums are not copied back", COPY_ENGINES, "copy_(shards[r][r])", "copy_(shards[rank][r])", **SMALL_BUCKETS),
    Bug(
        "buckets overlap by one number",
        COPY_ENGINES,
        "flatten(buckets[i], flat[i])",
        "flatten(buckets[i], shared.buffers[dist.get_rank()][sum(shared.sizes[:i]) - (i > 0) :])",
        **SMALL_BUCKETS,
    ),
    Bug("an average of what is to be summed", TORCH_DDP, "(loss * dp).backward()", "loss.backward()", world=2),
    Bug("around the wrapper, which then never reduces", TORCH_DDP, "model(inputs)", "model.module(inputs)", world=2),
    Bug("an average of what is to be summed", ACCELERATE_DDP, "backward(loss * dp)", "backward(loss)", world=2),
    Bug("the loss of a part for the log", ACCELERATE_DDP, "    dist.all_reduce(loss)", "    pass", world=2),
    # ZeRO
    Bug(
        "gradients never reduced",
        ZERO1,
        "unit.dp._reduce_scatter_base(gradient, unit.gradients).wait()",
        "gradient.copy_(unit.gradients.chunk(unit.dp.size())[unit.dp.rank()])",
        world=2,
    ),
    Bug("gradients of the step before", ZERO1, "        unit.gradients.zero_()\n", "", world=2),
    Bug("weights are not gathered", ZERO1, "        gather(unit)\n", "", world=2),
    Bug("norm of the own shard alone", ZERO1, "dist.all_reduce(norm, group=model.dp)", "pass", world=2),
    Bug("every rank splits as the first does", ZERO1, "if p.ndim > 1) - dp.rank() * each", "if p.ndim > 1)", world=2),
    Bug(
        "nothing leaves a rank",
        ZERO1_OVERLAP,
        "        sending = dist.all_to_all_single(parts, flat, group=unit.dp, async_op=True)\n        sending.wait()\n",
        "        parts.copy_(flat.view_as(parts))\n        sending = dist.barrier(unit.dp, async_op=True)\n",
        world=2,
    ),
    Bug("sum without one rank", ZERO1_OVERLAP, "torch.sum(parts, 0,", "torch.sum(parts[1:], 0,", world=2),
    Bug("the shard of another rank", ZERO1_OVERLAP, "start = -dp.rank() * each", "start = -0 * each", world=2),
    Bug("norm of the own shard alone", ZERO1_OVERLAP, "dist.all_reduce(norm, group=model.dp)", "pass", world=2),
    Bug("weight decay on vectors", ZERO1_OVERLAP, "if p.ndim > 1) - dp", "if p.ndim > 0) - dp", world=2),
    Bug("weights of the first step", ZERO1_OVERLAP, "        unit.gathering = None  #", "        pass  #", world=2),
    Bug(
        "every micro-batch communicates, and the last one's gradient is all",
        ZERO1_OVERLAP,
        "model.requires_gradient_sync = i == cfg.microbatches - 1",
        "model.requires_gradient_sync = True",
        world=2,
    ),
    Bug(
        "what the first micro-batches have added up is forgotten",
        ZERO1_OVERLAP,
        "flat.copy_(unit.sums.add_(flat))",
        "flat.copy_(flat)",
        world=2,
    ),
    Bug("... is kept for the next step", ZERO1_OVERLAP, "        unit.sums = None\n", "", world=2),
    Bug("the sum of the last micro-batch", ZERO2, "first := unit.gradient is None", "first := True", world=2),
    Bug("a gradient that was sent is sent again", ZERO2, "        p.grad = None\n", "", world=2),
    Bug("the padding counts", ZERO2, "    padding.zero_()\n", "", world=5, flags="--batch 10"),
    Bug("the shard of another rank", ZERO2, "start = -dp.rank() * each", "start = -(dp.rank() ^ 1) * each", world=2),
    Bug("the shard of another rank", ZERO3, "start = -dp.rank() * each", "start = -(dp.rank() ^ 1) * each", world=2),
    Bug(
        "a part is not rounded",
        ZERO3,
        "[unit.dp.rank()].copy_(unit.shard)",
        "[unit.dp.rank()]; mine[1:].copy_(unit.shard[1:])",
        world=2,
    ),
    Bug("norm of the own shard alone", ZERO3, "dist.all_reduce(norm, group=model.dp)", "pass", world=2),
    Bug("replicas are never summed", HSDP, "        if last:", "        if False:", **GROUPS),
    Bug("replicas are summed with every micro-batch", HSDP, "        if last:", "        if True:", **GROUPS),
    Bug(
        "replicas are summed with the first",
        HSDP,
        "all_reduce = i == cfg.microbatches - 1",
        "all_reduce = i == 0",
        **GROUPS,
    ),
    Bug(
        "different shards are summed",
        HSDP,
        "dist.all_reduce(unit.gradient, group=unit.replicas)",
        "dist.all_reduce(unit.gradient, group=unit.dp)",
        **GROUPS,
    ),
    Bug(
        "every replica counts in the norm",
        HSDP,
        "(norm / model.units[0].replicas.size()).sqrt()",
        "norm.sqrt()",
        **GROUPS,
    ),
    Bug(
        "one replica alone in the norm, of its own shard",
        HSDP,
        "dist.all_reduce(norm, group=model.dp)",
        "pass",
        **GROUPS,
    ),
    Bug("gradients of micro-batches before are lost", OFFLOAD, "        if not first:", "        if False:", world=2),
    Bug("... of the step before are added", OFFLOAD, "        unit.norm = None\n", "", world=2),
    Bug("weights of the first step", OFFLOAD, "        unit.gathering = None  #", "        #", world=2),
    Bug(
        "a unit is left out of the norm",
        OFFLOAD,
        "for unit in model.units]).norm()",
        "for unit in model.units[1:]]).norm()",
        world=2,
    ),
    Bug("only short gradients are clipped", OFFLOAD, "norm + 1e-6 > cfg.clip", "norm + 1e-6 < cfg.clip", world=2),
    Bug(
        "every rank sums the same part",
        COPY_ENGINES_3,
        "memory[r].chunk(dp)[rank])",
        "memory[r].chunk(dp)[0])",
        world=2,
    ),
    Bug(
        "the last shard is not rounded",
        COPY_ENGINES_3,
        "].copy_(unit.shard)",
        "].copy_(unit.shard * (unit is not model.units[-1]))",
        world=2,
    ),
    Bug(
        "weights of the first step",
        COPY_ENGINES_3,
        "        unit.gradient = None\n    publish(model)\n",
        "        unit.gradient = None\n",
        world=2,
    ),
    Bug("norm of the own shard alone", COPY_ENGINES_3, "dist.all_reduce(norm, group=model.dp)", "pass", world=2),
    Bug("an average of what is to be summed", TORCH_FSDP, "unit.set_gradient_divide_factor(1.0)", "pass", world=2),
    Bug(
        "norm of the own slices alone",
        TORCH_FSDP,
        "nn.utils.clip_grad_norm_(model.parameters(), cfg.clip).full_tensor()",
        "nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])",
        world=2,
    ),
    Bug("all ranks begin with the first slice", TORCH_FSDP, "[dp.rank() * rows :]", "", world=2),
    Bug(
        "sums multiplied as wrappers that average need it",
        ACCELERATE_FSDP,
        "backward(loss)",
        "backward(loss * dp)",
        world=2,
    ),
    Bug(
        "a clip around the library",
        ACCELERATE_FSDP,
        "accelerator.clip_grad_norm_(model.parameters(), cfg.clip).full_tensor()",
        "nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])",
        world=2,
    ),
    # tensor and sequence parallelism
    Bug("outputs of the own heads alone", TENSOR, "        dist.all_reduce(x, group=tp)  #", "        #", world=2),
    Bug(
        "gradients of the own columns alone",
        TENSOR,
        "        dist.all_reduce(gradient, group=ctx.tp)  #",
        "        #",
        world=2,
    ),
    Bug(
        "the gradient of a sum is summed again",
        TENSOR,
        "        return x\n\n    @staticmethod\n    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:\n"
        "        return gradient, None",
        "        ctx.tp = tp\n"
        "        return x\n\n    @staticmethod\n    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:\n"
        "        return Leave.apply(gradient, ctx.tp), None",
        world=2,
    ),
    Bug("key heads that two ranks hold are not summed", TENSOR, "    sum_replicas(model)\n", "", **REPLICAS),
    Bug("... but by all ranks", TENSOR, "max(1, tp.size() // cfg.kv_heads)", "tp.size()", **REPLICAS),
    Bug("the wrong key heads", TENSOR, "[tp.rank() * parts // tp.size()]", "[tp.rank() % parts]", **REPLICAS),
    Bug("what all ranks hold counts tp times in the norm", TENSOR, "** 2 / ranks for", "** 2 for", world=2),
    Bug(
        "what two ranks hold counts twice",
        TENSOR,
        "** 2 / ranks for",
        "** 2 / (ranks if ranks > 2 else 1) for",
        **REPLICAS,
    ),
    Bug("norm of the own part alone", TENSOR, "    dist.all_reduce(norm, group=model.tp)  #", "    #", world=2),
    Bug("a part twice, and another never", TENSOR, "shards[:: tp.size() // parts]", "[shards[0]] * parts", world=2),
    Bug("the padding is in the softmax", VOCAB, "ids >= self.vocab, -torch.inf", "ids < 0, -torch.inf", **PADDED),
    Bug(
        "gathered logits in the loss of split ones, which the mask of the padding would hide",
        VOCAB,
        "        rows = self.wide(rows, ids)\n",
        "        rows = torch.cat(dist.nn.functional.all_gather(rows), 1)\n"
        "        ids = torch.arange(rows.shape[1]) + dist.get_rank() * rows.shape[1]\n",
        world=2,
    ),
    Bug(
        "each rank subtracts its own maximum",
        VOCAB,
        "        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.tp)  #",
        "        #",
        world=2,
    ),
    Bug(
        "vocabulary ids of the first rank everywhere",
        VOCAB,
        "device=rows.device) + self.tp.rank()",
        "device=rows.device) + 0",
        world=2,
    ),
    Bug("ids of others are not zero", VOCAB, ".masked_fill(~here[..., None], 0)", "", world=2),
    Bug(
        "the head's input has a gradient of the own vocabulary ids",
        VOCAB,
        "Enter.apply(self.model.norm(x), self.tp)",
        "self.model.norm(x)",
        world=2,
    ),
    Bug(
        "gradients of norms are not summed",
        SEQUENCE,
        "model.tp.allreduce_coalesced(replicated).wait()",
        "pass",
        world=2,
    ),
    Bug(
        "key heads that two ranks hold are not summed",
        SEQUENCE,
        "model.replicas.allreduce_coalesced(gradients).wait()",
        "pass",
        **REPLICAS,
    ),
    Bug(
        "gradients of all but the own tokens are lost",
        SEQUENCE,
        "gradient @ weight, ctx.tp)",
        "gradient @ weight / dist.get_world_size(), ctx.tp)",
        world=2,
    ),
    Bug(
        "the gradient is of the own tokens",
        SEQUENCE,
        "rows, gathered = gather_tokens(x, ctx.tp)  # overlaps",
        "rows, gathered = gather_tokens(x * 0 + x.mean(), ctx.tp)  # overlaps",
        world=2,
    ),
    Bug("what all ranks hold counts tp times in the norm", SEQUENCE, "** 2 / ranks for", "** 2 for", world=2),
    Bug(
        "tokens of the first rank twice",
        ASYNC,
        "rows[r].copy_(room[r][tp, : len(x)])",
        "rows[r].copy_(room[(r + 1) % tp][tp, : len(x)])",
        world=3,
        flags="--kv_heads 3 --ffn 96",
    ),
    Bug(
        "products for another rank",
        ASYNC,
        "room[r][rank, :tokens].copy_(leaving[r])",
        "room[r][rank, :tokens].copy_(leaving[r - 1])",
        world=3,
        flags="--kv_heads 3 --ffn 96",
    ),
    Bug(
        "the own tokens are left out of the weights' gradient",
        ASYNC,
        "        rows[rank].copy_(x)\n",
        "        rows[rank].zero_()\n",
        world=2,
    ),
    Bug(
        "gradients of norms are not summed",
        ASYNC,
        "model.tp.allreduce_coalesced(replicated).wait()",
        "pass",
        world=2,
    ),
    Bug(
        "norms learn from the own tokens alone",
        TORCH_DTENSOR,
        "        if p.grad.placements != p.placements:\n",
        "        if p.ndim == 1:\n"
        "            p.grad = type(p.grad).from_local(p.grad.to_local(), p.device_mesh, p.placements)\n"
        "        if p.grad.placements != p.placements:\n",
        world=2,
    ),
    Bug(
        "norm of the own parts alone",
        TORCH_DTENSOR,
        "nn.utils.clip_grad_norm_(model.parameters(), cfg.clip).full_tensor()",
        "nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])",
        world=2,
    ),
    Bug(
        "all ranks begin with the first part",
        TORCH_DTENSOR,
        "p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None))",
        "p.to_local().copy_(full[tuple(slice(n) for n in p.to_local().shape)])",
        world=2,
    ),
    Bug(
        "an average, as if each rank had its own sequences",
        TORCH_DTENSOR,
        "        loss.backward()",
        "        (loss / dist.get_world_size()).backward()",
        world=2,
    ),
    Bug("one room for all operations", ASYNC, "Shared(tp, rooms,", "Shared(tp, [rooms[0]] * 2,", world=2),
    # pipelines
    Bug(
        "the loss is divided for the log and not for backward, shipped by picotron",
        AFAB,
        "                output = output / tokens\n                total += output.detach()\n",
        "                total += output.detach() / tokens\n",
        **PIPELINE,
    ),
    Bug(
        "the same in 1F1B, with the micro-batches as the only divisor",
        ONE_F_ONE_B,
        "                output = output / tokens\n                total += output.detach()\n",
        "                total += output.detach() / tokens\n                output = output / (tokens / 4)\n",
        **PIPELINE,
    ),
    Bug(
        "each stage sends back what has come to it",
        NAIVE_PIPELINE,
        'send(model, "B", x.grad)',
        'send(model, "B", x.detach() if arrived is None else arrived)',
        world=3,
    ),
    Bug("norm of the own stage alone", NAIVE_PIPELINE, "dist.all_reduce(norm, group=model.pp)", "pass", world=3),
    Bug(
        "the loss of the log is not divided",
        NAIVE_PIPELINE,
        "total += output.detach()",
        "total += output.detach() * tokens",
        world=3,
    ),
    Bug("norm of the own stage alone", AFAB, "dist.all_reduce(norm, group=model.pp)", "pass", **PIPELINE),
    Bug(
        "one stage goes backward in another order",
        AFAB,
        "alive.pop(i)",
        "alive.pop(i ^ (model.stage == 1))",
        **PIPELINE,
    ),
    Bug(
        "other rotary angles on later stages", AFAB, "torch.arange(x.", "(1 + self.stage) * torch.arange(x.", **PIPELINE
    ),
    Bug(
        "gradients of all but the last lost",
        AFAB,
        "output.backward(",
        "model.zero_grad(); output.backward(",
        **PIPELINE,
    ),
    Bug("targets of another micro-batch", ONE_F_ONE_B, "targets[i])", "targets[i - 1])", **PIPELINE),
]

ORDER_BUGS = [  # seen where reductions happen at once, or late, and gradients come in a compiled block's order
    Bug(
        "one is reduced before it is there", OVERLAP, "order[len(reductions)] in ready", "len(ready) > len(reductions)"
    ),
    Bug(
        "a bucket is reduced before it is full",
        BUCKETED,
        "not missing[len(reductions)]",
        "len(missing[len(reductions)]) < len(buckets[len(reductions)])",
        flags="--bucket_mb 0.05",
    ),
    Bug("only the first is waited for", OVERLAP, "in reductions:", "in reductions[:1]:"),
    Bug("the last is not waited for", COALESCED, "in reductions:", "in reductions[:-1]:", flags="--bucket_mb 0.05"),
]

WEIGHTS_WAIT = "    model.units[i].gathering.wait()  # on GPUs the stream waits, not this process\n"
LAST_WAIT = "torch.cuda.current_stream().wait_stream(model.stream)"
BESIDE = dict(recipe=COPY_ENGINES_3, world=2)
LATE_BUGS = [  # seen where side streams and collectives are as late as they may be
    Bug("a unit does not wait for its weights", ZERO1_OVERLAP, WEIGHTS_WAIT, "", world=2),
    Bug("the last sum is not waited for", ZERO1_OVERLAP, LAST_WAIT, "pass", world=2),
    Bug("the last sum is not waited for", ZERO2, LAST_WAIT, "pass", world=2),
    Bug("a sum of what has not come", ZERO2, "        sending.wait()\n", "", world=2),
    Bug("a unit does not wait for its weights", ZERO3, WEIGHTS_WAIT, "", world=2),
    Bug("... in backward", ZERO3, "        model.units[i - 1].gathering.wait()\n", "        pass\n", world=2),
    Bug("the sum over replicas is not waited for", HSDP, LAST_WAIT, "pass", **GROUPS),
    Bug("a unit does not wait for its weights", OFFLOAD, WEIGHTS_WAIT, "", world=2),
    Bug("a unit does not wait for its weights", old="    wait(model.gathers)\n    for", new="    for", **BESIDE),
    Bug("... in backward", old="        wait(model.gathers)\n    free", new="        pass\n    free", **BESIDE),
    Bug(
        "gradients are overwritten before all have copied them",
        old="    wait(model.stream)  # all ranks have copied the gradients of the unit before, which were here\n",
        new="",
        **BESIDE,
    ),
    Bug(
        "the last sum is not waited for",
        old="  # backward ends here\n        wait(model.stream)",
        new="\n        pass",
        **BESIDE,
    ),
    Bug(
        "gradients are multiplied before they are there",
        SEQUENCE,
        "gathered.wait()  # everyone waits\n        return rows @ weight, rows",
        "return rows @ weight, rows",
        world=2,
    ),
    Bug(
        "... in the gradient of the weights",
        SEQUENCE,
        "        gathered.wait()\n        gradient",
        "        gradient",
        world=2,
    ),
    Bug(
        "a sum that is not there",
        SEQUENCE,
        "        scattered.wait()\n        return x, gradient",
        "        return x, gradient",
        world=2,
    ),
    Bug(
        "tokens are multiplied before they have come",
        ASYNC,
        "        shared.device.current_stream().wait_event(arrival)\n        if r",
        "        if r",
        world=2,
    ),
    Bug(
        "... in the gradient of the weights",
        ASYNC,
        "            shared.device.current_stream().wait_event(arrival)\n",
        "            pass\n",
        world=2,
    ),
    Bug(
        "sums before all parts have come",
        ASYNC,
        "        shared.device.current_stream().wait_event(arrived)\n        return shared.total(parts), ",
        "        return shared.total(parts), ",
        world=2,
    ),
    Bug(
        "one place for tokens and for the own part of a sum, which the others may still read",
        ASYNC,
        FROM_OWN_TOKENS,
        FROM_OWN_TOKENS.replace("[tp,", "[rank,", 1).replace("room[r][tp,", "room[r][r,"),
        world=4,
        flags="--heads 4 --kv_heads 2",
    ),
]

FREED_BUGS = [  # seen because weights are read that have no memory, which ends the process
    Bug("another block is gathered for backward", ZERO3, "gather(model.units[i - 2]", "gather(model.units[i]", world=2),
    Bug("nothing is gathered for backward", ZERO3, "    if i > 2:", "    if False:", world=2),
    Bug("the last block is not kept", ZERO3, "if i < len(model.units) - 2:", "if i < len(model.units) - 1:", world=2),
]
HELD_BUGS = [  # seen by counting the units that have memory
    Bug("the embedding is kept", ZERO3, "        after_forward(self, 0)\n", ""),
    Bug("blocks are kept", ZERO3, "if i < len(model.units) - 2:", "if i < 1:"),
    Bug("... in backward", ZERO3, "    free(model.units[i])\n    reduce", "    reduce"),
    Bug("gathered one too early", ZERO3, "model.units[i : i + 2]", "model.units[i : i + 3]"),
    Bug(
        "gathered before the block after it is freed",
        ZERO3,
        "    free(model.units[i])\n    reduce",
        "    gather(model.units[max(1, i - 2)], model.gathers)\n    free(model.units[i])\n    reduce",
    ),
    Bug("the embedding is kept", COPY_ENGINES_3, "        after_forward(self, 0)\n", ""),
]

DILOCO_BUGS = [  # seen by comparison with a simulation of the workers
    Bug("the way there for the way back", DILOCO, "(old - p)", "(p - old)"),
    Bug("a sum of the workers", DILOCO, "(old - p) / dist.get_world_size()", "(old - p)"),
    Bug("plain momentum", DILOCO, "nesterov=cfg.outer_momentum > 0", "nesterov=False"),
    Bug("workers stay where they are", DILOCO, "        p.copy_(old)", "        pass"),
    Bug(
        "inner moments forgotten",
        DILOCO,
        "(model, outer)\n",
        "(model, outer); optimizer = make_optimizer(cfg, model)\n",
    ),
    Bug("own tokens", DILOCO, "inputs, targets) / tokens", "inputs, targets) / (targets != IGNORE).sum()"),
    Bug("no outer step at the end", DILOCO, " or step + 1 == cfg.steps", ""),
    Bug("one step late", DILOCO, "(step + 1) % cfg.inner_steps == 0", "step % cfg.inner_steps == 0"),
]

ROOT_BUGS = [  # what all recipes inherit: seen by comparison with transformers
    Bug("attention sees the future", ROOT_RECIPE, "is_causal=True", "is_causal=False"),
    Bug("query heads share the wrong key heads", ROOT_RECIPE, "(q, k, v, is", "(q, k.flip(1), v.flip(1), is"),
    Bug("rotation the other way", ROOT_RECIPE, "(-high, low)", "(high, -low)"),
    Bug("rotation of neighbours instead of halves", ROOT_RECIPE, "x.chunk(2, dim=-1)", "x[..., ::2], x[..., 1::2]"),
    Bug("another base", ROOT_RECIPE, "cfg.theta **", "(cfg.theta + 1) **"),
    Bug("no stretching", ROOT_RECIPE, "(1 - keep) / cfg.rope_factor", "(1 - keep)"),
    Bug("another epsilon", ROOT_RECIPE, "+ 1e-5)", "+ 1e-6)"),
    Bug("a mean instead of a mean square", ROOT_RECIPE, "wide.square().mean(-1", "wide.mean(-1"),
    Bug(
        "gate and up exchanged",
        ROOT_RECIPE,
        "silu(self.gate_proj(x)) * self.up_proj(x)",
        "silu(self.up_proj(x)) * self.gate_proj(x)",
    ),
    Bug("no final norm", ROOT_RECIPE, "self.lm_head(self.model.norm(x))", "self.lm_head(x)"),
    Bug(
        "the second norm is the first",
        ROOT_RECIPE,
        "self.mlp(self.post_attention_layernorm(x))",
        "self.mlp(self.input_layernorm(x))",
    ),
    Bug("loss summed, not averaged", ROOT_RECIPE, "inputs, targets) / tokens", "inputs, targets)"),
    Bug("loss averaged over ignored tokens too", ROOT_RECIPE, "(targets != IGNORE).sum()", "targets.numel()"),
    Bug("norm of another power", ROOT_RECIPE, "parameters(), cfg.clip)", "parameters(), cfg.clip, 3)"),
    Bug(
        "weights of --init ignored",
        ROOT_RECIPE,
        "    if cfg.init:\n        return",
        "    if cfg.init and len(shape) > 1:\n        return",
    ),
]


def mutate(bug: Bug, folder) -> str:
    """Write the recipe with the bug into a folder, and return its path."""
    source = (ROOT / bug.recipe).read_text()
    assert source.count(bug.old) == 1, f"{bug.recipe} must contain {bug.old!r} once"
    path = folder / bug.recipe.split("/")[1]
    path.write_text(source.replace(bug.old, bug.new))
    return str(path)


@pytest.mark.parametrize("bug", BUGS, ids=[f"{bug.recipe}: {bug.what}" for bug in BUGS])
def test_equivalence_sees(bug, tmp_path):
    with pytest.raises(AssertionError, match="is off by"):
        equivalence.check(mutate(bug, tmp_path), bug.world, bug.flags, root=ROOT_RECIPE)


@pytest.mark.parametrize("bug", ORDER_BUGS, ids=[bug.what for bug in ORDER_BUGS])
def test_equivalence_sees_order(bug, tmp_path):
    when = "late" if "waited" in bug.what else "at once"
    probe = probes.together(equivalence.unfused_attention, probes.reductions(when))
    with pytest.raises(AssertionError, match="is off by"):
        equivalence.check(mutate(bug, tmp_path), 2, f"{bug.flags} --compile", ROOT_RECIPE, probe)


@pytest.mark.parametrize("bug", LATE_BUGS, ids=[f"{bug.recipe}: {bug.what}" for bug in LATE_BUGS])
def test_equivalence_sees_what_is_late(bug, tmp_path):
    with pytest.raises((AssertionError, RankFailed), match="is off by|exit code -11"):
        equivalence.check(mutate(bug, tmp_path), bug.world, bug.flags, ROOT_RECIPE, probes.streams("late"))


@pytest.mark.parametrize("bug", FREED_BUGS, ids=[bug.what for bug in FREED_BUGS])
def test_equivalence_sees_what_is_freed(bug, tmp_path):
    with pytest.raises(RankFailed, match="storage of size 0|has no attribute 'wait'"):
        equivalence.check(mutate(bug, tmp_path), bug.world, bug.flags, root=ROOT_RECIPE)


@pytest.mark.parametrize("bug", HELD_BUGS, ids=[f"{bug.recipe}: {bug.what}" for bug in HELD_BUGS])
def test_count_of_units_sees(bug, tmp_path):
    flags = "--device cpu --layers 4 --dim 32 --heads 4 --kv_heads 2 --ffn 48 --seq 16 --batch 8 --steps 2"
    run = launch(mutate(bug, tmp_path), 2, flags, probe=probes.gathered_at_a_time)
    assert run.probes != [[2, 1, 0]] * 2


def test_the_log_does_not_see_the_scale(tmp_path):
    """picotron's bug: gradients as many times too large as there are tokens, and the loss of step 1 is right."""
    bug = next(bug for bug in BUGS if "divided for the log" in bug.what)
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} {equivalence.GRADIENT}"
    right = launch(bug.recipe, bug.world, f"{flags} {bug.flags}").history[0]
    wrong = launch(mutate(bug, tmp_path), bug.world, f"{flags} {bug.flags}").history[0]
    assert abs(wrong[0] / right[0] - 1) < 1e-14 and wrong[1] > 100 * right[1]


@pytest.mark.parametrize("ahead", ["stages - stage", "stages - 2 - stage", "microbatches", "0", "stage"])
def test_schedule_sees(ahead, tmp_path):
    """Any other number of forwards before the first backward costs time, memory or everything."""
    bug = Bug("", ONE_F_ONE_B, "stages - 1 - stage", ahead)
    with pytest.raises((AssertionError, schedules.Deadlock)):
        schedules.check(load(mutate(bug, tmp_path)), schedules.FLIGHT[ONE_F_ONE_B], range(4, 5), [8])


@pytest.mark.parametrize("bug", DILOCO_BUGS, ids=[bug.what for bug in DILOCO_BUGS])
def test_simulation_sees(bug, tmp_path):
    with pytest.raises(AssertionError, match="is off by"):
        simulation.check(mutate(bug, tmp_path))


@pytest.mark.parametrize("bug", ROOT_BUGS, ids=[bug.what for bug in ROOT_BUGS])
def test_transformers_sees(bug, tmp_path):
    with pytest.raises(AssertionError, match="is off by|names or shapes"):
        witness.check(mutate(bug, tmp_path), "--theta 10000 --rope_factor 32 --seq 512 --batch 2")


def test_every_recipe_has_its_bug():
    assert {bug.recipe for bug in [*BUGS, *DILOCO_BUGS, *ROOT_BUGS]} == set(TRAINING)
