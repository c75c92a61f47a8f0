"""Is a checkpoint folder whole, and what did packing cost its weights?

    packed folder   manifest, config.json, checksums, shapes, and what no checksum can tell: whether
                    the statistics of every packed weight are such as bitsandbytes writes
    plain folder    index, headers, and that all weights are finite

With the 16-bit source at hand, each packed weight is decoded and compared with the one that it was
packed from, a few experts at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import build
from ..detection.detect import detect
from ..errors import CheckpointError
from ..layout import dtype_name
from ..packing import codec
from ..packing.format import packed_tensors
from ..packing.settings import FLOAT_DTYPES
from ..progress import Progress
from .base import PackedWeights, PlainBase, packed_names
from .conversion import Group
from .integrity import check_folder, open_checkpoint
from .manifest import CONFIG, Manifest, has_manifest, is_packed
from .reader import INDEX_SUFFIX, Checkpoint, inside, read_json
from .save import STAGING, is_save_file
from .writer import partial_of

_STATE = ".quant_state.bitsandbytes__"


@dataclass(frozen=True, slots=True)
class WeightError:
    """How far a packed weight is from its source.

    All errors are relative: the Frobenius norm of the difference over that of the source.

    Attributes:
        name: Of the parameter.
        expert: Whether it is a stack of experts; otherwise it is a Linear layer's weight.
        shape: Decoded.
        relative: Error of the whole.
        experts: Error of each expert; of a Linear layer, of the whole.
        max_abs: Largest difference of any one weight.
    """

    name: str
    expert: bool
    shape: tuple[int, ...]
    relative: float
    experts: tuple[float, ...]
    max_abs: float

    @property
    def worst(self) -> int:
        """The expert with the largest error."""
        return max(range(len(self.experts)), key=self.experts.__getitem__)


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        folder: That was checked.
        kind: "nf4", "fp4", "int8", or "plain".
        files: Safetensors files that belong to the checkpoint.
        tensors: Stored tensors.
        experts: Packed stacks of experts.
        linears: Packed Linear layers.
        nbytes: Of all stored tensors.
        problems: What is damaged, a sentence each.
        warnings: What is odd, and harmless.
        errors: Of each packed weight against its source, where one was given.
    """

    folder: Path
    kind: str = "plain"
    files: int = 0
    tensors: int = 0
    experts: int = 0
    linears: int = 0
    nbytes: int = 0
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: tuple[WeightError, ...] = field(default=())

    @property
    def good(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Everything, for `json.dumps`; an infinite error is None."""
        value = asdict(self) | {"folder": str(self.folder), "good": self.good}
        for entry, error in zip(value["errors"], self.errors, strict=True):
            entry["worst"] = error.worst
            entry["relative"] = _finite(error.relative)
            entry["experts"] = [_finite(one) for one in error.experts]
        return value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def verify(
    folder: str | Path,
    against: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a checkpoint folder; nothing is written.

    Args:
        folder: Packed by this package, or a plain one.
        against: The 16-bit checkpoint that it was packed from.
        trust_remote_code: Run model code that `against` brings.
        progress: Called with what is done, how much there is, and a name.

    Returns:
        What was found. Damage is in `problems` and raises nothing.

    Raises:
        CheckpointError: `folder` is no checkpoint, or `against` is none or of another model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: name one that holds a checkpoint.")
    tell = progress or (lambda done, total, name: None)
    if not _is_packed(folder):
        if against is not None:
            raise CheckpointError(
                f"{folder} was not packed by moe_qlora, so that there is nothing to compare."
            )
        return _verify_plain(folder, tell)
    report, manifest = _verify_packed(folder, tell)
    if against is None or manifest is None or report.problems:
        return report
    source = Path(against)
    errors = tuple(_errors(folder, manifest, source, trust_remote_code, tell))
    return VerifyReport(**{**_fields(report), "errors": errors})


def _fields(report: VerifyReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__dataclass_fields__}


def _is_packed(folder: Path) -> bool:
    """Whether a config or a manifest says so: damage to config.json must not hide the other."""
    try:
        packed = is_packed(folder)
    except CheckpointError:
        packed = False
    return packed or has_manifest(folder)


# --- packed folders -----------------------------------------------------------------------------


def _verify_packed(folder: Path, tell: Progress) -> tuple[VerifyReport, Manifest | None]:
    try:
        if not is_packed(folder):
            raise CheckpointError(_why_unmarked(folder / CONFIG))
        manifest = check_folder(folder)
    except CheckpointError as error:
        return VerifyReport(folder, "unknown", problems=(str(error),)), None
    problems = _config_problems(folder, manifest)
    packed = packed_names(manifest)
    files = [inside(folder, name) for name in manifest.shards]
    with Checkpoint.of_files(files) as checkpoint:
        owned = {key for keys in packed.values() for key in keys}
        steps = [*packed, *(key for key in checkpoint if key not in owned)]
        for number, name in enumerate(steps):
            tell(number, len(steps), name)
            if name in packed:
                problems += _statistics_problems(checkpoint, manifest, name, packed[name])
            elif not _is_sane(checkpoint, name):
                problems.append(f"{checkpoint.info(name).file}: {name} holds NaN or inf.")
        tell(len(steps), len(steps), "")
        report = VerifyReport(
            folder,
            str(manifest.codec["kind"]),
            len(files),
            len(checkpoint),
            len(manifest.experts),
            len(packed.keys() - manifest.experts.keys()),
            sum(checkpoint.info(key).nbytes for key in checkpoint),
            tuple(problems),
            tuple(_leftovers(folder, manifest)),
        )
    return report, manifest


def _why_unmarked(config: Path) -> str:
    if not config.exists():
        return f"{config} is missing: copy the whole folder."
    return f"{config} does not say that the folder is packed: it was overwritten."


def _config_problems(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with config.json, whose every byte follows from the manifest."""
    file = inside(folder, CONFIG)
    if file.read_bytes() == manifest.config_bytes():
        return []
    written, config = json.loads(manifest.config_bytes()), read_json(file)
    names = [
        name
        for name in sorted({*written, *config})
        if written.get(name) != config.get(name) or (name in written) != (name in config)
    ]
    changed = f"it changed in {', '.join(names[:5])}" if names else "its layout changed"
    return [f"{file} is not the one that was written: {changed}."]


def _statistics_problems(
    checkpoint: Checkpoint, manifest: Manifest, name: str, keys: tuple[str, ...]
) -> list[str]:
    """What of a packed weight's statistics bitsandbytes would not have written."""
    where = f"{checkpoint.info(name).file}: {name}"
    parts = {key.removeprefix(name): key for key in keys}
    scales = [key for key in keys if key.endswith(".SCB")]
    if manifest.codec["kind"] == "int8":
        if not scales:
            return [f"{where} has no scales."]
        return _scale_problems(where, "scale", checkpoint.read(scales[0]))
    problems = []
    wanted = packed_tensors((1, 2), manifest.settings)
    lacking = [end for end in wanted if end not in parts]
    if lacking:
        return [f"{where} lacks {name}{lacking[0]}."]
    absmax = checkpoint.read(parts[".absmax"])
    if absmax.dtype != wanted[".absmax"].dtype:
        problems.append(f"{where} has absmax of {absmax.dtype}, not {wanted['.absmax'].dtype}.")
    if absmax.is_floating_point():
        problems += _scale_problems(where, "absmax", absmax)
    for end, table in _tables(manifest.codec).items():
        if not torch.equal(checkpoint.read(parts[end]), table):
            problems.append(f"{where}{end} is not the code table of bitsandbytes.")
    if ".nested_absmax" in wanted:
        nested = checkpoint.read(parts[".nested_absmax"])
        problems += _scale_problems(where, "nested absmax", nested)
    record = checkpoint.read(parts[f"{_STATE}{manifest.codec['kind']}"])
    shape = manifest.experts[name].shape if name in manifest.experts else None
    return problems + _record_problems(where, record, manifest, shape)


def _scale_problems(where: str, what: str, scales: Tensor) -> list[str]:
    """A scale of 0 is that of a block of zeros."""
    bad = ~(scales.isfinite() & (scales >= 0))
    if not bool(bad.any()):
        return []
    first = int(bad.flatten().nonzero()[0])
    value = float(scales.flatten()[first])
    return [f"{where} has the {what} {value} at {first}, which is not finite and 0 or more."]


def _tables(settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """bitsandbytes' code tables, by the end of their key."""
    cpu = torch.device("cpu")
    tables = {".quant_map": codec.bnb.get_4bit_type(settings["kind"], device=cpu)}
    if settings["double_quant"]:
        tables[".nested_quant_map"] = codec.bnb.create_dynamic_map()
    return tables


def _record_problems(
    where: str, record: Tensor, manifest: Manifest, shape: tuple[int, ...] | None
) -> list[str]:
    """bitsandbytes' record of what is no tensor: JSON in bytes."""
    try:
        said = json.loads(bytes(record.tolist()).decode("utf-8"))
        found = (said["quant_type"], said["blocksize"], said["dtype"])
        offset = float(said["nested_offset"]) if manifest.codec["double_quant"] else 0.0
        other_shape = shape is not None and tuple(said["shape"]) != shape
    except (ValueError, KeyError, TypeError) as error:
        return [f"{where} has a record of its settings that cannot be read ({error!r})."]
    known = {dtype_name(dtype) for dtype in FLOAT_DTYPES}
    saved = (manifest.codec["kind"], manifest.codec["blocksize"])
    if found[:2] != saved or found[2] not in known or other_shape:
        return [f"{where} says of itself {said!r}, the manifest {saved} {shape or ''}."]
    if not math.isfinite(offset):
        return [f"{where} has the nested offset {offset}."]
    return []


def _leftovers(folder: Path, manifest: Manifest) -> Iterator[str]:
    """What lies in or beside a packed folder and does not belong to it."""
    if partial_of(folder).exists():
        yield f"{partial_of(folder)} is left of an interrupted save: remove it."
    names = {*manifest.shards, manifest.file_name}
    for file in sorted(folder.iterdir()):
        if file.name == STAGING or (is_save_file(file.name) and file.name not in names):
            yield f"{file} is left of another save: the next save removes it."
        elif file.name not in names and _is_weights(file.name):
            yield f"{file} is no file of the packed model, and is not read."


def _is_weights(name: str) -> bool:
    ends = name.endswith((".safetensors", INDEX_SUFFIX, ".bin"))
    return ends and not name.startswith(("adapter_", "training_args"))


# --- plain folders ------------------------------------------------------------------------------


def _verify_plain(folder: Path, tell: Progress) -> VerifyReport:
    names = sorted(file.name for file in folder.iterdir())
    weights = [name for name in names if name.endswith((".safetensors", INDEX_SUFFIX))]
    if not weights and CONFIG not in names:
        raise CheckpointError(
            f"{folder} holds no checkpoint: neither safetensors files nor config.json."
        )
    problems: list[str] = []
    if CONFIG in names:
        try:
            read_json(folder / CONFIG)
        except CheckpointError as error:
            problems.append(str(error))
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        return VerifyReport(folder, problems=(*problems, str(error)))
    with checkpoint:
        for number, key in enumerate(checkpoint):
            tell(number, len(checkpoint), key)
            if not _is_sane(checkpoint, key):
                problems.append(f"{checkpoint.info(key).file}: {key} holds NaN or inf.")
        tell(len(checkpoint), len(checkpoint), "")
        read = {file.name for file in checkpoint.files}
        strays = [n for n in names if n.endswith(".safetensors") and n not in read]
        return VerifyReport(
            folder,
            files=len(read),
            tensors=len(checkpoint),
            nbytes=sum(checkpoint.info(key).nbytes for key in checkpoint),
            problems=tuple(problems),
            warnings=tuple(f"{folder / name} is in no index, and is not read." for name in strays),
        )


def _is_sane(checkpoint: Checkpoint, key: str) -> bool:
    info = checkpoint.info(key)
    if info.dtype not in FLOAT_DTYPES or not info.nbytes:
        return True
    tensor = checkpoint.read(key)
    if tensor.dim() < 2:
        # Bounds that bound nothing are infinite (gemma4's input_min), weights never are.
        return not bool(tensor.isnan().any())
    return codec.first_nonfinite(tensor.reshape(1, -1)) is None


# --- against the source -------------------------------------------------------------------------


def _errors(
    folder: Path, manifest: Manifest, source: Path, trust_remote_code: bool, tell: Progress
) -> Iterator[WeightError]:
    if not source.is_dir() or _is_packed(source):
        raise CheckpointError(f"{source} is no 16-bit checkpoint folder to compare with.")
    found = build.resolve(str(source), trust_remote_code=trust_remote_code)
    model: Any = build.build(found, trust_remote_code=trust_remote_code)
    counts = {name: param.num_experts for param in detect(model).experts for name in param.names}
    files = [inside(folder, name) for name in manifest.shards]
    with Checkpoint.of_files(files) as checkpoint, closing(PlainBase(source, model)) as base:
        weights = PackedWeights(folder, manifest, checkpoint, model)
        groups = {name: group for group in base.layout.groups for name in group.shapes}
        names = {name: _source_name(name, manifest, groups, source) for name in weights.keys}
        order = sorted(weights.keys, key=_natural)
        for number, name in enumerate(order):
            tell(number, len(order), name)
            other = names[name]
            count = counts.get(name, counts.get(other)) if name in manifest.experts else None
            yield _weight_error(base, groups[other], other, weights, name, count)
        tell(len(order), len(order), "")


def _source_name(name: str, manifest: Manifest, groups: Mapping[str, Group], source: Path) -> str:
    """A packed weight's name in the source, which may hold a tied one by another name."""
    entry = manifest.experts.get(name)
    found = next((n for n in (name, *(entry.aliases if entry else ())) if n in groups), None)
    if found is None:
        raise CheckpointError(f"{source} does not hold {name}: it is of another model.")
    if entry is not None and tuple(groups[found].shapes[found]) != entry.shape:
        raise CheckpointError(
            f"{source} holds {found} of shape {tuple(groups[found].shapes[found])}, and it was "
            f"packed with {entry.shape}: it is of another model."
        )
    return found


def _weight_error(
    base: PlainBase,
    group: Group,
    source_name: str,
    weights: PackedWeights,
    name: str,
    experts: int | None,
) -> WeightError:
    """Decode and compare slice by slice; sums are kept for each row of the first dimension."""
    stack = weights.stack(name)
    rows = stack.shape[0]
    wrong = torch.zeros(rows, dtype=torch.float64)
    right = torch.zeros(rows, dtype=torch.float64)
    largest = 0.0
    for start, stop in group.slices():
        last = rows if stop is None else stop
        value = base.parameters(group, start, stop)[source_name].float()
        decoded = codec.unpack_range(stack, start, last, dtype=torch.float32)
        difference = (decoded - value).reshape(last - start, -1)
        wrong[start:last] = difference.double().square().sum(1)
        right[start:last] = value.reshape(last - start, -1).double().square().sum(1)
        largest = max(largest, float(difference.abs().max()))
    count = experts if experts and rows % experts == 0 else 1
    each = (wrong.view(count, -1).sum(1), right.view(count, -1).sum(1))
    ratios = [_ratio(float(top), float(below)) for top, below in zip(*each, strict=True)]
    whole = _ratio(float(wrong.sum()), float(right.sum()))
    return WeightError(name, experts is not None, tuple(stack.shape), whole, tuple(ratios), largest)


def _ratio(wrong: float, right: float) -> float:
    if not wrong:
        return 0.0
    return math.sqrt(wrong / right) if right else math.inf


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which layer 10 follows layer 9."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
