"""What transformers asks a quantizer while it loads a model, answered for expert weights too.

The methods stand in the order of the calls (switch.py). The quantizer that a loaded model keeps is
of the stock class.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.quantizers.base import get_keys_to_not_convert

from ..checkpoint.folder import Checkpoint, check_plain, file_facts
from ..checkpoint.manifest import CONFIG_KEY, FolderCheck, Manifest, Mark, parse_mark
from ..checkpoint.prequantized import describe_plain, method_of, open_plain
from ..checkpoint.rows import PackingPlan, kept_dtypes, packing_spec, reload_spec
from ..errors import CheckpointError, ConfigError
from ..models.files import check_no_codes_of_single_experts
from ..packing.codecs import codecs
from ..packing.decoders import check_linears
from ..packing.settings import packed_nbytes
from ..world import world
from .fill import Fill, weights_to_keep

# Attribute of a caller's config: the config of the folder's maker that it stands in for.
MAKERS_CONFIG = "_makers_quantization_config"


@cache
def packing_quantizer(stock: type, asked: Callable[[], Any]) -> type:
    """Derive the class that packs experts, as `switch.asked`, from the one that serves now."""
    members = {"__module__": __name__, "_asked": staticmethod(asked)}
    return type(f"Packing{stock.__name__}", (_Packing, stock), members)


class _Packing:
    pre_quantized: bool
    quantization_config: Any
    _asked: Callable[[], Any]
    _spec: PackingPlan | None = None
    _opened: Checkpoint | None = None  # None for given tensors and files other than safetensors
    _fill: Fill | None = None
    _device_map: Any = None
    _checked: FolderCheck | None = None
    _mark: Mark | None = None
    _makers_config: Mapping[str, Any] | None = None
    _ranks: Any = None  # this load in each rank, of one that is divided over ranks

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        self._makers_config = getattr(quantization_config, "__dict__", {}).pop(MAKERS_CONFIG, None)
        if self._makers_config is not None:
            kwargs["pre_quantized"] = False  # what is read is 16 bit
        super().__init__(quantization_config, **kwargs)  # type: ignore[call-arg]

    def update_attn_implementation(self, config: Any) -> Any:
        config = super().update_attn_implementation(config)  # type: ignore[misc]
        if getattr(config, "distributed_config", None) is not None:
            self._ranks = world().RankLoad(config.distributed_config)
        if self._makers_config is not None:
            describe_plain(config)
        if CONFIG_KEY not in config.__dict__:
            return config
        self._mark = parse_mark(config.__dict__.pop(CONFIG_KEY))
        vars(config.get_text_config()).pop("transformers_weights", None)
        config.transformers_weights = self._mark.entry
        folder = Path(getattr(config, "_name_or_path", None) or "")
        if str(folder) != "." and (folder / "config.json").is_file():
            # Before transformers looks for files, so that what is missing is named by us.
            self._check(folder)
        return config

    def _check(self, folder: Path) -> Manifest:
        if self._checked is None or self._checked.folder != folder:
            shards = self._ranks is not None and self._ranks.shards
            self._checked = FolderCheck(folder, large=not shards)
        return self._checked.manifest

    def update_device_map(self, device_map: Any) -> Any:
        """Keep the stock quantizer's device map; without one, ranks go to their own devices."""
        if device_map is None and (own := world().own_device()) is not None:
            device_map = {"": own}
        self._device_map = super().update_device_map(device_map)  # type: ignore[misc]
        return self._device_map

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        super().validate_environment(*args, **kwargs)  # type: ignore[misc]
        self._device_map = kwargs.get("device_map")
        if self._fill is not None:
            self._fill.place(self._device_map)

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files")
        ranks, asked = self._ranks, self._asked()
        if asked.offload and (ranks is not None or is_deepspeed_zero3_enabled()):
            raise ConfigError(
                "enabled(offload=True): this load shards the model over ranks "
                "(distributed_config, or DeepSpeed's ZeRO-3), and experts in host memory are whole "
                "on each rank: load it for DDP, ZeRO-1 or ZeRO-2, or leave offload out (and give "
                "ZeRO-3's own zero_optimization.offload_param)."
            )
        if ranks is not None:
            facts = {"quantization_config": self.quantization_config, "dtype": dtype}
            facts |= {"keep_codes": asked.keep_codes, "skip_modules": asked.skip_modules}
            ranks.begin(lambda: facts | (file_facts(Path(files[0]).parent) if files else {}))
        if asked.skip_modules and not self.pre_quantized:
            bnb = copy.copy(self.quantization_config)
            own = bnb.llm_int8_skip_modules
            if own is None:  # a list replaces the stock default, which is the output head
                own = get_keys_to_not_convert(model)
            bnb.llm_int8_skip_modules = list(dict.fromkeys([*own, *asked.skip_modules]))
            self.quantization_config = bnb
        self._spec, self._opened = self._examine(model, dtype, files, kwargs.get("device_map"))
        spec, opened = self._spec, self._opened
        super().preprocess_model(model, dtype=dtype, **kwargs)  # type: ignore[misc]
        # The stock method may have put lists of Linear layers in place of fused weights.
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        check_no_codes_of_single_experts(files or (), names)
        check_linears(model, spec.settings)
        if self._checked is not None:
            self._checked.check_model(model)
        spec = replace(spec, params={n: p for n, p in spec.params.items() if n in names})
        prequantized = opened is not None and opened.method
        if self._mark is None and asked.keep_codes:
            spec = replace(spec, kept=weights_to_keep(model, spec, opened))
        self._spec = spec
        if spec.params or prequantized or spec.manifest is not None:
            # that transformers casts tensors to as it reads them
            kept, quantizes = kept_dtypes(model, dtype), super().param_needs_quantization  # type: ignore[misc]
            named = model.named_parameters, model.named_buffers
            dtypes = {
                n: kept(n) or (dtype if dtype and quantizes(model, n) else tensor.dtype)
                for tensors in named
                for n, tensor in tensors(remove_duplicate=False)
            }
            known = model, spec, opened, dtypes | spec.dtypes, self.quantization_config
            shards = ranks is not None and ranks.shards
            if shards and opened is None:
                raise CheckpointError(
                    "A model that is sharded while it loads is read from safetensors files: "
                    "give a folder or a hub id with such files."
                )
            self._fill = Fill(*known, offloads=asked.offload, shards=shards)
            self._fill.place(self._device_map)
            if shards:
                self._spec, model.hf_quantizer = None, self

    def _examine(
        self, model: Any, dtype: Any, files: list[str] | None, place: Any
    ) -> tuple[PackingPlan, Checkpoint | None]:
        folder = Path(files[0]).parent if files else None
        if self._mark is None:
            spec = packing_spec(model, self.quantization_config, dtype, place)
        else:
            if folder is None or files is None:
                raise CheckpointError("A packed folder is loaded by its path, not by tensors.")
            manifest = self._check(folder)
            # transformers was sent to the first file only; the manifest knows them all.
            files[:] = [str(folder / name) for name in manifest.shards]
            model.config.__dict__.pop("transformers_weights", None)
            spec = reload_spec(model, self.quantization_config, dtype, manifest, folder)
        opened, makers = None, self._makers_config
        if folder and files and all(str(file).endswith(".safetensors") for file in files):
            opened = open_plain(folder, list(map(Path, files)), makers)
        elif makers is not None:
            raise CheckpointError(
                f"The checkpoint is quantized ({method_of(makers)}) and is dequantized from "
                "safetensors files only: give a folder or a hub id with such files."
            )
        if not self.pre_quantized and opened is not None:
            prefix = f"{model.base_model_prefix}."
            floating = {n for n, tensor in model.state_dict().items() if tensor.is_floating_point()}
            for key in opened:
                if floating & {key, prefix + key, key.removeprefix(prefix)}:
                    check_plain(key, opened.info(key).dtype)
        ends = [codec.scales for codec in codecs()] if self._mark is None and opened else ()
        if any(name + end in (opened or ()) for name in spec.params for end in ends):
            raise CheckpointError(
                f"{folder} holds packed experts, but its config.json does not say so: it was "
                "overwritten; restore it, or pack the model again."
            )
        return spec, opened

    def _convert_model_for_quantization(self, model: Any) -> None:
        """Leave fused experts alone, unless the checkpoint holds them as single layers."""
        # Llama 4: stock swaps its experts for a list of Linear layers, as such folders once were.
        if self._spec is not None and self._opened is not None:
            names = [param.module_name for param in self._spec.layout.experts]
            if not any(f"{name}.0." in key for key in self._opened for name in names):
                return
        super()._convert_model_for_quantization(model)  # type: ignore[misc]

    def update_weight_conversions(self, weight_conversions: Any, *model: Any) -> Any:
        hidden = []
        if self._fill is not None:
            hidden = self._fill.hide(weight_conversions, linears=not self.pre_quantized)
            if self._mark is not None:  # a packed folder has the model's own names
                return hidden
        return [*hidden, *super().update_weight_conversions(weight_conversions, *model)]  # type: ignore[misc]

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        if self._fill is not None and param_name in self._fill.names:
            return True
        return bool(super().param_needs_quantization(model, param_name, **kwargs))  # type: ignore[misc]

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        spec = self._spec
        if spec is not None and param_name in spec.params:
            # of devices, whose memory transformers reserves and divides by it
            shape, how = spec.params[param_name].shape, spec.settings_of(param_name)
            return 0.0 if self._asked().offload else packed_nbytes(shape, how) / param.numel()
        return float(super().param_element_size(model, param_name, param))  # type: ignore[misc]

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        return max_memory  # stock takes a tenth off, of even shares too

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        fill = self._fill
        if fill is not None and fill.error is not None:
            raise fill.error
        model = super()._process_model_after_weight_loading(model, **kwargs)  # type: ignore[misc]
        self._spec = self._opened = self._fill = None
        if self._checked is not None:
            self._checked.finish()
        if model.__dict__.get("hf_quantizer") is self:
            order = type(self).__mro__
            stock: Any = order[order.index(_Packing) + 1]
            model.hf_quantizer = stock.__new__(stock)
            own = {k: value for k, value in vars(self).items() if k not in vars(_Packing)}
            vars(model.hf_quantizer).update(own)
        if fill is not None:
            fill.finish()
        return model
