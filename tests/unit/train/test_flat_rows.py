"""Flat rows: losses and gradients of any batch are those of its sequences, each run alone."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from moe_qlora.errors import ConfigError
from moe_qlora.lora.packed_rows import watch_packed_rows
from moe_qlora.testing import tiny_model
from moe_qlora.train import flat_rows, segments
from tests.helpers.fitting import adapted, token_ids

LENGTHS = (33, 1, 2, 48, 7)  # The longest is T
FAMILIES = {
    "qwen3_moe": {},
    "gpt_oss": {"sliding_window": 8},
    "deepseek_v3": {},
    "llama4_text": {"attention_chunk_size": 16},
    "gemma4_text": {"sliding_window": 8},
}

Batch = dict[str, Tensor]

# Flash attention over segments in plain torch, for a CPU.


def _scores(q: Tensor, k: Tensor, offsets: Tensor, window: int, scale: float) -> Tensor:
    """Return scores `(heads, L, L)`, -inf where a query does not see a key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    numbers = torch.arange(len(q))
    ids = (numbers[:, None] >= offsets[1:]).sum(1)
    seen = (ids[:, None] == ids) & (numbers[:, None] >= numbers)
    if window >= 0:
        seen &= numbers[:, None] - numbers <= window
    return scores.masked_fill(~seen, -torch.inf)


def kernel_backward(
    grad: Tensor, saved: Any, offsets: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients, from the given log-sum-exp, as the kernel computes them."""
    q, k, v, out, lse = saved
    share, grad = q.shape[1] // k.shape[1], grad.float()
    p = (_scores(q, k, offsets, window, scale) - lse[..., None]).exp()
    wide_v, wide_k = (x.float().repeat_interleave(share, 1) for x in (v, k))
    inner = (grad * out.float()).sum(-1).t()[..., None]
    of_scores = p * (torch.einsum("qhd,khd->hqk", grad, wide_v) - inner) * scale
    dq = torch.einsum("hqk,khd->qhd", of_scores, wide_k)
    wide = (torch.einsum("hqk,qhd->khd", *pair) for pair in ((of_scores, q.float()), (p, grad)))
    dk, dv = (x.unflatten(1, (-1, share)).sum(2) for x in wide)
    return tuple(x.to(like.dtype).contiguous() for x, like in ((dq, q), (dk, k), (dv, v)))


@pytest.fixture
def by_offsets(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Lets segments be told apart by offsets in 32 bit, as on CUDA in 16.

    Returns how many rows of one length the segments of each forward are from then on, or 0.
    """
    seen: list[int] = []

    def kernel_forward(
        q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, sizes: Tensor, window: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        longest, rows = sizes.tolist()
        assert int((offsets[1:] - offsets[:-1]).max()) <= longest
        seen.append(rows)
        scores = _scores(q, k, offsets, window, scale)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float())
        return out.to(q.dtype).contiguous(), scores.logsumexp(-1)

    def use() -> list[int]:
        monkeypatch.setattr(segments, "kernel_forward", kernel_forward)
        monkeypatch.setattr(segments, "kernel_backward", kernel_backward)
        monkeypatch.setattr(segments, "DTYPES", (*segments.DTYPES, torch.float32))
        monkeypatch.setattr(segments, "has_kernels", lambda device, dtype: True)
        return seen

    return use


def sequences(model: Any) -> list[Tensor]:
    return [token_ids(model, 1, n, seed=n)[0] for n in LENGTHS]


def _targets(row: Tensor) -> Tensor:
    """A sequence's labels, of which the token before must not predict the first."""
    return functional.pad(row[1:], (1, 0), value=-100)


def padded(rows: list[Tensor], *, left: bool) -> Batch:
    def joined(parts: list[Tensor], value: int) -> Tensor:
        side = "left" if left else "right"
        return pad_sequence(parts, batch_first=True, padding_value=value, padding_side=side)

    mask = joined([torch.ones_like(row) for row in rows], 0)
    labels = joined([_targets(row) for row in rows], -100)
    return {"input_ids": joined(rows, 0), "attention_mask": mask, "labels": labels}


def packed(rows: list[Tensor]) -> Batch:
    joined = {
        "input_ids": torch.cat(rows),
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows]),
        "labels": torch.cat([_targets(row) for row in rows]),
    }
    return {name: values[None] for name, values in joined.items()}


def packed_in_two(rows: list[Tensor]) -> Batch:
    """Two packed rows, of which the second is padded."""
    parts, both = (packed(rows[:3]), packed(rows[3:])), {}
    for name in parts[0]:
        each, value = [part[name][0] for part in parts], -100 if name == "labels" else 0
        both[name] = pad_sequence(each, batch_first=True, padding_value=value)
    mask = pad_sequence([torch.ones_like(part["labels"][0]) for part in parts], batch_first=True)
    return both | {"attention_mask": mask}


def numbered(rows: list[Tensor]) -> Batch:
    """A packed row whose mask counts its sequences, without positions."""
    mask = torch.cat([torch.full_like(row, i) for i, row in enumerate(rows, 1)])[None]
    return {"attention_mask": mask} | {n: x for n, x in packed(rows).items() if "pos" not in n}


BATCHES: dict[str, Callable[[list[Tensor]], Batch]] = {
    "right": lambda rows: padded(rows, left=False),
    "left": lambda rows: padded(rows, left=True),
    "packed": packed,
    "two packed": packed_in_two,
    "numbered": numbered,
}


def step(model: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Return the summed loss of a batch, and the gradients by name."""
    labels = batch["labels"]
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    assert logits.shape[:2] == labels.shape
    loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


def alone(model: Any) -> tuple[float, dict[str, Tensor]]:
    total, sums = 0.0, {}
    for row in sequences(model):
        loss, gradients = step(model, {"input_ids": row[None], "labels": row[None]})
        total += loss
        for name, gradient in gradients.items():
            sums[name] = sums.get(name, 0) + gradient
    return total, sums


def check(model: Any, expected: tuple[float, dict[str, Tensor]], batch: Batch) -> None:
    (loss, gradients), (sure, theirs) = step(model, batch), expected
    largest = max(float(x.abs().max()) for x in theirs.values())
    assert abs(loss - sure) <= 2e-4 * abs(sure)
    torch.testing.assert_close(gradients, theirs, rtol=0, atol=5e-3 * largest)


@contextmanager
def flat(model: Any, batch_size: int = len(LENGTHS), seq_len: int = max(LENGTHS)) -> Iterator[None]:
    rows = flat_rows.flatten_rows(model, batch_size, seq_len, fixed=True)
    try:
        yield
    finally:
        for each in rows:
            each.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_each_sequence_alone(family, by_offsets):
    """By masks and by offsets."""
    model = tiny_model(family, seed=0, **FAMILIES[family])
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    model.train()
    expected, rows = alone(model), sequences(model)
    for offsets in (False, True):
        if offsets:
            by_offsets()
        with flat(model):
            for make in BATCHES.values():
                check(model, expected, make(rows))
    assert segments.PREFIX not in model.config._attn_implementation


@pytest.mark.parametrize(
    ("family", "rows"), [("qwen3_moe", 1), ("deepseek_v3", 3), ("llama4_text", 3)]
)
def test_plain_rows_are_computed_as_rows(family, rows, by_offsets):
    """Rows of one length, and one sequence that a row holds with filling behind it."""
    model = tiny_model(family, seed=0, **FAMILIES.get(family, {})).train()
    ids = torch.randint(5, 60, (rows, 33), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids}
    expected = step(model, batch)
    seen = by_offsets()
    with flat(model, rows, 33 if rows > 1 else 64):
        check(model, expected, batch)
        check(model, expected, batch | {"attention_mask": torch.ones_like(ids)})
    assert set(seen) == (set() if family == "llama4_text" else {rows})  # By masks


def test_outputs_have_the_shape_of_the_batch():
    model = tiny_model("qwen3_moe", seed=0).train()
    batch = padded(sequences(model), left=False)
    asked = {"output_router_logits": True, "output_hidden_states": True, "use_cache": False}
    before = model(**batch, **asked)
    with flat(model):
        after = model(**batch, **asked)
    embeds, found = model.get_input_embeddings()(batch["input_ids"]).detach(), []
    for within in (nullcontext(), flat(model)):
        inputs = embeds.clone().requires_grad_()
        with within:
            model(inputs_embeds=inputs, **{**batch, "input_ids": None}).loss.backward()
        found.append(inputs.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    real = batch["attention_mask"].bool()
    for name in ("loss", "aux_loss"):
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-6)
    assert after.logits.shape == before.logits.shape
    for ours, theirs in zip(after.hidden_states, before.hidden_states, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-5)
        assert not ours[~real].any()
    for ours, theirs in zip(after.router_logits, before.router_logits, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours[real.flatten()], theirs[real.flatten()])


def test_rows_are_filled_up_in_training():
    model, seen = tiny_model("qwen3_moe", seed=0).train(), []

    def note(_: Any, args: Any) -> None:
        now = segments.running.get()
        seen.append((args[0].shape[1], now.recorded, len(now.offsets) - 1))

    model.model.layers[0].register_forward_pre_hook(note)
    with flat(model, 1, 4096):
        for tokens in (1, 65, 2100, 4200):
            model(input_ids=torch.full((1, tokens), 7))
        with torch.no_grad():
            model(input_ids=torch.full((1, 33), 7), use_cache=False)
    assert [row[:2] for row in seen] == [
        (1024, True), (1024, True), (4096, True), (5120, False), (33, False),
    ]  # fmt: skip
    del seen[:]
    ids = torch.full((1, 256), 7)
    with flat(model, 1, 256):  # Tables of segments hold those of a row
        for length in (256, 16, 4, 1):
            model(input_ids=ids, position_ids=torch.arange(256)[None] % length)
    assert [row[1:] for row in seen] == [(True, 16), (True, 64), (True, 256), (True, 1024)]


def test_calls_with_a_cache_run_as_before(caplog):
    model = tiny_model("qwen3_moe", seed=0).train()
    ids = sequences(model)[0][None]
    expected = model(input_ids=ids, use_cache=True)
    with flat(model), caplog.at_level(logging.WARNING, "moe_qlora"):
        for _ in range(2):
            found = model(input_ids=ids, use_cache=True)
            assert found.past_key_values is not None
            assert torch.equal(found.logits, expected.logits)
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        model(input_ids=ids, attention_mask=mask)
        model.set_attn_implementation("eager")
        assert model(input_ids=ids, output_attentions=True).attentions
    said = [one.getMessage() for one in caplog.records if one.name.startswith("moe_qlora")]
    assert len(said) == 3 and "use_cache" in said[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_generation_and_evaluation_are_those_without(family):
    model = tiny_model(family, seed=0, **FAMILIES[family])
    rows = sequences(model)
    batch = padded(rows, left=True)
    del batch["labels"]
    made = model.generate(**batch, max_new_tokens=4, do_sample=False)
    with flat(model):
        assert torch.equal(model.generate(**batch, max_new_tokens=4, do_sample=False), made)
        with torch.no_grad():
            batch = packed(rows)
            told, found = (model(**batch, **how).logits[0] for how in ({"use_cache": False}, {}))
    with torch.no_grad():
        alone = torch.cat([model(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(told, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_next"])
def test_layers_with_a_state_refuse_packed_rows(family):
    model = tiny_model(family, seed=0).train()
    rows = sequences(model)
    expected = step(model, padded(rows, left=False))
    with flat(model):
        check(model, expected, padded(rows, left=False))
        with pytest.raises(ConfigError, match="position_ids begin again"):
            model(**packed(rows))


def test_a_mask_with_holes_runs_as_before():
    """Positions go on behind a hole, and windows count it."""
    model = tiny_model("mixtral", seed=0, sliding_window=8).train()
    batch = padded(sequences(model), left=False)
    batch["attention_mask"][0, 5:9] = 0
    batch["labels"][batch["attention_mask"] == 0] = -100
    expected = step(model, batch)
    with flat(model):
        check(model, expected, batch)


MIXING = "gpt_oss", "granitemoehybrid", "lfm2_moe", "jamba", "zaya", "diffusion_gemma_text"


@pytest.mark.parametrize("family", [*MIXING, "mixtral", "deepseek_v4"])
def test_without_flat_rows_packed_rows_are_refused_where_they_would_be_mixed(family):
    """Also with a mask, which stock transformers takes for one of padding alone."""
    model = tiny_model(family, seed=0).train()
    if family == "diffusion_gemma_text":  # Without a head, and with a cache always
        table = model.embed_tokens.weight
        model.register_forward_hook(lambda _, args, out: setattr(out, "logits", out[0] @ table.T))
    watch_packed_rows(model)
    rows = sequences(model)
    ones = torch.ones(1, sum(LENGTHS), dtype=torch.long)
    packs = [packed(rows), packed(rows) | {"attention_mask": ones}, packed_in_two(rows)]
    packs += [numbered(rows), packed(rows) | {"seq_idx": numbered(rows)["attention_mask"].int()}]
    mask = (left := padded(rows, left=True))["attention_mask"]
    # As `generate` makes them: those of padding are 1, which is no new sequence
    left["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    for batch in (packed(rows[:1]), padded(rows, left=False), left):
        step(model, batch)
    if family not in MIXING:
        expected = alone(model)
        for batch in packs:
            check(model, expected, batch)
        with pytest.raises(ConfigError, match="use_cache=True"):
            model(**packed(rows), use_cache=True)
        return
    for batch in packs:  # Where a state can be told of segments, transformers wants kernels for it
        with pytest.raises((ConfigError, ValueError), match=r"begin again|keep packed"):
            model(**batch)
    assert all(module.training for module in model.modules())


def test_models_that_see_keep_packed_rows_apart_or_refuse_them():
    """Their outer part makes the masks, and positions have an axis for time."""
    model = tiny_model("gemma4", seed=0).train()
    watch_packed_rows(model)
    rows = sequences(model)
    step(model, padded(rows, left=False))
    check(model, alone(model), packed(rows))
    with pytest.raises(ConfigError, match="does not keep them apart"):
        model(**packed_in_two(rows))
    seeing = tiny_model("qwen3_vl_moe_text", seed=0).train()
    batch = packed([row % 99 for row in rows])
    positions, ids = batch["position_ids"].expand(3, 1, -1), batch["input_ids"]
    watch_packed_rows(seeing)
    for within in (nullcontext(), flat(seeing)):
        with within, pytest.raises(ConfigError, match="none of the text"):
            seeing(input_ids=ids, position_ids=positions)


def test_adapters_watch_packed_rows():
    model = adapted("gpt_oss")
    stack = model.get_base_model().model
    names = list(inspect.signature(stack.forward).parameters)
    with pytest.raises(ConfigError, match="they would see each other"):
        model(**packed(sequences(model)))
    with flat(model):
        assert model(**packed(sequences(model))).loss > 0
        # Trainer and PEFT look at the forward's arguments.
        assert list(inspect.signature(stack.forward).parameters) == names
    assert "forward" not in vars(stack)
    with pytest.raises(ConfigError, match="they would see each other"):
        model(**packed(sequences(model)))


def test_recorded_lengths_come_from_the_batches_that_come():
    lengths = flat_rows.RowLengths(32768)
    came = [4300, 5200, 3900, 4450, 2800, 6100, 4350, 7900, *range(2900, 7900, 250)]
    found = [lengths.pick(n, 9) for n in came * 9]
    assert all(recorded for _, _, recorded in found)
    assert sum(came) > 0.6 * sum(length for length, *_ in found[: len(came)])
    assert sum(came) > 0.85 * sum(length for length, *_ in found[8 * len(came) :])
    assert lengths.pick(32000, 9)[0] == 32768 and lengths.pick(40000, 9)[2] is False
    # One that is recorded serves shorter rows that come seldom
    lengths = flat_rows.RowLengths(4096)
    picked = [lengths.pick(n, 3)[0] for n in (1300, 500, 3000, 1100, *[1100] * 7)]
    assert picked == [2048, 2048, 4096, *[2048] * 7, 1280]
    for n in range(1024, 4097, 64):  # Nothing is recorded for ever more lengths
        for count in (3, 200) * 9:
            lengths.pick(n, count)
    assert len(lengths.recorded) == 8
