"""Fields of requests, and near-duplicate results."""

from __future__ import annotations

import base64
import math

import numpy as np
import pytest

from embq.core.errors import InputError
from embq.retrieval.searching.query import MOST_RESULTS
from embq.retrieval.serving.requests import KnnRequest, RowsRequest
from embq.retrieval.serving.search import first_of_each

CLIENT = {
    "text": "a red car",
    "image": None,
    "image_url": None,
    "embedding_input": None,
    "deduplicate": True,
    "use_safety_model": True,
    "use_violence_detector": True,
    "indice_name": "laion5B",
    "use_mclip": False,
    "aesthetic_score": 9,
    "aesthetic_weight": 0.5,
    "modality": "image",
    "num_images": 40,
    "num_result_ids": 40,
}
"""What clip-retrieval's client sends by default."""


def test_what_the_client_sends_by_default_is_understood_and_filters_are_reported() -> None:
    asked = KnnRequest.from_json(CLIENT)
    query = asked.query
    assert (query.text, query.image, asked.image_url, query.vector) == ("a red car", None, "", None)
    assert (query.index, query.modality, asked.rows, query.k) == ("laion5B", "image", 40, 40)
    assert asked.deduplicate
    assert asked.not_applied == ("use_safety_model", "use_violence_detector", "aesthetic_score")


def test_what_the_page_sends_where_nobody_asks_for_aesthetics_is_no_filter() -> None:
    asked = KnnRequest.from_json(
        {"text": "x", "aesthetic_score": "", "aesthetic_weight": "0.5", "use_safety_model": False}
    )
    assert asked.not_applied == ()
    assert (asked.rows, asked.query.k, asked.deduplicate, asked.query.modality) == (40, 40, False, "")


def test_the_first_of_several_queries_is_taken_and_the_others_are_reported() -> None:
    asked = KnnRequest.from_json({"text": "", "image_url": "https://x/y.jpg", "embedding_input": [1.0]})
    assert asked.image_url == "https://x/y.jpg"
    assert asked.query.vector is None
    assert asked.not_applied == ("embedding_input",)


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_an_image_is_bytes_in_base64(prefix: str) -> None:
    data = bytes(range(256))
    assert KnnRequest.from_json({"image": prefix + base64.b64encode(data).decode()}).query.image == data


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (None, "bad_request"),
        ([], "bad_request"),
        ({}, "no_query"),
        ({"text": None, "image": ""}, "no_query"),
        ({"text": ["a cat"]}, "bad_request"),
        ({"text": "\ud800"}, "bad_request"),
        ({"text": "x" * 10_001}, "too_long"),
        ({"image": "no base64!"}, "bad_query"),
        ({"image": "AAA"}, "bad_query"),
        ({"embedding_input": "1,2"}, "bad_query"),
        ({"embedding_input": [[1.0, 2.0]]}, "bad_query"),
        ({"embedding_input": [True, 1]}, "bad_query"),
        ({"embedding_input": [1e39, 1.0]}, "bad_query"),
        ({"embedding_input": [10**400]}, "bad_query"),
        ({"text": "x", "num_images": -1}, "bad_request"),
        ({"text": "x", "num_images": "40"}, "bad_request"),
        ({"text": "x", "num_images": True}, "bad_request"),
        ({"text": "x", "num_result_ids": 0}, "bad_request"),
        ({"text": "x", "num_images": MOST_RESULTS + 1}, "too_many"),
        ({"text": "x", "num_result_ids": 10**30}, "bad_request"),
        ({"text": "x", "modality": "audio"}, "bad_request"),
        ({"text": "x", "indice_name": 7}, "bad_request"),
        ({"text": "x", "num_images": "\ud800"}, "bad_request"),
        ({"text": "x", "modality": "\ud800"}, "bad_request"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_name(body: object, code: str) -> None:
    with pytest.raises(InputError) as refused:
        KnnRequest.from_json(body)
    assert refused.value.code == code
    assert refused.value.next_step


def test_ids_beyond_the_rows_may_be_asked_for() -> None:
    asked = KnnRequest.from_json({"text": "x", "num_images": 0, "num_result_ids": 3000})
    assert (asked.rows, asked.query.k) == (0, 3000)
    assert KnnRequest.from_json({"text": "x", "num_images": 7}).query.k == 7


@pytest.mark.parametrize("ids", [None, 3, "\ud800", [-1], [1.0], ["1"], [True], [2**63], [0] * (MOST_RESULTS + 1)])
def test_ids_are_whole_numbers_and_not_too_many(ids: object) -> None:
    with pytest.raises(InputError):
        RowsRequest.from_json({"ids": ids})


def test_no_ids_are_no_mistake() -> None:
    assert RowsRequest.from_json({"ids": []}).ids == ()


# --- duplicates ---


def at(*degrees: float) -> np.ndarray:
    return np.array([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees], np.float32)


def test_of_near_duplicates_the_first_stays() -> None:
    assert first_of_each(at(0, 90, 5, 95, 200)).tolist() == [True, True, False, False, True]


def test_a_chain_of_near_duplicates_is_one_group_whatever_their_order() -> None:
    # acos(0.94) is 19.9 degrees: 0 and 30 are apart, and 15 is near to both.
    assert first_of_each(at(0, 30, 15)).tolist() == [True, False, False]
    assert first_of_each(at(0, 30)).tolist() == [True, True]


def test_lengths_do_not_matter_and_zero_is_like_nothing() -> None:
    assert first_of_each(at(0, 5) * np.float32([[3.0], [0.1]])).tolist() == [True, False]
    assert first_of_each(np.zeros((3, 2), np.float32)).tolist() == [True, True, True]
    assert first_of_each(np.zeros((0, 2), np.float32)).tolist() == []


def test_groups_are_those_of_a_search_through_all_pairs() -> None:
    random = np.random.default_rng(5)
    centres = random.standard_normal((300, 6))
    vectors = (centres[random.integers(0, 300, 2500)] + 0.25 * random.standard_normal((2500, 6))).astype(np.float32)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    near = units @ units.T >= 0.94
    seen, wanted = np.zeros(2500, bool), np.zeros(2500, bool)
    for row in range(2500):
        if seen[row]:
            continue
        wanted[row] = True
        edge = [row]
        while edge:
            fresh = np.nonzero(near[edge].any(axis=0) & ~seen)[0]
            seen[fresh] = True
            edge = fresh.tolist()
    assert 1 < wanted.sum() < 2500
    assert first_of_each(vectors).tolist() == wanted.tolist()
