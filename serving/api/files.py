"""POST /v1/files and what belongs to it: files of requests and answers, which are kept in memory for batches."""

import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from umbra.serving.api.errors import ApiError, invalid

LARGEST_FILE = 64 << 20  # bytes
MOST_BYTES, MOST_FILES = 256 << 20, 1024  # of all files
PURPOSES = ("batch",)
BOUNDARY = re.compile(r'multipart/form-data;.*boundary="?([^";,]{1,70})"?', re.IGNORECASE)
NAMED = re.compile(rb'(?<!file)name="([^"\r\n]*)"', re.IGNORECASE)
FILE_NAMED = re.compile(rb'filename="([^"\r\n]*)"', re.IGNORECASE)


@dataclass(frozen=True)
class StoredFile:
    """One file. `owner` is the salt of the API key that may read it."""

    data: bytes
    name: str
    purpose: str
    owner: bytes
    id: str = field(default_factory=lambda: f"file-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self) -> dict[str, Any]:
        head = {"id": self.id, "object": "file", "bytes": len(self.data), "created_at": self.created}
        return {**head, "filename": self.name, "purpose": self.purpose, "status": "processed", "expires_at": None}


class Files:
    """The files of a server, until it ends."""

    def __init__(self) -> None:
        self._files: dict[str, StoredFile] = {}

    def add(self, file: StoredFile) -> StoredFile:
        """Raises ApiError if there is no room."""
        held = sum(len(other.data) for other in self._files.values())
        if len(self._files) >= MOST_FILES or held + len(file.data) > MOST_BYTES:
            raise ApiError(400, f"files may have {MOST_BYTES >> 20} MB in all: delete some", "file", "files_full")
        self._files[file.id] = file
        return file

    def of(self, owner: bytes) -> list[StoredFile]:
        return [file for file in self._files.values() if file.owner == owner]

    def get(self, id: str, owner: bytes, param: str = "file_id") -> StoredFile:
        """Raises ApiError if this owner has no such file."""
        file = self._files.get(id)
        if not file or file.owner != owner:
            raise ApiError(404, f"{param}: there is no file {id:.60}", param, "not_found")
        return file

    def delete(self, id: str, owner: bytes) -> dict[str, Any]:
        del self._files[self.get(id, owner).id]
        return {"id": id, "object": "file", "deleted": True}


def uploaded(content_type: str, body: bytes, owner: bytes) -> StoredFile:
    """The file in the multipart form `body`. Raises ApiError if there is none."""
    match = BOUNDARY.match(content_type)
    if not match:
        raise ApiError(400, "a file is sent as multipart/form-data, with the fields file and purpose", "file")
    fields: dict[str, tuple[str, bytes]] = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + match[1].encode())[1:]:
        head, _, data = part.partition(b"\r\n\r\n")
        if named := NAMED.search(head):
            file = FILE_NAMED.search(head)
            fields[named[1].decode(errors="replace")] = file[1].decode(errors="replace") if file else "", data
    if "file" not in fields:
        raise invalid("file", "is missing")
    purpose = fields.get("purpose", ("", b""))[1].decode(errors="replace")
    if purpose not in PURPOSES:
        raise invalid("purpose", f"{purpose!r:.40} is not {' or '.join(PURPOSES)}")
    name, data = fields["file"]
    return StoredFile(data, name[:200], purpose, owner)
