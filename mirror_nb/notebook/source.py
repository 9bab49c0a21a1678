"""Which names a cell reads before it binds them, and which it binds. Reads source; runs nothing."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import symtable
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from IPython.utils.text import DollarFormatter

# Which arguments of a magic's call hold text of the user's; for a magic, it may be Python.
_MAGIC_CALLS = {"system": 0, "getoutput": 0, "run_line_magic": 1, "run_cell_magic": 1}
_QUERIES = {"query", "eval"}
# Methods of pandas' tables, which look up `@name` where they are called.
_NAMESPACES = {"globals", "locals", "vars"}
# Built-in functions that, called by themselves, give the names of where they are called.
_MAGIC_OPTIONS = re.compile(r"^(?:\s*--?[A-Za-z]\w*(?:[ =]?\d+)?(?=\s))+")
# `-n 1 -q` of `%timeit -n 1 -q f(x)`.
_ASYNCHRONOUS = re.compile(r"\b(await|async)\b")
_TYPE_ALIAS: Any = getattr(ast, "TypeAlias", ())
# `type X = …`, from Python 3.12 on.


@dataclass(frozen=True, slots=True)
class CellNames:
    """The names of one cell."""

    read: frozenset[str]
    # Read, or possibly read, before the cell itself has bound them.
    mentioned: frozenset[str]
    # Every name that occurs at all, outside the inner scopes that own it.
    bound: frozenset[str]
    # Bound by the cell on some path.
    deleted: frozenset[str] = frozenset()
    # Deleted by the cell on some path, as the name of an exception is at the end of its `except`.
    paths: frozenset[tuple[str, ...]] = frozenset()
    # Attributes of names, wherever they occur: ("a", "b", "c") for `a.b.c`.
    imported: frozenset[str] = frozenset()
    # `a.b` of each `import a.b` that binds `a`.
    unsure: frozenset[str] = frozenset()
    # What is read, but for what is read before the cell binds it on any path: the cell may do without the notebook's.
    # None that the text of a string names, since `if "model" not in globals():` asks whether it is there.


@functools.lru_cache(64)
def cell_names(source: str) -> CellNames:
    """Return the names of `source`, which must be plain Python (magics already transformed).

    A cell that does not parse has no names: running it reports the error in its own place.
    """
    try:
        tree = ast.parse(source)
        scopes = symtable.symtable(_in_step(source), "cell", "exec")
    except (SyntaxError, ValueError):
        return CellNames(frozenset(), frozenset(), frozenset())
    reader = _Reader(_by_function(scopes))
    known = reader.walk(tree.body, set())
    # Read inside functions: these run later, when the rest of the cell has bound the name, if it does so on all paths,
    # and no statement before that mentions the function.
    late = _looked_up(scopes.get_children())
    read = frozenset(reader.read | (late - known))
    # Where it cannot be sent it is not there.
    looked_for = set().union(*map(_looked_for, ast.walk(tree))) - read
    asked = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return CellNames(
        read | looked_for,
        frozenset(reader.mentioned | late),
        frozenset(reader.bound),
        frozenset(reader.deleted),
        frozenset(reader.paths.union(filter(None, map(_path, ast.walk(tree))))),
        frozenset(reader.imported),
        frozenset((reader.read | late) & reader.bound - reader.first - asked | looked_for),
    )


def _in_step(source: str) -> str:
    """Return a source with the same scopes in the same lines, but nothing asynchronous.

    For symtable takes no `await` outside a function from Python 3.14 on.
    """
    if not _ASYNCHRONOUS.search(source):
        return source
    lines = io.StringIO(source).readlines()
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        if token.type == tokenize.NAME and _ASYNCHRONOUS.fullmatch(token.string):
            (row, begin), (_, end) = token.start, token.end
            line = lines[row - 1]
            # As `await` an operator before an operand.
            lines[row - 1] = line[:begin] + ("+" if token.string == "await" else "") + line[end:].lstrip(" \t")
    return "".join(lines)


def _path(node: ast.AST) -> tuple[str, ...] | None:
    """Return the attributes that an expression is of a name, with the name; None for another one."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return (node.id, *reversed(attributes)) if attributes and isinstance(node, ast.Name) else None


def _looked_up(scopes: Iterable[symtable.SymbolTable], inside: bool = False) -> set[str]:
    """Names that functions among these scopes look up in the globals; `inside`: the scopes belong to a function."""
    names: set[str] = set()
    for scope in scopes:
        # The body of a class at the top level is no function: its names are read at once, in the cell's order.
        late = inside or scope.get_type() != "class"
        if late:
            names |= {
                symbol.get_name()
                for symbol in scope.get_symbols()
                if symbol.is_global() and (symbol.is_referenced() or symbol.is_declared_global())
            }
        names |= _looked_up(scope.get_children(), late)
    return names


def _by_function(scope: symtable.SymbolTable) -> dict[tuple[str, int], set[str]]:
    """Return what functions and classes look up in the globals when they are called, by their names and lines."""
    found: dict[tuple[str, int], set[str]] = {}
    for child in scope.get_children():
        found.setdefault((child.get_name(), child.get_lineno()), set()).update(_looked_up([child]))
        for key, names in _by_function(child).items():
            found.setdefault(key, set()).update(names)
    return found


class _Reader:
    """Follows the cell's top level statement by statement; what both branches bind is bound after them.

    Or the body of a class; `around`: what is bound outside of all classes by then, since one in another does not see
    the names of that. `by_function`: see the function of that name.
    """

    def __init__(self, by_function: Mapping[tuple[str, int], set[str]], around: set[str] | None = None) -> None:
        self._by_function = by_function
        self._functions: dict[str, set[str]] = {}
        # By name of a function or class of the cell: what it looks up when it is called.
        self._around = around
        self.read: set[str] = set()
        self.first: set[str] = set()
        # Read while nothing has bound it yet.
        self.mentioned: set[str] = set()
        self.bound: set[str] = set()
        self.deleted: set[str] = set()
        self.paths: set[tuple[str, ...]] = set()
        # Of the Python in magics.
        self.imported: set[str] = set()

    def walk(self, statements: Iterable[ast.stmt], known: set[str]) -> set[str]:
        for statement in statements:
            known = self._statement(statement, known)
        return known

    def _statement(self, node: ast.stmt, known: set[str]) -> set[str]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._load(node.decorator_list, known)
                self._load([*_evaluated(node.args), *_some(node.returns)], known, _type_parameters(node))
                self._define({node.name}, node)
                return self._bind({node.name}, known)
            case ast.ClassDef():
                own = _type_parameters(node)
                self._load(node.decorator_list, known)
                self._load([*node.bases, *(k.value for k in node.keywords)], known, own)
                around = known if self._around is None else self._around
                inside = _Reader(self._by_function, around)
                inside._functions.update(self._functions)
                inside.walk(node.body, set(around))
                self._note(inside.read - own, around)
                self._define({node.name}, node)
                return self._bind({node.name}, known)
            case ast.If():
                self._load([node.test], known)
                after = self.walk(node.body, known | _bound_if_true(node.test))
                return after & self.walk(node.orelse, set(known)) | known
            case ast.For() | ast.AsyncFor():
                self._load([node.iter], known)
                self.walk(node.body, self._bind(self._targets([node.target], known), set(known)))
                self.walk(node.orelse, set(known))
                return known
            case ast.While():
                self._load([node.test], known)
                self.walk(node.body, known | _bound_if_true(node.test))
                self.walk(node.orelse, set(known))
                return known
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._load([item.context_expr], known)
                    if item.optional_vars is not None:
                        known = self._bind(self._targets([item.optional_vars], known), known)
                after = self.walk(node.body, known)
                return known if any(_swallows(item.context_expr) for item in node.items) else after
            case ast.Try() | ast.TryStar():
                after = self.walk(node.body, set(known))
                for handler in node.handlers:
                    self._load(_some(handler.type), known)
                    after &= self._handler(handler, known)
                after = self.walk(node.orelse, after)
                return self.walk(node.finalbody, after | known)
            case ast.Import() | ast.ImportFrom():
                self.imported |= {a.name for a in node.names if "." in a.name and not a.asname}
                return self._bind({(a.asname or a.name).partition(".")[0] for a in node.names}, known)
            case ast.Assign():
                value = node.value
                # A lambda with a name is called by that.
                self._load(_evaluated(value.args) if isinstance(value, ast.Lambda) else [value], known)
                self._embedded(value, known)
                targets = self._targets(node.targets, known)
                self._define(targets, value)
                return self._bind(targets, known)
            case ast.AnnAssign():
                self._load([node.annotation, *_some(node.value)], known)
                targets = self._targets([node.target], known)
                return self._bind(targets, known) if node.value else known
            case ast.AugAssign():
                self._load([node.value], known)
                if isinstance(node.target, ast.Name):
                    self._note({node.target.id}, known)
                return self._bind(self._targets([node.target], known), known)
            case ast.Match():
                self._load([node.subject], known)
                for arm in node.cases:
                    inner = known | self._pattern(arm.pattern, known)
                    self._load(_some(arm.guard), inner)
                    self.walk(arm.body, inner)
                return known
            case ast.Delete():
                self._load(node.targets, known)
                found = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                self.deleted |= {n.id for n in found if isinstance(n.ctx, ast.Del)}
                return known
            case _ if isinstance(node, _TYPE_ALIAS):
                # What it stands for is looked up when somebody asks for it, as in a function.
                return self._bind({node.name.id}, known)
            case _:
                self._load([node], known)
                names = self._embedded(node, known)
                return self._bind(names, known | _surely_bound(node))

    def _handler(self, handler: ast.ExceptHandler, known: set[str]) -> set[str]:
        name = {handler.name} if handler.name else set()
        self.deleted |= name
        return self.walk(handler.body, known | name)

    def _pattern(self, pattern: ast.pattern, known: set[str]) -> set[str]:
        """Names that a pattern of `match` binds; the values and classes that it compares with are read."""
        names: set[str] = set()
        for node in ast.walk(pattern):
            match node:
                case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                    names.add(name)
                case ast.expr():
                    self._load([node], known)
        return self._bind(names, set()) if names else names

    def _targets(self, targets: Iterable[ast.expr], known: set[str]) -> set[str]:
        """Names that the targets bind; what `a[i] = …` and `a.b = …` need is read."""
        names: set[str] = set()
        for target in targets:
            match target:
                case ast.Name(id=name):
                    names.add(name)
                case ast.Tuple(elts=parts) | ast.List(elts=parts):
                    names |= self._targets(parts, known)
                case ast.Starred(value=part):
                    names |= self._targets([part], known)
                case _:
                    self._load([target], known)
        return names

    def _load(self, nodes: Iterable[ast.AST], known: set[str], own: Set[str] = frozenset()) -> None:
        """Note what evaluating the nodes reads; `own` are names of theirs that hide those outside."""
        for node in nodes:
            self._note(_loaded(node) - own, known)
            self.bound |= _walrus(node)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Lambda):
                    # Whoever is given it may call it at once.
                    self._note(self._late(inner), known)

    def _embedded(self, node: ast.AST, known: set[str]) -> set[str]:
        """Names that the Python in the magics of a statement binds (`%%time` and the like); what it needs is read."""
        names: set[str] = set()
        for text in _texts_of_magics(node):
            inner = cell_names(_TRANSFORMER.transform_cell(_MAGIC_OPTIONS.sub("", text).lstrip()))
            self._note(set(inner.read - inner.unsure), known)
            self.read |= inner.unsure - known
            self.mentioned |= inner.mentioned
            self.deleted |= inner.deleted
            self.paths |= inner.paths
            self.imported |= inner.imported
            names |= inner.bound
        return names

    def _define(self, names: Iterable[str], node: ast.AST) -> None:
        for name in names if (late := self._late(node)) else ():
            self._functions[name] = self._functions.get(name, set()) | late

    def _late(self, node: ast.AST) -> set[str]:
        """Return what a function, a class or a lambda of the cell looks up when it is called."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return self._by_function.get((node.name, node.lineno), set())
            case ast.Lambda():
                return self._by_function.get(("lambda", node.lineno), set())
        return set()

    def _note(self, names: set[str], known: set[str]) -> None:
        self.mentioned |= names
        self.read |= names - known
        self.first |= names - self.bound
        # What is mentioned may be called, and look up what it does, and so on.
        queue, called = list(names), set()
        while queue:
            name = queue.pop()
            if name in self._functions and name not in called:
                called.add(name)
                self.read |= self._functions[name] - known
                self.first |= self._functions[name] - self.bound
                queue += self._functions[name]

    def _bind(self, names: set[str], known: set[str]) -> set[str]:
        self.bound |= names
        self.mentioned |= names
        return known | names


def _walrus(node: ast.AST) -> set[str]:
    return {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}


def _surely_bound(node: ast.AST) -> set[str]:
    """Names that evaluating `node` binds in any case: not what comes after an `or`, say, which may be left out."""
    match node:
        case ast.BoolOp(values=[first, *_]):
            parts: Iterable[ast.AST] = [first]
        case ast.IfExp(test=first):
            parts = [first]
        case ast.Lambda():
            parts = ()
        case _:
            parts = ast.iter_child_nodes(node)
    own = {node.target.id} if isinstance(node, ast.NamedExpr) else set()
    return own.union(*map(_surely_bound, parts))


def _bound_if_true(test: ast.expr) -> set[str]:
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return set().union(*map(_bound_if_true, values))
    return _surely_bound(test)


def _swallows(manager: ast.expr) -> bool:
    """Whether a block may end early and the cell goes on: `with contextlib.suppress(...)`."""
    function = getattr(manager, "func", None)
    return getattr(function, "attr", getattr(function, "id", "")) == "suppress"


def _type_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """The names in `def f[T]()` and `class C[T]`, from Python 3.12 on."""
    return {parameter.name for parameter in getattr(node, "type_params", ())}


def _some(node: ast.expr | None) -> list[ast.expr]:
    return [] if node is None else [node]


def _evaluated(arguments: ast.arguments) -> Iterator[ast.expr]:
    """Yield what defining a function evaluates of its parameters: defaults and annotations."""
    a = arguments
    yield from (*a.defaults, *filter(None, a.kw_defaults))
    for parameter in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))):
        yield from _some(parameter.annotation)


def _loaded(node: ast.AST) -> set[str]:
    """Names that evaluating `node` reads at once (comprehensions included, bodies of lambdas not)."""
    match node:
        case ast.Lambda(args=arguments):
            parts: Iterable[ast.AST] = _evaluated(arguments)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            first, *_ = node.generators
            inside = {name for child in ast.iter_child_nodes(node) for name in _loaded(child)}
            own = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
            # Only the first iterable is evaluated outside the comprehension's own scope.
            return (inside - own) | _loaded(first.iter)
        case ast.Name(id=name, ctx=ast.Load() | ast.Del()):
            return {name}
        case _:
            parts = ast.iter_child_nodes(node)
    names = {name for part in parts for name in _loaded(part)} | _queried(node) | _asked_for(node)
    # Of a magic with a cell, the line alone is expanded.
    return names.union(*(_expanded(text) for text in _texts(node)[:1]))


def _expanded(text: str) -> set[str]:
    """Names in what IPython expands in `!echo {name} {len(names)} $name` and in the arguments of magics."""
    names: set[str] = set()
    # A brace without its other half, or what is no Python in them: IPython leaves such a text as it is.
    with contextlib.suppress(ValueError, SyntaxError):
        for _, field, rest, _ in DollarFormatter().parse(text):
            if field:
                names |= _loaded(ast.parse(f"{field}:{rest}" if rest else field, mode="eval"))
    return names


def _queried(node: ast.AST) -> set[str]:
    """Names in the texts that a call gives to a method such as `DataFrame.query`."""
    match node:
        case ast.Call(func=ast.Attribute(attr=called), args=arguments) if called in _QUERIES:
            texts = [n.value for a in arguments for n in ast.walk(a) if isinstance(n, ast.Constant)]
            return {name for text in texts if isinstance(text, str) for name in re.findall(r"@([A-Za-z_]\w*)", text)}
    return set()


def _asked_for(node: ast.AST) -> set[str]:
    """Names that are asked of the namespace: `globals()["x"]`, `globals().get("x")`, `eval("x")`."""
    match node:
        case ast.Subscript(value=where, slice=ast.Constant(value=str(name)), ctx=ast.Load()):
            return {name} if _is_namespace(where) else set()
        case ast.Call(func=ast.Attribute(value=where, attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return {name} if _is_namespace(where) else set()
        case ast.Call(func=ast.Name(id="eval"), args=[ast.Constant(value=str(text))]):
            with contextlib.suppress(ValueError, SyntaxError):
                return _loaded(ast.parse(text.strip(), mode="eval"))
    return set()


def _looked_for(node: ast.AST) -> set[str]:
    """The name in `"x" in globals()`."""
    match node:
        case ast.Compare(left=ast.Constant(value=str(name)), comparators=[ast.expr() as where]):
            return {name} if _is_namespace(where) else set()
    return set()


def _is_namespace(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=called), args=[], keywords=[]):
            return called in _NAMESPACES
    return False


def _texts(node: ast.AST) -> list[str]:
    """The user's texts in the call that IPython makes of a magic or a `!command`; nothing for another node."""
    match node:
        case ast.Call(func=ast.Attribute(attr=called), args=arguments) if called in _MAGIC_CALLS:
            given = arguments[_MAGIC_CALLS[called] :]
            return [a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def _texts_of_magics(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and getattr(inner.func, "attr", "").startswith("run_"):
            # What is not Python (an option, a file's name, another language) does not parse and reads nothing.
            yield from _texts(inner)


_TRANSFORMER = TransformerManager()
