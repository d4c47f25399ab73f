"""Labels of clusters, and shapes on the map."""

from __future__ import annotations

import numpy as np

from embq.index.atlas.labels import labels
from embq.retrieval.ui.map.data import inside


def test_a_label_has_the_words_of_its_cluster_and_none_of_the_language() -> None:
    topics = ["the red bicycle", "the blue ocean", "the tall mountain", "the old library"]
    texts = [[f"{topic} is in the picture number {i}" for i in range(30)] for topic in topics]
    found = labels(texts)
    assert found == ["bicycle, red", "blue, ocean", "mountain, tall", "library, old"]


def test_languages_without_spaces_and_clusters_without_words_have_labels_or_none() -> None:
    texts = [["黒い猫が眠る"] * 9, ["Красная площадь"] * 9, ["12 34", ""], []]
    found = labels(texts)
    assert "猫" in found[0]
    assert found[1] == "красная, площадь"
    assert found[2:] == ["", ""]


def test_points_inside_a_polygon_with_a_notch_are_those_of_the_even_odd_rule() -> None:
    notched = np.array([[0, 0], [4, 0], [4, 4], [2, 1], [0, 4]])
    at = np.array([[2, 0.5], [2, 3], [0.5, 2], [3.5, 2], [5, 1]], np.float32)
    assert inside(at, notched).tolist() == [True, False, True, True, False]
    assert not inside(at, notched[:2]).any()
