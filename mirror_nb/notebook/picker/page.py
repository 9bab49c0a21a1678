"""The pieces of the picker that are only looked at, as HTML, and its style. Pure; knows no widgets."""

from __future__ import annotations

import html
from collections.abc import Collection

from mirror_nb import readable
from mirror_nb.notebook.dashboard import page
from mirror_nb.notebook.picker.choice import Operation, Standing
from mirror_nb.notebook.picker.inventory import MEANINGS, Card, Inventory, Tenant
from mirror_nb.telemetry.machine import Reading

SHOWN_TENANTS = 3
HOT = 85.0
# °C, from which a GPU's temperature is shown as trouble.
TEXT = (
    "mirror_nb picker. If no boxes to tick are shown here, this front end shows no widgets, or the kernel that they "
    "belonged to is gone: run the cell again in JupyterLab, Notebook 7 or VS Code (pip install ipywidgets). "
    "Or write it: %mirror start --devices cpu:0,cpu:1 (or cuda:0,cuda:1), %mirror status, %mirror stop."
)
# The same in every run, so that notebooks can be compared. Seen only where widgets are not.
GONE = (
    '<div class="note" role="status">The kernel that these boxes belong to is gone. '
    "Run <code>%load_ext mirror_nb</code> and this cell again: <code>%mirror</code></div>"
)
# Hidden by the style until the front end says so, instead of its broken link beside every single box.
_STYLE = """<style>
.mnb-picker{width:100%;padding:4px 2px;gap:10px;font-size:12px}
.mnb-picker,.mnb-picker .widget-box{overflow:visible}
.mnb-picker .widget-html,.mnb-picker .widget-html-content{height:auto;width:auto;margin:0;min-width:0;
line-height:1.4;font-size:12px;flex:1 1 auto;overflow:visible}
.mnb-picker .mnb-gone{display:none!important}
.mnb-picker.jupyter-widgets-disconnected .mnb-gone{display:flex!important}
.mnb-picker .mnb-gone .note{margin:0}
.mnb-picker.jupyter-widgets-disconnected::before,.mnb-picker .jupyter-widgets-disconnected::before{
content:none!important;display:none!important}
.mnb-picker.jupyter-widgets-disconnected>.mnb-state{display:none}
.mnb-picker.jupyter-widgets-disconnected>:not(.mnb-gone,.mnb-line){opacity:.4;pointer-events:none}
.mnb-picker .mnb-style{position:absolute;width:0;height:0;overflow:hidden}
.mnb-picker .mnb-cards{display:grid;gap:10px;grid-template-columns:repeat(auto-fill,minmax(min(280px,100%),1fr));
width:100%;margin:0}
.mnb-picker .mnb-card{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:8px 12px 10px;
margin:0;width:auto;min-width:0;gap:4px}
.mnb-picker .mnb-card:focus-within{border-color:var(--jp-brand-color1,var(--vscode-focusBorder,#2a6fd6))}
.mnb-picker .mnb-card .widget-checkbox{width:auto;margin:0;height:auto}
.mnb-picker .mnb-card .widget-checkbox .widget-label-basic{font-size:13px;font-weight:700;padding:0;
color:var(--fg);cursor:pointer;white-space:nowrap;overflow:visible}
.mnb-picker .mnb-card .widget-text{width:auto;margin:0}
.mnb-picker .mnb-card .widget-text .widget-label{width:auto;font-weight:700;font-size:13px;color:var(--fg);
margin-right:8px}
.mnb-picker .mnb-card .widget-text input{max-width:64px}
.mnb-picker .rep{float:right;margin-top:-26px;color:var(--c);font-weight:700}
.mnb-picker .rep+.rep{margin-top:0}
.mnb-picker .reps{color:var(--m);display:flex;flex-wrap:wrap;gap:0 10px}.mnb-picker .reps b{color:var(--c)}
.mnb-picker .what{color:var(--m);white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.mnb-picker .bar{margin:5px 0 3px;--c:var(--m)}
.mnb-picker .nums{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 10px;
font-variant-numeric:tabular-nums}
.mnb-picker .by{list-style:none;margin:4px 0 0!important;padding:4px 0 0!important;border-top:1px solid var(--edge);
color:var(--m)}
.mnb-picker .by li{display:flex;justify-content:space-between;gap:10px}
.mnb-picker .by span{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.mnb-picker .by i{white-space:nowrap;font-variant-numeric:tabular-nums}
.mnb-picker .state{display:flex;flex-wrap:wrap;gap:2px 10px;align-items:center}
.mnb-picker .state>b{font-size:16px}.mnb-picker .state span{color:var(--m)}
.mnb-picker .state .pill{color:var(--bg)}
.mnb-picker table.links{border-collapse:collapse;margin:0;font-size:11px;font-variant-numeric:tabular-nums;
background:none}
.mnb-picker table.links caption{text-align:left;font-weight:600;font-size:12.5px;padding-bottom:4px;color:var(--fg)}
.mnb-picker table.links :is(td,th){padding:2px 8px;text-align:center;border:1px solid var(--edge);color:var(--m);
font-weight:400;background:none}
.mnb-picker table.links th{color:var(--fg);border-color:transparent;text-align:right}
.mnb-picker table.links thead :is(td,th){text-align:center;border-color:transparent}
.mnb-picker table.links td.picked{color:var(--fg);font-weight:600;background:var(--lo)}
.mnb-picker .scroll{overflow-x:auto}.mnb-picker .legend{margin:4px 0 0}
.mnb-picker .mnb-options{display:flex;flex-flow:row wrap;gap:10px 24px;align-items:flex-start;margin:0}
.mnb-picker .mnb-field{margin:0;width:auto;gap:2px;min-width:0}
.mnb-picker .mnb-field .widget-label{width:auto;text-align:left;font-weight:600;font-size:12.5px;color:var(--fg);
height:18px;line-height:18px;padding:0;margin:0;flex:none}
.mnb-picker .mnb-field :is(.widget-radio,.widget-dropdown){display:flex;flex-direction:column;align-items:flex-start;
width:auto;margin:0;height:auto;max-width:100%}
.mnb-picker .mnb-field .widget-radio-box{width:auto;margin:2px 0 0;height:auto}
.mnb-picker .mnb-field .widget-radio-box label{font-size:12px;height:auto;line-height:20px;white-space:normal;
font-variant-numeric:tabular-nums;color:var(--fg)}
.mnb-picker .mnb-field select{min-width:120px;margin-top:4px;flex:none;height:28px}
.mnb-picker .mnb-go{display:flex;flex-flow:row wrap;gap:6px;margin:0}
.mnb-picker .mnb-go button,.mnb-picker .mnb-field button{width:auto;min-width:84px;margin:0}
.mnb-picker .mnb-field button{align-self:flex-start}
.mnb-picker button:focus-visible,.mnb-picker input:focus-visible,.mnb-picker code:focus-visible,
.mnb-picker select:focus-visible{outline:2px solid var(--jp-brand-color1,var(--vscode-focusBorder,#2a6fd6))!important;
outline-offset:2px}
.mnb-picker .mnb-go .mod-primary{color:#fff}
.mnb-picker .code{display:flex;gap:8px;align-items:stretch;max-width:100%}
.mnb-picker .code code{flex:0 1 auto;min-width:0;user-select:all;background:var(--lo);color:var(--fg);
border-radius:6px;padding:5px 10px;white-space:pre-wrap;overflow-wrap:anywhere;
font:12px/1.5 var(--jp-code-font-family,var(--vscode-editor-font-family,monospace))}
.mnb-picker .code button{font:inherit;font-size:12px;color:var(--fg);background:none;border:1px solid var(--edge);
border-radius:6px;padding:0 12px;cursor:pointer;min-width:70px}
.mnb-picker .code button:hover{background:var(--lo)}
.mnb-picker .said{margin:0;padding:2px 0 2px 9px;border-left:3px solid var(--edge)}
.mnb-picker .said.bad{border-color:var(--hot)}.mnb-picker .said.bad b{color:var(--hot)}
</style>"""
STYLE = page.STYLE + _STYLE
# The variables and colours are the dashboard's.
_COPY = (
    "const b=this,c=b.previousElementSibling,said=t=&gt;{b.textContent=t;"
    "setTimeout(()=&gt;{b.textContent='Copy'},1500)},mark=()=&gt;{getSelection().selectAllChildren(c);"
    "said('Press Ctrl+C')};navigator.clipboard?navigator.clipboard.writeText(c.textContent).then("
    "()=&gt;said('Copied'),mark):mark()"
)
# Without https the browser has no clipboard for us: then the line is selected.


def state(standing: Standing) -> str:
    """Return the first line: whether replicas run, and on what."""
    n = len(standing.devices)
    if not n:
        nothing = '<i class="pill">no replicas</i><span>pick devices, press Start</span>'
        return f'<div class="state"><b>mirror_nb</b>{nothing}</div>'
    where = html.escape(", ".join(standing.devices))
    said = f"{n} replica{'s' if n > 1 else ''} on {where}"
    return f'<div class="state"><b>mirror_nb</b><i class="pill running">running</i><span>{said}</span></div>'


def gpu(card: Card, replica_id: int | None, mine: Collection[int]) -> str:
    """Return a GPU's card: what it is, its memory and whose that is, how busy and how warm it is."""
    reading = card.reading
    tag = f'<b class="rep r{replica_id % 8}">replica {replica_id}</b>' if replica_id is not None else ""
    by = "".join(_tenant(tenant, mine) for tenant in card.tenants[:SHOWN_TENANTS])
    more = len(card.tenants) - SHOWN_TENANTS
    by += f"<li><span>and {more} more</span></li>" if more > 0 else ""
    name = html.escape(reading.name)
    return (
        f'{tag}<div class="what" title="{name}">{name or "no readings"}</div>'
        f"{_memory(reading)}{_numbers(reading)}" + (f'<ul class="by">{by}</ul>' if by else "")
    )


def cpu(inventory: Inventory, replicas: int) -> str:
    """Return the card of the CPU: its cores, the machine's memory, and what is to be said of so many replicas."""
    cores = f"{inventory.cores} core{'s' if inventory.cores > 1 else ''}"
    tags = "".join(f'<b class="r{r % 8}">cpu:{r}</b>' for r in range(replicas))
    many = (
        '<div class="hot">more replicas than cores: they take turns, training gets slower</div>'
        if replicas > inventory.cores
        else ""
    )
    return (
        f'<div class="what">CPU, {cores}, for laptops and tests</div>{_memory(inventory.host)}'
        f"{_numbers(inventory.host)}{f'<div class=reps>{tags}</div>' if tags else ''}{many}"
    )


def links(inventory: Inventory, picked: Collection[str]) -> str:
    """Return the matrix of how GPUs are linked; empty with fewer than two, or where no driver tells."""
    names = [card.device for card in inventory.gpus]
    if len(names) < 2 or not any(map(any, inventory.links)):
        return ""
    head = "".join(f'<th scope="col">{html.escape(name.removeprefix("cuda:"))}</th>' for name in names)
    rows = ""
    for a, name in enumerate(names):
        cells = "".join(
            _link(inventory.links[a][b], name in picked and other in picked, a == b) for b, other in enumerate(names)
        )
        rows += f'<tr><th scope="row">{html.escape(name)}</th>{cells}</tr>'
    used = [word for word in MEANINGS if any(word in row for row in inventory.links)]
    legend = "".join(f"<span><b>{word}</b> {MEANINGS[word]}</span>" for word in used)
    return (
        '<div class="scroll"><table class="links"><caption>Links between GPUs</caption>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<div class="legend">{legend}</div>'
    )


def operation(its: Operation, default: bool) -> str:
    """Return the label of cross-device ops: name, whether it is the default, and the times measured last."""
    times = ", ".join(f"{readable.size(size)} {readable.milliseconds(seconds)}" for size, seconds in its.times)
    return its.name + (" (default)" if default else "") + (f"  ·  {times}" if times else "")


def line(text: str) -> str:
    """Return the line of code, with a button that copies it."""
    if not text:
        return '<div class="code"><code>pick at least one device</code></div>'
    return (
        f'<div class="code"><code tabindex="0" aria-label="the same in code">{html.escape(text)}</code>'
        f'<button type="button" aria-label="Copy the line of code" onclick="{_COPY}">Copy</button></div>'
    )


def said(text: str, bad: bool = False) -> str:
    """Return what came of a press, read aloud by screen readers."""
    if not text:
        return '<div role="status"></div>'
    role, kind = ("alert", "said bad") if bad else ("status", "said")
    return f'<div class="{kind}" role="{role}"><b>{html.escape(text)}</b></div>'


def note(text: str) -> str:
    """Return a sentence that matters, such as why GPUs have no readings; empty for an empty one."""
    return f'<div class="said" role="note">{html.escape(text)}</div>' if text else ""


def _memory(reading: Reading) -> str:
    used, total = reading.memory_used, reading.memory_total
    if used is None or not total:
        return ""
    share = min(1.0, used / total)
    return (
        f'<i class="bar" role="img" aria-label="{share:.0%} of the memory is used">'
        f'<i style="width:{share:.1%}"></i></i><div class="nums"><b>{readable.size(total - used)} free</b>'
        f"<span>{readable.size(used)} of {readable.size(total)} used</span></div>"
    )


def _numbers(reading: Reading) -> str:
    parts = []
    if reading.utilisation is not None:
        parts.append(f"<span>{reading.utilisation * 100:.0f} % busy</span>")
    if reading.temperature is not None:
        hot = reading.temperature >= HOT
        parts.append(f"<span{' class=hot' if hot else ''}>{reading.temperature:.0f} °C</span>")
    if reading.power is not None:
        limit = f" of {reading.power_limit:.0f}" if reading.power_limit else ""
        parts.append(f"<span>{reading.power:.0f}{limit} W</span>")
    return f'<div class="nums">{"".join(parts)}</div>' if parts else ""


def _tenant(tenant: Tenant, mine: Collection[int]) -> str:
    who = "this notebook's replica" if tenant.pid in mine else tenant.who
    memory = readable.size(tenant.memory) if tenant.memory is not None else "–"
    return f"<li><span>{html.escape(who)} · {tenant.pid}</span><i>{memory}</i></li>"


def _link(word: str, picked: bool, itself: bool) -> str:
    text = "·" if itself else word or "–"
    return f"<td{' class=picked' if picked and not itself else ''}>{text}</td>"
