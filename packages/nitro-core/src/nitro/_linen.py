"""Linen modules in NNX's bridge: told by the mode of the model whether they train."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import flax.errors
from flax import nnx

from nitro.errors import HookError

_WHEN_TRAINING = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""What Linen modules call the flag of their mode, and its value in training mode."""


class LinenModule(nnx.bridge.ToNNX):
    """NNX's wrapper of a Linen module, which passes on whether the model trains.

    A flag that the caller passes wins. In training mode the collections besides the
    parameters may change, as BatchNorm's statistics must.
    """

    @property
    def deterministic(self) -> bool:
        """Whether it is in evaluation mode; what `train()` and `eval()` of NNX set."""
        return vars(self).get("to_nnx__deterministic", False)

    @deterministic.setter
    def deterministic(self, value: bool) -> None:
        self.to_nnx__deterministic = value

    def __call__(
        self,
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Applies the Linen module, its flags as the mode has them."""
        linen = self.to_nnx__module
        kwargs = {**self._flags(linen, method, args, kwargs), **kwargs}
        if mutable is None and not self.deterministic:
            mutable = self._collections()
        in_mode = self._in_mode(linen)
        if in_mode is not linen:
            self.to_nnx__module = in_mode
        try:
            return super().__call__(*args, rngs=rngs, method=method, mutable=mutable, **kwargs)
        except (
            flax.errors.ScopeParamNotFoundError,
            flax.errors.ScopeCollectionNotFound,
            flax.errors.ScopeVariableNotFoundError,
        ) as error:
            if self._variables():
                raise
            raise _not_initialised(linen) from error
        except flax.errors.ModifyScopeVariableError as error:
            raise _always_trains(linen, error) from error
        finally:
            if in_mode is not linen:
                self.to_nnx__module = linen

    def _flags(self, linen: Any, method: Any, args: Any, kwargs: Any) -> dict[str, bool]:
        """The arguments that name the mode and that the caller leaves out."""
        function = getattr(type(linen), method) if isinstance(method, str) else method
        signature = inspect.signature(function or type(linen).__call__)
        given = signature.bind_partial(linen, *args, **kwargs).arguments
        return {
            name: value is not self.deterministic
            for name, value in _WHEN_TRAINING.items()
            if name in signature.parameters and name not in given
        }

    def _in_mode(self, linen: Any) -> Any:
        """The Linen module with the fields that name the mode as it has them.

        A field that somebody set to evaluation, against its default, stays.
        """
        fields: Mapping[str, Any] = {f.name: f for f in dataclasses.fields(linen)}
        moved = {
            name: value is not self.deterministic
            for name, value in _WHEN_TRAINING.items()
            if name in fields
            and isinstance(getattr(linen, name), bool)
            and not (getattr(linen, name) is (not value) is not fields[name].default)
        }
        return linen.clone(**moved) if moved else linen

    def _variables(self) -> dict[str, Any]:
        own = vars(self).items()
        return {n: v for n, v in own if not n.startswith(("to_nnx__", "_pytree__"))}

    def _collections(self) -> list[str] | bool:
        variables = nnx.bridge.variables.nnx_attrs_to_linen_vars(self._variables())
        return [name for name in variables if name != "params"] or False


def drive_linen(model: nnx.Module) -> None:
    """Has the Linen modules in a model follow its mode; changes their class in place."""
    for _, module in nnx.iter_modules(model):
        if type(module) is nnx.bridge.ToNNX:
            module.__class__ = LinenModule


def shell_of(linen: Any, sample: str) -> str:
    """The line that makes an NNX module of a Linen module.

    Args:
        linen: The Linen module.
        sample: An expression for what `forward` calls it with.
    """
    fields = [f for f in dataclasses.fields(linen) if f.name not in ("name", "parent") and f.init]
    own = {f.name: getattr(linen, f.name) for f in fields}
    values = [f"{f.name}={own[f.name]!r}" for f in fields if own[f.name] is not f.default]
    call = f"{type(linen).__name__}({', '.join(values)})"
    return f"nnx.bridge.ToNNX({call}, rngs=rngs).lazy_init({sample})"


def _not_initialised(linen: Any) -> HookError:
    return HookError(
        f"The Linen module `{type(linen).__name__}` has no variables: it was not initialised.",
        expected="`lazy_init` with a sample of what `forward` calls the module with",
        fix=f"in `build_model`, write `{shell_of(linen, 'jnp.zeros((1, ...))')}` with the shape of "
        "one row",
    )


def _always_trains(linen: Any, error: Exception) -> HookError:
    return HookError(
        f"The Linen module `{type(linen).__name__}` changes its variables in evaluation mode: "
        f"{str(error).splitlines()[0]}",
        expected="statistics that stay as they are while nothing trains",
        fix="give its `__call__` an argument `train`, and write "
        "`nn.BatchNorm(use_running_average=not train)`",
    )
