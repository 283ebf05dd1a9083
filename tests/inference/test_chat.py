"""Messages to ids: a turn that was sampled is kept as it is, whatever clients and templates do to it."""

from __future__ import annotations

import random

import pytest
from served import tokenizer

from verl.data.rl_dataset import encode_prompt, prompt_text
from verl.inference.chat import ChatCodec, Transcript, stream_limit
from verl.inference.engine_thread import TurnResult
from verl.utils.http_border import ApiError

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "template"])
def codec(request):
    return ChatCodec(tokenizer(request.param), 100_000)


def play(codec, transcript, messages, ids, tools=None, stop=None):
    """A turn with these ids, as the app runs it: (place, reply)."""
    place = transcript.take_segment(codec, messages, tools)
    reply = codec.reply(ids, stop, tools is not None, False)
    transcript.add(
        place, TurnResult(ids, [-1.0] * len(ids), [-1.0] * len(ids), [0] * len(ids), "eos", None, None), reply
    )
    return place, reply


class Player:
    """A client of one session by chance, and its own account of what went into the model."""

    def __init__(self, codec, rng):
        self.codec = codec
        self.rng = rng
        self.transcript = Transcript()
        self.messages = [user(self.text())]
        self.tools = None
        self.contexts: dict[int, list[int]] = {}  # by id of the segment
        self.sampled: dict[int, list[int]] = {}
        self.is_extension = False
        self.counts = {"extended": 0, "new": 0}

    def text(self):
        words = (
            "why",
            " é",
            "\n",
            " <think>",
            "</think>",
            "<|endoftext|>",
            " Amber",
            "1 2",
            "<tool_call>",
            "日本",
        )
        return "".join(self.rng.choices(words, k=self.rng.randint(1, 6)))

    def sample(self):
        """Ids by chance, which hardly ever are those that their text has when it is encoded."""
        ids = [self.rng.randrange(2560) for _ in range(self.rng.randint(1, 8))]
        if self.rng.random() < 0.2:
            ids = self.codec.tokenizer.encode('<think>hm</think> <tool_call>{"name": "search"}</tool_call>')
        return ids + [self.codec.tokenizer.eos_token_id] * (self.rng.random() < 0.5)

    def turn(self):
        place = self.transcript.take_segment(self.codec, self.messages, self.tools)
        assert place.is_new != self.is_extension
        self.counts["new" if place.is_new else "extended"] += 1
        key = id(place)
        if place.is_new:
            self.contexts[key] = []
            self.sampled[key] = []
        if self.rng.random() < 0.1:  # the client went away
            self.transcript.put_back(place)
            place = self.transcript.take_segment(self.codec, self.messages, self.tools)
            assert place.is_new != self.is_extension
            key = id(place)
            if place.is_new:
                self.contexts[key] = []
                self.sampled[key] = []
        ids = self.sample()
        self.contexts[key] += [*place.new_ids, *ids]
        self.sampled[key] += ids
        reply = self.codec.reply(ids, None, self.tools is not None, False)
        result = TurnResult(ids, [-0.5] * len(ids), [-0.5] * len(ids), [3] * len(ids), "eos", None, None)
        self.transcript.add(place, result, reply)
        self.messages = [*self.messages, dict(reply[0])]

    def go_on(self):
        """What the client sends next: mostly its history with more behind it."""
        what = self.rng.choice(["extend"] * 6 + ["think", "edit", "drop", "tools", "system", "strip"])
        self.is_extension = what in ("extend", "strip")
        last = dict(self.messages[-1])
        if what == "strip" and last["content"]:
            last["content"] = last["content"].strip()
            self.messages = [*self.messages[:-1], last]
        elif what == "think":
            changed = (last["content"] or "").split("</think>")[-1]
            self.is_extension = changed.strip() == (last["content"] or "").strip()
            last["content"] = changed
            self.messages = [*self.messages[:-1], last]
        elif what == "edit":
            self.messages = [user(self.text() + f" edited {self.rng.random()}"), *self.messages[1:]]
        elif what == "drop":
            self.messages = self.messages[-1:]
        elif what == "tools":
            self.tools = [TOOL | {"function": {"name": f"tool {self.rng.random()}"}}]
        elif what == "system":
            self.messages = [{"role": "system", "content": f"{self.rng.random()}"}, *self.messages]
        for _ in range(self.rng.randint(1, 2)):
            if calls := self.messages[-1].get("tool_calls"):
                more = {"role": "tool", "tool_call_id": calls[0]["id"], "content": self.text()}
            else:
                more = user(self.text())
            self.messages = [*self.messages, more]

    def check(self):
        for segment in self.transcript.segments:
            ids = segment.prompt_ids + segment.response_ids
            assert ids == self.contexts[id(segment)]
            kept = [i for i, m in zip(segment.response_ids, segment.response_mask, strict=True) if m]
            assert kept == self.sampled[id(segment)] and len(kept) < len(ids)
            assert len(segment.log_probs) == len(segment.versions) == len(segment.response_ids)
            assert [v for v, m in zip(segment.versions, segment.response_mask, strict=True) if not m].count(
                -1
            ) == (len(segment.response_ids) - len(kept))


@pytest.mark.parametrize("histories", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_no_sampled_token_of_fuzzed_histories_is_encoded_again(codec, histories):
    rng = random.Random(0)
    counts = {"extended": 0, "new": 0}
    for _ in range(histories):
        player = Player(codec, rng)
        player.turn()
        for _ in range(rng.randint(1, 4)):
            player.go_on()
            player.turn()
        player.check()
        for name, number in player.counts.items():
            counts[name] += number
    assert counts["extended"] > histories and counts["new"] > histories, counts


def test_without_a_template_a_prompt_of_several_messages_is_that_of_training():
    made = tokenizer(False)
    codec = ChatCodec(made, 100_000)
    prompt = [{"role": "system", "content": "Be brief."}, user("Who?")]
    assert codec.prompt_ids(prompt, None) == encode_prompt(made, prompt_text(made, prompt))
    turn = {"role": "assistant", "content": " Ada"}
    assert codec.prompt_ids([*prompt, turn, user("Why?")], None) == made.encode("Be brief.\nWho? AdaWhy?")


def test_only_the_new_messages_are_given_to_the_tokenizer(codec, monkeypatch):
    transcript = Transcript()
    messages = [user("a question")]
    ids = codec.tokenizer.encode("SECRET")
    _, reply = play(codec, transcript, messages, ids)
    given = []
    for owner, name in ((codec.codec, "encode"), (codec.tokenizer, "encode")):
        old = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda text, *more, old=old, **keys: (given.append(text), old(text, *more, **keys))[1],
            raising=False,
        )
    place = transcript.take_segment(codec, [*messages, reply[0], user("and more")], None)
    assert not place.is_new and given and not any("SECRET" in text or "a question" in text for text in given)


def test_a_context_is_the_templates_text_though_turns_are_never_rendered():
    codec = ChatCodec(tokenizer(True), 10_000)
    transcript = Transcript()
    messages = [{"role": "system", "content": "Be brief."}, user("one?")]
    for text in ("first", "second", "third"):
        ids = codec.tokenizer.encode(text + "<|im_end|>")
        place, reply = play(codec, transcript, messages, ids)
        messages = [*messages, reply[0], user(f"after {text}")]
    place = transcript.take_segment(codec, messages, None)
    whole = codec.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    segment = place
    assert codec.codec.decode(segment.prompt_ids + segment.response_ids + place.new_ids) == whole
    assert len(transcript.segments) == 1 and whole.count("<|im_end|>\n<|im_start|>") == 8


def test_thinking_that_the_template_strips_stays_in_the_context():
    codec = ChatCodec(tokenizer(True), 10_000)
    transcript = Transcript()
    messages = [user("one?")]
    ids = codec.tokenizer.encode("<think>long thoughts</think>yes<|im_end|>")
    _, reply = play(codec, transcript, messages, ids)
    history = [*messages, reply[0], user("two?")]
    rendered = codec.tokenizer.apply_chat_template(history, tokenize=False)
    assert "thoughts" not in rendered
    place = transcript.take_segment(codec, history, None)
    assert not place.is_new and place.response_ids == ids
    transcript.put_back(place)
    stripped = [*messages, {**reply[0], "content": "yes"}, user("two?")]
    assert transcript.take_segment(codec, stripped, None).is_new


def test_an_older_segment_is_gone_on_with_and_one_under_way_is_not(codec):
    transcript = Transcript()
    _, first = play(codec, transcript, [user("a")], [5, 6])
    _, other = play(codec, transcript, [user("b")], [7, 8])
    assert len(transcript.segments) == 2
    place = transcript.take_segment(codec, [user("a"), first[0], user("more")], None)
    assert place is transcript.segments[0]
    # A retry beside it.
    assert transcript.take_segment(codec, [user("a"), first[0], user("more")], None).is_new
    transcript.put_back(place)
    assert transcript.take_segment(codec, [user("a"), first[0], user("x")], None) is place


def test_a_stop_string_is_cut_off_and_may_be_written_back(codec):
    ids = codec.tokenizer.encode("<search> x</search>")
    reply = codec.reply(ids, "</search>", False, False)
    assert reply[0]["content"] == "<search> x" and "<search> x</search>" in [
        each["content"] for each in reply
    ]
    assert codec.reply(ids, "</search>", False, True)[0]["content"] == "<search> x</search>"
    transcript = Transcript()
    play(codec, transcript, [user("a")], ids, stop="</search>")
    back = {"role": "assistant", "content": "<search> x</search>"}
    assert not transcript.take_segment(codec, [user("a"), back, user("b")], None).is_new


def test_calls_become_tool_calls_and_come_back_as_an_extension(codec):
    transcript = Transcript()
    messages = [user("a")]
    ids = codec.tokenizer.encode(
        'one moment <tool_call>{"name": "search", "arguments": {"q": "b"}}</tool_call>'
    )
    _, reply = play(codec, transcript, messages, ids, tools=[TOOL])
    (call,) = reply[0]["tool_calls"]
    assert (call["function"], reply[0]["content"]) == (
        {"name": "search", "arguments": '{"q": "b"}'},
        "one moment ",
    )
    other_spelling = {**call, "function": {"name": "search", "arguments": '{ "q":"b" }'}}
    history = [*messages, {**reply[0], "tool_calls": [other_spelling]}]
    history.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
    place = transcript.take_segment(codec, history, [TOOL])
    assert not place.is_new and "<tool_response>" in codec.codec.decode(place.new_ids)
    transcript.put_back(place)
    assert transcript.take_segment(codec, history, None).is_new  # other tools


def test_what_leaves_no_room_is_refused_before_long_texts_are_encoded(codec):
    short = ChatCodec(codec.tokenizer, 200)
    for text in ("word " * 200, "x" * 10_000_000):
        with pytest.raises(ApiError, match="context_length_exceeded"):
            short.prompt_ids([user(text)], None)
    transcript = Transcript()
    _, reply = play(short, transcript, [user("a")], [5] * 100)
    with pytest.raises(ApiError, match="context_length_exceeded"):
        transcript.take_segment(short, [user("a"), reply[0], user("word " * 100)], None)
    place = transcript.take_segment(short, [user("a"), reply[0], user("b")], None)
    assert not place.is_new


def test_stop_conditions_are_bounded(codec):
    stop = codec.codec.stop
    assert stop(("a",)) is stop(("a",)) and stop(()) is None
    for number in range(100):
        stop((f"stop {number}",))
    assert stop.cache_info().currsize == 64


@pytest.mark.parametrize(
    ("text", "stops", "tools", "shown"),
    [
        ("abc", [], False, "abc"),
        ("abc</sea", ["</search>"], False, "abc"),
        ("abc</search>", ["</search>"], False, "abc"),
        ("abc</x", ["</search>"], False, "abc</x"),
        ("a <tool", [], True, "a "),
        ("a <tool", [], False, "a <tool"),
        ("a <tool_call>{}", [], True, "a "),
        ("ab", ["bc", "abd"], False, ""),
    ],
)
def test_what_may_still_be_hidden_is_not_streamed(text, stops, tools, shown):
    assert text[: stream_limit(text, stops, tools)] == shown
