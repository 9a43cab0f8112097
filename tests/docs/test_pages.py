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


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def bf16_states(*steps: int) -> list[dict[str, np.ndarray]]:
    bits = np.arange(1_000, dtype=np.uint16)
    return [{"w": (bits + np.uint16(step)).view(_NUMPY_TYPES["BF16"])} for step in steps]


def test_the_examples_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, patch = python_blocks("README.md")
    model, engine = bf16_states(0, 9)
    names = {
        "model": model,
        "engine": engine,
        "train_step": lambda m: m["w"].view("u2").__iadd__(1),
    }
    exec(run, names)
    assert engine["w"].tobytes() == model["w"].tobytes() == bf16_states(1)[0]["w"].tobytes()
    old, new, live = bf16_states(0, 1, 0)
    exec(patch, {"ww": names["ww"], "old": old, "new": new, "live": live})
    assert capsys.readouterr().out.startswith("Patch(compact, 1,000 of 1,000 elements")
    assert live["w"].tobytes() == new["w"].tobytes()


def test_the_examples_of_the_sync_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, engine = bf16_states(0, 9)

    class Optimizer:
        def step(self) -> None:
            model["w"].view("u2")[::100] += 1

    first, keys = python_blocks("docs/sync.md")
    names = {"model": model, "engine": engine, "optimizer": Optimizer()}
    exec(first, names)
    assert engine["w"].tobytes() == model["w"].tobytes()
    model["w"].view("u2")[7] += 1
    exec(
        f"{keys}\npublisher.publish()",
        {**names, "store": "runs/signed", "ww": StartsLate(names["ww"])},
    )
    assert engine["w"].tobytes() == model["w"].tobytes()


def test_the_examples_of_the_testing_page_run() -> None:
    names: dict[str, object] = {"__name__": "examples"}
    for block in python_blocks("docs/testing.md"):
        exec(block, names)
    assert hasattr(names["TestMyStore"](), "make_store")  # type: ignore[operator]
    assert names["store"].injected == {}  # type: ignore[attr-defined]


class StartsLate:
    """The library, with a subscriber that is made once there is something to follow."""

    def __init__(self, library: object) -> None:
        self._library = library

    def Publisher(self, *arguments: object, **options: object) -> object:  # noqa: N802
        publisher = self._library.Publisher(*arguments, **options)  # type: ignore[attr-defined]
        publisher.publish().result()
        return publisher

    def Subscriber(self, *arguments: object, **options: object) -> object:  # noqa: N802
        subscriber = self._library.Subscriber(*arguments, **options)  # type: ignore[attr-defined]
        subscriber.update()
        return subscriber


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
