"""The PyTorch device 'jax': storage payload, copies, views, random stream, and the lowerings installed as its kernels."""
