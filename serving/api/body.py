"""A request's body: bounded in size, time and depth."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from umbra.serving.api.errors import ApiError
from umbra.serving.api.fields import check_depth
from umbra.serving.api.sse import ClientGone

LARGEST_BODY = 8 << 20  # bytes
BODY_S = 30.0  # seconds that a body may take to come


async def read_body(request: Request, largest: int = LARGEST_BODY) -> bytes:
    """Raises ApiError if the body has more than `largest` bytes or is too slow."""
    body = bytearray()
    try:
        if int(request.headers.get("content-length", 0)) > largest:
            raise _too_large(largest)
        await asyncio.wait_for(_read(request, body, largest), BODY_S)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:g} s") from None
    return bytes(body)


def decoded(body: bytes) -> Any:
    """The JSON of `body`. Raises ApiError if it is none, or nested too deeply."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request's body is no JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the request's body is nested too deeply") from None
    check_depth(data)
    return data


async def _read(request: Request, body: bytearray, largest: int) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > largest:
            raise _too_large(largest)
        if not message.get("more_body"):
            return


def _too_large(largest: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {largest >> 20} MB")
