"""Label the points of a chart so that no label covers a point or another label."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FONT_SIZE = 7.5
CHARACTER_WIDTH = 4.6
LINE_HEIGHT = 9
"""Points that a character and a line of FONT_SIZE take, about."""
POINT_RADIUS = 6
LABEL_DISTANCE = 11
"""Points from the middle of a point to the near end of a label at its side."""
RIGHT_MARGIN = 6
"""Points by which a label may cross the right edge of the axes."""
PLACES = ((1, 0), (-1, 0), (0, 13), (0, -13), (1, 12), (-1, 12), (1, -12), (-1, -12))
"""(side, rise) of a label from its point, in order of preference: side is 1 for right, -1 for left
and 0 for centred; rise is in points."""
ALIGNMENTS = {1: "left", 0: "center", -1: "right"}


def label_points(axes: "Axes", named: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Write each name next to its point, where it covers neither a point nor another name.

    Without such a place a name is left out: the legend has the colours.

    Args:
        axes: with everything else already drawn.
        named: (name, (x, y)) of each point, in data coordinates.
    """
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None
    # The layout decides where the points are.
    figure.draw_without_rendering()
    pixels = figure.dpi / 72
    centres = [axes.transData.transform(point) for _, point in named]
    radius = POINT_RADIUS * pixels
    taken = [Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in centres]
    for (name, point), (x, y) in zip(named, centres, strict=True):
        width = CHARACTER_WIDTH * len(name) * pixels
        height = LINE_HEIGHT * pixels
        for side, rise in PLACES:
            left_edge = x + LABEL_DISTANCE * side * pixels - width * (1 - side) / 2
            box = Bbox.from_bounds(left_edge, y + rise * pixels - height / 2, width, height)
            if box.x0 < axes.bbox.x0 or box.x1 > axes.bbox.x1 + RIGHT_MARGIN * pixels:
                continue
            if any(box.overlaps(other) for other in taken):
                continue
            taken.append(box)
            axes.annotate(
                name,
                point,
                (LABEL_DISTANCE * side, rise),
                textcoords="offset points",
                fontsize=FONT_SIZE,
                ha=ALIGNMENTS[side],
                va="center",
                parse_math=False,
                bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.6},
            )
            break
