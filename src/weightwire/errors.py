"""Every failure has a type, and the type says what to do about it.

WeightwireError
├── RetryError            the bytes at hand are damaged: fetch them again
│   ├── TruncatedFile         shorter than it says it is
│   ├── HashMismatch          a bucket is not the one its index names
│   ├── MalformedHeader       a safetensors header or patch index that lies or does not parse
│   ├── MalformedRecord       a tensor record whose fields contradict each other
│   └── CorruptStream         a coded stream that does not decode
├── ResyncError           the state at hand is not the one the patch needs: start from an anchor
│   ├── BaseMismatch          the base's digest differs; nothing was written
│   ├── TargetMismatch        the result's digest differs; the state must be rebuilt
│   └── MissingTensor         the patch names a tensor the state does not have
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
    └── BackendMissing        a kernel backend that is not installed
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


class ResyncError(WeightwireError):
    """The state at hand is not the one the patch was made for."""


class BaseMismatch(ResyncError):
    """The base state's digest differs from the patch's; nothing was written."""


class TargetMismatch(ResyncError):
    """The patched state's digest differs from the patch's."""


class MissingTensor(ResyncError):
    """The patch names a tensor that the state does not have."""


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
