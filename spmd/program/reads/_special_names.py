"""Names of the special methods, which Python looks up in an object's class without an instruction that names them."""

_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "xor", "or")
SPECIAL = tuple(
    f"__{name}__"
    for name in (
        *(f"{kind}{name}" for name in _OPERATORS for kind in ("", "r", "i")),
        *("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil", "int", "float", "complex", "bool", "index"),
        *("eq", "ne", "lt", "le", "gt", "ge", "hash", "str", "repr", "format", "bytes", "fspath", "dir", "call", "enter", "exit"),
        *("await", "aiter", "anext", "aenter", "aexit", "buffer", "release_buffer"),
        *("len", "length_hint", "contains", "iter", "next", "reversed", "getitem", "setitem", "delitem", "missing"),
        *("getattr", "getattribute", "setattr", "delattr", "get", "set", "delete", "set_name", "match_args"),
        *("class_getitem", "init_subclass", "mro_entries", "prepare", "instancecheck", "subclasscheck", "subclasshook"),
        *("copy", "deepcopy", "reduce", "reduce_ex", "getstate", "setstate", "getnewargs", "getnewargs_ex", "replace"),
        *("torch_function", "array", "array_ufunc", "array_function", "array_priority", "array_wrap", "array_finalize"),
        *("array_interface", "array_struct", "dlpack", "dlpack_device"),
    )
)
INTEGERS = ("__len__", "__length_hint__", "__index__", "__hash__", "__sizeof__")
"""Those whose result Python takes as an integer in C, where a number that varies has no value."""
