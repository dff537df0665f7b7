"""Compare the weights, losses and gradient norms that two runs have saved.

    python tests/compare.py A.safetensors B.safetensors [--start START.safetensors] [--tolerance 1e-10]

With --start, the weights from before training, the *changes* of the weights are compared; after one step of
`--eps 1e12 --lr 1e12 --clip 1e9 --weight_decay 0`, with which AdamW is gradient descent, that is the gradient.
Ends with exit code 1, and the name of the worst tensor, if any error is above the tolerance.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]


def relative_errors(ours: Weights, reference: Weights, start: Weights | None = None) -> dict[str, float]:
    """‖ours − reference‖ / ‖reference − start‖ of every tensor, in float64; start is 0 if not given.

    NaN, which no tolerance admits, where the reference has not moved from start: such a tensor would prove nothing. But
    an expert to which no token went must not have moved, and does not count; nor do biases that balance experts which
    are balanced, and, with LoRA, which moves projections alone, the other tensors.
    Raises AssertionError if they differ in names or shapes.
    """
    start = start or {}
    shapes = [{name: tuple(tensor.shape) for name, tensor in weights.items()} for weights in (ours, reference)]
    assert shapes[0] == shapes[1], f"names or shapes differ: {dict(shapes[0].items() ^ shapes[1].items())}"
    for name in start.keys() & reference.keys():
        assert start[name].shape == reference[name].shape, f"{name} has another shape before training"
    errors = {}
    before = {name: start[name].double() if name in start else 0 for name in reference}
    moved = {name: (theirs.double() - before[name]).norm() for name, theirs in reference.items()}
    lora = all(("_proj." in name) == (distance > 0) for name, distance in moved.items())
    for name, theirs in reference.items():
        difference = (ours[name].double() - theirs.double()).norm()
        experts = ".experts." in name or name.endswith("e_score_correction_bias")
        may_stay = start and (experts or (lora and "_proj." not in name))
        if may_stay and moved[name] == 0 == difference:
            continue
        errors[name] = (difference / moved[name]).item() if moved[name] > 0 else float("nan")
    assert errors, "there is no tensor to compare"
    return errors


def worst(errors: dict[str, float]) -> tuple[str, float]:
    """The name with the largest error, and that error. NaN is larger than everything."""
    return max(errors.items(), key=lambda item: (item[1] != item[1], item[1]))


def relative(ours: float, reference: float) -> float:
    """The relative difference of two numbers."""
    if reference == 0:
        return 0.0 if ours == 0 else math.inf
    return abs(ours / reference - 1)


def history_errors(ours: list[list[float]], reference: list[list[float]]) -> dict[str, float]:
    """Relative errors of loss and gradient norm of every step."""
    assert len(ours) == len(reference), f"{len(ours)} steps against {len(reference)}"
    errors = {}
    for step, (mine, theirs) in enumerate(zip(ours, reference, strict=True), 1):
        errors[f"loss of step {step}"] = relative(mine[0], theirs[0])
        errors[f"gradient norm of step {step}"] = relative(mine[1], theirs[1])
    return errors


def assert_close(errors: dict[str, float], tolerance: float, what: str) -> float:
    """Raise AssertionError, naming the worst, unless all errors are at most the tolerance. Returns the worst error."""
    name, error = worst(errors)
    assert error <= tolerance, f"{what}: {name} is off by {error:.2e}, allowed are {tolerance:.0e}"
    return error


def read(path: str) -> tuple[Weights, list[list[float]]]:
    """Weights and [loss, gradient norm, seconds] per step of a file that --save wrote."""
    if not Path(path).is_file():  # who opens a pipe waits for its writer
        raise FileNotFoundError(f"{path}: is not a file")
    try:
        with safe_open(path, "pt") as file:
            history = json.loads((file.metadata() or {}).get("history", "[]"))
        return load_file(path), [[float(loss), float(norm), *rest] for loss, norm, *rest in history]
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from None
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ValueError(f"{path}: its history must be a list of [loss, gradient norm, seconds]") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("ours")
    parser.add_argument("reference")
    parser.add_argument("--start", help="the weights before training")
    parser.add_argument("--tolerance", type=float, default=1e-10)
    args = parser.parse_args()
    try:
        (ours, history), (reference, reference_history) = read(args.ours), read(args.reference)
        start = read(args.start)[0] if args.start else None
        assert start is None or start.keys() & reference.keys(), f"{args.start}: has none of the tensors"
        errors = relative_errors(ours, reference, start) | history_errors(history, reference_history)
        error = assert_close(errors, args.tolerance, args.ours)
        print(f"{len(errors)} tensors, losses and norms agree: the worst, {worst(errors)[0]}, is off by {error:.1e}")
    except (AssertionError, OSError, ValueError) as problem:
        raise SystemExit(str(problem)) from None


if __name__ == "__main__":
    main()
