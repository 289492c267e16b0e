"""A hand-written training loop as a job of several processes. It survives a crash, and a preemption loses no step.

spmd launch -n 2 --restarts 3 two_hosts.py                              # two processes on this machine, with four virtual devices each
spmd launch --hosts a,b --restarts 3 two_hosts.py --devices 0           # two hosts over SSH, with their own devices
spmd launch --emit slurm -n 2 --restarts 3 two_hosts.py --devices 0     # or a file for a scheduler
"""

import argparse
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mesh
import spmd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", default="runs/two-hosts", help="folder of the checkpoints, shared by all hosts")
parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices of the whole job; 0: the hosts' own devices")
parser.add_argument("--crash", type=int, default=-1, help="step before which the last process exits, on the first attempt")
args = parser.parse_args()

if args.devices:
    mesh.virtual_devices(args.devices)
host = mesh.init()  # joins the job; `spmd launch` has already done it
count = mesh.device_count()  # number of devices of the whole job
m = mesh.Mesh(range(count), (count // 2, 2), ("data", "model"))

torch.manual_seed(0)  # every process runs the same program and draws the same numbers
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)).to("jax")
spmd.shard_module(model, m, [("0.weight", ("model", None)), ("0.bias", ("model",)), ("3.weight", (None, "model")), ("**", None)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
samples = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(samples), batch_size=64, shuffle=True)
batches = spmd.shard_loader(loader, m, ("data", None), feeds="batch")  # each process uploads only the rows of its own devices


@spmd.compile
def train_step(x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    return loss


state = {"model": model, "optimizer": optimizer, "batches": batches}
step = spmd.checkpoint.restore(args.out, state).step if spmd.checkpoint.has_step(args.out) else 0
first_time = step == 0
while step < args.steps:
    for (x,) in batches:
        if mesh.should_stop(step):  # a process received SIGTERM; all processes see True before the same step
            spmd.checkpoint.save(args.out, step, state)
            spmd.checkpoint.join()
            sys.exit(mesh.PREEMPTED)
        if first_time and step == args.crash and host.index == host.count - 1:
            os._exit(1)  # simulates a power failure
        loss = train_step(x)
        step += 1
        if host.index == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if step % 5 == 0:
            spmd.checkpoint.save(args.out, step, state, keep=2)  # in the background
        if step == args.steps:
            break
spmd.checkpoint.join()
