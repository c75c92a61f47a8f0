"""The choice of what decoder layers keep, against a search through all levels of all layers."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_qlora.errors import ConfigError
from moe_qlora.planning.budget import Activity
from moe_qlora.planning.choice import (
    LEVELS,
    Choice,
    Choices,
    Ladder,
    LayerChoice,
    counted,
    mixed,
    sentence,
)

MEASURED, LONG = Ladder.of(2048), Ladder.of(16_384)
ladders = st.sampled_from([MEASURED, LONG])


def model_of(saved, ladder=MEASURED):
    """Choices, and activities by level: an embedding, layers that save so much more, a head."""
    layers = tuple(f"layers.{place}" for place in range(len(saved)))
    activities = {}
    for place, level in enumerate(ladder.levels):
        inner = [
            Activity(name, sum(more[: place + 1]), sum(more) + 7, sum(more) + 9)
            for name, more in zip(layers, saved, strict=True)
        ]
        # What is no layer differs here so that a mistake shows.
        ends = [Activity(name, 5 + place, 6, 6) for name in ("embed", "head")]
        activities[level] = (ends[0], *inner, ends[1])
    return Choices(layers, ladder), activities


def needed(blocks):
    """The peak of a step without gradients: what is kept before a block, and its own work."""
    before, peak = 0, 0
    for block in blocks:
        peak = max(peak, before + block.forward, before + block.backward)
        before += block.saved
    return peak


def total(choice):
    return needed(choice.activities)


sizes = st.lists(st.tuples(*[st.integers(0, 50)] * len(LEVELS)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=100)
@given(sizes, st.integers(0, 900), st.integers(0, 900), ladders)
def test_a_choice_is_the_largest_that_fits_and_larger_memory_never_keeps_less(
    saved, first, second, ladder
):
    choices, activities = model_of(saved, ladder)
    least = needed(activities["recompute"])
    small, large = sorted((least + first, least + second))
    less, more = (choices.choose(activities, total, limit) for limit in (small, large))
    for choice, limit in ((less, small), (more, large)):
        assert needed(choice.activities) <= limit
        after = [
            needed(mixed(activities, choices.levels_at(n)))
            for n in range(choice.steps + 1, len(choices.order) + 1)
        ]
        assert all(peak > limit for peak in after)
    rank = ladder.levels.index
    assert all(rank(less.levels[name]) <= rank(more.levels[name]) for name in choices.layers)


def test_levels_rise_experts_first_and_from_the_last_layer():
    choices = Choices(("a", "b", "c"), MEASURED)
    assert list(choices.order) == [
        (name, level) for level, name in product(LEVELS[1:], ("c", "b", "a"))
    ]
    assert choices.levels_at(0) == dict.fromkeys("abc", "recompute")
    assert choices.levels_at(4) == {"a": "experts", "b": "experts", "c": "attention"}
    assert choices.levels_at(15) == dict.fromkeys("abc", "keep")


def test_in_long_sequences_attention_comes_before_the_experts():
    """What it saves grows with the tokens that each attends to: 7 us a MB for 2,048 of them."""
    assert Ladder.of(2300).levels == LEVELS
    assert LONG.levels == ("recompute", "attention alone", "attention", *LEVELS[3:])
    assert LONG.values == {
        "attention alone": 56.0, "attention": 8.0, "narrow projections": 6.0, "projections": 3.0,
        "keep": 1.0,
    }  # fmt: skip
    assert MEASURED.saved == pytest.approx({
        "recompute": 0, "experts": 0.59, "attention": 0.77, "narrow projections": 0.85,
        "projections": 0.95, "keep": 1,
    })  # fmt: skip
    every = 0.59 + 8 * 0.18 + 0.08 + 0.10 + 0.05
    assert LONG.saved["attention alone"] == pytest.approx(8 * 0.18 / every)
    assert LONG.saved["attention"] == pytest.approx(1 - 0.23 / every)
    assert Choices(("a", "b"), LONG).levels_at(3) == {"a": "attention alone", "b": "attention"}


def test_blocks_that_are_no_layers_and_the_order_of_running_stay():
    _, activities = model_of([(1, 2, 3, 2, 1, 1), (1, 2, 3, 2, 1, 1)])
    blocks = mixed(activities, {"layers.0": "recompute", "layers.1": "keep"})
    assert [(block.name, block.saved) for block in blocks] == [
        ("embed", 5), ("layers.0", 1), ("layers.1", 10), ("head", 5),
    ]  # fmt: skip


def test_where_computing_all_again_does_not_fit_the_missing_bytes_are_said():
    choices, activities = model_of([(1, 2, 3, 4, 5, 6)])
    least = needed(activities["recompute"])
    with pytest.raises(ConfigError, match=r": 3 bytes are missing\."):
        choices.choose(activities, total, least - 3)
    assert needed(choices.choose(activities, total, least).activities) == least


def gain(choices, activities, *levels):
    return choices.gain(activities, Choice(0, dict(zip(choices.layers, levels, strict=True)), ()))


def test_the_gain_weighs_bytes_by_what_they_save():
    model = model_of([(10, 100, 40, 30, 50, 200), (10, 0, 40, 30, 50, 200)])
    every = 100 * 8 + 2 * (40 * 7 + 30 * 6 + 50 * 3 + 200)
    assert gain(*model, "recompute", "recompute") == 1.0
    assert gain(*model, "keep", "keep") == pytest.approx(1 / 0.74)
    part = gain(*model, "attention", "experts")
    assert part == pytest.approx(1 / (1 - 0.26 * (100 * 8 + 40 * 7) / every))


def test_layers_that_save_the_same_on_every_level_gain_nothing():
    assert gain(*model_of([(10, 0, 0, 0, 0, 0)]), "keep") == 1.0


def test_layers_are_counted_and_told_in_one_sentence():
    layers = [LayerChoice(name, level) for name, level in zip("abcdef", LEVELS, strict=True)]
    layers.append(LayerChoice("g", "keep", "host"))
    counts = counted(layers)
    assert counts == {"keep": 2, "part": 4, "recompute": 1, "host": 1}
    assert sentence(counts, 3 << 29, 80 << 30, 1.2345) == (
        "2 of 7 layers keep their activations, 4 keep part of them: 1.5 of 80 GiB, about 1.23 "
        "times as fast as computing all again"
    )
    none = {"keep": 0, "part": 0, "recompute": 5, "host": 0}
    assert sentence(none, 2048, 4096, 1.0) == (
        "0 of 5 layers keep their activations: 2.0 KiB of 4.0 KiB"
    )
