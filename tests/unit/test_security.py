"""What a checkpoint of an unknown author can do: nothing but be refused in one sentence."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from folders import set_json
from safetensors.torch import save_file
from training import NF4, lora, packed

import moe_qlora
from moe_qlora.cli import dump as dump_command
from moe_qlora.errors import visible
from moe_qlora.testing import tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

NOTE = "moe_qlora_adapter"
EVIL = "\x1b]0;owned\x07\x1b[2J\x7f\x9b31m\u202e\u2028"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with `source` (plain, in two shards), `packed`, and `adapter`."""
    root = tmp_path_factory.mktemp("made")
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(
        root / "source", max_shard_size="100KB"
    )
    moe_qlora.quantize_checkpoint(root / "source", root / "packed", NF4)
    lora(packed(dtype=torch.bfloat16), "q_proj").save_pretrained(root / "adapter")
    return root


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy of `made` that a test may spoil."""
    return shutil.copytree(made, tmp_path / "made")


SUBCOMMANDS = {
    "dump": ["dump", "source"],
    "dump packed": ["dump", "packed"],
    "plan": ["plan", "source", "--seq", "64"],
    "quantize": ["quantize", "source", "out", "--quiet"],
    "verify": ["verify", "source"],
    "verify packed": ["verify", "packed"],
    "merge": ["merge", "source", "adapter", "out", "--quiet"],
    "merge like training": ["merge", "source", "adapter", "out", "--like-training", "--quiet"],
    "merge packed": ["merge", "packed", "adapter", "out", "--quiet"],
}


@pytest.fixture
def called(cli, folder, monkeypatch):
    """Run one of SUBCOMMANDS in the spoiled folder: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)
    return lambda name: cli(*SUBCOMMANDS[name])


# Code


class Bomb:
    """What unpickles as a call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def arm(path: Path, marker: Path) -> None:
    """Give a folder everything by which libraries find code in it; all of it leaves a marker."""
    code = f"from pathlib import Path; Path({str(marker)!r}).touch()"
    (path / "custom_generate").mkdir()
    for name in ("evil.py", "modeling_evil.py", "custom_generate/generate.py"):
        (path / name).write_text(code)
    autos = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoProcessor", "AutoTokenizer")
    auto_map = dict.fromkeys(autos, "evil.Model")
    mapping = {"base_model_class": "Model", "parent_library": "evil"}
    for name, more in (
        ("config.json", {"custom_pipelines": {"x": {"impl": "evil.Model"}}}),
        ("tokenizer_config.json", {"tokenizer_class": "Tokenizer"}),
        ("processor_config.json", {"processor_class": "Tokenizer"}),
        ("generation_config.json", {"custom_generate": "evil"}),
        ("adapter_config.json", {"auto_mapping": mapping}),
    ):
        if (path / name).exists() or not name.startswith(("config", "adapter")):
            more = more if name.startswith("adapter") else {"auto_map": auto_map, **more}
            set_json(path / name, **more)
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "adapter_model.bin"):
        (path / name).write_bytes(pickle.dumps({"weight": Bomb(marker)}))


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_no_code_of_a_checkpoint_runs(called, folder, name, monkeypatch):
    """The model type is one that transformers knows, so that nothing needs the code."""
    marker = folder / "marker"
    for part in ("source", "adapter", "packed"):
        arm(folder / part, marker)
    for file in (folder / "packed").glob("*.bin"):
        file.unlink()
    monkeypatch.syspath_prepend(folder / "adapter")  # where parent_library would be found
    code, _, err = called(name)
    assert not marker.exists()
    # A packed folder's config.json is no other than the one that was written.
    assert (code, err) == (0, "") or name.startswith("verify ")


def test_pickles_are_never_read(called, folder):
    marker, source = folder / "marker", folder / "source"
    for file in source.glob("*.safetensors*"):
        file.unlink()
    arm(source, marker)
    for name, expected in {"dump": 0, "plan": 0, "verify": 1, "quantize": 2, "merge": 2}.items():
        code, _, err = called(name)
        assert (code, marker.exists()) == (expected, False), name
        assert ("a pickle, which is never read" in err) is (expected > 0)
    arm(folder / "adapter", marker)
    (folder / "adapter/adapter_model.safetensors").unlink()
    code, _, err = called("merge packed")
    assert (code, marker.exists()) == (2, False) and "a pickle, which is never read" in err


@pytest.mark.parametrize("key", ["_attn_implementation", "_experts_implementation"])
def test_no_kernel_of_the_hub_is_asked_for(called, folder, key, monkeypatch):
    """A kernel is code too, and a configuration can name one."""
    from transformers.integrations import hub_kernels

    asked = []
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args: True)
    monkeypatch.setattr(
        hub_kernels, "get_kernel", lambda *args, **kwargs: asked.append(args), raising=False
    )
    set_json(folder / "source/config.json", **{key: "somebody/kernel"})
    for name in ("dump", "plan", "quantize", "merge"):
        code, _, err = called(name)
        assert (code, err) == (0, ""), name
        shutil.rmtree(folder / "out", ignore_errors=True)
    assert not asked


# JSON


READERS = {
    "source/config.json": ["dump", "plan", "quantize", "verify", "merge"],
    "packed/config.json": ["dump packed", "verify packed", "merge packed"],
    "packed/moe_qlora-*.json": ["verify packed", "merge packed"],
    "source/model.safetensors.index.json": ["quantize", "verify", "merge"],
    "adapter/adapter_config.json": ["merge", "merge packed"],
    "adapter/moe_qlora_adapter.json": ["merge like training"],
}


def check_refused(result: tuple[int, str, str], words: str = "") -> None:
    code, _, err = result
    assert code in (1, 2) and err.startswith(("error: ", "damaged: "))
    assert err.endswith((".\n", ")\n")) and err.count("\n") == 1
    assert len(err) < 2000 and words in err


@pytest.mark.parametrize("file", READERS)
def test_json_that_no_one_wrote_is_one_sentence(called, folder, file):
    """By every reader; what is refused is in models/test_files.py."""
    (path,) = folder.glob(file)
    for text in ('{"model_type": "qwen3_moe", "model_type": "x"}', "[" * 100_000):
        path.write_text(text)
        for name in READERS[file]:
            check_refused(called(name))


def test_a_file_that_is_too_long_is_not_read(called, folder):
    with (folder / "source/config.json").open("ab") as handle:
        handle.truncate(1 << 30)  # it has holes, and takes no room
    for name in ("dump", "merge", "quantize"):
        check_refused(called(name), "is longer than")


BASE = {"name": "base", "fields": {}, "bits": {"lm_head.weight": "0x1"}}


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("adapter_config", {"rank_pattern": {"[": 4}}, "no regular expression"),
        ("adapter_config", {"target_parameters": "["}, "target_parameters"),
        (NOTE, {"base": BASE}, "base.bits."),
    ],
)
def test_adapter_files_that_no_one_wrote_are_one_sentence(called, folder, file, fields, words):
    set_json(folder / f"adapter/{file}.json", **fields)
    check_refused(called("merge"), words)


@pytest.mark.parametrize(
    ("work", "file"),
    [
        ("export", "adapter/README.md"),
        ("export", f"adapter/{NOTE}.json"),
        ("merge", "source/config.json"),
        ("quantize", "source/additional_chat_templates"),
        ("quantize", "source/model.safetensors.index.json"),
    ],
)
def test_links_out_of_a_folder_are_not_followed(folder, work, file):
    """The folder that is made of it may be published."""
    source, adapter, out = folder / "source", folder / "adapter", folder / "out"
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool.jinja").write_text("{{ x }}")
    (folder / file).rename(folder / "secret")
    (folder / file).symlink_to(folder / "secret")
    calls = {
        "export": lambda: moe_qlora.export_adapter(adapter, out, base=source, target="peft"),
        "merge": lambda: moe_qlora.merge_adapter(source, adapter, out),
        "quantize": lambda: moe_qlora.quantize_checkpoint(source, out, NF4),
    }
    with pytest.raises(moe_qlora.MoeQloraError, match="is a link that leads out of its folder"):
        calls[work]()
    assert not out.exists()


# Names


SEEN = "\\u001b]0;owned\\u0007\\u001b[2J\\u007f\\u009b31m\\u202e\\u2028"


def check_clean(*texts: str) -> None:
    assert not [char for char in "".join(texts) if not char.isprintable() and char != "\n"]


def test_visible():
    assert visible(EVIL) == str(moe_qlora.MoeQloraError(EVIL)) == SEEN
    assert visible("a\nb\tc") == "a\\u000ab\\u0009c" and visible("a\nb", keep="\n") == "a\nb"
    assert visible(os.fsdecode(b"\xff") + "\U000e0041") == "\\udcff\\U000e0041"
    plain = "model.layers.0, \u00e9\u4e2d\U0001f600"
    assert visible(plain) == plain


def test_names_of_tensors_files_folders_and_values_reach_no_terminal(cli, folder):
    source = folder / f"s{EVIL}"
    (folder / "source").rename(source)
    set_json(source / "config.json", quantization_config={"quant_method": EVIL})
    for name, *more in (("dump", "--why"), ("plan", "--seq", "64"), ("quantize", folder / "new")):
        code, out, err = cli(name, source, *more)
        assert "\\u001b" in out + err
        check_clean(out, err)
    code, out, err = cli("dump", source, "--color", "always")
    assert SEEN in out and "\x1b[33m" in out
    set_json(source / "config.json", quantization_config=None)
    index = source / "model.safetensors.index.json"
    held = json.loads(index.read_text())["weight_map"]
    set_json(index, weight_map={**held, EVIL: next(iter(held.values())), "other": EVIL})
    save_file({f"{EVIL}[red]": torch.full((2, 2), float("nan"))}, source / f"{EVIL}.safetensors")
    for arguments in (
        ["verify", source], ["verify", source, "--json"], ["quantize", source, folder / "other"],
        ["merge", source, folder / "adapter", folder / f"o{EVIL}"],
        ["verify", "a", EVIL], [EVIL], ["dump", "a", "--quant", EVIL],
    ):  # fmt: skip
        code, out, err = cli(*arguments)
        assert code in (1, 2)
        check_clean(out, err)


def test_lists_to_paste_quote_names_that_are_no_plain_ones():
    names = ("model.layers.0.x", "model.layers.1.x", 'a.0."},\n# {x}', "- b: {c}", "a.1.{i}")
    found = {"target_parameters": names, "exclude_modules": (), "rejected": (), "experts": ()}
    loaded = yaml.safe_load(dump_command._to_paste(found, True))
    assert loaded["lora_target_parameters"] == ["x", '"},\n# {x}', "- b: {c}", "{i}"]
    pasted = eval(f"dict({dump_command._to_paste(found, False)})")
    assert sorted(pasted["target_parameters"]) == sorted(names)
