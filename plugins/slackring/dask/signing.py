"""How a driver and its ranks know each other's messages: by a secret of their pool, each message once."""

from __future__ import annotations

import hmac
import itertools
import secrets

__all__ = [
    "MAX_BODY",
    "NONCE",
    "SIGNATURE",
    "Nonces",
    "SeenNonces",
    "new_secret",
    "same_signature",
    "sign_request",
    "sign_response",
]

NONCE = "X-Slackring-Nonce"  # HTTP headers
SIGNATURE = "X-Slackring-Signature"
MAX_BODY = 1 << 20  # bytes of a message; what Gloo tells about a rank grows by 150 bytes with each other rank


def new_secret() -> bytes:
    """A secret for one pool, that nobody can guess."""
    return secrets.token_bytes(32)


def sign_request(secret: bytes, method: str, path: str, nonce: str, body: bytes) -> str:
    """Signature (HMAC-SHA256, in hex) of an HTTP request.

    Parameters
    ----------
    secret
        The pool's.
    method, path, body
        What is asked.
    nonce
        From :class:`Nonces`, never used before.

    Examples
    --------
    >>> asked = sign_request(b"secret", "GET", "/ping", "a-1", b"")
    >>> same_signature(asked, sign_request(b"secret", "PUT", "/ping", "a-1", b""))
    False
    """
    return _signature(secret, b"request", method.encode(), path.encode(), nonce.encode(), body)


def sign_response(secret: bytes, nonce: str, status: int, body: bytes) -> str:
    """Signature of the answer to the request that carried `nonce`."""
    return _signature(secret, b"response", nonce.encode(), str(status).encode(), body)


def same_signature(expected: str, given: str) -> bool:
    """Compare two signatures in a time that does not tell where they differ."""
    return hmac.compare_digest(expected.encode(), given.encode())


def _signature(secret: bytes, *parts: bytes) -> str:
    # With its length before each part, no two lists of parts make the same message.
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, message, "sha256").hex()


class Nonces:
    """Names each request of one sender: the sender's random name, and a number that rises.

    Examples
    --------
    >>> nonces = Nonces()
    >>> nonces.fresh() == nonces.fresh()
    False
    """

    def __init__(self) -> None:
        self._sender = secrets.token_hex(16)
        self._numbers = itertools.count(1)

    def fresh(self) -> str:
        """A nonce that was never used."""
        return f"{self._sender}-{next(self._numbers)}"


class SeenNonces:
    """Tells replayed requests from new ones.

    A sender waits for each answer, so its numbers arrive in order: one number per sender is all there is to remember.

    Examples
    --------
    >>> nonce, seen = Nonces().fresh(), SeenNonces()
    >>> seen.accept(nonce), seen.accept(nonce)
    (True, False)
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def accept(self, nonce: str) -> bool:
        """Whether a nonce is well formed and newer than all others of its sender; only ask after checking the signature."""
        sender, _, text = nonce.partition("-")
        if not (text.isascii() and text.isdigit()):
            return False
        number = int(text)
        if number <= self._last.get(sender, 0):
            return False
        self._last[sender] = number
        return True
