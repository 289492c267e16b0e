"""The coordination service of a job: a key/value store and barriers, where every wait has a timeout.

jax starts the service in process 0 (`jax.distributed.initialize`) and every process talks to it over gRPC. This
module does not know what the keys mean.
"""

from __future__ import annotations

import re
from typing import Any

import jax

from mesh._mesh_errors import JobError, message
from mesh.platform._jax_runtime import coordination_client


class ServiceLost(JobError):
    """Process 0 has ended or cannot be reached."""


class Service:
    """Key/value store and barriers shared by all processes of the job. Every method but `barrier` raises ServiceLost without process 0.

    Args:
        count: number of processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def _client(self) -> Any:
        return coordination_client()

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        """Store a value. Without `overwrite`, a key can be set only once."""
        self._call(self._client.key_value_set, key, value, overwrite)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Wait until a process has set the key and return its value, or None after `timeout_s`."""
        return self._call(self._client.blocking_key_value_get, key, max(1, int(timeout_s * 1000)))

    def try_get(self, key: str) -> str | None:
        """The current value, or None if the key is not set. Does not wait."""
        return self._call(self._client.key_value_try_get, key)

    def get_folder(self, folder: str) -> dict[str, str]:
        """Values of all keys below `folder`, by the key without the prefix `folder` + "/"."""
        found = self._call(self._client.key_value_dir_get, folder)
        return {key.removeprefix(folder).lstrip("/"): value for key, value in found or ()}

    def next_number(self, key: str) -> int:
        """Next number of the counter `key`, from 0; no two calls in the job get the same one."""
        number: int | None = self._call(self._client.key_value_increment, key, 1)
        assert number is not None
        return number - 1

    def delete(self, key: str) -> None:
        """Delete a key and all keys below it."""
        self._call(self._client.key_value_delete, key)

    def barrier(self, name: str, timeout_s: float) -> None:
        """Wait until every process has reached the barrier. A name can be used only once.

        Raises:
            JobError: processes did not reach it in time; the message names them if the service does.
        """
        try:
            self._client.wait_at_barrier(name, max(1, int(timeout_s * 1000)))
        except jax.errors.JaxRuntimeError as error:
            absent = sorted({int(number) for number in re.findall(r"task:(\d+)", _after(str(error), "timed out task"))})
            who = f"process {', '.join(map(str, absent))}" if absent else "a process"
            raise JobError(
                message(
                    f"{who} did not reach the barrier {name!r} within {timeout_s:g} s",
                    f"the job has {self.count} processes; error of the service: {str(error).splitlines()[0][:300]}",
                    fix="check the last output of that process; all processes must reach the same barriers",
                )
            ) from error

    def _call(self, method: Any, *args: Any) -> Any:
        if self._client is None:
            raise ServiceLost(
                message(
                    "this process has left the job: its connection to the coordination service is closed",
                    "jax.distributed.shutdown() was called, or the program is exiting",
                    fix="remove the call to jax.distributed.shutdown(): the job shuts it down when the program ends",
                )
            )
        try:
            return method(*args)
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
            if text.startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                return None
            raise ServiceLost(
                message(
                    "process 0, which coordinates the job, cannot be reached",
                    text.splitlines()[0][:300],
                    fix="check the last output of process 0; if it still runs, check the network between the hosts",
                )
            ) from error


def _after(text: str, mark: str) -> str:
    _, found, rest = text.partition(mark)
    return rest if found else ""
