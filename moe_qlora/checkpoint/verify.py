"""Verify a checkpoint folder: is it whole, and how large is the quantization error?

packed folder   manifest, config.json, checksums, and the statistics of packed weights
plain folder    index, headers, and that all weights, dequantized if they are codes, are finite
"""

from collections.abc import Container, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import dot_natural_key

from ..detection.detect import detect
from ..errors import CheckpointError, ConfigError, UnsupportedWeightError
from ..layout import listed
from ..models import named
from ..models.files import read_json
from ..packing import codec
from ..packing.settings import FLOAT_DTYPES
from ..progress import Progress
from .conversion import Base, Group, resolve_checkpoint
from .folder import INDEX_SUFFIX, Checkpoint, check_folder, inside, left_behind
from .manifest import CONFIG, FolderCheck, PackedWeights, is_packed, own_config
from .prequantized import METHODS, PrequantizedCheckpoint, maker_method, open_plain


@dataclass(frozen=True, slots=True)
class WeightError:
    """The quantization error of a weight: Frobenius norm of the difference over the source's."""

    name: str
    expert: bool  # a fused expert weight; otherwise a Linear layer's weight
    shape: tuple[int, ...]  # decoded
    relative: float  # error of the whole weight
    experts: tuple[float, ...]  # error of each expert; for a Linear layer, `relative`


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`."""

    folder: Path
    kind: str = "plain"  # or experts' packed type; "unknown"
    files: int = 0  # safetensors files that belong to the checkpoint
    tensors: int = 0
    experts: int = 0  # packed expert weights
    linears: int = 0  # packed Linear layers
    nbytes: int = 0  # of all stored tensors
    problems: tuple[str, ...] = ()  # sentences on damage
    warnings: tuple[str, ...] = ()  # sentences on harmless oddities
    errors: tuple[WeightError, ...] = ()  # given a source
    method: str = ""  # quant_method of a prequantized folder
    dequantized: int = 0  # prequantized weights, dequantized when read

    @property
    def good(self) -> bool:
        """True if nothing is damaged."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for `json.dumps`."""
        return asdict(self) | {"folder": str(self.folder), "good": self.good}


def verify(
    folder: str | Path,
    against: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a checkpoint folder, packed or plain; nothing is written.

    `against` is the checkpoint that it was packed from; damage is in the report's `problems` and
    raises nothing. A CheckpointError: `folder` is no checkpoint, or `against` of another model.
    """
    folder = Path(folder)
    check_folder(folder)
    named.check_no_adapter(folder)
    tell = progress or (lambda done, total, name: None)
    try:
        opened = FolderCheck(folder) if is_packed(folder) else None
    except CheckpointError as error:
        return VerifyReport(folder, "unknown", problems=(str(error),))
    if opened is None and against is not None:
        raise CheckpointError(f"{folder} was not packed by moe_qlora: there is nothing to compare.")
    if opened is None:
        return _verify_plain(folder, tell)
    with opened.checkpoint as checkpoint:
        manifest, now = opened.manifest, own_config(folder)
        damage, written = [*opened.damage()], manifest.config
        if names := [n for n in sorted({*written, *now}) if written.get(n, 0) != now.get(n, 0)]:
            changed = f"is not the one that was written: it changed in {listed(names, 5)}."
            damage.append(f"{folder / CONFIG} {changed}")
        weights = PackedWeights(manifest, checkpoint)
        damage += _wrong_values(checkpoint, tell, weights, manifest.experts)
        kinds = {manifest.settings_of(name).kind for name in manifest.experts}
        errors: list[WeightError] = []
        if against is not None and not damage:
            errors += _errors(opened, Path(against), trust_remote_code, tell)
        return VerifyReport(
            folder, ", ".join(sorted(kinds)) or str(manifest.codec["kind"]), len(checkpoint.files),
            len(checkpoint), len(manifest.experts), len(weights.keys) - len(manifest.experts),
            sum(info.nbytes for info in checkpoint.values()), tuple(damage),
            tuple(_strays(folder, checkpoint)), tuple(errors),
        )  # fmt: skip


def _verify_plain(folder: Path, tell: Progress) -> VerifyReport:
    names = {file.name for file in folder.iterdir()}
    if CONFIG not in names and not any(n.endswith((".safetensors", INDEX_SUFFIX)) for n in names):
        raise CheckpointError(f"{folder} holds no checkpoint.")
    method = ""
    try:
        config = read_json(inside(folder, CONFIG)) if CONFIG in names else {}
        method = maker_method(config) or ""
        if not method and "quantization_config" in config and "auto_map" not in config:
            with suppress(CheckpointError, ConfigError):  # but not codes of single experts
                named.build(named.resolve(folder))
        checkpoint = open_plain(folder)
    except (CheckpointError, UnsupportedWeightError) as error:
        if method and method not in METHODS:  # it may be whole, for those who read it
            raise
        return VerifyReport(folder, method=method, problems=(str(error),))
    with checkpoint:
        stored, dequantized = checkpoint, sum(map(checkpoint.is_dequantized, checkpoint))
        if isinstance(checkpoint, PrequantizedCheckpoint):
            stored, method = checkpoint.stored, checkpoint.method
        return VerifyReport(
            folder, files=len(checkpoint.files), tensors=len(stored),
            nbytes=sum(info.nbytes for info in stored.values()),
            problems=tuple(_wrong_values(checkpoint, tell)),
            warnings=tuple(_strays(folder, checkpoint)), method=method, dequantized=dequantized,
        )  # fmt: skip


def _strays(folder: Path, checkpoint: Checkpoint) -> Iterator[str]:
    read = {file.name for file in checkpoint.files}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name not in read and not file.name.startswith("adapter_"):
            yield f"{file} is in no index or manifest, and is not read."
    for path in left_behind(folder):
        yield f"{path} is left of an interrupted save."


def _wrong_values(
    checkpoint: Checkpoint,
    tell: Progress,
    packed: PackedWeights | None = None,
    experts: Container[str] = (),
) -> Iterator[str]:
    names = {} if packed is None else packed.keys
    owned = {key for name, keys in names.items() if name in experts for key in keys}
    steps = [key for key in checkpoint if key in names or key not in owned]
    for number, key in enumerate(steps):
        tell(number, len(steps), key)
        info = checkpoint.info(key)
        try:
            if packed is not None and key in experts:
                packed.read(key)  # which looks at its statistics
            elif info.dtype in FLOAT_DTYPES and info.nbytes and key not in names:
                for part in Group((key,), {key: info.shape}).slices():
                    rows = checkpoint.read(key, *part).reshape(1, -1)
                    # Bounds that bound nothing are infinite (gemma4's input_min), weights never.
                    is_bound = len(info.shape) < 2 and not bool(rows.isnan().any())
                    if not is_bound and codec.first_nonfinite(rows) is not None:
                        raise CheckpointError(f"{info.file}: {key} holds NaN or inf.")
        except CheckpointError as error:
            yield str(error)
    tell(len(steps), len(steps), "")


def _errors(
    opened: FolderCheck, source: Path, trust_remote_code: bool, tell: Progress
) -> Iterator[WeightError]:
    resolved = resolve_checkpoint(source, trust_remote_code)
    model: Any = named.build(resolved, trust_remote_code=trust_remote_code)
    counts = {name: param.num_experts for param in detect(model).experts for name in param.names}
    weights = PackedWeights(opened.manifest, opened.checkpoint, model.state_dict())
    names = sorted(weights.keys, key=dot_natural_key)
    with closing(Base(source, model)) as base:
        for number, name in enumerate(names):
            tell(number, len(names), name)
            entry = opened.manifest.experts.get(name)
            others = (name, *(entry.aliases if entry else ()))
            own = next((other for other in others if other in base.layout.by_name), name)
            group = base.layout.by_name.get(own)
            if group is None or (entry and group.shapes[own] != entry.shape):
                shape = f" in the shape {entry.shape}" if entry else ""
                raise CheckpointError(f"{source} is of another model: it lacks {name}{shape}.")
            packed = weights.read(name)
            # squares of the differences, and of the source, by row
            squares = torch.zeros(2, packed.shape[0], dtype=torch.float64)
            for start, stop in group.slices():
                last = packed.shape[0] if stop is None else stop
                value = base.values(group, start, stop, exact=False)[own].float()
                wrong = codec.unpack_range(packed, start, last, dtype=torch.float32) - value
                for at, part in enumerate((wrong, value)):
                    squares[at, start:last] = part.flatten(1).double().square().sum(1)
            each = squares.view(2, counts.get(own, 1) if entry else 1, -1).sum(2)
            wrong, right = torch.cat((squares.sum(1, True), each), 1)
            relative, *errors = (wrong / right.clamp_min(1e-30)).sqrt().tolist()  # 0 of zeros
            yield WeightError(name, entry is not None, packed.shape, relative, tuple(errors))
    tell(len(names), len(names), "")
