"""Which checkpoint a folder holds: told by content, and cheap enough to be asked twice.

Sizes and times do not tell: object stores and reproducible archives give equal ones to files that
differ. Compared are the header and samples of the content of each file, and what the system says of
it, in which a file that another has replaced mostly differs even where the samples are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..models.files import reading
from .manifest import CONFIG, Source, SourceFile
from .prequantized.plain_config import MODELOPT_CONFIG
from .reader import INDEX_SUFFIX, header_bytes

_Facts = tuple[int, str, str, int, int, int]
_PIECES, _PIECE = 64, 1 << 16  # sampled of a file: pieces at even distances, of so many bytes


@dataclass(frozen=True)
class Identity:
    """What tells the checkpoint in a folder from others.

    `files` has configurations, the index and the safetensors files by name: what a `SourceFile`
    says of each, its inode, and the times at which its content and it itself were changed.
    """

    folder: Path
    files: dict[str, _Facts]

    def source(self, names: Iterable[str]) -> Source:
        """Return what a manifest says of the checkpoint, given the files that were read."""
        files = {name: SourceFile(*self.files[name][:3]) for name in names}
        return Source(self.folder.name, self.files[CONFIG][2], files)

    def check_again(self) -> None:
        """Raise where the folder holds another checkpoint by now."""
        # A file's inode and the time of its change tell, and its content need not be read again.
        seen, now = (_without_samples(files) for files in (self.files, _files(self.folder, False)))
        changed = sorted(name for name in {*seen, *now} if seen.get(name) != now.get(name))
        if changed:
            raise CheckpointError(
                f"{self.folder / changed[0]} changed while the folder was read, and two "
                "checkpoints are not mixed: run it again when nothing writes there."
            )


def file_facts(folder: Path) -> dict[str, str]:
    """Return size and content of each file of a checkpoint, for ranks that read copies of it."""
    facts = {}
    for name, (size, header, sample, *_) in identify(folder).files.items():
        content = hashlib.sha256((header + sample).encode()).hexdigest()
        facts[f"{name} of the checkpoint"] = f"{size:,} bytes, {content[:12]}"
    return facts


def identify(folder: Path) -> Identity:
    """Identify the checkpoint in a folder."""
    return Identity(folder, _files(folder, True))


def _without_samples(files: dict[str, _Facts]) -> dict[str, tuple[object, ...]]:
    return {name: (size, header, *times) for name, (size, header, _, *times) in files.items()}


def _files(folder: Path, samples: bool) -> dict[str, _Facts]:
    files = {}
    with reading(folder):
        for file in sorted(folder.glob("*")):  # none where there is no folder
            named = file.name in (CONFIG, MODELOPT_CONFIG)
            named = named or file.name.endswith((".safetensors", INDEX_SUFFIX))
            if named and file.is_file():  # to open a pipe would wait for its writer
                header, status = "", file.stat()
                with suppress(CheckpointError):  # not every file has one, and need be read at all
                    header = hashlib.sha256(header_bytes(file)).hexdigest()
                times = (status.st_mtime_ns, status.st_ctime_ns)
                sample = _sample(file, status.st_size) if samples else ""
                files[file.name] = (status.st_size, header, sample, status.st_ino, *times)
    return files


def _sample(file: Path, size: int) -> str:
    """Return the checksum of pieces of a file, of all of it where it is small."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        if size <= _PIECES * _PIECE:
            digest.update(handle.read())
        else:
            for number in range(_PIECES):
                handle.seek((size - _PIECE) * number // (_PIECES - 1))
                digest.update(handle.read(_PIECE))
    return digest.hexdigest()
