"""Render the blocks of a report as HTML and as Markdown.

Texts come from users and from checkpoints of strangers: everything is escaped.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LONG = 40
"""Characters of a cell from which on it may break into lines."""
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
    """A paragraph; `answer` is the one that a reader in a hurry reads."""

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
            rule = "|".join(" --- " if i in words else " ---: " for i in range(len(head)))
            body = [[markdown_text(_flat(cell)) for cell in row] for row in rows]
            if marked is not None:
                body[marked][0] = f"**{body[marked][0]}**"
            lines = [list(map(markdown_text, head)), *body]
            text = [f"| {' | '.join(line)} |" for line in lines]
            return "\n".join([text[0], f"|{rule}|", *text[1:]])
        case _:
            return ""


def _flat(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def escape_line_start(text: str) -> str:
    """Return Markdown text for the start of a line, where it must not make a heading or list."""
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
            keys = "".join(_key(*entry) for entry in legend)
            drawn = "".join(f"<figure>{picture}</figure>" for picture in pictures)
            return f'<p class="legend">{keys}</p><div class="charts">{drawn}</div>'
        case Table():
            return _table(block)


def _key(name: str, colour: str, dashes: Sequence[float]) -> str:
    dash = " ".join(f"{2 * length:g}" for length in dashes) or "none"
    line = f'<path d="M0 6H30" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
    swatch = f'<svg width="30" height="12" aria-hidden="true">{line}</svg>'
    return f"<span>{swatch}{html.escape(name)}</span>"


def _table(table: Table) -> str:
    left = [' class="word"' if i in table.words else "" for i in range(len(table.head))]
    titles = [html.escape(text) for text in table.head]
    whole = [re.sub(r"(\S+-\S+)", r'<span class="whole">\1</span>', text) for text in titles]
    top = "".join(f"<th{left[i]}>{text}</th>" for i, text in enumerate(whole))
    body = []
    for i, row in enumerate(table.rows):
        cells = "".join(
            f'<td{left[k]} data-head="{titles[k]}"><div>{_inside(cell)}</div></td>'
            if cell.text
            else f"<td{left[k]}></td>"
            for k, cell in enumerate(row)
        )
        body.append(f"<tr{' class=marked' if i == table.marked else ''}>{cells}</tr>")
    kind = "cards" if table.cards else "rows"
    rows = f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="{kind}"><table>{rows}</table></div>'


def _inside(cell: Cell) -> str:
    kind = f"{cell.tone or 'text'}{' long' if len(cell.text) > LONG else ''}"
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
    """Return text on one line, escaped: no tag, link, picture, emphasis or column is left."""
    flat = html.escape(" ".join(text.split()), quote=False)
    flat = re.sub(r"([\\`*|~$])", r"\\\1", flat)
    flat = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", flat)
    return re.sub(r"\](?=[(\[:])", r"\\]", flat)


def markdown_code(text: str) -> str:
    """Return text as inline code. A pipe is not escaped: do not use it in tables."""
    flat = " ".join(text.splitlines())
    fence = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    gap = " " if len(fence) > 1 else ""
    return f"{fence}{gap}{flat}{gap}{fence}"
