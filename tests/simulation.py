"""DiLoCo in one process: what the ranks of 02_data_parallel/diloco.py must do together, from the paper's formulas."""

import copy
import sys

import compare
import equivalence
import torch
from launch import isolated, launch, load

RECIPE = "02_data_parallel/diloco.py"
WORKERS, INNER, STEPS, OUTER_LR, MOMENTUM = 3, 2, 7, 0.6, 0.8  # the last round is cut short
OWN = f"--inner_steps {INNER} --outer_lr {OUTER_LR} --outer_momentum {MOMENTUM}"
FLAGS = f"--steps {STEPS} --lr 1e-2 --warmup 3 --clip 0.3"


def simulate(flags: str) -> tuple[compare.Weights, list[list[float]]]:
    """Weights after the last outer step, and [loss, gradient norm] of every step of the first worker."""
    root = load(equivalence.root_of(RECIPE))
    torch.set_default_dtype(torch.float64)
    sys.argv = [RECIPE, *flags.split()]
    cfg = root.parse_config()
    data, agreed = root.load_data(cfg)[0], root.build_model(cfg)
    workers = [copy.deepcopy(agreed) for _ in range(WORKERS)]
    optimizers = [root.make_optimizer(cfg, worker) for worker in workers]
    velocity = [torch.zeros_like(p) for p in agreed.parameters()]
    history = []
    for step in range(STEPS):
        inputs, targets = root.make_batch(cfg, data, step)
        share = (targets != root.IGNORE).sum() / WORKERS
        for w, (worker, optimizer) in enumerate(zip(workers, optimizers)):
            root.set_learning_rate(cfg, optimizer, step)
            part = slice(w * cfg.batch // WORKERS, (w + 1) * cfg.batch // WORKERS)
            loss = root.forward(cfg, worker, inputs[part], targets[part]) / share
            loss.backward()
            norm = torch.stack([p.grad.square().sum() for p in worker.parameters()]).sum().sqrt()
            for p in worker.parameters():
                p.grad *= min(1.0, (cfg.clip / (norm + 1e-6)).item())  # with the epsilon of torch's clip_grad_norm_
            optimizer.step()
            optimizer.zero_grad()
            if w == 0:
                history.append([loss.item(), norm.item()])
        if step % INNER == INNER - 1 or step == STEPS - 1:
            with torch.no_grad():
                for i, (p, *replicas) in enumerate(zip(*(m.parameters() for m in (agreed, *workers)))):
                    gradient = sum(p - replica for replica in replicas) / WORKERS
                    velocity[i] = MOMENTUM * velocity[i] + gradient
                    p -= OUTER_LR * (gradient + MOMENTUM * velocity[i])  # Nesterov
                    for replica in replicas:
                        replica.copy_(p)
    return {name: p.detach() for name, p in agreed.named_parameters()}, history


def check(recipe: str = RECIPE) -> dict[str, float]:
    """Assert that the recipe's weights, and its first worker's log, are those of the simulation."""
    init = equivalence.start(equivalence.root_of(RECIPE), equivalence.SHAPE)
    documents = equivalence.documents()
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {documents} --init {init} {FLAGS}"
    ours = launch(recipe, WORKERS, f"{flags} {OWN}")
    weights, history = isolated(lambda: simulate(flags))
    assert min(norm for _, norm in history) > 0.3, "the clip never acted"
    errors = compare.relative_errors(ours.weights, weights, compare.read(init)[0])
    errors |= compare.history_errors(ours.history, history)
    return {"simulation": compare.assert_close(errors, equivalence.TOLERANCE["float64"], f"{recipe}, simulated")}
