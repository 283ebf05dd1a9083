"""`RemoteEngine` with new weights, and with none; servers that speak vLLM's protocol."""

import json

import pytest
from protocol_server import VOCABULARY, ProtocolServer, expected_turn
from ranks import run_ranks
from remote_parts import GREEDY, WEIGHTS, VersionSender, drain, hold, wait_until

from verl.sessions.engine_contract import EngineUnavailable, SamplingParams
from verl.workers.rollout.remote.remote_engine import RemoteEngine


def test_without_weights_nothing_runs(start):
    engine, (server,) = start(version=None)
    session_id = engine.open([1], SamplingParams(3, **GREEDY))
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.step()
    assert engine.version == -1 and not server.requests
    engine.load_weights(WEIGHTS, 5)
    assert drain(engine)[session_id].token_ids == expected_turn([1], 3, 5)


def test_turns_under_way_go_on_with_new_weights_and_no_stale_state(start):
    engine, servers = start(2)
    hold(servers, 14)
    ids = [engine.open([i], SamplingParams(30, seed=i)) for i in range(6)]
    for version in (1, 2):
        wait_until(lambda: all(len(engine.partial(i).token_ids) >= 8 * version for i in ids))  # noqa: B023
        engine.load_weights(WEIGHTS, version)
        hold(servers, (22, None)[version - 1])
        assert [server.label for server in servers] == [str(version)] * 2
    completions = drain(engine)
    for i, session_id in enumerate(ids):
        got = completions[session_id]
        assert (got.version_first, got.version_last, len(got.token_ids)) == (0, 2, 30)
        switches = [
            (a, b)
            for a in range(1, 30)
            for b in range(a, 30)
            if got.token_ids
            == [
                *(first := expected_turn([i], a, 0, i)),
                *(second := expected_turn([i, *first], b - a, 1, i)),
                *expected_turn([i, *first, *second], 30 - b, 2, i),
            ]
        ]
        assert switches, "no pair of positions explains the tokens by versions 0, 1 and 2 in turn"
    assert servers[0].calls[-5:] == [
        "/update_weight_version",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]


def test_a_server_that_does_not_take_the_weights_is_not_used_any_more(start):
    engine, (bad, good) = start(2)
    bad.refuses_weights = True
    waiting = [engine.open([i], SamplingParams(3, **GREEDY)) for i in range(4)]
    drain(engine)
    engine.load_weights(WEIGHTS, 1)
    for session_id in waiting:
        engine.resume(session_id, [9], SamplingParams(3, **GREEDY))
    assert all(got.version_first == 1 for got in drain(engine).values())
    assert bad.weights == 0 and engine.stats()["servers"] == 1.0
    good.refuses_weights = True
    with pytest.raises(RuntimeError, match="no server is left.*missing weights"):
        engine.load_weights(WEIGHTS, 2)


def share_servers(rank, world_size, urls, folder):
    """Of a process that shares the servers with another: updates, one of which a server refuses."""
    sender = VersionSender()
    told = []
    places = {"rank": rank, "world_size": world_size}
    engine = RemoteEngine(urls, max_model_len=256, vocab_size=VOCABULARY, sender=sender, **places)
    try:
        for version in range(3):
            engine.load_weights(WEIGHTS, version)
            ids = [engine.open([i], SamplingParams(3, **GREEDY)) for i in range(4)]
            ended = drain(engine)
            turns = [ended[i].token_ids for i in ids]
            told.append([sender.urls, turns, engine.stats()["servers"]])
        with pytest.raises(EngineUnavailable, match=r"no server is left.*missing weights"):
            engine.load_weights(WEIGHTS, 3)
    finally:
        engine.shutdown()
    (folder / f"{rank}.json").write_text(json.dumps(told))


@pytest.mark.slow
def test_processes_share_the_servers_out_and_know_all_of_one_that_failed(tmp_path):
    with ProtocolServer() as first, ProtocolServer() as second, ProtocolServer() as third:
        second.refuses_from = 1
        first.refuses_from = 3
        third.refuses_from = 3
        urls = [first.url, second.url, third.url]
        run_ranks(share_servers, 2, urls, tmp_path)
        told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        assert [told[0][0][0], told[1][0][0]] == [[first.url, third.url], [second.url]]
        assert [told[0][2][0], told[1][2][0]] == [[first.url, third.url], []]
        for rank in range(2):
            assert [servers for _, _, servers in told[rank]] == [3.0, 2.0, 2.0]
            for version, (_, turns, _) in enumerate(told[rank]):
                assert turns == [expected_turn([i], 3, version) for i in range(4)]
