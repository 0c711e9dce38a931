"""Records in files: whatever happens to the files, a record is found as it was written or not at all."""

import errno
import os
import random
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path

import pytest

from umbra.base.errors import UserError
from umbra.executor.engine.memory.page_store import HEAD, LEAST_SEGMENTS, PageStore, Record, WriteBehind

SIZE = 3000
LIMIT = 40 * LEAST_SEGMENTS * SIZE


def name_of(number: int) -> bytes:
    return b"%032d" % number


def data_of(name: bytes) -> bytes:
    return random.Random(name).randbytes(SIZE)


def opened(folder: Path, fingerprint: bytes = b"a", limit: int = LIMIT) -> PageStore:
    store = PageStore(folder, fingerprint, limit, lambda name: SIZE if len(name) == 32 else None)
    store.scan()
    return store


def records(numbers: Iterable[int], salt: bytes = b"", used: float = 1e9) -> list[Record]:
    return [Record(name_of(number), salt, data_of(name_of(number)), used) for number in numbers]


def readable(store: PageStore, numbers: Iterable[int]) -> list[int]:
    """The numbers of records that are there, each of which is as it was written."""
    buffer, names = memoryview(bytearray(SIZE)), {number: name_of(number) for number in numbers}
    whole = [number for number, name in names.items() if store.read(name, buffer) and buffer == data_of(name)]
    assert whole == [number for number, name in names.items() if name in store]
    return whole


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.pages"))


def test_records_survive_restarts_apart_by_salt_and_fingerprint(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(records(range(5)))
    store.write([*records(range(10)), *records(range(10, 20), b"user")])
    again = opened(tmp_path)
    assert readable(again, range(25)) == [*range(20)]
    again.write(records(range(20, 22)))
    assert readable(opened(tmp_path), range(25)) == [*range(22)]
    assert not readable(opened(tmp_path, b"another"), range(25))
    modes = {path.name: path.stat().st_mode & 0o77 for path in tmp_path.rglob("*")}
    assert not any(modes.values()), modes
    folders = {segment.path.parent for segment in again.segments.values()}
    assert len(folders) == 2
    user = again.index[name_of(10)][0].path
    user.unlink()  # somebody removes what is of a user, while the store is open
    assert readable(again, range(25)) == [n for n in range(22) if not 10 <= n < 20]
    again.write(records([10], b"user"))
    assert 10 in readable(again, range(25))


def test_the_limit_holds_and_what_was_used_longest_ago_goes_end_first(tmp_path: Path) -> None:
    other = opened(tmp_path, b"another model")
    other.write(records(range(100), used=0.5e9))
    store = opened(tmp_path)
    for start in range(0, 1000, 10):
        store.write(records(range(start, start + 10), b"%d" % (start // 500), used=1e9 + start // 500))
        store.use(map(name_of, range(30)), 1e9 + start)
        assert on_disk(tmp_path) == store.bytes <= LIMIT
    left = readable(store, range(1000))
    assert left == [*range(30), *left[30:]]
    assert not readable(opened(tmp_path, b"another model"), range(100))
    chain = records(range(2000, 2320), used=2e9)  # one prefix, as long as the limit allows
    store.write(chain)
    left = readable(store, range(2000, 2320))
    assert left == [*range(2000, 2000 + len(left))]
    assert len(left) > 200
    assert readable(opened(tmp_path), left) == left


def test_wrong_bytes_and_torn_tails_are_never_found(tmp_path: Path) -> None:
    chance, numbers = random.Random(1), range(30)
    for turn in range(150):
        store = opened(tmp_path)
        store.write(records(numbers, used=1e9 + turn))
        assert len(readable(store, numbers)) > 20
        path = chance.choice([*tmp_path.rglob("*.pages")])
        whole = bytearray(path.read_bytes())
        at = chance.randrange(len(whole))
        for index in range(at, min(at + chance.choice((1, 1, 8, 5000)), len(whole))):
            whole[index] ^= chance.randrange(1, 256)
        path.write_bytes(whole if turn % 2 else whole[:at])
        left = readable(store, numbers)
        assert set(left) >= set(readable(opened(tmp_path), numbers))
        if path.exists():
            assert (path.stat().st_size % (HEAD + SIZE)) == 0  # cut behind the last whole record


@contextmanager
def small_files(most: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_system_refuses_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    behind = WriteBehind(opened(tmp_path / "pages"), 1 << 20)
    with small_files(10 * SIZE):
        for record in records(range(20)):
            behind.add(record)
        behind.flush(60)
    assert os.strerror(errno.EFBIG) in capfd.readouterr().out
    assert behind.room == 0
    left = readable(behind.store, range(20))
    assert left == [*range(len(left))]
    assert readable(opened(tmp_path / "pages"), range(20)) == left
    behind.add(records([30])[0])
    behind.flush(60)
    assert (readable(behind.store, [30]), capfd.readouterr().out) == ([], "")
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for folder, words in (("file", "File exists"), ("file/below", "Not a directory"), ("open", "others can write it")):
        with pytest.raises(UserError, match=words):
            opened(tmp_path / folder)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with get_context("spawn").Pool(1) as pool:
        assert "another process" in pool.apply(refused, (tmp_path,))
        store.close()
        assert not pool.apply(refused, (tmp_path,))


def refused(folder: Path) -> str:
    try:
        opened(folder).close()
    except UserError as error:
        return str(error)
    return ""


def test_names_are_bound(tmp_path: Path) -> None:
    """A record whose name or size is not this store's ends its segment."""
    store = opened(tmp_path)
    store.write(records(range(4)))
    (path,) = tmp_path.rglob("*.pages")
    foreign = PageStore(tmp_path / "other", b"a", LIMIT, lambda name: 8)
    foreign.write([Record(blake2b(b"", digest_size=32).digest(), b"", b"x" * 8, 0.0)])
    (other,) = (tmp_path / "other").rglob("*.pages")
    path.write_bytes(path.read_bytes() + other.read_bytes())
    again = opened(tmp_path)
    assert readable(again, range(4)) == [*range(4)]
    assert len(again.index) == 4
