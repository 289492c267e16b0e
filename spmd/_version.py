"""The version of this package: one place, which `pyproject.toml` reads."""

__version__ = "0.1.0"
