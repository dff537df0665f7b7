"""Recipes work in any group of ranks: two copies train at the same time on two halves of the ranks, each as the root.

Only what names the group is rewritten: in build_model all ranks become the own half of them, in save each half's first
rank writes. The halves have different seeds, and so different weights and data: what leaks from one into the other is
seen.
"""

import dataclasses
import tempfile
from pathlib import Path

import compare
import equivalence
import pytest
import recipes
from launch import ROOT, launch
from test_lineage import FAMILY, read

HALF = "dist.new_subgroups(dist.get_world_size() // 2)[0]"
SHAPE = "--device cpu --dtype float64 --layers 5 --dim 48 --heads 8 --kv_heads 2 --ffn 64 --seq 24 --batch 16 --steps 3"
MAKE_GROUPS = "hsdp.py", "accelerate_fsdp.py", "dualpipe.py"
CASES = [(recipe, 2) for recipe in FAMILY if recipe[:2] in ("03", "04", "06") and not recipe.endswith(MAKE_GROUPS)]
CASES += [(recipe, 2) for recipe in FAMILY if recipe[:2] == "07" and not recipe.endswith("moe.py")]
CASES += [(recipes.FP8_ZERO3, 2), ("04_tensor_sequence/async_tensor_parallel.py", 4), ("06_pipeline/1f1b.py", 4)]
CASES += [("07_expert/expert_parallel.py", 4), ("07_expert/symmetric_memory.py", 4)]
OWN = {  # flags with which experts train as their root does; of four ranks, two pairs hold the same experts
    "07_expert/auxiliary_loss.py": "--balance 0 --z 0",
    "07_expert/bias_balancing.py": "--bias_rate 0",
    "07_expert/capacity.py": "--capacity 4",
    "07_expert/node_limited.py": "--nodes 2",
}
HALVES = {  # what build_model makes of all ranks, and of the halves
    "dist.group.WORLD": HALF,
    "dist.new_group()": HALF,
    "ep_size = dist.get_world_size() // cfg.edp": "ep_size = dist.get_world_size() // 2 // cfg.edp",
    '(cfg.edp, ep_size), mesh_dim_names=("edp", "ep")': '(2, cfg.edp, ep_size), mesh_dim_names=("half", "edp", "ep")',
    "sizes = cfg.edp, ": "sizes = 2, cfg.edp, ",
    'mesh_dim_names=("edp", "internode"': 'mesh_dim_names=("half", "edp", "internode"',
}


def halved(recipe: str, file: str | None = None) -> str:
    """Return the source of a recipe that works on its half of the ranks."""
    source = Path(file or ROOT / recipe).read_text()
    build, save = (read(recipe, source).definitions[name] for name in ("build_model", "save"))
    in_half = build
    for whole, halves in HALVES.items():
        in_half = in_half.replace(whole, halves)
    by_half = save.replace("dist.get_rank() == 0", "dist.get_rank() % (dist.get_world_size() // 2) == 0")
    return source.replace(build, in_half).replace(save, by_half)


def of_a_half(folder: str, size: int):
    """A probe: seed and file of the half; flags are checked for its ranks. Reports the history of this rank."""

    def probe(module):
        parse_config, check, save, histories = module.parse_config, module.check, module.save, []
        half = int(module.os.environ["RANK"]) // size
        file = f"{folder}/{half}.safetensors"
        module.parse_config = lambda: dataclasses.replace(parse_config(), seed=half, save=file)
        module.check = lambda cfg, world: check(cfg, size)
        module.save = lambda cfg, model, history: histories.append(history) or save(cfg, model, history)
        return lambda: histories[0]

    return probe


@pytest.mark.thorough
@pytest.mark.parametrize("recipe, size", CASES)
def test_two_halves(recipe, size, file=None):
    flags = f"{SHAPE} --lr 1e-2 --clip 0.5 --warmup 1 --data {equivalence.documents()}"
    own = OWN.get(recipe, "") + (" --edp 2" if recipe[:2] == "07" and size == 4 else "")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "recipe.py").write_text(halved(recipe, file))
        probe = of_a_half(folder, size)
        ranks = launch(Path(folder, "recipe.py"), 2 * size, f"{flags} {own}", probe=probe, save=False).probes
        for half in range(2):
            theirs = equivalence.reference(equivalence.root_of(recipe), f"{flags} --seed {half}")
            ours, history = compare.read(f"{folder}/{half}.safetensors")
            errors = compare.relative_errors(ours, theirs.weights) | compare.history_errors(history, theirs.history)
            compare.assert_close(errors, equivalence.TOLERANCE["float64"], f"{recipe}, half {half} of 2 x {size} ranks")
            for rank in ranks[half * size : (half + 1) * size]:
                assert [list(step[:2]) for step in rank] == [step[:2] for step in history]
