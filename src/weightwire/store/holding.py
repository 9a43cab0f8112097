"""What a target holds, as far as it is proven: version, digests, and whether damage was found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from weightwire.apply.scrub import Scrub
from weightwire.apply.staging import Staging
from weightwire.apply.targets import Target
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest, digest_state
from weightwire.store.history import History
from weightwire.store.plan import Held
from weightwire.store.route import Start

log = logging.getLogger("weightwire.subscriber")


class Holding:
    """Knows a target's version, looks after its bits, and says where the next version can start."""

    def __init__(self, target: Target, scrub_versions: int) -> None:
        self._target = target
        self._scrub = Scrub(scrub_versions)
        self._names: tuple[str, ...] | None = None
        self._ties: Mapping[str, str] = {}
        self._digests: Mapping[str, TensorDigest] = {}
        self.held: Held | None = None
        self.is_dirty = False
        """The target may be a mixture of versions, or damaged."""
        self.n_heals = 0

    @property
    def version(self) -> int:
        """The version held; -1 if none."""
        return self.held.version if self.held else -1

    @property
    def digests(self) -> Mapping[str, TensorDigest]:
        """Every tensor's digest in the version held; empty if none."""
        return self._digests if self.held else {}

    def start(self, stack: ExitStack, look: Callable[[], History]) -> Start | None:
        """The target's own state, if it is known to be a version; files stay open with ``stack``."""
        self._scrub_share()
        if self.is_dirty:
            return None
        state = stack.enter_context(self._target.open(self._names, self._ties))
        if state is None:
            self.held = None
            return None
        if self.held is None:
            self._recognise(state, look())
        return Start(self.held, state, self._digests) if self.held else None

    def take(self, held: Held, staging: Staging | None) -> None:
        """The target was brought to a version; by nothing, where the version changes nothing."""
        self.held, self.is_dirty = held, False
        if staging is not None:
            self._digests = staging.digests
            self._names, self._ties = tuple(staging.specs), dict(staging.ties)

    def found_damage(self) -> None:
        """The target's bits are not to be trusted: the next version comes from an anchor."""
        self.n_heals += not self.is_dirty
        self.is_dirty = True

    def _scrub_share(self) -> None:
        """Look at the next share of the tensors; one that is not right is damage."""
        if self.held is None or self.is_dirty:
            return
        # Names tied in the run may be copies here, and go bad alone.
        copies = {a: self._digests[n] for a, n in self._ties.items() if n in self._digests}
        with self._target.open(self._names, self._ties) as state:
            wrong = None if state is None else self._scrub.next(state, {**self._digests, **copies})
        if wrong is not None:
            log.error("tensor %r is not what version %d has; loading it anew", wrong, self.version)
            self.found_damage()

    def _recognise(self, state: StateReader, history: History) -> None:
        """A restarted receiver whose target outlived it, such as a folder, may hold a version."""
        digest, digests = digest_state(state)
        version = history.version_of(digest)
        if version is not None:
            self.held, self._digests = Held(version, digest), digests
            self._names = tuple(state.specs)
