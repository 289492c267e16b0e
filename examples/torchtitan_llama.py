"""torchtitan's Llama, sharded by its own `parallelize_llama` over 8 virtual devices and compared with CPU torch.

python examples/torchtitan_llama.py [TENSOR_PARALLEL_DEGREE [DATA_PARALLEL_REPLICATE_DEGREE]]     # by default 4 1
"""

# pyright: reportMissingImports=none

import copy
import sys
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

import spmd
from mesh import virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock(__path__=[], __spec__=None)  # Triton kernels for GPUs

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import llama3_configs, parallelize_llama  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402

tp, dp_replicate = (int(argument) for argument in (*sys.argv[1:], "4", "1")[:2])
parallelism = ParallelismConfig(
    spmd_backend="partial_dtensor",
    tensor_parallel_degree=tp,
    data_parallel_replicate_degree=dp_replicate,
    data_parallel_shard_degree=-1,  # the remaining devices
)
dims = ParallelDims.from_config(parallelism, world_size=8)

config = llama3_configs["debugmodel"](attn_backend="flex")
config.layers = config.layers[:2]
for layer in config.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention needs torch.compile
set_llama3_sharding_config(config, enable_sp=True)
torch.manual_seed(0)
host = config.build()
host.init_states(buffer_device=torch.device("cpu"))

model = parallelize_llama(
    copy.deepcopy(host),
    parallel_dims=dims,
    training=TrainingConfig(mixed_precision_param="float32"),
    parallelism=parallelism,
    compile_config=CompileConfig(enable=False),
    ac_config=None,
    dump_folder=".",
)


def train(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten(0, 1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (host, model)]
step = spmd.compile(lambda tokens, labels: train(model, optimizers[1], tokens, labels))
for _ in range(10):
    tokens, labels = torch.randint(0, 2048, (2, 8, 64))
    batch = [distribute_tensor(t, dims.get_mesh("batch"), [Shard(0)]) if dims.dp_enabled else t.to("jax") for t in (tokens, labels)]
    want, got = train(host, optimizers[0], tokens, labels).item(), step(*batch).item()
    print(f"{got:.5f}")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
assert not step.retraces
print(step.collectives())
