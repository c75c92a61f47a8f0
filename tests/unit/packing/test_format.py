"""Statistics of packed weights that decoding could not rely on."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_qlora.packing import parametrize
from moe_qlora.packing.bnb4bit import RECORD, read_record
from moe_qlora.packing.codec import pack, restore
from moe_qlora.packing.settings import CodecSettings, problems

SHAPE = (8, 40, 72)  # 360 blocks: two of the second level, the last not full
CODECS = {
    "nf4": CodecSettings("nf4", True),
    "fp4": CodecSettings("fp4", False, torch.bfloat16),
    "int8": CodecSettings("int8"),
}
Change = Callable[[dict[str, Tensor]], object]


def said(**changes: Any) -> Change:
    """A change of the record."""

    def change(tensors: dict[str, Tensor]) -> None:
        end = next(end for end in tensors if end.startswith(RECORD))
        record = json.dumps(read_record(tensors[end]) | changes)
        tensors[end] = torch.tensor(list(record.encode()), dtype=torch.uint8)

    return change


def turned(end: str, function: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({end: function(tensors[end])})


CRAFTED: list[tuple[str, Change, str]] = [
    ("nf4", said(nested_blocksize=256.0), "says of itself"),
    ("nf4", said(shape=[8, 72, 40]), "says of itself"),
    ("nf4", said(absmax=[1.0]), "says of itself"),
    ("nf4", said(nested_offset=1e300), "nested offset 1e"),
    ("nf4", turned(f"{RECORD}nf4", torch.zeros_like), "cannot be read"),
    ("nf4", turned(".nested_absmax", lambda t: t[:1]), r"shape \(1,\) as its .nested_absmax"),
    ("nf4", turned(".quant_map", lambda t: t[:8]), r"shape \(8,\) as its .quant_map"),
    ("nf4", turned("", lambda t: t[:11519]), r"shape \(11519, 1\) as its codes"),
    ("fp4", turned(".absmax", Tensor.half), "float16 of shape"),
    ("nf4", lambda tensors: tensors.pop(f"{RECORD}nf4"), "nothing as its .quant_stat"),
    ("fp4", lambda t: t.update({".nested_quant_map": t[".quant_map"]}), "nested_quant_map"),
    ("int8", turned(".SCB", lambda t: t[:3]), r"shape \(3,\) as its .SCB"),
]


def parts(settings: CodecSettings) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = nn.Module()
    parametrize.attach(module, "up", pack(torch.randn(SHAPE).bfloat16(), settings))
    state = module.state_dict()
    return module, {key.removeprefix("up"): tensor.clone() for key, tensor in state.items()}


@pytest.mark.parametrize(("kind", "change", "part"), CRAFTED, ids=map(str, range(len(CRAFTED))))
def test_crafted_statistics_are_refused(kind: str, change: Change, part: str) -> None:
    settings = CODECS[kind]
    module, tensors = parts(settings)
    whole = module.up.clone()
    assert not list(problems(tensors, SHAPE, settings))
    change(tensors)
    with pytest.raises(ValueError, match=part) as told:
        restore(tensors, SHAPE, torch.bfloat16, settings)
    assert "\n" not in str(told.value) and len(str(told.value)) < 1200
    state = {f"up{end}": tensor for end, tensor in tensors.items()}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"\bup has|\bup says"):
            module.load_state_dict(state, assign=assign)
        assert torch.equal(module.up, whole)


def test_records_and_meta_tensors() -> None:
    settings = CODECS["nf4"]
    _, tensors = parts(settings)
    with pytest.raises(ValueError, match=r"'dtype': 'bfloat16'.*it must be.*'float32'"):
        restore(tensors, SHAPE, torch.float32, settings)
    blank = {end: tensor.to("meta") for end, tensor in tensors.items()}  # only the form is seen
    assert not list(problems(blank, SHAPE, settings))
