"""What travels between the controller and a replica: dataclasses that nobody changes.

Both ends know this module and not each other.
"""

from __future__ import annotations

import enum
import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mirror_nb.environment.surroundings import Changes
from mirror_nb.transfer.packing import SearchPath
from mirror_nb.transfer.payload import Payload


class _Compact:
    """Pickles a dataclass as a call of its class: three times as fast as dataclasses' own way."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        kind: Any = type(self)
        return kind, fields_of(kind)(self)


@functools.cache
def fields_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads all fields of a message of this kind."""
    names: tuple[str, ...] = kind.__slots__
    fields: Callable[[Any], Any] = operator.attrgetter(*names)
    # Of one name it returns the value alone.
    return fields if len(names) > 1 else lambda message: (fields(message),)


_IPYTHONS = r"In|Out|get_ipython|exit|quit|open|_{1,3}|_i{1,3}|_i?\d+|_[a-z]h|_exit_code|__\w+__"
_COMPILERS = (
    r"__(compiled_fn|builtins_dict__|resume_at|gen_rand_values|warnings_warn_wrapper|comprehension|import|_unnamed_scope)"
    r"_[\w<>]+|_(\w*_)?\d{9,}_c.*"
)
# What torch.compile binds beside a function that it compiles; the last with the address of an object.
_NOT_THE_USERS = re.compile(f"{_IPYTHONS}|{_COMPILERS}")


def travels(name: str) -> bool:
    """Whether a name is the user's to send, not one that IPython, Python or torch.compile keeps for itself here."""
    return _NOT_THE_USERS.fullmatch(name) is None


def former(name: str) -> str:
    """Return the name, no user's, that the object has which a cell has taken this name from, while both sides talk."""
    return f"{name} before"


# --------------------------------------------------------------------------- controller to replica


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """All a replica's process needs to begin."""

    replica_id: int
    num_replicas: int
    device: str
    # As torch names it in the replica, e.g. "cuda:0" for the first GPU that it sees.
    seed: int
    threads: int
    # For torch's operators on the CPU.
    environment: dict[str, str]
    reduction: str
    # Of gradients: "mean" or "sum".
    setup: str
    # "module:function", called with the replica: gives the names that its cells find bound.
    communication: bytes = b""
    # Pickled: what gradients are reduced by, and how. Empty: the default of the device.


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and as whom a replica joins the process group."""

    host: str
    port: int
    # TCP port of the store, on loopback.
    generation: int
    # Counts how often the group was formed; every generation has keys of its own in the store.
    replica_id: int
    num_replicas: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Form:
    """Join the process group of this generation and prove it by an all-reduce."""

    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True)
class Source:
    """Where functions that travel were written: tracebacks show these lines."""

    file: str
    # As their code names it; there is no such file.
    text: str
    number: int | None
    # Of the notebook's cell.


@dataclass(frozen=True, slots=True)
class Holdings(_Compact):
    """What the notebook has of a replica's values by the time a cell begins."""

    renamed: tuple[tuple[str, str], ...] = ()
    # Names, and others under which the replica is to keep their values of now, too.
    retained: tuple[str, ...] = ()
    # Handles of networks, optimizers and the like that are to live on, whatever becomes of their names.
    deleted: tuple[str, ...] = ()
    # Names that the notebook has deleted since it shared them.
    outdated: tuple[str, ...] = ()
    # Names that it has bound anew since, and whose values the replica has not got.
    changed: tuple[str, ...] = ()
    # Names that the cell may bind, and whose values it has changed since.
    lost: tuple[str, ...] = ()
    # Handles of networks that it has no more; parts of them it may have.
    named: tuple[tuple[str, str, str, str], ...] = ()
    # Where networks whose attributes it has just sent have values with names: as in `Exports`.
    deletable: tuple[str, ...] = ()
    # Names that it has, whether the replica has them or not, and that the cell may delete.


@dataclass(frozen=True, slots=True)
class RunCell(_Compact):
    """Run a cell in the replica's shell."""

    source: str
    names: Payload | None
    # Names to bind before it runs: a pickled dict.
    bound: frozenset[str]
    # Names that the source binds, as far as reading it tells.
    mentioned: frozenset[str]
    # Names that occur in it: what they hold may have been changed in place.
    count: int
    # The cell's number in the notebook, for tracebacks.
    working_directory: str
    synchronize: bool
    # False: gradients are not synchronised (--no-sync).
    owner: bool
    # True on the one replica whose networks and results travel to the controller whole.
    sources: tuple[Source, ...] = ()
    # Of the functions among `names`.
    submodules: tuple[str, ...] = ()
    # Modules that the source reaches through others, `a.b` in `a.b.c`: imported in the notebook, maybe there alone.
    partial: bool = False
    # True: some replicas do not run this cell, so that nothing in it may wait for all.
    widgets: bool = True
    # False: nobody draws widgets, as in a terminal.
    holdings: Holdings = Holdings()
    modes: Any = None
    # Torch's modes in the notebook, as `modes.current` gives them; None: the usual ones.


@dataclass(slots=True)
class Call:
    """Call a function on the replica."""

    function: Payload
    # The same bytes for every replica; nothing of it lies in a slab.
    arguments: Payload
    # (args, kwargs), this replica's parts.
    plain: bool = False
    # True: a call of our own, outside the user's replica context.
    shares: tuple[int, int] | None = None
    # This replica's examples and all replicas', where the arguments hold a global batch.
    released: tuple[str, ...] = ()
    # Handles of mirrored objects that the controller no longer has.
    settings: tuple[tuple[str, Any], ...] = ()
    # By handle: what the controller changed in the settings of a mirrored optimizer.
    kept: bool = False
    # True: all that the function captures is unchanging or lives here, so that the replica may keep it, too.
    modes: Any = None
    # Torch's modes around the call, as `modes.current` gives them; None: the usual ones.
    moment: int | None = None
    # Of the user's code, as surroundings count: in another one what was warned of is news again. None: no user's.


@dataclass(frozen=True, slots=True)
class Follow:
    """Set what the controller has set for all of its code."""

    changes: Changes


@dataclass(frozen=True, slots=True)
class Mirror:
    """Keep objects that the controller made in its scope: the payload is {handle: object}."""

    objects: Payload


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind names in the replica's namespace: the payload is a dict."""

    names: Payload


@dataclass(frozen=True, slots=True)
class LoadModules:
    """Copy values into modules that the replica has: the payload is {handle: {name: tensor}}."""

    states: Payload


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send what these names are bound to, whatever its size, and the values of networks that have changed."""

    names: tuple[str, ...]
    owner: bool
    # True on the one replica whose networks travel.
    anew: bool = False
    # True: what was sent before may not have arrived.
    undelivered: tuple[str, ...] = ()
    # Handles of networks that the controller was told of, and has not got.
    standing: tuple[str, ...] = ()
    # Names whose values the controller has as they are here, and needs no copies of.
    compare: bool = False
    # Add what tells whether the replicas' networks differ.
    released: tuple[str, ...] = ()
    # Handles of what the controller has no more; of networks it may have parts, whose values it wants.


@dataclass(frozen=True, slots=True)
class Again:
    """Send once more what was sent last of names: the replica whose networks were to travel has sent nothing."""

    owner: bool
    # True on the one replica whose networks travel in their place.


class Word(enum.Enum):
    """What a training is told while it runs."""

    GO = "go"
    PAUSE = "pause"
    COMPARE = "compare"
    # Record the checksums of the parameters, and go on.
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Steer:
    """Hold, go on, compare or end where a step ends; holds until another word; read by the control thread at once."""

    number: int
    # Grows with each word of a pool.
    word: Word


@dataclass(frozen=True, slots=True)
class Count:
    """Count steps on from this one, which others have done; read without an answer."""

    step: int


@dataclass(frozen=True, slots=True)
class Record:
    """Write telemetry into the ring whose descriptor rides beside; read by the control thread, without an answer."""


@dataclass(frozen=True, slots=True)
class Communicate:
    """Reduce gradients by other cross-device ops."""

    communication: bytes
    # Pickled, as in ReplicaSpec.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Send every name that can travel, with handles, for a replica that starts anew."""

    without: tuple[str, ...] = ()
    # Names that cannot be rebuilt there.


@dataclass(frozen=True, slots=True)
class Setting:
    """Attributes of an object that one side has set, and those that it has deleted."""

    values: dict[str, Any]
    deleted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Changed:
    """In the place of a dict of names, where objects among them are there already, and were changed."""

    names: dict[str, Any]
    again: frozenset[str]
    # Names of such objects: where the replica has distributed one under its name, it distributes it as it is now.
    fillings: dict[str, Any]
    # By name: what one of them holds now, for `contents.refill`. Who else has it there sees it, too.
    settings: dict[str, Setting]
    # By name: attributes of one that the replicas have changed, too, and in other ways.


@dataclass(frozen=True, slots=True)
class Restore:
    """Take over another replica's snapshot."""

    names: Payload


@dataclass(frozen=True, slots=True)
class Steps:
    """Tell how far optimizers, schedulers, averages and scalers came in the last cell or call, and others' checksums.

    {key: count}, a count below 0 if it was left halfway, and {key: (checksum before, checksum)} of Variables that all
    have equal, of networks that no optimizer trains, and of scalers.
    """


@dataclass(frozen=True, slots=True)
class TryFused:
    """Time a step of the optimizer that stepped most in the last cell: (its class's name, ms, ms when fused).

    On copies; None where there is none, or none that can be fused.
    """


@dataclass(frozen=True, slots=True)
class Check:
    """Tell and record the checksums of the parameters that are synchronised, and tell those of networks' others.

    Two of {name: checksum}.
    """


@dataclass(frozen=True, slots=True)
class Standing:
    """Send what these optimizers have made of their parameters, their state, and the values of the others of these."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StandAt:
    """Go on from another replica's standing, in place."""

    standing: Payload


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Raise KeyboardInterrupt in what runs now; read by the control thread at once."""

    request: int
    shown: bool = True
    # False: what another replica did is told, and nobody sees where this one was.


@dataclass(frozen=True, slots=True)
class Abort:
    """End every wait in a collective; read by the control thread at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Where:
    """Tell by `Whereabouts` where this replica is; read by the control thread at once, and between requests."""

    question: int
    # Its number; the answer bears it too.


@dataclass(frozen=True, slots=True)
class CommMessage:
    """A front end's message to a widget that lives in the replica."""

    content: dict[str, Any]
    buffers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process."""


@dataclass(slots=True)
class Request(_Compact):
    """A message that the replica's main thread answers with `Done` bearing the same number."""

    number: int
    what: (
        Form
        | RunCell
        | Call
        | Communicate
        | Follow
        | Mirror
        | Bind
        | LoadModules
        | Fetch
        | Snapshot
        | Restore
        | Steps
        | TryFused
        | Check
        | Standing
        | StandAt
    )


# --------------------------------------------------------------------------- replica to controller


@dataclass(frozen=True, slots=True)
class Stream(_Compact):
    """Text written to a standard stream."""

    name: str
    # "stdout" or "stderr"
    text: str


@dataclass(frozen=True, slots=True)
class Display:
    """A rich display, as IPython's display publisher got it."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    transient: dict[str, Any]
    update: bool


@dataclass(frozen=True, slots=True)
class ClearOutput:
    """A call of clear_output."""

    wait: bool


@dataclass(frozen=True, slots=True)
class CommSent:
    """A widget's message to the front end."""

    kind: str
    # "comm_open", "comm_msg" or "comm_close"
    content: dict[str, Any]
    metadata: dict[str, Any]
    buffers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """The replica waits in a merge_call for all the others."""


@dataclass(frozen=True, slots=True)
class Reduces:
    """The replica reduces by these cross-device ops from now on."""

    ops: str
    # As `--ops` calls them.
    operation: str
    # Their class's name, as dashboards call them.


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective that a replica waits in."""

    number: int
    # Which one of its group this is, from 1; the same on all replicas that run the same ones.
    collective: str
    # As a user would say it: "all_reduce of float32[3]".
    seconds: float
    # Since it waits.
    late: tuple[int, ...]
    # Replicas that have not come to it, as far as that is known.
    partner: int | None = None
    # The replica to which this one sends, or from which it receives; `number` counts what goes that way then.


@dataclass(frozen=True, slots=True)
class Collectives:
    """A process group as one of its replicas sees it."""

    group: str
    # torch's name of it.
    replicas: tuple[int, ...]
    # Its members.
    issued: int
    # Collectives that this replica has begun since the group was formed.
    begun: tuple[tuple[str, int], ...]
    # In this request, by kind.
    under_way: bool
    # Some that were begun have not ended.
    waits: tuple[Wait, ...]
    seen: tuple[str, ...] = ()
    # Of each member its last collective in words, as shared memory tells.
    between: tuple[tuple[str, int | None, int], ...] = ()
    # How often this replica began to "send" to another, or to "recv" from it (None: from any), since it was formed.


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a replica is."""

    question: int
    request: int | None
    # The one that it works for; None: for none.
    line: str
    # Of the user's that its main thread is at: place and text; empty: it is at none.
    inside: str
    # The function that this line has called into, where it is neither the user's nor ours.
    gradients: bool
    # It waits for the gradients of a backward pass.
    threads: bool
    # Other threads run the user's code.
    groups: tuple[Collectives, ...]


@dataclass(frozen=True, slots=True)
class HeldBack:
    """The replica ends as soon as it can: an import or an optimizer's step has to be whole, an error to be shown."""

    own: bool = False
    # The user's code does not run: what the replica has to do itself, with names of any size, is left.


@dataclass(frozen=True, slots=True)
class Note(_Compact):
    """A small value that a call of our own tells the controller while it runs."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """A user's exception in a replica: data, not an error of ours."""

    type_name: str
    message: str
    traceback: tuple[str, ...]
    # Lines as the replica's shell renders them, coloured.
    pickled: bytes | None
    # The exception itself; None when its class cannot travel.
    interrupted: bool = False
    # It is the KeyboardInterrupt that the controller asked for.
    secondary: bool = False
    # It only tells that another replica failed.
    line: str = ""
    # Of the user's that raised it: place and text; empty: none did.
    memory: str = ""
    # Of a device that was full: what was asked, free and reserved.
    grown: bool = False
    # A tensor was to be enlarged whose memory cannot be.
    gpu_lost: bool = False
    # The GPU does nothing more for the replica's process, which therefore ends.
    shares: tuple[int, int] | None = None
    # Of the batch in use, if there was one: the replica's examples, and all replicas'.


@dataclass(frozen=True, slots=True)
class Stayed:
    """A value that stays in the replica, and what to say of it."""

    type_name: str
    text: str
    why: str
    name: str = ""
    # Under which the replica keeps it, where that is not the name it was asked for by.
    for_good: bool = False
    # As it is, nothing can bring it.


@dataclass(frozen=True, slots=True)
class Plain:
    """A value that travels by itself, but for the values of other names that it holds."""

    payload: Payload
    holds: tuple[str, ...] = ()
    # These names.


@dataclass(frozen=True, slots=True)
class Imported:
    """A Python module: the receiver imports it."""

    module: str


@dataclass(frozen=True, slots=True)
class NewModule:
    """A network that the controller has not seen; it lies under its name in the payload's `modules`."""

    handle: str


@dataclass(frozen=True, slots=True)
class KnownModule:
    """A network that the controller has a copy of; changed values lie in the payload's `states`."""

    handle: str


@dataclass(frozen=True, slots=True)
class Same:
    """The very value of another name among these, which has that itself."""

    name: str


Export = Plain | Imported | NewModule | KnownModule | Stayed | Same


@dataclass(frozen=True, slots=True)
class Left:
    """What a cell has set for all code that follows it, and left other than it was."""

    grads: bool | None = None
    # What it has given to torch.set_grad_enabled.
    process: Changes | None = None


@dataclass(frozen=True, slots=True)
class Exports:
    """What a replica's names are bound to, as far as it travels; it is the object in `Done.payload`."""

    names: dict[str, Export]
    search: SearchPath | None
    # Where a cell has changed that; before the networks, whose classes are to be found there.
    modules: dict[str, Any]
    # New networks by handle, from the module owner only.
    states: dict[str, dict[str, Any]]
    # Changed values by handle and tensor name; from the others only statistics that replicas average.
    result: Export | None = None
    # The value of the cell's last expression.
    gone: tuple[str, ...] = ()
    # Handles of networks that the replica no longer has.
    altered: tuple[str, ...] = ()
    # Names of objects of the user's own classes that a cell changed in place.
    settings: dict[str, frozenset[str]] = field(default_factory=dict)
    # Of these: the attributes that it has set, or deleted.
    deleted: tuple[str, ...] = ()
    # Names that the cell has deleted.
    refilled: tuple[str, ...] = ()
    # Names whose containers or trained tensors the cell changed in place: who else has one there is to see it.
    filled: frozenset[str] = frozenset()
    # Names of objects whose attributes are told of, for those that are here.
    loaders: frozenset[str] = frozenset()
    # Names of loaders of which nothing was changed but what has names: by these the notebook's own are told of it.
    unchanged: dict[str, str] = field(default_factory=dict)
    # Names that hold what a name held when the cell began, this or another one, and still does: by name, that name.
    objects: dict[str, Payload | None] = field(default_factory=dict)
    # New optimizers, schedulers and scalers by handle, each after those that it refers to; None from the others, and
    # where one is inside a network.
    sums: dict[tuple[str, str], int] = field(default_factory=dict)
    # Checksums of networks' "parameters" and "buffers", by handle and which, where all replicas may have trained them.
    left: Left | None = None
    # What the cell has set for all code that follows it.
    trained: tuple[str, ...] = ()
    # Names of tensors that optimizers may be over, and that no network has: they are bound before those.
    moved: tuple[tuple[Any, str, str], ...] = ()
    # Parameters of the networks above that have another place or name since the controller got theirs: whose they were
    # then, by handle, and under which name.
    replacing: tuple[Any, ...] = ()
    # Parameters of them that have come in the places of others.
    named: tuple[tuple[str, str, str, str], ...] = ()
    # Where these networks, and others with changed attributes, have values that have names: the network's handle, the
    # part's path, the attribute, the name.
    tied: tuple[tuple[str, str, str], ...] = ()
    # Parameters of them that the controller has by a name alone: the part's handle, the name there, and that name.
    former: tuple[str, ...] = ()
    # Names that the cell has taken from objects of the controller; of these is told under the `former` names.


@dataclass(slots=True)
class Done:
    """The end of a request."""

    request: int
    failure: Failure | None = None
    payload: Payload | None = None
    # What was asked for, or what the cell bound; its form depends on the request.
    seconds: float = 0.0
    result: dict[str, Any] | None = None
    # The MIME bundle of the cell's last expression, formatted by the replica.
    left: tuple[str, ...] = ()
    # Names that could not be put into a snapshot, or not be taken from one.
    grouped: bool = True
    # False: the request left the replica without a default process group (a cell destroyed it), or with one that an
    # exception has ended which the cell caught.
    settings: tuple[tuple[str, Any], ...] = ()
    # By handle: what a call changed in the settings of mirrored optimizers.
    lost: tuple[str, ...] = ()
    # What a call changed in the copies of what its function captured, as the function names it.
    files: tuple[str, ...] = ()
    # That the user's code has opened to write, whole paths.
    undivided: tuple[tuple[str, int], ...] = ()
    # Loaders that the user's code has trained on as a whole: their names, and prints of their data. Of a call that has
    # trained on arguments which nobody has divided an empty name, and a print of its loss.
    collectives: int = -1
    # How many of the default group it has begun; -1: nobody has counted.
    step: int = 0
    # The number of the last step that it has done or left.
    interrupted: bool = False
    # KeyboardInterrupt was raised in the user's code; without a failure it was caught there.
