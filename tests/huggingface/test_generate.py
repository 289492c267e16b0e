"""`model.generate` on device "jax" as users call it: tokens equal CPU torch's, few programs, and what is left to transformers."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import spmd
from spmd.huggingface._generate import reason_for_fallback
from spmd.program._step import Step
from tests.huggingface.generating import (
    FAMILIES,
    PAD,
    compilations,
    device_model,
    fresh_model,
    host_model,
    padded_prompt,
    programs,
    prompt,
)
from tests.later import transformers
from tests.oracle import TOLERANCE

RTOL, ATOL = TOLERANCE[torch.float32]
SLOW = pytest.mark.slow
EVERY_FAMILY = ["llama", *(pytest.param(family, marks=SLOW) for family in FAMILIES[1:])]
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers", "ignore:.*:FutureWarning:transformers")


def require_equal(family: str, given: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """The same call on both; returns the tokens."""
    torch.manual_seed(3)
    wanted = host_model(family).generate(**given, **options)
    torch.manual_seed(3)
    got = device_model(family).generate(**given, **options)
    assert torch.equal(got, wanted), f"{got}\n{wanted}"
    return got


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_tokens_are_those_of_the_cpu_and_a_bucket_has_two_programs(family: str) -> None:
    model, host = fresh_model(family), host_model(family)
    options = {"max_new_tokens": 12, "do_sample": False}
    for length in (5, 8, 1):
        ids = prompt(length)
        got = model.generate(ids.to("jax"), **options)
        assert got.device.type == "jax" and torch.equal(got.cpu(), host.generate(ids, **options))
        assert programs(model).num_executables == 2
    assert torch.equal(model.generate(prompt(9), **options), host.generate(prompt(9), **options))
    assert programs(model).num_executables == (4 if host.config.is_encoder_decoder else 3)  # a token looks at the encoder's bucket too
    with compilations() as found:
        model.generate(prompt(6, seed=1).to("jax"), **options)
        model.generate(prompt(12, seed=1).to("jax"), **options)
    assert not found


@SLOW
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "t5"])
@pytest.mark.parametrize("length", range(1, 34))
def test_a_prompt_padded_to_its_bucket_goes_on_as_it_is(family: str, length: int) -> None:
    require_equal(family, {"input_ids": prompt(length, seed=length)}, max_new_tokens=10, do_sample=False)


@SLOW
@pytest.mark.parametrize(("family", "length"), [("bart", 70), ("llama", 70), ("gpt2", 36)])
def test_a_bucket_ends_where_the_models_positions_end(family: str, length: int) -> None:
    require_equal(family, {"input_ids": prompt(length)}, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_prompts_of_several_lengths_go_on_as_each_alone(family: str) -> None:
    side = "right" if host_model(family).config.is_encoder_decoder else "left"
    require_equal(family, padded_prompt(3, 11, 7, on=side), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_beams_are_those_of_the_cpu(family: str) -> None:
    given = {"input_ids": prompt(6)}
    require_equal(family, given, max_new_tokens=10, num_beams=3, do_sample=False)
    for options in ({"early_stopping": True}, {"num_return_sequences": 2, "length_penalty": 0.3}, {"early_stopping": "never"}):
        require_equal(family, given, max_new_tokens=10, num_beams=3, do_sample=False, **options)


_NUCLEUS = {"num_return_sequences": 3, "top_p": 0.8, "temperature": 0.7}


@pytest.mark.parametrize("options", [{}, pytest.param({"num_beams": 2}, marks=SLOW), pytest.param(_NUCLEUS, marks=SLOW)])
def test_a_prompt_on_the_host_draws_the_cpus_numbers(options: dict[str, Any]) -> None:
    require_equal("llama", {"input_ids": prompt(6)}, max_new_tokens=10, do_sample=True, **options)


@SLOW
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 2},
        {"top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.3},
        {"top_k": 7, "min_p": 0.01, "typical_p": 0.9, "epsilon_cutoff": 0.001},
        {"eta_cutoff": 0.01},
    ],
)
def test_a_prompt_on_the_device_draws_what_transformers_own_loop_draws_there(options: dict[str, Any]) -> None:
    found: list[list[list[int]]] = []
    for more in ({}, {"disable_compile": True}, {}):
        torch.manual_seed(5)
        tokens = device_model("llama").generate(prompt(6).to("jax"), max_new_tokens=4, do_sample=True, **options, **more)
        found.append(tokens.tolist())
        found.append(torch.randn(3, device="jax").tolist())  # and the numbers after it
    assert found[:2] == found[2:4] == found[4:]


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": list(range(3, 40)), "min_new_tokens": 6, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        pytest.param({"bad_words_ids": [[5], [7, 8]], "suppress_tokens": [9, 10]}, marks=SLOW),
        pytest.param({"max_length": 9}, marks=SLOW),
        pytest.param({"no_repeat_ngram_size": 3}, marks=SLOW),
        pytest.param({"no_repeat_ngram_size": 1}, marks=SLOW),
        pytest.param({"forced_eos_token_id": 2, "exponential_decay_length_penalty": (2, 1.2)}, marks=SLOW),
        pytest.param({"sequence_bias": {(11, 12): -20.0}, "renormalize_logits": True}, marks=SLOW),
        pytest.param({"forced_bos_token_id": 5, "begin_suppress_tokens": [7, 9], "remove_invalid_values": True}, marks=SLOW),
        pytest.param({"forced_eos_token_id": [2, 5], "suppress_tokens": [9, 10]}, marks=SLOW),
        pytest.param({"eos_token_id": [2, 5, 9], "min_length": 9}, marks=SLOW),
    ],
)
def test_lengths_ends_and_penalties_are_those_of_the_cpu(options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 12, **options} if "max_length" not in options else options
    require_equal("llama", padded_prompt(4, 7, 6), do_sample=False, **options)


def test_a_row_that_has_ended_is_padded_while_others_go_on() -> None:
    got = require_equal("llama", padded_prompt(4, 7, 6), do_sample=False, max_new_tokens=12, eos_token_id=list(range(3, 40)))
    assert (got[:, -1] == PAD).any() and (got[:, -1] != PAD).any()


def assert_as_exact(ours: torch.Tensor, theirs: torch.Tensor, true: torch.Tensor) -> None:
    """The same numbers are finite, and the largest error beside `true` (float64) is one of rounding, or no larger than CPU torch's.

    T5's weights, drawn at random, make large numbers, and how much CPU torch rounds depends on the processor.
    """
    finite = true.isfinite()
    assert torch.equal(ours.isfinite(), finite)
    error, of_cpu = ((value[finite] - true[finite]).abs().max().item() for value in (ours, theirs))
    assert error <= max(of_cpu, RTOL * true[finite].abs().max().item())


@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=SLOW)])
@pytest.mark.parametrize("beams", [1, pytest.param(2, marks=SLOW)])
def test_scores_and_cache_are_those_of_the_cpu(family: str, beams: int) -> None:
    options = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    got = device_model(family).generate(prompt(6).to("jax"), **options)
    wanted = host_model(family).generate(prompt(6), **options)
    assert type(got) is type(wanted) and list(got) == list(wanted)
    assert torch.equal(got.sequences.cpu(), wanted.sequences)
    exact = copy.deepcopy(host_model(family)).double().generate(prompt(6), **options)
    for name in ("scores", "logits"):
        for ours, theirs, true in zip(got[name], wanted[name], exact[name], strict=True):
            assert_as_exact(ours.cpu(), theirs, true)
    assert type(got.past_key_values) is type(wanted.past_key_values)
    assert got.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length()
    if family == "llama":
        for ours, theirs, true in zip(*(run.past_key_values.layers for run in (got, wanted, exact)), strict=True):
            assert ours.keys.device.type == "jax"
            assert_as_exact(ours.keys.cpu(), theirs.keys, true.keys)


def test_many_tokens_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, host, calls = device_model("llama"), host_model("llama"), list[str]()
    run = Step.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self._name)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Step, "__call__", counted)
    ids = prompt(6)
    assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False), host.generate(ids, max_new_tokens=40, do_sample=False))
    assert calls == ["take_prompt", "take_tokens"]
    calls.clear()
    model.generate(ids, max_new_tokens=80, do_sample=False, eos_token_id=[])
    assert calls == ["take_prompt", "take_tokens", "take_tokens"]


@pytest.mark.parametrize("family", ["llama", *(pytest.param(family, marks=SLOW) for family in ("gpt2", "mixtral", "qwen2", "t5"))])
def test_a_model_over_a_mesh_generates_the_same_with_its_cache_divided(family: str) -> None:
    model, host = fresh_model(family), host_model(family)
    mesh = spmd.Mesh(range(8), (2, 4), ("data", "model"))
    spmd.shard_module(model, mesh, "megatron")
    side = "right" if host.config.is_encoder_decoder else "left"
    given, options = padded_prompt(4, 7, 6, 5, on=side), {"max_new_tokens": 12, "do_sample": False}
    wanted = host.generate(**given, **options)
    for _ in range(2):
        assert torch.equal(model.generate(**given, **options), wanted)
    assert programs(model).num_executables == 2
    held = model.generate(**given, **options, return_dict_in_generate=True)
    assert held.past_key_values.get_seq_length() > 0
    beams = {**options, "num_beams": 2}
    assert torch.equal(model.generate(**given, **beams), host.generate(**given, **beams))
    assert programs(model).num_executables == 4
    for (what, *_), step in programs(model).steps.items():
        assert step.mesh == mesh
        gathered = [row for row in step.collectives() if row.kind == "all-gather" and row.num_bytes > 4096]
        assert not gathered, f"{what} gathers what is cached: {gathered}"


def seen() -> Any:
    """A user's processor: no token twice in a row, with a note of what it is given."""

    class Seen(transformers.LogitsProcessor):
        def __init__(self) -> None:
            self.devices: set[str] = set()
            self.lengths: list[int] = []

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.devices |= {input_ids.device.type, scores.device.type}
            self.lengths.append(input_ids.shape[1])
            return scores.scatter(1, input_ids[:, -1:], float("-inf"))

    return Seen()


def until() -> Any:
    """A user's criterion."""

    class Until(transformers.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 10, device=input_ids.device)

    return Until()


def words() -> Any:
    """A user's streamer."""

    class Words(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.words: list[Any] = []

        def put(self, value: Any) -> None:
            self.words.append(value.tolist())

        def end(self) -> None:
            self.words.append("end")

    return Words()


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=SLOW), "jax"])
def test_a_users_processor_criterion_and_streamer_see_each_token(device: str) -> None:
    found: list[Any] = []
    for model, where in ((host_model("llama"), "cpu"), (device_model("llama"), device)):
        processor, streamer = seen(), words()
        tokens = model.generate(
            prompt(6, 1).to(where),
            max_new_tokens=9,
            do_sample=False,
            logits_processor=transformers.LogitsProcessorList([processor]),
            stopping_criteria=transformers.StoppingCriteriaList([until()]),
            streamer=streamer,
        )
        assert processor.devices == {where}
        found.append((tokens.cpu().tolist(), processor.lengths, streamer.words))
    assert found[0] == found[1] and len(found[0][0][0]) == 10


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disable_compile": True}, "disable_compile"),
        ({"use_cache": False}, "use_cache=False"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"cache_implementation": "offloaded"}, "its cache"),
        ({"prompt_lookup_num_tokens": 2}, "its way of generating"),
        ({"output_attentions": True}, "output_attentions"),
        ({"token_type_ids": prompt(4)}, "token_type_ids"),
        ({"past_key_values": lambda: transformers.DynamicCache()}, "past_key_values"),
    ],
)
def test_what_programs_do_not_do_is_left_to_transformers(options: dict[str, Any], reason: str) -> None:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    assert reason_for_fallback(device_model("llama"), {"inputs": prompt(4), "kwargs": options}) == reason
    assert reason_for_fallback(device_model("llama"), {"inputs": prompt(4), "kwargs": {"num_beams": 2}}) is None


def test_a_model_that_is_no_program_says_so_and_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, host = fresh_model("gpt2"), host_model("gpt2")
    forward = model.forward

    def asking(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        assert found.logits.flatten()[: int(found.logits.argmax()) + 1].numel()  # a size that only the device knows
        return found

    model.forward = asking
    ids, streamer, wanted = prompt(3, 1), words(), words()
    with pytest.warns(UserWarning, match="could not be compiled"):
        got = model.generate(ids.to("jax"), max_new_tokens=2, do_sample=False, streamer=streamer)
    host.generate(ids, max_new_tokens=2, do_sample=False, streamer=wanted)
    assert streamer.words == wanted.words
    assert torch.equal(got.cpu(), host.generate(ids, max_new_tokens=2, do_sample=False))


def test_a_mask_of_another_shape_is_transformers_error() -> None:
    mask = torch.ones(2, 3, dtype=torch.int64)
    for model in (host_model("gpt2"), device_model("gpt2")):
        with pytest.raises(RuntimeError, match="size of tensor a \\(5\\) must match the size of tensor b \\(3\\)"):
            model.generate(prompt(5), attention_mask=mask.to(model.device), max_new_tokens=2, do_sample=False)


def test_ids_of_32_bits_are_those_of_64_to_the_programs() -> None:
    model = fresh_model("llama")
    tokens = [model.generate(ids, max_new_tokens=4, do_sample=False) for ids in (prompt(5).int(), prompt(5), prompt(5).int().to("jax"))]
    want = host_model("llama").generate(prompt(5).int(), max_new_tokens=4, do_sample=False)
    assert all(torch.equal(found.cpu(), want) and found.dtype == want.dtype for found in tokens)
    assert programs(model).num_executables == 2


def test_logits_show_what_a_processor_writes_in_place() -> None:
    class Writes(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores[:, 5:] = float("-inf")
            return scores

    options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    want, got = (
        model.generate(prompt(5).to(model.device), logits_processor=transformers.LogitsProcessorList([Writes()]), **options)
        for model in (host_model("llama"), device_model("llama"))
    )
    assert want.logits[0][:, 5:].isinf().all()
    assert torch.equal(got.sequences.cpu(), want.sequences)
    assert [part.cpu().isinf().tolist() for part in got.logits] == [part.isinf().tolist() for part in want.logits]


def test_hooks_see_the_calls_that_transformers_makes() -> None:
    found: list[Any] = []
    for model in (host_model("llama"), device_model("llama")):
        seen: list[Any] = []

        def steer(module: Any, args: Any, out: torch.Tensor, seen: list[Any] = seen) -> torch.Tensor:
            seen.append(tuple(out.shape))
            return torch.cat([out[:, :-1], -out[:, -1:]], 1)

        handle = model.model.layers[0].mlp.register_forward_hook(steer)
        try:
            tokens = model.generate(prompt(5, 1).to(model.device), max_new_tokens=3, do_sample=False)
        finally:
            handle.remove()
        found.append((tokens.tolist(), seen))
    assert found[0] == found[1]
    assert reason_for_fallback(device_model("llama"), {"inputs": prompt(4)}) is None


def test_a_call_that_is_no_program_leaves_the_model_its_programs() -> None:
    model = fresh_model("llama")
    ids, options = prompt(5), {"max_new_tokens": 3, "do_sample": False}
    want = host_model("llama").generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), want)
    with pytest.warns(UserWarning, match="could not be compiled"), torch.autocast("jax", torch.bfloat16):
        model.generate(ids.to("jax"), **options)  # its values are of one dtype then, and its cache of another
    assert torch.equal(model.generate(ids, **options), want) and reason_for_fallback(model, {"inputs": ids}) is None


def test_more_tokens_than_a_model_has_positions_are_left_to_transformers() -> None:
    ids = prompt(90, 1)
    got = device_model("llama").generate(ids.to("jax"), max_new_tokens=8, do_sample=False)
    assert torch.equal(got.cpu(), host_model("llama").generate(ids, max_new_tokens=8, do_sample=False))  # of 96 positions
    with pytest.raises(IndexError):
        host_model("gpt2").generate(prompt(46, 1), max_new_tokens=8, do_sample=False)
    with pytest.raises(IndexError):
        device_model("gpt2").generate(prompt(46, 1), max_new_tokens=8, do_sample=False)


def test_a_model_in_training_drops_as_transformers_does() -> None:
    model = fresh_model("gpt2").train()
    assert reason_for_fallback(model, {"inputs": prompt(4)}) == "a model in training"
    assert reason_for_fallback(fresh_model("llama").train(), {"inputs": prompt(4)}) is None


def test_copies_and_files_of_a_model_have_no_programs() -> None:
    model = device_model("llama")
    model.generate(prompt(6, 1), max_new_tokens=3)
    other = copy.deepcopy(model)
    assert programs(other).num_executables == 0
    file = io.BytesIO()
    torch.save(model, file)
    assert programs(model).num_executables > 0 and pickle.dumps(programs(model))


@SLOW
def test_weights_that_change_are_used_by_the_same_programs() -> None:
    model, host = fresh_model("llama"), copy.deepcopy(host_model("llama"))
    options = {"max_new_tokens": 6, "do_sample": False}
    model.generate(prompt(6), **options)
    for changed in (model, host):
        with torch.no_grad():
            changed.lm_head.weight.neg_()
    assert torch.equal(model.generate(prompt(6), **options), host.generate(prompt(6), **options))
    assert programs(model).num_executables == 2
