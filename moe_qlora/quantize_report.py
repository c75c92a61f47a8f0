"""What `quantize_experts` did, as frozen records that print as a short summary."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import LinearExperts, Router, name_pattern

QUANTIZED = "quantized"
ALREADY_QUANTIZED = "already_quantized"
SKIPPED = "skipped"


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
