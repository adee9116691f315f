"""Convert matplotlib figures to self-contained SVG elements, and sanitise their labels."""

import hashlib
import html
import re
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"
INK = "black"
"""Colour of text, axes and the baseline; on an HTML page that of the page's text."""
CHART_WIDTH_INCHES = 4.4
"""Width at which letters of 10 points have 11 pixels in page.css's narrowest column, 360 pixels."""
MAX_FLAT_RATIO = 1.1
"""Height over width above which page.css gives a chart the height of two."""


def plain_label(text: str) -> str:
    """Return a label of at most 34 characters, with `?` for each that the font lacks."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(FONT))
    drawn = ""
    for character in text:
        # Index 0 is the font's glyph for a missing character.
        has_glyph = character.isprintable() and font.get_char_index(ord(character))
        drawn += character if has_glyph else "?"
    if len(drawn) > 34:
        drawn = drawn[:33] + "…"
    # matplotlib leaves labels that begin with _ out of the legend.
    return f" {drawn}" if drawn.startswith("_") else drawn


def module_label(name: str) -> str:
    """Return a module's name for an axis; of a long one the end, which tells modules apart."""
    return plain_label(name if len(name) <= 30 else f"…{name[-29:]}")


def chart_style() -> AbstractContextManager[None]:
    """Return the context in which figures are drawn alike on every machine."""
    from matplotlib import rc_context

    # A user's matplotlibrc would change the fonts; LaTeX may be missing on this machine.
    style: dict[Any, Any] = {"font.size": 10, "font.family": FONT, "text.usetex": False}
    style |= {"axes.titlesize": "medium", "figure.titlesize": "medium"}
    style |= {"axes.grid": True, "grid.color": INK, "grid.alpha": 0.15, "grid.linewidth": 0.6}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    return rc_context(style)


def svg_element(figure: "Figure") -> str:
    """Return a figure as an <svg> element for an HTML page, without scripts or links.

    Its ids differ from those of every other figure of the page. The page shows through it, and its
    texts have the page's font. A screen reader reads the figure's label, or the titles of its
    charts where it has none.
    """
    import io

    from matplotlib import rc_context

    target = io.StringIO()
    # The same figure gives the same text: no date, and ids that are hashed with a fixed salt.
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": "report", "svg.fonttype": "none"}):
        figure.savefig(target, format="svg", metadata=no_metadata, transparent=True)
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", target.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :]
    # matplotlib numbers the ids of each figure alike, and a page holds many figures.
    prefix = "c" + hashlib.sha256(text.encode()).hexdigest()[:8]

    def adapt(tag: re.Match[str]) -> str:
        own = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", tag[0])
        return own.replace("#000000", "currentColor").replace(f"'{FONT}'", "var(--font)")

    # A style element inside a page would apply to the whole page.
    style = re.compile(r'<style type="text/css">\*\{([^}]*)\}</style>')
    rule = style.search(text)
    assert rule is not None
    titles = [axes.get_title(side) for axes in figure.axes for side in ("left", "center", "right")]
    name = " ".join(str(figure.get_label() or " ".join(titles)).split())
    # A black shape has no fill: it inherits the element's.
    look = f'fill="currentColor" style="{rule[1]}" role="img" aria-label="{html.escape(name)}"'
    if figure.get_figheight() > MAX_FLAT_RATIO * figure.get_figwidth():
        look += ' class="tall"'
    # Not in texts, which hold names of users.
    text = re.sub("<[^>]+>", adapt, style.sub("", text))
    return text.replace("<svg ", f"<svg {look} ", 1)
