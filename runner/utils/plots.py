"""Convert matplotlib figures to self-contained SVG elements, and sanitise their labels."""

import hashlib
import re
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"


def plain_label(text: str, max_chars: int = 34) -> str:
    """Return a label of at most `max_chars` characters, with `?` for each that the font lacks."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(FONT))
    drawn = ""
    for character in text:
        # Index 0 is the font's glyph for a missing character.
        has_glyph = character.isprintable() and font.get_char_index(ord(character))
        drawn += character if has_glyph else "?"
    if len(drawn) > max_chars:
        drawn = drawn[: max_chars - 1] + "…"
    # matplotlib leaves labels that begin with _ out of the legend.
    return f" {drawn}" if drawn.startswith("_") else drawn


def chart_style(font_size: float) -> AbstractContextManager[None]:
    """Return the context in which figures are drawn alike on every machine."""
    from matplotlib import rc_context

    # A user's matplotlibrc would change the fonts; LaTeX may be missing on this machine.
    return rc_context({"font.size": font_size, "font.family": FONT, "text.usetex": False})


def svg_element(figure: "Figure") -> str:
    """Return a figure as an <svg> element for an HTML page, without scripts or links.

    Its ids differ from those of every other figure of the page.
    """
    import io

    from matplotlib import rc_context

    target = io.StringIO()
    # The same figure gives the same text: no date, and ids that are hashed with a fixed salt.
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": "report", "svg.fonttype": "path"}):
        figure.savefig(target, format="svg", metadata=no_metadata)
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", target.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :]
    # matplotlib numbers the ids of each figure alike, and a page holds many figures.
    prefix = "c" + hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    # A style element inside a page would apply to the whole page.
    style = re.compile(r'<style type="text/css">\*\{([^}]*)\}</style>')
    rule = style.search(text)
    assert rule is not None
    return style.sub("", text).replace("<svg ", f'<svg style="{rule[1]}" role="img" ', 1)
