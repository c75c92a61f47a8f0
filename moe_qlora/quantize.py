"""Post-build quantization: finds a built model's expert stacks and packs them in place.

    settings  the caller's config, or the model's own
    layout    detect(model)
    plan      what is packed, skipped, or packed already; everything that can be refused is refused
              here, before anything is touched
    pack      one stack at a time: pack, attach, let go of the 16-bit stack
    adopt     the model says of itself what a bitsandbytes model says

The extra memory while packing is one stack's packed form and a chunk of at most a few dozen MiB: a
16-bit stack goes as soon as its packed form sits on the module. Nothing here keeps a reference.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from . import quantize_host, storage
from .codec import CodecSettings, PackedStack, first_nonfinite, pack, why_not
from .detect import detect
from .errors import (
    ConfigError,
    DetectionError,
    NonFiniteWeightError,
    QuantizationError,
    UnsupportedWeightError,
)
from .layout import ExpertParam, ModelLayout
from .progress import Progress, reporting
from .quantize_report import (
    ALREADY_QUANTIZED,
    QUANTIZED,
    SKIPPED,
    QuantizationReport,
    ReportRow,
    SlowModule,
)

__all__ = ["QuantizationReport", "ReportRow", "SlowModule", "quantize_experts"]


@dataclass
class _Job:
    """One stack and what becomes of it."""

    param: ExpertParam
    status: str
    reason: str = ""


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
    jobs = _plan(model, layout, config, settings)
    _refuse(model, [job.param for job in jobs if job.status == QUANTIZED], settings)
    rows = _run(model, jobs, settings, progress)
    packed = {name for name, module, _ in storage.iter_packed(model)}
    fast: set[str] = set()
    if packed:
        fast = _activate(model, layout)
        quantize_host.adopt(model, config, settings)
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


def _plan(
    model: nn.Module, layout: ModelLayout, config: Any, settings: CodecSettings
) -> list[_Job]:
    _warn_unmatched(model, settings.skip_modules)
    theirs = _target_parameters(config)
    jobs = []
    for param in layout.experts:
        module = model.get_submodule(param.module_name)
        skip = _skipping_pattern(param, settings.skip_modules)
        if storage.is_packed(module, param.parameter_name):
            foreign = storage.is_foreign(module, param.parameter_name)
            reason = "packed by bitsandbytes' own helper" if foreign else ""
            jobs.append(_Job(param, ALREADY_QUANTIZED, reason))
        elif any(_covers(pattern, param) for pattern in theirs):
            reason = "left to the config's own target_parameters"
            jobs.append(_Job(param, SKIPPED, reason))
        elif skip is not None:
            jobs.append(_Job(param, SKIPPED, f"llm_int8_skip_modules names {skip!r}"))
        else:
            jobs.append(_Job(param, QUANTIZED))
    return jobs


def stacks_to_pack(
    model: nn.Module, layout: ModelLayout, config: Any, settings: CodecSettings
) -> list[ExpertParam]:
    """The stacks of a model that `quantize_experts` would pack, the caller's skips left out."""
    jobs = _plan(model, layout, config, settings)
    return [job.param for job in jobs if job.status == QUANTIZED]


def _names(param: ExpertParam) -> Iterator[str]:
    for name in (param.name, *param.aliases):
        yield name
        yield name.rpartition(".")[0]


def _skipping_pattern(param: ExpertParam, patterns: tuple[str, ...]) -> str | None:
    """The first pattern that takes the stack or its module out, by transformers' own rule."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    for pattern in patterns:
        if not all(should_convert_module(name, [pattern]) for name in _names(param)):
            return pattern
    return None


def _warn_unmatched(model: nn.Module, patterns: tuple[str, ...]) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in model.named_parameters()]
    names += [f"{name}.{parameter}" for name, _, parameter in storage.iter_packed(model)]
    for pattern in patterns:
        try:
            matched = any(not should_convert_module(name, [pattern]) for name in names)
        except re.error as error:
            raise ConfigError(
                f"llm_int8_skip_modules holds {pattern!r}, which is no valid pattern: {error}."
            ) from error
        if not matched:
            warnings.warn(
                f"llm_int8_skip_modules names {pattern!r}, which matches nothing in the model.",
                UserWarning,
                stacklevel=4,
            )


def _target_parameters(config: Any) -> tuple[str, ...]:
    """Patterns of a config that knows how to have bitsandbytes pack parameters itself."""
    if isinstance(config, Mapping):
        theirs = config.get("target_parameters")
    else:
        theirs = getattr(config, "target_parameters", None)
    return (theirs,) if isinstance(theirs, str) else tuple(theirs or ())


def _covers(pattern: str, param: ExpertParam) -> bool:
    for name in (param.name, *param.aliases):
        if name == pattern or name.endswith("." + pattern):
            return True
        try:
            if re.fullmatch(pattern, name):
                return True
        except re.error:
            continue
    return False


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
    model: nn.Module, jobs: list[_Job], settings: CodecSettings, progress: bool | Progress | None
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


def _attach_everywhere(model: nn.Module, param: ExpertParam, packed: PackedStack) -> None:
    """Attach to the stack's module and to every module that shares it; all or none."""
    attached: list[tuple[nn.Module, str]] = []
    weight = _weight(model, param.name)
    try:
        for name in (param.name, *param.aliases):
            module, parameter = _owner(model, name)
            if storage.is_packed(module, parameter):
                continue  # an alias through a shared module
            attached.append((module, parameter))
            storage.attach(module, parameter, packed)
    except BaseException:
        for module, parameter in attached:
            if storage.is_packed(module, parameter):
                storage.detach(module, parameter, weight)
        raise


def _half_way(error: Exception, name: str, done: list[str], total: int) -> QuantizationError:
    packed = ", ".join(done) if done else "none"
    return QuantizationError(
        f"Packing stopped at {name} after {len(done)} of {total} stacks ({error}). Packed: "
        f"{packed}. All others, this one included, are whole; calling again goes on from here."
    )


def _activate(model: nn.Module, layout: ModelLayout) -> set[str]:
    """Switch on the experts forward where the class dispatches and a stack is our own."""
    from . import experts

    names = []
    for entry in layout.modules:
        module = model.get_submodule(entry.name)
        packed = storage.packed_names(module)
        if entry.dispatches and any(not storage.is_foreign(module, name) for name in packed):
            names.append(entry.name)
    return set(names) - set(experts.activate(model, names))


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
    if storage.is_packed(module, parameter):
        return storage.read_packed(module, parameter).nbytes
    return _weight(model, name).nbytes


def _decoded_bytes(param: ExpertParam) -> int:
    import torch

    dtype = param.dtype
    itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 2
    return param.numel * itemsize
