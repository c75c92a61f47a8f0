"""`moe_qlora.write_report`: bytes, packing error, routing and a run's curves, on one page.

Pictures need matplotlib (the extra `report`); the page has no scripts, and no links
to elsewhere.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PretrainedConfig

from ..checkpoint.manifest import is_packed
from ..checkpoint.staging import replace_file, replaceable
from ..checkpoint.verify import verify
from ..errors import CheckpointError, ConfigError, MoeQloraError, check_numbers, first_line
from ..experts.counts import ExpertCounts
from ..hf.switch import enabled
from ..layout import human_bytes, name_pattern
from ..lora.load import load_adapter
from ..memory import meta_model
from ..memory.meta_model import source_of
from ..models import named
from ..models.files import MAX_JSON, read_json
from ..packing.settings import CodecSettings
from ..versions import installed_version

KINDS = ("experts", "Linear layers", "embeddings and head", "routers", "norms and others")
"""Kinds of weights, in the order of tables. Linear layers are the packed ones."""


class KindBytes(NamedTuple):
    """The weights of one of `KINDS`."""

    kind: str
    weights: int  # Number of weights
    before: int  # Bytes in the dtype that the model is loaded in
    after: int  # Bytes packed, statistics included, or the same if the kind is not


class Inventory(NamedTuple):
    """The contents of a model."""

    packed: str | None  # The packed type; None if nothing is packed
    kinds: tuple[KindBytes, ...]  # Those that the model has
    notes: tuple[str, ...]  # What to know, a sentence each


def take_inventory(
    model: Any, quantization_config: Any = None, *, trust_remote_code: bool = False
) -> Inventory:
    """Count a model's weights by kind, before and after packing; arguments are those of `plan`."""
    source = source_of(model, quantization_config, None, trust_remote_code)
    meta = meta_model.pack(
        source.build(), source.quantization, linears=source.linears, native=source.native
    )
    plain = dict(_tensors(source.build()))
    weights, before, after = Counter[str](), Counter[str](), Counter[str]()
    held: set[int] = set()
    for part in meta.parts:
        kind = "Linear layers" if part.linear else "experts"
        if id(part.weight.owner) in held:
            continue
        tensors = (part.weight.codes, *part.weight.statistics)
        held |= {id(part.weight.owner)} | {tensor.untyped_storage()._cdata for tensor in tensors}
        weight = plain.get(f"{part.module}.{part.leaf}".lstrip("."))
        numel = part.weight.numel
        loaded = numel * part.weight.dtype.itemsize
        if weight is not None and weight.numel() == numel and weight.is_floating_point():
            loaded = weight.nbytes  # else it comes packed
        weights[kind] += numel
        before[kind] += loaded
        after[kind] += part.weight.codes.nbytes + part.statistics
    kind_of = _kind_of_plain(meta)
    for name, tensor in _tensors(meta.base):
        if id(tensor) in held or tensor.untyped_storage()._cdata in held:
            continue
        held.add(id(tensor))
        kind = kind_of.get(id(tensor)) or ("experts" if meta.layout.find(name) else KINDS[-1])
        weights[kind] += tensor.numel()
        before[kind] += tensor.nbytes
        after[kind] += tensor.nbytes
    kinds = tuple(KindBytes(k, weights[k], before[k], after[k]) for k in KINDS if weights[k])
    return Inventory(meta.kind, kinds, source.notes)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _kind_of_plain(meta: meta_model.MetaModel) -> dict[int, str]:
    """Return the kind of tensors that are not packed, by id, where their module tells it."""
    kinds: dict[int, str] = {}
    modules = dict(meta.base.named_modules())
    routers = {router.name for router in meta.layout.routers}
    try:
        head = meta.base.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    for name, module in modules.items():
        table = isinstance(module, nn.Embedding) or module is head
        kind = "embeddings and head" if table else "routers" if name in routers else None
        for key, tensor in module.named_parameters(recurse=kind == "routers"):
            if kind or f"{name}.{key}".lstrip(".") in routers:
                kinds.setdefault(id(tensor), kind or "routers")
    return kinds


_LOG, _ADAPTER, _MODEL = "trainer_state.json", "adapter_config.json", "config.json"
_LONGEST = 2048  # tokens of a text; the rest is left out
Draw = Callable[[Any], None]


@dataclass(frozen=True)
class _Subject:
    title: str
    model: Any = None  # as `plan` takes it
    weights: Path | None = None  # folder of the model's weights
    adapter: Path | None = None
    log: Path | None = None
    live: Any = None


@dataclass(frozen=True)
class _Section:
    heading: str
    sentences: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    pictures: tuple[tuple[str, str], ...] = ()  # PNG in base64, and words
    missing: bool = False


def write_report(
    source: Any,
    out: str | Path,
    *,
    against: str | Path | None = None,
    text: str | Path | Iterable[str] | None = None,
    base: str | Path | None = None,
    tokenizer: Any = None,
    quantization_config: Any = None,
    max_tokens: int = 16384,
    trust_remote_code: bool = False,
    batch: Any = None,
    seq: Any = None,
    progress: Any = None,
) -> tuple[str, ...]:
    """Write one HTML page about a model, an adapter or a training run.

    Args:
        source: A checkpoint folder, packed or not; an adapter's folder; the folder of a Trainer's
            run; a configuration, path, model type or hub id as `plan` takes it; or a live model.
        out: The .html file to write; it is replaced at once when the page is complete.
        against: The checkpoint that a packed folder was packed from: shows the packing error.
        text: A JSONL, JSON or text file, or strings: shows which experts these texts go to, which
            loads and runs the model.
        base: The model of an adapter or run, if its folder does not name one that exists here.
        tokenizer: Reads `text`; None takes that of the adapter's or the model's folder.
        quantization_config: As `plan` takes it.
        max_tokens: Most tokens of `text`.
        trust_remote_code: Run model code that the folders bring.
        batch: Ignored.
        seq: Ignored: `plan` plans a step.
        progress: Ignored.

    Returns:
        The headings of the parts that could not be measured; the page says why.

    Raises:
        CheckpointError: A folder or file is missing or damaged.
        ConfigError: A setting makes no sense, or `out` cannot be written.
    """
    if not (batch is seq is progress is None):
        words = "batch, seq and progress are ignored since version 0.3: plan() plans a step."
        warnings.warn(f"write_report: {words}", DeprecationWarning, stacklevel=2)
    target = Path(out).expanduser()
    if not replaceable(target) or (target.exists() and target.suffix.lower() != ".html"):
        raise ConfigError(
            f"out is {target}, which is no .html file that can be written; name one in a folder "
            "that exists."
        )
    check_numbers(max_tokens=max_tokens)
    if isinstance(text, (str, Path)) and not Path(text).expanduser().is_file():
        raise ConfigError(f"text is {text}, which is no file; name a JSONL or text file.")
    subject, remote = _subject_of(source, base), trust_remote_code
    parts: dict[str, Callable[[], _Section]] = {
        "Bytes": lambda: _bytes(subject, quantization_config, remote),
        "Packing error": lambda: _error(subject, against, remote),
        "Routing": lambda: _routing(
            subject, text, tokenizer, quantization_config, max_tokens, remote
        ),
        "Training": lambda: _training(subject.log),
    }
    sections = []
    for heading, measure in parts.items():
        try:
            sections.append(measure())
        except MoeQloraError as error:
            if heading == "Bytes" and subject.log is None and subject.adapter is None:
                raise  # there is nothing else to tell of
            sections.append(_missing(heading, f"Not measured: {error}"))
    from jinja2 import Environment

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    made = f"{datetime.now().astimezone():%Y-%m-%d %H:%M}, moe-qlora "
    made += installed_version("moe-qlora") or "from a checkout"
    if find_spec("matplotlib") is None:
        made += "; pictures need matplotlib: pip install matplotlib"
    page = Environment(autoescape=True).from_string(template)
    facts = {"title": subject.title, "source": str(subject.model or source), "made": made}
    try:
        replace_file(target, page.render(sections=sections, **facts).encode("utf-8"))
    except OSError as error:
        raise ConfigError(f"out is {target}, which cannot be written: {error.strerror}.") from error
    return tuple(section.heading for section in sections if section.missing)


def _missing(heading: str, sentence: str) -> _Section:
    return _Section(heading, (sentence,), missing=True)


def _picture(words: str, draw: Draw, height: float = 3.5) -> tuple[tuple[str, str], ...]:
    """Draw on matplotlib's axes; nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        return ()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")  # no global state, unlike pyplot
    draw(figure.add_subplot())
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return ((base64.b64encode(png.getvalue()).decode(), words),)


def _subject_of(source: Any, base: str | Path | None) -> _Subject:
    if isinstance(source, nn.Module):
        config: Any = getattr(source, "config", None)
        name = getattr(config, "name_or_path", "") or type(source).__name__
        described = config if getattr(source, "peft_config", None) else source
        return _Subject(str(name), described, live=source)
    if isinstance(source, PretrainedConfig):
        return _Subject(source.name_or_path or source.model_type, source)
    if not isinstance(source, (str, Path)):
        raise ConfigError(
            f"source is a {type(source).__name__}; give a model, a transformers configuration, a "
            "folder, or what moe-qlora dump takes."
        )
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return _Subject(folder.name or str(source), str(source))
    saved = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()]
    places = [folder, *sorted(saved, key=lambda path: -int(path.name[11:]))]
    log = next((place / _LOG for place in places if (place / _LOG).is_file()), None)
    adapter = next((place for place in places if (place / _ADAPTER).is_file()), None)
    weights = next((place for place in places if (place / _MODEL).is_file()), None)
    model: Any = weights or base
    if adapter is not None:
        model = base or read_json(adapter / _ADAPTER).get("base_model_name_or_path")
        beside = adapter / str(model)
        model = beside if model and not Path(model).is_dir() and beside.is_dir() else model
    if model is None and log is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint, adapter or Trainer's run: it has no {_MODEL}, "
            f"{_ADAPTER} or {_LOG}; name a folder that has one."
        )
    place = Path(model) if model and Path(model).is_dir() else None
    return _Subject(folder.resolve().name, model and str(model), place, adapter, log)


def _bytes(subject: _Subject, quantization: Any, remote: bool) -> _Section:
    if subject.model is None:
        return _missing("Bytes", "The folder does not say which model it is of: name it with base.")
    found = take_inventory(subject.model, quantization, trust_remote_code=remote)
    kinds, total = found.kinds, sum(kind.after for kind in found.kinds)
    rows = [
        (kind.kind, f"{kind.weights:,}", human_bytes(kind.before), human_bytes(kind.after),
         f"{kind.after / max(total, 1):.1%}")
        for kind in kinds
    ]  # fmt: skip

    def draw(axes: Any) -> None:
        names = [kind.kind for kind in kinds]
        axes.barh(names, [kind.before / 1e9 for kind in kinds], color="#bbb", label="as loaded")
        axes.barh(names, [kind.after / 1e9 for kind in kinds], height=0.5, label="packed")
        axes.invert_yaxis()
        axes.set_xlabel("GB")
        axes.legend()

    said = f"Packed as {found.packed}." if found.packed else "Nothing is packed."
    head = ("part", "weights", "as loaded", "packed", "share")
    pictures = _picture("bytes by part", draw, 2.5)
    return _Section("Bytes", (said, *found.notes), head, tuple(rows), pictures)


def _error(subject: _Subject, against: str | Path | None, remote: bool) -> _Section:
    folder, heading = subject.weights, "Packing error"
    if folder is None or not is_packed(folder) or against is None:
        return _missing(heading, "It needs a packed folder, and its source as against (--against).")
    report = verify(folder, against, trust_remote_code=remote)
    if not report.good:
        return _missing(heading, f"The packed folder is damaged: {report.problems[0]}")
    groups: dict[str, list[Any]] = {}
    for error in report.errors:
        groups.setdefault(name_pattern(error.name), []).append(error)

    def draw(axes: Any) -> None:
        for pattern, errors in groups.items():
            layers, means = range(len(errors)), [100 * error.relative for error in errors]
            (line,) = axes.plot(layers, means, marker=".", label=pattern)
            low, high = ([100 * f(e.experts) for e in errors] for f in (min, max))
            axes.fill_between(layers, low, high, alpha=0.2, color=line.get_color())
        axes.set_xlabel("layer")
        axes.set_ylabel("error in % of the norm; band: experts")
        axes.legend(fontsize="small")

    rows = []
    for pattern, errors in groups.items():
        worst = max(errors, key=lambda error: max(error.experts))
        mean = sum(error.relative for error in errors) / len(errors)
        most = f"{max(worst.experts):.2%}"
        where = f"{worst.name}, expert {worst.worst}" if worst.expert else worst.name
        rows.append((pattern, str(len(errors)), f"{mean:.2%}", most, where))
    head = ("weights", "number", "mean error", "worst", "where")
    pictures = _picture("packing error by layer", draw, 4)
    return _Section(heading, (f"Against {against}.",), head, tuple(rows), pictures)


def _routing(
    subject: _Subject, text: Any, tokenizer: Any, quantization: Any, most: int, remote: bool
) -> _Section:
    if text is None or (subject.live is None and subject.weights is None):
        return _missing("Routing", "It needs weights, and a sample of your text as text (--text).")
    places = [place for place in (subject.adapter, subject.weights) if place is not None]
    where = next((place for place in places if any(place.glob("tokenizer*"))), subject.weights)
    try:
        reader = tokenizer or AutoTokenizer.from_pretrained(
            str(where), trust_remote_code=remote, local_files_only=True
        )
        model = subject.live or _load(subject, quantization, remote)
        used, rows = 0, 0
        training = [module for module in model.modules() if module.training]
        with torch.no_grad(), ExpertCounts(model.eval()) as counts:
            for sample in _texts(text):
                ids = _ids(sample, reader)[: min(_LONGEST, most - used)]
                if ids:
                    device = next(model.parameters()).device
                    model(input_ids=torch.tensor([ids], device=device), use_cache=False)
                    used, rows = used + len(ids), rows + 1
                if used >= most:
                    break
            by_layer = [count.tolist() for count in counts.read().values()]
        for module in training:
            module.training = True
    except MoeQloraError:
        raise
    except Exception as error:  # noqa: BLE001 - code of models and tokenizers may raise anything
        return _missing("Routing", f"Not measured: {type(error).__name__}: {first_line(error)}.")
    if not sum(map(sum, by_layer)):
        return _missing("Routing", "The sample has no text, or no layer is told the experts' ids.")
    share = [[count / max(sum(layer), 1) for count in layer] for layer in by_layer]
    widest = max(map(len, share))
    grid = [[*layer, *[math.nan] * (widest - len(layer))] for layer in share]

    def draw(axes: Any) -> None:
        shown = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
        axes.set_xlabel("expert")
        axes.set_ylabel("layer with experts")
        axes.figure.colorbar(shown, label="share of the layer's assignments")

    idle = sum(count == 0 for layer in by_layer for count in layer)
    said = f"{used:,} tokens of {rows} texts; {idle} of {sum(map(len, by_layer))} experts got none."
    return _Section("Routing", (said,), pictures=_picture("use of experts by layer", draw, 4))


def _load(subject: _Subject, quantization: Any, remote: bool) -> nn.Module:
    assert subject.weights is not None
    options: dict[str, Any] = {"trust_remote_code": remote}
    if not is_packed(subject.weights) and quantization is not None:
        given = quantization
        if isinstance(given, CodecSettings):
            given = BitsAndBytesConfig(**given.bnb_fields())
        options["quantization_config"] = given
    if torch.cuda.is_available():
        options["device_map"] = "auto"
    with named.quiet(), enabled():
        load: Any = AutoModelForCausalLM.from_pretrained
        model = load(subject.weights, dtype="auto", **options)
    return model if subject.adapter is None else load_adapter(model, str(subject.adapter))


def _texts(text: str | Path | Iterable[str]) -> Iterator[Any]:
    if not isinstance(text, (str, Path)):
        yield from text
        return
    file = Path(text).expanduser()
    content = file.read_text(encoding="utf-8-sig")
    if file.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        yield from filter(None, map(str.strip, content.split("\n\n")))
        return
    try:
        lines = filter(str.strip, content.splitlines())
        rows = json.loads(content) if content.lstrip()[:1] == "[" else map(json.loads, lines)
        for row in rows:
            yield row if isinstance(row, str) else _text_of(row)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is no sample of texts ({first_line(error)}): rows are strings, or have text, "
            "messages, prompt and completion, or instruction and output."
        ) from error


def _text_of(row: dict[str, Any]) -> Any:
    if whole := row.get("text") or row.get("messages") or row.get("conversations"):
        return whole
    parts = [row[n] for n in ("instruction", "prompt", "input", "completion", "output") if n in row]
    return "\n".join(parts) if isinstance(parts[0], str) else [*chain(*parts)]


def _ids(sample: Any, tokenizer: Any) -> list[int]:
    if not isinstance(sample, str) and getattr(tokenizer, "chat_template", None):
        shown = tokenizer.apply_chat_template(sample, tokenize=False)
        return list(tokenizer(shown, add_special_tokens=False)["input_ids"])
    if not isinstance(sample, str):
        sample = "\n".join(str(message["content"] or "") for message in sample)
    return list(tokenizer(sample)["input_ids"])


def _training(log: Path | None) -> _Section:
    if log is None:
        return _missing("Training", "It needs the folder of a Trainer's run, with its log.")
    history = read_json(log, MAX_JSON).get("log_history")
    if not isinstance(history, list):
        raise CheckpointError(f"{log} has no log_history: it is no state of a Trainer.")
    curves: dict[str, dict[int, float]] = {}
    for entry in history:
        for name, value in entry.items() if isinstance(entry, dict) else ():
            number = isinstance(value, (int, float)) and math.isfinite(value)
            if number and isinstance(entry.get("step"), int):
                curves.setdefault(name, {})[entry["step"]] = value

    def section(names: list[str], label: str) -> tuple[tuple[str, str], ...]:
        def draw(axes: Any) -> None:
            for name in names:
                axes.plot(list(curves[name]), list(curves[name].values()), marker=".", label=name)
            axes.set_xlabel("step")
            axes.set_ylabel(label)
            axes.legend()

        return _picture(f"{label} by step", draw) if names else ()

    losses = [name for name in curves if re.fullmatch(r"(.*_)?loss", name) and name != "train_loss"]
    speeds = [name for name in curves if name.endswith("_per_second")]
    if not losses:
        return _missing("Training", "The run logged no loss: set logging_steps.")
    rows = [
        (name, *(f"{[*curves[name].values()][place]:.5g}" for place in (0, -1)))
        for name in [*losses, *speeds]
    ]
    pictures = section(losses, "loss") + section([n for n in speeds if len(curves[n]) > 1], "speed")
    return _Section("Training", (), ("logged", "first", "last"), tuple(rows), pictures)
