"""1,000 and more generated rows for all verifiers, and what Open-Instruct's own code says of them.

cases() -> [(name, response, label, tokens, settings)]          the same in every process
python open_instruct_cases.py OUT, with open_instruct (commit e6c3044) importable, records its scores

Recorded with sympy 1.13.1, antlr 4.11, nltk with punkt_tab, langdetect seeded with 0. For a judge the
response is what the judge replies, for code what the server replies.
"""

import gzip
import json
import random
import sys

SAID = "the lake Oslo river a stone bright Morning level people walk slowly and sing about an old house"
WORDS = SAID.split()
NUMBERS = ["0", "1", "2", "7", "12", "72", "1,000", "-3", "3.5", "0.5", "+4", "1/2", "10", "100"]
LATEX = [
    r"\frac{1}{2}", "0.5", r"\frac12", "1/2", r"\sqrt{8}", r"2\sqrt{2}", "x^2-1", "(x-1)(x+1)", "x=5", "5",
    r"\dfrac{3}{4}", "0.75", r"\text{Yes}", r"90^\circ", "90", "1,000", "1000", r"\pi", r"3\pi", "2x+1",
    "1+2x", r"5\text{ cm}", r"\$5", "-3", r"\{1,2\}", "(1,2)", r"50\%", "50", "a+b", "b+a",
    r"\left(1,2\right)",
]  # fmt: skip
PROMPT = "Write about the lake."
IFEVAL = {  # id -> arguments
    "keywords:existence": {"keywords": ["lake", "river"]},
    "keywords:frequency": {"keyword": "lake", "frequency": 2, "relation": "at least"},
    "keywords:forbidden_words": {"forbidden_words": ["stone", "house"]},
    "keywords:letter_frequency": {"letter": "o", "let_frequency": 3, "let_relation": "less than"},
    "language:response_language": {"language": "en"},
    "length_constraints:number_sentences": {"num_sentences": 3, "relation": "at least"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_words": {"num_words": 12, "relation": "less than"},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "people"},
    "detectable_content:number_placeholders": {"num_placeholders": 1},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:constrained_response": {},
    "detectable_format:number_highlighted_sections": {"num_highlights": 1},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 2},
    "detectable_format:json_format": {}, "detectable_format:title": {}, "combination:two_responses": {},
    "combination:repeat_prompt": {"prompt_to_repeat": "Write about the lake."},
    "startend:end_checker": {"end_phrase": "old house."},
    "change_case:capital_word_frequency": {"capital_frequency": 1, "capital_relation": "at least"},
    "change_case:english_capital": {}, "change_case:english_lowercase": {}, "punctuation:no_comma": {},
    "startend:quotation": {}, "copy:repeat_phrase": {"phrase": "walk slowly and sing", "small_n": 1},
    "copy:copy": {"prompt_to_repeat": "Write about the lake."},
    "new:copy_span_idx": {"prompt_to_repeat": "Write about the lake.", "n_start": 6, "n_end": 21},
    "detectable_format:sentence_hyphens": {}, "keywords:no_adjacent_consecutive": {},
    "detectable_format:square_brackets": {}, "keywords:word_once": {"keyword": "lake"},
    "keywords:word_count_different_numbers": {"keyword": "lake", "frequency": 2, "relation": "less than"},
    "keywords:exclude_word_harder": {"keyword": "stone"}, "paragraphs:paragraphs": {},
    "paragraphs:paragraphs2": {}, "first_word:first_word_sent": {"first_word": "the"},
    "first_word:first_word_answer": {"first_word": "people"},
    "last_word:last_word_sent": {"last_word": "house"},
    "last_word:last_word_answer": {"last_word": "house"}, "detectable_format:bigram_wrapping": {},
    "copy:copying_simple": {"prompt_to_repeat": "Write about the lake."},
    "copy:copying_multiple": {"prompt_to_repeat": "Write about the lake.", "N": 2},
    "punctuation:punctuation_dot": {}, "punctuation:punctuation_exclamation": {},
    "count:lowercase_counting": {"N": 8}, "letters:letter_counting": {"N": 40, "relation": "at least"},
    "letters:letter_counting2": {"letter": "e", "let_frequency": 4, "let_relation": "at least"},
    "count:counting_composition": {"n_sent": 1, "n_words": 4}, "count:count_unique": {},
    "count:count_increment_word": {"keyword1": "lake", "keyword2": "river"}, "keywords:palindrome": {},
    "keywords:keyword_specific_position": {"keyword": "lake", "n": 1, "m": 2}, "keywords:start_end": {},
}  # fmt: skip
OLD = {
    "verify_keywords": {"keyword_list": ["lake", "river"]},
    "verify_keyword_frequency": {"word": "lake", "N": 1},
    "validate_forbidden_words": {"forbidden_words": ["stone"]},
    "verify_letter_frequency": {"letter": "o", "N": 3}, "validate_response_language": {"language": "en"},
    "verify_paragraph_count": {"N": 2}, "validate_word_constraint": {"N": 12, "quantifier": "around"},
    "verify_sentence_constraint": {"N": 3, "quantifier": "at least"},
    "validate_paragraphs": {"N": 2, "first_word": "people", "i": 2},
    "verify_postscript": {"postscript_marker": "P.S."}, "validate_placeholders": {"N": 1},
    "verify_bullet_points": {"N": 2}, "validate_title": {},
    "validate_choice": {"options": ["yes", "old house"]}, "validate_highlighted_sections": {"N": 1},
    "validate_sections": {"N": 2, "section_splitter": "Section"}, "validate_json_format": {},
    "validate_repeat_prompt": {"original_prompt": "Write about the lake."}, "validate_two_responses": {},
    "validate_uppercase": {}, "validate_lowercase": {},
    "validate_frequency_capital_words": {"N": 1, "quantifier": "at most"},
    "validate_end": {"end_phrase": "old house."}, "validate_quotation": {}, "validate_no_commas": {},
}  # fmt: skip
HIGHEST_TEN = ("general-quality", "general-quality_ref")
JUDGES = (*HIGHEST_TEN, "general-quality_rubric", "general-safety", "general-factuality")
JUDGES += ("general-creative_writing", "general-refusal", "general-web_instruct_general_verifier")


def prose(rng: random.Random) -> str:
    """A response as instructions are about: sentences, with what some of them ask for."""

    def sentence() -> str:
        words = rng.choices(WORDS, k=rng.randint(3, 7))
        return " ".join(words) + rng.choice([".", ".", "!", "?", ", Dr. Who said.", ""])

    text = " ".join(sentence() for _ in range(rng.randint(1, 4)))
    forms = [
        text, text, text.upper(), text.lower(), f'"{text}"', f"{text} P.S. {text}", f"* {text}\n* {text}",
        f"<<{text}>> and [name]", f"{text}\n\npeople {text}", f"{text} *** {text}", f"{text}\n* * *\n{text}",
        f"{text} ****** {sentence()}", f"Section 1 {text}\nSection 2 {text}", f"*{text}*", PROMPT, f"{PROMPT} {text}",
        f"{PROMPT}\n******\n{PROMPT}", '{"a": 1}', text.replace(".", "").replace("!", ""), f"{text} the old house.",
        "walk bright and sing", "My answer is yes.", " ".join(f"[{word}]" for word in text.split()),
        " ".join(f"<<{a} {b}>>" for a, b in (("old", "lake"), ("a", "house"))), "the lake level the",
        "the lake the river a river", "Oslo-lake", PROMPT[6:21], "the old house. the bright house!",
        "the old lake sings *** the old lake sings *** the old lake sings",
    ]  # fmt: skip
    text = rng.choice(forms)
    return text if rng.random() < 0.8 else f"<think>{sentence()}</think>\n<answer>{text}</answer>"


def cases() -> list[tuple[str, str, object, int, dict]]:
    """See above."""
    rng = random.Random(1612)
    made = []

    def add(name: str, text: str, label: object, tokens: int = 0, **settings: object) -> None:
        made.append((name, text, label, tokens, settings))

    for _ in range(80):
        number = rng.choice(NUMBERS)
        other = rng.choice(NUMBERS)
        text = rng.choice(["So {} and {}", "first {}, then {}.", "#### {} = {}", "none", "{}{}"]).format(
            other, number
        )
        add("gsm8k", text, rng.choice([number, number.replace(",", ""), other]).replace(",", ""))
    for name, count in (("math", 140), ("strict_math", 60)):
        for _ in range(count):
            answer = rng.choice(LATEX)
            label = rng.choice(LATEX)
            other = rng.choice(LATEX)
            label = answer if rng.random() < 0.4 else label
            forms = [r"so \boxed{@}", "then $#$ and $@$", "@", r"\boxed{#} or \boxed{@}", "it is $@$"]
            forms += [
                "Final Answer: The final answer is $@$. I hope it is correct.",
                r"\boxed @",
                "no answer",
            ]
            forms += [r"\boxed{#} Final Answer: The final answer is @. I hope it is correct."]
            add(name, rng.choice(forms).replace("@", answer).replace("#", other), label)
    for name, count in (("flan", 40), ("string_matcher", 40), ("puzzle", 40), ("string_f1", 50)):
        for _ in range(count):
            words = rng.choices(WORDS, k=3)
            answer = " ".join(words) + rng.choice(["", ".", "!"])
            form = ["The answer is: {}", "<answer>{}</answer>", "{}", "<think>x</think> {}", "<answer> {}"]
            label = rng.choice([" ".join(words), words[0], " ".join(words).upper(), "the Lake"])
            labels = [label, "stone"] if name == "string_f1" and rng.random() < 0.5 else label
            add(name, rng.choice(form).format(answer), labels)
    for name in ("re_search", "re_search_f1"):
        for _ in range(50):
            words = rng.choices(WORDS, k=3)
            form = ["<finish>{}</finish>", "<finish>x</finish> {}", "{}", "<finish></finish>"]
            form += ["<finish>{}</finish>!"]
            label = rng.choice([" ".join(words), words[1], json.dumps([words[0], " ".join(words)]), "12"])
            add(name, rng.choice(form).format(" ".join(words)), label)
    for name in ("max_length", "up_to_max_length"):
        for _ in range(30):
            label = str(rng.randint(0, 400))
            tokens = rng.randint(0, 500)
            add(name, "text", label, tokens, length_range=rng.choice([100, 600]))
    for names, name in ((IFEVAL, "ifeval"), (OLD, "ifeval_old")):
        for each, arguments in names.items():
            for _ in range(5 if name == "ifeval" else 4):
                label = {"func_name": each, **arguments}
                if name == "ifeval":
                    label = [{"instruction_id": [each], "kwargs": [arguments or {"unused": None}]}]
                text = json.dumps(label)
                add(name, prose(rng), text.replace("null", "None") if name == "ifeval" else text)
    for name in ("code", "code_stdio"):
        for _ in range(20):
            passed = [rng.randint(0, 1) for _ in range(rng.randint(1, 4))]
            runtimes = [rng.choice([0.1, 0.25, 0.5]) if one else 1.0 for one in passed]
            settings = {"pass_rate_reward_threshold": rng.choice([0.0, 0.5, 0.8])}
            settings["apply_perf_penalty"] = rng.random() < 0.5
            add(name, json.dumps([passed, runtimes]), "", **settings)
    for name in JUDGES:
        highest = 10 if name in HIGHEST_TEN else 1
        for _ in range(8):
            score = rng.randint(1, 10) if highest == 10 else rng.randint(0, 1)
            text = json.dumps({"REASONING": prose(rng), "SCORE": rng.choice([score, str(score)])})
            if name.endswith("verifier"):
                text = f"Final Decision: {['No', 'Yes'][score]}"
            add(name, rng.choice([text, f"```json\n{text}\n```", f"<think>1/10</think>{text}"]), "x")
    for _ in range(30):
        count = rng.randint(1, 4)
        label = [{"description": f"c{i}", "weight": rng.choice([1, 2, 0.5, -1])} for i in range(count)]
        scores = [rng.randint(0, 2) for _ in range(count)]
        add("rubric", json.dumps(scores), json.dumps({"query": "q", "rubrics": label}))
    return [*made, ("passthrough", "anything", "x", 1, {})]


# ruff: noqa: B905, E501, B023
def record(out: str) -> None:
    """Runs Open-Instruct's code over all cases."""
    import asyncio
    from types import SimpleNamespace

    import langdetect
    from open_instruct import ground_truth_utils as theirs

    langdetect.DetectorFactory.seed = 0
    plain = {
        kind().name: kind
        for kind in theirs.VerifierFunction.__subclasses__()
        if kind.get_config_class() is theirs.VerifierConfig and kind is not theirs.LMJudgeVerifier
    }
    scores = []
    for name, text, label, tokens, settings in cases():
        if name in plain:
            score = plain[name]()([0] * tokens, text, label).score
        elif name.endswith("max_length"):
            config = theirs.MaxLengthVerifierConfig(settings["length_range"])
            kind = theirs.MaxLenVerifier if name == "max_length" else theirs.UpToMaxLenVerifier
            score = kind(config)([0] * tokens, text, label).score
        elif name.startswith("code"):
            passed, runtimes = json.loads(text)
            config = theirs.CodeVerifierConfig(
                "", 1.0, settings["pass_rate_reward_threshold"], settings["apply_perf_penalty"]
            )
            verifier = theirs.CodeVerifier(config)
            reply = SimpleNamespace(
                raise_for_status=lambda: None, json=lambda p=passed, r=runtimes: {"results": p, "runtimes": r}
            )
            verifier._get_session = lambda reply=reply: SimpleNamespace(post=lambda *_, **__: reply)
            score = asyncio.run(verifier.async_call([], "x", label)).score
        elif name == "rubric":
            replies = dict(
                zip([each["description"] for each in json.loads(label)["rubrics"]], json.loads(text))
            )

            async def reply(user_prompt, replies=replies, **_):
                return json.dumps({"score": replies[user_prompt.split("<criterion>")[1].split("<")[0]]})

            theirs.run_litellm_async = reply
            score = asyncio.run(
                theirs.RubricVerifier(theirs.RubricVerifierConfig()).async_call([], "x", label)
            ).score
        else:
            judge = theirs.LMJudgeVerifier(name.removeprefix("general-"), None)
            completion = SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])
            score = judge.parse_completion(completion)[1]
        scores.append(score)
    with gzip.GzipFile(out, "wb", mtime=0) as file:
        file.write(json.dumps(scores).encode())
    print(len(scores), "cases")


if __name__ == "__main__":
    record(sys.argv[1])
