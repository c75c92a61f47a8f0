"""Post-build quantization: finds a built model's expert stacks and packs them in place.

    settings  the caller's config, or the model's own
    layout    detect(model)
    plan      what is packed, skipped, or packed already; everything that can be refused is refused
              here, before anything is touched
    pack      one stack at a time: pack, attach, let go of the 16-bit stack
    mark_quantized     the model says of itself what a bitsandbytes model says

The extra memory while packing is one stack's packed form and a chunk of at most a few dozen MiB: a
16-bit stack goes as soon as its packed form sits on the module. Nothing here keeps a reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .detection.detect import detect
from .errors import (
    ConfigError,
    DetectionError,
    NonFiniteWeightError,
    QuantizationError,
    UnsupportedWeightError,
)
from .hf import model as quantize_host
from .layout import ExpertParam, LinearExperts, ModelLayout, Router, name_pattern
from .packing import parametrize
from .packing.codec import PackedWeight, first_nonfinite, pack
from .packing.selection import (
    ALREADY_QUANTIZED,
    QUANTIZED,
    SKIPPED,
    WeightSelection,
    select_weights,
)
from .packing.settings import CodecSettings
from .packing.supported import why_not
from .progress import Progress, reporting


def quantize_experts(
    model: nn.Module,
    quantization_config: Any = None,
    *,
    missing_ok: bool = False,
    progress: bool | Progress | None = None,
) -> QuantizationReport:
    """Pack every expert stack of a built model, in place.

    Stacks keep their names: `module.gate_up_proj` gives the decoded tensor in its original dtype.
    Calling it again changes nothing.

    Args:
        model: On the CPU, on a device, or spread over devices; each stack is packed where it is.
        quantization_config: `BitsAndBytesConfig` or dict; None is `model.config`'s own. Never
            changed.
        missing_ok: Return an empty report for a model that has no expert stacks.
        progress: True shows a bar; a callable gets (stacks done, stacks in all, next stack's name).

    Returns:
        A row for each stack, with bytes before and after. `print` it for a summary.

    Raises:
        ConfigError: The config is missing, of another method, or asks for neither 4 nor 8 bit.
        DetectionError: The model has no expert stack.
        UnsupportedWeightError: A stack is on meta, sharded, or of a dtype that cannot be packed.
        NonFiniteWeightError: A stack holds NaN or inf. Nothing was changed, as with all the above.
        QuantizationError: Packing stopped half way; every stack is either whole or packed, and the
            message says which.
    """
    config = _config(model, quantization_config)
    settings = CodecSettings.from_config(config)
    conflict = quantize_host.check_method(model, settings)
    if conflict is not None:
        raise ConfigError(f"The quantization config cannot be followed: {conflict}.")
    layout = detect(model)
    if not layout:
        return _nothing_found(layout, missing_ok)
    jobs = select_weights(model, layout, config, settings)
    _refuse(model, [job.param for job in jobs if job.status == QUANTIZED], settings)
    rows = _run(model, jobs, settings, progress)
    packed = {name for name, module, _ in parametrize.iter_packed(model)}
    fast: set[str] = set()
    if packed:
        fast = _activate(model, layout)
        quantize_host.mark_quantized(model, config, settings)
    slow = tuple(
        SlowModule(module.name, module.class_name, sum(map(_decoded_bytes, module.parameters)))
        for module in layout.modules
        if module.name in packed and module.name not in fast
    )
    routers = tuple(router for router in layout.routers if router.plain_linear or router.packed)
    return QuantizationReport(rows, slow, routers, layout.linear_experts)


def _config(model: nn.Module, config: Any) -> Any:
    if config is None:
        config = getattr(getattr(model, "config", None), "quantization_config", None)
        if config is None:
            raise ConfigError(
                "There is no quantization config: give a BitsAndBytesConfig, or load the model "
                "with one."
            )
    return config


def _nothing_found(layout: ModelLayout, missing_ok: bool) -> QuantizationReport:
    if missing_ok:
        return QuantizationReport(linear_experts=layout.linear_experts)
    if layout.linear_experts:
        names = ", ".join(experts.name for experts in layout.linear_experts[:3])
        raise DetectionError(
            f"The model's experts are lists of Linear layers ({names}), which bitsandbytes packs "
            "itself: load the model with the BitsAndBytesConfig, and do not call this."
        )
    seen = "; ".join(f"{item.name}: {item.reason}" for item in layout.rejected[:3])
    more = len(layout.rejected) - 3
    looked = f" What looked like one: {seen}" if seen else ""
    looked += f" (and {more} more)." if more > 0 else ("." if seen else "")
    raise DetectionError(
        "The model holds no stack of expert weights; pass missing_ok=True where that is expected."
        + looked
    )


def _refuse(model: nn.Module, params: list[ExpertParam], settings: CodecSettings) -> None:
    """Raise for the first stack that cannot be packed, before any is."""
    for param in params:
        reason = why_not(_weight(model, param.name), settings)
        if reason is not None:
            raise UnsupportedWeightError(f"{param.name} {reason}. Nothing was changed.")
    for param in params:
        weight = _weight(model, param.name)
        index = first_nonfinite(weight)
        if index is not None:
            value = float(weight.detach()[index])
            raise NonFiniteWeightError(
                f"{param.name} holds {value} at index {list(index)}, and a block with it could not "
                "be decoded: repair the checkpoint. Nothing was changed."
            )


def _run(
    model: nn.Module,
    jobs: list[WeightSelection],
    settings: CodecSettings,
    progress: bool | Progress | None,
) -> tuple[ReportRow, ...]:
    rows: list[ReportRow] = []
    total = sum(job.status == QUANTIZED for job in jobs)
    done: list[str] = []
    with reporting(progress, "Packing experts", "Packed experts") as tell:
        for job in jobs:
            name = job.param.name
            if job.status == QUANTIZED:
                tell(len(done), total, name)
                try:
                    rows.append(_pack_one(model, job.param, settings))
                except Exception as error:
                    raise _half_way(error, name, done, total) from error
                done.append(name)
            else:
                held = _held_bytes(model, name)
                rows.append(ReportRow(name, job.status, job.reason, held, held))
        tell(len(done), total, "")
    return tuple(rows)


def _pack_one(model: nn.Module, param: ExpertParam, settings: CodecSettings) -> ReportRow:
    before = _weight(model, param.name).nbytes
    packed = pack(_weight(model, param.name), settings)
    _attach_everywhere(model, param, packed)
    return ReportRow(param.name, QUANTIZED, "", before, packed.nbytes)


def _attach_everywhere(model: nn.Module, param: ExpertParam, packed: PackedWeight) -> None:
    """Attach to the stack's module and to every module that shares it; all or none."""
    attached: list[tuple[nn.Module, str]] = []
    weight = _weight(model, param.name)
    try:
        for name in param.names:
            module, parameter = _owner(model, name)
            if parametrize.is_packed(module, parameter):
                continue  # an alias through a shared module
            attached.append((module, parameter))
            parametrize.attach(module, parameter, packed)
    except BaseException:
        for module, parameter in attached:
            if parametrize.is_packed(module, parameter):
                parametrize.detach(module, parameter, weight)
        raise


def _half_way(error: Exception, name: str, done: list[str], total: int) -> QuantizationError:
    packed = ", ".join(done) if done else "none"
    return QuantizationError(
        f"Packing stopped at {name} after {len(done)} of {total} stacks ({error}). Packed: "
        f"{packed}. All others, this one included, are whole; calling again goes on from here."
    )


def _activate(model: nn.Module, layout: ModelLayout) -> set[str]:
    """Switch on the experts forward where the class dispatches and a stack is our own."""
    from .experts import forward

    names = []
    for entry in layout.modules:
        module = model.get_submodule(entry.name)
        packed = parametrize.packed_names(module)
        if entry.dispatches and any(not parametrize.is_foreign(module, name) for name in packed):
            names.append(entry.name)
    return set(names) - set(forward.activate(model, names))


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module_name, _, parameter = name.rpartition(".")
    return model.get_submodule(module_name), parameter


def _weight(model: nn.Module, name: str) -> Tensor:
    module, parameter = _owner(model, name)
    weight = module._parameters.get(parameter)
    if weight is None:
        raise UnsupportedWeightError(f"{name} is no plain parameter of its module any more.")
    return weight


def _held_bytes(model: nn.Module, name: str) -> int:
    module, parameter = _owner(model, name)
    if parametrize.is_packed(module, parameter):
        return parametrize.read_packed(module, parameter).nbytes
    return _weight(model, name).nbytes


def _decoded_bytes(param: ExpertParam) -> int:
    import torch

    dtype = param.dtype
    itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 2
    return param.numel * itemsize


@dataclass(frozen=True)
class ReportRow:
    """One expert parameter; tied parameters share a row.

    Attributes:
        name: Full dotted name.
        status: "quantized" (by this call), "already_quantized" or "skipped".
        reason: Why it was skipped, or who had quantized it; empty where there is nothing to say.
        bytes_before: Bytes it held before the call.
        bytes_after: Bytes it holds now, statistics included.
    """

    name: str
    status: str
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class SlowModule:
    """An experts module that the package's own experts forward does not serve.

    Its class does not dispatch through transformers' experts interface, or another tool packed it.

    Its own forward reads the packed weights through the parametrization, so that the decoded stacks
    of the layer are alive while it runs, and until its backward has run where gradients are needed.

    Attributes:
        name: Dotted name.
        class_name: Its Python class.
        decoded_bytes: Bytes of its decoded stacks together.
    """

    name: str
    class_name: str
    decoded_bytes: int


@dataclass(frozen=True)
class QuantizationReport:
    """The outcome of one `quantize_experts` call.

    Attributes:
        rows: One for each distinct expert parameter, in the model's order.
        slow_modules: Modules that hold packed stacks and decode a layer at a time.
        linear_routers: Routers that are plain Linear layers, which bitsandbytes packs with all
            others when it loads a model, unless `llm_int8_skip_modules` names them.
        linear_experts: Experts that are lists of Linear layers, which bitsandbytes packs itself.
    """

    rows: tuple[ReportRow, ...] = ()
    slow_modules: tuple[SlowModule, ...] = ()
    linear_routers: tuple[Router, ...] = ()
    linear_experts: tuple[LinearExperts, ...] = ()

    @property
    def quantized(self) -> tuple[ReportRow, ...]:
        """What this call packed."""
        return self._with(QUANTIZED)

    @property
    def already_quantized(self) -> tuple[ReportRow, ...]:
        """What was packed before, by this package or another."""
        return self._with(ALREADY_QUANTIZED)

    @property
    def skipped(self) -> tuple[ReportRow, ...]:
        """What was left as it is, with reasons."""
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
                f"{len(self.slow_modules)} modules ({classes}) do not run through this "
                f"package's experts forward and decode a whole layer at a time: up to "
                f"{human_bytes(worst)} a layer, kept for backward without gradient checkpointing."
            )
        packed = [router.name for router in self.linear_routers if router.packed]
        plain = [router.name for router in self.linear_routers if not router.packed]
        if packed:
            lines.append(
                f"Routers that bitsandbytes has packed with the other Linear layers: "
                f"{_patterns(packed)}; name them in llm_int8_skip_modules to keep them whole."
            )
        if plain:
            lines.append(
                f"Routers that are plain Linear layers: {_patterns(plain)}; bitsandbytes packs "
                "them when it loads this model, unless llm_int8_skip_modules names them."
            )
        if self.linear_experts:
            names = _patterns([experts.name for experts in self.linear_experts])
            lines.append(
                f"Experts that are Linear layers, which bitsandbytes packs itself: {names}."
            )
        return "\n".join(lines)


def human_bytes(count: int) -> str:
    """A count of bytes in binary units: `16.8 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _patterns(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(name_pattern(name) for name in names))


def _grouped(rows: tuple[ReportRow, ...], verb: str) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row.name)
    return [f"{verb}: {_patterns(names)} ({reason})." for reason, names in by_reason.items()]


__all__ = [
    "QuantizationReport",
    "ReportRow",
    "SlowModule",
    "quantize_experts",
]
