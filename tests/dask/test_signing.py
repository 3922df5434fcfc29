"""A changed message is refused, whatever has changed, and so is a message that comes twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slackring.dask.signing import Nonces, SeenNonces, new_secret, same_signature, sign_request, sign_response

texts = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
parts = st.tuples(st.binary(min_size=1, max_size=8), texts, texts, texts, st.binary(max_size=8))


def flipped(value: bytes, bit: int) -> bytes:
    return (int.from_bytes(value) ^ 1 << bit).to_bytes(len(value))


@given(parts, st.data())
def test_a_request_with_any_bit_flipped_has_another_signature(
    request: tuple[bytes, str, str, str, bytes], data: st.DataObject
) -> None:
    fields = [part if isinstance(part, bytes) else part.encode() for part in request]
    which = data.draw(st.sampled_from([index for index, field in enumerate(fields) if field]))
    # The eighth bit of a byte of text would not leave ASCII.
    bits = [bit for bit in range(8 * len(fields[which])) if which in (0, 4) or bit % 8 != 7]
    fields[which] = flipped(fields[which], data.draw(st.sampled_from(bits)))
    secret, method, path, nonce, body = fields
    other = sign_request(secret, method.decode(), path.decode(), nonce.decode(), body)
    assert not same_signature(sign_request(*request), other)


@given(parts, parts)
def test_only_equal_requests_have_equal_signatures(
    one: tuple[bytes, str, str, str, bytes], other: tuple[bytes, str, str, str, bytes]
) -> None:
    secret = one[0]
    equal = same_signature(sign_request(secret, *one[1:]), sign_request(secret, *other[1:]))
    assert equal == (one[1:] == other[1:])


def test_what_stands_at_the_border_of_two_parts_belongs_to_one_of_them() -> None:
    assert sign_request(b"s", "PUT", "/1", "a-1", b"b") != sign_request(b"s", "PUT", "/1a", "-1", b"b")
    assert sign_request(b"s", "PUT", "/1", "a-1", b"b") != sign_request(b"s", "PUT", "/1", "a-", b"1b")


@given(st.integers(0, 7), st.integers(0, 63))
def test_a_response_with_any_bit_flipped_has_another_signature(body_bit: int, signature_bit: int) -> None:
    signature = sign_response(b"secret", "a-1", 200, b"x")
    assert same_signature(signature, sign_response(b"secret", "a-1", 200, b"x"))
    assert not same_signature(signature, sign_response(b"secret", "a-1", 200, flipped(b"x", body_bit)))
    assert not same_signature(signature, sign_response(b"secret", "a-1", 404, b"x"))
    assert not same_signature(signature, sign_response(b"secret", "a-2", 200, b"x"))
    assert not same_signature(signature, flipped(bytes.fromhex(signature), signature_bit).hex())


def test_signatures_that_are_none_are_refused() -> None:
    expected = sign_response(b"secret", "a-1", 200, b"")
    assert not any(same_signature(expected, given) for given in ("", "é", expected[:-1], expected + "0"))


def test_secrets_differ() -> None:
    assert len({new_secret() for _ in range(10)}) == 10 and len(new_secret()) == 32


def test_a_nonce_is_accepted_once_and_no_older_one_after_it() -> None:
    nonces, others, seen = Nonces(), Nonces(), SeenNonces()
    first, second = nonces.fresh(), nonces.fresh()
    assert seen.accept(second)
    assert not seen.accept(second) and not seen.accept(first)
    assert seen.accept(others.fresh())


def test_malformed_nonces_are_refused() -> None:
    seen = SeenNonces()
    assert not any(seen.accept(nonce) for nonce in ("", "-", "a", "a-", "a-0", "a--1", "a-1.5", "a-²", "a-+1"))


def test_what_is_remembered_of_nonces_does_not_grow_with_their_number() -> None:
    nonces, seen = Nonces(), SeenNonces()
    assert all(seen.accept(nonces.fresh()) for _ in range(1000))
    assert len(seen._last) == 1
