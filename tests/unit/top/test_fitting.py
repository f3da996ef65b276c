"""Which body each kind of engine gets, by configuration and by what the engines turned out to be."""

import json
from typing import Any

import pytest

from extproc.choose.fleet import Endpoint, Pool
from extproc.config import Config, ModelAdapter
from extproc.engines.fit import Wanted
from extproc.envoy.contract import Decision
from extproc.errors import UnfitRequestError
from extproc.fitting import Fits, Fitting, base_of, kinds_of, wanted_of
from extproc.request.model import Request, RouteKind
from tests.unit.top.parts import config

CHAT = Request(kind=RouteKind.CHAT, model="m")


def pool(*kinds: str) -> Pool:
    """Pool `main` with endpoints e0 at port 80, e1 at 81 and so on, of these kinds."""
    each = (Endpoint(f"e{at}", f"10.0.0.1:{80 + at}", 1e4, kind=kind) for at, kind in enumerate(kinds))
    return Pool("main", "predicted_ttft", tuple(each))


def settings(model: dict[str, Any] | None = None, **of_pool: Any) -> Config:
    """Model `m` with more settings, in pool `main` with more settings."""
    return config(
        models={"m": {"pool": "main", **(model or {})}}, pools={"main": {"endpoints": ["10.0.0.1:80"], **of_pool}}
    )


class TestKinds:
    """What kinds of engine a pool has."""

    @pytest.mark.parametrize("kinds", [(), ("",), ("sglang", "vllm")])
    def test_the_configured_kind_is_believed(self, kinds: tuple[str, ...]) -> None:
        """Whatever the pages look like."""
        found = kinds_of(settings(engine="tensorrt_llm"), pool(*kinds))
        assert (found.engines, dict(found.each)) == (("tensorrt_llm",), {})

    @pytest.mark.parametrize(
        ("kinds", "engines"),
        [
            ((), ("auto",)),
            (("", ""), ("auto",)),
            (("newest",), ("auto",)),
            (("sglang", "sglang"), ("sglang",)),
            (("", "sglang"), ("sglang",)),
        ],
    )
    def test_a_pool_of_one_kind_has_that_one(self, kinds: tuple[str, ...], engines: tuple[str, ...]) -> None:
        """An endpoint that could not be read yet is what the others are."""
        found = kinds_of(settings(), pool(*kinds))
        assert (found.engines, dict(found.each)) == (engines, {})

    def test_of_several_kinds_each_endpoint_has_its_own(self) -> None:
        """Where the others differ, an unread one is taken for vLLM."""
        found = kinds_of(settings(), pool("sglang", "tensorrt_llm", ""))
        assert found.engines == ("sglang", "tensorrt_llm", "vllm")
        assert dict(found.each) == {
            "10.0.0.1:80": "sglang",
            "10.0.0.1:81": "tensorrt_llm",
            "10.0.0.1:82": "vllm",
        }


class TestWanted:
    """What a model needs."""

    def test_a_model_by_its_own_name_needs_nothing(self) -> None:
        """Even when its alias is that name."""
        for told in ({}, {"served_as": "m"}):
            assert wanted_of(settings(told), "m", "main", "vllm") == Wanted("vllm")

    def test_an_alias_is_what_the_engine_knows(self) -> None:
        """The same at each engine."""
        assert wanted_of(settings({"served_as": "org/base"}), "m", "main", "sglang") == Wanted("sglang", "org/base")

    def test_usage_is_a_setting_of_the_pool(self) -> None:
        """For every model in it, and for requests that name none."""
        for model in ("m", ""):
            assert wanted_of(settings(ask_usage=True), model, "main", "vllm") == Wanted("vllm", usage=True)

    def test_an_adapter_stands_on_the_pools_base_model(self) -> None:
        """The first model of the pool that has no adapter, by the name that the engines know."""
        several = config(
            models={
                "other": {"pool": "second"},
                "m": {"pool": "main", "adapter": {"name": "sql", "id": 7}},
                "base": {"pool": "main", "served_as": "org/base"},
                "later": {"pool": "main"},
                "told": {"pool": "main", "served_as": "org/told", "adapter": {"name": "sql", "id": 7}},
            },
            pools={"main": {"endpoints": ["10.0.0.1:80"]}, "second": {"endpoints": ["10.0.0.2:80"]}},
        )
        assert base_of(several, "main") == "org/base"
        assert wanted_of(several, "m", "main", "sglang").model == "org/base"
        assert wanted_of(several, "told", "main", "sglang").model == "org/told"
        assert wanted_of(settings({"adapter": {"name": "sql"}}), "m", "main", "sglang").model == "m"

    def test_pools_and_models_that_are_not_configured_need_nothing(self) -> None:
        """A fleet may know more than the configuration for a moment, while that is replaced."""
        assert wanted_of(settings({"served_as": "x"}), "gone", "gone", "vllm") == Wanted("vllm")


class TestFits:
    """Bodies for a pool."""

    def test_one_kind_gets_one_body(self) -> None:
        """And the gateway's hint is as it was."""
        fits = Fitting(settings({"served_as": "base"})).fits(CHAT, pool("sglang", ""), b'{"model":"m"}')
        made = fits.by_engine["sglang"]
        assert made is not None
        assert made.body == b'{"model":"base"}'
        assert fits.subset(None) is None
        assert fits.subset({"10.0.0.9:80"}) == {"10.0.0.9:80"}
        decision, changes = fits.applied(Decision("main", ("10.0.0.1:80", "10.0.0.1:81")))
        assert (decision.body, decision.destinations, changes) == (
            b'{"model":"base"}',
            ("10.0.0.1:80", "10.0.0.1:81"),
            ("model",),
        )

    @pytest.mark.parametrize("body", [b"", b"no json", b'{"model":"m","messages":[]}'])
    def test_a_body_that_needs_nothing_stays_that_of_the_decision(self, body: bytes) -> None:
        """Also one that was changed for another reason before."""
        fits = Fitting(settings()).fits(CHAT, pool("vllm"), body)
        for before in (None, b"changed"):
            decision = Decision("main", ("10.0.0.1:80",), body=before)
            assert fits.applied(decision) == (decision, ())

    def test_each_kind_gets_its_own_body_and_only_its_kind_follows(self) -> None:
        """Who is tried after the pick gets the same bytes, so a retry never reaches another kind."""
        mixed = pool("vllm", "tensorrt_llm", "sglang", "tensorrt_llm")
        fits = Fitting(settings()).fits(CHAT, mixed, b'{"model":"m","priority":10}')
        every = tuple(each.destination for each in mixed.endpoints)
        at_vllm, _ = fits.applied(Decision("main", every))
        at_tensorrt, changes = fits.applied(Decision("main", (every[1], every[0], every[2], every[3])))
        at_sglang, _ = fits.applied(Decision("main", (every[2], every[0])))
        assert (at_vllm.body, at_vllm.destinations) == (None, every[:1])
        assert (at_tensorrt.body, at_tensorrt.destinations) == (b'{"model":"m","priority":0.25}', (every[1], every[3]))
        assert (at_sglang.body, at_sglang.destinations) == (b'{"model":"m","priority":-10}', every[2:3])
        assert changes == ("priority",)
        assert fits.subset(None) is None

    def test_who_cannot_serve_is_not_picked(self) -> None:
        """A salted completion goes to the engines that keep it apart, within the gateway's hint."""
        mixed = pool("vllm", "tensorrt_llm", "sglang")
        request = Request(kind=RouteKind.COMPLETION, model="m")
        fits = Fitting(settings()).fits(request, mixed, b'{"model":"m","cache_salt":"t1"}')
        assert fits.subset(None) == {"10.0.0.1:80", "10.0.0.1:82"}
        assert fits.subset({"10.0.0.1:81", "10.0.0.1:82"}) == {"10.0.0.1:82"}

    def test_where_nobody_can_serve_the_request_is_refused(self) -> None:
        """With the reason of the engine that cannot."""
        request = Request(kind=RouteKind.COMPLETION, model="m")
        with pytest.raises(UnfitRequestError, match="cache_salt"):
            Fitting(settings(engine="tensorrt_llm")).fits(request, pool(""), b'{"model":"m","cache_salt":"t1"}')

    def test_kinds_are_those_of_the_snapshot_at_hand(self) -> None:
        """An engine that was replaced by one of another kind gets its new bodies at once."""
        fitting = Fitting(settings())
        for kind, wanted in (("vllm", None), ("sglang", b'{"priority":-1}'), ("vllm", None)):
            made = fitting.fits(CHAT, pool(kind), b'{"priority":1}').by_engine
            assert [each and each.body for each in made.values()] == [wanted]

    def test_the_access_log_is_told_that_usage_was_asked_for(self) -> None:
        """Beside what the decision says of itself."""
        fits = Fitting(settings(ask_usage=True)).fits(CHAT, pool("vllm"), b'{"model":"m","stream":true}')
        decision, changes = fits.applied(Decision("main", ("10.0.0.1:80",), metadata={"kind": "chat"}))
        assert decision.metadata == {"kind": "chat", "asked_usage": 1.0}
        assert changes == ("usage",)
        assert json.loads(decision.body or b"") == {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def test_no_fits_change_nothing() -> None:
    """The value for a request without a body."""
    decision = Decision("main", ("10.0.0.1:80",))
    assert Fits({}).applied(decision) == (decision, ())
    assert Fits({}).subset(None) is None


class TestVersions:
    """The body of a version's engines, by whatever name its client asked."""

    SETTINGS = config(
        models={
            "m": {
                "versions": {
                    "old": {"pool": "main", "weight": 1, "served_as": "org/m-1"},
                    "same": {"pool": "same"},
                    "tuned": {"pool": "tuned", "adapter": {"name": "t"}},
                },
                "aliases": ["gpt"],
            },
            "base": {"pool": "tuned", "served_as": "org/base"},
        },
        pools={name: {"endpoints": ["10.0.0.1:80"]} for name in ("main", "same", "tuned")},
    )

    @pytest.mark.parametrize(
        ("version_pool", "named", "wanted"),
        [
            ("main", "", Wanted("vllm", "org/m-1")),
            ("main", "gpt", Wanted("vllm", "org/m-1")),
            ("same", "", Wanted("vllm", "")),
            ("same", "gpt", Wanted("vllm", "m")),
            ("tuned", "gpt", Wanted("vllm", "org/base", ModelAdapter(name="t"))),
        ],
    )
    def test_each_version_has_its_name_and_its_adapter(self, version_pool: str, named: str, wanted: Wanted) -> None:
        """A body that names the model by its alias is rewritten even where the model's own name would do."""
        assert Fitting(self.SETTINGS).wanted(named or "m", version_pool, "vllm") == wanted

    def test_an_alias_of_a_model_with_one_version_is_rewritten(self) -> None:
        """Its engines know nothing of our aliases."""
        settings = config(models={"m": {"pool": "main", "aliases": ["gpt"]}})
        fits = Fitting(settings).fits(CHAT, pool("vllm"), b'{"model":"gpt"}', "gpt")
        fitted = fits.by_engine["vllm"]
        assert fitted is not None
        assert fitted.body == b'{"model":"m"}'
