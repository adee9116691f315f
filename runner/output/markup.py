"""Render the blocks of a report as Markdown, for the terminal, and as HTML by page.html.j2.

Texts come from users and from checkpoints of strangers: everything is escaped.
"""

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from markupsafe import Markup
    from rich.table import Table as TerminalTable

CHARACTER_REM = 0.54
"""Width of a character in a table, in rem, in a wide font."""
SMALL_CHARACTER_REM = 0.46
"""Width of a character of a head or a note."""
MAX_WORD_CHARS = 13
"""Characters of a note's word that should stand on one line."""
COLUMN_GAP_REM = 1.2
"""Width of the space between two columns, in rem."""
MIN_TERMINAL_COLUMNS = 3
"""Columns of a table in the narrowest terminal."""
# Characters of a line of text where a table does not fit the terminal, the first that fits.
_TEXT_LIMITS = (60, 40, 28, 20)
LONG_CHARS = 32
"""Characters of such a text that should stand on one line, see page.css."""
# After the dots of a module's name; those of a number have no letter beside them.
_BREAK = re.compile(r"(?<=[A-Za-z_]\.)|(?<=\.)(?=[A-Za-z_])")
NOTEBOOK_HEIGHT = 640
"""Pixels of a page inside a notebook."""
MAX_SECONDS = 2.5e11
"""Unix time of the year 9892; datetime knows no year after 9999."""
_ORIGIN_PACKAGES = ("torch", "precision-runner")
"""Packages whose versions the head of a page names."""
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
    """Rows of one length; a page shows each row as a card where the table does not fit.

    Attributes:
        words: columns of text, which are aligned left.
        marked: the row that stands out.
        folded: number of last rows that a page shows when `fold_title` is clicked.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: frozenset[int] = frozenset({0})
    marked: int | None = None
    folded: int = 0
    fold_title: str = ""

    @property
    def width_rem(self) -> int:
        """Return about the least width in rem that the table needs."""
        width = 0.0
        for i, title in enumerate(self.head):
            small = title.split()
            texts = [""]
            for cell in (row[i] for row in self.rows):
                small += [word[:MAX_WORD_CHARS] for word in cell.note.split()]
                texts += [part[:LONG_CHARS] for part in _BREAK.split(cell.text)]
            text_width = CHARACTER_REM * max(map(len, texts))
            small_width = SMALL_CHARACTER_REM * max(map(len, small), default=0)
            width += COLUMN_GAP_REM + max(text_width, small_width)
        return math.ceil(width)


@dataclass(frozen=True)
class Charts:
    """SVG elements, trusted; not in Markdown."""

    pictures: Sequence[str]


Block = Heading | Text | Items | Commands | Table | Charts


@dataclass(frozen=True)
class Origin:
    """When, where and from what the numbers of a page were computed.

    Attributes:
        seconds: Unix time of the end, or None if it is not known.
        device: its name.
        run: what the store knows the run by, for example `sweep 3f2a`; empty without a store.
        note: of the user, tracking.note.
        versions: see JobSettings.environment; the commit and the versions of packages are shown.
        commands: as they were typed.
    """

    seconds: float | None = None
    device: str = ""
    run: str = ""
    note: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    commands: Sequence[str] = ()

    def blocks(self) -> Iterator[Block]:
        """Yield the first lines of a page."""
        facts = [self.device, self.run]
        # A stranger's record may hold any number.
        if self.seconds is not None and 0 < self.seconds < MAX_SECONDS:
            facts.insert(0, f"{datetime.fromtimestamp(self.seconds, UTC):%d %B %Y, %H:%M} UTC")
        commit = self.versions.get("git_commit")
        if commit:
            changes = " with changes" if self.versions.get("git_dirty") == "true" else ""
            facts.append(f"commit {commit[:8]}{changes}")
        packages = ((name, self.versions.get(name)) for name in _ORIGIN_PACKAGES)
        facts += [f"{name} {version}" for name, version in packages if version]
        if any(facts):
            yield Text(" · ".join(filter(None, facts)), "small")
        if self.note:
            yield Text(self.note)
        if self.commands:
            yield Commands(self.commands)


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
            return "\n".join(_markdown_item(name, text) for name, text in items)
        case Commands(lines):
            return "\n".join(f"- {markdown_code(line)}" for line in lines)
        case Table():
            return _markdown_table(block)
        case _:
            return ""


def _markdown_item(name: str, text: str) -> str:
    """Return an item of a list; a text of several lines is a block of code."""
    body = f" {markdown_text(text)}"
    if "\n" in text:
        # CommonMark: indented by the item's two columns and four more, text is code as it stands.
        body = f"\n\n{indent(text, ' ' * 6)}\n"
    return f"- {escape_line_start(name)}:{body}"


def _markdown_table(table: Table) -> str:
    alignments = [" --- " if i in table.words else " ---: " for i in range(len(table.head))]
    body = []
    for row in table.rows:
        texts = [f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in row]
        body.append([markdown_text(text) for text in texts])
    if table.marked is not None:
        body[table.marked][0] = f"**{body[table.marked][0]}**"
    titles = [markdown_text(title) for title in table.head]
    first, *rest = (f"| {' | '.join(line)} |" for line in [titles, *body])
    return "\n".join([first, f"|{'|'.join(alignments)}|", *rest])


def terminal_table(table: Table, width: int) -> "TerminalTable":
    """Return a table for the terminal, each cell's note under its text.

    Where it does not fit, texts and heads take more lines, then the last columns are left out.

    Args:
        table: of a page.
        width: of the terminal, in characters.
    """
    shown = _terminal_table(table, None)
    for limit in _TEXT_LIMITS:
        if _natural_width(shown) > width:
            shown = _terminal_table(table, limit)
    while _natural_width(shown) > width and len(shown.columns) > MIN_TERMINAL_COLUMNS:
        shown.columns.pop()
    if len(shown.columns) < len(table.head):
        shown.title = "(all columns are in the report)"
    return shown


def _terminal_table(table: Table, limit: int | None) -> "TerminalTable":
    """Return a table for the terminal.

    Args:
        table: of a page.
        limit: characters of a line in texts, which also breaks heads into lines; None for any.
    """
    from rich.table import Table as TerminalTable

    shown = TerminalTable(title_justify="left")
    for i, name in enumerate(table.head):
        is_text = i in table.words
        shown.add_column(
            re.sub(" (?!×)", "\n", name) if limit else name,
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=is_text and i == 0,
            max_width=limit if i else None,
        )
    for row in table.rows:
        shown.add_row(*("\n".join(filter(None, (cell.text, cell.note))) for cell in row))
    return shown


def _natural_width(table: "TerminalTable") -> int:
    """Return the characters that a table takes without another line break."""
    from rich.console import Console

    console = Console(width=10_000, force_jupyter=False)
    return console.measure(table).maximum


def escape_line_start(text: str) -> str:
    """Return Markdown text for the start of a line, where it must not make a heading or list."""
    # CommonMark: #, +, -, = and a number with . or ) start a heading, a list or an underline.
    return re.sub(r"^([#+=-]|\d+[.)](?=\s|$))", r"\\\1", markdown_text(text))


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """Return a self-contained HTML page that runs no script, whatever text is in it."""
    # Here, not above: the notes of runs need no template.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template("page.html.j2").render(title=title, blocks=blocks)


def _breakable(text: str) -> "Markup":
    """Return text as HTML, in which a line may break after the dots of a module's name."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(map(escape, _BREAK.split(text)))


def notebook_frame(page: str) -> str:
    """Return an HTML page as a notebook's cell shows it, in a frame of its own.

    The page's styles and the notebook's do not mix there, and no script of the page runs: it may be
    of a stranger's folder.
    """
    # The system may be dark where the notebook is light: the frame is light in both.
    content = html.escape(f"{page}<style>:root{{color-scheme:light}}</style>", quote=True)
    style = f"width: 100%; height: {NOTEBOOK_HEIGHT}px; border: 0"
    return f'<iframe sandbox="" srcdoc="{content}" style="{style}"></iframe>'


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
