"""Render the blocks of a report as HTML and as Markdown.

Texts come from users and from checkpoints of strangers: everything is escaped.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WRAP_MIN_CHARS = 40
"""Characters above which the text of a cell may break into lines."""
Tone = Literal["", "good", "bad", "quiet"]


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        note: small text under the cell's; in parentheses in Markdown.
        bar: length of the bar under the text, 0 to 1; None for no bar.
    """

    text: str
    tone: Tone = ""
    note: str = ""
    bar: float | None = None


@dataclass(frozen=True)
class Heading:
    """The heading of a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `answer` is the one that states the result of the page."""

    text: str
    kind: Literal["plain", "answer", "small"] = "plain"


@dataclass(frozen=True)
class Items:
    """A list of (name, text)."""

    items: Sequence[tuple[str, str]]
    small: bool = False


@dataclass(frozen=True)
class Commands:
    """Commands, one per line."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of one length; on a narrow screen `cards` turns each row into a block of its own.

    Attributes:
        words: columns of text, which are aligned left.
        marked: the row that stands out.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: frozenset[int] = frozenset({0})
    marked: int | None = None
    cards: bool = False


@dataclass(frozen=True)
class Charts:
    """SVG elements, trusted, and a legend of (name, colour, dash lengths); not in Markdown."""

    pictures: Sequence[str]
    legend: Sequence[tuple[str, str, Sequence[float]]] = ()


Block = Heading | Text | Items | Commands | Table | Charts


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    """Return a page in GitHub's Markdown."""
    parts = [f"# {markdown_text(title)}", *(markdown(block) for block in blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown(block: Block) -> str:
    """Return one block in Markdown."""
    match block:
        case Heading(text):
            return f"## {markdown_text(text)}"
        case Text(text, kind):
            return f"**{markdown_text(text)}**" if kind == "answer" else escape_line_start(text)
        case Items(items):
            return "\n".join(
                f"- {escape_line_start(name)}: {markdown_text(text)}" for name, text in items
            )
        case Commands(lines):
            return "\n".join(f"- {markdown_code(line)}" for line in lines)
        case Table(head, rows, words, marked):
            return _markdown_table(head, rows, words, marked)
        case _:
            return ""


def _markdown_table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    words: frozenset[int],
    marked: int | None,
) -> str:
    alignments = [" --- " if i in words else " ---: " for i in range(len(head))]
    rule = "|".join(alignments)
    body = []
    for row in rows:
        body.append([markdown_text(_cell_text(cell)) for cell in row])
    if marked is not None:
        body[marked][0] = f"**{body[marked][0]}**"
    titles = [markdown_text(title) for title in head]
    first, *rest = (f"| {' | '.join(line)} |" for line in [titles, *body])
    return "\n".join([first, f"|{rule}|", *rest])


def _cell_text(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def escape_line_start(text: str) -> str:
    """Return Markdown text for the start of a line, where it must not make a heading or list."""
    # CommonMark: #, +, -, = and a number with . or ) start a heading, a list or an underline.
    return re.sub(r"^([#+=-]|\d+[.)](?=\s|$))", r"\\\1", markdown_text(text))


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """Return a self-contained HTML page that runs no script, whatever text is in it."""
    body = "\n".join(element(block) for block in blocks)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{_CSS}</style></head>
<body><main><h1>{html.escape(title)}</h1>
{body}
</main></body></html>
"""


def element(block: Block) -> str:
    """Return one block as an HTML element."""
    match block:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Text(text, kind):
            return f'<p class="{kind}">{html.escape(text)}</p>'
        case Items(items, small):
            lines = "".join(
                f"<li><b>{html.escape(name)}:</b> {html.escape(text)}</li>" for name, text in items
            )
            return f'<ul class="{"small" if small else "plain"}">{lines}</ul>'
        case Commands(lines):
            return "".join(f"<pre>{html.escape(line)}</pre>" for line in lines)
        case Charts(pictures, legend):
            keys = "".join(_legend_entry(*entry) for entry in legend)
            drawn = "".join(f"<figure>{picture}</figure>" for picture in pictures)
            return f'<p class="legend">{keys}</p><div class="charts">{drawn}</div>'
        case Table():
            return _table(block)


def _legend_entry(name: str, colour: str, dashes: Sequence[float]) -> str:
    dash = " ".join(f"{2 * length:g}" for length in dashes) or "none"
    line = f'<path d="M0 6H30" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
    swatch = f'<svg width="30" height="12" aria-hidden="true">{line}</svg>'
    return f"<span>{swatch}{html.escape(name)}</span>"


def _table(table: Table) -> str:
    # The attribute of each column's cells: text is aligned left, numbers right.
    attributes = [' class="word"' if i in table.words else "" for i in range(len(table.head))]
    titles = [html.escape(text) for text in table.head]
    head = ""
    for attribute, title in zip(attributes, titles, strict=True):
        # A browser may break a line at a hyphen: names such as bf16-mixed stay whole.
        unbroken = re.sub(r"(\S+-\S+)", r'<span class="whole">\1</span>', title)
        head += f"<th{attribute}>{unbroken}</th>"
    body = ""
    for i, row in enumerate(table.rows):
        mark = " class=marked" if i == table.marked else ""
        cells = ""
        for attribute, title, cell in zip(attributes, titles, row, strict=True):
            cells += _table_cell(cell, attribute, title)
        body += f"<tr{mark}>{cells}</tr>"
    kind = "cards" if table.cards else "rows"
    rows = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="{kind}"><table>{rows}</table></div>'


def _table_cell(cell: Cell, attribute: str, title: str) -> str:
    # CSS hides an empty cell on a card, where the title would stand without a value.
    if not cell.text:
        return f"<td{attribute}></td>"
    # On a card, which has no head row, CSS prints data-head before the value.
    return f'<td{attribute} data-head="{title}"><div>{_cell_element(cell)}</div></td>'


def _cell_element(cell: Cell) -> str:
    kind = cell.tone or "text"
    if len(cell.text) > WRAP_MIN_CHARS:
        kind += " long"
    shown = f'<span class="{kind}">{html.escape(cell.text)}</span>'
    if cell.note:
        shown += f"<small>{html.escape(cell.note)}</small>"
    if cell.bar is None:
        return shown
    width = 100 * min(max(cell.bar, 0.0), 1.0)
    return f'{shown}<i class="bar"><i style="width:{width:.0f}%"></i></i>'


_CSS = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{margin:0;background:#fff;color:#1b1f24;font:15px/1.5 system-ui,-apple-system,"Segoe UI",
Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:80rem;margin:0 auto;padding:1.75rem 1.5rem 3rem}
h1{font-size:1.05rem;font-weight:600;margin:0;color:#57606a;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
p{margin:.4rem 0;max-width:60rem;overflow-wrap:anywhere}
.answer{font-size:1.5rem;line-height:1.35;font-weight:600;margin:1rem 0 1.4rem}
.small{font-size:.85rem;color:#57606a}
ul{padding-left:1.2rem;margin:.4rem 0;max-width:60rem}
li{margin:.25rem 0;overflow-wrap:anywhere}
pre{background:#f6f8fa;border:1px solid #d8dee4;border-radius:6px;padding:.6rem .8rem;
margin:.4rem 0;white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}
.rows,.cards{overflow-x:auto;margin-top:.9rem}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th{font-size:.78rem;font-weight:600;color:#57606a;vertical-align:bottom;
border-bottom:2px solid #d0d7de}
th,td{text-align:right;padding:.4rem .6rem}
th:first-child,td:first-child{padding-left:.3rem}
td{border-bottom:1px solid #eaeef2;vertical-align:top}
.word{text-align:left}
td:first-child{font-weight:600;white-space:nowrap}
.rows td{white-space:nowrap}
.rows td.word:last-child{white-space:normal;min-width:20rem;overflow-wrap:anywhere}
.cards td span,.cards small{white-space:nowrap}
.cards td:nth-child(2) small{white-space:normal;min-width:9rem;max-width:15rem}
.cards td .long,.rows td .long{display:inline-block;white-space:normal;min-width:16rem;
overflow-wrap:anywhere}
.whole{white-space:nowrap}
small{display:block;font-size:.8rem;color:#57606a}
.marked td{background:#eef6ff}
.good{color:#116329}.bad{color:#a40e26}.quiet{color:#57606a}
.bar{display:block;height:4px;margin-top:3px;min-width:3.5rem;background:#eaeef2;border-radius:2px}
.bar i{display:block;height:4px;background:#0072b2;border-radius:2px}
.legend{max-width:none;font-size:.85rem}
.legend span{display:inline-block;margin:0 1.1rem .2rem 0;max-width:100%;overflow:hidden;
white-space:nowrap;text-overflow:ellipsis}
.legend svg{margin-right:.4rem;vertical-align:-1px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0}
figure svg{width:100%;height:auto;max-width:44rem}
@media(max-width:700px){
main{padding:1.1rem .9rem 2rem}
.answer{font-size:1.2rem}
.cards thead{display:none}
.cards table,.cards tbody,.cards tr,.cards td{display:block;width:100%}
.cards tr{border:1px solid #d0d7de;border-radius:8px;margin:0 0 .8rem;padding:.3rem .7rem}
.cards td{display:flex;justify-content:space-between;gap:1rem;border:0;padding:.15rem 0;
text-align:right}
.cards td:empty{display:none}
.cards td:first-child{font-size:1.05rem;padding:.2rem 0;white-space:normal}
.cards td::before{content:attr(data-head);color:#57606a;font-weight:400;text-align:left;
font-size:.85rem}
.cards td:first-child::before,.cards .bar{display:none}
.cards td span,.cards small,.cards td .long{white-space:normal;min-width:0;
overflow-wrap:anywhere}
.cards td:nth-child(2) small{margin-left:auto}
.marked td{background:none}.cards .marked{background:#eef6ff}
}
@media print{.rows{overflow:visible}}
"""


def markdown_text(text: str) -> str:
    """Return text on one line, escaped so that it makes no tag, link, picture, emphasis or column
    of a table.
    """
    one_line = " ".join(text.split())
    flat = html.escape(one_line, quote=False)
    flat = re.sub(r"([\\`*|~$])", r"\\\1", flat)
    # Inside a word an underscore is no emphasis, and is readable without a backslash.
    flat = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", flat)
    return re.sub(r"\](?=[(\[:])", r"\\]", flat)


def markdown_code(text: str) -> str:
    """Return text as inline code. A pipe is not escaped: do not use it in tables."""
    flat = " ".join(text.splitlines())
    # CommonMark: the fence has more backticks than any run of them in the code.
    backtick_runs = re.findall("`+", flat)
    longest_run = max(map(len, backtick_runs), default=0)
    fence = "`" * (1 + longest_run)
    gap = " " if len(fence) > 1 else ""
    return f"{fence}{gap}{flat}{gap}{fence}"
