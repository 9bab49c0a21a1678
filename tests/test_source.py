"""Which names a cell reads before it binds them: small cells, and a check against Python itself."""

from __future__ import annotations

import ast
import contextlib
import symtable
import sys
import textwrap
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from mirror_nb.notebook.source import cell_names

IGNORED = {"print", "sorted", "sum", "get_ipython"}


def read(source: str) -> set[str]:
    return set(cell_names(TransformerManager().transform_cell(textwrap.dedent(source))).read) - IGNORED


def bound(source: str) -> set[str]:
    return set(cell_names(TransformerManager().transform_cell(textwrap.dedent(source))).bound)


READS = [
    # expressions
    ("a", "a"),
    ("a + b.c[d](e, *f, g=h, **i)", "a b d e f h i"),
    ("f'{a} {b!r:>{c}}'", "a b c"),
    ("a if b else c", "a b c"),
    ("a < b < c and not d", "a b c d"),
    ("x[a:b, c]", "x a b c"),
    ("await a(b)", "a b"),
    ("-await a ** await b", "a b"),
    ("[await i async for i in a if await b]", "a b"),
    ("async with a as x, b:\n    await x\nasync for y in c: x, y", "a b c"),
    ("async def f():\n    return await b\nx = 'await'; await f()", "b"),
    ("(x := a) + x", "a"),
    ("print(1)", ""),
    ("'a'", ""),
    # assignments
    ("a = b", "b"),
    ("a = 1; a", ""),
    ("a; a = 1", "a"),
    ("a = a + 1", "a"),
    ("a += 1", "a"),
    ("a = 1\na += b", "b"),
    ("a[i] = v", "a i v"),
    ("a.b = v", "a v"),
    ("a.b += v", "a v"),
    ("a, (b, *c) = d", "d"),
    ("a = b = c", "c"),
    ("a: T = v", "T v"),
    ("a: T", "T"),
    ("del a", "a"),
    ("a = 1\ndel a", ""),
    # imports
    ("import os, a.b as c, d.e\nos, c, d", ""),
    ("from m import x as y\nx, y", "x"),
    # branches and loops: what only one path binds may still have to come from the notebook
    ("if a:\n    b = 1\nb", "a b"),
    ("if a:\n    b = 1\nelse:\n    b = 2\nb", "a"),
    ("if a:\n    b = 1\nelif c:\n    b = 2\nelse:\n    b = 3\nb", "a c"),
    ("for i in xs:\n    i", "xs"),
    ("for i, (a, b) in xs:\n    y = i + a + b\ny", "xs y"),
    ("for a[0] in xs:\n    pass", "a xs"),
    ("for i in xs:\n    b = 1\nelse:\n    c\n", "xs c"),
    ("while a:\n    a = f()", "a f"),
    ("with a as b, c(b) as (d, e):\n    f = b\nf, d, e", "a c"),
    ("try:\n    a = f()\nexcept E as e:\n    print(e)\na", "f E a"),
    ("try:\n    a = f()\nfinally:\n    g()\na", "f g"),
    ("try:\n    import a\nexcept ImportError:\n    a = None\na", "ImportError"),
    ("try:\n    pass\nexcept* E as e:\n    e", "E"),
    (
        "match a:\n    case [x, *y] if x > z:\n        x, y\n    case P(u=v):\n        v\n    case k.K:\n        w",
        "a z P k w",
    ),
    # what may not have been reached
    ("with contextlib.suppress(E):\n    a = f()\na", "contextlib E f a"),
    ("with suppress(E), b as c:\n    a = f()\na, c", "suppress E b f a"),
    ("if a or (b := c):\n    b", "a b c"),
    ("if a and (b := c):\n    b", "a c"),
    ("while a or (b := c):\n    b", "a b c"),
    ("(b := c) if a else d\nb", "a b c d"),
    ("f((b := c), a)\nb", "a c f"),
    ("match a:\n    case {'k': x, **rest}:\n        x, rest\n    case _:\n        pass", "a"),
    ("assert a, b", "a b"),
    ("raise a from b", "a b"),
    ("global g\ng = 1", ""),
    # comprehensions own their variables, but for the first iterable
    ("[f(x, k) for x in xs if x > lo]", "f k xs lo"),
    ("{x: y for x, y in d.items()}", "d"),
    ("[y for x in xs for y in x]", "xs"),
    ("[x for x in x]", "x"),
    ("sum(x for x in xs)\nx", "xs x"),
    ("[(lambda: x + k)() for x in xs]", "xs k"),
    ("[z := f(x) for x in xs]\nz", "f xs"),
    # functions: bodies run later, defaults, decorators and annotations at once
    ("def f(a, b=c):\n    return a + b + d\n", "c d"),
    ("@deco(k)\ndef f(): pass", "deco k"),
    ("def f(a: T, *b: U, c: V = w, **d: W) -> R: pass", "T U V w W R"),
    ("def f():\n    x = 1\n    return x", ""),
    ("def f():\n    global n\n    n += 1", "n"),
    ("def f():\n    return g()\ndef g():\n    return h", "h"),
    ("def f():\n    return g\ng = 1", ""),
    # what is mentioned may be called
    ("def f():\n    return g\nf()\ng = 1", "g"),
    ("def f():\n    return g\ng = 1\nf()", ""),
    ("def f():\n    return g\ndef h():\n    return f()\nh()\ng = 1", "g"),
    ("f = lambda: g\ng = 1\nf()", ""),
    ("f = lambda: g\nf()\ng = 1", "g"),
    ("sorted(xs, key=lambda x: g)\ng = 1", "xs g"),
    ("class C:\n    def f(self): return g\ng = 1\nC().f()", ""),
    ("class C:\n    def f(self): return g\nC().f()\ng = 1", "g"),
    ("def f():\n    return g\nclass C:\n    x = f()\ng = 1", "g"),
    # what only one path binds may still have to come from the notebook for a function, too
    ("def f():\n    return g\nif a:\n    g = 1\nf()", "a g"),
    ("def f():\n    return g\nfor g in a:\n    f()", "a g"),
    ("def f():\n    return g\nif a:\n    g = 1\nelse:\n    g = 2", "a"),
    ("def f():\n    import m\n    m.x", ""),
    ("def f():\n    try:\n        pass\n    except E as e:\n        e", "E"),
    ("def f():\n    with a as b:\n        b", "a"),
    ("def f():\n    for i in a:\n        i", "a"),
    ("def f(x):\n    def g(y=k):\n        return x + y + z\n    return g", "k z"),
    ("def f():\n    return [x for x in xs]", "xs"),
    ("async def f():\n    async for x in a:\n        await b", "a b"),
    ("lambda x, y=k: x + y + z", "k z"),
    ("sorted(xs, key=lambda t, k=k0: t[k])", "xs k0"),
    ("def f():\n    class C(B):\n        x: T = v\n        def g(self): return w\n    return C", "B T v w"),
    # classes
    ("class C(B, metaclass=M):\n    x = a\n    y = x\n    def f(self, z=x): return b\n", "B M a b"),
    ("@deco\nclass C:\n    n: T\n", "deco T"),
    ("class C:\n    def f(self): return C\n", ""),
    # magics and shell lines
    ("!echo {a} $b", "a b"),
    ("files = !ls {folder}", "folder"),
    ("!echo {len(a)} {b[1:2]} {c.d(e)} ${f}/x", "len a b c e f"),
    ("!awk '{print $1}' {", ""),
    ("%%bash -s {a}\necho $b {c}", "a"),
    # pandas looks these up in the cell
    ("a.query('x > @b')", "a b"),
    ("a.eval(f'x = @b + {c}', inplace=True)", "a b c"),
    ("%time f(x)", "f x"),
    ("%timeit -n 1 f(x)", "f x"),
    ("%%time\ny = f(x)\n", "f x"),
    ("%%time\n!echo hi\ny = f(x)\n", "f x"),
    ("%run script.py {flag}", "flag"),
    ("x?", ""),
]


@pytest.mark.parametrize(("source", "names"), READS, ids=[source.replace("\n", "⏎") for source, _ in READS])
def test_a_cell_reads(source, names):
    assert read(source) >= set(names.split())
    assert read(source) - set(names.split()) <= UNSURE.get(source, set())


# Read in one more place than it need be: harmless, since only names that the notebook has are sent.
UNSURE: dict[str, set[str]] = {
    "(x := a) + x": {"x"},
    "%timeit -n 1 f(x)": {"n"},
    "x?": {"x"},
}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('size = globals().get("size", 32)', "size"),
        ('if "size" not in globals(): size = 1', "size"),
        ("locals()['a'] + vars()['b']", "a b"),
        ('size = 1\nglobals()["size"]', ""),
        ('globals()["size"] = 1', ""),
        ('"size" in locals(x)', ""),
        ("eval(' a + 1')", "a"),
        ("eval('a +')", ""),
    ],
)
def test_a_name_that_a_cell_asks_the_namespace_for_is_read(source, names):
    assert cell_names(source).read - {"eval", "globals", "locals", "vars", "x"} == set(names.split())


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("if k:\n    f = open()\nif k:\n    f.write()", "f"),
        ("for f in many: pass\nf", "f"),
        ("try:\n    f = 1\nexcept E: pass\ndef g(): f\ng()", "f"),
        ("f += 1", ""),
        ("while k:\n    f()\n    f = 1", ""),
        ("def g(): f\ng()\nf = 1", ""),
        ("def g(): f", ""),
        ("f = 1\nf", ""),
        ("%%time\nif k:\n    f = 1\nf", "f"),
        ('if "f" not in globals():\n    f = g = 1\nf', ""),
        ('if globals().get("f") is None:\n    f = 1\nif k: g = 1\nf, g', "g"),
    ],
)
def test_what_a_cell_may_have_bound_before_it_reads_it_is_unsure(source, names):
    assert cell_names(TransformerManager().transform_cell(source)).unsure == set(names.split())


def test_a_cell_that_is_no_python_has_no_names():
    assert cell_names("a = (") == cell_names("")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a = b = 1; c, *d = x; e: int = 1; f += 1", "a b c d e f"),
        ("for i in x:\n    with y as z:\n        w = 1", "i z w"),
        ("def f(): pass\nclass C: pass\nasync def g(): pass", "f C g"),
        ("import a.b, c as d\nfrom e import f as g", "a d g"),
        ("if (n := 1): pass\n[m := i for i in x]", "n m"),
        ("try:\n    a = 1\nexcept E as e:\n    b = 1\nelse:\n    c = 1\nfinally:\n    d = 1", "a b c d"),
        ("match a:\n    case [x]:\n        y = 1", "x y"),
        ("%%time\ny = f(x)\n", "y"),
    ],
)
def test_a_cell_binds(source, names):
    assert bound(source) >= set(names.split())


def test_a_cell_deletes():
    source = "del a, (b, c[d]), e.f\ntry:\n    pass\nexcept E as g:\n    pass\ndef f():\n    x = 1\n    del x\nh = 1"
    magic = "get_ipython().run_cell_magic('time', '', 'i = 1\\ndel i')"
    assert cell_names(f"{source}\n{magic}").deleted == {"a", "b", "g", "i"}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has `type` statements from 3.12 on")
def test_a_type_alias_is_bound_and_what_it_stands_for_is_read():
    assert bound("type Pair[T] = tuple[T, other]") == {"Pair"}
    assert read("type Pair[T] = tuple[T, other]\nPair") - {"tuple"} == {"other"}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has type parameters from 3.12 on")
def test_type_parameters_are_not_read():
    assert read("def f[T](x: T, y: other) -> T: return x") == {"other"}
    assert read("class C[U](Base[U]):\n    field: U\n    def f(self) -> U: pass") == {"Base"}


def test_what_only_a_function_binds_is_not_the_cells():
    assert bound("def f():\n    inner = 1\nclass C:\n    attribute = 1\n") == {"f", "C"}


def test_a_name_that_only_changes_in_place_is_mentioned():
    names = cell_names("items.append(1)\nmodel = 1\ndef f(): return helper")
    assert {"items", "model", "f", "helper"} <= names.mentioned


def test_attributes_of_names_and_imports_of_submodules_are_told():
    source = "import a.b.c, d, e.f as g\nfrom h.i import j\ndef k():\n    import l.m\n    return n.o.p(q.r)[0].s"
    names = cell_names(f"{source}\nget_ipython().run_cell_magic('time', '', 'import t.u\\nv.w')")
    assert names.imported == {"a.b.c", "t.u"}
    assert {("n", "o", "p"), ("q", "r"), ("v", "w")} <= names.paths
    assert not any("s" in path for path in names.paths)


# ---------------------------------------------------------------------- against Python's own symbol table

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
EXPRESSIONS = st.recursive(
    NAMES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda t: f"({t[0]} + {t[1]})"),
        st.tuples(NAMES, inner, inner).map(lambda t: f"[{t[1]} for {t[0]} in {t[2]}]"),
        st.tuples(NAMES, inner, inner).map(lambda t: f"(lambda {t[0]}={t[1]}: {t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"{t[0]}.x[{t[1]}]"),
    ),
    max_leaves=4,
)


def indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


STATEMENTS = st.recursive(
    st.one_of(
        st.tuples(NAMES, EXPRESSIONS).map(lambda t: f"{t[0]} = {t[1]}"),
        st.tuples(NAMES, EXPRESSIONS).map(lambda t: f"{t[0]} += {t[1]}"),
        EXPRESSIONS,
    ),
    lambda inner: st.one_of(
        st.tuples(EXPRESSIONS, st.lists(inner, min_size=1, max_size=3), st.lists(inner, min_size=1, max_size=2)).map(
            lambda t: f"if {t[0]}:\n{indented(t[1])}\nelse:\n{indented(t[2])}"
        ),
        st.tuples(NAMES, EXPRESSIONS, st.lists(inner, min_size=1, max_size=3)).map(
            lambda t: f"for {t[0]} in {t[1]}:\n{indented(t[2])}"
        ),
        st.tuples(NAMES, NAMES, EXPRESSIONS, st.lists(inner, min_size=1, max_size=3)).map(
            lambda t: f"def {t[0]}({t[1]}={t[2]}):\n{indented(t[3])}"
        ),
        st.tuples(EXPRESSIONS, NAMES, st.lists(inner, min_size=1, max_size=2)).map(
            lambda t: f"with {t[0]} as {t[1]}:\n{indented(t[2])}"
        ),
        st.tuples(NAMES, EXPRESSIONS, st.lists(inner, min_size=1, max_size=2)).map(
            lambda t: f"class {t[0]}({t[1]}):\n{indented(t[2])}"
        ),
    ),
    max_leaves=8,
)


class Generators(ast.NodeTransformer):
    """Put a generator, which sees the same names, for each list that is made in an expression: from Python 3.12 on
    symtable tells of the names in one as if they were the scope's around it.
    """

    def visit_ListComp(self, node: ast.ListComp) -> ast.GeneratorExp:
        self.generic_visit(node)
        return ast.copy_location(ast.GeneratorExp(node.elt, node.generators), node)


def globals_of(source: str) -> tuple[set[str], set[str], set[str]]:
    """What Python says: names that are looked up among the globals, names bound at the top level, and names that
    the body of a class binds and reads, which may be looked up there.
    """
    top = symtable.symtable(ast.unparse(Generators().visit(ast.parse(source))), "cell", "exec")
    looked_up = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    assigned = {s.get_name() for s in top.get_symbols() if s.is_assigned()}
    stack, of_classes = list(top.get_children()), set()
    while stack:
        scope = stack.pop()
        if scope.get_type() == "class":
            of_classes |= {s.get_name() for s in scope.get_symbols() if s.is_referenced()}
        looked_up |= {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
        stack += scope.get_children()
    return looked_up, assigned, of_classes


def augmented(source: str) -> set[str]:
    nodes = [node.target for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AugAssign)]
    return {target.id for target in nodes if isinstance(target, ast.Name)}


@settings(max_examples=150, deadline=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=5).map("\n".join))
@example("class a:\n    class b: pass\n    class c:\n        x = b")
def test_every_global_that_the_cell_never_binds_is_read(source):
    looked_up, assigned, of_classes = globals_of(source)
    found = cell_names(source)
    assert looked_up - assigned <= found.read
    assert found.bound == assigned
    # Nothing is read that Python does not look up.
    assert found.read <= looked_up | of_classes | augmented(source)


class Record(dict):
    """Globals of a cell that is run: which names it looked up before it had bound them."""

    def __init__(self) -> None:
        super().__init__()
        self.lacked: set[str] = set()

    def __missing__(self, name: str):
        self.lacked.add(name)
        return Anything()


class Anything:
    """Stands for any value of the notebook, whatever a cell does to it."""

    def itself(self, *args: object) -> Anything:
        return self

    x = property(itself)
    __add__ = __iadd__ = __radd__ = __getitem__ = __call__ = __enter__ = itself

    def __exit__(self, *exception: object) -> None:
        pass

    def __iter__(self) -> Iterator[Anything]:
        return iter([self])

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return ()


@settings(max_examples=150, deadline=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=5).map("\n".join))
def test_whatever_running_the_cell_looks_up_was_foreseen(source):
    # At the top level names are looked up in the mapping that exec was given; in functions they are not.
    names = Record()
    with contextlib.suppress(NameError, TypeError, AttributeError):
        exec(compile(source, "cell", "exec"), {}, names)
    assert {name for name in names.lacked if len(name) == 1} <= cell_names(source).read
