"""What layers keep and what their experts cost in host memory, against walks through all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_qlora.planning.budget import Activity
from moe_qlora.planning.choice import Choice, Choices, Ladder, LayerChoice, counted, sentence
from moe_qlora.planning.devices import GPUS, gpu_of_device, pace_of
from moe_qlora.planning.hosting import ExpertLayer, Hosting, Pace

MEASURED, LONG = Ladder.of(4096), Ladder.of(32_768)
MB = 1 << 20


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


def hosting_of(sizes, *, link=1e3, most=None):
    """Layers with experts of these bytes; each computes for a second, and the head too."""
    layers = tuple(ExpertLayer(f"layers.{i}", size, size) for i, size in enumerate(sizes))
    seconds = dict.fromkeys((*(layer.name for layer in layers), "head"), 1.0)
    return Hosting(layers, len(sizes) if most is None else most, Pace(link=link), seconds)


def needed(blocks):
    """The peak of a step without gradients: what is kept before a block, and its own work."""
    before, peak = 0, 0
    for block in blocks:
        peak = max(peak, before + block.forward, before + block.backward)
        before += block.saved
    return peak


def ranks(choices, choice):
    return [choices.ladder.levels.index(level) for level in choice.levels.values()]


saved_bytes = st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(saved_bytes, st.sampled_from([MEASURED, LONG]), st.booleans(), st.data())
def test_a_larger_memory_never_computes_again_or_copies_more(saved, ladder, hosts, data):
    """And what is chosen fits, while nothing after it on the path does."""
    choices, activities = model_of(saved, ladder)
    experts = data.draw(st.lists(st.integers(1, 60), min_size=len(saved), max_size=len(saved)))
    hosting = hosting_of(experts, link=data.draw(st.floats(1e-2, 1e12)))
    choices = replace(choices, hosting=hosting if hosts else None)

    def total(choice):
        return needed(choice.activities) + sum(experts) - hosting.freed(choice.host)

    def most(limit):
        return choices.most_kept(activities, lambda choice: total(choice) <= limit)

    least = total(choices.at(choices.path[0], activities))
    small, large = sorted(least + data.draw(st.integers(0, 1200)) for _ in range(2))
    less, more = most(small), most(large)
    for choice, limit in ((less, small), (more, large)):
        assert total(choice) <= limit
        at = choices.path.index((choice.host, sum(ranks(choices, choice))))
        for place in choices.path[at + 1 :]:
            assert total(choices.at(place, activities)) > limit
        where = [layer.experts for layer in choice.layers(choices.hosting)]
        assert where == ["device"] * (len(saved) - choice.host) + ["host"] * choice.host
    assert less.host >= more.host
    assert all(a <= b for a, b in zip(ranks(choices, less), ranks(choices, more), strict=True))
    assert most(least - 1) is None


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
    assert LONG.levels == ("recompute", "attention", "keep")


@pytest.mark.parametrize(
    ("level", "part"), [("recompute", 0), ("part", 0.77), ("attention", 1.44 / 2.26), ("keep", 1)]
)
def test_the_gain_is_by_what_levels_save(level, part):
    """Against computing all again and, with experts in host memory, copying all of these."""
    choices, _ = model_of([(1, 2, 3)] * 4, LONG if level == "attention" else MEASURED)
    choice = Choice(dict.fromkeys(choices.layers, level), ())
    assert choices.gain(choice) == pytest.approx(1 / (1 - 0.26 * part))
    hosting = hosting_of([10] * 4, link=10)
    gain = replace(choices, hosting=hosting).gain(choice)
    assert gain == pytest.approx((5 + 0.96) / (5 - 4 * 0.26 * part))


def copies_of_a_step(sizes):
    """Bytes that come to two slots in forward and backward, once a step has run before."""
    places, copied = [], []
    for _ in range(2):
        copied = [0, 0]
        for way, order in enumerate((range(len(sizes)), reversed(range(len(sizes))))):
            for layer in order:
                if layer not in places:
                    copied[way] += sizes[layer]
                    places.append(layer)
                else:
                    places.append(places.pop(places.index(layer)))
                del places[:-2]
    return copied


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.floats(0.5, 40), st.floats(0, 1))
def test_copies_are_those_of_a_walk_with_two_slots(sizes, link, saved):
    """And a step waits for those that computing does not hide."""
    hosting = hosting_of(sizes, link=link)
    kept = {layer.name: saved for layer in hosting.layers}
    for count in range(len(sizes) + 1):
        there = sizes[len(sizes) - count :]
        forward, backward = copies_of_a_step(there)
        assert hosting.copies(count) * link == pytest.approx(forward + backward)
        slots = min(2, count) * max(there, default=0)
        assert hosting.freed(count) == sum(there) - slots and hosting.slots(count) == slots
        waits = max(forward / link - 0.26 * count, 0)
        waits += max(backward / link - (0.74 - 0.26 * saved) * count, 0)
        computes = 1 + len(sizes) * (1 - 0.26 * saved)
        assert hosting.waiting(count, kept) == pytest.approx(waits)
        assert hosting.step(count, kept) == pytest.approx(computes + waits)


def test_hidden_copies_leave_memory_to_activations_and_slow_ones_bring_experts_first():
    def path(**pace):
        hosting = hosting_of([MB] * 6, **pace)
        places = Choices(tuple(x.name for x in hosting.layers), MEASURED, hosting).path
        for (host, steps), (fewer, more) in pairwise(places):
            assert (fewer < host) != (more > steps) and more - steps in (0, 1)
        return places

    # One or two layers in host memory free nothing.
    assert [host for host, _ in path(link=1e12)] == [6] * 13 + [5, 4, 3, 0]
    assert [steps for _, steps in path(link=1e3)] == [0] * 5 + list(range(1, 13))
    assert hosting_of([5] * 5, most=2).counts == (0,)


def test_one_sentence_says_what_is_kept_and_what_copies_cost():
    levels = {"a": "recompute", "b": "part", "c": "attention", "d": "keep"}
    counts = counted([*Choice(levels, ()).layers(), LayerChoice("e", "keep", "host")])
    assert counts == {"keep": 2, "part": 2, "recompute": 1, "host": 1}
    assert sentence(counts, 3 << 29, 80 << 30, 1.2345) == (
        "2 of 5 layers keep their activations, 2 keep part of them: 1.5 of 80 GiB, about 1.23 "
        "times as fast as computing all again"
    )
    none = {"keep": 0, "part": 0, "recompute": 5, "host": 0}
    said = "0 of 5 layers keep their activations: 2.0 KiB of 4.0 KiB"
    assert sentence(none, 2048, 4096, 1.0) == said
    slow, quick = (hosting_of([256 * MB] * 4, link=link) for link in (256 * MB, 1e12))
    counts = {"keep": 1, "part": 1, "recompute": 2, "host": 4}
    assert sentence(counts, 3 << 29, 80 << 30, 1.5, slow, {}) == (
        "1 of 4 layers keep their activations, 1 keep part of them, experts of 4 lie in 1.0 GiB of "
        "host memory: 1.5 of 80 GiB, about 1.50 times as fast as computing all again and copying "
        "all experts; copies 4 s a step, of which 0.96 s are not hidden by 5 s of computing"
    )
    said = sentence(counts, 3 << 29, 80 << 30, 1.0, quick, {})
    assert said.endswith("1.5 of 80 GiB; copies 0.0011 s a step, hidden by 5 s of computing")


@pytest.mark.parametrize(
    ("name", "known", "link"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 55e9),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 22e9),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada", 22e9),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000", 55e9),
        ("NVIDIA A10", "A10", 22e9),
        ("Tesla T4", "T4", 11e9),
        ("AMD Instinct MI300X", None, 55e9),
    ],
)
def test_devices_are_known_by_the_name_that_cuda_gives(name, known, link):
    found = gpu_of_device(name)
    assert (found and found[1:]) == (known and GPUS[known][1:])
    rate = 300e12 * (GPUS[known].tflops if known else 989) / 989
    assert pace_of(found) == Pace(link, pytest.approx(rate))
