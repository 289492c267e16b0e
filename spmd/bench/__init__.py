"""`spmd bench`: compares sharded GPT-2, ResNet-50 and Megatron linears with hand-written JAX, torchax and torch in one run.

    spmd bench megatron
    spmd bench gpt2 --variant hf --mesh data=2,model=4 --against jax,torch.compile
    spmd bench resnet50 --preset tiny --json out.json

The benchmarks are scripts in `benchmarks/`, which can be read on their own; this package runs them. In reading order: `_run_command`
parses the command, `_measure` runs one benchmark, `_peer` and `peers/` run in the contenders' processes, `_task` is the job that they
receive, `_facts` and `_timing_statistics` compute the figures, and `_goals`, `_result_table`, `_chart` and `_document` present them.
"""

from spmd.bench._run_command import BenchArgs as BenchArgs
from spmd.bench._run_command import run as run
from spmd.bench._run_command import script as script
from spmd.bench._suite import suite as suite

__all__ = ["BenchArgs", "run", "script", "suite"]
