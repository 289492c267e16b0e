"""The PyTorch device 'jax': its storages, copies, views and random stream, and the lowerings installed as its kernels."""
