"""The one rule for "library": modules whose functions are not instrumented.

Code of a library is trusted to depend on its arguments alone. All that is passed to it counts as read, including all mutable objects
inside. All other code is recorded instruction by instruction: the user's code, and libraries that keep state in Python which a trace
reads (torch's modules, optimizers and distributions; `contextlib`, `queue`, `string`; Hugging Face; any unknown module).
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from typing import Any

import torch

from spmd.device._generator import DeviceGenerator

_OF_NAMESPACES = frozenset({"types", "argparse", "dataclasses"})  # modules whose objects have attributes of the user's
_OF_TUPLES = "namedtuple_"  # prefix of the module in which a named tuple's `__new__` is defined: it only stores its arguments
_LIBRARIES = frozenset(
    {
        *(
            "torch",
            "jax",
            "jaxlib",
            "numpy",
            "scipy",
            "mesh",
            "spmd",
            "bytecode",
            "triton",
            "functorch",
            "sympy",
            "ml_dtypes",
            "opt_einsum",
            "einops",
            "einx",
        ),
        *("tqdm", "rich", "tyro", "packaging", "yaml", "safetensors", "huggingface_hub", "tokenizers", "regex", "requests", "filelock"),
        *(
            "pytest",
            "_pytest",
            "pluggy",
            "xdist",
            "execnet",
            "hypothesis",
            "matplotlib",
            "PIL",
            "pandas",
            "sklearn",
            "tensorboard",
            "wandb",
        ),
        *("IPython", "ipykernel", "traitlets", "psutil", "typing_extensions"),
        # dependencies of the above, which do not compute with tensors
        *("absl", "aiohttp", "anyio", "attr", "attrs", "certifi", "click", "comm", "dateutil", "debugpy", "decorator", "dill"),
        *("docstring_parser", "fontTools", "fsspec", "google", "grpc", "h11", "httpcore", "httpx", "idna", "iniconfig", "jinja2"),
        *("joblib", "markupsafe", "mpmath", "networkx", "pkg_resources", "platformdirs", "prompt_toolkit", "pyarrow", "pygments"),
        *("pytz", "setuptools", "shtab", "six", "sortedcontainers", "sniffio", "threadpoolctl", "torchgen", "tornado", "typeguard"),
        *("urllib3", "zmq"),
        # tools that observe a process, and call functions of their own in a trace
        *("coverage", "pydevd", "_pydevd_bundle", "_pydevd_frame_eval", "_pydev_bundle", "line_profiler", "viztracer", "pyinstrument"),
    }
) | (sys.stdlib_module_names - _OF_NAMESPACES - {"__main__"})
_WITHOUT_STATE = frozenset(
    {"logging", "warnings", "io", "_io", "builtins", "functools", "importlib", "inspect", "typing", "tempfile", "unittest", "__main__"}
)
_WITH_STATE = frozenset({"numpy", "scipy", "sklearn", "networkx", "sortedcontainers"})  # libraries whose objects change
_SETTINGS: dict[type, tuple[str, ...]] = {  # attributes of libraries' objects that programs set, and methods read
    torch.amp.GradScaler: ("_enabled", "_growth_factor", "_backoff_factor", "_growth_interval"),
    torch.autograd.graph.saved_tensors_hooks: ("pack_hook", "unpack_hook"),
}
_PROPERTIES = (property, types.DynamicClassAttribute, enum.property)  # the last two: `value` and `name` of an enum's members
_USERS = ("spmd.demo", "spmd.bench", "spmd.train")  # programs in this package, instrumented like user code
_RECORDED = (  # parts of libraries that are instrumented
    *("torch.nn.modules", "torch.nn.utils", "torch.nn.parameter", "torch.optim", "torch.distributions"),
    *("torch.amp.autocast_mode", "torch.autograd.grad_mode"),
    *("torch.utils.data.dataset", "torch.utils.data.sampler"),
    *("einops.layers", "einx.nn", "contextlib", "queue", "string", "glob", "pkgutil", "shelve", "dbm"),
    "spmd.sharding._swapped_parameters",
)


def is_library(module_name: str | None) -> bool:
    """Whether a module belongs to a library, and not to the user."""
    if not isinstance(module_name, str):  # `__module__` of some classes in C is a descriptor
        return module_name is not None
    return bool(module_name) and module_name.partition(".")[0] in _LIBRARIES and not module_name.startswith(_USERS)


def defines_tuples(module_name: str | None) -> bool:
    """Whether functions of this module make named tuples."""
    return str(module_name).startswith(_OF_TUPLES)


@functools.cache
def is_recorded(module_name: str | None) -> bool:
    """Whether functions of this module are instrumented."""
    if not is_library(module_name):
        return module_name not in _OF_NAMESPACES and not defines_tuples(module_name)
    return any(module_name == name or str(module_name).startswith(name + ".") for name in _RECORDED)


def is_of_python(module_name: str | None) -> bool:
    """Whether a module belongs to Python's own library, and holds more than settings, output and the language itself."""
    name = str(module_name).partition(".")[0]
    return name in sys.stdlib_module_names and name not in _WITHOUT_STATE


@functools.cache
def keeps_state(cls: type) -> bool:
    """Whether instances of a library's class have attributes that its methods change, such as the value of a semaphore.

    That is taken of Python's own classes, except for constants and for output, which no call repeats, and of libraries of data.
    """
    has_attributes = bool(cls.__dictoffset__) or "__slots__" in vars(cls)
    is_stateful = is_of_python(cls.__module__) or str(cls.__module__).partition(".")[0] in _WITH_STATE
    return has_attributes and is_stateful and not issubclass(cls, enum.Enum)


def settings_of(cls: type) -> tuple[str, ...]:
    """The attributes of a library's object that its methods read, and that the program may set between calls."""
    return _SETTINGS.get(cls, ())


def is_library_property(found: Any) -> bool:
    """Whether an attribute of a class is a property that library code computes. `device` of the device's generators is a constant."""
    if found is DeviceGenerator.device:
        return False
    return type(found) in _PROPERTIES and type(found.fget) is types.FunctionType and not is_recorded(found.fget.__module__)


def starts_trace(frame: types.FrameType) -> bool:
    """Whether a frame is of the function that runs a trace: the frames that it calls are of the traced function."""
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("spmd.program.reads._recorder", "run")


def user_frame(frame: types.FrameType) -> types.FrameType:
    """The innermost frame of the user's code, from `frame` outwards."""
    while is_library(frame.f_globals.get("__name__")) and frame.f_back is not None and not starts_trace(frame):
        frame = frame.f_back
    return frame
