"""``weightwire verify STORE``: is everything of a run there, and is it what its records say?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.text import Text

from weightwire.cli.numbers import bytes_text
from weightwire.cli.run_opening import open_run
from weightwire.cli.terminal import Terminal, printable
from weightwire.store.audit import Audit, audit, edges, weigh
from weightwire.store.audit_replay import Replay
from weightwire.store.run import Run
from weightwire.store.survey import Survey

_MAX_DAMAGES = 50


def verify_run(terminal: Terminal, store: str, key: str | None, *, deep: bool) -> bool:
    """Check a run and show how it stands; whether nothing is damaged.

    Raises:
        NotARun: nothing was published there.
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    with open_run(store, key) as run:
        result, found = audit(run, terminal.display.stage)
        if deep:
            result = _rebuild(terminal, run, result, found)
    terminal.show(_fields(run, result, is_deep=deep), _text(result, is_deep=deep))
    return not result.damages and not result.trouble


def _rebuild(terminal: Terminal, run: Run, result: Audit, found: Survey) -> Audit:
    commits = found.history.commits.values()
    own = {each.patch.folder for each in commits if each.patch is not None}
    steps = edges(found.history, found.gone)
    n_bytes = sum(step.n_bytes for step in steps if step.anchor or step.folder in own)
    with Replay(run, terminal.display.stage("rebuild", n_bytes)) as replay:
        damages = replay.walk(found.history, found.gone)
        n_rebuilt = replay.n_rebuilt
    # A patch with a damaged bucket cannot be applied either: once is enough.
    known = {damage.key[: damage.key.rindex("/") + 1] for damage in result.damages}
    new = [damage for damage in damages if damage.key not in known]
    result = replace(result, damages=(*result.damages, *new), n_rebuilt=n_rebuilt)
    return weigh(result, found)


def _fields(run: Run, result: Audit, *, is_deep: bool) -> dict[str, Any]:
    return {
        "run": run.name,
        "is_sound": not result.damages and not result.trouble,
        "is_newest_reachable": result.is_newest_reachable,
        "newest": result.newest if result.newest >= 0 else None,
        "n_versions": result.n_versions,
        "n_objects": result.n_objects,
        "n_bytes": result.n_bytes,
        "n_rebuilt": result.n_rebuilt if is_deep else None,
        "trouble": result.trouble or None,
        "affected": list(result.affected),
        "unreachable": list(result.unreachable),
        "damages": [
            {"key": d.key, "type": d.kind, "version": d.version, "message": d.message}
            for d in result.damages
        ],
    }


def _text(result: Audit, *, is_deep: bool) -> Text:
    checked = f"{result.n_versions:,} versions, {result.n_objects:,} objects, {bytes_text(result.n_bytes)}"
    rebuilt = f"; {result.n_rebuilt:,} rebuilt and proven" if is_deep else ""
    if not result.damages and not result.trouble:
        return Text(f"sound: {checked}{rebuilt}")
    lines = [Text(f"damaged in {len(result.damages):,} places: {checked}{rebuilt}")]
    for each in result.damages[:_MAX_DAMAGES]:
        lines.append(Text("  ").append_text(printable(f"{each.kind}: {each.message}")))
    if len(result.damages) > _MAX_DAMAGES:
        lines.append(Text(f"  and {len(result.damages) - _MAX_DAMAGES:,} more: see --json"))
    lines.append(Text(f"versions affected: {_ranges(result.affected)}"))
    if result.unreachable:
        lines.append(Text(f"versions a newcomer cannot reach: {_ranges(result.unreachable)}"))
    lines.append(_verdict(result))
    return Text("\n").join(lines)


def _verdict(result: Audit) -> Text:
    if result.trouble:
        return Text("readers cannot follow this run: ").append_text(printable(result.trouble))
    if result.is_newest_reachable:
        return Text(f"the newest version, {result.newest}, can still be reached")
    return Text(f"the newest version, {result.newest}, cannot be reached: publish an anchor")


def _ranges(versions: tuple[int, ...]) -> str:
    """``1, 4 to 9``."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][1] == version - 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs) or "none"
