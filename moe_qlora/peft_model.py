"""The PEFT model over packed experts: later adapters, weighted sums, merging and loading."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import peft
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraModel as StockLoraModel
from peft.tuners.tuners_utils import BaseTuner
from safetensors import safe_open
from torch import Tensor, nn

from . import lora, peft_targets, quantize_host
from .errors import AdapterError
from .peft_config import adapt, spell_exactly

_HUB_KEYS = ("revision", "subfolder", "cache_dir", "token")
_CREATION_KEYS = ("low_cpu_mem_usage", "autocast_adapter_dtype")
_EXPERT_KEY = re.compile(r"\.experts\.\d+\.")


class LoraModel(StockLoraModel):
    """PEFT's LoRA model over packed experts.

    An instance gets this class after creation (`take_over`), so that what users and trainers call
    on it later is right too: add_adapter, load_adapter, add_weighted_adapter, merge_adapter,
        merge_and_unload.
    """

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        config = adapt(model, self.peft_config[adapter_name])
        self.peft_config[adapter_name] = config
        with without_false_warning(config):
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        check(model, adapter_name, config)

    def merge_adapter(
        self,
        adapter_names: list[str] | None = None,
        safe_merge: bool = False,
        *,
        dtype: torch.dtype | None = None,
        repack: bool = False,
    ) -> None:
        """Merge into the base weights; packed experts become plain ones meanwhile.

        Args:
            adapter_names: None is all active ones.
            safe_merge: Refuse results that are not finite.
            dtype: Of merged expert weights; None is the dtype that they had before packing.
            repack: Pack merged experts again, with the settings that they had. `unmerge_adapter`
                restores the original codes exactly, either way.
        """
        with self._merging(dtype, repack):
            super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)

    def merge_and_unload(
        self,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
        repack: bool = False,
    ) -> nn.Module:
        """The base model with the adapters merged; `dtype` and `repack` as in `merge_adapter`."""
        with self._merging(dtype, repack):
            merged = super().merge_and_unload(
                progressbar=progressbar, safe_merge=safe_merge, adapter_names=adapter_names
            )
        quantize_host.settle(cast(nn.Module, merged))
        return cast(nn.Module, merged)

    @contextmanager
    def _merging(self, dtype: torch.dtype | None, repack: bool) -> Iterator[None]:
        wrappers = [
            module for module in self.model.modules() if isinstance(module, lora.ParamWrapper)
        ]
        for wrapper in wrappers:
            wrapper.merge_dtype, wrapper.merge_repack = dtype, repack
        try:
            yield
        finally:
            for wrapper in wrappers:
                wrapper.merge_dtype, wrapper.merge_repack = None, False

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "svd",
        **kwargs: Any,
    ) -> None:
        """PEFT's own, for expert parameters as well: each expert is combined by itself."""
        if adapter_name in self.peft_config:
            return
        super().add_weighted_adapter(
            adapters, weights, adapter_name, combination_type=combination_type, **kwargs
        )
        if combination_type == "cat" and len(adapters) > 1:
            for module in self.model.modules():
                if isinstance(module, lora.ParamWrapper) and adapter_name in module.lora_A:
                    _concatenate(module, adapters, weights, adapter_name)

    def _check_add_weighted_adapter(self, adapters: list[str], *args: Any, **kwargs: Any) -> Any:
        # PEFT refuses adapters with target_parameters here, since its own wrappers cannot combine
        # them
        configs = [self.peft_config[name] for name in adapters if name in self.peft_config]
        kept = [config.target_parameters for config in configs]
        for config in configs:
            config.target_parameters = None
        try:
            return super()._check_add_weighted_adapter(adapters, *args, **kwargs)
        finally:
            for config, value in zip(configs, kept, strict=True):
                config.target_parameters = value

    def _svd_generalized_task_arithmetic_weighted_adapter(
        self,
        combination_type: str,
        adapters: list[str],
        weights: list[float],
        new_rank: int,
        target: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        combine = super()._svd_generalized_task_arithmetic_weighted_adapter
        if not isinstance(target, lora.ParamWrapper):
            return cast(
                "tuple[Tensor, Tensor]",
                combine(combination_type, adapters, weights, new_rank, target, *args, **kwargs),
            )
        parts = [
            combine(combination_type, adapters, weights, new_rank, expert, *args, **kwargs)
            for expert in _single_experts(target)
        ]
        return lora_a([a for a, _ in parts]), lora_b([b for _, b in parts])


class _SingleExpert:
    """One expert as PEFT's SVD sees a layer: its adapters, and the delta as `(out, in)`."""

    def __init__(self, wrapper: lora.ParamWrapper, expert: int) -> None:
        self.lora_A = wrapper.lora_A
        self.lora_embedding_A: dict[str, Any] = {}
        # the delta is scaled already; PEFT 0.20 scales it once more
        self.scaling = dict.fromkeys(wrapper.scaling, 1.0)
        self._wrapper, self._expert = wrapper, expert

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        a, b = expert_factors(self._wrapper, adapter_name)
        delta: Tensor = b[self._expert] @ a[self._expert]
        return delta * self._wrapper.scaling[adapter_name]


def _single_experts(wrapper: lora.ParamWrapper) -> list[_SingleExpert]:
    return [_SingleExpert(wrapper, expert) for expert in range(wrapper.num_experts)]


def expert_factors(wrapper: lora.ParamWrapper, adapter_name: str) -> tuple[Tensor, Tensor]:
    """`lora_A` as `(E, r, in)` and `lora_B` as `(E, out, r)`."""
    a, b = (
        wrapper.lora_A[adapter_name].weight.detach(),
        wrapper.lora_B[adapter_name].weight.detach(),
    )
    experts = wrapper.num_experts
    return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)


def lora_a(parts: list[Tensor]) -> Tensor:
    """One `(r, in)` for each expert, as PEFT stores them: `(E * r, in)`."""
    return torch.cat(parts, dim=0).contiguous()


def lora_b(parts: list[Tensor]) -> Tensor:
    """One `(out, r)` for each expert, as PEFT stores them: `(out, r * E)`, expert fastest."""
    return torch.stack(parts, dim=-1).flatten(1).contiguous()


def _concatenate(
    wrapper: lora.ParamWrapper, adapters: list[str], weights: list[float], adapter_name: str
) -> None:
    """Stack the ranks within each expert; PEFT's own stacking puts adapter after adapter."""
    left, right = [], []
    for name, weight in zip(adapters, weights, strict=True):
        if name in wrapper.lora_A:
            a, b = expert_factors(wrapper, name)
            left.append(a * (weight * wrapper.scaling[name]))
            right.append(b)
    a, b = torch.cat(left, dim=1), torch.cat(right, dim=2)
    missing = wrapper.r[adapter_name] - a.shape[1]
    a, b = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
    wrapper.lora_A[adapter_name].weight.data = lora_a(list(a))
    wrapper.lora_B[adapter_name].weight.data = lora_b(list(b))


@contextmanager
def without_false_warning(config: PeftConfig) -> Iterator[None]:
    """Keep PEFT from saying that a rank or alpha pattern has no effect where it has one.

    PEFT 0.21 compares these patterns with the modules that it targets, not with the parameters.
    """
    parameters = getattr(config, "target_parameters", None) or ()
    patterns = [
        *(getattr(config, "rank_pattern", None) or ()),
        *(getattr(config, "alpha_pattern", None) or ()),
    ]
    used = patterns and all(
        any(re.match(rf"(.*\.)?({key})$", name) for name in parameters) for key in patterns
    )
    with warnings.catch_warnings():
        if used:
            message = r"The following (rank|alpha)_pattern keys did not match any targeted module"
            warnings.filterwarnings("ignore", message=message, category=RuntimeWarning)
        yield


def take_over(model: PeftModel) -> None:
    """Make a PEFT model over packed experts right from here on.

    Raises:
        AdapterError: LoRA on an expert parameter is not connected.
    """
    tuner = model.base_model
    if not isinstance(tuner, BaseTuner):  # prompt learning leaves the model as it is
        return
    if type(tuner) is StockLoraModel:
        tuner.__class__ = LoraModel
    lora.adopt(tuner.model)
    for name, config in model.peft_config.items():
        check(tuner.model, name, config)


def check(model: nn.Module, adapter_name: str, config: PeftConfig) -> None:
    """Raise where LoRA on a packed parameter that the config names has no effect."""
    asked = getattr(config, "target_parameters", None) or ()
    expected = [
        name
        for name in peft_targets.packed_parameters(model)
        if any(peft_targets.names_parameter(one, name) for one in asked)
    ]
    lora.check_connected(model, adapter_name, expected)


def load(
    model: nn.Module, adapter: str, adapter_name: str, *, is_trainable: bool, **kwargs: Any
) -> PeftModel:
    """See `moe_qlora.load_adapter`."""
    base = peft_targets.base_model(model)
    if adapter_name in getattr(model, "peft_config", {}):
        raise AdapterError(
            f"adapter_name is {adapter_name!r}, which this model has already; give another."
        )
    hub = {key: kwargs[key] for key in _HUB_KEYS if key in kwargs}
    creation = {key: kwargs[key] for key in _CREATION_KEYS if key in kwargs}
    config = PeftConfig.from_pretrained(adapter, **hub)
    config.inference_mode = not is_trainable
    if isinstance(config, LoraConfig) and _from_v4(adapter, **hub):
        config = peft_targets.rewritten(base, config) or config
    elif not peft_targets.packed_parameters(base):
        config = spell_exactly(base, config)
    config = adapt(base, config)
    kwargs.setdefault("key_mapping", getattr(base, "_checkpoint_conversion_mapping", None))
    with without_false_warning(config):
        wrapped: Any = model
        if isinstance(model, PeftModel):
            wrapped.add_adapter(adapter_name, config, **creation)
        else:
            wrapped = peft.get_peft_model(model, config, adapter_name=adapter_name, **creation)
            if peft_targets.packed_parameters(base):
                take_over(wrapped)
    if is_trainable:
        wrapped.set_requires_grad(adapter_name)
    try:
        result = wrapped.load_adapter(adapter, adapter_name, is_trainable=is_trainable, **kwargs)
    except RuntimeError as error:  # torch's list of all that has another shape
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise AdapterError(
            f"{adapter} does not fit this model: {first.rstrip('.')}; load it on the model that it "
            "was trained on."
        ) from error
    if (result.missing_keys or result.unexpected_keys) and not _load_as_named(
        wrapped, adapter, adapter_name, **hub
    ):
        raise AdapterError(_load_fault(adapter, result.missing_keys, result.unexpected_keys))
    return wrapped


def _load_as_named(model: PeftModel, adapter: str, adapter_name: str, **hub: Any) -> bool:
    """Load a file whose names are all the model's own; False, and nothing done, where one is not.

    For some model types (mistral_large4, deepseek_ocr2) PEFT 0.21 takes every name in the file for
    one of the published checkpoint and renames it, those that it wrote itself included.
    """
    from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights

    given = load_peft_weights(adapter, device="cpu", **hub)
    places = get_peft_model_state_dict(
        model, adapter_name=adapter_name, save_embedding_layers=False
    )
    if places.keys() != given.keys() or any(
        place.is_meta or place.shape != given[key].shape for key, place in places.items()
    ):
        return False
    with torch.no_grad():
        for key, place in places.items():
            place.copy_(given[key])
    return True


def _load_fault(adapter: str, missing: list[str], unexpected: list[str]) -> str:
    names, what = (
        (unexpected, "has no place in this model")
        if unexpected
        else (missing, "is not in the file")
    )
    return (
        f"{adapter} does not fit this model: {names[0]} {what} ({len(unexpected)} tensors have no "
        f"place, "
        f"{len(missing)} places got none); load it on the model that it was trained on."
    )


def _from_v4(adapter: str, **hub: Any) -> bool:
    """Whether the file holds one LoRA for each single expert, as transformers v4 had them."""
    from peft.utils.save_and_load import load_peft_weights

    path = Path(adapter) / (hub.get("subfolder") or "") / "adapter_model.safetensors"
    if path.exists():
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
        return any(_EXPERT_KEY.search(key) for key in keys)
    return any(_EXPERT_KEY.search(key) for key in load_peft_weights(adapter, device="cpu", **hub))
