"""Pictures of masks, for Mask.show() and BlockMask.show()."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def picture_of(visible: Tensor, columns: int, figure: bool) -> Any:
    """A text of at most `columns` characters in a line, or a matplotlib figure, of bool [Sq, Sk] on the CPU."""
    if figure:
        from matplotlib import pyplot

        drawn, axes = pyplot.subplots()
        axes.imshow(visible.numpy(), aspect="auto", interpolation="nearest", cmap="Blues")
        axes.set(xlabel="key", ylabel="query")
        return drawn
    Sq, Sk = visible.shape
    if Sq == 0 or Sk == 0:
        return ""
    step = max(-(-max(Sq, Sk) // columns), 1)
    lines = []
    for row in range(0, Sq, 2 * step):  # a character is about twice as high as it is wide
        cells = [visible[row : row + 2 * step, key : key + step] for key in range(0, Sk, step)]
        lines.append("".join("#" if cell.all() else "+" if cell.any() else "." for cell in cells))
    return "\n".join(lines)
