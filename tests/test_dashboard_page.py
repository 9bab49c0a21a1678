"""The dashboard's picture of made trainings: what it says, what it leaves out, and that it is well-formed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from made_rings import MB, MadeRings, readings

from mirror_nb import readable
from mirror_nb.notebook.dashboard import page, palette, panels, plot, words
from mirror_nb.notebook.dashboard.frame import Frame, Phase
from mirror_nb.telemetry.findings import Finding, Weight, findings
from mirror_nb.telemetry.machine import Reading
from mirror_nb.telemetry.samples import Mark

TITLES = ["Throughput per replica", "Loss", "Where a step goes", "All-reduce time by size", "Who arrives late"]
TITLES += ["Overlap, last step", "Devices", "What to look at"]


def shown(rings: MadeRings, **known) -> Frame:
    rings.timeline.update(now=rings.now)
    shot = rings.timeline.snapshot(now=rings.now)
    read = known.get("readings", ())
    devices = tuple(f"cuda:{r}" for r in range(rings.num_replicas))
    return Frame(shot, **{"findings": findings(shot, read), "devices": devices} | known)


def trained(replicas: int, steps: int = 60, **known) -> Frame:
    with MadeRings(replicas) as rings:
        rings.mark(Mark.PLANNED, 200)
        for _ in range(steps):
            rings.step()
            rings.log_loss()
        rings.log_checksums([7] * replicas)
        return shown(rings, readings=readings(replicas), **known)


def tree(frame: Frame) -> ET.Element:
    return ET.fromstring(page.Page().body(frame))


def text(frame: Frame) -> str:
    return " ".join("".join(tree(frame).itertext()).split())


def card(frame: Frame, title: str) -> ET.Element:
    cards = [c for c in tree(frame).iter("div") if c.get("class", "").split()[:1] == ["c"]]
    return next(c for c in cards if c.findtext("header/b") == title)


def classes(element: ET.Element) -> set[str]:
    return {name for part in element.iter() for name in part.get("class", "").split()}


# ------------------------------------------------------------------ what is there


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_every_panel_is_there_and_every_replica_in_it(replicas):
    frame = trained(replicas)
    for title in TITLES:
        found = card(frame, title)
        if title not in ("Loss", "All-reduce time by size", "What to look at"):
            assert {f"r{r}" for r in range(replicas)} <= classes(found), title
    assert len(card(frame, "Throughput per replica").findall(".//path[@transform]")) == replicas


def test_one_replica_has_no_panels_about_others():
    frame = trained(1)
    said = text(frame)
    assert "The last step" in said
    for gone in ("All-reduce", "Who arrives late", "exposed", "in sync", "min–max"):
        assert gone not in said


def test_the_header_gives_the_key_numbers():
    frame = trained(2, title="ResNet-50", operation="NcclAllReduce", speed_up=1.937)
    shot, said = frame.snapshot, text(frame)
    assert "running" in said
    assert "ResNet-50 · 2 replicas · NcclAllReduce" in said
    assert f"{shot.throughput:,.0f} examples/s together, waits included" in said
    assert "1.94× vs 1 replica" in said
    assert f"{shot.curves['loss'].last:.2f} loss" in said
    assert "60 / 200 steps" in said
    assert f"{words.left(shot.seconds_left)} left" in said
    assert 'style="width:30.0%"' in page.Page().body(frame)


def test_what_was_not_measured_is_left_out():
    with MadeRings(2) as rings:
        rings.step(5)
        said = text(shown(rings))
    assert "vs 1 replica" not in said
    assert " left" not in said.replace("waits left out", "")
    assert "5 steps" in said


def test_the_lengths_of_a_step_are_those_of_its_parts():
    frame = trained(2)
    bars = {p.get("class"): p.get("d") for p in card(frame, "Where a step goes").iter("path") if p.get("d")}
    # The first bar is r0's: its widths add up to the whole, in drawn units.
    widths = [float(bars[f"f-{part}"].split("h")[1].split("v")[0]) for part in ("forward", "backward")]
    step = frame.snapshot.breakdown.sum(axis=1).max()
    assert widths == pytest.approx(list(frame.snapshot.breakdown[0, 1:3] / step * 1000), abs=1)
    assert readable.milliseconds(float(frame.snapshot.breakdown[0].sum())) in text(frame)


def test_all_reduces_give_their_times_and_bandwidth():
    with MadeRings(2, buckets=[25 * MB, 25 * MB], latency=0.0, bandwidth=25 * MB / 1e-3, jitter=1e-6) as rings:
        rings.step(30)
        said = "".join(card(shown(rings), "All-reduce time by size").itertext())
    assert "25 MiB" in said
    assert "1.0 / 1.0 ms" in said
    assert "26 GB/s" in said


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_a_frame_is_small_and_has_no_numbers_that_are_none(replicas):
    body = page.Page().body(trained(replicas, steps=300))
    assert len(body.encode()) < 40_000
    assert "nan" not in body
    assert "inf" not in body.replace("info", "")


# ------------------------------------------------------------------ before, and beside


def test_before_the_first_step_it_says_what_it_waits_for():
    with MadeRings(2) as rings:
        frame = shown(rings, phase=Phase.WAITING)
    said = text(frame)
    assert "waiting" in said
    assert "after the first step" in said
    assert "mnb.log(loss=loss)" in said
    assert "Too early to say" in said
    assert "no step has ended yet" in words.alternative(frame)


def test_a_first_step_alone_is_drawn():
    frame = trained(4, steps=1)
    assert "1 / 200 steps" in text(frame)


def test_steps_without_examples_or_loss_break_no_line():
    with MadeRings(2, examples=0) as rings:
        rings.step()
        assert "after the first steps" in text(shown(rings))
        rings.step(29)
        assert "tells how many examples a step has" in text(shown(rings))


def test_metrics_are_small_curves_below_the_loss_and_numbers_in_the_header():
    with MadeRings(2) as rings:
        for step in range(30):
            rings.step()
            rings.log_loss()
            rings.log("accuracy", [step / 30, step / 30])
            for name in ("precision", "recall", "f1"):
                rings.log(name, [0.25, 0.75])
        rings.log("never a number", [math.nan, math.nan])
        frame = shown(rings)
    small = tree(frame).find(".//div[@class='also']")
    assert [each.text for each in small.findall("span")] == ["accuracy", "precision", "recall"]
    assert [each.text for each in small.findall("b")] == ["0.967", "0.500", "0.500"]
    assert all("d" in path.attrib for path in small.iter("path"))
    assert ("0.967", "accuracy", "") in words.facts(frame)
    assert "accuracy 0.967" in words.alternative(frame)


def test_screen_readers_are_told_the_numbers_that_the_labels_show():
    with MadeRings(2, examples=3000) as rings:
        rings.step(60)
        rings.slowness = [0.5, 0.5]
        rings.step(20)
        frame = shown(rings)
    labels = [e.text for e in card(frame, "Throughput per replica").iter("span") if "e" in e.get("class", "").split()]
    assert len(labels) == 2
    for label in labels:
        assert label in words.alternative(frame)
    assert words.rate(161_421) == "161.4k"
    assert words.rate(99_421) == "99,421"


def test_in_sync_is_told_with_its_step_once():
    frame = trained(2)
    assert text(frame).count("at step") == 1


def test_a_picture_of_one_cell_counts_its_own_steps():
    with MadeRings(2) as rings:
        rings.step(128)
        rings.timeline.forget()
        rings.mark(Mark.PLANNED, 256)
        rings.step(64)
        rings.log_loss()
        frame = shown(rings, since=rings.timeline.forgotten)
    assert frame.since == 128
    assert "64 / 128 steps192 in all" in text(frame)
    assert 'style="width:50.0%"' in page.Page().body(frame)
    # Nothing is left free for the steps of other cells.
    assert frame.snapshot.steps[0] == frame.snapshot.late_steps[0] == 129


def test_texts_of_users_are_escaped():
    with MadeRings(2) as rings:
        rings.step(30)
        rings.log("</div><script>x</script>", [1.0, 2.0])
        odd = [dataclasses.replace(r, name="<b>&\"'") for r in readings(2)]
        frame = shown(rings, title="<img src=x onerror=y>", operation="a&b", note="<i>died</i>", readings=tuple(odd))
    root = tree(frame)
    assert {e.tag for e in root.iter()} <= {"div", "span", "b", "i", "svg", "path", "g", "header", "small"}
    assert "<img src=x onerror=y>" in "".join(root.itertext())
    assert "</div><script>" in "".join(root.itertext()).lower()
    assert root.get("aria-label", "").startswith("<img src=x onerror=y>: running")


# ------------------------------------------------------------------ trouble, and only that, is red

RED = {"hot", "bad", "differs"}


def test_nothing_is_red_in_a_healthy_training():
    assert classes(tree(trained(4))) & RED == set()


def test_lateness_is_red_only_where_a_finding_names_the_replica():
    with MadeRings(2, jitter=0.3) as rings:
        rings.step(90)
        frame = shown(rings)
    assert frame.snapshot.lateness.max() > 0.2 * frame.snapshot.step_seconds
    assert not frame.slow()
    assert classes(card(frame, "Who arrives late")) & RED == set()
    named = dataclasses.replace(frame, findings=(Finding(Weight.SLOW, "r1 is slow", "", 1, 0.1),))
    _, red = panels.trouble(named, np.nan_to_num(frame.snapshot.lateness))
    assert red[1].any()
    assert not red[0].any()


def test_a_slow_replica_stands_out():
    with MadeRings(4) as rings:
        rings.step(60)
        rings.slowness[2] = 1.3
        rings.step(60)
        frame = shown(rings)
    assert "r2 is slow" in text(frame)
    assert "hot" in classes(card(frame, "Who arrives late"))
    for title in ("Throughput per replica", "Where a step goes"):
        bold = [e.text for e in card(frame, title).iter("span") if "b" in e.get("class", "").split()]
        assert [name for name in bold if name.startswith("r2")] == bold != []
    assert "r2 is slow" in words.alternative(frame)


def test_a_replica_whose_parameters_differ_is_not_painted_as_late():
    with MadeRings(2) as rings:
        rings.step(60)
        rings.log_checksums([7, 8])
        frame = shown(rings)
    assert frame.findings[0].replica_id == 1
    assert not frame.slow()
    assert "b" not in classes(card(frame, "Throughput per replica").find("div"))


def test_a_failed_training_is_told_nothing_reassuring():
    frame = trained(2, phase=Phase.FAILED, note="replica 1 died (killed by signal 9)")
    said = "".join(card(frame, "What to look at").itertext())
    assert "Nothing stands out" not in said
    assert "in sync" not in said
    assert "replica 1 died (killed by signal 9)" in said


def test_replicas_that_differ_much_are_not_said_to_be_near_each_other():
    with MadeRings(2, buckets=[MB]) as rings:
        rings.step(60)
        rings.slowness[1] = 3.0
        rings.step(20)
        frame = shown(rings, findings=())
    said = "".join(card(frame, "What to look at").itertext())
    assert "of each other" not in said
    assert "Nothing stands out" not in said
    assert "No replica is slow throughout" in said


def test_an_interrupted_training_is_not_red():
    frame = trained(2, phase=Phase.INTERRUPTED)
    assert "interrupted" in text(frame)
    assert classes(tree(frame)) & RED == set()
    assert frame.phase.over


def test_its_line_stays_in_sight_however_late_it_got_slow():
    with MadeRings(4) as rings:
        rings.step(230)
        rings.slowness[2] = 2.0
        rings.step(5)
        shot = shown(rings).snapshot
    now = panels.latest(shot.throughputs)
    low, high = panels.visible(shot.throughputs, now)
    assert low < min(now) < max(now) < high


def test_a_stuck_replica_turns_the_state_red():
    with MadeRings(2) as rings:
        rings.step(30)
        rings.stall(1, 60)
        frame = shown(rings)
    assert frame.troubled()
    assert "bad" in tree(frame).find(".//i[@class='pill running bad']").get("class")
    assert "r1 did not come" in text(frame)


def test_parameters_that_differ_are_told():
    with MadeRings(2) as rings:
        rings.step(30)
        rings.log_loss()
        rings.log_checksums([7, 8])
        frame = shown(rings)
        rings.step()
        rings.log_checksums([8, 8])
        healed = shown(rings)
    assert "weight differs at step 30" in text(frame)
    assert "differs" in classes(tree(frame))
    assert "weight differs at step 30" in words.alternative(frame)
    assert "weight differs on r1" in text(frame)
    assert "parameters in sync at step 31 ✓" in text(healed)


def test_a_throttling_device_is_red_and_the_others_are_not():
    with MadeRings(2) as rings:
        rings.step(30)
        frame = shown(rings, readings=readings(2, hot=1))
    devices = card(frame, "Devices")
    assert [e.text for e in devices.iter("i") if "hot" in e.get("class", "").split()] == ["83 °C", "498 W"]
    assert "61.0 / 80 GiB" in "".join(devices.itertext())


def test_processes_on_the_cpu_show_what_they_have():
    read = (Reading("cpu:0", "process 4711", 1, 1.5, 2**30, 8 * 2**30, None, None, None, None, None, ()),)
    with MadeRings(2) as rings:
        rings.step(2)
        said = "".join(card(shown(rings, readings=read, devices=("cpu:0", "cpu:1")), "Devices").itertext())
    assert "cpu:0 process 4711150 %1.0 / 8 GiB" in said
    assert "cpu:1" in said
    assert "temperature" not in said


def test_without_readings_the_replicas_own_memory_is_shown():
    with MadeRings(2) as rings:
        rings.step()
        rings.log_memory(3 * 2**30)
        assert "3.0 GiB" in "".join(card(shown(rings), "Devices").itertext())


def test_lost_samples_are_told():
    with MadeRings(1, capacity=64) as rings:
        rings.step(60)
        said = "".join(card(shown(rings), "What to look at").itertext())
    assert re.search(r"\d+ timings not kept", said)
    assert "lost" not in said


# ------------------------------------------------------------------ colours and the parts of a drawing


def test_colours_follow_the_theme_and_the_cells_width():
    for dark in palette.DARK:
        assert dark in page.STYLE
    assert "[data-jp-theme-light=false] .mnb" in page.STYLE
    assert "vscode-dark" in page.STYLE
    assert "@container (min-width" in page.STYLE


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK])
@pytest.mark.parametrize("eyes", ["normal", "protan", "deutan"])
def test_the_colours_of_two_replicas_can_be_told_apart(colours, eyes):
    # Viénot, Brettel, Mollon (1999), in linear RGB; distances in CIELAB, where 2.3 is just noticeable.
    seen = {
        "normal": np.eye(3),
        "protan": np.array([[0.1124, 0.8876, 0], [0.1124, 0.8876, 0], [0.0040, -0.0040, 1]]),
        "deutan": np.array([[0.2928, 0.7072, 0], [0.2928, 0.7072, 0], [-0.0223, 0.0223, 1]]),
    }[eyes]
    # The first four are in nearly every picture, and lines bear their names.
    for count, least in ((4, 20), (8, 12)):
        labs = [_lab(colour, seen) for colour in colours[:count]]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(labs, 2)) > least


@pytest.mark.parametrize(("dark", "card"), [(False, "#f8f8f8"), (True, "#181818")])
def test_the_parts_of_a_step_can_be_told_from_their_neighbours_and_the_card(dark, card):
    labs = {name: _lab(both[dark], np.eye(3)) for name, both in palette.PARTS.items()}
    for one, other in itertools.pairwise(labs):
        assert np.linalg.norm(labs[one] - labs[other]) > 20, (one, other)
        if "exposed" not in (one, other):
            assert abs(labs[one][0] - labs[other][0]) > 15, (one, other)
    paper = _luminance(card)
    for name, both in palette.PARTS.items():
        lighter, darker = sorted((_luminance(both[dark]), paper), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) > 1.45, name


def _luminance(colour: str) -> float:
    """The relative luminance of WCAG 2."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _lab(colour: str, seen: np.ndarray) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.clip(seen @ np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92), 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    f = np.cbrt(to_xyz @ linear / [0.9505, 1, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_labels_keep_their_order_and_a_distance():
    places = plot.spread([50, 51, 49, 120], 12, 5, 127)
    assert sorted(range(4), key=lambda i: places[i]) == [2, 0, 1, 3]
    assert min(np.diff(sorted(places))) >= 12
    assert plot.spread([5.0] * 20, 12, 5, 127)[-1] <= 127


def test_a_line_is_broken_where_nothing_is_known():
    drawn = plot.line(plot.abscissas(5), np.array([1, 2, np.nan, 4, np.nan]), "s")
    assert drawn.count("M") == 2
    assert "h0" in drawn
    assert plot.line(plot.abscissas(2), np.array([np.nan, np.nan]), "s") == ""


def test_ticks_are_round():
    assert plot.ticks(0, 83, 4) == [0, 25, 50, 75]
    assert plot.ticks(5, 5) == [5]


@pytest.mark.parametrize(
    ("value", "said"),
    [(13020.4, "13,020"), (41.23, "41.2"), (0.4123, "0.412"), (2.24e-3, "0.0022"), (1.2e-5, "1.2e-05"), (None, "–")],
)
def test_numbers_are_short(value, said):
    assert words.number(value) == said


def test_times_and_sizes_have_units():
    assert words.left(72) == "01:12"
    assert words.left(7400) == "2:03:20"
    assert words.pair(0.0002, 0.004) == "0.20 / 4.0 ms"
    assert words.pair(0.5, 2) == "0.5 / 2.0 s"
    assert words.bandwidth(188e9) == "188 GB/s"
    assert words.bandwidth(2e7) == "20 MB/s"
