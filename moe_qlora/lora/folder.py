"""A saved adapter's folder, looked at before the model gets layers for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from ..checkpoint.adapter import LoraSettings
from ..checkpoint.reader import parse_fields
from ..errors import CheckpointError, MoeQloraError, first_line
from ..layout import listed
from ..models.files import read_json

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_folder(adapter: str | os.PathLike[str], subfolder: str | None = None) -> None:
    """Refuse a path that is no folder of an adapter; names on a hub are left to PEFT."""
    root, folder = Path(adapter), Path(adapter) / (subfolder or "")
    if not folder.is_dir():
        if root.exists() or root.is_absolute() or not _HUB_ID.fullmatch(str(adapter)):
            raise CheckpointError(
                f"{folder} is no folder; name the one that save_pretrained wrote the adapter to."
            )
        return
    if not (folder / CONFIG_NAME).is_file():
        inner = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_NAME}"))
        hint = f", such as the {listed(inner)} in it" if inner else ""
        raise CheckpointError(
            f"{folder} is no adapter: it has no {CONFIG_NAME}; name the folder that "
            f"save_pretrained wrote the adapter to{hint}."
        )
    check_config(folder)
    weights = (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)
    if not any((folder / name).is_file() for name in weights):
        raise CheckpointError(
            f"{folder} has no {SAFETENSORS_WEIGHTS_NAME}; copy the whole folder that "
            "save_pretrained wrote."
        )
    if (folder / SAFETENSORS_WEIGHTS_NAME).is_file():
        with reading(adapter), safe_open(folder / SAFETENSORS_WEIGHTS_NAME, framework="pt"):
            pass  # its header says whether the file is whole


def check_config(folder: Path) -> None:
    """Refuse an adapter's configuration whose kind or numbers PEFT could not work with."""
    config = read_json(folder / CONFIG_NAME)
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise CheckpointError(
            f"{folder / CONFIG_NAME} has peft_type={kind!r}, which the installed PEFT does not "
            "know; name an adapter that it can load."
        )
    if kind == PeftType.LORA:
        parse_fields(LoraSettings, config, folder / CONFIG_NAME)


@contextmanager
def reading(adapter: str | os.PathLike[str]) -> Iterator[None]:
    """Say what could not be read, where PEFT, safetensors or the hub raise their own errors."""
    try:
        yield
    except MoeQloraError:
        raise
    except (SafetensorError, UnpicklingError, EOFError) as error:
        raise CheckpointError(
            f"{adapter} has damaged weights ({first_line(error)}); copy the folder again."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{adapter} cannot be loaded as an adapter: {first_line(error)}; name a folder that "
            "save_pretrained wrote, or the id of an adapter on the hub."
        ) from error
