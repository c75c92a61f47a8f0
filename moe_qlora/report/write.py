"""`moe_qlora.write_report`: bytes, packing error, routing and a run's curves, on one page.

Pictures need matplotlib (the extra `report`); the page has no scripts, and no links elsewhere.
"""

from __future__ import annotations

import base64
import io
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from ..checkpoint.folder import replace_file
from ..checkpoint.manifest import is_packed
from ..checkpoint.verify import verify
from ..detection.routing import expert_counts
from ..errors import CheckpointError, ConfigError, MoeQloraError, check_numbers, first_line
from ..hf.switch import enabled
from ..layout import human_bytes, name_pattern
from ..lora.model import load_adapter
from ..models import named
from ..models.files import MAX_JSON, read_json
from ..planning import model as meta_model
from ..versions import installed_version

KINDS = ("experts", "Linear layers", "embeddings and head", "routers", "norms and others")
"""Kinds of weights, in the order of tables. Linear layers are the packed ones."""

_LOG, _ADAPTER, _MODEL = "trainer_state.json", "adapter_config.json", "config.json"
_LONGEST = 2048  # tokens of a text; the rest is left out


class _Subject(NamedTuple):
    title: str
    model: Any = None  # as `plan` takes it
    weights: Path | None = None  # folder of the model's weights
    adapter: Path | None = None
    log: Path | None = None
    live: nn.Module | None = None


_Picture = tuple[str, str]  # PNG in base64, and words
_Section = tuple[Sequence[str], Sequence[Sequence[str]], Sequence[_Picture]]  # rows: head first


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
        text: A JSONL or text file, or strings: shows which experts these texts go to, which loads
            and runs the model.
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
        words = "write_report: batch, seq and progress are ignored since version 0.3: use plan()."
        warnings.warn(words, DeprecationWarning, stacklevel=2)
    target = Path(out).expanduser()
    new = not target.exists() and target.absolute().parent.is_dir()
    if not new and not (target.is_file() and target.suffix.lower() == ".html"):
        raise ConfigError(f"out is {target}, which is no .html file that can be written; name one.")
    check_numbers(max_tokens=max_tokens)
    if isinstance(text, (str, Path)) and not Path(text).expanduser().is_file():
        raise ConfigError(f"text is {text}, which is no file; name a JSONL or text file.")
    subject, remote = _subject_of(source, base), trust_remote_code
    asked = (text, tokenizer, quantization_config, max_tokens, remote)
    parts: dict[str, Callable[[], _Section]] = {
        "Bytes": lambda: _bytes(subject, quantization_config, remote),
        "Packing error": lambda: _error(subject, against, remote),
        "Routing": lambda: _routing(subject, *asked),
        "Training": lambda: _training(subject.log),
    }
    sections: dict[str, _Section] = {}
    missing = []
    for heading, measure in parts.items():
        try:
            sections[heading] = measure()
        except Exception as error:  # code of models and tokenizers may raise anything
            if heading == "Bytes" and subject.log is None and subject.adapter is None:
                raise  # there is nothing else to tell of
            kind = "" if isinstance(error, MoeQloraError) else f"{type(error).__name__}: "
            sections[heading] = (f"Not measured: {kind}{first_line(error)}.",), (), ()
            missing.append(heading)
    from jinja2 import Environment, PackageLoader

    pages = Environment(loader=PackageLoader("moe_qlora", "report"), autoescape=True)
    version = installed_version("moe-qlora") or "from a checkout"
    made = f"{datetime.now().astimezone():%Y-%m-%d %H:%M}, moe-qlora {version}"
    page = pages.get_template("page.html").render(
        subject=subject, made=made, drawn=find_spec("matplotlib") is not None, sections=sections
    )
    try:
        replace_file(target, page.encode("utf-8"))
    except OSError as error:
        raise ConfigError(f"out is {target}, which cannot be written: {error.strerror}.") from error
    return tuple(missing)


def _picture(words: str, draw: Callable[[Any], object]) -> list[_Picture]:
    """Draw on matplotlib's axes; nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")  # no global state, unlike pyplot
    draw(figure.add_subplot())
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return [(base64.b64encode(png.getvalue()).decode(), words)]


def _curves(words: str, curves: dict[str, dict[int, float]], x: str, y: str) -> list[_Picture]:
    def draw(axes: Any) -> None:
        for name, curve in curves.items():
            axes.plot([*curve], [*curve.values()], marker=".", label=name)
        axes.set(xlabel=x, ylabel=y)
        axes.legend(fontsize="small")

    return _picture(words, draw) if curves else []


def _subject_of(source: Any, base: str | Path | None) -> _Subject:
    if isinstance(source, nn.Module):
        config: Any = getattr(source, "config", None)
        name = getattr(config, "name_or_path", "") or type(source).__name__
        described = config if getattr(source, "peft_config", None) else source
        return _Subject(str(name), described, live=source)
    if isinstance(source, PretrainedConfig):
        return _Subject(source.name_or_path or source.model_type, source)
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"source is a {type(source).__name__}; give a model or its name.")
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return _Subject(folder.name or str(source), str(source))
    saved = sorted(folder.glob("checkpoint-[0-9]*"), key=lambda path: (len(path.name), path.name))
    places = [folder, *reversed(saved)]
    log, adapter, weights = (
        next((place for place in places if (place / name).is_file()), None)
        for name in (_LOG, _ADAPTER, _MODEL)
    )
    model: Any = weights or base
    if adapter is not None:
        model = base or read_json(adapter / _ADAPTER).get("base_model_name_or_path")
        if model and not Path(model).is_dir() and (adapter / str(model)).is_dir():
            model = adapter / str(model)
    if model is None and log is None:
        has = f"it has no {_MODEL}, {_ADAPTER} or {_LOG}"
        raise CheckpointError(f"{folder} holds no checkpoint, adapter or Trainer's run: {has}.")
    place = Path(model) if model and Path(model).is_dir() else None
    return _Subject(folder.resolve().name, model and str(model), place, adapter, log and log / _LOG)


def bytes_by_kind(source: meta_model.ModelSource) -> tuple[str | None, dict[str, list[int]]]:
    """Return the packed type, and by kind: weights, bytes as loaded, bytes after packing."""
    meta = meta_model.MetaModel(source)
    plain = {name: weight.nbytes for name, weight in source.build().named_parameters()}
    kinds: dict[str, list[int]] = {kind: [0, 0, 0] for kind in KINDS}
    counted: set[int] = set()

    def add(kind: str, *sizes: int) -> None:
        kinds[kind] = [*map(sum, zip(kinds[kind], sizes, strict=True))]

    for part in {id(part.weight.owner): part for part in meta.parts}.values():
        weight = part.weight
        tensors = (weight.codes, *weight.statistics)
        counted |= {id(weight.owner), *(tensor.untyped_storage()._cdata for tensor in tensors)}
        as_read = plain.get(f"{part.module}.{part.leaf}", 0)  # as packed, if that came packed
        loaded = max(as_read, weight.numel * weight.dtype.itemsize)
        add(KINDS[part.linear], weight.numel, loaded, weight.codes.nbytes + part.statistics)
    named_modules = meta.base.named_modules()
    tables = [m for n, m in named_modules if isinstance(m, nn.Embedding) or n.endswith("lm_head")]
    in_tables = {id(weight) for table in tables for weight in table.parameters(recurse=False)}
    routers = tuple(f"{router.name}." for router in meta.layout.routers)
    for name, tensor in (*meta.base.named_parameters(), *meta.base.named_buffers()):
        if counted.isdisjoint((id(tensor), tensor.untyped_storage()._cdata)):
            counted.add(id(tensor))
            kind = "experts" if meta.layout.find(name) else "norms and others"
            kind = "routers" if f"{name}.".startswith(routers) else kind
            kind = "embeddings and head" if id(tensor) in in_tables else kind
            add(kind, tensor.numel(), tensor.nbytes, tensor.nbytes)
    return meta.kind, {kind: sizes for kind, sizes in kinds.items() if any(sizes)}


def _bytes(subject: _Subject, quantization: Any, remote: bool) -> _Section:
    if subject.model is None:
        raise ConfigError("The folder does not say which model it is of: name it with base.")
    source = meta_model.source_of(subject.model, quantization, remote)
    packed, kinds = bytes_by_kind(source)
    rows = [("part", "weights", "as loaded", "packed")]
    for kind, (weights, before, after) in kinds.items():
        rows.append((kind, f"{weights:,}", human_bytes(before), human_bytes(after)))

    said = f"Packed as {packed}." if packed else "Nothing is packed."
    return (said, *source.notes), rows, ()


def _error(subject: _Subject, against: str | Path | None, remote: bool) -> _Section:
    if subject.weights is None or not is_packed(subject.weights) or against is None:
        raise ConfigError("It needs a packed folder, and its source as against (--against).")
    report = verify(subject.weights, against, trust_remote_code=remote)
    if not report.good:
        raise ConfigError(f"The packed folder is damaged: {report.problems[0]}")
    groups: dict[str, list[Any]] = {}
    for error in report.errors:
        groups.setdefault(name_pattern(error.name), []).append(error)
    rows, curves = [("weights", "mean error", "worst expert")], dict[str, dict[int, float]]()
    for pattern, errors in groups.items():
        means, worst = [e.relative for e in errors], max(max(e.experts) for e in errors)
        rows.append((pattern, f"{sum(means) / len(means):.2%}", f"{worst:.2%}"))
        curves[pattern] = dict(enumerate(means))
    pictures = _curves("packing error by layer", curves, "layer", "error relative to the norm")
    return (f"Against {against}.",), rows, pictures


def _routing(
    subject: _Subject, text: Any, tokenizer: Any, quantization: Any, most: int, remote: bool
) -> _Section:
    if text is None or (subject.live is None and subject.weights is None):
        raise ConfigError("It needs weights, and a sample of your text as text (--text).")
    if tokenizer is None:
        own = subject.adapter is not None and any(subject.adapter.glob("tokenizer*"))
        place = str(subject.adapter if own else subject.weights)
        how: dict[str, Any] = {"trust_remote_code": remote, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(place, **how)
    model: Any = subject.live
    if model is None:
        options: dict[str, Any] = {"trust_remote_code": remote, "dtype": "auto"}
        options["device_map"] = "auto" if torch.cuda.is_available() else None
        if quantization is not None and subject.weights and not is_packed(subject.weights):
            options["quantization_config"] = meta_model.bnb_config(quantization)
        with named.quiet(), enabled():
            model = AutoModelForCausalLM.from_pretrained(subject.weights, **options)
        if subject.adapter is not None:
            model = load_adapter(model, str(subject.adapter))
    training = [module for module in model.modules() if module.training]
    used = rows = 0
    with torch.no_grad(), expert_counts(model.eval()) as counts:
        for sample in _texts(text):
            chat = not isinstance(sample, str)
            shown = tokenizer.apply_chat_template(sample, tokenize=False) if chat else sample
            ids = tokenizer(shown)["input_ids"][: min(_LONGEST, most - used)]
            if ids:
                device = next(model.parameters()).device
                model(input_ids=torch.tensor([ids], device=device), use_cache=False)
                used, rows = used + len(ids), rows + 1
            if used >= most:
                break
    for module in training:
        module.training = True
    by_layer = [count[:-1].cpu() for count in counts.values()]
    if not any(map(torch.any, by_layer)):
        raise ConfigError("The sample has no text, or no layer is told the experts' ids.")
    shares = [count / count.sum().clamp(min=1) for count in by_layer]
    grid = nn.utils.rnn.pad_sequence(shares, batch_first=True, padding_value=math.nan)

    def draw(axes: Any) -> None:
        shown = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
        axes.set(xlabel="expert", ylabel="layer with experts")
        axes.figure.colorbar(shown, label="share of the layer's assignments")

    idle = int((torch.cat(by_layer) == 0).sum())
    said = f"{used:,} tokens of {rows} texts; {idle} of {sum(map(len, by_layer))} experts got none."
    return (said,), (), _picture("use of experts by layer", draw)


def _texts(text: str | Path | Iterable[str]) -> Iterator[Any]:
    """Yield strings and conversations: paragraphs of a text file, or rows of JSONL."""
    if not isinstance(text, (str, Path)):
        yield from text
        return
    file = Path(text).expanduser()
    content = file.read_text(encoding="utf-8-sig")
    if file.suffix.lower() != ".jsonl":
        yield from filter(None, map(str.strip, content.split("\n\n")))
        return
    try:
        for row in map(json.loads, filter(str.strip, content.splitlines())):
            if not (whole := row.get("text") or row.get("messages")):
                whole = row["prompt"] + row["completion"]
            yield whole
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        keys = "each row of JSONL has text, messages, or prompt and completion"
        raise CheckpointError(
            f"{file} is no sample of texts ({first_line(error)}): {keys}."
        ) from error


def _training(log: Path | None) -> _Section:
    if log is None:
        raise ConfigError("It needs the folder of a Trainer's run, with its log.")
    curves: dict[str, dict[int, float]] = {}
    for entry in read_json(log, MAX_JSON).get("log_history") or ():
        for name, value in entry.items() if "step" in entry else ():
            number = isinstance(value, (int, float)) and math.isfinite(value)
            if number and name.endswith(("loss", "_per_second")) and name != "train_loss":
                curves.setdefault(name, {})[entry["step"]] = value
    losses = {name: curve for name, curve in curves.items() if name.endswith("loss")}
    if not losses:
        raise ConfigError(f"{log} has no loss: set logging_steps.")
    rows = [("logged", "first", "last")]
    for name, curve in curves.items():
        first, *_, last = [*curve.values()] * 2
        rows.append((name, f"{first:.5g}", f"{last:.5g}"))
    speeds = {name: curve for name, curve in curves.items() if name not in losses}
    pictures = _curves("loss by step", losses, "step", "loss")
    return (), rows, pictures + _curves("speed by step", speeds, "step", "speed")
