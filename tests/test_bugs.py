"""Each test must be able to fail: every bug of the folders' `bugs.diff` turns the check red that it names.

Several were shipped by others. Losses under AdamW show none of those that only scale the gradient, which is why
equivalence.py compares gradients.
"""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import contract
import equivalence
import launch as launching
import mutation
import probes
import pytest
import schedules
import simulation
import witness
from equivalence import ROOT_RECIPE
from launch import RankFailed, launch, load
from mutation import Bug, bugs, mutate
from test_lineage import FAMILY, TRAINING

BUGS = bugs()
PIPELINE_TESTS = "06_pipeline/test_pipeline.py"
BALANCE_TESTS, CAPACITY_TESTS = "07_expert/test_balance.py", "07_expert/test_capacity.py"
BALANCED = "is off by|the load differs|biases are not|counts have changed|counts of other rows|a validation has changed"
KERNEL_TESTS, STEP_TESTS = "09_kernels/test_kernels.py", "09_kernels/test_fused_step.py"
MATMUL_TESTS, FP8_TESTS = "09_kernels/test_matmul.py", "09_kernels/test_fp8_matmul.py"
FLASH_TESTS = "09_kernels/test_flash_attention.py"
ON_GPUS = {"09_kernels/flash_attention_gluon.py"}  # has no interpreter: its check runs on GPUs alone
BF16_TESTS, FP16_TESTS = "10_mixed_precision/test_bf16.py", "10_mixed_precision/test_fp16.py"
MIXED_TESTS = "10_mixed_precision/test_fp8.py"
STOCHASTIC_TESTS = "10_mixed_precision/test_stochastic_rounding.py"
CHECKPOINT_TESTS = "08_4d/test_checkpoint.py"
EXPERT_TESTS, OVERLAP_TESTS = "07_expert/test_expert.py", "07_expert/test_overlap.py"
pytestmark = pytest.mark.thorough


def equal(bug: Bug, file: str) -> None:
    """Compare with the root: in simulated streams if the bug names them, compiled by the first half of the compiler."""
    flags = bug.flags + (" --compile" if bug.seen.startswith("compiled") else "")
    equivalence.check(file, bug.world, flags, equivalence.root_of(bug.recipe), mutation.probe_of(bug))


def held(bug: Bug, file: str) -> None:
    """Two blocks, one other unit, and none between the steps have their weights in memory."""
    run = launch(file, bug.world, f"{contract.SMALL} --steps 2", probe=probes.gathered_at_a_time)
    assert run.probes == [[2, 1, 0]] * bug.world, "weights are held"


def in_flight(bug: Bug, file: str) -> None:
    """Two gradients, and the one that is being sent, are in memory at a time."""
    flags = f"{contract.SMALL} --microbatches 8 --steps 1"
    assert launch(file, 4, flags, probe=probes.gradients_in_flight).probes == [0, 3, 3, 3], "gradients are held"


def checkpoints(test: str) -> Callable[[Bug, str], None]:
    """A test of checkpoints that writes into a folder, of the recipe with the bug."""

    def check(bug: Bug, file: str) -> None:
        module = load(CHECKPOINT_TESTS)
        module.CHECKPOINT = file
        with tempfile.TemporaryDirectory() as folder:
            try:
                getattr(module, test)(Path(folder))
            except AssertionError:
                raise AssertionError(f"there are {sorted(os.listdir(folder))}") from None

    return check


SEES: dict[str, tuple[Callable[[Bug, str], None], str]] = {  # check, and what it must say
    "equivalence": (equal, "is off by"),
    "late": (equal, "is off by|exit code -11|has waited for|was let go|does not wait|has changed while"),
    "at once": (equal, "is off by"),
    "compiled, late": (equal, "is off by|has waited for"),
    "compiled, at once": (equal, "is off by"),
    "freed": (equal, "storage of size 0|has no attribute 'wait'"),
    "held": (held, "weights are held"),
    "in flight": (in_flight, "gradients are held"),
    "simulation": (lambda bug, file: simulation.check(file), "is off by"),
    "transformers": (
        lambda bug, file: witness.check(file, "--theta 10000 --rope_factor 32 --seq 512 --batch 2"),
        "is off by|names or shapes",
    ),
    "schedule": (
        lambda bug, file: schedules.check(load(file), [(4, 8)]),
        "",
    ),
    "communicators": (lambda bug, file: load(PIPELINE_TESTS).test_communicators(file), ""),
    "leftovers": (lambda bug, file: load(PIPELINE_TESTS).test_a_step_leaves_nothing_but_weights(file), ""),
    "operands": (lambda bug, file: load(PIPELINE_TESTS).test_weight_gradients_keep_their_operands_alone(file), ""),
    "transformers, experts": (
        lambda bug, file: witness.check(file, experts="--experts 8 --top_k 2"),
        "is off by",
    ),
    "router": (
        lambda bug, file: load(EXPERT_TESTS).test_router_keeps_close_scores_apart(file),
        "close scores are confused",
    ),
    "rounding": (lambda bug, file: load(EXPERT_TESTS).test_unpermute_rounds_once(file), "rounded more than once"),
    "empty experts": (lambda bug, file: load(EXPERT_TESTS).test_grouped_matmul(file), "right|garbage"),
    "dispatch": (lambda bug, file: load(EXPERT_TESTS).test_rows_go_to_their_experts_and_back(file), ""),
    "share": (
        lambda bug, file: load(EXPERT_TESTS).test_each_rank_holds_its_share(bug.world, 2, file),
        "share the experts|is not 1/|differ",
    ),
    "load": (
        lambda bug, file: load(EXPERT_TESTS).test_busiest_expert(bug.recipe, bug.world, bug.flags, file),
        "the root's load is",
    ),
    "auxiliary": (lambda bug, file: load(BALANCE_TESTS).check_auxiliary_loss(bug.world, bug.flags, file), BALANCED),
    "bias": (lambda bug, file: load(BALANCE_TESTS).check_bias(bug.world, bug.flags, file), BALANCED),
    "capacity": (lambda bug, file: load(CAPACITY_TESTS).check_scarce(file, bug.world, bug.flags, 0.5), "is off"),
    "turns": (lambda bug, file: load(OVERLAP_TESTS).test_halves_take_turns(3, file), "transfers without computation"),
    "sizes of halves": (equal, "is off by|shape|[sS]plit|has no attribute 'wait'"),
    "late ranks": (
        lambda bug, file: load(OVERLAP_TESTS).check_late_ranks(file, bug.world, bug.flags),
        "is off by|IndexError|out of bounds|No such file",
    ),
    "wrong slots": (equal, "is off by|IndexError|out of bounds"),
    "slots": (lambda bug, file: load(OVERLAP_TESTS).test_every_row_has_its_slot(file), "case|split_with_sizes"),
    "too few slots": (
        lambda bug, file: load(OVERLAP_TESTS).test_too_few_slots(3, 1, file),
        "not on every rank",
    ),
    "worst layer": (lambda bug, file: load(OVERLAP_TESTS).test_the_worst_layer_counts(file), "2.00 was needed"),
    "forgotten slots": (
        lambda bug, file: load(OVERLAP_TESTS).test_too_few_slots_before_memory_grows(file),
        "forgotten",
    ),
    "other sizes": (
        lambda bug, file: load(OVERLAP_TESTS).test_validation_of_another_size(file),
        "allocated in steps|must match the size|out of bounds",
    ),
    "bytes written": (
        lambda bug, file: load(OVERLAP_TESTS).test_bytes_written(3, 1, 6, False, file),
        "the CPU waits for",
    ),
    "kernel": (lambda bug, file: load(OVERLAP_TESTS).test_kernel(file), "the kernel has"),
    "check": (
        lambda bug, file: load(KERNEL_TESTS).test_check(bug.recipe, file),
        "times PyTorch's|differ|does not touch|does not copy|has crashed|Error",
    ),
    "small programs": (lambda bug, file: load(KERNEL_TESTS).test_many_small_programs(bug.recipe, file), "the error is"),
    "written over": (lambda bug, file: load(KERNEL_TESTS).check_written_over(bug.recipe, file), "DID NOT RAISE|memory"),
    "incoming gradient": (
        lambda bug, file: load(KERNEL_TESTS).test_rope_rotates_in_place_and_leaves_the_gradient_alone(file),
        "has changed the gradient",
    ),
    "targets": (lambda bug, file: load(KERNEL_TESTS).test_targets_of_cross_entropy(file), ""),
    "wide head": (lambda bug, file: load(KERNEL_TESTS).test_wide_head(file), "errors of"),
    "no_grad": (
        lambda bug, file: load(KERNEL_TESTS).test_linear_cross_entropy_without_gradients(file),
        "made",
    ),
    "sums in float32": (
        lambda bug, file: load(KERNEL_TESTS).test_linear_cross_entropy_adds_up_in_float32(file),
        "sums over chunks are rounded",
    ),
    "steps": (lambda bug, file: load(STEP_TESTS).test_equals_torch(bug.flags, 0.5, file), "differs from torch's"),
    "overflow": (lambda bug, file: load(FP16_TESTS).test_overflow_skips_the_step(file), "in a skipped step|scale|zero"),
    "growth": (lambda bug, file: load(FP16_TESTS).test_scale_grows(file), "scales"),
    "rounded masters": (lambda bug, file: load(BF16_TESTS).test_weights_are_rounded_masters(file), "not its rounded"),
    "autocast's gradient": (
        lambda bug, file: load(BF16_TESTS).test_gradient_is_that_of_autocast(1, file),
        "differ from autocast's",
    ),
    "norm in fp32": (lambda bug, file: load(BF16_TESTS).test_norm_is_added_up_in_fp32(file), "norm"),
    "products": (
        lambda bug, file: load(MIXED_TESTS).test_products_are_those_of_quantized_operands(bug.recipe, file),
        "is off by",
    ),
    "diverged": (
        lambda bug, file: load(MIXED_TESTS).test_zeros_and_what_has_diverged(bug.recipe, file),
        "is not seen|make inf or NaN",
    ),
    "newest weights": (
        lambda bug, file: load(MIXED_TESTS).test_forward_has_the_newest_weights(bug.recipe, file),
        "weights in fp8 are",
    ),
    "linears in fp8": (
        lambda bug, file: load(MIXED_TESTS).test_all_linears_of_the_blocks_and_nothing_else(bug.recipe, file),
        "isinstance|7 \\* cfg.layers",
    ),
    "history": (lambda bug, file: load(MIXED_TESTS).test_scales_follow_the_history(file), "scales for amax"),
    "micro-batches' history": (
        lambda bug, file: load(MIXED_TESTS).test_micro_batches_share_a_history(file),
        "makes amax|replaces it|becomes|in two micro-batches",
    ),
    "cast kernel": (
        lambda bug, file: load(MIXED_TESTS).test_kernel_in_the_interpreter(bug.recipe, file),
        "differs|amax",
    ),
    "small updates": (lambda bug, file: load(STOCHASTIC_TESTS).test_small_updates_arrive(file), "of the step arrives"),
    "fair rounding": (lambda bug, file: load(STOCHASTIC_TESTS).test_a_rounding_is_fair(file), "standard errors"),
    "every chance": (lambda bug, file: load(STOCHASTIC_TESTS).test_every_chance_counts(file), "round up, not"),
    "numbers of bf16": (
        lambda bug, file: load(STOCHASTIC_TESTS).test_what_bf16_holds_stays(file),
        "have become|a NaN is lost",
    ),
    "fair training": (
        lambda bug, file: load(STOCHASTIC_TESTS).test_training_rounds_fairly("", file),
        "the mean error is|are correlated|are no neighbours",
    ),
    "moments of fp32": (
        lambda bug, file: load(STOCHASTIC_TESTS).test_moments_follow_those_of_fp32(file),
        "standard deviations after six steps",
    ),
    "bits of an update": (
        lambda bug, file: load(STOCHASTIC_TESTS).test_an_update_rounds_each_element_by_its_index(1024, file),
        "not rounded by",
    ),
    "keys": (lambda bug, file: load(STOCHASTIC_TESTS).test_no_two_tensors_share_a_key(file), "different ones"),
    "repeated rounding": (
        lambda bug, file: load(STOCHASTIC_TESTS).test_runs_repeat_and_seeds_differ(file),
        "does not repeat|with another seed",
    ),
    "slices": (lambda bug, file: load(STOCHASTIC_TESTS).test_layouts_round_alike(file), "than in the whole"),
    "uniform bits": (lambda bug, file: load(STOCHASTIC_TESTS).test_bits_are_uniform(file), "frequencies are off"),
    "independent bits": (lambda bug, file: load(STOCHASTIC_TESTS).test_bits_are_independent(file), "two bits agree"),
    "close keys": (
        lambda bug, file: load(STOCHASTIC_TESTS).test_close_keys_share_no_bits(file),
        "those of another key",
    ),
    "sums of micro-batches": (
        lambda bug, file: load(STOCHASTIC_TESTS).test_sums_of_micro_batches_are_fp32(file),
        "the sum is off by",
    ),
    "six bytes": (lambda bug, file: load(STOCHASTIC_TESTS).test_bytes_between_steps(file), "bytes per parameter"),
    "masters": (lambda bug, file: load(STEP_TESTS).test_masters(file), "AssertionError"),
    "start of training": (
        lambda bug, file: load(STEP_TESTS).test_training_starts_from_what_is_not_rounded(file),
        "rounded weights are saved|masters are rounded",
    ),
    "dtypes side by side": (
        lambda bug, file: load(STEP_TESTS).test_dtypes_side_by_side(file),
        "the norm is another|differs from torch's",
    ),
    "resumed": (
        lambda bug, file: load(CHECKPOINT_TESTS).check_resumed(bug.world, bug.flags, file),
        "is off by|differ|lacks a part",
    ),
    "load on a mesh": (lambda bug, file: load("08_4d/test_mesh.py").test_busiest_expert(file), "the root's load is"),
    "half written": (checkpoints("test_what_went_wrong_is_said"), r"there are \['step-1'"),
    "newest checkpoints": (checkpoints("test_only_the_newest_are_kept"), r"there are \['step-1', 'step-2'\]"),
    "tiles": (lambda bug, file: load(MATMUL_TESTS).test_tiles_are_shared_by_programs(file), "the error is"),
    "copies": (lambda bug, file: load(MATMUL_TESTS).test_operands_are_not_copied(file), "operands were copied"),
    "linear": (lambda bug, file: load(MATMUL_TESTS).test_linear(file), "nobody needs|NoneType"),
    "layouts of groups": (
        lambda bug, file: load(MATMUL_TESTS).test_groups_in_any_layout(file),
        "offsets|must be contiguous",
    ),
    "neighbours": (
        lambda bug, file: load(MATMUL_TESTS).test_experts_do_not_see_each_other(file),
        "other experts has changed",
    ),
    "small blocks": (
        lambda bug, file: [load(FLASH_TESTS).test_many_small_blocks(16, 32, causal, file) for causal in (True, False)],
        "the error is",
    ),
    "rows that see nothing": (lambda bug, file: load(FLASH_TESTS).test_rows_that_see_nothing(file), "rows"),
    "other strides": (
        lambda bug, file: load(FLASH_TESTS).test_other_strides_are_right(file),
        "16-byte aligned|a view",
    ),
    "views": (lambda bug, file: load(FLASH_TESTS).test_views_are_not_copied(file), "copied|side by side"),
    "shared fp8 tiles": (lambda bug, file: load(FP8_TESTS).test_tiles_are_shared_by_programs(file), "the error is"),
    "fp8 layouts": (
        lambda bug, file: load(FP8_TESTS).test_operands_in_any_layout(file),
        "off by one|by columns|aligned",
    ),
    "empty fp8": (lambda bug, file: load(FP8_TESTS).test_nothing_to_multiply(file), "wise"),
    "fp8 rounding": (lambda bug, file: load(FP8_TESTS).test_every_bfloat16_is_rounded(file), "same"),
    "fp8 linear": (lambda bug, file: load(FP8_TESTS).test_linear("blocks", file), "the error is"),
    "refusals": (lambda bug, file: load(EXPERT_TESTS).test_sizes(bug.recipe, file), "None"),
    **{
        promise: (lambda bug, file, check=check: check(bug.recipe, file), "")
        for promise, check in contract.CHECKS.items()
    },
}


@pytest.mark.parametrize("bug", BUGS, ids=[f"{bug.recipe}: {bug.what}" for bug in BUGS])
def test_a_bug_is_seen(bug, tmp_path, monkeypatch):
    monkeypatch.setattr(launching.launch, "__defaults__", (*launching.launch.__defaults__[:3], 30, True))  # some hang
    check, words = SEES[bug.seen]
    file = mutate(bug, tmp_path)
    with pytest.raises((AssertionError, RankFailed, TimeoutError, schedules.Deadlock)) as seen:
        check(bug, file)
    assert re.search(words, str(seen.value)), f"red for another reason: {seen.value}"


def test_the_log_does_not_see_the_scale(tmp_path):
    """picotron's bug: gradients as many times too large as there are tokens, and the loss of step 1 is right."""
    bug = next(bug for bug in BUGS if "divided for the log" in bug.what)
    flags = f"{equivalence.SHAPE} --device cpu --dtype float64 --data {equivalence.documents()} {equivalence.GRADIENT}"
    right = launch(bug.recipe, bug.world, f"{flags} {bug.flags}").history[0]
    wrong = launch(mutate(bug, tmp_path), bug.world, f"{flags} {bug.flags}").history[0]
    assert abs(wrong[0] / right[0] - 1) < 1e-14 and wrong[1] > 100 * right[1]


def test_every_recipe_has_its_bug():
    """Each training recipe, and each file of kernels that a CPU can run."""
    kernels = {path for path, recipe in FAMILY.items() if "@triton.jit" in recipe.source} - ON_GPUS
    assert {bug.recipe for bug in BUGS} == {*TRAINING, *kernels} and ROOT_RECIPE in TRAINING


def test_bugs_have_names_of_their_own():
    """... in their recipe: the stored measurements are found by them."""
    names = [(bug.recipe, bug.what) for bug in BUGS]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
