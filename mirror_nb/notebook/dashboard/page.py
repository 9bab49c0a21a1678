"""The panels as one page, drawn whole or one half anew, and its style. Knows no widgets.

Light or dark is decided by CSS alone: the colours of paper and ink are those of the front end, and replicas have their
darker colours where JupyterLab, VS Code or Colab say that the theme is light.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import final

from mirror_nb.notebook.dashboard import palette, panels, words
from mirror_nb.notebook.dashboard.frame import Frame
from mirror_nb.telemetry.snapshot import Half

_DARK = (
    "[data-jp-theme-light=false] .mnb",
    "[data-vscode-theme-kind=vscode-dark] .mnb",
    ".vscode-dark .mnb",
    "[data-vscode-theme-kind=vscode-high-contrast] .mnb",
    "html[theme=dark] .mnb",
)
# How JupyterLab and Notebook, VS Code, and Colab say that theirs is a dark theme.


def _variables(dark: bool) -> str:
    colours = [f"--r{r}:{palette.colour(r, dark)}" for r in range(len(palette.LIGHT))]
    colours += [f"--{name}:{both[dark]}" for name, both in palette.PARTS.items()]
    return ";".join([*colours, f"--hot:{palette.TROUBLE[dark]}"])


def _style() -> str:
    replicas = "".join(f".mnb .r{r}{{--c:var(--r{r})}}" for r in range(len(palette.LIGHT)))
    parts = "".join(f".mnb .f-{name}{{fill:var(--{name})}}" for name in palette.PARTS)
    return f"""<style>.mnb{{
--bg:var(--jp-layout-color0,var(--vscode-editor-background,var(--colab-primary-surface-color,#fff)));
--fg:var(--jp-content-font-color1,var(--vscode-editor-foreground,var(--colab-primary-text-color,#1d2330)));
--m:color-mix(in srgb,var(--fg) 62%,var(--bg));--lo:color-mix(in srgb,var(--fg) 8%,var(--bg));
--edge:color-mix(in srgb,var(--fg) 13%,var(--bg));--card:color-mix(in srgb,var(--fg) 3%,var(--bg));
{_variables(False)};container-type:inline-size;color:var(--fg);
font:11px/1.35 var(--jp-ui-font-family,var(--vscode-font-family,system-ui,sans-serif));padding:2px}}
{",".join(_DARK)}{{{_variables(True)}}}{replicas}{parts}
.mnb *{{box-sizing:border-box}}.mnb i{{font-style:normal}}.mnb b{{font-weight:600}}.mnb .b{{font-weight:700}}
.mnb .hot{{--c:var(--hot);color:var(--hot)!important}}.mnb .m{{--c:var(--m)}}.mnb .ink{{--c:var(--fg)}}
.mnb .top{{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:center;min-height:28px;padding-right:280px}}
.mnb .top>b{{font-size:16px;font-weight:700}}.mnb .top>span{{color:var(--m)}}
.mnb .pill{{border-radius:6px;padding:3px 10px 2px;line-height:13px;font-weight:700;font-size:10px;
letter-spacing:.05em;text-transform:uppercase;color:var(--bg);background:var(--m)}}
.mnb .pill.running,.mnb .pill.finished{{background:var(--fg)}}.mnb .pill.bad{{background:var(--hot)}}
.mnb .facts{{display:flex;flex-wrap:wrap;gap:2px 22px;margin:4px 0 6px;color:var(--m);min-height:22px}}
.mnb .facts b{{font-size:16px;color:var(--fg);font-variant-numeric:tabular-nums}}
.mnb .facts .comm b{{color:var(--exposed)}}
.mnb .bar{{display:block;height:8px;border-radius:3px;background:var(--lo);overflow:hidden}}
.mnb .bar i{{display:block;height:100%;background:var(--c,var(--fg))}}
.mnb .way{{height:4px;margin-bottom:10px}}
.mnb .note{{border-left:3px solid var(--hot);padding:4px 10px;margin-bottom:10px;font-size:12px;font-weight:600}}
.mnb .grid{{display:grid;gap:10px;grid-template-columns:minmax(0,1fr)}}
.mnb .c{{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:9px 12px 8px;min-width:0;
position:relative;min-height:80px}}
.mnb header{{display:flex;flex-wrap:wrap;justify-content:space-between;align-items:baseline;gap:0 10px;
margin-bottom:7px}}.mnb header b{{font-size:12.5px}}.mnb header span,.mnb .none,.mnb small{{color:var(--m)}}
.mnb .none{{padding:34px 0;text-align:center}}
.mnb .differs header span{{color:var(--hot)}}
.mnb .p{{position:relative;margin:4px 62px 18px 36px}}.mnb .rows{{margin-left:24px;margin-right:56px}}
.mnb .flush{{margin-right:8px}}.mnb .p.wide{{margin-left:50px;margin-right:92px}}
.mnb .p>svg{{position:absolute;inset:0;width:100%;height:100%;overflow:hidden}}
.mnb .p>span{{position:absolute;white-space:nowrap;color:var(--m);line-height:12px;
font-variant-numeric:tabular-nums}}
.mnb .p>.l,.mnb .p>.e{{transform:translateY(-50%)}}.mnb .p>.l{{right:calc(100% + 6px)}}
.mnb .p>.e{{left:calc(100% + 6px)}}.mnb .p>.x{{top:calc(100% + 3px);transform:translateX(-50%)}}
.mnb .p>[class*=" r"]{{color:var(--c)}}.mnb .p>.b{{color:var(--c,var(--fg))}}.mnb .two{{font-size:10.5px}}
.mnb .two:not(.m){{color:var(--fg)!important}}
.mnb path{{vector-effect:non-scaling-stroke}}.mnb .s{{fill:none;stroke:var(--c);stroke-width:1.5;
stroke-linejoin:round;stroke-linecap:round}}.mnb .g{{fill:none;stroke:var(--edge);stroke-width:1}}
.mnb .also{{display:grid;grid-template-columns:auto minmax(40px,1fr) minmax(48px,auto);gap:5px 10px;
align-items:center;color:var(--m);margin-top:8px}}.mnb .also svg{{width:100%;height:20px;overflow:visible}}
.mnb .also b{{color:var(--fg);font-variant-numeric:tabular-nums}}
.mnb .crisp svg{{shape-rendering:crispEdges}}
.mnb .ink{{stroke-width:1.8}}.mnb .band{{fill:var(--fg);fill-opacity:.16}}
.mnb .ridge{{fill:var(--exposed);fill-opacity:.35;stroke:var(--exposed);stroke-width:1}}
.mnb .q{{stroke:var(--fg);stroke-width:1.6}}.mnb .q.d{{stroke-dasharray:2 2}}
.mnb .t path{{stroke:var(--c)}}.mnb .f-ground{{--c:var(--lo)}}
.mnb .f-collective{{fill:var(--exposed);fill-opacity:.4}}
.mnb .o1{{opacity:.25}}.mnb .o2{{opacity:.45}}.mnb .o3{{opacity:.7}}
.mnb .legend{{display:flex;flex-wrap:wrap;gap:1px 9px;margin-bottom:7px;color:var(--m);font-size:10.5px}}
.mnb .legend svg{{width:9px;height:9px;margin-right:3px}}
.mnb .d{{display:grid;gap:7px 10px;align-items:center;
grid-template-columns:auto minmax(24px,1fr) auto minmax(24px,1fr) auto auto auto auto}}
.mnb .d .n1{{color:var(--c);white-space:nowrap}}.mnb .d small{{font-size:10.5px;font-weight:400;display:none}}
.mnb .n{{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}}
.mnb .spark{{display:none;width:56px;height:16px}}
.mnb .said{{border-left:3px solid var(--edge);padding:0 0 0 9px;margin:2px 0 10px}}
.mnb .said b,.mnb .said span{{display:block}}.mnb .said b{{font-size:12px}}.mnb .said span{{color:var(--m)}}
.mnb .bad.said{{border-color:var(--hot)}}.mnb .hint.said{{border-color:var(--m)}}
.mnb .look{{min-height:185px}}
@container (max-width:699px){{.mnb .look{{order:-1;min-height:168px}}}}
@container (min-width:620px){{.mnb .d small{{display:inline}}.mnb .spark{{display:block}}}}
@container (min-width:700px){{.mnb .grid{{grid-template-columns:repeat(2,minmax(0,1fr))}}
.mnb .wide2{{grid-column:span 2}}.mnb .look{{grid-column:1/-1}}}}
@container (min-width:1000px){{.mnb .grid{{grid-template-columns:repeat(3,minmax(0,1fr))}}
.mnb .grid:not(.alone) .look{{grid-column:auto}}}}
.mnb-board .mnb-gone{{display:none!important}}
.mnb-board.jupyter-widgets-disconnected .mnb-gone{{display:flex!important}}
.mnb-board.jupyter-widgets-disconnected::before,.mnb-board .jupyter-widgets-disconnected::before{{
content:none!important;display:none!important}}
.mnb-board.jupyter-widgets-disconnected>.mnb-buttons{{display:none}}
.mnb-board.jupyter-widgets-disconnected>:not(.mnb-gone){{opacity:.4}}
.mnb-board{{position:relative}}.mnb-buttons{{position:absolute;right:0;top:2px;z-index:1}}
.mnb-buttons button{{width:86px;height:26px;line-height:26px;padding:0}}</style>"""


GONE = (
    '<div class="mnb"><div class="note" role="status">The kernel that drew this is gone, and this is the last that it '
    "drew. Run the cell again to train anew; <code>python -m mirror_nb watch</code> shows replicas that still run."
    "</div></div>"
)
# Hidden by the style until the front end says that the kernel is.
STYLE = _style()
# The same in every frame: sent once.


@final
class Page:
    """The page, frame after frame."""

    def __init__(self) -> None:
        self._cards: dict[Callable[[Frame], str], str] = {}
        # By what draws it: what was drawn last.
        self._slow: frozenset[int] = frozenset()
        # Who is marked there.

    def body(self, frame: Frame, half: Half | None = None) -> str:
        """Return it as HTML without its style; of all panels but the header, draw only those of this half anew.

        All of them where other replicas have become slow: they are marked in every panel.
        """
        half, self._slow = half if frame.slow() == self._slow else None, frame.slow()
        alone = frame.snapshot.num_replicas == 1
        cards = dict.fromkeys((panels.throughput, panels.loss, panels.breakdown), Half.COURSE)
        meetings = (panels.all_reduces, panels.lateness, panels.lanes)
        cards |= dict.fromkeys(meetings[2:] if alone else meetings, Half.MEETINGS)
        cards |= {panels.devices: Half.COURSE, panels.look_at: Half.MEETINGS}
        for card, its_half in cards.items():
            if half is None or half is its_half or card not in self._cards:
                self._cards[card] = card(frame)
        drawn = "".join([self._cards[card] for card in cards])
        # One picture with one text: a screen reader is not to read hundreds of labels, several times a second.
        label = html.escape(words.alternative(frame))
        return (
            f'<div class="mnb" role="img" aria-live="off" aria-label="{label}">{panels.header(frame)}'
            f'<div class="grid{" alone" if alone else ""}">{drawn}</div></div>'
        )
