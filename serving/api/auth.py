"""Who may use the server: API keys, and protection of a server without keys from web pages in the user's browser."""

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers

from umbra.base.errors import UserError
from umbra.serving.api.errors import ApiError

LARGEST = 1 << 20  # bytes of a file of keys


@dataclass(frozen=True)
class ApiKeys:
    """Digests of all valid keys; without any, everybody may use the server."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, file: str) -> "ApiKeys":
        """The keys in `file`, one a line; an empty name: none."""
        if not file:
            return cls()
        path = Path(file).expanduser()
        try:
            if path.stat().st_size > LARGEST:
                raise UserError(f"serve_config.api_key_file: {path} is larger than {LARGEST >> 20} MB")
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise UserError(f"serve_config.api_key_file: {path} cannot be read: {error.strerror}") from None
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise UserError(f"serve_config.api_key_file: {path} has no key: write one a line")
        return cls.of(keys)

    @classmethod
    def of(cls, keys: Iterable[bytes]) -> "ApiKeys":
        return cls(tuple(map(_digest, keys)))

    def check(self, headers: Headers) -> bytes:
        """The salt of prefixes of this request's key. Raises ApiError if the key is missing or wrong."""
        if not self.digests:
            return b""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(key.encode("latin-1", "replace"))
        if not any([hmac.compare_digest(digest, known) for known in self.digests]):  # noqa: C419 (all are compared)
            raise ApiError(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
            )
        return digest[:16]


def check_address(host: str, keys: ApiKeys) -> None:
    """Refuses to be reachable for others without a key."""
    if not keys.digests and not is_loopback(host):
        raise UserError(
            f"serve_config.host: {host}: everybody who reaches this address could use the server: "
            "set serve_config.api_key_file, or host: 127.0.0.1"
        )


def check_certificate(certificate: str, key: str) -> None:
    """Refuses files of TLS that cannot be used, before uvicorn reads them."""
    if key and not certificate:
        raise UserError("serve_config.ssl_keyfile: belongs to ssl_certfile, which is missing")
    if not certificate:
        return
    for name, file in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        if file and not Path(file).is_file():
            raise UserError(f"serve_config.{name}: {file}: there is no such file")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key or None, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise UserError(
            f"serve_config.ssl_certfile: {certificate}{f' and {key}' if key else ''}: cannot be used, give a PEM "
            f"certificate and its key, which has no password: {error}"
        ) from None


def is_allowed(origin: str | None, origins: Collection[str]) -> bool:
    """Returns whether `origins` (`serve_config.cors_origins`) let pages of `origin` use the server."""
    return origin is not None and ("*" in origins or origin in origins)


def check_origin(headers: Headers, host: str, keys: ApiKeys, origins: Collection[str] = ()) -> None:
    """Refuses requests that a browser sends for a page of another site, unless its origin is one of `origins`. `host`
    is the address that is listened on.

    Without keys the Host header must be an address or the name that was configured, since a foreign page can make a
    name of its own stand for 127.0.0.1.
    """
    asked, origin = headers.get("host", ""), headers.get("origin")
    name = asked.rpartition(":")[0] if asked.rpartition(":")[2].isdigit() else asked
    if not keys.digests and name not in ("", host) and not is_loopback(name) and not _is_address(name):
        raise ApiError(403, f"the Host header {asked[:80]!r} is not this server: use {host}", code="wrong_host")
    if origin is not None and origin.partition("://")[2] != asked and not is_allowed(origin, origins):
        raise ApiError(
            403,
            f"pages of {origin[:80]!r} may not use this server: serve_config.cors_origins has those that may",
            code="cross_origin",
        )


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()
