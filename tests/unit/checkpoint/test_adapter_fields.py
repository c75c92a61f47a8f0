"""Fields of adapter_config.json: of one type and range, however the adapter is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from training import loaded, lora

import moe_qlora
from moe_qlora.testing import tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fields") / "base"
    tiny_model("qwen3_moe").save_pretrained(folder)
    return folder


@pytest.fixture
def model(base: Path) -> Any:
    return loaded(base, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})


@pytest.fixture
def adapter(model: Any, base: Path, tmp_path: Path) -> Path:
    lora(model, "q_proj").save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def change(adapter: Path, out: Path, **fields: Any) -> Path:
    shutil.copytree(adapter, out)
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | fields))
    return out


VALUES = [
    *({"use_rslora": value} for value in ("no", "false", 0, 1.0, [])),
    *({field: "no"} for field in ("use_dora", "lora_bias", "fan_in_fan_out", "inference_mode")),
    *({"r": value} for value in (0, -2, True, 2.0, "2", None, 300_000)),
    *({"lora_alpha": value} for value in (1e308, float("inf"), float("nan"), -1, True, "8")),
    *({"rank_pattern": {"q_proj": value}} for value in (0, True)),
    *({"alpha_pattern": {"q_proj": value}} for value in (float("nan"), 1e39)),
    *({"layers_to_transform": value} for value in ([True], 1.5)),
    *({"lora_dropout": value} for value in (2, float("nan"), "0")),
    {"bias": "some"},
]


def test_every_reader_refuses_a_wrong_value_in_one_sentence(
    adapter: Path, model: Any, base: Path, tmp_path: Path
) -> None:
    readers: dict[str, Callable[[Path], Any]] = {
        "merge": lambda bad: moe_qlora.merge_adapter(base, bad, tmp_path / "out"),
        "load": lambda bad: moe_qlora.load_adapter(model, bad, "other"),
        "export": lambda bad: moe_qlora.export_adapter(
            bad, tmp_path / "out", base=base, target="sglang"
        ),
    }
    for number, fields in enumerate(VALUES):
        bad = change(adapter, tmp_path / str(number), **fields)
        ((field, value),) = fields.items()
        for name, read in readers.items():
            with pytest.raises(moe_qlora.MoeQloraError) as caught:
                read(bad)
            seen = str(caught.value)
            shown = next(iter(value.values())) if isinstance(value, dict) else value
            shown = shown[0] if isinstance(shown, list) and shown else shown
            said = f"{bad}/adapter_config.json is damaged: {field}"
            assert seen.startswith(said), (name, fields, seen)
            assert f" is {shown!r}: " in seen and "\n" not in seen, (name, fields, seen)


@pytest.mark.parametrize("fields", [{"use_rslora": "no"}, {"lora_alpha": 1e308}], ids=str)
def test_stock_peft_refuses_it_on_a_packed_model(
    fields: dict[str, Any], adapter: Path, base: Path, tmp_path: Path
) -> None:
    bad = change(adapter, tmp_path / "bad", **fields)
    model, said = loaded(base), rf"bad/adapter_config.*{next(iter(fields))} is"
    with pytest.raises(moe_qlora.CheckpointError, match=said):
        PeftModel.from_pretrained(model, str(bad))
