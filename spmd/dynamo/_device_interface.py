"""The device interface that Dynamo and inductor look up by name: streams, properties, bfloat16 support. One device, one stream."""

from __future__ import annotations

from typing import Any

import torch

from spmd.base._torch_late import DeviceInterfaces, device_interfaces
from spmd.device import _streams
from spmd.device._backend import DeviceModule
from spmd.device._only_device import NAME


def register() -> None:
    """Register the interface; a second call does nothing."""
    parts = device_interfaces()
    if NAME not in parts.registered:
        interface = _interface(parts)
        parts.register(NAME, interface)
        parts.register(f"{NAME}:0", interface)


def _interface(parts: DeviceInterfaces) -> type:
    module = DeviceModule()

    class JaxWorker:
        """Properties of the device, in any process."""

        current_device = staticmethod(module.current_device)
        set_device = staticmethod(module.set_device)
        get_device_properties = staticmethod(module.get_device_properties)

    class JaxInterface(parts.base):  # pyright: ignore[reportUntypedBaseClass]
        """Device 'jax'."""

        device = module.device
        Event = torch.Event  # the C++ class; Dynamo captures no other
        Stream = torch.Stream
        Worker = JaxWorker
        current_device = staticmethod(module.current_device)
        set_device = staticmethod(module.set_device)
        device_count = staticmethod(module.device_count)
        is_available = staticmethod(module.is_available)
        synchronize = staticmethod(module.synchronize)
        current_stream = staticmethod(torch.accelerator.current_stream)
        set_stream = staticmethod(_streams.set_stream)
        stream = staticmethod(_streams.stream)
        memory_allocated = staticmethod(torch.accelerator.memory_allocated)

        @staticmethod
        def exchange_device(device: int) -> int:
            """There is only device 0."""
            module.set_device(device)
            return 0

        maybe_exchange_device = exchange_device

        @staticmethod
        def get_raw_stream(device_idx: int) -> int:
            return 0

        @staticmethod
        def get_compute_capability(device: Any = None) -> str:
            """The kind of the chips."""
            return module.get_device_name()

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return True

    return JaxInterface


__all__ = ["register"]
