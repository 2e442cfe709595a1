"""Which edits the words about a hook show, and what they say; identity is the trace's."""

import importlib
import linecache
import re
import sys
import textwrap
import types
from typing import Any

import numpy as np
import pytest

from nitro._code import Words, moved_words, read_words


def load(source, name="features") -> Any:
    """Runs a source as a module, in the way of a cell: no file, another name each time."""
    module: Any = types.ModuleType(name)
    sys.modules[name] = module
    code = compile(textwrap.dedent(source), f"/home/me/{name}.py", "exec")
    exec(code, vars(module))
    return module


@pytest.fixture(autouse=True)
def _forget_modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in {"features", "other", "pkg", "pkg.sub", "lazy_part"}:
            del sys.modules[name]
    linecache.clearcache()


def trace(source) -> Words:
    """Traces `Digits.forward` of a source, or its function `forward`."""
    module = load(source)
    owner = getattr(module, "Digits", None)
    if owner is None:
        return trace_forward(module)
    hook = next(vars(cls)["forward"] for cls in owner.__mro__ if "forward" in vars(cls))
    return read_words({"Digits.forward": hook}, owner=owner)


def both_sides(marked) -> tuple[str, str]:
    """A source before and after the edits that it marks as `«old→new»`."""
    marked = textwrap.dedent(marked)
    old, new = (re.sub("«(.*?)→(.*?)»", side, marked, flags=re.DOTALL) for side in (r"\1", r"\2"))
    assert old != new
    return old, new


def trace_forward(module) -> Words:
    """Traces the function `forward` of a module."""
    return read_words({"forward": module.forward})


# name: (source with its edits as `«old→new»`, what the change says)
EDITS = {
    "literal in the hook": (
        "def forward(x): return x * «0.5→0.7»",
        "forward line 1: constant 0.5 → 0.7",
    ),
    "int becomes float": ("def forward(x): return x * «1→1.0»", "constant 1 → 1.0"),
    "int becomes bool": ("def forward(x): return f(x, «1→True»)", "constant 1 → True"),
    "sign of zero": ("def forward(x): return x + «0.0→-0.0»", "constant 0.0 → -0.0"),
    "operator": ("def forward(x): return x «*→+» 2", "forward line 1: code changed"),
    "comparison": ("def forward(x): return x «<→<=» 2", "code changed"),
    "negated condition": (
        "def forward(x):\n    «if x→if not x»: return 1\n    return 2",
        "forward line 1: code changed",
    ),
    "and becomes or": ("def forward(x, y): return x «and→or» y", "code changed"),
    "argument order": ("def forward(x, y): return «g(x, y)→g(y, x)»", "code"),
    "keyword name": ("def forward(x): return x.sum(«axis→where»=1)", "('axis',) → ('where',)"),
    "parameter name": ("def forward(*, «img→image»): return 1", "code changed"),
    "parameter kind": ("def forward(«x, y→x, *, y»): return x", "code changed"),
    "attribute name": ("def forward(x): return x.«mean→sum»()", "code changed"),
    "tuple literal": ("def forward(x): return x[«(0, 1)→(1, 0)»,]", "constant"),
    "member of a set literal": ("def forward(x): return x in {«1, 2→1, 3»}", "const"),
    "f-string": ("def forward(x): return f'{x:«>3→>4»} a'", "constant '>3' → '>4'"),
    "format conversion": ("def forward(x): return f'{x«!r→!s»}'", "code changed"),
    "walrus": ("def forward(x): return (y := «x + 1→x + 2») * y", "constant 1 → 2"),
    "match pattern": (
        """
        def forward(x):
            match x:
                case [1, *rest]: return rest
                case {«"k"→"j"»: v}: return v
        """,
        # Python 3.12 keeps the keys of a pattern among the constants.
        "code changed" if sys.version_info < (3, 12) else "constant ('k',) → ('j',)",
    ),
    "handler of an exception": (
        """
        def forward(x):
            try: return x / 2
            except «ZeroDivisionError→TypeError»: return 0
        """,
        "code changed",
    ),
    "default": (
        "def forward(x, alpha=«0.5→0.7»): return x * alpha",
        "default `alpha` of forward: 0.5 → 0.7",
    ),
    "keyword default": (
        "def forward(x, *, alpha=«0.5→0.7»): return x * alpha",
        "default `alpha` of forward: 0.5 → 0.7",
    ),
    "helper as a default": (
        """
        def helper(x): return «x * 2→x * 3»
        def forward(x, f=helper): return f(x)
        """,
        "helper() in features.py line 2: constant 2 → 3",
    ),
    "global number": (
        "SCALE = «2.0→3.0»\ndef forward(x): return x * SCALE",
        "global features.SCALE: 2.0 → 3.0",
    ),
    "global list": (
        "T = «[1, 2]→[1, 3]»\ndef forward(x): return x * T[0]",
        "global features.T: [1, 2] → [1, 3]",
    ),
    "list becomes tuple": (
        "T = «[1, 2]→(1, 2)»\ndef forward(x): return x * T[0]",
        "global features.T: [1, 2] → (1, 2)",
    ),
    "order of a dict": (
        "T = {«'a': 1, 'b': 2→'b': 2, 'a': 1»}\ndef forward(x): return [*T]",
        "global features.T",
    ),
    "value in a dict": (
        "T = {'a': 1, 'b': «[2]→[3]»}\ndef forward(x): return T['a']",
        "global features.T['b']: [2] → [3]",
    ),
    "type of a key": ("T = «{1:→{True:» 'a'}\ndef forward(x): return T", "global features.T"),
    "member of a set": (
        "T = «{1, 2}→{1, 3}»\ndef forward(x): return x in T",
        "global features.T: {1, 2} → {1, 3}",
    ),
    "function in a dict": (
        """
        def relu(x): return «max(x, 0)→max(x, 1)»
        ACT = {"relu": relu}
        def forward(x): return ACT["relu"](x)
        """,
        "relu() in features.py line 2: constant 0 → 1",
    ),
    "helper three calls down": (
        """
        def c(x): return x * «0.5→0.7»
        def b(x): return c(x)
        def a(x): return b(x)
        def forward(x): return a(x)
        """,
        "c() in features.py line 2: constant 0.5 → 0.7",
    ),
    "which helper": (
        """
        def a(x): return x * 1
        def b(x): return x * 2
        «helper = a→helper = b»
        def forward(x): return helper(x)
        """,
        "global features.helper: a() in features.py → b() in features.py",
    ),
    "two helpers swapped": (
        """
        def make(k):
            def scaled(x): return x * k()
            return scaled
        def one(): return 1
        def two(): return 2
        a, b = «make(one), make(two)→make(two), make(one)»
        def forward(x): return a(b(x)) - b(x)
        """,
        "",
    ),
    "nested function": (
        """
        def forward(x):
            def inner(y): return «y * 2→y * 3»
            return inner(x)
        """,
        "forward line 2: constant 2 → 3",
    ),
    "lambda": ("def forward(x): return (lambda y: y * «2→3»)(x)", "constant 2 → 3"),
    "global in a generator": (
        "«K = 2→K = 3»\ndef forward(x): return sum(y * K for y in x)",
        "global features.K: 2 → 3",
    ),
    "global in a comprehension condition": (
        "«K = 2→K = 3»\ndef forward(x): return [y for y in x if y > K]",
        "global features.K: 2 → 3",
    ),
    "global in a nested class body": (
        """
        «K = 2→K = 3»
        def forward(x):
            class Inner:
                k = K
            return Inner.k * x
        """,
        "global features.K: 2 → 3",
    ),
    "helper kept in a nested class body": (
        """
        def helper(x): return «x * 2→x * 3»
        def forward(x):
            class Inner:
                helper = helper
            return Inner.helper(x)
        """,
        "helper() in features.py line 2: constant 2 → 3",
    ),
    "closure variable": (
        """
        def make(scale):
            def forward(x): return x * scale
            return forward
        forward = make(«2.0→3.0»)
        """,
        "closure variable `scale` of forward: 2.0 → 3.0",
    ),
    "closure of a decorator": (
        """
        import functools
        def scaled(k):
            def decorate(f):
                @functools.wraps(f)
                def wrapper(x): return f(x) * k
                return wrapper
            return decorate
        @scaled(«2.0→3.0»)
        def forward(x): return x
        """,
        "closure variable `k` of forward: 2.0 → 3.0",
    ),
    "function below a decorator": (
        """
        import functools
        def plain(f):
            @functools.wraps(f)
            def wrapper(x): return f(x)
            return wrapper
        @plain
        def forward(x): return «x * 2→x * 3»
        """,
        "forward() in features.py line 7: constant 2 → 3",
    ),
    "decorator object with state": (
        """
        class Scaled:
            def __init__(self, f): self.f, self.k = f, «2.0→3.0»
            def __call__(self, x): return self.f(x) * self.k
        @Scaled
        def helper(x): return x
        def forward(x): return helper(x)
        """,
        "global features.helper.k: 2.0 → 3.0",
    ),
    "attribute of a function": (
        "def h(x): return x * h.k\n«h.k = 2→h.k = 3»\ndef forward(x): return h(x)",
        "h().k: 2 → 3",
    ),
    "partial": (
        """
        import functools
        def helper(x, k): return x * k
        double = functools.partial(helper, «k=2→k=3»)
        def forward(x): return double(x)
        """,
        "argument `k` bound by global features.double: 2 → 3",
    ),
    "function in a partial": (
        """
        import functools
        def helper(x, k): return «x * k→x + k»
        double = functools.partial(helper, k=2)
        def forward(x): return double(x)
        """,
        "helper() in features.py line 3: code changed",
    ),
    "lru_cache": (
        """
        import functools
        @functools.lru_cache
        def table(n): return «n * 2→n * 3»
        def forward(x): return table(3)
        """,
        "table() in features.py line 3: constant 2 → 3",
    ),
    "overload of a singledispatch": (
        """
        import functools
        @functools.singledispatch
        def helper(x): return x
        @helper.register(int)
        def _(x): return «x * 2→x * 3»
        def forward(x): return helper(x)
        """,
        "constant 2 → 3",
    ),
    "jitted helper": (
        """
        import jax
        @jax.jit
        def helper(x): return «x * 2→x * 3»
        def forward(x): return helper(x)
        """,
        "helper() in features.py line",
    ),
    "backward rule": (
        """
        import jax
        @jax.custom_vjp
        def helper(x): return x
        helper.defvjp(lambda x: (x, None), lambda r, g: («g * 2→g * 3»,))
        def forward(x): return helper(x)
        """,
        "constant 2 → 3",
    ),
    "checkpointed helper": (
        """
        import jax
        @jax.checkpoint
        def helper(x): return «x * 2→x * 3»
        def forward(x): return helper(x)
        """,
        "helper() in features.py line",
    ),
    "nnx.jit helper": (
        """
        from flax import nnx
        @nnx.jit
        def helper(x): return «x * 2→x * 3»
        def forward(x): return helper(x)
        """,
        "helper() in features.py line",
    ),
    "vmapped and differentiated helper": (
        """
        import jax
        def helper(x): return «x * 2→x * 3»
        both = jax.vmap(jax.grad(helper))
        def forward(x): return both(x)
        """,
        "helper() in features.py line 3: constant 2 → 3",
    ),
    "hyperparameter closed over by a library": (
        "import optax\nTX = optax.adam(«1e-3→1e-2»)\ndef forward(x): return TX.init(x)",
        "-0.001 → -0.01",
    ),
    "module class": (
        """
        from flax import nnx
        class Net(nnx.Module):
            def __init__(self, rngs):
                super().__init__()
                self.layer = nnx.Linear(2, 3, rngs=rngs)
            def __call__(self, x): return self.layer(x) «* 2→* 3»
        def forward(x): return Net(x)
        """,
        "Net.__call__() in features.py line 7: constant 2 → 3",
    ),
    "base of a class": (
        """
        class Base:
            def f(self, x): return «x * 2→x * 3»
        class Net(Base): pass
        def forward(x): return Net().f(x)
        """,
        "Base.f() in features.py line 3: constant 2 → 3",
    ),
    "attribute of a class": (
        "class Config:\n    «k = 2→k = 3»\ndef forward(x): return x * Config.k",
        "class Config.k: 2 → 3",
    ),
    "enum member": (
        """
        import enum
        class Mode(enum.Enum):
            «A = 1→A = 3»
            B = 2
        def forward(x): return x * Mode.A.value
        """,
        "class Mode.A",
    ),
    "field of a dataclass": (
        """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Config:
            «k: float = 2.0→k: float = 3.0»
        CONFIG = Config()
        def forward(x): return x * CONFIG.k
        """,
        "global features.CONFIG.k: 2.0 → 3.0",
    ),
    "function held by a dataclass": (
        """
        import dataclasses
        def helper(x): return «x * 2→x * 3»
        @dataclasses.dataclass
        class Config:
            f: object
        CONFIG = Config(helper)
        def forward(x): return CONFIG.f(x)
        """,
        "helper() in features.py line 3: constant 2 → 3",
    ),
    "slots": (
        """
        class Config:
            __slots__ = ("k",)
            def __init__(self): «self.k = 2→self.k = 3»
        CONFIG = Config()
        def forward(x): return x * CONFIG.k
        """,
        "global features.CONFIG.k: 2 → 3",
    ),
    "bound method of an object": (
        """
        class Scale:
            def __init__(self, k): self.k = k
            def apply(self, x): return x * self.k
        apply = «Scale(2)→Scale(3)».apply
        def forward(x): return apply(x)
        """,
        "instance of global features.apply.k: 2 → 3",
    ),
    "derived from list": (
        """
        class Rows(list): pass
        T = Rows(«[1, 2]→[1, 3]»)
        def forward(x): return x * T[0]
        """,
        "global features.T: Rows(1, 2) → Rows(1, 3)",
    ),
    "numpy array": (
        "import numpy as np\nW = «np.ones((2, 2))→np.ones((2, 2)) * 2»\ndef forward(x): return x @ W",
        "global features.W: float64[2,2], with other content",
    ),
    "dtype of an array": (
        "import numpy as np\nW = np.ones(2, «'f4'→'f8'»)\ndef forward(x): return x @ W",
        "global features.W: float32[2] → float64[2]",
    ),
    "shape of an array": (
        "import numpy as np\nW = np.ones(«(2, 3)→(3, 2)»)\ndef forward(x): return x @ W",
        "global features.W: float64[2,3] → float64[3,2]",
    ),
    "byte order": (
        "import numpy as np\nW = np.zeros(2, '«<f4→>f4»')\ndef forward(x): return x @ W",
        "global features.W",
    ),
    "jax array": (
        "import jax.numpy as jnp\nW = jnp.array([1., «2.]→3.]»)\ndef forward(x): return x @ W",
        "global features.W: float32[2], with other content",
    ),
    "numpy scalar": (
        "import numpy as np\nK = np.«float32(2)→float32(3)»\ndef forward(x): return x * K",
        "global features.K: float32(2.0) → float32(3.0)",
    ),
    "jax dtype": (
        "import jax.numpy as jnp\nD = «jnp.float32→jnp.bfloat16»\ndef forward(x): return x.astype(D)",
        "global features.D: class float32 → class bfloat16",
    ),
    "regular expression": (
        "import re\nR = re.compile('«a+→b+»')\ndef forward(x): return R.match(x)",
        "global features.R: Pattern(), with other content",
    ),
    "attrgetter": (
        "import operator\nG = operator.attrgetter«('a')→('b')»\ndef forward(x): return G(x)",
        "global features.G",
    ),
    "order of a deque": (
        "from collections import deque\nT = deque(«[1, 2]→[2, 1]»)\ndef forward(x): return T[0]",
        "global features.T",
    ),
    "library function": (
        "import jax\nf = «jax.nn.relu→jax.nn.gelu»\ndef forward(x): return f(x)",
        "global features.f: relu()",
    ),
    "global that is missing": (
        "«UNUSED = 1→K = 1»\ndef forward(x): return x * K",
        "global features.K: added, 1",
    ),
    "builtin that is shadowed": (
        "«UNUSED = 1→def sum(x): return 1»\ndef forward(x): return sum(x)",
        "global features.sum: added, sum() in features.py",
    ),
    "recursion": (
        "def f(x): return f(x - 1) if x «else 1→else 2»\ndef forward(x): return f(x)",
        "f() in features.py line 1: code changed",
    ),
    "mutual recursion": (
        """
        def even(n): return True if n == 0 else odd(n - 1)
        def odd(n): «return False→return None» if n == 0 else even(n - 1)
        def forward(x): return even(x)
        """,
        "odd() in features.py line 3: code changed",
    ),
    "object that holds itself": (
        "«T = [1]→T = [2]»\nT.append(T)\ndef forward(x): return T[0]",
        "global features.T",
    ),
    "counter that is read": (
        """
        «n = 0→n = 5»
        def forward(x):
            global n
            n += 1
            return x * n
        """,
        "global features.n: 0 → 5",
    ),
    "list that is read": (
        "«LOG = [1]→LOG = [1, 2]»\ndef forward(x):\n    LOG.append(1)\n    return len(LOG)",
        "global features.LOG: [1] → [1, 2]",
    ),
    "getattr with a literal name": (
        """
        class Digits:
            def helper(self, x): return «x * 2→x * 3»
            def forward(self, x): return getattr(self, "helper")(x)
        """,
        "Digits.helper() in features.py line 3: constant 2 → 3",
    ),
    "helper of the experiment": (
        """
        class Digits:
            def helper(self, x): return «x * 2→x * 3»
            def forward(self, x): return self.helper(x)
        """,
        "Digits.helper() in features.py line 3: constant 2 → 3",
    ),
    "property of the experiment": (
        """
        class Digits:
            @property
            def k(self): «return 2→return 3»
            def forward(self, x): return x * self.k
        """,
        "Digits.k() in features.py line 3: constant 2 → 3",
    ),
    "cached property of the experiment": (
        """
        import functools
        class Digits:
            @functools.cached_property
            def k(self): «return 2→return 3»
            def forward(self, x): return x * self.k
        """,
        "Digits.k() in features.py line 4: constant 2 → 3",
    ),
    "static method of the experiment": (
        """
        class Digits:
            @staticmethod
            def k(x): return «x * 2→x * 3»
            def forward(self, x): return self.k(x)
        """,
        "Digits.k() in features.py line 3: constant 2 → 3",
    ),
    "class method that reads cls": (
        """
        class Digits:
            «K = 2→K = 3»
            @classmethod
            def k(cls): return cls.K
            def forward(self, x): return x * self.k()
        """,
        "Digits.K: 2 → 3",
    ),
    "constant as self.CONST": (
        "class Digits:\n    «K = 2→K = 3»\n    def forward(self, x): return x * self.K",
        "Digits.K: 2 → 3",
    ),
    "constant as Digits.CONST": (
        "class Digits:\n    «K = 2→K = 3»\n    def forward(self, x): return x * Digits.K",
        "Digits.K: 2 → 3",
    ),
    "constant as type(self).CONST": (
        "class Digits:\n    «K = 2→K = 3»\n    def forward(self, x): return x * type(self).K",
        "Digits.K: 2 → 3",
    ),
    "base hook reached by super()": (
        """
        class Base:
            def forward(self, x): return «x * 2→x * 3»
        class Digits(Base):
            def forward(self, x): return super().forward(x) + 1
        """,
        "Base.forward() in features.py line 3: constant 2 → 3",
    ),
    "base hook called by name": (
        """
        class Base:
            def forward(self, x): return «x * 2→x * 3»
        class Digits(Base):
            def forward(self, x): return Base.forward(self, x) + 1
        """,
        "Base.forward() in features.py line 3: constant 2 → 3",
    ),
    "inherited hook": (
        """
        class Base:
            def forward(self, x): return self.helper(x)
        class Digits(Base):
            def helper(self, x): return «x * 2→x * 3»
        """,
        "Digits.helper() in features.py line 5: constant 2 → 3",
    ),
    "experiment handed to a helper": (
        """
        def helper(exp, x): return exp.scale(x)
        class Digits:
            def scale(self, x): return «x * 2→x * 3»
            def forward(self, x): return helper(self, x)
        """,
        "Digits.scale() in features.py line 4: constant 2 → 3",
    ),
    "operator of the experiment": (
        """
        class Digits:
            def __call__(self, x): return «x * 2→x * 3»
            def forward(self, x): return self(x)
        """,
        "Digits.__call__",
    ),
    "helper in another class attribute": (
        """
        def relu(x): return «x * 2→x * 3»
        class Digits:
            act = staticmethod(relu)
            def forward(self, x): return self.act(x)
        """,
        "relu() in features.py line 2: constant 2 → 3",
    ),
    "conditional expression between functions": (
        """
        import numpy as np
        def a(x): return x * 2
        def b(x): return «x * 3→x * 4»
        def forward(x): return (a if x else b)(x)
        """,
        "b() in features.py line 4: constant 3 → 4",
    ),
    "property of an object": (
        """
        class Config:
            @property
            def k(self): «return 2→return 3»
        CONFIG = Config()
        def forward(x): return CONFIG.k
        """,
        "Config.k() in features.py line 3: constant 2 → 3",
    ),
    "name of a global as text": (
        "«K = 2→K = 3»\ndef forward(x): return globals()['K']",
        "global features.K: 2 → 3",
    ),
    "property in place of a field": (
        """
        import dataclasses
        @dataclasses.dataclass
        class Base:
            width: int = 1
        class Digits(Base):
            @property
            def width(self): «return 2→return 3»
            def forward(self, x): return x * self.width
        """,
        "Digits.width() in features.py line 7: constant 2 → 3",
    ),
    "default list of a helper": (
        "def h(x, t=«[1]→[2]»): return t\ndef forward(x): return h(x)",
        "default `t` of h(): [1] → [2]",
    ),
    "body of a scan": (
        """
        import jax
        def step(carry, x): return «carry * 2→carry * 3», x
        def forward(x): return jax.lax.scan(step, 0, x)
        """,
        "step() in features.py line 3: constant 2 → 3",
    ),
    "base of a class made in the hook": (
        """
        class Base:
            «k = 2→k = 3»
        def forward(x):
            class Inner(Base): pass
            return Inner.k
        """,
        "class Base.k: 2 → 3",
    ),
    "state that a decorator counts in": (
        """
        def counted(f):
            def wrapper(x):
                wrapper.calls += 1
                return f(x)
            wrapper.«calls = 0→calls = 1»
            return wrapper
        @counted
        def forward(x): return x
        """,
        "forward.calls: 0 → 1",
    ),
    "vectorized helper": (
        """
        import numpy as np, jax.numpy as jnp
        def helper(x): return «x * 2→x * 3»
        both = np.vectorize(helper), jnp.vectorize(helper)
        def forward(x): return both[1](x)
        """,
        "helper() in features.py line 3: constant 2 → 3",
    ),
    "checked helper": (
        """
        from jaxtyping import jaxtyped
        @jaxtyped(typechecker=None)
        def helper(x): return «x * 2→x * 3»
        def forward(x): return helper(x)
        """,
        "helper() in features.py line",
    ),
    "remat of a module": (
        """
        from flax import nnx
        class Net(nnx.Module):
            def __call__(self, x): return «x * 2→x * 3»
        Again = nnx.remat(Net.__call__)
        def forward(x): return Again(x)
        """,
        "Net.__call__() in features.py line 4: constant 2 → 3",
    ),
    "function becomes a generator": ("def forward(x): «return x→yield x»", "code changed"),
    "monkeypatched library": (
        """
        import colorsys
        def mine(x): return «x * 2→x * 3»
        colorsys.shade = mine
        def forward(x): return colorsys.shade(x)
        """,
        "mine() in features.py line 3: constant 2 → 3",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edit_moves_the_digest_and_is_explained(name):
    marked, says = EDITS[name]
    old, new = both_sides(marked)

    before, after = trace(old), trace(new)

    assert trace(old).digest == before.digest != after.digest
    changes = moved_words(before, after)
    assert any(says in change for change in changes), changes


# name: source with its edits as `«old→new»`
NON_EDITS = {
    "comment above": "«def→# why\n\n\ndef» forward(x): return x",
    "docstring of a class": "class A:\n  '«old→new»'\n\ndef forward(x): return A",
    "lines above a class": "«class→\n\nclass» A:\n  k = 1\ndef forward(x): return A",
    "order of methods": "class A:\n  «def f(self): 1\n  def g(self): 2→def g(self): 2\n  def f(self): 1»\ndef forward(x): return A",
    "folded constant": "def forward(x): return x * «0.5→(1 / 2)»",
    "annotation": "def forward(x: «int→float»): return x",
    "another function": "def other(): return «1→2»\ndef forward(x): return x",
    "unread global": "K = «1→2»\ndef forward(x): return x",
    "global of the name of a local": "K = «1→2»\ndef forward(x):\n  K = x\n  return K",
    "global of the name of a parameter": "K = «1→2»\ndef forward(K): return K",
    "global of the name of a keyword": "axis = «1→2»\ndef forward(x): return x(axis=0)",
    "other attribute of a module": "import types\nm = types.ModuleType('m')\nm.a, m.b = «1, 2→1, 3»\ndef forward(x): return m.a",
    "another hook": "class Digits:\n  def metrics(self): «return 1→return 2»\n  def forward(self, x): return x",
    "another hook, with super()": """
        class Base:
            def forward(self, x): return x
        class Digits(Base):
            def metrics(self): «return 1→return 2»
            def forward(self, x): return super().forward(x)
        """,
    "another hook, with type(self)": "class Digits:\n  def metrics(self): «return 1→return 2»\n  def forward(self, x): return type(self)",
    "field default": """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Digits:
            width: int = «128→256»
            def forward(self, x): return x * self.width
        """,
    "content of an lru_cache": "import functools\n@functools.lru_cache\ndef t(n): return n«\n\ndef forward→\nt(1)\ndef forward»(x): return t(1)",
    "logger level": "import logging\nL = logging.getLogger«('x')→('x'); L.setLevel(10)»\ndef forward(x): L.info(x)",
    "comment behind": "def forward(x): «return x→return x  # x»",
    "weak type": "import jax.numpy as jnp\nK = jnp.asarray(«2.0)→2.0, 'float32')»\ndef forward(x): return x * K",
    "memory order of an array": "import numpy as np\nW = np.arange(6).«reshape(2, 3)→reshape(2, 3).copy('F')»\ndef forward(x): return W",
    "used singledispatch": """
        import functools
        @functools.singledispatch
        def helper(x): return x
        «def forward→helper(1)
        def forward»(x): return helper(x)
        """,
    "jitted helper that was used": "import jax\nh = jax.jit(lambda x: x)\n«def forward→h(1)\ndef forward»(x): return h(x)",
    "order of assignment of attributes": "class C: pass\nc = C()\n«c.a = 1; c.b = 2→c.b = 2; c.a = 1»\ndef forward(x): return c.a",
}


@pytest.mark.parametrize("name", NON_EDITS)
def test_what_is_no_edit_moves_nothing(name):
    before, after = map(trace, both_sides(NON_EDITS[name]))

    assert moved_words(before, after) == []
    assert after.digest == before.digest


# name: (source of `features`, statement run in it, what is said)
MUTATIONS = {
    "rebound global": ("K = 1\ndef forward(x): return x * K", "K = 2", "global features.K: 1 → 2"),
    "list changed in place": ("T = [1]\ndef forward(x): return T", "T.append(2)", "[1] → [1, 2]"),
    "nested list": ("T = {'a': [1]}\ndef forward(x): return T", "T['a'][0] = 2", "[1] → [2]"),
    "equal but other type": ("T = [1]\ndef forward(x): return T", "T[0] = True", "[1] → [True]"),
    "array changed in place": (
        "import numpy as np\nW = np.zeros(4)\ndef forward(x): return W",
        "W[3] = 1",
        "global features.W: float64[4], with other content",
    ),
    "array changed through a view": (
        "import numpy as np\nB = np.zeros(4)\nW = B[::2]\ndef forward(x): return W",
        "B[2] = 1",
        "global features.W: float64[2], with other content",
    ),
    "nan to another nan": (
        "import numpy as np\nW = np.array([np.nan])\ndef forward(x): return W",
        "W.view('u8')[0] += 1",
        "with other content",
    ),
    "shape changed in place": (
        "import numpy as np\nW = np.zeros(4)\ndef forward(x): return W",
        "W = W.reshape(2, 2)",
        "float64[4] → float64[2,2]",
    ),
    "redefined helper": (
        "def h(x): return x * 1\ndef forward(x): return h(x)",
        "def h(x): return x * 2",
        "constant 1 → 2",
    ),
    "redefined root": ("def forward(x): return x * 1", "def forward(x): return x * 2", "1 → 2"),
    "code replaced by autoreload": (
        "def h(x): return x * 1\ndef forward(x): return h(x)",
        "h.__code__ = (lambda x: x * 2).__code__",
        "global features.h",
    ),
    "patched method": (
        "class A:\n  def f(self): return 1\ndef forward(x): return A().f()",
        "A.f = lambda self: 2",
        "class A.f",
    ),
    "patched hook": (
        "class Digits:\n  def forward(self, x): return x * 1",
        "Digits.forward = lambda self, x: x * 2",
        "1 → 2",
    ),
    "new hook in the way of an inherited one": (
        "class B:\n  def forward(self, x): return x * 1\nclass Digits(B): pass",
        "Digits.forward = lambda self, x: x * 2",
        "1 → 2",
    ),
    "class cell run again": (
        "class Digits:\n  def forward(self, x): return x * 1",
        "class Digits:\n  def forward(self, x): return x * 2",
        "Digits.forward line 2: constant 1 → 2",
    ),
    "closure variable": (
        """
        def make():
            k = 1
            def forward(x): return x * k
            def move():
                nonlocal k
                k = 2
            return forward, move
        forward, move = make()
        """,
        "move()",
        "closure variable `k` of forward: 1 → 2",
    ),
    "default": (
        "def h(x, k=1): return x * k\ndef forward(x): return h(x)",
        "h.__defaults__ = (2,)",
        "default `k` of h(): 1 → 2",
    ),
    "keyword default": (
        "def h(x, *, k=1): return x * k\ndef forward(x): return h(x)",
        "h.__kwdefaults__['k'] = 2",
        "default `k` of h(): 1 → 2",
    ),
    "attribute of an object": (
        "class C: k = 0\nc = C()\nc.k = 1\ndef forward(x): return c.k",
        "c.k = 2",
        "global features.c.k: 1 → 2",
    ),
    "deleted global": ("K = 1\ndef forward(x): return K", "del K", "K: removed, 1"),
    "method called in place of another": (
        "class Digits:\n  def forward(self, x): return self.h(x)\n  def h(self, x): return 1",
        "Digits.h = lambda self, x: 2",
        "Digits.h",
    ),
    "object changed below a tuple": (
        "T = ([1],)\ndef forward(x): return T",
        "T[0][0] = 2",
        "global features.T[0]: [1] → [2]",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_moved_since_is_said(name):
    source, statement, says = MUTATIONS[name]
    before = trace(source)
    module = sys.modules["features"]

    assert again(module).digest == before.digest
    exec(compile(textwrap.dedent(statement), "/home/me/features.py", "exec"), vars(module))
    changes = moved_words(before, again(module))
    assert any(says in change for change in changes), changes


def again(module) -> Words:
    """Reads the words of a module once more."""
    owner = getattr(module, "Digits", None)
    if owner is None:
        return trace_forward(module)
    hook = next(vars(cls)["forward"] for cls in owner.__mro__ if "forward" in vars(cls))
    return read_words({"Digits.forward": hook}, owner=owner)


def test_source_lines_are_shown_before_and_after(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "lazy_part.py"
    file.write_text("def f(x):\n    y = x\n    return x * 1\n")
    before = read_words({"f": importlib.import_module("lazy_part").f})
    file.write_text("# why\n\ndef f(x):\n    y = x\n    # more\n    if x:\n        return x * 22\n")
    importlib.invalidate_caches()
    after = read_words({"f": importlib.reload(sys.modules["lazy_part"]).f})

    assert moved_words(before, after) == ["f line 6: `return x * 1` → `if x:`"]


def test_module_attributes_are_followed_one_by_one():
    sub = load("SCALE = 2.0\nOTHER = 1\ndef helper(x): return x * SCALE", "pkg.sub")
    load("import sys\nsub = sys.modules['pkg.sub']", "pkg")
    module = load("import pkg\ndef forward(x): return pkg.sub.helper(x) * pkg.sub.SCALE", "other")
    before = trace_forward(module)
    sub.OTHER = 2
    assert trace_forward(module).digest == before.digest
    sub.SCALE = 3.0

    assert any("SCALE: 2.0 → 3.0" in line for line in moved_words(before, trace_forward(module)))


def test_what_refers_to_itself_or_is_huge_ends():
    module = load("T = None\nfor _ in range(5000): T = [T]\nT.append(T)\ndef forward(x): return T")

    assert trace_forward(module).digest == trace_forward(module).digest


def test_object_that_raises_when_looked_at_hides_nothing_beside_it():
    source = """
    class Rude:
        @property
        def __dict__(self): raise RuntimeError("private")
    X = Rude()
    K = «1→2»
    def forward(x): return X, K
    """
    before, after = map(trace, both_sides(source))

    assert moved_words(before, after) == ["global features.K: 1 → 2"]


def test_large_array_is_never_sampled():
    module = load("import numpy as np\nW = np.zeros(1000)\ndef forward(x): return x @ W")
    before = trace_forward(module)
    module.W[777] = np.nextafter(0, 1)

    assert moved_words(before, trace_forward(module)) != []
