"""What moe_qlora/docs/what-fits.md and README.md say of planned/what_fits.csv; see what_fits.py."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from what_fits import (
    DEFAULTS,
    GPUS,
    MODELS,
    SEQS,
    SETTINGS,
    Cell,
    described,
    options_of,
    read,
    read_checks,
)

from moe_qlora.memory.devices import parse_gpus

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "moe_qlora/docs"
README = ROOT / "README.md"
PAGE = DOCS / "what-fits.md"
RESULTS = "../../tools/bench/results"
NAMES = {
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-next-80b-a3b": "Qwen3-Next-80B-A3B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "glm-4.5-air": "GLM-4.5-Air",
    "deepseek-v3": "DeepSeek-V3",
}
IN_README = ("gpt-oss-20b", "qwen3-30b-a3b", "glm-4.5-air", "qwen3-235b-a22b", "deepseek-v3")
README_SEQ = 4096
GIB = 1 << 30

INTRO = """
A cell such as **B 29.3** names the best setting that fits, by its letter in the table below, and
its peak in GiB on the fullest GPU; **G 10.1, host 14** has the packed experts in 14 GiB of host
memory. **Needs 44**: none of the settings fits; the last one (H, F on several GPUs) needs GPUs of
44 GiB. All figures are planned by `moe_qlora.plan` for micro-batch 1, without a GPU. {versions}
`python tools/bench/what_fits.py` plans all cells again and writes this page and [its
data](../../tools/bench/planned/what_fits.csv), with the command of each cell. A test plans a dozen
cells in every run, and all of them at night.
"""

ORDER = """
Settings are tried in this order, the best first. LoRA on experts is given up only after rank and
dtypes; [experts in host memory](memory.md#experts-in-host-memory) come last, since their copies
take time (`fit_memory` brings some of them back). A keeps all activations; B is gradient
checkpointing. On several GPUs each setting is tried under DDP, with the whole model on every GPU,
then under FSDP2, with a share on each. The command of a cell prints the largest micro-batch and the
longest sequence that fit.
"""

ASSUMED = """
- Experts and Linear layers are packed to nf4 with double quantization; the rest is in bf16.
- GiB are 2^30 bytes, with about 0.6 GiB of CUDA context, and 4 % of the peak for gaps between
  blocks. The column heads give the sizes of cards in shops; `plan` counts with memory seen by
  programs: {cards}.
- The kernels of any card since Ampere are assumed. On Hopper some steps take less.
- Adapters in bf16 need `autocast_adapter_dtype=False` in `get_peft_model`, against PEFT's float32.
- Liger computes the loss in chunks (`use_liger_kernel=True`) for every model known to Liger 0.8:
  all but GLM-4.5-Air.
- Linear attention (Qwen3-Next) is transformers' own code in torch. The kernels of
  flash-linear-attention take other amounts.
- gpt-oss has `attn_implementation="flex_attention"`, the other models transformers' default, SDPA.
- A model is packed while it loads, by `moe_qlora.enabled()`, and under FSDP2 by
  `moe_qlora.load_sharded`; the load fits as well.
- CUDA graphs take about as much memory as checkpointing.
"""


def text() -> str:
    """The page."""
    where = described()
    versions = (
        f"Planned on {where['date']} at commit {where['commit']} with torch {where['torch']}, "
        f"transformers {where['transformers']}, peft {where['peft']} and bitsandbytes "
        f"{where['bitsandbytes']}."
    )
    cells = {(cell.model, cell.gpus, cell.seq): cell for cell in read()}
    cards = ", ".join(
        f"{parse_gpus(name)[0][0] >> 30} GiB of {size} ({name})"
        for size, name in GPUS.items()
        if len(parse_gpus(name)) == 1
    )
    return page(
        "# What fits",
        " ".join(INTRO.format(versions=versions, results=RESULTS).split()),
        *settings(),
        *(piece for model in MODELS for piece in of_model(model, cells)),
        "## What is assumed",
        bullets(ASSUMED.format(cards=cards)),
        *measured(),
    )


def settings() -> Iterator[str]:
    """The legend."""
    yield "## The settings"
    rows = []
    for letter, given in SETTINGS.items():
        have = {**DEFAULTS, **given}
        rows.append(
            (
                letter,
                have["targets"].replace(",", " and "),
                have["rank"],
                have["adapter_dtype"],
                have["optimizer"],
                "computed again" if have["checkpointing"] else "kept",
                "host" if have["offload"] else "GPU",
                f"`{options_of(letter)}`",
            )
        )
    header = ("", "LoRA on", "rank", "adapters", "optimizer", "activations", "experts in")
    yield table((*header, "options of `moe-qlora plan`"), rows)
    yield ORDER


def of_model(model: str, cells: Mapping[tuple[str, str, int], Cell]) -> Iterator[str]:
    """The table of one model, and the command of one of its cells."""
    yield f"## {NAMES[model]}"
    rows = [
        (f"{seq:,}", *(shown(cells[model, gpus, seq]) for gpus in GPUS.values())) for seq in SEQS
    ]
    yield table(("tokens", *GPUS), rows)
    fits = [cell for cell in cells.values() if cell.model == model and cell.fits]
    example = next(cell for cell in fits if cell.seq == README_SEQ)
    (size,) = (size for size, gpus in GPUS.items() if gpus == example.gpus)
    yield f"The command for {README_SEQ:,} tokens on {size}:"
    yield f"    {example.command()}"


def shown(cell: Cell) -> str:
    """A cell: a letter, GiB and an engine, or what is needed."""
    if not cell.fits:
        return f"needs {cell.least}"
    where = {"": "", "ddp": " DDP", "fsdp": " FSDP2"}[cell.engine]
    where = f", host {cell.host / GIB:.0f}" if cell.host else where
    return f"**{cell.setting}** {cell.needed / GIB:.1f}{where}"


def measured() -> Iterator[str]:
    """How near plans come to what GPUs measured."""
    checks = read_checks()
    worst = max(abs(_error(c.planned, c.measured)) for c in checks)
    yield "## Planned and measured"
    yield (
        "Runs measured on H200s, planned: whole models of random weights, LoRA of rank 16 in bf16 "
        "on attention and experts, only experts packed, checkpointing or CUDA graphs. Peaks are "
        "`torch.cuda.max_memory_allocated` in GB of 10^9 bytes. The largest error is "
        f"{worst:.1f} %, on the safe side: torch's default AdamW holds a copy of the adapters' "
        "size for a moment, `adamw_fused` does not. "
        "[Nine more](../../tools/bench/README.md#planned-against-measured-memory) were planned "
        "before they were run."
    )
    rows = [
        (
            NAMES[check.what],
            f"`{check.setting}`",
            f"[{check.file}]({RESULTS}/{check.file}), {check.commit}",
            gigabytes(check.planned),
            gigabytes(check.measured),
            f"{_error(check.planned, check.measured):+.1f} %",
        )
        for check in checks
    ]
    yield table(("model", "setting", "rows, commit", "planned", "measured", "error"), rows)


def _error(planned: int, measured: int) -> float:
    return 100 * (planned - measured) / measured


def readme_block() -> str:
    """The five lines of README.md."""
    cells = {(cell.model, cell.gpus): cell for cell in read() if cell.seq == README_SEQ}
    rows = [
        (NAMES[model], *(brief(cells[model, gpus]) for gpus in GPUS.values()))
        for model in IN_README
    ]
    return page(
        f"Planned GiB on each GPU for {README_SEQ:,} tokens, LoRA on attention and experts (*: "
        "attention alone), with the best setting that fits; +14: packed experts in 14 GiB of host "
        "memory. Larger GPUs keep more activations, which is faster:",
        table(("model", *GPUS), rows, space=""),
        "[What fits](moe_qlora/docs/what-fits.md) has the settings, more models and lengths.",
    )


def brief(cell: Cell) -> str:
    """A cell without its setting."""
    if not cell.fits:
        return f"needs {cell.least}"
    alone = "" if "experts" in SETTINGS[cell.setting]["targets"] else "*"
    host = f" +{cell.host / GIB:.0f}" if cell.host else ""
    return f"{cell.needed / GIB:.1f}{alone}{host}"


def gigabytes(nbytes: float) -> str:
    """Bytes in GB of 10^9, as tables have them."""
    return f"{nbytes / 1e9:.1f} GB"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, space: str = " ") -> str:
    """A table in Markdown, with `space` around each cell."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([f"{space}{cell}{space}" for cell in line] for line in lines)
    return "\n".join(f"|{'|'.join(line)}|" for line in cells)


def bullets(text: str) -> str:
    """A list, whose lines are filled anew."""
    items = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    return "\n".join(_fill("- " + " ".join(item.split()), "  ") for item in items)


def _fill(text: str, indent: str = "") -> str:
    """One paragraph in lines of 100 characters."""
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def page(*parts: str) -> str:
    """A page, or a block of one, of paragraphs and tables."""
    return "\n\n".join(map(_wrapped, parts)) + "\n"


def _wrapped(part: str) -> str:
    """A paragraph in lines of 100 characters; tables, lists and code as they are."""
    if "\n" in part.strip() or part[0] in "|# ":
        return part.strip("\n")
    return _fill(part)


def filled(text: str, name: str, block: str) -> str:
    """A document with what is between `<!-- NAME: begin -->` and its end replaced.

    Raises:
        LookupError: The document has no such marks, or has them twice.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise LookupError(f"no place for {name}: give one line {begin} and, below, one {end}")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n\n{block.strip()}\n\n{end}", text)


def write(file: Path, text: str) -> None:
    """Write a page, and say so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"wrote {file.relative_to(ROOT)}")


def fill_readme(name: str, block: str) -> None:
    """Write a block of README.md."""
    write(README, filled(README.read_text(encoding="utf-8"), name, block))


def main() -> None:
    """Write the page and README's block."""
    write(PAGE, text())
    fill_readme("what-fits", readme_block())
