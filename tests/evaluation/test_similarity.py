"""Figures of long answers, as user/calculate_metrics.py of LegalSearch-R1 (92845f4) gives them; searches."""

import pytest

from verl.evaluation.similarity import is_by_letters, retrieval_effect, similarity

# (reference, answer) -> rouge_l, f1, jaccard, bleu of its `score_lar_task`, recorded
RECORDED = [
    (
        "根据合同法第五条，卖方应当交付货物。",
        "卖方应当按照合同法第五条交付货物。",
        [0.6253494874184531, 0.8571428571428571, 0.75, 0.6055817550955916],
    ),
    ("劳动者有权解除合同", "用人单位应当支付补偿", [0.0, 0.0, 0.0, 0.020980574531482755]),
    ("违约金不得超过损失的百分之三十", "违约金", [0.2975609756097561, 0.33333333333333337, 0.2, 0.0]),
    ("合同无效", "合同无效", [1.0, 1.0, 1.0, 1.0]),
    (
        "应当 赔偿\n全部损失",
        "应当赔偿损失并道歉",
        [0.7134502923976608, 0.7058823529411765, 0.5454545454545454, 0.3549481056010052],
    ),
]


@pytest.mark.parametrize(("reference", "answer", "figures"), RECORDED)
def test_texts_by_letters_have_the_figures_of_the_fork(reference, answer, figures):
    assert list(similarity(answer, [reference]).values()) == pytest.approx(figures, abs=1e-12)


def test_words_are_compared_in_small_letters_and_the_best_reference_counts():
    assert not is_by_letters("Article 5 of the code") and is_by_letters("\u7b2c\u4e94\u6761 law")
    figures = similarity(
        "The seller must deliver the goods.", ["nothing", "the Seller must deliver: the goods"]
    )
    assert list(figures.values()) == pytest.approx([1.0] * 4)
    assert list(similarity("", ["x"]).values()) == [0.0] * 4
    half = similarity("the seller must pay", ["the seller must deliver the goods"])
    recall = 3 / 6
    precision = 3 / 4
    assert half["rouge_l"] == pytest.approx((1 + 1.44) * recall * precision / (recall + 1.44 * precision))
    assert half["token_f1"] == pytest.approx(2 * 3 / 10) and half["jaccard"] == pytest.approx(3 / 6)


def documents(*titles):
    return [{"contents": f'"{title}"\n{title} is a town.', "score": 1.0} for title in titles]


def test_what_searches_brought_is_told_search_by_search():
    turns = [{"documents": documents("Orlen", "Vey")}, {"documents": None}, {"documents": documents("Ovuwa")}]
    figures = retrieval_effect({"turns": turns}, ["ovuwa", "Orlen"], "Ovuwa is a town")
    assert figures == {
        "gold_recall": 1.0,
        "gold_recall_at_1": 0.5,
        "gold_recall_at_2": 1.0,
        "gold_recall_at_3": 1.0,
        "gold_recall_at_4": 1.0,
        "answer_from_search": 1.0,
        "answer_search": 2.0,
    }
    unknown = retrieval_effect({"turns": []}, None, "x")
    assert unknown == {"gold_recall": None, "answer_from_search": None, "answer_search": None}
    assert retrieval_effect({"turns": turns}, [], "elsewhere")["answer_from_search"] == 0.0
