"""An envelope gives back exactly the block that was put into it, or says why it does not."""

from __future__ import annotations

import random

import pytest

from baton.core.errors import InvariantViolated
from baton.kv.transfer_contract import KvLayout
from baton.wire.envelope import HEADER_BYTES, EnvelopeFlaw, OpenedEnvelope, object_name, open_any, seal, stamp, unseal

KEY, OTHER_KEY = bytes(range(16)), bytes(range(1, 17))
LAYOUT, OTHER_LAYOUT = bytes(range(32, 48)), bytes(range(48, 64))
PAYLOAD = random.Random(3).randbytes(3000)


def sealed(payload: bytes = PAYLOAD, key: bytes = KEY, layout: bytes = LAYOUT) -> bytearray:
    data = bytearray(HEADER_BYTES + len(payload))
    assert seal(key, layout, memoryview(payload), memoryview(data)) == len(data)
    return data


def opened(data: bytes | bytearray) -> bytes | EnvelopeFlaw:
    found = unseal(KEY, LAYOUT, memoryview(data))
    return found if isinstance(found, EnvelopeFlaw) else bytes(found)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100_000])
def test_a_block_comes_out_as_it_went_in(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    assert opened(sealed(payload)) == payload


def test_the_block_is_a_view_and_no_copy() -> None:
    data = sealed()
    found = unseal(KEY, LAYOUT, memoryview(data))
    assert isinstance(found, memoryview)
    data[HEADER_BYTES] ^= 1
    assert found[0] == PAYLOAD[0] ^ 1


def test_the_header_has_64_bytes_and_a_format_that_stays() -> None:
    """What was stored last year is read this year. Whoever changes the format counts `VERSION` up."""
    data = sealed(b"kv of a block")
    assert HEADER_BYTES == 64
    assert data[:8] == b"batnkv\x01\x00"
    assert data[8:48] == KEY + LAYOUT + (13).to_bytes(8, "little")
    assert data[48:64].hex() == "a29765c1ce94ea03ac57a3857d6a8290"


def test_more_room_than_needed_is_left_alone() -> None:
    room = bytearray(b"\xee" * 200)
    size = seal(KEY, LAYOUT, memoryview(b"abc"), memoryview(room))
    assert size == HEADER_BYTES + 3
    assert room[size:] == b"\xee" * (200 - size)
    assert opened(room[:size]) == b"abc"


def test_a_payload_in_its_place_needs_only_a_header() -> None:
    data = bytearray(HEADER_BYTES) + PAYLOAD
    stamp(KEY, LAYOUT, memoryview(data))
    assert data == sealed()


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + len(PAYLOAD) - 1])
def test_a_torn_one_is_told(size: int) -> None:
    assert opened(sealed()[:size]) is EnvelopeFlaw.TORN


def test_one_with_more_at_its_end_is_told() -> None:
    assert opened(sealed() + b"\0") is EnvelopeFlaw.TORN


def test_every_single_flipped_bit_is_found() -> None:
    data = sealed(PAYLOAD[:40])
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert isinstance(opened(data), EnvelopeFlaw), bit
        data[bit // 8] ^= 1 << bit % 8
    assert opened(data) == PAYLOAD[:40]


def test_the_block_of_somebody_else_is_told() -> None:
    assert opened(sealed(key=OTHER_KEY)) is EnvelopeFlaw.OTHER_KEY
    assert opened(sealed(layout=OTHER_LAYOUT)) is EnvelopeFlaw.OTHER_LAYOUT


def test_another_dtype_block_size_model_or_shape_is_another_layout() -> None:
    base = KvLayout(b"a model", "float32", 16, (64, 64))
    others = [
        KvLayout(b"b model", "float32", 16, (64, 64)),
        KvLayout(b"a model", "bfloat16", 16, (64, 64)),
        KvLayout(b"a model", "float32", 32, (64, 64)),
        KvLayout(b"a model", "float32", 16, (64, 64, 64)),
    ]
    data = memoryview(sealed(layout=base.digest))
    assert not isinstance(unseal(KEY, base.digest, data), EnvelopeFlaw)
    assert [unseal(KEY, other.digest, data) for other in others] == [EnvelopeFlaw.OTHER_LAYOUT] * 4
    assert len({object_name(layout.digest, KEY) for layout in [base, *others]}) == 5


def test_what_never_was_an_envelope_and_what_a_later_version_wrote_are_told() -> None:
    assert opened(bytes(200)) is EnvelopeFlaw.FOREIGN
    later = sealed()
    later[6] += 1
    assert opened(later) is EnvelopeFlaw.VERSION


def test_whoever_looks_after_a_store_opens_any() -> None:
    found = open_any(memoryview(sealed(key=OTHER_KEY, layout=OTHER_LAYOUT)))
    assert isinstance(found, OpenedEnvelope)
    assert (found.key, found.layout, bytes(found.payload)) == (OTHER_KEY, OTHER_LAYOUT, PAYLOAD)
    assert open_any(memoryview(b"")) is EnvelopeFlaw.TORN


def test_names_have_the_layout_and_the_key() -> None:
    assert object_name(LAYOUT, KEY) == "2021222324252627/000102030405060708090a0b0c0d0e0f"


@pytest.mark.parametrize(("key", "layout", "room"), [(b"short", LAYOUT, 100), (KEY, b"short", 100), (KEY, LAYOUT, 66)])
def test_what_cannot_be_sealed_is_a_bug_of_the_caller(key: bytes, layout: bytes, room: int) -> None:
    with pytest.raises(InvariantViolated):
        seal(key, layout, memoryview(b"abc"), memoryview(bytearray(room)))


def test_random_harm_is_never_opened_as_good() -> None:
    draw = random.Random(11)
    good = bytes(sealed())
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(draw.choice((1, 1, 2, 5))):
            begin = draw.randrange(len(data) + 1)
            end = min(len(data), begin + draw.randrange(1, 40))
            match draw.randrange(4):
                case 0:
                    data[begin:end] = draw.randbytes(end - begin)
                case 1:
                    del data[begin:end]
                case 2:
                    data[begin:begin] = draw.randbytes(3)
                case _:
                    data[begin:end] = data[end : 2 * end - begin]
        assert (opened(data) == PAYLOAD) == (data == good)
