"""Pictures and text of the environments, in plain numpy; a window through pygame where it is installed."""

from __future__ import annotations

from typing import Any

import numpy as np

# From the Okabe-Ito palette: blue and orange can be told apart with any colour vision.
BLUE = (0, 114, 178)
ORANGE = (230, 159, 0)
GREY = (221, 221, 221)
DARK = (51, 51, 51)
WHITE = (255, 255, 255)

CELL = 28
"""Side of a cell in pixels."""
MARGIN = 3

# Digits of 3 x 5 pixels, row by row.
_GLYPHS = {
    "0": "111101101101111",
    "1": "010110010010111",
    "2": "111001111100111",
    "3": "111001111001111",
    "4": "101101111001001",
    "5": "111100111001111",
    "6": "111100111101111",
    "7": "111001001001001",
    "8": "111101111101111",
    "9": "111101111001111",
}
_SHADES = " .:-=+*#%@"


def blank(rows: int, columns: int) -> np.ndarray:
    """Returns a white picture of rows x columns cells, uint8 (rows * CELL, columns * CELL, 3)."""
    return np.full((rows * CELL, columns * CELL, 3), 255, dtype=np.uint8)


def draw_cell(
    picture: np.ndarray,
    row: int,
    column: int,
    number: int | None = None,
    fill: tuple[int, int, int] = GREY,
    frame: tuple[int, int, int] | None = None,
) -> None:
    """Draws a cell into ``picture``: a filled square, a frame around it, and a number if it fits."""
    cell = picture[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
    if frame is not None:
        cell[:] = frame
        cell[MARGIN:-MARGIN, MARGIN:-MARGIN] = WHITE
    inset = 2 * MARGIN if frame is not None else MARGIN
    cell[inset:-inset, inset:-inset] = fill
    text = "" if number is None else str(number)
    if text and len(text) <= 3:
        ink = DARK if fill in (GREY, WHITE, ORANGE) else WHITE
        _draw_number(cell, text, ink)


def _draw_number(cell: np.ndarray, text: str, ink: tuple[int, int, int]) -> None:
    scale = 2 if len(text) < 3 else 1
    glyphs = [np.array(list(_GLYPHS[digit]), dtype=np.uint8).reshape(5, 3) for digit in text]
    word = np.concatenate([np.pad(glyph, ((0, 0), (0, 1))) for glyph in glyphs], axis=1)[:, :-1]
    mask = word.repeat(scale, axis=0).repeat(scale, axis=1).astype(bool)
    top, left = (CELL - mask.shape[0]) // 2, (CELL - mask.shape[1]) // 2
    cell[top : top + mask.shape[0], left : left + mask.shape[1]][mask] = ink


def choice_picture(num_actions: int, answer: int, choice: int | None) -> np.ndarray:
    """Draws one cell per action, at most ten a row; the right one framed in blue, the chosen one filled.

    Returns:
        uint8 (height, width, 3).
    """
    columns = min(num_actions, 10)
    picture = blank(-(-num_actions // columns), columns)
    for action in range(num_actions):
        fill = GREY if action != choice else BLUE if choice == answer else ORANGE
        frame = BLUE if action == answer else None
        draw_cell(picture, *divmod(action, columns), number=action, fill=fill, frame=frame)
    return picture


def choice_text(num_actions: int, answer: int, choice: int | None) -> str:
    """Lists the actions; the right one in brackets, a star behind the chosen one.

    Above 20 actions only the right and the chosen one are named.
    """
    if num_actions > 20:
        chosen = "nothing chosen" if choice is None else f"chosen: {choice}"
        return f"{num_actions} actions, right: {answer}, {chosen}{_verdict(answer, choice)}\n"
    names = (f"[{action}]" if action == answer else f" {action} " for action in range(num_actions))
    arms = " ".join(name + ("*" if action == choice else " ") for action, name in enumerate(names))
    return arms.rstrip() + _verdict(answer, choice) + "\n"


def _verdict(answer: int, choice: int | None) -> str:
    return "" if choice is None else "  right" if choice == answer else "  wrong"


def shade_text(image: np.ndarray) -> str:
    """Writes brightness in [0, 1], (height, width), as characters."""
    levels = (np.clip(image, 0, 1) * (len(_SHADES) - 1)).round().astype(int)
    return "\n".join("".join(_SHADES[level] for level in line) for line in levels) + "\n"


def image_picture(image: np.ndarray, num_actions: int, answer: int, choice: int | None) -> np.ndarray:
    """Draws brightness in [0, 1], (height, width), enlarged to about ten cells, over the cells of the actions.

    Returns:
        uint8 (height, width, 3).
    """
    cells = choice_picture(num_actions, answer, choice)
    scale = max(1, (10 * CELL) // max(image.shape))
    grey = (np.clip(image, 0, 1) * 255).round().astype(np.uint8).repeat(scale, axis=0).repeat(scale, axis=1)
    width = max(grey.shape[1], cells.shape[1])
    parts = [np.repeat(grey[:, :, None], 3, axis=2), cells]
    return np.concatenate([_centre(part, width) for part in parts], axis=0)


def _centre(picture: np.ndarray, width: int) -> np.ndarray:
    spare = width - picture.shape[1]
    return np.pad(picture, ((0, 0), (spare // 2, spare - spare // 2), (0, 0)), constant_values=255)


def tokens_picture(prompt: list[int], target: list[int], written: list[int]) -> np.ndarray:
    """Draws the prompt (grey), the target (framed) and the tokens written (blue: right, orange: wrong) as rows.

    Returns:
        uint8 (3 * CELL, H * CELL, 3).
    """
    picture = blank(3, len(prompt))
    for column, (read, wanted) in enumerate(zip(prompt, target, strict=True)):
        draw_cell(picture, 0, column, read)
        draw_cell(picture, 1, column, wanted, fill=WHITE, frame=GREY)
        if column < len(written):
            draw_cell(picture, 2, column, written[column], fill=BLUE if written[column] == wanted else ORANGE)
        else:
            draw_cell(picture, 2, column, fill=WHITE, frame=GREY)
    return picture


def tokens_text(prompt: list[int], target: list[int], written: list[int]) -> str:
    """Writes prompt, target and output as lines; a fourth one marks wrong tokens with ^."""
    width = len(str(max(prompt + target + written)))
    cells = [str(token).rjust(width) for token in written] + ["_".rjust(width)] * (len(prompt) - len(written))
    marks = [("^" if token != target[place] else " ").rjust(width) for place, token in enumerate(written)]
    lines = {
        "prompt": [str(token).rjust(width) for token in prompt],
        "target": [str(token).rjust(width) for token in target],
        "output": cells,
        "wrong ": marks,
    }
    return "".join(f"{name} {' '.join(line)}".rstrip() + "\n" for name, line in lines.items())


class Window:
    """A pygame window that shows pictures.

    Args:
        title: Its title.
        fps: The most pictures it shows a second.

    Raises:
        ImportError: pygame is not installed.
    """

    def __init__(self, title: str, fps: int) -> None:
        try:
            import pygame
        except ImportError as error:
            raise ImportError(
                "render_mode='human' needs pygame: pip install pygame (or gymnasium[classic-control]). "
                "render_mode='rgb_array' and 'ansi' need nothing."
            ) from error
        self._pygame: Any = pygame
        self._title = title
        self._fps = fps
        self._surface: Any = None
        self._clock: Any = None

    def show(self, picture: np.ndarray) -> None:
        """Shows ``picture`` uint8 (height, width, 3), twice as large, and waits for the next frame."""
        pygame = self._pygame
        large = picture.repeat(2, axis=0).repeat(2, axis=1)
        size = (large.shape[1], large.shape[0])
        if self._surface is None:
            pygame.display.init()
            pygame.display.set_caption(self._title)
            self._surface = pygame.display.set_mode(size)
            self._clock = pygame.time.Clock()
        self._surface.blit(pygame.surfarray.make_surface(large.swapaxes(0, 1)), (0, 0))
        pygame.event.pump()
        pygame.display.flip()
        self._clock.tick(self._fps)

    def close(self) -> None:
        """Closes the window."""
        if self._surface is not None:
            self._pygame.display.quit()
            self._surface = None
