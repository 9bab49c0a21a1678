"""What `fit` returns: as lists, as a table, as a DataFrame, and as a picture."""

from __future__ import annotations

import importlib
import math
import re
import types

import numpy as np
import pytest
import torch

from mirror_nb.errors import MirrorError, UsageError
from mirror_nb.training import history as module
from mirror_nb.training.history import History, lower_is_better, shown


def history(**columns: list[float]) -> History:
    made = History({"epochs": 3})
    for epoch, values in enumerate(zip(*columns.values(), strict=True)):
        made.record(epoch, {n: v for n, v in zip(columns, values, strict=True) if v is not None})
    return made


TWO = {"loss": [0.5, 0.25, 0.3], "accuracy": [0.5, 0.75, 0.8], "val_loss": [0.6, 0.7, 0.5]}


LOSSES = "loss val_loss digit_loss mse val_mean_squared_error mae MeanAbsoluteError perplexity kl_divergence rmse"
SCORES = "accuracy val_accuracy acc digit_acc MulticlassAccuracy auc auroc precision recall f1 BinaryF1Score top5 iou"


@pytest.mark.parametrize("metric", LOSSES.split())
def test_less_is_better_of_losses_and_errors(metric):
    assert lower_is_better(metric) is True


@pytest.mark.parametrize("metric", [*SCORES.split(), "cosine_similarity", "top_5_accuracy", "r2_score"])
def test_more_is_better_of_accuracies_and_scores(metric):
    assert lower_is_better(metric) is False


@pytest.mark.parametrize("metric", ["score", "learning_rate", "mine", "across", "maple", "acceleration"])
def test_other_names_do_not_tell(metric):
    assert lower_is_better(metric) is None


def test_there_is_a_list_for_each_name_as_in_keras():
    made = history(**TWO)
    assert made.history == TWO
    assert made.epoch == [0, 1, 2]
    assert made.params == {"epochs": 3}


def test_tensors_and_arrays_become_plain_numbers():
    made = History()
    made.record(0, {"loss": torch.tensor(0.5), "each": np.array([1.0, 2.0])})
    assert made.history == {"loss": [0.5], "each": [[1.0, 2.0]]}


def test_validation_every_second_epoch_has_its_epochs():
    made = history(loss=[3.0, 2.0, 1.0, 0.5], val_loss=[None, 3.0, None, 4.0])
    assert made.history["val_loss"] == [3.0, 4.0]
    assert made.values("val_loss") == {1: 3.0, 3: 4.0}
    assert made.best_epoch() == 1


def test_the_best_epoch_is_that_of_the_validation():
    made = history(**TWO)
    assert (made.best_epoch(), made.best_epoch("loss"), made.best_epoch("accuracy")) == (2, 1, 2)


def test_nan_is_never_the_best():
    assert history(loss=[math.nan, 2.0, math.inf]).best_epoch() == 1
    assert history(loss=[math.nan]).best_epoch() is None
    assert History().best_epoch() is None


def test_a_metric_that_was_not_logged_names_those_that_were():
    with pytest.raises(UsageError, match="'acc' was not logged; there are: loss, accuracy, val_loss"):
        history(**TWO).best_epoch("acc")


def test_the_best_of_an_unknown_metric_is_not_guessed():
    with pytest.raises(UsageError, match="whether more or less of 'mine' is better is not known"):
        history(mine=[1.0]).best_epoch("mine")


def test_a_history_outlives_its_process():
    made = history(loss=[3.0, 2.0], val_loss=[None, 3.0])
    again = History()
    again.load_state_dict(made.state_dict())
    again.record(2, {"loss": 1.0, "val_loss": 2.0})
    assert again.history == {"loss": [3.0, 2.0, 1.0], "val_loss": [3.0, 2.0]}
    assert again.values("val_loss") == {1: 3.0, 2: 2.0}
    assert made.epoch == [0, 1]


# --------------------------------------------------------------------------- the table


def test_lists_that_a_user_has_changed_are_shown_as_far_as_there_are_epochs():
    history = History()
    for epoch, loss in enumerate((0.5, 0.25)):
        history.record(epoch, {"loss": loss})
    # As tutorials go on with the curves of a second fit.
    losses = history.history["loss"]
    losses += [0.125]
    history.history["mine"] = [1.0, 2.0]
    assert history.values("loss") == {0: 0.5, 1: 0.25}
    assert history.values("mine") == {0: 1.0, 1: 2.0}
    assert repr(history).splitlines()[1].split() == ["epoch", "loss", "mine"]
    assert history.plot() is not None


def test_the_table_counts_epochs_from_one_as_the_lines_of_fit_do():
    assert repr(history(**TWO)).splitlines() == [
        "History of 3 epochs; the best val_loss, 0.5000, in epoch 3",
        "epoch    loss  accuracy  val_loss",
        "    1  0.5000    0.5000    0.6000",
        "    2  0.2500    0.7500    0.7000",
        "    3  0.3000    0.8000    0.5000",
    ]


def test_a_history_of_no_epoch_says_so():
    assert repr(History()) == "History of 0 epochs"
    assert "<table" not in History()._repr_html_()


def test_a_long_table_shows_its_ends():
    lines = repr(history(loss=[1.0] * 50)).splitlines()
    assert len(lines) == 2 + 21
    assert [line.split()[0] for line in lines[11:14]] == ["10", "…", "41"]


def test_the_notebooks_table_marks_the_best_and_has_no_colour_of_its_own():
    made = history(loss=[0.5, 0.25], **{"<b>": [1.0, 2.0]})
    page = made._repr_html_()
    assert re.findall(r"font-weight:bold[^>]*>([^<]*)<", page) == ["0.2500"]
    assert "&lt;b&gt;" in page
    assert not re.search(r"#[0-9a-f]{3}|rgb\(|black|white", page)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5000"),
        (12.34567, "12.3457"),
        (0.0, "0.0000"),
        (1e-5, "1.000e-05"),
        (0.004, "0.004000"),
        (0.00123456, "0.001235"),
        (3, "3"),
        (math.nan, "nan"),
        ([1.0, 2.0], "2 values"),
        ("as before", "as before"),
        (None, "None"),
    ],
)
def test_numbers_are_shown_with_what_can_be_told(value, text):
    assert shown(value) == text


def test_a_dataframe_has_a_row_an_epoch():
    pytest.importorskip("pandas")
    frame = history(loss=[3.0, 2.0], val_loss=[None, 3.0]).to_pandas()
    assert list(frame.columns) == ["loss", "val_loss"]
    assert frame.index.name == "epoch"
    assert frame["val_loss"].isna().tolist() == [True, False]


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(MirrorError, match="pip install pandas"):
        history(**TWO).to_pandas()


# --------------------------------------------------------------------------- the picture


def test_each_metric_is_drawn_with_its_validation_and_the_best_epoch():
    figure = history(**TWO).plot()
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(panels) == ["loss", "accuracy"]
    loss = {line.get_label(): list(line.get_ydata()) for line in panels["loss"].lines[:2]}
    assert loss == {"training": [0.5, 0.25, 0.3], "validation": [0.6, 0.7, 0.5]}
    assert list(panels["loss"].lines[0].get_xdata()) == [1, 2, 3]
    assert panels["loss"].get_title(loc="right") == "best validation 0.5000, epoch 3"
    assert panels["accuracy"].get_title(loc="right") == "best 0.8000, epoch 3"


def test_metrics_are_chosen_and_ordered_by_name():
    figure = history(**TWO).plot(["accuracy", "loss"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["accuracy", "loss"]
    assert len(history(**TWO).plot("loss").axes) == 1


def test_a_metric_that_is_no_better_or_worse_has_no_best_epoch():
    (panel,) = history(learning_rate=[0.1, 0.01]).plot().axes
    assert panel.get_title(loc="right") == ""


def test_metrics_of_several_values_are_left_out_or_refused_by_name():
    made = History()
    made.record(0, {"loss": 1.0, "each": [1.0, 2.0]})
    assert len(made.plot().axes) == 1
    with pytest.raises(UsageError, match="'each' cannot be plotted: it has several values an epoch"):
        made.plot(["each"])
    with pytest.raises(UsageError, match="'val_loss' was not logged"):
        made.plot(["val_loss"])


def test_there_is_nothing_to_plot_before_an_epoch_has_ended():
    with pytest.raises(UsageError, match="no epoch has ended"):
        History().plot()
    made = History()
    made.record(0, {"each": [1.0, 2.0]})
    with pytest.raises(UsageError, match="none of each is a number"):
        made.plot()


def test_a_notebook_shows_the_figure_whether_or_not_matplotlib_was_set_up():
    formatter = importlib.import_module("IPython.core.formatters").DisplayFormatter()
    figure = history(**TWO).plot()
    data, metadata = formatter.format(figure)
    assert data["image/png"].startswith(b"\x89PNG")
    assert metadata["image/png"]["width"] < 1000
    tools = importlib.import_module("IPython.core.pylabtools")
    tools.select_figure_formats(types.SimpleNamespace(display_formatter=formatter), {"png"})
    data, _ = formatter.format(figure)
    assert set(data) == {"text/plain", "image/png"}


def test_pyplot_does_not_know_the_figure_and_shows_it_no_second_time():
    pyplot = importlib.import_module("matplotlib.pyplot")
    before = pyplot.get_fignums()
    history(**TWO).plot()
    assert pyplot.get_fignums() == before


def test_the_figure_can_be_saved(tmp_path):
    history(**TWO).plot().savefig(tmp_path / "history.svg")
    assert (tmp_path / "history.svg").read_text().count("<svg") == 1
