"""Loads of folders that their makers quantized, packed into the caller's bitsandbytes format.

Stock transformers lets the folder's own quantization_config win, and walks the keys on disk. Here
the caller's config wins, on copies; keys get the names that they have in the 16-bit folder; and
every tensor is read through the reader (checkpoint/prequantized/), which dequantizes it:

    on disk     X.weight  X.weight_scale_inv                  N_blocks  N_scales
                   |          |  `PlainNames`                    |          |
    16 bit      X.weight   (dropped)                             N       (dropped)
                   |                                             |
                   v  the model's converters, and                v
                      `RestConverter` for the rest (hf/converters.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import WeightRenaming

from ..checkpoint.load_spec import LoadSpec, kept_dtypes
from ..checkpoint.prequantized import PrequantizedCheckpoint, maker_method, open_plain
from ..checkpoint.prequantized.config import MakerConfig
from ..checkpoint.quantize import copy_config
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError

_MAKERS_CONFIG = "_makers_quantization_config"
COMPANION = "read_with_the_codes_that_it_belongs_to"


def preferring_bitsandbytes(stock: Any, is_on: Callable[[], bool]) -> Any:
    """Return a stand-in for `AutoHfQuantizer.merge_quantization_configs`, as the class holds it.

    While `is_on`, it returns a copy of the caller's bitsandbytes config where one is given for a
    folder that its maker quantized. All else is left to `stock`, the class's attribute as it was.

    Raises:
        CheckpointError: The maker's method is not read.
    """

    def merge_quantization_configs(cls: type, from_folder: Any, from_caller: Any) -> Any:
        if is_on() and _is_bitsandbytes(from_caller):
            makers = from_folder if isinstance(from_folder, Mapping) else from_folder.to_dict()
            if maker_method({"quantization_config": makers}) is not None:
                MakerConfig(makers)  # refuses what is not read, before anything is downloaded
                config = copy_config(from_caller)
                setattr(config, _MAKERS_CONFIG, makers)
                return config
        return stock.__get__(None, cls)(from_folder, from_caller)

    return classmethod(merge_quantization_configs)


def _is_bitsandbytes(config: Any) -> bool:
    if isinstance(config, Mapping):
        return bool(config.get("load_in_4bit") or config.get("load_in_8bit"))
    return isinstance(config, BitsAndBytesConfig)


def take_makers_config(config: Any) -> Mapping[str, Any] | None:
    """Remove from a bitsandbytes config what it stands in for, and return it; None if nothing."""
    makers: Mapping[str, Any] | None = getattr(config, "__dict__", {}).pop(_MAKERS_CONFIG, None)
    return makers


def open_files(
    files: list[str] | None, makers_config: Mapping[str, Any] | None
) -> Checkpoint | None:
    """Return a checkpoint's files as those of the 16-bit one; None if they are not safetensors."""
    if files and all(str(file).endswith(".safetensors") for file in files):
        paths = [Path(file) for file in files]
        return open_plain(paths[0].parent, paths, makers_config)
    if makers_config is not None:
        raise CheckpointError(
            f"The checkpoint is quantized ({maker_method({'quantization_config': makers_config})}) "
            "and is dequantized from safetensors files only: give a folder or a hub id with such "
            "files."
        )
    return None


def load_dtypes(
    model: Any, dtype: torch.dtype | None, quantizes: Callable[[Any, str], bool]
) -> dict[str, torch.dtype]:
    """Return, by name, the dtypes that transformers casts a model's tensors to as it reads them."""
    kept = kept_dtypes(model, dtype)
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {
        name: kept(name) or (dtype if dtype and quantizes(model, name) else tensor.dtype)
        for name, tensor in tensors
    }


class PlainNames(WeightRenaming):
    """Gives each key on disk the name that the tensor has in the 16-bit folder.

    It comes first, so that the model's own renamings and converters see plain names. Scales, shapes
    and whatever else goes with codes get one name, which no model has.
    """

    files: PrequantizedCheckpoint

    def __init__(self, files: PrequantizedCheckpoint) -> None:
        super().__init__("on disk", "plain")
        self.files = files

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the plain name of a key."""
        return self.files.plain_name(source_key) or COMPANION, None


def check_read(model: Any, spec: LoadSpec) -> None:
    """Check that transformers read no codes by itself: what it cannot rename, it reads as it is."""
    files = spec.prequantized
    if files is None:
        return
    for key in model.state_dict():
        name = files.plain_name(key) if key in files.stored and key not in spec.read else None
        if name is not None and files.is_dequantized(name):
            raise CheckpointError(
                f"{key} was read without being dequantized, since transformers' conversions of a "
                f"{type(model).__name__} lead to no parameter of it: load the 16-bit checkpoint."
            )
