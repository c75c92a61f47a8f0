"""An adapter's base, told from other models of the same names and shapes; an adapter's fields."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from folders import set_json
from peft import LoraConfig, PeftModel
from training import NF4, loaded, lora, packed
from transformers import AutoModel
from upstream import ADAPTER_METHODS

import moe_qlora
from moe_qlora.checkpoint.training_codec import NOTE, fingerprint
from moe_qlora.errors import AdapterError
from moe_qlora.testing import tiny_model

# PEFT compares the names of folders, which says nothing of what is in them
pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bases by name, and an adapter trained on the one called base."""
    root = tmp_path_factory.mktemp("bases")
    settings: dict[str, dict[str, Any]] = {
        "base": {},
        "trained further": {},
        "another": {},
        "hidden_act": {"hidden_act": "gelu"},
        "longer": {"max_position_embeddings": 99},
    }
    for name, fields in settings.items():
        model, noise = tiny_model("qwen3_moe", seed=name == "another"), torch.Generator()
        for weight in model.parameters() if name == "trained further" else ():
            change = torch.randn(weight.shape, generator=noise) * weight.std()
            weight.data += 0.2 * change.nan_to_num()
        vars(model.config).update(fields)
        model.to(torch.bfloat16).save_pretrained(root / name)
    moe_qlora.quantize_checkpoint(root / "base", root / "packed", NF4)
    lora(base_model(root / "base"), "q_proj").save_pretrained(root / "adapter")
    return {path.name: path for path in root.iterdir()}


def base_model(folder: Path) -> Any:
    return loaded(folder, None if folder.name == "packed" else NF4, dtype=torch.bfloat16)


def adapted(model: Any) -> Any:
    return moe_qlora.adapt_lora_config(
        model, LoraConfig(r=2, target_modules=["q_proj"]), experts=True
    )


def by_stock_peft(model: Any, out: Path) -> Path:
    """With a second adapter, as TRL's DPO adds its reference."""
    model = peft.get_peft_model(model, adapted(model))
    model.add_adapter("ref", model.peft_config["default"])
    model.save_pretrained(str(out))
    assert (out / "ref" / NOTE).read_bytes() == (out / NOTE).read_bytes()
    return out


def by_transformers(model: Any, out: Path) -> Path:
    model.add_adapter(adapted(model))
    model.save_pretrained(str(out))
    return out


@pytest.mark.parametrize(
    "make", [by_stock_peft, pytest.param(by_transformers, marks=ADAPTER_METHODS)]
)
def test_an_adapter_names_the_model_that_it_was_on(folders, tmp_path, make):
    adapter = make(base_model(folders["base"]), tmp_path / "adapter")
    whole = json.loads((folders["adapter"] / NOTE).read_text())
    assert json.loads((adapter / NOTE).read_text()) == whole
    assert len(whole["base"]["bits"]) > 1 and whole["dtype"] == "bfloat16"
    with pytest.raises(AdapterError, match=rf"was trained on {folders['base']}, and .*another"):
        merge(folders["another"], adapter)


def load(folder: Path, adapter: Path) -> None:
    moe_qlora.load_adapter(base_model(folder), str(adapter))


def merge(folder: Path, adapter: Path) -> None:
    moe_qlora.merge_adapter(folder, adapter, adapter.parent / f"merged {folder.name}")


def load_by_peft(folder: Path, adapter: Path) -> None:
    PeftModel.from_pretrained(base_model(folder), str(adapter))


@pytest.mark.filterwarnings("error:.*was trained on")
@pytest.mark.parametrize(
    ("base", "use"), [("longer", load_by_peft), ("trained further", merge), ("packed", load)]
)
def test_the_same_base_is_no_alarm(folders: dict[str, Path], base: str, use: Any) -> None:
    use(folders[base], folders["adapter"])


@pytest.mark.parametrize(
    ("base", "use"),
    [("another", load), ("another", load_by_peft), ("another", merge), ("hidden_act", load)],
)
def test_another_base_is_an_error_that_names_both(folders, base, use):
    seen = "other weights" if base == "another" else f"{base}="
    words = rf"was trained on {folders['base']}, and {folders[base]} has {seen}"
    with pytest.raises(AdapterError, match=rf"{words}.*any_base=True \(--any-base\)\.$"):
        use(folders[base], folders["adapter"])


def test_a_merge_compares_weights_of_an_inner_models_adapter(folders, tmp_path):
    """Whose names have no prefix: of AutoModel, merged into AutoModelForCausalLM's folder."""
    inner, adapter = loaded(folders["another"], NF4, AutoModel, dtype="auto"), tmp_path / "adapter"
    lora(inner, "q_proj", task_type="FEATURE_EXTRACTION").save_pretrained(adapter)
    merge(folders["another"], adapter)
    with pytest.raises(AdapterError, match="has other weights"):
        merge(folders["packed"], adapter)


def test_any_base_is_taken_where_asked(folders: dict[str, Path], tmp_path: Path) -> None:
    adapter = str(folders["adapter"])
    moe_qlora.load_adapter(base_model(folders["another"]), adapter, any_base=True)
    moe_qlora.merge_adapter(folders["hidden_act"], adapter, tmp_path / "merged", any_base=True)
    assert (tmp_path / "merged/config.json").is_file()


def test_the_card_says_what_was_trained_on_and_its_program_runs(folders, tmp_path):
    """Base, codec, targets and versions; once, also where PEFT adds to the card."""
    card = (folders["adapter"] / "README.md").read_text()
    for said in (
        f"| base | `{folders['base']}` |",
        "| base was packed as | `nf4",
        "| target_parameters | `model.layers.*.mlp.experts.down_proj, ",
        "| rank, alpha | `2, 8` |",
        f"moe-qlora {moe_qlora.__version__}, transformers ",
        "library_name: peft",  # PEFT's own part
    ):
        assert said in card, said
    program = re.findall("```python\n(.*?)```", card.partition("moe_qlora: start")[2], re.DOTALL)
    found: dict[str, Any] = {}
    exec(program[0].replace('"ADAPTER"', repr(str(folders["adapter"]))), found)  # noqa: S102
    model, file = found["model"], tmp_path / "README.md"
    assert isinstance(model, PeftModel)
    model.save_pretrained(tmp_path)
    file.write_text(file.read_text() + "# Model of mine\n")
    model.save_pretrained(tmp_path)
    text = file.read_text()
    assert text.count("# Model of mine\n") == 1
    assert text.count("moe_qlora: start") == text.count("moe_qlora: end") == 1


@pytest.mark.filterwarnings("ignore:You have passed exclude_modules", "ignore:.*target_parameters")
def test_a_config_that_was_adapted_to_another_kind_of_model_is_refused(tmp_path) -> None:
    model = packed("qwen3_vl_moe")
    config = adapted(model)
    with pytest.raises(AdapterError, match=r"was not created: .*adapted to another model"):
        peft.get_peft_model(packed("llama4_text"), config)
    lora(model, "q_proj").save_pretrained(tmp_path)  # a model of pictures
    assert "AutoModelForImageTextToText.from_pretrained" in (tmp_path / "README.md").read_text()


# Fields of adapter_config.json: of one type and range, however the adapter is read
VALUES: list[tuple[str, Any, Any]] = [
    *(("use_rslora", value, value) for value in ("no", 0)),
    *(("r", value, value) for value in (0, True, 2.0, 300_000)),
    *(("lora_alpha", value, value) for value in (1e308, float("nan"), "8")),
    ("rank_pattern", {"q_proj": True}, True),
]


def test_every_reader_refuses_a_wrong_value_in_one_sentence(folders, tmp_path):
    base, adapter = folders["base"], folders["adapter"]
    model = moe_qlora.load_adapter(base_model(base), adapter)
    for number, (field, value, shown) in enumerate(VALUES):
        bad = Path(shutil.copytree(adapter, tmp_path / str(number)))
        set_json(bad / "adapter_config.json", **{field: value})
        shown = re.escape(repr(shown))
        said = rf"^{bad}/adapter_config\.json is damaged: {field}\S* is {shown}: [^\n]*$"
        with pytest.raises(moe_qlora.MoeQloraError, match=said):
            merge(base, bad)
        with pytest.raises(moe_qlora.MoeQloraError, match=said):
            moe_qlora.load_adapter(model, bad, "other")
    with pytest.raises(moe_qlora.MoeQloraError, match=said):
        load_by_peft(base, bad)


def test_trained_rows_and_adapters_leave_the_weights_of_a_fingerprint():
    """A run of added tokens resumes on a model that has its adapter, whose rows were trained."""
    model = tiny_model("qwen3_moe", tie_word_embeddings=True)
    before = fingerprint(model).bits
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 7])
    found = fingerprint(peft.get_peft_model(model, config).get_base_model()).bits
    assert len(before) > 1 and found == before
