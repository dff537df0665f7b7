"""The root computes what transformers computes, and does with data, flags and files what it says."""

import contextlib
import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import equivalence
import numpy as np
import probes
import pytest
import torch
import witness
from contract import refusal
from launch import in_a_fork, launch, load
from recipes import TIED
from safetensors.torch import save_file

TRAIN = "01_single_gpu/train.py"
SMALL = f"{witness.FLAGS} --vocab 256"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["train", "selective_checkpointing", "chunked_loss", "lora", "document_mask"])
def test_compiled(name):
    """... what is not the root's: checkpoints in a block, a loss of two sizes, adapters, attention that is left out."""
    equivalence.check_quickly(f"01_single_gpu/{name}.py", 1, "--compile")


def test_computes_what_transformers_computes():
    witness.check(TRAIN, witness.ROPE)


def test_tied_head():
    """As transformers has it: one matrix, whose gradient is that of both its uses."""
    witness.check(TIED, tied=True)


def test_an_untied_file_is_refused(tmp_path, file=TIED):
    """And one whose head has another shape is not taken for a tied one."""
    module, path = load(TIED), tmp_path / "weights.safetensors"
    shapes = module.tensor_shapes(config(module, SMALL))
    for recipe, shape, words in (file, [256, 48], None), (TRAIN, [1, 48], [256, 48]):
        save_file({name: torch.zeros(size) for name, size in {**shapes, "lm_head.weight": shape}.items()}, path)
        line = refusal(load(recipe), 1, f"{SMALL} --init {path}")
        assert line and f"lm_head.weight is {shape}, the model has {words}" in line, "it is accepted"


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1, high_freq_factor=4)
LLAMA3 |= dict(original_max_position_embeddings=8192)
PUBLISHED = dict(model_type="llama", num_attention_heads=8, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=5e5)
PUBLISHED |= dict(rope_scaling=LLAMA3)
OTHERS = dict(model_type="mistral", num_attention_heads=4, hidden_act="gelu")
IDS = "--rope_factor 8 --vocab 1000 --data ids.bin"


@pytest.mark.parametrize(
    "change, flags, words",
    [
        ({}, IDS, None),
        (dict(rope_scaling=None), "--vocab 256", None),
        (dict(rope_scaling=None, rope_parameters=LLAMA3), IDS, None),  # as of transformers 5
        *((dict(rope_scaling={**LLAMA3, name: None}), IDS, f"has {name} None, ") for name in LLAMA3),
        *(({name: value}, IDS, f"has {name} {value}, ") for name, value in OTHERS.items()),
        *(({name: None}, IDS, f"has {name} ") for name in ("rms_norm_eps", "rope_theta")),  # others by default
        ({}, IDS.replace("ids.bin", "ids.txt"), "ids.txt: must be a .bin file"),
    ],
)
def test_a_published_model_is_this_one(change, flags, words, tmp_path):
    """Its config.json is compared in all that shapes do not show, and its token ids are no bytes."""
    module, path = load(TRAIN), tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in {**PUBLISHED, **change}.items() if value is not None}))
    with pytest.raises(SystemExit, match=words) if words else contextlib.nullcontext():
        module.check_config(config(module, flags), path)


def config(module, flags=""):
    """The Config of a command line."""
    sys.argv = [TRAIN, "--device", "cpu", *flags.split()]
    return module.parse_config()


def test_batches():
    """(seed, step) alone decides; targets are the next tokens, and none follows from another document."""
    module = load(TRAIN)
    cfg = config(module, f"--data {equivalence.documents()} --seq 100 --batch 16")
    ids, starts = data = module.load_data(cfg)[0]
    inputs, targets = module.make_batch(cfg, data, 3)
    again = module.make_batch(cfg, module.load_data(cfg)[0], 3)
    others = module.make_batch(cfg, data, 4), module.make_batch(dataclasses.replace(cfg, seed=1), data, 3)
    assert torch.equal(inputs, again[0]) and torch.equal(targets, again[1])
    assert not any(torch.equal(one[0], two[0]) for one, two in itertools.combinations((again, *others), 2))
    sizes = [file.stat().st_size for file in sorted(Path(cfg.data).iterdir())]
    assert starts.tolist() == [0, *np.cumsum(sizes)[:-1].tolist()]
    text = bytes(ids)
    for row_in, row_out in zip(inputs.tolist(), targets.tolist()):
        windows = [match.start() + 1 for match in re.finditer(b"(?=%b)" % re.escape(bytes(row_in)), text)]
        assert row_out in [[module.IGNORE if i in starts else text[i] for i in range(w, w + 100)] for w in windows]
    assert (targets == module.IGNORE).any()


@pytest.mark.parametrize("lengths", [[500, 440, 20, 20, 20], [940, 10, 20, 30], [1000]])
def test_what_is_held_out(lengths, tmp_path, cut=950):
    """Text that is held out is trained on by nobody, and without --validate nothing is held out."""
    root = load(TRAIN)
    ids, starts = np.random.default_rng(0).integers(1, 256, size=1000, dtype=np.uint8), np.cumsum([0, *lengths[:-1]])
    for i, document in enumerate(np.split(ids, starts[1:])):
        document.tofile(tmp_path / str(i))
    cfg = root.Config(seq=10, validate=1, data=str(tmp_path))
    (seen, seen_starts), (unseen, unseen_starts) = root.load_data(cfg)
    assert (seen.tolist(), unseen.tolist()) == (ids[:cut].tolist(), ids[cut:].tolist())
    assert [*seen_starts, *(unseen_starts + cut)] == starts.tolist()
    everything, nothing = root.load_data(dataclasses.replace(cfg, validate=0))
    assert (everything[0].tolist(), everything[1].tolist()) == (ids.tolist(), starts.tolist()) and not len(nothing[0])
    with pytest.raises(SystemExit, match="must have at least 1020 tokens with --seq 50, has 1000"):
        root.load_data(dataclasses.replace(cfg, seq=50))


@pytest.mark.parametrize("dtype, vocab", [(np.uint16, 65536), (np.uint32, 100_000)])
def test_token_files(dtype, vocab, tmp_path):
    """They are mapped, not read."""
    module = load(TRAIN)
    ids = np.random.default_rng(0).integers(1, vocab, 999).astype(dtype)
    ids[1] = 0
    ids.tofile(tmp_path / "tokens.bin")
    (read, starts), _ = module.load_data(config(module, f"--data {tmp_path}/tokens.bin --vocab {vocab}"))
    assert isinstance(read, np.memmap) and np.array_equal(read, ids) and starts.tolist() == [0]


def test_initial_weights():
    """Normal with deviation 0.02, norms 1; every tensor has its own numbers, and so has every seed, but no dtype."""
    flags = "--seed 0", "--seed 0 --dtype float32", "--seed 1"
    first, single, other = (launch(TRAIN, 1, f"{SMALL} --steps 0 {flag}").weights for flag in flags)
    for name, tensor in first.items():
        assert torch.equal(tensor, single[name].double())
        if tensor.ndim == 1:
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            assert abs(tensor.std() / 0.02 - 1) < 5 / (2 * tensor.numel()) ** 0.5  # five deviations
    same_shape = [tensor for name, tensor in first.items() if "gate_proj" in name or "up_proj" in name]
    assert len({tensor.numpy().tobytes() for tensor in same_shape}) == len(same_shape) == 6


@in_a_fork
def test_optimizer():
    """AdamW, its decay on matrices alone, and the clip, written out here by the formulas (arXiv:1711.05101)."""
    torch.set_default_dtype(torch.float64)
    lr, decay, eps, clip = 1e-2, 0.3, 1e-3, 0.5
    module = load(TRAIN)
    flags = f"{SMALL} --steps 4 --warmup 1 --lr {lr} --weight_decay {decay} --eps {eps} --clip {clip}"
    rates = [lr / 2, lr, 0.775 * lr, 0.325 * lr]  # half way up, at the top, and down a cosine to a tenth
    cfg = config(module, flags)
    model, batch = module.build_model(cfg), module.make_batch(cfg, module.load_data(cfg)[0], 0)
    optimizer = module.make_optimizer(cfg, model)
    m, v = ({name: 0 for name, _ in model.named_parameters()} for _ in range(2))
    for t, rate in enumerate(rates, 1):
        module.forward_backward(cfg, model, *batch)
        before = {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}
        norm = torch.stack([g.norm() for _, g in before.values()]).norm()
        assert norm > clip
        optimizer.zero_grad()
        module.set_learning_rate(cfg, optimizer, t - 1)
        module.train_step(cfg, model, optimizer, *batch)
        for name, p in model.named_parameters():
            weight, g = before[name]
            g = g * clip / (norm + 1e-6)
            m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.95 * v[name] + 0.05 * g**2
            update = m[name] / (1 - 0.9**t) / ((v[name] / (1 - 0.95**t)) ** 0.5 + eps)
            wanted = weight * (1 - rate * decay * (g.ndim > 1)) - rate * update
            assert p.grad is None and (wanted - p).abs().max() <= 1e-12, (t, name)


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


def operations_of_a_block(name):
    """How many matmuls and forwards of attention a block's forward and backward take, and bytes that autograd keeps."""
    module, seen, kept = load(f"01_single_gpu/{name}.py"), [], {}
    cfg = config(module)
    block, x = module.build_model(cfg).model.layers[0], torch.randn(4, cfg.seq, cfg.dim, requires_grad=True)

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with probes.Operations(lambda name, *_: seen.append(name)), hooks:
        block(x, module.rope_table(cfg, torch.arange(cfg.seq))).sum().backward()
    forwards = [name for name in seen if "attention" in name and "backward" not in name]
    weights = sum(kept.get(p.data_ptr(), 0) for p in block.parameters())
    return sum(name == "aten::mm" for name in seen), len(forwards), sum(kept.values()) - weights


@in_a_fork
def test_checkpointing_computes_again():
    """Full: one more forward, but for down_proj, whose output nobody needs. Selective: not one matmul more.

    LoRA: none for a frozen weight, three for each of two adapters, which keep `--lora_rank` numbers of a token.
    """
    names = "train", "activation_checkpointing", "selective_checkpointing", "lora"
    (*plain, kept), (*full, _), (*selective, _), lora = map(operations_of_a_block, names)
    assert plain == selective == [3 * 7, 1] and full == [4 * 7 - 1, 2]
    assert lora == ((2 + 2 * 3) * 7, 1, kept + 7 * 16 * 4 * (4 * 128))


def test_flags(capsys):
    """They come before the preset, and that before the defaults. None is taken for another."""
    module = load(TRAIN)
    cfg = config(module, "--preset llama3_1b --layers 2")
    assert (cfg.layers, cfg.dim, cfg.seq, cfg.compile) == (2, 2048, 128, False)
    assert config(module) == module.Config(device="cpu", **module.PRESETS["tiny"])
    for flags, words in ("--preset gpt5", "llama3_8b"), ("--ep 2", "--ep 2"):  # not --eps
        with pytest.raises(SystemExit, match="2"):
            config(module, flags)
        assert re.fullmatch(f".*{words}.*\n", capsys.readouterr().err)


def test_save_follows_links(tmp_path):
    """The file behind the link is replaced: whoever reads the old one keeps it; its mode is that of any new file."""
    module, link = load(TRAIN), tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("old")
    with open(tmp_path / "file") as reader:
        module.write_weights(config(module, f"--save {link}"), {"weight": torch.ones(2)}, [])
        assert link.is_symlink() and reader.read() == "old"
    (tmp_path / "new").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "new"]
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "new").stat().st_mode
