"""Made-up requests: no 500, no hang, nothing that grows."""

from __future__ import annotations

import time

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from served import serving

pytestmark = pytest.mark.slow
RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))
PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/sessions"),
    ("POST", "/sessions/{session_id}/v1/chat/completions"),
    ("POST", "/sessions/{session_id}/finish"),
    ("GET", "/sessions/{session_id}"),
    ("DELETE", "/sessions/{session_id}"),
    ("POST", "/update_weights"),
    ("POST", "/pause"),
    ("GET", "/v1/models"),
]


@pytest.fixture
def server():
    with serving(token="t", max_model_len=128, max_sessions=20) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_no_request_made_from_the_schema_breaks_the_server(server, method, path):
    url = f"{server.url}/openapi.json"
    headers = {"Authorization": "Bearer t"}
    operation = schemathesis.openapi.from_url(url, headers=headers)[path][method]
    session = server.open()[0]

    @given(case=operation.as_strategy())
    @settings(max_examples=50, parent=RELAXED)
    def check(case):
        if "session_id" in case.path_parameters:
            case.path_parameters["session_id"] = session
        reply = case.call(base_url=server.url, headers=headers, timeout=60)
        assert reply.status_code < 500, reply.text
        if path == "/pause":
            assert server.post("/resume").status_code == 200

    check()
    assert server.client.get("/health").status_code == 200
    deadline = time.monotonic() + 10  # what a refused request has begun is being ended
    while server.thread.num_turns or server.engine.stats()["running"] or server.engine.stats()["queued"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.client.delete(f"/sessions/{session}")


def test_nothing_is_left_of_sessions_that_were_deleted(server):
    for _ in range(100):
        session, path = server.open()
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        assert server.post(path, **body).status_code == 200
        server.client.delete(f"/sessions/{session}")
    assert server.client.get("/metrics").text.count("verl_inference_parked 0.0") == 1
    assert server.engine._sessions == {}
