"""Bugs that the tests of this folder see: what becomes what, on how many ranks, and what sees it."""

from mutation import Bug

ACCELERATE_DDP = "02_data_parallel/accelerate_ddp.py"
BUCKETED = "02_data_parallel/bucketed.py"
COALESCED = "02_data_parallel/coalesced.py"
COPY_ENGINES = "02_data_parallel/copy_engines.py"
DILOCO = "02_data_parallel/diloco.py"
NAIVE = "02_data_parallel/naive.py"
NO_SYNC = "02_data_parallel/no_sync.py"
OVERLAP = "02_data_parallel/overlap.py"
TORCH_DDP = "02_data_parallel/torch_ddp.py"

BUGS = [
    Bug(
        "the first token of a document is predicted from the previous document",
        NAIVE,
        ".masked_fill(unrelated, IGNORE)",
        "",
        world=2,
    ),
    Bug("gradients are never all-reduced over the ranks", NAIVE, "dist.all_reduce(p.grad)", "pass", world=2),
    Bug(
        "gradients are averaged over the ranks instead of summed",
        NAIVE,
        "dist.all_reduce(p.grad)",
        "dist.all_reduce(p.grad.div_(dp))",
        world=2,
    ),
    Bug(
        "every rank reads rank 0's inputs with its own targets",
        NAIVE,
        "inputs.chunk(dp)[rank]",
        "inputs.chunk(dp)[0]",
        world=2,
    ),
    Bug(
        "each rank divides its loss by its own valid tokens, not the batch's",
        NAIVE,
        "inputs, targets) / tokens",
        "inputs, targets) / (targets != IGNORE).sum()",
        world=2,
    ),
    Bug(
        "the all-reduce averages the weights instead of summing the gradients (once shipped by picotron)",
        NAIVE,
        "        dist.all_reduce(p.grad)",
        "        dist.all_reduce(p.data.div_(dp))",
        world=2,
    ),
    Bug(
        "only the last micro-batch's gradient is all-reduced, earlier ones stay local (shipped by picotron_tutorial)",
        NAIVE,
        "    loss.backward()\n",
        (
            "    half, total = len(inputs) // 2, loss.detach()\n"
            "    (forward(cfg, model, inputs[:half], targets[:half]) / tokens).backward()\n"
            "    first = [p.grad.clone() for p in model.parameters()]\n"
            "    model.zero_grad()\n"
            "    (forward(cfg, model, inputs[half:], targets[half:]) / tokens).backward()\n"
            "    for p, g in zip(model.parameters(), first):\n"
            "        dist.all_reduce(p.grad)\n"
            "        p.grad += g\n"
            "    dist.all_reduce(total)\n"
            "    return total\n"
        ),
        world=2,
    ),
    Bug(
        "a copy of each gradient is all-reduced, the gradient itself stays local",
        OVERLAP,
        "all_reduce(p.grad, async",
        "all_reduce(p.grad.clone(), async",
        world=2,
    ),
    Bug(
        "the last gradient of backward (the embedding's) is never all-reduced",
        OVERLAP,
        "< len(order) and",
        "< len(order) - 1 and",
        world=2,
    ),
    Bug(
        "a gradient's all-reduce starts when any new gradient is ready, not its own",
        OVERLAP,
        "order[len(reductions)] in ready",
        "len(ready) > len(reductions)",
        world=2,
        seen="compiled, at once",
    ),
    Bug(
        "only the first all-reduce is waited for before the gradients are read",
        OVERLAP,
        "in reductions:",
        "in reductions[:1]:",
        world=2,
        seen="compiled, late",
    ),
    Bug(
        "gradient hooks are registered in every step and never removed (they pile up)",
        OVERLAP,
        "    for handle in hooks:\n        handle.remove()\n",
        "",
        world=2,
        seen="run",
    ),
    Bug(
        "gradients are not made views of their bucket, so its sums are lost",
        BUCKETED,
        "p.grad = part",
        "part",
        world=2,
        flags="--bucket_mb 0.05",
    ),
    Bug(
        "the last bucket of backward is never all-reduced",
        BUCKETED,
        "< len(buckets) and",
        "< len(buckets) - 1 and",
        world=2,
        flags="--bucket_mb 0.05",
    ),
    Bug(
        "for a one-gradient bucket, a copy is all-reduced instead of the gradient",
        BUCKETED,
        "grad.view(-1)",
        "grad.view(-1).clone()",
        world=2,
        flags="--bucket_mb 0.05",
    ),
    Bug(
        "a bucket is all-reduced after its first gradient, before it is full",
        BUCKETED,
        "not missing[len(reductions)]",
        "len(missing[len(reductions)]) < len(buckets[len(reductions)])",
        world=2,
        flags="--bucket_mb 0.05",
        seen="compiled, at once",
    ),
    Bug(
        "the GPU is chosen by RANK instead of LOCAL_RANK (fails on the second host)",
        BUCKETED,
        'int(os.environ["LOCAL_RANK"])',
        'int(os.environ["RANK"])',
        world=2,
        seen="second_node",
    ),
    Bug(
        "the first gradient of each multi-gradient bucket is left out of the all-reduce",
        COALESCED,
        "[p.grad for p in bucket]",
        "[p.grad for p in bucket[1:] or bucket]",
        world=2,
        flags="--bucket_mb 0.05",
    ),
    Bug(
        "copies of the gradients are all-reduced, the gradients themselves stay local",
        COALESCED,
        "[p.grad for",
        "[p.grad.clone() for",
        world=2,
        flags="--bucket_mb 0.05",
    ),
    Bug(
        "the last bucket's all-reduce is not waited for before gradients are read",
        COALESCED,
        "in reductions:",
        "in reductions[:-1]:",
        world=2,
        flags="--bucket_mb 0.05",
        seen="compiled, late",
    ),
    Bug(
        "every micro-batch all-reduces the accumulated gradients, so earlier ones are summed again",
        NO_SYNC,
        "if i < cfg.microbatches - 1:",
        "if False:",
        world=2,
        flags="--bucket_mb 0.05 --microbatches 3",
    ),
    Bug(
        "the first micro-batch all-reduces the gradients instead of the last",
        NO_SYNC,
        "i < cfg.microbatches - 1",
        "i > 0",
        world=2,
        flags="--bucket_mb 0.05 --microbatches 3",
    ),
    Bug(
        "micro-batches before the last zero the gradients instead of running backward",
        NO_SYNC,
        "loss.backward()  #",
        "model.zero_grad()  #",
        world=2,
        flags="--bucket_mb 0.05 --microbatches 3",
    ),
    Bug(
        "the step's clock stops before loss.item() waits for the GPU",
        NO_SYNC,
        (
            "        loss, norm = loss.item(), norm.item()  # waits for the GPU\n"
            "        history.append((loss, norm, time.perf_counter() - start))\n"
        ),
        (
            "        seconds = time.perf_counter() - start\n"
            "        loss, norm = loss.item(), norm.item()  # waits for the GPU\n"
            "        history.append((loss, norm, seconds))\n"
        ),
        world=2,
        seen="run",
    ),
    Bug(
        "from each peer, a rank copies the peer's shard instead of its own",
        COPY_ENGINES,
        "copy_(shards[r][rank])",
        "copy_(shards[r][r])",
        world=2,
        flags="--bucket_mb 0.05",
    ),
    Bug(
        "the other ranks' summed shards are never copied into this rank's bucket",
        COPY_ENGINES,
        "copy_(shards[r][r])",
        "copy_(shards[rank][r])",
        world=2,
        flags="--bucket_mb 0.05",
    ),
    Bug(
        "buckets after the first start one element early and overlap the previous one",
        COPY_ENGINES,
        "flatten(buckets[i], flat[i])",
        "flatten(buckets[i], shared.buffers[dist.get_rank()][sum(shared.sizes[:i]) - (i > 0) :])",
        world=2,
        flags="--bucket_mb 0.05",
    ),
    Bug(
        "the side stream does not wait until the main stream has filled the bucket",
        COPY_ENGINES,
        ("            if shared.stream:\n                shared.stream.wait_stream(torch.cuda.current_stream())\n"),
        "",
        world=2,
        seen="late",
    ),
    Bug(
        "the outer gradient has the wrong sign (new minus agreed weights)",
        DILOCO,
        "(old - p)",
        "(p - old)",
        world=3,
        flags="--inner_steps 2",
        seen="simulation",
    ),
    Bug(
        "the outer gradient sums the workers' weight changes instead of averaging them",
        DILOCO,
        "(old - p) / dist.get_world_size()",
        "(old - p)",
        world=3,
        flags="--inner_steps 2",
        seen="simulation",
    ),
    Bug(
        "the outer optimizer uses plain momentum instead of Nesterov momentum",
        DILOCO,
        "nesterov=cfg.outer_momentum > 0",
        "nesterov=False",
        world=3,
        flags="--inner_steps 2",
        seen="simulation",
    ),
    Bug(
        "workers keep their own weights after an outer step instead of the agreed ones",
        DILOCO,
        "        p.copy_(old)",
        "        pass",
        world=3,
        flags="--inner_steps 2",
        seen="simulation",
    ),
    Bug(
        "the inner AdamW moments are reset after every outer step",
        DILOCO,
        "(model, outer)\n",
        "(model, outer); optimizer = make_optimizer(cfg, model)\n",
        world=3,
        flags="--inner_steps 2",
        seen="simulation",
    ),
    Bug(
        "each worker divides its loss by its own valid tokens, not the average",
        DILOCO,
        "inputs, targets) / tokens",
        "inputs, targets) / (targets != IGNORE).sum()",
        world=3,
        flags="--inner_steps 2",
        seen="simulation",
    ),
    Bug(
        "a shorter last round of inner steps ends without an outer step",
        DILOCO,
        " or step + 1 == cfg.steps",
        "",
        world=3,
        flags="--inner_steps 2",
        seen="simulation",
    ),
    Bug(
        "outer steps run one inner step late, and also after the first step",
        DILOCO,
        "(step + 1) % cfg.inner_steps == 0",
        "step % cfg.inner_steps == 0",
        world=3,
        flags="--inner_steps 2",
        seen="simulation",
    ),
    Bug(
        "outer gradients are zeroed, not freed, and stay allocated during inner steps (4 bytes per parameter)",
        DILOCO,
        "    outer.zero_grad()\n",
        "    outer.zero_grad(set_to_none=False)\n",
        world=2,
        flags="--inner_steps 1",
        seen="run",
    ),
    Bug(
        "the loss is not multiplied by dp, so DDP averages the gradients",
        TORCH_DDP,
        "(loss * dp).backward()",
        "loss.backward()",
        world=2,
    ),
    Bug(
        "forward calls the wrapped module, not DDP, so gradients are never all-reduced",
        TORCH_DDP,
        "model(inputs)",
        "model.module(inputs)",
        world=2,
    ),
    Bug(
        "the median step time is of the slow first steps, not the later ones",
        TORCH_DDP,
        "history[min(5, cfg.steps // 2) :]",
        "history[: min(5, cfg.steps // 2) + 1]",
        world=2,
        seen="run",
    ),
    Bug(
        "the loss is not multiplied by dp, so DDP averages the gradients",
        ACCELERATE_DDP,
        "backward(loss * dp)",
        "backward(loss)",
        world=2,
    ),
    Bug(
        "the logged loss is not all-reduced: it covers one rank's tokens",
        ACCELERATE_DDP,
        "    dist.all_reduce(loss)",
        "    pass",
        world=2,
    ),
]
