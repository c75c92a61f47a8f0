"""Groups, targets and lists of modules that are not converted."""

from __future__ import annotations

import pytest
import torch
from folders import same
from prequantized import compressed, encode_fp8, encode_int, encode_nvfp4, write_tensors
from transformers.quantizers.quantizers_utils import should_convert_module
from upstream import SKIPPED_MODULES

from moe_qlora.checkpoint.prequantized import open_plain
from moe_qlora.checkpoint.prequantized.config import MakerConfig
from moe_qlora.errors import CheckpointError

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.experts.3.up_proj"
HEAD = "lm_head"


def weight(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(module: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{module}.weight{end}": tensor for end, tensor in parts.items()}


def group(target: str, **weights):
    made = compressed("pack-quantized", weights, [])["config_groups"]["group_0"]
    return {**made, "targets": [target]}


def test_groups_are_for_their_targets(tmp_path):
    """FP8 attention, INT4 experts and INT8 for one module by name, as mixed folders have it."""
    config, four = compressed("mixed-precision", {}, [HEAD]), UP.replace("3", "4")
    channel = {"num_bits": 8, "strategy": "channel"}
    config["config_groups"] = {
        "all": group("Linear", type="int", **channel),
        "attention": group("re:.*self_attn.*", type="float", **channel),
        "experts": group("re:.*experts.*", num_bits=4, type="int", strategy="group", group_size=32),
        "one": group(four, num_bits=8, type="int", strategy="group", group_size=16),
    }
    encoded = {
        Q: encode_fp8(weight(0, 24, 32), (1, 32), "_scale"),
        UP: encode_int(weight(1, 24, 64), 4, 32),
        four: encode_int(weight(2, 24, 64), 8, 16),
        "model.other": encode_int(weight(3, 24, 60), 8, None),
    }
    tensors = {f"{HEAD}.weight": weight(4, 8, 8).bfloat16()}
    for module, (parts, _) in encoded.items():
        tensors |= stored(module, parts)
    with open_plain(write_tensors(tmp_path, config, tensors)) as checkpoint:
        for module, (_, values) in encoded.items():
            assert same(checkpoint.read(f"{module}.weight"), values.to(torch.bfloat16)), module
        assert not checkpoint.is_dequantized(f"{HEAD}.weight")
        assert same(checkpoint.read(f"{HEAD}.weight"), tensors[f"{HEAD}.weight"])


def test_layers_of_modelopt_have_algorithms_of_their_own(tmp_path):
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            Q: {"quant_algo": "FP8"},
            UP: {"quant_algo": "NVFP4", "group_size": 16},
        },
    }
    fp8 = encode_fp8(weight(0, 24, 32), (24, 32), "_scale")
    nvfp4 = encode_nvfp4(weight(1, 24, 48), "_scale_2", "", divide=False)
    tensors = {**stored(Q, fp8[0]), **stored(UP, nvfp4[0])}
    with open_plain(write_tensors(tmp_path / "mixed", config, tensors)) as checkpoint:
        assert same(checkpoint.read(f"{Q}.weight"), fp8[1].to(torch.bfloat16))
        assert same(checkpoint.read(f"{UP}.weight"), nvfp4[1].to(torch.bfloat16))
    del config["quantized_layers"][UP]
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight holds codes.*no group"):
        open_plain(write_tensors(tmp_path / "short", config, tensors))


IGNORE = {
    "fp8": {
        "modules_to_not_convert": [HEAD, "model.layers.0.mlp.gate"],
        "weight_block_size": [8, 8],
    },
    "compressed-tensors": {"ignore": [HEAD, r"re:.*mlp\.gate$"], "config_groups": {}},
    "modelopt": {"ignore": [HEAD, "model.layers.*.mlp.gate"], "quant_algo": "FP8"},
    "mxfp4": {"modules_to_not_convert": [HEAD, "model.layers.*.mlp.gate"]},
}


@pytest.mark.parametrize("method", IGNORE)
def test_what_is_not_converted_is_plain(tmp_path, method):
    """Even bytes, and a weight that is called scale; elsewhere they are parts without others."""
    gate = "model.layers.0.mlp.gate"
    tensors = {
        f"{HEAD}.weight": weight(0, 6, 4).bfloat16(),
        f"{HEAD}.weight_scale": weight(1, 6, 1),
        f"{gate}.weight": weight(2, 3, 4),
        f"{gate}.table": torch.arange(6, dtype=torch.uint8).view(2, 3),
        "model.norm.weight": weight(3, 4).bfloat16(),
        f"{Q}.weight": weight(4, 4, 4).half(),
    }
    config = {"quant_method": method, **IGNORE[method]}
    with open_plain(write_tensors(tmp_path / "base", config, tensors)) as checkpoint:
        assert set(checkpoint) == set(tensors)
        for key, tensor in tensors.items():
            assert not checkpoint.is_dequantized(key)
            assert checkpoint.info(key).dtype == tensor.dtype
            assert same(checkpoint.read(key), tensor)
            assert dict(checkpoint.parts(key)) == {"codes": key}
    for key in (f"{HEAD}.weight_scale", f"{gate}.table"):
        renamed = key.replace(HEAD, "model.other").replace("mlp.gate", "mlp.gates")
        damaged = {(renamed if name == key else name): t for name, t in tensors.items()}
        with pytest.raises(CheckpointError, match=renamed):
            open_plain(write_tensors(tmp_path / renamed, config, damaged))


def test_what_lies_on_disk_decides(tmp_path):
    """A list that names more than the maker left out does not turn codes into weights."""
    parts, values = encode_fp8(weight(0, 24, 32), (8, 8), "_scale_inv")
    config = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    config["modules_to_not_convert"] = ["proj"]
    with open_plain(write_tensors(tmp_path, config, stored(Q, parts))) as checkpoint:
        assert same(checkpoint.read(f"{Q}.weight"), values.to(torch.bfloat16))


@SKIPPED_MODULES
@pytest.mark.parametrize(
    "pattern",
    [
        *("lm_head", "layers.0", "model.layers.1", "model.layers.*.mlp.gate", "gate"),
        *("model.layers.1.mlp", "(", "a|model"),
    ],
)
def test_modules_are_left_out_as_transformers_does(pattern):
    config = MakerConfig({"quant_method": "fp8", "modules_to_not_convert": [pattern]})
    modules = ["lm_head", "model.lm_head", "model.layers.1", "model.layers.11.mlp.gate"]
    modules += ["model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", "model.layers.0"]
    for module in modules:
        if pattern == "(":  # transformers fails
            assert not config.is_ignored(module)
        else:
            assert config.is_ignored(module) is not should_convert_module(module, [pattern]), module


def test_modules_are_left_out_as_compressed_tensors_does():
    match = pytest.importorskip("compressed_tensors.utils.match")
    linear = torch.nn.Linear(1, 1)
    for pattern in (HEAD, "re:.*gate$", r"re:model\.layers\.\d\.", "model.layers.1"):
        config = MakerConfig({"quant_method": "compressed-tensors", "ignore": [pattern]})
        modules = (HEAD, f"model.{HEAD}", "model.layers.1", "model.layers.1.mlp.gate")
        for module in (*modules, "model.layers.11.gate"):
            assert config.is_ignored(module) is match.is_match(module, linear, pattern), module


def test_activations_and_the_cache_have_no_plain_tensors(tmp_path):
    parts, _ = encode_fp8(weight(0, 24, 32), (24, 32), "_scale")
    tensors = stored(Q, {**parts, "_scale": parts["_scale"].reshape(())})
    tensors |= {
        f"{Q}.input_scale": torch.ones(()),
        f"{Q}.weight_zero_point": torch.zeros(1),
        "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1),
        "model.layers.0.self_attn.v_scale": torch.ones(1),
        "model.layers.0.mlp.experts.gate_up_proj_input_scale": torch.ones(1),
    }
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": "FP8"}
    with open_plain(write_tensors(tmp_path, config, tensors)) as checkpoint:
        assert list(checkpoint) == [f"{Q}.weight"]
