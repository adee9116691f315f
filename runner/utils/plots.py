"""Convert matplotlib figures to self-contained SVG elements, and sanitise their labels."""

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"


def plain_label(text: str, most: int = 34) -> str:
    """Return a label with `?` for each character that the font lacks, cut to `most` characters."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(FONT))
    drawn = "".join(c if c.isprintable() and font.get_char_index(ord(c)) else "?" for c in text)
    drawn = drawn if len(drawn) <= most else drawn[: most - 1] + "…"
    # matplotlib leaves labels that begin with _ out of the legend.
    return f" {drawn}" if drawn.startswith("_") else drawn


def svg_element(figure: "Figure") -> str:
    """Return a figure as an <svg> element for an HTML page, without scripts or links, and with ids
    that no other figure of the page has."""
    import io

    from matplotlib import rc_context

    target = io.StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": "report", "svg.fonttype": "path"}):
        figure.savefig(target, format="svg", metadata=none)
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", target.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :]
    own = "c" + hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", text)
    # A style element inside a page would hold for all of it.
    style = re.compile(r'<style type="text/css">\*\{([^}]*)\}</style>')
    rule = style.search(text)
    assert rule is not None
    return style.sub("", text).replace("<svg ", f'<svg style="{rule[1]}" role="img" ', 1)
