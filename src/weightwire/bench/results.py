"""What the benchmark found, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from weightwire.bench.machine import Machine

GIGA = 1e9


@dataclass(frozen=True)
class Measurement:
    """One encoding on one case: its size, and the best time of all repetitions."""

    encoding: str
    source: str
    n_threads: int
    n_bytes: int
    n_changed: int
    n_model_bytes: int
    encode_s: float
    decode_s: float

    @property
    def bytes_per_change(self) -> float:
        """Wire bytes for each element that changed; 0 when none did."""
        return self.n_bytes / self.n_changed if self.n_changed else 0.0

    @property
    def times_smaller(self) -> float:
        """Size of the full tensors over size of the patch."""
        return self.n_model_bytes / self.n_bytes if self.n_bytes else float("inf")

    @property
    def encode_gb_per_s(self) -> float:
        """Model bytes diffed and encoded per second."""
        return self.n_model_bytes / self.encode_s / GIGA

    @property
    def decode_gb_per_s(self) -> float:
        """Model bytes brought up to date per second."""
        return self.n_model_bytes / self.decode_s / GIGA


@dataclass(frozen=True)
class CaseResult:
    """All encodings on the same tensors, in the same run."""

    name: str
    group: str
    dtype: str
    n_elements: int
    n_changed: int
    measurements: tuple[Measurement, ...]

    @property
    def density(self) -> float:
        """Share of elements that changed, as counted."""
        return self.n_changed / self.n_elements if self.n_elements else 0.0

    def of(self, encoding: str) -> Measurement:
        """The measurement of the encoding with this name.

        Raises:
            KeyError: it took no part.
        """
        for measurement in self.measurements:
            if measurement.encoding == encoding:
                return measurement
        raise KeyError(encoding)


@dataclass(frozen=True)
class Ratio:
    """One of our codecs against a published encoding; above 1 is better for ours."""

    case: str
    encoding: str
    against: str
    times_smaller: float
    encode_speedup: float
    decode_speedup: float


@dataclass(frozen=True)
class FileSize:
    """Patches of the chain as files on disk, with headers, digests and index."""

    name: str
    n_patches: int
    n_bytes: int
    n_changed: int
    n_full_bytes: int

    @property
    def bytes_per_change(self) -> float:
        """Bytes on disk for each element that changed; 0 when none did."""
        return self.n_bytes / self.n_changed if self.n_changed else 0.0


@dataclass(frozen=True)
class BenchReport:
    """Everything one run of the codec benchmark measured."""

    machine: Machine
    n_repeats: int
    cases: tuple[CaseResult, ...]
    ratios: tuple[Ratio, ...]
    scaling: tuple[Measurement, ...]
    files: tuple[FileSize, ...]


def ratio(case: CaseResult, encoding: str, against: str) -> Ratio:
    """How much smaller and faster one encoding is than another on the same case."""
    ours, theirs = case.of(encoding), case.of(against)
    return Ratio(
        case=case.name,
        encoding=encoding,
        against=against,
        times_smaller=theirs.n_bytes / ours.n_bytes if ours.n_bytes else float("inf"),
        encode_speedup=theirs.encode_s / ours.encode_s,
        decode_speedup=theirs.decode_s / ours.decode_s,
    )
