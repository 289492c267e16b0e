"""Profile and trace functions, for as long as a test needs them."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Generator[None]:
    """While active, `get()` is `value`: replaced(sys.getprofile, sys.setprofile, fn)."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)
