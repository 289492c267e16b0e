"""Images of PIL: their pixels are compared before each call, and a function may not write to one from before the call."""

from __future__ import annotations

import sys
from typing import Any

_IN_C = frozenset(("ImagingCore", "ImagingDraw", "PixelAccess"))  # types in C, in no module, whose pixels Python cannot compare


def is_image(value: Any) -> bool:
    """Whether a value is an image of PIL."""
    module: Any = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def images_in(value: Any) -> list[Any]:
    """The images that another object of PIL refers to."""
    if not str(type(value).__module__).startswith("PIL.") or is_image(value):
        return []
    return [part for part in getattr(value, "__dict__", {}).values() if is_image(part)]


def pixels_of(image: Any) -> tuple[Any, ...]:
    """The content of an image, to compare."""
    palette = image.getpalette() if image.mode in ("P", "PA") else None
    return image.mode, image.size, image.tobytes(), None if palette is None else tuple(palette)


def put_pixels(image: Any, content: tuple[Any, ...]) -> None:
    """Restore the content of an image, unless it has another size now."""
    mode, size, pixels, palette = content
    if (image.mode, image.size) == (mode, size):
        image.frombytes(pixels)
        if palette is not None:
            image.putpalette(palette)


def is_part_of_image(cls: type) -> bool:
    """Whether objects of a class in C are a part of an image, or draw on one."""
    return (cls.__module__ == "builtins" and cls.__name__ in _IN_C) or cls.__module__ == "PIL.ImageDraw"


__all__ = ["images_in", "is_image", "is_part_of_image", "pixels_of", "put_pixels"]
