"""How two ranks recognise each other over a fresh socket.

Each side proves that it knows the job's secret, by a code over numbers that both have drawn; the
secret itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

_GREETING_SECONDS = 5.0
_NONCE_BYTES = 16


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"/".join(parts), hashlib.sha256)


def admit(connection: socket.socket, secret: bytes) -> int | None:
    """The rank at the other end of a fresh connection, if it knows the secret."""
    connection.settimeout(_GREETING_SECONDS)
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        rank, theirs, proof = (_exactly(connection, n) for n in (4, _NONCE_BYTES, 32))
        if not hmac.compare_digest(proof, _proof(secret, b"rank", nonce, rank, theirs)):
            return None
        connection.sendall(_proof(secret, b"root", theirs, rank, nonce))
        return int.from_bytes(rank, "big")
    except OSError:
        return None


def present(connection: socket.socket, secret: bytes, rank: int) -> None:
    """The other end of `admit`; raises OSError if it is not one of the job."""
    mine, number = secrets.token_bytes(_NONCE_BYTES), rank.to_bytes(4, "big")
    nonce = _exactly(connection, _NONCE_BYTES)
    connection.sendall(number + mine + _proof(secret, b"rank", nonce, number, mine))
    proof = _exactly(connection, 32)
    if not hmac.compare_digest(proof, _proof(secret, b"root", mine, number, nonce)):
        raise OSError("whoever answers there does not know the job's secret")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise OSError("the connection ended")
        data += piece
    return data
