"""Loops, branches, recomputation: parts of a trace that run several times, or not at all."""
