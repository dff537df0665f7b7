"""How far each recipe of mixed precision is from float64, and what formats do to real gradients: stored for the page.

python tests/precision.py, on a CPU, in two minutes. The gradient is that of the second step with a learning rate of 0:
the weights are those of the first, and delayed scaling has a history. Each tensor's error is relative to its norm; the
signal-to-noise ratio is that of all tensors together.
"""

import datetime
import json
import math
import platform
import sys

import torch
from launch import ROOT, isolated, load
from torch import Tensor

RESULTS = ROOT / "tests/results/precision.json"
FLAGS = "--device cpu --layers 4 --dim 256 --heads 4 --kv_heads 4 --ffn 512 --seq 128 --batch 4 --lr 0"
FOLDER = "10_mixed_precision"
RUNS = [  # label, recipe, flags
    ("autocast", "01_single_gpu/train.py", "--dtype bfloat16"),
    *(
        (f"{name}.py", f"{FOLDER}/{name}.py", f"--microbatches 1 --dtype {dtype}")
        for name, dtype in (
            ("bf16", "bfloat16"),
            ("fp16_loss_scaling", "float16"),
            ("fp8_tensorwise", "bfloat16"),
            ("fp8_delayed_scaling", "bfloat16"),
            ("fp8_blockwise", "bfloat16"),
        )
    ),
]


def gradient(file: str, flags: str) -> dict[str, Tensor]:
    """Name -> gradient in float64 of the second step's batch."""
    module = load(file)
    sys.argv = ["recipe", *f"{FLAGS} {flags}".split()]
    cfg = module.parse_config()
    if cfg.dtype == "float64":
        torch.set_default_dtype(torch.float64)
    data, model = module.load_data(cfg), module.build_model(cfg)
    optimizer = module.make_optimizer(cfg, model)
    module.train_step(cfg, model, optimizer, *module.make_batch(cfg, data, 0))
    module.forward_backward(cfg, model, *module.make_batch(cfg, data, 1))
    scale = model.scaling.scale.item() if hasattr(model, "scaling") else 1
    return {name: p.grad.double() / scale for name, p in model.named_parameters()}


def precision() -> list[dict]:
    """A row per recipe: signal-to-noise ratio of the whole gradient in dB, and the worst tensor with its error."""
    exact = isolated(lambda: gradient("01_single_gpu/train.py", "--dtype float64"))
    rows = []
    for label, file, flags in RUNS:
        ours = isolated(lambda file=file, flags=flags: gradient(file, flags))
        noise = {name: (ours[name] - g).norm().item() for name, g in exact.items()}
        errors = {name: noise[name] / g.norm().item() for name, g in exact.items()}
        worst = max(errors, key=errors.get)
        total = math.hypot(*noise.values()) / math.hypot(*(g.norm().item() for g in exact.values()))
        rows.append({"label": label, "dB": -20 * math.log10(total), "worst": worst, "error": errors[worst]})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    formats = load(f"{FOLDER}/formats.py")
    rows = precision()
    seen = formats.observe(formats.Config().steps)
    tables = {f"gradients of {kind}": formats.table_of_gradients(found) for kind, found in seen.gradients.items()}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    stored = {
        "date": datetime.date.today().isoformat(),
        **versions,
        "command": "python tests/precision.py",
        "flags": FLAGS,
        "precision": rows,
        "formats": tables | {"updates": formats.table_of_updates(seen)},
    }
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
