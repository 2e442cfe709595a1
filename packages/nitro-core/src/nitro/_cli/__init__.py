"""The `nitro` command: arguments in, exit code out; one module for each sub-command.

Starting it imports no JAX. A command that needs it imports what it uses in its body.
"""

from ._app import app, main
from ._backends import backends
from ._evaluate import evaluate
from ._export import export
from ._plot import plot
from ._runs import runs
from ._show import show
from ._train import train

for _command in (train, evaluate, export, runs, show, plot, backends):
    app.command()(_command)

__all__ = ["app", "main"]
