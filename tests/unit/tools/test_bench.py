"""The benchmarks run, and their rows say what they must."""

from __future__ import annotations

import csv
import functools
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from moe_qlora.testing import model_class

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "tools/bench"
MANY_GPUS = ("date", "commit", "gpu", "torch")  # one row a run, figures in columns of their own
LAYER_KINDS = ("kept", "kept in part", "recomputed")
REQUIRED = (
    *("date", "commit", "gpu", "torch", "triton", "bitsandbytes", "transformers", "peft"),
    *("p20", "p50", "p80"),
)


def called(monkeypatch, script, *arguments):
    """Run a benchmark, in this process."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(
        sys, "argv", [f"{script}.py", "--tiny", "--device", "cpu", *map(str, arguments)]
    )
    runpy.run_path(str(BENCH / f"{script}.py"), run_name="__main__")


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def of_peer(rows, peer):
    return {row["metric"]: row for row in rows if f"peer={peer}" in row["setting"].split()}


ALSO = {
    "many_gpus": [*("--engines", "single", "--steps", 1, "--warmup", 1, "--micro-batch", 1)],
    "plan": ["--only", "olmoe"],
}
"""What no other test here runs; those that need another program are not run on a CPU."""


@pytest.mark.parametrize("script", ALSO)
def test_it_runs_at_all(tmp_path, monkeypatch, script):
    out = tmp_path / "out.csv"
    called(monkeypatch, script, *ALSO[script], "--out", out)
    rows = rows_of(out)
    assert rows and not any("fails" in (row.get("note") or "") for row in rows)


def test_many_gpus_are_extrapolated_by_arithmetic(tmp_path, monkeypatch):
    """Two ranks of GLM-4.5-Air under FSDP2 take what they were measured to."""
    monkeypatch.syspath_prepend(str(BENCH))
    import extrapolate

    glm, qwen = extrapolate.Model("glm-4.5-air"), extrapolate.Model("qwen3-30b-a3b")
    assert glm.seconds("fsdp", 2, 2) == pytest.approx(extrapolate.GLM_STEP)
    assert qwen.step < qwen.seconds("ddp", 8, 8) < qwen.seconds("fsdp", 8, 8)
    assert qwen.seconds("fsdp", 8, 64) < qwen.seconds("fsdp", 64, 64)
    page = (BENCH / "many_gpus.md").read_text("utf-8")
    assert all(row in page for row in qwen.rows([8])), "run tools/bench/extrapolate.py"
    assert len(page.split()) <= 800


def test_kept_mxfp4_codes_beside_nf4(tmp_path, monkeypatch):
    out = tmp_path / "model.csv"
    arguments = ["--model", "gpt_oss", "--peers", "ours,mxfp4", "--steps", 1, "--warmup", 1]
    called(monkeypatch, "model", *arguments, "--out", out)
    rows = rows_of(out)
    ours, kept = (of_peer(rows, peer) for peer in ("ours", "mxfp4"))
    assert " mxfp4 " in kept["step"]["setting"] and " nf4+double " in ours["step"]["setting"]
    weights = float(kept["experts before"]["p50"]) / 2
    stacks = 4  # two of each of two layers, with tables and constants
    assert float(kept["experts packed"]["p50"]) == weights * 17 / 32 + stacks * 4 * (16 + 256 + 2)
    assert kept["trained weights"]["p50"] == ours["trained weights"]["p50"]
    called(monkeypatch, "layer", "--peers", "mxfp4", "--repeat", 2, "--out", tmp_path / "layer.csv")
    assert "step, checkpointed" in of_peer(rows_of(tmp_path / "layer.csv"), "mxfp4")


def test_a_tiny_model_beside_its_peers_and_its_plot(tmp_path, monkeypatch):
    out = tmp_path / "model.csv"
    called(monkeypatch, "model", "--steps", 3, "--warmup", 1, "--out", out)
    rows = rows_of(out)
    ours, frozen, theirs, packed = (of_peer(rows, p) for p in ("ours", "frozen", "peft", "bnb"))
    for metrics in (ours, frozen, theirs, packed):
        assert float(metrics["throughput"]["p20"]) <= float(metrics["throughput"]["p80"])
    # two layers of 4 experts of 3 x 64 x 40 weights: 16 bits before, nf4 and statistics after
    assert float(ours["experts before"]["p50"]) == 2 * 4 * 3 * 64 * 40 * 2
    assert 0.5 < float(packed["packed weight"]["p50"]) <= float(ours["packed weight"]["p50"]) < 0.6
    trained = {k: float(v["trained weights"]["p50"]) for k, v in (("o", ours), ("f", frozen))}
    # r=16 on both projections of every expert, and on attention
    experts = 2 * 4 * 16 * ((64 + 2 * 40) + (40 + 64))
    assert trained["o"] == trained["f"] + experts == float(theirs["trained weights"]["p50"])
    assert float(ours["first loss"]["p50"]) == pytest.approx(
        float(frozen["first loss"]["p50"]), rel=0.01
    )
    assert "lora=experts,attention" in ours["step"]["setting"]
    assert "lora=attention" in packed["step"]["setting"]
    draw(tmp_path, monkeypatch, {"model-qwen3_moe-tiny.png"})


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the package's `fit_memory`, `prepare_training` and `offload_experts`."""
    monkeypatch.syspath_prepend(str(BENCH))

    import moe_qlora

    calls = []

    class Asked:
        peak, memory, host_nbytes, copies = 3 << 30, 4 << 30, 5 << 30, 6
        layers = [SimpleNamespace(activations=k) for k in ("recompute", "part", "keep", "keep")]

        def __init__(self, what):
            self.what = what
            self.fit = self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            calls.append(f"{self.what} ends")

    def noted(what):
        def call(model, **how):
            calls.append((what, how))
            return Asked(what)

        return call

    for name in ("fit_memory", "prepare_training", "offload_experts"):
        monkeypatch.setattr(moe_qlora, name, noted(name), raising=False)
    return calls


def test_activations_are_fitted(tmp_path, monkeypatch, asked):
    out = tmp_path / "model.csv"
    words = ["--offload", "--fit", "28GiB", "--losses", 2, "--steps", 1]
    called(monkeypatch, "model", *words, "--warmup", 1, "--peers", "ours,frozen", "--out", out)
    fit = {"batch_size": 1, "seq_len": 64, "memory": "28GiB"}
    assert asked == [
        ("offload_experts", {}),
        ("fit_memory", fit),
        "fit_memory ends",
        "offload_experts ends",
    ]
    ours, frozen = (of_peer(rows_of(out), peer) for peer in ("ours", "frozen"))
    setting = ours["step"]["setting"].split()
    assert {"checkpointing=fit", "with=offload", "memory=28GiB"} <= {*setting}
    setting = frozen["step"]["setting"].split()
    assert "checkpointing=none" in setting and not any(w.startswith("with=") for w in setting)
    chosen = ("planned peak", "memory to fit", *(f"layers {k}" for k in LAYER_KINDS))
    assert [float(ours[metric]["p50"]) for metric in chosen] == [
        pytest.approx(3 << 30, rel=1e-5),
        pytest.approx(4 << 30, rel=1e-5),
        *(2, 1, 1),
    ]
    assert "planned peak" not in frozen
    for metrics in (ours, frozen):
        assert metrics["loss of step 0"]["p50"] == metrics["first loss"]["p50"]
        assert metrics["loss of step 1"]["p50"] == metrics["last loss"]["p50"]


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["--fit"], ("fit_memory", None)),
        (["--fit", "5"], ("fit_memory", 5)),
        (["--prepare", "2GiB"], ("prepare_training", "2GiB")),
    ],
)
def test_a_model_is_fitted_or_prepared(tmp_path, monkeypatch, asked, words, how):
    common = ["--steps", 1, "--warmup", 1, "--peers", "ours", "--out", tmp_path / "model.csv"]
    what, memory = how
    if what == "prepare_training":  # a plain model takes no option of Liger's loss
        monkeypatch.setattr("transformers.Qwen3MoeForCausalLM.forward", without_chunks())
    called(monkeypatch, "model", *words, *common)
    sizes = {"batch_size": 1, "seq_len": 64, "memory": memory}
    assert [call for call in asked if isinstance(call, tuple)] == [(what, sizes)]


def without_chunks():
    forward = transformers.Qwen3MoeForCausalLM.forward

    @functools.wraps(forward)
    def plain(self, *args, chunk_mem_const, **kwargs):
        return forward(self, *args, **kwargs)

    return plain


def test_lora_of_ours_is_joined(tmp_path, monkeypatch):
    from moe_qlora.speed import joined_lora

    join, joined = joined_lora.join_lora, []
    monkeypatch.setattr(
        joined_lora, "join_lora", lambda model: joined.append(join(model)) or joined[0]
    )
    out = tmp_path / "model.csv"
    asked = ["--merge-lora", "--steps", 1, "--warmup", 1, "--peers", "ours,frozen", "--out", out]
    called(monkeypatch, "model", *asked)
    ours, frozen = (of_peer(rows_of(out), peer)["step"] for peer in ("ours", "frozen"))
    assert len(joined) == 1 and joined[0].layers == 3 * joined[0].products > 0
    assert "with=merge-lora" in ours["setting"] and "with=" not in frozen["setting"]


@pytest.mark.parametrize("script", ["model", "layer"])
def test_a_peer_that_is_none_is_refused(monkeypatch, capsys, script):
    with pytest.raises(SystemExit):
        called(monkeypatch, script, "--peers", "ours,theirs")
    assert "theirs: expected some of ours,frozen,peft,bnb" in capsys.readouterr().err.replace(
        ", ", ","
    )


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_a_model_made_module_by_module_is_initialized_as_stock(monkeypatch, model):
    monkeypatch.syspath_prepend(str(BENCH))
    from model import build
    from shapes import whole_config

    config = whole_config(model, tiny=True)
    torch.manual_seed(0)
    stock = model_class(model)._from_config(config, dtype=torch.bfloat16)
    ours = build(config, torch.device("cpu"))
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == dict(stock.named_parameters()).keys()
    for name, parameter in stock.named_parameters():
        made, expected = parameters[name].detach(), parameter.detach()
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape), name
        assert made.float().mean() == pytest.approx(float(expected.float().mean()), abs=0.05), name
        if made.numel() >= 512:
            std = float(expected.float().std())
            assert made.float().std() == pytest.approx(std, rel=0.25), name
    buffers = dict(ours.named_buffers())
    assert buffers.keys() == dict(stock.named_buffers()).keys()
    for name, buffer in stock.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_published_sizes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from shapes import SHAPES, whole_config

    billions = {
        "qwen3-30b-a3b": 30.5,
        "mixtral-8x7b": 46.7,
        "gpt-oss-20b": 20.9,
        "glm-4.5-air": 106.9,
        "deepseek-v3": 671.0,
        "qwen3-235b-a22b": 235.1,
        "gpt-oss-120b": 116.8,
    }
    assert billions.keys() == SHAPES.keys()
    for name, expected in billions.items():
        config = whole_config(name)
        with torch.device("meta"):
            built = model_class(config.model_type)._from_config(config, dtype=torch.bfloat16)
        count = sum(parameter.numel() for parameter in built.parameters())
        assert count / 1e9 == pytest.approx(expected, rel=0.01), name


def test_fewer_layers_of_a_config_file(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH))
    from shapes import whole_config

    whole_config("gpt_oss").save_pretrained(tmp_path)
    config = whole_config(str(tmp_path), layers=3)
    assert config.model_type == "gpt_oss"
    assert config.num_hidden_layers == len(config.layer_types) == 3
    with pytest.raises(ValueError, match="no-such-model: neither a file"):
        whole_config("no-such-model")


def test_a_tiny_layer_beside_its_peers_and_its_plot(tmp_path, monkeypatch):
    out = tmp_path / "layer.csv"
    called(monkeypatch, "layer", "--repeat", 2, "--out", out)
    rows = rows_of(out)
    figures = {"forward", "step", "step, checkpointed"}
    for peer in ("ours", "frozen", "peft", "bnb"):
        metrics = of_peer(rows, peer)
        assert figures <= metrics.keys(), peer
        for name in ("step", "step, checkpointed"):
            assert {f"{name} over FLOP floor", f"{name} over byte floor"} <= metrics.keys(), peer
    # Twice the arithmetic of a forward, and three times under checkpointing, in the same floor.
    frozen = of_peer(rows, "frozen")
    floors = [
        float(frozen[name]["p50"]) / float(frozen[f"{name} over FLOP floor"]["p50"])
        for name in ("step", "step, checkpointed")
    ]
    assert floors[1] == pytest.approx(1.5 * floors[0], rel=1e-3)
    draw(tmp_path, monkeypatch, {"layer-tiny.png"})


def test_a_peer_that_fails_is_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCH))
    from common import Rows, environment

    out = tmp_path / "layer.csv"
    rows = Rows(out, environment(torch.device("cpu")), "tiny", "tokens=1 peer=theirs")
    rows.fail(RuntimeError("launch grid too large\nand more"))
    (row,) = rows_of(out)
    assert row["metric"] == "fails: RuntimeError: launch grid too large"
    assert {row["p20"], row["p50"], row["p80"]} == {"nan"}
    assert "launch grid too large" in capsys.readouterr().out


def draw(folder, monkeypatch, expected):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCH))
    import plot

    monkeypatch.setattr(plot, "RESULTS", folder)
    plot.main()
    pictures = {path.name: path for path in folder.glob("*.png")}
    assert pictures.keys() == expected
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.values())


@pytest.mark.parametrize("path", sorted((BENCH / "results").glob("*.csv")), ids=lambda p: p.name)
def test_every_result_says_where_it_comes_from(path):
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        required = MANY_GPUS if path.name.startswith("two_gpu") else REQUIRED
        missing = [column for column in required if not row.get(column)]
        assert not missing, (path.name, row, missing)


def test_percentiles(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from common import percentiles

    assert percentiles([3.0]) == (3.0, 3.0, 3.0)
    assert percentiles([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == (2.0, 3.5, 5.0)


def test_each_setting_of_a_whole_model_has_a_bar_of_its_own(monkeypatch):
    """Bars of equal captions would show the newest of runs that differ."""
    monkeypatch.syspath_prepend(str(BENCH))
    import plot

    settings: dict[tuple[str, str], set[str]] = {}
    for row, setting in plot.rows(BENCH / "results/model.csv"):
        if row["metric"] == "throughput" and "peer" in setting:
            settings.setdefault((row["name"], plot.caption(setting)), set()).add(row["setting"])
    assert len(settings) > 20
    assert not {bar: several for bar, several in settings.items() if len(several) > 1}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The script of the table of what fits, its cases small programs instead of model.py."""
    monkeypatch.syspath_prepend(str(BENCH))
    import fit_table

    heading = ",".join((*REQUIRED[:8], "name", "setting", "metric", "unit", "p20", "p50", "p80"))
    row = ",".join(["x"] * 10)
    figures = {
        "throughput": 20300,
        "peak in training": 3.1e10,
        "reserved in training": 3.2e10,
        "memory to fit": 3.3e10,
        "planned peak, error": -1.25,
        "layers kept": 40,
        "layers kept in part": 6,
        "layers recomputed": 2,
    }
    out = tmp_path / "model.csv"
    out.write_text(f"{heading}\n{row},throughput,x,1,1,1\n")  # of a run before
    rows = "".join(f"{row},{json.dumps(m)},x,1,{value},9\n" for m, value in figures.items())
    failed = f"{row},fails: OutOfMemoryError: CUDA out of memory,none,nan,nan,nan\n"
    programs = {
        "good": f"open({str(out)!r}, 'a').write({rows!r})",
        "slow": "import time; time.sleep(60)",
        "failed": f"open({str(out)!r}, 'a').write({failed!r})",
        "broken": "raise ValueError('it broke')",
    }
    cases = tuple(fit_table.Case(n, "ours", "", limit=4 if n == "slow" else 30) for n in programs)
    monkeypatch.setattr(fit_table, "CASES", cases)
    monkeypatch.setattr(
        fit_table, "command", lambda case, _: [sys.executable, "-c", programs[case.name]]
    )

    def called(*words):
        asked = ["fit_table.py", "--out", str(out), "--log", str(tmp_path / "log"), *words]
        monkeypatch.setattr(sys, "argv", asked)
        fit_table.main()

    return called


def test_a_table_of_what_fits_goes_on_after_cases_that_end_without_a_speed(table, capsys):
    table("--only", "broken,failed,good,slow")
    lines = [
        tuple(cell.strip() for cell in line.split("|")[1:-1])
        for line in capsys.readouterr().out.splitlines()
    ]
    assert {len(line) for line in lines} == {8}
    said = {line[0]: line[1:7] for line in lines[2:]}
    sizes = ("31.00 GB", "32.00 GB", "33.00 GB")
    assert said["good"] == ("20,300", *sizes, "-1.2 %", "40/6/2")
    assert said["slow"][0] == "not within 4 s"
    assert said["failed"][0] == "fails: OutOfMemoryError: CUDA out of memory"
    assert said["broken"][0] == "ValueError: it broke"


def test_no_case_starts_when_little_time_is_left(table, capsys):
    table("--within", "9")
    assert capsys.readouterr().out.count("no time left") == 4


def test_every_case_of_the_table_is_a_setting_of_its_own(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import fit_table
    import model
    import plot

    settings, captions = set(), set()
    options = SimpleNamespace(device="cuda", out="out.csv", tiny=False, layers=None)
    options.commit = "abc"
    for case in fit_table.CASES:
        words = fit_table.command(case, options)
        assert Path(words[2]).exists()
        monkeypatch.setattr(sys, "argv", words[2:])
        asked = model._options()
        setting = model._setting(case.peer, asked, 48)
        pairs = (word.partition("=") for word in setting.split())
        captions.add((asked.model, plot.caption({key: value or key for key, _, value in pairs})))
        settings.add((asked.model, setting))
    assert len(settings) == len(captions) == len(fit_table.CASES)
