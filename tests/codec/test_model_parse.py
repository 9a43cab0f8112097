"""Models read many at once are those that ``parse_model`` reads one by one, and so are refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model_build import every_dtype, random_survey

import weightwire as ww
from weightwire import limits
from weightwire.apply.device_proof import _pieces
from weightwire.codec.classes import (
    MAX_LOG2_WEIGHT,
    UNUSED_MODEL,
    build_model,
    choose_chunk_log2,
)
from weightwire.codec.device_pieces import DevicePiece
from weightwire.codec.model_bytes import model_bytes, parse_model
from weightwire.codec.model_parse import ParsedModels, parse_models
from weightwire.codec.piece import encode_piece
from weightwire.codec.record import Kind, Record, RecordHead, patch_record
from weightwire.digest import TensorDigest
from weightwire.errors import MalformedRecord
from weightwire.kernels.contract import N_CLASSES, PROBABILITY_SUM, ClassModel, StepTable
from weightwire.kernels.steps import max_token
from weightwire.model import _DTYPES, DType, TensorSpec, dtype_named

BF16 = dtype_named("BF16")
Body = npt.NDArray[np.uint8]


@pytest.fixture(params=["native", "reference"], autouse=True)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    ww.use_backend(request.param)
    yield
    ww.use_backend(None)


@st.composite
def step_tables(draw: st.DrawFn, last_token: int) -> StepTable:
    """Any frequencies: the distances between some places among 4096."""
    first = draw(st.integers(0, last_token))
    places = st.integers(1, PROBABILITY_SUM - 1)
    cuts = draw(st.lists(places, unique=True, max_size=last_token - first))
    often = np.diff([0, *sorted(cuts), PROBABILITY_SUM]).tolist()
    return StepTable(tuple(range(first, first + len(often))), tuple(often))


@st.composite
def class_models(draw: st.DrawFn, dtype: DType) -> ClassModel:
    """Any model; classes share a few tables, so that some have that of the one before."""
    tables = draw(st.lists(step_tables(max_token(dtype)), min_size=1, max_size=3))
    n_open = N_CLASSES - 1
    weights = st.lists(st.integers(0, MAX_LOG2_WEIGHT), min_size=n_open, max_size=n_open)
    flags = st.lists(st.booleans(), min_size=n_open, max_size=n_open)
    chosen = st.lists(st.sampled_from(tables), min_size=N_CLASSES, max_size=N_CLASSES)
    return ClassModel(
        draw(st.integers(0, dtype.key_mask)),
        (*draw(weights), 0),
        (*draw(flags), False),
        tuple(draw(chosen)),
    )


@st.composite
def bodies_of(draw: st.DrawFn, dtype: DType) -> bytes:
    """A body that starts with a model."""
    log2s = st.integers(limits.MIN_CHUNK_LOG2, limits.MAX_CHUNK_LOG2)
    return model_bytes(draw(class_models(dtype)), draw(log2s)) + draw(st.binary(max_size=9))


@st.composite
def spoiled(draw: st.DrawFn, body: bytes) -> bytes:
    """The body with a few bytes written over, exchanged, put in or left out."""
    raw = bytearray(body)
    for _ in range(draw(st.integers(1, 3))):
        if not raw:
            break
        at, other = draw(st.integers(0, len(raw) - 1)), draw(st.integers(0, len(raw) - 1))
        match draw(st.sampled_from(["write", "exchange", "insert", "remove", "truncate"])):
            case "write":
                raw[at] = draw(st.integers(0, 255))
            case "exchange":
                raw[at], raw[other] = raw[other], raw[at]
            case "insert":
                raw.insert(at, draw(st.integers(0, 255)))
            case "remove":
                del raw[at]
            case "truncate":
                del raw[at + 1 :]
    return bytes(raw)


def array_of(body: bytes) -> Body:
    """Read-only, as records have it."""
    return np.frombuffer(body, dtype=np.uint8)


def assert_same_models(bodies: list[Body], dtype: DType) -> None:
    wanted = [parse_model(body, dtype) for body in bodies]
    models, ends = parse_models(bodies, dtype)
    assert len(models) == len(ends) == len(bodies)
    assert [models.model(i) for i in range(len(models))] == [model for model, _, _ in wanted]
    assert models.chunk_log2.tolist() == [chunk_log2 for _, chunk_log2, _ in wanted]
    assert ends.tolist() == [end for _, _, end in wanted]
    assert models.frequencies.sum(axis=2).tolist() == [[PROBABILITY_SUM] * N_CLASSES] * len(bodies)


def refusal(body: Body, dtype: DType) -> str | None:
    """Why ``parse_model`` refuses a body."""
    try:
        parse_model(body, dtype)
    except MalformedRecord as error:
        return str(error)
    return None


def outcome(bodies: list[Body], dtype: DType) -> str | list[bytes]:
    """All arrays, or why there are none."""
    try:
        parsed: ParsedModels = parse_models(bodies, dtype)
    except MalformedRecord as error:
        return str(error)
    arrays = [getattr(parsed.models, field.name) for field in fields(parsed.models)]
    return [array.tobytes() for array in (*arrays, parsed.ends)]


@every_dtype
def test_models_of_random_surveys_are_read(dtype: DType) -> None:
    random = np.random.default_rng(dtype.code)
    surveys = [random_survey(random, dtype, n) for n in (1, 2, 17, 1000, 1 << 18, 1 << 20)]
    models = [(build_model(survey, dtype), choose_chunk_log2(survey)) for survey in surveys]
    assert_same_models([array_of(model_bytes(*model)) for model in models], dtype)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(_DTYPES))
def test_any_models_are_read(data: st.DataObject, dtype: DType) -> None:
    bodies = data.draw(st.lists(bodies_of(dtype), max_size=3))
    assert_same_models([array_of(body) for body in bodies], dtype)


@settings(max_examples=250, deadline=None)
@given(st.data(), st.sampled_from(_DTYPES))
def test_spoiled_models_are_refused_or_read_alike(data: st.DataObject, dtype: DType) -> None:
    body = array_of(data.draw(bodies_of(dtype).flatmap(spoiled)))
    good = array_of(model_bytes(UNUSED_MODEL, 12))
    why = refusal(body, dtype)
    if why is None:
        assert_same_models([good, body, good], dtype)
    else:
        assert outcome([good, body, good], dtype) == f"model 1: {why}"


def test_every_truncation_is_refused_alike() -> None:
    table = StepTable((3, 4, 5), (1, 95, 4000))
    raw = model_bytes(replace(UNUSED_MODEL, steps=(table,) * 9 + UNUSED_MODEL.steps[9:]), 12)
    for n_bytes in range(len(raw)):
        why = "model 0: a record ends inside its class model"
        assert outcome([array_of(raw[:n_bytes])], BF16) == why
    assert_same_models([array_of(raw)], BF16)


HEAD = bytes([12, 0, 0, 0]) + bytes(N_CLASSES)
SHORTEST = model_bytes(UNUSED_MODEL, 12)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (bytes([9]) + SHORTEST[1:], "chunk size 2^9 is out of range"),
        (bytes([21]) + SHORTEST[1:], "chunk size 2^21 is out of range"),
        (bytes([12, 1]) + SHORTEST[2:], "chunk size 2^12 is out of range"),
        (bytes([12, 0, 0, 1]) + SHORTEST[4:], "class window starts at 256, past every key"),
        (SHORTEST[:4] + bytes([9]) + SHORTEST[5:], "a class weight is out of range"),
        (SHORTEST[:4] + bytes([0x20]) + SHORTEST[5:], "a class weight is out of range"),
        (SHORTEST[:19] + bytes([0x10]) + SHORTEST[20:], "a class weight is out of range"),
        (HEAD + bytes([0xFF]) * 16, "the first step table refers to one before it"),
        (HEAD + bytes([5, 0]), "a step table has 0 tokens from 5"),
        (HEAD + bytes([20, 11]), "a step table has 11 tokens from 20"),
        (HEAD + bytes([254, 255]), "a step table has 255 tokens from 254"),
        (HEAD + bytes([0, 2, 0x81, 0]), "a step table says a small frequency in two bytes"),
        (HEAD + bytes([0, 2, 1, 1]), "a step table's frequencies do not sum to 4096"),
        (HEAD + bytes([0, 2, 0, 0x80, 32]), "a step table's frequencies do not sum to 4096"),
        (SHORTEST[:-1] + bytes([1]), "a class model's padding is not zero"),
        (b"", "a record ends inside its class model"),
    ],
)
def test_bytes_that_no_writer_writes_are_refused(raw: bytes, why: str) -> None:
    assert refusal(array_of(raw), BF16) == why
    assert outcome([array_of(SHORTEST), array_of(raw)], BF16) == f"model 1: {why}"


def test_first_wrong_model_is_told() -> None:
    short, wrong = array_of(SHORTEST[:-1]), array_of(bytes([9]) + SHORTEST[1:])
    assert outcome([short, wrong], BF16) == "model 0: a record ends inside its class model"
    assert outcome([wrong, short], BF16) == "model 0: chunk size 2^9 is out of range"


def test_bodies_with_gaps_between_their_bytes_are_read() -> None:
    spread = np.repeat(array_of(SHORTEST), 3)[::3]
    assert outcome([spread], BF16) == outcome([array_of(SHORTEST)], BF16)


def record_of(name: str, n_elements: int, codec: str = "compact") -> Record:
    random = np.random.default_rng(n_elements)
    old = random.integers(0x3C00, 0x3E00, n_elements).astype(np.uint16)
    new = old + random.integers(0, 9, n_elements).astype(np.uint16) * (
        random.random(n_elements) < 0.1
    )
    head = RecordHead(
        TensorSpec(name, BF16, (n_elements,)),
        Kind.COMPACT, 0, n_elements, 0, TensorDigest(), TensorDigest(), (n_elements,),
    )  # fmt: skip
    return patch_record(head, encode_piece(old, new.astype(np.uint16), BF16, codec))


def test_pieces_of_compact_records_are_those_read_one_by_one() -> None:
    records = [record_of(f"t{n}", n) for n in (0, 1, 3000, 9000)]
    pieces = _pieces(records)
    for piece, record in zip(pieces, records, strict=True):
        wanted = record.piece()
        assert isinstance(piece, DevicePiece)
        assert piece.models is not None
        assert piece.models.model(piece.number) == wanted.model
        assert (piece.n_elements, piece.chunk_log2) == (wanted.n_elements, wanted.chunk_log2)
        assert piece.streams.n_changed == wanted.n_changed
        assert piece.streams.directory.tolist() == wanted.streams.directory.tolist()
        assert piece.streams.payload.tobytes() == wanted.streams.payload.tobytes()


def test_pieces_of_plain_records_have_no_model() -> None:
    (piece,) = _pieces([record_of("t", 3000, "plain")])
    assert piece.model is None


def test_first_wrong_record_is_named_whatever_is_wrong_with_it() -> None:
    good, other = record_of("good", 3000), record_of("other", 9000)
    wrong_model = replace(other, body=array_of(bytes([9]) + other.body[1:].tobytes()))
    no_directory = replace(good, body=good.body[: parse_model(good.body, BF16)[2]])
    with pytest.raises(MalformedRecord) as told:
        _pieces([good, wrong_model, no_directory])
    assert (
        str(told.value) == "tensor 'other': chunk size 2^9 is out of range; fetch the patch again"
    )
    with pytest.raises(MalformedRecord) as told:
        _pieces([no_directory, wrong_model])
    why = "a record ends inside its chunk directory"
    assert str(told.value) == f"tensor 'good': {why}; fetch the patch again"
