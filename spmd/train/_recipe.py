"""The schema of a recipe: one frozen dataclass per table, with each key's default and meaning.

    recipe = Recipe(steps=200, model=Model(config="GPT2Config"), data=Data(paths=("data/train.bin",), batch=16, seq=128))

`_recipe_file` reads a recipe from a file, and `docs/recipes.md` lists all keys. This module does not access models, devices or files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from spmd.base._errors import SpmdError, message


class RecipeError(SpmdError, ValueError):
    """A recipe has an invalid key, value or combination."""


def key(default: Any, meaning: str, kinds: tuple[str, ...] = ()) -> Any:
    """A key of a table: its default, its meaning, and the kinds of data that it applies to (empty: all)."""
    return field(default=default, metadata=documented(meaning, kinds))


def documented(meaning: str, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    """The field metadata of a key."""
    return {"meaning": meaning, "kinds": kinds}


@dataclass(frozen=True)
class Model:
    """The model, from exactly one of `pretrained`, `config` and `own`, and its sharding."""

    pretrained: str = key("", "Hugging Face folder, or name on the hub; loads its configuration and weights")
    config: str = key("", "configuration class of transformers, as LlamaConfig; weights are initialized at random")
    own: str = key("", "your own class or function that returns a module, as package.module:name")
    arguments: dict[str, Any] = field(
        default_factory=dict, metadata=documented("keyword arguments of `own`, of the class in `config`, or of `from_pretrained`")
    )
    auto: str = key("AutoModelForCausalLM", "class of transformers that creates the model from `pretrained` or `config`")
    rules: str = key(
        "replicated", "sharding of the parameters: replicated, a preset (megatron, fsdp, fsdp+megatron, auto), or package.module:name"
    )
    loss: str = key(
        "cross_entropy",
        "cross_entropy (of the logits and the batch's second entry), model (computed by the model from a batch of keyword arguments), "
        "or package.module:name of a function (model, batch) -> loss",
    )


@dataclass(frozen=True)
class Mesh:
    """The devices and the mesh over them."""

    axes: str = key("", 'names and sizes of the axes, as "data=4,model=2"; empty: all devices along "data"')
    devices: int = key(0, "number of virtual CPU devices of the whole job; 0: the machine's own devices")


@dataclass(frozen=True)
class Launch:
    """The processes of the job on this machine, started as by `spmd launch`."""

    processes: int = key(1, "number of processes; ignored if a launcher or scheduler has started this process")
    restarts: int = key(0, "number of restarts after failures without a new checkpoint in between")


@dataclass(frozen=True)
class Data:
    """The training data."""

    kind: Literal["tokens", "text", "images", "dataset"] = key(
        "tokens",
        "tokens: files of token numbers; text: text files, streamed and packed; images: folders of images, one for each class; "
        "dataset: your own Dataset",
    )
    paths: tuple[str, ...] = key((), "files, folders or glob patterns, relative to the recipe", ("tokens", "text", "images"))
    dtype: Literal["", "uint8", "uint16", "uint32", "int32"] = key(
        "", "dtype of the files; empty: the one in Megatron's .idx file next to the file, or else uint16", ("tokens",)
    )
    seq: int = key(1024, "sequence length, in tokens", ("tokens", "text"))
    tokenizer: str = key("", 'Hugging Face folder or name, or "bytes": UTF-8 bytes, with token 256 after each document', ("text",))
    size: int = key(224, "height and width of an image, in pixels", ("images",))
    augment: bool = key(False, "random crop and flip of each training image; otherwise, and in evaluation, a centre crop", ("images",))
    mean: tuple[float, ...] = key((0.5, 0.5, 0.5), "mean of each channel, which is subtracted", ("images",))
    std: tuple[float, ...] = key((0.5, 0.5, 0.5), "standard deviation of each channel, which is divided by", ("images",))
    own: str = key("", "your own class or function that returns a Dataset with a length, as package.module:name", ("dataset",))
    arguments: dict[str, Any] = field(default_factory=dict, metadata=documented("keyword arguments of `own`", ("dataset",)))
    batch: int = key(8, "samples of one optimizer step, over all devices and micro-batches; a last batch that is not full is dropped")
    shuffle: bool = key(True, "draw a new order for every epoch, from `seed` and the epoch's number")
    workers: int = key(0, "worker processes of the loader, in each process of the job", ("tokens", "images", "dataset"))


@dataclass(frozen=True)
class Precision:
    """The dtype in which the model computes. Parameters and optimizer state keep their own dtype."""

    compute: Literal["float32", "bfloat16", "float16"] = key("float32", "dtype of the parameters in forward and backward")
    reduce: Literal["", "float32", "bfloat16", "float16"] = key("", "dtype in which gradients are summed over devices; empty: `compute`")


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, gradient clipping and gradient accumulation."""

    name: str = key("AdamW", "a class of torch.optim, or package.module:name")
    lr: float = key(3e-4, "peak learning rate")
    weight_decay: float = key(0.0, "weight decay")
    decay: Literal["matrices", "all"] = key("matrices", "the parameters with weight decay: those of two dims or more, or all")
    arguments: dict[str, Any] = field(default_factory=dict, metadata=documented("further keyword arguments, as betas"))
    clip_norm: float = key(0.0, "maximum global norm of the gradients; 0: no clipping")
    accumulate: int = key(1, "number of micro-batches in a step, each of batch / accumulate samples")


@dataclass(frozen=True)
class Schedule:
    """The learning rate schedule."""

    name: Literal["constant", "linear", "cosine"] = key("constant", "decay after the warm-up")
    warm_up: int = key(0, "number of steps of linear warm-up")
    steps: int = key(0, "step at which the decay ends; 0: the last step of the run")
    final: float = key(0.0, "learning rate at the end of the decay, as a fraction of the peak")


@dataclass(frozen=True)
class Ema:
    """Exponential moving average of the weights. Evaluation and samples use it."""

    decay: float = key(0.0, "fraction of the average that is kept in each step; 0: no average")


@dataclass(frozen=True)
class Evaluation:
    """Evaluation on held-out data of the same kind. With loss cross_entropy a last batch that is not full counts too; others drop it."""

    every: int = key(0, "steps between evaluations, with one more after the last step; 0: no evaluation")
    batches: int = key(0, "number of batches, each of batch / accumulate samples; 0: all of the data")
    paths: tuple[str, ...] = key((), "as in [data] (kind tokens, text, images)")
    own: str = key("", "as in [data] (kind dataset)")
    arguments: dict[str, Any] = field(default_factory=dict, metadata=documented("keyword arguments of `own`"))


@dataclass(frozen=True)
class Samples:
    """Sample texts of a language model, drawn with a random generator of their own."""

    every: int = key(0, "steps between samples, with one more set after the last step; 0: no samples")
    prompts: tuple[str, ...] = key((), "prompts, each of which is continued")
    tokens: int = key(32, "number of new tokens for each prompt")
    temperature: float = key(1.0, "sampling temperature; 0: always the most likely token")
    tokenizer: str = key("", "as in [data]; empty: the tokenizer of [data]")


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints in `out`/checkpoints. A run that was stopped resumes from the latest."""

    every: int = key(100, "steps between checkpoints, with one more after the last step; 0: no checkpoints, and no resuming")
    keep: int = key(2, "number of checkpoints to keep")
    export: bool = key(True, "export the model after the last step to `out`/model-STEP, in Hugging Face's format")


@dataclass(frozen=True)
class Metrics:
    """Records of metrics; see the table of metrics."""

    every: int = key(10, "steps between records")
    writers: tuple[Literal["terminal", "json", "tensorboard", "wandb"], ...] = key(
        ("terminal", "json"), "destinations of the records; tensorboard and wandb need the package of that name"
    )
    project: str = key("spmd", "Weights & Biases project; the run has the name of the folder `out`")
    peak_flops: float = key(0.0, "peak FLOPs per second of one chip, for MFU; 0: from the data sheet of known chips")


@dataclass(frozen=True)
class Profile:
    """A profile of some steps by jax's profiler, in `out`/profile. Device operations have the names of their modules."""

    first: int = key(0, "first step of the profile, counted from 1; 0: no profile")
    steps: int = key(3, "number of steps in the profile; after the last the run waits for the devices")


@dataclass(frozen=True)
class Recipe:
    """A training run. Keys that belong to no table are at the top of the file."""

    out: str = key("runs/recipe", "folder of the run, relative to the working directory")
    steps: int = key(1000, "total number of optimizer steps, including those before a restart")
    seed: int = key(0, "seed of the weights, of dropout and of the order of the data")
    model: Model = field(default_factory=Model)
    mesh: Mesh = field(default_factory=Mesh)
    launch: Launch = field(default_factory=Launch)
    data: Data = field(default_factory=Data)
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    ema: Ema = field(default_factory=Ema)
    evaluation: Evaluation = field(default_factory=Evaluation)
    samples: Samples = field(default_factory=Samples)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self) -> None:
        """Check ranges, and combinations of keys.

        Raises:
            RecipeError: a number is out of range, or keys contradict each other.
        """
        _require_one_source(self.model)
        _require_used(self.data, self.evaluation)
        for table, name, minimum in _MINIMA:
            value = getattr(getattr(self, table) if table else self, name)
            if value < minimum:
                raise RecipeError(message(f"{_shown(table, name)} = {value} is out of range", fix=f"at least {minimum}"))
        if self.data.batch % self.optimizer.accumulate:
            what = f"[data] batch = {self.data.batch} does not divide into {self.optimizer.accumulate} micro-batches"
            raise RecipeError(message(what, fix=f"[optimizer] accumulate = a divisor of {self.data.batch}"))
        if self.launch.processes > 1 and self.mesh.devices % self.launch.processes:
            what = f"[mesh] devices = {self.mesh.devices} does not divide over {self.launch.processes} processes"
            raise RecipeError(message(what, fix=f"a multiple of {self.launch.processes}"))
        if self.samples.every and self.data.kind not in ("tokens", "text"):
            what = f"[samples] need [data] kind = 'text' or 'tokens', got {self.data.kind!r}"
            raise RecipeError(message(what, fix="[samples] every = 0"))
        if not 0 <= self.ema.decay < 1:
            raise RecipeError(message(f"[ema] decay = {self.ema.decay} is out of range", fix="between 0 and 1, as 0.999"))


_MINIMA = (
    ("", "steps", 1),
    ("mesh", "devices", 0),
    ("launch", "processes", 1),
    ("launch", "restarts", 0),
    ("data", "seq", 1),
    ("data", "batch", 1),
    ("data", "workers", 0),
    ("optimizer", "clip_norm", 0),
    ("optimizer", "accumulate", 1),
    ("schedule", "warm_up", 0),
    ("schedule", "steps", 0),
    ("data", "size", 1),
    ("evaluation", "every", 0),
    ("evaluation", "batches", 0),
    ("samples", "every", 0),
    ("samples", "tokens", 1),
    ("samples", "temperature", 0),
    ("profile", "first", 0),
    ("profile", "steps", 1),
    ("checkpoint", "every", 0),
    ("checkpoint", "keep", 1),
    ("metrics", "every", 1),
    ("metrics", "peak_flops", 0),
)


def tables() -> dict[str, type]:
    """Name and dataclass of every table, in the order of the file. "" is the top level."""
    found: dict[str, type] = {"": Recipe}
    return found | {
        name: kind for name, kind in get_type_hints(Recipe).items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


def keys_of(table: type) -> dict[str, dataclasses.Field[Any]]:
    """The keys of a table, without nested tables."""
    return {item.name: item for item in dataclasses.fields(table) if "meaning" in item.metadata}


def _shown(table: str, name: str) -> str:
    return f"[{table}] {name}" if table else name


def _require_one_source(model: Model) -> None:
    given = [name for name in ("pretrained", "config", "own") if getattr(model, name)]
    if len(given) != 1:
        what = f"[model] names {' and '.join(given)}" if given else "[model] names no model"
        raise RecipeError(message(what, fix='one of pretrained = "gpt2", config = "GPT2Config", own = "package.module:name"'))


def _require_used(data: Data, evaluation: Evaluation) -> None:
    """Raise a RecipeError for a key that the kind of data does not use, and for a missing key that it needs."""
    for item in keys_of(Data).values():
        value, kinds = getattr(data, item.name), item.metadata["kinds"]
        default = item.default if item.default is not dataclasses.MISSING else {}
        if value != default and kinds and data.kind not in kinds:
            what = f"[data] {item.name} has no effect where kind is {data.kind!r}"
            raise RecipeError(message(what, f"kinds that use it: {', '.join(kinds)}", fix=f"drop it, or kind = {kinds[0]!r}"))
    needed, other = ("own", "paths") if data.kind == "dataset" else ("paths", "own")
    if not getattr(data, needed):
        raise RecipeError(message(f"[data] names no data of kind {data.kind!r}", fix=f"{needed} = ..."))
    if data.kind == "text" and not data.tokenizer:
        raise RecipeError(message("[data] kind = 'text' needs a tokenizer", fix='tokenizer = "bytes", or a Hugging Face folder or name'))
    if evaluation.every and not getattr(evaluation, needed):
        raise RecipeError(message(f"[evaluation] names no data of kind {data.kind!r}", fix=f"{needed} = ..."))
    if getattr(evaluation, other):
        raise RecipeError(message(f"[evaluation] {other} has no effect where [data] kind is {data.kind!r}", fix=f"{needed} = ..."))
    if len(data.mean) != 3 or len(data.std) != 3:
        what = f"[data] mean and std need 3 numbers each, got {len(data.mean)} and {len(data.std)}"
        raise RecipeError(message(what, fix="mean = [0.5, 0.5, 0.5]"))


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal. Empty for other types."""
    return get_args(annotation) if getattr(annotation, "__origin__", None) is Literal else ()


__all__ = [
    "Checkpoint",
    "Data",
    "Ema",
    "Evaluation",
    "Launch",
    "Mesh",
    "Metrics",
    "Model",
    "Optimizer",
    "Precision",
    "Profile",
    "Recipe",
    "RecipeError",
    "Samples",
    "Schedule",
    "choices",
    "key",
    "keys_of",
    "tables",
]
