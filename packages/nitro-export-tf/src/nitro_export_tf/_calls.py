"""Modules as TensorFlow functions of tensors, differentiable where that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._module import Module

Call = Callable[[Sequence[Any]], list[Any]]
"""From all arguments, as tensors, to all results."""


def make_call(tf: Any, module: Module, version: int) -> Call:
    """The module as one op; the CPU runs it unless TensorFlow places it elsewhere.

    Args:
        tf: TensorFlow.
        module: What the op runs.
        version: The calling convention that the module is read by.
    """
    from tensorflow.compiler.tf2xla.python import xla

    def call(arguments: Sequence[Any]) -> list[Any]:
        # pyright takes the generated wrapper for one that may return anything.
        op: Any = xla.call_module
        return op(
            [arguments[index] for index in module.kept],
            version=version,
            module=module.data,
            Tout=[tf.as_dtype(dtype.name) for dtype, _ in module.results],
            Sout=[shape for _, shape in module.results],
            platforms=module.platforms,
            function_list=(),
            has_token_input_output=False,
            disabled_checks=(),
        )

    return call


def make_differentiable(tf: Any, call: Call, vjp: Call, is_float: Sequence[bool]) -> Call:
    """Gives `call` a gradient, which TensorFlow saves and restores with it.

    Args:
        tf: TensorFlow.
        call: The program.
        vjp: From its arguments and a cotangent for each result, to one for each argument.
        is_float: For each argument, whether it has a gradient.
    """

    @tf.custom_gradient
    def differentiable(*arguments: Any) -> Any:
        results = call(arguments)

        def gradient(*cotangents: Any) -> list[Any]:
            given = [
                # The cotangent of an integer is a boolean in JAX, and anything here.
                cotangent if result.dtype.is_floating else tf.zeros_like(result, dtype=tf.bool)
                for result, cotangent in zip(results, cotangents, strict=True)
            ]
            found = vjp([*arguments, *given])
            return [g if has else None for g, has in zip(found, is_float, strict=True)]

        return results, gradient

    return lambda arguments: list(differentiable(*arguments))
