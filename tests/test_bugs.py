"""Each test must be able to fail: every bug of the folders' `bugs.diff` turns the check red that it names.

Several were shipped by others. Losses under AdamW show none of those that only scale the gradient, which is why
equivalence.py compares gradients.
"""

import contextlib
import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import contract
import equivalence
import launch as launching
import mutation
import probes
import puzzle
import pytest
import recipes
import schedules
import torch
from equivalence import ROOT_RECIPE
from launch import RankFailed, launch, load
from mutation import Bug, bugs, mutate
from test_lineage import FAMILY, TRAINING

BUGS = bugs()
ON_GPUS = {"09_kernels/flash_attention_gluon.py"}  # has no interpreter: its check runs on GPUs alone
BALANCED = "is off by|the load differs|biases are not"
pytestmark = pytest.mark.thorough


def equal(bug: Bug, file: str, modes: tuple[str, ...] = ("gradient",)) -> None:
    """Compare with the root: in simulated streams if the bug names them, compiled by the first half of the compiler.

    Two layers where each takes long, as it is traced or interpreted.
    """
    compiled = bug.seen.startswith("compiled")
    flags = bug.flags + " --compile" * compiled + " --layers 2" * (compiled or bug.recipe == recipes.KERNELS)
    equivalence.check(file, bug.world, flags, equivalence.root_of(bug.recipe), mutation.probe_of(bug), modes)


def held(world: int, file: str) -> None:
    """Two blocks, one other unit, and none between the steps have their weights in memory."""
    run = launch(file, world, f"{contract.SMALL} --steps 2", probe=probes.gathered_at_a_time)
    assert run.probes == [[2, 1, 0]] * world, "weights are held"


def in_flight(file: str) -> None:
    """Two gradients, and the one that is being sent, are in memory at a time."""
    flags = f"{contract.SMALL} --microbatches 8 --steps 1"
    assert launch(file, 4, flags, probe=probes.gradients_in_flight).probes == [0, 3, 3, 3], "gradients are held"


def right_schedule(file: str) -> None:
    """The schedule is what the recipe's header says."""
    schedules.check(load(file), [(4, 8)])


# What sees a bug: a check, what it must say, and arguments of its own. All others it gets by the names of its
# parameters: `file` is the one with the bug; `recipe`, `world` and `flags` are the bug's.
Check = tuple[Callable[..., None], str] | tuple[Callable[..., None], str, dict[str, object]]
SEES: dict[str, Check] = {
    "one step": (equal, "is off by|(loss|norm) nan"),
    "refused": (equal, "a unit has a .grad|a unit is summed over the replicas"),
    "four steps": (equal, "is off by", {"modes": ["training"]}),
    "lengths": (equal, "document lengths must fill"),
    "late": (equal, "is off by|exit code -11|has waited for|was let go|does not wait|has changed while"),
    "compiled, late": (equal, "is off by|has waited for"),
    "compiled, at once": (equal, "is off by"),
    "freed": (equal, "storage of size 0|has no attribute 'wait'"),
    "sizes of halves": (equal, "is off by|shape|[sS]plit|has no attribute 'wait'"),
    "held": (held, "weights are held"),
    "in flight": (in_flight, "gradients are held"),
    "schedule": (right_schedule, ""),
    **{promise: (check, "") for promise, check in contract.CHECKS.items()},
}
# The same by the names of functions, most of them tests of the folders that can run another file.
IN_FILES = {
    "tests/simulation.py": {"simulation": ("check", "is off by")},
    "tests/witness.py": {
        "transformers": (
            "check",
            "is off by|names or shapes",
            {"rope": "--theta 10000 --rope_factor 32 --seq 512 --batch 2"},
        ),
        "transformers, experts": ("check", "is off by", {"experts": "--experts 8 --top_k 2"}),
        "transformers, tied": ("check", "is off by|names or shapes", {"tied": True}),
    },
    "01_single_gpu/test_muon.py": {
        "torch's Muon": ("test_trains_as_with_torchs_muon", "is off by|nan"),
        "singular values": ("test_orthogonalise", "singular", {"dtype": "float64", "low": 0.68, "high": 1.21}),
        "FLOPs": ("test_flops", "the FLOPs are others", {"shape": (60, 16)}),
        "loaded state": ("test_state_can_be_loaded", "the state that was loaded is another|KeyError"),
    },
    "01_single_gpu/test_document_mask.py": {
        "documents alone": ("test_equals_each_document_alone", "is off by|document lengths must fill"),
        "end of a document": ("test_end_of_a_document_in_a_file_of_ids", "a token after --eos is predicted"),
        "lengths that cross rows": (
            "test_lengths_that_do_not_fill_rows",
            "that do not fill the rows are taken",
            {"lengths": [10, 12, 10]},
        ),
        "one kernel": ("test_one_kernel_for_all_documents", "other (ends|arguments|results)"),
    },
    "01_single_gpu/test_lora.py": {
        "merged weights": ("test_trains_inside_merged_weights", "is off by|at 0|another variance|the same A"),
        "PEFT": ("test_what_peft_reads", "is off by|the config is|have an adapter|target modules|\\[|do not require"),
        "frozen weights": ("test_frozen_weights_take_two_bytes", "other dtypes|merged in 16 bits"),
    },
    "01_single_gpu/test_single_gpu.py": {
        "untied file": ("test_an_untied_file_is_refused", "it is accepted"),
        "printed validation": ("test_printed_every_n_steps", "not the loss of the evaluation"),
    },
    "01_single_gpu/test_memory.py": {
        "one chunk": ("test_logits_of_one_chunk", "logits of an earlier chunk are held"),
    },
    "02_data_parallel/test_data_parallel.py": {
        "views of gradients": ("test_a_gradient_that_backward_still_reads", "while it is read"),
    },
    "02_data_parallel/test_hang.py": {
        "who did not come": (
            "test_says_who_what_and_where",
            "DID NOT RAISE|says something|another exit code|a rank ends before",
            {"hang": "size"},
        ),
        "who leaves": (
            "test_says_who_what_and_where",
            "says something|another exit code|hang|a rank ends before",
            {"hang": "raise"},
        ),
        "who is late": ("test_waits_for_a_while", "says something|Wait timeout"),
        "groups": ("test_groups_count_for_themselves", "other numbers|keys are kept|Wait timeout|hang|exit code 1"),
    },
    "03_zero/test_zero.py": {
        "balance": ("test_newton_schulz_is_balanced", "the work is not balanced"),
        "freed in flight": ("test_a_gather_ends_before_its_memory_is_freed", "it is not waited for"),
        "frozen shards": (
            "test_frozen_weights_are_gathered_and_never_reduced",
            "bytes beside|weights are held|other weights",
        ),
    },
    "05_context_ring/test_context.py": {
        "attention in bfloat16": (
            "test_attention_rounds_once_and_never_overflows",
            "rounded more than once|exponentials overflow",
        ),
        "earlier micro-batches": ("test_a_weight_that_an_earlier_micro_batch_used", "it is not summed"),
        "scores in memory": ("test_scores_of_one_pair_of_blocks_are_in_memory", "scores of more than one pair"),
    },
    "05_context_ring/test_documents.py": {
        "whole parts": ("test_whole_parts", "other pieces"),
        "kernels": ("test_kernels_get_what_plain_matmuls_get", "other (results|sizes|kernels)"),
    },
    "06_pipeline/test_pipeline.py": {
        "communicators": ("test_communicators", ""),
        "casts": ("test_casts_are_those_of_the_newest_weights", "the loss is"),
        "memory": (
            "test_memory_and_messages",
            "gradients are held|a message of an evaluation|more than the operands",
        ),
    },
    "07_expert/test_balance.py": {
        "auxiliary": ("check_auxiliary_loss", BALANCED, {"modes": ["GRADIENT"]}),
        "bias": ("check_bias", BALANCED),
    },
    "07_expert/test_capacity.py": {
        "capacity": ("check_scarce", "is off", {"capacity": 0.5, "modes": [equivalence.GRADIENT]}),
    },
    "07_expert/test_expert.py": {
        "router": ("test_router_keeps_close_scores_apart", "close scores are confused"),
        "rounding": ("test_unpermute_rounds_once", "rounded more than once"),
        "gates": ("test_gates_are_not_rounded", "gates are rounded"),
        "empty experts": ("test_grouped_matmul", "is off by", {"dtype": "float64"}),
        "share": ("test_bytes_sent_and_held", "other rows are sent|not 1/ep", {"edp": 1}),
        "load": ("test_busiest_expert", "the load is"),
    },
    "07_expert/test_node_limited.py": {
        "DeepSeek's layer": ("test_computes_what_transformers_computes", "is off by", {"shared": 1}),
        "once per node": ("test_a_token_crosses_once_per_node", "other (rows|gradients) cross|gates are rounded"),
        "compiled": ("test_no_all_to_all_is_compiled", "would be compiled", {"name": "node_limited"}),
    },
    "07_expert/test_overlap.py": {
        "turns": ("test_halves_take_turns", "transfers without computation"),
        "late ranks": ("check_late_ranks", "is off by|IndexError|out of bounds|No such file|Connection closed by peer"),
        "too few slots": ("test_too_few_slots", "is off by|out of bounds|IndexError"),
        "bytes written": ("test_bytes_written", "old memory is still held"),
        "kernel": ("test_kernel", "the kernel has"),
    },
    "08_4d/test_checkpoint.py": {
        "resumed": ("check_resumed", "is off by|differ|has not each row"),
        "half written": ("test_what_went_wrong_is_said", r"there are \['step-1'"),
        "place of a part": ("test_damage_is_noticed", "is not noticed", {"damage": "move"}),
        "missing file": ("test_damage_is_noticed", "is not noticed", {"damage": "no file"}),
    },
    "08_4d/test_mesh.py": {
        "load on a mesh": ("test_busiest_expert", "the root's load is"),
        "gradients rounded once": ("test_gradients_are_rounded_once", "rounded"),
        "edges": ("test_impossible_layouts", "an odd length is refused", {"ep": ""}),
        "stages": ("test_stages_share_what_they_must", "share communicators|are not waited for"),
    },
    "09_kernels/test_kernels.py": {
        "check": ("test_check", "times PyTorch's|differ|does not touch|does not copy|has crashed|Error"),
        "small programs": ("test_many_small_programs", "the error is"),
        "written over": ("test_swiglu_writes_over_its_inputs", "DID NOT RAISE|memory"),
        "logits written over": ("test_cross_entropy_writes_over_the_logits", "DID NOT RAISE|memory"),
        "rotated in place": (
            "test_rope_rotates_in_place_and_leaves_the_gradient_alone",
            "DID NOT RAISE|memory|rotated twice|has changed the gradient",
        ),
        "targets": ("test_targets_of_cross_entropy", ""),
        "second derivatives": ("test_gradients_of_gradients_are_refused", "DID NOT RAISE"),
        "autocast": ("test_autocast_does_not_reach_swiglu", "dtype"),
        "wide head": ("test_large_sizes_of_cross_entropy", "errors of"),
        "no_grad": ("test_linear_cross_entropy_without_gradients", "made"),
        "sums in float32": ("test_linear_cross_entropy_adds_up_in_float32", "sums over chunks are rounded"),
    },
    "09_kernels/test_fused_step.py": {
        "steps": ("test_equals_torch", "differs from torch's", {"clip": 0.5}),
        "masters": ("test_masters", "AssertionError"),
        "loaded masters": ("test_loaded_weights_are_not_undone", "DID NOT RAISE"),
        "unfit parameters": ("test_what_the_optimizer_cannot_step", "DID NOT RAISE|has crashed"),
        "start of training": (
            "test_training_starts_from_what_is_not_rounded",
            "rounded weights are saved|masters are rounded",
        ),
        "dtypes side by side": ("test_dtypes_side_by_side", "the norm is another|differs from torch's"),
    },
    "09_kernels/test_matmul.py": {
        "small tiles": ("test_small_tiles", "the error is"),
        "small groups": ("test_small_groups", "the error is"),
        "copies": ("test_operands_are_not_copied", "operands were copied"),
        "layouts of groups": ("test_groups_in_any_layout", "offsets|must be contiguous"),
        "neighbours": ("test_experts_do_not_see_each_other", "other experts has changed"),
    },
    "09_kernels/test_flash_attention.py": {
        "small blocks": ("test_many_small_blocks", "the error is", {"m": 16, "n": 32, "causal": True}),
        "rows that see nothing": ("test_rows_that_see_nothing", "rows"),
        "other strides": ("test_other_strides_are_right", "16-byte aligned|a view"),
        "views": ("test_views_are_not_copied", "copied|side by side"),
    },
    "09_kernels/test_fp8_matmul.py": {
        "small fp8 tiles": ("test_small_tiles", "errors of"),
        "empty fp8": ("test_nothing_to_multiply", "wise"),
        "fp8 rounding": ("test_every_bfloat16_is_rounded", "same"),
        "fp8 linear": ("test_linear", "the error is", {"kind": "blocks"}),
    },
    "10_mixed_precision/test_masters.py": {
        "rounded masters": ("test_weights_are_rounded_masters", "not its rounded|is rounded"),
        "loaded weights": ("test_what_the_optimizer_would_undo_is_refused", "DID NOT RAISE"),
        "autocast's gradient": ("test_gradient_is_that_of_autocast", "differ from autocast's"),
        "norm in fp32": ("test_norm_and_clip_round_nothing", "norm", {"dtype": torch.bfloat16}),
        "overflow": ("test_overflow_skips_the_step_and_halves_the_scale", "in a skipped step|good steps"),
    },
    "10_mixed_precision/test_fp8.py": {
        "products": ("test_products_are_those_of_quantized_operands", "is off by"),
        "diverged": ("test_zeros_and_what_has_diverged", "is not seen|make inf or NaN"),
        "newest weights": ("test_forward_has_the_newest_weights", "weights in fp8 are"),
        "unnoticed": ("test_what_would_not_be_in_fp8_is_noticed", "keeps a weight alive"),
        "linears in fp8": ("test_all_linears_of_the_blocks_and_nothing_else", r"isinstance|7 \* cfg.layers"),
        "history": ("test_scales_follow_the_history", "scales for amax|another history"),
        "beyond the history": ("test_what_exceeds_the_history", "becomes"),
        "cast kernel": ("test_kernel_in_the_interpreter", "differs|amax"),
        "graphs": ("test_no_graph_outlives_its_micro_batch", "still there"),
    },
    "10_mixed_precision/test_fp8_zero3.py": {
        "micro-batches of one GPU": ("test_ranks_compute_what_micro_batches_of_one_gpu_do", "is off by|cuBLAS"),
        "bytes of weights": ("test_bytes_that_are_sent_and_held", "bytes held"),
        "old weights": ("test_misuse_is_noticed", "DID NOT RAISE", {"how": 0}),
        "streams of fp8": ("test_whenever_streams_get_to_it", "is off by|exit code -11", {"when": "late"}),
    },
    "10_mixed_precision/test_stochastic_rounding.py": {
        "every chance": ("test_every_chance_counts", "round up, not|have become|a NaN is lost"),
        "other steps": ("test_each_step_rounds_fairly_and_otherwise", "in another step"),
        "bits of an update": ("test_an_update_rounds_each_element_by_its_index", "not rounded by"),
        "keys": ("test_no_two_tensors_share_a_key", "different ones"),
        "independent bits": ("test_bits_are_independent", "standard deviations"),
        "sums of micro-batches": ("test_sums_of_micro_batches_are_fp32", "the sum is off by"),
        "six bytes": ("test_bytes_between_steps", "bytes per parameter"),
        "computed again": ("test_no_matmul_is_computed_again", r"\d+ matmuls|\d+ casts"),
    },
}


def check_that_sees(bug: Bug) -> Check:
    """The check of a bug, as SEES or IN_FILES have it."""
    for path, tests in IN_FILES.items():
        if bug.seen in tests:
            name, *rest = tests[bug.seen]
            return getattr(load(path), name), *rest
    assert bug.seen in SEES, f"{bug.where}: no check is called {bug.seen!r}"
    return SEES[bug.seen]


@pytest.mark.parametrize("bug", BUGS, ids=[f"{bug.recipe}: {bug.what}" for bug in BUGS])
def test_a_bug_is_seen(bug, tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "IMPATIENT", True)
    check, words, *own = check_that_sees(bug)
    file, parameters = mutate(bug, tmp_path), inspect.signature(check).parameters
    folder = tmp_path / "empty"
    folder.mkdir()
    given = {"bug": bug, "recipe": bug.recipe, "file": file, "world": bug.world, "flags": bug.flags}
    given |= {"form": bug.flags, "tmp_path": folder}
    if "file" not in parameters:  # then the file with the bug is the recipe
        given["recipe"] = file
    arguments = {name: given[name] for name in parameters if name in given} | dict(*own)
    with pytest.raises((AssertionError, RankFailed, TimeoutError, schedules.Deadlock)) as seen:
        check(**arguments)
    words = words.replace("is off by", r"is off by|step \d+: loss \S+ gradient norm (nan|inf)")  # which ends the run
    assert re.search(words, str(seen.value)), f"red for another reason: {seen.value}"


@pytest.mark.parametrize("waits", [True, False])
def test_a_hang_is_noticed(waits, tmp_path, monkeypatch):
    """Ranks that wait for each other are given up long before the timeout; a rank that computes for as long is not."""
    monkeypatch.setattr(launching, "IMPATIENT", True)
    monkeypatch.setattr(launching, "HANGS", 1.0)
    wait = "dist.recv(torch.zeros(1), 1 - dist.get_rank())"
    compute = "end = time.time() + 4 * dist.get_rank()\n    while time.time() < end:\n        pass\n    dist.barrier()"
    body = f"dist.init_process_group('gloo')\n    {wait if waits else compute}"
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"import time, torch\nimport torch.distributed as dist\n\n\ndef main():\n    {body}\n")
    with pytest.raises(TimeoutError, match="hang") if waits else contextlib.nullcontext():
        launch(recipe, 2, save=False)


def test_the_log_does_not_see_the_scale(tmp_path):
    """picotron's bug: gradients as many times too large as there are tokens, and the loss of step 1 is right."""
    bug = next(bug for bug in BUGS if "divided for the log" in bug.what)
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} {equivalence.GRADIENT}"
    right = launch(bug.recipe, bug.world, f"{flags} {bug.flags}").history[0]
    wrong = launch(mutate(bug, tmp_path), bug.world, f"{flags} {bug.flags}").history[0]
    assert abs(wrong[0] / right[0] - 1) < 1e-14 and wrong[1] > 100 * right[1]


@pytest.mark.thorough
def test_puzzle(capsys, monkeypatch):
    """It shows both runs; hints name the wrong gradients and the definition; the answer has the line."""

    def said(words: str) -> str:
        monkeypatch.setattr("sys.argv", ["puzzle.py", *words.split()])
        puzzle.main()
        return capsys.readouterr().out

    recipe = "02_data_parallel/naive.py"
    names = [bug.what for bug in puzzle.puzzles() if bug.recipe == recipe]
    number = next(i for i, what in enumerate(names, 1) if "averages" in what)
    told = said(f"{recipe} {number}")
    steps = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", told, re.M)
    assert len(steps) == 10 and steps[0][0] == steps[0][1] and float(steps[0][2]) > 1.5 * float(steps[0][3])
    folder = Path(re.search(r"Find it in (\S+)/", told)[1])
    assert folder.stat().st_mode & 0o777 == 0o700, "others may write there"
    shutil.rmtree(folder)
    assert re.search(r"(\d+) of \1 gradients are wrong", said(f"{recipe} {number} --hint 1"))
    assert "in forward_backward." in said(f"{recipe} {number} --hint 2")
    assert names[number - 1] in (revealed := said(f"{recipe} {number} --reveal")) and "\n+" in revealed
    with pytest.raises(SystemExit, match="are 1 to"):
        said(f"{recipe} 0")


def test_every_recipe_has_its_bug():
    """Each training recipe, and each file of kernels that a CPU can run."""
    kernels = {path for path, recipe in FAMILY.items() if "@triton.jit" in recipe.source} - ON_GPUS
    assert {bug.recipe for bug in BUGS} == {*TRAINING, *kernels} and ROOT_RECIPE in TRAINING


def test_bugs_have_names_of_their_own():
    """... in their recipe: the stored measurements are found by them."""
    names = [(bug.recipe, bug.what) for bug in BUGS]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
