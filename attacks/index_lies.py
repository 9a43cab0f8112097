"""Lies in ``patch.json``: counts, digests, names, and JSON that parsers disagree about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from registry import attack
from sample import Files, as_json, sealed, take_apart, target_state, true_files
from weightwire.diff.memory import MemoryState
from weightwire.digest import TensorDigest, combine, digest_state
from weightwire.model import TensorSpec, dtype_named

_COUNTS = ("n_tensors", "n_elements", "n_changed")
_EVIL_NAMES = (
    "../x",
    "/etc/passwd",
    "a\0b",
    "x" * 5000,
    "",
    "\u202egpj",
    "coded@1",
    "__metadata__",
)


def _with_index(codec: str, /, **fields: object) -> Files:
    files = true_files(codec)
    return Files(as_json({**json.loads(files.index), **fields}), files.buckets)


def _with_buckets(codec: str, /, **fields: object) -> Files:
    first, *rest = json.loads(true_files(codec).index)["buckets"]
    return _with_index(codec, buckets=[{**first, **fields}, *rest])


def _with_text(codec: str, old: bytes, new: bytes) -> Files:
    files = true_files(codec)
    return Files(files.index.replace(old, new, 1), files.buckets)


@attack("plain")
def an_index_that_is_no_json_object(codec: str) -> Iterator[Files]:
    """The index is empty, a list, a number, not UTF-8, or followed by more."""
    files = true_files(codec)
    for text in (b"", b"[]", b"7", b"null", b'"x"', b"\xff\xfe{}", b"\xef\xbb\xbf" + files.index):
        yield Files(text, files.buckets)
    for tail in (b"x", b"{}", b"\0", files.index):
        yield Files(files.index + tail, files.buckets)


@attack("plain")
def numbers_that_are_no_json(codec: str) -> Iterator[Files]:
    """A count is NaN, Infinity, negative, a float, a string, true, or has a thousand digits."""
    for name in _COUNTS:
        for value in (float("nan"), float("inf"), -float("inf"), -1, 1.0, "1", True, None, [], {}):
            yield _with_index(codec, **{name: value})
        yield _with_text(codec, b'"%s":' % name.encode(), b'"%s":1e999,"x":' % name.encode())
        yield _with_text(codec, b'"%s":' % name.encode(), b'"%s":%s' % (name.encode(), b"9" * 1000))


@attack("plain")
def json_nested_without_end(codec: str) -> Iterator[Files]:
    """A field nests lists or objects a hundred thousand levels deep."""
    files = true_files(codec)
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * 100_000 + b"1" + closing * 100_000
        yield Files(b'{"x":' + deep + b"," + files.index[1:], files.buckets)
        yield Files(b'{"x":' + opening * 100_000, files.buckets)


@attack("plain")
def keys_given_twice(codec: str) -> Iterator[Files]:
    """A field occurs twice, so that two parsers read two different patches."""
    files = true_files(codec)
    for field in json.loads(files.index):
        yield Files(b'{"%s":1,' % field.encode() + files.index[1:], files.buckets)


@attack("plain")
def fields_of_another_type(codec: str) -> Iterator[Files]:
    """A field is missing or has a type that no writer gives it."""
    index = json.loads(true_files(codec).index)
    for field in index.keys() - {"sha256"}:
        yield Files(as_json({k: v for k, v in index.items() if k != field}), {})
        for value in (None, 7, "x", [7], {"x": 7}, [["x"]], [None]):
            yield _with_index(codec, **{field: value})


@attack("plain")
def a_format_of_the_future(codec: str) -> Iterator[Files]:
    """The index is of another format or a version this release does not know."""
    for version in (0, 2, -1, 1.5, "01", None, "1 "):
        yield _with_index(codec, format_version=version)
    for name in ("weightwire.index", "", None, 1):
        yield _with_index(codec, format=name)


@attack()
def counts_that_are_wrong(codec: str) -> Iterator[Files]:
    """The index lies about how many tensors, elements or changes there are."""
    index = json.loads(true_files(codec).index)
    for name in _COUNTS:
        for value in (0, index[name] - 1, index[name] + 1, 1 << 60, (1 << 63) - 1, 1 << 63):
            yield _with_index(codec, **{name: value})


@attack()
def the_other_codec(codec: str) -> Iterator[Files]:
    """The index names a codec that its records are not coded with."""
    for other in {"compact", "plain", "zstd", ""} - {codec}:
        yield _with_index(codec, codec=other)


@attack("plain")
def bucket_names_that_leave_the_folder(codec: str) -> Iterator[Files]:
    """A bucket's file is somewhere else, or nowhere."""
    digits = "bucket-\uff10\uff10\uff10\uff10\uff10.safetensors"
    for name in (*_EVIL_NAMES, "patch.json", ".", "..", "bucket-00000.safetensors\n", digits):
        yield _with_buckets(codec, file=name)
    for name in (
        "bucket-00007.safetensors",
        "bucket-00000.safetensors/../x",
        "bucket-0.safetensors",
    ):
        yield _with_buckets(codec, file=name)


@attack("plain")
def bucket_sizes_that_are_wrong(codec: str) -> Iterator[Files]:
    """A bucket is longer or shorter than the index says."""
    for size in (0, 1, -1, 1 << 30, (1 << 30) + 1, 1 << 62, 1 << 64, 3.5, "9", None):
        yield _with_buckets(codec, n_bytes=size)


@attack()
def hashes_that_are_wrong(codec: str) -> Iterator[Files]:
    """A bucket's SHA-256 is another one, or none."""
    for sha256 in ("0" * 64, "", "g" * 64, "0" * 63, None, 5):
        yield _with_buckets(codec, sha256=sha256)


@attack()
def buckets_left_out_or_given_twice(codec: str) -> Iterator[Files]:
    """The index forgets a bucket, repeats one, lists them in another order, or swaps contents."""
    index, files = json.loads(true_files(codec).index), true_files(codec)
    entries = index["buckets"]
    yield _with_index(codec, buckets=entries[1:])
    yield _with_index(codec, buckets=entries[:-1])
    yield _with_index(codec, buckets=[*entries, entries[0]])
    yield _with_index(codec, buckets=[])
    copy = {**entries[0], "file": "bucket-00099.safetensors"}
    more = {**files.buckets, copy["file"]: files.buckets[entries[0]["file"]]}
    yield Files(as_json({**index, "buckets": [*entries, copy]}), more)
    names = list(files.buckets)
    swapped = {
        **files.buckets,
        names[0]: files.buckets[names[1]],
        names[1]: files.buckets[names[0]],
    }
    yield Files(files.index, swapped)


@attack("compact", "plain", may_pass=True)
def buckets_in_another_order(codec: str) -> Iterator[Files]:
    """The same buckets, listed backwards: what they say does not depend on it."""
    yield _with_index(codec, buckets=json.loads(true_files(codec).index)["buckets"][::-1])


@attack()
def a_bucket_of_another_patch(codec: str) -> Iterator[Files]:
    """A bucket is exchanged for that of the other codec's patch, with and without its hash."""
    ours, theirs = true_files(codec), true_files("plain" if codec == "compact" else "compact")
    for name in ours.buckets:
        if name in theirs.buckets:
            buckets = {**ours.buckets, name: theirs.buckets[name]}
            yield Files(ours.index, buckets)
            yield sealed(json.loads(ours.index), list(buckets.values()))
    yield Files(ours.index, theirs.buckets)
    yield Files(ours.index, {})


@attack()
def digests_of_other_states(codec: str) -> Iterator[Files]:
    """The patch claims to start from, or to lead to, another state."""
    index = json.loads(true_files(codec).index)
    for field in ("base_digest", "target_digest"):
        for value in ("0" * 32, "f" * 32, index[field][::-1], index[field].upper(), "", None):
            yield _with_index(codec, **{field: value})
    swapped = {"base_digest": index["target_digest"], "target_digest": index["base_digest"]}
    yield _with_index(codec, **swapped)


@attack()
def unchanged_tensors_that_are_not(codec: str) -> Iterator[Files]:
    """A tensor said to be unchanged is missing, invented, coded as well, or has another digest."""
    index = json.loads(true_files(codec).index)
    digest = index["unchanged"]["same"]
    for names in ([], ["same", "coded"], ["coded"], ["same", "gone"], ["same", "tied"], ["SAME"]):
        yield _with_index(codec, unchanged=dict.fromkeys(names, digest))
    for name in _EVIL_NAMES:
        yield _with_index(codec, unchanged={"same": digest, name: digest})
    for value in ("0" * 32, digest[::-1], digest[:-1], digest.upper(), None, 5):
        yield _with_index(codec, unchanged={"same": value})


@attack()
def an_unchanged_digest_and_a_target_that_fit_it(codec: str) -> Iterator[Files]:
    """Both digests of an unchanged tensor's lie agree with each other, but not with the state."""
    digests, specs = _target_digests()
    digests["same"] = TensorDigest(1, 2)
    target = combine((specs[name], digest) for name, digest in digests.items())
    yield _with_index(codec, unchanged={"same": str(digests["same"])}, target_digest=target)


@attack()
def removed_tensors_that_stay(codec: str) -> Iterator[Files]:
    """The list of removed tensors names living ones, none, or paths."""
    for removed in ([], ["same"], ["gone", "coded"], ["gone", "tied"], ["GONE"]):
        yield _with_index(codec, removed=removed)
    yield _with_index(codec, removed=["gone", 7])


@attack(may_pass=True)
def removed_tensors_that_never_were(codec: str) -> Iterator[Files]:
    """Names in the list of removed tensors that no state has: they touch nothing."""
    yield _with_index(codec, removed=["gone", "gone"])
    for name in _EVIL_NAMES:
        yield _with_index(codec, removed=["gone", name])


@attack()
def ties_that_lead_nowhere(codec: str) -> Iterator[Files]:
    """An alias names itself, another alias, a tensor that is coded, or one that is not there."""
    ties: tuple[dict[str, Any], ...] = (
        {"tied": "nothing"},
        {"tied": "tied"},
        {"tied": "coded", "more": "tied"},
        {"coded": "same"},
        {"same": "coded"},
        {"tied": "gone"},
        {"tied": 7},
    )
    for tied in ties:
        yield _with_index(codec, tied=tied)


@attack()
def a_new_tensor_with_a_shape_no_array_has(codec: str) -> Iterator[Files]:
    """An empty tensor is 2^60 wide, and every count and digest fits."""
    for wide in ((1 << 38) + 1, 1 << 60, 1 << 63, (1 << 64) - 1):
        forgery = take_apart(codec)
        raw = bytearray(forgery.record("added"))
        raw[2] = 2
        raw[8:64] = bytes(56)
        forgery.put("added", raw[:64] + (0).to_bytes(8, "little") + wide.to_bytes(8, "little"))
        digests, specs = _target_digests()
        digests["added"] = TensorDigest()
        # Made past its own checks: a spec that no honest writer can have.
        specs["added"] = object.__new__(TensorSpec)
        specs["added"].__dict__.update(name="added", dtype=dtype_named("U8"), shape=(0, wide))
        target = combine((specs[name], digest) for name, digest in digests.items())
        forgery.index |= {"target_digest": target, "n_elements": 136, "n_changed": 54}
        yield forgery.files()


def _target_digests() -> tuple[dict[str, TensorDigest], dict[str, TensorSpec]]:
    state = MemoryState(target_state().items())
    return digest_state(state)[1], dict(state.specs)


@attack("plain")
def a_million_small_values(codec: str) -> Iterator[Files]:
    """Fields the reader does not know hold a million empty lists, or names without end."""
    files = true_files(codec)
    yield Files(b'{"x":[' + b"[]," * 1_000_000 + b"[]],7" + files.index[1:], files.buckets)
    yield _with_index(codec, unchanged={f"n{i}": "0" * 32 for i in range(20_000)})
    yield _with_index(codec, removed=[f"n{i}" for i in range(20_000)], unchanged={})
