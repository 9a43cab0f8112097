"""What Weightwire promises, each as one check against what really happened.

A check that fails raises ``Violation``. It is no ``Exception``: nothing under test may catch it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weightwire.errors import ResyncError, RetryError, StopError
from weightwire.store import layout
from weightwire.store.records import Commit
from weightwire.testing.world.tensors import Frozen, Snapshot


class Violation(BaseException):
    """A promise was broken; the message says which, where and how."""


@dataclass(frozen=True)
class Committed:
    """A version as it came to exist."""

    record: Commit
    bits: Snapshot


@dataclass
class Truth:
    """What really was published, committed and collected, seen from outside."""

    versions: dict[int, Committed] = field(default_factory=dict)
    captured: dict[str, Snapshot] = field(default_factory=dict)
    """By digest: everything a trainer ever asked to publish."""
    boundary: int = 0
    n_zombies: int = 0

    @property
    def newest(self) -> int:
        """The newest version; -1 before the first."""
        return max(self.versions, default=-1)

    @property
    def epoch(self) -> int:
        """The highest epoch that was ever committed."""
        return max((each.record.epoch for each in self.versions.values()), default=0)


def require(holds: bool, promise: str, *details: object) -> None:
    """Raise ``Violation`` unless it holds."""
    if not holds:
        raise Violation(f"{promise}: {' '.join(map(str, details))}")


def check_commit(truth: Truth, record: Commit) -> None:
    """One writer: a new version follows the newest, and no older epoch comes after a newer one."""
    promise = "one writer"
    require(record.version == truth.newest + 1, promise, record.version, "after", truth.newest)
    require(record.epoch >= truth.epoch, promise, "epoch", record.epoch, "after", truth.epoch)
    before = truth.versions.get(record.version - 1)
    if before is not None and record.epoch > before.record.epoch:
        is_fresh_start = record.previous == "" and record.anchor is not None
        require(record.is_empty or is_fresh_start, promise, "a new epoch begins with data")
    same = before is not None and before.record.digest == record.digest
    require(
        not record.is_empty or same, "bit-exact", "version", record.version, "is empty, not same"
    )


def check_captured(truth: Truth, record: Commit) -> Snapshot:
    """Bit-exact: what was committed is what some trainer had when it published."""
    found = truth.captured.get(record.digest)
    if found is None:
        raise Violation(f"bit-exact: version {record.version} is of bits no trainer ever had")
    return found


def check_published(truth: Truth, version: int, wanted: Snapshot) -> None:
    """No lost update: a resolved publish is a version with the bits of that very moment."""
    promise = "no lost update"
    require(version in truth.versions, promise, "version", version, "resolved, not committed")
    found = truth.versions[version].bits
    wrong = wanted.differences(found.tensors, {*wanted.tensors, *found.tensors})
    require(not wrong, promise, "version", version, "differs in", wrong)


def check_held(
    truth: Truth, who: str, version: int, digest: str, live: Mapping[str, Frozen], *, aliases: bool
) -> None:
    """Never a mixture: live weights are, bit for bit, the version the receiver says it holds."""
    promise = "never a mixture"
    require(version in truth.versions, promise, who, "holds", version, "which never existed")
    committed = truth.versions[version]
    require(committed.record.digest == digest, promise, who, "holds another", version)
    names = [n for n in committed.bits.tensors if aliases or n in live]
    require(bool(names) or not live, promise, who, "holds nothing of", version)
    wrong = committed.bits.differences(live, names)
    require(not wrong, promise, who, "says", version, "and differs in", wrong)


def check_forward(who: str, before: int, after: int) -> None:
    """Versions only go forward."""
    require(after >= before, "versions go forward", who, "went from", before, "to", after)


def check_deleted(truth: Truth, key: str) -> None:
    """Committed versions are never lost: commits go only below the boundary."""
    entry = layout.parse_entry(key)
    if entry is not None and entry.kind == "commit":
        require(entry.version < truth.boundary, "nothing committed is lost", key, "was deleted")


def check_fenced(truth: Truth, who: str, epoch: int, version: int) -> None:
    """Fenced only for a reason: a higher epoch, another first version, or a collection."""
    is_first = version < 0 and truth.newest >= 0
    was_collected = truth.boundary > version + 1
    require(
        truth.epoch > epoch or is_first or was_collected,
        "fenced for a reason",
        who,
        "of epoch",
        epoch,
        "at version",
        version,
    )


def check_typed(who: str, error: BaseException, *, may_stop: bool) -> None:
    """Failures are typed; those that need a person come only when one is needed."""
    promise = "failures are typed"
    is_typed = isinstance(error, RetryError | ResyncError | StopError)
    require(is_typed, promise, who, "raised", repr(error))
    if isinstance(error, StopError):
        require(may_stop, promise, who, "wants a person for", repr(error))


def check_bounded(who: str, what: str, found: float, most: float) -> None:
    """Time and requests have caps."""
    require(found <= most, "bounded", who, what, found, "more than", most)
