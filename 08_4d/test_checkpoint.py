"""Checkpoints: equal to the bit in every layout, whole or not there, whoever is killed and whenever."""

import functools
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import compare
import contract
import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import RankFailed, launch, load, once, run_folder
from safetensors import safe_open

CHECKPOINT, TRAIN = "08_4d/checkpoint.py", "08_4d/train.py"
# uneven layers, key heads that ranks of tp share, a vocabulary that tp does not divide, units with padding
SIZES = "--device cpu --dtype float64 --layers 3 --dim 32 --heads 8 --kv_heads 2 --ffn 48 --vocab 259 --seq 16"
FLAGS = f"{SIZES} --batch 12 --microbatches 2 --warmup 1 --lr 1e-2 --clip 0.5 --every 1"
SAVED = 4, "--dp 1 --cp 1 --tp 4 --pp 1"  # two ranks of tp hold the same key heads
TWO, ALONE = "--dp 2 --cp 1 --tp 1 --pp 1", "--dp 1 --cp 1 --tp 1 --pp 1"
THREE = pytest.param(6, "--dp 3 --cp 1 --tp 1 --pp 2", marks=pytest.mark.thorough)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # as content() reads alone


def content(folder: Path | str) -> dict[str, torch.Tensor]:
    """All full tensors of a checkpoint, as torch's own reader puts them together; NaN where no file has any."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    whole = {name: torch.full(about.size, torch.nan, dtype=about.properties.dtype) for name, about in stored.items()}
    dcp.load(whole, storage_reader=reader, no_dist=True)
    return whole


same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)  # names, sizes, dtypes and values


@once
def uninterrupted(world: int, layout: str, file: str = CHECKPOINT) -> tuple[str, dict[str, torch.Tensor], list]:
    """Four steps without an interruption: the folder of their checkpoints, the weights and [loss, norm] per step."""
    folder = tempfile.mkdtemp(dir=run_folder())
    run = launch(file, world, f"{FLAGS} {layout} --steps 4 --checkpoint {folder} --keep 4")
    return folder, run.weights, [step[:2] for step in run.history]


def slow_disk(module):
    """A probe: every thread begins to write late."""
    write_files = module.write_files

    def late(*arguments):
        time.sleep(0.3)
        write_files(*arguments)

    module.write_files = late


def check_resumed(world: int, flags: str, tmp_path: Path, file: str = CHECKPOINT) -> None:
    """Resume in another layout, on a slow disk: all is as in a run that went on, and as it was when it was copied."""
    folder, _, history = uninterrupted(*SAVED)
    shutil.copytree(Path(folder, "step-2"), tmp_path / "step-2")
    run = launch(file, world, f"{FLAGS} {flags} --steps 4 --checkpoint {tmp_path} --keep 9", slow_disk)
    compare.assert_close(compare.history_errors(run.history, history), 1e-10, f"two more steps in {flags}")
    for step in "step-3", "step-4":
        errors = compare.relative_errors(content(tmp_path / step), content(f"{folder}/{step}"))
        compare.assert_close(errors, 1e-10, f"{step} in {flags}")


@pytest.mark.parametrize("world, layout", [(4, "--dp 1 --cp 2 --tp 2 --pp 1"), THREE])
def test_resumes_in_any_layout(world, layout, tmp_path):
    check_resumed(world, layout, tmp_path)


def test_masters_are_kept_in_full(tmp_path):
    """In bfloat16 the fp32 master weights are written, and a resumed run is the same to the bit."""
    world, layout = 2, f"{TWO} --dtype bfloat16"
    folder, weights, history = uninterrupted(world, layout)
    shutil.copytree(Path(folder, "step-2"), tmp_path / "step-2")
    run = launch(CHECKPOINT, world, f"{FLAGS} {layout} --steps 4 --checkpoint {tmp_path}")
    same(run.weights, weights)
    assert [step[:2] for step in run.history] == history
    assert {tensor.dtype for tensor in content(tmp_path / "step-4").values()} == {torch.float32}


def test_a_checkpoint_holds_the_training(tmp_path):
    """Weights, which are train.py's, moments and history; files are safetensors and JSON. Without a step left, too."""
    folder, weights, history = uninterrupted(*SAVED)
    stored = content(f"{folder}/step-4")
    same({name: stored[f"weight {name}"] for name in weights}, weights)
    kinds = "weight", "exp_avg", "exp_avg_sq"
    assert stored.keys() == {f"{kind} {name}" for kind in kinds for name in weights}
    kept = json.loads(Path(folder, "step-4", "training.json").read_text())
    assert kept["step"] == 4 and [step[:2] for step in kept["history"]] == history
    same(launch(TRAIN, SAVED[0], f"{FLAGS.replace('--every 1', '')} {SAVED[1]} --steps 4").weights, weights)
    shutil.copytree(Path(folder, "step-4"), tmp_path / "step-4")
    same(launch(CHECKPOINT, 1, f"{FLAGS} {ALONE} --steps 4 --checkpoint {tmp_path}").weights, weights)
    for path in set(Path(folder, "step-4").iterdir()) - {Path(folder, "step-4", "training.json")}:
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"  # else Hugging Face's libraries refuse it


def test_only_the_newest_are_kept(tmp_path):
    """By number: step-8 is older than step-10. Steps with a checkpoint are multiples of --every, and the last one."""
    for steps, first, names in (3, 1, ["step-2", "step-3"]), (11, 4, ["step-10", "step-11"]):
        flags = f"{FLAGS} {ALONE} --every 2 --keep 2 --steps {steps} --checkpoint {tmp_path}"
        (output,) = launch(CHECKPOINT, 1, flags, save=False).output
        assert re.search(r"step (\d+)  loss", output)[1] == str(first), output
        found = sorted(path.name for path in tmp_path.iterdir())
        assert found == names, f"there are {found}"


def test_goes_on_after_a_kill(tmp_path):
    """From the newest whole checkpoint that the first rank sees. What a kill has left is removed."""

    def old_list(module):  # as of another node, on a network's file system
        whole, last = module.whole, os.environ["RANK"] == "1"
        module.whole = lambda cfg: whole(cfg)[: 1 if last else None]

    folder, weights, _ = uninterrupted(2, TWO)
    for step, name in (1, "step-1"), (2, "step-2"), (4, "step-3.writing"), (4, "step-0.removing"):
        shutil.copytree(Path(folder, f"step-{step}"), tmp_path / name)
    same(launch(CHECKPOINT, 2, f"{FLAGS} {TWO} --steps 4 --checkpoint {tmp_path} --keep 9", old_list).weights, weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{i}" for i in (1, 2, 3, 4)]


def full_disk(module):
    def save_file(*_):
        raise OSError("no space left on device")

    if os.environ["RANK"] == "1":
        module.save_file = save_file


def another_run(module):
    """A probe: another run begins to write this checkpoint."""
    snapshot, name = module.snapshot, "step-1.writing"
    module.snapshot = lambda *given: Path(given[0].checkpoint, name).mkdir(exist_ok=True) or snapshot(*given)


def test_what_cannot_be_written_does_not_count(tmp_path, file=CHECKPOINT):
    """The run ends with the reason. Weights may be infinite although the loss and the gradient before are finite."""
    infinite = "--dtype float32 --steps 1 --lr 1e39 --warmup 0 --clip inf"
    for probe, flags, reason in (
        (None, infinite, "weights are inf or NaN"),
        (full_disk, "", "no space left on device"),
        (another_run, "", "File exists"),
    ):
        with pytest.raises(RankFailed, match=reason):
            launch(file, 2, f"{FLAGS} {TWO} --steps 5 --checkpoint {tmp_path} {flags}", probe=probe, save=False)
    names = " ".join(path.name for path in tmp_path.iterdir())
    assert names == "step-1.writing", f"there are {names}"


def refused(flags: str) -> str | None:
    """What one process says of these flags, in one line; None if it would begin to train."""
    line = contract.refusal(load(CHECKPOINT), 1, f"{FLAGS} {ALONE} {flags}")
    assert line is None or "\n" not in line, line
    return line


def test_what_cannot_be_resumed_is_refused(tmp_path):
    """Another model, or no checkpoint. All else may differ: length, batch, learning rate or clip."""
    folder, *_ = uninterrupted(*SAVED)
    stored = dict(heads=8, theta=500000.0, rope_factor=1.0, dtype="float64", seed=0, validate=0)  # shapes do not tell
    others = dict(heads=16, theta=100.0, rope_factor=8.0, dtype="float32", seed=1, validate=2)
    bad = {f"--{flag} {value}": f"must be {stored[flag]}, as in " for flag, value in others.items()}
    bad |= {"--steps 3": "--steps 3: must be at least 4", "--resume step-9": "--resume step-9: there is none"}
    bad["--layers 2"] = "--layers 2: must be 3, as in "
    for flags, words in bad.items():
        assert words in refused(f"{flags} --checkpoint {folder}"), flags
    others = "--seq 32 --batch 6 --microbatches 1 --lr 1 --clip 1 --warmup 0 --steps 9 --every 3 --keep 1"
    assert refused(f"{others} --checkpoint {folder}") is None
    (tmp_path / "step-7").mkdir()
    line = refused(f"--checkpoint {tmp_path}")
    assert "is damaged" in line and "step-7/training.json" in line and "--resume" in line


def replaced(name: str, old: bytes, new: bytes):
    """Damage a folder: replace bytes of one of its files."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new))

    return damage


FIRST, SECOND = "rank-1.safetensors", "rank-2.safetensors"
DAMAGE = {
    "zeros": lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-8] + bytes(8)),
    "moved": replaced(SECOND, b"[129, 0]", b"[128, 0]"),  # rows of the embedding, and of the head
    "another step's file": lambda folder: shutil.copy(folder.parent / "step-3" / SECOND, folder),
    "a file twice": lambda folder: shutil.copy(folder / SECOND, folder / "rank-9.safetensors"),
    "a pipe": lambda folder: os.mkfifo(folder / "rank-3.safetensors"),
    "no file": lambda folder: (folder / FIRST).unlink(),
    "history": replaced("training.json", b'"history": [', b'"history": [[9, 9, 9], '),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed(name, tmp_path, file=CHECKPOINT):
    """Each way to damage a checkpoint of two ranks ends resume with one line that says where, and what to do."""
    folder, *_ = uninterrupted(2, TWO, file)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    DAMAGE[name](tmp_path / "step-4")
    said = ""
    try:
        launch(file, 1, f"{FLAGS} {ALONE} --steps 4 --checkpoint {tmp_path}", save=False)
    except RankFailed as failure:
        said = failure.output
    assert said.count("\n") == 1 and f"{tmp_path}/step-4" in said and "--resume" in said, f"not noticed: {said}"


def test_resume_goes_back_once(tmp_path, monkeypatch):
    """--resume sets aside what is newer, damaged or not. The same run, started again, goes on from the newest."""
    folder, *_ = uninterrupted(2, TWO)
    for step in 2, 3:
        shutil.copytree(Path(folder, f"step-{step}"), tmp_path / f"step-{step}")
    os.truncate(tmp_path / "step-3" / "rank-1.safetensors", 4096)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run1")
    for note, name, resumed, asides in (
        (None, "step-2", "step-2", 1),
        (None, "step-2", "step-2", 2),
        ("run0 step-2", "step-2", "step-2", 3),
        ("run1 step-1", "step-1", "step-3", 3),  # which --keep may have removed since
    ):
        if note:
            (tmp_path / "resumed").write_text(note)
        flags = f"{FLAGS} {ALONE} --steps 3 --checkpoint {tmp_path} --keep 9 --resume {name}"
        assert f"resumed from {tmp_path}/{resumed}" in launch(CHECKPOINT, 1, flags, save=False).output[0]
        assert len(list(tmp_path.glob("step-3.aside-*"))) == asides
    assert not (tmp_path / "resumed").exists()


def test_it_is_on_disk_before_it_counts(tmp_path):
    """A power cut at any time leaves a whole checkpoint: its files, then its name, and only then the old one goes."""

    def disk(module):
        done, fsync, rename = [], os.fsync, Path.rename

        def sync(descriptor):
            fsync(descriptor)
            done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

        os.fsync, Path.rename = sync, lambda path, target: done.append(f"rename {path.name}") or rename(path, target)
        return lambda: done

    flags = f"{FLAGS} {ALONE} --steps 2 --keep 1 --checkpoint {tmp_path}"
    names = ["rank-1.safetensors", "training.json"]
    first, second = ([*names, f"step-{i}.writing", f"rename step-{i}.writing", tmp_path.name] for i in (1, 2))
    assert launch(CHECKPOINT, 1, flags, probe=disk, save=False).probes[0] == [*first, *second, "rename step-1"]
