"""The choice of what decoder layers keep, against a search through all places."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_qlora.planning.budget import Activity
from moe_qlora.planning.choice import Choice, Choices, Ladder, LayerChoice, counted, sentence

MEASURED, LONG = Ladder.of(4096), Ladder.of(32_768)


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


def ranks(choices, choice):
    return [choices.ladder.levels.index(level) for level in choice.levels.values()]


sizes = st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=4)


@settings(deadline=None, max_examples=100)
@given(sizes, st.integers(0, 900), st.integers(0, 900), st.sampled_from([MEASURED, LONG]))
def test_a_choice_is_the_largest_that_fits_and_larger_memory_never_keeps_less(
    saved, first, second, ladder
):
    choices, activities = model_of(saved, ladder)
    least = needed(activities["recompute"])
    small, large = sorted((least + first, least + second))

    def most(limit):
        return choices.most_kept(activities, lambda choice: needed(choice.activities) <= limit)

    less, more = most(small), most(large)
    for choice, limit in ((less, small), (more, large)):
        assert needed(choice.activities) <= limit
        after = (0, sum(ranks(choices, choice)))
        for place in choices.path[choices.path.index(after) + 1 :]:
            assert needed(choices.at(place, activities).activities) > limit
    assert all(a <= b for a, b in zip(ranks(choices, less), ranks(choices, more), strict=True))
    assert choices.most_kept(activities, lambda choice: False) is None


def test_all_layers_rise_to_a_part_and_then_to_all_from_the_last():
    choices, activities = model_of([(1, 2, 3)] * 3)
    seen = [[*choices.at(place, activities).levels.values()] for place in choices.path]
    assert seen == [
        ["recompute", "recompute", "recompute"],
        ["recompute", "recompute", "part"],
        ["recompute", "part", "part"],
        ["part", "part", "part"],
        ["part", "part", "keep"],
        ["part", "keep", "keep"],
        ["keep", "keep", "keep"],
    ]
    blocks = choices.at((0, 5), activities).activities
    assert [(block.name, block.saved) for block in blocks] == [
        ("embed", 5), ("layers.0", 3), ("layers.1", 6), ("layers.2", 6), ("head", 5),
    ]  # fmt: skip


def test_in_long_sequences_attention_alone_is_the_part():
    """What it saves grows with the sequence: 7 us a MB for 4,096 tokens."""
    assert Ladder.of(12_000).levels == MEASURED.levels == ("recompute", "part", "keep")
    assert LONG.levels == ("recompute", "attention", "keep")
    assert MEASURED.saved == pytest.approx({"recompute": 0, "part": 0.77, "keep": 1})
    sizes = [0.59 / 8, 0.18 / 7, 0.23 / 2.4]
    assert MEASURED.values == pytest.approx({"part": 0.77 / sum(sizes[:2]), "keep": 2.4})
    assert LONG.values["attention"] == pytest.approx(56.0)
    assert LONG.values["keep"] == pytest.approx(0.82 / (sizes[0] + sizes[2]))
    assert LONG.saved["attention"] == pytest.approx(8 * 0.18 / (8 * 0.18 + 0.82))


def test_the_gain_is_by_what_levels_save():
    choices = Choices(("a", "b"), MEASURED)

    def gain(*levels):
        return choices.gain(Choice(dict(zip("ab", levels, strict=True)), ()))

    assert gain("recompute", "recompute") == 1.0
    assert gain("keep", "keep") == pytest.approx(1 / 0.74)
    assert gain("part", "recompute") == pytest.approx(1 / (1 - 0.26 * 0.77 / 2))


def test_layers_are_counted_and_told_in_one_sentence():
    levels = {"a": "recompute", "b": "part", "c": "attention", "d": "keep"}
    layers = [*Choice(levels, ()).layers(), LayerChoice("e", "keep", "host")]
    counts = counted(layers)
    assert counts == {"keep": 2, "part": 2, "recompute": 1, "host": 1}
    assert sentence(counts, 3 << 29, 80 << 30, 1.2345) == (
        "2 of 5 layers keep their activations, 2 keep part of them: 1.5 of 80 GiB, about 1.23 "
        "times as fast as computing all again"
    )
    none = {"keep": 0, "part": 0, "recompute": 5, "host": 0}
    assert sentence(none, 2048, 4096, 1.0) == (
        "0 of 5 layers keep their activations: 2.0 KiB of 4.0 KiB"
    )
