"""Documents: links lead somewhere; figures say what, when, where and on which commit."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CPU_FIGURES = {
    "cpu.decode.c1.tok_s",
    "cpu.decode.c8.tok_s",
    "cpu.prefill.tok_s",
    "cpu.rss_mb",
    "cpu.ready_s",
    "cli.help_ms",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links {target}"


def test_the_index_names_every_page():
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        if page.parent.name == "docs" and page.name != "README.md":
            assert f"({page.name})" in index, page.name


def test_every_recorded_figure_is_complete():
    figures = json.loads((ROOT / "docs/performance/summary.json").read_text())
    assert set(figures) >= CPU_FIGURES
    for name, figure in figures.items():
        assert set(figure) == {"value", "unit", "date", "device", "commit"}, name
        assert figure["value"] > 0, name
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", figure["date"]), name
        assert re.fullmatch(r"[0-9a-f]{7,40}", figure["commit"]), name
        assert figure["unit"], name
        assert figure["device"], name
