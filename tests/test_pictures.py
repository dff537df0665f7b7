"""Pictures are up to date, are on a page, and can be read; and they and the pages say what results hold."""

import re
from pathlib import Path
from xml.etree import ElementTree

import curves
import pages
import pictures
import pytest
from launch import ROOT

FILES = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("*/*.svg"))


def texts(svg: str) -> list[str]:
    """All texts of a picture, in order: matplotlib's releases draw the same with other bytes."""
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")]


@pytest.mark.thorough
@pytest.mark.parametrize("path", pictures.PICTURES)
def test_is_up_to_date(path):
    assert texts((ROOT / path).read_text()) == texts(pictures.PICTURES[path]()), "run python tests/tools/pictures.py"


@pytest.mark.parametrize("path", FILES)
def test_can_be_shown(path):
    """At most 640 pixels wide, at any width, on any ground; and a page shows it."""
    text, name = (ROOT / path).read_text(), Path(path).name
    svg = ElementTree.fromstring(text)
    pixels = 4 / 3 if svg.get("width").endswith("pt") else 1
    assert float(svg.get("width").removesuffix("pt")) * pixels <= 640 and len(svg.get("viewBox").split()) == 4
    assert "fill: #ffffff" not in text and "fill: white" not in text, "a ground"
    assert any(re.search(rf"\]\(({path}|{name})\)", page.read_text()) for page in pages.pages()), "no page shows it"


def test_time_to_loss():
    """Losses that fall linearly by validations: half the speed takes twice the time to what the last one reaches."""
    runs = [dict(label="first", seed=0, speed=1.0, losses=[5.0 - 0.1 * i for i in range(1, 11)])]  # 60 tokens a minute
    runs += [dict(runs[0], label="half", speed=0.5), dict(runs[0], label="last", losses=[4.95] * 4 + [4.25, 4.4])]
    runs += [dict(run, seed=1, losses=[4.5, 4.4]) for run in runs[:1]]
    found = curves.time_to_loss(dict(each=20, flags="--seq 30 --batch 2", runs=runs))
    wanted = {"first": [(150, 150), (40, 40)], "half": [(150, 300)], "last": [(100, 100)]}
    assert found == {label: list(map(pytest.approx, times)) for label, times in wanted.items()}
