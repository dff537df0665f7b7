"""The way of a published Llama through the root and back into transformers, as the page tells it.

The code blocks of the section 'Continue the training of a published Llama' run as they stand, in an empty folder.
Nothing is downloaded: the folder that the section names holds a random model of the published architecture, in bfloat16
and in several files, with the config.json of published models and a tokenizer of its own.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
from pathlib import Path

import compare
import numpy as np
import pytest
import torch
import witness
from launch import ROOT, in_a_fork, isolated, launch, load, read_history
from safetensors.torch import load_file

PAGE = ROOT / "01_single_gpu" / "README.md"
HEADING = "## Continue the training of a published Llama"
PUBLISHED = Path("Llama-3.2-1B")  # the section's folder
INSTEAD = {  # what the test changes in the section's commands; SHAPE is what the section's Python prints
    "--preset llama3_1b": "SHAPE",
    "--seq 2048": "--seq 64",
    "--steps 1000 --warmup 100 --lr 2e-5": "--steps 3 --warmup 1 --lr 2e-3",
    "--dtype bfloat16 --compile": "--dtype float64 --device cpu",
    "--nproc_per_node 4": "--nproc_per_node 2",
}
TEXTS = ["Once there was a naïve model.\n  It read – slowly – 字 by 字.", (ROOT / "LICENSE").read_text(), "{}\n", "end"]
COMMON = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu", rms_norm_eps=1e-5)
COMMON |= dict(attention_bias=False, mlp_bias=False, max_position_embeddings=131072, torch_dtype="bfloat16")
ROPE = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SMALL = (3, 48, 6, 2, 64), 512, 32.0  # the shape, vocabulary and RoPE factor of the random model
PRESETS = {  # ... and those in the config.json of Llama-3.2-1B and Llama-3.1-8B
    "llama3_1b": ((16, 2048, 32, 8, 8192), 128256, 32.0),
    "llama3_8b": ((32, 4096, 32, 8, 14336), 128256, 8.0),
}
pytestmark = pytest.mark.thorough


def blocks() -> tuple[list[str], list[tuple[str, int, str]]]:
    """The section's Python blocks; and recipe, number of processes and flags of its commands, with INSTEAD applied."""
    page = PAGE.read_text() if PAGE.exists() else ""
    assert page.count(f"{HEADING}\n") == 1, f"{PAGE} must have one section {HEADING!r}"
    section = re.split("^## ", page.split(f"{HEADING}\n")[1], flags=re.M)[0]
    (shell,) = re.findall(r"```bash\n(.*?)```", section, re.S)
    for old, new in INSTEAD.items():
        assert old in shell, f"the section's commands do not have {old!r}"
        shell = shell.replace(old, new)
    commands = []
    for line in shell.replace("\\\n", " ").splitlines():
        starter, *words = shlex.split(line)
        world = int(words.pop(1)) if words[0] == "--nproc_per_node" else 1
        assert starter == ("python" if words[0].endswith(".py") else "torchrun")
        recipe, *flags = words if starter == "python" else words[1:]
        commands.append((recipe, world, " ".join(flags)))
    return re.findall(r"```python\n(.*?)```", section, re.S), commands


def execute(code: str) -> str:
    """Run one Python block in a process of its own; return what it prints."""

    def run() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, {})
        return out.getvalue()

    return isolated(run)


def write_config(shape: tuple[int, ...], vocab: int, factor: float, tied: bool) -> None:
    """Write config.json with the keys of published models, which are older than those that transformers 5 writes."""
    config = COMMON | dict(zip(SHAPE, shape, strict=True), vocab_size=vocab, tie_word_embeddings=tied)
    config |= dict(bos_token_id=0, eos_token_id=1, rope_theta=500000.0, rope_scaling=dict(ROPE, factor=factor))
    PUBLISHED.mkdir(exist_ok=True)
    (PUBLISHED / "config.json").write_text(json.dumps(config))


def publish(tied: bool) -> None:
    """Save a byte-level BPE tokenizer of 500 ids, and a random model that has rows for 512."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    begin, end = special = ["<|begin_of_text|>", "<|end_of_text|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator([Path(argparse.__file__).read_text()], trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=begin, eos_token=end).save_pretrained(PUBLISHED)
    write_config(*SMALL, tied)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(PUBLISHED))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():  # large weights, and norms that differ from 1, so that no error hides
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + (p.ndim == 1))
    model.save_pretrained(PUBLISHED, max_shard_size="50KB")
    write_config(*SMALL, tied)
    assert model.dtype == torch.bfloat16 and len(list(PUBLISHED.glob("*.safetensors"))) > 2


def read_tokens(file: str) -> list[str]:
    """The documents of a .bin file: what the published tokenizer decodes between its begin and end tokens."""
    from transformers import AutoTokenizer

    ids, tokenizer = np.fromfile(file, np.uint16), AutoTokenizer.from_pretrained(PUBLISHED)
    begins, ends = (np.flatnonzero(ids == special) for special in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    assert begins.tolist() == [0, *(ends[:-1] + 1)] and ends[-1] == len(ids) - 1
    return [tokenizer.decode(ids[begin + 1 : end]) for begin, end in zip(begins, ends)]


def transformers_of(folder: Path | str, flags: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the folder's model on the root's first batch, by transformers in float64; and its weights."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    weights = dict(loaded.state_dict())
    with witness.in_float64():
        model = AutoModelForCausalLM.from_config(loaded.config, attn_implementation="eager").double()
        model.load_state_dict(weights)
        return witness.loss_of(model, flags)[1].item(), weights


@pytest.mark.parametrize("tied", [True, False])
@in_a_fork
def test_section(tied, tmp_path):
    """Go through the section in an empty folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401  once, before the forks

    os.chdir(tmp_path)
    (tokenise, shape, back), commands = blocks()
    isolated(lambda: publish(tied))
    Path("texts").mkdir()
    for i, text in enumerate(TEXTS):
        Path(f"texts/{i}.txt").write_text(text, encoding="utf-8")
    execute(tokenise.replace("(ids, np.uint32)", "(ids, np.uint16)"))  # for its small vocabulary
    assert isolated(lambda: read_tokens("texts.bin")) == TEXTS

    (root, _, flags), _ = commands = [(*rest, flags.replace("SHAPE", execute(shape))) for *rest, flags in commands]
    assert [command[:2] for command in commands] == [(witness.ROOT_RECIPE, 1), ("03_zero/zero3.py", 2)]
    launch(root, 1, f"{flags} --steps 0 --save start.safetensors", save=False)
    runs = []
    for command in commands:
        launch(*command, save=False)
        runs.append((load_file("trained.safetensors"), read_history("trained.safetensors")))
    (weights, history), (sharded, sharded_history) = runs
    loss, published = isolated(lambda: transformers_of(PUBLISHED, flags))
    start = load_file("start.safetensors")
    compare.assert_close(compare.relative_errors(start, published), 0, "--init")
    assert abs(history[0][0] / loss - 1) <= 1e-10
    errors = compare.relative_errors(sharded, weights, start) | compare.history_errors(sharded_history, history)
    compare.assert_close(errors, 1e-10, "the change of the weights by zero3.py")

    text = execute(back)
    assert text.startswith("<|begin_of_text|>Once") and len(text) > 30
    launch(root, 1, f"{flags} --steps 1 --init trained.safetensors --save next.safetensors", save=False)
    (next_loss, *_), *_ = read_history("next.safetensors")
    loss, saved = isolated(lambda: transformers_of("trained", flags))
    rounded = {name: tensor.float() for name, tensor in sharded.items()}
    compare.assert_close(compare.relative_errors(saved, rounded), 0, "what transformers has saved")
    assert abs(next_loss / loss - 1) <= 1e-6 < 1e-2 < abs(next_loss / history[0][0] - 1)  # of weights in float32


def test_presets_have_the_published_shapes():
    module = load(witness.ROOT_RECIPE)
    for preset, (shape, vocab, factor) in PRESETS.items():
        cfg = module.Config(**module.PRESETS[preset])
        assert (cfg.layers, cfg.dim, cfg.heads, cfg.kv_heads, cfg.ffn) == shape
        assert (cfg.vocab, cfg.rope_factor, cfg.theta) == (vocab, factor, 500000)
