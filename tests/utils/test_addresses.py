"""Servers without a key say so where others can reach them."""

import pytest

from search_r1.search import rerank_server
from verl.code_server import __main__ as code_server
from verl.utils.addresses import open_note


class Served(Exception):
    """Raised where the server would start."""


def serve(*_, **__):
    raise Served


@pytest.mark.parametrize(
    ("host", "is_open"), [("0.0.0.0", True), ("::", True), ("::1", False), ("localhost", False)]
)
def test_a_server_that_others_reach_says_so(host, is_open):
    note = open_note(host, "can search")
    assert (note is not None) == is_open
    assert note is None or f"listens on {host} without a key: whoever reaches this machine can search" in note


@pytest.mark.parametrize(("host", "is_open"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_the_code_server_says_that_others_can_run_programs(monkeypatch, capsys, host, is_open):
    monkeypatch.setattr(code_server.uvicorn.Server, "run", serve)
    with pytest.raises(Served):
        code_server.main(["--host", host, "--port", "0"])
    assert ("whoever reaches this machine can run programs" in capsys.readouterr().err) == is_open


@pytest.mark.parametrize(("flags", "is_open"), [([], True), (["--host", "127.0.0.1"], False)])
def test_the_reranker_says_that_others_can_use_it(monkeypatch, capsys, flags, is_open):
    monkeypatch.setattr("search_r1.search.backend_plan.check_packages", lambda *_: None)
    monkeypatch.setattr("search_r1.search.backend_plan.check_model_folder", lambda *_: None)
    monkeypatch.setattr("verl.utils.hub.use_cache_if_hub_is_away", lambda *_: None)
    monkeypatch.setattr("search_r1.search.rerank.CrossEncoder", lambda *_: None)
    monkeypatch.setattr("uvicorn.run", serve)
    with pytest.raises(Served):
        rerank_server.main(flags)
    assert ("whoever reaches this machine can have documents ranked" in capsys.readouterr().err) == is_open
