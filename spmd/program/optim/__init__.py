"""Optimizers in a trace: their state, the sharding of this state, and Python numbers as inputs of a program."""
