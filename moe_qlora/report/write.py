"""`moe_qlora.write_report`: one HTML page, without scripts and links; pictures by matplotlib."""

import base64
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jinja2 import Environment, PackageLoader
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..checkpoint.folder import replace_file
from ..checkpoint.manifest import is_packed
from ..checkpoint.verify import verify
from ..detection.routing import expert_counts
from ..errors import CheckpointError, ConfigError, check_numbers
from ..hf.switch import enabled
from ..layout import human_bytes, name_pattern
from ..lora.model import load_adapter
from ..models import named
from ..models.files import MAX_JSON, read_json, reading
from ..planning import model as meta_model
from ..planning.budget import WEIGHTS
from ..planning.model import blocks_of
from ..versions import installed_version

_LOG, _ADAPTER, _MODEL = "trainer_state.json", "adapter_config.json", "config.json"
_VERSIONS = ("moe-qlora", "torch", "transformers", "bitsandbytes", "peft")
_PARTS = ("Bytes", "Packing error", "Routing", "Training")
_TARGETS = ("r", "target_modules", "target_parameters")
_LONGEST = 2048  # tokens of a text; the rest is left out


def write_report(
    source: Any, out: str | Path, *, against: str | Path | None = None,
    text: str | Path | Iterable[Any] | None = None, base: str | Path | None = None,
    tokenizer: Any = None, quantization_config: Any = None, max_tokens: int = 16384,
    trust_remote_code: bool = False, batch: Any = None, seq: Any = None, progress: Any = None,
) -> tuple[str, ...]:  # fmt: skip
    """Write one HTML page, and return the headings of the parts that it does not have.

    `source` is a folder of a checkpoint, an adapter or a Trainer's run, what `plan` takes, or a
    live model; `base` the model of an adapter or run, if its folder does not name it. `against`,
    the checkpoint that a packed folder was packed from, adds errors; `text`, a JSONL or text file,
    strings or conversations, the experts that its first `max_tokens` go to in a loaded model.
    `batch`, `seq` and `progress` are ignored. A `CheckpointError`: a folder or file is missing or
    damaged. A `ConfigError`: a setting makes no sense, or `out` is no .html file to write.
    """
    target = Path(out).expanduser()
    new = not target.exists() and target.absolute().parent.is_dir()
    if not new and not (target.is_file() and target.suffix.lower() == ".html"):
        raise ConfigError(f"out is {target}, which is no .html file that can be written; name one.")
    check_numbers(max_tokens=max_tokens)
    if isinstance(text, (str, Path)) and not Path(text).expanduser().is_file():
        raise ConfigError(f"text is {text}, which is no file; name a JSONL or text file.")
    title, model, log, adapter, weights = _find(source, base)
    live: Any = source if isinstance(source, nn.Module) else None
    adapters = {title: read_json(adapter / _ADAPTER)} if adapter is not None else {}
    adapters |= {name: each.to_dict() for name, each in getattr(live, "peft_config", {}).items()}
    versions = (f"{name} {installed_version(name) or 'from a checkout'}" for name in _VERSIONS)
    sections: dict[str, list[Any]] = {"Versions": [", ".join(versions)]}
    if adapters:
        named_targets = [(name, *map(fields.get, _TARGETS)) for name, fields in adapters.items()]
        sections["Adapters"] = [[("name", *_TARGETS), *named_targets]]
    if model is not None:
        sections["Bytes"] = _bytes(model, quantization_config, trust_remote_code)
    if against is not None:
        checked = verify(weights or title, against, trust_remote_code=trust_remote_code)
        rows = [("relative error", "mean", "max of an expert")]
        for name in dict.fromkeys(name_pattern(error.name) for error in checked.errors):
            errors = [error for error in checked.errors if name_pattern(error.name) == name]
            mean, most = fmean(e.relative for e in errors), max(max(e.experts) for e in errors)
            rows.append((name, f"{mean:.2%}", f"{most:.2%}"))
        sections["Packing error"] = [*checked.problems, rows]
    if text is not None:
        asked = (tokenizer, quantization_config, max_tokens, trust_remote_code)
        sections["Routing"] = _routing(text, live, weights, adapter, *asked)
    if log is not None:
        sections["Training"] = [_training(log / _LOG)]
    pages = Environment(loader=PackageLoader("moe_qlora", "report"), autoescape=True)
    page = pages.get_template("page.html").render(title=title, sections=sections)
    try:
        replace_file(target, page.encode("utf-8"))
    except OSError as error:
        raise ConfigError(f"out is {target}, which cannot be written: {error.strerror}.") from error
    return tuple(part for part in _PARTS if part not in sections)


def _find(source: Any, base: Any) -> tuple[str, Any, Path | None, Path | None, Path | None]:
    """Return a title, the model as `plan` takes it, and folders: log, adapter and weights."""
    if not isinstance(source, (str, Path)):
        config: Any = getattr(source, "config", source)
        title = getattr(config, "name_or_path", "") or type(source).__name__
        return title, config if hasattr(source, "peft_config") else source, None, None, None
    folder = Path(source).expanduser()
    saved = sorted(folder.glob("checkpoint-[0-9]*"), key=lambda path: (len(path.name), path.name))
    log, adapter, weights = (
        next((place for place in (folder, *saved[::-1]) if (place / name).is_file()), None)
        for name in (_LOG, _ADAPTER, _MODEL)
    )
    model: Any = (weights or base) if folder.is_dir() else source
    if adapter is not None:
        model = base or read_json(adapter / _ADAPTER).get("base_model_name_or_path")
    if model is None and log is None:
        what = f"checkpoint, adapter or Trainer's run ({_MODEL}, {_ADAPTER}, {_LOG})"
        raise CheckpointError(f"{folder} holds no {what}.")
    weights = Path(model) if model and Path(model).is_dir() else None
    return folder.resolve().name, model, log, adapter, weights


def _bytes(model: Any, quantization: Any, remote: bool) -> list[Any]:
    source = meta_model.source_of(model, quantization, remote)
    meta = meta_model.MetaModel(source)
    blocks = blocks_of(meta.base, meta.parts)
    sizes = {name: sum(one.nbytes(*of) for one in blocks) for name, of in WEIGHTS.items()}
    packed = {f"{part.module}.{part.leaf}": part.weight.kind for part in meta.parts}
    said = f"Packed as {meta.kind}" if meta.kind else "Nothing is packed"
    said += f": {human_bytes(meta.unpacked)} before, {human_bytes(sum(sizes.values()))} after."
    kinds = ((p.pattern, p.role, p.shape, packed.get(p.name, p.dtype_name)) for p in meta.layout)
    experts: list[Any] = [("experts", "role", "shape", "codec", "count")]
    experts += [(*key, count) for key, count in Counter(kinds).items()]
    return [said, *source.notes, [(name, human_bytes(n)) for name, n in sizes.items()], experts]


def _routing(
    text: Any, model: Any, weights: Path | None, adapter: Path | None,
    tokenizer: Any, quantization: Any, most: int, remote: bool,
) -> list[Any]:  # fmt: skip
    if model is None and weights is None:
        raise ConfigError("text needs weights to run: name the model's folder as source or base.")
    how: dict[str, Any] = {"trust_remote_code": remote, "local_files_only": True}
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(str(weights), **how)
    if model is None:
        how |= {"dtype": "auto", "device_map": "auto" if torch.cuda.is_available() else None}
        if quantization is not None and weights and not is_packed(weights):
            how["quantization_config"] = meta_model.bnb_config(quantization)
        with named.quiet(), enabled():
            model = AutoModelForCausalLM.from_pretrained(weights, **how)
        if adapter is not None:
            model = load_adapter(model, str(adapter))
    if isinstance(text, (str, Path)):  # rows of JSONL, or paragraphs
        with reading(file := Path(text).expanduser()):
            content = file.read_text(encoding="utf-8-sig")
            text = content.split("\n\n")
            if file.suffix.lower() == ".jsonl":
                rows = map(json.loads, filter(str.strip, content.splitlines()))
                text = [row.get("text") or row["messages"] for row in rows]
    training = [module for module in model.modules() if module.training]
    device, used, texts = next(model.parameters()).device, 0, 0
    with torch.no_grad(), expert_counts(model.eval()) as counts:
        for row in text:
            chat = not isinstance(row, str)
            shown = tokenizer.apply_chat_template(row, tokenize=False) if chat else row
            ids = tokenizer(shown)["input_ids"][: min(_LONGEST, most - used)]
            if used < most and ids:
                model(input_ids=torch.tensor([ids], device=device), use_cache=False)
                used, texts = used + len(ids), texts + 1
    for module in training:
        module.training = True
    shares = [count[:-1].cpu() / count.sum().clamp(min=1).cpu() for count in counts.values()]
    if not any(map(torch.any, shares)):
        raise ConfigError("text has no tokens, or no layer of the model is told the experts' ids.")
    grid = nn.utils.rnn.pad_sequence(shares, batch_first=True, padding_value=float("nan"))
    picture = _picture("use of experts by layer", lambda axes: axes.imshow(grid, aspect="auto"))
    return [f"{used:,} tokens of {texts} texts.", picture]


def _training(log: Path) -> Any:
    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in read_json(log, MAX_JSON).get("log_history") or ():
        for name, value in entry.items():
            if "step" in entry and (name.endswith("loss") or "mem" in name):
                curves.setdefault(name, []).append((entry["step"], value))

    def plot(axes: Any) -> None:
        memory = axes.twinx()
        for name, points in curves.items():
            side, style = (axes, "-") if name.endswith("loss") else (memory, ":")
            side.plot(*zip(*points, strict=True), style, marker=".", label=name)
        axes.figure.legend(fontsize="small")

    return _picture(f"{', '.join(curves) or 'nothing'} by step", plot)


def _picture(words: str, plot: Callable[[Any], None]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"A picture of {words} needs matplotlib: pip install matplotlib."
    figure, png = Figure(figsize=(9, 3.5), layout="constrained"), io.BytesIO()  # no global state
    plot(figure.add_subplot())
    figure.savefig(png, format="png")
    return {"png": base64.b64encode(png.getvalue()).decode(), "words": words}
