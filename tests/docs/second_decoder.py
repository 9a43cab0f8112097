"""A second decoder of the patch format, written from ``docs/format.md`` and nothing else.

Standard library only, one element at a time: it is slow, and shares no line with Weightwire. If the
document leaves out or misstates anything, this decoder goes wrong and its tests say so.

A tensor is a ``Tensor``: its type code, its shape, and its elements as a list of integers.
"""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

# Section 1: code -> bytes, key shift, key mask, ordered.
TYPES: dict[int, tuple[int, int, int, bool]] = {
    1: (1, 0, 0, False),
    2: (1, 0, 0, False),
    3: (1, 0, 0, False),
    4: (1, 2, 0x1F, True),
    5: (1, 3, 0x0F, True),
    6: (1, 0, 0, False),
    7: (1, 3, 0x0F, True),
    8: (1, 2, 0x1F, True),
    16: (2, 0, 0, False),
    17: (2, 0, 0, False),
    18: (2, 10, 0x1F, True),
    19: (2, 7, 0xFF, True),
    32: (4, 0, 0, False),
    33: (4, 0, 0, False),
    34: (4, 23, 0xFF, True),
    64: (8, 0, 0, False),
    65: (8, 0, 0, False),
    66: (8, 52, 0x7FF, True),
    67: (8, 0, 0, False),
}
M32 = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF


class Refused(Exception):
    """The patch breaks a rule of the document."""


def must(rule: bool, what: str) -> None:
    """Refuse unless a rule holds."""
    if not rule:
        raise Refused(what)


@dataclass
class Tensor:
    """A tensor as the document sees it."""

    code: int
    shape: tuple[int, ...]
    bits: list[int]


State = dict[str, Tensor]


# ------------------------------------------------------------------------------ sections 2, 3, 10


def apply_folder(folder: Path, base: State) -> State:
    """The state that a patch folder makes of ``base``."""
    text = (folder / "patch.json").read_bytes()
    index = json.loads(text)
    unsealed = text[: text.rindex(b',"sha256":"')] + b"}"
    seal = f',"sha256":"{hashlib.sha256(unsealed).hexdigest()}"}}\n'.encode()
    must(text == unsealed[:-1] + seal, "SHA-256 of the index")
    return apply_patch(index, lambda file: (folder / file).read_bytes(), base)


def apply_patch(index: dict, fetch: Callable[[str], bytes], base: State) -> State:
    """Section 10, with every check it asks for."""
    must((index["format"], index["format_version"]) == ("weightwire.patch", 1), "format")
    must(index["codec"] in ("compact", "plain"), "codec")
    records = [record for entry in index["buckets"] for record in read_bucket(entry, fetch)]
    must(sum(record.n_changed for record in records) == index["n_changed"], "n_changed")
    kinds = {3, 1 if index["codec"] == "compact" else 2}
    must({record.kind for record in records} <= kinds, "kind of a record")
    aliases = index["tied"]
    own = {name: tensor for name, tensor in base.items() if name not in aliases}
    are_copies = all(base[a] == base.get(name) for a, name in aliases.items() if a in base)
    digests = {state_digest(base), state_digest(own) if are_copies else ""}
    must(index["base_digest"] in digests, "base digest")
    target = {name: own[name] for name in own if name not in index["removed"]}
    names = [record.name for record in records]
    for name in dict.fromkeys(names):
        target[name] = patch_tensor([r for r in records if r.name == name], base.get(name))
    must(set(target) == {*names, *index["unchanged"]}, "names")
    for name, digest in index["unchanged"].items():
        must(digest_text(tensor_digest(target[name])) == digest, "unchanged")
    must(state_digest(target) == index["target_digest"], "target digest")
    must(len(target) == index["n_tensors"], "n_tensors")
    must(sum(len(t.bits) for t in target.values()) == index["n_elements"], "n_elements")
    return target | {alias: target[name] for alias, name in aliases.items()}


def patch_tensor(records: list[Record], base: Tensor | None) -> Tensor:
    """All pieces of one tensor, put together."""
    first, bits = records[0], []
    for record in records:
        same = (record.kind, record.code, record.shape, record.base_shape)
        must(same == (first.kind, first.code, first.shape, first.base_shape), "pieces disagree")
        must(record.start == len(bits), "pieces do not follow each other")
        bits += new_piece(record, base)
    must(len(bits) == product(first.shape), "pieces do not cover the tensor")
    return Tensor(first.code, first.shape, bits)


def new_piece(record: Record, base: Tensor | None) -> list[int]:
    """The new bits of one piece, proven."""
    stop = record.start + record.n_elements
    if record.kind == 3:
        bits = decode_full(record)
    else:
        must(base is not None, "no base")
        must((base.code, base.shape) == (record.code, record.base_shape), "type or shape of base")
        old = base.bits[record.start : stop]
        must(digest(old, record.code, record.start) == record.base_digest, "base digest of piece")
        changes = (decode_compact if record.kind == 1 else decode_plain)(record, old)
        bits = [changes.get(i, b) for i, b in enumerate(old)]
    must(digest(bits, record.code, record.start) == record.target_digest, "target digest of piece")
    return bits


# --------------------------------------------------------------------------------- sections 4, 5


@dataclass
class Record:
    """Section 5."""

    name: str
    kind: int
    code: int
    start: int
    n_elements: int
    n_changed: int
    base_digest: tuple[int, int]
    target_digest: tuple[int, int]
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]
    body: bytes


def read_bucket(entry: dict, fetch: Callable[[str], bytes]) -> list[Record]:
    """Section 4."""
    raw = fetch(entry["file"])
    must(len(raw) == entry["n_bytes"], "length of a bucket")
    must(hashlib.sha256(raw).hexdigest() == entry["sha256"], "hash of a bucket")
    (n_header,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + n_header])
    metadata = header.pop("__metadata__")
    must(metadata["format"] == "weightwire.patch", "format")
    must(metadata["format_version"] == "1", "format version")
    must(metadata["codec"] in ("compact", "plain"), "codec")
    data, records = raw[8 + n_header :], []
    for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        must(fields["dtype"] == "U8" and len(fields["shape"]) == 1, "not a record")
        records.append(read_record(name, data[slice(*fields["data_offsets"])]))
    for side in ("base", "target"):
        tensors = [
            (
                r.name + (f"@{r.start}" if r.start else ""),
                r.code,
                r.shape,
                getattr(r, f"{side}_digest"),
            )
            for r in records
        ]
        must(combine(tensors) == metadata[f"{side}_digest"], "digest of a bucket")
    return records


def read_record(entry_name: str, raw: bytes) -> Record:
    """Section 5."""
    kind, code, n_dims, n_base_dims, reserved = struct.unpack_from("<BBBBI", raw)
    must(kind in (1, 2, 3) and code in TYPES and reserved == 0, "record head")
    start, n_elements, n_changed, *lanes = struct.unpack_from("<7Q", raw, 8)
    at = 64 + 8 * n_dims
    shape = base_shape = struct.unpack_from(f"<{n_dims}Q", raw, 64)
    if n_base_dims != 0xFF:
        base_shape = struct.unpack_from(f"<{n_base_dims}Q", raw, at)
        at += 8 * n_base_dims
    must(product(shape) == product(base_shape), "shapes")
    must(n_changed <= n_elements and start + n_elements <= product(shape), "counts")
    must((len(raw) - at) % 4 == 0, "whole words")
    suffix = f"@{start}" if start else ""
    must(entry_name.endswith(suffix), "name of a piece")
    return Record(
        entry_name[: len(entry_name) - len(suffix)],
        kind,
        code,
        start,
        n_elements,
        n_changed,
        (lanes[0], lanes[1]),
        (lanes[2], lanes[3]),
        shape,
        base_shape,
        raw[at:],
    )


def product(shape: tuple[int, ...]) -> int:
    """The number of elements of a shape."""
    total = 1
    for extent in shape:
        total *= extent
    return total


# --------------------------------------------------------------------------------- sections 6, 7


def elements(raw: bytes, n_bytes: int) -> list[int]:
    """Little-endian elements of a width."""
    starts = range(0, len(raw), n_bytes)
    return [int.from_bytes(raw[at : at + n_bytes], "little") for at in starts]


def padded(n_bytes: int) -> int:
    """A length rounded up to whole words."""
    return (n_bytes + 3) // 4 * 4


def decode_full(record: Record) -> list[int]:
    """Section 6."""
    n_bytes = TYPES[record.code][0]
    n_raw = record.n_elements * n_bytes
    must(record.n_changed == record.n_elements and len(record.body) == padded(n_raw), "full body")
    must(not any(record.body[n_raw:]), "full padding")
    must(record.base_digest == (0, 0) and record.base_shape == record.shape, "full base")
    return elements(record.body[:n_raw], n_bytes)


def decode_plain(record: Record, _: list[int]) -> dict[int, int]:
    """Section 7: position in the piece -> new bits."""
    b, n_chunks = TYPES[record.code][0], -(-record.n_elements // 65536)
    directory = struct.unpack_from(f"<{n_chunks}I", record.body)
    at, total, changes = 4 * n_chunks, 0, {}
    for chunk, word in enumerate(directory):
        m, mode, first = word & 0xFFFFFF, word >> 24, chunk * 65536
        n = min(65536, record.n_elements - first)
        must(m <= n and mode <= 2 and (m > 0 or mode == 0), "plain directory")
        places, n_where = list(range(n)), 0
        if mode == 0:
            n_where, places = 2 * m, elements(record.body[at : at + 2 * m], 2)
        elif mode == 1:
            n_where = -(-n // 8)
            mask = int.from_bytes(record.body[at : at + n_where], "little")
            places = [i for i in range(8 * n_where) if mask >> i & 1]
        must(len(places) == (n if mode == 2 else m), "plain count")
        must(all(a < z for a, z in pairwise(places)), "plain order")
        must(not places or places[-1] < n, "plain position")
        n_raw = n_where + len(places) * b
        values = elements(record.body[at + n_where : at + n_raw], b)
        must(not any(record.body[at + n_raw : at + padded(n_raw)]), "plain padding")
        changes.update(zip((first + place for place in places), values, strict=True))
        at, total = at + padded(n_raw), total + m
    must(at == len(record.body) and total == record.n_changed, "plain end")
    return changes


# ------------------------------------------------------------------------------------- section 8


@dataclass
class StepTable:
    """Section 8.1: tokens ``first`` and up, with cumulative frequencies if there are several."""

    first: int
    cumulative: list[int]


@dataclass
class Model:
    """Section 8.1."""

    chunk_log2: int
    base_key: int
    log2_weights: list[int]
    expected: list[bool]
    tables: list[StepTable]

    def class_of(self, bits: int, code: int) -> int:
        """The class of an element with these old bits."""
        _, shift, mask, _ = TYPES[code]
        return min(max((bits >> shift & mask) - self.base_key, 0), 15)


def gap_tables() -> list[list[int]]:
    """Section 8.4."""
    tables = []
    for decay in (51039, 52110, 53111, 54045, 54917, 55729, 56484, 57185):
        tail, c = 4096 << 16, []
        for _ in range(25):
            c.append(4096 - ((tail + 0x8000) >> 16))
            tail = (tail * decay) >> 16
        tables.append([*c, 4096])
    return tables


GAP_TABLES = gap_tables()


def read_model(body: bytes, code: int) -> tuple[Model, int]:
    """Section 8.1: the model, and where the directory begins."""
    n_bytes, _, mask, _ = TYPES[code]
    chunk_log2, reserved, base_key = struct.unpack_from("<BBH", body)
    must(10 <= chunk_log2 <= 20 and reserved == 0 and base_key <= mask, "model head")
    classes, at = body[4:20], 20
    must(all(c & 0xF <= 8 and c >> 5 == 0 for c in classes) and classes[15] == 0, "class bytes")
    tables: list[StepTable] = []
    for _ in range(16):
        if body[at] == 0xFF:
            must(bool(tables), "no class before")
            tables.append(tables[-1])
            at += 1
            continue
        first, count = body[at], body[at + 1]
        at += 2
        must(count >= 1 and first + count - 1 <= {1: 13, 2: 29, 4: 61, 8: 125}[n_bytes], "tokens")
        frequencies = []
        for _ in range(count if count > 1 else 0):
            a = body[at]
            at += 1
            if a >= 128:
                a = a & 0x7F | body[at] << 7
                at += 1
            frequencies.append(a)
        must(count == 1 or (sum(frequencies) == 4096 and 0 not in frequencies), "frequencies")
        tables.append(StepTable(first, [0, *accumulate(frequencies)]))
    must(not any(body[at : padded(at)]), "model padding")
    expected = [bool(c & 16) for c in classes]
    return Model(chunk_log2, base_key, [c & 15 for c in classes], expected, tables), padded(at)


def decode_compact(record: Record, old: list[int]) -> dict[int, int]:
    """Section 8: position in the piece -> new bits."""
    model, at = read_model(record.body, record.code)
    size = 1 << model.chunk_log2
    n_chunks = -(-record.n_elements // size)
    directory = struct.unpack_from(f"<{2 * n_chunks}I", record.body, at)
    words = elements(record.body[at + 8 * n_chunks :], 4)
    next_word, changes = 0, {}
    for chunk in range(n_chunks):
        head, n_words = directory[2 * chunk : 2 * chunk + 2]
        own, first = words[next_word : next_word + n_words], chunk * size
        must(len(own) == n_words, "payload")
        found = decode_chunk(model, record.code, old[first : first + size], head, own)
        changes.update({first + place: bits for place, bits in found.items()})
        next_word += n_words
    must(next_word == len(words) and len(changes) == record.n_changed, "compact end")
    return changes


def decode_chunk(
    model: Model, code: int, old: list[int], head: int, words: list[int]
) -> dict[int, int]:
    """Section 8.2."""
    if not words:
        must(head == 0, "head of an empty chunk")
        return {}
    if head >> 21 & 1:
        n_bytes = TYPES[code][0]
        raw = b"".join(word.to_bytes(4, "little") for word in words)
        must(head == 1 << 21 and len(raw) == padded(len(old) * n_bytes), "dense chunk")
        must(not any(raw[len(old) * n_bytes :]), "dense padding")
        new = elements(raw[: len(old) * n_bytes], n_bytes)
        return {i: b for i, b in enumerate(new) if b != old[i]}
    return decode_coded(model, code, old, head, words)


class Coder:
    """Section 8.3."""

    def __init__(self, words: list[int], at: int) -> None:
        must(len(words) >= at + 2, "no state")
        self.words, self.at = words, at + 2
        self.x = words[at] | words[at + 1] << 32
        must(self.x >= 1 << 32, "state")

    def take(self, c: list[int]) -> int:
        """The next symbol; no refill."""
        slot = self.x & 4095
        s = bisect_right(c, slot) - 1
        self.x = (c[s + 1] - c[s]) * (self.x >> 12) + slot - c[s]
        return s

    def refill(self, bound: int) -> None:
        """Read a word if the state is below the bound."""
        if self.x < bound:
            must(self.at < len(self.words), "out of words")
            self.x = self.x << 32 | self.words[self.at]
            self.at += 1
        must(self.x < 1 << 64, "state too large")


def decode_coded(
    model: Model, code: int, old: list[int], head: int, words: list[int]
) -> dict[int, int]:
    """Sections 8.2 to 8.6."""
    n_events, rate = head & 0x1FFFFF, head >> 24
    must(head >> 23 & 1 == 0 and rate <= 167 and n_events <= len(old), "chunk head")
    must(max(model.log2_weights) <= rate // 8 + 2, "rate")
    has_exceptions = head >> 22 & 1
    coder = Coder(words, has_exceptions)
    classes = [model.class_of(bits, code) for bits in old]
    events = read_events(coder, n_events, rate, [model.log2_weights[c] for c in classes])
    changed = [i for i, c in enumerate(classes) if model.expected[c] != (i in events)]
    magnitudes = [read_magnitude(coder, model.tables[classes[i]]) for i in changed]
    stride = 3 if TYPES[code][0] == 8 else 2
    n_exceptions = words[0] if has_exceptions else 0
    must(not has_exceptions or 1 <= n_exceptions <= len(changed), "exception count")
    first_exception = len(words) - stride * n_exceptions
    first_sign = first_exception - -(-len(changed) // 32)
    must(coder.x == 1 << 32 and coder.at == first_sign, "end of the stream")
    signs = sum(word << 32 * i for i, word in enumerate(words[first_sign:first_exception][::-1]))
    must(signs >> len(changed) == 0, "signs past the last change")
    new = [
        add_step(old[i], -m - 1 if signs >> j & 1 else m + 1, code)
        for j, (i, m) in enumerate(zip(changed, magnitudes, strict=True))
    ]
    put_exceptions(new, words[first_exception:], stride, 8 * TYPES[code][0])
    return dict(zip(changed, new, strict=True))


def read_events(coder: Coder, n_events: int, rate: int, log2_weights: list[int]) -> set[int]:
    """Section 8.4."""
    k, c = rate // 8, GAP_TABLES[rate % 8]
    ends = list(accumulate(1 << w for w in log2_weights))
    events: set[int] = set()
    previous = 0
    for _ in range(n_events):
        q = 0
        while (s := coder.take(c)) == 24:
            q += 24
            coder.refill(1 << 32)
        gap = (q + s) << k | coder.x & ((1 << k) - 1)
        coder.x >>= k
        slot = previous + gap
        must(slot < ends[-1], "past the end of the chunk")
        i = bisect_right(ends, slot)
        w = log2_weights[i]
        coder.refill(1 << (32 - w))
        coder.x = coder.x << w | (slot - (ends[i] - (1 << w)))
        events.add(i)
        previous = ends[i]
    return events


def read_magnitude(coder: Coder, table: StepTable) -> int:
    """Section 8.5."""
    token = table.first
    if len(table.cumulative) > 1:
        token += coder.take(table.cumulative)
        coder.refill(1 << 32)
    if token < 4:
        return token
    r, raw, done = token // 2 - 1, 0, 0
    while done < r:
        n = min(16, r - done)
        raw |= (coder.x & ((1 << n) - 1)) << done
        coder.x >>= n
        coder.refill(1 << 32)
        done += n
    return (2 | token & 1) << r | raw


def add_step(old: int, step: int, code: int) -> int:
    """Sections 1 and 8.5."""
    n_bytes, _, _, is_ordered = TYPES[code]
    full, top = (1 << 8 * n_bytes) - 1, 1 << (8 * n_bytes - 1)
    if not is_ordered:
        return (old + step) & full
    value = ((~old & full if old & top else old | top) + step) & full
    return value ^ top if value & top else ~value & full


def put_exceptions(new: list[int], words: list[int], stride: int, width: int) -> None:
    """Section 8.6."""
    previous = -1
    for at in range(0, len(words), stride):
        number, bits = words[at], words[at + 1] | (words[at + 2] << 32 if stride == 3 else 0)
        must(previous < number < len(new) and bits >> width == 0, "exception")
        new[number] = bits
        previous = number


# ------------------------------------------------------------------------------------- section 9


def mix(v: int) -> int:
    """The mixing function of keys."""
    v = ((v ^ v >> 16) * 0x7FEB352D) & M32
    v = ((v ^ v >> 15) * 0x846CA68B) & M32
    return v ^ v >> 16


PLACE_KEYS = [[mix((256 * r + p + 1) * 0x9E3779B9 & M32) for p in range(256)] for r in range(3)]


def multipliers(block: int) -> tuple[int, int]:
    """M of the document, for both lanes."""
    h = [mix((block * 0x85EBCA6B + j * 0xC2B2AE35 + 0x27D4EB2F) & M32) for j in range(4)]
    return h[0] << 32 | h[1] | 1, h[2] << 32 | h[3] | 1


def digest(bits: list[int], code: int, first: int) -> tuple[int, int]:
    """Low and high lane of elements that start at position ``first``."""
    limbs = bits
    if TYPES[code][0] == 8:
        limbs = [half for b in bits for half in (b & M32, b >> 32)]
        first *= 2
    lanes, block, m = [0, 0], -1, (0, 0)
    for number, limb in enumerate(limbs, start=first):
        if number >> 8 != block:
            block = number >> 8
            m = multipliers(block)
        keyed = [(limb + row[number & 255]) & M32 for row in PLACE_KEYS]
        lanes[0] += m[0] * keyed[0] * keyed[1]
        lanes[1] += m[1] * keyed[0] * keyed[2]
    return lanes[0] & M64, lanes[1] & M64


def digest_text(lanes: tuple[int, int]) -> str:
    """High lane, then low lane."""
    return f"{lanes[1]:016x}{lanes[0]:016x}"


def tensor_digest(tensor: Tensor) -> tuple[int, int]:
    """The digest of a whole tensor."""
    return digest(tensor.bits, tensor.code, 0)


def state_digest(state: State) -> str:
    """The digest of a state."""
    return combine([(name, t.code, t.shape, tensor_digest(t)) for name, t in state.items()])


def combine(tensors: list[tuple[str, int, tuple[int, ...], tuple[int, int]]]) -> str:
    """BLAKE2b over names, types, shapes and digests."""
    state = hashlib.blake2b(digest_size=16, person=b"weightwire.state")
    for name, code, shape, lanes in sorted(tensors, key=lambda tensor: tensor[0].encode()):
        raw = name.encode()
        state.update(struct.pack("<I", len(raw)) + raw)
        state.update(struct.pack("<BB", code, len(shape)))
        state.update(struct.pack(f"<{len(shape)}Q", *shape))
        state.update(struct.pack("<QQ", *lanes))
    return state.hexdigest()
