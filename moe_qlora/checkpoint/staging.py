"""Folders that appear whole or not at all, whoever else writes to the same place.

What is written is prepared in a staging folder of a random name, beside its target or inside of one
that holds something already. One process at a time works on a target: it has locked a file whose
name follows from the target's, and which names the staging folder. A process that is killed leaves
both; the system frees the lock, and the next process removes the staging folder, or goes on in it.
No folder is removed or gone on with but one that a lock file names, of the same owner, and no link.

The lock is `flock`'s own: the library filelock leaves its files behind, and where a file system has
no locks, what it puts in their place outlives a killed process.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from ..errors import CheckpointError

WRITE_ERRORS = (OSError, SafetensorError)
"""What a write can raise: safetensors has errors of its own for those of the system."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_folder(destination: str | Path, *, job: str = "") -> Iterator[Path]:
    """Build a folder that appears whole or not at all; it must not exist, or be empty.

    The block writes into a staging folder, which is renamed at its end. Where it fails, the staging
    folder is removed; given a `job`, it stays, and the next call for the same job goes on in it.
    """
    destination = absolute(destination)
    with staging(destination, job=job) as work:
        check_new(destination)
        yield work
        rename_new(work, destination)


def rename_new(work: Path, destination: Path) -> None:
    """Rename a finished folder to its destination, which must be new or empty."""
    for file in (*work.rglob("*"), work):
        flush(file)
    check_new(destination)
    work.rename(destination)
    with suppress(OSError):  # it is there, whatever the system says of the folder around it
        flush(destination.parent)


@contextmanager
def staging(
    target: Path, *, inside: bool = False, job: str = "", wait: bool = False
) -> Iterator[Path]:
    """Give a folder to prepare a target in, beside or `inside` of it, to one process at a time.

    Others raise a `CheckpointError` meanwhile, or `wait`. For `job` see `new_folder`.
    """
    place, start = _place(target, inside)
    lock, work, to_go_on = place / f"{start}.lock", None, bool(job)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _locked(lock, target, wait) as handle:
            work = _left(handle, place, start, job)
            try:
                if work is None:
                    work = place / f"{start}.{secrets.token_hex(4)}.partial"
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps({"folder": work.name, "job": job}).encode(), 0)
                    work.mkdir()
                yield work
                job = ""
            finally:
                if work is not None and not job:
                    shutil.rmtree(work, ignore_errors=True)
                if work is None or not work.exists():
                    discard(lock)
    except WRITE_ERRORS as error:
        if isinstance(error, OSError) and error.filename and error.filename2 is None:
            read = Path(os.fsdecode(error.filename))
            if not (place.is_relative_to(read) or read.is_relative_to(place)):
                raise CheckpointError(f"{read} cannot be read: {error.strerror}.") from error
        kept = work if to_go_on and work is not None and work.exists() else None
        raise CheckpointError(not_written(target, error, kept=kept)) from error


def not_written(
    target: str | Path,
    error: OSError | SafetensorError,
    instead: str = "name another folder",
    kept: Path | None = None,
) -> str:
    """Return the sentence for a failed write: why, and what to do; `kept` is gone on in."""
    reason = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2]
    full = isinstance(error, SafetensorError) or error.errno in _NO_ROOM
    again = f"; {kept.name} stays, and the next run goes on in it" if kept else ""
    advice = f"make room there or {instead}, and run it again" if full else instead
    return f"{target} cannot be written: {reason}; {advice}{again}."


def _place(target: Path, inside: bool) -> tuple[Path, str]:
    """Return the folder that a target's lock file and staging folder are in, and how they begin."""
    return (target, ".moe_qlora") if inside else (target.parent, f".{target.name}.moe_qlora")


@contextmanager
def _locked(lock: Path, target: Path, wait: bool) -> Iterator[int]:
    """Open a lock file, which is made where it is missing, and hold its lock."""
    import fcntl

    while True:
        # neither a link is followed, nor a pipe waited for
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            _wait_for(handle, target, wait)
            try:
                there = os.path.samestat(os.fstat(handle), lock.lstat())
            except OSError:
                there = False  # who held it has removed it
            if there:
                yield handle
                return
        finally:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # processes that were forked have it open too
            os.close(handle)


def _wait_for(handle: int, target: Path, wait: bool) -> None:
    """Lock an open lock file; the system frees it when the process ends, however it ends."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise CheckpointError(
                f"Another process is writing to {target}: wait for it, or name another folder."
            ) from None
        _warn(
            f"Another process is saving to {target}, and this one waits for it. In a distributed "
            "run, pass is_main_process=False in all processes but one."
        )
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn(
            f"The file system of {target} has no locks ({error}): let one process at a time write "
            "there."
        )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


def _left(handle: int, place: Path, start: str, job: str) -> Path | None:
    """Return the staging folder of an interrupted run of a job; remove that of another run."""
    lock = os.fstat(handle)
    plain = stat.S_ISREG(lock.st_mode) and lock.st_nlink == 1
    raw, name, its_job = os.pread(handle, 4096, 0) if plain else b"?", "", ""
    if not raw:
        return None
    with suppress(ValueError, KeyError, TypeError):
        record = json.loads(raw)
        name, its_job = str(record["folder"]), record["job"]
    if not re.fullmatch(rf"{re.escape(start)}\.[0-9a-f]{{8}}\.partial", name):
        raise CheckpointError(f"{place / start}.lock is no lock file of moe_qlora: move it away.")
    try:
        folder = (place / name).lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(folder.st_mode) or {folder.st_uid, lock.st_uid} != {os.geteuid()}:
        return None
    if job and its_job == job:
        return place / name
    shutil.rmtree(place / name)
    return None


def left_behind(target: Path) -> list[Path]:
    """Return what processes that were killed have left beside and inside of a target."""
    leftovers: list[Path] = []
    for inside in (False, True):
        place, start = _place(target, inside)
        if not _in_use(place / f"{start}.lock"):
            names = re.compile(rf"{re.escape(start)}\.(lock|[0-9a-f]{{8}}\.partial)")
            leftovers += sorted(file for file in place.glob(".*") if names.fullmatch(file.name))
    return leftovers


def _in_use(lock: Path) -> bool:
    """Whether a process holds a lock file."""
    import fcntl

    with suppress(OSError):
        handle = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False


def absolute(path: str | Path) -> Path:
    """Return the path, absolute and without a trailing slash."""
    return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - links stay as they are


def check_new(destination: Path) -> None:
    """Check that a new folder can be renamed to its destination."""
    if destination.is_dir() and not destination.is_symlink():
        if any(destination.iterdir()):
            raise CheckpointError(
                f"{destination} exists and is not empty: name a new folder, nothing is overwritten."
            )
        if destination.is_mount():
            raise CheckpointError(
                f"{destination} is where a file system is mounted, and no folder can be renamed to "
                "it: name a folder in it."
            )
    elif destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists and is a link or no folder: name a new one.")


def replaceable(path: Path) -> bool:
    """Whether `replace_file` may write a path: over a file, or new in a folder; over no device."""
    return path.is_file() or (not path.exists() and path.absolute().parent.is_dir())


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file at once: its readers see the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # Ctrl-C too leaves nothing
        discard(temporary)
        raise
    with suppress(OSError):  # as in rename_new
        flush(path.parent)


def discard(*files: Path) -> None:
    """Remove files as far as the system lets."""
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file or folder to the disk."""
    if path.is_symlink():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
