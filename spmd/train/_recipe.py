"""What a training run is: one frozen dataclass per table of a recipe, each key with its default and one line of meaning.

    recipe = Recipe(steps=200, model=Model(config="GPT2Config"), data=Data(paths=("data/train.bin",), batch=16, seq=128))

`_recipe_file` reads one from a file, `docs/recipes.md` lists all keys. It knows nothing of models, devices or files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from spmd.base._errors import SpmdError, message


class RecipeError(SpmdError, ValueError):
    """A recipe has an invalid key, value or combination."""


def key(default: Any, meaning: str, kinds: tuple[str, ...] = ()) -> Any:
    """A key of a table: its default, what it means, and of which kinds of its table it speaks (all, if empty)."""
    return field(default=default, metadata=said(meaning, kinds))


def said(meaning: str, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    """What is said of a key."""
    return {"meaning": meaning, "kinds": kinds}


@dataclass(frozen=True)
class Model:
    """The model: one of `pretrained`, `config` and `own` says where it comes from, `rules` how it lies on the mesh."""

    pretrained: str = key("", "Hugging Face: a folder, or a name on the hub; weights and sizes are those found there")
    config: str = key("", "Hugging Face: a configuration class of transformers, as LlamaConfig; weights are drawn anew")
    own: str = key("", "a class or function of your own that returns a module, as package.module:name")
    arguments: dict[str, Any] = field(
        default_factory=dict, metadata=said("keyword arguments: of `own`, of the class in `config`, or of `from_pretrained`")
    )
    auto: str = key("AutoModelForCausalLM", "the class of transformers that `pretrained` or `config` is made into a model by")
    rules: str = key("replicated", "where parameters lie: replicated, a preset (megatron, fsdp, fsdp+megatron, auto), package.module:name")
    loss: str = key(
        "cross_entropy",
        "cross_entropy (of the logits and the batch's second entry), model (the model's own, of a batch of named entries), "
        "or package.module:name of a function (model, batch) -> loss",
    )


@dataclass(frozen=True)
class Mesh:
    """The devices."""

    axes: str = key("", 'axes and sizes, as "data=4,model=2"; empty: all devices along "data"')
    devices: int = key(0, "virtual CPU devices of the whole job; 0: the machine's own")


@dataclass(frozen=True)
class Launch:
    """The processes of the job, started as `spmd launch` starts them."""

    processes: int = key(1, "on this machine; ignored where a launcher or scheduler has started the process already")
    restarts: int = key(0, "how often the job may fail without a new checkpoint in between and be started again")


@dataclass(frozen=True)
class Data:
    """What is learned from."""

    kind: Literal["tokens", "text", "images", "dataset"] = key(
        "tokens",
        "tokens: files of token numbers; text: files of text, read and packed as they are needed; images: folders of images, one for each "
        "class; dataset: a Dataset of your own",
    )
    paths: tuple[str, ...] = key((), "files, folders or patterns, relative to the recipe", ("tokens", "text", "images"))
    dtype: Literal["", "uint8", "uint16", "uint32", "int32"] = key(
        "", "of the numbers; empty: what Megatron's .idx beside the file says, else uint16", ("tokens",)
    )
    seq: int = key(1024, "tokens of a sequence", ("tokens", "text"))
    tokenizer: str = key("", 'a folder or name of Hugging Face, or "bytes": those of UTF-8, and 256 after a document', ("text",))
    size: int = key(224, "height and width of an image", ("images",))
    augment: bool = key(False, "a random part of each image, mirrored or not; the middle otherwise, and in evaluation", ("images",))
    mean: tuple[float, ...] = key((0.5, 0.5, 0.5), "of the channels, taken off", ("images",))
    std: tuple[float, ...] = key((0.5, 0.5, 0.5), "of the channels, divided by", ("images",))
    own: str = key("", "a class or function that returns a Dataset with a length, as package.module:name", ("dataset",))
    arguments: dict[str, Any] = field(default_factory=dict, metadata=said("keyword arguments of `own`", ("dataset",)))
    batch: int = key(8, "samples of one optimizer step, over all devices and micro-batches")
    shuffle: bool = key(True, "a new order in every pass, drawn from `seed` and the pass; the last, uneven batch of a pass is left out")
    workers: int = key(0, "processes of the loader, in each process of the job; 0: none", ("tokens", "images", "dataset"))


@dataclass(frozen=True)
class Precision:
    """In which dtype the model computes; parameters and optimizer state keep their own."""

    compute: Literal["float32", "bfloat16", "float16"] = key("float32", "of the parameters while the model runs")
    reduce: Literal["", "float32", "bfloat16", "float16"] = key("", "in which gradients are summed over devices; empty: as `compute`")


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and what happens to gradients before it."""

    name: str = key("AdamW", "a class of torch.optim, or package.module:name")
    lr: float = key(3e-4, "learning rate at its peak")
    weight_decay: float = key(0.0, "weight decay")
    decay: Literal["matrices", "all"] = key("matrices", "which parameters it is for: those of two dims or more, or all")
    arguments: dict[str, Any] = field(default_factory=dict, metadata=said("further keyword arguments, as betas"))
    clip_norm: float = key(0.0, "gradients longer than this, all together, are scaled to it; 0: no clipping")
    accumulate: int = key(1, "micro-batches of a step; each has batch / accumulate samples")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the steps."""

    name: Literal["constant", "linear", "cosine"] = key("constant", "how it falls after the warm-up")
    warm_up: int = key(0, "steps until the peak, linearly")
    steps: int = key(0, "step at which the fall ends; 0: the run's last")
    final: float = key(0.0, "learning rate at the end of the fall, as a part of the peak")


@dataclass(frozen=True)
class Ema:
    """An exponential moving average of the weights, which evaluation then uses."""

    decay: float = key(0.0, "part of the average that stays in each step; 0: no average")


@dataclass(frozen=True)
class Evaluation:
    """The loss of held-out data of the same kind; every sample counts once, those of an uneven last batch too (cross_entropy)."""

    every: int = key(0, "steps between evaluations; the last step has one too. 0: none")
    batches: int = key(0, "how many of batch / accumulate samples; 0: all of the data")
    paths: tuple[str, ...] = key((), "of kinds tokens, text and images")
    own: str = key("", "of kind dataset: a class or function that returns a Dataset, as package.module:name")
    arguments: dict[str, Any] = field(default_factory=dict, metadata=said("keyword arguments of `own`"))


@dataclass(frozen=True)
class Samples:
    """Texts that a language model goes on with; drawn from a generator of their own."""

    every: int = key(0, "steps between samples; the last step has some too. 0: none")
    prompts: tuple[str, ...] = key((), "what each text begins with")
    tokens: int = key(32, "how many are drawn for each prompt")
    temperature: float = key(1.0, "of the distribution that they are drawn from; 0: always the likeliest")
    tokenizer: str = key("", "as in [data]; empty: that one")


@dataclass(frozen=True)
class Checkpoint:
    """Where a run goes on after it was stopped: in `out`/checkpoints."""

    every: int = key(100, "steps between checkpoints; the last step has one too. 0: none, so no run goes on")
    keep: int = key(2, "how many stay")
    export: bool = key(True, "write the model at the end as Hugging Face keeps it: `out`/model-STEP")


@dataclass(frozen=True)
class Metrics:
    """What is written of the steps; see the table of metrics."""

    every: int = key(10, "steps between two records")
    writers: tuple[Literal["terminal", "json", "tensorboard", "wandb"], ...] = key(
        ("terminal", "json"), "where records go: the last two where tensorboard, wandb are installed"
    )
    project: str = key("spmd", "of Weights & Biases; the run has the name of the folder `out`")
    peak_flops: float = key(0.0, "FLOPs per second of one chip, for MFU; 0: those of the maker's data sheet, where the chip is known")


@dataclass(frozen=True)
class Profile:
    """A trace of some steps by jax's profiler, in `out`/profile: device operations under the names of modules."""

    first: int = key(0, "the first step that is traced, counted from 1; 0: none")
    steps: int = key(3, "how many; after the last the run waits for the devices")


@dataclass(frozen=True)
class Recipe:
    """A training run. Keys that belong to no table are at the top of the file."""

    out: str = key("runs/recipe", "folder of the run, relative to where it is started")
    steps: int = key(1000, "optimizer steps in all, those before a restart included")
    seed: int = key(0, "of weights, dropout and the order of the data")
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
        """What no single key can say.

        Raises:
            RecipeError: keys contradict each other.
        """
        _require_one_source(self.model)
        _require_used(self.data, self.evaluation)
        for table, name, least in _LEAST:
            value = getattr(getattr(self, table) if table else self, name)
            if value < least:
                raise RecipeError(message(f"{_shown(table, name)} = {value} is not possible", fix=f"at least {least}"))
        if self.data.batch % self.optimizer.accumulate:
            what = f"[data] batch = {self.data.batch} does not divide into {self.optimizer.accumulate} micro-batches"
            raise RecipeError(message(what, fix=f"[optimizer] accumulate = a divisor of {self.data.batch}"))
        if self.launch.processes > 1 and self.mesh.devices % self.launch.processes:
            what = f"[mesh] devices = {self.mesh.devices} do not divide over {self.launch.processes} processes"
            raise RecipeError(message(what, fix=f"a multiple of {self.launch.processes}"))
        if self.samples.every and self.data.kind not in ("tokens", "text"):
            what = f"[samples] need [data] kind = 'text' or 'tokens', got {self.data.kind!r}"
            raise RecipeError(message(what, fix="[samples] every = 0"))
        if not 0 <= self.ema.decay < 1:
            raise RecipeError(message(f"[ema] decay = {self.ema.decay} is out of range", fix="between 0 and 1, as 0.999"))


_LEAST = (
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
    """Every table's name and dataclass, in the order of the file; "" is the top."""
    found: dict[str, type] = {"": Recipe}
    return found | {
        name: kind for name, kind in get_type_hints(Recipe).items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


def keys_of(table: type) -> dict[str, dataclasses.Field[Any]]:
    """The keys of a table, without tables inside it."""
    return {item.name: item for item in dataclasses.fields(table) if "meaning" in item.metadata}


def _shown(table: str, name: str) -> str:
    return f"[{table}] {name}" if table else name


def _require_one_source(model: Model) -> None:
    given = [name for name in ("pretrained", "config", "own") if getattr(model, name)]
    if len(given) != 1:
        what = f"[model] names {' and '.join(given)}" if given else "[model] names no model"
        raise RecipeError(message(what, fix='one of pretrained = "gpt2", config = "GPT2Config", own = "package.module:name"'))


def _require_used(data: Data, evaluation: Evaluation) -> None:
    """No key is given that the kind of data has no use for, and what it needs is there."""
    for item in keys_of(Data).values():
        value, kinds = getattr(data, item.name), item.metadata["kinds"]
        default = item.default if item.default is not dataclasses.MISSING else {}
        if value != default and kinds and data.kind not in kinds:
            what = f"[data] {item.name} has no effect where kind is {data.kind!r}"
            raise RecipeError(message(what, f"it is for: {', '.join(kinds)}", fix=f"drop it, or kind = {kinds[0]!r}"))
    needed, other = ("own", "paths") if data.kind == "dataset" else ("paths", "own")
    if not getattr(data, needed):
        raise RecipeError(message(f"[data] names no data of kind {data.kind!r}", fix=f"{needed} = ..."))
    if data.kind == "text" and not data.tokenizer:
        raise RecipeError(message("[data] kind = 'text' needs a tokenizer", fix='tokenizer = "bytes", or a folder or name of Hugging Face'))
    if evaluation.every and not getattr(evaluation, needed):
        raise RecipeError(message(f"[evaluation] names no data of kind {data.kind!r}", fix=f"{needed} = ..."))
    if getattr(evaluation, other):
        raise RecipeError(message(f"[evaluation] {other} has no effect where [data] kind is {data.kind!r}", fix=f"{needed} = ..."))
    if len(data.mean) != 3 or len(data.std) != 3:
        raise RecipeError(message("[data] mean and std have one number for each of three channels", fix="mean = [0.5, 0.5, 0.5]"))


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values that a Literal allows; none for other types."""
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
