"""Pictures on disk are those that pictures.py draws, and what they show is what the recipes do."""

import json
import math
import re
from collections import Counter, defaultdict
from functools import cache
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree

import bench
import pictures
import pytest
from launch import ROOT, launch, load
from test_lineage import FAMILY, parents

SVG = "{http://www.w3.org/2000/svg}"
FOLDERS = {path[:2]: path.split("/")[0] for path in FAMILY}


def elements(path: str, tag: str) -> list[ElementTree.Element]:
    """All elements of a stored picture with this tag, in order."""
    return list(ElementTree.parse(ROOT / path).iter(SVG + tag))


@pytest.mark.thorough
@pytest.mark.parametrize("path", pictures.PICTURES)
def test_is_up_to_date(path):
    assert (ROOT / path).read_text() == pictures.PICTURES[path](), "run python tests/pictures.py"


@pytest.mark.parametrize("path", pictures.PICTURES)
def test_reads_well(path):
    """On a phone, by a screen reader, and in both modes: every class has a color in each."""
    svg = ElementTree.parse(ROOT / path).getroot()
    left, top, width, height = map(float, svg.get("viewBox").split())
    assert width <= (480 if path == "tests/family.svg" else 640)
    assert svg.get("role") == "img" and svg.find(f"{SVG}title").text
    assert all(int(text.get("font-size")) >= 11 for text in elements(path, "text"))
    used = {name for element in svg.iter() for name in element.get("class", "").split()} - {"line"}
    light, dark = svg.find(f"{SVG}style").text.split("@media (prefers-color-scheme: dark)")
    for colors, mode in (light, 0), (dark, 1):
        found = dict(re.findall(r"\.(\w[\w-]*)\{color:(#\w{6})\}", colors))
        assert found == {role: pictures.COLORS[role][mode] for role in used}
    ground = next(svg.iter(f"{SVG}rect"))
    assert (ground.get("class"), ground.get("width"), ground.get("height")) == ("ground", "100%", "100%")


def test_canvas_refuses_what_cannot_be_read():
    def canvas():
        canvas = pictures.Canvas("a picture", 100)
        canvas.box(pictures.Box(10, 40, 30, 20), "plain")
        canvas.text(10, 20, ("ten", "ink"))
        return canvas

    canvas().text(40, 20, ("beside", "ink"))
    canvas().label(pictures.Box(10, 40, 30, 20), "four")
    assert canvas().svg(30)
    refused = [
        lambda: canvas().text(60, 20, ("too long", "ink")),
        lambda: canvas().text(5, 50, ("half inside", "ink")),
        lambda: canvas().text(30, 24, ("over ten", "ink")),
        lambda: canvas().label(pictures.Box(10, 40, 30, 20), "wider"),
        lambda: canvas().text(10, 80, ("small", "ink"), size=10),
        lambda: canvas().text(10, 80, ("pale", "rule")),
        lambda: canvas().svg(20),
    ]
    for draw in refused:
        with pytest.raises(ValueError, match="a picture"):
            draw()


# ------------------------------------------------------------------------------------------------------------- family
def test_family_shows_the_headers():
    """Read back from positions and texts: every recipe once, below its first parent, with others and differences."""
    texts = [("".join(text.itertext()), float(text.get("x"))) for text in elements("tests/family.svg", "text")]
    lines = [(text, x) for text, x in texts if text in FAMILY]
    assert sorted(text for text, _ in lines) == sorted(FAMILY)
    above = {}  # x -> the last recipe there
    for text, x in lines:
        left = [other for other in above if other < x]
        theirs = parents(FAMILY[text])
        assert [above[max(left)]] * bool(theirs) == theirs[:1] if left else not theirs, text
        above = {other: recipe for other, recipe in above.items() if other < x} | {x: text}
        where = texts.index((text, x))
        if theirs:
            added, removed = pictures.difference(theirs[0], text)
            assert texts[where + 1][0] == f"+{added} −{removed}"
        if theirs[1:]:
            below = takewhile(lambda text: text.startswith("and "), (text for text, _ in texts[where + 2 :]))
            others = re.findall(r"and (\d\d)/(\S+) ", "".join(below))
            assert [f"{FOLDERS[number]}/{file}" for number, file in others] == theirs[1:]


# --------------------------------------------------------------------------------------------------------------- ring
def test_ring_sums_all_chunks():
    """Each step, every rank sends a chunk to the next; half-way each has one sum, at the end all; 2(N-1)/N is sent."""
    ranks, n = range(4), 4
    sends, held, sent = pictures.ring(4)
    assert len(sends) == 2 * (n - 1) and len(held) == len(sends) + 1 and sent == [2 * (n - 1) / n] * n
    assert held[0] == [[[int(other == rank) for other in ranks]] * n for rank in ranks]
    for step, moves in enumerate(sends):
        assert [(sender, receiver) for sender, receiver, _ in moves] == [(rank, (rank + 1) % n) for rank in ranks]
        assert len({chunk for _, _, chunk in moves}) == n
        after = [list(chunks) for chunks in held[step]]
        for sender, receiver, chunk in moves:
            there = held[step][receiver][chunk] if step < n - 1 else [0] * n
            after[receiver][chunk] = [a + b for a, b in zip(held[step][sender][chunk], there)]
        assert held[step + 1] == after
    complete = [[sum(chunk == [1] * n for chunk in chunks) for chunks in now] for now in held]
    assert complete[n - 1] == [1] * n and complete[-1] == [n] * n


def test_ring_shades_its_sums():
    cells = [rect.get("class") for rect in elements("02_data_parallel/ring.svg", "rect")]
    recorded = [sum(chunk) for now in pictures.ring(4).held[1:] for chunks in now for chunk in chunks]
    legend = [f"sum{count}" for count in (1, 2, 3, 4)]
    assert cells == ["ground", *(f"sum{count}" for count in recorded), *legend]


# ------------------------------------------------------------------------------------------------------------- blocks
SIZES = dict(b=3, s=12, d=40, h=4, k=10, f=56, tp=2)
KV_HEADS = 2
WEIGHTS = {"q k v": [40 + 2 * KV_HEADS * 10, 40], "o": [40, 40], "gate up": [2 * 56, 40], "down": [40, 56]}
FLAGS = f"--device cpu --steps 1 --layers 1 --batch 3 --seq 12 --dim 40 --heads 4 --kv_heads {KV_HEADS} --ffn 56"
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter"}


def sizes(shape: str) -> list[int]:
    """'(b s)/tp d' -> [18, 40]"""
    axes = [axis.partition("/") for axis in re.findall(r"\([^)]*\)\S*|\S+", shape)]
    return [
        math.prod(SIZES[letter] for letter in re.findall(r"\w+", above)) // SIZES.get(below, 1)
        for above, _, below in axes
    ]


def watched_block(module):
    """A probe: events of the block in forward, (name, shape of the output, digest), and their names in backward.

    Behind the shape of a matmul's output stands the length of its input.
    """
    forward, backward, phase = [], [], [None]
    functional, dist, torch = module.nn.functional, module.dist, module.torch
    run_block, run_norm, matmul = module.Block.forward, module.RMSNorm.forward, torch.Tensor.__matmul__

    def record(name, shape, tensor=None):
        if phase[0] == "forward":
            forward.append((name, list(shape), None if tensor is None else tensor.double().sum().item()))
        if phase[0] == "backward":
            backward.append(name)

    def computes(name, function):
        def wrapper(*args, **kwargs):
            out = function(*args, **kwargs)
            if phase[0] == "forward":
                record(name, out.shape, out)
                out.register_hook(lambda gradient: record(name, gradient.shape))
            return out

        return wrapper

    def sends(name, function, output):
        def wrapper(*args, **kwargs):
            record(name, args[output].shape)
            return function(*args, **kwargs)

        return wrapper

    def multiplies(function):
        def wrapper(x, weight, *args):
            out = function(x, weight, *args)
            if phase[0] == "forward":
                record("matmul", [*out.shape, x.shape[-1]], out)
            return out

        return wrapper

    def norm(self, x):
        record("+", x.shape, x)
        return run_norm(self, x)

    def block(self, x, *args):
        phase[0] = "forward"
        x.register_hook(lambda gradient: phase.__setitem__(0, None))
        out = run_block(self, x, *args)
        record("+", out.shape, out)
        phase[0] = None
        out.register_hook(lambda gradient: phase.__setitem__(0, "backward"))
        return out

    module.Block.forward = block
    module.RMSNorm.forward = computes("RMSNorm", norm)
    functional.scaled_dot_product_attention = computes("attention", functional.scaled_dot_product_attention)
    functional.silu = computes("SwiGLU", functional.silu)
    functional.linear = multiplies(functional.linear)
    torch.Tensor.__matmul__ = multiplies(matmul)
    dist.all_reduce = sends("all-reduce", dist.all_reduce, 0)
    group = dist.ProcessGroup
    group._allgather_base = sends("all-gather", group._allgather_base, 1)
    group._reduce_scatter_base = sends("reduce-scatter", group._reduce_scatter_base, 1)
    return lambda: (forward, backward)


@cache
def events(recipe: str) -> list[tuple[list, list]]:
    """What watched_block reports, per rank."""
    return launch(recipe, SIZES["tp"], FLAGS, probe=watched_block, save=False).probes


def joined(forward: list[tuple]) -> list[tuple[str, list[int]]]:
    """Names and shapes, without SwiGLU; matmuls in a row that read the same input are one, with all their outputs."""
    found = []
    for name, shape, _ in forward:
        if name == "matmul" and found[-1][0] == "matmul" and found[-1][1][-1] == shape[-1]:
            found[-1][1][-2] += shape[-2]
        elif name != "SwiGLU":
            found.append((name, list(shape)))
    return found


@pytest.mark.parametrize("recipe", pictures.BLOCKS)
def test_block_computes_and_communicates_as_drawn(recipe):
    """Forward, top to bottom: norms, split weights, attention and collectives, with their shapes."""
    parts = pictures.BLOCKS[recipe]
    wanted = [("+", sizes(parts[0].shape))]
    for before, part, after in zip([None, *parts], parts, [*parts[1:], None]):
        if isinstance(part, pictures.Exchange):
            wanted += [(name, sizes(part.shape)) for name in part.forward]
        elif part.split == "columns":
            outputs, inputs = WEIGHTS[part.label]
            wanted.append(("matmul", [*sizes(before.shape)[:-1], outputs // 2, inputs]))
            assert part.shape == after.shape  # attention and SwiGLU return what they read, queries and gates
        elif part.split == "rows":
            outputs, inputs = WEIGHTS[part.label]
            wanted.append(("matmul", [*sizes(part.shape)[:-1], outputs, inputs // 2]))
            assert sizes(part.shape)[-1] == outputs
        elif part.label != "SwiGLU":
            wanted.append((part.label, sizes(part.shape)))
    swiglu = [sizes(part.shape) for part in parts if part[0] == "SwiGLU"]
    for forward, _ in events(recipe):
        assert joined(forward) == wanted
        assert [shape for name, shape, _ in forward if name == "SwiGLU"] == swiglu


@pytest.mark.parametrize("recipe", pictures.BLOCKS)
def test_block_communicates_in_backward_as_drawn(recipe):
    """Backward, bottom to top: the collectives of each point, between the gradients of what lies around it."""
    wanted = []
    for part in reversed(pictures.BLOCKS[recipe]):
        if isinstance(part, pictures.Exchange):
            wanted += part.backward
        elif not part.split and part.label != "+":
            wanted.append(part.label)
    assert [backward for _, backward in events(recipe)] == [wanted] * SIZES["tp"]


@pytest.mark.parametrize("recipe", pictures.BLOCKS)
def test_block_computes_the_same_where_drawn(recipe):
    """What is drawn in one color is equal on both ranks to the bit; all else differs."""
    (forward, _), (other, _) = events(recipe)
    equal = defaultdict(set)
    for (name, _, mine), (_, _, theirs) in zip(forward, other):
        if name not in COLLECTIVES:
            equal[name].add(mine == theirs)
    drawn = defaultdict(set)
    for part in pictures.BLOCKS[recipe]:
        if isinstance(part, pictures.Part):
            drawn["matmul" if part.split else part.label].add(part.same)
    assert equal == drawn


@pytest.mark.parametrize("recipe", pictures.BLOCKS)
def test_block_is_drawn_from_its_parts(recipe):
    """The column of the recipe has the parts' labels, shapes and collectives, top to bottom."""
    svg = "04_tensor_sequence/blocks.svg"
    texts = ["".join(text.itertext()) for text in elements(svg, "text")]
    start = texts.index(Path(recipe).name) + 3  # behind the ranks
    wanted, shape = [], pictures.BLOCKS[recipe][0].shape
    for part in pictures.BLOCKS[recipe]:
        wanted.append(shape)
        if isinstance(part, pictures.Exchange):
            wanted += ["forward", *(part.forward or ["nothing"]), "backward", *(part.backward or ["nothing"])]
            shape = part.shape
        else:
            wanted += [part.label] * 2
            shape = part.shape + ", partial" * part.partial
    assert texts[start : start + len(wanted) + 1] == [*wanted, shape]


# ------------------------------------------------------------------------------------------------------------ context
def watched_attention(module):
    """A probe: instead of main, attend once, with the positions that shard gives this rank as queries and keys.

    Reports these, and of a ring per step (query, key) of each score that is computed, by the keys that have arrived.
    """
    held, steps = [], []

    def main():
        module.dist.init_process_group("gloo")
        cfg = module.Config(seq=pictures.TOKENS, layers=1, device="cpu")
        cp = module.build_model(cfg).cp
        held.extend(module.shard(cfg, cp).tolist())
        if hasattr(module, "visible") and not hasattr(module, "Mesh"):
            visible, attend = module.visible, module.local_attention

            def watched_visible(*args):
                steps.append([])
                return visible(*args)

            def watched_attend(q, k, v, causal):
                found = module.masked_scores(q, k, causal)[0, 0, 0].isfinite().nonzero().tolist()
                steps[-1].extend((int(q[0, 0, i, 0]), int(k[0, 0, j, 0])) for i, j in found)
                return attend(q, k, v, causal)

            module.visible, module.local_attention = watched_visible, watched_attend
            x = module.torch.tensor(held, dtype=module.torch.float64)[None, None, :, None]  # b h s k
            module.attention(x, x, x, cp)
        module.dist.destroy_process_group()

    module.main = main
    return lambda: (held, steps)


@cache
def attended(recipe: str) -> list[tuple[list, list]]:
    """What watched_attention reports, per rank."""
    return launch(recipe, pictures.CP, probe=watched_attention, save=False).probes


def placed(path: str) -> tuple[list[tuple], list[tuple]]:
    """The rectangles of a stored picture, (class, x, y, width, height), and its texts, (text, x, y), in order."""
    sides, (_, *drawn) = ("x", "y", "width", "height"), elements(path, "rect")  # the first is the background
    rects = [(rect.get("class"), *(float(rect.get(side)) for side in sides)) for rect in drawn]
    texts = [("".join(t.itertext()), float(t.get("x")), float(t.get("y"))) for t in elements(path, "text")]
    return rects, texts


@pytest.mark.parametrize("recipe", pictures.SHARDED)
def test_tokens_are_held_as_drawn(recipe):
    """Real groups give the positions of the stand-ins; each token has one rank, and its color below the recipe."""
    held = [held for held, _ in attended(recipe)]
    assert held == pictures.held(recipe)
    rank_of = {token: rank for rank, tokens in enumerate(held) for token in tokens}
    assert sorted(rank_of) == list(range(pictures.TOKENS)) and sum(map(len, held)) == pictures.TOKENS
    rects, texts = placed("05_context_ring/tokens.svg")
    (top,) = [y for text, _, y in texts if Path(recipe).name in re.split(r", |  ", text)]
    row = sorted((x, y, w, h, color) for color, x, y, w, h in rects if top < y < top + 20)
    assert [color for *_, color in row] == [f"rank{rank_of[token]}" for token in range(pictures.TOKENS)]
    for token, (x, y, w, h, _) in enumerate(row):
        assert [text for text, a, b in texts if x < a < x + w and y < b < y + h] == [str(token)]


@pytest.mark.parametrize("recipe", pictures.RINGS)
def test_ring_computes_the_drawn_scores(recipe):
    """A real ring computes what is drawn, each step on each rank: every score that is not masked, and each once."""
    ran = [
        pictures.Score(query, key, rank, step)
        for rank, (_, steps) in enumerate(attended(recipe))
        for step, found in enumerate(steps)
        for query, key in found
    ]
    assert sorted(ran) == sorted(pictures.scores(recipe))
    tokens = range(pictures.TOKENS)
    assert sorted((s.query, s.key) for s in ran) == [(query, key) for query in tokens for key in tokens if key <= query]


def test_steps_show_the_scores():
    """Read back: cells in the colors of their steps beside the ranks of their queries; frames and bars to scale."""
    rects, texts = placed("05_context_ring/steps.svg")
    cells, bars = ([rect for rect in rects if rect[4] == height] for height in (11, 24))
    paths = [re.findall(r"[\d.]+", path.get("d")) for path in elements("05_context_ring/steps.svg", "path")]
    frames = [(float(d[0]), float(d[1]), float(d[2]) - float(d[0])) for d in paths if len(d) == 10]
    places, units = [(step, rank) for step in range(pictures.CP) for rank in range(pictures.CP)], []
    for recipe in pictures.RINGS:
        scores, rank_of = sorted(pictures.scores(recipe)), {s.query: s.rank for s in pictures.scores(recipe)}
        panel, cells = cells[: len(scores)], cells[len(scores) :]
        columns, rows = (sorted({cell[i] for cell in panel}) for i in (1, 2))
        drawn = [(rows.index(y), columns.index(x), color) for color, x, y, *_ in panel]
        assert drawn == [(s.query, s.key, f"step{s.step}") for s in scores]
        for query, y in enumerate(rows):
            assert [text for text, a, b in texts if a < columns[0] and y < b < y + 11] == [str(rank_of[query])]
        counts, lengths = pictures.work(recipe)
        framed, frames = frames[: len(places)], frames[len(places) :]
        zero, unit = framed[0][0], framed[0][2] / lengths[0]
        units.append(unit)
        for (step, rank), (x, y, w) in zip(places, framed):
            count, start = counts[rank, step], zero + unit * sum(lengths[:step])
            assert (x, w) == pytest.approx((start, unit * lengths[step]), abs=0.05)
            filled = [(color, width) for color, a, b, width, _ in bars if (a, b) == (x, y)]
            assert filled == [(f"step{step}", pytest.approx(count * unit, abs=0.05))] * bool(count)
            assert [text for text, a, b in texts if x < a < x + w and y < b < y + 24] == [str(count)] * bool(count)
            assert f"rank {rank}" in [text for text, a, b in texts if a < zero and y < b < y + 24]
    assert units == pytest.approx(units[:1] * 3, abs=0.01) and not cells + frames


# --------------------------------------------------------------------------------------------------------------- mesh
MESH_SVG = "08_4d/mesh.svg"
MESH_FLAGS = "--device cpu --steps 1 --batch 4 --microbatches 2 --seq 16 --dp 2 --cp 2 --tp 2 --pp 2"


def watched_mesh(module):
    """A probe: what a rank has, its groups, and how often each is used in forward and in backward.

    tp and cp are counted within blocks, per block and micro-batch, dp x cp per unit, pp per micro-batch.
    """
    models, reported, used, inside = [], [], Counter(), Counter()  # inside: 1 in forward or backward of blocks
    dist, axes = module.dist, ("tp", "cp", "dp_cp", "pp")
    build_model, run_block, run = module.build_model, module.Block.forward, module.main
    destroy = dist.destroy_process_group

    def build(cfg):
        models.append(build_model(cfg))
        return models[0]

    def block(self, x, *args):
        x.register_hook(lambda gradient: inside.subtract(["backward"]))
        inside.update(["forward"])
        out = run_block(self, x, *args)
        inside.subtract(["forward"])
        out.register_hook(lambda gradient: inside.update(["backward"]))
        return out

    def counts(function, axis, way=None):
        def wrapper(*args, **kwargs):
            group = args[0] if isinstance(args[0], dist.ProcessGroup) else kwargs["group"]
            if group is getattr(models[0], axis):
                used.update((axis, phase) for phase in ([way] if way else +inside))
            return function(*args, **kwargs)

        return wrapper

    def transfers(function):
        def wrapper(model, op, *args):
            work = function(model, op, *args)
            used["pp", dict(F="forward", B="backward")[op]] += work is not None
            return work

        return wrapper

    def report():
        (model,), blocks = models, len(models[0].model.layers)
        per = dict(tp=2 * blocks, cp=2 * blocks, dp_cp=len(model.units), pp=2)
        counted = {axis: [used[axis, way] / per[axis] for way in ("forward", "backward")] for axis in axes}
        layers, tokens = [int(i) for i in model.model.layers], module.shard(model.cfg, model.cp).tolist()
        members = {axis: dist.get_process_group_ranks(getattr(model, axis)) for axis in axes}
        return (layers, model.tp.rank(), model.dp.rank(), tokens), members, counted

    def main():
        run()
        reported.append(report())
        destroy()

    module.build_model, module.Block.forward, module.main = build, block, main
    dist.destroy_process_group = lambda: None  # the report asks the groups
    group = dist.ProcessGroup
    group._allgather_base = counts(group._allgather_base, "tp")
    group._reduce_scatter_base = counts(group._reduce_scatter_base, "tp")
    group._allgather_base = counts(group._allgather_base, "dp_cp", "forward")
    dist.all_to_all_single = counts(dist.all_to_all_single, "cp")
    dist.all_to_all_single = counts(dist.all_to_all_single, "dp_cp", "backward")
    module.send = transfers(module.send)
    return lambda: reported[0]


@cache
def meshed(order: str) -> list[tuple[tuple, dict, dict]]:
    """What watched_mesh reports, per rank."""
    return launch(pictures.MESH, 16, f"{MESH_FLAGS} --order {order}", probe=watched_mesh, save=False).probes


def drawn_meshes() -> list[tuple[list, dict, list[tuple]]]:
    """Read back, per order: the cards of the ranks, (x, y, w, h); ends of lines by role; cells, (role, x, y)."""
    rects, texts = placed(MESH_SVG)
    cards = [rect for color, *rect in rects if color == "ground"]
    paths = [(path.get("class"), path.get("d")) for path in elements(MESH_SVG, "path")]
    meshes = []
    for i in range(2):
        own = cards[16 * i : 16 * i + 16]
        for rank, (x, y, w, h) in enumerate(own):
            assert [text for text, a, b in texts if x < a < x + w and y < b < y + h] == [str(rank)]
        top, bottom = own[0][1] - 60, own[-1][1] + 60
        found, ends, cells = re.compile(r"([\d.]+) ([\d.]+)"), defaultdict(list), []
        for color, d in paths:
            points = [(float(x), float(y)) for x, y in found.findall(d)]
            if top < points[0][1] < bottom:
                if color.endswith(" line"):
                    ends[color.removesuffix(" line")] += points
                else:
                    cells += [(color, x, y) for x, y in points]
        meshes.append((own, ends, cells))
    return meshes


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", pytest.param("tp-cp-pp-dp", marks=pytest.mark.thorough)])
def test_mesh_is_drawn_as_it_is(order):
    """Real ranks have what their cards show, and lines lead from rank 0 to all members of its groups and no others."""
    cards, ends, cells = drawn_meshes()[list(pictures.MESHES).index(order)]
    ran = meshed(order)
    stages = sorted({tuple(layers) for (layers, *_), _, _ in ran})
    for rank, (x, y, w, h) in enumerate(cards):
        (layers, matrices, batch, tokens), _, _ = ran[rank]
        inside = [(role, a - x, b - y) for role, a, b in cells if x <= a < x + w and y <= b < y + h]
        columns, rows = (sorted({cell[i] for cell in inside}) for i in (1, 2))
        assert len(inside) == 8 * 2 + 2 * 4 and len(columns) == 2 + 4 and len(rows) == 8
        filled = {(columns.index(a), rows.index(b)): role for role, a, b in inside if role != "plain"}
        wanted = {(matrices, layer): pictures.STAGE[stages.index(tuple(layers))] for layer in layers}
        wanted |= {(2 + token // 4, 4 * batch): pictures.TOKEN for token in tokens}
        assert filled == wanted, rank
    for axis, travel in pictures.TRAVELS.items():
        touched = {
            rank
            for rank, (x, y, w, h) in enumerate(cards)
            if any(x <= a <= x + w and y <= b <= y + h for a, b in ends[travel.role])
        }
        assert touched == set(ran[0][1][axis]), axis


def test_mesh_carries_what_the_legend_says():
    """As often as counted in a step: in blocks for tp and cp, of each unit for dp x cp, between stages for pp."""
    for rank, ((layers, *_), _, counted) in enumerate(meshed(next(iter(pictures.MESHES)))):
        for axis, travel in pictures.TRAVELS.items():
            forward, backward = travel.forward, travel.backward
            if axis == "pp":  # a stage sends one way
                forward, backward = (forward, 0) if 0 in layers else (0, backward)
            assert counted[axis] == [forward, backward], (rank, axis)


# ------------------------------------------------------------------------------------------------------------ balance
def test_balance_is_to_scale():
    """Read back: each expert's band is as high, in each step, as its share of the stored rows, which are of all tokens.

    Without balancing the busiest expert ends with far more than the mean, with either kind with clearly less.
    """
    runs = json.loads(pictures.BALANCE.read_text())
    svg, loads = "07_expert/balance.svg", []
    bands = [
        re.findall(r"([\d.]+) ([\d.]+)", d) for path in elements(svg, "path") if (d := path.get("d")).endswith("z")
    ]
    texts = ["".join(text.itertext()) for text in elements(svg, "text")]
    for recipe, run in runs.items():
        cfg = load(recipe).Config(seq=int(pictures.BALANCE_FLAGS.split("--seq ")[1].split()[0]))
        assert {sum(rows) for rows in run} == {cfg.batch * cfg.seq * cfg.top_k}
        panel, bands = bands[: cfg.experts], bands[cfg.experts :]
        for expert, points in enumerate(panel):
            above, below = points[: len(run)], points[len(run) :][::-1]
            assert [x for x, _ in above] == [x for x, _ in below]
            heights = [float(y1) - float(y0) for (_, y0), (_, y1) in zip(above, below, strict=True)]
            assert heights == pytest.approx([160 * rows[expert] / sum(rows) for rows in run], abs=0.02)
        loads.append(sum(max(rows) / sum(rows) for rows in run[-10:]) / 10 * cfg.experts)
        assert f"busiest {loads[-1]:.2f}× the mean" in texts and Path(recipe).name in texts
    without, auxiliary, bias = loads
    assert not bands and max(auxiliary, bias) - 1 < 0.6 * (without - 1), loads


# ------------------------------------------------------------------------------------------------------------- curves
def test_curves_are_to_scale():
    """Read back: losses of every run, then differences from fp32 of all but fp32 and those that are far off.

    All recipes end near fp32. Naive forms are red.
    """
    stored = json.loads(pictures.CURVES.read_text())
    lines = [
        re.findall(r"([\d.]+) ([\d.]+)", d)
        for path in elements("10_mixed_precision/curves.svg", "path")
        if (d := path.get("d")).count("L") > 5
    ]
    texts = ["".join(text.itertext()) for text in elements("10_mixed_precision/curves.svg", "text")]
    for run, line in zip(stored["runs"], lines):
        heights = [234 - 170 * (loss - 0.5) / 4 for loss in run["losses"] if loss <= 4.5]
        assert [float(y) for _, y in line] == pytest.approx(heights, abs=0.01) and len(line) >= 99
        assert float(line[-1][0]) == pytest.approx(640 - 218, abs=0.01)
    final = {run["label"]: sum(run["losses"][-10:]) / 10 for run in stored["runs"]}
    far = {label for label, loss in final.items() if loss > final["fp32"] + 0.1}
    near = [label for label in final if label not in far | {"fp32"}]
    for label, line in zip(near, lines[len(final) :], strict=True):
        difference = final[label] - final["fp32"]
        assert float(line[-1][1]) == pytest.approx(504 - 200 * (difference + 0.05) / 0.13, abs=0.01)
        assert f"{label} {difference:+.3f}" in texts
    naive = {run["label"] for run in stored["runs"] if run["naive"]}
    assert far and far <= naive == {run["label"] for run in stored["runs"]} - set(pictures.LINES)


def test_curves_that_end():
    """A run that has become NaN ends where it did, and leaves the picture where its loss is beyond it."""
    good, bad = [3 - i / 100 for i in range(100)], [3.0, 9.0, 3.1, 3.2]
    runs = [
        {"label": label, "losses": losses, "last": losses[-1] if losses else None}
        for label, losses in (("fp32", good), ("bf16", good), ("naive", bad), ("hopeless", []))
    ]
    picture = ElementTree.fromstring(pictures.draw_curves({"each": 20, "runs": runs}))
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    paths = [path.get("d") for path in picture.iter(f"{SVG}path") if path.get("class") == f"{pictures.NAIVE} line"]
    assert "naive, then NaN" in texts and len(paths) == 2 and paths[1].count("L") == 1


def test_naive_forms_are_changes_of_the_recipes():
    """What tests/curves.py changes is there once, and those are all the naive forms that the picture has."""
    import curves

    for label, recipe, _, change in curves.RUNS:
        assert not change or (ROOT / recipe).read_text().count(change[0]) == 1, label
        assert bool(change) == (label not in pictures.LINES), label


# ------------------------------------------------------------------------------------------------------------ kernels
def test_addresses_are_those_of_the_kernels():
    """Run, in the interpreter or on the GPU, each kernel touches what is drawn in its programs' colors, and no more.

    What is drawn as the rest of a sector is that: with what is touched it fills whole sectors.
    """
    module, device = load(pictures.COALESCING), "cuda" if pictures.torch.cuda.is_available() else "cpu"
    drawn = defaultdict(list)  # role: the cells' corners, in the order of the panels
    for path in elements("09_kernels/addresses.svg", "path"):
        for x, y in re.findall(r"M([\d.]+) ([\d.]+)h", path.get("d")):
            drawn[path.get("class")].append((float(x), float(y)))
    panels = []
    for kernel in (*module.COPIES, *module.TRANSPOSES):
        copies = kernel in module.COPIES
        shape = (pictures.COPIED,) if copies else (pictures.SIDE, pictures.SIDE)
        sides = zip(*(module.touched(kernel, program, shape, pictures.BLOCK, device) for program in range(2)))
        panels += [[set(found.tolist()) for found in side] for side in sides][: 1 if copies else 2]
    cells = sorted({(x, y) for corners in drawn.values() for x, y in corners}, key=lambda cell: (cell[1], cell[0]))
    copied, transposed = cells[: 3 * pictures.COPIED], cells[3 * pictures.COPIED :]
    grids = [copied[i * pictures.COPIED : (i + 1) * pictures.COPIED] for i in range(3)]
    columns, side = sorted({x for x, _ in transposed}), pictures.SIDE
    grids += [[cell for cell in transposed if cell[0] in columns[i * side : (i + 1) * side]] for i in range(4)]
    for programs, grid in zip(panels, grids, strict=True):
        role = {cell: name for name, corners in drawn.items() for cell in corners}
        found = {name: {i for i, cell in enumerate(grid) if role[cell] == name} for name in drawn}
        assert [found["rank0"], found["rank1"]] == programs
        touched = found["rank0"] | found["rank1"]
        assert {i // 8 for i in found["gather"]} <= {i // 8 for i in touched} and not found["gather"] & touched
        assert (touched | found["gather"]) == {i for i in range(len(grid)) if i // 8 in {j // 8 for j in touched}}


def rows_of_kernels(*rows: tuple) -> dict:
    """Stored rows of kernel files: (file, what, by, ms, rate, unit)."""
    stored = defaultdict(lambda: {"rows": []})
    for name, *row in rows:
        stored[name]["rows"].append(dict(zip(("what", "by", "ms", "rate", "unit"), row)) | {"share": 0.5})
    return stored


def test_roofline_has_the_kernels_at_their_intensity():
    """Bytes per second times FLOPs per byte, forward and backward together; matmuls as measured; no file, no dots."""
    roofs = pictures.draw_roofline({})
    assert roofs.count('rx="4"') == 0 and "CUDA cores" in roofs and "4.24 TB/s" in roofs
    stored = rows_of_kernels(
        ("rope", "b, forward", "eager", 9.0, 0.5, "TB/s"),
        ("rope", "b, forward", "ours", 1.0, 4.0, "TB/s"),
        ("rope", "b, backward", "ours", 3.0, 2.0, "TB/s"),
        ("elementwise", "2^3 elements, forward", "ours", 3.0, 0.1, "TB/s"),
        ("elementwise", "2^4 elements, forward", "ours", 2.0, 3.0, "TB/s"),
        ("elementwise", "2^4 elements, backward", "ours", 2.0, 4.0, "TB/s"),
        ("adamw", "9 parameters, fp32", "ours", 2.0, 4.0, "TB/s"),
        ("tiling", "4096 x 4096 x 4096, bfloat16", "torch.matmul", 1.0, 700.0, "TFLOP/s"),
        ("tiling", "4096 x 4096 x 4096, bfloat16", "dot", 1.0, 600.0, "TFLOP/s"),
        ("cross_entropy", "with the head, forward and backward", "ours", 1.0, 650.0, "TFLOP/s"),
    )
    found = {dot.name: dot for dot in pictures.dots(stored)}
    assert found["rope"][:2] == (0.75, 0.75 * 2.5)
    assert found["elementwise"][:2] == (0.4, 0.4 * 3.5)  # of the size that has both
    assert found["adamw"][:2] == (17 / 30, 17 / 30 * 4)
    assert found["tiling, dot, bf16"][:2] == (pytest.approx(4096 / 3), 600.0)
    assert found["cross_entropy, head"].speed == 650 and len(found) == 5
    assert pictures.draw_roofline(stored).count('rx="4"') == 5


def test_labels_are_kept_apart():
    """In their order, never closer than asked, none below the bottom; where there is room, at the dots."""
    assert pictures.apart([10, 30, 60], 15, 100) == [10, 30, 60]
    assert pictures.apart([10, 12, 60], 15, 100) == [10, 25, 60]
    assert pictures.apart([80, 90, 95], 15, 100) == [70, 85, 100] and pictures.apart([], 15, 100) == []


def test_gpu_kernels_are_sorted_by_what_they_do():
    """By their names, where a fused kernel may also have those of the matmul and the attention around it."""
    names = {
        "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "matmuls",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>(Params)": "matmuls",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>": "attention",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
        "adamw_kernel": "optimizer",
        "squares_kernel": "optimizer",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_mm_3": "elementwise",
        "rms_norm_backward": "elementwise",
        "Memcpy DtoD (Device -> Device)": "elementwise",
    }
    assert {name: bench.kind_of(name) for name in names} == names
    assert [*bench.KINDS, "rest"] == list(pictures.DOING)


def test_steps_are_to_scale():
    """Each kind's bar is as long as its share of the longest step; without a measurement there is no bar."""
    kinds = {"matmuls": 40.0, "attention": 20.0, "elementwise": 20.0, "optimizer": 10.0, "rest": 10.0}
    faster = kinds | {"elementwise": 10.0, "rest": 0.0}
    steps = {"01_single_gpu/train.py": kinds, "09_kernels/train.py": faster}
    svg = ElementTree.fromstring(pictures.draw_step({"measured": {"gpu": "1 x GPU"}, "llama3_1b": steps}))
    bars = [float(rect.get("width")) for rect in svg.iter(f"{SVG}rect") if rect.get("height") == "26"]
    unit = bars[0] / 40
    assert bars == pytest.approx([ms * unit for step in steps.values() for ms in step.values()], abs=0.02)
    texts = ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]
    assert "100.0 ms" in texts and "80.0 ms" in texts
    assert "Not measured yet." in pictures.draw_step({})


# ----------------------------------------------------------------------------------------------------------- timeline
def length(spans: list) -> float:
    """Sum of the lengths."""
    return sum(end - start for start, end in spans)


@pytest.mark.parametrize("stage", pictures.STAGES)
def test_timeline_is_consistent(stage):
    """Gathers are communication; nothing computes while it is exposed; the sums are those beside the name."""
    without = load("01_single_gpu/profiling.py").without
    report, spans = pictures.read_timeline(stage)
    assert report["recipe"] == f"03_zero/{stage}.py"
    rounding = 0.002 * len(spans["exposed"])  # ms: spans are rounded to 1 µs at both ends, and joined over gaps of 1 µs
    assert length(without(spans["gather"], spans["communication"])) <= rounding
    assert length(without(spans["exposed"], spans["communication"])) <= rounding
    for kind in "communication", "exposed":
        assert abs(length(spans[kind]) - report["ms"][kind]) <= rounding, kind


def test_timeline_shows_what_the_headers_say():
    """Stage 1 waits for all of its communication, the others hide most; only stage 3 gathers in backward."""
    for stage in pictures.STAGES:
        report, spans = pictures.read_timeline(stage)
        exposed = report["ms"]["exposed"] / report["ms"]["communication"]
        assert exposed > 0.95 if stage == "zero1" else exposed < 0.5, stage
        start, end = min(spans["backward"])[0], max(spans["backward"])[1]
        in_backward = [span for span in spans["gather"] if start < span[0] and span[1] < end]
        assert bool(in_backward) == (stage == "zero3"), stage


def test_timeline_is_to_scale():
    """Bars, measured by the labels of the axis, begin and last as long as what they show."""
    svg = "03_zero/timeline.svg"
    texts = [("".join(text.itertext()), float(text.get("x"))) for text in elements(svg, "text")]
    axis = sorted((int(text.split()[0]), x) for text, x in texts if re.fullmatch(r"\d+ ms", text))
    (_, zero), (last, end) = axis[0], axis[-1]
    scale = (end - zero) / last
    drawn = defaultdict(list)
    for path in elements(svg, "path"):
        if path.get("class") in (*pictures.PHASES, *pictures.PARTS, "exposed"):
            found = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", path.get("d"))
            drawn[path.get("class")].append([((float(x) - zero) / scale, float(w) / scale) for x, w in found])
    for kind, lanes in drawn.items():
        for stage, bars in zip(pictures.STAGES, lanes, strict=True):
            spans = pictures.read_timeline(stage)[1][kind]
            wanted = [number for start, end in spans for number in (start, end - start)]
            precision = 0.02 / scale  # ms: bars and labels lie at hundredths of a pixel
            assert [number for bar in bars for number in bar] == pytest.approx(wanted, abs=precision), (kind, stage)
    assert set(drawn) == {*pictures.PHASES, *pictures.PARTS, "exposed"}
