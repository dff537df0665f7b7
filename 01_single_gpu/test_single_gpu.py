"""The root computes what transformers computes, and does with data, flags and files what it says."""

import dataclasses
import json
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import equivalence
import numpy as np
import pytest
import torch
import witness
from contract import refusal
from launch import RankFailed, in_a_fork, isolated, launch, load
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

TRAIN = "01_single_gpu/train.py"
FULL = "01_single_gpu/activation_checkpointing.py"
ACCUMULATION = "01_single_gpu/gradient_accumulation.py"
COMPILED = [path for path, _, flags in equivalence.CASES if path.startswith("01") and flags == "--compile"]
CHUNKED = "01_single_gpu/chunked_loss.py"
SMALL = (
    "--device cpu --dtype float64 --layers 3 --dim 48 --heads 6 --kv_heads 2 --ffn 64 --vocab 256 --seq 24 --batch 4"
)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", COMPILED)
def test_compiled(recipe):
    equivalence.check_quickly(recipe, 1, "--compile")


# -------------------------------------------------------------------------------------------------------- transformers
@pytest.mark.parametrize("rope", ["", "--theta 10000 --rope_factor 32 --seq 512 --batch 2"])
def test_computes_what_transformers_computes(rope):
    witness.check(TRAIN, rope)


def test_tied_head():
    """As transformers has it: one matrix, whose gradient is that of both its uses."""
    witness.check(equivalence.TIED, tied=True)


def test_an_untied_file_is_refused(file=equivalence.TIED):
    flags = f"{equivalence.SHAPE} --device cpu --init {equivalence.start(TRAIN, equivalence.SHAPE)}"
    line = refusal(load(file), 1, flags)
    assert line and "lm_head.weight is floats [256, 48], the model has none" in line, "it is accepted"


PUBLISHED = dict(model_type="llama", num_attention_heads=8, hidden_act="silu", rms_norm_eps=1e-5)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192)


@pytest.mark.parametrize("entry", ["rope_scaling", "rope_parameters"])  # of transformers 4 and 5
def test_a_published_model_is_this_one(entry, tmp_path):
    """Its config.json is compared in all that shapes do not show, and its token ids are no bytes."""
    module, path = load(TRAIN), tmp_path / "config.json"

    def refusal_of(published, flags):
        path.write_text(json.dumps(published))
        try:
            module.check_config(config(module, flags), path)
        except SystemExit as end:
            return end.code

    ours = {**PUBLISHED, "rope_theta": 5e5, entry: LLAMA3}
    flags = "--rope_factor 8 --vocab 1000 --data ids.bin"
    assert refusal_of(ours, flags) is None
    assert "ids.txt: must be a .bin file" in refusal_of(ours, flags.replace("bin", "txt"))
    others = dict(model_type="mistral", num_attention_heads=4, hidden_act="gelu", rms_norm_eps=1e-6, sliding_window=16)
    for name, value in {**others, "rope_theta": 1e4}.items():
        assert f"has {name} {value}, " in refusal_of({**ours, name: value}, flags)
    for name in "rms_norm_eps", "rope_theta":  # transformers' defaults are others
        assert f"has {name} " in refusal_of({key: value for key, value in ours.items() if key != name}, flags)
    for name in LLAMA3:
        assert f"has {name} None, " in refusal_of({**ours, entry: {**LLAMA3, name: None}}, flags)
    assert "is no JSON of a model's config" in refusal_of([1], flags)
    assert "is no JSON of a model's config" in refusal_of({**PUBLISHED, "rope_scaling": "yarn"}, flags)
    plain = {**PUBLISHED, "rope_theta": 5e5, entry: None}
    assert refusal_of(plain, "--vocab 256") is None
    assert "has factor 2, " in refusal_of({**plain, entry: {"type": "linear", "factor": 2}}, "--vocab 256")


@pytest.mark.parametrize("lengths, starts", [((1900, 60, 40), [0, 60]), ((1950, 50), [])])
def test_text_that_is_held_out(lengths, starts, tmp_path):
    """Its documents start where files do, counted from the cut; if need be a file is cut, so that a sequence fits."""
    for i, length in enumerate(lengths):
        Path(tmp_path, f"{i}.txt").write_bytes(bytes([i + 1]) * length)
    module = load(TRAIN)
    (_, before), (ids, found) = module.load_data(config(module, f"--data {tmp_path} --validate 1 --seq 55"))
    assert list(found) == starts + [50] * (not starts) and list(before) == [0]
    assert all(ids[start] != ids[start - 1] for start in found if start) and len(ids) == 100


def test_loads_what_transformers_saves(tmp_path):
    """A random model goes in through --init, in several files, and with a head tied to the embedding."""
    loss = isolated(lambda: witness.save_random(tmp_path, tied=True, shards="50KB"))
    assert len(list(tmp_path.glob("model*.safetensors"))) > 1
    flags = f"{witness.FLAGS} --data {equivalence.documents()} --steps 1 --init {tmp_path}/model*.safetensors"
    assert abs(launch(TRAIN, 1, flags).history[0][0] / loss - 1) <= 1e-10


# ----------------------------------------------------------------------------------------------------------------- data
def config(module, flags=""):
    """The Config of a command line."""
    sys.argv = [TRAIN, "--device", "cpu", *flags.split()]
    return module.parse_config()


def test_batches():
    """(seed, step) alone decides; targets are the next tokens, and none follows from another document."""
    module = load(TRAIN)
    cfg = config(module, f"--data {equivalence.documents()} --seq 100 --batch 64")
    ids, starts = data = module.load_data(cfg)[0]
    inputs, targets = module.make_batch(cfg, data, 3)
    again = module.make_batch(cfg, module.load_data(cfg)[0], 3)
    other_step = module.make_batch(cfg, data, 4)
    other_seed = module.make_batch(dataclasses.replace(cfg, seed=1), data, 3)
    assert torch.equal(inputs, again[0]) and torch.equal(targets, again[1])
    assert not torch.equal(inputs, other_step[0]) and not torch.equal(inputs, other_seed[0])
    assert not torch.equal(other_step[0], other_seed[0])  # as with seed + step
    sizes = [file.stat().st_size for file in sorted(Path(cfg.data).iterdir())]
    assert starts.tolist() == [0, *np.cumsum(sizes)[:-1].tolist()]
    text = bytes(ids)
    for row_in, row_out in zip(inputs.tolist(), targets.tolist()):
        windows = [i for i in range(len(text)) if text[i : i + 100] == bytes(row_in)]
        assert any(
            all(t == (module.IGNORE if w + 1 + i in starts else text[w + 1 + i]) for i, t in enumerate(row_out))
            for w in windows
        )
    assert (targets == module.IGNORE).any()


def test_default_text_is_the_standard_library():
    module = load(TRAIN)
    (ids, _), _ = module.load_data(config(module))
    assert Path(subprocess.__file__).read_bytes() in bytes(ids)


@pytest.mark.parametrize(
    "dtype, vocab", [(np.uint16, 5000), (np.uint16, 65536), (np.uint32, 5000), (np.uint32, 100_000)]
)
def test_token_files(dtype, vocab, tmp_path):
    """uint16 and uint32 are told apart; a uint32 file of small ids read as uint16 would have a 0 after each token."""
    module = load(TRAIN)
    ids = np.random.default_rng(0).integers(1, vocab, 999).astype(dtype)
    ids[1] = 0
    ids.tofile(tmp_path / "tokens.bin")
    (read, starts), _ = module.load_data(config(module, f"--data {tmp_path}/tokens.bin --vocab {vocab}"))
    assert np.array_equal(read, ids) and starts.tolist() == [0]


def test_token_files_are_never_read_whole(tmp_path):
    """40 GB, most of it a hole, are there at once; an id beyond the vocabulary is found in its batch."""
    module, file = load(TRAIN), tmp_path / "tokens.bin"
    with open(file, "wb") as tokens:
        tokens.write(np.arange(1, 4097, dtype=np.uint16).tobytes())
        tokens.truncate(40 * 2**30)
    start = time.perf_counter()
    cfg = config(module, f"--data {file} --vocab 5000 --seq 8")
    data, _ = module.load_data(cfg)
    module.make_batch(cfg, data, 0)
    assert time.perf_counter() - start < 2 and len(data[0]) == 20 * 2**30 and data[0].dtype == np.uint16
    ids = np.ones(2**21, np.uint16)
    ids[2**20 :] = 256
    ids.tofile(file)
    cfg = config(module, f"--data {file} --vocab 256 --seq 8 --batch 64")
    with pytest.raises(SystemExit, match="--vocab 256: must be above 256, an id in"):
        module.make_batch(cfg, module.load_data(cfg)[0], 0)


# ------------------------------------------------------------------------------------------- initial weights, optimizer
def test_initial_weights():
    """Normal with deviation 0.02, norms 1; every tensor has its own numbers, and so has every seed."""
    first, again, other = (launch(TRAIN, 1, f"{SMALL} --steps 0 --seed {seed}").weights for seed in (0, 0, 1))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if tensor.ndim == 1:
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            assert abs(tensor.std() / 0.02 - 1) < 5 / (2 * tensor.numel()) ** 0.5  # five deviations
    same_shape = [tensor for name, tensor in first.items() if "gate_proj" in name or "up_proj" in name]
    assert len({tensor.numpy().tobytes() for tensor in same_shape}) == len(same_shape) == 6


def gradients_and_weights(module):
    """A probe: weights before training, then for each step the gradients before the clip and the weights after it."""
    taken, clip, train_step = [], module.clip_gradients, module.train_step

    def copy(model, of):
        return {name: of(p).detach().clone().numpy() for name, p in model.named_parameters()}

    def clip_gradients(cfg, model):
        taken.append([copy(model, lambda p: p.grad)])
        return clip(cfg, model)

    def step(cfg, model, optimizer, *batch):
        if not taken:
            taken.append(copy(model, lambda p: p))
        assert all(p.grad is None for p in model.parameters()), "a gradient of the step before is left"
        result = train_step(cfg, model, optimizer, *batch)
        taken[-1].append(copy(model, lambda p: p))
        return result

    module.clip_gradients, module.train_step = clip_gradients, step
    return lambda: taken


def test_optimizer():
    """AdamW, its decay on matrices alone, and the clip, written out here by the formulas (arXiv:1711.05101)."""
    lr, decay, eps, clip = 1e-2, 0.3, 1e-3, 0.5
    flags = f"{SMALL} --steps 4 --warmup 1 --lr {lr} --weight_decay {decay} --eps {eps} --clip {clip}"
    rates = [lr / 2, lr, 0.775 * lr, 0.325 * lr]  # half way up, at the top, and down a cosine to a tenth
    start, *steps = launch(TRAIN, 1, flags, probe=gradients_and_weights).probes[0]
    m, v = ({name: 0 * weight for name, weight in start.items()} for _ in range(2))
    for t, (gradients, after) in enumerate(steps, 1):
        norm = sum((g**2).sum() for g in gradients.values()) ** 0.5
        assert norm > clip
        for name, g in gradients.items():
            g = g * clip / (norm + 1e-6)
            m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.95 * v[name] + 0.05 * g**2
            update, rate = m[name] / (1 - 0.9**t) / ((v[name] / (1 - 0.95**t)) ** 0.5 + eps), rates[t - 1]
            start[name] = start[name] * (1 - rate * decay * (g.ndim > 1)) - rate * update
            assert np.abs(start[name] - after[name]).max() <= 1e-12, (t, name)


# ------------------------------------------------------------------------------------------------------------ bfloat16
def test_norm_and_rotation_round_once():
    """In bfloat16 they compute in float32: each output is its exact value rounded once, an error of at most 2^-8."""
    module = load(TRAIN)
    cfg = config(module)
    torch.manual_seed(0)
    x = torch.randn(4, 8, 100, 128).bfloat16()
    rope = module.rope_table(cfg, torch.arange(100))
    norm = module.RMSNorm(cfg)
    norm.weight.data.uniform_(0.5, 2)
    low, exact = norm(x).detach(), norm.double()(x.double()).detach()
    assert low.dtype == torch.bfloat16 and ((low - exact).abs() <= 2**-7.99 * exact.abs()).all()
    low, exact = module.rotate(x[..., :16], rope), module.rotate(x[..., :16].double(), [r.double() for r in rope])
    assert low.dtype == torch.bfloat16
    assert ((low - exact).abs() <= 2**-7.99 * exact.abs() + 1e-6).all()  # the sum of two products may cancel


# --------------------------------------------------------------------------------------------------------------- FLOPs
def attention_flops(query, *_, **__):
    """Of the forward of attention, masked half included: torch's counter does not know the CPU's kernel."""
    b, h, s, k = query
    return 4 * b * h * s * s * k


def one_pass(recipe, layers):
    """FLOPs of matmuls and of attention's forwards, for so many layers. Queries have a bias, as in Qwen2."""
    module = load(recipe)
    cfg = config(module, f"--layers {layers} --batch 4")
    model = module.build_model(cfg)
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(cfg.dim))
    inputs, targets = module.make_batch(cfg, module.load_data(cfg)[0], 0)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: attention_flops}) as counter:
        module.forward(cfg, model, inputs, targets).backward()
    flops = counter.get_flop_counts()["Global"]
    return sum(count for op, count in flops.items() if op != kernel), flops[kernel]


def per_block(recipe):
    """The same for one block: the difference of three and two."""
    two, three = (isolated(lambda layers=layers: one_pass(recipe, layers)) for layers in (2, 3))
    return [b - a for a, b in zip(two, three)]


@pytest.mark.thorough
def test_checkpointing_computes_again():
    """Full: one more forward. Selective: not one matmul more."""
    matmuls, attention = per_block(TRAIN)
    last = 2 * 4 * 128 * 384 * 128  # the output of down_proj is not needed again: recomputation stops before it
    assert per_block(FULL) == [matmuls * 4 / 3 - last, attention * 2]
    assert per_block("01_single_gpu/selective_checkpointing.py") == [matmuls, attention]


class Saved:
    """A tensor that autograd saves. It lives until the graph frees it."""

    def __init__(self, x):
        self.x = x


@in_a_fork
def test_logits_of_one_chunk(file=None):
    """Head and loss see a fifth of the tokens, in training and validation, and free them before the next chunk."""
    module, saved, rows = load(file or CHUNKED), weakref.WeakSet(), []
    cfg = config(module, "--loss_chunks 5 --batch 4 --layers 1 --vocab 999")
    model, batch = module.build_model(cfg), module.make_batch(cfg, module.load_data(cfg)[0], 0)

    def save(x):
        kept = Saved(x)
        saved.add(kept)
        return kept

    def look(_, args, logits):
        rows.append(len(logits))
        held = sum(kept.x.shape in ((103, 999), (100, 999)) for kept in saved)
        assert not held, f"logits of an earlier chunk are held {held} times"

    model.lm_head.register_forward_hook(look)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept.x):
        assert not module.forward_backward(cfg, model, *batch).requires_grad
    assert not module.evaluate(cfg, model, *batch).requires_grad
    assert rows == 2 * [103, 103, 103, 103, 100], f"the head sees chunks of {rows} tokens"


def test_flops_per_token():
    """The formula against the FLOPs that torch counts. Of attention's, half is masked; backward is two forwards."""
    module = load(TRAIN)
    cfg = config(module)
    matmuls, attention = isolated(lambda: one_pass(TRAIN, cfg.layers))
    assert module.flops_per_token(cfg) * 4 * cfg.seq == matmuls + 3 * attention / 2


def test_smollm_is_the_published_model():
    """With an untied head; a tied one makes it 1.711 billion. tests/test_published.py has Llama's."""
    module = load(TRAIN)
    cfg = config(module, "--preset smollm_1_7b")
    with torch.device("meta"):
        model = module.Model(cfg)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == 1.812
    assert (cfg.heads, cfg.kv_heads, cfg.theta, cfg.rope_factor) == (32, 32, 10_000, 1)


# -------------------------------------------------------------------------------------------------------- command line
@pytest.mark.thorough
def test_the_loss_falls_as_the_page_says():
    losses = [loss for loss, *_ in launch(TRAIN, 1, "--device cpu").history]
    assert len(losses) == 40 and 5.4 < losses[0] < 5.8 and losses[39] < 3.5


def test_weights_do_not_depend_on_the_dtype():
    half = launch(TRAIN, 1, "--device cpu --layers 1 --steps 0").weights
    full = launch(TRAIN, 1, "--device cpu --layers 1 --steps 0 --dtype float64").weights
    assert all(torch.equal(half[name].double(), full[name]) for name in full)


def test_flags_that_argparse_refuses():
    cases = [("--preset gpt5", ["--preset", "gpt5", "llama3_8b"]), ("--layers two", ["--layers", "two"])]
    for flags, words in [*cases, ("--ep 2", ["--ep 2"])]:  # not --eps
        with pytest.raises(RankFailed) as failure:
            launch(TRAIN, 1, flags)
        (line,) = failure.value.output.splitlines()
        assert all(word in line for word in words) and failure.value.code == 2


def test_a_head_of_another_shape_is_not_taken_for_a_tied_one(tmp_path):
    weights = launch(TRAIN, 1, f"{SMALL} --steps 0").weights | {"lm_head.weight": torch.zeros(1, 48)}
    save_file(weights, tmp_path / "wrong.safetensors")
    line = refusal(load(TRAIN), 1, f"{SMALL} --init {tmp_path}/wrong.safetensors")
    assert all(word in line for word in ("--init", "lm_head.weight", "[256, 48]"))


def test_save_respects_links_and_modes(tmp_path):
    """The file that a link names is written, with the mode that umask gives, and nothing is left beside it."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for _ in range(2):  # over an older one, too
        launch(TRAIN, 1, f"{SMALL} --steps 0 --save {tmp_path}/link", save=False)
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask


def test_micro_batches_must_divide_the_batch():
    line = refusal(load(ACCUMULATION), 1, "--device cpu --microbatches 5")
    assert "\n" not in line and "--microbatches 5" in line and "--batch 16" in line


def test_flags_come_before_the_preset_and_that_before_the_defaults():
    module = load(TRAIN)
    cfg = config(module, "--preset llama3_1b --layers 2")
    assert (cfg.layers, cfg.dim, cfg.seq, cfg.compile) == (2, 2048, 128, False)
    sys.argv = [TRAIN]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert module.parse_config() == module.Config(device=device, **module.PRESETS["tiny"])


def test_help(capsys):
    with pytest.raises(SystemExit):
        config(load(TRAIN), "--help")
    text = capsys.readouterr().out
    assert all(f"--{field}" in text for field in ("preset", "kv_heads", "compile", "save")) and "Source:" in text


def test_each_parameter_has_a_group(file=equivalence.ROOT_RECIPE):
    """A scalar, too: the optimizer of a model that is not ours leaves nothing out."""
    module, model = load(file), torch.nn.ParameterList(torch.zeros(shape) for shape in ([], [2], [2, 2], [2, 2, 2]))
    optimizer = module.make_optimizer(module.Config(device="cpu"), model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(model)
