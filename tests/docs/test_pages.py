"""The pages are true where a machine can tell: examples run, links lead somewhere, pictures are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from weightwire.diff.views import _NUMPY_TYPES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:tests|attacks|docs|examples|src|native|benchmarks)/[\w./-]*)`")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_is_named_exists(page: Path) -> None:
    for path in _PATH.findall(page.read_text()):
        assert (ROOT / path).exists(), path


def test_the_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert code is not None
    bits = np.arange(1_000, dtype=np.uint16)
    states = {
        name: {"w": (bits + step).view(_NUMPY_TYPES["BF16"])}
        for name, step in (("old", np.uint16(0)), ("new", np.uint16(1)), ("live", np.uint16(0)))
    }
    exec(code[1], dict(states))
    assert capsys.readouterr().out.startswith("Patch(compact, 1,000 of 1,000 elements")
    assert states["live"]["w"].tobytes() == states["new"]["w"].tobytes()


def test_the_picture_is_the_one_its_script_draws() -> None:
    script = ROOT / "docs" / "images" / "draw_overview.py"
    spec = importlib.util.spec_from_file_location("draw_overview", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "draw_overview", module)
        spec.loader.exec_module(module)
    assert module.draw() == (script.parent / "overview.svg").read_text()
