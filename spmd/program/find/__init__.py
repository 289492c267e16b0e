"""Finds the modules, optimizers, tensors and objects that a function can reach."""
