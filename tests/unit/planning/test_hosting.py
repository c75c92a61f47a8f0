"""What experts in host memory free and cost, against a walk through a step with two slots."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_qlora.planning.choice import Choice, Choices, sentence
from moe_qlora.planning.devices import GPUS, gpu_of_device, pace_of
from moe_qlora.planning.hosting import ExpertLayer, Hosting, Pace
from tests.unit.planning.test_choice import MEASURED, model_of, needed, ranks

MB = 1 << 20


def hosting_of(sizes, *, link=1e3, seconds=1.0, most=None):
    """Layers with experts of these bytes; each computes for so many seconds."""
    layers = tuple(ExpertLayer(f"layers.{i}", size, size) for i, size in enumerate(sizes))
    every = {layer.name: seconds for layer in layers} | {"head": seconds}
    return Hosting(layers, len(sizes) if most is None else most, Pace(link=link), every)


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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7))
def test_copies_are_those_of_a_walk_with_two_slots(sizes):
    hosting = hosting_of(sizes)
    for count in range(len(sizes) + 1):
        there = sizes[len(sizes) - count :]
        assert hosting.copies(count) * 1e3 == pytest.approx(sum(copies_of_a_step(there)))
        slots = min(2, count) * max(there, default=0)
        assert hosting.freed(count) == sum(there) - slots and hosting.slots(count) == slots
        assert hosting.host_nbytes(count) == sum(there)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.floats(0.5, 40), st.floats(0, 1))
def test_a_step_waits_for_what_computing_does_not_hide(sizes, link, saved):
    hosting = hosting_of(sizes, link=link)
    kept = {layer.name: saved for layer in hosting.layers}
    for count in range(len(sizes) + 1):
        forward, backward = copies_of_a_step(sizes[len(sizes) - count :])
        waits = max(forward / link - 0.26 * count, 0)
        waits += max(backward / link - (0.74 - 0.26 * saved) * count, 0)
        assert hosting.waiting(count, kept) == pytest.approx(waits)
        computes = 1 + len(sizes) * (1 - 0.26 * saved)
        assert hosting.computing(kept) == pytest.approx(computes)
        assert hosting.step(count, kept) == pytest.approx(computes + waits)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7))
def test_only_numbers_that_free_more_than_less_of_them_are_chosen(sizes):
    hosting = hosting_of(sizes)
    better = [
        count
        for count in range(1, len(sizes) + 1)
        if all(hosting.freed(count) > hosting.freed(less) for less in range(count))
    ]
    assert list(hosting.counts) == [*reversed(better), 0]
    assert hosting_of([5] * 5).counts == (5, 4, 3, 0)  # One or two layers free nothing
    assert hosting_of([5] * 5, most=2).counts == (0,)


def choices_of(hosting):
    """Choices for layers that all have experts."""
    return Choices(tuple(layer.name for layer in hosting.layers), MEASURED, hosting)


def orders(hosting):
    places = choices_of(hosting).path
    assert places[0] == (hosting.counts[0], 0)
    assert places[-1] == (0, 2 * len(hosting.layers))
    for (host, steps), (fewer, more) in pairwise(places):
        assert (fewer < host) != (more > steps) and more - steps in (0, 1)
    return places


def test_hidden_copies_leave_memory_to_activations_and_slow_ones_bring_experts_first():
    hidden = orders(hosting_of([MB] * 6, link=1e12))
    assert [host for host, _ in hidden] == [6] * 13 + [5, 4, 3, 0]
    slow = orders(hosting_of([MB] * 6, link=1e3))
    assert [steps for _, steps in slow] == [0] * 5 + list(range(1, 13))


def test_between_the_two_what_saves_more_time_a_byte_comes_first():
    """Forwards hide half of the copies, backwards hide all until layers keep more."""
    size, seconds = 100 * MB, 1e-2
    hosting = hosting_of([size] * 40, link=size / (2 * 0.26 * seconds), seconds=seconds)
    # A copy saves 2.6 ms of 105 MB, 25 us a MB, of which an activation saves 8; but when few are
    # left, those that are still there from the pass before.
    assert [steps for _, steps in orders(hosting)][:36] == [0] * 36
    faster = hosting_of([size] * 40, link=size / (1.1 * 0.26 * seconds), seconds=seconds)
    # One of 2.86 ms: 0.26 ms are not hidden, 2.5 us a MB: after the part's 7.7, before 2.4.
    assert next(steps for host, steps in orders(faster) if host < 40) == 40


sizes = st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=5)


@settings(deadline=None, max_examples=100)
@given(sizes, st.lists(st.integers(1, 60), min_size=5, max_size=5), st.data())
def test_a_larger_memory_never_computes_again_or_copies_more(saved, experts, data):
    choices, activities = model_of(saved)
    experts = experts[: len(saved)]
    hosting = hosting_of(experts, link=data.draw(st.floats(1e-2, 1e12)))
    choices = replace(choices, hosting=hosting)

    def total(choice):
        return needed(choice.activities) + sum(experts) - hosting.freed(choice.host)

    def most(limit):
        return choices.most_kept(activities, lambda choice: total(choice) <= limit)

    least = needed(activities["recompute"]) + sum(experts) - hosting.freed(hosting.counts[0])
    small, large = sorted(least + data.draw(st.integers(0, 1200)) for _ in range(2))
    less, more = most(small), most(large)
    assert total(less) <= small and total(more) <= large
    assert less.host >= more.host
    assert all(a <= b for a, b in zip(ranks(choices, less), ranks(choices, more), strict=True))
    for choice in (less, more):
        hosted = [layer.experts for layer in choice.layers(hosting)]
        assert hosted == ["device"] * (len(saved) - choice.host) + ["host"] * choice.host


def test_the_sentence_says_what_is_where_and_what_copies_cost():
    hosting = hosting_of([256 * MB] * 4, link=256 * MB)
    counts = {"keep": 1, "part": 1, "recompute": 2, "host": 4}
    said = sentence(counts, 3 << 29, 80 << 30, 1.5, hosting, {})
    assert said == (
        "1 of 4 layers keep their activations, 1 keep part of them, experts of 4 lie in 1.0 GiB of "
        "host memory: 1.5 of 80 GiB, about 1.50 times as fast as computing all again and copying "
        "all experts; copies 4 s a step, of which 0.96 s are not hidden by 5 s of computing"
    )
    quick = hosting_of([256 * MB] * 4, link=1e12)
    said = sentence(counts, 3 << 29, 80 << 30, 1.0, quick, {})
    assert said.endswith("1.5 of 80 GiB; copies 0.0011 s a step, hidden by 5 s of computing")
    assert "host" not in sentence(counts | {"host": 0}, 3 << 29, 80 << 30, 1.0, quick, {})


def test_the_gain_is_against_copying_all_and_computing_all_again():
    choices = choices_of(hosting_of([10] * 4, link=10))
    keeps = Choice(dict.fromkeys(choices.layers, "keep"), ())
    assert choices.gain(keeps) == pytest.approx((5 + 0.96) / (5 - 4 * 0.26))


def test_paces_of_cards():
    assert pace_of(None) == pace_of(GPUS["H200"]) == Pace()
    ada = pace_of(GPUS["RTX4090"])
    assert ada.link == 22e9 and ada.rate == pytest.approx(300e12 * 165 / 989)
    assert ada.against_measured == pytest.approx(165 / 989)
    assert pace_of(GPUS["T4"]).link == 11e9 and pace_of(GPUS["RTX5090"]).link == 55e9
    assert Hosting.of((), 0, Pace(rate=9), {"a": 15}).seconds == {"a": 10}
    assert all(10 << 30 < gpu.nbytes < 200 << 30 for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", None),
    ],
)
def test_devices_are_known_by_the_name_that_cuda_gives(name, known):
    found = gpu_of_device(name)
    assert (found and found[1:]) == (known and GPUS[known][1:])
