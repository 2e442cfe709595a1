"""The `nitro-bundle` command: arguments in, exit code out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nitro.errors import NitroError

app = typer.Typer(
    name="nitro-bundle",
    help="Looks into model bundles, checks them, and predicts with them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

BundlePath = Annotated[Path, typer.Argument(metavar="PATH", help="A bundle's directory.")]


@app.callback()
def _options(
    *,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Looks into model bundles, checks them, and predicts with them."""


@app.command()
def inspect(path: BundlePath) -> None:
    """Shows what a bundle takes, returns, holds and comes from; runs nothing."""
    from ._files import FileReader
    from ._index import FILE, MAX_BYTES, read_index
    from ._manifest import FILE as MANIFEST_FILE
    from ._manifest import read_manifest
    from ._weights import FILE as WEIGHTS_FILE
    from ._weights import TensorFile
    from ._yaml import dump

    files = FileReader(path)
    index = read_index(files.read(FILE, limit_bytes=MAX_BYTES))
    manifest = read_manifest(files.read(MANIFEST_FILE), has_model_jl="model.jl" in index.files)
    stored = TensorFile(files.path(WEIGHTS_FILE), file=WEIGHTS_FILE, reverse_axes=True)
    print(f"{index.name}: batch sizes {', '.join(map(str, index.batch_sizes))}")
    for title, specs in (("inputs", index.inputs), ("outputs", index.outputs)):
        print(f"\n{title}")
        for spec in specs:
            print(f"  {spec}")
    print(f"\nweights, {sum(stored[name].nbytes for name in stored):,} bytes")
    for name in stored.argument_order():
        print(f"  {name}: {stored.dtypes[name].token} {stored.shape(name)}")
    print(f"\nplatforms: {', '.join(index.platforms)}")
    print("versions: " + ", ".join(f"{name} {text}" for name, text in index.versions.items()))
    if index.custom_calls:
        print(f"custom calls: {', '.join(index.custom_calls)}")
    print("\nprovenance")
    print("".join(f"  {line}\n" for line in dump(dict(manifest.provenance)).splitlines()), end="")


@app.command()
def verify(
    path: BundlePath,
    timeout_s: Annotated[
        float, typer.Option(help="How long reading and compiling all programs may take.")
    ] = 600.0,
) -> None:
    """Checks digests, rules, signatures and golden outputs; one line per violation."""
    from ._verify import verify_bundle

    report = verify_bundle(path, timeout_s=timeout_s)
    for note in report.notes:
        print(f"note: {note}")
    for violation in report.violations:
        print(f"violation: {violation}")
    if report.violations:
        raise typer.Exit(1)
    print(f"{path}: every promise kept")


@app.command()
def predict(
    path: BundlePath,
    inputs: Annotated[
        Path | None,
        typer.Option(help="An .npz or .safetensors file with an array for each input."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the outputs: .npz or .safetensors.")
    ] = None,
) -> None:
    """Predicts from a file of inputs, or from the bundle's golden inputs."""
    from ._files import FileReader
    from ._loader import load_bundle
    from ._swap import read_arrays, write_arrays
    from ._verify import golden_arrays

    bundle = load_bundle(path)
    arrays = golden_arrays(FileReader(path))[0] if inputs is None else read_arrays(inputs)
    outputs = bundle(**arrays)
    if out is not None:
        write_arrays(out, outputs)
    for name, array in outputs.items():
        print(f"{name}: {array.dtype} {array.shape}")
        if out is None:
            print(array)


@app.command("swap-weights")
def swap_weights(
    path: BundlePath,
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="The weights: .safetensors or .npz, by name.")
    ],
    out: Annotated[Path, typer.Option(help="The new bundle's directory, named as the model.")],
) -> None:
    """Writes a copy of a bundle with other weights; the programs stay as they are."""
    from ._swap import read_arrays
    from ._swap import swap_weights as swap

    swap(path, read_arrays(new), out)
    print(out)


@app.command()
def diff(
    path: BundlePath,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="The bundle to compare with.")],
) -> None:
    """Lists what can make two bundles predict differently; exits with 1 if anything."""
    from ._diff import diff_bundles

    lines = list(diff_bundles(path, other))
    for line in lines:
        print(line)
    if lines:
        raise typer.Exit(1)
    print("no difference")


def main() -> None:
    """Runs the command line; every error is one message and a non-zero exit code."""
    debug = "--debug" in sys.argv[1:]
    try:
        # Typer knows options of the whole command only in front of the sub-command.
        app(args=[argument for argument in sys.argv[1:] if argument != "--debug"])
    except NitroError as error:
        if debug:
            raise
        sys.exit(f"error: {error}")
    except OSError as error:
        if debug:
            raise
        told = f"`{error.filename}`: {error.strerror}" if error.filename else str(error)
        sys.exit(f"error: {told}.\n  expected: a place that can be read or written")
    # The last stop before the user: whatever it is becomes one message.
    except Exception as error:
        if debug:
            raise
        sys.exit(
            f"error: {type(error).__name__}: {error}\n  fix: run it with --debug and report it"
        )
