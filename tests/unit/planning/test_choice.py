"""What layers keep and what their experts cost in host memory, against walks through all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_qlora.planning.budget import Activity
from moe_qlora.planning.choice import Choices, ExpertLayer, LayerChoice, PlannedFit
from moe_qlora.planning.devices import GPUS, Pace, pace_named

MB = 1 << 20
LONG = 32_768


def choices_of(sizes, *, seq=4096, link=1e3, most=None, rate=6.0):
    """Layers with experts of these bytes; each computes for a second."""
    layers = tuple(ExpertLayer(f"layers.{i}", size, size) for i, size in enumerate(sizes))
    active = {layer.name: 1 for layer in layers}
    return Choices(active, seq, layers, len(sizes) if most is None else most, Pace(link, rate))


def activities_of(choices, saved):
    """Activities by level: an embedding, layers that save so much more, a head."""
    found = {}
    for place, level in enumerate(choices.levels):
        inner = [
            Activity(name, sum(more[: place + 1]), sum(more) + 7, sum(more) + 9)
            for name, more in zip(choices.active, saved, strict=True)
        ]
        # What is no layer differs here so that a mistake shows.
        ends = [Activity(name, 5 + place, 6, 6) for name in ("embed", "head")]
        found[level] = (ends[0], *inner, ends[1])
    return found.__getitem__


def needed(blocks):
    """The peak of a step without gradients: what is kept before a block, and its own work."""
    before, peak = 0, 0
    for block in blocks:
        peak = max(peak, before + block.forward, before + block.backward)
        before += block.saved
    return peak


saved_bytes = st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(saved_bytes, st.sampled_from([4096, LONG]), st.booleans(), st.data())
def test_the_quickest_step_that_fits_is_taken(saved, seq, hosts, data):
    experts = data.draw(st.lists(st.integers(1, 60), min_size=len(saved), max_size=len(saved)))
    link = data.draw(st.sampled_from([1.0, 20.0, 1e9]))
    choices = choices_of(experts, seq=seq, link=link, most=None if hosts else 0)
    activities = activities_of(choices, saved)

    def total(steps, host):
        return needed(choices.at(steps, activities).activities) - choices.freed(host)

    places = [(n, host) for n in range(2 * len(saved) + 1) for host in range(choices.most + 1)]
    least = min(total(0, host) for host in range(choices.most + 1))
    limit = least + data.draw(st.integers(-1, 1200))
    best = choices.best(activities, lambda blocks: needed(blocks) - limit)
    if limit < least:
        assert best is None
        return

    def seconds(levels, host):
        return choices.step(host, choices.saved(levels))

    assert needed(best.activities) - choices.freed(best.host) <= limit
    assert seconds(best.levels, best.host) == min(
        seconds(choices.at(n, activities).levels, host)
        for n, host in places
        if total(n, host) <= limit
    )
    fit = choices.fit(best, 1, 1, 1)
    where = [layer.experts for layer in fit.layers]
    assert where == ["device"] * (len(saved) - best.host) + ["host"] * best.host
    assert fit.gain >= 1 and (fit.host is None) is (choices.most == 0)


def test_all_layers_rise_to_a_part_and_then_to_all_from_the_last_and_save_time():
    choices = choices_of([1] * 3)
    activities = activities_of(choices, [(1, 2, 3)] * 3)
    first = [[level[0] for level in choices.at(n, activities).levels.values()] for n in range(7)]
    assert ["".join(each) for each in first] == ["rrr", "rrp", "rpp", "ppp", "ppk", "pkk", "kkk"]
    blocks = choices.at(5, activities).activities
    assert [(block.name, block.saved) for block in blocks] == [
        ("embed", 5), ("layers.0", 3), ("layers.1", 6), ("layers.2", 6), ("head", 5),
    ]  # fmt: skip
    levels = dict(zip(choices.active, choices.levels, strict=True))
    assert [*choices.saved(levels).values()] == [0, 0.77, 1]
    choices = choices_of([1] * 3, seq=LONG)
    assert choices.levels == ("recompute", "attention", "keep")
    levels = dict(zip(choices.active, choices.levels, strict=True))
    assert [*choices.saved(levels).values()] == pytest.approx([0, 1.44 / 2.26, 1])


def test_a_step_waits_for_copies_that_computing_does_not_hide():
    """Forward copies all but the first two layers, backward all but the last two."""
    choices = choices_of([5, 3, 4, 2], link=2)
    forward, backward = (4 + 2) / 2, (5 + 3) / 2
    for saved in (0.0, 0.5):
        waits = (forward - 4 * 0.26) + (backward - 4 * (0.74 - 0.26 * saved))
        found = choices.times(4, dict.fromkeys(choices.active, saved))
        assert found == pytest.approx((forward + backward, waits, 4 * (1 - 0.26 * saved)))
    assert choices.times(3, {}) == pytest.approx((2.5, 1 - 3 * 0.26, 4))
    assert [choices.freed(count) for count in range(5)] == [0, 0, -2, 1, 4]


def test_one_sentence_says_what_is_kept_and_what_copies_cost():
    def fit(*levels, needed=3 << 29, memory=80 << 30, gain=1.0, host=None, waiting=0.96, copies=4):
        layers = [LayerChoice("x", level, "device" if host is None else "host") for level in levels]
        return PlannedFit(tuple(layers), 0, needed, memory, gain, host, copies, waiting, 5.0)

    said = "0 of 1 layers keep their activations: 2.0 KiB of 4.0 KiB"
    assert str(fit("recompute", needed=2048, memory=4096)) == said
    assert str(fit("recompute", "recompute", "part", "keep", gain=1.5, host=1 << 30)) == (
        "1 of 4 layers keep their activations, 1 keep part of them, experts of 4 lie in 1.0 GiB of "
        "host memory: 1.5 of 80 GiB, about 1.50 times as fast as computing all again and copying "
        "all experts; copies 4 s a step, of which 0.96 s are not hidden by 5 s of computing"
    )
    quick = str(fit("keep", host=MB, waiting=0.0, copies=0.0011))
    assert quick.endswith("1.5 of 80 GiB; copies 0.0011 s a step, hidden by 5 s of computing")


@pytest.mark.parametrize(
    ("name", "known", "link"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 22e9),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000", 55e9),
        ("Tesla T4", "T4", 11e9),
        ("AMD Instinct MI300X", None, 55e9),
    ],
)
def test_devices_are_known_by_the_name_that_cuda_gives(name, known, link):
    rate = 300e12 * (GPUS[known].tflops if known else 989) / 989
    assert pace_named(name) == (link, pytest.approx(rate))
