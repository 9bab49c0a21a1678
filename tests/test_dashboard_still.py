"""The still figure of the dashboard: the same panels, for any number of replicas, and for hardly any data."""

from __future__ import annotations

import dataclasses
import io
import itertools

import pytest
from made_rings import MadeRings, readings

from mirror_nb.notebook.dashboard import palette
from mirror_nb.notebook.dashboard.frame import Frame, Phase
from mirror_nb.notebook.dashboard.still import draw
from mirror_nb.telemetry.findings import findings


def figure_of(replicas: int, steps: int, **known):
    with MadeRings(replicas) as rings:
        for _ in range(steps):
            rings.step()
            rings.log_loss()
        if steps:
            rings.log_checksums(list(range(replicas)))
        rings.timeline.update(now=rings.now)
        shot = rings.timeline.snapshot(now=rings.now)
    read = readings(replicas) if steps else ()
    devices = tuple(f"cuda:{r}" for r in range(replicas))
    return draw(Frame(shot, findings(shot, read), read, devices, "$x_{$ <b>", "ring", **known))


def titles(figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def saved(figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=40)
    return file.getvalue()


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_it_has_the_live_panels(replicas):
    figure = figure_of(replicas, 40)
    last = "The last step" if replicas == 1 else "Overlap, last step"
    assert titles(figure)[:3] == ["Throughput per replica", "Loss", "Where a step goes"]
    assert titles(figure)[3:] == ["All-reduce time by size", "Who arrives late", last, "Devices", "What to look at"]
    assert len(figure.axes[0].lines) == replicas
    assert saved(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [0, 1])
def test_a_training_that_hardly_began_is_drawn_too(steps):
    assert saved(figure_of(2, steps, phase=Phase.FAILED, note="replica 1 died $"))


def test_trouble_is_red_in_the_phase_only():
    failed, about = figure_of(2, 30, phase=Phase.FAILED).texts[1:3]
    assert failed.get_text() == "failed"
    assert failed.get_color() == palette.TROUBLE[0]
    assert about.get_color() != palette.TROUBLE[0]


def test_numbers_of_the_header_do_not_run_into_each_other():
    figure = figure_of(2, 30, speed_up=1.94, since=10)
    boxes = [text.get_window_extent() for text in figure.texts if text.get_position()[1] == 0.9]
    assert len(boxes) == 6
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_titles_notes_and_legends_stay_apart_and_inside(replicas):
    figure = figure_of(replicas, 40)
    saved(figure)
    for axes in figure.axes:
        title, note = axes.title if axes.get_title() else axes._left_title, axes._right_title
        if note.get_text():
            assert title.get_window_extent().x1 < note.get_window_extent().x0, title.get_text()
        for legend in filter(None, [axes.get_legend()]):
            assert legend.get_window_extent().x1 < axes.bbox.x0 + 1.12 * axes.bbox.width


def test_a_loss_that_was_logged_late_fills_its_panel():
    with MadeRings(2) as rings:
        rings.step(100)
        for _ in range(20):
            rings.step()
            rings.log_loss()
        rings.timeline.update(now=rings.now)
        figure = draw(Frame(rings.timeline.snapshot(now=rings.now)))
    assert figure.axes[1].get_xlim() == (101, 120)


def test_it_writes_numbers_and_notes_as_the_live_one_does():
    with MadeRings(2, examples=20_000) as rings:
        for _ in range(1200):
            rings.step()
        rings.timeline.update(now=rings.now)
        shot = rings.timeline.snapshot(now=rings.now)
    on_cpu = tuple(dataclasses.replace(r, temperature=None, power=None, utilisation=None) for r in readings(2))
    figure = draw(Frame(shot, (), on_cpu, ("cuda:0", "cuda:1")))
    saved(figure)
    rates, devices = figure.axes[0], figure.axes[6]
    assert all(label.get_text().endswith("k") for label in rates.get_yticklabels())
    assert "1,100" in [label.get_text() for label in rates.get_xticklabels()]
    assert [axes.get_title(loc="right") for axes in figure.axes[:1]] == ["examples/s, waits left out"]
    assert devices.get_title(loc="right") == "utilisation · memory"
    assert [text.get_text() for text in devices.texts].count("–") == 2


def test_it_says_how_the_training_ended():
    figure = figure_of(2, 30, phase=Phase.STOPPED, note="stopped by hand")
    said = [text.get_text() for text in figure.texts]
    assert "".join(said[1:3]) == "stopped · $x_{$ <b> · 2 replicas · ring"
    assert "stopped by hand" in said
    assert "weight differs on r1" in [text.get_text() for text in figure.axes[-1].texts]
