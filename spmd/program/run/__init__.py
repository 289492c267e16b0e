"""A call of a program, noun by noun: its state, arguments, numbers and gradients as arrays that go in, and what comes out of them."""
