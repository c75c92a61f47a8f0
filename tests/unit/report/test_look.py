"""Pages as people see them: in headless Chromium, on a phone and a desktop, light and dark."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
from browser import Browser, executable

import moe_qlora
from moe_qlora.memory.budget import StepMoment
from moe_qlora.memory.rehearsal import KindBytes
from moe_qlora.report import page as pages
from moe_qlora.report.pieces import (
    Curve,
    ErrorMap,
    ErrorPiece,
    LayerUse,
    LayoutPiece,
    LinearErrors,
    LoraGroup,
    LoraPiece,
    MemoryPiece,
    Missing,
    Report,
    RoutingPiece,
    TrainingPiece,
    WeightGroup,
)

look = pytest.importorskip("look", reason="needs Pillow, which reads screenshots")

pytestmark = [
    pytest.mark.skipif(executable() is None, reason="Chromium is not installed"),
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

WIDTHS = (360, 1280)
VIEWS = tuple(itertools.product(WIDTHS, (False, True)))
GIB = 1 << 30
GOLDEN = Path(__file__).parent / "golden"
UNLIKE = 15.0  # of 255


def large(plan) -> Report:
    """A report of 48 layers of 128 experts, with dead experts and a long run; `plan` is any."""
    draw = random.Random(0)
    layers, experts = 48, 128
    name = "model.language_model.layers.*.feed_forward.experts.gate_up_proj"
    kinds = (
        KindBytes("experts", 29 * 10**9, 58 * GIB, 14 * GIB, GIB),
        KindBytes("Linear layers", 10**9, 2 * GIB, GIB // 2, GIB // 30),
        KindBytes("embeddings and head", 6 * 10**8, GIB, GIB, 0),
        KindBytes("norms and others", 10**5, 2 * 10**5, 2 * 10**5, 0),
    )
    counts = [[int(draw.paretovariate(1.2)) - 1 for _ in range(experts)] for _ in range(layers)]
    moments = [
        StepMoment(
            phase, f"layer {n}", {"packed experts": 15 * GIB, "kept activations": n * GIB // 40}
        )
        for phase, order in (("forward", range(50)), ("backward", range(49, -1, -1)))
        for n in order
    ]
    moments.append(StepMoment("optimizer's step", "", {"packed experts": 15 * GIB}))
    loss = tuple((10.0 * n, 2 * math.exp(-n / 900) + draw.gauss(1, 0.05)) for n in range(3000))
    errors = tuple(
        tuple(0.088 + 0.004 * draw.random() for _ in range(experts)) for _ in range(layers)
    )
    return Report(
        "Qwen3-30B-A3B-Instruct-2507-quantized-nf4",
        "/home/somebody/models/checkpoints/Qwen3-30B-A3B-Instruct-2507-quantized-nf4",
        "2026-01-02 03:04, moe-qlora",
        LayoutPiece(
            "qwen3_moe",
            "nf4",
            (WeightGroup(name, layers, (128, 1536, 2048), "gate_up", "bfloat16", "It is."),),
            *(layers, (experts,), 8, (("model.layers.*.mlp.gate", 48),), (("a.*.b", 2),), 3, kinds),
        ),
        ErrorPiece(
            "nf4",
            "/home/somebody/models/Qwen3-30B-A3B",
            (ErrorMap(f"{name} (128 experts)", tuple(map(str, range(layers))), tuple(errors)),),
            (LinearErrors("model.layers.*.self_attn.q_proj.weight", 48, 0.09, 0.1, "x"),),
        ),
        RoutingPiece(
            tuple(LayerUse(f"model.layers.{n}.mlp", tuple(row)) for n, row in enumerate(counts)),
            *(16384, 120, "/data/a.jsonl", True),
        ),
        LoraPiece("/runs/a", (LoraGroup(name, True, 48, 24, (8, 16), 12345678),), 7, 30 * 10**9),
        MemoryPiece(plan, tuple(moments)),
        TrainingPiece(
            *("/runs/a/trainer_state.json", 30000, 40000, 2.5, 4),
            (
                Curve("loss", loss, (70.0,)),
                Curve("eval_loss", ((1000.0, 2.0), (20000.0, 1.5))),
                Curve("learning_rate", ((0.0, 0.0), (1000.0, 2e-4), (30000.0, 1.5e-5))),
            ),
        ),
        ("A note.",),
    )


@pytest.fixture(scope="module")
def files(inputs, tmp_path_factory):
    """A page of a small run with everything, one of a large model, and one of nothing."""
    folder = tmp_path_factory.mktemp("look")
    made = moe_qlora.write_report(
        inputs.run, folder / "whole.html", against=inputs.plain, text=inputs.text, seq=128
    )
    (folder / "large.html").write_text(pages.render(large(made.memory.plan)), encoding="utf-8")
    nothing = Missing("It was not there, and nobody can say why: look again with more of them.")
    none = Report("nothing", "/nothing", "now", *[nothing] * 6)
    (folder / "nothing.html").write_text(pages.render(none), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser():
    with Browser() as running:
        yield running


@pytest.fixture
def view(browser, files):
    """Opens a page; nothing may be asked of the network."""
    browser.requests.clear()
    opened = []

    def open_page(name: str, width: int, dark: bool, *, unfolded: bool = False):
        page = browser.open(files / f"{name}.html", width=width, dark=dark)
        opened.append(page)
        if unfolded:
            page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        return page

    yield open_page
    for page in opened:
        page.close()
    assert {address.partition("?")[0].rpartition("/")[2] for address in browser.requests} <= {
        "whole.html",
        "large.html",
        "nothing.html",
    }
    assert all(address.startswith("file:") for address in browser.requests)


@pytest.mark.parametrize("name", ["whole", "large", "nothing"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_sticks_out_or_overlaps(view, name, width):
    page = view(name, width, False, unfolded=True)
    assert len(look.lines_of_text(page)) > 20
    assert not look.sticking_out(page, width)
    assert not look.overlapping(page)


@pytest.mark.parametrize("name", ["whole", "large"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_are_easy_to_read(view, name, dark):
    for width in WIDTHS:
        assert not look.hard_to_read(view(name, width, dark, unfolded=True))


@pytest.mark.parametrize(("width", "dark"), VIEWS)
@pytest.mark.parametrize("name", ["whole", "large"])
def test_every_chart_is_drawn(view, name, width, dark):
    page = view(name, width, dark)
    image = look.picture(page)
    assert image.width == width
    _, ground = look.ink(image)
    assert (max(ground) < 60) if dark else (min(ground) > 230)
    charts = look.boxes(page, "svg[role=img]")
    assert len(charts) >= 7
    for left, top, right, bottom in charts:
        assert right - left > 150 and bottom - top > 15
        drawn, _ = look.ink(image.crop((left, top, right, bottom)))
        assert drawn > 0.01
    for box in look.boxes(page, "section, header"):
        assert look.ink(image.crop(box))[0] > 0.01
    shades = set(page_shades(page).values())
    for box in look.boxes(page, ".heat"):
        heat = image.crop(box)
        seen = {color for _, color in heat.getcolors(heat.width * heat.height)}
        assert len(seen & shades) >= 4


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_a_page_looks_as_it_was_reviewed(view, width, dark):
    """After a change that is meant, delete a golden file: the next run writes a new one."""
    page = view("large", width, dark)
    image, drawn_with = look.picture(page), look.fonts(page)
    golden = GOLDEN / f"large-{width}-{'dark' if dark else 'light'}.png"
    if not golden.exists():
        look.write_golden(image, golden, drawn_with)
        pytest.fail(f"{golden} was written: look at it, and commit it if it is good")
    if look.Image.open(golden).text["fonts"] != drawn_with:
        pytest.skip("this machine draws with other fonts than those of the golden file")
    assert look.unlike(image, golden) < UNLIKE
    # What a fault would do to it: a chart that is empty, and a page that is a line longer.
    left, top, right, bottom = look.boxes(page, ".plot")[2]
    empty = image.copy()
    empty.paste(image.getpixel((left + 1, top + 1)), (left, top, right, bottom))
    assert look.unlike(empty, golden) > 2 * UNLIKE
    longer = image.crop((0, 0, width, image.height + 20))
    longer.paste(image.crop((0, 1000, width, image.height)), (0, 1020))
    assert look.unlike(longer, golden) > 2 * UNLIKE


def page_shades(page) -> dict[str, tuple[int, int, int]]:
    """The colours of heat maps' scales as the page's scheme has them."""
    names = [f"s{n}" for n in range(7)] + [f"u{n}" for n in range(8)]
    colors = {}
    for name in names:
        style = f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')"
        text = page.evaluate(style).strip().lstrip("#")
        colors[name] = tuple(int(text[n : n + 2], 16) for n in (0, 2, 4))
    return colors


def luminance(color: tuple[int, ...]) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def lightness(color: tuple[int, ...]) -> float:
    """L* of CIELAB, 0 to 100: how light a colour looks, also to who sees no colours."""
    y = luminance(color)
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_shades_of_a_scale_differ_for_everybody(view, dark):
    shades = {n: lightness(c) for n, c in page_shades(view("nothing", 1280, dark)).items()}
    errors = [shades[f"s{n}"] for n in range(7)]
    assert min(b - a for a, b in itertools.pairwise(errors if dark else errors[::-1])) > 5
    uses = [shades[f"u{n}"] for n in range(1, 8)]
    for arm in (uses[:4], uses[3:][::-1]):  # from each end to the middle
        assert min(a - b if dark else b - a for a, b in itertools.pairwise(arm)) > 5
    assert abs(shades["u0"] - uses[0]) > 20  # no token at all stands apart from few


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_numbers_can_be_read_on_every_shade(view, dark):
    page = view("nothing", 1280, dark)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<svg><text></text></svg>')")
    text = "document.querySelector('svg text')"
    for name, back in page_shades(page).items():
        page.evaluate(f"{text}.setAttribute('class', 'on-{name}')")
        fill = page.evaluate(f"getComputedStyle({text}).fill")
        front = tuple(int(part) for part in fill[4:-1].split(","))
        low, high = sorted((luminance(front), luminance(back)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (name, fill)


def test_the_checks_themselves_see_faults(view):
    page = view("whole", 360, False)
    page.evaluate("document.querySelector('h1').style.marginBottom = '-2.5rem'")
    assert look.overlapping(page)
    page.evaluate("document.querySelector('h2').style.width = '900px'")
    page.evaluate("document.querySelector('h2').style.paddingLeft = '500px'")
    assert len(look.sticking_out(page, 360)) >= 2
    page.evaluate("document.querySelector('p.soft').style.color = '#bbb'")
    assert look.hard_to_read(page)
    box = look.boxes(page, ".heat")[0]
    assert look.ink(look.picture(page).crop(box))[0] > 0.01
    page.evaluate("document.querySelector('.heat').innerHTML = ''")
    assert look.ink(look.picture(page).crop(box))[0] < 0.01
