"""Extrapolates measured steps and communication to many GPUs and large models; many_gpus.md.

    python tools/bench/extrapolate.py                         the whole page, minutes on a CPU
    python tools/bench/extrapolate.py --models qwen3-30b-a3b --gpus 8,64 --out /tmp/page.md

It reads results/two_gpu.csv, model.csv and two_gpu_first.csv (steps on one and two GPUs). Memory is
what `moe_qlora.plan` says, times are those of `moe_qlora.memory.scaling`, and nothing is measured
here: after new rows have come, `--fit` prints what `scaling.MEASURED` should be, and
`bus_bandwidth` of `scaling.py` what `Pace.bus` should be; then write the page again.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from moe_qlora.memory.advice import ERROR, work_of
from moe_qlora.memory.scaling import (
    MEASURED,
    NETWORK_HOP,
    NODE,
    NVLINK_HOP,
    Links,
    Way,
    Work,
    step_seconds,
)
from scaling import PROTOTYPE, RANK, SEQ, Row, fit, read_rows, row_seconds
from shapes import SHAPES, WHOLE

import moe_qlora
from moe_qlora.memory.budget import Engine, Settings
from moe_qlora.memory.devices import GPUS, pace_of, reserve_nbytes
from moe_qlora.memory.hosting import Pace
from moe_qlora.memory.planner import Planner
from moe_qlora.memory.report import Advice
from moe_qlora.memory.source import source_of

PAGE = Path(__file__).parent / "many_gpus.md"
COUNTS = (8, 16, 64, 256, 1024)
H200 = 139 << 30  # what torch reports of one, rounded down
BATCH = 4
NETWORKS = {"400 Gb/s": 45e9, "100 Gb/s": 11.25e9}
"""Bytes a second that each GPU's own network card moves: nine tenths of its name, assumed."""
GB = 1e9

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": ("qwen3_moe", {**SHAPES["qwen3-30b-a3b"][1], **WHOLE["qwen3-30b-a3b"]}),
    "glm-4.5-air": ("glm4_moe", {**SHAPES["glm-4.5-air"][1], **WHOLE["glm-4.5-air"]}),
    "qwen3-235b-a22b": ("qwen3_moe", {
        **SHAPES["qwen3-235b-a22b"][1], **WHOLE["qwen3-235b-a22b"]}),
    "glm-4.6": ("glm4_moe", {
        "hidden_size": 5120, "moe_intermediate_size": 1536, "n_routed_experts": 160,
        "num_experts_per_tok": 8, "num_hidden_layers": 92, "vocab_size": 151552,
        "intermediate_size": 12288, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "first_k_dense_replace": 3, "n_shared_experts": 1}),
    "deepseek-v3": ("deepseek_v3", {**SHAPES["deepseek-v3"][1], **WHOLE["deepseek-v3"]}),
    "kimi-k2": ("deepseek_v3", {
        **SHAPES["deepseek-v3"][1], "n_routed_experts": 384, "num_hidden_layers": 61,
        "vocab_size": 163840, "intermediate_size": 18432, "num_attention_heads": 64,
        "num_key_value_heads": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
}  # fmt: skip
"""Model types and published sizes."""
ADVISED = ("2xH200", "8xH200", "16xH200", "8xRTX4090")
MODELS_ADVISED = ("qwen3-30b-a3b", "glm-4.5-air", "qwen3-235b-a22b", "deepseek-v3")
"""What the table of advice has."""
LINKS = Links.of(Pace())  # of H200s
DRAWN = ("qwen3-30b-a3b", "qwen3-235b-a22b", "glm-4.6", "deepseek-v3", "kimi-k2")
"""The models that have a table."""


# A model's sizes


def planner_of(model: str, layers: int | None, *, batch: int, adapters: str, linears: bool) -> Any:
    """Return the planner of a model; `linears` packs its Linear layers too."""
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="bfloat16",
    )
    settings = Settings(batch, SEQ, RANK, "attention,experts", adapters)
    source = source_of(config_of(model, layers), quantization, None, False)
    return Planner(replace(source, linears=linears), settings)


def config_of(model: str, layers: int | None = None) -> Any:
    """Return the configuration of one of `MODELS`, with so many layers if any are given."""
    from transformers import CONFIG_MAPPING

    model_type, sizes = MODELS[model]
    if layers is not None:
        sizes = {**sizes, "num_hidden_layers": layers}
    return CONFIG_MAPPING[model_type](**sizes, dtype="bfloat16")


@cache
def _base_planner(model: str, layers: int, batch: int, adapters: str, linears: bool) -> Any:
    return planner_of(model, layers, batch=batch, adapters=adapters, linears=linears)


def _planner_of_row(row: Row) -> Any:
    return _base_planner(row.model, row.layers, row.batch, row.adapters, row.linears)


def work_of_row(row: Row) -> Work:
    """Return what a step of a measured run computed and moved."""
    return work_of(_planner_of_row(row))


def known_rows() -> list[Row]:
    """Return the measured runs of models that are known here."""
    return [row for row in read_rows() if row.model in MODELS]


# The page


def ways(gpus: int, experts: int) -> list[Way]:
    """Return the ways to train on so many GPUs."""
    listed = [Way("ddp", gpus, 1), Way("fsdp", gpus, gpus)]
    if gpus > NODE:
        listed.insert(1, Way("fsdp", gpus, NODE))
    groups = [group for group in (8, 16, 64) if group <= gpus and experts % group == 0]
    return listed + [Way("ep", gpus, group) for group in groups]


def table(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def check_table(rows: Sequence[Row]) -> str:
    """Return measured figures beside those of the model, with the ratio."""

    def beside(measured: float | None, said: float) -> list[str]:
        if measured is None:
            return [f"{said:.1f}", "-", "-"]
        return [f"{said:.1f}", f"{measured:.1f}", f"{said / measured:.2f}"]

    lines = []
    for row in rows:
        made = _planner_of_row(row)
        if row.engine != "single":
            made = made.with_engine(Engine(row.engine, row.gpus))
        peak = made.peak(row.batch, row.seq)
        held = peak.parts["adapters"] + made.resident
        held += peak.parts.get("gradient buckets", 0) if row.source == PROTOTYPE else 0
        step = row_seconds(row, work_of_row(row), MEASURED, LINKS)
        speeds = [row.gpus * row.batch * row.seq / seconds for seconds in (step, row.step)]
        exchange = "" if row.gathers else ", all-to-all"
        lines.append(
            [
                f"{row.label}{exchange}, {row.gpus}", row.model, str(row.layers), str(row.batch),
                f"`{row.source}`",
                f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", f"{speeds[0] / speeds[1]:.2f}",
                *beside(row.resident, held / GB), *beside(row.peak, peak.nbytes / GB),
            ]
        )  # fmt: skip
    heading = ["run, GPUs", "model", "layers", "micro-batch", "rows"]
    heading += ["tokens/s, model", "measured", "ratio"]
    for name in ("held", "peak"):
        heading += [f"{name} GB, plan", "measured", "ratio"]
    return table(heading, lines)


def advice_table(models: Sequence[str]) -> str:
    """Return the engine to take for models, GPUs and tokens, and how much longer others take."""
    lines = []
    for model, gpus in product(models, ADVISED):
        for batch, seq in ((1, 512), (1, 4096), (4, 4096)):
            advice = moe_qlora.plan(
                config_of(model), gpus=gpus, batch=batch, seq=seq, rank=RANK,
                targets="attention,experts", adapter_dtype="bfloat16", search=False,
            ).advice  # fmt: skip
            lines.append([model, gpus, f"{batch} x {seq:,}", *_advised(advice)])
    heading = ["model", "GPUs", "tokens a rank", "take", "step s"]
    return table([*heading, "DDP", "FSDP2", "expert parallelism", "DDP, offload"], lines)


def _advised(advice: Advice | None) -> list[str]:
    """Return the cells of an advice: what to take, its step, and how many times as long others."""
    if advice is None:
        return ["nothing fits", "-", "-", "-", "-", "-"]
    ways = {(each.engine, each.offload): each for each in (advice, *advice.alternatives)}
    cells = []
    for key in (("ddp", False), ("fsdp", False), ("ep", False), ("ddp", True)):
        way = ways.get(key)
        if way is None:
            cells.append("-")
        elif not way.fits:
            cells.append(f"{way.needed / GB:.0f} GB")
        else:
            ranks = "" if way.engine == "ddp" else f" ({way.ranks})"
            cells.append(f"{way.seconds / advice.seconds:.2f}{ranks}")
    return [f"`{advice.setting}`", f"{advice.seconds:.2f}", *cells]


def even_table(models: Sequence[str]) -> str:
    """Return up to how many tokens a rank expert parallelism is quicker than FSDP2."""
    lines = []
    for model in models:
        work = work_of(planner_of(model, None, batch=BATCH, adapters="bfloat16", linears=True))
        cells = []
        for card, gpus in product(("H200", "RTX4090"), (2, 4, 8)):
            tokens = bisect_left(range(1, 1 << 20), True, key=partial(_slower, work, card, gpus))
            cells.append(f"{tokens:,}" if tokens else "never")
        lines.append([model, *cells])
    return table(["model", *(f"{n} {c}" for c in ("H200", "RTX 4090") for n in (2, 4, 8))], lines)


def _slower(work: Work, card: str, gpus: int, tokens: int) -> bool:
    """True where expert parallelism takes as long as FSDP2, or longer."""
    pace = pace_of(GPUS[card])
    speed, links = MEASURED.on(pace), Links.of(pace)
    divided, sharded = (
        step_seconds(work, Way(engine, gpus, gpus), tokens, speed, links)
        for engine in ("ep", "fsdp")
    )
    return divided >= sharded


def model_table(model: str, gpus: Sequence[int]) -> str:
    """Return what each way to train one model takes, on so many GPUs."""
    base = planner_of(model, None, batch=BATCH, adapters="bfloat16", linears=True)
    work = work_of(base)
    experts = max(param.num_experts for param in base.meta.layout.experts)
    tokens = BATCH * SEQ

    @cache
    def memory(engine: str, group: int) -> tuple[int, int, int]:
        made = base.with_engine(Engine(engine, group))
        return made.resident, made.load_peak, made.peak(BATCH, SEQ).nbytes

    lines = []
    for count in gpus:
        options = []
        for way in ways(count, experts):
            resident, load, peak = memory(way.engine, count if way.engine == "ddp" else way.group)
            needed = max(peak + reserve_nbytes(peak), load + reserve_nbytes(0))
            steps = [
                step_seconds(work, way, tokens, MEASURED, replace(LINKS, network=network))
                for network in NETWORKS.values()
            ]
            options.append((way, needed <= H200, (resident, load, peak), steps))
        fitting = [option for option in options if option[1]]
        best = min(fitting, key=lambda option: option[3][0])[0] if fitting else None
        for way, fits, sizes, steps in options:
            name = way.engine if way.engine == "ddp" else f"{way.engine} {way.group}"
            name += f" x {way.copies} copies" if way.engine != "ddp" and way.copies > 1 else ""
            name = f"**{name}**" if way == best else name
            lines.append(
                [
                    f"{count:,}", name, *(f"{size / GB:.1f}" for size in sizes),
                    "yes" if fits else "no", f"{steps[0]:.2f}",
                    *(f"{count * tokens / step:,.0f}" if fits else "-" for step in steps),
                ]
            )  # fmt: skip
    heading = ["GPUs", "engine", "model GB", "loading GB", "peak GB", "fits", "step s"]
    heading += [f"tokens/s at {name}" for name in NETWORKS]
    billions = sum(parameter.numel() for parameter in base.source.build().parameters()) / 1e9
    flops = work.expert_flops + work.other_flops
    title = (
        f"### {model}\n\n{billions:,.0f} B weights, {base.resident / GB:,.1f} GB packed; a token "
        f"takes {flops / 1e9:,.0f} GFLOP, of which LoRA and attention are part.\n\n"
    )
    return title + table(heading, lines)


def page(models: Sequence[str], gpus: Sequence[int], advised: Sequence[str]) -> str:
    """Return the whole page."""
    speeds = {
        "host, ms a layer": f"{MEASURED.host * 1e3:.2f}",
        "TFLOP/s, experts": f"{MEASURED.experts / 1e12:.0f}",
        "TFLOP/s, the rest": f"{MEASURED.others / 1e12:.0f}",
        **{f"{name}, ms a layer": f"{cost * 1e3:.2f}" for name, cost in MEASURED.engine.items()},
        "all-gather, GB/s a GPU": f"{LINKS.bus / GB:.0f}",
    }
    parts = [
        TEXT.format(networks=" and ".join(NETWORKS), nvlink=NVLINK_HOP * 1e6,
                    network=NETWORK_HOP * 1e6, version=moe_qlora.__version__),
        table(list(speeds), [list(speeds.values())]),
        CHECK.format(error=ERROR),
        check_table(known_rows()),
        ADVICE.format(error=ERROR, rank=RANK),
        advice_table(advised),
        EVEN,
        even_table(advised),
        TABLES.format(batch=BATCH, seq=SEQ, rank=RANK),
        *(model_table(model, gpus) for model in models),
    ]  # fmt: skip
    return "\n".join(parts)


TEXT = """# Many GPUs, extrapolated

Written by `python tools/bench/extrapolate.py`: change that script, `scaling.py` or the package's
[scaling.py](../../moe_qlora/memory/scaling.py), or add rows, and run it again. **Nothing over two
GPUs was measured.** Memory is what `moe_qlora.plan` of version {version} says. Times follow from
one and two H200s ([two_gpu.csv](results/two_gpu.csv), [model.csv](results/model.csv),
[two_gpu_comm_first.csv](results/two_gpu_comm_first.csv)) by these assumptions:

- Every rank has its own micro-batch (weak scaling), and computes as fast as one GPU alone: FLOPs
  a second, of experts and of the rest, and the host's time a layer are those fitted to
  Qwen3-30B-A3B, with the stock loss and without CUDA graphs. Larger matrices are usually quicker,
  slower hosts slower.
- Nodes of 8 GPUs. Within one, a collective moves what was measured between two GPUs. Between
  nodes each GPU has a network card of its own, of {networks}, of which
  nine tenths are used; a ring through all GPUs of several nodes uses all cards.
- Rings: {nvlink:.0f} us a hop within a node, {network:.0f} us between nodes, assumed. NCCL's other
  algorithms take fewer hops on many GPUs.
- All-reduces of gradients are hidden behind backward as far as that lasts. **Nothing of FSDP2's
  gathers is hidden**: a step of 16 layers that stayed gathered after forward, and so were gathered
  once, was 12.8 ms shorter, and one gather of them takes 12.6 ms by this arithmetic. Whether slower
  links hide as little was not measured; where they hide more, FSDP2 is quicker than is said here.
- Nothing of expert parallelism's exchanges is hidden. Up to four ranks gather tokens; more send
  them by all-to-all. Routers are even; an uneven one makes all ranks wait for the fullest.
- An engine's own cost a layer (hooks, copies, streams, waits of the host) is fitted to two GPUs and
  depends neither on the model nor on tokens or ranks. That of the all-to-all is large, in both runs
  that have it: 16 layers with 16,384 tokens and 2 layers with 4,096.

Fitted:
"""

CHECK = """
## Checked against what was measured

The model's figures, the measured ones, and the first over the second. Speeds were fitted to the
rows of one GPU (of runs of one size the quickest) and to the median of each engine's rows; memory
was fitted to nothing. Rows of Qwen3-30B-A3B that were fitted are met within 1.1 %. GLM-4.5-Air's,
which no median is, were quicker than the arithmetic: their ratios are 0.93 to 0.96. The package
takes {error:.0%} for the arithmetic's error. Engines come in the measured order: DDP, FSDP2, expert
parallelism with 16,384 tokens of Qwen3-30B-A3B; expert parallelism before FSDP2 with 4,096 tokens
of GLM-4.5-Air (Linear layers were packed in the first run and not in the second, and each GPU was
held to 48 GiB).

Not fitted: the run of 2 layers, whose optimizer was another, and those of `two_gpu_first.csv`, a
prototype of an earlier layout of the package. Under FSDP2 that was up to 1.5 times slower.

"Held" is what a rank has before the first step; in `two_gpu.csv` that is its parameters, to which
the statistics of a single process and the buffers of an engine do not belong. `whole` was built
whole and then sharded; the first such run kept its statistics whole on each rank (0.2 GB). The
first run of DDP held 1.3 GB more at its peak than is planned, as much as another set of buckets;
why is not known.
"""

ADVICE = """
## Advice

What `plan(...).advice` says, on the rows and assumptions above, for LoRA r={rank} in bf16 on
attention and experts. An engine's cell is how many times as long its step is as that of the one to
take, with the ranks that share a model, or what it needs on a rank where that does not fit. Steps
within {error:.0%}, the arithmetic's error, count as alike: then DDP goes before FSDP2, before
expert parallelism, before DDP with experts in host memory. H200s in machines of 8 have 400 Gb/s a
GPU between them; RTX 4090s have PCIe 4 alone, and none was run.
"""

EVEN = """
Up to so many tokens a rank a step of expert parallelism is shorter than one of FSDP2, where all
GPUs share one model and it fits either way ("never": with any number):
"""

TABLES = """
## Models

H200s, {seq:,} tokens a sequence, micro-batch {batch} on each GPU, gradient checkpointing, LoRA
r={rank} in bf16 on attention and all experts, AdamW, everything in nf4 with double quantization.
`fsdp 8 x 2 copies` is FSDP2 in groups of 8 ranks, of which each holds the model (HSDP); `ep 8 x 2
copies` divides experts over 8 ranks, with DDP for the rest. "Loading" is the most while a rank
loads its share; "fits" counts the CUDA context, gaps and loading. The quickest that fits is bold.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(DRAWN))
    parser.add_argument("--gpus", default=",".join(map(str, COUNTS)))
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--fit", action="store_true", help="print what rows say, and no page")
    options = parser.parse_args()
    if options.fit:
        print(fit(known_rows(), work_of_row, LINKS))
        return
    counts = [int(word) for word in options.gpus.split(",")]
    text = page([name for name in options.models.split(",") if name], counts, MODELS_ADVISED)
    options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
