"""Selects the program for a call: by the signature of its arguments, and by guards on what the trace assumed."""
