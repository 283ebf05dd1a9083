"""`RemoteEngine` against servers that speak vLLM's protocol: sessions, stops, faults."""

import asyncio

import pytest
from protocol_server import expected_turn, log_prob
from remote_parts import GREEDY, WEIGHTS, drain, hold, wait_until

from verl.sessions.engine_contract import EngineUnavailable, SamplingParams
from verl.sessions.stop import StopCondition
from verl.workers.rollout.remote import client


class ByteTokenizer:
    """Token i is the byte i, written as GPT-2 writes it."""

    added_tokens_decoder = {}

    def get_vocab(self):
        from verl.sessions.stop import _byte_level_alphabet

        return _byte_level_alphabet()


def test_many_sessions_get_their_own_tokens_and_both_log_probs(start):
    engine, servers = start(2, version=3)
    prompts = [[i, 7, i * 3 % 250] for i in range(40)]
    ids = [
        engine.open(prompt, SamplingParams(5 + i % 9, temperature=1.0, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    completions = drain(engine)
    for i, (session_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        got = completions[session_id]
        assert got.token_ids == expected_turn(prompt, 5 + i % 9, 3, seed=i)
        assert got.log_probs == [log_prob(token) for token in got.token_ids]
        assert got.model_log_probs == [2 * log_prob(token) for token in got.token_ids]
        assert (got.finish_reason, got.stop_string) == ("length", None)
        assert got.version_first == got.version_last == 3
    assert [len(server.requests) for server in servers] == [20, 20]


def test_requests_leave_nothing_to_the_servers_defaults(start):
    engine, (server,) = start()
    params = SamplingParams(6, 0.7, 0.9, 40, 0.0, seed=(1 << 64) - 1, eos_token_ids=frozenset({9, 4}))
    engine.open([1, 2], params)
    drain(engine)
    body = server.requests[0]
    sampling = body["sampling_params"]
    assert body["token_ids"] == [1, 2] and body["stream"] is True and sampling["max_tokens"] == 6
    names = ("temperature", "top_p", "top_k", "min_p")
    assert [sampling[name] for name in names] == [0.7, 0.9, 40, 0.0]
    assert sampling["extra_args"] == {"session_seed": (1 << 64) - 1, "draw_offset": -2}
    assert sampling["stop_token_ids"] == [4, 9] and sampling["ignore_eos"] is True
    assert sampling["repetition_penalty"] == 1.0 and sampling["logprobs"] == 2


def test_a_turn_ends_at_the_token_that_completes_a_stop_string_and_what_came_behind_is_dropped(
    start, monkeypatch
):
    engine, _ = start()
    monkeypatch.setattr(client, "STREAM_INTERVAL", 50)
    turns = {prompt: expected_turn([prompt], 40, 0) for prompt in range(200)}
    prompt, end = next(
        (prompt, end)
        for prompt, tokens in turns.items()
        for end in range(20, 39)
        if all(32 < token < 127 for token in tokens[end - 1 : end + 1]) and tokens.count(tokens[end]) == 1
    )
    string = bytes(turns[prompt][end - 1 : end + 1]).decode()
    stop = StopCondition(ByteTokenizer(), ["</absent>", string])
    session_id = engine.open([prompt], SamplingParams(40, stop=stop, **GREEDY))
    got = drain(engine)[session_id]
    assert got.token_ids == turns[prompt][: end + 1]
    assert (got.finish_reason, got.stop_string) == ("stop", string)
    assert len(got.log_probs) == len(got.model_log_probs) == end + 1


def test_a_turn_goes_on_where_the_server_sees_a_stop_string_and_the_tokens_do_not(start):
    engine, (server,) = start()
    server.early_stop = 7
    session_id = engine.open([5, 6], SamplingParams(20, **GREEDY))
    got = drain(engine)[session_id]
    assert got.token_ids == expected_turn([5, 6], 20, 0)
    assert [len(body["token_ids"]) for body in server.requests] == [2, 9, 16]


@pytest.mark.parametrize("ignore", [False, True])
def test_an_end_of_sequence_token_is_kept_and_ends_the_turn_unless_it_is_ignored(start, ignore):
    engine, _ = start()
    sampled = expected_turn([9], 15, 0)
    params = SamplingParams(15, eos_token_ids=frozenset({sampled[6]}), ignore_eos=ignore, **GREEDY)
    session_id = engine.open([9], params)
    got = drain(engine)[session_id]
    assert got.token_ids == (sampled if ignore else sampled[: sampled.index(sampled[6]) + 1])
    assert got.finish_reason == ("length" if ignore else "eos")


def test_the_next_turn_goes_to_the_same_server_with_all_tokens(start):
    engine, servers = start(3)
    ids = [engine.open([i], SamplingParams(4, **GREEDY)) for i in range(6)]
    first = drain(engine)
    for i, session_id in enumerate(ids):
        engine.resume(session_id, [100 + i, 3], SamplingParams(5, **GREEDY))
    second = drain(engine)
    for i, session_id in enumerate(ids):
        context = [i, *first[session_id].token_ids, 100 + i, 3]
        assert second[session_id].token_ids == expected_turn(context, 5, 0)
    for server in servers:
        prompts = [body["token_ids"] for body in server.requests]
        assert len(prompts) == 4
        assert all(any(longer[: len(short)] == short for longer in prompts[2:]) for short in prompts[:2])


def test_close_drops_the_request_at_the_server_and_the_others_go_on(start):
    engine, (server,) = start()
    hold([server], 14)
    doomed = engine.open([4], SamplingParams(200, **GREEDY))
    other = engine.open([5], SamplingParams(12, **GREEDY))
    wait_until(lambda: engine.partial(doomed).token_ids)
    engine.close(doomed)
    assert set(drain(engine)) == {other}
    wait_until(lambda: server.dropped == 1)
    with pytest.raises(ValueError, match="no session"):
        engine.resume(doomed, [1], SamplingParams(1))
    assert engine.stats()["parked"] == 1.0


# ---- faults ----


def test_sessions_of_a_server_that_dies_go_on_at_another(start):
    engine, (first, second) = start(2)
    hold([first, second], 10)
    ids = [engine.open([i], SamplingParams(40, seed=i)) for i in range(8)]
    wait_until(lambda: all(engine.partial(i).token_ids for i in ids))
    first.kill()
    hold([second], None)
    completions = drain(engine)
    for i, session_id in enumerate(ids):
        assert completions[session_id].token_ids == expected_turn([i], 40, 0, seed=i)
    assert engine.stats()["servers"] == 1.0
    later = engine.open([77], SamplingParams(3, **GREEDY))
    assert drain(engine)[later].token_ids == expected_turn([77], 3, 0)
    engine.load_weights(WEIGHTS, 1)
    assert second.label == "1"


def test_without_any_server_left_the_error_names_all_of_them(start):
    engine, servers = start(2)
    hold(servers, 20)
    engine.open([1], SamplingParams(200, **GREEDY))
    for server in servers:
        server.kill()
    with pytest.raises(RuntimeError, match="no server is left") as error:
        drain(engine)
    assert all(server.url in str(error.value) for server in servers)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data: {nonsense", "no part of a completion"),
        ("data: [1, 2]", "no part of a completion"),
        ('data: {"choices": [{"token_ids": [1, 2], "logprobs": null}]}', "no part of a completion"),
        (
            'data: {"choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": null}]}}]}',
            "no part of a completion",
        ),
        (
            'data: {"choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": -1, "top_logprobs": '
            '[{"token_id": 1, "logprob": -1}]}]}}]}',
            "model's own log-prob",
        ),
        (
            'data: {"choices": [{"token_ids": [4000], "logprobs": {"content": [{"logprob": -1, '
            '"top_logprobs": [{"token_id": 4000, "logprob": -1}, {"token_id": 5, "logprob": -2}]}]}}]}',
            "the model has 256 tokens",
        ),
    ],
)
def test_garbage_is_an_error_that_names_the_server(start, line, message):
    engine, (server,) = start()
    server.garbage = line
    engine.open([1], SamplingParams(5, **GREEDY))
    with pytest.raises(RuntimeError, match=message) as error:
        drain(engine)
    assert server.url in str(error.value)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("max_model_len", 100, "allows 100 tokens per sequence and 256 are needed"),
        ("mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_at_once(start, attribute, value, message):
    with pytest.raises(ValueError, match=message):
        start(prepare=lambda server: setattr(server, attribute, value))


def test_a_server_without_the_route_for_tokens_is_refused_with_the_flag_that_it_lacks(start):
    with pytest.raises(EngineUnavailable, match="start it with --enable-scale-out"):
        start(prepare=lambda server: setattr(server, "serves_tokens", False))


@pytest.mark.parametrize("attribute", ["extension", "is_in_dev_mode"])
def test_plain_vllm_samples_with_its_own_weights_and_says_that_it_takes_no_others(start, attribute):
    engine, (server,) = start(version=None, prepare=lambda server: plain(server, attribute))
    session_id = engine.open([4], SamplingParams(6, seed=3, drawn_before=2))
    got = drain(engine)[session_id]
    seed = server.requests[0]["sampling_params"]["seed"]
    assert got.token_ids == expected_turn([4], 6, None, seed=seed) and seed not in (3, 5)
    assert got.model_log_probs == got.log_probs  # as nothing is cut or tempered
    with pytest.raises(ValueError, match="log-probs from plain vLLM"):
        engine.open([4], SamplingParams(6, temperature=0.7))
    with pytest.raises(ValueError, match="takes no new weights; start it with VLLM_SERVER_DEV_MODE=1"):
        engine.load_weights(WEIGHTS, 1)
    assert engine.version == 0


def plain(server, attribute):
    setattr(server, attribute, None if attribute == "extension" else False)


def test_a_full_session_is_not_sent_when_the_request_before_it_ends_late(start):
    engine, (server,) = start()
    session_id = engine.open([1, 2], SamplingParams(3, **GREEDY))
    drain(engine)
    engine.resume(session_id, [3] * engine.max_model_len, SamplingParams(3, **GREEDY))
    engine._loop.call_soon_threadsafe(engine._start, engine._sessions[session_id])  # as its last task does
    engine._call(asyncio.sleep(0))
    assert engine._sessions[session_id].task is None
    (completion,) = engine.step()
    assert (completion.finish_reason, completion.token_ids) == ("length", []) and len(server.requests) == 1
