"""`save_pretrained` of a `PeftModel` in a distributed run: one file, as a single process writes it.

PEFT writes on every rank that calls it, and only that rank's shares of a sharded model. Here the
adapter's tensors are gathered, and the first rank writes them with PEFT's own method to a staging
folder, whose files then replace the old ones.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import Tensor

from ..checkpoint.adapter import CONFIG
from ..checkpoint.staging import absolute, move_files, staging
from ..checkpoint.training_codec import CARD
from ..world import NOT_GIVEN, WholeTensor, world


def save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: str | bool = "auto",
    is_main_process: bool = True,
    path_initial_model_for_weight_conversion: str | None = None,
    **kwargs: Any,
) -> None:
    """Save adapters as `PeftModel.save_pretrained` does.

    In a distributed run the first rank writes. Where ranks hold shares of the adapters, all of them
    must call this, and return or raise together. Arguments are PEFT's; `state_dict` may hold shares
    as well.

    Raises:
        CheckpointError: The folder cannot be written, or another rank was lost while tensors were
            gathered.
    """
    stock = partial(
        type(self).save_pretrained,
        self,
        safe_serialization=safe_serialization,
        selected_adapters=selected_adapters,
        save_embedding_layers=save_embedding_layers,
        path_initial_model_for_weight_conversion=path_initial_model_for_weight_conversion,
        **kwargs,
    )
    ranks = world()
    if not ranks.several:
        stock(save_directory, is_main_process=is_main_process)
        return
    folder = absolute(os.fspath(save_directory))
    state_dict = ranks.state_dict_to_save(self, kwargs.pop("state_dict", NOT_GIVEN))
    if state_dict is None:
        return
    tensors: dict[str, WholeTensor] = {}
    if ranks.is_divided(self, state_dict):
        names = selected_adapters or list(self.peft_config)
        tensors = _adapter_tensors(self, state_dict, names, save_embedding_layers)
    if not ranks.first and not any(tensor.divided for tensor in tensors.values()):
        return

    def write(read: Callable[[str], Tensor]) -> None:
        if not is_main_process:
            return
        # Before the folder is locked, and nothing divided is left: PEFT gathers that, on this rank.
        whole = {
            key: value for key, value in state_dict.items() if not ranks.plain_tensor(value).divided
        }
        whole |= {key: read(key).cpu() for key in tensors}
        with staging(folder, inside=True, wait=True) as work:
            if (folder / CARD).is_file():  # PEFT adds to it
                shutil.copyfile(folder / CARD, work / CARD)
            stock(str(work), is_main_process=True, state_dict=whole)
            move_files(work, folder, CONFIG)

    ranks.gather_to_first(tensors, write, f"Saving the adapter to {folder}")


def _adapter_tensors(
    model: PeftModel,
    state_dict: Mapping[str, Any],
    adapters: Sequence[str],
    save_embedding_layers: str | bool,
) -> dict[str, WholeTensor]:
    """Return the tensors of the state dict that PEFT will write.

    PEFT is given numbers in place of tensors, as it gathers DTensors itself if transformers has
    loaded the model on several ranks (0.21.2).
    """
    places = {key: torch.tensor(number) for number, key in enumerate(state_dict)}
    written: set[int] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the save itself says it again
        for adapter in adapters:
            chosen = get_peft_model_state_dict(
                model, dict(places), adapter, save_embedding_layers=save_embedding_layers
            )
            written |= {int(number) for number in chosen.values()}
    return {
        key: world().plain_tensor(value)
        for number, (key, value) in enumerate(state_dict.items())
        if number in written
    }
