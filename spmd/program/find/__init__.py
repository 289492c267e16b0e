"""What a function can reach: modules, optimizers, Python values, objects that hold tensors."""
