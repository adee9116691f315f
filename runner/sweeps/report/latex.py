"""Write a table of a report as LaTeX, for the booktabs package."""

import re

from runner.utils.markup import Cell, Table

MAX_NOTE_CHARACTERS = 40
"""Longer notes are reasons of failures and verdicts, which are in the other reports."""
_MINUS = re.compile(r"(?<![\w.])-(?=\d)")
_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{HORIZONTAL ELLIPSIS}": r"\dots{}",
    "\n": " ",
    "\r": " ",
}


def latex_text(text: str) -> str:
    """Return a text with every character escaped that LaTeX reads as a command."""
    escaped = "".join(_ESCAPES.get(character, character) for character in text)
    return _MINUS.sub("$-$", escaped)


def latex_table(table: Table) -> str:
    """Return a tabular of booktabs; the row that stands out is bold."""
    alignment = "".join("l" if i in table.words else "r" for i in range(len(table.head)))
    lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    lines += [_row([latex_text(title) for title in table.head]), r"\midrule"]
    for index, cells in enumerate(table.rows):
        texts = [_cell_text(cell) for cell in cells]
        if index == table.marked:
            texts = [rf"\textbf{{{text}}}" if text else "" for text in texts]
        lines.append(_row(texts))
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _row(texts: list[str]) -> str:
    # A row that begins with "[" would be read as the optional length of the \\ before it.
    return " & ".join(f"{{}}{text}" if text.startswith("[") else text for text in texts) + r" \\"


def _cell_text(cell: Cell) -> str:
    """Return a cell's text with its note in parentheses."""
    text = latex_text(cell.text)
    if not cell.note or len(cell.note) > MAX_NOTE_CHARACTERS:
        return text
    return f"{text} ({latex_text(cell.note)})".strip()
