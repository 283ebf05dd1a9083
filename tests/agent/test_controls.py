"""What searches find with each `retriever` of a set, through the agent and a real retrieval server."""

from __future__ import annotations

import random
import re

import pytest
import torch
from scripted_engine import ScriptedEngine, byte_tokenizer

from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
from search_r1.search.client import SearchClient
from verl.data.controls import with_retriever
from verl.data.rl_dataset import RLHFDataset
from verl.trainer.ppo.collection import prompt_batch, with_seeds

TOWNS = ["Arlen", "Bora", "Cale", "Doria", "Elm", "Fenna"]
TOKENIZER = byte_tokenizer()
CONFIG = GenerationConfig(
    max_turns=2,
    max_start_length=60,
    max_prompt_length=1200,
    max_response_length=90,
    max_obs_length=400,
    topk=2,
)
# Of each town a passage about its founder and one about its river.
DOCUMENTS = [
    {"id": f"{town}{kind}", "contents": f'"{town} {kind}"\nThe {kind} of {town} is {town}{kind}.'}
    for town in TOWNS
    for kind in ("founder", "river")
]


@pytest.fixture(scope="module")
def url(serve_documents):
    with serve_documents(DOCUMENTS, topk=2) as address:
        yield f"{address}/retrieve"


def questions(towns=TOWNS, asked="Who is the founder", **extra_info) -> RLHFDataset:
    rows = [
        {
            "data_source": "towns",
            "prompt": [{"role": "user", "content": f"Question: {asked} of {town}?\n"}],
            "reward_model": {"ground_truth": {"target": [f"{town}founder"]}},
            "extra_info": extra_info,
        }
        for town in towns
    ]
    return RLHFDataset(rows, TOKENIZER)


def searches_for_its_town(prompt: str, turn: int) -> str:
    """Search for the founder and the river of the town in the prompt, then answer."""
    town = re.search(r"of (\w+)\?", prompt)[1]
    queries = [f"founder of {town}", f"river {town}"]
    return f"<search> {queries[turn]} </search>" if turn < 2 else "<answer> none </answer>"


def ask(url, dataset, order=None, script=searches_for_its_town):
    """Ask the rows of a data set in an order; returns the record of each row, in the order of the rows, with
    its `response` ids, and how many searches the client made.
    """
    order = list(order or range(len(dataset)))
    prompts = prompt_batch([dataset[row] for row in order], "test")
    batch = with_seeds(prompts, torch.arange(len(order)), validate=True)
    with SearchClient(url, topk=2, timeout=10) as client:
        engine = ScriptedEngine(TOKENIZER, script)
        output = LLMGenerationManager(TOKENIZER, engine, client, CONFIG).run_llm_loop(batch)
        num_searches = client.statistics()["searches"]
    records = output.non_tensor_batch["trajectory"]
    for record, ids in zip(records, output.tensors["responses"].tolist(), strict=True):
        record["response"] = ids
    by_row = dict(zip(order, records, strict=True))
    return [by_row[row] for row in range(len(order))], num_searches


def found(record) -> list[list[str]]:
    """Return the documents of each search of a record."""
    searches = [turn["documents"] for turn in record["turns"] if turn["action"] == "search"]
    return [[document["contents"] for document in documents] for documents in searches]


def observations(dataset, url):
    return [found(record) for record in ask(url, dataset)[0]]


def test_own_passages_are_what_a_run_without_a_retriever_finds(url):
    dataset = questions()
    same = with_retriever(dataset, "own", 0, 2)
    assert same is dataset and same[0]["episode"] is None
    for town, searches in zip(TOWNS, observations(dataset, url), strict=True):
        assert searches[0][0].startswith(f'"{town} founder"') and searches[1][0].startswith(f'"{town} river"')


def test_nothing_is_found_and_nothing_is_asked_of_the_server_with_empty(url):
    records, num_searches = ask(url, with_retriever(questions(), "empty", 0, 2))
    assert num_searches == 0
    for record in records:
        assert found(record) == [[], []] and record["num_searches"] == 2
        assert record["finish_reason"] == "answer"


def test_empty_gives_the_tokens_that_a_server_without_a_hit_gives(url):
    def searches_in_vain(prompt: str, turn: int) -> str:
        return "<search> qqq </search>" if turn == 0 else "<answer> none </answer>"

    dataset = questions()
    real, num_searches = ask(url, dataset, script=searches_in_vain)
    assert num_searches == len(TOWNS) and [found(record) for record in real] == [[[]]] * len(TOWNS)
    empty, _ = ask(url, with_retriever(dataset, "empty", 0, 2), script=searches_in_vain)
    spans = [
        [(turn["obs_start"], turn["obs_end"]) for turn in record["turns"]] for record in (real[0], empty[0])
    ]
    assert spans[0] == spans[1]
    assert [record["response"] for record in real] == [record["response"] for record in empty]
    assert "<information></information>" in TOKENIZER.decode(real[0]["response"])


def test_shuffled_passages_are_of_another_question_and_never_ones_own(url):
    dataset = questions()
    own = observations(dataset, url)
    for seed in range(8):
        shuffled = observations(with_retriever(dataset, "shuffled", seed, 2), url)
        for town, searches, own_searches in zip(TOWNS, shuffled, own, strict=True):
            assert [len(documents) for documents in searches] == [2, 2]
            assert not {text for documents in searches for text in documents if f"of {town} " in text}
            for documents, own_documents in zip(searches, own_searches, strict=True):
                assert set(documents).isdisjoint(own_documents)
            assert searches[0] != searches[1]  # another question in each turn


def test_shuffled_passages_are_those_that_another_question_finds_in_its_order(url):
    dataset = questions()
    with SearchClient(url, topk=2, timeout=10) as client:
        asked = [f"Who is the founder of {town}?" for town in TOWNS]
        passages = [[d["contents"] for d in documents] for documents in client.batch_search(asked, 1)]
    shuffled = observations(with_retriever(dataset, "shuffled", 3, 2), url)
    firsts = [searches[0][:1] for searches in shuffled]
    seconds = [searches[1][:1] for searches in shuffled]
    assert sorted(firsts) == sorted(seconds) == sorted(passages)  # each question is another one's once a turn
    place = {row[0]: number for number, row in enumerate(passages)}
    following = [place[row[0]] for row in firsts]
    assert [place[row[0]] for row in seconds] == [following[following[row]] for row in range(len(TOWNS))]


def test_what_is_found_does_not_depend_on_the_order_of_the_batch_or_of_the_file_but_on_the_seed(url):
    dataset = questions()
    expected = observations(with_retriever(dataset, "shuffled", 5, 2), url)
    order = list(range(len(TOWNS)))
    random.Random(0).shuffle(order)
    records, _ = ask(url, with_retriever(dataset, "shuffled", 5, 2), order)
    assert [found(record) for record in records] == expected
    turned = observations(with_retriever(questions(TOWNS[::-1]), "shuffled", 5, 2), url)
    assert turned[::-1] == expected
    assert observations(with_retriever(dataset, "shuffled", 6, 2), url) != expected


def test_another_question_about_the_same_passages_does_not_bring_them(url):
    rows = questions(["Arlen"]).rows + questions(["Arlen"], "What is the river").rows
    dataset = RLHFDataset(rows, TOKENIZER)
    own = observations(dataset, url)
    assert '"Arlen founder"' in own[0][0][0]
    shuffled = observations(with_retriever(dataset, "shuffled", 0, 2), url)
    for searches, own_searches in zip(shuffled, own, strict=True):
        for documents, own_documents in zip(searches, own_searches, strict=True):
            assert documents and set(documents).isdisjoint(own_documents)


def test_documents_that_a_row_names_as_its_own_are_not_found_for_it(url):
    named = {"gold_titles": [f"{town} founder" for town in TOWNS[:5]]}
    shuffled = observations(with_retriever(questions(**named), "shuffled", 0, 2), url)
    texts = [text for searches in shuffled for documents in searches for text in documents]
    assert texts and not [
        text for text in texts if text.startswith(tuple(f'"{t}"' for t in named["gold_titles"]))
    ]


def test_rows_of_all_kinds_may_stand_in_one_batch(url):
    dataset = questions()
    kinds = [with_retriever(dataset, kind, 5, 2) for kind in ("own", "shuffled", "empty")]
    rows = [kind[row] for row in range(len(TOWNS)) for kind in kinds]
    alone = [observations(kind, url) for kind in kinds]
    together = observations(rows, url)
    assert together == [kind[row] for row in range(len(TOWNS)) for kind in alone]


def test_rows_with_the_same_question_find_passages_of_different_ones(url):
    dataset = questions(["Arlen", "Arlen", "Bora"])
    shuffled = observations(with_retriever(dataset, "shuffled", 0, 2), url)
    assert shuffled[0] == shuffled[1] and shuffled[0][0][0].startswith('"Bora')
    with pytest.raises(ValueError, match="asks a single question, 'Who is the founder of Arlen"):
        with_retriever(questions(["Arlen", "Arlen"]), "shuffled", 0, 2)


def test_a_row_keeps_its_own_number_of_turns(url):
    dataset = questions(max_turns=1)
    for kind in ("shuffled", "empty"):
        records, _ = ask(url, with_retriever(dataset, kind, 0, 2))
        assert [record["num_searches"] for record in records] == [1] * len(TOWNS)


def test_a_server_that_is_away_ends_shuffled_searches_as_any_search():
    dataset = with_retriever(questions(), "shuffled", 0, 2)
    prompts = with_seeds(prompt_batch([dataset[0]], "test"), torch.arange(1), validate=True)
    with SearchClient("http://127.0.0.1:9/retrieve", topk=2, timeout=0.2) as client:
        engine = ScriptedEngine(TOKENIZER, searches_for_its_town)
        output = LLMGenerationManager(TOKENIZER, engine, client, CONFIG).run_llm_loop(prompts)
    assert output.non_tensor_batch["trajectory"][0]["finish_reason"] == "search_failed"


def test_rows_that_do_not_search_are_refused():
    rows = [{"prompt": "Write a word.", "env_class": "gsm8k", "reward_spec": {"ground_truth": "1"}}]
    dataset = RLHFDataset(rows, TOKENIZER)
    for kind in ("shuffled", "empty"):
        with pytest.raises(ValueError, match=f"retriever: {kind} for its rows, of the environment gsm8k"):
            with_retriever(dataset, kind, 0, 2)
