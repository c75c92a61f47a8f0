"""Pack the expert weights of a built model, in place.

Packing needs extra memory for one packed weight and a chunk of at most a few dozen MiB: each 16-bit
weight is freed once the packed one is on the module.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .detection.detect import detect
from .errors import ConfigError, DetectionError, QuantizationError, UnsupportedWeightError
from .hf.fill import check_weight, pack_parameter
from .hf.model import finish_packing
from .hf.switch import asked
from .layout import (
    LinearExperts,
    ModelLayout,
    Router,
    human_bytes,
    listed,
    name_pattern,
    unwrapped_name,
)
from .packing import parametrize
from .packing.decoders import keep_layout
from .packing.selection import ALREADY_QUANTIZED, QUANTIZED, SKIPPED, select_weights
from .packing.settings import CodecSettings
from .progress import Progress, reporting
from .world import offload


def quantize_experts(
    model: nn.Module,
    quantization_config: Any = None,
    *,
    missing_ok: bool = False,
    progress: bool | Progress | None = None,
) -> "QuantizationReport":
    """Pack every expert weight of a built model, in place.

    Weights keep their names: `module.gate_up_proj` gives the dequantized tensor in its original
    dtype. A second call changes nothing. Within `enabled(offload=True)` weights go to host memory.

    Args:
        model: On the CPU, on a device, or spread over devices; each weight is packed on its device.
        quantization_config: `BitsAndBytesConfig` or dict; None is `model.config`'s own. Never
            changed.
        missing_ok: Return an empty report for a model that has no expert weights.
        progress: True shows a bar; a callable gets (weights done, weights in all, next name).

    Returns a row for each weight, with bytes before and after. `print` it for a summary.

    Raises:
        ConfigError: The config is missing, of another method, for neither 4 nor 8 bit, or for
            another codec than that of experts that are packed already.
        DetectionError: The model has no expert weights.
        UnsupportedWeightError: A weight is on meta, sharded, or of a dtype that cannot be packed.
        NonFiniteWeightError: A weight holds NaN or inf. Nothing was changed, as with all the above.
        QuantizationError: Packing stopped half way; the message lists the packed weights.
    """
    config = quantization_config
    if config is None:
        config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None:
        raise ConfigError(
            "There is no quantization config: give a BitsAndBytesConfig, or load the model with "
            "one."
        )
    settings = CodecSettings.from_config(config)
    _check_config(model, settings)
    layout = detect(model)
    if not layout:
        return _nothing_found(layout, missing_ok)
    keep_layout(model)  # It may refuse: before anything is changed
    selections = select_weights(model, layout, settings)
    for param, status, _ in selections:
        if status == QUANTIZED:
            check_weight(param.name, _weight(model, param.name), settings)
    with reporting(progress, "Packing experts", "Packed experts") as report:
        rows = list[ReportRow]()
        done, offloads = list[str](), asked().offload
        total = sum(status == QUANTIZED for _, status, _ in selections)
        for param, status, reason in selections:
            name = param.name
            module, leaf = parametrize.owner_of(model, name)
            held = parametrize.is_packed(module, leaf)
            weight: Any = parametrize.read_packed(module, leaf) if held else _weight(model, name)
            before = after = weight.nbytes
            if status == QUANTIZED:
                report(len(done), total, name)
                try:
                    after = pack_parameter(model, param, weight, settings, offloads=offloads)
                except Exception as error:
                    raise QuantizationError(
                        f"Packing stopped at {name} after {len(done)} of {total} weights "
                        f"({error}). Packed: {', '.join(done) or 'none'}. All others, this one "
                        "included, are whole; calling again goes on from here."
                    ) from error
                done.append(name)
            del weight  # before the next is packed
            rows.append(ReportRow(name, status, reason, before, after))
        report(len(done), total, "")
    packed = {name for name, module, _ in parametrize.iter_packed(model)}
    served = finish_packing(model, layout, config, settings) if packed else set()
    if packed and asked().offload:
        offload(model)
    slow = []
    for entry in layout.modules:
        if entry.name in packed - served:
            sizes = (p.numel * getattr(torch, p.dtype_name).itemsize for p in entry.parameters)
            slow.append(SlowModule(entry.name, entry.class_name, sum(sizes)))
    routers = tuple(router for router in layout.routers if router.plain_linear or router.packed)
    return QuantizationReport(tuple(rows), tuple(slow), routers, layout.linear_experts)


@dataclass(frozen=True)
class ReportRow:
    """One expert parameter; tied parameters share a row."""

    name: str  # Full dotted name
    status: str  # "quantized" (by this call), "already_quantized" or "skipped"
    reason: str  # Why it was skipped; or ""
    bytes_before: int  # Bytes before the call
    bytes_after: int  # Bytes now, with statistics


@dataclass(frozen=True)
class SlowModule:
    """An experts module with a forward of its own, or packed by another tool.

    The layer's dequantized weights are alive while it runs, and until its backward has run.
    """

    name: str  # Dotted name
    class_name: str  # Its Python class
    decoded_bytes: int  # Bytes of its dequantized weights together


@dataclass(frozen=True)
class QuantizationReport:
    """The outcome of one `quantize_experts` call."""

    rows: tuple[ReportRow, ...] = ()  # One for each distinct expert parameter, in model order
    slow_modules: tuple[SlowModule, ...] = ()  # They dequantize a whole layer at a time
    linear_routers: tuple[Router, ...] = ()  # Plain Linear layers, which bitsandbytes packs
    linear_experts: tuple[LinearExperts, ...] = ()  # Lists of Linear layers: bitsandbytes' too

    @property
    def quantized(self) -> tuple[ReportRow, ...]:
        """Rows that this call packed."""
        return self._with(QUANTIZED)

    @property
    def already_quantized(self) -> tuple[ReportRow, ...]:
        """Rows packed before, by this package or another."""
        return self._with(ALREADY_QUANTIZED)

    @property
    def skipped(self) -> tuple[ReportRow, ...]:
        """Rows left unpacked, with reasons."""
        return self._with(SKIPPED)

    @property
    def bytes_before(self) -> int:
        """Bytes of all rows before the call."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Bytes of all rows after the call, statistics included."""
        return sum(row.bytes_after for row in self.rows)

    def _with(self, status: str) -> tuple[ReportRow, ...]:
        return tuple(row for row in self.rows if row.status == status)

    def __str__(self) -> str:
        total = (
            f"{len(self.quantized)} expert parameters quantized, {len(self.already_quantized)} "
            f"already quantized, {len(self.skipped)} skipped: {human_bytes(self.bytes_before)} -> "
            f"{human_bytes(self.bytes_after)}."
        )
        lines = [total, *_grouped(self.skipped, "Skipped")]
        lines += _grouped(tuple(row for row in self.already_quantized if row.reason), "Left alone")
        if self.slow_modules:
            worst = max(module.decoded_bytes for module in self.slow_modules)
            classes = ", ".join(sorted({module.class_name for module in self.slow_modules}))
            lines.append(
                f"{len(self.slow_modules)} modules ({classes}) have a forward of their own and "
                f"decode a whole layer, up to {human_bytes(worst)}, kept for backward without "
                "gradient checkpointing."
            )
        for packed, verb in ((True, "has packed"), (False, "packs when it loads the model")):
            if names := [one.name for one in self.linear_routers if one.packed == packed]:
                cure = "unless llm_int8_skip_modules names them"
                lines.append(f"Routers that bitsandbytes {verb}, {cure}: {_patterns(names)}.")
        if names := [experts.name for experts in self.linear_experts]:
            lines.append(f"Linear experts, which bitsandbytes packs itself: {_patterns(names)}.")
        return "\n".join(lines)


def _patterns(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(name_pattern(name) for name in names))


def _grouped(rows: tuple[ReportRow, ...], verb: str) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row.name)
    return [f"{verb}: {_patterns(names)} ({reason})." for reason, names in by_reason.items()]


def _nothing_found(layout: ModelLayout, missing_ok: bool) -> QuantizationReport:
    if missing_ok:
        return QuantizationReport(linear_experts=layout.linear_experts)
    if layout.linear_experts:
        names = listed([experts.name for experts in layout.linear_experts])
        raise DetectionError(
            f"The model's experts are lists of Linear layers ({names}), which bitsandbytes packs "
            "as it loads the model with the config; for LoRA name them in target_modules."
        )
    seen = listed([f"{item.name}: {item.reason}" for item in layout.rejected], separator="; ")
    said = "The model holds no expert weights; pass missing_ok=True where that is expected."
    raise DetectionError(f"{said} What looked like one: {seen}." if seen else said)


def _check_config(model: nn.Module, settings: CodecSettings) -> None:
    method, conflict = getattr(model, "quantization_method", None), None
    name = str(getattr(method, "value", method))
    kind, other = ("8bit", "4bit") if settings.codec.loads_in_8bit else ("4bit", "8bit")
    if method is not None and not name.startswith("bitsandbytes"):
        conflict = f"the model is already quantized with {name!r}"
    elif getattr(model, f"is_loaded_in_{other}", False):
        conflict = f"it asks for load_in_{kind}, and the model is already loaded in {other}"
    if conflict is not None:
        raise ConfigError(f"The quantization config cannot be followed: {conflict}.")
    for module_name, module, leaf in parametrize.iter_packed(model):
        own, asked = CodecSettings.of(parametrize.read_packed(module, leaf)), settings.describe()
        if not own.codec.is_kept and own.describe() != asked:
            raise ConfigError(
                f"{unwrapped_name(f'{module_name}.{leaf}'.lstrip('.'))} is packed as "
                f"{own.describe()}, and the quantization config asks for {asked}: packing again "
                "would round twice, so load the 16-bit checkpoint with this config, or give the "
                "config that the model was packed with."
            )


def _weight(model: nn.Module, name: str) -> Tensor:
    module, parameter = parametrize.owner_of(model, name)
    weight = module._parameters.get(parameter)
    if weight is None:
        raise UnsupportedWeightError(f"{name} is no plain parameter of its module any more.")
    return weight
