"""``weightwire log``: a run's versions, and who holds which."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightwire.cli.numbers import bytes_text, ratio, share_text
from weightwire.cli.options import AsJson, PinnedKey, StoreIn
from weightwire.cli.quantities import age_text
from weightwire.cli.run_opening import open_run
from weightwire.cli.terminal import open_terminal, printable, warnings_as_notes
from weightwire.clock import SystemClock
from weightwire.store.contract import ObjectInfo
from weightwire.store.receipts import Receipt, is_proven, list_receipts
from weightwire.store.records import Commit
from weightwire.store.run import Run
from weightwire.store.survey import Survey, survey


def log_command(
    context: typer.Context,
    store: StoreIn,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, metavar="N", help="Newest versions to show.")
    ] = 50,
    key: PinnedKey = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of the run in STORE, newest last, and what its receivers hold.

    A receipt counts as proven if its digest is that of the version it names. Records that cannot be
    read are shown as damaged; `weightwire verify STORE` looks at the data too.
    """
    with (
        open_terminal(context, as_json=as_json) as terminal,
        warnings_as_notes(context, terminal.note),
        open_run(store, key) as run,
    ):
        now = SystemClock().now()
        found = survey(run, limit)
        fields = _fields(run, found, now)
        terminal.show(fields, _text(fields))


def _fields(run: Run, found: Survey, now: float) -> dict[str, Any]:
    history = found.history
    newest = history.newest
    anchors, skips = _anchor_versions(found), _skips(found)
    return {
        "run": run.name,
        "age_s": now - run.identity.created_ms / 1000,
        "newest": newest.version if newest else None,
        "epoch": newest.epoch if newest else None,
        "digest": newest.digest if newest else None,
        "n_state_bytes": newest.n_state_bytes if newest else None,
        "boundary": history.boundary,
        "n_older": found.n_older,
        "anchors": anchors,
        "versions": [
            {
                **_version_fields(each, now),
                "has_anchor": version in anchors,
                "skips_from": sorted(skips.get(version, ())),
            }
            for version, each in history.commits.items()
        ],
        "receipts": [
            _receipt_fields(found, info, receipt, now) for info, receipt in list_receipts(run.store)
        ],
        "damaged": [
            {"key": each.key, "type": each.kind, "message": each.message} for each in found.damages
        ],
    }


def _anchor_versions(found: Survey) -> list[int]:
    history = found.history
    own = {version for version, commit in history.commits.items() if commit.anchor}
    offered = {
        offer.version
        for offer in history.offers.values()
        if offer.anchor and offer.anchor.folder not in found.gone
    }
    return sorted(own | offered)


def _skips(found: Survey) -> dict[int, list[int]]:
    """The versions that skip patches to each version start from."""
    skips: dict[int, list[int]] = {}
    for offer in found.history.offers.values():
        if offer.patch is not None:
            skips.setdefault(offer.version, []).append(offer.patch.base_version)
    return skips


def _version_fields(commit: Commit, now: float) -> dict[str, Any]:
    patch, ref = commit.patch, commit.patch or commit.anchor
    n_bytes = ref.n_bytes if ref else 0
    return {
        "version": commit.version,
        "step": commit.step,
        "epoch": commit.epoch,
        "age_s": now - commit.time_ms / 1000,
        "kind": "patch" if patch else "anchor" if commit.anchor else "empty",
        "n_changed": patch.n_changed if patch else commit.n_elements if commit.anchor else 0,
        "n_elements": commit.n_elements,
        "n_bytes": n_bytes,
        "times_smaller": ratio(commit.n_state_bytes, n_bytes),
        "codec": patch.codec if patch else None,
        "digest": commit.digest,
    }


def _receipt_fields(
    found: Survey, info: ObjectInfo, receipt: Receipt, now: float
) -> dict[str, Any]:
    newest = found.history.newest
    return {
        "worker": receipt.worker,
        "version": receipt.version,
        "lag": newest.version - receipt.version if newest else None,
        "state": receipt.state,
        "age_s": now - info.modified,
        "is_proven": _is_proven(found, receipt),
        "n_heals": receipt.n_heals,
        "activate_s": receipt.activate_s,
    }


def _is_proven(found: Survey, receipt: Receipt) -> bool | None:
    """None where the record that could prove it was not asked for."""
    first = min(found.history.commits, default=0)
    if found.n_older and found.history.boundary <= receipt.version < first:
        return None
    return is_proven(receipt, found.history)


def _text(fields: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [_head(fields)]
    if fields["versions"]:
        parts.append(_version_table(fields["versions"]))
    if fields["receipts"]:
        parts.append(_receipt_table(fields["receipts"]))
    for each in fields["damaged"]:
        parts.append(Text.assemble("damaged: ", printable(f"{each['type']}: {each['message']}")))
    return Group(*parts)


def _head(fields: dict[str, Any]) -> Text:
    lines = [f"run {fields['run'][:8]}, begun {age_text(fields['age_s'])} ago"]
    if fields["newest"] is None:
        lines.append("no version yet")
    if fields["boundary"]:
        lines.append(f"versions before {fields['boundary']} were collected")
    if fields["n_older"]:
        lines.append(f"{fields['n_older']:,} older versions are not shown: give --limit")
    return Text("\n".join(lines))


def _version_table(versions: list[dict[str, Any]]) -> Table:
    # Only trainers count steps; a column of blanks would be noise.
    steps = ("step",) if any(each["step"] is not None for each in versions) else ()
    table = _table("version", *steps, "epoch", "age", "kind", "changed", "size", "smaller", "codec")
    for each in versions:
        smaller = f"{each['times_smaller']:,.1f}×" if each["times_smaller"] else ""
        table.add_row(
            str(each["version"]),
            *("" if each[step] is None else str(each[step]) for step in steps),
            str(each["epoch"]),
            age_text(each["age_s"]),
            _kind_text(each),
            share_text(each["n_changed"] / max(each["n_elements"], 1)),
            bytes_text(each["n_bytes"]),
            smaller,
            each["codec"] or "",
        )
    return table


def _kind_text(version: dict[str, Any]) -> str:
    parts = [version["kind"]]
    if version["has_anchor"] and version["kind"] != "anchor":
        parts.append("anchor")
    parts += [f"skip from {base}" for base in version["skips_from"]]
    return " + ".join(parts)


def _receipt_table(receipts: list[dict[str, Any]]) -> Table:
    table = _table("worker", "version", "lag", "state", "age", "proven")
    for each in receipts:
        table.add_row(
            printable(each["worker"]),
            str(each["version"]),
            "" if each["lag"] is None else str(each["lag"]),
            each["state"],
            age_text(each["age_s"]),
            {True: "yes", False: "no", None: "?"}[each["is_proven"]],
        )
    return table


def _table(first: str, *more: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, justify="left" if first == "worker" else "right")
    for column in more:
        is_text = column in ("kind", "state", "codec", "proven")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    return table
