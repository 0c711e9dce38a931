"""Keeps pages of the KV cache, and recurrent states, in files: records with names, of which every one is whole or not
there. It knows no model, no tokens and no device.

    FOLDER/lock                                held by the one process that uses the folder
    FOLDER/FINGERPRINT/SALT/00000001.pages     a segment: records of one salt, one after the other

A record is a header and data; the header has a checksum of the data and one of its own. Records are only appended, and
found only once they are on the disk. At the next start the headers are read again, and a segment is cut where one is
missing, wrong or promises more data than there are. Data are checked whenever they are read: what differs in a bit, in
its name or in its size counts as absent. CRC-32 finds what goes wrong by itself; whoever could forge records could as
well write the folder, which must belong to this user and to nobody else.

Before a record is written, segments are removed until it fits into the limit: those that were used longest ago first,
where each use counts half after `HALF_LIFE_S`. A use of a page is one of all pages before it, and those are in older
segments or the same one; so of segments that were used alike the newest one goes, and a prefix loses its end first.
Segments of other fingerprints, those of another model or an older version, count and go as well.
"""

import contextlib
import fcntl
import functools
import hashlib
import math
import os
import queue
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from umbra.base.errors import UserError
from umbra.base.files import sync

MAGIC = b"UMBRAKV1"  # changes with the layout of records
HEADER = struct.Struct("<8s16sQIB39s")  # magic, fingerprint, bytes of data, their CRC-32, length of the name, the name
DIGEST_BYTES = 16  # of the header, which follow it
HEAD = HEADER.size + DIGEST_BYTES
LONGEST_NAME = 39
SEGMENT_BYTES = 64 << 20  # a segment that has as many gets no further record
LEAST_SEGMENTS = 8  # that a store has room for
MOST_RECORDS = 1 << 20  # each takes about 300 bytes of memory
HALF_LIFE_S = 6 * 3600.0
SUFFIX = ".pages"


@dataclass(eq=False)
class Segment:
    path: Path
    number: int
    size: int
    # The time of its last use, and HALF_LIFE_S more for each doubling of its uses, of which old ones count less. It is
    # the file's time as well.
    used: float
    sealed: bool = False  # whether it gets no further record
    names: list[bytes] = field(default_factory=list)

    def use(self, now: float) -> None:
        last, first = max(self.used, now), min(self.used, now)
        self.used = last + HALF_LIFE_S * math.log2(1 + 2 ** ((first - last) / HALF_LIFE_S))


@dataclass(frozen=True)
class Record:
    name: bytes
    salt: bytes  # records with different ones are in different folders
    data: bytes | bytearray | memoryview
    used: float  # when what it belongs to was used


class PageStore:
    """One thread writes; another one may look for records and read them meanwhile."""

    def __init__(self, folder: Path, fingerprint: bytes, limit: int, sizes: Callable[[bytes], int | None]):
        """`sizes` returns the bytes of data that a record of this name has; None: there is no such name. Raises
        UserError if the folder cannot be used."""
        self.folder, self.limit, self.sizes = folder, limit, sizes
        self.fingerprint = hashlib.blake2b(fingerprint, digest_size=16).digest()
        self.home = folder / self.fingerprint.hex()
        self.index: dict[bytes, tuple[Segment, int]] = {}  # by name: where the record begins
        self.segments: dict[Path, Segment] = {}
        self.bytes = 0  # of all segments
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UserError(f"{folder}: others can write it: use a folder that only this user can write")
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror}") from None
        try:
            # The lock of a process, which its children do not inherit.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UserError(f"{folder}: another process uses it: give each server a folder of its own") from None

    def scan(self) -> None:
        """Finds what earlier processes have left."""
        for path in sorted(self.folder.glob(f"*/*/*{SUFFIX}")):
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode) or not (path.stem.isdecimal() and len(path.stem) == 8):
                    continue
                used = min(status.st_mtime, time.time() + 16 * HALF_LIFE_S)
                segment = Segment(path, int(path.stem), status.st_size, used, sealed=path.parent.parent != self.home)
                if not segment.sealed:
                    self._scan(segment)
                if segment.size:
                    self.segments[path] = segment
                    self.bytes += segment.size
                else:
                    path.unlink()
            except OSError as error:
                print(f"prefixes on disk: {path} is left alone: {error.strerror}")

    def _scan(self, segment: Segment) -> None:
        """Indexes the records of a segment, and cuts what follows the last whole one."""
        end, records = 0, list[tuple[bytes, int]]()
        with _opened(segment.path, os.O_RDWR) as file:
            while len(head := os.pread(file, HEAD, end)) == HEAD and (read := self._read_header(head)):
                name, size, _ = read
                if end + HEAD + size > segment.size:
                    break
                records.append((name, end))
                end += HEAD + size
            if end < segment.size:
                os.ftruncate(file, end)
                os.utime(file, (segment.used, segment.used))
                segment.size = end
        for name, start in records:
            self.index[name] = segment, start
        segment.names = [name for name, _ in records]

    def _header(self, name: bytes, size: int, crc: int) -> bytes:
        head = HEADER.pack(MAGIC, self.fingerprint, size, crc, len(name), name)
        return head + hashlib.blake2b(head, digest_size=DIGEST_BYTES).digest()

    def _read_header(self, head: bytes) -> tuple[bytes, int, int] | None:
        """(name, bytes of data, their CRC-32); None if it is no header of this store's."""
        _, _, size, crc, length, padded = HEADER.unpack(head[: HEADER.size])
        name = padded[:length]
        return (name, size, crc) if size == self.sizes(name) and head == self._header(name, size, crc) else None

    def __contains__(self, name: bytes) -> bool:
        return name in self.index

    def read(self, name: bytes, into: memoryview) -> bool:
        """Fills `into`, of the record's size, and returns True; or returns False if there is no such record that is
        whole. `into` then has any contents."""
        if not (location := self.index.get(name)):
            return False
        (segment, start), head = location, bytearray(HEAD)
        try:
            with _opened(segment.path, os.O_RDONLY) as file:
                whole = os.preadv(file, [head, into], start) == HEAD + len(into)
        except OSError:
            whole = False
        if whole and bytes(head) == self._header(name, len(into), zlib.crc32(into)):
            return True
        self.index.pop(name, None)
        return False

    def use(self, names: Iterable[bytes], now: float) -> None:
        """Counts one use of the records with these names, of those that there are."""
        for segment in {location[0] for name in names if (location := self.index.get(name))}:
            segment.use(now)
            with contextlib.suppress(OSError):
                os.utime(segment.path, (segment.used, segment.used))

    def write(self, records: Iterable[Record]) -> None:
        """Appends those records that are not there yet. Raises OSError if the system refuses it."""
        written: dict[Segment, list[tuple[bytes, int]]] = {}
        try:
            for record in records:
                if record.name not in self.index and (segment := self._segment(record)):
                    written.setdefault(segment, []).append((record.name, self._append(segment, record)))
        finally:
            for segment, locations in written.items():
                if segment.path in self.segments:  # else it had to give way to later ones
                    sync(segment.path)
                    os.utime(segment.path, (segment.used, segment.used))
                    for name, start in locations:
                        self.index[name] = segment, start
                        segment.names.append(name)

    def _segment(self, record: Record) -> Segment | None:
        """The segment that gets the record, which fits into the limit; None: it gets no place."""
        size = HEAD + len(record.data)
        if size > self.limit // LEAST_SEGMENTS:
            return None
        while self.bytes + size > self.limit or len(self.index) >= MOST_RECORDS:
            oldest = min(self.segments.values(), key=lambda segment: (segment.used, -segment.number))
            if oldest.used == record.used:
                return None  # it would take the place of what it belongs to
            self._remove(oldest)
        home = self.home / hashlib.blake2b(record.salt, digest_size=16).hexdigest()
        most = min(SEGMENT_BYTES, self.limit // LEAST_SEGMENTS)
        for segment in [segment for segment in self.segments.values() if segment.path.parent == home]:
            if not segment.path.exists():  # somebody has removed it
                self._remove(segment)
            elif not segment.sealed and segment.size + size <= most:
                segment.used = max(segment.used, record.used)
                return segment
        for folder in (self.home, home):
            folder.mkdir(mode=0o700, exist_ok=True)
        number = 1 + max((segment.number for segment in self.segments.values()), default=0)
        segment = Segment(home / f"{number:08}{SUFFIX}", number, 0, record.used)
        with _opened(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
            for folder in (home, self.home, self.folder):
                sync(folder)
        self.segments[segment.path] = segment
        return segment

    def _append(self, segment: Segment, record: Record) -> int:
        """-> where the record begins"""
        start = at = segment.size
        with _opened(segment.path, os.O_WRONLY) as file:
            try:
                for part in (self._header(record.name, len(record.data), zlib.crc32(record.data)), record.data):
                    left = memoryview(part)
                    while left:
                        count = os.pwrite(file, left, at)
                        left, at = left[count:], at + count
            except OSError:
                segment.sealed = True
                os.ftruncate(file, start)
                raise
        segment.size = at
        self.bytes += at - start
        return start

    def _remove(self, segment: Segment) -> None:
        for name in segment.names:
            if (location := self.index.get(name)) and location[0] is segment:
                del self.index[name]
        del self.segments[segment.path]
        self.bytes -= segment.size
        with contextlib.suppress(FileNotFoundError):
            segment.path.unlink()
        for folder in segment.path.parents[:2]:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()

    def close(self) -> None:
        os.close(self._lock)


class WriteBehind:
    """A thread that writes records to a store. Of the first error that the system returns it prints a line, and writes
    no more."""

    def __init__(self, store: PageStore, most_bytes: int):
        """At most `most_bytes` of data wait to be written."""
        self.store, self.most_bytes = store, most_bytes
        self.waiting = 0  # bytes
        self.broken = self.scanned = False
        self._queue: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._names: set[bytes] = set()  # of records that wait
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefixes on disk", daemon=True)
        self._thread.start()

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    @property
    def room(self) -> int:
        """Bytes of data that may be added."""
        return 0 if self.broken else self.most_bytes - self.waiting

    def add(self, record: Record) -> None:
        self._names.add(record.name)
        with self._idle:
            self.waiting += len(record.data)
        self._queue.put(record)

    def flush(self, seconds: float) -> None:
        """Waits until earlier records are found and all others written, at most so long."""
        with self._idle:
            self._idle.wait_for(lambda: self.scanned and not self.waiting, seconds)

    def _try(self, work: Callable[[], None]) -> None:
        if self.broken:
            return
        try:
            work()
        except OSError as error:
            self.broken = True
            print(f"prefixes on disk: {self.store.folder}: {error.strerror}: no more are kept")

    def _run(self) -> None:
        self._try(self.store.scan)
        with self._idle:
            self.scanned = True
            self._idle.notify_all()
        while True:
            records = [self._queue.get()]
            while sum(len(record.data) for record in records) < self.most_bytes // 4 and not self._queue.empty():
                records.append(self._queue.get())
            self._try(functools.partial(self.store.write, records))
            for record in records:
                self._names.discard(record.name)
            with self._idle:
                self.waiting -= sum(len(record.data) for record in records)
                self._idle.notify_all()


@contextlib.contextmanager
def _opened(path: Path, how: int) -> Iterator[int]:
    descriptor = os.open(path, how | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
