"""Answers kept on disk: a table of keys and values, of bounded size, the oldest used going first.

Used by `caching.py`. It is one SQLite file, as Python's own library has it, in WAL mode: any number
of threads and processes may have it open at once.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stemma.lang.errors import InvalidArgument, StemmaError

# Written into the file, so that another program's is not taken for ours.
APPLICATION = 0x5374656D  # "Stem"
FORMAT = 1

# How long to wait for another process that writes.
BUSY_S = 30.0

_SCHEMA = f"""
begin immediate;
create table answers (key blob primary key, value text not null, size int not null, used int);
create index answers_used on answers (used);
create table total (bytes int not null);
insert into total values (0);
create trigger added after insert on answers begin
    update total set bytes = bytes + new.size; end;
create trigger removed after delete on answers begin
    update total set bytes = bytes - old.size; end;
pragma application_id = {APPLICATION};
pragma user_version = {FORMAT};
commit;
"""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a `ResponseCache` has done since it was opened, and what its file holds.

    hits, misses: requests. unwritten: answers that could not be written. entries, bytes: of the
    file, whoever wrote them.
    """

    hits: int
    misses: int
    unwritten: int
    entries: int
    bytes: int


class ResponseCache:
    """Answers of models, kept in a file.

    path: made where it is missing. max_bytes: of keys and values together; beyond that the answers
    go that were not used for longest.

    Writing is done by a thread of its own, so that no engine waits for a disk; what could not be
    written is counted and warned of once, and is asked for again the next time. `close()`, and the
    end of the process, wait until all is written.

    Raises InvalidArgument for a file of another kind, one that is damaged or cannot be opened.

    >>> backend = st.CachedBackend(st.LocalBackend(), "answers.db")  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = 1 << 30) -> None:
        if type(max_bytes) is not int or max_bytes < 1:
            raise InvalidArgument(f"max_bytes={max_bytes!r}: must be an integer of at least 1")
        if not isinstance(path, str | os.PathLike):
            raise InvalidArgument(f"the path of a cache of answers must be a path, not {path!r}")
        self.path = Path(path)
        self.max_bytes = max_bytes
        self._process = os.getpid()
        self._hits = self._misses = self._unwritten = 0
        # What is still to be written: answers, and keys that were used. Under the lock only.
        self._lock = threading.Lock()
        self._new: dict[bytes, str] = {}
        self._used: dict[bytes, None] = {}
        self._at_work = self._closed = False
        self._file = threading.Lock()  # held while the connection is used
        self._connection = self._open()
        weakref.finalize(self, self._connection.close)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="stemma-cache")

    def _open(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._refused("cannot be opened", error) from error
        try:
            if not self._is_ours(connection):
                self._make(connection)
            connection.execute("pragma synchronous = normal")
            return connection
        except sqlite3.Error as error:
            connection.close()
            raise self._refused("is damaged, or no cache of answers", error) from error
        except BaseException:
            connection.close()
            raise

    def _is_ours(self, connection: sqlite3.Connection) -> bool:
        """False for a new file. Raises InvalidArgument for another program's."""
        (application,) = connection.execute("pragma application_id").fetchone()
        (version,) = connection.execute("pragma user_version").fetchone()
        (tables,) = connection.execute("select count(*) from sqlite_master").fetchone()
        if application == APPLICATION and version == FORMAT:
            return True
        if application == APPLICATION:
            raise self._refused(f"has format {version}, and this Stemma reads {FORMAT}")
        if tables or application:
            raise self._refused("is a database of another program")
        return False

    def _make(self, connection: sqlite3.Connection) -> None:
        connection.execute("pragma journal_mode = wal")  # stays with the file
        try:
            connection.executescript(_SCHEMA)
        except sqlite3.OperationalError:  # another process was there first
            if connection.in_transaction:
                connection.execute("rollback")
            if not self._is_ours(connection):
                raise

    def _refused(self, what: str, error: Exception | None = None) -> InvalidArgument:
        because = f" ({error})" if error is not None else ""
        return InvalidArgument(
            f"the cache of answers {str(self.path)!r} {what}{because}: name another file, or "
            "remove it, to begin a new one"
        )

    # Looking up and keeping

    def get(self, key: bytes) -> str | None:
        """The value of a key. Raises StemmaError for a file that has been damaged."""
        self._check_open()
        with self._lock:
            value = self._new.get(key)
        if value is None:
            try:
                with self._file:
                    found = self._connection.execute(
                        "select value from answers where key = ?", (key,)
                    ).fetchone()
            except sqlite3.Error as error:
                raise self._broken("read", error) from error
            value = found[0] if found is not None else None
        return value

    def note_hit(self, key: bytes) -> None:
        """An answer was of use."""
        with self._lock:
            self._hits += 1
            self._used[key] = None
            self._begin_to_write()

    def note_miss(self) -> None:
        """There was no answer that was of use."""
        with self._lock:
            self._misses += 1

    def put(self, key: bytes, value: str) -> None:
        """Keep a value; it can be looked up at once, and is written soon."""
        self._check_open()
        with self._lock:
            self._new[key] = value
            self._begin_to_write()

    def clear(self) -> None:
        """Forget all answers."""
        self.flush()
        try:
            with self._file:
                self._connection.execute("delete from answers")
                self._connection.execute("vacuum")
        except sqlite3.Error as error:
            raise self._broken("cleared", error) from error

    def stats(self) -> CacheStats:
        self.flush()
        try:
            with self._file:
                (entries,) = self._connection.execute("select count(*) from answers").fetchone()
                (size,) = self._connection.execute("select bytes from total").fetchone()
        except sqlite3.Error as error:
            raise self._broken("read", error) from error
        return CacheStats(self._hits, self._misses, self._unwritten, entries, size)

    def close(self) -> None:
        """Write what is not written yet and close the file. May be called twice."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        self._writer.shutdown(wait=True)
        with self._file:
            self._connection.close()

    def __enter__(self) -> ResponseCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def flush(self) -> None:
        """Wait until all is written that was put so far."""
        self._check_open()
        self._writer.submit(self._write).result()

    def _begin_to_write(self) -> None:
        if not self._at_work:
            self._at_work = True
            self._writer.submit(self._write)

    def _write(self) -> None:
        """On the writer's thread: all that waits, in one transaction."""
        with self._lock:
            new, used = dict(self._new), list(self._used)
            self._used.clear()
            self._at_work = False
        if not new and not used:
            return
        try:
            with self._file:
                self._write_down(self._connection, new, used)
        except sqlite3.Error as error:
            with self._lock:
                first = not self._unwritten
                self._unwritten += len(new)
            if first:
                warnings.warn(
                    f"answers cannot be written to {str(self.path)!r}: {error}; they will be asked "
                    "for again",
                    RuntimeWarning,
                    stacklevel=1,
                )
        with self._lock:
            for key, value in new.items():
                if self._new.get(key) is value:
                    del self._new[key]

    def _write_down(
        self, connection: sqlite3.Connection, new: dict[bytes, str], used: list[bytes]
    ) -> None:
        now = time.time_ns()
        rows = [(key, value, len(key) + len(value.encode()), now) for key, value in new.items()]
        connection.execute("begin immediate")
        try:
            connection.executemany(
                "update answers set used = ? where key = ?", [(now, key) for key in used]
            )
            for row in rows:
                if row[2] <= self.max_bytes:  # another would have all the rest go, and then itself
                    connection.execute("delete from answers where key = ?", row[:1])
                    connection.execute("insert into answers values (?, ?, ?, ?)", row)
            self._make_room(connection)
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise

    def _make_room(self, connection: sqlite3.Connection) -> None:
        (size,) = connection.execute("select bytes from total").fetchone()
        if size <= self.max_bytes:
            return
        gone = []
        for key, each in connection.execute("select key, size from answers order by used, rowid"):
            gone.append((key,))
            size -= each
            if size <= self.max_bytes:
                break
        connection.executemany("delete from answers where key = ?", gone)

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise StemmaError(
                f"the cache of answers {str(self.path)!r} was opened before this process was "
                "forked: open it in this one, too"
            )
        if self._closed:
            raise StemmaError(f"the cache of answers {str(self.path)!r} was closed")

    def _broken(self, what: str, error: Exception) -> StemmaError:
        return StemmaError(
            f"the cache of answers {str(self.path)!r} cannot be {what}: {error}; remove the file "
            "to begin a new one"
        )
