"""spmd."""
from spmd.device._backend import register as _register
_register()
