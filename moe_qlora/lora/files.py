"""Adapter folders: loads their tensors into a model's adapter layers, and writes them.

A load sets all of a file's tensors, or none. PEFT writes each rank's own shares of a sharded model:
here they are gathered, and the first rank writes them with PEFT's own method to a staging folder,
whose files then replace the old ones.
"""

import inspect
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import MethodType
from typing import Any

import torch
from peft import PeftModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..checkpoint import training_codec
from ..checkpoint.adapter import CONFIG, PICKLE, WEIGHTS, LoraSettings
from ..checkpoint.folder import absolute, move_files, parse_fields, read_header, staging
from ..checkpoint.training_codec import CARD
from ..errors import AdapterError, CheckpointError, MoeQloraError, first_line
from ..layout import listed, unwrapped_name
from ..models.files import read_json
from ..world import NOT_GIVEN, WholeTensor, runs_distributed, world
from .targets import WARNING

HUB_KEYS = ("revision", "subfolder", "cache_dir", "token")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_adapter(
    self: Any,
    model_id: str | os.PathLike[str],
    adapter_name: str,
    *args: Any,
    called: str | None = None,
    **kwargs: Any,
) -> Any:
    """Load as `PeftModel.load_adapter` does, on a `PeftModel` over packed experts.

    `called` is the folder's name in messages, for a caller that has checked it. An `AdapterError`:
    tensors and places differ, the adapter was trained on another model, or DeepSpeed ZeRO-3 has
    partitioned this one. A `CheckpointError`: a file is missing or damaged.
    """
    hub = {key: kwargs[key] for key in HUB_KEYS if key in kwargs}
    if called is None:
        called = os.fspath(model_id)
        check_adapter(model_id, self.get_base_model(), hub.get("subfolder"))
    for name, parameter in self.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise AdapterError(
                f"Loading {called} needs whole tensors, and {unwrapped_name(name)} is "
                "partitioned by DeepSpeed ZeRO-3, whose optimizer has a copy of each: load "
                "adapters before the engine is made, or go on from a checkpoint of the engine."
            )
    try:
        hook = self.register_load_state_dict_pre_hook(_shard)
        with reading(called), warnings.catch_warnings(), hook:
            # An adapter was trained as it is, also where it is to be trained further.
            warnings.filterwarnings("ignore", WARNING, UserWarning)
            result = type(self).load_adapter(self, model_id, adapter_name, *args, **kwargs)
    except RuntimeError as error:  # torch's list of tensors of another shape
        if isinstance(error, MoeQloraError):
            raise
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        said = f"{called} does not fit this model: {first.rstrip('.')}"
        raise AdapterError(f"{said}; load it on the model that it was trained on.") from error
    missing, unexpected = result.missing_keys, result.unexpected_keys
    unexpected[:] = [key for key in unexpected if not _is_alias(self, key, adapter_name)]
    fits = kwargs.get("ignore_mismatched_sizes") or not (missing or unexpected)
    if not fits and not _load_by_own_names(self, os.fspath(model_id), adapter_name, **hub):
        check_fits(called, missing, unexpected)
    return result


def use_own_files(model: PeftModel) -> None:
    """Give a `PeftModel` this file's methods in place of PEFT's."""
    for method in (save_pretrained, load_adapter):
        model.__dict__[method.__name__] = MethodType(method, model)


def _shard(model: nn.Module, tensors: dict[str, Any], *_: Any) -> None:
    # Shares in place of whole tensors, as PEFT has them from 0.21.1 on.
    for name, own in model.named_parameters():
        if name in tensors and isinstance(own, DTensor):
            device = own.to_local().device
            whole = tensors[name] if device.type == "meta" else tensors[name].to(device)
            place = own.device_mesh, own.placements
            tensors[name] = distribute_tensor(whole, *place, src_data_rank=None)


def _is_alias(model: PeftModel, key: str, adapter_name: str) -> bool:
    """Whether a key is a second spelling of a tensor that has been loaded."""
    # With the embeddings, PEFT writes the state dict of their wrappers: X.modules_to_save.weight
    # beside X.weight, and a tied head's rows of tokens beside those of the embeddings.
    key = key.replace(".token_adapter.", ".modules_to_save.")
    path, _, rest = key.partition(".modules_to_save.")
    module: Any = dict(model.named_modules()).get(path)
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter.tied_adapter is not None and rest == "trainable_tokens_delta"
    is_saved = isinstance(module, ModulesToSaveWrapper)
    return is_saved and rest in module.adapter_state_dict_load_map(adapter_name)


def check_fits(adapter: str | None, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raise where an adapter file's tensors and the model's places differ."""
    for first in (*unexpected, *missing):
        fault = "has no place in this model" if unexpected else "is not in the file"
        raise AdapterError(
            f"{adapter} does not fit this model: {first} {fault} ({len(unexpected)} tensors have "
            f"no place, {len(missing)} places got none); load it on the model that it was trained "
            "on, and one from transformers v4 with moe_qlora.load_adapter."
        )


def _load_by_own_names(model: PeftModel, adapter: str, adapter_name: str, **hub: Any) -> bool:
    """Load a file whose names are all the model's own; else do nothing and return False."""
    # For some model types (mistral_large4, deepseek_ocr2) PEFT 0.21 treats every name in the file
    # as one of the published checkpoint and renames it, even names that it wrote itself.
    tensors = load_peft_weights(adapter, device="cpu", **hub)
    places = get_peft_model_state_dict(model, None, adapter_name, save_embedding_layers=False)
    if places.keys() != tensors.keys() or any(
        place.is_meta or place.shape != tensors[key].shape for key, place in places.items()
    ):
        return False
    with torch.no_grad():
        for key, place in places.items():
            place.copy_(tensors[key])
    return True


def check_adapter(
    adapter: str | os.PathLike[str],
    base: nn.Module,
    subfolder: str | None = None,
    *,
    any_base: bool = False,
) -> None:
    """Check a folder's files, and that its note names this model; PEFT checks names on a hub."""
    root, folder = Path(adapter), Path(adapter) / (subfolder or "")
    if not folder.is_dir():
        if root.exists() or root.is_absolute() or not _HUB_ID.fullmatch(str(adapter)):
            raise CheckpointError(
                f"{folder} is no folder; name the one that save_pretrained wrote the adapter to."
            )
        return
    if not (file := folder / CONFIG).is_file():
        inner = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
        such = f", such as the {listed(inner)} in it" if inner else ""
        raise CheckpointError(
            f"{folder} is no adapter: it has no {CONFIG}; name the folder that save_pretrained "
            f"wrote the adapter to{such}."
        )
    config = read_json(file)
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise CheckpointError(
            f"{file} has peft_type={kind!r}, which the installed PEFT does not know; name an "
            "adapter that it can load."
        )
    if kind == PeftType.LORA:
        parse_fields(LoraSettings, config, file)
    if (folder / WEIGHTS).is_file():
        try:
            read_header(folder / WEIGHTS)  # says whether the file is whole
        except CheckpointError as error:
            raise CheckpointError(
                f"{folder} has damaged weights ({str(error).rstrip('.')}); copy the folder again."
            ) from error
    elif not (folder / PICKLE).is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}; copy the whole folder that save_pretrained wrote."
        )
    if not any_base:
        training_codec.check_noted_base(folder, base)


@contextmanager
def reading(adapter: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of PEFT, safetensors or the hub into a `CheckpointError` that names the file."""
    damaged = SafetensorError, UnpicklingError, EOFError
    try:
        yield
    except (*damaged, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, MoeQloraError):
            raise
        what = f"{adapter} cannot be loaded as an adapter: {first_line(error)}; name a folder that "
        what += "save_pretrained wrote, or the id of an adapter on the hub."
        if isinstance(error, damaged):
            what = f"{adapter} has damaged weights ({first_line(error)}); copy the folder again."
        raise CheckpointError(what) from error


def save_pretrained(
    self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> None:
    """Save adapters as `PeftModel.save_pretrained` does; in a distributed run, on the first rank.

    All ranks that have shares of the adapters must call this, and return or raise together.
    Arguments are PEFT's; `state_dict` may hold shares as well. A `CheckpointError` where the folder
    cannot be written, or another rank was lost in the gather.
    """
    stock = type(self).save_pretrained
    if not runs_distributed():
        stock(self, save_directory, *args, **kwargs)
        return
    call = inspect.signature(stock).bind(self, save_directory, *args, **kwargs)
    call.apply_defaults()
    asked = {**call.arguments, **call.arguments["kwargs"]}
    for name in ("self", "save_directory", "kwargs"):
        del asked[name]
    ranks, folder = world(), absolute(os.fspath(save_directory))
    state_dict = ranks.state_dict_to_save(self, asked.pop("state_dict", NOT_GIVEN))
    if state_dict is None:
        return
    tensors: dict[str, WholeTensor] = {}
    if ranks.is_divided(state_dict):
        # Numbers in place of tensors: PEFT 0.21.2 gathers DTensors itself, on this rank alone,
        # where transformers has loaded the model on several ranks.
        places = {key: torch.tensor(number) for number, key in enumerate(state_dict)}
        layers, keys = asked["save_embedding_layers"], list(state_dict)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the save itself says it again
            for name in asked["selected_adapters"] or list(self.peft_config):
                chosen = get_peft_model_state_dict(
                    self, dict(places), name, save_embedding_layers=layers
                )
                for key in sorted(map(int, chosen.values())):
                    tensors[keys[key]] = ranks.plain_tensor(state_dict[keys[key]])
    if not ranks.is_first() and not any(tensor.divided for tensor in tensors.values()):
        return

    def write(read: Callable[[str], Tensor]) -> None:
        if not asked["is_main_process"]:
            return
        # Before the folder is locked, and nothing divided is left: PEFT gathers that, on this rank.
        whole = {
            key: value for key, value in state_dict.items() if not ranks.plain_tensor(value).divided
        }
        whole |= {key: read(key).cpu() for key in tensors}
        with staging(folder, inside=True) as work:
            if (folder / CARD).is_file():  # PEFT adds to it
                shutil.copyfile(folder / CARD, work / CARD)
            stock(self, str(work), **asked, state_dict=whole)
            move_files(work, folder, CONFIG)

    ranks.gather_to_first(tensors, write, f"Saving the adapter to {folder}")
