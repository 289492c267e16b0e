"""`spmd bench`: GPT-2, ResNet-50 and Megatron linears, sharded, beside hand-written JAX, torchax and torch, in one run.

    spmd bench megatron
    spmd bench gpt2 --variant hf --mesh data=2,model=4 --against jax,torch.compile
    spmd bench resnet50 --preset tiny --json out.json

The benchmarks themselves are scripts to be read on their own, in `benchmarks/`; this package runs them. In reading order:
`_run_command` what was asked, `_measure` the run, `_peer` and `peers/` what runs in the other processes, `_task` what they are told,
`_facts` and `_timing_statistics` what comes out, `_goals`, `_result_table`, `_chart` and `_document` how it is shown.
"""

from spmd.bench._run_command import BenchArgs as BenchArgs
from spmd.bench._run_command import run as run
from spmd.bench._run_command import script as script
from spmd.bench._suite import suite as suite

__all__ = ["BenchArgs", "run", "script", "suite"]
