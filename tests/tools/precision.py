"""How far each recipe of mixed precision is from float64, and what formats do to real gradients: stored for the page.

python tests/tools/precision.py, on a CPU, in two minutes. The gradient is that of the second step with a learning rate
of 0: the weights are those of the first, and delayed scaling has a history. The signal-to-noise ratio is that of all
tensors together.
"""

import datetime
import math
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder tests

from launch import ROOT, isolated, load
from rows import write_rows

RESULTS = ROOT / "tests/results/precision.json"
FLAGS = "--device cpu --layers 4 --dim 256 --heads 4 --kv_heads 4 --ffn 512 --seq 128 --batch 4 --lr 0"
FOLDER = "10_mixed_precision"
FP8 = [f"fp8_{name}.py" for name in ("tensorwise", "delayed_scaling", "blockwise")]
RUNS = [  # label, recipe, dtype, format of fp8 gradients if not the recipe's own
    ("autocast", "01_single_gpu/train.py", "bfloat16", None),
    ("bf16.py", f"{FOLDER}/bf16.py", "bfloat16", None),
    ("fp16_loss_scaling.py", f"{FOLDER}/fp16_loss_scaling.py", "float16", None),
    *((name, f"{FOLDER}/{name}", "bfloat16", None) for name in FP8),
    (f"{FP8[0]}, gradients in e4m3", f"{FOLDER}/{FP8[0]}", "bfloat16", torch.float8_e4m3fn),
    (f"{FP8[2]}, gradients in e5m2", f"{FOLDER}/{FP8[2]}", "bfloat16", torch.float8_e5m2),
]


def gradient(file: str, dtype: str, of_gradients: torch.dtype | None = None) -> dict[str, Tensor]:
    """Name -> gradient in float64 of the second step's batch."""
    module = load(file)
    if of_gradients:
        module.GRADIENT = of_gradients
    sys.argv = ["recipe", *f"{FLAGS} --dtype {dtype}".split(), *(["--microbatches", "1"] if FOLDER in file else [])]
    cfg = module.parse_config()
    if cfg.dtype == "float64":
        torch.set_default_dtype(torch.float64)
    data, model = module.load_data(cfg)[0], module.build_model(cfg)
    optimizer = module.make_optimizer(cfg, model)
    module.train_step(cfg, model, optimizer, *module.make_batch(cfg, data, 0))
    module.forward_backward(cfg, model, *module.make_batch(cfg, data, 1))
    scale = model.scaling.scale.item() if hasattr(model, "scaling") else 1
    return {name: p.grad.double() / scale for name, p in model.named_parameters()}


def precision() -> list[dict]:
    """A row per recipe: signal-to-noise ratio of the whole gradient in dB."""
    exact = isolated(lambda: gradient("01_single_gpu/train.py", "float64"))
    rows = []
    for label, *run in RUNS:
        ours = isolated(lambda run=run: gradient(*run))
        noise = math.hypot(*((ours[name] - g).norm().item() for name, g in exact.items()))
        signal = math.hypot(*(g.norm().item() for g in exact.values()))
        rows.append({"label": label, "dB": 20 * math.log10(signal / noise)})
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
        "command": "python tests/tools/precision.py",
        "flags": FLAGS,
        "precision": rows,
        "formats": tables | {"updates": formats.table_of_updates(seen)},
    }
    write_rows(RESULTS, stored)


if __name__ == "__main__":
    main()
