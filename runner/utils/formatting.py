"""Write numbers, paths and times as text."""

import os
import time
from pathlib import Path


def relative_path(path: Path) -> str:
    """As it is typed in the working directory."""
    absolute = path.absolute()
    inside = absolute.is_relative_to(Path.cwd())
    return os.path.relpath(absolute) if inside else str(absolute)


def format_number(value: float | None) -> str:
    """Four significant digits at least, every digit before the point."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 and abs(value) < 1e15 else f"{value:.4g}"


def format_percent(share: float) -> str:
    """A share that is neither none nor all never reads as one of them."""
    if 0 < share < 0.001:
        return "<0.1%"
    return ">99.9%" if 0.999 < share < 1 else f"{share:.1%}"


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def shorten_override(override: str) -> str:
    """An override as labels show it: a number that a search drew with four significant digits."""
    key, mark, value = override.partition("=")
    try:
        rounded = f"{float(value):.4g}"
    except ValueError:
        return override
    return f"{key}{mark}{rounded}" if len(value) > len(rounded) + 2 else override
