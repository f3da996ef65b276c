"""vLLM's metrics page, of several versions and shapes, becomes one reading."""

import json
from pathlib import Path

import pytest

from extproc.engines.adapter import MAX_PAGE_BYTES, Reading
from extproc.engines.kv_values import EventSource
from extproc.engines.vllm import VllmAdapter
from extproc.errors import EngineError

_REAL = (Path(__file__).parent / "pages" / "vllm_0.32.txt").read_bytes()
_OK = b'vllm:num_requests_running{engine="0"} 1.0\n'


def _read(*lines: str) -> Reading:
    return _page(("\n".join(lines) + "\n").encode())


def _page(page: bytes) -> Reading:
    return VllmAdapter().read("/metrics", page)


def test_a_real_page_is_read() -> None:
    """The page of a real vLLM 0.32 gives every number that it holds."""
    assert _page(_REAL) == Reading(
        block_tokens=128,
        kv_blocks=8192,
        started_at=1.79598375668e09,
        prefix_queries=945.0,
        prefix_caching=True,
        tokens=945.0 + 53.0,
        ranks=1,
        max_adapters=2,
        hash_algo="sha256",
    )


def test_ranks_are_summed_and_the_fullest_counts() -> None:
    """Running, waiting, counters and blocks are sums over ranks; KV usage is that of the fullest rank."""
    reading = _read(
        *(
            f'vllm:{name}{{engine="{rank}",model_name="m"}} {value}'
            for rank, values in enumerate([(3, 1, 0.25, 100, 40), (4, 5, 0.75, 50, 10)])
            for name, value in zip(
                (
                    "num_requests_running",
                    "num_requests_waiting",
                    "kv_cache_usage_perc",
                    "prefix_cache_queries_total",
                    "prefix_cache_hits_total",
                ),
                values,
                strict=True,
            )
        ),
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0',
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="500"} 1.0',
    )
    assert reading == Reading(
        running=7,
        waiting=6,
        kv_usage=0.75,
        block_tokens=16,
        kv_blocks=1500,
        prefix_queries=150,
        prefix_hits=50,
        prefix_caching=True,
        ranks=2,
    )


def test_tokens_of_prompts_and_answers_are_summed_over_ranks() -> None:
    """Whatever a rank worked through is progress."""
    reading = _read(
        "vllm:num_requests_running 1",
        *(
            f'vllm:{name}_tokens_total{{engine="{rank}",model_name="m"}} {value}'
            for rank, name, value in ((0, "prompt", 5), (1, "prompt", 6), (0, "generation", 70), (1, "generation", 800))
        ),
    )
    assert reading.tokens == 881


def test_names_of_older_versions_are_known() -> None:
    """Up to 0.11 some metrics were called `gpu_...`."""
    reading = _read(
        "vllm:num_requests_running 1",
        "vllm:gpu_cache_usage_perc 0.5",
        "vllm:gpu_prefix_cache_queries_total 10",
        "vllm:gpu_prefix_cache_hits_total 4",
    )
    assert (reading.kv_usage, reading.prefix_queries, reading.prefix_hits) == (0.5, 10, 4)


def test_a_page_with_both_names_counts_once() -> None:
    """0.9 to 0.11 wrote counters under both names; they are the same tokens."""
    reading = _read(
        "vllm:num_requests_running 1",
        "vllm:gpu_prefix_cache_queries_total 10",
        "vllm:prefix_cache_queries_total 10",
    )
    assert reading.prefix_queries == 10


@pytest.mark.parametrize(
    ("awake", "asleep"), [(["1.0"], False), (["0.0"], True), (["1.0", "0.0"], True), ([], False), (["NaN"], False)]
)
def test_a_sleeping_rank_makes_the_endpoint_asleep(awake: list[str], asleep: bool) -> None:
    """One rank that is not awake lets requests hang; an engine that says nothing of sleep is awake."""
    lines = [
        f'vllm:engine_sleep_state{{engine="{rank}",sleep_state="awake"}} {value}' for rank, value in enumerate(awake)
    ]
    lines.append('vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0')
    assert _read("vllm:num_requests_running 0", *lines).asleep is asleep


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ('block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="800"', (16, 50)),
        ('block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="None"', (16, 100)),
        ('block_size="None",num_gpu_blocks="100"', (0, 0)),
        ('block_size="16",num_gpu_blocks="None"', (16, 0)),
        ('block_size="-16",num_gpu_blocks="9"', (0, 0)),
        ('block_size="²",num_gpu_blocks="9"', (0, 0)),
        (f'block_size="{"9" * 5000}",num_gpu_blocks="9"', (0, 0)),
        ('new_in_0_40="x"', (0, 0)),
    ],
)
def test_cache_labels_are_read_by_name(labels: str, expected: tuple[int, int]) -> None:
    """Absent, `None` and foreign label values mean "not told", and never an error."""
    reading = _read("vllm:num_requests_running 0", f"vllm:cache_config_info{{{labels}}} 1.0")
    assert (reading.block_tokens, reading.kv_blocks) == expected


@pytest.mark.parametrize(
    ("ranks", "caching"),
    [(["True"], True), (["False"], False), (["True", "False"], False), (["None"], True), ([], None)],
)
def test_prefix_caching_is_on_unless_a_rank_says_that_it_is_off(ranks: list[str], caching: bool | None) -> None:
    """A request may land on any rank; nothing is told where no rank shows its configuration."""
    lines = [
        f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{label}",engine="{rank}"}} 1.0'
        for rank, label in enumerate(ranks)
    ]
    assert _read("vllm:num_requests_running 0", *lines).prefix_caching is caching


def test_numbers_that_are_none_count_as_not_told() -> None:
    """NaN, infinities and values out of range fall back to defaults or the range's end."""
    reading = _read(
        'vllm:num_requests_running{engine="0"} NaN',
        'vllm:num_requests_running{engine="1"} 2',
        "vllm:num_requests_waiting -3",
        "vllm:kv_cache_usage_perc 1.7",
        "process_start_time_seconds +Inf",
        "vllm:prefix_cache_hits_total NaN",
    )
    assert reading == Reading(running=2, kv_usage=1.0, ranks=2)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>not metrics</html>",
        b"sglang:num_running_reqs 1\n",
        b"vllm:num_requests_running NaN\n",
        b'vllm:num_requests_running{engine="0"\n',
        _OK + b"#" * MAX_PAGE_BYTES,
    ],
)
def test_a_page_that_is_not_vllms_is_refused(page: bytes) -> None:
    """Other content, broken lines and pages over the cap raise EngineError."""
    with pytest.raises(EngineError):
        _page(page)


@pytest.mark.parametrize("value", ["1e20", "1e308", "-1e308", "+Inf"])
def test_absurd_numbers_count_as_not_told(value: str) -> None:
    """A reading can always be published: a number that cannot would end the keeper, at every scrape again."""
    names = ("num_requests_waiting", "prefix_cache_queries_total", "prefix_cache_hits_total", "kv_cache_usage_perc")
    page = 'vllm:num_requests_running{engine="0"} 3\n'
    page += "".join(f'vllm:{name}{{engine="{rank}"}} {value}\n' for name in names for rank in range(2))
    reading = _page(f"{page}process_start_time_seconds {value}\n".encode())
    assert reading == Reading(running=3, ranks=1)
    with pytest.raises(EngineError, match="num_requests_running"):
        _page(f"vllm:num_requests_running {value}\n".encode())


def _sources(**ranks: object) -> tuple[EventSource, ...] | None:
    page = json.dumps({name.removeprefix("rank"): settings for name, settings in ranks.items()}).encode()
    return VllmAdapter().about("/kv_event_sources", page).sources


_ON = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None}


@pytest.mark.parametrize(
    "settings",
    [
        {**_ON, "enable_kv_cache_events": False},
        {**_ON, "publisher": "null"},
        {**_ON, "endpoint": None},
        {**_ON, "endpoint": "x" * 300},
        {},
        None,
    ],
)
def test_events_that_are_off_have_no_source(settings: object) -> None:
    """`{}` where they are off, or a publisher that goes nowhere; other ranks may have theirs."""
    assert _sources(rank0=settings, rank1=_ON) == (EventSource(1, "zmq", "tcp://*:5557"),)
    assert _sources() == ()


def test_sources_of_ranks_without_a_number_are_left_out() -> None:
    """Ports and topics are by rank."""
    assert _sources(rankx=_ON, rank=_ON, rank9999999=_ON, rank0=_ON) == (EventSource(0, "zmq", "tcp://*:5557"),)


@pytest.mark.parametrize(("path", "page"), [("/kv_event_sources", b"[]"), ("/version", b"x"), ("/v1/models", b"{}")])
def test_a_slow_page_that_is_not_vllms_is_refused(path: str, page: bytes) -> None:
    """As with metrics pages."""
    with pytest.raises(EngineError):
        VllmAdapter().about(path, page)


def test_the_adapters_of_the_last_moment_count() -> None:
    """A series stays for every set of adapters that ever ran; the newest one may stand anywhere."""
    reading = _read(
        "vllm:num_requests_running 1",
        *(
            f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"}}'
            f" {at}"
            for running, waiting, at in (("a,b", "c", 10.5), ("sql,", "sql,law", 30.5), ("", "", 20.5))
        ),
    )
    assert (reading.active_adapters, reading.max_adapters) == (("law", "sql"), 4)
