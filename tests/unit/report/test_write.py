"""Reports of real folders: what each piece says is what the parts themselves say."""

from __future__ import annotations

import json
import logging.handlers
import os
import re
import shutil
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    TrainingArguments,
)

import moe_qlora
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import CheckpointError, ConfigError, visible
from moe_qlora.memory.budget import StepMoment
from moe_qlora.report import page
from moe_qlora.report.pieces import (
    ErrorPiece,
    LayoutPiece,
    LoraPiece,
    MemoryPiece,
    Missing,
    RoutingPiece,
    TrainingPiece,
)
from moe_qlora.testing import requires_gpu, tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

LAYERS, EXPERTS, TOP_K = 3, 8, 2  # of the inputs in conftest.py
PIECES = ("layout", "error", "routing", "lora", "memory", "training")


class Page(HTMLParser):
    """Tags, ids, links and text of a page; unbalanced tags fail."""

    VOID = {"meta", "link", "br", "wbr", "path", "rect"}

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(file.read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.attributes.append((tag, values))
        self.ids += [values["id"]] if "id" in values else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in ("li", "p") and self.open[-1] != tag:
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A report of a run with everything that can be measured, and its page."""
    file = tmp_path_factory.mktemp("out") / "report.html"
    report = moe_qlora.write_report(
        inputs.run, file, against=inputs.plain, text=inputs.text, seq=128
    )
    return report, file


def test_layout_and_bytes(whole, inputs):
    layout = whole[0].layout
    assert isinstance(layout, LayoutPiece)
    assert (layout.layers, layout.experts, layout.top_k) == (LAYERS, (EXPERTS,), TOP_K)
    assert {(g.role, g.count) for g in layout.groups} == {("gate_up", LAYERS), ("down", LAYERS)}
    assert layout.packed == "nf4"
    plan = moe_qlora.plan(str(inputs.packed), search=False)
    assert (layout.before, layout.after) == (plan.unpacked, plan.resident)


def test_errors_are_those_of_verify(whole, inputs):
    error = whole[0].error
    assert isinstance(error, ErrorPiece)
    expected = verify(inputs.packed, inputs.plain).errors
    maps = {one.pattern.split(" ")[0]: one for one in error.maps}
    for one in expected:
        if one.expert:
            layer = re.search(r"\d+", one.name)[0]
            row = maps[one.name.replace(f".{layer}.", ".*.")]
            assert row.errors[row.layers.index(layer)] == one.experts
    linears = [one for one in expected if not one.expert]
    assert sum(group.count for group in error.linears) == len(linears)
    worst = max(error.linears, key=lambda group: group.worst)
    assert worst.worst == max(one.relative for one in linears)


def test_routing_is_what_the_routers_chose(whole, inputs):
    """Against router logits of the adapted model, which transformers returns itself."""
    routing = whole[0].routing
    assert isinstance(routing, RoutingPiece)
    assert routing.adapted
    rows = [json.loads(line)["text"].encode() for line in inputs.text.read_text().splitlines()]
    assert (routing.texts, routing.tokens) == (len(rows), sum(map(len, rows)))
    with moe_qlora.enabled():
        model = AutoModelForCausalLM.from_pretrained(inputs.packed)
    model = moe_qlora.load_adapter(model, inputs.run / "checkpoint-4").eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs.packed)
    counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.long)
    for row in rows:
        with torch.no_grad():
            ids = torch.tensor([tokenizer(row.decode())["input_ids"]])
            out = model(input_ids=ids, output_router_logits=True)
        for layer, logits in enumerate(out.router_logits):
            for choice in logits.reshape(-1, EXPERTS).topk(TOP_K).indices.flatten():
                counts[layer, choice] += 1
    assert [list(layer.counts) for layer in routing.layers] == counts.tolist()


@requires_gpu()
def test_a_gpu_counts_what_the_cpu_does(inputs, tmp_path):
    """But for a few tokens whose choices are near a tie."""
    on_gpu = moe_qlora.write_report(inputs.packed, tmp_path / "a.html", text=inputs.text, seq=64)
    rows = [json.loads(line)["text"] for line in inputs.text.read_text().splitlines()]
    with moe_qlora.enabled():
        model = AutoModelForCausalLM.from_pretrained(inputs.packed, device_map="cpu")
    on_cpu = moe_qlora.write_report(model, tmp_path / "b.html", text=rows, seq=64)
    for one, other in zip(on_gpu.routing.layers, on_cpu.routing.layers, strict=True):
        assert (one.name, one.total) == (other.name, other.total)
        moved = sum(abs(a - b) for a, b in zip(one.counts, other.counts, strict=True))
        assert moved <= 0.05 * one.total


def test_lora_is_what_the_adapter_holds(whole, inputs):
    lora = whole[0].lora
    assert isinstance(lora, LoraPiece)
    stored = load_file(inputs.run / "checkpoint-4/adapter_model.safetensors")
    assert lora.trained == sum(tensor.numel() for tensor in stored.values())
    covered = {g.pattern.rpartition(".")[2]: (g.covered, g.count) for g in lora.groups}
    assert covered == {
        "gate_up_proj": (LAYERS, LAYERS),
        "down_proj": (LAYERS, LAYERS),
        "q_proj": (LAYERS, LAYERS),
        "v_proj": (LAYERS, LAYERS),
        "k_proj": (0, LAYERS),
        "o_proj": (0, LAYERS),
        "lm_head": (0, 1),
    }
    assert all(group.ranks == (4,) for group in lora.groups if group.covered)


def test_the_rehearsed_step_trains_what_the_adapter_does(whole):
    memory, lora = whole[0].memory, whole[0].lora
    assert isinstance(memory, MemoryPiece)
    assert memory.plan.trained_weights == lora.trained
    assert (memory.plan.settings.batch, memory.plan.settings.seq) == (12, 128)  # as the run had it
    assert max(moment.nbytes for moment in memory.moments) == memory.plan.peak.nbytes


def test_curves_are_those_of_the_run(whole, inputs):
    training = whole[0].training
    assert isinstance(training, TrainingPiece)
    state = json.loads((inputs.run / "checkpoint-4/trainer_state.json").read_text())
    losses = [(e["step"], e["loss"]) for e in state["log_history"] if "loss" in e]
    assert list(training.curve("loss").points) == losses and len(losses) == 4


def test_the_page_is_well_formed_alone_and_described(whole):
    page = Page(whole[1])
    assert len(page.ids) == len(set(page.ids))
    assert "Not measured" not in page.text
    for tag, values in page.attributes:
        assert tag not in ("script", "img", "iframe", "object", "form", "base")
        assert not any(name.startswith("on") for name in values)
        for name in ("href", "src"):
            assert values.get(name, "#").startswith(("#", "data:,"))
        if values.get("role") == "img":
            labels = values["aria-labelledby"].split()
            assert len(labels) == 2 and set(labels) <= set(page.ids)
    assert {v["href"][1:] for t, v in page.attributes if t == "a"} <= set(page.ids)
    style = whole[1].read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    assert "prefers-color-scheme: dark" in style


@pytest.mark.parametrize("missing", ["text", "against", "weights", "adapter", "model"])
def test_what_is_missing_says_so(inputs, tmp_path, missing):
    file = tmp_path / "report.html"
    source = {
        "text": lambda: inputs.packed,
        "against": lambda: inputs.packed,
        "weights": lambda: tiny_model("qwen3_moe", device="meta").config,
        "adapter": lambda: inputs.plain,
        "model": lambda: inputs.run / "checkpoint-4/trainer_state.json",
    }[missing]()
    if missing == "model":  # a log, and nothing else
        folder = tmp_path / "log"
        folder.mkdir()
        (folder / "trainer_state.json").write_bytes(source.read_bytes())
        source = folder
    report = moe_qlora.write_report(source, file, seq=64)
    without = {name for name in PIECES if isinstance(getattr(report, name), Missing)}
    expected = {
        "text": {"error", "routing", "lora", "training"},
        "against": {"error", "routing", "lora", "training"},
        "weights": {"error", "routing", "lora", "training"},
        "adapter": {"error", "routing", "lora", "training"},
        "model": {"layout", "error", "routing", "lora", "memory"},
    }[missing]
    assert without == expected
    page = Page(file)
    for name in without:
        why = getattr(report, name).why
        assert why.endswith(".") and why in page.text


def test_a_live_model_and_texts_of_a_notebook(inputs, tmp_path):
    with moe_qlora.enabled():
        model = AutoModelForCausalLM.from_pretrained(inputs.packed)
    config = LoraConfig(r=2, target_modules=["k_proj"])
    adapted = moe_qlora.get_peft_model(model, config, experts=True).train()
    file = tmp_path / "live.html"
    report = moe_qlora.write_report(adapted, file, text=["some text", "more"], seq=64)
    assert isinstance(report.routing, RoutingPiece)
    assert report.routing.tokens == len("some textmore")
    assert {sum(layer.counts) for layer in report.routing.layers} == {13 * TOP_K}
    assert report.lora.trained == adapted.get_nb_trainable_parameters()[0]
    assert report.memory.plan.trained_weights == report.lora.trained
    assert {g.pattern.rpartition(".")[2] for g in report.lora.groups if g.covered} == {
        "gate_up_proj",
        "down_proj",
        "k_proj",
    }
    assert report.layout.packed == "nf4" and report.layout.layers == LAYERS
    assert isinstance(report.memory, MemoryPiece)
    assert adapted.training


def test_an_adapter_of_chosen_experts(inputs, tmp_path):
    with moe_qlora.enabled():
        model = AutoModelForCausalLM.from_pretrained(
            inputs.plain, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
        )
    chosen = {"model.layers.1.mlp.experts": [1, 5], "model.layers.2.mlp.experts": [0, 3, 7]}
    config = LoraConfig(r=2, target_modules=["k_proj"])
    adapted = moe_qlora.get_peft_model(model, config, experts=chosen)
    adapted.save_pretrained(tmp_path / "adapter")
    trained = adapted.get_nb_trainable_parameters()[0]
    for source in (tmp_path / "adapter", adapted):
        report = moe_qlora.write_report(source, tmp_path / "report.html", seq=64)
        assert report.lora.trained == report.memory.plan.trained_weights == trained
        group = next(group for group in report.lora.groups if group.expert)
        assert (group.covered, group.count, group.chosen) == (2, LAYERS, (2, 3))
        assert "2 or 3 experts of each" in Page(tmp_path / "report.html").text
        assert report.layout.packed == "int8"  # as the adapter was trained


def test_a_model_with_an_adapter_that_transformers_added(inputs, tmp_path):
    with moe_qlora.enabled():
        model = AutoModelForCausalLM.from_pretrained(inputs.packed)
        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    report = moe_qlora.write_report(model, tmp_path / "report.html", seq=64)
    (covered,) = [group for group in report.lora.groups if group.covered]
    assert (covered.pattern.rpartition(".")[2], covered.ranks) == ("q_proj", (4,))
    assert report.memory.plan.trained_weights == report.lora.trained == covered.trained


def test_damage_costs_its_own_piece_alone(inputs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(inputs.run / "checkpoint-4", run)
    out = tmp_path / "report.html"
    (run / "trainer_state.json").write_text("{")
    report = moe_qlora.write_report(run, out, seq=64)
    assert report.training.fault and "trainer_state.json is no valid JSON" in report.training.why
    assert not any(isinstance(getattr(report, n), Missing) for n in ("layout", "lora", "memory"))
    (run / "adapter_model.safetensors").write_bytes(b"1234")
    report = moe_qlora.write_report(run, out, seq=64, text=inputs.text)
    assert report.lora.fault and report.routing.fault
    assert not any(isinstance(getattr(report, n), Missing) for n in ("layout", "memory"))
    assert out.read_text().count('class="warning"') == 3


def test_a_chat_template_that_refuses_a_conversation(inputs, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(inputs.packed)
    tokenizer.chat_template = "{{ raise_exception('Roles must alternate') }}"
    text = tmp_path / "chats.jsonl"
    text.write_text(json.dumps({"messages": [{"role": "system", "content": "a"}]}))
    out = tmp_path / "report.html"
    report = moe_qlora.write_report(inputs.packed, out, text=text, tokenizer=tokenizer, seq=64)
    assert report.routing.fault
    assert "did not take the text (TemplateError: Roles must alternate)" in report.routing.why
    assert report.routing.why in Page(out).text


def test_a_log_with_odd_numbers_is_drawn(tmp_path):
    losses = [1.0, 0.9999999999999999, 1e16]
    history = [{"step": n, "loss": y, "learning_rate": -5e-324} for n, y in enumerate(losses)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    moe_qlora.write_report(tmp_path, tmp_path / "report.html")
    said = "Not finite, or over 1e15: a logged value at 1 step, first at step 2."
    assert said in Page(tmp_path / "report.html").text


def test_a_model_of_which_nothing_is_packed(whole):
    for packed, name in (("nf4", "Weights, packed"), (None, "Weights")):
        report = replace(whole[0], layout=replace(whole[0].layout, packed=packed))
        assert next(iter(page._figures(report))).name == name


def test_names_of_others_are_text_on_the_page(inputs, tmp_path):
    folder = tmp_path / "<script>alert(1)<b>\u202e"
    shutil.copytree(inputs.plain, folder)
    out = tmp_path / "report.html"
    moe_qlora.write_report(folder, out, seq=64)
    content = out.read_text(encoding="utf-8")
    assert "<script" not in content and "\u202e" not in content
    assert "<script>alert(1)<b>\\u202e" in Page(out).text


def structure(file: Path) -> list[tuple[str, dict[str, str]]]:
    """Tags and attributes of a page, without line breaks in names and places in charts."""
    found = [(tag, values) for tag, values in Page(file).attributes if tag != "wbr"]
    return [(tag, {k: re.sub(r"[\d.]+", "", v) for k, v in a.items()}) for tag, a in found]


def with_texts(value, text, *path):
    """A record in which every text that may come from others is another one."""
    if isinstance(value, str):
        return text
    if isinstance(value, tuple):
        return tuple(with_texts(one, text, *path) for one in value)
    if not is_dataclass(value) or isinstance(value, StepMoment):
        return value
    values = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    return replace(value, **{name: with_texts(one, text, *path) for name, one in values.items()})


PAYLOADS = (
    "</title></style></script><script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>' onload='alert(1)",
    "--><svg/onload=alert(1)><!--]]></svg></desc></code>",
    "javascript:alert(1)//&#x3c;script&#x3e;{{7*7}}{%raw%}${7*7}",
    "a\x00\x1b[31m\u202e\u2028\u2029\u0085\ufeff;}</style><style>@import url(//x)",
)


@pytest.mark.parametrize("text", PAYLOADS)
def test_no_text_changes_the_page(whole, tmp_path, text):
    """Whatever names, values and messages are, tags and attributes stay what they were."""
    report, file = with_texts(whole[0], text), tmp_path / "page.html"
    missing = {name: Missing(text, fault=True) for name in PIECES}
    for hostile in (report, replace(report, **missing)):
        harmless = with_texts(hostile, "benign")
        file.write_text(page.render(harmless), encoding="utf-8")
        want = structure(file)
        file.write_text(page.render(hostile), encoding="utf-8")
        assert structure(file) == want
        seen = visible(text)
        assert Page(file).text.count(seen) > 5
        assert not set(file.read_text(encoding="utf-8")) & set("\0\x1b\u202e\u2028\u2029\ufeff")


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": "x"},
        {"target_parameters": "x"},
        {"peft_type": {}},
        {"layers_to_transform": "x"},
    ],
    ids=str,
)
def test_an_adapters_config_that_peft_cannot_follow_is_said_on_the_page(inputs, tmp_path, fields):
    run = shutil.copytree(inputs.run / "checkpoint-4", tmp_path / "run")
    config = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps(config | fields))
    report = moe_qlora.write_report(run, tmp_path / "report.html", base=inputs.plain, seq=16)
    assert report.memory.fault and not isinstance(report.layout, Missing)
    assert "adapter" in report.memory.why


def test_libraries_print_no_value_of_a_configuration(inputs, tmp_path):
    """Transformers' advice about a model type goes to the terminal as it is, with what it obeys."""
    base, said = tmp_path / "base", logging.handlers.BufferingHandler(1000)
    shutil.copytree(inputs.plain, base)
    (base / "config.json").write_text(json.dumps({"model_type": "\x1b]0;owned\x07"}))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (base / name).unlink()
    run = shutil.copytree(inputs.run / "checkpoint-4", tmp_path / "run")
    logger = logging.getLogger("transformers")
    logger.addHandler(said)
    report = moe_qlora.write_report(run, tmp_path / "report.html", base=base, text=inputs.text)
    logger.removeHandler(said)
    assert report.layout.fault and report.routing.fault
    assert not [record for record in said.buffer if "owned" in record.getMessage()]


def test_errors_are_sentences_and_leave_no_file(inputs, tmp_path):
    out = tmp_path / "report.html"
    with pytest.raises(ConfigError, match="seq is 0"):
        moe_qlora.write_report(inputs.plain, out, seq=0)
    with pytest.raises(ConfigError, match="batch is 0"):
        moe_qlora.write_report(inputs.plain, out, batch=0)
    with pytest.raises(ConfigError, match="no file that can be written"):
        moe_qlora.write_report(inputs.plain, tmp_path)
    os.mkfifo(out)  # as a device is: no file, though it is there
    with pytest.raises(ConfigError, match="no file that can be written"):
        moe_qlora.write_report(inputs.plain, out)
    out.unlink()
    with pytest.raises(ConfigError, match="no file that can be written"):
        moe_qlora.write_report(inputs.plain, tmp_path / "gone/report.html")
    with pytest.raises(CheckpointError, match="without config"):
        moe_qlora.write_report(inputs.packed, out, against=tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint, adapter or Trainer's run"):
        moe_qlora.write_report(tmp_path, out)
    with pytest.raises(ConfigError, match="is no file"):
        moe_qlora.write_report(inputs.packed, out, text=tmp_path / "gone.txt")
    assert not list(tmp_path.iterdir())
    kept = tmp_path / "train.jsonl"  # as completed by a shell, behind the wrong option
    kept.write_text("{}")
    with pytest.raises(ConfigError, match=r"exists and is no \.html file"):
        moe_qlora.write_report(inputs.packed, kept)
    assert kept.read_text() == "{}"


def text_of_page(source, file, **options):
    report = moe_qlora.write_report(source, file, **options)
    return report, " ".join(Page(file).text.split())


def test_a_run_is_rehearsed_with_rows_as_long_as_it_had(inputs, tmp_path):
    run, file = tmp_path / "run", tmp_path / "a.html"
    shutil.copytree(inputs.run, run)
    arguments = TrainingArguments(output_dir=str(run), report_to=[], gradient_accumulation_steps=2)
    for saved in run.rglob("training_args.bin"):
        torch.save(arguments, saved)
    report, said = text_of_page(run, file)
    assert report.memory.plan.settings.seq == 4096
    assert "How long rows are in training is not known here" in said

    state = next(run.rglob("checkpoint-4/trainer_state.json"))
    log = json.loads(state.read_text())
    log["num_input_tokens_seen"] = log["global_step"] * log["train_batch_size"] * 2 * 31
    state.write_text(json.dumps(log))
    report, said = text_of_page(run, file)
    assert report.memory.plan.settings.seq == 31 and "of the run on average" in said

    arguments.max_length = 96  # as TRL's arguments have it
    for saved in run.rglob("training_args.bin"):
        torch.save(arguments, saved)
    report, said = text_of_page(run, file)
    assert report.memory.plan.settings.seq == 96 and "max_length" in said
    report, said = text_of_page(run, file, seq=48)
    assert report.memory.plan.settings.seq == 48 and "as asked for" in said


def test_training_says_epochs_and_norms_of_gradients(whole):
    said = " ".join(Page(whole[1]).text.split())
    training = said[said.index("Training 4 steps") :]
    assert re.search(r"4 steps, (1 epoch|[\d.]+ epochs), from", training)
    assert "1 epochs" not in training
    for words in ("first", "last", "lowest", "highest", "Norm of the gradient"):
        assert words in training
