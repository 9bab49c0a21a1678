"""The still figure of the dashboard: the same panels, for any number of replicas, and for hardly any data."""

from __future__ import annotations

import io

import pytest
from made_rings import MadeRings, readings

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


def test_it_says_how_the_training_ended():
    figure = figure_of(2, 30, phase=Phase.STOPPED, note="stopped by hand")
    said = [text.get_text() for text in figure.texts]
    assert "stopped · $x_{$ <b> · 2 replicas · ring" in said
    assert "stopped by hand" in said
    assert "weight differs on r1" in [text.get_text() for text in figure.axes[-1].texts]
