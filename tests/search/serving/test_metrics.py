"""GET /metrics: what the server says of itself is what happened."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_parts import echo_service, http, post


def samples(text: str) -> dict[str, float]:
    """Metric name (with its labels) -> value."""
    return {
        sample.name + "".join(f"|{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_queries_cache_and_batches_are_counted(serve):
    service = echo_service()
    with serve(service) as address, http(address) as client:
        post(client, {"queries": ["a", "b", "a"]})
        post(client, {"queries": ["a", "c"]})
        post(client, {"queries": ["a"]})
        post(client, {"queries": 7})
        response = client.get("/metrics")
        assert response.headers["Content-Type"].startswith("text/plain")
        found = samples(response.text)
    expected = {
        "search_r1_requests_total|status=200": 3,
        "search_r1_requests_total|status=422": 1,
        "search_r1_request_seconds_count": 4,
        "search_r1_queries_total": 6,
        "search_r1_cache_hits_total": 2,
        "search_r1_searched_queries_total": 3,
        "search_r1_batch_size_count": 2,
        "search_r1_batch_size_sum": 3,
        "search_r1_batch_seconds_count": 2,
        "search_r1_queue_seconds_count": 2,
        "search_r1_queue_queries": 0,
        "search_r1_open_requests": 0,
        "search_r1_cache_entries": 3,
        "search_r1_ready_workers": 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["search_r1_cache_bytes"] > 1000
    assert found["process_resident_memory_bytes"] > 1e6


@pytest.mark.parametrize("path", ["/retrieve", "/metrics"])
@pytest.mark.parametrize(
    "headers, allowed",
    [
        ({}, False),
        ({"Authorization": "Bearer wrong"}, False),
        ({"Authorization": "Basic s3cret-\u00fc"}, False),
        ({"Authorization": "Bearer s3cret"}, False),
        ({"X-API-Key": ""}, False),
        ({"Authorization": "Bearer s3cret-\u00fc"}, True),
        ({"authorization": "bearer s3cret-\u00fc"}, True),
        ({"X-API-Key": "s3cret-\u00fc"}, True),
    ],
)
def test_with_an_api_key_search_and_metrics_ask_for_it_and_health_does_not(keyed, path, headers, allowed):
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    if path == "/retrieve":
        response = keyed.post(path, json={"queries": ["a"]}, headers=raw)
    else:
        response = keyed.get(path, headers=raw)
    assert response.status_code == (200 if allowed else 401)
    if not allowed:
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert "api key" in response.json()["detail"]
        assert "s3cret" not in response.text
    health = keyed.get("/health")
    assert (health.status_code, health.json()["api_key_needed"]) == (200, True)
    assert keyed.get("/").status_code == 200


@pytest.fixture(scope="module")
def keyed(serve):
    with serve(echo_service(api_key="s3cret-\u00fc")) as address, http(address) as client:
        yield client


def test_paths_of_files_are_told_to_whoever_has_the_key(serve, tmp_path):
    def service(key):
        made = echo_service(api_key=key)
        made.corpus_path = f"{tmp_path}/my corpus.jsonl"
        made.progress = f"loading {tmp_path}/bm25 and data/e5.index"
        made._loaded = {
            "index": f"{tmp_path}/bm25",
            "url": "https://engine.example/a/b",
            "parts": [f"{tmp_path}/x"],
        }
        return made

    names = {"index": "bm25", "url": "https://engine.example/a/b", "parts": ["x"]}
    with serve(service(None)) as address, http(address) as client:
        health = client.get("/health").json()
        assert (health["corpus_path"], health["loaded"]) == ("my corpus.jsonl", names)
        assert health["progress"] == "loading bm25 and e5.index"
    with serve(service("s3cret")) as address, http(address) as client:
        assert client.get("/health").json()["loaded"] == names
        health = client.get("/health", headers={"Authorization": "Bearer s3cret"}).json()
        assert health["corpus_path"] == f"{tmp_path}/my corpus.jsonl" and health["loaded"]["parts"] == [
            f"{tmp_path}/x"
        ]
