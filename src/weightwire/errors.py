"""Every failure has a type, and the type says what to do about it.

WeightwireError
├── RetryError            the bytes at hand are damaged, or did not come: try again
│   ├── TruncatedFile         shorter than it says it is
│   ├── HashMismatch          a bucket is not the one its index names
│   ├── MalformedHeader       a safetensors header or patch index that lies or does not parse
│   ├── MalformedRecord       a tensor record whose fields contradict each other
│   ├── CorruptStream         a coded stream that does not decode
│   ├── StoreUnavailable      the store gave no answer, or said "later"
│   ├── CommitUnknown         a commit was sent, and no answer says whether it happened
│   ├── EngineUnavailable     an inference server gave no answer
│   ├── RankFailed            another rank of the trainer could not do its part; nothing was published
│   ├── StateMoved            the state changed while it was being read; nothing was published
│   ├── DeviceFull            a GPU has no memory left for the work; nothing was written
│   └── DiskTrouble           a local file could not be written: the disk is full or failing
├── ResyncError           the state at hand is not the one the patch needs: start from an anchor
│   ├── BaseMismatch          the base's digest differs; nothing was written
│   ├── CutElsewhere          a patch codes elements that are kept together with others that are not
│   ├── TargetMismatch        the result's digest differs; the state must be rebuilt
│   ├── MissingTensor         the patch names a tensor the state does not have
│   ├── ObjectMissing         the store has no such object: collected, or never written
│   ├── NoWay                 nothing in the store leads from here to the newest version
│   └── Dirty                 an activation was interrupted: the weights may be a mixture
└── StopError             trying again cannot help: a person must change something
    ├── UnsupportedVersion    a format version this release does not read
    ├── UnsupportedDType      an element type Weightwire has no code for
    ├── UnsupportedLayout     memory that cannot be viewed or written in place
    ├── LimitExceeded         a count or size beyond the published caps
    ├── DuplicateTensor       one name twice in a state
    ├── NotACheckpoint        a path that holds no safetensors checkpoint
    ├── NotAPatch             a path that holds no patch
    ├── IncompatiblePatches   patches that do not form a chain, or need a base to merge
    ├── OutputExists          refusing to overwrite
    ├── InterruptedApply      an in-place apply died half way: finish it with ``recover``
    ├── BackendMissing        a kernel backend that is not installed
    ├── ExtraMissing          an optional dependency that is not installed
    ├── StoreRefused          the store will not: no permission, no bucket, no space
    ├── NotARun               a store prefix that holds no run, or something else
    ├── FencedWriter          a newer publisher took over this run, or it was collected meanwhile
    ├── PublisherClosed       publishing after ``close``
    ├── RankLost              a rank of the trainer died or does not answer: restart the trainer
    ├── EngineRefused         an inference engine will not: not set up for this, asleep, or paused by others
    └── UntrustedHistory      the store shows a history that must not be followed
        ├── UnsignedRecord        a signature is required and there is none
        ├── BadSignature          a signature that the pinned key did not make
        ├── ReplayedRecord        a record of another run, version or epoch in this place
        ├── RolledBack            the newest version is older than one seen before
        ├── ForkedHistory         two different records of one version
        └── FrozenHistory         no new record for longer than is allowed: an alarm
"""

from __future__ import annotations


class WeightwireError(Exception):
    """Root of everything Weightwire raises on purpose."""


class RetryError(WeightwireError):
    """The bytes at hand are damaged; a fresh copy may be sound."""


class TruncatedFile(RetryError):
    """A file ends before the place its own header points to."""


class HashMismatch(RetryError):
    """A bucket's SHA-256 or length differs from the one in the patch index."""


class MalformedHeader(RetryError):
    """A safetensors header or a patch index lies about its contents or does not parse."""


class MalformedRecord(RetryError):
    """A tensor record's fields contradict each other or the file they are in."""


class CorruptStream(RetryError):
    """A coded stream ends early, points outside its chunk, or does not end where it must."""


class StoreUnavailable(RetryError):
    """The store gave no answer, or said "later"; a write may or may not have happened."""


class CommitUnknown(RetryError):
    """A commit was sent and nobody knows whether it happened; the next publish settles it."""


class EngineUnavailable(RetryError):
    """An inference server gave no answer; what it was asked may or may not have happened."""


class RankFailed(RetryError):
    """A rank could not read, compare or send its part: nothing was published, baselines stay."""


class StateMoved(RetryError):
    """The state changed while it was being read: nothing was published, the baseline stays."""


class DeviceFull(RetryError):
    """A GPU has no memory left: nothing was published, or nothing written and the engine serves on."""


class DiskTrouble(RetryError):
    """A local file could not be written or read; free space or mend the disk, then try again."""


class ResyncError(WeightwireError):
    """The state at hand is not the one the patch was made for."""


class BaseMismatch(ResyncError):
    """The base state's digest differs from the patch's; nothing was written."""


class CutElsewhere(ResyncError):
    """A patch codes elements that a rank keeps in one chunk with others that it does not keep."""


class TargetMismatch(ResyncError):
    """The patched state's digest differs from the patch's."""


class MissingTensor(ResyncError):
    """The patch names a tensor that the state does not have."""


class ObjectMissing(ResyncError):
    """The store has no such object: collected, lost, or never written."""


class NoWay(ResyncError):
    """Nothing in the store leads from the state at hand to the newest version."""


class Dirty(ResyncError):
    """An activation was interrupted: the weights may be a mixture, and must not be served."""


class StopError(WeightwireError):
    """Trying again cannot help."""


class UnsupportedVersion(StopError):
    """The file was written in a format version this release does not read."""


class UnsupportedDType(StopError):
    """An element type Weightwire has no code for."""


class UnsupportedLayout(StopError):
    """Memory that cannot be viewed as bits, or not written in place."""


class LimitExceeded(StopError):
    """A count or size beyond the caps in ``weightwire.limits``."""


class DuplicateTensor(StopError):
    """One name occurs twice in a state."""


class NotACheckpoint(StopError):
    """A path that holds no safetensors checkpoint."""


class NotAPatch(StopError):
    """A path that holds no patch."""


class IncompatiblePatches(StopError):
    """Patches that do not follow one another, or that need a base to be merged."""


class OutputExists(StopError):
    """The output path exists already, and overwriting was not asked for."""


class InterruptedApply(StopError):
    """A committed journal lies beside the checkpoint: finish it with ``recover`` before use."""


class BackendMissing(StopError):
    """A kernel backend was asked for that is not installed."""


class ExtraMissing(StopError):
    """An optional dependency is not installed; the message says what to install."""


class StoreRefused(StopError):
    """The store will not: no permission, no such bucket, no space left."""


class NotARun(StopError):
    """A store prefix that holds no run, or something that is not one."""


class FencedWriter(StopError):
    """A newer publisher took over this run; this one must not write again."""


class PublisherClosed(StopError):
    """A publisher was used after ``close``."""


class EngineRefused(StopError):
    """An inference engine will not: not set up for Weightwire, asleep, paused by others, too old."""


class RankLost(StopError):
    """A rank of the trainer is gone or silent; its peers cannot publish without it."""


class UntrustedHistory(StopError):
    """The store shows a history that must not be followed."""


class UnsignedRecord(UntrustedHistory):
    """A signature is required, and the record has none."""


class BadSignature(UntrustedHistory):
    """The record's signature was not made by the pinned key over these bytes."""


class ReplayedRecord(UntrustedHistory):
    """A record of another run, version or epoch stands in this place."""


class RolledBack(UntrustedHistory):
    """The newest version in the store is older than one seen there before."""


class ForkedHistory(UntrustedHistory):
    """Two different records of one version, or a record that does not follow the one before it."""


class FrozenHistory(UntrustedHistory):
    """No new record for longer than is allowed: the publisher stopped, or someone hides its work."""
