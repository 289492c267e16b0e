"""Replacements of objects of other packages. `_table` lists every target with a reason, a duration and its expected parameters."""
