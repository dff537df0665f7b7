"""Bugs that the tests of this folder see: what becomes what, on how many ranks, and what sees it."""

from mutation import Bug

ONE_F_ONE_B = "06_pipeline/1f1b.py"
AFAB = "06_pipeline/afab.py"
NAIVE_PIPELINE = "06_pipeline/naive.py"

BUGS = [
    Bug(
        "each stage sends back the tensor it received instead of its input's gradient",
        NAIVE_PIPELINE,
        'send(model, "B", x.grad)',
        'send(model, "B", x.detach() if arrived is None else arrived)',
        world=3,
    ),
    Bug(
        "the gradient norm covers this stage alone, without an all-reduce",
        NAIVE_PIPELINE,
        "dist.all_reduce(norm, group=model.pp)",
        "pass",
        world=3,
    ),
    Bug(
        "the logged loss is not divided by the number of valid tokens",
        NAIVE_PIPELINE,
        "total += output.detach()",
        "total += output.detach() * tokens",
        world=3,
    ),
    Bug(
        "the process group is created before --data is read (bad data leaves it undestroyed)",
        NAIVE_PIPELINE,
        (
            "    data = load_data(cfg)\n"
            '    if cfg.device == "cuda":\n'
            '        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
            '    dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo")\n'
        ),
        (
            '    if cfg.device == "cuda":\n'
            '        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
            '    dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo")\n'
            "    data = load_data(cfg)\n"
        ),
        world=2,
        seen="bad_input",
    ),
    Bug(
        "the loss is only divided for the log, not for backward (shipped by picotron)",
        AFAB,
        "                output = output / tokens\n                total += output.detach()\n",
        "                total += output.detach() / tokens\n",
        world=3,
        flags="--microbatches 4",
    ),
    Bug(
        "the gradient norm covers this stage alone, without an all-reduce",
        AFAB,
        "dist.all_reduce(norm, group=model.pp)",
        "pass",
        world=3,
        flags="--microbatches 4",
    ),
    Bug(
        "one stage runs backward over micro-batches in another order than its neighbours",
        AFAB,
        "alive.pop(i)",
        "alive.pop(i ^ (model.stage == 1))",
        world=3,
        flags="--microbatches 4",
    ),
    Bug(
        "later stages multiply their rotary positions by stage + 1",
        AFAB,
        "torch.arange(x.",
        "(1 + self.stage) * torch.arange(x.",
        world=3,
        flags="--microbatches 4",
    ),
    Bug(
        "gradients are zeroed before each micro-batch's backward, so only the last one's remain",
        AFAB,
        "output.backward(",
        "model.zero_grad(); output.backward(",
        world=3,
        flags="--microbatches 4",
    ),
    Bug(
        "rotary tables are rounded to bf16 before they multiply queries and keys",
        AFAB,
        "return (x * rope[0] + torch.cat((-high, low), dim=-1) * rope[1]).to(x.dtype)",
        "return x * rope[0].to(x.dtype) + torch.cat((-high, low), dim=-1) * rope[1].to(x.dtype)",
        world=2,
        flags="--dtype bfloat16 --microbatches 4",
        seen="bfloat16",
    ),
    Bug(
        "for backward, the loss is not divided by the number of micro-batches",
        ONE_F_ONE_B,
        "                output = output / tokens\n                total += output.detach()\n",
        ("                total += output.detach() / tokens\n                output = output / (tokens / 4)\n"),
        world=3,
        flags="--microbatches 4",
    ),
    Bug(
        "each micro-batch's loss uses the targets of the previous micro-batch",
        ONE_F_ONE_B,
        "targets[i])",
        "targets[i - 1])",
        world=3,
        flags="--microbatches 4",
    ),
    Bug(
        "the pipeline's warm-up has one forward too many on every stage",
        ONE_F_ONE_B,
        "stages - 1 - stage",
        "stages - stage",
        world=4,
        flags="--microbatches 6",
        seen="schedule",
    ),
    Bug(
        "the pipeline's warm-up has one forward too few (-1 on the last stage)",
        ONE_F_ONE_B,
        "stages - 1 - stage",
        "stages - 2 - stage",
        world=4,
        flags="--microbatches 6",
        seen="schedule",
    ),
    Bug(
        "all forwards run before the first backward, as in AFAB",
        ONE_F_ONE_B,
        "stages - 1 - stage",
        "microbatches",
        world=4,
        flags="--microbatches 6",
        seen="schedule",
    ),
    Bug(
        "no stage has a warm-up: each forward is followed by its own backward",
        ONE_F_ONE_B,
        "stages - 1 - stage",
        "0",
        world=4,
        flags="--microbatches 6",
        seen="schedule",
    ),
    Bug(
        "the pipeline's warm-up grows from the first stage to the last instead of shrinking",
        ONE_F_ONE_B,
        "stages - 1 - stage",
        "stage",
        world=4,
        flags="--microbatches 6",
        seen="schedule",
    ),
    Bug(
        "sent gradients of all micro-batches are kept until the step's end (instead of two)",
        ONE_F_ONE_B,
        ("        if len(sending) > 2:\n            finish(sending.pop(0)[0])  # and frees what was sent\n"),
        "",
        world=2,
        flags="--microbatches 6",
        seen="in flight",
    ),
    Bug(
        "a model with as many layers as stages is refused",
        ONE_F_ONE_B,
        "(cfg.layers < world, ",
        "(cfg.layers <= world, ",
        world=2,
        flags="--layers 2 --microbatches 4",
        seen="valid_input",
    ),
]
