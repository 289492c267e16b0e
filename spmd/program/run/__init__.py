"""A call of a program: prepares the arrays of its state, arguments, numbers and gradients, and stores the results."""
