"""`moe-qlora verify`: what it calls damaged, and whether its errors are those of the weights."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import contents, set_json
from safetensors.torch import load_file, save_file
from training import SETTINGS as KINDS
from training import loaded
from transformers import AutoModelForCausalLM

import moe_qlora
from moe_qlora.checkpoint import conversion
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import CheckpointError
from moe_qlora.packing import codec, parametrize
from moe_qlora.packing.decoders import from_quant_state
from moe_qlora.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def cli(cli):
    """Run `moe-qlora verify ARGUMENTS`: exit code, stdout, stderr."""
    return partial(cli, "verify")


def folders(tmp_path: Path, kind: str, family: str = "qwen3_moe") -> tuple[Any, Path, Path]:
    """A model packed while it was loaded, its folder, and the folder of its source."""
    plain = tiny_model(family, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "source")
    model = loaded(tmp_path / "source", KINDS[kind], type(plain), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "packed", max_shard_size="50KB")
    return model, tmp_path / "packed", tmp_path / "source"


@pytest.fixture(scope="module")
def nf4(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("nf4"), "nf4")


def check_damaged(result: tuple[int, str, str], *parts: str) -> None:
    code, _, err = result
    lines = err.splitlines()
    assert code == 1 and any(line.startswith("damaged: ") for line in lines)
    assert all(line.startswith(("damaged: ", "warning: ")) for line in lines)
    assert len(set(lines)) == len(lines)
    assert all(part in err for part in parts), err


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_sound_folder_is_good_and_stays_as_it_is(cli, tmp_path, kind):
    model, folder, _ = folders(tmp_path, kind)
    before = contents(folder)
    code, out, err = cli(folder)
    assert (code, err) == (0, "") and "is whole" in out and "warning:" not in out
    found = json.loads(cli(folder, "--json")[1])
    assert (found["good"], found["problems"], found["warnings"]) == (True, [], [])
    assert found["kind"] == KINDS[kind].get("bnb_4bit_quant_type", "int8")
    stacks = list(parametrize.iter_packed(model))
    assert found["experts"] == len(stacks)
    names = [type(module).__name__ for module in model.modules()]
    assert found["linears"] == names.count("Linear4bit") + names.count("Linear8bitLt") > 0
    assert found["tensors"] == len(model.state_dict())
    assert found["nbytes"] == sum(t.nbytes for t in model.state_dict().values())
    assert contents(folder) == before


def test_what_changed_in_config_json_and_what_was_left_is_named(cli, nf4, tmp_path):
    folder = tmp_path / "packed"
    shutil.copytree(nf4[1], folder)
    names = ["model-0123abcd-00001-of-00001.safetensors", "model.safetensors"]
    for name in (*names, "training_args.bin", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"")
    (folder / ".moe_qlora.partial").mkdir()
    code, out, err = cli(folder)
    assert code == 0 and "warning:" not in out
    for name, line in zip([*sorted(names), ".partial"], err.splitlines(), strict=True):
        assert line.startswith("warning: ") and name in line
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["load_in_4bit"] = False
    set_json(folder / "config.json", **config | {"num_experts_per_tok": 1})
    changed = "it changed in num_experts_per_tok, quantization_config"
    check_damaged(cli(folder), "config.json", changed)


RECORD = "gate_up_proj.quant_state.bitsandbytes__nf4"
LINEAR = "q_proj.weight.quant_state.bitsandbytes__nf4"
Change = Callable[[torch.Tensor], torch.Tensor]


def text(content: str) -> torch.Tensor:
    return torch.tensor(list(content.encode()), dtype=torch.uint8)


def saying(**changes: object) -> Change:
    """A function that changes what a record says."""
    return lambda record: text(json.dumps(json.loads(bytes(record.tolist())) | changes))


# The end of a key, how its tensor is changed, what is said without the model. bitsandbytes believes
# what a record says of a Linear layer's shape and blocks.
FORGED: list[tuple[str, Change, str]] = [
    (RECORD, torch.zeros_like, "a record of its settings that cannot be read"),
    (RECORD, lambda record: text('{"a":' * 9000 + "1" + "}" * 9000), ""),
    (LINEAR, saying(shape=[1 << 14, 1 << 14]), ""),
    (LINEAR, saying(blocksize=1), ""),
    ("q_proj.weight", lambda codes: codes[:3], ""),
]


@pytest.mark.parametrize(("end", "change", "part"), FORGED, ids=map(str, range(len(FORGED))))
def test_no_kernel_is_led_astray_by_statistics(cli, tmp_path, nf4, end, change, part):
    state = nf4[0].state_dict()
    key = next(key for key in state if key.endswith(end))
    nf4[0].save_pretrained(tmp_path, state_dict=state | {key: change(state[key])})
    if part:  # which is seen without the model
        check_damaged(cli(tmp_path), part, key.partition(".quant_state")[0])
    with moe_qlora.enabled(), pytest.raises(CheckpointError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_plain_checkpoint_is_checked_as_far_as_it_can_be(cli, tmp_path):
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    report = verify(tmp_path)
    assert (report.good, report.kind, report.experts) == (True, "plain", 0)
    assert report.files > 2 and not report.warnings
    save_file({"x": torch.ones(1)}, tmp_path / "stray.safetensors")
    assert "stray.safetensors" in verify(tmp_path).warnings[0]

    first, *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    tensors = load_file(first)
    key = next(iter(tensors))
    tensors[key].view(-1)[3] = float("inf")
    save_file(tensors, first)
    check_damaged(cli(tmp_path), first.name, key, "NaN or inf")
    last.write_bytes(last.read_bytes()[:-1])
    check_damaged(cli(tmp_path), last.name)
    last.unlink()
    check_damaged(cli(tmp_path), last.name, "missing")
    for name, text in (("model.safetensors.index.json", "{"), ("config.json", "[1]")):
        (tmp_path / name).write_text(text)
        check_damaged(cli(tmp_path), name)


def test_bounds_may_be_infinite_and_weights_may_not(tmp_path):
    bounds = {"low": torch.tensor(-torch.inf), "high": torch.full((3,), torch.inf)}
    file = tmp_path / "model.safetensors"
    save_file(bounds, file)
    assert verify(tmp_path).good
    for name, wrong in (("w", torch.full((3, 1), torch.inf)), ("b", torch.tensor([torch.nan]))):
        save_file(bounds | {name: wrong}, file)
        assert f"{name} holds NaN or inf" in verify(tmp_path).problems[0]


def reference(weight: torch.Tensor, decoded: torch.Tensor) -> float:
    """Relative Frobenius error, the plain way."""
    return float((weight.double() - decoded.double()).norm() / weight.double().norm())


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3_moe", "bf16 storage"), ("dbrx", "int8"), ("diffusion_gemma", "nf4")],
)
def test_errors_are_those_of_the_weights(tmp_path, monkeypatch, family, kind):
    model, folder, source = folders(tmp_path, kind, family)
    plain = type(model).from_pretrained(source, dtype=torch.bfloat16)
    monkeypatch.setattr(conversion, "SLICE_ELEMENTS", 3000)
    found = {error.name: error for error in verify(folder, source).errors}
    stacks = {f"{path}.{leaf}": (m, leaf) for path, m, leaf in parametrize.iter_packed(model)}
    assert stacks.keys() <= found.keys() or family == "diffusion_gemma"  # of tied ones once
    for name, error in found.items():
        weight, packed = plain.get_parameter(name), None
        assert error.expert == (name in stacks)
        if error.expert:
            packed = parametrize.read_packed(*stacks[name])
        elif kind == "bf16 storage":  # straight from bitsandbytes' statistics
            layer = model.get_parameter(name)
            packed = from_quant_state(layer.data, layer.quant_state)
        if packed is not None:
            decoded = codec.unpack(packed)
            assert error.relative == pytest.approx(reference(weight, decoded), rel=1e-5)
        if error.expert:
            pairs = zip(weight.view(4, -1), decoded.view(4, -1), strict=True)
            each = [reference(*pair) for pair in pairs]
            assert error.shape == weight.shape and error.experts == pytest.approx(each, rel=1e-5)
    names = [type(module).__name__ for module in model.modules()]
    layers = len(found.keys() - stacks.keys())
    assert layers == names.count("Linear4bit") + names.count("Linear8bitLt")
