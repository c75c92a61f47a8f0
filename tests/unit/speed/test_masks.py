"""Block masks of flex attention as arguments of recorded layers."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from emulated_graphs import emulate, emulated
from graphed import assert_near, batch, gradients, packed
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import moe_qlora
from moe_qlora.speed import masks
from moe_qlora.speed.recording import ObstacleError
from moe_qlora.testing import tiny_config, tiny_model

LENGTH = 40
DOCUMENTS = torch.zeros(2, LENGTH, dtype=torch.long)
WINDOW = 7


@pytest.fixture(autouse=True)
def masks_are_made_eagerly(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        return

    def make(*args: Any, _compile: bool, **kwargs: Any) -> BlockMask:
        return create_block_mask(*args, **kwargs, BLOCK_SIZE=16)

    monkeypatch.setattr(masking_utils, "create_block_mask", make)


def padding(*lengths: int) -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()


def positions(*cuts: int) -> Tensor:
    """Positions of sequences that are packed, the first one of each row as long as said."""
    each = torch.arange(LENGTH)
    return torch.stack([torch.where(each < cut, each, each - cut) for cut in cuts])


KINDS: dict[str, list[dict[str, Any]]] = {  # Two batches each
    "causal": [{}, {}],
    "padded": [{"attention_mask": padding(40, 21)}, {"attention_mask": padding(9, 33)}],
    "packed": [{"position_ids": positions(8, 19)}, {"position_ids": positions(30, 5)}],
}


def made(kind: str, which: int, window: int | None, batch: int = 2) -> BlockMask:
    """A mask as transformers makes it for gpt-oss; by itself, as in a step of its own."""
    config = tiny_config("gpt_oss", sliding_window=window or WINDOW)
    config._attn_implementation = "flex_attention"
    maker = "create_causal_mask" if window is None else "create_sliding_window_causal_mask"
    given = {"attention_mask": None, "position_ids": None, "past_key_values": None}
    given |= {name: tensor.clone() for name, tensor in KINDS[kind][which].items()}
    embedded = torch.zeros(batch, LENGTH, config.hidden_size)
    mask: BlockMask = getattr(masking_utils, maker)(config=config, inputs_embeds=embedded, **given)
    return mask


def dense(mask: BlockMask) -> Tensor:
    """Whether each pair is computed: by the function, in blocks that are said to be."""
    pairs = create_mask(mask.mask_mod, mask.shape[0], 1, *mask.seq_lengths, device="cpu")
    rows, columns = mask.BLOCK_SIZE
    blocks = mask.to_dense().bool().repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    return pairs & blocks[:, :, : pairs.shape[2], : pairs.shape[3]]


def of(function: Any) -> BlockMask:
    return create_block_mask(function, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_made_again_from_the_tensors_of_another(kind: str, window: int | None) -> None:
    first, second = (made(kind, which, window) for which in range(2))
    taken = [masks.flatten((("x",), {"attention_mask": mask, "n": 3})) for mask in (first, second)]
    (leaves, spec), (other, other_spec) = taken
    assert spec == other_spec and hash(spec) == hash(other_spec) and any(spec.masks)
    buffers = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = masks.unflatten(buffers, spec)
    assert args == ("x",) and kwargs["n"] == 3
    rebuilt = kwargs["attention_mask"]
    assert type(rebuilt) is BlockMask and vars(rebuilt).keys() == vars(first).keys()
    assert rebuilt.seq_lengths == first.seq_lengths and rebuilt.BLOCK_SIZE == first.BLOCK_SIZE
    assert torch.equal(dense(rebuilt), dense(first))
    for buffer, leaf in zip(buffers, other, strict=True):
        if isinstance(leaf, Tensor):
            buffer.copy_(leaf)
    assert torch.equal(dense(rebuilt), dense(second))
    assert torch.equal(dense(first), dense(second)) is (kind == "causal")


def test_kinds_of_masks_differ() -> None:
    def spec(*args: Any, **kwargs: Any) -> Any:
        return masks.flatten(made(*args, **kwargs))[1]

    windows = [None, WINDOW, WINDOW + 1]
    kinds = {spec(kind, 0, window) for kind in KINDS for window in windows}
    assert len(kinds) == len(KINDS) * len(windows)
    assert spec("padded", 0, None) in kinds


def test_constants_are_of_one_kind_if_their_type_is_the_same_too() -> None:
    def with_constant(constant: Any) -> Any:
        return masks.flatten(of(lambda b, h, q, k: q - k >= constant))[1]

    assert len({with_constant(each) for each in (1, 1.0, True)}) == 3
    assert with_constant(1) == with_constant(1)


def test_tensors_of_partial_functions_and_defaults_are_arguments() -> None:
    def within(window: int, ids: Tensor, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (ids[b, q] == ids[b, k]) & (q - k < window)

    def mask(ids: Tensor) -> BlockMask:
        partial = functools.partial(within, WINDOW, ids)
        return of(lambda b, h, q, k, also=ids: partial(b, h, q, k) & (also[b, q] > 0))

    first, second = (mask(positions(*cuts)) for cuts in ((8, 19), (30, 5)))
    (leaves, spec), (other, other_spec) = masks.flatten(first), masks.flatten(second)
    assert spec == other_spec
    assert torch.equal(dense(masks.unflatten(leaves, spec)), dense(first))
    assert torch.equal(dense(masks.unflatten(other, spec)), dense(second))
    assert not torch.equal(dense(first), dense(second))


def test_a_kind_keeps_no_tensors_alive() -> None:
    mask = made("packed", 0, WINDOW)
    alive = [weakref.ref(leaf) for leaf in masks.flatten(mask)[0]]
    spec = masks.flatten(mask)[1]
    del mask
    gc.collect()
    assert any(spec.masks) and not any(reference() is not None for reference in alive)


def test_arguments_without_masks_are_as_they_were() -> None:
    x = torch.ones(2)
    leaves, spec = masks.flatten(((x, None), {"a": [1, "b"]}))
    assert not any(spec.masks) and leaves[0] is x and leaves[1:] == [None, 1, "b"]
    assert masks.unflatten(leaves, spec) == ((x, None), {"a": [1, "b"]})


class Holder:
    window = 3

    def method(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < self.window


def holds_an_object() -> Any:
    holder = Holder()
    return lambda b, h, q, k: q - k < holder.window


def holds_a_method_of_a_tensor() -> Any:
    take = torch.ones(LENGTH, dtype=torch.long).take
    return lambda b, h, q, k: take(q) > 0


def reads_a_global_tensor() -> Any:
    return lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k]


def refers_to_itself() -> Any:
    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k if b is not None else function(b, h, q, k)

    return function


def reads_a_tensor_elsewhere() -> Any:
    elsewhere = torch.zeros((), device="meta")
    return lambda b, h, q, k: q >= k if b is not None else elsewhere


@pytest.mark.parametrize(
    ("maker", "reason"),
    [
        (holds_an_object, "attention mask holds a Holder"),
        (lambda: Holder().method, "attention mask holds a method"),
        (holds_a_method_of_a_tensor, "attention mask holds a builtin_function_or_method"),
        (reads_a_global_tensor, "reads a tensor by a global name"),
        (refers_to_itself, "refers to itself"),
        (reads_a_tensor_elsewhere, "lies on cpu and reads a tensor on meta"),
    ],
)
def test_what_a_graph_cannot_take_from_a_mask_is_told(maker: Any, reason: str) -> None:
    mask = of(lambda b, h, q, k: q >= k)
    mask.mask_mod = maker()
    with pytest.raises(ObstacleError, match=reason):
        masks.flatten(mask)


def test_a_constant_of_the_module_is_part_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = of(lambda b, h, q, k: q - k < WINDOW)
    before = masks.flatten(mask)[1]
    assert masks.flatten(mask)[1] == before
    monkeypatch.setitem(globals(), "WINDOW", 9)
    assert masks.flatten(mask)[1] != before


def densely(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any, **_: Any
) -> Any:
    """Attention by all that a block mask says; on a CPU, flex attention has no backward."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~dense(mask), -1e9)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@pytest.mark.parametrize("keep", [False, True])
def test_layers_with_block_masks_are_recorded(monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    emulate(monkeypatch)
    AttentionInterface.register("densely", densely)
    AttentionMaskInterface.register("densely", masking_utils.flex_attention_mask)
    model: Any = tiny_model("gpt_oss", sliding_window=WINDOW).train()
    assert len(set(model.config.layer_types)) == 2
    model.config._attn_implementation = "densely"
    model.config.use_cache = False

    def step(which: int, kind: str) -> dict[str, Tensor]:
        ids = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(which))
        model.zero_grad()
        model(input_ids=ids, labels=ids, **KINDS[kind][which % 2]).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    steps = [(which, kind) for kind in ("padded", "packed") for which in range(4)]
    wanted = [step(*each) for each in steps]
    with emulated(model, keep=keep) as graphs:
        for each, want in zip(steps, wanted, strict=True):
            torch.testing.assert_close(step(*each), want)
        assert graphs.recorded == 2 * model.config.num_hidden_layers


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
@pytest.mark.parametrize("keep", [False, True])
def test_flex_attention_is_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keep: bool
) -> None:
    # One function is compiled for all kinds of masks and of layers.
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 64)
    model = packed("gpt_oss", {"head_dim": 32, "sliding_window": 32})
    model.get_base_model().set_attn_implementation("flex_attention")
    assert len(set(model.config.layer_types)) == 2
    length = 160  # More than a block of the mask
    cuts = [torch.arange(length).repeat(2, 1) for _ in range(2)]
    cuts[0][:, 50:] -= 50
    cuts[1][0, 120:] -= 120
    padded = [torch.ones(2, length, dtype=torch.long) for _ in range(2)]
    padded[0][0, 140:] = 0  # Less than the window: each token sees one
    padded[1][1, 135:] = 0
    kinds: list[list[dict[str, Tensor]]] = [
        [{}, {}],
        [{"attention_mask": each.cuda()} for each in padded],
        [{"position_ids": each.cuda()} for each in cuts],
    ]
    steps = [(step, kind[step % 2]) for kind in kinds for step in range(4)]
    wanted = [gradients(model, batch(step, length), **inputs) for step, inputs in steps]
    with moe_qlora.graph_layers(model, keep=keep) as graphs:
        for (step, inputs), want in zip(steps, wanted, strict=True):
            assert_near(gradients(model, batch(step, length), **inputs), want)
        assert graphs.recorded == 3 * model.config.num_hidden_layers
        for (step, inputs), want in zip(steps, wanted, strict=True):  # all replayed, in turns
            assert_near(gradients(model, batch(step, length), **inputs), want)
    assert "without CUDA graphs" not in caplog.text
