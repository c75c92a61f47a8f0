"""What a person sees of a page at a glance: what sticks out, overlaps, is empty or hard to read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from browser import Page
from PIL import Image, ImageChops, ImageStat
from PIL.PngImagePlugin import PngInfo

# Boxes of lines of text that are there to be read: [left, top, right, bottom, text].
_LINES = """
(() => {
  const lines = [];
  const hidden = element => {
    for (let e = element; e; e = e.parentElement) {
      const style = getComputedStyle(e);
      if (style.display === 'none' || style.visibility === 'hidden') return true;
      if (style.clipPath !== 'none') return true;
      if (e.tagName === 'title' || e.tagName === 'desc' || e.tagName === 'STYLE') return true;
      if (e.tagName === 'DETAILS' && !e.open && !element.closest('summary')) return true;
    }
    return false;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const elements = new Map();
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.data.trim()) continue;
    const owner = node.parentElement;
    if (!elements.has(owner)) elements.set(owner, hidden(owner));
    if (elements.get(owner)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width <= 1 || box.height <= 1) continue;
      lines.push([box.left + scrollX, box.top + scrollY, box.right + scrollX,
                  box.bottom + scrollY, node.data.trim().slice(0, 40)]);
    }
  }
  return JSON.stringify(lines);
})()
"""

# Contrast of each element's text with what is behind it: [ratio, text].
_CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const parse = color => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const results = [];
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color[3] === 255) return color;
    }
    return parse(matchMedia('(prefers-color-scheme: dark)').matches ? '#000' : '#fff');
  };
  for (const element of document.body.querySelectorAll('*')) {
    const own = [...element.childNodes].filter(n => n.nodeType === 3 && n.data.trim());
    if (!own.length || ['TITLE', 'DESC', 'STYLE'].includes(element.tagName.toUpperCase())) continue;
    const style = getComputedStyle(element);
    let front = parse(style.color), back = behind(element);
    if (element.tagName === 'text') {
      const shade = [...element.classList].find(n => n.startsWith('on-')).slice(3);
      front = parse(style.fill);
      back = parse(getComputedStyle(document.documentElement).getPropertyValue('--' + shade));
    }
    results.push([ratio(light(front), light(back)), own[0].data.trim().slice(0, 40)]);
  }
  return JSON.stringify(results);
})()
"""


def lines_of_text(page: Page) -> list[tuple[float, float, float, float, str]]:
    return [tuple(line) for line in json.loads(page.evaluate(_LINES))]


def sticking_out(page: Page, width: int) -> list[str]:
    """Lines of text that a window does not show whole, and whether the page scrolls sideways."""
    found = [text for left, _, right, _, text in lines_of_text(page) if left < 0 or right > width]
    if page.evaluate("document.documentElement.scrollWidth") > width:
        found.append("the page scrolls sideways")
    return found


def overlapping(page: Page) -> list[tuple[str, str]]:
    """Pairs of lines of text of which one covers a part of the other."""
    lines = sorted(lines_of_text(page), key=lambda line: line[1])
    found = []
    for index, (left, top, right, bottom, text) in enumerate(lines):
        for other in lines[index + 1 :]:
            if other[1] >= bottom:
                break
            wide = min(right, other[2]) - max(left, other[0])
            high = min(bottom, other[3]) - max(top, other[1])
            # Boxes are higher than letters: a fifth of a line is the space between lines.
            least = min(bottom - top, other[3] - other[1])
            if wide > 1 and high > 0.35 * least:
                found.append((text, other[4]))
    return found


def hard_to_read(page: Page, least: float = 4.5) -> list[tuple[float, str]]:
    """Texts of less contrast than WCAG 2 asks for (level AA)."""
    return [(ratio, text) for ratio, text in json.loads(page.evaluate(_CONTRAST)) if ratio < least]


def picture(page: Page) -> Any:
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def ink(image: Any) -> tuple[float, tuple[int, int, int]]:
    """The part of an image that has not its most frequent colour, and that colour."""
    most, ground = max(image.getcolors(image.width * image.height))
    return 1 - most / (image.width * image.height), ground


def boxes(page: Page, selector: str) -> list[tuple[int, int, int, int]]:
    """The places of elements on the whole page, in pixels."""
    script = (
        f"JSON.stringify([...document.querySelectorAll({json.dumps(selector)})].map(e => "
        "{const b = e.getBoundingClientRect(); "
        "return [b.left + scrollX, b.top + scrollY, b.right + scrollX, b.bottom + scrollY]}))"
    )
    return [tuple(round(v) for v in box) for box in json.loads(page.evaluate(script))]


def fonts(page: Page) -> str:
    """What tells the fonts of this machine from others: how wide they draw some letters."""
    widths = []
    for family in ("system-ui, sans-serif", "monospace"):
        script = (
            "(() => { const c = document.createElement('canvas').getContext('2d'); "
            f"c.font = '100px {family}'; return c.measureText('Quantization 0123').width; }})()"
        )
        widths.append(f"{page.evaluate(script):.0f}")
    return " ".join(widths)


def write_golden(image: Any, golden: Path, drawn_with: str) -> None:
    """Write a quarter of a picture's size in few colours, with the fonts that it was drawn with."""
    golden.parent.mkdir(exist_ok=True)
    small = image.resize((image.width // 4, image.height // 4), Image.Resampling.BOX)
    notes = PngInfo()
    notes.add_text("fonts", drawn_with)
    small.quantize(128, dither=Image.Dither.NONE).save(golden, optimize=True, pnginfo=notes)


def unlike(image: Any, golden: Path) -> float:
    """How far a picture is from a golden one where they differ most, 0 to 255.

    That is the mean over pixels and colours of a band across the page, of 32 pixels' height.
    """
    reviewed = Image.open(golden).convert("RGB")
    small = image.resize(reviewed.size, Image.Resampling.BOX)
    difference = ImageChops.difference(small, reviewed)
    bands = [
        difference.crop((0, top, small.width, min(top + 8, small.height)))
        for top in range(0, small.height, 8)
    ]
    return max(sum(ImageStat.Stat(band).mean) / 3 for band in bands)
