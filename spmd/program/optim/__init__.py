"""Optimizers and running averages under a trace."""
