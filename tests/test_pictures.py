"""Pictures are up to date, are on a page, and can be read. Their schedules are checked in 06_pipeline."""

import re
from pathlib import Path
from xml.etree import ElementTree

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
    assert any(re.search(rf"\]\(({path}|{name})\)", page.read_text()) for page in pages.PAGES), "no page shows it"
