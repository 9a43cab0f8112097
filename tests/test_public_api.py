"""What ``import weightwire`` gives, and what it must not do."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest

import weightwire as ww
from weightwire import errors
from weightwire.codec.index import index_bytes, parse_index
from weightwire.codec.patch import MemoryBuckets
from weightwire.errors import (
    HashMismatch,
    LimitExceeded,
    MalformedHeader,
    MalformedRecord,
    NotAPatch,
    OutputExists,
    TruncatedFile,
    UnsupportedDType,
    UnsupportedVersion,
)
from weightwire.model import dtype_coded, dtype_named


def test_all_public_names_are_listed_and_exist() -> None:
    public = {
        name
        for name, value in vars(ww).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public | {"errors"} == set(ww.__all__)
    assert sorted(ww.__all__) == list(ww.__all__)


def test_every_public_name_says_what_it_is() -> None:
    assert all(inspect.getdoc(getattr(ww, name)) for name in ww.__all__)


def test_import_does_not_load_torch_or_other_heavy_libraries() -> None:
    code = (
        "import sys, weightwire\n"
        "heavy = {'torch', 'triton', 'transformers', 'vllm', 'ray', 'matplotlib', 'zstandard'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_every_error_is_one_of_retry_resync_or_stop() -> None:
    leaves = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.WeightwireError)
    ]
    roots = (errors.RetryError, errors.ResyncError, errors.StopError)
    for leaf in leaves:
        assert leaf is errors.WeightwireError or sum(issubclass(leaf, root) for root in roots) == 1
        assert leaf.__name__ in (errors.__doc__ or "")


@pytest.fixture
def patch() -> ww.Patch:
    return ww.diff({"w": np.zeros(20)}, {"w": np.ones(20)})


def test_folder_without_an_index_is_not_a_patch(tmp_path: object) -> None:
    with pytest.raises(NotAPatch, match=r"patch\.json"):
        ww.Patch.load(f"{tmp_path}")
    with pytest.raises(NotAPatch, match=r"patch\.json"):
        ww.Patch.load(f"{tmp_path}/nowhere")


def test_index_of_another_version_is_told_from_a_broken_one(patch: ww.Patch) -> None:
    text = index_bytes(patch.index)
    with pytest.raises(UnsupportedVersion, match="upgrade"):
        parse_index(text.replace(b'"format_version":1', b'"format_version":2'), "x")
    with pytest.raises(MalformedHeader, match="not JSON"):
        parse_index(text[:-3], "x")
    with pytest.raises(NotAPatch, match="format is"):
        parse_index(b"{}", "x")


def test_bucket_of_another_hash_is_refused(patch: ww.Patch) -> None:
    (entry,) = patch.index.buckets
    raw = bytearray(patch._checked(entry))
    raw[-1] ^= 1
    with pytest.raises(HashMismatch, match="SHA-256"):
        _ = ww.Patch(patch.index, MemoryBuckets({entry.file: bytes(raw)})).heads
    with pytest.raises(HashMismatch, match="SHA-256"):
        _ = ww.Patch(patch.index, MemoryBuckets({entry.file: bytes(raw[:-1])})).heads
    with pytest.raises(TruncatedFile, match="not there"):
        _ = ww.Patch(patch.index, MemoryBuckets({})).heads


def test_record_that_is_not_in_its_bucket_is_refused(patch: ww.Patch) -> None:
    with pytest.raises(MalformedRecord, match="no record 'v'"):
        patch.record(0, "v")


def test_path_that_exists_is_not_overwritten(patch: ww.Patch, tmp_path: object) -> None:
    patch.save(f"{tmp_path}/patch")
    with pytest.raises(OutputExists, match="exists already"):
        patch.save(f"{tmp_path}/patch")


def test_type_without_a_code_is_refused() -> None:
    with pytest.raises(UnsupportedDType, match="'F4'"):
        dtype_named("F4")
    with pytest.raises(UnsupportedDType, match="200"):
        dtype_coded(200)


def test_empty_tensor_of_a_shape_no_library_can_make_is_refused() -> None:
    from weightwire.model import TensorSpec

    assert TensorSpec("x", dtype_named("U8"), (0, 1 << 38)).n_elements == 0
    with pytest.raises(LimitExceeded, match="shape"):
        TensorSpec("x", dtype_named("U8"), (0, 1 << 60))


def test_patch_prints_what_it_is(patch: ww.Patch) -> None:
    assert repr(patch).startswith("Patch(compact, 20 of 20 elements, ")
