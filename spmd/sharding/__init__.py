"""How a tensor is said to lie on a mesh: `mark_sharding`, the tensor class that shows it, and layouts inside a program."""
