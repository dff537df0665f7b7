"""--validate: what is held out, and what is printed of it."""

import dataclasses

import numpy as np
import pytest
from contract import SMALL, refusal
from launch import launch, load

ROOT_RECIPE = "01_single_gpu/train.py"


@pytest.mark.parametrize(
    "lengths, cut",
    [
        ([500, 440, 20, 20, 20], 960),  # the documents that start in the last twentieth, whole
        ([940, 10, 20, 30], 950),  # one that starts where it begins
        ([1000], 950),  # one document: its end
        ([900, 90, 10], 950),  # the last one alone has no window of 10 tokens and a target: some of the one before, too
        ([900, 89, 11], 989),
    ],
)
def test_what_is_held_out(lengths, cut, tmp_path, file=ROOT_RECIPE):
    """Text that is held out is trained on by nobody, and without --validate nothing is held out."""
    root = load(file)
    ids, starts = np.random.default_rng(0).integers(1, 256, size=1000, dtype=np.uint8), np.cumsum([0, *lengths[:-1]])
    for i, document in enumerate(np.split(ids, starts[1:])):
        document.tofile(tmp_path / str(i))
    cfg = root.Config(seq=10, validate=1, data=str(tmp_path))
    (seen, seen_starts), (unseen, unseen_starts) = root.load_data(cfg)
    assert (seen.tolist(), unseen.tolist()) == (ids[:cut].tolist(), ids[cut:].tolist())
    assert [*seen_starts, *(unseen_starts + cut)] == starts.tolist()
    (everything, all_starts), _ = root.load_data(dataclasses.replace(cfg, validate=0))
    assert everything.tolist() == ids.tolist() and all_starts.tolist() == starts.tolist()


@pytest.mark.parametrize("validate, least", [(0, 17), (1, 20 * 17)])
def test_least_text(validate, least, tmp_path):
    """The smallest text that has a window, or of which a twentieth has one, is taken; one of a byte less is refused."""
    text = tmp_path / "text"
    for size in least, least - 1:
        text.write_bytes(b"a" * size)
        line = refusal(load(ROOT_RECIPE), 1, f"--device cpu --seq 16 --validate {validate} --data {text}")
        wanted = f"--data {text}: must have at least {least} tokens with --seq 16, has {size}"
        assert line == (wanted if size < least else None)


@pytest.mark.parametrize("recipe, world", [(ROOT_RECIPE, 1), ("02_data_parallel/naive.py", 2)])
def test_printed_every_n_steps(recipe, world, file=None):
    """... after the step's line: what evaluate returns. With no learning rate it stays the same, as the text does."""

    def returned(module):
        losses, evaluate = [], module.evaluate
        module.evaluate = lambda *args: losses.append(evaluate(*args)) or losses[-1]
        return lambda: [loss.item() for loss in losses]

    run = launch(file or recipe, world, f"{SMALL} --steps 5 --validate 2 --lr 0", probe=returned)
    out, (one, two) = run.output[0].splitlines(), run.probes[0]
    assert len(out) == 5 + 2 + 1 and one == two
    assert out[2].split() == out[5].split() == ["validation", "loss", f"{one:.4f}"], "not the loss of the evaluation"
