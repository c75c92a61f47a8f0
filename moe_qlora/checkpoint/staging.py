"""Folders that appear whole or not at all, even if several processes write to the same place.

Files are written to a staging folder with a random name, next to the target or, if the target is
not empty, inside it. One process at a time works on a target: it locks a file whose name is derived
from the target's, and whose content names the staging folder. A killed process leaves both; the
system frees the lock, and the next process removes the staging folder or resumes in it. Only a
folder that a lock file names, with the same owner and no link, is ever removed or resumed.

The lock is `flock`: the library filelock leaves its files behind, and its substitute on file
systems without locks outlives a killed process.
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
"""Exceptions of a failed write: safetensors wraps those of the system in its own."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_folder(destination: str | Path, *, job: str = "") -> Iterator[Path]:
    """Build a folder that appears whole or not at all; it must not exist, or be empty.

    The block writes into a staging folder, which is renamed at its end. Where it fails, the staging
    folder is removed; with a `job`, it stays, and the next call for the same job resumes in it.
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
    with suppress(OSError):  # the rename is done, even if the parent cannot be flushed
        flush(destination.parent)


def move_files(work: Path, folder: Path, last: str, added: list[Path] | None = None) -> None:
    """Move the files of a finished save into a folder, each at once.

    Files named `last` come at the end, that of the folder itself after those of folders in it.
    Files that are new in the folder are appended to `added`, before each move.
    """
    files = [file for file in work.rglob("*") if file.is_file()]
    for file in files:
        flush(file)
    for file in sorted(files, key=lambda file: (file.name == last, -len(file.parts), file)):
        target = folder / file.relative_to(work)
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True)
        if added is not None and not os.path.lexists(target):
            added.append(target)
        if file.name == last:
            flush(folder)
        file.replace(target)
    flush(folder)


@contextmanager
def staging(
    target: Path, *, inside: bool = False, job: str = "", wait: bool = False
) -> Iterator[Path]:
    """Yield a staging folder next to a target or `inside` it, for one process at a time.

    Meanwhile others raise a `CheckpointError`, or `wait`. For `job` see `new_folder`.
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
        resumed = work if to_go_on and work is not None and work.exists() else None
        raise CheckpointError(not_written(target, error, resumed=resumed)) from error


def not_written(
    target: str | Path,
    error: OSError | SafetensorError,
    instead: str = "name another folder",
    resumed: Path | None = None,
) -> str:
    """Return the sentence for a failed write; the next run resumes in the folder `resumed`."""
    reason = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2]
    full = isinstance(error, SafetensorError) or error.errno in _NO_ROOM
    again = f"; {resumed.name} stays, and the next run goes on in it" if resumed else ""
    advice = f"make room there or {instead}, and run it again" if full else instead
    return f"{target} cannot be written: {reason}; {advice}{again}."


def _place(target: Path, inside: bool) -> tuple[Path, str]:
    return (target, ".moe_qlora") if inside else (target.parent, f".{target.name}.moe_qlora")


@contextmanager
def _locked(lock: Path, target: Path, wait: bool) -> Iterator[int]:
    import fcntl

    while True:
        # do not follow a link, nor wait for a pipe
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise CheckpointError(
                        f"Another process is writing to {target}: wait for it, or name another "
                        "folder."
                    ) from None
                _warn(
                    f"Another process is saving to {target}, and this one waits for it. In a "
                    "distributed run, pass is_main_process=False in all processes but one."
                )
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                _warn(
                    f"The file system of {target} has no locks ({error}): let one process at a "
                    "time write there."
                )
            try:
                there = os.path.samestat(os.fstat(handle), lock.lstat())
            except OSError:
                there = False  # removed by the process that had the lock
            if there:
                yield handle
                return
        finally:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # processes that were forked have it open too
            os.close(handle)


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


def _left(handle: int, place: Path, start: str, job: str) -> Path | None:
    """Return the staging folder of an interrupted run of this job; remove another run's."""
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
    """List files and folders that killed processes have left next to a target and inside it."""
    leftovers: list[Path] = []
    for inside in (False, True):
        place, start = _place(target, inside)
        if not _in_use(place / f"{start}.lock"):
            names = re.compile(rf"{re.escape(start)}\.(lock|[0-9a-f]{{8}}\.partial)")
            leftovers += sorted(file for file in place.glob(".*") if names.fullmatch(file.name))
    return leftovers


def _in_use(lock: Path) -> bool:
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
    """True if `replace_file` may write the path: a file, or new in a folder; never a device."""
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
    """Remove files; ignore errors of the system."""
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
