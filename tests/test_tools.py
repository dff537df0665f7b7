"""The tools end with one line where they cannot work, and neither write nor read where others may."""

import json
import os
import sys
import tempfile

import bench
import compare
import launch
import mutation
import pytest
import torch
from safetensors.torch import save_file


def said(monkeypatch, tool, words: str):
    """Run a tool with these flags; return its exit code or last line."""
    monkeypatch.setattr(sys, "argv", [tool.__name__, *words.split()])
    with pytest.raises(SystemExit) as stop:
        tool.main()
    return stop.value.code


def test_folders_of_others(tmp_path, monkeypatch):
    """launch.own_folder refuses links, and folders that others may write to: files in it are run and unpickled."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = launch.own_folder()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="set TMPDIR"):
        launch.own_folder()
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    (tmp_path / "other").chmod(0o700)
    with pytest.raises(PermissionError, match="set TMPDIR"):
        launch.own_folder()


@pytest.mark.parametrize(
    "shape, history, words, problem",
    [
        ([3], [[0, 2, 0]], "", "loss of step 1 is off by inf, allowed are 1e-10"),
        ([3], [[1, 2, 0]] * 2, "", "1 steps against 2"),
        ([3], [[1]], "", "its history must be a list of [loss, gradient norm, seconds]"),
        ([3], {}, "--start {}/other", "a has another shape before training"),
        ([4], [[1, 2, 0]], "", "names or shapes differ: "),
        ([0], [[1, 2, 0]], "--start {}/pipe", "pipe: is not a file"),
        (None, [[1, 2, 0]], "", "names or shapes differ: "),
    ],
)
def test_files_that_cannot_be_compared(tmp_path, monkeypatch, shape, history, words, problem):
    os.mkfifo(tmp_path / "pipe")
    save_file({"a": torch.ones(4)}, tmp_path / "other")
    save_file({"a": torch.ones(3)}, tmp_path / "ours", {"history": "[[1, 2, 0]]"})
    weights = {} if shape is None else {"a": torch.ones(shape)}
    save_file(weights, tmp_path / "reference", {"history": json.dumps(history)})
    code = said(monkeypatch, compare, f"{tmp_path}/ours {tmp_path}/reference {words.format(tmp_path)}")
    assert problem in code and "\n" not in code


def test_suites_that_cannot_run(monkeypatch):
    for gpus, words, problem in (
        (1, "nosuite", "nosuite: must be of single, "),
        (1, "memory zero", "memory: must be of single, "),
        (0, "single", "torch finds no GPU: "),
        (1, "zero", "zero: 4 GPUs are wanted, here are 1: "),
        (1, "single --rounds 0", "--rounds 0: must be at least 1"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert said(monkeypatch, bench, words).startswith(problem)


def test_folders_without_bugs(monkeypatch):
    """They end before the stored rows are written."""
    assert said(monkeypatch, mutation, "02_data_parallel/").startswith("02_data_parallel/: must be of 01_single_gpu")
