"""Users' files: read only where they are regular files of bounded size, written whole or not at all.

Every failure is an OSError whose `strerror` says in words what is wrong, or a ValueError for what stands in a file; the
caller adds the file's name and what to do.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from batchsim.base.errors import BatchsimError, ScenarioError, shown

TEXT_BYTES = 1 << 26
"""Size limit of a file that people write or a command prints: scenarios, recordings, profiles, manifests."""
TABLE_BYTES = 1 << 32
"""Size limit of a table of results, and of a file that carries tables."""
TRACE_BYTES = 1 << 38
"""Size limit of a trace, which is read row by row."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 1 << 12
_ESCAPED = "backslashreplace"
_STREAMS = ("/dev/fd/", "/dev/stdout", "/dev/stderr", "/proc/")  # files of processes, which a new one must not replace
# The path of each file by its device and number, which another file gets once that one is gone.
_read: ContextVar[dict[tuple[int, int], str] | None] = ContextVar("_read", default=None)
_NAME_BYTES = 100  # of an unfinished file's name, which must not be longer than a name may be


def reason_text(error: Exception) -> str:
    """What went wrong in reading or writing a file, in a few words: an OSError's `strerror`, else the error's text."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# ---- reading


def check_regular(path: Path | str, limit: int | None = None) -> None:
    """OSError unless `path` is a regular file of at most `limit` bytes."""
    _check(os.stat(path), path, limit)


def open_file(path: Path | str, limit: int = TRACE_BYTES) -> BinaryIO:
    """A regular file of at most `limit` bytes, open for reading. OSError for anything else, without waiting for it."""
    check_regular(path, limit)  # before: to open some devices is to act on them
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(number)
        _check(status, path, limit)
        if (read := _read.get()) is not None:
            read[status.st_dev, status.st_ino] = os.path.abspath(path)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_bytes(path: Path | str, limit: int = TEXT_BYTES) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. OSError for anything else."""
    with open_file(path, limit) as file:
        data = file.read(limit + 1) or b""
    if len(data) > limit:  # it grows, or its size is not known before it is read, as of those in /proc
        raise _too_large(len(data), path, limit)
    return data


def read_text(path: Path | str, limit: int = TEXT_BYTES) -> str:
    """The text of a regular file. OSError as `read_bytes`; ValueError if it is not UTF-8."""
    try:
        return read_bytes(path, limit).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1:,} is not UTF-8 text") from None


def read_json(path: Path | str, limit: int = TEXT_BYTES) -> Any:
    """The JSON value in a regular file. OSError as `read_bytes`; ValueError, in a few words, if it is no JSON."""
    return parse_json(read_text(path, limit))


def parse_json(text: str, **options: Any) -> Any:
    """The JSON value in `text`; `options` are those of `json.loads`. ValueError, in a few words, if it is no JSON.

    An object with one key twice is refused: the second value would replace the first without a word.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys, **options)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON that is to be read: nested too deeply") from None
    except ValueError as error:  # of Python's limit on the digits of a whole number
        why = str(error).partition(";")[0]
        raise ValueError(f"not JSON that is to be read: {why}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its keys and values, as `object_pairs_hook`. ValueError where one key is given twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in mapping if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is given twice")
    return mapping


def file_hash(path: Path | str) -> str:
    """The SHA-256 of a regular file. OSError as `open_file`."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _check(status: os.stat_result, path: Path | str, limit: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", str(path))
    if limit is not None and status.st_size > limit:
        raise _too_large(status.st_size, path, limit)


def _too_large(size: int, path: Path | str, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"has {size:,} bytes, at most {limit:,} are read", str(path))


# ---- writing


@dataclass(frozen=True)
class Kind:
    """A kind of files that a command writes where its user says: their name, and the pattern of how all of them begin,
    by which a command knows what it made before. What stands in folders of batchsim's own, beside a manifest, has no
    Kind: its names are no others'."""

    name: str
    begins: bytes


ANY = Kind("file", b"")
"""Of a file that is to be replaced whatever it is, by --force."""


def json_kind(format_: str) -> Kind:
    """JSON files whose first key says that they are of this format."""
    return Kind(f"{format_} file", rb'\{\s*"format": "%s"' % format_.encode())


class OccupiedError(FileExistsError):
    """At a path that is to be written stands a file that nothing here made, or that is being read."""


@contextmanager
def keeping_what_is_read() -> Iterator[None]:
    """A context in which no file of a Kind is written over one that was read in it."""
    token = _read.set({})
    try:
        yield
    finally:
        _read.reset(token)


def check_replaceable(path: Path | str, kind: Kind | None) -> None:
    """OccupiedError if there is a file at `path` that is not of `kind`, or is an input of this command."""
    if kind is None or _is_stream(path) or not os.path.isfile(path):
        return
    status = os.stat(path)
    source = (_read.get() or {}).get((status.st_dev, status.st_ino))
    if source is not None and os.path.exists(source) and os.path.samefile(source, path):
        raise OccupiedError(errno.EEXIST, "is read by this very command, and would be lost", str(path))
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        why = f"is there and cannot be read ({error.strerror}), so whether it is a {kind.name} cannot be told"
        raise OccupiedError(errno.EEXIST, why, str(path)) from None
    if head[:2] == b"\x1f\x8b":
        with suppress(OSError, EOFError, zlib.error), gzip.open(path) as file:
            head = file.read(_HEAD_BYTES)
    if head and not re.match(kind.begins, head, re.DOTALL):
        raise OccupiedError(errno.EEXIST, f"is there, and no {kind.name}", str(path))


@contextmanager
def writing(
    path: Path | str, advice: str = "Give another path.", error: type[BatchsimError] = ScenarioError
) -> Iterator[None]:
    """A context that raises an OSError of its block as `error`: `path` cannot be written, why, and `advice`."""
    try:
        yield
    except OccupiedError as cause:
        raise error(f"{cause.filename}: {cause.strerror}. {advice}") from None
    except OSError as cause:
        raise error(f"{path}: cannot be written: {reason_text(cause)}. {advice}") from None


@contextmanager
def replacing(path: Path | str, kind: Kind | None = None) -> Iterator[BinaryIO]:
    """A context with a file to write, which replaces `path` where the block ends well; else `path` stays as it was.

    Devices and pipes are written as they are. OSError where `path` cannot be written, or is no file of `kind`.
    """
    check_replaceable(path, kind)
    if _is_stream(path):
        with open(path, "wb") as file:
            yield file
        return
    target, unfinished = _unfinished(path)
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


@contextmanager
def replacing_text(path: Path | str, kind: Kind | None = None, *, packed: bool = False) -> Iterator[TextIO]:
    """A file of UTF-8 text to write as `replacing` does, gzipped if it is to be `packed`."""
    with replacing(path, kind) as raw:
        inner: Any = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if packed else raw
        text = io.TextIOWrapper(inner, encoding="utf-8", errors=_ESCAPED)
        yield text
        text.detach()  # writes what is left, and leaves the file open
        if packed:
            inner.close()


def write_bytes(path: Path | str, data: bytes, kind: Kind | None = None) -> None:
    """Writes a file whole or not at all, whatever happens to the process, the disk or the power."""
    with replacing(path, kind) as file:
        file.write(data)


def write_text(path: Path | str, text: str, kind: Kind | None = None) -> None:
    """Writes a file of UTF-8 text, whole or not at all; the bytes of a file's name that are none become escapes."""
    write_bytes(path, text.encode(errors=_ESCAPED), kind)


def check_writable(path: Path | str, kind: Kind | None) -> None:
    """OSError unless a file of `kind` can be written at `path`, whose folder must be there. Leaves all as it was."""
    check_replaceable(path, kind)
    if _is_stream(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    _probe(_unfinished(path)[1])


def check_folder(folder: Path | str) -> None:
    """OSError unless files can be written in `folder`, or it can be made. Leaves everything as it was."""
    there = Path(os.path.abspath(folder))
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    _probe(there / f".batchsim-{os.getpid()}")


def _probe(file: Path) -> None:
    try:
        file.touch(exist_ok=True)
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _unfinished(path: Path | str) -> tuple[Path, Path]:
    """`path` with its links resolved, and the path of the temporary file beside it. OSError for a folder."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    name = os.fsdecode(os.fsencode(target.name)[:_NAME_BYTES])
    return target, target.with_name(f".{name}-{os.getpid()}")


def _is_stream(path: Path | str) -> bool:
    """Whether `path` is written in place, not replaced: a device, a pipe, the shell's /dev/stdout."""
    if os.path.isdir(path):
        return False
    return os.path.abspath(path).startswith(_STREAMS) or (os.path.exists(path) and not os.path.isfile(path))
