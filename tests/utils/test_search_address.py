"""Which search server a model is asked with when its run is over, still trains, or had a server elsewhere."""

import pytest

from verl.utils.model_folders import LOCAL_SEARCH, search_address

OWN = "http://127.0.0.1:43210/retrieve"
ELSEWHERE = ["http://node3:8000/retrieve", "http://node4:8000/retrieve"]


@pytest.mark.parametrize(
    ("url", "is_running", "expected"),
    [
        (OWN, True, OWN),
        (OWN, False, LOCAL_SEARCH),
        ("http://localhost:9000/retrieve", False, LOCAL_SEARCH),
        (ELSEWHERE, False, ",".join(ELSEWHERE)),
        ([ELSEWHERE[0], OWN], False, LOCAL_SEARCH),
        (None, False, LOCAL_SEARCH),
    ],
)
def test_the_server_of_a_run_is_asked_while_it_is_there(url, is_running, expected, monkeypatch):
    monkeypatch.delenv("RETRIEVER_URL", raising=False)
    assert search_address(url, is_running)[0] == expected
    monkeypatch.setenv("RETRIEVER_URL", "http://here:1/retrieve")
    assert search_address(url, is_running) == ("http://here:1/retrieve", "RETRIEVER_URL")
