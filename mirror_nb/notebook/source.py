"""Which names a cell reads before it binds them, and which it binds. Reads source; runs nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

# What IPython expands in `!echo {name} $name` and in the arguments of magics.
_EXPANDED = re.compile(r"\{\s*([A-Za-z_]\w*)|\$\{?([A-Za-z_]\w*)")
_MAGIC_CALLS = {"system", "getoutput", "run_line_magic", "run_cell_magic"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class CellNames:
    """The names of one cell."""

    read: frozenset[str]
    # Read, or possibly read, before the cell itself has bound them.
    mentioned: frozenset[str]
    # Every name that occurs at all, outside the inner scopes that own it.
    bound: frozenset[str]
    # Bound by the cell on some path.


def cell_names(source: str) -> CellNames:
    """Return the names of `source`, which must be plain Python (magics already transformed).

    A cell that does not parse has no names: running it reports the error in its own place.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return CellNames(frozenset(), frozenset(), frozenset())
    reader = _Reader()
    reader.walk(tree.body, set())
    late = {name for name in reader.late if name not in reader.bound}
    return CellNames(frozenset(reader.read | late), frozenset(reader.mentioned | reader.late), frozenset(reader.bound))


class _Reader:
    """Follows the cell's top level statement by statement; what both branches bind is bound after them."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.late: set[str] = set()
        # Read inside function bodies: these run later, when the rest of the cell may have bound the name.
        self.mentioned: set[str] = set()
        self.bound: set[str] = set()

    def walk(self, statements: Iterable[ast.stmt], known: set[str]) -> set[str]:
        for statement in statements:
            known = self._statement(statement, known)
        return known

    def _statement(self, node: ast.stmt, known: set[str]) -> set[str]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                outer = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
                self._load(outer, known)
                self.late |= free_names(node)
                return self._bind({node.name}, known)
            case ast.ClassDef():
                self._load([*node.decorator_list, *node.bases, *(k.value for k in node.keywords)], known)
                inside = _Reader()
                inside.walk(node.body, set(known))
                self._note(inside.read, known)
                self.late |= inside.late
                return self._bind({node.name}, known)
            case ast.If():
                self._load([node.test], known)
                return self.walk(node.body, set(known)) & self.walk(node.orelse, set(known)) | known
            case ast.For() | ast.AsyncFor():
                self._load([node.iter], known)
                self.walk(node.body, self._bind(self._targets([node.target], known), set(known)))
                self.walk(node.orelse, set(known))
                return known
            case ast.While():
                self._load([node.test], known)
                self.walk(node.body, set(known))
                self.walk(node.orelse, set(known))
                return known
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._load([item.context_expr], known)
                    if item.optional_vars is not None:
                        known = self._bind(self._targets([item.optional_vars], known), known)
                return self.walk(node.body, known)
            case ast.Try() | ast.TryStar():
                after = self.walk(node.body, set(known))
                for handler in node.handlers:
                    self._load([handler.type] if handler.type else [], known)
                    after &= self._handler(handler, known)
                after = self.walk(node.orelse, after)
                return self.walk(node.finalbody, after | known)
            case ast.Import() | ast.ImportFrom():
                return self._bind({(a.asname or a.name).partition(".")[0] for a in node.names}, known)
            case ast.Assign():
                self._load([node.value], known)
                return self._bind(self._targets(node.targets, known), known)
            case ast.AnnAssign():
                self._load([node.annotation, *([node.value] if node.value else [])], known)
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
                    names = {
                        n.name for n in ast.walk(arm.pattern) if isinstance(n, ast.MatchAs | ast.MatchStar) and n.name
                    }
                    self._load([n.value for n in ast.walk(arm.pattern) if isinstance(n, ast.MatchValue)], known)
                    self.walk(arm.body, self._bind(names, set(known)))
                return known
            case _:
                self._load([node], known)
                return self._bind(_walrus(node), known)

    def _handler(self, handler: ast.ExceptHandler, known: set[str]) -> set[str]:
        return self.walk(handler.body, set(known) | ({handler.name} if handler.name else set()))

    def _targets(self, targets: Iterable[ast.expr], known: set[str]) -> set[str]:
        """Names that the targets bind; what `a[i] = …` and `a.b = …` need is read."""
        names = set()
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    if isinstance(node.ctx, ast.Store):
                        names.add(node.id)
                    else:
                        self._note({node.id}, known)
        return names

    def _load(self, nodes: Iterable[ast.AST], known: set[str]) -> None:
        for node in nodes:
            self._note(_loaded(node), known)
            self.bound |= _walrus(node)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Lambda):
                    self.late |= free_names(inner)

    def _note(self, names: set[str], known: set[str]) -> None:
        self.mentioned |= names
        self.read |= names - known

    def _bind(self, names: set[str], known: set[str]) -> set[str]:
        self.bound |= names
        self.mentioned |= names
        return known | names


def _walrus(node: ast.AST) -> set[str]:
    return {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}


def _loaded(node: ast.AST) -> set[str]:
    """Names that evaluating `node` reads at once (comprehensions included, bodies of lambdas not)."""
    if isinstance(node, _FUNCTIONS):
        return set()
    if isinstance(node, _COMPREHENSIONS):
        own = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        return {name for child in ast.iter_child_nodes(node) for name in _loaded(child)} - own
    names = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load | ast.Del) else set()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MAGIC_CALLS:
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                # `%time f(x)` and `%%time` hold Python; what does not parse reads nothing.
                names |= {a or b for a, b in _EXPANDED.findall(argument.value)} | cell_names(argument.value).read
    for child in ast.iter_child_nodes(node):
        names |= _loaded(child)
    return names


def free_names(function: ast.AST) -> set[str]:
    """Names that a function reads and neither it nor a function inside it owns."""
    if not isinstance(function, _FUNCTIONS):
        return set()
    a = function.args
    own = {arg.arg for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]}
    body = function.body if isinstance(function.body, list) else [function.body]
    shared: set[str] = set()
    read: set[str] = set()
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, _FUNCTIONS):
            read |= free_names(node)
            if not isinstance(node, ast.Lambda):
                own.add(node.name)
                stack += node.decorator_list
            stack += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            continue
        if isinstance(node, ast.Global):
            shared |= set(node.names)
        elif isinstance(node, ast.Name):
            (own if isinstance(node.ctx, ast.Store) else read).add(node.id)
        elif isinstance(node, ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            own |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
        stack += ast.iter_child_nodes(node)
    return read - (own - shared)
