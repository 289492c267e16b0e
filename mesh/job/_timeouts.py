"""Default timeouts of a job, in seconds, and the default port of process 0."""

from __future__ import annotations

DEFAULT_PORT = 8476  # as jax and torch_xla on TPU VMs

JOIN_S = 300.0  # for all processes to start: a scheduler may start them minutes apart
GANG_JOIN_S = 60.0  # the same under `spmd launch`, which starts them together
SERVICE_START_S = 60  # for jax's service, once all processes have reported
SERVICE_STOP_S = 60
SHARED_VALUE_S = 60.0  # for a value that process 0 sends to all
BARRIER_S = 300.0
LEAVE_S = 300.0  # for the others, at the end of the program

WATCHDOG_S = 60.0  # without progress, at least
FIRST_STEP_S = 1800.0  # the same for a first step: compiling, saving
SILENT_S = 10.0  # without a heartbeat, at least: on a busy machine live threads may be delayed
HEARTBEAT_S = 30  # a link that is down for seconds must not end the job; jax's own value is 100

AGREE_ON_STOP_S = 60.0  # for all processes to answer after SIGTERM
COMPARE_STEP_S = 600.0  # for all processes to report what they compare of a step
SAVE_S = 600.0  # for every process to write its part of a checkpoint
