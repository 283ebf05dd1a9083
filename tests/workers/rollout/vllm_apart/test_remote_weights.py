"""`RemoteVllmEngine` with new weights, asleep, and what it counts; servers that speak vLLM's protocol."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from protocol_server import VOCABULARY, expected_turn
from remote_parts import GREEDY, WEIGHTS, drain, hold, wait_until

from verl.workers.rollout.engine import SamplingParams
from verl.workers.rollout.vllm.remote_engine import RemoteVllmEngine


def test_without_weights_nothing_runs(start):
    engine, (server,) = start(version=None)
    session_id = engine.open([1], SamplingParams(3, **GREEDY))
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.step()
    assert engine.version == -1 and not server.requests
    engine.update_weights(WEIGHTS, 5)
    assert drain(engine)[session_id].token_ids == expected_turn([1], 3, 5)


def test_turns_under_way_go_on_with_new_weights_and_no_stale_state(start):
    engine, servers = start(2)
    hold(servers, 14)
    ids = [engine.open([i], SamplingParams(30, seed=i)) for i in range(6)]
    for version in (1, 2):
        wait_until(lambda: all(len(engine.partial(i).token_ids) >= 8 * version for i in ids))  # noqa: B023
        engine.update_weights(WEIGHTS, version)
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


@pytest.mark.slow
def test_turns_that_end_while_they_are_broken_off_are_handed_out_as_they_ended(start):
    engine, _ = start()
    ids = {engine.open([i], SamplingParams(1 + i % 7, seed=i)): 1 + i % 7 for i in range(48)}
    completions = {}
    for version in range(1, 60):
        engine.update_weights(WEIGHTS, version)
        for completion in engine.step():
            completions[completion.session_id] = completion
        if not engine.has_runnable:
            break
    completions |= drain(engine)
    assert {i: len(completion.token_ids) for i, completion in completions.items()} == ids


def test_a_server_that_does_not_take_the_weights_is_not_used_any_more(start):
    engine, (bad, good) = start(2)
    bad.refuses_weights = True
    waiting = [engine.open([i], SamplingParams(3, **GREEDY)) for i in range(4)]
    drain(engine)
    engine.update_weights(WEIGHTS, 1)
    for session_id in waiting:
        engine.resume(session_id, [9], SamplingParams(3, **GREEDY))
    assert all(got.version_first == 1 for got in drain(engine).values())
    assert bad.weights == 0 and engine.stats()["servers"] == 1.0
    good.refuses_weights = True
    with pytest.raises(RuntimeError, match="no vLLM server is left.*missing weights"):
        engine.update_weights(WEIGHTS, 2)


def test_a_server_that_keeps_kv_state_of_older_weights_is_not_used_any_more(start):
    engine, (bad, _) = start(2)
    bad.keeps_kv_state = True
    engine.update_weights(WEIGHTS, 1)
    ids = [engine.open([i], SamplingParams(6, **GREEDY)) for i in range(4)]
    completions = drain(engine)
    assert [completions[i].token_ids for i in ids] == [expected_turn([i], 6, 1) for i in range(4)]
    assert engine.stats()["servers"] == 1.0


def test_after_a_transfer_that_failed_turns_wait_for_the_next_one(start):
    engine, _ = start()
    session_id = engine.open([6], SamplingParams(5, **GREEDY))

    def broken():
        yield WEIGHTS[0]
        raise ZeroDivisionError("gathering failed")

    with pytest.raises(ZeroDivisionError):
        engine.update_weights(broken(), 1)
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.step()
    engine.update_weights(WEIGHTS, 2)
    assert drain(engine)[session_id].version_last == 2


def test_processes_that_share_servers_begin_with_different_ones(start):
    engine, servers = start(2)
    other = RemoteVllmEngine(
        [server.url for server in servers], max_model_len=256, vocab_size=VOCABULARY, sender=None, rank=1
    )
    try:
        other.update_weights([], 0)
        for each in (engine, other):
            each.open([1], SamplingParams(2, **GREEDY))
            drain(each)
        assert [len(server.requests) for server in servers] == [1, 1]
    finally:
        other.shutdown()


def test_a_process_that_does_not_send_waits_until_the_servers_have_the_weights(start):
    engine, (server,) = start()
    other = RemoteVllmEngine([server.url], max_model_len=256, vocab_size=VOCABULARY, sender=None, rank=1)
    try:
        walked = []
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.update_weights, (walked.append(i) or ("w", i) for i in range(3)), 1)
            wait_until(lambda: len(walked) == 3)
            assert not waiting.done()
            engine.update_weights(WEIGHTS, 1)
            waiting.result(5)
        session_id = other.open([3], SamplingParams(4, **GREEDY))
        assert drain(other)[session_id].token_ids == expected_turn([3], 4, 1)
        assert "prefilled_tokens" in engine.stats() and "prefilled_tokens" not in other.stats()
    finally:
        other.shutdown()


def test_turns_of_a_process_that_is_late_go_on_with_the_version_that_the_server_then_has(start):
    engine, (server,) = start()
    other = RemoteVllmEngine([server.url], max_model_len=256, vocab_size=VOCABULARY, sender=None, rank=1)
    try:
        other.update_weights([], 0)
        hold([server], 10)
        session_id = other.open([3], SamplingParams(20, **GREEDY))
        wait_until(lambda: other.partial(session_id).token_ids)
        engine.update_weights(WEIGHTS, 1)
        hold([server], None)
        got = drain(other)[session_id]
        assert (got.version_first, got.version_last, len(got.token_ids)) == (0, 1, 20)
    finally:
        other.shutdown()


def test_a_server_that_never_gets_the_weights_is_named(start):
    engine, (server,) = start(sender=None, version=None, update_timeout=0.1)
    with pytest.raises(RuntimeError, match=f"{server.url}: it has the weights default instead of 4"):
        engine.update_weights(WEIGHTS, 4)


# ---- memory, statistics, the end ----


def test_asleep_nothing_runs_and_awake_the_turns_go_on(start):
    engine, (server,) = start(prepare=lambda server: setattr(server, "sleep_mode", True))
    hold([server], 10)
    session_id = engine.open([2], SamplingParams(30, **GREEDY))
    wait_until(lambda: engine.partial(session_id).token_ids)
    assert engine.sleep(1) == 0
    hold([server], None)
    with pytest.raises(RuntimeError, match="asleep"):
        engine.step()
    engine.wake()
    assert drain(engine)[session_id].token_ids == expected_turn([2], 30, 0)
    engine.sleep(2)
    session_id = engine.open([3], SamplingParams(2, **GREEDY))
    engine.wake()
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.step()
    engine.update_weights(WEIGHTS, 1)
    assert drain(engine)[session_id].token_ids == expected_turn([3], 2, 1)
    assert [call for call in server.calls if "sleep" in call or "wake" in call] == ["/sleep", "/wake_up"] * 2


def test_servers_without_sleep_mode_are_left_awake(start):
    engine, (server,) = start()
    engine.sleep(1)
    engine.wake()
    assert "/sleep" not in server.calls


def test_statistics_count_turns_tokens_and_servers(start):
    engine, (server,) = start()
    ids = [engine.open([i], SamplingParams(5, **GREEDY)) for i in range(3)]
    drain(engine)
    figures = engine.stats()
    assert (figures["running"], figures["queued"], figures["parked"]) == (0.0, 0.0, 3.0)
    assert figures["generated_tokens"] == 15.0 and figures["weight_version"] == 0.0
    assert figures["prefilled_tokens"] == 7.0 and figures["kv_used_share"] == 0.5
    hold([server], 8)
    engine.resume(ids[0], [4], SamplingParams(5, **GREEDY))
    server.metrics_seconds = 3.0
    start_time = time.monotonic()
    figures = engine.stats()
    assert time.monotonic() - start_time < 2.0, "waits for a busy server"
    assert figures["running"] + figures["queued"] == 1.0 and figures["kv_used_share"] == 0.5


def test_no_more_requests_are_in_flight_than_allowed(start):
    engine, (server,) = start(max_requests=3)
    hold([server], 4)
    for i in range(9):
        engine.open([i], SamplingParams(6, **GREEDY))
    wait_until(lambda: len(server.requests) >= 3)
    time.sleep(0.01)
    assert len(server.requests) == 3
    hold([server], None)
    assert len(drain(engine)) == 9


def test_shutdown_ends_the_thread_and_may_be_called_twice(start):
    engine, (server,) = start()
    hold([server], 20)
    engine.open([1], SamplingParams(200, **GREEDY))
    wait_until(lambda: server.requests)
    engine.shutdown()
    assert not engine._thread.is_alive()
    engine.shutdown()
    wait_until(lambda: server.dropped == 1)
