"""Checkpoints: equal to the bit in every layout, whole or not there, whoever is killed and whenever."""

import concurrent.futures
import dataclasses
import json
import os
import pickle
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import compare
import contract
import pytest
import torch
from launch import RankFailed, launch, load, once, run_folder
from safetensors import safe_open
from safetensors.torch import save_file

CHECKPOINT = "08_4d/checkpoint.py"
TRAIN = "08_4d/train.py"
# uneven layers, key heads that ranks of tp share, a vocabulary that tp does not divide, units with padding
SIZES = (
    "--device cpu --dtype float64 --layers 3 --dim 32 --heads 8 --kv_heads 2 --ffn 48 --vocab 259 --seq 16 --batch 12"
)
FLAGS = f"{SIZES} --microbatches 2 --warmup 1 --lr 1e-2 --clip 0.5 --every 1"
SAVED = 4, "--dp 1 --cp 1 --tp 4 --pp 1"  # two ranks of tp hold the same key heads
TWO = "--dp 2 --cp 1 --tp 1 --pp 1"
ALONE = "--dp 1 --cp 1 --tp 1 --pp 1"


def content(folder: Path | str) -> dict[str, torch.Tensor]:
    """All full tensors of a checkpoint, put together from the rectangles of its files, which cover each once."""
    parts = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"  # else Hugging Face's libraries refuse it
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():
                parts.setdefault(name, []).append((offsets[name]["saved_offsets"], file.get_tensor(name)))
    whole = {}
    for name, rectangles in parts.items():
        shape = [max(start[i] + part.shape[i] for start, part in rectangles) for i in range(rectangles[0][1].ndim)]
        whole[name], times = torch.zeros(shape, dtype=rectangles[0][1].dtype), torch.zeros(shape)
        for start, part in rectangles:
            here = tuple(slice(first, first + n) for first, n in zip(start, part.shape))
            whole[name][here] = part
            times[here] += 1
        assert (times == 1).all(), f"{name} is not written once"
    return whole


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str) -> None:
    """Assert that tensors have the same names and bits."""
    assert ours.keys() == theirs.keys(), f"{what}: names differ"
    for name, tensor in theirs.items():
        assert tensor.shape == ours[name].shape and tensor.numpy().tobytes() == ours[name].numpy().tobytes(), (
            f"{what}: {name} differs"
        )


@once
def uninterrupted(
    world: int, layout: str, steps: int, file: str = CHECKPOINT
) -> tuple[str, dict[str, torch.Tensor], list[list[float]]]:
    """A run without an interruption: the folder of its checkpoints, its weights and [loss, norm] per step."""
    folder = tempfile.mkdtemp(dir=run_folder())
    run = launch(file, world, f"{FLAGS} {layout} --steps {steps} --checkpoint {folder} --keep {steps}")
    return folder, run.weights, [step[:2] for step in run.history]


def written_at_once(folder: str):
    """A probe: what resume has read is written again, before any step, to another folder.

    A validation before that gathers the old weights: resume must make the next forward gather anew.
    """

    def probe(module):
        resume = module.resume

        def read_and_write(cfg, model, optimizer, writers):
            ids = torch.zeros(cfg.batch, cfg.seq, dtype=torch.long)
            module.evaluate(cfg, model, ids, ids)
            step, history = resume(cfg, model, optimizer, writers)
            elsewhere = dataclasses.replace(cfg, checkpoint=folder)
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                module.write(elsewhere, model, optimizer, step, history, writers, thread).result()
            return step, history

        module.resume = read_and_write

    return probe


def check_resumed(world: int, flags: str, tmp_path: Path, file: str = CHECKPOINT) -> None:
    """Resume in another layout: weights and moments equal to the bit, the next losses as of a run that went on."""
    folder, _, history = uninterrupted(*SAVED, 4)
    shutil.copytree(Path(folder, "step-2"), tmp_path / "step-2")
    resumed = f"{FLAGS} {flags} --steps 4 --checkpoint {tmp_path} --keep 9"
    run = launch(file, world, resumed, probe=written_at_once(f"{tmp_path}/again"))
    same_bits(content(tmp_path / "again" / "step-2"), content(f"{folder}/step-2"), flags)
    errors = compare.relative_errors(content(tmp_path / "step-4"), content(f"{folder}/step-4"))
    errors |= compare.history_errors(run.history, history)
    compare.assert_close(errors, 1e-10, f"two more steps in {flags}")


@pytest.mark.parametrize(
    "world, layout",
    [
        (4, "--dp 1 --cp 2 --tp 2 --pp 1"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in ((6, "--dp 3 --cp 1 --tp 1 --pp 2"), (1, f"{ALONE} --chunks 3"))
        ),
    ],
)
def test_resumes_in_any_layout(world, layout, tmp_path):
    check_resumed(world, layout, tmp_path)


def test_masters_are_kept_in_full(tmp_path):
    """In bfloat16 the fp32 master weights are written, and a resumed run is the same to the bit."""
    world, layout = 2, f"{TWO} --dtype bfloat16"
    folder, weights, history = uninterrupted(world, layout, 4)
    shutil.copytree(Path(folder, "step-2"), tmp_path / "step-2")
    run = launch(CHECKPOINT, world, f"{FLAGS} {layout} --steps 4 --checkpoint {tmp_path}")
    same_bits(run.weights, weights, "resumed in bfloat16")
    assert [step[:2] for step in run.history] == history
    assert {tensor.dtype for tensor in content(tmp_path / "step-4").values()} == {torch.float32}


def test_a_checkpoint_holds_the_training(tmp_path):
    """Weights, both moments and the history; the weights are those of train.py, which knows nothing of checkpoints.

    A run that has no step left writes Hugging Face's weights, in one process, of what four have trained. And nothing is
    unpickled: torch.load and pickle's loads of files are refused here.
    """
    folder, weights, history = uninterrupted(*SAVED, 4)
    stored = content(f"{folder}/step-4")
    same_bits({name: stored[f"weight {name}"] for name in weights}, weights, "--save")
    kinds = "weight", "exp_avg", "exp_avg_sq"
    assert stored.keys() == {f"{kind} {name}" for kind in kinds for name in weights}
    kept = json.loads(Path(folder, "step-4", "training.json").read_text())
    assert kept["step"] == 4 and [step[:2] for step in kept["history"]] == history
    plain = launch(TRAIN, SAVED[0], f"{FLAGS.replace('--every 1', '')} {SAVED[1]} --steps 4")
    same_bits(plain.weights, weights, "train.py")

    def without_pickle(module):
        def refuse(*_, **__):
            raise AssertionError("something is unpickled")

        torch.load = pickle.load = refuse

    shutil.copytree(Path(folder, "step-4"), tmp_path / "step-4")
    run = launch(CHECKPOINT, 1, f"{FLAGS} {ALONE} --steps 4 --checkpoint {tmp_path}", probe=without_pickle)
    same_bits(run.weights, weights, "without a step")
    assert all(path.suffix in (".safetensors", ".json") for path in (tmp_path / "step-4").iterdir())


def test_only_the_newest_are_kept(tmp_path):
    """By number: step-8 is older than step-10. Steps with a checkpoint are multiples of --every, and the last one."""
    for steps, names in (3, ["step-2", "step-3"]), (11, ["step-10", "step-11"]):
        flags = f"{FLAGS} {ALONE} --every 2 --keep 2 --steps {steps} --checkpoint {tmp_path}"
        launch(CHECKPOINT, 1, flags, save=False)
        found = sorted(path.name for path in tmp_path.iterdir())
        assert found == names, f"there are {found}"


def test_goes_on_after_a_kill_on_two_nodes(tmp_path):
    """Leftovers are removed, by one node alone: the other would look for what is gone. All ranks go on from the newest
    whole checkpoint that the first one sees: on a network's file system another may see an old list of folders.
    """

    def another_node(module):
        os.environ["LOCAL_RANK"] = "0"
        removed, rmtree, whole = [], module.shutil.rmtree, module.whole
        module.shutil.rmtree = lambda path: removed.append(path) or rmtree(path)
        if os.environ["RANK"] == "1":
            module.whole = lambda cfg: whole(cfg)[:1]
        return lambda: len(removed)

    folder, weights, _ = uninterrupted(2, TWO, 4)
    for step, name in (1, "step-1"), (2, "step-2"), (4, "step-3.writing"), (4, "step-0.removing"):
        shutil.copytree(Path(folder, f"step-{step}"), tmp_path / name)
    run = launch(CHECKPOINT, 2, f"{FLAGS} {TWO} --steps 4 --checkpoint {tmp_path} --keep 9", probe=another_node)
    same_bits(run.weights, weights, "resumed from step 2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{i}" for i in (1, 2, 3, 4)]
    assert run.probes == [2, 0], "each node removes leftovers"


def test_what_went_wrong_is_said(tmp_path, file=CHECKPOINT):
    """A checkpoint that cannot be written ends the run with the reason, and does not count."""

    def full_disk(module):
        def save_file(*_):
            raise OSError("no space left on device")

        if os.environ["RANK"] == "1":
            module.save_file = save_file

    flags = f"{FLAGS} --dp 2 --cp 1 --tp 1 --pp 1 --steps 3 --checkpoint {tmp_path}"
    with pytest.raises(RankFailed, match="no space left on device"):
        launch(file, 2, flags, probe=full_disk, save=False)
    names = [path.name for path in tmp_path.iterdir()]
    assert names == ["step-1.writing"], f"there are {names}"


def test_the_step_is_an_argument(tmp_path):
    """... and not the length of the history: a trainer may log every second step. Its cfg may be any object."""

    def logs_every_second_step(module):
        write = module.write

        def thinned(cfg, model, optimizer, step, history, *others):
            return write(SimpleNamespace(**vars(cfg)), model, optimizer, step, history[1::2], *others)

        module.write = thinned

    _, weights, history = uninterrupted(2, TWO, 4)
    for steps in 2, 4:
        flags = f"{FLAGS} {TWO} --steps {steps} --checkpoint {tmp_path}"
        run = launch(CHECKPOINT, 2, flags, probe=logs_every_second_step)
    assert [step[:2] for step in run.history] == history[1:]  # step 2 is told, step 1 is not
    same_bits(run.weights, weights, "a thinned history")


def refused(flags: str) -> str | None:
    """What one process says of these flags, in one line; None if it would begin to train."""
    line = contract.refusal(load(CHECKPOINT), 1, f"{FLAGS} {ALONE} {flags}")
    assert line is None or "\n" not in line, line
    return line


def test_what_cannot_be_resumed_is_refused(tmp_path):
    """Another model, or no checkpoint. All else may differ: length, batch, learning rate or clip."""
    folder, *_ = uninterrupted(*SAVED, 4)
    stored = dict(heads=8, theta=500000.0, rope_factor=1.0, dtype="float64", seed=0)  # shapes do not tell
    for flag, value in dict(heads=16, theta=100.0, rope_factor=8.0, dtype="float32", seed=1).items():
        wanted = f"must be {stored[flag]}, as in the checkpoint {folder}/step-4"
        assert refused(f"--{flag} {value} --checkpoint {folder}") == f"--{flag} {value}: {wanted}"
    assert refused(f"--steps 3 --checkpoint {folder}").startswith("--steps 3: must be at least 4")
    assert "--validate 2: must be 0, as in" in refused(f"--checkpoint {folder} --validate 2")
    assert "--resume step-9: there is none" in refused(f"--checkpoint {folder} --resume step-9")
    others = "--seq 32 --batch 6 --microbatches 1 --lr 1 --clip 1 --warmup 0 --steps 9 --every 3 --keep 1"
    assert refused(f"{others} --checkpoint {folder}") is None
    (tmp_path / "file").write_text("")
    assert "is no folder" in refused(f"--checkpoint {tmp_path}/file/inside")
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7-backup").mkdir()  # is none of ours
    line = refused(f"--checkpoint {tmp_path}")
    assert "is damaged" in line and "step-7/training.json" in line and "--resume" in line
    (tmp_path / "step-9.writing").write_text("")
    assert "step-9.writing must be a folder" in refused(f"--checkpoint {tmp_path}")


def test_a_smaller_model_is_refused(tmp_path):
    """... by resume itself: a trainer that pastes it has no check of the stored config."""
    folder, *_ = uninterrupted(2, TWO, 4)

    def unchecked(module):
        module.check = lambda *_: None

    with pytest.raises(RankFailed, match="has .* model.layers.2.*, the model has not; --resume"):
        launch(
            CHECKPOINT, 1, f"{FLAGS} --layers 2 {ALONE} --steps 5 --checkpoint {folder}", probe=unchecked, save=False
        )


def test_weights_that_are_infinite_are_not_written(tmp_path):
    """... by any rank, although the loss and the gradient of the last step are finite."""
    flags = f"{FLAGS} {TWO} --dtype float32 --steps 1 --warmup 0 --lr 1e39 --clip inf --checkpoint {tmp_path}/new"
    with pytest.raises(RankFailed, match="step 1 is not written, weights are inf or NaN"):
        launch(CHECKPOINT, 2, flags, save=False)
    assert not [*(tmp_path / "new").iterdir()]


HEAD = "weight lm_head.weight"


def of_a_file(change):
    """Damage a folder: change(tensors, metadata) of one of its files, and write that again."""

    def damage(folder: Path) -> None:
        path = folder / "rank-1.safetensors"
        with safe_open(path, "pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        change(tensors, metadata)
        save_file(tensors, path, metadata)

    return damage


def move_a_row_up(tensors, metadata) -> None:
    offsets = json.loads(metadata["DCP_SHARDING_INFO"])
    offsets[HEAD]["saved_offsets"][0] -= 1
    metadata["DCP_SHARDING_INFO"] = json.dumps(offsets)


def history_twice(folder: Path) -> None:
    training = json.loads((folder / "training.json").read_text())
    training["history"] *= 2
    (folder / "training.json").write_text(json.dumps(training))


DAMAGE = {
    "flip": of_a_file(lambda tensors, _: tensors[HEAD].view(torch.uint8)[0, 0].bitwise_xor_(1)),
    "move": of_a_file(move_a_row_up),
    "cut": lambda folder: os.truncate(folder / "rank-1.safetensors", 4096),
    "another step's file": lambda folder: shutil.copy(folder.parent / "step-3" / "rank-2.safetensors", folder),
    "a file twice": lambda folder: shutil.copy(folder / "rank-2.safetensors", folder / "rank-9.safetensors"),
    "no file": lambda folder: (folder / "rank-1.safetensors").unlink(),
    "a pipe": lambda folder: os.mkfifo(folder / "rank-3.safetensors"),
    "history": history_twice,
}
PLAIN = "flip", "no file"


@pytest.mark.parametrize(
    "damage",
    [pytest.param(damage, marks=() if damage in PLAIN else pytest.mark.thorough) for damage in DAMAGE],
)
def test_damage_is_noticed(damage, tmp_path, file=CHECKPOINT):
    """Each way to damage a checkpoint of two ranks ends the run with one line that says where, and what to do."""
    folder, *_ = uninterrupted(2, TWO, 4, file)
    for step in "step-3", "step-4":
        shutil.copytree(Path(folder, step), tmp_path / step)
    DAMAGE[damage](tmp_path / "step-4")
    said = "nothing"
    try:
        launch(file, 1, f"{FLAGS} {ALONE} --steps 4 --checkpoint {tmp_path}", save=False)
    except RankFailed as failure:
        said = failure.output
    assert said.count("\n") == 1 and str(tmp_path) in said and "--resume" in said, f"{damage} is not noticed: {said}"


def test_resume_goes_back_once(tmp_path, monkeypatch):
    """--resume sets aside what is newer, damaged or not. torchrun starts a run again with the same flags: it then goes
    on from the newest. A run that has ended, and another run, mean what --resume says.
    """
    folder, *_ = uninterrupted(2, TWO, 4)
    for step in 2, 3:
        shutil.copytree(Path(folder, f"step-{step}"), tmp_path / f"step-{step}")
    os.truncate(tmp_path / "step-3" / "rank-1.safetensors", 4096)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run1")
    for note, name, resumed, asides in (
        (None, "step-2", "step-2", 1),
        (None, "step-2", "step-2", 2),
        ("run0 step-2", "step-2", "step-2", 3),
        ("run1 step-2", "step-2", "step-3", 3),
        ("run1 step-1", "step-1", "step-3", 3),  # which --keep may have removed since
    ):
        if note:
            (tmp_path / "resumed").write_text(note)
        flags = f"{FLAGS} {ALONE} --steps 3 --checkpoint {tmp_path} --keep 9 --resume {name}"
        assert f"resumed from {tmp_path}/{resumed}" in launch(CHECKPOINT, 1, flags, save=False).output[0]
        assert len(list(tmp_path.glob("step-3.aside-*"))) == asides
    assert not (tmp_path / "resumed").exists()


def on_disk(module):
    """A probe: what is synced and renamed, when, and what is in the folder then."""
    events, fsync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        fsync(descriptor)
        events.append((time.monotonic(), "sync", path, []))

    def renamed(self, target):
        events.append(
            (time.monotonic(), "rename", str(self), [str(p) for of in (self, self.parent) for p in of.iterdir()])
        )
        return rename(self, target)

    os.fsync, Path.rename = synced, renamed
    return lambda: events


def test_it_is_on_disk_before_it_counts(tmp_path):
    """A power cut at any time leaves a whole checkpoint: files, then their names, then the name of the folder, and only
    then the one before is removed."""
    run = launch(CHECKPOINT, 2, f"{FLAGS} {TWO} --steps 3 --keep 1 --checkpoint {tmp_path}", probe=on_disk, save=False)
    synced, removed = set(), 0
    for _, kind, path, there in sorted(event for rank in run.probes for event in rank):
        if kind == "sync":
            synced.add(path)
        elif path.endswith(".writing"):
            files = [name for name in there if name.startswith(f"{path}/")]
            assert len(files) == 3 and {*files, path} <= synced, f"{path} gets its name before it is on disk"
            synced.discard(str(tmp_path))
        else:
            newer = f"{path[:-1]}{int(path[-1]) + 1}"
            assert newer in there and str(tmp_path) in synced, f"{path} is removed before the next one is on disk"
            removed += 1
    assert removed == 2


def slow_disk(module):
    """A probe: the first rank makes folders late, and every thread begins to write late, but earlier than that."""
    mkdir, submit = Path.mkdir, module.ThreadPoolExecutor.submit

    def mkdir_late(self, *arguments, **options):
        time.sleep(2 * (self.suffix == ".writing" and os.environ["RANK"] == "0"))
        return mkdir(self, *arguments, **options)

    def submit_late(self, work, *arguments):
        return submit(self, lambda: (time.sleep(1), work(*arguments))[1])

    Path.mkdir, module.ThreadPoolExecutor.submit = mkdir_late, submit_late


@pytest.mark.thorough
def test_a_slow_disk_changes_nothing(tmp_path):
    """Ranks wait for the folder; what is written is the training as it was when it was copied."""
    flags = f"{FLAGS} {TWO} --every 2 --steps 4 --keep 9 --checkpoint {tmp_path}"
    folder, weights, _ = uninterrupted(2, TWO, 4)
    same_bits(launch(CHECKPOINT, 2, flags, probe=slow_disk).weights, weights, "a slow disk")
    for step in (2, 4):
        kept = json.loads((tmp_path / f"step-{step}" / "training.json").read_text())
        assert kept["step"] == step == len(kept["history"]), f"of {step} steps, {len(kept['history'])} are told"
        same_bits(content(tmp_path / f"step-{step}"), content(f"{folder}/step-{step}"), f"step {step} is written late")


def test_two_runs_do_not_write_one_checkpoint(tmp_path):
    """The folder that another run has begun to write is not written into."""

    def another_run(module):
        snapshot = module.snapshot
        module.snapshot = lambda *given: (tmp_path / "step-1.writing").mkdir() or snapshot(*given)

    with pytest.raises(RankFailed, match="File exists"):
        launch(CHECKPOINT, 1, f"{FLAGS} {ALONE} --steps 1 --checkpoint {tmp_path}", probe=another_run, save=False)
