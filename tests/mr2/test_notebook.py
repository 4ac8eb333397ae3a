"""The summary of fitted margins in notebooks."""

from html.parser import HTMLParser

import numpy as np
import pytest
import sklearn
from sklearn.datasets import make_classification
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mr2 import MR2Classifier, MR2ClassifierCV


class Summary(HTMLParser):
    """Read the summary as a browser does: its title, and the cells of each row of its table."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.title, self._open = [], [], "", ""
        start = text.find('<details class="sklearn-mr2-margins"')
        self.found = start >= 0
        self.feed(text[start:] if self.found else "")

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._open = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open == "summary":
            self.title += data
        elif self._open in ("td", "th"):
            self.rows[-1][-1] += data

    def __getitem__(self, name):
        return dict(row for row in self.rows if len(row) == 2)[name]


@pytest.fixture(scope="module")
def fitted():
    X, y = make_classification(
        300, 6, n_informative=5, n_redundant=0, n_classes=8, n_clusters_per_class=1, random_state=0
    )
    return MR2Classifier(error_cv=2, random_state=0).fit(X, np.array([*"abcdefgh"])[y])


def test_numbers_are_those_of_the_model(fitted):
    summary = Summary(fitted._repr_html_())
    margins = fitted.margins_
    assert summary.title == "Margins of 8 classes"
    assert summary["mode"] == "divide"
    assert float(summary["smallest"]) == pytest.approx(margins.min(), rel=1e-3)
    assert float(summary["median"]) == pytest.approx(np.median(margins), rel=1e-3)
    assert float(summary["largest"]) == pytest.approx(margins.max(), rel=1e-3)
    correlation, source = summary["rank correlation with class errors"].split(" ", 1)
    assert float(correlation) == pytest.approx(fitted.margin_error_correlation_, abs=0.006)
    assert source == "(out of fold)"


def test_lists_the_classes_with_the_largest_margins(fitted):
    rows = Summary(fitted._repr_html_()).rows
    start = rows.index(["largest margins"]) + 1
    order = sorted(zip(fitted.margins_, fitted.classes_, strict=True), reverse=True)[:5]
    assert [row[0] for row in rows[start:]] == [label for _, label in order]
    assert [float(row[1]) for row in rows[start:]] == pytest.approx([m for m, _ in order], rel=1e-3)


def test_below_the_diagram_of_scikit_learn_in_both_forms(fitted):
    for text in (fitted._repr_html_(), fitted._repr_mimebundle_()["text/html"]):
        diagram = text[: text.index('<details class="sklearn-mr2-margins"')]
        assert "sk-top-container" in diagram
        assert text.count("sklearn-mr2-margins") == 1
    assert fitted._repr_mimebundle_()["text/plain"] == repr(fitted)


def test_few_classes_are_all_listed_and_nothing_is_made_up():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(90, 4)), np.arange(90) % 3
    summary = Summary(MR2Classifier(margin_mode="subtract").fit(X, y)._repr_html_())
    assert summary["mode"] == "subtract"
    assert ["all margins"] in summary.rows
    assert len(summary.rows) == 4 + 1 + 3
    assert "correlation" not in str(summary.rows)


def test_mode_is_that_of_the_fit(fitted):
    try:
        fitted.set_params(margin_mode="subtract")
        assert Summary(fitted._repr_html_())["mode"] == "divide"
    finally:
        fitted.set_params(margin_mode="divide")


def test_short_for_many_classes_with_long_names():
    rng = np.random.default_rng(0)
    labels = np.array([f"{k} " + 300 * "long" for k in range(1000)])
    model = MR2Classifier(C=0.01).fit(rng.normal(size=(2000, 3)), np.tile(labels, 2))
    text = model._margins_html()
    assert len(text) < 4000
    assert "Margins of 1000 classes" in text


def test_class_names_are_text_and_not_markup():
    labels = np.array(["<script>alert('1')</script>", "a & b </td>", '"><img src=x>'])
    rng = np.random.default_rng(0)
    model = MR2Classifier().fit(rng.normal(size=(90, 4)), np.repeat(labels, 30))
    summary = Summary(model._repr_html_())
    assert set(summary.tags) == {"details", "summary", "table", "tbody", "tr", "td", "th"}
    assert {row[0] for row in summary.rows[-3:]} == set(labels)


@pytest.mark.parametrize("module", ["linear", "mlp"])
def test_classes_that_were_not_seen_have_no_margin_to_show(module):
    rng = np.random.default_rng(0)
    model = MR2Classifier(module, random_state=0)
    model.partial_fit(rng.normal(size=(40, 4)), np.arange(40) % 2, classes=[0, 1, 2])
    summary = Summary(model._repr_html_())
    assert summary.title == "Margins of 3 classes"
    assert "nan" not in str(summary.rows)


def test_without_margins_there_is_no_summary(fitted):
    X = np.random.default_rng(0).normal(size=(60, 4))
    cross_entropy = MR2Classifier(margin_statistic=None).fit(X, np.arange(60) % 3)
    for model in (MR2Classifier(), MR2ClassifierCV(), cross_entropy):
        assert not Summary(model._repr_html_()).found
        assert not Summary(model._repr_mimebundle_()["text/html"]).found
        assert model._repr_html_().startswith("<style>")


def test_search_for_C_shows_the_chosen_model():
    X = np.random.default_rng(0).normal(size=(60, 4))
    search = MR2ClassifierCV(Cs=[0.1, 1.0], cv=2).fit(X, np.arange(60) % 3)
    assert search._margins_html() == search.best_estimator_._margins_html() != ""
    assert Summary(search._repr_html_()).found


def test_pipelines_draw_their_parts(fitted):
    text = make_pipeline(StandardScaler(), fitted)._repr_html_()
    assert "MR2Classifier" in text
    assert not Summary(text).found


def test_text_display_is_respected(fitted):
    with sklearn.config_context(display="text"):
        assert not hasattr(fitted, "_repr_html_")
        assert set(fitted._repr_mimebundle_()) == {"text/plain"}
