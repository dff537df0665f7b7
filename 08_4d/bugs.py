"""Bugs that the tests of this folder see: what becomes what, on how many ranks, and what sees it."""

from equivalence import mesh
from mutation import Bug

TRAIN = "08_4d/train.py"
CHECKPOINT = "08_4d/checkpoint.py"
ALONE = "--dp 1 --cp 1 --tp 1 --pp 1 --microbatches 2 --vocab 259"  # one rank
FIVE = "08_4d/moe.py"
EXPERTS_ON_TP = "--dp 2 --cp 1 --tp 2 --pp 1 --ep 2 --microbatches 2 --layers 3"
COPIES = "--dp 2 --cp 2 --tp 1 --pp 1 --ep 2 --microbatches 2 --layers 3"
EXPERTS_IN_STAGES = "--dp 1 --cp 2 --tp 1 --pp 2 --ep 2 --microbatches 4 --layers 3"

BUGS = [
    # what is summed over whom
    Bug(
        "gradients of the norm weights are not summed over tp, whose ranks have other tokens (in a draft of gpt-neox)",
        TRAIN,
        "for group in (model.replicas, model.tp)}",
        "for group in (model.replicas,)}",
        world=2,
        flags=mesh(1, 1, 2, 1),
    ),
    Bug(
        "gradients of the norm weights are averaged over tp instead of summed (in a draft of gpt-neox)",
        TRAIN,
        "group.allreduce_coalesced(gradients).wait()",
        "group.allreduce_coalesced(gradients).wait(), [part.div_(ranks) for part in gradients]",
        world=2,
        flags=mesh(1, 1, 2, 1),
    ),
    Bug(
        "gradients of key heads that several ranks of tp hold are not summed",
        TRAIN,
        "for group in (model.replicas, model.tp)}",
        "for group in (model.tp,)}",
        world=4,
        flags=mesh(1, 1, 4, 1),
    ),
    Bug(
        "the replicas of a key head are taken for every other rank of tp instead of neighbours",
        TRAIN,
        '"pp dp cp (kv r) -> (pp dp cp kv) r"',
        '"pp dp cp (r kv) -> (pp dp cp kv) r"',
        world=4,
        flags=mesh(1, 1, 4, 1),
    ),
    Bug(
        "every rank of ZeRO looks for key heads where the first rank's shard has them, to sum them over tp",
        TRAIN,
        "start = -unit.dp.rank() * len(unit.shard)",
        "start = -0 * len(unit.shard)",
        world=4,
        flags=f"{mesh(2, 1, 2, 1)} --kv_heads 1",
    ),
    Bug(
        "ZeRO sums gradients over dp alone: ranks of cp, too, have tokens of their own",
        TRAIN,
        "initial, model.dp_cp, cfg.device",
        "initial, model.dp, cfg.device",
        world=2,
        flags=mesh(1, 2, 1, 1),
    ),
    Bug(
        "gradients are averaged over dp and cp, although losses are divided by the tokens of the whole batch",
        TRAIN,
        "torch.sum(parts, 0,",
        "torch.mean(parts, 0,",
        world=2,
        flags=mesh(1, 2, 1, 1),
    ),
    # who has which tokens
    Bug(
        "sequences are given out by the number of a rank among all, so ranks of tp differ (once shipped by DeepSpeed)",
        TRAIN,
        "rank, held = model.dp.rank(), shard(cfg, model.cp)",
        "rank, held = dist.get_rank() % cfg.dp, shard(cfg, model.cp)",
        world=4,
        flags=mesh(2, 1, 2, 1),
    ),
    Bug(
        "sequences are given out as if pp came before dp: the last stage has other sequences' targets",
        TRAIN,
        "rank, held = model.dp.rank(), shard(cfg, model.cp)",
        "rank, held = dist.get_rank() // (cfg.tp * cfg.cp * cfg.pp) % cfg.dp, shard(cfg, model.cp)",
        world=4,
        flags=mesh(2, 1, 1, 2),
    ),
    Bug(
        "sequences are split over dp and cp, as ZeRO's shards are, and then cut once more along cp",
        TRAIN,
        "(x.chunk(cfg.dp)[rank].to",
        "(x.chunk(cfg.dp * cfg.cp)[model.dp_cp.rank()].to",
        world=2,
        flags=mesh(1, 2, 1, 1),
    ),
    Bug(
        "inputs are cut in zigzag, targets into contiguous parts",
        TRAIN,
        "[:, held] for x in (inputs, targets))",
        "[:, at] for x, at in ((inputs, held), (targets, held.sort()[0] // 2 + cfg.seq // 2 * model.cp.rank())))",
        world=2,
        flags=mesh(1, 2, 1, 1),
    ),
    Bug(
        "stages after the first count rotary positions from 0, as if their tokens were contiguous",
        TRAIN,
        "rope_table(self.cfg, shard(self.cfg, self.cp))",
        (
            "rope_table(self.cfg, shard(self.cfg, self.cp) if self.stage == 0 "
            "else torch.arange(self.cfg.seq // self.cp.size(), device=x.device))"
        ),
        world=4,
        flags=mesh(1, 2, 1, 2),
    ),
    # by what the loss is divided
    Bug(
        "losses are divided by the valid tokens of their micro-batch and averaged (once shipped by torchtitan)",
        TRAIN,
        "output = output / tokens\n",
        "output = output / (targets[i] != IGNORE).sum() / (len(targets) * model.dp_cp.size())\n",
        world=2,
        flags=mesh(2, 1, 1, 1),
    ),
    Bug(
        "valid tokens are counted in this rank's part of the sequences: cp times too few",
        TRAIN,
        "tokens = (targets != IGNORE).sum()",
        "tokens = (targets[:, shard(cfg, model.cp).cpu()] != IGNORE).sum()",
        world=2,
        flags=mesh(1, 2, 1, 1),
    ),
    Bug(
        "the logged loss is summed over dp, but not over cp",
        TRAIN,
        "for group in (model.dp_cp, model.pp):",
        "for group in (model.dp, model.pp):",
        world=2,
        flags=mesh(1, 2, 1, 1),
    ),
    # micro-batches
    Bug(
        "gradients are reduced after the last forward, which only on the last stage comes before the last backward",
        TRAIN,
        "model.requires_gradient_sync = step == len(operations)",
        'model.requires_gradient_sync = ("F", len(inputs) - 1) in operations[:step]',
        world=2,
        flags=mesh(1, 1, 1, 2),
    ),
    Bug(
        "gradients are reduced one micro-batch early: those of the last one count in the next step",
        TRAIN,
        "model.requires_gradient_sync = step == len(operations)",
        "model.requires_gradient_sync = i == len(inputs) - model.stages",
        world=2,
        flags=mesh(1, 1, 1, 2),
    ),
    Bug(
        "later stages, which have no embedding, do not wait for the reduction of their gradients",
        TRAIN,
        "    if i == 0:  # backward ends here\n",
        "    if i == 0 and model.stage == 0:  # backward ends here\n",
        world=2,
        flags=mesh(1, 1, 1, 2),
        seen="late",
    ),
    Bug(
        "the hook of a stage is on its input itself, whose gradient may be there before those of weights",
        TRAIN,
        "        x = x.view_as(x)  #",
        "        #",
        world=2,
        flags=mesh(1, 1, 1, 2),
        seen="compiled, at once",
    ),
    Bug(
        "weights are gathered in the first step and never again: no step has an effect",
        TRAIN,
        "        unit.gathering = None  #",
        "        pass  #",
        flags=mesh(1, 1, 1, 1),
    ),
    # norm and clip
    Bug(
        "what several ranks hold counts once per rank in the norm (once shipped by ROCm's TransformerEngine)",
        TRAIN,
        "** 2 / ranks for",
        "** 2 for",
        world=2,
        flags=mesh(1, 1, 2, 1),
    ),
    Bug(
        "the norm's squares are divided by dp and cp too, as if their ranks held the same gradients",
        TRAIN,
        "** 2 / ranks for",
        "** 2 / (ranks * model.dp_cp.size()) for",
        world=2,
        flags=mesh(2, 1, 1, 1),
    ),
    Bug(
        "the norm is summed over ZeRO's ranks alone: ranks of tp clip by different factors, and drift apart",
        TRAIN,
        "dist.all_reduce(norm, group=model.world)",
        "dist.all_reduce(norm, group=model.dp_cp)",
        world=2,
        flags=mesh(1, 1, 2, 1),
    ),
    Bug(
        "the norm is not summed over the stages, which clip by different factors",
        TRAIN,
        "    dist.all_reduce(norm, group=model.world)",
        "    for group in (model.dp_cp, model.tp):\n        dist.all_reduce(norm, group=group)",
        world=2,
        flags=mesh(1, 1, 1, 2),
    ),
    # what is read and saved
    Bug(
        "the saved file has the key heads of the first ranks of tp, of which several hold the same one",
        TRAIN,
        "torch.cat(shards[:: tp.size() // parts], axis)",
        "torch.cat(shards[:parts], axis)",
        world=4,
        flags=mesh(1, 1, 4, 1),
    ),
    # what a checkpoint holds, and what is made of it
    Bug(
        "AdamW's count of steps is not restored: its bias correction begins again",
        CHECKPOINT,
        'optimizer.state[p]["step"] = torch.tensor(float(len(history)),',
        'optimizer.state[p]["step"] = torch.tensor(0.0,',
        flags=ALONE,
        seen="resumed",
    ),
    Bug(
        "moments are not read, and begin at 0 (once shipped by KempnerForge)",
        CHECKPOINT,
        '{"weight": unit.shard, **moments}',
        '{"weight": unit.shard}',
        flags=ALONE,
        seen="resumed",
    ),
    Bug(
        "the first moment is written from the second",
        CHECKPOINT,
        "torch.cat([of[key] for of in moments])",
        'torch.cat([of["exp_avg_sq"] for of in moments])',
        flags=ALONE,
        seen="resumed",
    ),
    Bug(
        "moments are written with those of vectors first, while weights have matrices first",
        CHECKPOINT,
        "moments = [optimizer.state[p] for p in (unit.matrices, unit.vectors)]",
        "moments = [optimizer.state[p] for p in (unit.vectors, unit.matrices)]",
        flags=ALONE,
        seen="resumed",
    ),
    Bug(
        "the batch of the last step before the checkpoint comes once more",
        CHECKPOINT,
        "batch = make_batch(cfg, data, first)",
        "batch = make_batch(cfg, data, max(0, first - 1))",
        flags=ALONE,
        seen="resumed",
    ),
    Bug(
        "the first batch after resuming is the first one of the training",
        CHECKPOINT,
        "batch = make_batch(cfg, data, first)",
        "batch = make_batch(cfg, data, 0)",
        flags=ALONE,
        seen="resumed",
    ),
    Bug(
        "the learning rate warms up again after resuming",
        CHECKPOINT,
        (
            "    for step in range(first, cfg.steps):\n"
            "        start = time.perf_counter()\n"
            "        set_learning_rate(cfg, optimizer, step)\n"
        ),
        (
            "    for step in range(first, cfg.steps):\n"
            "        start = time.perf_counter()\n"
            "        set_learning_rate(cfg, optimizer, step - first)\n"
        ),
        flags=ALONE,
        seen="resumed",
    ),
    Bug(
        "a shard that begins within a row is filled from the beginning of that row",
        CHECKPOINT,
        "state[name].flatten()[first - rows.start * width :][: len(part)]",
        "state[name].flatten()[: len(part)]",
        world=3,
        flags="--dp 3 --cp 1 --tp 1 --pp 1 --microbatches 2 --vocab 259",
        seen="resumed",
    ),
    Bug(
        "of a shard that ends within a row, that row is not read",
        CHECKPOINT,
        "-(-(first + len(part)) // width))",
        "(first + len(part)) // width)",
        world=3,
        flags="--dp 3 --cp 1 --tp 1 --pp 1 --microbatches 2 --vocab 259",
        seen="resumed",
    ),
    Bug(
        "the vocabulary's padding is written and read: the checkpoint fits no other tp",
        CHECKPOINT,
        "full[0] = cfg.vocab if name in VOCABULARY else full[0]",
        "pass",
        world=2,
        flags="--dp 1 --cp 1 --tp 2 --pp 1 --microbatches 2 --vocab 259",
        seen="resumed",
    ),
    Bug(
        "a checkpoint has its name before all ranks have written",
        CHECKPOINT,
        '    unfinished = folder.with_suffix(".writing")\n',
        (
            "    unfinished = folder\n"
            "    if writers.rank() == 0:\n"
            '        folder.with_suffix(".writing").rename(folder)\n'
            "    dist.barrier(writers)\n"
        ),
        world=2,
        flags="--dp 2 --cp 1 --tp 1 --pp 1 --microbatches 2 --vocab 259",
        seen="half written",
    ),
    Bug(
        "the oldest checkpoints are kept, and the newest removed",
        CHECKPOINT,
        "whole(cfg)[: -cfg.keep]",
        "whole(cfg)[cfg.keep :]",
        flags=ALONE,
        seen="newest checkpoints",
    ),
    Bug(
        "experts' gradients are divided by the ranks that share the experts out, as if they held copies",
        FIVE,
        "    flat = take_gradients(unit)\n",
        "    flat = take_gradients(unit) / (model.dp_cp.size() // unit.dp.size())\n",
        world=4,
        flags=EXPERTS_ON_TP,
    ),
    Bug(
        "the router is reduced with the experts, over their copies alone",
        FIVE,
        '((f"model.layers.{i}.mlp.experts.",), model.edp)',
        '((f"model.layers.{i}.mlp.",), model.edp)',
        world=4,
        flags=COPIES,
    ),
    Bug(
        "all ranks draw the first experts",
        FIVE,
        "published({name: parameter}, model.first_expert)",
        "published({name: parameter})",
        world=4,
        flags=COPIES,
    ),
    Bug(
        "backward of Gather keeps what this rank's weights add to its tokens: the other ranks' part is lost",
        FIVE,
        "        x, scattered = reduce_scatter_tokens(gradient, ctx.tp)\n"
        "        scattered.wait()  # everyone waits\n"
        "        return x, None",
        "        return gradient.chunk(ctx.tp.size())[ctx.tp.rank()].contiguous(), None",
        world=4,
        flags=EXPERTS_ON_TP,
    ),
    Bug(
        "the experts' partial outputs are not added up over tp",
        FIVE,
        "return Scatter.apply(y, self.tp) if self.tp.size() > 1 else y",
        "return y.chunk(self.tp.size())[self.tp.rank()]",
        world=4,
        flags=EXPERTS_ON_TP,
    ),
    Bug(
        "experts count as replicated over tp: gradients of different columns are added up",
        FIVE,
        "w2=1, experts=0,",
        "w2=1,",
        world=4,
        flags=EXPERTS_ON_TP,
    ),
    Bug(
        "the router's gradient counts as whole on every rank of tp: it is not added up",
        FIVE,
        "yield gradient, tp // placement(names[p], tp, cfg.kv_heads)[1]",
        'yield gradient, 1 if ".gate." in names[p] else tp // placement(names[p], tp, cfg.kv_heads)[1]',
        world=4,
        flags=EXPERTS_ON_TP,
    ),
    Bug(
        "gates are divided by the ranks of tp, which all compute them",
        FIVE,
        "gates = Permute.apply(gates.view(-1, 1), order, inverse, 1)\n        rows, gates",
        "gates = Permute.apply(gates.view(-1, 1) / self.tp.size(), order, inverse, 1)\n        rows, gates",
        world=4,
        flags=EXPERTS_ON_TP,
    ),
    Bug(
        "a block's experts are reduced after its other weights: on later stages, when backward has already ended",
        FIVE,
        "for unit in (dense + 1, dense):",
        "for unit in (dense, dense + 1):",
        world=4,
        flags=EXPERTS_IN_STAGES,
        seen="late",
    ),
    Bug(
        "rows are counted on one rank of dp and cp alone",
        FIVE,
        "for group in (model.dp_cp, model.pp):  # on tp, all have routed",
        "for group in (model.pp,):  # on tp, all have routed",
        world=4,
        flags=COPIES,
        seen="load on a mesh",
    ),
]
