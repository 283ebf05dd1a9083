"""NO_PROXY by the rules of httpx and requests, held against both; and a real proxy that answers 403."""

import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import requests
from doctor_facts import facts_with, found, machine_with

from verl.doctor.facts import Server
from verl.doctor.facts_machine import kept_environment
from verl.doctor.facts_retriever import Question, look_at_servers
from verl.doctor.proxies import (
    VARIABLES,
    httpx_goes_around,
    is_inside,
    proxy_for,
    requests_goes_around,
    without_password,
)

URLS = (
    "http://10.0.0.7:8000/retrieve",
    "http://node7:8000/retrieve",
    "http://node7.cluster.local:8000/retrieve",
    "http://cluster.local/retrieve",
    "http://localhost:8000/retrieve",
    "http://127.0.0.1:8000/retrieve",
    "http://[::1]:8000/retrieve",
    "https://Node7/retrieve",
)
ENTRIES = (
    "",
    "*",
    "10.0.0.7",
    "10.0.0.0/8",
    "10.0.0.7:8000",
    "10.0.0.7/32",
    "10.0.0.",
    "node7",
    "NODE7",
    "node7:8000",
    "node7:80",
    "ode7",
    ".cluster.local",
    "cluster.local",
    "*.cluster.local",
    ".local",
    "localhost",
    "LOCALHOST",
    "127.0.0.1",
    "127.0.0.0/8",
    "::1",
    "http://node7",
    "all://node7:8000",
    "https://node7",
    "other, node7",
    "other,10.0.0.7 ,*",
    " node7 ",
)


@pytest.fixture
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_rules_are_those_of_httpx_and_requests(no_variables, entry):
    for name in ("http_proxy", "https_proxy"):
        no_variables.setenv(name, "http://proxy.example:3128")
    no_variables.setenv("no_proxy", entry)
    with httpx.Client(verify=False) as client:
        own = client._transport
        for url in URLS:
            around = client._transport_for_url(httpx.URL(url)) is own
            assert httpx_goes_around(url, entry) == around, (url, "httpx")
            around = not requests.utils.get_environ_proxies(url)
            assert requests_goes_around(url, entry) == around, (url, "requests")


PAIRS = [pair for count in (1, 2) for pair in itertools.combinations(VARIABLES[:6], count)]


@pytest.mark.parametrize("names", PAIRS)
def test_the_proxy_is_the_one_that_httpx_takes(no_variables, names):
    for number, name in enumerate(names):
        no_variables.setenv(name, f"http://user:secret@proxy{number}:3128")
    environment = kept_environment(
        {name: f"http://user:secret@proxy{i}:3128" for i, name in enumerate(names)}
    )
    assert "secret" not in str(environment)
    with httpx.Client(verify=False) as client:
        for url in ("http://a.example/x", "https://a.example/x"):
            pool = getattr(client._transport_for_url(httpx.URL(url)), "_pool", None)
            taken = getattr(pool, "_proxy_url", None)
            expected = None if taken is None else f"http://{taken.host.decode()}:{taken.port}"
            assert proxy_for(url, environment) == expected


def test_a_host_of_this_network_is_known_as_one():
    for host in ("node7", "10.1.2.3", "127.0.0.1", "192.168.0.1", "::1", "localhost"):
        assert is_inside(host), host
    assert not is_inside("search.example.com") and not is_inside("8.8.8.8")
    assert is_inside("search.example.com", ("10.0.0.9",))
    assert without_password("me:pw@proxy:1") == "proxy:1"


def judge(environment: dict[str, str], use_proxy: bool, url: str = "http://10.0.0.7:8000/retrieve"):
    machine = machine_with(environment=environment, servers=(Server(url, health={"status": "ready"}),))
    return found(facts_with({"retriever.use_proxy": use_proxy, "retriever.url": url}, machine), "proxy")


PROXY = {"http_proxy": "http://proxy:3128"}


@pytest.mark.parametrize("use_proxy", [True, False])
@pytest.mark.parametrize(
    ("spared", "reasons"),
    [
        ({}, "NO_PROXY is not set; no_proxy is not set"),
        ({"NO_PROXY": "10.0.0.7"}, "no_proxy is not set"),
        ({"NO_PROXY": "localhost", "no_proxy": "localhost"}, "NO_PROXY does not hold 10.0.0.7"),
        ({"NO_PROXY": "10.0.0.0/8", "no_proxy": "10.0.0.7"}, "an entry that httpx does not understand"),
        ({"NO_PROXY": "10.0.0.7", "no_proxy": "10.0.0.7:8000"}, "an entry that requests does not understand"),
        ({"NO_PROXY": "10.0.0.7", "no_proxy": "10.0.0.7"}, None),
        ({"NO_PROXY": "*", "no_proxy": "*"}, None),
    ],
)
def test_no_proxy_must_hold_the_host_for_everybody_and_in_both_spellings(use_proxy, spared, reasons):
    findings = judge(PROXY | spared, use_proxy)
    if reasons is None:
        assert findings == []
        return
    (finding,) = findings
    assert reasons in finding.what and '$NO_PROXY,}10.0.0.7" && export no_proxy="$NO_PROXY"' in finding.do
    if not use_proxy:
        assert finding.level.value == "warning" and "the trainer goes around it" in finding.why


@pytest.mark.parametrize(
    ("spared", "level"),
    [
        ({}, "error"),
        ({"no_proxy": "10.0.0.0/8", "NO_PROXY": "10.0.0.7"}, "error"),  # the lower-case one counts
        ({"NO_PROXY": "10.0.0.7"}, "warning"),
        ({"no_proxy": "10.0.0.7:8000", "NO_PROXY": "10.0.0.7"}, "warning"),
    ],
)
def test_it_is_an_error_when_the_trainers_own_requests_are_caught(spared, level):
    (finding,) = judge(PROXY | spared, use_proxy=True)
    assert finding.level.value == level


def test_a_server_outside_may_be_reached_through_the_proxy():
    assert judge(PROXY, use_proxy=True, url="http://search.example.com/retrieve") == []
    assert judge({"https_proxy": "http://proxy:3128"}, use_proxy=True) == []  # of another scheme
    assert judge({}, use_proxy=True) == []


@pytest.fixture
def refusing_proxy():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(403, "blocked by the proxy")

        do_GET = do_CONNECT = lambda self: self.send_error(403, "blocked by the proxy")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_real_proxy_that_answers_403_is_found_and_the_advice_helps(
    no_variables, refusing_proxy, serve_documents
):
    no_variables.setenv("http_proxy", refusing_proxy)
    with serve_documents([{"id": "0", "contents": '"T"\ntext'}]) as address:
        url = f"{address}/retrieve"
        import os

        def look(use_proxy: bool):
            (server,) = look_at_servers(Question(url, use_proxy=use_proxy, timeout=0.5))
            machine = machine_with(servers=(server,), environment=kept_environment(os.environ))
            return server, found(
                facts_with({"retriever.use_proxy": use_proxy}, machine), "proxy", "retriever"
            )

        server, findings = look(use_proxy=True)
        assert "403" in server.problem
        assert {finding.check for finding in findings} == {"proxy", "retriever"}
        assert all(finding.level.value == "error" for finding in findings)
        server, (finding,) = look(use_proxy=False)
        assert server.problem is None and finding.level.value == "warning"
        for name in ("NO_PROXY", "no_proxy"):  # what the finding says
            no_variables.setenv(name, "127.0.0.1")
        server, findings = look(use_proxy=True)
        assert server.problem is None and findings == []
