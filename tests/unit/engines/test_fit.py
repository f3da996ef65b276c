"""Bodies fitted to each engine: exactly the intended difference, and none where none is needed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config_pools import EngineKind
from extproc.config_rollouts import ModelAdapter
from extproc.engines.fit import Change, Fitted, Wanted, fit
from extproc.engines.fit_tensorrt import HINTS, priority
from extproc.errors import UnfitRequestError
from extproc.request.model import RouteKind

ENGINES: list[EngineKind] = ["vllm", "sglang", "tensorrt_llm", "auto"]
APIS = [kind.value for kind in RouteKind]
TRT = Wanted("tensorrt_llm")
ADAPTER = ModelAdapter(name="sql", id=7, path="/adapters/sql")
CHAT = {"model": "m", "messages": [{"role": "user", "content": 'say "model":"m"'}], "temperature": 0.5}

TEXT = st.text(max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.sampled_from(["model"]), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [*sorted(HINTS), "model", "priority", "stream", "stream_options", "cache_salt", "lora_request", "messages", "top_k"]
)
OBJECTS = st.dictionaries(NAMES | TEXT, VALUES, max_size=6)
WANTED = st.builds(
    Wanted,
    engine=st.sampled_from(ENGINES),
    model=st.sampled_from(["base", "m"]),
    adapter=st.none() | st.just(ADAPTER),
    usage=st.booleans(),
)


def sent(original: dict[str, Any], wanted: Wanted, api: str = "chat") -> dict[str, Any]:
    """What the engine reads."""
    fitted = fit(json.dumps(original).encode(), api, wanted)
    body: dict[str, Any] = original if fitted is None else json.loads(fitted.body)
    return body


def changes(original: dict[str, Any], wanted: Wanted, api: str = "chat") -> tuple[Change, ...]:
    """Why the body was changed; empty when it was not."""
    fitted = fit(json.dumps(original).encode(), api, wanted)
    return () if fitted is None else fitted.changes


class TestModel:
    """The name that the engine knows, and its adapter."""

    @pytest.mark.parametrize("engine", ENGINES)
    def test_an_alias_becomes_the_name_that_the_engine_knows(self, engine: EngineKind) -> None:
        """Only the field of the body itself; what messages say of models is the client's."""
        body = json.dumps(CHAT).encode()
        fitted = fit(body, "chat", Wanted(engine, model="base"))
        assert fitted == Fitted(body.replace(b'"model": "m"', b'"model": "base"', 1), ("model",))

    def test_vllm_selects_an_adapter_by_its_name(self) -> None:
        """There each adapter is served as a model of that name."""
        assert sent(CHAT, Wanted("vllm", model="base", adapter=ADAPTER)) == CHAT | {"model": "sql"}

    def test_sglang_selects_an_adapter_behind_the_base_model(self) -> None:
        """`base:adapter`, the base by the name that the engine knows."""
        assert sent(CHAT, Wanted("sglang", model="base", adapter=ADAPTER)) == CHAT | {"model": "base:sql"}

    @pytest.mark.parametrize("api", ["chat", "completion"])
    def test_tensorrt_selects_an_adapter_by_a_field(self, api: str) -> None:
        """Its name of the model selects nothing; a request's own `lora_request` does not stand against the model."""
        wanted = CHAT | {
            "model": "base",
            "lora_request": {"lora_name": "sql", "lora_int_id": 7, "lora_path": "/adapters/sql"},
        }
        for client in (CHAT, CHAT | {"lora_request": {"lora_name": "x", "lora_int_id": 1, "lora_path": "/etc"}}):
            assert sent(client, Wanted("tensorrt_llm", model="base", adapter=ADAPTER), api) == wanted
        assert changes(CHAT, Wanted("tensorrt_llm", model="base", adapter=ADAPTER), api) == ("adapter",)

    @pytest.mark.parametrize("api", ["responses", "messages", "embedding"])
    def test_tensorrt_has_no_adapters_for_other_apis(self, api: str) -> None:
        """It would answer with the base model and say nothing."""
        with pytest.raises(UnfitRequestError, match="LoRA"):
            sent(CHAT, Wanted("tensorrt_llm", model="base", adapter=ADAPTER), api)

    def test_tensorrt_needs_the_adapters_path(self) -> None:
        """Without one the engine could only say that no path does not exist."""
        with pytest.raises(UnfitRequestError, match=r"adapter\.path"):
            sent(CHAT, Wanted("tensorrt_llm", model="base", adapter=ModelAdapter(name="sql", id=7)))

    def test_the_last_of_several_models_is_the_one_that_was_routed(self) -> None:
        """And it is the only one that is left."""
        fitted = fit(b'{"model":"other","n":1,"model":"m"}', "chat", Wanted(model="base"))
        assert fitted is not None
        assert json.loads(fitted.body, object_pairs_hook=list) == [("model", "base"), ("n", 1)]


class TestPriority:
    """vLLM: any integer, lower first. SGLang: higher first. TensorRT-LLM: 0 to 1, higher first."""

    @pytest.mark.parametrize("api", ["chat", "completion"])
    def test_vllm_gets_it_as_it_came(self, api: str) -> None:
        """Clients speak vLLM's API."""
        assert changes(CHAT | {"priority": 3}, Wanted("vllm"), api) == ()

    @pytest.mark.parametrize(
        ("of_client", "of_engine"), [(3, -3), (-3, 3), (0, 0), (1 << 40, -(1 << 40)), (-(1 << 63), (1 << 63) - 1)]
    )
    def test_sglang_gets_it_negated(self, of_client: int, of_engine: int) -> None:
        """Zero is the middle of both, and what no 64-bit integer holds is its greatest."""
        assert sent({"priority": of_client}, Wanted("sglang")) == {"priority": of_engine}

    def test_a_priority_of_zero_needs_no_other_body(self) -> None:
        """Most clients that send one send that."""
        assert changes({"priority": 0}, Wanted("sglang")) == ()

    @pytest.mark.parametrize("api", ["responses", "messages", "embedding"])
    def test_tensorrt_has_none_for_other_apis(self, api: str) -> None:
        """Their schemas have no such field."""
        assert changes({"priority": 3}, TRT, api) == ()

    @pytest.mark.parametrize(("of_client", "of_engine"), [(0, 0.5), (10, 0.25), (-10, 0.75), (30, 0.125), (-30, 0.875)])
    def test_tensorrt_gets_its_own_scale(self, of_client: int, of_engine: float) -> None:
        """0.5 - p / (2 (|p| + 10)): the default is its default, and each end is never reached."""
        assert sent({"priority": of_client}, TRT) == {"priority": of_engine}
        assert changes({"priority": of_client}, TRT) == ("priority",)

    @given(one=st.integers(-(10**8), 10**8), other=st.integers(-(10**8), 10**8))
    def test_the_order_is_turned_around_and_kept(self, one: int, other: int) -> None:
        """Who is served first at vLLM is served first at TensorRT-LLM, within its range."""
        assert (one < other) == (priority(one) > priority(other))
        assert 0.0 < priority(one) < 1.0

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("value", [None, 0.7, True, "3", [1], 1e3])
    def test_what_is_no_integer_is_left_to_the_engine(self, engine: EngineKind, value: object) -> None:
        """Floats are TensorRT-LLM's own scale already; for the rest the engine answers."""
        assert changes({"priority": value}, Wanted(engine)) == ()

    @pytest.mark.parametrize("engine", ENGINES)
    def test_none_is_made_up(self, engine: EngineKind) -> None:
        """A client that sent no priority has none."""
        assert changes(CHAT, Wanted(engine)) == ()


class TestUsage:
    """Asking for usage on streams."""

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("api", ["chat", "completion"])
    @pytest.mark.parametrize(
        ("options", "wanted"),
        [
            ({}, {"include_usage": True}),
            ({"stream_options": None}, {"include_usage": True}),
            ({"stream_options": {}}, {"include_usage": True}),
            (
                {"stream_options": {"continuous_usage_stats": True}},
                {"include_usage": True, "continuous_usage_stats": True},
            ),
            ({"stream_options": {"include_usage": None}}, {"include_usage": True}),
        ],
    )
    def test_a_stream_whose_client_did_not_say_is_asked_for_it(
        self, engine: EngineKind, api: str, options: dict[str, object], wanted: object
    ) -> None:
        """Other options of the stream stay."""
        asked = Wanted(engine, usage=True)
        assert sent({"stream": True, **options}, asked, api) == {"stream": True, "stream_options": wanted}
        assert changes({"stream": True, **options}, asked, api) == ("usage",)

    @pytest.mark.parametrize(
        "original",
        [
            {"stream": True, "stream_options": {"include_usage": False}},
            {"stream": True, "stream_options": {"include_usage": True}},
            {"stream": True, "stream_options": "broken"},
            {"stream": False},
            {"stream": None},
            {"stream": "true"},
            {},
        ],
    )
    def test_who_said_or_does_not_stream_is_left_alone(self, original: dict[str, Any]) -> None:
        """Engines answer 400 to stream options of what is no stream."""
        assert changes(original, Wanted(usage=True)) == ()

    @pytest.mark.parametrize("api", sorted(set(APIS) - {"chat", "completion"}))
    def test_other_apis_report_usage_anyway(self, api: str) -> None:
        """Responses and Messages end their streams with it; the rest has no streams."""
        assert changes({"stream": True}, Wanted(usage=True), api) == ()

    def test_nobody_is_asked_unless_configured(self) -> None:
        """The client would see a chunk that it did not ask for."""
        assert changes({"stream": True}, Wanted()) == ()


class TestTensorrt:
    """A schema that refuses what it does not know."""

    @pytest.mark.parametrize("api", ["chat", "completion"])
    @pytest.mark.parametrize("field", ["request_id", "session_id", "return_token_ids", "vllm_xargs", "rid", "metadata"])
    def test_hints_of_others_are_taken_out(self, api: str, field: str) -> None:
        """Wherever they stand, and whatever they hold."""
        for value in ("x", {"model": "m"}, None):
            assert sent({field: value, **CHAT, "seed": 1}, TRT, api) == CHAT | {"seed": 1}
        assert changes({field: 1, **CHAT}, TRT, api) == ("stripped",)

    @pytest.mark.parametrize(
        "field", ["structured_outputs", "bad_words", "regex", "prompt_logprobs", "input_ids", "xyz"]
    )
    def test_what_changes_the_answer_is_left_for_the_engine_to_refuse(self, field: str) -> None:
        """An error is better than the answer to another question."""
        assert changes(CHAT | {field: "x"}, TRT) == ()

    @pytest.mark.parametrize("engine", ["vllm", "sglang", "auto"])
    def test_other_engines_get_every_field(self, engine: EngineKind) -> None:
        """They pass over what they do not know."""
        assert changes(dict.fromkeys(HINTS, 1), Wanted(engine)) == ()

    def test_chats_keep_their_salt(self) -> None:
        """TensorRT-LLM takes it there."""
        assert changes(CHAT | {"cache_salt": "t1"}, TRT) == ()

    @pytest.mark.parametrize("api", ["completion", "responses", "messages"])
    @pytest.mark.parametrize("salt", ["t1", "", 5])
    def test_a_salt_that_would_be_lost_is_refused(self, api: str, salt: object) -> None:
        """Tenants would share a cache and nobody would know: 400, and nothing of the salt in the text."""
        with pytest.raises(UnfitRequestError) as caught:
            sent({"model": "m", "cache_salt": salt}, TRT, api)
        assert (caught.value.status, caught.value.reason) == (400, "engine_cannot")
        assert "t1" not in str(caught.value)
        assert "`cache_salt`" in str(caught.value)

    @pytest.mark.parametrize("api", ["chat", "completion", "responses"])
    def test_so_is_sglangs_key(self, api: str) -> None:
        """`extra_key` keeps caches apart as well, under a name that only SGLang knows."""
        with pytest.raises(UnfitRequestError, match="extra_key"):
            sent({"model": "m", "extra_key": "t1"}, TRT, api)

    def test_a_salt_of_null_is_none(self) -> None:
        """It is taken out of a completion, whose schema has no such field."""
        assert sent({"model": "m", "cache_salt": None, "extra_key": None}, TRT, "completion") == {"model": "m"}

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    @pytest.mark.parametrize("api", ["chat", "completion", "responses"])
    def test_other_engines_keep_salts(self, engine: EngineKind, api: str) -> None:
        """Both have them in all three."""
        assert changes({"cache_salt": "t1", "extra_key": "t2"}, Wanted(engine), api) == ()


@given(original=OBJECTS, wanted=WANTED, api=st.sampled_from(APIS))
def test_a_fitted_body_differs_in_what_was_to_change_and_in_nothing_else(
    original: dict[str, Any], wanted: Wanted, api: str
) -> None:
    """For any object: valid JSON, all other fields as they were, and the reason says which field it was."""
    body = json.dumps(original).encode()
    try:
        fitted = fit(body, api, wanted)
    except UnfitRequestError:
        assert wanted.engine == "tensorrt_llm"
        return
    if fitted is None:
        return
    after = json.loads(fitted.body)
    touched = {
        "model": {"model"},
        "adapter": {"model", "lora_request"},
        "priority": {"priority"},
        "usage": {"stream_options"},
        "stripped": {*HINTS, "cache_salt", "extra_key"},
    }
    may = set().union(*(touched[change] for change in fitted.changes))
    assert after != original
    assert {name: value for name, value in after.items() if name not in may} == {
        name: value for name, value in original.items() if name not in may
    }


@given(original=OBJECTS, wanted=WANTED, api=st.sampled_from(APIS))
def test_a_fitted_body_needs_nothing_more(original: dict[str, Any], wanted: Wanted, api: str) -> None:
    """Fitting again changes nothing; SGLang's priority alone looks as before, turned around."""
    if wanted.engine == "sglang":
        original.pop("priority", None)
    try:
        fitted = fit(json.dumps(original).encode(), api, wanted)
    except UnfitRequestError:
        return
    assert fitted is None or fit(fitted.body, api, wanted) is None


@given(body=st.binary(max_size=40), wanted=WANTED, api=st.sampled_from(APIS))
def test_what_is_no_json_is_passed_on(body: bytes, wanted: Wanted, api: str) -> None:
    """The engine answers for it."""
    try:
        whole = isinstance(json.loads(body), dict)
    except ValueError:
        whole = False
    if not whole:
        assert fit(body, api, wanted) is None


@given(original=OBJECTS, api=st.sampled_from(APIS), cut=st.floats(0, 1, exclude_max=True))
def test_a_body_that_was_cut_off_is_passed_on(original: dict[str, Any], api: str, cut: float) -> None:
    """Half a body is not made a whole one."""
    body = json.dumps(original).encode()
    assert fit(body[: int(len(body) * cut)], api, Wanted("tensorrt_llm", model="base", usage=True)) is None


def test_the_page_names_every_field_that_is_taken_out() -> None:
    """docs/requests.md lists `HINTS`, no more and no less."""
    page = (Path(__file__).parents[3] / "docs" / "requests.md").read_text(encoding="utf-8")
    section = page.partition("## What is taken out for TensorRT-LLM")[2].partition("Fields that change the answer")[0]
    assert sorted(re.findall(r"`([a-z_]+)`", section)) == sorted(HINTS)


def test_unknown_apis_are_left_alone() -> None:
    """Nobody knows what their fields mean."""
    assert (
        fit(b'{"model":"m","rid":1,"cache_salt":"t"}', "other", Wanted("tensorrt_llm", "base", ADAPTER, True)) is None
    )
