"""JAX by hand: the script `<name>_jax.py` under `jax.jit`, with donated state and explicit shardings. It does not import `spmd`."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Contender:
    """The hand-written step. See `spmd.bench._peer` for the methods."""

    def __init__(self, job: Any, hand: Any = None) -> None:
        """`hand`: an object with `OPTIMIZER`, `BUFFERS` and `loss`. By default the script `<name>_jax.py`."""
        self.job, self.hand = job, hand or job.by_hand
        self.mesh, self.options = mesh_of(job)
        self.device_kind = self.mesh.devices.flat[0].device_kind
        model = job.model()
        params = {name: array_of(p) for name, p in model.named_parameters()}
        buffers = {name: array_of(b) for name, b in model.named_buffers() if name.rpartition(".")[2] in self.hand.BUFFERS}
        specs = {name: self.place(job.spec_of(name, value.ndim)) for name, value in params.items()}
        replicated = self.place(())
        opt_specs = self.hand.OPTIMIZER.specs(specs, replicated)
        self.shardings = specs, {name: replicated for name in buffers}, opt_specs
        self.abstract = jax.tree.map(abstract, (params, buffers, jax.eval_shape(self.hand.OPTIMIZER.init, params)), self.shardings)
        self.compiled: Any = None
        self.found_stages: dict[str, float] = {}
        placed = [self.place(spec) for spec in job.batch_specs()]
        if job.topology:
            example = job.batches()[0]
            self.abstract_batch = [abstract(array_of(t), where) for t, where in zip(example, placed, strict=True)]
            return
        host_params = jax.device_put(params, specs)
        init = jax.jit(self.hand.OPTIMIZER.init, out_shardings=opt_specs)(host_params)
        self.state = host_params, jax.device_put(buffers, self.shardings[1]), init
        self.batches = [[jax.device_put(array_of(t), where) for t, where in zip(b, placed, strict=True)] for b in job.batches()]
        self.abstract_batch = self.batches[0]
        self.jitted, self.count, self.last = self.fresh(), 0, None

    def place(self, spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def fresh(self) -> Any:
        """The jitted step as a new function, so that jax reuses no earlier trace."""
        job, hand = self.job, self.hand
        spec = next(iter(job.activations().values()), None)
        where = None if spec is None else self.place(spec)

        def constrain(x: Any) -> Any:
            return x if where is None else jax.lax.with_sharding_constraint(x, where)

        def train_step(state: Any, batch: Any) -> Any:
            params, buffers, opt = state
            with_buffers = jax.value_and_grad(hand.loss, has_aux=True)
            (loss, buffers), grads = with_buffers(params, buffers, job.config, *batch, constrain)
            params, opt = hand.OPTIMIZER.update(params, grads, opt)
            return (params, buffers, opt), loss

        return jax.jit(train_step, donate_argnums=0, out_shardings=(self.shardings, self.place(())))

    def step(self) -> None:
        batch = self.batches[self.count % len(self.batches)]
        self.state, self.last = self.jitted(self.state, batch)
        self.count += 1

    def wait(self) -> None:
        jax.block_until_ready((self.state, self.last))

    def loss(self) -> float:
        return float(self.last)  # type: ignore[arg-type]

    def stages(self, cold: bool) -> dict[str, float]:
        if cold:
            jax.clear_caches()
            jax.jit(lambda x: x + 1).lower(1).compile()  # jax's one-time work per process is not measured
        jitted, marks = self.fresh(), [time.perf_counter()]
        traced = jitted.trace(self.abstract, self.abstract_batch)
        marks.append(time.perf_counter())
        lowered = traced.lower()
        marks.append(time.perf_counter())
        self.compiled = lowered.compile(self.options)
        marks.append(time.perf_counter())
        names = ("trace_s", "lower_s", "compile_s")
        self.found_stages = {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}
        return self.found_stages

    def program(self) -> dict[str, Any]:
        if self.compiled is None:
            self.stages(False)
        compiled: Any = self.compiled
        return {
            "hlo": compiled.as_text(),
            "memory": memory_of(compiled),
            "stages": self.found_stages,
            "executables": 1,
            "retraces": [],
        }


def mesh_of(job: Any) -> tuple[jax.sharding.Mesh, dict[str, Any] | None]:
    """The mesh, with automatic axes: the partitioner shards all values without a constraint. Also the compiler options, or None."""
    names, sizes = [name for name, _ in job.axes] or ["data"], [size for _, size in job.axes] or [1]
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    if not job.topology:
        return jax.make_mesh(sizes, names, axis_types=auto), None
    import mesh  # for the compiler's options; peers that run need only jax

    chips = np.array(mesh.topology_devices(job.topology)).reshape(sizes)
    return jax.sharding.Mesh(chips, names, axis_types=auto), mesh.topology_options()


def array_of(tensor: Any) -> Any:
    """A CPU tensor as a numpy array, with int64 as int32, jax's default. A meta tensor becomes a ShapeDtypeStruct."""
    if tensor.device.type == "meta":
        return jax.ShapeDtypeStruct(tuple(tensor.shape), jnp.dtype(str(tensor.dtype).removeprefix("torch.").replace("int64", "int32")))
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.float().numpy().astype(jnp.bfloat16)
    array = tensor.numpy()
    return array.astype(np.int32) if array.dtype == np.int64 else array


def abstract(value: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where)


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes per device, as reported by the compiler."""
    analysis = compiled.memory_analysis()
    sizes = {name: int(getattr(analysis, f"{name}_size_in_bytes")) for name in ("argument", "output", "temp", "alias")}
    total = sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]
    is_on_cpu = any(d.platform == "cpu" for s in jax.tree.leaves(compiled.input_shardings)[:1] for d in s.device_set)
    peak = total if is_on_cpu else int(getattr(analysis, "peak_memory_in_bytes", 0)) or total  # XLA:CPU's figure omits temporaries
    return {f"{name}_bytes": size for name, size in sizes.items()} | {"peak_bytes": peak}


def prepare(job: Any) -> None:
    """Create as many virtual CPU devices as the mesh needs. With another platform the accelerator's devices are used."""
    if job.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1 if job.topology else job.num_devices)
