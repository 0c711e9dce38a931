"""Errors of the API: every one is answered with a status and `{"error": {"message", "type", "param", "code"}}`."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from umbra.base.errors import one_line

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}
KIND = re.compile("Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`")
EXPECTED = re.compile(r"(?P<what>.*) - at `(?:key in )?\$\.?(?P<where>.*)`")


class ApiError(Exception):
    """The error of a request that is wrong, or that cannot be answered now. `param` is the field that is at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, retry_s: int = 0):
        super().__init__(one_line(message))
        self.status, self.param, self.code, self.retry_s = status, param, code, retry_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_s)} if self.retry_s else {}

    def envelope(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return msgspec.json.encode(self.envelope())


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A field with a wrong value."""
    return ApiError(400, f"{param}: {message}", param, code)


def unavailable(message: str, code: str, retry_s: int = 1) -> ApiError:
    """Nothing is wrong with the request, but it cannot be answered now."""
    return ApiError(503, message, None, code, retry_s)


def of_validation(error: msgspec.ValidationError) -> ApiError:
    """A field of the wrong type, named by its path."""
    text = KIND.sub(lambda match: f"must be {_kinds(match['wanted'])}, not {_kinds(match['got'])}", str(error))
    match = EXPECTED.fullmatch(text)
    if not match or not match["where"]:
        return ApiError(400, f"the request's body: {text}")
    return invalid(match["where"], match["what"].replace("`", ""))


def _kinds(names: str) -> str:
    """msgspec's names of types, `float | null`, in words."""
    return " or ".join(KINDS.get(name, name) for name in names.split(" | "))


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """`error` for a request that was translated: `names` has the request's own names of fields by the names that they
    have in the translation, where they differ. The names of parts of a field follow."""
    param = error.param or ""
    of = max((name for name in names if re.match(re.escape(name) + r"(?![\w])", param)), key=len, default=None)
    if of is None:
        return error
    own = names[of] + param[len(of) :]
    text = str(error)
    text = own + text[len(param) :] if text.startswith(f"{param}:") else text
    return ApiError(error.status, text, own, error.code, error.retry_s)
